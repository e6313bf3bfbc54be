"""Reduce-scatters and all-gathers of a model that is sharded, such as FSDP2's: the group encodes each of them
itself, and no engine takes part.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.doors.backend.all_reduce import AllReduces
from sidcomp.doors.backend.configuration import REPLICAS, SHARDS, Configuration
from sidcomp.doors.backend.idle_check import idle_check
from sidcomp.doors.backend.recognition import Call, Program, whose
from sidcomp.doors.backend.works import Decoding
from sidcomp.doors.backend.wrapper import passed_on
from sidcomp.doors.fsdp import parameter_groups
from sidcomp.doors.fsdp.all_gather import AllGather
from sidcomp.doors.fsdp.reduce_scatter import ReduceScatter
from sidcomp.errors import UnsupportedError
from sidcomp.runtime.block import DTYPES


class ProcessGroup(AllReduces):
    """The process group of the backend "sidcomp". It holds an inner one, which does everything else."""

    def __init__(
        self, inner: dist.ProcessGroup, inner_config: str, configuration: Configuration, rank: int, size: int
    ) -> None:
        super().__init__(inner, inner_config, configuration, rank, size)
        self._compresses_shards: bool | None = None  # not known before it has its name
        self.gathers: weakref.WeakKeyDictionary[Any, AllGather] = weakref.WeakKeyDictionary()
        self._gathered = 0  # the number of the next one
        scatters = configuration.reduce_scatter
        self._lossless = scatters is not None and scatters.lossless
        self._works: dict[ReduceScatter, Decoding] = {}  # reduce-scatters that nobody has waited for
        parameter_groups.watch()

    def _allowed_shards(self) -> bool:
        """Whether this group is one over which a model is sharded, by its name."""
        if self._compresses_shards is None:
            self._compresses_shards = self._named(REPLICAS + SHARDS, "reduce-scatters and all-gathers")
        return self._compresses_shards

    # ---- reduce-scatter
    # ------------------------------------------------------------------------------------------------

    def _scatter(self, output: torch.Tensor, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """Returns the Work of a compressed reduce-scatter, or None if it passes untouched."""
        if self._passes_by(self._compresses_shards):
            return None
        asked = self.configuration.reduce_scatter is not None
        average = self._averages(x, arguments[0] if arguments else named.get("opts", named.get("op")))
        if average is None or torch._C._current_graph_task_id() == -1:
            return None
        if whose() is None:
            self._leave(x, self._allowed_shards if asked else lambda: False)
            return None
        self._settle(x.device)
        if not asked:
            idle_check.met(
                "the model is sharded, so its gradients are reduce-scattered, and the backend compresses "
                "only all-reduces: ask for reduce_scatter=int8, or use sidcomp.fsdp.compress for HSDP",
                self,
            )
            return None
        if (
            self._compresses_shards is False
            or self._lossless
            or output.dtype != x.dtype
            or output.numel() * self.size() != x.numel()
        ):
            return None
        if x.nbytes < self._least_bytes:
            self._small("reduce-scatters")
            return None
        idle_check.over = True
        if not x.is_contiguous() or not output.is_contiguous():
            self._warn(
                "scatter not contiguous",
                "passes reduce-scatters of tensors that are not contiguous uncompressed",
            )
            return None
        if not self._allowed_shards():
            return None
        self._on_cpu(x, "reduce_scatter")
        noted = self._note(Call(x.numel(), x.dtype, x.device, average, True), x)
        if noted is None:
            return None
        program, index = noted
        one = program.scatters[index]
        try:
            if one in self._works:
                self._works[one].wait()
            received, sent = one.encode(x, output.numel(), self.rank(), self.size())
            exchange = self.inner.alltoall_base(received, sent, [], [])
        except Exception:
            self._passes.give_up()
            raise

        def decode() -> None:
            self._works.pop(one, None)
            one.decode(output, average)

        self._works[one] = work = Decoding(exchange, decode, output)
        return work

    def _on_cpu(self, x: torch.Tensor, what: str) -> None:
        if x.device.type != "cpu":
            raise UnsupportedError(
                f"{what}= is for tensors on the CPU so far, and this one is on {x.device}: leave it out"
            )

    # ---- all-gather
    # ------------------------------------------------------------------------------------------------

    def _gather(self, output: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Returns the Work of an all-gather of rounded parameters, or None if it passes untouched."""
        coding = self.configuration.all_gather
        if self.size() == 1 or self._passes_by(self._compresses_shards):
            return None
        found = parameter_groups.gathering()
        if found is not None:
            self._settle(x.device)
        if (
            coding is None
            or output.nbytes < self._least_bytes
            or output.dtype != x.dtype
            or not (output.is_contiguous() and x.is_contiguous())
        ):
            return None
        if found is None and parameter_groups.gathering_exactly():
            self._say(
                "gathered",
                "gathers some parameters as they are, because a forward pass has run on what the program "
                "itself had gathered by unshard()",
            )
        if found is None or not self._allowed_shards():
            return None
        if x.dtype not in DTYPES:
            self._warn(
                "dtypes",
                f"gathers parameters as {x.dtype}, as they are: give those of one fully_shard call one dtype",
            )
            return None
        self._on_cpu(x, "all_gather")
        group, known = found
        if group not in self.gathers:
            self.gathers[group] = coding.gather(group, self._gathered)
            self._gathered += 1
        one = self.gathers[group]
        if not one.fits(x):
            return None
        self._say(
            "gathers",
            f"rounds the parameters that FSDP2 gathers for forward and backward passes to {coding.codec}. "
            "Shards and checkpoints stay as they are.",
        )
        received, sent = one.encode(x, self.rank(), self.size())
        exchange = getattr(self.inner, _GATHER)(received, sent)
        known.rounded = True
        return Decoding(exchange, lambda: one.decode(output, received), output)

    # ---- what it learns
    # ------------------------------------------------------------------------------------------------

    def _came(self, program: Program) -> None:
        if program.steps == 1 and program.scatters:
            self._announce_scatters(program)

    def _forget(self, program: Program) -> None:
        super()._forget(program)
        for one in program.scatters.values():
            self._works.pop(one, None)

    def _announce_scatters(self, program: Program) -> None:
        assert self.configuration.reduce_scatter is not None
        made = program.scatters.values()
        sent, dense = (sum(getattr(x, name) for x in made) for name in ("sent_bytes", "dense_bytes"))
        notices.say(
            f"process group {self.group_desc!r} compresses {len(made)} reduce-scatters of each backward pass "
            f"({dense / 1e6:.2f} MB) with {self.configuration.reduce_scatter.codec}: {sent / 1e6:.2f} MB, "
            f"{sent / dense:.2f} of it.",
            self.rank(),
        )


def _tried(name: str, compress: Callable[..., Any]) -> Callable[..., Any]:
    passing = passed_on(name)

    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        work = compress(self, *arguments, **named) if len(arguments) > 1 else None
        return passing(self, *arguments, **named) if work is None else work

    call.__name__ = name
    call.__doc__ = "Compresses the call, or passes it to the inner group."
    return call


_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
for _name in ("_reduce_scatter_base", "reduce_scatter_single"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _tried(_name, ProcessGroup._scatter))
for _name in ("_allgather_base", "all_gather_single"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _tried(_name, ProcessGroup._gather))
