"""benchmarks/mls_bench.py: its compressors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import mls_bench  # noqa: E402


def test_its_compressors_keep_the_tasks_interface() -> None:
    """And top-k of 1 % sends what the task's own baseline sends, step by step."""
    x = torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(1))
    sent: dict[str, list[torch.Tensor]] = {}
    for way, make in mls_bench.WAYS.items():
        compressor = make()
        for step in range(3):
            for name, tensor in (("weight", x / (1 + step)), ("bias", x[0, 0])):
                tensors, ctx = compressor.compress(tensor, name)
                out = compressor.decompress(tensors, ctx)
                assert out.shape == tensor.shape and out.dtype == tensor.dtype
                sent.setdefault(way, []).append(out)
    assert all(torch.equal(out, x / (1 + i)) for i, out in enumerate(sent["dense"][::2]))
    for ours, theirs in zip(
        sent["topk, 1 % of the elements"][::2], sent["topk_ef, the task's baseline"][::2], strict=True
    ):
        torch.testing.assert_close(ours, theirs)
