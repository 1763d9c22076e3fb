//! 32 codes: one dither step.

use std::arch::aarch64::*;

use super::lanes::Lanes;
use crate::kernels::rng::{MUL_1, MUL_2};
use crate::kernels::{Key, Prefetch, RowsAhead};

/// Elements of a unit.
pub(super) const UNIT: usize = 32;

/// Group parameters of a unit's elements.
pub(super) type Parameters = [float32x4_t; 8];

/// The parameters of up to 32 columns, 0 behind the last.
#[target_feature(enable = "neon")]
pub(super) fn parameters(values: &[f32]) -> Parameters {
    let mut all = [0.0; UNIT];
    let n = values.len().min(UNIT);
    all[..n].copy_from_slice(&values[..n]);
    // SAFETY: the array has 32 numbers.
    std::array::from_fn(|k| unsafe { vld1q_f32(all.as_ptr().add(4 * k)) })
}

/// Dither bytes of step `step` in element order, 8 to a vector.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn dither(key: Key, step: u32) -> [uint16x8_t; 4] {
    const LANES: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
    let first = vdupq_n_u32(step.wrapping_mul(8).wrapping_add(key.k0));
    let words: [uint32x4_t; 2] = std::array::from_fn(|half| {
        // SAFETY: the array has 8 numbers.
        let x = vaddq_u32(first, unsafe { vld1q_u32(LANES.as_ptr().add(4 * half)) });
        let x = veorq_u32(x, vshrq_n_u32::<16>(x));
        let x = vmulq_u32(x, vdupq_n_u32(MUL_1));
        let x = veorq_u32(veorq_u32(x, vshrq_n_u32::<15>(x)), vdupq_n_u32(key.k1));
        let x = vmulq_u32(x, vdupq_n_u32(MUL_2));
        veorq_u32(x, vshrq_n_u32::<16>(x))
    });
    let [a, b] = words.map(|words| vreinterpretq_u16_u32(words));
    let (low, high) = (vuzp1q_u16(a, b), vuzp2q_u16(a, b));
    let byte = vdupq_n_u16(0xff);
    [
        vandq_u16(low, byte),
        vshrq_n_u16::<8>(low),
        vandq_u16(high, byte),
        vshrq_n_u16::<8>(high),
    ]
}

/// What rounds to nearest instead of dither: half a unit.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn half() -> [uint16x8_t; 4] {
    [vdupq_n_u16(128); 4]
}

/// Codes of 32 elements, in element order.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn codes<T: Lanes>(
    src: &[T; UNIT],
    m: &Parameters,
    inv: &Parameters,
    dither: &[uint16x8_t; 4],
) -> [uint8x16_t; 2] {
    let magic = vdupq_n_f32(8_388_608.0);
    let eight = |b: usize| {
        let w: [uint16x8_t; 2] = std::array::from_fn(|half| {
            let k = 2 * b + half;
            // SAFETY: the array has 32 elements.
            let x = unsafe { T::load(src.as_ptr().add(4 * k)) };
            vreinterpretq_u16_f32(vfmaq_f32(magic, vsubq_f32(x, m[k]), inv[k]))
        });
        // A code and its fraction are the low 16 bits of a lane, and the dither's carry cannot leave them.
        vshrn_n_u16::<8>(vaddq_u16(vuzp1q_u16(w[0], w[1]), dither[b]))
    };
    [
        vcombine_u8(eight(0), eight(1)),
        vcombine_u8(eight(2), eight(3)),
    ]
}

/// 1, 2, 4 … 128, twice.
#[inline]
#[target_feature(enable = "neon")]
fn weights() -> uint8x16_t {
    vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201))
}

/// Bit `k` of 32 codes.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn plane_bits(codes: &[uint8x16_t; 2], k: usize) -> u32 {
    let bit = vdupq_n_u8(1 << k);
    set_lanes(vtstq_u8(codes[0], bit), vtstq_u8(codes[1], bit))
}

/// One bit a byte: those with all bits set, of those with none.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn set_lanes(a: uint8x16_t, b: uint8x16_t) -> u32 {
    let pairs = vpaddq_u8(vandq_u8(a, weights()), vandq_u8(b, weights()));
    let fours = vpaddq_u8(pairs, pairs);
    vgetq_lane_u32::<0>(vreinterpretq_u32_u8(vpaddq_u8(fours, fours)))
}

/// The inverse of [`set_lanes`].
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn lanes_of(bits: u32) -> [uint8x16_t; 2] {
    let bytes = vreinterpretq_u8_u32(vdupq_n_u32(bits));
    let spread = |first: u64, second: u64| {
        let from = vcombine_u8(vcreate_u8(first), vcreate_u8(second));
        vtstq_u8(vqtbl1q_u8(bytes, from), weights())
    };
    [
        spread(0, 0x0101_0101_0101_0101),
        spread(0x0202_0202_0202_0202, 0x0303_0303_0303_0303),
    ]
}

/// Codes of 32 slots from their bits, plane by plane from the highest.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn gather_codes(planes: impl Iterator<Item = u32>) -> [uint8x16_t; 2] {
    let mut codes = [vdupq_n_u8(0); 2];
    for bits in planes {
        let set = lanes_of(bits);
        for (codes, set) in codes.iter_mut().zip(set) {
            *codes = vsubq_u8(vaddq_u8(*codes, *codes), set);
        }
    }
    codes
}

/// Values of 32 codes.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn values<T: Lanes>(
    codes: &[uint8x16_t; 2],
    dither: &[uint16x8_t; 4],
    c0: &Parameters,
    step: &Parameters,
    dst: &mut [T; UNIT],
) {
    let eights = [
        vget_low_u8(codes[0]),
        vget_high_u8(codes[0]),
        vget_low_u8(codes[1]),
        vget_high_u8(codes[1]),
    ];
    for (b, eight) in eights.into_iter().enumerate() {
        let code = vshll_n_u8::<8>(eight);
        // The difference may be negative: it wraps as a u32 and is read as an i32.
        let difference = [
            vsubl_u16(vget_low_u16(code), vget_low_u16(dither[b])),
            vsubl_high_u16(code, dither[b]),
        ];
        for (half, difference) in difference.into_iter().enumerate() {
            let k = 2 * b + half;
            let x = vfmaq_f32(
                c0[k],
                vcvtq_f32_s32(vreinterpretq_s32_u32(difference)),
                step[k],
            );
            // SAFETY: the array has 32 elements.
            unsafe { T::store(dst.as_mut_ptr().add(4 * k), x) };
        }
    }
}

/// Fetches up to `lines` lines of what comes next into the second-level cache.
#[inline]
pub(super) fn fetch(ahead: &mut Prefetch, lines: usize) {
    for _ in 0..lines {
        let Some(line) = ahead.next_line() else {
            return;
        };
        fetch_line(line);
    }
}

/// Fetches what `streams` have to while the kernel works on `part`, once a turn.
#[inline]
pub(super) fn fetch_rows<T>(ahead: RowsAhead, part: &[T], streams: std::ops::Range<usize>) {
    let at = part.as_ptr() as usize;
    if at % RowsAhead::TURN < size_of_val(part) {
        for line in streams.filter_map(|k| ahead.line(at, k)) {
            fetch_line(line.cast());
        }
    }
}

#[inline]
fn fetch_line(line: *const u8) {
    // SAFETY: prfm is a hint: it never faults, whatever the address, and changes nothing that a program can see.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
    };
}
