"""The callback for Transformers, in real runs of two ranks: it must train the bits of a plain DDP loop."""

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
    BATCH,
    EPOCHS,
    STEPS,
    as_torchrun,
    dataset,
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

needs("transformers", "accelerate")


class Model(nn.Module):
    """What a Trainer takes: inputs by name, a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.network(x), labels)}


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import transformers
    from sidcomp.frameworks.transformers import Compression

    class Examples(torch.utils.data.Dataset):
        """In the order in which the Trainer's ranks take batches by turns, those of the plain loop's."""

        def __init__(self) -> None:
            data = dataset()
            order = [
                world * (BATCH * b + i) + r for b in range(STEPS) for r in range(world) for i in range(BATCH)
            ]
            self.items = [data[i] for i in order]

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": self.items[i][0], "labels": self.items[i][1]}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

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
        arguments = transformers.TrainingArguments(
            str(Path(room) / name),
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="epoch",
            save_total_limit=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            resume_from_checkpoint=flag,
        )
        model, watcher = Model(), Watcher(compression)
        trainer = InOrder(
            model,
            arguments,
            train_dataset=Examples(),
            optimizers=(optimizer_of(model.parameters()), None),
            callbacks=[watcher, compression],
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer, watcher

    out: dict[str, Any] = {"plain": plain_loop(rank, world)}
    compression = Compression(**ARGUMENTS)
    trainer, watcher = train(compression, "whole")
    out["whole"], out["closed"], out["logs"] = watcher.seen, compression.run is None, watcher.logs
    out["followed"] = isinstance(watcher.followed, torch.optim.SGD)
    out["history"] = trainer.state.log_history
    try:
        trainer.train()
        out["again"] = ""
    except sidcomp.SetupError as e:
        out["again"] = str(e)
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
