//! One bit an element: comparisons, 8 lanes or 32 bytes at a time, and the inverse. What is left of less than a word, the scalar kernels do.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::Lanes;
use crate::kernels::bits::words;
use crate::kernels::scalar;
use crate::kernels::types::{ColumnShape, Columns, Predicate};

/// Elements as bits.
pub(in crate::kernels) trait PlaneLanes: Lanes {
    /// Which of 8 elements are not zero.
    ///
    /// # Safety
    /// 8 elements can be read at `ptr`.
    unsafe fn nonzero_8(ptr: *const Self) -> u8;

    /// Which of 32 elements are not zero.
    ///
    /// # Safety
    /// 32 elements can be read at `ptr`.
    unsafe fn nonzero_32(ptr: *const Self) -> u32;

    /// Of 8 elements, makes those +0 that are not in `nonzero`, and those the floor that are below it.
    ///
    /// # Safety
    /// 8 elements can be read and written at `ptr`.
    unsafe fn apply_8(ptr: *mut Self, nonzero: u8, floor: &Floor<Self>);

    /// Writes 1 where `positive`, -1 where `negative` has a bit, else 0; where both have one, 0.
    ///
    /// # Safety
    /// 8 elements can be written at `ptr`.
    unsafe fn signs_8(ptr: *mut Self, positive: u8, negative: u8);
}

/// The least value of 8 elements, as f32 and as elements.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Floor<T> {
    floor: [f32; 8],
    value: [T; 8],
}

impl<T: PlaneLanes> Floor<T> {
    /// Of up to 8 columns.
    fn of(floors: &[f32]) -> Floor<T> {
        let floor = std::array::from_fn(|i| floors.get(i).copied().unwrap_or(f32::NEG_INFINITY));
        Floor {
            floor,
            value: floor.map(T::from_f32_finite),
        }
    }
}

/// All bits set in the 32-bit lanes whose bit is set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn lanes_of(bits: u8) -> __m256i {
    let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    _mm256_cmpeq_epi32(
        _mm256_and_si256(_mm256_set1_epi32(i32::from(bits)), each),
        each,
    )
}

/// All bits set in the 16-bit lanes whose bit is set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn half_lanes_of(bits: u8) -> __m128i {
    let each = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
    _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(i16::from(bits)), each), each)
}

impl PlaneLanes for f32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn nonzero_8(ptr: *const f32) -> u8 {
        // SAFETY: the caller gives 8 readable elements.
        let x = unsafe { _mm256_loadu_si256(ptr.cast()) };
        // Doubling drops the sign.
        let zero = _mm256_cmpeq_epi32(_mm256_add_epi32(x, x), _mm256_setzero_si256());
        !_mm256_movemask_ps(_mm256_castsi256_ps(zero)) as u8
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn nonzero_32(ptr: *const f32) -> u32 {
        let mut zero = [_mm256_setzero_si256(); 4];
        for (k, zero) in zero.iter_mut().enumerate() {
            // SAFETY: the caller gives 32 readable elements.
            let x = unsafe { _mm256_loadu_si256(ptr.add(8 * k).cast()) };
            *zero = _mm256_cmpeq_epi32(_mm256_add_epi32(x, x), *zero);
        }
        let pairs = [
            _mm256_packs_epi32(zero[0], zero[1]),
            _mm256_packs_epi32(zero[2], zero[3]),
        ];
        // Packing works within 128-bit halves: the parts of 4 bytes are of vectors 0 to 3, first halves, then second halves.
        let bytes = _mm256_packs_epi16(pairs[0], pairs[1]);
        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        !_mm256_movemask_epi8(bytes) as u32
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn apply_8(ptr: *mut f32, nonzero: u8, floor: &Floor<f32>) {
        let nonzero = _mm256_castsi256_ps(lanes_of(nonzero));
        // SAFETY: the caller gives 8 readable and writable elements; the array has 8 numbers.
        unsafe {
            let floor = _mm256_loadu_ps(floor.floor.as_ptr());
            let x = _mm256_loadu_ps(ptr);
            let x = _mm256_blendv_ps(x, floor, _mm256_cmp_ps::<_CMP_LT_OQ>(x, floor));
            _mm256_storeu_ps(ptr, _mm256_and_ps(x, nonzero));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn signs_8(ptr: *mut f32, positive: u8, negative: u8) {
        let (above, below) = (
            lanes_of(positive & !negative),
            lanes_of(negative & !positive),
        );
        let ones = _mm256_and_ps(_mm256_castsi256_ps(above), _mm256_set1_ps(1.0));
        let x = _mm256_or_ps(
            ones,
            _mm256_and_ps(_mm256_castsi256_ps(below), _mm256_set1_ps(-1.0)),
        );
        // SAFETY: the caller gives room for 8 elements.
        unsafe { _mm256_storeu_ps(ptr, x) }
    }
}

/// The 16-bit types keep their bits (NaN, infinities) where they are not changed.
macro_rules! half_planes {
    ($T:ident) => {
        impl PlaneLanes for $T {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn nonzero_8(ptr: *const $T) -> u8 {
                // SAFETY: the caller gives 8 readable elements of 2 bytes.
                let x = unsafe { _mm_loadu_si128(ptr.cast()) };
                let zero = _mm_cmpeq_epi16(_mm_add_epi16(x, x), _mm_setzero_si128());
                !_mm_movemask_epi8(_mm_packs_epi16(zero, zero)) as u8
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn nonzero_32(ptr: *const $T) -> u32 {
                let mut zero = [_mm256_setzero_si256(); 2];
                for (k, zero) in zero.iter_mut().enumerate() {
                    // SAFETY: the caller gives 32 readable elements of 2 bytes.
                    let x = unsafe { _mm256_loadu_si256(ptr.add(16 * k).cast()) };
                    *zero = _mm256_cmpeq_epi16(_mm256_add_epi16(x, x), *zero);
                }
                // Packing works within 128-bit halves: quarters 0 and 2 are of vector 0.
                let bytes =
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(zero[0], zero[1]));
                !_mm256_movemask_epi8(bytes) as u32
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn apply_8(ptr: *mut $T, nonzero: u8, floor: &Floor<$T>) {
                // SAFETY: the caller gives 8 readable and writable elements of 2 bytes; the arrays have 8 numbers.
                unsafe {
                    let bits = _mm_loadu_si128(ptr.cast());
                    let below = _mm256_cmp_ps::<_CMP_LT_OQ>(
                        <$T>::load(ptr),
                        _mm256_loadu_ps(floor.floor.as_ptr()),
                    );
                    let below = _mm256_castps_si256(below);
                    let below = _mm_packs_epi32(
                        _mm256_castsi256_si128(below),
                        _mm256_extracti128_si256::<1>(below),
                    );
                    let value = _mm_loadu_si128(floor.value.as_ptr().cast());
                    let x = _mm_blendv_epi8(bits, value, below);
                    _mm_storeu_si128(ptr.cast(), _mm_and_si128(x, half_lanes_of(nonzero)));
                }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn signs_8(ptr: *mut $T, positive: u8, negative: u8) {
                let [one, minus_one] =
                    [$T::ONE, $T::NEG_ONE].map(|x| _mm_set1_epi16(x.to_bits() as i16));
                let (above, below) = (
                    half_lanes_of(positive & !negative),
                    half_lanes_of(negative & !positive),
                );
                let x = _mm_or_si128(_mm_and_si128(above, one), _mm_and_si128(below, minus_one));
                // SAFETY: the caller gives room for 8 elements of 2 bytes.
                unsafe { _mm_storeu_si128(ptr.cast(), x) }
            }
        }
    };
}

half_planes!(f16);
half_planes!(bf16);

/// Up to 8 elements, with zeros behind the last.
#[inline]
fn eight<T: PlaneLanes>(src: &[T]) -> [T; 8] {
    let mut all = [T::zeroed(); 8];
    all[..src.len()].copy_from_slice(src);
    all
}

/// Plane of the elements that are not zero, and their number.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn nonzero_rows<T: PlaneLanes>(src: &[T], out: &mut [u8]) -> usize {
    let (blocks, rest) = src.as_chunks::<64>();
    let (words, last) = out.split_at_mut(8 * blocks.len());
    let mut count = 0;
    for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
        // SAFETY: the block has 64 elements.
        let (low, high) = unsafe {
            (
                T::nonzero_32(block.as_ptr()),
                T::nonzero_32(block.as_ptr().add(32)),
            )
        };
        let bits = u64::from(low) | u64::from(high) << 32;
        count += bits.count_ones() as usize;
        *out = bits.to_le_bytes();
    }
    count + scalar::planes::nonzero_rows(rest, last)
}

/// As [`nonzero_rows`] for a row group of a channel tile.
///
/// # Safety
/// As [`super::KernelTable::nonzero_plane_cols`] checks.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) unsafe fn nonzero_cols<T: PlaneLanes>(
    columns: &Columns<'_, T>,
    out: &mut [u8],
) -> usize {
    let ColumnShape {
        pitch, rows, width, ..
    } = columns.shape;
    let out = &mut out[columns.shape.first_slot() / 8..];
    // Whole rows without padding are one long row.
    let one_row = pitch == width && width.is_multiple_of(8);
    let (rows, width) = if one_row {
        (1, rows * width)
    } else {
        (rows, width)
    };
    let mut bytes = out.iter_mut();
    let mut count = 0;
    for r in 0..rows {
        let row = &columns.src[r * pitch..][..width];
        let (blocks, rest) = row.as_chunks::<32>();
        for block in blocks {
            // SAFETY: the block has 32 elements.
            let bits = unsafe { T::nonzero_32(block.as_ptr()) };
            count += bits.count_ones() as usize;
            // The bytes of the value first: zip must not take a place that it has nothing for.
            for (byte, to) in bits.to_le_bytes().into_iter().zip(bytes.by_ref()) {
                *to = byte;
            }
        }
        for part in rest.chunks(8) {
            // SAFETY: the array has 8 elements.
            let bits = unsafe { T::nonzero_8(eight(part).as_ptr()) };
            count += bits.count_ones() as usize;
            if let Some(to) = bytes.next() {
                *to = bits;
            }
        }
    }
    bytes.for_each(|byte| *byte = 0);
    count
}

/// Zeros where `nonzero` has no bit, the others at least their floor, of up to 8 elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn apply<T: PlaneLanes>(dst: &mut [T], nonzero: u8, floor: &Floor<T>) {
    if dst.len() == 8 {
        // SAFETY: the slice has 8 elements.
        unsafe { T::apply_8(dst.as_mut_ptr(), nonzero, floor) };
    } else {
        let mut all = eight(dst);
        // SAFETY: the array has 8 elements.
        unsafe { T::apply_8(all.as_mut_ptr(), nonzero, floor) };
        dst.copy_from_slice(&all[..dst.len()]);
    }
}

/// Zeros where the plane has them, the others at least their floor.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn apply_nonzero_rows<T: PlaneLanes>(
    nonzero: &[u8],
    slot0: usize,
    group: usize,
    floor: &[f32],
    dst: &mut [T],
) {
    let bits = &nonzero[slot0 / 8..];
    for ((dst, bits), floor) in dst.chunks_mut(group).zip(bits.chunks(group / 8)).zip(floor) {
        let floor = Floor::of(&[*floor; 8]);
        for (dst, &bits) in dst.chunks_mut(8).zip(bits) {
            apply(dst, bits, &floor);
        }
    }
}

/// As [`apply_nonzero_rows`] for a row group of a channel tile.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn apply_nonzero_cols<T: PlaneLanes>(
    nonzero: &[u8],
    shape: &ColumnShape,
    floor: &[f32],
    dst: &mut [T],
) {
    let floors: [Floor<T>; 16] =
        std::array::from_fn(|k| Floor::of(floor.get(8 * k..).unwrap_or(&[])));
    for r in 0..shape.rows {
        let bits = &nonzero[(shape.first_row + r) * shape.padded_width() / 8..];
        let row = &mut dst[r * shape.pitch..][..shape.width];
        for ((dst, &bits), floor) in row.chunks_mut(8).zip(bits).zip(&floors) {
            apply(dst, bits, floor);
        }
    }
}

/// Bits where a comparison holds, of 64 elements.
macro_rules! compare {
    ($block:expr, $x:ident => $mask:expr) => {{
        let mut bits = 0;
        for k in 0..8 {
            // SAFETY: the block has 64 elements.
            let $x = unsafe { T::load($block.as_ptr().add(8 * k)) };
            bits |= u64::from(_mm256_movemask_ps($mask) as u8) << (8 * k);
        }
        bits
    }};
}

/// Plane of the elements that a predicate holds for.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn predicate<T: PlaneLanes>(src: &[T], predicate: Predicate, out: &mut [u8]) {
    let (blocks, rest) = src.as_chunks::<64>();
    let (words, last) = out.split_at_mut(8 * blocks.len());
    for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
        let bits = match predicate {
            Predicate::GreaterOrNan { t } => {
                compare!(block, x => _mm256_cmp_ps::<_CMP_NLE_UQ>(x, _mm256_set1_ps(t)))
            }
            Predicate::Within { lo, hi } => compare!(block, x => _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_GE_OQ>(x, _mm256_set1_ps(lo)), _mm256_cmp_ps::<_CMP_LE_OQ>(x, _mm256_set1_ps(hi)))),
            Predicate::NotBeyond { lo, hi } => compare!(block, x => _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_NLE_UQ>(x, _mm256_set1_ps(lo)), _mm256_cmp_ps::<_CMP_NGE_UQ>(x, _mm256_set1_ps(hi)))),
        };
        *out = bits.to_le_bytes();
    }
    scalar::planes::predicate(rest, predicate, last);
}

/// Planes of the positive and the negative elements; false with a NaN.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn sign<T: PlaneLanes>(src: &[T], positive: &mut [u8], negative: &mut [u8]) -> bool {
    let (blocks, rest) = src.as_chunks::<64>();
    let (above, last_above) = positive.split_at_mut(8 * blocks.len());
    let (below, last_below) = negative.split_at_mut(8 * blocks.len());
    let zero = _mm256_setzero_ps();
    let mut unordered = 0;
    for ((block, above), below) in blocks
        .iter()
        .zip(above.as_chunks_mut::<8>().0)
        .zip(below.as_chunks_mut::<8>().0)
    {
        let bits: u64 = compare!(block, x => _mm256_cmp_ps::<_CMP_GT_OQ>(x, zero));
        *above = bits.to_le_bytes();
        let bits: u64 = compare!(block, x => _mm256_cmp_ps::<_CMP_LT_OQ>(x, zero));
        *below = bits.to_le_bytes();
        unordered |= compare!(block, x => _mm256_cmp_ps::<_CMP_UNORD_Q>(x, zero));
    }
    scalar::planes::sign(rest, last_above, last_below) && unordered == 0
}

/// 1, -1 and 0 from two planes.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn sign_values<T: PlaneLanes>(positive: &[u8], negative: &[u8], dst: &mut [T]) {
    for ((dst, &positive), &negative) in dst.chunks_mut(8).zip(positive).zip(negative) {
        if dst.len() == 8 {
            // SAFETY: the slice has 8 elements.
            unsafe { T::signs_8(dst.as_mut_ptr(), positive, negative) };
        } else {
            let mut all = [T::zeroed(); 8];
            // SAFETY: the array has 8 elements.
            unsafe { T::signs_8(all.as_mut_ptr(), positive, negative) };
            dst.copy_from_slice(&all[..dst.len()]);
        }
    }
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The loop over blocks of 64 words: `$bits` makes the bits of $lanes words from the comparisons of one or two vectors.
macro_rules! match_words {
    ($name:ident, $bytes:literal, $set1:ident, $int:ty, $eq:ident, $vectors:literal, $lanes:literal, $equal:ident => $bits:expr) => {
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
        fn $name(src: &[u8], a: u64, b: u64, out: &mut [u8]) -> bool {
            let (va, vb) = ($set1(a as $int), $set1(b as $int));
            let (blocks, rest) = src.as_chunks::<{ 64 * $bytes }>();
            let (words, last) = out.split_at_mut(8 * blocks.len());
            for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
                let (mut is_b, mut known) = (0, _mm256_set1_epi8(-1));
                for (k, part) in block.as_chunks::<{ 32 * $vectors }>().0.iter().enumerate() {
                    let mut $equal = [_mm256_setzero_si256(); $vectors];
                    for (equal, vector) in $equal.iter_mut().zip(part.as_chunks::<32>().0) {
                        let x = load(vector);
                        *equal = $eq(x, vb);
                        known = _mm256_and_si256(known, _mm256_or_si256(*equal, $eq(x, va)));
                    }
                    is_b |= u64::from($bits as u32) << (k * $lanes);
                }
                if _mm256_movemask_epi8(known) != -1 {
                    return false;
                }
                *out = is_b.to_le_bytes();
            }
            scalar::planes::match_plane(rest, $bytes, a, b, last)
        }
    };
}

match_words!(match_1, 1, _mm256_set1_epi8, i8, _mm256_cmpeq_epi8, 1, 32, equal => _mm256_movemask_epi8(equal[0]));
match_words!(match_2, 2, _mm256_set1_epi16, i16, _mm256_cmpeq_epi16, 2, 32, equal => _mm256_movemask_epi8(
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(equal[0], equal[1]))));
match_words!(match_4, 4, _mm256_set1_epi32, i32, _mm256_cmpeq_epi32, 1, 8, equal => _mm256_movemask_ps(_mm256_castsi256_ps(equal[0])));
match_words!(match_8, 8, _mm256_set1_epi64x, i64, _mm256_cmpeq_epi64, 1, 4, equal => _mm256_movemask_pd(_mm256_castsi256_pd(equal[0])));

/// Plane of the words equal to `b`; false where a word is neither `a` nor `b`.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn match_plane(src: &[u8], word: usize, a: u64, b: u64, out: &mut [u8]) -> bool {
    match word {
        1 => match_1(src, a, b, out),
        2 => match_2(src, a, b, out),
        4 => match_4(src, a, b, out),
        _ => match_8(src, a, b, out),
    }
}

/// The loop over blocks of 64 words: `$mask` sets all bits of the words of one vector whose low bits of `$bits` are set.
macro_rules! select_words {
    ($name:ident, $bytes:literal, $set1:ident, $int:ty, $bits:ident => $mask:expr) => {
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
        fn $name(plane: &[u8], unset: u64, set: u64, dst: &mut [u8]) {
            let (v_unset, v_set) = ($set1(unset as $int), $set1(set as $int));
            let (blocks, rest) = dst.as_chunks_mut::<{ 64 * $bytes }>();
            let done = 8 * blocks.len();
            for (block, bits) in blocks.iter_mut().zip(words(plane)) {
                for (k, vector) in block.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    let $bits = bits >> (k * 32 / $bytes);
                    let x = _mm256_blendv_epi8(v_unset, v_set, $mask);
                    // SAFETY: the array has 32 bytes.
                    unsafe { _mm256_storeu_si256(vector.as_mut_ptr().cast(), x) };
                }
            }
            scalar::planes::select(&plane[done..], $bytes, unset, set, rest);
        }
    };
}

/// Lanes of `bits` that have all bits of `each`.
macro_rules! has {
    ($eq:ident, $bits:expr, $each:expr) => {{
        let each = $each;
        $eq(_mm256_and_si256($bits, each), each)
    }};
}

select_words!(select_1, 1, _mm256_set1_epi8, i8, bits => has!(_mm256_cmpeq_epi8,
    _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), _mm256_setr_epi64x(
        0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303)),
    _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64)));
select_words!(select_2, 2, _mm256_set1_epi16, i16, bits => has!(_mm256_cmpeq_epi16, _mm256_set1_epi16(bits as i16), _mm256_setr_epi16(
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, i16::MIN)));
select_words!(select_4, 4, _mm256_set1_epi32, i32, bits => lanes_of(bits as u8));
select_words!(select_8, 8, _mm256_set1_epi64x, i64, bits => has!(_mm256_cmpeq_epi64, _mm256_set1_epi64x(bits as i64), _mm256_setr_epi64x(1, 2, 4, 8)));

/// Words from a plane.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn select(plane: &[u8], word: usize, unset: u64, set: u64, dst: &mut [u8]) {
    match word {
        1 => select_1(plane, unset, set, dst),
        2 => select_2(plane, unset, set, dst),
        4 => select_4(plane, unset, set, dst),
        _ => select_8(plane, unset, set, dst),
    }
}
