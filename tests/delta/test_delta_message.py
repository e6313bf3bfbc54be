"""Messages: what a reader refuses, and that nothing has changed then."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import sidcomp
import torch
from sidcomp import _core, delta
from sidcomp.delta import coding
from sidcomp.delta.message import Block, Head, Tensor, pack_head, parse
from sidcomp.delta.tensors import leaves

Weights = dict[str, torch.Tensor]


def some_weights(seed: int = 0) -> tuple[Weights, Weights]:
    """Old and new: a few tensors of several kinds, of which a tenth changes."""
    g = torch.Generator().manual_seed(seed)
    old = {
        "a": torch.randn(30, 11, generator=g).bfloat16(),
        "b.weight": torch.randn(257, generator=g),
        "steps": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "c": torch.randint(0, 256, (65,), generator=g, dtype=torch.uint8),
    }
    new = {}
    for name, x in old.items():
        more = x.clone()
        flat = more.view(-1)
        chosen = torch.rand(flat.shape, generator=g) < 0.1
        if len(flat):
            chosen[0] = True
        flat[chosen] = flat[chosen] * 1.01 if x.is_floating_point() else flat[chosen] + 1
        new[name] = more
    return old, new


def copied(weights: Weights) -> Weights:
    return {name: x.clone() for name, x in weights.items()}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def same(x: Weights, y: Weights) -> bool:
    return list(x) == list(y) and all(torch.equal(bits(x[name]), bits(y[name])) for name in x)


def small(**how: int) -> tuple[Weights, Weights, bytearray]:
    """With blocks of a few elements, so that there are many."""
    old, new = some_weights()
    return old, new, coding.make(leaves(old, "old"), leaves(new, "new"), coding.Stamp(**how), 1, block=100)


def test_a_delta_leads_from_old_to_new() -> None:
    old, new, message = small()
    parsed = parse(memoryview(message))
    assert len(parsed.blocks) == 9 and len({b.kind for b in parsed.blocks}) == 4
    assert delta.apply(old, message) is old
    assert same(old, new)


def mutations(message: bytes) -> Iterator[bytes]:
    for place in range(len(message)):
        for value in {message[place] ^ 1, message[place] ^ 128, message[place] + 1 & 255, 0, 255} - {
            message[place]
        }:
            yield message[:place] + bytes([value]) + message[place + 1 :]


def test_every_changed_byte_is_refused_or_does_not_matter() -> None:
    """Nearly all of them are refused; after the others the weights are right, else as they were."""
    old, new, message = small()
    there, taken, count = copied(old), 0, 0
    for bad in mutations(bytes(message)):
        count += 1
        try:
            delta.apply(there, bad)
        except sidcomp.errors.DeltaError as e:
            assert "nothing was changed" in str(e) or "format" in str(e)
            assert same(there, old)
        else:
            taken += 1
            assert same(there, new)
            there = copied(old)
    assert count > 4000 and taken < count / 100


def test_every_cut_and_every_longer_message_is_refused() -> None:
    old, _, message = small()
    there = copied(old)
    for end in range(len(message)):
        with pytest.raises(sidcomp.errors.DeltaError):
            delta.apply(there, bytes(message[:end]))
    for more in (b"\0", bytes(8), bytes(64)):
        with pytest.raises(sidcomp.errors.DeltaError, match="header says"):
            delta.apply(there, bytes(message) + more)
    assert same(there, old)


def test_two_bodies_that_change_places_are_refused() -> None:
    old, _, message = small()
    blocks = [b for b in parse(memoryview(message)).blocks if b.bytes]
    one, other = next((x, y) for x in blocks for y in blocks if x.offset < y.offset and x.bytes == y.bytes)
    swapped = bytearray(message)
    swapped[one.offset : one.offset + one.bytes] = message[other.offset : other.offset + other.bytes]
    swapped[other.offset : other.offset + other.bytes] = message[one.offset : one.offset + one.bytes]
    there = copied(old)
    with pytest.raises(sidcomp.errors.DeltaError, match="nothing was changed"):
        delta.apply(there, swapped)
    assert same(there, old)


def signed(head: bytearray) -> bytearray:
    """With the checksum that it should have."""
    _, _, _, _, _, _, _, _, _, table, blocks, _ = struct.unpack_from("<IHHQQQQIIIIQ", head)
    end = 64 + table + 16 * blocks
    head[56:64] = bytes(8)
    head[56:64] = struct.pack("<Q", _core.delta_checksum(bytes(head[:end]), 0, min(end, len(head))))
    return head


@pytest.mark.parametrize("place", range(4, 400))
def test_a_head_with_a_right_checksum_is_not_believed(place: int) -> None:
    old, new, message = small()
    there = copied(old)
    for value in (0, 1, 127, 255, message[place] + 1 & 255, message[place] - 1 & 255):
        bad = bytearray(message)
        bad[place] = value
        try:
            bad = signed(bad)
        except (sidcomp.SidcompError, struct.error):
            continue
        try:
            delta.apply(there, bad)
        except sidcomp.errors.DeltaError:
            assert same(there, old), value
        else:
            assert same(there, new), value
            there = copied(old)


def test_a_flag_of_a_later_version_is_named() -> None:
    _, _, message = small()
    message[6] |= 2
    with pytest.raises(sidcomp.errors.DeltaError, match=r"has flags 0x2, this sidcomp knows 0x1"):
        parse(memoryview(signed(message)))
    with pytest.raises(sidcomp.errors.DeltaError, match="its tables have 4"):
        message[48:52] = struct.pack("<I", 2**32 - 8)
        parse(memoryview(message))


def test_messages_of_other_tables_are_refused() -> None:
    def refused(tensors: tuple[Tensor, ...], text: str, total: int = 0, block: int = 64) -> None:
        head = Head(False, 0, 0, 0, block, tensors)
        made = bytearray(pack_head(head, [Block(2, 0, 1)] * 2, total) + bytes(32))
        made[8:16] = struct.pack("<Q", len(made))
        with pytest.raises(sidcomp.errors.DeltaError, match=text):
            parse(memoryview(signed(made)))

    a = Tensor("a", "bfloat16", (100,))
    refused((a, a), "twice")
    refused((a, Tensor("b", "bfloat16", (100,), 1)), "cannot be another tensor's memory")
    refused((a, Tensor("b", "float16", (100,), 0)), "cannot be another tensor's memory")
    refused((a, Tensor("b", "bfloat16", (100,), 0), Tensor("c", "bfloat16", (100,), 1)), "cannot be another")
    refused((Tensor("a", "bfloat16", (2**63, 2**63)),), "too large")
    refused((Tensor("a", "bfloat16", (1000,)),), "too short")
    refused((Tensor("a", "bfloat16", (10,)),), "other blocks")
    refused((a,), "checksum", block=0)
    refused((a,), "checksum", block=_core.delta_block + 1)


def test_bytes_may_lie_anywhere() -> None:
    old, new, message = small()
    forms = [
        bytes(message), message, memoryview(message), torch.frombuffer(message, dtype=torch.uint8),
        memoryview(b"abc" + message)[3:], memoryview(bytes(message)).cast("I"),
    ]  # fmt: skip
    for form in forms:
        there = copied(old)
        delta.apply(there, form)
        assert same(there, new)
    for wrong in (3, "text", torch.zeros(9), torch.zeros(3, 3, dtype=torch.uint8), b"", [1, 2]):
        with pytest.raises(sidcomp.errors.DeltaError):
            delta.apply(there, wrong)  # type: ignore[arg-type]
    assert same(there, new)


def test_a_full_message_has_every_element() -> None:
    old, new = some_weights()
    message = coding.make(None, leaves(new, "new"), coding.Stamp(), 1, block=100)
    assert len(message) > sum(x.nbytes for x in new.values())
    other = {name: torch.zeros_like(x) for name, x in old.items()}
    assert same(delta.apply(other, message), new)  # type: ignore[arg-type]
    short = bytearray(message)
    parsed = parse(memoryview(message))
    assert all(b.bytes == _core.delta_bytes(b.kind, b.n) for b in parsed.blocks)
    place = 64 + struct.unpack_from("<I", message, 48)[0]
    zero = bytearray(struct.pack("<Q", 0))
    short[place + 8 : place + 16] = zero  # one block is said not to change
    with pytest.raises(sidcomp.errors.DeltaError):
        delta.apply(other, signed(short))
