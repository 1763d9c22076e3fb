//! Loads and stores of 4 elements as f32.

use std::arch::aarch64::*;

use half::{bf16, f16};

use crate::kernels::Element;

/// Loads and stores of 4 elements as f32, and what planes need of 8.
pub(in crate::kernels) trait Lanes: Element {
    /// # Safety
    /// 4 elements can be read at `ptr`.
    unsafe fn load(ptr: *const Self) -> float32x4_t;

    /// Clamps to the finite range and rounds to nearest even, for the half types.
    ///
    /// # Safety
    /// 4 elements can be written at `ptr`.
    unsafe fn store(ptr: *mut Self, x: float32x4_t);

    /// All bits set in the lanes of those of 8 elements that are not zero.
    ///
    /// # Safety
    /// 8 elements can be read at `ptr`.
    unsafe fn nonzero_8(ptr: *const Self) -> uint16x8_t;

    /// Of 8 elements, makes those `value` whose lane in `below` is set, then those +0 whose lane in `keep` is not set.
    ///
    /// # Safety
    /// 8 elements can be read and written at `ptr`.
    unsafe fn replace_8(ptr: *mut Self, below: uint16x8_t, value: &[Self; 8], keep: uint16x8_t);
}

/// 16-bit masks as two 32-bit ones.
#[target_feature(enable = "neon")]
fn widen(mask: uint16x8_t) -> [uint32x4_t; 2] {
    let mask = vreinterpretq_s16_u16(mask);
    [vmovl_s16(vget_low_s16(mask)), vmovl_high_s16(mask)].map(|half| vreinterpretq_u32_s32(half))
}

/// Two 32-bit masks as one of 16 bits.
#[target_feature(enable = "neon")]
pub(super) fn narrow(low: uint32x4_t, high: uint32x4_t) -> uint16x8_t {
    vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high))
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(ptr: *const f32) -> float32x4_t {
        // SAFETY: the caller gives 4 readable elements.
        unsafe { vld1q_f32(ptr) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(ptr: *mut f32, x: float32x4_t) {
        // SAFETY: the caller gives room for 4 elements.
        unsafe { vst1q_f32(ptr, x) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn nonzero_8(ptr: *const f32) -> uint16x8_t {
        let magnitude = vdupq_n_u32(0x7fff_ffff);
        // SAFETY: the caller gives 8 readable elements.
        let (low, high) = unsafe { (vld1q_u32(ptr.cast()), vld1q_u32(ptr.add(4).cast())) };
        narrow(vtstq_u32(low, magnitude), vtstq_u32(high, magnitude))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn replace_8(ptr: *mut f32, below: uint16x8_t, value: &[f32; 8], keep: uint16x8_t) {
        let (below, keep) = (widen(below), widen(keep));
        for k in 0..2 {
            // SAFETY: the caller gives 8 elements to read and write; the array has 8.
            unsafe {
                let ptr = ptr.add(4 * k);
                let x = vbslq_u32(
                    below[k],
                    vld1q_u32(value.as_ptr().add(4 * k).cast()),
                    vld1q_u32(ptr.cast()),
                );
                vst1q_u32(ptr.cast(), vandq_u32(x, keep[k]));
            }
        }
    }
}

/// `x` clamped to ±`limit`.
#[target_feature(enable = "neon")]
fn clamp(x: float32x4_t, limit: f32) -> float32x4_t {
    vminq_f32(vmaxq_f32(x, vdupq_n_f32(-limit)), vdupq_n_f32(limit))
}

/// binary16 as f32.
#[target_feature(enable = "neon")]
fn from_f16(half: uint16x4_t) -> float32x4_t {
    let bits = vmovl_u16(half);
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    // Exponent and mantissa where f32 has them, then the difference of the exponents' biases: 2^(127 - 15). Subnormals come out normal.
    let magnitude = vreinterpretq_f32_u32(vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7fff))));
    let scaled = vreinterpretq_u32_f32(vmulq_f32(
        magnitude,
        vdupq_n_f32(f32::from_bits((127 + 112) << 23)),
    ));
    // Infinities and NaN keep the largest exponent.
    let top = vdupq_n_u32(0x7c00);
    let special = vandq_u32(
        vceqq_u32(vandq_u32(bits, top), top),
        vdupq_n_u32(0x7f80_0000),
    );
    vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(scaled, special), sign))
}

/// The nearest finite binary16 values, ties to even.
#[target_feature(enable = "neon")]
fn to_f16(x: float32x4_t) -> uint16x4_t {
    let x = clamp(x, f16::MAX.to_f32_const());
    let bits = vreinterpretq_u32_f32(x);
    let sign = vshrq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000_0000)));
    let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff_ffff));
    // Normal results: half a unit of the last kept bit, less one unless that bit is odd; then the exponents' biases.
    let odd = vandq_u32(vshrq_n_u32::<13>(magnitude), vdupq_n_u32(1));
    let rounded = vaddq_u32(magnitude, vaddq_u32(odd, vdupq_n_u32(0xfff)));
    let normal = vsubq_u32(vshrq_n_u32::<13>(rounded), vdupq_n_u32(112 << 10));
    // Subnormal ones: adding 0.5 leaves the value in units of 2^-24, rounded by the addition, in the low bits.
    let shifted = vaddq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(0.5));
    let subnormal = vsubq_u32(
        vreinterpretq_u32_f32(shifted),
        vdupq_n_u32(0.5f32.to_bits()),
    );
    // Below 2^-14 results are subnormal.
    let small = vcltq_u32(magnitude, vdupq_n_u32((127 - 14) << 23));
    vmovn_u32(vorrq_u32(vbslq_u32(small, subnormal, normal), sign))
}

/// bfloat16 as f32.
#[target_feature(enable = "neon")]
fn from_bf16(half: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshll_n_u16::<16>(half))
}

/// The nearest finite bfloat16 values, ties to even.
#[target_feature(enable = "neon")]
fn to_bf16(x: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(clamp(x, bf16::MAX.to_f32_const()));
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    vshrn_n_u32::<16>(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))))
}

/// The 16-bit types differ in the conversions only.
macro_rules! half_lanes {
    ($T:ty, $from:path, $to:path) => {
        impl Lanes for $T {
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn load(ptr: *const $T) -> float32x4_t {
                // SAFETY: the caller gives 4 readable elements of 2 bytes.
                $from(unsafe { vld1_u16(ptr.cast()) })
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn store(ptr: *mut $T, x: float32x4_t) {
                // SAFETY: the caller gives room for 4 elements of 2 bytes.
                unsafe { vst1_u16(ptr.cast(), $to(x)) }
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn nonzero_8(ptr: *const $T) -> uint16x8_t {
                // SAFETY: the caller gives 8 readable elements of 2 bytes.
                vtstq_u16(unsafe { vld1q_u16(ptr.cast()) }, vdupq_n_u16(0x7fff))
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn replace_8(
                ptr: *mut $T,
                below: uint16x8_t,
                value: &[$T; 8],
                keep: uint16x8_t,
            ) {
                // SAFETY: the caller gives 8 elements of 2 bytes to read and write; the array has 8.
                unsafe {
                    let x = vbslq_u16(
                        below,
                        vld1q_u16(value.as_ptr().cast()),
                        vld1q_u16(ptr.cast()),
                    );
                    vst1q_u16(ptr.cast(), vandq_u16(x, keep));
                }
            }
        }
    };
}

half_lanes!(f16, from_f16, to_f16);
half_lanes!(bf16, from_bf16, to_bf16);

/// Up to N elements, with zeros behind the last.
#[inline]
pub(super) fn padded<T: Lanes, const N: usize>(src: &[T]) -> [T; N] {
    let mut all = [T::zeroed(); N];
    all[..src.len()].copy_from_slice(src);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Float;

    #[test]
    fn every_half_converts_exactly_in_both_directions() {
        for bits in (0..=u16::MAX).step_by(4) {
            let halves = [bits, bits + 1, bits + 2, bits + 3].map(f16::from_bits);
            let mut x = [0.0; 4];
            let mut back = [f16::ZERO; 4];
            // SAFETY: the arrays have 4 elements.
            unsafe {
                f32::store(x.as_mut_ptr(), f16::load(halves.as_ptr()));
                f16::store(back.as_mut_ptr(), f32::load(x.as_ptr()));
            }
            for i in 0..4 {
                assert!(
                    x[i] == halves[i].to_f32() || x[i].is_nan() && halves[i].is_nan(),
                    "{:?} gave {}",
                    halves[i],
                    x[i]
                );
                if halves[i].is_finite() {
                    assert_eq!(back[i].to_bits(), halves[i].to_bits());
                }
            }
        }
    }

    #[test]
    fn floats_round_to_halves_as_the_scalar_conversion_does() {
        for bits in (0..=u32::MAX - 0x3_0001).step_by(0x1_2345) {
            let x = [bits, bits + 1, bits + 0x1000, bits + 0x8000].map(f32::from_bits);
            if x.iter().any(|x| x.is_nan()) {
                continue;
            }
            let (mut a, mut b) = ([f16::ZERO; 4], [bf16::ZERO; 4]);
            // SAFETY: the arrays have 4 elements.
            unsafe {
                f16::store(a.as_mut_ptr(), f32::load(x.as_ptr()));
                bf16::store(b.as_mut_ptr(), f32::load(x.as_ptr()));
            }
            assert_eq!(
                a.map(f16::to_bits),
                x.map(|x| f16::from_f32_finite(x).to_bits()),
                "{x:?}"
            );
            assert_eq!(
                b.map(bf16::to_bits),
                x.map(|x| bf16::from_f32_finite(x).to_bits()),
                "{x:?}"
            );
        }
    }
}
