"""Parameters that begin to train during a run, as when a model is unfrozen layer by layer."""

from typing import Any

import torch

from sidcomp import notices
from sidcomp.config.grouping import shorten
from sidcomp.errors import UnsupportedError
from sidcomp.local.vectors import named_values

Updates = Any  # of steps.py, which imports this module


@torch.no_grad()
def grow(updates: Updates) -> None:
    """Takes in the parameters that require a gradient only now. All ranks release them before the same step.
    What the others have not sent is kept; the noise correction measures anew."""
    if updates.meetings is not None:
        raise UnsupportedError(
            "a parameter begins to train, and with a deadline other ranks may not know: release all "
            "parameters before sidcomp.compress"
        )
    updates.land()
    updates.find()
    engine = updates.state.engine
    engine.depart()
    engine.meet_others(updates._schedule.coming(updates.steps))
    apart = any(v.apart for v in updates.vectors)
    for v in updates.vectors if apart else ():
        v.separate()
    before = {
        kind: {n: x.clone() for n, x in named_values(updates.vectors, kind).items()}
        for kind in ("point", "base")
    }
    updates._make_outer = updates.outer  # which goes on
    named = updates.build(before["point"].keys())
    for v in updates.vectors:
        if apart:
            v.separate()
        v.start()
    for kind, values in before.items():
        own = named_values(updates.vectors, kind)
        for name, x in values.items():
            own[name].copy_(x)
    updates.state.door = None  # which serves the parameters of before
    updates.enter(named)
    updates.form(again=True)
    new = [name for name in named if name not in before["point"]]
    verb = "begins" if len(new) == 1 else "begin"
    notices.say(f"{shorten(new)} {verb} to train in step {updates.steps + 1}", updates.state.engine.speaker)
