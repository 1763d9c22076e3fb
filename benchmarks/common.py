"""What every benchmark script shares: the machine, fair timing, results that survive a restart.

Timing is interleaved: the cases of one comparison take turns within every round, so a slow
phase of a shared machine hits all of them alike, and ratios are taken between medians (or
minima) of the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import fcntl
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# The CPU flags that decide which kernels run.
_FLAGS = [
    "sse2",
    "ssse3",
    "avx2",
    "fma",
    "f16c",
    "bmi2",
    "avx512f",
    "avx512bw",
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_bf16",
    "asimd",
]


def option_parser(name: str, description: str, *, data: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every script has.

    Args:
        name: The benchmark's name; it also names the result file.
        description: One paragraph for `--help`.
        data: Help text of `--data`; None leaves the option out.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke run of seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="the JSON file to write")
    if data is not None:
        parser.add_argument("--data", type=Path, default=None, help=data)
    return parser


def load_models() -> ModuleType:
    """Returns `daf_rs.testing.models`, loaded from its file.

    Going through the file instead of the package keeps plain runs independent of the native
    module: they also work before it is built.
    """
    name = "daf_rs_benchmark_models"
    if name in sys.modules:
        return sys.modules[name]
    path = ROOT / "python" / "daf_rs" / "testing" / "models.py"
    if not path.exists():
        import daf_rs.testing.models as installed

        return installed
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the benchmark models from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def gpt2_weights(model: nn.Module, seed: int) -> None:
    """Draws a GPT's matrices and embeddings from N(0, 0.02) and zeroes its biases, as GPT-2 does.

    With torch's own start, embeddings of variance 1 drown the residual stream in noise that is the
    same in every channel for hundreds of steps, which no trained model looks like.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _cpu() -> tuple[str, list[str]]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    return model, [flag for flag in _FLAGS if flag in flags]


def _version(module: str) -> str | None:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return None


def machine_info() -> dict[str, Any]:
    """Returns what a reader needs to judge a figure: CPU, instruction set, versions, date, load."""
    model, flags = _cpu()
    info: dict[str, Any] = {
        "cpu": model,
        "cpu_flags": flags,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "daf_isa": os.environ.get("DAF_ISA"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
    }
    try:
        import daf_rs
    except ImportError:
        info["daf_rs"] = None
    else:
        info["daf_rs"] = dict(daf_rs.build_info())
    return info


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine_line(info: Mapping[str, Any]) -> str:
    """Returns the machine in one line, for the head of a printed table."""
    build = info.get("daf_rs") or {}
    isa = build.get("isa") or build.get("active_isa") or info.get("daf_isa") or "n/a"
    load = info["load_average"][0]
    return (
        f"{info['cpu']}, {info['cores']} cores (load {load:.1f}), instruction set {isa}, "
        f"torch {info['torch']}, {info['libc']}, {info['date']}"
    )


@dataclass
class Timing:
    """Wall and CPU seconds of one case, one entry a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median_wall(self) -> float:
        """Median wall seconds."""
        return statistics.median(self.wall)

    @property
    def min_wall(self) -> float:
        """Smallest wall seconds."""
        return min(self.wall)

    @property
    def median_cpu(self) -> float:
        """Median CPU seconds of the process, all threads."""
        return statistics.median(self.cpu)

    @property
    def min_cpu(self) -> float:
        """Smallest CPU seconds of the process, all threads."""
        return min(self.cpu)

    def to_dict(self) -> dict[str, float | int]:
        """Returns the summary that goes into the JSON file."""
        return {
            "rounds": len(self.wall),
            "wall_median_s": self.median_wall,
            "wall_min_s": self.min_wall,
            "cpu_median_s": self.median_cpu,
            "cpu_min_s": self.min_cpu,
        }


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    seconds: float | None = None,
) -> dict[str, Timing]:
    """Times the cases in turns and returns one `Timing` each.

    Args:
        cases: Name to callable. What the callable returns is dropped within the timed part.
        rounds: How often each case runs.
        warmup: Untimed rounds before.
        seconds: Stop after this wall time, but never before three rounds.

    Every round starts with another case, so that none always follows the same neighbour.
    """
    names = list(cases)
    timings = {name: Timing() for name in names}
    for _ in range(warmup):
        for name in names:
            cases[name]()
    start = time.perf_counter()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            call = cases[name]
            cpu = time.process_time()
            wall = time.perf_counter()
            call()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
        if seconds is not None and index >= 2 and time.perf_counter() - start > seconds:
            break
    return timings


class ResultFile:
    """A JSON file of records that is written after each of them, safe against parallel runs.

    Layout: `{"benchmark": name, "machine": {...}, "records": {key: {...}}}`; `machine` is that
    of the latest write. A restart skips the keys that are there already.
    """

    def __init__(self, path: Path, benchmark: str) -> None:
        self.path = path
        self.benchmark = benchmark
        self._machine: dict[str, Any] | None = None

    def records(self) -> dict[str, dict[str, Any]]:
        """Returns the records stored so far."""
        if not self.path.exists():
            return {}
        document = json.loads(self.path.read_text(encoding="utf-8"))
        if document.get("benchmark") != self.benchmark:
            raise SystemExit(
                f"{self.path} holds results of {document.get('benchmark')!r}, not of "
                f"{self.benchmark!r}; name another file with --out"
            )
        records: dict[str, dict[str, Any]] = document["records"]
        return records

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Stores one record and replaces the file atomically."""
        if self._machine is None:
            self._machine = machine_info()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self.path.parent / "tmp" / f"{self.path.stem}.lock"):
            records = self.records()
            records[key] = {"machine": machine_line(self._machine), **record}
            document = {
                "benchmark": self.benchmark,
                "machine": self._machine,
                "records": records,
            }
            text = json.dumps(document, indent=1, sort_keys=False, allow_nan=False)
            partial = self.path.with_suffix(".partial")
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self.path)

    def clear(self) -> None:
        """Forgets all records: for benchmarks whose figures only compare within one run."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, *, blocking: bool = True) -> Iterator[bool]:
    """Holds an advisory lock on `path`; yields whether it was got."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Returns rows as an aligned Markdown table (first column left, the rest right)."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [row[0].ljust(width[0])]
        parts += [cell.rjust(w) for cell, w in zip(row[1:], width[1:], strict=True)]
        return "| " + " | ".join(parts) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(width)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def libc_memmove() -> Callable[[int, int, int], object]:
    """Returns the C library's memmove(dst, src, bytes): the yardstick of the codec's figures."""
    libc = ctypes.CDLL(None)
    libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    libc.memmove.restype = ctypes.c_void_p
    call: Callable[[int, int, int], object] = libc.memmove
    return call
