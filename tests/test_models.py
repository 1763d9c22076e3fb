"""The models of `daf_rs.testing`, and what the package makes of them: bytes saved, training that still learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import compressed, cosine, gradients, needs_node_hook, plain_saved_bytes, train
from torch import Tensor

from daf_rs.testing import models

# --- The models themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.MODELS)
def test_a_seed_gives_the_same_weights_and_batches_and_leaves_the_global_state_alone(name: str) -> None:
    state = torch.get_rng_state()
    one, two, other = models.build(name, 3), models.build(name, 3), models.build(name, 4)
    first, second, third = one.make_batch(5, 2), two.make_batch(5, 2), one.make_batch(6, 2)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)
    assert not torch.equal(first.inputs, third.inputs)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_learn_from_their_batches(name: str) -> None:
    model = models.build(name)
    batch = model.make_batch(0, 4)
    losses = train(model, [batch] * 8)
    assert losses[-1] < losses[0]


def test_resnet20_has_the_published_number_of_parameters() -> None:
    # He et al. give 0.27 M; theirs has shortcuts without parameters, these have 1x1 convolutions.
    assert models.resnet20().parameter_count() == 272_474
    assert len([m for m in models.resnet20().modules() if isinstance(m, torch.nn.Conv2d)]) == 19 + 2


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_decoders_do_not_look_ahead(name: str) -> None:
    model = models.build(name, layers=2).eval()
    tokens = model.make_batch(0, 2).inputs
    changed = tokens.clone()
    changed[:, 64:] = (changed[:, 64:] + 1) % 256
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert torch.allclose(first[:, :64], second[:, :64], atol=1e-5)
    assert not torch.allclose(first[:, 64:], second[:, 64:], atol=1e-2)


def test_rotary_positions_show_only_distances() -> None:
    from daf_rs.testing.models import _rotate

    model = models.llama()
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def score(i: int, j: int) -> Tensor:
        a = _rotate(q, model.cos[i : i + 1], model.sin[i : i + 1])
        b = _rotate(k, model.cos[j : j + 1], model.sin[j : j + 1])
        return (a * b).sum()

    assert torch.allclose(score(3, 7), score(50, 54), atol=1e-4)
    assert not torch.allclose(score(3, 7), score(3, 9), atol=1e-3)


def test_an_unknown_name_and_bad_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="resnet20"):
        models.build("resnet21")
    for options in ({"width": 100, "heads": 3}, {"width": 128, "heads": 4, "kv_heads": 3}):
        with pytest.raises(ValueError, match="heads"):
            models.llama(**options)
    with pytest.raises(ValueError, match="patch"):
        models.vit(patch=5)


# --- What the package makes of them --------------------------------------------------------------------

#: name -> (options, batch, smallest ratio of plain to live bytes at 4 and at 2 bits).
RATIOS: dict[str, tuple[dict[str, Any], int, float, float | None]] = {
    "resnet20": ({}, 64, 7.5, 12.5),
    "gpt": ({}, 8, 6.0, 8.0),
    "vit": ({}, 32, 6.0, None),
    "llama": ({}, 8, 6.0, None),
    # Beside the opaque workspace, which is 83 % of what an LSTM saves.
    "lstm": ({}, 16, 5.0, None),
}


@needs_node_hook
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", RATIOS)
def test_saved_bytes_shrink_as_promised(name: str, bits: int) -> None:
    options, size, four, two = RATIOS[name]
    limit = four if bits == 4 else two
    if limit is None:
        pytest.skip("no promise is made at this width")
    model = models.build(name, **options)
    batch = model.make_batch(0, size)
    plain = plain_saved_bytes(lambda: batch.loss(model), model)
    with compressed(bits, model=model) as saved:
        loss = batch.loss(model)
    live = saved.stats().live_bytes
    workspaces = sum(row.plain_bytes for row in saved.report().rows if row.dtype == "uint8")
    plain, live = plain - workspaces, live - workspaces
    assert plain / live >= limit, f"{plain} / {live} = {plain / live:.2f}\n{saved.report()}"
    loss.backward()


#: Smallest cosine between the compressed and the plain gradient of one batch.
COSINES = {8: 0.999, 4: 0.95}


@needs_node_hook
@pytest.mark.parametrize("bits", COSINES)
@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_point_the_same_way(name: str, bits: int) -> None:
    model = models.build(name)
    batch = model.make_batch(0, 8)
    plain_loss, plain = gradients(model, batch)
    loss, ours = gradients(model, batch, compressed(bits, model=model, seed=1))
    assert torch.equal(loss, plain_loss), "the forward is not touched"
    assert ours.keys() == plain.keys()
    assert cosine(ours, plain) > COSINES[bits]


@needs_node_hook
@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_average_to_the_plain_one(name: str) -> None:
    """The error is noise, not bias: the mean of 16 draws is closer than one draw."""
    options: dict[str, Any] = {"width": 8} if name == "resnet20" else {"width": 64}
    model = models.build(name, **options)
    batch = model.make_batch(0, 4)
    _, plain = gradients(model, batch)
    total: dict[str, Tensor] = {}
    single = []
    for seed in range(16):
        _, ours = gradients(model, batch, compressed(3, model=model, seed=seed))
        single.append(_distance(ours, plain))
        for key, value in ours.items():
            total[key] = total.get(key, torch.zeros_like(value)) + value / 16
    assert _distance(total, plain) < 0.55 * sum(single) / len(single)


def _distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return sum(float((one[k] - two[k]).double().pow(2).sum()) for k in two) ** 0.5


@needs_node_hook
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", models.MODELS)
def test_training_learns_as_well_as_plain_pytorch(name: str, bits: int) -> None:
    options: dict[str, Any] = {"width": 8} if name == "resnet20" else {"width": 64, "layers": 2}
    model = models.build(name, **options)
    twin = copy.deepcopy(model)
    batches = [model.make_batch(i % 4, 8) for i in range(24)]
    plain = torch.stack(train(twin, batches))
    context = compressed(bits, model=model, seed=2)
    ours = torch.stack(train(model, batches, lambda: context))
    learned_plain, learned = plain[:4].mean() - plain[-4:].mean(), ours[:4].mean() - ours[-4:].mean()
    assert learned_plain > 0
    assert learned > 0.8 * learned_plain


@needs_node_hook
def test_every_row_of_every_model_says_what_became_of_it() -> None:
    for name in models.MODELS:
        model = models.build(name)
        batch = model.make_batch(0, 4)
        with compressed(4, model=model) as saved:
            loss = batch.loss(model)
        unknown = [row for row in saved.report().rows if row.unknown and row.plain_bytes > 0]
        assert unknown == [], f"{name} uses a reader that the policy does not know"
        for row in saved.report().rows:
            assert row.op, row
            assert row.field, row
            assert row.why, row
        del loss
