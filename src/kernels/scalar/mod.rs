//! The portable kernels: the definition of every result. Written to be read; the other levels are tested against them bit for bit.
//!
//! Functions require what the methods of the same name in `super` check; breaking it panics here, so all of them are safe.

pub(super) mod cols;
pub(super) mod planes;
pub(super) mod rows;

use super::types::{CodeParams, Rounding};

/// 2^23: adding it to a number in 0..2^16 leaves the number's integer part in the low bits.
const MAGIC: f32 = 8_388_608.0;

/// The code of one element with dither byte `r` (128 when rounding to nearest).
fn code(x: f32, m: f32, inv: f32, r: u32) -> u32 {
    if inv == 0.0 {
        return 0;
    }
    let w = (x - m).mul_add(inv, MAGIC);
    (((w.to_bits() & 0xffff) + r) >> 8) & 0xff
}

/// What is added before the code is cut off.
fn encode_dither(params: &CodeParams, step: u32, element: u32) -> u32 {
    match params.rounding {
        Rounding::Dither | Rounding::Stochastic => params.key.dither(step, element),
        Rounding::Nearest => 128,
    }
}

/// The value of one code.
fn value(code: u32, params: &CodeParams, step: u32, element: u32, scale: f32, c0: f32) -> f32 {
    let r = match params.rounding {
        Rounding::Dither => params.key.dither(step, element),
        Rounding::Stochastic | Rounding::Nearest => 0,
    };
    ((256 * code) as f32 - r as f32).mul_add(scale, c0)
}

/// Minimum and maximum as values; NaN for both once a non-finite value was seen.
struct Range {
    min: f32,
    max: f32,
    finite: bool,
}

impl Range {
    const EMPTY: Range = Range {
        min: f32::INFINITY,
        max: f32::NEG_INFINITY,
        finite: true,
    };

    fn add(&mut self, x: f32, skip_zeros: bool) {
        self.finite &= x.is_finite();
        if skip_zeros && x == 0.0 {
            return;
        }
        if x < self.min {
            self.min = x;
        }
        if x > self.max {
            self.max = x;
        }
    }

    fn finish(&self) -> (f32, f32) {
        if self.finite {
            (self.min + 0.0, self.max + 0.0)
        } else {
            (f32::NAN, f32::NAN)
        }
    }
}
