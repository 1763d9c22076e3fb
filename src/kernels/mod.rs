//! The kernels: the only SIMD of the crate. Chunk-wise primitives over whole groups; what a block is, and where bytes go, the codec decides.
//!
//! [`KernelTable`] and [`PlaneTable`] hold one function per primitive for one instruction-set level; their methods check every argument and
//! then call it. `scalar` defines the results; every other level gives the same bits. A level without a fast version of a primitive uses
//! the scalar one.
//!
//! Kernels take no locks, allocate nothing, read no environment. Floating-point results are defined in the default environment:
//! the caller holds an [`isa::FpEnv`].
//!
//! # Bits that are written
//! Every primitive that writes planes writes the bytes from its first slot on, up to the next multiple of 64 slots behind its last one; bits
//! without an element there are 0. Chunks are therefore written in rising order.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod bits;
#[cfg(test)]
mod column_tests;
pub mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod parity;
mod plane_table;
#[cfg(test)]
mod plane_tests;
mod prefetch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg(target_arch = "x86_64")]
mod range;
pub mod rng;
mod scalar;
#[cfg(test)]
mod tests;
mod types;

use half::{bf16, f16};

pub use isa::{FpEnv, Isa, try_active};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use plane_table::scalar_planes;
pub use plane_table::{PlaneTable, active_planes, count_ones, planes_for_isa};
pub use prefetch::{Prefetch, RowsAhead};
pub use rng::Key;
pub use types::{
    BLOCK_SLOTS, CodeParams, ColumnShape, Columns, DequantizeParams, MAX_BITS, PLANE_BYTES,
    PLANE_STRIDE, PlaneBuf, PlaneSrc, Predicate, QuantizeParams, Rounding,
};

use crate::dtype::Float;
#[cfg(target_arch = "x86_64")]
use crate::dtype::FloatType;
use crate::error::{Error, Result};

/// An element type that kernels exist for.
pub trait Element: Float {
    /// The table of a level, whether this CPU has it or not: use [`for_isa`].
    #[doc(hidden)]
    fn table(isa: Isa) -> &'static KernelTable<Self>;
}

/// Implements [`Element`]: one table a level. A level's `table` overrides what it has of the scalar one.
macro_rules! element {
    ($T:ty) => {
        impl Element for $T {
            fn table(isa: Isa) -> &'static KernelTable<Self> {
                static SCALAR: KernelTable<$T> = KernelTable::scalar(Isa::Scalar);
                #[cfg(target_arch = "x86_64")]
                static AVX2: KernelTable<$T> = avx2::table();
                #[cfg(target_arch = "x86_64")]
                static AVX512: KernelTable<$T> = avx512::table();
                #[cfg(target_arch = "aarch64")]
                static NEON: KernelTable<$T> = neon::table();
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => &AVX2,
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => &AVX512,
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => &NEON,
                    _ => &SCALAR,
                }
            }
        }
    };
}

element!(f32);
element!(f16);
element!(bf16);

/// (src, group, skip zeros, what comes next, minima, maxima)
type RangeRows<T> = unsafe fn(&[T], usize, bool, RowsAhead, &mut [f32], &mut [f32]);
/// (src, group, m, inv, params, first step, what comes next, planes, first slot)
type QuantizeRows<T> =
    unsafe fn(&[T], usize, &[f32], &[f32], &CodeParams, u32, RowsAhead, &mut PlaneBuf, usize);
/// (columns, m, inv, params, next row group, planes)
type QuantizeCols<T> =
    unsafe fn(&Columns<'_, T>, &[f32], &[f32], &CodeParams, &mut Prefetch, &mut PlaneBuf);
/// (planes, first slot, group, c0, step, params, first step, past the caches, dst)
type DequantizeRows<T> =
    unsafe fn(&PlaneSrc<'_>, usize, usize, &[f32], &[f32], &CodeParams, u32, bool, &mut [T]);
/// (planes, shape, c0, step, params, past the caches, dst)
type DequantizeCols<T> =
    unsafe fn(&PlaneSrc<'_>, &ColumnShape, &[f32], &[f32], &CodeParams, bool, &mut [T]);

/// The kernels over elements of type `T` for one level.
///
/// ```
/// use daf_rs::kernels::{self, Isa, RowsAhead};
/// let table = kernels::for_isa::<f32>(Isa::Scalar)?;
/// let (mut min, mut max) = ([0.0; 2], [0.0; 2]);
/// let x: Vec<f32> = (0..40).map(|i| i as f32).collect();
/// table.range_rows(&x, 32, false, RowsAhead::none(), &mut min, &mut max);
/// assert_eq!((min, max), ([0.0, 32.0], [31.0, 39.0]));
/// # Ok::<(), daf_rs::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct KernelTable<T: Element> {
    isa: Isa,
    // Each function requires what the method of the same name checks, and a CPU with the features of `isa`.
    range_rows: RangeRows<T>,
    quantize_rows: QuantizeRows<T>,
    dequantize_rows: DequantizeRows<T>,
    range_cols: unsafe fn(&Columns<'_, T>, bool, &mut Prefetch, &mut [f32], &mut [f32]),
    quantize_cols: QuantizeCols<T>,
    dequantize_cols: DequantizeCols<T>,
    nonzero_plane_rows: unsafe fn(&[T], &mut [u8]) -> usize,
    nonzero_plane_cols: unsafe fn(&Columns<'_, T>, &mut [u8]) -> usize,
    apply_nonzero_rows: unsafe fn(&[u8], usize, usize, &[f32], &mut [T]),
    apply_nonzero_cols: unsafe fn(&[u8], &ColumnShape, &[f32], &mut [T]),
    predicate_plane: unsafe fn(&[T], Predicate, &mut [u8]),
    sign_planes: unsafe fn(&[T], &mut [u8], &mut [u8]) -> bool,
    sign_values: unsafe fn(&[u8], &[u8], &mut [T]),
}

impl<T: Element> std::fmt::Debug for KernelTable<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelTable")
            .field("isa", &self.isa)
            .field("dtype", &T::TYPE)
            .finish_non_exhaustive()
    }
}

/// Destinations of so many bytes or more are written past the caches: a share of the last level's cache that a core can count on.
pub const STREAM_BYTES: usize = 8 << 20;

/// The kernels of a level.
///
/// # Errors
/// [`Error::BackendUnavailable`] when this CPU cannot run it.
pub fn for_isa<T: Element>(isa: Isa) -> Result<&'static KernelTable<T>> {
    check_available(isa)?;
    Ok(T::table(isa))
}

/// The kernels of the process's level ([`try_active`]).
///
/// # Errors
/// When `DAF_ISA` names a level that does not exist or that this CPU lacks.
pub fn active<T: Element>() -> Result<&'static KernelTable<T>> {
    for_isa(try_active()?)
}

fn check_available(isa: Isa) -> Result<()> {
    if isa.is_available() {
        return Ok(());
    }
    let allowed = Isa::available()
        .iter()
        .map(|isa| isa.name())
        .collect::<Vec<_>>()
        .join(", ");
    Err(Error::BackendUnavailable(format!(
        "kernels for {isa} need instructions that this CPU lacks; it runs: {allowed}"
    )))
}

/// Bytes of a plane of `slots` slots: whole 64-bit words.
pub const fn plane_len(slots: usize) -> usize {
    slots.div_ceil(64) * 8
}

impl<T: Element> KernelTable<T> {
    const fn scalar(isa: Isa) -> KernelTable<T> {
        KernelTable {
            isa,
            range_rows: scalar::rows::range,
            quantize_rows: scalar::rows::quantize,
            dequantize_rows: scalar::rows::dequantize,
            range_cols: scalar::cols::range,
            quantize_cols: scalar::cols::quantize,
            dequantize_cols: scalar::cols::dequantize,
            nonzero_plane_rows: scalar::planes::nonzero_rows,
            nonzero_plane_cols: scalar::planes::nonzero_cols,
            apply_nonzero_rows: scalar::planes::apply_nonzero_rows,
            apply_nonzero_cols: scalar::planes::apply_nonzero_cols,
            predicate_plane: scalar::planes::predicate,
            sign_planes: scalar::planes::sign,
            sign_values: scalar::planes::sign_values,
        }
    }

    /// The level.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Minimum and maximum of each group of `group` consecutive elements (the last may be shorter), in f32, zeros as +0.
    ///
    /// A group with a NaN or an infinity gives (NaN, NaN). With `skip_zeros`, elements equal to zero do not count; a group of zeros alone
    /// gives (+inf, -inf). `ahead` says how far the thread goes on reading behind `src`.
    ///
    /// # Panics
    /// If `group` is 0, or an output is shorter than the number of groups.
    pub fn range_rows(
        &self,
        src: &[T],
        group: usize,
        skip_zeros: bool,
        ahead: RowsAhead,
        out_min: &mut [f32],
        out_max: &mut [f32],
    ) {
        let groups = group_count(src.len(), group);
        assert!(
            out_min.len() >= groups && out_max.len() >= groups,
            "outputs are shorter than {groups} groups"
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above.
        unsafe {
            (self.range_rows)(
                src,
                group,
                skip_zeros,
                ahead,
                &mut out_min[..groups],
                &mut out_max[..groups],
            )
        }
    }

    /// Codes of consecutive groups, written as bits to `planes` from slot `slot0` on. Per element x of group g:
    /// `w = fma(x - m[g], inv[g], 2^23)`, `code = ((bits(w) & 0xffff) + r) >> 8` with r the dither byte or, rounding to nearest, 128.
    ///
    /// A group whose `inv` is 0 gets code 0 in all its slots, whatever its elements. The first element belongs to dither step `first_step`.
    ///
    /// # Panics
    /// If `group` is no multiple of 32, `m` or `inv` is shorter than the number of groups, `params.bits` is outside 1..=8, `slot0` is no
    /// multiple of 32, or the slots end behind the block.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call per chunk of a hot loop: plain arguments"
    )]
    pub fn quantize_rows(
        &self,
        src: &[T],
        group: usize,
        m: &[f32],
        inv: &[f32],
        params: &CodeParams,
        first_step: u32,
        ahead: RowsAhead,
        planes: &mut PlaneBuf,
        slot0: usize,
    ) {
        let groups = check_rows(src.len(), group, m, inv, params, slot0);
        assert!(
            slot0 + src.len() <= BLOCK_SLOTS,
            "slots {slot0}.. of {} elements end behind the block",
            src.len()
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths and bounds are checked above.
        unsafe {
            (self.quantize_rows)(
                src,
                group,
                &m[..groups],
                &inv[..groups],
                params,
                first_step,
                ahead,
                planes,
                slot0,
            )
        }
    }

    /// Values of consecutive groups from their codes: per element `fma(256 * code - r, step[g], c0[g])` in f32, with r the dither byte or 0,
    /// then clamped to the finite range and rounded to the dtype. With `stream`, values may go past the caches to memory: faster for
    /// tensors that no cache would hold until they are read.
    ///
    /// # Panics
    /// If `group` is no multiple of 32, `c0` or `step` is shorter than the number of groups, `params.bits` is outside 1..=8, `slot0` is no
    /// multiple of 32, or `planes` has fewer planes or slots than that takes.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call per chunk of a hot loop: plain arguments"
    )]
    pub fn dequantize_rows(
        &self,
        planes: &PlaneSrc<'_>,
        slot0: usize,
        group: usize,
        c0: &[f32],
        step: &[f32],
        params: &CodeParams,
        first_step: u32,
        stream: bool,
        dst: &mut [T],
    ) {
        let groups = check_rows(dst.len(), group, c0, step, params, slot0);
        check_planes(planes, params, slot0 + dst.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths and bounds are checked above.
        unsafe {
            (self.dequantize_rows)(
                planes,
                slot0,
                group,
                &c0[..groups],
                &step[..groups],
                params,
                first_step,
                stream,
                dst,
            )
        }
    }

    /// As [`KernelTable::range_rows`] for a row group of a channel tile: minimum and maximum of each column. `ahead` are the lines of the
    /// row group that the thread works on next.
    ///
    /// # Panics
    /// If the shape is not as [`ColumnShape`] says, `src` is shorter than it spans, or an output is shorter than its width.
    pub fn range_cols(
        &self,
        columns: &Columns<'_, T>,
        skip_zeros: bool,
        ahead: &mut Prefetch,
        out_min: &mut [f32],
        out_max: &mut [f32],
    ) {
        check_columns(&columns.shape, columns.src.len());
        let width = columns.shape.width;
        assert!(
            out_min.len() >= width && out_max.len() >= width,
            "outputs are shorter than {width} columns"
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above.
        unsafe {
            (self.range_cols)(
                columns,
                skip_zeros,
                ahead,
                &mut out_min[..width],
                &mut out_max[..width],
            )
        }
    }

    /// As [`KernelTable::quantize_rows`] for a row group of a channel tile. Row r of the tile and column c give slot
    /// `r * padded_width + c` and element `c & 31` of dither step `r * row_steps + (c >> 5)`. `ahead` is what `range_cols` left of the next
    /// row group's lines.
    ///
    /// # Panics
    /// As [`KernelTable::range_cols`]; if `m` or `inv` is shorter than the width, or `params.bits` is outside 1..=8.
    pub fn quantize_cols(
        &self,
        columns: &Columns<'_, T>,
        m: &[f32],
        inv: &[f32],
        params: &CodeParams,
        ahead: &mut Prefetch,
        planes: &mut PlaneBuf,
    ) {
        check_columns(&columns.shape, columns.src.len());
        let width = columns.shape.width;
        check_params(params);
        assert!(
            m.len() >= width && inv.len() >= width,
            "parameters are shorter than {width} columns"
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths and bounds are checked above.
        unsafe { (self.quantize_cols)(columns, &m[..width], &inv[..width], params, ahead, planes) }
    }

    /// As [`KernelTable::dequantize_rows`] for a row group of a channel tile; memory between the rows is left as it is. With
    /// `stream`, values may go past the caches to memory.
    ///
    /// # Panics
    /// As [`KernelTable::quantize_cols`]; if `planes` has fewer planes or slots than that takes.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call per chunk of a hot loop: plain arguments"
    )]
    pub fn dequantize_cols(
        &self,
        planes: &PlaneSrc<'_>,
        shape: &ColumnShape,
        c0: &[f32],
        step: &[f32],
        params: &CodeParams,
        stream: bool,
        dst: &mut [T],
    ) {
        check_columns(shape, dst.len());
        check_params(params);
        assert!(
            c0.len() >= shape.width && step.len() >= shape.width,
            "parameters are shorter than {} columns",
            shape.width
        );
        check_planes(planes, params, shape.end_slot());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths and bounds are checked above.
        unsafe {
            (self.dequantize_cols)(
                planes,
                shape,
                &c0[..shape.width],
                &step[..shape.width],
                params,
                stream,
                dst,
            )
        }
    }

    /// Sets bit i of `out` where element i is not zero (NaN is not zero), and counts the bits.
    ///
    /// # Panics
    /// If `out` is shorter than [`plane_len`] of the elements.
    pub fn nonzero_plane_rows(&self, src: &[T], out: &mut [u8]) -> usize {
        let len = plane_len(src.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the output's length is checked by the slice.
        unsafe { (self.nonzero_plane_rows)(src, &mut out[..len]) }
    }

    /// As [`KernelTable::nonzero_plane_rows`] for a row group of a channel tile; `out` is the whole block's plane, pad slots are 0.
    ///
    /// # Panics
    /// As [`KernelTable::range_cols`]; if `out` ends before the group's last slot.
    pub fn nonzero_plane_cols(&self, columns: &Columns<'_, T>, out: &mut [u8]) -> usize {
        check_columns(&columns.shape, columns.src.len());
        let len = plane_len(columns.shape.end_slot());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the output's length is checked by the slice.
        unsafe { (self.nonzero_plane_cols)(columns, &mut out[..len]) }
    }

    /// Makes elements +0 where their bit of the zero plane is 0, and raises the others to at least `floor[g]` (-inf: leaves them).
    /// `nonzero` is the whole block's plane, the first element is slot `slot0`.
    ///
    /// # Panics
    /// If `group` is no multiple of 32, `floor` is shorter than the number of groups, `slot0` is no multiple of 8, or `nonzero` is too short.
    pub fn apply_nonzero_rows(
        &self,
        nonzero: &[u8],
        slot0: usize,
        group: usize,
        floor: &[f32],
        dst: &mut [T],
    ) {
        let groups = group_count(dst.len(), group);
        assert!(
            group.is_multiple_of(32) && floor.len() >= groups,
            "{} floors for {groups} groups of {group}",
            floor.len()
        );
        assert!(slot0.is_multiple_of(8), "slot {slot0} is no multiple of 8");
        let len = plane_len(slot0 + dst.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the plane's length is checked by the slice.
        unsafe { (self.apply_nonzero_rows)(&nonzero[..len], slot0, group, &floor[..groups], dst) }
    }

    /// As [`KernelTable::apply_nonzero_rows`] for a row group of a channel tile, with one floor a column.
    ///
    /// # Panics
    /// As [`KernelTable::range_cols`]; if `floor` is shorter than the width or `nonzero` ends before the group's last slot.
    pub fn apply_nonzero_cols(
        &self,
        nonzero: &[u8],
        shape: &ColumnShape,
        floor: &[f32],
        dst: &mut [T],
    ) {
        check_columns(shape, dst.len());
        let len = plane_len(shape.end_slot());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above and by the slices.
        unsafe { (self.apply_nonzero_cols)(&nonzero[..len], shape, &floor[..shape.width], dst) }
    }

    /// Sets bit i of `out` where `predicate` holds for element i.
    ///
    /// # Panics
    /// If `out` is shorter than [`plane_len`] of the elements.
    pub fn predicate_plane(&self, src: &[T], predicate: Predicate, out: &mut [u8]) {
        let len = plane_len(src.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the output's length is checked by the slice.
        unsafe { (self.predicate_plane)(src, predicate, &mut out[..len]) }
    }

    /// Sets bit i of `positive` where element i is > 0 and of `negative` where it is < 0. Returns whether every element has a sign or is
    /// zero; with a NaN it returns false and the planes hold anything.
    ///
    /// # Panics
    /// If a plane is shorter than [`plane_len`] of the elements.
    #[must_use = "false means that the planes do not hold the signs"]
    pub fn sign_planes(&self, src: &[T], positive: &mut [u8], negative: &mut [u8]) -> bool {
        let len = plane_len(src.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the outputs' lengths are checked by the slices.
        unsafe { (self.sign_planes)(src, &mut positive[..len], &mut negative[..len]) }
    }

    /// The elements of two sign planes: 1, -1 or 0.
    ///
    /// # Panics
    /// If a plane is shorter than [`plane_len`] of the elements.
    pub fn sign_values(&self, positive: &[u8], negative: &[u8], dst: &mut [T]) {
        let len = plane_len(dst.len());
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the planes' lengths are checked by the slices.
        unsafe { (self.sign_values)(&positive[..len], &negative[..len], dst) }
    }
}

/// Whether a decoded value of some group may lie outside the finite range of a half type, so that it must be clamped.
#[cfg(target_arch = "x86_64")]
fn may_overflow<T: Element>(c0: &[f32], step: &[f32]) -> bool {
    let limit = match T::TYPE {
        FloatType::F32 => return false,
        FloatType::F16 => f16::MAX.to_f32(),
        FloatType::BF16 => bf16::MAX.to_f32(),
    };
    // The largest code is below 2^16 / 256. NaN counts as too large.
    let inside = |(c0, step): (&f32, &f32)| c0.abs() + 65_536.0 * step.abs() < limit;
    !c0.iter()
        .zip(step)
        .fold(true, |all, group| all & inside(group))
}

fn group_count(len: usize, group: usize) -> usize {
    assert!(group > 0, "a group has elements");
    len.div_ceil(group)
}

fn check_params(params: &CodeParams) {
    assert!(
        (1..=MAX_BITS).contains(&params.bits),
        "{} bits: a code has 1 to 8",
        params.bits
    );
}

fn check_rows(
    len: usize,
    group: usize,
    a: &[f32],
    b: &[f32],
    params: &CodeParams,
    slot0: usize,
) -> usize {
    let groups = group_count(len, group);
    check_params(params);
    assert!(
        group.is_multiple_of(32) && slot0.is_multiple_of(32),
        "group {group} and slot {slot0} must be multiples of 32"
    );
    assert!(
        a.len() >= groups && b.len() >= groups,
        "parameters are shorter than {groups} groups"
    );
    groups
}

fn check_planes(planes: &PlaneSrc<'_>, params: &CodeParams, end_slot: usize) {
    assert!(
        planes.planes() >= params.bits,
        "{} planes for {} bits",
        planes.planes(),
        params.bits
    );
    assert!(
        planes.plane_bytes() >= plane_len(end_slot),
        "planes of {} bytes end before slot {end_slot}",
        planes.plane_bytes()
    );
}

fn check_columns(shape: &ColumnShape, len: usize) {
    assert!(
        shape.rows > 0 && (1..=128).contains(&shape.width),
        "a row group has rows and 1 to 128 columns: {shape:?}"
    );
    assert!(
        shape.rows == 1 || shape.pitch >= shape.width,
        "rows overlap: {shape:?}"
    );
    assert!(
        shape.rows <= BLOCK_SLOTS
            && shape.first_row <= BLOCK_SLOTS
            && shape.end_slot() <= BLOCK_SLOTS,
        "ends behind the block: {shape:?}"
    );
    let span = shape
        .pitch
        .checked_mul(shape.rows - 1)
        .and_then(|rows| rows.checked_add(shape.width));
    assert!(
        span.is_some_and(|span| span <= len),
        "{len} elements are fewer than {shape:?} spans"
    );
}
