//! What kernels take and give besides slices: rounding modes, parameters, predicates, and bit-planes.

use super::rng::Key;

/// Slots of a block: one bit of each makes a plane.
pub const BLOCK_SLOTS: usize = 32_768;

/// Bytes of a full plane.
pub const PLANE_BYTES: usize = BLOCK_SLOTS / 8;

/// Distance between the planes of a [`PlaneBuf`]. Planes exactly 4,096 bytes apart would all fall into one set of the L1 cache.
pub const PLANE_STRIDE: usize = PLANE_BYTES + 64;

/// The largest bit width of a code, and so the most planes of a block.
pub const MAX_BITS: usize = 8;

/// How a real number becomes a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rounding {
    /// Subtractive dither: both sides use the same random bytes; unbiased, error uniform in ± half a step whatever the value.
    Dither = 0,
    /// Stochastic rounding: random on the encoder's side only; unbiased, twice the variance.
    Stochastic = 1,
    /// To the nearest code: biased, no randomness.
    Nearest = 2,
}

/// What quantization and dequantization of a block share, besides the parameters of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeParams {
    /// Bit width of a code, 1..=8.
    pub bits: usize,
    /// How codes are rounded.
    pub rounding: Rounding,
    /// Key of the block's random words.
    pub key: Key,
}

/// The encoder's name for [`CodeParams`].
pub type QuantizeParams = CodeParams;

/// The decoder's name for [`CodeParams`].
pub type DequantizeParams = CodeParams;

/// A condition on one value, kept as one bit. NaN counts as in the expression of each variant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Predicate {
    /// `!(x <= t)`: greater, or NaN.
    GreaterOrNan {
        /// The threshold.
        t: f32,
    },
    /// `lo <= x && x <= hi`: false for NaN.
    Within {
        /// Lower end, included.
        lo: f32,
        /// Upper end, included.
        hi: f32,
    },
    /// `!(x <= lo || x >= hi)`: strictly between, or NaN.
    NotBeyond {
        /// Lower end, excluded.
        lo: f32,
        /// Upper end, excluded.
        hi: f32,
    },
}

impl Predicate {
    /// Whether the condition holds for `x`.
    #[expect(
        clippy::neg_cmp_op_on_partial_ord,
        reason = "the negation decides what NaN gives"
    )]
    pub fn holds(self, x: f32) -> bool {
        match self {
            Predicate::GreaterOrNan { t } => !(x <= t),
            Predicate::Within { lo, hi } => lo <= x && x <= hi,
            Predicate::NotBeyond { lo, hi } => !(x <= lo || x >= hi),
        }
    }
}

/// Staging memory for the planes of one block: kernels write here, the caller copies whole planes to their place.
#[derive(Clone)]
#[repr(C, align(64))]
pub struct PlaneBuf {
    bytes: [u8; MAX_BITS * PLANE_STRIDE],
}

impl PlaneBuf {
    /// Zeroed planes.
    pub const fn new() -> PlaneBuf {
        PlaneBuf {
            bytes: [0; MAX_BITS * PLANE_STRIDE],
        }
    }

    /// Plane `k` (bit `k` of every code).
    ///
    /// # Panics
    /// If `k` is 8 or more.
    pub fn plane(&self, k: usize) -> &[u8] {
        &self.bytes[k * PLANE_STRIDE..][..PLANE_BYTES]
    }

    /// Plane `k`, to write.
    ///
    /// # Panics
    /// If `k` is 8 or more.
    pub fn plane_mut(&mut self, k: usize) -> &mut [u8] {
        &mut self.bytes[k * PLANE_STRIDE..][..PLANE_BYTES]
    }

    /// All planes as a source for dequantization.
    pub fn as_src(&self) -> PlaneSrc<'_> {
        PlaneSrc {
            bytes: &self.bytes,
            stride: PLANE_STRIDE,
            plane_bytes: PLANE_BYTES,
            planes: MAX_BITS,
            next: 0,
        }
    }

    /// Address of plane 0; plane `k` lies `k * PLANE_STRIDE` bytes behind.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr()
    }
}

impl Default for PlaneBuf {
    fn default() -> Self {
        PlaneBuf::new()
    }
}

impl std::fmt::Debug for PlaneBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlaneBuf").finish_non_exhaustive()
    }
}

/// The planes of one block, to read: equally long, a fixed distance apart.
#[derive(Clone, Copy, Debug)]
pub struct PlaneSrc<'a> {
    bytes: &'a [u8],
    stride: usize,
    plane_bytes: usize,
    planes: usize,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only x86-64 kernels fetch planes ahead")
    )]
    next: usize,
}

impl<'a> PlaneSrc<'a> {
    /// `planes` planes of `plane_bytes` bytes (a multiple of 8), one behind the other. `None` when `bytes` is too short or the length is no
    /// multiple of 8.
    pub fn new(bytes: &'a [u8], planes: usize, plane_bytes: usize) -> Option<PlaneSrc<'a>> {
        let needed = planes.checked_mul(plane_bytes)?;
        (plane_bytes.is_multiple_of(8) && needed <= bytes.len()).then_some(PlaneSrc {
            bytes,
            stride: plane_bytes,
            plane_bytes,
            planes,
            next: 0,
        })
    }

    /// The same planes, of which the thread will read those `distance` bytes behind next (0: none). Only a hint: kernels fetch them ahead.
    #[must_use]
    pub fn followed_by(self, distance: usize) -> PlaneSrc<'a> {
        PlaneSrc {
            next: distance,
            ..self
        }
    }

    /// Plane `k`.
    ///
    /// # Panics
    /// If there is no plane `k`.
    pub fn plane(&self, k: usize) -> &'a [u8] {
        assert!(k < self.planes, "plane {k} of {}", self.planes);
        &self.bytes[k * self.stride..][..self.plane_bytes]
    }

    /// Number of planes.
    pub fn planes(&self) -> usize {
        self.planes
    }

    /// Bytes of a plane.
    pub fn plane_bytes(&self) -> usize {
        self.plane_bytes
    }

    /// Address of plane 0; plane `k` lies `k * self.stride()` bytes behind.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// The line to fetch when `offset` bytes of plane `k` are read. For a prefetch instruction only.
    #[inline(always)]
    #[cfg(target_arch = "x86_64")]
    pub(super) fn line_ahead(&self, k: usize, offset: usize) -> Option<*const i8> {
        let at = k * self.stride + offset + self.next;
        (self.next > 0).then(|| self.bytes.as_ptr().wrapping_add(at).cast())
    }

    /// Distance between planes in bytes.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// A row group of a channel tile, to read: `rows` rows of `width` neighbours, `pitch` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a, T> {
    /// Elements from the first row's first column on; at least `(rows - 1) * pitch + width`.
    pub src: &'a [T],
    /// Where the group lies.
    pub shape: ColumnShape,
}

/// Where a row group of a channel tile lies, in memory and in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnShape {
    /// Elements from one row to the next in memory; at least `width` unless there is one row.
    pub pitch: usize,
    /// Rows of the group, at least 1.
    pub rows: usize,
    /// Columns of the slab, 1..=128; also the number of groups, since each column of the row group is one.
    pub width: usize,
    /// Row of the tile that the group's first row is.
    pub first_row: usize,
}

impl ColumnShape {
    /// Columns with their padding: each row of a slab starts on a byte of the planes.
    pub const fn padded_width(self) -> usize {
        self.width.next_multiple_of(8)
    }

    /// Dither steps of a row.
    pub const fn row_steps(self) -> usize {
        self.padded_width().div_ceil(32)
    }

    /// Elements of memory that the rows span.
    pub const fn span(self) -> usize {
        (self.rows - 1) * self.pitch + self.width
    }

    /// First slot of the group in its block.
    pub const fn first_slot(self) -> usize {
        self.first_row * self.padded_width()
    }

    /// One past the last slot of the group in its block.
    pub const fn end_slot(self) -> usize {
        (self.first_row + self.rows) * self.padded_width()
    }
}
