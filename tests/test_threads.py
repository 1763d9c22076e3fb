"""Several threads train at once, with contexts of their own and with one that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, compressed, exact, relative_error, run_python, train
from torch import Tensor
from value_cases import digest

import daf_rs
from daf_rs.testing import models


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)` … `work(count - 1)` at once; raises what any of them raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            barrier.wait(30)
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def tiny(seed: int) -> models.TrainableModel:
    return models.resnet20(seed, width=4)


@pytest.mark.parametrize("shared", [False, True], ids=["own_contexts", "one_shared_context"])
def test_two_threads_training_at_once_are_bit_equal_in_exact_mode(shared: bool) -> None:
    common = exact()
    twins = [tiny(index) for index in range(2)]

    def work(index: int) -> list[Tensor]:
        model = twins[index]
        batches = [model.make_batch(100 * index + i, 8) for i in range(6)]
        context = common if shared else exact(model=model)
        return train(model, batches, lambda: context)

    results = in_threads(2, work)
    for index, (model, losses) in enumerate(zip(twins, results, strict=True)):
        twin = tiny(index)
        plain = train(twin, [twin.make_batch(100 * index + i, 8) for i in range(6)])
        for a, b in zip(losses, plain, strict=True):
            assert_same_bits(a, b)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same_bits(a.detach(), b.detach())
    assert common.stats().live_bytes == 0


@pytest.mark.parametrize("shared", [False, True], ids=["own_contexts", "one_shared_context"])
def test_four_threads_of_small_steps(shared: bool) -> None:
    common = compressed(8, min_bytes=0)

    def work(index: int) -> None:
        context = common if shared else compressed(8, min_bytes=0)
        generator = torch.Generator().manual_seed(index)
        for _ in range(25):
            x = torch.randn(64, 128, generator=generator).requires_grad_()
            with context:
                h = x * (index + 1.0)
                y = (h * h).sum()
            y.backward()
            assert relative_error(x.grad, 2 * (index + 1) ** 2 * x.detach()) < 0.02

    in_threads(4, work)
    assert common.stats().live_bytes == 0
    assert common.stats().packs == (4 * 25 * 2 if shared else 0)


def test_a_context_is_not_inherited_by_threads_started_inside() -> None:
    context = compressed(2, min_bytes=0)
    with context:

        def work(_index: int) -> Tensor:
            x = torch.randn(128, 64, requires_grad=True)
            y = (x * 1.0) * x.detach().clone()
            assert torch.equal(y.grad_fn._saved_other, x)
            return y

        in_threads(2, work)
    assert context.stats().packs == 0


def test_backward_on_another_thread() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with compressed(8, min_bytes=0) as saved:
        y = ((x * 1.0) * (x * 2.0)).sum()
    in_threads(1, lambda _i: y.backward())
    assert relative_error(x.grad, 4 * x.detach()) < 0.02
    assert saved.stats().live_bytes == 0


def test_two_backwards_of_one_graph_at_once() -> None:
    x = torch.randn(256, 128, requires_grad=True)
    with compressed(8, min_bytes=0):
        h = x * 1.0
        outputs = [(h * h).sum(), (h.exp()).sum()]
    results = in_threads(2, lambda i: torch.autograd.grad(outputs[i], x, retain_graph=True)[0])
    assert relative_error(results[0], 2 * x.detach()) < 0.02
    assert relative_error(results[1], x.detach().exp()) < 0.05


def test_graphs_dropped_on_another_thread_while_this_one_packs() -> None:
    saved = compressed(4, min_bytes=0)
    x = torch.randn(64, 256, requires_grad=True)
    box: list[Any] = []
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set() or box:
            if box:
                box.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for _ in range(200):
            with saved:
                box.append(((x * 1.0) * (x * 2.0)).sum())
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert saved.stats().live_bytes == 0


def test_statistics_can_be_read_while_others_train() -> None:
    model = tiny(0)
    saved = compressed(4, model=model)
    done = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            train(model, [model.make_batch(i, 8) for i in range(10)], lambda: saved)
            done.set()
        else:
            while not done.is_set():
                stats = saved.stats()
                assert 0 <= stats.live_bytes <= stats.peak_bytes
                str(saved.report())

    in_threads(2, work)
    assert saved.stats().live_bytes == 0


def test_quantize_in_many_threads_gives_the_same_bytes() -> None:
    x = torch.randn(1 << 18)
    expected = daf_rs.quantize(x, bits=3, seed=5).to_bytes()
    results = in_threads(4, lambda _i: [daf_rs.quantize(x, bits=3, seed=5).to_bytes() for _ in range(10)])
    assert all(data == expected for found in results for data in found)


def test_large_calls_let_other_threads_run() -> None:
    """The interpreter's lock is released while codes are made."""
    x = torch.randn(1 << 24)
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        daf_rs.quantize(x, bits=4, threads=1)
        ticks[0] = 0
        for _ in range(10):
            daf_rs.dequantize(daf_rs.quantize(x, bits=4, threads=1))
        seen = ticks[0]
    finally:
        stop.set()
        thread.join(30)
    assert seen > 10


def test_thread_settings_from_the_environment() -> None:
    code = """
        import hashlib, torch, daf_rs
        x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
        print(hashlib.sha256(daf_rs.quantize(x, bits=5, seed=2).to_bytes()).hexdigest())
    """
    outputs = {run_python(code, env={"DAF_NUM_THREADS": count}) for count in ("1", "3")}
    assert len(outputs) == 1


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bytes_and_values(isa: str) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if (isa == "avx2" and "avx2" not in flags) or (isa == "avx512" and "avx512bw" not in flags):
        pytest.skip(f"this CPU has no {isa}")
    out = run_python("import value_cases; print(value_cases.digest())", env={"DAF_ISA": isa})
    assert out.strip() == digest()
