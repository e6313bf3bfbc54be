"""Options of `sidcomp.compress` that a program rarely sets."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sidcomp.config.grouping import Groups
from sidcomp.config.policy import Exclude, Rules
from sidcomp.config.schedule import Schedule
from sidcomp.config.settings import Candidates
from sidcomp.planner.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options rarely set: `sidcomp.compress(model, optimizer, options=sidcomp.Options(exclude="1-D"))`.

    None, or an empty tuple, leaves the choice to sidcomp. `sidcomp.State` describes what is not described
    here; it takes the same arguments.

    For any program:

    exclude             what is sent uncompressed: names, patterns, "1-D", "embedding", "output", sizes
    accuracy            how much loss the choices of sidcomp may cost: "exact", "dense", "close", "any". Where
                        updates are sent, "close" and "any" allow up to 16 steps between two exchanges
    seed                of codecs that draw random numbers
    checksum_every      every so many steps the ranks compare what they decoded

    Where updates are sent:

    noise_correction    lengthens the steps of Adam and its relatives by as much as the noise of a rank's own
                        gradient shortens them: True, False, or "rows", which does so row by row. None: True
                        where the error is kept in the parameters
    error               where the error is kept, what a rank's optimizer did and the other ranks do not know:
                        "parameters": the rank trains on parameters that contain it; "memory": all ranks train
                        from the same point. None: "memory" for bfloat16 and float16 parameters and with
                        outer, parts or deadline, else "parameters"
    host                True: the vectors that training on updates needs are in the host's memory
    stale               with a deadline: a rank that has missed more exchanges does not send what it did
                        meanwhile. None: 10

    Where groups are planned ("auto" for gradients):

    groups, candidates, warmup, profile

    For comparisons of methods:

    memory, policy, full_every, exchange, transport, isa, nonfinite, clip_gradient, Y, alpha
    """

    exclude: Exclude = ()
    accuracy: str | None = None
    seed: int | None = None
    checksum_every: int | None = None

    noise_correction: bool | str | None = None
    error: str | None = None
    host: bool | None = None
    stale: int | None = None

    groups: Groups | None = None
    candidates: Candidates | None = None
    warmup: int | None = None
    profile: Profile | str | Path | None = None

    memory: str | None = None
    policy: Rules = ()
    full_every: int | Schedule | None = None
    exchange: str | Sequence[str] | None = None
    transport: str | None = None
    isa: str | None = None
    nonfinite: str | None = None
    clip_gradient: float | None = None
    Y: int | None = None
    alpha: float | None = None

    def given(self) -> dict[str, Any]:
        """The options that the program has set, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != ()}


OF_UPDATES = ("noise_correction", "error", "host", "stale")  # the others are a State's
