"""The checkpoint of `Updates`: everything is checked before anything is loaded."""

import reprlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sidcomp.errors import CheckpointError
from sidcomp.local.elastic import Meetings
from sidcomp.local.gradient_noise import Noise
from sidcomp.local.outer import Outer
from sidcomp.local.rendezvous import rates
from sidcomp.local.shards import Shards
from sidcomp.local.vectors import CALL, Vectors, check_values, named_values
from sidcomp.runtime.plain_data import (
    anything,
    count,
    flag,
    listing,
    positive,
    record,
    table,
    text,
    whole,
    wrong,
)
from sidcomp.state import State

VERSION = 1
_MOST = 2**53  # steps


class Updates(Protocol):
    """The part of `sidcomp.local.steps.Updates` that saving needs."""

    state: State
    error: str
    steps: int
    every: int
    delay: int
    parts: int
    vectors: list[Vectors]
    flying: list[int]
    shards: Shards
    outer: Outer
    meetings: Meetings | None

    @property
    def noise(self) -> Noise | None: ...

    @property
    def world(self) -> int: ...

    def of(self, together: Sequence[int]) -> list[Vectors]:
        """Returns the vectors that are exchanged together."""

    def counts(self, together: Sequence[int]) -> bool:
        """Whether what is in flight, and has arrived, counts on this rank."""


def _cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def _with_base(vectors: Sequence[Vectors], flying: Sequence[Vectors]) -> list[Vectors]:
    """Those that may have a base which neither the point nor the parameters show."""
    return [v for v in vectors if v.wide and v not in flying]


def _moved_on(updates: Updates, flying: Sequence[Vectors]) -> bool:
    """Whether this rank's parameters are elsewhere than `restore` puts them. The number of steps does not
    tell: they are after an exchange that has failed, and when one of several optimizers has stepped alone."""
    for v in updates.vectors:
        start = v.base_views if updates.error == "parameters" else v.point_views
        there = v.left_views if v in flying else start
        if not all(torch.equal(p, x.to(p)) for p, x in zip(v.parameters, there, strict=True)):
            return True
    return False


def save(updates: Updates) -> dict[str, Any]:
    """Returns the contents of a checkpoint. Nothing is in progress when it is called."""
    parameters = updates.error == "parameters"
    flying = updates.of(updates.flying)
    moved = updates.vectors if parameters else flying  # where the base is not the point
    bases = [v for v in _with_base(updates.vectors, flying) if v.apart]
    discarded = bool(flying) and not updates.counts(updates.flying)
    saved: dict[str, Any] = {
        "version": VERSION,
        "error": updates.error,
        "steps": updates.steps,
        "state step": updates.state.engine.step,
        "every": updates.every,
        "delay": updates.delay,
        "parts": updates.parts,
        "world": updates.world,
        "part": updates.shards.part,
        "point": _cloned(named_values(updates.vectors, "point")),
        "base": _cloned(named_values(moved, "left") | named_values(bases, "base")),
        "own": _cloned(named_values(updates.vectors, "own")) if _moved_on(updates, flying) else {},
        "in flight": {},
        "noise": updates.noise.state_dict() if updates.noise is not None else None,
        "outer": updates.outer.state_dict(),
    }
    if flying:
        update = {} if discarded else _cloned(named_values(flying, "update"))
        saved["in flight"] = {"names": [n for v in flying for n in v.names], "update": update}
        saved["in flight"]["discarded"] = discarded
    if updates.meetings is not None:
        saved["rounds"] = updates.meetings.state_dict()
    return saved


def check(updates: Updates, saved: object, step: int) -> list[int]:
    """Raises CheckpointError unless `saved` can be loaded behind a State's dictionary of this step. Returns
    what is in flight in it, as `flying` holds it. Nothing changes."""
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{CALL}: load_state_dict({reprlib.repr(saved)}): give the dictionary that state_dict() "
            "returned, as torch.load reads it"
        )
    for name, of in _FIELDS.items():
        if name not in saved:
            raise CheckpointError(
                f'{CALL}: the dictionary has no "{name}": it is damaged, or not what state_dict() returned'
            )
        of(saved[name], f'{CALL}: "{name}"')
    if saved["version"] != VERSION:
        raise CheckpointError(
            f'{CALL}: "version" is {saved["version"]}, and this sidcomp reads {VERSION}: load it with the '
            "sidcomp that saved it"
        )
    if saved["error"] != updates.error:
        raise CheckpointError(
            f"{CALL}: the checkpoint was saved with error={saved['error']!r}: resume with the same `error`"
        )
    if updates.error == "parameters" and saved["state step"] != step:
        raise CheckpointError(
            f"{CALL}: it was saved beside a State's dictionary of step {saved['state step']}, and the State "
            f"is at step {step}: call the State's load_state_dict first, with that dictionary"
        )
    updates.shards.check_saved(saved)
    together = _in_flight(updates, saved)
    flying = updates.of(together)
    check_values(saved["point"], named_values(updates.vectors, "point"), "common point")
    moved = updates.vectors if updates.error == "parameters" else flying
    discarded = bool(flying) and saved["in flight"]["discarded"]
    # of an exchange that is discarded it has where the parameters were, some of which were not finite
    check_values(saved["base"], named_values(moved, "own"), '"base"', nan=discarded)
    bases = named_values(_with_base(updates.vectors, flying), "point")
    check_values(saved["base"], {n: x for n, x in bases.items() if n in saved["base"]}, '"base"')
    if saved["own"]:  # which may have what the next exchange discards
        check_values(saved["own"], named_values(updates.vectors, "own"), '"own"', nan=True)
    if flying and not discarded:
        check_values(saved["in flight"]["update"], named_values(flying, "update"), 'update "in flight"')
    alone = saved["noise"] is None and saved["world"] == 1  # one rank measures nothing
    if updates.noise is not None and not alone:
        updates.noise.check(saved["noise"])
    elif updates.noise is None and saved["noise"] is not None and updates.world > 1:
        raise CheckpointError(
            f'{CALL}: "noise" is {reprlib.repr(saved["noise"])}, and this run corrects nothing: resume with '
            "the same noise_correction"
        )
    updates.outer.check(saved["outer"])
    if updates.meetings is not None:
        _check_rounds(updates, saved)
    return together


def _steps(value: object, where: str) -> None:
    count(value, where)
    if isinstance(value, int) and value > _MOST:
        raise wrong(where, value, "a number of steps")


_FIELDS = {
    "version": count, "error": text, "steps": _steps, "state step": count, "every": positive, "delay": count,
    "parts": positive, "world": positive, "part": text, "point": table(anything), "base": table(anything),
    "own": table(anything), "in flight": table(anything), "noise": anything, "outer": anything,
}  # fmt: skip
_FLIGHT = {"names": listing(text), "update": table(anything), "discarded": flag}


def _in_flight(updates: Updates, saved: dict[str, Any]) -> list[int]:
    """Which exchange had not been applied when `saved` was saved."""
    if not saved["in flight"]:
        return []
    record(_FLIGHT)(saved["in flight"], f'{CALL}: "in flight"')
    if saved["parts"] != updates.parts:
        raise CheckpointError(
            f"{CALL}: the checkpoint was saved with parts={saved['parts']}, while one of them was in flight"
            ": resume with the same `parts`"
        )
    names = set(saved["in flight"]["names"])
    every = range(updates.parts)
    together = [i for i in every if any(n in names for v in updates.of([i]) for n in v.names)]
    if names != {n for v in updates.of(together) for n in v.names}:
        raise CheckpointError(
            f'{CALL}: "in flight" names {reprlib.repr(sorted(names))}, which are no whole parts of this '
            "model: the dictionary is damaged, or of another model"
        )
    return together


def _check_rounds(updates: Updates, saved: dict[str, Any]) -> None:
    """Raises CheckpointError if the place in the run is missing, or something else."""
    assert updates.meetings is not None
    if "rounds" not in saved:
        raise CheckpointError(
            f'{CALL}: the dictionary has no "rounds": it was saved without a deadline, or is damaged'
        )
    fields = {"version": whole, "since": count, "behind": flag, "buffers": table(anything)}
    record({**fields, "rates": rates})(saved["rounds"], f'{CALL}: "rounds"')
    if not updates.meetings.buffers_like(came := saved["rounds"]["buffers"]):
        raise CheckpointError(
            f'{CALL}: "buffers" of "rounds" is {reprlib.repr(came)}, which are not the module\'s buffers: '
            "the dictionary is damaged, or of another model"
        )


def check_optimizers(own: Sequence[torch.optim.Optimizer], saved: list[Any]) -> None:
    """Raises CheckpointError unless the optimizers can load these dictionaries: they would find out only when
    what stands before them has been loaded."""
    if len(saved) != len(own):
        raise CheckpointError(f"the files have {len(saved)} optimizers, and this run has {len(own)}")
    for one, its in zip(own, saved, strict=True):
        mine = [len(group["params"]) for group in one.param_groups]
        record({"param_groups": listing(record({"params": listing(anything)}))})(its, '"optimizers"')
        theirs = [len(group["params"]) for group in its["param_groups"]]
        if theirs != mine:
            raise CheckpointError(
                f"the files have an optimizer with groups of {theirs} parameters, and here "
                f"{type(one).__name__} has groups of {mine}: give it the parameters in the same groups"
            )


def restore(updates: Updates, saved: dict[str, Any], together: list[int]) -> None:
    """Takes over what `check` has accepted. together: what is in flight."""
    if updates.noise is not None and saved["noise"] is not None:
        updates.noise.load_state_dict(saved["noise"])
    updates.steps = saved["steps"]
    flying = updates.of(together)
    for v in flying:
        if not v.apart:  # the run that saved it had a delay
            v.set_apart(True)

    def take(vectors: list[Vectors], kind: str, values: dict[str, Any]) -> None:
        for name, view in named_values(vectors, kind).items():
            view.copy_(values[name])

    take(updates.vectors, "point", saved["point"])
    for v in updates.vectors:
        v.base.copy_(v.point)
    moved = updates.vectors if updates.error == "parameters" else flying
    take(moved, "left", saved["base"])
    for v in updates.vectors:
        v.resume(keep=False)
    for v in moved:
        v.put(v.left_views)
    for v in _with_base(updates.vectors, flying):
        if known := [name for name in v.names if name in saved["base"]]:
            v.separate()
            for name in known:
                v.named(v.base)[name].copy_(saved["base"][name])
    if saved["own"]:
        take(updates.vectors, "own", saved["own"])
    if flying and not saved["in flight"]["discarded"]:
        take(flying, "update", saved["in flight"]["update"])
    updates.outer.load_state_dict(saved["outer"])
    if updates.meetings is not None:
        updates.outer.given = list(saved["rounds"]["rates"])
