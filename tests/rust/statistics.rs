//! What the roundings promise: no bias, the stated variance, and errors that know nothing of each other.
//!
//! Limits are five standard deviations of what is measured (one false alarm in two million runs; seeds are fixed), plus the bias that
//! 8-bit dither leaves by construction: up to s/512 a value (`docs/format.md`).
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod common;

use common::{normal, uniform};
use daf_rs::codec::*;
use daf_rs::dtype::FloatType;
use daf_rs::pool::SlabPool;

const GROUP: usize = 256;
const N: usize = 1 << 20;

/// Normal numbers, where each group's ends are set: range exactly 8, so that s is known.
fn data() -> Vec<f32> {
    let mut s = 11;
    let mut x: Vec<f32> = (0..N)
        .map(|_| (normal(&mut s) as f32).clamp(-4.0, 4.0))
        .collect();
    for g in x.chunks_exact_mut(GROUP) {
        (g[3], g[250]) = (-4.0, 4.0);
    }
    x
}

fn spec(bits: u8, rounding: Rounding, key: u64, channels: bool) -> ValueSpec {
    let geometry = if channels {
        Geometry::Channel {
            rows: N / 128,
            cols: 128,
        }
    } else {
        Geometry::Row { n: N }
    };
    ValueSpec {
        dtype: FloatType::F32,
        bits,
        group_size: GROUP as u16,
        rounding,
        geometry,
        key,
        zero: ZeroPlane::Never,
    }
}

/// s as the encoder stores it: rounded up to 8 bits of mantissa.
fn step(bits: u8) -> f64 {
    let s = 8.0 / f32::from((1u16 << bits) - 1);
    f64::from(f32::from_bits((s.to_bits() + 0xffff) & 0xffff_0000))
}

/// Errors in units of s.
fn errors(x: &[f32], spec: &ValueSpec) -> Vec<f64> {
    let layout = Layout::contiguous(x.len());
    let q = encode_value(Source::from_slice(x), &layout, spec, SlabPool::global(), 2).unwrap();
    let mut y = vec![0f32; x.len()];
    q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 2)
        .unwrap();
    x.iter()
        .zip(&y)
        .map(|(x, y)| (f64::from(*y) - f64::from(*x)) / step(spec.bits))
        .collect()
}

fn mean(e: impl Iterator<Item = f64> + Clone) -> f64 {
    e.clone().sum::<f64>() / e.count() as f64
}

/// Five standard deviations of a mean of `n` numbers of variance `v`.
fn limit(n: usize, v: f64) -> f64 {
    5.0 * (v / n as f64).sqrt()
}

#[test]
fn dither_has_no_bias_and_a_twelfth_of_s_squared() {
    let x = data();
    for bits in 1..=8 {
        let e = errors(&x, &spec(bits, Rounding::Dither, 77, false));
        let bias = mean(e.iter().copied());
        assert!(
            bias.abs() < limit(N, 1.0 / 12.0) + 1.0 / 512.0,
            "{bits} bits: bias {bias} s"
        );
        // The square of a uniform error has variance 1/180.
        let square = mean(e.iter().map(|e| e * e));
        assert!(
            (square - 1.0 / 12.0).abs() < limit(N, 1.0 / 180.0) + 1e-4,
            "{bits} bits: mean square {square} s²"
        );
        // Whatever the value: no bias near the ends, in the middle, or of one sign.
        for (lo, hi) in [
            (-4.0, -2.0),
            (-2.0, 0.0),
            (0.0, 0.1),
            (0.1, 2.0),
            (2.0, 4.0),
        ] {
            let part: Vec<f64> = x
                .iter()
                .zip(&e)
                .filter(|(x, _)| (lo..hi).contains(*x))
                .map(|(_, e)| *e)
                .collect();
            let bias = mean(part.iter().copied());
            assert!(
                bias.abs() < limit(part.len(), 1.0 / 12.0) + 1.0 / 512.0,
                "{bits} bits, {lo}..{hi}: bias {bias} s"
            );
        }
    }
}

#[test]
fn stochastic_has_no_bias_and_a_sixth_of_s_squared() {
    let x = data();
    for bits in [2, 4, 8] {
        let e = errors(&x, &spec(bits, Rounding::Stochastic, 78, false));
        let bias = mean(e.iter().copied());
        assert!(
            bias.abs() < limit(N, 1.0 / 6.0) + 1.0 / 256.0,
            "{bits} bits: bias {bias} s"
        );
        let square = mean(e.iter().map(|e| e * e));
        // 1/6 is the mean over uniform positions between two codes, which coarse codes of normal data only come near to.
        assert!(
            (square - 1.0 / 6.0).abs() < 0.005,
            "{bits} bits: mean square {square} s²"
        );
    }
}

#[test]
fn nearest_has_a_twelfth_of_s_squared() {
    let e = errors(&data(), &spec(4, Rounding::Nearest, 0, false));
    assert!((mean(e.iter().map(|e| e * e)) - 1.0 / 12.0).abs() < 0.002);
    assert!(e.iter().all(|e| e.abs() < 0.5 + 1.0 / 256.0));
}

/// The correlation of two series of errors, each of mean 0 and variance 1/12.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    12.0 * mean(a.iter().zip(b).map(|(a, b)| a * b))
}

#[test]
fn errors_are_independent_of_each_other() {
    let x = data();
    // Constant input apart from the ends of groups: any pattern of the dither shows.
    let flat: Vec<f32> = x
        .iter()
        .enumerate()
        .map(|(i, v)| {
            if matches!(i % GROUP, 3 | 250) {
                *v
            } else {
                0.7
            }
        })
        .collect();
    for x in [&x, &flat] {
        for channels in [false, true] {
            if channels && std::ptr::eq(x, &flat) {
                continue;
            }
            let x = if channels {
                data_by_columns()
            } else {
                x.clone()
            };
            let e = errors(&x, &spec(4, Rounding::Dither, 5, channels));
            // Neighbours, elements that share a random word, steps, groups, blocks, segments.
            for lag in [
                1,
                2,
                4,
                8,
                16,
                31,
                32,
                33,
                64,
                128,
                256,
                257,
                1024,
                32_768,
                65_536,
                16 * 32_768,
            ] {
                let n = N - lag;
                let c = correlation(&e[lag..], &e[..n]);
                assert!(
                    c.abs() < 5.0 / (n as f64).sqrt() + 1e-4,
                    "lag {lag}, channels {channels}: correlation {c}"
                );
            }
            for key in [4, 6, 5 + (1 << 32), 5 ^ (1 << 63), u64::MAX] {
                let c = correlation(&e, &errors(&x, &spec(4, Rounding::Dither, key, channels)));
                assert!(
                    c.abs() < 5.0 / (N as f64).sqrt() + 1e-4,
                    "keys 5 and {key}: correlation {c}"
                );
            }
        }
    }
}

fn data_by_columns() -> Vec<f32> {
    let mut s = 12;
    let mut x: Vec<f32> = (0..N)
        .map(|_| (normal(&mut s) as f32).clamp(-4.0, 4.0))
        .collect();
    for (i, v) in x.iter_mut().enumerate() {
        match i / 128 % GROUP {
            3 => *v = -4.0,
            250 => *v = 4.0,
            _ => {}
        }
    }
    x
}

#[test]
fn errors_are_independent_of_the_values() {
    let x = data();
    let e = errors(&x, &spec(2, Rounding::Dither, 9, false));
    let scale = mean(x.iter().map(|x| f64::from(x * x))).sqrt();
    let c = mean(x.iter().zip(&e).map(|(x, e)| f64::from(*x) / scale * e)) * 12f64.sqrt();
    assert!(c.abs() < 5.0 / (N as f64).sqrt() + 1e-3, "correlation {c}");
}

#[test]
fn a_sum_over_tensors_stays_unbiased() {
    // What a gradient does: many tensors of their own keys, summed. Bias would add up, noise does not.
    let mut s = 3;
    let x: Vec<f32> = (0..4096).map(|_| uniform(&mut s) as f32).collect();
    let rounds = 400;
    let layout = Layout::contiguous(x.len());
    let mut sum = vec![0f64; x.len()];
    for key in 0..rounds {
        let spec = ValueSpec {
            geometry: Geometry::Row { n: x.len() },
            ..spec(2, Rounding::Dither, key, false)
        };
        let q = encode_value(
            Source::from_slice(&x),
            &layout,
            &spec,
            SlabPool::global(),
            1,
        )
        .unwrap();
        let mut y = vec![0f32; x.len()];
        q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 1)
            .unwrap();
        sum.iter_mut()
            .zip(&y)
            .for_each(|(s, y)| *s += f64::from(*y));
    }
    // s is at most 1/3 · (1 + 2^-7), its bias an element at most s/512.
    let s = 1.0 / 3.0 * (1.0 + 1.0 / 128.0);
    let worst = x
        .iter()
        .zip(&sum)
        .map(|(x, sum)| (sum / rounds as f64 - f64::from(*x)).abs())
        .fold(0f64, f64::max);
    // The largest of 4,096 means, each normal: 5.5 standard deviations.
    let limit = s * (5.5 * (1.0f64 / 12.0 / rounds as f64).sqrt() + 1.0 / 512.0);
    assert!(worst < limit, "{worst} above {limit}");
}
