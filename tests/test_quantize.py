"""`quantize` and `dequantize`: what comes back, for every dtype, width, layout and content."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits, bits_of, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from value_cases import (
    DTYPES,
    GROUP_SIZES,
    LAYOUTS,
    ROUNDINGS,
    Case,
    cases,
    content,
    error_bound,
    group_extremes,
    group_numbers,
    lay_out,
    memory_order,
    repeats_memory,
)

import daf_rs


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill their span of memory without gaps or repeats."""
    return not repeats_memory(x) and memory_order(x).is_contiguous()


def possible_groups(case: Case, quantized: daf_rs.QuantizedTensor) -> tuple[str, ...]:
    """The shapes of group that the settings allow: the one that the result names, else both."""
    return (quantized.groups,) if quantized.groups in ("row", "channel") else ("row", "channel")


@given(cases(groups=("row", "channel", "auto")))
def test_error_stays_within_the_bound_of_each_group(case: Case) -> None:
    x = case.tensor
    quantized = daf_rs.quantize(x, **case.settings)
    back = daf_rs.dequantize(quantized)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    assert back.device == x.device
    if x.numel() == 0:
        return
    ordered = memory_order(x)
    result = memory_order_like(x, back).reshape(-1)
    flat = ordered.reshape(-1)
    bound = torch.stack(
        [
            error_bound(ordered, case.bits, case.group_size, case.rounding, groups)
            for groups in possible_groups(case, quantized)
        ]
    ).amax(0)
    finite = torch.isfinite(flat)
    error = (result[finite].double() - flat[finite].double()).abs()
    excess = error - bound[finite]
    worst = int(excess.argmax()) if excess.numel() else 0
    assert not (excess > 0).any(), (
        f"{int((excess > 0).sum())} of {flat.numel()} errors exceed the bound; the worst at {worst}: "
        f"error {error[worst]}, bound {bound[finite][worst]}"
    )


def memory_order_like(x: Tensor, other: Tensor) -> Tensor:
    """`other` with its dimensions permuted as `memory_order(x)` does to `x`."""
    if repeats_memory(x):
        return other
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d) if x.shape[d] > 1 else -(2**62))
    return other.permute(order)


@given(cases(kinds=("special",), groups=("row", "channel")))
def test_groups_with_nan_or_infinity_come_back_bit_for_bit(case: Case) -> None:
    x = case.tensor
    quantized = daf_rs.quantize(x, **case.settings)
    back = daf_rs.dequantize(quantized)
    special = ~torch.isfinite(x)
    assert torch.equal(torch.isnan(back), torch.isnan(x))
    assert_same_bits(back[special], x[special], "non-finite values")
    if x.numel():
        ordered, result = memory_order(x), memory_order_like(x, back)
        groups = possible_groups(case, quantized)
        assert len(groups) == 1, f"asked for {case.groups} groups, the result says {quantized.groups!r}"
        low, high = group_extremes(ordered.reshape(-1).double(), group_numbers(ordered, case.group_size, groups[0]))
        raw = ~torch.isfinite(low + high)
        assert_same_bits(result.reshape(-1)[raw], ordered.reshape(-1)[raw], "groups with a non-finite value")


@given(cases(kinds=("constant", "all_zero")))
def test_constants_are_exact(case: Case) -> None:
    back = daf_rs.dequantize(daf_rs.quantize(case.tensor, **case.settings))
    assert_same_bits(back, case.tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", ["row", "channel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zeros_stay_zero_and_positives_positive(dtype: torch.dtype, groups: str, bits: int) -> None:
    x = content("zeros", (1024, 96), dtype, seed=3)
    assert (x == 0).float().mean() > 0.6
    quantized = daf_rs.quantize(x, bits=bits, groups=groups, seed=5)
    back = daf_rs.dequantize(quantized)
    assert torch.equal(back == 0, x == 0)
    assert torch.equal(back > 0, x > 0)
    # A zero costs its one bit: the codes of the others are compacted.
    nonzero = int((x != 0).sum())
    codes = (x.numel() + bits * nonzero) / 8
    assert quantized.nbytes < codes * 1.05 + 4 * x.numel() / 256 + 512


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zeros_of_signed_values_stay_zero(dtype: torch.dtype, bits: int) -> None:
    x = content("normal", (512, 128), dtype, seed=4)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.8] = 0
    back = daf_rs.dequantize(daf_rs.quantize(x, bits=bits, seed=5))
    assert (back[x == 0] == 0).all()


@given(cases())
def test_shape_dtype_and_dense_strides_come_back(case: Case) -> None:
    x = case.tensor
    before, version = bits_of(x).clone(), x._version
    quantized = daf_rs.quantize(x, **case.settings)
    back = daf_rs.dequantize(quantized)
    assert tuple(quantized.shape) == tuple(x.shape)
    assert quantized.dtype == x.dtype
    assert quantized.bits == case.bits
    assert quantized.group_size == case.group_size
    assert quantized.rounding == case.rounding
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
    if is_dense(x):
        significant = [d for d in range(x.dim()) if x.shape[d] > 1]
        assert [back.stride(d) for d in significant] == [x.stride(d) for d in significant]
    assert not back.requires_grad
    assert torch.equal(bits_of(x), before), "quantize changed its input"
    assert x._version == version


@given(cases(), st.integers(0, 2**63 - 1))
def test_a_seed_gives_the_same_bytes_always(case: Case, other: int) -> None:
    settings = {**case.settings, "seed": other}
    first = daf_rs.quantize(case.tensor, **settings)
    torch.randn(3)
    second = daf_rs.quantize(case.tensor.clone(), **settings) if is_dense(case.tensor) else None
    third = daf_rs.quantize(case.tensor, **settings)
    assert first.to_bytes() == third.to_bytes()
    assert first == third
    if second is not None:
        assert first.to_bytes() == second.to_bytes()
    assert_same_bits(daf_rs.dequantize(first), daf_rs.dequantize(third))
    assert_same_bits(daf_rs.dequantize(first), daf_rs.dequantize(first))


@pytest.mark.parametrize("rounding", ["dither", "stochastic"])
def test_without_a_seed_the_noise_is_fresh_and_torch_is_not_asked_for_it(rounding: str) -> None:
    x = content("normal", (4096,), torch.float32, seed=1)
    state = torch.get_rng_state()
    drawn = [daf_rs.dequantize(daf_rs.quantize(x, bits=2, rounding=rounding)) for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), state)
    for i in range(4):
        for j in range(i):
            assert not torch.equal(drawn[i], drawn[j])


def test_near_seeds_share_nothing() -> None:
    x = content("normal", (65536,), torch.float32, seed=1)
    errors = [daf_rs.dequantize(daf_rs.quantize(x, bits=4, seed=s)) - x for s in (0, 1, 2, 3)]
    for i in range(4):
        for j in range(i):
            correlation = torch.corrcoef(torch.stack([errors[i], errors[j]]))[0, 1]
            assert abs(correlation) < 5 / len(x) ** 0.5


def test_nearest_does_not_depend_on_the_seed() -> None:
    x = content("normal", (5000,), torch.float32, seed=1)
    first = daf_rs.dequantize(daf_rs.quantize(x, rounding="nearest", seed=1))
    assert_same_bits(daf_rs.dequantize(daf_rs.quantize(x, rounding="nearest", seed=2)), first)
    assert_same_bits(daf_rs.dequantize(daf_rs.quantize(x, rounding="nearest")), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", ["row", "channel"])
def test_the_thread_count_does_not_change_the_bytes(dtype: torch.dtype, layout: str, groups: str) -> None:
    x = lay_out(content("zeros", (6, 64, 60, 50), dtype, seed=9), layout)
    one = daf_rs.quantize(x, bits=3, groups=groups, seed=4, threads=1)
    two = daf_rs.quantize(x, bits=3, groups=groups, seed=4, threads=2)
    default = daf_rs.quantize(x, bits=3, groups=groups, seed=4)
    assert one.to_bytes() == two.to_bytes() == default.to_bytes()
    assert_same_bits(daf_rs.dequantize(one), daf_rs.dequantize(two))


@pytest.mark.parametrize("groups", ["row", "channel"])
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "permuted", "gapped", "strided"])
def test_elements_are_taken_in_memory_order(groups: str, layout: str) -> None:
    """The codes of a permuted tensor are those of its memory, so its layout costs nothing and changes nothing."""
    x = lay_out(content("normal", (4, 24, 20, 22), torch.float32, seed=2), layout)
    ordered = memory_order(x).contiguous()
    back = daf_rs.dequantize(daf_rs.quantize(x, bits=4, groups=groups, seed=6))
    straight = daf_rs.dequantize(daf_rs.quantize(ordered, bits=4, groups=groups, seed=6))
    assert_same_bits(memory_order_like(x, back).contiguous(), straight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_nbytes_counts_everything(dtype: torch.dtype, bits: int) -> None:
    x = content("normal", (1024, 1024), dtype, seed=1)
    quantized = daf_rs.quantize(x, bits=bits, group_size=256, groups="row", seed=0)
    expected = x.numel() * (bits / 8 + 4 / 256)
    assert expected <= quantized.nbytes <= expected * 1.01 + 1024
    assert abs(len(quantized.to_bytes()) - quantized.nbytes) <= 0.01 * quantized.nbytes + 1024


def test_an_expanded_tensor_costs_what_it_shows_of_memory() -> None:
    row = content("normal", (1, 4096), torch.float32, seed=1)
    one = daf_rs.quantize(row, bits=4, groups="row", seed=0)
    many = daf_rs.quantize(row.expand(64, 4096), bits=4, groups="row", seed=0)
    back = daf_rs.dequantize(many)
    assert back.shape == (64, 4096)
    bound = error_bound(row, 4, 256, "dither", "row")
    assert ((back.double() - row.double()).abs() <= bound).all()
    assert many.nbytes <= 64 * one.nbytes


def test_a_tensor_that_requires_grad_is_taken_as_its_values() -> None:
    x = content("normal", (300,), torch.float32, seed=1).requires_grad_()
    quantized = daf_rs.quantize(x, seed=1)
    assert quantized == daf_rs.quantize(x.detach(), seed=1)
    assert not daf_rs.dequantize(quantized).requires_grad


def test_conjugate_and_negative_views_are_read_as_their_values() -> None:
    z = torch.complex(torch.randn(500), torch.randn(500))
    negative = z.conj().imag
    assert negative.is_neg()
    back = daf_rs.dequantize(daf_rs.quantize(negative, bits=8, seed=1))
    plain = daf_rs.dequantize(daf_rs.quantize(negative.resolve_neg().contiguous(), bits=8, seed=1))
    assert (back - negative).abs().max() < 0.1
    assert (plain - negative).abs().max() < 0.1


def test_defaults_are_the_documented_ones() -> None:
    q = daf_rs.quantize(torch.randn(1000))
    assert (q.bits, q.group_size, q.rounding) == (4, 256, "dither")


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1023, 1025, 32767, 32768, 32769])
def test_every_group_size_at_the_edges_of_groups_and_blocks(group_size: int, rounding: str, length: int) -> None:
    x = content("normal", (length,), torch.float32, seed=length)
    back = daf_rs.dequantize(daf_rs.quantize(x, bits=5, group_size=group_size, rounding=rounding, groups="row", seed=1))
    assert back.shape == x.shape
    if length:
        assert ((back.double() - x.double()).abs() <= error_bound(x, 5, group_size, rounding, "row")).all()


def test_a_short_tail_is_not_padded_with_zeros() -> None:
    """Padding would stretch the range of the tail group from 1 to 1001."""
    x = 1000 + torch.rand(256 + 5)
    back = daf_rs.dequantize(daf_rs.quantize(x, bits=4, group_size=256, groups="row", seed=1))
    assert (back[256:] - x[256:]).abs().max() < 0.1


def test_ranges_beyond_float32_stay_finite_or_exact() -> None:
    x = torch.tensor([-3.4e38, 3.4e38] * 500)
    back = daf_rs.dequantize(daf_rs.quantize(x, bits=4, seed=1))
    assert torch.isfinite(back).all()
    assert same_bits(back, x), "max - min overflows float32, so the group is kept raw"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_values_at_the_limit_of_a_half_type_decode_to_finite_ones(dtype: torch.dtype, rounding: str) -> None:
    x = (torch.rand(4096) * 2 - 1).to(dtype) * torch.finfo(dtype).max
    x[::7] = torch.finfo(dtype).max
    x[3::7] = torch.finfo(dtype).min
    for bits in (1, 2, 4, 8):
        back = daf_rs.dequantize(daf_rs.quantize(x, bits=bits, rounding=rounding, seed=1))
        assert torch.isfinite(back).all()


def test_flush_to_zero_of_the_calling_thread_changes_nothing() -> None:
    x = content("subnormal", (4096,), torch.float32, seed=1)
    expected = daf_rs.dequantize(daf_rs.quantize(x, bits=4, seed=1))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        quantized = daf_rs.quantize(x, bits=4, seed=1)
        back = daf_rs.dequantize(quantized)
        still = (torch.tensor([1e-40]) * 1.0).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert still, "the thread's mode was not restored"
    assert_same_bits(back, expected)
