"""Random bits, and sums in the order that the wire format states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.formats import Array, _32

COMMON = 0xFFFFFFFF  # the "rank" of the stream that all ranks share


def salt_of(seed: int, rank: int) -> int:
    """Of a rank's stream: the seed folded to 32 bits, and an odd multiple of rank + 1 added."""
    seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return ((seed ^ seed >> 31) + (rank + 1 & _32) * 0x9E3779B1) & _32


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-7 (Salmon et al. 2011): rows of four uint32, as uint64, become four random ones."""
    c = [counter[:, j].astype(np.uint64) for j in range(4)]
    k0, k1 = key
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = [x >> np.uint64(32) for x in (a, b)]
        low = [x & np.uint64(_32) for x in (a, b)]
        c = [high[1] ^ c[1] ^ np.uint64(k0), low[1], high[0] ^ c[3] ^ np.uint64(k1), low[0]]
        k0, k1 = (k0 + 0x9E3779B9) & _32, (k1 + 0xBB67AE85) & _32
    return np.stack(c, axis=1)


@dataclass(frozen=True)
class Stream:
    """Random bits of one rank, step and group; the salt stands in the payload's header."""

    salt: int
    group: int
    step: int

    def blocks(self, at: Array) -> Array:
        """Four words for each block number."""
        at = np.asarray(at, np.uint64)
        step = [np.full(len(at), (self.step >> shift) & _32, np.uint64) for shift in (0, 32)]
        counter = np.stack([at & np.uint64(_32), at >> np.uint64(32), *step], axis=1)
        return philox(counter, (self.salt, self.group))

    def draw32(self, at: int, n: int) -> Array:
        """32 bits, as uint64, for each of the elements at .. at + n."""
        first = at // 4
        words = self.blocks(np.arange(first, (at + n + 3) // 4 + 1, dtype=np.uint64)).ravel()
        return words[at - 4 * first : at - 4 * first + n]

    def draw16(self, n: int) -> Array:
        """16 bits for each of the first n elements: halves of words, the low one first."""
        words = self.blocks(np.arange(-(-n // 8), dtype=np.uint64)).astype("<u4")
        return words.view("<u2").ravel()[:n].astype(np.int64)
