//! The bytes of a segment of the value codec: block headers and where the parts of a block's body lie. `docs/format.md`, "Segment".

use crate::error::{Error, Result};
use crate::kernels::{count_ones, plane_len};

use super::geometry::{Block, Tiling};

/// Bytes of a block header.
pub(crate) const HEADER: usize = 16;

const M_F32: u8 = 1;
const ZERO_PLANE: u8 = 2;
const CLASS_TABLE: u8 = 4;

/// What a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum GroupClass {
    Coded = 0,
    Constant = 1,
    Raw = 2,
}

/// One block's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockHeader {
    /// m takes four bytes, not two.
    pub(crate) m_f32: bool,
    pub(crate) zero_plane: bool,
    pub(crate) class_table: bool,
    /// Slots that the code planes hold: the block's, or its nonzeros where there is a zero plane.
    pub(crate) coded_slots: usize,
    /// Offset of the body in the segment.
    pub(crate) body: usize,
    pub(crate) raw_groups: usize,
}

impl BlockHeader {
    pub(crate) fn write(&self, to: &mut [u8]) {
        let flag = |set: bool, f: u8| if set { f } else { 0 };
        let flags = flag(self.m_f32, M_F32)
            | flag(self.zero_plane, ZERO_PLANE)
            | flag(self.class_table, CLASS_TABLE);
        // A block has at most 2^15 slots and groups, a segment less than 2^23 bytes.
        let words = [
            u32::from(flags),
            self.coded_slots as u32,
            (self.body / 8) as u32,
            self.raw_groups as u32,
        ];
        for (to, w) in to[..HEADER].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&w.to_le_bytes());
        }
    }

    pub(crate) fn read(from: &[u8]) -> Result<Self> {
        let mut words = [0u32; 4];
        let Some(head) = from.get(..HEADER) else {
            return Err(corrupt("a segment ends inside its block headers"));
        };
        for (w, b) in words.iter_mut().zip(head.chunks_exact(4)) {
            *w = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
        let [flags, coded_slots, body, raw_groups] = words;
        if flags > u32::from(M_F32 | ZERO_PLANE | CLASS_TABLE) {
            return Err(corrupt("a block header has flags that do not exist"));
        }
        let flag = |f: u8| flags & u32::from(f) != 0;
        Ok(BlockHeader {
            m_f32: flag(M_F32),
            zero_plane: flag(ZERO_PLANE),
            class_table: flag(CLASS_TABLE),
            coded_slots: coded_slots as usize,
            body: (body as usize).saturating_mul(8),
            raw_groups: raw_groups as usize,
        })
    }
}

/// Offsets inside a block's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Body {
    /// Class table: from 0 to here.
    pub(crate) m: usize,
    pub(crate) s: usize,
    pub(crate) zero: usize,
    pub(crate) planes: usize,
    /// Bytes of one code plane.
    pub(crate) plane: usize,
    pub(crate) raw: usize,
}

impl Body {
    /// The body of a block with `groups` groups in `slots` slots.
    pub(crate) fn new(header: &BlockHeader, groups: usize, slots: usize, bits: usize) -> Self {
        let m = if header.class_table {
            groups.div_ceil(4).next_multiple_of(8)
        } else {
            0
        };
        let s = m + groups * if header.m_f32 { 4 } else { 2 };
        let zero = (s + groups * 2).next_multiple_of(8);
        let planes = zero
            + if header.zero_plane {
                plane_len(slots)
            } else {
                0
            };
        let plane = plane_len(header.coded_slots);
        Body {
            m,
            s,
            zero,
            planes,
            plane,
            raw: planes + bits * plane,
        }
    }

    /// Bytes of class table and group parameters.
    pub(crate) fn metadata(&self) -> usize {
        self.zero
    }

    /// The most that a block's body takes, raw elements apart.
    pub(crate) fn most(groups: usize, slots: usize, bits: usize) -> usize {
        let header = BlockHeader {
            m_f32: true,
            zero_plane: true,
            class_table: true,
            coded_slots: slots,
            ..Default::default()
        };
        Body::new(&header, groups, slots, bits).raw
    }
}

/// Sets the class of group `g` in a class table.
pub(crate) fn set_class(table: &mut [u8], g: usize, class: GroupClass) {
    table[g / 4] |= (class as u8) << (2 * (g % 4));
}

/// The class of group `g`.
pub(crate) fn class_of(table: &[u8], g: usize) -> Result<GroupClass> {
    match table[g / 4] >> (2 * (g % 4)) & 3 {
        0 => Ok(GroupClass::Coded),
        1 => Ok(GroupClass::Constant),
        2 => Ok(GroupClass::Raw),
        _ => Err(corrupt("a group has a class that does not exist")),
    }
}

/// A block as a decoder sees it: every offset checked against the geometry and the bytes that are there.
pub(crate) struct BlockView<'a> {
    pub(crate) header: BlockHeader,
    pub(crate) offsets: Body,
    pub(crate) body: &'a [u8],
}

impl<'a> BlockView<'a> {
    /// Block `index` (in the segment) of `segment`.
    pub(crate) fn new(
        segment: &'a [u8],
        index: usize,
        tiling: &Tiling,
        block: &Block,
        bits: usize,
        element: usize,
    ) -> Result<Self> {
        let header = BlockHeader::read(segment.get(index * HEADER..).unwrap_or(&[]))?;
        let (groups, slots) = (tiling.groups(block), tiling.slots(block));
        if header.coded_slots > slots || (!header.zero_plane && header.coded_slots != slots) {
            return Err(corrupt(
                "a block has another number of coded slots than its shape allows",
            ));
        }
        let offsets = Body::new(&header, groups, slots, bits);
        let Some(body) = segment
            .get(header.body..)
            .filter(|b| b.len() >= offsets.raw)
        else {
            return Err(corrupt("a block ends behind its segment"));
        };
        let mut raw_elements = 0;
        if header.class_table {
            let mut raw_groups = 0;
            for g in 0..groups {
                if class_of(body, g)? == GroupClass::Raw {
                    raw_groups += 1;
                    raw_elements += tiling.group_len(block, g);
                }
            }
            if raw_groups != header.raw_groups {
                return Err(corrupt(
                    "a block has another number of raw groups than its header says",
                ));
            }
        } else if header.raw_groups != 0 {
            return Err(corrupt("a block has raw groups but no class table"));
        }
        if body.len() < offsets.raw + raw_elements * element {
            return Err(corrupt("a block's raw groups end behind its segment"));
        }
        if header.zero_plane {
            let ones = count_ones(&body[offsets.zero..offsets.planes]);
            if ones != header.coded_slots {
                return Err(corrupt(
                    "a block's zero plane has another number of nonzeros than its header says",
                ));
            }
        }
        Ok(BlockView {
            header,
            offsets,
            body,
        })
    }
}

pub(crate) fn corrupt(what: &str) -> Error {
    Error::CorruptData(format!(
        "{what}; the bytes were damaged or not written by this format"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back() {
        for flags in 0..8u8 {
            let h = BlockHeader {
                m_f32: flags & 1 != 0,
                zero_plane: flags & 2 != 0,
                class_table: flags & 4 != 0,
                coded_slots: 32_768,
                body: 1 << 20,
                raw_groups: 1024,
            };
            let mut bytes = [0xffu8; HEADER];
            h.write(&mut bytes);
            assert_eq!(BlockHeader::read(&bytes).unwrap(), h);
        }
        assert!(BlockHeader::read(&[8; HEADER]).is_err());
        assert!(BlockHeader::read(&[0; HEADER - 1]).is_err());
    }
}
