//! [`PlaneTable`]: the kernels over bits and plain words, which know no element type.

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{
    Isa, MAX_BITS, PLANE_BYTES, PlaneBuf, Result, check_available, plane_len, scalar, try_active,
};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// The kernels over bits and plain words for one level: [`planes_for_isa`], [`active_planes`].
#[derive(Clone, Copy)]
pub struct PlaneTable {
    pub(super) isa: Isa,
    // Each function requires what the method of the same name checks, and a CPU with the features of `isa`.
    pub(super) compact: unsafe fn(&[u8], &[u8], &mut [u8]) -> usize,
    pub(super) expand: unsafe fn(&[u8], &[u8], &mut [u8]),
    pub(super) match_plane: unsafe fn(&[u8], usize, u64, u64, &mut [u8]) -> bool,
    pub(super) select: unsafe fn(&[u8], usize, u64, u64, &mut [u8]),
    pub(super) copy: unsafe fn(&[u8], &mut [u8]),
    /// Orders what `copy` wrote before all later stores, as other threads see them.
    pub(super) fence: unsafe fn(),
}

impl std::fmt::Debug for PlaneTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlaneTable")
            .field("isa", &self.isa)
            .finish_non_exhaustive()
    }
}

pub(super) const fn scalar_planes(isa: Isa) -> PlaneTable {
    PlaneTable {
        isa,
        compact: scalar::planes::compact,
        expand: scalar::planes::expand,
        match_plane: scalar::planes::match_plane,
        select: scalar::planes::select,
        copy: scalar::planes::copy,
        fence: scalar::planes::fence,
    }
}

/// The plane kernels of a level.
///
/// # Errors
/// [`Error::BackendUnavailable`] when this CPU cannot run it.
pub fn planes_for_isa(isa: Isa) -> Result<&'static PlaneTable> {
    static SCALAR: PlaneTable = scalar_planes(Isa::Scalar);
    #[cfg(target_arch = "x86_64")]
    static AVX2: PlaneTable = avx2::plane_table();
    #[cfg(target_arch = "x86_64")]
    static AVX512: PlaneTable = avx512::plane_table();
    #[cfg(target_arch = "aarch64")]
    static NEON: PlaneTable = neon::plane_table();
    check_available(isa)?;
    Ok(match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &AVX2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &AVX512,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => &NEON,
        _ => &SCALAR,
    })
}

/// The plane kernels of the process's level ([`try_active`]).
///
/// # Errors
/// When `DAF_ISA` names a level that does not exist or that this CPU lacks.
pub fn active_planes() -> Result<&'static PlaneTable> {
    planes_for_isa(try_active()?)
}

impl PlaneTable {
    /// The level.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Keeps the bits of `plane` whose bit of `mask` is set, packed in order, and returns their number. `out` gets [`plane_len`] of that
    /// many bits, those behind the last being 0.
    ///
    /// # Panics
    /// If `plane` and `mask` differ in length, the length is no multiple of 8, or `out` is shorter than they.
    pub fn compact(&self, plane: &[u8], mask: &[u8], out: &mut [u8]) -> usize {
        assert_eq!(
            plane.len(),
            mask.len(),
            "plane and mask must be equally long"
        );
        assert!(
            mask.len().is_multiple_of(8) && out.len() >= mask.len(),
            "planes are whole words, the output at least as long"
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above.
        unsafe { (self.compact)(plane, mask, &mut out[..mask.len()]) }
    }

    /// The inverse of [`PlaneTable::compact`]: bit i of `packed` goes to the place of the i-th set bit of `mask`; other bits are 0.
    ///
    /// # Panics
    /// If the length of `mask` is no multiple of 8, `out` is shorter than it, or `packed` is shorter than [`plane_len`] of the set bits.
    pub fn expand(&self, packed: &[u8], mask: &[u8], out: &mut [u8]) {
        assert!(
            mask.len().is_multiple_of(8) && out.len() >= mask.len(),
            "planes are whole words, the output at least as long"
        );
        let ones = count_ones(mask);
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above and by the slices.
        unsafe { (self.expand)(&packed[..plane_len(ones)], mask, &mut out[..mask.len()]) }
    }

    /// Sets bit i of `out` where word i (`word` bytes, little endian, as the low bytes of a u64) equals `b`, and returns whether every word
    /// is `a` or `b`. Where it is false, `out` holds anything.
    ///
    /// # Panics
    /// If `word` is not 1, 2, 4 or 8, `src` is no whole number of words, or `out` is shorter than [`plane_len`] of them.
    #[must_use = "false means that the plane does not hold the words"]
    pub fn match_plane(&self, src: &[u8], word: usize, a: u64, b: u64, out: &mut [u8]) -> bool {
        assert!(
            matches!(word, 1 | 2 | 4 | 8) && src.len().is_multiple_of(word),
            "{} bytes are no words of {word}",
            src.len()
        );
        let len = plane_len(src.len() / word);
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above and by the slice.
        unsafe { (self.match_plane)(src, word, a, b, &mut out[..len]) }
    }

    /// The inverse of [`PlaneTable::match_plane`]: word i of `dst` becomes `set` where bit i of `plane` is 1, else `unset`.
    ///
    /// # Panics
    /// If `word` is not 1, 2, 4 or 8, `dst` is no whole number of words, or `plane` is shorter than [`plane_len`] of them.
    pub fn select(&self, plane: &[u8], word: usize, unset: u64, set: u64, dst: &mut [u8]) {
        assert!(
            matches!(word, 1 | 2 | 4 | 8) && dst.len().is_multiple_of(word),
            "{} bytes are no words of {word}",
            dst.len()
        );
        let len = plane_len(dst.len() / word);
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; lengths are checked above and by the slice.
        unsafe { (self.select)(&plane[..len], word, unset, set, dst) }
    }

    /// Copies `src` to `dst`, past the caches where the level can: for what is not read soon.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn store(&self, src: &[u8], dst: &mut [u8]) {
        assert_eq!(
            src.len(),
            dst.len(),
            "source and target must be equally long"
        );
        // SAFETY: the table of `isa` is handed out only where the CPU has its features; the slices are equally long.
        unsafe { (self.copy)(src, dst) };
    }

    /// Copies the first `len` bytes of `bits` planes to `dst`, one behind the other, past the caches where the level can: they are not read
    /// before backward.
    ///
    /// # Panics
    /// If `bits` is above 8, `len` above [`PLANE_BYTES`], or `dst` does not have `bits * len` bytes.
    pub fn store_planes(&self, planes: &PlaneBuf, bits: usize, len: usize, dst: &mut [u8]) {
        assert!(
            bits <= MAX_BITS && len <= PLANE_BYTES && dst.len() == bits * len,
            "{} bytes for {bits} planes of {len}",
            dst.len()
        );
        for (k, dst) in dst.chunks_exact_mut(len.max(1)).enumerate() {
            // SAFETY: the table of `isa` is handed out only where the CPU has its features; the slices are equally long.
            unsafe { (self.copy)(&planes.plane(k)[..len], dst) };
        }
        // Once for all planes: it waits until they have left the core.
        // SAFETY: the table of `isa` is handed out only where the CPU has its features.
        unsafe { (self.fence)() };
    }
}

/// The bits that are set in a plane: by words, as single bytes would be widened one by one.
pub fn count_ones(plane: &[u8]) -> usize {
    let (words, rest) = plane.as_chunks::<8>();
    let ones = |w: &[u8; 8]| u64::from_le_bytes(*w).count_ones() as usize;
    words.iter().map(ones).sum::<usize>()
        + rest.iter().map(|b| b.count_ones() as usize).sum::<usize>()
}
