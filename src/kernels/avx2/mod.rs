//! Kernels with AVX2, FMA, F16C, BMI1, BMI2, POPCNT.
//!
//! # Safety
//! Every function here is `#[target_feature]`: it may be called where the CPU has these features, which [`super::for_isa`] makes sure of.
//! Functions in the tables further require what the methods of [`super::KernelTable`] check.

mod cols;
mod lanes;

use std::arch::x86_64::*;

use lanes::Lanes;

use super::rng::{Key, MUL_1, MUL_2};
use super::{Isa, KernelTable, PlaneTable, scalar_planes};

/// The kernels of this level over elements of type `T`.
pub(super) const fn table<T: Lanes>() -> KernelTable<T> {
    KernelTable {
        range_cols: cols::range,
        quantize_cols: cols::quantize,
        dequantize_cols: cols::dequantize,
        ..KernelTable::scalar(Isa::Avx2)
    }
}

/// The plane kernels of this level.
pub(super) const fn plane_table() -> PlaneTable {
    scalar_planes(Isa::Avx2)
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
