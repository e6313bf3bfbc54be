"""Looks once, some steps after groups were made, at what they keep: Marsit's compensation beside too small
steps, and elements for which `lossless` has no room."""

from collections.abc import Sequence
from math import ceil

from sidcomp.config import schedule
from sidcomp.config.settings import Settings
from sidcomp.runtime.checkpoint import residual_of
from sidcomp.runtime.group import Group

STEPS = 12  # after so many, the growth shows
_TIMES = 3.0  # a step may be so many times smaller than what the memory grows by
_WAITING = 0.01  # of a group's elements, may wait without a warning


def outgrown(settings: Settings, groups: Sequence[Group], steps: int) -> str | None:
    """Returns what to tell the user of the group whose memory has grown most in `steps` steps, or None.

    Only codecs whose step has a fixed size, the parameter `eta_s`, can fall behind like this. Reads the
    memory of their groups once, on CUDA by a copy to the host.
    """
    found: list[tuple[float, float, float]] = []
    for g in groups:
        size = _parameter(settings, g, "eta_s", steps)
        if size is not None and g.plan.vectors:
            growth = float(residual_of(g)[0].abs().mean()) / steps
            found.append((growth / size, growth, size))
    if not found or max(found)[0] < _TIMES:
        return None
    times, growth, size = max(found)
    return (
        f"eta_s={size:g} is too small for these gradients: in {steps} steps the compensation of a group has "
        f"grown by {growth:.2g} an element and step, {times:.0f} times what a step sends. A step in full "
        "precision (full_every, K) applies all that has accumulated, and momentum in the optimizer many "
        f"times over, so the loss can diverge. Set eta_s to about {growth:.1g}, or full_every to 10 or less "
        "(docs/codecs.md, Memories)"
    )


def crowded(settings: Settings, groups: Sequence[Group], steps: int) -> str | None:
    """Returns what to tell the user of the group of which the largest share of elements waits, or None.

    Only codecs that round nothing and have room for some small elements, the parameter `exceptions`, can
    fall short like this. Reads the memory of their groups, as `outgrown` does. There is nothing to tell with
    `full_every`, which sends what waits, and with `accuracy="exact"`, with which "auto" gives such a plan up.
    """
    found: list[tuple[float, float, Group]] = []
    for g in () if settings.full_every or settings.exact else groups:
        room = _parameter(settings, g, "exceptions", steps)
        if room is not None and g.plan.vectors:
            found.append((float(residual_of(g)[0].count_nonzero()) / g.n, room, g))
    found = [of for of in found if of[0] >= _WAITING]
    if not found:
        return None
    waiting, room, g = max(found, key=lambda of: of[0])
    needed = f"{min(1.0, ceil(100 * (room + waiting)) / 100):g}"
    if settings.auto:
        instead = f"Give candidates=[({g.plan.codec!r}, {{'exceptions': {needed}}})]"
    else:
        instead = f"Set exceptions to {needed}"
        if not settings.planned:
            instead += ", or full_every to 10, which sends what waits in every tenth step"
    return (
        f"{g.plan.codec} has no room for all elements of {g.label()} that are far smaller than their "
        f"neighbors: after {steps} steps {100 * waiting:.2g} % of its elements wait in the residual. Nothing "
        f"is lost, but a step is not the plain average to the bit. {instead} (docs/planning.md)"
    )


def _parameter(settings: Settings, group: Group, name: str, step: int) -> float | None:
    """The parameter of the group's codec, if it has one of this name."""
    if group.plan.lossless or group.spec.candidate < 0:
        return None
    candidate = settings.candidate(group.spec.candidate)
    own = next((p.default for p in candidate.codec.parameters if p.name == name), None)
    return None if own is None else float(schedule.at(candidate.parameters, step).get(name, own))
