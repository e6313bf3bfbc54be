"""Checks the arguments of a State."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sidcomp import core as _core
from sidcomp.config import accuracy as accuracy_of
from sidcomp.config import schedule
from sidcomp.config.exchange_choice import ExchangeChoice, MessagePlan
from sidcomp.config.grouping import DENSE, PLANNED, Groups, Regime, parse_groups
from sidcomp.config.kinds import is_list, is_number, is_whole
from sidcomp.config.policy import Exclude, Policy, Rules, Shapes, parse_exclude, parse_rules
from sidcomp.config.registry import Codec, check_ranks, find_codec, find_exchange, find_memory, resolve
from sidcomp.config.schedule import Parameters, Schedule, Setting
from sidcomp.errors import ArgumentError, ParameterError, UnsupportedError
from sidcomp.suggestion import suggestion

Candidates = Sequence[str | tuple[str, Mapping[str, Setting]]]

# The codec of a State that names none, beside SGD.
DEFAULT = accuracy_of.allowed("dense", of_adaptive=False)[0]
# For payloads that an all-gather would take to every rank.
EXCHANGES = ("twoshot", "hierarchical")

# This replaces the all-gather if no exchange was named and it sends fewer bytes, as it does from three ranks
# on. It gives the mean of the ranks' gradients as the all-gather does, but encodes it a second time.
INSTEAD = ("twoshot",)
FEWER = 0.9  # of the bytes: what saves less is not worth a second round

TRANSPORTS = ("torch", "native")
NONFINITE = ("rollback", "drop")

WARMUP = 30  # steps of each stage, unless the program says otherwise
MERGECOMP = (2, 0.01)  # Y, what MergeComp recommends, and alpha, for which it gives no number

PLAIN = Regime("bucket", (DENSE,))


@dataclass(frozen=True)
class Candidate:
    """One way to send a group: a codec, a memory, their parameters, and the exchange, if one was named."""

    codec: Codec
    memory: Codec
    parameters: Parameters
    choice: ExchangeChoice | None = None

    @property
    def in_messages(self) -> bool:
        """Whether its payloads travel in point-to-point messages."""
        return self.choice is not None and not self.choice.native

    @property
    def density(self) -> float:
        """The density after the last change of its schedule; 0 if the codec has none."""
        own = next((p.default for p in self.codec.parameters if p.name == "density"), 0.0)
        return float(schedule.last(self.parameters).get("density", own))

    def of(self, entry: Codec) -> Parameters:
        """Those of the parameters that are the codec's, or the memory's."""
        return {p.name: self.parameters[p.name] for p in entry.parameters if p.name in self.parameters}

    @property
    def encoding(self) -> str:
        """The codec with its parameters."""
        return " ".join([self.codec.name, *(f"{k}={v}" for k, v in self.parameters.items())])

    @property
    def label(self) -> str:
        over = f" over {self.choice.label}" if self.choice is not None and self.in_messages else ""
        return self.encoding + over

    @property
    def brief(self) -> "Candidate":
        """The same for a message: its texts have long schedules cut short."""
        own: Parameters = {k: v.brief if isinstance(v, Schedule) else v for k, v in self.parameters.items()}
        return replace(self, parameters=own)

    def saved(self) -> dict[str, Any]:
        return {
            "codec": self.codec.name,
            "memory": self.memory.name,
            "parameters": schedule.plain(self.parameters),
            "exchange": self.choice.saved() if self.choice is not None else None,
        }

    def check(self) -> None:
        """Raises UnsupportedError if codec and exchange cannot be combined. The core decides that, and does
        not need the world size."""
        if self.choice is None:
            return
        alone = {k: v for k, v in self.choice.parameters.items() if k not in ("rows", "ranks_per_node")}
        values = {**schedule.last(self.parameters), **alone}
        name = self.choice.exchange.name
        _core.Exchange(name, self.codec.name, self.memory.name, 1, "float32", 0, 1, values)


@dataclass(frozen=True)
class Settings:
    auto: bool  # codec="auto": the controller chooses a candidate, or dense, for each group
    candidates: tuple[Candidate, ...]
    groups: str | int | list[list[str]]
    policy: Policy
    seed: int
    checksum_every: int
    isa: str | None
    named: bool = True  # the caller named the memory; else it is the codec's own
    full_every: int | Schedule = 0  # 0: never
    warmup: int = 0  # steps of each stage in which codec="auto" lowers the density
    transport: str = "torch"  # what enqueues the collectives of CUDA groups
    nonfinite: str | None = None  # see State; None: "drop" until a scaler is followed
    search: tuple[int, float] = MERGECOMP  # Y and alpha of groups="mergecomp"
    free: bool = False  # the caller named no codec and no candidates, so they may suit the optimizer
    accuracy: str = "dense"  # which codecs may be chosen then
    adaptive: bool = False  # they suit Adam and its relatives
    clip_gradient: float = 0.0  # over sqrt(ranks): the largest norm of a rank's gradient; 0: any
    gathers: bool = False  # no exchange takes the place of an all-gather
    made: list[Candidate] = field(
        default_factory=list
    )  # the policy's combinations, numbered after `candidates`

    @classmethod
    def parse(
        cls,
        codec: str | None,
        parameters: Parameters,
        *,
        memory: str | None = None,
        groups: Groups | None = None,
        seed: int = 0,
        exclude: Exclude = (),
        checksum_every: int = 0,
        isa: str | None = None,
        candidates: Candidates | None = None,
        policy: Rules = (),
        full_every: int | Schedule = 0,
        warmup: int = 0,
        exchange: str | Sequence[str] | None = None,
        transport: str = "torch",
        nonfinite: str | None = None,
        Y: int | None = None,
        alpha: float | None = None,
        accuracy: str | None = None,
        adaptive: bool = False,
        clip_gradient: float = 0.0,
    ) -> "Settings":
        auto = codec == "auto"
        free = not parameters and (codec is None or (auto and candidates is None))
        _check_values(
            seed=seed, checksum_every=checksum_every, isa=isa, full_every=full_every,
            clip_gradient=clip_gradient, warmup=warmup, transport=transport, nonfinite=nonfinite,
        )  # fmt: skip
        accuracy = _accuracy(accuracy, free, memory)
        _check_auto(codec, candidates, warmup, groups)
        groups = ("auto" if auto else "bucket") if groups is None else groups
        if codec is None:
            default = accuracy_of.allowed(accuracy, adaptive)[0] if free else DEFAULT
            codec, parameters = _completed(*default, parameters)
        parameters = dict(parameters)
        choices = ExchangeChoice.parse(_exchange_names(exchange, codec), parameters)
        if auto:
            listed = accuracy_of.candidates(accuracy, adaptive) if candidates is None else candidates
            chosen = _candidates(listed, memory, parameters, given=candidates is not None)
            chosen += _over(choices, chosen, named=exchange is not None)
        else:
            chosen = (Candidate(*resolve(codec, memory, parameters), *choices),)
        settings = cls(
            auto, chosen, parse_groups(groups), _policy(exclude, policy),
            seed, checksum_every, isa, memory is not None, full_every, warmup, transport, nonfinite,
            _search(groups, Y, alpha), free, accuracy, adaptive, float(clip_gradient),
        )  # fmt: skip
        settings._check_groups()
        for candidate in range(len(chosen)):  # the core checks ranges, and whether this processor has the isa
            settings.plan(1, "float32", candidate)
        settings._check_rules()
        return settings

    def _check_groups(self) -> None:
        """Checks what planned groups cannot have."""
        if not self.planned:
            return
        if several := [c.codec.name for c in self.candidates if c.codec.reductions]:
            raise ArgumentError(
                f"codec {several[0]!r} needs several reductions per step, which "
                f'groups={self.groups!r} cannot plan: choose groups="bucket" or another codec'
            )
        if self.clip_gradient:
            raise ArgumentError(
                f"clip_gradient does not work with groups={self.groups!r}: planned groups leave in "
                'backward(), and this norm is known only after it. Choose groups="bucket" or "model"'
            )
        if self.full_every:
            raise ArgumentError(
                f"full_every does not work with groups={self.groups!r}, which are planned by measured "
                "steps: full-precision steps would change their times. Find the groups in a run without it "
                'and give them to the next one: groups=[g["names"] for g in state.plan_report()["groups"]]. '
                'Or choose groups="bucket"'
            )

    def _check_rules(self) -> None:
        """Checks that the codecs and memories in use have what the policy sets, and that it is in range."""
        first, rules = self.candidates[0], self.policy.rules
        names = {first.codec.name} | {c["codec"] for _, c in rules if "codec" in c}
        memories = {first.memory.name} | {c["memory"] for _, c in rules if "memory" in c}
        entries = [*map(find_codec, sorted(names)), *map(find_memory, sorted(memories))]
        known = {"codec", "memory"} | {p.name for entry in entries for p in entry.parameters}
        if len({find_memory(m).momentum for m in memories}) > 1:
            raise ArgumentError(
                f"policy: some of the memories {', '.join(sorted(memories))} hold the momentum, and others "
                "leave it to the optimizer: choose memories of one kind for all parameters"
            )
        for i, (rule, changes) in enumerate(rules):
            if self.planned and i not in self.policy.dense:
                raise ArgumentError(
                    f"policy: {rule!r} sets {changes}, but groups={self.groups!r} are planned with the same "
                    'settings for all parameters: choose groups="bucket", or set only "none"'
                )
            if unknown := sorted(set(changes) - known):
                raise ParameterError(
                    f"policy: {rule!r} sets {', '.join(map(repr, unknown))}, but "
                    f"{', '.join(e.name for e in entries)} have: {', '.join(sorted(known))}"
                    f"{suggestion(unknown[0], known)}"
                )
            self.combined((i,))

    @property
    def planned(self) -> bool:
        """Whether a controller finds the groups during training."""
        return self.groups in PLANNED

    @property
    def exact(self) -> bool:
        """Whether a plan is given up that keeps something back for later steps."""
        return self.auto and self.accuracy == "exact"

    @property
    def lossy(self) -> bool:
        """Whether a codec that compresses was asked for."""
        return any(not candidate.codec.lossless for candidate in self.candidates)

    @property
    def momentum(self) -> bool:
        """Whether the memory holds the momentum, also for dense groups, so the optimizer must have none."""
        return self.candidates[0].memory.momentum

    @property
    def gain(self) -> float:
        """How many times as large as a gradient may be what the optimizer is handed: 1 / (1 - momentum) for a
        memory that hands it velocities, else 1. An average of gradients is no larger than they are."""
        first = self.candidates[0]
        if not self.momentum or "feedback" not in first.memory.traits:
            return 1.0
        own = {p.name: p.default for p in first.memory.parameters}
        return 1 / (1 - float(schedule.last({**own, **first.parameters})["momentum"]))

    @property
    def start(self) -> Regime:
        """The regime in which training begins."""
        return PLAIN if self.planned else Regime(self.groups)

    def candidate(self, index: int) -> Candidate:
        return (
            self.candidates[index]
            if index < len(self.candidates)
            else self.made[index - len(self.candidates)]
        )

    def combined(self, which: tuple[int, ...]) -> Candidate:
        """The first candidate, changed by these rules of the policy one after the other."""
        first = self.candidates[0]
        codec, memory, parameters = first.codec.name, first.memory.name, dict(first.parameters)
        for i in which:
            changes = self.policy.rules[i][1]
            if "codec" in changes:
                codec = changes["codec"]
                memory = memory if self.named else self._own_memory(codec, memory)
            memory = changes.get("memory", memory)
            parameters |= {k: v for k, v in changes.items() if k not in ("codec", "memory")}
        tables = (*find_codec(codec).parameters, *find_memory(memory).parameters)
        own = {p.name: parameters[p.name] for p in tables if p.name in parameters}
        return Candidate(*resolve(codec, memory, own), first.choice)

    def _own_memory(self, codec: str, memory: str) -> str:
        """The memory of a codec that the policy names, unless only one of the two holds the momentum."""
        own = find_memory(find_codec(codec).memory)
        return own.name if own.momentum == self.momentum else memory

    def assign(self, shapes: Shapes) -> dict[str, int]:
        """The candidates of parameters that the policy matches. Their numbers depend only on the model."""
        matches = {name: which for name, which in self.policy.matches(shapes).items() if which}
        combinations = sorted(set(matches.values()))
        self.made[:] = [self.combined(which) for which in combinations]
        return {name: len(self.candidates) + combinations.index(which) for name, which in matches.items()}

    @property
    def scheduled(self) -> bool:
        """Whether a parameter of a candidate changes during training."""
        return any(len(schedule.steps(candidate.parameters)) > 1 for candidate in self.candidates)

    def next_change(self, step: int, regime: Regime) -> float:
        """The first iteration after `step` at which a scheduled parameter of this regime's groups changes;
        infinity if none does."""
        used = [self.candidate(i) for i in regime.candidates if i != DENSE]
        used += self.made if used else []
        marks = {since for since, _ in regime.floors}
        for candidate in used:
            own = candidate.of(candidate.memory) if regime.final else candidate.parameters
            marks.update(schedule.steps(own))
        if regime.flush or self.momentum:  # dense groups have the first one's memory, too
            marks.update(schedule.steps(self.candidates[0].of(self.candidates[0].memory)))
        return min((mark for mark in marks if mark > step), default=math.inf)

    def plan(
        self,
        n: int,
        dtype: str,
        candidate: int,
        regime: Regime = PLAIN,
        step: int = 0,
        shapes: Sequence[tuple[int, int]] | None = None,
        place: tuple[int, int] | None = None,
    ) -> "_core.Plan | MessagePlan":
        """The plan of a group of n elements in iteration `step`. shapes: (elements, columns) of each tensor.
        place: rank and world size, if they are known."""
        if candidate == DENSE:
            first = self.candidates[0]
            if not (regime.flush or self.momentum):
                return _core.Plan("none", "none", n, dtype, {}, self.isa)
            values = schedule.at(first.parameters, step)
            return self._memory_plan(n, dtype, first.memory, values, regime.flush)
        w = self.candidate(candidate)
        values = schedule.at(w.parameters, step)
        if regime.final:
            values |= schedule.last(w.of(w.codec))
        floor = regime.floor(step)
        if floor and w.density and not isinstance(w.parameters.get("density"), Schedule):
            values["density"] = max(float(values.get("density", w.density)), floor)
        w.check()
        if w.choice is not None and w.in_messages and place is not None:
            return MessagePlan(w.choice, w.codec.name, w.memory.name, n, dtype, values, place, self.isa)
        plan = _core.Plan(w.codec.name, w.memory.name, n, dtype, values, self.isa, shapes=shapes)
        if place is not None:
            check_ranks(plan, place[1])
            if (choice := self.instead(w, plan, values, place[1])) is not None:
                return MessagePlan(choice, w.codec.name, w.memory.name, n, dtype, values, place, self.isa)
        return plan

    def instead(
        self, candidate: Candidate, plan: _core.Plan, values: Mapping[str, Setting], world: int
    ) -> ExchangeChoice | None:
        """The exchange that a group takes in place of the all-gather, if none was named and this one sends
        fewer bytes, by the core's own statements, and keeps what the second encoding loses: codecs of
        great variance, without a memory, would multiply it. It is the same on all ranks."""
        named = candidate.choice is not None or self.auto or self.gathers
        # Full-precision steps need whole vectors. An unbiased sparse codec draws the elements at random, and
        # those of the mean would mostly be zeros.
        unfit = bool(self.full_every) or {"sparse", "unbiased"} <= candidate.codec.traits
        if named or plan.linear or unfit:
            return None
        least, best = FEWER * (world - 1) * plan.payload_bytes, None
        for name in INSTEAD:
            try:
                x = _core.Exchange(
                    name, plan.codec, plan.memory, plan.n, plan.dtype, 0, world, values, self.isa
                )
            except (ParameterError, UnsupportedError):  # it does not take this codec or memory
                continue
            if x.sent_bytes < least and x.vectors > plan.vectors:
                least, best = x.sent_bytes, ExchangeChoice(find_exchange(name))
        return best

    def full_plan(self, n: int, dtype: str, candidate: int) -> _core.Plan:
        """The plan of the full-precision steps, which also send the residual."""
        w = self.candidate(candidate)
        return self._memory_plan(n, dtype, w.memory, schedule.last(w.parameters), flush=True)

    def _memory_plan(
        self, n: int, dtype: str, memory: Codec, values: Mapping[str, Setting], flush: bool
    ) -> _core.Plan:
        """A plan without a codec. values: those of the memory, among others."""
        own = {p.name: values[p.name] for p in memory.parameters if p.name in values}
        return _core.Plan("none", memory.name, n, dtype, own, self.isa, flush)

    def full(self, step: int) -> bool:
        """Whether iteration `step`, counted from 0, is a full-precision step."""
        every = self.full_every.at(step) if isinstance(self.full_every, Schedule) else self.full_every
        return bool(every) and step % int(every) == 0

    def saved(self) -> dict[str, Any]:
        """The settings that determine the bits of a run, in plain types."""
        first = self.candidates[0].saved()
        return {
            "codec": "auto" if self.auto else first["codec"],
            "memory": first["memory"],
            "parameters": {"candidates": [w.saved() for w in self.candidates]}
            if self.auto
            else first["parameters"],
            "seed": self.seed,
            "groups": self.groups,
            "exclude": list(self.policy.exclude),
            "policy": self.policy.saved(),
            "warmup": self.warmup if self.auto else 0,
            "exchange": None if self.auto else first["exchange"],
            "full_every": self.full_every.plain if isinstance(self.full_every, Schedule) else self.full_every,
        }


def _is_count(x: object) -> bool:
    return is_whole(x) and int(x) >= 0  # type: ignore[call-overload,no-any-return,unused-ignore]


# Maps the name of an argument to a test of its value, and to the advice that a wrong value gets.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (lambda x: _is_count(x) and x < 2**64, "give a whole number from 0 to 2**64 - 1"),
    "checksum_every": (_is_count, "give a number of steps, or 0 for never"),
    "isa": (
        lambda x: x is None or isinstance(x, str),
        'give the name of an instruction set, such as "avx2", or "auto" for the best',
    ),
    "full_every": (_is_count, "give a number of steps, or 0 for never"),
    "clip_gradient": (lambda x: is_number(x) and 0 <= x < math.inf, "give a norm above 0, or 0 for none"),
    "warmup": (_is_count, "give a number of steps, or 0 for none"),
    "transport": (lambda x: x in TRANSPORTS, f"choose one of {', '.join(TRANSPORTS)}"),
    "nonfinite": (lambda x: x is None or x in NONFINITE, f"choose one of {', '.join(NONFINITE)}, or None"),
}


def _check_values(**values: Any) -> None:
    for name, value in values.items():
        right, advice = _VALUES[name]
        scheduled = name == "full_every" and isinstance(value, Schedule)
        for x in [x for _, x in value.marks] if scheduled else [value]:
            if not right(x):
                raise ArgumentError(f"{name}={x!r}: {advice}")


def _policy(exclude: Exclude, policy: Rules) -> Policy:
    rules = parse_rules(policy)
    dense = (i for i, (_, r) in enumerate(rules) if "codec" in r and find_codec(r["codec"]).lossless)
    return Policy(parse_exclude(exclude), rules, frozenset(dense))


def _check_auto(codec: str | None, candidates: Candidates | None, warmup: int, groups: Groups | None) -> None:
    """Checks what only codec="auto" has, and what it cannot have."""
    auto = codec == "auto"
    if candidates is not None and not auto:
        raise ArgumentError(f'candidates are for codec="auto"; the codec is {codec!r}: leave them out')
    if warmup not in (0, WARMUP) and not auto:
        raise ArgumentError(f'warmup={warmup} is for codec="auto"; the codec is {codec!r}: leave it out')
    if auto and groups not in (None, "auto"):
        raise ArgumentError(
            f'codec="auto" finds the groups itself: leave groups={groups!r} out, or name a codec'
        )


def _completed(codec: str, defaults: Mapping[str, Any], given: Parameters) -> tuple[str, Parameters]:
    """The default codec, with its own parameters where none are given. A ratio takes the density's place."""
    own = {k: v for k, v in defaults.items() if k != "density" or "ratio" not in given}
    return codec, {**own, **given}


def _accuracy(accuracy: str | None, free: bool, memory: str | None) -> str:
    """Checks what limits sidcomp's own choice. free: it may choose."""
    if accuracy is not None and not free:
        raise ArgumentError(
            f"accuracy={accuracy!r} limits what sidcomp chooses by itself, but the codec, its parameters "
            "or the candidates are named: leave accuracy out"
        )
    accuracy = "dense" if accuracy is None else accuracy
    accuracy_of.check(accuracy)
    if accuracy == "exact" and memory is not None and "feedback" not in find_memory(memory).traits:
        raise ArgumentError(
            f'accuracy="exact" with memory={memory!r}: "lossless" has no room for some small elements in '
            "some steps, and only a residual sends them later: leave memory out"
        )
    return accuracy


def _exchange_names(exchange: object, codec: str) -> Sequence[str]:
    """The names that `exchange` gives. Without one these are the codec's own choice."""
    if exchange is None:
        return EXCHANGES if codec == "auto" else ()
    if isinstance(exchange, str):
        return (exchange,)
    if codec != "auto":
        raise ArgumentError(
            f'exchange={exchange!r}: only codec="auto" takes a list; for {codec!r} name one exchange'
        )
    if not is_list(exchange):
        raise ArgumentError(
            f"exchange={exchange!r}: give a name, or a list of names, that sidcomp.exchanges() has"
        )
    return cast("Sequence[str]", exchange)


def _search(groups: Groups, Y: int | None, alpha: float | None) -> tuple[int, float]:
    """Checks the options of MergeComp's search."""
    if groups != "mergecomp" and (Y is not None or alpha is not None):
        raise ArgumentError(f'Y and alpha are for groups="mergecomp"; groups={groups!r}: leave them out')
    if Y is not None and (not isinstance(Y, int) or isinstance(Y, bool) or Y < 1):
        raise ArgumentError(f"Y={Y!r}: give the largest number of groups, at least 1")
    if alpha is not None and not (is_number(alpha) and 0 <= alpha < 1):
        raise ArgumentError(f"alpha={alpha!r}: give the least gain of a further group, from 0 to 1")
    return MERGECOMP[0] if Y is None else Y, MERGECOMP[1] if alpha is None else float(alpha)


def _candidates(
    candidates: Candidates, memory: str | None, parameters: Parameters, given: bool
) -> tuple[Candidate, ...]:
    """The candidates of codec="auto". They share one memory, because a group may change from one to another.
    A parameter of the State goes to every candidate that has it; a value in `candidates` overrides it, if
    the caller gave them."""
    memory = "residual" if memory is None else memory
    listed = list(candidates) if is_list(candidates) else []
    if not listed:
        raise ArgumentError(f'candidates={candidates!r}: give a list of codecs, such as ["topk", "fp16"]')
    found, taken = [], set()
    for c in listed:
        pair = isinstance(c, list | tuple) and len(c) == 2 and isinstance(c[1], Mapping)
        if not isinstance(c, str) and not pair:
            raise ArgumentError(
                f"candidates: {c!r} is neither a codec's name nor a pair of a name and a dictionary, such as "
                '("topk", {"density": 0.05})'
            )
        name, own = (c, {}) if isinstance(c, str) else (c[0], dict(c[1]))
        codec = find_codec(name)
        if codec.lossless:
            raise ArgumentError(f"candidates: leave {name!r} out; uncompressed is always among the choices")
        known = {p.name for p in (*codec.parameters, *find_memory(memory).parameters)}
        known |= {"ratio"} & set(parameters) if codec.amount else set()
        common = {k: v for k, v in parameters.items() if k in known}
        taken |= set(common)
        amount = codec.amount.name if codec.amount else ""
        if "ratio" in common and amount in own:  # either says how much is sent
            weaker = common if given else own
            weaker.pop("ratio" if given else amount)
        found.append(Candidate(*resolve(name, memory, {**common, **own} if given else {**own, **common})))
    if unknown := sorted(set(parameters) - taken):
        names = ", ".join(w.codec.name for w in found)
        there = {p.name for w in found for p in (*w.codec.parameters, *w.memory.parameters)}
        meant = suggestion(unknown[0], there)
        raise ArgumentError(
            f"no candidate ({names}) has {', '.join(map(repr, unknown))}{meant}: leave it out"
        )
    if len({w.label for w in found}) < len(found):
        raise ArgumentError("candidates: one is listed twice: list each once")
    return tuple(found)


def _over(
    choices: Sequence[ExchangeChoice], candidates: Sequence[Candidate], named: bool
) -> tuple[Candidate, ...]:
    """The candidates, combined with the exchanges that support them. A linear codec is combined only with
    exchanges that were named, because the bytes of an all-reduce do not grow with the number of ranks."""
    more: list[Candidate] = []
    for choice in choices:
        if choice.native:
            continue
        refused: UnsupportedError | None = None
        fitting = []
        for candidate in candidates:
            over = replace(candidate, choice=choice)
            try:
                over.check()
            except UnsupportedError as e:
                refused = e
            else:
                if named or not candidate.codec.linear:
                    fitting.append(over)
        if named and refused is not None and not fitting:
            raise refused
        more += fitting
    return tuple(more)
