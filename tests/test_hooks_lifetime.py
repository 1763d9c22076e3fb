"""What is kept alive, and until when: no tensor, no node, no context; every byte goes when the graph goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, node_named, nodes_of, relative_error
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import daf_rs


def lossy(bits: Any = 4, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


class SavesOutput(torch.autograd.Function):
    """exp(x), saving its own output, as a custom Function may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


LSTM = nn.LSTM(32, 32)
#: Ops that save their output: keeping that tensor would make a cycle that no collector can free.
OUTPUT_SAVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "sqrt": lambda h: h.abs().sqrt(),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "lstm": lambda h: LSTM(h)[0],
    "function": SavesOutput.apply,
    "relu_in_place": lambda h: F.relu(h, inplace=True),
    "double": lambda h: h.double().exp(),
    "complex": lambda h: torch.complex(h, h).exp(),
}


@pytest.mark.parametrize("bits", [4, "exact"])
@pytest.mark.parametrize("name", OUTPUT_SAVERS)
def test_dropping_the_output_without_backward_frees_everything(name: str, bits: Any) -> None:
    x = torch.randn(4, 64, 32, requires_grad=True)
    gc.disable()
    try:
        with lossy(bits) as saved:
            y = OUTPUT_SAVERS[name](x * 1.0)
        tensor, storage = weakref.ref(y), StorageWeakRef(y.untyped_storage())
        del y
        assert tensor() is None, "the output tensor is still referenced"
        assert storage.expired(), "the output's memory is still held"
        assert saved.stats().live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("name", OUTPUT_SAVERS)
def test_outputs_under_min_bytes_make_no_cycle_either(name: str) -> None:
    x = torch.randn(1, 4, 32, requires_grad=True)
    gc.disable()
    try:
        with compressed(4):
            y = OUTPUT_SAVERS[name](x * 1.0)
        tensor, storage = weakref.ref(y), StorageWeakRef(y.untyped_storage())
        del y
        assert tensor() is None
        assert storage.expired()
    finally:
        gc.enable()


@needs_node_hook
def test_originals_are_freed_as_soon_as_they_are_stored() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    references = []
    with lossy():
        h = x * 1.0
        for _ in range(6):
            h = h.sin() * 1.01
            references.append(StorageWeakRef(h.untyped_storage()))
    h = h.sum()
    assert all(reference.expired() for reference in references)
    h.backward()


@needs_node_hook
def test_only_the_last_input_of_a_node_is_still_pending_inside_the_context() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with lossy():
        first = x * 1.0
        reference = StorageWeakRef(first.untyped_storage())
        second = first.sin() * 2.0
        third = second.cos() + 1
        del first, second
        assert reference.expired(), "an earlier activation is held until the context ends"
    third.sum().backward()


def test_everything_goes_during_backward_not_only_at_its_end() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    live: list[int] = []

    with lossy() as saved:
        h = x * 1.0
        for _ in range(8):
            h = h.sin()
            h.register_hook(lambda _g: live.append(saved.stats().live_bytes))
    h.sum().backward()
    assert live == sorted(live, reverse=True)
    assert live[-1] < live[0] / 4
    assert saved.stats().live_bytes == 0


def test_retain_graph_keeps_everything_until_the_graph_is_gone() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with lossy() as saved:
        y = (x * 1.0).sin().sum()
    before = saved.stats().live_bytes
    assert before > 0
    y.backward(retain_graph=True)
    assert saved.stats().live_bytes == before
    y.backward()
    assert saved.stats().live_bytes == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("bits", [4, "exact"])
def test_unpacking_again_gives_the_same_values(bits: Any) -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with lossy(bits):
        y = ((x * 1.0).sin() * (x * 2.0).exp()).sum()
    gradients = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
    gradients.append(torch.autograd.grad(y, x)[0])
    for gradient in gradients[1:]:
        assert_same_bits(gradient, gradients[0])


def test_saved_attributes_can_be_read_any_number_of_times_in_any_order() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with lossy(2) as saved:
        h = x * 1.0
        for _ in range(6):
            h = h.sin()
    nodes = [node for node in nodes_of(h) if node.name() == "SinBackward0"]
    first = [node._saved_self for node in nodes]
    for index in (3, 0, 5, 1, 4, 2, 3, 3):
        assert_same_bits(nodes[index]._saved_self, first[index])
    unpacks = saved.stats().unpacks
    nodes[0]._saved_self  # noqa: B018
    assert saved.stats().unpacks == unpacks + 1
    h.sum().backward()
    assert saved.stats().live_bytes == 0, "tensors that were read do not count"


@needs_node_hook
def test_a_read_tensor_is_a_fresh_one_each_time() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with lossy(4):
        y = (x * 1.0).sin()
    first = y.grad_fn._saved_self
    copy = first.clone()
    first.fill_(7)
    assert_same_bits(y.grad_fn._saved_self, copy)


@pytest.mark.parametrize("bits", [4, "exact"])
def test_a_function_that_reads_saved_tensors_twice(bits: Any) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            assert_same_bits(first, second)
            return gradient * (first.cos() + second.cos()) / 2

    x = torch.randn(128, 64, requires_grad=True)
    with lossy(bits):
        y = Twice.apply(x * 1.0)
    y.sum().backward()
    assert_same_bits(x.grad, x.detach().cos())


def test_results_do_not_depend_on_which_branch_runs_first() -> None:
    x = torch.randn(128, 64, requires_grad=True)

    def branches() -> tuple[Tensor, Tensor]:
        with lossy(4, seed=3):
            h = x * 1.0
            return h.sin().sum(), (h * h.cos()).sum()

    one, two = branches()
    forwards = [torch.autograd.grad(one, x, retain_graph=True)[0], torch.autograd.grad(two, x)[0]]
    one, two = branches()
    two_first = [torch.autograd.grad(two, x, retain_graph=True)[0], torch.autograd.grad(one, x)[0]]
    assert_same_bits(forwards[0], two_first[1])
    assert_same_bits(forwards[1], two_first[0])


# --- The context itself --------------------------------------------------------------------------------


def test_backward_works_after_the_context_is_gone() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    context = lossy(8)
    with context:
        y = (x * 1.0).sin().sum()
    gone = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None, "the graph keeps the context alive"
    y.backward()
    assert torch.allclose(x.grad, x.detach().cos(), atol=0.05)


def test_a_context_that_holds_an_output_makes_no_cycle() -> None:
    context = lossy()
    with context:
        y = (torch.randn(128, 64, requires_grad=True) * 1.0).exp()
    context.note = y
    gone = weakref.ref(y)
    del context, y
    gc.collect()
    assert gone() is None


def test_unpack_objects_carry_no_tensor_and_no_node() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    with lossy():
        y = (x * 1.0).exp()
    packed = y.grad_fn._raw_saved_result.data
    assert type(packed).__module__.startswith("daf_rs")
    referents = gc.get_referents(packed)
    assert not any(isinstance(r, (Tensor, torch.autograd.graph.Node, daf_rs.save_compressed)) for r in referents)
    assert not any(isinstance(r, Tensor) for r in (getattr(packed, n, None) for n in dir(packed) if n[0] != "_"))


def test_losses_kept_by_value_keep_nothing() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    context, log = lossy(), []
    for _ in range(5):
        with context:
            loss = (x * 1.0).sin().sum()
        log.append(loss.item())
        del loss
        assert context.stats().live_bytes == 0
    assert len(log) == 5


def test_losses_kept_as_tensors_keep_their_graphs_and_the_report_shows_it() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    context, log = lossy(), []
    for step in range(1, 4):
        with context:
            log.append((x * 1.0).sin().sum())
        assert context.stats().live_bytes >= step * 256 * 128 / 2
    log.clear()
    assert context.stats().live_bytes == 0


# --- Exceptions ----------------------------------------------------------------------------------------


class Boom(Exception):
    """What the tests raise."""


def test_an_exception_in_the_forward_frees_what_was_saved() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    context = lossy()

    def step() -> None:
        with context:
            h = (x * 1.0).sin()
            h = h.exp() * h
            raise Boom

    with pytest.raises(Boom):
        step()
    gc.collect()
    assert context.stats().live_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with context:
        y = (x * 1.0).sin().sum()
    y.backward()
    assert context.stats().live_bytes == 0


def test_an_op_that_fails_leaves_nothing_behind() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    context = lossy()
    with context:
        h = x * 1.0
        reference = StorageWeakRef(h.untyped_storage())
        with pytest.raises(RuntimeError):
            h @ h
        with pytest.raises(RuntimeError):
            F.conv2d(h, h)
        y = (h * 2.0).sin().sum()
        del h
    assert reference.expired() or context.stats().live_bytes < 2 * 256 * 128
    y.backward()
    assert reference.expired()
    assert context.stats().live_bytes == 0


def test_an_exception_in_backward_leaves_the_engine_and_the_graph_usable() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    fail = [True]

    def hook(_gradient: Tensor) -> None:
        if fail[0]:
            raise Boom

    with lossy(8) as saved:
        h = (x * 1.0).sin()
        h.register_hook(hook)
        y = (h * h).sum()
    with pytest.raises(Boom):
        y.backward(retain_graph=True)
    fail[0] = False
    y.backward()
    assert saved.stats().live_bytes == 0
    expected = torch.autograd.grad(x.sin().pow(2).sum(), x)[0]
    assert torch.allclose(x.grad, expected, atol=0.05)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exceptions_that_are_no_errors_pop_the_hooks_too(error: type[BaseException]) -> None:
    with pytest.raises(error), lossy():
        raise error
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_models_without_a_name_do_not_mislead_each_other() -> None:
    """Two losses that look alike, one of an input that lives on and one of an activation that does not."""
    inputs = torch.randn(256, 128)
    for _ in range(3):
        for activation in (False, True):
            x = torch.ones(256, 128, requires_grad=True)
            with daf_rs.save_compressed(8):
                y = x * (inputs * 1.0 if activation else inputs)
            y.sum().backward()
            assert relative_error(x.grad, inputs) < 0.02


def test_two_forwards_and_one_backward() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    context = lossy(8)
    with context:
        first = (x * 1.0).sin().sum()
    with context:
        second = (x * 2.0).sin().sum()
    second.backward()
    assert torch.allclose(x.grad, 2 * (2 * x.detach()).cos(), atol=0.1)
    assert context.stats().live_bytes > 0
    del first
    assert context.stats().live_bytes == 0


def test_no_byte_is_leaked_at_exit_of_the_interpreter_with_a_live_graph() -> None:
    from helpers import run_python

    out = run_python("""
        import torch, daf_rs
        x = torch.randn(256, 128, requires_grad=True)
        with daf_rs.save_compressed(4) as saved:
            y = (x * 1.0).sin().exp().sum()
        keep = [y, saved]
        print("end")
    """)
    assert out.strip() == "end"


def test_exact_contexts_free_as_well() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with exact() as saved:
        y = F.dropout((x * 1.0).relu(), 0.5).sum()
    assert saved.stats().live_bytes > 0
    assert node_named(y, "ReluBackward0")._saved_result.shape == (256, 128)
    y.backward()
    assert saved.stats().live_bytes == 0
