"""Gradients of gradients: what is saved while backward runs is not quantized a second time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, nodes_of, relative_error
from torch import Tensor, nn

import daf_rs


def lossy(bits: Any = 4, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def twice(context: Any, backward_inside: bool, second_inside: bool) -> tuple[Tensor, Tensor]:
    """First and second derivative of a small function."""
    x, w = leaf(128, 64), leaf(64, 64, seed=2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        y = (F.linear(x * 1.0, w).tanh() * x).pow(2).sum()
        if not backward_inside:
            stack.close()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        if not second_inside:
            stack.close()
        (second,) = torch.autograd.grad(first.pow(2).sum(), w)
    return first.detach(), second


@pytest.mark.parametrize(("backward_inside", "second_inside"), [(False, False), (True, False), (True, True)])
def test_double_backward_is_bit_equal_in_exact_mode(backward_inside: bool, second_inside: bool) -> None:
    plain = twice(contextlib.nullcontext(), backward_inside, second_inside)
    ours = twice(exact(), backward_inside, second_inside)
    assert_same_bits(ours[0], plain[0], "first derivative")
    assert_same_bits(ours[1], plain[1], "second derivative")


@pytest.mark.parametrize(("backward_inside", "second_inside"), [(False, False), (True, False), (True, True)])
def test_double_backward_is_close_at_eight_bits(backward_inside: bool, second_inside: bool) -> None:
    plain = twice(contextlib.nullcontext(), backward_inside, second_inside)
    ours = twice(lossy(8), backward_inside, second_inside)
    assert relative_error(ours[0], plain[0]) < 0.06
    assert relative_error(ours[1], plain[1]) < 0.12


def test_tensors_saved_by_a_running_backward_pass_through_exactly() -> None:
    x, other = leaf(128, 64), torch.randn(128, 64)
    upstream = torch.randn(128, 64, requires_grad=True)
    with lossy(1) as saved:
        y = (x * 1.0) * other.clone()
        packs = saved.stats().packs
        (gradient,) = torch.autograd.grad(y, x, upstream * 1.0, create_graph=True)
        during = saved.stats().packs - packs
    assert during > 0, "the backward inside the context saved nothing, so this test shows nothing"
    rows = saved.report().rows[-during:]
    assert all(row.cls != "value" for row in rows), saved.report()
    assert any("backward" in row.why for row in rows)
    exact_gradients = [
        node for node in nodes_of(gradient) if node.name() == "MulBackward0" and node._saved_other is not None
    ]
    assert exact_gradients


def test_a_gradient_is_not_quantized_a_second_time() -> None:
    """With and without the context around backward the error is the same, although backward saves gradients too."""
    x = leaf(256, 64)

    def penalty(inside: bool) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(lossy(2, seed=7))
            y = ((x * 1.0) * (x * 2.0) * (x * 3.0)).sum()
            if not inside:
                stack.close()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    assert_same_bits(penalty(inside=True), penalty(inside=False))


def test_gradient_penalty_training_step() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Softplus(), nn.Linear(64, 1))
    x = torch.randn(256, 64, requires_grad=True)

    def step(context: Any) -> list[Tensor]:
        critic.zero_grad()
        with context:
            score = critic(x).sum()
            (gradient,) = torch.autograd.grad(score, x, create_graph=True)
            loss = score * 0.1 + (gradient.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        return [p.grad.clone() for p in critic.parameters() if p.grad is not None]

    plain = step(contextlib.nullcontext())
    for a, b in zip(step(exact()), plain, strict=True):
        assert_same_bits(a, b)
    for a, b in zip(step(lossy(8)), plain, strict=True):
        assert relative_error(a, b) < 0.15


MASKED = {
    "relu": F.relu,
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "abs": torch.abs,
    "clamp": lambda h: h.clamp(-0.5, 0.5),
    "hardtanh": F.hardtanh,
    "dropout": lambda h: F.dropout(h, 0.5),
    "max_pool": lambda h: F.max_pool1d(h[None], 2)[0],
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_do_not_stand_in_the_way_of_a_second_derivative(name: str) -> None:
    x, w = leaf(128, 64), leaf(64, 64, seed=2)

    def both(context: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        with context:
            y = MASKED[name]((x * 1.0) @ w.detach()).pow(2).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.pow(2).sum(), x)[0]

    plain, ours = both(contextlib.nullcontext()), both(exact())
    assert_same_bits(ours[0], plain[0])
    assert_same_bits(ours[1], plain[1])


def test_create_graph_switches_grad_mode_on_in_unpack_and_nothing_is_recorded() -> None:
    x = leaf(128, 64)
    with lossy(4):
        y = (x * 1.0) * (x * 2.0)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    names = {node.name() for node in nodes_of(gradient)}
    assert names <= {"AddBackward0", "MulBackward0", "torch::autograd::AccumulateGrad", "ExpandBackward0"}, names
    with torch.enable_grad():
        seen = y.grad_fn._saved_self
    assert seen.grad_fn is None or seen.grad_fn.name() == "MulBackward0", "only autograd attaches the history"


def test_nothing_is_left_after_double_backward() -> None:
    x = leaf(128, 64)
    with lossy(4) as saved:
        y = ((x * 1.0) * (x * 2.0)).tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), x)[0]
    del y, first
    assert second.shape == x.shape
    assert saved.stats().live_bytes == 0
