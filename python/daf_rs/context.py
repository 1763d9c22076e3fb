"""`save_compressed`: the context manager that stores what autograd saves in a few bits an element."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import _arguments, _native
from .exceptions import InvalidArgumentError
from .report import Report, Row

__all__ = ["Stats", "save_compressed"]

#: Whether this torch tells the reader of a saved tensor in the forward (2.15 and newer).
_HAS_NODE_HOOK = hasattr(torch.autograd.graph, "node_creation_hook")
#: Contexts entered in this process: no two share their noise.
_entered = itertools.count()
_families = itertools.count(1)
_family_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_local = threading.local()


@dataclass(frozen=True)
class Stats:
    """What a `save_compressed` holds and did; all sizes in bytes, all times in seconds.

    Attributes:
        live_bytes: What it holds now for backward alone: packed bytes and tensors kept as they are.
        packed_bytes: Of these, codes with their metadata and headers.
        kept_bytes: Of these, storages kept as they are that nobody else holds.
        peak_bytes: The largest `live_bytes` so far.
        plain_bytes: What plain PyTorch would hold now for backward alone: whole storages, each counted once, without
            parameters, buffers and storages that live anyway.
        plain_peak_bytes: The largest `plain_bytes` so far.
        logical_bytes: Bytes of all tensors saved in this step, shared ones counted as often as they are saved.
        unique_bytes: Bytes of the distinct sets of elements stored in this step.
        live_handles: Saved tensors that backward has not released.
        packs: Tensors saved so far.
        unpacks: Tensors read back so far.
        pack_seconds: Time in encoding.
        unpack_seconds: Time in decoding, allocation included.
        pack_source_bytes: Bytes of the tensors that were encoded.
        unpack_source_bytes: Bytes of the tensors that were decoded.
        counts: Live stored forms by class.
        bytes_by_class: Live packed bytes by class.
    """

    live_bytes: int
    packed_bytes: int
    kept_bytes: int
    peak_bytes: int
    plain_bytes: int
    plain_peak_bytes: int
    logical_bytes: int
    unique_bytes: int
    live_handles: int
    packs: int
    unpacks: int
    pack_seconds: float
    unpack_seconds: float
    pack_source_bytes: int
    unpack_source_bytes: int
    counts: dict[str, int] = field(default_factory=dict)
    bytes_by_class: dict[str, int] = field(default_factory=dict)

    @property
    def pack_gbps(self) -> float:
        """Bytes of tensors encoded per second, in 10⁹; 0 before the first."""
        return self.pack_source_bytes / self.pack_seconds / 1e9 if self.pack_seconds else 0.0

    @property
    def unpack_gbps(self) -> float:
        """Bytes of tensors decoded per second, in 10⁹; 0 before the first."""
        return self.unpack_source_bytes / self.unpack_seconds / 1e9 if self.unpack_seconds else 0.0

    @property
    def ratio(self) -> float:
        """How many times less was held at the peak than plain PyTorch would have held."""
        return self.plain_peak_bytes / self.peak_bytes if self.peak_bytes else 1.0


class save_compressed:
    """Stores what autograd saves for backward in a few bits an element: put it around the forward.

    The counterpart of `torch.autograd.graph.save_on_cpu`. What backward will do with a tensor decides how it is
    stored: what it never reads costs nothing, what it reads only the sign of costs a bit, what must be exact is
    exact, everything else becomes a value code whose error has mean 0 (subtractive dither: Schuchman 1964; Gray and
    Stockham 1993). Parameters and buffers are never touched. Backward may run inside or after the context.

    A context may be entered again and again, nested (the innermost one applies), used by several threads and pickled.
    Under `torch.no_grad` it does nothing. torch's random streams are never drawn from.

    Args:
        bits: Width of the value codes, 1 to 8; or ``"exact"``: lossless forms only, gradients bit-equal to PyTorch's.
        group_size: Elements that share a minimum and a scale: a power of two, 32 to 1024.
        rounding: ``"dither"`` (unbiased, error variance s²/12), ``"stochastic"`` (unbiased, s²/6) or ``"nearest"``.
        groups: ``"auto"``, ``"row"`` (consecutive elements) or ``"channel"`` (down the columns of token × channel
            tensors).
        min_bytes: Smaller tensors are kept as they are.
        model: Its parameters and buffers are known by storage: needed only for frozen ones that are used through
            detached views. Also names modules in the report.
        threads: Threads of encoding and decoding; None: as many as ``torch.get_num_threads()``.
        seed: Makes the noise depend on this integer instead of ``torch.initial_seed()``.
        boundary: How the input of a checkpointed region is kept: a width, or ``"exact"``.
        unknown: How a tensor is kept whose reader the policy does not know: ``"exact"`` (lossless classes, else as it
            is) or a width.

    Raises:
        InvalidArgumentError: An argument is outside its range.

    Example:
        >>> import torch, daf_rs
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> x = torch.randn(512, 256)
        >>> with daf_rs.save_compressed(bits=4) as saved:
        ...     loss = model(x).square().mean()
        >>> saved.stats().live_bytes < saved.stats().plain_bytes / 4
        True
        >>> loss.backward()
        >>> saved.stats().live_bytes
        0
    """

    def __init__(
        self,
        bits: int | str = 4,
        *,
        group_size: int = 256,
        rounding: str = "dither",
        groups: str = "auto",
        min_bytes: int = 16384,
        model: nn.Module | None = None,
        threads: int | None = None,
        seed: int | None = None,
        boundary: int | str = 8,
        unknown: int | str = "exact",
    ) -> None:
        self.bits = _arguments.width_or_exact("bits", bits)
        self.group_size = _arguments.group_size(group_size)
        self.rounding = _arguments.choice("rounding", rounding, _arguments.ROUNDINGS)
        self.groups = _arguments.choice("groups", groups, _arguments.GROUPS)
        self.min_bytes = _arguments.integer("min_bytes", min_bytes, 0, 2**63 - 1, " (bytes)")
        if model is not None and not isinstance(model, nn.Module):
            raise InvalidArgumentError(f"model must be a torch.nn.Module or None; got {type(model).__name__}")
        self.model = model
        self.threads = threads
        _arguments.threads(threads)
        self.seed = seed
        if seed is not None:
            _arguments.integer("seed", seed, -(2**63), 2**64 - 1, ", or None for torch's")
        self.boundary = _arguments.width_or_exact("boundary", boundary)
        self.unknown = _arguments.width_or_exact("unknown", unknown)
        self._make()

    def _make(self) -> None:
        self._native = _native.Context(
            exact=self.bits == "exact",
            bits=8 if isinstance(self.bits, str) else self.bits,
            group_size=self.group_size,
            rounding=self.rounding,
            groups=self.groups,
            min_bytes=self.min_bytes,
            threads=self.threads or 0,
            boundary=None if isinstance(self.boundary, str) else self.boundary,
            unknown=None if isinstance(self.unknown, str) else self.unknown,
            node_hook=_HAS_NODE_HOOK,
            family=_family(self.model),
        )
        # Bound once: autograd must see the same object at every step.
        self._pack = self._native.pack
        self._own_entries = itertools.count()

    def __enter__(self) -> save_compressed:
        """Starts compressing what autograd saves on this thread."""
        if self.threads is None:
            _arguments.follow_torch_threads()
        self._native.enter(self._key(), _storages(self.model))
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _native.unpack)
        except RuntimeError as error:
            raise _explain(error) from error
        try:
            _enter_thread()
        except BaseException:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops compressing; what is stored stays until backward has read it or the graph is dropped."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if getattr(_local, "depth", 0) == 0 or top is None or top[0] is not self._pack:
            raise RuntimeError(
                "daf_rs: contexts must be left on the thread and in the order in which they were entered; do not "
                "suspend a generator or a coroutine inside save_compressed"
            )
        _exit_thread()
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._native.exit()
        if isinstance(error, RuntimeError) and _TORCH_FUNC in str(error):
            raise _explain(error) from error

    def _key(self) -> int:
        """The seed of one context's noise: of the seed, the entry and the distributed rank."""
        parts = (torch.initial_seed(), next(_entered)) if self.seed is None else (self.seed, next(self._own_entries))
        rank = torch.distributed.get_rank() if _distributed() else 0
        key = 0
        for part in (*parts, rank):
            key = (key * 0x5851F42D4C957F2D + part * 2 + 1) % 2**64
        return key

    def stats(self) -> Stats:
        """What is held and what was done so far."""
        values = self._native.stats()
        values["counts"] = {name: count for name, count in values.pop("live_counts").items() if count}
        sizes = values.pop("live_bytes_by_class")
        values["bytes_by_class"] = {name: sizes[name] for name in values["counts"]}
        return Stats(**values)

    def reset_peaks(self) -> None:
        """Forgets peaks and times, for measuring the next step alone."""
        self._native.reset_peaks()

    def report(self) -> Report:
        """A row for every tensor that autograd saved since the last step began."""
        return Report(Row(index, *row) for index, row in enumerate(self._native.rows()))

    def __getstate__(self) -> dict[str, Any]:
        """The settings; stored tensors stay where they are."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make()

    def __repr__(self) -> str:
        return (
            f"save_compressed(bits={self.bits!r}, group_size={self.group_size}, rounding={self.rounding!r}, "
            f"groups={self.groups!r}, min_bytes={self.min_bytes})"
        )


_TORCH_FUNC = "don't yet support saved tensor hooks"


def _explain(error: RuntimeError) -> RuntimeError:
    """The refusal of torch with the way out."""
    return RuntimeError(
        f"{error}\ndaf_rs: torch.func's transforms and torch.autograd.graph.disable_saved_tensors_hooks cannot run "
        "under saved-tensor hooks. Leave save_compressed around the other parts of the step, or use "
        "torch.autograd.grad and torch.autograd.functional, which work inside it."
    )


def _enter_thread() -> None:
    """One node hook a thread, however many contexts are nested."""
    depth = getattr(_local, "depth", 0)
    if depth == 0 and _HAS_NODE_HOOK:
        torch._C._autograd._push_node_creation_hook(_native.on_node)
    _local.depth = depth + 1


def _exit_thread() -> None:
    _local.depth -= 1
    if _local.depth == 0 and _HAS_NODE_HOOK:
        torch._C._autograd._pop_node_creation_hook()


def _family(model: nn.Module | None) -> int:
    """A number that tells the saved tensors of different models apart."""
    if model is None:
        return 0
    number = _family_of.get(model)
    if number is None:
        number = _family_of[model] = next(_families)
    return number


def _storages(model: nn.Module | None) -> list[int]:
    """The storages of a model's parameters and buffers."""
    if model is None:
        return []
    found = []
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        try:
            found.append(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            continue  # no storage of its own (a subclass, sparse): such tensors are never packed
    return found


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
