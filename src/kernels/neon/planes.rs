//! One bit an element: comparisons and their inverse. What is left of less than a word, the scalar kernels do.

use std::arch::aarch64::*;

use super::lanes::{Lanes, narrow, padded};
use super::unit::{lanes_of, set_lanes};
use crate::kernels::bits::{BitReader, BitWriter, POSITIONS, RANKS, words};
use crate::kernels::scalar;
use crate::kernels::types::{ColumnShape, Columns, Predicate};

/// Two masks of 8 lanes as one of 16 bytes.
#[target_feature(enable = "neon")]
fn bytes(a: uint16x8_t, b: uint16x8_t) -> uint8x16_t {
    vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b))
}

/// 64 bits of 8 masks of 8 lanes.
#[inline]
#[target_feature(enable = "neon")]
fn word(mask: impl Fn(usize) -> uint16x8_t) -> u64 {
    let sixteen = |k: usize| bytes(mask(2 * k), mask(2 * k + 1));
    let (low, high) = (
        set_lanes(sixteen(0), sixteen(1)),
        set_lanes(sixteen(2), sixteen(3)),
    );
    u64::from(low) | u64::from(high) << 32
}

/// 8 bits as masks of 16 bits.
#[target_feature(enable = "neon")]
fn half_lanes_of(bits: u8) -> uint16x8_t {
    const EACH: [u16; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
    // SAFETY: the array has 8 numbers.
    vtstq_u16(vdupq_n_u16(u16::from(bits)), unsafe {
        vld1q_u16(EACH.as_ptr())
    })
}

/// Plane of the elements that are not zero, and their number.
#[target_feature(enable = "neon")]
pub(super) fn nonzero_rows<T: Lanes>(src: &[T], out: &mut [u8]) -> usize {
    let (blocks, rest) = src.as_chunks::<64>();
    let (words, last) = out.split_at_mut(8 * blocks.len());
    let mut count = 0;
    for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
        // SAFETY: the block has 64 elements.
        let bits = word(|k| unsafe { T::nonzero_8(block.as_ptr().add(8 * k)) });
        count += bits.count_ones() as usize;
        *out = bits.to_le_bytes();
    }
    count + scalar::planes::nonzero_rows(rest, last)
}

/// As [`nonzero_rows`] for a row group of a channel tile.
#[target_feature(enable = "neon")]
pub(super) fn nonzero_cols<T: Lanes>(columns: &Columns<'_, T>, out: &mut [u8]) -> usize {
    let ColumnShape {
        pitch, rows, width, ..
    } = columns.shape;
    let mut to = out[columns.shape.first_slot() / 8..].iter_mut();
    let mut count = 0;
    for r in 0..rows {
        for part in columns.src[r * pitch..][..width].chunks(16) {
            let all = padded::<T, 16>(part);
            // SAFETY: the array has 16 elements.
            let (low, high) = unsafe {
                (
                    T::nonzero_8(all.as_ptr()),
                    T::nonzero_8(all.as_ptr().add(8)),
                )
            };
            let bits = set_lanes(bytes(low, high), vdupq_n_u8(0));
            count += bits.count_ones() as usize;
            // The bytes of the value first: zip must not take a place that it has nothing for.
            for (byte, to) in bits
                .to_le_bytes()
                .into_iter()
                .take(part.len().div_ceil(8))
                .zip(to.by_ref())
            {
                *to = byte;
            }
        }
    }
    to.for_each(|byte| *byte = 0);
    count
}

/// The least value of 8 elements, as f32 and as elements.
#[derive(Clone, Copy)]
struct Floor<T> {
    floor: [f32; 8],
    value: [T; 8],
}

impl<T: Lanes> Floor<T> {
    /// Of up to 8 columns.
    fn of(floors: &[f32]) -> Floor<T> {
        let floor = std::array::from_fn(|i| floors.get(i).copied().unwrap_or(f32::NEG_INFINITY));
        Floor {
            floor,
            value: floor.map(T::from_f32_finite),
        }
    }

    /// Zeros where `nonzero` has no bit, the others at least their floor, of up to 8 elements.
    #[inline]
    #[target_feature(enable = "neon")]
    fn apply(&self, dst: &mut [T], nonzero: u8) {
        let mut all = padded::<T, 8>(dst);
        let ptr = all.as_mut_ptr();
        // SAFETY: all arrays have 8 elements.
        unsafe {
            let low = vcltq_f32(T::load(ptr), vld1q_f32(self.floor.as_ptr()));
            let high = vcltq_f32(T::load(ptr.add(4)), vld1q_f32(self.floor.as_ptr().add(4)));
            T::replace_8(ptr, narrow(low, high), &self.value, half_lanes_of(nonzero));
        }
        dst.copy_from_slice(&all[..dst.len()]);
    }
}

/// Zeros where the plane has them, the others at least their floor.
#[target_feature(enable = "neon")]
pub(super) fn apply_nonzero_rows<T: Lanes>(
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
            floor.apply(dst, bits);
        }
    }
}

/// As [`apply_nonzero_rows`] for a row group of a channel tile.
#[target_feature(enable = "neon")]
pub(super) fn apply_nonzero_cols<T: Lanes>(
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
            floor.apply(dst, bits);
        }
    }
}

/// Bits where a comparison of four lanes holds, of 64 elements.
#[inline]
#[target_feature(enable = "neon")]
fn compare<T: Lanes>(block: &[T; 64], mask: impl Fn(float32x4_t) -> uint32x4_t) -> u64 {
    // SAFETY: the block has 64 elements.
    let four = |k: usize| mask(unsafe { T::load(block.as_ptr().add(4 * k)) });
    word(|k| narrow(four(2 * k), four(2 * k + 1)))
}

/// Plane of the elements that a predicate holds for.
#[target_feature(enable = "neon")]
pub(super) fn predicate<T: Lanes>(src: &[T], predicate: Predicate, out: &mut [u8]) {
    let (blocks, rest) = src.as_chunks::<64>();
    let (words, last) = out.split_at_mut(8 * blocks.len());
    for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
        let bits = match predicate {
            Predicate::GreaterOrNan { t } => !compare(block, |x| vcleq_f32(x, vdupq_n_f32(t))),
            Predicate::Within { lo, hi } => compare(block, |x| {
                vandq_u32(vcgeq_f32(x, vdupq_n_f32(lo)), vcleq_f32(x, vdupq_n_f32(hi)))
            }),
            Predicate::NotBeyond { lo, hi } => !compare(block, |x| {
                vorrq_u32(vcleq_f32(x, vdupq_n_f32(lo)), vcgeq_f32(x, vdupq_n_f32(hi)))
            }),
        };
        *out = bits.to_le_bytes();
    }
    scalar::planes::predicate(rest, predicate, last);
}

/// Planes of the positive and the negative elements; false with a NaN.
#[target_feature(enable = "neon")]
pub(super) fn sign<T: Lanes>(src: &[T], positive: &mut [u8], negative: &mut [u8]) -> bool {
    let (blocks, rest) = src.as_chunks::<64>();
    let (above, last_above) = positive.split_at_mut(8 * blocks.len());
    let (below, last_below) = negative.split_at_mut(8 * blocks.len());
    let mut ordered = !0;
    for ((block, above), below) in blocks
        .iter()
        .zip(above.as_chunks_mut::<8>().0)
        .zip(below.as_chunks_mut::<8>().0)
    {
        *above = compare(block, |x| vcgtzq_f32(x)).to_le_bytes();
        *below = compare(block, |x| vcltzq_f32(x)).to_le_bytes();
        ordered &= compare(block, |x| vceqq_f32(x, x));
    }
    scalar::planes::sign(rest, last_above, last_below) && ordered == !0
}

/// 1, -1 and 0 from two planes.
#[target_feature(enable = "neon")]
pub(super) fn sign_values<T: Lanes>(positive: &[u8], negative: &[u8], dst: &mut [T]) {
    let [one, minus_one] = [1.0, -1.0].map(T::from_f32_finite);
    for ((dst, &positive), &negative) in dst.chunks_mut(8).zip(positive).zip(negative) {
        let (above, below) = (positive & !negative, negative & !positive);
        let mut all = [one; 8];
        // SAFETY: the arrays have 8 elements.
        unsafe {
            T::replace_8(
                all.as_mut_ptr(),
                half_lanes_of(below),
                &[minus_one; 8],
                half_lanes_of(above | below),
            )
        };
        dst.copy_from_slice(&all[..dst.len()]);
    }
}

/// 8 bits, moved as the bytes of `table`.
#[inline]
#[target_feature(enable = "neon")]
fn shuffle_bits(bits: u8, table: &[u8; 8]) -> u8 {
    let each = vcreate_u8(0x8040_2010_0804_0201);
    let set = vtst_u8(vdup_n_u8(bits), each);
    // Indices beyond the vector give 0.
    let moved = vtbl1_u8(set, vcreate_u8(u64::from_le_bytes(*table)));
    vaddv_u8(vand_u8(moved, each))
}

/// The bits of `plane` where `mask` has one, one behind the other; returns how many.
#[target_feature(enable = "neon")]
pub(super) fn compact(plane: &[u8], mask: &[u8], out: &mut [u8]) -> usize {
    let mut writer = BitWriter::default();
    for (&bits, &mask) in plane.iter().zip(mask) {
        let kept = shuffle_bits(bits, &POSITIONS[usize::from(mask)]);
        writer.push(u64::from(kept), mask.count_ones(), out);
    }
    writer.finish(out)
}

/// The inverse of [`compact`].
#[target_feature(enable = "neon")]
pub(super) fn expand(packed: &[u8], mask: &[u8], out: &mut [u8]) {
    let mut reader = BitReader::new(packed);
    for (byte, &mask) in out.iter_mut().zip(mask) {
        let bits = reader.take(mask.count_ones()) as u8;
        *byte = shuffle_bits(bits, &RANKS[usize::from(mask)]);
    }
}

/// All bits set in the bytes of those of 16 words (N bytes each) that equal `value`.
#[inline]
#[target_feature(enable = "neon")]
fn equal<const N: usize>(words: &[[u8; N]; 16], value: u64) -> uint8x16_t {
    let from = words.as_flattened();
    // SAFETY: 16 words of N bytes can be read.
    let load = |k: usize| unsafe { vld1q_u8(from.as_ptr().add(16 * k)) };
    let of_4 = |k: usize| vceqq_u32(vreinterpretq_u32_u8(load(k)), vdupq_n_u32(value as u32));
    let of_8 = |k: usize| {
        vreinterpretq_u32_u64(vceqq_u64(vreinterpretq_u64_u8(load(k)), vdupq_n_u64(value)))
    };
    match N {
        1 => vceqq_u8(load(0), vdupq_n_u8(value as u8)),
        2 => {
            let eight =
                |k: usize| vceqq_u16(vreinterpretq_u16_u8(load(k)), vdupq_n_u16(value as u16));
            bytes(eight(0), eight(1))
        }
        4 => bytes(narrow(of_4(0), of_4(1)), narrow(of_4(2), of_4(3))),
        _ => {
            let four = |k: usize| vuzp1q_u32(of_8(k), of_8(k + 1));
            bytes(narrow(four(0), four(2)), narrow(four(4), four(6)))
        }
    }
}

#[target_feature(enable = "neon")]
fn match_words<const N: usize>(src: &[u8], a: u64, b: u64, out: &mut [u8]) -> bool {
    let (all, _) = src.as_chunks::<N>();
    let (blocks, rest) = all.as_chunks::<64>();
    let (words, last) = out.split_at_mut(8 * blocks.len());
    for (block, out) in blocks.iter().zip(words.as_chunks_mut::<8>().0) {
        let mut known = vdupq_n_u8(!0);
        let mut is_b = [vdupq_n_u8(0); 4];
        for (part, is_b) in block.as_chunks::<16>().0.iter().zip(&mut is_b) {
            *is_b = equal(part, b);
            known = vandq_u8(known, vorrq_u8(*is_b, equal(part, a)));
        }
        if vminvq_u8(known) != !0 {
            return false;
        }
        let bits =
            u64::from(set_lanes(is_b[0], is_b[1])) | u64::from(set_lanes(is_b[2], is_b[3])) << 32;
        *out = bits.to_le_bytes();
    }
    scalar::planes::match_plane(rest.as_flattened(), N, a, b, last)
}

/// Plane of the words equal to `b`; false where a word is neither `a` nor `b`.
#[target_feature(enable = "neon")]
pub(super) fn match_plane(src: &[u8], word: usize, a: u64, b: u64, out: &mut [u8]) -> bool {
    match word {
        1 => match_words::<1>(src, a, b, out),
        2 => match_words::<2>(src, a, b, out),
        4 => match_words::<4>(src, a, b, out),
        _ => match_words::<8>(src, a, b, out),
    }
}

/// Words from a plane.
#[target_feature(enable = "neon")]
pub(super) fn select(plane: &[u8], word: usize, unset: u64, set: u64, dst: &mut [u8]) {
    let fill = |value: u64| match word {
        1 => vreinterpretq_u8_u16(vdupq_n_u16(value as u16 & 0xff | (value as u16) << 8)),
        2 => vreinterpretq_u8_u16(vdupq_n_u16(value as u16)),
        4 => vreinterpretq_u8_u32(vdupq_n_u32(value as u32)),
        _ => vreinterpretq_u8_u64(vdupq_n_u64(value)),
    };
    let (v_unset, v_set) = (fill(unset), fill(set));
    let per_vector = 16 / word;
    let mut vectors = dst.chunks_exact_mut(16);
    let mut done = 0;
    'all: for bits in words(plane) {
        for k in 0..4 * word {
            let Some(vector) = vectors.next() else {
                break 'all;
            };
            let part = (bits >> (k * per_vector)) as u32;
            // One byte a word, then as many as the word has.
            let low = lanes_of(part)[0];
            let twice = || vzip1q_u8(low, low);
            let four = || {
                vreinterpretq_u8_u16(vzip1q_u16(
                    vreinterpretq_u16_u8(twice()),
                    vreinterpretq_u16_u8(twice()),
                ))
            };
            let mask = match word {
                1 => low,
                2 => twice(),
                4 => four(),
                _ => vreinterpretq_u8_u32(vzip1q_u32(
                    vreinterpretq_u32_u8(four()),
                    vreinterpretq_u32_u8(four()),
                )),
            };
            // SAFETY: the vector has 16 bytes.
            unsafe { vst1q_u8(vector.as_mut_ptr(), vbslq_u8(mask, v_set, v_unset)) };
            done += per_vector;
        }
    }
    for (i, bytes) in vectors.into_remainder().chunks_exact_mut(word).enumerate() {
        let slot = done + i;
        let bit = (plane[slot / 8] >> (slot % 8)) & 1;
        let value = if bit != 0 { set } else { unset };
        bytes.copy_from_slice(&value.to_le_bytes()[..word]);
    }
}
