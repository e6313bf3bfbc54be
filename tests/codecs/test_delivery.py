"""No codec that keeps a residual starves: a constant gradient is delivered at its rate.

Error feedback bounds the residual where each step takes away at least a share delta of it (Karimireddy et al.
2019, lemma 3: |e| <= 2 / delta |g|). So after T steps of one gradient g, T g has been sent but for a residual
that no longer grows: what is missing is a share of 2 / (delta T). A threshold that nothing passes breaks this
for ever. The law holds for every codec of the registry whose own memory keeps what was not sent, with each
choice of each of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core

DENSITY = 0.05
KEEPS = {m["name"] for m in _core.memories() if "feedback" in m["traits"]}
# Signs of a fixed magnitude have no rate of their own: their documentation says so.
DELIVER = [c for c in _core.codecs() if c["memory"] in KEEPS and "vote" not in c["traits"]]


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for c in DELIVER:
        has_density = any(p["name"] == "density" for p in c["parameters"])
        base: dict[str, Any] = {"density": DENSITY} if has_density else {}
        yield c["name"], base
        for p in c["parameters"]:
            for choice in p.get("choices") or []:
                # 1 / density times what was chosen is unbiased, and no contraction: it takes no residual.
                # RedSync's quantised form drops a part of the gradient, as printed.
                others = (("scaling", "unbiased"), ("quantised", "printed"))
                if choice != p["default"] and (p["name"], choice) not in others:
                    yield c["name"], base | {p["name"]: choice}


def gradients(n: int) -> dict[str, Array]:
    rng = np.random.default_rng(n)
    near = np.where(np.arange(n) % 2, np.float32(1), np.nextafter(np.float32(1), np.float32(2)))
    one = np.zeros(n)
    one[n // 2] = 1
    kinds = {
        "equal": rng.choice(np.array([-0.125, 0.125]), n),
        "equal and negative": np.full(n, -0.125),
        "nearly equal": near,
        "normal": rng.normal(size=n),
        "shifted": rng.normal(3, 1, n),
        "one": one,
    }
    return {kind: x.astype(np.float32) for kind, x in kinds.items()}


def share_of(codec: str, settings: dict[str, Any], n: int) -> float:
    """The least share of a vector's square that a step takes away, delta."""
    if "density" in settings:
        return max(1, math.floor(DENSITY * n + 0.5)) / n
    signs = "feedback" in next(c for c in DELIVER if c["name"] == codec)["traits"]
    return 1 / n if signs else 0.25


@pytest.mark.many
@pytest.mark.parametrize("n", [1, 5, 96])
@pytest.mark.parametrize(
    "codec, settings", [pytest.param(c, s, id="-".join([c, *map(str, s.values())])) for c, s in variants()]
)
def test_a_constant_gradient_is_delivered(codec: str, settings: dict[str, Any], n: int) -> None:
    """Within 40 / delta steps, to a tenth: delta is k / n, for signs 1 / n, for other codecs a quarter."""
    for kind, g in gradients(n).items():
        plan = _core.Plan(codec, "residual", n, "float32", settings)
        share = share_of(codec, settings, n)
        rank, x, out = Rank(plan), Vector(g), Vector(np.zeros_like(g))
        steps = math.ceil(40 / share)
        for step in range(steps):
            rank.encode(x, Step(step=step))
            payload = rank.next_reductions(x, Step(step=step))
            if plan.reductions > 1:  # the last reduction's result is a part of what is kept
                rank.decode([payload], 1.0, out, Step(step=step))
        missing = float(np.linalg.norm(rank.residual()[0].astype(np.float64)))
        asked = steps * float(np.linalg.norm(g.astype(np.float64)))
        assert missing <= 0.1 * asked, f"{kind}: {missing / asked:.3f} of {steps} steps is still missing"
