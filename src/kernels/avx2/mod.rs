//! Kernels with AVX2, FMA, F16C, BMI1, BMI2, POPCNT.
//!
//! # Safety
//! Every function here is `#[target_feature]`: it may be called where the CPU has these features, which [`super::for_isa`] makes sure of.
//! Functions in the tables further require what the methods of [`super::KernelTable`] check.

pub(super) mod bits;
mod cols;
mod dequantize;
mod lanes;
mod planes;
mod quantize;
mod range;

use std::arch::x86_64::*;

use planes::PlaneLanes;

use super::prefetch::RowsAhead;
use super::rng::{Key, MUL_1, MUL_2};
use super::{Isa, KernelTable, PlaneTable, scalar_planes};

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
        ..KernelTable::scalar(Isa::Avx2)
    }
}

/// The plane kernels of this level.
pub(super) const fn plane_table() -> PlaneTable {
    PlaneTable {
        compact: bits::compact,
        expand: bits::expand,
        match_plane: planes::match_plane,
        select: planes::select,
        copy,
        fence,
        ..scalar_planes(Isa::Avx2)
    }
}

/// Elements that the inner loops over rows take at once: a dither step.
const UNIT: usize = 32;

/// Copies past the caches whole vectors of `dst`; `fence` must follow.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn copy(src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: vectors of bytes have no invalid values.
    let (head, vectors, _) = unsafe { dst.align_to_mut::<__m256i>() };
    let (head, vectors) = (head.len(), vectors.len());
    dst[..head].copy_from_slice(&src[..head]);
    for i in 0..vectors {
        let at = head + 32 * i;
        // SAFETY: `align_to_mut` found `vectors` whole, aligned vectors behind `head` bytes; `src` is as long as `dst`.
        unsafe {
            let x = _mm256_loadu_si256(src.as_ptr().add(at).cast());
            _mm256_stream_si256(dst.as_mut_ptr().add(at).cast(), x);
        }
    }
    let tail = head + 32 * vectors;
    dst[tail..].copy_from_slice(&src[tail..]);
}

/// Other threads see streamed stores in order only behind this.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn fence() {
    _mm_sfence();
}

/// Fetches the lines of streams `first..end` ahead of address `at` into the second-level cache.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn fetch_rows(ahead: RowsAhead, at: usize, first: usize, end: usize) {
    for k in first..end {
        if let Some(line) = ahead.line(at, k) {
            _mm_prefetch::<_MM_HINT_T1>(line);
        }
    }
}

/// The random words of step `step`: byte b of lane i is the dither byte of element 8 b + i.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn words(key: Key, step: u32) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let first = step.wrapping_mul(8).wrapping_add(key.k0);
    let x = _mm256_add_epi32(lanes, _mm256_set1_epi32(first as i32));
    let x = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
    let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(MUL_1 as i32));
    let x = _mm256_xor_si256(x, _mm256_srli_epi32::<15>(x));
    let x = _mm256_xor_si256(x, _mm256_set1_epi32(key.k1 as i32));
    let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(MUL_2 as i32));
    _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x))
}
