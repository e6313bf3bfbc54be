"""Codecs that send the largest elements: top-k, SIDCo, GaussianK, RedSync, DGC."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import (
    BLOCKS,
    FORMS,
    HEADER_BYTES,
    LEVELS,
    NONFINITE,
    PACKED,
    RAISED,
    Array,
    block_body,
    block_levels,
    from_f32_saturating,
    from_levels,
    header,
    level_codes,
    nearest_levels,
    read_block_body,
    read_sparse_body,
    sparse_body,
    to_f32,
)
from reference.selection import (
    block_counts,
    exponential_quantile,
    gamma_quantile,
    largest,
    neighbours,
    sidco_thresholds,
    stage_ratios,
    target_count,
)
from reference.streams import Stream, salt_of
from reference.sums import total


@dataclass
class Sparse(Codec):
    k: int = 0
    cap: int = 0
    sparse: bool = True
    values = "f32"
    indices = "u16"

    def __post_init__(self) -> None:
        self.k = target_count(self.n, float(self.settings["density"]))
        self.cap = self.k
        self.values, self.indices = str(self.settings["values"]), str(self.settings["indices"])

    @property
    def form(self) -> int:
        return FORMS[self.values] | (PACKED if self.indices == "packed" else 0)

    def send(
        self, acc: Array, index: Array, threshold: float, flags: int, found: int, stages: int = 0
    ) -> Sent:
        value = acc[index]
        decoded = np.zeros(self.n, np.float32)
        if self.values in LEVELS:
            decoded[index] = from_levels(*level_codes(value, threshold, self.values), self.values)
        else:
            half = self.values == "f16"
            decoded[index] = to_f32(from_f32_saturating(value, "float16"), "float16") if half else value
        body = sparse_body(self.n, self.cap, index, value, self.values, self.indices, threshold)
        return Sent(body, len(index), threshold, flags | self.form, decoded, found, stages)

    @property
    def floor_count(self) -> int:
        """If fewer pass a threshold, the k largest are sent."""
        return max(1, math.ceil(float(self.settings["floor"]) * self.k))

    def read(self, payload: bytes) -> Array:
        h = header(payload)
        if h["flags"] & ~(NONFINITE | RAISED) != self.form:
            raise ValueError("flags")
        body = payload[HEADER_BYTES:]
        index, value = read_sparse_body(body, self.n, self.cap, h["count"], self.values, self.indices)
        out = np.zeros(self.n, np.float32)
        out[index] = value
        return out

    @property
    def exact(self) -> bool:  # type: ignore[override]
        # Less than half the lower of two magnitudes may become that, which rounds.
        return self.values != "log2"

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.contracts_in_all

    @property
    def contracts_in_all(self) -> bool:  # type: ignore[override]
        return self.values == "log2"  # less than half the lower of two magnitudes may become that


@dataclass
class TopK(Sparse):
    """Exactly k elements: the largest magnitudes, ties by the lowest index. `block`: of every block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block = int(self.settings["block"])
        if self.block:
            self.counts = block_counts(self.n, self.block, float(self.settings["density"]))
            self.k = self.cap = int(self.counts.sum())

    @property
    def form(self) -> int:
        return super().form | (BLOCKS if self.block else 0)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        if self.block:
            return self.encode_blocks(acc)
        index = largest(acc, self.k)
        threshold = float(np.abs(acc[index]).min()) if self.k else 0.0
        return self.send(acc, index, threshold, 0, self.k)

    def encode_blocks(self, acc: Array) -> Sent:
        decoded, where = np.zeros(self.n, np.float32), [np.zeros(0, np.int64)]
        for b, k in enumerate(self.counts):
            start = b * self.block
            index = start + largest(acc[start : start + self.block], k)
            value = acc[index]
            if self.values in LEVELS:
                base, step = block_levels(value, self.values)
                codes = nearest_levels(value, base, step, self.values)
                decoded[index] = from_levels(base, step, codes, self.values)
            elif self.values == "f16":
                decoded[index] = to_f32(from_f32_saturating(value, "float16"), "float16")
            else:
                decoded[index] = value
            where.append(index)
        index = np.concatenate(where)
        body = block_body(self.n, self.counts, self.block, index, acc[index], self.values, self.indices)
        threshold = float(np.abs(acc[index]).min()) if self.k else 0.0
        return Sent(body, self.k, threshold, self.form, decoded, self.k, 0)

    def read(self, payload: bytes) -> Array:
        if not self.block:
            return super().read(payload)
        h = header(payload)
        if h["flags"] & ~NONFINITE != self.form:
            raise ValueError("flags")
        index, value = read_block_body(
            payload[HEADER_BYTES:], self.n, self.counts, self.block, h["count"], self.values, self.indices
        )
        out = np.zeros(self.n, np.float32)
        out[index] = value
        return out


@dataclass
class Sidco(Sparse):
    """Everything at or above SIDCo's threshold of M stages, at most `cap` elements."""

    later: Callable[[Array, Array, Array, float], Array] = exponential_quantile
    gamma: bool = False
    stages: int = 1
    moved: int = 0
    off: float = 0.0
    found_since: list[int] = field(default_factory=list)
    dictated: tuple[float, int] | None = None  # threshold and count found, where a test has accepted the C's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cap = min(self.n, math.ceil(float(self.settings["capacity"]) * self.k))

    @property
    def delta(self) -> float:
        return self.k / self.n if self.n else 1.0

    @property
    def first(self) -> Callable[[Array, float], float] | None:
        if not self.gamma:
            return None
        closed, exact = self.settings["shape"] == "closed", self.settings["quantile"] == "exact"
        return lambda magnitude, ratio: gamma_quantile(magnitude, ratio, closed, exact)

    @property
    def even(self) -> bool:
        return bool(self.settings["ratios"] == "even")

    @property
    def max_stages(self) -> int:
        """ceil(log2(1 / delta)), or the most stages whose last ratio is still below 1."""
        most = int(self.settings["max_stages"])
        if self.even:
            several = self.delta < float(self.settings["delta1"])
            return max(1, min(most, math.ceil(math.log2(1 / self.delta)))) if several else 1
        while most > 1 and math.prod([float(self.settings["delta1"])] * (most - 1)) <= self.delta:
            most -= 1
        return most

    def threshold(self, acc: Array, slack: float = 0.0) -> tuple[float, float]:
        ratios = stage_ratios(self.delta, float(self.settings["delta1"]), self.stages, self.even)
        return sidco_thresholds(np.abs(acc), ratios, slack, self.first, self.later)

    def adapt(self, found: int) -> None:
        self.found_since.append(found)
        if len(self.found_since) < int(self.settings["Q"]):
            return
        average = sum(self.found_since) / len(self.found_since)
        low, high = float(self.settings["epsilon_L"]), float(self.settings["epsilon_H"])
        move = int(average < self.k * (1 - low)) - int(average > self.k * (1 + high))
        if move and self.settings["adapt"] == "turning" and self.max_stages > 1:
            off = abs(average / self.k - 1)
            if self.moved:  # as last time, unless that made it worse
                move = -self.moved if off > self.off else self.moved
            if self.stages + move not in range(1, self.max_stages + 1):
                move = -move
            self.moved, self.off = move, off
        self.stages = min(max(self.stages + move, 1), self.max_stages)
        self.found_since.clear()

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        if self.n == 0:
            return self.send(acc, np.zeros(0, np.int64), 0.0, 0, 0)
        eta = self.threshold(acc)[0] if self.dictated is None else self.dictated[0]
        index = np.flatnonzero(np.abs(acc) >= np.float32(eta))
        found = len(index) if self.dictated is None else self.dictated[1]
        flags, stages = 0, self.stages
        if found < self.floor_count:
            index = largest(acc, self.k)
            eta = float(np.abs(acc[index]).min())
        elif found > self.cap:
            index, flags = largest(acc, self.cap), RAISED
            eta = float(np.abs(acc[index]).min())
        self.adapt(found)
        return self.send(acc, index, eta, flags, found, stages)


@dataclass
class GaussianK(Sidco):
    """GaussianKSGD: everything from a normal fit's threshold on, after its corrections, at most `cap`."""

    stages: int = 0

    def adapt(self, found: int) -> None:
        pass

    def threshold(self, acc: Array, slack: float = 0.0) -> tuple[float, float]:
        from scipy.special import ndtri

        x, magnitude = acc.astype(np.longdouble), np.abs(acc).astype(np.float64)
        fitted = max(0.0, float(x.mean()) - float(ndtri(self.delta / 2)) * float(x.std()))
        ends = []
        tried = [(fitted, 1)]
        while tried:
            middle, rounds = tried.pop()
            for t in neighbours(middle, slack):
                count = int((magnitude >= t).sum())
                few, many = 3 * count < 2 * self.k, 3 * count > 4 * self.k
                if rounds < int(self.settings["rounds"]) and (few or many):
                    tried.append((t * (0.5 if few else 1.5), rounds + 1))
                else:
                    ends.append(t)
        return min(ends), max(ends)


@dataclass
class RedSync(Sparse):
    """Fang et al. 2019, section 5.2: Algorithm 2 looks for k or more, 3 moves the bounds of the ratio."""

    age: int = 0
    steps: int = 0
    threshold: np.float32 = field(default_factory=lambda: np.float32(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.binary, self.mean = self.settings["method"] == "binary", self.settings["quantised"] != "off"
        self.drops = self.settings["quantised"] == "printed"
        self.values = "mean" if self.mean else self.values
        self.cap = min(2 * self.k, self.n) if self.binary else self.k

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.mean and super().contracts

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return not self.mean and super().exact

    def at_ratio(self, x: Array, ratio: float) -> np.float32:
        mean = total(np.abs(x)) / self.n
        return np.float32(mean + ratio * (float(x.max()) - mean))

    def trim(self, x: Array) -> int:
        """How many thresholds Algorithm 2 tries until k exceed one (all of a sign, if it has fewer)."""
        for trial in range(1, 1000):
            ratio = 1 - float(self.settings["trim"]) * trial
            threshold = self.at_ratio(x, ratio)
            wanted = min(self.k, np.count_nonzero(x)) if self.mean else self.k
            if ratio <= -1 or threshold < 0 or np.count_nonzero(x > threshold) >= wanted:
                return trial
        raise AssertionError

    def search(self, x: Array) -> tuple[np.float32, int]:
        left, right, tries, threshold = 0.0, 1.0, 0, np.float32(0)
        while right - left > float(self.settings["epsilon"]):
            ratio = left + (right - left) / 2
            threshold, tries = self.at_ratio(x, ratio), tries + 1
            nnz = np.count_nonzero(x > threshold)
            if self.k <= nnz <= 2 * self.k:
                break
            if nnz < self.k:
                right = ratio
            else:
                left = ratio
        return threshold, tries

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        sign, self.steps = -1 if self.mean and self.steps % 2 else 1, self.steps + 1
        if self.n == 0:
            return self.pack(acc, np.zeros(0, np.int64), np.float32(0), 0, 0, 0, sign)
        x = np.maximum(sign * acc, np.float32(0)) if self.mean else np.abs(acc)
        if not self.binary:
            index = largest(x, min(self.k, np.count_nonzero(x)) if self.mean else self.k)
            stages = self.trim(x) if len(index) else 0
            return self.pack(acc, index, x[index].min(initial=np.inf), 0, len(index), stages, sign)
        stages = 0
        if not self.age or self.mean:
            self.threshold, stages = self.search(x)
        self.age = (self.age + 1) % int(self.settings["interval"])
        index = np.flatnonzero(x > self.threshold)
        found, flags = len(index), 0
        scale = (self.threshold.view(np.uint32) + np.uint32(1)).view(np.float32)
        most = min(self.k, np.count_nonzero(x)) if self.mean else self.k
        if found < min(most, self.floor_count):
            index = largest(x, most)
            scale = x[index].min()
            self.age = 0
        elif found > self.cap:
            index, flags = largest(x, self.cap), RAISED
            scale = x[index].min()
        return self.pack(acc, index, scale, flags, found, stages, sign)

    def pack(
        self, acc: Array, index: Array, scale: np.float32, flags: int, found: int, stages: int, sign: int
    ) -> Sent:
        if not self.mean:
            return self.send(acc, index, float(scale), flags, found, stages)
        mean = np.float32(sign * (total(np.abs(acc[index])) / max(len(index), 1)))
        decoded = np.zeros(self.n, np.float32)
        decoded[index] = mean
        body = sparse_body(self.n, self.cap, index, acc[index], "mean", self.indices)
        scale = float(mean) if len(index) else 0.0
        left = decoded.copy()
        if self.drops:  # Algorithm 4, lines 20 to 25: all that was selected
            left[index] = acc[index]
        return Sent(body, len(index), scale, flags | self.form, decoded, found, stages, left)

    def read(self, payload: bytes) -> Array:
        if not self.mean:
            return super().read(payload)
        h = header(payload)
        if not np.isfinite(h["scale"]) or (h["scale"] == 0) != (h["count"] == 0):
            raise ValueError("mean")
        body = payload[HEADER_BYTES:]
        index, _ = read_sparse_body(body, self.n, self.cap, h["count"], "mean", self.indices)
        out = np.zeros(self.n, np.float32)
        out[index] = np.float32(h["scale"])
        return out


@dataclass
class Sampled(Sparse):
    """The k largest of what reaches a threshold that is taken from a sample (Lin et al. 2018, section 5).

    The sample is one element of each L consecutive ones: the floor(u L / 2^32)-th, u the run's 32 random
    bits; where the last run ends before it, that run gives none.
    """

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, at.rank)

    def sample(self, at: Step) -> Array:
        """Indices, ascending."""
        want = max(
            math.ceil(self.settings["sample"] * self.n), math.ceil(self.settings["hits"] * self.n / self.k)
        )
        length = max(1, self.n // want)
        runs = -(-self.n // length)
        draw = Stream(self.salt(at), at.group, at.step).draw32(0, runs)
        index = np.arange(runs, dtype=np.int64) * length + (draw * np.uint64(length) >> np.uint64(32)).astype(
            np.int64
        )
        return index[index < self.n]

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        if self.n == 0:
            return self.send(acc, np.zeros(0, np.int64), 0.0, 0, 0)
        sample = np.sort(np.abs(acc[self.sample(at)]))[::-1]
        threshold = sample[min(math.ceil(len(sample) * self.k / self.n), len(sample)) - 1]
        index = np.flatnonzero(np.abs(acc) >= threshold)
        found, flags = len(index), 0
        if found > self.k:
            index, flags = largest(acc, self.k), RAISED
            threshold = np.abs(acc[index]).min()
        return self.send(acc, index, float(threshold), flags, found)
