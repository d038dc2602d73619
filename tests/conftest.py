"""Shared by all tests: hypothesis profiles, thread count, and skipping what this machine cannot run."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None, database=None)
settings.register_profile("full", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")  # --hypothesis-profile=full overrides it


def pytest_configure(config: pytest.Config) -> None:
    """Give each test process its share of the cores, so that xdist's workers do not fight over them; `-m full` means
    hypothesis's full profile too."""
    if "full" in config.option.markexpr.split() and "not" not in config.option.markexpr.split():
        settings.load_profile("full")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // workers)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = "torch is a CPU build" if torch.version.cuda is None else "no CUDA device"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same torch generator state, whatever ran before it."""
    torch.manual_seed(0)
