"""Checkpoints of released versions, which later ones read: tests/package/kept has a folder for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept_runs
import pytest
import sidcomp
import torch
from harness import run
from torch.distributed.checkpoint.state_dict import set_model_state_dict

RELEASES = sorted(path.name for path in kept_runs.KEPT.iterdir())


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    parts = (
        values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    )
    return [tensor for part in parts for tensor in flat(part)]


def resumed(rank: int, world: int, folder: str, door: str) -> None:
    saved = torch.load(Path(folder) / "model.pt", weights_only=True)
    mine = torch.load(Path(folder) / f"sidcomp-rank{rank}.pt", weights_only=True)
    module, model, optimizer, run = kept_runs.begin(door)
    set_model_state_dict(module, saved["model"], options=kept_runs.WHOLE)
    optimizer.load_state_dict(saved["optimizer"])
    assert run.load(folder)
    now = run.rank_state()
    kept = mine["state"]["residuals"]
    assert kept and any(bool(x.any()) for x in flat(kept))
    for name, residual in kept.items():
        assert torch.equal(now["state"]["residuals"][name], residual), name
    for was, still in zip(flat(mine["beside"]), flat(now["beside"]), strict=True):
        assert torch.equal(was, still)
    kept_runs.train(model, optimizer, 3)
    run.average() if door.startswith("updates") else None
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    run.close()


def refused(rank: int, world: int, folder: str, into: str, door: str) -> None:
    """As an older version does with the files of a newer one."""
    state = torch.load(Path(folder) / f"sidcomp-rank{rank}.pt", weights_only=True)
    (state if door == "backend" else state["state"])["format"] += 1
    torch.save(state, Path(into) / f"sidcomp-rank{rank}.pt")
    torch.distributed.barrier()
    *_, run = kept_runs.begin(door)
    with pytest.raises(sidcomp.CheckpointError, match=r"has format \d+; this sidcomp .* reads format"):
        run.load(into)
    run.close()


@pytest.mark.parametrize("door", kept_runs.DOORS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_released_checkpoint_continues(release: str, door: str) -> None:
    run(resumed, 2, str(kept_runs.KEPT / release / door), door, backend=kept_runs.backend(door))


@pytest.mark.parametrize("door", ["gradients", "updates", "hsdp", "backend"])
def test_a_newer_format_is_refused_by_name(door: str, tmp_path: Path) -> None:
    folder = str(kept_runs.KEPT / RELEASES[-1] / door)
    run(refused, 2, folder, str(tmp_path), door, backend=kept_runs.backend(door))
