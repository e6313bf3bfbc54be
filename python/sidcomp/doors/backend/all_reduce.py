"""Which all-reduces carry gradients, and what compresses them.

The group recognizes them by the order in which they come (recognition.py). It settles with the other ranks
that all have the same settings, and keeps what it has learnt for a checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.config.accuracy import adaptive
from sidcomp.config.settings import Settings
from sidcomp.doors.backend import checkpoint as backend_checkpoint
from sidcomp.doors.backend.adam_check import AdamCheck
from sidcomp.doors.backend.after_backward import AfterBackward
from sidcomp.doors.backend.agreement import check_same
from sidcomp.doors.backend.configuration import REPLICAS, Configuration
from sidcomp.doors.backend.ddp_buckets import Holding, Joins, Seen, holdings
from sidcomp.doors.backend.idle_check import idle_check
from sidcomp.doors.backend.recognition import Call, Door, Origin, Passes, Program, whose
from sidcomp.doors.backend.works import Reducing
from sidcomp.doors.backend.wrapper import Wrapper, passed_on
from sidcomp.doors.fsdp import parameter_groups
from sidcomp.doors.unused import Unused, watched
from sidcomp.errors import SetupError
from sidcomp.runtime.announcement import compressed
from sidcomp.runtime.block import DTYPES


class ProcessGroup(Wrapper):
    """The process group of the backend "sidcomp". It compresses all-reduces of gradients, and the inner group
    does everything else.
    """

    def __init__(
        self, inner: dist.ProcessGroup, inner_config: str, configuration: Configuration, rank: int, size: int
    ) -> None:
        super().__init__(inner, inner_config, rank, size)
        self.configuration = configuration
        # Whether this group compresses all-reduces; not known before it has its name.
        self._compresses: bool | None = None
        self._adam = AdamCheck(self, configuration.costs(), self._settings)
        self._alike = False  # all ranks have the same settings
        self._settled = False  # and have loaded the same
        self._seen: Seen | None = None  # while loaded programs wait for DDP models
        self._loaded = "nothing"  # from a checkpoint: what must be the same on all ranks
        self._former: dict[str, list[Program]] = {"passes": [], "after": []}  # whose calls have yet to come
        self._joins = Joins(self)
        self._watch_anew()
        self._task = -1  # autograd's number of the backward pass in progress
        parameter_groups.watch()

    def _watch_anew(self) -> None:
        """Begins to learn which calls backward passes have."""
        callbacks = self._learn, self._least, self._warn, self._holdings
        self._passes = Passes(*callbacks)
        asked = self.configuration.outside
        self._after = AfterBackward(
            *callbacks, asked=asked, tell=self._tell_of_outside, stepping=self._stepping
        )

    def __repr__(self) -> str:
        state = next((p.state for p in self.programs if p.state is not None), "compresses nothing yet")
        return f"sidcomp.ProcessGroup({self._name}, over {self.inner_config}, {state})"

    # ---- all-reduce

    def allreduce(self, tensors: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        call = self._eligible(tensors, *arguments, **named)
        if call is not None:
            work = self._reduce(call, tensors[0])
            if work is not None:
                return work
        return self.inner.allreduce(tensors, *arguments, **named)

    def _eligible(self, tensors: Any, *arguments: Any, **named: Any) -> Call | None:
        """Returns the call if it may be the all-reduce of a gradient."""
        if self._alike and self._compresses is False:  # and the other ranks know
            return None
        if not isinstance(tensors, list) or len(tensors) != 1:
            return None
        x = tensors[0]
        average = self._averages(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None:
            return None
        self._compare_settings(x.device)
        if not self._of_gradient(x):
            return None
        self._settle(x.device)
        if self._compresses is False:
            return None
        if x.nbytes < self._least_bytes:
            idle_check.met(
                f"all-reduces are smaller than min_bytes={self.configuration.min_bytes}, which you can lower",
                self,
            )
            return None
        inside = torch._C._current_graph_task_id() != -1
        idle_check.over = idle_check.over or inside
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
        """Whether an all-reduce may be that of gradients of parameters. The same on all ranks, which have the
        same settings."""
        task, large = torch._C._current_graph_task_id(), x.nbytes >= self._least_bytes
        if task != -1 and whose() is None:
            self._leave(x)
            return False
        if large and (task == -1 or task != self._task):
            self._refuse_join(x)
        return task != -1 or (large and not self._after.over)

    @property
    def _least_bytes(self) -> int:
        return max(1, self.configuration.min_bytes)

    def _refuse_join(self, x: torch.Tensor) -> None:
        """Raises UnsupportedError if ranks may run out of data. x: of the first call of a pass, or of one
        outside of a pass, by which a rank sends zeros."""
        if self._allowed():
            self._joins.refuse(any(p.known and p.calls[0].numel == x.numel() for p in self.programs))

    def _compare_settings(self, device: torch.device) -> None:
        """Raises RankError on all ranks if they have other settings. Each rank calls it before the group's
        first all-reduce of floats, wherever that is: whether a call could be compressed depends on settings,
        and on a rank's own backward passes."""
        if not self._alike:
            check_same(self.inner, self.size(), self.configuration.lines(), device, self.group_desc)
            self._alike = True

    def _settle(self, device: torch.device) -> None:
        """Raises RankError on all ranks if they have loaded other lists. Each rank calls it before the first
        call that may be of gradients. After a backward pass that is any large one, as passes may differ."""
        inside = torch._C._current_graph_task_id() != -1
        if not self._settled and (inside or self.configuration.outside):
            lines = [f"loaded {self._loaded}"]
            check_same(self.inner, self.size(), lines, device, self.group_desc)
            self._settled = True

    def _leave(self, x: torch.Tensor) -> None:
        """Says once that a call of a backward pass passes untouched, if it would else be compressed."""
        if x.nbytes < self._least_bytes or not self._allowed():
            return
        self._say(
            "exact",
            "leaves a backward pass's all-reduces exact, except those in hooks of parameters' gradients and "
            "at the end of the pass: others, as those of tensor parallelism, carry gradients of activations",
        )
        idle_check.met(
            "their all-reduces are not known to carry gradients of parameters: issue those in hooks of the "
            "gradients of torch.nn.Parameter",
            self,
        )

    def _allowed(self) -> bool:
        """Whether this group averages gradients, by its name."""
        if self._compresses is None:
            c = self.configuration
            groups = REPLICAS if c.groups is None else c.groups
            names = {self.group_desc, self.group_desc.removeprefix("mesh_")}
            whole = self.group_desc in ("default_pg", "mesh_default") and self.size() == dist.get_world_size()
            self._compresses = c.codec != "off" and (whole or bool(names.intersection(groups)))
            if not self._compresses and c.codec != "off":
                self._say(
                    "not chosen",
                    f"passes its all-reduces uncompressed, because {self.group_desc!r} is not among the "
                    f"groups to compress ({', '.join(groups)}): configure(groups=...) adds it",
                )
        return self._compresses

    def _reduce(self, call: Call, tensor: torch.Tensor) -> dist.Work | None:
        """Compresses the call, or returns None."""
        noted = self._note(call, tensor)
        if noted is None:
            return None
        program, index = noted
        assert program.state is not None
        engine = program.state.engine
        try:
            program.state.check_open()
            if not program.formed or engine.outdated:
                door, first = program.state.door, engine.layout is None
                assert isinstance(door, Door)
                door.form()
                if first:
                    self._announce(program)
            flat = tensor.detach().view(-1)
            if not call.average:
                flat.mul_(self.size())  # the engine averages
            program.holds = True
            if self._adam.costs is not None and not program.steps:
                self._adam.look(index == 0)
            future = engine.ready(index, flat)
        except Exception as e:
            engine.report(e)
            engine.abandon(e)
            (self._passes if program in self._passes.programs else self._after).give_up()
            raise
        return Reducing(future, tensor, call.device.type != "cpu")

    def _look_at_scatter(self, x: torch.Tensor, what: Any) -> None:
        """Tells the idle check that a reduce-scatter of gradients passes. what: its options."""
        if self._averages(x, what) is not None and whose() is not None:
            idle_check.met(
                "the model is sharded, so its gradients are reduce-scattered, and the backend compresses "
                "only all-reduces: use sidcomp.compress for HSDP, or sidcomp.fsdp.compress_reduce_scatter on "
                "CPUs",
                self,
            )

    # ---- backward passes

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
        self._adam.tidy()
        self._task = -1
        buffers = self._passes.buffers
        program = self._passes.end()
        if program is not None and program.pieces is not None:
            if not program.looked:  # it is from a checkpoint
                self._find_model(program)
            if program.unused is not None and program.state is not None:
                program.unused.after(program.state.engine, buffers)
        if self._seen is not None and not any(p.loaded and p.pieces for p in self._passes.programs):
            self._seen.close()
            self._seen = None

    def _learn(self, program: Program) -> None:
        """Makes what compresses a program."""
        self._find_model(program)
        program.learn(self.configuration, self)

    def _find_model(self, program: Program) -> None:
        """Looks for the DDP model whose buckets are the program's."""
        program.looked = True
        for ddp in self._joins.look():
            every = holdings(ddp)
            held = self._large(every)
            if [Call(h.numel, h.dtype, h.device, False) for h in held] == program.calls and any(
                o is None or o.one_of(ddp.parameters()) for o in program.origins
            ):
                program.pieces = [h.pieces for h in held]
                names = {name for h in every for name, *_ in h.pieces}
                program.unused = Unused(ddp, names) if watched(ddp) else None

    def _large(self, held: list[Holding]) -> list[Holding]:
        """Returns the buckets of a DDP model whose all-reduces may be compressed."""
        least = self._least_bytes
        return [h for h in held if h.numel * h.dtype.itemsize >= least and h.dtype in DTYPES]

    def _holdings(self, origin: Origin | None) -> list[Holding]:
        """The buckets of the DDP model whose gradients a call carries, if it is one of this group."""
        seen = self._seen.items() if self._seen is not None else []
        own = [held for ddp, held in seen if origin is None or origin.one_of(ddp.parameters())]
        return self._large(own[0]) if len(own) == 1 else []

    def _least(self, mine: list[int], device: torch.device) -> list[int]:
        """The least that any rank says. All ranks call it. Where the group serves CPUs too, the host does
        not wait for a GPU."""
        least = torch.tensor(mine, dtype=torch.int32, device="cpu" if self.on_cpus else device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self.inner.allreduce([least], options).wait()
        return [int(x) for x in least.tolist()]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank has learned of its passes, and the residuals, as tensors and plain types.
        Each rank saves its own. Call it between two steps."""
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
                "load_state_dict comes after this process group's first backward pass or, with outside=True, "
                "after its first all-reduce of min_bytes: call it before, on every rank"
            )
        passes, after = backend_checkpoint.load(self, state, redistribute)
        self._passes.programs, self._after.programs = passes, after
        steps = [p.state.engine.step for p in (*passes, *after) if p.state is not None]
        self._loaded = f"{len(passes)} + {len(after)} lists of calls, at steps {steps}"
        if self._seen is None and any(p.pieces for p in passes):
            self._seen = Seen(self)

    # ---- between a backward pass and a step

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
        if self._adam.costs is not None and adaptive(optimizer):
            self._adam.warn(optimizer)

    def _settings(self) -> Settings:
        """Those of what compresses."""
        return next(p.state.settings for p in self.programs if p.state is not None)

    # ---- what it says

    def _announce(self, program: Program) -> None:
        assert program.state is not None
        groups = program.state.engine.groups
        sent = sum(g.bytes_sent for g in groups)
        dense = sum(c.numel * c.dtype.itemsize for c in program.calls)
        codec = next((g.plan.codec for g in groups if compressed(g)), groups[0].plan.codec)
        where = "of" if program in self._passes.programs else "after"
        notices.say(
            f"process group {self.group_desc!r} compresses {len(program.calls)} all-reduces {where} each "
            f"backward pass ({dense / 1e6:.1f} MB) with {codec}: {sent / 1e6:.2f} MB, "
            f"1/{dense / sent:.0f} of it. All else passes untouched to {self.inner_config}.",
            self.rank(),
        )


def _looked_at(name: str) -> Callable[..., Any]:
    passing = passed_on(name)

    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        if len(arguments) > 1 and torch._C._current_graph_task_id() != -1:
            options = arguments[2] if len(arguments) > 2 else named.get("opts", named.get("op"))
            self._look_at_scatter(arguments[1], options)
        return passing(self, *arguments, **named)

    call.__name__ = name
    call.__doc__ = passing.__doc__
    return call


for _name in ("_reduce_scatter_base", "reduce_scatter_single"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _looked_at(_name))
