"""State.follow: what is owed keeps its worth where the learning rate changes."""

from __future__ import annotations

import gc
import io
import math
import warnings
from contextlib import redirect_stderr
from typing import Any

import pytest
import sidcomp
import torch
from cases import Trainer
from common import assert_all_same, begin, everything, residuals_of, steps_of
from harness import at_end, on_ranks, run
from heard import logged
from local_training import KINDS, alike, updates
from sidcomp.config.grouping import Regime
from sidcomp.doors.ddp import register
from sidcomp.runtime.learning_rates import Rates
from test_switch import MIXED, NAMES, PLAIN, SIDCO, TOPK, Run, scripted
from torch import nn

# A step each; at 0 the parameters stay, and so does the unit of what is owed.
SCHEDULE = [0.0, 0.0, 0.05, 0.05, 0.02, 0.1, 0.0, 0.004, 0.004, 0.03, 0.03, 0.001]


def train(
    rank: int, world: int, groups: str | int, arguments: dict[str, Any], follow: bool
) -> list[dict[str, Any]]:
    trainer, state = begin(rank, "cap-small", groups, **arguments)
    if follow:
        state.follow(trainer.optimizer)
    seen, last = [], 0.0
    for rate in SCHEDULE:
        trainer.optimizer.param_groups[0]["lr"] = rate
        if not follow and rate:
            if rate != last:
                state.rescale(last / rate or 1e-30)
            last = rate
        trainer.step()
        seen.append(everything(trainer, state))
    assert state.error is None
    return seen


WAYS = [
    (2, "bucket", {"codec": "topk", "density": 0.05}),
    (1, "model", {"codec": "topk", "density": 0.05}),
    (2, 700, {"codec": "topk", "density": 0.1, "values": "log4", "indices": "packed", "beta": 0.5}),
    (2, "bucket", {"codec": "efsignsgd"}),
    (2, "model", {"codec": "fp16", "memory": "residual"}),
    (3, "explicit", {"codec": "topk", "density": 0.05, "full_every": 4}),
    (3, "bucket", {"codec": "topk", "density": 0.05, "exchange": "twoshot"}),
    (4, "model", {"codec": "topk", "density": 0.05, "exchange": "hierarchical", "ranks_per_node": 2}),
    (2, "bucket", {"codec": "marsit", "exchange": "ring1", "full_every": 5, "eta_s": 0.01}),
    (2, "bucket", {"codec": "powersgd", "r": 1}),
]  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize(
    ("world", "groups", "arguments"), WAYS, ids=[w[2]["codec"] + str(i) for i, w in enumerate(WAYS)]
)
def test_it_is_rescaling_by_the_rates_ratio(world: int, groups: str | int, arguments: dict[str, Any]) -> None:
    """Bit for bit what `rescale(old / new)` between two steps does."""
    following = run(train, world, groups, arguments, True)
    by_hand = run(train, world, groups, arguments, False)
    for rank in range(world):
        assert_all_same(following[rank], by_hand[rank], f"rank {rank}")


def at_rates(
    trainer: Trainer, state: sidcomp.State, rates: list[float]
) -> list[dict[str, torch.Tensor | None]]:
    """Takes a step at each."""
    seen = []
    for rate in rates:
        trainer.optimizer.param_groups[0]["lr"] = rate
        seen += steps_of(trainer, state, 1)
    return seen


@on_ranks(2)
def test_a_momentum_is_left_alone(rank: int, world: int) -> None:
    seen = []
    for follow in (True, False):
        trainer, state = begin(rank, codec="signum", beta=0.9)
        trainer.optimizer = torch.optim.SGD(trainer.module.parameters(), 0.05)
        if follow:
            state.follow(trainer.optimizer)
        seen.append(at_rates(trainer, state, SCHEDULE))
    assert_all_same(*seen, "followed")


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@on_ranks(2)
def test_a_resumed_run_knows_the_last_rates(rank: int, world: int, after: bool) -> None:
    """Whole, and in two parts; the rate changes just between them."""
    out = []
    for parts in (1, 2):
        seen: list[dict[str, Any]] = []
        saved: dict[str, Any] | None = None
        weights: dict[str, Any] = {}
        for part in range(parts):
            trainer, state = begin(rank, codec="topk", density=0.05)
            if not after:
                state.follow(trainer.optimizer)
            if saved is not None:
                state.load_state_dict(saved)
                trainer.module.load_state_dict(weights["model"])
                trainer.optimizer.load_state_dict(weights["optimizer"])
                trainer.steps = 9
            if after:
                state.follow(trainer.optimizer)
            rates = SCHEDULE if parts == 1 else (SCHEDULE[:9], SCHEDULE[9:])[part]
            seen += at_rates(trainer, state, rates)
            saved = state.state_dict()
            assert set(saved["rates"].values()) == {0.001 if part == parts - 1 else 0.004}
            weights = {
                "model": {n: t.clone() for n, t in trainer.module.state_dict().items()},
                "optimizer": trainer.optimizer.state_dict(),
            }
        out.append(seen)
    whole, in_parts = out
    assert_all_same(in_parts, whole, "resumed")


# ---- groups that change ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "park", "exchanges"), [(1, False, False), (2, False, False), (2, True, False), (4, True, True)]
)
@on_ranks()
def test_nothing_is_lost_when_groups_and_rates_change(
    rank: int, world: int, park: bool, exchanges: bool
) -> None:
    """What was fed, at its rate each time, is what was applied, at its own, and what is kept, at the last."""
    more: dict[str, Any] = {"exchange": ["twoshot", "hierarchical"], "ranks_per_node": 2} if exchanges else {}
    r = Run(rank, world, **more)
    optimizer = torch.optim.SGD(r.module.parameters(), 0.05)
    r.state.follow(optimizer)
    plan = [PLAIN, TOPK, TOPK, TOPK, SIDCO, MIXED, TOPK, PLAIN, PLAIN, PLAIN, TOPK, MIXED, MIXED, PLAIN]
    if exchanges:
        labels = [candidate.label for candidate in r.state.settings.candidates]
        candidates = {0: labels.index("topk density=0.05 over twoshot")}
        candidates[1] = next(i for i, label in enumerate(labels) if "density=0.05 over hierarchical" in label)
        plan = [Regime(g.rule, tuple(candidates.get(w, w) for w in g.candidates)) for g in plan]
    rates = [0.05, 0.05, 0.05, 0.02, 0.1, 0.03, 0.01, 0.01, 0.2, 0.02, 0.03, 0.0301, 0.1, 0.02, 0.005]
    rates += [0.05, 0.01]
    given = {n: torch.zeros_like(t) for n, t in r.fed.items()}
    taken = {n: torch.zeros_like(t) for n, t in r.fed.items()}
    worst, kept_most, seen = 0.0, 0.0, set()

    def step(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        for name in r.fed:
            r.fed[name].zero_()
            r.applied[name].zero_()
        r.step()
        optimizer.step()  # else the next pass belongs to the same step, and no groups change
        for name in r.fed:
            given[name] += rate * r.fed[name]
            taken[name] += rate * r.applied[name]

    step(0.05), step(0.05)
    scripted(r.state, plan, park)
    for rate in rates:
        step(rate)
        seen.add(tuple(g["codec"] for g in r.state.stats()["groups"]))
        saved = r.state.state_dict()
        for name in r.fed:
            mine = given[name] + 0
            if name in saved["residuals"]:
                kept = saved["residuals"][name].double() * saved["rates"][name]
                kept_most = max(kept_most, float(kept.abs().max()))
                local, common = saved["shared"].get(name, (1, False))
                mine -= local * kept[0].view(mine.shape)
                if common:
                    mine -= world * kept[-1].view(mine.shape)
            torch.distributed.all_reduce(mine)
            worst = max(worst, float((mine - taken[name]).abs().max()))
    assert r.state.error is None
    assert kept_most > 0.05, "the test did not have a residual to lose"
    assert worst < 2e-5
    assert park or r.kept() == 0, "plain DDP keeps nothing"
    assert exchanges or {("topk", "topk"), ("topk", "none", "sidco-e"), ("sidco-e",)} <= seen


# ---- an optimizer's parameter groups that change -----------------------------------------------------------


class Linear(nn.Module):
    """Its gradients do not depend on its parameters, so nor do the residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x[0] + self.b * x[1]).sum()


def with_groups_of(how: str, changes: bool, skips: bool) -> list[dict[str, torch.Tensor]]:
    """The residuals after each of eight steps. After some of them the rates change and, if `changes`, the
    optimizer's parameter groups too, which leaves each parameter its rate."""
    module = Linear()
    ddp = nn.parallel.DistributedDataParallel(module)
    state = sidcomp.State("topk", density=0.1, groups=[["a"], ["b"]], nonfinite="rollback")
    register(ddp, state)
    at_end(state.close)
    one, two = {"params": [module.a], "lr": 1.0}, {"params": [module.b], "lr": 0.01}
    late = how == "added" and changes
    sgd = torch.optim.SGD([two] if late else [one, two])
    state.follow(sgd)
    noise, seen = torch.Generator().manual_seed(0), []
    for step in range(8):
        if step == 3 and changes:
            if how == "added":
                sgd.add_param_group({"params": [module.a], "lr": 1.0})
            elif how == "reversed":
                sgd.param_groups.reverse()
            else:
                sgd.param_groups[0]["params"].append(module.b)
                sgd.param_groups[0]["lr"] = 0.1
                del sgd.param_groups[1]
        if step == (3 if how == "merged" else 5):
            for group in sgd.param_groups:
                group["lr"] = 0.1
        ddp(torch.randn(2, 40, generator=noise)).backward()
        if skips and step in (3, 5):
            state.skip()
        else:
            sgd.step()
        seen.append(residuals_of(state))
    assert state.error is None
    return seen


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("how", ["added", "reversed", "merged"])
@on_ranks(1)
def test_what_is_owed_follows_its_parameter(rank: int, world: int, how: str, skips: bool) -> None:
    assert_all_same(with_groups_of(how, True, skips), with_groups_of(how, False, skips), how)


# ---- several rates, and what is refused ------------------------------------------------------------


def two_rates(rank: int, world: int, apart: bool, optimizers: int = 1) -> tuple[list[float], list[str]]:
    lines = logged()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 30), nn.Identity(), nn.Linear(30, 20))
    ddp = nn.parallel.DistributedDataParallel(module)
    state = sidcomp.State("topk", density=0.1, groups=[NAMES[:2], NAMES[2:]] if apart else "model")
    register(ddp, state)
    optimizer = torch.optim.SGD([{"params": module[0].parameters()}, {"params": module[2].parameters()}], 0.1)
    both = [torch.optim.SGD(module[2 * i].parameters(), 0.1) for i in range(optimizers)]
    state.follow(optimizer if optimizers == 1 else both)
    groups = optimizer.param_groups if optimizers == 1 else [o.param_groups[0] for o in both]
    for first, second in ((0.1, 0.1), (0.1, 0.1), (0.05, 0.2), (0.05, 0.2), (0.1, 0.4)):
        for group, rate in zip(groups, (first, second), strict=True):
            group["lr"] = rate
        ddp(torch.ones(2, 40)).sum().backward()
    assert state.engine.layout is not None
    carries = [g.stage.carry for g in state.engine.layout.groups]
    ddp(torch.ones(2, 40)).sum().backward()
    assert all(g.stage.carry == 1 for g in state.engine.layout.groups)
    groups[0]["lr"] = 0.3
    ddp(torch.ones(2, 40)).sum().backward()
    carries += [g.stage.carry for g in state.engine.layout.groups]
    state.close()
    return carries, [line for line in lines if "learning rates" in line]


def test_groups_follow_their_own_rates() -> None:
    ((carries, warned),) = run(two_rates, 1, True)
    assert carries == [0.5, 0.5, 1.0, pytest.approx(1 / 3)]
    assert not warned
    assert run(two_rates, 1, True, 2) == [(carries, [])], "an optimizer for each layer"
    ((carries, warned),) = run(two_rates, 1, False)
    assert carries == [0.5, pytest.approx(1 / 3)], "most of its elements are those of the first layer"
    assert len(warned) == 1 and "0.weight" in warned[0]


@on_ranks(2)
def test_an_optimizer_that_computes_its_rate_has_none(rank: int, world: int) -> None:
    """Residuals follow none then, also when the program gives a rate later."""
    optimization = pytest.importorskip("transformers.optimization")
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(40, 30))
    optimizer = optimization.Adafactor(ddp.parameters())  # lr=None, relative_step=True
    said = io.StringIO()
    with redirect_stderr(said), sidcomp.compress(ddp, optimizer, "topk", density=0.1) as it:
        for step in range(4):
            if step == 3:
                optimizer.param_groups[0].update(lr=0.1, relative_step=False)
            optimizer.zero_grad()
            ddp(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            assert it.state.engine.groups[0].stage.carry == 1.0
    assert alike(ddp.module)
    assert said.getvalue().count("Adafactor has lr=None") == (rank == 0)


@on_ranks(2)
def test_what_cannot_be_followed_is_refused(rank: int, world: int) -> None:
    trainer, state = begin(rank, "default", codec="topk", density=0.1)
    for wrong in (object(), nn.Linear(2, 2)):
        with pytest.raises(sidcomp.ArgumentError, match="param_groups"):
            state.follow(wrong)  # type: ignore[arg-type]
    for rate in (math.nan, math.inf, -1.0, "fast"):
        trainer.optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(sidcomp.ArgumentError, match="lr of"):
            state.follow(trainer.optimizer)
    trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    state.follow(trainer.optimizer)
    trainer.step()
    trainer.optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(RuntimeError, match="lr of"):
        trainer.backward(0, "sync")
    assert isinstance(state.error, sidcomp.ArgumentError)
    trainer.optimizer.param_groups[0]["lr"] = 0.05
    trainer.step()
    with pytest.raises(sidcomp.ArgumentError, match="none of the model's"):
        state.follow(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    layers = [m for m in trainer.module.modules() if list(m.parameters(recurse=False))]
    first, second = (torch.optim.SGD(m.parameters(recurse=False), 0.1) for m in layers[:2])
    for given, why in (
        ([], r"follow\(\[\]\)"),
        ([first, trainer.optimizer], "a parameter in common"),
        ([first, torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)], "none of the model's"),
    ):
        with pytest.raises(sidcomp.ArgumentError, match=why):
            state.follow(given)
    assert state.engine.rates is not None and state.engine.rates.optimizers == (trainer.optimizer,)
    state.follow([first, second], torch.amp.GradScaler("cpu"))
    trainer.step()
    state.follow(first)
    with pytest.raises(sidcomp.ArgumentError, match=r"in one call, follow\(\[a, b\]\)"):
        state.follow(second)
    state.follow(None)
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    trainer.step()
    assert state.engine.layout is not None and state.engine.layout.groups[0].stage.carry == 1
    state.close()
    with pytest.raises(sidcomp.SetupError, match="closed"):
        state.follow(trainer.optimizer)


@on_ranks(1)
def test_what_is_loaded_owes_at_its_own_rate(rank: int, world: int) -> None:
    trainer, state = begin(rank, "cap-tiny", codec="topk", density=0.1)
    state.follow(trainer.optimizer)
    before: dict[str, object] = {}
    seen = []
    for i, rate in enumerate((0.4, 0.4, 0.2, 0.1, 0.05)):
        if i == 3:
            before = state.state_dict()  # owes at the rate of .2
        if i == 4:
            state.load_state_dict(before)
        trainer.optimizer.param_groups[0]["lr"] = rate
        trainer.step()
        assert state.engine.layout is not None
        seen.append([g.stage.carry for g in state.engine.layout.groups])
    assert [set(carries) for carries in seen] == [{1.0}, {1.0}, {2.0}, {2.0}, {4.0}]


class Wrapper(torch.optim.Optimizer):
    """What Accelerate, torchft and many programs make of an optimizer: it passes everything on, and never
    calls Optimizer.__init__."""

    def __init__(self, optimizer: torch.optim.Optimizer, *more: Any) -> None:
        self.optim, self.more, self.name = optimizer, list(more), "an attribute that is no optimizer"

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure) if closure is not None else self.optim.step()


class Bare(torch.optim.Optimizer):
    """Shows nothing of the optimizer inside, which it has in a dictionary."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.all = {"only": optimizer}

    def step(self, closure: Any = None) -> Any:
        return self.all["only"].step()


WRAPPED: dict[str, Any] = {
    "itself": lambda o: o,
    "wrapped": Wrapper,
    "twice": lambda o: Wrapper(Wrapper(o)),
    "also inside": lambda o: Wrapper(Wrapper(o), o),
    "bare": Bare,
}


def wrapped(rank: int, world: int, how: str) -> list[dict[str, Any]]:
    """A rate that changes, and a step that the scaler skips; the program steps the wrapper."""
    trainer, state = begin(rank, codec="topk", density=0.05)
    sgd, scaler = trainer.optimizer, torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = WRAPPED[how](sgd)
    state.follow(optimizer, None if how == "bare" else scaler)  # which needs param_groups
    seen = []
    for step, rate in enumerate((0.05, 0.02, 0.02, 0.1)):
        sgd.param_groups[0]["lr"] = rate
        sgd.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + rank)
        loss = trainer.wrapper(torch.randn(4, 12, generator=draw)).square().sum()
        if how == "bare":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * (math.inf if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(everything(trainer, state))
    assert state.engine.rates is not None and state.engine.rates.optimizers == (sgd,)
    assert state.engine.step == (4 if how == "bare" else 3), "the step that was skipped is discarded"
    return seen


def test_the_optimizer_inside_a_wrapper_is_followed() -> None:
    (plain,) = run(wrapped, 1, "itself")
    for how in list(WRAPPED)[1:-1]:
        (mine,) = run(wrapped, 1, how)
        assert_all_same(mine, plain, how)
    run(wrapped, 1, "bare")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_updates_take_wrappers(rank: int, world: int, kind: str) -> None:
    """Updates are exchanged after a step of the optimizer inside, by whichever it was taken."""
    ends = []
    for wrap in (lambda o: o, Wrapper, Bare):
        torch.manual_seed(0)
        module = nn.Linear(30, 20)
        adam = torch.optim.AdamW(module.parameters(), 0.01)
        with sidcomp.State("topk", density=0.1) as state:
            optimizer = wrap(adam)
            local = updates(kind, module, optimizer, state, every=2)
            for step in range(6):
                draw = torch.Generator().manual_seed(10 * step + rank)
                adam.zero_grad()
                module(torch.randn(4, 30, generator=draw)).square().sum().backward()
                optimizer.step()
            assert local.steps == 6 and state.stats()["steps"] == 3
        ends.append(module.weight.detach().clone())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_wrapper_of_none_or_several_is_told_what_to_give() -> None:
    module = nn.Linear(3, 2)
    first, second = torch.optim.SGD([module.weight], 0.1), torch.optim.AdamW([module.bias], 0.1)
    state = sidcomp.State("topk")
    for wrong, said in (
        (Wrapper(None), "holds no optimizer in its attributes: give the torch.optim.Optimizer whose step"),  # type: ignore[arg-type]
        (Wrapper(first, second), "holds 2 optimizers, SGD and AdamW: give a list of those"),
        ([second, Wrapper(first, second)], "holds 2 optimizers"),
    ):
        for take in (
            lambda o: state.follow(o),
            lambda o: updates("parameters", module, o, state),
            lambda o: updates("memory", module, o, state),
        ):
            with pytest.raises(sidcomp.ArgumentError, match=f"^Wrapper does not call .*{said}"):
                take(wrong)


def test_factors_stay_finite() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], 0.0)
    rates = Rates([optimizer])
    found = []
    for rate in (0.0, 1e-300, 1e300, 0.0, 1e300, 1.0, 1e-44):
        optimizer.param_groups[0]["lr"] = rate
        found.append(rates.advance().get((0, 0, 0), 1.0))
    assert found == [1.0, 1e-30, 1e-30, 1.0, 1.0, 1e30, 1e30]
    assert rates.last == {(0, 0, 0): 1e-44}


def test_an_optimizer_outlives_the_state_that_followed_it() -> None:
    """And one that could not be followed, which changes nothing."""
    first, second = (torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1) for _ in range(2))
    adam = torch.optim.Adam(nn.Linear(3, 3).parameters(), 0.1)
    kept, dropped = sidcomp.State(), sidcomp.State("topk")
    kept.follow(first)
    dropped.follow(second)
    before = repr(kept)
    with pytest.raises(sidcomp.ArgumentError, match="of other parameters already"):
        kept.follow(adam)
    assert repr(kept) == before
    del dropped
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            second.step()
            adam.step()


@on_ranks(1)
def test_rates_stay_with_their_parameters_when_others_are_followed(rank: int, world: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    ddp = nn.parallel.DistributedDataParallel(module)
    state = sidcomp.State("topk", density=0.1, groups="layer", nonfinite="rollback")
    register(ddp, state)
    both = [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters(), "lr": 0.4}]
    state.follow(torch.optim.SGD(both))

    def carries() -> set[float]:
        ddp(torch.ones(2, 40)).sum().backward()
        assert state.engine.layout is not None
        return {g.stage.carry for g in state.engine.layout.groups}

    assert [carries() for _ in range(3)] == [{1.0}] * 3
    state.follow([torch.optim.SGD(module[1].parameters(), 0.4), torch.optim.SGD(module[0].parameters(), 0.1)])
    state.skip()  # goes back to the rates before that step
    assert carries() == {1.0}
    state.close()


@pytest.mark.parametrize("how", ["a rate is wrong", "a bucket is wrong"])
@on_ranks(1)
def test_a_rate_that_changed_in_a_step_that_failed_still_counts(rank: int, world: int, how: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001)
    state = sidcomp.State("topk", density=0.1)
    register(ddp, state)
    optimizer = torch.optim.SGD(
        [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters(), "lr": 0.1}]
    )
    state.follow(optimizer)

    def carries() -> list[float]:
        ddp(torch.ones(2, 40)).sum().backward()
        assert state.engine.layout is not None
        return [g.stage.carry for g in state.engine.layout.groups if "0.weight" in g.names]

    ready, first, second = state.engine.ready, *optimizer.param_groups

    def refuses(index: int, *rest: Any) -> Any:
        if index == 0:
            return ready(index, *rest)
        raise ValueError("a bucket is wrong")

    carries(), carries(), carries()
    first["lr"] = 0.05
    if how == "a rate is wrong":
        second["lr"] = math.nan
    else:
        state.engine.ready = refuses  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"wrong|lr of"):
        carries()
    second["lr"], state.engine.ready = 0.1, ready  # type: ignore[method-assign]
    assert carries() == [2.0]
    assert carries() == [1.0]
    state.close()
