//! One bit an element: zero planes and their compaction, predicates, signs, two-valued words.

use crate::kernels::types::{ColumnShape, Columns, Predicate};
use crate::kernels::{Element, plane_len};

/// Bit `i` of a plane.
fn bit(plane: &[u8], i: usize) -> bool {
    (plane[i / 8] >> (i % 8)) & 1 != 0
}

/// Writes one bit an item from the plane's start, zero bits up to its end, and returns the number of set bits.
fn write_bits(bits: impl Iterator<Item = bool>, out: &mut [u8]) -> usize {
    out.fill(0);
    let mut count = 0;
    for (i, bit) in bits.enumerate() {
        out[i / 8] |= u8::from(bit) << (i % 8);
        count += usize::from(bit);
    }
    count
}

/// Word `i` of `word` bytes.
fn word_at(src: &[u8], word: usize, i: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..word].copy_from_slice(&src[i * word..][..word]);
    u64::from_le_bytes(bytes)
}

pub(in crate::kernels) fn nonzero_rows<T: Element>(src: &[T], out: &mut [u8]) -> usize {
    write_bits(src.iter().map(|x| x.to_f32() != 0.0), out)
}

pub(in crate::kernels) fn nonzero_cols<T: Element>(
    columns: &Columns<'_, T>,
    out: &mut [u8],
) -> usize {
    let shape = columns.shape;
    out[shape.first_slot() / 8..plane_len(shape.end_slot())].fill(0);
    let mut count = 0;
    for r in 0..shape.rows {
        for c in 0..shape.width {
            let slot = (shape.first_row + r) * shape.padded_width() + c;
            let nonzero = columns.src[r * shape.pitch + c].to_f32() != 0.0;
            out[slot / 8] |= u8::from(nonzero) << (slot % 8);
            count += usize::from(nonzero);
        }
    }
    count
}

/// One element under its bit of the zero plane.
fn apply<T: Element>(x: &mut T, nonzero: bool, floor: f32) {
    if !nonzero {
        *x = T::from_f32_finite(0.0);
    } else if x.to_f32() < floor {
        *x = T::from_f32_finite(floor);
    }
}

pub(in crate::kernels) fn apply_nonzero_rows<T: Element>(
    nonzero: &[u8],
    slot0: usize,
    group: usize,
    floor: &[f32],
    dst: &mut [T],
) {
    for (i, x) in dst.iter_mut().enumerate() {
        apply(x, bit(nonzero, slot0 + i), floor[i / group]);
    }
}

pub(in crate::kernels) fn apply_nonzero_cols<T: Element>(
    nonzero: &[u8],
    shape: &ColumnShape,
    floor: &[f32],
    dst: &mut [T],
) {
    for r in 0..shape.rows {
        for c in 0..shape.width {
            let slot = (shape.first_row + r) * shape.padded_width() + c;
            apply(&mut dst[r * shape.pitch + c], bit(nonzero, slot), floor[c]);
        }
    }
}

pub(in crate::kernels) fn predicate<T: Element>(src: &[T], predicate: Predicate, out: &mut [u8]) {
    write_bits(src.iter().map(|x| predicate.holds(x.to_f32())), out);
}

pub(in crate::kernels) fn sign<T: Element>(
    src: &[T],
    positive: &mut [u8],
    negative: &mut [u8],
) -> bool {
    write_bits(src.iter().map(|x| x.to_f32() > 0.0), positive);
    write_bits(src.iter().map(|x| x.to_f32() < 0.0), negative);
    !src.iter().any(|x| x.to_f32().is_nan())
}

pub(in crate::kernels) fn sign_values<T: Element>(positive: &[u8], negative: &[u8], dst: &mut [T]) {
    for (i, x) in dst.iter_mut().enumerate() {
        *x = T::from_f32_finite(f32::from(
            i8::from(bit(positive, i)) - i8::from(bit(negative, i)),
        ));
    }
}

pub(in crate::kernels) fn compact(plane: &[u8], mask: &[u8], out: &mut [u8]) -> usize {
    let ones: usize = mask.iter().map(|byte| byte.count_ones() as usize).sum();
    let kept = (0..8 * mask.len())
        .filter(|&i| bit(mask, i))
        .map(|i| bit(plane, i));
    write_bits(kept, &mut out[..plane_len(ones)]);
    ones
}

pub(in crate::kernels) fn expand(packed: &[u8], mask: &[u8], out: &mut [u8]) {
    let mut next = 0;
    let bits = (0..8 * mask.len()).map(|i| {
        let set = bit(mask, i);
        let value = set && bit(packed, next);
        next += usize::from(set);
        value
    });
    write_bits(bits, out);
}

pub(in crate::kernels) fn match_plane(
    src: &[u8],
    word: usize,
    a: u64,
    b: u64,
    out: &mut [u8],
) -> bool {
    let words = src.len() / word;
    write_bits((0..words).map(|i| word_at(src, word, i) == b), out);
    (0..words).all(|i| [a, b].contains(&word_at(src, word, i)))
}

pub(in crate::kernels) fn select(plane: &[u8], word: usize, unset: u64, set: u64, dst: &mut [u8]) {
    for (i, bytes) in dst.chunks_exact_mut(word).enumerate() {
        let value = if bit(plane, i) { set } else { unset };
        bytes.copy_from_slice(&value.to_le_bytes()[..word]);
    }
}

pub(in crate::kernels) fn copy(plane: &[u8], dst: &mut [u8]) {
    dst.copy_from_slice(plane);
}

/// Plain stores are ordered as they are.
pub(in crate::kernels) fn fence() {}
