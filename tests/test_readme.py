"""Every Python example of the documents runs, and every command they show exists."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")] if path.is_file()
)
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of every fenced block of a language."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in found]


EXAMPLES = [
    pytest.param(path, line, code, id=f"{path.name}:{line}")
    for path in DOCUMENTS
    for line, code in blocks(path, "python")
]


def test_readme_has_examples():
    assert any(param.values[0].name == "README.md" for param in EXAMPLES)


@pytest.mark.parametrize(("path", "line", "code"), EXAMPLES)
def test_example_runs(path, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if code.startswith(">>>"):
        # A session shows what each line prints, as a docstring does.
        session = doctest.DocTestParser().get_doctest(code, {}, path.name, str(path), line - 1)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        printed: list[str] = []
        result = doctest.DocTestRunner(optionflags=flags).run(session, out=printed.append)
        assert result.attempted > 0
        assert result.failed == 0, "".join(printed)
        return
    # The blank lines make tracebacks point to the document's own lines.
    exec(compile("\n" * (line - 1) + code, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(path):
    text = path.read_text(encoding="utf-8")
    code = [block for language in ("sh", "bash", "console") for _, block in blocks(path, language)]
    code += re.findall(r"`([^`\n]+)`", text)
    named = {target for piece in code for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", piece)}
    assert named <= MAKE_TARGETS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_exist(path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in relative if not (path.parent / target).exists()] == []


def test_makefile_help_lists_every_target():
    described = set(re.findall(r"^([a-z][a-z0-9-]*):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert described == MAKE_TARGETS


def test_ci_runs_make_targets_that_exist():
    phases = re.findall(r"^phase make (\S+)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    assert phases
    assert set(phases) <= MAKE_TARGETS
