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
        table.range_rows(&x, 96, false, RowsAhead::until(&x[..]), &mut min, &mut max);
        let (m, s, inv) = parameters(&min, &max, bits);
        let params = CodeParams {
            bits,
            rounding: Rounding::Dither,
            key: Key::for_block(1, 2),
        };
        let mut planes = PlaneBuf::new();
        table.quantize_rows(
            &x,
            96,
            &m,
            &inv,
            &params,
            0,
            RowsAhead::none(),
            &mut planes,
            64,
        );
        let c0: Vec<f32> = m
            .iter()
            .zip(&s)
            .map(|(m, s)| m + s * (127.5 / 256.0))
            .collect();
        let step: Vec<f32> = s.iter().map(|s| s / 256.0).collect();
        let mut y = vec![0.0; x.len()];
        table.dequantize_rows(
            &planes.as_src(),
            64,
            96,
            &c0,
            &step,
            &params,
            0,
            false,
            &mut y,
        );
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let s = s[i / 96];
            assert!(
                (x - y).abs() <= s * 0.503 + 1e-5,
                "{bits} bits, element {i}: {x} became {y}, step {s}"
            );
        }
    }
}

/// A stream of random words for test cases.
struct Random {
    key: Key,
    next: u32,
}

impl Random {
    fn new(seed: u64) -> Random {
        Random {
            key: Key::for_block(seed, 77),
            next: 0,
        }
    }

    fn word(&mut self) -> u32 {
        self.next += 1;
        self.key.word(self.next)
    }

    fn below(&mut self, n: usize) -> usize {
        self.word() as usize % n
    }

    /// One of `items`.
    fn pick<X: Copy>(&mut self, items: &[X]) -> X {
        items[self.below(items.len())]
    }

    fn unit(&mut self) -> f32 {
        (self.word() >> 8) as f32 / 16_777_216.0
    }
}

/// Elements of one of many kinds: both signs, one sign, with zeros of both signs, constant, subnormal, huge, sometimes not finite.
fn contents<T: Element>(random: &mut Random, n: usize) -> Vec<T> {
    let kind = random.below(10);
    let scale = random.pick(&[1.0f32, 1e-6, 300.0]);
    let mut x: Vec<T> = (0..n)
        .map(|_| {
            let u = random.unit() * scale;
            let zero = random.below(3) == 0;
            T::from_f32_finite(match kind {
                0 => u - scale * 0.5,
                1 => u,
                2 => -u,
                3 => {
                    if zero {
                        0.0
                    } else {
                        u
                    }
                }
                4 => {
                    if zero {
                        -0.0
                    } else {
                        -u
                    }
                }
                5 => random.pick(&[0.0, -0.0, u, -u]),
                6 => random.pick(&[0.0, -0.0]),
                7 => scale,
                8 => (random.unit() - 0.5) * 1e-40,
                _ => (random.unit() - 0.5) * 3e38 * 2.0,
            })
        })
        .collect();
    if n > 0 && random.below(4) == 0 {
        for _ in 0..=random.below(3) {
            let bad = random.pick(&[f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            let i = random.below(n);
            x[i] = match T::TYPE {
                crate::dtype::FloatType::F32 => bytemuck::cast_slice(&[bad])[0],
                crate::dtype::FloatType::F16 => bytemuck::cast_slice(&[f16::from_f32(bad)])[0],
                crate::dtype::FloatType::BF16 => bytemuck::cast_slice(&[bf16::from_f32(bad)])[0],
            };
        }
    }
    x
}

/// Bit patterns, so that NaN equals NaN and 0 differs from -0.
fn bits_of<T: Element>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// NaN of any payload as one.
fn canonical(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| {
            if x.is_nan() {
                f32::NAN.to_bits()
            } else {
                x.to_bits()
            }
        })
        .collect()
}

/// Parameters for any range: `inv` 0 where the group is not coded.
fn any_parameters(min: &[f32], max: &[f32], bits: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (m, s, mut inv) = parameters(min, max, bits);
    for (i, inv) in inv.iter_mut().enumerate() {
        if !(s[i].is_normal() && s[i] > 1e-30 && s[i] < 1e36) {
            *inv = 0.0;
        }
    }
    (m, s, inv)
}

fn rows_agree<T: Element>(isa: Isa, cases: usize) {
    let _env = FpEnv::enter();
    let (scalar, fast) = (
        for_isa::<T>(Isa::Scalar).unwrap(),
        for_isa::<T>(isa).unwrap(),
    );
    let mut random = Random::new(isa as u64 + 16 * T::TYPE as u64);
    for case in 0..cases {
        let group = random.pick(&[32, 64, 96, 128, 256, 512, 1024]);
        let n = if random.below(3) == 0 {
            random.below(100)
        } else {
            random.below(2500)
        };
        let offset = random.below(17);
        let all = contents::<T>(&mut random, n + offset);
        let x = &all[offset..];
        let groups = n.div_ceil(group);
        let what = format!(
            "{isa} {}, case {case}: {n} elements in groups of {group}",
            T::TYPE.name()
        );
        let (mut min, mut max) = (vec![0.0; groups], vec![0.0; groups]);
        let (mut min2, mut max2) = (min.clone(), max.clone());
        for skip_zeros in [true, false] {
            scalar.range_rows(
                x,
                group,
                skip_zeros,
                RowsAhead::until(x),
                &mut min,
                &mut max,
            );
            fast.range_rows(
                x,
                group,
                skip_zeros,
                RowsAhead::until(x),
                &mut min2,
                &mut max2,
            );
            assert_eq!(
                (canonical(&min), canonical(&max)),
                (canonical(&min2), canonical(&max2)),
                "{what}, skip zeros {skip_zeros}"
            );
        }
        for bits in 1..=8 {
            let rounding =
                random.pick(&[Rounding::Dither, Rounding::Stochastic, Rounding::Nearest]);
            let params = CodeParams {
                bits,
                rounding,
                key: Key::for_block(random.word().into(), 3),
            };
            let (first_step, slot0) = (random.word() >> 8, 32 * random.below(8));
            let (m, s, inv) = any_parameters(&min, &max, bits);
            // What was there before must be gone, and what lies around must stay.
            let mut planes = PlaneBuf::new();
            (0..8).for_each(|k| planes.plane_mut(k).fill(0xa5));
            let mut planes2 = planes.clone();
            scalar.quantize_rows(
                x,
                group,
                &m,
                &inv,
                &params,
                first_step,
                RowsAhead::until(x),
                &mut planes,
                slot0,
            );
            fast.quantize_rows(
                x,
                group,
                &m,
                &inv,
                &params,
                first_step,
                RowsAhead::until(x),
                &mut planes2,
                slot0,
            );
            for k in 0..8 {
                assert!(
                    planes.plane(k) == planes2.plane(k),
                    "{what}, {params:?}, slot {slot0}: plane {k}"
                );
            }
            let c0: Vec<f32> = m
                .iter()
                .zip(&s)
                .map(|(m, s)| {
                    if s.is_finite() {
                        m + s * (127.5 / 256.0)
                    } else {
                        1.0
                    }
                })
                .collect();
            let step: Vec<f32> = s
                .iter()
                .map(|s| if s.is_finite() { s / 256.0 } else { 0.0 })
                .collect();
            let mut y = vec![T::smallest_positive(); n + 1];
            let mut room = vec![T::smallest_positive(); n + 1 + 64];
            // Streaming needs lines of its own; both ways must give the same.
            let stream = random.below(2) == 0;
            let aligned = room.as_ptr().align_offset(64).min(63);
            let start = if stream { aligned } else { random.below(64) };
            let y2 = &mut room[start..][..n + 1];
            let planes = planes.as_src();
            scalar.dequantize_rows(
                &planes,
                slot0,
                group,
                &c0,
                &step,
                &params,
                first_step,
                false,
                &mut y[..n],
            );
            fast.dequantize_rows(
                &planes,
                slot0,
                group,
                &c0,
                &step,
                &params,
                first_step,
                stream,
                &mut y2[..n],
            );
            assert!(
                bits_of(&y) == bits_of(y2),
                "{what}, {params:?}, slot {slot0}, stream {stream}: values"
            );
        }
    }
}

/// Runs a check for every element type at every level, and says which levels ran.
fn at_every_level(name: &str, checks: [fn(Isa, usize); 3], cases: usize) {
    for isa in Isa::available() {
        println!("{name}: {isa} against scalar");
        for check in checks {
            check(isa, if isa == Isa::Scalar { 2 } else { cases });
        }
    }
}

#[test]
fn every_level_gives_the_scalar_bits_for_row_groups() {
    at_every_level(
        "rows",
        [rows_agree::<f32>, rows_agree::<f16>, rows_agree::<bf16>],
        300,
    );
}

#[test]
fn a_chunk_that_ends_with_the_block_stays_inside_it() {
    let _env = FpEnv::enter();
    for isa in Isa::available() {
        let table = for_isa::<f32>(isa).unwrap();
        let x = vec![0.75f32; 64 * 3 + 5];
        let params = CodeParams {
            bits: 8,
            rounding: Rounding::Nearest,
            key: Key::for_block(0, 0),
        };
        let mut planes = PlaneBuf::new();
        let slot0 = BLOCK_SLOTS - 224;
        table.quantize_rows(
            &x,
            32,
            &[0.0; 7],
            &[256.0; 7],
            &params,
            0,
            RowsAhead::none(),
            &mut planes,
            slot0,
        );
        let mut y = vec![0.0; x.len()];
        table.dequantize_rows(
            &planes.as_src(),
            slot0,
            32,
            &[0.0; 7],
            &[1.0; 7],
            &params,
            0,
            false,
            &mut y,
        );
        assert!(y.iter().all(|&y| y == 256.0), "{isa}");
    }
}

#[test]
fn planes_are_copied_whole_from_and_to_any_address() {
    let mut random = Random::new(5);
    for isa in Isa::available() {
        let table = planes_for_isa(isa).unwrap();
        for _ in 0..200 {
            let (bits, len, offset) = (
                1 + random.below(8),
                random.below(PLANE_BYTES + 1),
                random.below(70),
            );
            let mut planes = PlaneBuf::new();
            for k in 0..bits {
                planes.plane_mut(k).fill_with(|| random.word() as u8);
            }
            let mut room = vec![0xa5; offset + bits * len + 70];
            table.store_planes(&planes, bits, len, &mut room[offset..offset + bits * len]);
            let (before, rest) = room.split_at(offset);
            let (stored, behind) = rest.split_at(bits * len);
            assert!(
                before.iter().chain(behind).all(|&b| b == 0xa5),
                "{isa}: wrote outside"
            );
            for k in 0..bits {
                assert!(
                    stored[k * len..][..len] == planes.plane(k)[..len],
                    "{isa}: plane {k} of {len} bytes"
                );
            }
        }
    }
}
