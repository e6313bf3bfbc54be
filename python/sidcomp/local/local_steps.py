"""Local steps: each rank's optimizer steps on its own, and from time to time the ranks average updates."""

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import ArgumentError, CheckpointError, SetupError, UnsupportedError
from sidcomp.local.gradient_noise import SketchNoise, second_betas
from sidcomp.local.shards import Shards, reshard
from sidcomp.local.vectors import (
    Part,
    Stray,
    broadcast,
    buckets,
    check,
    check_flag,
    check_saved,
    compare,
    cut,
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
from sidcomp.runtime.communicator import has_gloo
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.optimizers import Optimizers, chains
from sidcomp.runtime.plain_data import anything, count, positive, table
from sidcomp.state import State, check_state


class LocalSteps:
    """Averages the ranks' updates in place of their gradients, without DDP.

        steps = sidcomp.LocalSteps(module, optimizer, sidcomp.State("topk", density=0.01), every=8)
        for batch in batches:
            optimizer.zero_grad()
            loss(module(batch)).backward()
            steps.step()  # in place of optimizer.step()

    Every rank takes `every` steps of its own optimizer, whatever that is, from a common point a to a point
    x(m). Then the ranks exchange their updates a - x(m), compressed by the State with its error feedback, and
    all continue from a - mean(a - x(m)). With every=1 this compresses the update of an optimizer with
    momentum or Adam, where DDP's hook compresses the gradient. With the codec "marsit" it is Algorithm 2 of
    that paper (Wu et al. 2022), with `eta_s` as the global step size. The optimizer's own state stays local.

    module          any module but DDP, also one that fully_shard has sharded inside a node; rank 0's
                    parameters and buffers are copied to all ranks here, and rank 0's buffers again after
                    every exchange
    optimizer       of the module's parameters, or a list of optimizers, such as [muon, adamw]
    state           for the updates, with a named codec. Any memory is accepted: all ranks continue from the
                    same point, so what memory="none" does not keep is lost, but on all ranks alike. `follow`
                    has no meaning here: updates already contain the learning rate
    every           [1] steps between two exchanges, at least 1
    delay           [0] steps during which an exchange takes place in the background, at most `every`. Its
                    mean then moves the common point, and the parameters keep what their optimizer has done
                    since the exchange began: x(m) becomes the new point plus these steps
    parts           [1] into how many parts of about equal size the parameters are cut, at most `every`. Each
                    is exchanged once in `every` steps, one after the other: part p after s steps, where
                    s % every == p * every // parts. A delay is then at most every // parts, and one part
                    travels at a time. No group of the State may be in several parts
    host            [False] for parameters on a GPU. True: the common point, the update and the State's memory
                    are in the host's memory, which encodes, decodes and exchanges, over Gloo
    noise_correction
                    [False] True: lengthens the steps of optimizers with two betas, such as Adam, by as much
                    as the noise of a rank's own gradient shortens them, as in `LocalError` with
                    every > 1. It takes float32 parameters, and no host=True on a GPU. Of a parameter that
                    is sharded each shard has a factor of its own
    process_group   [None] the ranks to average over; None: the State's, else the default group. With FSDP2
                    inside a node: the ranks of all nodes that hold the same shard as this one

    It takes 8 bytes for each float32 parameter (the common point and the update), with a delay 4 more and
    with noise_correction 4 more, beside the State's memory. If an update is not finite on any rank, all ranks
    return to the common point.

    Raises ArgumentError, SetupError or UnsupportedError, which say what to change: if `every` or `delay` is
    out of range, if the ranks' parameters differ in name, shape or dtype, or if the optimizer lacks some. A
    step of the optimizer that `step` did not take raises a SetupError before it moves a parameter.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers,
        state: State,
        *,
        every: int = 1,
        delay: int = 0,
        parts: int = 1,
        host: bool = False,
        noise_correction: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise SetupError(
                f"{type(self).__name__} averages updates, DDP gradients: give it the module without DDP"
            )
        check_state(state)
        check(module, every, state, type(self).__name__)
        check_flag("host", host)
        check_flag("noise_correction", noise_correction)
        if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay <= every:
            raise ArgumentError(f"delay={delay!r}: give a number of steps from 0 to every={every}")
        given = named_group(state, process_group)
        links = chains(optimizer)
        self._given = [each[0] for each in links]
        self._optimizers = [each[-1] for each in links]  # those inside of wrappers
        reshard(module)
        whole = trained(module, self._optimizers)
        self._shards = Shards(whole, given, type(self).__name__)
        named = self._shards.local()
        least = self._shards.least
        what = "the smallest shard" if least else "the model"
        _check_parts(parts, every, delay, state, least or len(named), what)
        self.module, self.optimizer, self.state, self.every = module, optimizer, state, every
        self.delay = delay
        self.steps = 0  # taken by the optimizer
        cuts = [buckets(some) for some in cut(named, parts)]
        self._parts = [_Part(names, named, delay > 0, host) for some in cuts for names in some]
        # the indices in `_parts` of what is exchanged together, and the steps at which it is, modulo `every`
        self._together = [[n for n, at in enumerate(_owners(cuts)) if at == i] for i in range(parts)]
        self._at = [i * every // parts for i in range(parts)]
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._flying: list[int] = []  # of `_together`: their means have not been applied yet
        corrected = self._corrected(whole) if noise_correction else []
        self._arguments: dict[str, Any] = {"every": every, "delay": delay, "parts": parts, "host": host}
        self._arguments |= {"noise_correction": noise_correction, "parameters corrected": len(corrected)}
        self._noise: SketchNoise | None = None
        # of each part: the updates that are lengthened, and where their factors are
        self._updates: list[list[tuple[torch.Tensor, int]]] = [[] for _ in self._parts]
        self._stray = Stray(self, self._optimizers, type(self).__name__)
        self._start(named, process_group, corrected)

    def _measure_noise(self, corrected: list[tuple[str, torch.Tensor, float]]) -> None:
        """corrected: the parameters whose steps are lengthened: name, the optimizer's tensor, and decay."""
        names, parameters, decays = zip(*corrected, strict=True)
        self._noise = SketchNoise(parameters, decays, self.every, self._group)
        place = {name: i for i, name in enumerate(names)}
        for part, updates in zip(self._parts, self._updates, strict=True):
            pairs = zip(part.names, part.update_views, strict=True)
            updates += [(update, place[name]) for name, update in pairs if name in place]

    def _corrected(self, whole: dict[str, torch.nn.Parameter]) -> list[tuple[str, torch.Tensor, float]]:
        """What `_measure_noise` needs. whole: the optimizer's tensors. Raises ArgumentError or
        UnsupportedError."""
        if any(part.update.device != part.parameters[0].device for part in self._parts):
            raise UnsupportedError(
                "noise_correction=True with host=True needs parameters on a CPU: leave one out"
            )
        if other := [p for part in self._parts for p in part.parameters if p.dtype is not torch.float32]:
            raise UnsupportedError(
                f"noise_correction=True takes float32 parameters, and one is {str(other[0].dtype)[6:]}: "
                "leave it out, or use autocast for the forward pass"
            )
        decays = second_betas(self._optimizers)
        if not decays:
            raise ArgumentError(
                "noise_correction=True lengthens the steps of optimizers with two betas, such as Adam, and "
                f"{type(self._optimizers[0]).__name__} has none: leave it out"
            )
        names = [name for part in self._parts for name in part.names]
        return [(name, p, decays[id(p)]) for name in names if id(p := whole[name]) in decays]

    def _start(
        self,
        named: dict[str, torch.Tensor],
        process_group: dist.ProcessGroup | None,
        corrected: list[tuple[str, torch.Tensor, float]],
    ) -> None:
        """Gives all ranks the same parameters, and makes what their exchanges need. corrected: as in
        `_measure_noise`."""
        state, what = self.state, type(self).__name__
        self._group = group_of(state, process_group)
        moved = [part for part in self._parts if part.update.device != part.parameters[0].device]
        if moved and not has_gloo(self._group):
            raise SetupError(
                "host=True exchanges over Gloo, which the process group has not: call "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )
        compare(named, self.module, self._group, what, self._arguments, self._shards.part)
        broadcast([*named.values(), *self.module.buffers()], self._group)
        for part in self._parts:
            part.mark()
        if corrected and self._world > 1:
            self._measure_noise(corrected)
        beside = self._noise.nbytes if self._noise is not None else 0
        device = self._parts[0].update.device
        serve(state, self.module, named, self._group, device, what, self._shards.part, beside)
        if len(self._at) > 1:
            self._form(trial=True)  # so that groups over several parts are refused here

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """Calls `optimizer.step(closure)`, or with a GradScaler `scaler.step(optimizer)`, and averages if it
        is time to. Each rank's scale is its own. Every rank calls it equally often. Of several optimizers it
        calls each one's, in order; these, and a GradScaler, take no closure. Returns what the last one
        returns; raises the errors of the exchange."""
        refuse_converted(self._parts, type(self).__name__, every=not self.steps)
        if self._noise is not None:
            self._noise.mark()
        self._stray.expected = True
        try:
            loss = take_step(self._given, closure, scaler)
        finally:
            self._stray.expected = False
        self.steps += 1
        if self._noise is not None:
            self._noise.lengthen()
            self._noise.note()
        self._exchange()
        return loss

    def _exchange(self) -> None:
        """Begins and ends the exchanges that are due after this step."""
        due = [i for i, at in enumerate(self._at) if self.steps % self.every == at]
        if self._flying:
            since = (self.steps - self._at[self._flying[0]]) % self.every
            if due or since == self.delay:
                self._land()
        if due:
            self._launch(due)
            if not self.delay:
                self._land()

    @torch.no_grad()
    def average(self) -> None:
        """Averages now, for example before the last evaluation, and waits for it. Every rank calls it at the
        same point."""
        self._land()
        self._launch(list(range(len(self._at))))
        self._land()

    @contextmanager
    def common_point(self) -> Iterator[torch.nn.Module]:
        """Puts the common point, which has the same bits on all ranks, into the module, and this rank's own
        parameters back afterwards:

            with outer.common_point() as module:
                evaluate(module)
                torch.save(module.state_dict(), "model.pt")

        Nothing is exchanged, and training continues afterwards as if you had not called it. The common point
        contains neither the steps since the last exchange nor an exchange in flight. Do not train inside."""
        self._find()
        own = [[p.detach().clone() for p in part.parameters] for part in self._parts]
        with torch.no_grad():
            for part in self._parts:
                part.restore()
        try:
            yield self.module
        finally:
            self._find()
            with torch.no_grad():
                for part, kept in zip(self._parts, own, strict=True):
                    torch._foreach_copy_(part.parameters, kept)

    def _find(self) -> None:
        """Finds the shards of FSDP where they are now. Call it before they are read or changed."""
        if self._shards.find(self.module, self._parts) and self._noise is not None:
            self._noise.find()

    def _of(self, together: list[int]) -> list[tuple[int, "_Part"]]:
        """What is exchanged then: indices and parts."""
        return [(n, self._parts[n]) for i in together for n in self._together[i]]

    def _form(self, trial: bool = False) -> None:
        assert self.state._door is not None
        engine = open_engine(self.state)
        buckets = [part.bucket() for part in self._parts]
        at = whereabouts(self.steps, [part.point for part in self._parts], self._noise)
        form = engine.try_out if trial else engine.form
        form(self.state._door.model, buckets, refuse=self._refuse, at=at)

    def _refuse(self, layout: Layout) -> None:
        """Raises SetupError if a group is in several parts, which travel at different times."""
        owner = {n: i for i, some in enumerate(self._together) for n in some}
        for g in layout.groups:
            if len({owner[bucket] for bucket, _, _ in g.runs}) > 1:
                raise SetupError(
                    f"parts={len(self._at)}: groups={self.state.settings.groups!r} make a group of parameters"
                    ' of several parts: give the State groups="bucket" or "layer"'
                )

    @torch.no_grad()
    def _launch(self, together: list[int]) -> None:
        engine = open_engine(self.state)
        which = self._of(together)
        self._find()
        # First, because the ranks compare here how far they are, on which the size of what else they exchange
        # depends; and on all ranks of the shards, whichever has loaded a checkpoint.
        with self._shards.peers.together():
            if engine.layout is None:
                self._form()
        for _, part in which:
            part.measure()
            part.leave()
        beside = self._correct(together)
        if self._shards.part and not self._shards.peers.all_agree(finite([part.update for _, part in which])):
            for _, part in which:  # so that the ranks of all shards discard it, not only those that have it
                part.update.fill_(float("nan"))
        engine.count_reduced(beside)
        with self._shards.peers.together(self._fail):
            self._futures = [engine.ready(n, part.update) for n, part in which]
            if len(which) < len(self._parts):
                left = engine.end_early()
                assert not left  # a group never spans two parts
        self._flying = together

    def _correct(self, together: list[int]) -> int:
        """Lengthens what is exchanged, and starts to exchange the sketches. Returns the bytes of these."""
        if self._noise is None:
            return 0
        beside = self._noise.sample() if 0 in together else 0
        pairs = [pair for i in together for n in self._together[i] for pair in self._updates[n]]
        if pairs:
            factors = self._noise.factors
            torch._foreach_mul_([update for update, _ in pairs], [factors[i] for _, i in pairs])
        return beside

    @torch.no_grad()
    def _land(self) -> None:
        """Waits for the exchange in flight, and applies its mean."""
        if not self._flying:
            return
        futures, self._futures = self._futures, []
        together, self._flying = self._flying, []
        with self._shards.peers.together(self._fail):
            for future in futures:
                future.wait()
        if self.delay:  # else nothing has happened since the launch
            self._find()
        if self._noise is not None and 0 in together:
            self._noise.land()
        self._apply(together)
        if 0 in together:
            broadcast(list(self.module.buffers()), self._group)

    def _apply(self, together: list[int]) -> None:
        """Applies the means that have arrived."""
        which = [part for _, part in self._of(together)]
        if self._shards.peers.all_agree(finite([part.update for part in which])):
            for part in which:
                self._outer(part)
                part.move()
        else:  # the engine discards this step: its residuals are those of before
            for part in self._parts:
                part.restore()

    def _fail(self, error: Exception) -> None:
        self._find()
        self.state._engine.abandon(error)
        for part in self._parts:
            part.restore()

    def _outer(self, part: "_Part") -> None:
        """Turns the mean update, which the part holds, into that of the common point."""

    @property
    def _world(self) -> int:
        return dist.get_world_size(self._group)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs beside the module's, the optimizer's and the State's own
        dictionaries: the number of steps and, by parameter name, the common point between two exchanges and,
        while an exchange is in flight, its mean and where the parameters were when it began. Waits for that
        exchange. Every rank saves all four for itself."""
        for future in self._futures:
            future.wait()
        away = self.steps % self.every != 0 or bool(self._flying) or len(self._at) > 1
        points = {name: view.clone() for part in self._parts for name, view in part.points()} if away else {}
        flying = {
            kind: {n: v.clone() for _, p in self._of(self._flying) for n, v in p.named(getattr(p, kind))}
            for kind in _IN_FLIGHT
            if self._flying
        }
        cut: dict[str, Any] = {"parts": len(self._at)} if len(self._at) > 1 else {}
        numbers: dict[str, Any] = {"steps": self.steps, "every": self.every, "world": self._world}
        if self._noise is not None:
            numbers["noise"] = self._noise.state_dict()
        if self._shards.part:
            cut["part"] = self._shards.part
        return {**numbers, **cut, "points": points, "in flight": flying}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the module's and the optimizer's. With the number of ranks
        that saved it, the run continues with the same bits. With another number any rank may load any rank's
        dictionary: the State distributes what had not been sent, an exchange in flight ends, all ranks
        continue from the common point, and what the optimizers did after the last exchange is lost. Raises
        CheckpointError."""
        together = self._check(saved)
        self._land()
        self._restore(saved, together)

    def _check(self, saved: dict[str, Any]) -> list[int]:
        """Raises CheckpointError before anything has changed. Returns which exchange is in flight in it, as
        `_flying` holds it."""
        what = type(self).__name__
        check_saved(saved, what, steps=count, every=positive, world=positive, points=table(anything))
        check_saved(saved, what, **{"in flight": table(table(anything))})
        positive(saved.get("parts", 1), f'{what}: "parts"')
        self._shards.check_saved(saved, what)
        steps, points, flying = saved["steps"], saved["points"], saved["in flight"]
        if (steps % self.every or (steps and len(self._at) > 1)) and not points:
            raise CheckpointError(
                f"LocalSteps: the checkpoint was saved after {steps} steps with every={saved['every']}, "
                f"and has no common point, which every={self.every} needs there: resume with the same `every`"
            )
        together = self._in_flight(saved) if flying else []
        in_flight = {name for _, part in self._of(together) for name in part.names}
        for name, view in self._points().items():
            needed = [flying[kind] for kind in _IN_FLIGHT] if name in in_flight else []
            for values in [*([points] if points else []), *needed]:
                if found := lacks(values, name, view):
                    raise CheckpointError(
                        f"LocalSteps: no common point of the shape of parameter {name!r}, "
                        f"{tuple(view.shape)}, but {found}: the dictionary is damaged, or of another model"
                    )
        if self._noise is not None:
            self._noise.check(saved.get("noise"))
        return together

    def _in_flight(self, saved: dict[str, Any]) -> list[int]:
        """Returns what had not arrived when `saved` was saved. Raises CheckpointError."""
        flying = saved["in flight"]
        if not self.delay:
            raise CheckpointError(
                "LocalSteps: the checkpoint was saved while an exchange was in flight, which needs a delay: "
                "resume with the same `delay`"
            )
        if saved.get("parts", 1) != len(self._at):
            raise CheckpointError(
                f"LocalSteps: the checkpoint was saved with parts={saved.get('parts', 1)}, while one of them "
                "was in flight: resume with the same `parts`"
            )
        names = flying.get(_IN_FLIGHT[0], {})
        every = range(len(self._at))
        together = [i for i in every if any(n in names for _, part in self._of([i]) for n in part.names)]
        if not together or any(kind not in flying for kind in _IN_FLIGHT):
            raise CheckpointError(
                f'LocalSteps: "in flight" is {reprlib.repr(flying)}, and needs the parameters by name under '
                f"{' and '.join(map(repr, _IN_FLIGHT))}: the dictionary is damaged, or of another model"
            )
        return together

    def _points(self) -> dict[str, torch.Tensor]:
        return dict(pair for part in self._parts for pair in part.points())

    def _restore(self, saved: dict[str, Any], together: list[int]) -> None:
        """Takes over what `_check` has found sound."""
        if self._noise is not None:
            self._noise.load_state_dict(saved["noise"])
        self._find()
        self.steps, self._flying = saved["steps"], together
        for part in self._parts:
            part.mark()
        if points := saved["points"]:
            for name, view in self._points().items():
                view.copy_(points[name])
        for kind in _IN_FLIGHT if together else ():
            for _, part in self._of(together):
                for name, view in part.named(getattr(part, kind)):
                    view.copy_(saved["in flight"][kind][name])
        self._take(saved)
        if saved["world"] != self._world:
            if self._noise is not None:
                self._noise.forget()
            if together:
                self._flying = []
                self._apply(together)
            for part in self._parts:
                part.restore()

    def _take(self, saved: dict[str, Any]) -> None:
        """Takes what a subclass has saved, which it has checked."""


def _check_parts(parts: object, every: int, delay: int, state: State, tensors: int, what: str) -> None:
    """tensors: parameters of `what`, the model or its smallest shard. Raises ArgumentError or SetupError."""
    if not isinstance(parts, int) or isinstance(parts, bool) or not 1 <= parts <= min(every, tensors):
        raise ArgumentError(
            f"parts={parts!r}: give a number from 1 to {min(every, tensors)}: every={every}, and "
            f"{what} has {tensors} parameters"
        )
    if parts > 1 and delay > every // parts:
        raise ArgumentError(
            f"delay={delay}: with parts={parts} and every={every} a part is exchanged every {every // parts} "
            f"steps, one at a time: give a delay of at most {every // parts}"
        )
    if parts > 1 and state.settings.full_every:
        raise SetupError(
            f"parts={parts}: full_every counts exchanges, which are then of single parts: leave one of them "
            "out"
        )


def _owners(cuts: list[list[list[str]]]) -> list[int]:
    """For each bucket of each cut the index of the cut."""
    return [i for i, some in enumerate(cuts) for _ in some]


_IN_FLIGHT = "update", "left"  # vectors of a part that an exchange in flight needs


class _Part(Part):
    """point: the common point. update: what the parameters have moved since. left: where they were when the
    last exchange began, if they continue during it."""

    def __init__(self, names: list[str], named: dict[str, torch.Tensor], delayed: bool, host: bool) -> None:
        super().__init__(names, named, host)
        self.point = self.vector()
        self._point = self.views(self.point)
        self.left = self.vector() if delayed else self.point
        self._left = self.views(self.left) if delayed else None

    def named(self, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """A vector over the parameters, by their names."""
        return list(zip(self.names, self.views(x), strict=True))

    def points(self) -> list[tuple[str, torch.Tensor]]:
        return self.named(self.point)

    @torch.no_grad()
    def mark(self) -> None:
        """Takes the present parameters as the common point."""
        torch._foreach_copy_(self._point, self.parameters)

    def measure(self) -> None:
        """Takes what the parameters have moved as the update."""
        self.measure_from(self.point)

    def measure_departure(self) -> None:
        """Takes what the parameters had moved when the exchange began as the update."""
        if self._left is None:
            self.measure()
        else:
            torch.sub(self.point, self.left, out=self.update)

    @torch.no_grad()
    def leave(self) -> None:
        """An exchange begins, during which the parameters may move on."""
        if self._left is not None:
            torch._foreach_copy_(self._left, self.parameters)

    def move(self) -> None:
        """Moves the common point, and the parameters with it, which keep what they moved since `leave`."""
        self.point.sub_(self.update)
        if self._left is None:
            self.restore()
            return
        if self.host:  # the parameters may be on another device
            torch._foreach_copy_(self.update_views, self.parameters)
            self.update.sub_(self.left).add_(self.point)
            torch._foreach_copy_(self.parameters, self.update_views)
            return
        torch._foreach_sub_(self.parameters, self._left)
        torch._foreach_add_(self.parameters, self._point)

    def restore(self) -> None:
        torch._foreach_copy_(self.parameters, self._point)
