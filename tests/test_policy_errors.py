"""The policy's value codes: bias and spread of the gradient, with errors like those of the dithered code.

On PyTorch alone (see `policy_cases`): each reader by itself gets its saved tensor with an error that is uniform in half
a step. `test_bias` measures the same through the package, all readers of an op together.
"""

from __future__ import annotations

import math

import pytest
import torch
from policy_cases import Reader, readers_of, record

from daf_rs.policy import resolve

SEEDS = 64
GROUP = 256
#: Bias of a gradient that is linear in the saved value, as a share of its norm: zero but for the estimate's own
#: noise of about spread / sqrt(SEEDS) * (2 / elements)^(1/4): 0.3 % at 4 bits and 1.4 % at 2 for 1,000 elements.
LINEAR_BIAS = {4: 0.012, 2: 0.04}
#: Bias where backward is smooth but not linear, at the width that the rule gives for 4 and for 2 bits asked.
SMOOTH_BIAS = {4: 0.03, 2: 0.07}
#: Spread of the gradient, as a share of its norm, at the width that the rule gives. Uniform errors of one step
#: have a standard deviation of s / sqrt(12); 256 normal values span about 5.6 deviations, so s = 5.6 / 15 at 4
#: bits and 5.6 / 3 at 2 bits, hence 0.11 and 0.54 for a product; ops whose gradient is small where most values
#: are (norms of one row, exponentials) have more.
SPREAD = {4: 0.25, 2: 0.95}


def dithered(x: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    """`x` with the error of the dithered code: uniform in half a step about it, for groups of 256 in a row."""
    flat = x.reshape(-1)
    groups = torch.nn.functional.pad(flat.unsqueeze(0), (0, -flat.numel() % GROUP), mode="replicate").view(-1, GROUP)
    step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1)
    noise = torch.rand(groups.shape, generator=generator) - 0.5
    return (groups + step * noise).view(-1)[: flat.numel()].view(x.shape)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("name", "reader"), readers_of("value"))
def test_error_of_value_codes(name: str, reader: Reader, bits: int) -> None:
    recording = record(name)
    expected = recording.gradients()
    (rule,) = {resolve(s.node, s.field, s.tensor.dtype) for s in recording.saved if s.reader == reader}
    width = rule.width(bits)
    generator = torch.Generator().manual_seed(bits)
    mean = [torch.zeros_like(g) for g in expected]
    square = 0.0
    for _ in range(SEEDS):
        got = recording.gradients(lambda s: dithered(s.tensor, width, generator) if s.reader == reader else s.tensor)
        errors = [g - e for g, e in zip(got, expected, strict=True)]
        square += sum(float(e.double().square().sum()) for e in errors) / SEEDS
        mean = [m + e / SEEDS for m, e in zip(mean, errors, strict=True)]
    # Only the leaves that the tensor has a say in count.
    norm = sum(float(e.double().square().sum()) for e, m in zip(expected, mean, strict=True) if bool(m.any()))
    assert norm > 0, "the tensor is not read at all"
    raw = sum(float(m.double().square().sum()) for m in mean)
    bias = math.sqrt(max(0.0, (raw - square / SEEDS) * SEEDS / (SEEDS - 1)) / norm)
    spread = math.sqrt(square / norm)
    print(f"{name} {reader}: {width} bits, bias {bias:.2%}, spread {spread:.2%}")
    linear = rule.bits is None and rule.floor == 1 and rule.plus == 0
    assert bias <= (LINEAR_BIAS if linear else SMOOTH_BIAS)[bits]
    assert spread <= SPREAD[bits]


def test_dithered_has_the_error_of_the_code() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator)
    got = torch.stack([dithered(x, 4, generator) for _ in range(400)]) - x
    step = torch.cat([(g.max() - g.min()).expand(len(g)) / 15 for g in x.split(GROUP)])
    assert bool((got.abs() <= step * 0.5001).all())
    assert float((got.square().mean(0) / step.square()).mean()) == pytest.approx(1 / 12, rel=0.02)
    assert float((got.mean(0) / step).abs().mean()) < 0.03
