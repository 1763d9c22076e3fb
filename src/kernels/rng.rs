//! The counter-based generator of dither bytes: random access by (tensor key, block, step, element), the same on every CPU and device.
//!
//! Word `w` of a block is `mix32(key, w)`, an avalanche of two multiplications (constants of the "lowbias32" hash by C. Wellons, with a
//! 64-bit key mixed in around the first). A step of 32 elements uses 8 words; element `e` takes byte `e >> 3` of word `e & 7`, so that a
//! vector of 8 words serves 4 vectors of 8 elements.

/// Elements of a step: 32 elements share 8 words.
pub const STEP: usize = 32;

/// Words of a step.
pub const STEP_WORDS: u32 = 8;

/// First multiplier of [`Key::word`].
pub const MUL_1: u32 = 0x7feb_352d;

/// Second multiplier of [`Key::word`].
pub const MUL_2: u32 = 0x846c_a68b;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every input bit reaches every output bit.
pub const fn mix64(x: u64) -> u64 {
    let mut z = x;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of one block's random words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Added to the word's index.
    pub k0: u32,
    /// Mixed in between the two multiplications.
    pub k1: u32,
}

impl Key {
    /// The key of block `block` of the tensor with key `tensor_key`: the low and the high half of a 64-bit hash.
    pub const fn for_block(tensor_key: u64, block: u64) -> Key {
        let hash = mix64(tensor_key.wrapping_add(block.wrapping_add(1).wrapping_mul(GOLDEN)));
        Key {
            k0: hash as u32,
            k1: (hash >> 32) as u32,
        }
    }

    /// Random word `w` of the block.
    pub const fn word(self, w: u32) -> u32 {
        let mut x = w.wrapping_add(self.k0);
        x ^= x >> 16;
        x = x.wrapping_mul(MUL_1);
        x ^= x >> 15;
        x ^= self.k1;
        x = x.wrapping_mul(MUL_2);
        x ^ (x >> 16)
    }

    /// The dither byte (0..=255) of element `element` (0..32) of step `step`.
    pub const fn dither(self, step: u32, element: u32) -> u32 {
        let word = self.word(step.wrapping_mul(STEP_WORDS).wrapping_add(element & 7));
        (word >> (8 * (element >> 3))) & 0xff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_gives_its_published_first_output() {
        assert_eq!(mix64(GOLDEN), 0xE220_A839_7B1D_CDAF);
    }

    #[test]
    fn dither_bytes_are_uniform_and_differ_between_neighbour_blocks() {
        let keys = [Key::for_block(7, 0), Key::for_block(7, 1)];
        let mut counts = [0u32; 256];
        let mut equal = 0u32;
        for step in 0..4096 {
            for e in 0..32 {
                let r = keys[0].dither(step, e);
                counts[r as usize] += 1;
                equal += u32::from(r == keys[1].dither(step, e));
            }
        }
        // 131,072 draws in 256 cells: chi-square has mean 255 and standard deviation 22.6.
        let chi: f64 = counts
            .iter()
            .map(|&c| (f64::from(c) - 512.0).powi(2) / 512.0)
            .sum();
        assert!(
            chi > 255.0 - 113.0 && chi < 255.0 + 113.0,
            "chi-square {chi}"
        );
        assert!(
            (400..=624).contains(&equal),
            "{equal} equal bytes of 512 expected"
        );
    }
}
