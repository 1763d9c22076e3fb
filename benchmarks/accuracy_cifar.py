"""Does compression cost accuracy on images? ResNet-20 on CIFAR-10, plain against compressed.

python benchmarks/accuracy_cifar.py --data cifar10.tar.xz
"""

from __future__ import annotations

import argparse
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from common import load_models, option_parser
from datasets import Cifar10, augment, load_cifar10, normalize
from torch import Tensor, nn
from training import Task, add_options, run_all

BATCH = 128
PEAK_RATE = 0.1
WARMUP = 0.15  # share of the steps until the peak rate


class CifarTask(Task):
    """SGD with Nesterov momentum and a triangular learning rate on random shifts and mirrors.

    Args:
        data: The images.
        epochs: Epochs of a run.
        images: Images an epoch, drawn anew from the whole training set for every epoch.
        test_images: How many of the test images are evaluated.
    """

    name = "accuracy_cifar"
    metric = "test_accuracy"

    def __init__(self, data: Cifar10, epochs: int, images: int, test_images: int) -> None:
        self.data = data
        self.epochs = epochs
        self.steps = images // BATCH
        self.test_images = test_images

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = load_models().resnet20(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
        return model, optimizer

    def rate(self, step: int) -> float:
        total = self.epochs * self.steps
        peak = WARMUP * total
        if step < peak:
            return PEAK_RATE * (step + 1) / (peak + 1)
        return PEAK_RATE * (total - step) / (total - peak)

    def start_epoch(self, seed: int, epoch: int) -> None:
        self._rng = np.random.default_rng((seed, epoch))
        self._order = self._rng.permutation(len(self.data.train_labels))[: self.steps * BATCH]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        index = self._order[step * BATCH : (step + 1) * BATCH]
        images = normalize(augment(self.data.train_images[index], self._rng))
        return images, torch.from_numpy(self.data.train_labels[index])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        right = 0
        # Spread over the set, which may be sorted by class.
        chosen = np.linspace(0, len(self.data.test_labels) - 1, self.test_images).astype(np.int64)
        for start in range(0, len(chosen), 500):
            index = chosen[start : start + 500]
            guess = cast(Tensor, model(normalize(self.data.test_images[index]))).argmax(1)
            right += int((guess == torch.from_numpy(self.data.test_labels[index])).sum())
        return right / len(chosen)


def _random_data() -> Cifar10:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (512, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, 512)
    return Cifar10(images, labels, images, labels)


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "accuracy_cifar",
        "ResNet-20 on CIFAR-10: test accuracy of plain and of compressed training. Every run's "
        "result is saved as it ends; a restart goes on from the last finished epoch.",
        data="cifar10.tar.xz: JPEG files under train/CLASS and test/CLASS (required, but for --quick)",
    )
    add_options(parser, epochs=6)
    parser.add_argument("--images", type=int, default=25_600, help="training images an epoch")
    arguments = parser.parse_args()
    run_all(_task(parser, arguments), arguments)


def _task(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> CifarTask:
    if arguments.quick:  # random pixels: shows that everything runs, not what is learned
        arguments.epochs = min(arguments.epochs, 2)
        return CifarTask(_random_data(), arguments.epochs, images=256, test_images=200)
    if arguments.data is None:
        parser.error("--data is required: the path of cifar10.tar.xz")
    return CifarTask(load_cifar10(arguments.data), arguments.epochs, arguments.images, 10_000)


if __name__ == "__main__":
    main()
