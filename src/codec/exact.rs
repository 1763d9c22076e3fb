//! The classes that need no quantization: constant, two-valued, bool, mask, sign, raw; and which of them a tensor gets.
//! A part is [`PART`] elements, one extent.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::Pod;

use super::encoded::{Encoded, Head};
use super::parts::{self, Part};
use super::segment::corrupt;
use super::{ElementKind, Layout, Predicate, Source, Target, integer};
use crate::dtype::{Float, FloatType};
use crate::error::{Error, Result};
use crate::kernels::{self, Element, FpEnv, plane_len};
use crate::parallel;
use crate::pool::{Extent, SlabPool};
use crate::with_float;

/// Elements of a part.
pub(super) const PART: usize = 1 << 19;
/// Elements that are gathered at a time from a view with gaps, and compared at a time before the next is looked at.
pub(super) const STRIP: usize = 1 << 13;

/// An element as a bit pattern.
pub(super) trait Word: Pod + Send + Sync + Eq {
    fn bits(self) -> [u64; 2];
    fn from_bits(bits: [u64; 2]) -> Self;
}

macro_rules! word {
    ($($T:ty),*) => {$(
        impl Word for $T {
            fn bits(self) -> [u64; 2] {
                [u64::from(self), 0]
            }
            #[allow(clippy::unnecessary_cast, reason = "u64 is one of the types")]
            fn from_bits(bits: [u64; 2]) -> Self {
                bits[0] as $T
            }
        }
    )*};
}
word!(u8, u16, u32, u64);

impl Word for [u64; 2] {
    fn bits(self) -> [u64; 2] {
        self
    }
    fn from_bits(bits: [u64; 2]) -> Self {
        bits
    }
}

/// Calls `$body` with `$W` bound to the word type of `$bytes` bytes.
macro_rules! with_word {
    ($bytes:expr, $W:ident => $body:expr) => {
        match $bytes {
            1 => {
                type $W = u8;
                $body
            }
            2 => {
                type $W = u16;
                $body
            }
            4 => {
                type $W = u32;
                $body
            }
            8 => {
                type $W = u64;
                $body
            }
            16 => {
                type $W = [u64; 2];
                $body
            }
            n => Err(Error::InvalidArgument(format!(
                "elements of {n} bytes; allowed are 1, 2, 4, 8 and 16"
            ))),
        }
    };
}

pub(super) fn part(i: usize, len: usize) -> Range<usize> {
    i * PART..((i + 1) * PART).min(len)
}

/// Part ends for [`parts::for_each_part`].
fn ends(len: usize) -> Vec<usize> {
    (0..len.div_ceil(PART)).map(|i| part(i, len).end).collect()
}

/// Calls `work(first, elements)` for strips of `range`, in order, until it says false; says whether it never did.
pub(super) fn strips<T: Pod>(
    src: &[T],
    layout: &Layout,
    range: Range<usize>,
    mut work: impl FnMut(usize, &[T]) -> bool,
) -> bool {
    if layout.is_dense() {
        return src[range.clone()]
            .chunks(STRIP)
            .zip(range.step_by(STRIP))
            .all(|(s, first)| work(first, s));
    }
    let mut room = vec![T::zeroed(); STRIP.min(range.len())];
    let end = range.end;
    range.step_by(STRIP).all(|first| {
        let room = &mut room[..STRIP.min(end - first)];
        parts::gather(src, layout, first..first + room.len(), room);
        work(first, room)
    })
}

fn finish(head: Head, len: usize, parts: Vec<Extent>, metadata: usize) -> Encoded {
    Encoded {
        head,
        len,
        parts,
        metadata,
        zero_plane: false,
    }
}

/// Elements that are looked at for a third value before the whole tensor is.
const GLANCE: usize = 1024;

/// Stores a tensor exactly in a class smaller than its elements: constant, two values, booleans or narrow integers. `None` when it
/// fits none of them. `threads` 0 means the default.
///
/// ```
/// use daf_rs::codec::*;
/// use daf_rs::{dtype::FloatType, pool::SlabPool};
/// // A dropout mask: 0 or 1/(1-p).
/// let mask: Vec<f32> = (0..100_000).map(|i| if i % 10 == 3 { 0.0 } else { 1.0 / 0.9 }).collect();
/// let layout = Layout::contiguous(mask.len());
/// let kind = ElementKind::Float(FloatType::F32);
/// let q = encode_lossless(Source::from_slice(&mask), &layout, kind, SlabPool::global(), 0)?;
/// let q = q.ok_or(daf_rs::Error::InvalidArgument("two values".into()))?;
/// assert_eq!((q.class(), q.bits()), (Class::TwoValued, 1));
/// let mut back = vec![0f32; mask.len()];
/// q.decode_into(Target::from_slice(&mut back), &layout, ReadMode::Values, 0)?;
/// assert_eq!(back, mask);
/// # Ok::<(), daf_rs::Error>(())
/// ```
///
/// # Errors
/// `InvalidArgument` for an element size other than 1, 2, 4, 8, 16 or a source that is too small or unaligned; `OutOfMemory`.
pub fn encode_lossless(
    src: Source<'_>,
    layout: &Layout,
    kind: ElementKind,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Option<Encoded>> {
    with_word!(kind.size(), W => lossless::<W>(src.elements(layout.span())?, layout, kind, pool, threads))
}

fn lossless<W: Word>(
    src: &[W],
    layout: &Layout,
    kind: ElementKind,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Option<Encoded>> {
    let len = layout.len();
    let Some(first) = src.first().copied() else {
        return Ok(Some(finish(
            Head::Constant {
                kind,
                value: [0; 2],
            },
            0,
            Vec::new(),
            0,
        )));
    };
    let mut second = None;
    strips(src, layout, 0..len, |_, s| {
        // A whole strip is compared without a branch per element.
        if s.iter().fold(true, |same, w| same & (*w == first)) {
            return true;
        }
        second = s.iter().find(|w| **w != first).copied();
        false
    });
    let Some(second) = second else {
        return Ok(Some(finish(
            Head::Constant {
                kind,
                value: first.bits(),
            },
            len,
            Vec::new(),
            0,
        )));
    };
    let (a, b) = (first.bits(), second.bits());
    let threads = parallel::threads_for(threads, size_of_val(src));
    // Most tensors show a third value at once, before anything is set up for two.
    let mut third = false;
    strips(src, layout, 0..len.min(GLANCE), |_, s| {
        third |= s.iter().any(|w| *w != first && *w != second);
        !third
    });
    if size_of::<W>() <= 8 && !third {
        let is_bool = kind == ElementKind::Bool && a[0] <= 1 && b[0] <= 1;
        let values = if is_bool { [0, 1] } else { [a[0], b[0]] };
        if let Some(extents) = two_valued(src, layout, values, pool, threads)? {
            let head = if is_bool {
                Head::Bool
            } else {
                Head::TwoValued { kind, values }
            };
            return Ok(Some(finish(head, len, extents, 0)));
        }
    }
    match kind {
        ElementKind::Int { bytes, signed } => {
            let Some((extents, metadata)) = integer::encode(src, layout, signed, pool, threads)?
            else {
                return Ok(None);
            };
            Ok(Some(finish(
                Head::Integer { bytes, signed },
                len,
                extents,
                metadata,
            )))
        }
        _ => Ok(None),
    }
}

/// One bit an element, or `None` when some element is neither of the values.
fn two_valued<W: Word>(
    src: &[W],
    layout: &Layout,
    values: [u64; 2],
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Option<Vec<Extent>>> {
    let planes = kernels::active_planes()?;
    let matches = |s: &[W], out: &mut [u8]| {
        planes.match_plane(
            bytemuck::cast_slice(s),
            size_of::<W>(),
            values[0],
            values[1],
            out,
        )
    };
    // Most tensors of other classes end here.
    if !strips(src, layout, 0..layout.len().min(STRIP), |_, s| {
        matches(s, &mut [0; STRIP / 8])
    }) {
        return Ok(None);
    }
    let broken = AtomicBool::new(false);
    let extents = parts::map(layout.len().div_ceil(PART), threads, |i| {
        let range = part(i, layout.len());
        let mut extent = pool.alloc(plane_len(range.len()))?;
        let (start, out) = (range.start, extent.as_mut_slice());
        let fits = strips(src, layout, range, |first, s| {
            !broken.load(Ordering::Relaxed) && matches(s, &mut out[(first - start) / 8..])
        });
        if !fits {
            broken.store(true, Ordering::Relaxed);
        }
        Ok(extent)
    })?;
    Ok((!broken.into_inner()).then_some(extents))
}

/// Keeps the elements as they are, in memory order and without gaps.
///
/// # Errors
/// As [`encode_lossless`].
pub fn encode_raw(
    src: Source<'_>,
    layout: &Layout,
    kind: ElementKind,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Encoded> {
    with_word!(kind.size(), W => {
        let src: &[W] = src.elements(layout.span())?;
        let threads = parallel::threads_for(threads, size_of_val(src));
        let extents = parts::map(layout.len().div_ceil(PART), threads, |i| {
            let range = part(i, layout.len());
            let mut extent = pool.alloc(range.len() * size_of::<W>())?;
            let (start, out) = (range.start, extent.as_mut_slice());
            strips(src, layout, range, |first, s| {
                let bytes: &[u8] = bytemuck::cast_slice(s);
                out[(first - start) * size_of::<W>()..][..bytes.len()].copy_from_slice(bytes);
                true
            });
            Ok(extent)
        })?;
        Ok(finish(Head::Raw { kind }, layout.len(), extents, 0))
    })
}

/// Keeps the answer to a comparison, one bit an element; decodes to `set` and `unset` as elements of `dtype`.
///
/// # Errors
/// `InvalidArgument` when the source is too small or unaligned; `OutOfMemory`.
#[expect(
    clippy::too_many_arguments,
    reason = "three describe the source, three the code, two the machine"
)]
pub fn encode_mask(
    src: Source<'_>,
    layout: &Layout,
    dtype: FloatType,
    predicate: Predicate,
    set: f32,
    unset: f32,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Encoded> {
    let extents = with_float!(dtype, T => {
        let src: &[T] = src.elements(layout.span())?;
        let table = kernels::active::<T>()?;
        planes_of(src, layout, 1, pool, threads, |s, at, out| {
            table.predicate_plane(s, predicate, &mut out[at..]);
            true
        })?
    });
    let extents = extents.unwrap_or_default();
    Ok(finish(
        Head::Mask { dtype, set, unset },
        layout.len(),
        extents,
        0,
    ))
}

/// Keeps the signs: decodes to 1, -1 and 0. `None` when there is a NaN, which has no sign.
///
/// # Errors
/// As [`encode_mask`].
pub fn encode_sign(
    src: Source<'_>,
    layout: &Layout,
    dtype: FloatType,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> Result<Option<Encoded>> {
    let extents = with_float!(dtype, T => {
        let src: &[T] = src.elements(layout.span())?;
        let table = kernels::active::<T>()?;
        planes_of(src, layout, 2, pool, threads, |s, at, out| {
            let (positive, negative) = out.split_at_mut(out.len() / 2);
            table.sign_planes(s, &mut positive[at..], &mut negative[at..])
        })?
    });
    Ok(extents.map(|e| finish(Head::Sign { dtype }, layout.len(), e, 0)))
}

/// Parts of `planes` planes each; `write(elements, byte, part)` fills a strip and says whether it can be stored.
fn planes_of<T: Element>(
    src: &[T],
    layout: &Layout,
    planes: usize,
    pool: &Arc<SlabPool>,
    threads: usize,
    write: impl Fn(&[T], usize, &mut [u8]) -> bool + Sync,
) -> Result<Option<Vec<Extent>>> {
    let threads = parallel::threads_for(threads, size_of_val(src));
    let broken = AtomicBool::new(false);
    let extents = parts::map(layout.len().div_ceil(PART), threads, |i| {
        let _env = FpEnv::enter();
        let range = part(i, layout.len());
        let mut extent = pool.alloc(planes * plane_len(range.len()))?;
        let (start, out) = (range.start, extent.as_mut_slice());
        if !strips(src, layout, range, |first, s| {
            !broken.load(Ordering::Relaxed) && write(s, (first - start) / 8, out)
        }) {
            broken.store(true, Ordering::Relaxed);
        }
        Ok(extent)
    })?;
    Ok((!broken.into_inner()).then_some(extents))
}

/// Decodes every class but the value class.
pub(super) fn decode(
    stored: &Encoded,
    dst: Target<'_>,
    layout: &Layout,
    threads: usize,
) -> Result<()> {
    let kind = stored.kind();
    match stored.head {
        Head::Sign { dtype } => with_float!(dtype, T => {
            let table = kernels::active::<T>()?;
            fill::<T>(stored, dst, layout, threads, |bytes, at, out, part| {
                let len = plane_len(part);
                let Some((positive, negative)) = bytes.get(..2 * len).map(|b| b.split_at(len)) else {
                    return Err(corrupt("the sign planes are cut off"));
                };
                table.sign_values(&positive[at / 8..], &negative[at / 8..], out);
                Ok(())
            })
        }),
        Head::Mask { dtype, set, unset } => with_float!(dtype, T => {
            let word = |x: f32| {
                let x = <T as Float>::from_f32(x);
                bytemuck::bytes_of(&x).iter().rev().fold(0u64, |w, b| w << 8 | u64::from(*b))
            };
            select::<T>(stored, dst, layout, threads, [word(unset), word(set)])
        }),
        Head::Bool => select::<u8>(stored, dst, layout, threads, [0, 1]),
        Head::TwoValued { values, .. } => {
            with_word!(kind.size(), W => select::<W>(stored, dst, layout, threads, values))
        }
        Head::Constant { value, .. } => with_word!(kind.size(), W => {
            let dst: &mut [W] = dst.elements(layout.span())?;
            let threads = parallel::threads_for(threads, size_of_val(&*dst));
            parts::for_each_part(dst, layout, &ends(layout.len()), threads, |_, mut part| {
                let value = W::from_bits(value);
                if layout.is_dense() {
                    part.memory.fill(value);
                    return Ok(());
                }
                let strip = [value; 256];
                for first in part.elements.clone().step_by(strip.len()) {
                    part.write(layout, first, &strip[..strip.len().min(part.elements.end - first)]);
                }
                Ok(())
            })
        }),
        Head::Integer { .. } => {
            with_word!(kind.size(), W => integer::decode::<W>(stored, dst, layout, threads))
        }
        Head::Raw { .. } => {
            with_word!(kind.size(), W => fill::<W>(stored, dst, layout, threads, |bytes, at, out, _| {
                let size = size_of::<W>();
                let Some(bytes) = bytes.get(at * size..(at + out.len()) * size) else {
                    return Err(corrupt("the elements are cut off"));
                };
                bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
                Ok(())
            }))
        }
        Head::Value(_) => Err(corrupt("a value-coded tensor came to the exact decoder")),
    }
}

fn select<W: Pod + Send>(
    stored: &Encoded,
    dst: Target<'_>,
    layout: &Layout,
    threads: usize,
    values: [u64; 2],
) -> Result<()> {
    let planes = kernels::active_planes()?;
    fill::<W>(stored, dst, layout, threads, |bytes, at, out, _| {
        let Some(plane) = bytes
            .get(at / 8..)
            .filter(|p| p.len() >= plane_len(out.len()))
        else {
            return Err(corrupt("a plane is cut off"));
        };
        planes.select(
            plane,
            size_of::<W>(),
            values[0],
            values[1],
            bytemuck::cast_slice_mut(out),
        );
        Ok(())
    })
}

/// Decodes part by part, strip by strip: `read(bytes of the part, first element in the part, elements, elements of the part)`.
fn fill<W: Pod + Send>(
    stored: &Encoded,
    dst: Target<'_>,
    layout: &Layout,
    threads: usize,
    read: impl Fn(&[u8], usize, &mut [W], usize) -> Result<()> + Sync,
) -> Result<()> {
    let dst: &mut [W] = dst.elements(layout.span())?;
    let ends = ends(layout.len());
    if ends.len() != stored.parts.len() {
        return Err(corrupt(
            "a tensor has another number of parts than its elements need",
        ));
    }
    let threads = parallel::threads_for(threads, size_of_val(&*dst));
    parts::for_each_part(dst, layout, &ends, threads, |i, mut part: Part<'_, W>| {
        let _env = FpEnv::enter();
        let bytes = stored.parts[i].as_slice();
        let (first, len) = (part.elements.start, part.elements.len());
        if layout.is_dense() {
            return part
                .memory
                .chunks_mut(STRIP)
                .enumerate()
                .try_for_each(|(j, out)| read(bytes, j * STRIP, out, len));
        }
        let mut room = vec![W::zeroed(); STRIP.min(len)];
        for at in (0..len).step_by(STRIP) {
            let room = &mut room[..STRIP.min(len - at)];
            read(bytes, at, room, len)?;
            part.write(layout, first + at, room);
        }
        Ok(())
    })
}
