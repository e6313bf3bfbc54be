"""A file for each rank: read at another number of ranks, refused on every rank if one is damaged."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
from full_disk import no_more_than
from harness import run
from launched import ARGUMENTS, network
from sidcomp import rank_states
from sidcomp.doors.ddp import register
from sidcomp.doors.fsdp.peers import Peers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def registered() -> tuple[DistributedDataParallel, sidcomp.State]:
    ddp, state = DistributedDataParallel(network()), sidcomp.State(**ARGUMENTS)
    register(ddp, state)
    return ddp, state


def write(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    ddp, state = registered()
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(8, 20)).square().mean().backward()
    rank_states.write(folder, state, rank_states.agree_on_run(state))
    return dict(state.state_dict()["residuals"])


def load(folder: str, state: sidcomp.State) -> bool:
    return rank_states.load(
        folder, state, lambda found: state.prepare(rank_states.states_of(found)), Peers((), "cpu")
    )


def read(rank: int, world: int, folder: str) -> dict[str, Tensor] | str:
    warnings.simplefilter("ignore")  # a State without a step
    ddp, state = registered()
    try:
        assert load(folder, state)
    except sidcomp.CheckpointError as e:
        return str(e)
    del ddp
    return dict(state.state_dict()["residuals"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("states")
    return folder, run(write, 2, str(folder))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_sum_of_the_residuals_stays(saved: tuple[Path, list[dict[str, Tensor]]], world: int) -> None:
    folder, old = saved
    new = run(read, world, str(folder))
    for name in old[0]:
        total = sum(r[name] for r in old)
        torch.testing.assert_close(sum(r[name] for r in new), total)
        if world == 2:
            assert all(torch.equal(a[name], b[name]) for a, b in zip(new, old, strict=True))


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (1, 1)])
def test_a_damaged_file_is_refused_on_every_rank(
    saved: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path, world: int, rank: int
) -> None:
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damaged = tmp_path / f"sidcomp-rank{rank}.pt"
    damaged.write_bytes(damaged.read_bytes()[:200])
    for text in run(read, world, str(tmp_path)):
        assert isinstance(text, str) and "sidcomp-rank1.pt is damaged" in text


def write_twice(rank: int, world: int, folder: str) -> tuple[str, bool]:
    """The second time the disk is full. What the error says, and whether the first file still loads."""
    ddp, state = registered()
    run_name = rank_states.agree_on_run(state)
    ddp(torch.randn(8, 20)).square().mean().backward()
    rank_states.write(folder, state, run_name)
    before = {name: x.clone() for name, x in state.state_dict()["residuals"].items()}
    ddp(torch.randn(8, 20)).square().mean().backward()
    with no_more_than(2000), pytest.raises(sidcomp.CheckpointError) as caught:
        rank_states.write(folder, state, run_name)
    assert load(folder, state)
    after = state.state_dict()["residuals"]
    return str(caught.value), all(torch.equal(after[name], x) for name, x in before.items())


def test_a_full_disk_leaves_the_file_before_and_says_so(tmp_path: Path) -> None:
    for rank, (text, same) in enumerate(run(write_twice, 2, str(tmp_path))):
        assert same and f"cannot write {tmp_path}/sidcomp-rank{rank}.pt: File too large" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sidcomp-rank0.pt", "sidcomp-rank1.pt"]


def write_nowhere(rank: int, world: int, folder: str) -> str:
    _, state = registered()
    run_name = rank_states.agree_on_run(state)
    with pytest.raises(sidcomp.CheckpointError) as caught:
        rank_states.write(Path(folder) / "file" / "inside", state, run_name)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in run(write_nowhere, 2, str(tmp_path)):
        assert "file/inside" in text and "Not a directory" in text
