//! The width that an attention's q and k need.
//!
//! An error of the logits acts through `exp`, so below a certain width the error of the gradient explodes. With s the
//! step of each operand at b bits and |q|, |k| the largest row norms, the logits' standard deviation is at most
//! `sqrt((|q|^2 s_k^2 + |k|^2 s_q^2) / (12 d))`, d the head size; the guard is the smallest width that keeps it at 0.5
//! or below. For products that are scaled before (`bmm`), d is 1.

use super::super::enter::enter;
use super::super::tensor;
use super::axis;
use super::consumer::Guard;
use super::encode::{Claim, layout_of, rule_bits};
use super::handle::State;
use crate::codec::{Source, measure};
use pyo3::prelude::*;

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

/// Widths of claims that a guard binds: `Some(None)` means that no width is enough.
pub(super) fn guarded_widths(
    py: Python<'_>,
    claims: &[Claim],
) -> PyResult<Vec<Option<Option<u8>>>> {
    let mut widths = vec![None; claims.len()];
    let find = |wanted: Guard| claims.iter().position(|claim| claim.rule.guard == wanted);
    let bmm: Vec<usize> = (0..claims.len())
        .filter(|&index| claims[index].rule.guard == Guard::Bmm)
        .collect();
    let pair = match (find(Guard::Query), find(Guard::Key), bmm.as_slice()) {
        (Some(q), Some(k), _) => Some((q, k, true)),
        (_, _, &[left, right]) => Some((left, right, false)),
        (_, _, &[single]) => {
            // The other operand is no activation: a plain product, at the user's width.
            let claim = &claims[single];
            widths[single] = Some(Some(rule_bits(
                &claim.item.saved.get().store,
                &claim.rule,
                0,
            )));
            None
        }
        _ => None,
    };
    let Some((q, k, scaled)) = pair else {
        return Ok(widths);
    };
    let store = &claims[q].item.saved.get().store;
    if store.config.exact
        || claims[q].item.view.float_type().is_none()
        || claims[k].item.view.float_type().is_none()
    {
        return Ok(widths);
    }
    let least = |at: usize| rule_bits(store, &claims[at].rule, claims[at].rule.plus);
    let ndim = claims[q].item.view.sizes.as_slice().len();
    // Contracted dimension: the last of q and k; of a bmm's second operand the last but one.
    let along_k = if scaled {
        ndim - 1
    } else {
        ndim.saturating_sub(2)
    };
    let head = claims[q]
        .item
        .view
        .sizes
        .as_slice()
        .last()
        .copied()
        .unwrap_or(1);
    #[expect(clippy::cast_precision_loss, reason = "head sizes are small")]
    let head = if scaled { head as f64 } else { 1.0 };
    let left = operand(py, &claims[q], ndim - 1)?;
    let right = operand(py, &claims[k], along_k)?;
    let (Some(left), Some(right)) = (left, right) else {
        return Ok(widths);
    };
    let enough = width(left, right, head, least(q).min(least(k)));
    for at in [q, k] {
        widths[at] = Some(enough.map(|bits| bits.max(least(at))));
    }
    Ok(widths)
}

/// Ranges and norms of one operand; `None` where it is not finite (every group with it is stored raw anyway).
fn operand(py: Python<'_>, claim: &Claim, along: usize) -> PyResult<Option<Operand>> {
    let item = &claim.item;
    if !item
        .saved
        .bind(py)
        .get()
        .look(|state| matches!(state, State::Pending(_)))
    {
        return Ok(None);
    }
    let Some(dtype) = item.view.float_type() else {
        return Ok(None);
    };
    let store = &item.saved.get().store;
    let config = &store.config;
    let ndim = item.view.sizes.as_slice().len();
    let (geometry, group_size, _) = axis::choose(
        &item.dims,
        ndim,
        claim.rule.axis,
        config.groups,
        config.group_size,
    );
    let (layout, threads) = (layout_of(&item.dims), config.threads);
    let (address, span) = (item.view.data, layout.span() * dtype.size());
    let bytes = layout.len() * dtype.size();
    let view = item.view.clone();
    let (stats, norm) = enter(py, bytes, move || {
        // SAFETY: the handle's state holds the tensor, whose memory has this span from this address.
        let source = unsafe { Source::new(address as *const u8, span) };
        let stats = measure(source, &layout, dtype, geometry, group_size, threads)?;
        Ok((stats, tensor::max_norm_squared(&view, dtype, along)))
    })?;
    Ok(stats.finite.then_some(Operand {
        max_norm_squared: norm,
        mean_range_squared: stats.mean_range_sq,
    }))
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
