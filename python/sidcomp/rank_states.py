"""The states of all ranks in a checkpoint of which the program, or its framework, saves rank 0's part alone.

`write` keeps a file for each rank in the checkpoint's folder. `gather` brings all states to rank 0, for a
checkpoint that is one file. `load` takes either. What is read is compared among the ranks, so that all of
them refuse states of different runs or steps, and all of them learn that a rank's state is missing.
"""

import io
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import files, notices
from sidcomp.doors.fsdp.peers import Peers
from sidcomp.errors import CheckpointError, ExchangeError, SetupError
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.members import refuse
from sidcomp.runtime.plain_data import anything, count, either, listing, record, table, text
from sidcomp.runtime.telling import tell
from sidcomp.state import State

_PART = 1 << 26  # bytes of a message of `gather`; a GPU holds no more than one


def group_of(state: State) -> dist.ProcessGroup:
    """Returns the ranks that the State averages over."""
    state.check_open()
    if state.door is None:
        raise SetupError("the State is not registered with a model: register it before it is saved or loaded")
    group = state.door.model.process_group
    if state.engine.place is not None:  # there is no group whose ranks all come
        raise SetupError(
            "with a deadline ranks may be late, and each saves for itself: save run.state_dict() and the "
            "optimizer's, and load both after compress()"
        )
    refuse(
        group,
        "the files of its ranks cannot be kept together, because its members may change",
        "save state.state_dict() of each rank yourself",
    )
    return group


def agree_on_run(state: State) -> str:
    """Returns a name of this run, the same on every rank, which distinguishes its checkpoints from others.
    Every rank calls it at the same point."""
    name: str = tell(group_of(state), secrets.token_hex(8), text, "naming the run")[0]
    return name


# ---- a file for each rank


def write(folder: Path, state: State, run: str, beside: dict[str, Any], model: int, peers: Peers) -> None:
    """Writes this rank's file, so that the folder has the files of all ranks or, if one cannot write, the
    former ones. Every rank calls it at the same point. beside: what else belongs to the State; model: its
    number, if a program has several; peers: the ranks with the shards of this replica. Raises CheckpointError
    on every rank, which names file and cause."""
    group = group_of(state)
    final = file_of(folder, dist.get_rank(group), model, _part_of(state))
    # No name is another rank's: one may be in its next save already.
    new, former = final.with_suffix(".pending"), final.with_suffix(".former")

    def prepare() -> None:
        saved = {"run": run, "state": state.state_dict(), "beside": beside}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"cannot make the folder {folder}: {e.strerror}") from e
        files.write(new, lambda file: torch.save(saved, file), CheckpointError)
        _keep(final, former)

    def move() -> None:
        try:
            os.replace(new, final)
        except OSError as e:
            raise CheckpointError(f"cannot write {final}: {e.strerror}") from e

    moved = False
    try:
        _together(prepare, group, peers)
        moved = True
        _together(move, group, peers)
    except CheckpointError:
        with suppress(OSError):  # `load` refuses files of different steps
            if moved and not new.exists():
                os.replace(former, final) if former.exists() else final.unlink()
        raise
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
            former.unlink(missing_ok=True)


def _together(do: Callable[[], None], group: dist.ProcessGroup, peers: Peers) -> None:
    """Has all ranks do it. Raises CheckpointError on every rank if one cannot, and says which one and why."""
    problem = ""
    try:
        do()
    except Exception as e:
        problem = f"rank {dist.get_rank(group)}: {e}"
    told = tell(group, problem, text, "saving")
    if not peers.all_agree(not any(told)):
        raise CheckpointError(next(filter(None, told), "a rank with another shard could not write its file"))


def _keep(path: Path, name: Path) -> None:
    """Gives the file, if there is one, a second name, under which it stays when the first is replaced."""
    name.unlink(missing_ok=True)  # of a save that was killed
    if not path.exists():
        return
    try:
        os.link(path, name)
    except OSError:
        try:  # a folder, or a disk without links
            shutil.copyfile(path, name)
        except OSError as e:
            raise CheckpointError(f"cannot replace {path}: {e.strerror}") from e


def load(
    source: str | Path | Sequence[Any],
    state: State,
    prepare: Callable[[list[dict[str, Any]]], Callable[[], object]],
    peers: Peers,
    model: int = 0,
    problem: str = "",
) -> bool:
    """Loads what `write` has written, or what was saved in another way: of this rank or, if the number of
    ranks was another one, of all old ranks. Every rank calls it at the same point.

    source      the folder; or what all ranks have saved, in their order, or this rank alone
    prepare     raises if this rank cannot take over what was found; changes nothing, and returns what does so
    peers       the ranks with the shards of this replica, which load all or nothing
    model       as in `write`
    problem     why this rank has nothing to load

    Returns False, with a warning, if no rank finds a file: the residuals then start from zero. Raises
    CheckpointError on every rank, and then nothing has changed, if some states are missing or damaged, are of
    different runs or steps, or cannot be taken over.
    """
    group = group_of(state)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    in_files = isinstance(source, str | Path)
    where = str(source) if in_files else "the checkpoint"
    found: list[dict[str, Any]] = []
    take: Callable[[], object] | None = None
    try:
        if isinstance(source, str | Path):
            found = _read(Path(source), group, model, _part_of(state))
        elif not problem:
            found = _own(source, rank, world)
        take = prepare(found) if found else None
    except ExchangeError:  # there is nobody to tell
        raise
    except Exception as e:
        problem = f"rank {rank}: {e}"
    problems, origins = _tell(found, problem, group)
    nothing = in_files and not problems and not origins
    wrong = _wrong(problems, origins, where)
    step = -2 if wrong else -1 if nothing else max((step for _, step in origins), default=0)
    lowest, highest = peers.smallest(step), -peers.smallest(-step)
    if lowest != highest or wrong:
        raise CheckpointError(wrong or _wrong_beside(lowest, highest, where))
    if nothing:
        notices.warn(f"there are no states in {where}: the residuals start from zero", rank)
        state.engine.informed = True
    if take is not None:
        take()
    return bool(found)


def states_of(found: list[dict[str, Any]]) -> Any:
    """What `State.load_state_dict` takes, of what ranks have saved."""
    states = [one["state"] for one in found]
    return states if len(states) > 1 else states[0]


def _own(states: Sequence[Any], rank: int, world: int) -> list[dict[str, Any]]:
    for one in states:
        _check_saved(one, "the checkpoint")
    return [states[rank]] if len(states) == world else list(states)


def _tell(
    found: list[dict[str, Any]], problem: str, group: dist.ProcessGroup
) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns the problems of all ranks, and the run and step of each state that some rank has found."""
    mine = [{"run": run, "step": step} for run, step in {(f["run"], f["state"]["step"]) for f in found}]
    told = tell(group, {"problem": problem, "found": mine}, _TOLD, "loading")
    return (
        [one["problem"] for one in told if one["problem"]],
        [(x["run"], x["step"]) for one in told for x in one["found"]],
    )


def _wrong(problems: Sequence[str], origins: Sequence[tuple[str, int]], where: str) -> str:
    """Says what is wrong if a rank has a problem, or if states are of different runs or steps; else ""."""
    if problems:
        return problems[0]
    if len({run for run, _ in origins}) > 1:
        return (
            f"{where} has states of different runs: the ranks' states belong together; load a checkpoint "
            "that one run has saved"
        )
    if len(steps := sorted({step for _, step in origins})) > 1:
        return _of_different_steps(steps, where)
    return ""


def _of_different_steps(steps: Sequence[int], where: str) -> str:
    return (
        f"{where} has states of different steps, {steps}: the ranks' states belong together; load a "
        "checkpoint that all ranks have saved at the same point"
    )


def _wrong_beside(lowest: int, highest: int, where: str) -> str:
    """Says what is wrong although it is not with this shard. The steps of the shards; -1: there is no file,
    -2: something is wrong."""
    if lowest == -2:
        return f"a rank with another shard could not load its part of {where}, and says why"
    if lowest == -1:
        return (
            f"{where} has the files of some shards only: save the checkpoint on every rank, and where all "
            "ranks that load it find it"
        )
    return _of_different_steps([lowest, highest], where)


def file_of(folder: Path, rank: int, model: int = 0, part: str = "") -> Path:
    """part: as `_part_of` returns it; the ranks of each shard count from 0."""
    return folder / f"sidcomp{f'-{model}' if model else ''}{part}-rank{rank}.pt"


def _part_of(state: State) -> str:
    """The shard that this rank holds, as a part of a file's name; "" for a whole model."""
    assert state.door is not None
    part = state.door.model.part.replace(" ", "")
    return f"-{part}" if part else ""


def _read(folder: Path, group: dist.ProcessGroup, model: int, part: str) -> list[dict[str, Any]]:
    """Returns this rank's own file or, if the number of ranks was another one, those of all old ranks, and
    nothing if no rank has a file. It raises only when all ranks have told what they have."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = file_of(folder, rank, model, part)
    first: dict[str, Any] | None = None
    failure: Exception | None = None
    try:
        first = _load(own) if own.exists() else None
    except Exception as e:
        failure = e
    mine: int | None = 0 if failure is not None else None if first is None else first["state"]["world"]
    told = tell(group, mine, either(count), "loading")
    if failure is not None:
        raise failure
    if told == [None] * world:
        return []
    # Rank 0's file is of the last save; that of a higher rank may be of an earlier one, by more ranks.
    old = mine if told[0] is None else told[0]
    if old is None or old in (0, world):  # 0: saved before the first step
        return [first or _load(own)]
    return [_load(file_of(folder, r, model, part)) for r in range(old)]


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(
            f"there is no {path}: every rank saves its own state, so save the checkpoint on every rank, and "
            "where all ranks that load it find it"
        )
    return checked(path, str(path))


_TOLD = record({"problem": text, "found": listing(record({"run": text, "step": count}))})
_check_saved = record(
    {"run": text, "state": record({"world": count, "step": count})}, {"beside": table(anything)}
)


def checked(source: Path | io.BytesIO, where: str) -> dict[str, Any]:
    """Loads what one rank has saved: its run, and its State's state_dict. where: for messages. Raises
    CheckpointError, whatever the source holds."""
    try:
        saved = torch.load(source, weights_only=True, map_location="cpu")
        _check_saved(saved, "it")
    except Exception as e:
        raise CheckpointError(f"{where} is damaged, or no state of sidcomp ({type(e).__name__}: {e})") from e
    return saved  # type: ignore[no-any-return]


# ---- one file for all ranks


@exchanging("collecting the states of all ranks")
def gather(saved: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Returns the states of all ranks on rank 0, and an empty list on the others. Every rank calls it at the
    same point. device: what the group's backend sends from."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    mine = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=device), group)
    if rank:
        for part in torch.split(mine, _PART):
            dist.send(part.to(device), dist.get_global_rank(group, 0), group)
        return []
    states = [saved]
    for r in range(1, world):
        whole = torch.empty(int(sizes[r]), dtype=torch.uint8, device="cpu")
        for part in torch.split(whole, _PART):
            came = torch.empty(len(part), dtype=torch.uint8, device=device)
            dist.recv(came, dist.get_global_rank(group, r), group)
            part.copy_(came)
        data = io.BytesIO(whole.numpy().tobytes())
        states.append(torch.load(data, weights_only=True, map_location="cpu"))
    return states
