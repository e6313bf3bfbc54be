"""State("auto") over time: a checkpoint of any stage goes on there, and a plan is given up only where it
loses against what plain DDP takes now; by the clock that only the test moves."""

from __future__ import annotations

import copy
import io
import random
from pathlib import Path
from typing import Any

import clock
import pytest
import sidcomp
import test_auto
import torch
from damaged import GONE, changed, paths
from harness import on_ranks, run
from sidcomp.autotune import journal, monitoring, outcome, probe
from sidcomp.autotune.controller import Controller
from sidcomp.config.settings import PLAIN
from sidcomp.planner.significance import is_faster
from sidcomp.runtime.checkpoint import Resume
from test_auto import Costs, Training, candidates, check

# What a resumed run measures again: DDP forms its buckets, which takes 4 steps and one to change groups; then
# a step for the hooks and a turn that was begun, or a pair of windows that was begun, of up to 12 steps. Of a
# run that had settled the test takes three.
SETTLE, TURN, PAIR, AFTER = 5, 3, 13, 3
# Plain DDP takes 4.5 times as long as computing, so two turns are measured.
SLOW: Costs = {"all_reduce": 3e-8}
HOW: dict[str, Any] = {"slow": SLOW, "candidates": ["topk"], "warmup": 0}


class Probed:
    """How often the costs of codecs and collectives are measured."""

    def __init__(self) -> None:
        self.count, self.real = 0, probe.measure
        probe.measure = self

    def __call__(self, *arguments: Any, **named: Any) -> probe.Measurement:
        self.count += 1
        return self.real(*arguments, **named)


def taken(t: Training) -> bytes:
    out = io.BytesIO()
    torch.save([t.ddp.module.state_dict(), t.optimizer.state_dict(), t.state.state_dict()], out)
    return out.getvalue()


def given(t: Training, saved: bytes, **controller: Any) -> None:
    module, optimizer, state = torch.load(io.BytesIO(saved), weights_only=True)
    t.ddp.module.load_state_dict(module)
    t.optimizer.load_state_dict(optimizer)
    if controller:
        state["controller"] = {**state["controller"], **controller} if "all" not in controller else None
    t.state.load_state_dict(state)


def stage(t: Training) -> str:
    return str(t.state.plan_report()["stage"])


def until_it_settles(t: Training) -> int:
    for n in range(400):
        if stage(t) == "settled" and n:
            return n
        t.step()
    raise AssertionError(t.state.explain())


# ---- a checkpoint of any stage
# ------------------------------------------------------------------------------------------------


def cut(rank: int, world: int, how: dict[str, Any], every: int) -> tuple[int, dict[str, Any], list[Any]]:
    """A whole run, and runs that go on from its checkpoints."""
    saved, runs = [], []
    with Training(rank, **how) as t:
        while stage(t) != "settled":
            t.step()
            saved.append((stage(t), taken(t)))
        whole = t.report()
    several = dict(list(enumerate(saved, 1))[2::every])
    for at, one in enumerate(saved, 1):
        if one[0] not in {was for was, _ in several.values()}:  # a stage of a step or two
            several[at] = one
    for at, (was, data) in sorted(several.items()):
        probed = Probed()
        with Training(rank, **how) as t:
            given(t, data)
            t.step()
            t.step()
            kept, now = (x["residuals"] for x in (torch.load(io.BytesIO(data))[2], t.state.state_dict()))
            if was == "verifying":  # it waits for the plan, while DDP forms its buckets
                assert kept.keys() == now.keys() and all(torch.equal(kept[k], now[k]) for k in kept)
            more = 2 + until_it_settles(t)
            assert t.state.profile is not None
            runs.append((at, was, at + more, probed.count, t.report()))
        probe.measure = probed.real
    return len(saved), whole, runs


@pytest.mark.parametrize("groups", ["auto", pytest.param("mergecomp", marks=pytest.mark.slow)])
def test_finding_goes_on_where_the_checkpoint_was(groups: str) -> None:
    how = HOW if groups == "auto" else {"codec": "topk", "groups": groups, "slow": SLOW}
    (n, whole, runs), (_, _, others) = run(cut, 2, how, 6 if groups == "auto" else 4)
    again = {
        "settling": SETTLE,
        "measuring": SETTLE + TURN,
        "verifying": SETTLE + PAIR,
        "searching": SETTLE + TURN,
        "settled": AFTER,
    }
    observed = set()
    for (at, was, steps, probed, r), (*_, other) in zip(runs, others, strict=True):
        check(r)
        observed.add(was)
        text = f"saved in step {at}, {was}: {steps} steps in all, {n} without a break\n{r['explain']}"
        assert steps <= n + again[was], text
        assert probed == (was in ("settling", "measuring")), f"costs were measured {probed} times; {text}"
        assert candidates(r) == candidates(whole) and len(r["tried"]) == len(whole["tried"]), text
        assert r["log"] == other["log"] and r["log"].count("measuring codecs and exchanges") == 1, text
        assert whole["finding_steps"] <= r["finding_steps"] <= whole["finding_steps"] + PAIR, text
    assert observed >= {"settling", "measuring", "verifying" if groups == "auto" else "searching"}


def in_pieces(rank: int, world: int) -> dict[str, Any]:
    """Without a break it takes 34 steps; a run of 19 that starts over never gets there."""
    data = b""
    for _ in range(8):
        with Training(rank, **HOW) as t:
            if data:
                given(t, data)
            for _ in range(19):
                t.step()
            data, report = taken(t), t.report()
            if report["stage"] == "settled":
                return report
    return report


def test_a_run_that_is_always_cut_short_finds_its_plan() -> None:
    for r in run(in_pieces, 2):
        check(r)
        assert candidates(r) == {"topk"}


@on_ranks(2)
def test_a_part_of_an_uncompressed_group_may_have_residuals(rank: int, world: int) -> None:
    """As with a plan that sends one parameter uncompressed. In a window of plain DDP it has no residual,
    while those of the others in its bucket wait."""
    with Training(rank, **HOW) as t:
        while not (
            stage(t) == "verifying" and t.state.engine.regime == PLAIN and t.state.state_dict()["residuals"]
        ):
            t.step()
        state = t.state.state_dict()
        assert len(state["layout"][0]["names"]) > 1
        del state["residuals"][state["layout"][0]["names"][0]]
    with Training(rank, **HOW) as t:
        t.state.load_state_dict(state)
        t.step()
        now = t.state.state_dict()["residuals"]
        assert now.keys() == state["residuals"].keys()
        assert all(torch.equal(now[k], state["residuals"][k]) for k in now)
        until_it_settles(t)
        r = t.report()
    check(r)
    assert candidates(r) == {"topk"}


def test_pairs_that_were_given_up_are_enough_in_a_checkpoint() -> None:
    """Five of which the plan won four, by 2 %: too little to go on with."""
    pairs = [*[[[980] * 4, [1000] * 4]] * 4, [[1010] * 4, [1000] * 4]]
    entry = {
        "kind": "pairs",
        "of": "a plan",
        "done": True,
        "pairs": pairs,
        "waiting": 0,
    }
    journal.entries([entry], "journal")
    with pytest.raises(sidcomp.CheckpointError, match="enough pairs to decide"):
        journal.entries([{**entry, "pairs": pairs[1:]}], "journal")


def test_longer_windows_than_a_run_has_are_refused() -> None:
    """And more pairs: deciding by them would recurse too deep, or take for ever."""
    entry = {"kind": "pairs", "of": "a plan", "done": True, "waiting": 0}
    for pairs, length in (
        ([[[980] * 600, [1000] * 600]] * 2, "1 to 32"),
        ([[[980], [1000]]] * 11, "0 to 10"),
    ):
        with pytest.raises(sidcomp.CheckpointError, match=f"a list of length {length}"):
            journal.entries([{**entry, "pairs": pairs}], "journal")
    assert is_faster([[[980] * 32, [1000] * 32]] * 10)


def test_a_window_in_a_checkpoint_has_rows_of_one_plan() -> None:
    entry = {"kind": "window", "of": "a plan", "done": True, "times": [7], "rows": [], "took": [1, 2, 3, 4]}
    journal.entries([entry], "journal")
    with pytest.raises(sidcomp.CheckpointError, match="rows of the same length"):
        journal.entries([{**entry, "rows": [[1, 2]]}], "journal")
    with pytest.raises(sidcomp.CheckpointError, match="the times of some steps"):
        journal.entries([{**entry, "times": []}], "journal")


# ---- ranks with different checkpoints, other machines
# ------------------------------------------------------------------------------------------------


def unlike(rank: int, world: int, what: str) -> dict[str, Any]:
    late = what in ("found on one", "watched")
    with Training(rank, **HOW) as t:
        while stage(t) != ("settled" if late else "verifying"):
            t.step()
        for _ in range(12):
            t.step()
        while not late and t.state.state_dict()["controller"]["journal"][-1]["kind"] != "pairs":
            t.step()
        for _ in range(0 if late else 12):
            t.step()
        data, state = taken(t), t.state.state_dict()
    mine: dict[str, Any] = copy.deepcopy(state["controller"])
    if what == "threads" or (rank == 1 and what in ("world", "device")):
        mine["identity"][what] = {"world": 3, "device": "cuda", "threads": 2}[what]
    if rank == 1 and what == "a pair":
        del mine["journal"][-1]["pairs"][-1]
    if rank == 1 and what == "profile":
        mine["journal"][0]["profile"]["dense_ps"] += 1
    if rank == 1 and what == "nothing":
        mine["all"] = None
    if rank == 1 and what == "found on one":
        mine.update(found=False, regime=None, watch=None)
    if rank == 1 and what == "watched":
        mine["watch"]["steps"] += 1
    probed = Probed()
    with Training(rank, **HOW) as t:
        given(t, data, **mine)
        steps = until_it_settles(t)
        return {**t.report(), "steps": steps, "probed": probed.count}


@pytest.mark.parametrize(
    ("what", "probed", "said"),
    [
        ("world", 1, "rank 1: the checkpoint's measurements were made with world 3, now it is 2"),
        pytest.param(
            *("device", 1, "rank 1: the checkpoint's measurements were made with device cuda, now it is cpu"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                "threads",
                1,
                "the checkpoint's measurements were made with threads 2, now it is 1: measuring and",
            ),
            marks=pytest.mark.slow,
        ),
        ("a pair", 0, "measuring again what some of them do not have"),
        pytest.param(
            *("profile", 1, "the ranks' checkpoints hold different measurements"), marks=pytest.mark.slow
        ),
        ("nothing", 1, "rank 1: the checkpoint has no plan: measuring and planning again"),
        ("found on one", 0, "measuring again what some of them do not have"),
        pytest.param(*("watched", 0, "continues with a plan"), marks=pytest.mark.slow),
    ],
)
def test_what_not_all_ranks_have_is_measured_again(what: str, probed: int, said: str) -> None:
    for r in run(unlike, 2, what):
        check(r)
        assert candidates(r) == {"topk"}
        assert any(said in line for line in r["log"]), r["log"]
        assert r["probed"] == probed, r["log"]
        assert len(r["tried"]) == 1


@on_ranks(2)
def test_ranks_with_other_numbers_of_threads_have_one_profile(rank: int, world: int) -> None:
    """In a checkpoint, with which their search continues, and to start from."""
    torch.set_num_threads(1 + rank)
    with Training(rank, **HOW) as t:
        while stage(t) != "verifying":
            t.step()
        data, profile = taken(t), t.state.profile
    assert profile is not None and profile.threads == 2
    probed = Probed()
    with Training(rank, **HOW) as t:
        given(t, data)
        until_it_settles(t)
    with Training(rank, profile=profile, **HOW) as t:
        until_it_settles(t)
        assert "using the profile that was given" in t.report()["log"]
    assert probed.count == 0


def by_three(rank: int, world: int, room: str) -> None:
    with Training(rank, **HOW) as t:
        until_it_settles(t)
        torch.save([t.ddp.module.state_dict(), t.state.state_dict()], f"{room}/{rank}.pt")


def by_two(rank: int, world: int, room: str) -> dict[str, Any]:
    saved = [torch.load(f"{room}/{r}.pt", weights_only=True) for r in range(3)]
    with Training(rank, **HOW) as t:
        t.ddp.module.load_state_dict(saved[0][0])
        t.state.load_state_dict([state for _, state in saved])
        t.step()
        early = stage(t)
        until_it_settles(t)
        return {**t.report(), "early": early}


@pytest.mark.slow
def test_another_number_of_ranks_finds_a_plan_of_its_own(tmp_path: Path) -> None:
    run(by_three, 3, str(tmp_path))
    for r in run(by_two, 2, str(tmp_path)):
        check(r)
        assert r["early"] == "settling"
        assert "world 3, now it is 2" in r["log"][0]


# ---- damage
# ------------------------------------------------------------------------------------------------


def some(rank: int, world: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Checkpoints of several stages."""
    out = []
    with Training(rank, **HOW) as t:
        for _ in range(60):
            t.step()
            if not out or stage(t) != out[-1]["controller"]["report"]["stage"]:
                t.step()
                out.append({k: v for k, v in t.state.state_dict().items() if k != "residuals"})
    out.append(copy.deepcopy(out[-1]))
    out[-1]["controller"]["watch"].update(comparing=True, pairs=[[[3, 4], [1, 2]]], times=[7])
    return [(s, s["controller"]) for s in out]


def test_a_damaged_field_is_named() -> None:
    """Every field, of every stage, with values of other kinds: refused by its name, or it does no harm."""
    settings = sidcomp.State("auto", candidates=["topk"], warmup=0).settings
    rng, refused, tried = random.Random(0), 0, 0
    stages = run(some, 2)[0]
    assert {s["report"]["stage"] for _, s in stages} >= {"settling", "measuring", "verifying", "settled"}
    for source, saved in stages:
        journal.check(saved)
        first = [p for p in paths(saved) if all(k < 2 for k in p if isinstance(k, int))]  # of a list two
        for path in first:
            for value in (
                GONE,
                *rng.sample([None, "x", -1, 2.5, True, [], {}, float("nan"), 2**70, [[]]], 3),
            ):
                bad = changed(saved, path, value)
                tried += 1
                try:
                    journal.check(bad)
                except sidcomp.CheckpointError as e:
                    refused += 1
                    named = [k for k in path if isinstance(k, str)]
                    assert any(k in str(e) for k in named), (path, value, str(e))
                    continue
                c = Controller(settings, None)
                c.resume(Resume({}, source["layout"], {**source, "controller": bad}))
    assert refused > 0.5 * tried


def test_an_old_checkpoint_still_loads() -> None:
    """Of a version that saved the report and whether a plan was kept."""
    journal.check(None)
    for source, saved in run(some, 2)[0]:
        report = {k: v for k, v in saved["report"].items() if k != "compared"}
        old = {"version": saved["version"], "found": saved["found"], "report": report}
        journal.check(old)
        c = Controller(sidcomp.State("auto", candidates=["topk"], warmup=0).settings, None)
        regime = c.resume(Resume({}, source["layout"], {**source, "controller": old}))
        assert (regime != PLAIN) == saved["found"]


# ---- a plan that is kept, while the machine and the link change
# ------------------------------------------------------------------------------------------------

LINK: Costs = {"all_reduce": (1e-4, 2e-7), "all_gather": (5e-4, 2e-7)}
# Plain DDP takes 11 times as long as the plan: the steps of two pairs of windows, three of them plain DDP's.
FAR = (2 + 1 + 12) + (22 + 1)
FAST: Costs = {"all_reduce": (1e-5, 1e-9), "all_gather": (1e-5, 1e-9)}
CODEC: Costs = {"encode": (1e-4, 2e-8), "decode": (1e-5, 1e-9)}


def compresses(report: dict[str, Any]) -> bool:
    return "topk" in candidates(report)


class Changing:
    """What a run says after each of its parts, in which everything takes a factor of its time."""

    def __init__(self, rank: int) -> None:
        outcome._FIRST_PAUSE = 60
        self.t = Training(rank, slow={**LINK, **CODEC}, candidates=["topk"], warmup=0)
        self.t.until_it_settles()
        self.said: list[dict[str, Any]] = []

    def go(self, steps: int, factor: float, link: Costs) -> None:
        test_auto.FORWARD_S, test_auto.GRADIENT_S = factor * 4e-4, factor * 1e-4
        costs = {k: (factor * a, factor * b) for k, (a, b) in {**link, **CODEC}.items()}  # type: ignore[misc]
        clock.set_costs(costs)
        stages = []
        for _ in range(steps):
            self.t.step()
            stages.append(stage(self.t))
        self.said.append({**self.t.report(), "stages": stages, "text": self.t.state.explain()})


@on_ranks(2)
def test_a_neighbour_does_not_cost_a_plan(rank: int, world: int) -> None:
    c = Changing(rank)
    c.go(80, 1, LINK)
    c.go(70, 2, LINK)  # a neighbour takes half of everything
    c.go(150, 1, LINK)
    c.go(60, 3, LINK)
    calm, busy, after, again = c.said
    for r in (calm, busy, after, again):
        assert compresses(r)
        assert r["finding_steps"] == calm["finding_steps"], "the plan was looked for again"
    assert not calm["compared"]
    (first,) = busy["compared"]
    assert first["kept"] and busy["stages"].count("comparing") == first["steps"] == FAR
    assert 1.9 < first["measured_ps"] / busy["measured_ps"] < 2.1
    assert after["compared"] == [first], "that the neighbour left is no reason to doubt the plan"
    assert "it stays" in busy["text"] and "it stays" in busy["log"][-1]
    second = again["compared"][-1]  # not before twice as many steps have gone
    assert second["kept"] and second["step"] - second["steps"] - first["step"] >= 120


@on_ranks(2)
def test_a_plan_goes_with_a_link_that_became_fast_and_comes_back(rank: int, world: int) -> None:
    c = Changing(rank)
    c.go(70, 1, LINK)
    c.go(150, 1, FAST)
    c.go(170, 1, LINK)
    slow, fast, again = c.said
    assert [compresses(r) for r in (slow, fast, again)] == [True, False, True], again["log"]
    (given_up,) = fast["compared"]
    assert not given_up["kept"] and given_up["against_ps"] < 0.8 * given_up["measured_ps"]
    assert any("it is given up" in line for line in fast["log"])
    assert again["measured_ps"] < 0.2 * again["dense_ps"]
    for r in (fast, again):
        assert "an earlier plan took" in r["text"] and "this plan took" not in r["text"]


@pytest.mark.slow
@on_ranks(2)
def test_a_plan_is_compared_now_and_then_without_a_reason(rank: int, world: int) -> None:
    monitoring._LONGEST = 150
    c = Changing(rank)
    c.go(400, 1, LINK)
    (r,) = c.said
    assert [x["kept"] for x in r["compared"]] == [True, True]


@pytest.mark.slow
@on_ranks(2)
def test_comparing_is_bounded(rank: int, world: int) -> None:
    """A comparison takes 129 steps at most, and each is twice as far away as the one before. Steps take what
    they like: nothing can be told from them."""
    c = Changing(rank)
    rng = random.Random(0)
    c.t.ddp.module.register_forward_pre_hook(lambda *_: clock.take(2e-2 * rng.random()))
    c.go(600, 1, LINK)
    (r,), steps = c.said, sum(s == "comparing" for s in c.said[0]["stages"])
    assert compresses(r)
    assert all(x["kept"] and x["steps"] <= FAR + 91 for x in r["compared"])
    gaps = [60 * 2**i for i in range(len(r["compared"]))]
    starts = [x["step"] - x["steps"] for x in r["compared"]]
    ends = [x["step"] for x in r["compared"]]
    assert all(b - a >= gap for a, b, gap in zip(ends, starts[1:], gaps[1:], strict=False))
    assert steps <= (FAR + 91) * (len(r["compared"]) + 1)


def compared_again(rank: int, world: int, room: str) -> tuple[dict[str, Any], dict[str, Any]]:
    c = Changing(rank)
    c.go(40, 1, LINK)
    while stage(c.t) != "comparing":
        c.go(1, 2, LINK)
    c.go(FAR - 1, 2, LINK)  # in the dense window of the second pair
    assert c.t.state.engine.regime == PLAIN
    data = taken(c.t)
    c.t.state.close()
    with Training(rank, slow={**LINK, **CODEC}, candidates=["topk"], warmup=0) as t:
        c.t = t
        given(t, data)
        c.go(3, 2, LINK)
        early = c.said[-1]
        c.go(40, 2, LINK)
        return early, c.said[-1]


def test_a_checkpoint_of_a_comparison_goes_on_with_it(tmp_path: Path) -> None:
    for early, late in run(compared_again, 2, str(tmp_path)):
        assert early["stages"] == ["comparing"] * 3
        check(late)
        assert compresses(late)
        (one,) = late["compared"]
        assert one["kept"] and one["pairs"] == 2 and one["steps"] <= FAR + SETTLE + FAR
        assert late["finding_steps"] == early["finding_steps"]
