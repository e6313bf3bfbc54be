"""Ranks of a run with a deadline, which may be killed and started again, and what must hold of them.

They are started as torchrun starts them, and the test serves the store, as torchrun's agent does."""

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
from typing import Any, NamedTuple

import sidcomp
import torch
import torch.distributed as dist
from harness import context
from local_training import OPTIMIZERS, flat, network, updates
from local_training import train as train_on
from sidcomp.local import rendezvous as rounds
from sidcomp.local.steps import Updates
from torch import nn

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

    def end_at(self, version: int) -> None:
        """Says until when ranks that wait to be told train."""
        for prefix in ("", "/worker/attempt_0/"):
            self.store.set(f"{prefix}until", str(version))

    def last(self, rank: int) -> int:
        """The version of the last round that counts in which this rank was; -1: none."""
        return int(self.record().get("last", {}).get(str(rank), [0, -1])[1])

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
    told: bool = False,
    **events: Any,
) -> dict[str, Any]:
    """Trains until the common point has version `until`; None: for three rounds after the one in which the
    third rank came back, which has joined=3.

    events: the versions after which this rank does something: `dies`, `waits` (for the others to go on
    without it; with `alters` its point is another one then), `sleeps` (for two deadlines), `dies_meeting`,
    `dies_sending` or `stops_sending` (as the next exchange begins; inside it), `dies_confirming` (when it has
    said that it has everything), `confirms_late` (when rank 2 is there again).
    told: trains until the version that `Job.end_at` says.
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
        brought = _arrange(rank, outer, events)
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
            if events.get("sleeps") == attendance.version and meetings.since == EVERY - 1:
                time.sleep(2 * DEADLINE)
            if events.get("waits") == attendance.version and meetings.since == EVERY - 1:
                there = attendance.version
                while attendance.rounds.look()["version"] < there + events.get("rounds", 1):
                    time.sleep(0.01)
                if "alters" in events:
                    attendance.vectors()[0].add_(1)
            before = flat(module)
            module.of_rank.add_(rank)  # so that it travels in each round
            train_on(module, optimizer, rank, range(outer.steps, outer.steps + 1))
            moved.add_(before - stepped.pop())
            went = [r.members for r in history]
            if told and until is None and attendance.rounds.store.check(["until"]):
                until = int(attendance.rounds.store.get("until"))
            if until is None and rank < 2 and not told and [0, 1] in went and went[-1] == [0, 1, 2]:
                until = history[-1].version + 3
        if meetings.gone:
            outer.land()
        with outer.common() as common:
            point = flat(common)
            at = [x.clone() for x in attendance.vectors()]
        return {
            "rank": rank, "point": point, "vectors": at, "history": history, "moved": moved, "gave": gave,
            "away": point - flat(module) - away, "version": attendance.version, "came": came, "had": had,
            "began": away, "start": start, "brought": brought,
            "said": [x for x in said if "takes place" in x or "was late" in x],
        }  # fmt: skip


def _arrange(rank: int, outer: Updates, events: dict[str, Any]) -> list[int]:
    """Lets this rank do something inside an exchange. Returns what will hold the sizes of broadcasts."""
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
        brought.append(tensor.nbytes)

    brought: list[int] = []
    conclude, look = attendance.rounds.conclude, attendance.rounds.look

    def concludes(meeting: Any, fine: bool) -> bool:
        if outer.steps and left.get("confirms_late") == attendance.version:
            while 2 not in attendance.rounds.look()["next"]:
                time.sleep(0.01)
        return conclude(meeting, fine)

    def looks() -> dict[str, Any]:
        record = look()
        if left.get("dies_confirming") == attendance.version and rank in record["done"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    attendance.rounds.conclude = concludes  # type: ignore[method-assign]
    attendance.rounds.look = looks  # type: ignore[method-assign]
    rounds.RoundExchange.all_gather = all_gather  # type: ignore[method-assign]
    rounds.RoundExchange.broadcast = broadcasts  # type: ignore[method-assign]
    return brought


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


def went(answer: dict[str, Any]) -> list[list[int]]:
    return [r.members for r in answer["history"]]
