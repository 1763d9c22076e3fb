//! Plane kernels over one block (32,768 elements) in cache; throughput is in bytes of elements, so that planes of f32 compare with copies.
//!
//! `cargo bench --bench planes`. Names say the instruction set; levels that the CPU lacks are not there.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use daf_rs::kernels::{self, BLOCK_SLOTS, FpEnv, Isa, PLANE_BYTES, Predicate};

fn planes(c: &mut Criterion) {
    let _env = FpEnv::enter();
    // A ReLU's output: half of it zeros, in no order.
    let x: Vec<f32> = (0..BLOCK_SLOTS as u32)
        .map(|i| (i.wrapping_mul(0x9E37_79B9) as i32 as f32).max(0.0))
        .collect();
    let two: Vec<f32> = x.iter().map(|&x| if x > 0.0 { 2.0 } else { 0.0 }).collect();
    let (mut mask, mut out, mut packed) = (
        vec![0; PLANE_BYTES],
        vec![0; PLANE_BYTES],
        vec![0; PLANE_BYTES],
    );
    let mut y = x.clone();
    let mut group = c.benchmark_group("planes/f32");
    group.throughput(Throughput::Bytes(4 * BLOCK_SLOTS as u64));
    for isa in Isa::available() {
        let (Ok(table), Ok(bits)) = (kernels::for_isa::<f32>(isa), kernels::planes_for_isa(isa))
        else {
            continue;
        };
        group.bench_function(BenchmarkId::new("nonzero", isa), |b| {
            b.iter(|| table.nonzero_plane_rows(black_box(&x), &mut mask))
        });
        let predicate = Predicate::GreaterOrNan { t: 0.0 };
        group.bench_function(BenchmarkId::new("predicate", isa), |b| {
            b.iter(|| table.predicate_plane(black_box(&x), predicate, &mut out))
        });
        let floor = vec![f32::NEG_INFINITY; BLOCK_SLOTS / 256];
        group.bench_function(BenchmarkId::new("apply", isa), |b| {
            b.iter(|| table.apply_nonzero_rows(&mask, 0, 256, &floor, black_box(&mut y)))
        });
        group.bench_function(BenchmarkId::new("compact", isa), |b| {
            b.iter(|| bits.compact(black_box(&out), black_box(&mask), &mut packed))
        });
        group.bench_function(BenchmarkId::new("expand", isa), |b| {
            b.iter(|| bits.expand(black_box(&packed), black_box(&mask), &mut out))
        });
        let (zero, value) = (0, u64::from(2f32.to_bits()));
        let words: &[u8] = bytemuck::cast_slice(&two);
        group.bench_function(BenchmarkId::new("match", isa), |b| {
            b.iter(|| bits.match_plane(black_box(words), 4, zero, value, &mut out))
        });
        group.bench_function(BenchmarkId::new("select", isa), |b| {
            b.iter(|| {
                bits.select(
                    black_box(&out),
                    4,
                    zero,
                    value,
                    bytemuck::cast_slice_mut(&mut y),
                )
            })
        });
    }
    group.finish();
}

criterion_group!(benches, planes);
criterion_main!(benches);
