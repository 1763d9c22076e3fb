//! Round trips of the value codec over dtype, bits, group size, geometry, layout and content, against the error bound of the format.

mod common;

use common::{Content, bound, decode, fill, spec_of};
use daf_rs::codec::*;
use daf_rs::dtype::{Float, FloatType};
use daf_rs::pool::SlabPool;
use half::{bf16, f16};

fn check<T: Float>(x: &[T], layout: &Layout, spec: &ValueSpec, what: &str) {
    let pool = SlabPool::new(Default::default());
    let q = encode_value(Source::from_slice(x), layout, spec, &pool, 1).unwrap();
    let y: Vec<T> = decode(&q, layout);
    for (i, b) in bound(x, layout, spec).into_iter().enumerate() {
        let Some((at, limit)) = b else { continue };
        let (x, y) = (x[at].to_f32(), y[at].to_f32());
        let same = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
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
