//! A stored tensor as one byte string, for files and pickles: versioned header, parts, checksum. `docs/format.md`, "Byte string".
//!
//! Reading trusts nothing: every length is checked against the bytes that are there before memory is taken, every block is
//! validated, and whatever is wrong is `CorruptData`.

use std::sync::Arc;

use super::encoded::{Class, Encoded, Head};
use super::segment::{BlockView, HEADER, corrupt};
use super::{
    ElementKind, Geometry, Layout, Rounding, SEGMENT_BLOCKS, Tiling, ValueSpec, ZeroPlane, exact,
    integer,
};
use crate::dtype::FloatType;
use crate::error::{Error, Result};
use crate::kernels::plane_len;
use crate::pool::SlabPool;

const MAGIC: [u8; 8] = *b"DAFRSQT\x1a";
/// Version of the byte string. A reader refuses versions that it does not know.
pub const FORMAT_VERSION: u16 = 1;
/// Bytes before the shape.
const FIXED: usize = 64;
/// More dimensions than torch allows.
const MAX_DIMS: usize = 64;

/// The shape that a byte string carries beside the codes: sizes and strides in elements, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorShape {
    /// Elements along each dimension.
    pub sizes: Vec<i64>,
    /// Elements of memory from one index to the next, along each dimension.
    pub strides: Vec<i64>,
}

impl TensorShape {
    /// Whether the shape holds `len` elements without gaps.
    fn fits(&self, len: usize) -> bool {
        let whole = |v: &[i64]| v.iter().all(|x| *x >= 0);
        if self.sizes.len() != self.strides.len() || !whole(&self.sizes) || !whole(&self.strides) {
            return false;
        }
        let product = self
            .sizes
            .iter()
            .try_fold(1usize, |n, &s| n.checked_mul(usize::try_from(s).ok()?));
        product == Some(len)
            && (len == 0 || Layout::from_strided(&self.sizes, &self.strides).is_dense())
    }
}

fn kind_code(kind: ElementKind) -> u8 {
    // Sizes are 1, 2, 4, 8 or 16 bytes.
    let log = kind.size().trailing_zeros() as u8;
    match kind {
        ElementKind::Float(t) => t as u8,
        ElementKind::Float64 => 3,
        ElementKind::Bool => 4,
        ElementKind::Int { signed, .. } => 0x10 | log << 1 | u8::from(signed),
        ElementKind::Opaque { .. } => 0x20 | log,
    }
}

fn kind_from(code: u8) -> Option<ElementKind> {
    match code {
        0..=2 => FloatType::from_code(code).map(ElementKind::Float),
        3 => Some(ElementKind::Float64),
        4 => Some(ElementKind::Bool),
        0x10..=0x17 => Some(ElementKind::Int {
            bytes: 1 << ((code & 7) >> 1),
            signed: code & 1 == 1,
        }),
        0x20..=0x24 => Some(ElementKind::Opaque {
            bytes: 1 << (code & 7),
        }),
        _ => None,
    }
}

/// What the fixed header holds beside class and kind; fields that a class does not use are 0.
#[derive(Default, PartialEq)]
struct Fields {
    bits: u8,
    rounding: u8,
    group_size: u16,
    geometry: u8,
    zero: u8,
    key: u64,
    rows: u64,
    cols: u64,
    values: [u64; 2],
}

impl Fields {
    fn of(head: &Head, len: usize) -> Fields {
        let rows = len as u64;
        match *head {
            Head::Value(spec) => {
                let (geometry, rows, cols) = match spec.geometry {
                    Geometry::Row { n } => (0, n as u64, 0),
                    Geometry::Channel { rows, cols } => (1, rows as u64, cols as u64),
                };
                Fields {
                    bits: spec.bits,
                    rounding: spec.rounding as u8,
                    group_size: spec.group_size,
                    geometry,
                    zero: spec.zero as u8,
                    key: spec.key,
                    rows,
                    cols,
                    values: [0; 2],
                }
            }
            Head::Constant { value, .. } => Fields {
                rows,
                values: value,
                ..Fields::default()
            },
            Head::TwoValued { values, .. } => Fields {
                rows,
                values,
                ..Fields::default()
            },
            Head::Mask { set, unset, .. } => {
                let values = [u64::from(unset.to_bits()), u64::from(set.to_bits())];
                Fields {
                    rows,
                    values,
                    ..Fields::default()
                }
            }
            Head::Bool | Head::Integer { .. } | Head::Sign { .. } | Head::Raw { .. } => Fields {
                rows,
                ..Fields::default()
            },
        }
    }

    fn head(&self, class: Class, kind: ElementKind) -> Option<Head> {
        let float = match kind {
            ElementKind::Float(t) => Some(t),
            _ => None,
        };
        let narrow = |v: u64| {
            u32::try_from(v)
                .ok()
                .map(f32::from_bits)
                .filter(|x| x.is_finite())
        };
        match class {
            Class::Value => {
                let rows = usize::try_from(self.rows).ok()?;
                let geometry = match self.geometry {
                    0 => Geometry::Row { n: rows },
                    1 => Geometry::Channel {
                        rows,
                        cols: usize::try_from(self.cols).ok()?,
                    },
                    _ => return None,
                };
                let zero = match self.zero {
                    0 => ZeroPlane::Auto,
                    1 => ZeroPlane::Always,
                    2 => ZeroPlane::Never,
                    _ => return None,
                };
                let rounding = match self.rounding {
                    0 => Rounding::Dither,
                    1 => Rounding::Stochastic,
                    2 => Rounding::Nearest,
                    _ => return None,
                };
                if !(1..=8).contains(&self.bits) {
                    return None;
                }
                Some(Head::Value(ValueSpec {
                    dtype: float?,
                    bits: self.bits,
                    group_size: self.group_size,
                    rounding,
                    geometry,
                    key: self.key,
                    zero,
                }))
            }
            Class::Constant => Some(Head::Constant {
                kind,
                value: self.values,
            }),
            Class::TwoValued => (kind.size() <= 8).then_some(Head::TwoValued {
                kind,
                values: self.values,
            }),
            Class::Bool => (kind == ElementKind::Bool).then_some(Head::Bool),
            Class::Integer => match kind {
                ElementKind::Int { bytes, signed } => Some(Head::Integer { bytes, signed }),
                _ => None,
            },
            Class::Mask => Some(Head::Mask {
                dtype: float?,
                unset: narrow(self.values[0])?,
                set: narrow(self.values[1])?,
            }),
            Class::Sign => Some(Head::Sign { dtype: float? }),
            Class::Raw => Some(Head::Raw { kind }),
        }
    }

    fn len(&self, class: Class) -> Option<usize> {
        let rows = usize::try_from(self.rows).ok()?;
        match (class, self.geometry) {
            (Class::Value, 1) => rows.checked_mul(usize::try_from(self.cols).ok()?),
            _ => Some(rows),
        }
    }
}

/// Reads little-endian numbers, none behind the end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let Some((head, tail)) = self.0.split_at_checked(n) else {
            return Err(corrupt(&format!(
                "{n} bytes are missing: the data are cut off"
            )));
        };
        self.0 = tail;
        Ok(head)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.number::<1>()?[0])
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.number()?))
    }
}

impl Encoded {
    /// The stored tensor as a byte string, with the shape that it is to have again.
    ///
    /// # Errors
    /// `InvalidArgument` when `shape` has gaps, more than 64 dimensions, or another number of elements.
    pub fn to_bytes(&self, shape: &TensorShape) -> Result<Vec<u8>> {
        if shape.sizes.len() > MAX_DIMS || !shape.fits(self.len) {
            return Err(Error::InvalidArgument(format!(
                "sizes {:?} with strides {:?} are no dense tensor of {} elements",
                shape.sizes, shape.strides, self.len
            )));
        }
        let f = Fields::of(&self.head, self.len);
        let mut out = Vec::with_capacity(self.serialized_bytes(shape.sizes.len()));
        out.extend(MAGIC);
        out.extend(FORMAT_VERSION.to_le_bytes());
        out.extend([
            self.class() as u8,
            kind_code(self.kind()),
            f.bits,
            f.rounding,
        ]);
        out.extend(f.group_size.to_le_bytes());
        out.extend([f.geometry, f.zero, shape.sizes.len() as u8, 0]);
        // A tensor that fits in memory has fewer than 2^32 parts of half a million elements.
        out.extend((self.parts.len() as u32).to_le_bytes());
        for word in [f.key, f.rows, f.cols, f.values[0], f.values[1]] {
            out.extend(word.to_le_bytes());
        }
        for n in shape.sizes.iter().chain(&shape.strides) {
            out.extend(n.to_le_bytes());
        }
        for part in &self.parts {
            out.extend((part.len() as u64).to_le_bytes());
        }
        for part in &self.parts {
            out.extend(part.as_slice());
        }
        out.extend(crc32fast::hash(&out).to_le_bytes());
        Ok(out)
    }

    /// Bytes of [`Encoded::to_bytes`] for a shape of `dims` dimensions.
    pub fn serialized_bytes(&self, dims: usize) -> usize {
        let parts: usize = self.parts.iter().map(|p| p.len() + 8).sum();
        FIXED + 16 * dims + parts + 4
    }

    /// Reads what [`Encoded::to_bytes`] wrote.
    ///
    /// # Errors
    /// `CorruptData` for anything else, `OutOfMemory`.
    pub fn from_bytes(bytes: &[u8], pool: &Arc<SlabPool>) -> Result<(Encoded, TensorShape)> {
        let Some((body, sum)) = bytes
            .split_last_chunk::<4>()
            .filter(|(b, _)| b.len() >= FIXED)
        else {
            return Err(corrupt(&format!(
                "{} bytes are no packed tensor: its header alone has {FIXED}",
                bytes.len()
            )));
        };
        let mut r = Reader(body);
        if r.number()? != MAGIC {
            return Err(corrupt(
                "the data do not start with the mark of a packed tensor",
            ));
        }
        let version = u16::from_le_bytes(r.number()?);
        if version != FORMAT_VERSION {
            return Err(corrupt(&format!(
                "format version {version} is not known; this release reads version {FORMAT_VERSION}"
            )));
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(corrupt("the checksum does not match"));
        }
        let (class, kind) = (r.u8()?, r.u8()?);
        let class = Class::ALL.get(usize::from(class)).copied();
        let (Some(class), Some(kind)) = (class, kind_from(kind)) else {
            return Err(corrupt("the class or the element type is unknown"));
        };
        let mut f = Fields {
            bits: r.u8()?,
            rounding: r.u8()?,
            group_size: u16::from_le_bytes(r.number()?),
            ..Fields::default()
        };
        (f.geometry, f.zero) = (r.u8()?, r.u8()?);
        let (dims, reserved) = (usize::from(r.u8()?), r.u8()?);
        let parts = u32::from_le_bytes(r.number()?) as usize;
        (f.key, f.rows, f.cols) = (r.u64()?, r.u64()?, r.u64()?);
        f.values = [r.u64()?, r.u64()?];
        let head = f
            .head(class, kind)
            .filter(|h| reserved == 0 && dims <= MAX_DIMS && Fields::of(h, f.rows as usize) == f);
        let (Some(head), Some(len)) = (head, f.len(class)) else {
            return Err(corrupt("a field of the header is out of its range"));
        };
        let mut shape = TensorShape::default();
        for list in [&mut shape.sizes, &mut shape.strides] {
            for _ in 0..dims {
                list.push(i64::from_le_bytes(r.number()?));
            }
        }
        if !shape.fits(len) {
            return Err(corrupt("the shape does not fit the number of elements"));
        }
        // The list of lengths is looked at before anything of its size is made.
        let mut lengths = Reader(r.take(parts.saturating_mul(8))?);
        let mut out = Encoded {
            head,
            len,
            parts: Vec::with_capacity(parts),
            metadata: 0,
            zero_plane: class == Class::Value,
        };
        for i in 0..parts {
            let n = usize::try_from(lengths.u64()?).unwrap_or(usize::MAX);
            let part = r.take(n)?;
            out.check_part(i, parts, part)?;
            let mut extent = pool.alloc(n)?;
            extent.as_mut_slice().copy_from_slice(part);
            out.parts.push(extent);
        }
        if !r.0.is_empty() || out.expected_parts()? != parts {
            return Err(corrupt(
                "there are more or fewer bytes than the header says",
            ));
        }
        Ok((out, shape))
    }

    fn expected_parts(&self) -> Result<usize> {
        Ok(match &self.head {
            Head::Value(spec) => tiling(spec)?.segments(),
            Head::Constant { .. } => 0,
            _ => self.len.div_ceil(exact::PART),
        })
    }

    /// Checks everything that decoding part `i` relies on, and counts its metadata.
    fn check_part(&mut self, i: usize, parts: usize, bytes: &[u8]) -> Result<()> {
        if self.expected_parts()? != parts {
            return Err(corrupt(
                "there are more or fewer parts than the shape needs",
            ));
        }
        let exactly = |n: usize| {
            if bytes.len() == n {
                Ok(())
            } else {
                Err(corrupt("a part has another length than its elements need"))
            }
        };
        let n = exact::part(i, self.len).len();
        match &self.head {
            Head::Value(spec) => {
                let tiling = tiling(spec)?;
                for number in tiling.segment(i) {
                    let block = tiling.block(number);
                    let (index, bits) = (number % SEGMENT_BLOCKS, usize::from(spec.bits));
                    let view =
                        BlockView::new(bytes, index, &tiling, &block, bits, spec.dtype.size())?;
                    self.metadata += HEADER + view.offsets.metadata();
                    self.zero_plane &= view.header.zero_plane;
                }
                Ok(())
            }
            Head::Constant { .. } => exactly(0),
            Head::TwoValued { .. } | Head::Bool | Head::Mask { .. } => exactly(plane_len(n)),
            Head::Sign { .. } => exactly(2 * plane_len(n)),
            Head::Raw { kind } => exactly(n * kind.size()),
            Head::Integer { .. } => {
                self.metadata += integer::check(bytes, n)?;
                Ok(())
            }
        }
    }
}

fn tiling(spec: &ValueSpec) -> Result<Tiling> {
    Tiling::new(spec.geometry, spec.group_size).map_err(|e| corrupt(&e.to_string()))
}

impl PartialEq for Encoded {
    /// Equal codes: the same class, parameters and bytes, whatever pool they lie in.
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len
            && self.kind() == other.kind()
            && self.class() == other.class()
            && Fields::of(&self.head, self.len) == Fields::of(&other.head, other.len)
            && self
                .parts
                .iter()
                .map(|p| p.as_slice())
                .eq(other.parts.iter().map(|p| p.as_slice()))
    }
}
