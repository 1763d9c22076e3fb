//! Contents, specs and error bounds shared by the tests of the codec.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod oracle;

use daf_rs::codec::*;
use daf_rs::dtype::{Float, FloatType};
use daf_rs::kernels::rng::mix64;

/// What a test tensor holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Content {
    Normal,
    HeavyTails,
    OutlierChannels,
    Constant,
    Zeros,
    Relu,
    Sparse,
    Subnormal,
    NonFinite,
    Sorted,
    Offset,
    Extremes,
    RandomBits,
}

impl Content {
    pub(crate) const ALL: [Content; 13] = [
        Content::Normal,
        Content::HeavyTails,
        Content::OutlierChannels,
        Content::Constant,
        Content::Zeros,
        Content::Relu,
        Content::Sparse,
        Content::Subnormal,
        Content::NonFinite,
        Content::Sorted,
        Content::Offset,
        Content::Extremes,
        Content::RandomBits,
    ];
}

/// Uniform in (0, 1).
pub(crate) fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    ((mix64(*state) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

pub(crate) fn normal(state: &mut u64) -> f64 {
    let (a, b) = (uniform(state), uniform(state));
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// `n` elements of a content; equal seeds give equal elements.
pub(crate) fn fill<T: Float>(content: Content, n: usize, seed: u64) -> Vec<T> {
    let mut s = seed ^ mix64(content as u64 + 1);
    let of = |x: f64| {
        if (x as f32).is_finite() {
            T::from_f32_finite(x as f32)
        } else {
            T::from_f32_finite(0.0)
        }
    };
    let bits = |b: u32| -> T {
        let b = if size_of::<T>() == 4 { b } else { b >> 16 };
        bytemuck::pod_read_unaligned(&b.to_le_bytes()[..size_of::<T>()])
    };
    let smallest = f64::from(T::smallest_positive().to_f32());
    (0..n)
        .map(|i| match content {
            Content::Normal => of(normal(&mut s)),
            Content::HeavyTails => {
                let x = normal(&mut s);
                of(x * x * x * x * x)
            }
            Content::OutlierChannels => of(normal(&mut s) * if i % 64 == 5 { 50.0 } else { 1.0 }),
            Content::Constant => of(0.1),
            Content::Zeros => {
                if i % 5 == 0 {
                    of(-0.0)
                } else {
                    of(0.0)
                }
            }
            Content::Relu => of(normal(&mut s).max(0.0)),
            Content::Sparse => of(if uniform(&mut s) < 0.02 {
                normal(&mut s)
            } else {
                0.0
            }),
            Content::Subnormal => of(smallest * (uniform(&mut s) * 100.0).floor()),
            Content::NonFinite => match (uniform(&mut s) * 600.0) as u32 {
                0 => bits(0x7f80_0000 | if size_of::<T>() == 2 { 0x7c00_0000 } else { 0 }),
                1 => bits(0xffc1_2345),
                2 => bits(0x7fff_ffff),
                _ => of(normal(&mut s)),
            },
            Content::Sorted => of(i as f64 * 1e-3 - 5.0),
            Content::Offset => of(1000.0 + 0.01 * uniform(&mut s)),
            Content::Extremes => of(match i % 3 {
                0 => 60_000.0 * uniform(&mut s),
                1 => -65_504.0,
                _ => 1e-7,
            }),
            Content::RandomBits => {
                s = s.wrapping_add(1);
                bits((mix64(s) >> 32) as u32)
            }
        })
        .collect()
}

/// A spec with the usual choices.
pub(crate) fn spec_of(dtype: FloatType, bits: u8, geometry: Geometry) -> ValueSpec {
    ValueSpec {
        dtype,
        bits,
        group_size: 256,
        rounding: Rounding::Dither,
        geometry,
        key: 42,
        zero: ZeroPlane::Auto,
    }
}

/// Decodes into a span of memory filled with -777.
pub(crate) fn decode<T: Float>(q: &Encoded, layout: &Layout) -> Vec<T> {
    let mut y = vec![T::from_f32_finite(-777.0); layout.span()];
    q.decode_into(Target::from_slice(&mut y), layout, ReadMode::Values, 1)
        .unwrap();
    y
}

/// The bytes of an element.
pub(crate) fn bits_of<T: Float>(x: T) -> Vec<u8> {
    bytemuck::bytes_of(&x).to_vec()
}

/// Where the elements of a view lie, in memory order.
pub(crate) fn places(layout: &Layout, span: usize) -> Vec<usize> {
    let numbers: Vec<u32> = (0..span as u32).collect();
    let pool = daf_rs::pool::SlabPool::new(Default::default());
    let kind = ElementKind::Opaque { bytes: 4 };
    let q = encode_raw(Source::from_slice(&numbers), layout, kind, &pool, 1).unwrap();
    let mut out = vec![0u32; layout.len()];
    q.decode_into(
        Target::from_slice(&mut out),
        &Layout::contiguous(layout.len()),
        ReadMode::Values,
        1,
    )
    .unwrap();
    out.into_iter().map(|i| i as usize).collect()
}

fn ulp(x: f64, dtype: FloatType) -> f64 {
    let (digits, least) = match dtype {
        FloatType::F32 => (23, -149),
        FloatType::F16 => (10, -24),
        FloatType::BF16 => (7, -133),
    };
    if x == 0.0 {
        return 2f64.powi(least);
    }
    2f64.powi((x.abs().log2().floor() as i32 - digits).max(least))
}

/// Per element (in memory order): its place and the largest error allowed, against the true range of its group. `None` never occurs
/// for finite groups; in groups with a non-finite element the limit is 0, since they come back bit by bit.
pub(crate) fn bound<T: Float>(
    x: &[T],
    layout: &Layout,
    spec: &ValueSpec,
) -> Vec<Option<(usize, f64)>> {
    let at = places(layout, x.len());
    let tiling = Tiling::new(spec.geometry, spec.group_size).unwrap();
    let n = at.len();
    let groups: Vec<Vec<usize>> = match spec.geometry {
        Geometry::Row { .. } => (0..n)
            .collect::<Vec<_>>()
            .chunks(32_768)
            .flat_map(|b| {
                b.chunks(spec.group_size.into())
                    .map(<[usize]>::to_vec)
                    .collect::<Vec<_>>()
            })
            .collect(),
        Geometry::Channel { rows, cols } => {
            let ng = rows.div_ceil(spec.group_size.into());
            (0..ng)
                .flat_map(|g| {
                    let (a, b) = (tiling.group_start(g), tiling.group_start(g + 1));
                    (0..cols).map(move |c| (a..b).map(|r| r * cols + c).collect())
                })
                .collect()
        }
    };
    let mut out = vec![None; n];
    let levels = f64::from((1u32 << spec.bits) - 1);
    let share = if spec.rounding == Rounding::Stochastic {
        1.0
    } else {
        0.5
    };
    for g in groups {
        let values: Vec<f64> = g.iter().map(|&e| f64::from(x[at[e]].to_f32())).collect();
        let finite = values.iter().all(|v| v.is_finite());
        let (lo, hi) = values
            .iter()
            .fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
        let most = lo.abs().max(hi.abs());
        let limit = if finite {
            (hi - lo) / levels * share * (1.0 + 2f64.powi(-4)) * (1.0 + 2f64.powi(-7))
                + 2.0 * ulp(most, spec.dtype)
        } else {
            0.0
        };
        for e in g {
            out[e] = Some((at[e], limit));
        }
    }
    out
}
