"""torch.distributed.checkpoint: what each rank keeps, under an entry of its own.

dcp.save({"model": model, "sidcomp": Entries(run)}, checkpoint_id=folder)
"""

import io
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.doors.fsdp.hsdp import peers_of
from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.rank_states import agree_on_run, checked, group_of, load, states_of
from sidcomp.run import Run
from sidcomp.state import State


class Entries:
    """Saves and loads a Run by torch.distributed.checkpoint, which would keep one rank's entry of those that
    have the same name, and mix what the ranks have not sent.

        entries = Entries(run)
        dcp.save({"app": ..., "sidcomp": entries}, checkpoint_id=folder)
        dcp.load({"app": ..., "sidcomp": entries}, checkpoint_id=folder)

    run         what `sidcomp.compress` returned; or a State that is registered
    saved_by    [None] for loading: the number of ranks that saved, if it was another one. After dcp.load it
                is forgotten, and the same Entries save; before, dcp.save would save nothing

    dcp.save and dcp.async_save take the Run as it is when they are called. Every rank makes its Entries at
    the same point, and keeps them for as long as it saves.

    Where updates are sent, call dcp.save inside `run.common()`, so that the checkpoint's model is the common
    one. Each rank's own optimizer is in its entry. It must be loaded last: dcp.load goes by the names, so
    "sidcomp" must come behind that of the model and the optimizer in the alphabet.

    dcp.load raises an error on every rank if the state of a rank is missing, or if the states are of
    different runs or steps: CheckpointError of torch or of sidcomp. Raises SetupError here if a State is not
    registered.
    """

    def __init__(self, run: Run | State, saved_by: int | None = None) -> None:
        if saved_by is not None and saved_by < 1:
            raise ArgumentError(f"saved_by={saved_by!r}: give the number of ranks that saved")
        self._run = run
        group = group_of(self._state)
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._saved_by = saved_by
        assert self._state.door is not None
        self._part = self._state.door.model.part.replace(" ", "")  # the ranks of each shard count from 0
        self._name_of_run = agree_on_run(run) if isinstance(run, State) else ""

    @property
    def _state(self) -> State:
        return self._run if isinstance(self._run, State) else self._run.state

    @property
    def _saved_by_another_world(self) -> bool:
        return self._saved_by is not None and self._saved_by != self._world

    def state_dict(self) -> dict[str, bytes]:
        """Returns this rank's entry or, to be loaded at another number of ranks, the names of all of them."""
        if self._saved_by_another_world:
            assert self._saved_by is not None
            return {self._name(r): b"" for r in range(self._saved_by)}
        if isinstance(self._run, State):
            saved = {"run": self._name_of_run, "state": self._run.state_dict()}
        else:
            saved = self._run.rank_state()
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        return {self._name(self._rank): buffer.getvalue()}

    def _name(self, rank: int) -> str:
        return f"{self._part}rank{rank}"

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        """Loads what dcp.load has read. Every rank calls it at the same point."""
        found: list[dict[str, Any]] = []
        problem = ""
        names = range(self._saved_by or 0) if self._saved_by_another_world else [self._rank]
        try:
            found = [self._read(entries, self._name(r)) for r in names]
        except CheckpointError as e:
            problem = f"rank {self._rank}: {e}"
        state = self._state
        if isinstance(self._run, Run):
            load(found, state, self._run.prepare, self._run.peers, problem=problem)
        else:
            load(found, state, lambda it: state.prepare(states_of(it)), peers_of(state), problem=problem)
        self._saved_by = None  # what is saved from now on is of these ranks

    def _read(self, entries: dict[str, Any], name: str) -> dict[str, Any]:
        data = entries.get(name)
        if not isinstance(data, bytes):
            raise CheckpointError(f"the checkpoint has no entry {name} that Entries has saved")
        saved = checked(io.BytesIO(data), f"the entry {name}")
        world = saved["state"]["world"]
        if world not in (0, self._saved_by or self._world):
            raise CheckpointError(
                f"the entry {name} was saved by {world} ranks: load it with Entries(run, saved_by={world})"
            )
        return saved
