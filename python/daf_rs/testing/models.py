"""Small, seeded models of the families that people train, with batches to train them on.

Tests and benchmarks use the same ones, so a figure in a table and a check in a test speak of the same
graph. Every model is a plain `torch.nn.Module` that knows nothing of `daf_rs`:

=============  ==========================================================================================
`ResNet20`     the CIFAR ResNet of He et al. 2015 (arXiv 1512.03385, section 4.2): conv, batch norm, ReLU
`GPT`          decoder of pre-norm blocks: LayerNorm, causal attention (SDPA), GELU; any vocabulary
`ViT`          a vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) for 32x32 images
`Llama`        RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023, 2302.13971)
`LSTMLM`       a language model around `torch.nn.LSTM`
=============  ==========================================================================================

The functions `resnet20`, `gpt`, `vit`, `llama` and `lstm_lm` build one from a seed without touching the
global random state; `TrainableModel.make_batch` makes its inputs and its loss.

Example:
    >>> from daf_rs.testing import models
    >>> model = models.gpt(seed=0, layers=2)
    >>> batch = model.make_batch(seed=0, batch=2)
    >>> loss = batch.loss(model)
    >>> loss.backward()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "GPT",
    "LSTMLM",
    "MODELS",
    "Batch",
    "Llama",
    "ResNet20",
    "TrainableModel",
    "ViT",
    "build",
    "gpt",
    "llama",
    "lstm_lm",
    "resnet20",
    "vit",
]

_M = TypeVar("_M", bound="TrainableModel")


@dataclass(frozen=True)
class Batch:
    """One batch: what goes into the model and what its output is compared with.

    Attributes:
        inputs: images `[batch, 3, 32, 32]` float32, or tokens `[batch, length]` int64.
        targets: class numbers `[batch]`, or the following tokens `[batch, length]`; int64.
    """

    inputs: Tensor
    targets: Tensor

    def loss_of(self, output: Tensor) -> Tensor:
        """Mean cross entropy of a model's output.

        Args:
            output: logits, `[batch, classes]` or `[batch, length, vocabulary]`.

        Returns:
            A scalar tensor (float32), differentiable.
        """
        return F.cross_entropy(output.reshape(-1, output.shape[-1]), self.targets.reshape(-1))

    def loss(self, model: Callable[[Tensor], Any]) -> Tensor:
        """Run the forward of `model` on this batch and return its mean cross entropy (a scalar tensor)."""
        return self.loss_of(cast(Tensor, model(self.inputs)))


class TrainableModel(nn.Module, ABC):
    """A module that can make batches of the shape that it takes."""

    @abstractmethod
    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make a batch of random data from `seed`, without touching the global random state.

        Args:
            seed: the same seed gives the same batch.
            batch: number of images or of sequences, at least 1.
        """

    def parameter_count(self) -> int:
        """Number of trainable values."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


def _image_batch(seed: int, batch: int, classes: int, size: int) -> Batch:
    """Images that carry their class as a faint pattern, so that training on them lowers the loss."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 3, size, size, generator=torch.Generator().manual_seed(20_151_210))
    targets = torch.randint(classes, (batch,), generator=generator)
    noise = torch.randn(batch, 3, size, size, generator=generator)
    return Batch(noise + 0.5 * patterns[targets], targets)


def _token_batch(seed: int, batch: int, vocabulary: int, length: int) -> Batch:
    """Sequences in which the next token mostly follows from the last one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    follows = torch.rand(batch, length + 1, generator=generator) < 0.75
    for position in range(1, length + 1):
        successor = (tokens[:, position - 1] * 31 + 7) % vocabulary
        tokens[:, position] = torch.where(follows[:, position], successor, tokens[:, position])
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


# --- ResNet-20 -----------------------------------------------------------------------------------------


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; where the size changes the shortcut is a strided 1x1 convolution."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.norm1(self.conv1(x)))
        return cast(Tensor, self.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x)))


class ResNet20(TrainableModel):
    """ResNet-20 for 32x32 images: a stem and three stages of three blocks.

    Args:
        classes: number of classes.
        width: channels of the first stage; the following have two and four times as many.

    Shapes:
        input `[batch, 3, 32, 32]` float32 (contiguous or channels_last), output `[batch, classes]`.
    """

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.classes = classes
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        blocks: list[nn.Module] = []
        channels_in = width
        for stage in range(3):
            channels = width * 2**stage
            for index in range(3):
                blocks.append(_ResidualBlock(channels_in, channels, 2 if stage and not index else 1))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.relu(self.norm(self.stem(x)))
        return cast(Tensor, self.head(self.pool(self.blocks(x)).flatten(1)))

    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make `batch` random images and their classes."""
        return _image_batch(seed, batch, self.classes, 32)


# --- Transformers --------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Multi-head self-attention with one projection for q, k and v, by scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, given width={width}, heads={heads}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class _Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP of four times the width with GELU."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal=causal, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return cast(Tensor, x + self.dropout(self.mlp(self.norm2(x))))


class GPT(TrainableModel):
    """A decoder-only transformer with learned positions.

    Without `attention_dropout` attention takes the fused CPU kernel; with it, torch takes the path that
    keeps the whole matrix of probabilities.

    Args:
        vocabulary: number of tokens V; the output is `[batch, length, V]`.
        layers: number of blocks.
        width: width of the residual stream.
        heads: attention heads; must divide `width`.
        length: longest sequence, and the length of the batches made.
        dropout: probability at the embedding and at the two ends of each block.
        attention_dropout: probability inside attention.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        length: int = 128,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                _Block(width, heads, causal=True, dropout=dropout, attention_dropout=attention_dropout)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits `[batch, length, vocabulary]` of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        return cast(Tensor, self.head(self.norm(self.blocks(x))))

    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make `batch` random sequences of the model's length and the tokens that follow."""
        return _token_batch(seed, batch, self.vocabulary, self.length)


class ViT(TrainableModel):
    """A vision transformer for 32x32 images with a class token.

    Args:
        classes: number of classes.
        layers: number of blocks.
        width: width of the residual stream.
        heads: attention heads; must divide `width`.
        patch: side of a patch in pixels; must divide 32. 4 gives 64 patches.
        dropout: probability at the embedding and at the two ends of each block.
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        patch: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if 32 % patch:
            raise ValueError(f"patch must divide 32, given {patch}")
        self.classes = classes
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (32 // patch) ** 2 + 1, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(_Block(width, heads, causal=False, dropout=dropout, attention_dropout=0.0) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `[batch, classes]` of a batch of images."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.blocks(self.dropout(x + self.positions))
        return cast(Tensor, self.head(self.norm(x[:, 0])))

    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make `batch` random images and their classes."""
        return _image_batch(seed, batch, self.classes, 32)


class _RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, from elementary operations.

    Written out as most Llama implementations do, so that the graph (pow, mean, rsqrt, mul) is the same on
    every version of torch.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` over its last dimension."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) on `[batch, heads, length, head_width]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _GroupedAttention(nn.Module):
    """Causal attention whose k and v have fewer heads than q, with rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        if width % heads or heads % kv_heads:
            raise ValueError(
                "heads must divide width and kv_heads must divide heads, "
                f"given width={width}, heads={heads}, kv_heads={kv_heads}"
            )
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, length, heads, self.head_width).transpose(1, 2)

        q = _rotate(split(self.q(x), self.heads), cos, sin)
        k = _rotate(split(self.k(x), self.kv_heads), cos, sin)
        v = split(self.v(x), self.kv_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class _SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class _LlamaBlock(nn.Module):
    """A Llama block: RMSNorm, grouped attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = _RMSNorm(width)
        self.attention = _GroupedAttention(width, heads, kv_heads)
        self.norm2 = _RMSNorm(width)
        self.mlp = _SwiGLU(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class Llama(TrainableModel):
    """A small model of the Llama family; the rotary tables are buffers.

    Args:
        vocabulary: number of tokens.
        layers: number of blocks.
        width: width of the residual stream.
        heads: heads of q; must divide `width`.
        kv_heads: heads of k and v; must divide `heads`.
        hidden: width inside SwiGLU; None: 8/3 of `width`, rounded up to a multiple of 32.
        length: longest sequence, and the length of the batches made.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 256,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int | None = None,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        hidden = (8 * width // 3 + 31) // 32 * 32 if hidden is None else hidden
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = _RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        head_width = width // heads
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin(), angles.sin()], dim=-1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits `[batch, length, vocabulary]` of the next token at every position."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))

    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make `batch` random sequences of the model's length and the tokens that follow."""
        return _token_batch(seed, batch, self.vocabulary, self.length)


# --- LSTM ----------------------------------------------------------------------------------------------


class LSTMLM(TrainableModel):
    """An embedding, `torch.nn.LSTM` (batch first) and a linear decoder.

    Args:
        vocabulary: number of tokens.
        layers: LSTM layers.
        width: width of the embedding and of the state.
        length: length of the batches made.
        dropout: probability between the layers and before the decoder.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        *,
        layers: int = 2,
        width: int = 128,
        length: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits `[batch, length, vocabulary]` of the next token at every position."""
        states, _ = self.lstm(self.tokens(tokens))
        return cast(Tensor, self.head(self.dropout(states)))

    def make_batch(self, seed: int, batch: int) -> Batch:
        """Make `batch` random sequences of the model's length and the tokens that follow."""
        return _token_batch(seed, batch, self.vocabulary, self.length)


# --- Seeded constructors -------------------------------------------------------------------------------


def _seeded(make: Callable[[], _M], seed: int) -> _M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def resnet20(seed: int = 0, **options: Any) -> ResNet20:
    """Build a `ResNet20` whose weights follow from `seed` alone; `options` as its constructor takes them."""
    return _seeded(lambda: ResNet20(**options), seed)


def gpt(seed: int = 0, **options: Any) -> GPT:
    """Build a `GPT` whose weights follow from `seed` alone; `options` as its constructor takes them."""
    return _seeded(lambda: GPT(**options), seed)


def vit(seed: int = 0, **options: Any) -> ViT:
    """Build a `ViT` whose weights follow from `seed` alone; `options` as its constructor takes them."""
    return _seeded(lambda: ViT(**options), seed)


def llama(seed: int = 0, **options: Any) -> Llama:
    """Build a `Llama` whose weights follow from `seed` alone; `options` as its constructor takes them."""
    return _seeded(lambda: Llama(**options), seed)


def lstm_lm(seed: int = 0, **options: Any) -> LSTMLM:
    """Build an `LSTMLM` whose weights follow from `seed` alone; `options` as its constructor takes them."""
    return _seeded(lambda: LSTMLM(**options), seed)


#: Every model by name, as benchmarks and parametrized tests go through them.
MODELS: dict[str, Callable[..., TrainableModel]] = {
    "resnet20": resnet20,
    "gpt": gpt,
    "vit": vit,
    "llama": llama,
    "lstm": lstm_lm,
}


def build(name: str, seed: int = 0, **options: Any) -> TrainableModel:
    """Build a model by its name in `MODELS`.

    Args:
        name: one of `MODELS`.
        seed: the weights follow from it alone.
        **options: as the model's constructor takes them.

    Raises:
        ValueError: there is no model of that name.
    """
    if name not in MODELS:
        raise ValueError(f"no model is named {name!r}; there are {', '.join(sorted(MODELS))}")
    return MODELS[name](seed, **options)
