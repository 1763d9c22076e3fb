//! A stored tensor: what it is (its head) and its bytes (extents of the pool).

use crate::dtype::FloatType;
use crate::pool::Extent;

use super::{ElementKind, Layout, ReadMode, Target, ValueSpec};
use crate::error::{Error, Result};

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Quantized to a few bits a value.
    Value = 0,
    /// One value, exactly.
    Constant = 1,
    /// Two values by their bits, exactly: 1 bit an element.
    TwoValued = 2,
    /// Booleans: 1 bit an element.
    Bool = 3,
    /// Integers, exactly: frame of reference per 64 elements.
    Integer = 4,
    /// The answer to a comparison: 1 bit an element.
    Mask = 5,
    /// The sign: 2 bits an element.
    Sign = 6,
    /// The elements as they are.
    Raw = 7,
}

impl Class {
    /// All classes, in the order of their codes in the format.
    pub const ALL: [Class; 8] = [
        Class::Value,
        Class::Constant,
        Class::TwoValued,
        Class::Bool,
        Class::Integer,
        Class::Mask,
        Class::Sign,
        Class::Raw,
    ];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Value => "value",
            Class::Constant => "constant",
            Class::TwoValued => "two_valued",
            Class::Bool => "bool",
            Class::Integer => "integer",
            Class::Mask => "mask",
            Class::Sign => "sign",
            Class::Raw => "raw",
        }
    }

    /// Whether decoding gives back every bit of the source.
    pub const fn is_exact(self) -> bool {
        !matches!(self, Class::Value | Class::Mask | Class::Sign)
    }
}

/// What a stored tensor is, beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Head {
    Value(ValueSpec),
    Constant {
        kind: ElementKind,
        value: [u64; 2],
    },
    TwoValued {
        kind: ElementKind,
        values: [u64; 2],
    },
    Bool,
    Integer {
        bytes: u8,
        signed: bool,
    },
    Mask {
        dtype: FloatType,
        set: f32,
        unset: f32,
    },
    Sign {
        dtype: FloatType,
    },
    Raw {
        kind: ElementKind,
    },
}

impl Head {
    pub(crate) fn class(&self) -> Class {
        match self {
            Head::Value(_) => Class::Value,
            Head::Constant { .. } => Class::Constant,
            Head::TwoValued { .. } => Class::TwoValued,
            Head::Bool => Class::Bool,
            Head::Integer { .. } => Class::Integer,
            Head::Mask { .. } => Class::Mask,
            Head::Sign { .. } => Class::Sign,
            Head::Raw { .. } => Class::Raw,
        }
    }

    /// What an element is.
    pub(crate) fn kind(&self) -> ElementKind {
        match *self {
            Head::Value(spec) => ElementKind::Float(spec.dtype),
            Head::Constant { kind, .. } | Head::TwoValued { kind, .. } | Head::Raw { kind } => kind,
            Head::Bool => ElementKind::Bool,
            Head::Integer { bytes, signed } => ElementKind::Int { bytes, signed },
            Head::Mask { dtype, .. } | Head::Sign { dtype } => ElementKind::Float(dtype),
        }
    }
}

/// A stored tensor: immutable, shareable between threads, owner of its bytes in the pool.
#[derive(Debug)]
pub struct Encoded {
    pub(crate) head: Head,
    pub(crate) len: usize,
    /// One extent a segment (value) or part (other classes), in order.
    pub(crate) parts: Vec<Extent>,
    /// Bytes of block headers, class tables and group parameters.
    pub(crate) metadata: usize,
    /// Every block has a zero plane.
    pub(crate) zero_plane: bool,
}

impl Encoded {
    /// How the tensor is stored.
    pub fn class(&self) -> Class {
        self.head.class()
    }

    /// What an element is.
    pub fn kind(&self) -> ElementKind {
        self.head.kind()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bits of a code or of an exact element: 1..=8 for values, 1 for masks, 0 for a constant. Integers vary and give the bits of an
    /// element of the source, as raw elements do.
    pub fn bits(&self) -> u8 {
        match self.head {
            Head::Value(spec) => spec.bits,
            Head::Constant { .. } => 0,
            Head::TwoValued { .. } | Head::Bool | Head::Mask { .. } => 1,
            Head::Sign { .. } => 2,
            Head::Integer { .. } | Head::Raw { .. } => {
                u8::try_from(self.kind().size() * 8).unwrap_or(u8::MAX)
            }
        }
    }

    /// How the value codec stored it, if it did.
    pub fn value_spec(&self) -> Option<&ValueSpec> {
        match &self.head {
            Head::Value(spec) => Some(spec),
            _ => None,
        }
    }

    /// All bytes that the stored tensor takes: codes, planes and metadata, rounded up to the pool's units, and this object.
    pub fn stored_bytes(&self) -> usize {
        self.parts.iter().map(Extent::reserved).sum::<usize>() + self.overhead_bytes()
    }

    /// Bytes outside the pool: this object and its list of extents, part of [`Encoded::stored_bytes`].
    pub fn overhead_bytes(&self) -> usize {
        self.parts.len() * size_of::<Extent>() + size_of::<Self>()
    }

    /// Bytes of headers, class tables and group parameters, part of [`Encoded::stored_bytes`].
    pub fn metadata_bytes(&self) -> usize {
        self.metadata + self.overhead_bytes()
    }

    /// Whether every block has a zero plane, so that [`ReadMode::Mask`] works.
    pub fn has_zero_plane(&self) -> bool {
        self.zero_plane
    }

    /// Writes the tensor's elements into `dst` at the places of `layout`, in memory order; gaps are not touched.
    /// `threads` 0 means the default; the count never changes the result.
    ///
    /// # Errors
    /// `InvalidArgument` when `layout` has another number of elements, `dst` is too small or unaligned, or `mode` asks for a mask
    /// that is not stored; `CorruptData` when the bytes contradict each other.
    pub fn decode_into(
        &self,
        dst: Target<'_>,
        layout: &Layout,
        mode: ReadMode,
        threads: usize,
    ) -> Result<()> {
        if layout.len() != self.len {
            return Err(Error::InvalidArgument(format!(
                "the stored tensor has {} elements, but the layout to decode into has {}",
                self.len,
                layout.len()
            )));
        }
        if mode == ReadMode::Mask && !self.zero_plane {
            return Err(Error::InvalidArgument(
                "a mask was asked for, but the tensor was stored without a zero plane in every block; encode it with ZeroPlane::Always"
                    .into(),
            ));
        }
        match &self.head {
            Head::Value(spec) => {
                super::decode::decode_value(self, spec, dst, layout, mode, threads)
            }
            _ => super::exact::decode(self, dst, layout, threads),
        }
    }
}
