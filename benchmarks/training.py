"""Trains one model several times, plainly and compressed, and compares what comes out.

A *run* is one (mode, seed). Modes differ in nothing but how activations are kept: the same
weights, data order and augmentation. A run's result is saved when it ends and its state after
every epoch, so an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ResultFile, file_lock, machine_info, machine_line, table
from torch import Tensor, nn


def bits_of(mode: str) -> int | str | None:
    """Returns what to give to `save_compressed(bits=...)` for a mode; None means plain PyTorch.

    Args:
        mode: `f32` (plain), `exact`, or `1bit` .. `8bit`.
    """
    if mode == "f32":
        return None
    if mode == "exact":
        return "exact"
    match = re.fullmatch(r"([1-8])bit", mode)
    if match is None:
        raise argparse.ArgumentTypeError(f"unknown mode {mode!r}: give f32 (plain PyTorch), exact, or 1bit to 8bit")
    return int(match[1])


def _mode(text: str) -> str:
    bits_of(text)
    return text


class Task(ABC):
    """What is trained: model, data, schedule and the figure that counts."""

    name: str
    metric: str
    epochs: int
    steps: int  # per epoch

    @abstractmethod
    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns a fresh model and its optimizer."""

    @abstractmethod
    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted over the whole run."""

    @abstractmethod
    def start_epoch(self, seed: int, epoch: int) -> None:
        """Draws the epoch's data order, from the seed and the epoch alone."""

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of a step of the epoch."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the scalar loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Returns the metric on held-out data."""


def add_options(parser: argparse.ArgumentParser, *, epochs: int) -> None:
    """Adds the options that both accuracy benchmarks share."""
    parser.add_argument("--epochs", type=int, default=epochs, help="epochs of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--modes",
        type=_mode,
        nargs="+",
        default=["f32", "4bit", "2bit"],
        help="f32 (plain PyTorch), exact, 1bit .. 8bit",
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--summary", action="store_true", help="only print the table of what is stored")


def run(task: Task, mode: str, seed: int, checkpoint: Path) -> dict[str, Any]:
    """Trains once, from a checkpoint where one is left, and returns the record of the run."""
    model, optimizer = task.build(seed)
    first, losses, seconds, cpu = 0, list[float](), 0.0, 0.0
    ratio: float | None = None
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses, seconds, cpu = state["epoch"], state["losses"], state["seconds"], state["cpu"]
        print(f"{task.name} {mode} seed {seed}: goes on after epoch {first}", flush=True)
    bits = bits_of(mode)
    for epoch in range(first, task.epochs):
        saved: Any = contextlib.nullcontext()
        if bits is not None:
            import daf_rs

            # Keyed by seed and epoch, so a run that was interrupted draws the same noise.
            saved = daf_rs.save_compressed(bits=bits, model=model, seed=1000 * seed + epoch)
        torch.manual_seed(1000 * seed + epoch)
        task.start_epoch(seed, epoch)
        model.train()
        wall_start, cpu_start, total = time.perf_counter(), time.process_time(), 0.0
        for step in range(task.steps):
            for group in optimizer.param_groups:
                group["lr"] = task.rate(epoch * task.steps + step)
            inputs, targets = task.batch(step)
            optimizer.zero_grad(set_to_none=True)
            with saved:
                loss = task.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        seconds += time.perf_counter() - wall_start
        cpu += time.process_time() - cpu_start
        losses.append(total / task.steps)
        if bits is not None:
            stats = saved.stats()
            ratio = stats.plain_peak_bytes / stats.peak_bytes
        print(
            f"{task.name} {mode} seed {seed}: epoch {epoch + 1}/{task.epochs} "
            f"loss {losses[-1]:.4f}, {seconds:.0f} s so far",
            flush=True,
        )
        _save(
            checkpoint,
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
                "losses": losses,
                "seconds": seconds,
                "cpu": cpu,
            },
        )
    value = task.evaluate(model)
    return {
        "mode": mode,
        "seed": seed,
        task.metric: value,
        "train_losses": losses,
        "epochs": task.epochs,
        "steps_per_epoch": task.steps,
        "train_seconds": round(seconds, 2),
        "train_cpu_seconds": round(cpu, 2),
        "saved_bytes_ratio": ratio,
    }


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def run_all(task: Task, arguments: argparse.Namespace) -> None:
    """Does every (mode, seed) that is not stored yet, then prints the table."""
    results = ResultFile(arguments.out, task.name)
    work = arguments.out.parent / "tmp"
    torch.set_num_threads(arguments.threads)
    if not arguments.summary:
        for mode in arguments.modes:
            for seed in arguments.seeds:
                key = f"{mode}/seed{seed}/{task.epochs}x{task.steps}"
                stem = f"{arguments.out.stem}-{key.replace('/', '-')}"
                # A second process with the same file takes other runs instead of repeating one.
                with file_lock(work / f"{stem}.lock", blocking=False) as mine:
                    if not mine or key in results.records():
                        continue
                    checkpoint = work / f"{stem}.pt"
                    record = run(task, mode, seed, checkpoint)
                    results.put(key, record)
                    checkpoint.unlink(missing_ok=True)
                    print(f"{task.name} {key}: {task.metric} {record[task.metric]:.4f}", flush=True)
    print(summary(task, results, arguments.modes))


def summary(task: Task, results: ResultFile, modes: Sequence[str]) -> str:
    """Returns the table: mean, spread and the difference from plain training for each mode."""
    values: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for record in results.records().values():
        if record["epochs"] == task.epochs and record["steps_per_epoch"] == task.steps:
            values.setdefault(record["mode"], []).append(record[task.metric])
            if record["saved_bytes_ratio"] is not None:
                ratios[record["mode"]] = record["saved_bytes_ratio"]
    base = statistics.mean(values["f32"]) if "f32" in values else None
    rows = []
    for mode in [m for m in modes if m in values] + [m for m in values if m not in modes]:
        got = values[mode]
        mean = statistics.mean(got)
        rows.append(
            [
                mode,
                len(got),
                f"{mean:.4f}",
                f"{statistics.stdev(got):.4f}" if len(got) > 1 else "-",
                f"{min(got):.4f} .. {max(got):.4f}",
                "-" if base is None else f"{mean - base:+.4f}",
                "-" if base is None else f"{100 * (mean / base - 1):+.2f} %",
                f"{ratios[mode]:.2f}x" if mode in ratios else "1x",
            ]
        )
    head = ["mode", "seeds", f"mean {task.metric}", "sd", "range", "minus f32", "relative", "bytes"]
    return f"{machine_line(machine_info())}\n{table(rows, head)}"
