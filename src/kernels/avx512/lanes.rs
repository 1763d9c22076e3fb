//! Vectors of which only some lanes are elements, for columns.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Lanes, to_bf16, to_f16};
use crate::kernels::Prefetch;

/// The first `n` (0 to 16, more counts as 16) of 16 lanes.
pub(super) const fn first(n: usize) -> __mmask16 {
    if n >= 16 { !0 } else { (1 << n) - 1 }
}

/// Loads and stores of some of 16 elements as f32.
pub(in crate::kernels) trait MaskedLanes: Lanes {
    /// The elements in `mask`, 0 in the other lanes.
    ///
    /// # Safety
    /// The elements in `mask` can be read at `ptr`; nothing is read of others.
    unsafe fn load_masked(mask: __mmask16, ptr: *const Self) -> __m512;

    /// As [`Lanes::store`], the lanes in `mask`.
    ///
    /// # Safety
    /// The elements in `mask` can be written at `ptr`; nothing is written to others.
    unsafe fn store_masked(ptr: *mut Self, mask: __mmask16, x: __m512);
}

impl MaskedLanes for f32 {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn load_masked(mask: __mmask16, ptr: *const f32) -> __m512 {
        // SAFETY: readable in the mask, by the caller; other lanes do not fault.
        unsafe { _mm512_maskz_loadu_ps(mask, ptr) }
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn store_masked(ptr: *mut f32, mask: __mmask16, x: __m512) {
        // SAFETY: writable in the mask, by the caller; other lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(ptr, mask, x) }
    }
}

/// The 16-bit types differ in the conversion only.
macro_rules! half_lanes {
    ($T:ty, $from:path, $to:path) => {
        impl MaskedLanes for $T {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn load_masked(mask: __mmask16, ptr: *const $T) -> __m512 {
                // SAFETY: readable in the mask, by the caller; other lanes do not fault.
                $from(unsafe { _mm256_maskz_loadu_epi16(mask, ptr.cast()) })
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn store_masked(ptr: *mut $T, mask: __mmask16, x: __m512) {
                // SAFETY: writable in the mask, by the caller; other lanes are not touched.
                unsafe { _mm256_mask_storeu_epi16(ptr.cast(), mask, $to(x)) }
            }
        }
    };
}

half_lanes!(f16, _mm512_cvtph_ps, to_f16);
half_lanes!(bf16, from_bf16, to_bf16);

#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn from_bf16(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// Fetches up to `lines` lines of what comes next into the second-level cache.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
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
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer toolchains")]
pub(super) fn fetch_row<T>(row: *const T, width: usize) {
    let bytes = width * size_of::<T>();
    for at in (0..bytes).step_by(64).chain([bytes - 1]) {
        // SAFETY: a prefetch is a hint and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.cast::<i8>().wrapping_add(at)) };
    }
}
