//! The value class written down again from `docs/format.md`, element by element and without the crate's code: what the encoder must
//! give byte for byte.

use half::{bf16, f16};

/// Parameters of a tensor, as the format names them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Oracle {
    pub(crate) bits: u32,
    pub(crate) group: usize,
    /// 0 dither, 1 stochastic, 2 nearest.
    pub(crate) rounding: u8,
    /// `None`: rows of this many elements; else (rows, columns).
    pub(crate) channels: Option<(usize, usize)>,
    pub(crate) key: u64,
    /// 0 auto, 1 always, 2 never.
    pub(crate) zero: u8,
}

/// An element: its value, and its bytes for raw groups.
pub(crate) trait Element: Copy {
    fn value(self) -> f32;
    fn bytes(self) -> Vec<u8>;
}

impl Element for f32 {
    fn value(self) -> f32 {
        self
    }
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Element for f16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Element for bf16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

/// One element's place in its block.
struct Spot {
    /// Index into the tensor, in memory order.
    element: usize,
    slot: usize,
    step: u32,
    lane: u32,
    group: usize,
}

struct Block {
    slots: usize,
    groups: usize,
    spots: Vec<Spot>,
}

fn mix64(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58476D1CE4E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D049BB133111EB);
    x ^ (x >> 31)
}

fn dither(key: u64, block: u64, step: u32, lane: u32) -> u32 {
    let h = mix64(key.wrapping_add((block + 1).wrapping_mul(0x9E3779B97F4A7C15)));
    let mut x = (8 * step + (lane & 7)).wrapping_add(h as u32);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb352d);
    x ^= x >> 15;
    x ^= (h >> 32) as u32;
    x = x.wrapping_mul(0x846ca68b);
    x ^= x >> 16;
    (x >> (8 * (lane >> 3))) & 255
}

fn bf16_down(x: f32) -> f32 {
    let mut y = bf16::from_f32(x);
    while y.to_f32() > x {
        y = if y.to_bits() == 0 {
            bf16::from_bits(0x8001)
        } else if y.to_f32() > 0.0 {
            bf16::from_bits(y.to_bits() - 1)
        } else {
            bf16::from_bits(y.to_bits() + 1)
        };
    }
    y.to_f32()
}

fn bf16_up(x: f32) -> f32 {
    let mut y = bf16::from_f32(x);
    while y.to_f32() < x {
        y = bf16::from_bits(y.to_bits() + 1);
    }
    y.to_f32()
}

fn pow2(e: i32) -> f32 {
    2f64.powi(e) as f32
}

impl Oracle {
    fn blocks(&self, n: usize) -> Vec<Block> {
        match self.channels {
            None => (0..n.div_ceil(32_768))
                .map(|b| {
                    let start = 32_768 * b;
                    let slots = (n - start).min(32_768);
                    let spots = (0..slots).map(|i| Spot {
                        element: start + i,
                        slot: i,
                        step: (i / 32) as u32,
                        lane: (i % 32) as u32,
                        group: i / self.group,
                    });
                    Block {
                        slots,
                        groups: slots.div_ceil(self.group),
                        spots: spots.collect(),
                    }
                })
                .collect(),
            Some((rows, cols)) if rows * cols > 0 => {
                let nslab = cols.div_ceil((32_768 / self.group).min(128));
                let w = cols.div_ceil(nslab).div_ceil(8) * 8;
                let ng = rows.div_ceil(self.group);
                let start = |i: usize| i * (rows / ng) + i.min(rows % ng);
                let k = (32_768 / (self.group * w)).max(1);
                let mut blocks = Vec::new();
                for tile in 0..ng.div_ceil(k) {
                    let groups: Vec<usize> = (tile * k..((tile + 1) * k).min(ng)).collect();
                    for slab in 0..nslab {
                        let width = w.min(cols - slab * w);
                        let wp = width.div_ceil(8) * 8;
                        let first = start(groups[0]);
                        let mut spots = Vec::new();
                        for (gi, &g) in groups.iter().enumerate() {
                            for row in start(g)..start(g + 1) {
                                for c in 0..width {
                                    let r = row - first;
                                    spots.push(Spot {
                                        element: row * cols + slab * w + c,
                                        slot: r * wp + c,
                                        step: (r * wp.div_ceil(32) + c / 32) as u32,
                                        lane: (c % 32) as u32,
                                        group: gi * width + c,
                                    });
                                }
                            }
                        }
                        let last = start(groups[groups.len() - 1] + 1);
                        blocks.push(Block {
                            slots: (last - first) * wp,
                            groups: groups.len() * width,
                            spots,
                        });
                    }
                }
                blocks
            }
            Some(_) => Vec::new(),
        }
    }

    fn wants_zero_plane<T: Element>(&self, x: &[T], block: &Block) -> bool {
        let zero = |i: usize| x[block.spots[i].element].value() == 0.0;
        let n = block.spots.len();
        match self.zero {
            1 => true,
            2 => false,
            _ => {
                let sample: Vec<usize> = if n <= 128 {
                    (0..n).collect()
                } else {
                    (0..16)
                        .flat_map(|i| (0..8).map(move |k| i * n / 16 + k))
                        .collect()
                };
                let nonzeros = (0..n).filter(|&i| !zero(i)).count();
                self.bits > 1
                    && sample.into_iter().any(zero)
                    && nonzeros * (self.bits as usize) < n * (self.bits as usize - 1)
            }
        }
    }

    /// The segments' bytes.
    pub(crate) fn encode<T: Element>(&self, x: &[T]) -> Vec<Vec<u8>> {
        let blocks = self.blocks(x.len());
        let mut segments = Vec::new();
        for (s, blocks) in blocks.chunks(16).enumerate() {
            let (mut heads, mut bodies) = (Vec::new(), Vec::new());
            for (i, block) in blocks.iter().enumerate() {
                let body = 16 * blocks.len() + bodies.len();
                let (flags, coded, raw) = self.block(x, block, (16 * s + i) as u64, &mut bodies);
                for word in [flags, coded as u32, (body / 8) as u32, raw] {
                    heads.extend(word.to_le_bytes());
                }
            }
            heads.extend(bodies);
            segments.push(heads);
        }
        segments
    }

    fn block<T: Element>(
        &self,
        x: &[T],
        block: &Block,
        number: u64,
        out: &mut Vec<u8>,
    ) -> (u32, usize, u32) {
        let zero_plane = self.wants_zero_plane(x, block);
        let mut members: Vec<Vec<&Spot>> = (0..block.groups).map(|_| Vec::new()).collect();
        for spot in &block.spots {
            members[spot.group].push(spot);
        }
        let ranges: Vec<Option<(f32, f32)>> = members
            .iter()
            .map(|spots| {
                let all: Vec<f32> = spots.iter().map(|s| x[s.element].value()).collect();
                let finite = all.iter().all(|v| v.is_finite());
                let kept: Vec<f32> = all
                    .into_iter()
                    .filter(|v| !zero_plane || *v != 0.0)
                    .map(|v| v + 0.0)
                    .collect();
                match (finite, kept.is_empty()) {
                    (false, _) => None,
                    (true, true) => Some((0.0, 0.0)),
                    (true, false) => Some(
                        kept.iter()
                            .fold((kept[0], kept[0]), |(a, b), v| (a.min(*v), b.max(*v))),
                    ),
                }
            })
            .collect();
        let m_f32 = ranges.iter().flatten().any(|&(lo, hi)| {
            lo < hi && f32::from_bits(lo.to_bits() & 0x7f80_0000) > 8.0 * (hi - lo)
        });
        let levels = ((1u32 << self.bits) - 1) as f32;
        // (class, m, s, value)
        let groups: Vec<(u8, f32, f32, f32)> = ranges
            .iter()
            .map(|range| {
                let Some((lo, hi)) = *range else {
                    return (2, 0.0, 0.0, 0.0);
                };
                if lo == hi {
                    return (1, 0.0, 0.0, lo);
                }
                let m = if m_f32 { lo } else { bf16_down(lo) };
                let s = bf16_up((hi - m) / levels);
                let coded = s >= pow2(-100)
                    && s <= pow2(126) / (1u32 << self.bits) as f32
                    && m.abs() <= pow2(126);
                if coded {
                    (0, m, s, 0.0)
                } else {
                    (2, 0.0, 0.0, 0.0)
                }
            })
            .collect();
        let table = groups.iter().any(|g| g.0 != 0);
        if table {
            let mut bytes = vec![0u8; groups.len().div_ceil(4).div_ceil(8) * 8];
            for (g, group) in groups.iter().enumerate() {
                bytes[g / 4] |= group.0 << (2 * (g % 4));
            }
            out.extend(bytes);
        }
        for g in &groups {
            let bits = if g.0 == 1 {
                g.3.to_bits()
            } else {
                g.1.to_bits()
            };
            match (m_f32, g.0) {
                (true, _) => out.extend(bits.to_le_bytes()),
                (false, 1) => out.extend((bits as u16).to_le_bytes()),
                (false, _) => out.extend(((bits >> 16) as u16).to_le_bytes()),
            }
        }
        for g in &groups {
            let bits = if g.0 == 1 && !m_f32 {
                g.3.to_bits()
            } else {
                g.2.to_bits()
            };
            out.extend(((bits >> 16) as u16).to_le_bytes());
        }
        while !out.len().is_multiple_of(8) {
            out.push(0);
        }
        let mut nonzero = vec![false; block.slots];
        let mut codes = vec![0u32; block.slots];
        for spot in &block.spots {
            let v = x[spot.element].value();
            nonzero[spot.slot] = v != 0.0;
            let (class, m, s, _) = groups[spot.group];
            if class == 0 && !(zero_plane && v == 0.0) {
                let inv = (256.0 / s) * (1.0 - 1.0 / 2_097_152.0);
                let r = if self.rounding == 2 {
                    128
                } else {
                    dither(self.key, number, spot.step, spot.lane)
                };
                let w = (v - m).mul_add(inv, 8_388_608.0);
                codes[spot.slot] = ((w.to_bits() & 0xffff) + r) >> 8;
                assert!(
                    codes[spot.slot] < 1 << self.bits,
                    "code {} of {v} in a group from {m} in steps of {s}",
                    codes[spot.slot]
                );
            }
        }
        if zero_plane {
            out.extend(plane(nonzero.iter().copied()));
        }
        let kept: Vec<u32> = if zero_plane {
            codes
                .iter()
                .zip(&nonzero)
                .filter(|(_, n)| **n)
                .map(|(c, _)| *c)
                .collect()
        } else {
            codes
        };
        for k in 0..self.bits {
            out.extend(plane(kept.iter().map(|c| c >> k & 1 == 1)));
        }
        for (group, spots) in groups.iter().zip(&members) {
            if group.0 == 2 {
                out.extend(spots.iter().flat_map(|s| x[s.element].bytes()));
            }
        }
        while !out.len().is_multiple_of(8) {
            out.push(0);
        }
        let raw = groups.iter().filter(|g| g.0 == 2).count() as u32;
        (
            u32::from(m_f32) + 2 * u32::from(zero_plane) + 4 * u32::from(table),
            kept.len(),
            raw,
        )
    }
}

fn plane(bits: impl Iterator<Item = bool>) -> Vec<u8> {
    let bits: Vec<bool> = bits.collect();
    let mut out = vec![0u8; bits.len().div_ceil(64) * 8];
    for (i, b) in bits.into_iter().enumerate() {
        out[i / 8] |= u8::from(b) << (i % 8);
    }
    out
}
