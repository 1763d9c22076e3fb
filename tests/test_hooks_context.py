"""The context manager as such: nesting, re-entry, grad modes, other hooks, random streams, copies of it."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_same_bits,
    assert_same_gradients,
    compressed,
    exact,
    gradients,
    needs_node_hook,
    relative_error,
    train,
)
from torch import Tensor, nn

import daf_rs
from daf_rs.testing import models


def lossy(bits: Any = 4, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_entering_gives_the_context_itself() -> None:
    context = lossy()
    with context as saved:
        assert saved is context


def test_backward_inside_and_outside_are_the_same() -> None:
    x = leaf(128, 64)
    found = []
    for inside in (True, False):
        with lossy(4, seed=5):
            y = ((x * 1.0) * (x * 2.0)).sum()
            if inside:
                found.append(torch.autograd.grad(y, x)[0])
        if not inside:
            found.append(torch.autograd.grad(y, x)[0])
    assert_same_bits(found[0], found[1])


@needs_node_hook
def test_the_inner_of_two_contexts_wins() -> None:
    x = leaf(128, 64)
    with lossy(8) as outer:
        a = (x * 1.0) * x.detach().clone()
        with lossy(2) as inner:
            b = (x * 1.0) * x.detach().clone()
        c = (x * 1.0) * x.detach().clone()
    assert inner.stats().packs > 0
    assert {row.bits for row in inner.report().rows if row.cls == "value"} == {2}
    assert {row.bits for row in outer.report().rows if row.cls == "value"} == {8}
    for output, low, high in ((a, 0, 0.02), (b, 0.1, 1.5), (c, 0, 0.02)):
        error = relative_error(output.grad_fn._saved_other, x.detach())
        assert low <= error <= high
    assert outer.stats().packs == 2 * inner.stats().packs


@needs_node_hook
def test_an_exact_context_inside_a_lossy_one_and_the_reverse() -> None:
    x = leaf(128, 64)
    values = x.detach().clone()
    with lossy(2):
        with exact():
            a = (x * 1.0) * values.clone()
        b = (x * 1.0) * values.clone()
    with exact():
        with lossy(2):
            c = (x * 1.0) * values.clone()
        d = (x * 1.0) * values.clone()
    assert_same_bits(a.grad_fn._saved_other, values)
    assert_same_bits(d.grad_fn._saved_other, values)
    for output in (b, c):
        assert not torch.equal(output.grad_fn._saved_other, values)


def test_one_context_can_be_entered_again_and_again() -> None:
    x = leaf(128, 64)
    context = lossy(8)
    for _ in range(5):
        x.grad = None
        with context:
            y = ((x * 1.0) * (x * 1.0)).sum()
        y.backward()
        assert relative_error(x.grad, 2 * x.detach()) < 0.02
        assert context.stats().live_bytes == 0


def test_one_context_can_be_entered_inside_itself() -> None:
    x = leaf(128, 64)
    context = lossy(8)
    with context:
        a = (x * 1.0) * (x * 2.0)
        with context:
            b = (x * 3.0) * (x * 4.0)
        c = (x * 5.0) * (x * 6.0)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    d = (x * 7.0) * (x * 8.0)
    packs = context.stats().packs
    (a + b + c + d).sum().backward()
    assert relative_error(x.grad, (4 + 24 + 60 + 112) * x.detach()) < 0.02
    assert packs == 6, "nothing is packed after the outermost exit"
    assert context.stats().live_bytes == 0


@needs_node_hook
def test_each_step_draws_fresh_noise_and_a_seed_repeats_it() -> None:
    x = leaf(128, 64)

    def drawn(context: daf_rs.save_compressed) -> Tensor:
        with context:
            y = (x * 1.0) * x.detach().clone()
        return y.grad_fn._saved_other.clone()

    context = lossy(2)
    assert not torch.equal(drawn(context), drawn(context)), "two steps of one context share their noise"
    assert not torch.equal(drawn(lossy(2)), drawn(lossy(2))), "two contexts share their noise"
    assert_same_bits(drawn(lossy(2, seed=4)), drawn(lossy(2, seed=4)))
    assert not torch.equal(drawn(lossy(2, seed=4)), drawn(lossy(2, seed=5)))


@needs_node_hook
def test_two_tensors_of_one_step_have_their_own_noise() -> None:
    x = leaf(128, 64)
    with lossy(2, seed=1):
        a = (x * 1.0) * x.detach().clone()
        b = (x * 1.0) * x.detach().clone()
    assert not torch.equal(a.grad_fn._saved_other, b.grad_fn._saved_other)


# --- Grad modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_context_does_nothing(mode: Any) -> None:
    model = models.resnet20(width=4)
    x = torch.randn(2, 3, 32, 32)
    with mode():
        expected = model.eval()(x)
        with lossy(1) as saved:
            result = model(x)
    assert_same_bits(result, expected)
    stats = saved.stats()
    assert (stats.packs, stats.live_bytes, stats.peak_bytes, stats.plain_bytes) == (0, 0, 0, 0)
    assert len(saved.report().rows) == 0


def test_no_grad_inside_the_context_saves_nothing() -> None:
    x = leaf(128, 64)
    with lossy() as saved:
        with torch.no_grad():
            h = (x * 2.0).sin()
        y = h + x
    assert saved.stats().packs == 0
    y.sum().backward()


def test_inference_tensors_raise_as_without_the_context() -> None:
    with torch.inference_mode():
        h = torch.randn(128, 64)
    x = leaf(128, 64)
    with lossy(), pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        x * h
    with lossy():
        y = x * h.clone()
    y.sum().backward()


def test_grad_mode_inside_is_the_callers() -> None:
    with lossy():
        assert torch.is_grad_enabled()
    with torch.no_grad(), lossy():
        assert not torch.is_grad_enabled()


# --- Other hooks ---------------------------------------------------------------------------------------


def test_hooks_inside_ours_win() -> None:
    x = leaf(128, 64)
    with lossy() as saved, torch.autograd.graph.save_on_cpu():
        y = (x * 1.0) * (x * 2.0)
    assert saved.stats().packs == 0
    y.sum().backward()
    assert torch.allclose(x.grad, 4 * x.detach())


def test_ours_inside_other_hooks_win() -> None:
    x = leaf(128, 64)
    calls: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        calls.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with lossy(8) as saved:
            y = (x * 1.0) * (x * 2.0)
        z = (x * 1.0) * (x * 2.0)
    assert saved.stats().packs == 2
    assert len(calls) == 2
    (y + z).sum().backward()
    assert relative_error(x.grad, 8 * x.detach()) < 0.02


def test_disabled_hooks_raise_and_the_message_names_the_way_out() -> None:
    x = leaf(128, 64)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here") as caught, lossy():
            (x * 1.0) * (x * 2.0)
        text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "save_compressed" in text
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with lossy(8):
        y = ((x * 1.0) * (x * 2.0)).sum()
    y.backward()


def test_module_and_tensor_hooks_see_what_they_always_see() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    log: list[Any] = []
    model[0].register_forward_hook(lambda _m, _a, out: log.append(out.detach().clone()))
    model[2].register_full_backward_hook(lambda _m, gi, go: log.extend([gi[0].clone(), go[0].clone()]))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    x = torch.randn(256, 64)

    def run(context: Any) -> list[Any]:
        log.clear()
        model.zero_grad()
        with context:
            y = model(x).pow(2).sum()
        y.backward()
        return list(log)

    import contextlib

    plain, ours = run(contextlib.nullcontext()), run(exact())
    assert len(plain) == len(ours) > 5
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)


def test_node_creation_hooks_of_the_user_still_run() -> None:
    if not hasattr(torch.autograd.graph, "node_creation_hook"):
        pytest.skip("torch has no node_creation_hook")
    x = leaf(128, 64)
    names: list[str] = []
    with torch.autograd.graph.node_creation_hook(lambda node: names.append(node.name())), lossy():
        y = (x * 1.0).relu()
    assert "ReluBackward0" in names
    with lossy(), torch.autograd.graph.node_creation_hook(lambda node: names.append("inner " + node.name())):
        z = (x * 1.0).relu()
    assert "inner ReluBackward0" in names
    (y + z).sum().backward()


def test_anomaly_detection() -> None:
    x = leaf(128, 64)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        anomalies = torch.autograd.detect_anomaly()
    with anomalies:
        with lossy(8):
            y = ((x * 1.0) * (x * 2.0)).sum()
        y.backward()
    assert relative_error(x.grad, 4 * x.detach()) < 0.02


# --- Random streams ------------------------------------------------------------------------------------


def test_random_streams_are_untouched() -> None:
    model = models.gpt(layers=1, width=64, heads=2, length=64, dropout=0.2)
    batch = model.make_batch(0, 4)
    torch.manual_seed(3)
    random.seed(3)
    batch.loss(model).backward()
    expected, python = torch.get_rng_state(), random.getstate()
    for bits in (1, 4, "exact"):
        torch.manual_seed(3)
        random.seed(3)
        with compressed(bits, model=model):
            loss = batch.loss(model)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), expected), f"bits={bits}"
        assert random.getstate() == python
    assert torch.initial_seed() == 3


def test_numpys_stream_is_untouched() -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_state()[1].copy()
    with lossy(2):
        y = (leaf(128, 64) * 1.0).exp().pow(2).sum()
    y.backward()
    assert (numpy.random.get_state()[1] == before).all()


def test_dropout_draws_the_same_masks_as_without() -> None:
    x = leaf(256, 128)
    torch.manual_seed(8)
    expected = F.dropout(x, 0.3)
    torch.manual_seed(8)
    with lossy(2):
        result = F.dropout(x, 0.3)
    assert_same_bits(result, expected)
    result.sum().backward()
    assert_same_bits(x.grad, (expected != 0) / 0.7)


# --- Copies --------------------------------------------------------------------------------------------


@needs_node_hook
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_context_have_its_settings_and_nothing_stored(copied: Any) -> None:
    x = leaf(128, 64)
    context = lossy(2, group_size=64, rounding="nearest", groups="row", seed=9, threads=1)
    with context:
        y = (x * 1.0) * (x * 2.0)
    other = copied(context)
    assert other.stats().packs == 0
    assert other.stats().live_bytes == 0
    with other:
        z = (x * 1.0) * (x * 2.0)
    assert {row.bits for row in other.report().rows if row.cls == "value"} == {2}
    assert_same_bits(z.grad_fn._saved_self, y.grad_fn._saved_self)


def test_a_context_with_a_model_can_be_pickled() -> None:
    model = nn.Linear(64, 64).requires_grad_(False)
    again = pickle.loads(pickle.dumps(lossy(4, model=model)))
    with again:
        y = leaf(128, 64) * 2.0
    assert y.shape == (128, 64)
    both = copy.deepcopy({"model": model, "context": lossy(4, model=model)})
    with both["context"]:
        y = both["model"](leaf(128, 64))
    assert y.grad_fn._saved_mat2.data_ptr() == both["model"].weight.data_ptr()


def test_repr_shows_the_settings() -> None:
    text = repr(lossy(2, group_size=64))
    assert text.startswith("save_compressed(")
    assert "2" in text
    assert "64" in text


def test_the_model_can_be_copied_and_saved_inside() -> None:
    import io

    model = models.resnet20(width=4)
    batch = model.make_batch(0, 4)
    with lossy(4, model=model):
        loss = batch.loss(model)
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# --- Whole loops ---------------------------------------------------------------------------------------


def test_a_whole_training_loop_inside_one_context() -> None:
    model, twin = models.resnet20(width=4), models.resnet20(width=4)
    batches = [model.make_batch(i, 4) for i in range(4)]
    plain = train(twin, batches)
    with exact(model=model) as saved:
        ours = train(model, batches)
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)
    assert saved.stats().live_bytes == 0


def test_gradient_accumulation_and_sums_of_losses() -> None:
    model = models.vit(layers=1, width=64, heads=2)
    batches = [model.make_batch(i, 4) for i in range(3)]

    def accumulate(context: Any) -> dict[str, Tensor]:
        model.zero_grad()
        for batch in batches:
            with context():
                loss = batch.loss(model) / 3
            loss.backward()
        with context():
            loss = sum(batch.loss(model) for batch in batches)
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    import contextlib

    assert_same_gradients(accumulate(exact), accumulate(contextlib.nullcontext))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    ],
)
def test_optimizers(optimizer: Any) -> None:
    model, twin = models.resnet20(width=4), models.resnet20(width=4)
    batches = [model.make_batch(i, 4) for i in range(3)]
    plain = train(twin, batches, optimizer=optimizer)
    ours = train(model, batches, lambda: exact(model=model), optimizer=optimizer)
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_same_bits(a, b)


def test_a_closure_that_the_optimizer_calls_several_times() -> None:
    def fit(context: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        x, y = torch.randn(256, 64), torch.randn(256, 1)
        steps = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        losses: list[float] = []

        def closure() -> Tensor:
            steps.zero_grad()
            with context():
                loss = F.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(3):
            steps.step(closure)
        return losses

    import contextlib

    assert fit(exact) == fit(contextlib.nullcontext)


def test_clip_grad_norm_and_partial_gradients() -> None:
    model = models.vit(layers=1, width=64, heads=2)
    batch = model.make_batch(0, 4)
    loss, grads = gradients(model, batch, exact(model=model))
    plain, expected = gradients(model, batch)
    assert_same_bits(loss, plain)
    assert_same_gradients(grads, expected)
    with exact(model=model):
        loss = batch.loss(model)
    some = torch.autograd.grad(loss, [model.head.weight, model.patches.weight])
    assert_same_bits(some[0], expected["head.weight"])
    assert_same_bits(some[1], expected["patches.weight"])
