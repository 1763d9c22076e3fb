//! Cuts a strided destination into disjoint pieces that threads fill on their own, and moves elements between a strided view and
//! dense scratch.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use bytemuck::Pod;

use super::Layout;
use crate::error::Result;
use crate::parallel;

/// The elements `elements` of a view, and the memory from the first to the last of them.
pub(crate) struct Part<'a, T> {
    pub(crate) elements: Range<usize>,
    base: usize,
    pub(crate) memory: &'a mut [T],
}

impl<T: Pod> Part<'_, T> {
    /// Writes consecutive elements from number `first` on.
    pub(crate) fn write(&mut self, layout: &Layout, first: usize, values: &[T]) {
        layout.runs(first..first + values.len(), |e, offset, n, stride| {
            let from = &values[e - first..e - first + n];
            let at = offset - self.base;
            if stride == 1 {
                self.memory[at..at + n].copy_from_slice(from);
            } else {
                for (to, v) in self.memory[at..].iter_mut().step_by(stride).zip(from) {
                    *to = *v;
                }
            }
        });
    }
}

/// Cuts the memory of `layout` before the elements `ends` (ascending, the last is the element count) and calls `work` for every piece,
/// on several threads where the pieces cannot overlap.
pub(crate) fn for_each_part<T, F>(
    memory: &mut [T],
    layout: &Layout,
    ends: &[usize],
    threads: usize,
    work: F,
) -> Result<()>
where
    T: Pod + Send,
    F: Fn(usize, Part<'_, T>) -> Result<()> + Sync,
{
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let pieces = starts.zip(ends.iter().copied());
    if !layout.is_ordered() {
        // Elements that share memory: one after another, in order, each piece over the whole span.
        return pieces.enumerate().try_for_each(|(i, (start, end))| {
            work(
                i,
                Part {
                    elements: start..end,
                    base: 0,
                    memory: &mut *memory,
                },
            )
        });
    }
    let (mut rest, mut at) = (memory, 0);
    let mut slots = Vec::with_capacity(ends.len());
    for (start, end) in pieces {
        let (first, last) = (layout.offset(start), layout.offset(end - 1));
        let (_, tail) = rest.split_at_mut(first - at);
        let (piece, tail) = tail.split_at_mut(last + 1 - first);
        rest = tail;
        at = last + 1;
        slots.push(Mutex::new(Some(Part {
            elements: start..end,
            base: first,
            memory: piece,
        })));
    }
    parallel::for_each(slots.len(), threads, |i| {
        let piece = slots[i]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        piece.map_or(Ok(()), |p| work(i, p))
    })
}

/// Reads the elements `range` of a strided view into `out`.
pub(crate) fn gather<T: Pod>(src: &[T], layout: &Layout, range: Range<usize>, out: &mut [T]) {
    let first = range.start;
    layout.runs(range, |e, offset, n, stride| {
        let to = &mut out[e - first..e - first + n];
        if stride == 1 {
            to.copy_from_slice(&src[offset..offset + n]);
        } else {
            for (to, v) in to.iter_mut().zip(src[offset..].iter().step_by(stride)) {
                *to = *v;
            }
        }
    });
}

/// Calls `work` for every item on at most `threads` threads and gives the results in order.
pub(crate) fn map<R, F>(items: usize, threads: usize, work: F) -> Result<Vec<R>>
where
    R: Send,
    F: Fn(usize) -> Result<R> + Sync,
{
    if threads <= 1 || items <= 1 {
        return (0..items).map(work).collect();
    }
    let slots: Vec<Mutex<Option<R>>> = (0..items).map(|_| Mutex::new(None)).collect();
    parallel::for_each(items, threads, |i| {
        let result = work(i)?;
        *slots[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        Ok(())
    })?;
    Ok(slots
        .into_iter()
        .filter_map(|s| s.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect())
}
