//! Round trips of the value codec over dtype, bits, group size, geometry, layout and content, against the error bound of the format.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod common;

use common::oracle::{self, Oracle};
use common::{Content, bits_of, bound, decode, fill, places, spec_of};
use daf_rs::codec::*;
use daf_rs::dtype::{Float, FloatType};
use daf_rs::pool::SlabPool;
use half::{bf16, f16};
use proptest::prelude::*;

fn check<T: Float>(x: &[T], layout: &Layout, spec: &ValueSpec, what: &str) {
    let pool = SlabPool::new(Default::default());
    let q = encode_value(Source::from_slice(x), layout, spec, &pool, 1).unwrap();
    let y: Vec<T> = decode(&q, layout);
    for (i, b) in bound(x, layout, spec).into_iter().enumerate() {
        let (at, limit) = b.unwrap();
        let same = bits_of(x[at]) == bits_of(y[at]);
        let (x, y) = (x[at].to_f32(), y[at].to_f32());
        let error = (f64::from(x) - f64::from(y)).abs();
        assert!(
            same || error <= limit,
            "{what}: element {i} is {x:e}, came back {y:e}, limit {limit:e}"
        );
    }
    assert_eq!(pool.stats().live, q_bytes(&q));
    drop(q);
    assert_eq!(pool.stats().live, 0);
}

fn q_bytes(q: &Encoded) -> usize {
    q.stored_bytes() - q.overhead_bytes()
}

fn all_of<T: Float>() {
    let lens = [0, 1, 31, 32, 33, 255, 257, 4_099, 32_768, 32_769, 70_001];
    for content in Content::ALL {
        for (i, &n) in lens.iter().enumerate() {
            for bits in 1..=8u8 {
                let rounding = [Rounding::Dither, Rounding::Stochastic, Rounding::Nearest]
                    [(i + usize::from(bits)) % 3];
                let group = [32, 64, 128, 256, 512, 1024][(i * 5 + usize::from(bits)) % 6];
                let zero = [ZeroPlane::Auto, ZeroPlane::Always, ZeroPlane::Never]
                    [(i + usize::from(bits) / 3) % 3];
                let x: Vec<T> = fill(content, n, bits.into());
                let spec = ValueSpec {
                    rounding,
                    group_size: group,
                    zero,
                    ..spec_of(T::TYPE, bits, Geometry::Row { n })
                };
                check(
                    &x,
                    &Layout::contiguous(n),
                    &spec,
                    &format!("{content:?} {spec:?}"),
                );
            }
        }
    }
}

#[test]
fn row_groups_f32() {
    all_of::<f32>();
}

#[test]
fn row_groups_f16() {
    all_of::<f16>();
}

#[test]
fn row_groups_bf16() {
    all_of::<bf16>();
}

#[test]
fn channel_groups_at_every_raggedness() {
    for (i, rows) in [1usize, 5, 128, 255, 257, 600].into_iter().enumerate() {
        for (j, cols) in [1usize, 3, 8, 16, 65, 128, 130, 300]
            .into_iter()
            .enumerate()
        {
            for content in Content::ALL {
                let x: Vec<f32> = fill(content, rows * cols, (rows * cols) as u64);
                let bits = 1 + ((i * 8 + j) % 8) as u8;
                let rounding =
                    [Rounding::Dither, Rounding::Stochastic, Rounding::Nearest][(i + j) % 3];
                let group = [32, 256, 64, 1024][(i + 2 * j) % 4];
                let zero = [ZeroPlane::Auto, ZeroPlane::Always, ZeroPlane::Never][(i + j / 2) % 3];
                let spec = ValueSpec {
                    rounding,
                    group_size: group,
                    zero,
                    ..spec_of(FloatType::F32, bits, Geometry::Channel { rows, cols })
                };
                check(
                    &x,
                    &Layout::contiguous(rows * cols),
                    &spec,
                    &format!("{content:?} {spec:?}"),
                );
            }
        }
    }
}

#[test]
fn gaps_are_skipped_and_left_alone() {
    // (sizes, strides): rows at a pitch, a transposed slice, every second element, three dimensions with two gaps.
    let views: [(&[i64], &[i64]); 4] = [
        (&[300, 70], &[100, 1]),
        (&[70, 300], &[1, 100]),
        (&[9_000], &[2]),
        (&[20, 30, 40], &[2_000, 60, 1]),
    ];
    for (sizes, strides) in views {
        let layout = Layout::from_strided(sizes, strides);
        let x: Vec<f32> = fill(Content::Normal, layout.span(), 3);
        let n = layout.len();
        let cols = *sizes.iter().min().unwrap() as usize;
        for geometry in [
            Geometry::Row { n },
            Geometry::Channel {
                rows: n / cols,
                cols,
            },
        ] {
            for zero in [ZeroPlane::Never, ZeroPlane::Always] {
                let spec = ValueSpec {
                    zero,
                    ..spec_of(FloatType::F32, 4, geometry)
                };
                check(
                    &x,
                    &layout,
                    &spec,
                    &format!("{sizes:?} {strides:?} {geometry:?}"),
                );
                let q = encode_value(
                    Source::from_slice(&x),
                    &layout,
                    &spec,
                    SlabPool::global(),
                    1,
                )
                .unwrap();
                let mut y = vec![f32::NAN; layout.span()];
                q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 1)
                    .unwrap();
                assert_eq!(y.iter().filter(|v| !v.is_nan()).count(), n);
                // The same elements without gaps give the same bytes, and so the same values.
                let dense: Vec<f32> = y
                    .iter()
                    .zip(&x)
                    .filter(|(y, _)| !y.is_nan())
                    .map(|(_, x)| *x)
                    .collect();
                let d = encode_value(
                    Source::from_slice(&dense),
                    &Layout::contiguous(n),
                    &spec,
                    SlabPool::global(),
                    1,
                )
                .unwrap();
                let dense: Vec<f32> = decode(&d, &Layout::contiguous(n));
                assert!(y.iter().filter(|v| !v.is_nan()).eq(&dense));
            }
        }
    }
}

/// The strides of a view: memory order by a permutation, a factor of gaps at each level.
fn strides(sizes: &[i64], order: &[usize], gaps: &[i64]) -> Vec<i64> {
    let mut out = vec![0; sizes.len()];
    let mut step = 1;
    for (&d, gap) in order.iter().zip(gaps) {
        out[d] = step * gap;
        step = out[d] * sizes[d].max(1);
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any view of any content in any spec comes back within the bound, the same with another number of threads, the same through a
    /// byte string, and byte for byte as the second implementation in `common::oracle` says.
    #[test]
    fn any_view_in_any_spec(
        dtype in 0u8..3,
        sizes in prop::collection::vec(1i64..40, 1..4),
        order in Just([0usize, 1, 2]).prop_shuffle(),
        gaps in prop::array::uniform3(1i64..3),
        columns in any::<prop::sample::Index>(),
        channel in any::<bool>(),
        bits in 1u8..=8,
        log_group in 5u32..=10,
        rounding in 0u8..3,
        zero in 0usize..3,
        content in 0..Content::ALL.len(),
        key in any::<u64>(),
    ) {
        let order: Vec<usize> = order.into_iter().filter(|d| *d < sizes.len()).collect();
        let layout = Layout::from_strided(&sizes, &strides(&sizes, &order, &gaps));
        let n = layout.len();
        let divisors: Vec<usize> = (1..=n).filter(|c| n.is_multiple_of(*c)).collect();
        let cols = divisors[columns.index(divisors.len())];
        let geometry = if channel { Geometry::Channel { rows: n / cols, cols } } else { Geometry::Row { n } };
        let spec = ValueSpec {
            dtype: FloatType::ALL[usize::from(dtype)],
            bits,
            group_size: 1 << log_group,
            rounding: [Rounding::Dither, Rounding::Stochastic, Rounding::Nearest][usize::from(rounding)],
            geometry,
            key,
            zero: [ZeroPlane::Auto, ZeroPlane::Always, ZeroPlane::Never][zero],
        };
        match spec.dtype {
            FloatType::F32 => against_oracle::<f32>(&layout, &spec, Content::ALL[content]),
            FloatType::F16 => against_oracle::<f16>(&layout, &spec, Content::ALL[content]),
            FloatType::BF16 => against_oracle::<bf16>(&layout, &spec, Content::ALL[content]),
        }
    }
}

fn against_oracle<T: Float + oracle::Element>(layout: &Layout, spec: &ValueSpec, content: Content) {
    let x: Vec<T> = fill(content, layout.span(), spec.key);
    check(
        &x,
        layout,
        spec,
        &format!("{content:?} {layout:?} {spec:?}"),
    );
    let q = encode_value(Source::from_slice(&x), layout, spec, SlabPool::global(), 2).unwrap();
    let memory_order: Vec<T> = places(layout, x.len())
        .into_iter()
        .map(|at| x[at])
        .collect();
    let second = Oracle {
        bits: spec.bits.into(),
        group: spec.group_size.into(),
        rounding: spec.rounding as u8,
        channels: match spec.geometry {
            Geometry::Row { .. } => None,
            Geometry::Channel { rows, cols } => Some((rows, cols)),
        },
        key: spec.key,
        zero: spec.zero as u8,
    }
    .encode(&memory_order);
    let shape = TensorShape {
        sizes: vec![layout.len() as i64],
        strides: vec![1],
    };
    let bytes = q.to_bytes(&shape).unwrap();
    let parts: Vec<u8> = second.concat();
    let end = bytes.len() - 4;
    assert!(
        bytes[end - parts.len()..end] == parts[..],
        "other bytes than docs/format.md says: {content:?} {layout:?} {spec:?}"
    );
    let (back, _) = Encoded::from_bytes(&bytes, SlabPool::global()).unwrap();
    assert!(
        back == q
            && back.metadata_bytes() == q.metadata_bytes()
            && back.has_zero_plane() == q.has_zero_plane()
    );
}

/// Several blocks and segments, so that keys, tiles and threads matter.
#[test]
fn large_tensors_match_the_second_implementation() {
    for (i, content) in [
        Content::Normal,
        Content::Relu,
        Content::NonFinite,
        Content::Offset,
        Content::Sparse,
    ]
    .into_iter()
    .enumerate()
    {
        let geometries = [
            Geometry::Row { n: 600_003 },
            Geometry::Channel {
                rows: 2_100,
                cols: 130,
            },
            Geometry::Channel {
                rows: 20_000,
                cols: 24,
            },
        ];
        for geometry in geometries {
            let spec = ValueSpec {
                rounding: [Rounding::Dither, Rounding::Nearest][i % 2],
                ..spec_of(FloatType::F32, 1 + i as u8, geometry)
            };
            against_oracle::<f32>(&Layout::contiguous(geometry.len()), &spec, content);
        }
    }
}

#[test]
fn readers_of_masks_and_of_signs_are_served() {
    for geometry in [
        Geometry::Row { n: 70_000 },
        Geometry::Channel {
            rows: 700,
            cols: 100,
        },
    ] {
        let x: Vec<f32> = fill(Content::Relu, 70_000, 9);
        let layout = Layout::contiguous(x.len());
        let spec = ValueSpec {
            zero: ZeroPlane::Always,
            bits: 1,
            ..spec_of(FloatType::F32, 1, geometry)
        };
        let q = encode_value(
            Source::from_slice(&x),
            &layout,
            &spec,
            SlabPool::global(),
            1,
        )
        .unwrap();
        assert!(q.has_zero_plane());
        let mut y = vec![9f32; x.len()];
        q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Mask, 1)
            .unwrap();
        assert!(
            x.iter()
                .zip(&y)
                .all(|(x, y)| *y == f32::from(u8::from(*x > 0.0)))
        );
        q.decode_into(
            Target::from_slice(&mut y),
            &layout,
            ReadMode::ValuesPositive,
            1,
        )
        .unwrap();
        assert!(x.iter().zip(&y).all(|(x, y)| (*x > 0.0) == (*y > 0.0)));
        q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 1)
            .unwrap();
        assert!(y.iter().any(|y| *y < 0.0), "values are not clamped");
        let never = ValueSpec {
            zero: ZeroPlane::Never,
            ..spec
        };
        let q = encode_value(
            Source::from_slice(&x),
            &layout,
            &never,
            SlabPool::global(),
            1,
        )
        .unwrap();
        let e = q
            .decode_into(Target::from_slice(&mut y), &layout, ReadMode::Mask, 1)
            .unwrap_err();
        assert!(e.to_string().contains("ZeroPlane::Always"), "{e}");
    }
}

#[test]
fn many_zeros_cost_one_bit_each() {
    // More than 8 MiB, from where values are written past the caches.
    let n = 2_300_001;
    let x: Vec<f32> = fill(Content::Relu, n, 1);
    let spec = spec_of(FloatType::F32, 4, Geometry::Row { n });
    let q = encode_value(
        Source::from_slice(&x),
        &Layout::contiguous(n),
        &spec,
        SlabPool::global(),
        1,
    )
    .unwrap();
    let bits = 8.0 * (q.stored_bytes() - q.metadata_bytes()) as f64 / n as f64;
    assert!(
        (bits - 3.0).abs() < 0.02,
        "{bits} bits an element, 1 + 4/2 expected"
    );
    for threads in [1, 2] {
        let mut y = vec![7f32; n];
        q.decode_into(
            Target::from_slice(&mut y),
            &Layout::contiguous(n),
            ReadMode::Values,
            threads,
        )
        .unwrap();
        assert!(x.iter().zip(&y).all(|(x, y)| (*x == 0.0) <= (*y == 0.0)));
        let most = x.iter().fold(0f32, |a, x| a.max(*x));
        assert!(
            x.iter()
                .zip(&y)
                .all(|(x, y)| (x - y).abs() <= most / 15.0 * 0.54)
        );
    }
}

#[test]
fn wrong_arguments_say_what_is_allowed() {
    let x = [0f32; 100];
    let (layout, pool) = (Layout::contiguous(100), SlabPool::global());
    let good = spec_of(FloatType::F32, 4, Geometry::Row { n: 100 });
    let fails = |spec: ValueSpec, layout: &Layout| {
        let e = encode_value(Source::from_slice(&x), layout, &spec, pool, 1).unwrap_err();
        assert!(matches!(e, daf_rs::Error::InvalidArgument(_)));
        e.to_string()
    };
    assert!(fails(ValueSpec { bits: 0, ..good }, &layout).contains("1 to 8"));
    assert!(fails(ValueSpec { bits: 9, ..good }, &layout).contains("1 to 8"));
    assert!(
        fails(
            ValueSpec {
                group_size: 48,
                ..good
            },
            &layout
        )
        .contains("powers of two from 32 to 1024")
    );
    assert!(
        fails(
            ValueSpec {
                geometry: Geometry::Row { n: 99 },
                ..good
            },
            &layout
        )
        .contains("99")
    );
    assert!(
        fails(
            ValueSpec {
                geometry: Geometry::Row { n: 101 },
                ..good
            },
            &Layout::contiguous(101)
        )
        .contains("400 bytes")
    );
    let q = encode_value(Source::from_slice(&x), &layout, &good, pool, 1).unwrap();
    let e = q
        .decode_into(
            Target::from_slice(&mut [0f32; 100]),
            &Layout::contiguous(99),
            ReadMode::Values,
            1,
        )
        .unwrap_err();
    assert!(e.to_string().contains("100 elements"), "{e}");
    let e = q
        .decode_into(
            Target::from_slice(&mut [0f32; 99]),
            &layout,
            ReadMode::Values,
            1,
        )
        .unwrap_err();
    assert!(e.to_string().contains("396 bytes"), "{e}");
}
