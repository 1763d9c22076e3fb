"""The report: rows, sums, text."""

from __future__ import annotations

import json

import pytest

from daf_rs.policy import UNKNOWN
from daf_rs.report import MIN_WIDTH, Report, Row, Totals, human

KIB = 1024


def row(index: int, **changes: object) -> Row:
    values: dict[str, object] = {
        "index": index,
        "module": "net.fc",
        "op": "AddmmBackward0",
        "field": "mat1",
        "shape": (64, 256),
        "dtype": "float32",
        "cls": "value",
        "bits": 4,
        "plain_bytes": 64 * KIB,
        "stored_bytes": 8 * KIB,
        "why": "",
        "shared": False,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def report() -> Report:
    return Report(
        [
            row(0),
            row(2, op="ReluBackward0", field="result", cls="mask", bits=1, stored_bytes=2 * KIB, module="net.act"),
            row(1, shared=True, plain_bytes=0, stored_bytes=0),
            row(3, op="LinalgQrBackward0", field="Q", cls="raw", bits=0, stored_bytes=64 * KIB, why="a factor"),
            row(4, op="MyFnBackward", field="tensors", cls="raw", bits=None, stored_bytes=64 * KIB, why=UNKNOWN.why),
            row(5, op="OtherBackward", field="tensors", cls="bool", bits=1, stored_bytes=2 * KIB, why=UNKNOWN.why),
        ]
    )


def test_is_a_sequence_in_the_order_of_the_forward(report: Report) -> None:
    assert [r.index for r in report] == [0, 1, 2, 3, 4, 5]
    assert len(report) == 6
    assert report[2].op == "ReluBackward0"


def test_sums(report: Report) -> None:
    assert report.totals == Totals(6, 5 * 64 * KIB, (8 + 2 + 64 + 64 + 2) * KIB)
    assert report.totals.ratio == pytest.approx(320 / 140)
    classes = report.by_class()
    assert sum(t.plain_bytes for t in classes.values()) == report.totals.plain_bytes
    assert sum(t.stored_bytes for t in classes.values()) == report.totals.stored_bytes
    assert next(iter(classes)) == "raw"
    assert classes["value"] == Totals(2, 64 * KIB, 8 * KIB)
    assert list(report.by_module()) == ["net.fc", "net.act"]
    assert report.by_op()["ReluBackward0", "result"].tensors == 1


def test_ratio_of_nothing_stored() -> None:
    assert Totals.of([row(0, cls="unused", stored_bytes=0)]).ratio is None
    assert Report([row(0, cls="unused", stored_bytes=0)]).to_dict()["totals"]["ratio"] is None


def test_dict_is_json(report: Report) -> None:
    back = json.loads(json.dumps(report.to_dict()))
    assert back["totals"]["tensors"] == 6
    assert back["rows"][0] == {
        "index": 0,
        "module": "net.fc",
        "op": "AddmmBackward0",
        "field": "mat1",
        "shape": [64, 256],
        "dtype": "float32",
        "class": "value",
        "bits": 4,
        "plain_bytes": 64 * KIB,
        "stored_bytes": 8 * KIB,
        "why": "",
        "shared": False,
    }
    assert back["classes"]["mask"]["stored_bytes"] == 2 * KIB


def test_unknown_readers_come_first_with_the_way_out(report: Report) -> None:
    assert [r.index for r in report.unknown()] == [4, 5]
    text = str(report)
    lines = text.splitlines()
    assert "MyFnBackward.tensors" in lines[2]  # after the heads and the rule, the name whole
    assert "daf_rs.register_consumer('MyFnBackward', 'tensors', 8)" in text
    assert "save_compressed(unknown=8)" in text
    # What a lossless class made small needs no way out.
    told = text[text.index("it is not known how") :]
    assert "64.0 KiB in 1 tensor" in told
    assert "OtherBackward" not in told


def test_says_why_the_rest_is_not_smaller(report: Report) -> None:
    text = str(report)
    assert "Not compressed because\n  a factor: 64.0 KiB in 1 tensor (LinalgQrBackward0.Q)" in text
    only_small = str(Report([row(0)]))
    assert "Not compressed" not in only_small
    assert "register_consumer" not in only_small


def test_reasons_are_grouped() -> None:
    rows = [row(i, op=f"Op{i}Backward0", cls="raw", stored_bytes=64 * KIB, why="same reason") for i in range(5)]
    text = str(Report(rows))
    assert text.count("same reason") == 1
    assert "same reason: 320.0 KiB in 5 tensors" in text
    assert ", …)" in text


def test_shared_rows_are_marked(report: Report) -> None:
    assert "value*" in str(report)
    assert "* shares its bytes with an earlier row" in str(report)
    assert "shares its bytes" not in str(Report([row(0)]))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_fit(width: int) -> None:
    long = "encoder.layers.11.self_attention.output_projection.inner.deeper"
    rows = [row(0, module=long, op="ScaledDotProductFlashAttentionForCpuBackward0", field="logsumexp"), row(1)]
    table = Report(rows).format(width=width).split("\n\n")[0]
    assert all(len(line) <= width for line in table.splitlines())
    assert "inner.deeper" in table  # the end of a path says more than its start
    assert ("encoder.layers" in table) == (width == 160)


def test_varying_widths_are_not_shown() -> None:
    rows = [row(0, cls="integer", bits=64), row(1, cls="two_valued", bits=1)]
    integer, two_valued = Report(rows).format(width=120).splitlines()[2:4]
    assert integer.split()[5] == "-"
    assert two_valued.split()[5] == "1"


def test_narrow_terminals_get_the_least_width(report: Report) -> None:
    assert report.format(width=20) == report.format(width=MIN_WIDTH)


def test_largest_rows_are_shown_and_the_rest_summed() -> None:
    rows = [row(i, plain_bytes=(i + 1) * KIB, stored_bytes=KIB // 8) for i in range(100)]
    rows.append(row(100, plain_bytes=1, stored_bytes=1, op="MyFnBackward", why=UNKNOWN.why))
    text = Report(rows).format(width=120, max_rows=10)
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 10 + 1
    assert "MyFnBackward" in table[2]  # unknown readers stay in sight, whatever their size
    assert "100.0 KiB" in table[11]
    hidden = sum((i + 1) * KIB for i in range(91))
    assert f"and 91 smaller rows, {human(hidden)}" in table[-1]
    assert len(Report(rows).format(width=120, max_rows=None).split("\n\n")[0].splitlines()) == 2 + 101


def test_nothing_saved() -> None:
    assert str(Report([])) == "No tensor was saved."
    assert repr(Report([])) == "Report(0 tensors, 0 B -> 0 B)"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2048 * 1024**4, "2048.0 TiB"),
    ],
)
def test_human(size: int, text: str) -> None:
    assert human(size) == text
