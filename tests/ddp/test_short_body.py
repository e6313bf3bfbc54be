"""A linear body shorter than its group, through DDP: all ranks agree, and on the mean of what was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from cases import CASES, Trainer, bits
from common import Array, Reference, groups_of, make_state
from harness import run
from sidcomp.doors.ddp import register


class InAnyOrder(Reference):
    """The sum in float64: whatever order the process group adds in is within rounding of it."""

    def sum_bodies(
        self, side: reference.Group, payloads: list[Any], mine: Array, at: reference.Step
    ) -> Array:
        total = np.sum([side.codec.read(p).astype(np.float64) for p in payloads], axis=0)
        return reference.from_f32(total.astype(np.float32), side.dtype)


def close(rank: int, world: int, settings: dict[str, Any], memory: str) -> list[bytes | None]:
    ours, slow = (Trainer(CASES["cap-small"], rank, ddp=ddp) for ddp in (True, False))
    state = make_state("model", ours.module, codec="randk", memory=memory, **settings)
    register(ours.wrapper, state)
    judge = InAnyOrder("randk", memory, settings, rank, world)
    formed: list[list[dict[str, Any]]] = []
    rounding = 2e-3 if settings.get("values") == "f16" else 1e-4  # of a sum in the body's own format
    for step in range(5):
        ours.step(lambda kind: formed.append(groups_of(state)))
        slow.step(lambda kind: judge.exchange(formed.pop(0), dict(slow.named())))
        right = slow.gradients()
        for name, got in ours.gradients().items():
            want = right[name]
            assert got is not None and want is not None
            assert np.allclose(got, want, rtol=rounding, atol=1e-2 * rounding), f"step {step}, {name}"
    (group,) = groups_of(state)
    k = reference.target_count(group["n"], settings["density"])
    assert group["sent_bytes"] == k * (2 if settings.get("values") == "f16" else 4)
    out = [bits(g) for g in ours.gradients().values()]
    ours.close()
    state.close()
    return out


@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_agree(world: int, memory: str) -> None:
    results = run(close, world, {"density": 0.2}, memory)
    assert all(r == results[0] for r in results)


def test_half_values() -> None:
    results = run(close, 2, {"density": 0.2, "values": "f16"}, "residual")
    assert results[0] == results[1]
