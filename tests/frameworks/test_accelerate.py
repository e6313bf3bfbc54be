"""Accelerate, in real runs of two ranks: the bits of a plain DDP loop, and every rank's own state."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
from launched import (
    ARGUMENTS,
    EPOCHS,
    STEPS,
    as_torchrun,
    batches,
    example,
    needs,
    network,
    optimizer_of,
    plain_loop,
    run_frameworks,
    same,
    snapshot,
)
from torch import nn

needs("accelerate")


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    import accelerate
    from sidcomp.frameworks.accelerate import prepare

    def train(accelerator: Any, run: Any, epochs: int, state: sidcomp.State) -> dict[str, Any]:
        model, optimizer, loader = run
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        return snapshot(accelerator.unwrap_model(model), state.state_dict())

    def start(state: sidcomp.State) -> tuple[Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        module = network()
        model, optimizer = prepare(accelerator, state, module, optimizer_of(module.parameters()))
        return accelerator, (model, optimizer, batches(rank, world))

    def error(folder: Path) -> str:
        with sidcomp.State(**ARGUMENTS) as state:
            accelerator, _ = start(state)
            try:
                accelerator.load_state(folder)
            except sidcomp.CheckpointError as e:
                return str(e)
        return ""

    out: dict[str, Any] = {"plain": plain_loop(rank, world)}
    saved, other = Path(room) / "saved", Path(room) / "other"
    with sidcomp.State(**ARGUMENTS) as state:
        accelerator, parts = start(state)
        train(accelerator, parts, EPOCHS - 1, state)
        accelerator.save_state(saved)
        out["whole"] = train(accelerator, parts, 1, state)
        out["followed"] = state._engine.rates is not None
    with sidcomp.State(**ARGUMENTS) as state:
        accelerator, parts = start(state)
        accelerator.load_state(saved)
        out["first"] = state.state_dict()["step"]
        out["resumed"] = train(accelerator, parts, 1, state)
        accelerator.save_state(other)
    accelerator.wait_for_everyone()

    # What Accelerate itself does with a State: it saves that of rank 0, and rank 1 fails.
    own = Path(room) / "own"
    with sidcomp.State(**ARGUMENTS) as state:
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(network())
        sidcomp.register(model, state)
        model(torch.zeros(1, 20)).sum().backward()
        accelerator.register_for_checkpointing(state)
        accelerator.save_state(own)
        accelerator.wait_for_everyone()
        try:
            accelerator.load_state(own)
            out["own"] = ""
        except sidcomp.CheckpointError as e:
            out["own"] = str(e)
    accelerator.wait_for_everyone()

    if rank == 0:
        shutil.copy(other / "sidcomp-rank1.pt", saved / "sidcomp-rank1.pt")
    accelerator.wait_for_everyone()
    out["mixed"] = error(saved)
    accelerator.wait_for_everyone()
    if rank == 0:
        (saved / "sidcomp-rank1.pt").unlink()
    accelerator.wait_for_everyone()
    out["missing"] = error(saved)
    accelerator.wait_for_everyone()
    if rank == 0:
        (saved / "sidcomp-rank0.pt").unlink()
    accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out["none"] = error(saved)
    out["told"] = [str(w.message) for w in told if "sidcomp" in str(w.message)]
    with sidcomp.State(**ARGUMENTS) as state:
        try:
            prepare(accelerate.Accelerator(cpu=True), state, optimizer_of(nn.Linear(1, 1).parameters()))
            out["no model"] = ""
        except sidcomp.SetupError as e:
            out["no model"] = str(e)
    out["by hand"] = by_hand()
    out["example"] = example("accelerate_loop.py")
    return out


def by_hand() -> list[bool]:
    """Accelerate's wrapper of an optimizer, given to sidcomp by a program that does not use `prepare`, beside
    a GradScaler that is not enabled. Returns whether the optimizer inside was found."""
    import accelerate

    found = []
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    accelerator = accelerate.Accelerator(cpu=True)
    for kind in (None, sidcomp.LocalError, sidcomp.LocalSteps, sidcomp.Outer):
        module = network()
        adam = torch.optim.AdamW(module.parameters(), 0.01)
        with sidcomp.State(**ARGUMENTS) as state:
            optimizer = accelerator.prepare(adam)
            if kind is None:
                module = nn.parallel.DistributedDataParallel(module)
                sidcomp.register(module, state)
                state.follow(optimizer, scaler)
                assert state._engine.rates is not None
                found.append(state._engine.rates.optimizers == (adam,))
            local = kind(module, optimizer, state, every=1) if kind is not None else None
            module(torch.ones(1, 20)).sum().backward()
            if local is None:
                optimizer.step()
            else:
                local.step(scaler=scaler)
                found.append(local._optimizers == [adam] and state._engine.step == 1)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_frameworks(ranks, str(tmp_path_factory.mktemp("accelerate")))


def test_it_trains_the_bits_of_a_plain_loop(results: list[dict[str, Any]]) -> None:
    for r in results:
        same(r["whole"], r["plain"])
        assert r["followed"]


def test_a_resumed_run_has_the_same_bits(results: list[dict[str, Any]]) -> None:
    a, b = results
    for r in results:
        assert r["first"] == (EPOCHS - 1) * STEPS
        same(r["resumed"], r["whole"])
    assert not torch.equal(a["whole"]["r 0.weight"], b["whole"]["r 0.weight"]), "each rank has its own"


def test_accelerate_itself_saves_rank_0_alone(results: list[dict[str, Any]]) -> None:
    """If this fails, Accelerate saves every rank's object: change docs/accelerate.md."""
    assert results[0]["own"] == ""
    assert "this is the state of rank 0, but this process is rank 1" in results[1]["own"]


def test_missing_or_mixed_states_are_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert "different runs" in r["mixed"] or "different steps" in r["mixed"]
        assert "rank 1: there is no" in r["missing"] and "sidcomp-rank1.pt" in r["missing"]
        assert r["none"] == ""
    assert any("start from zero" in t for t in results[0]["told"])


def test_a_model_must_be_among_the_objects(results: list[dict[str, Any]]) -> None:
    assert all("made no DDP model" in r["no model"] for r in results)


def test_its_optimizer_is_the_one_inside(results: list[dict[str, Any]]) -> None:
    assert all(r["by hand"] == [True] * 4 for r in results)


def test_the_example_runs(results: list[dict[str, Any]]) -> None:
    assert not any(r["example"] for r in results)
