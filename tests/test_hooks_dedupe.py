"""A tensor that several nodes save is stored once, and nothing that only looks the same is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, plain_saved_bytes, relative_error
from torch import Tensor, nn


def live_bytes(forward: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> int:
    """Live bytes after `forward(x · 1)` with 4 bits (x itself lives on outside and would not count)."""
    options = {"bits": 4, "min_bytes": 0, **options}
    with compressed(**options) as saved:
        y = forward(x * 1.0)
    live = saved.stats().live_bytes
    del y
    assert saved.stats().live_bytes == 0
    return live


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_one_tensor_saved_by_several_nodes_is_stored_once() -> None:
    x = leaf(256, 128)
    once = live_bytes(lambda h: h.square(), x)
    several = live_bytes(lambda h: h.square() + h.pow(3) + h * h + h.mul(h), x)
    assert 0 < several <= 1.1 * once


def test_gradients_of_a_shared_tensor_are_exact_in_exact_mode() -> None:
    def forward(x: Tensor) -> Tensor:
        h = x * 1.0
        return h.sin() + h.cos() + h * h + h.t().t() * h

    x = leaf(256, 128)
    (plain,) = torch.autograd.grad(forward(x).sum(), x)
    with exact():
        y = forward(x).sum()
    (ours,) = torch.autograd.grad(y, x)
    assert_same_bits(ours, plain)


def test_addresses_that_the_allocator_reuses_are_not_mistaken() -> None:
    """Twenty layers whose activations are freed as they are stored, so that new ones get their addresses."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(128, 128), nn.GELU())])
    x = torch.randn(256, 128)
    model(x).pow(2).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for bits in ("exact", 8):
        context = compressed(bits, min_bytes=0)
        model.zero_grad()
        with context:
            loss = model(x).pow(2).sum()
        loss.backward()
        for parameter, expected in zip(model.parameters(), plain, strict=True):
            if bits == "exact":
                assert_same_bits(parameter.grad, expected)
            else:
                assert relative_error(parameter.grad, expected) < 0.1


@needs_node_hook
@pytest.mark.parametrize("bits", [8, "exact"])
def test_tensors_made_and_freed_in_a_loop_are_all_told_apart(bits: Any) -> None:
    x = torch.ones(64, 128, requires_grad=True)
    nodes, references = [], []
    with compressed(bits, min_bytes=0):
        for index in range(200):
            fresh = torch.rand(64, 128, generator=torch.Generator().manual_seed(index)) + index
            references.append(fresh[0, 0].item())
            nodes.append((x * fresh).grad_fn)
            del fresh
    for node, expected in zip(nodes, references, strict=True):
        assert node._saved_other[0, 0].item() == pytest.approx(expected, abs=0.02)


@needs_node_hook
def test_tensors_that_one_address_holds_in_turn_are_told_apart() -> None:
    """What an allocator does by chance, made certain: fifty tensors one after the other in the same memory."""
    x = torch.ones(64, 128, requires_grad=True)
    memory = bytearray(64 * 128 * 4)
    nodes, addresses = [], set()
    with compressed(8, min_bytes=0):
        for index in range(50):
            fresh = torch.frombuffer(memory, dtype=torch.float32).view(64, 128)
            fresh.copy_(torch.rand(64, 128) + index)
            addresses.add(fresh.data_ptr())
            nodes.append((x * fresh).grad_fn)
            del fresh
    assert len(addresses) == 1
    for index, node in enumerate(nodes):
        assert index - 0.02 < node._saved_other.min() < node._saved_other.max() < index + 1.02


def test_a_square_matrix_and_its_transpose() -> None:
    """The same elements, so one code; not the same order, so each reader gets its own."""
    x = leaf(160, 160)

    def forward(h: Tensor) -> Tensor:
        return (h * h.detach().sin()).sum() + (h @ h.t()).sum() + (h.t() @ h).pow(2).mean()

    (plain,) = torch.autograd.grad(forward(x * 1.0), x)
    with exact():
        y = forward(x * 1.0)
    assert_same_bits(torch.autograd.grad(y, x)[0], plain)
    with compressed(8, min_bytes=0):
        h = x * 1.0
        y = h * h.t()
    assert relative_error(y.grad_fn._saved_self, h) < 0.02
    assert relative_error(y.grad_fn._saved_other, h.t()) < 0.02
    one = live_bytes(lambda h: h * h, x)
    assert live_bytes(lambda h: h * h.t(), x) <= 1.1 * one


def test_views_of_other_shape_over_the_same_elements_share() -> None:
    x = leaf(8, 64, 96)
    one = live_bytes(lambda h: h * h, x)

    def forward(h: Tensor) -> Tensor:
        flat = h.view(8 * 64, 96)
        return (
            (h * h).sum() + (flat * flat).sum() + (h.view(-1) * h.view(-1)).sum() + h.transpose(0, 1).exp().mul(0).sum()
        )

    def shares(h: Tensor) -> tuple[Tensor, ...]:
        flat = h.view(8 * 64, 96)
        return h * h, flat * flat, h.view(-1) * h.view(-1), h.transpose(0, 1) * h.transpose(0, 1)

    kept: list[Any] = []
    with compressed(4, min_bytes=0) as saved:
        kept.append(shares(x * 1.0))
    assert saved.stats().live_bytes <= 1.1 * one
    (plain,) = torch.autograd.grad(forward(x * 1.0), x)
    with exact():
        y = forward(x * 1.0)
    assert_same_bits(torch.autograd.grad(y, x)[0], plain)


def test_parts_of_one_storage_are_stored_apart() -> None:
    """q, k and v of one projection: three sets of elements, together what the whole would take."""
    x = leaf(8, 64, 3 * 96)
    whole = live_bytes(lambda h: h * h, x)

    def parts(h: Tensor) -> Tensor:
        q, k, v = h.chunk(3, dim=-1)
        return q * q + k * k + v * v

    assert live_bytes(parts, x) <= 1.15 * whole
    with exact():
        y = parts(x * 1.0).sum()
    (plain,) = torch.autograd.grad(parts(x * 1.0).sum(), x)
    assert_same_bits(torch.autograd.grad(y, x)[0], plain)


def test_overlapping_parts_are_right() -> None:
    x = leaf(128, 128)
    cuts = [
        lambda h: h,
        lambda h: h[:, :64],
        lambda h: h[:, 1:65],
        lambda h: h[:64],
        lambda h: h[::2],
        lambda h: h.view(-1)[5 : 5 + 8192].view(64, 128),
        lambda h: h.view(64, 256),
        lambda h: h.diagonal(),
        lambda h: h.unfold(1, 64, 32),
    ]
    with compressed(8, min_bytes=0):
        h = x * 1.0
        outputs = [cut(h) * cut(h) for cut in cuts]
    for cut, output in zip(cuts, outputs, strict=True):
        assert relative_error(output.grad_fn._saved_self, cut(h)) < 0.02
        if cut(h).dim() > 1:  # the diagonal spans 128 times its elements
            assert output.grad_fn._saved_self.stride() == cut(h).stride()


def test_same_memory_read_as_another_dtype_is_another_tensor() -> None:
    h = torch.randn(128, 128)
    with compressed(8, min_bytes=0):
        one = torch.ones(128, 128, requires_grad=True) * h
        two = torch.ones(128, 256, requires_grad=True) * h.view(torch.bfloat16).nan_to_num(0, 0, 0)
        three = torch.ones(128, 256, requires_grad=True, dtype=torch.float16) * h.view(torch.float16).nan_to_num(
            0, 0, 0
        )
    assert relative_error(one.grad_fn._saved_other, h) < 0.02
    assert two.grad_fn._saved_other.dtype == torch.bfloat16
    assert three.grad_fn._saved_other.dtype == torch.float16


@needs_node_hook
def test_an_in_place_change_between_two_saves_makes_two() -> None:
    x = torch.ones(128, 64, requires_grad=True)
    h = torch.randn(128, 64)
    first_values = h.clone()
    with compressed(8, min_bytes=0):
        first = x * h
        h.neg_().mul_(3)
        second = x * h
    assert relative_error(first.grad_fn._saved_other, first_values) < 0.02
    assert relative_error(second.grad_fn._saved_other, -3 * first_values) < 0.02


def test_a_write_through_data_between_two_saves_is_not_missed() -> None:
    """`.data` does not count as a change for PyTorch; the second reader must still get what it was given."""
    x = torch.ones(128, 64, requires_grad=True)
    h = torch.randn(128, 64)
    first_values = h.clone()
    with compressed(8, min_bytes=0):
        first = x * h
        h.data.mul_(-2)
        second = x * h
    assert relative_error(second.grad_fn._saved_other, -2 * first_values) < 0.02
    del first


@needs_node_hook
def test_storages_of_size_zero_are_left_alone() -> None:
    h = torch.randn(128, 64)
    with compressed(4, min_bytes=0):
        x = torch.ones(128, 64, requires_grad=True)
        y = x * h
        z = torch.ones(0, 64, requires_grad=True) * torch.randn(0, 64)
    h.untyped_storage().resize_(0)
    y.sum().backward()
    assert relative_error(x.grad, torch.ones_like(x)) > 0
    assert z.grad_fn._saved_other.shape == (0, 64)


@needs_node_hook
def test_the_log_softmax_that_cross_entropy_saves_twice_is_stored_once() -> None:
    x = leaf(512, 256)
    target = torch.zeros(512, dtype=torch.long)
    with compressed(4, min_bytes=0) as saved:
        loss = F.cross_entropy(x * 1.0, target)
    plain = 512 * 256 * 4
    assert saved.stats().live_bytes < plain / 3.5, "eight bits once, not twice"
    loss.backward()


def test_a_table_is_empty_in_the_next_step_even_if_a_branch_never_ran() -> None:
    context = compressed(4, min_bytes=0)
    x = leaf(256, 64)
    for _ in range(3):
        with context:
            used, unused = (x * 1.0).exp() * 2, (x * 1.0).sin() * (x * 2.0)
        used.sum().backward()
        del used, unused
        assert context.stats().live_bytes == 0


@needs_node_hook
def test_shared_bytes_are_far_below_what_separate_copies_would_take() -> None:
    from daf_rs.testing import models

    model = models.resnet20(width=8)
    batch = model.make_batch(0, 16)
    plain = plain_saved_bytes(lambda: batch.loss(model), model)
    with compressed(4, model=model) as saved:
        loss = batch.loss(model)
    stats = saved.stats()
    assert stats.logical_bytes > 1.2 * stats.unique_bytes, "ResNet saves each ReLU's output twice"
    assert stats.live_bytes < plain / 4
    del loss
