//! Byte tables for moving bits by a mask, where the CPU has no (fast) instruction for it: 8 bits become 8 bytes, a byte shuffle moves them.

/// Gives a byte shuffle 0 in its lane.
const NOWHERE: u8 = 0x80;

/// For each mask of 8 bits: where its set bits are, in rising order. Shuffling by it compacts.
pub(super) static POSITIONS: [[u8; 8]; 256] = tables().0;

/// For each mask of 8 bits: how many set bits are below each set bit. Shuffling by it expands.
pub(super) static RANKS: [[u8; 8]; 256] = tables().1;

const fn tables() -> ([[u8; 8]; 256], [[u8; 8]; 256]) {
    let mut positions = [[NOWHERE; 8]; 256];
    let mut ranks = [[NOWHERE; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut bit, mut rank) = (0, 0);
        while bit < 8 {
            if (mask >> bit) & 1 != 0 {
                positions[mask][rank] = bit as u8;
                ranks[mask][bit] = rank as u8;
                rank += 1;
            }
            bit += 1;
        }
        mask += 1;
    }
    (positions, ranks)
}

/// Bits that are written one behind the other.
#[derive(Clone, Copy, Default)]
pub(super) struct BitWriter {
    pending: u64,
    /// Bits in `pending`, 0..64.
    filled: u32,
    /// Bytes written.
    at: usize,
}

impl BitWriter {
    /// Appends the `count` (up to 64) low bits of `bits`, whose other bits are 0.
    #[inline(always)]
    pub(super) fn push(&mut self, bits: u64, count: u32, out: &mut [u8]) {
        self.pending |= bits << self.filled;
        let filled = self.filled + count;
        if filled >= 64 {
            out[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
            self.at += 8;
            // What did not fit; a shift by 64 is none at all.
            self.pending = bits.checked_shr(64 - self.filled).unwrap_or(0);
        }
        self.filled = filled % 64;
    }

    /// Writes the last word, and returns how many bits there are.
    #[inline(always)]
    pub(super) fn finish(self, out: &mut [u8]) -> usize {
        if self.filled > 0 {
            out[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        }
        8 * self.at + self.filled as usize
    }
}

/// Bits that are read one behind the other; 0 behind the last.
#[derive(Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BitReader<'a> {
    /// `bytes` is whole 64-bit words.
    #[inline(always)]
    pub(super) fn new(bytes: &'a [u8]) -> BitReader<'a> {
        BitReader { bytes, at: 0 }
    }

    #[inline(always)]
    fn word(&self, i: usize) -> u64 {
        match self.bytes.get(8 * i..8 * i + 8) {
            Some(word) => word.try_into().map_or(0, u64::from_le_bytes),
            None => 0,
        }
    }

    /// The next 64 bits, of which `count` are taken.
    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u64 {
        let (word, shift) = (self.at / 64, (self.at % 64) as u32);
        self.at += count as usize;
        let low = self.word(word) >> shift;
        if shift + count <= 64 {
            low
        } else {
            low | self.word(word + 1) << (64 - shift)
        }
    }
}

/// The 64-bit words of a plane.
#[inline(always)]
pub(super) fn words(plane: &[u8]) -> impl Iterator<Item = u64> {
    plane
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
}
