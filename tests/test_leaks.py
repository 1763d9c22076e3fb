"""Long runs: packed bytes return to nothing after every step, and the process does not grow."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import compressed, rss_bytes, run_python, train

import daf_rs
from daf_rs.testing import models

STEPS = 200
#: Growth of resident memory that 150 steps may show. A leak of one activation a step would be 20 times as much.
GROWTH_LIMIT = 12 << 20


@pytest.mark.parametrize("bits", [4, "exact"])
def test_two_hundred_training_steps_do_not_leak(bits: Any) -> None:
    model = models.vit(layers=2, width=64)
    batches = [model.make_batch(i, 8) for i in range(4)]
    saved = compressed(bits, model=model)
    steps = torch.optim.SGD(model.parameters(), lr=1e-3)
    settled = 0
    for step in range(STEPS):
        steps.zero_grad()
        with saved:
            loss = batches[step % 4].loss(model)
        assert saved.stats().live_bytes > 0
        loss.backward()
        assert saved.stats().live_bytes == 0, f"step {step}"
        steps.step()
        if step == 50:
            gc.collect()
            settled = rss_bytes()
    gc.collect()
    assert rss_bytes() - settled < GROWTH_LIMIT


def test_two_hundred_contexts_do_not_leak() -> None:
    """A context of its own for every step, as a careless loop has it."""
    model = models.resnet20(width=4)
    batch = model.make_batch(0, 8)
    train(model, [batch] * 50, lambda: compressed(4, model=model))
    gc.collect()
    settled = rss_bytes()
    train(model, [batch] * 150, lambda: compressed(4, model=model))
    gc.collect()
    assert rss_bytes() - settled < GROWTH_LIMIT


def test_two_hundred_forwards_without_backward_do_not_leak() -> None:
    model = models.gpt(layers=1, width=64, length=64)
    batch = model.make_batch(0, 4)
    saved = compressed(4, model=model)
    settled = 0
    for step in range(STEPS):
        with saved:
            batch.loss(model)
        assert saved.stats().live_bytes == 0
        if step == 50:
            settled = rss_bytes()
    assert rss_bytes() - settled < GROWTH_LIMIT


def test_failing_steps_do_not_leak() -> None:
    x = torch.randn(512, 256, requires_grad=True)
    saved = compressed(4)
    settled = 0
    for step in range(STEPS):
        try:
            with saved:
                h = ((x * 1.0) * (x * 2.0)).exp()
                h @ h
        except RuntimeError:
            pass
        del h
        assert saved.stats().live_bytes == 0, f"step {step}"
        if step == 50:
            settled = rss_bytes()
    assert rss_bytes() - settled < GROWTH_LIMIT


def test_quantizing_in_a_loop_does_not_leak() -> None:
    x = torch.randn(512, 512)
    settled = 0
    for step in range(STEPS):
        quantized = daf_rs.quantize(x, bits=4)
        daf_rs.dequantize(quantized)
        daf_rs.QuantizedTensor.from_bytes(quantized.to_bytes())
        with pytest.raises(daf_rs.CorruptDataError):
            daf_rs.QuantizedTensor.from_bytes(quantized.to_bytes()[:-9])
        if step == 50:
            settled = rss_bytes()
    assert rss_bytes() - settled < GROWTH_LIMIT


def test_many_live_quantized_tensors_take_what_they_say() -> None:
    """Packed bytes are the process's: 200 tensors of 4 bits take about an eighth of what they hold."""
    out = run_python("""
        import gc, torch, daf_rs
        from helpers import rss_bytes
        x = torch.randn(512, 512)
        keep = [daf_rs.quantize(x, bits=4) for _ in range(20)]
        gc.collect()
        before = rss_bytes()
        keep += [daf_rs.quantize(x, bits=4) for _ in range(200)]
        print(rss_bytes() - before, 200 * keep[0].nbytes)
    """)
    grown, said = map(int, out.split())
    assert grown < 1.25 * said + (16 << 20)


@pytest.mark.slow
def test_two_thousand_steps_of_every_model_do_not_leak() -> None:
    for name in models.MODELS:
        model = models.build(name, width=8 if name == "resnet20" else 64)
        batch = model.make_batch(0, 4)
        saved = compressed(4, model=model)
        train(model, [batch] * 100, lambda: saved)  # noqa: B023
        gc.collect()
        settled = rss_bytes()
        train(model, [batch] * 300, lambda: saved)  # noqa: B023
        gc.collect()
        assert saved.stats().live_bytes == 0
        assert rss_bytes() - settled < GROWTH_LIMIT, name
