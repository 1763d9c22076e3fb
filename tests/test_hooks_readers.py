"""Tensors with several readers are stored once, at what the most demanding needs; unknown readers get every bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Peek, assert_same_bits, compressed, exact, needs_node_hook, relative_error, row_of
from torch import Tensor, nn

import daf_rs

pytestmark = needs_node_hook

SHAPE = (512, 256)
N = SHAPE[0] * SHAPE[1]
#: What may come on top of the bits named: metadata of groups and blocks, rounding up to units.
OVERHEAD = 1.06
UNIT = 2048


def lossy(bits: Any = 2, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


# --- Several readers -----------------------------------------------------------------------------------


def test_a_relu_that_feeds_a_linear_layer_is_stored_once_and_its_gradient_is_exact() -> None:
    layer = nn.Linear(256, 64)
    x = leaf()

    def run(context: Any) -> tuple[Tensor, Tensor]:
        layer.zero_grad()
        with context:
            y = layer((x * 1.0).relu())
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return gradient, torch.autograd.grad(y.pow(2).sum(), layer.weight)[0]

    saved = lossy(4)
    ours, plain = run(saved), run(contextlib.nullcontext())
    assert_same_bits(ours[0], plain[0], "gradient through the ReLU")
    assert relative_error(ours[1], plain[1]) < 0.1
    with lossy(4) as saved:
        y = layer((x * 1.0).relu())
    # Half of the elements are zeros: a plane of masks and the codes of the other half.
    assert saved.stats().live_bytes <= N * (1 / 8 + 4 / 8 / 2 + 4 / 256) * OVERHEAD + UNIT
    assert sum(row.shared for row in saved.report().rows) == 1
    del y


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_relu_that_feeds_a_convolution(in_place: bool, channels_last: bool, bits: int) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=in_place), nn.Conv2d(16, 16, 3, padding=1))
    images = torch.randn(8, 8, 32, 32)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
        block = block.to(memory_format=torch.channels_last)

    def run(context: Any) -> list[Tensor]:
        block.zero_grad()
        with context:
            y = block(images).sum()
        y.backward()
        return [p.grad.clone() for p in block.parameters()]

    saved = lossy(bits)
    ours, plain = run(saved), run(contextlib.nullcontext())
    # The first convolution's gradient comes through the ReLU's mask only, and its input lives outside: exact.
    assert relative_error(ours[0], plain[0]) < 1e-5 or relative_error(ours[0], plain[0]) < 1.0 / 2**bits
    assert_same_bits(ours[1], plain[1], "bias before the ReLU")
    assert relative_error(ours[2], plain[2]) < 1.0 / 2**bits
    with lossy(bits) as saved:
        y = block(images).sum()
    elements = 8 * 16 * 32 * 32
    relu_rows = [row for row in saved.report().rows if row.shape == (8, 16, 32, 32)]
    assert len(relu_rows) == 2
    assert sum(row.stored_bytes for row in relu_rows) <= elements * (1 + bits * 0.6 + 8 / 32) / 8 * OVERHEAD + UNIT
    del y


def test_a_relu_alone_costs_one_bit_and_is_upgraded_only_when_values_are_read() -> None:
    x = leaf()
    with lossy(4) as saved:
        h = (x * 1.0).relu()
        mask_only = saved.stats().live_bytes
        y = h * h
    upgraded = saved.stats().live_bytes
    assert mask_only <= N / 8 * OVERHEAD + UNIT
    assert mask_only < upgraded <= N * (1 / 8 + 4 / 16 + 4 / 256) * OVERHEAD + UNIT
    assert relative_error(y.grad_fn._saved_self, h) < 0.15
    assert_same_bits(torch.autograd.grad(h.sum(), x, retain_graph=True)[0], (x > 0).float())


def test_an_upgrade_serves_the_first_reader_even_after_it_was_read() -> None:
    x = leaf()
    with lossy(4):
        h = (x * 1.0).relu()
        first = h.grad_fn._saved_result.clone()
        y = h * h
    again = h.grad_fn._saved_result
    assert torch.equal(first > 0, again > 0)
    assert torch.equal(again > 0, h > 0)
    y.sum().backward()
    assert relative_error(x.grad, 2 * x.detach().clamp_min(0)) < 0.15


@pytest.mark.parametrize("order", ["mask_first", "value_first", "exact_last", "exact_first"])
def test_the_most_demanding_reader_decides_and_every_reader_is_served(order: str) -> None:
    """Whatever comes first, each reader gets what it needs."""
    x = leaf()
    h_plain = (x * 1.0).detach()
    with lossy(2):
        h = x * 1.0
        parts = {
            "mask": lambda: F.leaky_relu(h, 0.1),
            "value": lambda: h * 1.0 * h.detach(),
            "smooth": lambda: F.gelu(h),
            "exact": lambda: torch.maximum(h, torch.zeros_like(h)),
        }
        sequence = {
            "mask_first": ["mask", "value", "smooth"],
            "value_first": ["value", "smooth", "mask"],
            "exact_last": ["mask", "value", "exact"],
            "exact_first": ["exact", "mask", "value"],
        }[order]
        outputs = {name: parts[name]() for name in sequence}
    if "mask" in outputs:
        seen = torch.autograd.grad(outputs["mask"].sum(), x, retain_graph=True)[0]
        assert_same_bits(seen, torch.where(h_plain > 0, 1.0, 0.1))
    if "exact" in outputs:
        node = outputs["exact"].grad_fn
        assert_same_bits(node._saved_self, h_plain)
    if "smooth" in outputs:
        assert relative_error(outputs["smooth"].grad_fn._saved_self, h_plain) < 0.25


def test_the_second_step_encodes_at_once_for_the_final_need() -> None:
    layer = nn.Linear(256, 64)
    x = leaf()
    context = lossy(4)
    peaks = []
    for _ in range(3):
        with context:
            h = (x * 1.0).relu()
            y = layer(h)
            del h
        peaks.append(context.stats().live_bytes)
        y.sum().backward()
        del y
    assert max(peaks) <= min(peaks) * 1.01


# --- Unknown readers -----------------------------------------------------------------------------------


def test_unknown_readers_get_every_bit_and_are_named_first_in_the_report() -> None:
    x = leaf()
    seen: list[Tensor] = []
    with lossy(1) as saved:
        h = (x * 1.0) * (x * 2.0)
        values = h.detach().clone()
        y = Peek.apply(seen, h)
        del h
    text = str(saved.report())
    assert "PeekBackward" in text
    assert "register_consumer" in text
    assert "unknown=" in text
    assert text.index("PeekBackward") < text.index("Mul")
    y.sum().backward()
    assert_same_bits(seen[0], values)


def test_unknown_readers_still_get_the_lossless_classes() -> None:
    seen: list[Tensor] = []
    mask = (torch.rand(SHAPE) < 0.5).float() * 2
    with lossy(1) as saved:
        y = Peek.apply(seen, leaf() * 1.0, mask.clone(), mask.bool(), torch.full(SHAPE, 3.0))
    assert {"two_valued", "bool", "constant"} <= {row.cls for row in saved.report().rows}
    y.sum().backward()
    assert_same_bits(seen[1], mask)
    assert_same_bits(seen[3], torch.full(SHAPE, 3.0))


def test_a_width_for_unknown_readers() -> None:
    x = leaf()
    seen: list[Tensor] = []
    with lossy(2, unknown=8) as saved:
        h = x * 1.0
        y = Peek.apply(seen, h)
    row = row_of(saved, "PeekBackward")
    assert (row.cls, row.bits) == ("value", 8)
    y.sum().backward()
    assert 0 < relative_error(seen[0], h) < 0.02


def test_exact_mode_ignores_a_width_for_unknown_readers_or_refuses_it() -> None:
    try:
        context = exact(unknown=8)
    except daf_rs.InvalidArgumentError:
        return
    seen: list[Tensor] = []
    x = leaf()
    with context:
        h = x * 1.0
        y = Peek.apply(seen, h)
    y.sum().backward()
    assert_same_bits(seen[0], h.detach())


class Cube(torch.autograd.Function):
    """x³, as a library might write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_register_consumer_teaches_a_reader() -> None:
    x = leaf()
    with lossy(4) as saved:
        y = Cube.apply(x * 1.0)
    assert row_of(saved, "CubeBackward").cls == "raw" or row_of(saved, "CubeBackward").kept
    del y
    try:
        daf_rs.register_consumer("CubeBackward", "saved_tensors", 6)
        with lossy(4) as saved:
            y = Cube.apply(x * 1.0)
        row = row_of(saved, "CubeBackward")
        assert (row.cls, row.bits) == ("value", 6)
        daf_rs.register_consumer("CubeBackward", "saved_tensors", "value")
        with lossy(4) as saved:
            y = Cube.apply(x * 1.0)
        assert row_of(saved, "CubeBackward").bits == 4
        y.sum().backward()
        assert relative_error(x.grad, 3 * x.detach() ** 2) < 0.2
    finally:
        daf_rs.register_consumer("CubeBackward", "saved_tensors", "exact")
