"""The value codec on single tensors: `quantize`, `dequantize` and the `QuantizedTensor` between them."""

from __future__ import annotations

import itertools

import torch

from . import _arguments, _native
from .exceptions import InvalidArgumentError, UnsupportedDtypeError

__all__ = ["QuantizedTensor", "dequantize", "quantize"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Seeds of calls without one: no two calls of a process share their noise.
_fresh_seeds = itertools.count(0x6461665F_00000000)


class QuantizedTensor:
    """A tensor in a few bits a value, made by `quantize`. Immutable; holds no torch memory.

    Two are equal (`==`) when their codes, parameters, shapes and strides are. It can be pickled, copied and saved with
    `torch.save`; `torch.load` takes it with `weights_only=True` as well, since reading one runs no code of the file.

    >>> import torch, daf_rs
    >>> q = daf_rs.quantize(torch.linspace(0, 1, 100_000), bits=4, seed=0)
    >>> q
    QuantizedTensor(shape=(100000,), dtype=torch.float32, bits=4, group_size=256, rounding='dither', groups='row', ...)
    >>> q.nbytes < 100_000 * 4 / 7
    True
    >>> daf_rs.QuantizedTensor.from_bytes(q.to_bytes()) == q
    True
    """

    __slots__ = ("__weakref__", "_packed")

    _packed: _native.Packed

    def __init__(self) -> None:
        """Not to be called: `quantize` and `QuantizedTensor.from_bytes` make them."""
        raise TypeError("QuantizedTensor has no public constructor; use daf_rs.quantize or QuantizedTensor.from_bytes")

    @classmethod
    def _wrap(cls, packed: _native.Packed) -> QuantizedTensor:
        self = object.__new__(cls)
        self._packed = packed
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of memory: codes, group parameters, zero planes, headers and the object itself."""
        return self._packed.nbytes

    @property
    def bits(self) -> int:
        """Bits of a code, 1 to 8."""
        return self._packed.bits

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return torch.Size(self._packed.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements, of the tensor that `dequantize` gives."""
        return self._packed.strides

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the tensor."""
        return _DTYPES[self._packed.dtype]

    @property
    def group_size(self) -> int:
        """Elements that share a range; nominal for channel groups, whose rows are cut into near-equal parts."""
        return self._packed.group_size

    @property
    def rounding(self) -> str:
        """`"dither"`, `"stochastic"` or `"nearest"`."""
        return self._packed.rounding

    @property
    def groups(self) -> str:
        """`"row"` (neighbours in memory share a range) or `"channel"` (rows of one channel do)."""
        return self._packed.groups

    def dequantize(self, *, threads: int | None = None) -> torch.Tensor:
        """The tensor again; see `dequantize`."""
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")
        self._packed.decode_into(out, _arguments.threads(threads))
        return out

    def to_bytes(self) -> bytes:
        """A byte string with a checksum, the same for the same codes on every machine; `docs/format.md` defines it."""
        return self._packed.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> QuantizedTensor:
        """Reads what `to_bytes` wrote.

        Raises:
            CorruptDataError: The data are damaged, cut off, or something else. Untrusted data are safe to read.
            InvalidArgumentError: `data` is no bytes-like object.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"data must be bytes, a bytearray or a memoryview; got {type(data).__name__}")
        return cls._wrap(_native.Packed.from_bytes(bytes(data)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return self._packed.equals(other._packed)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, bits={self.bits}, "
            f"group_size={self.group_size}, rounding={self.rounding!r}, groups={self.groups!r}, nbytes={self.nbytes})"
        )

    def __copy__(self) -> QuantizedTensor:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> QuantizedTensor:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # As a tensor, which torch.save stores as it is; protocol 2 would blow up bytes.
        return (_restore, (torch.frombuffer(bytearray(self.to_bytes()), dtype=torch.uint8),))


def _restore(data: torch.Tensor) -> QuantizedTensor:
    return QuantizedTensor.from_bytes(data.contiguous().cpu().numpy().tobytes())


torch.serialization.add_safe_globals([_restore])


def quantize(
    t: torch.Tensor,
    *,
    bits: int = 4,
    group_size: int = 256,
    rounding: str = "dither",
    groups: str = "auto",
    seed: int | None = None,
    threads: int | None = None,
) -> QuantizedTensor:
    """Stores a tensor in `bits` bits a value plus 32 bits a group.

    Each group keeps its minimum m and step s, about (max - m) / (2^bits - 1). With dither (the default) the error of
    an element is uniform in ±s/2 and independent of its value, so sums and gradients stay unbiased [1]. Where a large
    share of the elements is 0, zeros take one bit each and come back as 0. Groups with an infinity or NaN are kept bit
    by bit.

    Args:
        t: A float32, float16 or bfloat16 CPU tensor of any shape and strides. It is read, not kept.
        bits: Bits of a code, 1 to 8.
        group_size: Elements that share a range: a power of two from 32 to 1024.
        rounding: `"dither"`, `"stochastic"` (unbiased, twice the variance) or `"nearest"` (biased).
        groups: `"row"`: neighbours in memory share a range; `"channel"`: rows of one channel do, the channel being the
            innermost dimension in memory; `"auto"`: channel groups for 2-D and 3-D tensors with the last dimension
            innermost and for channels-last maps, where there are at least 128 rows, else row groups.
        seed: Any integer of 64 bits: the same seed gives the same bytes. None draws a fresh one, without touching
            torch's random generators.
        threads: Threads to use, None for the default (`DAF_NUM_THREADS`, else torch's number). Never changes the
            result.

    Returns:
        The quantized tensor. Dense tensors come back with their strides, others without gaps in the same order of
        dimensions.

    Raises:
        InvalidArgumentError: An argument outside its range, or a tensor that is not on the CPU or not strided.
        UnsupportedDtypeError: Another dtype.

    [1] L. Schuchman, Dither signals and their effect on quantization noise, 1964.

    >>> import torch, daf_rs
    >>> x = torch.randn(1000, 64)
    >>> q = daf_rs.quantize(x, bits=4, seed=0)
    >>> y = daf_rs.dequantize(q)
    >>> y.shape, y.dtype, q.groups, bool((x - y).abs().max() < 0.4)
    (torch.Size([1000, 64]), torch.float32, 'channel', True)
    """
    if not isinstance(t, torch.Tensor):
        raise UnsupportedDtypeError(f"quantize takes a torch.Tensor, not {type(t).__name__}")
    if t.dtype not in _DTYPES.values():
        allowed = "torch.float32, torch.float16 and torch.bfloat16"
        raise UnsupportedDtypeError(f"the tensor is {t.dtype}; quantize takes {allowed}")
    if t.device.type != "cpu" or t.layout != torch.strided:
        raise InvalidArgumentError(f"the tensor is {t.layout} on {t.device}; quantize takes strided CPU tensors")
    bits = _arguments.integer("bits", bits, 1, 8)
    group_size = _arguments.group_size(group_size)
    rounding = _arguments.choice("rounding", rounding, _arguments.ROUNDINGS)
    groups = _arguments.choice("groups", groups, _arguments.GROUPS)
    if seed is None:
        seed = next(_fresh_seeds)
    seed = _arguments.integer("seed", seed, -(2**63), 2**64 - 1, ", or None for a fresh one") % 2**64
    source = t.detach().resolve_neg()
    arguments = (bits, group_size, rounding, groups, seed, _arguments.threads(threads))
    packed = _native.quantize(source, *arguments)
    if packed is None:
        # Elements that share memory (an expanded tensor) are written out first.
        packed = _native.quantize(source.clone(memory_format=torch.contiguous_format), *arguments)
    if packed is None:
        raise InvalidArgumentError(f"a contiguous copy of {tuple(t.shape)} cannot be read; pass t.contiguous()")
    return QuantizedTensor._wrap(packed)


def dequantize(q: QuantizedTensor) -> torch.Tensor:
    """The tensor that a `QuantizedTensor` holds, in new memory: same shape and dtype, strides as `quantize` says.

    Where zeros were stored apart they are 0, and the other elements of a group without negative ones are above 0.

    >>> import torch, daf_rs
    >>> x = torch.randn(300, 300).relu()
    >>> y = daf_rs.dequantize(daf_rs.quantize(x))
    >>> bool(((x > 0) == (y > 0)).all())
    True

    Raises:
        InvalidArgumentError: `q` is not a `QuantizedTensor`.
    """
    if not isinstance(q, QuantizedTensor):
        raise InvalidArgumentError(f"dequantize takes a QuantizedTensor, not {type(q).__name__}")
    return q.dequantize()
