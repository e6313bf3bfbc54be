"""Elements in few levels beyond a dead zone, by an arithmetic code of a fixed number of bits."""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import FLT_MAX, HEADER_BYTES, LEVELLED, NONFINITE, Array, _pad, header, keys
from reference.selection import largest, target_count
from reference.sums import total

LANES, TOTAL, LEAST = 8, 4096, 1 << 16

# At 0.1, 0.15, ... 2 bits: the share sent; of those of a level and above, the share above it.
BEST = [
    (0.01007, 0.05000),
    (0.01671, 0.05000),
    (0.02396, 0.05000),
    (0.03173, 0.05000),
    (0.03998, 0.05000),
    (0.04869, 0.05000),
    (0.05785, 0.05000),
    (0.06744, 0.05000),
    (0.07662, 0.05000),
    (0.08705, 0.05000),
    (0.09791, 0.05000),
    (0.10922, 0.05000),
    (0.12099, 0.05000),
    (0.13295, 0.05176),
    (0.14467, 0.05726),
    (0.15663, 0.06301),
    (0.16881, 0.06902),
    (0.18122, 0.07529),
    (0.19148, 0.08088),
    (0.20422, 0.08768),
    (0.21713, 0.09474),
    (0.23020, 0.10207),
    (0.24342, 0.10966),
    (0.25676, 0.11751),
    (0.27021, 0.12562),
    (0.28376, 0.13397),
    (0.29739, 0.14257),
    (0.31114, 0.15140),
    (0.32493, 0.16045),
    (0.33879, 0.16971),
    (0.35268, 0.17917),
    (0.36664, 0.18880),
    (0.38061, 0.19860),
    (0.39463, 0.20853),
    (0.40872, 0.21859),
    (0.42285, 0.22875),
    (0.43705, 0.23898),
    (0.45131, 0.24927),
    (0.46567, 0.25960),
]


def best_at(bits: float) -> tuple[float, float]:
    at = bits * 20 - 2
    i = min(max(math.trunc(at), 0), len(BEST) - 2)
    t = at - i
    density, share = (a + t * (b - a) for a, b in zip(BEST[i], BEST[i + 1], strict=True))
    return density, share


def cost(freq: int) -> int:
    """12 - log2(freq) in units of 2^-16, rounded up: 17 binary digits of log2 by squaring, cut off."""
    shift, log = freq.bit_length() - 1, 0
    v = freq << 31 - shift
    for _ in range(16):
        v = v * v >> 31
        log = 2 * log + (v >> 32)
        v >>= v >> 32
    return (12 - shift << 16) - log


@dataclass
class Coder:
    """rANS with eight lanes: element i belongs to lane i % 8."""

    freq: list[int]

    def __post_init__(self) -> None:
        self.f = np.array(self.freq, np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.f)[:-1]])
        self.symbol = np.repeat(np.arange(len(self.freq)), self.f)  # of each slot

    def encode(self, symbol: Array) -> tuple[Array, Array]:
        """Eight states and the words of one stream."""
        steps = -(-len(symbol) // LANES)
        there = np.arange(steps * LANES).reshape(steps, LANES) < len(symbol)
        symbols = np.pad(symbol.astype(np.int64), (0, steps * LANES - len(symbol))).reshape(steps, LANES)
        x = np.full(LANES, LEAST, np.int64)
        words, moved = np.zeros((steps, LANES), np.int64), np.zeros((steps, LANES), bool)
        for i in reversed(range(steps)):
            f, start = self.f[symbols[i]], self.start[symbols[i]]
            moved[i], words[i] = there[i] & (x >= f << 20), x & 0xFFFF
            y = np.where(moved[i], x >> 16, x)
            x = np.where(there[i], (y // f << 12) + y % f + start, x)
        return x, words[moved]

    def decode(self, states: Array, words: Array, n: int) -> Array:
        """ValueError if that is no stream of n elements."""
        x, at, out = states.astype(np.int64), 0, np.zeros(-(-n // LANES) * LANES, np.int64)
        if (x < LEAST).any():
            raise ValueError("state")
        words = np.pad(words.astype(np.int64), (0, LANES))
        for i in range(0, n, LANES):
            live = min(LANES, n - i)
            slot = x[:live] & TOTAL - 1
            s = out[i : i + live] = self.symbol[slot]
            x[:live] = self.f[s] * (x[:live] >> 12) + slot - self.start[s]
            takes = np.flatnonzero(x[:live] < LEAST)
            if at + len(takes) > len(words) - LANES:
                raise ValueError("words")
            x[takes] = x[takes] << 16 | words[at : at + len(takes)]
            at += len(takes)
        if (x != LEAST).any() or at != len(words) - LANES:
            raise ValueError("end of a stream")
        return out[:n]


@dataclass
class Deadzone(Codec):
    k: int = 0
    cap: int = 0
    sparse: bool = True
    exact = False
    contracts = False
    contracts_in_all = True

    def __post_init__(self) -> None:
        bits = float(self.settings["bits"])
        density, self.share = best_at(bits)
        self.levels = 4 if bits < 1 else 5
        self.stream = 65536 if bits < 0.5 else 32768 if bits < 1 else 16384
        self.k = self.cap = target_count(self.n, density)
        above = [*self.above(self.k), 0]
        counts = [a - b for a, b in itertools.pairwise([self.k, *above])]
        n = max(self.n, 1)
        freq = [max(1, (TOTAL * c + n) // (2 * n)) for c in counts]
        while 2 * sum(freq) >= TOTAL:
            freq[freq.index(max(freq))] -= 1
        zero = TOTAL - 2 * sum(freq)
        self.coder = Coder([zero] + [f for f in freq for _ in (0, 1)])
        code = sum(c * cost(f) for c, f in zip(counts, freq, strict=True)) + (self.n - self.k) * cost(zero)
        self.streams = -(-self.n // self.stream)
        self.room = 16 * self.streams + (code + code // 512 >> 20) + 4
        self.counts_at = HEADER_BYTES + -(-4 * self.levels // 8) * 8
        self.words_at = self.counts_at + -(-2 * self.streams // 8) * 8

    @property
    def payload_bytes(self) -> int:
        return -(-(self.words_at + 2 * self.room + 16) // 64) * 64

    def above(self, count: int) -> list[int]:
        """Of `count` elements, how many are above level 0, 1, ..."""
        out, share = [], float(count)
        for _ in range(self.levels - 1):
            share *= self.share
            out.append(math.ceil(share))
        return out

    def edges(self, magnitude: Array) -> list[int]:
        """Keys, one between each two levels: of the largest magnitude that is not above it; 0 if all are."""
        order = np.sort(keys(magnitude))[::-1]
        return [int(order[c]) if c < len(order) else 0 for c in self.above(len(order))]

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        index = largest(acc, self.k)
        index = index[acc[index] != 0]
        edges = self.edges(acc[index])
        level = sum((keys(acc[index]) > e for e in edges), np.zeros(len(index), np.int64))
        least = int(keys(acc[index]).min()) if 0 < len(index) == self.k else 1
        symbol = np.zeros(self.n, np.int64)
        symbol[index] = 1 + 2 * level + np.signbit(acc[index])
        counts, words, used, end = np.zeros(self.streams, "<u2"), [], 0, self.n
        for t, first in enumerate(range(0, self.n, self.stream)):
            part = symbol[first : first + self.stream]
            if not part.any():
                continue
            states, own = self.coder.encode(part)
            if 16 + len(own) > self.room - used:
                end = first
                break
            counts[t] = 16 + len(own)
            used += 16 + len(own)
            words.append(states.astype("<u4").tobytes() + own.astype("<u2").tobytes())
        found, keep = len(index), index < end
        index, level = index[keep], level[keep]
        value = np.zeros(self.levels, np.float32)
        magnitude = np.abs(acc[index])
        for i in np.unique(level):
            mean = total(np.where(level == i, magnitude, np.float32(0))) / (level == i).sum()
            key = int(keys(np.float32([min(mean, FLT_MAX)]))[0])
            key = max(key, least, edges[i - 1] + 1 if i else 0)
            value[i] = np.uint32(min(key, [*edges, 0x7F7FFFFF][i])).view(np.float32)
        decoded = np.zeros(self.n, np.float32)
        decoded[index] = np.copysign(value[level], acc[index])
        body = _pad(value.astype("<f4").tobytes(), 8) + _pad(counts.tobytes(), 8) + b"".join(words)
        body += bytes(self.payload_bytes - HEADER_BYTES - len(body))
        return Sent(body, len(index), 0.0, LEVELLED, decoded, found)

    def read(self, payload: bytes) -> Array:
        h = header(payload)
        value = np.frombuffer(payload, "<f4", self.levels, HEADER_BYTES)
        counts = np.frombuffer(payload, "<u2", self.streams, self.counts_at).astype(np.int64)
        if h["flags"] & ~NONFINITE != LEVELLED or h["scale"] or len(payload) != self.payload_bytes:
            raise ValueError("header")
        if counts.sum() > self.room or (counts[counts > 0] < 16).any():
            raise ValueError("counts")
        symbol, at = np.zeros(self.n, np.int64), self.words_at
        for t, first in enumerate(range(0, self.n, self.stream)):
            n = min(self.stream, self.n - first)
            if counts[t]:
                states = np.array(struct.unpack_from("<8I", payload, at))
                words = np.frombuffer(payload, "<u2", counts[t] - 16, at + 32)
                symbol[first : first + n] = self.coder.decode(states, words, n)
                if not symbol[first : first + n].any():
                    raise ValueError("a stream of zeros")
            at += 2 * int(counts[t])
        level = (symbol[symbol > 0] - 1) // 2
        used = np.bincount(level, minlength=self.levels) > 0
        most = [self.k, *self.above(self.k)]
        if len(level) != h["count"] or any((level >= i).sum() > m for i, m in enumerate(most)):
            raise ValueError("count")
        if value[~used].view(np.uint32).any() or not np.isfinite(value).all():
            raise ValueError("levels")
        if (np.diff(np.concatenate([[0], value[used]])) <= 0).any():
            raise ValueError("levels")
        if any(payload[HEADER_BYTES + 4 * self.levels : self.counts_at]) or any(payload[at:]):
            raise ValueError("padding")
        if any(payload[self.counts_at + 2 * self.streams : self.words_at]):
            raise ValueError("padding")
        table = np.concatenate([np.zeros(1, np.float32), np.stack([value, -value], axis=1).ravel()])
        return table[symbol].astype(np.float32)
