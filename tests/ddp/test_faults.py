"""What goes wrong is an error at backward() on every rank that is left, never a hang or stale gradients."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import pytest
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, Trainer, assert_same
from common import CODECS, GATHERED, LINEAR, begin, groups_of, run_on
from harness import RankFailed, on_ranks, run
from sidcomp import _core
from sidcomp.doors.ddp import register

SEVERAL = [c.name for c in CODECS.values() if c.reductions]
ONE_OF_EACH = ["none", LINEAR[0], GATHERED[0], *SEVERAL[:1]]  # travel differently
GROUPS = ["bucket", "model"]


def unmoved(trainer: Trainer, before: Mapping[str, torch.Tensor | None]) -> None:
    """The step in between has failed, and left the parameters as they were."""
    assert_same(*({n: v for n, v in x.items() if n.startswith("parameter")}
                  for x in (trainer.snapshot(), before)), "after a step that failed")  # fmt: skip


# ---- a peer goes away --------------------------------------------------------------------------------------


def lose_a_peer(rank: int, world: int, codec: str, groups: str, how: str) -> tuple[str, str, str]:
    trainer, state = begin(rank, groups=groups, codec=codec)
    for _ in range(3):
        trainer.step()
    if rank == world - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)
    before = trainer.snapshot()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(100):  # the first collective may still find the peer's last bytes, no more
            trainer.step()
    unmoved(trainer, before)
    with pytest.raises(RuntimeError):  # the group is broken: later steps must say so as well
        trainer.step()
    return str(caught.value), type(state.error).__name__, str(state.error)


@pytest.mark.many
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("codec", ONE_OF_EACH)
def test_a_peer_dies(codec: str, groups: str) -> None:
    text, kind, error = run(lose_a_peer, 2, codec, groups, "kill", dying=[1])[0]
    assert kind == "ExchangeError", (kind, error)
    assert re.search(r"group \d \(.*\.weight", error) and re.search(r"group \d \(.*\.weight", text), (
        error,
        text,
    )


def test_one_of_three_peers_dies() -> None:
    for text, kind, error in run(lose_a_peer, 3, GATHERED[0], "bucket", "kill", dying=[2], group_timeout=10)[
        :2
    ]:
        assert kind == "ExchangeError", (text, kind, error)


@pytest.mark.parametrize("codec", ONE_OF_EACH)
def test_a_peer_stops(codec: str) -> None:
    text, kind, error = run(lose_a_peer, 2, codec, "bucket", "stop", dying=[1], group_timeout=4)[0]
    assert kind == "ExchangeError", (text, kind, error)


# ---- an error inside the step ------------------------------------------------------------------------------


class Planted(Exception):
    pass


def plant(method: str, do: Callable[..., None], group: int = 0, late: int = 0) -> None:
    """Calls do(plan, *arguments) once, behind the core's own method on `group`, after `late` other calls."""
    calls = 0

    def behind(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            result = original(self, *arguments, **named)
            if named["group"] == group:
                calls += 1
                if calls == late + 1:
                    do(self, *arguments)
            return result

        return wrapped

    # Two ranks that swap their payloads decode both from where they are.
    for name in ("decode", "decode_list") if method == "decode" else (method,):
        setattr(_core.Plan, name, behind(getattr(_core.Plan, name)))


def explode(*_: Any) -> None:
    raise Planted("planted error, number 4711")


@pytest.mark.many
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("method", ["encode", "decode"])
@pytest.mark.parametrize("codec", [LINEAR[0], *GATHERED])
@on_ranks(2)
def test_an_error_on_every_rank_surfaces_and_the_next_step_runs(
    rank: int, world: int, codec: str, method: str, groups: str
) -> None:
    trainer, state = begin(rank, groups=groups, codec=codec)
    for _ in range(3):
        trainer.step()
    plant(method, explode)
    before = trainer.snapshot()
    with pytest.raises(RuntimeError, match="planted error, number 4711"):
        trainer.step()
    assert isinstance(state.error, sidcomp.SidcompError), repr(state.error)
    assert isinstance(state.error.__cause__, Planted), repr(state.error.__cause__)
    unmoved(trainer, before)
    run_on(trainer)


@pytest.mark.many
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    "codec", [c.name for c in CODECS.values() if c.linear and not c.lossless] + GATHERED[:1]
)
@on_ranks(3)
def test_an_error_on_one_rank_stops_all(rank: int, world: int, codec: str, groups: str) -> None:
    """One rank's encode fails: neither rank may hang, and neither may take the step for a good one."""
    trainer, state = begin(rank, groups=groups, codec=codec)
    for _ in range(3):
        trainer.step()
    before = trainer.snapshot()
    if rank == 1:
        plant("encode", explode)
    with pytest.raises(RuntimeError) as caught:
        trainer.step()
    assert rank == 1 or state.error.rank == 1, state.error  # type: ignore[union-attr]
    unmoved(trainer, before)
    run_on(trainer)
    text = str(caught.value)
    assert "planted error, number 4711" in text and (rank == 1 or "payload of rank 1" in text), text


class Breaks(torch.autograd.Function):
    """Raises in backward() where it is told to: between two buckets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.broken:
            raise Planted("planted error, number 4711")
        return gradients[0], None


@pytest.mark.parametrize("how", ["autograd", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": "none"},
        {"codec": LINEAR[0], "checksum_every": 1},
        pytest.param({"codec": GATHERED[0]}, marks=pytest.mark.slow),
        *(pytest.param({"codec": c}, marks=pytest.mark.slow) for c in SEVERAL),
        pytest.param({"codec": GATHERED[0], "exchange": "twoshot"}, marks=pytest.mark.slow),
    ],
    ids=lambda a: "-".join(map(str, a.values())),
)
@on_ranks(3)
def test_an_iteration_that_one_rank_gives_up_stops_all(
    rank: int, world: int, arguments: dict[str, Any], how: str
) -> None:
    """In step 3 one rank's backward pass breaks off after some buckets, or the hook cannot begin it."""
    trainer, state = begin(rank, groups="bucket", **arguments)
    state.follow(trainer.optimizer)
    broken = False
    trainer.module.first.register_forward_hook(
        lambda m, i, out: Breaks.apply(out, broken and how == "autograd")
    )
    for _ in range(3):
        trainer.step()
    assert len(groups_of(state)) > 1
    broken = rank == 1
    if broken and how == "hook":
        trainer.optimizer.param_groups[0]["lr"] = float("nan")
    before = trainer.snapshot()
    with pytest.raises((RuntimeError, Planted)) as caught:
        trainer.backward(0, "sync")
        if rank == 1:
            raise AssertionError("it was to fail")
    unmoved(trainer, before)
    broken = False
    trainer.optimizer.param_groups[0]["lr"] = 0.05
    trainer.wrapper.reducer._reset_state() if how == "autograd" else None
    run_on(trainer)
    if rank == 1:
        want = "planted error, number 4711" if how == "autograd" else "group 0 is nan"
    else:  # what travels in messages fails from rank to rank
        want = r"group \d .*rank 1" if "exchange" not in arguments else r"group \d .*rank \d"
    assert re.search(want, str(caught.value)), caught.value


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("codec", GATHERED)
@on_ranks(3)
def test_a_corrupt_payload_names_its_rank(rank: int, world: int, codec: str, groups: str) -> None:
    """One rank's payload has a flipped bit: every rank says whose."""
    trainer, state = begin(rank, groups=groups, codec=codec)
    for _ in range(3):
        trainer.step()

    def flip(plan: Any, buffers: _core.Buffers) -> None:
        byte = ctypes.c_ubyte.from_address(buffers.payload + plan.payload_bytes // 2)
        byte.value ^= 16

    if rank == 1:
        plant("encode", flip)
    with pytest.raises(RuntimeError, match="rank 1") as caught:
        trainer.step()
    assert isinstance(state.error, sidcomp.CorruptPayloadError), repr(state.error)
    assert "group 0" in str(state.error) and "rank 1" in str(state.error), str(state.error)
    assert "group 0" in str(caught.value)
    for _ in range(3):
        trainer.step()


# ---- replicas that drift apart -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [LINEAR[0], *GATHERED])
@on_ranks(3)
def test_checksums_find_a_replica_that_drifts(rank: int, world: int, codec: str) -> None:
    trainer, state = begin(rank, groups=900, codec=codec, checksum_every=1)
    trainer.step()
    trainer.step()
    assert len(groups_of(state)) > 1

    def flip(plan: Any, payloads: int, stride: int, count: int, scale: float, out: _core.Buffers) -> None:
        pointer, _length = struct.unpack("<QQ", out.segments.table()[:16])
        ctypes.c_ubyte.from_address(pointer).value ^= 1

    if rank == 2:
        plant("decode", flip, group=1, late=2)
    with pytest.raises(RuntimeError, match=r"group 1.*rank 2") as caught:
        while trainer.steps < 20:
            trainer.step()
    error = state.error
    assert isinstance(error, sidcomp.DivergenceError), repr(caught.value)
    assert (error.group, error.rank) == (1, 2)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, trainer.steps)
    assert len(set(found)) == 1, "the ranks noticed it in different steps"


@pytest.mark.parametrize("codec", ONE_OF_EACH)
@on_ranks(2)
def test_checksums_of_sound_replicas_say_nothing(rank: int, world: int, codec: str) -> None:
    trainer, _ = begin(rank, groups=900, codec=codec, checksum_every=2)
    for _ in range(6):
        trainer.step()


@on_ranks(2)
def test_checksums_change_nothing(rank: int, world: int) -> None:
    seen = []
    for every in (0, 1):
        trainer, _ = begin(rank, groups="bucket", codec=GATHERED[0], checksum_every=every)
        for _ in range(5):
            trainer.step()
        seen.append(trainer.snapshot())
    assert_same(seen[0], seen[1], "with checksums")


# ---- ranks that do not agree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([{"density": 0.01}, {"density": 0.02}], "density"),
        ([{"codec": GATHERED[0]}, {"codec": LINEAR[0]}], GATHERED[0]),
        ([{"groups": "model"}, {"groups": 500}], "group"),
        ([{"memory": "none"}, {"memory": "residual"}], "memory"),
        ([{"exclude": "1-D"}, {}], "last.bias"),
        ([{"seed": 1}, {"seed": 2}], "seed"),
        ([{"checksum_every": 1}, {}], "checksum_every"),
        ([{"codec": "auto"}, {"codec": "topk"}], "resume"),
        ([{"codec": "auto"}, {"codec": "auto", "warmup": 0}], "warmup"),
        ([{"groups": "auto"}, {"groups": "mergecomp"}], "mergecomp"),
    ],
)
@on_ranks(2, group_timeout=10)
def test_ranks_with_different_settings(
    rank: int, world: int, arguments: list[dict[str, Any]], names: str
) -> None:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State(**arguments[rank])
    with pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught:
        register(trainer.wrapper, state)
        trainer.step()
        trainer.step()
    trainer.close()
    text = str(caught.value)
    assert names in text and "rank" in text, text


# ---- the harness itself ------------------------------------------------------------------------------------


def raises_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("what the harness must show")
    dist.all_reduce(torch.ones(1))


def test_the_harness_shows_a_failing_rank() -> None:
    with pytest.raises(RankFailed, match="what the harness must show"):
        run(raises_on_one, 2)


def hangs_in_torch(rank: int, world: int, marks: str, every_time: bool) -> int:
    """Hangs at the end as torch's Gloo does now and then: on one rank, and in the first run or in all."""
    mark = Path(marks) / "seen"
    if rank == 1 and (every_time or not mark.exists()):
        mark.touch()
        dist.destroy_process_group = lambda: time.sleep(60)  # type: ignore[assignment]
    return rank


def test_a_rank_that_hangs_in_torch_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "END_LIMIT", 2.0)
    with pytest.warns(UserWarning, match="hangs_in_torch again"):
        assert run(hangs_in_torch, 2, str(tmp_path), False) == [0, 1]
    with pytest.warns(UserWarning), pytest.raises(harness.HungAtEnd, match="rank 1: returned"):
        run(hangs_in_torch, 2, str(tmp_path), True)


def does_not_collect(rank: int, world: int) -> None:
    """Hangs before torch's part: what this rank made is never freed."""
    if rank == 1:
        gc.collect = lambda *_: time.sleep(60)  # type: ignore[assignment]


def test_a_rank_that_hangs_before_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "END_LIMIT", 2.0)
    with pytest.raises(RankFailed, match="exit code None") as caught:
        run(does_not_collect, 2)
    assert not isinstance(caught.value, harness.HungAtEnd)
