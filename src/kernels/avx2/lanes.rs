//! Loads and stores of 8 elements as f32.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::kernels::{Element, Prefetch};

/// Loads and stores of 8 elements, or the first of them, as f32.
pub(in crate::kernels) trait Lanes: Element {
    /// # Safety
    /// 8 elements can be read at `ptr`.
    unsafe fn load(ptr: *const Self) -> __m256;

    /// The first `n` elements (up to 8), 0 in the other lanes.
    ///
    /// # Safety
    /// `n` elements can be read at `ptr`, and `n` is at most 8; nothing is read behind them.
    unsafe fn load_first(n: usize, ptr: *const Self) -> __m256;

    /// Clamps to the finite range and rounds to nearest even, for the half types.
    ///
    /// # Safety
    /// 8 elements can be written at `ptr`.
    unsafe fn store(ptr: *mut Self, x: __m256);

    /// As `store`, the first `n` lanes (up to 8).
    ///
    /// # Safety
    /// `n` elements can be written at `ptr`, and `n` is at most 8; nothing is written behind them.
    unsafe fn store_first(n: usize, ptr: *mut Self, x: __m256);

    /// As `store` for four vectors, without the clamp unless `clamp` and past the caches if `stream`.
    ///
    /// # Safety
    /// 32 elements can be written at `ptr`; with `stream` it is aligned to 32 bytes.
    unsafe fn store_unit(ptr: *mut Self, values: [__m256; 4], clamp: bool, stream: bool);
}

/// All bits set in the first `n` of 8 lanes; `n` is at most 8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn first(n: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes)
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn load(ptr: *const f32) -> __m256 {
        // SAFETY: the caller gives 8 readable elements.
        unsafe { _mm256_loadu_ps(ptr) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn load_first(n: usize, ptr: *const f32) -> __m256 {
        // SAFETY: the caller gives n readable elements; other lanes are not read.
        unsafe { _mm256_maskload_ps(ptr, first(n)) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn store(ptr: *mut f32, x: __m256) {
        // SAFETY: the caller gives room for 8 elements.
        unsafe { _mm256_storeu_ps(ptr, x) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn store_first(n: usize, ptr: *mut f32, x: __m256) {
        // SAFETY: the caller gives room for n elements; other lanes are not written.
        unsafe { _mm256_maskstore_ps(ptr, first(n), x) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn store_unit(ptr: *mut f32, values: [__m256; 4], _clamp: bool, stream: bool) {
        for (i, x) in values.into_iter().enumerate() {
            // SAFETY: the caller gives room for four vectors, aligned if streamed.
            unsafe { write(ptr.add(8 * i).cast(), _mm256_castps_si256(x), stream) };
        }
    }
}

/// Writes a vector, past the caches if `stream`.
///
/// # Safety
/// 32 bytes can be written at `ptr`; with `stream` it is aligned to 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
unsafe fn write(ptr: *mut __m256i, x: __m256i, stream: bool) {
    // SAFETY: room and alignment are the caller's promise.
    unsafe {
        if stream {
            _mm256_stream_si256(ptr, x);
        } else {
            _mm256_storeu_si256(ptr, x);
        }
    }
}

/// The 16-bit types differ in the conversions only.
macro_rules! half_lanes {
    ($T:ty, $from:path, $to:path, $pair:path) => {
        impl Lanes for $T {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn load(ptr: *const $T) -> __m256 {
                // SAFETY: the caller gives 8 readable elements of 2 bytes.
                $from(unsafe { _mm_loadu_si128(ptr.cast()) })
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn load_first(n: usize, ptr: *const $T) -> __m256 {
                let mut all = [<$T>::ZERO; 8];
                // SAFETY: the caller gives n <= 8 readable elements; the array has 16 bytes.
                unsafe {
                    all.as_mut_ptr().copy_from_nonoverlapping(ptr, n);
                    $from(_mm_loadu_si128(all.as_ptr().cast()))
                }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn store(ptr: *mut $T, x: __m256) {
                // SAFETY: the caller gives room for 8 elements of 2 bytes.
                unsafe { _mm_storeu_si128(ptr.cast(), $to(x)) }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn store_first(n: usize, ptr: *mut $T, x: __m256) {
                let mut all = [<$T>::ZERO; 8];
                // SAFETY: the array has 16 bytes; the caller gives room for n <= 8 elements.
                unsafe {
                    _mm_storeu_si128(all.as_mut_ptr().cast(), $to(x));
                    ptr.copy_from_nonoverlapping(all.as_ptr(), n);
                }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn store_unit(ptr: *mut $T, values: [__m256; 4], clamped: bool, stream: bool) {
                let [a, b, c, d] = if clamped {
                    values.map(|x| clamp(x, <$T>::MAX.to_f32_const()))
                } else {
                    values
                };
                // SAFETY: the caller gives room for two vectors, aligned if streamed.
                unsafe {
                    write(ptr.cast(), $pair(a, b), stream);
                    write(ptr.add(16).cast(), $pair(c, d), stream);
                }
            }
        }
    };
}

half_lanes!(f16, _mm256_cvtph_ps, to_f16, pair_f16);
half_lanes!(bf16, from_bf16, to_bf16, pair_bf16);

#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn clamp(x: __m256, limit: f32) -> __m256 {
    _mm256_min_ps(
        _mm256_max_ps(x, _mm256_set1_ps(-limit)),
        _mm256_set1_ps(limit),
    )
}

/// The nearest finite binary16 values, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn to_f16(x: __m256) -> __m128i {
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(clamp(x, f16::MAX.to_f32_const()))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn from_bf16(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

/// The nearest binary16 values of two vectors, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn pair_f16(a: __m256, b: __m256) -> __m256i {
    _mm256_set_m128i(
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(b),
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a),
    )
}

/// The nearest bfloat16 values, ties to even, in the lower halves of the lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn round_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let above = _mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff));
    _mm256_srli_epi32::<16>(_mm256_add_epi32(above, odd))
}

/// The nearest bfloat16 values of two vectors, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn pair_bf16(a: __m256, b: __m256) -> __m256i {
    // Packing works within 128-bit halves: the quarters come in the order 0, 2, 1, 3.
    let packed = _mm256_packus_epi32(round_bf16(a), round_bf16(b));
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
}

/// The nearest finite bfloat16 values, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn to_bf16(x: __m256) -> __m128i {
    let x = clamp(x, bf16::MAX.to_f32_const());
    _mm256_castsi256_si128(pair_bf16(x, x))
}

/// Fetches up to `lines` lines of what comes next into the second-level cache.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer toolchains")]
pub(super) fn fetch(ahead: &mut Prefetch, lines: usize) {
    for _ in 0..lines {
        let Some(line) = ahead.next_line() else {
            return;
        };
        // SAFETY: a prefetch is a hint and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
    }
}

/// Fetches the lines of `width` elements from `row` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer toolchains")]
pub(super) fn fetch_row<T>(row: *const T, width: usize) {
    let bytes = width * size_of::<T>();
    for at in (0..bytes).step_by(64).chain([bytes - 1]) {
        // SAFETY: a prefetch is a hint and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.cast::<i8>().wrapping_add(at)) };
    }
}
