//! Parameters of groups from their ranges: m, s, the factor of the encoder, and the class. `docs/format.md`, "Arithmetic".
//! Whole arrays at a time and without branches, so that the compiler uses vectors.

use super::segment::GroupClass;

/// The most groups of a block.
pub(crate) const MAX_GROUPS: usize = 1024;

/// 2^-100: a smaller step would make `256 / s` and its products leave the range of f32.
const MIN_STEP: f32 = f32::from_bits((127 - 100) << 23);
/// 2^126: beyond it, decoded values may overflow.
const MAX_MAGNITUDE: f32 = f32::from_bits((127 + 126) << 23);
/// 1 - 2^-21 keeps the largest code from rounding up to 2^bits.
const SHRINK: f32 = 1.0 - 1.0 / 2_097_152.0;

/// The largest bf16 (as f32) that is not above `x`.
pub(crate) fn bf16_down(x: f32) -> f32 {
    let bits = x.to_bits();
    let away = bits & 0xffff != 0 && bits >> 31 == 1;
    f32::from_bits((bits & 0xffff_0000).wrapping_add(u32::from(away) << 16))
}

/// The smallest bf16 (as f32) that is not below `x >= 0`.
pub(crate) fn bf16_up(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits & 0xffff_0000).wrapping_add(u32::from(bits & 0xffff != 0) << 16))
}

/// Whether bf16 is too coarse for some group's minimum: its ulp, 2^(e-7), is above R/16.
pub(crate) fn needs_m_f32(min: &[f32], max: &[f32]) -> bool {
    let mut any = false;
    for (&lo, &hi) in min.iter().zip(max) {
        let power = f32::from_bits(lo.to_bits() & 0x7f80_0000);
        // Empty groups have lo = +inf, hi = -inf; non-finite ones NaN: both compare false.
        any |= (lo < hi) & (power > 8.0 * (hi - lo));
    }
    any
}

/// Parameters of up to [`MAX_GROUPS`] groups, one array each.
pub(crate) struct Params {
    pub(crate) min: [f32; MAX_GROUPS],
    pub(crate) max: [f32; MAX_GROUPS],
    pub(crate) m: [f32; MAX_GROUPS],
    pub(crate) s: [f32; MAX_GROUPS],
    pub(crate) inv: [f32; MAX_GROUPS],
}

impl Params {
    pub(crate) const fn new() -> Self {
        let none = [0.0; MAX_GROUPS];
        Params {
            min: none,
            max: none,
            m: none,
            s: none,
            inv: none,
        }
    }

    /// Parameters of the groups `range` from `min` and `max`. Groups that are not coded get `inv` 0; says whether there is one.
    pub(crate) fn derive(
        &mut self,
        range: std::ops::Range<usize>,
        bits: usize,
        m_f32: bool,
    ) -> bool {
        let levels = ((1u32 << bits) - 1) as f32;
        let limit = MAX_MAGNITUDE / (1u32 << bits) as f32;
        let (min, max) = (&self.min[range.clone()], &self.max[range.clone()]);
        let (m, s, inv) = (
            &mut self.m[range.clone()],
            &mut self.s[range.clone()],
            &mut self.inv[range],
        );
        let mut all = true;
        for ((((&lo, &hi), m), s), inv) in min.iter().zip(max).zip(m).zip(s).zip(inv) {
            *m = if m_f32 { lo } else { bf16_down(lo) };
            *s = bf16_up((hi - *m) / levels);
            let coded = (lo < hi) & (*s >= MIN_STEP) & (*s <= limit) & (m.abs() <= MAX_MAGNITUDE);
            *inv = if coded { 256.0 / *s * SHRINK } else { 0.0 };
            all &= coded;
        }
        !all
    }

    /// What group `g` is, after [`Params::derive`]; a constant group's value is `min`, 0 where all elements are skipped zeros.
    pub(crate) fn class(&mut self, g: usize) -> GroupClass {
        if self.inv[g] != 0.0 {
            GroupClass::Coded
        } else if self.min[g] == f32::INFINITY && self.max[g] == f32::NEG_INFINITY {
            (self.min[g], self.max[g]) = (0.0, 0.0);
            GroupClass::Constant
        } else if self.min[g] == self.max[g] {
            GroupClass::Constant
        } else {
            GroupClass::Raw
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn rounding_to_bf16_is_outward_and_tight() {
        for bits in (0..=u32::MAX).step_by(65_537 / 3) {
            let x = f32::from_bits(bits);
            if !x.is_finite() || x.abs() > bf16::MAX.to_f32() {
                continue;
            }
            let (down, near) = (bf16_down(x), bf16::from_f32(x).to_f32());
            assert!(down <= x && (near == down || near > x), "{x}");
            let up = bf16_up(x.abs());
            assert!(
                up >= x.abs() && f32::from_bits(up.to_bits().wrapping_sub(1 << 16)) < x.abs()
                    || up == x.abs(),
                "{x}"
            );
        }
    }

    #[test]
    fn offsets_want_an_f32_minimum() {
        assert!(needs_m_f32(&[1000.0], &[1000.01]));
        assert!(!needs_m_f32(&[-3.0], &[3.0]));
        assert!(!needs_m_f32(
            &[f32::INFINITY, f32::NAN, 5.0],
            &[f32::NEG_INFINITY, f32::NAN, 5.0]
        ));
    }

    #[test]
    fn the_largest_element_never_overflows_the_code() {
        let mut p = Params::new();
        for bits in 1..=8 {
            for (i, (lo, hi)) in [
                (0.0, 1.0),
                (-1.0, 1e-3),
                (1e-20, 3e-20),
                (-3e30, 2e35),
                (0.1, 0.1 + 1e-6),
            ]
            .into_iter()
            .enumerate()
            {
                for m_f32 in [false, true] {
                    (p.min[i], p.max[i]) = (lo, hi);
                    assert!(!p.derive(i..i + 1, bits, m_f32));
                    let w = (hi - p.m[i]).mul_add(p.inv[i], 8_388_608.0).to_bits() & 0x7f_ffff;
                    assert!((w + 255) >> 8 < 1 << bits, "{lo} {hi} at {bits} bits: {w}");
                }
            }
        }
    }
}
