"""benchmarks/bench_cached.py: the time of an element without that of a call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
pytest.importorskip("torch")
from benchmarks import bench_cached as bench  # noqa: E402
from benchmarks.common import summary  # noqa: E402


def test_a_call_takes_a_hundred_microseconds_and_an_element_two_nanoseconds() -> None:
    few, many = (summary([0.1 + n * 2e-6, 0.1 + n * 2e-6]) for n in bench.SIZES)
    assert bench.each(few, many) == pytest.approx(2.0)


@pytest.mark.parametrize("codec", ["int8", "topk", "fp16"])
def test_a_row(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are of the calls that they name; instructions are those that were saved, over the time."""
    settings: dict[str, Any] = {"density": 0.01} if codec == "topk" else {}
    monkeypatch.setattr(bench, "LARGE", 20_000)
    monkeypatch.setattr(bench.bench_codec, "WARMUP", 3)
    saved = {
        bench.title(codec, settings): {f"{w}, {bench._core.isa_best()}": 3.0 for w in ("encode", "decode")}
    }
    monkeypatch.setattr(bench, "kept", lambda: saved)
    found = bench.row(codec, settings, 5, bench.bench_codec.gradients_of("laplace", 20_000))
    assert found.pop("codec") == bench.title(codec, settings)
    assert len(found) == 10
    for what in ("encode", "decode"):
        ns, per_ns = found[f"{what}, cached"], found[f"{what}: instructions a ns"]
        assert per_ns == (pytest.approx(3.0 / ns) if ns > 0 else "")
        assert found[f"{what}, 20,000"] > 0
