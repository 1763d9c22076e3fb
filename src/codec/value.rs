//! The value codec's encoder: blocks to bytes. It decides zero planes, group classes and where bytes go; kernels do the arithmetic.

use std::sync::Arc;

use super::block::{BlockSource, Reader};
use super::encoded::{Encoded, Head};
use super::geometry::{Block, Tiling};
use super::scratch::{self, Elements, Scratch};
use super::segment::{BlockHeader, Body, GroupClass, HEADER, set_class};
use super::{Layout, RangeStats, Source, ValueSpec, ZeroPlane, parts};
use crate::dtype::FloatType;
use crate::error::{Error, Result};
use crate::kernels::{self, CodeParams, Element, FpEnv, Key, PLANE_BYTES, PlaneTable, plane_len};
use crate::parallel;
use crate::pool::{Extent, SlabPool};
use crate::with_float;

/// Quantizes a tensor. `threads` 0 means the default; the count never changes a byte.
///
/// ```
/// use daf_rs::codec::*;
/// use daf_rs::{dtype::FloatType, pool::SlabPool};
/// let x: Vec<f32> = (0..100_000).map(|i| (i as f32 * 0.37).sin()).collect();
/// let layout = Layout::contiguous(x.len());
/// let spec = ValueSpec {
///     dtype: FloatType::F32, bits: 4, group_size: 256, rounding: Rounding::Dither,
///     geometry: Geometry::Row { n: x.len() }, key: 7, zero: ZeroPlane::Auto,
/// };
/// let q = encode_value(Source::from_slice(&x), &layout, &spec, SlabPool::global(), 0)?;
/// assert!(q.stored_bytes() * 7 < 4 * x.len());
/// let mut y = vec![0f32; x.len()];
/// q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 0)?;
/// assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 2.0 / 15.0 * 0.55));
/// # Ok::<(), daf_rs::Error>(())
/// ```
///
/// # Errors
/// `InvalidArgument` for a spec outside its limits, a geometry that has not the layout's number of elements, or a source that is
/// too small or unaligned; `OutOfMemory`.
pub fn encode_value(
    src: Source<'_>,
    layout: &Layout,
    spec: &ValueSpec,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Encoded> {
    if !(1..=8).contains(&spec.bits) {
        return Err(Error::InvalidArgument(format!(
            "bits is {}; allowed are 1 to 8, for example 4",
            spec.bits
        )));
    }
    let tiling = Tiling::new(spec.geometry, spec.group_size)?;
    check_geometry(&tiling, layout)?;
    with_float!(spec.dtype, T => encode::<T>(src.elements(layout.span())?, layout, spec, &tiling, pool, threads))
}

fn check_geometry(tiling: &Tiling, layout: &Layout) -> Result<()> {
    if tiling.geometry().len() == layout.len() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "the geometry {:?} has {} elements, but the layout has {}",
        tiling.geometry(),
        tiling.geometry().len(),
        layout.len()
    )))
}

fn encode<T: Element>(
    src: &[T],
    layout: &Layout,
    spec: &ValueSpec,
    tiling: &Tiling,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Encoded> {
    let encoder = Encoder {
        reader: Reader::new(src, layout, tiling)?,
        spec,
        planes: kernels::active_planes()?,
        pool,
    };
    let threads = parallel::threads_for(threads, size_of_val(src));
    let segments = parts::map(tiling.segments(), threads, |s| encoder.segment(s))?;
    let metadata = segments.iter().map(|s| s.metadata).sum();
    let zero_plane = segments.iter().all(|s| s.zero_plane);
    Ok(Encoded {
        head: Head::Value(*spec),
        len: layout.len(),
        parts: segments.into_iter().map(|s| s.extent).collect(),
        metadata,
        zero_plane,
    })
}

struct Segment {
    extent: Extent,
    metadata: usize,
    zero_plane: bool,
}

/// Bytes being written: an extent, and how far it is filled.
struct Output {
    extent: Extent,
    at: usize,
}

impl Output {
    /// Room for `bytes` more.
    fn ensure(&mut self, bytes: usize) -> Result<()> {
        let need = self.at + bytes;
        if need <= self.extent.len() {
            return Ok(());
        }
        let mut larger = self.extent.pool().alloc(need + need / 4)?;
        larger.as_mut_slice()[..self.at].copy_from_slice(&self.extent.as_slice()[..self.at]);
        self.extent = larger;
        Ok(())
    }
}

struct Encoder<'a, T: Element> {
    reader: Reader<'a, T>,
    spec: &'a ValueSpec,
    planes: &'static PlaneTable,
    pool: &'a Arc<SlabPool>,
}

impl<T: Element> Encoder<'_, T> {
    fn bits(&self) -> usize {
        usize::from(self.spec.bits)
    }

    fn segment(&self, s: usize) -> Result<Segment> {
        let _env = FpEnv::enter();
        let tiling = self.reader.tiling;
        let blocks = tiling.segment(s);
        let most: usize = blocks
            .clone()
            .map(|i| tiling.block(i))
            .map(|b| {
                Body::most(tiling.groups(&b), tiling.slots(&b), self.bits())
                    - if self.bits() > 1 {
                        plane_len(tiling.slots(&b))
                    } else {
                        0
                    }
            })
            .sum();
        let at = blocks.len() * HEADER;
        let mut out = Output {
            extent: self.pool.alloc(at + most + PLANE_BYTES)?,
            at,
        };
        let mut segment_metadata = at;
        let mut zero_plane = true;
        let mut m_f32 = false;
        for (i, number) in blocks.enumerate() {
            let block = tiling.block(number);
            let (header, metadata) = scratch::with(|scratch, room| {
                self.block(number, &block, m_f32, scratch, room, &mut out)
            })?;
            header.write(&mut out.extent.as_mut_slice()[i * HEADER..]);
            segment_metadata += metadata;
            zero_plane &= header.zero_plane;
            m_f32 = header.m_f32;
        }
        out.extent.shrink_to(out.at);
        Ok(Segment {
            extent: out.extent,
            metadata: segment_metadata,
            zero_plane,
        })
    }

    /// Writes one block's body; `m_f32` is a guess that saves a restart where it is right.
    fn block(
        &self,
        number: usize,
        block: &Block,
        m_f32: bool,
        scratch: &mut Scratch,
        room: &mut Elements,
        out: &mut Output,
    ) -> Result<(BlockHeader, usize)> {
        let tiling = self.reader.tiling;
        let (groups, slots) = (tiling.groups(block), tiling.slots(block));
        let source = self.reader.block(number, block, room);
        let nonzeros = self.zero_plane(&source, tiling.elements(block), &mut scratch.zero);
        let skip_zeros = nonzeros.is_some();
        let params = CodeParams {
            bits: self.bits(),
            rounding: self.spec.rounding,
            key: Key::for_block(self.spec.key, number as u64),
        };
        let mut m_f32 = m_f32;
        let uncoded = loop {
            match source.quantize(&params, m_f32, skip_zeros, scratch) {
                Some(uncoded) => break uncoded,
                None => m_f32 = !m_f32,
            }
        };
        let mut header = BlockHeader {
            m_f32,
            zero_plane: skip_zeros,
            class_table: uncoded,
            coded_slots: nonzeros.unwrap_or(slots),
            body: out.at,
            raw_groups: 0,
        };
        let at = Body::new(&header, groups, slots, self.bits());
        // A compacted plane is written through a full plane's length.
        out.ensure(at.raw + PLANE_BYTES)?;
        let body = &mut out.extent.as_mut_slice()[out.at..];
        write_metadata(scratch, &mut body[..at.zero], &at, groups, &mut header);
        let len = plane_len(slots);
        if skip_zeros {
            body[at.zero..at.planes].copy_from_slice(&scratch.zero[..len]);
            for k in 0..self.bits() {
                let to = &mut body[at.planes + k * at.plane..][..len];
                self.planes
                    .compact(&scratch.planes.plane(k)[..len], &scratch.zero[..len], to);
            }
        } else {
            self.planes.store_planes(
                &scratch.planes,
                self.bits(),
                len,
                &mut body[at.planes..][..self.bits() * len],
            );
        }
        out.at += at.raw;
        if header.raw_groups > 0 {
            self.raw_groups(block, &source, scratch, groups, out)?;
        }
        Ok((header, at.metadata()))
    }

    /// The number of nonzeros where the block gets a zero plane, which is then in `plane`.
    fn zero_plane(
        &self,
        source: &BlockSource<'_, T>,
        elements: usize,
        plane: &mut [u8],
    ) -> Option<usize> {
        let bits = self.bits();
        match self.spec.zero {
            ZeroPlane::Never => None,
            ZeroPlane::Always => Some(source.nonzeros(plane)),
            ZeroPlane::Auto if bits == 1 || !source.sample_has_zero(elements) => None,
            ZeroPlane::Auto => {
                Some(source.nonzeros(plane)).filter(|n| n * bits < elements * (bits - 1))
            }
        }
    }

    /// Appends the elements of raw groups.
    fn raw_groups(
        &self,
        block: &Block,
        source: &BlockSource<'_, T>,
        scratch: &mut Scratch,
        groups: usize,
        out: &mut Output,
    ) -> Result<()> {
        let tiling = self.reader.tiling;
        for g in 0..groups {
            if scratch.params.class(g) != GroupClass::Raw {
                continue;
            }
            let bytes = tiling.group_len(block, g) * size_of::<T>();
            out.ensure(bytes + 8)?;
            let at = out.at;
            source.copy_group(g, &mut out.extent.as_mut_slice()[at..at + bytes]);
            out.at += bytes;
        }
        let end = out.at.next_multiple_of(8);
        out.ensure(end - out.at)?;
        let at = out.at;
        out.extent.as_mut_slice()[at..end].fill(0);
        out.at = end;
        Ok(())
    }
}

/// Writes the class table (where the header has one) and the groups' m and s; counts the raw groups.
fn write_metadata(
    scratch: &mut Scratch,
    to: &mut [u8],
    at: &Body,
    groups: usize,
    header: &mut BlockHeader,
) {
    let params = &mut scratch.params;
    let (table, rest) = to.split_at_mut(at.m);
    let (m, s) = rest.split_at_mut(at.s - at.m);
    let (s, pad) = s.split_at_mut(2 * groups);
    pad.fill(0);
    if header.m_f32 {
        for (to, m) in m.chunks_exact_mut(4).zip(&params.m[..groups]) {
            to.copy_from_slice(&m.to_bits().to_le_bytes());
        }
    } else {
        for (to, m) in m.chunks_exact_mut(2).zip(&params.m[..groups]) {
            to.copy_from_slice(&((m.to_bits() >> 16) as u16).to_le_bytes());
        }
    }
    for (to, s) in s.chunks_exact_mut(2).zip(&params.s[..groups]) {
        to.copy_from_slice(&((s.to_bits() >> 16) as u16).to_le_bytes());
    }
    if !header.class_table {
        return;
    }
    table.fill(0);
    for g in 0..groups {
        let class = params.class(g);
        set_class(table, g, class);
        let value = match class {
            GroupClass::Coded => continue,
            GroupClass::Constant => params.min[g].to_bits(),
            GroupClass::Raw => {
                header.raw_groups += 1;
                0
            }
        };
        let (low, high) = if header.m_f32 {
            (value, 0)
        } else {
            (value & 0xffff, value >> 16)
        };
        let width = if header.m_f32 { 4 } else { 2 };
        m[g * width..][..width].copy_from_slice(&low.to_le_bytes()[..width]);
        s[g * 2..][..2].copy_from_slice(&high.to_le_bytes()[..2]);
    }
}

/// Ranges without encoding: what the choice of a width needs.
///
/// # Errors
/// As [`encode_value`].
pub fn measure(
    src: Source<'_>,
    layout: &Layout,
    dtype: FloatType,
    geometry: super::Geometry,
    group_size: u16,
    threads: usize,
) -> Result<RangeStats> {
    let tiling = Tiling::new(geometry, group_size)?;
    check_geometry(&tiling, layout)?;
    with_float!(dtype, T => measure_elements::<T>(src.elements(layout.span())?, layout, &tiling, threads))
}

fn measure_elements<T: Element>(
    src: &[T],
    layout: &Layout,
    tiling: &Tiling,
    threads: usize,
) -> Result<RangeStats> {
    let reader = Reader::new(src, layout, tiling)?;
    let threads = parallel::threads_for(threads, size_of_val(src));
    // (sum of R² · elements, elements, largest |x|, all finite)
    let sums = parts::map(tiling.segments(), threads, |s| {
        let _env = FpEnv::enter();
        let mut sum = (0f64, 0usize, 0f32, true);
        for number in tiling.segment(s) {
            let block = tiling.block(number);
            scratch::with(|scratch, room| {
                reader
                    .block(number, &block, room)
                    .ranges(false, &mut scratch.params);
                for g in 0..tiling.groups(&block) {
                    let (lo, hi) = (scratch.params.min[g], scratch.params.max[g]);
                    if lo <= hi {
                        let (n, range) =
                            (tiling.group_len(&block, g), f64::from(hi) - f64::from(lo));
                        sum.0 += range * range * n as f64;
                        sum.1 += n;
                        sum.2 = sum.2.max(lo.abs()).max(hi.abs());
                    } else {
                        sum.3 = false;
                    }
                }
            });
        }
        Ok(sum)
    })?;
    let total = sums.iter().fold((0f64, 0usize, 0f32, true), |a, b| {
        (a.0 + b.0, a.1 + b.1, a.2.max(b.2), a.3 & b.3)
    });
    Ok(RangeStats {
        max_abs: total.2,
        mean_range_sq: total.0 / total.1.max(1) as f64,
        finite: total.3,
    })
}
