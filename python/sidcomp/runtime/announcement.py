"""The line that says, at the first compressed step, what is compressed and what is not."""

from collections.abc import Sequence

from sidcomp.config.grouping import DENSE, shorten
from sidcomp.config.settings import Settings
from sidcomp.runtime.engine_state import EngineState
from sidcomp.runtime.group import Group, ring_bytes

_WIDTH = 4  # bytes an element of plain DDP's gradient, which is float32 here whatever its dtype


def compressed(group: Group) -> bool:
    return not group.plan.lossless


def way(settings: Settings, group: Group) -> str:
    """How the group is encoded: the codec with its parameters."""
    if not compressed(group):
        return "dense"
    return settings.candidate(group.spec.candidate).brief.encoding


def exchange_of(group: Group) -> str:
    if group.in_messages:
        return group.message_plan.choice.exchange.name
    return "all-reduce" if group.plan.linear else "all-gather"


def size(nbytes: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= least:
            return f"{nbytes / least:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def line(p: EngineState) -> str:
    """Describes what an engine does with its groups."""
    assert p.exchange is not None
    settings, world = p.settings, p.exchange.world
    left = _left_out(p)
    some = [g for g in p.groups if compressed(g)]
    if not some:
        return f"nothing is compressed: {left or 'the model has no gradients'}"
    codecs = list(dict.fromkeys(way(settings, g) for g in some))
    exchanges = list(dict.fromkeys(exchange_of(g) for g in some))
    tensors, nbytes = _amount(p.groups)
    inside, less = _amount(some)
    text = (
        f"{shorten(codecs, 2)} compresses {inside} of {tensors} tensors, {size(less)} of {size(nbytes)} of "
        f"{'updates' if p.updates else 'gradients'} ({100 * less / nbytes:.1f} %), by "
        f"{' and '.join(exchanges)} over {world} ranks"
    )
    if any(g.in_messages and settings.candidate(g.spec.candidate).choice is None for g in some):
        text += ", which sends fewer bytes than an all-gather here, and encodes their mean a second time"
    text += _traffic(p, world)
    if left:
        text += f". Uncompressed: {left}"
    if p.updates:
        text += ". Each rank has parameters of its own: evaluate and save inside run.common()"
    return text


def _amount(groups: Sequence[Group]) -> tuple[int, int]:
    """The number of tensors, and the bytes of their gradients."""
    pieces = [p for g in groups for p in g.spec.pieces]
    return len(pieces), sum(p.numel * p.itemsize for p in pieces)


def _traffic(p: EngineState, world: int) -> str:
    if world < 2:
        return "; one rank sends nothing"
    noise = ring_bytes(p.beside, world)
    sent = sum(g.wire_bytes(world) for g in p.groups) + noise
    elements = sum(g.n for g in p.groups)
    dense = ring_bytes(_WIDTH * elements, world)
    text = f"; a rank sends {size(sent)} a step ({8 * sent / elements:#.3g} bits an element"
    if noise:
        text += f"; {size(noise)} of it for the noise correction"
    text += f"), {p.plain}'s all-reduce in float32 {size(dense)}"
    if sent >= dense:
        return text + f": this saves nothing. With this many ranks take another codec, or {p.plain}"
    return text + f" ({dense / sent:.3g} times as much)"


def _left_out(p: EngineState) -> str:
    """Says what is sent uncompressed, and why."""
    by_rule = p.settings.policy.excluded_by(p.shapes)
    sums: dict[str, tuple[int, int]] = {}
    for g in (g for g in p.groups if not compressed(g)):
        for piece in g.spec.pieces:
            why = by_rule.get(piece.name) or (
                "the plan" if g.spec.candidate == DENSE else f"codec {g.plan.codec!r}"
            )
            count, nbytes = sums.get(why, (0, 0))
            sums[why] = count + 1, nbytes + piece.numel * piece.itemsize
    return ", ".join(f"{count} tensors, {size(n)} ({why})" for why, (count, n) in sums.items())
