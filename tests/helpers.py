"""What several test files need: comparing bits, looking at graphs, counting bytes independently of the package."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import daf_rs
from daf_rs.testing.models import Batch

HAS_NODE_HOOK = hasattr(torch.autograd.graph, "node_creation_hook")
#: For tests of what is known of a tensor's reader in the forward.
needs_node_hook = pytest.mark.skipif(
    not HAS_NODE_HOOK,
    reason=f"torch {torch.__version__} has no node_creation_hook (2.15 has): the reader is not known in the forward",
)

#: PyTorch's own words when a tensor that backward needs was changed.
INPLACE_TEXT = "modified by an inplace operation"


# --- Bits ----------------------------------------------------------------------------------------------


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in logical order, uint8 `[elements · size]`."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Not contiguous(): tensors of one element, or none, may keep any stride there.
    compact = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device).copy_(plain)
    return compact.reshape(-1).view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether shape, dtype and every bit are the same (so NaN equals the same NaN, and 0.0 is not -0.0)."""
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(bits_of(first), bits_of(second))


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Assert `same_bits`, saying where the two differ."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if not same_bits(actual, expected):
        differ = (actual != expected).reshape(-1)
        first = int(differ.to(torch.uint8).argmax())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {actual.numel()} elements differ, the first at {first}: "
            f"{actual.reshape(-1)[first]} instead of {expected.reshape(-1)[first]}"
        )


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two results of `gradients` agree in every bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Euclidean norm."""
    first, second = actual.detach().double(), expected.detach().double()
    return float((first - second).norm() / second.norm().clamp_min(1e-300))


def cosine(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Cosine between two sets of gradients, all taken as one vector."""
    first = torch.cat([actual[name].double().reshape(-1) for name in expected])
    second = torch.cat([value.double().reshape(-1) for value in expected.values()])
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))


# --- Training ------------------------------------------------------------------------------------------


def gradients(
    model: nn.Module, batch: Batch, context: contextlib.AbstractContextManager[Any] | None = None, seed: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward in `context` (None: plain), backward outside it; returns the detached loss and the gradients by name."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with context if context is not None else contextlib.nullcontext():
        loss = batch.loss(model)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    seed: int = 11,
) -> list[Tensor]:
    """Train on the batches, each forward in a context of its own, and return the losses (detached)."""
    torch.manual_seed(seed)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    steps = make(model.parameters())
    losses = []
    for batch in batches:
        steps.zero_grad(set_to_none=True)
        with context():
            loss = batch.loss(model)
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return losses


def compressed(bits: Any = 4, *, model: nn.Module | None = None, **options: Any) -> daf_rs.save_compressed:
    """`save_compressed` that remembers nothing of other tests.

    What a step teaches (a tensor that lives on anyway, a second reader) is kept by model, so that a test with none
    of its own gets one that nobody else has.
    """
    return daf_rs.save_compressed(bits, model=nn.Identity() if model is None else model, **options)


def exact(**options: Any) -> daf_rs.save_compressed:
    """A context in which nothing is lossy and nothing is too small."""
    return compressed("exact", min_bytes=0, **options)


# --- The graph -----------------------------------------------------------------------------------------


def nodes_of(output: Tensor) -> Iterator[Any]:
    """Every node of the graph behind `output`, each once."""
    seen: set[Any] = set()
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)


def node_named(output: Tensor, name: str) -> Any:
    """The only node called `name` in the graph behind `output`."""
    found = [node for node in nodes_of(output) if node.name() == name]
    assert len(found) == 1, f"{len(found)} nodes are named {name} among {[node.name() for node in nodes_of(output)]}"
    return found[0]


class Peek(torch.autograd.Function):
    """Identity on its first argument that saves all of them and shows what backward gets.

    To the package this is a reader that it knows nothing of.
    """

    @staticmethod
    def forward(ctx: Any, seen: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        ctx.seen.extend(saved)
        return (None, gradient, *([None] * (len(saved) - 1)))


# --- Bytes ---------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def is_freed(tensor_reference: StorageWeakRef) -> bool:
    """Whether the memory of a storage is gone."""
    return bool(tensor_reference.expired())


def plain_saved_bytes(forward: Callable[[], Any], model: nn.Module | None = None) -> int:
    """Bytes that plain PyTorch holds for backward after `forward`, counted by hooks that keep nothing.

    Whole storages, each once; not the model's parameters and buffers, nor what lives on after `forward`
    returns (inputs that the caller holds, the result).
    """
    own = set()
    if model is not None:
        own = {storage_key(t) for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in found:
            found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def unpack(packed: None) -> Tensor:
        raise AssertionError("the forward alone is counted")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = forward()
    total = sum(size for reference, size in found.values() if reference.expired())
    del result
    return total


def rss_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- The report ----------------------------------------------------------------------------------------


def rows_of(saved: daf_rs.save_compressed, op: str | None = None, field: str | None = None) -> list[Any]:
    """Rows of the report, those of one op (`"ReluBackward0"`) and field (`"result"`) where given."""
    return [
        row for row in saved.report().rows if (op is None or row.op == op) and (field is None or row.field == field)
    ]


def row_of(saved: daf_rs.save_compressed, op: str, field: str | None = None) -> Any:
    """The only such row."""
    found = rows_of(saved, op, field)
    assert len(found) == 1, f"{len(found)} rows for {op}.{field}:\n{saved.report()}"
    return found[0]


# --- Processes -----------------------------------------------------------------------------------------


def run_python(code: str, *, timeout: float = 120, env: dict[str, str] | None = None) -> str:
    """Run `code` in a fresh interpreter that sees the same package; returns its stdout, fails with its stderr."""
    package = Path(daf_rs.__file__).parents[1]
    tests = Path(__file__).parent
    path = os.pathsep.join([str(package), str(tests), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {timeout} s; stderr: {expired.stderr!r}") from expired
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
