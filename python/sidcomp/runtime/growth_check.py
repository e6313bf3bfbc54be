"""Finds a memory that grows faster than its codec sends: Marsit's compensation beside too small steps."""

from collections.abc import Sequence

from sidcomp.config import schedule
from sidcomp.config.settings import Settings
from sidcomp.runtime.checkpoint import residual_of
from sidcomp.runtime.group import Group

STEPS = 12  # after so many, the growth shows
_TIMES = 3.0  # a step may be so many times smaller than what the memory grows by


def outgrown(settings: Settings, groups: Sequence[Group], steps: int) -> str | None:
    """Returns what to tell the user of the group whose memory has grown most in `steps` steps, or None.

    Only codecs whose step has a fixed size, the parameter `eta_s`, can fall behind like this. Reads the
    memory of their groups once, on CUDA by a copy to the host.
    """
    found: list[tuple[float, float, float]] = []
    for g in groups:
        size = _step_size(settings, g, steps)
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
        "(docs/memories.md, compensation)"
    )


def _step_size(settings: Settings, group: Group, step: int) -> float | None:
    """How far a step moves an element, for a codec with steps of a fixed size."""
    if group.plan.lossless or group.spec.candidate < 0:
        return None
    candidate = settings.candidate(group.spec.candidate)
    own = next((p.default for p in candidate.codec.parameters if p.name == "eta_s"), None)
    return None if own is None else float(schedule.at(candidate.parameters, step).get("eta_s", own))
