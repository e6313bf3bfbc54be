"""A plugin of pytest for gpu-check: ends a worker of pytest-xdist whose device a test has made unusable.

After an illegal access every further call of CUDA fails in that process, so that all later tests would. A new
worker takes its place. The test that was at fault has failed already; pytest-xdist says of it, too, that its
worker crashed.
"""

from __future__ import annotations

import os

import pytest


def lost() -> bool:
    """Whether the device answers with an error."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


_failed = False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failed
    _failed |= report.failed


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    global _failed
    if _failed and "PYTEST_XDIST_WORKER" in os.environ and lost():
        os._exit(1)
    _failed = False
