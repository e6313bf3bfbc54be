"""Loopback runs the exchange of many ranks in one process, on numpy arrays or torch tensors."""

import threading
from collections.abc import Sequence
from typing import Any, cast

from sidcomp import core as _core
from sidcomp.config.kinds import is_list, is_whole
from sidcomp.config.registry import find_codec, find_exchange, find_memory
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError, DivergenceError
from sidcomp.standalone.compressor import (
    Array,
    _Block,
    _carried,
    _empty,
    _is,
    _look,
    _numbered,
    _segments,
    _sized,
)


class Loopback:
    """An exchange without a network: `mean = loopback.step(gradients)` is what `world` ranks would do.

    world           the number of ranks, 1 to 4096.
    exchange        a name in `sidcomp.exchanges()`, where `paper` names its source. Its parameters, and those
                    of codec and memory, are further keyword arguments.
    codec, memory   as for a Compressor.
    n               the number of elements of the vectors.
    dtype           of the vectors: "float32" (default), "float16" or "bfloat16".
    seed, group, isa   as for a Compressor.

    After a step `bytes` counts what each rank sent, and `bytes_per_rank` is the most that one of them sent.
    `control_bytes`, which are not included, tell all ranks that every rank succeeded. Before a step
    `stated_bytes` is what the exchange expects to send. `rounds` is the number of rounds. The same gradients,
    seed and step give the same bits here as over a process group. Threads that share a Loopback take turns;
    threads that each have one run in parallel. Raises ArgumentError, ParameterError or UnsupportedError.
    """

    def __init__(
        self,
        world: int,
        exchange: str,
        codec: str,
        n: int,
        *,
        memory: str | None = None,
        dtype: Any = "float32",
        seed: int = 0,
        group: int = 0,
        isa: str | None = None,
        **parameters: Setting,
    ) -> None:
        if not is_whole(world) or not 1 <= world <= 4096:
            raise ArgumentError(f"world={world!r}: give 1 to 4096 ranks")
        _numbered(seed, group)
        _sized(n, isa)
        self.exchange = find_exchange(exchange)
        self.codec = find_codec(codec)
        self.memory = find_memory(self.codec.memory if memory is None else memory)
        self.world, self.n, self.step_number = world, n, 0
        self.dtype = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
        names = (exchange, codec, self.memory.name)
        self.ranks = [
            _core.Exchange(*names, n, self.dtype, rank, world, parameters, isa) for rank in range(world)
        ]
        first = self.ranks[0]
        self.control_bytes = max(r.control_bytes for r in self.ranks)
        self.stated_bytes = max(r.sent_bytes for r in self.ranks) - self.control_bytes
        self.rounds = first.rounds - (1 if self.control_bytes else 0)
        self.bytes = [0] * world
        self._state = [_Block(r.state_bytes) for r in self.ranks]
        self._work = [_Block(r.work_bytes) for r in self.ranks]
        self._wire = [_Block(r.wire_bytes) for r in self.ranks]
        self._seed, self._group = seed, group
        self._turn = threading.Lock()  # guards state, work, wire and the step: the core releases the GIL

    @property
    def bytes_per_rank(self) -> int:
        """The most bytes that a rank sent in the last step, without `control_bytes`; before the first step
        `stated_bytes`."""
        return max(self.bytes) or self.stated_bytes

    def step(self, gradients: Sequence[Array], *, carry: float = 1.0) -> Array:
        """Returns the mean of the ranks' gradients, as every rank gets it. The gradients are not changed.

        gradients: one array per rank, as for a Compressor. carry: as for `Compressor.encode`. The result has
        shape (n,), is of the kind of the first gradient, and has the attributes `bytes_per_rank` and
        `rounds`. Raises the errors that the ranks would raise, such as CorruptPayloadError, and
        DivergenceError if their results differ.
        """
        if not hasattr(gradients, "__len__") or not is_list(gradients):
            raise ArgumentError(f"gradients={gradients!r}: pass a list with an array for each rank")
        if len(gradients) != self.world:
            raise ArgumentError(f"gradients: {len(gradients)} for {self.world} ranks; pass one for each rank")
        out = []
        for i, g in enumerate(gradients):
            view = _look(g, f"gradients[{i}]")
            if view.n != self.n or view.dtype != self.dtype:
                raise ArgumentError(
                    f"gradients[{i}]: has {view.n} elements of {view.dtype}; this Loopback takes {self.n} of "
                    f"{self.dtype}"
                )
            mine, source = _empty(g, view.n, view.dtype), view.holder
            mine[:] = (source.detach() if _is(g, "torch", "Tensor") else source).reshape(-1)
            out.append(mine)
        segments = [_segments(_look(x, "x")) for x in out]
        own = self._exchange(segments, _carried(carry))
        sums = [_core.checksum(s, self.dtype) for s in segments]
        if len(set(sums)) > 1:
            rank = next(r for r, s in enumerate(sums) if s != sums[0])
            raise DivergenceError(f"the result of rank {rank} differs from that of rank 0")
        return cast(Array, self._result(out[0], max(own) or self.stated_bytes))

    def _exchange(self, segments: Sequence[_core.Segments], carry: float) -> list[int]:
        """Replaces the ranks' vectors by their mean. Returns what each rank sent, in bytes."""
        places = zip(segments, self._state, self._work, self._wire, strict=True)
        buffers = [_core.Buffers(s, state.ptr, work.ptr, wire.ptr) for s, state, work, wire in places]
        with self._turn:
            _, sent, control = _core.loopback(
                self.ranks, buffers, step=self.step_number, seed=self._seed, group=self._group, carry=carry
            )
            self.step_number += 1
            self.bytes = own = [a - b for a, b in zip(sent, control, strict=True)]
        return own

    def _result(self, x: Any, nbytes: int) -> Any:
        if not _is(x, "torch", "Tensor"):
            import numpy

            class Result(numpy.ndarray):
                """A plain array with the number of bytes and rounds that it took."""

            x = x.view(Result)
        x.bytes_per_rank, x.rounds = nbytes, self.rounds
        return x

    def _rank(self, rank: int) -> _core.Exchange:
        if not is_whole(rank) or not 0 <= rank < self.world:
            raise ArgumentError(f"rank={rank!r}: give a rank from 0 to {self.world - 1}")
        return self.ranks[rank]

    def residual(self, rank: int) -> Any:
        """A rank's memory: float32, numpy, shape (vectors, n). With two-shot the last vector is what the rank
        keeps for all ranks, in the elements that it sums."""
        import numpy

        x = self._rank(rank)
        out = numpy.zeros((max(x.vectors, 1), self.n), dtype=numpy.float32)
        with self._turn:
            x.residual_out(self._state[rank].ptr, _look(out, "out").ptr)
        return out

    def set_residual(self, rank: int, values: Any) -> None:
        """Sets a rank's memory to float32 values as `residual` returns them. What the last vector holds for
        elements that another rank sums is added to the rank's own residual, so the ranks' total is kept."""
        view, x = _look(values, "values"), self._rank(rank)
        n = max(x.vectors, 1) * self.n
        if view.dtype != "float32" or view.n != n:
            raise ArgumentError(f"values: has {view.n} elements of {view.dtype}; pass {n} of float32")
        with self._turn:
            x.residual_in(self._state[rank].ptr, view.ptr)
