"""A process group that compresses the gradients that a program all-reduces.

    import sidcomp.doors.backend.process_group
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

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sidcomp import notices
from sidcomp.config import accuracy as accuracy_of
from sidcomp.config.accuracy import adaptive
from sidcomp.doors.backend import checkpoint as backend_checkpoint
from sidcomp.doors.backend.after_backward import AfterBackward
from sidcomp.doors.backend.agreement import check_same
from sidcomp.doors.backend.configuration import (
    BACKEND,
    REPLICAS,
    SHARDS,
    Configuration,
    configuration_of,
    configure,
    current,
)
from sidcomp.doors.backend.ddp_buckets import Holding, Seen, holdings, models_on
from sidcomp.doors.backend.recognition import AT_END, PATIENCE, Call, Door, Origin, Passes, Program, whose
from sidcomp.doors.backend.works import Decoding, Reducing
from sidcomp.doors.fsdp import parameter_groups
from sidcomp.doors.fsdp.all_gather import AllGather
from sidcomp.doors.fsdp.reduce_scatter import ReduceScatter
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.runtime.announcement import compressed
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.members import Members, checked, known, members_of
from sidcomp.runtime.optimizer_watch import Unfollowed

__all__ = ["BACKEND", "ProcessGroup", "configure", "process_group"]


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
        if self._passes > PATIENCE:
            self.over = True
            notices.warn(
                f'the backend "{BACKEND}" has compressed nothing in {PATIENCE} backward passes: '
                + "; ".join(sorted(self._why)),
                group.rank(),
            )


_watch = _Watch()


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
        # Whether this group compresses all-reduces, and what shards do; not known before it has its name.
        self._compresses: bool | None = None
        self._compresses_shards: bool | None = None
        self.gathers: weakref.WeakKeyDictionary[Any, AllGather] = weakref.WeakKeyDictionary()
        self._gathered = self._scattered = 0  # numbers of the next ones
        scatters = configuration.reduce_scatter
        self._lossless = scatters is not None and scatters.lossless
        self._works: dict[ReduceScatter, Decoding] = {}  # reduce-scatters that nobody has waited for
        self._told: set[str] = set()
        # Of Adam, beside a codec that nobody named: the ids of parameters whose gradients were compressed.
        self._costs = configuration.costs()
        self._trained: set[int] = set()
        self._unfollowed: Unfollowed | None = None
        self._settled = False  # all ranks have the same settings
        self._seen: Seen | None = None  # while loaded programs wait for DDP models
        self._loaded = "nothing"  # from a checkpoint: what must be the same on all ranks
        self._former: dict[str, list[Program]] = {"passes": [], "after": []}  # whose calls have yet to come
        self._watch_anew()
        self._task = -1  # autograd's number of the backward pass in progress
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

    def _watch_anew(self) -> None:
        """Begins to learn which calls backward passes have."""
        callbacks = self._learn, self._forget, self._least, self._warn, self._holdings
        self._passes = Passes(*callbacks)
        asked = self.configuration.outside
        self._after = AfterBackward(
            *callbacks, asked=asked, tell=self._tell_of_outside, stepping=self._stepping
        )

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
        if self._passes_by(self._compresses) or not isinstance(tensors, list) or len(tensors) != 1:
            return None
        x = tensors[0]
        average = self._averages(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None or not self._of_gradient(x):
            return None
        self._settle(x.device)
        if self._compresses is False:
            return None
        if x.nbytes < self._least_bytes:
            self._small("all-reduces")
            return None
        inside = torch._C._current_graph_task_id() != -1
        _watch.over = _watch.over or inside
        if not self._allowed() or (self._after.over and not inside):
            return None
        if not x.is_contiguous():
            if inside or self.configuration.outside:
                self._warn(
                    "not contiguous", "passes all-reduces of tensors that are not contiguous uncompressed"
                )
            return None
        return Call(x.numel(), x.dtype, x.device, average)

    def _averages(self, x: torch.Tensor, what: Any) -> bool | None:
        """Returns whether a call averages; None: it reduces no gradient. what: the call's options."""
        if (
            self.size() == 1
            or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or x.layout is not torch.strided
            or x.device.type not in ("cpu", "cuda")
        ):
            return None
        op = getattr(what, "reduceOp", what)
        average = bool(op == dist.ReduceOp.AVG)
        return average if average or op is None or op == dist.ReduceOp.SUM else None

    def _of_gradient(self, x: torch.Tensor) -> bool:
        """Whether an all-reduce may be that of gradients of parameters. The same on all ranks, whatever their
        settings are."""
        if torch._C._current_graph_task_id() != -1:
            known = whose() is not None
            if not known:
                self._leave(x, self._allowed)
            return known
        if self._settled and (self._after.over or x.nbytes < self._least_bytes):
            return False
        return self._after.begin()

    @property
    def _least_bytes(self) -> int:
        return max(1, self.configuration.min_bytes)

    def _passes_by(self, compresses: bool | None) -> bool:
        """Whether no call of this kind is compressed, and the other ranks know."""
        return self._settled and compresses is False

    def _settle(self, device: torch.device) -> None:
        """Raises RankError on all ranks if they have other settings. Each rank calls it, whatever its own
        are, before the group's first pass that could be compressed."""
        if not self._settled:
            lines = [*self.configuration.lines(), f"loaded {self._loaded}"]
            check_same(self.inner, self.size(), lines, device, self.group_desc)
            self._settled = True

    def _leave(self, x: torch.Tensor, allowed: Callable[[], bool]) -> None:
        """Says once that a call of a backward pass passes untouched, if it would else be compressed."""
        if x.nbytes < self._least_bytes or not allowed():
            return
        self._say(
            "exact",
            "leaves a backward pass's all-reduces and reduce-scatters exact, except those in hooks of "
            "parameters' gradients and at the end of the pass: others, as those of a differentiable "
            "all-gather, carry gradients of activations",
        )
        _watch.met(
            "their all-reduces are not known to carry gradients of parameters: issue those in hooks of the "
            "gradients of torch.nn.Parameter",
            self,
        )

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
            if not program.formed or engine.outdated:
                door, first = program.state._door, engine.layout is None
                assert isinstance(door, Door)
                door.form()
                if first:
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
            (self._passes if program in self._passes.programs else self._after).give_up()
            raise
        return Reducing(future, tensor, call.device.type != "cpu")

    # ---- reduce-scatter
    # ------------------------------------------------------------------------------------------------

    def _scatter(self, output: torch.Tensor, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """Returns the Work of a compressed reduce-scatter, or None if it passes untouched."""
        if self._passes_by(self._compresses_shards):
            return None
        asked = self.configuration.reduce_scatter is not None
        average = self._averages(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None or torch._C._current_graph_task_id() == -1:
            return None
        if whose() is None:
            self._leave(x, self._allowed_shards if asked else lambda: False)
            return None
        self._settle(x.device)
        if not asked:
            _watch.met(
                "the model is sharded, so its gradients are reduce-scattered, and the backend compresses "
                "only all-reduces: ask for reduce_scatter=int8, or use sidcomp.fsdp.compress for HSDP",
                self,
            )
            return None
        if (
            self._compresses_shards is False
            or self._lossless
            or output.dtype != x.dtype
            or output.numel() * self.size() != x.numel()
        ):
            return None
        if x.nbytes < self._least_bytes:
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
        noted = self._note(Call(x.numel(), x.dtype, x.device, average, True), x)
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
            self._passes.give_up()
            raise

        def decode() -> None:
            self._works.pop(one, None)
            one.decode(output, average)

        self._works[one] = work = Decoding(exchange, decode, output)
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
        if self.size() == 1 or self._passes_by(self._compresses_shards):
            return None
        found = parameter_groups.gathering()
        if found is not None:
            self._settle(x.device)
        if (
            coding is None
            or output.nbytes < self._least_bytes
            or output.dtype != x.dtype
            or not (output.is_contiguous() and x.is_contiguous())
        ):
            return None
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
        return Decoding(exchange, lambda: one.decode(output, received), output)

    # ---- backward passes
    # ------------------------------------------------------------------------------------------------

    @property
    def programs(self) -> list[Program]:
        """The lists of calls that backward passes have had, and then those of what followed such passes."""
        return self._passes.programs + self._after.programs

    def _note(self, call: Call, tensor: torch.Tensor) -> tuple[Program, int] | None:
        """Counts a call. Returns the program whose call it is, and the call's number, if it is to be
        compressed."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return self._after.note(call, tensor, None)
        if task != self._task:
            self._end()  # a backward pass that failed has not said that it ended
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return self._passes.note(call, tensor, Origin.of(whose()))

    def _end(self) -> None:
        """A backward pass has ended."""
        if self._unfollowed is not None and self._unfollowed.over:
            self._stop_looking()
        self._task = -1
        program = self._passes.end()
        if self._seen is not None and not any(p.loaded and p.pieces for p in self._passes.programs):
            self._seen.close()
            self._seen = None
        if program is not None and program.steps == 1 and program.scatters:
            self._announce_scatters(program)

    def _learn(self, program: Program) -> None:
        """Makes what compresses a program."""
        for ddp in models_on(self):
            held = self._large(holdings(ddp))
            if [Call(h.numel, h.dtype, h.device, False) for h in held] == program.calls and any(
                o is None or o.one_of(ddp.parameters()) for o in program.origins
            ):
                program.pieces = [h.pieces for h in held]
        self._scattered = program.learn(self.configuration, self, self._scattered)

    def _large(self, held: list[Holding]) -> list[Holding]:
        """Of a DDP model's buckets those whose all-reduces may be compressed."""
        least = self._least_bytes
        return [h for h in held if h.numel * h.dtype.itemsize >= least and h.dtype in DTYPES]

    def _holdings(self, origin: Origin | None) -> list[Holding]:
        """The buckets of the DDP model whose gradients a call carries, if it is one of this group."""
        seen = self._seen.items() if self._seen is not None else []
        own = [held for ddp, held in seen if origin is None or origin.one_of(ddp.parameters())]
        return self._large(own[0]) if len(own) == 1 else []

    def _forget(self, program: Program) -> None:
        """Frees what compressed a model that is gone."""
        program.close()
        for one in program.scatters.values():
            self._works.pop(one, None)

    def _least(self, mine: list[int], device: torch.device) -> list[int]:
        """The least that any rank says. All ranks call it."""
        least = torch.tensor(mine, dtype=torch.int32, device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self.inner.allreduce([least], options).wait()
        return [int(x) for x in least.tolist()]

    # ---- checkpoints
    # ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank has learnt of its passes, with the residuals: tensors and plain types. Each rank
        saves its own. Call it between two steps."""
        return backend_checkpoint.save(self)

    def load_state_dict(
        self, state: "dict[str, Any] | Sequence[dict[str, Any]]", redistribute: str = "sum"
    ) -> None:
        """Loads a result of `state_dict`: this rank's own, or a list of those of all old ranks, as
        `State.load_state_dict` does for another number of ranks. Every rank calls it, before the first
        backward pass. Its lists of calls are then compressed from their first pass on.

        Raises CheckpointError, and changes nothing, if the state is damaged or is of another rank, or if the
        settings lack what it needs; SetupError after the first pass.
        """
        if self._settled:
            raise SetupError(
                "load_state_dict comes after this process group's first backward pass: call it before, on "
                "every rank"
            )
        passes, after = backend_checkpoint.load(self, state, redistribute)
        self._passes.programs, self._after.programs = passes, after
        steps = [p.state._engine.step for p in (*passes, *after) if p.state is not None]
        self._loaded = f"{len(passes)} + {len(after)} lists of calls, at steps {steps}"
        self._scattered = max((p.number + len(p.scatters) for p in passes), default=0)
        if self._seen is None and any(p.pieces for p in passes):
            self._seen = Seen(self)

    # ---- between a backward pass and a step
    # ------------------------------------------------------------------------------------------------

    def _tell_of_outside(self, program: Program) -> None:
        size = sum(call.numel * call.dtype.itemsize for call in program.calls)
        if self._allowed():
            self._warn(
                "outside",
                f"passes {len(program.calls)} all-reduces ({size / 1e6:.2f} MB) between backward() and each "
                "step of the optimizer uncompressed: if they carry gradients, add outside=True to SIDCOMP, "
                "or give it to configure() or process_group()",
            )

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step on gradients that were compressed after backward()."""
        if self._costs is not None and adaptive(optimizer):
            self._unsuited(optimizer)

    # ---- Adam
    # ------------------------------------------------------------------------------------------------

    def _look_for_adam(self, first: bool) -> None:
        """Looks for an optimizer that the codec does not suit. first: the call is the first of a program that
        has not been compressed yet, so optimizers that were of no interest may be its own."""
        trained = whose()
        if isinstance(trained, torch.Tensor):
            self._trained.add(id(trained))
        elif trained is not AT_END:
            self._trained.update(id(p.sharded_param) for p in trained.fsdp_params)
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
        codec = next((g.plan.codec for g in groups if compressed(g)), groups[0].plan.codec)
        where = "of" if program in self._passes.programs else "after"
        notices.say(
            f"process group {self.group_desc!r} compresses {len(calls)} all-reduces {where} each backward "
            f"pass ({dense / 1e6:.1f} MB) with {codec}: {sent / 1e6:.2f} MB, "
            f"1/{dense / sent:.0f} of it. All else passes untouched to {self.inner_config}.",
            self.rank(),
        )

    def _announce_scatters(self, program: Program) -> None:
        assert self.configuration.reduce_scatter is not None
        made = program.scatters.values()
        sent, dense = (sum(getattr(x, name) for x in made) for name in ("sent_bytes", "dense_bytes"))
        notices.say(
            f"process group {self.group_desc!r} compresses {len(made)} reduce-scatters of each backward pass "
            f"({dense / 1e6:.2f} MB) with {self.configuration.reduce_scatter.codec}: {sent / 1e6:.2f} MB, "
            f"{sent / dense:.2f} of it.",
            self.rank(),
        )


class ChangingGroup(ProcessGroup):
    """A group of the backend "sidcomp" over one that torch.distributed does not know. Its owner may give that
    other members between two steps, as torchft's Manager does.

    Members that are new know no calls yet, so after a change all learn them anew. The residuals of the others
    wait until then.

    place: returns rank, size and store; None: the inner group is asked.
    """

    def __init__(
        self, inner: dist.ProcessGroup, configuration: Configuration, place: Callable[[], Any] | None
    ) -> None:
        self._place = place
        self._now: Members | None = None  # those whose calls are learnt
        super().__init__(inner, type(inner).__name__, configuration, 0, 1)
        self._compresses = configuration.codec != "off"
        self._compresses_shards = False
        self._set_group_desc(type(inner).__name__)

    def members(self) -> Members:
        """The present ones. Raises SetupError."""
        if self._place is None:
            return members_of(self.inner)
        found = self._place()
        if not isinstance(found, tuple) or len(found) != 3:
            raise SetupError(f"place() returned {found!r}: let it return (rank, size, store)")
        try:
            return checked(*found, since=found[2])
        except SetupError as e:
            raise SetupError(f"place() returned {found!r}: {e}") from None

    def rank(self) -> int:
        return self.members().rank

    def size(self) -> int:
        return self.members().size

    getRank, getSize = rank, size  # what torch's own code in C++ calls

    def setGroupName(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """What torch's process groups do not have, such as reconfigure(), is the inner one's."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.inner, name)

    def allreduce(self, tensors: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        task = torch._C._current_graph_task_id()
        begins = task != self._task if task != -1 else not self._after.begun
        if begins and self._compresses:
            self._follow()
        return super().allreduce(tensors, *arguments, **named)

    def _follow(self) -> None:
        """A list of calls begins: the members may be other ones than before."""
        now = self.members()
        if self._now is None or not self._now.same(now):
            self._now, self._settled = now, False
            for part, passes in (("passes", self._passes), ("after", self._after)):
                programs = [*self._former[part], *passes.programs]
                self._former[part] = [p for p in programs if p.known and not p.gone]
            self._watch_anew()

    def _learn(self, program: Program) -> None:
        for former in self._former.values():
            for one in former:
                if one.calls == program.calls:
                    former.remove(one)
                    program.inherit(one)
                    return
        super()._learn(program)


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


def _make(options: Any, _backend_options: Any) -> ProcessGroup:
    """What torch calls to make a process group of this backend."""
    global _watch
    if not dist.is_initialized():  # the default group: another run begins
        _watch = _Watch()
    rank, size = options.group_rank, options.group_size
    if _given is not None:
        given, configuration = _given
        return ProcessGroup(given, str(dist.get_backend_config(given)), configuration, rank, size)
    configuration = current()
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
    outside: bool = False,
    place: Callable[[], tuple[int, int, Store]] | None = None,
    **arguments: Any,
) -> ProcessGroup:
    """Returns a process group over the ranks of `inner` that compresses gradients as the backend "sidcomp"
    does, and passes everything else to `inner`. Every rank of `inner` calls it at the same point.

        compressing = sidcomp.process_group(group, "topk", density=0.05)
        ddp = DistributedDataParallel(module, process_group=compressing)

    inner: any process group, of any backend, of which this rank is a member. The other arguments are those of
    `configure`, which it does not read, and neither does it read SIDCOMP.

    inner may also be a group that torch.distributed does not know, such as torchft's, and have other members
    after a step: `Manager(pg=sidcomp.process_group(ProcessGroupGloo(), "int4"), ...)`. So far that is for
    all-reduces on the CPU. After each change the members learn anew which calls to compress, and keep their
    residuals meanwhile.

    place: for such a group, if it does not say so itself: a function that returns (rank, size, store). store:
    one of torch.distributed, which the members, and no others, share. Other members have another one.

    Raises ArgumentError, ParameterError, SetupError or UnsupportedError.
    """
    global _given
    if not isinstance(inner, dist.ProcessGroup):
        raise ArgumentError(f"inner={inner!r}: give a process group of which this rank is a member")
    configuration = configuration_of(codec, (), min_bytes, arguments, reduce_scatter, all_gather, outside)
    if not known(inner):
        return _changing(inner, configuration, place)
    if place is not None:
        raise ArgumentError("place: torch.distributed knows this process group and its ranks; leave it out")
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


def _changing(
    inner: dist.ProcessGroup, configuration: Configuration, place: Callable[[], Any] | None
) -> ChangingGroup:
    if hasattr(inner, "_manager"):
        raise SetupError(
            f"{type(inner).__name__} hands its calls to a Manager, which would not learn of errors: give the "
            "Manager the group that compresses, Manager(pg=sidcomp.process_group(...), ...)"
        )
    if configuration.reduce_scatter or configuration.all_gather:
        raise UnsupportedError(
            "reduce_scatter= and all_gather= are for models that are sharded over ranks that stay, and "
            f"torch.distributed does not know {type(inner).__name__}, whose members may change: leave them "
            "out"
        )
    return ChangingGroup(inner, configuration, place)


def _register() -> None:
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])


_register()
