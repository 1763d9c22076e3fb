//! One block of a source, whatever its shape and wherever its elements lie: what kernels are called with, in which chunks.

use super::geometry::{Block, ChannelBlock, Geometry, Tiling};
use super::params::{Params, needs_m_f32};
use super::scratch::{self, Elements, Scratch};
use super::{Layout, parts};
use crate::error::Result;
use crate::kernels::{
    self, CodeParams, ColumnShape, Columns, Element, KernelTable, Prefetch, RowsAhead,
};

/// Bytes of source between finding ranges and quantizing: small enough to stay in the L1 cache.
const CHUNK_BYTES: usize = 8192;

/// Reads blocks from a strided view: in place where a kernel can, else gathered.
pub(super) struct Reader<'a, T: Element> {
    src: &'a [T],
    layout: &'a Layout,
    pub(super) tiling: &'a Tiling,
    /// Elements from row to row where blocks are read in place.
    pitch: Option<usize>,
    table: &'static KernelTable<T>,
}

impl<'a, T: Element> Reader<'a, T> {
    pub(super) fn new(src: &'a [T], layout: &'a Layout, tiling: &'a Tiling) -> Result<Self> {
        let pitch = match tiling.geometry() {
            Geometry::Row { n } => layout.is_dense().then_some(n),
            Geometry::Channel { rows, cols } => layout.pitch(rows, cols),
        };
        Ok(Reader {
            src,
            layout,
            tiling,
            pitch,
            table: kernels::active()?,
        })
    }

    /// The elements of a block, gathered into `room` if they cannot be read in place.
    pub(super) fn block<'b>(
        &'b self,
        number: usize,
        block: &Block,
        room: &'b mut Elements,
    ) -> BlockSource<'b, T> {
        let shape = match *block {
            Block::Row(b) => {
                let src = if self.pitch.is_some() {
                    &self.src[b.start..b.start + b.len]
                } else {
                    let room = scratch::room(room, b.len);
                    parts::gather(self.src, self.layout, b.start..b.start + b.len, room);
                    room
                };
                Shape::Rows {
                    src,
                    group: self.tiling.group(),
                    ahead: match self.pitch {
                        Some(_) => RowsAhead::until(self.src),
                        None => RowsAhead::none(),
                    },
                }
            }
            Block::Channel(b) => {
                let (src, pitch) = match self.pitch {
                    Some(pitch) => (&self.src[b.row * pitch + b.col..], pitch),
                    None => {
                        let Geometry::Channel { cols, .. } = self.tiling.geometry() else {
                            unreachable!("a channel block")
                        };
                        let room = scratch::room(room, b.rows * b.width);
                        for (r, to) in room.chunks_exact_mut(b.width).enumerate() {
                            let first = (b.row + r) * cols + b.col;
                            parts::gather(self.src, self.layout, first..first + b.width, to);
                        }
                        (&*room, b.width)
                    }
                };
                Shape::Cols {
                    src,
                    pitch,
                    block: b,
                    tiling: self.tiling,
                    next: self.next_columns(number),
                }
            }
        };
        BlockSource {
            shape,
            table: self.table,
        }
    }
}

impl<T: Element> Reader<'_, T> {
    /// The first row group of the block behind `number`, where it is read in place: what to fetch while `number` is worked on.
    fn next_columns(&self, number: usize) -> Option<Columns<'_, T>> {
        let (pitch, next) = (self.pitch?, number + 1);
        if next >= self.tiling.blocks() {
            return None;
        }
        let Block::Channel(b) = self.tiling.block(next) else {
            return None;
        };
        let (_, rows) = row_groups(self.tiling, &b).next()?;
        Some(columns(
            &self.src[b.row * pitch + b.col..],
            pitch,
            &b,
            0,
            rows,
        ))
    }
}

enum Shape<'a, T> {
    Rows {
        src: &'a [T],
        group: usize,
        ahead: RowsAhead,
    },
    /// `src` starts at the tile's first element.
    Cols {
        src: &'a [T],
        pitch: usize,
        block: ChannelBlock,
        tiling: &'a Tiling,
        next: Option<Columns<'a, T>>,
    },
}

/// The elements of one block.
pub(super) struct BlockSource<'a, T: Element> {
    shape: Shape<'a, T>,
    table: &'static KernelTable<T>,
}

/// The row groups of a tile: (first row in the tile, rows).
pub(super) fn row_groups<'a>(
    tiling: &'a Tiling,
    block: &'a ChannelBlock,
) -> impl Iterator<Item = (usize, usize)> + 'a {
    (block.first_group..block.first_group + block.groups).map(|g| {
        let first = tiling.group_start(g);
        (first - block.row, tiling.group_start(g + 1) - first)
    })
}

impl<T: Element> BlockSource<'_, T> {
    /// The ranges of all groups.
    pub(super) fn ranges(&self, skip_zeros: bool, params: &mut Params) {
        match self.shape {
            Shape::Rows { src, group, ahead } => self.table.range_rows(
                src,
                group,
                skip_zeros,
                ahead,
                &mut params.min,
                &mut params.max,
            ),
            Shape::Cols {
                src,
                pitch,
                block,
                tiling,
                next,
            } => {
                for (i, (columns, mut ahead)) in pairs(src, pitch, &block, tiling, next).enumerate()
                {
                    let at = i * block.width;
                    self.table.range_cols(
                        &columns,
                        skip_zeros,
                        &mut ahead,
                        &mut params.min[at..],
                        &mut params.max[at..],
                    );
                }
            }
        }
    }

    /// Parameters and planes of all groups, into the scratch. Says whether some group is not coded; `None` when `m_f32` is not what
    /// the block needs.
    pub(super) fn quantize(
        &self,
        code: &CodeParams,
        m_f32: bool,
        skip_zeros: bool,
        scratch: &mut Scratch,
    ) -> Option<bool> {
        let (params, planes) = (&mut scratch.params, &mut scratch.planes);
        let mut uncoded = false;
        let mut wide = false;
        match self.shape {
            Shape::Rows { src, group, ahead } => {
                let chunk = (CHUNK_BYTES / (group * size_of::<T>())).max(1) * group;
                for (i, part) in src.chunks(chunk).enumerate() {
                    let first = i * (chunk / group);
                    let groups = first..first + part.len().div_ceil(group);
                    self.table.range_rows(
                        part,
                        group,
                        skip_zeros,
                        ahead,
                        &mut params.min[groups.clone()],
                        &mut params.max[groups.clone()],
                    );
                    wide |= needs_m_f32(&params.min[groups.clone()], &params.max[groups.clone()]);
                    if wide && !m_f32 {
                        return None;
                    }
                    uncoded |= params.derive(groups.clone(), code.bits, m_f32);
                    let (m, inv) = (&params.m[groups.clone()], &params.inv[groups]);
                    let slot = i * chunk;
                    self.table.quantize_rows(
                        part,
                        group,
                        m,
                        inv,
                        code,
                        (slot / 32) as u32,
                        ahead,
                        planes,
                        slot,
                    );
                }
            }
            Shape::Cols {
                src,
                pitch,
                block,
                tiling,
                next,
            } => {
                for (i, (columns, mut ahead)) in pairs(src, pitch, &block, tiling, next).enumerate()
                {
                    let groups = i * block.width..(i + 1) * block.width;
                    self.table.range_cols(
                        &columns,
                        skip_zeros,
                        &mut ahead,
                        &mut params.min[groups.clone()],
                        &mut params.max[groups.clone()],
                    );
                    wide |= needs_m_f32(&params.min[groups.clone()], &params.max[groups.clone()]);
                    if wide && !m_f32 {
                        return None;
                    }
                    uncoded |= params.derive(groups.clone(), code.bits, m_f32);
                    self.table.quantize_cols(
                        &columns,
                        &params.m[groups.clone()],
                        &params.inv[groups],
                        code,
                        &mut ahead,
                        planes,
                    );
                }
            }
        }
        (wide == m_f32).then_some(uncoded)
    }

    /// Writes the plane of the elements that are not zero, and counts them.
    pub(super) fn nonzeros(&self, plane: &mut [u8]) -> usize {
        match self.shape {
            Shape::Rows { src, .. } => self.table.nonzero_plane_rows(src, plane),
            Shape::Cols {
                src,
                pitch,
                block,
                tiling,
                ..
            } => row_groups(tiling, &block)
                .map(|(first_row, rows)| {
                    self.table
                        .nonzero_plane_cols(&columns(src, pitch, &block, first_row, rows), plane)
                })
                .sum(),
        }
    }

    /// Whether one of 128 elements, 8 neighbours at each of 16 places, is zero.
    pub(super) fn sample_has_zero(&self, elements: usize) -> bool {
        let zero = |e: usize| match self.shape {
            Shape::Rows { src, .. } => src[e].to_f32() == 0.0,
            Shape::Cols {
                src, pitch, block, ..
            } => src[e / block.width * pitch + e % block.width].to_f32() == 0.0,
        };
        if elements <= 128 {
            return (0..elements).any(zero);
        }
        (0..16).any(|i| {
            let first = i * elements / 16;
            (first..first + 8).any(zero)
        })
    }

    /// Copies the elements of group `g`, in element order.
    pub(super) fn copy_group(&self, g: usize, to: &mut [u8]) {
        match self.shape {
            Shape::Rows { src, group, .. } => {
                let end = src.len().min((g + 1) * group);
                to.copy_from_slice(bytemuck::cast_slice(&src[g * group..end]));
            }
            Shape::Cols {
                src,
                pitch,
                block,
                tiling,
                ..
            } => {
                let column = g % block.width;
                let first = tiling.group_start(block.first_group + g / block.width) - block.row;
                for (r, to) in to.chunks_exact_mut(size_of::<T>()).enumerate() {
                    to.copy_from_slice(bytemuck::bytes_of(&src[(first + r) * pitch + column]));
                }
            }
        }
    }
}

/// The row groups of a tile, each with what to fetch during it: the next one, at last the next block's first.
fn pairs<'a, T>(
    src: &'a [T],
    pitch: usize,
    block: &'a ChannelBlock,
    tiling: &'a Tiling,
    next: Option<Columns<'a, T>>,
) -> impl Iterator<Item = (Columns<'a, T>, Prefetch)> {
    let groups = move || {
        row_groups(tiling, block)
            .map(move |(first_row, rows)| columns(src, pitch, block, first_row, rows))
    };
    let ahead = groups().skip(1).map(|c| Prefetch::columns(&c));
    groups().zip(ahead.chain(std::iter::once(
        next.as_ref().map_or(Prefetch::none(), Prefetch::columns),
    )))
}

fn columns<'a, T>(
    src: &'a [T],
    pitch: usize,
    block: &ChannelBlock,
    first_row: usize,
    rows: usize,
) -> Columns<'a, T> {
    Columns {
        src: &src[first_row * pitch..],
        shape: ColumnShape {
            pitch,
            rows,
            width: block.width,
            first_row,
        },
    }
}
