"""Checks of arguments that several functions take: one message each, saying what was given and what is allowed."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch

from . import _native
from .exceptions import InvalidArgumentError

GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024)
ROUNDINGS: Final = ("dither", "stochastic", "nearest")
GROUPS: Final = ("auto", "row", "channel")
MAX_THREADS: Final = 1024


def integer(name: str, value: Any, low: int, high: int, note: str = "") -> int:
    """An int from `low` to `high`; bools and floats are none.

    >>> integer("bits", 4, 1, 8)
    4
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        raise InvalidArgumentError(f"{name} must be an integer from {low} to {high}{note}; got {value!r}")
    return number


def width_or_exact(name: str, value: Any) -> int | str:
    """A width of 1 to 8 bits, or ``"exact"``."""
    if isinstance(value, str) and value == "exact":
        return value
    return integer(name, value, 1, 8, ' or "exact"')


def group_size(value: Any) -> int:
    """A power of two from 32 to 1024."""
    size = integer("group_size", value, GROUP_SIZES[0], GROUP_SIZES[-1], ", a power of two")
    if size not in GROUP_SIZES:
        raise InvalidArgumentError(f"group_size must be a power of two from 32 to 1024; got {value!r}")
    return size


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def threads(value: Any) -> int:
    """A number of threads for the native functions: 0 stands for the default, which follows torch's number."""
    if value is not None:
        return integer("threads", value, 1, MAX_THREADS, ", or None for torch's number")
    follow_torch_threads()
    return 0


def follow_torch_threads() -> None:
    """Makes ``torch.get_num_threads()`` the native default, unless ``DAF_NUM_THREADS`` says otherwise."""
    _native.set_default_threads(torch.get_num_threads())
