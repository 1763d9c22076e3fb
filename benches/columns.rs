//! Column kernels over tensors that no cache holds, beside a plain copy of the same bytes; throughput is in bytes of source.
//!
//! `cargo bench --bench columns`. Names say the instruction set; levels that the CPU lacks are not there. On a shared machine compare the
//! lower ends: the copy and the kernels do not run at the same moment.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use daf_rs::kernels::{
    self, CodeParams, ColumnShape, Columns, Element, FpEnv, Isa, KernelTable, Key, PlaneBuf,
    Prefetch, Rounding,
};
use half::bf16;

/// Bytes of source.
const BYTES: usize = 64 << 20;

/// Rows of a group, and of a tile.
const ROWS: usize = 256;

/// Width of the slabs that `cols` columns are cut into.
fn slab(cols: usize) -> usize {
    cols.div_ceil(cols.div_ceil(128)).next_multiple_of(8)
}

/// The row groups in the order in which the encoder takes them: slab after slab of the same rows.
fn units<T>(src: &[T], cols: usize) -> impl Iterator<Item = Columns<'_, T>> {
    let width = slab(cols);
    let starts = (0..src.len() / cols / ROWS)
        .flat_map(move |t| (0..cols).step_by(width).map(move |c| (t, c)));
    starts.map(move |(t, c)| Columns {
        src: &src[t * ROWS * cols + c..],
        shape: ColumnShape {
            pitch: cols,
            rows: ROWS,
            width: width.min(cols - c),
            first_row: 0,
        },
    })
}

fn quantize<T: Element>(
    table: &KernelTable<T>,
    src: &[T],
    cols: usize,
    params: &CodeParams,
    planes: &mut PlaneBuf,
) {
    let (mut min, mut max, mut inv) = ([0.0; 128], [0.0; 128], [0.0; 128]);
    let levels = ((1u32 << params.bits) - 1) as f32;
    let mut next = units(src, cols).skip(1);
    for unit in units(src, cols) {
        let mut ahead = next
            .next()
            .map_or(Prefetch::none(), |next| Prefetch::columns(&next));
        table.range_cols(&unit, false, &mut ahead, &mut min, &mut max);
        for ((inv, min), max) in inv.iter_mut().zip(&min).zip(&max) {
            *inv = 256.0 * levels / (max - min) * (1.0 - 1e-6);
        }
        table.quantize_cols(&unit, &min, &inv, params, &mut ahead, planes);
    }
}

fn dequantize<T: Element>(
    table: &KernelTable<T>,
    dst: &mut [T],
    cols: usize,
    params: &CodeParams,
    planes: &PlaneBuf,
) {
    let width = slab(cols);
    for t in 0..dst.len() / cols / ROWS {
        for c in (0..cols).step_by(width) {
            let shape = ColumnShape {
                pitch: cols,
                rows: ROWS,
                width: width.min(cols - c),
                first_row: 0,
            };
            table.dequantize_cols(
                &planes.as_src(),
                &shape,
                &[0.5; 128],
                &[0.01; 128],
                params,
                true,
                &mut dst[t * ROWS * cols + c..],
            );
        }
    }
}

fn columns<T: Element>(c: &mut Criterion) {
    let _env = FpEnv::enter();
    let params = CodeParams {
        bits: 4,
        rounding: Rounding::Dither,
        key: Key::for_block(1, 0),
    };
    for cols in [64, 768, 1000, 1024] {
        let len = BYTES / size_of::<T>() / cols / ROWS * ROWS * cols;
        let src: Vec<T> = (0..len as u32)
            .map(|i| T::from_f32_finite((i.wrapping_mul(0x9E37_79B9) >> 8) as f32))
            .collect();
        let mut dst = src.clone();
        let mut planes = PlaneBuf::new();
        let mut group = c.benchmark_group(format!("columns/{}/{cols}", T::TYPE.name()));
        group
            .sample_size(20)
            .throughput(Throughput::Bytes((len * size_of::<T>()) as u64));
        group.bench_function("copy", |b| {
            b.iter(|| black_box(&mut dst).copy_from_slice(black_box(&src)))
        });
        for isa in Isa::available() {
            let Ok(table) = kernels::for_isa::<T>(isa) else {
                continue;
            };
            if isa == Isa::Scalar {
                continue;
            }
            group.bench_function(BenchmarkId::new("quantize", isa), |b| {
                b.iter(|| quantize(table, black_box(&src), cols, &params, &mut planes))
            });
            group.bench_function(BenchmarkId::new("dequantize", isa), |b| {
                b.iter(|| dequantize(table, black_box(&mut dst), cols, &params, &planes))
            });
        }
        group.finish();
    }
}

criterion_group!(benches, columns::<f32>, columns::<bf16>);
criterion_main!(benches);
