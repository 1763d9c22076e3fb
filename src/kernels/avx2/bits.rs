//! Planes compacted and expanded by a mask: `pext` and `pdep` where they are fast, else byte shuffles.

use std::arch::x86_64::*;

use crate::kernels::bits::{BitReader, BitWriter, POSITIONS, RANKS, words};
use crate::kernels::isa;

/// The bits of `plane` where `mask` has one, one behind the other; returns how many.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(in crate::kernels) fn compact(plane: &[u8], mask: &[u8], out: &mut [u8]) -> usize {
    if !isa::has_fast_pext() {
        return compact_by_shuffle(plane, mask, out);
    }
    let mut writer = BitWriter::default();
    for (bits, mask) in words(plane).zip(words(mask)) {
        writer.push(_pext_u64(bits, mask), mask.count_ones(), out);
    }
    writer.finish(out)
}

/// The inverse of [`compact`].
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(in crate::kernels) fn expand(packed: &[u8], mask: &[u8], out: &mut [u8]) {
    if !isa::has_fast_pext() {
        return expand_by_shuffle(packed, mask, out);
    }
    let mut reader = BitReader::new(packed);
    for (word, mask) in out.as_chunks_mut::<8>().0.iter_mut().zip(words(mask)) {
        *word = _pdep_u64(reader.take(mask.count_ones()), mask).to_le_bytes();
    }
}

/// 8 bits, moved as the bytes of `table`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn shuffle_bits(bits: u8, table: &[u8; 8]) -> u8 {
    let each = _mm_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let bytes = _mm_cmpeq_epi8(_mm_and_si128(_mm_set1_epi8(bits as i8), each), each);
    let moved = _mm_shuffle_epi8(bytes, _mm_set1_epi64x(i64::from_le_bytes(*table)));
    _mm_movemask_epi8(moved) as u8
}

#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn compact_by_shuffle(plane: &[u8], mask: &[u8], out: &mut [u8]) -> usize {
    let mut writer = BitWriter::default();
    for (&bits, &mask) in plane.iter().zip(mask) {
        let kept = shuffle_bits(bits, &POSITIONS[usize::from(mask)]);
        writer.push(u64::from(kept), mask.count_ones(), out);
    }
    writer.finish(out)
}

#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn expand_by_shuffle(packed: &[u8], mask: &[u8], out: &mut [u8]) {
    let mut reader = BitReader::new(packed);
    for (byte, &mask) in out.iter_mut().zip(mask) {
        let bits = reader.take(mask.count_ones()) as u8;
        *byte = shuffle_bits(bits, &RANKS[usize::from(mask)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;
    use crate::kernels::parity::Random;

    #[test]
    fn shuffles_move_the_bits_that_pext_and_pdep_move() {
        if !Isa::Avx2.is_available() {
            println!("byte shuffles: no AVX2 here, not tested");
            return;
        }
        let mut random = Random::new(5);
        for words in [0, 1, 2, 63, 512] {
            let (mut plane, mut mask) = (vec![0; 8 * words], vec![0; 8 * words]);
            random.bytes(&mut plane);
            random.bytes(&mut mask);
            let (mut a, mut b) = (vec![7; 8 * words], vec![7; 8 * words]);
            // SAFETY: the CPU has the features of this level.
            let counts = unsafe {
                (
                    compact(&plane, &mask, &mut a),
                    compact_by_shuffle(&plane, &mask, &mut b),
                )
            };
            assert_eq!((counts.0, &a), (counts.1, &b), "{words} words");
            let (mut c, mut d) = (vec![7; 8 * words], vec![7; 8 * words]);
            let packed = &a[..counts.0.div_ceil(64) * 8];
            // SAFETY: the CPU has the features of this level.
            unsafe {
                expand(packed, &mask, &mut c);
                expand_by_shuffle(packed, &mask, &mut d);
            }
            assert_eq!(c, d, "{words} words");
        }
    }
}
