"""`bits="exact"`: losses, gradients and weights are those of plain PyTorch in every bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, assert_same_gradients, compressed, exact, gradients, needs_node_hook, train
from torch import Tensor, nn

from daf_rs.testing import models

SMALL: dict[str, dict[str, Any]] = {
    "resnet20": {"width": 8},
    "gpt": {"layers": 2, "width": 64, "heads": 4, "length": 64},
    "vit": {"layers": 2, "width": 64, "heads": 4},
    "llama": {"layers": 2, "width": 64, "heads": 4, "length": 64},
    "lstm": {"width": 64, "length": 32},
}
#: name -> (model in `models.MODELS`, its options)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in SMALL.items()},
    "gpt_dropout": ("gpt", {**SMALL["gpt"], "dropout": 0.1}),
    "gpt_attention_dropout": ("gpt", {**SMALL["gpt"], "attention_dropout": 0.1}),
    "vit_dropout": ("vit", {**SMALL["vit"], "dropout": 0.1}),
    "llama_one_kv_head": ("llama", {**SMALL["llama"], "kv_heads": 1}),
    "lstm_dropout": ("lstm", {**SMALL["lstm"], "dropout": 0.1}),
}


def both(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Two copies of one model."""
    return models.build(name, **options), models.build(name, **options)


@pytest.mark.parametrize("min_bytes", [0, 16384])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bit_equal_to_plain_pytorch(variant: str, min_bytes: int) -> None:
    name, options = VARIANTS[variant]
    model, twin = both(name, options)
    batches = [model.make_batch(i, 8) for i in range(4)]
    plain = train(twin, batches)
    context = compressed("exact", min_bytes=min_bytes, model=model)
    ours = train(model, batches, lambda: context)
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert_same_bits(a, b, f"loss of step {step}")
    for key, value in twin.state_dict().items():
        assert_same_bits(model.state_dict()[key], value, key)
    assert context.stats().live_bytes == 0
    assert context.stats().packs > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_bit_equal_without_naming_the_model(variant: str) -> None:
    name, options = VARIANTS[variant]
    model = models.build(name, **options)
    batch = model.make_batch(0, 8)
    plain_loss, plain = gradients(model, batch)
    loss, ours = gradients(model, batch, exact())
    assert_same_bits(loss, plain_loss)
    assert_same_gradients(ours, plain)


def test_channels_last_is_bit_equal() -> None:
    model, twin = both("resnet20", SMALL["resnet20"])
    model, twin = (m.to(memory_format=torch.channels_last) for m in (model, twin))
    batches = []
    for i in range(3):
        batch = model.make_batch(i, 8)
        images = batch.inputs.contiguous(memory_format=torch.channels_last)
        batches.append(models.Batch(images, batch.targets))
    plain = train(twin, batches)
    ours = train(model, batches, lambda: exact(model=model))
    for a, b in zip(ours, plain, strict=True):
        assert_same_bits(a, b)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("variant", ["resnet20", "gpt", "vit", "llama"])
def test_autocast_is_bit_equal(variant: str) -> None:
    name, options = VARIANTS[variant]
    model = models.build(name, **options)
    batch = model.make_batch(0, 8)

    @contextlib.contextmanager
    def autocast(inner: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), inner:
            yield

    plain_loss, plain = gradients(model, batch, autocast(contextlib.nullcontext()))
    loss, ours = gradients(model, batch, autocast(exact(model=model)))
    assert_same_bits(loss, plain_loss)
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_bit_equal(dtype: torch.dtype) -> None:
    model = models.vit(**SMALL["vit"]).to(dtype)
    batch = model.make_batch(0, 8)
    batch = models.Batch(batch.inputs.to(dtype), batch.targets)
    plain_loss, plain = gradients(model, batch)
    loss, ours = gradients(model, batch, exact(model=model))
    assert_same_bits(loss, plain_loss)
    assert_same_gradients(ours, plain)


def test_evaluation_mode_and_partly_frozen_models_are_bit_equal() -> None:
    for freeze in (False, True):
        model = models.resnet20(**SMALL["resnet20"]).eval()
        if freeze:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("blocks.4" in name or "head" in name)
        batch = model.make_batch(0, 8)
        plain_loss, plain = gradients(model, batch)
        loss, ours = gradients(model, batch, exact(model=model))
        assert_same_bits(loss, plain_loss)
        assert_same_gradients(ours, plain)


def test_adapters_on_a_frozen_model_are_bit_equal() -> None:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down, self.up = nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.up(self.down(x))

    model = models.gpt(**SMALL["gpt"]).requires_grad_(False)
    torch.manual_seed(0)
    for block in model.blocks:
        block.mlp[0] = Adapted(block.mlp[0])
        block.attention.qkv = Adapted(block.attention.qkv)
    batch = model.make_batch(0, 4)
    plain_loss, plain = gradients(model, batch)
    assert plain
    loss, ours = gradients(model, batch, exact(model=model))
    assert_same_bits(loss, plain_loss)
    assert_same_gradients(ours, plain)


# --- Single ops ----------------------------------------------------------------------------------------


def _image(h: Tensor) -> Tensor:
    return h.view(8, 16, 16, 16)


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda h, w: F.linear(h, w),
    "matmul": lambda h, w: h @ w,
    "einsum": lambda h, w: torch.einsum("bi,oi->bo", h, w),
    "bmm": lambda h, w: h.view(8, 64, 64) @ h.view(8, 64, 64).transpose(1, 2) @ w,
    "baddbmm": lambda h, w: torch.baddbmm(w, h.view(8, 64, 64), h.view(8, 64, 64)),
    "conv1d": lambda h, w: F.conv1d(h.view(8, 64, 64), w[:, :, None]),
    "conv2d": lambda h, w: F.conv2d(_image(h), w[:16, :].reshape(16, 16, 2, 2)),
    "conv2d_depthwise": lambda h, w: F.conv2d(_image(h), w[:16, :9].reshape(16, 1, 3, 3), groups=16),
    "conv2d_stride": lambda h, w: F.conv2d(_image(h), w[:16, :].reshape(16, 16, 2, 2), stride=2, dilation=2),
    "conv_transpose2d": lambda h, w: F.conv_transpose2d(_image(h), w[:16, :].reshape(16, 16, 2, 2)),
    "conv3d": lambda h, w: F.conv3d(h.view(2, 4, 16, 16, 16), w[:8, :32].reshape(8, 4, 2, 2, 2)),
    "batch_norm": lambda h, w: F.batch_norm(_image(h), None, None, w[0, :16], w[1, :16], training=True),
    "instance_norm": lambda h, _w: F.instance_norm(_image(h)),
    "group_norm": lambda h, w: F.group_norm(_image(h), 4, w[0, :16], w[1, :16]),
    "layer_norm": lambda h, w: F.layer_norm(h, (64,), w[0], w[1]),
    "rms_norm": lambda h, w: F.rms_norm(h, (64,), w[0]),
    "local_response_norm": lambda h, _w: F.local_response_norm(_image(h), 3),
    "gelu": lambda h, _w: F.gelu(h),
    "gelu_tanh": lambda h, _w: F.gelu(h, approximate="tanh"),
    "silu": lambda h, _w: F.silu(h),
    "mish": lambda h, _w: F.mish(h),
    "elu": lambda h, _w: F.elu(h),
    "selu": lambda h, _w: F.selu(h),
    "celu": lambda h, _w: F.celu(h, 0.5),
    "softplus": lambda h, _w: F.softplus(h),
    "softsign": lambda h, _w: F.softsign(h),
    "hardswish": lambda h, _w: F.hardswish(h),
    "relu": lambda h, _w: F.relu(h),
    "relu6": lambda h, _w: F.relu6(h * 4),
    "leaky_relu": lambda h, _w: F.leaky_relu(h),
    "prelu": lambda h, w: F.prelu(h, w[0, :1]),
    "rrelu": lambda h, _w: F.rrelu(h, training=True),
    "logsigmoid": lambda h, _w: F.logsigmoid(h),
    "hardtanh": lambda h, _w: F.hardtanh(h),
    "sigmoid": lambda h, _w: h.sigmoid(),
    "tanh": lambda h, _w: h.tanh(),
    "exp": lambda h, _w: h.exp(),
    "log": lambda h, _w: (h.abs() + 0.1).log(),
    "sqrt": lambda h, _w: (h.abs() + 0.1).sqrt(),
    "division": lambda h, w: h / (w[0].abs() + 0.1),
    "pow": lambda h, _w: h.abs().pow(1.7),
    "pow_tensor": lambda h, w: (h.abs() + 0.1).pow(w[0]),
    "atan2": lambda h, w: torch.atan2(h, w[0]),
    "lerp": lambda h, w: torch.lerp(h, h.sin(), w[0]),
    "addcmul": lambda h, w: torch.addcmul(h, h, w[0]),
    "cumprod": lambda h, _w: (h / 8 + 1).cumprod(1),
    "prod": lambda h, _w: (h / 8 + 1).prod(1),
    "softmax": lambda h, _w: h.softmax(-1),
    "log_softmax": lambda h, _w: h.log_softmax(-1),
    "logsumexp": lambda h, _w: h.logsumexp(-1),
    "norm": lambda h, _w: h.norm(dim=1),
    "norm_inf": lambda h, _w: torch.linalg.vector_norm(h, float("inf"), dim=1),
    "normalize": lambda h, _w: F.normalize(h, dim=1),
    "cosine": lambda h, w: F.cosine_similarity(h, w[0][None], dim=1),
    "var": lambda h, _w: h.var(1),
    "std": lambda h, _w: h.std(1),
    "amax": lambda h, _w: h.amax(1),
    "median": lambda h, _w: h.median(1).values,
    "sort": lambda h, _w: h.sort(1).values,
    "topk": lambda h, _w: h.topk(5).values,
    "maximum": lambda h, w: torch.maximum(h, w[0]),
    "gather": lambda h, _w: h.gather(1, h.detach().argsort(1)),
    "scatter_add": lambda h, _w: torch.zeros(512, 64).scatter_add(1, h.detach().argsort(1), h),
    "index_select": lambda h, _w: h.index_select(0, torch.arange(0, 512, 3)),
    "masked_fill": lambda h, _w: h.masked_fill(h.detach() > 1, 0),
    "where": lambda h, w: torch.where(h.detach() > 0, h, w[0]),
    "max_pool2d": lambda h, _w: F.max_pool2d(_image(h), 2),
    "max_pool2d_dilated": lambda h, _w: F.max_pool2d(_image(h), 3, stride=1, dilation=2),
    "avg_pool2d": lambda h, _w: F.avg_pool2d(_image(h), 2),
    "adaptive_max_pool2d": lambda h, _w: F.adaptive_max_pool2d(_image(h), 5),
    "adaptive_avg_pool2d": lambda h, _w: F.adaptive_avg_pool2d(_image(h), 5),
    "lp_pool2d": lambda h, _w: F.lp_pool2d(_image(h).abs() + 0.1, 2, 2),
    "interpolate": lambda h, _w: F.interpolate(_image(h), scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda h, _w: F.pixel_shuffle(_image(h), 2) * 2,
    "unfold": lambda h, _w: F.unfold(_image(h), 3),
    "grid_sample": lambda h, _w: F.grid_sample(
        _image(h), _image(h)[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "dropout": lambda h, _w: F.dropout(h, 0.2),
    "alpha_dropout": lambda h, _w: F.alpha_dropout(h, 0.2, training=True),
    "attention": lambda h, _w: F.scaled_dot_product_attention(*[h.view(2, 4, 64, 64)] * 3, is_causal=True),
    "attention_mask": lambda h, _w: F.scaled_dot_product_attention(
        *[h.view(2, 4, 64, 64)] * 3, attn_mask=torch.ones(64, 64, dtype=torch.bool).tril()
    ),
    "attention_dropout": lambda h, _w: F.scaled_dot_product_attention(*[h.view(2, 4, 64, 64)] * 3, dropout_p=0.2),
    "cross_entropy": lambda h, _w: F.cross_entropy(h, torch.arange(512) % 64, label_smoothing=0.1),
    "cross_entropy_soft": lambda h, _w: F.cross_entropy(h, torch.full((512, 64), 1 / 64)),
    "mse": lambda h, w: F.mse_loss(h, w[0].expand(512, 64)),
    "smooth_l1": lambda h, w: F.smooth_l1_loss(h, w[0].expand(512, 64)),
    "huber": lambda h, w: F.huber_loss(h, w[0].expand(512, 64)),
    "bce_logits": lambda h, _w: F.binary_cross_entropy_with_logits(h, torch.ones(512, 64)),
    "kl": lambda h, _w: F.kl_div(h.log_softmax(-1), torch.full((512, 64), 1 / 64), reduction="batchmean"),
    "triplet": lambda h, w: F.triplet_margin_loss(h, h * 2, w[0].expand(512, 64)),
    "cdist": lambda h, w: torch.cdist(h, w),
    "fft": lambda h, _w: torch.fft.rfft(h).abs(),
    "complex": lambda h, _w: torch.view_as_real(torch.view_as_complex(h.view(512, 32, 2)) ** 2),
    "svd": lambda h, _w: torch.linalg.svdvals(h.view(8, 64, 64)),
    "solve": lambda h, w: torch.linalg.solve(w + 20 * torch.eye(64), h.t()),
    "weight_norm": lambda h, w: F.linear(h, torch._weight_norm(w, w.norm(dim=1, keepdim=True), 0)),
    "bilinear": lambda h, w: F.bilinear(h, h, w.view(4, 16, 64)[:, :, :, None].expand(4, 16, 64, 64)[:, 0]),
    "embedding_bag": lambda h, _w: F.embedding_bag(torch.arange(64).view(8, 8), h, mode="mean"),
    "chunk_geglu": lambda h, _w: F.glu(h) + h.chunk(2, -1)[0] * F.gelu(h.chunk(2, -1)[1]),
    "in_place_relu": lambda h, w: F.linear(F.relu(F.linear(h, w), inplace=True), w),
    "in_place_chain": lambda h, _w: h.mul_(2).add_(1).relu_(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_single_ops_are_bit_equal(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 64, generator=generator).requires_grad_()
    w = torch.randn(64, 64, generator=generator).requires_grad_()

    def run(context: Any) -> list[Tensor | None]:
        torch.manual_seed(2)
        with context:
            y = OPS[name](x * 1.0, w * 1.0)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
        return list(torch.autograd.grad(y, (x, w), weight.to(y.dtype), allow_unused=True))

    plain, ours = run(contextlib.nullcontext()), run(exact())
    assert plain[0] is not None
    for actual, expected in zip(ours, plain, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert_same_bits(actual, expected, name)


@needs_node_hook
def test_exact_mode_saves_bytes_all_the_same() -> None:
    """Masks, indices, what is never read, and what is saved twice need no loss."""
    for name, options, share in (("resnet20", {}, 1.0), ("gpt", {"dropout": 0.1}, 0.9)):
        model = models.build(name, **SMALL[name], **options)
        batch = model.make_batch(0, 16)
        with compressed("exact", model=model) as saved:
            loss = batch.loss(model)
        stats = saved.stats()
        assert stats.live_bytes <= share * stats.plain_bytes, f"{name}\n{saved.report()}"
    with compressed("exact", min_bytes=0) as saved:
        y = F.max_pool2d(F.dropout((torch.randn(8, 16, 64, 64, requires_grad=True) * 1.0).relu(), 0.5), 2)
    assert saved.stats().live_bytes < saved.stats().plain_bytes / 3
    del loss, y
