"""Every codec's kernels once, for the emulation to watch (test_emulated.py): it stops the process at a race.

Whether the bits are right is test_cuda.py's to say. Without torch, so that all codecs take seconds.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from buffers import Block, parameters
from sidcomp import _core

pytestmark = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="needs the CPU emulation of CUDA")

N, CUTS = 5000, (0, 7, 1500, 5000)
WORLD = 3  # payloads of a gathered decode
WHERE = {"device": 0, "stream": 0}
FORMS: list[dict[str, Any]] = [
    {"values": "f32", "indices": "u16"},
    {"values": "log8", "indices": "packed"},
    {"values": "log2", "indices": "packed"},
]


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    out = []
    for codec in (c for c in _core.codecs() if c["cuda"]):
        has = {p["name"]: p for p in parameters(codec["name"])}
        forms = FORMS if {"values", "indices"} <= has.keys() else [{}]
        if "bits" in has:
            least, most = has["bits"]["min"], has["bits"]["max"]
            forms = [{"bits": max(least, min(3, most / 2))}, {"bits": min(8, most)}]
        if "norm" in has:
            forms = [
                {"norm": v} for p in parameters(codec["name"]) if p["name"] == "norm" for v in p["choices"]
            ]
        if "values" in has and "block" in has:
            forms = forms + [{**f, "block": b} for f, b in zip(FORMS, (4096, 256, 2048), strict=True)]
            forms.append({"values": "log2", "block": 1024})
        if "density" in has:
            forms = [{"density": 0.05, **f} for f in forms]
        out += [(codec["name"], str(codec["memory"]), form) for form in forms]
    return out


@pytest.mark.parametrize("codec, memory, settings", cases(), ids=str)
def test_no_access_races(codec: str, memory: str, settings: dict[str, Any]) -> None:
    one_of_each(codec, memory, settings, CUTS, np.ones(N, np.float32))


@pytest.mark.parametrize("bits", [1.0, 1.5])
def test_no_access_races_around_a_stream_that_sends_nothing(bits: float) -> None:
    """It has no word of its own, so it must not store half of a word that its neighbors share."""
    mask = np.repeat(np.array([0, 1, 0, 0, 1, 1], np.float32), 16384)
    one_of_each("deadzone", "residual", {"bits": bits}, (0, len(mask)), mask)


def one_of_each(
    codec: str, memory: str, settings: dict[str, Any], cuts: tuple[int, ...], mask: np.ndarray
) -> None:
    """Three steps of encode and decode. mask: gradients are multiplied by it."""
    plan = _core.Plan(codec, memory, cuts[-1], "float32", settings)
    rng = np.random.default_rng(1)
    gradient = Block(4 * cuts[-1])
    segments = _core.Segments([gradient.ptr + 4 * a for a in cuts[:-1]], np.diff(cuts).tolist())
    table = Block(len(segments.table()))
    table.data[:] = np.frombuffer(segments.table(), np.uint8)
    state, work, payload = Block(plan.state_bytes), Block(plan.cuda_work_bytes()), Block(plan.payload_bytes)
    stats, report = Block(40), Block(16)
    buffers = _core.DeviceBuffers(table.ptr, len(cuts) - 1, state.ptr, work.ptr, payload.ptr)
    world = 1 if plan.linear else WORLD
    stride = -(-plan.payload_bytes // 64) * 64
    for step in range(3):
        gradient.data[:] = (rng.laplace(size=cuts[-1]).astype(np.float32) * mask).view(np.uint8)
        at = {"step": step, "seed": 5, "group": 3, "rank": 0, "world": world}
        plan.cuda_encode(buffers, **at, stats=stats.ptr, **WHERE)
        for i in range(1, plan.reductions):
            plan.cuda_next_reduction(i, buffers, **at, **WHERE)
        gathered = Block(stride * world)
        for r in range(world):
            gathered.data[r * stride : r * stride + plan.payload_bytes] = payload.data
        plan.cuda_decode(
            gathered.ptr, stride, world, 1 / world, buffers, step=step, group=3, report=report.ptr, **WHERE
        )
    gradient.data[:] = 0xFF  # NaN, which nothing reads
    plan.cuda_settle(_core.DeviceBuffers(0, 0, state.ptr, work.ptr, payload.ptr), **WHERE)
    assert struct.unpack("<IIi", report.data[:12].tobytes()) == (0, 0, 0)
    for block in (gradient, table, state, work, payload, stats, report):
        block.check()
