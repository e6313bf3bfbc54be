"""state_dict: saves the memories by parameter name, and loads them with the same or another world size."""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp import notices
from sidcomp.address import address
from sidcomp.config.grouping import Order, Piece, Spec, shorten
from sidcomp.config.registry import find_memory
from sidcomp.config.settings import Settings
from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.runtime.block import Block
from sidcomp.runtime.checkpoint_reader import FORMAT, STATE_HEADER, read
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.group import Group
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.members import known, rank_of, size_of

logger = logging.getLogger("sidcomp")


class Kept(NamedTuple):
    """The memory of one parameter: (vectors, elements) float32. `local` ranks, those of a node, share it. If
    `common`, the last vector is what this rank keeps for all ranks. The residual is in units of `rate`, the
    learning rate of the last step; None: no optimizer was followed. order: in which the elements are."""

    values: torch.Tensor
    local: int = 1
    common: bool = False
    rate: float | None = None
    order: Order = ()


Residuals = dict[str, Kept]


def residual_of(g: Group, out: torch.Tensor | None = None, state: Block | None = None) -> torch.Tensor:
    """Returns the contents of the group's memory: (vectors, n) float32 on the CPU. out: one to fill. state:
    the one that holds it; None: the current one."""
    if out is None:
        out = torch.empty(g.plan.vectors, g.n, dtype=torch.float32, device="cpu")
    with g.host_state(state=state) as place:
        g.plan.residual_out(place, place_of(g, out))
    return out


def place_of(g: Group, values: torch.Tensor) -> int:
    return address(values, f"the memory of {g.label()}", torch.float32, g.plan.vectors * g.n)


def _residuals(groups: Iterable[Group], rates: Rates | None, before: bool = False) -> Residuals:
    """before: as they were before the last step, in the units of that time."""
    kept: Residuals = {}
    for g in groups:
        if g.plan.vectors:
            state, factor = (g.states.before, g.stage.marked) if before else (g.state, g.stage.unapplied)
            parts = torch.split(residual_of(g, state=state), [p.numel for p in g.spec.pieces], dim=1)
            how = (g.message_plan.choice.local, g.message_plan.common) if g.in_messages else (1, False)
            for p, part in zip(g.spec.pieces, parts, strict=True):
                rate = rates.rate(p.name) if rates is not None else None
                kept[p.name] = _at_rate(g, Kept(part.clone(), *how, rate, p.order), factor)
    return kept


def save(
    settings: Settings, groups: Sequence[Group], unassigned: Residuals, rates: Rates | None
) -> dict[str, Any]:
    """Returns the memories of an engine's groups. unassigned: those of parameters whose groups have none."""
    residuals = {**unassigned, **_residuals(groups, rates)}
    return {
        "format": FORMAT,
        "version": _core.version,
        **settings.saved(),
        "layout": [_save_group(g) for g in groups],
        "residuals": {name: kept.values for name, kept in residuals.items()},
        "shared": {n: [r.local, r.common] for n, r in residuals.items() if r.local > 1 or r.common},
        "rates": {name: kept.rate for name, kept in residuals.items() if kept.rate is not None},
    }


def _headers(g: Group) -> list[int]:
    """Returns the offsets of the state's parts; there is one, except with exchanges that keep slices."""
    return [at for at, *_ in g.message_plan.shares] if g.in_messages else [0]


def _save_group(g: Group, state: Block | None = None) -> dict[str, Any]:
    """state: the one to save; None: the current one."""
    header = extra = torch.zeros(0, dtype=torch.uint8, device="cpu")
    if not g.direct:
        kept = (state or g.state).tensor
        header = torch.cat([header, *(kept[at : at + STATE_HEADER].cpu() for at in _headers(g))])
        extra = kept[g.states.codec_bytes].cpu().clone()
    pieces = g.spec.pieces
    return {
        "names": list(g.names),
        "shapes": [list(p.shape) for p in pieces],
        **({"orders": [list(map(list, p.order)) for p in pieces]} if any(p.order for p in pieces) else {}),
        "way": g.spec.candidate,
        "header": header,
        "extra": extra,
    }


def go_back_partly(g: Group, names: Collection[str]) -> None:
    """Gives these of a group's parameters back what the group kept of them before the steps that can still be
    discarded. The group has two states."""
    values, before = residual_of(g), residual_of(g, state=g.states.before)
    common = g.in_messages and g.message_plan.common
    first = 0
    for p in g.spec.pieces:
        if p.name in names:
            own = slice(first, first + p.numel)
            values[:, own] = _at_rate(g, Kept(before[:, own], common=common), g.stage.change).values
        first += p.numel
    with g.host_state(write=True) as state:
        g.plan.residual_in(state, place_of(g, values))


class Resume:
    """Memories to be put into new groups: from a loaded state, or from the groups of the layout before."""

    def __init__(self, residuals: Residuals, layout: list[dict[str, Any]], source: dict[str, Any]) -> None:
        self.residuals = residuals
        self.layout = layout
        self.source = source
        self.same_codec = True  # an unchanged group takes over the codec's statistics
        self._adapted = False

    def check_part(self, part: str) -> None:
        """Raises CheckpointError if it was saved by a rank that had another part of the model."""
        saved = self.source.get("part", "")
        if saved != part and self.source["world"]:  # before the first step nobody knew it
            raise CheckpointError(
                f"this is the state of {saved or 'a whole model'}, but this process has "
                f"{part or 'a whole model'}: every rank saves and loads its own"
            )

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError if the parameters of checkpoint and model are not the same."""
        if self._adapted:
            return
        missing, extra, wrong = self._compared(shapes)
        if extra:
            wrong.insert(0, f"the model lacks {shorten(extra)}")
        if missing:
            wrong.insert(0, f"it lacks {shorten(missing)}")
        if wrong:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(wrong)}")

    def adapt(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Keeps what fits a model that averages other parameters now, because some were frozen or released.
        The groups are then made anew. Raises CheckpointError if a shape differs."""
        missing, extra, wrong = self._compared(shapes)
        if wrong:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(wrong)}")
        self._adapted = True
        if not missing and not extra:
            return
        gone = set(extra)
        kept = {key: _without(self.source.get(key, {}), gone) for key in ("residuals", "shared", "rates")}
        groups = [_narrowed(g, gone) for g in self.source["layout"]]
        groups = [g for g in groups if g["names"]]
        self.source = {**self.source, **kept, "layout": groups, "controller": None}
        self.residuals, self.layout = _without(self.residuals, gone), []
        parts = []
        if extra:
            parts.append(f"dropped the residuals of {shorten(extra)}, which the model does not average")
        if missing:
            parts.append(f"started those of {shorten(missing)} from zero")
        logger.warning("strict=False: %s; groups are formed anew", ", and ".join(parts))

    def _compared(self, shapes: dict[str, tuple[int, ...]]) -> tuple[list[str], list[str], list[str]]:
        """Returns the names that the checkpoint lacks, those that the model lacks, and other differences."""
        saved = {
            name: tuple(shape)
            for g in self.source.get("layout", [])
            for name, shape in zip(g["names"], g["shapes"], strict=True)
        }
        if not saved:
            return [], [], []
        here = {name: shape for name, shape in shapes.items() if 0 not in shape}
        wrong = [
            f"{n} is {list(saved[n])} in it and {list(here[n])} in the model"
            for n in here
            if n in saved and here[n] != saved[n]
        ]
        return [n for n in here if n not in saved], [n for n in saved if n not in here], wrong

    def fit(self, layout: Layout) -> None:
        """Raises CheckpointError if a group's memory does not have the saved number of vectors or
        elements."""
        for g in layout.groups:
            own = 0 if g.direct else g.plan.vectors - (g.in_messages and g.message_plan.common)
            for p in g.spec.pieces:
                kept = self.residuals.get(p.name)
                if own and kept is not None and kept.values.shape != (own + kept.common, p.numel):
                    raise CheckpointError(
                        f"residuals[{p.name!r}] of the checkpoint has shape {list(kept.values.shape)}; "
                        f"memory {g.plan.memory!r} keeps {own} vectors of {p.numel} elements: use the memory "
                        "that it was saved with"
                    )

    def place(self, layout: Layout, exchange: Exchange, rates: Rates | None) -> None:
        """Puts the saved memories into new groups, in units of the current rates. If something fails, it
        raises only after the ranks that wait for this one have its part; the groups must not be used then."""
        failure: Exception | None = None
        saved = {tuple(x["names"]): x for x in self.layout}
        for g in layout.groups:
            if g.direct:
                continue
            values: torch.Tensor | None = None
            local = g.message_plan.choice.local if g.in_messages else 1
            # Some ranks of a node may have nothing to put in, but all take part in the sum.
            if g.plan.vectors and (local > 1 or any(p.name in self.residuals for p in g.spec.pieces)):
                try:
                    values = self._values(g, exchange.world, rates)
                except Exception as e:  # the other ranks of the node wait for this one's part
                    failure, values = failure or e, _zeros(g.plan.vectors, g.n)
                if local > 1:
                    first = exchange.rank // local * local
                    values = exchange.sum_among(list(range(first, first + local)), values)
            try:
                self._put(g, values, saved.get(tuple(g.names)))
            except Exception as e:
                failure = failure or e
        if failure is not None:
            raise failure

    def _put(self, g: Group, values: torch.Tensor | None, old: dict[str, Any] | None) -> None:
        """Fills a group's state. values: the contents of its memory, if there are any. old: the saved group
        of the same parameters."""
        if values is not None:
            with g.host_state(write=True) as state:
                g.plan.residual_in(state, place_of(g, values))
        if not self.same_codec or old is None or _orders(old) != [p.order for p in g.spec.pieces]:
            return
        if old["way"] == g.spec.candidate and len(old["header"]):
            header, places = old["header"].to(g.device), _headers(g)
            if len(header) != STATE_HEADER * len(places):
                return
            for at, own in zip(places, header.split(STATE_HEADER), strict=True):
                for first, end in _core.state_lasting:  # residual_in has written the rest
                    g.state.tensor[at + first : at + end] = own[first:end]
            extra = old["extra"]
            if len(extra) == g.plan.extra_bytes:
                g.state.tensor[g.states.codec_bytes] = extra.to(g.device)

    def _values(self, g: Group, world: int, rates: Rates | None) -> torch.Tensor:
        """Returns the new contents of the group's memory: (vectors, n)."""
        kept = [self.residuals.get(p.name) for p in g.spec.pieces]
        parts = [
            _zeros(g.plan.vectors, p.numel)
            if r is None
            else _reordered(
                _fit(g, _at_rate(g, r, 1.0 if rates is None else rates.since(p.name, r.rate)), world), r, p
            )
            for p, r in zip(g.spec.pieces, kept, strict=True)
        ]
        return torch.cat(parts, dim=1).contiguous()

    def rescale(self, factor: float) -> None:
        self.residuals = rescaled(self.residuals, factor)
        self.source = {**self.source, "residuals": {name: r.values for name, r in self.residuals.items()}}


def _zeros(vectors: int, n: int) -> torch.Tensor:
    """Returns the contents of a memory before the first step."""
    return torch.zeros(vectors, n, dtype=torch.float32, device="cpu")


def _orders(group: dict[str, Any]) -> list[Order]:
    """Returns in which order the elements of a saved group's parameters are."""
    saved = group.get("orders") or [()] * len(group["names"])
    return [tuple((d, size) for d, size in order) for order in saved]


def _reordered(values: torch.Tensor, kept: Kept, piece: Piece) -> torch.Tensor:
    """Returns the elements in the order that they have in the piece: a module may have been given another
    memory format since, such as channels_last."""
    was, now = (order or tuple(sorted(kept.order or piece.order)) for order in (kept.order, piece.order))
    if was == now:
        return values
    if sorted(was) != sorted(now):
        raise CheckpointError(
            f"residuals[{piece.name!r}] of the checkpoint has (dimension, size) {sorted(was)}, the parameter "
            f"{sorted(now)}: give the module the shapes that it was saved with"
        )
    apart = values.view(len(values), *(size for _, size in was))
    return apart.permute(0, *(1 + was.index(one) for one in now)).flatten(1)


def _without(of: dict[str, Any], gone: set[str]) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name not in gone}


def _narrowed(group: dict[str, Any], gone: set[str]) -> dict[str, Any]:
    """Returns a saved group without some parameters, and without the statistics of the whole group."""
    every = zip(group["names"], group["shapes"], _orders(group), strict=True)
    kept = [one for one in every if one[0] not in gone]
    none = group["header"][:0]
    return {
        **group,
        "names": [name for name, *_ in kept],
        "shapes": [shape for _, shape, _ in kept],
        "orders": [order for *_, order in kept],
        "header": none,
        "extra": none,
    }


def _fit(g: Group, kept: Kept, world: int) -> torch.Tensor:
    """Converts a saved memory to the form that this group's exchange uses: with or without a last vector that
    is kept for all ranks, and for this rank alone or for its node. The sum over the ranks does not change."""
    values, was = kept.values, kept.local
    local, common = (g.message_plan.choice.local, g.message_plan.common) if g.in_messages else (1, False)
    own = len(values) - kept.common
    if kept.common and not common:
        values = torch.cat([values[:1] + world // was * values[-1:], values[1:own]])
    if was != local:
        values = torch.cat([values[:own] * (was / local), values[own:]])
    if common and not kept.common:
        values = torch.cat([values, _zeros(1, values.shape[1])])
    return values


def _at_rate(g: Group, kept: Kept, factor: float) -> Kept:
    """Multiplies the residual by `factor`; momenta do not change."""
    if factor == 1:
        return kept
    own = len(kept.values) - kept.common
    residuals = min(owed(g.plan.memory), own)
    factors = torch.ones(len(kept.values), 1, dtype=torch.float32, device="cpu")
    factors[:residuals] = factor
    factors[own:] = factor
    return kept._replace(values=kept.values * factors)


def rescaled(residuals: Residuals, factor: float) -> Residuals:
    return {name: r._replace(values=r.values * factor) for name, r in residuals.items()}


def _orders_of(source: dict[str, Any]) -> dict[str, Order]:
    groups = source["layout"]
    return {name: order for g in groups for name, order in zip(g["names"], _orders(g), strict=True)}


def _kept(source: dict[str, Any]) -> Residuals:
    shared, rates, orders = source.get("shared", {}), source.get("rates", {}), _orders_of(source)
    kept: Residuals = {}
    for name, values in source["residuals"].items():
        local, common = shared.get(name, (1, False))
        kept[name] = Kept(values, local, common, rates.get(name), orders[name])
    return kept


def carry(groups: Sequence[Group], rates: Rates | None) -> Resume:
    """Returns the memories of a layout's groups, for the groups of the next layout. groups: may be none."""
    return Resume(_residuals(groups, rates), [_save_group(g) for g in groups], {})


def carry_before(groups: Sequence[Group]) -> Resume:
    """The same, as they were before the steps that can still be discarded."""
    return Resume(
        _residuals(groups, None, before=True), [_save_group(g, g.states.before) for g in groups], {}
    )


def specs(groups: Sequence[dict[str, Any]], pieces: Sequence[Piece], candidates: int) -> list[Spec]:
    """Returns the groups of a checkpoint for the current buckets. candidates: the number of ways to send a
    group."""
    by_name = {p.name: p for p in pieces}
    for i, g in enumerate(groups):
        _check_candidate(i, g, candidates)
        own = [by_name[n] for n in g["names"]]
        if odd := [p for p in own if (p.dtype, p.device) != (own[0].dtype, own[0].device)]:
            raise CheckpointError(
                f"layout[{i}] of the checkpoint is a group of {own[0].name}, {own[0].dtype} on "
                f"{own[0].device}, and {odd[0].name}, {odd[0].dtype} on {odd[0].device}, but a group has one "
                "dtype and one device: give the module the dtypes and devices that it was saved with"
            )
    return [Spec(g["way"], [by_name[n] for n in g["names"]]) for g in groups]


def _check_candidate(i: int, group: dict[str, Any], candidates: int) -> None:
    if group["way"] >= candidates:
        raise CheckpointError(
            f"layout[{i}]['way'] of the checkpoint is {group['way']}, but this State has {candidates} "
            "ways to send a group: make it with the codec and policy that it was saved with"
        )


def load(
    settings: Settings,
    parent: dist.ProcessGroup | None,
    given: "dict[str, Any] | Sequence[dict[str, Any]]",
    redistribute: str,
    place: tuple[int, int] | None = None,
) -> Resume:
    """Checks a state, or those of all old ranks. parent: the model's process group; None: the default one.
    place: this rank and the number of ranks, if no process group says so: the run may have lost some."""
    if redistribute not in ("sum", "mean"):
        raise ArgumentError(f'redistribute={redistribute!r}: give "sum" or "mean"')
    if place is None and (parent is None or known(parent)) and not dist.is_initialized():
        raise CheckpointError(
            "load_state_dict needs the process group: call torch.distributed.init_process_group first"
        )
    rank, world = place or (rank_of(parent), size_of(parent))
    all_given = list(given) if isinstance(given, list | tuple) else [given]
    if not all_given:
        raise CheckpointError("the list of states is empty: pass this rank's state, or all old ranks' states")
    several = len(all_given) > 1
    states = [read(s, f"states[{i}]: " if several else "") for i, s in enumerate(all_given)]
    old = states[0]["world"]
    if old == 0:  # saved before the first step: the memories are empty
        return Resume({}, [], states[0])
    own = [s for s in states if old == world and s["rank"] == rank]
    if len(own) != 1:
        _check_complete(states, old, world, rank, may_lack=place is not None and several)
        if old == world:  # this rank's own is missing, and the others keep theirs
            own = [_redistributed(states, world, rank, math.inf)]
        else:
            own = [_redistributed(states, world, rank, old if redistribute == "mean" else world)]
            logger.warning("residuals of %d ranks were redistributed over %d (%s)", old, world, redistribute)
    source = own[0]
    resume = Resume(_kept(source), source["layout"], source)
    resume.same_codec = old == world
    _compare(settings, resume)
    if not settings.policy.rules:
        for i, g in enumerate(resume.layout):
            _check_candidate(i, g, len(settings.candidates))
    if not source["settled"]:
        resume.layout = []  # DDP was about to rebuild its buckets, and sidcomp its groups
    return resume


def _redistributed(states: Sequence[dict[str, Any]], world: int, rank: int, parts: float) -> dict[str, Any]:
    """Returns the state of one new rank: the sum of the old ranks' residuals, in rank order, divided by
    `parts`, and the mean of their momenta."""
    states = sorted(states, key=lambda s: int(s["rank"]))
    first = states[0]
    residuals = {}
    for name, (_, local, common, *_) in _kept(first).items():
        total = torch.stack([s["residuals"][name].double() for s in states]).sum(dim=0)
        # As if every rank had kept its own: a node's counts for each of its ranks, and a common one for all
        # ranks.
        if common:
            total = torch.cat([total[:1] + len(states) // local * total[-1:], total[1:-1]])
        total = total * local
        over = torch.full((len(total), 1), float(parts), dtype=torch.float64, device="cpu")
        over[owed(first["memory"]) :] = len(states)
        residuals[name] = (total / over).float()
    return {**first, "world": world, "rank": rank, "residuals": residuals, "shared": {}}


def owed(name: str) -> int:
    """Returns how many of a memory's vectors are residuals; the others are momenta."""
    memory = find_memory(name)
    return 1 if "feedback" in memory.traits or not memory.momentum else 0


def _check_complete(
    states: Sequence[dict[str, Any]], old: int, world: int, rank: int, may_lack: bool
) -> None:
    """may_lack: some of the old ranks had ended when the others saved, or were late."""
    ranks = sorted(s["rank"] for s in states)
    if old == world and len(states) == 1:
        raise CheckpointError(
            f"this is the state of rank {ranks[0]}, but this process is rank {rank}: every rank saves and "
            f"loads its own; pass that of rank {rank}, or a list with those of all {old} ranks"
        )
    if any(s["world"] != old for s in states):
        raise CheckpointError(
            f"the states are of different runs, with world sizes {sorted({s['world'] for s in states})}: "
            "pass those of one run"
        )
    lack = [r for r in range(old) if r not in ranks]
    if may_lack and lack and len(set(ranks)) == len(ranks):
        logger.warning("the states of old ranks %s are missing: what they had not sent is lost", lack)
    elif ranks != list(range(old)):
        what = f"those of ranks {lack} are missing" if lack else f"ranks {ranks} are given more than once"
        raise CheckpointError(
            f"the states were saved by {old} ranks and are loaded by {world}: pass load_state_dict a list "
            f"with the states of all {old} ranks ({what})"
        )
    if len({s["step"] for s in states}) > 1 and not may_lack:
        raise CheckpointError(
            f"the states are of different steps, {sorted({s['step'] for s in states})}: pass those of one "
            "step"
        )
    names = set(states[0]["residuals"])
    for s in states[1:]:
        if odd := sorted(names ^ set(s["residuals"])):
            raise CheckpointError(
                f"the states are of different models: {shorten(odd)} are not in all of them; pass those of "
                "one run"
            )
    first = states[0]
    for i, s in enumerate(states[1:], 1):
        if _orders_of(s) != _orders_of(first):
            raise CheckpointError(
                f"the states are of different models: the parameters of states[0] and states[{i}] have other "
                "memory formats; pass those of one run"
            )
        for key in ("memory", "shared"):
            if s[key] != first[key]:
                raise CheckpointError(
                    f"the states are of different runs: {key} is {first[key]!r} in states[0] and {s[key]!r} "
                    f"in states[{i}]; pass those of one run"
                )
        for n, values in s["residuals"].items():
            if values.shape != first["residuals"][n].shape:
                raise CheckpointError(
                    f"the states are of different models: residuals[{n!r}] has shape "
                    f"{list(first['residuals'][n].shape)} in states[0] and {list(values.shape)} in "
                    f"states[{i}]; pass those of one run"
                )


def _compare(settings: Settings, resume: Resume) -> None:
    """Compares the settings. Another codec, seed or grouping may take over the residuals, but not bit for
    bit, and a warning says so. Another memory may not: CheckpointError."""
    saved, mine = resume.source, settings.saved()
    if saved["memory"] != mine["memory"]:
        raise CheckpointError(
            f"the state is of memory {saved['memory']!r}, this State has {mine['memory']!r}: "
            "use the same memory"
        )
    changed = [k for k in mine if mine[k] != saved.get(k, mine[k])]
    if changed:
        if {"codec", "parameters", "policy"} & set(changed):
            resume.same_codec = False
        chosen = {"codec", "parameters", "exchange"} if settings.planned else set()  # what a plan depends on
        if ({"groups", "exclude", "policy"} | chosen) & set(changed):
            resume.layout = []
        what = ", ".join(f"{k} {saved[k]!r} -> {mine[k]!r}" for k in changed)
        notices.log(
            f"resuming with other settings ({what}): the residuals are taken over, but not bit for bit"
        )
