"""What does a hook cost beyond the bytes it moves? Microseconds a saved tensor, pack and unpack.

    python benchmarks/overhead.py

A chain of cheap operations on tiny tensors, so that there is next to nothing to encode: what a
forward takes longer inside `save_compressed`, divided by the tensors saved, is pack and node
hook; what the backward takes longer is unpack with its allocation. Two cases:

* `encoded`: `min_bytes=0`, so that each tensor (32 values) goes the whole way to packed bytes;
* `passed through`: below `min_bytes`, so that a handle is made and nothing is encoded.

Minimum over many forwards, CPU time, one thread.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from common import ResultFile, machine_info, machine_line, option_parser, table
from torch import Tensor

ELEMENTS = 32


def _times(saved: Any, x: Tensor, length: int, repeats: int) -> tuple[float, float]:
    """Returns the smallest CPU seconds of a forward of `length` saves and of its backward."""
    forward, backward = float("inf"), float("inf")
    for _ in range(repeats):
        start = time.process_time_ns()
        with saved:
            y = x
            for _ in range(length):
                y = y.sin()
        middle = time.process_time_ns()
        y.backward(x.detach())  # type: ignore[no-untyped-call]
        end = time.process_time_ns()
        forward, backward = min(forward, middle - start), min(backward, end - middle)
    return forward * 1e-9, backward * 1e-9


def measure(length: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns microseconds a saved tensor for every case."""
    import daf_rs

    x = torch.linspace(-1.0, 1.0, ELEMENTS).requires_grad_()
    contexts: dict[str, Any] = {
        "plain": contextlib.nullcontext(),
        "Python hooks": torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
        "passed through": daf_rs.save_compressed(8, threads=1, seed=0),
        "encoded": daf_rs.save_compressed(8, min_bytes=0, threads=1, seed=0),
    }
    best = {name: (float("inf"), float("inf")) for name in contexts}
    # In turns, so that a slow phase of the machine does not fall on one case alone.
    for _ in range(10):
        for name, saved in contexts.items():
            got = _times(saved, x, length, max(1, repeats // 10))
            best[name] = (min(best[name][0], got[0]), min(best[name][1], got[1]))
    forward, backward = best["plain"]
    return {
        name: {
            "pack_us": 1e6 * (got[0] - forward) / length,
            "unpack_us": 1e6 * (got[1] - backward) / length,
            "forward_us": 1e6 * got[0] / length,
            "backward_us": 1e6 * got[1] / length,
        }
        for name, got in best.items()
    }


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser("overhead", "Microseconds that save_compressed adds to a saved tensor of 32 values.")
    parser.add_argument("--length", type=int, default=200, help="saved tensors a forward")
    parser.add_argument("--repeats", type=int, default=400, help="forwards; the minimum counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length, repeats = (20, 20) if arguments.quick else (arguments.length, arguments.repeats)
    results = ResultFile(arguments.out, "overhead")
    figures = measure(length, repeats)
    rows = []
    for name, record in figures.items():
        results.put(name, {**record, "saves_per_forward": length, "forwards": repeats})
        rows.append([name, *(f"{record[key]:.2f}" for key in ("pack_us", "unpack_us", "forward_us", "backward_us"))])
    print(machine_line(machine_info()))
    print(table(rows, ["µs a saved tensor", "pack", "unpack", "forward in all", "backward in all"]))


if __name__ == "__main__":
    main()
