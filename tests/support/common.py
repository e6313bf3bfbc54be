"""What the tests of the hook share: states, their groups and residuals, and the reference of the exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import reference
import sidcomp
import torch
import torch.distributed as dist
from buffers import fits
from cases import CASES, Case, Trainer, assert_same, bits, explicit_groups
from harness import at_end
from sidcomp.config import schedule
from sidcomp.doors.ddp import register
from torch import Tensor, nn

Array = npt.NDArray[Any]
Gradients = Mapping[str, Tensor | None]

GROUPS = ("bucket", "model", 700, "explicit")
CODECS = {codec.name: codec for codec in sidcomp.codecs()}
MEMORIES = {memory.name: memory for memory in sidcomp.memories()}
PLAIN = ("none", "residual")
OTHERS = tuple(m for m in MEMORIES if m not in PLAIN)


def tolerant(codec: str) -> bool:
    """Whether its statistics may be off the reference by a stated bound: then that is told the result."""
    return hasattr(reference.CODECS[codec](0, 1, "float32", defaults(codec, "none")), "dictated")


def with_density(codecs: Iterable[str], density: float) -> dict[str, dict[str, Any]]:
    """Settings of those codecs that have a density."""
    has = [c for c in codecs if any(p.name == "density" for p in CODECS[c].parameters)]
    return {c: {"density": density} for c in has}


def _kinds() -> list[str]:
    """The first codec of each kind that the hook could tell apart, of those that want error feedback or
    nothing. What differs within a kind is the core's, and test_codecs.py judges it; every codec runs
    through the hook in test_exchange.py, those of several reductions in test_reductions.py."""
    kinds: dict[object, str] = {}
    for c in CODECS.values():
        if "reductions" not in c.traits and fits(c.name, "none") and (c.lossless or c.memory != "none"):
            kinds.setdefault(c.traits & {"linear", "lossless", "sparse", "stochastic"}, c.name)
    return list(kinds.values())


KINDS = _kinds()
LINEAR = [c for c in KINDS if CODECS[c].linear and not CODECS[c].lossless]
# Beside an unbiased codec that is no contraction a residual grows without end.
STEADY = [c for c in KINDS if CODECS[c].linear or "unbiased" not in CODECS[c].traits]
GATHERED = [c for c in KINDS if not CODECS[c].linear]
LOSSY = [c for c in KINDS if not CODECS[c].lossless]


def make_state(groups: str | int, module: nn.Module, **arguments: Any) -> sidcomp.State:
    return sidcomp.State(groups=explicit_groups(module) if groups == "explicit" else groups, **arguments)


def begin(
    rank: int, case: str | Case = "cap-small", groups: Any = None, lr: float = 0.05, **arguments: Any
) -> tuple[Trainer, sidcomp.State]:
    """A Trainer and a State that is registered with it, which are closed when the rank's function has
    returned."""
    trainer = Trainer(CASES[case] if isinstance(case, str) else case, rank, lr=lr)
    state = make_state(groups, trainer.module, **arguments)
    register(trainer.wrapper, state)
    at_end(state.close)
    at_end(trainer.close)
    return trainer, state


def steps_of(trainer: Trainer, state: sidcomp.State, steps: int) -> list[dict[str, Tensor | None]]:
    """Takes steps. Returns all that equal runs must have in common after each of them."""
    seen = []
    for _ in range(steps):
        trainer.step()
        seen.append(everything(trainer, state))
    return seen


def everything(trainer: Trainer, state: sidcomp.State) -> dict[str, Tensor | None]:
    return trainer.snapshot() | {f"residual of {n}": r for n, r in sorted(residuals_of(state).items())}


def assert_all_same(
    got: Sequence[Mapping[str, Tensor | None]], want: Sequence[Mapping[str, Tensor | None]], where: str
) -> None:
    """As assert_same, after each step."""
    for step, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert_same(mine, right, f"{where}, step {step}")


def assert_alike(mine: Mapping[str, Tensor | None], said: str = "the ranks differ") -> None:
    """Every rank has these bits."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: bits(x) for name, x in mine.items()})
    assert all(e == everywhere[0] for e in everywhere), said


def run_on(trainer: Trainer) -> None:
    """After an error that all ranks have had the training goes on, and the replicas are the same."""
    for _ in range(3):
        trainer.step()
    assert_alike(trainer.snapshot())


def groups_of(state: sidcomp.State) -> list[dict[str, Any]]:
    """The groups of the last step, in their order: {"names": [...], "codec": ..., ...}."""
    return [dict(g) for g in state.stats()["groups"]]


def residuals_of(state: sidcomp.State) -> dict[str, Tensor]:
    """What each parameter's memory keeps, flat, in the order of the parameter's own memory."""
    kept: dict[str, Tensor] = state.state_dict()["residuals"]
    return {name: vectors[0] for name, vectors in kept.items()}


def defaults(codec: str, memory: str) -> dict[str, Any]:
    tables = [CODECS[codec].parameters, *(m.parameters for m in sidcomp.memories() if m.name == memory)]
    return {p.name: p.default for table in tables for p in table}


# ---- tensors <-> the reference's vectors -------------------------------------------------------------------


def dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def memory_order(like: Tensor) -> list[int]:
    """The dimensions as they lie in memory, outermost first: buckets hold gradients in that order."""
    return sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))


def flat(x: Tensor, like: Tensor) -> Tensor:
    return x.detach().permute(memory_order(like)).reshape(-1)


def shaped(vector: Tensor, like: Tensor) -> Tensor:
    """The tensor of like's shape and strides whose flat() is `vector`."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=vector.dtype)
    out.permute(memory_order(like)).copy_(vector.reshape([like.shape[d] for d in memory_order(like)]))
    return out


def to_array(x: Tensor) -> Array:
    """As the reference wants it: bfloat16 as uint16."""
    return (
        x.contiguous().view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
    )


def to_tensor(x: Array, dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(x.copy().view(np.int16)).view(dtype)
        if dtype == torch.bfloat16
        else torch.from_numpy(x.copy())
    )


# ---- the exchange, slowly ----------------------------------------------------------------------------------


class Reference:
    """What a step gives: gradient + residual of each rank through `reference`, summed in rank order.

    Residuals are kept by parameter name, so groups may change between steps.
    """

    def __init__(self, codec: str, memory: str, settings: Mapping[str, Any], rank: int, world: int) -> None:
        self.codec, self.memory = codec, memory
        self.settings = {**defaults(codec, memory), **settings}
        self.own: dict[str, dict[str, Any]] = {}  # settings of single parameters, over the others
        self.rank, self.world, self.steps = rank, world, 0
        self.sides: dict[tuple[str, ...], reference.Group] = {}  # of the last exchange
        self.vec: dict[str, Array] = {}  # vectors x elements of what each parameter's memory keeps

    @property
    def kept(self) -> dict[str, Array]:
        """Vector 0 of each."""
        return {name: v[0] if len(v) else np.zeros(v.shape[1], np.float32) for name, v in self.vec.items()}

    def _settings(self, codec: str, names: Sequence[str]) -> dict[str, Any]:
        """A dense group's memory has the parameters that the others' has."""
        memory = {p.name: self.settings[p.name] for p in MEMORIES[self.memory].parameters}
        settings = self.settings if codec == self.codec else {**defaults(codec, self.memory), **memory}
        return dict(schedule.at({**settings, **self.own.get(names[0], {})}, self.steps))

    def exchange(self, groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]) -> None:
        """Replaces every .grad by the exchanged one. Parameters that no rank has used stay as they are, and
        what is sent of them is not used: it goes back to every rank's residual."""
        used: list[Any] = [None] * self.world
        dist.all_gather_object(used, [name for name, p in parameters.items() if p.grad is not None])
        anywhere = {name for names in used for name in names}
        sides: dict[tuple[str, ...], reference.Group] = {}
        for number, group in enumerate(groups):
            names = [str(name) for name in group["names"]]
            ps = [parameters[name] for name in names]
            mine = torch.cat([flat(torch.zeros_like(p) if p.grad is None else p.grad, p) for p in ps]).cpu()
            codec = str(group["codec"])
            settings, dtype = self._settings(codec, names), dtype_name(ps[0])
            key = (*names, codec)
            side = self.sides.get(key)  # what a codec learns from step to step stays with the group
            if side is None or side.codec.settings != settings:
                side = reference.Group(codec, self.memory, CODECS[codec].wire_id, len(mine), dtype, settings)
            sides[key] = side
            empty = [np.zeros((side.memory.vectors, p.numel()), np.float32) for p in ps]
            side.keep(np.concatenate([self.vec.get(n, e) for n, e in zip(names, empty, strict=True)], axis=1))
            at = reference.Step(self.steps, number, self.rank, self.world)
            payloads: list[Any] = [None] * self.world
            dist.all_gather_object(payloads, side.encode(to_array(mine), at))
            if CODECS[codec].linear:
                total = self.sum_bodies(side, payloads, to_array(mine), at)
                out = reference.from_f32(total, side.dtype)
                if np.isfinite(total).all():
                    side.memory.received(total)
                else:
                    side.take_back(to_array(mine))
            else:
                mean = float(np.float32(1) / np.float32(self.world))
                out = side.decode(payloads, mean)
                if any(reference.header(p)["flags"] & reference.NONFINITE for p in payloads):
                    side.take_back(to_array(mine))
                else:
                    side.received(payloads, mean)
            at_element = 0
            reduced = to_tensor(out, mine.dtype)
            for name, p in zip(names, ps, strict=True):
                part = slice(at_element, at_element + p.numel())
                at_element += p.numel()
                self.vec[name] = side.memory.vec[:, part]
                if name in anywhere:
                    p.grad = shaped(reduced[part], p).to(p.device)
                elif len(self.vec[name]) and (self.memory != "momentum"):
                    self.vec[name][0] += reduced[part].float().numpy()
        self.sides = sides
        self.steps += 1

    def sum_bodies(
        self, side: reference.Group, payloads: list[Any], mine: Array, at: reference.Step
    ) -> Array:
        """As an all-reduce of two ranks does it: the sum is rounded to the body's dtype. Whole numbers, in
        rounds, add up alike in any order."""
        if hasattr(side.codec, "second"):
            if self.world == 1:
                return side.codec.read(payloads[0])
            first = reference.add_bytes(payloads, self.rank)
            dist.all_gather_object(payloads, side.further(first, mine, at))
            return side.codec.read(reference.add_bytes(payloads, self.rank, side.codec.second_at))
        assert self.world <= 2, "the order of a sum over more ranks is the process group's own"
        bodies = [side.codec.read(p) for p in payloads]
        body = side.codec.body_dtype
        total = bodies[0]
        with np.errstate(all="ignore"):
            for other in bodies[1:]:
                total = reference.to_f32(reference.from_f32(total + other, body), body)
        return total
