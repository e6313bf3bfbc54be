"""state_dict and load_state_dict of a process group: what it has learnt of its passes, and the residuals."""

from collections.abc import Sequence
from typing import Any

import torch

from sidcomp import core as _core
from sidcomp.doors.backend.ddp_buckets import Part
from sidcomp.doors.backend.recognition import Call, Program
from sidcomp.errors import CheckpointError
from sidcomp.runtime.block import DTYPES

FORMAT = 1
_NAMED = {name: dtype for dtype, name in DTYPES.items()}


def save(group: Any) -> dict[str, Any]:
    """Returns what this rank has, in plain types and tensors."""
    return {
        "format": FORMAT,
        "version": _core.version,
        "rank": group.rank(),
        "world": group.size(),
        "passes": _save_passes(group._passes.programs + group._former["passes"]),
        "after": _save_passes(group._after.programs + group._former["after"]),
    }


def _save_passes(programs: list[Program]) -> list[dict[str, Any]]:
    """The programs that compress, in the order in which they come next if they take turns."""
    known = sorted((p for p in programs if p.known), key=lambda p: p.turn)
    return [
        {
            "calls": [[c.numel, DTYPES[c.dtype], c.device.type, c.average] for c in p.calls],
            "pieces": None if p.pieces is None else [[list(x[:2]) for x in pieces] for pieces in p.pieces],
            "state": None if p.state is None else p.state.state_dict(),
        }
        for p in known
    ]


def load(
    group: Any, given: "dict[str, Any] | Sequence[dict[str, Any]]", redistribute: str
) -> tuple[list[Program], list[Program]]:
    """Checks a result of `save`, or those of all old ranks. Returns the programs for `_passes` and `_after`;
    the group has not changed."""
    states: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not states:
        raise CheckpointError("the list of states is empty: give this rank's state, or all old ranks' states")
    for state in states:
        _check(state)
    first, here = states[0], (group.rank(), group.size())
    if len(states) == 1 and (first["rank"], first["world"]) != here:
        raise CheckpointError(
            f"this is the state of rank {first['rank']} of {first['world']}, and this is rank {here[0]} of "
            f"{here[1]}: load this rank's own, or give a list of those of all old ranks"
        )
    if group.configuration.codec == "off":
        raise CheckpointError("this process group compresses nothing: leave the state out, or name its codec")
    if first["after"] and not group.configuration.outside:
        raise CheckpointError("this state was saved with outside=True: give it again")
    passes, after = (
        [_program(group, list(each), redistribute) for each in _together(states, part)]
        for part in ("passes", "after")
    )
    for turn, program in enumerate((*passes, *after)):
        program.turn = turn - len(passes) - len(after)  # before all that come from here on
    return passes, after


def _check(state: Any) -> None:
    found = state.get("format") if isinstance(state, dict) else None
    if type(found) is int and found != FORMAT:
        raise CheckpointError(
            f"the state of the process group has format {found}; this sidcomp {_core.version} reads format "
            f"{FORMAT}"
        )
    try:
        fine = found == FORMAT and all(isinstance(state[n], int) for n in ("rank", "world"))
        for program in (*state["passes"], *state["after"]):
            for numel, dtype, device, average in program["calls"]:
                fine = fine and isinstance(numel, int) and numel > 0 and dtype in _NAMED
                fine = fine and device in ("cpu", "cuda") and type(average) is bool
            for pieces in program["pieces"] or ():
                for name, numel in pieces:
                    fine = fine and isinstance(name, str) and isinstance(numel, int) and numel > 0
            fine = fine and bool(program["calls"])
            fine = fine and _fits_together(program)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"this is no state of a process group, or it is damaged ({type(e).__name__}: {e})"
        ) from e
    if not fine:
        raise CheckpointError(
            "this is no state of a process group of this version, or its lists of calls are damaged"
        )


def _fits_together(program: dict[str, Any]) -> bool:
    """Whether each of its calls has what compresses it."""
    pieces = program["pieces"]
    return program["state"] is not None and (
        pieces is None or [sum(n for _, n in x) for x in pieces] == [numel for numel, *_ in program["calls"]]
    )


def _together(states: list[dict[str, Any]], part: str) -> Any:
    """The states of all old ranks, by program."""
    lists = {str([(p["calls"], p["pieces"]) for p in state[part]]) for state in states}
    if len(lists) > 1:
        raise CheckpointError("the ranks' states have other lists of calls: all must be of one checkpoint")
    return zip(*(state[part] for state in states), strict=True)


def _program(group: Any, saved: list[dict[str, Any]], redistribute: str) -> Program:
    first = saved[0]
    calls = [
        Call(numel, _NAMED[dtype], _here(device), average) for numel, dtype, device, average in first["calls"]
    ]
    program = Program(calls, [], [None] * len(calls), 0)
    program.loaded = True
    if first["pieces"] is not None:
        program.pieces = [tuple(Part(name, n) for name, n in pieces) for pieces in first["pieces"]]
    program.learn(group.configuration, group)
    if program.state is not None:
        states = [p["state"] for p in saved]
        program.state.load_state_dict(states if len(states) > 1 else states[0], redistribute=redistribute)
    return program


def _here(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
