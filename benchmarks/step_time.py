"""What does compression cost in time? CPU and wall seconds of a training step against plain PyTorch.

    python benchmarks/step_time.py

Every mode trains in a process of its own (so that none inherits another's heap) and the
processes take turns of a few steps: all of them meet the same phases of a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ResultFile, Timing, load_models, machine_info, machine_line, option_parser, table
from training import bits_of

CASES: dict[str, tuple[str, int, dict[str, int]]] = {
    "ResNet-20": ("resnet20", 128, {}),
    "GPT": ("gpt", 8, {"layers": 6, "width": 256, "heads": 8, "length": 256}),
}
QUICK: dict[str, tuple[str, int, dict[str, int]]] = {
    "ResNet-20": ("resnet20", 8, {}),
    "GPT": ("gpt", 2, {"layers": 1, "length": 32}),
}


def work(model_name: str, mode: str, threads: int, quick: bool) -> None:
    """Trains on request: reads a number of steps a line, answers with the seconds of each as JSON."""
    torch.set_num_threads(threads)
    name, batch_size, options = (QUICK if quick else CASES)[model_name]
    model = load_models().build(name, seed=0, **options)
    batch = model.make_batch(seed=1, batch=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    bits = bits_of(mode)
    saved: Any = contextlib.nullcontext()
    if bits is not None:
        import daf_rs

        saved = daf_rs.save_compressed(bits, model=model, threads=threads, seed=0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with saved:
            loss = batch.loss(model)
        loss.backward()
        optimizer.step()

    print("ready", flush=True)
    for line in sys.stdin:
        timing = Timing()
        for _ in range(int(line)):
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            timing.wall.append(time.perf_counter() - wall)
            timing.cpu.append(time.process_time() - cpu)
        answer: dict[str, Any] = {"wall": timing.wall, "cpu": timing.cpu}
        answer["peak_rss_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if bits is not None:
            stats = saved.stats()
            answer["stats"] = {
                name: getattr(stats, name)
                for name in ("packs", "unpacks", "pack_seconds", "unpack_seconds", "pack_gbps", "unpack_gbps")
            }
        print(json.dumps(answer), flush=True)


class Worker:
    """A training process of one mode."""

    def __init__(self, model: str, mode: str, threads: int, quick: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", model, mode, str(threads)]
        self._process = subprocess.Popen(
            [*command, *(["--quick"] if quick else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.timing = Timing()
        self.last: dict[str, Any] = {}
        self._read("ready")

    def _read(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a training process ended before it was {what} (its error is above)")
        return line

    def steps(self, count: int, *, keep: bool = True) -> None:
        """Makes the process train `count` steps and keeps their seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        self.last = json.loads(self._read("done"))
        if keep:
            self.timing.wall += self.last["wall"]
            self.timing.cpu += self.last["cpu"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(model: str, modes: list[str], threads: int, *, rounds: int, turn: int, quick: bool) -> dict[str, Any]:
    """Returns the seconds a step of every mode, measured in turns."""
    workers: dict[str, Worker] = {}
    try:
        for mode in modes:
            workers[mode] = Worker(model, mode, threads, quick)
            workers[mode].steps(2, keep=False)
        for index in range(rounds):
            shift = index % len(modes)
            for mode in modes[shift:] + modes[:shift]:
                workers[mode].steps(turn)
    finally:
        for worker in workers.values():
            worker.close()
    plain = workers["f32"].timing
    record: dict[str, Any] = {"model": model, "threads": threads, "steps": rounds * turn, "modes": {}}
    for mode, worker in workers.items():
        record["modes"][mode] = {
            **worker.timing.to_dict(),
            "cpu_ratio": worker.timing.median_cpu / plain.median_cpu,
            "cpu_ratio_of_minima": worker.timing.min_cpu / plain.min_cpu,
            "wall_ratio": worker.timing.median_wall / plain.median_wall,
            "wall_ratio_of_minima": worker.timing.min_wall / plain.min_wall,
            "peak_rss_kib": worker.last["peak_rss_kib"],
            "stats": worker.last.get("stats"),
        }
    return record


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "step_time",
        "CPU seconds (all threads of the process) and wall seconds of a training step, compressed "
        "against plain PyTorch, interleaved; ratios of medians.",
    )
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--modes", nargs="+", default=["4bit", "2bit", "exact"], help="beside f32")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=8, help="turns of each mode")
    parser.add_argument("--turn", type=int, default=3, help="steps a turn")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "MODE", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        model, mode, threads = arguments.worker
        work(model, mode, int(threads), arguments.quick)
        return
    results = ResultFile(arguments.out, "step_time")
    rounds, turn = (2, 1) if arguments.quick else (arguments.rounds, arguments.turn)
    rows = []
    for name in arguments.models:
        for threads in arguments.threads:
            modes = ["f32", *(mode for mode in arguments.modes if mode != "f32")]
            record = measure(name, modes, threads, rounds=rounds, turn=turn, quick=arguments.quick)
            results.put(f"{name}/{threads} threads", record)
            for mode, figures in record["modes"].items():
                rows.append(
                    [
                        f"{name}, {threads} threads, {mode}",
                        f"{1e3 * figures['cpu_median_s']:.1f}",
                        f"{figures['cpu_ratio']:.3f}x",
                        f"{figures['cpu_ratio_of_minima']:.3f}x",
                        f"{1e3 * figures['wall_median_s']:.1f}",
                        f"{figures['wall_ratio']:.3f}x",
                    ]
                )
    print(machine_line(machine_info()))
    print(table(rows, ["step", "CPU ms", "CPU", "CPU (minima)", "wall ms", "wall"]))


if __name__ == "__main__":
    main()
