"""What a compressed step gives, judged by the NumPy reference, which says which elements a codec sends.

Codecs come from the registry. Those that may choose their threshold are judged in test_codecs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case, Trainer, assert_same
from common import (
    CODECS,
    GATHERED,
    GROUPS,
    LINEAR,
    LOSSY,
    MEMORIES,
    OTHERS,
    PLAIN,
    Reference,
    assert_alike,
    begin,
    groups_of,
    make_state,
    residuals_of,
    tolerant,
    with_density,
)  # fmt: skip
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from sidcomp.runtime.communicator import Exchange

EXACT = [name for name in GATHERED if not tolerant(name)]
SETTINGS: dict[str, dict[str, Any]] = with_density(CODECS, 0.07)
WORLDS = [1, 2, 3, 4]


def follow(
    rank: int,
    world: int,
    name: str | Case,
    groups: str | int,
    codec: str,
    memory: str,
    settings: Mapping[str, Any],
    steps: int,
    ddp: Mapping[str, Any],
    exclude: Any = (),
) -> None:
    """Trains with the hook, and without DDP through the reference; both must agree after each step."""
    case = CASES[name] if isinstance(name, str) else name
    ours, slow = Trainer(case, rank, **ddp), Trainer(case, rank, ddp=False)
    gathered = {} if CODECS[codec].linear else {"exchange": "allgather"}  # which the reference does
    state = make_state(
        groups, ours.module, codec=codec, memory=memory, exclude=exclude, **gathered, **settings
    )
    register(ours.wrapper, state)
    judge = Reference(codec, memory, settings, rank, world)
    parameters = dict(slow.named())
    formed: list[list[dict[str, Any]]] = []  # the groups of each exchange
    for step in range(steps):
        ours.step(lambda kind: formed.append(groups_of(state)) if kind == "sync" else None)
        slow.step(lambda kind: judge.exchange(formed.pop(0), parameters) if kind == "sync" else None)
        where = f"{codec} + {memory}, groups={groups!r}, {name}, {dict(ddp)}, step {step}"
        assert_same(ours.gradients(), slow.gradients(), where)
        assert_same(dict(ours.named()), dict(slow.named()), where)
        kept = residuals_of(state)
        for parameter, _ in slow.named():
            lossy = any(parameter in g["names"] and g["codec"] == codec for g in groups_of(state))
            keeps = (lossy and not CODECS[codec].lossless) or MEMORIES[memory].momentum
            assert (parameter in kept) == (memory != "none" and keeps), f"{where}: {list(kept)}"
            if parameter in kept:
                mine, right = kept[parameter].cpu().numpy(), judge.kept[parameter]
                assert np.array_equal(mine, right), f"{where}: residual of {parameter}: {mine} is not {right}"
    ours.close()
    state.close()


def follow_each(rank: int, world: int, runs: Sequence[tuple[Any, ...]]) -> None:
    """One start of the processes for several runs: that takes longer than a run."""
    for arguments in runs:
        follow(rank, world, *arguments)


SLOW = pytest.mark.slow
# One codec at every number of ranks, with and without a memory; the others of their kinds at few. A sum of
# more than two ranks has an order of its own.
BY_ALL_GROUPS = [(EXACT[0], m, w) for m in PLAIN for w in WORLDS]
BY_ALL_GROUPS += [pytest.param(EXACT[0], m, 8, marks=SLOW) for m in PLAIN]
BY_ALL_GROUPS += [(c, "residual", 2) for c in EXACT[1:]]
BY_ALL_GROUPS += [pytest.param(c, "residual", 3, marks=SLOW) for c in EXACT[1:]]
BY_ALL_GROUPS += [(c, m, w) for c in LINEAR for m in PLAIN for w in (1, 2)]


@pytest.mark.parametrize(("codec", "memory", "world"), BY_ALL_GROUPS)
def test_equals_the_reference(codec: str, memory: str, world: int) -> None:
    settings = SETTINGS.get(codec, {})
    run(follow_each, world, [("cap-small", groups, codec, memory, settings, 5, {}) for groups in GROUPS])


@pytest.mark.parametrize(
    "codec", [c.name for c in CODECS.values() if not c.lossless and not tolerant(c.name)]
)
def test_every_codec_equals_the_reference(codec: str) -> None:
    run(follow, 2, "cap-small", "model", codec, "residual", SETTINGS.get(codec, {}), 4, {})


@pytest.mark.parametrize("codec", [EXACT[0], *(pytest.param(c, marks=SLOW) for c in EXACT[1:])])
def test_equals_the_reference_on_eight_ranks(codec: str) -> None:
    run(follow, 8, "cap-small", "model", codec, "residual", SETTINGS.get(codec, {}), 4, {})


@pytest.mark.parametrize("memory", OTHERS)
@pytest.mark.parametrize("codec", ["none", *EXACT[:1], *LINEAR[:1]])
def test_every_memory_equals_the_reference(codec: str, memory: str) -> None:
    runs = [
        ("cap-small", groups, codec, memory, SETTINGS.get(codec, {}), 6, {})
        for groups in ("bucket", "explicit")
    ]
    run(follow_each, 2, runs)


@pytest.mark.many
@pytest.mark.parametrize("views", [(True, False), pytest.param((False, True), marks=SLOW)])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("cap-small", "cap-25")])
def test_equals_the_reference_in_every_mode(name: str, views: tuple[bool, bool]) -> None:
    if not cases.available(CASES[name]):
        pytest.skip(f"this torch has no DDP({CASES[name].needs}=)")
    runs = [
        (name, groups, "topk", "residual", {"density": 0.1}, 5, {"gradient_as_bucket_view": view})
        for groups, view in zip(("bucket", "explicit"), views, strict=True)
    ]
    run(follow_each, 2, runs)


@pytest.mark.parametrize("codec", LINEAR)
def test_linear_equals_the_reference_in_some_modes(codec: str) -> None:
    names = ("mixed", "mixed-tiny", "mixed-static", "shapes-tiny", "channels-last")
    run(follow_each, 2, [(name, "bucket", codec, "residual", {}, 5, {}) for name in names])


class Half(cases.Scrambled):
    """All of it in one half type: its gradients have equal magnitudes, so that ties decide."""

    dtype = torch.float16

    def __init__(self) -> None:
        super().__init__()
        self.to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = [p.flatten() for p in self.parameters()]
        return torch.cat(
            [v * x.flatten().to(self.dtype).repeat(-(-len(v) // x.numel()))[: len(v)] for v in w]
        )


class Brain(Half):
    dtype = torch.bfloat16


@pytest.mark.parametrize("codec", [*EXACT, *LINEAR])
def test_equals_the_reference_in_half_precision(codec: str) -> None:
    models = [Case(model, cases.square, ddp={"bucket_cap_mb": 0.0005}) for model in (Half, Brain)]
    settings = SETTINGS.get(codec, {})
    run(follow_each, 2, [(c, "bucket", codec, m, settings, 5, {}) for c in models for m in PLAIN])


@pytest.mark.parametrize("codec", [*EXACT, *LINEAR])
def test_beside_dense_parameters(codec: str) -> None:
    runs = [
        ("cap-small", groups, codec, "residual", SETTINGS.get(codec, {}), 5, {}, exclude)
        for groups in ("bucket", "model")
        for exclude in ("1-D", "*.weight", 100)
    ]
    run(follow_each, 2, runs)


# ---- replicas ----------------------------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize(
    ("world", "groups", "steps", "case"),
    [
        (2, 900, 200, "cap-small"),
        (2, 900, 200, "mixed"),
        (3, "bucket", 40, "mixed"),
        (3, "model", 40, "mixed"),
        pytest.param(8, "bucket", 200, "mixed", marks=SLOW),
    ],
)
@pytest.mark.parametrize("codec", LOSSY)
@on_ranks()
def test_replicas_stay_identical(
    rank: int, world: int, codec: str, groups: str | int, steps: int, case: str
) -> None:
    trainer = Trainer(CASES[case], rank, lr=0.01)
    state = make_state(groups, trainer.module, codec=codec, memory="residual", **SETTINGS.get(codec, {}))
    register(trainer.wrapper, state)
    start = [cases.bits(p) for p in trainer.module.parameters()]
    for step in range(steps):
        trainer.step()
        if step % 50 == 49 or step == steps - 1:
            assert [cases.bits(p) for p in trainer.module.parameters()] != start
            assert_alike(dict(trainer.named()), f"{codec}: replicas differ after {step + 1} steps")
    trainer.close()
    state.close()


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_two_ranks_swap_their_payloads(rank: int, world: int) -> None:
    """Gloo's collective sends the payloads of two ranks one after the other."""
    called = []
    gather = Exchange.all_gather

    def noting(exchange: Exchange, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        called.append(tensor.numel())
        return gather(exchange, out, tensor)

    Exchange.all_gather = noting  # type: ignore[method-assign]
    begin(rank, codec="topk", density=0.1, exchange="allgather")[0].step()
    assert bool(called) == (world != 2)
