"""Strides come back exactly: several backward kernels give silently wrong gradients otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, relative_error
from torch import Tensor

BASE = (4, 16, 24, 20)


def base() -> Tensor:
    return torch.randn(BASE, generator=torch.Generator().manual_seed(1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "gapped_last": lambda x: x[..., :10],
    "gapped_strided": lambda x: x[:, :, ::2],
    "gapped_channel": lambda x: x[:, 4:12],
    "gapped_permuted": lambda x: x.permute(0, 2, 3, 1)[..., :8],
    "offset": lambda x: x.reshape(-1)[7:],
    "expanded_first": lambda x: x[:1].expand(6, -1, -1, -1),
    "expanded_middle": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "expanded_all": lambda x: x[0, 0, 0, 0].expand(64, 128),
    "size_one": lambda x: x[:, :1],
    "two_dims": lambda x: x.reshape(64, 480),
    "matrix_transposed": lambda x: x.reshape(64, 480).t(),
    "diagonal": lambda x: x.reshape(160, 192).diagonal(),
    "flipped": lambda x: x.flip(2),
    "unfolded": lambda x: x.unfold(3, 5, 5),
    "overlapping": lambda x: x.unfold(3, 5, 1),
    "very_sparse": lambda x: x[..., ::20],
}


def through_mul(view: Tensor, context: Any) -> Tensor:
    """What the backward of `other * view` reads for `view`."""
    other = torch.ones_like(view, requires_grad=True)
    with context:
        y = other * view
    return y.grad_fn._saved_other


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_and_values_come_back_in_exact_mode(name: str) -> None:
    x = LAYOUTS[name](base() * 1.0)
    seen = through_mul(x, exact())
    assert_same_bits(seen, x)
    assert seen.stride() == x.stride()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bits", [2, 8])
def test_strides_come_back_from_codes(name: str, bits: int) -> None:
    x = LAYOUTS[name](base() * 1.0)
    seen = through_mul(x, compressed(bits, min_bytes=0))
    assert seen.shape == x.shape
    assert seen.dtype == x.dtype
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if span > 4 * x.numel():
        assert seen.stride() == x.stride() or seen.is_contiguous(), "above four times the elements either is right"
    else:
        assert seen.stride() == x.stride()
    limit = 0.03 if bits == 8 else 1.0
    assert relative_error(seen, x) < limit
    assert not seen.requires_grad or seen.grad_fn is None


@pytest.mark.parametrize("groups", ["auto", "row", "channel"])
@pytest.mark.parametrize("name", ["channels_last", "permuted", "gapped_last", "gapped_channel", "expanded_first"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_group_shapes(name: str, dtype: torch.dtype, groups: str) -> None:
    x = LAYOUTS[name](base().to(dtype))
    seen = through_mul(x, compressed(8, min_bytes=0, groups=groups))
    assert seen.stride() == x.stride()
    assert seen.dtype == dtype
    assert relative_error(seen, x) < 0.03


@needs_node_hook
def test_an_expanded_tensor_is_stored_once_and_stays_expanded() -> None:
    row = torch.randn(1, 8192)
    with compressed(4) as saved:
        y = torch.ones(64, 8192, requires_grad=True) * (row * 1.0).expand(64, 8192)
    assert saved.stats().live_bytes < 8192 * 4, "less than the one row takes plainly"
    seen = y.grad_fn._saved_other
    assert seen.stride() == (0, 1)
    assert relative_error(seen, row.expand(64, 8192)) < 0.2


@needs_node_hook
def test_a_small_view_of_a_large_storage_frees_the_storage() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    large = torch.randn(1024, 1024)
    reference = StorageWeakRef(large.untyped_storage())
    with compressed(4) as saved:
        y = torch.ones(64, 128, requires_grad=True) * large[:64, :128]
    del large
    assert reference.expired(), "4 MiB are held for a view of 32 KiB"
    assert saved.stats().live_bytes < 32 * 1024
    assert y.grad_fn._saved_other.shape == (64, 128)


@needs_node_hook
def test_gaps_of_the_span_are_not_stored() -> None:
    wide = torch.randn(512, 256)
    with compressed(4, min_bytes=0) as saved:
        y = torch.ones(512, 64, requires_grad=True) * (wide * 1.0)[:, :64]
    assert saved.stats().live_bytes < 512 * 64 * 0.7
    assert y.grad_fn._saved_other.stride() == (256, 1)


# --- Ops whose backward depends on strides -------------------------------------------------------------


def attention(x: Tensor) -> Tensor:
    q, k, v = x.view(4, 48, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def batch_norm_slice(x: Tensor) -> Tensor:
    return F.batch_norm(x[:, :8], None, None, training=True)


def geglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate) * value


LSTM = torch.nn.LSTM(32, 48, batch_first=False)

STRIDED_OPS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "layer_norm_transposed": ((48, 24, 32), lambda x: F.layer_norm(x.transpose(0, 1), (32,))),
    "layer_norm_gapped": ((24, 48, 64), lambda x: F.layer_norm(x[..., :32], (32,))),
    "group_norm_channels_last": (
        (4, 16, 12, 12),
        lambda x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 4),
    ),
    "group_norm_slice": ((4, 32, 12, 12), lambda x: F.group_norm(x[:, 8:24], 4)),
    "instance_norm_permuted": ((4, 12, 12, 16), lambda x: F.instance_norm(x.permute(0, 3, 1, 2))),
    "batch_norm_slice": ((8, 16, 12, 12), batch_norm_slice),
    "attention": ((4, 48, 3 * 128), attention),
    "geglu": ((64, 96, 128), geglu),
    "lstm_transposed": ((16, 40, 32), lambda x: LSTM(x.transpose(0, 1))[0]),
    "conv_channels_last": (
        (4, 8, 16, 16),
        lambda x: F.conv2d(x.contiguous(memory_format=torch.channels_last), torch.ones(8, 8, 3, 3)),
    ),
    "cross_entropy_2d": ((4, 12, 16, 16), lambda x: F.cross_entropy(x, torch.zeros(4, 16, 16, dtype=torch.long))),
    "softmax_middle": ((8, 48, 40), lambda x: x.softmax(1)),
    "normalize": ((8, 48, 40), lambda x: F.normalize(x, dim=1)),
    "pdist": ((64, 128), lambda x: F.pdist(x.t().contiguous().t())),
    "cumsum_mul": ((64, 128), lambda x: x.t().cumsum(0) * x.t()),
}


def op_gradient(name: str, dtype: torch.dtype, context: Any) -> Tensor:
    shape, op = STRIDED_OPS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    with context:
        y = op(x * 1.0)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, weight)
    return gradient


@pytest.mark.parametrize("name", STRIDED_OPS)
def test_gradients_are_bit_equal_in_exact_mode(name: str) -> None:
    import contextlib

    plain = op_gradient(name, torch.float32, contextlib.nullcontext())
    assert_same_bits(op_gradient(name, torch.float32, exact()), plain, "gradient")


@pytest.mark.parametrize("name", ["attention", "layer_norm_transposed", "group_norm_channels_last", "geglu"])
def test_gradients_are_bit_equal_in_exact_mode_bfloat16(name: str) -> None:
    import contextlib

    plain = op_gradient(name, torch.bfloat16, contextlib.nullcontext())
    assert_same_bits(op_gradient(name, torch.bfloat16, exact()), plain, "gradient")


#: Relative error of a gradient from one op at 8 bits; a wrong stride gives 0.04 to 30.
LIMIT_8_BITS = 0.03


@pytest.mark.parametrize("name", [name for name in STRIDED_OPS if name != "pdist"])
def test_gradients_are_close_at_eight_bits(name: str) -> None:
    import contextlib

    plain = op_gradient(name, torch.float32, contextlib.nullcontext())
    ours = op_gradient(name, torch.float32, compressed(8, min_bytes=0))
    assert relative_error(ours, plain) < LIMIT_8_BITS
