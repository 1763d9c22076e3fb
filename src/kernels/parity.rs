//! Random cases for the tests that every level gives the scalar kernels' bits: data with everything that floats can be, memory that ends
//! at a page without access, so that a read or write behind a slice's end is a crash.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use super::rng::mix64;
use super::{CodeParams, Isa, Key, PlaneBuf, Rounding};
use crate::dtype::Float;

/// The levels to compare with the scalar kernels. Prints them, so that a log says what a run has tested.
pub(super) fn levels(test: &str) -> Vec<Isa> {
    let levels: Vec<Isa> = Isa::available()
        .into_iter()
        .filter(|&isa| isa != Isa::Scalar)
        .collect();
    println!(
        "{test}: {}",
        levels
            .iter()
            .map(|isa| isa.name())
            .collect::<Vec<_>>()
            .join(", ")
    );
    levels
}

/// A stream of numbers that only depends on its seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(mix64(seed))
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.0)
    }

    /// 0 to `n - 1`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(super) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// 0 to 1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 16_777_216.0
    }

    pub(super) fn params(&mut self) -> CodeParams {
        CodeParams {
            bits: 1 + self.below(8),
            rounding: self.one_of(&[Rounding::Dither, Rounding::Stochastic, Rounding::Nearest]),
            key: Key {
                k0: self.bits() as u32,
                k1: self.bits() as u32,
            },
        }
    }

    /// Elements of one of many kinds.
    pub(super) fn elements<T: Float>(&mut self, out: &mut [T]) {
        let kind = self.below(8);
        let scale = self.one_of(&[1.0, 1.0, 1e-3, 300.0, 1e-30, 1e-42]);
        let offset = self.one_of(&[0.0, -0.5, -0.5, 100.0]);
        for x in out {
            let u = self.unit() + offset;
            let dice = self.below(1000);
            *x = T::from_f32_finite(match kind {
                // A ReLU's output, with zeros of both signs.
                0 | 1 if u <= 0.0 || dice < 300 => [0.0, -0.0][dice % 2],
                2 if dice < 3 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][dice],
                3 if dice < 200 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0][dice % 4],
                4 => 0.1,
                5 => 0.0,
                _ => u * scale,
            });
            // The conversion clamps: infinities of the half types are set by hand.
            if matches!(kind, 2 | 3) && matches!(dice, 1 | 2) {
                *x = infinity(dice == 1);
            }
        }
    }

    pub(super) fn bytes(&mut self, out: &mut [u8]) {
        for byte in out {
            *byte = self.bits() as u8;
        }
    }

    /// Planes full of garbage.
    pub(super) fn planes(&mut self) -> PlaneBuf {
        let mut planes = PlaneBuf::new();
        for k in 0..8 {
            self.bytes(planes.plane_mut(k));
        }
        planes
    }
}

fn infinity<T: Float>(positive: bool) -> T {
    let bytes: &[u8] = match (T::TYPE, positive) {
        (crate::dtype::FloatType::F32, true) => &[0, 0, 0x80, 0x7f],
        (crate::dtype::FloatType::F32, false) => &[0, 0, 0x80, 0xff],
        (crate::dtype::FloatType::F16, true) => &[0, 0x7c],
        (crate::dtype::FloatType::F16, false) => &[0, 0xfc],
        (crate::dtype::FloatType::BF16, true) => &[0x80, 0x7f],
        (crate::dtype::FloatType::BF16, false) => &[0x80, 0xff],
    };
    bytemuck::pod_read_unaligned(bytes)
}

/// A slice whose end is the end of accessible memory.
pub(super) struct Guarded<T> {
    map: *mut libc::c_void,
    bytes: usize,
    first: *mut T,
    len: usize,
}

impl<T: bytemuck::Pod> Guarded<T> {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Guarded<T> {
        // The largest page of the architectures that we test on.
        let page = 65_536;
        let used = (len * size_of::<T>()).next_multiple_of(page);
        let bytes = used + page;
        // SAFETY: a new anonymous mapping, whose last page is then made inaccessible; both calls are checked.
        let map = unsafe {
            let map = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(map.byte_add(used), page, libc::PROT_NONE), 0);
            map
        };
        // SAFETY: `used` is at least the slice's size, so the slice lies inside the mapping.
        let first = unsafe { map.byte_add(used - len * size_of::<T>()).cast() };
        Guarded {
            map,
            bytes,
            first,
            len,
        }
    }

    pub(super) fn of(values: &[T]) -> Guarded<T> {
        let mut guarded = Guarded::new(values.len());
        guarded.as_mut().copy_from_slice(values);
        guarded
    }

    pub(super) fn as_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` elements inside the mapping, aligned (their end is page-aligned), zero or written; borrowed through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.len) }
    }
}

impl<T: bytemuck::Pod> std::ops::Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as in `as_mut`.
        unsafe { std::slice::from_raw_parts(self.first, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing borrows any more.
        unsafe { libc::munmap(self.map, self.bytes) };
    }
}

/// Bits of floats: equal numbers that differ in sign of zero or NaN bits are different.
pub(super) fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Fails with the first byte in which planes differ.
pub(super) fn assert_planes_equal(expected: &PlaneBuf, found: &PlaneBuf, case: &str) {
    for k in 0..8 {
        if let Some(at) =
            (0..expected.plane(k).len()).find(|&i| expected.plane(k)[i] != found.plane(k)[i])
        {
            panic!(
                "plane {k} byte {at}: {:#04x} instead of {:#04x}: {case}",
                found.plane(k)[at],
                expected.plane(k)[at]
            );
        }
    }
}
