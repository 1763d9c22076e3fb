"""Which rule holds for a saved tensor: `lookup`, `resolve` and `register_consumer`.

The rules themselves stand in `policy_table`; what a rule can say stands in `policy_rule`.
"""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .exceptions import InvalidArgumentError
from .policy_rule import (
    KINDS,
    MAX_BITS,
    Rule,
    dtype_name,
    is_width,
    representatives,
    round_up,
    step_up,
    to_f32,
)
from .policy_table import BOUNDARY, TABLE, UNKNOWN

__all__ = [
    "BOUNDARY",
    "KINDS",
    "TABLE",
    "UNKNOWN",
    "Rule",
    "lookup",
    "register_consumer",
    "representatives",
    "resolve",
]

_registered: dict[tuple[str, str], Rule] = {}
_lock = threading.Lock()


def lookup(node: str, field: str) -> Rule:
    """The rule of a reader: `node` is ``node.name()``, `field` the attribute without ``_raw_saved_``.

    Readers that neither the table nor `register_consumer` knows give `UNKNOWN` itself.

    >>> lookup("ReluBackward0", "result").kind
    'mask'
    >>> lookup("MyFunctionBackward", "tensors") is UNKNOWN
    True
    """
    key = (node, field)
    return _registered.get(key) or TABLE.get(key, UNKNOWN)


def register_consumer(node: str, field: str, rule: Rule | str | int) -> None:
    """Says how the tensors that `node` saves as `field` are read, for a node that the table does not know.

    Overrides the table. Takes effect for every tensor saved from then on; any thread may call it.

    Args:
        node: The node's name as ``grad_fn.name()`` gives it, for a custom Function ``"<Class>Backward"``.
        field: The saved field, with or without the prefix of its attribute (``"self"``, ``"_saved_self"``); for a
            custom Function ``"saved_tensors"``.
        rule: A `Rule`; or a kind that needs no threshold: ``"unused"``, ``"sign"``, ``"exact"``, ``"value"``
            (at the user's width); or an int from 1 to 8, a value code of that width.

    Raises:
        InvalidArgumentError: A name is no identifier, or the rule is none of the above.

    Example:
        >>> import daf_rs
        >>> daf_rs.register_consumer("SwiGLUBackward", "saved_tensors", 4)
        >>> from daf_rs.policy import lookup
        >>> lookup("SwiGLUBackward", "tensors").width(2)
        4
    """
    global _registered
    for what, name, example in (("node", node, "MyFunctionBackward"), ("field", field, "tensors")):
        if not isinstance(name, str) or not name or any(c.isspace() for c in name):
            raise InvalidArgumentError(f"{what} must be a name such as {example!r}; got {name!r}")
    for prefix in ("_raw_saved_", "_saved_", "saved_"):
        field = field.removeprefix(prefix)
    made = _as_rule(node, rule)
    with _lock:
        # Replaced, never changed in place: `lookup` reads without the lock.
        _registered = {**_registered, (node, field): made}
    _forget()


def _forget() -> None:
    """Makes the native layer ask again; it keeps the rules of the node types that it has met."""
    native = sys.modules.get(f"{__package__}._native")
    if native is not None:
        native.forget_consumers()


def _as_rule(node: str, rule: Rule | str | int) -> Rule:
    why = "as registered with register_consumer"
    if isinstance(rule, Rule):
        return rule if rule.why else replace(rule, why=why)
    if isinstance(rule, str):
        if rule in ("mask", "within", "not_beyond"):
            raise InvalidArgumentError(
                f"a {rule!r} rule needs its thresholds: pass Rule({rule!r}, consts=...) for {node!r}"
            )
        return Rule(rule, axis="producer", why=why)
    if is_width(rule):
        return Rule("value", bits=rule, axis="producer", why=why)
    raise InvalidArgumentError(
        f"rule must be a Rule, one of 'unused', 'sign', 'exact', 'value', or a width from 1 to {MAX_BITS}; got {rule!r}"
    )


def resolve(node: Any, field: str, dtype: Any = None) -> Rule:
    """The concrete rule for one autograd node: `lookup`, with the node's own attributes read.

    Needed only where `lookup` gives a rule with `attrs`. The result has none; thresholds are in `consts`,
    rounded to f32, as closed intervals for ``within`` (an open bound moves by one f32 step, which no f16, bf16
    or f32 value can tell from the open bound). A threshold that `dtype` cannot represent gives an exact rule,
    because PyTorch's kernels differ in the precision they compare such a threshold in.

    Args:
        node: The autograd node (``tensor.grad_fn``).
        field: The saved field.
        dtype: The saved tensor's dtype (``torch.float32``, ``torch.float16`` or ``torch.bfloat16``).

    >>> import torch
    >>> x = torch.randn(8, requires_grad=True)
    >>> resolve(torch.nn.functional.relu6(x).grad_fn, "self", x.dtype).consts
    (0.0, 6.0)
    >>> resolve((x**2).grad_fn, "self").kind, resolve((x**-1.5).grad_fn, "self").kind
    ('value', 'exact')
    """
    name = node.name()
    rule = lookup(name, field)
    if not rule.attrs:
        return rule
    values: list[Any] = [getattr(node, attr) if attr else None for attr in rule.attrs]
    if name == "PowBackward0" or "Norm" in name:
        return _resolve_power(name, rule, values[0])
    if name.startswith("Elu"):
        if math.prod(values) == 1:  # alpha * input_scale
            return replace(rule, bits=None, floor=3, attrs=(), why="backward takes a smooth derivative at it")
        return replace(rule, attrs=())
    if not all(_representable(value, dtype) for value in values):
        return Rule("exact", why=f"{rule.why}, and {dtype} cannot represent them")
    bounds = [None if value is None else to_f32(float(value)) for value in values]
    if name.startswith("Clamp"):
        return _resolve_clamp(rule, *bounds)
    if name in ("HardshrinkBackward0", "SoftshrinkBackward0"):
        size = bounds[0] or 0.0
        return Rule("within", consts=(-size, size), why=rule.why)
    return replace(rule, attrs=(), consts=tuple(-math.inf if bound is None else bound for bound in bounds))


def _resolve_clamp(rule: Rule, low: float | None, high: float | None) -> Rule:
    strict = _clamp_is_strict()
    if strict is None:
        return Rule("exact", why=f"{rule.why}; whether strictly cannot be told for this PyTorch")
    lo = -math.inf if low is None else step_up(low) if strict else low
    hi = math.inf if high is None else -step_up(-high) if strict else high
    return Rule("within", consts=(lo, hi), why=rule.why)


def _resolve_power(name: str, rule: Rule, value: Any) -> Rule:
    if name == "PowBackward0":
        if isinstance(value, (int, float)) and value >= 2 and float(value).is_integer():
            floor = 1 if value == 2 else 3
            # A square is often the beginning of a norm of the row (RMSNorm on CPU).
            return Rule("value", floor=floor, axis="row", why=f"backward takes its power {int(value) - 1}")
    elif value is None or value == 2:
        return Rule("value", axis="row", why="the 2-norm's gradient is linear in it; the norm is exact")
    elif value == 1:
        return Rule("sign", why="the 1-norm's gradient reads its sign only")
    return replace(rule, attrs=())


def _representable(value: Any, dtype: Any) -> bool:
    """Whether rounding `value` to the dtype leaves no doubt about comparisons with it.

    Every kernel compares f32 tensors in f32; f16 and bf16 tensors some compare in f32 and some in their own type.
    """
    if value is None or dtype is None:
        return True
    value = float(value)
    return not math.isnan(value) and (
        dtype_name(dtype) not in ("float16", "bfloat16") or round_up(value, dtype) == value
    )


@lru_cache(maxsize=1)
def _clamp_is_strict() -> bool | None:
    """Whether clamp's gradient vanishes *at* a scalar bound (newer PyTorch) or only beyond it.

    Read from the formulas that PyTorch ships; None when they are not there.
    """
    spec = find_spec("torchgen")
    if spec is None or spec.origin is None:
        return None
    formulas = Path(spec.origin).parent / "packaged" / "autograd" / "derivatives.yaml"
    if not formulas.is_file():
        return None
    text = formulas.read_text(encoding="utf-8")
    if "where(self > min, grad" in text:
        return True
    return False if "where(self >= min, grad" in text else None
