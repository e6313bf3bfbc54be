"""Buffers: what a call works on, in one argument. They keep their segments; a call checks what it needs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from buffers import Block, Rank, Vector
from reference import Step
from sidcomp import _core
from sidcomp.address import address
from sidcomp.errors import ArgumentError
from sidcomp.runtime.block import Block as Memory
from sidcomp.runtime.bucket import Bucket
from torch._subclasses.fake_tensor import FakeTensorMode

N = 100
AT = {"step": 0, "seed": 0, "group": 0, "rank": 0, "world": 1}


def rank_and_vector(codec: str = "topk") -> tuple[Rank, Vector]:
    rank = Rank(_core.Plan(codec, "residual", N, "float32"))
    return rank, Vector(np.arange(1, N + 1, dtype=np.float32))


def test_they_keep_their_segments() -> None:
    """The segments' list belongs to C++: without Python's reference it is still there, and still the same."""
    x = np.arange(N, dtype=np.float32)
    segments = _core.Segments([x.ctypes.data + 4 * i for i in range(N)], [1] * N)
    table, rank = segments.table(), Rank(_core.Plan("none", "none", N, "float32"))
    buffers = _core.Buffers(segments, rank.state.ptr, rank.work.ptr, rank.payload.ptr)
    assert buffers.segments is segments
    del segments
    gc.collect()
    others = [_core.Segments([64] * N, [7] * N) for _ in range(100)]  # whatever was freed is written over
    rank.plan.encode(buffers, **AT)
    assert (rank.payload.data[rank.plan.body_offset :].view(np.float32)[:N] == x).all()
    assert buffers.segments.table() == table and buffers.segments.n == N
    del others


def test_they_say_what_they_hold_and_do_not_change() -> None:
    v = Vector(np.ones(N, np.float32))
    host, device = _core.Buffers(v.segments, 64, 128, 192), _core.DeviceBuffers(256, 3, 64, 128, 192)
    assert (device.table, device.n_segments) == (256, 3)
    for b in (host, device):
        assert (b.state, b.work, b.payload) == (64, 128, 192)
        for name in ("state", "work", "payload"):
            with pytest.raises(AttributeError):
                setattr(b, name, 0)
    alone = _core.Buffers(v.segments)
    assert (alone.state, alone.work, alone.payload) == (0, 0, 0)


@pytest.mark.parametrize("missing", ["state", "work", "payload"])
def test_a_call_names_what_it_needs(missing: str) -> None:
    rank, v = rank_and_vector()
    places = {"state": rank.state.ptr, "work": rank.work.ptr, "payload": rank.payload.ptr}
    lacking = _core.Buffers(v.segments, **(places | {missing: 0}))
    text = f"^{missing} is NULL, but {getattr(rank.plan, missing + '_bytes')} bytes are needed$"
    with pytest.raises(_core.ArgumentError, match=text):
        rank.plan.encode(lacking, **AT)
    with pytest.raises(_core.ArgumentError, match=text):
        rank.plan.next_reduction(1, lacking, **AT)
    assert not rank.state.data.any()
    rank.check()


def test_a_decode_needs_its_segments_only() -> None:
    rank, v = rank_and_vector("none")
    rank.encode(v, Step())
    out = Vector(np.zeros(N, np.float32))
    payload = rank.payload.ptr, rank.plan.payload_bytes, 1, 1.0
    assert rank.plan.decode(*payload, _core.Buffers(out.segments), step=0, group=0) is False
    assert (out.read() == v.read()).all()
    out.check()
    with pytest.raises(_core.ArgumentError, match="payloads is NULL"):
        rank.plan.decode(0, *payload[1:], _core.Buffers(out.segments), step=0, group=0)


@pytest.mark.parametrize("missing", ["state", "work", "payload"])
def test_an_exchange_refuses_what_lacks_something(missing: str) -> None:
    x = _core.Exchange("ring1", "marsit", "residual", 1000, "float32", 0, 2)
    v = Vector(np.ones(1000, np.float32))
    blocks = {"state": Block(x.state_bytes), "work": Block(x.work_bytes), "payload": Block(x.wire_bytes)}
    places = {name: block.ptr for name, block in blocks.items()}
    lacking = _core.Buffers(v.segments, **(places | {missing: 0}))
    at = {"step": 0, "seed": 0, "group": 0}
    with pytest.raises(_core.ArgumentError):
        x.advance(0, lacking, **at)
    with pytest.raises(_core.ArgumentError):
        x.meanwhile(0, lacking, **at)
    with pytest.raises(_core.ArgumentError):
        x.abandon(lacking, **at)
    x.advance(0, _core.Buffers(v.segments, **places), **at)
    for block in blocks.values():
        block.check()


WRONG: list[Callable[[Vector], Any]] = [
    lambda v: None,
    lambda v: v.segments,
    lambda v: [v.segments.table()],
    lambda v: _core.DeviceBuffers(64, 1, 64, 64, 64),
]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_other_types_are_refused(wrong: int) -> None:
    """Among them the buffers of the other memory: a call on the host would read addresses of the device."""
    rank, v = rank_and_vector()
    given = WRONG[wrong](v)
    x = _core.Exchange("ring1", "marsit", "residual", N, "float32", 0, 1)
    at = {"step": 0, "seed": 0, "group": 0}
    payload = rank.payload.ptr, rank.plan.payload_bytes, 1, 1.0
    calls: list[Callable[[], Any]] = [
        lambda: rank.plan.encode(given, **AT),
        lambda: rank.plan.next_reduction(1, given, **AT),
        lambda: rank.plan.decode(*payload, given, step=0, group=0),
        lambda: x.advance(0, given, **at),
        lambda: x.meanwhile(0, given, **at),
        lambda: x.abandon(given, **at),
        lambda: _core.loopback([x], [given], **at),
        lambda: _core.loopback([given], [rank.buffers(v)], **at),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()


def test_the_device_calls_refuse_the_hosts() -> None:
    rank, v = rank_and_vector()
    x = _core.Exchange("ring1", "marsit", "residual", N, "float32", 0, 1)
    host: Any = rank.buffers(v)
    where = {"device": 0, "stream": 0}
    at = {"step": 0, "seed": 0, "group": 0}
    payload = rank.payload.ptr, rank.plan.payload_bytes, 1, 1.0
    calls: list[Callable[[], Any]] = [
        lambda: rank.plan.cuda_encode(host, **AT, stats=0, **where),
        lambda: rank.plan.cuda_next_reduction(1, host, **AT, **where),
        lambda: rank.plan.cuda_decode(*payload, host, step=0, group=0, report=64, **where),
        lambda: x.cuda_advance(0, host, **at, stats=0, report=64, **where),
        lambda: _core.DeviceGroup(rank.plan, host, 0, 64, 64, 0),
        lambda: _core.DeviceGroup(x, host, 64, 64, 0),
    ]
    for one in (rank.plan, x):
        calls.append(lambda one=one: one.cuda_settle(host, **where))  # type: ignore[misc]
        calls.append(lambda one=one: one.cuda_checksum(host, report=64, sum=64, **where))  # type: ignore[misc]
    for call in calls:
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("wrong", [None, [], [1], 64, b"\0" * 16])
def test_they_hold_segments_and_addresses_only(wrong: Any) -> None:
    with pytest.raises(TypeError):
        _core.Buffers(wrong)
    v = Vector(np.ones(N, np.float32))
    if wrong != 64:
        with pytest.raises(TypeError):
            _core.Buffers(v.segments, wrong)
        with pytest.raises(TypeError):
            _core.DeviceBuffers(wrong, 1)


def test_a_loopback_takes_one_of_each_rank() -> None:
    rank, v = rank_and_vector()
    x = _core.Exchange("ring1", "marsit", "residual", N, "float32", 0, 1)
    for exchanges, buffers in (([], []), ([x], []), ([], [rank.buffers(v)]), ([x], [rank.buffers(v)] * 2)):
        with pytest.raises(_core.ArgumentError, match="at least one rank, and Buffers for each rank"):
            _core.loopback(exchanges, buffers, step=0, seed=0, group=0)


# ---- tensors
# ------------------------------------------------------------------------------------------------------------


def freed(first: int) -> torch.Tensor:
    """Elements from `first` on of a tensor whose memory is free, as FSDP frees what it has gathered."""
    x = torch.zeros(first + N)[first:]
    x.untyped_storage().resize_(0)
    return x


def test_the_address_is_where_a_tensor_begins() -> None:
    x = torch.zeros(2, 3, N)
    for part in (x, x[1], x[1, 2], x.flatten()[7:]):
        assert address(part, "x", torch.float32, part.numel()) == part.data_ptr()
    assert address(x[:0], "x", torch.float32, 0, torch.device("cpu")) == 0


@pytest.mark.parametrize(
    "x, wrong",
    [
        (torch.zeros(N, dtype=torch.float64), "x: is torch.float64; pass a plain, contiguous tensor of 100 "),
        (torch.zeros(N, dtype=torch.bfloat16), "is torch.bfloat16"),
        (torch.zeros(N, dtype=torch.int32), "is torch.int32"),
        (torch.zeros(N, device="meta"), "is on meta"),
        (torch.zeros(N - 1), "has 99 elements"),
        (torch.zeros(N + 1), "has 101 elements"),
        (torch.zeros(2 * N)[::2], "is not dense and contiguous"),
        (torch.zeros(10, 10).T, "is not dense and contiguous"),
        (torch.zeros(1).expand(N), "is not dense and contiguous"),
        (torch.zeros(N)._neg_view(), "pending signs"),
        (freed(0), "has no memory for all of its elements"),
        (freed(N), "has no memory for all of its elements"),
        (torch.zeros(N).to_sparse(), "is not dense and contiguous"),
        (FakeTensorMode().from_tensor(torch.zeros(N)), "is a FakeTensor without memory of its own"),
    ],
)
def test_the_core_gets_no_address_of_another_tensor(x: torch.Tensor, wrong: str) -> None:
    with pytest.raises(ArgumentError, match=wrong):
        address(x, "x", torch.float32, N)


def test_the_core_gets_no_address_of_another_device() -> None:
    with pytest.raises(ArgumentError, match=r"is on cpu; pass a plain, contiguous tensor .* on cuda:0"):
        address(torch.zeros(N), "x", torch.float32, N, torch.device("cuda:0"))


def test_a_part_of_memory_lies_inside() -> None:
    whole = Memory(256)
    assert whole.part(128, 128).ptr == whole.ptr + 128
    with pytest.raises(ArgumentError, match="has 127 elements; pass a plain, contiguous tensor of 128"):
        whole.part(129, 128)


def test_a_bucket_takes_no_other_buffer_than_it_was_made_for() -> None:
    bucket = Bucket(["a.weight"], [(N,)], torch.zeros(N))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    first, second = torch.zeros(N), torch.zeros(N)
    assert [bucket.open(x, future, 1) for x in (first, first, second)] == [True, False, True]
    for wrong in (torch.zeros(N - 1), torch.zeros(N, dtype=torch.float64), torch.zeros(2 * N)[::2]):
        with pytest.raises(ArgumentError, match=r"^the gradients of a\.weight: "):
            bucket.open(wrong, future, 1)
        assert bucket.ptr == second.data_ptr() and bucket.buffer is second
    bucket.let_go()
    assert bucket.ptr is None and bucket.fits(first)
    assert bucket.open(second, future, 1)


# ---- places beyond 2^31 and 2^32

UNIT = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("units", [(1 << 11) + 1, (1 << 12) + 1])
@pytest.mark.parametrize("more", [{}, {"values": "f16", "indices": "packed"}])
def test_elements_far_away_keep_their_places(more: dict[str, Any], units: int) -> None:
    """All segments but the last are the same zeros, so that the vector needs no memory."""
    rank = Rank(_core.Plan("topk", "none", UNIT * units, "float32", {"density": 2e-7, **more}))
    zeros, last = np.zeros(UNIT, np.float32), np.zeros(UNIT, np.float32)
    segments = _core.Segments([zeros.ctypes.data] * (units - 1) + [last.ctypes.data], [UNIT] * units)
    last[5], last[UNIT - 1] = 3.0, -7.0
    buffers = _core.Buffers(segments, rank.state.ptr, rank.work.ptr, rank.payload.ptr)
    rank.plan.encode(buffers, **AT)
    last[:] = 0
    size = rank.plan.payload_bytes
    rank.plan.decode(rank.payload.ptr, size, 1, 1.0, _core.Buffers(segments), step=0, group=0)
    assert not zeros.any() and last.nonzero()[0].tolist() == [5, UNIT - 1]
    assert (last[5], last[UNIT - 1]) == (3.0, -7.0)
