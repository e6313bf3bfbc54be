"""Predicts the cost of exchanges between many ranks: bytes, rounds and time, on links of given speed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from sidcomp import core as _core
from sidcomp import files
from sidcomp.config.accuracy import CodecSpec
from sidcomp.config.kinds import is_list, is_number, is_whole
from sidcomp.config.registry import exchanges, find_codec, find_exchange, find_memory
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError, SidcompError
from sidcomp.planner.cost_curve import low

WORLDS = tuple(2**i for i in range(1, 13))
DENSE = "dense"
_PLAIN = "allreduce"  # the exchange of plain DDP


@dataclass(frozen=True)
class Link:
    """A node's way to the network, and that between the ranks of a node.

    gbit            Gbit/s of a node, each way, shared by its ranks.
    latency_us      of a round of messages, in microseconds, until the next may begin.
    message_us      what each message costs its sender beside that (software).
    node_gbit, node_latency_us
                    the same inside a node.
    together        share of `gbit` that a node gets while it exchanges messages with several ranks of other
                    nodes at once: TCP divides the link unevenly, and the connections that end last do not
                    fill it. 1: all of it. Rings use one connection at a time and always get all of it.
    """

    gbit: float = 1.0
    latency_us: float = 100.0
    message_us: float = 0.0
    node_gbit: float = 400.0
    node_latency_us: float = 10.0
    together: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0.0 if name.endswith("_us") else 1e-6
            if not is_number(value) or not least <= value < math.inf:
                raise ArgumentError(f"Link: {name}={value!r}: a finite number from {least:g} on")
        if self.together > 1:
            raise ArgumentError(f"Link: together={self.together}: a share of the link, at most 1")


@dataclass(frozen=True)
class Compute:
    """Nanoseconds an element that a rank computes: to encode, to decode one payload, to merge signs once, and
    to copy, add and check what the ranks of a node exchange uncompressed. Microseconds that a group's encode
    and its decode take whatever its size: on a GPU, their launches. And nanoseconds an element of what an
    exchange of updates does beside the codec, which subtracts and copies whole vectors; of what each step
    does where not every one is followed by an exchange: the noise correction measures and lengthens it; and
    of what DDP does, which copies gradients into its buckets and back."""

    encode_ns: float = 0.0
    decode_ns: float = 0.0
    merge_ns: float = 0.0
    node_ns: float = 0.0
    encode_us: float = 0.0
    decode_us: float = 0.0
    update_ns: float = 0.0
    step_ns: float = 0.0
    bucket_ns: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value) or not 0 <= value < math.inf:
                raise ArgumentError(f"Compute: {name}={value!r}: a finite number from 0 on")


@dataclass(frozen=True)
class Row:
    """One exchange over one world: `bytes`, the most that a rank sends; `node_bytes`, what a node of ranks
    sends to others; rounds; seconds, of which `compute_seconds` are the codec's."""

    exchange: str
    world: int
    bytes: int
    node_bytes: int
    rounds: int
    seconds: float
    compute_seconds: float


class Simulation:
    """The rows of `simulate`, by exchange and world."""

    def __init__(self, n: int, codec: str, link: Link, ranks_per_node: int, rows: Sequence[Row]) -> None:
        self.n, self.codec, self.link, self.ranks_per_node = n, codec, link, ranks_per_node
        self.rows = tuple(rows)

    def row(self, exchange: str, world: int) -> Row:
        for r in self.rows:
            if (r.exchange, r.world) == (exchange, world):
                return r
        raise ArgumentError(f"no row of exchange {exchange!r} over {world} ranks")

    @property
    def worlds(self) -> list[int]:
        return sorted({r.world for r in self.rows})

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(r.exchange for r in self.rows))

    def best(self, world: int) -> Row:
        """The fastest over `world` ranks, dense among them."""
        rows = [r for r in self.rows if r.world == world]
        if not rows:
            raise ArgumentError(f"no row over {world!r} ranks: there are {self.worlds}")
        return min(rows, key=lambda r: r.seconds)

    def table(self) -> list[dict[str, Any]]:
        """A dictionary for each world: milliseconds by exchange, and the best."""
        return [
            {
                "world": w,
                **{r.exchange: r.seconds * 1e3 for r in self.rows if r.world == w},
                "best": self.best(w).exchange,
            }
            for w in self.worlds
        ]

    def plot(self, path: str | Path) -> None:
        """Time by world for each exchange. Needs matplotlib."""
        figure = files.blank_picture(8, 5)
        axis = figure.subplots()
        for i, name in enumerate(self.names):
            rows = [r for r in self.rows if r.exchange == name]
            # Some exchanges take the same time: each line is thinner than the one before and shows it.
            style: dict[str, Any] = {"lw": max(1.2, 8 - 1.6 * i), "alpha": min(1, 0.25 + 0.15 * i)}
            if name == DENSE:
                style = {"lw": 1.5, "color": "black", "ls": "--", "zorder": 3}
            times = [r.seconds * 1e3 for r in rows]
            axis.plot([r.world for r in rows], times, marker="os^vDP*X"[i % 8], ms=5, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(self.worlds, [f"{w:,}" for w in self.worlds])
        axis.set_xlabel(f"ranks ({self.ranks_per_node} a node)")
        axis.set_ylabel("ms of an exchange")
        axis.set_title(
            f"Time to average a gradient of {self.n:,} elements, by exchange\n"
            f"codec {self.codec}, {self.link.gbit:g} Gbit/s a node; simulated",
            fontsize=11,
        )
        axis.grid(alpha=0.3)
        axis.legend(handlelength=3)
        files.picture(path, figure)


def simulate(
    n: int,
    codec: str = "topk",
    *,
    worlds: Sequence[int] = WORLDS,
    link: Link | None = None,
    compute: Compute | None = None,
    exchange: Sequence[str] | None = None,
    memory: str | None = None,
    ranks_per_node: int = 1,
    **parameters: Setting,
) -> Simulation:
    """Bytes, rounds and time of a group of n float32 elements, by exchange and number of ranks.

    Bytes and rounds are the core's own statements, which its tests compare with counted bytes; the time of a
    round is that of the first node's ranks: latency, messages, and bytes over the link, or over the share of
    it that simultaneous connections get. "dense" is float32 by
    the process group's ring all-reduce; where a codec goes by all-reduce or all-gather, that is a ring, too.
    exchange: names, None for all that take the codec. A world that an exchange does not take is left out.
    """
    link = Link() if link is None else link
    compute = Compute() if compute is None else compute
    for what, given, kind in (("link", link, Link), ("compute", compute, Compute)):
        if not isinstance(given, kind):
            raise ArgumentError(f"{what}={given!r}: give a sidcomp.{kind.__name__}, or leave it out")
    if not is_whole(n) or not 0 <= n <= 2**40:
        raise ArgumentError(f"n={n!r}: 0 to 2**40 elements")
    if not is_whole(ranks_per_node) or not 1 <= ranks_per_node <= 256:
        raise ArgumentError(f"ranks_per_node={ranks_per_node!r}: 1 to 256")
    if exchange is not None and not is_list(exchange):
        raise ArgumentError(f"exchange={exchange!r}: give a list of names, or None for all")
    if not is_list(worlds):
        raise ArgumentError(f"worlds={worlds!r}: give a list of numbers of ranks")
    names = [e.name for e in exchanges()] if exchange is None else [find_exchange(e).name for e in exchange]
    m = find_memory(find_codec(codec).memory if memory is None else memory).name
    rows, refused = [], ""
    for world in worlds:
        if not is_whole(world) or not 1 <= world <= 4096:
            raise ArgumentError(f"worlds: {world!r}: 1 to 4096 ranks")
        rows.append(_row(DENSE, "none", "none", n, world, {}, link, Compute(), ranks_per_node))
        for name in names:
            try:
                rows.append(_row(name, codec, m, n, world, parameters, link, compute, ranks_per_node))
            except SidcompError as e:
                refused = refused or str(e)
    if len(rows) == len(worlds):
        raise ArgumentError(f"no exchange takes codec {codec!r} here: {refused}")
    return Simulation(n, codec, link, ranks_per_node, rows)


Candidate = tuple[str, str, Mapping[str, Setting]]  # codec, exchange, their parameters


def methods(
    candidates: Mapping[str, Candidate],
    world: int,
    link: Link | None = None,
    compute: Mapping[str, Compute] | None = None,
    *,
    most_bytes: int = 1 << 30,
    ranks_per_node: int = 1,
) -> list[dict[str, Any]]:
    """The "methods" of an instance for `sidcomp.planner.plan`: dense, and each candidate by its name.

    With costs of up to `most_bytes` of gradient; compute: of the candidates that have any. So a planner
    chooses exchanges, too.
    """
    sizes = [0, *(1 << i for i in range(12, max(13, most_bytes.bit_length()), 2))]
    out: list[dict[str, Any]] = []

    def curve(times: Sequence[float]) -> list[list[int]]:
        ps = [round(t * 1e12) for t in times]
        return [[size, max(ps[: i + 1])] for i, size in enumerate(sizes)]  # costs may not fall

    for name, (codec, exchange, parameters) in {DENSE: ("none", _PLAIN, {}), **candidates}.items():
        own: dict[str, Any] = {} if name == DENSE else dict(parameters)
        row_of = partial(_row, _PLAIN if name == DENSE else exchange, codec, find_codec(codec).memory)
        rest = own, link or Link()

        def seconds(of: Compute, row_of: Any = row_of, rest: Any = rest) -> list[Row]:
            return [row_of(max(1, size // 4), world, *rest, of, ranks_per_node) for size in sizes]

        c = (compute or {}).get(name)
        encode = decode = None
        if c is not None:
            before = Compute(c.encode_ns, encode_us=c.encode_us)
            after = replace(c, encode_ns=0.0, encode_us=0.0)
            encode = curve([row.compute_seconds for row in seconds(before)])
            decode = curve([row.compute_seconds for row in seconds(after)])
        rows = [row.seconds for row in seconds(Compute())]
        out.append({"name": name, "encode": encode, "exchange": curve(rows), "decode": decode})
    return out


def _row(
    name: str,
    codec: str,
    memory: str,
    n: int,
    world: int,
    parameters: Mapping[str, Setting],
    link: Link,
    compute: Compute,
    per_node: int,
) -> Row:
    kind = _PLAIN if name == DENSE else name
    settings = dict(parameters)
    local = min(per_node, world)
    if any(p.name == "ranks_per_node" for p in find_exchange(kind).parameters):
        settings["ranks_per_node"] = local
    ranks = [
        _core.Exchange(kind, codec, memory, n, "float32", rank, world, settings) for rank in range(local)
    ]
    first = ranks[0]
    spent = _compute(first, compute)
    if first.ring_passes and world > 1:  # the process group does it, whatever the messages are here
        # the ring's last rank of a node sends to the next node; the others stay inside
        sums = first.rounds // first.ring_passes  # more than one if the codec takes several all-reduces
        steps = first.ring_passes * (world - 1) * sums
        sent = _bodies(first)
        each = sent / steps
        over, inside = (each, each if local > 1 else 0.0) if world > local else (0.0, each)
        slowest = max(
            over * 8 / (link.gbit * 1e9) + (link.latency_us * 1e-6 if over else 0),
            inside * 8 / (link.node_gbit * 1e9) + (link.node_latency_us * 1e-6 if inside else 0),
        )
        seconds = steps * (slowest + link.message_us * 1e-6)
        return Row(name, world, sent, round(over * steps), steps, seconds + spent, spent)
    seconds, crossing = 0.0, 0
    for i in range(first.rounds):
        over = inside = count = crossings = 0
        for rank, x in enumerate(ranks):
            messages = x.messages(i, False)
            count = max(count, len(messages))
            crossings += sum(peer // local > 0 for peer, _, _ in messages)
            over += sum(size for peer, _, size in messages if peer // local)
            inside = max(
                inside, sum(size for peer, _, size in messages if not peer // local and peer != rank)
            )
        share = link.together if crossings > 1 else 1.0
        seconds += count * link.message_us * 1e-6 + max(
            over * 8 / (share * link.gbit * 1e9) + (link.latency_us * 1e-6 if over else 0),
            inside * 8 / (link.node_gbit * 1e9) + (link.node_latency_us * 1e-6 if inside else 0),
        )
        crossing += over
    return Row(name, world, first.sent_bytes, crossing, first.rounds, seconds + spent, spent)


def _bodies(x: _core.Exchange) -> int:
    """Returns the bytes without frames and confirmations: a process group sends neither."""
    if not x.control_bytes:
        return x.sent_bytes
    frames = sum(len(x.messages(i, False)) for i in range(x.rounds))
    return x.sent_bytes - frames * (x.control_bytes // (x.world - 1))


def _compute(x: _core.Exchange, c: Compute) -> float:
    """Seconds that a rank computes in a step."""
    codec = x.encoded * c.encode_ns + x.decoded * c.decode_ns
    fixed = c.encode_us * (x.encoded > 0) + c.decode_us * (x.decoded > 0)
    return fixed * 1e-6 + x.n * 1e-9 * (codec + x.merged * c.merge_ns + x.in_node * c.node_ns)


@dataclass(frozen=True)
class Measured:
    """The computing times of this machine: the first decile of all turns, and the least and the most of each
    figure that the choices of more than half of the turns show."""

    compute: Compute
    least: Compute
    most: Compute

    @classmethod
    def assumed(cls, compute: Compute) -> "Measured":
        """Without a spread."""
        return cls(compute, compute, compute)

    def with_passes(self, pass_ns: float) -> "Measured":
        """The same, and what updates take. pass_ns: of a pass over vectors, an element."""
        passes = {
            "update_ns": _PASSES * pass_ns,
            "step_ns": _STEP_PASSES * pass_ns,
            "bucket_ns": _BUCKET_PASSES * pass_ns,
        }
        return Measured(*(replace(c, **passes) for c in (self.compute, self.least, self.most)))


def measure(codec: str, n: int = 1 << 20, memory: str | None = None, **parameters: Setting) -> Compute:
    """Measures one codec on this machine: see `measure_all`."""
    return measure_all({codec: (codec, parameters)}, n, memory)[codec].compute


def measure_all(
    codecs: Mapping[str, CodecSpec], n: int = 1 << 20, memory: str | None = None
) -> dict[str, Measured]:
    """Measures how long one thread of this machine takes to encode and decode n elements, for each codec by
    its name. For codecs of signs it measures merging in ring1. It measures what ranks exchange uncompressed
    in hierarchical.

    All are measured in turns, so that what else the machine does meets all alike, and counts by first
    deciles, so that it hardly counts.
    """
    timed = {name: _Timed(codec, n, memory, own) for name, (codec, own) in codecs.items()}
    turns = [{name: one.turn() for name, one in timed.items()} for _ in range(_TURNS)]
    parts = list(combinations(turns, _TURNS // 2 + 1))
    pass_ns = _pass_ns()
    return {
        name: one.measured(
            [turn[name] for turn in turns], [[turn[name] for turn in some] for some in parts]
        ).with_passes(pass_ns)
        for name, one in timed.items()
    }


_PASSES = 6  # over vectors in an exchange of updates: what a rank did, what arrived, what it has not sent
_STEP_PASSES = 2  # of the noise correction in a step: it copies, reads gradients, and lengthens
_BUCKET_PASSES = 2
_LARGE = 1 << 24  # elements: a step leaves its vectors in no cache, so three of these should fit into none


def _pass_ns() -> float:
    """Nanoseconds an element that one thread takes to subtract a large vector from another."""
    import numpy

    a, b, out = (numpy.ones(_LARGE, numpy.float32) for _ in range(3))
    times = []
    for _ in range(_TURNS):
        begin = perf_counter_ns()
        numpy.subtract(a, b, out)
        times.append(perf_counter_ns() - begin)
    return low(times) / _LARGE


_TURNS = 9
_REPEATS = 4  # of a call in a turn
_SETTLED = 5  # calls before those that count: a predicted threshold is stable after some encodes
_Turn = dict[str, list[int]]  # the ns of a call, by the name of what is called


class _Timed:
    """The calls of one codec whose time is asked for."""

    def __init__(self, codec: str, n: int, memory: str | None, parameters: Mapping[str, Setting]) -> None:
        import numpy

        from sidcomp.standalone.compressor import Compressor

        self.n, self.memory = n, memory
        own = {p.name for e in exchanges() for p in e.parameters}
        self.settings: dict[str, Any] = {k: v for k, v in parameters.items() if k not in own}
        c = Compressor(codec, n, memory=memory, world=1, **self.settings)
        self.codec = c.codec
        self.x = numpy.random.default_rng(0).standard_normal(n).astype(numpy.float32)
        payload, out = c.encode(self.x), numpy.empty(n, numpy.float32)
        self.calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "encode": (lambda: c.encode(self.x), _nothing),
            "decode": (lambda: c.decode(payload, out), _nothing),
            "copy": (lambda: numpy.copyto(out, self.x), _nothing),
        }
        self.loops: dict[str, Any] = {}
        if "signs" in c.codec.traits:
            self._add("ring1", 4)
        self._add("hierarchical", 2, ranks_per_node=2)
        for call, prepare in self.calls.values():
            for _ in range(_SETTLED):
                prepare()
                call()

    def _add(self, exchange: str, world: int, **more: Any) -> None:
        """A step of ranks in this process; without it where the exchange does not take the codec."""
        from sidcomp.standalone.compressor import _look, _segments
        from sidcomp.standalone.loopback import Loopback

        codec, n = self.codec.name, self.n
        try:
            loop = Loopback(world, exchange, codec, n, memory=self.memory, **self.settings, **more)
        except SidcompError:
            return
        vectors = [self.x.copy() for _ in range(world)]
        segments = [_segments(_look(v, "x")) for v in vectors]

        def fill() -> None:
            for v in vectors:
                v[:] = self.x

        self.loops[exchange] = loop
        self.calls[exchange] = (lambda: loop._exchange(segments, 1.0), fill)

    def turn(self) -> _Turn:
        found: _Turn = {}
        for name, (call, prepare) in self.calls.items():
            times = []
            for _ in range(_REPEATS):
                prepare()
                begin = perf_counter_ns()
                call()
                times.append(perf_counter_ns() - begin)
            found[name] = times
        return found

    def measured(self, turns: Sequence[_Turn], parts: Sequence[Sequence[_Turn]]) -> Measured:
        every = [vars(self._compute(part)) for part in parts]
        least, most = (Compute(**{k: of(e[k] for e in every) for k in every[0]}) for of in (min, max))
        return Measured(self._compute(turns), least, most)

    def _compute(self, turns: Sequence[_Turn]) -> Compute:
        took = {name: low([ns for turn in turns for ns in turn[name]]) / self.n for name in self.calls}

        def rest(exchange: str) -> float:
            """Returns the time that a rank computes besides encode and decode, for one element."""
            if exchange not in self.loops:
                return 0.0
            loop = self.loops[exchange]
            first = loop.ranks[0]
            copied = took["copy"] * float(loop.bytes_per_rank / self.x.nbytes)
            known = float(first.encoded) * took["encode"] + float(first.decoded) * took["decode"] + copied
            return max(0.0, took[exchange] / float(loop.world) - known)

        return Compute(took["encode"], took["decode"], rest("ring1") / 0.75, rest("hierarchical"))


def _nothing() -> None: ...
