"""Deltas of weights on a device: the CPU's messages, byte for byte; only a sound one changes weights.

Where there is no GPU, tests/cuda/test_emulated.py runs this file on the CPU emulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import delta_reference as ref
import numpy as np
import pytest
import torch
from kernels import EMULATED, why_not
from sidcomp import _core, core, delta
from sidcomp.delta import coding, device, tensors
from sidcomp.delta.device import DeviceVector
from sidcomp.delta.message import Block, parse
from sidcomp.delta.tensors import leaves
from sidcomp.errors import DeltaError
from test_delta_api import PRESENT, changed, equal, random_bits, tied
from test_delta_blocks import KINDS, pair
from test_delta_chain import Fault, move
from test_delta_message import copied, mutations, same, some_weights

DEVICE = torch.device("cpu") if EMULATED else torch.device("cuda", 0)
GUARD = 64  # elements around each segment
Tensor = torch.Tensor
Weights = dict[str, Tensor]


if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


def there(weights: Weights) -> Weights:
    """On the device; what is the same memory stays so."""
    held = {x.data_ptr(): x.to(DEVICE, copy=True) for x in weights.values()}
    return {name: held[x.data_ptr()] if x.numel() else x.to(DEVICE) for name, x in weights.items()}


def here(weights: Weights) -> Weights:
    return {name: x.cpu() for name, x in weights.items()}


@contextmanager
def by_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "usable", lambda x: False)
        yield


def made(old: Weights, new: Weights, block: int = _core.delta_block) -> bytearray:
    return coding.make(leaves(old, "old"), leaves(new, "new"), coding.Stamp(), 2, block)


# ---- the kernels ---------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, ...]] = {
    "one": (),
    "aligned": (16_384, 8_192, 32_768),  # and the rest
    "odd": (1, 8_191, 3, 8_193, 17, 1),
    "tiny": (1,) * 700,
}


class Cut:
    """Elements on the device, in segments between guards, `shift` elements after a multiple of 16 bytes."""

    def __init__(self, kind: int, elements: Any, layout: str, shift: int) -> None:
        sizes = list(LAYOUTS[layout])
        while sum(sizes) >= len(elements) and sizes:
            sizes.pop()
        sizes.append(len(elements) - sum(sizes))
        width, at, self.places = ref.width(kind), GUARD + shift, []
        for size in sizes:
            self.places.append((at, size))
            at += -(-size // 16) * 16 + GUARD
        self.raw = np.full(at * width, 0xA5, np.uint8)
        self.elements(self.raw, width, elements)
        self.held = torch.from_numpy(self.raw).to(DEVICE, copy=True)
        views = [self.held[p * width : (p + n) * width] for p, n in self.places]
        self.vector = DeviceVector(kind, views, sizes)
        self.dtype, self.width = elements.dtype, width

    def elements(self, raw: Any, width: int, new: Any = None) -> Any:
        got, done = [], 0
        for p, n in self.places:
            own = raw[p * width : (p + n) * width]
            if new is not None:
                own[:] = new[done : done + n].view(np.uint8)
            got.append(own)
            done += n
        return np.concatenate(got)

    def read(self) -> Any:
        """The elements; the guards must be as they were."""
        raw = self.held.cpu().numpy().copy()
        got = self.elements(raw, self.width).view(self.dtype)
        self.elements(raw, self.width, np.zeros(len(got), self.dtype))
        expected = self.raw.copy()
        self.elements(expected, self.width, np.zeros(len(got), self.dtype))
        assert (raw == expected).all(), "a write outside of the segments"
        return got


def blocks(kind: int, n: int, block: int) -> list[Block]:
    return [Block(kind, at, min(block, n - at)) for at in range(0, n, block)]


def expected_changes(kind: int, old: Any, new: Any) -> list[tuple[int, int]]:
    sign, z = ref.steps(old.astype(np.int64), new.astype(np.int64), kind)
    return [(int(i), int(2 * z[i] + sign[i])) for i in np.flatnonzero(old != new)]


def listed(changes: Tensor) -> list[tuple[int, int]]:
    pairs = changes.numpy().view(np.uint32).reshape(-1, 2)
    return [(int(at), int(step)) for at, step in pairs]


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.24, 0.6, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_finds(kind: int, layout: str, share: float) -> None:
    """Changes in order, their number and the checksum; blocks of any size, segments that begin anywhere."""
    for n, block, shift in ((70_001, 1 << 22, 0), (40_000, 16_384, 0), (9_000, 4_095, 1), (900, 100, 3)):
        old, new = pair(kind, n, share, "any" if n % 2 else "few", n)
        was, now = Cut(kind, old, layout, shift if layout == "odd" else 0), Cut(kind, new, layout, 0)
        some = blocks(kind, n, block)
        for found, b in zip(now.vector.find(was.vector, some), some, strict=True):
            one, two = old[b.first : b.first + b.n], new[b.first : b.first + b.n]
            want = expected_changes(kind, one, two)
            assert found.block.checksum == ref.checksum(two.tobytes()) and found.many == len(want)
            if len(want) > _core.delta_room(some[0].n):
                assert not len(found.changes)
                continue
            got = listed(found.changes)
            runs = found.runs.numpy().view(np.uint32).reshape(-1, 2)[: _core.delta_runs(kind, b.n)]
            assert [c for first, count in runs for c in got[first : first + count]] == want
            body = ref.encode_block(kind, one, two)[1]
            coded = coding._Coder([b]).encode_found(found)[1]
            assert coded == (body if not body or body[0] == ref.SPARSE else None)
        assert (was.read() == old).all() and (now.read() == new).all()


@pytest.mark.parametrize("share", [0.002, 0.1, 0.9])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_sums_and_writes(kind: int, layout: str, share: float) -> None:
    for n, block in ((70_001, 1 << 22), (40_000, 16_384), (900, 100)):
        old, new = pair(kind, n, share, "any" if n % 2 else "few", n)
        held, some = Cut(kind, old, layout, n % 3), blocks(kind, n, block)
        changes: list[Tensor | None] = []
        for b in some:
            pairs = expected_changes(kind, old[b.first :][: b.n], new[b.first :][: b.n])
            flat = np.array(pairs, np.uint32).reshape(-1).view(np.int64)
            changes.append(torch.from_numpy(flat.copy()))
        sums = held.vector.sums(some, changes)
        assert sums == [ref.checksum(new[b.first : b.first + b.n].tobytes()) for b in some]
        assert (held.read() == old).all(), "sums wrote"
        held.vector.change(some, changes)
        assert (held.read() == new).all()
        b = some[len(some) // 2]
        assert held.vector.fetch(b).numpy().tobytes() == new[b.first : b.first + b.n].tobytes()
        held.vector.put(b, torch.from_numpy(old[b.first : b.first + b.n].view(np.uint8).copy()))
        new[b.first : b.first + b.n] = old[b.first : b.first + b.n]
        assert (held.read() == new).all()


def test_arguments_are_refused() -> None:
    held = Cut(18, np.zeros(100, np.uint16), "one", 0)
    where, table = device._where(DEVICE), held.vector._at(held.vector._table)
    room = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    at = held.vector._at(room)
    for kind, n, block in ((3, 100, 10), (18, 0, 10), (18, 100, 0), (18, 100, _core.delta_block + 1)):
        with pytest.raises(_core.ArgumentError, match="blocks have"):
            _core.DeltaWeights(kind, table, 1, 0, n, block).sum(at, at, at, **where)
    with pytest.raises(_core.ArgumentError, match="too many"):
        _core.DeltaWeights(18, table, 1, 0, 1 << 40, 1).change(at, at, **where)
    for address, segments in ((0, 1), (table + 4, 1), (table, 0)):
        with pytest.raises(_core.ArgumentError, match="NULL or misaligned"):
            _core.DeltaWeights(18, address, segments, 0, 100, 10).change(at, at, **where)
    good = _core.DeltaWeights(18, table, 1, 0, 100, 100)
    with pytest.raises(_core.ArgumentError, match="NULL"):
        good.find(table, 25, at, at, 0, **where)
    with pytest.raises(_core.ArgumentError, match="device"):
        good.change(at, at, device=-1, stream=0)


# ---- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESENT)
def test_messages_are_the_cpus(name: str) -> None:
    for n, share in ((1, 1.0), (64, 0.5), (20_011, 0.0), (20_011, 0.01), (20_011, 0.3), (3_001, 1.0)):
        old = {"x": random_bits(getattr(torch, name), n, n)}
        new = {"x": changed(old["x"], share, n)}
        with by_the_cpu():
            want = made(old, new)
        weights = there(old)
        assert made(weights, there(new)) == want
        delta.apply(weights, want)
        assert same(here(weights), new)


def test_all_kinds_of_bodies_in_one_range() -> None:
    """Blocks that stay, change a little, change a lot, and hold all of their elements."""
    size, shares = 8192, (0.0, 0.01, 0.5, 1.0, 0.02, 1.0)
    old = {f"p{i}": random_bits(torch.bfloat16, size, i) for i in range(len(shares))}
    new = {name: changed(x, share, 1) for (name, x), share in zip(old.items(), shares, strict=True)}
    new["p3"] = random_bits(torch.bfloat16, size, 99)
    with by_the_cpu():
        want = made(old, new, size)
    modes = [want[b.offset] if b.bytes else 0 for b in parse(memoryview(want)).blocks]
    assert modes == [0, ref.SPARSE, ref.DENSE, ref.RAW, ref.SPARSE, ref.DENSE]
    weights = there(old)
    assert made(weights, there(new), size) == want
    for form in (want, bytes(want)):
        weights = there(old)
        delta.apply(weights, form)
        assert same(here(weights), new)


def test_only_changes_pass_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("elements are copied")

    monkeypatch.setattr(DeviceVector, "fetch", refused)
    monkeypatch.setattr(DeviceVector, "put", refused)
    monkeypatch.setattr(core, "Segments", refused)
    old = {"w": random_bits(torch.bfloat16, 20_011, 1), "v": random_bits(torch.int64, 3_000, 2)}
    new = {name: changed(x, 0.02, 3) for name, x in old.items()}
    weights, mine = there(old), there(old)
    sender = delta.Sender(mine)
    assert all(x.tensor.device == DEVICE for x in sender._base.values())
    for name, x in new.items():
        mine[name].copy_(x)
    sender.confirm(delta.Receiver(weights).apply(sender.message()))
    assert same(here(weights), new)


def test_senders_and_receivers() -> None:
    weights, _ = some_weights()
    mine, theirs, plain = there(weights), there(weights), copied(weights)
    sender, receiver = delta.Sender(mine, full_every=4), delta.Receiver(theirs)
    other = delta.Receiver(plain)
    for step in range(1, 7):
        move(weights, step)
        for name, x in weights.items():
            mine[name].copy_(x)
        message = sender.message()
        with by_the_cpu():
            assert other.apply(message) == step
        sender.confirm(receiver.apply(message))
        assert same(here(theirs), weights) and same(plain, weights) and same(here(mine), weights)


def test_shared_and_strided_tensors() -> None:
    old, new = tied(), tied()
    new["embed"].view(torch.int16)[3:7] += 1
    with by_the_cpu():
        want = delta.encode(old, new)
    weights = there(old)
    assert weights["head"].data_ptr() == weights["embed"].data_ptr()
    assert delta.encode(weights, there(new)) == want
    delta.apply(weights, want)
    assert same(here(weights), new)
    whole = torch.randn(8, 40).to(DEVICE)
    after = changed(whole.t().cpu(), 0.2, 5)
    message = delta.encode({"t": whole.t()}, {"t": after.to(DEVICE)})
    delta.apply({"t": whole.t()}, message)
    assert equal(whole.cpu(), after.t().contiguous())


def test_a_kind_of_which_a_tensor_is_elsewhere_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = some_weights()
    old["more"], new["more"] = old["a"].clone(), new["a"].clone()
    with by_the_cpu():
        want = delta.encode(old, new)
    weights, other = there(old), there(new)
    if EMULATED:  # where all is in one memory, b.weight is said to be elsewhere
        monkeypatch.setattr(tensors, "usable", lambda x: x.shape != (257,))
    else:
        weights["b.weight"] = weights["b.weight"].cpu()
    mine = leaves(weights, "weights")
    assert set(tensors.devices(coding._table(mine), mine)) == {1, 4, 18}
    assert delta.encode(weights, other) == want
    out = there(old)
    delta.apply(weights, want, out=out)
    assert same(here(out), new) and same(here(weights), old)
    delta.apply(weights, want)
    assert same(here(weights), new)


# ---- faults --------------------------------------------------------------------------------------------


def some_bodies() -> tuple[Weights, Weights, bytearray]:
    """Of several blocks: sparse, dense and raw ones."""
    old = {"w": random_bits(torch.bfloat16, 1200, 1), "v": random_bits(torch.uint8, 90, 2)}
    new = {"w": old["w"].clone(), "v": random_bits(torch.uint8, 90, 5)}
    for i, share in enumerate((0.02, 0.4, 0.1)):
        new["w"][400 * i : 400 * (i + 1)] = changed(old["w"][400 * i : 400 * (i + 1)], share, i)
    with by_the_cpu():
        message = made(old, new, 400)
    modes = {message[b.offset] for b in parse(memoryview(message)).blocks}
    assert modes == {ref.SPARSE, ref.DENSE, ref.RAW}
    return old, new, message


def test_damaged_bodies_leave_the_weights() -> None:
    old, new, message = some_bodies()
    start = parse(memoryview(message)).blocks[0].offset
    weights, taken, refused = there(old), 0, 0
    for place, bad in enumerate(mutations(bytes(message[: len(message)]))):
        if bad[:start] != message[:start] or place % 7:
            continue
        try:
            delta.apply(weights, bad)
        except DeltaError as e:
            refused += 1
            assert "nothing was changed" in str(e) and same(here(weights), old)
        else:
            taken += 1
            assert same(here(weights), new)
            weights = there(old)
    assert refused > 200 and taken < refused / 20


def test_truncated_messages_leave_the_weights() -> None:
    old, _, message = some_bodies()
    weights = there(old)
    for end in range(0, len(message), 13):
        with pytest.raises(DeltaError):
            delta.apply(weights, bytes(message[:end]))
    assert same(here(weights), old)


def test_another_base_is_refused() -> None:
    """One bit anywhere, in elements that change and in those that stay."""
    old, new, message = some_bodies()
    raw = sum(b.n for b in parse(memoryview(message)).blocks if message[b.offset] == ref.RAW)
    assert raw == 90  # of v, whose elements the message has
    for place in range(0, 1200, 37):
        other = there(old)
        other["w"].view(torch.int16)[place] ^= 1 << place % 15
        before = copied(other)
        with pytest.raises(DeltaError, match="other weights than these, or is damaged, at w"):
            delta.apply(other, message)
        assert same(other, before)
    weights = there(new)
    with pytest.raises(DeltaError, match="other weights"):
        delta.apply(weights, message)
    assert same(here(weights), new)


def test_all_blocks_are_checked_before_any_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor of the last kind is another one; also where blocks come range by range."""
    monkeypatch.setattr(device, "_AT_ONCE", 400)
    old, new, message = some_bodies()
    assert [len(some) for some in device.ranges(blocks(18, 1200, 400))] == [1, 1, 1]
    weights = there(old)
    delta.apply(weights, message)
    assert same(here(weights), new)
    weights = there(old)
    weights["w"].view(torch.int16)[1199] ^= 1
    before = copied(weights)
    with pytest.raises(DeltaError, match="at w"):
        delta.apply(weights, message)
    assert same(weights, before)


def failing(patch: pytest.MonkeyPatch, name: str, at: int) -> None:
    call, count = getattr(DeviceVector, name), [0]

    def one(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            raise Fault
        return call(*arguments)

    patch.setattr(DeviceVector, name, one)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("name", ["find", "sums", "change"])
def test_a_fault_at_each_point(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """While a message is made, checked or written, on either side: each knows what it has."""
    weights, _ = some_weights()
    mine, theirs = there(weights), there(weights)
    sender, receiver = delta.Sender(mine, threads=1), delta.Receiver(theirs, threads=1)
    move(mine, 1)
    with monkeypatch.context() as patch, pytest.raises(Fault):
        failing(patch, name, at)
        receiver.apply(sender.message())
    if name == "change":
        assert receiver.version is None
        with pytest.raises(DeltaError, match="version is unknown"):
            receiver.apply(sender.message())
    else:
        assert receiver.version == 0 and same(here(theirs), weights)
    sender.confirm(receiver.apply(sender.message(full=name == "change")))
    move(mine, 2)
    version = receiver.apply(sender.message())
    with monkeypatch.context() as patch, suppress(Fault):
        failing(patch, name, at)
        sender.confirm(version)
    assert sender._torn == (name == "change")
    if not sender._torn:
        sender.confirm(version)
    move(mine, 3)
    receiver.apply(sender.message())
    assert same(here(theirs), here(mine))


def test_runs_are_where_the_page_says() -> None:
    """In any order among the changes of a block, and whole: the host reads them in theirs."""
    old, new = pair(18, 70_001, 0.05, "few", 4)
    was, now = Cut(18, old, "one", 0), Cut(18, new, "one", 0)
    (found,) = now.vector.find(was.vector, blocks(18, 70_001, 1 << 22))
    all_runs = found.runs.numpy().view(np.uint32).reshape(-1, 2)[: _core.delta_runs(18, 70_001)].tolist()
    runs = sorted(run for run in all_runs if run[1])
    assert len(runs) > 3 and all(first + count == after for (first, count), (after, _) in pairwise(runs))
    assert runs[0][0] == 0 and sum(runs[-1]) == found.many
