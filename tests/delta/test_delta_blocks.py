"""The core's blocks against the reference, bit for bit, and the vectors of docs/wire.md.

PYTHONPATH=python:tests/support python tests/delta/test_delta_blocks.py      writes the page's vectors anew
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import delta_reference as ref
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sidcomp import _core
from sidcomp.address import address

KINDS = (1, 2, 4, 17, 18, 20)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
VECTOR = re.compile(r"^```delta\n(.*?)^```$", re.M | re.S)
Array = Any


def segments(x: Array) -> tuple[Any, Any]:
    held = torch.from_numpy(x.view(np.uint8))
    return _core.Segments([address(held, "x", torch.uint8, held.numel())], [len(x)]), held


def encoded(kind: int, old: Array, new: Array) -> tuple[int, bytes]:
    n = len(old)
    (was, _), (now, _) = segments(old), segments(new)
    out = bytearray(_core.delta_bound(kind, n))
    checksum, size = _core.delta_encode(was, now, kind, 0, n, bytearray(_core.delta_work(n)), out)
    return checksum, bytes(out[:size])


def applied(kind: int, old: Array, checksum: int, body: bytes) -> Array:
    there = old.copy()
    now, _ = segments(there)
    call = (now, kind, 0, len(old), body + bytes(_core.delta_slack), 0, len(body), checksum)
    _core.delta_check(*call)
    assert (there == old).all()
    _core.delta_apply(*call)
    return there


def pair(kind: int, n: int, share: float, how: str, seed: int) -> tuple[Array, Array]:
    """Old and new elements, of which a share changes."""
    rng = np.random.default_rng(seed)
    bits = 8 * ref.width(kind)
    old = rng.integers(0, 1 << bits, n)
    by = {
        "one": rng.choice([-1, 1], n),
        "few": rng.geometric(0.7, n) * rng.choice([-1, 1], n),
        "up": rng.geometric(0.6, n),
        "scale": (1 << rng.integers(0, bits - 1, n)) * rng.choice([-1, 1], n) + rng.integers(0, 3, n),
        "any": rng.integers(1, 1 << bits, n),
    }[how]
    moved = ref.ordered((ref.ordered(old, kind) + by) % (1 << bits), kind)
    new = np.where(rng.random(n) < share, moved, old)
    return old.astype(f"<u{bits // 8}"), new.astype(f"<u{bits // 8}")


def compare(kind: int, old: Array, new: Array) -> bytes:
    checksum, body = encoded(kind, old, new)
    assert (checksum, body) == ref.encode_block(kind, old, new)
    assert (applied(kind, old, checksum, body) == new).all()
    assert (ref.decode_block(kind, old, body) == new).all()
    return body


@pytest.mark.parametrize("how", ["one", "few", "up", "scale", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_core_writes_and_reads_what_the_page_says(kind: int, how: str) -> None:
    modes = set()
    for n, share in (
        (1, 1),
        (2, 0.5),
        (65, 0.1),
        (500, 0.02),
        (3000, 0.01),
        (3001, 0.2),
        (3000, 0.4),
        (2000, 1),
    ):
        body = compare(kind, *pair(kind, n, share, how, n))
        modes.add(body[0] if body else 0)
    assert ref.RAW in modes and (how == "any" or {ref.SPARSE, ref.DENSE} <= modes)


@given(st.data())
def test_any_elements_come_through(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    bits = 8 * ref.width(kind)
    element = st.one_of(
        st.integers(0, (1 << bits) - 1), st.sampled_from([0, 1, (1 << bits - 1), (1 << bits) - 1])
    )
    old = np.array(data.draw(st.lists(element, min_size=1, max_size=300)), f"<u{bits // 8}")
    new = old.copy()
    for place, value in data.draw(
        st.dictionaries(st.integers(0, len(old) - 1), element, max_size=40)
    ).items():
        new[place] = value
    old, new = np.tile(old, 5), np.tile(new, 5)
    compare(kind, old, new)


def test_every_step_of_16_bits_leads_to_its_element() -> None:
    """From four elements to each other one: float bits of every kind, NaN payloads among them."""
    for kind in (2, 18):
        for start in (0, 0x8000, 0x7FC1, 0xFFFF):
            old, new = np.full(65536, start, "<u2"), np.arange(65536).astype("<u2")
            checksum, body = encoded(kind, old, new)
            assert (applied(kind, old, checksum, body) == new).all()
            some = np.where(np.arange(65536) % 8 == 0, new, old)
            checksum, body = encoded(kind, old, some)
            assert (applied(kind, old, checksum, body) == some).all()


def vectors() -> list[dict[str, str]]:
    found = []
    for text in VECTOR.findall(PAGE.read_text()):
        fields: dict[str, str] = {}
        for line in text.splitlines():
            key, _, rest = line.partition(" ")
            key = key or "body"
            fields[key] = f"{fields.get(key, '')} {rest.strip()}".strip()
        found.append(fields)
    return found


def given_by(fields: dict[str, str]) -> tuple[int, Array, Array]:
    kind, n, start = (int(x) for x in re.findall(r"\d+", fields["block"]))
    old = (np.arange(n) + start).astype(f"<u{ref.width(kind)}")
    new = old.copy()
    for item in fields["changes"].split():
        place, value = item.split(":")
        new[int(place)] = int(value, 16)
    return kind, old, new


def shown(body: bytes) -> str:
    words = [body[i : i + 4].hex() for i in range(0, len(body), 4)]
    return "\n         ".join(" ".join(words[i : i + 8]) for i in range(0, len(words), 8))


def test_the_vectors_of_the_page() -> None:
    assert len(vectors()) == 4
    for fields in vectors():
        kind, old, new = given_by(fields)
        body = bytes.fromhex(fields["body"].replace(" ", ""))
        assert (f"{encoded(kind, old, new)[0]:016x}", body) == (fields["checksum"], compare(kind, old, new))


def anew(fields: dict[str, str]) -> str:
    checksum, body = ref.encode_block(*given_by(fields))
    given_lines = f"block    {fields['block']}\nchanges  {fields['changes']}"
    return f"```delta\n{given_lines}\nchecksum {checksum:016x}\nbody     {shown(body)}\n```"


def write_vectors() -> None:
    new = iter([anew(fields) for fields in vectors()])
    PAGE.write_text(VECTOR.sub(lambda _: next(new), PAGE.read_text()))


if __name__ == "__main__":
    write_vectors()
