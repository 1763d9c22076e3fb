"""One place per decision: what `docs/architecture.md` says about the tree, checked by reading the sources.

Needs neither torch nor the built module, so that `make lint` can run it.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
TOLERANCE = 50  # a last test need not wait for a split

# Files that may be longer, each with the reason.
LONG_FILES = {
    "src/kernels/avx512/cols.rs": "the column kernels of one level share their loads, masks and transposes",
}

# The only places that may say `unsafe`: what they have in common is raw memory that a safe type cannot describe.
UNSAFE_PLACES = {
    "src/kernels/": "SIMD intrinsics: loads and stores through pointers, calls of functions with target features",
    "src/codec/access.rs": "the checked views of a caller's memory",
    "src/pool/": "memory mapped from the system",
    "src/python/": "addresses of tensors, CPython's C interface",
    "tests/rust/": "views over the tests' own memory",
}

# The first part of a path below src/ → what it may use of the crate.
ALLOWED_USES = {
    "error": set(),
    "dtype": {"error"},
    "parallel": {"error"},
    "kernels": {"dtype", "error"},
    "pool": {"error"},
    "codec": {"dtype", "error", "kernels", "parallel", "pool"},
    "python": {"codec", "dtype", "error", "kernels", "parallel", "pool"},
}


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths of the repository's files; outside of a git checkout (an unpacked sdist) what lies in the known folders."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        return tuple(path for path in listed if (ROOT / path).is_file())
    folders = ["src", "python", "tests", "benches", "benchmarks", "docs", "scripts"]
    return tuple(
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    )


def sources(suffix: str, *folders: str) -> list[str]:
    return [path for path in tracked_files() if path.endswith(suffix) and path.startswith(folders)]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def rust_code(path: str) -> str:
    """The file without comments and string literals: documentation may name what code may not use."""
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', read(path))
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def without_tests(path: str) -> str:
    """The file's code apart from unit tests, which may use more of the crate."""
    declared = re.compile(rf"#\[cfg\(test\)\]\s*mod {Path(path).stem};")
    siblings = [other for other in sources(".rs", "src/") if Path(other).parent == Path(path).parent]
    if any(declared.search(rust_code(other)) for other in siblings):
        return ""
    return rust_code(path).split("#[cfg(test)]\nmod ")[0]


def offenders(pattern: str, allowed: tuple[str, ...], *folders: str) -> list[str]:
    regex = re.compile(pattern)
    return [path for path in sources(".rs", *folders) if not path.startswith(allowed) and regex.search(rust_code(path))]


def test_rust_code_strips_comments_and_strings(tmp_path):
    source = tmp_path / "sample.rs"
    source.write_text('let a = "unsafe \\" // x"; // unsafe\n/* unsafe\n */ let b = 1; /// unsafe\n')
    assert rust_code(str(source)).split() == ["let", "a", "=", '"";', "let", "b", "=", "1;"]


def test_only_the_bindings_name_pyo3():
    assert offenders(r"\bpyo3\b", ("src/python/",), "src/", "benches/", "tests/rust/") == []


def test_only_parallel_names_rayon():
    assert offenders(r"\brayon\b", ("src/parallel.rs",), "src/") == []


def test_only_isa_detects_instruction_sets():
    assert offenders(r"is_\w+_feature_detected", ("src/kernels/isa.rs",), "src/", "benches/", "tests/rust/") == []


def test_only_isa_and_parallel_read_the_environment():
    assert offenders(r"\benv::(var|vars|var_os)\b", ("src/kernels/isa.rs", "src/parallel.rs"), "src/") == []


def test_only_kernels_use_intrinsics():
    pattern = r"\b(?:core|std)::arch::(?!asm)\w+|\btarget_feature\b"
    assert offenders(pattern, ("src/kernels/",), "src/", "benches/", "tests/rust/") == []


def test_unsafe_only_in_listed_places():
    # `unsafe_code`, `unsafe_op_in_unsafe_fn` and the like are names of lints.
    assert offenders(r"\bunsafe\b", tuple(UNSAFE_PLACES), "src/", "benches/", "tests/rust/") == []


def test_every_listed_place_for_unsafe_exists_and_needs_it():
    for place in UNSAFE_PLACES:
        assert any(re.search(r"\bunsafe\b", rust_code(path)) for path in sources(".rs", place)), place


def test_dependencies_point_one_way():
    wrong = []
    for path in sources(".rs", "src/"):
        part = Path(path).relative_to("src").parts[0].removesuffix(".rs")
        if part == "lib":
            continue
        assert part in ALLOWED_USES, f"{path}: say in ALLOWED_USES what this part of the crate may use"
        code = without_tests(path)
        used = set(re.findall(r"\bcrate::(\w+)", code))
        for group in re.findall(r"\bcrate::\{([^;]*)\}", code):
            used |= {re.match(r"\s*(\w+)", item).group(1) for item in re.split(r",(?![^{]*\})", group) if item.strip()}
        used &= set(ALLOWED_USES)
        wrong += [f"{path} uses crate::{name}" for name in sorted(used - ALLOWED_USES[part] - {part})]
    assert wrong == []


def test_kernels_neither_allocate_nor_start_threads():
    # isa.rs, asked once per process, lists the levels in a Vec.
    pattern = r"\bVec::|\bvec!|\bBox::new\b|\bthread::|\.to_vec\(\)|\bcollect::<Vec"
    wrong = [path for path in sources(".rs", "src/kernels/") if re.search(pattern, without_tests(path))]
    assert [path for path in wrong if path != "src/kernels/isa.rs"] == []


def test_native_module_has_few_importers():
    pattern = re.compile(r"^\s*(?:from daf_rs import .*\b_native\b|from daf_rs\._native |from \. import .*\b_native\b|"
                         r"from \._native |import daf_rs\._native)", re.MULTILINE)  # fmt: skip
    importers = {path for path in sources(".py", "python/daf_rs/") if pattern.search(read(path))}
    allowed = {f"python/daf_rs/{name}.py" for name in ("__init__", "_arguments", "context", "quantized")}
    assert importers <= allowed


@pytest.mark.parametrize("folder", ["src/", "python/", "tests/", "benches/", "benchmarks/", "scripts/"])
def test_files_are_short(folder):
    long = [
        path
        for path in tracked_files()
        if path.startswith(folder)
        and path.endswith((".rs", ".py", ".pyi", ".sh"))
        and path not in LONG_FILES
        and read(path).count("\n") > MAX_LINES + TOLERANCE
    ]
    assert long == []


def test_list_of_long_files_is_current():
    for path, reason in LONG_FILES.items():
        assert reason
        assert read(path).count("\n") > MAX_LINES, f"{path} is short again: take it off the list"


def test_no_file_is_named_for_no_purpose():
    assert [path for path in tracked_files() if Path(path).stem in {"utils", "util", "misc", "common_utils"}] == []


def test_no_open_ends():
    # The words are put together here so that this file does not contain them.
    words = [
        "TO" + "DO",
        "FIX" + "ME",
        "XX" + "X",
        "todo" + "!(",
        "unimplemented" + "!(",
        "raise NotImplemented" + "Error",
    ]
    found = [
        f"{path}: {word}"
        for path in tracked_files()
        if path.endswith((".rs", ".py", ".pyi", ".sh", ".toml", ".md", "Makefile", "run"))
        for word in words
        if re.search(rf"(?<![A-Za-z]){re.escape(word)}", read(path))
    ]
    assert found == []


def test_no_registry_hosts():
    # Users have their own mirrors; the lock file names its index by necessity.
    hosts = ["pypi" + ".org", "python" + "hosted.org", "index.crates" + ".io", "static.crates" + ".io"]
    hosts += ["download.pytorch" + ".org", "deb.debian" + ".org", "security.debian" + ".org"]
    found = [
        f"{path}: {host}"
        for path in tracked_files()
        if path != "Cargo.lock" and (ROOT / path).stat().st_size < 1 << 20
        for host in hosts
        if host.encode() in (ROOT / path).read_bytes()
    ]
    assert found == []


def test_no_large_files():
    assert [path for path in tracked_files() if (ROOT / path).stat().st_size > 1 << 20] == []
