//! What the scalar kernels promise, and that every level that this CPU has gives the same bits.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use super::*;

/// Group parameters for finite, non-constant groups: f32 minimum, step rounded up a little, so that codes fit.
fn parameters(min: &[f32], max: &[f32], bits: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let levels = ((1u32 << bits) - 1) as f32;
    let s: Vec<f32> = min
        .iter()
        .zip(max)
        .map(|(min, max)| (max - min) / levels * 1.004)
        .collect();
    let inv = s
        .iter()
        .map(|s| 256.0 / s * (1.0 - 0.5f32.powi(21)))
        .collect();
    (min.to_vec(), s, inv)
}

#[test]
fn dithered_values_are_within_half_a_step() {
    let _env = FpEnv::enter();
    let table = for_isa::<f32>(Isa::Scalar).unwrap();
    let x: Vec<f32> = (0..1000u32)
        .map(|i| (i as f32 * 0.37).sin() * 3.0 - 1.0)
        .collect();
    let groups = x.len().div_ceil(96);
    for bits in 1..=8 {
        let (mut min, mut max) = (vec![0.0; groups], vec![0.0; groups]);
        table.range_rows(&x, 96, false, &mut min, &mut max);
        let (m, s, inv) = parameters(&min, &max, bits);
        let params = CodeParams {
            bits,
            rounding: Rounding::Dither,
            key: Key::for_block(1, 2),
        };
        let mut planes = PlaneBuf::new();
        table.quantize_rows(&x, 96, &m, &inv, &params, 0, &mut planes, 64);
        let c0: Vec<f32> = m
            .iter()
            .zip(&s)
            .map(|(m, s)| m + s * (127.5 / 256.0))
            .collect();
        let step: Vec<f32> = s.iter().map(|s| s / 256.0).collect();
        let mut y = vec![0.0; x.len()];
        table.dequantize_rows(&planes.as_src(), 64, 96, &c0, &step, &params, 0, &mut y);
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let s = s[i / 96];
            assert!(
                (x - y).abs() <= s * 0.503 + 1e-5,
                "{bits} bits, element {i}: {x} became {y}, step {s}"
            );
        }
    }
}
