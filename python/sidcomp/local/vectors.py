"""The vectors over a module's parameters that updates are measured in, and what all ranks must agree on."""

import hashlib
import reprlib
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.doors.names import named_parameters, roles
from sidcomp.errors import ArgumentError, CheckpointError, SetupError, UnsupportedError
from sidcomp.local.gradient_noise import Noise
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.checkpoint_reader import unlike
from sidcomp.runtime.communicator import exchanging, has_gloo
from sidcomp.runtime.door import ModuleDoor
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.members import refuse
from sidcomp.runtime.plain_data import anything, listing, record, table, text
from sidcomp.runtime.telling import tell
from sidcomp.state import State

BUCKET_BYTES = 25 * 2**20
CALL = "sidcomp.compress"  # what the program has called, in messages
_COMPARED = record({"part": text, "arguments": table(anything), "tensors": listing(text)})


def trained(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], known: Container[str] = ()
) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that the optimizers train, by name. known: names of others to return, which were
    trained before. Raises ArgumentError or SetupError."""
    named = {name: p for name, p in named_parameters(module) if p.requires_grad or name in known}
    own: dict[int, int] = {}
    for i, one in enumerate(optimizers):
        for p in (p for group in one.param_groups for p in group["params"]):
            if own.setdefault(id(p), i) != i:
                which = next((repr(name) for name, q in named.items() if q is p), "in common")
                raise ArgumentError(
                    f"optimizers {own[id(p)]} and {i} of the list have parameter {which}: give each "
                    "parameter to one of them"
                )
    if missing := [name for name, p in named.items() if id(p) not in own]:
        who = "the optimizer does not have" if len(optimizers) == 1 else "no optimizer of the list has"
        raise SetupError(
            f"{who} {missing[0]!r}, which requires a gradient: add it to the optimizer, or call "
            "requires_grad_(False) on it"
        )
    own_ids = {id(p) for p in module.parameters()}
    if (others := len(own.keys() - own_ids)) and not known:
        notices.warn(
            f"{others} of the optimizer's parameters are not the module's, so no exchange reaches them: give "
            f"{CALL} a module that has all of them, unless something else averages them",
            dist.get_rank() if dist.is_initialized() else 0,
        )
    if not named:
        raise SetupError("the module has no parameters that require gradients")
    if complex_ := [name for name, p in named.items() if p.is_complex()]:
        raise SetupError(f"parameter {complex_[0]!r} is complex, which no codec takes")
    for name, p in named.items():
        if p.dtype not in DTYPES:
            raise UnsupportedError(
                f"parameter {name!r} is {str(p.dtype)[6:]}, and updates are {', '.join(DTYPES.values())}: "
                "convert the module before it is given to the optimizer"
            )
    return named


def compare(
    named: Mapping[str, torch.Tensor],
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    arguments: Mapping[str, Any],
    part: str = "",
) -> None:
    """Raises SetupError on every rank if the ranks' parameters or buffers differ in name, shape or dtype, if
    they are other shards, or if the arguments differ. All ranks must exchange the same at the same steps.
    named: the parameters; part: which shard, "" for the whole module."""
    tensors = {**named, **{f"buffer {name}": x for name, x in module.named_buffers()}}
    mine = [f"{name!r} of {str(x.dtype)[6:]} {list(x.shape)}" for name, x in tensors.items()]
    same = {"part": part, "arguments": dict(arguments), "tensors": mine}
    told = tell(group, same, _COMPARED, f"{CALL}()")
    parts, given, everyone = ([one[key] for one in told] for key in ("part", "arguments", "tensors"))
    for rank, theirs in enumerate(given):
        for name, own in given[0].items():
            if theirs.get(name, own) != own:
                raise SetupError(
                    f"{CALL}: rank {rank} has {name}={theirs[name]!r} where rank 0 has {name}={own!r}: give "
                    "every rank the same arguments and optimizers"
                )
    for rank, theirs in enumerate(parts):
        if theirs != parts[0]:
            raise SetupError(
                f"{CALL}: rank {rank} of the process group holds {theirs or 'the whole module'} and rank 0 "
                f"{parts[0] or 'the whole module'}: give a process_group of ranks that hold the same shard"
            )
    for rank, theirs in enumerate(everyone):
        for a, b in zip_longest(everyone[0], theirs, fillvalue="nothing") if theirs != everyone[0] else ():
            if a != b:
                raise SetupError(
                    f"{CALL}: the ranks train different models: rank {rank} has {b} where rank 0 has {a}; "
                    "give every rank the same modules, with the same parameters frozen"
                )


def lacks(values: object, name: str, like: torch.Tensor) -> str:
    """Returns what a checkpoint has in place of a parameter's values, for messages; "" if it has them."""
    if not isinstance(values, dict):
        return reprlib.repr(values)
    if name not in values:
        return "nothing"
    return unlike(values[name], like)


def check_values(
    saved: Mapping[str, Any], own: Mapping[str, torch.Tensor], what: str, nan: bool = False
) -> None:
    """Raises CheckpointError unless a checkpoint's table has a tensor for each name, with the shape and the
    values of a parameter. what: the table, for messages. nan: it may have values that are not finite."""
    for name, like in own.items():
        found = lacks(saved, name, like)
        if not found and not nan and not bool(saved[name].isfinite().all()):
            found = "a tensor with NaN or Inf"
        if found:
            raise CheckpointError(
                f"{CALL}: no {what} of the shape of parameter {name!r}, {tuple(like.shape)}, but "
                f"{found}: the dictionary is damaged, or of another model"
            )


def named_group(state: State, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the process group that the program has given, if it has."""
    given: Any = process_group if process_group is not None else state.engine.process_group
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise SetupError(
            f"process_group={given!r} is no process group of which this rank is a member: give one that "
            "torch.distributed.new_group returned on a member, or leave it out"
        )
    if given is not None:
        refuse(
            given,
            "steps on each rank's own are not averaged over one",
            "average gradients over it, by DDP with sidcomp.backend.process_group(group) or by "
            "sidcomp.compress; or, if ranks may leave and come back, give a deadline, and no process_group",
        )
    return given


def group_of(state: State, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    given = named_group(state, process_group)
    if given is None and not dist.is_initialized():
        raise SetupError("there is no process group: call torch.distributed.init_process_group first")
    chosen = given if given is not None else dist.group.WORLD
    assert chosen is not None
    return chosen


def check_devices(vectors: "Sequence[Vectors]", group: dist.ProcessGroup) -> None:
    """Raises UnsupportedError or SetupError if the ranks of the group cannot exchange tensors from where the
    vectors and the parameters are."""
    for device in {x.device for v in vectors for x in (v.parameters[0], v.update)}:
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"parameters are on {device}, and only those on a CPU or a CUDA device can be exchanged: "
                f"move the module before {CALL}()"
            )
        try:
            group._get_backend(device)
        except RuntimeError as e:
            raise SetupError(
                f"parameters are on {device}, and the process group has no backend for it: call "
                'init_process_group("cpu:gloo,cuda:nccl")'
            ) from e
    if any(v.update.device != v.parameters[0].device for v in vectors) and not has_gloo(group):
        raise SetupError(
            "host=True exchanges over Gloo, which the process group has not: call "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )


class Vectors:
    """Parameters of one dtype and device, and vectors over them.

    point   what is the same on all ranks
    base    where this rank continued from after the last exchange or, while one is in flight, was when that
            began: what its optimizers have done since is base - parameters. The memory of `point`, if it
            always has the same values
    update  what is exchanged, and then the mean
    host    the vectors are in the host's memory, wherever the parameters are

    16-bit parameters (`wide`) round what is put into them, and most of a mean is smaller than what rounding
    removes. So their point and base are float32, and only the update, which travels, has their dtype. A base
    that is the point stands for the point as the parameters have rounded it. One with memory of its own
    holds the parameters as they are after the last exchange, plus what they had not sent by then. While an
    exchange is in flight it stays, because the exchange may fail; `left` is where the parameters were when it
    began. Other vectors have `left` in the memory of the base.
    """

    def __init__(
        self, names: list[str], named: Mapping[str, torch.Tensor], own_base: bool, host: bool = False
    ) -> None:
        self.names, self.host = names, host
        self.take(named)
        self.wide = self.parameters[0].dtype.itemsize < 4
        self.update, self.point = self._vector(), self._vector(self.wide)
        self.update_views, self.point_views = self._views(self.update), self._views(self.point)
        self.set_apart(own_base)

    def take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Uses these tensors as its parameters from now on."""
        self.parameters = [named[name] for name in self.names]

    def _vector(self, wide: bool = False) -> torch.Tensor:
        first = self.parameters[0]
        n, dtype = sum(p.numel() for p in self.parameters), torch.float32 if wide else first.dtype
        if not self.host or first.device.type == "cpu":
            return torch.zeros(n, dtype=dtype, device=first.device)
        return torch.zeros(n, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())

    def _views(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(x, [p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def set_apart(self, own_base: bool) -> None:
        """Gives the base memory of its own, or that of the point."""
        self.base = self._vector(self.wide) if own_base else self.point
        self.left = self._vector() if own_base and self.wide else self.base
        self.base_views, self.left_views = self._views(self.base), self._views(self.left)

    def separate(self) -> None:
        """Gives the base memory of its own, where it stays what it is."""
        if not self.apart:
            self.set_apart(True)
            self.base.copy_(self.rounded)

    @property
    def apart(self) -> bool:
        """Whether the base has memory of its own."""
        return self.base is not self.point

    def named(self, x: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """A vector's parts, with the parameters' names and shapes; None: the parameters."""
        return dict(zip(self.names, self.parameters if x is None else self._views(x), strict=True))

    def bucket(self) -> Bucket:
        return Bucket(self.names, [p.shape for p in self.parameters], self.update, self.parameters)

    @torch.no_grad()
    def start(self) -> None:
        """Takes the present parameters as the point."""
        torch._foreach_copy_(self.point_views, self.parameters)
        if self.apart:
            torch._foreach_copy_(self.base_views, self.parameters)
        self.mark()

    @torch.no_grad()
    def mark(self) -> None:
        """An exchange begins, during which the parameters may move on."""
        if self.apart:
            torch._foreach_copy_(self.left_views, self.parameters)

    def measure(self, start: torch.Tensor | None = None) -> None:
        """Takes what the parameters have moved from `start`, with the sign of a gradient, as the update.
        start: None: the base."""
        torch._foreach_copy_(self.update_views, self.parameters)
        if start is None:
            start = self.base if self.apart else self.rounded
        torch.sub(start, self.update, out=self.update)

    @property
    def rounded(self) -> torch.Tensor:
        """The point as the parameters hold it."""
        return self.point.to(self.update.dtype)

    def measure_departure(self) -> None:
        """Takes what the parameters had moved when the exchange began as the update. It may be called
        again."""
        if self.apart:
            torch.sub(self.base if self.wide else self.point, self.left, out=self.update)
        else:
            self.measure()

    @torch.no_grad()
    def resume(self, keep: bool) -> None:
        """Continues from the base. keep: with what the update holds, as `measure` has found it, which takes a
        base of its own."""
        if not self.wide:
            if keep:
                torch.sub(self.base, self.update, out=self.update)
            self.put(self.update_views if keep else self.base_views)
            return
        if keep:
            self.base.sub_(self.update)
        self.put(self.base_views)
        if self.apart:  # else nothing has been rounded that the point does not have
            torch._foreach_copy_(self.base_views, self.parameters)
            if keep:
                self.base.add_(self.update)

    @torch.no_grad()
    def carry(self) -> None:
        """Lets the next update also have what this one has, where the error is in the State's memory: in the
        parameters or, as these would round it, in the base."""
        if not self.wide:
            torch._foreach_sub_(self.parameters, self.update_views)
            if self.apart:
                self.base.copy_(self.point)
            return
        self.separate()
        self.base.add_(self.update)

    @torch.no_grad()
    def put(self, views: list[torch.Tensor]) -> None:
        """Copies a vector's parts into the parameters."""
        torch._foreach_copy_(self.parameters, views)


def named_values(vectors: Sequence[Vectors], kind: str) -> dict[str, torch.Tensor]:
    """Tensors by the parameters' names. kind: "own" for the parameters, else a vector's attribute."""
    every = ((v, None if kind == "own" else getattr(v, kind)) for v in vectors)
    return {name: x for v, vector in every for name, x in v.named(vector).items()}


def refuse_converted(vectors: Sequence[Vectors], every: bool) -> None:
    """Raises SetupError if the module has other dtypes, or is on another device, than when the vectors were
    made. every: looks at all parameters, else at one of each of the vectors."""
    for v in vectors:
        for name, p in zip(v.names if every else v.names[:1], v.parameters, strict=False):
            moved = p.device != v.update.device and not v.host
            if moved or p.dtype is not v.update.dtype:
                then, now = (f"{str(x.dtype)[6:]} on {x.device}" for x in (v.update, p))
                raise SetupError(
                    f"parameter {name!r} was converted since {CALL}() was called, from {then} to {now}: "
                    f"convert the module first, and then call {CALL}(). Nothing has stepped"
                )


def open_engine(state: State) -> Engine:
    """Returns the State's engine for an exchange. Raises SetupError if the State is closed, or follows an
    optimizer."""
    state.check_open()
    engine = state.engine
    if engine.rates is not None:
        raise SetupError(
            "state.follow() rescales residuals by the learning rate, which updates already contain: call "
            "state.follow(None)"
        )
    return engine


def serve(
    state: State,
    module: torch.nn.Module,
    named: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
    part: str = "",
    beside: int = 0,
) -> Model:
    """Makes the State serve the module. group: the ranks, which are connected here; None: the caller connects
    them. part: which shard these ranks hold; beside: as in `Model`. Plans compare with updates without a
    codec."""
    model = Model(
        group,  # type: ignore[arg-type]  # nobody reads it then
        {name: tuple(p.shape) for name, p in named.items()},
        {id(p): name for name, p in named_parameters(module)},
        part,
        plain="an uncompressed exchange",
        updates=True,
        beside=beside,
    )
    if state.door is not None and state.door.open:
        raise SetupError("this State serves a model already: give every model a State of its own")
    state.attach(ModuleDoor(module, model), roles(module))
    if group is not None:
        state.engine.connect(model, device, f"{CALL}()")
    return model


def buckets(named: dict[str, Any]) -> list[list[str]]:
    """Names of parameters of one dtype and device, up to about 25 MB each, the last parameters first."""
    out: list[list[str]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, p in reversed(named.items()):
        names, nbytes = open_.get((p.dtype, p.device), ([], 0))
        if not names or nbytes + p.numel() * p.element_size() > BUCKET_BYTES:
            names, nbytes = [], 0
            out.append(names)
        names.append(name)
        open_[p.dtype, p.device] = names, nbytes + p.numel() * p.element_size()
    return out


def cut(named: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Cuts the parameters into so many runs of about equal size, the last parameters first: the largest run
    is as small as can be. There must be at least as many parameters."""
    if parts == 1:
        return [named]
    names = list(reversed(named))
    low, high = max(p.numel() for p in named.values()), sum(p.numel() for p in named.values())
    while low < high:
        middle = (low + high) // 2
        if len(_runs(names, named, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    runs = _runs(names, named, low)
    while len(runs) < parts:  # halve the largest that can be
        i = max((i for i, run in enumerate(runs) if len(run) > 1), key=lambda i: _size(runs[i], named))
        half = min(
            range(1, len(runs[i])),
            key=lambda at: max(_size(runs[i][:at], named), _size(runs[i][at:], named)),
        )
        runs[i : i + 1] = [runs[i][:half], runs[i][half:]]
    return [{name: named[name] for name in reversed(run)} for run in runs]


def _size(names: list[str], named: dict[str, torch.Tensor]) -> int:
    return sum(named[name].numel() for name in names)


def _runs(names: list[str], named: dict[str, torch.Tensor], most: int) -> list[list[str]]:
    """The fewest runs of at most so many elements."""
    runs: list[list[str]] = []
    for name in names:
        if not runs or _size(runs[-1], named) + named[name].numel() > most:
            runs.append([])
        runs[-1].append(name)
    return runs


def by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    return list(kinds.values())


def finite(tensors: list[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf. The host waits once for each dtype and device."""
    found = [[torch.isfinite(x).all() for x in alike] for alike in by_kind(tensors)]
    return all(bool(torch.stack(of_one).all()) for of_one in found)


@torch.no_grad()
def whereabouts(steps: int, point: Sequence[torch.Tensor], noise: Noise | None) -> str:
    """Says how far a run is, for the comparison of all ranks. point: vectors that have the same bits on all
    ranks; they would move by the same mean, and never become the same again."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [int(x.view(kinds[x.element_size()]).sum(dtype=torch.int64)) for x in point]
    beside = "" if noise is None else f", noise {noise.position}"
    return f", {steps} steps{beside}, common point {hashlib.sha256(repr(sums).encode()).hexdigest()[:16]}"


@torch.no_grad()
def share(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gives the other ranks rank 0's tensors. If all have the same bytes already, as after the same seed or
    checkpoint, nothing is sent: over a slow link that would take minutes."""
    seen = hashlib.blake2b(digest_size=16)
    for x in tensors:
        seen.update(memoryview(bytes_of(x.detach().cpu()).numpy()))  # type: ignore[arg-type]
    if len(set(tell(group, seen.hexdigest(), text, "the comparison of the ranks' tensors"))) > 1:
        broadcast(tensors, lambda x: copy_from(0, x, group))


def copy_from(source: int, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Copies the tensor of a rank of the group to the others."""
    dist.broadcast(x, dist.get_global_rank(group, source), group)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes, which every backend takes, whatever the dtype."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def broadcast(tensors: list[torch.Tensor], send: Callable[[torch.Tensor], None]) -> None:
    """Copies a rank's tensors to the other ranks, all of one dtype and device in one call of `send`."""
    for alike in by_kind(tensors):
        parts = [bytes_of(x) for x in alike]
        flat = torch.cat(parts)
        with exchanging("copying a rank's tensors"):
            send(flat)
        for x, part in zip(alike, torch.split(flat, [len(part) for part in parts]), strict=True):
            x.copy_(part.view(x.dtype).view(x.shape))
