"""Updates: the optimizers step on each rank's own gradients, and the ranks exchange what they did."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import UnsupportedError
from sidcomp.local import arguments, averaging, saved_updates
from sidcomp.local import error as errors
from sidcomp.local.alarms import RUNS, Discards, Loaded, OwnGradients, Trained, apart
from sidcomp.local.buffers import Buffers
from sidcomp.local.choice import Choosing
from sidcomp.local.correction import Correction
from sidcomp.local.elastic import Meetings
from sidcomp.local.gradient_noise import Noise, SketchNoise
from sidcomp.local.growth import grow
from sidcomp.local.outer import Make, make_outer
from sidcomp.local.schedule import Schedule
from sidcomp.local.shards import Shards, own_part, reshard
from sidcomp.local.shown import Shown
from sidcomp.local.stepping import Stepping
from sidcomp.local.vectors import (
    CALL,
    Vectors,
    buckets,
    check_devices,
    compare,
    cut,
    finite,
    group_of,
    named_group,
    open_engine,
    refuse_converted,
    serve,
    share,
    trained,
    whereabouts,
)
from sidcomp.runtime.engine import Model
from sidcomp.runtime.optimizers import Optimizers, chains
from sidcomp.state import State


class Updates:
    """Exchanges what the optimizers did, in place of gradients.

    All ranks have the same point. On rank r the optimizers step with the rank's own gradients, so that its
    parameters move. Once in `every` steps each rank measures what it has done, base - parameters, and the
    ranks exchange these updates, compressed. The mean moves the point. What a rank has done and not sent is
    its error E(r). From the new point each rank continues:

        error="parameters"  from point - E(r), so that its own parameters contain its own steps at once. This
                            is error reset (CSER, Xie et al. 2020, Algorithm 2), with a residual as memory
        error="memory"      from the point. The State's memory adds E(r) to the next update. With `outer` and
                            codec none this is DiLoCo (Douillard et al. 2023), with topk and beta < 1
                            SparseLoCo (Sarfi et al. 2025), with codec marsit that paper's Algorithm 2 (Wu et
                            al. 2022)

    module          any module but DDP, also one that fully_shard has sharded inside a node. Rank 0's
                    parameters and buffers are copied to all ranks here, unless all have the same bytes, and
                    after each exchange the buffers that differ
    optimizers      of the module's parameters: one, or a list, such as [muon, adamw]
    state           for the updates. error="parameters" takes float32 parameters and a memory that keeps what
                    was not sent. error="memory" takes any memory, and a named codec with fixed groups
    every           [1] steps between two exchanges, at least 1
    delay           [0] steps during which an exchange takes place in the background, 0 to every. Its mean
                    then moves the point, and the parameters keep what their optimizers did meanwhile
    parts           [1] into how many parts of about equal size the parameters are cut, at most `every`. Each
                    is exchanged once in `every` steps, one after the other, as in Streaming DiLoCo (Douillard
                    et al. 2025): part p after s steps, where s % every == p * every // parts. A delay is then
                    at most every // parts
    outer           [None] takes a list of tensors and returns an optimizer of them, which moves the point
                    with the mean as its gradient. None: the point moves by the mean
    error           ["parameters"] or "memory". parts, outer, host and deadline need "memory"
    noise_correction
                    [None] True: lengthens each rank's own steps, parameter by parameter, by as much as the
                    noise of its own gradient shortens them (sidcomp.local.gradient_noise); with
                    error="memory" those of optimizers with two betas, such as Adam. "rows": these, row by
                    row, in the exchange. None: with error="parameters" the parameters of optimizers with two
                    betas, with error="memory" none
    host, stale     as in `sidcomp.Options`; deadline, process_group, scaler: as in `sidcomp.compress`
    agree           what else must be the same on all ranks, by name

    It takes 12 bytes for each float32 parameter (update, point, base), 8 with error="memory" and no delay;
    sketches for the noise correction take 4, an outer momentum 4. The State's memory comes on top.

    If what a rank did is not finite, the exchange is discarded on all ranks, and with it what they did since
    the one before; with a deadline, on this rank alone. Raises ArgumentError, SetupError or UnsupportedError,
    also if the ranks' arguments, or their parameters' names, shapes or dtypes, differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Optimizers,
        state: State,
        *,
        every: int = 1,
        delay: int = 0,
        parts: int = 1,
        outer: Make | None = None,
        error: str = "parameters",
        host: bool = False,
        noise_correction: bool | str | None = None,
        deadline: float | None = None,
        stale: int = 10,
        process_group: dist.ProcessGroup | None = None,
        scaler: Any = None,
        agree: Mapping[str, object] | None = None,
    ) -> None:
        arguments.check(module, state, every, delay, error, host, noise_correction, stale)
        if error == "parameters":
            others = {"parts": (parts, 1), "outer": (outer, None), "host": (host, False)}
            arguments.check_error_in_parameters(state, delay, {**others, "deadline": (deadline, None)})
        else:
            arguments.check_error_in_memory(state, module, parts, deadline, noise_correction, process_group)
        links = chains(optimizers)
        self._optimizers = [each[-1] for each in links]  # those inside of wrappers
        arguments.check_optimizers(links, noise_correction, error)
        self.module, self.state, self.error, self.buffers = module, state, error, Buffers(module)
        self.every, self.delay, self.parts = every, delay, parts
        self._given, self._host, self._make_outer = named_group(state, process_group), host, outer
        self._noise_correction = noise_correction
        self.steps = 0  # taken by the optimizers
        named = self.build(())
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self.flying: list[int] = []  # the parts whose means have not been applied yet
        self._discard = False  # what is in flight does not count
        self._left_out = False  # this rank has added nothing to it, because its update was not finite
        self._met = False  # the first step has been looked at
        self.observer: Choosing | None = None
        self.meetings: Meetings | None = None
        if deadline is None:
            same = {"every": every, "delay": delay, "parts": parts, "outer": self.outer.label, "error": error}
            same |= {"host": host, "noise_correction": noise_correction, "corrected": len(self._correction)}
            self._start(named, group_of(state, process_group), {**same, **(agree or {})})
        else:
            arguments.check_travels(self.outer, deadline)
            self._meet_others(named, deadline, stale)
        self._stepping = Stepping(self, links, scaler)
        self._loaded = Loaded(self.module, self._parameters, lambda: self.trained.check())
        RUNS.add(self)

    def build(self, known: Container[str]) -> dict[str, torch.Tensor]:
        """Makes the vectors over the parameters that the optimizers train, and over the known ones, and what
        belongs to them. Returns this rank's parts of the parameters."""
        reshard(self.module)
        whole = trained(self.module, self._optimizers, known)
        self.shards = Shards(whole, self._given)
        named = self.shards.local()
        in_memory = self.error == "memory"
        if not in_memory:
            arguments.check_float32(named, 'error="parameters" keeps errors in the parameters')
        least = self.shards.least
        what = "the smallest shard" if least else "the model"
        arguments.check_parts(self.parts, self.every, self.delay, self.state, least or len(named), what)
        cuts = [buckets(some) for some in cut(named, self.parts)]
        own_base = not in_memory or self.delay > 0
        self.vectors = [Vectors(names, named, own_base, self._host) for some in cuts for names in some]
        self._schedule = Schedule([len(some) for some in cuts], self.every)
        self.outer = make_outer(self._make_outer, self.vectors)
        how = self._noise_correction
        self._correction = Correction(self.vectors, whole, self._optimizers, how, in_memory)
        self.names = {id(p): name for name, p in whole.items()}
        self.trained = Trained(self.module, whole, self._optimizers, moves=bool(self.shards.part))
        self._shown = Shown(self.vectors, self.find)
        return named

    def _start(self, named: dict[str, torch.Tensor], group: dist.ProcessGroup, same: dict[str, Any]) -> None:
        """Gives all ranks the same parameters, and makes what their exchanges need. same: the arguments,
        which must be the same on all ranks."""
        self._group = group
        check_devices(self.vectors, group)
        compare(named, self.module, group, same, self.shards.part)
        share([*map(own_part, self.module.parameters()), *self.buffers.present().values()], group)
        for v in self.vectors:
            v.start()
        optimized = [p for one in self._optimizers for of in one.param_groups for p in of["params"]]
        self._own = OwnGradients(optimized, group)
        self._discards = Discards(self._optimizers, group)
        self.enter(named)

    def enter(self, named: dict[str, torch.Tensor]) -> None:
        """Lets the State serve these parameters."""
        self._named = named
        self._correction.start(self.every, self._group)
        self._model = self._serve(self.state)
        if self.parts > 1:
            self.form(trial=True)  # so that groups over several parts are refused here

    def _serve(self, state: State) -> Model:
        device, beside = self.vectors[0].update.device, self.noise.nbytes if self.noise else 0
        return serve(state, self.module, self._named, self._group, device, self.shards.part, beside)

    def _meet_others(self, named: dict[str, torch.Tensor], deadline: float, stale: int) -> None:
        """Goes to the first round of the run, or to the next one."""
        device = self.vectors[0].update.device
        self._model = serve(self.state, self.module, named, None, device)
        self.meetings = Meetings(
            self.state, self.module, self.buffers, self._model, named, self.vectors, self.outer, self.every,
            self.delay, deadline, stale, [self.every, self.outer.label],
        )  # fmt: skip
        self._discards = Discards(self._optimizers, self.meetings.attendance.rounds.rank)
        for v in self.vectors:
            v.start()
        self.meetings.join()
        self.land()
        self.meetings.behind = False

    @property
    def noise(self) -> Noise | None:
        return self._correction.noise

    @property
    def world(self) -> int:
        place = self.state.engine.place
        return place[1] if place is not None else dist.get_world_size(self._group)

    # ---- training

    @property
    def idle(self) -> bool:
        return self.state.engine.closed or bool(self._shown)

    def before(self) -> None:
        """Called before the optimizers step. Raises SetupError before a parameter has moved."""
        self.state.check_open()
        self._shown.refuse("the optimizer would step")
        if self._loaded.replaced():
            self.restart()
        if self.trained.more():
            grow(self)
        if not self._met and not self.steps:  # else its own checkpoint was loaded
            self.state.meet(self._optimizers[0], f"the state_dict() of {CALL}() and ")
        self._met = True
        refuse_converted(self.vectors, every=not self.steps)
        if isinstance(self.noise, SketchNoise):
            self.noise.mark()

    def after(self) -> None:
        """Called after each of the optimizers has stepped once, or a GradScaler has skipped the step, on
        every rank equally often. Exchanges if it is time to, and raises the errors of the exchange."""
        self.state.check_open()
        self.steps += 1
        if isinstance(self.noise, SketchNoise):
            self.noise.lengthen()
            self.noise.note()
        if self.observer is not None:
            self.observer.computed()
        self._exchange_if_due()
        if self.observer is not None:
            self.observer.ended(self.steps % self.every == 0)

    def _exchange_if_due(self) -> None:
        if self.meetings is not None:
            land, due = self.meetings.count()
            if land:
                self.land()
            if due or self.meetings.missed():
                self._launch([0])
        else:
            together = self._schedule.due(self.steps)
            if self.flying and (together or self._schedule.since(self.flying[0], self.steps) == self.delay):
                self.land()
            if together:
                self._launch(together)
        if not self.delay:
            self.land()

    @property
    def elements(self) -> int:
        """The number of parameters, of this rank's shard if there are shards."""
        return sum(v.update.numel() for v in self.vectors)

    def wait(self, every: int) -> None:
        """Exchanges once in so many steps from now on, between two exchanges. There must be one part."""
        if every != self.every:
            self.every, self._schedule = every, Schedule([len(self.vectors)], every)
            self._correction.start(every, self._group)

    @torch.no_grad()
    def use(self, state: State, saved: Any = None) -> None:
        """Goes on with another State; the one before must keep nothing. saved: what it loads first."""
        self.land()
        model = self._serve(state)
        if saved is not None:
            state.load_state_dict(saved)
        former, self.state, self._model = self.state, state, model
        former._ending.silent = True  # nothing ends here
        former.close()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges all parts now. Every rank calls it at the same point."""
        open_engine(self.state)
        self.land()
        self._launch(self._schedule.all)
        self.land() if not self.delay else None

    def find(self) -> None:
        """Finds the shards of FSDP where they are now. Call it before they are read or changed."""
        own = self.shards.find(self.module)
        for v in self.vectors if own else ():
            v.take(own)
        if self.shards.part and isinstance(self.noise, SketchNoise):
            self.noise.find()

    def of(self, together: Sequence[int]) -> list[Vectors]:
        """Returns the vectors that are exchanged together."""
        return [self.vectors[n] for n in self._schedule.indices(together)]

    def form(self, trial: bool = False, again: bool = False) -> None:
        """Makes the groups, if there are none. trial: only to see whether they fit. again: also if there
        are."""
        engine = open_engine(self.state)
        if engine.layout is not None and not again:
            return
        made = [v.bucket() for v in self.vectors]
        at = whereabouts(self.steps, [v.point for v in self.vectors], self.noise)
        form = engine.try_out if trial else engine.form
        form(self._model, made, refuse=self._schedule.refuse, at=at)

    @torch.no_grad()
    def _launch(self, together: list[int]) -> None:
        engine = open_engine(self.state)
        if self.meetings is not None:
            self.meetings.begin()
            return
        self.find()
        # First, because the ranks compare here how far they are, on which the size of what else they exchange
        # depends; and on all ranks of the shards, whichever has loaded a checkpoint or has another plan.
        which = self._schedule.indices(together)
        with self.shards.peers.together():
            engine.meet_others(which)  # `form` does not know which part the other ranks exchange
            self.form()
        updates = [self.vectors[n].update for n in which]
        for n in which:
            self.vectors[n].measure()
            self.vectors[n].mark() if self.delay else None
        self._own.note(updates)
        beside = self._correction.apply(which, samples=0 in together)
        if self.shards.part and not self.shards.peers.all_agree(finite(updates)):
            for update in updates:  # so that the ranks of all shards discard it
                update.fill_(float("nan"))
        engine.count_reduced(beside)
        with self.shards.peers.together(self._fail):
            self._futures = [engine.ready(n, self.vectors[n].update) for n in which]
            if len(which) < len(self.vectors):
                left = engine.end_early()
                assert not left  # a group never spans two parts
        self.flying, self._discard = together, False

    def _fail(self, error: Exception) -> None:
        self.find()
        errors.carry(self.state.engine, self.vectors, error, self.world, self.error == "parameters")

    @torch.no_grad()
    def land(self, plain: bool = False) -> None:
        """Waits for the exchange in flight, and applies its means. plain: without the outer optimizer."""
        if self.meetings is not None:
            self._arrive()
            self.meetings.gone = False
        if not self.flying:
            return
        futures, self._futures = self._futures, []
        together, self.flying = self.flying, []
        if self.meetings is not None:
            self._apply(together, keep=self.delay > 0)
            self.meetings.take_buffers()
            return
        with self.shards.peers.together(self._fail):
            for future in futures:
                future.wait()
            self._own.compare()
        if self.delay:  # else nothing has happened since the launch
            self.find()
        if self.error == "parameters":
            self.state.engine.quiet()  # discards the step, if what some rank sent was not finite
        if isinstance(self.noise, SketchNoise) and 0 in together:  # it has arrived beside the means
            self.noise.land()
        self._apply(together, self.delay > 0, plain)
        if 0 in together:
            self.buffers.share(self.state.engine, self._group)

    def _arrive(self) -> None:
        """Waits for the round in progress, whose means are then in flight."""
        if self.meetings is not None and not self.flying and self.meetings.arrive():
            self.flying, self._discard, self._left_out = [0], False, not self.meetings.attendance.finite

    def counts(self, together: Sequence[int]) -> bool:
        """Whether what is in flight, and has arrived, counts on this rank."""
        engine = self.state.engine
        if self.error == "parameters" and not any(g.direct for g in engine.groups):
            return not self._discard and engine.counts()
        return not self._discard and finite([v.update for v in self.of(together)])

    def _apply(self, together: list[int], keep: bool, plain: bool = False) -> None:
        """Applies the means that have arrived. keep: what the optimizers did since the launch stays."""
        fine = self.counts(together)
        if self.error == "memory":
            fine = self.shards.peers.all_agree(fine)
        left_out, self._left_out = self._left_out, False
        mine = left_out or (not fine and not finite(self._parameters()))
        if fine:
            (self.outer.add if plain else self.outer.move)(self._schedule.indices(together))
        # Else all ranks lose what they did: also a part that was not exchanged may not be finite.
        self._continue(self.of(together) if fine else self.vectors, keep and fine and not left_out)
        if fine and not left_out:
            self._discards.passed()
        else:
            self._discards.found(mine, self.vectors[0].parameters[0].device, self.state.engine.speaker)

    def _continue(self, which: Sequence[Vectors], keep: bool) -> None:
        """Puts the parameters where they continue from, and keeps what they moved since the launch."""
        for v in which if keep else ():
            v.measure(v.left)
        if self.error == "memory":
            for v in which:
                if v.apart:
                    v.base.copy_(v.point)
        else:
            errors.leave(self.state.engine, self.vectors)
        for v in which:
            v.resume(keep)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for v in self.vectors for p in v.parameters]

    # ---- the point

    @contextmanager
    def common(self) -> Iterator[torch.nn.Module]:
        """Puts the point, which has the same bits on all ranks, into the module, and this rank's own
        parameters back afterwards. Nothing is exchanged, and training continues afterwards as if you had not
        called it. The point contains neither the steps since the last exchange nor an exchange in flight. Do
        not train inside: the step is refused."""
        if self._shown:
            yield self.module
            return
        if self._loaded.replaced():
            self.restart()
        self._shown.show()
        try:
            yield self.module
        finally:
            self._shown.hide()
            self._loaded.forget()  # what was loaded inside is gone

    @torch.no_grad()
    def average(self) -> bool:
        """Averages what all ranks have done, uncompressed, so that no error is left and all ranks have the
        same parameters, those of the point. Call it at the end of training, or before the number of ranks
        changes, on every rank at the same point. The mean itself moves the point, and `outer` does not step.
        A rank whose parameters are not finite gives what it had not sent before.

        With error="memory" and a memory that holds something else than what was not sent (such as "dgc",
        "momentum" or marsit's), this is one more compressed exchange; with a deadline, too, with the ranks
        that come, and by `outer`. Nothing is lost, but what was not sent stays in the memory. Returns False
        if all rounds took place without this rank."""
        open_engine(self.state)
        self.trained.check()
        self._shown.refuse("average() was called")
        if self._loaded.replaced():
            self.restart()
        self.land()
        if self.meetings is not None:
            return self.meetings.average(self.land)
        if self.noise is not None:
            self.noise.land()
        self.find()
        with self.shards.peers.together():
            self.state.engine.meet_others(self._schedule.coming(self.steps))
            self.form()  # if a checkpoint was loaded since the last exchange
        with self.shards.peers.together(self._fail):
            averaging.agree(self)
        if not errors.alone(self.state.settings):
            self._launch(self._schedule.all)
            self.land(plain=True)
            return True
        if not self.shards.peers.all_agree(finite([p for v in self.vectors for p in v.parameters])):
            for v in self.vectors:
                v.resume(keep=False)
        errors.average(self.state.engine, self.vectors, self._group, in_parameters=self.error == "parameters")
        self.outer.add(range(len(self.vectors)))
        for v in self.vectors:
            v.base.copy_(v.point)
            v.resume(keep=False)
        self.buffers.share(self.state.engine, self._group)
        return True

    @torch.no_grad()
    def restart(self) -> None:
        """Takes the parameters as they are now as the point, and forgets what has not been sent. The program
        calls it on every rank after it has set parameters itself, alike on all ranks; after
        `module.load_state_dict` this happens by itself. In the next exchange the ranks compare their
        points, and raise a RankError if they differ, or if some rank has not restarted."""
        if self.meetings is not None:
            raise UnsupportedError(
                "restart() and load_state_dict() of the module: with a deadline a rank that comes back takes "
                "the point of the others; start all ranks anew"
            )
        if self.state.engine.closed:
            return
        self._shown.refuse("restart() was called")
        self.find()
        if self.flying:  # the other ranks land it, too, and compare
            own = [p.clone() for p in self._parameters()]
            self.land()
            torch._foreach_copy_(self._parameters(), own)
        self.state.engine.restart()
        self.outer.reset()
        for v in self.vectors:
            v.start()

    @property
    def discarded(self) -> int:
        """As in `run.stats()`."""
        return self._discards.number

    @torch.no_grad()
    def apart(self) -> float:
        """How far this rank's parameters are from the point, relative to it: |p - point| / |point|."""
        self.find()
        return apart(self._parameters(), [x for v in self.vectors for x in v.named(v.rounded).values()])

    def close(self) -> None:
        """Exchanges nothing from now on. The parameters stay as they are."""
        RUNS.discard(self)
        self._stepping.close()
        self._loaded.close()

    # ---- checkpoints

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides the dictionaries of the optimizers and the State: numbers
        of steps and, by parameter name, the point, the base where it is not the point, this rank's parameters
        where they are not the base, and the means of an exchange in flight, for which it waits. Call it
        between two steps. Every rank saves its own dictionaries. They do not contain the module's buffers:
        save those as well."""
        self._arrive()
        for future in self._futures:
            future.wait()
        self.find()
        self.state.engine.quiet()
        with self._shown.hidden():
            return saved_updates.save(self)

    def check(self, saved: Any, step: int) -> list[int]:
        """Raises an error if `load_state_dict` cannot load it behind a State's dictionary of this step, and
        returns what is in flight in it, as `flying` holds it."""
        self._shown.refuse("load_state_dict() was called")
        return saved_updates.check(self, saved, step)

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after those of the optimizers and the State, and puts the
        parameters into the module. Every rank calls it at the same point. With the number of ranks that saved
        it, the run continues with the same bits. With another number any rank may load any rank's dictionary:
        the State distributes the errors, an exchange in flight ends, and what the optimizers did after the
        last exchange is lost. With a deadline, if this rank has taken part in a round since, only the number
        of steps counts, and the State's memory is emptied. Raises CheckpointError, and then nothing has
        changed."""
        together = self.check(saved, self.state.engine.step)
        self._loaded.forget()
        self.land()
        self.find()
        if self.meetings is not None and self.meetings.is_old(saved["rounds"]):
            self.state.engine.drop_loaded()
            self.steps = saved["steps"]
            self._continue(self.vectors, keep=False)
            return
        saved_updates.restore(self, saved, together)
        self._futures, self.flying = [], together
        self._discard = bool(together) and bool(saved["in flight"]["discarded"])
        if self.error == "parameters" and self.state.engine.step:
            with self.shards.peers.together():
                self.form()  # so that the errors are found
        if saved["world"] != self.world:
            self._end_flight(keep=False)
            if isinstance(self.noise, SketchNoise):
                self.noise.forget()
            self._continue(self.vectors, keep=False)
        elif together and not self.delay:  # the run that saved it had a delay
            self._end_flight(keep=True)
        if self.meetings is not None:
            self.meetings.load_state_dict(saved["rounds"], bool(self.flying))

    def _end_flight(self, keep: bool) -> None:
        """Applies what a checkpoint had in flight."""
        together, self.flying = self.flying, []
        if together:
            self._apply(together, keep)
        if self.error == "memory" and not self.delay:
            for v in self.vectors:
                if not v.wide:  # else its base is not the point
                    v.set_apart(False)
