"""The policy table against PyTorch: its names, and its claims about what backward reads.

Claims are checked on PyTorch alone, by replacing what backward finds (see `policy_cases`): under "unused" and the
masks, gradients must not change by one bit. `test_policy_errors` measures the value codes.
"""

from __future__ import annotations

import doctest
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import CASES, Reader, Recording, Saved, all_readers, readers_of, record, same_bits

import daf_rs
from daf_rs import policy
from daf_rs.exceptions import InvalidArgumentError
from daf_rs.policy import TABLE, UNKNOWN, Rule, lookup, register_consumer, representatives, resolve
from daf_rs.policy_rule import round_up, step_up

NEEDS_A_MASK = ("mask", "within", "not_beyond", "sign")
#: PyTorch's CPU kernels treat NaN in whole vectors unlike NaN in the tail (see test_nan_where_pytorch_disagrees).
NAN_DISAGREES = ("HardtanhBackward0", "HardshrinkBackward0", "SoftshrinkBackward0")

#: Readers whose rule is less than exact and that no CPU build of PyTorch runs, so that nothing here tests them.
NOT_RUN_HERE = {
    r"(Cudnn|Miopen|Mps|LstmMps)": "another backend's kernel",
    r"ScaledDotProduct(Flash|Efficient|Cudnn|FusedAttentionOverrideable)AttentionBackward0": "CUDA",
    r"ScaledDotProductFusedAttentionOverrideableBackward0": "a third backend's kernel",
    r"(Flash|Efficient)AttentionBackward0": "CUDA",
    r"FusedRmsNormBackward0": "composite on CPU",
    r"ConvDepthwise[23]DBackward0": "CUDA",
    r"(ConvolutionBackward1|ConvolutionOverrideableBackward0)": "a third backend's kernel",
    r"(NnpackSpatialConvolution|MkldnnConvolution|MkldnnLinear)Backward0": "mkldnn tensors or mobile only",
    r"(Linear|Matmul)Backward0": "composite but for nested tensors and MPS",
    r"(GroupedMm|ForeachMm)Backward0": "not for f32 on CPU",
    r"RreluWithNoiseFunctionalBackward0": "made by compiled graphs only",
}

#: Entries that the installed PyTorch may lack, and the first version that has them (or the last one).
OTHER_VERSIONS = {
    "AminmaxBackward0": ("since", (2, 12)),
    "ForeachMmBackward0": ("since", (2, 13)),
    "NextafterBackward0": ("since", (2, 13)),
    "LinalgMatrixSqrthBackward0": ("since", (2, 14)),
    "LinalgPolarBackward0": ("since", (2, 14)),
    "CholeskyBackward0": ("until", (2, 13)),
}


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# --- names


@pytest.fixture(scope="session")
def derivatives() -> dict[Reader, str]:
    """What derivatives.yaml of the installed PyTorch saves: reader -> C++ type."""
    import torchgen
    from torchgen.packaged.autograd.load_derivatives import load_derivatives

    home = Path(torchgen.__file__).parent / "packaged"
    native = home / "ATen" / "native"
    infos, _ = load_derivatives(
        str(home / "autograd" / "derivatives.yaml"),
        str(native / "native_functions.yaml"),
        str(native / "tags.yaml"),
    )
    found = {}
    for per_key in infos.values():
        for info in per_key.values():
            for saved in [*info.all_saved_inputs, *info.all_saved_outputs]:
                name = saved.nctype.name
                name = name if isinstance(name, str) else name.name
                if info.op is not None:
                    found[info.op, name] = str(saved.nctype.type)
    return found


def is_tensor(cpp_type: str) -> bool:
    return bool(re.search(r"name='Tensor(List)?'", cpp_type))


def test_every_entry_names_something_that_pytorch_saves(derivatives: dict[Reader, str]) -> None:
    saved = {reader for reader, kind in derivatives.items() if is_tensor(kind)}
    for node, field in sorted(set(TABLE) - saved):
        assert node in OTHER_VERSIONS, f"PyTorch {torch.__version__} saves no {field} in {node}"
        how, version = OTHER_VERSIONS[node]
        absent = torch_version() < version if how == "since" else torch_version() > version
        assert absent, f"{node}.{field} should be in PyTorch {torch.__version__}"


def test_attributes_are_saved_by_the_node(derivatives: dict[Reader, str]) -> None:
    for (node, _), rule in TABLE.items():
        for attribute in filter(None, rule.attrs):
            assert (node, attribute.removeprefix("_saved_")) in derivatives, (node, attribute)


def test_the_rest_of_what_pytorch_saves_is_kept_losslessly(derivatives: dict[Reader, str]) -> None:
    saved = {reader for reader, kind in derivatives.items() if is_tensor(kind)}
    rest = saved - set(TABLE)
    print(f"{len(saved)} saved tensors in derivatives.yaml, {len(saved & set(TABLE))} in the table, {len(rest)} not")
    assert all(lookup(*reader) is UNKNOWN for reader in rest)
    assert UNKNOWN.kind == "exact"
    # What the table leaves out is double backward, sparse, nested and backend types, and special functions.
    ordinary = re.compile(r"BackwardBackward|BackwardData|Sparse|Nested|_copy$|Mkldnn|Mps|Miopen|Special|TestAutograd")
    left = {node for node, _ in rest if not ordinary.search(node)}
    assert left <= {
        "ComplexBackward0",
        "PolarBackward0",
        "SgnBackward0",
        "ToDenseBackward0",
        "ToMkldnnBackward0",
        "ToPaddedTensorBackward0",
        "ValuesBackward0",
        "MaxPool2DBackward0",
        "ConvolutionBackwardOverrideableBackward0",
    }


def test_every_claim_is_tested_or_excused() -> None:
    claimed = {reader for reader, rule in TABLE.items() if rule.kind != "exact" or rule.attrs}
    tested = {reader for _, reader, _ in all_readers()}
    untested = {node for node, _ in claimed - tested}
    excuses = re.compile("|".join(f"({pattern}.*)" for pattern in NOT_RUN_HERE))
    assert [node for node in sorted(untested) if not excuses.fullmatch(node)] == []


# --- never read


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(("name", "reader"), readers_of("unused"))
def test_unused_is_not_read(name: str, reader: Reader, twice: bool) -> None:
    recording = record(name)
    expected = recording.gradients(twice=twice)
    assert expected
    assert all(bool(g.isfinite().all()) for g in expected)

    def poison(saved: Saved) -> torch.Tensor:
        return torch.full_like(saved.tensor, math.nan) if saved.reader == reader else saved.tensor

    assert same_bits(recording.gradients(poison, twice=twice), expected)


# --- only compared with a constant

THRESHOLDS = (0.0, 0.5, -0.25, 1.0, -1.0, 2.0, 6.0, 3.0, -3.0, -0.5, 0.25, -0.1, 0.3)


def special_values(dtype: torch.dtype, *, nan: bool) -> torch.Tensor:
    """Every threshold of the cases with its neighbours, zeros of both signs, subnormals, infinities, NaN."""
    exact = torch.tensor(THRESHOLDS, dtype=dtype)
    far = torch.full_like(exact, math.inf)
    values = [exact, torch.nextafter(exact, far), torch.nextafter(exact, -far)]
    info = torch.finfo(dtype)
    values.append(
        torch.tensor([0.0, -0.0, info.tiny, -info.tiny, info.max, info.min, math.inf, -math.inf], dtype=dtype)
    )
    if nan:
        values.append(torch.tensor([math.nan], dtype=dtype))
    return torch.cat(values)


def with_special_values(name: str, dtype: torch.dtype, *, nan: bool) -> Recording:
    """Runs a case on a vector with special values at its start (a whole vector) and its end (the tail)."""
    op, inputs = CASES[name](torch.Generator().manual_seed(0))
    values = special_values(dtype, nan=nan)
    data = torch.cat([values, inputs[0].detach().to(dtype), values.flip(0)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Recording(op, [data.requires_grad_()])


def is_set(rule: Rule, x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    if rule.kind == "mask":
        return ~(x <= rule.consts[0])
    low, high = rule.consts
    return (x >= low) & (x <= high) if rule.kind == "within" else ~((x <= low) | (x >= high))


def masked(rule: Rule, x: torch.Tensor) -> torch.Tensor:
    """What the codes of a mask or sign rule decode to."""
    if rule.kind == "sign":
        assert not bool(x.isnan().any())  # such a tensor is kept exactly
        return x.sign()
    chosen, rest = representatives(rule, x.dtype)
    return torch.where(is_set(rule, x), torch.tensor(chosen, dtype=x.dtype), torch.tensor(rest, dtype=x.dtype))


def mask_cases() -> list[Any]:
    """Case, dtype, and whether backward is run twice, as far as PyTorch implements them."""
    # normalize clamps its norms; norm1's own result would be infinite.
    names = sorted({name for name, _, rule in all_readers() if rule.kind in NEEDS_A_MASK} - {"normalize", "norm1"})
    return [
        pytest.param(name, dtype, twice, id=f"{name}-{dtype}-{'twice' if twice else 'once'}")
        for name in names
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for twice in (False, True)
        if not (name == "hardsigmoid" and twice) and not (name == "rrelu" and dtype == torch.float16)
    ]


@pytest.mark.parametrize(("name", "dtype", "twice"), mask_cases())
def test_masks_give_the_same_gradients(name: str, dtype: torch.dtype, twice: bool) -> None:
    op = record(name)
    nan = not op.readers() & {(node, "self") for node in NAN_DISAGREES} and name != "abs"
    recording = with_special_values(name, dtype, nan=nan)
    expected = recording.gradients(twice=twice)
    replaced = []

    def replace(saved: Saved) -> torch.Tensor:
        rule = resolve(saved.node, saved.field, saved.tensor.dtype)
        if rule.kind not in NEEDS_A_MASK:
            return saved.tensor
        replaced.append(rule)
        return masked(rule, saved.tensor)

    assert same_bits(recording.gradients(replace, twice=twice), expected)
    inexact = name == "clamp_at_inexact_bounds" and dtype != torch.float32
    assert bool(replaced) != inexact


def test_norm1_gives_the_same_gradients() -> None:
    recording = record("norm1")
    (saved,) = (saved for saved in recording.saved if saved.field == "self")
    assert resolve(saved.node, "self").kind == "sign"
    got = recording.gradients(lambda s: s.tensor.sign() if s is saved else s.tensor)
    assert same_bits(got, recording.gradients())


@pytest.mark.parametrize("name", ["hardtanh", "hardshrink", "softshrink"])
def test_nan_where_pytorch_disagrees(name: str) -> None:
    """PyTorch passes the gradient of a NaN in the tail and drops it in whole vectors; the codes pass it."""
    op, _ = CASES[name](torch.Generator())
    data = torch.full((67,), math.nan, requires_grad=True)
    recording = Recording(op, [data])
    (plain,) = recording.gradients()
    (coded,) = recording.gradients(lambda s: masked(resolve(s.node, s.field, s.tensor.dtype), s.tensor))
    (grad_output,) = recording.grad_outputs
    assert torch.equal(coded, grad_output)
    assert torch.equal(plain[64:], grad_output[64:])
    assert not torch.equal(plain, grad_output)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        Rule("mask", consts=(0.0,)),
        Rule("mask", consts=(-math.inf,)),
        Rule("mask", consts=(math.inf,)),
        Rule("mask", consts=(7.5,)),
        Rule("within", consts=(-math.inf, math.inf)),
        Rule("within", consts=(5.0, 5.0)),
        Rule("within", consts=(step_up(5.0), 6.0)),
        Rule("not_beyond", consts=(0.0, 6.0)),
        Rule("not_beyond", consts=(-math.inf, 0.0)),
        Rule("not_beyond", consts=(5.0, 5.25)),
    ],
    ids=lambda rule: f"{rule.kind}{rule.consts}",
)
def test_representatives_are_on_their_side(rule: Rule, dtype: torch.dtype | None) -> None:
    chosen, rest = representatives(rule, dtype)
    both = torch.tensor([chosen, rest], dtype=dtype or torch.float32)
    assert is_set(rule, both).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_up_agrees_with_torch(dtype: torch.dtype) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = values * 10.0 ** torch.linspace(-9, 6, 500, dtype=torch.float64)
    ends = torch.tensor([0.0, 1.0, 65504.0, -65504.0, 65520.0, -65520.0, 2.0**-24, -(2.0**-24), 2.0**-14, 3.3e38])
    for value in [*values.tolist(), *ends.tolist()]:
        nearest = torch.tensor(value, dtype=torch.float64).to(dtype)
        if float(nearest) < value:
            nearest = torch.nextafter(nearest, torch.tensor(math.inf, dtype=dtype))
        assert round_up(value, dtype) == float(nearest), value


def test_resolving_makes_no_tensors() -> None:
    """It runs inside of hooks, whatever the default device there."""
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    node = x.clamp(-0.5, 0.1).grad_fn
    with torch.device("meta"):
        rule = resolve(node, "self", torch.bfloat16)
        representatives(Rule("within", consts=(5.0, 5.25)), torch.float16)
    assert rule.kind == "exact"


def test_representatives_of_an_empty_range_are_finite() -> None:
    assert representatives(Rule("within", consts=(2.0, 1.0))) == (1.0, 0.0)


def test_representatives_need_a_threshold() -> None:
    with pytest.raises(InvalidArgumentError, match="only mask, within and not_beyond"):
        representatives(Rule("value"))


# --- rules that depend on the node


@pytest.mark.parametrize(
    ("exponent", "kind", "floor"),
    [
        (2, "value", 1),
        (2.0, "value", 1),
        (3, "value", 3),
        (4.0, "value", 3),
        *((exponent, "exact", 1) for exponent in (1, 0, 0.5, -1, -2.0, 2.5)),
    ],
)
def test_powers(exponent: float, kind: str, floor: int) -> None:
    x = torch.rand(8, requires_grad=True)
    node = torch.pow(x, exponent).grad_fn
    assert node is not None
    assert lookup(node.name(), "self").kind == "exact"  # safe where nobody resolves
    rule = resolve(node, "self")
    assert (rule.kind, rule.floor, rule.attrs) == (kind, floor, ())


def test_elu_has_a_kink_unless_alpha_is_one() -> None:
    x = torch.randn(8, requires_grad=True)
    functional = torch.nn.functional
    floors = [
        resolve(y.grad_fn, "self").width(2) for y in (functional.elu(x), functional.elu(x, 0.5), functional.selu(x))
    ]
    assert floors == [3, 8, 8]


@pytest.mark.parametrize(
    ("order", "kind"), [(2, "value"), (1, "sign"), (math.inf, "exact"), (0, "exact"), (3, "exact")]
)
def test_norms(order: float, kind: str) -> None:
    x = torch.rand(8, requires_grad=True)
    node = torch.linalg.vector_norm(x, order).grad_fn
    assert resolve(node, "self").kind == kind


def test_clamp_reads_the_installed_formula() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    y = x.clamp(-1, 1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert policy._clamp_is_strict() == (grad[0] == 0)
    low, high = resolve(y.grad_fn, "self", torch.float32).consts
    assert (low <= -1.0 <= high, low <= 1.0 <= high) == (grad[0] != 0, grad[2] != 0)


def test_clamp_is_exact_where_its_formula_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_clamp_is_strict", lambda: None)
    x = torch.ones(3, requires_grad=True)
    rule = resolve(x.clamp(-1, 1).grad_fn, "self", torch.float32)
    assert rule.kind == "exact"
    assert "cannot be told" in rule.why


def test_a_threshold_that_the_dtype_cannot_hold_is_exact() -> None:
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    node = torch.nn.functional.threshold(x, 0.1, 0.0).grad_fn
    assert resolve(node, "self", torch.bfloat16).kind == "exact"
    assert resolve(node, "self", torch.float32).consts == (pytest.approx(0.1),)
    node = torch.nn.functional.threshold(x, math.nan, 0.0).grad_fn
    assert resolve(node, "self", torch.float32).kind == "exact"


def test_resolve_leaves_plain_rules_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    assert resolve(x.relu().grad_fn, "result") is TABLE["ReluBackward0", "result"]


# --- the rules themselves


def test_widths() -> None:
    q = lookup("ScaledDotProductFlashAttentionForCpuBackward0", "query")
    assert [q.width(b) for b in (1, 2, 4, 7, 8)] == [3, 4, 6, 8, 8]
    assert (q.axis, q.guard) == ("heads", "q")
    gelu = lookup("GeluBackward0", "self")
    assert [gelu.width(b) for b in (1, 2, 3, 4, 8)] == [3, 3, 3, 4, 8]
    assert lookup("SoftmaxBackward0", "result").width(2) == 8
    assert policy.BOUNDARY.width(2) == 8


def test_every_rule_explains_itself() -> None:
    assert all(rule.why for rule in [*TABLE.values(), UNKNOWN, policy.BOUNDARY])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lossy"}, "kind must be one of unused, mask"),
        ({"bits": 0}, "bits must be an integer from 1 to 8 or None; got 0"),
        ({"bits": 9}, "got 9"),
        ({"bits": True}, "got True"),
        ({"bits": 2.0}, "got 2.0"),
        ({"floor": 0}, "floor must be"),
        ({"plus": -1}, "plus must be"),
        ({"plus": 8}, "plus must be"),
        ({"axis": "rows"}, "axis must be one of last, row, dim1"),
        ({"guard": "v"}, "guard must be"),
        ({"kind": "mask"}, "needs 1 threshold"),
        ({"kind": "within", "consts": (1.0,)}, "needs 2 threshold"),
    ],
)
def test_bad_rules(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Rule(**({"kind": "value"} | changes))


# --- the document


def test_document() -> None:
    document = Path(__file__).parent.parent / "docs" / "policy.md"
    result = doctest.testfile(str(document), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0


def test_document_names_every_kind() -> None:
    text = (Path(__file__).parent.parent / "docs" / "policy.md").read_text(encoding="utf-8")
    assert [kind for kind in policy.KINDS if f"| `{kind}` |" not in text] == []


# --- registering


@pytest.fixture(autouse=True)
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(policy, "_registered", {})
        yield
    policy._forget()  # the native layer keeps the rules of the nodes that it has met


def test_register_forms() -> None:
    register_consumer("MyBackward", "tensors", 5)
    assert lookup("MyBackward", "tensors").width(2) == 5
    register_consumer("MyBackward", "tensors", "value")
    assert lookup("MyBackward", "tensors").width(2) == 2
    register_consumer("MyBackward", "tensors", "unused")
    assert lookup("MyBackward", "tensors").kind == "unused"
    rule = Rule("mask", consts=(0.5,), why="mine")
    register_consumer("MyBackward", "tensors", rule)
    assert lookup("MyBackward", "tensors") is rule
    assert lookup("OtherBackward", "tensors") is UNKNOWN


@pytest.mark.parametrize("field", ["tensors", "saved_tensors", "_raw_saved_tensors"])
def test_register_takes_the_attribute_as_it_is_seen(field: str) -> None:
    register_consumer("MyBackward", field, "exact")
    assert lookup("MyBackward", "tensors").why == "as registered with register_consumer"


def test_register_overrides_the_table_but_leaves_it() -> None:
    register_consumer("ReluBackward0", "result", 8)
    assert lookup("ReluBackward0", "result").kind == "value"
    assert TABLE["ReluBackward0", "result"].kind == "mask"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "self", 4), "node must be a name such as 'MyFunctionBackward'; got ''"),
        (("My Backward", "self", 4), "node must be a name"),
        ((None, "self", 4), "node must be a name"),
        (("MyBackward", 3, 4), "field must be a name such as 'tensors'; got 3"),
        (("MyBackward", "self", 0), "a width from 1 to 8; got 0"),
        (("MyBackward", "self", 9), "got 9"),
        (("MyBackward", "self", True), "got True"),
        (("MyBackward", "self", None), "got None"),
        (("MyBackward", "self", "lossy"), "kind must be one of"),
        (("MyBackward", "self", "mask"), "needs its thresholds"),
    ],
)
def test_register_rejects(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        register_consumer(*arguments)
    assert lookup("MyBackward", "self") is UNKNOWN


def test_register_reaches_the_native_layer() -> None:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x * 1)
            return 3 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert ctx.saved_tensors[0].shape == grad.shape
            return 3 * grad

    def classes() -> list[str]:
        model = torch.nn.Module()
        for _ in range(2):  # before 2.15 PyTorch tells only backward who reads a tensor
            with daf_rs.save_compressed(4, min_bytes=0, model=model) as saved:
                y = Triple.apply(x)
            y.sum().backward()
        return [row.cls for row in saved.report()]

    x = torch.randn(64, 64, requires_grad=True)
    assert classes() == ["exact"]
    register_consumer("TripleBackward", "saved_tensors", 2)
    assert classes() == ["value"]
    register_consumer("TripleBackward", "saved_tensors", "unused")
    assert classes() == ["unused"]


def test_register_from_many_threads() -> None:
    def work(thread: int) -> None:
        for i in range(50):
            register_consumer(f"T{thread}N{i}Backward", "tensors", 1 + i % 8)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t in range(8):
        for i in range(50):
            assert lookup(f"T{t}N{i}Backward", "tensors").bits == 1 + i % 8


def test_custom_functions_are_unknown_until_registered() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    recording = Recording(Twice.apply, [torch.ones(3, requires_grad=True)])
    assert recording.readers() == {("TwiceBackward", "tensors")}
    assert lookup("TwiceBackward", "tensors") is UNKNOWN
    register_consumer("TwiceBackward", "saved_tensors", "unused")
    (saved,) = recording.saved
    assert resolve(saved.node, saved.field).kind == "unused"
