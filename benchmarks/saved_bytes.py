"""How many bytes of saved activations are left? Plain against compressed, five models, several widths.

    python benchmarks/saved_bytes.py

The bytes that plain PyTorch keeps are counted twice: by `save_compressed` itself and by hooks of
this script that know nothing of it; the script fails where the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import ResultFile, load_models, machine_info, machine_line, option_parser, table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# Largest difference between the two counts of plain bytes that still is the same count.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Case:
    """A model of `daf_rs.testing.models` with its options and batch size."""

    model: str
    batch: int
    options: dict[str, int]

    def quick(self) -> Case:
        """Returns the same model, small enough for a smoke run."""
        shrunk = {} if self.model == "resnet20" else {**self.options, "layers": 1}
        return Case(self.model, 8, shrunk)


CASES = {
    "ResNet-20": Case("resnet20", 128, {}),
    "GPT, V 256": Case("gpt", 32, {"layers": 6, "vocabulary": 256}),
    "GPT, V 8192": Case("gpt", 32, {"layers": 6, "vocabulary": 8192}),
    "ViT": Case("vit", 64, {"layers": 6}),
    "Llama-like": Case("llama", 32, {"layers": 6}),
    "LSTM": Case("lstm", 32, {}),
}


class PlainCounter:
    """Counts what a forward keeps for backward in plain PyTorch, through saved-tensor hooks.

    A storage counts once, whole, at its first save. The hooks keep nothing, so that storages
    that still live after the forward are held by somebody else (parameters, buffers, inputs,
    the loss) and do not count.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def _pack(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        # The weak reference pins the address, so the key cannot come to mean another storage.
        self._storages.setdefault(reference.cdata, (reference, storage.nbytes()))

    def _unpack(self, packed: object) -> Tensor:
        raise RuntimeError("a forward that is only counted cannot be followed by a backward")

    def count(self, model: nn.Module, batch: Any) -> int:
        """Runs the forward and returns the bytes."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            loss = batch.loss(model)
        total = 0
        for reference, size in self._storages.values():
            if reference.expired():  # type: ignore[no-untyped-call]
                total += size
        del loss
        return total


def measure(case: Case, widths: Sequence[int | str]) -> dict[str, Any]:
    """Returns the counts of one model, one entry a width.

    Raises:
        SystemExit: The two counts of plain bytes differ.
    """
    import daf_rs

    model = load_models().build(case.model, seed=0, **case.options)
    batch = model.make_batch(seed=1, batch=case.batch)
    plain = PlainCounter().count(model, batch)
    record: dict[str, Any] = {
        "model": case.model,
        "batch": case.batch,
        "options": case.options,
        "plain_bytes": plain,
        "widths": {},
    }
    for bits in widths:
        saved = daf_rs.save_compressed(bits, model=model, seed=0)
        with saved:
            loss = batch.loss(model)
        stats, rows = saved.stats(), saved.report().rows
        loss.backward()
        if abs(stats.plain_bytes - plain) > TOLERANCE * plain:
            raise SystemExit(
                f"{case.model} at {bits} bits: save_compressed counts {stats.plain_bytes} plain bytes, "
                f"the hooks of this script {plain}"
            )
        ours = sum(row.stored_bytes for row in rows)
        by_class: dict[str, dict[str, int]] = {}
        for row in rows:
            entry = by_class.setdefault(row.cls, {"tensors": 0, "plain_bytes": 0, "stored_bytes": 0})
            entry["tensors"] += 1
            entry["plain_bytes"] += row.plain_bytes
            entry["stored_bytes"] += row.stored_bytes
        largest = sorted(rows, key=lambda row: -row.stored_bytes)[:5]
        record["widths"][str(bits)] = {
            "stored_bytes": ours,
            "ratio": plain / ours,
            "live_bytes": stats.live_bytes,
            "logical_bytes": stats.logical_bytes,
            "unique_bytes": stats.unique_bytes,
            "plain_bytes_of_save_compressed": stats.plain_bytes,
            "by_class": by_class,
            "largest": [
                f"{row.module or '-'} {row.op}.{row.field} {list(row.shape)} {row.cls} {row.bits}: "
                f"{row.plain_bytes} -> {row.stored_bytes}"
                for row in largest
            ],
        }
    return record


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "saved_bytes",
        "Bytes of the activations saved for backward, plain PyTorch against save_compressed. "
        "Metadata, planes and exact tensors are all counted.",
    )
    parser.add_argument("--bits", nargs="+", default=["exact", "2", "4", "8"], help="exact or 1..8")
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    widths = [bits if bits == "exact" else int(bits) for bits in arguments.bits]
    torch.set_num_threads(1 if arguments.quick else torch.get_num_threads())
    results = ResultFile(arguments.out, "saved_bytes")
    rows = []
    for name in arguments.models:
        case = CASES[name].quick() if arguments.quick else CASES[name]
        record = measure(case, widths)
        results.put(name, record)
        ratios = [f"{record['widths'][str(bits)]['ratio']:.2f}x" for bits in widths]
        rows.append([name, case.batch, f"{record['plain_bytes'] / 1e6:.1f} MB", *ratios])
    print(machine_line(machine_info()))
    print("plain bytes of saved activations, and plain / ours at each width")
    print(table(rows, ["model", "batch", "plain", *(f"{bits}" for bits in widths)]))


if __name__ == "__main__":
    main()
