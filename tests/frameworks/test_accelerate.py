"""Accelerate, in real runs of two ranks: the bits of a plain DDP loop, and every rank's own state."""

from __future__ import annotations

import gc
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
    refusal,
    run_frameworks,
    same,
    snapshot,
)
from local_training import KINDS, updates
from sidcomp.doors.ddp import register
from torch import nn

needs("accelerate")


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    import accelerate
    from sidcomp.frameworks.accelerate import Compression

    def train(accelerator: Any, run: Any, epochs: int, compression: Compression) -> dict[str, Any]:
        model, optimizer, loader = run
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        assert compression.run is not None
        return snapshot(accelerator.unwrap_model(model), compression.run.state.state_dict())

    def start() -> tuple[Compression, Any, Any]:
        accelerator, compression = accelerate.Accelerator(cpu=True), Compression(**ARGUMENTS)
        module = network()
        model, optimizer = compression.prepare(accelerator, module, optimizer_of(module.parameters()))
        return compression, accelerator, (model, optimizer, batches(rank, world))

    def loading(folder: Path) -> str:
        compression, accelerator, _ = start()
        said = refusal(lambda: accelerator.load_state(folder))
        compression.end()
        return said

    out: dict[str, Any] = {"plain": plain_loop(rank, world)}
    saved, other = Path(room) / "saved", Path(room) / "other"
    compression, accelerator, parts = start()
    train(accelerator, parts, EPOCHS - 1, compression)
    accelerator.save_state(saved)
    out["whole"] = train(accelerator, parts, 1, compression)
    assert compression.run is not None
    out["followed"] = compression.run.state.engine.rates is not None
    out["again"] = refusal(lambda: compression.prepare(accelerator, *parts[:2]))
    compression.end()
    compression, accelerator, parts = start()
    accelerator.load_state(saved)
    assert compression.run is not None
    out["first"] = compression.run.state.state_dict()["step"]
    out["resumed"] = train(accelerator, parts, 1, compression)
    accelerator.save_state(other)
    compression.end()
    accelerator.wait_for_everyone()

    # Two models, as of a GAN, each with a Compression.
    accelerator, both = accelerate.Accelerator(cpu=True), [Compression(**ARGUMENTS) for _ in range(2)]
    for one in both:
        module = network()
        pair = one.prepare(accelerator, module, optimizer_of(module.parameters()))
        train(accelerator, (*pair, batches(rank, world)), 1, one)
    accelerator.save_state(Path(room) / "two")
    accelerator.wait_for_everyone()
    accelerator.load_state(Path(room) / "two")
    out["two"] = sorted(p.name for p in (Path(room) / "two").glob("sidcomp*"))
    for one in both:
        one.end()
    accelerator.save_state(Path(room) / "without")
    out["left"] = list((Path(room) / "without").glob("sidcomp*"))

    # What Accelerate itself does with a State: it saves that of rank 0, and rank 1 fails.
    own = Path(room) / "own"
    with sidcomp.State(**ARGUMENTS) as state:
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(network())
        register(model, state)
        model(torch.zeros(1, 20)).sum().backward()
        accelerator.register_for_checkpointing(state)
        accelerator.save_state(own)
        accelerator.wait_for_everyone()
        out["own"] = refusal(lambda: accelerator.load_state(own))
    accelerator.wait_for_everyone()

    if rank == 0:
        shutil.copy(other / "sidcomp-rank1.pt", saved / "sidcomp-rank1.pt")
    accelerator.wait_for_everyone()
    out["mixed"] = loading(saved)
    accelerator.wait_for_everyone()
    if rank == 0:
        (saved / "sidcomp-rank1.pt").unlink()
    accelerator.wait_for_everyone()
    out["missing"] = loading(saved)
    accelerator.wait_for_everyone()
    if rank == 0:
        (saved / "sidcomp-rank0.pt").unlink()
    accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out["none"] = loading(saved)
    out["told"] = [str(w.message) for w in told if "sidcomp" in str(w.message)]
    fresh = accelerate.Accelerator(cpu=True)
    parameters = nn.Linear(1, 1).parameters()
    out["no model"] = refusal(lambda: Compression(**ARGUMENTS).prepare(fresh, optimizer_of(parameters)))
    out["no optimizer"] = refusal(lambda: Compression(**ARGUMENTS).prepare(fresh, network()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Compression(**ARGUMENTS)
        gc.collect()
    out["unused"] = [str(w.message) for w in told if "sidcomp" in str(w.message)]
    out["wrong"] = [refusal(lambda more=more: Compression(**more)) for more in WRONG]
    out["by hand"] = by_hand()
    out["example"] = example("accelerate_loop.py")
    return out


WRONG: list[dict[str, Any]] = [
    {"codec": "topkk"}, {"codec": sidcomp.State("topk"), "density": 0.1}, {"updates": False, "every": 4},
    {"deadline": 3.0}, {"codec": "int4", "every": 3, "density": 0.1}, {"options": {"seed": 1}},
]  # fmt: skip


def by_hand() -> list[bool]:
    """Accelerate's wrapper of an optimizer, given to sidcomp by a program that does not use `prepare`, beside
    a GradScaler that is not enabled. Returns whether the optimizer inside was found."""
    import accelerate

    found = []
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    accelerator = accelerate.Accelerator(cpu=True)
    for kind in (None, *KINDS):
        module = network()
        adam = torch.optim.AdamW(module.parameters(), 0.01)
        with sidcomp.State(**ARGUMENTS) as state:
            optimizer = accelerator.prepare(adam)
            if kind is None:
                module = nn.parallel.DistributedDataParallel(module)
                register(module, state)
                state.follow(optimizer, scaler)
                assert state.engine.rates is not None
                found.append(state.engine.rates.optimizers == (adam,))
            local = updates(kind, module, optimizer, state, every=1) if kind is not None else None
            module(torch.ones(1, 20)).sum().backward()
            if local is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                found.append(local.steps == state.engine.step == 1)
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
    """If this fails, Accelerate saves every rank's object: change docs/supported.md."""
    assert results[0]["own"] == ""
    assert "this is the state of rank 0, but this process is rank 1" in results[1]["own"]


def test_missing_or_mixed_states_are_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert "different runs" in r["mixed"] or "different steps" in r["mixed"]
        assert "rank 1: there is no" in r["missing"] and "sidcomp-rank1.pt" in r["missing"]
        assert r["none"] == ""
    assert any("start from zero" in t for t in results[0]["told"])


def test_a_model_and_its_optimizer_must_be_among_the_objects(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert "made no DDP model" in r["no model"]
        assert "no optimizer among the objects" in r["no optimizer"]
        assert "call its end() first" in r["again"]


def test_wrong_arguments_are_refused_at_once(results: list[dict[str, Any]]) -> None:
    words = "topkk", "density beside a State", "every: these", "deadline: the", "'density'", "options={"
    for r in results:
        assert not r["unused"]
        assert all(word in said for word, said in zip(words, r["wrong"], strict=True)), r["wrong"]


def test_two_models_have_files_of_their_own(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["two"] == [f"sidcomp-{x}rank{i}.pt" for x in ("1-", "") for i in (0, 1)] and not r["left"]


def test_its_optimizer_is_the_one_inside(results: list[dict[str, Any]]) -> None:
    assert all(r["by hand"] == [True] * 4 for r in results)


def test_the_example_runs(results: list[dict[str, Any]]) -> None:
    assert not any(r["example"] for r in results)
