"""The figures of all result files in one Markdown table, each with the command that made it.

    python benchmarks/summary.py

Reads `benchmarks/results/*.json`; what was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, table

Records = dict[str, dict[str, Any]]
Row = tuple[str, str, str]
WIDTHS = (2, 4, 8)


def _load(folder: Path, name: str) -> tuple[Records, dict[str, Any]]:
    path = folder / f"{name}.json"
    if not path.exists():
        return {}, {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["records"], document["machine"]


def _ratios(records: Records, keys: list[str], field: str) -> str:
    return " / ".join(f"{records[key][field]:.2f}x" if key in records else "-" for key in keys)


def codec_rows(records: Records) -> Iterator[Row]:
    """Yields the speeds of the codec, per instruction set."""
    command = "codec.py"
    for isa in sorted({key.partition(":")[0] for key in records}):
        for way in ("quantize", "dequantize"):
            start = f"{isa}: {way}"
            rows = [f"{start} f32 row {b} bit, 1 thread" for b in WIDTHS]
            yield f"{way}, f32 row groups, 2/4/8 bit, over memcpy ({isa})", _ratios(records, rows, "x_memcpy"), command
            zeros = [f"{start} f32 row, half zeros {b} bit, 1 thread" for b in WIDTHS]
            yield f"{way}, zero plane, 2/4/8 bit, over memcpy ({isa})", _ratios(records, zeros, "x_memcpy"), command
            channels = [f"{start} f32 channel C={c} 4 bit, 1 thread" for c in (768, 1000, 1024)]
            yield (
                f"{way}, channel groups C=768/1000/1024, 4 bit, over row groups ({isa})",
                _ratios(records, channels, "x_first"),
                command,
            )
            for dtype in ("f16", "bf16"):
                halves = [f"{start} {dtype} row {b} bit, 1 thread" for b in WIDTHS]
                name = f"{way}, {dtype}, 2/4/8 bit, elements a second over f32 ({isa})"
                yield name, _ratios(records, halves, "x_first"), command
            pairs = [f"{start} f32 row {b} bit, 2 threads" for b in WIDTHS]
            yield f"{way}, two threads over one, 2/4/8 bit ({isa})", _ratios(records, pairs, "x_one_thread"), command
            key = f"{start} f32 row 4 bit stochastic"
            yield f"{way}, 4 bit, over torch operators ({isa})", _ratios(records, [key], "x_torch"), command


def bytes_rows(records: Records) -> Iterator[Row]:
    """Yields plain bytes over ours."""
    for bits in ("4", "2"):
        figures = " · ".join(f"{name} {record['widths'][bits]['ratio']:.1f}x" for name, record in records.items())
        yield f"bytes of saved activations, plain / ours, {bits} bit", figures, "saved_bytes.py"


def variance_rows(records: Records) -> Iterator[Row]:
    """Yields the variance of channel groups over that of row groups."""
    for name, record in records.items():
        figures = f"values {record['values']['ratio']:.2f}x, gradient {record['gradients']['ratio']:.2f}x"
        yield f"variance, channel over row groups, {name}", figures, "variance.py --data FOLDER"


def step_rows(records: Records) -> Iterator[Row]:
    """Yields CPU and wall seconds of a step over plain PyTorch's."""
    for name, record in records.items():
        figures = " · ".join(
            f"{mode} {figure['cpu_ratio']:.3f}x CPU, {figure['wall_ratio']:.3f}x wall"
            for mode, figure in record["modes"].items()
            if mode != "f32"
        )
        yield f"training step over plain PyTorch, {name}", figures, "step_time.py"


def overhead_rows(records: Records) -> Iterator[Row]:
    """Yields microseconds a saved tensor."""
    if "encoded" in records:
        one = records["encoded"]
        figures = f"pack {one['pack_us']:.1f} µs, unpack {one['unpack_us']:.1f} µs"
        yield "overhead of a saved tensor", figures, "overhead.py"


def accuracy_rows(metric: str, script: str) -> Callable[[Records], Iterator[Row]]:
    """Returns what yields mean and spread of each mode."""

    def rows(records: Records) -> Iterator[Row]:
        modes: dict[str, list[float]] = {}
        for record in records.values():
            modes.setdefault(record["mode"], []).append(record[metric])
        for mode, values in modes.items():
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            figures = f"{statistics.mean(values):.4f}{spread} ({len(values)} seeds)"
            yield f"{metric.replace('_', ' ')}, {mode}", figures, f"{script}.py --data PATH"

    return rows


PARTS: dict[str, Callable[[Records], Iterator[Row]]] = {
    "codec": codec_rows,
    "saved_bytes": bytes_rows,
    "variance": variance_rows,
    "step_time": step_rows,
    "overhead": overhead_rows,
    "accuracy_cifar": accuracy_rows("test_accuracy", "accuracy_cifar"),
    "accuracy_gpt": accuracy_rows("validation_loss", "accuracy_gpt"),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, part in PARTS.items():
        records, machine = _load(arguments.results, name)
        if records:
            load = machine["load_average"][0]
            print(f"{name}: {machine['cpu']}, {machine['cores']} cores, load {load:.1f}, {machine['date']}")
            rows += part(records)
    print(table(rows, ["what", "figures", "`python benchmarks/`"]))


if __name__ == "__main__":
    main()
