"""The reader decides: what is not read costs nothing, what only a mask is read of costs a bit and is exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, node_named, relative_error, row_of, rows_of
from torch import Tensor, nn

import daf_rs

pytestmark = needs_node_hook

#: Elements of the tensors here: large enough that headers do not matter.
SHAPE = (512, 256)
N = SHAPE[0] * SHAPE[1]
#: What may come on top of the bits named: metadata of groups and blocks, rounding up to units.
OVERHEAD = 1.06
UNIT = 2048


def lossy(bits: Any = 2, **options: Any) -> daf_rs.save_compressed:
    return compressed(bits, min_bytes=0, **options)


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(op: Callable[[Tensor], Tensor], x: Tensor, context: Any) -> Tensor:
    torch.manual_seed(2)
    with context:
        y = op(x * 1.0)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad(y, x, weight)[0]


def check_exact(op: Callable[[Tensor], Tensor], x: Tensor, bits: int = 1) -> None:
    """The gradient has every bit that plain PyTorch gives it although the width is one bit."""
    assert_same_bits(gradient(op, x, lossy(bits)), gradient(op, x, contextlib.nullcontext()), "gradient")


def live(op: Callable[[Tensor], Any], x: Tensor, bits: Any = 4) -> int:
    with lossy(bits) as saved:
        y = op(x * 1.0)
    used = saved.stats().live_bytes
    del y
    return used


# --- Masks: one bit, exact -----------------------------------------------------------------------------

MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_in_place": lambda h: F.relu(h, inplace=True),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "threshold": lambda h: F.threshold(h, 0.3, 0.0),
    "relu6": lambda h: F.relu6(4 * h),
    "hardtanh": lambda h: F.hardtanh(h, -0.7, 0.9),
    "hardsigmoid": lambda h: F.hardsigmoid(3 * h),
    "clamp": lambda h: h.clamp(-0.5, 0.6),
    "clamp_min": lambda h: h.clamp(min=-0.5),
    "clamp_max": lambda h: h.clamp(max=0.5),
    "hardshrink": lambda h: F.hardshrink(h, 0.5),
    "softshrink": lambda h: F.softshrink(h, 0.5),
    "dropout": lambda h: F.dropout(h, 0.3),
    "nan_to_num": torch.nan_to_num,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_cost_one_bit_and_are_exact(name: str) -> None:
    x = leaf()
    check_exact(MASKS[name], x)
    assert live(MASKS[name], x) <= N / 8 * OVERHEAD + UNIT


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "hardtanh", "clamp", "abs", "hardsigmoid", "relu6"])
def test_masks_are_exact_at_their_thresholds_and_for_unusual_values(name: str) -> None:
    ops = {**MASKS, "abs": torch.abs}
    x = leaf()
    specials = [0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 0.9, 0.90000004, -0.7, -0.70000005, 3.0, -3.0, 1.0, 6.0, -1.0]
    specials += [float("inf"), float("-inf"), -0.5, 0.6, 1.5, 0.75, -0.75, 0.16666667]
    with torch.no_grad():
        flat = x.view(-1)
        for offset in range(0, N, 997):
            stop = min(N, offset + len(specials))
            flat[offset:stop] = torch.tensor(specials[: stop - offset])
    check_exact(ops[name], x)


def test_relu_of_nan_is_as_in_pytorch() -> None:
    x = leaf()
    with torch.no_grad():
        x.view(-1)[::101] = float("nan")
    check_exact(F.relu, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "hardtanh", "clamp", "dropout"])
def test_masks_of_half_types(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()

    def run(context: Any) -> Tensor:
        torch.manual_seed(2)
        with context:
            y = MASKS[name](x * 1.0)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    assert_same_bits(run(lossy(1)), run(contextlib.nullcontext()))


@pytest.mark.parametrize("name", ["abs", "l1_loss"])
def test_signs_cost_two_bits_and_are_exact(name: str) -> None:
    ops = {"abs": torch.abs, "l1_loss": lambda h: F.l1_loss(h, torch.zeros(SHAPE))}
    x = leaf()
    with torch.no_grad():
        x[::3] = 0
    check_exact(ops[name], x)
    assert live(ops[name], x) <= N / 4 * OVERHEAD + UNIT


def test_rrelu_gives_pytorchs_gradients() -> None:
    """Its noise is saved before the kernel writes it, so it must be read when the node is complete."""
    for seed in range(5):
        x = leaf()

        def run(context: Any) -> Tensor:
            torch.manual_seed(seed)  # noqa: B023
            with context:
                y = F.rrelu(x * 1.0, training=True)  # noqa: B023
            return torch.autograd.grad(y.sum(), x)[0]  # noqa: B023

        plain = run(contextlib.nullcontext())
        assert_same_bits(run(exact()), plain)
        assert_same_bits(run(lossy(2)), plain)


# --- Never read: nothing -------------------------------------------------------------------------------

IMAGE = (8, 16, 64, 64)
UNREAD: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # The op, and the bits an input element that the rest of what it saves may take.
    "max_pool": (lambda h: F.max_pool2d(h, 2), 4.2),
    "max_pool_overlapping": (lambda h: F.max_pool2d(h, 3, stride=2, padding=1), 4.2),
    "adaptive_max_pool": (lambda h: F.adaptive_max_pool2d(h, 8), 1),
    "avg_pool": (lambda h: F.avg_pool2d(h, 2), 0),
    "adaptive_avg_pool": (lambda h: F.adaptive_avg_pool2d(h, 8), 0),
    "reflection_pad": (lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect"), 0),
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("channels_last", [False, True])
def test_inputs_that_backward_never_reads_cost_nothing(name: str, channels_last: bool) -> None:
    op, bits = UNREAD[name]
    x = leaf(*IMAGE)

    def run(h: Tensor) -> Tensor:
        return op(h.contiguous(memory_format=torch.channels_last) if channels_last else h)

    check_exact(run, x)
    elements = x.numel()
    assert live(run, x, bits=1) <= elements * bits / 8 + UNIT
    with lossy(1) as saved:
        y = run(x * 1.0)
    unused = [row for row in saved.report().rows if row.field == "self"]
    assert [row.stored_bytes for row in unused] == [0]
    assert [row.cls for row in unused] == ["unused"]
    assert y.grad_fn is not None


def test_indices_of_a_max_pool_take_few_bits() -> None:
    """Positions inside an image of 64 x 64 need 12 of the 64 bits that PyTorch spends."""
    x = leaf(*IMAGE)
    with lossy(1) as saved:
        y = F.max_pool2d(x * 1.0, 2)
    row = row_of(saved, "MaxPool2DWithIndicesBackward0", "result1")
    assert row.cls == "integer"
    assert row.stored_bytes <= y.numel() * 13 / 8
    assert saved.stats().live_bytes == row.stored_bytes


def test_small_vocabularies_and_class_numbers_are_narrow() -> None:
    tokens = torch.randint(0, 250, (64, 512))
    table = nn.Embedding(250, 8)
    with lossy(4) as saved:
        y = table(tokens.clone())
    row = row_of(saved, "EmbeddingBackward0", "indices")
    assert row.cls == "integer"
    assert row.stored_bytes <= tokens.numel() * 8 / 8 * OVERHEAD + UNIT
    y.sum().backward()
    assert_same_bits(table.weight.grad[:, 0], torch.bincount(tokens.reshape(-1), minlength=250).float())


def test_bool_masks_take_one_bit() -> None:
    condition = torch.rand(SHAPE) < 0.5
    x = leaf()
    with lossy(4) as saved:
        y = (x * 1.0).masked_fill(condition.clone(), 0.0)
        z = torch.where(condition.clone(), x * 1.0, x * 2.0)
    bools = [row for row in saved.report().rows if row.dtype == "bool"]
    assert bools
    assert all(row.cls == "bool" for row in bools)
    assert sum(row.stored_bytes for row in bools) <= len(bools) * (N / 8 * OVERHEAD + UNIT)
    (y + z).sum().backward()
    assert_same_bits(x.grad, (~condition).float() + torch.where(condition, 1.0, 2.0))


# --- Comparisons and statistics: exact -----------------------------------------------------------------

COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(1),
    "amin": lambda h: h.amin(0),
    "max": torch.max,
    "median": torch.median,
    "maximum": lambda h: torch.maximum(h, h.roll(1, 0)),
    "minimum": lambda h: torch.minimum(h, h.roll(1, 1)),
    "norm_inf": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=1),
    "clamp_by_tensor": lambda h: torch.clamp(h, h.detach().roll(1, 0) - 1, h.detach().roll(2, 0) + 1),
    "max_dim": lambda h: h.max(1).values,
    "sort": lambda h: h.sort(1).values,
    "topk": lambda h: h.topk(7).values,
    "cummax": lambda h: h.cummax(0).values,
    "prod": lambda h: (h / 4 + 1).prod(1),
    "division": lambda h: 1 / (h.abs() + 0.1),
    "log": lambda h: (h.abs() + 0.1).log(),
    "sqrt": lambda h: (h.abs() + 0.1).sqrt(),
    "rsqrt": lambda h: (h.abs() + 0.1).rsqrt(),
    "exp": torch.exp,
    "logsumexp_result": lambda h: (h * 1.0).detach().requires_grad_().logsumexp(1) + h.sum(1),
}


@pytest.mark.parametrize("name", [n for n in COMPARED if n != "logsumexp_result"])
def test_comparisons_and_poles_are_exact_at_any_width(name: str) -> None:
    check_exact(COMPARED[name], leaf())


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[str, ...]]] = {
    "layer_norm": (lambda h: F.layer_norm(h, SHAPE[1:]), "NativeLayerNormBackward0", ("result1", "result2")),
    "group_norm": (
        lambda h: F.group_norm(h.view(32, 16, 256), 4),
        "NativeGroupNormBackward0",
        ("result1", "result2"),
    ),
    "batch_norm": (
        lambda h: F.batch_norm(h, None, None, training=True),
        "NativeBatchNormBackward0",
        ("result1", "result2"),
    ),
    "attention": (
        lambda h: F.scaled_dot_product_attention(*[h.view(4, 4, 128, 64)] * 3),
        "ScaledDotProductFlashAttentionForCpuBackward0",
        ("logsumexp",),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_saved_statistics_are_exact_however_small_min_bytes(name: str) -> None:
    op, node, fields = NORMS[name]
    x = leaf()
    with lossy(1):
        ours = node_named(op(x * 1.0), node)
    plain = node_named(op(x * 1.0), node)
    for field in fields:
        assert_same_bits(getattr(ours, f"_saved_{field}"), getattr(plain, f"_saved_{field}"), field)


# --- Widths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_products_and_linear_inputs_have_the_users_width(bits: int) -> None:
    x = leaf()
    layer = nn.Linear(256, 64)
    with lossy(bits) as saved:
        y = layer((x * 1.0) * (x * 2.0))
    assert {row.bits for row in saved.report().rows if row.cls == "value"} == {bits}
    assert saved.stats().live_bytes <= 3 * N * (bits / 8 + 4 / 256) * OVERHEAD + 3 * UNIT
    y.sum().backward()


@pytest.mark.parametrize("op", [lambda h: h.softmax(-1), lambda h: h.log_softmax(-1)])
@pytest.mark.parametrize("bits", [2, 4])
def test_softmax_and_log_softmax_have_eight_bits(op: Any, bits: int) -> None:
    with lossy(bits) as saved:
        y = op(leaf() * 1.0)
    (row,) = saved.report().rows
    assert (row.cls, row.bits) == ("value", 8)
    assert y.shape == SHAPE


@pytest.mark.parametrize("op", [F.gelu, F.silu, F.mish, F.softplus, F.hardswish, torch.sigmoid, torch.tanh])
def test_smooth_nonlinear_ops_have_at_least_three_bits(op: Callable[[Tensor], Tensor]) -> None:
    for bits, expected in ((1, 3), (2, 3), (3, 3), (4, 4), (6, 6)):
        with lossy(bits) as saved:
            y = op(leaf() * 1.0)
        (row,) = saved.report().rows
        assert (row.cls, row.bits) == ("value", expected)
        del y


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_queries_and_keys_have_two_bits_more(bits: int) -> None:
    x = leaf(4, 128, 3 * 256)
    with lossy(bits) as saved:
        q, k, v = (x * 0.3).view(4, 128, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    for field in ("query", "key"):
        assert row_of(saved, node, field).bits >= min(8, bits + 2)
    for field in ("value", "output"):
        assert row_of(saved, node, field).bits == bits
    assert row_of(saved, node, "logsumexp").cls != "value"
    assert y.shape == (4, 4, 128, 64)


def test_the_guard_of_queries_and_keys_grows_with_their_size() -> None:
    """Sharp attention: below the guard errors explode, so the width follows the norms of q and k."""

    def widths(scale: float) -> tuple[int, int]:
        x = leaf(2, 64, 3 * 128)
        with lossy(2) as saved:
            q, k, v = (x * scale).view(2, 64, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind(0)
            F.scaled_dot_product_attention(q, k, v)
        node = "ScaledDotProductFlashAttentionForCpuBackward0"
        return row_of(saved, node, "query").bits, row_of(saved, node, "key").bits

    small, large = widths(0.1), widths(4.0)
    assert min(small) == 4
    assert min(large) > max(small)


def test_attention_written_out_by_hand_is_guarded_as_well() -> None:
    x = leaf(8, 64, 32)
    with lossy(2) as saved:
        q, k, v = x * 2.0, x * 2.1, x * 1.0
        scores = q @ k.transpose(-2, -1)
        y = scores.softmax(-1) @ v
    widths = [row.bits for row in rows_of(saved, "BmmBackward0") if row.cls == "value"]
    assert widths
    assert max(widths) >= 4
    assert relative_error(y, torch.softmax(q @ k.transpose(-2, -1), -1) @ v) < 1e-6


# --- Recurrent layers, losses --------------------------------------------------------------------------


def test_the_opaque_workspace_of_an_lstm_is_exact() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(64, 64)
    x = leaf(48, 32, 64)

    def run(context: Any) -> tuple[Any, list[Tensor]]:
        lstm.zero_grad()
        with context as saved:
            y = lstm(x * 1.0)[0]
        y.pow(2).sum().backward()
        return saved, [p.grad.clone() for p in lstm.parameters()]

    _, plain = run(contextlib.nullcontext())
    _, ours = run(exact())
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)
    saved, close = run(lossy(4))
    for row in saved.report().rows:
        assert not (row.dtype == "uint8" and row.cls == "value")
    for a, b in zip(close, plain, strict=True):
        assert relative_error(a, b) < 0.2


def test_the_second_copy_that_cross_entropy_saves_is_never_read() -> None:
    with lossy(4) as saved:
        loss = F.cross_entropy(leaf() * 1.0, torch.zeros(SHAPE[0], dtype=torch.long))
    row = row_of(saved, "NllLossBackward0", "self")
    assert row.stored_bytes == 0
    assert row_of(saved, "LogSoftmaxBackward0", "result").bits == 8
    loss.backward()


def test_rows_of_unlike_scale_do_not_share_a_group() -> None:
    """A LayerNorm's input whose rows differ by orders of magnitude: groups across rows give 1,300 % of error."""
    x = torch.randn(96, 192, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-3, 3, 96)[:, None]).requires_grad_()

    def run(context: Any) -> Tensor:
        with context:
            y = F.layer_norm(x * 1.0, (192,))
        weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad(y, x, weight)[0] * torch.logspace(-3, 3, 96)[:, None]

    assert relative_error(run(lossy(4)), run(contextlib.nullcontext())) < 0.15
