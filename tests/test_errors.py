"""Bad input gives the right `DafError`, which is also the built-in that one would expect, with a message that helps."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import daf_rs
from daf_rs import (
    BackendUnavailableError,
    BudgetExceededError,
    CorruptDataError,
    DafError,
    InvalidArgumentError,
    UnsupportedDtypeError,
)

BASES = {
    InvalidArgumentError: ValueError,
    UnsupportedDtypeError: TypeError,
    BudgetExceededError: MemoryError,
    CorruptDataError: RuntimeError,
    BackendUnavailableError: RuntimeError,
}


@pytest.mark.parametrize(("error", "builtin"), BASES.items(), ids=lambda c: c.__name__)
def test_every_error_is_a_daf_error_and_the_expected_builtin(error: type, builtin: type) -> None:
    assert issubclass(error, DafError)
    assert issubclass(error, builtin)
    assert error.__module__.split(".")[0] == "daf_rs"
    assert getattr(daf_rs, error.__name__) is error
    assert str(pickle.loads(pickle.dumps(error("what happened")))) == "what happened"


def test_the_base_is_a_plain_exception() -> None:
    assert issubclass(DafError, Exception)
    assert not issubclass(DafError, (ValueError, TypeError, MemoryError, RuntimeError))


def check(call: Callable[[], Any], error: type[DafError], *parts: str) -> None:
    """Assert that `call` raises exactly `error` and that the message holds every part (any case)."""
    with pytest.raises(DafError) as caught:
        call()
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value).lower()
    for part in parts:
        assert part.lower() in message, f"{part!r} is not in the message: {caught.value}"


# --- quantize ------------------------------------------------------------------------------------------

X = torch.randn(64)
#: (argument, bad value, error, what the message must hold: the argument, what was given, what is allowed)
SHARED: list[tuple[str, Any, type[DafError], tuple[str, ...]]] = [
    ("bits", 0, InvalidArgumentError, ("bits", "0", "1", "8")),
    ("bits", 9, InvalidArgumentError, ("bits", "9", "1", "8")),
    ("bits", -1, InvalidArgumentError, ("bits", "-1", "1", "8")),
    ("bits", 2**70, InvalidArgumentError, ("bits", "1", "8")),
    ("bits", 4.0, InvalidArgumentError, ("bits", "4.0", "1", "8")),
    ("bits", "four", InvalidArgumentError, ("bits", "four", "1", "8")),
    ("bits", None, InvalidArgumentError, ("bits", "None", "1", "8")),
    ("bits", True, InvalidArgumentError, ("bits", "True", "1", "8")),
    ("group_size", 16, InvalidArgumentError, ("group_size", "16", "32", "1024")),
    ("group_size", 100, InvalidArgumentError, ("group_size", "100", "power", "32", "1024")),
    ("group_size", 2048, InvalidArgumentError, ("group_size", "2048", "32", "1024")),
    ("group_size", 0, InvalidArgumentError, ("group_size", "0", "32", "1024")),
    ("group_size", -64, InvalidArgumentError, ("group_size", "-64", "32", "1024")),
    ("group_size", "128", InvalidArgumentError, ("group_size", "128", "32", "1024")),
    ("group_size", 64.0, InvalidArgumentError, ("group_size", "64.0", "32", "1024")),
    ("rounding", "up", InvalidArgumentError, ("rounding", "up", "dither", "stochastic", "nearest")),
    ("rounding", "Dither", InvalidArgumentError, ("rounding", "Dither", "dither")),
    ("rounding", None, InvalidArgumentError, ("rounding", "None", "dither")),
    ("rounding", 1, InvalidArgumentError, ("rounding", "1", "dither")),
    ("groups", "column", InvalidArgumentError, ("groups", "column", "auto", "row", "channel")),
    ("groups", None, InvalidArgumentError, ("groups", "None", "auto", "row", "channel")),
    ("threads", -1, InvalidArgumentError, ("threads", "-1")),
    ("threads", 1.5, InvalidArgumentError, ("threads", "1.5")),
    ("threads", "two", InvalidArgumentError, ("threads", "two")),
    ("seed", 1.5, InvalidArgumentError, ("seed", "1.5")),
    ("seed", "x", InvalidArgumentError, ("seed", "x")),
]
IDS = [f"{name}={value!r}" for name, value, _, _ in SHARED]


@pytest.mark.parametrize(("name", "value", "error", "parts"), SHARED, ids=IDS)
def test_quantize_refuses_a_bad_argument(name: str, value: Any, error: type[DafError], parts: tuple[str, ...]) -> None:
    check(lambda: daf_rs.quantize(X, **{name: value}), error, *parts)


OTHER_DTYPES = [
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_quantize_refuses_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.zeros(64).to(dtype)
    check(lambda: daf_rs.quantize(x), UnsupportedDtypeError, str(dtype).removeprefix("torch."), "float32", "bfloat16")


@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, None, "tensor", X.numpy()], ids=lambda v: type(v).__name__)
def test_quantize_refuses_what_is_no_tensor(value: Any) -> None:
    with pytest.raises(DafError) as caught:
        daf_rs.quantize(value)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert "tensor" in str(caught.value).lower()
    assert type(value).__name__ in str(caught.value)


def test_quantize_refuses_a_tensor_without_data() -> None:
    with pytest.raises(DafError) as caught:
        daf_rs.quantize(torch.empty(64, device="meta"))
    assert isinstance(caught.value, (BackendUnavailableError, InvalidArgumentError))
    assert "meta" in str(caught.value)
    assert "cpu" in str(caught.value).lower()


UNUSUAL = {
    "sparse": lambda: torch.eye(64).to_sparse(),
    "csr": lambda: torch.eye(64).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(64), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3), torch.randn(5)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNUSUAL)
def test_quantize_refuses_tensors_that_are_not_strided(name: str) -> None:
    x = UNUSUAL[name]()
    with pytest.raises(DafError) as caught:
        daf_rs.quantize(x)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert len(str(caught.value)) > 20


def test_quantize_takes_its_settings_by_name_only() -> None:
    with pytest.raises(TypeError):
        daf_rs.quantize(X, 4)


@pytest.mark.parametrize("value", [None, X, b"bytes", "q", 3], ids=lambda v: type(v).__name__)
def test_dequantize_refuses_what_it_did_not_make(value: Any) -> None:
    with pytest.raises((DafError, TypeError)) as caught:
        daf_rs.dequantize(value)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert "QuantizedTensor" in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, "text", [1, 2]], ids=lambda v: type(v).__name__)
def test_from_bytes_refuses_what_is_no_buffer(value: Any) -> None:
    with pytest.raises((DafError, TypeError)) as caught:
        daf_rs.QuantizedTensor.from_bytes(value)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert "bytes" in str(caught.value)


def test_a_quantized_tensor_is_made_by_quantize_only() -> None:
    with pytest.raises(TypeError):
        daf_rs.QuantizedTensor()


# --- save_compressed -----------------------------------------------------------------------------------

CONTEXT = [row for row in SHARED if row[:2] not in (("bits", "four"), ("group_size", 100))] + [
    ("group_size", 100, InvalidArgumentError, ("group_size", "100", "32", "1024")),
    ("bits", "four", InvalidArgumentError, ("bits", "four", "1", "8", "exact")),
    ("bits", "lossless", InvalidArgumentError, ("bits", "lossless", "exact")),
    ("min_bytes", -1, InvalidArgumentError, ("min_bytes", "-1")),
    ("min_bytes", 1.5, InvalidArgumentError, ("min_bytes", "1.5")),
    ("min_bytes", "16 parsecs", InvalidArgumentError, ("min_bytes", "16 parsecs")),
    ("boundary", 0, InvalidArgumentError, ("boundary", "0", "8", "exact")),
    ("boundary", 9, InvalidArgumentError, ("boundary", "9", "8", "exact")),
    ("boundary", "lossy", InvalidArgumentError, ("boundary", "lossy", "exact")),
    ("unknown", 0, InvalidArgumentError, ("unknown", "0", "8", "exact")),
    ("unknown", 9, InvalidArgumentError, ("unknown", "9", "8", "exact")),
    ("unknown", "lossy", InvalidArgumentError, ("unknown", "lossy", "exact")),
    ("model", "resnet", InvalidArgumentError, ("model", "str", "Module")),
    ("model", 3, InvalidArgumentError, ("model", "int", "Module")),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "parts"), CONTEXT, ids=[f"{name}={value!r}" for name, value, _, _ in CONTEXT]
)
def test_save_compressed_refuses_a_bad_argument_at_once(
    name: str, value: Any, error: type[DafError], parts: tuple[str, ...]
) -> None:
    check(lambda: daf_rs.save_compressed(**{name: value}), error, *parts)


def test_save_compressed_takes_its_settings_by_name_only() -> None:
    with pytest.raises(TypeError):
        daf_rs.save_compressed(4, 256)


@pytest.mark.parametrize("bits", [*range(1, 9), "exact"])
def test_save_compressed_takes_every_width(bits: Any) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    with daf_rs.save_compressed(bits):
        y = (x * x).sum()
    y.backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((3, "result", "value"), ("3", "node")),
        (("ReluBackward0", 3, "value"), ("3", "field")),
        (("ReluBackward0", "result", "sometimes"), ("sometimes",)),
        (("ReluBackward0", "result", 0), ("0", "1", "8")),
        (("ReluBackward0", "result", 9), ("9", "1", "8")),
        (("ReluBackward0", "result", None), ("None",)),
    ],
)
def test_register_consumer_refuses_a_bad_rule(arguments: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    check(lambda: daf_rs.register_consumer(*arguments), InvalidArgumentError, *parts)
