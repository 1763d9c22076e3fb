//! AVX-512 kernels (F, BW, DQ, VL, VBMI, GFNI and what AVX2 CPUs have).
//!
//! # Safety
//! Every function here is `#[target_feature]`: it may be called where the CPU has these features, which [`super::for_isa`] makes sure of.
//! Functions in the tables further require what the methods of [`super::KernelTable`] check.

mod cols;
mod dequantize;
mod lanes;
mod planes;
mod quantize;
mod range;

use std::arch::x86_64::*;

use half::{bf16, f16};

use planes::PlaneLanes;

use super::rng::{Key, MUL_1, MUL_2};
use super::{Element, Isa, KernelTable, PlaneTable, scalar_planes};

/// The kernels of this level over elements of type `T`.
pub(super) const fn table<T: PlaneLanes>() -> KernelTable<T> {
    KernelTable {
        range_rows: range::range_rows,
        quantize_rows: quantize::quantize_rows,
        dequantize_rows: dequantize::dequantize_rows,
        range_cols: cols::range,
        quantize_cols: cols::quantize,
        dequantize_cols: cols::dequantize,
        nonzero_plane_rows: planes::nonzero_rows,
        nonzero_plane_cols: planes::nonzero_cols,
        apply_nonzero_rows: planes::apply_nonzero_rows,
        apply_nonzero_cols: planes::apply_nonzero_cols,
        predicate_plane: planes::predicate,
        sign_planes: planes::sign,
        sign_values: planes::sign_values,
        ..KernelTable::scalar(Isa::Avx512)
    }
}

/// The plane kernels of this level.
pub(super) const fn plane_table() -> PlaneTable {
    PlaneTable {
        compact: super::avx2::bits::compact,
        expand: super::avx2::bits::expand,
        match_plane: planes::match_plane,
        select: planes::select,
        copy,
        fence,
        ..scalar_planes(Isa::Avx512)
    }
}

/// Copies past the caches whole lines of `dst`; `fence` must follow.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn copy(src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: vectors of bytes have no invalid values.
    let (head, lines, _) = unsafe { dst.align_to_mut::<__m512i>() };
    let (head, lines) = (head.len(), lines.len());
    dst[..head].copy_from_slice(&src[..head]);
    for i in 0..lines {
        let at = head + 64 * i;
        // SAFETY: `align_to_mut` found `lines` whole, aligned vectors behind `head` bytes; `src` is as long as `dst`.
        unsafe {
            let line = _mm512_loadu_si512(src.as_ptr().add(at).cast());
            _mm512_stream_si512(dst.as_mut_ptr().add(at).cast(), line);
        }
    }
    let tail = head + 64 * lines;
    dst[tail..].copy_from_slice(&src[tail..]);
}

/// Other threads see streamed stores in order only behind this.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn fence() {
    _mm_sfence();
}

/// Elements that the inner loops take at once: two dither steps.
const UNIT: usize = 64;

/// Loads and stores of 16 elements as f32.
pub(super) trait Lanes: Element {
    /// # Safety
    /// 16 elements can be read at `ptr`.
    unsafe fn load(ptr: *const Self) -> __m512;
    /// Clamps to the finite range and rounds to nearest even, for the half types.
    ///
    /// # Safety
    /// 16 elements can be written at `ptr`.
    unsafe fn store(ptr: *mut Self, x: __m512);
    /// As `store` for four vectors, without the clamp unless `clamp` and past the caches if `stream`.
    ///
    /// # Safety
    /// 64 elements can be written at `ptr`; with `stream` it is aligned to 64 bytes.
    unsafe fn store_unit(ptr: *mut Self, values: [__m512; 4], clamp: bool, stream: bool);
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn load(ptr: *const f32) -> __m512 {
        // SAFETY: the caller gives 16 readable elements.
        unsafe { _mm512_loadu_ps(ptr) }
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store(ptr: *mut f32, x: __m512) {
        // SAFETY: the caller gives room for 16 elements.
        unsafe { _mm512_storeu_ps(ptr, x) };
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store_unit(ptr: *mut f32, values: [__m512; 4], clamp: bool, stream: bool) {
        let _ = clamp;
        for (i, x) in values.into_iter().enumerate() {
            // SAFETY: the caller gives room for four vectors, aligned if streamed.
            unsafe { write(ptr.add(16 * i).cast(), _mm512_castps_si512(x), stream) };
        }
    }
}

impl Lanes for f16 {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn load(ptr: *const f16) -> __m512 {
        // SAFETY: the caller gives 16 readable elements of 2 bytes.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(ptr.cast()) })
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store(ptr: *mut f16, x: __m512) {
        // SAFETY: the caller gives room for 16 elements of 2 bytes.
        unsafe { _mm256_storeu_si256(ptr.cast(), to_f16(x)) };
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store_unit(ptr: *mut f16, values: [__m512; 4], clamp: bool, stream: bool) {
        let [a, b, c, d] = if clamp {
            values.map(|x| limit(x, f16::MAX.to_f32_const()))
        } else {
            values
        };
        for (i, (low, high)) in [(a, b), (c, d)].into_iter().enumerate() {
            let low = _mm512_castsi256_si512(round_f16(low));
            let pair = _mm512_inserti64x4::<1>(low, round_f16(high));
            // SAFETY: the caller gives room for two vectors, aligned if streamed.
            unsafe { write(ptr.add(32 * i).cast(), pair, stream) };
        }
    }
}

impl Lanes for bf16 {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn load(ptr: *const bf16) -> __m512 {
        // SAFETY: the caller gives 16 readable elements of 2 bytes.
        let bits = unsafe { _mm256_loadu_si256(ptr.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store(ptr: *mut bf16, x: __m512) {
        // SAFETY: the caller gives room for 16 elements of 2 bytes.
        unsafe { _mm256_storeu_si256(ptr.cast(), to_bf16(x)) };
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store_unit(ptr: *mut bf16, values: [__m512; 4], clamp: bool, stream: bool) {
        let [a, b, c, d] = if clamp {
            values.map(|x| limit(x, bf16::MAX.to_f32_const()))
        } else {
            values
        };
        let order = permutation(&EVEN_THEN_ODD);
        for (i, (low, high)) in [(a, b), (c, d)].into_iter().enumerate() {
            // The upper halves side by side, then in element order.
            let low = _mm512_srli_epi32::<16>(round_bf16(low));
            let pair = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, round_bf16(high));
            // SAFETY: the caller gives room for two vectors, aligned if streamed.
            unsafe {
                write(
                    ptr.add(32 * i).cast(),
                    _mm512_permutexvar_epi16(order, pair),
                    stream,
                )
            };
        }
    }
}

/// Writes a vector, past the caches if `stream`.
///
/// # Safety
/// 64 bytes can be written at `ptr`; with `stream` it is aligned to 64 bytes.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn write(ptr: *mut __m512i, x: __m512i, stream: bool) {
    // SAFETY: room and alignment are the caller's promise.
    unsafe {
        if stream {
            _mm512_stream_si512(ptr, x);
        } else {
            _mm512_storeu_si512(ptr, x);
        }
    }
}

/// The nearest values in -max..=max.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn limit(x: __m512, max: f32) -> __m512 {
    _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-max)), _mm512_set1_ps(max))
}

#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn round_f16(x: __m512) -> __m256i {
    _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
}

/// The nearest bfloat16 values, ties to even, as the upper halves of the lanes. By hand: the conversion instruction flushes subnormals to
/// zero.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn round_bf16(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
    let half = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
    _mm512_add_epi32(bits, half)
}

/// The nearest finite binary16 values, ties to even.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn to_f16(x: __m512) -> __m256i {
    round_f16(limit(x, f16::MAX.to_f32_const()))
}

/// The nearest finite bfloat16 values, ties to even.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn to_bf16(x: __m512) -> __m256i {
    let rounded = round_bf16(limit(x, bf16::MAX.to_f32_const()));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
}

/// The random words of the two steps that begin at `step`: lane i is word `8 * step + i`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn words(key: Key, step: u32) -> __m512i {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let x = _mm512_add_epi32(
        lanes,
        _mm512_set1_epi32(step.wrapping_mul(8).wrapping_add(key.k0) as i32),
    );
    let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
    let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(MUL_1 as i32));
    let x = _mm512_ternarylogic_epi32::<0x96>(
        x,
        _mm512_srli_epi32::<15>(x),
        _mm512_set1_epi32(key.k1 as i32),
    );
    let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(MUL_2 as i32));
    _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x))
}

/// Byte order of a unit in the loops: byte `4 l + i` belongs to element `ORDER[i] + l`, so that 16-bit halves of 32-bit lanes hold
/// elements l and l + 16.
const ORDER: [usize; 4] = [0, 32, 16, 48];

/// For each byte in loop order, where its dither byte lies in [`words`].
const DITHER: [u8; 64] = {
    let mut table = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let element = ORDER[byte % 4] + byte / 4;
        let (step, e) = (element / 32, element % 32);
        table[byte] = (4 * (8 * step + e % 8) + e / 8) as u8;
        byte += 1;
    }
    table
};

/// For each byte in loop order, its element: takes bytes in element order to loop order.
const TO_LOOP: [u8; 64] = {
    let mut table = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        table[byte] = (ORDER[byte % 4] + byte / 4) as u8;
        byte += 1;
    }
    table
};

/// The inverse of [`TO_LOOP`].
const TO_ELEMENTS: [u8; 64] = {
    let mut table = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        table[TO_LOOP[byte] as usize] = byte as u8;
        byte += 1;
    }
    table
};

/// As bytes, the positions of the even 16-bit words, then of the odd ones.
const EVEN_THEN_ODD: [u8; 64] = {
    let mut table = [0; 64];
    let mut word = 0;
    while word < 32 {
        table[2 * word] = (2 * (word % 16) + word / 16) as u8;
        word += 1;
    }
    table
};

/// A table of positions as a vector.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn permutation(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Fetches the lines of streams `$streams` ahead of address `$at`.
macro_rules! fetch {
    ($ahead:expr, $at:expr, $streams:expr) => {
        for k in $streams {
            if let Some(line) = $ahead.line($at, k) {
                _mm_prefetch::<_MM_HINT_T1>(line);
            }
        }
    };
}

use fetch;
