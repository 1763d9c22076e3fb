//! The thread pool of the codec: how many threads, from which size on, and safe after `fork`. The only user of rayon.
//!
//! Work is cut into independent items whose results do not depend on which thread takes them, so the thread count never
//! changes a byte.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};

/// Work below this many bytes is done by the calling thread: handing it over costs more than it saves.
pub const SERIAL_BELOW: usize = 1 << 20;

static DEFAULT: AtomicUsize = AtomicUsize::new(0);

/// A rayon pool, the process that built it, and its size.
struct Built {
    pid: u32,
    size: usize,
    pool: Arc<rayon::ThreadPool>,
}

static POOL: Mutex<Option<Built>> = Mutex::new(None);

thread_local! {
    /// Set while this thread works on an item, so that nested calls stay serial.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Restores [`BUSY`] when the work is done or panics.
struct Busy(bool);

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.set(self.0);
    }
}

fn from_environment() -> Option<usize> {
    static ENV: OnceLock<Option<usize>> = OnceLock::new();
    *ENV.get_or_init(|| {
        std::env::var("DAF_NUM_THREADS")
            .ok()?
            .trim()
            .parse()
            .ok()
            .filter(|&n| n > 0)
    })
}

/// Threads used when a call asks for 0: `DAF_NUM_THREADS`, else what [`set_default_threads`] was given, else the cores
/// available to this process.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the place that decides the number of threads"
)]
pub fn default_threads() -> usize {
    if let Some(n) = from_environment() {
        return n;
    }
    match DEFAULT.load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

/// Sets the default thread count (0: the cores available). `DAF_NUM_THREADS` still wins.
pub fn set_default_threads(threads: usize) {
    DEFAULT.store(threads, Ordering::Relaxed);
}

/// Threads for `bytes` bytes of work when the caller asked for `requested` (0: the default).
pub fn threads_for(requested: usize, bytes: usize) -> usize {
    if bytes < SERIAL_BELOW || BUSY.get() {
        return 1;
    }
    if requested == 0 {
        default_threads()
    } else {
        requested
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "this is the place that owns the thread pool"
)]
fn pool_of(size: usize) -> Result<Arc<rayon::ThreadPool>> {
    // A child forked while another thread held this lock would wait for ever; it works serially instead.
    let mut slot = match POOL.try_lock() {
        Ok(slot) => slot,
        Err(std::sync::TryLockError::Poisoned(p)) => PoisonError::into_inner(p),
        Err(std::sync::TryLockError::WouldBlock) => {
            return Err(Error::BackendUnavailable(
                "the thread pool is being built".into(),
            ));
        }
    };
    let pid = std::process::id();
    if let Some(built) = slot.as_ref()
        && built.pid == pid
        && built.size >= size
    {
        return Ok(Arc::clone(&built.pool));
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(size)
        .thread_name(|i| format!("daf_rs-{i}"))
        .build()
        .map_err(|e| Error::BackendUnavailable(format!("no threads for the codec: {e}")))?;
    let pool = Arc::new(pool);
    if let Some(old) = slot.replace(Built {
        pid,
        size,
        pool: Arc::clone(&pool),
    }) && old.pid != pid
    {
        // Its threads live in the parent only: waiting for them here would never end.
        std::mem::forget(old);
    }
    Ok(pool)
}

/// Calls `work(i)` once for every `i` in `0..items`, on at most `threads` threads (the caller is one of them), and returns the
/// error of the lowest failing item. Items run in ascending order on each thread.
///
/// # Errors
/// The first error, by item number, that `work` returned.
pub fn for_each<F>(items: usize, threads: usize, work: F) -> Result<()>
where
    F: Fn(usize) -> Result<()> + Sync,
{
    let threads = threads.min(items);
    if threads > 1
        && let Ok(pool) = pool_of(threads - 1)
    {
        return shared(&pool, items, threads, &work);
    }
    (0..items).try_for_each(work)
}

fn shared<F>(pool: &rayon::ThreadPool, items: usize, threads: usize, work: &F) -> Result<()>
where
    F: Fn(usize) -> Result<()> + Sync,
{
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let worker = || {
        let _busy = Busy(BUSY.replace(true));
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= items {
                break;
            }
            if let Err(e) = work(i) {
                // Items below `i` are already taken, so the lowest failure is still seen; later ones need not start.
                next.store(items, Ordering::Relaxed);
                let mut slot = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if slot.as_ref().is_none_or(|(j, _)| i < *j) {
                    *slot = Some((i, e));
                }
            }
        }
    };
    pool.in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| worker());
        }
        worker();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, e)) => Err(e),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once() {
        for threads in [1, 2, 5] {
            let hits: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            for_each(100, threads, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn the_lowest_error_wins() {
        for threads in [1, 3] {
            let e = for_each(64, threads, |i| {
                if i >= 7 {
                    Err(Error::CorruptData(i.to_string()))
                } else {
                    Ok(())
                }
            });
            assert!(matches!(e, Err(Error::CorruptData(m)) if m == "7"));
        }
    }

    #[test]
    fn nested_work_stays_serial() {
        for_each(4, 2, |_| {
            assert_eq!(threads_for(8, usize::MAX), 1);
            Ok(())
        })
        .unwrap();
        assert_eq!(threads_for(8, usize::MAX), 8);
    }
}
