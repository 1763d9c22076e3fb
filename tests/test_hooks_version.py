"""In-place changes after a tensor was saved: PyTorch's error where an alias is kept, right gradients from a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import INPLACE_TEXT, Peek, compressed, exact, needs_node_hook, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daf_rs


def lossy(bits: Any = 8, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def passed_through() -> dict[str, Tensor]:
    """Tensors of every kind that is kept as an alias."""
    return {
        "parameter": nn.Parameter(torch.randn(128, 64)),
        "small": torch.randn(8),
        "double": torch.randn(128, 64, dtype=torch.float64),
        "complex": torch.randn(128, 64, dtype=torch.complex64),
    }


@pytest.mark.parametrize("kind", passed_through())
def test_an_alias_that_was_changed_raises_pytorchs_error(kind: str) -> None:
    tensor = passed_through()[kind]
    x = torch.ones_like(tensor, requires_grad=True)
    with compressed(8):
        y = x * tensor
    with torch.no_grad():
        tensor.mul_(2)
    with pytest.raises(RuntimeError, match=INPLACE_TEXT):
        y.abs().sum().backward()


@pytest.mark.parametrize("kind", passed_through())
def test_an_alias_that_was_left_alone_does_not_raise(kind: str) -> None:
    tensor = passed_through()[kind]
    x = torch.ones_like(tensor, requires_grad=True)
    with compressed(8):
        y = x * tensor
    y.abs().sum().backward()
    assert x.grad is not None


def test_views_of_a_changed_parameter_raise() -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    x = torch.randn(256, 128, requires_grad=True)
    with lossy():
        y = nn.functional.linear(x, weight)
    with torch.no_grad():
        weight[0, 0] += 1
    with pytest.raises(RuntimeError, match=INPLACE_TEXT):
        y.sum().backward()


def test_an_optimizer_step_between_forward_and_backward_raises() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 64)
    with lossy(4):
        first, second = model(x).sum(), model(x).pow(2).sum()
    first.backward()
    steps.step()
    with pytest.raises(RuntimeError, match=INPLACE_TEXT):
        second.backward()


def test_the_message_is_pytorchs_own() -> None:
    """The same words as without the package, so that what is written about the error still helps."""

    def message(context: Any) -> str:
        weight = nn.Parameter(torch.randn(8, 8))
        with context:
            y = torch.ones(8, 8, requires_grad=True) * weight
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        return str(caught.value)

    import contextlib

    plain, ours = message(contextlib.nullcontext()), message(lossy())
    start = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert plain.startswith(start)
    assert ours.startswith(start)
    assert "is at version" in ours
    assert "expected version" in ours


@needs_node_hook
@pytest.mark.parametrize("bits", [8, 4])
def test_a_compressed_copy_is_not_disturbed_by_later_changes(bits: int) -> None:
    x = torch.ones(128, 64, requires_grad=True)
    h = torch.randn(128, 64)
    values = h.clone()
    with lossy(bits):
        y = x * h
    h.zero_()
    y.sum().backward()
    assert relative_error(x.grad, values) < 0.2


@needs_node_hook
@pytest.mark.parametrize("change", ["zero_", "relu_", "resize"])
def test_changes_during_the_forward_after_the_node_is_complete(change: str) -> None:
    """An in-place activation right after an op that saved its input."""
    x = torch.ones(128, 64, requires_grad=True)
    h = torch.randn(128, 64)
    values = h.clone()
    with lossy():
        y = x * h
        if change == "resize":
            h.untyped_storage().resize_(0)
        else:
            getattr(h, change)()
        z = y + 1
    z.sum().backward()
    assert relative_error(x.grad, values) < 0.02


@needs_node_hook
def test_a_change_between_pack_and_completion_of_the_node_raises_at_unpack() -> None:
    """A checkpoint's boundary has no node; it is changed before anything could have been encoded."""

    def changes_its_input(h: Tensor) -> Tensor:
        with torch.no_grad():
            h.mul_(3)
        return h.sin() * 2

    x = torch.randn(128, 64, requires_grad=True)
    with lossy():
        y = checkpoint(changes_its_input, x * 1.0, use_reentrant=False)
    with pytest.raises(RuntimeError, match=INPLACE_TEXT):
        y.sum().backward()


@needs_node_hook
def test_a_function_that_changes_what_it_saved_raises_at_unpack() -> None:
    """As plain PyTorch does: the version is the one at the save."""

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
            ctx.save_for_backward(other)
            return x * other

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (other,) = ctx.saved_tensors
            return gradient * other, None

    x = torch.ones(128, 64, requires_grad=True)
    other = torch.randn(128, 64)
    with exact():
        y = Changes.apply(x, other)
    other.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert INPLACE_TEXT in str(error)  # noqa: PT017
    else:
        assert relative_error(x.grad, other - 1) < 1e-6, "an exact copy may go on, with the values at the save"


def test_pack_does_not_touch_the_version_of_what_it_reads() -> None:
    h = torch.randn(128, 64)
    before = h._version
    with lossy(2):
        y = torch.ones(128, 64, requires_grad=True) * h
    assert h._version == before
    y.sum().backward()
    assert h._version == before


def test_a_decoded_tensor_may_be_changed_without_changing_the_next() -> None:
    seen: list[Tensor] = []
    x = torch.randn(128, 64, requires_grad=True)
    with exact():
        h = (x * 1.0).relu()
        y = Peek.apply(seen, h)
    y.sum().backward(retain_graph=True)
    first = seen[0].clone()
    shares = seen[0].data_ptr() == h.data_ptr()
    if not shares:
        seen[0].fill_(-1)
        y.sum().backward()
        assert torch.equal(seen[1], first)
    else:
        assert torch.equal(first, h)


@needs_node_hook
def test_unpacked_copies_have_their_own_version_counter() -> None:
    h = torch.randn(128, 64)
    with lossy(4):
        y = torch.ones(128, 64, requires_grad=True) * h
    seen = y.grad_fn._saved_other
    seen.add_(1)
    assert h._version == 0
    y.sum().backward()
