"""Every benchmark script runs at `--quick` and writes what its readers rely on; their shared parts are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"

if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)


def run(script, out, *arguments):
    """Runs a script at `--quick` in a process of its own and returns its document and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--out", str(out), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["benchmark"] == script
    assert {"cpu", "torch", "date", "libc", "daf_rs", "load_average"} <= set(document["machine"])
    assert document["records"]
    return document["records"], done.stdout


@pytest.fixture
def modules(monkeypatch):
    """Makes the scripts importable, as they are when run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("common", "training", "datasets", "saved_bytes", "codec", "accuracy_gpt"):
        sys.modules.pop(name, None)


def test_every_script_is_documented():
    text = (BENCHMARKS / "README.md").read_text()
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()}
    assert scripts == {name for name in scripts if f"python benchmarks/{name}.py" in text}
    assert len(scripts) == 8


def test_codec(tmp_path):
    records, printed = run("codec", tmp_path / "codec.json")
    for way in ("quantize", "dequantize"):
        cases = [key for key in records if f": {way} f32 row 4 bit, 1 thread" in key]
        assert cases, list(records)
        assert all(records[key]["x_memcpy"] > 0 and records[key]["memcpy_gb_per_s"] > 0 for key in cases)
        assert any("x_torch" in record for record in records.values())
    assert "memcpy" in printed


def test_saved_bytes(tmp_path):
    records, _ = run("saved_bytes", tmp_path / "bytes.json")
    for name, record in records.items():
        widths = record["widths"]
        assert set(widths) == {"exact", "2", "4", "8"}, name
        stored = [widths[bits]["stored_bytes"] for bits in ("2", "4", "8", "exact")]
        assert stored == sorted(stored), name
        assert stored[-1] <= record["plain_bytes"], name
        assert widths["4"]["plain_bytes_of_save_compressed"] == pytest.approx(record["plain_bytes"], rel=0.01)


def test_step_time(tmp_path):
    records, _ = run("step_time", tmp_path / "step.json", "--threads", "1", "--modes", "4bit")
    assert set(records) == {"ResNet-20/1 threads", "GPT/1 threads"}
    for record in records.values():
        assert record["modes"]["f32"]["cpu_ratio"] == 1.0
        assert record["modes"]["4bit"]["cpu_ratio"] > 0
        assert record["modes"]["4bit"]["stats"]["packs"] > 0


def test_overhead(tmp_path):
    records, _ = run("overhead", tmp_path / "overhead.json")
    assert records["plain"]["pack_us"] == 0.0
    assert records["encoded"]["forward_us"] > records["plain"]["forward_us"]


def test_variance(tmp_path):
    records, _ = run("variance", tmp_path / "variance.json", "--bits", "4")
    (record,) = records.values()
    assert record["values"]["slots"] > 3
    assert 0 < record["values"]["ratio"] < 2
    assert record["values"]["bytes_channel_over_row"] == pytest.approx(1, abs=0.1)
    assert record["gradients"]["row_variance"] > 0


@pytest.mark.parametrize(
    ("script", "metric"), [("accuracy_cifar", "test_accuracy"), ("accuracy_gpt", "validation_loss")]
)
def test_accuracy(script, metric, tmp_path):
    out = tmp_path / "accuracy.json"
    records, printed = run(script, out, "--modes", "f32", "4bit", "--seeds", "0")
    assert sorted(record["mode"] for record in records.values()) == ["4bit", "f32"]
    assert all(record[metric] >= 0 and len(record["train_losses"]) == 2 for record in records.values())
    by_mode = {record["mode"]: record for record in records.values()}
    assert by_mode["f32"]["saved_bytes_ratio"] is None
    assert by_mode["4bit"]["saved_bytes_ratio"] > 2
    assert "f32" in printed
    again, _ = run(script, out, "--modes", "f32", "4bit", "--seeds", "0")
    assert again == records, "a finished run must not be done again"


def test_interrupted_training_goes_on_to_the_same_result(modules, tmp_path):
    import training
    from accuracy_gpt import GptTask
    from datasets import random_text

    class Interrupted(GptTask):
        def start_epoch(self, seed, epoch):
            if epoch == 1:
                raise KeyboardInterrupt
            super().start_epoch(seed, epoch)

    torch.set_num_threads(1)
    whole = training.run(GptTask(random_text(), 2, 2, 1), "4bit", 3, tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        training.run(Interrupted(random_text(), 2, 2, 1), "4bit", 3, tmp_path / "parts.pt")
    parts = training.run(GptTask(random_text(), 2, 2, 1), "4bit", 3, tmp_path / "parts.pt")
    assert parts["train_losses"] == whole["train_losses"]
    assert parts["validation_loss"] == whole["validation_loss"]


def test_summary_shows_what_was_measured_and_nothing_else(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "summary.py"), "--results", str(tmp_path)]
    machine = {"cpu": "CPU", "cores": 2, "load_average": [0.1, 0, 0], "date": "2026-01-01"}
    runs = {f"f32/{seed}": {"mode": "f32", "validation_loss": 2.0 + seed} for seed in (0, 1)}
    document = {"benchmark": "accuracy_gpt", "machine": machine, "records": runs}
    (tmp_path / "accuracy_gpt.json").write_text(json.dumps(document))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "2.5000 ± 0.7071 (2 seeds)" in printed
    assert "quantize" not in printed


def test_modes(modules):
    import argparse

    from training import bits_of

    assert [bits_of(mode) for mode in ("f32", "exact", "1bit", "8bit")] == [None, "exact", 1, 8]
    with pytest.raises(argparse.ArgumentTypeError, match="1bit to 8bit"):
        bits_of("9bit")


def test_plain_counter_counts_what_only_backward_holds(modules):
    from saved_bytes import PlainCounter

    class Batch:
        x = torch.ones(64, 256)

        def loss(self, model):
            # exp keeps its result; the linear layer keeps x, which lives anyway, and its weight.
            return torch.nn.functional.linear(self.x, model.weight).exp().sum()

    assert PlainCounter().count(torch.nn.Linear(256, 32, bias=False), Batch()) == 64 * 32 * 4


def test_torch_quantizer_does_the_same_work(modules):
    from codec import torch_dequantize, torch_quantize

    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    packed, low, step = torch_quantize(x)
    assert packed.dtype == torch.uint8
    assert packed.numel() == x.numel() // 2
    error = (torch_dequantize(packed, low, step) - x).view(-1, 256).abs()
    assert bool((error <= step * 1.001).all())


def test_results_survive_a_restart_and_keep_benchmarks_apart(modules, tmp_path):
    from common import ResultFile

    path = tmp_path / "file.json"
    ResultFile(path, "one").put("a", {"x": 1})
    ResultFile(path, "one").put("b", {"x": 2})
    assert {key: record["x"] for key, record in ResultFile(path, "one").records().items()} == {"a": 1, "b": 2}
    with pytest.raises(SystemExit, match="--out"):
        ResultFile(path, "two").records()


def test_interleave_takes_turns_and_starts_each_round_elsewhere(modules):
    from common import interleave

    order = []
    timings = interleave({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert order == list("abc") + list("abc") + list("bca") + list("cab")
    assert all(len(timing.wall) == 3 for timing in timings.values())


def test_augment_only_shifts_and_mirrors(modules):
    import numpy as np
    from datasets import augment

    rng = np.random.default_rng(0)
    images = rng.integers(1, 255, (16, 3, 32, 32), dtype=np.uint8)
    changed = augment(images, rng)
    assert changed.shape == images.shape
    for before, after in zip(images, changed, strict=True):
        padded = np.pad(before, ((0, 0), (4, 4), (4, 4)))
        windows = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any((after == w).all() or (after == w[:, :, ::-1]).all() for w in windows)
