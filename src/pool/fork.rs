//! Keeps the global pool usable in a forked child: its lock is held across `fork`, so the child never inherits it half-way
//! through a change that another thread of the parent was making.

use std::cell::RefCell;
use std::sync::{MutexGuard, Once};

use super::state::State;
use super::{GLOBAL, SlabPool};

thread_local! {
    static HELD: RefCell<Option<MutexGuard<'static, State>>> = const { RefCell::new(None) };
}

static INSTALL: Once = Once::new();

pub(super) fn install() {
    INSTALL.call_once(|| {
        // SAFETY: the three handlers are `extern "C"` functions that live as long as the program.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

extern "C" fn before() {
    let Some(pool) = GLOBAL.get() else { return };
    let pool: &'static SlabPool = pool;
    let _ = HELD.try_with(|held| {
        if let Ok(mut held) = held.try_borrow_mut() {
            *held = Some(pool.lock());
        }
    });
}

extern "C" fn after() {
    let _ = HELD.try_with(|held| {
        if let Ok(mut held) = held.try_borrow_mut() {
            *held = None;
        }
    });
}
