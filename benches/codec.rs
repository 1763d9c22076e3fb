//! The whole value codec, one thread, from memory to memory, with memcpy of the same bytes beside it: what the kernels are tuned for.
//! `benches/README.md` says how to run it and how to read a result. The instruction-set level is the process's (`DAF_ISA`).

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use daf_rs::codec::{
    Geometry, Layout, ReadMode, Rounding, Source, Target, ValueSpec, ZeroPlane, encode_value,
};
use daf_rs::kernels::{Element, Key, try_active};
use daf_rs::pool::SlabPool;
use half::{bf16, f16};

/// Bytes of the tensor: larger than the caches of a core. `DAF_BENCH_MB` sets another size.
fn megabytes() -> usize {
    std::env::var("DAF_BENCH_MB")
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(256)
}

fn value_codec<T: Element>(criterion: &mut Criterion) {
    let isa = try_active().map_or("no level", |isa| isa.name());
    let n = (megabytes() << 20) / size_of::<T>();
    let key = Key::for_block(1, 1);
    let src: Vec<T> = (0..n as u32)
        .map(|i| T::from_f32_finite((key.word(i) >> 8) as f32 / 8_388_608.0 - 1.0))
        .collect();
    let mut dst = src.clone();
    let layout = Layout::contiguous(n);
    let pool = SlabPool::global();
    let mut group = criterion.benchmark_group(format!("codec/{}/{isa}", T::TYPE.name()));
    group.throughput(Throughput::Bytes(size_of_val(&*src) as u64));
    group.bench_function("memcpy", |b| {
        b.iter(|| black_box(&mut dst).copy_from_slice(black_box(&src)))
    });
    let geometries = [
        ("rows", Geometry::Row { n }),
        (
            "channels",
            Geometry::Channel {
                rows: n / 1024,
                cols: 1024,
            },
        ),
    ];
    for (name, geometry) in geometries {
        for bits in [1, 2, 3, 4, 8] {
            let spec = ValueSpec {
                dtype: T::TYPE,
                bits,
                group_size: 256,
                rounding: Rounding::Dither,
                geometry,
                key: 1,
                zero: ZeroPlane::Auto,
            };
            let encode = || encode_value(Source::from_slice(&src), &layout, &spec, pool, 1);
            group.bench_function(format!("encode_{name}/{bits}"), |b| {
                b.iter(|| black_box(encode().is_ok()))
            });
            let Ok(encoded) = encode() else { continue };
            group.bench_function(format!("decode_{name}/{bits}"), |b| {
                b.iter(|| {
                    black_box(
                        encoded
                            .decode_into(Target::from_slice(&mut dst), &layout, ReadMode::Values, 1)
                            .is_ok(),
                    )
                })
            });
        }
    }
    group.finish();
}

fn configured() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(1500))
        .sample_size(10)
        .without_plots()
}

criterion_group! {
    name = benches;
    config = configured();
    targets = value_codec::<f32>, value_codec::<bf16>, value_codec::<f16>
}
criterion_main!(benches);
