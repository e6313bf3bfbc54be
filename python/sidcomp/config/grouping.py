"""Decides which parameters form a group: the rules behind `State(groups=...)`.

The module needs neither torch nor communication.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidcomp.errors import ArgumentError, SetupError
from sidcomp.suggestion import suggestion

Groups = str | int | Sequence[Sequence[str]]

# Groups that a controller finds during training: "auto" with sidcomp's planner for groups and codecs, "pg"
# with that for one codec, "mergecomp" by its search on measured iterations, "cupcake" as printed or repaired.
PLANNED = ("auto", "pg", "mergecomp", "cupcake", "cupcake-repaired")

_NAMES = ("bucket", "model", "layer", *PLANNED)
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


DENSE = -1

# How a parameter's elements lie in a bucket: (dimension, size) of each dimension of more than one element,
# the outermost first. Empty: they lie in the order of its dimensions, as those of a contiguous tensor do.
Order = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Regime:
    """How parameters form groups, and how each group is sent.

    rule: "bucket", "model", "layer", "even:N", a number of bytes, or lists of names. candidates: for each
    list, an index into Settings.candidates, or DENSE; any other rule has one for all its groups. flush: dense
    groups also send the residuals of their parameters. floors: pairs of an iteration and a density; from that
    iteration on, no density is lower. final: scheduled parameters of codecs have their last values already.
    """

    rule: str | int | list[list[str]]
    candidates: tuple[int, ...] = (0,)
    flush: bool = False
    floors: tuple[tuple[int, float], ...] = ()
    final: bool = False

    def floor(self, step: int) -> float:
        return [0.0, *(floor for since, floor in self.floors if since <= step)][-1]

    def dense_names(self) -> set[str]:
        """The parameters of the dense groups. The rule must be lists of names."""
        assert isinstance(self.rule, list)
        pairs = zip(self.rule, self.candidates, strict=True)
        return {name for names, candidate in pairs if candidate == DENSE for name in names}


@dataclass(frozen=True)
class Piece:
    """One parameter and its place: `numel` elements of bucket `bucket`, from element `offset` on. Pieces of
    which a step may bring only some differ in `apart`, and share no group."""

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: str
    itemsize: int
    device: str
    bucket: int
    offset: int
    apart: int = 0
    order: Order = ()

    @property
    def matrix(self) -> tuple[int, int]:
        """(elements, columns) of the tensor as PowerSGD's matrix, whose rows are the first dimension. A
        vector has one column."""
        return self.numel, self.numel // max(self.shape[0], 1) if len(self.shape) > 1 else 1


@dataclass
class Spec:
    """The pieces of one group, in the order in which they form its vector.

    candidate: an index into Settings.candidates, or DENSE: uncompressed.
    """

    candidate: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.pieces]

    def split(self) -> "list[Spec]":
        """One group for the pieces of each number in `apart`."""
        parts: dict[int, Spec] = {}
        for p in self.pieces:
            parts.setdefault(p.apart, Spec(self.candidate)).pieces.append(p)
        return list(parts.values())


def shorten(names: Sequence[str], limit: int = 4) -> str:
    """The names as an error message lists them: the first `limit`, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def counted(n: int, what: str = "group") -> str:
    """As in "1 group" and "2 groups"."""
    return f"{n} {what}{'s' * (n != 1)}"


def parse_groups(groups: Groups) -> str | int | list[list[str]]:
    """Checks `groups`: "bucket", "model", "layer", "even:N", one of PLANNED, a number of bytes (also "4MB";
    KB, MB, GB are powers of 1024), or lists of names. Raises ArgumentError."""
    if isinstance(groups, str):
        if groups in _NAMES:
            return groups
        if even := re.fullmatch(r"even:(\d+)", groups):
            if not int(even[1]):
                raise ArgumentError("groups='even:0': give at least one group, as in 'even:8'")
            return groups
        m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B\s*", groups, re.IGNORECASE)
        if not m:
            raise ArgumentError(
                f'groups={groups!r}: give "auto", "bucket", "model", "layer", "even:8" (eight groups), '
                '"pg", "mergecomp", "cupcake", "cupcake-repaired", a number of bytes, a size such as "4MB", '
                f"or a list of lists of parameter names{suggestion(groups, _NAMES)}"
            )
        groups = int(float(m[1]) * UNITS[m[2].upper() + "B"])
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ArgumentError(f"groups={groups}: give a size of at least one byte")
        return groups
    if not isinstance(groups, Sequence) or any(
        isinstance(g, str) or not isinstance(g, Sequence) for g in groups
    ):
        raise ArgumentError("groups: a list must hold lists of parameter names, one list for each group")
    lists = [list(g) for g in groups]
    seen: set[str] = set()
    for i, names in enumerate(lists):
        if not names:
            raise ArgumentError(f"groups: list {i} is empty: remove it, or add names")
        for name in names:
            if not isinstance(name, str):
                raise ArgumentError(f"groups: list {i} holds {name!r}, which is not a parameter name")
            if name in seen:
                raise ArgumentError(f"groups: parameter {name!r} is listed twice: list it once")
            seen.add(name)
    return lists


def form_groups(
    pieces: Sequence[Piece], regime: Regime, dense: set[str], own: Mapping[str, int] | None = None
) -> list[Spec]:
    """Forms the groups of `pieces`, which are in DDP's order, bucket by bucket.

    own: the candidates of parameters to which a policy gives one. Lists keep their order; other groups are
    in the order in which they complete. Excluded parameters form groups of their own: by the same rule, or
    by bucket if the rule is lists of names. A group has one candidate, one dtype and one device. Parameters
    without elements belong to no group. Raises SetupError if the lists do not fit the parameters.
    """
    own = own or {}
    if isinstance(regime.rule, list):
        listed = _listed(pieces, regime, dense, own)
        return listed + form_unlisted(listed, pieces, regime, dense, own)
    candidate = regime.candidates[0]
    return _runs(pieces, regime.rule, candidate, dense, {} if candidate == DENSE else own)


def form_unlisted(
    specs: Sequence[Spec],
    pieces: Sequence[Piece],
    regime: Regime,
    dense: set[str],
    own: Mapping[str, int],
) -> list[Spec]:
    """Forms groups, by bucket, of the pieces that are in none of `specs`: those that are excluded, or that
    trained only after lists of names were made."""
    there = {name for spec in specs for name in spec.names}
    candidate = regime.candidates[0]
    left = [p for p in pieces if p.name not in there]
    return _runs(left, "bucket", candidate, dense, {} if candidate == DENSE else own)


def check_lists(
    lists: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]], dense: set[str]
) -> None:
    """Raises SetupError if the lists do not fit the parameters. dense: those that are excluded."""
    listed = _check_names(lists, shapes, dense)
    missing = [n for n, shape in shapes.items() if 0 not in shape and n not in listed and n not in dense]
    if missing:
        raise SetupError(f"groups: no list names {shorten(missing)}; add them to a list, or exclude them")


def _check_names(
    lists: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]], dense: set[str]
) -> set[str]:
    """Raises SetupError if a list names what it cannot. Returns the names in the lists."""
    listed = {name for names in lists for name in names}
    unknown = sorted(listed - shapes.keys())
    if unknown:
        there = shorten(list(shapes)) + suggestion(unknown[0], shapes)
        raise SetupError(f"groups: DDP reduces no parameter named {shorten(unknown)}; there are: {there}")
    both = sorted(listed & dense)
    if both:
        raise SetupError(f"groups and exclude both name {shorten(both)}: remove them from one of the two")
    return listed


def _even(pieces: Sequence[Piece], dense: set[str], count: int) -> set[str]:
    """The last parameter of each of `count` groups that have equally many parameters."""
    names = [p.name for p in pieces if p.numel and p.name not in dense]
    count = min(count, len(names))
    return {names[(i + 1) * len(names) // count - 1] for i in range(count)}


def _runs(
    pieces: Sequence[Piece], rule: str | int, candidate: int, dense: set[str], own: Mapping[str, int]
) -> list[Spec]:
    done: list[tuple[int, Spec]] = []
    runs: dict[tuple[object, ...], tuple[int, Spec, int]] = {}  # open groups: last piece, spec, bytes
    even = isinstance(rule, str) and rule.startswith("even:")
    ends = _even(pieces, dense, int(str(rule)[5:])) if even else set()
    for at, p in enumerate(pieces):
        if not p.numel:
            continue
        its = DENSE if p.name in dense else own.get(p.name, candidate)
        bucket = p.bucket if rule == "bucket" else 0
        chain = (p.dtype, p.device, p.apart, p.name in dense, its, bucket)
        _, spec, size = runs.get(chain) or (at, Spec(its), 0)
        spec.pieces.append(p)
        size += p.numel * p.itemsize
        if (isinstance(rule, int) and size >= rule) or rule == "layer" or p.name in ends:
            runs.pop(chain, None)
            done.append((at, spec))
        else:
            runs[chain] = (at, spec, size)
    done += [(at, spec) for at, spec, _ in runs.values()]
    return [spec for _, spec in sorted(done, key=lambda d: d[0])]


def _listed(pieces: Sequence[Piece], regime: Regime, dense: set[str], own: Mapping[str, int]) -> list[Spec]:
    lists = regime.rule
    assert isinstance(lists, list)
    candidates = regime.candidates if len(regime.candidates) == len(lists) else regime.candidates * len(lists)
    by_name = {p.name: p for p in pieces}
    _check_names(lists, {p.name: p.shape for p in pieces}, dense)
    specs = []
    for i, names in enumerate(lists):
        candidate = candidates[i] if candidates[i] == DENSE else own.get(names[0], candidates[i])
        spec = Spec(candidate, [by_name[n] for n in names if by_name[n].numel])
        if candidate != DENSE and len({own.get(n, candidates[i]) for n in names}) > 1:
            raise SetupError(
                f"groups: list {i} ({shorten(names)}) holds parameters that the policy sends in different "
                "ways: make one list for each way"
            )
        kinds = {(p.dtype, p.device) for p in spec.pieces}
        if len(kinds) > 1:
            raise SetupError(
                f"groups: list {i} ({shorten(names)}) mixes {sorted(kinds)}: split it by dtype and device"
            )
        specs += spec.split()
    return specs
