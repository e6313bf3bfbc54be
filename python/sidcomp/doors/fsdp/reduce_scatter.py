"""FSDP2's reduce-scatter, compressed: each rank encodes its gradient of every shard, the ranks exchange the
payloads in one all-to-all, and the owner of a shard sums what it has received, in float32 and in rank order.
"""

import logging
import reprlib
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.grouping import shorten
from sidcomp.config.registry import resolve
from sidcomp.config.schedule import Setting
from sidcomp.doors.fsdp.units import Unit
from sidcomp.errors import CheckpointError, ExchangeError, SetupError, SidcompError, UnsupportedError
from sidcomp.runtime.block import DTYPES, Block
from sidcomp.runtime.checkpoint_reader import unlike
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.plain_data import count

logger = logging.getLogger("sidcomp")


class Passes:
    """The backward passes of one model, which its reduce-scatters share. A failure on one rank fails the
    backward pass on all ranks, when it ends. Until then a rank that has failed goes on, because the others
    wait for it."""

    def __init__(self) -> None:
        self._task = -1  # autograd's number of the backward pass in progress
        self._open = False
        self._failure: Exception | None = None
        self._of: list[tuple[ReduceScatter, dist.ProcessGroup]] = []  # the reduce-scatters of this pass

    def take(self, one: "ReduceScatter", group: dist.ProcessGroup) -> None:
        task = torch._C._current_graph_task_id()
        if not self._open or (task != -1 and task != self._task):
            self._task, self._open, self._failure, self._of = task, True, None, []
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._of.append((one, group))

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _finish(self) -> None:
        """The end of the backward pass: raises on all ranks if it has failed on one."""
        failure, of = self._failure, self._of
        self._open, self._failure, self._of = False, None, []
        for group in dict.fromkeys(group for _, group in of):
            mine = group.size() if failure is None else group.rank()
            first = torch.tensor([mine], dtype=torch.int64, device="cpu")
            with exchanging("the end of a backward pass with reduce-scatters"):
                dist.all_reduce(first, dist.ReduceOp.MIN, group)
            if int(first) < group.size() and failure is None:
                failure = ExchangeError(
                    f"a reduce-scatter has failed on rank {int(first)} of its group: look at the output of "
                    "that rank. The gradients of this backward pass do not count"
                )
        if failure is not None:
            for one, _ in of:
                one.forget()
            raise failure


class ReduceScatter:
    """The reduce-scatter of one parameter group, for `FSDPModule.set_custom_reduce_scatter`: see
    `sidcomp.fsdp.compress_reduce_scatter`.

    It keeps one memory for each shard, because it encodes each on its own: with memory="residual" 4 bytes for
    each element of the whole parameter group, on every rank.
    """

    def __init__(
        self,
        codec: str,
        memory: str | None,
        parameters: dict[str, Setting],
        seed: int,
        number: int,
        passes: Passes,
        unit: Unit,
    ) -> None:
        """passes: of its model. unit: the parameter group."""
        self._passes, self._unit = passes, unit
        self._codec, self._memory, self._parameters = resolve(codec, memory, parameters)
        if self._codec.linear and self._codec.reductions:
            raise UnsupportedError(
                f"{self._codec.name} takes several all-reduces, and a reduce-scatter has one: choose another"
            )
        keeps = _core.Plan(self._codec.name, self._memory.name, 1, "float32", self._parameters).vectors
        if keeps and not self._memory.traits.intersection(("feedback", "momentum")):
            raise UnsupportedError(
                f"memory {self._memory.name!r} needs what all ranks received, and a reduce-scatter gives "
                "each a shard: take memory='residual'"
            )
        self._seed, self._number = seed, number
        self.step = 0
        self.sent_bytes = self.dense_bytes = 0
        self._plan: Any = None
        self._members: tuple[int, ...] | None = None  # the parameters that come; None: not known
        self._error: Exception | None = None  # of encode, which decode raises
        self._waiting: dict[str, Any] | None = None  # a loaded state, until sizes are known

    # ---- what FSDP calls

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(
                f"the reduce-scatter is asked for {op}: leave set_gradient_divide_factor out, and scale the "
                "loss"
            )
        if output_tensor.device.type != "cpu":
            raise UnsupportedError(
                "the compressed reduce-scatter runs on CPUs only so far: on GPUs use HSDP and "
                "sidcomp.fsdp.compress, which compresses the average over replicas"
            )
        received, sent = self.encode(input_tensor, output_tensor.numel(), group.rank(), group.size())
        self._passes.take(self, group)
        with exchanging(self._label):
            dist.all_to_all_single(received, sent, group=group)
        try:
            self.decode(output_tensor, op == dist.ReduceOp.AVG)
        except Exception as e:
            output_tensor.fill_(float("nan"))
            self._passes.fail(e)

    # ---- its two halves, around the all-to-all

    @torch.no_grad()
    def encode(self, input_tensor: torch.Tensor, n: int, rank: int, world: int) -> list[torch.Tensor]:
        """Encodes the gradients of `world` shards of n elements. Returns two flat tensors of bytes, to
        receive and to send, of which each rank has an equal part. If the codec fails, what is sent makes
        `decode` fail on all ranks."""
        dtype = input_tensor.dtype
        if self._plan is None:
            self._allocate(n, dtype, world)
        elif (dtype, world) == self._of[1:]:
            self._follow(n)
        if (n, dtype, world) != self._of:
            raise SetupError(
                f"the gradients of {self._unit.label()} changed their size or dtype. If parameters sometimes "
                "have no gradient, call set_reduce_scatter_unused_params(True) before the first backward "
                "pass; otherwise call sidcomp.fsdp.compress_reduce_scatter again, which starts without "
                "residuals"
            )
        self._rank = rank
        plan, size = self._plan, self._plan.payload_bytes
        start, width = address(input_tensor, "the gradients", dtype, world * n), n * dtype.itemsize
        # The owner sums, so a codec whose payloads are summed must not divide by the number of ranks.
        place = {"rank": 0, "world": 1} if plan.linear else {"rank": rank, "world": world}
        try:
            for shard in range(world):
                buffers = _core.Buffers(
                    _core.Segments([start + shard * width], [n]),
                    self._states.ptr + shard * self._apart,
                    self._work.ptr,
                    self._sent.ptr + shard * size,
                )
                stats = plan.encode(buffers, step=self.step, seed=self._seed, group=self._id(shard), **place)
                if stats.nonfinite and plan.vectors:
                    plan.forget(self._states.ptr + shard * self._apart)  # or it would send NaN from now on
        except Exception as e:
            self._error = self._error or e
        if self._error is not None:  # the other ranks wait for what this one sends
            self._sent.tensor.zero_()
        self.sent_bytes += size * (world - 1)
        self.dense_bytes += width * (world - 1)
        return [self._received.tensor, self._sent.tensor]

    @torch.no_grad()
    def decode(self, output_tensor: torch.Tensor, average: bool) -> None:
        """Writes the sum or the average of what has been received to this rank's shard."""
        n, dtype, world = self._of
        scale = 1 / world if average else 1.0
        into = _core.Buffers(_core.Segments([address(output_tensor, "the shard", dtype, n)], [n]))
        at = {"step": self.step, "group": self._id(self._rank)}
        error, self._error = self._error, None
        self.step += 1
        if error is not None:
            raise error
        try:
            self._plan.decode(self._received.ptr, self._plan.payload_bytes, world, scale, into, **at)
        except SidcompError as e:
            rank = getattr(e, "culprit", None)
            who = "" if rank is None else f", payload of rank {rank}"
            raise type(e)(f"{self._label}{who}: {e}") from e

    def forget(self) -> None:
        """Clears the residuals, which have the gradient of a step that does not count."""
        for shard in range(self._of[2]) if self._plan.vectors else ():
            self._plan.forget(self._states.ptr + shard * self._apart)

    @property
    def _label(self) -> str:
        return f"reduce-scatter of parameter group {self._number}"

    def _id(self, shard: int) -> int:
        """Tells the payloads of shards apart, and their random numbers."""
        return self._number << 12 | shard

    def _allocate(self, n: int, dtype: torch.dtype, world: int) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(f"gradients are {dtype}, not {', '.join(DTYPES.values())}")
        plan = _core.Plan(self._codec.name, self._memory.name, n, DTYPES[dtype], self._parameters)
        self._apart = -(-plan.state_bytes // 64) * 64
        cpu = torch.device("cpu")
        self._states = Block(world * self._apart, cpu)
        self._work = Block(plan.work_bytes, cpu)
        self._sent = Block(world * plan.payload_bytes, cpu)
        self._received = Block(world * plan.payload_bytes, cpu)
        self._plan, self._of, self._members = plan, (n, dtype, world), self._coming(n)
        if self._waiting is not None:
            try:
                self.load_state_dict(self._waiting)
            except CheckpointError as e:
                self._error, self.step, self._waiting = e, self._waiting["step"], None

    def _coming(self, n: int) -> tuple[int, ...] | None:
        """The parameters that bring n elements to each shard: all that are not frozen, or it is not known."""
        trainable = tuple(self._unit.trainable)
        return trainable if sum(self._unit.sizes[i] for i in trainable) == n else None

    def _follow(self, n: int) -> None:
        """Makes the plan anew if parameters were frozen or released. The others keep their residuals."""
        was, now = self._members, self._coming(n)
        if now is None or now == was:
            return
        if was is None and (n == self._of[0] or self._plan.vectors):
            if n == self._of[0]:
                self._members = now
            return
        kept, (_, dtype, world) = self.state_dict()["residuals"], self._of
        self._allocate(n, dtype, world)
        if not self._plan.vectors or was is None:
            return
        sizes, names = self._unit.sizes, self._unit.names
        of = dict(zip(was, kept.split([sizes[i] for i in was], 2), strict=True))
        none = torch.zeros(world, self._plan.vectors, max(sizes), dtype=torch.float32, device="cpu")
        self._put(torch.cat([of.get(i, none[:, :, : sizes[i]]) for i in now], 2))
        if gone := [names[i] for i in was if i not in now and bool(of[i].any())]:
            logger.warning("%s: dropped the residuals of frozen %s", self._label, shorten(gone))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, for this rank: float32 of shape (shards, vectors, elements of a shard)."""
        if self._plan is None:
            none = torch.zeros(0, dtype=torch.float32, device="cpu")
            return self._waiting or {"step": 0, "residuals": none, **self._whose()}
        n, _, world = self._of
        out = torch.zeros(world, self._plan.vectors, n, dtype=torch.float32, device="cpu")
        for shard in range(world) if self._plan.vectors else ():
            self._plan.residual_out(self._states.ptr + shard * self._apart, self._place(out[shard]))
        return {"step": self.step, "residuals": out, **self._whose()}

    def _whose(self) -> dict[str, Any]:
        """Whose state it is: that of another rank, parameter group, codec or memory has no meaning here."""
        return {
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "number": self._number,
            "codec": self._codec.name,
            "memory": self._memory.name,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Raises CheckpointError."""
        if not isinstance(saved, dict) or not isinstance(saved.get("residuals"), torch.Tensor):
            raise CheckpointError(
                f'the state of a reduce-scatter is {reprlib.repr(saved)}, and needs "step" and "residuals": '
                "load what its state_dict() returned"
            )
        count(saved.get("step"), '"step" of a reduce-scatter')
        for key, mine in self._whose().items():
            its = saved.get(key)
            if type(its) is not type(mine) or its != mine:
                raise CheckpointError(
                    f'"{key}" of the state of a reduce-scatter is {reprlib.repr(its)}, and here it is '
                    f"{mine!r}: every rank loads what it has saved itself, each parameter group its own, "
                    "with the codec and the memory that it was saved with"
                )
        if self._plan is None:
            self._waiting = saved
            return
        n, _, world = self._of
        values = saved["residuals"]
        like = torch.zeros((), dtype=torch.float32, device="cpu").expand(world, self._plan.vectors, n)
        if values.shape != (0,) and (found := unlike(values, like) or _infinite(values)):
            raise CheckpointError(
                f"residuals are {found}, and this reduce-scatter has {world} shards, {self._plan.vectors} "
                f"vectors and {n} elements: load the state of this rank, this mesh and this codec"
            )
        self._put(values.detach().to("cpu", torch.float32).resolve_neg().contiguous())
        self.step = saved["step"]
        self._waiting = None

    def _put(self, values: torch.Tensor) -> None:
        """values: for each shard, or none."""
        for shard in range(len(values)) if values.numel() else ():
            self._plan.residual_in(self._states.ptr + shard * self._apart, self._place(values[shard]))

    def _place(self, residual: torch.Tensor) -> int:
        return address(residual, "the residual of a shard", torch.float32, self._plan.vectors * self._of[0])


def _infinite(values: torch.Tensor) -> str:
    return "" if bool(values.isfinite().all()) else "a tensor with NaN or Inf, which no memory keeps"
