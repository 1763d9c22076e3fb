"""One small call of every op whose saved tensors the policy stores in fewer bits, and a harness around it.

`Recording` runs an op under plain `torch.autograd.graph.saved_tensors_hooks`, finds out which node saved each
tensor as which field by walking the graph, and then takes gradients with some of the saved tensors replaced.
Nothing here uses the package's hooks: what the policy claims is checked against PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from daf_rs.policy import Rule, resolve

Reader = tuple[str, str]
Op = Callable[..., Any]
#: A generator of random numbers -> an op and its inputs.
Build = Callable[[Generator], tuple[Op, list[Tensor]]]

PREFIX = "_raw_saved_"


class Saved:
    """A tensor that autograd saved, with its reader."""

    __slots__ = ("field", "node", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.node: Any = None
        self.field = ""

    @property
    def reader(self) -> Reader:
        return (self.node.name() if self.node is not None else "", self.field)


def nodes(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Every autograd node behind `outputs`, once."""
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [next_node for next_node, _ in node.next_functions]


class Recording:
    """An op's forward with its saved tensors, and its gradients under replacements of them."""

    def __init__(self, op: Op, inputs: list[Tensor], seed: int = 0) -> None:
        self.leaves = [x for x in inputs if x.requires_grad]
        self.saved: list[Saved] = []
        self._unpack: Callable[[Saved], Tensor] = lambda saved: saved.tensor

        def pack(tensor: Tensor) -> Saved:
            # Detached: an output that holds its own node would never be freed.
            self.saved.append(Saved(tensor.detach()))
            return self.saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: self._unpack(saved)):
            result = op(*inputs)
        results = result if isinstance(result, (tuple, list)) else [result]
        self.outputs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
        # Not the inputs' seed: a gradient parallel to its input is a special case.
        generator = Generator().manual_seed(seed + 1_000_003)
        self.grad_outputs = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in self.outputs]
        for node in nodes(self.outputs):
            for attribute in dir(node):
                if attribute.startswith(PREFIX):
                    value = getattr(node, attribute)
                    for variable in value if isinstance(value, (tuple, list)) else (value,):
                        if isinstance(variable.data, Saved):
                            variable.data.node = node
                            variable.data.field = attribute[len(PREFIX) :]
        assert all(saved.node is not None for saved in self.saved), "a saved tensor without a reader"

    def readers(self) -> set[Reader]:
        return {saved.reader for saved in self.saved}

    def gradients(self, replace: Callable[[Saved], Tensor] | None = None, *, twice: bool = False) -> list[Tensor]:
        """Gradients of the leaves; `replace` gives what backward finds in place of a saved tensor.

        With `twice`, also the gradients of the sum of their squares (double backward).
        """
        self._unpack = replace or (lambda saved: saved.tensor)
        try:
            grads = torch.autograd.grad(
                self.outputs, self.leaves, self.grad_outputs, retain_graph=True, create_graph=twice, allow_unused=True
            )
            found = [g for g in grads if g is not None]
            if twice:
                total = sum(g.square().sum() for g in found)
                if isinstance(total, Tensor) and total.requires_grad:
                    second = torch.autograd.grad(total, self.leaves, retain_graph=True, allow_unused=True)
                    found += [g for g in second if g is not None]
            return [g.detach() for g in found]
        finally:
            self._unpack = lambda saved: saved.tensor


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, NaN to NaN, -0 not to 0."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(_words(x, words), _words(y, words))
        for x, y in zip(a, b, strict=True)
    )


def _words(x: Tensor, words: dict[int, torch.dtype]) -> Tensor:
    # One NaN is as good as another.
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).contiguous().view(words[x.element_size()])


@dataclass(frozen=True)
class Normal:
    """Draws leaves: normal, with a gradient unless told otherwise."""

    generator: Generator

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).requires_grad_(grad)

    def index(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


CASES: dict[str, Build] = {}


def case(op: Op, *inputs: Callable[[Normal], Tensor], name: str) -> None:
    assert name not in CASES
    CASES[name] = lambda generator: (op, [make(Normal(generator)) for make in inputs])


def x(*shape: int, scale: float = 1.0, grad: bool = True) -> Callable[[Normal], Tensor]:
    return lambda normal: normal(*shape, scale=scale, grad=grad)


def index(high: int, *shape: int) -> Callable[[Normal], Tensor]:
    return lambda normal: normal.index(high, *shape)


def positive(*shape: int) -> Callable[[Normal], Tensor]:
    return lambda normal: (normal.uniform(*shape) + 0.5).requires_grad_()


aten = torch.ops.aten

# --- never read
case(lambda a: F.max_pool2d(a, 2), x(2, 3, 8, 8), name="max_pool2d")
case(lambda a: F.max_pool3d(a, 2), x(2, 3, 4, 8, 8), name="max_pool3d")
case(lambda a: F.adaptive_max_pool2d(a, 3), x(2, 3, 8, 8), name="adaptive_max_pool2d")
case(lambda a: F.adaptive_max_pool3d(a, 3), x(2, 3, 4, 8, 8), name="adaptive_max_pool3d")
case(lambda a: F.fractional_max_pool2d(a, 2, output_size=3), x(2, 3, 8, 8), name="fractional_max_pool2d")
case(lambda a: F.fractional_max_pool3d(a, 2, output_size=3), x(2, 3, 8, 8, 8), name="fractional_max_pool3d")
case(lambda a: F.avg_pool2d(a, 2), x(2, 3, 8, 8), name="avg_pool2d")
case(lambda a: F.avg_pool3d(a, 2), x(2, 3, 4, 8, 8), name="avg_pool3d")
case(lambda a: F.adaptive_avg_pool2d(a, 3), x(2, 3, 8, 8), name="adaptive_avg_pool2d")
case(lambda a: F.adaptive_avg_pool3d(a, 3), x(2, 3, 4, 8, 8), name="adaptive_avg_pool3d")
for mode in ("reflect", "replicate"):
    case(lambda a, m=mode: F.pad(a, (1, 2), mode=m), x(2, 3, 8), name=f"{mode}_pad1d")
    case(lambda a, m=mode: F.pad(a, (1, 2, 2, 1), mode=m), x(2, 3, 8, 8), name=f"{mode}_pad2d")
    case(lambda a, m=mode: F.pad(a, (1, 2, 2, 1, 1, 1), mode=m), x(2, 3, 4, 8, 8), name=f"{mode}_pad3d")
case(F.nll_loss, x(32, 10), index(10, 32), name="nll_loss")
case(F.nll_loss, x(4, 10, 5, 5), index(10, 4, 5, 5), name="nll_loss2d")
case(lambda a, i: a.gather(1, i), x(16, 8), index(8, 16, 4), name="gather")
case(lambda a, i: a.take(i), x(16, 8), index(128, 40), name="take")
case(lambda a, m: a.masked_select(m > 0), x(16, 8), x(16, 8, grad=False), name="masked_select")
case(lambda a, s, i: a.index_add(0, i, s), x(16, 8), x(5, 8), index(16, 5), name="index_add")
case(lambda a, s: a.index_copy(0, torch.tensor([3, 0, 9]), s), x(16, 8), x(3, 8), name="index_copy")
case(lambda a: torch.cummax(a, 1)[0], x(16, 8), name="cummax")
case(lambda a: torch.cummin(a, 1)[0], x(16, 8), name="cummin")
case(lambda a: torch.view_as_real(torch.fft.rfft(a)), x(16, 8), name="rfft")

# --- only compared with a constant (on a flat vector: the tests put in special values)
VECTOR = x(1024)
case(F.relu, VECTOR, name="relu")
case(lambda a: F.relu_(a * 1), VECTOR, name="relu_")
case(lambda a: F.threshold(a, 0.5, 7.0), VECTOR, name="threshold")
case(lambda a: F.threshold_(a * 1, -0.25, 7.0), VECTOR, name="threshold_")
case(lambda a: F.leaky_relu(a, 0.1), VECTOR, name="leaky_relu")
case(lambda a: F.leaky_relu_(a * 1, 0.1), VECTOR, name="leaky_relu_")
case(lambda a: F.rrelu(a, 0.1, 0.3, training=False), VECTOR, name="rrelu_eval")
case(lambda a: F.rrelu_(a * 1, 0.1, 0.3, training=False), VECTOR, name="rrelu_eval_")
case(lambda a: F.rrelu(a, 0.1, 0.3, training=True), VECTOR, name="rrelu")
case(torch.abs, VECTOR, name="abs")
case(F.hardtanh, VECTOR, name="hardtanh")
case(F.relu6, VECTOR, name="relu6")
case(lambda a: F.hardtanh(a, 0.5, 2.0), VECTOR, name="hardtanh_positive")
case(lambda a: a.clamp(-0.5, 1.0), VECTOR, name="clamp")
case(lambda a: a.clamp(min=-0.5), VECTOR, name="clamp_only_min")
case(lambda a: a.clamp(max=0.5), VECTOR, name="clamp_only_max")
case(lambda a: a.clamp_min(0), VECTOR, name="clamp_min")
case(lambda a: a.clamp_max(0.5), VECTOR, name="clamp_max")
case(lambda a: a.clamp(-0.1, 0.3), VECTOR, name="clamp_at_inexact_bounds")
case(F.hardsigmoid, VECTOR, name="hardsigmoid")
case(F.hardshrink, VECTOR, name="hardshrink")
case(lambda a: F.softshrink(a, 0.25), VECTOR, name="softshrink")
case(torch.nan_to_num, VECTOR, name="nan_to_num")
case(torch.nansum, VECTOR, name="nansum")
case(lambda a: torch.linalg.vector_norm(a, 1), VECTOR, name="norm1")

# --- values
case(F.linear, x(64, 96), x(32, 96), x(32), name="linear")
case(F.linear, x(8, 16, 96), x(32, 96), name="linear3d")
case(lambda a, b, c: torch.addmm(c, a, b), x(64, 96), x(96, 32), x(32), name="addmm")
case(F.conv1d, x(8, 16, 64), x(32, 16, 3), name="conv1d")
case(F.conv2d, x(8, 16, 12, 12), x(32, 16, 3, 3), x(32), name="conv2d")
case(F.conv3d, x(4, 4, 8, 8, 8), x(8, 4, 3, 3, 3), name="conv3d")
case(F.conv_transpose2d, x(8, 16, 12, 12), x(16, 8, 3, 3), name="conv_transpose2d")
case(
    lambda a, w: aten._slow_conv2d_forward(a, w, [3, 3], None, [1, 1], [0, 0]),
    x(8, 16, 12, 12),
    x(8, 16, 3, 3),
    name="slow_conv2d",
)
case(
    lambda a, w: aten.slow_conv3d_forward(a, w, [3, 3, 3], None, [1, 1, 1], [0, 0, 0]),
    x(4, 4, 8, 8, 8),
    x(8, 4, 3, 3, 3),
    name="slow_conv3d",
)
case(
    lambda a, w: aten.slow_conv_dilated2d(a, w, [3, 3], None, [1, 1], [0, 0], [2, 2]),
    x(8, 16, 12, 12),
    x(8, 16, 3, 3),
    name="slow_conv_dilated2d",
)
case(
    lambda a, w: aten.slow_conv_dilated3d(a, w, [3] * 3, None, [1] * 3, [0] * 3, [2] * 3),
    x(4, 4, 8, 8, 8),
    x(8, 4, 3, 3, 3),
    name="slow_conv_dilated3d",
)
case(
    lambda a, w: aten.slow_conv_transpose2d(a, w, [3, 3]),
    x(8, 16, 12, 12),
    x(16, 8, 3, 3),
    name="slow_conv_transpose2d",
)
case(
    lambda a, w: aten.slow_conv_transpose3d(a, w, [3, 3, 3]),
    x(4, 4, 8, 8, 8),
    x(4, 8, 3, 3, 3),
    name="slow_conv_transpose3d",
)
case(lambda a, b, c: torch.conv_tbc(a, b, c), x(64, 8, 16), x(3, 16, 32), x(32), name="conv_tbc")
case(torch.mm, x(64, 96), x(96, 64), name="mm")
case(torch.bmm, x(4, 64, 32), x(4, 32, 48), name="bmm")
case(torch.baddbmm, x(4, 64, 48), x(4, 64, 32), x(4, 32, 48), name="baddbmm")
case(torch.addbmm, x(64, 48), x(4, 64, 32), x(4, 32, 48), name="addbmm")
case(torch.mv, x(64, 256), x(256), name="mv")
case(torch.addmv, x(64), x(64, 256), x(256), name="addmv")
case(torch.addr, x(256, 512), x(256), x(512), name="addr")
case(torch.dot, x(4096), x(4096), name="dot")
case(torch.vdot, x(4096), x(4096), name="vdot")
case(F.bilinear, x(64, 32), x(64, 48), x(16, 32, 48), name="bilinear")
case(torch.mul, x(64, 256), x(64, 256), name="mul")
case(lambda a, b, c: torch.addcmul(a, b, c, value=2), x(64, 256), x(64, 256), x(64, 256), name="addcmul")
case(torch.addcdiv, x(64, 256), x(64, 256), positive(64, 256), name="addcdiv")
case(torch.div, x(64, 256), positive(64, 256), name="div")
case(torch.linalg.cross, x(1024, 3), x(1024, 3), name="cross")
case(torch.lerp, x(64, 256), x(64, 256), x(64, 256), name="lerp")
case(F.mse_loss, x(64, 256), x(64, 256), name="mse_loss")
case(lambda a: a.var(-1), x(64, 256), name="var")
case(lambda a: torch.var_mean(a, -1), x(64, 256), name="var_mean")
case(lambda a: a.std(-1), x(64, 256), name="std")
case(lambda a: torch.std_mean(a, -1), x(64, 256), name="std_mean")
case(lambda a: a**2, x(64, 256), name="square")
case(lambda a: a**3, x(64, 256), name="cube")
case(lambda a: torch.linalg.vector_norm(a, dim=-1), x(64, 256), name="norm2")
case(lambda a: aten.norm.Scalar(a, 2), x(64, 256), name="norm_all")
case(lambda a: aten.norm.ScalarOpt_dim(a, 2, [1]), x(64, 256), name="norm_dim")
case(lambda a: aten.norm.ScalarOpt_dtype(a, 2, dtype=torch.float32), x(64, 256), name="norm_dtype")
case(lambda a: aten.norm.ScalarOpt_dim_dtype(a, 2, [1], False, dtype=torch.float32), x(64, 256), name="norm_dim_dtype")
case(lambda a: F.normalize(a, dim=-1), x(64, 256), name="normalize")
for size, dims in ((4, 2), (5, 3)):
    case(
        lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False),
        x(4, 8, *[6] * dims),
        x(4, *[5] * dims, dims),
        name=f"grid_sample{size}d",
    )
case(lambda a, w, b: F.layer_norm(a, (256,), w, b), x(64, 256), x(256), x(256), name="layer_norm")
case(lambda a, w, b: F.group_norm(a, 4, w, b), x(8, 16, 12, 12), x(16), x(16), name="group_norm")
case(
    lambda a, w, b: F.batch_norm(a, torch.zeros(16), torch.ones(16), w, b, training=True),
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="batch_norm",
)
case(
    lambda a, w, b: F.batch_norm(a, torch.full((16,), 0.5), torch.full((16,), 2.0), w, b),
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="batch_norm_eval",
)
case(F.instance_norm, x(8, 16, 12, 12), name="instance_norm")
case(
    lambda a, w, b: aten._native_batch_norm_legit(a, w, b, torch.zeros(16), torch.ones(16), True, 0.1, 1e-5)[0],
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="native_batch_norm_legit",
)
case(
    lambda a, w, b: aten._native_batch_norm_legit.no_stats(a, w, b, True, 0.1, 1e-5)[0],
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="native_batch_norm_no_stats",
)
case(
    lambda a, w, b: aten._native_batch_norm_legit_no_training(a, w, b, torch.zeros(16), torch.ones(16), 0.1, 1e-5)[0],
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="native_batch_norm_no_training",
)
case(
    lambda a, w, b: aten._batch_norm_with_update(a, w, b, torch.zeros(16), torch.ones(16), 0.1, 1e-5)[0],
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="batch_norm_with_update",
)
case(
    lambda a, w, b: aten._batch_norm_no_update(a, w, b, torch.zeros(16), torch.ones(16), 0.1, 1e-5)[0],
    x(8, 16, 12, 12),
    x(16),
    x(16),
    name="batch_norm_no_update",
)
case(
    lambda a, g: aten._grid_sampler_2d_cpu_fallback(a, g.tanh(), 0, 0, False),
    x(4, 8, 6, 6),
    x(4, 5, 5, 2),
    name="grid_sample_fallback",
)
case(lambda a, w: F.rms_norm(a, (256,), w), x(64, 256), x(256), name="rms_norm")
case(lambda a, w: aten._fused_rms_norm(a, [256], w, 1e-5)[0], x(64, 256), x(256), name="fused_rms_norm")
case(F.gelu, x(64, 256), name="gelu")
case(lambda a: F.gelu(a, approximate="tanh"), x(64, 256), name="gelu_tanh")
case(F.silu, x(64, 256), name="silu")
case(F.mish, x(64, 256), name="mish")
case(F.softplus, x(64, 256), name="softplus")
case(F.hardswish, x(64, 256), name="hardswish")
case(F.elu, x(64, 256), name="elu")
case(lambda a: F.elu_(a * 1), x(64, 256), name="elu_")
case(F.selu, x(64, 256), name="selu")
case(lambda a: F.celu(a, 1.5), x(64, 256), name="celu")
case(lambda a: torch.celu_(a * 1, 1.5), x(64, 256), name="celu_")
case(F.glu, x(64, 256), name="glu")
case(F.logsigmoid, x(64, 256), name="logsigmoid")
case(torch.sigmoid, x(64, 256), name="sigmoid")
case(torch.tanh, x(64, 256), name="tanh")
case(torch.erf, x(64, 256), name="erf")
case(torch.erfc, x(64, 256), name="erfc")
case(torch.atan, x(64, 256), name="atan")
case(torch.asinh, x(64, 256), name="asinh")
case(F.prelu, x(64, 256), lambda n: torch.full((1,), 0.25, requires_grad=True), name="prelu")
case(torch.sin, x(64, 256, scale=15.0), name="sin")
case(torch.cos, x(64, 256, scale=15.0), name="cos")
case(torch.sinc, x(64, 256), name="sinc")
case(lambda a, t: F.binary_cross_entropy_with_logits(a, t.sigmoid()), x(64, 256), x(64, 256), name="bce_with_logits")
case(lambda a, t: F.soft_margin_loss(a, t.sign()), x(64, 256), x(64, 256, grad=False), name="soft_margin_loss")
case(F.smooth_l1_loss, x(64, 256), x(64, 256), name="smooth_l1_loss")
case(F.huber_loss, x(64, 256), x(64, 256), name="huber_loss")
case(lambda a: torch.softmax(a, -1), x(64, 256, scale=2.0), name="softmax")
case(lambda a: aten._safe_softmax(a, -1), x(64, 256, scale=2.0), name="safe_softmax")
case(
    lambda a: aten._masked_softmax(a, torch.zeros(4, 2, 16, 16, dtype=torch.bool), -1, 2),
    x(4, 2, 16, 16, scale=2.0),
    name="masked_softmax",
)
case(lambda a: torch.log_softmax(a, -1), x(64, 256, scale=2.0), name="log_softmax")
case(F.cross_entropy, x(64, 256, scale=2.0), index(256, 64), name="cross_entropy")
case(lambda a: torch.logsumexp(a, -1), x(64, 256, scale=2.0), name="logsumexp")
for causal in (False, True):
    case(
        lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
        x(2, 4, 64, 32),
        x(2, 4, 64, 32),
        x(2, 4, 64, 32),
        name="sdpa_causal" if causal else "sdpa",
    )


def _lstm(generator: Generator) -> tuple[Op, list[Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lstm = torch.nn.LSTM(32, 64)
    return (lambda a, *_: lstm(a)[0]), [Normal(generator)(16, 8, 32), *lstm.parameters()]


CASES["lstm"] = _lstm


def record(name: str, seed: int = 0) -> Recording:
    """Runs a case; ops that draw random numbers (fractional pooling) draw the same each time."""
    op, inputs = CASES[name](Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recording(op, inputs)


@lru_cache(maxsize=1)
def all_readers() -> list[tuple[str, Reader, Rule]]:
    """Every case with every reader in it and that reader's rule."""
    found: dict[tuple[str, Reader], Rule] = {}
    for name in CASES:
        for saved in record(name).saved:
            found[name, saved.reader] = resolve(saved.node, saved.field, saved.tensor.dtype)
    return [(name, reader, rule) for (name, reader), rule in found.items()]


def readers_of(*kinds: str) -> list[Any]:
    return [
        pytest.param(name, reader, id=f"{name}-{reader[0]}.{reader[1]}")
        for name, reader, rule in all_readers()
        if rule.kind in kinds
    ]
