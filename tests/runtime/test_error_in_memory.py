"""error="memory": the ranks average updates of their own optimizers, and continue from the same point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks, run
from local_training import (
    OPTIMIZERS,
    alike,
    batch,
    error_of,
    flat,
    learns,
    mean,
    network,
    resumes,
    train,
    updates,
)
from torch import nn

STEPS = 12


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("momentum", {"codec": "topk", "density": 0.1}),
    ("Adam", {"codec": "int8"}),
    ("Adam", {"codec": "topk", "density": 0.1, "exchange": "twoshot", "groups": "layer"}),
    ("momentum", {"codec": "marsit", "eta_s": 0.03, "exchange": "ring1", "full_every": 2}),
]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("optimizer", "settings"), SETTINGS)
def test_replicas_meet_and_the_loss_falls(optimizer: str, settings: dict[str, Any], every: int) -> None:
    for first, last, stats in run(learns, 2, "memory", optimizer, settings, 20, {"every": every}):
        assert last < 0.9 * first
        assert stats["steps"] == 20 and 0 < stats["sent_bytes"] < stats["dense_bytes"]


@pytest.mark.parametrize("nonfinite", ["drop", "rollback"])
@on_ranks(2)
def test_an_update_that_is_not_finite_is_undone_on_all_ranks(rank: int, world: int, nonfinite: str) -> None:
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.State("topk", density=0.2, nonfinite=nonfinite, groups="layer") as state:
        updates("memory", module, optimizer, state)
        for step in range(6):
            if step == 3:
                before = flat(module)
                kept = copy.deepcopy(state.state_dict()["residuals"])
            train(module, optimizer, rank, range(step, step + 1), nan=3)
            if step == 3:
                assert torch.equal(flat(module), before)
                if nonfinite == "rollback":
                    after = state.state_dict()["residuals"]
                    assert all(torch.equal(after[name], kept[name]) for name in kept)
        assert alike(module) and torch.isfinite(flat(module)).all()
        assert not torch.equal(flat(module), before)


@pytest.mark.parametrize("stop", [6, 7])
def test_resumes_bit_for_bit_also_between_two_exchanges(stop: int) -> None:
    run(resumes, 2, "memory", stop, STEPS, {"codec": "topk", "density": 0.1}, {"every": 3})


@on_ranks(2)
def test_buffers_are_rank_0s(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with sidcomp.State("none") as state:
        updates("memory", module, optimizer, state, every=2)
        for step in range(4):
            module(batch(rank, step)[0]).sum().backward()
            optimizer.step()
    assert alike(module[1].running_mean)


@on_ranks(1)
def test_what_cannot_work_is_refused(rank: int, world: int) -> None:
    module = network()
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    state = sidcomp.State("none")

    def refused(said: str, error: type[Exception], *given: Any, **more: Any) -> None:
        with pytest.raises(error, match=said):
            updates("memory", *given, **more)

    for every in (0, 1.5, True):
        refused("at least 1", sidcomp.ArgumentError, module, optimizer, state, every=every)
    refused("planned", sidcomp.SetupError, module, optimizer, sidcomp.State("auto"))
    other = OPTIMIZERS["SGD"](network().parameters())
    refused("optimizer does not have '0.weight'", sidcomp.SetupError, module, other, state)
    refused("no parameters", sidcomp.SetupError, nn.ReLU(), optimizer, state)
    steps = updates("memory", module, optimizer, state, every=2)
    refused("serves a model already", sidcomp.SetupError, module, optimizer, state)
    for saved, said in (
        ({"steps": None}, '"steps"'),
        ({"steps": 10**18}, "a number of steps"),
        ({"version": 2}, '"version" is 2, and this sidcomp reads 1'),
        ({"error": "parameters"}, "resume with the same `error`"),
        ({"point": {}}, "parameter"),
        ({"point": {**steps.state_dict()["point"], "0.weight": torch.zeros(2)}}, "parameter"),
        ({"outer": {"momentum": {}}}, "holds the state of an outer optimizer"),
    ):
        with pytest.raises(sidcomp.CheckpointError, match=said):
            steps.load_state_dict({**steps.state_dict(), **saved})
    state.follow(optimizer)
    with pytest.raises(sidcomp.SetupError, match=r"follow\(None\)"):
        steps.average()
    state.close()
    with pytest.raises(sidcomp.SetupError, match="closed"):
        steps.average()


# ---- an average that loses nothing


@pytest.mark.parametrize(
    "codec, far",
    [
        ({"codec": "topk", "density": 0.05}, 1e-5),
        ({"codec": "int4"}, 1e-5),
        ({"codec": "topk", "density": 0.05, "exchange": "twoshot", "groups": "model"}, 1e-5),
        ({"codec": "topk", "density": 0.3, "memory": "none"}, 0.9),  # which drops what is not sent
    ],
)
@on_ranks(2)
def test_average_loses_nothing(rank: int, world: int, codec: dict[str, Any], far: float) -> None:
    """How far average() leaves the point from the mean of all that the optimizers did."""
    module, stepped = network(rank), []
    with sidcomp.State(**codec) as state:
        adam = OPTIMIZERS["Adam"](module.parameters())
        adam.register_step_post_hook(lambda *_: stepped.append(flat(module)))  # before it exchanges
        local = updates("memory", module, adam, state, every=3)
        done = flat(module).double()
        for step in range(10):
            before = flat(module)
            train(module, adam, rank, range(step, step + 1))
            done += mean(stepped.pop() - before)
        kept = error_of(state, module)
        local.average()
        assert alike(module)
        with local.common():
            assert alike(module)
        if codec.get("memory") != "none":
            assert kept.any() and not error_of(state, module).any()
        start = flat(network(0)).double()
        assert float((flat(module).double() - done).norm() / (done - start).norm()) < far


def test_the_step_sizes_of_marsits_theorem() -> None:
    sizes = sidcomp.simulation.marsit_step_sizes(ranks=4, steps=10_000, elements=1_000_000)
    assert sizes.local == pytest.approx(0.02) and sizes.global_ == pytest.approx(1e-5)
    assert sizes.eta_s == pytest.approx(5e-4)
    state = sidcomp.preset("marsit", eta_s=sizes.eta_s)
    assert state.settings.candidates[0].parameters["eta_s"] == sizes.eta_s
    for wrong in ({"ranks": 0}, {"steps": float("nan")}, {"elements": "many"}):
        with pytest.raises(sidcomp.ArgumentError, match=next(iter(wrong))):
            sidcomp.simulation.marsit_step_sizes(**{"ranks": 4, "steps": 10, "elements": 10, **wrong})  # type: ignore[arg-type]
