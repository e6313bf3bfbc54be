"""`compress`, the one call of a program, and `Run`, which it returns.

run = sidcomp.compress(model, optimizer)  # the training loop does not change
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import sqrt
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp import fsdp, notices, rank_states
from sidcomp.config.accuracy import EXACT, adaptive
from sidcomp.config.accuracy import check as check_accuracy
from sidcomp.config.schedule import Schedule, Setting
from sidcomp.doors.ddp import ddp_of, register, rewrap
from sidcomp.doors.ddp_checks import refuse_fsdp1
from sidcomp.doors.fsdp.hsdp import peers_of
from sidcomp.doors.fsdp.peers import Peers
from sidcomp.errors import ArgumentError, CheckpointError, SetupError
from sidcomp.local.alarms import refuse_second
from sidcomp.local.arguments import check_error_in_parameters
from sidcomp.local.buffers import check_saved, persistent
from sidcomp.local.choice import CANDIDATES, WITH_SGD, Choosing
from sidcomp.local.defaults import OuterOptimizer, common_arguments, place_of_error, spec_of
from sidcomp.local.own_gradients import average_nothing
from sidcomp.local.saved_updates import check_optimizers
from sidcomp.local.shards import is_sharded
from sidcomp.local.steps import Updates
from sidcomp.options import OF_UPDATES, Options
from sidcomp.runtime.members import check_ranks
from sidcomp.runtime.optimizers import Optimizers, chains, enabled
from sidcomp.runtime.plain_data import anything, listing, record, table
from sidcomp.state import State

_AS_UPDATES = 50  # as many times fewer bytes, or more, are not worth a word about updates


def compress(
    model: torch.nn.Module,
    optimizer: Optimizers,
    codec: str | State = "auto",
    *,
    updates: bool | None = None,
    every: int | None = None,
    delay: int = 0,
    outer: OuterOptimizer | None = None,
    parts: int = 1,
    deadline: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    scaler: Any = None,
    options: Options | None = None,
    **parameters: Setting | Schedule,
) -> "Run":
    """Compresses what the ranks of a training run send each other. The training loop stays as it is.

        run = sidcomp.compress(model, optimizer)

    What is sent depends on the model:

    - DistributedDataParallel: gradients, in DDP's communication hook.
    - HSDP (`fully_shard` inside nodes, replicas between them) or `replicate`: gradients, between replicas.
    - A plain module, or one that `fully_shard` has sharded inside a node, with `process_group`: updates, as
      each rank's optimizer makes them of its own gradient. Evaluate and save inside `run.common()`.
    - A DDP model with `updates=True`, `every`, `outer` or `deadline`: updates. DDP then averages nothing.

    model           the model that is trained; any wrapper of torch.compile is looked through
    optimizer       the one that steps on its parameters, or a list of several, such as [muon, adamw]
    codec           ["auto"] measures in the first steps and chooses; or a name in `sidcomp.codecs()`, whose
                    parameters are further arguments; or a State, such as `sidcomp.preset("redsync")`
    updates         [None] True or False: updates or gradients, whatever the model is
    every           [None] updates: steps between two exchanges, at least 1
    delay           [0] updates: steps, at most `every`, during which an exchange runs in the background
    outer           [None] updates: makes the optimizer that steps by the ranks' mean update, as in DiLoCo:
                    functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    parts           [1] updates: parts of the parameters, which are exchanged one after the other
    deadline        [None] updates: seconds that an exchange waits for late ranks; ranks may end and come back
    process_group   [None] the ranks to average over. None: those of the model, else all
    scaler          [None] the GradScaler, if the program has one. For updates torch's own is found
    options         [None] what is rarely set: `sidcomp.Options`
    parameters      of the codec, memory or exchange: density=0.01, or ratio=100 for a hundredth of the bytes

    Every rank calls it at the same point, with the model on its device and before the first step; the ranks
    compare arguments. Raises ArgumentError, SetupError or UnsupportedError, which say what to change.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model={model!r}: give the torch.nn.Module that the optimizer trains")
    refuse_fsdp1(model)
    ddp = ddp_of(model)
    sharded = any(map(is_sharded, model.parameters()))
    bare = not (ddp is not None or (sharded and process_group is None))
    asked = {"every": every, "delay": delay, "outer": outer, "parts": parts, "deadline": deadline}
    updates, how, own = _sort(updates, asked, options, bare)
    if updates:
        return UpdateRun(model, ddp, optimizer, codec, process_group, scaler, how, own, parameters)
    if ddp is None and not sharded:
        raise SetupError("updates=False averages gradients, and the model is a plain module: wrap it in DDP")
    state = _state(codec, own, parameters, None if sharded else process_group)
    if ddp is not None and process_group is not None:
        check_ranks(process_group, ddp.process_group)
    return GradientRun(model, ddp, optimizer, state, scaler, process_group)


def check(
    codec: str | State,
    updates: bool | None,
    asked: dict[str, Any],
    options: Options | None,
    parameters: dict[str, Any],
) -> None:
    """Raises what `compress` would raise for these arguments and a DDP model, for programs that get the model
    later. asked: every, delay, outer and the like; parameters: of the codec."""
    updates, how, own = _sort(updates, asked, options, bare=False)
    spec = spec_of(codec, parameters, how.get("outer"), True) if updates and isinstance(codec, str) else None
    codec, given = spec or (codec, parameters)
    if isinstance(codec, str):
        _trial(codec, own, given)
    else:
        _state(codec, own, dict(given), None)


def _sort(
    updates: bool | None, asked: dict[str, Any], options: Options | None, bare: bool
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Returns whether updates are sent, the arguments of `Updates`, and those of the State. bare: whether
    updates are sent if the program does not say what it wants."""
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(f"options={options!r}: give sidcomp.Options(...)")
    if not (updates is None or isinstance(updates, bool)):
        raise ArgumentError(f"updates={updates!r}: give True or False, or leave it out")
    own = (options or Options()).given()
    more = {name: own.pop(name) for name in OF_UPDATES if name in own}
    how = {name: value for name, value in asked.items() if value != {"delay": 0, "parts": 1}.get(name)}
    if updates is None:
        updates = bool(how) or bare
    if not updates and (how or more):
        raise ArgumentError(
            f"{', '.join([*how, *more])}: these are for updates, and this run sends gradients: give "
            "updates=True, or leave them out"
        )
    if "stale" in more and "deadline" not in how:
        raise ArgumentError(f"stale={more['stale']!r} is for late ranks: give a deadline, or leave it out")
    return updates, {**how, **more}, own


def _state(
    codec: str | State,
    arguments: dict[str, Any],
    parameters: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> State:
    if isinstance(codec, State):
        if more := [*arguments, *parameters]:
            raise ArgumentError(
                f"{', '.join(more)} beside a State: it has its arguments already; give them to it"
            )
        return codec
    named: str | None = codec
    if codec == "auto" and ("ratio" in parameters or "density" in parameters):
        named = None  # how much is sent has been chosen
    return State(named, process_group=process_group, **arguments, **parameters)


def _trial(codec: str, arguments: dict[str, Any], parameters: Mapping[str, Any]) -> State:
    """A State that shows whether the arguments fit, and says nothing when it is gone."""
    trial = _state(codec, arguments, dict(parameters), None)
    trial._finalizer.detach()
    return trial


class Run(ABC):
    """Compression in one training run, as `sidcomp.compress` returns it. `print(run)` says what is in force,
    what it sends, how long it takes, and why.

    Use it as a context manager, or `close()` it, before the process group is destroyed.
    """

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.module = module
        self._optimizers = list(optimizers)  # those inside of wrappers
        self._name: str | None = None  # of the run, in the files that it saves

    @property
    @abstractmethod
    def state(self) -> State:
        """The State in force: the lower layer, with the plan and the profile."""

    def __str__(self) -> str:
        return self.state.explain()

    def stats(self) -> dict[str, Any]:
        """Statistics of this rank: see `State.stats`."""
        return self.state.stats()

    def log(self, norms: bool = True) -> dict[str, float]:
        """A flat dictionary of numbers for a training log: see `State.log`."""
        return self.state.log(norms)

    def plot(self, path: str | Path) -> None:
        """Draws the last step's exchange to an image file: see `State.plot`."""
        self.state.plot(path)

    @abstractmethod
    def common(self) -> AbstractContextManager[torch.nn.Module]:
        """The module with the parameters that are the same on all ranks, to evaluate or to save:

            with run.common() as module:
                evaluate(module)

        Where gradients are sent, that is the module itself. Where updates are sent, each rank's own
        parameters come back afterwards, and training goes on as if you had not called it."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips as `torch.nn.utils.clip_grad_norm_` does, at the norm that corresponds to plain DDP's
        `max_norm`: 1 / (1 - momentum) times it where the memory hands velocities to the optimizer, and
        sqrt(ranks) times where SGD steps by a rank's own, noisier gradient. Returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm * self._gain)

    @property
    def _gain(self) -> float:  # how many times as large as DDP's gradients may be those of the parameters
        return self.state.settings.gain

    @abstractmethod
    def average(self) -> None:
        """Makes the parameters of all ranks equal: exchanges what has not been sent, uncompressed. Where
        gradients are sent, they are equal already. Every rank calls it at the same point."""

    def rewrap(self) -> DistributedDataParallel:
        """Returns a new DDP model around the same module, whose buckets are the groups that "auto" would have
        with gradients that arrive one by one: `ddp = run.rewrap()`. The old one cannot be used after this.
        Call it on every rank, between two steps. Raises SetupError unless gradients of a DDP model are
        sent."""
        raise SetupError("run.rewrap() is for gradients of a DDP model, whose buckets it makes anew")

    @abstractmethod
    def restart(self) -> None:
        """Forgets what has not been sent. Where updates are sent, the parameters as they are now become the
        common ones. Call it on every rank after the program has set parameters itself, alike on all ranks, as
        pruning does; the next exchange compares. `load_state_dict` of the module does it by itself."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs to continue with the same bits, besides the dictionaries of the model
        and the optimizer. Every rank saves its own; `save` does so for all."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the model's and the optimizer's. Every rank calls it at the
        same point. Raises CheckpointError, and then nothing has changed."""

    def save(self, folder: str | Path, number: int = 0) -> None:
        """Writes a file for each rank into the folder, beside the checkpoint that the program saves on rank
        0. Where updates are sent, the file has what differs between ranks, too: the parameters, the
        optimizer, persistent buffers and the given GradScaler. If a rank cannot write, all ranks raise a
        CheckpointError, and the folder has the former files. number: of this run, if several save into the
        same folder. Every rank calls it at the same point, between two steps."""
        beside = self._beside()
        name = self._run_name()
        rank_states.write(Path(folder), self.state, name, beside, number, self.peers)

    def load(self, source: str | Path | Sequence[dict[str, Any]], number: int = 0) -> bool:
        """Loads what `save` has written, after the program has loaded the model and the optimizer; or a list
        of what `rank_state` has returned, on all ranks in their order, or on this one alone. Every rank calls
        it at the same point. Returns False, with a warning, if there are no files. With another number of
        ranks it needs what all former ranks have saved.

        Raises CheckpointError on every rank, and then nothing has changed, if something is missing, damaged
        or of another model, or belongs to different steps."""
        return rank_states.load(source, self.state, self.prepare, self.peers, number)

    @torch.inference_mode(False)  # else tensors of the copy could not be trained on
    def rank_state(self) -> dict[str, Any]:
        """Returns a copy of what `save` writes, for a checkpoint of another form. Every rank calls it
        likewise."""
        beside = copy.deepcopy(self._beside())
        return {"run": self._run_name(), "state": self.state.state_dict(), "beside": beside}

    def _run_name(self) -> str:
        if self._name is None:
            self._name = rank_states.agree_on_run(self.state)
        return self._name

    def _beside(self) -> dict[str, Any]:
        """Returns what a file holds besides the State's dictionary."""
        return {}

    @property
    @abstractmethod
    def peers(self) -> Peers:
        """The ranks with the shards of this replica."""

    def prepare(self, found: list[dict[str, Any]]) -> Callable[[], None]:
        """Checks what ranks have saved, and returns what takes it over. Raises CheckpointError."""
        return self.state.prepare(rank_states.states_of(found))

    def close(self) -> None:
        """Ends compression: waits for pending exchanges. May be called again."""
        self.state.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GradientRun(Run):
    """The ranks exchange gradients, in DDP or between the replicas of HSDP."""

    def __init__(
        self,
        model: torch.nn.Module,
        ddp: DistributedDataParallel | None,
        optimizer: Optimizers,
        state: State,
        scaler: Any,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        links = chains(optimizer)
        super().__init__(model, [each[-1] for each in links])
        self._state = state
        if state.door is not None and state.door.open:
            raise SetupError("this State serves a model already: give every model a State of its own")
        state.follow([each[0] for each in links], enabled(scaler))  # first: nobody can take the hook back
        try:
            if ddp is not None:
                register(ddp, state)
            else:
                fsdp.compress(model, state, replicas=replicas)
        except BaseException:
            state.follow(None)
            raise

    @property
    def state(self) -> State:
        return self._state

    def __str__(self) -> str:
        text = super().__str__()
        adam = [type(o).__name__ for o in self._optimizers if adaptive(o)]
        stats = self.state.stats()
        if adam and 0 < stats["ratio"] < _AS_UPDATES and not is_sharded(next(self.module.parameters())):
            text += (
                f"\n  {' and '.join(adam)} keeps its loss with a hundredth of the bytes, where updates are "
                "sent in place of gradients: pass the module without DDP, or updates=True"
            )
        return text

    @property
    def peers(self) -> Peers:
        return peers_of(self.state)

    @contextmanager
    def common(self) -> Iterator[torch.nn.Module]:
        yield self.module

    def average(self) -> None:
        self.state.check_open()

    def rewrap(self) -> DistributedDataParallel:
        ddp = ddp_of(self.module)
        if ddp is None:
            return super().rewrap()
        self.module = rewrap(ddp, self.state)
        return self.module

    def restart(self) -> None:
        self.state.check_open()
        self.state.engine.restart()

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state.load_state_dict(saved)


class UpdateRun(Run):
    """The ranks exchange what their optimizers did.

    how: arguments of `Updates`. arguments, parameters: of the State, if codec is none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ddp: DistributedDataParallel | None,
        optimizer: Optimizers,
        codec: str | State,
        process_group: dist.ProcessGroup | None,
        scaler: Any,
        how: dict[str, Any],
        arguments: dict[str, Any],
        parameters: dict[str, Any],
    ) -> None:
        if ddp is not None and ddp._comm_hooks:
            raise SetupError(
                "this DDP model has a communication hook already, and takes only one: wrap the module in a "
                "new DDP, or pass the module itself"
            )
        module = ddp.module if ddp is not None else model
        refuse_second(module)
        group = ddp.process_group if ddp is not None and process_group is None else process_group
        outer, deadline = how.get("outer"), how.get("deadline")
        may_wait = not how.keys() & {"every", "delay", "parts"}  # for more than a step, if loss may be lost
        how.setdefault("every", 1 if outer is None and deadline is None else 30)
        chooses = codec == "auto" and not parameters and outer is None and deadline is None
        accuracy = arguments.pop("accuracy", None) if chooses else None
        if accuracy is not None:
            check_accuracy(accuracy)
        if accuracy == "exact":
            chooses, codec = False, EXACT[0]
        optimizers = [each[-1] for each in chains(optimizer)]
        self._adam = adam = any(map(adaptive, optimizers))
        if chooses:  # what does not fit is an error now, not when it has chosen
            trials = [_trial(name, arguments, own) for name, own in (CANDIDATES if adam else WITH_SGD)]
            how.setdefault("error", place_of_error(module, trials[0], how))
            for trial in trials if how["error"] == "parameters" else ():
                check_error_in_parameters(trial, how.get("delay", 0), {})
            state = State("none", **common_arguments(arguments))
        else:
            spec = spec_of(codec, parameters, outer, adam) if isinstance(codec, str) else (codec, parameters)
            state = _state(spec[0], arguments, dict(spec[1]), None)
            how.setdefault("error", place_of_error(module, state, how))
        # the exchanges in which one rank chooses would meet others
        agree = {"codec": "auto" if chooses else "named", "accuracy": accuracy, "adam": adam}
        self.updates = Updates(
            module, optimizer, state, process_group=group, scaler=scaler, agree=agree, **how
        )
        super().__init__(module, optimizers)
        self._choosing: Choosing | None = None
        longer = may_wait and accuracy in ("close", "any")
        if chooses:
            self._choosing = Choosing(self.updates, adam, arguments, longer)
        self._scaler = enabled(scaler)
        self._averaged = -1  # the number of steps at the last `average`
        self._closed = False
        if ddp is not None:  # last, so that a refusal leaves the DDP model as it was
            average_nothing(ddp, self._refusal)

    @property
    def state(self) -> State:  # "auto" takes another one when it has chosen
        return self.updates.state

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self._choosing is not None:
            lines.append(f"  why: {self._choosing.why}")
        away = self.updates.apart()
        lines.append(f"  this rank's parameters are {100 * away:.2g} % away from the common ones")
        if self.updates.discarded:
            lines.append(f"  {self.updates.discarded} exchanges did not count: an update was not finite")
        return "\n".join(lines)

    def stats(self) -> dict[str, Any]:
        """As `State.stats`, and "discarded": exchanges that did not count because an update was not finite
        (with a deadline: this rank's). With "auto" since it has chosen."""
        return {**super().stats(), "discarded": self.updates.discarded}

    def common(self) -> AbstractContextManager[torch.nn.Module]:
        return self.updates.common()

    @property
    def peers(self) -> Peers:
        return self.updates.shards.peers

    @property
    def _gain(self) -> float:
        return 1.0 if self._adam else sqrt(self.updates.world)

    def average(self) -> None:
        if self.updates.average():
            self._averaged = self.updates.steps

    def restart(self) -> None:
        self.state.check_open()
        self.updates.restart()

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state.state_dict(), **self._updates_state()}

    def _updates_state(self) -> dict[str, Any]:
        spec = self._choosing.spec if self._choosing is not None else None
        chosen = [spec[0], dict(spec[1])] if spec is not None else None
        return {"updates": self.updates.state_dict(), "chosen": chosen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        record({"state": anything, "updates": anything, "chosen": anything})(saved, "run.state_dict()")
        take = self._prepare(saved, saved["state"])
        take()
        self.updates.load_state_dict(saved["updates"])

    def _prepare(self, saved: dict[str, Any], states: Any) -> Callable[[], None]:
        """Checks the States' dictionaries and what a checkpoint has beside them, and returns what loads the
        former, with what "auto" has chosen. Raises CheckpointError, and then nothing has changed."""
        chosen = saved["chosen"]
        if chosen is not None:
            pair = isinstance(chosen, list) and [type(x) for x in chosen] == [str, dict]
            if not pair or tuple(chosen) not in (*CANDIDATES, *WITH_SGD):
                raise CheckpointError(f'"chosen" is {chosen!r}, which is nothing that "auto" chooses')
        updates, own = self.updates, self.updates.every
        undecided = self._choosing is not None and self._choosing.spec is None
        observer = self._choosing if chosen is not None and undecided else None
        its: Any = saved["updates"].get("every") if isinstance(saved["updates"], dict) else None
        every: int = its if observer is not None and observer.waits(its) else own
        try:
            updates.wait(every)
            if observer is not None:
                observer.check(tuple(chosen), states)
            else:
                take_states = self.state.prepare(states)
            updates.check(saved["updates"], (states[0] if isinstance(states, list) else states)["step"])
        finally:
            updates.wait(own)

        def take() -> None:
            updates.wait(every)
            if observer is not None:
                observer.take(tuple(chosen), states)
            else:
                take_states()

        return take

    def _beside(self) -> dict[str, Any]:
        scaler = self._scaler.state_dict() if self._scaler is not None else None
        return {
            **self._updates_state(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "scaler": scaler,  # each rank skips its own steps
            "buffers": {name: x.detach().clone() for name, x in persistent(self.module).items()},
        }

    def prepare(self, found: list[dict[str, Any]]) -> Callable[[], None]:
        rank = dist.get_rank(rank_states.group_of(self.state))
        beside = found[rank % len(found)].get("beside")
        fields = {"updates": anything, "chosen": anything, "optimizers": listing(anything)}
        record({**fields, "scaler": anything, "buffers": table(anything)})(beside, "a file of updates")
        assert beside is not None
        check_optimizers(self._optimizers, beside["optimizers"])
        buffers = persistent(self.module)
        check_saved(buffers, beside["buffers"])
        take_states = self._prepare(beside, rank_states.states_of(found))

        def take() -> None:
            take_states()
            for optimizer, saved in zip(self._optimizers, beside["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            if self._scaler is not None and beside["scaler"]:
                self._scaler.load_state_dict(beside["scaler"])
            for name, buffer in buffers.items():
                buffer.copy_(beside["buffers"][name])
            self.updates.load_state_dict(beside["updates"])

        return take

    def _refusal(self) -> SetupError | None:
        """When the run is closed, or the State behind it, nobody exchanges updates any more, and the ranks
        would drift apart."""
        if not self._closed and not self.state.engine.closed:
            return None
        return SetupError(
            "the run is closed, and this DDP model averages no gradients: wrap the module in a new DDP"
        )

    def close(self) -> None:
        """Exchanges nothing from now on, and a DDP model must not be trained any more. Says how far this
        rank's parameters are from the common ones, unless `average` was called after the last step."""
        if not self._closed and self.updates.steps != self._averaged and self.updates.world > 1:
            away = self.updates.apart()
            if away:
                notices.say(
                    f"closed after {self.updates.steps} steps without run.average(): each rank keeps "
                    f"parameters of its own, here {100 * away:.2g} % away from the common ones",
                    # With a deadline it may be this rank alone.
                    self.state.engine.speaker if self.updates.meetings is None else 0,
                )
        self._closed = True
        self.updates.close()
        self.state.close()
