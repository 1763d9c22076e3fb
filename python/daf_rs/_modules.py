"""The path of the module whose forward is running, for the report.

Found by walking the stack at a saved tensor's first appearance only: module hooks would make Dynamo recompile.
"""

from __future__ import annotations

import sys
from types import FrameType
from weakref import WeakKeyDictionary

from torch import nn

#: Names of all modules below a root, made once per root.
_paths: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()


def current_module_path() -> str:
    """The dotted path of the innermost running module below the outermost one; ``""`` outside of any.

    >>> current_module_path()
    ''
    """
    frame: FrameType | None = sys._getframe(1)
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                inner = module if inner is None else inner
                outer = module
        frame = frame.f_back
    if inner is None or outer is None:
        return ""
    paths = _paths.get(outer)
    if paths is None or id(inner) not in paths:
        paths = {id(module): name for name, module in outer.named_modules()}
        _paths[outer] = paths
    return paths.get(id(inner)) or type(inner).__name__
