"""Tensors by name: which of them share memory, and the memory that the core reads and writes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.grouping import shorten
from sidcomp.delta.device import DeviceVector, usable
from sidcomp.delta.message import DTYPES, Block, Tensor
from sidcomp.errors import DeltaError

Weights = Mapping[str, torch.Tensor] | torch.Tensor


class Leaf(NamedTuple):
    """A tensor of the program. same: the name of the earlier one that is the same memory, or None."""

    name: str
    tensor: torch.Tensor
    dtype: str
    same: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def holder(self) -> str:
        """The same name for all that are the same memory."""
        return self.name if self.same is None else self.same

    def __str__(self) -> str:
        return self.name or "the tensor"


def _memory(x: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:  # of some subclasses
        return 0


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The memory between its first and its last element."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    start = _memory(x) + int(x.storage_offset()) * x.element_size()
    return start, start + (int(last) + 1) * x.element_size()


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements may lie in the same memory: unless each dimension steps over those below it."""
    room = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if step <= room:
                return True
            room += step * (size - 1)
    return False


def _leaf(name: object, x: object, what: str) -> Leaf:
    if not isinstance(name, str):
        raise DeltaError(f"{what}: {name!r} is no name; pass a mapping of strings to tensors")
    if not isinstance(x, torch.Tensor):
        raise DeltaError(f"{what}: {name} is a {type(x).__name__}, no tensor; leave it out")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise DeltaError(
            f"{what}: {name} is {x.dtype}, which sidcomp.delta does not know; send a view of its bits"
        )
    if x.layout is not torch.strided or x.is_meta or (x.numel() and not _memory(x)):
        raise DeltaError(
            f"{what}: {name} has no dense memory of its own; pass a plain tensor, such as a local shard"
        )
    x = x.detach()
    if x.numel() and _overlaps_itself(x):
        raise DeltaError(f"{what}: elements of {name} share memory, as after expand(); pass a copy")
    return Leaf(name, x, dtype)


def leaves(weights: Weights, what: str) -> dict[str, Leaf]:
    """The tensors of a mapping, or the one tensor, whose name is then "". Raises DeltaError for what cannot
    be sent, and for tensors that share a part of their memory."""
    if isinstance(weights, torch.Tensor):
        weights = {"": weights}
    if not isinstance(weights, Mapping):
        raise DeltaError(
            f"{what} is a {type(weights).__name__}; pass a tensor, or a mapping of names to tensors"
        )
    if not weights:
        raise DeltaError(
            f"{what} has no tensors, and that cannot mean that nothing has changed; pass them all"
        )
    found = {name: _leaf(name, x, what) for name, x in weights.items()}
    order = {name: place for place, name in enumerate(found)}
    spans = sorted(
        (*_span(leaf.tensor), order[name], name) for name, leaf in found.items() if leaf.tensor.numel()
    )
    end, holder = 0, ""
    for start, stop, _, name in spans:
        if start < end:
            one, other = found[name], found[holder]
            if (start, stop) != _span(other.tensor) or not _alike(one.tensor, other.tensor):
                raise DeltaError(f"{what}: {name} and {holder} share a part of their memory; pass copies")
            found[name] = one._replace(same=holder)
        else:
            end, holder = stop, name
    return found


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


def apart(left: dict[str, Leaf], right: dict[str, Leaf], what: str) -> None:
    """Raises DeltaError if a tensor shares memory with one of the others, unless both are the same memory and
    have the same name."""
    spans = [(*_span(x.tensor), k, name) for k, side in enumerate((left, right)) for name, x in side.items()
             if x.tensor.numel()]  # fmt: skip
    open_: list[tuple[int, int, str]] = []
    for start, stop, side, name in sorted(spans):
        open_ = [one for one in open_ if one[0] > start]
        for _, other, partner in open_:
            one = {side: name, other: partner}
            if other != side and not (
                one[0] == one[1] and _same_memory(left[one[0]].tensor, right[one[1]].tensor)
            ):
                raise DeltaError(
                    f"{what} {one[1]} shares memory with {one[0]} of the weights; pass other tensors"
                )
        open_.append((stop, side, name))


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return _span(x) == _span(y) and _alike(x, y)


def match(of: Sequence[str], there: dict[str, Leaf], what: str, other: str) -> None:
    """Raises DeltaError unless the names are the same."""
    missing, more = [n for n in of if n not in there], [n for n in there if n not in set(of)]
    if missing or more:
        said = [f"{other} lacks {shorten(missing, 5)}"] if missing else []
        said += [f"{what} lacks {shorten(more, 5)}"] if more else []
        raise DeltaError(f"the tensors differ: {'; '.join(said)}; pass the same names on both sides")


def fit(table: Sequence[Tensor], there: dict[str, Leaf], what: str) -> None:
    """Raises DeltaError unless the tensors are those of a table."""
    match([t.name for t in table], there, "the message", what)
    group = {t.name: t.name if t.same is None else table[t.same].name for t in table}
    for t in table:
        leaf = there[t.name]
        if (t.dtype, t.shape) != (leaf.dtype, leaf.shape):
            has, wants = f"{leaf.dtype} {list(leaf.shape)}", f"{t.dtype} {list(t.shape)}"
            raise DeltaError(
                f"{what}: {leaf} is {has}, but {wants} in the message; pass weights of that kind"
            )
        if group[t.name] != group[leaf.holder]:
            both = f"{leaf} and {there[leaf.holder]} share their memory"
            raise DeltaError(f"{what}: {both} here, but not where the message is from; pass copies")


def devices(table: Sequence[Tensor], *sides: dict[str, Leaf]) -> dict[int, torch.device]:
    """The device that has all tensors of a kind, on all sides. Other kinds are copied to the CPU."""
    found: dict[int, set[torch.device | None]] = {}
    for t in (t for t in table if t.same is None and t.n):
        for x in (side[t.name].tensor for side in sides):
            found.setdefault(t.kind, set()).add(x.device if usable(x) else None)
    return {kind: one for kind, (one, *more) in found.items() if one is not None and not more}


def flat(leaf: Leaf, device: torch.device | None = None) -> torch.Tensor:
    """Its elements in the memory of a device, None: of the CPU, one after the other: the tensor itself, or a
    copy."""
    x = leaf.tensor
    there = x.is_cpu if device is None else x.device == device
    if there and x.is_contiguous() and not (x.is_neg() or x.is_conj()):
        return x
    plain = x.resolve_conj().resolve_neg()
    return plain.to(device or "cpu", memory_format=torch.contiguous_format, copy=True)


def home(leaf: Leaf) -> torch.device | None:
    """Where a copy of it is kept; None: on the CPU."""
    return leaf.tensor.device if usable(leaf.tensor) else None


class Vectors:
    """The memory of the tensors of a table, for the core: for each kind one list of segments, or a vector on
    the device that `where` has for the kind. Tensors that are not contiguous there are in a copy; `put_back`
    writes those copies to the tensors."""

    def __init__(
        self, table: Sequence[Tensor], there: dict[str, Leaf], where: Mapping[int, torch.device]
    ) -> None:
        self._table, self._there = table, there
        self._flat = {t.name: flat(there[t.name], where.get(t.kind)) for t in table if t.same is None}
        self.segments: dict[int, _core.Segments] = {}
        self.on_device: dict[int, DeviceVector] = {}
        for kind in {t.kind for t in table}:
            own = [t for t in table if t.same is None and t.kind == kind and t.n]
            if kind in where:
                tensors = [self._flat[t.name] for t in own]
                self.on_device[kind] = DeviceVector(kind, tensors, [t.n for t in own])
                continue
            places = [address(x := self._flat[t.name], str(there[t.name]), x.dtype, x.numel()) for t in own]
            self.segments[kind] = _core.Segments(places, [t.n for t in own])

    def split(self, blocks: Sequence[Block]) -> tuple[list[Block], list[list[Block]]]:
        """Those on the CPU, and on devices those of each kind."""
        there = [[b for b in blocks if b.kind == kind] for kind in self.on_device]
        return [b for b in blocks if b.kind in self.segments], there

    def named(self, kind: int, first: int, n: int) -> str:
        """The tensors of some elements of a kind, for a message."""
        at, found = 0, []
        for t in self._table:
            if t.same is None and t.kind == kind:
                if at < first + n and first < at + t.n:
                    found.append(str(self._there[t.name]))
                at += t.n
        return shorten(found, 3)

    def put_back(self) -> None:
        for t in self._table:
            leaf = self._there[t.name]
            first = leaf if t.same is None else self._there[self._table[t.same].name]
            mine = self._flat[first.name]
            if mine is not leaf.tensor if t.same is None else leaf.holder != first.holder:
                leaf.tensor.copy_(mine)
