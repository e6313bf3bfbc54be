"""The arguments of `Updates`: what cannot work is refused before anything has changed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.config.accuracy import adaptive
from sidcomp.config.kinds import is_number
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.local.outer import Outer, Torchs
from sidcomp.local.vectors import named_group
from sidcomp.state import State

ERRORS = ("parameters", "memory")  # where a rank keeps what it has not sent
_COPIES = ("schedulefree", "lookahead")  # in the names of optimizers that keep parameters in their state


def check(
    module: object,
    state: object,
    every: object,
    delay: object,
    error: object,
    host: object,
    noise_correction: object,
    stale: object,
) -> None:
    """Raises ArgumentError if an argument is something else than it must be, whatever the others are."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module={module!r}: give the torch.nn.Module that the optimizer trains")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            "a ScriptModule takes no hook, by which sidcomp notices that parameters are loaded: give the "
            "module that torch.jit.script or trace was given, and script it after training"
        )
    if not isinstance(state, State):
        raise ArgumentError(f'state={state!r}: give a sidcomp.State, such as sidcomp.State("topk")')
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ArgumentError(f"every={every!r}: give a number of steps between two exchanges, at least 1")
    if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay <= every:
        raise ArgumentError(f"delay={delay!r}: give a number of steps from 0 to every={every}")
    if error not in ERRORS:
        raise ArgumentError(f'error={error!r}: give "parameters" or "memory"')
    if not isinstance(host, bool):
        raise ArgumentError(f"host={host!r}: give True or False")
    if not isinstance(stale, int) or isinstance(stale, bool) or stale < 0:
        raise ArgumentError(f"stale={stale!r}: give a number of missed exchanges, at least 0")
    if not (noise_correction is None or isinstance(noise_correction, bool) or noise_correction == "rows"):
        raise ArgumentError(f'noise_correction={noise_correction!r}: give True or False, or "rows"')
    if noise_correction == "rows" and error == "memory":
        raise ArgumentError(
            'noise_correction="rows" needs error="parameters", where what is exchanged is lengthened: give '
            "True or False"
        )


def check_error_in_parameters(state: State, delay: int, others: Mapping[str, tuple[Any, Any]]) -> None:
    """Checks the arguments for error="parameters", which needs a memory with feedback. others: arguments that
    need error="memory", and their defaults. Raises ArgumentError or UnsupportedError."""
    for name, (value, default) in others.items():
        if value != default:
            raise ArgumentError(f'{name}={value!r} needs error="memory": leave {name} out, or give that')
    if delay and state.settings.planned:
        raise ArgumentError(
            f"delay={delay} hides exchanges behind later steps, and groups={state.settings.groups!r} are "
            "planned by what they take: leave delay out, or name groups, such as "
            'State("topk", groups="bucket")'
        )
    for candidate in state.settings.candidates:
        if not candidate.codec.lossless and "feedback" not in candidate.memory.traits:
            raise ArgumentError(
                f'error="parameters" needs a memory that keeps what was not sent, and {candidate.label} has '
                f'memory={candidate.memory.name!r}: give memory="residual"'
            )
    if state.settings.momentum:
        raise ArgumentError(
            "the memory holds the momentum of gradients, but here the optimizer holds its own: give "
            'memory="residual"'
        )
    if not state.settings.auto and any(
        c.choice is not None and c.choice.local > 1 for c in state.settings.candidates
    ):
        raise UnsupportedError(
            'error="parameters" keeps each rank\'s error in its own parameters, and this exchange keeps one '
            'for several ranks: choose exchange="twoshot", or leave exchange out'
        )


def check_error_in_memory(
    state: State,
    module: torch.nn.Module,
    parts: object,
    deadline: object,
    noise_correction: object,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Raises ArgumentError, SetupError or UnsupportedError."""
    if state.settings.planned:
        raise SetupError(
            f"groups={state.settings.groups!r} are planned by measured exchanges, which error=\"memory\" "
            'does not do: give a State with a named codec and fixed groups, such as State("topk", '
            'groups="bucket")'
        )  # fmt: skip
    if deadline is not None and noise_correction:
        raise UnsupportedError(
            f"deadline={deadline}: noise_correction=True compares the gradients of all ranks, and some may "
            "be late: leave one of them out"
        )
    if deadline is not None:
        _check_deadline(deadline, parts, state, module, process_group)


def check_parts(parts: object, every: int, delay: int, state: State, tensors: int, what: str) -> None:
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


def check_float32(named: dict[str, torch.Tensor], why: str) -> None:
    """Raises UnsupportedError. why: what keeps errors, or measures, in float32."""
    for name, p in named.items():
        if p.dtype is not torch.float32:
            raise UnsupportedError(
                f"parameter {name!r} is {str(p.dtype)[6:]}: {why}, which takes float32; use autocast for the "
                "forward pass"
            )


def check_optimizers(links: Sequence[Sequence[Any]], noise_correction: object, error: str) -> None:
    """Raises UnsupportedError if an optimizer keeps parameters in its state, and ArgumentError if the noise
    correction is for optimizers with two betas, and none has them. links: each one inside its wrappers."""
    for one in (one for chain in links for one in chain):
        names = " ".join(kind.__name__ for kind in type(one).__mro__).lower().replace("_", "")
        if any(name in names for name in _COPIES):
            raise UnsupportedError(
                f"{type(one).__name__} keeps a second copy of the parameters, which the exchange of updates "
                "does not reach: send gradients instead (a DDP model, without updates=True), or take an "
                "optimizer without such a copy"
            )
    optimizers = [chain[-1] for chain in links]
    asked = noise_correction == "rows" or (noise_correction is True and error == "memory")
    if asked and not any(map(adaptive, optimizers)):
        raise ArgumentError(
            f"noise_correction={noise_correction!r} lengthens the steps of optimizers with two betas, such "
            f"as Adam, and {type(optimizers[0]).__name__} has none: leave it out"
        )


def check_travels(outer: Outer, deadline: float) -> None:
    """Raises UnsupportedError unless the outer optimizer's state goes to a rank that comes back."""
    if isinstance(outer, Torchs):
        raise UnsupportedError(
            f"deadline={deadline}: outer={outer.label} has a state that does not travel to a rank that comes "
            "back: give torch.optim.SGD with lr, momentum and nesterov alone, or leave deadline out"
        )


def _check_deadline(
    deadline: object,
    parts: object,
    state: State,
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
) -> None:
    if not is_number(deadline) or not 0 < deadline < math.inf:  # type: ignore[operator]
        raise ArgumentError(
            f"deadline={deadline!r}: give the seconds that an exchange waits for late ranks, more than 0, or "
            "None to wait for all of them"
        )
    if parts != 1:
        raise UnsupportedError(
            f"deadline={deadline}: a rank that was late would miss single parts, which does not work yet: "
            "leave out parts or deadline"
        )
    given = named_group(state, process_group)
    if given is not None and given is not dist.group.WORLD:
        raise UnsupportedError(
            f"deadline={deadline}: rounds are between all ranks of the job: leave process_group out"
        )
    for name, p in module.named_parameters():
        if hasattr(p, "placements"):  # a DTensor
            raise UnsupportedError(
                f"deadline={deadline}: parameter {name!r} is a shard of FSDP, and a round without its rank "
                "would lose it: leave deadline out, or give every rank the whole module"
            )
        if p.device.type != "cpu":
            raise UnsupportedError(
                f"deadline={deadline}: parameter {name!r} is on {p.device}, and rounds exchange over Gloo "
                "between CPUs: leave deadline out"
            )
    for candidate in state.settings.candidates:
        if candidate.choice is not None:
            raise UnsupportedError(
                f"deadline={deadline}: exchange={candidate.choice.exchange.name!r} sends messages in several "
                "rounds, which cannot be undone yet: leave exchange out"
            )
    if state.settings.nonfinite == "drop":
        raise ArgumentError(
            f'deadline={deadline}: a round that fails is undone, which takes nonfinite="rollback": give '
            "that, or leave nonfinite out"
        )
