"""torch.func and its neighbours: what works under the context, and an error that helps where PyTorch refuses."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact
from torch import Tensor, nn

import daf_rs


def lossy(bits: Any = 4, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def scalar(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: torch.func.grad(scalar)(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(scalar)(x),
    "vjp": lambda x: torch.func.vjp(scalar, x)[1](torch.tensor(1.0)),
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x[0]),
    "hessian": lambda x: torch.func.hessian(scalar)(x[0]),
    "vmap_of_grad": lambda x: torch.func.vmap(torch.func.grad(scalar))(x),
}


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + "".join(getattr(error, "__notes__", []))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_transforms_that_refuse_hooks_raise_and_the_message_names_the_way_out(name: str, where: str) -> None:
    x = torch.randn(16, 32)
    if name not in ("grad", "vjp") and where == "inside":
        pytest.skip("the context inside is the same code for every transform")

    def inside(z: Tensor) -> Tensor:
        with lossy():
            return scalar(z)

    def call() -> None:
        if where == "outside":
            with lossy():
                REFUSED[name](x)
        elif name == "grad":
            torch.func.grad(inside)(x)
        else:
            torch.func.vjp(inside, x)

    with pytest.raises(RuntimeError, match=r"torch\.func.*saved tensor hooks") as caught:
        call()
    text = whole_text(caught.value)
    said = text.split("RuntimeError", 1)[1]
    assert "save_compressed" in said
    assert "torch.autograd" in said, "the way out is reverse mode by torch.autograd, or leaving the context"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_after_the_error_everything_works() -> None:
    x = torch.randn(16, 32)
    with pytest.raises(RuntimeError), lossy():
        torch.func.grad(scalar)(x)
    expected = torch.func.grad(scalar)(x)
    y = x.clone().requires_grad_()
    with exact() as saved:
        loss = scalar(y)
    loss.backward()
    assert_same_bits(y.grad, expected)
    assert saved.stats().live_bytes == 0


WORKS: dict[str, Callable[[Tensor], Any]] = {
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x[0]),
    "linearize": lambda x: torch.func.linearize(torch.sin, x)[1](torch.ones_like(x)),
    "vmap": lambda x: torch.func.vmap(lambda row: (row.sin() * row).sum())(x),
    "vmap_with_grad": lambda x: _gradient(torch.func.vmap(lambda row: (row.sin() * row).sum()), x),
    "jacobian": lambda x: torch.autograd.functional.jacobian(torch.sin, x[0]),
    "jacobian_vectorized": lambda x: torch.autograd.functional.jacobian(torch.sin, x[0], vectorize=True),
    "hessian": lambda x: torch.autograd.functional.hessian(scalar, x[0]),
    "hessian_vectorized": lambda x: torch.autograd.functional.hessian(scalar, x[0], vectorize=True),
    "hvp": lambda x: torch.autograd.functional.hvp(scalar, x[0], torch.ones_like(x[0])),
    "vhp": lambda x: torch.autograd.functional.vhp(scalar, x[0], torch.ones_like(x[0])),
    "functional_jvp": lambda x: torch.autograd.functional.jvp(torch.sin, x, torch.ones_like(x)),
    "functional_call": lambda x: _functional_call(x),
    "forward_over_reverse": lambda x: _forward_over_reverse(x),
    "batched_gradients": lambda x: _batched_gradients(x),
}


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def _functional_call(x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, parameters, (x,)).pow(2).sum()
    return torch.autograd.grad(loss, tuple(parameters.values()))


def _forward_over_reverse(x: Tensor) -> Tensor:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        (gradient,) = torch.autograd.grad(scalar(dual), dual, create_graph=True)
        return forward_ad.unpack_dual(gradient).tangent.detach()


def _batched_gradients(x: Tensor) -> Tensor:
    x = x[0].clone().requires_grad_()
    y = x.sin() * x
    return torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True)[0]


def flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten(part)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKS)
def test_what_works_without_the_context_works_with_it(name: str) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    expected = flatten(WORKS[name](x))
    with exact() as saved:
        result = flatten(WORKS[name](x))
    assert len(result) == len(expected) > 0
    for a, b in zip(result, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)
    del result
    assert saved.stats().live_bytes == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vmap", "vmap_with_grad", "jvp", "forward_over_reverse", "batched_gradients"])
def test_batched_and_dual_tensors_are_not_mistaken_for_plain_ones_at_few_bits(name: str) -> None:
    """Wrappers of functorch show no memory of their own; they pass, or are encoded with the right values."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    expected = flatten(WORKS[name](x))
    with lossy(8):
        result = flatten(WORKS[name](x))
    for a, b in zip(result, expected, strict=True):
        assert (a - b).abs().max() < 0.1


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, w).tanh(),
        lambda x, w: F.gelu(x) * w.sum(),
        lambda x, w: F.layer_norm(x, x.shape[-1:]) @ w.t(),
        lambda x, w: (x @ w.t()).softmax(-1),
        lambda x, w: (x * x).exp().log() + w.mean(),
    ],
)
def test_gradcheck_and_gradgradcheck(function: Callable[[Tensor, Tensor], Tensor], second: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    with exact():
        assert check(function, (x, w))


def test_gradcheck_of_float32_is_exact_as_well() -> None:
    """Float32 goes through the package (float64 passes by), so the two gradients are compared bit by bit."""
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)

    def both(context: Any) -> tuple[Tensor, ...]:
        with context:
            y = (F.gelu(x @ w) * x).softmax(-1).pow(2).sum()
            first = torch.autograd.grad(y, (x, w), create_graph=True)
            return (*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w)))

    for a, b in zip(both(exact()), both(contextlib.nullcontext()), strict=True):
        assert_same_bits(a.detach(), b.detach())
