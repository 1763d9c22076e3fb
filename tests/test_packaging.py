"""Facts that several files state must agree. `make check-wheel` checks the built wheel."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import daf_rs

ROOT = Path(__file__).resolve().parent.parent

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

CARGO = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def check_wheel():
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version_comes_from_cargo():
    version = CARGO["package"]["version"]
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert daf_rs.__version__ == version
    assert daf_rs.build_info()["version"] == version


def test_installed_version_is_current():
    try:
        installed = importlib.metadata.version("daf_rs")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("daf_rs is imported from the checkout, not installed")
    assert installed == CARGO["package"]["version"]


def test_changelog_names_the_version_or_is_unreleased():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (?:\[)?([^\]\s]+)", text, flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = headings[1:]
    assert released == sorted(released, key=lambda v: [int(x) for x in v.split(".")], reverse=True)


def test_stable_abi_matches_the_oldest_python():
    minor = re.fullmatch(r">=3\.(\d+)", PYPROJECT["project"]["requires-python"]).group(1)
    assert f"abi3-py3{minor}" in CARGO["dependencies"]["pyo3"]["features"]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{minor}"


def test_core_needs_no_python():
    assert CARGO["features"]["default"] == []
    assert CARGO["features"]["python"] == ["dep:pyo3"]
    assert CARGO["dependencies"]["pyo3"]["optional"] is True
    assert PYPROJECT["tool"]["maturin"]["features"] == ["python"]


def test_licence_is_stated_once_and_shipped():
    assert CARGO["package"]["license"] == PYPROJECT["project"]["license"]
    for name in PYPROJECT["project"]["license-files"]:
        assert (ROOT / name).is_file()


def test_pinned_torch_is_supported():
    oldest = re.fullmatch(r"torch>=([\d.]+)", PYPROJECT["project"]["dependencies"][0]).group(1)
    pins = re.findall(r"^torch==([\d.]+)\.\*", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert len(pins) == 1
    assert [int(x) for x in pins[0].split(".")] >= [int(x) for x in oldest.split(".")]


def test_no_cpu_flags_are_set():
    # A wheel built with target-cpu or target-feature flags would not start on older machines.
    assert not (ROOT / ".cargo").exists()
    assert "rustflags" not in (ROOT / "Cargo.toml").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(
    ("symbols", "allowed"),
    [
        (["GLIBC_2.2.5", "GLIBC_2.28"], True),
        (["GLIBC_2.28", "GCC_3.0", "GCC_4.2.0"], True),
        (["GLIBC_2.29"], False),
        (["GLIBC_2.2.5", "GLIBC_2.34"], False),
        (["GLIBC_ABI_DT_RELR"], False),
    ],
)
def test_check_wheel_judges_symbol_versions(check_wheel, symbols, allowed):
    assert (check_wheel.too_new(symbols) == []) is allowed


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("daf_rs-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl", True),
        ("daf_rs-0.1.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("daf_rs-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl", False),
        ("daf_rs-0.1.0-cp310-abi3-linux_x86_64.whl", False),
        ("daf_rs-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_check_wheel_judges_tags(check_wheel, name, allowed):
    assert (check_wheel.tag_problems(name) == []) is allowed
