"""What must never be copied or quantized: parameters, their views, transposes and casts, buffers, small tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, rows_of, storage_key
from torch import Tensor, nn

import daf_rs


def lossy(**options: Any) -> daf_rs.save_compressed:
    """Two bits for everything that may be lossy, nothing too small."""
    return compressed(2, min_bytes=0, **options)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def activation(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


#: name -> (parameter's shape, activation's shape, op, attribute that shows the saved weight)
WEIGHT_READERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor], str]] = {
    "linear": ((96, 64), (128, 64), lambda w, x: F.linear(x, w), "_saved_mat2"),
    "linear_3d": ((96, 64), (4, 32, 64), lambda w, x: F.linear(x, w), "_saved_mat2"),
    "matmul": ((64, 96), (128, 64), lambda w, x: x @ w, "_saved_mat2"),
    "conv2d": ((16, 8, 3, 3), (4, 8, 16, 16), lambda w, x: F.conv2d(x, w, padding=1), "_saved_weight"),
    "conv_transpose": ((8, 16, 3, 3), (4, 8, 9, 9), lambda w, x: F.conv_transpose2d(x, w), "_saved_weight"),
    "mul": ((128, 64), (128, 64), lambda w, x: x * w, "_saved_other"),
    "transposed": ((64, 128), (128, 64), lambda w, x: x * w.t(), "_saved_other"),
    "viewed": ((64, 128), (128, 64), lambda w, x: x * w.view(128, 64), "_saved_other"),
    "sliced": ((256, 64), (128, 64), lambda w, x: x * w[64:192], "_saved_other"),
    "strided": ((256, 64), (128, 64), lambda w, x: x * w[::2], "_saved_other"),
    "expanded": ((1, 64), (128, 64), lambda w, x: x * w.expand(128, 64), "_saved_other"),
    "view_of_view": ((64, 128), (128, 64), lambda w, x: x * w.view(128, 64).t().reshape(64, 128).t(), "_saved_other"),
}


def saved_weight(output: Tensor, attribute: str) -> Tensor:
    """What backward of the node behind `output` (or of the one behind a reshape) will read."""
    node = output.grad_fn
    while not hasattr(node, attribute):
        node = node.next_functions[0][0]
    return getattr(node, attribute)


@pytest.mark.parametrize("name", WEIGHT_READERS)
def test_parameters_and_their_views_reach_backward_uncopied(name: str) -> None:
    shape, input_shape, op, attribute = WEIGHT_READERS[name]
    weight = parameter(*shape)
    with lossy() as saved:
        y = op(weight, activation(*input_shape))
    seen = saved_weight(y, attribute)
    assert storage_key(seen) == storage_key(weight), "backward reads the parameter's own memory"
    if name != "expanded":
        reference = saved_weight(op(weight, activation(*input_shape)), attribute)
        assert (seen.data_ptr(), seen.shape, seen.stride()) == (
            reference.data_ptr(),
            reference.shape,
            reference.stride(),
        )
    del seen
    for row in rows_of(saved, field=attribute.removeprefix("_saved_")):
        assert row.stored_bytes == 0, f"a parameter costs nothing: {row}"
        assert row.plain_bytes == 0
        assert row.why


def test_parameters_cost_nothing_at_all() -> None:
    weight = parameter(256, 256)
    with lossy() as saved:
        y = (weight * weight).sum() + torch.linalg.norm(weight @ weight.t())
    weight_bytes = weight.numel() * weight.element_size()
    assert saved.stats().unique_bytes < weight_bytes * 1.5, "only the product is counted"
    y.backward()
    reference = parameter(256, 256)
    reference.data = weight.data
    ((reference * reference).sum() + torch.linalg.norm(reference @ reference.t())).backward()
    assert torch.allclose(weight.grad, reference.grad, rtol=0.5, atol=0.5)
    with lossy() as saved:
        z = (weight * weight).sum()
    assert saved.stats().live_bytes == 0
    assert saved.stats().plain_bytes == 0
    z.backward()


FROZEN_VIEWS: dict[str, Callable[[nn.Linear], Tensor]] = {
    "weight": lambda m: m.weight,
    "transposed": lambda m: m.weight.t(),
    "detached_transposed": lambda m: m.weight.detach().t(),
    "data": lambda m: m.weight.data,
    "detached_slice": lambda m: m.weight.detach()[32:],
}


@pytest.mark.parametrize("name", FROZEN_VIEWS)
def test_frozen_parameters_are_known_by_the_storages_of_model(name: str) -> None:
    model = nn.Linear(64, 128)
    model.requires_grad_(False)
    view = FROZEN_VIEWS[name](model)
    x = activation(*view.shape)
    with lossy(model=model) as saved:
        y = x * view
    assert y.grad_fn._saved_other.data_ptr() == view.data_ptr()
    assert saved.stats().live_bytes == 0


def test_a_frozen_parameter_used_directly_needs_no_model() -> None:
    model = nn.Linear(64, 128)
    model.requires_grad_(False)
    with lossy():
        y = model(activation(256, 64))
    assert y.grad_fn._saved_mat2.data_ptr() == model.weight.data_ptr()


def test_buffers_and_their_views_are_known_by_the_storages_of_model() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.randn(128, 64))
    with lossy(model=model) as saved:
        whole = activation(128, 64) * model.table
        part = activation(32, 64) * model.table[16:48]
    assert whole.grad_fn._saved_other.data_ptr() == model.table.data_ptr()
    assert part.grad_fn._saved_other.data_ptr() == model.table[16:].data_ptr()
    assert saved.stats().live_bytes == 0


def test_model_is_looked_at_when_the_context_is_entered() -> None:
    """Parameters that are added or moved after construction count, those of a model that is gone do not matter."""
    model = nn.Module()
    context = lossy(model=model)
    model.register_buffer("late", torch.randn(128, 64))
    with context:
        y = activation(128, 64) * model.late
    assert y.grad_fn._saved_other.data_ptr() == model.late.data_ptr()
    model.late = torch.randn(128, 64)
    with context:
        y = activation(128, 64) * model.late
    assert y.grad_fn._saved_other.data_ptr() == model.late.data_ptr()


def test_model_is_not_kept_alive_by_a_packed_object() -> None:
    import weakref

    model = nn.Linear(64, 64)
    with lossy(model=model):
        y = activation(512, 64).exp() * 2
    gone = weakref.ref(model)
    del model
    y.sum().backward()
    import gc

    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("trainable", [True, False])
def test_autocast_copies_of_weights_are_exact(trainable: bool) -> None:
    model = nn.Linear(64, 96, bias=False).requires_grad_(trainable)
    x = activation(128, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), lossy(model=model) as saved:
        first, second = model(x), model(x)
    seen, again = first.grad_fn._saved_mat2, second.grad_fn._saved_mat2
    assert_same_bits(seen, model.weight.detach().bfloat16().t(), "the cast weight")
    if trainable:
        assert seen.data_ptr() == again.data_ptr(), "autocast's own copy is kept, no copy of it is made"
    for row in rows_of(saved, field="mat2"):
        assert row.cls != "value", f"a cast weight must not be lossy: {row}"


def test_autocast_copies_of_convolution_weights_are_exact() -> None:
    model = nn.Conv2d(16, 32, 3, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), lossy(model=model):
        y = model(activation(4, 16, 12, 12))
    assert_same_bits(y.grad_fn._saved_weight, model.weight.detach().bfloat16(), "the cast weight")


def test_manual_casts_and_transposes_of_weights_are_exact() -> None:
    weight = parameter(64, 128)
    with lossy():
        y = activation(128, 64).bfloat16() * weight.t().to(torch.bfloat16)
    assert_same_bits(y.grad_fn._saved_other, weight.detach().t().bfloat16(), "the cast weight")


def test_running_statistics_in_training_and_evaluation() -> None:
    """Buffers that change in place between forward and backward pass through and do not disturb backward."""
    for training in (True, False):
        model = nn.BatchNorm2d(16).train(training)
        x, reference = activation(8, 16, 12, 12), None
        for context in (None, exact(model=model)):
            model.load_state_dict(nn.BatchNorm2d(16).state_dict())
            x.grad = None
            if context is None:
                model(x).pow(2).sum().backward()
                reference = x.grad
            else:
                with context:
                    y = model(x).pow(2).sum()
                y.backward()
                assert_same_bits(x.grad, reference, f"gradient, training={training}")


@needs_node_hook
@pytest.mark.parametrize("spare", [0, 1])
def test_tensors_under_min_bytes_pass_through(spare: int) -> None:
    x = torch.randn(1024 - spare, requires_grad=True)
    h = x * 1.0
    with compressed(2, min_bytes=4096) as saved:
        y = h * h
    seen = y.grad_fn._saved_self
    if spare:
        assert seen.data_ptr() == h.data_ptr()
        assert {(row.cls, row.stored_bytes) for row in saved.report().rows} == {("small", 0)}, "h lives anyway"
        del seen, h
        assert saved.stats().live_bytes == 0
    else:
        assert seen.data_ptr() != h.data_ptr()
        assert not torch.equal(seen, h)


@needs_node_hook
def test_min_bytes_default_is_sixteen_kib() -> None:
    small, large = torch.randn(4095, requires_grad=True) * 1.0, torch.randn(4096, requires_grad=True) * 1.0
    with compressed(2):
        a, b = small * small, large * large
    assert a.grad_fn._saved_self.data_ptr() == small.data_ptr()
    assert not torch.equal(b.grad_fn._saved_self, large)


def test_a_parameter_whose_storage_is_released_and_refilled() -> None:
    """Sharded training frees a weight after the forward and fetches it again for backward: an alias follows."""
    weight = parameter(128, 64)
    x = activation(256, 64)
    values = weight.detach().clone()
    with lossy():
        y = F.linear(x, weight)
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(size)
    with torch.no_grad():
        weight.data.copy_(values)
    y.sum().backward()
    assert torch.allclose(x.grad, values.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_no_weight_of_any_model_is_copied() -> None:
    """Over whole models: nothing that the report shows as stored has the memory of a parameter or a buffer."""
    from daf_rs.testing import models

    for name in models.MODELS:
        model = models.build(name)
        batch = model.make_batch(0, 2)
        own = {storage_key(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        with lossy(model=model):
            loss = batch.loss(model)
        from helpers import nodes_of

        plain = batch.loss(model)
        for node, reference in zip(nodes_of(loss), nodes_of(plain), strict=True):
            assert node.name() == reference.name()
            for attribute in dir(reference):
                if not attribute.startswith("_saved_"):
                    continue
                expected = getattr(reference, attribute)
                if isinstance(expected, Tensor) and storage_key(expected) in own:
                    actual = getattr(node, attribute)
                    where = f"{name}: {node.name()}.{attribute} ({own[storage_key(expected)]})"
                    assert storage_key(actual) == storage_key(expected), f"{where} was copied"
                    assert actual.stride() == expected.stride()
