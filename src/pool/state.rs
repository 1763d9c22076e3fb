//! The pool's books: which units of which chunk are free, which 64 KiB pages may be resident, what was live at most.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use super::chunk::{Mapping, PAGE};
use super::{PoolConfig, PoolStats, UNIT};
use crate::error::Result;

const UNITS_PER_PAGE: usize = PAGE / UNIT;

/// Where an extent lies. Exclusive: the books never give the same units to two places.
#[derive(Debug)]
pub(super) struct Place {
    base: NonNull<u8>,
    chunk: usize,
    first: usize,
    units: usize,
}

// SAFETY: a place is exclusive ownership of its units, which are plain memory.
unsafe impl Send for Place {}
// SAFETY: shared access is read-only (`bytes`).
unsafe impl Sync for Place {}

impl Place {
    pub(super) const EMPTY: Place = Place {
        base: NonNull::dangling(),
        chunk: 0,
        first: 0,
        units: 0,
    };

    pub(super) fn units(&self) -> usize {
        self.units
    }

    pub(super) fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.units * UNIT, "length inside the place");
        // SAFETY: the place owns `units * UNIT` mapped, initialized bytes from `base` (dangling for none), while it lives.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), len) }
    }

    pub(super) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.units * UNIT, "length inside the place");
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), len) }
    }

    /// Keeps the first `units` units and gives the rest.
    pub(super) fn split_off(&mut self, units: usize) -> Place {
        assert!(units < self.units, "a part of the place");
        // SAFETY: `units` is inside the place, so the address is inside its mapping.
        let base = unsafe { self.base.add(units * UNIT) };
        let tail = Place {
            base,
            chunk: self.chunk,
            first: self.first + units,
            units: self.units - units,
        };
        self.units = units;
        tail
    }
}

#[derive(Debug)]
struct Chunk {
    map: Mapping,
    /// Free runs: first unit → units. No two are adjacent.
    free: BTreeMap<usize, usize>,
    /// Per 64 KiB page: was handed out since it was last returned.
    touched: Vec<bool>,
}

impl Chunk {
    fn units(&self) -> usize {
        self.map.bytes() / UNIT
    }
}

#[derive(Debug)]
pub(super) struct State {
    config: PoolConfig,
    chunks: Vec<Option<Chunk>>,
    /// All free runs as (units, chunk, first): the first at or above a size is the best fit at the lowest address.
    by_size: BTreeSet<(usize, usize, usize)>,
    live_units: usize,
    peak_units: usize,
    touched_pages: usize,
    extents: usize,
    /// What a training step is likely to need again: the largest live count, decaying with what is freed. One fill and drain lowers it by
    /// an eighth, so a step after step of equal size keeps its memory, and a smaller load lets go of the rest within some dozen steps.
    recent_units: usize,
}

impl State {
    pub(super) fn new(config: PoolConfig) -> Self {
        State {
            config,
            chunks: Vec::new(),
            by_size: BTreeSet::new(),
            live_units: 0,
            peak_units: 0,
            touched_pages: 0,
            extents: 0,
            recent_units: 0,
        }
    }

    pub(super) fn alloc(&mut self, units: usize) -> Result<Place> {
        let (run, c, first) = match self.by_size.range((units, 0, 0)..).next() {
            Some(&best) => best,
            None => self.grow(units)?,
        };
        let Some(chunk) = self.chunks.get_mut(c).and_then(Option::as_mut) else {
            unreachable!("a free run belongs to a chunk")
        };
        self.by_size.remove(&(run, c, first));
        chunk.free.remove(&first);
        if run > units {
            chunk.free.insert(first + units, run - units);
            self.by_size.insert((run - units, c, first + units));
        }
        for page in
            &mut chunk.touched[first / UNITS_PER_PAGE..=(first + units - 1) / UNITS_PER_PAGE]
        {
            self.touched_pages += usize::from(!*page);
            *page = true;
        }
        let base = chunk.map.at(first * UNIT);
        self.extents += 1;
        self.live_units += units;
        self.peak_units = self.peak_units.max(self.live_units);
        self.recent_units = self.recent_units.max(self.live_units);
        Ok(Place {
            base,
            chunk: c,
            first,
            units,
        })
    }

    fn grow(&mut self, units: usize) -> Result<(usize, usize, usize)> {
        let map = Mapping::new(units.saturating_mul(UNIT).max(self.config.chunk_bytes))?;
        let pages = map.bytes() / PAGE;
        let mut chunk = Chunk {
            map,
            free: BTreeMap::new(),
            touched: vec![false; pages],
        };
        let run = chunk.units();
        chunk.free.insert(0, run);
        let c = match self.chunks.iter().position(Option::is_none) {
            Some(c) => c,
            None => {
                self.chunks.push(None);
                self.chunks.len() - 1
            }
        };
        self.chunks[c] = Some(chunk);
        self.by_size.insert((run, c, 0));
        Ok((run, c, 0))
    }

    pub(super) fn free(&mut self, place: Place) {
        self.extents -= 1;
        self.release(place);
    }

    pub(super) fn shrink(&mut self, tail: Place, whole: bool) {
        self.extents -= usize::from(whole);
        self.release(tail);
    }

    fn release(&mut self, place: Place) {
        let Place {
            chunk: c,
            mut first,
            mut units,
            ..
        } = place;
        let place_units = units;
        self.live_units -= units;
        let Some(chunk) = self.chunks.get_mut(c).and_then(Option::as_mut) else {
            unreachable!("a place belongs to a chunk")
        };
        if let Some((&before, &run)) = chunk.free.range(..first).next_back()
            && before + run == first
        {
            chunk.free.remove(&before);
            self.by_size.remove(&(run, c, before));
            first = before;
            units += run;
        }
        if let Some(run) = chunk.free.remove(&(first + units)) {
            self.by_size.remove(&(run, c, first + units));
            units += run;
        }
        chunk.free.insert(first, units);
        self.by_size.insert((units, c, first));
        let decayed = self.recent_units.saturating_sub(place_units.div_ceil(8));
        self.recent_units = decayed.max(self.live_units);
        let keep = (self.recent_units * UNIT).max(self.live_units * UNIT + self.config.warm_floor);
        // A third more than what is kept, so that one drain never trims and the system is not called for every extent.
        if self.touched_pages * PAGE > keep + keep / 3 + PAGE {
            self.trim_to(keep);
        }
    }

    /// Returns free memory, whole chunks and the largest runs first, until at most `keep` bytes may be resident.
    pub(super) fn trim_to(&mut self, keep: usize) -> usize {
        let before = self.touched_pages;
        let runs: Vec<_> = self.by_size.iter().rev().copied().collect();
        for (units, c, first) in runs {
            if units < UNITS_PER_PAGE || self.touched_pages * PAGE <= keep {
                break;
            }
            let Some(chunk) = self.chunks[c].as_mut() else {
                continue;
            };
            if units == chunk.units() {
                self.touched_pages -= chunk.touched.iter().filter(|t| **t).count();
                self.by_size.remove(&(units, c, first));
                self.chunks[c] = None;
                continue;
            }
            let (from, to) = (
                first.div_ceil(UNITS_PER_PAGE),
                (first + units) / UNITS_PER_PAGE,
            );
            if from < to {
                chunk.map.discard(from, to);
                for page in &mut chunk.touched[from..to] {
                    self.touched_pages -= usize::from(*page);
                    *page = false;
                }
            }
        }
        (before - self.touched_pages) * PAGE
    }

    pub(super) fn stats(&self) -> PoolStats {
        let live = self.live_units * UNIT;
        let resident = self.touched_pages * PAGE;
        PoolStats {
            live,
            peak: self.peak_units * UNIT,
            resident,
            warm: resident - live,
            mapped: self.chunks.iter().flatten().map(|c| c.map.bytes()).sum(),
            extents: self.extents,
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.peak_units = self.live_units;
    }
}
