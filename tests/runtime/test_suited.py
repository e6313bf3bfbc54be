"""The default codec, and the candidates of "auto", suit the optimizer that a State follows."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks, run
from heard import warned
from sidcomp.config import accuracy
from sidcomp.doors.ddp import register, rewrap
from sidcomp.local.steps import Updates
from sidcomp.runtime.optimizer_watch import Unfollowed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
FORTIETH, INT4, FP16 = ("topk density=0.084 values=log4 indices=packed", "int4", "fp16")
MODEL: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1))  # noqa: E731


def beside(kind: Any, *arguments: Any, **named: Any) -> list[str]:
    state = sidcomp.State(*arguments, **named)
    state.follow(kind([torch.zeros(3, requires_grad=True)], lr=0.1))
    assert state.engine.settings is state.settings
    return [c.encoding for c in state.settings.candidates if not c.in_messages]


@pytest.mark.parametrize(
    "kind, named, codec, candidates",
    [
        (SGD, {}, [FORTIETH], [FORTIETH, FP16]),
        (torch.optim.RMSprop, {}, [FORTIETH], [FORTIETH, FP16]),
        (Adam, {}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "dense"}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "close"}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "any"}, [FORTIETH], [FORTIETH, FP16]),
        (SGD, {"accuracy": "any"}, [FORTIETH], [FORTIETH, FP16]),
        (SGD, {"accuracy": "exact"}, ["lossless"], ["lossless"]),
        (AdamW, {"accuracy": "exact"}, ["lossless"], ["lossless"]),
    ],
)
def test_what_is_not_named_suits_the_optimizer(
    kind: Any, named: dict[str, Any], codec: list[str], candidates: list[str]
) -> None:
    assert beside(kind, **named) == codec
    assert beside(kind, "auto", **named) == candidates


def test_what_is_named_stays() -> None:
    assert beside(Adam, "topk") == ["topk"]
    assert beside(Adam, density=0.05) == ["topk density=0.05 values=log4 indices=packed"]
    assert beside(Adam, "auto", candidates=["topk"]) == ["topk"]


def test_it_says_what_it_uses(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    beside(AdamW, seed=1)
    assert "beside AdamW State() uses int4" in capsys.readouterr().err
    beside(AdamW, "auto", seed=1)
    assert 'State("auto") chooses from int4, fp16' in capsys.readouterr().err
    beside(SGD)
    beside(AdamW, accuracy="any")
    assert not capsys.readouterr().err and not caplog.records


@pytest.mark.parametrize(
    "named, said",
    [
        ({"accuracy": "best"}, "exact, dense, close, any"),
        ({"codec": "topk", "accuracy": "any"}, "leave accuracy out"),
        ({"codec": "auto", "candidates": ["topk"], "accuracy": "any"}, "leave accuracy out"),
    ],
)
def test_a_wrong_accuracy_is_refused(named: dict[str, Any], said: str) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=said):
        sidcomp.State(**named)


def test_exact_rounds_nothing_and_has_the_most_bytes() -> None:
    """So where another codec is allowed, it is no candidate: it cannot be the fastest."""
    n = 100_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    exact = sidcomp.Compressor(accuracy.EXACT[0], n, **dict(accuracy.EXACT[1]))
    assert torch.equal(exact.decode([exact.encode(x)]), x)
    for (name, own), *_ in (*accuracy.PLAIN, *accuracy.ADAPTIVE):
        assert sidcomp.Compressor(name, n, **dict(own)).payload_bytes < 0.6 * exact.payload_bytes


def test_the_fewest_bytes_come_first() -> None:
    for table in (accuracy.PLAIN, accuracy.ADAPTIVE):
        plans = [sidcomp.Compressor(name, 100_000, **dict(own)).payload_bytes for (name, own), *_ in table]
        assert plans == sorted(plans)
        assert table[-1].within


RUNS = [("GRU", 2), ("transformer", 2), ("transformer", 4)]


@pytest.mark.parametrize(
    "over, levels",
    [
        ((0.2, 1.6, 7.9), {"dense", "close", "any"}),
        ((-1.0, -1.0, 7.9), {"dense", "close", "any"}),
        ((0.3, 0.0, 0.0), {"close", "any"}),
        ((1.0, 1.0, 1.0), {"close", "any"}),
        ((1.1, 0.0, 0.0), {"any"}),
        ((-3.0, -3.0, 8.0), {"any"}),
    ],
)
def test_every_model_and_number_of_ranks_counts(
    over: tuple[float, ...], levels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where plain DDP's seeds differ by 0.2, 1.6 and 7.9 %."""
    seeds = accuracy.ADAPTIVE[0].seeds
    mine = accuracy.Measured(("int2", {}), dict(zip(RUNS, over, strict=True)), seeds)
    monkeypatch.setattr(accuracy, "ADAPTIVE", (mine, *accuracy.ADAPTIVE[-2:]))
    found = {level for level in ("dense", "close", "any") if mine.spec in accuracy.allowed(level, True)}
    assert found == levels
    for level in ("dense", "close"):
        assert beside(AdamW, accuracy=level) == (["int2"] if level in levels else [INT4])


@pytest.mark.parametrize("kind, codec", [("Adam", "int4"), ("SGD", "topk")])
@on_ranks(2)
def test_a_run_uses_it_and_resumes_with_the_same_bits(rank: int, world: int, kind: str, codec: str) -> None:
    """A run that is stopped after 3 steps and resumed, and one that is not. In the resumed one the State
    loads its checkpoint before it sees the optimizer."""

    def part(first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(MODEL())
        optimizer = {"Adam": Adam, "SGD": SGD}[kind](ddp.parameters(), lr=0.01)
        with sidcomp.State() as state:
            register(ddp, state)
            if saved is not None:
                ddp.module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                state.load_state_dict(saved["state"])
            state.follow(optimizer)
            for step in range(first, last):
                draw = torch.Generator().manual_seed(10 * step + rank)
                optimizer.zero_grad()
                ddp(torch.randn(8, 20, generator=draw)).square().mean().backward()
                optimizer.step()
            copy = pickle.loads(pickle.dumps(state))
            assert copy.settings.saved() == state.settings.saved()
            assert {g["codec"] for g in state.stats()["groups"]} == {codec}
            both = {"module": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            return {**both, "state": state.state_dict()}

    whole, again = part(0, 6, None), part(3, 6, part(0, 3, None))
    assert all(torch.equal(x, again["module"][name]) for name, x in whole["module"].items())


def test_nothing_rounded_needs_a_residual() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="leave memory out"):
        sidcomp.State(accuracy="exact", memory="none")
    state = sidcomp.State(accuracy="exact", memory="residual")
    assert "lossless" in str(state)


# ---- an optimizer that nobody follows


class Wrapper:
    """What a framework makes of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def unfollowed(rank: int, world: int, how: str, named: dict[str, Any]) -> list[str]:
    """The warnings of some steps, of which none comes after the hook has gone."""
    ddp = DistributedDataParallel(MODEL())
    kinds: dict[str, Any] = {"SGD": SGD, "RMSprop": torch.optim.RMSprop}
    optimizer = kinds.get(how, AdamW)(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps: list[Any] = [Wrapper(optimizer) if how == "wrapped" else optimizer]
    if how == "two":
        both = list(ddp.parameters())
        steps = [SGD(both[:2], lr=0.01), Adam(both[2:], lr=0.01)]
    other = Adam([torch.zeros(3, requires_grad=True)])
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    state = sidcomp.State(**named)
    with warned(sidcomp.SidcompWarning) as caught:
        register(ddp, state)
        if how == "followed":
            state.follow(optimizer)
        for _ in range(4):
            ddp(torch.randn(8, 20)).square().mean().backward()
            other.step()
            for step in steps if how != "other" else []:
                step.step()
            if how not in ("two", "other"):
                scheduler.step()
        looks = bool(_global_optimizer_pre_hooks)
        assert looks is (how in ("SGD", "RMSprop", "other")), "the hook goes with the first match"
    del ddp, scheduler
    state.close()
    assert not _global_optimizer_pre_hooks
    return caught


@pytest.mark.parametrize("how", ["plain", "wrapped", "two"])
def test_adam_that_nobody_follows_is_named_once(how: str) -> None:
    first, second = run(unfollowed, 2, how, {})
    assert len(first) == 1 and not second, "rank 0 says it, once"
    kind = "Adam" if how == "two" else "AdamW"
    (cost,) = (m.worst for m in accuracy.ADAPTIVE if m.spec == accuracy.FORTIETH)
    assert f"this model is trained with {kind}, and State() uses {FORTIETH}, which" in first[0]
    assert f"by up to {cost:g} % with AdamW:" in first[0] and "\n" not in first[0]
    assert "call state.follow(optimizer) before the first step of your program, " in first[0]
    assert "and it uses int4; or" in first[0]


def test_auto_is_named_as_well() -> None:
    first, second = run(unfollowed, 2, "plain", {"codec": "auto", "warmup": 1})
    text = next(text for text in first if "this model is trained with AdamW" in text)
    assert 'State("auto") may choose topk' in text and "chooses from int4, fp16" in text
    assert not second


@pytest.mark.parametrize(
    "how, named",
    [
        ("SGD", {}),
        ("RMSprop", {}),
        ("other", {}),
        ("followed", {}),
        ("plain", {"accuracy": "any"}),
        ("plain", {"accuracy": "exact"}),
        ("plain", {"codec": "topk", "density": 0.05}),
    ],
)
def test_where_the_loss_is_kept_or_was_accepted_nothing_is_said(how: str, named: dict[str, Any]) -> None:
    for said in run(unfollowed, 2, how, named):
        assert not said


@on_ranks(2)
def test_nothing_is_said_twice_or_where_a_checkpoint_has_chosen(rank: int, world: int) -> None:
    """The model is wrapped anew after the warning, and a State takes over a checkpoint made beside Adam."""
    ddp = DistributedDataParallel(MODEL())
    adam = AdamW(ddp.parameters(), lr=0.01)

    def step(model: nn.Module) -> None:
        model(torch.ones(8, 20)).square().mean().backward()
        adam.step()

    with warned() as caught:
        with sidcomp.State() as state:
            register(ddp, state)
            step(ddp)
            ddp = rewrap(ddp, state)
            assert not _global_optimizer_pre_hooks
            step(ddp)
        with sidcomp.State() as state:
            ddp = DistributedDataParallel(ddp.module)
            register(ddp, state)
            state.follow(adam)
            step(ddp)
            saved = state.state_dict()
        with sidcomp.State() as state:
            ddp = DistributedDataParallel(ddp.module)
            register(ddp, state)
            state.load_state_dict(saved)
            step(ddp)
            assert {g["codec"] for g in state.stats()["groups"]} == {"int4"}
    assert sum("trained with AdamW" in text for text in caught) == (rank == 0)


@on_ranks(2)
def test_strict_refuses_it_before_the_parameters_move(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(MODEL())
    adam = AdamW(ddp.parameters(), lr=0.01)
    state = sidcomp.State()
    register(ddp, state)
    ddp(torch.ones(8, 20)).square().mean().backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    with sidcomp.strict(), pytest.raises(sidcomp.StrictError, match=r"state\.follow"):
        adam.step()
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    adam.step()  # the program has been told
    assert not any(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    state.close()


@on_ranks(1)
def test_it_keeps_nothing_alive(rank: int, world: int) -> None:
    """A State that nobody closed: the hook keeps neither it nor an optimizer, and the next State's removes
    it."""
    ddp = DistributedDataParallel(MODEL())
    state = sidcomp.State()
    register(ddp, state)
    ddp(torch.ones(8, 20)).square().mean().backward()
    alive = state._finalizer
    sgd = SGD(ddp.parameters(), lr=0.01)
    sgd.step()
    (hook,) = (h for h in _global_optimizer_pre_hooks.values() if not h.over)
    gone = hook._seen[id(sgd)]
    del ddp, state, sgd
    gc.collect()
    assert not alive.alive and gone() is None
    Adam(MODEL().parameters()).step()
    other = DistributedDataParallel(MODEL())
    with sidcomp.State() as state:
        register(other, state)
        assert hook not in _global_optimizer_pre_hooks.values()
        assert len([h for h in _global_optimizer_pre_hooks.values() if isinstance(h, Unfollowed)]) == 1
        other(torch.ones(8, 20)).square().mean().backward()


@on_ranks(2)
def test_updates_are_what_it_advises(rank: int, world: int) -> None:
    module = MODEL()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw, state = AdamW(module.parameters(), lr=0.01), sidcomp.State()
        Updates(module, adamw, state)
        assert not any(isinstance(h, Unfollowed) for h in _global_optimizer_pre_hooks.values())
        for _ in range(2):
            module(torch.ones(8, 20)).square().mean().backward()
            adamw.step()
        state.close()
