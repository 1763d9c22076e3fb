//! Strided views in memory order: which bytes an element number means, whatever the order of the tensor's dimensions.

use std::ops::Range;

/// A strided view whose elements are numbered in memory order: dimensions by descending stride, size-1 dimensions dropped,
/// mergeable ones merged. Gaps between elements are allowed.
///
/// ```
/// use daf_rs::codec::Layout;
/// // A channels_last tensor is dense: its memory order is NHWC.
/// let l = Layout::from_strided(&[2, 3, 4, 4], &[48, 1, 12, 3]);
/// assert!(l.is_dense() && l.len() == 96 && l.span() == 96);
/// // Half of the columns of a matrix: a pitch of 8, rows of 4.
/// let l = Layout::from_strided(&[10, 4], &[8, 1]);
/// assert!(!l.is_dense() && l.len() == 40 && l.span() == 76);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// (size, stride), strides descending, sizes above 1.
    dims: Vec<(usize, usize)>,
    len: usize,
    span: usize,
}

impl Layout {
    /// `n` elements one after another.
    pub fn contiguous(n: usize) -> Self {
        let dims = if n > 1 { vec![(n, 1)] } else { Vec::new() };
        Layout {
            dims,
            len: n,
            span: n,
        }
    }

    /// The layout of a tensor with these sizes and strides, in elements. A stride of 0 over more than one element (an expanded
    /// tensor) makes elements share memory and should be refused by the caller; negative values count as 0.
    pub fn from_strided(sizes: &[i64], strides: &[i64]) -> Self {
        let pairs = sizes.iter().zip(strides).map(|(&n, &s)| {
            (
                usize::try_from(n).unwrap_or(0),
                usize::try_from(s).unwrap_or(0),
            )
        });
        let mut dims: Vec<(usize, usize)> = pairs.collect();
        let len = dims.iter().map(|d| d.0).fold(1usize, usize::saturating_mul);
        if len == 0 {
            return Layout::contiguous(0);
        }
        dims.retain(|d| d.0 > 1);
        dims.sort_by_key(|d| std::cmp::Reverse(d.1));
        let span = dims.iter().fold(1usize, |s, d| {
            s.saturating_add((d.0 - 1).saturating_mul(d.1))
        });
        let mut merged: Vec<(usize, usize)> = Vec::with_capacity(dims.len());
        for (n, s) in dims {
            match merged.last_mut() {
                Some(outer) if outer.1 == n.saturating_mul(s) => {
                    *outer = (outer.0.saturating_mul(n), s)
                }
                _ => merged.push((n, s)),
            }
        }
        Layout {
            dims: merged,
            len,
            span,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Elements of memory from the first to the last, gaps included.
    pub fn span(&self) -> usize {
        self.span
    }

    /// Whether the elements lie one after another.
    pub fn is_dense(&self) -> bool {
        self.dims.is_empty() || (self.dims.len() == 1 && self.dims[0].1 == 1)
    }

    /// Whether memory order is element order: no two elements share memory.
    pub(crate) fn is_ordered(&self) -> bool {
        let mut inner = 1usize;
        self.dims.iter().rev().all(|&(n, s)| {
            let ordered = s >= inner;
            inner = inner.saturating_add((n - 1).saturating_mul(s));
            ordered
        })
    }

    /// Where element `e` lies.
    pub(crate) fn offset(&self, mut e: usize) -> usize {
        let mut offset = 0;
        for &(n, s) in self.dims.iter().rev() {
            offset += (e % n) * s;
            e /= n;
        }
        offset
    }

    /// The distance of two rows of `cols` elements where the layout is such rows at one pitch, each row dense.
    pub(crate) fn pitch(&self, rows: usize, cols: usize) -> Option<usize> {
        if self.is_dense() || rows <= 1 && self.dims == [(cols, 1)] {
            return Some(cols);
        }
        match *self.dims.as_slice() {
            [(n, pitch), (w, 1)] if n == rows && w == cols && pitch >= cols => Some(pitch),
            [(n, pitch)] if n == rows && cols == 1 && pitch >= 1 => Some(pitch),
            _ => None,
        }
    }

    /// Calls `run(element, offset, count, stride)` for runs of elements `element, element + 1, …` that lie at `offset`,
    /// `offset + stride`, …, covering `range` in order.
    pub(crate) fn runs(
        &self,
        range: Range<usize>,
        mut run: impl FnMut(usize, usize, usize, usize),
    ) {
        let Some(((inner, step), outer)) = self.dims.split_last().map(|(d, o)| (*d, o)) else {
            if !range.is_empty() {
                run(range.start, 0, range.len(), 1);
            }
            return;
        };
        let mut at = range.start;
        while at < range.end {
            let (mut row, col) = (at / inner, at % inner);
            let count = (inner - col).min(range.end - at);
            let mut offset = col * step;
            for &(n, s) in outer.iter().rev() {
                offset += (row % n) * s;
                row /= n;
            }
            run(at, offset, count, step);
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(l: &Layout, r: Range<usize>) -> Vec<usize> {
        let mut v = Vec::new();
        l.runs(r, |_, o, n, s| v.extend((0..n).map(|i| o + i * s)));
        v
    }

    #[test]
    fn elements_come_in_memory_order() {
        // A transposed slice: sizes (3, 5, 2), strides (2, 100, 10).
        let l = Layout::from_strided(&[3, 5, 2], &[2, 100, 10]);
        let mut want: Vec<usize> = Vec::new();
        for a in 0..5 {
            for b in 0..2 {
                for c in 0..3 {
                    want.push(a * 100 + b * 10 + c * 2);
                }
            }
        }
        assert_eq!(offsets(&l, 0..30), want);
        assert_eq!(offsets(&l, 7..19), want[7..19]);
        assert_eq!((l.len(), l.span(), l.is_dense()), (30, 415, false));
    }

    #[test]
    fn dense_views_merge_to_one_run() {
        for (n, s) in [
            (&[4i64, 6][..], &[6i64, 1][..]),
            (&[6, 4], &[1, 6]),
            (&[2, 1, 3], &[3, 77, 1]),
            (&[], &[]),
            (&[1], &[9]),
        ] {
            let l = Layout::from_strided(n, s);
            assert!(l.is_dense(), "{n:?} {s:?}");
            assert_eq!(offsets(&l, 0..l.len()), (0..l.len()).collect::<Vec<_>>());
        }
        assert!(Layout::from_strided(&[0, 3], &[3, 1]).is_empty());
    }

    #[test]
    fn rows_at_a_pitch_are_seen() {
        assert_eq!(
            Layout::from_strided(&[10, 4], &[8, 1]).pitch(10, 4),
            Some(8)
        );
        assert_eq!(
            Layout::from_strided(&[2, 5, 4], &[40, 8, 1]).pitch(10, 4),
            Some(8)
        );
        assert_eq!(
            Layout::from_strided(&[2, 5, 4], &[50, 8, 1]).pitch(10, 4),
            None
        );
        assert_eq!(Layout::contiguous(40).pitch(8, 5), Some(5));
        assert_eq!(Layout::from_strided(&[10, 4], &[8, 2]).pitch(10, 4), None);
    }
}
