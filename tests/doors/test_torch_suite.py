"""torch's own tests of torch.distributed over the backend "sidcomp" (torch_suite.py runs them)."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

import torch
import torch_suite


@pytest.mark.slow
def test_what_passes_over_gloo_passes_over_the_backend() -> None:
    if find_spec("expecttest") is None:
        pytest.skip("torch's tests need expecttest: pip install expecttest")
    plain, ours = torch_suite.outcomes("gloo"), torch_suite.outcomes("sidcomp")
    passed = [name for name, outcome in plain.items() if outcome == "passed"]
    wrong = {name: ours.get(name) for name in passed if ours.get(name) != "passed"}
    assert not wrong
    counted = re.search(r"With torch ([\d.]+) (\d+) tests pass", torch_suite.__doc__ or "")
    assert counted is not None
    if torch.__version__.startswith(counted[1]):
        assert len(passed) == int(counted[2])
