"""ratio=: how many bytes a sparse codec sends, in place of how many elements."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
from sidcomp import _core
from sidcomp.errors import ParameterError

SPARSE = [c.name for c in sidcomp.codecs() if any(p.name == "density" for p in c.parameters)]


def payload_ratio(c: Any, n: int = 10_000_000) -> float:
    plan = _core.Plan(c.codec.name, c.memory.name, n, "float32", c.parameters)
    return 4 * n / plan.payload_bytes


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("ratio", [8, 40, 1000])
def test_a_payload_has_the_bytes(codec: str, ratio: float) -> None:
    most = 1.02  # of three digits
    state = sidcomp.State(codec, ratio=ratio)
    assert ratio * 0.999 <= payload_ratio(state.settings.candidates[0]) <= most * ratio
    c = sidcomp.Compressor(codec, 1_000_000, ratio=ratio)
    assert ratio * 0.93 <= 4 * c.n / c.payload_bytes <= most * ratio  # header and counts


@pytest.mark.parametrize(("block", "ratio"), [(4096, 8), (4096, 146), (1024, 40), (256, 8)])
@pytest.mark.parametrize("indices", ["u16", "packed"])
def test_blocks_send_whole_elements(block: int, ratio: float, indices: str) -> None:
    """The payload has the bytes that were asked for, and one more element of each block would be too many."""
    c = sidcomp.Compressor("topk", 4096 * 1000, ratio=ratio, block=block, values="log2", indices=indices)
    most = 4 * c.n / ratio
    density = c.parameters["density"]
    more = sidcomp.Compressor(
        "topk", c.n, density=density + 1 / block, block=block, values="log2", indices=indices
    )
    assert c.payload_bytes <= most * 1.001 < more.payload_bytes * 1.02


def test_with_other_parameters() -> None:
    def of(**given: Any) -> dict[str, Any]:
        return dict(sidcomp.State(**given).settings.candidates[0].parameters)

    assert of(ratio=40) == {"values": "log4", "indices": "packed", "density": 0.0842}
    two_bits = of(codec="topk", ratio=40, values="log2", indices="packed")
    assert 0.11 < two_bits["density"] < 0.115
    assert of(codec="topk", ratio=1)["density"] == 0.666  # 6 bytes for an element that is sent
    assert of(codec="topk", ratio=1, values="log2", indices="packed")["density"] == 1
    auto = sidcomp.State("auto", ratio=100).settings.candidates
    assert {round(payload_ratio(c)) for c in auto if c.codec.name == "topk"} == {100}
    own = sidcomp.State("auto", ratio=100, candidates=[("topk", {"density": 0.5}), "sidco-e"]).settings
    assert own.candidates[0].parameters["density"] == 0.5 and "density" in own.candidates[1].parameters


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"codec": "topk", "ratio": 0.5}, "ratio=0.5: give a number from 1 on"),
        ({"codec": "topk", "ratio": "high"}, "ratio='high': give a number from 1 on"),
        ({"codec": "topk", "ratio": 1e9}, "reaches 43691 at most"),
        ({"codec": "topk", "ratio": 40, "density": 0.1}, "give one of them"),
        ({"codec": "topk", "ratio": 40, "beta": sidcomp.Schedule({0: 1.0, 9: 0.5})}, "beta is a Schedule"),
        ({"codec": "topk", "ratio": 40, "valeus": "f16"}, "unknown parameter 'valeus'"),
        ({"codec": "int8", "ratio": 40}, "unknown parameter 'ratio' for codec 'int8'"),
    ],
)
def test_wrong_ratios(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        sidcomp.State(**given)
