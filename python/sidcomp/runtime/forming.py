"""Makes a layout from buckets: groups by the rules, their plans and buffers, the same on every rank."""

import hashlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from sidcomp import core as _core
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.config.grouping import Piece, form_groups, form_unlisted, shorten
from sidcomp.errors import RankError, UnsupportedError
from sidcomp.runtime import checkpoint
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.engine_state import EngineState
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group
from sidcomp.runtime.layout import Layout

_FAILED = bytes(32)  # sent in place of a digest


def agreed(
    exchange: Exchange, make: Callable[[], Layout], header: str, what: str, loaded: int | None, keeps: bool
) -> tuple[Layout, bool]:
    """Returns make() if the result is the same on all ranks; otherwise all ranks raise. A difference would
    corrupt an exchange, or make it hang. Also returns whether any rank has something to put into the groups:
    one that has loaded a checkpoint, or was started again, may be alone with that, or alone without it.

    All ranks must call it. header: a text that must also be the same. what: the point in the program, for
    errors. loaded: the step of this rank's checkpoint, which may differ; keeps: it has something to put in.
    """
    layout, failure, text = None, None, ""
    try:
        layout = make()
        text = "\n".join([header, *(f"group {g.index}: {g.describe()}" for g in layout.groups)])
    except Exception as e:
        failure = e
    other, anyone_keeps = differing(
        exchange, text.encode(), lambda: f"{origin(loaded)}\n{text}", failure, what, "form its groups", keeps
    )
    if other is None:
        assert layout is not None
        return layout, anyone_keeps
    rank, told = other
    parts = [one.partition("\n") for one in told]
    origins, lines = [one[0] for one in parts], [parts[r][2].splitlines() for r in (0, rank)]
    at = next((i for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b), min(map(len, lines)))
    here, there = (x[at] if at < len(x) else "nothing more" for x in lines)
    cause = "model, sidcomp.State and checkpoint must be the same on every rank"
    if origins[rank] != origins[0]:
        cause = loaded_otherwise(rank, origins)
    raise rank_error(rank, f"ranks do not agree: rank 0 has [{here}], rank {rank} has [{there}]; {cause}")


def origin(loaded: int | None) -> str:
    """loaded: the step of a checkpoint."""
    return "no checkpoint" if loaded is None else f"a checkpoint of step {loaded}"


def loaded_otherwise(rank: int, origins: Sequence[str]) -> str:
    """origins: by rank."""
    return (
        f"rank 0 has loaded {origins[0]}, rank {rank} {origins[rank]}: load those of one step on every rank, "
        "at the same point, or none"
    )


def differing(
    exchange: Exchange,
    mine: bytes,
    tell: Callable[[], str],
    failure: Exception | None,
    what: str,
    doing: str,
    flag: bool = False,
) -> tuple[tuple[int, list[str]] | None, bool]:
    """Returns None if all ranks pass the same bytes, otherwise the first rank that differs from rank 0, and
    the texts of all ranks; and whether any rank has set its flag. Raises on all ranks if one has failed. All
    ranks must call it.

    tell: returns this rank's text. what: the point in the program, and doing: what a rank does there, for
    errors.
    """
    digest = hashlib.sha256(mine).digest() if failure is None else _FAILED
    told = exchange.tell_all(digest + bytes([flag]), what)
    digests = [one[:-1] for one in told]
    if failure is None and len(set(digests)) == 1:
        return None, any(one[-1] for one in told)
    text = tell() if failure is None else f"{type(failure).__name__}: {failure}"
    texts = _texts(exchange, text, what, failure)
    if _FAILED in digests:
        raise _failed(digests.index(_FAILED), doing, texts)
    return (next(r for r, d in enumerate(digests) if d != digests[0]), texts), False


def together(exchange: Exchange, do: Callable[[], None], what: str) -> None:
    """Calls do(). If it fails on a rank, all ranks raise. All ranks must call it. what: what do() does."""
    failure = None
    try:
        do()
    except Exception as e:
        failure = e
    fine = exchange.tell_all(bytes([failure is None]), f"the step in which every rank must {what}")
    if b"\0" in fine:
        text = f"{type(failure).__name__}: {failure}"
        texts = _texts(exchange, text, "the exchange of error messages", failure)
        raise _failed(fine.index(b"\0"), what, texts)


def _texts(exchange: Exchange, text: str, what: str, failure: Exception | None) -> list[str]:
    """Returns every rank's text. If this rank has failed, raises its failure after the others know of it."""
    try:
        texts = exchange.tell_texts(text, what)
        if failure is not None:
            failure.__dict__["told"] = True
        return texts
    finally:
        if failure is not None:
            raise failure


def known_to_all(error: Exception) -> bool:
    """Whether `agreed` or `together` has raised the error because some ranks had failed, of which all ranks
    were told: then each of them has raised one."""
    return bool(getattr(error, "told", False))


def _failed(rank: int, doing: str, texts: Sequence[str]) -> RankError:
    error = rank_error(rank, f"rank {rank} could not {doing}: {texts[rank]}")
    error.__dict__["told"] = True
    return error


def rank_error(rank: int, text: str) -> RankError:
    """Returns an error that names the rank at fault."""
    error = RankError(text)
    error.rank = rank
    return error


def make_layout(
    p: EngineState,
    shapes: dict[str, tuple[int, ...]],
    kept_groups: Sequence[dict[str, Any]],
    buckets: list[Bucket],
    exchange: Exchange,
    executor: Executor,
) -> Layout:
    """Makes the groups. shapes: those of the model, which rules are about. kept_groups: those of a
    checkpoint, used instead of the settings' rule."""
    settings, regime = p.settings, p.regime
    pieces = [piece for i, bucket in enumerate(buckets) for piece in _pieces(i, bucket)]
    shapes = {**shapes, **{piece.name: piece.shape for piece in pieces}}
    own, dense = settings.assign(shapes), settings.policy.excluded(shapes)
    if kept_groups:
        kept = checkpoint.specs(kept_groups, pieces, len(settings.candidates) + len(settings.made))
        specs = [part for spec in kept for part in spec.split()]
        specs += form_unlisted(specs, pieces, regime, dense, own)
    else:
        specs = form_groups(pieces, regime, dense, own)
    plans = [
        settings.plan(
            sum(piece.numel for piece in spec.pieces),
            spec.pieces[0].dtype,
            spec.candidate,
            regime,
            p.step,
            [piece.matrix for piece in spec.pieces],
            (exchange.rank, exchange.world),
        )
        for spec in specs
    ]
    for choice in {
        plan.choice.label: plan.choice for plan in plans if isinstance(plan, MessagePlan)
    }.values():
        choice.warn(exchange.world)
    # A reduction in place does not report NaN, on which the residual and random numbers of other groups
    # depend. Where an exchange can be given up, its buffers must not be used again.
    nobody_asks = not (exchange.rejoins or any(plan.vectors or not plan.lossless for plan in plans))
    direct = nobody_asks and executor.in_place(settings, exchange)
    groups = [
        Group(i, spec, buckets, plan, direct) for i, (spec, plan) in enumerate(zip(specs, plans, strict=True))
    ]
    executor.check(settings, groups)
    for group in groups:
        executor.prepare(group, exchange.world, p.rollback)
        if settings.full_every and not group.plan.lossless:
            if group.in_messages and not group.message_plan.whole:
                raise UnsupportedError(
                    f"full_every: exchange {group.message_plan.choice.exchange.name!r} keeps slices, which a "
                    "full-precision step does not send: leave full_every out, or choose an exchange that "
                    "keeps the whole vector, such as 'allgather' or 'ring1'"
                )
            full = settings.full_plan(group.n, group.dtype, group.spec.candidate)
            executor.prepare_full(group, full)
    return Layout(buckets, groups, dense)


def _pieces(index: int, bucket: Bucket) -> list[Piece]:
    buffer, offset, out = bucket.buffer, 0, []
    which = shorten(list(bucket.names))
    if buffer.layout is not torch.strided:
        raise UnsupportedError(f"{which} have sparse gradients: construct the module with sparse=False")
    if buffer.dtype not in DTYPES:
        known = ", ".join(DTYPES.values())
        raise UnsupportedError(f"{which} have {buffer.dtype} gradients, not {known}: convert the module")
    if buffer.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{which} are on {buffer.device}: move the module to cpu or cuda")
    kind = (DTYPES[buffer.dtype], buffer.element_size(), str(buffer.device))
    for name, shape, order in zip(bucket.names, bucket.shapes, bucket.orders, strict=True):
        numel = prod(shape)
        out.append(Piece(name, shape, numel, *kind, index, offset, bucket.apart, order))
        offset += numel
    if offset != buffer.numel():
        raise UnsupportedError(
            f"the bucket of {which} has {buffer.numel()} elements, but its parameters have {offset}: complex "
            "gradients are not supported; keep real and imaginary parts as two real parameters"
        )
    return out


def header(p: EngineState, exchange: Exchange) -> str:
    """Describes what all ranks must have in common in addition to the groups. For exchanges that `auto` may
    choose it contains only the names, because nodes may have different sizes."""
    settings, watch = p.settings, p.watch
    auto = settings.auto
    candidates = [
        w.choice.exchange.name if auto and w.choice is not None else w.label for w in settings.candidates
    ]
    # A controller's exchanges depend on these.
    planned = f"groups {settings.groups!r}, search {settings.search}, " if settings.planned else ""
    planned += f"accuracy {settings.accuracy!r}, warmup {settings.warmup}, " if auto else ""
    return (
        f"sidcomp {_core.version}, world {exchange.world}, step {p.step}, seed {settings.seed}, "
        f"checksum_every {settings.checksum_every}, {candidates}, "
        f"{planned}policy {settings.policy.saved()}, full_every {settings.full_every}, "
        f"transport {settings.transport}, nonfinite {'rollback' if p.rollback else settings.nonfinite}, "
        f"follows {'nothing' if watch is None else 'optimizers' + ', scaler' * (watch.scaler is not None)}, "
        f"clip_gradient {settings.clip_gradient:g}"
    )
