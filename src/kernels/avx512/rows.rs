//! Row groups with AVX-512: 64 elements, two dither steps, at once.

use std::arch::x86_64::*;

use super::{DITHER, Lanes, TO_ELEMENTS, TO_LOOP, UNIT, permutation, words};
use crate::dtype::FloatType;
use crate::kernels::range::{Found, judge};
use crate::kernels::types::{CodeParams, PLANE_STRIDE, PlaneBuf, PlaneSrc, Rounding};
use crate::kernels::{plane_len, scalar};

/// How far ahead of the first touch of the source lines are fetched.
const PREFETCH_BYTES: usize = 4096;

#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn range<T: Lanes>(
    src: &[T],
    group: usize,
    skip_zeros: bool,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    for ((chunk, min), max) in src.chunks(group).zip(out_min).zip(out_max) {
        if size_of_val(chunk) < 64 {
            scalar::rows::range(
                chunk,
                group,
                skip_zeros,
                std::slice::from_mut(min),
                std::slice::from_mut(max),
            );
            continue;
        }
        let found = match T::TYPE {
            FloatType::F32 => {
                let (signed, unsigned) = maxima32(bytemuck::cast_slice(chunk));
                judge::<T>(signed, unsigned, skip_zeros)
            }
            FloatType::F16 | FloatType::BF16 => {
                let (signed, unsigned) = maxima16(bytemuck::cast_slice(chunk));
                judge::<T>(
                    i32::from(signed) << 16,
                    u32::from(unsigned) << 16,
                    skip_zeros,
                )
            }
        };
        (*min, *max) = match found {
            Found::Done(min, max) => (min, max),
            Found::Second(second) => second.finish::<T>(match T::TYPE {
                FloatType::F32 => minimum32(bytemuck::cast_slice(chunk), second.bias32()),
                FloatType::F16 | FloatType::BF16 => {
                    u32::from(minimum16(bytemuck::cast_slice(chunk), second.bias16())) << 16
                }
            }),
        };
    }
}

/// Calls `$each` with every vector of a slice of `$lanes` lanes or more; the last one may overlap the one before.
macro_rules! for_each_vector {
    ($src:expr, $lanes:expr, $x:ident => $each:expr) => {{
        let src = $src;
        debug_assert!(src.len() >= $lanes);
        let whole = src.len() / $lanes * $lanes;
        let mut i = 0;
        while i < whole {
            // SAFETY: i + lanes <= whole <= len.
            let $x = unsafe { _mm512_loadu_si512(src.as_ptr().add(i).cast()) };
            $each;
            i += $lanes;
        }
        if whole < src.len() {
            // SAFETY: the slice has at least one vector's lanes.
            let $x = unsafe { _mm512_loadu_si512(src.as_ptr().add(src.len() - $lanes).cast()) };
            $each;
        }
    }};
}

/// Signed and unsigned maximum of 16 words or more.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn maxima32(src: &[u32]) -> (i32, u32) {
    let (mut s, mut u) = (_mm512_set1_epi32(i32::MIN), _mm512_setzero_si512());
    for_each_vector!(src, 16, x => {
        s = _mm512_max_epi32(s, x);
        u = _mm512_max_epu32(u, x);
    });
    // Unsigned order becomes signed by flipping the sign bit: one reduction for both, signed in the lower half.
    let u = _mm512_xor_si512(u, _mm512_set1_epi32(i32::MIN));
    let both = _mm512_max_epi32(
        _mm512_shuffle_i64x2::<0b01_00_01_00>(s, u),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(s, u),
    );
    let both = _mm512_max_epi32(both, _mm512_shuffle_i64x2::<0b10_11_00_01>(both, both));
    let both = _mm512_max_epi32(both, _mm512_shuffle_epi32::<0b01_00_11_10>(both));
    let both = _mm512_max_epi32(both, _mm512_shuffle_epi32::<0b10_11_00_01>(both));
    let signed = _mm_cvtsi128_si32(_mm512_castsi512_si128(both));
    let unsigned = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32::<2>(both));
    (signed, unsigned as u32 ^ 0x8000_0000)
}

/// Signed and unsigned maximum of 32 words or more.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn maxima16(src: &[u16]) -> (i16, u16) {
    let (mut s, mut u) = (_mm512_set1_epi16(i16::MIN), _mm512_setzero_si512());
    for_each_vector!(src, 32, x => {
        s = _mm512_max_epi16(s, x);
        u = _mm512_max_epu16(u, x);
    });
    let u = _mm512_xor_si512(u, _mm512_set1_epi16(i16::MIN));
    let both = _mm512_max_epi16(
        _mm512_shuffle_i64x2::<0b01_00_01_00>(s, u),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(s, u),
    );
    let both = _mm512_max_epi16(both, _mm512_shuffle_i64x2::<0b10_11_00_01>(both, both));
    // Eight words are left of each: their largest is the smallest of the complements, which one instruction finds unsigned.
    let flipped = _mm512_xor_si512(both, _mm512_set1_epi16(i16::MAX));
    let signed = _mm_minpos_epu16(_mm512_castsi512_si128(flipped));
    let unsigned = _mm_minpos_epu16(_mm512_extracti32x4_epi32::<2>(flipped));
    (
        (_mm_cvtsi128_si32(signed) as i16) ^ i16::MAX,
        (_mm_cvtsi128_si32(unsigned) as u16) ^ 0x7fff ^ 0x8000,
    )
}

/// The bits whose distance above `bias` is smallest, of 16 words or more.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn minimum32(src: &[u32], bias: u32) -> u32 {
    let b = _mm512_set1_epi32(bias as i32);
    let mut least = _mm512_set1_epi32(-1);
    for_each_vector!(src, 16, x => least = _mm512_min_epu32(least, _mm512_sub_epi32(x, b)));
    _mm512_reduce_min_epu32(least).wrapping_add(bias)
}

/// The bits whose distance above `bias` is smallest, of 32 words or more.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn minimum16(src: &[u16], bias: u16) -> u16 {
    let b = _mm512_set1_epi16(bias as i16);
    let mut least = _mm512_set1_epi16(-1);
    for_each_vector!(src, 32, x => least = _mm512_min_epu16(least, _mm512_sub_epi16(x, b)));
    let least = _mm256_min_epu16(
        _mm512_castsi512_si256(least),
        _mm512_extracti64x4_epi64::<1>(least),
    );
    let least = _mm_min_epu16(
        _mm256_castsi256_si128(least),
        _mm256_extracti128_si256::<1>(least),
    );
    (_mm_cvtsi128_si32(_mm_minpos_epu16(least)) as u16).wrapping_add(bias)
}

/// Turns values into codes.
struct Encoder {
    params: CodeParams,
    dither: __m512i,
    to_elements: __m512i,
}

impl Encoder {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn new(params: &CodeParams) -> Encoder {
        Encoder {
            params: *params,
            dither: permutation(&DITHER),
            to_elements: permutation(&TO_ELEMENTS),
        }
    }

    /// The codes of 64 elements in element order; the halves may lie in two groups.
    ///
    /// # Safety
    /// 64 elements can be read at `src`.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn unit<T: Lanes, const NEAREST: bool>(
        &self,
        src: *const T,
        m: [__m512; 2],
        inv: [__m512; 2],
        step: u32,
    ) -> __m512i {
        let magic = _mm512_set1_ps(8_388_608.0);
        let low_bytes = _mm512_set1_epi16(0xff);
        let w = |i: usize| {
            // SAFETY: i < 4, and the caller gives 64 readable elements.
            let x = unsafe { T::load(src.add(16 * i)) };
            _mm512_castps_si512(_mm512_fmadd_ps(
                _mm512_sub_ps(x, m[i / 2]),
                inv[i / 2],
                magic,
            ))
        };
        // Only the low 16 bits of each matter: elements l and l + 16 share a lane.
        let ab = _mm512_mask_blend_epi16(0xaaaa_aaaa, w(0), _mm512_slli_epi32::<16>(w(1)));
        let cd = _mm512_mask_blend_epi16(0xaaaa_aaaa, w(2), _mm512_slli_epi32::<16>(w(3)));
        let (r_ab, r_cd) = if NEAREST {
            (_mm512_set1_epi16(128), _mm512_set1_epi16(128))
        } else {
            let r = _mm512_permutexvar_epi8(self.dither, words(self.params.key, step));
            (_mm512_and_si512(r, low_bytes), _mm512_srli_epi16::<8>(r))
        };
        let ab = _mm512_srli_epi16::<8>(_mm512_add_epi16(ab, r_ab));
        let cd = _mm512_add_epi16(cd, r_cd);
        // Bytes of ab where the low byte of a 16-bit lane is, of cd where the high one is.
        let q = _mm512_ternarylogic_epi32::<0xca>(low_bytes, ab, cd);
        _mm512_permutexvar_epi8(self.to_elements, q)
    }
}

/// The slots of a unit, as bits, that get codes: a group whose `inv` is 0 has code 0 whatever its elements, even where they are not finite.
fn coded_mask(inv_low: f32, inv_high: f32) -> u64 {
    let half = |inv: f32| if inv == 0.0 { 0 } else { 0xffff_ffff };
    half(inv_low) | (half(inv_high) << 32)
}

/// Writes the planes of 64 codes.
///
/// # Safety
/// 8 bytes can be written at `dst + k * PLANE_STRIDE` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn store_planes<const B: usize>(q: __m512i, dst: *mut u8) {
    for k in 0..B {
        let bits = _mm512_test_epi8_mask(q, _mm512_set1_epi8((1u8 << k) as i8));
        // SAFETY: the caller gives room for 8 bytes in each plane.
        unsafe {
            dst.add(k * PLANE_STRIDE)
                .cast::<u64>()
                .write_unaligned(bits)
        };
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn quantize<T: Lanes>(
    src: &[T],
    group: usize,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    first_step: u32,
    planes: &mut PlaneBuf,
    slot0: usize,
) {
    macro_rules! widths {
        ($($bits:literal)*) => {
            match (params.bits, params.rounding == Rounding::Nearest) {
                $(($bits, false) => quantize_bits::<T, $bits, false>(src, group, m, inv, params, first_step, planes, slot0),
                ($bits, true) => quantize_bits::<T, $bits, true>(src, group, m, inv, params, first_step, planes, slot0),)*
                _ => unreachable!("widths are checked by the caller"),
            }
        };
    }
    widths!(1 2 3 4 5 6 7 8);
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn quantize_bits<T: Lanes, const B: usize, const NEAREST: bool>(
    src: &[T],
    group: usize,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    first_step: u32,
    planes: &mut PlaneBuf,
    slot0: usize,
) {
    let encoder = Encoder::new(params);
    let units = src.len() / UNIT;
    assert!(slot0 / 8 + units * 8 <= crate::kernels::PLANE_BYTES && B <= crate::kernels::MAX_BITS);
    let base = planes.as_mut_ptr();
    let per_group = group / UNIT;
    let mut unit = 0;
    while unit < units {
        let g = unit * UNIT / group;
        let h = (unit * UNIT + UNIT / 2) / group;
        let (m2, inv2) = (
            [m[g], m[h]].map(|x| _mm512_set1_ps(x)),
            [inv[g], inv[h]].map(|x| _mm512_set1_ps(x)),
        );
        // Units of one group share its parameters; a group of an odd number of steps goes unit by unit.
        let end = if group.is_multiple_of(UNIT) {
            units.min((g + 1) * per_group)
        } else {
            unit + 1
        };
        let coded = coded_mask(inv[g], inv[h]);
        if coded == u64::MAX {
            while unit < end {
                let step = first_step.wrapping_add(2 * unit as u32);
                // SAFETY: unit < units, so 64 elements can be read behind it, and the planes have room for 8 bytes more, as asserted.
                unsafe {
                    let q =
                        encoder.unit::<T, NEAREST>(src.as_ptr().add(unit * UNIT), m2, inv2, step);
                    store_planes::<B>(q, base.add(slot0 / 8 + unit * 8));
                }
                unit += 1;
            }
        } else {
            while unit < end {
                let step = first_step.wrapping_add(2 * unit as u32);
                // SAFETY: as above.
                unsafe {
                    let q =
                        encoder.unit::<T, NEAREST>(src.as_ptr().add(unit * UNIT), m2, inv2, step);
                    store_planes::<B>(
                        _mm512_maskz_mov_epi8(coded, q),
                        base.add(slot0 / 8 + unit * 8),
                    );
                }
                unit += 1;
            }
        }
    }
    // The rest, and zero bits up to the next multiple of 64 slots.
    let done = units * UNIT;
    let rest = &src[done..];
    let mut bits = [0u64; B];
    if !rest.is_empty() {
        let mut padded = [T::zeroed(); UNIT];
        padded[..rest.len()].copy_from_slice(rest);
        let g = done / group;
        let h = ((done + UNIT / 2) / group).min(m.len() - 1);
        let (m2, inv2) = (
            [m[g], m[h]].map(|x| _mm512_set1_ps(x)),
            [inv[g], inv[h]].map(|x| _mm512_set1_ps(x)),
        );
        let coded = coded_mask(inv[g], inv[h]);
        let coded = coded & ((1 << rest.len()) - 1);
        // SAFETY: `padded` has 64 elements.
        let q = unsafe {
            encoder.unit::<T, NEAREST>(
                padded.as_ptr(),
                m2,
                inv2,
                first_step.wrapping_add(2 * units as u32),
            )
        };
        for (k, bits) in bits.iter_mut().enumerate() {
            *bits = _mm512_mask_test_epi8_mask(coded, q, _mm512_set1_epi8((1u8 << k) as i8));
        }
    }
    let (start, end) = ((slot0 + done) / 8, plane_len(slot0 + src.len()));
    for (k, bits) in bits.iter().enumerate() {
        let tail = &mut planes.plane_mut(k)[start..end];
        tail.fill(0);
        let len = tail.len().min(8);
        tail[..len].copy_from_slice(&bits.to_le_bytes()[..len]);
    }
}

/// Turns planes into values.
struct Decoder {
    params: CodeParams,
    dither: __m512i,
    to_loop: __m512i,
}

impl Decoder {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn new(params: &CodeParams) -> Decoder {
        Decoder {
            params: *params,
            dither: permutation(&DITHER),
            to_loop: permutation(&TO_LOOP),
        }
    }

    /// The values of 64 codes in element order, 16 a vector.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn unit<const DITHERED: bool>(
        &self,
        q: __m512i,
        c0: [__m512; 2],
        scale: [__m512; 2],
        step: u32,
    ) -> [__m512; 4] {
        let low_bytes = _mm512_set1_epi16(0xff);
        let q = _mm512_permutexvar_epi8(self.to_loop, q);
        // 2^23 + 256 q + (255 - r) as the bits of a float: exact, and so is taking 2^23 + 255 away.
        let (r_ab, r_cd) = if DITHERED {
            let r = _mm512_permutexvar_epi8(self.dither, words(self.params.key, step));
            // (~r) & 0xff, and (~r) >> 8.
            (
                _mm512_andnot_si512(r, low_bytes),
                _mm512_xor_si512(_mm512_srli_epi16::<8>(r), low_bytes),
            )
        } else {
            (low_bytes, low_bytes)
        };
        let ab = _mm512_or_si512(_mm512_slli_epi16::<8>(q), r_ab);
        // The high bytes of q where low_bytes has none.
        let cd = _mm512_ternarylogic_epi32::<0xca>(low_bytes, r_cd, q);
        let exponent = _mm512_set1_epi32(0x4b00_0000);
        let a = _mm512_mask_blend_epi16(0xaaaa_aaaa, ab, exponent);
        let b = _mm512_or_si512(_mm512_srli_epi32::<16>(ab), exponent);
        let c = _mm512_mask_blend_epi16(0xaaaa_aaaa, cd, exponent);
        let d = _mm512_or_si512(_mm512_srli_epi32::<16>(cd), exponent);
        let offset = _mm512_set1_ps(8_388_608.0 + 255.0);
        let value = |bits: __m512i, half: usize| {
            _mm512_fmadd_ps(
                _mm512_sub_ps(_mm512_castsi512_ps(bits), offset),
                scale[half],
                c0[half],
            )
        };
        [value(a, 0), value(b, 0), value(c, 1), value(d, 1)]
    }
}

/// Collects 64 codes from their planes.
///
/// # Safety
/// 8 bytes can be read at `src + k * stride` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn load_planes<const B: usize>(src: *const u8, stride: usize) -> __m512i {
    let mut q = _mm512_setzero_si512();
    for k in 0..B {
        // SAFETY: the caller gives 8 readable bytes in each plane.
        let bits = unsafe { src.add(k * stride).cast::<u64>().read_unaligned() };
        q = _mm512_mask_add_epi8(q, bits, q, _mm512_set1_epi8((1u8 << k) as i8));
    }
    q
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn dequantize<T: Lanes>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    dst: &mut [T],
) {
    macro_rules! widths {
        ($($bits:literal)*) => {
            match (params.bits, params.rounding == Rounding::Dither) {
                $(($bits, true) => dequantize_bits::<T, $bits, true>(planes, slot0, group, c0, step, params, first_step, dst),
                ($bits, false) => dequantize_bits::<T, $bits, false>(planes, slot0, group, c0, step, params, first_step, dst),)*
                _ => unreachable!("widths are checked by the caller"),
            }
        };
    }
    widths!(1 2 3 4 5 6 7 8);
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn dequantize_bits<T: Lanes, const B: usize, const DITHERED: bool>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    dst: &mut [T],
) {
    let decoder = Decoder::new(params);
    let units = dst.len() / UNIT;
    assert!(slot0 / 8 + units * 8 <= planes.plane_bytes() && B <= planes.planes());
    let (base, stride) = (planes.as_ptr(), planes.stride());
    let per_group = group / UNIT;
    let mut unit = 0;
    while unit < units {
        let g = unit * UNIT / group;
        let h = (unit * UNIT + UNIT / 2) / group;
        let (c2, step2) = (
            [c0[g], c0[h]].map(|x| _mm512_set1_ps(x)),
            [step[g], step[h]].map(|x| _mm512_set1_ps(x)),
        );
        let end = if group.is_multiple_of(UNIT) {
            units.min((g + 1) * per_group)
        } else {
            unit + 1
        };
        while unit < end {
            let first = first_step.wrapping_add(2 * unit as u32);
            // SAFETY: unit < units, so each plane has 8 bytes at this place, as asserted, and 64 elements can be written behind it.
            unsafe {
                let q = load_planes::<B>(base.add(slot0 / 8 + unit * 8), stride);
                let values = decoder.unit::<DITHERED>(q, c2, step2, first);
                for (i, x) in values.into_iter().enumerate() {
                    T::store(dst.as_mut_ptr().add(unit * UNIT + 16 * i), x);
                }
            }
            unit += 1;
        }
    }
    let done = units * UNIT;
    let rest = dst.len() - done;
    if rest > 0 {
        let mut bytes = [[0u8; 8]; B];
        for (k, bytes) in bytes.iter_mut().enumerate() {
            let tail = &planes.plane(k)[(slot0 + done) / 8..];
            let len = tail.len().min(8);
            bytes[..len].copy_from_slice(&tail[..len]);
        }
        let g = done / group;
        let h = ((done + UNIT / 2) / group).min(c0.len() - 1);
        let (c2, step2) = (
            [c0[g], c0[h]].map(|x| _mm512_set1_ps(x)),
            [step[g], step[h]].map(|x| _mm512_set1_ps(x)),
        );
        let mut padded = [T::zeroed(); UNIT];
        // SAFETY: `bytes` has B times 8 bytes 8 apart, and `padded` has 64 elements.
        unsafe {
            let q = load_planes::<B>(bytes.as_ptr().cast(), 8);
            let values =
                decoder.unit::<DITHERED>(q, c2, step2, first_step.wrapping_add(2 * units as u32));
            for (i, x) in values.into_iter().enumerate() {
                T::store(padded.as_mut_ptr().add(16 * i), x);
            }
        }
        dst[done..].copy_from_slice(&padded[..rest]);
    }
}
