//! The only error type of the core. Each kind says whose fault it is; the bindings map kinds to Python exceptions one to one.

/// What went wrong; every message says what was given, what is allowed and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its documented range.
    #[error("{0}")]
    InvalidArgument(String),
    /// A dtype that the operation does not take.
    #[error("{0}")]
    UnsupportedDtype(String),
    /// Packed bytes that no encoder of this version wrote: damaged, truncated or hostile.
    #[error("corrupt data: {0}")]
    CorruptData(String),
    /// The operating system has no memory left for packed bytes.
    #[error("{0}")]
    OutOfMemory(String),
    /// A device or an instruction set that this build or machine lacks.
    #[error("{0}")]
    BackendUnavailable(String),
}

/// The core's result type.
pub type Result<T> = std::result::Result<T, Error>;
