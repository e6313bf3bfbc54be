"""sidcomp.compress: one call, by what the model is, around an unchanged loop."""

from __future__ import annotations

import copy
import errno
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import alike, backward, flat, network, train
from sidcomp import files
from sidcomp.config.schedule import at
from sidcomp.local import choice
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


# ---- gradients
# ------------------------------------------------------------------------------------------------------------


def gradients(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, make, arguments in (
        ("named", sgd, {"codec": "topk", "density": 0.1}),
        ("auto", adamw, {}),
        ("ratio", adamw, {"ratio": 20}),
        ("preset", sgd, {"codec": sidcomp.preset("redsync")}),
        ("options", sgd, {"codec": "int8", "options": sidcomp.Options(exclude="1-D", groups="model")}),
    ):
        ddp = DistributedDataParallel(network())
        optimizer = make(ddp)
        said = io.StringIO()
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "auto" has not decided yet, and momentum
            with sidcomp.compress(ddp, optimizer, **arguments) as it:
                train(ddp, optimizer, rank, range(STEPS))
                out[name] = {
                    "alike": alike(flat(ddp)), "page": str(it), "log": it.log(), "said": said.getvalue(),
                    "settings": it.state.settings, "follows": it.state.engine.rates is not None,
                    "ratio": it.stats()["ratio"],
                }  # fmt: skip
                with it.common() as module:
                    assert module is ddp
                it.average()
        it.close()
    return out


def test_ddp_sends_gradients() -> None:
    for rank, out in enumerate(run(gradients, 2)):
        assert all(one["alike"] and one["follows"] for one in out.values())
        assert out["named"]["ratio"] > 3 and "topk" in out["named"]["page"]
        assert "sidcomp/ratio" in out["named"]["log"]
        assert out["auto"]["settings"].auto and out["auto"]["settings"].adaptive
        codec = out["ratio"]["settings"].candidates[0]
        assert codec.codec.name == "topk" and out["ratio"]["ratio"] > 5
        assert out["preset"]["settings"].candidates[0].codec.name == "redsync"
        assert out["options"]["settings"].groups == "model" and "1-D" in out["options"]["page"]
        assert ("of gradients" in out["named"]["said"]) is (rank == 0)


@on_ranks(2)
def test_hsdp_sends_gradients_between_replicas(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    module = network()
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = sgd(module)
    with sidcomp.compress(module, optimizer, "topk", density=0.2) as it:
        train(module, optimizer, rank, range(STEPS))
        local = torch.cat([p.detach().to_local().flatten() for p in module.parameters()])  # type: ignore[attr-defined]
        page, equal = str(it), alike(local)
    assert "topk" in page and "gradients" in page and equal


def sharded(mesh: Any, updates: bool) -> tuple[nn.Module, torch.optim.Optimizer, sidcomp.Run]:
    """Two replicas of two shards, and what compresses their gradients or updates."""
    module = network()
    fully_shard(module, mesh=mesh["shard"] if updates else mesh)
    optimizer = sgd(module)
    group = mesh.get_group("replicate") if updates else None
    return module, optimizer, sidcomp.compress(module, optimizer, "topk", density=0.1, process_group=group)


def replicas_of_shards() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shards_resumed(rank: int, world: int, folder: str, updates: bool) -> list[list[torch.Tensor]]:
    """An uninterrupted run, and one that resumes in the middle of it."""
    mesh = replicas_of_shards()
    ends, kept = [], []
    for first in (True, False):
        module, optimizer, made = sharded(mesh, updates)
        with made as it:
            train(module, optimizer, rank, range(4 if first else 1))
            if first:
                with it.common():
                    kept = [p.detach().to_local().clone() for p in module.parameters()]  # type: ignore[attr-defined]
                    moments = copy.deepcopy(optimizer.state_dict())
                it.save(folder)
            else:
                dist.barrier()
                for p, x in zip(module.parameters(), kept, strict=True):
                    p.detach().to_local().copy_(x)  # type: ignore[attr-defined]
                optimizer.load_state_dict(moments)
                assert it.load(folder)
            train(module, optimizer, rank, range(4, STEPS))
            ends.append([p.detach().to_local().clone() for p in module.parameters()])  # type: ignore[attr-defined]
    return ends


@pytest.mark.parametrize("updates", [False, True])
def test_each_shard_has_files_of_its_own(tmp_path: Path, updates: bool) -> None:
    for whole, again in run(shards_resumed, 4, str(tmp_path), updates):
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    names = [f"sidcomp-shard{shard}of2-rank{replica}.pt" for shard in range(2) for replica in range(2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def a_shard_cannot_write(
    rank: int, world: int, folder: str, updates: bool, replaces: bool
) -> tuple[str, bool]:
    module, optimizer, made = sharded(replicas_of_shards(), updates)
    with made as it:
        train(module, optimizer, rank, range(1))
        it.save(folder)
        dist.barrier()
        before = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
        train(module, optimizer, rank, range(1, 2))
        if rank == 3 and not replaces:
            files.write = no_room
        with stale(rank == 3 and replaces), pytest.raises(sidcomp.CheckpointError) as caught:
            it.save(folder)
        dist.barrier()
        return str(caught.value), before == {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def no_room(*_: Any) -> None:
    raise sidcomp.CheckpointError("no space left on the device")


@pytest.mark.parametrize(("updates", "replaces"), [(False, False), (True, False), (True, True)])
def test_if_one_shard_cannot_write_all_files_stay(tmp_path: Path, updates: bool, replaces: bool) -> None:
    why = "Stale file handle" if replaces else "no space left"
    for rank, (said, same) in enumerate(run(a_shard_cannot_write, 4, str(tmp_path), updates, replaces)):
        assert (why if rank % 2 else "another shard could not write") in said
        assert same


def a_shard_lacks_something(rank: int, world: int, folder: str, updates: bool) -> list[str]:
    """What the error says if shard 1 of both replicas has no files, has those of another step, and if one
    rank alone cannot take its file over. Nothing is loaded."""
    module, optimizer, made = sharded(replicas_of_shards(), updates)
    said = []
    with made as it:
        for step in range(2):
            train(module, optimizer, rank, range(step, step + 1))
            it.save(f"{folder}/{step}")
        own = Path(f"{folder}/1/sidcomp-shard{rank % 2}of2-rank{rank // 2}.pt")
        if rank % 2:
            own.unlink()
        for case in ("nothing", "another step", "another memory"):
            if case == "another step" and rank % 2:
                own.write_bytes(Path(f"{folder}/0/{own.name}").read_bytes())
            if case == "another memory" and rank == 3:
                saved = torch.load(own, weights_only=True)
                saved["state"]["residuals"] = {"no such": torch.zeros(1, 4)}
                torch.save(saved, own)
            dist.barrier()
            before = flat(module)
            with warnings.catch_warnings(), pytest.raises(sidcomp.CheckpointError) as caught:
                warnings.simplefilter("ignore")
                it.load(f"{folder}/1")
            assert torch.equal(flat(module), before) and it.state.engine.resume is None
            said.append(str(caught.value))
        train(module, optimizer, rank, range(2, 3))
    return said


@pytest.mark.parametrize("updates", [False, True])
def test_all_shards_load_or_none(tmp_path: Path, updates: bool) -> None:
    for rank, said in enumerate(run(a_shard_lacks_something, 4, str(tmp_path), updates)):
        assert "the files of some shards only" in said[0]
        assert "different steps, [1, 2]" in said[1]
        assert ("rank 1: " if rank % 2 else "a rank with another shard") in said[2], said


@on_ranks(2)
def test_several_optimizers_and_a_scaler(rank: int, world: int) -> None:
    """Two optimizers and a GradScaler, which one bad batch makes skip a step."""
    ddp = DistributedDataParallel(network())
    weights, biases = ([p for p in ddp.parameters() if (p.dim() > 1) is big] for big in (True, False))
    both = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.01)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with sidcomp.compress(ddp, both, "topk", scaler=scaler, density=0.2) as it:
        for step in range(STEPS):
            for one in both:
                one.zero_grad()
            backward(ddp, rank, step, float(scaler.get_scale()) if step != 2 else float("inf"))
            scaler.scale(torch.zeros(()))
            for one in both:
                scaler.step(one)
            scaler.update()
        equal, steps = alike(flat(ddp)), it.state.engine.step
    assert equal and steps == STEPS - 1  # the discarded step does not count


def one_cannot_write(rank: int, world: int, folder: str) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = sgd(ddp)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.1) as it:
        train(ddp, optimizer, rank, range(2))
        it.save(folder)
        before = (Path(folder) / f"sidcomp-rank{rank}.pt").read_bytes()
        train(ddp, optimizer, rank, range(2, 4))
        place = Path(folder)
        if rank == 1:
            place = Path(folder) / "sidcomp-rank1.pt" / "below"  # a file, not a folder
        with pytest.raises(sidcomp.CheckpointError, match=r"^rank 1: cannot"):
            it.save(place)
        assert (Path(folder) / f"sidcomp-rank{rank}.pt").read_bytes() == before
        dist.barrier()
        if rank == 0:
            (Path(folder) / "sidcomp-rank1.pt").unlink()
        dist.barrier()
        with pytest.raises(sidcomp.CheckpointError, match=r"sidcomp-rank1\.pt"):
            it.load(folder)


def test_all_ranks_save_and_load_or_none(tmp_path: Path) -> None:
    run(one_cannot_write, 2, str(tmp_path))


def one_cannot_replace(rank: int, world: int, folder: str) -> None:
    """All ranks have written their files, and rank 1 cannot put its own into the place of the one before."""
    ddp = DistributedDataParallel(network())
    optimizer = sgd(ddp)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.1) as it:
        with stale(rank == 1), pytest.raises(sidcomp.CheckpointError, match=r"^rank 1: .*Stale"):
            it.save(folder)
        dist.barrier()
        assert not list(Path(folder).iterdir())
        train(ddp, optimizer, rank, range(2))
        it.save(folder)
        before = contents(folder)
        train(ddp, optimizer, rank, range(2, 4))
        with stale(rank == 1), pytest.raises(sidcomp.CheckpointError, match=r"^rank 1: .*rank1.pt: Stale"):
            it.save(folder)
        assert contents(folder) == before and it.load(folder)
        dist.barrier()
        own = Path(folder) / "sidcomp-rank1.pt"
        if rank == 1:
            own.unlink()
            own.mkdir()
        with pytest.raises(sidcomp.CheckpointError, match=r"^rank 1: .*rank1.pt: Is a directory"):
            it.save(folder)
        dist.barrier()
        assert own.is_dir() and len(list(Path(folder).iterdir())) == 2
        dist.barrier()
        if rank == 1:
            own.rmdir()
        dist.barrier()
        it.save(folder)
        assert contents(folder) != before and len(contents(folder)) == 2 and it.load(folder)


def contents(folder: str) -> dict[str, bytes]:
    """What the ranks' files hold, once all ranks have come here."""
    dist.barrier()
    out = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    dist.barrier()
    return out


@contextmanager
def stale(here: bool) -> Iterator[None]:
    """On this rank a file that was written cannot take its place, as on a disk that is gone."""
    move = os.replace

    def replace(old: Any, new: Any) -> None:
        if Path(old).suffix == ".pending":
            raise OSError(errno.ESTALE, "Stale file handle")
        move(old, new)

    os.replace = replace if here else move
    try:
        yield
    finally:
        os.replace = move


def test_a_file_that_cannot_be_replaced_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run(one_cannot_replace, 2, str(tmp_path))


@on_ranks(2)
def test_restart_forgets_what_was_not_sent(rank: int, world: int) -> None:
    """restart() leaves no residual of the gradients before."""
    ddp = DistributedDataParallel(network())
    optimizer = sgd(ddp)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.05) as it:
        train(ddp, optimizer, rank, range(3))
        assert it.log()["sidcomp/residual_norm"] > 0
        it.restart()
        assert it.state_dict()["residuals"] == {}


# ---- updates
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_updates_of_sgd_uncompressed_are_ddp(rank: int, world: int, wrapped: bool) -> None:
    """One step of SGD and codec none: what DDP does, up to rounding."""
    ours, theirs = network(rank), DistributedDataParallel(network())
    if wrapped:
        ours = DistributedDataParallel(network())
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    with sidcomp.compress(ours, optimizer, "none", updates=True):
        train(ours, optimizer, rank, range(STEPS))
        train(theirs, other, rank, range(STEPS))
        assert alike(flat(ours))
    assert float((flat(ours) - flat(theirs)).norm() / flat(theirs).norm()) < 1e-5


@on_ranks(2)
def test_a_plain_module_sends_updates(rank: int, world: int) -> None:
    out: dict[str, Any] = {}
    sgd_outside = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    for name, arguments in {
        "plain": {"ratio": 20},
        "named": {"codec": "int4"},
        "every": {"codec": "int8", "every": 3},
        "outer": {"every": 3, "outer": sgd_outside},
        "delay": {"codec": "int4", "every": 3, "delay": 2},
        "parts": {"codec": "int4", "every": 3, "parts": 3},
        "memory": {"codec": "int4", "options": sidcomp.Options(error="memory", exclude="1-D")},
        "ddp": {"codec": "int4", "updates": True},
        "ddp every": {"codec": "int4", "every": 3},
        "compiled": {"codec": "int4"},
    }.items():
        module: nn.Module = network(rank)
        inner = module
        if name.startswith("ddp"):
            inner = module = DistributedDataParallel(network())
        if name == "compiled":
            module = torch.compile(module, backend="eager")  # type: ignore[assignment]
        optimizer = adamw(module)
        said = io.StringIO()
        with redirect_stderr(said), sidcomp.compress(module, optimizer, **arguments) as it:
            start = flat(inner)
            train(module, optimizer, rank, range(STEPS))
            own = flat(inner)
            with it.common() as shown:
                point = flat(shown)
                assert alike(point)
            assert torch.equal(flat(inner), own)
            it.average()
            end = flat(inner)
            out[name] = {
                "moved": float((point - start).norm()), "equal": alike(end), "page": str(it),
                "ratio": it.stats()["ratio"], "discarded": it.stats()["discarded"], "said": said.getvalue(),
                "error": it.updates.error, "every": it.updates.every,  # type: ignore[attr-defined]
            }  # fmt: skip
    for name, one in out.items():
        assert one["equal"] and one["moved"] > 0 and not one["discarded"], name
        assert ("run.common()" in one["said"]) is (rank == 0), name
        assert "without run.average()" not in one["said"]
    assert {n for n, one in out.items() if one["error"] == "memory"} == {"outer", "parts", "memory"}
    assert out["plain"]["ratio"] > 5 and out["named"]["ratio"] > 2 and "int4" in out["ddp"]["page"]
    assert [out[n]["every"] for n in ("plain", "every", "outer", "ddp every")] == [1, 3, 3, 3]


class Normed(nn.Module):
    """With buffers, of which each rank has its own between two exchanges."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.network, self.norm = network(seed), nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(self.norm(x))


def steps_with_a_scaler(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, rank: int, steps: range
) -> None:
    """Rank 1 alone skips step 2."""
    for step in steps:
        optimizer.zero_grad()
        backward(module, rank, step, float("inf") if (rank, step) == (1, 2) else float(scaler.get_scale()))
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()


def all_of_a_rank(rank: int, world: int, folder: str, form: str) -> list[torch.Tensor]:
    """Everything that differs between ranks: parameters, moments, buffers, the scale. Saved inside common(),
    in the middle between two exchanges; the resumed run is another object."""
    out, kept = [], []
    for first in (True, False):
        module = Normed(0 if first else rank + 5)
        optimizer, scaler = adamw(module), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        parts = {"model": module, "optimizer": optimizer, "scaler": scaler}
        with sidcomp.compress(module, optimizer, "int4", every=3, delay=1, scaler=scaler) as it:
            if first:
                steps_with_a_scaler(module, optimizer, scaler, rank, range(5))
                own = flat(module)
                with it.common(), it.common():
                    assert not torch.equal(flat(module), own)
                    if rank == 0:
                        torch.save({n: x.state_dict() for n, x in parts.items()}, f"{folder}/model.pt")
                    if form == "files":
                        it.save(folder, number=2)
                    else:
                        every: list[Any] = [None] * world
                        dist.all_gather_object(every, it.rank_state())
                        kept = [every[rank]] if form == "own" else every
                assert torch.equal(flat(module), own)
            else:
                dist.barrier()
                saved = torch.load(f"{folder}/model.pt", weights_only=True)
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
                assert it.load(folder, number=2) if form == "files" else it.load(kept)
            buffers = torch.cat([x.flatten().double() for x in module.buffers()])  # rank 0's after the next
            assert not alike(buffers)
            steps_with_a_scaler(module, optimizer, scaler, rank, range(5, 9))
            out.append(torch.cat([flat(module).double(), buffers, torch.tensor([scaler.get_scale()])]))
    return out


@pytest.mark.parametrize("form", ["files", "all", "own"])
def test_what_differs_between_ranks_is_saved(tmp_path: Path, form: str) -> None:
    results = run(all_of_a_rank, 2, str(tmp_path), form)
    assert [float(r[0][-1]) for r in results] == [1024.0, 512.0]
    for whole, resumed in results:
        assert torch.equal(whole, resumed)


def elsewhere(rank: int, world: int, folder: str, saves: bool, arguments: dict[str, Any]) -> list[Any]:
    """Saves, or loads at another number of ranks, after an exchange; "auto" has chosen by then."""
    module = network(0 if saves else 4)
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, **arguments) as it:
        if saves:
            train(module, optimizer, rank, range(10))
            it.save(folder)
        else:
            assert "still measuring" not in str(it) or world > 1
            assert it.load(folder)
        codec = it.state.settings.candidates[0].encoding
        with it.common():
            point = flat(module)
        steps = max(float(of["step"]) for of in optimizer.state.values())
        it.average()
        averaged = flat(module)
        train(module, optimizer, rank, range(10, 13))
        with it.common():
            return [point, averaged, codec, steps, alike(flat(module))]


@pytest.mark.parametrize(("old", "world"), [(2, 1), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize(
    "arguments", [{}, {"codec": "topk", "density": 0.1}, {"codec": "int4", "every": 2, "parts": 2}]
)
def test_updates_resume_at_another_number_of_ranks(
    tmp_path: Path, old: int, world: int, arguments: dict[str, Any]
) -> None:
    point, averaged, codec, *_ = run(elsewhere, old, str(tmp_path), True, arguments)[0]
    assert (codec == "none") is (old == 1 and not arguments)
    for r in run(elsewhere, world, str(tmp_path), False, {**arguments, "updates": True}):
        assert torch.equal(r[0], point) and r[2:] == [codec, 10.0, True]
        if "parts" not in arguments:  # else what was done after a part's last exchange is lost
            torch.testing.assert_close(
                world * (r[1] - point), old * (averaged - point)
            )  # the sum of the errors


def regrouped(rank: int, world: int, folder: str) -> None:
    """Rank 1 alone has another optimizer than the one that saved."""
    module = network()
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer, "int4") as it:
        train(module, optimizer, rank, range(2))
        it.save(folder)
    weights, biases = ([p for p in module.parameters() if (p.dim() > 1) is big] for big in (True, False))
    other = torch.optim.AdamW([{"params": weights}, {"params": biases}] if rank else module.parameters())
    with sidcomp.compress(module, other, "int4") as it:
        before = flat(module)
        with pytest.raises(sidcomp.CheckpointError, match=r"^rank 1: .*groups of \[6\] parameters"):
            it.load(folder)
        assert torch.equal(flat(module), before) and it.state.engine.resume is None and not other.state
        train(module, other, rank, range(2))


def test_optimizers_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    run(regrouped, 2, str(tmp_path))


def chosen(rank: int, world: int, folder: str, every: int) -> dict[str, Any]:
    module, said = network(rank), io.StringIO()
    optimizer = adamw(module)
    with redirect_stderr(said), sidcomp.compress(module, optimizer, every=every) as it:
        before = str(it)
        train(module, optimizer, rank, range(10))
        codec, page = it.state.settings.candidates[0].encoding, str(it)
        it.save(folder)
        train(module, optimizer, rank, range(10, 18))
        with it.common():
            point = flat(module)
    again = network(rank)
    other = adamw(again)
    with sidcomp.compress(again, other, every=every) as it:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that the State before has compressed nothing
            assert it.load(folder) and "was chosen by the run that saved" in str(it)
        assert it.state.settings.candidates[0].encoding == codec
        train(again, other, rank, range(10, 18))
        with it.common():
            same = torch.equal(flat(again), point)
    return {"codec": codec, "before": before, "page": page, "said": said.getvalue(), "same": same}


@pytest.mark.parametrize("every", [1, 8])
def test_auto_chooses_what_updates_send(tmp_path: Path, every: int) -> None:
    """With 8 steps between two exchanges it saves before the first exchange of what was chosen."""
    results = run(chosen, 2, str(tmp_path), every)
    assert len({r["codec"] for r in results}) == 1 and "none" not in results[0]["codec"]
    for rank, r in enumerate(results):
        assert r["same"] and "still measuring" in r["before"] and "is chosen" in r["page"]
        assert ("is chosen; an exchange takes" in r["said"]) is (rank == 0)
        assert ("closed after 18 steps without run.average()" in r["said"]) is (rank == 0)


@on_ranks(2)
def test_a_damaged_checkpoint_leaves_auto_as_it_was(rank: int, world: int) -> None:
    """A checkpoint of what "auto" has chosen, whose residuals are damaged, changes nothing."""
    module = network(rank)
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer) as it:
        train(module, optimizer, rank, range(10))
        saved = it.state_dict()
    assert saved["chosen"] is not None
    saved["state"]["step"] = "ten"
    module = network(rank)
    optimizer = adamw(module)
    with sidcomp.compress(module, optimizer) as it:
        before, own = str(it), it.state
        with pytest.raises(sidcomp.CheckpointError, match="step"):
            it.load_state_dict(saved)
        assert it.state is own
        assert str(it) == before and "still measuring" in before
        train(module, optimizer, rank, range(10))


@pytest.mark.parametrize(("maker", "bits"), [("AdamW", "log2"), ("NAdam", "log2"), ("SGD", "log4")])
@on_ranks(2)
def test_a_hundredth_has_the_values_that_keep_the_loss_with_the_optimizer(
    rank: int, world: int, maker: str, bits: str
) -> None:
    """With SGD 2 bits a value cost an LSTM 11 %."""
    module = network(rank)
    optimizer = getattr(torch.optim, maker)(module.parameters(), lr=1e-3)
    with sidcomp.compress(module, optimizer, ratio=100) as it:
        assert f"values={bits}" in it.state.settings.candidates[0].encoding
    with sidcomp.compress(module, optimizer) as it:
        candidates = map(choice.label, it._choosing.candidates)  # type: ignore[attr-defined]
        hundredths = [c for c in candidates if "ratio=" in c]
    assert hundredths and all(f"values={bits}" in c for c in hundredths)


@pytest.mark.parametrize("parameters", [{}, {"ratio": 100}])
@on_ranks(2)
def test_optimizers_that_suit_other_codecs_are_an_error_on_every_rank(
    rank: int, world: int, parameters: dict[str, Any]
) -> None:
    module = network(0)
    optimizer = (torch.optim.AdamW if rank else torch.optim.SGD)(module.parameters(), lr=1e-3)
    said = "rank 1 has adam=True where rank 0 has adam=False: give every rank"
    with pytest.raises(sidcomp.SetupError, match=said):
        sidcomp.compress(module, optimizer, options=sidcomp.Options(noise_correction=False), **parameters)
    assert not optimizer._optimizer_step_post_hooks, "no run is left that exchanges"


@on_ranks(2)
def test_a_density_takes_the_place_of_the_ratio(rank: int, world: int) -> None:
    """Also one that changes during training."""
    for density, first in ((0.2, 0.2), (sidcomp.Schedule({0: 0.25, 2: 0.01}), 0.25)):
        module = network(rank)
        optimizer = adamw(module)
        with sidcomp.compress(module, optimizer, density=density) as it:
            train(module, optimizer, rank, range(1))
            parameters = it.state.settings.candidates[0].parameters
            assert parameters["values"] == "log2" and at(parameters, 0)["density"] == first


def waits_longer(rank: int, world: int, folder: str, accuracy: str) -> tuple[int, str, bool]:
    """Each exchange takes a third of a step, however few bytes it has."""
    choice.measure = lambda _exchange, n, step_s, every, arguments, candidates: [
        choice.Cost(spec, step_s / 3, n // 8) for spec in candidates
    ]
    module = network(rank)
    optimizer = adamw(module)
    options = sidcomp.Options(accuracy=accuracy)
    with sidcomp.compress(module, optimizer, options=options) as it:
        train(module, optimizer, rank, range(40))
        it.save(folder)
        every, page = it.updates.every, str(it)  # type: ignore[attr-defined]
        train(module, optimizer, rank, range(40, 50))
        with it.common():
            point = flat(module)
        same = alike(point)
    again = network(rank)
    other = adamw(again)
    with sidcomp.compress(again, other, options=options) as it:
        assert it.load(folder) and it.updates.every == every  # type: ignore[attr-defined]
        train(again, other, rank, range(40, 50))
        with it.common():
            same = same and torch.equal(flat(again), point)
    return every, page, same


@pytest.mark.parametrize("accuracy", ["dense", "close"])
def test_auto_waits_longer_only_where_loss_may_be_lost(tmp_path: Path, accuracy: str) -> None:
    for every, page, same in run(waits_longer, 2, str(tmp_path), accuracy):
        assert every == (7 if accuracy == "close" else 1) and same
        assert ("is chosen; an exchange takes" in page) and ("every 7 steps" in page) is (every == 7), page


def test_the_report_has_the_time_and_the_measured_loss_of_every_candidate() -> None:
    for adam, ours, theirs in (
        (True, "+2.2 % of loss on 4 ranks", "int4 1 ms, 1 % of a step, -0.3 % of loss on 2 ranks"),
        (False, "+0.2 % of loss on 2 ranks", "int4 1 ms, 1 % of a step"),
    ):
        specs = choice.CANDIDATES if adam else choice.WITH_SGD
        costs = [choice.Cost(spec, 1e-3 * (i + 1), 9) for i, spec in enumerate(specs)]
        text = choice.explained(costs[3], costs, 0.1, 1, adam, 4)
        chosen, others = text.split(". Instead: ")
        assert f"takes 4 ms, 4 % of a step, {ours} (100 ms a step" in chosen
        assert theirs in others.split("; ") and len(others.split("; ")) == len(specs) - 1
        assert "of loss" not in choice.explained(costs[3], costs, 0.1, 7, adam, 4), "not measured"


@pytest.mark.parametrize(("cost", "steps"), [(0.001, 1), (0.05, 1), (0.051, 2), (0.3, 6), (9.0, 16)])
def test_the_interval_makes_the_fastest_exchange_a_twentieth(cost: float, steps: int) -> None:
    slow = choice.Cost(choice.CANDIDATES[0], 2 * cost, 9)
    unknown = choice.Cost(choice.CANDIDATES[1], None, 0)
    fast = choice.Cost(choice.CANDIDATES[2], cost, 5)
    assert choice.interval([slow, unknown, fast], 1.0) == steps


@on_ranks(1)
def test_an_option_that_is_the_default_changes_nothing(rank: int, world: int) -> None:
    module = network()
    with sidcomp.compress(module, adamw(module), "int4", options=sidcomp.Options(host=False)) as it:
        assert it.updates.error == "parameters"  # type: ignore[attr-defined]


# ---- refusals
# ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_wrong_is_said_at_once(rank: int, world: int) -> None:
    module, ddp = network(), DistributedDataParallel(network())
    wrapped, bare, options = (ddp, sgd(ddp)), (module, sgd(module)), sidcomp.Options
    alone = [dist.new_group([r]) for r in range(world)][rank]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("ArgumentError: model='model'", ("model", sgd(ddp)), {}),
        ("ArgumentError: options={'seed': 3}: give sidcomp.Options", wrapped, {"options": {"seed": 3}}),
        ("ArgumentError: density beside a State", (*wrapped, sidcomp.State("topk")), {"density": 0.1}),
        ("ArgumentError: every: these are for updates", wrapped, {"updates": False, "every": 4}),
        ("ArgumentError: stale: these are for updates", wrapped, {"options": options(stale=3)}),
        ("SetupError: updates=False averages gradients", bare, {"updates": False}),
        ("ArgumentError: updates='yes'", wrapped, {"updates": "yes"}),
        ("ParameterError: ", (*wrapped, "topkk"), {}),
        ("ArgumentError: stale=3 is for late ranks", bare, {"options": options(stale=3)}),
        ("ArgumentError: warmup=50 is for ", (*wrapped, "int8"), {"options": options(warmup=50)}),
        ("ArgumentError: follow(scaler=str)", (*wrapped, "int8"), {"scaler": "none"}),
        (
            "SetupError: State(process_group=...) has the ranks",
            *((*wrapped, sidcomp.State("int8")), {"process_group": alone}),
        ),
        # what "auto" would find out only when it has chosen
        ("ArgumentError: profile=", bare, {"options": options(profile="none.json")}),
        ("ParameterError: ", bare, {"options": options(memory="no such")}),
    ]
    for start, given, more in calls:
        with pytest.raises(sidcomp.errors.SidcompError) as caught:
            sidcomp.compress(*given, **more)
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert said.startswith(start) and not ddp._comm_hooks, said
