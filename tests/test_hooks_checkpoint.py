"""torch.utils.checkpoint in every nesting: right gradients, and the boundary kept as what it is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HAS_NODE_HOOK, assert_same_bits, compressed, exact, needs_node_hook, relative_error, rows_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import daf_rs

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def lossy(bits: Any = 8, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


class MLP(nn.Module):
    """Two linear layers with GELU; what is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, h: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(h)))


def reentrant(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True, **options)


def plain_checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **options)


def inside(context: Context, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`function` with the context entered inside it."""

    def run(h: Tensor) -> Tensor:
        with context():
            return function(h)

    return run


def half_inside(context: Context, mlp: MLP) -> Callable[[Tensor], Tensor]:
    """Only the first layer inside the context."""

    def run(h: Tensor) -> Tensor:
        with context():
            h = F.gelu(mlp.first(h))
        return mlp.second(h)

    return run


def save_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: results of matrix products are saved, the rest is computed again."""
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function: Callable[[Tensor], Tensor], h: Tensor, **options: Any) -> Tensor:
    return plain_checkpoint(
        function, h, context_fn=lambda: create_selective_checkpoint_contexts(save_products), **options
    )


#: name -> (how the MLP is run given a context for the inside, whether a context stands outside as well)
NESTINGS: dict[str, tuple[Callable[[MLP, Tensor, Context], Tensor], bool]] = {
    "none": (lambda m, h, _c: m(h), True),
    "plain": (lambda m, h, _c: plain_checkpoint(m, h), True),
    "reentrant": (lambda m, h, _c: reentrant(m, h), True),
    "plain_keyword": (lambda m, h, _c: plain_checkpoint(lambda *, z: m(z), z=h), True),
    "plain_closure": (lambda m, h, _c: plain_checkpoint(lambda: m(h)), True),
    "context_inside_plain": (lambda m, h, c: plain_checkpoint(inside(c, m), h), False),
    "context_inside_reentrant": (lambda m, h, c: reentrant(inside(c, m), h), False),
    "context_in_and_outside_plain": (lambda m, h, c: plain_checkpoint(inside(c, m), h), True),
    "context_in_and_outside_reentrant": (lambda m, h, c: reentrant(inside(c, m), h), True),
    "half_inside_plain": (lambda m, h, c: plain_checkpoint(half_inside(c, m), h), True),
    "half_inside_reentrant": (lambda m, h, c: reentrant(half_inside(c, m), h), True),
    "plain_in_plain": (lambda m, h, _c: plain_checkpoint(lambda z: plain_checkpoint(m, z).sin(), h), True),
    "reentrant_in_plain": (lambda m, h, _c: plain_checkpoint(lambda z: reentrant(m, z).sin(), h), True),
    "plain_in_reentrant": (lambda m, h, _c: reentrant(lambda z: plain_checkpoint(m, z).sin(), h), True),
    "reentrant_in_reentrant": (lambda m, h, _c: reentrant(lambda z: reentrant(m, z).sin(), h), True),
    "selective": (lambda m, h, _c: selective(m, h), True),
    "context_function": (
        lambda m, h, c: plain_checkpoint(m, h, context_fn=lambda: (c(), contextlib.nullcontext())),
        False,
    ),
    "no_early_stop": (lambda m, h, _c: plain_checkpoint(m, h, early_stop=False), True),
}


def run(name: str, context: Context, backward_inside: bool, mlp: MLP, x: Tensor) -> tuple[Tensor, ...]:
    """Loss and gradients of one nesting; the boundary is the output of a ReLU, which must not become a mask."""
    wrapped, outside = NESTINGS[name]
    mlp.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)
        if outside:
            stack.enter_context(context())
        loss = wrapped(mlp, (x * 1.5).relu(), context).pow(2).sum()
        if not backward_inside:
            stack.close()
        loss.backward()
    return loss.detach(), x.grad.clone(), *(p.grad.clone() for p in mlp.parameters())


@pytest.fixture
def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("name", NESTINGS)
def test_gradients_are_bit_equal_in_exact_mode(name: str, backward_inside: bool, mlp: MLP, x: Tensor) -> None:
    plain = run(name, contextlib.nullcontext, backward_inside, mlp, x)
    ours = run(name, exact, backward_inside, mlp, x)
    for actual, expected in zip(ours, plain, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("name", NESTINGS)
def test_gradients_are_close_at_eight_bits(name: str, backward_inside: bool, mlp: MLP, x: Tensor) -> None:
    plain = run(name, contextlib.nullcontext, backward_inside, mlp, x)
    ours = run(name, lossy, backward_inside, mlp, x)
    for actual, expected in zip(ours, plain, strict=True):
        assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("name", NESTINGS)
def test_a_boundary_keeps_eight_bits_whatever_the_width(name: str, backward_inside: bool, mlp: MLP, x: Tensor) -> None:
    """Everything is computed again from it, so its error reaches all gradients."""
    plain = run(name, contextlib.nullcontext, backward_inside, mlp, x)
    ours = run(name, lambda: lossy(2), backward_inside, mlp, x)
    for actual, expected in zip(ours, plain, strict=True):
        assert relative_error(actual, expected) < 0.9
    contexts_inside = "inside" in name or "context" in name or name in ("none", "reentrant")
    if not contexts_inside and "reentrant" not in name:
        for actual, expected in zip(ours, plain, strict=True):
            # pow(2)'s input is at two bits; that alone disturbs the gradients from the loss on.
            assert relative_error(actual, expected) < 0.6


def test_nothing_is_left_after_any_nesting(mlp: MLP, x: Tensor) -> None:
    for name in NESTINGS:
        for backward_inside in (False, True):
            made: list[daf_rs.save_compressed] = []

            def context() -> daf_rs.save_compressed:
                made.append(lossy(4))  # noqa: B023
                return made[-1]  # noqa: B023

            run(name, context, backward_inside, mlp, x)
            assert [saved.stats().live_bytes for saved in made] == [0] * len(made), name
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, name


# --- Boundaries ----------------------------------------------------------------------------------------


def boundary_values(h: Tensor, context: daf_rs.save_compressed, use_reentrant: bool) -> Tensor:
    """What the recomputation sees of the checkpoint's input."""
    seen: list[Tensor] = []

    def function(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return z * z

    with context:
        y = checkpoint(function, h, use_reentrant=use_reentrant)
    y.sum().backward()
    assert len(seen) == 2
    return seen[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_boundary_is_never_a_mask_and_never_below_eight_bits(bits: int, use_reentrant: bool, x: Tensor) -> None:
    h = (x * 2.0).relu()
    values = h.detach().clone()
    if use_reentrant and not HAS_NODE_HOOK:
        pytest.skip("without node_creation_hook the reader of a reentrant boundary is learned first")
    seen = boundary_values(h, lossy(bits), use_reentrant)
    if use_reentrant:
        # CheckpointFunction is a node like another custom Function: an unknown reader, so exact.
        assert_same_bits(seen, values)
    else:
        step = values.max() / 255 * 1.1
        assert (seen - values).abs().max() <= step


@pytest.mark.parametrize("mode", ["option", "exact"])
def test_boundaries_can_be_exact(mode: str, x: Tensor) -> None:
    h = (x * 2.0).sin()
    values = h.detach().clone()
    context = lossy(2, boundary="exact") if mode == "option" else exact()
    assert_same_bits(boundary_values(h, context, use_reentrant=False), values)


@needs_node_hook
def test_boundaries_can_have_another_width(x: Tensor) -> None:
    h = (x * 2.0).sin()
    values = h.detach().clone()
    error = {}
    for bits in (4, 6, 8):
        error[bits] = relative_error(boundary_values((x * 2.0).sin(), lossy(2, boundary=bits), False), values)
    assert error[4] > 2 * error[6] > 4 * error[8] > 0


@needs_node_hook
def test_a_boundary_is_shown_as_such_in_the_report(x: Tensor) -> None:
    with lossy(2) as saved:
        y = plain_checkpoint(lambda z: z.sin() * 2, x * 1.0)
    (row,) = saved.report().rows
    assert "checkpoint" in row.why
    assert row.bits == 8
    assert row.cls == "value"
    y.sum().backward()


@needs_node_hook
def test_a_relu_that_a_checkpoint_reads_too(x: Tensor) -> None:
    """The ReLU's node needs a mask, the boundary the values: one code serves both, and the mask stays exact."""
    for bits in (2, 4):
        x.grad = None
        with lossy(bits) as saved:
            h = (x * 1.0).relu()
            y = plain_checkpoint(lambda z: z * 3.0, h)
        y.sum().backward()
        assert_same_bits(x.grad, 3.0 * (x.detach() > 0))
        assert all(row.cls != "raw" for row in rows_of(saved))


@needs_node_hook
def test_the_boundarys_memory_is_freed_if_it_is_positional(x: Tensor, mlp: MLP) -> None:
    for use_reentrant in (False, True):
        with lossy(4):
            h = x * 1.0
            reference = StorageWeakRef(h.untyped_storage())
            y = checkpoint(mlp, h, use_reentrant=use_reentrant)
            del h
        if not use_reentrant:
            assert reference.expired()
        y.sum().backward()
        assert reference.expired()


def test_number_of_packs_follows_the_kind_of_checkpoint(mlp: MLP, x: Tensor) -> None:
    """One boundary each; a plain checkpoint's recomputation packs nothing, a reentrant one's packs if it is inside."""
    packs = {}
    for name, function in (("plain", plain_checkpoint), ("reentrant", reentrant)):
        for backward_inside in (False, True):
            mlp.zero_grad()
            saved = lossy(4)
            with contextlib.ExitStack() as stack:
                stack.enter_context(saved)
                y = function(mlp, x * 1.0)
                after_forward = saved.stats().packs
                if not backward_inside:
                    stack.close()
                y.sum().backward()
            packs[name, backward_inside] = saved.stats().packs - after_forward
            assert 1 <= after_forward <= 2
    assert packs["plain", False] == packs["plain", True] == packs["reentrant", False] == 0
    assert packs["reentrant", True] >= 5


@needs_node_hook
def test_a_reentrant_recomputation_is_encoded_as_a_forward(mlp: MLP, x: Tensor) -> None:
    with lossy(2) as saved:
        y = reentrant(mlp, x * 1.0)
        y.sum().backward()
    assert any(row.cls == "value" and row.bits and row.bits < 8 for row in saved.report().rows)


def test_dropout_is_replayed(mlp: MLP, x: Tensor) -> None:
    def function(z: Tensor) -> Tensor:
        return F.dropout(mlp(z), 0.5)

    def gradient(context: Context, use_reentrant: bool) -> Tensor:
        torch.manual_seed(5)
        with context():
            y = checkpoint(function, x * 1.0, use_reentrant=use_reentrant)
        return torch.autograd.grad(y.sum(), x)[0] if not use_reentrant else _backward(y, x)

    for use_reentrant in (False, True):
        assert_same_bits(gradient(exact, use_reentrant), gradient(contextlib.nullcontext, use_reentrant))


def _backward(y: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    y.sum().backward()
    return x.grad.clone()


def test_checkpoint_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())])
    x = torch.randn(256, 64, requires_grad=True)

    def gradient(context: Context) -> list[Tensor]:
        model.zero_grad()
        with context():
            y = checkpoint_sequential(model, 2, x * 1.0, use_reentrant=False)
        y.sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, plain in zip(gradient(exact), gradient(contextlib.nullcontext), strict=True):
        assert_same_bits(ours, plain)


def _supports_respect() -> bool:
    import inspect

    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


@pytest.mark.skipif(not _supports_respect(), reason="checkpoint has no respect_saved_tensors_hooks in this torch")
@pytest.mark.parametrize("respect", [True, False])
def test_selective_checkpointing_with_its_saves_through_the_hooks(respect: bool, mlp: MLP, x: Tensor) -> None:
    """In that mode pack runs with grad mode on and sees detached tensors."""

    def gradient(context: Context) -> tuple[list[Tensor], Any]:
        mlp.zero_grad()
        with context() as saved:
            y = selective(mlp, x * 1.0, respect_saved_tensors_hooks=respect)
        y.pow(2).sum().backward()
        return [p.grad.clone() for p in mlp.parameters()], saved

    plain, _ = gradient(contextlib.nullcontext)
    ours, saved = gradient(exact)
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)
    assert saved.stats().packs >= (3 if respect else 1)
    assert saved.stats().live_bytes == 0
    close, _ = gradient(lambda: lossy(8))
    for a, b in zip(close, plain, strict=True):
        assert relative_error(a, b) < 0.05


def test_a_failed_recomputation_leaves_the_hooks_in_order(mlp: MLP, x: Tensor) -> None:
    calls = [0]

    def function(z: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("the second time fails")
        return mlp(z)

    with lossy(4) as saved:
        y = plain_checkpoint(function, x * 1.0)
        with pytest.raises(ValueError, match="the second time"):
            y.sum().backward()
        z = (x * 1.0).sin()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    z.sum().backward()
    del y, z
    assert saved.stats().live_bytes == 0
