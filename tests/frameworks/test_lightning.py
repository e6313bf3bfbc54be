"""The callback for Lightning, in real runs of two ranks: it must train the bits of a plain DDP loop."""

from __future__ import annotations

import csv
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
    plain_loop,
    refusal,
    run_frameworks,
    same,
    snapshot,
)

needs("lightning")


def ranks(rank: int, world: int, room: str) -> dict[str, Any]:
    """Everything that the tests look at, in one process for each rank: importing Lightning takes seconds."""
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from sidcomp.frameworks.lightning import Compression
    from torch.distributed.fsdp import fully_shard
    from with_lightning import Module, trainer

    class Watcher(lightning.Callback):
        """Looks at the State while there is one."""

        def __init__(self, compression: Compression) -> None:
            self.compression, self.seen, self.scaler = compression, {}, None
            self.first: dict[str, Any] = {}

        def on_train_batch_start(self, *_: Any) -> None:
            if not self.first:
                self.first = self.compression.run.state.state_dict()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            state = self.compression.run.state
            self.seen = snapshot(module, state.state_dict())
            self.scaler = state.engine.watch.scaler

    def fit(
        compression: Compression, name: str, module: Any = None, ckpt: str | None = None, **more: Any
    ) -> tuple[Any, Watcher]:
        watcher = Watcher(compression)
        keep = ModelCheckpoint(Path(room) / name, "{epoch}", every_n_epochs=1, save_top_k=-1)
        logger = CSVLogger(room, name, flush_logs_every_n_steps=1)
        made = trainer(compression, watcher, keep, logger=logger, log_every_n_steps=1, **more)
        made.fit(module or Module(), batches(rank, world), ckpt_path=ckpt)
        return made, watcher

    out: dict[str, Any] = {"plain": plain_loop(rank, world)}
    compression = Compression(**ARGUMENTS)
    made, watcher = fit(compression, "whole")
    out["whole"], out["closed"] = watcher.seen, compression.run is None
    made.save_checkpoint(Path(room) / "after.ckpt")
    kept = torch.load(Path(room) / "after.ckpt", weights_only=True)["sidcomp"]["ranks"]
    out["kept"] = [s["state"]["rank"] for s in kept], kept[rank]["state"]["step"]

    _, watcher = fit(Compression(**ARGUMENTS), "resumed", ckpt=str(Path(room) / "whole" / "epoch=0.ckpt"))
    out["resumed"], out["first"] = watcher.seen, watcher.first["step"]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _, watcher = fit(Compression(sidcomp.State(**ARGUMENTS)), "scaled", plugins=[plugin], max_epochs=1)
    out["scaler"] = watcher.scaler is scaler

    class Sharded(Module):
        def configure_model(self) -> None:
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    class Around(DDPStrategy):
        """A strategy that calls the module past DDP."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return self.lightning_module.training_step(*args, **kwargs)

    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    out["sharded"] = refusal(lambda: fit(Compression(**ARGUMENTS), "sharded", Sharded(), strategy=sharded))
    out["around"] = refusal(lambda: fit(Compression(**ARGUMENTS), "around", strategy=Around()))

    class Choosing(Module):
        def on_train_start(self) -> None:
            chosen.run.state.follow(self.trainer.optimizers[0])

    class Followed(lightning.Callback):
        """How many optimizers the State follows, and how many gradients it has compressed."""

        def on_train_end(self, trainer: Any, module: Any) -> None:
            state = next(c for c in trainer.callbacks if isinstance(c, Compression)).run.state
            out["two"].append((len(state.engine.rates.optimizers), state.stats()["steps"]))

    chosen, out["two"] = Compression(**ARGUMENTS), []
    for kind, compression in ((Module, Compression(**ARGUMENTS)), (Choosing, chosen)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = trainer(compression, Followed(), max_epochs=1, enable_checkpointing=False)
            made.fit(kind(two=True), batches(rank, world))
        out["two"].append([str(w.message) for w in caught if "2 optimizers" in str(w.message)])
    out["both"] = refusal(lambda: Compression(sidcomp.State("topk"), density=0.1))
    out["unknown"] = refusal(lambda: Compression("topk", no_such_parameter=1))

    # Lightning's documented recipe, without the callback: it does nothing on CPUs.
    state = sidcomp.State(**ARGUMENTS)
    recipe = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=sidcomp.hook)
    made = trainer(strategy=recipe, max_steps=2, enable_checkpointing=False)
    made.fit(Module(), batches(rank, world))
    out["recipe"] = state.stats()["steps"]
    out["example"] = example("lightning_callback.py")
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    room = tmp_path_factory.mktemp("lightning")
    return run_frameworks(ranks, str(room)), room


def test_it_trains_the_bits_of_a_plain_loop(results: tuple[list[dict[str, Any]], Path]) -> None:
    for r in results[0]:
        same(r["whole"], r["plain"])
        assert r["closed"]


def test_a_resumed_run_has_the_same_bits(results: tuple[list[dict[str, Any]], Path]) -> None:
    a, b = results[0]
    for r in (a, b):
        assert r["first"] == STEPS
        same(r["resumed"], r["whole"])
    assert not torch.equal(a["whole"]["r 0.weight"], b["whole"]["r 0.weight"]), "each rank has its own"


def test_a_checkpoint_after_fit_has_the_states_of_all_ranks(
    results: tuple[list[dict[str, Any]], Path],
) -> None:
    assert all(r["kept"] == ([0, 1], EPOCHS * STEPS) for r in results[0])


def test_it_logs_bytes_ratio_and_density(results: tuple[list[dict[str, Any]], Path]) -> None:
    with (results[1] / "whole" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == EPOCHS * STEPS
    n = sum(p.numel() for p in network().parameters())
    for row in rows:
        assert float(row["sidcomp/density"]) == pytest.approx(0.1, abs=1 / n)
        assert 0 < float(row["sidcomp/wire_bytes"]) * float(row["sidcomp/ratio"]) == pytest.approx(4 * n)


def test_it_follows_the_scaler(results: tuple[list[dict[str, Any]], Path]) -> None:
    assert all(r["scaler"] for r in results[0])


def test_it_is_never_silently_not_in_force(results: tuple[list[dict[str, Any]], Path]) -> None:
    for r in results[0]:
        assert "ModelParallelStrategy" in r["sharded"] and "DDP" in r["sharded"]
        assert "no gradient came to sidcomp" in r["around"]
        assert r["recipe"] == 0, "Lightning registers the hook on CPUs now: change docs/frameworks.md"


def test_it_follows_several_optimizers_unless_told_otherwise(
    results: tuple[list[dict[str, Any]], Path],
) -> None:
    for r in results[0]:
        both, warned, one, again = r["two"]
        assert both == (2, STEPS) and one == (1, STEPS)
        assert not warned and not again


def test_wrong_arguments_are_refused_at_once(results: tuple[list[dict[str, Any]], Path]) -> None:
    for r in results[0]:
        assert "density" in r["both"] and "no_such_parameter" in r["unknown"]


def test_the_example_runs(results: tuple[list[dict[str, Any]], Path]) -> None:
    assert not any(r["example"] for r in results[0])
