"""PyTorch training in little memory: what autograd saves for backward is stored in a few bits an element.

>>> import torch, daf_rs
>>> model = torch.nn.Linear(64, 64)
>>> with daf_rs.save_compressed(bits=4):
...     loss = model(torch.randn(256, 64)).square().mean()
>>> loss.backward()
"""

from __future__ import annotations

from ._native import __version__, build_info
from .context import Stats, save_compressed
from .exceptions import (
    BackendUnavailableError,
    BudgetExceededError,
    CorruptDataError,
    DafError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedDtypeError,
)
from .policy import Rule, register_consumer
from .quantized import QuantizedTensor, dequantize, quantize
from .report import Report, Row

__all__ = [
    "BackendUnavailableError",
    "BudgetExceededError",
    "CorruptDataError",
    "DafError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "QuantizedTensor",
    "Report",
    "Row",
    "Rule",
    "Stats",
    "UnsupportedDtypeError",
    "__version__",
    "build_info",
    "dequantize",
    "quantize",
    "register_consumer",
    "save_compressed",
]
