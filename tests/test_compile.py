"""torch.compile under and around the context: the same gradients, and Dynamo does not trace the hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, compressed, exact, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))


def grads(model: nn.Module, function: Any, x: Tensor, context: Any) -> list[Tensor]:
    model.zero_grad()
    with context:
        y = function(x).pow(2).sum()
    y.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_inside_the_context_is_bit_equal_in_exact_mode(backend: str) -> None:
    model, x = mlp(), torch.randn(256, 64)
    compiled = torch.compile(model, backend=backend)
    plain = grads(model, compiled, x, contextlib.nullcontext())
    saved = exact(model=model)
    for _ in range(3):
        for a, b in zip(grads(model, compiled, x, saved), plain, strict=True):
            assert_same_bits(a, b)
    assert saved.stats().live_bytes == 0
    assert saved.stats().packs > 0


@pytest.mark.parametrize("bits", [2, 8])
def test_readers_inside_a_compiled_region_are_unknown_and_stay_exact(bits: int) -> None:
    """Only the compiled function's node is seen, so nothing is known of what it reads."""
    model, x = mlp(), torch.randn(256, 64)
    compiled = torch.compile(model, backend="aot_eager")

    def run(context: Any) -> list[Tensor]:
        model.zero_grad()
        with context:
            y = compiled(x)
        y.sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = run(contextlib.nullcontext())
    for a, b in zip(run(compressed(bits, min_bytes=0, model=model)), plain, strict=True):
        assert_same_bits(a, b)


def test_a_width_for_compiled_regions() -> None:
    model, x = mlp(), torch.randn(256, 64)
    compiled = torch.compile(model, backend="aot_eager")
    plain = grads(model, compiled, x, contextlib.nullcontext())
    saved = compressed(4, unknown=8, min_bytes=0, model=model)
    for a, b in zip(grads(model, compiled, x, saved), plain, strict=True):
        assert relative_error(a, b) < 0.1
    assert saved.stats().packs > 0


def test_the_hooks_are_not_traced_and_steps_do_not_recompile() -> None:
    """Many steps with a graph break, where Dynamo would trace hooks written in Python until its limit."""
    model, x = mlp(), torch.randn(256, 64)

    def loop(z: Tensor) -> Tensor:
        for layer in model:
            z = layer(z)
            torch._dynamo.graph_break()
        return z

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loop, backend=counter)
    plain = grads(model, loop, x, contextlib.nullcontext())
    saved = exact(model=model)
    frames = []
    for _ in range(14):
        ours = grads(model, compiled, x, saved)
        frames.append(counter.frame_count)
    for a, b in zip(ours, plain, strict=True):
        assert relative_error(a, b) < 1e-5
    assert frames[-1] == frames[1], f"frames compiled after each step: {frames}"


def test_compiling_before_the_first_context_needs_no_second_compilation() -> None:
    model, x = mlp(), torch.randn(256, 64)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    grads(model, compiled, x, contextlib.nullcontext())
    before = counter.frame_count
    for _ in range(3):
        grads(model, compiled, x, exact(model=model))
    assert counter.frame_count == before


def test_the_context_inside_a_compiled_function() -> None:
    model, x = mlp(), torch.randn(256, 64)

    def step(z: Tensor) -> Tensor:
        with exact(model=model):
            return model(z).pow(2).sum()

    model.zero_grad()
    torch.compile(step, backend="aot_eager")(x).backward()
    ours = [p.grad.clone() for p in model.parameters()]
    plain = grads(model, model, x, contextlib.nullcontext())
    for a, b in zip(ours, plain, strict=True):
        assert relative_error(a, b) < 1e-5


def test_blocks_compiled_one_by_one() -> None:
    from daf_rs.testing import models

    model = models.vit(layers=2, width=64)
    batch = model.make_batch(0, 4)
    plain = [g.clone() for g in torch.autograd.grad(batch.loss(model), list(model.parameters()))]
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with exact(model=model) as saved:
        loss = batch.loss(model)
    ours = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(ours, plain, strict=True):
        assert relative_error(a, b) < 1e-4
    del loss, ours
    assert saved.stats().live_bytes == 0


@pytest.mark.slow
def test_inductor() -> None:
    model, x = mlp(), torch.randn(256, 64)
    compiled = torch.compile(model)
    plain = grads(model, compiled, x, contextlib.nullcontext())
    for a, b in zip(grads(model, compiled, x, exact(model=model)), plain, strict=True):
        assert_same_bits(a, b)


def test_jit_trace_inside_the_context_bakes_in_no_values() -> None:
    model, x = mlp(), torch.randn(4, 64)
    with exact(model=model):
        traced = torch.jit.trace(model, x)
    other = torch.randn(4, 64)
    assert torch.allclose(traced(other), model(other))


def test_export_inside_the_context() -> None:
    model, x = mlp(), torch.randn(4, 64)
    with exact(model=model):
        program = torch.export.export(model, (x,))
    other = torch.randn(4, 64)
    assert torch.allclose(program.module()(other), model(other))
