//! The slab pool: memory for packed bytes, apart from malloc so that small packed blobs never land in the holes that large
//! tensors leave (which would raise the resident size instead of lowering it).
//!
//! Memory comes in mmap'ed chunks, is handed out in units of [`UNIT`] bytes by best fit with coalescing, and stays warm after a
//! free up to a cap, because a fresh page costs more to fault in than to fill. The pool knows bytes only: no codec, no tensor.

mod chunk;
mod fork;
mod state;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::Result;
use state::State;

/// Granularity of the pool in bytes; every extent takes a whole number of units.
pub const UNIT: usize = 256;

/// How a pool sizes its chunks and how much free memory it keeps.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Bytes of a chunk, rounded up to a whole number of 64 KiB pages; a larger request gets a chunk of its own.
    pub chunk_bytes: usize,
    /// Free memory that is kept warm whatever the load, in bytes. Above it the pool keeps what recent steps needed, and returns the rest
    /// to the operating system.
    pub warm_floor: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        PoolConfig {
            chunk_bytes: 32 << 20,
            warm_floor: 64 << 20,
        }
    }
}

/// What a pool holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// In extents, rounded up to units.
    pub live: usize,
    /// The largest `live` since the pool was made or [`SlabPool::reset_peak`].
    pub peak: usize,
    /// Mapped and possibly resident: `live` plus `warm`. Counted in 64 KiB pages that were ever handed out and not returned since.
    pub resident: usize,
    /// Free but kept for reuse: `resident - live`.
    pub warm: usize,
    /// Address space mapped.
    pub mapped: usize,
    /// Extents alive.
    pub extents: usize,
}

/// A pool of packed bytes. Every method may be called from any thread; extents may be dropped on any thread.
///
/// ```
/// use daf_rs::pool::SlabPool;
/// let pool = SlabPool::new(Default::default());
/// let mut e = pool.alloc(1000)?;
/// e.as_mut_slice().fill(7);
/// e.shrink_to(100);
/// assert_eq!((e.as_slice(), pool.stats().live), (&[7u8; 100][..], 256));
/// drop(e);
/// assert_eq!(pool.stats().live, 0);
/// # Ok::<(), daf_rs::Error>(())
/// ```
#[derive(Debug)]
pub struct SlabPool {
    state: Mutex<State>,
}

static GLOBAL: OnceLock<Arc<SlabPool>> = OnceLock::new();

impl SlabPool {
    /// A pool of its own, empty: no memory is mapped before the first extent.
    pub fn new(config: PoolConfig) -> Arc<Self> {
        Arc::new(SlabPool {
            state: Mutex::new(State::new(config)),
        })
    }

    /// The process's pool. A forked child keeps what was live in the parent, copy on write, and goes on allocating.
    pub fn global() -> &'static Arc<Self> {
        GLOBAL.get_or_init(|| {
            fork::install();
            SlabPool::new(PoolConfig::default())
        })
    }

    /// An extent of `bytes` bytes with unspecified contents.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] when the system maps no more memory.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Extent> {
        let units = bytes.div_ceil(UNIT);
        let place = if units == 0 {
            state::Place::EMPTY
        } else {
            self.lock().alloc(units)?
        };
        Ok(Extent {
            pool: Arc::clone(self),
            place,
            len: bytes,
        })
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        self.lock().stats()
    }

    /// Starts a new measurement of [`PoolStats::peak`] at what is live now.
    pub fn reset_peak(&self) {
        self.lock().reset_peak();
    }

    /// Returns all free memory to the operating system, in whole 64 KiB pages; says how many bytes went.
    pub fn trim(&self) -> usize {
        self.lock().trim_to(0)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two consistent states, so a poisoned lock still guards a valid one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run of bytes of a pool, freed when dropped.
#[derive(Debug)]
pub struct Extent {
    pool: Arc<SlabPool>,
    place: state::Place,
    len: usize,
}

impl Extent {
    /// Bytes asked for (not rounded).
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the extent has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes taken from the pool: the length rounded up to units.
    pub fn reserved(&self) -> usize {
        self.place.units() * UNIT
    }

    /// The pool that owns the bytes.
    pub fn pool(&self) -> &Arc<SlabPool> {
        &self.pool
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.place.bytes(self.len)
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.len;
        self.place.bytes_mut(len)
    }

    /// Keeps the first `bytes` bytes and gives the rest back. Asking for more than the length changes nothing.
    pub fn shrink_to(&mut self, bytes: usize) {
        if bytes >= self.len {
            return;
        }
        self.len = bytes;
        let units = bytes.div_ceil(UNIT);
        if units < self.place.units() {
            let tail = self.place.split_off(units);
            self.pool.lock().shrink(tail, units == 0);
        }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let place = std::mem::replace(&mut self.place, state::Place::EMPTY);
        if place.units() > 0 {
            self.pool.lock().free(place);
        }
    }
}
