"""Which call of a backward pass is which. A residual belongs to the same all-reduce of the next step, and
nobody tells the backend which one that is. So it learns the lists of calls that backward passes have.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from sidcomp.doors.backend.configuration import Configuration
from sidcomp.doors.backend.ddp_buckets import Holding, Part
from sidcomp.doors.fsdp import parameter_groups
from sidcomp.doors.unused import Unused
from sidcomp.errors import SetupError
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import UNFINISHED, Engine, Model
from sidcomp.state import State

_MEMORY = 16  # passes for which a list of calls is remembered without having come again
PATIENCE = 20  # passes without two that are equal, after which a line says that nothing is compressed


AT_END = object()  # of what a pass all-reduces at its end, where all gradients have been accumulated

_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_weak: Any = getattr(torch._C, "_WeakTensorRef")  # noqa: B009  # torch's stubs lack it


def whose() -> Any:
    """Whose gradients the current call of a backward pass carries: a parameter, of which there may be more;
    one of FSDP2's parameter groups; or AT_END. None: it is not known to carry gradients of parameters.

    DDP and hooks of gradients issue a call from the node that accumulates a parameter's gradient. What any
    other node issues, the rest of the pass may compute with: the gradient of an activation. The leaves of a
    part of a graph, as pipelines and checkpointing have them, are activations too.
    """
    if (unit := parameter_groups.reducing()) is not None:
        return unit
    node = _node()
    if node is None:
        return AT_END
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.nn.Parameter) else None


class Origin:
    """Whose gradients a call carries: what `whose` returned, which it does not keep alive."""

    def __init__(self, of: Any) -> None:
        self._tensor = isinstance(of, torch.Tensor)
        self._key = of._cdata if self._tensor else id(of)
        self._ref: Any = _weak(of) if self._tensor else weakref.ref(of)

    @classmethod
    def of(cls, found: Any) -> "Origin | None":
        """None: it is not known."""
        return None if found is AT_END else cls(found)

    @property
    def gone(self) -> bool:
        return bool(self._ref.expired()) if self._tensor else self._ref() is None

    def one_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        return self._tensor and any(self._key == p._cdata for p in parameters) and not self.gone

    def same(self, new: "Origin") -> bool:
        """new: of a call that has just come."""
        return self._key == new._key and not self.gone


def _same(old: Origin | None, new: Origin | None) -> bool:
    """Whether two calls may carry gradients of the same model."""
    return old is None or new is None or old.same(new)


class Call(NamedTuple):
    """The properties that an all-reduce at one place in the program keeps from step to step."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    average: bool

    def __str__(self) -> str:
        return f"{'an average' if self.average else 'a sum'} of {self.numel} x {str(self.dtype)[6:]}"


class Place(NamedTuple):
    """The place in memory of a call's tensor. storage: does not keep it alive."""

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
    """The all-reduces of one kind of backward pass, in order, and the State that compresses them. known: it
    compresses.

    fixed: its tensors stay where they are, as DDP's buckets do, and so tell its passes from those of other
    models. All ranks agree on it. Otherwise order, size and origins do.
    """

    def __init__(
        self, calls: list[Call], places: list[Place], origins: list[Origin | None], last: int
    ) -> None:
        self.calls, self.places, self.origins = calls, places, origins
        self.last = last  # the number of the last pass that had these calls, until they have a State
        self.turn = 0  # when it has come last, among all
        # It is from a checkpoint, and has not come: nothing is known of it but its calls.
        self.loaded = False
        # The parameters whose gradients DDP's buckets have; None: not known.
        self.pieces: list[tuple[Part, ...]] | None = None
        self.looked = False  # for the DDP model whose buckets they are
        self.unused: Unused | None = None  # of that model
        self.formed = False  # the engine has these buckets
        self._taken: Sequence[Holding] | None = None  # the buckets of its last pass, while it is `loaded`
        self._stays = False  # and the pass before it had them, too
        self.fixed = self.known = False
        self.state: State | None = None
        self.steps = 0
        self.holds = False  # the engine still holds the tensors of the last pass
        # These two are for calls after a backward pass.
        self.followed = False  # by another backward pass, not by a step
        self.witness: Any = None  # tells whether its model has had a backward pass

    def learn(self, configuration: Configuration, group: dist.ProcessGroup) -> None:
        """Makes what compresses it."""
        self.known = True
        self.state = configuration.state(group)
        self.state.attach(Door(group, self, self.state.engine), {})

    def inherit(self, former: "Program") -> None:
        """Continues with what has compressed these calls before."""
        self.known, self.holds, self.pieces = True, former.holds, former.pieces
        self.looked, self.unused = former.looked, former.unused
        self.state = former.state
        assert self.state is not None and isinstance(self.state.door, Door)
        self.state.door.program = self

    def take(self, held: Sequence[Holding]) -> bool:
        """Takes the present buckets of a DDP model, if they hold the parameters that it is loaded for."""
        assert self.pieces is not None
        present = sorted(x[:2] for h in held for x in h.pieces)
        if present != sorted(x[:2] for pieces in self.pieces for x in pieces):
            return False
        if self._taken != held:
            self.pieces = [h.pieces for h in held]
            self.calls = [Call(h.numel, h.dtype, h.device, False) for h in held]
            self.origins = [None] * len(held)
            self.formed = False
        self._stays, self._taken = self._taken == held, held
        return True

    def came(self, places: list[Place], origins: list[Origin | None]) -> None:
        """A pass has had its calls."""
        self.steps += 1
        if self.loaded and (self.pieces is None or self._stays):
            self.loaded, self._taken = False, None
            self.places, self.origins = places, origins

    def end_early(self) -> None:
        """The rest of its calls does not come in this pass."""
        if self.state is None:
            return
        if self.loaded and self.pieces is not None:  # its groups may span buckets
            self.state.engine.abandon(SetupError(UNFINISHED))
        else:
            left = self.state.engine.end_early()
            assert not left  # a group never spans two calls

    def likeness(self, places: Sequence[Place], origins: Sequence[Origin | None]) -> Likeness:
        return min(map(self._likeness, self.places, places, self.origins, origins))

    def _likeness(self, old: Place, new: Place, mine: Origin | None, its: Origin | None) -> Likeness:
        same = _same(mine, its)
        if not same and self.pieces is None:
            return Likeness.OTHER  # models may share a buffer
        if not old.freed and old.address == new.address:
            return Likeness.SAME
        if mine is not None and its is not None:
            return Likeness.MOVED if same else Likeness.OTHER
        # Buckets that are learnt stay. Other ones that follow them are another model's.
        return Likeness.MOVED if old.freed and not (self.known and self.fixed) else Likeness.OTHER

    def fits(self, index: int, call: Call, tensor: torch.Tensor, origin: Origin | None) -> bool:
        """Whether this may be its call number `index`. The same on all ranks."""
        if index >= len(self.calls) or self.calls[index] != call:
            return False
        if self.loaded:
            return True
        # The last gradient of one of DDP's buckets may be another one in each pass.
        same = _same(self.origins[index], origin)
        if self.places[index].holds(tensor):
            return same or self.pieces is not None
        return same and not self.fixed

    def apart(self, origins: Sequence[Origin | None]) -> bool:
        """Whether its passes can be told from those with these origins by their first call."""
        return not _same(self.origins[0], origins[0])

    @property
    def gone(self) -> bool:
        """Whether its model no longer exists, so that it cannot come again."""
        if self.loaded:
            return False
        if any(self.origins):
            return all(o.gone for o in self.origins if o is not None)
        return self.fixed and all(place.freed for place in self.places)

    def close(self) -> None:
        """Frees what compresses it, because its model is gone."""
        if self.state is not None and self.state.engine.step:  # otherwise it has made nothing
            self.state.close()


class Door:
    """Shows the engine one program's calls as buckets."""

    def __init__(self, group: dist.ProcessGroup, program: Program, engine: Engine) -> None:
        self.group, self.program, self.engine = group, program, engine

    def _parts(self) -> list[tuple[Call, tuple[Part, ...]]]:
        """Its all-reduces, and what each is called in parts."""
        calls, pieces = self.program.calls, self.program.pieces
        if pieces is not None:
            return list(zip(calls, pieces, strict=True))
        return [(call, (Part(f"call{i}:{call.numel}", call.numel),)) for i, call in enumerate(calls)]

    @property
    def model(self) -> Model:
        return Model(self.group, {x.name: (x.numel,) for _, pieces in self._parts() for x in pieces}, {})

    open = True

    def reset(self, error: Exception) -> None: ...

    def before_forward(self, function: Any) -> Any:
        raise SetupError(
            "a process group knows no parameters and no optimizer, so follow() cannot serve it: use "
            "sidcomp.compress, or call update_scale() after each scaler.update()"
        )

    def form(self) -> None:
        buckets = []
        for call, pieces in self._parts():
            # Only the size counts here; `ready` replaces the buffer.
            like = torch.empty(1, dtype=call.dtype, device=call.device).expand(call.numel)
            names, sizes, orders = zip(*pieces, strict=True)
            buckets.append(Bucket(names, [(n,) for n in sizes], like, orders=orders))
        self.engine.form(self.model, buckets)
        self.program.formed = True


class Passes:
    """The lists of calls of a process group's backward passes, and the pass in progress."""

    where = "a backward pass"

    def __init__(
        self,
        learn: Callable[[Program], None],
        least: Callable[[list[int], torch.device], list[int]],
        warn: Callable[[str, str], None],
        holdings: Callable[[Origin | None], list[Holding]],
    ) -> None:
        """learn: makes what compresses a program. least: the least that any rank says; all ranks call it.
        warn: takes a topic and a text. holdings: the present buckets of a call's DDP model."""
        self._learn, self._least, self._warn = learn, least, warn
        self._holdings = holdings
        self.programs: list[Program] = []
        self._active: Program | None = None  # what the pass in progress has been so far
        self._stopped = False  # the pass in progress is no longer the active program's
        self._passes = 0  # passes that were watched in vain
        self._ended = self._turn = 0  # all passes, and those that were compressed
        self._clear()

    def _clear(self) -> None:
        self._calls: list[Call] = []
        self._places: list[Place] = []
        self._origins: list[Origin | None] = []
        self._active = None

    @property
    def begun(self) -> int:
        """The number of calls that the pass in progress has had."""
        return len(self._calls)

    def note(self, call: Call, tensor: torch.Tensor, origin: Origin | None) -> tuple[Program, int] | None:
        """Counts a call of the pass in progress. Returns the program whose call it is, and the call's number,
        if it is to be compressed."""
        if self.begun == 0:
            self.let_go(wait=True)
            self._active = self._choose(call, tensor, origin)
        return self._count(call, tensor, origin)

    def _count(self, call: Call, tensor: torch.Tensor, origin: Origin | None) -> tuple[Program, int] | None:
        index, program = self.begun, self._active
        fits = program is not None and self._continues(program, index, call, tensor, origin)
        self._calls.append(call)
        self._places.append(Place.of(tensor))
        self._origins.append(origin)
        if program is None:
            return None
        if not fits:
            self._stop(f"call {index} of {self.where} is {call}, not the one of earlier passes")
            return None
        return program, index

    def _continues(
        self, program: Program | None, index: int, call: Call, tensor: torch.Tensor, origin: Origin | None
    ) -> bool:
        return program is not None and program.fits(index, call, tensor, origin)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The tensors of the active program's calls, until the pass ends."""
        state = self._active.state if self._active is not None else None
        layout = state.engine.layout if state is not None else None
        return [b.buffer for b in layout.buckets] if layout is not None else []

    def give_up(self) -> None:
        """An error has ended the use of the active program in this pass."""
        self._active = None

    def _choose(self, call: Call, tensor: torch.Tensor, origin: Origin | None) -> Program | None:
        """Returns the only known program that begins with this call. All ranks must choose the same one, so
        nothing counts here that is not the same on all, such as whether a tensor has been freed already."""
        loaded = sorted((p for p in self.programs if p.loaded), key=lambda p: p.turn)
        if any(p.pieces is not None for p in loaded):
            held = self._holdings(origin)
            for p in loaded:
                if p.pieces is not None and p.take(held):
                    return p if p.calls[0] == call else None
        found = [p for p in self.programs if not p.loaded and self._fits(p, call, tensor, origin)]
        if not found:  # those that come in turns come in the order in which they came before
            return next((p for p in loaded if p.pieces is None and self._fits(p, call, tensor, origin)), None)
        possible = [p for p in found if p.fixed] or found
        if len(possible) > 1 and any(p.known for p in possible):
            self._warn(
                "ambiguous",
                "cannot tell which of several backward passes has begun, and sends it uncompressed: give "
                "each model a process group of its own",
            )
        return possible[0] if len(possible) == 1 and possible[0].known else None

    def _fits(self, program: Program, call: Call, tensor: torch.Tensor, origin: Origin | None) -> bool:
        return program.fits(0, call, tensor, origin)

    def let_go(self, wait: bool = False) -> None:
        """Drops the tensors of the last pass, which tell by being freed that their calls have others now."""
        for p in self.programs:
            if p.state is not None and p.holds:
                engine = p.state.engine
                if wait:
                    engine.quiet()
                if engine.current.over and not (engine.on_device and not wait):
                    engine.let_go()
                    p.holds = False

    def _stop(self, why: str) -> None:
        """Ends the use of the active program in this pass."""
        program, self._active = self._active, None
        assert program is not None
        program.end_early()
        self._stopped = True
        self._warn("different", f"sends the rest of {self.where} uncompressed: {why}")

    def end(self) -> Program | None:
        """A pass has ended. Returns the program that has compressed all of it."""
        program, stopped = self._active, self._stopped
        if program is not None and self.begun < len(program.calls):
            self._stop(f"it had {self.begun} all-reduces, and earlier passes had {len(program.calls)}")
            program = None
        elif program is not None:
            program.came(self._places, self._origins)
            self._turn += 1
            program.turn = self._turn
        elif self._calls and not stopped:
            self._compare()
        self._stopped = False
        self._clear()
        self.let_go()
        self._ended += 1
        if self._ended == PATIENCE and (waiting := sum(p.loaded for p in self.programs)):
            self._warn(
                "loaded",
                f"has not met {waiting} lists of calls of its checkpoint, and their residuals wait: load the "
                "checkpoint of this model and these settings",
            )
        return program

    @property
    def hopeless(self) -> bool:
        """Whether it has said that it gives up."""
        return self._passes >= PATIENCE and not any(p.known for p in self.programs)

    def _compare(self) -> None:
        """Compares a pass that no known program fits with earlier ones. All ranks are here, and agree."""
        if self.hopeless:
            return
        self._passes += 1
        self.programs = [p for p in self.programs if p.known or p.last > self._passes - _MEMORY]
        alike = [p for p in self.programs if p.calls == self._calls and not p.loaded]
        alike.sort(key=lambda p: not p.known)
        learnt = [p for p in self.programs if p.known]
        # One rank may have freed a tensor, or a model, that another one still has.
        mine = [int(p.likeness(self._places, self._origins)) for p in alike] + [int(p.gone) for p in learnt]
        told = self._least(mine, self._calls[0].device) if alike else [0] * len(mine)
        likeness = [Likeness(x) for x in told[: len(alike)]]
        best = max(likeness, default=Likeness.OTHER)
        if best is Likeness.OTHER:
            self.programs.append(Program(self._calls, self._places, self._origins, self._passes))
        else:
            self._came_again(alike, likeness, best)
        for program, gone in zip(learnt, told[len(alike) :], strict=True):
            if gone:
                self._drop([program])
        if self._passes == PATIENCE and self.hopeless:
            self._in_vain()

    def _in_vain(self) -> None:
        self._warn(
            "nothing",
            f"has compressed nothing in {PATIENCE} backward passes, because no two of them had the same "
            "all-reduces, and gives up: use sidcomp.compress, which knows the model",
        )

    def _made(self, program: Program) -> None:
        """The program has been learnt."""
        self._learn(program)

    def _came_again(self, alike: list[Program], likeness: list[Likeness], best: Likeness) -> None:
        """Learns from a pass that had the calls of earlier ones. alike: their programs, the known ones first;
        best: the greatest likeness."""
        found = alike[likeness.index(best)]
        others = [p for p in alike if p.known and not p.fixed and not p.apart(self._origins)]
        found.places, found.origins = self._places, self._origins
        found.last, found.fixed = self._passes, best is Likeness.SAME
        if not found.known and (found.fixed or not others):
            self._made(found)
        # Two programs with the same calls, neither of them fixed, can never be told apart. They are one if no
        # tensor of either is left: an exchange may let go of a tensor only after the next pass has begun.
        if not found.fixed:
            moved = (p for p, like in zip(alike, likeness, strict=True) if like is Likeness.MOVED)
            self._drop([p for p in moved if p is not found])

    def _drop(self, programs: Iterable[Program]) -> None:
        for program in programs:
            if program in self.programs:
                self.programs.remove(program)
                program.close()
