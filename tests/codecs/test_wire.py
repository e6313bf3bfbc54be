"""docs/wire.md against the core and against the reference: the page's vectors, byte by byte.

python tests/codecs/test_wire.py      writes payload, decoded and kept of the page's vectors anew
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference as ref
from reference import Array, Step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
BLOCK = re.compile(r"^```vector\n(.*?)^```$", re.M | re.S)


def typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def elements(text: str, n: int) -> Array:
    """float32 of the list index:value ...; "all:value" fills."""
    out = np.zeros(n, np.float32)
    for item in text.split():
        index, value = item.split(":")
        out[slice(None) if index == "all" else int(index)] = np.float32(value)
    return out


def listed(x: Array) -> str:
    if len(x) and np.isnan(x).all():
        return "all:nan"
    return " ".join(f"{i}:{x[i]!s}" for i in np.flatnonzero(x.view(np.uint32)))


@dataclass
class Vector:
    """One block of the page."""

    name: str
    memory: str
    wire_id: int
    n: int
    dtype: str
    settings: dict[str, Any]
    at: Step
    given: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Vector:
        given: dict[str, str] = {}
        for line in text.splitlines():
            key, _, rest = line.partition(" ")
            key = key or "payload"  # its further lines are indented
            given[key] = f"{given.get(key, '')} {rest.strip()}".strip()
        name, *pairs = given["codec"].split()
        values = {k: typed(v) for k, v in (p.split("=") for p in pairs)}
        own = [values.pop(k) for k in ("memory", "id", "n", "dtype")]
        at = Step(**{k: int(v) for k, v in (p.split("=") for p in given["at"].split())})
        return cls(name, *own, values, at, given)  # type: ignore[arg-type]

    @property
    def input(self) -> Array:
        return ref.from_f32(elements(self.given["input"], self.n), self.dtype)

    @property
    def payload(self) -> bytes:
        written = bytes.fromhex(self.given["payload"])
        return written + bytes(-len(written) % 64)  # a last line of zeros is left out

    @property
    def decoded(self) -> tuple[float, Array]:
        scale, *rest = self.given["decoded"].split(" ", 1)
        return float(scale.partition("=")[2]), elements(" ".join(rest), self.n)

    @property
    def kept(self) -> Array:
        return elements(self.given["kept"], self.n)

    def group(self, payload: bytes | None = None) -> ref.Group:
        """The reference; one that judges a payload instead of writing it is told the page's, or another."""
        group = ref.Group(self.name, self.memory, self.wire_id, self.n, self.dtype, self.settings)
        if hasattr(group.codec, "judge"):
            group.codec.dictated = self.payload if payload is None else payload
        return group

    def encoded(self) -> bytes:
        """By the core."""
        from buffers import Rank
        from buffers import Vector as Segments
        from sidcomp import _core

        plan = _core.Plan(self.name, self.memory, self.n, self.dtype, self.settings)
        return Rank(plan).encode(Segments(self.input), self.at)


def vectors() -> list[Vector]:
    return [Vector.parse(m[1]) for m in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


def ids(v: Vector) -> str:
    return f"{v.name}-{v.dtype}-n{v.n}-{v.given['input'].replace(' ', ',')[:24]}"


def pytest_generate_tests(metafunc: Any) -> None:
    if "vector" in metafunc.fixturenames:
        metafunc.parametrize("vector", vectors(), ids=ids)


def same(got: Array, want: Array) -> bool:
    """Bit for bit, every NaN alike."""
    return bool((np.isnan(got) == np.isnan(want)).all() and (np.where(np.isnan(got), 0, got.view(np.uint32))
                == np.where(np.isnan(want), 0, want.view(np.uint32))).all())  # fmt: skip


def test_the_page_covers_every_codec() -> None:
    from sidcomp import _core

    by_name = {c["name"]: c["wire_id"] for c in _core.codecs()}
    found = vectors()
    assert {v.name for v in found} == set(by_name)
    assert all(v.wire_id == by_name[v.name] for v in found)
    table = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| codec |" in line)
    assert {int(i): name for i, name in re.findall(r"(\d+) ([a-z0-9-]+)[,;]", table)} == {
        i: n for n, i in by_name.items()
    }
    flags = [ref.header(v.payload)["flags"] for v in found]
    assert any(f & ref.NONFINITE for f in flags) and any(f & ref.HALF for f in flags)


def test_header_layout() -> None:
    """The page's table, row by row, is the layout that the reference packs."""
    payloads, _ = PAGE.read_text(encoding="utf-8").split("### Deltas of weights")
    rows = re.findall(r"^\| (\d+) \| ([uf]\d+) \| (\w+) \|", payloads, re.M)
    assert [r[2] for r in rows] == list(ref.FIELDS)
    letters = {"u16": "H", "u32": "I", "u64": "Q", "f32": "f"}
    assert "<" + "".join(letters[r[1]] for r in rows) == ref.HEADER.format
    at = 0
    for offset, kind, _ in rows:
        assert int(offset) == at
        at += int(kind[1:]) // 8
    assert at == ref.HEADER_BYTES == ref.HEADER.size


def test_the_reference_writes_and_reads_the_page(vector: Vector) -> None:
    group = vector.group()
    assert group.encode(vector.input, vector.at) == vector.payload
    assert same(group.kept, vector.kept)
    scale, want = vector.decoded
    assert same(ref.to_f32(vector.group().decode([vector.payload], scale), vector.dtype), want)


def test_the_core_writes_and_reads_the_page(vector: Vector) -> None:
    from buffers import Rank
    from buffers import Vector as Segments
    from sidcomp import _core

    for isa in ("base", "auto"):
        plan = _core.Plan(vector.name, vector.memory, vector.n, vector.dtype, vector.settings, isa)
        rank = Rank(plan)
        assert rank.encode(Segments(vector.input), vector.at) == vector.payload
        assert same(rank.residual()[0], vector.kept)
        scale, want = vector.decoded
        out = Segments(np.zeros_like(vector.input))
        flagged = rank.decode([vector.payload], scale, out, vector.at, state=False)
        assert same(ref.to_f32(out.read(), vector.dtype), want)
        assert flagged == (not np.isfinite(want).all())


def test_one_changed_byte_of_the_page_is_noticed(vector: Vector) -> None:
    linear = vector.group().codec.linear
    for i in range(64 if linear else len(vector.payload)):
        bad = vector.payload[:i] + bytes([vector.payload[i] ^ 0x10]) + vector.payload[i + 1 :]
        assert ref.seal(bad, linear) != bad


def rewritten(match: re.Match[str]) -> str:
    v = Vector.parse(match[1])
    scale = 1 / v.at.world
    group = v.group(v.encoded() if hasattr(v.group(b"").codec, "judge") else b"")
    payload = group.encode(v.input, v.at)
    decoded = ref.to_f32(v.group().decode([payload], scale), v.dtype)
    lines = [payload[i : i + 32].hex(" ", 4) for i in range(0, len(payload), 32)]
    if not any(payload[-32:]):
        lines.pop()
    text = "\n".join(f"{key:<8} {v.given[key]}" for key in ("codec", "at", "input"))
    text += "\npayload  " + "\n         ".join(lines)
    return (
        f"```vector\n{text}\ndecoded  scale={scale} {listed(decoded)}\nkept     {listed(group.kept)}".rstrip()
        + "\n```"
    )


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(rewritten, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
