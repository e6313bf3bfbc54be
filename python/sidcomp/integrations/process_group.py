"""A process group that compresses the gradients that a program all-reduces.

    import sidcomp.integrations.process_group
    torch.distributed.init_process_group("cpu:sidcomp,cuda:sidcomp")

The rest of the program stays as it is. `SIDCOMP="topk:density=0.05"` in the environment, or `configure(...)`
before init_process_group, chooses the codec.

Everything goes to the inner group (Gloo on CPUs, NCCL on GPUs) untouched, except all-reduces of gradients: a
sum or an average of one large floating-point tensor, issued in a backward pass, on the default group or on a
group of data-parallel replicas. The backend recognizes them by the order in which they come. It watches whole
backward passes. When it has seen the same calls in two of them, it compresses these calls from the next one
on, each with a residual of its own. A pass that differs is sent uncompressed from the first call that
differs, and a line says so.

With reduce_scatter= the same holds for reduce-scatters, such as those of FSDP2. With all_gather= FSDP2's
gathers of parameters for forward and backward passes are rounded; FSDP2 itself tells which gathers these are
(parameter_groups.py).
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.multiprocessing.reductions import StorageWeakRef

from sidcomp import notices
from sidcomp.config import accuracy as accuracy_of
from sidcomp.config import specification
from sidcomp.config.grouping import UNITS
from sidcomp.config.kinds import is_list
from sidcomp.config.policy import by_size, check_rule, fits
from sidcomp.config.registry import find_codec
from sidcomp.errors import ArgumentError, ParameterError, SetupError, UnsupportedError
from sidcomp.integrations import parameter_groups
from sidcomp.integrations.all_gather import AllGather, for_parameters
from sidcomp.integrations.reduce_scatter import ReduceScatter
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.optimizer_watch import Unfollowed
from sidcomp.state import State

BACKEND = "sidcomp"
VARIABLE = "SIDCOMP"
# Names of the mesh dimensions over which PyTorch, torchtitan and others average gradients.
REPLICAS = ("replicate", "dp_replicate", "ddp", "dp", "data_parallel")
# And of those over which they shard a model; the last one is FSDP2's own name for a second group.
SHARDS = ("shard", "dp_shard", "dp_shard_cp", "fsdp", "fsdp_reduce_scatter")

_MEMORY = 16  # passes for which a list of calls is remembered without having come again
_PATIENCE = 20  # passes without two that are equal, after which a line says that nothing is compressed


class Coding(NamedTuple):
    """How reduce-scatters, or all-gathers, are compressed. exclude: rules for parameters gathered as they
    are."""

    codec: str
    memory: str
    parameters: dict[str, Any]
    seed: int
    exclude: tuple[str | int, ...]

    @property
    def lossless(self) -> bool:
        """There is nothing to compress."""
        codec = find_codec(self.codec)
        return codec.lossless and codec.linear

    def scatter(self, number: int) -> ReduceScatter:
        return ReduceScatter(self.codec, self.memory, self.parameters, self.seed, number)

    def gather(self, group: Any, number: int) -> AllGather:
        """group: one of FSDP2's parameter groups."""
        shapes = {str(i): tuple(p._orig_size) for i, p in enumerate(group.fsdp_params)}
        exact = {name for rule in self.exclude for name in fits(rule, shapes, {}, "exclude")}
        encoded = [name not in exact for name in shapes]
        return for_parameters(group.fsdp_params, encoded, self.codec, self.parameters, self.seed, number)


@dataclass(frozen=True)
class Configuration:
    """codec: None for State's default, or "off"; arguments: of State; groups: names of mesh dimensions whose
    groups compress, None for the usual ones; min_bytes: smaller tensors pass uncompressed."""

    codec: str | None
    arguments: dict[str, Any]
    groups: tuple[str, ...] | None
    min_bytes: int
    reduce_scatter: Coding | None = None
    all_gather: Coding | None = None

    def state(self, process_group: dist.ProcessGroup | None = None) -> State:
        made = State(self.codec, process_group=process_group, **self.arguments)
        made._finalizer.detach()  # the process group says itself what becomes of it
        made._engine.announced = True
        return made

    def costs(self) -> accuracy_of.Measured | None:
        """The codec, if nobody named it and it costs more beside Adam than the accuracy that was asked for
        allows."""
        if self.codec == "off":
            return None
        own = self.state().settings
        return accuracy_of.costly(own.accuracy, own.auto) if own.free else None


_configured: Configuration | None = None


def configure(
    codec: str | None = None,
    *,
    groups: str | Iterable[str] | None = None,
    min_bytes: int = 64 * 2**10,
    reduce_scatter: str | None = None,
    all_gather: str | None = None,
    **arguments: Any,
) -> None:
    """Chooses what the backend "sidcomp" compresses, and how. Call it before init_process_group: it holds for
    process groups that are made from here on, and takes precedence over the environment variable SIDCOMP.

        sidcomp.configure("topk", density=0.05)
        torch.distributed.init_process_group("cpu:sidcomp,cuda:sidcomp")

    codec, arguments    those of `State`; codec="off" compresses nothing. Each all-reduce is encoded for
                        itself, so the codec "auto", which plans groups, is refused. Tensors are flat and have
                        no parameter names, so rules in `exclude` and `policy` are about sizes only
    groups              the names of the process groups that compress: a mesh dimension's name, or a group's
                        `group_desc`. The default group always does. [None] "replicate", "dp_replicate",
                        "ddp", "dp" and "data_parallel"; reduce-scatters and all-gathers also on "shard",
                        "dp_shard", "dp_shard_cp", "fsdp" and "fsdp_reduce_scatter". (This is not `groups` of
                        a State.)
    min_bytes           [65536] smaller tensors pass uncompressed: of a reduce-scatter the input, of an
                        all-gather the output
    reduce_scatter      [None] a codec for reduce-scatters of gradients, such as "int8", or with parameters,
                        "topk:density=0.1,memory=residual". Without memory= it keeps no residual, because one
                        takes 4 bytes for each element of the whole model on every rank
    all_gather          [None] a dense or quantized codec for FSDP2's all-gathers of parameters in forward and
                        backward passes, such as "int8" or "int8:exclude=1-D"

    Both are for tensors on the CPU so far, and all_gather needs PyTorch 2.13.

    Raises ArgumentError or ParameterError, which say what to change.
    """
    global _configured
    given: Any = (groups,) if isinstance(groups, str) else groups
    names = tuple(given) if is_list(given) else None
    if given is not None and (names is None or not all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"groups={groups!r}: give a list of names of process groups, such as ['dp']")
    _configured = _configuration(codec, names, min_bytes, arguments, reduce_scatter, all_gather)


def _configuration(
    codec: str | None,
    groups: tuple[str, ...] | None,
    min_bytes: int,
    arguments: dict[str, Any],
    reduce_scatter: str | None,
    all_gather: str | None,
) -> Configuration:
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes!r}: give a number of bytes, at least 0")
    if "process_group" in arguments:
        raise ArgumentError("process_group: the backend compresses on the group that it is; leave it out")
    chosen = Configuration(
        codec,
        arguments,
        groups,
        min_bytes,
        _coding("reduce_scatter", reduce_scatter),
        _coding("all_gather", all_gather),
    )
    if codec == "off" and (chosen.reduce_scatter or chosen.all_gather):
        raise ArgumentError(
            "codec 'off' compresses nothing: leave reduce_scatter and all_gather out, or take the codec "
            "'none', which leaves all-reduces as they are"
        )
    if codec != "off":
        settings = chosen.state().settings  # raises here, not in backward(), what is wrong with it
        if settings.planned or settings.groups not in ("bucket", "layer"):
            raise ArgumentError(
                f"the backend {BACKEND!r} encodes each all-reduce for itself, because its caller may wait "
                f"for it before the next one, so it cannot have groups={settings.groups!r}: name a codec and "
                "leave groups out, or use sidcomp.register (DDP) or sidcomp.fsdp.compress (FSDP2 and HSDP), "
                "which plan groups"
            )
        if settings.clip_gradient:
            raise ArgumentError(
                f"the backend {BACKEND!r} sees one all-reduce after the other, not a model's gradient: leave "
                "clip_gradient out, and use torch.nn.utils.clip_grad_norm_"
            )
        rules = [*settings.policy.exclude, *(rule for rule, _ in settings.policy.rules)]
        if not all(map(by_size, rules)):
            raise ArgumentError(
                f"the backend {BACKEND!r} sees flat tensors, without the names and the shapes that the rule "
                f"{next(r for r in rules if not by_size(r))!r} of exclude= or policy= asks for: give sizes, "
                "such as '<128KB', or use sidcomp.register (DDP) or sidcomp.fsdp.compress (FSDP2 and HSDP)"
            )
    return chosen


def _coding(what: str, text: Any) -> Coding | None:
    """Reads reduce_scatter= or all_gather=; in a text that itself has commas, + stands for them."""
    if text in (None, "off"):
        return None
    try:
        if not isinstance(text, str):
            raise ArgumentError("give a text: a codec, and its parameters after a colon")
        codec, arguments = specification.parse(text.replace("+", ","))
        if codec is None:
            raise ArgumentError("name a codec")
        memory = arguments.pop("memory", None) or "none"
        seed = arguments.pop("seed", 0)
        exclude: tuple[Any, ...] = ()
        if what == "all_gather":
            if memory != "none":
                raise ArgumentError("parameters have no memory: leave memory= out")
            memory, exclude = "none", _exclude(arguments.pop("exclude", None))
            parameter_groups.check()
            AllGather(codec, arguments, seed, 0, [], int)
        else:
            ReduceScatter(codec, memory, arguments, seed, 0)
            traits = find_codec(codec).traits
            if memory == "none" and "sparse" in traits and "unbiased" not in traits:
                raise ArgumentError(
                    f"without a memory, what {codec!r} does not send is lost: add memory=residual, which "
                    "takes 4 bytes for each element of the whole model on every rank"
                )
    except (ArgumentError, ParameterError, UnsupportedError) as e:
        raise type(e)(f"{what}={text!r}: {e}") from e
    return Coding(codec, memory, arguments, seed, exclude)


def _exclude(rule: Any) -> tuple[Any, ...]:
    if rule is None:
        return ()
    check_rule(rule, "exclude")
    if rule != "1-D" and not by_size(rule):
        raise ArgumentError(
            f"exclude={rule!r}: the backend knows sizes and shapes of parameters, not names: give '1-D' or "
            "a size, such as '<128KB', or use sidcomp.fsdp.compress_all_gather"
        )
    return (rule,)


def _current() -> Configuration:
    if _configured is not None:
        return _configured
    text = os.environ.get(VARIABLE, "")
    try:
        codec, arguments = specification.parse(text)
        groups = tuple(str(arguments.pop("only")).split("+")) if "only" in arguments else None
        min_bytes = _bytes(arguments.pop("min_bytes", "64KB"))
        others = [arguments.pop(name, None) for name in ("reduce_scatter", "all_gather")]
        return _configuration(codec, groups, min_bytes, arguments, *others)
    except (ArgumentError, ParameterError) as e:
        raise type(e)(f"environment variable {VARIABLE}={text!r}: {e}") from e


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as 64KB."""
    text = str(value)
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit) and text[: -len(unit)].isdigit():
            return int(text[: -len(unit)]) * UNITS[unit]
    return value


class _Watch:
    """Notices that the backward passes of this process have no call that can be compressed."""

    def __init__(self) -> None:
        self.over = False  # there was such a call, or the program has been told
        self._task, self._passes = -1, 0
        self._why: set[str] = set()

    def met(self, why: str, group: "ProcessGroup") -> None:
        """The backward pass in progress has a call that passes uncompressed, and `why` says what it is."""
        task = torch._C._current_graph_task_id()
        if self.over or task == -1 or group.configuration.codec == "off" or group.size() == 1:
            return
        if task != self._task:
            self._task = task
            self._passes += 1
        self._why.add(why)
        if self._passes > _PATIENCE:
            self.over = True
            notices.warn(
                f'the backend "{BACKEND}" has compressed nothing in {_PATIENCE} backward passes: '
                + "; ".join(sorted(self._why)),
                group.rank(),
            )


_watch = _Watch()


def _trained() -> list[int]:
    """The ids of some parameters, at least one, of the model whose gradients the current call carries; none
    if it cannot be told. DDP and hooks of gradients issue it from the node that accumulates a parameter's
    gradient; of FSDP2's calls the parameter group is known, if `parameter_groups.watch` could begin."""
    if (unit := parameter_groups.reducing()) is not None:
        return [id(p.sharded_param) for p in unit.fsdp_params]
    variable = getattr(_node(), "variable", None)
    return [] if variable is None else [id(variable)]


_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


class Call(NamedTuple):
    """What an all-reduce or reduce-scatter of one place in the program has in common from step to step.

    owner: the number of FSDP2's parameter group; -1 if it is not FSDP2's.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    average: bool
    scatters: bool = False
    owner: int = -1


class Place(NamedTuple):
    """Where the tensor of a call was. storage: does not keep it alive."""

    address: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        return cls(tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    @property
    def freed(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor's storage: that very one, and not another one at the same address."""
        return self.address == tensor.data_ptr() and not self.freed


class Likeness(IntEnum):
    """How the tensors of a backward pass compare with those of an earlier one that had the same calls."""

    OTHER = 0  # an earlier one still exists somewhere else: the pass is another model's
    MOVED = 1  # earlier ones have been freed
    SAME = 2


class Program:
    """The all-reduces and reduce-scatters of one kind of backward pass, in order, and what compresses them: a
    State the all-reduces, and an object each the reduce-scatters. known: it compresses.

    fixed: its tensors stay where they are, as DDP's buckets do, and so tell its passes from those of other
    models. Otherwise only order and size do. All ranks agree on it.
    """

    def __init__(self, calls: list[Call], places: list[Place], last: int) -> None:
        self.calls, self.places = calls, places
        self.last = last  # the number of the last pass that had these calls, until they have a State
        self.fixed = self.known = False
        self.state: State | None = None
        self.buckets: dict[int, int] = {}  # of the calls that are all-reduces
        self.scatters: dict[int, ReduceScatter] = {}  # by the number of the call
        self.steps = 0
        self.holds = False  # the engine still holds the tensors of the last pass

    def learn(self, configuration: Configuration, group: "ProcessGroup", number: int) -> int:
        """Makes what compresses it. number: for the next reduce-scatter. Returns the one after."""
        self.known = True
        for i, call in enumerate(self.calls):
            if call.scatters:
                assert configuration.reduce_scatter is not None
                self.scatters[i] = configuration.reduce_scatter.scatter(number)
                number += 1
            else:
                self.buckets[i] = len(self.buckets)
        if self.buckets:
            self.state = configuration.state(group)
            self.state._attach(_Door(group, self, self.state._engine), {})
        return number

    @property
    def word(self) -> str:
        """What its calls are called together."""
        return "calls" if self.scatters else "all-reduces"

    def likeness(self, places: Sequence[Place]) -> Likeness:
        each = [
            Likeness.MOVED if old.freed else Likeness.SAME if old.address == new.address else Likeness.OTHER
            for old, new in zip(self.places, places, strict=True)
        ]
        return min(each)

    def fits(self, index: int, call: Call, tensor: torch.Tensor) -> bool:
        """Whether this may be its call number `index`. The same on all ranks."""
        if index >= len(self.calls) or self.calls[index] != call:
            return False
        return not self.fixed or self.places[index].holds(tensor)


class _Door:
    """Shows the engine one program's calls as buckets."""

    def __init__(self, group: "ProcessGroup", program: Program, engine: Engine) -> None:
        self.group, self.program, self.engine = group, program, engine
        self.calls = [program.calls[i] for i in program.buckets]
        self.names = [f"call{i}:{program.calls[i].numel}" for i in program.buckets]
        shapes: dict[str, tuple[int, ...]] = {
            name: (call.numel,) for name, call in zip(self.names, self.calls, strict=True)
        }
        self.model = Model(group, shapes, {})

    open = True

    def reset(self, error: Exception) -> None: ...

    def before_forward(self, function: Any) -> Any:
        raise SetupError(
            "a process group knows no parameters and no optimizer, so follow() cannot serve it: use "
            "sidcomp.register or sidcomp.fsdp.compress, or call update_scale() after each scaler.update()"
        )

    def form(self) -> None:
        buckets = []
        for name, call in zip(self.names, self.calls, strict=True):
            # Only the size counts here; `ready` replaces the buffer.
            like = torch.empty(1, dtype=call.dtype, device=call.device).expand(call.numel)
            buckets.append(Bucket([name], [(call.numel,)], like))
        self.engine.form(self.model, buckets)


class _Work(dist._Work):  # type: ignore[misc,name-defined]
    """The Work of a compressed all-reduce. Its future's value is a list with the tensor, as torch's is."""

    def __init__(
        self, future: "torch.futures.Future[torch.Tensor]", tensor: torch.Tensor, device: bool
    ) -> None:
        super().__init__()
        self._future, self._tensor, self._device = future, tensor, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        if seconds > 0 and not self._device and not self._future.done():
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(seconds):
                raise RuntimeError(
                    f"the compressed all-reduce timed out after {seconds:g} s: a rank has not called it, or "
                    "hangs"
                )
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Any:
        if self._future.done():
            try:
                self._future.value()
            except Exception as e:
                return e
        return None

    def synchronize(self) -> None:
        self._future.wait()

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for receives, and this is an all-reduce")

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        tensor = self._tensor

        def value(future: "torch.futures.Future[torch.Tensor]") -> list[torch.Tensor]:
            future.value()  # raises its error
            return [tensor]

        return self._future.then(value)


class _Decoding(dist._Work):  # type: ignore[misc,name-defined]
    """The Work of a compressed reduce-scatter or all-gather on the CPU: whoever waits for it decodes."""

    def __init__(self, exchange: dist.Work, decode: Callable[[], None], result: torch.Tensor) -> None:
        super().__init__()
        self._exchange, self._result = exchange, result
        self._decode: Callable[[], None] | None = decode
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def _end(self) -> None:
        with self._lock:
            if self._decode is not None:
                decode, self._decode = self._decode, None
                try:
                    decode()
                except Exception as e:
                    self._error = e
            if self._error is not None:
                raise self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout > timedelta(0):
            self._exchange.wait(timeout)
        else:
            self._exchange.wait()
        self._end()
        return True

    def is_completed(self) -> bool:
        return self._decode is None or self._exchange.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        if self.is_completed():
            try:
                self.wait()
            except Exception as e:
                return e
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [self._result]

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for receives")

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        def value(future: "torch.futures.Future[Any]") -> list[torch.Tensor]:
            future.value()  # raises its error
            self._end()
            return [self._result]

        try:
            exchanged = self._exchange.get_future()
        except RuntimeError:  # Gloo's all-to-all has none
            self.wait()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result([self._result])
            return done
        return exchanged.then(value)


class ProcessGroup(dist.ProcessGroup):
    """The process group of the backend "sidcomp". It holds an inner one, which does everything else.

    inner_config: what torch calls the inner group's backends, such as "cpu:gloo,cuda:nccl".
    """

    def __init__(
        self, inner: dist.ProcessGroup, inner_config: str, configuration: Configuration, rank: int, size: int
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner, self.inner_config, self.configuration = inner, inner_config, configuration
        self._name = ""
        self.programs: list[Program] = []
        # Whether this group compresses all-reduces, and what shards do; not known before it has its name.
        self._compresses: bool | None = None
        self._compresses_shards: bool | None = None
        self.gathers: weakref.WeakKeyDictionary[Any, AllGather] = weakref.WeakKeyDictionary()
        self._owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._gathered = self._scattered = 0  # numbers of the next ones
        scatters = configuration.reduce_scatter
        self._lossless = scatters is not None and scatters.lossless
        self._works: dict[ReduceScatter, _Decoding] = {}  # reduce-scatters that nobody has waited for
        self._told: set[str] = set()
        # Of Adam, beside a codec that nobody named: the ids of parameters whose gradients were compressed.
        self._costs = configuration.costs()
        self._trained: set[int] = set()
        self._unfollowed: Unfollowed | None = None
        self._active: Program | None = None  # what the backward pass in progress has been so far
        self._stopped = False  # the pass in progress is no longer the active program's
        self._clear()
        self._task = -1  # autograd's number of the backward pass in progress
        self._passes = 0  # backward passes that were watched in vain
        if configuration.reduce_scatter or configuration.all_gather or self._costs:
            parameter_groups.watch()
        for name in ("cpu", "cuda"):
            device = torch.device(name)
            try:
                backend = inner._get_backend(device)
            except RuntimeError:
                continue
            kind = (
                dist.ProcessGroup.BackendType.NCCL if name == "cuda" else dist.ProcessGroup.BackendType.GLOO
            )
            self._register_backend(device, kind, backend)

    # ---- what torch asks a process group written in Python
    # ------------------------------------------------------------------------------------------------

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)  # type: ignore[arg-type]

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def __repr__(self) -> str:
        return f"sidcomp.ProcessGroup({self._name}, over {self.inner_config}, {self._what()})"

    # ---- all-reduce
    # ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        call = self._eligible(tensors, *arguments, **named)
        if call is not None:
            work = self._reduce(call, tensors[0])
            if work is not None:
                return work
        return self.inner.allreduce(tensors, *arguments, **named)

    def _eligible(self, tensors: Any, *arguments: Any, **named: Any) -> Call | None:
        """Returns the call if it may be the all-reduce of a gradient."""
        if self._compresses is False or not isinstance(tensors, list) or len(tensors) != 1:
            return None
        x = tensors[0]
        average = self._reduces(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None:
            return None
        if x.nbytes < max(1, self.configuration.min_bytes):
            self._small("all-reduces")
            return None
        _watch.over = True
        if not x.is_contiguous():
            self._warn("not contiguous", "passes all-reduces of tensors that are not contiguous uncompressed")
            return None
        if not self._allowed():
            return None
        return Call(x.numel(), x.dtype, x.device, average)

    def _reduces(self, x: torch.Tensor, what: Any) -> bool | None:
        """Returns whether a call averages; None: it does not reduce a gradient. what: the call's options."""
        if (
            self.size() == 1
            or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or x.layout is not torch.strided
            or x.device.type not in ("cpu", "cuda")
            or torch._C._current_graph_task_id() == -1
        ):
            return None
        op = getattr(what, "reduceOp", what)
        average = bool(op == dist.ReduceOp.AVG)
        if not average and op is not None and op != dist.ReduceOp.SUM:
            return None
        return average

    def _small(self, what: str) -> None:
        least = self.configuration.min_bytes
        _watch.met(f"{what} are smaller than min_bytes={least}, which you can lower", self)

    def _allowed(self) -> bool:
        """Whether this group averages gradients, by its name."""
        if self._compresses is None:
            self._compresses = self._named(REPLICAS, "all-reduces")
        return self._compresses

    def _allowed_shards(self) -> bool:
        """Whether this group is one over which a model is sharded, by its name."""
        if self._compresses_shards is None:
            self._compresses_shards = self._named(REPLICAS + SHARDS, "reduce-scatters and all-gathers")
        return self._compresses_shards

    def _named(self, usual: tuple[str, ...], what: str) -> bool:
        c = self.configuration
        groups = usual if c.groups is None else c.groups
        names = {self.group_desc, self.group_desc.removeprefix("mesh_")}
        whole = self.group_desc in ("default_pg", "mesh_default") and self.size() == dist.get_world_size()
        chosen = c.codec != "off" and (whole or bool(names.intersection(groups)))
        if not chosen and c.codec != "off":
            self._say(
                f"not chosen: {what}",
                f"passes its {what} uncompressed, because {self.group_desc!r} is not among the groups to "
                f"compress ({', '.join(groups)}): configure(groups=...) adds it",
            )
        return chosen

    def _note(self, call: Call, tensor: torch.Tensor) -> tuple[Program, int] | None:
        """Counts a call of the backward pass in progress. Returns the program whose call it is, and the
        call's number, if it is to be compressed."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._end()  # a backward pass that failed has not said that it ended
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        index = len(self._calls)
        if index == 0:
            self._let_go(wait=True)
            self._active = self._choose(call, tensor)
        program = self._active
        fits = program is not None and program.fits(index, call, tensor)
        self._calls.append(call)
        self._places.append(Place.of(tensor))
        if program is None:
            return None
        if not fits:
            self._stop(f"call {index} of a backward pass is {_describe(call)}, not the one of earlier passes")
            return None
        return program, index

    def _reduce(self, call: Call, tensor: torch.Tensor) -> dist.Work | None:
        """Compresses the call, or returns None."""
        noted = self._note(call, tensor)
        if noted is None:
            return None
        program, index = noted
        assert program.state is not None
        engine = program.state._engine
        try:
            program.state._open()
            if engine.layout is None:
                door = program.state._door
                assert isinstance(door, _Door)
                door.form()
                self._announce(program)
            flat = tensor.detach().view(-1)
            if not call.average:
                flat.mul_(self.size())  # the engine averages
            program.holds = True
            if self._costs is not None and not program.steps:
                self._look_for_adam(index == 0)
            future = engine.ready(program.buckets[index], flat)
        except Exception as e:
            engine.report(e)
            engine.abandon(e)
            self._active = None
            raise
        return _Work(future, tensor, call.device.type != "cpu")

    # ---- reduce-scatter
    # ------------------------------------------------------------------------------------------------

    def _scatter(self, output: torch.Tensor, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """Returns the Work of a compressed reduce-scatter, or None if it passes untouched."""
        coding = self.configuration.reduce_scatter
        if coding is None:
            _watch.met(
                "the model is sharded, so its gradients are reduce-scattered, and the backend compresses "
                "only all-reduces: ask for reduce_scatter=int8, or use sidcomp.fsdp.compress for HSDP",
                self,
            )
            return None
        if self._compresses_shards is False or self._lossless:
            return None
        average = self._reduces(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None or output.dtype != x.dtype or output.numel() * self.size() != x.numel():
            return None
        if x.nbytes < max(1, self.configuration.min_bytes):
            self._small("reduce-scatters")
            return None
        _watch.over = True
        if not x.is_contiguous() or not output.is_contiguous():
            self._warn(
                "scatter not contiguous",
                "passes reduce-scatters of tensors that are not contiguous uncompressed",
            )
            return None
        if not self._allowed_shards():
            return None
        self._on_cpu(x, "reduce_scatter")
        unit = parameter_groups.reducing()
        owner = -1 if unit is None else self._owners.setdefault(unit, len(self._owners))
        noted = self._note(Call(x.numel(), x.dtype, x.device, average, True, owner), x)
        if noted is None:
            return None
        program, index = noted
        one = program.scatters[index]
        try:
            if one in self._works:
                self._works[one].wait()
            received, sent = one.encode(x, output.numel(), self.rank(), self.size())
            exchange = self.inner.alltoall_base(received, sent, [], [])
        except Exception:
            self._active = None
            raise

        def decode() -> None:
            self._works.pop(one, None)
            one.decode(output, average)

        self._works[one] = work = _Decoding(exchange, decode, output)
        return work

    def _on_cpu(self, x: torch.Tensor, what: str) -> None:
        if x.device.type != "cpu":
            raise UnsupportedError(
                f"{what}= is for tensors on the CPU so far, and this one is on {x.device}: leave it out"
            )

    # ---- all-gather
    # ------------------------------------------------------------------------------------------------

    def _gather(self, output: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Returns the Work of an all-gather of rounded parameters, or None if it passes untouched."""
        coding = self.configuration.all_gather
        if coding is None or self.size() == 1 or self._compresses_shards is False:
            return None
        if (
            output.nbytes < max(1, self.configuration.min_bytes)
            or output.dtype != x.dtype
            or not (output.is_contiguous() and x.is_contiguous())
        ):
            return None
        found = parameter_groups.gathering()
        if found is None and parameter_groups.gathering_exactly():
            self._say(
                "gathered",
                "gathers some parameters as they are, because a forward pass has run on what the program "
                "itself had gathered by unshard()",
            )
        if found is None or not self._allowed_shards():
            return None
        if x.dtype not in DTYPES:
            self._warn(
                "dtypes",
                f"gathers parameters as {x.dtype}, as they are: give those of one fully_shard call one dtype",
            )
            return None
        self._on_cpu(x, "all_gather")
        group, known = found
        if group not in self.gathers:
            self.gathers[group] = coding.gather(group, self._gathered)
            self._gathered += 1
        one = self.gathers[group]
        if not one.fits(x):
            return None
        self._say(
            "gathers",
            f"rounds the parameters that FSDP2 gathers for forward and backward passes to {coding.codec}. "
            "Shards and checkpoints stay as they are.",
        )
        received, sent = one.encode(x, self.rank(), self.size())
        exchange = getattr(self.inner, _GATHER)(received, sent)
        known.rounded = True
        return _Decoding(exchange, lambda: one.decode(output, received), output)

    # ---- backward passes
    # ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._calls: list[Call] = []
        self._places: list[Place] = []
        self._active = None

    def _choose(self, call: Call, tensor: torch.Tensor) -> Program | None:
        """Returns the only known program that begins with this call. All ranks must choose the same one, so
        nothing counts here that is not the same on all, such as whether a tensor has been freed already."""
        found = [p for p in self.programs if p.fits(0, call, tensor)]
        possible = [p for p in found if p.fixed] or found
        if len(possible) > 1 and any(p.known for p in possible):
            self._warn(
                "ambiguous",
                "cannot tell which of several backward passes has begun, and sends it uncompressed: give "
                "each model a process group of its own",
            )
        return possible[0] if len(possible) == 1 and possible[0].known else None

    def _let_go(self, wait: bool = False) -> None:
        """Drops the tensors of the last pass, which tell by being freed that their calls have others now."""
        for p in self.programs:
            if p.state is not None and p.holds:
                engine = p.state._engine
                if wait:
                    engine.quiet()
                if engine.current.over and not (engine.on_device and not wait):
                    engine.let_go()
                    p.holds = False

    def _stop(self, why: str) -> None:
        """Ends the use of the active program in this backward pass."""
        program, self._active = self._active, None
        assert program is not None
        if program.state is not None:
            program.state._engine.end_early()
        self._stopped = True
        self._warn("different", f"sends the rest of a backward pass uncompressed: {why}")

    def _end(self) -> None:
        """A backward pass has ended."""
        if self._unfollowed is not None and self._unfollowed.over:
            self._stop_looking()
        program, stopped = self._active, self._stopped
        if program is not None and len(self._calls) < len(program.calls):
            self._stop(
                f"it had {len(self._calls)} {program.word}, and earlier passes had {len(program.calls)}"
            )
        elif program is not None:
            program.steps += 1
            if program.steps == 1 and program.scatters:
                self._announce_scatters(program)
        elif self._calls and not stopped:
            self._learn()
        self._stopped = False
        self._clear()
        self._let_go()
        self._task = -1

    def _learn(self) -> None:
        """Compares a pass that no known program fits with earlier ones. All ranks are here, and agree."""
        if self._passes >= _PATIENCE and not any(p.known for p in self.programs):
            return  # it has said that it gives up
        self._passes += 1
        self.programs = [p for p in self.programs if p.known or p.last > self._passes - _MEMORY]
        alike = [p for p in self.programs if p.calls == self._calls and not (p.known and p.fixed)]
        alike.sort(key=lambda p: not p.known)
        likeness = self._agreed([p.likeness(self._places) for p in alike], self._calls[0].device)
        best = max(likeness, default=Likeness.OTHER)
        if best is Likeness.OTHER:
            self.programs.append(Program(self._calls, self._places, self._passes))
        else:
            self._came_again(alike, likeness, best)
        if self._passes == _PATIENCE and not any(p.known for p in self.programs):
            self._warn(
                "nothing",
                f"has compressed nothing in {_PATIENCE} backward passes, because no two of them had the same "
                "all-reduces, and gives up: sidcomp.register or sidcomp.fsdp.compress know the model",
            )

    def _came_again(self, alike: list[Program], likeness: list[Likeness], best: Likeness) -> None:
        """Learns from a pass that had the calls of earlier ones. alike: their programs, the known ones first;
        best: the greatest likeness."""
        found = alike[likeness.index(best)]
        found.places, found.last, found.fixed = self._places, self._passes, best is Likeness.SAME
        if not found.known and (found.fixed or not alike[0].known):
            self._scattered = found.learn(self.configuration, self, self._scattered)
        # Two programs with the same calls, neither of them fixed, can never be told apart. They are one if no
        # tensor of either is left: an exchange may let go of a tensor only after the next pass has begun.
        if not found.fixed:
            moved = [p for p, like in zip(alike, likeness, strict=True) if like is Likeness.MOVED]
            self.programs = [p for p in self.programs if p is found or p not in moved]

    def _agreed(self, mine: list[Likeness], device: torch.device) -> list[Likeness]:
        """The least that any rank says. One rank may have freed a tensor that another one still has."""
        if not mine:
            return []
        least = torch.tensor(mine, dtype=torch.int32, device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self.inner.allreduce([least], options).wait()
        return [Likeness(x) for x in least.tolist()]

    # ---- Adam
    # ------------------------------------------------------------------------------------------------

    def _look_for_adam(self, first: bool) -> None:
        """Looks for an optimizer that the codec does not suit. first: the call is the first of a program that
        has not been compressed yet, so optimizers that were of no interest may be its own."""
        self._trained.update(_trained())
        if (first or self._unfollowed is None) and self._trained:
            self._stop_looking()
            self._unfollowed = Unfollowed(self._unsuited, self._trained)

    def _stop_looking(self) -> None:
        if self._unfollowed is not None:
            self._unfollowed.remove()
            self._unfollowed = None

    def _unsuited(self, optimizer: torch.optim.Optimizer) -> None:
        costs, self._costs = self._costs, None
        if costs is None:
            return
        own = next(p.state.settings for p in self.programs if p.state is not None)
        (codec, parameters), *_ = accuracy_of.allowed(own.accuracy, of_adaptive=True)
        name = ":".join([codec, ",".join(f"{k}={v}" for k, v in parameters.items())]).rstrip(":")
        notices.warn(
            accuracy_of.warning(
                optimizer,
                f"process group {self.group_desc!r} of the backend {BACKEND!r}",
                f"uses {own.candidates[0].encoding}",
                costs,
                f"name a codec, SIDCOMP={name} in the environment, or in configure() or process_group()",
            ),
            self.rank(),
        )

    # ---- what it says
    # ------------------------------------------------------------------------------------------------

    def _say(self, topic: str, text: str) -> None:
        """Says a line once."""
        if topic not in self._told:
            self._told.add(topic)
            notices.say(f"process group {self.group_desc!r} {text}", self.rank())

    def _warn(self, topic: str, text: str) -> None:
        """Warns once that a call is not compressed; an error under strict(). All ranks call it."""
        if topic not in self._told or notices.is_strict():
            self._told.add(topic)
            notices.warn(f"process group {self.group_desc!r} {text}", self.rank())

    def _what(self) -> str:
        states = [p.state for p in self.programs if p.state is not None]
        return repr(states[0]) if states else "compresses nothing yet"

    def _announce(self, program: Program) -> None:
        assert program.state is not None
        groups = program.state._engine.groups
        sent = sum(g.bytes_sent for g in groups)
        calls = [program.calls[i] for i in program.buckets]
        dense = sum(c.numel * c.dtype.itemsize for c in calls)
        self._say(
            f"compresses {id(program)}",
            f"compresses {len(calls)} all-reduces of each backward pass ({dense / 1e6:.1f} MB) with "
            f"{groups[0].plan.codec}: {sent / 1e6:.2f} MB, 1/{dense / sent:.0f} of it. All else passes "
            f"untouched to {self.inner_config}.",
        )

    def _announce_scatters(self, program: Program) -> None:
        assert self.configuration.reduce_scatter is not None
        made = program.scatters.values()
        sent, dense = (sum(getattr(x, name) for x in made) for name in ("sent_bytes", "dense_bytes"))
        self._say(
            f"scatters {id(program)}",
            f"compresses {len(made)} reduce-scatters of each backward pass ({dense / 1e6:.2f} MB) with "
            f"{self.configuration.reduce_scatter.codec}: {sent / 1e6:.2f} MB, {sent / dense:.2f} of it.",
        )


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    call.__name__ = name
    call.__doc__ = "Passes the call to the inner group."
    return call


# torch's own versions of these would reach the inner backends too. But for a process group written in Python
# they hold the interpreter's lock while Gloo waits for a thread that may need it, and hang (torch 2.13).
_PASSED_ON = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "_start_coalescing", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    "send",
)  # fmt: skip
for _name in _PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _passed_on(_name))


def _tried(name: str, compress: Callable[..., Any]) -> Callable[..., Any]:
    passed_on = _passed_on(name)

    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        work = compress(self, *arguments, **named) if len(arguments) > 1 else None
        return passed_on(self, *arguments, **named) if work is None else work

    call.__name__ = name
    call.__doc__ = "Compresses the call, or passes it to the inner group."
    return call


_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
for _name in ("_reduce_scatter_base", "reduce_scatter_single"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _tried(_name, ProcessGroup._scatter))
for _name in ("_allgather_base", "all_gather_single"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _tried(_name, ProcessGroup._gather))


def _describe(call: Call) -> str:
    what = f"{'an average' if call.average else 'a sum'} of {call.numel} x {str(call.dtype)[6:]}"
    return f"a reduce-scatter, {what}" if call.scatters else what


# ---- making one
# ----------------------------------------------------------------------------------------------------


def _make(options: Any, _backend_options: Any) -> ProcessGroup:
    """What torch calls to make a process group of this backend."""
    global _watch
    if not dist.is_initialized():  # the default group: another run begins
        _watch = _Watch()
    rank, size = options.group_rank, options.group_size
    if _given is not None:
        given, configuration = _given
        return ProcessGroup(given, str(dist.get_backend_config(given)), configuration, rank, size)
    configuration = _current()
    inner = dist.ProcessGroup(options.store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", options.store), rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    config = "cpu:gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, settings)
        nccl._set_sequence_number_for_group()
        inner._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        inner._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        config += ",cuda:nccl"
    return ProcessGroup(inner, config, configuration, rank, size)


_given: tuple[dist.ProcessGroup, Configuration] | None = None  # for `_make`, in process_group()


def process_group(
    inner: dist.ProcessGroup,
    codec: str | None = None,
    *,
    min_bytes: int = 64 * 2**10,
    reduce_scatter: str | None = None,
    all_gather: str | None = None,
    **arguments: Any,
) -> ProcessGroup:
    """Returns a process group over the ranks of `inner` that compresses gradients as the backend "sidcomp"
    does, and passes everything else to `inner`. Every rank of `inner` calls it at the same point.

        compressing = sidcomp.process_group(group, "topk", density=0.05)
        ddp = DistributedDataParallel(module, process_group=compressing)

    inner: any process group, of any backend, of which this rank is a member. codec, min_bytes,
    reduce_scatter, all_gather, arguments: as in `configure`, which it does not read, and neither does it read
    SIDCOMP. Raises ArgumentError or ParameterError.
    """
    global _given
    if not isinstance(inner, dist.ProcessGroup):
        raise ArgumentError(f"inner={inner!r}: give a process group of which this rank is a member")
    configuration = _configuration(codec, (), min_bytes, arguments, reduce_scatter, all_gather)
    _given = inner, configuration
    try:
        made = dist.new_group(
            dist.get_process_group_ranks(inner),
            backend=BACKEND,
            use_local_synchronization=True,
            group_desc=inner.group_desc,
        )
    finally:
        _given = None
    assert isinstance(made, ProcessGroup)
    made._compresses = made._compresses_shards = configuration.codec != "off"
    return made


def _register() -> None:
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])


_register()
