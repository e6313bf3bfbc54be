"""The line that says, at the first compressed step, what is compressed and what is not."""

from collections.abc import Sequence

from sidcomp.config.grouping import DENSE, shorten
from sidcomp.config.policy import Shapes
from sidcomp.config.settings import Settings
from sidcomp.runtime.group import Group, ring_bytes

_WIDTH = 4  # bytes an element of plain DDP's gradient, which is float32 here whatever its dtype


def compressed(group: Group) -> bool:
    return not group.plan.lossless


def way(settings: Settings, group: Group) -> str:
    """How the group is encoded: the codec with its parameters."""
    if not compressed(group):
        return "dense"
    return settings.candidate(group.spec.candidate).encoding


def exchange_of(group: Group) -> str:
    if group.in_messages:
        return group.message_plan.choice.exchange.name
    return "all-reduce" if group.plan.linear else "all-gather"


def size(nbytes: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= least:
            return f"{nbytes / least:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def line(
    settings: Settings,
    shapes: Shapes,
    groups: Sequence[Group],
    world: int,
    plain: str,
    beside: int,
    updates: bool,
) -> str:
    """Describes groups, some of which are compressed. shapes: those of the model's parameters. plain: what
    trains it without sidcomp. beside: bytes of the door's own all-reduce, for a noise correction. updates:
    the groups hold what optimizers did, not gradients."""
    some = [g for g in groups if compressed(g)]
    codecs = list(dict.fromkeys(way(settings, g) for g in some))
    exchanges = list(dict.fromkeys(exchange_of(g) for g in some))
    tensors, nbytes = _amount(groups)
    inside, less = _amount(some)
    text = (
        f"{shorten(codecs, 2)} compresses {inside} of {tensors} tensors, {size(less)} of {size(nbytes)} of "
        f"{'updates' if updates else 'gradients'} ({100 * less / nbytes:.1f} %), by "
        f"{' and '.join(exchanges)} over {world} ranks"
    )
    if any(g.in_messages and settings.candidate(g.spec.candidate).choice is None for g in some):
        text += ", which sends fewer bytes than an all-gather here, and encodes their mean a second time"
    text += _traffic(groups, world, plain, beside)
    if left := _left_out(settings, shapes, groups):
        text += f". Uncompressed: {left}"
    if updates:
        text += ". Each rank has parameters of its own: evaluate and save inside run.common()"
    return text


def nothing(settings: Settings, shapes: Shapes, groups: Sequence[Group]) -> str:
    """Says that no group is compressed, and why."""
    left = _left_out(settings, shapes, groups)
    return f"nothing is compressed: {left}" if left else "nothing is compressed: the model has no gradients"


def _amount(groups: Sequence[Group]) -> tuple[int, int]:
    """The number of tensors, and the bytes of their gradients."""
    pieces = [p for g in groups for p in g.spec.pieces]
    return len(pieces), sum(p.numel * p.itemsize for p in pieces)


def _traffic(groups: Sequence[Group], world: int, plain: str, beside: int) -> str:
    if world < 2:
        return "; one rank sends nothing"
    noise = ring_bytes(beside, world)
    sent = sum(g.wire_bytes(world) for g in groups) + noise
    elements = sum(g.n for g in groups)
    dense = ring_bytes(_WIDTH * elements, world)
    text = f"; a rank sends {size(sent)} a step ({8 * sent / elements:#.3g} bits an element"
    if noise:
        text += f"; {size(noise)} of it for the noise correction"
    text += f"), {plain}'s all-reduce in float32 {size(dense)}"
    if sent >= dense:
        return text + f": this saves nothing. With this many ranks take another codec, or {plain}"
    return text + f" ({dense / sent:.3g} times as much)"


def _left_out(settings: Settings, shapes: Shapes, groups: Sequence[Group]) -> str:
    """Says what is sent uncompressed, and why."""
    by_rule = settings.policy.excluded_by(shapes)
    sums: dict[str, tuple[int, int]] = {}
    for g in (g for g in groups if not compressed(g)):
        for p in g.spec.pieces:
            why = by_rule.get(p.name) or (
                "the plan" if g.spec.candidate == DENSE else f"codec {g.plan.codec!r}"
            )
            count, nbytes = sums.get(why, (0, 0))
            sums[why] = count + 1, nbytes + p.numel * p.itemsize
    return ", ".join(f"{count} tensors, {size(n)} ({why})" for why, (count, n) in sums.items())
