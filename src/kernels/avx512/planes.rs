//! One bit an element, 64 at a time: the mask registers hold what planes hold.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::{MaskedLanes, first};
use crate::kernels::types::{ColumnShape, Columns, Predicate};

/// The first `n` (0 to 64, more counts as 64) of 64 bits.
const fn first_bits(n: usize) -> u64 {
    if n >= 64 { !0 } else { (1 << n) - 1 }
}

/// Elements as bits.
pub(in crate::kernels) trait PlaneLanes: MaskedLanes {
    /// 1, -1.
    const SIGNS: [Self; 2];

    /// Which of the up to 64 elements in `mask` are not zero.
    ///
    /// # Safety
    /// The elements in `mask` can be read at `ptr`; nothing is read of others.
    unsafe fn nonzero(mask: u64, ptr: *const Self) -> u64;

    /// Of the elements in `lanes`: makes those +0 that are not in `nonzero`, and those the floor that are below it.
    ///
    /// # Safety
    /// The elements in `lanes` can be read and written at `ptr`; nothing of others.
    unsafe fn apply(lanes: __mmask16, ptr: *mut Self, nonzero: __mmask16, floor: &Floor<Self>);

    /// Writes `values` where the masks have a bit, else 0, to the elements in `lanes`.
    ///
    /// # Safety
    /// The elements in `lanes` can be written at `ptr`; nothing of others.
    unsafe fn choose(lanes: __mmask16, ptr: *mut Self, masks: [__mmask16; 2], values: [Self; 2]);
}

/// The least value of 16 elements, as f32 and as elements.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Floor<T> {
    floor: [f32; 16],
    value: [T; 16],
}

impl<T: PlaneLanes> Floor<T> {
    /// Of up to 16 columns.
    fn of(floors: &[f32]) -> Floor<T> {
        let floor = std::array::from_fn(|i| floors.get(i).copied().unwrap_or(f32::NEG_INFINITY));
        Floor {
            floor,
            value: floor.map(T::from_f32_finite),
        }
    }
}

impl PlaneLanes for f32 {
    const SIGNS: [f32; 2] = [1.0, -1.0];

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn nonzero(mask: u64, ptr: *const f32) -> u64 {
        let mut bits = 0;
        for k in 0..4 {
            let lanes = (mask >> (16 * k)) as __mmask16;
            // SAFETY: readable in the mask, by the caller; other lanes do not fault.
            let x = unsafe { _mm512_maskz_loadu_epi32(lanes, ptr.wrapping_add(16 * k).cast()) };
            bits |= u64::from(_mm512_test_epi32_mask(x, _mm512_set1_epi32(i32::MAX))) << (16 * k);
        }
        bits
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn apply(lanes: __mmask16, ptr: *mut f32, nonzero: __mmask16, floor: &Floor<f32>) {
        // SAFETY: readable and writable in the lanes, by the caller; the array has 16 numbers.
        unsafe {
            let floor = _mm512_loadu_ps(floor.floor.as_ptr());
            let x = _mm512_maskz_loadu_ps(lanes & nonzero, ptr);
            let below = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(nonzero, x, floor);
            _mm512_mask_storeu_ps(ptr, lanes, _mm512_mask_mov_ps(x, below, floor));
        }
    }

    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn choose(lanes: __mmask16, ptr: *mut f32, masks: [__mmask16; 2], values: [f32; 2]) {
        let x = _mm512_maskz_mov_ps(masks[0], _mm512_set1_ps(values[0]));
        let x = _mm512_mask_mov_ps(x, masks[1], _mm512_set1_ps(values[1]));
        // SAFETY: writable in the lanes, by the caller.
        unsafe { _mm512_mask_storeu_ps(ptr, lanes, x) }
    }
}

/// The 16-bit types keep their bits (NaN, infinities) where they are not changed.
macro_rules! half_lanes {
    ($T:ident) => {
        impl PlaneLanes for $T {
            const SIGNS: [$T; 2] = [$T::ONE, $T::NEG_ONE];

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn nonzero(mask: u64, ptr: *const $T) -> u64 {
                let mut bits = 0;
                for k in 0..2 {
                    let lanes = (mask >> (32 * k)) as __mmask32;
                    // SAFETY: readable in the mask, by the caller; other lanes do not fault.
                    let x = unsafe { _mm512_maskz_loadu_epi16(lanes, ptr.wrapping_add(32 * k).cast()) };
                    bits |= u64::from(_mm512_test_epi16_mask(x, _mm512_set1_epi16(i16::MAX))) << (32 * k);
                }
                bits
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn apply(lanes: __mmask16, ptr: *mut $T, nonzero: __mmask16, floor: &Floor<$T>) {
                let lanes_read = lanes & nonzero;
                // SAFETY: readable and writable in the lanes, by the caller; the arrays have 16 numbers.
                unsafe {
                    let bits = _mm256_maskz_loadu_epi16(lanes_read, ptr.cast());
                    let x = <$T>::load_masked(lanes_read, ptr);
                    let below = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(nonzero, x, _mm512_loadu_ps(floor.floor.as_ptr()));
                    let value = _mm256_loadu_si256(floor.value.as_ptr().cast());
                    _mm256_mask_storeu_epi16(ptr.cast(), lanes, _mm256_mask_mov_epi16(bits, below, value));
                }
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt")]
            unsafe fn choose(lanes: __mmask16, ptr: *mut $T, masks: [__mmask16; 2], values: [$T; 2]) {
                let [a, b] = values.map(|x| _mm256_set1_epi16(x.to_bits() as i16));
                let x = _mm256_mask_mov_epi16(_mm256_maskz_mov_epi16(masks[0], a), masks[1], b);
                // SAFETY: writable in the lanes, by the caller.
                unsafe { _mm256_mask_storeu_epi16(ptr.cast(), lanes, x) }
            }
        }
    };
}

half_lanes!(f16);
half_lanes!(bf16);

/// Plane of the elements that are not zero, and their number.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn nonzero_rows<T: PlaneLanes>(src: &[T], out: &mut [u8]) -> usize {
    let mut count = 0;
    for (src, out) in src.chunks(64).zip(out.chunks_exact_mut(8)) {
        // SAFETY: the mask has as many elements as the chunk.
        let bits = unsafe { T::nonzero(first_bits(src.len()), src.as_ptr()) };
        count += bits.count_ones() as usize;
        out.copy_from_slice(&bits.to_le_bytes());
    }
    count
}

/// As [`nonzero_rows`] for a row group of a channel tile.
///
/// # Safety
/// As [`super::KernelTable::nonzero_plane_cols`] checks.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
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
    let row_bytes = width.div_ceil(8);
    let mut count = 0;
    for r in 0..rows {
        for c in (0..width).step_by(64) {
            // SAFETY: the elements of the mask are in row r, which is inside `src`.
            let bits = unsafe {
                T::nonzero(
                    first_bits(width - c),
                    columns.src.as_ptr().add(r * pitch + c),
                )
            };
            count += bits.count_ones() as usize;
            let to = &mut out[r * row_bytes + c / 8..];
            let n = to.len().min(8);
            to[..n].copy_from_slice(&bits.to_le_bytes()[..n]);
        }
    }
    out[rows * row_bytes..].fill(0);
    count
}

/// 64 bits of a plane from bit `slot` on, a multiple of 8; 0 behind the end.
#[inline]
fn bits_from(plane: &[u8], slot: usize) -> u64 {
    let from = &plane[slot / 8..];
    match from.first_chunk::<8>() {
        Some(word) => u64::from_le_bytes(*word),
        None => {
            let mut word = [0; 8];
            word[..from.len()].copy_from_slice(from);
            u64::from_le_bytes(word)
        }
    }
}

/// Zeros where the plane has them, the others at least their floor.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn apply_nonzero_rows<T: PlaneLanes>(
    nonzero: &[u8],
    slot0: usize,
    group: usize,
    floor: &[f32],
    dst: &mut [T],
) {
    for (g, (dst, floor)) in dst.chunks_mut(group).zip(floor).enumerate() {
        let floor = Floor::of(&[*floor; 16]);
        for (i, dst) in dst.chunks_mut(16).enumerate() {
            let bits = bits_from(nonzero, slot0 + g * group + 16 * i) as __mmask16;
            // SAFETY: the lanes are the elements of the chunk.
            unsafe { T::apply(first(dst.len()), dst.as_mut_ptr(), bits, &floor) };
        }
    }
}

/// As [`apply_nonzero_rows`] for a row group of a channel tile.
///
/// # Safety
/// As [`super::KernelTable::apply_nonzero_cols`] checks.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) unsafe fn apply_nonzero_cols<T: PlaneLanes>(
    nonzero: &[u8],
    shape: &ColumnShape,
    floor: &[f32],
    dst: &mut [T],
) {
    let floors: [Floor<T>; 8] =
        std::array::from_fn(|k| Floor::of(floor.get(16 * k..).unwrap_or(&[])));
    for r in 0..shape.rows {
        let slot = (shape.first_row + r) * shape.padded_width();
        for (k, floor) in floors[..shape.width.div_ceil(16)].iter().enumerate() {
            let bits = bits_from(nonzero, slot + 16 * k) as __mmask16;
            // SAFETY: the lanes are columns of row r, which is inside `dst`.
            unsafe {
                T::apply(
                    first(shape.width - 16 * k),
                    dst.as_mut_ptr().add(r * shape.pitch + 16 * k),
                    bits,
                    floor,
                )
            };
        }
    }
}

/// Bits where a comparison holds, of up to 64 elements.
macro_rules! compare {
    ($src:expr, $x:ident => $mask:expr) => {{
        let mut bits = 0;
        for k in 0..$src.len().div_ceil(16) {
            let lanes = first($src.len() - 16 * k);
            // SAFETY: the lanes are elements of the chunk.
            let $x = unsafe { T::load_masked(lanes, $src.as_ptr().add(16 * k)) };
            bits |= u64::from(lanes & $mask) << (16 * k);
        }
        bits
    }};
}

/// Plane of the elements that a predicate holds for.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn predicate<T: PlaneLanes>(src: &[T], predicate: Predicate, out: &mut [u8]) {
    for (src, out) in src.chunks(64).zip(out.chunks_exact_mut(8)) {
        let bits = match predicate {
            Predicate::GreaterOrNan { t } => {
                compare!(src, x => _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_set1_ps(t)))
            }
            Predicate::Within { lo, hi } => {
                compare!(src, x => _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(
                _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_set1_ps(lo)), x, _mm512_set1_ps(hi)))
            }
            Predicate::NotBeyond { lo, hi } => {
                compare!(src, x => _mm512_mask_cmp_ps_mask::<_CMP_NGE_UQ>(
                _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_set1_ps(lo)), x, _mm512_set1_ps(hi)))
            }
        };
        out.copy_from_slice(&bits.to_le_bytes());
    }
}

/// Planes of the positive and the negative elements; false with a NaN.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn sign<T: PlaneLanes>(src: &[T], positive: &mut [u8], negative: &mut [u8]) -> bool {
    let zero = _mm512_setzero_ps();
    let mut unordered = 0;
    for ((src, positive), negative) in src
        .chunks(64)
        .zip(positive.chunks_exact_mut(8))
        .zip(negative.chunks_exact_mut(8))
    {
        let above = compare!(src, x => _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, zero));
        let below = compare!(src, x => _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, zero));
        unordered |= compare!(src, x => _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, zero));
        positive.copy_from_slice(&above.to_le_bytes());
        negative.copy_from_slice(&below.to_le_bytes());
    }
    unordered == 0
}

/// 1, -1 and 0 from two planes.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn sign_values<T: PlaneLanes>(positive: &[u8], negative: &[u8], dst: &mut [T]) {
    for (i, dst) in dst.chunks_mut(16).enumerate() {
        let (above, below) = (bits_from(positive, 16 * i), bits_from(negative, 16 * i));
        let masks = [above & !below, below & !above].map(|bits| bits as __mmask16);
        // SAFETY: the lanes are the elements of the chunk.
        unsafe { T::choose(first(dst.len()), dst.as_mut_ptr(), masks, T::SIGNS) };
    }
}

/// The loops over words of one size: plane of the words equal to `b`, false where one is neither; and the inverse.
macro_rules! word_loops {
    ($match_words:ident, $select_words:ident, $bytes:literal, $mask:ty, $int:ty, $load:ident, $store:ident, $set1:ident, $eq:ident, $blend:ident) => {
        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
        )]
        fn $match_words(src: &[u8], a: u64, b: u64, out: &mut [u8]) -> bool {
            const LANES: usize = 64 / $bytes;
            let (a, b) = ($set1(a as $int), $set1(b as $int));
            for (src, out) in src.chunks(64 * $bytes).zip(out.chunks_exact_mut(8)) {
                let mask = first_bits(src.len() / $bytes);
                let (mut is_b, mut known) = (0, 0);
                for k in 0..$bytes {
                    let lanes = (mask >> (k * LANES % 64)) as $mask;
                    // SAFETY: the lanes are words of the chunk; other lanes do not fault.
                    let x = unsafe { $load(lanes, src.as_ptr().wrapping_add(64 * k).cast()) };
                    let equal = lanes & $eq(x, b);
                    is_b |= u64::from(equal) << (k * LANES % 64);
                    known |= u64::from(equal | (lanes & $eq(x, a))) << (k * LANES % 64);
                }
                if known != mask {
                    return false;
                }
                out.copy_from_slice(&is_b.to_le_bytes());
            }
            true
        }

        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
        )]
        fn $select_words(plane: &[u8], unset: u64, set: u64, dst: &mut [u8]) {
            const LANES: usize = 64 / $bytes;
            let (unset, set) = ($set1(unset as $int), $set1(set as $int));
            for (dst, bits) in dst
                .chunks_mut(64 * $bytes)
                .zip(crate::kernels::bits::words(plane))
            {
                let mask = first_bits(dst.len() / $bytes);
                for k in 0..$bytes {
                    let shift = k * LANES % 64;
                    let x = $blend((bits >> shift) as $mask, unset, set);
                    // SAFETY: the lanes are words of the chunk; other lanes are not written.
                    unsafe {
                        $store(
                            dst.as_mut_ptr().wrapping_add(64 * k).cast(),
                            (mask >> shift) as $mask,
                            x,
                        )
                    };
                }
            }
        }
    };
}

word_loops!(
    match_1,
    select_1,
    1,
    __mmask64,
    i8,
    _mm512_maskz_loadu_epi8,
    _mm512_mask_storeu_epi8,
    _mm512_set1_epi8,
    _mm512_cmpeq_epi8_mask,
    _mm512_mask_blend_epi8
);
word_loops!(
    match_2,
    select_2,
    2,
    __mmask32,
    i16,
    _mm512_maskz_loadu_epi16,
    _mm512_mask_storeu_epi16,
    _mm512_set1_epi16,
    _mm512_cmpeq_epi16_mask,
    _mm512_mask_blend_epi16
);
word_loops!(
    match_4,
    select_4,
    4,
    __mmask16,
    i32,
    _mm512_maskz_loadu_epi32,
    _mm512_mask_storeu_epi32,
    _mm512_set1_epi32,
    _mm512_cmpeq_epi32_mask,
    _mm512_mask_blend_epi32
);
word_loops!(
    match_8,
    select_8,
    8,
    __mmask8,
    i64,
    _mm512_maskz_loadu_epi64,
    _mm512_mask_storeu_epi64,
    _mm512_set1_epi64,
    _mm512_cmpeq_epi64_mask,
    _mm512_mask_blend_epi64
);

/// Plane of the words equal to `b`; false where a word is neither `a` nor `b`.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn match_plane(src: &[u8], word: usize, a: u64, b: u64, out: &mut [u8]) -> bool {
    match word {
        1 => match_1(src, a, b, out),
        2 => match_2(src, a, b, out),
        4 => match_4(src, a, b, out),
        _ => match_8(src, a, b, out),
    }
}

/// Words from a plane.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) fn select(plane: &[u8], word: usize, unset: u64, set: u64, dst: &mut [u8]) {
    match word {
        1 => select_1(plane, unset, set, dst),
        2 => select_2(plane, unset, set, dst),
        4 => select_4(plane, unset, set, dst),
        _ => select_8(plane, unset, set, dst),
    }
}
