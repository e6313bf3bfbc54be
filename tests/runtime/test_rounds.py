"""Updates with a deadline: ranks that are late, end, or come back.

The ranks are started as torchrun starts them, and the store is served by the test, as torchrun's agent does.
What must hold of every run: the common point has the same bits on all members, and nothing is lost: what the
members sent and what they keep add up to what their optimizers did."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import context, on_ranks, run
from local_training import OPTIMIZERS, alike, flat, network, resumes, updates
from local_training import train as train_on
from sidcomp.local import rendezvous as rounds
from sidcomp.local.steps import Updates
from torch import nn

SLOW = pytest.mark.slow
EVERY = 3
DEADLINE = 2.5  # longer than what the ranks are apart on a busy machine
LIMIT = 120.0


class Job:
    """Processes that look as if torchrun had started them, and that may be killed and started again."""

    def __init__(self, world: int, apart: bool = False) -> None:
        """apart: the store is served by a process of its own."""
        self.world = world
        port, self.server = 0, None
        if apart:
            here, there = context().Pipe()
            self.server = context().Process(target=_serve, args=(there,), daemon=True)
            self.server.start()
            port = here.recv()
        self.store = dist.TCPStore("127.0.0.1", port, None, not apart, timedelta(seconds=LIMIT), False)
        self.processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}

    def start(self, rank: int, **plan: Any) -> None:
        here, there = context().Pipe()
        given = rank, self.world, self.store.port, plan, there
        self.processes[rank] = context().Process(target=_main, args=given, daemon=True)
        self.processes[rank].start()
        there.close()
        self.pipes[rank] = here

    def record(self) -> dict[str, Any]:
        """What the ranks have agreed on."""
        for key in ("sidcomp/outer/1", "/worker/attempt_0/sidcomp/outer/1"):  # the latter in older torch
            if self.store.check([key]):
                found: dict[str, Any] = json.loads(self.store.get(key))
                return found
        return {"version": -1}

    def version(self) -> int:
        """Of the newest common point; -1: none yet."""
        return int(self.record()["version"])

    def given_up(self) -> int:
        """How many attempts at a round did not count, in each of which all members waited for a time limit or
        lost what they had exchanged."""
        record = self.record()
        return int(record["number"]) - int(record["version"]) - 1

    def wait_for(self, version: int) -> None:
        end = time.monotonic() + LIMIT
        while self.version() < version:
            assert time.monotonic() < end, f"no version {version}; the record: {self.record()}"
            time.sleep(0.01)

    def end_store(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.join(10)

    def ended(self, rank: int) -> int | None:
        self.processes[rank].join(LIMIT)
        return self.processes[rank].exitcode

    def answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(LIMIT):
            raise AssertionError(f"rank {rank} does not answer; the record: {self.record()}")
        fine, answer = pickle.loads(self.pipes[rank].recv_bytes())
        assert fine, f"rank {rank}: {answer}"
        return answer

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.processes.values(), *([self.server] if self.server is not None else [])]:
            process.kill()
            process.join(10)


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT), False)
    pipe.send(store.port)
    signal.pause()


def _main(rank: int, world: int, port: int, plan: dict[str, Any], pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    try:
        answer = pickle.dumps((True, train(rank, **plan)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    os._exit(0)


class Round(NamedTuple):
    """What a rank knows of a round. contributors: members that had something to add. mean: of these. given:
    by this rank; residual: what it then had not sent of it and of what came before."""

    version: int
    members: list[int]
    contributors: float
    mean: torch.Tensor
    given: torch.Tensor
    residual: torch.Tensor


def train(
    rank: int,
    until: int | None = None,
    codec: tuple[str, dict[str, Any]] = ("topk", {"density": 0.1}),
    delay: int = 0,
    lr: float = 1.0,
    momentum: float = 0.0,
    stale: int = 10,
    joined: int | None = None,
    pause: float = 0.0,
    **events: Any,
) -> dict[str, Any]:
    """Trains until the common point has version `until`; None: for three rounds after the one in which the
    third rank came back, which has joined=3.

    events: the versions after which this rank does something: `dies`, `waits` (for the others to go on
    without it), `dies_meeting`, `dies_sending` or `stops_sending` (as the next exchange begins; inside it).
    """
    rounds.STALLED_S = 4.0
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidcomp").addHandler(heard)
    module = network(rank)
    module.register_buffer("of_rank", torch.tensor([rank]))
    optimizer = OPTIMIZERS["momentum"](module.parameters())
    with sidcomp.State(codec[0], **codec[1]) as state:
        stepped: list[torch.Tensor] = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(flat(module)))  # before it exchanges
        outer = updates(
            "outer", module, optimizer, state, every=EVERY, delay=delay, lr=lr, momentum=momentum,
            deadline=DEADLINE, stale=stale,
        )  # fmt: skip
        meetings = outer.meetings
        assert meetings is not None
        attendance = meetings.attendance
        start = flat(module)
        came = attendance.version
        if "loads" in events:
            saved = torch.load(events["loads"])
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            state.load_state_dict(saved[2])
            outer.load_state_dict(saved[3])
        history: list[Round] = []
        moved = torch.zeros_like(start)  # by the optimizer, in all steps
        gave = torch.zeros_like(start)  # to the rounds that counted
        launched = torch.zeros_like(start)
        launch, end = outer._launch, attendance.end

        def launches(together: list[int]) -> None:
            with outer.common():
                point = flat(module)
            launched.copy_(point - flat(module))
            launch(together)

        def residual() -> torch.Tensor:
            found = state.state_dict()["residuals"]
            return torch.cat(
                [
                    found[n][0].flatten() if n in found else torch.zeros(p.numel())
                    for n, p in module.named_parameters()
                ]
            )

        def ends() -> Any:
            before = attendance.version
            outcome = end()
            if outcome is not None:
                mean = torch.cat([x.flatten() for v in outer.vectors for x in v.update_views])
                given = launched.clone() if outcome.version - 1 - before <= stale else 0 * launched
                contributors = len(outcome.members) / outcome.scale
                mean = order(mean, module) * outcome.scale
                history.append(Round(outcome.version, outcome.members, contributors, mean, given, residual()))
                gave.add_(given)
            return outcome

        outer._launch, attendance.end = launches, ends  # type: ignore[method-assign]
        _arrange(rank, outer, events)
        with outer.common():
            away = flat(module)
        away, had = away - flat(module), residual()
        if joined is not None:
            until = came + joined
        while until is None or attendance.version < until:
            if pause:
                time.sleep(pause)
            if events.get("saves") == attendance.version and meetings.since == EVERY - 1:
                one = [copy.deepcopy(x.state_dict()) for x in (module, optimizer, state, outer)]
                torch.save(one, events["file"])
            if events.get("dies") == attendance.version and meetings.since == EVERY - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if events.get("waits") == attendance.version and meetings.since == EVERY - 1:
                there = attendance.version
                while attendance.rounds.look()["version"] < there + events.get("rounds", 1):
                    time.sleep(0.01)
            before = flat(module)
            train_on(module, optimizer, rank, range(outer.steps, outer.steps + 1))
            moved.add_(before - stepped.pop())
            went = [r.members for r in history]
            if until is None and rank < 2 and [0, 1] in went and went[-1] == [0, 1, 2]:
                until = history[-1].version + 3
        if meetings.gone:
            outer.land()
        with outer.common() as common:
            point = flat(common)
            at = [x.clone() for x in attendance.vectors()]
        return {
            "rank": rank, "point": point, "vectors": at, "history": history, "moved": moved, "gave": gave,
            "away": point - flat(module) - away, "version": attendance.version, "came": came, "had": had,
            "said": [x for x in said if "takes place" in x or "was late" in x],
        }  # fmt: skip


def _arrange(rank: int, outer: Updates, events: dict[str, Any]) -> None:
    """Lets this rank do something inside an exchange."""
    assert outer.meetings is not None
    attendance = outer.meetings.attendance
    gather, broadcast = rounds.RoundExchange.all_gather, rounds.RoundExchange.broadcast
    left = dict(events)

    def all_gather(self: Any, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if outer.steps and tensor.numel() > 40:  # a payload
            if left.get("dies_sending") == attendance.version:
                os.kill(os.getpid(), signal.SIGKILL)
            if left.get("stops_sending") == attendance.version:
                del left["stops_sending"]
                os.kill(os.getpid(), signal.SIGSTOP)
        return gather(self, out, tensor)

    def broadcasts(self: Any, tensor: torch.Tensor, source: int) -> None:
        if outer.steps and left.get("dies_meeting") == attendance.version:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(self, tensor, source)

    rounds.RoundExchange.all_gather = all_gather  # type: ignore[method-assign]
    rounds.RoundExchange.broadcast = broadcasts  # type: ignore[method-assign]


def order(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A vector over the parts, which have the last parameters first, in the module's order."""
    sizes = [p.numel() for p in module.parameters()]
    return torch.cat(list(reversed(torch.split(x, sizes[::-1]))))


def examine(answers: list[dict[str, Any]], rounds_of_all: int) -> None:
    """What must hold of the ranks that are left, also across rounds that failed: all have the same bits. In
    every round what was sent, and what is kept, is what came in. What an optimizer did is in rounds, or still
    in the parameters. rounds_of_all: of so many all members are here; the others had one that ended."""
    first = answers[0]
    by_version: dict[int, dict[int, Round]] = {}
    kept: dict[tuple[int, int], torch.Tensor] = {}
    for a in answers:
        assert torch.equal(a["point"], first["point"]) and a["version"] == first["version"]
        assert all(torch.equal(x, y) for x, y in zip(a["vectors"], first["vectors"], strict=True))
        torch.testing.assert_close(a["moved"], a["gave"] + a["away"], rtol=1e-3, atol=2e-5)
        before = a["had"]
        for r in a["history"]:
            by_version.setdefault(r.version, {})[a["rank"]] = r
            kept[r.version, a["rank"]], before = before, r.residual
    complete = 0
    came = {a["came"]: a["rank"] for a in answers}
    for version, of_ranks in by_version.items():
        one = next(iter(of_ranks.values()))
        assert all(r.members == one.members and torch.equal(r.mean, one.mean) for r in of_ranks.values())
        there = {*of_ranks, *([came[version]] if version in came else [])}
        if there != set(one.members):
            continue
        complete += 1
        given = sum(r.given + kept[version, rank] - r.residual for rank, r in of_ranks.items())
        torch.testing.assert_close(given, one.contributors * one.mean, rtol=1e-3, atol=2e-5)
    assert complete >= rounds_of_all


# ---- nobody is late


@pytest.mark.parametrize("codec, delay", [("topk", 0), ("int4", 2), pytest.param("none", 0, marks=SLOW)])
@on_ranks(2)
def test_if_nobody_is_late_a_deadline_changes_no_bit(rank: int, world: int, codec: str, delay: int) -> None:
    """Whether a run with a deadline that nobody misses has the bits of one without."""

    def points(deadline: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        module = nn.Sequential(network(0), nn.BatchNorm1d(3))
        with sidcomp.State(codec, nonfinite="rollback") as state:
            adam = OPTIMIZERS["Adam"](module.parameters())
            how = {"every": EVERY, "delay": delay, "lr": 0.5, "momentum": 0.6, "deadline": deadline}
            outer = updates("outer", module, adam, state, **how)
            train_on(module, adam, rank, range(5 * EVERY + 1))
            own = flat(module)
            outer.exchange()  # average() is not compressed without a deadline
            outer.land()
            assert alike(module)
            # With a delay the buffers are those of when the exchange began, not of when it ended.
            return torch.stack((own, flat(module))), module[
                1
            ].running_mean.clone() if not delay else torch.zeros(3)

    assert all(torch.equal(x, y) for x, y in zip(points(None), points(60.0), strict=True))


@pytest.mark.parametrize("stop, delay", [(7, 2), pytest.param(5, 0, marks=SLOW)])
def test_a_resumed_run_has_the_same_bits(stop: int, delay: int) -> None:
    how = {"every": EVERY, "delay": delay, "deadline": 60.0, "momentum": 0.5}
    for whole, again in run(resumes, 2, "outer", stop, 11, None, how):
        assert whole["rounds"]["version"] == again["rounds"]["version"] == 3


def on_fewer(rank: int, world: int, path: str, delay: int, lost: int) -> list[float]:
    """Four ranks save between two exchanges, or in one; three take over. lost: of so many there is no file.
    Returns the losses."""
    module = nn.Sequential(network(7 * rank), nn.BatchNorm1d(3))
    adam = OPTIMIZERS["Adam"](module.parameters())
    how = {"every": EVERY, "delay": delay, "deadline": 60.0, "lr": 0.7, "momentum": 0.5}
    outer = updates("outer", module, adam, **how)
    with outer.state as state:
        if world == 3:
            files = [torch.load(f"{path}/{r}", weights_only=True) for r in range(lost, 4)]
            mine = files[rank + 1 - lost]
            module.load_state_dict(mine["module"])
            adam.load_state_dict(mine["optimizer"])
            state.load_state_dict([f["state"] for f in files])
            for key, wrong in (("version", "x"), ("since", None), ("behind", "x"), ("buffers", 3)):
                damaged = {**mine["outer"], "rounds": {**mine["outer"]["rounds"], key: wrong}}
                with pytest.raises(sidcomp.CheckpointError, match='"rounds"'):
                    outer.load_state_dict(damaged)
            with pytest.raises(sidcomp.CheckpointError, match='"steps" is None'):
                outer.load_state_dict({**mine["outer"], "steps": None})
            outer.load_state_dict(mine["outer"])
            assert outer.steps == 10 and outer.meetings is not None
            assert outer.meetings.attendance.version == mine["outer"]["rounds"]["version"] == 3
            with outer.common() as common:
                assert alike(common)
                assert torch.equal(flat(common), flat(module)), "all continue from there"
            mean = module[1].running_mean
            everyone = [torch.empty_like(mean) for _ in range(world)]
            dist.all_gather(everyone, mean)
            # between two exchanges each rank's statistics are its own
            assert all(torch.equal(x, mean) for x in everyone) is (delay > 0)
            if not delay:
                (v,) = outer.vectors
                assert all(torch.equal(mine["outer"]["point"][n], x) for n, x in v.named(v.point).items())
            kept, before = (
                torch.cat([x.flatten() for x in r.values()]).double()
                for r in (state.state_dict()["residuals"], files[0]["state"]["residuals"])
            )
            for f in files[1:]:
                before += torch.cat([x.flatten() for x in f["state"]["residuals"].values()]).double()
            dist.all_reduce(kept)
            assert before.any()
            torch.testing.assert_close(kept, before, rtol=0, atol=1e-6)  # the sum of what was not sent
        losses = train_on(module, adam, rank, range(10 if world == 4 else 40))
        if world == 4:
            names = {"module": module, "optimizer": adam, "state": state, "outer": outer}
            torch.save({name: x.state_dict() for name, x in names.items()}, f"{path}/{rank}")
            return losses
        outer.average()
        assert alike(module) and outer.meetings is not None
        last = outer.meetings.attendance.rounds.look()["last"]
        assert sorted(last) == ["0", "1", "2"] and len({version for _, version in last.values()}) == 1
    return losses


@pytest.mark.parametrize("delay, lost", [(0, 0), (2, 0), (0, 1)])
def test_fewer_ranks_take_over_a_checkpoint(delay: int, lost: int, tmp_path: Path) -> None:
    before = run(on_fewer, 4, str(tmp_path), delay, lost)
    after = run(on_fewer, 3, str(tmp_path), delay, lost)
    assert max(sum(x[-4:]) for x in after) < 0.8 * min(sum(x[:4]) for x in before)


def on_as_many(rank: int, world: int, path: str, resumes: bool) -> None:
    """Four ranks save, and four resume, but rank 0's file is lost: the others keep what they had not sent."""
    module = network(7 * rank)
    adam = OPTIMIZERS["Adam"](module.parameters())
    outer = updates("outer", module, adam, every=EVERY, deadline=60.0, lr=0.7, momentum=0.5)
    with outer.state as state:
        if not resumes:
            train_on(module, adam, rank, range(2 * EVERY))
            torch.save(state.state_dict(), f"{path}/{rank}")
            return
        states = [torch.load(f"{path}/{r}", weights_only=True) for r in range(1, 4)]
        state.load_state_dict(states)
        kept, own = (
            torch.cat([x.flatten() for x in s["residuals"].values()])
            for s in (state.state_dict(), states[max(rank - 1, 0)])
        )
        assert own.any()
        assert torch.equal(kept, own) if rank else not kept.any()


def test_as_many_ranks_without_the_file_of_one(tmp_path: Path) -> None:
    run(on_as_many, 4, str(tmp_path), False)
    run(on_as_many, 4, str(tmp_path), True)


# ---- late and lost ranks


def went(answer: dict[str, Any]) -> list[list[int]]:
    return [r.members for r in answer["history"]]


@pytest.mark.parametrize(
    "event, codec, delay",
    [
        ("dies_sending", "topk", 0),
        ("dies_meeting", "topk", 0),
        pytest.param("dies", "none", 0, marks=SLOW),
        pytest.param("dies_sending", "int4", 2, marks=SLOW),
        pytest.param("dies", "topk", 2, marks=SLOW),
    ],
)
def test_a_rank_that_is_killed_costs_its_round(event: str, codec: str, delay: int) -> None:
    given = {"until": 5, "codec": (codec, {}), "delay": delay}
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, **given, **({event: 2} if rank == 1 else {}))
        assert job.ended(1) == -signal.SIGKILL
        answers = [job.answer(rank) for rank in (0, 2)]
    assert went(answers[0]) == [[0, 1, 2]] * 2 + [[0, 2]] * 3
    (text,) = answers[0]["said"]
    assert "round 3 takes place without rank 1" in text and not answers[1]["said"]
    examine(answers, 3)
    assert answers[0]["history"][-1].contributors == 2, "the mean is that of the members"


@pytest.mark.parametrize("delay", [0, pytest.param(2, marks=SLOW)])
def test_a_late_rank_misses_a_round_and_loses_nothing(delay: int) -> None:
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, until=6, delay=delay, stale=10**6, **({"waits": 2} if rank == 2 else {}))
        answers = [job.answer(rank) for rank in range(3)]
    of_all = went(answers[0])
    assert of_all[2] == [0, 1] and of_all[-1] == [0, 1, 2] and len(answers[2]["history"]) < len(of_all)
    assert ["without rank 2" in text for text in answers[0]["said"]] == [True, False]
    assert "with rank 2 again" in answers[0]["said"][1]
    assert ["rank 2 was late" in text for text in answers[2]["said"]] == [True]
    examine(answers, 6)


@SLOW
def test_a_rank_that_is_long_away_drops_what_it_did() -> None:
    with Job(3) as job:
        for rank in range(3):
            late = {"waits": 2, "rounds": 3} if rank == 2 else {"pause": 0.05}
            job.start(rank, until=9, stale=2, **late)
        answers = [job.answer(rank) for rank in range(3)]
    back = answers[2]["history"][2]
    assert back.version >= 6 and back.contributors == 2 and back.members == [0, 1, 2]
    lost = answers[2]["moved"] - answers[2]["gave"] - answers[2]["away"]
    assert lost.norm() > 0
    answers[2]["gave"] += lost
    examine(answers, 9)


@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=SLOW)])
def test_a_rank_that_is_started_again_joins(delay: int) -> None:
    with Job(3) as job:
        given = {"delay": delay, "lr": 0.5, "momentum": 0.6, "pause": 0.1}
        for rank in range(3):
            job.start(rank, **given, **({"dies": 2} if rank == 2 else {}))
        assert job.ended(2) == -signal.SIGKILL
        job.wait_for(4)  # without it, else it may be back before the round without it is closed
        job.start(2, **given, joined=3)
        answers = [job.answer(rank) for rank in range(3)]
        assert job.given_up() == 0, "the others have groups, and this one has none"
    assert answers[2]["came"] > 2 and went(answers[2]) == [[0, 1, 2]] * 3
    examine(answers, 4)


@pytest.mark.parametrize("saved_at", [1, pytest.param(2, marks=SLOW)])
def test_a_checkpoint_from_before_a_rounds_end_is_not_sent_again(saved_at: int, tmp_path: Path) -> None:
    file = str(tmp_path / "rank2.pt")
    with Job(3) as job:
        for rank in range(3):
            own = {"dies": 2, "saves": saved_at, "file": file} if rank == 2 else {}
            job.start(rank, pause=0.1, stale=10**6, **own)
        assert job.ended(2) == -signal.SIGKILL
        job.wait_for(4)
        job.start(2, joined=3, loads=file, pause=0.1, stale=10**6)
        answers = [job.answer(rank) for rank in range(3)]
        assert job.given_up() == 0, "the others have groups, and this one has a checkpoint"
    kept = torch.load(file)[2]["residuals"]
    assert any(x.any() for x in kept.values())
    # What it had after its second round is its own again; what it had before was sent in that round.
    assert bool(answers[2]["had"].any()) is (saved_at == 2)
    examine(answers, 4)


@SLOW
def test_a_rank_that_hangs_in_an_exchange_is_left_out_and_comes_back() -> None:
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, pause=0.1, stale=10**6, **({"stops_sending": 2} if rank == 2 else {}))
        end = time.monotonic() + LIMIT
        while job.version() < 4:
            assert time.monotonic() < end
            time.sleep(0.1)
        os.kill(job.processes[2].pid or 0, signal.SIGCONT)
        answers = [job.answer(rank) for rank in range(2)]
    assert went(answers[0])[2] == [0, 1] and went(answers[0])[-1] == [0, 1, 2]
    examine(answers, 1)


def test_without_the_store_an_error_says_so() -> None:
    with Job(2, apart=True) as job:
        for rank in range(2):
            job.start(rank, until=10**6, pause=0.02)
        while job.version() < 2:
            time.sleep(0.05)
        job.end_store()
        for rank in range(2):
            with pytest.raises(AssertionError, match=r"process that serves it has ended .* save them"):
                job.answer(rank)


# ---- what is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deadline": 0}, "more than 0"),
    ({"deadline": -1.0}, "more than 0"),
    ({"deadline": float("inf")}, "or None"),
    ({"deadline": "soon"}, "seconds"),
    ({"stale": -1}, "at least 0"),
    ({"parts": 2}, "leave out parts or deadline"),
    ({"shard": True}, "'0.weight' is a shard of FSDP"),
    ({"state": {"codec": "topk", "exchange": "twoshot"}}, "exchange='twoshot'"),
    ({"state": {"codec": "powersgd"}}, "several rounds"),
    ({"state": {"codec": "topk", "nonfinite": "drop"}}, 'nonfinite="rollback"'),
]


def refused(rank: int, world: int) -> None:
    for wrong, said in REFUSED:
        module = network(0)
        given = {"deadline": 5.0, **wrong}
        if "state" in given:
            given["state"] = sidcomp.State(**given["state"])
        if given.pop("shard", False):
            module[0].weight.placements = ()
        with pytest.raises(sidcomp.errors.SidcompError) as error:
            updates("outer", module, OPTIMIZERS["SGD"](module.parameters()), **given)
        assert said in str(error.value)


def test_what_a_deadline_cannot_do_is_refused() -> None:
    run(refused, 1)


@SLOW
@on_ranks(3)
def test_a_rank_with_another_model_is_refused_alone(rank: int, world: int) -> None:
    """Another model is refused on the rank that has it, which does not disturb the others."""
    others = dist.new_group([0, 1])
    module = network(0) if rank < 2 else nn.Linear(12, 3)
    given = module, OPTIMIZERS["SGD"](module.parameters()), sidcomp.State("none")
    if rank == 2:
        time.sleep(0.5)
        with pytest.raises(sidcomp.SetupError, match="another model"):
            updates("outer", *given, every=1, deadline=0.5)
        return
    rounds.START_S = 1.0
    updates("outer", *given, every=1, deadline=0.5)
    train_on(module, given[1], rank, range(1))
    everyone = [torch.empty_like(flat(module)) for _ in range(2)]
    dist.all_gather(everyone, flat(module), group=others)
    assert torch.equal(*everyone)
