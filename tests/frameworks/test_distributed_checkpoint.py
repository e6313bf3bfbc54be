"""torch.distributed.checkpoint: every rank's own entry, saved at once or beside training, refused where ranks
are mixed or missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
import torch.distributed.checkpoint as dcp
from harness import run
from launched import (
    ARGUMENTS,
    UPDATES,
    adamw_of,
    as_torchrun,
    example,
    flat,
    network,
    optimizer_of,
    same,
    snapshot,
)
from sidcomp.doors.ddp import register
from sidcomp.frameworks.distributed_checkpoint import Entries
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


class Run:
    """A model with its optimizer and State, as torch.distributed.checkpoint sees it."""

    def __init__(self, rank: int, saved_by: int | None = None) -> None:
        self.rank = rank
        self.ddp = DistributedDataParallel(network())
        self.optimizer = optimizer_of(self.ddp.parameters())
        self.state = sidcomp.State(**ARGUMENTS)
        register(self.ddp, self.state)
        self.entries = Entries(self.state, saved_by)

    def train(self, first: int, last: int) -> dict[str, torch.Tensor]:
        for step in range(first, last):
            torch.manual_seed(100 * step + self.rank)
            self.optimizer.zero_grad()
            self.ddp(torch.randn(8, 20)).square().mean().backward()
            self.optimizer.step()
        return snapshot(self.ddp.module, self.state.state_dict())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.ddp,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )

    @property
    def parts(self) -> dict[str, Any]:
        return {"app": self, "sidcomp": self.entries}


def error(do: Callable[[], Any]) -> str:
    try:
        do()
    except (Exception, CheckpointException) as e:  # torch's is no Exception
        return f"{type(e).__name__}: {e}"
    return ""


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    first, folder = Run(rank), Path(room)
    out["at four"] = first.train(0, 4)
    dcp.save(first.parts, checkpoint_id=folder / "at once")
    beside = dcp.async_save(first.parts, checkpoint_id=folder / "beside")
    out["whole"] = first.train(4, 7)
    beside.result()
    for name in ("at once", "beside"):
        resumed = Run(rank)
        dcp.load(resumed.parts, checkpoint_id=folder / name)
        out[name] = resumed.train(4, 7)
        resumed.state.close()

    other = Run(rank)
    other.train(0, 7)
    dcp.save(
        {"sidcomp": first.entries if rank == 0 else other.entries}, checkpoint_id=folder / "mixed"
    )  # of the same step, but of two runs
    dcp.save({"sidcomp": first.entries} if rank == 0 else {}, checkpoint_id=folder / "missing")
    for name in ("mixed", "missing"):
        kept = other.state.state_dict()
        out[name] = error(lambda name=name: dcp.load({"sidcomp": other.entries}, checkpoint_id=folder / name))
        now = other.state.state_dict()
        assert all(torch.equal(r, kept["residuals"][n]) for n, r in now["residuals"].items())
    # torch itself, with the State in place of its Entries: one key for all ranks.
    dcp.save({"sidcomp": first.state}, checkpoint_id=folder / "shared")
    mine = first.state.state_dict()
    out["shared"] = error(lambda: dcp.load({"sidcomp": first.state}, checkpoint_id=folder / "shared"))
    now = first.state.state_dict()
    out["shared is mine"] = all(torch.equal(r, mine["residuals"][n]) for n, r in now["residuals"].items())
    out["unbound"] = error(lambda: Entries(sidcomp.State(**ARGUMENTS)))
    first.state.close()
    other.state.close()
    as_torchrun(rank, world, room)
    out["example"] = example("torch_checkpoint.py")
    return out


def updates(rank: int, world: int, room: str) -> dict[str, torch.Tensor]:
    """Trains on updates, saves between two exchanges, and goes on; and so does another Run from there."""
    warnings.simplefilter("ignore")
    out = {}
    for name in ("whole", "resumed"):
        module = network()
        optimizer = adamw_of(module.parameters())

        class App:
            def state_dict(self, module: Any = module, optimizer: Any = optimizer) -> dict[str, Any]:
                model, optim = get_state_dict(module, optimizer)
                return {"model": model, "optim": optim}

            def load_state_dict(
                self, saved: dict[str, Any], module: Any = module, optimizer: Any = optimizer
            ) -> None:
                set_state_dict(
                    module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"]
                )

        with sidcomp.compress(module, optimizer, **UPDATES) as it:
            parts = {"app": App(), "sidcomp": Entries(it)}
            if name == "resumed":
                dcp.load(parts, checkpoint_id=Path(room) / "updates")
            for step in range(4 * (name == "resumed"), 8):
                torch.manual_seed(100 * step + rank)
                optimizer.zero_grad()
                module(torch.randn(8, 20)).square().mean().backward()
                optimizer.step()
                if step == 3 and name == "whole":
                    with it.common():
                        dcp.save(parts, checkpoint_id=Path(room) / "updates")
            out[name] = flat(module)
            it.average()
    return out


def test_updates_resume_with_the_same_bits(tmp_path: Path) -> None:
    a, b = run(updates, 2, str(tmp_path))
    assert not torch.equal(a["whole"], b["whole"]), "each rank has its own"
    assert all(torch.equal(r["whole"], r["resumed"]) for r in (a, b))


def alone(rank: int, world: int, room: str) -> dict[str, Any]:
    """One rank loads what two have saved."""
    warnings.simplefilter("ignore")
    folder, one = Path(room) / "mixed", Run(rank)
    out: dict[str, Any] = {"untold": error(lambda: dcp.load({"sidcomp": one.entries}, checkpoint_id=folder))}
    folder = Path(room) / "at once"
    told = Run(rank, saved_by=2)
    dcp.load(told.parts, checkpoint_id=folder)
    out["sum"] = told.state.state_dict()["residuals"]
    dcp.save(told.parts, checkpoint_id=Path(room) / "alone")  # by the same Entries
    again = Run(rank)
    out["again"] = error(lambda: dcp.load(again.parts, checkpoint_id=Path(room) / "alone"))
    out["kept"] = again.state.state_dict()["residuals"]
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    room = tmp_path_factory.mktemp("dcp")
    return run(ranks, 2, str(room)), room


@pytest.mark.parametrize("name", ["at once", "beside"])
def test_a_resumed_run_has_the_same_bits(results: tuple[list[dict[str, Any]], Path], name: str) -> None:
    for r in results[0]:
        same(r[name], r["whole"])


@pytest.mark.parametrize(
    ("name", "said"), [("mixed", "different runs"), ("missing", "sidcomp.rank1"), ("unbound", "register it")]
)
def test_mixed_and_missing_ranks_are_refused_on_every_rank(
    results: tuple[list[dict[str, Any]], Path], name: str, said: str
) -> None:
    for r in results[0]:
        assert said in r[name]


def test_torch_itself_mixes_the_ranks(results: tuple[list[dict[str, Any]], Path]) -> None:
    """If this fails, torch keeps every rank's entry: change docs/checkpoints.md."""
    assert not all(r["shared is mine"] and not r["shared"] for r in results[0])


def test_another_number_of_ranks(results: tuple[list[dict[str, Any]], Path]) -> None:
    (one,) = run(alone, 1, str(results[1]))
    assert "saved_by=2" in one["untold"]
    a, b = (r["at four"] for r in results[0])
    assert len(one["sum"]) == 4
    for name, residual in one["sum"].items():
        torch.testing.assert_close(residual, a[f"r {name}"] + b[f"r {name}"])
    assert not one["again"]
    assert all(torch.equal(one["kept"][name], residual) for name, residual in one["sum"].items())


def test_the_example_runs(results: tuple[list[dict[str, Any]], Path]) -> None:
    assert not any(r["example"] for r in results[0])
