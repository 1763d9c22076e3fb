"""Tensors that are not plain float32 on a CPU: each has a defined way through, with the right gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Peek, assert_same_bits, compressed, exact, relative_error, same_bits
from torch import Tensor

import daf_rs


def lossy(bits: Any = 2, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def saved_other(tensor: Tensor, context: Any) -> Tensor:
    """What the backward of a product reads for `tensor`."""
    x = torch.ones(tensor.shape, dtype=tensor.dtype, requires_grad=True)
    with context:
        y = x * tensor
    return y.grad_fn._saved_other


CONTEXTS = pytest.mark.parametrize("context", [lossy, exact], ids=["two_bits", "exact"])


# --- Dtypes --------------------------------------------------------------------------------------------


@CONTEXTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_dtypes_without_a_code_are_exact(dtype: torch.dtype, context: Any) -> None:
    tensor = torch.randn(128, 64, dtype=dtype)
    assert_same_bits(saved_other(tensor, context()), tensor)


@CONTEXTS
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16], ids=str
)
def test_integers_and_bools_are_exact(dtype: torch.dtype, context: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 2 if dtype == torch.bool else 120, (128, 64), generator=generator).to(dtype)
    seen: list[Tensor] = []
    with context():
        y = Peek.apply(seen, leaf(8), values, values.t(), values[:, ::2])
    y.sum().backward()
    for actual, expected in zip(seen[1:], (values, values.t(), values[:, ::2]), strict=True):
        assert_same_bits(actual, expected)
        assert actual.stride() == expected.stride()


@CONTEXTS
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("content", ["extremes", "negative", "wide", "constant", "late_outlier"])
def test_integers_of_every_range_are_exact(dtype: torch.dtype, content: str, context: Any) -> None:
    """A class is decided on the whole tensor: one value at the very end that does not fit must not be lost."""
    info = torch.iinfo(dtype)
    values = torch.arange(200_000).remainder(7).to(dtype)
    if content == "extremes":
        values[1::2] = info.max
        values[::2] = info.min
    elif content == "negative":
        values = -values - 100
    elif content == "wide":
        values = torch.randint(info.min, info.max, (200_000,), dtype=dtype)
    elif content == "constant":
        values.fill_(info.min)
    else:
        values[-1] = info.max
    seen: list[Tensor] = []
    with context():
        y = Peek.apply(seen, leaf(8), values)
    y.sum().backward()
    assert_same_bits(seen[1], values)


@CONTEXTS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_floats_are_exact(dtype: torch.dtype, context: Any) -> None:
    values = torch.randn(128, 64).to(dtype)
    seen: list[Tensor] = []
    with context():
        y = Peek.apply(seen, leaf(8), values)
    y.sum().backward()
    assert seen[1].dtype == dtype
    assert torch.equal(seen[1].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1), (2, 1, 3)])
def test_scalars_empty_and_tiny_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    for context in (lossy(), exact()):
        seen = saved_other(values, context)
        assert seen.shape == values.shape
        assert seen.stride() == values.stride()
        if values.numel() <= 1:
            assert_same_bits(seen, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_two_valued_floats_are_exact_until_a_third_value_comes(dtype: torch.dtype) -> None:
    mask = (torch.rand(100_000) < 0.5).to(dtype) / 0.9
    with lossy(8) as saved:
        y = torch.ones_like(mask).requires_grad_() * mask
    assert_same_bits(y.grad_fn._saved_other, mask)
    assert saved.stats().live_bytes < 100_000 / 8 * 1.1 + 1024
    late = mask.clone()
    late[-1] = 0.5
    seen = saved_other(late, exact())
    assert_same_bits(seen, late)


def test_negative_zeros_and_nan_payloads_survive_exact_mode() -> None:
    values = torch.zeros(70_000)
    values[1::2] = -0.0
    assert_same_bits(saved_other(values, exact()), values)
    values.view(torch.int32)[69_999] = 0x7FC12345
    assert_same_bits(saved_other(values, exact()), values)
    constant = torch.full((70_000,), -0.0)
    assert_same_bits(saved_other(constant, exact()), constant)


def test_non_finite_values_reach_backward_at_any_width() -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        values = torch.randn(256, 64)
        values[3, 5] = value
        seen = saved_other(values, lossy(1))
        assert same_bits(seen[3, 5], values[3, 5])
        assert torch.isfinite(seen).sum() == values.numel() - 1


# --- Views that lie ------------------------------------------------------------------------------------


@CONTEXTS
def test_conjugate_views(context: Any) -> None:
    z = torch.randn(128, 64, dtype=torch.complex64)
    assert z.conj().is_conj()
    x = torch.ones(128, 64, dtype=torch.complex64, requires_grad=True)
    with context():
        y = x * z.conj()
        w = x.conj() * z
    assert torch.equal(y.grad_fn._saved_other.resolve_conj(), z.conj().resolve_conj())
    (y + w).abs().sum().backward()
    reference = torch.ones(128, 64, dtype=torch.complex64, requires_grad=True)
    (reference * z.conj() + reference.conj() * z).abs().sum().backward()
    assert torch.allclose(x.grad, reference.grad)


@CONTEXTS
def test_negative_views(context: Any) -> None:
    z = torch.randn(128, 64, dtype=torch.complex64)
    negative = z.conj().imag
    assert negative.is_neg()
    seen = saved_other(negative, context())
    assert (seen - negative).abs().max() < 2.5
    assert torch.equal(seen.resolve_neg(), negative.resolve_neg()) or context is lossy
    exact_seen = saved_other(negative, exact())
    assert torch.equal(exact_seen.resolve_neg(), negative.resolve_neg())


@CONTEXTS
def test_zero_tensors_without_memory(context: Any) -> None:
    zero = torch._efficientzerotensor((128, 64))
    assert zero._is_zerotensor()
    x = leaf(128, 64)
    with context():
        y = x * zero
    y.sum().backward()
    assert not x.grad.any()


def test_lazily_copied_tensors() -> None:
    original = torch.randn(128, 64)
    lazy = torch._lazy_clone(original)
    values = original.clone()
    for context in (exact(), compressed(8, min_bytes=0)):
        assert relative_error(saved_other(lazy, context), values) < 0.02
    lazy.add_(1)
    assert_same_bits(original, values)


# --- Other layouts and subclasses ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@CONTEXTS
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout: str, context: Any) -> None:
    dense = torch.randn(128, 64) * (torch.rand(128, 64) < 0.2)
    sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    x = leaf(64, 32)
    with context():
        y = (torch.sparse.mm(sparse, x * 1.0)).sum()
    y.backward()
    assert torch.allclose(x.grad, dense.t() @ torch.ones(128, 32), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@CONTEXTS
def test_nested_tensors(context: Any) -> None:
    parts = [torch.randn(n, 64, requires_grad=True) for n in (70, 100, 50)]

    def run(around: Any) -> list[Tensor]:
        for part in parts:
            part.grad = None
        with around:
            nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            y = (nested * nested).sin()
        sum(piece.sum() for piece in y.unbind()).backward()
        return [part.grad.clone() for part in parts]

    plain, ours = run(contextlib.nullcontext()), run(context())
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b, "nested tensors pass through")


class Tagged(Tensor):
    """A subclass that changes nothing."""


class Logged(Tensor):
    """A subclass that sees every operation."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logged.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        result = func(*tree_map_only(Wrapper, lambda w: w.inner, args), **(kwargs or {}))
        return tree_map_only(Tensor, Wrapper, result)


@CONTEXTS
def test_subclasses_pass_through_and_come_back_as_themselves(context: Any) -> None:
    values = torch.randn(128, 64)
    for kind in (Tagged, Logged):
        seen: list[Tensor] = []
        tensor = values.clone().as_subclass(kind)
        with context():
            y = Peek.apply(seen, leaf(8), tensor)
        y.sum().backward()
        assert type(seen[1]) is kind
        assert torch.equal(seen[1].as_subclass(Tensor), values)


@CONTEXTS
def test_wrapper_subclasses_pass_through(context: Any) -> None:
    inner = torch.randn(128, 64)
    x = Wrapper(leaf(128, 64).detach()).requires_grad_()
    with context():
        y = x * Wrapper(inner)
    y.sum().backward()
    gradient = x.grad.inner if isinstance(x.grad, Wrapper) else x.grad
    assert_same_bits(gradient, inner)


@pytest.mark.filterwarnings("ignore")
@CONTEXTS
def test_quantized_tensors_pass_through(context: Any) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(128, 64), 0.05, 0, torch.qint8)
    seen: list[Tensor] = []
    with context():
        y = Peek.apply(seen, leaf(8), quantized)
    y.sum().backward()
    assert torch.equal(seen[1].int_repr(), quantized.int_repr())


@CONTEXTS
def test_meta_tensors_pass_through(context: Any) -> None:
    x = torch.randn(512, 512, device="meta", requires_grad=True)
    with context() as saved:
        y = (x * x).relu().sum()
    y.backward()
    assert x.grad.device.type == "meta"
    assert saved.stats().live_bytes == 0


@CONTEXTS
def test_fake_tensors_pass_through(context: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(512, 512, requires_grad=True)
        with context() as saved:
            y = (x * x).relu().sum()
        y.backward()
    assert isinstance(x.grad, FakeTensor)
    assert saved.stats().live_bytes == 0


def test_make_fx_traces_no_stored_values() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x * x.sin()).sum(), x)[0]

    with exact():
        traced = make_fx(step)(torch.randn(128, 64))
    other = torch.randn(128, 64)
    assert torch.allclose(traced(other), step(other)), "values of the tracing run are baked into the graph"


# --- Modes and defaults --------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _function_mode() -> Any:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Mode()


def _dispatch_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Mode()


MODES: dict[str, Callable[[], Any]] = {
    "deterministic": deterministic,
    "default_dtype_float64": lambda: default_dtype(torch.float64),
    "default_device_meta": lambda: torch.device("meta"),
    "function_mode": _function_mode,
    "dispatch_mode": _dispatch_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_free_grad": torch.enable_grad,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", MODES)
def test_modes_and_defaults_change_nothing(name: str, when: str) -> None:
    x, other = leaf(128, 64), torch.randn(128, 64)

    def mode(now: str) -> Any:
        return MODES[name]() if when in (now, "both") else contextlib.nullcontext()

    def run(context: Any) -> Tensor:
        x.grad = None
        with mode("forward"), context:
            y = ((x * other).relu() * (x * other.clone())).sum()
        seed = torch.ones((), dtype=y.dtype)
        with mode("backward"):
            y.backward(seed)
        return x.grad.clone()

    plain, ours = run(contextlib.nullcontext()), run(exact())
    assert ours.dtype == plain.dtype
    assert ours.device == plain.device
    assert_same_bits(ours, plain)
    assert relative_error(run(lossy(8)), plain) < 0.05


def test_autocast_in_bfloat16_over_a_model() -> None:
    from helpers import assert_same_gradients, gradients

    from daf_rs.testing import models

    model = models.gpt(layers=1, width=64, heads=2, length=64)
    batch = model.make_batch(0, 4)

    @contextlib.contextmanager
    def both(context: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), context:
            yield

    plain_loss, plain = gradients(model, batch, both(contextlib.nullcontext()))
    loss, ours = gradients(model, batch, both(exact(model=model)))
    assert_same_bits(loss, plain_loss)
    assert_same_gradients(ours, plain)
    _, close = gradients(model, batch, both(lossy(8, model=model)))
    for name, expected in plain.items():
        assert relative_error(close[name], expected) < 0.2, name


def test_overflow_reaches_the_grad_scaler() -> None:
    """A step whose activations overflow must be seen as such, at any width, or the scale would never come down."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(256, 64)
    x[7] = float("inf")
    with lossy(2):
        loss = model(x).pow(2).sum()
    scaler.scale(loss).backward()
    scaler.step(steps)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value), "the step was not skipped"
    steps.zero_grad()
    with lossy(2):
        loss = model(torch.randn(256, 64)).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(steps)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert not all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


def test_float16_overflow_in_the_middle_of_a_model() -> None:
    x = leaf(256, 64)
    h16 = (x * 1.0).half()
    with lossy(4):
        y = (h16 * 60000.0) * h16
    assert torch.isinf(y.grad_fn._saved_self).any()
    y.float().sum().backward()
    assert not torch.isfinite(x.grad).all()


def test_inputs_on_which_the_default_device_differs_come_back_where_they_were() -> None:
    x = leaf(128, 64)
    with exact():
        h = (x * 1.0).relu()
        y = F.dropout(h, 0.5)
    with torch.device("meta"):
        y.backward(torch.ones(128, 64, device="cpu"))
    assert x.grad.device.type == "cpu"
