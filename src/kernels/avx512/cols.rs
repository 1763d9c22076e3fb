//! Row groups of a channel tile. A *chunk* is 64 consecutive slots: 64 columns of a row, or narrow rows one behind the other (2 of 32
//! columns, 4 of 16), so that narrow tensors fill the vectors too.

use std::arch::x86_64::*;

use super::lanes::{MaskedLanes, fetch, fetch_row, first};
use super::{permutation, words};
use crate::kernels::types::{
    CodeParams, ColumnShape, Columns, PLANE_STRIDE, PlaneBuf, PlaneSrc, Rounding,
};
use crate::kernels::{Key, Prefetch, may_overflow, plane_len};

/// Minimum and maximum of each column.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::range_cols`] checks them.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) unsafe fn range<T: MaskedLanes>(
    columns: &Columns<'_, T>,
    skip_zeros: bool,
    ahead: &mut Prefetch,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    let out = (out_min, out_max);
    // SAFETY: N vectors cover the width, which is at most 128; the rest is the caller's promise.
    unsafe {
        match columns.shape.width.div_ceil(16) {
            1 => range_n::<T, 1>(columns, skip_zeros, ahead, out),
            2 => range_n::<T, 2>(columns, skip_zeros, ahead, out),
            3 => range_n::<T, 3>(columns, skip_zeros, ahead, out),
            4 => range_n::<T, 4>(columns, skip_zeros, ahead, out),
            5 => range_n::<T, 5>(columns, skip_zeros, ahead, out),
            6 => range_n::<T, 6>(columns, skip_zeros, ahead, out),
            7 => range_n::<T, 7>(columns, skip_zeros, ahead, out),
            _ => range_n::<T, 8>(columns, skip_zeros, ahead, out),
        }
    }
}

/// # Safety
/// As [`range`]; the width is more than 16 * (N - 1) and at most 16 * N.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn range_n<T: MaskedLanes, const N: usize>(
    columns: &Columns<'_, T>,
    skip_zeros: bool,
    ahead: &mut Prefetch,
    (out_min, out_max): (&mut [f32], &mut [f32]),
) {
    let ColumnShape {
        pitch, rows, width, ..
    } = columns.shape;
    let tail = first(width - 16 * (N - 1));
    let quota = ahead.range_quota();
    let mut lo = [_mm512_set1_ps(f32::INFINITY); N];
    let mut hi = [_mm512_set1_ps(f32::NEG_INFINITY); N];
    let mut unordered: __mmask16 = 0;
    for r in 0..rows {
        fetch(ahead, quota);
        let mut x = [_mm512_setzero_ps(); N];
        // SAFETY: row r's `width` elements are inside `src`; the last vector is masked to them.
        unsafe {
            let row = columns.src.as_ptr().add(r * pitch);
            for (k, x) in x[..N - 1].iter_mut().enumerate() {
                *x = T::load(row.add(16 * k));
            }
            x[N - 1] = T::load_masked(tail, row.add(16 * (N - 1)));
        }
        for k in 0..N {
            // One comparison finds a NaN in either of two vectors.
            if k % 2 == 0 {
                unordered |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x[k], x[(k + 1).min(N - 1)]);
            }
            let counts = if skip_zeros {
                _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x[k], _mm512_setzero_ps())
            } else {
                !0
            };
            lo[k] = _mm512_mask_min_ps(lo[k], counts, lo[k], x[k]);
            hi[k] = _mm512_mask_max_ps(hi[k], counts, hi[k], x[k]);
        }
    }
    for k in 0..N {
        let mask = first(width - 16 * k);
        let mut bad = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(lo[k], _mm512_set1_ps(f32::NEG_INFINITY))
            | _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(hi[k], _mm512_set1_ps(f32::INFINITY));
        if unordered != 0 {
            // SAFETY: the columns in `mask` are columns of the group.
            bad |= unsafe { nan_columns(columns, 16 * k, mask) };
        }
        let nan = _mm512_set1_ps(f32::NAN);
        // Adding 0 turns -0 into +0.
        let lo = _mm512_mask_blend_ps(bad, _mm512_add_ps(lo[k], _mm512_setzero_ps()), nan);
        let hi = _mm512_mask_blend_ps(bad, _mm512_add_ps(hi[k], _mm512_setzero_ps()), nan);
        // SAFETY: the outputs hold `width` numbers, and `mask` ends there.
        unsafe {
            _mm512_mask_storeu_ps(out_min.as_mut_ptr().add(16 * k), mask, lo);
            _mm512_mask_storeu_ps(out_max.as_mut_ptr().add(16 * k), mask, hi);
        }
    }
}

/// Which of the columns `c..` in `mask` hold a NaN.
///
/// # Safety
/// As [`range`]; `mask` has columns of the group only.
#[cold]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn nan_columns<T: MaskedLanes>(
    columns: &Columns<'_, T>,
    c: usize,
    mask: __mmask16,
) -> __mmask16 {
    let mut nan = 0;
    for r in 0..columns.shape.rows {
        // SAFETY: the columns in the mask are inside row r, which is inside `src`.
        let x =
            unsafe { T::load_masked(mask, columns.src.as_ptr().add(r * columns.shape.pitch + c)) };
        nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    }
    nan
}

/// How slots map to memory: narrow rows share a chunk of 64 slots. Wide rows take one or two chunks.
const fn rows_of_chunk(padded_width: usize) -> usize {
    match padded_width {
        16 => 4,
        32 => 2,
        _ => 1,
    }
}

/// Where vector `k` of a chunk begins: (row, column) relative to the chunk's.
#[inline]
const fn place(rows_of_chunk: usize, k: usize) -> (usize, usize) {
    match rows_of_chunk {
        4 => (k, 0),
        2 => (k / 2, 16 * (k % 2)),
        _ => (0, 16 * k),
    }
}

/// The lanes of a chunk's four vectors that are elements, for a chunk that has `rows` rows left and begins at `column`.
#[inline]
fn lanes(rows_of_chunk: usize, rows: usize, width: usize, column: usize) -> [__mmask16; 4] {
    std::array::from_fn(|k| {
        let (r, c) = place(rows_of_chunk, k);
        if r < rows {
            first(width.saturating_sub(column + c))
        } else {
            0
        }
    })
}

/// Parameters of 128 columns, 0 behind the last.
#[repr(align(64))]
struct Padded([f32; 128]);

impl Padded {
    #[inline]
    fn new(values: &[f32]) -> Padded {
        let mut padded = Padded([0.0; 128]);
        padded.0[..values.len()].copy_from_slice(values);
        padded
    }

    /// 16 parameters from column `c` on.
    ///
    /// # Safety
    /// `c` is at most 112.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn at(&self, c: usize) -> __m512 {
        debug_assert!(c <= 112);
        // SAFETY: 16 of the 128 numbers, by the caller.
        unsafe { _mm512_loadu_ps(self.0.as_ptr().add(c)) }
    }
}

/// Index of the dither byte of element `e` of the first or second of the two steps that a vector of words serves.
const fn dither_byte(step: usize, e: usize) -> u8 {
    (4 * (8 * step + e % 8) + e / 8) as u8
}

/// Codes of a row group as planes.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::quantize_cols`] checks them.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) unsafe fn quantize<T: MaskedLanes>(
    columns: &Columns<'_, T>,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    ahead: &mut Prefetch,
    planes: &mut PlaneBuf,
) {
    let shape = columns.shape;
    let rows = rows_of_chunk(shape.padded_width());
    let (padded, inverse) = (Padded::new(m), Padded::new(inv));
    // Groups without parameters (inv = 0) have code 0, whatever their elements.
    let mut live = [0u64; 2];
    for (c, &inv) in inv.iter().enumerate() {
        for r in 0..rows {
            let slot = r * shape.padded_width() % 64 + c;
            live[slot / 64] |= u64::from(inv != 0.0) << (slot % 64);
        }
    }
    let encoder = Encoder {
        src: columns.src.as_ptr(),
        shape,
        m: &padded,
        inv: &inverse,
        key: params.key,
        random: params.rounding != Rounding::Nearest,
        out: planes.as_mut_ptr(),
        live,
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
    /// Slots of a row's two chunks whose groups are coded.
    live: [u64; 2],
}

impl<T: MaskedLanes> Encoder<'_, T> {
    /// # Safety
    /// As [`quantize`]; BITS is at most 8.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
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
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn rows<const BITS: usize, const ROWS: usize>(&self, ahead: &mut Prefetch) {
        let shape = self.shape;
        let quota = ROWS * ahead.quantize_quota();
        let full = [0, 64].map(|column| lanes(ROWS, ROWS, shape.width, column) == [!0; 4]);
        for r in (0..shape.rows).step_by(ROWS) {
            fetch(ahead, quota);
            for (i, column) in [0, 64].into_iter().enumerate() {
                if column >= shape.width {
                    break;
                }
                // SAFETY: full chunks have 64 elements, the lanes of others are elements; both are inside `src`.
                unsafe {
                    if full[i] && r + ROWS <= shape.rows {
                        self.chunk::<BITS, ROWS, true>(r, column, [!0; 4]);
                    } else {
                        self.chunk::<BITS, ROWS, false>(
                            r,
                            column,
                            lanes(ROWS, shape.rows - r, shape.width, column),
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
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn chunk<const BITS: usize, const ROWS: usize, const FULL: bool>(
        &self,
        r: usize,
        column: usize,
        lanes: [__mmask16; 4],
    ) {
        let shape = self.shape;
        let tile_row = shape.first_row + r;
        let magic = _mm512_set1_ps(8_388_608.0);
        let mut w = [_mm512_setzero_si512(); 4];
        for (k, w) in w.iter_mut().enumerate() {
            let (row, c) = place(ROWS, k);
            // SAFETY: readable in the lanes, by the caller; the columns of a chunk are at most 64 + 48.
            unsafe {
                let from = self.src.wrapping_add((r + row) * shape.pitch + column + c);
                let x = if FULL {
                    T::load(from)
                } else {
                    T::load_masked(lanes[k], from)
                };
                *w = _mm512_castps_si512(_mm512_fmadd_ps(
                    _mm512_sub_ps(x, self.m.at(column + c)),
                    self.inv.at(column + c),
                    magic,
                ));
            }
        }
        let dither = self.dither::<ROWS>((tile_row * shape.row_steps() + column / 32) as u32);
        // A code and its fraction are the low 16 bits of a lane: two vectors fit one, and the dither's carry cannot leave 16 bits.
        // 0xEA: (first and second) or third.
        let low_half = _mm512_set1_epi32(0xffff);
        let ab = _mm512_ternarylogic_epi32::<0xEA>(w[0], low_half, _mm512_slli_epi32::<16>(w[1]));
        let cd = _mm512_ternarylogic_epi32::<0xEA>(w[2], low_half, _mm512_slli_epi32::<16>(w[3]));
        let (ab, cd) = (
            _mm512_add_epi16(ab, dither[0]),
            _mm512_add_epi16(cd, dither[1]),
        );
        // Bytes of dword i: element i of vectors 0, 2, 1, 3. Then slot order.
        let high_byte = _mm512_set1_epi16(0xff00_u16 as i16);
        let codes = _mm512_ternarylogic_epi32::<0xEA>(cd, high_byte, _mm512_srli_epi16::<8>(ab));
        const ORDER: [u8; 64] = {
            let mut order = [0; 64];
            let mut i = 0;
            while i < 64 {
                order[i] = (4 * (i % 16) + [0, 2, 1, 3][i / 16]) as u8;
                i += 1;
            }
            order
        };
        let codes = _mm512_permutexvar_epi8(permutation(&ORDER), codes);
        let mut live = self.live[column / 64];
        if !FULL {
            live &= (0..4).fold(0, |slots, k| slots | u64::from(lanes[k]) << (16 * k));
        }
        let (at, limit) = (
            (tile_row * shape.padded_width() + column) / 8,
            plane_len(shape.end_slot()),
        );
        for k in 0..BITS {
            let bits = _mm512_mask_test_epi8_mask(live, codes, _mm512_set1_epi8((1u8 << k) as i8));
            // SAFETY: a plane of the buffer has `limit` bytes, k is below 8, and no byte from `limit` on is written.
            unsafe { write_bits(self.out.add(k * PLANE_STRIDE + at), bits, limit - at) };
        }
    }

    /// 16-bit dither of a chunk's vectors (0 and 1 in the low and high halves of dwords, then 2 and 3); the chunk begins at `step`.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn dither<const ROWS: usize>(&self, step: u32) -> [__m512i; 2] {
        const PAIRS: [[u8; 64]; 2] = dither_pairs(false);
        const PAIR_OF_STEPS: [u8; 64] = dither_pairs(true)[0];
        if !self.random {
            return [_mm512_set1_epi16(128); 2];
        }
        let low_bytes = 0x5555_5555_5555_5555;
        let first = words(self.key, step);
        let (other, pairs) = if ROWS == 4 {
            (words(self.key, step.wrapping_add(2)), [&PAIR_OF_STEPS; 2])
        } else {
            (first, [&PAIRS[0], &PAIRS[1]])
        };
        [
            _mm512_maskz_permutexvar_epi8(low_bytes, permutation(pairs[0]), first),
            _mm512_maskz_permutexvar_epi8(low_bytes, permutation(pairs[1]), other),
        ]
    }
}

/// Byte indices that bring dither bytes from the words of two steps to the low bytes of 16-bit halves. With `two_rows` the low halves are
/// the first 16 elements of one step and the high halves those of the next; else pair p is step p, elements 0-15 low, 16-31 high.
const fn dither_pairs(two_rows: bool) -> [[u8; 64]; 2] {
    let mut pairs = [[0; 64]; 2];
    let mut at = 0;
    while at < 64 {
        let (p, i, half) = (at / 32, at / 2 % 16, at % 2);
        pairs[p][4 * i + 2 * half] = if two_rows {
            dither_byte(half, i)
        } else {
            dither_byte(p, 16 * half + i)
        };
        at += 1;
    }
    pairs
}

/// Writes the first `room` (more counts as 8) bytes of `bits`.
///
/// # Safety
/// `at` is writable for as many bytes.
#[inline]
unsafe fn write_bits(at: *mut u8, bits: u64, room: usize) {
    // SAFETY: writable, by the caller.
    unsafe {
        if room >= 8 {
            at.cast::<u64>().write_unaligned(bits);
        } else {
            at.copy_from_nonoverlapping(bits.to_le_bytes().as_ptr(), room);
        }
    }
}

/// Values of a row group.
///
/// # Safety
/// The CPU has this level's features; arguments as [`super::KernelTable::dequantize_cols`] checks them.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(super) unsafe fn dequantize<T: MaskedLanes>(
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

impl<T: MaskedLanes> Decoder<'_, T> {
    /// # Safety
    /// As [`dequantize`]; ROWS is [`rows_of_chunk`] of the width.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn rows<const ROWS: usize>(&self) {
        let shape = self.shape;
        let full = [0, 64].map(|column| lanes(ROWS, ROWS, shape.width, column) == [!0; 4]);
        for r in (0..shape.rows).step_by(ROWS) {
            if !self.stream && r + FETCH_ROWS < shape.rows {
                fetch_row(
                    self.dst.wrapping_add((r + FETCH_ROWS) * shape.pitch),
                    shape.width,
                );
            }
            for (i, column) in [0, 64].into_iter().enumerate() {
                if column >= shape.width {
                    break;
                }
                // SAFETY: full chunks have 64 elements, the lanes of others are elements; both are inside `dst`.
                unsafe {
                    if full[i] && r + ROWS <= shape.rows {
                        self.chunk::<ROWS, true>(r, column, [!0; 4]);
                    } else {
                        self.chunk::<ROWS, false>(
                            r,
                            column,
                            lanes(ROWS, shape.rows - r, shape.width, column),
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
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn chunk<const ROWS: usize, const FULL: bool>(
        &self,
        r: usize,
        column: usize,
        lanes: [__mmask16; 4],
    ) {
        const OF_CODE: [[u8; 64]; 4] = value_indices(1)[0];
        const OF_DITHER: [[[u8; 64]; 4]; 3] = value_indices(0);
        let shape = self.shape;
        let tile_row = shape.first_row + r;
        let at = (tile_row * shape.padded_width() + column) / 8;
        let mut codes = _mm512_setzero_si512();
        for k in 0..self.bits {
            // SAFETY: plane k is there and has `plane_bytes` bytes, of which byte `at` holds a slot of the group.
            let bits = unsafe {
                read_bits(
                    self.planes.as_ptr().add(k * self.planes.stride() + at),
                    self.planes.plane_bytes() - at,
                )
            };
            codes = _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8((1u8 << k) as i8));
        }
        let step = (tile_row * shape.row_steps() + column / 32) as u32;
        let (first, other) = if self.dithered {
            let first = words(self.key, step);
            (
                first,
                if ROWS == 4 {
                    words(self.key, step.wrapping_add(2))
                } else {
                    first
                },
            )
        } else {
            (_mm512_setzero_si512(), _mm512_setzero_si512())
        };
        let mut values = [_mm512_setzero_ps(); 4];
        for (k, value) in values.iter_mut().enumerate() {
            let (_, c) = place(ROWS, k);
            let code = _mm512_maskz_permutexvar_epi8(
                0x2222_2222_2222_2222,
                permutation(&OF_CODE[k]),
                codes,
            );
            let of_dither = permutation(&OF_DITHER[if ROWS == 4 { 2 } else { 1 }][k]);
            let byte = _mm512_maskz_permutexvar_epi8(
                0x1111_1111_1111_1111,
                of_dither,
                if k < 2 { first } else { other },
            );
            let fraction = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, byte));
            // SAFETY: the columns of a chunk are at most 64 + 48.
            *value = unsafe {
                _mm512_fmadd_ps(fraction, self.step.at(column + c), self.c0.at(column + c))
            };
        }
        let to = self.dst.wrapping_add(r * shape.pitch + column);
        if FULL && ROWS == 1 {
            // SAFETY: all 64 elements are writable, by the caller; where values are streamed, rows begin lines and so do chunks of 64.
            unsafe { T::store_unit(to, values, self.clamp, self.stream) };
            return;
        }
        for (k, value) in values.into_iter().enumerate() {
            let (row, c) = place(ROWS, k);
            let to = to.wrapping_add(row * shape.pitch + c);
            // SAFETY: writable in the lanes, by the caller; where FULL, those are all 16.
            unsafe {
                if FULL {
                    T::store(to, value);
                } else {
                    T::store_masked(to, lanes[k], value);
                }
            }
        }
    }
}

/// Byte indices into dword i of vector k, for byte `byte` of the dword: of code 16 k + i; of its dither byte where a chunk is two steps of
/// 32 elements; of its dither byte where it is four half steps, two to a vector of words.
const fn value_indices(byte: usize) -> [[[u8; 64]; 4]; 3] {
    let mut indices = [[[0; 64]; 4]; 3];
    let mut slot = 0;
    while slot < 64 {
        let (k, i) = (slot / 16, slot % 16);
        indices[0][k][4 * i + byte] = slot as u8;
        indices[1][k][4 * i + byte] = dither_byte(k / 2, 16 * (k % 2) + i);
        indices[2][k][4 * i + byte] = dither_byte(k % 2, i);
        slot += 1;
    }
    indices
}

/// The first 8 bytes, or as many as there are; 0 behind.
///
/// # Safety
/// `at` is readable for `room` bytes; at most 8 of them are read.
#[inline]
unsafe fn read_bits(at: *const u8, room: usize) -> u64 {
    // SAFETY: readable, by the caller.
    unsafe {
        if room >= 8 {
            return at.cast::<u64>().read_unaligned();
        }
        let mut bytes = [0; 8];
        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), room);
        u64::from_le_bytes(bytes)
    }
}
