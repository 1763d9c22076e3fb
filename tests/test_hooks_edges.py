"""Cases at the edges of the hook layer: noise over steps, half masks, odd memory, rules that fail, readers of rows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import daf_rs

needs_node_hook = pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="this torch tells readers in backward only"
)


def weight_gradient(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    layer.weight.grad = None
    layer(x * 1.0).square().sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.clone()


def test_noise_is_new_in_every_step_of_one_context() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    x = torch.randn(256, 64, requires_grad=True)
    exact = weight_gradient(layer, x)
    with daf_rs.save_compressed(bits=2, min_bytes=0):
        weight_gradient(layer, x)  # the first step teaches older torch
        steps = [weight_gradient(layer, x) for _ in range(64)]
    assert not torch.equal(steps[0], steps[1])
    one = (steps[0] - exact).norm()
    mean = (torch.stack(steps).mean(0) - exact).norm()
    # 64 independent errors average to an eighth; repeated ones would not shrink at all.
    assert mean < one / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_of_half_tensors_are_exact_at_infinities(dtype: torch.dtype) -> None:
    values = torch.randn(4096).to(dtype)
    values[::7], values[1::7], values[2::7] = float("inf"), float("-inf"), float("nan")

    def gradient() -> torch.Tensor:
        x = values.clone().requires_grad_()
        torch.nan_to_num(x * 1.0).float().sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    with daf_rs.save_compressed(bits=4, min_bytes=0):
        gradient()
        ours = gradient()
    assert torch.equal(plain, ours)


def test_memory_that_is_not_aligned_to_its_elements_is_kept() -> None:
    memory = bytearray(4 * 200 * 200 + 2)
    x = torch.frombuffer(memory, dtype=torch.float32, offset=2).view(200, 200)
    weight = torch.randn(200, 200, requires_grad=True)
    with daf_rs.save_compressed(bits=4, min_bytes=0):
        y = x @ weight
    y.sum().backward()
    assert torch.equal(weight.grad, x.t() @ torch.ones(200, 200))


@pytest.mark.parametrize("bounds", [{"min": float("inf")}, {"max": float("-inf")}])
def test_bounds_that_leave_nothing_inside(bounds: dict[str, float]) -> None:
    x = torch.randn(8192, requires_grad=True)
    for _ in range(2):
        with daf_rs.save_compressed(bits=4, min_bytes=0):
            y = (x * 1.0).clamp(**bounds)
        (ours,) = torch.autograd.grad(y.nan_to_num().sum(), x)
    (plain,) = torch.autograd.grad((x * 1.0).clamp(**bounds).nan_to_num().sum(), x)
    assert torch.equal(ours, plain)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@needs_node_hook
def test_a_rule_that_fails_raises_in_the_forward_and_keeps_nothing() -> None:
    daf_rs.register_consumer("SquaresBackward", "saved_tensors", daf_rs.Rule("mask", attrs=("_saved_nope",)))
    try:
        h = torch.randn(8192, requires_grad=True) * 1.0
        alive = weakref.ref(h)
        with (
            pytest.raises(AttributeError, match="_saved_nope"),
            daf_rs.save_compressed(bits=4, min_bytes=0) as saved,
        ):
            Squares.apply(h)
        del h
        gc.collect()
        assert alive() is None
        assert saved.stats().live_handles == 0
    finally:
        daf_rs.register_consumer("SquaresBackward", "saved_tensors", "exact")


@needs_node_hook
@pytest.mark.parametrize("linear_first", [True, False])
def test_a_reader_of_rows_is_never_served_from_columns(linear_first: bool) -> None:
    """Rows of unlike scale: LayerNorm's gradient from channel groups would be thousands of percent off."""
    torch.manual_seed(0)
    scale = torch.randn(512, 1).mul(1.5).exp()
    base = torch.randn(512, 128) * scale
    linear, norm = nn.Linear(128, 128), nn.LayerNorm(128)

    def gradient() -> torch.Tensor:
        x = base.clone().requires_grad_()
        h = x * 1.0
        if linear_first:
            a, b = linear(h), norm(h)
        else:
            b, a = norm(h), linear(h)
        (norm_part,) = torch.autograd.grad((b * torch.arange(128.0).sin()).sum() + 0 * a.sum(), x)
        return norm_part

    plain = gradient()
    for _ in range(2):
        with daf_rs.save_compressed(bits=4, min_bytes=0):
            ours = gradient()
        assert (ours - plain).norm() < 0.2 * plain.norm()


def test_leaving_in_the_wrong_order_is_refused() -> None:
    outer, inner = daf_rs.save_compressed(bits=4), daf_rs.save_compressed(bits=2)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="in the order in which they were entered"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_every_other_column_is_compressed_too() -> None:
    x = torch.randn(512, 257, requires_grad=True)
    with daf_rs.save_compressed(bits=4, min_bytes=0) as saved:
        y = (x * 1.0)[:, ::2].sin()
    assert any(row.cls == "value" for row in saved.report())
    (ours,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad((x * 1.0)[:, ::2].sin().sum(), x)
    assert (ours - plain).norm() < 0.2 * plain.norm()
