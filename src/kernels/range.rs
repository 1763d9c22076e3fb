//! Minimum and maximum of floats by integer comparisons on their bits, shared by the SIMD levels.
//!
//! As integers, non-negative floats rise with their value and negative ones with their magnitude. So the signed maximum of a group's bits is
//! its largest value if it has a positive one, and the unsigned maximum is its smallest value if it has a negative one; infinities and NaN of
//! either sign show as maxima beyond the finite range: two operations an element, no floating-point compares, and the half types need no
//! conversion. A group of one sign needs a second pass over data that is now in the L1 cache: an unsigned minimum of `bits - bias`, with
//! the bias chosen so that what must not win wraps around to large numbers.
//!
//! 16-bit types appear here shifted to the upper half of 32 bits, which keeps all orders.

use crate::dtype::{Float, FloatType};
use crate::kernels::Element;

/// The sign bit.
const SIGN: u32 = 0x8000_0000;

/// What the maxima of a group's bits say.
pub(super) enum Found {
    /// Minimum and maximum.
    Done(f32, f32),
    /// The unsigned minimum of `bits - bias` decides, wrapping in the width of the type; [`Second::finish`] takes it.
    Second(Second),
}

/// A second pass.
#[derive(Clone, Copy)]
pub(super) struct Second {
    /// What to subtract from the bits, in 32 bits (16-bit types use the upper half; see [`Second::bias16`]).
    which: Which,
    /// The extreme that the first pass found.
    known: f32,
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    /// The smallest of non-negative values.
    Smallest,
    /// The largest of negative values (-0 included).
    Largest,
    /// The smallest of positive values among zeros.
    SmallestNonzero,
    /// The largest of negative values among zeros.
    LargestNonzero,
}

/// The bits of +inf, in the upper half for 16-bit types.
const fn infinity(dtype: FloatType) -> u32 {
    match dtype {
        FloatType::F16 => 0x7c00_0000,
        FloatType::F32 | FloatType::BF16 => 0x7f80_0000,
    }
}

/// The value of bits as this module carries them, with +0 for -0.
pub(super) fn value<T: Element>(bits: u32) -> f32 {
    let x = match T::TYPE {
        FloatType::F32 | FloatType::BF16 => f32::from_bits(bits),
        FloatType::F16 => half::f16::from_bits((bits >> 16) as u16).to_f32(),
    };
    x + 0.0
}

/// Judges a group by the signed and the unsigned maximum of its bits.
#[inline(always)]
pub(super) fn judge<T: Element>(signed_max: i32, unsigned_max: u32, skip_zeros: bool) -> Found {
    let infinity = infinity(<T as Float>::TYPE);
    if signed_max >= infinity as i32 || unsigned_max >= SIGN | infinity {
        return Found::Done(f32::NAN, f32::NAN);
    }
    let (positive, negative) = (signed_max > 0, unsigned_max > SIGN);
    match (positive, negative) {
        (true, true) => Found::Done(value::<T>(unsigned_max), value::<T>(signed_max as u32)),
        (true, false) => Found::Second(Second {
            which: if skip_zeros {
                Which::SmallestNonzero
            } else {
                Which::Smallest
            },
            known: value::<T>(signed_max as u32),
        }),
        (false, true) if skip_zeros => Found::Second(Second {
            which: Which::LargestNonzero,
            known: value::<T>(unsigned_max),
        }),
        // A +0 is the largest of negative values and zeros.
        (false, true) if signed_max == 0 => Found::Done(value::<T>(unsigned_max), 0.0),
        (false, true) => Found::Second(Second {
            which: Which::Largest,
            known: value::<T>(unsigned_max),
        }),
        (false, false) if skip_zeros => Found::Done(f32::INFINITY, f32::NEG_INFINITY),
        (false, false) => Found::Done(0.0, 0.0),
    }
}

impl Second {
    /// The bias for 32-bit types. For non-negative values (with -0 as the smallest) and for negative ones, taking the sign bit away turns
    /// signed order into unsigned order.
    pub(super) fn bias32(self) -> u32 {
        match self.which {
            Which::Smallest | Which::Largest => SIGN,
            Which::SmallestNonzero => 1,
            Which::LargestNonzero => SIGN + 1,
        }
    }

    /// The bias for 16-bit types.
    pub(super) fn bias16(self) -> u16 {
        match self.which {
            Which::Smallest | Which::Largest => 0x8000,
            Which::SmallestNonzero => 1,
            Which::LargestNonzero => 0x8001,
        }
    }

    /// Minimum and maximum from the smallest bits (the bias added back).
    pub(super) fn finish<T: Element>(self, bits: u32) -> (f32, f32) {
        match self.which {
            Which::Smallest | Which::SmallestNonzero => (value::<T>(bits), self.known),
            Which::Largest | Which::LargestNonzero => (self.known, value::<T>(bits)),
        }
    }
}
