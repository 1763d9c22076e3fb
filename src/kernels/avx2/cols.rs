//! Row groups of a channel tile. A *chunk* is 32 consecutive slots: 32 columns of a row, or narrow rows one behind the other (2 of 16
//! columns, 4 of 8), so that narrow tensors fill the vectors too. Its four vectors are 8 slots each, and byte b of a 32-bit lane i belongs
//! to slot 8 b + i wherever codes and dither are held as bytes: the order in which dither words come.

use std::arch::x86_64::*;

use super::lanes::{Lanes, fetch, fetch_row};
use super::words;
use crate::kernels::types::{
    CodeParams, ColumnShape, Columns, PLANE_STRIDE, PlaneBuf, PlaneSrc, Rounding,
};
use crate::kernels::{Key, Prefetch, may_overflow, plane_len};

/// Minimum and maximum of each column.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::range_cols`] checks them.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) unsafe fn range<T: Lanes>(
    columns: &Columns<'_, T>,
    skip_zeros: bool,
    ahead: &mut Prefetch,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    let width = columns.shape.width;
    let quota = ahead.range_quota().div_ceil(width.div_ceil(32));
    for c in (0..width).step_by(32) {
        let n = (width - c).min(32);
        let out = (&mut out_min[c..c + n], &mut out_max[c..c + n]);
        // SAFETY: the columns from c to c + n are columns of the group, and N vectors cover them.
        unsafe {
            match n.div_ceil(8) {
                1 => range_n::<T, 1>(columns, c, skip_zeros, ahead, quota, out),
                2 => range_n::<T, 2>(columns, c, skip_zeros, ahead, quota, out),
                3 => range_n::<T, 3>(columns, c, skip_zeros, ahead, quota, out),
                _ => range_n::<T, 4>(columns, c, skip_zeros, ahead, quota, out),
            }
        }
    }
}

/// Minimum and maximum of the columns from `c` on that `out` has room for.
///
/// # Safety
/// As [`range`]; the outputs are equally long, more than 8 (N - 1) and at most 8 N, and end within the width.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
unsafe fn range_n<T: Lanes, const N: usize>(
    columns: &Columns<'_, T>,
    c: usize,
    skip_zeros: bool,
    ahead: &mut Prefetch,
    quota: usize,
    (out_min, out_max): (&mut [f32], &mut [f32]),
) {
    let ColumnShape { pitch, rows, .. } = columns.shape;
    let last = out_min.len() - 8 * (N - 1);
    let inf = _mm256_set1_ps(f32::INFINITY);
    let minus_inf = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut lo = [inf; N];
    let mut hi = [minus_inf; N];
    let mut unordered = _mm256_setzero_ps();
    for r in 0..rows {
        fetch(ahead, quota);
        let mut x = [_mm256_setzero_ps(); N];
        // SAFETY: the columns are inside row r, which is inside `src`.
        unsafe {
            let row = columns.src.as_ptr().add(r * pitch + c);
            for (k, x) in x[..N - 1].iter_mut().enumerate() {
                *x = T::load(row.add(8 * k));
            }
            let row = row.add(8 * (N - 1));
            x[N - 1] = if last == 8 {
                T::load(row)
            } else {
                T::load_first(last, row)
            };
        }
        for k in 0..N {
            // One comparison finds a NaN in either of two vectors.
            if k % 2 == 0 {
                unordered = _mm256_or_ps(
                    unordered,
                    _mm256_cmp_ps::<_CMP_UNORD_Q>(x[k], x[(k + 1).min(N - 1)]),
                );
            }
            if skip_zeros {
                let zero = _mm256_cmp_ps::<_CMP_EQ_OQ>(x[k], _mm256_setzero_ps());
                lo[k] = _mm256_min_ps(lo[k], _mm256_blendv_ps(x[k], inf, zero));
                hi[k] = _mm256_max_ps(hi[k], _mm256_blendv_ps(x[k], minus_inf, zero));
            } else {
                lo[k] = _mm256_min_ps(lo[k], x[k]);
                hi[k] = _mm256_max_ps(hi[k], x[k]);
            }
        }
    }
    let any_nan = _mm256_movemask_ps(unordered) != 0;
    for k in 0..N {
        let n = if k == N - 1 { last } else { 8 };
        let mut bad = _mm256_or_ps(
            _mm256_cmp_ps::<_CMP_EQ_OQ>(lo[k], minus_inf),
            _mm256_cmp_ps::<_CMP_EQ_OQ>(hi[k], inf),
        );
        if any_nan {
            // SAFETY: the n columns from c + 8 k on are columns of the group.
            bad = _mm256_or_ps(bad, unsafe { nan_columns(columns, c + 8 * k, n) });
        }
        let nan = _mm256_set1_ps(f32::NAN);
        // Adding 0 turns -0 into +0.
        let lo = _mm256_blendv_ps(_mm256_add_ps(lo[k], _mm256_setzero_ps()), nan, bad);
        let hi = _mm256_blendv_ps(_mm256_add_ps(hi[k], _mm256_setzero_ps()), nan, bad);
        // SAFETY: n numbers from 8 k on are inside the outputs.
        unsafe {
            f32::store_first(n, out_min.as_mut_ptr().add(8 * k), lo);
            f32::store_first(n, out_max.as_mut_ptr().add(8 * k), hi);
        }
    }
}

/// All bits set in the lanes of the `n` columns from `c` on that hold a NaN.
///
/// # Safety
/// As [`range`]; the columns are columns of the group, at most 8.
#[cold]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
unsafe fn nan_columns<T: Lanes>(columns: &Columns<'_, T>, c: usize, n: usize) -> __m256 {
    let mut nan = _mm256_setzero_ps();
    for r in 0..columns.shape.rows {
        // SAFETY: the columns are inside row r, which is inside `src`.
        let x = unsafe { T::load_first(n, columns.src.as_ptr().add(r * columns.shape.pitch + c)) };
        nan = _mm256_or_ps(nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    }
    nan
}

/// How slots map to memory: narrow rows share a chunk of 32 slots. Wide rows take up to four chunks.
const fn rows_of_chunk(padded_width: usize) -> usize {
    match padded_width {
        8 => 4,
        16 => 2,
        _ => 1,
    }
}

/// Where vector `k` of a chunk begins: (row, column) relative to the chunk's.
#[inline]
const fn place(rows_of_chunk: usize, k: usize) -> (usize, usize) {
    match rows_of_chunk {
        4 => (k, 0),
        2 => (k / 2, 8 * (k % 2)),
        _ => (0, 8 * k),
    }
}

/// How many lanes of a chunk's four vectors are elements, for a chunk that has `rows` rows left and begins at `column`.
#[inline]
fn lanes(rows_of_chunk: usize, rows: usize, width: usize, column: usize) -> [usize; 4] {
    std::array::from_fn(|k| {
        let (r, c) = place(rows_of_chunk, k);
        if r < rows {
            width.saturating_sub(column + c).min(8)
        } else {
            0
        }
    })
}

/// Parameters of 128 columns, 0 behind the last.
#[repr(align(32))]
struct Padded([f32; 128]);

impl Padded {
    #[inline]
    fn new(values: &[f32]) -> Padded {
        let mut padded = Padded([0.0; 128]);
        padded.0[..values.len()].copy_from_slice(values);
        padded
    }

    /// 8 parameters from column `c` on.
    ///
    /// # Safety
    /// `c` is at most 120.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn at(&self, c: usize) -> __m256 {
        debug_assert!(c <= 120);
        // SAFETY: 8 of the 128 numbers, by the caller.
        unsafe { _mm256_loadu_ps(self.0.as_ptr().add(c)) }
    }
}

/// The dither bytes of the chunk that begins at `step`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn dither<const ROWS: usize>(key: Key, step: u32) -> __m256i {
    let first = words(key, step);
    match ROWS {
        4 => {
            // Byte 0 of each of four steps.
            let low = |step: u32| _mm256_and_si256(words(key, step), _mm256_set1_epi32(0xff));
            let (b, c) = (low(step.wrapping_add(1)), low(step.wrapping_add(2)));
            let d = words(key, step.wrapping_add(3));
            let ab = _mm256_or_si256(
                _mm256_and_si256(first, _mm256_set1_epi32(0xff)),
                _mm256_slli_epi32::<8>(b),
            );
            _mm256_or_si256(
                ab,
                _mm256_or_si256(_mm256_slli_epi32::<16>(c), _mm256_slli_epi32::<24>(d)),
            )
        }
        // Bytes 0 and 1 of each of two steps.
        2 => _mm256_blend_epi16::<0xAA>(
            first,
            _mm256_slli_epi32::<16>(words(key, step.wrapping_add(1))),
        ),
        _ => first,
    }
}

/// Codes of a row group as planes.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::quantize_cols`] checks them.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) unsafe fn quantize<T: Lanes>(
    columns: &Columns<'_, T>,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    ahead: &mut Prefetch,
    planes: &mut PlaneBuf,
) {
    let shape = columns.shape;
    // Groups without parameters (inv = 0) have code 0, whatever their elements, and so do slots without an element.
    let mut live = [0; 128];
    for r in 0..rows_of_chunk(shape.padded_width()) {
        for (live, &inv) in live[r * shape.padded_width() % 32..].iter_mut().zip(inv) {
            *live = if inv == 0.0 { 0 } else { 0xff };
        }
    }
    let encoder = Encoder {
        src: columns.src.as_ptr(),
        shape,
        m: &Padded::new(m),
        inv: &Padded::new(inv),
        key: params.key,
        random: params.rounding != Rounding::Nearest,
        out: planes.as_mut_ptr(),
        live: &live,
    };
    // SAFETY: the caller's promise; the constants are the bits and the rows of a chunk.
    unsafe {
        match params.bits {
            1 => encoder.run::<1>(ahead),
            2 => encoder.run::<2>(ahead),
            3 => encoder.run::<3>(ahead),
            4 => encoder.run::<4>(ahead),
            5 => encoder.run::<5>(ahead),
            6 => encoder.run::<6>(ahead),
            7 => encoder.run::<7>(ahead),
            _ => encoder.run::<8>(ahead),
        }
    }
}

/// What the chunks of a row group share.
struct Encoder<'a, T> {
    src: *const T,
    shape: ColumnShape,
    m: &'a Padded,
    inv: &'a Padded,
    key: Key,
    random: bool,
    out: *mut u8,
    /// All bits set for the slots of a row's chunks whose groups are coded.
    live: &'a [u8; 128],
}

impl<T: Lanes> Encoder<'_, T> {
    /// # Safety
    /// As [`quantize`]; BITS is at most 8.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn run<const BITS: usize>(&self, ahead: &mut Prefetch) {
        // SAFETY: ROWS is what the width asks for; the rest is the caller's promise.
        unsafe {
            match rows_of_chunk(self.shape.padded_width()) {
                1 => self.rows::<BITS, 1>(ahead),
                2 => self.rows::<BITS, 2>(ahead),
                _ => self.rows::<BITS, 4>(ahead),
            }
        }
    }

    /// # Safety
    /// As [`quantize`]; BITS is at most 8, ROWS is [`rows_of_chunk`] of the width.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn rows<const BITS: usize, const ROWS: usize>(&self, ahead: &mut Prefetch) {
        let shape = self.shape;
        let quota = ROWS * ahead.quantize_quota();
        let full = [0, 32, 64, 96].map(|column| lanes(ROWS, ROWS, shape.width, column) == [8; 4]);
        for r in (0..shape.rows).step_by(ROWS) {
            fetch(ahead, quota);
            let left = shape.rows - r;
            for (column, full) in (0..shape.width).step_by(32).zip(full) {
                // SAFETY: full chunks have 32 elements, the lanes of others are elements; both are inside `src`.
                unsafe {
                    if full && left >= ROWS {
                        self.chunk::<BITS, ROWS, true>(r, column, [8; 4]);
                    } else {
                        self.chunk::<BITS, ROWS, false>(
                            r,
                            column,
                            lanes(ROWS, left, shape.width, column),
                        );
                    }
                }
            }
        }
        let (end, limit) = (shape.end_slot() / 8, plane_len(shape.end_slot()));
        for k in 0..BITS {
            // SAFETY: end <= limit, and a plane of the buffer has `limit` bytes.
            unsafe {
                self.out
                    .add(k * PLANE_STRIDE + end)
                    .write_bytes(0, limit - end)
            };
        }
    }

    /// # Safety
    /// As [`Encoder::rows`]; `lanes` are elements of the row group; FULL only where all are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn chunk<const BITS: usize, const ROWS: usize, const FULL: bool>(
        &self,
        r: usize,
        column: usize,
        lanes: [usize; 4],
    ) {
        let shape = self.shape;
        let tile_row = shape.first_row + r;
        let magic = _mm256_set1_ps(8_388_608.0);
        let mut w = [_mm256_setzero_si256(); 4];
        for (k, w) in w.iter_mut().enumerate() {
            let (row, c) = place(ROWS, k);
            // SAFETY: readable in the lanes, by the caller; the columns of a chunk are at most 96 + 24.
            unsafe {
                let from = self.src.wrapping_add((r + row) * shape.pitch + column + c);
                let x = if FULL || lanes[k] == 8 {
                    T::load(from)
                } else {
                    T::load_first(lanes[k], from)
                };
                let t = _mm256_sub_ps(x, self.m.at(column + c));
                *w = _mm256_castps_si256(_mm256_fmadd_ps(t, self.inv.at(column + c), magic));
            }
        }
        let step = (tile_row * shape.row_steps() + column / 32) as u32;
        let dither = if self.random {
            dither::<ROWS>(self.key, step)
        } else {
            _mm256_set1_epi8(128_u8 as i8)
        };
        // A code and its fraction are the low 16 bits of a lane: two vectors fit one, and the dither's carry cannot leave 16 bits.
        let ac = _mm256_blend_epi16::<0xAA>(w[0], _mm256_slli_epi32::<16>(w[2]));
        let bd = _mm256_blend_epi16::<0xAA>(w[1], _mm256_slli_epi32::<16>(w[3]));
        let ac = _mm256_add_epi16(ac, _mm256_and_si256(dither, _mm256_set1_epi16(0xff)));
        let bd = _mm256_add_epi16(bd, _mm256_srli_epi16::<8>(dither));
        let codes = _mm256_or_si256(
            _mm256_srli_epi16::<8>(ac),
            _mm256_and_si256(bd, _mm256_set1_epi16(0xff00_u16 as i16)),
        );
        // Slot order: 4 x 4 bytes within 128-bit halves, then the halves' parts.
        let within = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
        ));
        let codes = _mm256_shuffle_epi8(codes, within);
        let codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        // SAFETY: `column` is 0, 32, 64 or 96, and the array has 128 bytes.
        let live = unsafe { _mm256_loadu_si256(self.live.as_ptr().add(column).cast()) };
        let codes = _mm256_and_si256(codes, live);
        // Slots of rows behind the group's last.
        let present = if FULL || ROWS == 1 {
            !0
        } else {
            !0u32 >> (32 - 32 / ROWS * (shape.rows - r).min(ROWS))
        };
        let (at, limit) = (
            (tile_row * shape.padded_width() + column) / 8,
            plane_len(shape.end_slot()),
        );
        // The top bit of each byte is its bit of the plane; the others follow by doubling.
        let mut top = _mm256_sll_epi16(codes, _mm_cvtsi32_si128(8 - BITS as i32));
        for k in (0..BITS).rev() {
            let bits = _mm256_movemask_epi8(top) as u32 & present;
            // SAFETY: a plane of the buffer has `limit` bytes, k is below 8, and no byte from `limit` on is written.
            unsafe { write_bits(self.out.add(k * PLANE_STRIDE + at), bits, limit - at) };
            top = _mm256_add_epi8(top, top);
        }
    }
}

/// Writes the first `room` (more counts as 4) bytes of `bits`.
///
/// # Safety
/// `at` is writable for as many bytes.
#[inline]
unsafe fn write_bits(at: *mut u8, bits: u32, room: usize) {
    // SAFETY: writable, by the caller.
    unsafe {
        if room >= 4 {
            at.cast::<u32>().write_unaligned(bits);
        } else {
            at.copy_from_nonoverlapping(bits.to_le_bytes().as_ptr(), room);
        }
    }
}

/// Values of a row group.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::dequantize_cols`] checks them.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) unsafe fn dequantize<T: Lanes>(
    planes: &PlaneSrc<'_>,
    shape: &ColumnShape,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    stream: bool,
    dst: &mut [T],
) {
    // Streamed stores want whole lines.
    let lines = (dst.as_ptr() as usize).is_multiple_of(64)
        && (shape.pitch * size_of::<T>()).is_multiple_of(64);
    let decoder = Decoder {
        planes,
        bits: params.bits,
        shape: *shape,
        c0: &Padded::new(c0),
        step: &Padded::new(step),
        key: params.key,
        dithered: params.rounding == Rounding::Dither,
        dst: dst.as_mut_ptr(),
        clamp: may_overflow::<T>(c0, step),
        stream: stream && lines,
    };
    // SAFETY: ROWS is what the width asks for; the rest is the caller's promise.
    unsafe {
        match rows_of_chunk(shape.padded_width()) {
            1 => decoder.rows::<1>(),
            2 => decoder.rows::<2>(),
            _ => decoder.rows::<4>(),
        }
    }
}

/// How many rows ahead lines are fetched that values which are not streamed go to: hardware prefetchers do not follow pieces of rows.
const FETCH_ROWS: usize = 8;

/// What the chunks of a row group share.
struct Decoder<'a, T> {
    planes: &'a PlaneSrc<'a>,
    bits: usize,
    shape: ColumnShape,
    c0: &'a Padded,
    step: &'a Padded,
    key: Key,
    dithered: bool,
    dst: *mut T,
    clamp: bool,
    /// Whether values go past the caches.
    stream: bool,
}

impl<T: Lanes> Decoder<'_, T> {
    /// # Safety
    /// As [`dequantize`]; ROWS is [`rows_of_chunk`] of the width.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn rows<const ROWS: usize>(&self) {
        let shape = self.shape;
        let full = [0, 32, 64, 96].map(|column| lanes(ROWS, ROWS, shape.width, column) == [8; 4]);
        for r in (0..shape.rows).step_by(ROWS) {
            if !self.stream && r + FETCH_ROWS < shape.rows {
                fetch_row(
                    self.dst.wrapping_add((r + FETCH_ROWS) * shape.pitch),
                    shape.width,
                );
            }
            let left = shape.rows - r;
            for (column, full) in (0..shape.width).step_by(32).zip(full) {
                // SAFETY: full chunks have 32 elements, the lanes of others are elements; both are inside `dst`.
                unsafe {
                    if full && left >= ROWS {
                        self.chunk::<ROWS, true>(r, column, [8; 4]);
                    } else {
                        self.chunk::<ROWS, false>(
                            r,
                            column,
                            lanes(ROWS, left, shape.width, column),
                        );
                    }
                }
            }
        }
        if self.stream {
            // Other threads see streamed stores only in order behind this.
            _mm_sfence();
        }
    }

    /// # Safety
    /// As [`Decoder::rows`]; `lanes` are elements of the row group; FULL only where all are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn chunk<const ROWS: usize, const FULL: bool>(
        &self,
        r: usize,
        column: usize,
        lanes: [usize; 4],
    ) {
        let shape = self.shape;
        let tile_row = shape.first_row + r;
        let at = (tile_row * shape.padded_width() + column) / 8;
        // Lane i takes bit i of each byte of 32 plane bits: byte b of it is slot 8 b + i.
        let bit = _mm256_sllv_epi32(
            _mm256_set1_epi32(0x0101_0101),
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        );
        let mut codes = _mm256_setzero_si256();
        for k in (0..self.bits).rev() {
            // SAFETY: plane k is there and has `plane_bytes` bytes, of which byte `at` holds a slot of the group.
            let bits = unsafe {
                read_bits(
                    self.planes.as_ptr().add(k * self.planes.stride() + at),
                    self.planes.plane_bytes() - at,
                )
            };
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_set1_epi32(bits as i32), bit), bit);
            codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), set);
        }
        let step = (tile_row * shape.row_steps() + column / 32) as u32;
        let dither = if self.dithered {
            dither::<ROWS>(self.key, step)
        } else {
            _mm256_setzero_si256()
        };
        // 256 code + 255 - dither is not negative and fits 16 bits; 255 less is what the value wants.
        let rest = _mm256_xor_si256(dither, _mm256_set1_epi8(-1));
        let low_bytes = _mm256_set1_epi16(0xff);
        let ac = _mm256_or_si256(
            _mm256_slli_epi16::<8>(codes),
            _mm256_and_si256(rest, low_bytes),
        );
        let bd = _mm256_or_si256(
            _mm256_andnot_si256(low_bytes, codes),
            _mm256_srli_epi16::<8>(rest),
        );
        // As the low bits of 2^23 they are floats; the subtraction is exact.
        let magic = _mm256_set1_epi32(0x4b00_0000);
        let fractions = [
            _mm256_blend_epi16::<0xAA>(ac, magic),
            _mm256_blend_epi16::<0xAA>(bd, magic),
            _mm256_or_si256(_mm256_srli_epi32::<16>(ac), magic),
            _mm256_or_si256(_mm256_srli_epi32::<16>(bd), magic),
        ];
        let mut values = [_mm256_setzero_ps(); 4];
        for (k, (fraction, value)) in fractions.into_iter().zip(&mut values).enumerate() {
            let (_, c) = place(ROWS, k);
            let fraction = _mm256_sub_ps(
                _mm256_castsi256_ps(fraction),
                _mm256_set1_ps(8_388_608.0 + 255.0),
            );
            // SAFETY: the columns of a chunk are at most 96 + 24.
            *value = unsafe {
                _mm256_fmadd_ps(fraction, self.step.at(column + c), self.c0.at(column + c))
            };
        }
        let to = self.dst.wrapping_add(r * shape.pitch + column);
        if FULL && ROWS == 1 {
            // SAFETY: all 32 elements are writable, by the caller; where values are streamed, rows begin lines and so do chunks of 32.
            unsafe { T::store_unit(to, values, self.clamp, self.stream) };
            return;
        }
        for (k, value) in values.into_iter().enumerate() {
            let (row, c) = place(ROWS, k);
            let to = to.wrapping_add(row * shape.pitch + c);
            // SAFETY: writable in the lanes, by the caller.
            unsafe {
                if lanes[k] == 8 {
                    T::store(to, value)
                } else {
                    T::store_first(lanes[k], to, value)
                }
            };
        }
    }
}

/// The first 4 bytes, or as many as there are; 0 behind.
///
/// # Safety
/// `at` is readable for `room` bytes; at most 4 of them are read.
#[inline]
unsafe fn read_bits(at: *const u8, room: usize) -> u32 {
    // SAFETY: readable, by the caller.
    unsafe {
        if room >= 4 {
            return at.cast::<u32>().read_unaligned();
        }
        let mut bytes = [0; 4];
        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), room);
        u32::from_le_bytes(bytes)
    }
}
