"""What stats() says is what was done; a step allocates nothing and starts collectives in one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import reference
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, Case, Trainer
from common import (
    CODECS,
    GATHERED,
    GROUPS,
    KINDS,
    LINEAR,
    begin,
    defaults,
    groups_of,
    make_state,
    with_density,
)
from harness import on_ranks, run
from torch.utils._python_dispatch import TorchDispatchMode

SETTINGS: dict[str, dict[str, Any]] = with_density(CODECS, 0.05)

# How torch.distributed reaches a process group, and which argument holds what this rank sends.
COLLECTIVES = dict.fromkeys(["allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"], 0)
COLLECTIVES |= dict.fromkeys(
    ["_allgather_base", "all_gather_single", "allgather", "alltoall", "alltoall_base"], 1
)
COLLECTIVES |= dict.fromkeys(
    ["all_to_all_single", "reduce_scatter", "_reduce_scatter_base", "gather", "scatter"], 1
)
COLLECTIVES |= dict.fromkeys(
    ["reduce_scatter_single", "allgather_into_tensor_coalesced", "allgather_coalesced"], 1
)
COLLECTIVES |= dict.fromkeys(["recv", "recv_anysource", "barrier", "monitored_barrier"], -1)  # send nothing


def nbytes(x: Any) -> int:
    return sum(nbytes(y) for y in x) if isinstance(x, list | tuple) else x.numel() * x.element_size()


class Wire:
    """Every collective that Python starts in this process: its name, its bytes, its thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        for name, index in COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self.wrap(name, index, getattr(dist.ProcessGroup, name)))

    def wrap(self, name: str, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(group: Any, *arguments: Any) -> Any:
            sent = 0 if index < 0 else nbytes(arguments[index])
            self.calls.append((name, sent, threading.get_ident()))
            return original(group, *arguments)

        return counted

    def take(self) -> list[tuple[str, int, int]]:
        calls, self.calls = self.calls, []
        return calls


def payload_bytes(codec: str, n: int, dtype: str, settings: dict[str, Any], memory: str) -> int:
    """As docs/wire.md has it; a linear codec's header stays at home."""
    side = reference.Group(codec, memory, 0, n, dtype, {**defaults(codec, memory), **settings})
    elements = reference.from_f32(torch.arange(n, dtype=torch.float32).numpy(), dtype)
    payload = side.encode(elements, reference.Step(world=2))
    if CODECS[codec].linear:
        return side.codec.body_count * reference.STORAGE[side.codec.body_dtype].itemsize
    return len(payload)


def counted(
    rank: int, world: int, name: str, codec: str, ways: Sequence[str | int], checksum_every: int
) -> None:
    """Ways to form groups, one after the other."""
    wire = Wire()
    for groups in ways:
        count(wire, rank, world, name, codec, groups, checksum_every)


def count(
    wire: Wire, rank: int, world: int, name: str, codec: str, groups: str | int, checksum_every: int
) -> None:
    settings = SETTINGS.get(codec, {})
    trainer, state = begin(rank, name, groups, codec=codec, checksum_every=checksum_every, **settings)
    numel = sum(p.numel() for _, p in trainer.named())
    before = {"sent_bytes": 0, "received_bytes": 0, "control_bytes": 0, "dense_bytes": 0, "steps": 0}
    assert {k: state.stats()[k] for k in before} == before
    for step in range(6):
        wire.take()
        trainer.step()
        calls = wire.take()
        stats = state.stats()
        assert {thread for _, _, thread in calls} == {threading.main_thread().ident}
        moved = {k: stats[k] - before[k] for k in before}
        before = {k: stats[k] for k in before}
        assert moved["steps"] == 1
        # bytes: counted on the way out, summed over groups, and what the wire format says
        sent = sum(g["sent_bytes"] for g in stats["groups"])
        assert moved["sent_bytes"] == sent
        for g in stats["groups"]:
            assert g["sent_bytes"] == payload_bytes(g["codec"], g["n"], g["dtype"], settings, g["memory"]), g
        if step >= 3 and not checksum_every:  # the layout is known: nothing else is on the wire
            assert sum(size for _, size, _ in calls) == sent, calls
            sends = [kind for kind, _, _ in calls if kind != "recv"]  # two ranks swap their payloads
            assert len(sends) == len(stats["groups"]), calls
            assert moved["control_bytes"] == 0
        else:
            assert sum(size for _, size, _ in calls) >= sent
        if step >= 3 and checksum_every:
            extra = sum(size for _, size, _ in calls) - sent
            checked = (step + 1) % checksum_every == 1 % checksum_every  # those of the step before
            assert extra == (8 * len(stats["groups"]) if checked else 0), (step, extra)
            assert (moved["control_bytes"] > 0) == checked
        factor = 1 if CODECS[codec].linear else world - 1
        assert moved["received_bytes"] == factor * sent
        assert moved["dense_bytes"] == 4 * numel
        ring = 2 * (world - 1) / world  # passes of a vector that a rank sends in an all-reduce
        travelled = stats["sent_bytes"] * (ring if CODECS[codec].linear else world - 1)
        assert stats["wire_bytes"] == pytest.approx(travelled, abs=1)
        assert stats["dense_wire_bytes"] == pytest.approx(ring * stats["dense_bytes"], abs=1)
        assert stats["ratio"] == pytest.approx(ring * stats["dense_bytes"] / travelled)
        # elements
        assert sorted(n for g in stats["groups"] for n in g["names"]) == sorted(
            n for n, p in trainer.named() if p.numel()
        )
        shapes = dict(trainer.named())
        for g in stats["groups"]:
            assert g["n"] == sum(shapes[n].numel() for n in g["names"])
            assert g["density"] == pytest.approx(g["count"] / g["n"])
            if CODECS[g["codec"]].linear and "sparse" not in CODECS[g["codec"]].traits:
                assert g["count"] == g["k"] == g["n"]
            else:
                share = settings.get("density", 1.0)  # none: every element is sent
                assert g["k"] == reference.target_count(g["n"], share)
        assert stats["density"] == pytest.approx(sum(g["count"] for g in stats["groups"]) / numel)
    trainer.close()
    state.close()
    assert state.stats()["steps"] == 6 and state.stats()["sent_bytes"] == before["sent_bytes"]


@pytest.mark.parametrize("codec", KINDS)
def test_bytes_and_elements(codec: str) -> None:
    run(counted, 2, "cap-small", codec, GROUPS, 0)


@pytest.mark.parametrize("codec", ["none", LINEAR[0], GATHERED[0]])
def test_bytes_of_a_mixed_model_on_three_ranks(codec: str) -> None:
    run(counted, 3, "mixed-tiny", codec, ["bucket"], 0)


@pytest.mark.parametrize("every", [1, 2])
def test_bytes_of_the_checksums(every: int) -> None:
    run(counted, 2, "cap-small", GATHERED[0], ["bucket"], every)


@pytest.mark.parametrize("codec", [c for c in GATHERED if c in SETTINGS])
@on_ranks(2)
def test_achieved_density(rank: int, world: int, codec: str) -> None:
    """`count` is what really left: the elements that the memory no longer has."""
    trainer, state = begin(
        rank, "default", "explicit", codec=codec, memory="residual", **SETTINGS.get(codec, {})
    )
    for _ in range(4):
        trainer.step()
        kept = state.state_dict()["residuals"]
        for g in groups_of(state):
            zeros = sum(int((kept[n] == 0).sum()) for n in g["names"])
            assert g["count"] == zeros and 0 < g["count"] < g["n"]


@on_ranks(2)
def test_steps_and_bytes_are_of_the_same_span(rank: int, world: int) -> None:
    """Steps and bytes are counted from the same point on: after a resume, after a checkpoint that a State
    loads again in the middle of its run, and where a step is discarded."""

    def counted(steps: int) -> None:
        stats = state.stats()
        assert stats["steps"] == steps and stats["sent_bytes"] == steps * payload, stats["steps"]
        assert stats["dense_bytes"] == 4 * numel * steps

    how: dict[str, Any] = {"codec": "topk", "density": 0.05, "groups": "model", "nonfinite": "rollback"}
    trainer, state = begin(rank, **how)
    numel = sum(p.numel() for _, p in trainer.named())
    for _ in range(5):
        trainer.step()
    payload = sum(g["sent_bytes"] for g in state.stats()["groups"])
    each = state.log()["sidcomp/wire_bytes"]
    saved = state.state_dict()
    trainer.step()
    state.skip()
    counted(6)
    trainer, state = begin(rank, **how)
    state.load_state_dict(saved)
    counted(0)
    for steps in (3, 6):
        for _ in range(3):
            trainer.step()
        counted(steps)
        assert state.log()["sidcomp/wire_bytes"] == each
        assert state.state_dict()["step"] == 8, "but steps have the numbers of the whole run"
        state.load_state_dict(saved)
    trainer.close()
    state.close()
    assert state.stats()["steps"] == 6


# ---- the step ----------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Every operation of torch that runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watching(seen: Seen) -> Callable[..., Any]:
    """sidcomp's hook, within the watch."""

    def watched(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        with seen:
            return sidcomp.hook(state, bucket)

    return watched


@pytest.mark.parametrize("name", ["cap-small", "cap-tiny", "mixed", "static-tiny", "unused-odd"])
@on_ranks(2)
def test_a_step_only_communicates(rank: int, world: int, name: str) -> None:
    """From the fifth step on the hook runs no operation of torch but the collectives, and makes no block."""
    for codec, groups in product(("none", LINEAR[0], GATHERED[0]), ("bucket", "explicit")):
        trainer = Trainer(CASES[name], rank)
        state = make_state(groups, trainer.module, codec=codec, **SETTINGS.get(codec, {}))
        seen = Seen()
        trainer.wrapper.register_comm_hook(state, watching(seen))
        for _ in range(4):
            trainer.step()
        assert seen.names, "the watch sees nothing: it could not fail either"
        blocks = state.stats()["allocations"]
        for step in range(4, 10):
            seen.names.clear()
            trainer.step()
            others = [n for n in seen.names if not n.startswith("c10d.")]
            assert not others, f"{codec}, groups={groups!r}, step {step}: {others}"
            assert state.stats()["allocations"] == blocks, f"{codec}, groups={groups!r}, step {step}"
        trainer.close()
        state.close()


@pytest.mark.parametrize("groups", ["bucket", "model"])
@pytest.mark.parametrize("codec", ["none", GATHERED[0]])
@on_ranks(2)
def test_decoded_in_place(rank: int, world: int, codec: str, groups: str | int) -> None:
    """The decoded gradient is in DDP's own bucket: a view of it is the parameter's .grad."""
    case = Case(
        CASES["cap-small"].build,
        CASES["cap-small"].loss,
        ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    )
    trainer = Trainer(case, rank)
    state = make_state(groups, trainer.module, codec=codec, **SETTINGS.get(codec, {}))
    buckets: list[tuple[int, int]] = []

    def watched(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        buckets.append((buffer.data_ptr(), buffer.numel() * buffer.element_size()))
        return sidcomp.hook(state, bucket)

    trainer.wrapper.register_comm_hook(state, watched)
    for _ in range(4):
        buckets.clear()
        trainer.step()
        for name, p in trainer.named():
            assert p.grad is not None
            at = p.grad.data_ptr()
            assert any(start <= at < start + size for start, size in buckets), name
    trainer.close()
    state.close()
