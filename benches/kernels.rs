//! Throughput of every kernel at every level that this CPU has, over data from the second-level cache, in bytes of the elements, with memcpy
//! of the same bytes beside it. `benches/README.md` says how to run it and how to read a result.

use std::hint::black_box;
use std::time::Duration;

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use daf_rs::dtype::Float;
use daf_rs::kernels::{
    BLOCK_SLOTS, CodeParams, ColumnShape, Columns, Element, FpEnv, Isa, KernelTable, Key,
    PLANE_BYTES, PlaneBuf, Predicate, Prefetch, Rounding, RowsAhead, for_isa, planes_for_isa,
};
use half::{bf16, f16};

/// Elements of a group.
const GROUP: usize = 256;
/// Groups of a block.
const GROUPS: usize = BLOCK_SLOTS / GROUP;
/// Columns and pitch of the channel tile: one slab of 128 channels, densely stored.
const WIDTH: usize = 128;

/// Uniform in (-1, 1), as exactly as the type holds it.
fn elements<T: Float>(n: usize) -> Vec<T> {
    let key = Key::for_block(1, 1);
    (0..n as u32)
        .map(|i| T::from_f32_finite((key.word(i) >> 8) as f32 / 8_388_608.0 - 1.0))
        .collect()
}

fn params(bits: usize) -> CodeParams {
    CodeParams {
        bits,
        rounding: Rounding::Dither,
        key: Key::for_block(2, 0),
    }
}

/// Parameters that fit [`elements`].
fn scales(bits: usize) -> ([f32; GROUPS], [f32; GROUPS]) {
    let s = 2.0 / ((1u32 << bits) - 1) as f32;
    ([-1.0; GROUPS], [256.0 / s * 0.999; GROUPS])
}

/// One block of every kernel that reads or writes elements of type `T`.
fn element_kernels<T: Element>(criterion: &mut Criterion) {
    let _env = FpEnv::enter();
    let dtype = T::TYPE.name();
    let src = elements::<T>(BLOCK_SLOTS);
    let mut group = criterion.benchmark_group(format!("block/{dtype}"));
    group.throughput(Throughput::Bytes(size_of_val(&*src) as u64));
    let mut dst = src.clone();
    group.bench_function("memcpy", |b| {
        b.iter(|| black_box(&mut dst).copy_from_slice(black_box(&src)))
    });
    for isa in Isa::available() {
        let Ok(table) = for_isa::<T>(isa) else {
            continue;
        };
        rows(&mut group, table, &src);
        columns(&mut group, table, &src);
        planes(&mut group, table, &src);
    }
    group.finish();
}

fn rows<T: Element>(group: &mut BenchmarkGroup<'_, WallTime>, table: &KernelTable<T>, src: &[T]) {
    let isa = table.isa();
    let (mut min, mut max) = ([0.0; GROUPS], [0.0; GROUPS]);
    for (name, skip_zeros) in [("range_rows", false), ("range_rows_nonzero", true)] {
        group.bench_function(format!("{name}/{isa}"), |b| {
            b.iter(|| {
                table.range_rows(
                    black_box(src),
                    GROUP,
                    skip_zeros,
                    RowsAhead::none(),
                    &mut min,
                    &mut max,
                )
            })
        });
    }
    let mut staging = PlaneBuf::new();
    let mut dst = src.to_vec();
    for bits in 1..=8 {
        let (m, inv) = scales(bits);
        let code = params(bits);
        group.bench_function(format!("quantize_rows/{isa}/{bits}"), |b| {
            b.iter(|| {
                table.quantize_rows(
                    black_box(src),
                    GROUP,
                    &m,
                    &inv,
                    &code,
                    0,
                    RowsAhead::none(),
                    &mut staging,
                    0,
                )
            })
        });
        group.bench_function(format!("dequantize_rows/{isa}/{bits}"), |b| {
            b.iter(|| {
                let planes = black_box(&staging).as_src();
                table.dequantize_rows(&planes, 0, GROUP, &m, &inv, &code, 0, false, &mut dst);
            })
        });
    }
}

fn columns<T: Element>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    table: &KernelTable<T>,
    src: &[T],
) {
    let isa = table.isa();
    let shape = ColumnShape {
        pitch: WIDTH,
        rows: BLOCK_SLOTS / WIDTH,
        width: WIDTH,
        first_row: 0,
    };
    let columns = Columns { src, shape };
    let (mut min, mut max) = ([0.0; WIDTH], [0.0; WIDTH]);
    group.bench_function(format!("range_cols/{isa}"), |b| {
        b.iter(|| {
            table.range_cols(
                black_box(&columns),
                false,
                &mut Prefetch::none(),
                &mut min,
                &mut max,
            )
        })
    });
    let mut staging = PlaneBuf::new();
    let mut dst = src.to_vec();
    for bits in 1..=8 {
        let (m, inv) = scales(bits);
        let code = params(bits);
        group.bench_function(format!("quantize_cols/{isa}/{bits}"), |b| {
            b.iter(|| {
                table.quantize_cols(
                    black_box(&columns),
                    &m,
                    &inv,
                    &code,
                    &mut Prefetch::none(),
                    &mut staging,
                )
            })
        });
        group.bench_function(format!("dequantize_cols/{isa}/{bits}"), |b| {
            b.iter(|| {
                let planes = black_box(&staging).as_src();
                table.dequantize_cols(&planes, &shape, &m, &inv, &code, false, &mut dst);
            })
        });
    }
}

fn planes<T: Element>(group: &mut BenchmarkGroup<'_, WallTime>, table: &KernelTable<T>, src: &[T]) {
    let isa = table.isa();
    let (mut plane, mut other) = (vec![0; PLANE_BYTES], vec![0; PLANE_BYTES]);
    let mut dst = src.to_vec();
    group.bench_function(format!("nonzero_plane_rows/{isa}"), |b| {
        b.iter(|| table.nonzero_plane_rows(black_box(src), &mut plane))
    });
    group.bench_function(format!("apply_nonzero_rows/{isa}"), |b| {
        b.iter(|| {
            table.apply_nonzero_rows(
                black_box(&plane),
                0,
                GROUP,
                &[f32::NEG_INFINITY; GROUPS],
                &mut dst,
            )
        })
    });
    for (name, predicate) in [
        ("greater", Predicate::GreaterOrNan { t: 0.0 }),
        ("within", Predicate::Within { lo: -0.5, hi: 0.5 }),
    ] {
        group.bench_function(format!("predicate_plane_{name}/{isa}"), |b| {
            b.iter(|| table.predicate_plane(black_box(src), predicate, &mut plane))
        });
    }
    group.bench_function(format!("sign_planes/{isa}"), |b| {
        b.iter(|| table.sign_planes(black_box(src), &mut plane, &mut other))
    });
    group.bench_function(format!("sign_values/{isa}"), |b| {
        b.iter(|| table.sign_values(black_box(&plane), &other, &mut dst))
    });
}

/// One block of the kernels over bits and plain words, in bytes of the plane (compact, expand) or of the words.
fn bit_kernels(criterion: &mut Criterion) {
    let key = Key::for_block(3, 3);
    let mask: Vec<u8> = (0..PLANE_BYTES as u32).map(|i| key.word(i) as u8).collect();
    let mut packed = vec![0; PLANE_BYTES];
    let mut out = vec![0; PLANE_BYTES];
    let mut group = criterion.benchmark_group("plane");
    for isa in Isa::available() {
        let Ok(table) = planes_for_isa(isa) else {
            continue;
        };
        group.throughput(Throughput::Bytes(PLANE_BYTES as u64));
        group.bench_function(format!("compact/{isa}"), |b| {
            b.iter(|| table.compact(black_box(&mask), &mask, &mut packed))
        });
        group.bench_function(format!("expand/{isa}"), |b| {
            b.iter(|| table.expand(black_box(&packed), &mask, &mut out))
        });
        for word in [1, 2, 4, 8] {
            let mut words = vec![0; BLOCK_SLOTS * word];
            group.throughput(Throughput::Bytes(words.len() as u64));
            group.bench_function(format!("select/{isa}/{word}"), |b| {
                b.iter(|| table.select(black_box(&mask), word, 0, 0x3f, &mut words))
            });
            group.bench_function(format!("match_plane/{isa}/{word}"), |b| {
                b.iter(|| table.match_plane(black_box(&words), word, 0, 0x3f, &mut out))
            });
        }
    }
    group.finish();
}

/// Short measurements: the full run has some 300 of them.
fn configured() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(300))
        .sample_size(20)
        .without_plots()
}

criterion_group! {
    name = benches;
    config = configured();
    targets = element_kernels::<f32>, element_kernels::<f16>, element_kernels::<bf16>, bit_kernels
}
criterion_main!(benches);
