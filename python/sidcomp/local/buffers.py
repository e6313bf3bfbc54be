"""The module's buffers, such as the statistics of a BatchNorm, which all ranks have alike after an exchange.

The ranks compare a digest of each, and what differs is taken from one rank. So tables that never change,
which may be gigabytes, do not travel. Whether a buffer has changed is only to be seen in its bytes:
BatchNorm, for one, writes its statistics without a new version of the tensor.
"""

import functools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp import notices
from sidcomp.errors import CheckpointError, UnsupportedError
from sidcomp.local.shards import own_part
from sidcomp.local.vectors import CALL, broadcast, bytes_of, copy_from
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.engine import Engine

_ENTRY = struct.Struct("<IQ?")  # the kind of a buffer, its digest, and whether it is finite
_AT_ONCE = 1 << 20  # words of a digest on a device, which takes 8 bytes for each


class Buffers:
    """Those that the module has when the run begins; later ones stay the rank's own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._names = list(self.present())
        self._seen: dict[str, tuple[int, bool]] = {}  # digests, and whether those were finite
        self._told: set[str] = set()
        for name, x in self.present().items():
            if x.layout is not torch.strided or x.is_quantized:
                kind = "quantized" if x.is_quantized else "sparse"
                raise UnsupportedError(
                    f"{CALL}: buffer {name!r} is {kind}, and cannot be sent: keep it outside of the module's "
                    "buffers, or as dense tensors"
                )

    def present(self) -> dict[str, torch.Tensor]:
        return {name: own_part(x.detach()) for name, x in self._module.named_buffers()}

    @torch.no_grad()
    def take(self, new: Mapping[str, torch.Tensor]) -> None:
        """Copies these values into the module's, but for those of another shape by now."""
        own = self.present()
        for name, x in new.items():
            if name in own and same_kind(x, own[name]):
                own[name].copy_(x)

    def share(self, engine: Engine, group: dist.ProcessGroup) -> None:
        """Makes the module's the same on all ranks of a group."""
        own = self.present()
        new = self.agree(own, engine, lambda x, source: copy_from(source, x, group))
        self.take({name: x for name, x in new.items() if x is not own[name]})

    @torch.no_grad()
    def agree(
        self,
        own: Mapping[str, torch.Tensor],
        engine: Engine,
        send: Callable[[torch.Tensor, int], None],
        order: Sequence[int] = (),
    ) -> dict[str, torch.Tensor]:
        """Returns tensors that are the same on all ranks: those of `own` that are, and for the others copies
        of one rank's. That is rank 0, or one with fewer that are not finite: after a NaN in a batch they
        would never be finite again. Those whose shapes differ are left out. All ranks call it at the same
        point.

        send(x, source): gives the other ranks the tensor of rank `source`. order: by rank, which goes before
        all that: the source is one with the least of these.
        """
        exchange = engine.exchange
        assert exchange is not None
        if not self._names or exchange.world == 1:
            return dict(own)
        with exchanging("comparing the ranks' buffers"):
            told = exchange.gather_bytes(self._entries(own))
        engine.control += len(told) * len(told[0])
        of_ranks = zip(*(_ENTRY.iter_unpack(one) for one in told), strict=True)
        entries = dict(zip(self._names, of_ranks, strict=True))
        apart = [name for name, of in entries.items() if len({kind for kind, *_ in of}) > 1]
        self._say(apart, engine.speaker)
        fit = {name: of for name, of in entries.items() if name in own and name not in apart}
        wrong = [sum(not of[r][2] for of in fit.values()) for r in range(exchange.world)]
        source = min(range(exchange.world), key=lambda r: (order[r] if order else 0, wrong[r]))
        new = {name: own[name].clone() for name, of in fit.items() if len(set(of)) > 1}
        broadcast(list(new.values()), lambda x: send(x, source))
        # In a ring a broadcast takes half of what an all-reduce takes.
        engine.count_reduced(sum(x.nbytes for x in new.values()) / 2)
        return {**{name: own[name] for name in fit}, **new}

    def _entries(self, own: Mapping[str, torch.Tensor]) -> bytes:
        """What this rank says of each buffer; of one that it does not have any more, zeros."""
        here = {name: own[name] for name in self._names if name in own}
        sums = dict(zip(here, digests(list(here.values())), strict=True))
        changed = [name for name in here if self._seen.get(name, (-1,))[0] != sums[name]]
        finite = _fetched([_finite(here[name]) for name in changed])
        self._seen.update({name: (sums[name], one) for name, one in zip(changed, finite, strict=True)})
        none = _ENTRY.pack(0, 0, True)
        return b"".join(
            _ENTRY.pack(_kind(here[name]), *self._seen[name]) if name in here else none
            for name in self._names
        )

    def _say(self, apart: Sequence[str], rank: int) -> None:
        for name in (name for name in apart if name not in self._told):
            self._told.add(name)
            notices.warn(
                f"buffer {name!r} has another shape on some ranks, and stays each rank's own: if all need "
                "the same values, give it the same shape on every rank",
                rank,
            )


def persistent(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong into a checkpoint: others, such as a cache that has grown, are made anew."""
    left = {
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules()
        for name in getattr(inner, "_non_persistent_buffers_set", ())
    }
    return {name: x for name, x in module.named_buffers() if name not in left}


def check_saved(own: Mapping[str, torch.Tensor], saved: Mapping[str, object]) -> None:
    """Raises CheckpointError unless these buffers can take the values of a file."""
    for name, x in own.items():
        if not same_kind(saved.get(name), x):
            raise CheckpointError(f"the files have no buffer {name!r} like this module's")


def same_kind(x: object, like: torch.Tensor) -> bool:
    """Whether it is a tensor of the same shape and dtype, with values."""
    if not isinstance(x, torch.Tensor):
        return False
    kinds = [(t.shape, t.dtype, t.layout, t.is_meta) for t in (x, like)]
    return kinds[0] == kinds[1]


def _kind(x: torch.Tensor) -> int:
    return zlib.crc32(repr((tuple(x.shape), x.dtype)).encode()) or 1


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64 bits of the bytes of each tensor. The host waits once for each device."""
    there = iter(_fetched([device_digest(x) for x in tensors if not x.is_cpu]))
    return [_host_digest(x) if x.is_cpu else next(there) % 2**64 for x in tensors]


def _host_digest(x: torch.Tensor) -> int:
    data = bytes_of(x)
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    return _core.delta_checksum(view, 0, len(data)) if len(data) else 0


def device_digest(x: torch.Tensor) -> torch.Tensor:
    """The sum of words of up to 32 bits times random keys, modulo 2^64: for two tensors that differ it is the
    same for one choice of keys in 2^33 at most."""
    words = bytes_of(x).view({1: torch.uint8, 2: torch.int16}.get(x.element_size(), torch.int32))
    total, keys = torch.zeros((), dtype=torch.int64, device=x.device), _keys(x.device)
    for part in words.split(_AT_ONCE):  # type: ignore[no-untyped-call]
        total = total * _ODD + (part * keys[: len(part)]).sum()
    return total


_ODD = 0x2545F4914F6CDD1D


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    draw = torch.Generator(device="cpu").manual_seed(0)
    most, size, kind = 2**63 - 1, (_AT_ONCE,), torch.int64
    return torch.randint(-most, most, size, generator=draw, dtype=kind, device="cpu").to(device)


def _finite(x: torch.Tensor) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return torch.ones((), dtype=torch.bool, device=x.device)
    return (x.float() if x.element_size() == 1 else x).isfinite().all()


def _fetched(scalars: list[torch.Tensor]) -> list[Any]:
    """The values of tensors of one element. The host waits once for each device."""
    found: dict[int, Any] = {}
    for device in {x.device for x in scalars}:
        here = [i for i, x in enumerate(scalars) if x.device == device]
        found.update(zip(here, torch.stack([scalars[i] for i in here]).tolist(), strict=True))
    return [found[i] for i in range(len(scalars))]
