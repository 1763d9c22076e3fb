//! The callers' memory as slices. The only unsafe code of the codec: an address becomes a slice here, once, checked.

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::error::{Error, Result};

/// Memory to encode from: an address and how many bytes may be read.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    ptr: *const u8,
    bytes: usize,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a source is a shared reference to bytes (see `Source::new`), which may be sent.
unsafe impl Send for Source<'_> {}
// SAFETY: as above.
unsafe impl Sync for Source<'_> {}

impl<'a> Source<'a> {
    /// # Safety
    /// For the lifetime `'a`, the `bytes` bytes at `ptr` are readable, initialized and not written by anyone. `ptr` may be
    /// anything when `bytes` is 0.
    pub unsafe fn new(ptr: *const u8, bytes: usize) -> Self {
        Source {
            ptr,
            bytes,
            life: PhantomData,
        }
    }

    /// The memory of a slice.
    pub fn from_slice<T: Pod>(slice: &'a [T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(slice);
        Source {
            ptr: bytes.as_ptr(),
            bytes: bytes.len(),
            life: PhantomData,
        }
    }

    /// The first `n` elements.
    ///
    /// # Errors
    /// `InvalidArgument` when they do not fit or are not aligned for `T`.
    pub(crate) fn elements<T: Pod>(self, n: usize) -> Result<&'a [T]> {
        if n == 0 {
            return Ok(&[]);
        }
        check::<T>(self.ptr, self.bytes, n, "source")?;
        // SAFETY: `check` found `n` elements inside the bytes that `new` vouches for, and an aligned, non-null address.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.cast(), n) })
    }
}

/// Memory to decode into: an address and how many bytes may be written.
#[derive(Debug)]
pub struct Target<'a> {
    ptr: *mut u8,
    bytes: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: a target is an exclusive reference to bytes (see `Target::new`), which may be sent.
unsafe impl Send for Target<'_> {}

impl<'a> Target<'a> {
    /// # Safety
    /// For the lifetime `'a`, the `bytes` bytes at `ptr` are writable, initialized and neither read nor written by anyone else.
    /// `ptr` may be anything when `bytes` is 0.
    pub unsafe fn new(ptr: *mut u8, bytes: usize) -> Self {
        Target {
            ptr,
            bytes,
            life: PhantomData,
        }
    }

    /// The memory of a slice.
    pub fn from_slice<T: Pod>(slice: &'a mut [T]) -> Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(slice);
        Target {
            ptr: bytes.as_mut_ptr(),
            bytes: bytes.len(),
            life: PhantomData,
        }
    }

    /// The first `n` elements.
    ///
    /// # Errors
    /// `InvalidArgument` when they do not fit or are not aligned for `T`.
    pub(crate) fn elements<T: Pod>(self, n: usize) -> Result<&'a mut [T]> {
        if n == 0 {
            return Ok(&mut []);
        }
        check::<T>(self.ptr, self.bytes, n, "target")?;
        // SAFETY: `check` found `n` elements inside the bytes that `new` vouches for, and an aligned, non-null address; `self` is
        // consumed, so the reference is the only one.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), n) })
    }
}

fn check<T>(ptr: *const u8, bytes: usize, n: usize, what: &str) -> Result<()> {
    let size = size_of::<T>();
    if n.checked_mul(size)
        .is_none_or(|need| need > bytes || need > isize::MAX as usize)
    {
        return Err(Error::InvalidArgument(format!(
            "the {what} has {bytes} bytes, but the layout spans {n} elements of {size} bytes"
        )));
    }
    if ptr.is_null() || !ptr.addr().is_multiple_of(align_of::<T>()) {
        return Err(Error::InvalidArgument(format!(
            "the {what}'s address {ptr:p} is not aligned to its element size of {size} bytes; copy the tensor first"
        )));
    }
    Ok(())
}
