"""`Rule`: how one reader's saved tensor may be stored."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from .exceptions import InvalidArgumentError

KINDS: Final = ("unused", "mask", "sign", "within", "not_beyond", "exact", "value")
AXES: Final = ("last", "row", "dim1", "heads", "producer", "flat")
GUARDS: Final = ("", "q", "k", "bmm")
MAX_BITS: Final = 8

#: The smallest positive number of any dtype that is coded (f32's subnormal): ``x > 0`` is ``x >= TINY``.
TINY: Final = 2.0**-149
#: The largest finite f32. Every finite f16, bf16 and f32 lies within ``[-HUGE, HUGE]``.
HUGE: Final = (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class Rule:
    """How one reader's saved tensor may be stored.

    Attributes:
        kind: What backward reads.

            * ``"unused"``: nothing but shape and dtype. Stored in 0 bytes; what backward gets has undefined contents.
            * ``"mask"``: only whether ``!(x <= t)``, so NaN counts as set. 1 bit.
            * ``"within"``: only whether ``lo <= x <= hi``, so NaN counts as unset. 1 bit.
            * ``"not_beyond"``: only whether ``!(x <= lo or x >= hi)``, so NaN counts as set. 1 bit.
            * ``"sign"``: only the sign (1, 0, -1). 2 bits; a tensor with a NaN is kept exactly.
            * ``"exact"``: every bit may matter. Lossless classes, else stored as it is.
            * ``"value"``: the value, and an unbiased error is harmless. A lossless class that is no larger
              (a constant, a dropout mask) is taken first, then the value code.
        bits: A fixed width of a value code; None takes the width that the user asked for.
        plus: Bits added to the user's width (at most 8 in all).
        floor: The smallest width.
        axis: Which dimension is the channel: ``"last"``, ``"dim1"``, ``"heads"`` (attention), ``"producer"``
            (as the op that made the tensor says) or ``"flat"``. ``"row"``: none, and groups stay within the rows of
            the last dimension, because backward weighs each row by its own scale.
        guard: ``"q"`` and ``"k"`` (attention) or ``"bmm"``: the width must also keep the error of the scores
            small, which needs both tensors.
        attrs: Node attributes that the rule depends on. Unresolved, such a rule is safe but may keep
            more than it must; `resolve` makes it concrete for a node.
        consts: Thresholds: ``(t,)`` of a mask, ``(lo, hi)`` of within and not_beyond.
        why: One line for the report.

    Raises:
        InvalidArgumentError: A field is none of what is listed here, or thresholds are missing.

    Example:
        >>> Rule("value", plus=2, why="attention scores amplify its error").width(4)
        6
        >>> Rule("within", consts=(0.0, 6.0))
        Rule(kind='within', bits=None, plus=0, floor=1, axis='flat', guard='', attrs=(), consts=(0.0, 6.0), why='')
    """

    kind: str
    bits: int | None = None
    plus: int = 0
    floor: int = 1
    axis: str = "flat"
    guard: str = ""
    attrs: tuple[str, ...] = ()
    consts: tuple[float, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgumentError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.bits is not None and not is_width(self.bits):
            raise InvalidArgumentError(f"bits must be an integer from 1 to {MAX_BITS} or None; got {self.bits!r}")
        if not is_width(self.floor):
            raise InvalidArgumentError(f"floor must be an integer from 1 to {MAX_BITS}; got {self.floor!r}")
        if isinstance(self.plus, bool) or not isinstance(self.plus, int) or not 0 <= self.plus < MAX_BITS:
            raise InvalidArgumentError(f"plus must be an integer from 0 to {MAX_BITS - 1}; got {self.plus!r}")
        if self.axis not in AXES:
            raise InvalidArgumentError(f"axis must be one of {', '.join(AXES)}; got {self.axis!r}")
        if self.guard not in GUARDS:
            raise InvalidArgumentError(f"guard must be one of '', 'q', 'k', 'bmm'; got {self.guard!r}")
        wanted = {"mask": 1, "within": 2, "not_beyond": 2}.get(self.kind, 0)
        if wanted and not self.attrs and len(self.consts) != wanted:
            raise InvalidArgumentError(
                f"a {self.kind!r} rule needs {wanted} threshold(s) in consts (or node attributes in attrs); "
                f"got {self.consts!r}"
            )

    def width(self, bits: int) -> int:
        """The width of a value code when the user asked for `bits`.

        >>> Rule("value", plus=2, floor=3).width(4), Rule("value", floor=3).width(2), Rule("value", bits=8).width(2)
        (6, 3, 8)
        """
        if self.bits is not None:
            return self.bits
        return max(self.floor, min(MAX_BITS, bits + self.plus))


def is_width(value: object) -> bool:
    """Whether `value` is an integer that a value code can have as its width."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_BITS


def to_f32(value: float) -> float:
    """Rounds to f32, to infinity beyond its range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def step_up(value: float) -> float:
    """Returns the smallest f32 above an f32.

    For f32, f16 and bf16 alike, ``x > value`` is then ``x >= step_up(value)``; above infinity there is only NaN,
    to which every comparison is false.
    """
    if math.isnan(value) or value == math.inf:
        return math.nan
    if value == 0.0:
        return TINY
    (word,) = struct.unpack("<i", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<i", word + (1 if value > 0.0 else -1)))[0])


@lru_cache(maxsize=256)
def representatives(rule: Rule, dtype: Any = None) -> tuple[float, float]:
    """Two values that backward cannot tell from the real ones: for elements that are set, and for the rest.

    Both are exact in `dtype` (f32 by default), and finite where finite values will do, so that a NaN or an
    infinity is never made up. If no value of the dtype can be set (or unset), that one is 1 (or 0).

    >>> representatives(Rule("mask", consts=(0.0,)))
    (1.0, 0.0)
    >>> representatives(Rule("within", consts=(-3.0, 3.0)))
    (1.0, 4.0)
    """
    if rule.kind == "mask":
        low, high, nan_is_set = step_up(rule.consts[0]), math.inf, True
    elif rule.kind == "within":
        low, high, nan_is_set = *rule.consts, False
    elif rule.kind == "not_beyond":
        low, high, nan_is_set = step_up(rule.consts[0]), -step_up(-rule.consts[1]), True
    else:
        raise InvalidArgumentError(f"only mask, within and not_beyond rules have representatives; got {rule.kind!r}")

    def is_set(x: float) -> bool:
        return nan_is_set if math.isnan(x) else low <= x <= high

    trials = [1.0, 0.0, -1.0, 4.0, -4.0, round_up(low, dtype), math.inf, -math.inf, math.nan]
    chosen = next((x for x in trials if is_set(x)), 1.0)
    rest = next((x for x in [0.0, *trials] if not is_set(x)), 0.0)
    return chosen, rest


def dtype_name(dtype: Any) -> str:
    """``"float32"`` of ``torch.float32`` (or of None, the default)."""
    return "float32" if dtype is None else str(dtype).rpartition(".")[2]


def round_up(value: float, dtype: Any) -> float:
    """Returns the smallest value of the dtype that is not below `value`.

    Without torch: this runs inside of hooks, where a default device or a mode may be in force.

    >>> round_up(1.0, "float16"), round_up(1.0001, "float16"), round_up(-1.0001, "bfloat16")
    (1.0, 1.0009765625, -1.0)
    """
    if not math.isfinite(value):
        return value
    value = _f32_up(value)
    drop = {"float16": 13, "bfloat16": 16}.get(dtype_name(dtype), 0)
    if drop == 13 and abs(value) < 2.0**-14:  # f16's subnormals are whole multiples of 2^-24
        return math.ceil(value * 2.0**24) * 2.0**-24
    word = _word(abs(value))
    low = word & ((1 << drop) - 1)
    word -= low
    if low and value > 0.0:
        word += 1 << drop
    rounded = _float(word)
    if drop == 13 and rounded > 65504.0:
        rounded = math.inf if value > 0.0 else 65504.0
    return math.copysign(rounded, value)


def _f32_up(value: float) -> float:
    rounded = to_f32(value)
    return step_up(rounded) if rounded < value else rounded


def _word(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _float(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])
