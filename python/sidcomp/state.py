"""State: the object that a user registers with a DDP model."""

import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.autotune import report
from sidcomp.autotune.controller import controller_for, resumed
from sidcomp.autotune.ending import Ending
from sidcomp.config import presets
from sidcomp.config.grouping import Groups, check_lists
from sidcomp.config.kinds import above_zero
from sidcomp.config.policy import Exclude, Rules
from sidcomp.config.schedule import Schedule, Setting
from sidcomp.config.settings import WARMUP, Candidates, Settings
from sidcomp.errors import ArgumentError, CheckpointError, ParameterError, SetupError
from sidcomp.optimizer_fit import OptimizerFit
from sidcomp.planner import plan_plot
from sidcomp.planner.profile import Profile
from sidcomp.runtime import checkpoint
from sidcomp.runtime.door import Door
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.members import check_ranks, known, over_unknown
from sidcomp.runtime.optimizers import Optimizers
from sidcomp.runtime.scalars import Scalars
from sidcomp.runtime.statistics import statistics


class State(OptimizerFit):
    """Compresses the gradients of one DDP model.

        state = sidcomp.State("auto")
        ddp.register_comm_hook(state, sidcomp.hook)

    "auto" measures the model, the machine and the network in the first steps, and chooses the groups and how
    each is sent; where it measures no gain, the run continues as plain DDP (docs/planning.md). With any other
    codec you choose; `sidcomp.preset` takes a paper's published setting. Every argument has a default, given
    in brackets.

    codec           [None] "auto", or a name in `sidcomp.codecs()`. The codec's parameters (for "topk":
                    density) are further keyword arguments; each may be a Schedule. None: "topk" with
                    density=0.084, values="log4" and indices="packed" unless you give others; these preserved
                    accuracy best at 1/40 of the bytes (docs/results.md). For a sparse codec, ratio=R may
                    take the place of density, or of bits: a payload then has at most 1 / R of float32's
                    bytes, whatever values and indices are. If you name nothing and give Adam
                    to `follow`, it is "int4": see `accuracy`.
    memory          [None] a name in `sidcomp.memories()`; its parameters, too, are further keyword arguments.
                    None: the codec's own, for "auto" and most codecs "residual". A lossless codec uses none,
                    except one that holds the momentum. With that, the optimizer must have no momentum.
    groups          [None] what is encoded and exchanged as one vector: "bucket" (each of DDP's buckets),
                    "model" (all parameters), "layer", "even:N" (N groups), a number of bytes or a size such
                    as "4MB" (in powers of 1024, as DDP's bucket_cap_mb: consecutive parameters up to about
                    that size), a list of lists of parameter names, or a planner: "auto", "pg" (sidcomp's, for
                    one codec), "mergecomp", "cupcake", "cupcake-repaired". A group has one dtype and one
                    device. None: "auto" for codec="auto", else "bucket".
    process_group   [None] the ranks to average over. None: those of the DDP model.
    seed            [0] for codecs that draw random numbers: 0 to 2**64 - 1, the same on every rank.
    exclude         [()] what is sent uncompressed: a parameter's name, a pattern ("*.bias"), "1-D" (biases,
                    norms), "embedding", "output" (the last layer), a size ("<128KB", as float32), a number n
                    (all parameters with fewer than n elements), or a list of these.
    checksum_every  [0] k > 0: every k steps the ranks compare checksums of their decoded gradients. If they
                    differ, the next backward() fails (on CUDA the one after it) with a DivergenceError that
                    names group and rank. 0: never.
    isa             [None] instruction set of the core: "auto" (the best), "base", "avx2", "avx512" or
                    "avx512vbmi2". All give the same bits. None: $SIDCOMP_ISA, else "auto".
    candidates      [None] for codec="auto": a list of the codecs to choose from, each a name or a pair of a
                    name and a dictionary of parameters. Uncompressed is always a candidate. None: the default
                    codec (see codec=None and `accuracy`), and "fp16".
    policy          [()] other settings for some parameters: a list of pairs of a rule as in `exclude` and a
                    codec's name or a dictionary of parameters, which may also hold "codec" and "memory". If
                    several rules fit a parameter, all apply, and later ones override earlier ones:
                    `policy=[("<128KB", "none"), ("output", {"density": 0.05})]`.
    full_every      [0] K > 0: steps 0, K, 2 K, ... are full-precision steps, in which the groups send their
                    whole gradient and residual, as Marsit does. May be a Schedule: `Schedule({0: 1, 100: 0})`
                    begins with 100 full-precision steps. 0: never. Planned groups cannot have it; groups that
                    a run without it has found can: `groups=[g["names"] for g in
                    state.plan_report()["groups"]]`.
    warmup          [30] for codec="auto", which starts to use a sparse codec in the middle of training: it
                    first sends 25 %, then 6.25 %, then 1.5625 % of the elements, for this many steps each,
                    and skips stages that are below the codec's own density or send no less than plain DDP. 0:
                    no stages.
    exchange        [None] how payloads travel: a name in `sidcomp.exchanges()`, whose parameters are further
                    keyword arguments. None: the process group's all-reduce for linear codecs, its all-gather
                    for the others or "twoshot", where that sends fewer bytes (from three ranks on) and
                    the memory keeps a residual; it encodes the mean a second time. "ring1" and
                    "torus1" (Marsit's), "twoshot" and "hierarchical" send point-to-point messages;
                    docs/exchanges.md says which pays when. "hierarchical" takes ranks_per_node: torchrun's
                    LOCAL_WORLD_SIZE by default, or a DeviceMesh whose last dimension is the node.
                    codec="auto" takes a name or a list of names as further candidates; None: "twoshot" and
                    "hierarchical".
    transport       ["torch"] what enqueues the collectives on a GPU: "torch", through its process group,
                    or "native", sidcomp itself through NCCL's C interface, which it finds at run time: one
                    call enqueues a group's whole step (docs/exchanges.md). Nobody has measured yet which is
                    faster.
    nonfinite       [None] what remains of a discarded step. sidcomp discards a step, and never sends its
                    gradient later, if a gradient was not finite, if the GradScaler given to `follow` skipped
                    it, or if the program called `skip`. "rollback": nothing remains, and all later bits are
                    as if the step had never been. This takes a second copy of the state (4 bytes per element
                    for memory "residual"), and on CUDA the host waits for the previous step. "drop":
                    groups that were not finite remove their gradient again, up to rounding; groups that were
                    finite clear their residual. This takes no second copy and no waiting. None: "drop" until
                    the first call of `follow(optimizer, scaler)`, or of `update_scale` with another scale
                    than 1; "rollback" from then on.
    clip_gradient   [0] c > 0: scales the gradient of a rank down to the 2-norm c / sqrt(ranks) before it is
                    compressed, as DGC and RedSync do for recurrent networks. The norm is that of all
                    parameters, whatever the groups; so groups are sent only when backward() ends. (The memory
                    "dgc" has clip_norm for the norm of each group, which lets them leave earlier.) With a
                    GradScaler that `follow` was given, c is in the unscaled unit. Planned groups cannot have
                    it, and neither can a sharded model. 0: no clipping.
    Y, alpha        [None] for groups="mergecomp": the largest number of groups (2), and the gain below which
                    its search adds no more (0.01). Each group beyond two multiplies the number of measured
                    iterations by that of the tensors.
    accuracy        [None] which codecs sidcomp may choose by itself, if you name neither the codec nor
                    candidates. "exact": only "lossless", which rounds nothing, but may send elements far
                    smaller than their neighbors some steps later; "auto" then gives it up. "dense": those
                    whose loss was above that of uncompressed training by no more than its seeds differ, on
                    each model and number of ranks that was measured. "close": also those with at most 1 %
                    more loss on all of them; at present none. "any": all of them. None: "dense". The choice
                    depends on the optimizer given to `follow`: with Adam and AdamW the default codec is
                    "int4", because a fortieth of the bytes raises the loss by up to 6.3 %
                    (docs/results.md). If the model is trained with one and is not followed, a warning says
                    so once. Updates can be sent in fewer bytes: `sidcomp.compress` of a module without DDP.
    profile         [None] for planned groups: a Profile of an earlier run or the path of its file, in place
                    of measuring again (`state.profile.save(path)` writes one). One that does not fit is not
                    used.

    Parameter names are those of `ddp.module.named_parameters()`, without the "_orig_mod." that torch.compile
    adds, so a compiled module and a plain one have the same names. The averaged gradients replace the local
    ones in DDP's buckets. Groups follow the order in which gradients become ready, as far as DDP's buckets
    show it: in the first step (static graph: two) DDP has one bucket per dtype, in the order of definition;
    then DDP rebuilds its buckets, and sidcomp its groups. Residuals move with their parameters.

    Errors are those of `sidcomp.errors`; `error` is the last one. The hook logs it under "sidcomp" and fails
    the futures of its group, so that backward() raises a RuntimeError with its text, and with the error as
    its cause, on every rank that is affected. The next iteration can run. Warnings are errors after
    `strict()`.

    A non-finite gradient on any rank makes its group non-finite on all ranks, and sidcomp discards the step.
    Do not let the optimizer apply any part of such a step; a GradScaler does not.

    Pickling and copying take the configuration and the result of `state_dict`, not the process group:
    register the copy with a DDP model of its own. Use a State as a context manager, or `close()` it, before
    the process group is destroyed. On Gloo a State that is not closed frees its threads and descriptors when
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
        warmup: int = WARMUP,
        exchange: str | Sequence[str] | None = None,
        transport: str = "torch",
        nonfinite: str | None = None,
        clip_gradient: float = 0.0,
        Y: int | None = None,
        alpha: float | None = None,
        accuracy: str | None = None,
        profile: Profile | str | Path | None = None,
        **parameters: Setting | Schedule,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "memory": memory, "groups": groups, "seed": seed, "exclude": exclude,
            "checksum_every": checksum_every, "isa": isa, "candidates": candidates, "policy": policy,
            "full_every": full_every, "warmup": warmup, "exchange": exchange, "transport": transport,
            "nonfinite": nonfinite, "clip_gradient": clip_gradient, "Y": Y, "alpha": alpha,
            "accuracy": accuracy,
        }  # fmt: skip
        super().__init__()
        self._codec = codec, parameters
        self.settings = Settings.parse(codec, parameters, **self._arguments)
        tuner = controller_for(self.settings, groups, profile)
        self.engine = Engine(self.settings, process_group, tuner)  # what doors pass gradients and updates to
        self.door: Door | None = None
        self._scalars = Scalars()
        self._closed: dict[str, Any] | None = None  # the last stats
        self._ending = Ending(f'State("{codec}")' if codec is not None else "State()", self.engine.current)
        self._ending.controller = tuner
        self._finalizer = weakref.finalize(self, self._ending.collected)

    def __repr__(self) -> str:
        candidates = ", ".join(candidate.label for candidate in self.settings.candidates)
        chosen = f"auto from {candidates}" if self.settings.auto else candidates
        memory = self.settings.candidates[0].memory.name
        return f"State({chosen}, memory={memory!r}, groups={self.settings.groups!r}, step={self.engine.step})"

    @property
    def error(self) -> Exception | None:
        """The last exception in the hook, or None."""
        return self.engine.error

    # ---- the door: for sidcomp itself

    def attach(self, door: Door, roles: dict[str, frozenset[str]]) -> None:
        """Serves the door's model from now on. roles: the names of the parameters that rules such as
        "embedding" fit. Raises SetupError if State and model do not fit together."""
        self.check_open()
        model = door.model
        if model.process_group is not None and not known(model.process_group):
            self.settings = self.engine.settings = over_unknown(self.settings)
            self.engine.guarded()  # a member may end within a step
        if (given := self.engine.process_group) is not None:
            check_ranks(given, model.process_group)
        # These raise here, not in backward(), if a rule or a name fits no parameter.
        self.settings.policy.roles = roles
        self.settings.assign(model.shapes)
        excluded = self.settings.policy.excluded(model.shapes)
        if self.settings.clip_gradient and not model.gradients:
            raise SetupError(
                f"clip_gradient={self.settings.clip_gradient:g} clips what DDP averages, the gradients of a "
                "whole model: leave it out here, and use torch.nn.utils.clip_grad_norm_"
            )
        if isinstance(self.settings.groups, list):
            check_lists(self.settings.groups, model.shapes, excluded)
        if self.engine.resume is not None:
            self.engine.resume.check_part(model.part)
            self.engine.resume.check(model.shapes)
        self.door = door
        self._ending.silent, self._ending.updates = False, model.updates
        self._watch_forward()
        self._look_for_optimizer(model)

    def check_open(self) -> None:
        if self._closed is not None:
            raise SetupError(
                "this State is closed: make a new one, and call sidcomp.compress (of a DDP model: of a new "
                "DDP around its module) or sidcomp.fsdp.compress again"
            )

    # ---- statistics

    def stats(self) -> dict[str, Any]:
        """Statistics of this rank since this State was made: what ran before a checkpoint does not count.

        steps                       begun, also those that were discarded, whose bytes have travelled
        world
        sent_bytes, received_bytes  passed to and received from exchanges: for an all-reduce the payload's
                                    body once each way, for an all-gather one payload out and world - 1 in
        dense_bytes                 the size of the same gradients in float32
        wire_bytes                  sent to other ranks, and on average received from them: of an all-gather
                                    (world - 1) payloads, of an all-reduce 2 (world - 1) / world of the
                                    payload's body, as in a ring; of messages, all bytes of the messages.
                                    With updates it includes the noise correction, and buffers
        dense_wire_bytes, ratio     the same of plain DDP, 2 (world - 1) / world of dense_bytes;
                                    dense_wire_bytes / wire_bytes, and 0 if nothing travelled
        control_bytes               received for checksums and digests, and for agreeing on groups
        density                     elements sent / elements, in the last step
        encode_seconds, wait_seconds, decode_seconds
                                    sums over groups and steps; wait: from the start of an exchange to its
                                    callback
        allocations                 blocks of memory allocated; constant from a layout's second step on
        state_bytes                 size of the groups' states: of both copies, if there are two
        groups                      for each group: names, n (elements), dtype, codec, memory, k (elements to
                                    send), sent_bytes (per step), steps, the three times, and of the last step
                                    count (elements sent), found, density, threshold (or scale), stages

        On CUDA it waits for the device, and the three times cannot be told apart.
        """
        if self._closed is not None:
            return self._closed
        return statistics(self.engine)

    def log(self, norms: bool = True) -> dict[str, float]:
        """Returns a flat dictionary of numbers, of the steps since the last call, for a training log. It is
        empty if there was no step. Call it on any rank, between two steps:

            for name, value in state.log().items():
                writer.add_scalar(name, value, step)  # TensorBoard
            wandb.log(state.log(), step=step)  # Weights & Biases

        sidcomp/wire_bytes, sidcomp/dense_wire_bytes, sidcomp/ratio
                                    a step, as in `stats`
        sidcomp/density             of the last step
        sidcomp/encode_ms, sidcomp/wait_ms, sidcomp/decode_ms
                                    a step, sums over the groups; not on CUDA
        sidcomp/residual_norm       2-norm of this rank's residual, before the next step
        sidcomp/gradient_norm       2-norm of the last averaged gradient, as it is in DDP's buckets
        sidcomp/residual_over_gradient
                                    their ratio: how many average gradients wait to be sent

        norms=False leaves out the last three, which copy the residual and read the gradient once.
        """
        self.check_open()
        out = self._scalars.take(self.engine, norms)
        return {**out, "sidcomp/density": self.stats()["density"]} if out else out

    # ---- the plan

    def explain(self) -> str:
        """Returns a text for people: what is compressed and how, and the bytes and times of each group on
        this rank; if the State plans, also what it has measured, what it chose, and why."""
        return report.explain(self.engine)

    def plan_report(self) -> dict[str, Any]:
        """Returns the same as numbers. Times are in ps; 0 means not known.

        stage, why, log             "settled" once the search is over; the reason; what was logged
        competed, tried             plans that were measured in turns; the best of them, with plain DDP
        compared                    every later comparison with plain DDP: step, measured_ps (the plan),
                                    against_ps (plain DDP), pairs of windows, steps, kept (whether the plan
                                    was)
        groups                      for each group: names, elements, way, exchange, rounds, sent_bytes,
                                    predicted_ps, measured_ps
        finding_steps, finding_seconds
                                    what the search took
        dense_ps, compute_ps        an iteration of plain DDP; an iteration without communication
        baseline_ps                 the time that the plan had to beat
        predicted_ps, measured_ps   an iteration with the plan
        rewrapped_ps                the prediction with the plan's groups as DDP's buckets; None: no plan
        """
        return report.report(self.engine)

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted and the last measured iteration to a Chrome trace file (chrome://tracing,
        ui.perfetto.dev). Nothing is predicted where nothing is planned."""
        report.trace(self.engine, path)

    def plot(self, path: str | Path) -> None:
        """Draws the same to an image file. Needs matplotlib. Raises SetupError before the first step, and
        ArgumentError if the file cannot be written."""
        rows = report.timelines(self.engine)
        if not any(rows.values()):
            raise SetupError("there is no iteration to draw yet: train some steps first")
        plan_plot.draw(rows, path, repr(self))

    @property
    def profile(self) -> Profile | None:
        """The measurements that the plan is based on; None before there are any. After
        `state.profile.save(path)`, the next run need not measure again: `State("auto", profile=path)`."""
        return report.controller_of(self.engine).report.profile

    # ---- loss scale

    def rescale(self, factor: float) -> None:
        """Multiplies the memory's contents by `factor` > 0. Call it on every rank, between two iterations.
        Raises SetupError where updates are sent."""
        self._refuse_updates("rescale() multiplies residuals of scaled gradients")
        self.engine.rescale(above_zero(factor, f"rescale(factor={factor!r})"))

    def update_scale(self, scale: float) -> None:
        """Sets the loss scale: call `state.update_scale(scaler.get_scale())` after each `scaler.update()`, if
        you do not give the scaler to `follow`.

        Residuals are in units of scaled gradients: when the scale changes, they are multiplied by new / old.
        From the first scale other than 1 on, nonfinite=None means "rollback". Raises SetupError where
        updates are sent.
        """
        value = above_zero(scale, f"update_scale(scale={scale!r})", "scaler.get_scale()")
        self._refuse_updates("update_scale() rescales residuals of scaled gradients")
        self.engine.quiet()
        if value != 1:  # which a scaler that is not enabled says
            self.engine.guarded()
        self.engine.update_scale(value)

    def skip(self) -> None:
        """Tells the State that the program skips the optimizer's step for a reason of its own, such as an
        exploding loss or a bad batch. Call it on every rank, after backward() and before the next one.

        With nonfinite="rollback" the residuals, the random numbers and the step count are then as if that
        backward() had never been; with "drop" the residuals are cleared. sidcomp discards a step without this
        call if it was not finite or if the GradScaler given to `follow` skipped it; then the call changes
        nothing. Raises SetupError if there is no step to discard, and where updates are sent.
        """
        self.check_open()
        self._refuse_updates("skip() discards a gradient that was sent")
        self.engine.skip()

    def _refuse_updates(self, what: str) -> None:
        if self.door is not None and self.door.model.updates:
            raise SetupError(
                f"{what}, but what optimizers did is in the unit of the parameters, and sent when they have "
                "stepped: leave it out"
            )

    # ---- learning rate

    def follow(
        self,
        optimizer: Optimizers | None,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        """Lets the residuals follow the learning rate of `optimizer`, which steps on these gradients. If
        `scaler` is given, they also follow the loss scale and the steps that the scaler skips. follow(None)
        ends it.

        Of several optimizers give a list, such as [muon, adamw]: each parameter's residual follows the rate
        of its own optimizer. Of a framework's wrapper, such as Accelerate's or torchft's, it follows the
        optimizer inside.

        Without it an element that is sent late is multiplied by the learning rate of the step in which it is
        sent, not by that of its own step: if a schedule lowers the rate, it counts for less. With it each
        step first multiplies the residual by the old rate over the new one, as EF-SGD requires (Karimireddy
        et al. 2019; experiments/2026-11-loss-by-codec.md has the gain). This takes no pass of its own, and
        nothing if the rate has not changed.

        Momenta are not rescaled, as in torch's SGD. The rates (`lr` of each of optimizer.param_groups) are
        read when backward() begins; set them before it or after the step, as schedulers do, and equally on
        every rank. A checkpoint holds the last ones.

        With a scaler, the residual is rescaled when the loss scale changes, and a step that
        `scaler.step(optimizer)` skips is discarded; nonfinite=None then means "rollback". With or without a
        scaler, all backward() calls since the optimizer's last step are discarded together. A scaler made
        with enabled=False counts as None.

        Before the first step it also chooses the default codec, or the candidates of "auto", by the
        optimizer: see `accuracy`. A line says what it has chosen.

        It also warns of an optimizer that applies momentum a second time.
        A GradScaler that is in use, but was not given, is found once, in the third step, and named in a
        warning: without it the residuals keep the units of the former scale.

        Raises ArgumentError if `optimizer` or `scaler` is something else, if an optimizer has none of the
        model's parameters, if two have the same one, if the State already follows one of other parameters,
        or if a rate is a tensor on a device, negative or not finite. A rate that becomes invalid later makes
        backward() fail.
        """
        self.check_open()
        self._follow(optimizer, scaler)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the memory of this rank, and everything else that a resumed run needs for the same bits.
        Every rank saves its own.

        Call it between two iterations. It holds only tensors, dictionaries, lists, strings and numbers, so
        that `torch.load(weights_only=True)` reads it. "residuals" holds the residuals and velocities by
        parameter name, float32 of shape (vectors, elements) in the gradient's memory order; "layout" holds
        the groups, in order.
        """
        self.check_open()
        return self.engine.state_dict()

    def load_state_dict(
        self,
        state: "dict[str, Any] | Sequence[dict[str, Any]]",
        redistribute: str = "sum",
        strict: bool = True,
    ) -> None:
        """Loads a result of `state_dict`: this rank's own, or a list of those of all old ranks, in any order.

        With the same world size, training continues bit for bit as if it had not stopped, with the groups of
        the checkpoint, whatever buckets DDP has. There is one exception: a state from before DDP has rebuilt
        its buckets (after one step; with a static graph, two) keeps all residuals, but not its groups.

        Another world size needs the list. redistribute="sum": every new rank gets the sum of the old ranks'
        residuals divided by the new world size. This preserves their sum, and the residual of an old rank has
        the weight of any gradient of a rank. "mean": every new rank gets the mean over the old ranks, which
        preserves what the residuals add to the averaged gradient.

        With another codec, density, seed, grouping or exclusion the residuals are kept, everything else
        starts anew, and the log "sidcomp" has a warning. Another memory, another model, or a missing or
        damaged field raises a CheckpointError that names it, and the State does not change. Parameters are
        compared here if the State is bound to its model, otherwise at first use. Call it between two
        iterations, on every rank at the same point: if one alone has loaded a state, the next step raises a
        RankError on all; on GPUs they wait for one another until the process group's timeout.

        strict=False accepts a model in which other parameters have gradients, because some were frozen or
        released since. Residuals of parameters that are no longer averaged are dropped, new ones start from
        zero, the groups are made anew, and the log "sidcomp" has a warning. It needs a State that is
        registered.
        """
        self.prepare(state, redistribute, strict)()

    def prepare(
        self,
        state: "dict[str, Any] | Sequence[dict[str, Any]]",
        redistribute: str = "sum",
        strict: bool = True,
        model: Model | None = None,
    ) -> Callable[[], None]:
        """As `load_state_dict`, but returns what takes the state over, and cannot fail. For sidcomp itself.
        model: that the State is going to serve; None: that of its door."""
        if not isinstance(strict, bool):
            raise ArgumentError(f"strict={strict!r}: give True or False")
        self.check_open()
        p = self.engine
        p.pause()
        self._abandon(SetupError("a checkpoint was loaded before the backward pass had ended"))
        p.quiet()
        model = self.door.model if model is None and self.door is not None else model
        parent = p.process_group or (model.process_group if model is not None else None)
        settings = self._settings_of(state)
        resume = checkpoint.load(settings, parent, state, redistribute, p.place)
        if model is None and not strict:
            raise CheckpointError(
                "load_state_dict(strict=False) compares the checkpoint with the model: register the State "
                "first"
            )
        if model is not None:
            resume.check_part(model.part)
            (resume.check if strict else resume.adapt)(model.shapes)
        planned = resumed(p.tuner, settings, resume)

        def take() -> None:
            self.settings = p.settings = settings
            p.start_from(resume, planned)
            if planned is not None:
                self._ending.controller = planned[0]

        return take

    def _abandon(self, error: Exception, telling: bool = True) -> None:
        self.engine.abandon(error, telling)
        if self.door is not None:
            self.door.reset(error)

    # ---- the end

    def close(self) -> None:
        """Waits for pending exchanges and ends the State's own process group. May be called again. A clean
        end of a program: `state.close(); del ddp; gc.collect(); torch.distributed.destroy_process_group()`.
        """
        if self._closed is not None:
            return
        p = self.engine
        p.pause()
        try:
            p.quiet()
            self._closed = statistics(p)
        except RuntimeError:  # of a device that is lost: everything else is freed all the same
            self._closed = statistics(p, waits=False)
        p.stop_looking()
        self._abandon(SetupError("the State was closed"), telling=False)
        self.door = None
        p.close()
        self._watch_forward()
        self._finalizer.detach()
        if sys.exc_info()[0] is None and p.error is None:  # otherwise an error has ended the training
            self._ending.speak("was closed", p.speaker)

    def __enter__(self) -> "State":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        p = self.engine
        self._ending.silent = self.door is None
        started = self._closed is None and (p.layout is not None or p.resume is not None)
        memory = self.state_dict() if started else None
        return {"codec": self._codec, "arguments": self._arguments, "memory": memory}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        codec, parameters = saved["codec"]
        self.__init__(codec, **saved["arguments"], **parameters)  # type: ignore[misc]
        self._ending.silent = True
        if saved["memory"] is not None:
            self.load_state_dict(saved["memory"])


def preset(name: str | Path, **changes: Any) -> State:
    """Makes a State with a paper's published setting: `sidcomp.preset("redsync", density=0.01)`.

    name: one of `sidcomp.presets()`, or a path that ends in .toml (sidcomp/config/presets.py says what it may
    hold). changes: arguments and parameters of a State that replace those of the file. Raises ArgumentError,
    which names the file and the key.
    """
    found = presets.load(name)
    try:
        return State(**{**found.arguments, **found.parameters, **changes})
    except (ArgumentError, ParameterError) as e:
        raise type(e)(f"preset {str(name)!r}: {e}") from e
