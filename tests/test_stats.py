"""`stats()` and `report()`: figures that hold together and agree with counts made without the package."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HAS_NODE_HOOK, compressed, needs_node_hook, plain_saved_bytes, row_of
from torch import Tensor, nn

import daf_rs
from daf_rs.testing import models

SMALL: dict[str, dict[str, Any]] = {
    "resnet20": {"width": 8},
    "gpt": {"layers": 2, "width": 64, "length": 64},
    "vit": {"layers": 2, "width": 64},
    "llama": {"layers": 2, "width": 64, "length": 64},
    "lstm": {"width": 64, "length": 32},
}


def lossy(bits: Any = 4, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_a_new_context_has_counted_nothing() -> None:
    stats = lossy().stats()
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        assert not value or value == 0, f"{field.name} = {value!r}"
    assert len(lossy().report().rows) == 0
    assert "No tensor" in str(lossy().report())


def test_stats_are_a_frozen_snapshot() -> None:
    saved = lossy()
    before = saved.stats()
    with saved:
        y = (leaf(128, 64) * 1.0).exp()
    assert before.packs == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.packs = 3
    for name in (
        "live_bytes",
        "peak_bytes",
        "logical_bytes",
        "unique_bytes",
        "plain_bytes",
        "plain_peak_bytes",
        "packs",
        "unpacks",
        "counts",
        "bytes_by_class",
        "pack_seconds",
        "unpack_seconds",
        "pack_gbps",
        "unpack_gbps",
    ):
        assert hasattr(before, name), name
        with pytest.raises(AttributeError):
            setattr(before, name, 1)
    del y


@pytest.mark.parametrize("bits", [4, "exact"])
@pytest.mark.parametrize("min_bytes", [0, 16384])
@pytest.mark.parametrize("name", SMALL)
def test_plain_bytes_equal_an_independent_count(name: str, min_bytes: int, bits: Any) -> None:
    """Whole storages that plain PyTorch would hold for backward alone, each once."""
    model = models.build(name, **SMALL[name])
    batch = model.make_batch(0, 8)
    expected = plain_saved_bytes(lambda: batch.loss(model), model)
    saved = compressed(bits, min_bytes=min_bytes, model=model)
    with saved:
        loss = batch.loss(model)
    assert saved.stats().plain_bytes == expected
    assert saved.stats().plain_peak_bytes >= expected
    loss.backward()
    assert saved.stats().plain_bytes == 0
    assert saved.stats().plain_peak_bytes >= expected


@needs_node_hook
def test_plain_bytes_of_views_count_the_whole_storage() -> None:
    def forward() -> Tensor:
        wide = torch.randn(512, 512)
        return (torch.ones(64, 64, requires_grad=True) * wide[:64, :64]).sum() + (
            torch.ones(10, 512, requires_grad=True) * wide[100:110]
        ).sum()

    expected = plain_saved_bytes(forward)
    assert expected >= 512 * 512 * 4
    saved = lossy()
    with saved:
        y = forward()
    assert saved.stats().plain_bytes == expected
    assert saved.stats().live_bytes < expected / 20
    del y
    assert saved.stats().plain_bytes == 0


def test_what_the_caller_holds_counts_neither_plainly_nor_as_live() -> None:
    data, held = torch.randn(256, 256), torch.randn(512, 512)
    layer = nn.Linear(256, 64)
    with lossy(model=layer) as saved:
        y = layer(data).sum() + (leaf(512, 512) * held).sum()
    assert saved.stats().plain_bytes == 0
    assert saved.stats().live_bytes <= (256 * 256 + 512 * 512) // 2 * 1.1
    del y


def test_invariants_hold_at_every_moment() -> None:
    model = models.gpt(**SMALL["gpt"])
    saved = compressed(4, model=model)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(saved.stats())

    for module in model.modules():
        module.register_forward_hook(look)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        with saved:
            loss = model.make_batch(step, 4).loss(model)
        loss.backward()
        look()
    previous = seen[0]
    for stats in seen:
        assert 0 <= stats.live_bytes <= stats.peak_bytes
        assert 0 <= stats.plain_bytes <= max(stats.plain_peak_bytes, stats.plain_bytes)
        assert stats.unique_bytes <= stats.logical_bytes
        assert stats.peak_bytes >= previous.peak_bytes
        assert stats.packs >= previous.packs
        assert stats.unpacks >= previous.unpacks
        assert stats.pack_seconds >= previous.pack_seconds >= 0
        assert all(count >= 0 for count in stats.counts.values())
        assert all(size >= 0 for size in stats.bytes_by_class.values())
        previous = stats
    assert seen[-1].live_bytes == 0
    assert seen[-1].peak_bytes > 0
    assert seen[-1].pack_seconds > 0
    assert seen[-1].unpack_seconds > 0
    assert seen[-1].pack_gbps > 0
    assert seen[-1].unpack_gbps > 0


@needs_node_hook
def test_bytes_by_class_sum_up_to_the_packed_bytes() -> None:
    model = models.resnet20(**SMALL["resnet20"])
    with compressed(4, model=model) as saved:
        loss = model.make_batch(0, 8).loss(model)
    stats = saved.stats()
    assert sum(stats.bytes_by_class.values()) == stats.packed_bytes
    assert stats.packed_bytes + stats.kept_bytes == stats.live_bytes
    assert stats.counts.keys() == stats.bytes_by_class.keys()
    assert stats.counts.get("value", 0) > 0
    loss.backward()
    after = saved.stats()
    assert sum(after.bytes_by_class.values()) == after.live_bytes == 0


@pytest.mark.parametrize("name", SMALL)
def test_rows_sum_up_to_the_stats(name: str) -> None:
    model = models.build(name, **SMALL[name])
    batch = model.make_batch(0, 8)
    with compressed(4, model=model) as saved:
        loss = batch.loss(model)
    report, stats = saved.report(), saved.stats()
    assert len(report.rows) == stats.packs
    assert [row.index for row in report.rows] == list(range(len(report.rows)))
    assert sum(row.stored_bytes for row in report.rows) == report.totals.stored_bytes == stats.live_bytes
    assert sum(row.plain_bytes for row in report.rows) == report.totals.plain_bytes == stats.plain_bytes
    loss.backward()


@pytest.mark.parametrize("name", SMALL)
def test_every_row_that_is_not_smaller_says_why(name: str) -> None:
    model = models.build(name, **SMALL[name])
    batch = model.make_batch(0, 8)
    with compressed(4, model=model) as saved:
        loss = batch.loss(model)
    for row in saved.report().rows:
        if row.stored_bytes >= row.plain_bytes and not row.shared:
            assert len(row.why) > 5, row
    loss.backward()


@needs_node_hook
def test_rows_name_the_reader_the_module_and_the_shape() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(64, 128))
    model.add_module("act", nn.GELU())
    model.add_module("second", nn.Linear(128, 32))
    with lossy(4, model=model) as saved:
        y = model(torch.randn(256, 64) * 1.0)
    gelu = row_of(saved, "GeluBackward0", "self")
    assert (gelu.module, gelu.shape, gelu.dtype, gelu.cls, gelu.bits) == ("act", (256, 128), "float32", "value", 4)
    assert gelu.plain_bytes == 256 * 128 * 4
    assert gelu.stored_bytes < gelu.plain_bytes / 7
    inputs = [row for row in saved.report().rows if row.op == "AddmmBackward0" and row.field == "mat1"]
    assert [row.module for row in inputs] == ["first", "second"]
    y.sum().backward()


def test_module_paths_of_nested_modules() -> None:
    if not HAS_NODE_HOOK:
        pytest.skip("without node_creation_hook rows are made in pack")
    model = models.vit(**SMALL["vit"])
    with compressed(4, model=model, min_bytes=0) as saved:
        loss = model.make_batch(0, 8).loss(model)
    modules = {row.module for row in saved.report().rows}
    assert any(path.startswith("blocks.1.mlp") for path in modules), modules
    assert any(path.startswith("blocks.0.attention") for path in modules), modules
    loss.backward()


@needs_node_hook
def test_the_report_is_text_and_plain_values() -> None:
    model = models.gpt(**SMALL["gpt"])
    with compressed(4, model=model) as saved:
        loss = model.make_batch(0, 4).loss(model)
    report = saved.report()
    text = str(report)
    for part in ("Gelu", "value", "total"):
        assert part in text
    values = json.loads(json.dumps(report.to_dict()))
    assert len(values["rows"]) == len(report.rows)
    assert values["totals"]["stored_bytes"] == saved.stats().live_bytes
    loss.backward()
    assert len(str(saved.report())) > 100, "the report of the last forward is still there after backward"


def test_a_new_step_starts_a_new_report() -> None:
    saved = lossy()
    lengths = []
    for _ in range(3):
        with saved:
            y = ((leaf(128, 64) * 1.0) * (leaf(128, 64) * 2.0)).sum()
        lengths.append(len(saved.report().rows))
        y.backward()
    assert lengths == [2, 2, 2]
    assert saved.stats().packs == 6


@needs_node_hook
def test_logical_and_unique_bytes() -> None:
    x = leaf(256, 128)
    size = 256 * 128 * 4
    with lossy() as saved:
        h = x * 1.0
        y = h * h + h.square() + F.gelu(h)
        z = h[:64] * h[:64]
    stats = saved.stats()
    assert stats.logical_bytes == 4 * size + 2 * size // 4
    assert size <= stats.unique_bytes <= size + size // 4
    del y, z


def test_unpacks_are_counted() -> None:
    with lossy() as saved:
        y = ((leaf(128, 64) * 1.0) * (leaf(128, 64) * 2.0)).sum()
    assert (saved.stats().packs, saved.stats().unpacks) == (2, 0)
    y.backward(retain_graph=True)
    assert saved.stats().unpacks == 2
    y.backward()
    assert saved.stats().unpacks == 4


@needs_node_hook
def test_peak_is_that_of_the_whole_life_and_stays() -> None:
    saved = lossy()
    for rows in (64, 512, 64):
        with saved:
            y = (leaf(rows, 256) * 1.0).mul(leaf(rows, 256) * 1.0)
        y.sum().backward()
    stats = saved.stats()
    assert stats.live_bytes == 0
    assert 512 * 256 * 2 * 0.5 <= stats.peak_bytes <= 512 * 256 * 2 * 0.6


def test_kept_tensors_count_as_live() -> None:
    """Float64 has no code; what plain PyTorch would hold is held by us, and said so."""
    x = torch.randn(128, 64, dtype=torch.float64, requires_grad=True)
    with lossy() as saved:
        y = (x * 1.0) * (x * 2.0)
    assert saved.stats().live_bytes == 2 * 128 * 64 * 8
    assert saved.stats().live_bytes == saved.stats().plain_bytes
    for row in saved.report().rows:
        assert row.why
        assert row.kept
    del y
    assert saved.stats().live_bytes == 0


@needs_node_hook
def test_metadata_is_part_of_the_figures() -> None:
    x = leaf(1024, 1024)
    with lossy(4, group_size=32, groups="row") as fine:
        a = (x * 1.0) * x.detach().clone()
    with lossy(4, group_size=1024, groups="row") as coarse:
        b = (x * 1.0) * x.detach().clone()
    per_group = 4 * 1024 * 1024
    difference = fine.stats().live_bytes - coarse.stats().live_bytes
    assert difference >= 0.9 * (per_group / 32 - per_group / 1024)
    del a, b


def test_a_report_of_a_context_without_compression_explains_itself() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(lossy(4))
        y = (x * x).sum()
    text = str(saved.report())
    assert "float64" in text
    y.backward()
