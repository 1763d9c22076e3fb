"""Tensors to quantize, and what the value codec promises about them, computed without it.

The promise (docs/format.md): with R the true range of a value's group and b bits,
|error| <= R/(2^b-1) · 1/2 · (1+2^-4)(1+2^-7) + 2 ulp(max|x|) for dither and nearest, twice the first term for
stochastic rounding. The factors pay for the outward rounding of the two stored numbers to bf16.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from helpers import bits_of
from hypothesis import strategies as st
from torch import Tensor

import daf_rs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = ("dither", "stochastic", "nearest")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)

#: What the elements look like. `special` holds NaN and ±Inf, `zeros` mostly exact zeros.
CONTENTS = (
    "normal",
    "heavy",
    "outlier_channels",
    "constant",
    "zeros",
    "all_zero",
    "subnormal",
    "huge",
    "sorted",
    "offset",
    "two_valued",
    "special",
)
#: How they lie in memory.
LAYOUTS = ("contiguous", "transposed", "permuted", "channels_last", "gapped", "offset", "expanded", "strided")


def content(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A contiguous tensor of the given kind; the same arguments give the same tensor."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    limit = torch.finfo(dtype).max
    if kind == "heavy":
        x = x / torch.randn(shape, generator=generator, dtype=torch.float64).abs().clamp_min(1e-3)
    elif kind == "outlier_channels" and x.dim():
        x[..., ::17] *= 40
    elif kind == "constant":
        x = torch.full(shape, 0.1, dtype=torch.float64)
    elif kind == "zeros":
        x = (x - 0.5).clamp_min(0)
    elif kind == "all_zero":
        x = torch.zeros(shape, dtype=torch.float64)
    elif kind == "subnormal":
        x = x * float(torch.finfo(dtype).tiny) * 0.1
    elif kind == "huge":
        x = (x / 3).clamp(-1, 1) * limit
    elif kind == "sorted":
        x = x.reshape(-1).sort().values.reshape(shape)
    elif kind == "offset":
        x = 1000 + x * 0.01
    elif kind == "two_valued":
        x = torch.where(x > 0, 1 / 0.9, 0.0)
    result = x.to(dtype)
    if kind == "special" and result.numel():
        flat = result.reshape(-1)
        where = torch.randperm(flat.numel(), generator=generator)
        few = max(1, flat.numel() // 300)
        flat[where[:few]] = torch.inf
        flat[where[few : 2 * few]] = -torch.inf
        flat[where[2 * few : 3 * few]] = -0.0
        # NaNs of every payload, quiet and signalling, both signs.
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        exponent = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}[dtype]
        mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
        chosen = where[3 * few : 4 * few]
        payload = torch.randint(1, 2**mantissa, (len(chosen),), generator=generator)
        sign = torch.randint(0, 2, (len(chosen),), generator=generator)
        top = 1 << (31 if dtype == torch.float32 else 15)
        patterns = (exponent + payload) - sign * top
        flat.view(integer)[chosen] = patterns.to(integer)
    return result


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of the same kind of content in the layout named; its shape may differ from `x`'s."""
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1)
    if layout == "permuted" and x.dim() >= 3:
        return x.permute(1, 0, *range(2, x.dim()))
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "gapped" and x.dim() >= 1:
        wide = torch.cat([x, x], dim=-1)
        return wide[..., : x.shape[-1]]
    if layout == "strided" and x.dim() >= 1:
        return x[..., ::2]
    if layout == "offset" and x.dim() >= 1:
        return x.reshape(-1)[1:] if x.numel() else x
    if layout == "expanded":
        return x.unsqueeze(0).expand(3, *x.shape)
    return x


@dataclass(frozen=True)
class Case:
    """One tensor and the settings to quantize it with."""

    tensor: Tensor
    kind: str
    layout: str
    bits: int
    group_size: int
    rounding: str
    groups: str
    seed: int

    @property
    def settings(self) -> dict[str, object]:
        """Keyword arguments for `daf_rs.quantize`."""
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "rounding": self.rounding,
            "groups": self.groups,
            "seed": self.seed,
        }


_SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (0, 5), (3, 0, 2), (1, 1), (31,), (32,), (33,), (32768,), (32769,), (70001,)]),
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(1, 300), st.integers(1, 200)),
    st.tuples(st.integers(1, 5), st.integers(1, 65), st.integers(1, 140)),
    st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12)),
)


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = CONTENTS,
    layouts: tuple[str, ...] = LAYOUTS,
    groups: tuple[str, ...] = ("auto", "row", "channel"),
) -> Case:
    """Every combination of dtype, bits, group size, rounding, groups, shape, content and layout."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(kinds))
    layout = draw(st.sampled_from(layouts))
    seed = draw(st.integers(0, 2**31 - 1))
    tensor = lay_out(content(kind, draw(_SHAPES), dtype, seed), layout)
    return Case(
        tensor,
        kind,
        layout,
        bits=draw(st.integers(1, 8)),
        group_size=draw(st.sampled_from(GROUP_SIZES)),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        groups=draw(st.sampled_from(groups)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


# --- Groups --------------------------------------------------------------------------------------------


def repeats_memory(x: Tensor) -> bool:
    """Whether a dimension of `x` is expanded."""
    return any(x.stride(dim) == 0 and x.shape[dim] > 1 for dim in range(x.dim()))


def memory_order(x: Tensor) -> Tensor:
    """The permutation of dimensions (outermost in memory first) applied to `x`; expanded tensors are written out."""
    if repeats_memory(x):
        return x.contiguous()
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d) if x.shape[d] > 1 else -(2**62))
    return x.permute(order)


def row_groups(count: int, group_size: int) -> Tensor:
    """Group number of each of `count` elements in memory order: consecutive ones, the last group short."""
    return torch.arange(count) // group_size


def channel_groups(rows: int, cols: int, group_size: int) -> Tensor:
    """Group number of each element of `[rows, cols]`: near equal runs of rows, one group a column."""
    runs = max(1, -(-rows // group_size))
    base, extra = divmod(rows, runs)
    lengths = torch.tensor([base + 1] * extra + [base] * (runs - extra))
    run = torch.repeat_interleave(torch.arange(runs), lengths)
    return (run[:, None] * cols + torch.arange(cols)[None, :]).reshape(-1)


def group_numbers(ordered: Tensor, group_size: int, groups: str) -> Tensor:
    """Group number of each element of a tensor whose dimensions are in memory order."""
    if groups == "row":
        return row_groups(ordered.numel(), group_size)
    sizes = [size for size in ordered.shape if size > 1]
    cols = sizes[-1] if sizes else 1
    return channel_groups(ordered.numel() // cols, cols, group_size)


def group_extremes(values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """(minimum, maximum) of each value's group (float64), of one-dimensional `values`; non-finite groups give NaN."""
    count = int(number.max()) + 1 if number.numel() else 0
    low = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, number, values, "amin")
    high = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, number, values, "amax")
    return low[number], high[number]


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of `dtype` at a magnitude (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(float(info.tiny))))
    return torch.exp2(exponent) * float(info.eps)


def error_bound(ordered: Tensor, bits: int, group_size: int, rounding: str, groups: str) -> Tensor:
    """Largest allowed |x' - x| of every element (float64, flat, in memory order); 0 where the value must be exact."""
    flat = ordered.reshape(-1).double()
    low, high = group_extremes(flat, group_numbers(ordered, group_size, groups))
    step = (high - low) / (2**bits - 1)
    share = 1.0 if rounding == "stochastic" else 0.5
    largest = torch.maximum(low.abs(), high.abs())
    bound = step * share * (1 + 2**-4) * (1 + 2**-7) + 2 * ulp(largest, ordered.dtype)
    exact = ~torch.isfinite(low + high) | (low == high)
    return torch.where(exact, torch.zeros_like(bound), bound)


@cache
def digest() -> str:
    """A checksum over the bytes and the decoded values of many tensors and settings."""
    total = hashlib.sha256()
    for kind in ("normal", "zeros", "special", "offset", "subnormal", "outlier_channels"):
        for dtype in DTYPES:
            x = content(kind, (130, 131), dtype, seed=1)
            for groups in ("row", "channel"):
                for bits in (1, 2, 3, 4, 8):
                    for rounding in ROUNDINGS:
                        q = daf_rs.quantize(x, bits=bits, rounding=rounding, groups=groups, seed=3)
                        total.update(q.to_bytes())
                        total.update(bits_of(daf_rs.dequantize(q)).numpy().tobytes())
    return total.hexdigest()
