"""What became of every saved tensor: `Report`, a list of `Row`, made by ``save_compressed(...).report()``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .policy_table import UNKNOWN

__all__ = ["Report", "Row", "Totals"]

#: A row that keeps more than this share of its bytes counts as not compressed.
KEPT_SHARE = 0.9
#: Rows that ``str()`` shows; `Report.format` takes another number.
MAX_ROWS = 60
#: Classes without one width for all elements.
VARYING = ("integer", "raw")
#: ``str()`` is not made narrower than this, so that names stay readable.
MIN_WIDTH = 80

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor that autograd saved.

    Attributes:
        index: Its place in the order of the forward, from 0.
        module: The path of the module that was running, ``""`` where unknown.
        op: The name of the autograd node that reads it, such as ``"ReluBackward0"``.
        field: The node's field, such as ``"result"``.
        shape: The tensor's shape.
        dtype: Its dtype without ``torch.``, such as ``"float32"``.
        cls: The class it is stored in, such as ``"value"``, ``"mask"``, ``"unused"`` or ``"raw"``.
        bits: Bits an element of its codes; 0 or None where there are no codes. Integers vary from block to block and
            give the bits of an element of the tensor.
        plain_bytes: Bytes that PyTorch would hold for it; 0 if an earlier row already counts its storage.
        stored_bytes: Bytes held instead, metadata included; 0 if an earlier row already counts them.
        why: One line on what the choice rests on.
        shared: Whether it shares its packed bytes with an earlier row.
    """

    index: int
    module: str
    op: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    cls: str
    bits: int | None
    plain_bytes: int
    stored_bytes: int
    why: str = ""
    shared: bool = False

    @property
    def unknown(self) -> bool:
        """Whether nobody knows how its reader uses it, so that only lossless classes were tried."""
        return self.why.startswith(UNKNOWN.why)

    @property
    def kept(self) -> bool:
        """Whether it takes (nearly) as many bytes as without compression."""
        return self.plain_bytes > 0 and self.stored_bytes > KEPT_SHARE * self.plain_bytes

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values for JSON."""
        return {
            "index": self.index,
            "module": self.module,
            "op": self.op,
            "field": self.field,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "class": self.cls,
            "bits": self.bits or 0,
            "plain_bytes": self.plain_bytes,
            "stored_bytes": self.stored_bytes,
            "why": self.why,
            "shared": self.shared,
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows.

    Attributes:
        tensors: Number of rows.
        plain_bytes: Bytes that PyTorch would hold.
        stored_bytes: Bytes held instead.
    """

    tensors: int
    plain_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float | None:
        """Plain bytes per stored byte; None where nothing is stored."""
        return self.plain_bytes / self.stored_bytes if self.stored_bytes else None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Totals:
        """Sums up `rows`."""
        rows = list(rows)
        return cls(len(rows), sum(r.plain_bytes for r in rows), sum(r.stored_bytes for r in rows))

    def to_dict(self) -> dict[str, Any]:
        """The sums as plain values for JSON."""
        return {
            "tensors": self.tensors,
            "plain_bytes": self.plain_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": self.ratio,
        }


class Report:
    """The rows of one forward, with sums, as a table (``str()``) or as plain values (`to_dict`).

    ``len(report)``, ``report[i]`` and iteration give the rows in the order of the forward.

    Args:
        rows: The rows, in any order.

    Example:
        >>> report = Report([
        ...     Row(0, "fc1", "AddmmBackward0", "mat1", (64, 256), "float32", "value", 4, 65536, 8448),
        ...     Row(1, "act", "ReluBackward0", "result", (64, 256), "float32", "mask", 1, 65536, 2064),
        ... ])
        >>> len(report), report.totals.plain_bytes, report.totals.ratio > 12
        (2, 131072, True)
        >>> print(report.format(width=100))
        module  op.field     shape   dtype    class  bits    before    after
        ------  -----------  ------  -------  -----  ----  --------  -------
        fc1     Addmm.mat1   64x256  float32  value     4  64.0 KiB  8.2 KiB
        act     Relu.result  64x256  float32  mask      1  64.0 KiB  2.0 KiB
        <BLANKLINE>
        class  tensors     before     after  ratio
        -----  -------  ---------  --------  -----
        value        1   64.0 KiB   8.2 KiB   7.8x
        mask         1   64.0 KiB   2.0 KiB  31.8x
        total        2  128.0 KiB  10.3 KiB  12.5x
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: tuple[Row, ...] = tuple(sorted(rows, key=lambda row: row.index))
        self.totals = Totals.of(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __repr__(self) -> str:
        totals = self.totals
        return f"Report({totals.tensors} tensors, {human(totals.plain_bytes)} -> {human(totals.stored_bytes)})"

    def __str__(self) -> str:
        return self.format()

    def by_class(self) -> dict[str, Totals]:
        """Sums by storage class, the largest plain bytes first."""
        return _sums(self.rows, lambda row: row.cls)

    def by_module(self) -> dict[str, Totals]:
        """Sums by module path, in the order of the forward."""
        return _sums(self.rows, lambda row: row.module, by_size=False)

    def by_op(self) -> dict[tuple[str, str], Totals]:
        """Sums by reader (node name, field), the largest plain bytes first."""
        return _sums(self.rows, lambda row: (row.op, row.field))

    def unknown(self) -> list[Row]:
        """The rows whose reader is unknown, the largest first."""
        return sorted((row for row in self.rows if row.unknown), key=lambda row: -row.plain_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that ``json.dumps`` takes.

        >>> Report([]).to_dict()
        {'totals': {'tensors': 0, 'plain_bytes': 0, 'stored_bytes': 0, 'ratio': None}, 'classes': {}, 'rows': []}
        """
        return {
            "totals": self.totals.to_dict(),
            "classes": {name: totals.to_dict() for name, totals in self.by_class().items()},
            "rows": [row.to_dict() for row in self.rows],
        }

    def format(self, width: int | None = None, max_rows: int | None = MAX_ROWS) -> str:
        """The report as text: rows (unknown readers first), sums by class, and why the rest is not smaller.

        Args:
            width: Columns of the text; None takes the terminal's.
            max_rows: Rows shown at most, the largest ones; None shows all.
        """
        if not self.rows:
            return "No tensor was saved."
        width = max(MIN_WIDTH, shutil.get_terminal_size((120, 24)).columns if width is None else width)
        parts = [self._rows_text(width, max_rows), self._classes_text()]
        parts += [text for text in (self._unknown_text(), self._kept_text()) if text]
        return "\n\n".join(parts)

    def _rows_text(self, width: int, max_rows: int | None) -> str:
        # Unknown readers stay in sight, then what is largest.
        rows = sorted(self.rows, key=lambda row: (not row.unknown, -row.plain_bytes, row.index))
        shown = sorted(rows[:max_rows], key=lambda row: (not row.unknown, row.index))
        rest = rows[len(shown) :]
        cells = [
            [
                row.module or "-",
                _reader(row),
                "x".join(map(str, row.shape)) or "scalar",
                row.dtype,
                row.cls + ("*" if row.shared else ""),
                "-" if row.cls in VARYING else str(row.bits or "-"),
                human(row.plain_bytes),
                human(row.stored_bytes),
            ]
            for row in shown
        ]
        heads = ["module", "op.field", "shape", "dtype", "class", "bits", "before", "after"]
        text = _table(heads, cells, "lllllrrr", width, shrink=(0, 1))
        if any(row.shared for row in shown):
            text += "\n* shares its bytes with an earlier row"
        if rest:
            sums = Totals.of(rest)
            text += (
                f"\n… and {len(rest)} smaller rows, {human(sums.plain_bytes)} -> {human(sums.stored_bytes)}"
                " (all of them: .rows, or .format(max_rows=None))"
            )
        return text

    def _classes_text(self) -> str:
        sums = {**self.by_class(), "total": self.totals}
        cells = [
            [
                name,
                str(totals.tensors),
                human(totals.plain_bytes),
                human(totals.stored_bytes),
                "-" if totals.ratio is None else f"{totals.ratio:.1f}x",
            ]
            for name, totals in sums.items()
        ]
        return _table(["class", "tensors", "before", "after", "ratio"], cells, "lrrrr", MIN_WIDTH)

    def _unknown_text(self) -> str:
        rows = [row for row in self.unknown() if row.kept]
        if not rows:
            return ""
        sums = _sums(rows, lambda row: (row.op, row.field))
        total = Totals.of(rows)
        lines = [f"{human(total.stored_bytes)} are kept as they are because it is not known how backward reads them:"]
        lines += [f"  {_name(key)}: {_count(totals)}" for key, totals in sums.items()]
        op, field = next(iter(sums))
        lines += [
            "  If an unbiased error is harmless there, say so for one reader with",
            f"    daf_rs.register_consumer({op!r}, {field!r}, 8)",
            "  or for all of them with save_compressed(unknown=8).",
        ]
        return "\n".join(lines)

    def _kept_text(self) -> str:
        rows = [row for row in self.rows if row.kept and not row.unknown]
        if not rows:
            return ""
        lines = ["Not compressed because"]
        for why, totals in _sums(rows, lambda row: row.why or "no reason was given").items():
            names = _sums((row for row in rows if (row.why or "no reason was given") == why), lambda r: (r.op, r.field))
            some = ", ".join(_name(key) for key in list(names)[:3]) + (", …" if len(names) > 3 else "")
            lines.append(f"  {why}: {_count(totals)} ({some})")
        return "\n".join(lines)


def human(size: int) -> str:
    """Bytes with a binary unit.

    >>> human(0), human(1023), human(1536), human(5 << 20), human(3 << 40)
    ('0 B', '1023 B', '1.5 KiB', '5.0 MiB', '3.0 TiB')
    """
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        # 1023.95 would print as 1024.0.
        if value < 1023.95 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def _sums(rows: Iterable[Row], key: Callable[[Row], Key], *, by_size: bool = True) -> dict[Key, Totals]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    sums = {name: Totals.of(group) for name, group in groups.items()}
    if by_size:
        sums = dict(sorted(sums.items(), key=lambda item: -item[1].plain_bytes))
    return sums


def _reader(row: Row) -> str:
    """``ReluBackward0.result`` as ``Relu.result``; an unknown reader's name whole, as register_consumer needs it."""
    op = row.op if row.unknown else re.sub(r"Backward\d*$", "", row.op)
    return ".".join(part for part in (op, row.field) if part) or "-"


def _name(key: tuple[str, str]) -> str:
    return ".".join(part for part in key if part) or "no reader"


def _count(totals: Totals) -> str:
    return f"{human(totals.stored_bytes)} in {totals.tensors} tensor{'s' if totals.tensors != 1 else ''}"


def _table(heads: list[str], cells: list[list[str]], align: str, width: int, shrink: tuple[int, ...] = ()) -> str:
    """Aligned columns; those in `shrink` lose characters at the front until the lines fit `width`."""
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    while over > 0 and shrink:
        widest = max(shrink, key=lambda i: widths[i])
        if widths[widest] <= len(heads[widest]) + 4:
            break
        widths[widest] -= 1
        over -= 1

    def line(values: list[str]) -> str:
        parts = []
        for value, size, side in zip(values, widths, align, strict=True):
            cut = value if len(value) <= size else "…" + value[len(value) - size + 1 :]
            parts.append(cut.rjust(size) if side == "r" else cut.ljust(size))
        return "  ".join(parts).rstrip()

    return "\n".join([line(heads), line(["-" * size for size in widths]), *map(line, cells)])
