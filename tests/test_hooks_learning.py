"""Without node_creation_hook (torch before 2.15) the first backward teaches who reads what; nothing may go wrong.

The hook is switched off here, so that every version of torch runs this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Peek,
    assert_same_bits,
    assert_same_gradients,
    compressed,
    cosine,
    exact,
    gradients,
    relative_error,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daf_rs
from daf_rs.testing import models


@pytest.fixture(autouse=True)
def without_node_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daf_rs.context._HAS_NODE_HOOK", False)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(context: daf_rs.save_compressed, op: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """(live bytes after the forward, gradient) of one step."""
    with context:
        y = op(x * 1.0)
    live = context.stats().live_bytes
    return live, torch.autograd.grad(y.sum(), x)[0]


OPS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    # The op, bits an element that it may take from the second step on, largest error of the gradient.
    "relu": (F.relu, 1.1, 0.0),
    "leaky_relu": (F.leaky_relu, 1.1, 0.0),
    "gelu": (F.gelu, 4.4, 0.15),
    "product": (lambda h: h * h, 4.4, 0.15),
    "softmax": (lambda h: h.softmax(-1) * torch.arange(128.0), 8.6, 0.1),
    "amax": (lambda h: h.amax(1), 33, 0.0),
}


@pytest.mark.parametrize("name", OPS)
def test_the_first_step_is_exact_and_the_second_is_small(name: str) -> None:
    op, bits, limit = OPS[name]
    x = leaf(256, 128)
    plain = torch.autograd.grad(op(x * 1.0).sum(), x)[0]
    context = compressed(4, min_bytes=0)
    _, first = step(context, op, x)
    assert_same_bits(first, plain, "gradient of the first step")
    for _ in range(3):
        live, gradient = step(context, op, x)
        assert live <= x.numel() * bits / 8 + 4096
        error = relative_error(gradient, plain)
        assert error <= limit
    assert context.stats().live_bytes == 0


@pytest.mark.parametrize("bits", [4, "exact"])
def test_a_graph_that_changes_gives_a_right_gradient_or_an_error(bits: Any) -> None:
    """A mask that was stored for another reader is no value: it must never be taken for one."""
    x = leaf(256, 128)
    context = compressed(bits, min_bytes=0)
    sequence = [F.relu, F.relu, torch.tanh, torch.tanh, torch.sigmoid, F.relu, torch.exp, F.relu, torch.exp]
    right = 0
    for op in sequence:
        plain = torch.autograd.grad(op(x * 1.0).sum(), x)[0]
        try:
            _, gradient = step(context, op, x)
        except RuntimeError as error:
            assert bits != "exact"
            assert "another reader" in str(error)  # noqa: PT017
            assert "exact" in str(error)  # noqa: PT017
            continue
        right += 1
        assert relative_error(gradient, plain) < 0.15
    assert right >= 3
    assert context.stats().live_bytes == 0


def test_reading_a_saved_attribute_teaches_nothing_wrong() -> None:
    x = leaf(256, 128)
    context = compressed(4, min_bytes=0)
    for _ in range(3):
        with context:
            y = (x * 1.0).relu()
        seen = y.grad_fn._saved_result
        assert torch.equal(seen > 0, y > 0)
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_reader_of_a_checkpoints_boundary_is_meaningless(use_reentrant: bool) -> None:
    """At unpack the running node is whatever asked for the recomputation: here a ReLU, which reads a mask only."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128)

    def block(h: Tensor) -> Tensor:
        return layer(h).relu()

    def run(context: Any) -> list[Tensor]:
        layer.zero_grad()
        x = leaf(256, 128)
        with context:
            y = checkpoint(block, (x * 1.0).relu(), use_reentrant=use_reentrant)
        y.sum().backward()
        return [x.grad, layer.weight.grad.clone()]

    plain = run(contextlib.nullcontext())
    for bits, limit in (("exact", 1e-7), (4, 0.1), (2, 0.1)):
        context = compressed(bits, min_bytes=0)
        for _ in range(4):
            for ours, expected in zip(run(context), plain, strict=True):
                assert relative_error(ours, expected) < limit


@pytest.mark.parametrize("name", models.MODELS)
def test_models_are_bit_equal_in_exact_mode(name: str) -> None:
    options: dict[str, Any] = {"width": 8} if name == "resnet20" else {"width": 64}
    model = models.build(name, **options)
    batch = model.make_batch(0, 8)
    _, plain = gradients(model, batch)
    context = exact(model=model)
    for _ in range(3):
        _, ours = gradients(model, batch, context)
        assert_same_gradients(ours, plain)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_train_at_four_bits_and_shrink_from_the_second_step_on(name: str) -> None:
    options: dict[str, Any] = {"width": 8} if name == "resnet20" else {"width": 64}
    model = models.build(name, **options)
    batch = model.make_batch(0, 8)
    _, plain = gradients(model, batch)
    context = compressed(4, model=model)
    sizes = []
    for _ in range(3):
        with context:
            loss = batch.loss(model)
        sizes.append(context.stats().live_bytes)
        loss.backward()
        assert context.stats().live_bytes == 0
    _, ours = gradients(model, batch, context)
    assert cosine(ours, plain) > 0.95
    assert sizes[2] < sizes[0] * (0.9 if name == "lstm" else 0.35)
    losses = train(model, [batch] * 6, lambda: context)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [*OPS, "function"])
def test_a_width_for_unknown_readers_does_not_stand_in_for_readers_that_are_not_known_yet(name: str) -> None:
    """In the first step every reader is unknown; `unknown=8` speaks of those that still are after backward."""
    op, _, limit = OPS.get(name, (lambda h: Peek.apply([], h) * 1.0, 0.0, 0.0))
    x = leaf(256, 128)
    plain = torch.autograd.grad(op(x * 1.0).sum(), x)[0]
    context = compressed(4, min_bytes=0, unknown=8)
    for _ in range(3):
        _, gradient = step(context, op, x)
        assert relative_error(gradient, plain) <= limit


def test_rrelu_passes_through_rightly() -> None:
    """Its noise is not yet written when it is saved; an alias sees it when it is."""
    x = leaf(256, 128)
    context = compressed(4, min_bytes=0)
    for seed in range(4):
        torch.manual_seed(seed)
        plain = torch.autograd.grad(F.rrelu(x * 1.0, training=True).sum(), x)[0]
        torch.manual_seed(seed)
        _, ours = step(context, lambda h: F.rrelu(h, training=True), x)
        assert_same_bits(ours, plain, f"gradient of step {seed}")
