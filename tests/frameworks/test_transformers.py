"""The callback for Transformers, in real runs of two ranks: it must train the bits of a plain DDP loop."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from launched import (
    ARGUMENTS,
    EPOCHS,
    STEPS,
    as_torchrun,
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

needs("transformers", "accelerate")


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import transformers
    from sidcomp.frameworks.transformers import Compression
    from with_transformers import Model, trainer

    class Watcher(transformers.TrainerCallback):
        def __init__(self, compression: Compression) -> None:
            self.compression, self.seen, self.first = compression, {}, -1
            self.followed: Any = None
            self.logs: list[dict[str, Any]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if self.compression.run is not None:
                self.first = self.compression.run.state.state_dict()["step"]

        def on_epoch_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.seen = snapshot(model, self.compression.run.state.state_dict())
            self.followed = self.compression.run.state.engine.rates.optimizers[0]

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            self.logs.append(dict(logs))

    def train(
        compression: Compression, name: str, resume: str | None = None, flag: str | None = None
    ) -> tuple[Any, Watcher]:
        """resume: what train() is given; flag: --resume_from_checkpoint."""
        model, watcher = Model(), Watcher(compression)
        more = {"save_total_limit": 2, "logging_steps": 1, "resume_from_checkpoint": flag}
        made = trainer(Path(room) / name, model, optimizer_of, [watcher, compression], **more)
        made.train(resume_from_checkpoint=resume)
        return made, watcher

    out: dict[str, Any] = {"plain": plain_loop(rank, world)}
    compression = Compression(**ARGUMENTS)
    made, watcher = train(compression, "whole")
    out["whole"], out["closed"], out["logs"] = watcher.seen, compression.run is None, watcher.logs
    out["followed"] = isinstance(watcher.followed, torch.optim.SGD)
    out["history"] = made.state.log_history
    out["again"] = refusal(made.train)
    half = Path(room) / "whole" / f"checkpoint-{STEPS}"
    out["files"] = sorted(p.name for p in half.glob("sidcomp*"))
    _, watcher = train(Compression(**ARGUMENTS, resume_from=half), "resumed", str(half))
    out["resumed"], out["first"] = watcher.seen, watcher.first
    _, watcher = train(Compression(**ARGUMENTS), "flag", str(half), str(half))
    out["flag"] = watcher.seen
    last = Path(room) / "whole" / f"checkpoint-{2 * STEPS}"
    moved = Path(room) / "moved" / half.name
    if rank == 0:
        shutil.copytree(half, moved)
    torch.distributed.barrier()
    _, watcher = train(Compression(**ARGUMENTS), "moved", str(moved), str(last))
    out["unused flag"] = watcher.seen
    out["example"] = example("transformers_callback.py")
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_frameworks(ranks, str(tmp_path_factory.mktemp("transformers")))


def test_it_trains_the_bits_of_a_plain_loop(results: list[dict[str, Any]]) -> None:
    for r in results:
        same(r["whole"], r["plain"])
        assert r["followed"] and r["closed"]


def test_a_resumed_run_has_the_same_bits(results: list[dict[str, Any]]) -> None:
    a, b = results
    for r in results:
        assert r["files"] == ["sidcomp-rank0.pt", "sidcomp-rank1.pt"]
        assert r["first"] in (-1, STEPS)
        same(r["resumed"], r["whole"])
    assert not torch.equal(a["whole"]["r 0.weight"], b["whole"]["r 0.weight"]), "each rank has its own"


def test_the_flag_says_where_the_residuals_are(results: list[dict[str, Any]]) -> None:
    """--resume_from_checkpoint X --output_dir Y; and with the flag set, but train() told another folder."""
    for r in results:
        same(r["flag"], r["whole"])
        same(r["unused flag"], r["whole"])


def test_it_logs_bytes_ratio_and_density(results: list[dict[str, Any]]) -> None:
    n = sum(p.numel() for p in network().parameters())
    rows = [row for row in results[0]["logs"] if "loss" in row]
    assert len(rows) == EPOCHS * STEPS
    for row in rows:
        assert row["sidcomp/density"] == pytest.approx(0.1, abs=1 / n)
        assert row["sidcomp/wire_bytes"] * row["sidcomp/ratio"] == pytest.approx(4 * n)
    kept = [row for row in results[0]["history"] if "loss" in row]
    assert [r["sidcomp/ratio"] for r in kept] == [r["sidcomp/ratio"] for r in rows]


def test_a_second_train_is_refused(results: list[dict[str, Any]]) -> None:
    assert all("make a new Trainer" in r["again"] for r in results)


def test_the_example_runs(results: list[dict[str, Any]]) -> None:
    assert not any(r["example"] for r in results)
