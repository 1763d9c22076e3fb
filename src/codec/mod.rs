//! The codec: tensors to bytes and back. It decides the class of a stored tensor, its geometry and every byte (`docs/format.md`);
//! the loops over elements are in `kernels`, the threads in `parallel`, the memory in `pool`.

#[cfg(target_endian = "big")]
compile_error!("packed bytes are little endian, and so must the CPU be");

mod access;
mod block;
mod decode;
mod encoded;
mod exact;
mod format;
mod geometry;
mod integer;
mod layout;
mod params;
mod parts;
mod scratch;
mod segment;
mod value;

pub use access::{Source, Target};
pub use encoded::{Class, Encoded};
pub use exact::{encode_lossless, encode_mask, encode_raw, encode_sign};
pub use format::{FORMAT_VERSION, TensorShape};
pub use geometry::{
    BLOCK, Block, ChannelBlock, GROUP_SIZES, Geometry, RowBlock, SEGMENT_BLOCKS, STEP, Tiling,
};
pub use layout::Layout;
pub use value::{encode_value, measure};

pub use crate::kernels::{Predicate, Rounding};

use crate::dtype::FloatType;

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
