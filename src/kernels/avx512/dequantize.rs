//! Values of row groups with AVX-512: 64 elements, two dither steps, at once.

use std::arch::x86_64::*;

use super::{DITHER, Lanes, TO_LOOP, UNIT, permutation, words};
use crate::kernels::may_overflow;
use crate::kernels::types::{CodeParams, PlaneSrc, Rounding};

/// Turns planes into values.
struct Decoder {
    params: CodeParams,
    dither: __m512i,
    to_loop: __m512i,
}

impl Decoder {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
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
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
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

/// For each byte 8 j + 7 - k, where byte j of qword k lies: takes 8 planes of 64 slots to 8 bit matrices of 8 slots.
const TO_MATRICES: [u8; 64] = {
    let mut table = [0; 64];
    let mut j = 0;
    while j < 8 {
        let mut k = 0;
        while k < 8 {
            table[8 * j + 7 - k] = (8 * k + j) as u8;
            k += 1;
        }
        j += 1;
    }
    table
};

/// 64 codes in element order from their planes: qword k is plane k.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn codes(planes: __m512i) -> __m512i {
    // The instruction gives bit i of byte p of a qword the parity of (byte 7 - i of the matrix) & (byte p of the operand). With 1 << p
    // there and plane i in the matrix, that is the bit of slot p in plane i.
    let matrices = _mm512_permutexvar_epi8(permutation(&TO_MATRICES), planes);
    let slots = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    _mm512_gf2p8affine_epi64_epi8::<0>(slots, matrices)
}

/// The planes of 64 slots, one a qword; those from `B` on are 0.
///
/// # Safety
/// 8 bytes can be read at `src + k * stride` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn load_unit<const B: usize>(src: *const u8, stride: usize) -> __m512i {
    let mut words = [0u64; 8];
    for (k, word) in words.iter_mut().enumerate().take(B) {
        // SAFETY: the caller gives 8 readable bytes in each plane.
        *word = unsafe { src.add(k * stride).cast::<u64>().read_unaligned() };
    }
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// As [`load_unit`] for eight units, a line of each plane. Loads of single words between the stores of values would often wait, since the
/// store buffer then holds an address with the same low 12 bits.
///
/// # Safety
/// 64 bytes can be read at `src + k * stride` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn load_units<const B: usize>(src: *const u8, stride: usize) -> [__m512i; 8] {
    let mut rows = [_mm512_setzero_si512(); 8];
    for (k, row) in rows.iter_mut().enumerate().take(B) {
        // SAFETY: the caller gives 64 readable bytes in each plane.
        *row = unsafe { _mm512_loadu_si512(src.add(k * stride).cast()) };
    }
    let pairs = |a: usize| {
        (
            _mm512_unpacklo_epi64(rows[a], rows[a + 1]),
            _mm512_unpackhi_epi64(rows[a], rows[a + 1]),
        )
    };
    let (even01, odd01) = pairs(0);
    let (even23, odd23) = pairs(2);
    let (even45, odd45) = pairs(4);
    let (even67, odd67) = pairs(6);
    let mut units = [_mm512_setzero_si512(); 8];
    for (u, unit) in units.iter_mut().enumerate() {
        let pair = |even, odd| if u % 2 == 0 { even } else { odd };
        let lane = (u / 2 * 2) as i64;
        let index = _mm512_setr_epi64(lane, lane + 1, lane + 8, lane + 9, 0, 0, 0, 0);
        let low =
            _mm512_maskz_permutex2var_epi64(0x0f, pair(even01, odd01), index, pair(even23, odd23));
        *unit = if B <= 4 {
            low
        } else {
            let high = _mm512_permutex2var_epi64(pair(even45, odd45), index, pair(even67, odd67));
            _mm512_inserti64x4::<1>(low, _mm512_castsi512_si256(high))
        };
    }
    units
}

/// Which group each step of 32 elements belongs to.
struct Groups {
    group: usize,
    current: usize,
    left: usize,
}

impl Groups {
    fn new(group: usize) -> Groups {
        Groups {
            group,
            current: 0,
            left: group,
        }
    }

    /// The next step's group.
    #[inline(always)]
    fn next(&mut self) -> usize {
        let now = self.current;
        self.left -= 32;
        if self.left == 0 {
            self.left = self.group;
            self.current += 1;
        }
        now
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn dequantize_rows<T: Lanes>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    stream: bool,
    dst: &mut [T],
) {
    macro_rules! widths {
        ($($bits:literal)*) => {
            match (params.bits, params.rounding == Rounding::Dither) {
                $(($bits, true) => dequantize_bits::<T, $bits, true>(planes, slot0, group, c0, step, params, first_step, stream, dst),
                ($bits, false) => dequantize_bits::<T, $bits, false>(planes, slot0, group, c0, step, params, first_step, stream, dst),)*
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
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn dequantize_bits<T: Lanes, const B: usize, const DITHERED: bool>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    stream: bool,
    dst: &mut [T],
) {
    let decoder = Decoder::new(params);
    let units = dst.len() / UNIT;
    let stream = stream && (dst.as_ptr() as usize).is_multiple_of(64);
    assert!(slot0 / 8 + units * 8 <= planes.plane_bytes() && B <= planes.planes());
    let (base, stride) = (planes.as_ptr(), planes.stride());
    let clamp = may_overflow::<T>(c0, step);
    let mut groups = Groups::new(group);
    let parameters = |g: usize, h: usize| {
        (
            [c0[g], c0[h]].map(|x| _mm512_set1_ps(x)),
            [step[g], step[h]].map(|x| _mm512_set1_ps(x)),
        )
    };
    let mut write = |unit: usize, planes: __m512i| {
        let (c2, step2) = parameters(groups.next(), groups.next());
        let first = first_step.wrapping_add(2 * unit as u32);
        let values = decoder.unit::<DITHERED>(codes(planes), c2, step2, first);
        debug_assert!(unit < units);
        // SAFETY: unit < units, so 64 elements can be written behind it, which is a multiple of 64 bytes behind `dst`, so aligned as it is.
        unsafe { T::store_unit(dst.as_mut_ptr().add(unit * UNIT), values, clamp, stream) };
    };
    let mut unit = 0;
    while unit + 8 <= units {
        for k in 0..B {
            if let Some(line) = planes.line_ahead(k, slot0 / 8 + unit * 8) {
                _mm_prefetch::<_MM_HINT_T1>(line);
            }
        }
        // SAFETY: each plane has 64 bytes at this place, as asserted above.
        let eight = unsafe { load_units::<B>(base.add(slot0 / 8 + unit * 8), stride) };
        for (u, planes) in eight.into_iter().enumerate() {
            write(unit + u, planes);
        }
        unit += 8;
    }
    while unit < units {
        // SAFETY: each plane has 8 bytes at this place, as asserted above.
        let one = unsafe { load_unit::<B>(base.add(slot0 / 8 + unit * 8), stride) };
        write(unit, one);
        unit += 1;
    }
    if stream {
        // Other threads see streamed stores only in order behind this.
        _mm_sfence();
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
        let (g, h) = (done / group, (done + UNIT / 2) / group);
        let (c2, step2) = parameters(g, h.min(c0.len() - 1));
        // SAFETY: `bytes` has B times 8 bytes 8 apart.
        let one = unsafe { load_unit::<B>(bytes.as_ptr().cast(), 8) };
        let first = first_step.wrapping_add(2 * units as u32);
        let values = decoder.unit::<DITHERED>(codes(one), c2, step2, first);
        let mut padded = [T::zeroed(); UNIT];
        // SAFETY: `padded` has 64 elements.
        unsafe { T::store_unit(padded.as_mut_ptr(), values, true, false) };
        dst[done..].copy_from_slice(&padded[..rest]);
    }
}
