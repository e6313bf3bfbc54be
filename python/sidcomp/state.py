"""State: the compression of one DDP model, as the user sees it."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidcomp.autotune import journal, report
from sidcomp.autotune.controller import Controller, Report
from sidcomp.config import presets
from sidcomp.config.grouping import PLANNED, Groups, Regime
from sidcomp.config.policy import Exclude, Rules
from sidcomp.config.schedule import Schedule, Setting
from sidcomp.config.settings import Candidates, Settings
from sidcomp.errors import ArgumentError, CheckpointError, SetupError
from sidcomp.planner import plan_plot
from sidcomp.planner.profile import Profile
from sidcomp.runtime import checkpoint
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.group import Group
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.optimizer_watch import Watch


class Door(Protocol):
    """What a State is registered with: it hands the gradients of a model to the State's engine."""

    @property
    def model(self) -> Model: ...

    @property
    def open(self) -> bool:
        """The model is still there."""

    def reset(self, error: Exception) -> None:
        """The step under way has been abandoned."""

    def before_forward(self, function: Callable[..., None]) -> "torch.utils.hooks.RemovableHandle":
        """Calls `function` before each forward pass."""


class State:
    """Compression for one DDP model: `ddp.register_comm_hook(state, sidcomp.hook)` or `sidcomp.register(ddp,
    state)`.

    codec, memory   names in `sidcomp.codecs()` and `sidcomp.memories()`. Their parameters (for "topk":
                    density) are further keyword arguments; each may be a Schedule. codec=None: what keeps
                    accuracy best at a fortieth of the bytes, "topk" with density=0.084, values="log4" and
                    indices="packed" (as far as they are not given). memory=None: the codec's
                    own, for "auto" and most codecs "residual". A lossless codec keeps none, but for one that
                    holds the momentum; then the optimizer must have none: `check_optimizer`.
    groups          what is encoded and exchanged as one vector: "bucket" (each bucket of DDP), "model" (all
                    of it), a number of bytes (also "4MB", in powers of 1024 as DDP's bucket_cap_mb:
                    consecutive parameters up to about that size), or a list of lists of parameter names. One
                    dtype and device each.
    exclude         what is sent dense: a parameter's name, a pattern ("*.bias"), "1-D" (biases, norms),
                    "embedding", "output" (the last layer), a size ("<128KB", counted as float32), a number n
                    (all with fewer than n elements), or a list of these.
    policy          other settings for some parameters: pairs of such a rule and a codec's name or a
                    dictionary of parameters ("codec" and "memory" may be among them). All rules that are
                    about a parameter apply, the later over the earlier: `policy=[("<128KB", "none"),
                    ("output", {"density": 0.05})]`.
    full_every      K > 0: in steps 0, K, 2 K, ... the groups send all of their gradient and of what they
                    keep, as plain DDP would (Marsit's full-precision steps). May be a Schedule:
                    `Schedule({0: 1, 100: 0})` begins with 100 dense steps.
    warmup          codec="auto" comes to a sparse codec in the midst of training. Before its own density it
                    has stages of so many steps, of 25 %, 6.25 % and 1.5625 %, those that are above it and
                    send less than plain DDP; 0: none. docs/auto.md has what it is good for.
    exchange        how payloads travel: a name in `sidcomp.exchanges()`, whose parameters are further keyword
                    arguments. None: the process group's all-reduce for linear codecs, its all-gather for the
                    others. "ring1" and "torus1" (Marsit's), "twoshot", "hierarchical" (ranks_per_node=
                    LOCAL_WORLD_SIZE of torchrun, or a DeviceMesh whose last dimension is the node) send
                    messages from rank to rank; docs/exchanges.md says when they pay. For "auto" a name, or
                    several, to choose from beside the process group's own; None: "twoshot" and
                    "hierarchical".
    transport       who enqueues the collectives of groups on a GPU: "torch", the process group; "native",
                    sidcomp itself by NCCL's C interface, found at run time, so that one call enqueues a
                    group's whole step (docs/exchanges.md). Which is the faster has not been measured yet.
    K               Marsit's name of full_every.
    process_group   the ranks to average over; default: the DDP model's.
    seed            of codecs that draw random numbers; the same on every rank.
    nonfinite       what is left of a step that is thrown away, because a gradient was not finite, because the
                    GradScaler given to `follow` skipped it, or because the program called `skip`. In either
                    case the step's gradient is never sent later. "rollback": nothing is left; what is owed
                    and every later bit are as if the step had never been. It takes a second copy of what is
                    kept (4 bytes an element for memory "residual"). "drop": groups that were finite forget
                    what they owed; no second copy. None: "drop" until the first call of `follow(optimizer,
                    scaler)` or `update_scale`, "rollback" from then on.
    checksum_every  k > 0: every k steps the ranks compare checksums of their decoded gradients; a difference
                    fails the next backward() with a DivergenceError that names group and rank; on CUDA the
                    one after it.
    isa             instruction set of the core: "auto", "base", "avx2" or "avx512". All give the same bits.

    Names are those of `ddp.module.named_parameters()`. The averaged gradients replace the local ones in DDP's
    buckets. Groups follow the order in which gradients become ready, as far as DDP's buckets show it: in the
    first step (static graph: two) DDP has one bucket for each dtype, in the order of definition; then it
    forms them anew, and our groups with them. What the memory keeps goes with its parameter.

    Errors are those of `sidcomp.errors`; `error` is the last one. The hook logs it under "sidcomp" and fails
    the futures of its group, so that backward() raises its text, on every rank that is affected. The next
    iteration can run.

    A non-finite gradient on any rank makes its group non-finite on all ranks, and sidcomp throws the step
    away, as a GradScaler does: see `nonfinite`. Do not let the optimizer apply any part of such a step.

    Pickling and copying take the configuration and what `state_dict` gives, not the process group: register
    the copy with a DDP model of its own. Use a State as a context manager, or `close()` it, before the
    process group is destroyed. On Gloo a State that is not closed frees its threads and descriptors when
    neither the program nor DDP refers to it any more. On NCCL, close it.
    """

    def __init__(
        self,
        codec: str | None = None,
        *,
        memory: str | None = None,
        groups: Groups | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        exclude: Exclude = (),
        checksum_every: int = 0,
        isa: str | None = None,
        candidates: Candidates | None = None,
        policy: Rules = (),
        full_every: int | Schedule = 0,
        warmup: int = 30,
        exchange: str | Sequence[str] | None = None,
        transport: str = "torch",
        K: int | Schedule | None = None,
        nonfinite: str | None = None,
        profile: Profile | str | Path | None = None,
        **parameters: Setting | Schedule,
    ) -> None:
        if K is not None:
            if full_every:
                raise ArgumentError(f"K={K!r} and full_every={full_every!r} are the same: give one of them")
            full_every = K
        self._arguments: dict[str, Any] = {
            "memory": memory, "groups": groups, "seed": seed, "exclude": exclude,
            "checksum_every": checksum_every, "isa": isa, "candidates": candidates, "policy": policy,
            "full_every": full_every, "warmup": warmup, "exchange": exchange, "transport": transport,
            "nonfinite": nonfinite,
        }  # fmt: skip
        self._codec = codec, parameters
        self.settings = Settings.parse(codec, parameters, **self._arguments)
        if profile is not None and not self.settings.planned:
            raise ArgumentError(
                f'profile= is for codec="auto" or groups in {PLANNED}; groups={groups!r} plans nothing'
            )
        if isinstance(profile, str | Path):
            profile = Profile.load(profile)
        self._engine = Engine(self.settings, process_group)
        if self.settings.planned:
            self._engine.tuner = Controller(self.settings, profile)
        self._door: Door | None = None
        self._closed: dict[str, Any] | None = None  # the last stats
        self._forward: torch.utils.hooks.RemovableHandle | None = None

    @classmethod
    def preset(cls, name: str | Path, **changes: Any) -> "State":
        """A State as a TOML file describes it: `State.preset("redsync")` has a paper's published setting.

        name: one of `sidcomp.config.presets.names()`, or a path that ends in .toml (see
        sidcomp/config/presets.py for what it may hold). changes: arguments and parameters that replace those
        of the file. Raises ArgumentError, which names the file and the key.
        """
        found = presets.load(name)
        return cls(**{**found.arguments, **found.parameters, **changes})

    def __repr__(self) -> str:
        ways = ", ".join(way.label for way in self.settings.ways)
        chosen = f"auto from {ways}" if self.settings.auto else ways
        memory = self.settings.ways[0].memory.name
        return (
            f"State({chosen}, memory={memory!r}, groups={self.settings.groups!r}, step={self._engine.step})"
        )

    @property
    def error(self) -> Exception | None:
        """The last exception of the hook, with its type; None if there was none."""
        return self._engine.error

    # ---- the door
    # -----------------------------------------------------------------------------------------------

    def _attach(self, door: Door, roles: dict[str, frozenset[str]]) -> None:
        """Serves the door's model from now on. roles: names of the parameters that rules such as "embedding"
        are about. Raises SetupError."""
        self._open()
        model = door.model
        if self._engine.process_group is not None:
            mine = dist.get_process_group_ranks(self._engine.process_group)
            its = dist.get_process_group_ranks(model.process_group)
            if mine != its:
                raise SetupError(
                    f"State(process_group=...) has ranks {mine}, but DDP averages over ranks {its}"
                )
        self.settings.policy.roles = roles
        self.settings.assign(model.shapes)  # refuses a rule that fits no parameter here, not in backward()
        if self._engine.resume is not None:
            self._engine.resume.check(model.shapes)
        self._door = door
        self._watch_forward()

    def _open(self) -> None:
        if self._closed is not None:
            raise SetupError("this State is closed: make a new one, and a new DDP around the module")

    # ---- what it does and did
    # -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What was measured on this rank so far.

        steps, world
        sent_bytes, received_bytes  handed to and given back by the collectives: for an all-reduce the body of
                                    the payload once each way, for an all-gather one payload out and world - 1
                                    in
        dense_bytes, ratio          the same gradients as float32; dense_bytes / sent_bytes
        control_bytes               received for checksums and for agreeing on groups
        density                     elements sent / elements, in the last step
        encode_seconds, wait_seconds, decode_seconds
                                    sums over groups and steps; wait: from an exchange's launch to its
                                    callback
        allocations                 blocks of memory allocated; constant from the second step of a layout on
        state_bytes                 memory that the groups' states take: both copies, where there are two
        groups                      for each group: names, n, dtype, codec, memory, k (elements aimed at),
                                    sent_bytes (in a step), steps, the seconds, and of the last step count
                                    (sent), found, density, threshold (or scale), stages

        On CUDA it waits for the device; encode, wait and decode are not told apart there.
        """
        if self._closed is not None:
            return self._closed
        p = self._engine
        groups = [self._group_stats(g) for g in p.layout.groups] if p.layout else []
        n = sum(g["n"] for g in groups)
        seconds = [f"{what}_seconds" for what in ("encode", "wait", "decode")]
        return {
            "steps": p.step,
            "world": p.exchange.world if p.exchange else 0,
            "sent_bytes": p.current.sent,
            "received_bytes": p.current.received,
            "dense_bytes": p.current.dense,
            "control_bytes": p.control,
            "ratio": p.current.dense / p.current.sent if p.current.sent else 0.0,
            "density": sum(g["count"] for g in groups) / n if n else 0.0,
            **{key: sum(g[key] for g in groups) for key in seconds},
            "allocations": p.allocations,
            "state_bytes": sum(len(s.tensor) for g in p.groups if not g.direct for s in g.states.all),
            "groups": groups,
        }

    def _group_stats(self, g: Group) -> dict[str, Any]:
        executor = self._engine.executor
        sliced = g.in_messages and not g.message_plan.whole  # slices have statistics of their own
        s = executor.stats(g) if executor is not None and not sliced else None
        count = s.count if s is not None else g.n if g.direct else g.plan.k if g.in_messages else 0
        return {
            "names": list(g.names),
            "n": g.n,
            "dtype": g.dtype,
            "codec": g.plan.codec,
            "memory": g.plan.memory,
            "k": g.plan.k,
            "count": count,
            "density": count / g.n,
            "found": s.found if s is not None else count,
            "threshold": s.threshold if s is not None else 0.0,
            "stages": s.stages if s is not None else 0,
            "sent_bytes": g.bytes_sent,
            "steps": g.counters.steps,
            "encode_seconds": g.counters.encode_ns * 1e-9,
            "wait_seconds": g.counters.wait_ns * 1e-9,
            "decode_seconds": g.counters.decode_ns * 1e-9,
        }

    # ---- the plan
    # -----------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was measured, what was chosen and why, as a text for people. For a planned State; on this
        rank."""
        return report.explain(self._engine)

    def plan_report(self) -> dict[str, Any]:
        """The same as numbers: stage ("resting" once it is settled), why, log, tried (every plan that was
        measured), compared (every later comparison with plain DDP: step, measured_ps of the plan, against_ps
        of plain DDP, pairs of windows, steps that it took, and kept: whether the plan was), groups (names,
        way, exchange, sent_bytes, predicted_ps, measured_ps), finding_steps, finding_seconds, and of one
        iteration, in ps, 0 where there is none: dense_ps (plain DDP), compute_ps (no communication),
        baseline_ps (what the plan had to beat), predicted_ps and measured_ps (the plan), rewrapped_ps
        (predicted with the plan's groups as DDP's buckets; None: not planned)."""
        return report.report(self._engine)

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted and the last measured iteration as a Chrome trace (chrome://tracing,
        ui.perfetto.dev)."""
        report.trace(self._engine, path)

    def plot(self, path: str | Path) -> None:
        """Draws them. Needs matplotlib."""
        rows = report.timelines(self._engine)
        if not any(rows.values()):
            raise SetupError("there is no iteration to draw yet: train some steps first")
        plan_plot.draw(rows, path, repr(self))

    @property
    def profile(self) -> Profile | None:
        """What was measured for the plan, once it was: `state.profile.save(path)`, then `State("auto",
        profile=path)` spares the next run the measuring."""
        return report.controller_of(self._engine).report.profile

    # ---- loss scale
    # ---------------------------------------------------------------------------------------------

    def rescale(self, factor: float) -> None:
        """Multiplies what the memory keeps by `factor` > 0. Call it on every rank, between two iterations."""
        if not 0 < factor < float("inf"):
            raise ArgumentError(f"rescale({factor}): a finite factor greater than 0")
        self._engine.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Sets the loss scale: call `state.update_scale(scaler.get_scale())` after each `scaler.update()`.
        You do not need it if you give the scaler to `follow`.

        Residuals are in units of scaled gradients: when the scale changes they are multiplied by new / old.
        From the first call on, nonfinite=None means "rollback".
        """
        if not 0 < scale < float("inf"):
            raise ArgumentError(f"update_scale({scale}): a finite scale greater than 0")
        self._engine.quiet()
        self._engine.guarded()
        self._engine.update_scale(scale)

    def skip(self) -> None:
        """Says that the program skips the optimizer's step for a reason of its own, such as a loss that has
        exploded or a bad batch. Call it on every rank, after backward() and before the next one.

        With nonfinite="rollback" what is owed, the random numbers and the count of steps are then as if that
        backward() had never been; with "drop" what is owed is forgotten. sidcomp throws a step away without
        this call if it was not finite or if the GradScaler given to `follow` skipped it; then the call
        changes nothing. Raises SetupError if there is no step to take back.
        """
        self._open()
        self._engine.skip()

    # ---- learning rate
    # -------------------------------------------------------------------------------------------

    def follow(
        self, optimizer: "torch.optim.Optimizer | None", scaler: "torch.amp.GradScaler | None" = None
    ) -> None:
        """Keeps what is owed in step with `optimizer`, which steps on these gradients: with its learning rate
        and, if `scaler` is given, with the loss scale and the steps that the scaler skips. follow(None) ends
        it.

        Without it what is sent late counts with the rate of the step in which it is sent, not of the one in
        which it was due: less, where a schedule lowers the rate. With it each step first multiplies what is
        owed by the old rate over the new one, which is EF-SGD as Karimireddy et al. (2019) have it
        (docs/accuracy.md has what it gains). It costs no pass of its own, and nothing where the rate stays.

        Momenta are left alone, as by torch's SGD. The rates, `lr` of each of optimizer.param_groups, are read
        as backward() begins; set them before it or after the step, as schedulers do. They must be the same on
        every rank. A checkpoint has the last ones.

        With a scaler, what is owed is rescaled when the loss scale changes, and a step that
        `scaler.step(optimizer)` skips is thrown away; nonfinite=None then means "rollback". With or without a
        scaler, all backward() calls since the optimizer's last step count as one step, if it is thrown away.

        Raises ArgumentError if `optimizer` or `scaler` is something else, if the optimizer has none of the
        model's parameters, or if a rate is a tensor on a device, negative or not finite. A rate that becomes
        so later makes backward() fail.
        """
        self._open()
        if optimizer is None and scaler is not None:
            raise ArgumentError("follow(None, scaler): give the optimizer whose steps the scaler may skip")
        p = self._engine
        rates = None if optimizer is None else Rates(optimizer)
        p.follow(rates, None if optimizer is None else Watch(optimizer, scaler))
        self._watch_forward()

    def _watch_forward(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        watch, door = self._engine.watch, self._door
        if watch is not None and watch.on_device and door is not None and door.open:
            self._forward = door.before_forward(watch.forward)

    # ---- checkpoints
    # --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, and what it takes to go on with the same bits. Every rank saves its own.

        Call it between two iterations. It holds tensors, dictionaries, lists, strings and numbers only, so
        that `torch.load(weights_only=True)` reads it: "residuals" has what is kept of each parameter, float32
        of shape (vectors, elements) in the gradient's memory order; "layout" the groups, in order.
        """
        self._open()
        return self._engine.state_dict()

    def load_state_dict(
        self, state: "dict[str, Any] | Sequence[dict[str, Any]]", redistribute: str = "sum"
    ) -> None:
        """Takes what `state_dict` gave: this rank's own, or a list of those of all old ranks, in any order.

        The same world size: training goes on bit for bit as if it had not stopped, with the groups of the
        checkpoint, whatever buckets DDP has. An exception: a state from before DDP has rebuilt its buckets
        (after one step; with a static graph, two) keeps all residuals, but its groups were about to change.

        Another world size takes the list. redistribute="sum": every new rank gets the sum of the old ranks'
        residuals over the new world size, so their sum is kept, and what a rank owes weighs as any gradient
        of its own does. "mean": every new rank gets their mean, so what they add to the averaged gradient is
        kept.

        Another codec, density, seed, grouping or exclusion: residuals are kept, the rest starts anew, with a
        warning in the log "sidcomp". Another memory, another model, or a field that is missing or damaged is
        a CheckpointError that names it, and the State stays as it was. Parameters are compared here if the
        State is bound to its model, else at first use. Call it between two iterations.
        """
        self._open()
        p = self._engine
        self._abandon(SetupError("a checkpoint was loaded before the backward pass had ended"))
        p.quiet()
        model = self._door.model if self._door is not None else None
        parent = p.process_group or (model.process_group if model is not None else None)
        resume = checkpoint.load(self.settings, parent, state, redistribute)
        if model is not None:
            resume.check(model.shapes)
        planned = self._resumed(resume, p.tuner.given) if isinstance(p.tuner, Controller) else None
        p.start_from(resume, planned)  # nothing fails from here on

    def _abandon(self, error: Exception, telling: bool = True) -> None:
        self._engine.abandon(error, telling)
        if self._door is not None:
            self._door.reset(error)

    def _resumed(self, resume: checkpoint.Resume, given: Profile | None) -> tuple[Controller, Regime]:
        """A new controller that goes on where the one in a checkpoint was."""
        journal.check(resume.source.get("controller"))
        controller = Controller(self.settings, given)
        try:
            regime = controller.resume(resume)
            for f in fields(Report):
                value, blank = getattr(controller.report, f.name), getattr(Report(), f.name)
                kind = (dict, Profile, type(None)) if blank is None else (type(blank), int)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise TypeError(f"{f.name} is {value!r}")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"the state's controller cannot be resumed ({type(e).__name__}: {e}): the checkpoint is "
                'damaged; set its "controller" to None to plan anew'
            ) from e
        return controller, regime

    # ---- the end
    # ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what is under way and ends the State's own process group. May be called again.

        A clean end of a program: `state.close(); del ddp; gc.collect();
        torch.distributed.destroy_process_group()`.
        """
        if self._closed is not None:
            return
        p = self._engine
        p.quiet()
        self._closed = self.stats()
        self._abandon(SetupError("the State was closed"), telling=False)
        self._door = None
        p.close()
        self._watch_forward()

    def __enter__(self) -> "State":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        p = self._engine
        started = self._closed is None and (p.layout is not None or p.resume is not None)
        memory = self.state_dict() if started else None
        return {"codec": self._codec, "arguments": self._arguments, "memory": memory}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        codec, parameters = saved["codec"]
        self.__init__(codec, **saved["arguments"], **parameters)  # type: ignore[misc]
        if saved["memory"] is not None:
            self.load_state_dict(saved["memory"])
