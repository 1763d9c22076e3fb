"""Settings that every test shares: which tests run, how many examples hypothesis draws, a known state of torch.

Environment:
    DAF_TEST_SLOW=1         also run the tests marked `slow` (as `pytest --slow` does).
    HYPOTHESIS_PROFILE      `fast` (default), `slow` (20 times the examples) or `debug`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta

# Before torch is imported: its threads then sleep instead of spinning between the many small operations here, which
# on a busy machine of few cores makes some tests ten times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, Verbosity, settings

settings.register_profile(
    "fast",
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "slow",
    max_examples=500,
    deadline=timedelta(seconds=60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("debug", parent=settings.get_profile("fast"), verbosity=Verbosity.verbose)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, so that the tests also run without the project's settings."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds; runs with --slow or DAF_TEST_SLOW=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless asked for."""
    if config.getoption("--slow") or os.environ.get("DAF_TEST_SLOW") == "1":
        return
    skip = pytest.mark.skip(reason="slow: run with --slow or DAF_TEST_SLOW=1")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def known_state() -> Iterator[None]:
    """Start every test from the same seeds, and check that it leaves torch's global switches alone."""
    torch.manual_seed(1234)
    random.seed(1234)
    yield
    assert torch.is_grad_enabled(), "the test left grad mode switched off"
    assert torch.get_default_dtype() == torch.float32, "the test left another default dtype"
    assert not torch.are_deterministic_algorithms_enabled(), "the test left deterministic mode on"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "the test left saved-tensor hooks active"
