"""Does compression cost accuracy on text? A small GPT on characters, plain against compressed.

python benchmarks/accuracy_gpt.py --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import math
from typing import cast

import torch
import torch.nn.functional as F
from common import gpt2_weights, load_models, option_parser
from datasets import Text, load_text, random_text
from torch import Tensor, nn
from training import Task, add_options, run_all

BATCH = 32
LENGTH = 128
PEAK_RATE = 1e-3
WARMUP_STEPS = 50


class GptTask(Task):
    """AdamW with warm-up and a cosine; validation loss in nats a character over the whole tail.

    Args:
        text: The tokens.
        epochs: How many times `steps` steps are made.
        steps: Steps between two checkpoints.
        layers: Blocks of the model.
    """

    name = "accuracy_gpt"
    metric = "validation_loss"

    def __init__(self, text: Text, epochs: int, steps: int, layers: int) -> None:
        self.text = text
        self.epochs = epochs
        self.steps = steps
        self.layers = layers

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = load_models().gpt(seed=seed, vocabulary=self.text.vocabulary, layers=self.layers, length=LENGTH)
        gpt2_weights(model, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.1)
        return model, optimizer

    def rate(self, step: int) -> float:
        if step < WARMUP_STEPS:
            return PEAK_RATE * (step + 1) / WARMUP_STEPS
        total = self.epochs * self.steps
        share = (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
        return PEAK_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    def start_epoch(self, seed: int, epoch: int) -> None:
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        limit = len(self.text.train) - LENGTH
        self._starts = torch.randint(limit, (self.steps, BATCH), generator=generator)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        index = self._starts[step][:, None] + torch.arange(LENGTH + 1)
        tokens = self.text.train[index]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        tokens = self.text.validation
        count = (len(tokens) - 1) // LENGTH
        inputs = tokens[: count * LENGTH].view(count, LENGTH)
        targets = tokens[1 : count * LENGTH + 1].view(count, LENGTH)
        total = 0.0
        for start in range(0, count, 64):
            output = cast(Tensor, model(inputs[start : start + 64]))
            loss = F.cross_entropy(output.flatten(0, 1), targets[start : start + 64].flatten(), reduction="sum")
            total += float(loss)
        return total / (count * LENGTH)


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "accuracy_gpt",
        "A 4-layer character GPT: validation loss of plain and of compressed training. Every run's "
        "result is saved as it ends; a restart goes on from the last finished epoch (100 steps).",
        data="a text file such as tinyshakespeare.txt (required, but for --quick)",
    )
    add_options(parser, epochs=10)
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    arguments = parser.parse_args()
    run_all(_task(parser, arguments), arguments)


def _task(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> GptTask:
    if arguments.quick:  # random characters: shows that everything runs, not what is learned
        arguments.epochs = min(arguments.epochs, 2)
        return GptTask(random_text(), arguments.epochs, steps=2, layers=2)
    if arguments.data is None:
        parser.error("--data is required: the path of a text file")
    return GptTask(load_text(arguments.data), arguments.epochs, 100, arguments.layers)


if __name__ == "__main__":
    main()
