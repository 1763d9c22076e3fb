//! Where elements, slots, steps and groups lie: pure index arithmetic, no data. `docs/format.md`, "Geometry".

use crate::error::{Error, Result};

/// Slots that share one step of dither words.
pub const STEP: usize = 32;
/// The largest number of slots of a block.
pub const BLOCK: usize = 32_768;
/// Blocks of a segment: one allocation.
pub const SEGMENT_BLOCKS: usize = 16;
/// Smallest and largest group size.
pub const GROUP_SIZES: std::ops::RangeInclusive<u16> = 32..=1024;

/// How elements, numbered in memory order, form groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Geometry {
    /// Groups of consecutive elements.
    Row {
        /// Elements.
        n: usize,
    },
    /// A matrix in row-major order; a group is about `group_size` rows of one column (the channel).
    Channel {
        /// Rows: tokens.
        rows: usize,
        /// Columns: channels.
        cols: usize,
    },
}

impl Geometry {
    /// Elements.
    pub fn len(&self) -> usize {
        match *self {
            Geometry::Row { n } => n,
            Geometry::Channel { rows, cols } => rows.saturating_mul(cols),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The blocks of a geometry at one group size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    geometry: Geometry,
    group: usize,
    blocks: usize,
    /// Channel only: slabs, columns of a full slab, row groups in all and per tile.
    slabs: usize,
    slab_width: usize,
    row_groups: usize,
    tile_groups: usize,
}

/// One block of row groups: consecutive elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// Number of the first element.
    pub start: usize,
    /// Elements, which are also the slots.
    pub len: usize,
}

/// One block of channel groups: a tile of rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelBlock {
    /// First row group and their number.
    pub first_group: usize,
    /// Row groups in this block.
    pub groups: usize,
    /// First row.
    pub row: usize,
    /// Rows.
    pub rows: usize,
    /// First column.
    pub col: usize,
    /// Columns.
    pub width: usize,
    /// Slots from one row to the next: the width rounded up to 8.
    pub pitch: usize,
}

/// A block of either shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Row groups.
    Row(RowBlock),
    /// Channel groups.
    Channel(ChannelBlock),
}

impl ChannelBlock {
    /// Dither steps from one row to the next.
    pub fn steps_per_row(&self) -> usize {
        self.pitch.div_ceil(STEP)
    }
}

impl Tiling {
    /// The tiling of a geometry.
    ///
    /// # Errors
    /// `InvalidArgument` for a group size that is no power of two in 32..=1024, or a matrix of more than `usize::MAX` elements.
    pub fn new(geometry: Geometry, group_size: u16) -> Result<Self> {
        if !group_size.is_power_of_two() || !GROUP_SIZES.contains(&group_size) {
            return Err(Error::InvalidArgument(format!(
                "group_size is {group_size}; allowed are the powers of two from 32 to 1024, for example 256"
            )));
        }
        let group = usize::from(group_size);
        let none = Tiling {
            geometry,
            group,
            blocks: 0,
            slabs: 0,
            slab_width: 0,
            row_groups: 0,
            tile_groups: 0,
        };
        match geometry {
            Geometry::Row { n } => Ok(Tiling {
                blocks: n.div_ceil(BLOCK),
                ..none
            }),
            Geometry::Channel { rows, cols } => {
                if rows.checked_mul(cols).is_none() {
                    return Err(Error::InvalidArgument(format!(
                        "{rows} rows of {cols} channels are too many elements"
                    )));
                }
                if rows == 0 || cols == 0 {
                    return Ok(none);
                }
                let slabs = cols.div_ceil((BLOCK / group).min(128));
                let slab_width = cols.div_ceil(slabs).next_multiple_of(8);
                let row_groups = rows.div_ceil(group);
                let tile_groups = (BLOCK / (group * slab_width)).max(1);
                let blocks = row_groups.div_ceil(tile_groups) * slabs;
                Ok(Tiling {
                    geometry,
                    group,
                    blocks,
                    slabs,
                    slab_width,
                    row_groups,
                    tile_groups,
                })
            }
        }
    }

    /// The geometry that is tiled.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Nominal elements of a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Blocks in all.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Segments in all.
    pub fn segments(&self) -> usize {
        self.blocks.div_ceil(SEGMENT_BLOCKS)
    }

    /// The blocks of a segment.
    pub fn segment(&self, s: usize) -> std::ops::Range<usize> {
        (s * SEGMENT_BLOCKS).min(self.blocks)..((s + 1) * SEGMENT_BLOCKS).min(self.blocks)
    }

    /// Rows of tiles (channel geometry).
    pub(crate) fn tile_rows(&self) -> usize {
        self.blocks.checked_div(self.slabs).unwrap_or(0)
    }

    /// The blocks of a row of tiles.
    pub(crate) fn tile_row(&self, t: usize) -> std::ops::Range<usize> {
        t * self.slabs..(t + 1) * self.slabs
    }

    /// One past the last matrix row of a row of tiles.
    pub(crate) fn tile_row_end(&self, t: usize) -> usize {
        self.group_start(((t + 1) * self.tile_groups).min(self.row_groups))
    }

    /// First row of a row group (channel geometry); the number of row groups gives the number of rows.
    pub fn group_start(&self, g: usize) -> usize {
        let Geometry::Channel { rows, .. } = self.geometry else {
            return 0;
        };
        g * (rows / self.row_groups) + g.min(rows % self.row_groups)
    }

    /// The shape of a block below [`Tiling::blocks`].
    pub fn block(&self, block: usize) -> Block {
        match self.geometry {
            Geometry::Row { n } => {
                let start = block * BLOCK;
                Block::Row(RowBlock {
                    start,
                    len: (n - start).min(BLOCK),
                })
            }
            Geometry::Channel { cols, .. } => {
                let (tile, slab) = (block / self.slabs, block % self.slabs);
                let first_group = tile * self.tile_groups;
                let groups = self.tile_groups.min(self.row_groups - first_group);
                let row = self.group_start(first_group);
                let col = slab * self.slab_width;
                let width = self.slab_width.min(cols - col);
                Block::Channel(ChannelBlock {
                    first_group,
                    groups,
                    row,
                    rows: self.group_start(first_group + groups) - row,
                    col,
                    width,
                    pitch: width.next_multiple_of(8),
                })
            }
        }
    }

    /// Slots of a block.
    pub fn slots(&self, block: &Block) -> usize {
        match block {
            Block::Row(b) => b.len,
            Block::Channel(b) => b.rows * b.pitch,
        }
    }

    /// Elements of a block.
    pub fn elements(&self, block: &Block) -> usize {
        match block {
            Block::Row(b) => b.len,
            Block::Channel(b) => b.rows * b.width,
        }
    }

    /// Groups of a block.
    pub fn groups(&self, block: &Block) -> usize {
        match block {
            Block::Row(b) => b.len.div_ceil(self.group),
            Block::Channel(b) => b.groups * b.width,
        }
    }

    /// Elements of group `g` of a block.
    pub fn group_len(&self, block: &Block, g: usize) -> usize {
        match block {
            Block::Row(b) => self.group.min(b.len - g * self.group),
            Block::Channel(b) => {
                let rg = b.first_group + g / b.width;
                self.group_start(rg + 1) - self.group_start(rg)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element in exactly one slot of one block, slots and groups within their bounds.
    fn covers(rows: usize, cols: usize, group: u16) {
        let t = Tiling::new(Geometry::Channel { rows, cols }, group).unwrap();
        let mut seen = vec![0u8; rows * cols];
        for i in 0..t.blocks() {
            let b = t.block(i);
            let Block::Channel(c) = b else { unreachable!() };
            assert!(t.slots(&b) <= BLOCK && c.width > 0 && c.rows > 0, "{c:?}");
            let total: usize = (0..t.groups(&b)).map(|g| t.group_len(&b, g)).sum();
            assert_eq!(total, t.elements(&b));
            assert!(
                (0..t.groups(&b)).all(|g| (1..=usize::from(group)).contains(&t.group_len(&b, g)))
            );
            for r in c.row..c.row + c.rows {
                seen[r * cols + c.col..r * cols + c.col + c.width]
                    .iter_mut()
                    .for_each(|s| *s += 1);
            }
        }
        assert!(seen.iter().all(|&s| s == 1), "{rows}x{cols} at {group}");
    }

    #[test]
    fn channel_tiles_cover_every_element_once() {
        for rows in [1, 2, 31, 127, 256, 257, 700, 2049] {
            for cols in [1, 7, 8, 16, 64, 100, 128, 129, 130, 768, 1000] {
                for group in [32, 256, 1024] {
                    covers(rows, cols, group);
                }
            }
        }
    }

    #[test]
    fn ragged_groups_are_near_equal() {
        let t = Tiling::new(
            Geometry::Channel {
                rows: 257,
                cols: 128,
            },
            256,
        )
        .unwrap();
        assert_eq!(
            (t.group_start(0), t.group_start(1), t.group_start(2)),
            (0, 129, 257)
        );
        let t = Tiling::new(
            Geometry::Channel {
                rows: 4096,
                cols: 16,
            },
            256,
        )
        .unwrap();
        let Block::Channel(b) = t.block(0) else {
            unreachable!()
        };
        assert_eq!((b.rows, b.pitch, t.blocks()), (2048, 16, 2));
    }

    #[test]
    fn indices_beyond_two_to_the_31() {
        let n = (1usize << 33) + 12_345;
        let t = Tiling::new(Geometry::Row { n }, 256).unwrap();
        let last = t.block(t.blocks() - 1);
        assert_eq!(
            last,
            Block::Row(RowBlock {
                start: 1 << 33,
                len: 12_345
            })
        );
        assert_eq!(t.groups(&last), 49);
        assert_eq!(t.group_len(&last, 48), 12_345 - 48 * 256);
        let (rows, cols) = (1usize << 24, 1000usize);
        let t = Tiling::new(Geometry::Channel { rows, cols }, 256).unwrap();
        let Block::Channel(b) = t.block(t.blocks() - 1) else {
            unreachable!()
        };
        assert_eq!((b.row + b.rows, b.col + b.width), (rows, cols));
        assert_eq!(t.segment(t.segments() - 1).end, t.blocks());
        let elements: usize = (0..t.blocks())
            .step_by(8)
            .map(|i| t.elements(&t.block(i)))
            .sum();
        assert_eq!(elements, rows * 128);
        assert!(
            Tiling::new(
                Geometry::Channel {
                    rows: usize::MAX,
                    cols: 2
                },
                256
            )
            .is_err()
        );
        assert!(Tiling::new(Geometry::Row { n: 5 }, 48).is_err());
    }
}
