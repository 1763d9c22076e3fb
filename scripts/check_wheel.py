"""Check the wheel and the sdist in a folder: tags, glibc symbols, contents, an installation, a build of the sdist.

    python scripts/check_wheel.py dist

Runs in the development environment. The clean environment has its own interpreter, holds nothing but the wheel and is
asked with `python -I` from an empty folder, so it cannot see the checkout; torch, too large to install twice, is lent
to it by a path entry that is added after the wheel is installed. An editable installation in the lending environment
stays invisible, since path entries inside a path entry are not followed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_GLIBC = (2, 28)
POLICY = "manylinux_2_28_x86_64"
NATIVE = "daf_rs/_native.abi3.so"

# What a user does first, run by the clean environment. Prints what build_info() says.
PROGRAM = """
import sys
from importlib.metadata import distribution

import torch

import daf_rs

prefix = sys.prefix
assert daf_rs.__file__.startswith(prefix), f"daf_rs comes from {daf_rs.__file__}, not from the wheel in {prefix}"
assert str(distribution("daf_rs").locate_file("")).startswith(prefix)
assert not torch.__file__.startswith(prefix)

# A round trip in every dtype: the error is at most half a step of its group's range.
torch.manual_seed(0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(300, 500).to(dtype)
    for bits in (1, 2, 4, 8):
        q = daf_rs.quantize(x, bits=bits, seed=1)
        y = daf_rs.dequantize(q)
        assert y.shape == x.shape and y.dtype == dtype
        spread = (x.max() - x.min()).float()
        step = spread / (2**bits - 1)
        assert (y.float() - x.float()).abs().max() <= step * 0.55 + 2**-6, (dtype, bits)
        assert q.nbytes < x.numel() * (bits + 2) / 8
again = daf_rs.QuantizedTensor.from_bytes(q.to_bytes())
assert torch.equal(daf_rs.dequantize(again), y)


def train(bits):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)
    )
    x, y = torch.randn(256, 256), torch.randint(10, (256,))
    stats = None
    if bits is None:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    else:
        with daf_rs.save_compressed(bits=bits, seed=0) as saved:
            loss = torch.nn.functional.cross_entropy(model(x), y)
        stats = saved.stats()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], stats


loss, plain, _ = train(None)
exact_loss, exact, _ = train("exact")
assert torch.equal(loss, exact_loss)
assert all(torch.equal(a, b) for a, b in zip(plain, exact)), "bits='exact' must not change a gradient"
_, lossy, stats = train(4)
a = torch.cat([g.flatten() for g in plain])
b = torch.cat([g.flatten() for g in lossy])
cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
assert cosine > 0.98, cosine
assert stats.peak_bytes * 3 < stats.plain_peak_bytes, stats
print(f"  {stats.plain_peak_bytes} -> {stats.peak_bytes} bytes of saved activations, gradient cosine {cosine:.4f}")
print(f"  {daf_rs.build_info()}")
"""


class CheckError(Exception):
    """A wheel or sdist is not what it should be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckError(message)


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    result = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CheckError(f"{' '.join(str(c) for c in command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def too_new(symbol_versions: list[str]) -> list[str]:
    """The symbol versions that glibc 2.28 does not have."""
    wrong = []
    for version in symbol_versions:
        match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
        # GLIBC_ABI_DT_RELR and the like came after 2.28.
        newer = (int(match[1]), int(match[2])) > MAX_GLIBC if match else version.startswith("GLIBC")
        if newer:
            wrong.append(version)
    return wrong


def tag_problems(name: str) -> list[str]:
    """What is wrong with a wheel's name: it must be abi3 from Python 3.10 on, for glibc 2.28 or older."""
    match = re.fullmatch(r"daf_rs-[^-]+-([^-]+)-([^-]+)-([^-]+)\.whl", name)
    if not match:
        return [f"{name} is no wheel of daf_rs"]
    problems = []
    if (match[1], match[2]) != ("cp310", "abi3"):
        problems.append(f"built for {match[1]}-{match[2]}, expected cp310-abi3")
    for platform in match[3].split("."):
        tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platform)
        if platform != "manylinux2014_x86_64" and not (tag and (int(tag[1]), int(tag[2])) <= MAX_GLIBC):
            problems.append(f"platform {platform}, expected {POLICY} or older")
    return problems


def needed_symbol_versions(library: Path) -> list[str]:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    with library.open("rb") as file:
        return sorted(
            {
                auxiliary.name
                for section in ELFFile(file).iter_sections()
                if isinstance(section, GNUVerNeedSection)
                for _, auxiliaries in section.iter_versions()
                for auxiliary in auxiliaries
            }
        )


def check_contents(wheel: Path, work: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        archive.extract(NATIVE, work)
    expected = {NATIVE, "daf_rs/__init__.py", "daf_rs/_native.pyi", "daf_rs/py.typed"}
    checked_out = {f"daf_rs/{p.relative_to(ROOT / 'python/daf_rs')}" for p in (ROOT / "python/daf_rs").rglob("*.py")}
    require(not (expected | checked_out) - names, f"missing in the wheel: {sorted((expected | checked_out) - names)}")
    foreign = [n for n in names if not n.startswith(("daf_rs/", metadata_name.split("/")[0] + "/"))]
    require(not foreign, f"does not belong in the wheel: {foreign}")
    require(len([n for n in names if n.endswith(".so")]) == 1, "more than one library in the wheel")
    require(sum("/licenses/LICENSE-" in n for n in names) == 2, "the licence files are missing")
    require(metadata["Requires-Python"] == ">=3.10", f"Requires-Python: {metadata['Requires-Python']}")
    requirements = metadata.get_all("Requires-Dist") or []
    unconditional = [r for r in requirements if ";" not in r]
    require(unconditional == ["torch>=2.11"], f"Requires-Dist: {requirements}")
    versions = needed_symbol_versions(work / NATIVE)
    require(bool(versions), "the library names no symbol versions: was it read correctly?")
    require(not too_new(versions), f"symbols newer than glibc 2.28: {too_new(versions)}")
    print(f"  {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB, symbol versions {' '.join(versions)}")


def check_policy(wheel: Path) -> None:
    report = run(sys.executable, "-m", "auditwheel", "show", wheel)
    match = re.search(r'consistent with\s+the\s+following\s+platform\s+tag:\s+"manylinux_(\d+)_(\d+)_x86_64"', report)
    require(match is not None, f"auditwheel names no manylinux tag:\n{report}")
    require((int(match[1]), int(match[2])) <= MAX_GLIBC, f"auditwheel:\n{report}")
    print(f"  auditwheel: manylinux_{match[1]}_{match[2]}_x86_64")


def check_installation(wheel: Path, work: Path) -> None:
    clean = work / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", clean)
    python = clean / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_CONSTRAINT"))}
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, env=environment)
    site = Path(run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "lent-torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    empty = work / "empty"
    empty.mkdir()
    # The wheel's own requirements are met by what is lent.
    run(*pip, "check", cwd=empty, env=environment)
    for level in ("", "scalar"):
        chosen = {**environment, "DAF_ISA": level} if level else environment
        print(f"  clean environment, DAF_ISA={level or '(unset)'}")
        print(run(python, "-I", "-W", "error", "-c", PROGRAM, cwd=empty, env=chosen), end="")


def check_sdist(sdist: Path, work: Path) -> None:
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(work / "sdist", filter="data")
        else:
            archive.extractall(work / "sdist")
    (source,) = (work / "sdist").iterdir()
    for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE-MIT", "LICENSE-APACHE"):
        require((source / name).is_file(), f"{name} is missing in the sdist")
    out = work / "from-sdist"
    # The build shares compiled dependencies with the checkout's release build.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target"), "VIRTUAL_ENV": sys.prefix}
    run(sys.executable, "-m", "maturin", "build", "--release", "--locked", "--out", out, cwd=source, env=environment)
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        require(NATIVE in archive.namelist(), "the wheel built from the sdist lacks the native module")
    print(f"  {sdist.stat().st_size / 1e6:.1f} MB, builds {built.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="holds one wheel and one sdist")
    folder = parser.parse_args().folder.resolve()
    wheels, sdists = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    try:
        require(len(wheels) == 1 and len(sdists) == 1, f"{folder} must hold one wheel and one sdist")
        work = Path(tempfile.mkdtemp(prefix="daf-wheel-"))
        try:
            print(wheels[0].name)
            problems = tag_problems(wheels[0].name)
            require(not problems, "; ".join(problems))
            check_contents(wheels[0], work)
            check_policy(wheels[0])
            check_installation(wheels[0], work)
            print(sdists[0].name)
            check_sdist(sdists[0], work)
        finally:
            shutil.rmtree(work)
    except CheckError as error:
        sys.exit(f"error: {error}")
    print("the wheel and the sdist are as they should be")


if __name__ == "__main__":
    main()
