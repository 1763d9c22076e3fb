"""The exceptions that daf_rs raises: one base, each also the built-in a user would expect."""

from __future__ import annotations


class DafError(Exception):
    """Base of everything that daf_rs raises on its own account."""


class InvalidArgumentError(DafError, ValueError):
    """An argument is outside its documented range."""


class UnsupportedDtypeError(DafError, TypeError):
    """A dtype that the operation does not take."""


class BudgetExceededError(DafError, MemoryError):
    """What must be stored does not fit the byte budget."""


class OutOfMemoryError(DafError, MemoryError):
    """The operating system has no memory left for packed bytes."""


class CorruptDataError(DafError, RuntimeError):
    """Packed bytes are damaged, truncated or were not written by daf_rs."""


class BackendUnavailableError(DafError, RuntimeError):
    """A device or an instruction set that this build or machine lacks."""
