//! The width that an attention's q and k need.
//!
//! An error of the logits acts through `exp`, so below a certain width the error of the gradient explodes. With s the
//! step of each operand at b bits and |q|, |k| the largest row norms, the logits' standard deviation is at most
//! `sqrt((|q|^2 s_k^2 + |k|^2 s_q^2) / (12 d))`, d the head size; the guard is the smallest width that keeps it at 0.5
//! or below. For products that are scaled before (`bmm`), d is 1.

/// Largest standard deviation of a logit that is accepted.
const MAX_LOGIT_DEVIATION: f64 = 0.5;

/// What one operand contributes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    /// Largest squared norm of a row along the contracted dimension.
    pub(crate) max_norm_squared: f64,
    /// Mean over groups of the squared range.
    pub(crate) mean_range_squared: f64,
}

/// The smallest width from `least` to 8 that keeps the logits' deviation in bounds; `None` where none does.
pub(crate) fn width(q: Operand, k: Operand, head_size: f64, least: u8) -> Option<u8> {
    (least..=8).find(|&bits| {
        let levels = f64::from((1u32 << bits) - 1);
        let step_q = q.mean_range_squared / (levels * levels);
        let step_k = k.mean_range_squared / (levels * levels);
        let variance =
            (q.max_norm_squared * step_k + k.max_norm_squared * step_q) / (12.0 * head_size);
        variance.sqrt() <= MAX_LOGIT_DEVIATION
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sharper_attention_needs_more_bits() {
        let at = |scale: f64| Operand {
            max_norm_squared: 64.0 * scale * scale,
            mean_range_squared: 25.0 * scale * scale,
        };
        let flat = width(at(0.3), at(0.3), 64.0, 1);
        let sharp = width(at(3.0), at(3.0), 64.0, 1);
        assert!(flat < sharp, "{flat:?} {sharp:?}");
    }

    #[test]
    fn no_width_does_for_huge_logits() {
        let huge = Operand {
            max_norm_squared: 1e9,
            mean_range_squared: 1e7,
        };
        assert_eq!(width(huge, huge, 64.0, 2), None);
    }
}
