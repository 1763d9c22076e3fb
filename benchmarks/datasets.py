"""The data of the accuracy benchmarks: CIFAR-10 from an archive of JPEG files, and plain text."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from common import RESULTS, file_lock
from torch import Tensor

# Per-channel mean and standard deviation of CIFAR-10's training images, in units of 0..255.
_MEAN = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1)
_STD = torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 in memory: uint8 images [n, 3, 32, 32] and int64 labels [n]."""

    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.int64]


def load_cifar10(archive: Path, cache: Path = RESULTS / "tmp" / "cifar10.npz") -> Cifar10:
    """Decodes an archive of `train/CLASS/*.jpg` and `test/CLASS/*.jpg` once, then reads the cache.

    Args:
        archive: A tar file, compressed or not.
        cache: The decoded arrays (184 MB), written on first use.
    """
    with file_lock(cache.with_suffix(".lock")):
        if not cache.exists():
            _decode(archive, cache)
    with np.load(cache) as stored:
        return Cifar10(**{name: stored[name] for name in stored.files})


def _decode(archive: Path, cache: Path) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit("decoding CIFAR-10 needs Pillow: pip install pillow") from None
    found: dict[str, list[tuple[str, npt.NDArray[np.uint8]]]] = {"train": [], "test": []}
    with tarfile.open(archive, "r|*") as files:
        for member in files:
            split, _, rest = member.name.removeprefix("./").partition("/")
            label, _, file = rest.partition("/")
            if split not in found or not file.endswith(".jpg"):
                continue
            handle = files.extractfile(member)
            if handle is None:
                continue
            with Image.open(io.BytesIO(handle.read())) as image:
                pixels = np.asarray(image.convert("RGB"), dtype=np.uint8)
            found[split].append((label, pixels.transpose(2, 0, 1)))
    classes = sorted({label for label, _ in found["train"]})
    if len(classes) != 10:
        raise SystemExit(f"{archive} holds {len(classes)} classes under train/, expected CIFAR-10's 10")
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for split, images in found.items():
        arrays[f"{split}_images"] = np.stack([pixels for _, pixels in images])
        arrays[f"{split}_labels"] = np.array([classes.index(label) for label, _ in images], np.int64)
    partial = cache.with_suffix(".partial.npz")
    np.savez(partial, **arrays)  # type: ignore[arg-type]
    partial.replace(cache)


def normalize(images: npt.NDArray[np.uint8]) -> Tensor:
    """Returns uint8 images as f32 of zero mean and unit variance per channel."""
    return (torch.from_numpy(images).float() - _MEAN) / _STD


def augment(images: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Shifts every image by up to 4 pixels (zero padding) and mirrors half of them."""
    count = len(images)
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    span = np.arange(32)
    rows = rng.integers(0, 9, count)[:, None] + span
    columns = rng.integers(0, 9, count)[:, None] + span
    mirrored = rng.random(count) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    index = np.arange(count)[:, None, None]
    # Advanced indices around a slice put the channel last: [n, 32, 32, 3].
    cut = padded[index, :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))


@dataclass(frozen=True)
class Text:
    """A text as tokens: one int64 token a character, the last tenth for validation."""

    train: Tensor
    validation: Tensor
    vocabulary: int


def load_text(path: Path) -> Text:
    """Reads a text file as characters."""
    text = path.read_text(encoding="utf-8")
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text], dtype=torch.int64)
    cut = len(tokens) * 9 // 10
    return Text(tokens[:cut], tokens[cut:], len(alphabet))


def random_text() -> Text:
    """Returns random characters, for smoke runs."""
    tokens = torch.randint(65, (20_000,), generator=torch.Generator().manual_seed(0))
    return Text(tokens[:18_000], tokens[18_000:], 65)
