"""Updates with a deadline: ranks that are late, end, or come back.

What must hold of every run: the common point has the same bits on all members, and nothing is lost: what the
members sent and what they keep add up to what their optimizers did (late_ranks.py)."""

from __future__ import annotations

import io
import os
import random
import signal
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from heard import logged, warned
from late_ranks import EVERY, LIMIT, Job, examine, went
from local_training import OPTIMIZERS, alike, error_of, flat, network, resumes, updates
from local_training import train as train_on
from sidcomp.local import rendezvous as rounds
from torch import nn

SLOW = pytest.mark.slow


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
    assert 0 < max(answers[2]["brought"]) < answers[2]["point"].nbytes / 2, "a delta, not all of the point"
    examine(answers, 6)


@SLOW
def test_a_rank_with_another_point_than_it_should_have_gets_all_of_the_newest() -> None:
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, until=6, stale=10**6, **({"waits": 2, "alters": True} if rank == 2 else {}))
        answers = [job.answer(rank) for rank in range(3)]
    for a in answers:
        assert torch.equal(a["vectors"][0], answers[0]["vectors"][0])
    assert max(answers[2]["brought"]) == answers[2]["point"].nbytes


def test_a_round_waits_for_the_point_of_the_last_one() -> None:
    """Rank 0 holds a round alone, and is late for the next one: the others, who were late for the first, wait
    for it. Else they would go on from a point without what rank 0 has sent."""
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, until=5, stale=10**6, **({"waits": 1} if rank else {"sleeps": 2}))
        answers = [job.answer(rank) for rank in range(3)]
    of_all = went(answers[0])
    assert of_all[1] == [0] and of_all[2] == [0, 1, 2]
    means = {r.version: r.mean for a in answers for r in a["history"]}
    assert sorted(means) == [1, 2, 3, 4, 5]
    moved = answers[0]["start"] - answers[0]["point"]
    torch.testing.assert_close(moved, torch.stack([*means.values()]).sum(0), rtol=1e-3, atol=2e-5)
    examine(answers, 5)


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


def test_a_round_that_counts_after_its_rank_was_started_again_is_not_sent_again(tmp_path: Path) -> None:
    """The rank is killed when it has said that it has everything, and is back before the others have."""
    file = str(tmp_path / "rank2.pt")
    with Job(3) as job:
        job.start(0, pause=0.1, stale=10**6, told=True, confirms_late=2)
        job.start(1, pause=0.1, stale=10**6, told=True)
        job.start(2, pause=0.1, stale=10**6, saves=2, file=file, dies_confirming=2)
        assert job.ended(2) == -signal.SIGKILL
        job.start(2, pause=0.1, stale=10**6, told=True, loads=file)
        job.wait_for(5)
        job.end_at(9)
        answers = [job.answer(rank) for rank in range(3)]
        assert job.given_up() == 0
    assert went(answers[0])[2] == [0, 1, 2], "the round counts, with what the rank had sent"
    assert not answers[2]["had"].any(), "what it has sent is not its own any more"
    assert torch.equal(answers[2]["began"], torch.zeros_like(answers[2]["began"]))
    examine(answers, 4)


def test_ranks_without_parameters_hold_no_round_among_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that they begin with would become the common ones. Rank 0 was killed while it waited for the
    others, and rank 1 had joined it; now it is back, too."""
    monkeypatch.setattr(rounds, "LONELY_S", 0.3)
    store = dist.HashStore()
    one = rounds.Rounds(store, "key", 0, 3, "m", 0.1)

    def before(r: dict[str, Any]) -> bool:
        had, joined = {"version": 3, "empty": False, "group": ""}, {"version": -1, "empty": True, "group": ""}
        r.update(number=5, version=3, here={"0": had, "1": joined})
        return True

    one._change(before)
    with pytest.raises(sidcomp.ExchangeError, match="rank 0 has no parameters"):
        one.meet(lambda _: {"version": -1, "empty": True, "group": ""}, joins=True)
    record = one.look()
    assert list(record["here"]) == ["1"] and not record["closed"] and 0 in record["expected"]


def test_a_rank_without_a_point_waits_for_one_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has parameters, but none that a round has ended with. It neither keeps the store busy, nor waits for
    ever."""
    monkeypatch.setattr(rounds, "LONELY_S", 0.3)
    one = rounds.Rounds(dist.HashStore(), "key", 0, 3, "m", 0.1)
    one._change(lambda r: r.update(number=5, version=3) is None)
    arrivals = 0

    def mine(_: object) -> dict[str, Any]:
        nonlocal arrivals
        arrivals += 1
        assert arrivals < 100
        return {"version": -1, "empty": True, "group": ""}

    with pytest.raises(sidcomp.ExchangeError, match="rank 0 has no parameters"):
        one.meet(mine)


@on_ranks(2)
def test_average_reaches_all_ranks_although_one_comes_when_its_round_is_closed(rank: int, world: int) -> None:
    """Else that rank would keep what it did to itself, and nobody would be told."""
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.compress(module, optimizer, "none", every=EVERY, deadline=1.0) as it:
        attendance = it.updates.meetings.attendance
        conclude, look = attendance.rounds.conclude, attendance.rounds.look

        def concludes(*given: Any) -> bool:
            while attendance.version == 0 and 1 not in look()["next"]:
                time.sleep(0.01)
            return bool(conclude(*given))

        attendance.rounds.conclude = concludes if rank == 0 else conclude
        start = flat(module)
        train_on(module, optimizer, rank, range(1))
        did = [torch.empty_like(start) for _ in range(world)]
        dist.all_gather(did, start - flat(module))
        while rank == 1 and not look()["closed"]:
            time.sleep(0.01)
        it.average()
        assert alike(module)
        torch.testing.assert_close(start - flat(module), did[0] + did[1] / 2, rtol=1e-3, atol=1e-6)
        assert it.updates.meetings.since == 1, "the next round is due when it was"


def test_who_insists_on_a_round_waits_neither_for_another_rank_nor_for_ever() -> None:
    store = dist.HashStore()
    one, other = (rounds.Rounds(store, "key", rank, 2, "m", 0.1) for rank in range(2))

    def mine(_: object) -> dict[str, Any]:
        return {"version": -1, "empty": False, "group": ""}

    meeting = other.meet(mine)
    assert meeting is not None and meeting.members == [1] and one.meet(mine) is None
    one.limit, one._unstick = 0.1, lambda _: None  # type: ignore[method-assign]
    assert one.meet(mine, insists=True) is None, "the round is closed for longer than one can last"
    one.limit = 30.0
    threading.Timer(0.3, other.conclude, (meeting, False)).start()
    found = one.meet(mine, insists=True)
    assert found is not None and found.members == [0]


@on_ranks(2)
def test_an_average_without_this_rank_is_said(rank: int, world: int) -> None:
    module, err = network(0), io.StringIO()
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    it = sidcomp.compress(module, optimizer, "none", every=EVERY, deadline=5.0)
    train_on(module, optimizer, rank, range(1))
    it.updates.meetings.attendance.rounds.meet = lambda *_: None
    with warned() as texts:
        it.average()
    assert any(f"rounds took place without rank {rank}" in text for text in texts), texts
    with redirect_stderr(err):
        it.close()
    assert "closed after 1 steps without run.average()" in err.getvalue(), "not only on rank 0"


@on_ranks(2)
def test_a_rank_that_has_left_is_not_said_to_be_late(rank: int, world: int) -> None:
    module, lines = network(0), logged()
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.compress(module, optimizer, "none", every=EVERY, deadline=5.0) as it:
        rounds = it.updates.meetings.attendance.rounds
        while rank == 1 and 0 not in rounds.look()["left"]:
            time.sleep(0.01)
        if rank == 1:
            train_on(module, optimizer, rank, range(EVERY))
    assert rank == 0 or [x for x in lines if "takes place" in x] == [
        "round 1 takes place without rank 0, which ended"
    ]


def test_who_leaves_is_waited_for_by_nobody() -> None:
    """Also a rank that an error has ended while it waited, or in a round."""
    store = dist.HashStore()
    one, other = (rounds.Rounds(store, "key", rank, 2, "m", 0.1) for rank in range(2))

    def mine(_: object) -> dict[str, Any]:
        return {"version": -1, "empty": False, "group": ""}

    one._change(lambda r: r["here"].update({"0": mine(r)}) is None)
    one.leave()
    meeting = other.meet(mine)
    assert meeting is not None and meeting.members == [1]
    other.leave()
    assert other.conclude(meeting, True) and other.look()["expected"] == []


@pytest.mark.parametrize("asked", ["log", "timeline"])
@on_ranks(2)
def test_the_figures_wait_for_the_round_in_progress(rank: int, world: int, asked: str) -> None:
    """Its thread works with what they are of."""
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.compress(module, optimizer, "none", every=2, delay=1, deadline=30.0) as it:
        train_on(module, optimizer, rank, range(3))
        attendance, ended = it.updates.meetings.attendance, threading.Event()
        conclude = attendance.rounds.conclude

        def concludes(*given: Any) -> bool:
            time.sleep(0.5)
            found = bool(conclude(*given))
            ended.set()
            return found

        attendance.rounds.conclude = concludes
        train_on(module, optimizer, rank, range(3, 4))
        it.log() if asked == "log" else it.state.timeline("/dev/null")
        assert ended.is_set()
        assert not any(g.direct for g in it.state.engine.groups), "a round may be given up"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 24))])
def test_a_rank_that_is_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    """It comes back at once, or when the others have gone on, with its checkpoint or without."""
    draw = random.Random(seed)
    victim, saved_at, delay = draw.randrange(3), draw.choice([None, 1, 2, 3]), draw.choice([0, 0, 2])
    moment, at_once = draw.uniform(0, 1), draw.random() < 0.5
    file = tmp_path / "own.pt"
    print(f"rank {victim} is killed {moment:.3f} s after the first round, {saved_at=}, {delay=}, {at_once=}")
    given: dict[str, Any] = {"delay": delay, "pause": 0.02, "stale": 10**6, "told": True}
    with Job(3) as job:
        for rank in range(3):
            job.start(rank, **given, **({"saves": saved_at, "file": str(file)} if rank == victim else {}))
        job.wait_for(1)
        time.sleep(moment)
        job.processes[victim].kill()
        assert job.ended(victim) == -signal.SIGKILL
        before = job.last(victim)
        if not at_once:
            job.wait_for(before + 1)
        job.start(victim, **given, **({"loads": str(file)} if file.exists() else {}))
        end = time.monotonic() + LIMIT
        while job.last(victim) <= before + 1:
            assert time.monotonic() < end, job.record()
            time.sleep(0.01)
        job.end_at(job.version() + 8)
        answers = [job.answer(rank) for rank in range(3)]
    assert went(answers[0])[-1] == [0, 1, 2]
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


@on_ranks(2)
def test_a_round_whose_end_is_not_known_is_undone(rank: int, world: int) -> None:
    """The store is lost when the exchange is over. What a checkpoint then has is sent once."""
    module = network(rank)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    outer = updates("outer", module, optimizer, {"codec": "topk", "density": 0.1}, every=EVERY, deadline=60.0)
    assert outer.meetings is not None
    with outer.state as state:
        train_on(module, optimizer, rank, range(2 * EVERY + 1))
        before = error_of(state, module).clone()

        def lost(*_: Any) -> bool:
            raise sidcomp.ExchangeError("the store does not answer")

        outer.meetings.attendance.rounds.conclude = lost  # type: ignore[method-assign]
        with pytest.raises(sidcomp.ExchangeError, match="the store does not answer"):
            train_on(module, optimizer, rank, range(2 * EVERY + 1, 3 * EVERY))
        assert before.any() and torch.equal(error_of(state, module), before)


@pytest.mark.parametrize("codec, delay", [("topk", 0), ("int4", 2)])
@on_ranks(2)
def test_an_update_that_is_not_finite_costs_the_others_nothing(
    rank: int, world: int, codec: str, delay: int
) -> None:
    """Rank 0 adds what it had not sent before, and nothing else. Its buffers, which are not finite either, do
    not become rank 1's."""
    module = nn.Sequential(network(0), nn.BatchNorm1d(3))
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    stepped: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(flat(module)))  # before it exchanges
    outer = updates("memory", module, optimizer, {"codec": codec}, every=EVERY, delay=delay, deadline=60.0)
    with outer.state as state:
        train_on(module, optimizer, rank, range(2 * EVERY - 1))
        outer.land()
        with outer.common():
            before = flat(module)
        kept = error_of(state, module)
        if rank == 0:
            with torch.no_grad():
                for x in (module[0][0].weight, module[1].running_mean):
                    x.view(-1)[0] = float("nan")
        train_on(module, optimizer, rank, range(2 * EVERY - 1, 2 * EVERY))
        outer.land()
        moved = before - flat(module)
        sent = kept - error_of(state, module) + (before - stepped[-1] if rank else 0)
        dist.all_reduce(sent)
        assert kept.any() and sent.any()
        torch.testing.assert_close(moved, sent, rtol=1e-3, atol=1e-6)  # the mean of one rank
        assert alike(module) and module[1].running_mean.isfinite().all()
        assert outer.discarded == (rank == 0)


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


@on_ranks(1)
def test_with_a_deadline_each_rank_saves_for_itself(rank: int, world: int) -> None:
    module = network(0)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with sidcomp.compress(module, optimizer, "topk", every=EVERY, deadline=5.0) as it:
        train_on(module, optimizer, rank, range(EVERY + 1))
        own = flat(module)
        saved = [x.state_dict() for x in (it, optimizer)]
        with pytest.raises(sidcomp.SetupError, match="each saves for itself"):
            it.save("never made")
        dist.destroy_process_group()
        with pytest.raises(sidcomp.SetupError, match="each saves for itself"):
            it.save("never made")
        train_on(module, optimizer, rank, range(1))
        for x, of in zip((optimizer, it), reversed(saved), strict=True):
            x.load_state_dict(of)
        assert torch.equal(flat(module), own)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness ends it


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
