"""`QuantizedTensor` as an object: equality, repr, copies, pickle, bytes, and what damage does."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers import assert_same_bits, run_python
from hypothesis import given
from hypothesis import strategies as st
from value_cases import DTYPES, Case, cases, content

import daf_rs
from daf_rs import CorruptDataError, QuantizedTensor


def sample(dtype: torch.dtype = torch.float32, groups: str = "row", kind: str = "zeros") -> QuantizedTensor:
    """A small one with every part: zero plane, several groups and, for `special`, raw groups."""
    return daf_rs.quantize(content(kind, (40, 70), dtype, seed=1), bits=3, group_size=64, groups=groups, seed=1)


def check_equal(first: QuantizedTensor, second: QuantizedTensor) -> None:
    assert first == second
    assert not first != second  # noqa: SIM202
    assert (first.nbytes, first.bits, first.group_size) == (second.nbytes, second.bits, second.group_size)
    assert tuple(first.shape) == tuple(second.shape)
    assert (first.dtype, first.rounding, first.groups) == (second.dtype, second.rounding, second.groups)
    assert_same_bits(daf_rs.dequantize(first), daf_rs.dequantize(second))
    assert daf_rs.dequantize(first).stride() == daf_rs.dequantize(second).stride()


@given(cases())
def test_bytes_pickle_and_copies_keep_everything(case: Case) -> None:
    quantized = daf_rs.quantize(case.tensor, **case.settings)
    check_equal(QuantizedTensor.from_bytes(quantized.to_bytes()), quantized)
    check_equal(pickle.loads(pickle.dumps(quantized)), quantized)
    check_equal(copy.copy(quantized), quantized)
    check_equal(copy.deepcopy(quantized), quantized)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol: int) -> None:
    check_equal(pickle.loads(pickle.dumps(sample(), protocol)), sample())


def test_torch_save_and_load() -> None:
    buffer = io.BytesIO()
    torch.save({"q": sample(), "step": 3}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    check_equal(loaded["q"], sample())


def test_another_process_reads_the_bytes() -> None:
    data = sample().to_bytes()
    out = run_python(f"""
        import daf_rs
        q = daf_rs.QuantizedTensor.from_bytes(bytes.fromhex("{data.hex()}"))
        print(daf_rs.dequantize(q).double().sum().item().hex())
    """)
    assert out.strip() == daf_rs.dequantize(sample()).double().sum().item().hex()


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_from_bytes_takes_any_buffer_of_bytes(wrap: type) -> None:
    check_equal(QuantizedTensor.from_bytes(wrap(sample().to_bytes())), sample())


def test_from_bytes_does_not_keep_the_buffer() -> None:
    buffer = bytearray(sample().to_bytes())
    quantized = QuantizedTensor.from_bytes(buffer)
    buffer[:] = bytes(len(buffer))
    check_equal(quantized, sample())


def test_equality_is_of_bytes() -> None:
    x = content("normal", (1000,), torch.float32, seed=1)
    one = daf_rs.quantize(x, bits=4, seed=1)
    assert one == daf_rs.quantize(x, bits=4, seed=1)
    assert one != daf_rs.quantize(x, bits=4, seed=2)
    assert one != daf_rs.quantize(x, bits=5, seed=1)
    assert one != daf_rs.quantize(x.reshape(10, 100), bits=4, groups="row", seed=1)
    assert one != x
    assert one != "a string"
    assert one is not None


def test_repr_says_what_it_is() -> None:
    text = repr(daf_rs.quantize(torch.randn(12, 34), bits=3, group_size=128, rounding="nearest"))
    assert text.startswith("QuantizedTensor(")
    for part in ("12", "34", "3", "128", "nearest", "float32"):
        assert part in text
    assert len(text) < 300, "a repr must not print the data"


def test_attributes_cannot_be_changed() -> None:
    quantized = sample()
    for name in ("bits", "shape", "dtype", "nbytes", "group_size", "rounding", "groups"):
        with pytest.raises(AttributeError):
            setattr(quantized, name, getattr(quantized, name))


# --- Damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", ["row", "channel"])
@pytest.mark.parametrize("kind", ["zeros", "special", "offset"])
def test_every_truncation_is_refused(dtype: torch.dtype, groups: str, kind: str) -> None:
    data = sample(dtype, groups, kind).to_bytes()
    lengths = {*range(200), *range(0, len(data), 37), *range(len(data) - 70, len(data))}
    for length in sorted(n for n in lengths if n < len(data)):
        with pytest.raises(CorruptDataError):
            QuantizedTensor.from_bytes(data[:length])


@pytest.mark.parametrize("groups", ["row", "channel"])
@pytest.mark.parametrize("kind", ["zeros", "special", "offset"])
def test_every_damaged_byte_is_noticed(groups: str, kind: str) -> None:
    data = sample(torch.float32, groups, kind).to_bytes()
    places = sorted({*range(min(300, len(data))), *range(0, len(data), 23), *range(len(data) - 40, len(data))})
    for place in places:
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= change
            with pytest.raises(CorruptDataError):
                QuantizedTensor.from_bytes(damaged)


@given(st.binary(max_size=400))
def test_bytes_from_elsewhere_are_refused(noise: bytes) -> None:
    with pytest.raises(CorruptDataError):
        QuantizedTensor.from_bytes(noise)


@given(st.integers(0, 10**9), st.integers(1, 40), st.binary(min_size=1, max_size=40))
def test_spliced_bytes_are_refused(place: int, cut: int, insert: bytes) -> None:
    data = sample().to_bytes()
    place %= len(data)
    spliced = data[:place] + insert + data[place + cut :]
    if spliced == data:
        return
    with pytest.raises(CorruptDataError):
        QuantizedTensor.from_bytes(spliced)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(CorruptDataError):
        QuantizedTensor.from_bytes(sample().to_bytes() + b"\0")


def test_a_damaged_pickle_is_refused() -> None:
    quantized = sample()
    data, stored = pickle.dumps(quantized), quantized.to_bytes()
    place = data.find(stored[:64])
    assert place >= 0, "the pickle carries the bytes of to_bytes()"
    damaged = bytearray(data)
    damaged[place + len(stored) // 2] ^= 0xFF
    with pytest.raises(CorruptDataError):
        pickle.loads(bytes(damaged))


def test_the_error_says_what_was_found() -> None:
    with pytest.raises(CorruptDataError) as caught:
        QuantizedTensor.from_bytes(sample().to_bytes()[:-1])
    assert "damaged" in str(caught.value)
    with pytest.raises(CorruptDataError, match="3 bytes"):
        QuantizedTensor.from_bytes(b"abc")
