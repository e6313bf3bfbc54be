"""Deltas of weights as docs/wire.md has them, in NumPy: a second reader and writer, bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from reference.deadzone import Coder, cost
from reference.formats import checksum_words

Array = Any
SPARSE, DENSE, RAW = 1, 2, 3
FLOATS = 16
MAGIC = b"SIDD"


def checksum(data: bytes) -> int:
    return checksum_words(data.ljust(-(-len(data) // 8) * 8, b"\0"))


def width(kind: int) -> int:
    return kind % 8


def ordered(x: Array, kind: int) -> Array:
    """Elements, as int64, in the order in which steps count; its own inverse."""
    bits = 8 * width(kind)
    flip = (1 << bits - 1) - 1 if kind >= FLOATS else 0
    return np.where(x >> bits - 1, x ^ flip, x)


def steps(old: Array, new: Array, kind: int) -> tuple[Array, Array]:
    """sign and z of elements that differ, as int64."""
    bits = 8 * width(kind)
    d = (ordered(new, kind) - ordered(old, kind)) % (1 << bits)
    sign = d >> bits - 1
    return sign, np.where(sign, (1 << bits) - d, d) - 1


class Alphabet:
    def __init__(self, shift: int, signed: bool, dense: bool, kind: int) -> None:
        self.b, self.signed, self.zero, self.most = shift, signed, int(dense), 8 * width(kind) - 1
        self.classes = (16 - self.zero) // (2 if signed else 1)

    def symbol(self, sign: int, z: int) -> int:
        c = min((z >> self.b).bit_length(), self.classes - 1)
        return self.zero + (2 * c + sign if self.signed else c)

    def of(self, symbol: int) -> tuple[int, int]:
        """class and sign."""
        return divmod(symbol - self.zero, 2) if self.signed else (symbol - self.zero, 0)

    def bits(self, symbol: int) -> int:
        """Of z."""
        c, _ = self.of(symbol)
        if c == self.classes - 1:
            return self.most
        if self.b + c > self.most:
            raise ValueError("symbol")
        return self.b + max(c - 1, 0)

    def extra(self, symbol: int) -> int:
        return self.bits(symbol) + (not self.signed)

    def code(self, sign: int, z: int, symbol: int) -> str:
        """The extra bits, the lowest one first."""
        return ("" if self.signed else str(sign)) + low_first(z, self.bits(symbol))

    def step(self, symbol: int, text: str) -> tuple[int, int]:
        c, sign = self.of(symbol)
        if not self.signed:
            sign, text = int(text[0]), text[1:]
        z = int(text[::-1] or "0", 2)
        return sign, z if c in (0, self.classes - 1) else z + (1 << self.b + c - 1)


def low_first(x: int, bits: int) -> str:
    return format(x, "b").zfill(bits)[::-1][:bits] if bits else ""


def words_64(text: str) -> bytes:
    """Bits in whole words, from the lowest one of the first byte on."""
    text = text.ljust(-(-len(text) // 64) * 64, "0")
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


def bit_text(data: bytes) -> str:
    return "".join(format(byte, "08b")[::-1] for byte in data)


def frequencies(counts: list[int]) -> list[int]:
    total = sum(counts)
    freq = [max(1, (4096 * c + total // 2) // total) for c in counts]
    freq[counts.index(max(counts))] += 4096 - sum(freq)
    return freq


def choose(sign: Array, z: Array, n: int, dense: bool, kind: int) -> tuple[Alphabet, list[int], int, int]:
    """The alphabet, frequencies, extra bits and bits of the code."""
    pairs, many = np.unique(np.stack([sign, [int(v).bit_length() for v in z]]), axis=1, return_counts=True)
    best: Any = None
    for signed in (True, False):
        for b in range(max(int(v).bit_length() for v in z) + 1):
            a = Alphabet(b, signed, dense, kind)
            counts, extra = [0] * 16, 0
            if dense:
                counts[0] = n - len(z)
            for (s, length), m in zip(pairs.T.tolist(), many.tolist(), strict=True):
                symbol = a.symbol(s, (1 << length) >> 1)
                counts[symbol] += m
                extra += m * a.extra(symbol)
            used = max(2, 1 + max(i for i in range(16) if counts[i]))
            freq = frequencies(counts[:used])
            code = sum(c * cost(f) for c, f in zip(counts, freq, strict=False)) >> 16
            if best is None or extra + code < best[2] + best[3]:
                best = a, freq, extra, code
    return best


def raw(new: Array, kind: int) -> bytes:
    return bytes([RAW]) + bytes(7) + new.astype(f"<u{width(kind)}").tobytes()


def encode_block(kind: int, old: Array, new: Array) -> tuple[int, bytes]:
    """The checksum and the body of a block of unsigned numbers."""
    n = len(new)
    total = checksum(new.astype(f"<u{width(kind)}").tobytes())
    x, y = old.astype(np.int64), new.astype(np.int64)
    at = np.flatnonzero(x != y)
    if not len(at):
        return total, b""
    sign, z = steps(x[at], y[at], kind)
    dense = len(at) > n // 4
    a, freq, extra, code = choose(sign, z, n, dense, kind)
    symbols = np.array([a.symbol(int(s), int(v)) for s, v in zip(sign, z, strict=True)])
    texts = [a.code(int(s), int(v), int(k)) for s, v, k in zip(sign, z, symbols, strict=True)]
    extras = words_64("".join(texts))
    assert len("".join(texts)) == extra
    low, lows, highs = 0, b"", b""
    if not dense:
        gaps = np.diff(at, prepend=-1) - 1
        m = ((int(at[-1]) + 1) // len(at)).bit_length() - 1
        low = min(range(max(m - 1, 0), m + 2), key=lambda k: len(at) * k + int((gaps >> k).sum()))
        lows = words_64("".join(low_first(int(g), low) for g in gaps))
        highs = words_64("".join("0" * (int(g) >> low) + "1" for g in gaps))
    if 120 + len(lows + highs + extras) + (code + code // 512) // 8 >= 8 + n * width(kind):
        return total, raw(new, kind)
    if dense:
        all_symbols = np.zeros(n, np.int64)
        all_symbols[at] = symbols
        symbols = all_symbols
    states, words = Coder(freq).encode(symbols)
    shift = a.b + 128 * a.signed
    counts = (len(at), len(highs) // 8, len(extras) // 8)
    head = struct.pack("<BBBBIII", DENSE if dense else SPARSE, low, shift, len(freq), *counts)
    table = np.array(freq, "<u2").tobytes().ljust(-(-2 * len(freq) // 8) * 8, b"\0")
    tail = states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
    return total, head + table + lows + highs + extras + tail


def decode_block(kind: int, old: Array, body: bytes) -> Array:
    """The new elements. ValueError for a body that no encoder writes (not for each of them)."""
    n, dtype = len(old), f"<u{width(kind)}"
    if not body:
        return old
    if body[0] == RAW:
        return np.frombuffer(body[8:], dtype)
    mode, low, shift, used, count, high, extra = struct.unpack("<BBBBIII", body[:16])
    a = Alphabet(shift % 128, shift >= 128, mode == DENSE, kind)
    freq = np.frombuffer(body[16:], "<u2", used).tolist()
    at = 16 + -(-2 * used // 8) * 8
    sections = []
    for size in (-(-count * low // 64), high, extra):
        sections.append(bit_text(body[at : at + 8 * size]))
        at += 8 * size
    states = np.frombuffer(body[at:], "<u4", 8)
    words = np.frombuffer(body[at + 32 :], "<u2")
    symbols = Coder(freq).decode(states, words, n if mode == DENSE else count)
    if mode == DENSE:
        places = np.flatnonzero(symbols)
        symbols = symbols[places]
        if len(places) != count:
            raise ValueError("count")
    else:
        runs = sections[1].split("1")
        gaps = [len(runs[i]) << low for i in range(count)]
        gaps = [g | int(sections[0][low * i : low * (i + 1)][::-1] or "0", 2) for i, g in enumerate(gaps)]
        places = np.cumsum(np.array(gaps) + 1) - 1
    new, texts = old.astype(np.int64), sections[2]
    for place, symbol in zip(places.tolist(), symbols.tolist(), strict=True):
        bits = a.extra(symbol)
        sign, z = a.step(symbol, texts[:bits])
        texts = texts[bits:]
        moved = (int(ordered(new[place], kind)) + (-z - 1 if sign else z + 1)) % (1 << 8 * width(kind))
        new[place] = ordered(np.int64(moved), kind)
    if texts.strip("0"):
        raise ValueError("extra bits")
    return new.astype(dtype)
