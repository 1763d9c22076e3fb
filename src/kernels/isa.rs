//! The only place that asks the CPU what it can do, and the guard that gives kernels the floating-point environment they are defined in.
//!
//! A level is chosen once per process: the best that the CPU has, or the one that `DAF_ISA` names. All levels write the same bytes.

use std::fmt;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The environment variable that forces an instruction-set level.
pub const ISA_VARIABLE: &str = "DAF_ISA";

/// An instruction-set level that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Portable Rust: the definition of the bytes.
    Scalar,
    /// aarch64 with NEON (every aarch64 CPU).
    Neon,
    /// x86-64 with AVX2, FMA, F16C, BMI2 and POPCNT (Haswell, Zen 1 and later).
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI and GFNI on top of [`Isa::Avx2`] (Ice Lake, Zen 4 and later). CPUs with AVX-512 but without
    /// VBMI use [`Isa::Avx2`]: they lower their clock for 512-bit vectors and lack the byte permutes that these kernels live on.
    Avx512,
}

impl Isa {
    /// Every level, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

    /// The name that `DAF_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether this CPU can run the level.
    pub fn is_available(self) -> bool {
        static DETECTED: OnceLock<[bool; 4]> = OnceLock::new();
        DETECTED.get_or_init(|| Isa::ALL.map(detect))[self.index()]
    }

    /// The levels that this CPU can run, slowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL
            .into_iter()
            .filter(|isa| isa.is_available())
            .collect()
    }

    /// The fastest level that this CPU can run.
    pub fn best() -> Isa {
        Isa::ALL
            .into_iter()
            .rev()
            .find(|isa| isa.is_available())
            .unwrap_or(Isa::Scalar)
    }

    /// Position in [`Isa::ALL`].
    const fn index(self) -> usize {
        match self {
            Isa::Scalar => 0,
            Isa::Neon => 1,
            Isa::Avx2 => 2,
            Isa::Avx512 => 3,
        }
    }

    /// The level that a value of `DAF_ISA` asks for.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown name, [`Error::BackendUnavailable`] for a level that this CPU lacks.
    pub fn parse(name: &str) -> Result<Isa> {
        let allowed = || {
            Isa::available()
                .iter()
                .map(|isa| isa.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
            None => Err(Error::InvalidArgument(format!(
                "{ISA_VARIABLE}={name:?} is no instruction-set level; this machine runs: {}; unset {ISA_VARIABLE} to take the fastest",
                allowed()
            ))),
            Some(isa) if !isa.is_available() => Err(Error::BackendUnavailable(format!(
                "{ISA_VARIABLE}={name} asks for instructions that this CPU lacks; it runs: {}; unset {ISA_VARIABLE} to take the fastest",
                allowed()
            ))),
            Some(isa) => Ok(isa),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::disallowed_macros, reason = "the one place of detection")]
fn detect(isa: Isa) -> bool {
    let avx2 = || {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
    };
    match isa {
        Isa::Scalar => true,
        Isa::Neon => false,
        Isa::Avx2 => avx2(),
        Isa::Avx512 => {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("gfni")
        }
    }
}

#[cfg(target_arch = "aarch64")]
#[expect(clippy::disallowed_macros, reason = "the one place of detection")]
fn detect(isa: Isa) -> bool {
    match isa {
        Isa::Scalar => true,
        Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
        Isa::Avx2 | Isa::Avx512 => false,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect(isa: Isa) -> bool {
    isa == Isa::Scalar
}

/// Whether `pext` and `pdep` are single operations. AMD before Zen 3 (and Hygon's copies of Zen 1) runs them as microcode, up to 300 cycles
/// each. Valgrind and other emulators report what they emulate.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_fast_pext() -> bool {
    static FAST: OnceLock<bool> = OnceLock::new();
    *FAST.get_or_init(|| {
        let vendor = cpuid(0);
        let vendor = [vendor[1], vendor[3], vendor[2]].map(u32::to_le_bytes);
        let version = cpuid(1)[0];
        // The extended family counts where the family field is full.
        let family = ((version >> 8) & 0xf)
            + if (version >> 8) & 0xf == 0xf {
                (version >> 20) & 0xff
            } else {
                0
            };
        !matches!(vendor.as_flattened(), b"AuthenticAMD" | b"HygonGenuine") || family >= 0x19
    })
}

/// eax, ebx, ecx, edx of a `cpuid` leaf.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer toolchains")]
fn cpuid(leaf: u32) -> [u32; 4] {
    // SAFETY: every x86-64 CPU has cpuid and its leaves 0 and 1.
    let found = unsafe { std::arch::x86_64::__cpuid(leaf) };
    [found.eax, found.ebx, found.ecx, found.edx]
}

/// The level of this process: what `DAF_ISA` names, else the fastest available. The variable is read at the first call only.
///
/// # Errors
/// As [`Isa::parse`], at every call, when `DAF_ISA` names a level that does not exist or that this CPU lacks.
pub fn try_active() -> Result<Isa> {
    static ACTIVE: OnceLock<Result<Isa>> = OnceLock::new();
    let chosen = ACTIVE.get_or_init(|| match std::env::var_os(ISA_VARIABLE) {
        None => Ok(Isa::best()),
        Some(value) if value.is_empty() => Ok(Isa::best()),
        Some(value) => Isa::parse(&value.to_string_lossy()),
    });
    match chosen {
        Ok(isa) => Ok(*isa),
        Err(Error::InvalidArgument(message)) => Err(Error::InvalidArgument(message.clone())),
        Err(other) => Err(Error::BackendUnavailable(other.to_string())),
    }
}

/// Holds the calling thread in the default floating-point environment (round to nearest even, subnormals kept, no traps) and restores the
/// thread's own on drop. Bytes are defined in this environment only; torch and other libraries may have set another one.
#[must_use = "the environment is restored when the guard is dropped"]
#[derive(Debug)]
pub struct FpEnv {
    saved: u64,
    // The environment belongs to one thread, so the guard must not leave it.
    not_send: std::marker::PhantomData<*const ()>,
}

impl FpEnv {
    /// Enters the default environment on this thread.
    pub fn enter() -> FpEnv {
        let saved = control::get();
        if saved != control::DEFAULT {
            control::set(control::DEFAULT);
        }
        FpEnv {
            saved,
            not_send: std::marker::PhantomData,
        }
    }
}

impl Drop for FpEnv {
    fn drop(&mut self) {
        if self.saved != control::DEFAULT {
            control::set(self.saved);
        }
    }
}

/// The thread's floating-point control word. The sticky status flags are masked out on x86: they do not change results.
#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    /// All exceptions masked, round to nearest, no flush to zero, subnormal operands kept.
    pub(super) const DEFAULT: u64 = 0x1f80;
    const STATUS: u32 = 0x3f;

    pub(super) fn get() -> u64 {
        let mut word = 0u32;
        // SAFETY: stmxcsr stores 4 bytes to the address given, which is a live local u32; SSE is part of x86-64.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        u64::from(word & !STATUS)
    }

    pub(super) fn set(word: u64) {
        let word = word as u32;
        // SAFETY: ldmxcsr loads 4 bytes from a live local u32 that holds either the default or a word that stmxcsr gave, so no reserved
        // bit is set (which would fault). Rust assumes the default environment: entering it is always allowed, and leaving it only
        // restores what the caller of `FpEnv::enter` already ran in.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    /// Round to nearest, no flush to zero, no traps, no default-NaN mode.
    pub(super) const DEFAULT: u64 = 0;

    pub(super) fn get() -> u64 {
        let word: u64;
        // SAFETY: reading FPCR has no effect but its result; the register exists on every aarch64 CPU and is readable in user mode.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(super) fn set(word: u64) {
        // SAFETY: the word is the default or one that was read from FPCR. Rust assumes the default environment: entering it is always
        // allowed, and leaving it only restores what the caller of `FpEnv::enter` already ran in.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub(super) const DEFAULT: u64 = 0;

    pub(super) fn get() -> u64 {
        DEFAULT
    }

    pub(super) fn set(_word: u64) {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn every_available_level_parses_and_the_others_say_what_is_allowed() {
        for isa in Isa::ALL {
            let parsed = Isa::parse(isa.name());
            if isa.is_available() {
                assert_eq!(parsed.unwrap(), isa);
            } else {
                assert!(parsed.unwrap_err().to_string().contains("scalar"));
            }
        }
        let message = Isa::parse("sse9").unwrap_err().to_string();
        assert!(
            message.contains("sse9") && message.contains("scalar"),
            "{message}"
        );
        assert!(Isa::Scalar.is_available() && Isa::best().is_available());
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_guard_enters_the_default_environment_and_restores_the_callers() {
        let before = control::get();
        // Flush to zero, subnormals as zero, round up.
        let odd = control::DEFAULT | 0x8040 | 0x4000;
        control::set(odd);
        {
            let _guard = FpEnv::enter();
            assert_eq!(control::get(), control::DEFAULT);
            {
                let _nested = FpEnv::enter();
            }
            assert_eq!(control::get(), control::DEFAULT);
        }
        let restored = control::get();
        control::set(before);
        assert_eq!(restored, odd);
    }
}
