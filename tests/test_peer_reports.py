"""What users of other packages that hook into saved tensors ran into, tried on this one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, compressed, exact, needs_node_hook, plain_saved_bytes, relative_error, run_python
from torch import Tensor, nn

import daf_rs


@needs_node_hook
def test_a_stack_of_conv_norm_relu_holds_a_third_of_the_bytes_at_most() -> None:
    """Elsewhere memory rose: the next layer still held the originals (actnn#35)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))]
    )
    x = torch.randn(8, 16, 32, 32)
    plain = plain_saved_bytes(lambda: model(x).sum(), model)
    with compressed(4, model=model) as saved:
        y = model(x).sum()
    assert saved.stats().live_bytes <= plain / 3
    assert saved.stats().kept_bytes < plain / 20
    y.backward()


@needs_node_hook
def test_gated_linear_units_are_compressed() -> None:
    """Views made by chunk were missed elsewhere (actnn#38)."""

    class GEGLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(160, 2 * 640)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.projection(x).chunk(2, dim=-1)
            return value * F.gelu(gate)

    model = GEGLU()
    x = torch.randn(4, 288, 160)
    plain = plain_saved_bytes(lambda: model(x).sum(), model)
    with compressed(4, model=model) as saved:
        y = model(x)
    assert saved.stats().live_bytes < plain / 4.5
    y.sum().backward()


def test_a_generator_and_a_discriminator_trained_in_turns() -> None:
    """Two models, two optimizers, transposed convolutions (actnn#24)."""

    def fit(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        generator = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
            nn.Tanh(),
        )
        critic = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 16, 1)
        )
        steps = [torch.optim.Adam(m.parameters(), lr=2e-4) for m in (generator, critic)]
        losses = []
        for _ in range(3):
            noise, real = torch.randn(32, 16, 1, 1), torch.randn(32, 3, 8, 8)
            steps[1].zero_grad()
            with context():
                fake = generator(noise)
                loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            loss.backward()
            steps[1].step()
            losses.append(loss.detach())
            steps[0].zero_grad()
            with context():
                loss = F.softplus(-critic(generator(noise))).mean()
            loss.backward()
            steps[0].step()
            losses.append(loss.detach())
        return losses

    plain = fit(contextlib.nullcontext)
    for ours, expected in zip(fit(exact), plain, strict=True):
        assert_same_bits(ours, expected)
    for ours, expected in zip(fit(lambda: compressed(4)), plain, strict=True):
        assert abs(ours - expected) < 0.1


def test_enabling_it_changes_no_weight() -> None:
    """Elsewhere layers were replaced and drew new weights (actnn#29)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with compressed(4, model=model):
        y = model(torch.randn(512, 64)).sum()
    y.backward()
    assert [type(m) for m in model.modules()] == kinds
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@needs_node_hook
def test_layer_norm_then_dropout_then_linear() -> None:
    """A norm whose partner is a dropout (LowMemoryBP#6)."""
    model = nn.Sequential(nn.LayerNorm(128), nn.Dropout(0.1), nn.Linear(128, 128))
    x = torch.randn(512, 128, requires_grad=True)
    plain = plain_saved_bytes(lambda: model(x * 1.0).sum(), model)
    with compressed(4, model=model) as saved:
        y = model(x * 1.0).sum()
    assert saved.stats().live_bytes < plain / 6
    y.backward()


def test_experts_that_get_no_token() -> None:
    """Branches that never reach backward left entries behind (trl#5738)."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    saved = compressed(4, min_bytes=0)
    for chosen in range(4):
        x = torch.randn(256, 64, requires_grad=True)
        with saved:
            outputs = [expert(x * 1.0).relu() for expert in experts]
            loss = outputs[chosen].sum()
        loss.backward()
        del outputs, loss
        assert saved.stats().live_bytes == 0


def test_a_backward_that_returns_a_view_of_what_it_saved() -> None:
    """The buffer of a decoded tensor was reused while a view of it was alive (torchtune#1936)."""

    class ReturnsView(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(factor)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (factor,) = ctx.saved_tensors
            return factor.t(), None

    factors = [torch.full((64, 128), float(i)) + torch.rand(64, 128) for i in range(6)]
    x = torch.zeros(128, 64, requires_grad=True)
    for context in (exact(), compressed(8, min_bytes=0, unknown=8)):
        kept = []
        with context:
            outputs = [ReturnsView.apply(x, factor.clone()) for factor in factors]
        for output in outputs:
            (gradient,) = torch.autograd.grad(output.sum(), x)
            kept.append(gradient)
        for gradient, factor in zip(kept, factors, strict=True):
            assert relative_error(gradient, factor.t()) < 0.02


def test_an_adapter_on_a_frozen_layer_under_autocast() -> None:
    """Low-rank adapters: the frozen weight must be exact (trl#4280)."""
    torch.manual_seed(0)
    base = nn.Linear(128, 128, bias=False).requires_grad_(False)
    down, up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)
    x = torch.randn(256, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), compressed(2, model=base):
        y = base(x) + up(down(x))
    y.float().sum().backward()
    expected = base.weight.bfloat16().float().sum(0) + (up.weight.bfloat16() @ down.weight.bfloat16()).float().sum(0)
    assert relative_error(x.grad, expected.expand_as(x)) < 0.02


def test_a_module_on_several_replicas_in_threads() -> None:
    """DataParallel runs replicas in threads; a context around the call does not reach them (pytorch#63623)."""
    model = nn.DataParallel(nn.Linear(64, 64))
    x = torch.randn(256, 64, requires_grad=True)
    with compressed(8, min_bytes=0):
        y = model(x).sum()
    y.backward()
    assert x.grad is not None


def test_leaving_the_context_from_inside_a_hook_does_not_crash() -> None:
    """Python code that leaves the context while autograd unpacks killed the process (pytorch#130734)."""
    out = run_python("""
        import torch, daf_rs

        context = daf_rs.save_compressed(8, min_bytes=0)

        class Leaves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1.0

            @staticmethod
            def backward(ctx, gradient):
                (x,) = ctx.saved_tensors
                context.__exit__(None, None, None)
                return gradient * x

        x = torch.randn(64, 128, requires_grad=True)
        context.__enter__()
        y = Leaves.apply(x * 2.0).sum()
        y.backward()
        assert torch.allclose(x.grad, 4 * x.detach())
        print("end")
    """)
    assert out.strip() == "end"


@pytest.mark.parametrize("bits", [2, "exact"])
def test_a_loop_that_reuses_its_buffers(bits: Any) -> None:
    """Storages freed and allocated again at the same address were skipped as already stored (trl#6241)."""
    x = torch.ones(64, 256, requires_grad=True)
    total = torch.zeros(64, 256)
    terms = []
    with compressed(bits, min_bytes=0):
        for index in range(50):
            buffer = torch.full((64, 256), float(index))
            total += buffer
            terms.append(x * buffer)
            del buffer
    torch.stack(terms).sum().backward()
    assert_same_bits(x.grad, total, "constants are exact at every width")


def test_errors_of_torch_are_those_of_torch() -> None:
    """A wrong shape inside the context reads as outside of it."""

    def message(context: Any) -> str:
        with pytest.raises(RuntimeError) as caught, context:
            nn.Linear(4, 4)(torch.randn(3, 5, requires_grad=True))
        return str(caught.value)

    assert message(compressed(4)) == message(contextlib.nullcontext())
    assert issubclass(daf_rs.DafError, Exception)
