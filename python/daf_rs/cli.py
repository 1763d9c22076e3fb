"""The command line: `python -m daf_rs info` and `python -m daf_rs demo`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .exceptions import DafError

__all__ = ["info", "main"]


def info() -> dict[str, Any]:
    """Return what `python -m daf_rs info --json` prints: versions, instruction sets, threads, CUDA.

    Everything that the native module knows about its own build stands under `"build"`.

    Example:
        >>> from daf_rs.cli import info
        >>> info()["cuda"]["built"]
        False
    """
    import torch

    from . import __version__, build_info

    build = dict(build_info())
    built = bool(build.get("cuda", False))
    return {
        "daf_rs": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()) or None,
        "build": build,
        "threads": {"daf_rs": build.get("threads"), "torch": torch.get_num_threads()},
        "cuda": {
            "built": built,
            "torch_sees_a_device": torch.cuda.is_available(),
            "reason": None if built else "this build of daf_rs has no CUDA kernels; only CPU tensors are compressed",
        },
    }


def _info_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    build = dict(facts["build"])
    made = [f"{build[key]}" for key in ("profile", "target_arch", "target_os", "rustc") if build.get(key)]
    lines = [
        ("daf_rs", f"{facts['daf_rs']} ({', '.join(made)})"),
        ("Python", facts["python"]),
        ("torch", facts["torch"]),
        ("platform", f"{facts['platform']}, {facts['libc'] or 'unknown C library'}"),
    ]
    if "isa" in build:
        available = ", ".join(build.get("isa_available", [])) or "unknown"
        lines.append(("instruction sets", f"active {build['isa']}; available {available} (DAF_ISA=NAME forces one)"))
    threads = facts["threads"]
    own = f"daf_rs {threads['daf_rs']}, " if threads["daf_rs"] else ""
    lines.append(("threads", f"{own}torch {threads['torch']} (DAF_NUM_THREADS=N sets daf_rs's)"))
    cuda = facts["cuda"]
    lines.append(("CUDA", "built: yes" if cuda["built"] else f"built: no ({cuda['reason']})"))
    return lines


def _run_info(arguments: argparse.Namespace) -> int:
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    for name, value in _info_lines(facts):
        print(f"{name:<18}{value}")
    return 0


def _bits(text: str) -> int | str:
    if text == "exact":
        return text
    if text.isdecimal() and 1 <= int(text) <= 8:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no width: give 1 to 8, or 'exact' for nothing lossy")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no count: give a whole number from 1 up")


def _run_demo(arguments: argparse.Namespace) -> int:
    from .demo import run

    run(bits=arguments.bits, epochs=arguments.epochs, threads=arguments.threads, plot=arguments.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m daf_rs",
        description="Stores the activations that PyTorch training saves for backward in a few bits each.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="versions, instruction sets, threads, CUDA status")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_run_info)

    command = commands.add_parser(
        "demo",
        help="train a small network plainly and compressed, and compare (under a minute)",
        description="Trains a small ResNet on scikit-learn's images of digits twice from the same seed, plainly and "
        "with save_compressed, and prints bytes of saved activations, accuracy and time of both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--bits", type=_bits, default=4, help="1 to 8, or exact")
    command.add_argument("--epochs", type=_positive, default=5, help="epochs of each training")
    command.add_argument("--threads", type=_positive, default=None, help="torch's threads (default: as torch chooses)")
    command.add_argument("--plot", type=Path, default=None, metavar="OUT.png", help="draw saved bytes by layer")
    command.set_defaults(run=_run_demo)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for an error of ours, 2 for wrong usage.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except DafError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
