//! Element types of the value codec, and the one macro that turns a run-time dtype into a generic call.

use half::{bf16, f16};

/// A floating-point element type that the value codec quantizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FloatType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16: the upper half of a binary32.
    BF16 = 2,
}

impl FloatType {
    /// All types, in the order of their codes in the format.
    pub const ALL: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::BF16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::BF16 => 2,
        }
    }

    /// The type with this code in the format.
    pub const fn from_code(code: u8) -> Option<FloatType> {
        match code {
            0 => Some(FloatType::F32),
            1 => Some(FloatType::F16),
            2 => Some(FloatType::BF16),
            _ => None,
        }
    }

    /// The name that torch prints, without its `torch.` prefix.
    pub const fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "float32",
            FloatType::F16 => "float16",
            FloatType::BF16 => "bfloat16",
        }
    }
}

/// A Rust type with a [`FloatType`]; exact in f32.
pub trait Float: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    /// The run-time name of this type.
    const TYPE: FloatType;
    /// The value as f32, exactly.
    fn to_f32(self) -> f32;
    /// The nearest value of this type (ties to even), clamped to the finite range for the half types.
    fn from_f32_finite(x: f32) -> Self;
    /// The nearest value of this type (ties to even); infinities and NaN stay what they are.
    fn from_f32(x: f32) -> Self;
    /// The smallest positive (subnormal) value.
    fn smallest_positive() -> Self;
}

impl Float for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    const TYPE: FloatType = FloatType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32_finite(x: f32) -> Self {
        x
    }
    fn smallest_positive() -> Self {
        f32::from_bits(1)
    }
}

impl Float for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    const TYPE: FloatType = FloatType::F16;
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32_finite(x: f32) -> Self {
        f16::from_f32(x.clamp(-65504.0, 65504.0))
    }
    fn smallest_positive() -> Self {
        f16::from_bits(1)
    }
}

impl Float for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    const TYPE: FloatType = FloatType::BF16;
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32_finite(x: f32) -> Self {
        bf16::from_f32(x.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32()))
    }
    fn smallest_positive() -> Self {
        bf16::from_bits(1)
    }
}

/// Calls `$body` with `$T` bound to the Rust type of a [`FloatType`].
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::FloatType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::FloatType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::dtype::FloatType::BF16 => {
                type $T = half::bf16;
                $body
            }
        }
    };
}
