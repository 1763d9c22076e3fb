//! The codec's calls: a need becomes a new part of a blob.

use super::super::enter::enter;
use super::super::tensor;
use super::super::torch_api::DType;
use super::axis::{self, Axis};
use super::blob::{Blob, MaskKey, Parts};
use super::consumer::Kind;
use super::encode::{Claim, Need, layout_of};
use super::slots;
use super::store::Store;
use crate::codec::{
    ElementKind, Encoded, Geometry, Layout, Predicate, Source, ValueSpec, ZeroPlane,
    encode_lossless, encode_mask, encode_raw, encode_sign, encode_value,
};
use crate::dtype::FloatType;
use crate::pool::SlabPool;
use pyo3::prelude::*;
use std::sync::Arc;

/// A new part of a blob.
pub(super) struct Made {
    part: Encoded,
    /// It is a value code whose zero plane also answers this question.
    answers: Option<MaskKey>,
    /// Every bit is there.
    lossless: bool,
    /// It holds values because the slot's past says that a reader of values will come.
    pub(super) predicted: bool,
    pub(super) note: Option<&'static str>,
}

impl Made {
    /// Puts the part where its readers look.
    pub(super) fn put(self, parts: &mut Parts, need: Need) {
        let part = Arc::new(self.part);
        match need {
            _ if self.lossless => {
                // Every bit serves every reader.
                parts.value = None;
                parts.value_answers = None;
                parts.masks.clear();
                parts.lossless = Some(part);
            }
            Need::Mask(key, never_negative) if !self.predicted => {
                parts.masks.push((key, part));
                if never_negative {
                    parts.never_negative = Some(key);
                }
            }
            _ => {
                parts.value = Some(part);
                if let Some(key) = self.answers {
                    parts.masks.retain(|(known, _)| *known != key);
                    parts.value_answers = Some(key);
                }
            }
        }
    }
}

/// Encodes what a need asks for; `None` where only the tensor itself will do.
pub(super) fn make_part(
    py: Python<'_>,
    store: &Store,
    claim: &Claim,
    need: Need,
    present: Option<&Blob>,
    known: &slots::Slot,
) -> PyResult<Option<Made>> {
    let item = &claim.item;
    let config = &store.config;
    let layout = layout_of(&item.dims);
    let dtype = item.view.dtype;
    let (address, span, threads) = (item.view.data, layout.span() * dtype.size(), config.threads);
    let bytes = layout.len() * dtype.size();
    let pool = SlabPool::global();
    let source = move || {
        // SAFETY: the handle's state holds the tensor, whose memory has this span from this address, as was looked at again
        // just before.
        unsafe { Source::new(address as *const u8, span) }
    };
    let value = |bits: u8, axis, answers: Option<MaskKey>, predicted| -> PyResult<Option<Made>> {
        let Some(float) = item.view.float_type() else {
            return Ok(None);
        };
        let ndim = item.view.sizes.as_slice().len();
        let (geometry, group_size, note) =
            axis::choose(&item.dims, ndim, axis, config.groups, config.group_size);
        let spec = spec(store, float, bits, group_size, geometry, answers.is_some());
        let layout = layout.clone();
        let part = enter(py, bytes, move || {
            encode_value(source(), &layout, &spec, pool, threads)
        })?;
        Ok(Some(Made {
            part,
            answers,
            lossless: false,
            predicted,
            note,
        }))
    };
    let lossless = |copy: bool| -> PyResult<Option<Made>> {
        let (kind, layout) = (element_kind(dtype), layout.clone());
        let part = enter(py, bytes, move || {
            let part = encode_lossless(source(), &layout, kind, pool, threads)?;
            if part.is_none() && copy {
                return encode_raw(source(), &layout, kind, pool, threads).map(Some);
            }
            Ok(part)
        })?;
        Ok(part.map(|part| Made {
            part,
            answers: None,
            lossless: true,
            predicted: false,
            note: None,
        }))
    };
    match need {
        Need::Value { bits, .. } => {
            if item.constant {
                // Nobody's output: perhaps a dropout mask, which one bit an element keeps exactly.
                if let Some(made) = lossless(false)? {
                    return Ok(Some(made));
                }
            }
            let answers = present.and_then(Blob::answerable);
            // A replacement must serve every reader so far, and may as well serve the one that came later in the last step.
            let later = known.value_too.filter(|_| present.is_none());
            let least = present
                .map_or(0, Blob::value_bits)
                .max(later.map_or(0, |need| need.bits));
            let apart = claim.rule.axis == Axis::Row
                || present.is_some_and(Blob::rows_apart)
                || later.is_some_and(|need| need.axis == Axis::Row);
            let axis = match (apart, later) {
                (true, _) => Axis::Row,
                (false, Some(need)) if need.bits > bits => need.axis,
                _ => claim.rule.axis,
            };
            value(bits.max(least), axis, answers, false)
        }
        Need::Mask(key, never_negative) => {
            if let (Some(need), true, None) = (known.value_too, never_negative, present) {
                return value(need.bits, need.axis, Some(key), true);
            }
            let Some(float) = item.view.float_type() else {
                return Ok(None);
            };
            let layout = layout.clone();
            let pair = claim.rule.representatives[float as usize];
            let part = enter(py, bytes, move || {
                mask(key, pair, source(), &layout, float, pool, threads)
            })?;
            match part {
                Some(part) => Ok(Some(Made {
                    part,
                    answers: None,
                    lossless: false,
                    predicted: false,
                    note: None,
                })),
                None => Ok(None),
            }
        }
        _ => lossless(item.small_view),
    }
}

fn spec(
    store: &Store,
    dtype: FloatType,
    bits: u8,
    group_size: u16,
    geometry: Geometry,
    mask_reader: bool,
) -> ValueSpec {
    ValueSpec {
        dtype,
        bits,
        group_size,
        rounding: store.config.rounding,
        geometry,
        key: store.next_key(),
        zero: if mask_reader {
            ZeroPlane::Always
        } else {
            ZeroPlane::Auto
        },
    }
}

/// The mask code of a question; `None` where it cannot answer exactly (signs of NaN).
fn mask(
    key: MaskKey,
    [set, unset]: [f32; 2],
    source: Source<'_>,
    layout: &Layout,
    dtype: FloatType,
    pool: &Arc<SlabPool>,
    threads: usize,
) -> crate::Result<Option<Encoded>> {
    let predicate = match key.kind {
        Kind::Sign => return encode_sign(source, layout, dtype, pool, threads),
        Kind::Within => Predicate::Within {
            lo: key.lo,
            hi: key.hi,
        },
        Kind::NotBeyond => Predicate::NotBeyond {
            lo: key.lo,
            hi: key.hi,
        },
        _ => Predicate::GreaterOrNan { t: key.lo },
    };
    encode_mask(source, layout, dtype, predicate, set, unset, pool, threads).map(Some)
}

fn element_kind(dtype: DType) -> ElementKind {
    #[expect(clippy::cast_possible_truncation, reason = "1, 2, 4 or 8")]
    let bytes = dtype.size() as u8;
    match (dtype.code, dtype.bits) {
        (2, 64) => ElementKind::Float64,
        (6, _) => ElementKind::Bool,
        (0, _) => ElementKind::Int {
            bytes,
            signed: true,
        },
        (1, _) => ElementKind::Int {
            bytes,
            signed: false,
        },
        _ => match tensor::float_type(dtype) {
            Some(float) => ElementKind::Float(float),
            None => ElementKind::Opaque { bytes },
        },
    }
}
