"""FSDP2's all-gather of parameters, compressed: each rank encodes its shard, the ranks gather the payloads,
and every rank decodes all of them, its own among them, so that all have the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.registry import find_codec, resolve
from sidcomp.config.schedule import Setting
from sidcomp.errors import SidcompError, UnsupportedError
from sidcomp.runtime.block import DTYPES, Block
from sidcomp.runtime.communicator import exchanging


class AllGather:
    """The all-gather of one parameter group, for `FSDPModule.set_custom_all_gather`: see
    `sidcomp.fsdp.compress_all_gather`.

    own: the FSDPParams. encoded: which of them are; the others are gathered as they are.
    """

    def __init__(
        self,
        codec: str,
        parameters: dict[str, Setting],
        seed: int,
        number: int,
        own: Sequence[Any],
        encoded: Sequence[bool],
    ) -> None:
        if not find_codec(codec).whole:
            raise UnsupportedError(
                f"codec {codec!r} does not send a rounded value of every element, and parameters have no "
                'memory for the rest: take a quantized or dense one, such as "int8", "fp8" or "bf16"'
            )
        self._codec, _, self._parameters = resolve(codec, "none", parameters)
        self._seed, self._number, self._own = seed, number, own
        sizes = [p.padded_sharded_param_size.numel() for p in own]  # of the shards, as FSDP pads them
        self._n = sum(sizes)
        self._runs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (offset, elements), encoded?
        at = 0
        for n, is_encoded in zip(sizes, encoded, strict=True):
            runs = self._runs[is_encoded]
            if runs and sum(runs[-1]) == at:
                runs[-1] = runs[-1][0], runs[-1][1] + n
            elif n:
                runs.append((at, n))
            at += n
        self.sent_bytes = self.dense_bytes = 0
        self._error: Exception | None = None  # of encode, which decode raises
        self._plans: dict[torch.dtype, tuple[Any, Block, Block]] = {}
        self._buffers: dict[tuple[int, int], Block] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        if output_tensor.device.type != "cpu":
            raise UnsupportedError("the compressed all-gather runs on CPUs only so far: leave it out on GPUs")
        if not self.fits(input_tensor):
            dense = input_tensor.nbytes * (group.size() - 1)
            self.dense_bytes += dense
            self.sent_bytes += dense
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        received, sent = self.encode(input_tensor, group.rank(), group.size())
        with exchanging(self._label):
            dist.all_gather_into_tensor(received, sent, group=group)
        self.decode(output_tensor, received)

    # ---- its two halves, around the all-gather

    def fits(self, input_tensor: torch.Tensor) -> bool:
        """Whether these are the shards, and some of them are encoded. After reshard_after_forward=N other
        shards are gathered, as they are."""
        return input_tensor.numel() == self._n and bool(self._runs[True])

    @torch.no_grad()
    def encode(self, input_tensor: torch.Tensor, rank: int, world: int) -> list[torch.Tensor]:
        """Encodes this rank's shards. Returns two flat tensors of bytes, to receive and to send."""
        width = input_tensor.element_size()
        coded, exact = self._runs[True], self._runs[False]
        plan, state, work = self._plan(input_tensor.dtype)
        size = plan.payload_bytes
        each = self._bytes_sent(size, width)
        sent, received = self._buffer(1, each), self._buffer(world, each)
        start = address(input_tensor, "the shards to gather", input_tensor.dtype, self._n)
        try:
            plan.encode(
                _core.Buffers(_segments(start, coded, width), state.ptr, work.ptr, sent.ptr),
                step=self._version,
                seed=self._seed,
                group=self._number,
                rank=0 if plan.linear else rank,
                world=1 if plan.linear else world,
            )
        except Exception as e:  # the other ranks wait for what this one sends, and then fail too
            self._error = e
            sent.tensor.zero_()
        raw = input_tensor.view(torch.uint8)
        at = size
        for offset, m in exact:
            sent.tensor[at : at + m * width] = raw[offset * width : (offset + m) * width]
            at += m * width
        self.sent_bytes += each * (world - 1)
        self.dense_bytes += input_tensor.nbytes * (world - 1)
        return [received.tensor, sent.tensor]

    @torch.no_grad()
    def decode(self, output_tensor: torch.Tensor, received: torch.Tensor) -> None:
        """Decodes the shards of all ranks."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        n, width = self._n, output_tensor.element_size()
        world = output_tensor.numel() // n
        coded, exact = self._runs[True], self._runs[False]
        plan = self._plan(output_tensor.dtype)[0]
        size = plan.payload_bytes
        each = self._bytes_sent(size, width)
        payloads = address(received, "what the all-gather received", torch.uint8, world * each)
        start = address(output_tensor, "the gathered parameters", output_tensor.dtype, world * n)
        out = output_tensor.view(torch.uint8)
        for rank in range(world):
            shard = rank * n * width
            into = _core.Buffers(_segments(start + shard, coded, width))
            try:
                plan.decode(payloads + rank * each, size, 1, 1.0, into, step=-1, group=0)
            except SidcompError as e:
                raise type(e)(f"{self._label}, payload of rank {rank}: {e}") from e
            at = rank * each + size
            for offset, m in exact:
                place = shard + offset * width
                out[place : place + m * width] = received[at : at + m * width]
                at += m * width

    @property
    def _version(self) -> int:
        """Grows with each change in place of the shards, by an optimizer (which sees DTensors) or of the
        local tensors. The forward and the backward pass gather the same parameters, and take the same random
        numbers for them."""
        return sum(p.sharded_param._version + p._sharded_local_tensor._version for p in self._own)

    @property
    def _label(self) -> str:
        return f"all-gather of parameter group {self._number}"

    def _plan(self, dtype: torch.dtype) -> tuple[Any, Block, Block]:
        if dtype not in self._plans:
            if dtype not in DTYPES:
                raise UnsupportedError(
                    f"the parameters of one fully_shard call are gathered as {dtype}, not as "
                    f"{', '.join(DTYPES.values())}: give them one dtype"
                )
            n = sum(m for _, m in self._runs[True])
            plan = _core.Plan(self._codec.name, "none", n, DTYPES[dtype], self._parameters)
            cpu = torch.device("cpu")
            self._plans[dtype] = plan, Block(plan.state_bytes, cpu), Block(plan.work_bytes, cpu)
        return self._plans[dtype]

    def _bytes_sent(self, payload_bytes: int, width: int) -> int:
        """The bytes that a rank sends: the payload, and what is not encoded. width: bytes of an element."""
        return payload_bytes + -(-sum(m for _, m in self._runs[False]) * width // 64) * 64

    def _buffer(self, count: int, each: int) -> Block:
        if (count, each) not in self._buffers:
            self._buffers[count, each] = Block(count * each)
        return self._buffers[count, each]


def _segments(start: int, runs: Sequence[tuple[int, int]], width: int) -> "_core.Segments":
    return _core.Segments([start + offset * width for offset, _ in runs], [n for _, n in runs])
