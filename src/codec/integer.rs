//! The integer class: frame of reference per 64 elements, exact for every input. `docs/format.md`, "Integers".
//!
//! Indices (of max-pool, of an embedding, positions) are close to a straight line within a group, so a block subtracts a common ramp
//! first; a group then keeps its offset from the block's base and only as many bit-planes as its own range needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::exact::{self, PART, Word};
use super::parts::{self, Part};
use super::segment::corrupt;
use super::{Encoded, Layout, Target};
use crate::error::Result;
use crate::parallel;
use crate::pool::{Extent, SlabPool};

/// Elements of a group: a bit-plane of it is one 64-bit word.
const GROUP: usize = 64;
/// Elements of a block, which shares base and ramp.
const BLOCK: usize = 8192;
const GROUPS: usize = BLOCK / GROUP;
/// Base, ramp, bytes of a group's offset: three 64-bit words.
const HEADER: usize = 24;
/// Differences looked at to find the ramp.
const SAMPLES: usize = 31;

/// An element as a signed number; the high bits of a narrow unsigned one are 0.
fn widen<W: Word>(w: W, signed: bool) -> i64 {
    let unused = 64 - 8 * size_of::<W>().min(8);
    let bits = w.bits()[0] << unused;
    if signed {
        bits.cast_signed() >> unused
    } else {
        (bits >> unused).cast_signed()
    }
}

/// One block of a tensor, residuals over a ramp.
struct Frame {
    ramp: i64,
    low: [i64; GROUPS],
    width: [u8; GROUPS],
    groups: usize,
}

impl Frame {
    /// Lower end and bit width of every group of `x` after the ramp is taken off.
    fn new(x: &[i64], ramp: i64) -> Self {
        let groups = x.len().div_ceil(GROUP);
        let mut frame = Frame {
            ramp,
            low: [0; GROUPS],
            width: [0; GROUPS],
            groups,
        };
        for (g, x) in x.chunks(GROUP).enumerate() {
            (frame.low[g], frame.width[g]) = range(x, ramp);
        }
        frame
    }

    fn planes(&self) -> usize {
        self.width[..self.groups]
            .iter()
            .map(|w| usize::from(*w))
            .sum()
    }

    fn base(&self) -> i64 {
        self.low[..self.groups].iter().copied().min().unwrap_or(0)
    }

    /// Bytes of a group's offset from the base.
    fn offset_bytes(&self, base: i64) -> usize {
        let most = self.low[..self.groups]
            .iter()
            .map(|l| l.wrapping_sub(base).cast_unsigned())
            .max()
            .unwrap_or(0);
        match most {
            0 => 0,
            1..=0xff => 1,
            0x100..=0xffff => 2,
            0x1_0000..=0xffff_ffff => 4,
            _ => 8,
        }
    }
}

/// Offsets of a block's parts.
struct Shape {
    offsets: usize,
    planes: usize,
}

impl Shape {
    fn new(groups: usize, offset_bytes: usize) -> Self {
        let offsets = HEADER + groups.next_multiple_of(8);
        Shape {
            offsets,
            planes: offsets + (groups * offset_bytes).next_multiple_of(8),
        }
    }
}

/// Slopes that may fit: the median difference of neighbours (one row of an index map), and of a group's ends (over several rows).
fn slopes(x: &[i64]) -> [i64; 2] {
    [1, GROUP - 1].map(|lag| {
        if x.len() <= lag + SAMPLES {
            return 0;
        }
        let mut steps: [i64; SAMPLES] = std::array::from_fn(|i| {
            let at = i * (x.len() - lag) / SAMPLES;
            x[at + lag].wrapping_sub(x[at])
        });
        steps.sort_unstable();
        let lag = lag.cast_signed() as i64;
        // Rounded to the nearest, halves up; the sum may wrap, which costs width but no exactness.
        steps[SAMPLES / 2].wrapping_add(lag / 2).div_euclid(lag)
    })
}

/// The ramp that needs the fewest planes in every eighth group: 0 or one of the slopes.
fn best_ramp(x: &[i64]) -> i64 {
    let planes = |ramp: i64| {
        x.chunks(GROUP)
            .step_by(8)
            .map(|x| u32::from(range(x, ramp).1))
            .sum::<u32>()
    };
    let [a, b] = slopes(x);
    let mut best = (planes(0), 0);
    for ramp in [a, b] {
        if ramp != best.1 {
            let sloped = planes(ramp);
            if sloped < best.0 {
                best = (sloped, ramp);
            }
        }
    }
    best.1
}

/// The lower end of a group after a ramp is taken off, and the bits of its residuals.
fn range(x: &[i64], ramp: i64) -> (i64, u8) {
    // Two chains of comparisons instead of one: they are what takes time.
    let (mut low, mut high, mut line) = ([i64::MAX; 2], [i64::MIN; 2], 0i64);
    let (pairs, last) = x.as_chunks::<2>();
    for pair in pairs {
        for k in 0..2 {
            let y = pair[k].wrapping_sub(line);
            low[k] = low[k].min(y);
            high[k] = high[k].max(y);
            line = line.wrapping_add(ramp);
        }
    }
    for x in last {
        let y = x.wrapping_sub(line);
        (low[0], high[0]) = (low[0].min(y), high[0].max(y));
    }
    let (low, high) = (low[0].min(low[1]), high[0].max(high[1]));
    // The difference of two i64 fits in a u64 whatever they are.
    let range = high.wrapping_sub(low).cast_unsigned();
    (low, 64 - range.leading_zeros() as u8)
}

/// The 8x8 bit matrix whose row i is byte i, transposed: bit j of byte i becomes bit i of byte j (Warren, Hacker's Delight, 7-3).
fn transpose8(mut x: u64) -> u64 {
    let t = (x ^ (x >> 7)) & 0x00AA_00AA_00AA_00AA;
    x ^= t ^ (t << 7);
    let t = (x ^ (x >> 14)) & 0x0000_CCCC_0000_CCCC;
    x ^= t ^ (t << 14);
    let t = (x ^ (x >> 28)) & 0x0000_0000_F0F0_F0F0;
    x ^ t ^ (t << 28)
}

/// The 8x8 byte matrix whose rows are the words, transposed.
fn transpose_bytes(x: [u64; 8]) -> [u64; 8] {
    // Quarters of 4x4, then 2x2, then 1x1 bytes change places.
    let stage = |x: [u64; 8], apart: usize, mask: u64| {
        let shift = 8 * apart;
        let mut y = x;
        for i in (0..8).filter(|i| i & apart == 0) {
            let t = ((x[i] >> shift) ^ x[i + apart]) & mask;
            y[i] = x[i] ^ (t << shift);
            y[i + apart] = x[i + apart] ^ t;
        }
        y
    };
    let x = stage(x, 4, 0x0000_0000_FFFF_FFFF);
    let x = stage(x, 2, 0x0000_FFFF_0000_FFFF);
    stage(x, 1, 0x00FF_00FF_00FF_00FF)
}

/// Bit-planes of 64 residuals, `width` words.
fn to_planes(y: &[u64; GROUP], width: usize, out: &mut [u8]) {
    for (eight, first) in out[..8 * width].chunks_mut(64).zip((0..width).step_by(8)) {
        let bytes: [u8; GROUP] = std::array::from_fn(|i| (y[i] >> first) as u8);
        let mut words = [0u64; 8];
        for (word, b) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = transpose8(u64::from_le_bytes(*b));
        }
        for (plane, word) in eight
            .as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(transpose_bytes(words))
        {
            *plane = word.to_le_bytes();
        }
    }
}

/// The inverse of [`to_planes`].
fn from_planes(planes: &[u8], width: usize, y: &mut [u64; GROUP]) {
    y.fill(0);
    for (eight, first) in planes[..8 * width].chunks(64).zip((0..width).step_by(8)) {
        let mut words = [0u64; 8];
        for (word, plane) in words.iter_mut().zip(eight.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*plane);
        }
        let words = transpose_bytes(words).map(transpose8);
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        for (y, b) in y.iter_mut().zip(bytes) {
            *y |= u64::from(*b) << first;
        }
    }
}

/// Appends one block; says how many bytes are metadata.
fn encode_block(x: &[i64], out: &mut Vec<u8>) -> usize {
    let frame = Frame::new(x, best_ramp(x));
    let base = frame.base();
    let offset_bytes = frame.offset_bytes(base);
    let shape = Shape::new(frame.groups, offset_bytes);
    let start = out.len();
    out.resize(start + shape.planes + 8 * frame.planes(), 0);
    let block = &mut out[start..];
    block[..8].copy_from_slice(&base.to_le_bytes());
    block[8..16].copy_from_slice(&frame.ramp.to_le_bytes());
    block[16..24].copy_from_slice(&(offset_bytes as u64).to_le_bytes());
    block[HEADER..HEADER + frame.groups].copy_from_slice(&frame.width[..frame.groups]);
    let mut at = shape.planes;
    let mut y = [0u64; GROUP];
    for (g, x) in x.chunks(GROUP).enumerate() {
        let (low, width) = (frame.low[g], usize::from(frame.width[g]));
        let offset = low.wrapping_sub(base).to_le_bytes();
        block[shape.offsets + g * offset_bytes..][..offset_bytes]
            .copy_from_slice(&offset[..offset_bytes]);
        if width == 0 {
            continue;
        }
        let mut line = low;
        y.fill(0);
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.wrapping_sub(line).cast_unsigned();
            line = line.wrapping_add(frame.ramp);
        }
        to_planes(&y, width, &mut block[at..]);
        at += 8 * width;
    }
    shape.planes
}

/// The parts and their metadata bytes, or `None` when some part would not shrink to 7/8.
pub(super) fn encode<W: Word>(
    src: &[W],
    layout: &Layout,
    signed: bool,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Option<(Vec<Extent>, usize)>> {
    let broken = AtomicBool::new(false);
    let parts = parts::map(layout.len().div_ceil(PART), threads, |i| {
        let range = exact::part(i, layout.len());
        let limit = range.len() * size_of::<W>() / 8 * 7;
        let mut out = Vec::with_capacity(limit / 2);
        let mut wide = vec![0i64; BLOCK];
        let mut metadata = 0;
        let fits = exact::strips(src, layout, range, |_, strip| {
            for block in strip.chunks(BLOCK) {
                let block = if size_of::<W>() == 8 {
                    bytemuck::cast_slice(block)
                } else {
                    for (to, w) in wide.iter_mut().zip(block) {
                        *to = widen(*w, signed);
                    }
                    &wide[..block.len()]
                };
                metadata += encode_block(block, &mut out);
            }
            out.len() <= limit && !broken.load(Ordering::Relaxed)
        });
        if !fits {
            broken.store(true, Ordering::Relaxed);
            out.clear();
        }
        let mut extent = pool.alloc(out.len())?;
        extent.as_mut_slice().copy_from_slice(&out);
        Ok((extent, metadata))
    })?;
    if broken.into_inner() {
        return Ok(None);
    }
    let metadata = parts.iter().map(|p| p.1).sum();
    Ok(Some((parts.into_iter().map(|p| p.0).collect(), metadata)))
}

fn word(bytes: &[u8], at: usize) -> Result<u64> {
    let Some(b) = bytes.get(at..).and_then(|b| b.first_chunk::<8>()) else {
        return Err(corrupt("an integer block is cut off"));
    };
    Ok(u64::from_le_bytes(*b))
}

/// A block's metadata, and what follows them.
type Split<'a> = (&'a [u8], &'a [u8]);

/// Bytes of an offset, and the block's metadata apart from what follows them.
fn split_block(bytes: &[u8], groups: usize) -> Result<(usize, Split<'_>)> {
    let offset_bytes = match word(bytes, 16)? {
        n @ (0 | 1 | 2 | 4 | 8) => n as usize,
        _ => {
            return Err(corrupt(
                "an integer block has offsets of an impossible size",
            ));
        }
    };
    match bytes.split_at_checked(Shape::new(groups, offset_bytes).planes) {
        Some(split) => Ok((offset_bytes, split)),
        None => Err(corrupt("an integer block is cut off")),
    }
}

/// Decodes one block of `out.len()` elements; gives the bytes behind it.
fn decode_block<'a, W: Word>(bytes: &'a [u8], out: &mut [W]) -> Result<&'a [u8]> {
    let groups = out.len().div_ceil(GROUP);
    let (offset_bytes, (head, mut planes)) = split_block(bytes, groups)?;
    let (base, ramp) = (word(head, 0)?, word(head, 8)?);
    let shape = Shape::new(groups, offset_bytes);
    let mut y = [0u64; GROUP];
    for (g, out) in out.chunks_mut(GROUP).enumerate() {
        let width = usize::from(head[HEADER + g]);
        if width > 64 || planes.len() < 8 * width {
            return Err(corrupt("an integer group is wider than its block"));
        }
        let offset = &head[shape.offsets + g * offset_bytes..][..offset_bytes];
        let offset = offset
            .iter()
            .rev()
            .fold(0u64, |x, b| x << 8 | u64::from(*b));
        let (group, rest) = planes.split_at(8 * width);
        planes = rest;
        from_planes(group, width, &mut y);
        let mut line = base.wrapping_add(offset);
        for (out, y) in out.iter_mut().zip(&y) {
            *out = W::from_bits([line.wrapping_add(*y), 0]);
            line = line.wrapping_add(ramp);
        }
    }
    Ok(planes)
}

/// Checks the blocks of a part of `len` elements as [`decode`] would, and gives their metadata bytes.
pub(super) fn check(mut bytes: &[u8], len: usize) -> Result<usize> {
    let mut metadata = 0;
    for first in (0..len).step_by(BLOCK) {
        let groups = BLOCK.min(len - first).div_ceil(GROUP);
        let (head, planes) = split_block(bytes, groups)?.1;
        metadata += head.len();
        let widths = &head[HEADER..HEADER + groups];
        let size = widths.iter().map(|w| 8 * usize::from(*w)).sum();
        match planes.get(size..) {
            Some(rest) if widths.iter().all(|w| *w <= 64) => bytes = rest,
            _ => return Err(corrupt("an integer group is wider than its block")),
        }
    }
    if bytes.is_empty() {
        Ok(metadata)
    } else {
        Err(corrupt("bytes follow the last integer block"))
    }
}

pub(super) fn decode<W: Word>(
    stored: &Encoded,
    dst: Target<'_>,
    layout: &Layout,
    threads: usize,
) -> Result<()> {
    let dst: &mut [W] = dst.elements(layout.span())?;
    let ends: Vec<usize> = (0..layout.len().div_ceil(PART))
        .map(|i| exact::part(i, layout.len()).end)
        .collect();
    if ends.len() != stored.parts.len() {
        return Err(corrupt(
            "a tensor has another number of parts than its elements need",
        ));
    }
    let threads = parallel::threads_for(threads, size_of_val(&*dst));
    parts::for_each_part(dst, layout, &ends, threads, |i, mut part: Part<'_, W>| {
        let mut bytes = stored.parts[i].as_slice();
        if layout.is_dense() {
            for block in part.memory.chunks_mut(BLOCK) {
                bytes = decode_block(bytes, block)?;
            }
            return Ok(());
        }
        #[expect(
            clippy::useless_vec,
            reason = "64 KiB are too much for the stack of a worker thread"
        )]
        let mut room = vec![W::zeroed(); BLOCK];
        for first in part.elements.clone().step_by(BLOCK) {
            let room = &mut room[..BLOCK.min(part.elements.end - first)];
            bytes = decode_block(bytes, room)?;
            part.write(layout, first, room);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_twice_is_nothing() {
        let words: [u64; 8] = std::array::from_fn(|i| crate::kernels::rng::mix64(i as u64));
        let turned = transpose_bytes(words);
        assert_eq!(transpose_bytes(turned), words);
        assert!(
            (0..8).all(|i| (0..8).all(|j| turned[i].to_le_bytes()[j] == words[j].to_le_bytes()[i]))
        );
        let x = 0x0123_4567_89ab_cdef;
        assert_eq!(transpose8(transpose8(x)), x);
        assert_eq!(transpose8(0xff), 0x0101_0101_0101_0101);
    }

    #[test]
    fn planes_come_back_at_every_width() {
        let mut state = 1u64;
        for width in 0..=64usize {
            let mask = if width == 0 {
                0
            } else {
                u64::MAX >> (64 - width)
            };
            let y: [u64; GROUP] = std::array::from_fn(|_| {
                state = crate::kernels::rng::mix64(state);
                state & mask
            });
            let (mut planes, mut back) = (vec![0; 8 * width], [0; GROUP]);
            to_planes(&y, width, &mut planes);
            from_planes(&planes, width, &mut back);
            assert_eq!(y, back);
        }
    }

    #[test]
    fn ramps_cost_nothing() {
        let x: Vec<i64> = (0..BLOCK as i64).map(|i| 3 * i - 77).collect();
        let mut out = Vec::new();
        encode_block(&x, &mut out);
        assert!(out.len() < 600, "{} bytes", out.len());
        let mut back = vec![0u64; x.len()];
        assert!(decode_block(&out, &mut back).unwrap().is_empty());
        assert!(x.iter().zip(&back).all(|(x, y)| x.cast_unsigned() == *y));
    }
}
