//! The codec: tensors to bytes and back. It decides the class of a stored tensor, its geometry and every byte (`docs/format.md`);
//! the loops over elements are in `kernels`, the threads in `parallel`, the memory in `pool`.

#![deny(clippy::cast_possible_wrap)]

mod access;
mod encoded;
mod geometry;
mod layout;

pub use access::{Source, Target};
pub use encoded::{Class, Encoded};
pub use geometry::{BLOCK, Block, ChannelBlock, GROUP_SIZES, Geometry, RowBlock, SEGMENT_BLOCKS, STEP, Tiling};
pub use layout::Layout;

use crate::dtype::FloatType;

/// How a real number becomes a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rounding {
    /// Subtractive dither: unbiased, error uniform in ±s/2 and independent of the value; mean square s²/12.
    Dither = 0,
    /// Stochastic rounding: unbiased, error in ±s, mean square s²/6 on average.
    Stochastic = 1,
    /// Round to nearest: error in ±s/2, mean square s²/12, biased per value.
    Nearest = 2,
}

impl Rounding {
    /// The rounding with this code in the format.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Rounding::Dither),
            1 => Some(Rounding::Stochastic),
            2 => Some(Rounding::Nearest),
            _ => None,
        }
    }
}

/// Whether a block stores one lossless bit per element for "is not zero", and codes for the nonzeros only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZeroPlane {
    /// Where it saves bytes: nonzeros < (1 - 1/bits) of the block.
    Auto = 0,
    /// In every block: a reader needs the mask.
    Always = 1,
    /// Nowhere.
    Never = 2,
}

/// How [`encode_value`] stores a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueSpec {
    /// Element type.
    pub dtype: FloatType,
    /// Bits of a code, 1..=8.
    pub bits: u8,
    /// Elements of a group: a power of two, 32..=1024.
    pub group_size: u16,
    /// How numbers become codes.
    pub rounding: Rounding,
    /// Shape of the groups; its element count is the layout's.
    pub geometry: Geometry,
    /// Key of the dither: equal keys give equal bytes.
    pub key: u64,
    /// Where zeros get a plane of their own.
    pub zero: ZeroPlane,
}

/// What a reader of a decoded tensor needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReadMode {
    /// The values, unbiased.
    Values,
    /// The values, where a nonzero element of a group that has no negative ones is never 0 or below: for readers of `x > 0`.
    ValuesPositive,
    /// 1.0 where the element was not zero, else 0.0. Needs a zero plane in every block.
    Mask,
}

/// What an element is, for the classes that keep it exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementKind {
    /// A floating-point type that the value codec knows.
    Float(FloatType),
    /// IEEE binary64.
    Float64,
    /// torch.bool: one byte.
    Bool,
    /// Integers of 1, 2, 4 or 8 bytes.
    Int {
        /// Bytes of an element.
        bytes: u8,
        /// Two's complement or not.
        signed: bool,
    },
    /// Anything else of 1, 2, 4, 8 or 16 bytes (complex numbers).
    Opaque {
        /// Bytes of an element.
        bytes: u8,
    },
}

impl ElementKind {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            ElementKind::Float(t) => t.size(),
            ElementKind::Float64 => 8,
            ElementKind::Bool => 1,
            ElementKind::Int { bytes, .. } | ElementKind::Opaque { bytes } => usize::from(bytes),
        }
    }
}

/// The question that a mask answers, one bit an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Predicate {
    /// `!(x <= t)`: above the threshold, or NaN (what ReLU's backward passes on).
    GreaterOrNan {
        /// The threshold.
        t: f32,
    },
    /// `lo <= x && x <= hi` (hardtanh, clamp).
    Within {
        /// Lower end, included.
        lo: f32,
        /// Upper end, included.
        hi: f32,
    },
    /// `!(x <= lo || x >= hi)`.
    NotBeyond {
        /// Lower end, excluded.
        lo: f32,
        /// Upper end, excluded.
        hi: f32,
    },
}

/// What [`measure`] finds, before any bits are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeStats {
    /// The largest |x|, over finite groups.
    pub max_abs: f32,
    /// Mean of R² over the finite groups, weighted by their elements: the variance at b bits is this / (12 (2^b-1)²).
    pub mean_range_sq: f64,
    /// Whether every element is finite.
    pub finite: bool,
}
