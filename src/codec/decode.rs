//! The value codec's decoder: bytes to elements, every offset checked first.

use super::block::row_groups;
use super::encoded::Encoded;
use super::geometry::{Block, ChannelBlock, Geometry, SEGMENT_BLOCKS, Tiling};
use super::params::Params;
use super::parts::{self, Part};
use super::scratch::{self, Elements, Scratch};
use super::segment::{BlockHeader, BlockView, GroupClass, HEADER, class_of, corrupt};
use super::{Layout, ReadMode, Rounding, Target, ValueSpec};
use crate::error::Result;
use crate::kernels::{
    self, CodeParams, ColumnShape, Element, FpEnv, KernelTable, Key, PlaneSrc, PlaneTable,
    plane_len,
};
use crate::parallel;
use crate::with_float;

/// Elements of a row block that go through one call, a multiple of every group size: small enough to stay in the L1 cache.
const CHUNK: usize = 2048;

pub(super) fn decode_value(
    stored: &Encoded,
    spec: &ValueSpec,
    dst: Target<'_>,
    layout: &Layout,
    mode: ReadMode,
    threads: usize,
) -> Result<()> {
    let tiling = Tiling::new(spec.geometry, spec.group_size)?;
    if tiling.segments() != stored.parts.len() {
        return Err(corrupt(
            "a tensor has another number of segments than its shape needs",
        ));
    }
    with_float!(spec.dtype, T => {
        let dst: &mut [T] = dst.elements(layout.span())?;
        let decoder = Decoder { stored, spec, tiling: &tiling, mode, table: kernels::active()?, planes: kernels::active_planes()?, stream: size_of_val(&*dst) >= kernels::STREAM_BYTES };
        decoder.run(dst, layout, parallel::threads_for(threads, size_of_val(&*dst)))
    })
}

struct Decoder<'a, T: Element> {
    stored: &'a Encoded,
    spec: &'a ValueSpec,
    tiling: &'a Tiling,
    mode: ReadMode,
    table: &'static KernelTable<T>,
    planes: &'static PlaneTable,
    /// Whether values go past the caches.
    stream: bool,
}

impl<T: Element> Decoder<'_, T> {
    fn run(&self, dst: &mut [T], layout: &Layout, threads: usize) -> Result<()> {
        match self.tiling.geometry() {
            Geometry::Row { n } => {
                let step = SEGMENT_BLOCKS * super::geometry::BLOCK;
                let ends: Vec<usize> = (0..self.tiling.segments())
                    .map(|s| ((s + 1) * step).min(n))
                    .collect();
                parts::for_each_part(dst, layout, &ends, threads, |s, part| {
                    self.row_segment(s, part, layout)
                })
            }
            Geometry::Channel { rows, cols } => {
                // A piece is a row of tiles: consecutive rows of the matrix, so pieces never share memory.
                let ends: Vec<usize> = (0..self.tiling.tile_rows())
                    .map(|t| self.tiling.tile_row_end(t) * cols)
                    .collect();
                let pitch = layout.pitch(rows, cols);
                parts::for_each_part(dst, layout, &ends, threads, |t, part| {
                    self.tile_row(t, part, layout, cols, pitch)
                })
            }
        }
    }

    fn row_segment(&self, s: usize, mut part: Part<'_, T>, layout: &Layout) -> Result<()> {
        let _env = FpEnv::enter();
        let first = part.elements.start;
        for number in self.tiling.segment(s) {
            let block = self.tiling.block(number);
            let Block::Row(b) = block else { continue };
            let at = b.start - first;
            scratch::with(|scratch, room| {
                if !layout.is_dense() {
                    let room = scratch::room(room, b.len);
                    self.rows(number, &block, room, scratch)?;
                    part.write(layout, b.start, room);
                    return Ok(());
                }
                let dst = &mut part.memory[at..at + b.len];
                if !self.stream || !self.has_zero_plane(number) {
                    return self.rows(number, &block, dst, scratch);
                }
                // Zeros are put into values that are still in the cache, then the block goes past it as a whole.
                let room = scratch::room(room, b.len);
                self.rows(number, &block, room, scratch)?;
                self.planes
                    .store(bytemuck::cast_slice(room), bytemuck::cast_slice_mut(dst));
                Ok(())
            })?;
        }
        Ok(())
    }

    fn tile_row(
        &self,
        t: usize,
        mut part: Part<'_, T>,
        layout: &Layout,
        cols: usize,
        pitch: Option<usize>,
    ) -> Result<()> {
        let _env = FpEnv::enter();
        let first_row = part.elements.start / cols;
        for number in self.tiling.tile_row(t) {
            let block = self.tiling.block(number);
            let Block::Channel(b) = block else { continue };
            scratch::with(|scratch, room| match pitch {
                Some(pitch) => {
                    let dst = &mut part.memory[(b.row - first_row) * pitch + b.col..];
                    self.cols(number, &block, &b, dst, pitch, scratch)
                }
                None => {
                    self.gapped_tile(number, &block, &b, &mut part, layout, cols, scratch, room)
                }
            })?;
        }
        Ok(())
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the place of one tile, spelled out"
    )]
    fn gapped_tile(
        &self,
        number: usize,
        block: &Block,
        b: &ChannelBlock,
        part: &mut Part<'_, T>,
        layout: &Layout,
        cols: usize,
        scratch: &mut Scratch,
        room: &mut Elements,
    ) -> Result<()> {
        let room = scratch::room(room, b.rows * b.width);
        self.cols(number, block, b, room, b.width, scratch)?;
        for (r, row) in room.chunks_exact(b.width).enumerate() {
            part.write(layout, (b.row + r) * cols + b.col, row);
        }
        Ok(())
    }

    /// Whether the block's header says so; what else it says is checked later.
    fn has_zero_plane(&self, number: usize) -> bool {
        let segment = self.stored.parts[number / SEGMENT_BLOCKS].as_slice();
        let header = segment
            .get(number % SEGMENT_BLOCKS * HEADER..)
            .unwrap_or(&[]);
        BlockHeader::read(header).is_ok_and(|h| h.zero_plane)
    }

    /// The bytes of a block, and what its code planes mean.
    fn view(&self, number: usize, block: &Block) -> Result<(BlockView<'_>, CodeParams)> {
        let segment = self.stored.parts[number / SEGMENT_BLOCKS].as_slice();
        let bits = usize::from(self.spec.bits);
        let view = BlockView::new(
            segment,
            number % SEGMENT_BLOCKS,
            self.tiling,
            block,
            bits,
            size_of::<T>(),
        )?;
        let key = Key::for_block(self.spec.key, number as u64);
        Ok((
            view,
            CodeParams {
                bits,
                rounding: self.spec.rounding,
                key,
            },
        ))
    }

    fn rows(
        &self,
        number: usize,
        block: &Block,
        dst: &mut [T],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (view, code) = self.view(number, block)?;
        let zero = view
            .header
            .zero_plane
            .then(|| &view.body[view.offsets.zero..view.offsets.planes]);
        if self.mode == ReadMode::Mask {
            let Some(zero) = zero else {
                return Err(corrupt("a block has no zero plane"));
            };
            let one = &T::from_f32_finite(1.0);
            let one = bytemuck::bytes_of(one)
                .iter()
                .rev()
                .fold(0u64, |w, b| w << 8 | u64::from(*b));
            self.planes
                .select(zero, size_of::<T>(), 0, one, bytemuck::cast_slice_mut(dst));
            return Ok(());
        }
        let group = self.tiling.group();
        self.group_values(&view, block, &mut scratch.params)?;
        let Scratch {
            planes: staging,
            params,
            ..
        } = scratch;
        let planes = self.code_planes(&view, block, staging)?;
        // What a zero plane still changes stays in the cache; else a block is one call, as streamed stores are waited for at its end.
        let (stream, chunk) = match zero {
            Some(_) => (false, CHUNK),
            None => (self.stream, super::geometry::BLOCK),
        };
        for (i, part) in dst.chunks_mut(chunk).enumerate() {
            let (slot, first) = (i * chunk, i * chunk / group);
            let (c0, step) = (&params.m[first..], &params.s[first..]);
            self.table.dequantize_rows(
                &planes,
                slot,
                group,
                c0,
                step,
                &code,
                (slot / 32) as u32,
                stream,
                part,
            );
            if let Some(zero) = zero {
                self.table
                    .apply_nonzero_rows(zero, slot, group, &params.min[first..], part);
            }
        }
        self.raw_groups(&view, block, |g, bytes| {
            let group = &mut dst[g * group..];
            bytemuck::cast_slice_mut(group)[..bytes.len()].copy_from_slice(bytes);
        })
    }

    fn cols(
        &self,
        number: usize,
        block: &Block,
        b: &ChannelBlock,
        dst: &mut [T],
        pitch: usize,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (view, code) = self.view(number, block)?;
        let zero = view
            .header
            .zero_plane
            .then(|| &view.body[view.offsets.zero..view.offsets.planes]);
        let shapes = row_groups(self.tiling, b).map(|(first_row, rows)| ColumnShape {
            pitch,
            rows,
            width: b.width,
            first_row,
        });
        if self.mode == ReadMode::Mask {
            let Some(zero) = zero else {
                return Err(corrupt("a block has no zero plane"));
            };
            scratch.params.min[..b.width].fill(f32::NEG_INFINITY);
            for shape in shapes {
                let dst = &mut dst[shape.first_row * pitch..];
                for row in dst.chunks_mut(pitch).take(shape.rows) {
                    row[..b.width].fill(T::from_f32_finite(1.0));
                }
                self.table
                    .apply_nonzero_cols(zero, &shape, &scratch.params.min, dst);
            }
            return Ok(());
        }
        self.group_values(&view, block, &mut scratch.params)?;
        let Scratch {
            planes: staging,
            params,
            ..
        } = scratch;
        let planes = self.code_planes(&view, block, staging)?;
        for (i, shape) in shapes.enumerate() {
            let first = i * b.width;
            let dst = &mut dst[shape.first_row * pitch..];
            self.table.dequantize_cols(
                &planes,
                &shape,
                &params.m[first..],
                &params.s[first..],
                &code,
                self.stream && zero.is_none(),
                dst,
            );
            if let Some(zero) = zero {
                self.table
                    .apply_nonzero_cols(zero, &shape, &params.min[first..], dst);
            }
        }
        self.raw_groups(&view, block, |g, bytes| {
            let first = self.tiling.group_start(b.first_group + g / b.width) - b.row;
            for (r, bytes) in bytes.chunks_exact(size_of::<T>()).enumerate() {
                let element = &mut dst[(first + r) * pitch + g % b.width];
                bytemuck::bytes_of_mut(element).copy_from_slice(bytes);
            }
        })
    }

    /// The planes of codes, one bit a slot: in place, or expanded into `staging` where only nonzeros are stored.
    fn code_planes<'b>(
        &self,
        view: &BlockView<'b>,
        block: &Block,
        staging: &'b mut kernels::PlaneBuf,
    ) -> Result<PlaneSrc<'b>> {
        let (at, bits) = (view.offsets, usize::from(self.spec.bits));
        let stored = &view.body[at.planes..at.raw];
        if !view.header.zero_plane {
            // Without raw groups, the next block's planes lie a body away.
            return PlaneSrc::new(stored, bits, at.plane)
                .map(|planes| planes.followed_by(at.raw))
                .ok_or_else(|| corrupt("a block's planes are cut off"));
        }
        let (mask, len) = (
            &view.body[at.zero..at.planes],
            plane_len(self.tiling.slots(block)),
        );
        for k in 0..bits {
            self.planes.expand(
                &stored[k * at.plane..(k + 1) * at.plane],
                mask,
                &mut staging.plane_mut(k)[..len],
            );
        }
        Ok(staging.as_src())
    }

    /// Per group: c0 into `m`, the step into `s`, and the least value of a nonzero into `min`.
    fn group_values(&self, view: &BlockView<'_>, block: &Block, params: &mut Params) -> Result<()> {
        let groups = self.tiling.groups(block);
        let at = view.offsets;
        let (m, s) = (&view.body[at.m..at.s], &view.body[at.s..at.s + 2 * groups]);
        if view.header.m_f32 {
            for (to, b) in params.m.iter_mut().zip(m.chunks_exact(4)) {
                *to = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        } else {
            for (to, b) in params.m.iter_mut().zip(m.chunks_exact(2)) {
                *to = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        let centre = if self.spec.rounding == Rounding::Dither {
            127.5 / 256.0
        } else {
            0.0
        };
        let floor = if self.mode == ReadMode::ValuesPositive {
            T::smallest_positive().to_f32()
        } else {
            f32::NEG_INFINITY
        };
        let each = params.m[..groups]
            .iter_mut()
            .zip(&mut params.s)
            .zip(&mut params.min);
        for (((m, step), least), b) in each.zip(s.chunks_exact(2)) {
            let s = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            *least = if *m >= 0.0 { floor } else { f32::NEG_INFINITY };
            *m += s * centre;
            *step = s * (1.0 / 256.0);
        }
        if !view.header.class_table {
            return Ok(());
        }
        for g in 0..groups {
            let value = match class_of(view.body, g)? {
                GroupClass::Coded => continue,
                GroupClass::Raw => 0.0,
                GroupClass::Constant if view.header.m_f32 => {
                    f32::from_le_bytes([m[4 * g], m[4 * g + 1], m[4 * g + 2], m[4 * g + 3]])
                }
                GroupClass::Constant => {
                    f32::from_le_bytes([m[2 * g], m[2 * g + 1], s[2 * g], s[2 * g + 1]])
                }
            };
            (params.m[g], params.s[g], params.min[g]) = (value, 0.0, f32::NEG_INFINITY);
        }
        Ok(())
    }

    /// Calls `put` with the number and the bytes of every raw group.
    fn raw_groups(
        &self,
        view: &BlockView<'_>,
        block: &Block,
        mut put: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if view.header.raw_groups == 0 {
            return Ok(());
        }
        let mut rest = &view.body[view.offsets.raw..];
        for g in 0..self.tiling.groups(block) {
            if class_of(view.body, g)? == GroupClass::Raw {
                let (bytes, tail) = rest.split_at(self.tiling.group_len(block, g) * size_of::<T>());
                put(g, bytes);
                rest = tail;
            }
        }
        Ok(())
    }
}
