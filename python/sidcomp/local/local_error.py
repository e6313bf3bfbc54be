"""Local error: each rank's optimizer steps at once with the rank's own gradient, and the ranks compress and
exchange what the optimizers did. What has not been sent yet stays in the rank's own parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.config.accuracy import adaptive
from sidcomp.errors import ArgumentError, CheckpointError, UnsupportedError
from sidcomp.local.gradient_noise import GradientNoise, Noise, RowNoise, SketchNoise, second_betas
from sidcomp.local.shards import Shards, reshard
from sidcomp.local.vectors import (
    Part,
    Stray,
    broadcast,
    buckets,
    check,
    check_saved,
    compare,
    finite,
    group_of,
    lacks,
    named_group,
    open_engine,
    refuse_converted,
    serve,
    take_step,
    trained,
    whereabouts,
)
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.group import Group
from sidcomp.runtime.optimizers import Optimizers, chains
from sidcomp.runtime.plain_data import anything, count, positive, table, text
from sidcomp.state import State, check_state

_SAVED = ("agreed", "base", "arriving", "own")


class LocalError:
    """Compresses what any optimizer does, AdamW included, and keeps the error in the rank's own parameters.

        local = sidcomp.LocalError(module, optimizer, sidcomp.State("topk", density=0.16))
        for x, y in batches:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            local.step()  # in place of optimizer.step()
        local.merge()  # now all ranks have the same parameters

    DDP's hook compresses gradients, and what arrives late in a residual has another effect on Adam than it
    would have had on time. Here no gradient is exchanged. On rank r the optimizer steps with the rank's own
    gradient. The error E(r) is what it has done and the other ranks do not know yet. In an exchange each rank
    encodes its error. The mean of what the ranks sent changes the agreed parameters, which are the same on
    all ranks. Each rank continues from

        parameters(r) = agreed - E(r)

    so its own parameters contain its own steps at once. This is error reset (CSER, Xie et al. 2020, Algorithm
    2), with a residual as memory. Evaluate and publish the agreed parameters: see `agreed` and `merge`.

    module          a module without DDP; or a DDP model, whose gradients are then no longer averaged; or one
                    that fully_shard has sharded inside a node, whose gradients FSDP then averages over the
                    node. The parameters must be float32. This call copies rank 0's parameters and buffers to
                    all ranks, and every exchange copies rank 0's buffers again
    optimizer       of the module's parameters, or a list of optimizers, such as [muon, adamw]. Its state
                    stays on its rank. Clip gradients at the usual norm for Adam and its relatives, whose
                    steps do not depend on the size of gradients, and at about sqrt(W) times that for SGD: a
                    rank's own gradient has more noise than the mean of W ranks, so it is larger
    state           [None] a State with a memory that keeps what was not sent; None: `State()`.
                    `State("auto")` and other planned groups need delay=0: they measure the exchanges of the
                    first steps, uncompressed ones among them, and "auto" leaves out exchanges that keep one
                    error for several ranks. `follow` is refused, because updates already contain the learning
                    rate
    every           [1] steps between two exchanges, at least 1
    noise_correction
                    [None] True: lengthens each rank's own steps, parameter by parameter, by as much as the
                    noise of its own gradient shortens them. (Adam divides by the size of the gradient, and a
                    rank's own gradient is up to sqrt(W) times as large as the mean of W ranks.) The ranks
                    compare samples of their gradients, and what is exchanged is lengthened. With every > 1
                    they compare sketches of the gradients of up to 16 steps between two exchanges, and each
                    step is lengthened by the root of the factor, and what is exchanged by it once more.
                    None: the parameters of optimizers with two betas, such as Adam. "rows": these, row by
                    row, in the exchange; in each one the ranks compare two numbers for every fourth row, in
                    float32. Of a parameter that is sharded each shard has factors of its own
    delay           [0] 1: an exchange takes place during the next forward and backward pass, and its mean is
                    applied one exchange later
    process_group   [None] the ranks to average over, W of them; None: the State's, else the default group.
                    Necessary with FSDP2 inside a node, here or in the State: the ranks of all nodes that hold
                    the same shard as this one, such as mesh.get_group("replicate")

    It takes 12 bytes for each parameter (the agreed parameters, those after the last exchange, and what is
    exchanged), with every > 1 and the noise correction 16; the State's residual takes another 4. On CUDA
    everything stays on the device. The host waits once in each exchange, for the report that says whether it
    was finite; with shards it also waits some times for the other ranks of the node. None of this has run on
    a GPU.

    If what a rank did is not finite, the exchange is discarded, and all ranks lose what they did since the
    previous one. Raises ArgumentError, SetupError or UnsupportedError, which say what to change: also if the
    ranks' parameters differ in name, shape or dtype, or are other shards. A step of the optimizer that `step`
    did not take raises a SetupError before it moves a parameter.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers,
        state: State | None = None,
        *,
        every: int = 1,
        delay: int = 0,
        noise_correction: bool | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if delay not in (0, 1) or isinstance(delay, bool):
            raise ArgumentError(f"delay={delay!r}: give 0, or 1 to apply each mean one exchange later")
        if not (noise_correction is None or isinstance(noise_correction, bool) or noise_correction == "rows"):
            raise ArgumentError(f'noise_correction={noise_correction!r}: give True or False, or "rows"')
        self.state = state = state if state is not None else State()
        check_state(state)
        check(module, every, state, "LocalError", planned=True)
        if delay and state.settings.planned:
            raise ArgumentError(
                f"delay=1 hides exchanges behind the next step, and groups={state.settings.groups!r} are "
                "planned by what they take: leave delay out, or name groups, such as "
                'State("topk", groups="bucket")'
            )
        for candidate in state.settings.candidates:
            if not candidate.codec.lossless and "feedback" not in candidate.memory.traits:
                raise ArgumentError(
                    f"LocalError needs a memory that keeps what was not sent, and {candidate.label} has "
                    f'memory={candidate.memory.name!r}: give the State memory="residual"'
                )
        if state.settings.momentum:
            raise ArgumentError(
                "the State's memory holds the momentum of gradients, but here the optimizer holds its own: "
                'give the State memory="residual"'
            )
        if not state.settings.auto and any(
            c.choice is not None and c.choice.local > 1 for c in state.settings.candidates
        ):
            raise UnsupportedError(
                "LocalError keeps each rank's error in its own parameters, and this exchange keeps one for "
                'several ranks: choose exchange="twoshot", or leave exchange out'
            )
        ddp = module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else None
        if ddp is not None:
            module = ddp.module
        links = chains(optimizer)
        self._given = [each[0] for each in links]
        self._optimizers = [each[-1] for each in links]  # those inside of wrappers
        if noise_correction == "rows" and not any(map(adaptive, self._optimizers)):
            raise ArgumentError(
                'noise_correction="rows" lengthens the steps of optimizers with two betas, such as Adam, and '
                f"{type(self._optimizers[0]).__name__} has none: leave noise_correction out"
            )
        reshard(module)
        whole = trained(module, self._optimizers)
        self._shards = Shards(whole, named_group(state, process_group), "LocalError")
        named = self._shards.local()
        if other := [name for name, p in named.items() if p.dtype is not torch.float32]:
            raise UnsupportedError(
                f"parameter {other[0]!r} is {str(named[other[0]].dtype)[6:]}: LocalError keeps errors in the "
                "parameters, which takes float32; use autocast for the forward pass"
            )
        self.module, self.optimizer, self.every, self.delay = module, optimizer, every, delay
        self.steps = 0  # taken by the optimizer
        self._group = group_of(state, process_group)
        self._parts = [_Part(names, named) for names in buckets(named)]
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._arriving = False  # the means of an exchange have not been applied yet
        decays: dict[int, float] = {}  # of the parameters whose steps are lengthened
        if noise_correction is not False:
            decays = second_betas(self._optimizers, of_all=noise_correction is True)
        corrected = [
            (p, update)
            for part in self._parts
            for name, update in zip(part.names, part.update_views, strict=True)
            if id(p := whole[name]) in decays
        ]
        self._corrected = [update for _, update in corrected]
        self._noise: Noise | None = None
        if corrected and dist.get_world_size(self._group) > 1:
            parameters = [p for p, _ in corrected]
            if noise_correction == "rows":
                self._noise = RowNoise(parameters, [decays[id(p)] ** every for p in parameters], self._group)
            elif every > 1:
                self._noise = SketchNoise(parameters, [decays[id(p)] for p in parameters], every, self._group)
            else:
                self._noise = GradientNoise(parameters, self._group)
        arguments = {"every": every, "delay": delay, "noise_correction": noise_correction}
        arguments["parameters corrected"] = len(corrected)
        compare(named, module, self._group, "LocalError", arguments, self._shards.part)
        broadcast([*named.values(), *module.buffers()], self._group)
        self._stray = Stray(self, self._optimizers, "LocalError")
        for part in self._parts:
            part.start()
        device = self._parts[0].update.device
        beside = self._noise.nbytes if self._noise is not None else 0
        serve(state, module, named, self._group, device, "LocalError", self._shards.part, beside)
        if ddp is not None:  # last, so that a refusal leaves the DDP model as it was
            ddp.require_backward_grad_sync = False

    # ---- training
    # --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """Calls `optimizer.step(closure)`, or with a GradScaler `scaler.step(optimizer)`, and exchanges once
        in `every` steps. Each rank has its own scale. A rank whose scaler skips its step still exchanges
        what it had not sent before. Call `scaler.update()` as usual. Every rank must call `step` the same
        number of times. Of several optimizers it calls each one's, in order; these, and a GradScaler, take
        no closure. Returns what the last one returns; raises the errors of the exchange."""
        refuse_converted(self._parts, "LocalError", every=not self.steps)
        sketches = self._noise if isinstance(self._noise, SketchNoise) else None
        if sketches is not None:
            sketches.mark()
        self._stray.expected = True
        try:
            loss = take_step(self._given, closure, scaler)
        finally:
            self._stray.expected = False
        self.steps += 1
        if sketches is not None:
            sketches.lengthen()
            sketches.note()
        if self.steps % self.every == 0:
            self.exchange()
        return loss

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges now. Every rank must call it at the same point; `step` does it once in `every` steps."""
        open_engine(self.state)
        if self.delay:
            self._land()
        self._launch()
        if not self.delay:
            self._land()

    def _find(self) -> None:
        """Finds the shards of FSDP where they are now. Call it before they are read or changed."""
        if self._shards.find(self.module, self._parts) and isinstance(self._noise, SketchNoise):
            self._noise.find()

    def _launch(self) -> None:
        engine, beside = self.state._engine, 0
        self._find()
        # First, because the ranks compare here how far they are, on which the size of what else they exchange
        # depends; and on all ranks of the shards, whichever has loaded a checkpoint or has another plan.
        with self._shards.peers.together():
            self._form()
        for part in self._parts:
            part.measure()
        if self._noise is not None:
            beside = self._noise.sample()  # and takes in the samples of the exchange before
            torch._foreach_mul_(self._corrected, self._noise.factors)
        if self._shards.part and not self._shards.peers.all_agree(
            finite([part.update for part in self._parts])
        ):
            for part in self._parts:  # so that the ranks of all shards discard it
                part.update.fill_(float("nan"))
        engine.count_reduced(beside)
        with self._shards.peers.together(self._fail):
            self._futures = [engine.ready(i, part.update) for i, part in enumerate(self._parts)]
        for part in self._parts if self.delay else ():  # without delay, `_land` comes before the next step
            part.mark()
        self._arriving = True

    def _fail(self, error: Exception) -> None:
        self._find()
        self.state._engine.abandon(error)
        self._settle(keep=False)

    def _form(self) -> None:
        """Makes the groups, if there are none."""
        engine, door = self.state._engine, self.state._door
        if engine.layout is None:
            assert door is not None
            at = whereabouts(self.steps, [part.agreed for part in self._parts], self._noise)
            engine.form(door.model, [part.bucket() for part in self._parts], at=at)

    def _land(self) -> None:
        """Waits for the exchange in flight, and applies its means."""
        if not self._arriving:
            return
        engine = self.state._engine
        futures, self._futures, self._arriving = self._futures, [], False
        with self._shards.peers.together(self._fail):
            for future in futures:
                future.wait()
        if self.delay:  # else nothing has happened since the launch
            self._find()
        engine.quiet()  # discards the step, if what some rank sent was not finite
        if isinstance(self._noise, SketchNoise):  # it has arrived beside the means
            self._noise.land()
        counts = engine.counts()
        for part in self._parts if counts else ():
            part.agreed.sub_(part.update)
        self._settle(keep=counts and self.delay > 0)
        broadcast(list(self.module.buffers()), self._group)

    def _settle(self, keep: bool) -> None:
        """Puts the agreed parameters less this rank's error into the parameters. keep: what its optimizer has
        done since the last launch stays there."""
        engine = self.state._engine
        engine.quiet()
        for part in self._parts:
            if keep:
                part.measure()
            if not engine.groups or engine.unassigned:
                part.base.copy_(part.agreed)
        for g in engine.groups:
            if g.plan.vectors and not g.direct:
                for bucket, own, error in self._errors(g):
                    part = self._parts[bucket]
                    torch.sub(part.agreed[own], error, out=part.base[own])
            elif not engine.unassigned:
                for bucket, offset, n in g.runs:
                    part = self._parts[bucket]
                    part.base[offset : offset + n].copy_(part.agreed[offset : offset + n])
        for part in self._parts if engine.unassigned else ():  # errors that wait for a group with a memory
            for name, base in part.named("base"):
                if (kept := engine.unassigned.get(name)) is not None:
                    base.sub_(kept.values[0].view(base.shape).to(base.device))
        for part in self._parts:
            part.put("base")
            if keep:
                torch._foreach_sub_(part.parameters, part.update_views)

    def _errors(self, g: Group, common: bool = False) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yields what this rank has not sent of the group, or (common) what it keeps for all ranks, piece by
        piece: the bucket, the piece's place in it, and the values."""
        executor = self.state._engine.executor
        assert executor is not None
        parts = [part for part in executor.residual(g) if part.common is common]
        first = 0  # of a run, in the group
        for bucket, offset, n in g.runs:
            for start, values, _ in parts:
                begin, end = max(first, start), min(first + n, start + len(values))
                if begin < end:
                    own = slice(offset + begin - first, offset + end - first)
                    yield bucket, own, values[begin - start : end - start]
            first += n

    # ---- the agreed parameters
    # ------------------------------------------------------------------------------------------------

    @contextmanager
    def agreed(self) -> Iterator[torch.nn.Module]:
        """Puts the agreed parameters, which have the same bits on all ranks, into the module, and this rank's
        own back afterwards:

            with local.agreed() as module:
                evaluate(module)
                torch.save(module.state_dict(), "model.pt")

        Nothing is exchanged, and training continues afterwards as if you had not called it. The agreed
        parameters do not contain the steps since the last exchange yet, nor, with delay=1, the exchange in
        flight. Do not train inside."""
        self._find()
        own = [[p.detach().clone() for p in part.parameters] for part in self._parts]
        with torch.no_grad():
            for part in self._parts:
                part.put("agreed")
        try:
            yield self.module
        finally:
            self._find()
            with torch.no_grad():
                for part, kept in zip(self._parts, own, strict=True):
                    torch._foreach_copy_(part.parameters, kept)

    @torch.no_grad()
    def merge(self) -> None:
        """Averages the ranks' own parameters, uncompressed, so that no error is left. Call it at the end of
        training, or before the number of ranks changes, on every rank at the same point. Afterwards all
        ranks have the agreed parameters. A rank whose parameters are not finite gives those after its last
        exchange."""
        self.state._open()
        self._land()
        if self._noise is not None:
            self._noise.land()
        engine = self.state._engine
        engine.quiet()
        self._find()
        if not self._shards.peers.all_agree(finite([p for part in self._parts for p in part.parameters])):
            for part in self._parts:
                part.put("base")
        for part in self._parts:
            part.measure_from(part.agreed)
        world = dist.get_world_size(self._group)
        for g in engine.groups:
            if g.in_messages and g.message_plan.common:  # what this rank keeps for all of them
                for bucket, own, error in self._errors(g, common=True):
                    self._parts[bucket].update[own].add_(error * world)
        for part in self._parts if engine.unassigned else ():
            for name, update in zip(part.names, part.update_views, strict=True):
                kept = engine.unassigned.get(name)
                if kept is not None and kept.common:
                    update.add_(kept.values[-1].view(update.shape).to(update.device), alpha=world)
        engine.unassigned = {}
        for part in self._parts:
            with exchanging("merge()"):
                dist.all_reduce(part.update, group=self._group)
            part.agreed.sub_(part.update.div_(world))
            part.base.copy_(part.agreed)
            part.put("agreed")
        for g in engine.groups:
            if g.plan.vectors and not g.direct:
                assert engine.executor is not None
                engine.executor.clear(g)
        broadcast(list(self.module.buffers()), self._group)

    # ---- checkpoints
    # ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides the dictionaries of the optimizer and the State: the
        number of steps and, by parameter name, the agreed parameters, those of this rank after the last
        exchange ("base"), its present ones ("own", if they differ from "base") and, with delay=1, the means
        that have arrived but have not been applied yet ("arriving", otherwise empty). Call it between two
        steps. Every rank saves its own three dictionaries. They do not contain the module's buffers: save
        those as well."""
        for future in self._futures:
            future.wait()
        self._find()
        engine = self.state._engine
        engine.quiet()
        arriving = self._arriving and engine.counts()
        kinds = [*_SAVED[:2], *(["arriving"] if arriving else []), *(["own"] if self._away else [])]
        return {
            "steps": self.steps,
            "every": self.every,
            "delay": self.delay,
            "world": dist.get_world_size(self._group),
            "noise": self._noise.state_dict() if self._noise is not None else None,
            "part": self._shards.part,
            "arriving": {},
            **{kind: {n: x.clone() for part in self._parts for n, x in part.named(kind)} for kind in kinds},
        }

    @property
    def _away(self) -> bool:
        """Whether the optimizer has stepped since the last launch."""
        return self.steps % self.every != 0

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the optimizer's and the State's, and puts the parameters into
        the module. Every rank must call it at the same point. With the number of ranks that saved it, the run
        continues with the same bits. With another number any rank may load any rank's dictionary: the State
        distributes the errors, and what the optimizers did after the last exchange is lost. Raises
        CheckpointError.
        """
        numbers = {"steps": count, "every": positive, "delay": count, "world": positive}
        check_saved(saved, "LocalError", part=text, arriving=table(anything), **numbers)
        self._shards.check_saved(saved, "LocalError")
        self._find()
        steps, world = saved["steps"], saved["world"]
        if steps >= self.every and not self.state._engine.step:
            raise CheckpointError("LocalError: call the State's load_state_dict first")
        if steps % self.every and saved["every"] != self.every:
            raise CheckpointError(
                f"LocalError: the checkpoint was saved after {steps} steps with every={saved['every']}, "
                f"between two exchanges of every={self.every}: resume with the same `every`"
            )
        arriving = bool(saved["arriving"])
        if arriving and not self.delay and world == dist.get_world_size(self._group):
            raise CheckpointError(
                "LocalError: the checkpoint was saved while an exchange was in flight, which needs delay=1: "
                "resume with the same `delay`"
            )
        between = bool(steps % self.every)  # two exchanges, where a rank's own parameters are not "base"
        kinds = [*_SAVED[:2], *(["arriving"] if arriving else []), *(["own"] if between else [])]
        for kind in kinds:
            values = saved.get(kind)
            for part in self._parts:
                for name, view in part.named(kind):
                    if found := lacks(values, name, view):
                        raise CheckpointError(
                            f"LocalError: {kind!r} has nothing of the shape of parameter {name!r}, "
                            f"{tuple(view.shape)}, but {found}: the dictionary is damaged, or of another "
                            "model"
                        )
        if self._noise is not None:
            self._noise.load_state_dict(saved.get("noise"))
        for kind in kinds:
            for name, view in (pair for part in self._parts for pair in part.named(kind)):
                view.copy_(saved[kind][name])
        self.steps, self._futures, self._arriving = steps, [], arriving
        with self._shards.peers.together():
            if self.state._engine.step:
                self._form()  # so that `_settle` finds the errors
        if world == dist.get_world_size(self._group):
            if not between:
                for part in self._parts:
                    part.put("base")
            return
        for part in self._parts if self._arriving else ():
            part.agreed.sub_(part.update)
        self._arriving = False
        if isinstance(self._noise, SketchNoise):
            self._noise.forget()
        self._settle(keep=False)


class _Part(Part):
    """agreed: the same on all ranks. base: this rank's parameters after the last launch; what its optimizer
    did since is base - parameters."""

    def __init__(self, names: list[str], named: dict[str, torch.Tensor]) -> None:
        super().__init__(names, named)
        self.agreed, self.base = self.vector(), self.vector()
        self._agreed, self._base = self.views(self.agreed), self.views(self.base)
        self._by_name = {"agreed": self._agreed, "base": self._base, "arriving": self.update_views}

    def named(self, kind: str) -> list[tuple[str, torch.Tensor]]:
        """The vector of this name in a checkpoint, by parameter."""
        return list(zip(self.names, self._by_name.get(kind, self.parameters), strict=True))

    @torch.no_grad()
    def start(self) -> None:
        torch._foreach_copy_(self._agreed, self.parameters)
        self.base.copy_(self.agreed)

    def put(self, kind: str) -> None:
        """Copies a vector, by its name in a checkpoint, into the parameters."""
        torch._foreach_copy_(self.parameters, self._by_name[kind])

    def measure(self) -> None:
        """Takes what the optimizer has done since the last launch as the update."""
        self.measure_from(self.base)

    def mark(self) -> None:
        """Takes the present parameters as base."""
        torch._foreach_copy_(self._base, self.parameters)
