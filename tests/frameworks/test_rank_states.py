"""A file for each rank: read at another number of ranks, refused on every rank if one is damaged."""

from __future__ import annotations

import io
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
from full_disk import no_more_than
from harness import run
from launched import ARGUMENTS, network, optimizer_of
from sidcomp import files, rank_states
from sidcomp.doors.ddp import register
from sidcomp.doors.fsdp.peers import Peers
from sidcomp.frameworks.distributed_checkpoint import Entries
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
    save(folder, state, rank_states.agree_on_run(state))
    return dict(state.state_dict()["residuals"])


def save(folder: str, state: sidcomp.State, name: str) -> None:
    rank_states.write(Path(folder), state, name, {}, 0, Peers((), "cpu"))


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
    save(folder, state, run_name)
    before = {name: x.clone() for name, x in state.state_dict()["residuals"].items()}
    ddp(torch.randn(8, 20)).square().mean().backward()
    with no_more_than(2000), pytest.raises(sidcomp.CheckpointError) as caught:
        save(folder, state, run_name)
    assert load(folder, state)
    after = state.state_dict()["residuals"]
    return str(caught.value), all(torch.equal(after[name], x) for name, x in before.items())


def test_a_full_disk_leaves_the_file_before_and_says_so(tmp_path: Path) -> None:
    for text, same in run(write_twice, 2, str(tmp_path)):
        assert same and f"cannot write {tmp_path}/sidcomp-rank0.pending: File too large" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sidcomp-rank0.pt", "sidcomp-rank1.pt"]


def write_nowhere(rank: int, world: int, folder: str) -> str:
    _, state = registered()
    run_name = rank_states.agree_on_run(state)
    with pytest.raises(sidcomp.CheckpointError) as caught:
        save(f"{folder}/file/inside", state, run_name)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in run(write_nowhere, 2, str(tmp_path)):
        assert "file/inside" in text and "Not a directory" in text


def test_a_folder_that_fewer_ranks_have_written_since(tmp_path: Path) -> None:
    """The file of rank 2 is of an earlier save, by three ranks."""
    run(write, 3, str(tmp_path))
    old = run(write, 2, str(tmp_path))
    for world in (3, 2):
        new = run(read, world, str(tmp_path))
        for name in old[0]:
            torch.testing.assert_close(sum(r[name] for r in new), sum(r[name] for r in old))


def foreign(rank: int, world: int, folder: str) -> list[str]:
    """What the error says where every rank finds something, and no rank what was saved; "" if there is none.
    In turn: what `load` is given is a folder, a list, a list of what Entries has saved."""
    _, state = registered()
    ddp = DistributedDataParallel(network())
    with sidcomp.compress(ddp, optimizer_of(ddp.parameters()), **ARGUMENTS) as it:
        torch.save(state.state_dict(), f"{folder}/sidcomp-rank{rank}.pt")
        buffer = io.BytesIO()
        torch.save({"state": state.state_dict()}, buffer)
        entries = Entries(it)
        said = []
        for do in (
            lambda: it.load(folder),
            lambda: it.load([{"state": state.state_dict()}] * world),
            lambda: entries.load_state_dict({f"rank{rank}": buffer.getvalue()}),
        ):
            try:
                do()
                said.append("")
            except sidcomp.CheckpointError as e:
                said.append(str(e))
    state.close()
    return said


def test_what_is_damaged_on_every_rank_is_not_taken_for_nothing(tmp_path: Path) -> None:
    for said in run(foreign, 2, str(tmp_path)):
        assert all("there is no " in text and "['run']" in text for text in said), said


def test_a_folder_without_the_file_of_one_old_rank_is_not_taken_for_empty(
    saved: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    (tmp_path / "sidcomp-rank0.pt").write_bytes((saved[0] / "sidcomp-rank0.pt").read_bytes())
    (text,) = run(read, 1, str(tmp_path))
    assert isinstance(text, str) and "there is no " in text and "sidcomp-rank1.pt" in text


def save_often(rank: int, world: int, folder: str) -> bool:
    """Rank 1 ends a save while rank 0, in the next one, has made the folder and not yet written its file."""
    if not rank:
        write = files.write
        files.write = lambda *given: (time.sleep(0.5), write(*given))  # type: ignore[assignment]
    else:
        ended = rank_states._together
        rank_states._together = lambda *given: (ended(*given), time.sleep(0.2))  # type: ignore[assignment]
    _, state = registered()
    name = rank_states.agree_on_run(state)
    for _ in range(4):
        save(folder, state, name)
        time.sleep(0.6 * rank)
    return load(folder, state)


def test_saves_in_a_row_into_one_folder(tmp_path: Path) -> None:
    assert run(save_often, 2, str(tmp_path)) == [True, True]
