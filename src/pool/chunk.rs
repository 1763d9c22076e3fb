//! A chunk: one anonymous mapping, aligned to 64 KiB. The only place of the pool that talks to the operating system.
//!
//! Huge pages are declined. They fault in at 6.3 GB/s where the system has free ones, but at 0.4 to 0.7 GB/s where it must compact memory
//! first, against 2.3 GB/s for small pages always (measured with `MADV_HUGEPAGE` on Linux 6); once warm, both are written at 10 GB/s, and
//! the pool reuses warm memory. A huge page would also be returned only as a whole, and filled again by the kernel.

use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Memory is returned in pages of this size: a multiple of every system's page, and worth a system call.
pub(super) const PAGE: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory owned by this value; access to it is ruled by the extents.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let fail = || {
            Error::OutOfMemory(format!(
                "the system maps no more memory for packed tensors ({bytes} bytes asked for); free memory or lower the budget"
            ))
        };
        let bytes = bytes.checked_next_multiple_of(PAGE).ok_or_else(fail)?;
        let span = bytes.checked_add(PAGE).ok_or_else(fail)?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no memory of ours.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                span,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(fail());
        }
        let raw = raw.cast::<u8>();
        let head = raw.addr().next_multiple_of(PAGE) - raw.addr();
        let base = raw.wrapping_add(head);
        if head > 0 {
            // SAFETY: the head of the mapping made above, which nothing uses.
            unsafe { libc::munmap(raw.cast(), head) };
        }
        let tail = span - head - bytes;
        if tail > 0 {
            // SAFETY: the tail of the mapping made above, which nothing uses.
            unsafe { libc::munmap(base.wrapping_add(bytes).cast(), tail) };
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice on our own mapping; it changes no contents.
        unsafe {
            libc::madvise(base.cast(), bytes, libc::MADV_NOHUGEPAGE)
        };
        let base = NonNull::new(base).ok_or_else(fail)?;
        Ok(Mapping { base, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address `offset` bytes into the mapping.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "offset inside the mapping");
        // SAFETY: the offset was checked to be inside the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Returns the memory of the pages `first..end` to the system; the addresses stay valid and read as zeros.
    pub(super) fn discard(&self, first: usize, end: usize) {
        assert!(
            first <= end && end * PAGE <= self.bytes,
            "pages inside the mapping"
        );
        if first < end {
            // SAFETY: the range is inside our mapping, and the caller says that no extent lives in it.
            unsafe {
                libc::madvise(
                    self.base.as_ptr().add(first * PAGE).cast(),
                    (end - first) * PAGE,
                    libc::MADV_DONTNEED,
                )
            };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the pool drops a chunk only when no extent lives in it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
