"""The public names: all there, documented with an example, and the native stub names what the native module has.

`make lint` compares signatures (mypy.stubtest); these tests hold what it does not look at.
"""

import ast
import inspect
from pathlib import Path

import pytest

import daf_rs
from daf_rs import _native

STUB = Path(_native.__file__).with_name("_native.pyi")
PUBLIC = [getattr(daf_rs, name) for name in daf_rs.__all__ if not name.startswith("__")]


def test_all_is_complete_and_sorted():
    assert len(set(daf_rs.__all__)) == len(daf_rs.__all__)
    missing = [name for name in daf_rs.__all__ if not hasattr(daf_rs, name)]
    assert missing == []


def test_typing_marker_is_there():
    assert STUB.with_name("py.typed").is_file()


def test_stub_names_what_the_module_has():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    stubbed = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            stubbed.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stubbed.add(node.target.id)
    present = {name for name in dir(_native) if not name.startswith("__")}
    assert {name for name in stubbed if not name.startswith("__")} == present


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: getattr(thing, "__name__", repr(thing)))
def test_public_name_is_documented(thing):
    documentation = inspect.getdoc(thing)
    assert documentation
    # Errors, and the records that calls hand out, are shown in the examples of what raises and returns them.
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or thing in (daf_rs.Row, daf_rs.Stats)):
        return
    assert ">>>" in documentation, "a public function or class shows a runnable example"


@pytest.mark.parametrize("thing", [t for t in PUBLIC if inspect.isfunction(t)], ids=lambda thing: thing.__name__)
def test_public_function_is_annotated(thing):
    signature = inspect.signature(thing)
    assert signature.return_annotation is not inspect.Signature.empty
    missing = [name for name, p in signature.parameters.items() if p.annotation is inspect.Parameter.empty]
    assert missing == []
