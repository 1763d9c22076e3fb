"""How fast is the value codec? Quantize and dequantize against a memory copy of the same source.

    python benchmarks/codec.py

* Source: 256 MB of f32 (as many elements of f16 and bf16), far beyond the caches.
* Yardstick `memcpy`: libc's memmove of the f32 source into a warm destination, one thread, timed
  in turns with the cases of its table; a ratio of 1.0x means that the source is processed at the
  speed of that copy.
* Doors: `daf_rs.quantize`, whose packed bytes go to warm slabs, and for `dequantize` the decoding
  into a given tensor, warm like the copy's destination. `QuantizedTensor.dequantize`, which also
  allocates its output, stands beside it as `dequantize and allocate`.
* Each instruction set runs in a process of its own (`DAF_ISA`).
* The torch quantizer does the same work with torch's operators: minimum and scale a group of
  256, stochastic rounding, two codes a byte, and back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ResultFile, Timing, interleave, libc_memmove, machine_info, machine_line, option_parser, table
from torch import Tensor

GROUP = 256
HEAD = ["case", "GB/s", "memcpy", "(minima)", "(CPU)", "Gelem/s"]


def torch_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit stochastic group quantization with torch operators.

    Args:
        x: f32, flat, a multiple of 256 elements.

    Returns:
        Two codes a byte (uint8), and minimum and step of each group (f32).
    """
    groups = x.view(-1, GROUP)
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    step = (high - low).div_(15.0)
    codes = groups.sub(low).div_(step).add_(torch.rand_like(groups)).floor_().clamp_(0.0, 15.0)
    codes8 = codes.to(torch.uint8)
    packed = codes8[:, 0::2].bitwise_or(codes8[:, 1::2].bitwise_left_shift(4))
    return packed, low, step


def torch_dequantize(packed: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Returns the f32 values of `torch_quantize`."""
    codes = torch.stack((packed.bitwise_and(15), packed.bitwise_right_shift(4)), dim=2)
    return codes.view(-1, GROUP).to(torch.float32).mul_(step).add_(low).view(-1)


def decode_into(packed: Any, out: Tensor, threads: int) -> None:
    """Decodes a `QuantizedTensor` into memory that is there, as no public function does."""
    packed._packed.decode_into(out, threads)


@dataclass(frozen=True)
class Input:
    """A tensor to quantize and the group shape for it."""

    label: str
    tensor: Tensor
    groups: str


class Bench:
    """Times cases against memcpy and collects one record each.

    Args:
        source: The f32 tensor that memcpy copies.
        rounds: Rounds of every comparison.
    """

    def __init__(self, source: Tensor, rounds: int) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self._rounds = rounds
        self._source = source
        self._copy = torch.empty_like(source).copy_(source)
        move = libc_memmove()
        self._memcpy = partial(move, self._copy.data_ptr(), source.data_ptr(), source.nbytes)

    def compare(self, cases: dict[str, tuple[Callable[[], object], int]]) -> dict[str, Timing]:
        """Times cases (callable, bytes of its source) in turns with memcpy and stores the records."""
        calls: dict[str, Callable[[], object]] = {
            "memcpy": self._memcpy,
            **{name: call for name, (call, _) in cases.items()},
        }
        timings = interleave(calls, rounds=self._rounds)
        elements = self._source.numel()
        for name, (_, size) in cases.items():
            timing, copy = timings[name], timings["memcpy"]
            self.records[name] = {
                **timing.to_dict(),
                "gb_per_s": size / timing.median_wall * 1e-9,
                "elements_per_s": elements / timing.median_wall,
                "memcpy_gb_per_s": self._source.nbytes / copy.median_wall * 1e-9,
                # Both at the size of the case's own source.
                "x_memcpy": copy.median_wall / self._source.nbytes * size / timing.median_wall,
                "x_memcpy_cpu": copy.median_cpu / self._source.nbytes * size / timing.median_cpu,
                "x_memcpy_of_minima": copy.min_wall / self._source.nbytes * size / timing.min_wall,
            }
        return timings

    def codec(self, inputs: list[Input], bits: list[int], threads: list[int]) -> None:
        """Compares quantize and dequantize of tensors at several widths and thread counts.

        Records of later inputs also say how many elements they do a second in units of the first
        input (`x_first`), those of several threads in units of one thread (`x_one_thread`).
        """
        import daf_rs

        cases: dict[str, tuple[Callable[[], object], int]] = {}
        keys: dict[str, tuple[str, str, int, int]] = {}
        for one in inputs:
            x = one.tensor
            out = torch.empty_like(x).zero_()
            for width in bits:
                for count in threads:
                    quantize = partial(
                        daf_rs.quantize, x, bits=width, group_size=GROUP, groups=one.groups, seed=0, threads=count
                    )
                    for way, call in (
                        ("quantize", quantize),
                        ("dequantize", partial(decode_into, quantize(), out, count)),
                    ):
                        name = f"{way} {one.label} {width} bit, {count} thread" + ("s" if count > 1 else "")
                        cases[name] = (call, x.nbytes)
                        keys[name] = (one.label, way, width, count)
        timings = self.compare(cases)
        sizes = {one.label: one.tensor.numel() for one in inputs}
        # One thread: CPU seconds, which a busy machine disturbs least; several: the least wall time.
        speeds = {key: sizes[key[0]] / timings[name].median_cpu for name, key in keys.items()}
        walls = {key: sizes[key[0]] / timings[name].min_wall for name, key in keys.items()}
        first = inputs[0].label
        for name, (label, way, width, count) in keys.items():
            self.records[name]["elements_per_s"] = sizes[label] / timings[name].median_wall
            if label != first and count == 1:
                self.records[name]["x_first"] = speeds[label, way, width, 1] / speeds[first, way, width, 1]
            if count > 1:
                self.records[name]["x_one_thread"] = walls[label, way, width, count] / walls[label, way, width, 1]


def work(megabytes: int, rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Measures everything under the instruction set of this process and returns the records."""
    torch.set_num_threads(1)
    elements = megabytes * 1_000_000 // 4 // GROUP * GROUP
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    bench = Bench(x, rounds)
    few = [4] if quick else [2, 4, 8]
    row = Input("f32 row", x, "row")
    bench.codec([row, Input("f32 row, half zeros", torch.relu(x), "row")], few, [1])
    matrices = [x[: elements // c * c].view(-1, c) for c in (768, 1000, 1024)]
    bench.codec([row, *(Input(f"f32 channel C={m.shape[1]}", m, "channel") for m in matrices)], few, [1])
    bench.codec([row, Input("f16 row", x.half(), "row"), Input("bf16 row", x.bfloat16(), "row")], few, [1])
    bench.codec([row], [2, 4, 8], [1, 2])
    against_torch(bench, x, rounds)
    return bench.records


def against_torch(bench: Bench, x: Tensor, rounds: int) -> None:
    """Compares with the quantizer of torch operators, which needs fewer rounds and more patience."""
    import daf_rs

    packed_torch = torch_quantize(x)
    quantize = partial(daf_rs.quantize, x, bits=4, group_size=GROUP, rounding="stochastic", groups="row", threads=1)
    packed = quantize()
    out = torch.zeros_like(x)
    slow = Bench(x, max(3, rounds // 3))
    timings = slow.compare(
        {
            "quantize 4 bit with torch operators": (lambda: torch_quantize(x), x.nbytes),
            "dequantize 4 bit with torch operators": (lambda: torch_dequantize(*packed_torch), x.nbytes),
            "quantize f32 row 4 bit stochastic": (quantize, x.nbytes),
            "dequantize f32 row 4 bit stochastic": (partial(decode_into, packed, out, 1), x.nbytes),
            "dequantize and allocate, f32 row 4 bit stochastic": (partial(packed.dequantize, threads=1), x.nbytes),
        }
    )
    for way in ("quantize", "dequantize"):
        ours, theirs = timings[f"{way} f32 row 4 bit stochastic"], timings[f"{way} 4 bit with torch operators"]
        slow.records[f"{way} f32 row 4 bit stochastic"]["x_torch"] = theirs.median_cpu / ours.median_cpu
    bench.records |= slow.records


def levels() -> list[str]:
    """Returns the vector instruction sets of this CPU that the codec has kernels for, widest last."""
    flags = set(machine_info()["cpu_flags"])
    found = ["neon"] if "asimd" in flags else []
    if {"avx2", "fma"} <= flags:
        found.append("avx2")
    if {"avx512f", "avx512bw"} <= flags:
        found.append("avx512")
    return found or ["scalar"]


def run_level(isa: str, megabytes: int, rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Measures one instruction set in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    command += ["--megabytes", str(megabytes), "--rounds", str(rounds), *(["--quick"] if quick else [])]
    environment = {**os.environ, "DAF_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the measurement with DAF_ISA={isa} failed (its error is above)")
    records: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return records


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "codec", "Speed of quantize and dequantize in units of a memory copy of the same source, per instruction set."
    )
    parser.add_argument("--isa", nargs="+", default=levels(), help="values of DAF_ISA to measure")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the f32 source, 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    megabytes, rounds = (2, 3) if arguments.quick else (arguments.megabytes, arguments.rounds)
    if arguments.worker:
        records = work(megabytes, rounds, arguments.quick)
        line = machine_line(machine_info())
        print(json.dumps({name: {**record, "machine": line} for name, record in records.items()}))
        return
    results = ResultFile(arguments.out, "codec")
    for isa in arguments.isa:
        rows, machine = [], ""
        for name, record in run_level(isa, megabytes, rounds, arguments.quick).items():
            machine = record["machine"]
            results.put(f"{isa}: {name}", record)
            rows.append(
                [
                    name,
                    f"{record['gb_per_s']:.2f}",
                    f"{record['x_memcpy']:.2f}x",
                    f"{record['x_memcpy_of_minima']:.2f}x",
                    f"{record['x_memcpy_cpu']:.2f}x",
                    f"{record['elements_per_s'] * 1e-9:.2f}",
                    *(f"{record[key]:.2f}x" if key in record else "" for key in ("x_first", "x_one_thread", "x_torch")),
                ]
            )
        print(f"{machine}; {megabytes} MB of f32")
        print(table(rows, [*HEAD, "f32 row", "1 thread", "torch operators"]))


if __name__ == "__main__":
    main()
