"""The demo: one small ResNet trained twice on images of digits, plainly and with `save_compressed`."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .exceptions import BackendUnavailableError, InvalidArgumentError

__all__ = ["run"]

_BATCH = 64
_SIDE = 16  # the 8x8 digits are enlarged to this
_PEAK_RATE = 0.05
_NEEDED = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}


@dataclass(frozen=True)
class _Outcome:
    """What one training gave; bytes as of the last step, None for the plain one."""

    accuracy: float
    seconds: float
    stats: Any = None
    report: Any = None


def _optional(module: str, what: str) -> Any:
    """Import a module that only the demo needs, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _NEEDED[module.partition(".")[0]]
        raise BackendUnavailableError(
            f"{what} needs {package}, which cannot be imported ({error}); "
            f"install everything that the demo needs with: pip install 'daf_rs[demo]'"
        ) from error


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's 1,797 digits as training and test images, f32 [n, 3, 16, 16], and labels, int64 [n]."""
    datasets = _optional("sklearn.datasets", "the demo")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8.0 - 1.0
    images = F.interpolate(images, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
    images = images.expand(-1, 3, -1, -1).contiguous()
    targets = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return images[train], targets[train], images[test], targets[test]


def _train(
    data: tuple[Tensor, Tensor, Tensor, Tensor], *, bits: int | str | None, epochs: int, advance: Callable[[], None]
) -> _Outcome:
    """Train from seed 0 and return the outcome; `bits=None` is plain PyTorch."""
    from . import save_compressed
    from .testing import models

    images, labels, test_images, test_labels = data
    model = models.resnet20(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=_PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = len(labels) // _BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_PEAK_RATE, total_steps=epochs * steps)
    generator = torch.Generator().manual_seed(0)
    saved: Any = contextlib.nullcontext() if bits is None else save_compressed(bits, model=model, seed=0)
    report = None
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for step in range(steps):
            index = order[step * _BATCH : (step + 1) * _BATCH]
            optimizer.zero_grad(set_to_none=True)
            with saved:
                loss = F.cross_entropy(model(images[index]), labels[index])
            if bits is not None and report is None:
                report = saved.report()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            advance()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    return _Outcome(accuracy, seconds, None if bits is None else saved.stats(), report)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def run(*, bits: int | str = 4, epochs: int = 5, threads: int | None = None, plot: Path | None = None) -> None:
    """Train twice, print the comparison, and draw the saved bytes by layer where asked.

    Args:
        bits: Width of the compressed training, 1 to 8, or `"exact"`.
        epochs: Epochs of each training, at least 1.
        threads: torch's threads; None leaves them.
        plot: Where to write a PNG of saved bytes by layer.

    Raises:
        BackendUnavailableError: A package that the demo needs is missing; the message says how to install it.
        InvalidArgumentError: The folder of `plot` does not exist.
    """
    if plot is not None:  # found out now, not after the training
        _optional("matplotlib", "--plot")
        if not plot.parent.is_dir():
            raise InvalidArgumentError(f"cannot write {plot}: there is no folder {plot.parent}; create it first")
    progress_module = _optional("rich.progress", "the demo")
    data = _digits()
    runs = {"plain PyTorch": None, f"save_compressed({bits!r})": bits}
    outcomes: dict[str, _Outcome] = {}
    with _threads(threads) as used, progress_module.Progress(transient=True) as progress:
        steps = epochs * (len(data[1]) // _BATCH)
        for name, width in runs.items():
            task = progress.add_task(name, total=steps)

            def advance(task: Any = task) -> None:
                progress.advance(task)

            outcomes[name] = _train(data, bits=width, epochs=epochs, advance=advance)
    title = f"ResNet-20 on {len(data[1])} images of digits, {used} thread{'s'[: used > 1]}"
    _print_table(outcomes, title)
    if plot is not None:
        compressed = list(outcomes.values())[-1]
        _plot(compressed.report, plot, f"ResNet-20 on digits, batch {_BATCH}, bits={bits!r}")
        print(f"saved bytes by layer: {plot}")


def _bytes(count: float) -> str:
    return f"{count / 2**20:.2f} MiB"


def _print_table(outcomes: dict[str, _Outcome], title: str) -> None:
    plain, ours = outcomes.values()
    stats = ours.stats
    console = _optional("rich.console", "the demo").Console()
    table = _optional("rich.table", "the demo").Table(title=title)
    table.add_column("")
    for name in outcomes:
        table.add_column(name, justify="right")
    table.add_column("ratio", justify="right")
    table.add_row(
        "saved activations, peak",
        _bytes(stats.plain_peak_bytes),
        _bytes(stats.peak_bytes),
        f"{stats.plain_peak_bytes / max(1, stats.peak_bytes):.1f}x smaller",
    )
    table.add_row(
        "test accuracy",
        f"{100 * plain.accuracy:.2f} %",
        f"{100 * ours.accuracy:.2f} %",
        f"{100 * (ours.accuracy - plain.accuracy):+.2f} points",
    )
    table.add_row(
        "training time",
        f"{plain.seconds:.1f} s",
        f"{ours.seconds:.1f} s",
        f"{ours.seconds / plain.seconds:.2f}x",
    )
    console.print(table)


def _by_module(report: Any) -> dict[str, tuple[int, int]]:
    """Plain and stored bytes of each module, in forward order; what is shared counts at its first row."""
    sums: dict[str, tuple[int, int]] = {}
    for row in report.rows:
        name = row.module or row.op
        plain, stored = sums.get(name, (0, 0))
        sums[name] = (plain + row.plain_bytes, stored + row.stored_bytes)
    return sums


def _plot(report: Any, path: Path, title: str) -> None:
    matplotlib = _optional("matplotlib", "--plot")
    matplotlib.use("Agg")
    pyplot = _optional("matplotlib.pyplot", "--plot")
    sums = {name: both for name, both in _by_module(report).items() if both[0]}
    place = range(len(sums))
    figure, axes = pyplot.subplots(figsize=(8, max(3.0, 0.28 * len(sums))))
    plain = [both[0] / 2**20 for both in sums.values()]
    ours = [both[1] / 2**20 for both in sums.values()]
    axes.barh([y - 0.2 for y in place], plain, 0.4, label=f"plain PyTorch, {sum(plain):.1f} MiB")
    axes.barh([y + 0.2 for y in place], ours, 0.4, label=f"daf_rs, {sum(ours):.1f} MiB")
    axes.set_yticks(list(place), list(sums), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("MiB of activations saved for backward")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
