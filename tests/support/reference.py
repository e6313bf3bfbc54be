"""The judge: every codec and memory of the core once more, slow and plain, in NumPy.

Written from the papers and docs/wire.md, never from the C files, so that the two can disagree. A codec is
looked up by its registry name in CODECS; a codec of the registry without an entry here fails the tests.

Vectors of elements are float32, float16 or, for "bfloat16", uint16 arrays. `Group` plays one rank's side:

    group = Group("topk", "residual", 16, n, "float32", settings)  # every parameter: no defaults here
    payload = group.encode(gradient, Step(step=0, group=0, rank=0, world=2))
    out = group.decode([payload, other], 0.5)

SIDCo (Abdelmoniem et al., MLSys 2021). The printed Algorithm 1 slips; what is done here is the text of
sections 2 and 3. Where the listing departs from it:
  - it shifts `temp` by eta_{m-1} and returns the last, shifted threshold. Equation (10) says
    eta_m = beta_m log(1/delta_m) + eta_{m-1}: the previous threshold is added back;
  - it skips the count of every Q-th step but divides the sum by Q. Section 3 averages over the Q steps;
  - it filters with > in the stages and with >= at the end. Both stand in the text too: equation (11)
    averages over what exceeds eta_{m-1}, the compressor of section 2.3 keeps |g| >= eta.
  - the Pareto's scale has sigma squared below mu squared, as in equations (9) and (29), not sigma.
Stage 1 averages over all d elements, zeros included (equation 6). delta is k/d. Where nothing exceeds a
stage's threshold, the next one keeps it. The gamma fit of stage 1 needs log |g|: it is made over the
elements that are not zero, and as these are a share s of all, to the ratio delta_1 / s. Its quantile, an
approximation, may come out below 0 and then is 0.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Settings = Mapping[str, float | int | str]

FLT_MAX = np.float32(np.finfo(np.float32).max)
HALF_MAX = {"float16": np.float32(65504.0), "bfloat16": np.uint32(0x7F7F0000).view(np.float32)}
LIMITS = {  # of what a linear body carries: one rank, several ranks
    "float16": (np.float32(65504.0), np.float32(65376.0)),
    "bfloat16": (HALF_MAX["bfloat16"], np.uint32(0x7F7C0000).view(np.float32)),
}
STORAGE = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16),
           "int8": np.dtype(np.int8)}  # fmt: skip
DTYPE_CODE = {"float32": 0, "float16": 1, "bfloat16": 2}

MAGIC, VERSION, HEADER_BYTES, WIRE_TILE = 0x43444953, 2, 64, 65536
NONFINITE, RAISED, HALF, MEAN, LOG8, LOG4, PACKED = 1, 2, 4, 8, 16, 32, 64
HEADER = struct.Struct("<IHHIIQQQIIfIQ")
FIELDS = ("magic", "version", "codec", "dtype", "flags", "n", "count", "step", "group", "rank", "scale",
          "salt", "checksum")  # fmt: skip


# ---- number formats ------------------------------------------------------------------------------


def bf16_to_f32(h: Array) -> Array:
    return (h.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """Round to nearest, ties to even, by integers; NaN stays NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), (u >> np.uint64(16)) | np.uint64(0x40), rounded).astype(np.uint16)


def to_f32(x: Array, dtype: str) -> Array:
    """Exact; a NaN keeps its sign and payload and becomes quiet."""
    if dtype == "bfloat16":
        return bf16_to_f32(x)
    with np.errstate(all="ignore"):
        out = x.astype(np.float32)
    if dtype == "float16":
        u = x.view(np.uint16).astype(np.uint32)
        nan = (u & 0x8000) << 16 | 0x7FC00000 | (u & 0x3FF) << 13
        out = np.where(np.isnan(x), nan, out.view(np.uint32)).astype(np.uint32).view(np.float32)
    return out


def from_f32(x: Array, dtype: str) -> Array:
    """One IEEE rounding: what is too large becomes Inf. A NaN keeps its sign and the payload's first bits."""
    if dtype == "bfloat16":
        return f32_to_bf16(x)
    with np.errstate(all="ignore"):
        out = x.astype(STORAGE[dtype])
    if dtype == "float16":
        u = np.ascontiguousarray(x, np.float32).view(np.uint32)
        nan = u >> 16 & 0x8000 | 0x7E00 | u >> 13 & 0x1FF
        out = np.where(np.isnan(x), nan, out.view(np.uint16)).astype(np.uint16).view(np.float16)
    return out


def from_f32_saturating(x: Array, dtype: str) -> Array:
    """As from_f32, but a finite value stays finite: the largest of the format instead of Inf."""
    if dtype in HALF_MAX:
        top = HALF_MAX[dtype]
        x = np.where(np.isfinite(x), np.clip(x, -top, top), x).astype(np.float32)
    return from_f32(x, dtype)


def finite(x: Array) -> Array:
    """NaN and Inf as 0."""
    return np.where(np.isfinite(x), x, np.float32(0))


def saturate(x: Array) -> Array:
    return np.clip(x, -FLT_MAX, FLT_MAX).astype(np.float32)


# ---- payload -------------------------------------------------------------------------------------


def checksum(payload: bytes) -> int:
    """The checksum of docs/wire.md over all of `payload`, the checksum field itself counted as zero."""
    return checksum_words(payload[:56] + bytes(8) + payload[64:])


def checksum_words(data: bytes) -> int:
    """The sum of 32-bit words, each times the key of its place, modulo 2^64."""
    words = np.frombuffer(_pad(data, 4), "<u4").astype(np.uint64)  # uint64 wraps: modulo 2^64
    return int((words * checksum_keys(len(words))).sum(dtype=np.uint64))


def checksum_keys(words: int) -> Array:
    """The keys of a message's first words."""
    i = np.arange(words, dtype=np.uint64)
    q, b = i % np.uint64(1024) // np.uint64(2), i // np.uint64(1024) + np.uint64(1)
    pair = (np.uint64(1) + q * (np.uint64(0x05E9BF98) + np.uint64(0xC7F7F460) * q)) & np.uint64(_32)
    block = np.uint64(1) + b * (np.uint64(0x2EC4E27BE3115000) + np.uint64(0x2B458B95144C4000) * b)
    return pair * block * np.where(i % np.uint64(2) == 0, np.uint64(1), np.uint64(0x22EDC4B0FA431B6D))


def add_bytes(payloads: Sequence[bytes], own: int, start: int = HEADER_BYTES) -> bytes:
    """Payload `own`, its bytes from `start` on summed over all payloads, modulo 256."""
    bodies = [np.frombuffer(p, np.uint8)[start:] for p in payloads]
    return payloads[own][:start] + np.sum(bodies, axis=0, dtype=np.uint8).tobytes()


def seal(payload: bytes, linear: bool) -> bytes:
    """The payload with its checksum field made right."""
    alone = payload[48:52] == struct.pack("<f", 1)  # nothing is summed with it
    covered = payload[:HEADER_BYTES] if linear and not alone else payload
    return payload[:56] + struct.pack("<Q", checksum(covered)) + payload[64:]


def header(payload: bytes) -> dict[str, Any]:
    return dict(zip(FIELDS, HEADER.unpack(payload[:HEADER_BYTES]), strict=True))


def with_header(payload: bytes, linear: bool, **changes: Any) -> bytes:
    """The payload with other header fields and, unless `checksum` is one of them, a checksum that fits."""
    fields = {**header(payload), **changes}
    out = HEADER.pack(*(fields[f] for f in FIELDS)) + payload[HEADER_BYTES:]
    return out if "checksum" in changes else seal(out, linear)


def _pad(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


LEVELS = {"log8": (8, 1 << 20), "log4": (4, 3 << 22)}  # bits, and the longest step
LEAST = 1 << 24  # the least key of a level that is not zero
FORMS = {"f32": 0, "f16": HALF, "log8": LOG8, "log4": LOG4, "mean": MEAN}


def keys(x: Array) -> Array:
    """Of magnitudes, as int64."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def level_codes(value: Array, least: float, values: str) -> tuple[int, int, Array]:
    """Base and step of the levels from `least` to the largest of `value`, and the nearest one of each."""
    if not len(value):
        return 0, 0, np.zeros(0, np.uint8)
    bits, longest = LEVELS[values]
    top, low, high = 2 ** (bits - 1) - 1, int(keys(np.float32([least]))[0]), int(keys(value).max())
    step = max(1, (high - low) // top)
    base = min(low, 0x7F7FFFFF - top * step)
    if low < LEAST or high - low >= top * longest:
        base, step = max(LEAST, high - top * longest), longest
    steps = (keys(value) - base).astype(np.float32) * (np.float32(1) / np.float32(step)) + np.float32(0.5)
    code = np.clip(np.trunc(steps), 0, top).astype(np.int64)
    return base, step, (code + (top + 1) * np.signbit(value)).astype(np.uint8)


def from_levels(base: int, step: int, code: Array, values: str) -> Array:
    bits, longest = LEVELS[values]
    level, negative = code.astype(np.int64) % 2 ** (bits - 1), code >= 2 ** (bits - 1)
    key = base + level * step
    if step == longest:
        key = np.where(level == 0, 0, key)
    return (key | negative.astype(np.int64) << 31).astype(np.uint32).view(np.float32)


def fields(number: Array, bits: int) -> bytes:
    """The low `bits` bits of each, one after the other, up to a multiple of 8 bytes."""
    each = number.astype(np.int64)[:, None] >> np.arange(bits) & 1
    return _pad(np.packbits(each.astype(np.uint8).ravel(), bitorder="little").tobytes(), 8)


def from_fields(data: bytes, count: int, bits: int) -> Array:
    each = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * bits]
    return (each.reshape(count, bits).astype(np.int64) << np.arange(bits)).sum(axis=1, dtype=np.int64)


def packed_low(n: int, cap: int) -> int:
    return min(12, int(math.log2(n // cap))) if cap else 12


def index_sizes(n: int, cap: int, indices: str) -> list[int]:
    """Bytes of the counts and of what follows them, up to the values."""
    counts = -(-4 * -(-n // WIRE_TILE) // 8) * 8
    if indices == "u16":
        return [counts, -(-2 * cap // 8) * 8]
    low = packed_low(n, cap)
    return [counts, -(-cap * low // 64) * 8, -(-(cap + -(-n >> low)) // 64) * 8]


def value_size(cap: int, values: str) -> int:
    return {"f32": 4 * cap, "f16": 2 * cap, "log8": 8 + cap, "log4": 8 + -(-cap // 2), "mean": 0}[values]


def sparse_body(
    n: int,
    cap: int,
    index: Array,
    value: Array,
    values: str = "f32",
    indices: str = "u16",
    least: float = 0.0,
) -> bytes:
    """Counts of the wire tiles, indices, values; `index` ascends, `value` is float32."""
    tiles = -(-n // WIRE_TILE)
    counts = np.bincount(index // WIRE_TILE, minlength=tiles)[:tiles].astype("<u4")
    if indices == "u16":
        parts = [counts.tobytes(), (index % WIRE_TILE).astype("<u2").tobytes()]
    else:
        low = packed_low(n, cap)
        ones = np.zeros(cap + -(-n >> low), np.int64)
        ones[(index >> low) + np.arange(len(index))] = 1
        parts = [counts.tobytes(), fields(index, low), fields(ones, 1)]
    parts = [p + bytes(size - len(p)) for p, size in zip(parts, index_sizes(n, cap, indices), strict=True)]
    if values in LEVELS:
        base, step, code = level_codes(value, least, values)
        data = struct.pack("<II", base, step) + fields(code, LEVELS[values][0])
    elif values == "mean":
        data = b""
    else:
        data = (from_f32_saturating(value, "float16") if values == "f16" else value).tobytes()
    size = value_size(cap, values)
    return _pad(b"".join(parts) + (data + bytes(size))[:size], 64)


def read_sparse_body(
    body: bytes, n: int, cap: int, count: int, values: str = "f32", indices: str = "u16"
) -> tuple[Array, Array]:
    """Group indices (int64) and float32 values of `count` entries; ValueError if no encoder wrote this."""
    tiles = -(-n // WIRE_TILE)
    sizes = index_sizes(n, cap, indices)
    value_at = sum(sizes)
    if len(body) != -(-(value_at + value_size(cap, values)) // 64) * 64:
        raise ValueError("length")
    counts = np.frombuffer(body, "<u4", tiles).astype(np.int64)
    if count > cap or counts.sum() != count:
        raise ValueError("count")
    tile = np.repeat(np.arange(tiles), counts)
    if indices == "u16":
        index = np.frombuffer(body, "<u2", count, sizes[0]).astype(np.int64) + tile * WIRE_TILE
    else:
        low = packed_low(n, cap)
        ones = np.unpackbits(np.frombuffer(body[sum(sizes[:2]) : value_at], np.uint8), bitorder="little")
        where = []
        for t in range(tiles):  # a tile's runs begin where its first run and the entries before it say
            at = (t * WIRE_TILE >> low) + int(counts[:t].sum())
            runs = -(-min(WIRE_TILE, n - t * WIRE_TILE) >> low)
            found = at + np.flatnonzero(ones[at : at + runs + int(counts[t])])
            if len(found) != counts[t]:
                raise ValueError("bits of a tile")
            where.append(found)
        high = np.concatenate([np.zeros(0, np.int64), *where]) - np.arange(count)
        index = high << low | from_fields(body[sizes[0] :], count, low)
    if (np.diff(index) <= 0).any() or (index >= n).any() or (index // WIRE_TILE != tile).any():
        raise ValueError("indices")
    if values == "mean":
        return index, np.zeros(count, np.float32)
    if values in LEVELS:
        (base, step), (bits, longest) = struct.unpack_from("<II", body, value_at), LEVELS[values]
        highest = base + (2 ** (bits - 1) - 1) * step
        if not (
            LEAST <= base <= highest < 0x7F800000 and 0 < step <= longest if count else base == step == 0
        ):
            raise ValueError("levels")
        return index, from_levels(base, step, from_fields(body[value_at + 8 :], count, bits), values)
    value = np.frombuffer(body, "<f2" if values == "f16" else "<f4", count, value_at).astype(np.float32)
    return index, value


# ---- random bits ---------------------------------------------------------------------------------

COMMON = 0xFFFFFFFF  # the "rank" of the stream that all ranks share
_32 = (1 << 32) - 1


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


# ---- sums ----------------------------------------------------------------------------------------


def halves(x: Array, least: int) -> Array:
    """The last axis, of a power of two, added up in halves until `least` numbers are left."""
    while x.shape[-1] > least:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def total(x: Array) -> float:
    """A sum in the order that docs/wire.md fixes: units of 1024, in each 128 lanes of x's own type; what is
    too large for float32 in lanes of float64; and 1024 running sums of units in float64."""
    units = np.zeros(-(-len(x) // 1024) * 1024, x.dtype)
    units[: len(x)] = x
    sums = np.zeros(1024)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(units), 1 << 20):
            rows = units[first : first + (1 << 20)].reshape(-1, 8, 128)
            part = unit(rows).astype(np.float64)
            wide = ~np.isfinite(part)
            part[wide] = unit(rows[wide].astype(np.float64))
            sums[: len(part)] += part
    return float(halves(sums, 1)[0])


def unit(rows: Array) -> Array:
    lanes = np.zeros((len(rows), 128), rows.dtype)
    for row in range(8):
        lanes += rows[:, row]
    four = halves(lanes, 4)
    out: Array = (four[:, 0] + four[:, 1]) + (four[:, 2] + four[:, 3])
    return out


# ---- selection -----------------------------------------------------------------------------------


def target_count(n: int, density: float) -> int:
    return min(n, max(1, math.floor(density * n + 0.5)))


def largest(acc: Array, k: int) -> Array:
    """Ascending indices of the k largest magnitudes; among equals the lowest index wins."""
    order = np.argsort(-np.abs(acc.astype(np.float64)), kind="stable")
    return np.sort(order[:k])


def stage_ratios(delta: float, first: float, stages: int) -> list[float]:
    """delta_1 ... delta_M, their product delta."""
    return [first] * (stages - 1) + [delta / first ** (stages - 1)]


def exponential_quantile(count: Array, mean: Array, square: Array, ratio: float) -> Array:
    return mean * math.log(1 / ratio)


def pareto_quantile(count: Array, mean: Array, square: Array, ratio: float) -> Array:
    """Equations (7) to (9); where nothing varies, their limit."""
    with np.errstate(all="ignore"):
        variance = square - mean * mean
        flat = (variance <= 0) | (mean * mean > 1e15 * variance)
        moment = np.where(flat, 0, mean * mean / variance)
        alpha, beta = (1 - moment) / 2, mean * (moment + 1) / 2
        power = -alpha * math.log(ratio)
        over = np.where(np.abs(power) < 1e-9, -math.log(ratio), np.expm1(power) / np.where(alpha, alpha, 1))
        return np.where(flat, mean, beta * over)


def gamma_quantile(magnitude: Array, ratio: float, closed: bool) -> float:
    """Equations (15) and (16), or the shape of equation (26), by bisection."""
    some = magnitude[magnitude > 0].astype(np.longdouble)
    if not len(some):
        return 0.0
    mean = some.mean()
    s = float(np.log(mean) - np.log(some).mean())
    ratio *= len(magnitude) / len(some)
    if s < 1e-9:  # so narrow a gamma has, by (15), a quantile far below 0
        return 0.0
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    if not closed:
        low, high = alpha / 4, alpha * 4
        for _ in range(200):
            alpha = math.sqrt(low * high)
            low, high = (alpha, high) if digamma(alpha) - math.log(alpha) + s < 0 else (low, alpha)
    return max(0.0, -float(mean) / alpha * (math.log(ratio) + math.lgamma(alpha)))


def digamma(x: float) -> float:
    from scipy.special import digamma as value

    return float(value(x))


def neighbours(t: float, slack: float) -> list[float]:
    """t, and where a comparison may see it: off by `slack`, or by the rounding to float32 of a denormal."""
    half = 2.0**-150
    return [t * (1 - slack) - half, t, t * (1 + slack) + half] if slack else [t]


def sidco_thresholds(
    magnitude: Array,
    ratios: Sequence[float],
    slack: float = 0.0,
    first: Callable[[Array, float], float] | None = None,
    later: Callable[[Array, Array, Array, float], Array] = exponential_quantile,
) -> tuple[float, float]:
    """Lowest and highest eta_M of SIDCo if every stage's threshold may be off by `slack`, relatively.

    With slack 0 both are the threshold of the paper's equations. The slack matters because an element
    that sits on a stage's threshold enters or leaves the next mean by one rounding: that to float32, which
    among denormals is no small part of it. `later` is the quantile for count, mean and mean square of the
    exceedances, `first` that of stage 1 where it is another one.
    """
    ordered = np.sort(magnitude.astype(np.longdouble))
    beyond = np.append(np.cumsum(ordered[::-1])[::-1], 0)  # beyond[i]: sum of ordered[i:]
    beyond2 = np.append(np.cumsum(ordered[::-1] ** 2)[::-1], 0)
    eta = np.zeros(1, np.longdouble)
    for stage, ratio in enumerate(ratios):
        eta = np.unique([neighbours(t, slack) for t in eta])
        if not stage and first:
            eta = np.array([first(magnitude.astype(np.float64), ratio)], np.longdouble)
            continue
        at = np.searchsorted(ordered, eta, "right") if stage else np.zeros(1, np.int64)
        count = len(ordered) - at
        some = np.maximum(count, 1)
        mean = beyond[at] / some - eta
        square = beyond2[at] / some - 2 * eta * (beyond[at] / some) + eta * eta
        eta = np.where(count > 0, eta + later(count, mean, square, ratio), eta)
    return float(eta.min()), float(eta.max())


# ---- codecs --------------------------------------------------------------------------------------


@dataclass
class Step:
    step: int = 0
    group: int = 0
    rank: int = 0
    world: int = 1
    seed: int = 0
    carry: float = 1.0  # of what is owed, before the gradient is added
    origin: int = 0  # of the state that it starts from, in bytes from the one that it writes


@dataclass
class Sent:
    """What one encode decided: the body, the header's own fields, and how much of acc has left."""

    body: bytes
    count: int
    scale: float
    flags: int
    decoded: Array  # float32, to be subtracted from acc
    found: int
    stages: int = 0


@dataclass
class Codec:
    wire_id: int
    n: int
    dtype: str
    settings: Settings
    linear: bool = False
    lossless: bool = False
    sparse: bool = False
    feedback: bool = False  # the memory subtracts what was sent, or what all ranks made of it
    exact = True  # the difference of acc and what is sent is a float32, unless it overflows a half
    contracts = True  # what is sent of an element is never farther from it than 0 is

    def salt(self, at: Step) -> int:
        """The header's: of the stream that is drawn from; 0 where none is."""
        return 0


@dataclass
class Linear(Codec):
    """none, fp16, bf16: body = round(clamp(acc) * (1/world)), as plain DDP divides; body * world has left.

    fp16 and bf16 clamp to the format's largest value, a little below it where several ranks are summed.
    """

    body: str | None = None
    linear: bool = True

    @property
    def body_dtype(self) -> str:
        return self.body or self.dtype

    @property
    def body_count(self) -> int:
        return self.n

    def body_values(self, payload: bytes) -> Array:
        return self.read(payload)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        factor = np.float32(1) / np.float32(at.world)
        with np.errstate(all="ignore"):
            if not self.lossless:
                limit = LIMITS[self.body_dtype][at.world > 1]
                acc = np.clip(acc, -limit, limit)
            body = from_f32(acc * factor, self.body_dtype)
            decoded = to_f32(body, self.body_dtype) * np.float32(at.world)
            # The gradient's own NaN and Inf travel in the body, so that the sum shows them on every rank.
            carried = np.where(np.isfinite(gradient), to_f32(body, self.body_dtype), gradient)
            body = from_f32(carried.astype(np.float32), self.body_dtype)
        data = body.astype(body.dtype.newbyteorder("<")).tobytes()
        return Sent(_pad(data, 64), self.n, float(factor), 0, decoded, self.n)

    def read(self, payload: bytes) -> Array:
        data = np.frombuffer(payload, STORAGE[self.body_dtype].newbyteorder("<"), self.n, HEADER_BYTES)
        return to_f32(data, self.body_dtype)


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

    def read(self, payload: bytes) -> Array:
        h = header(payload)
        if h["flags"] & ~(NONFINITE | RAISED) != self.form:
            raise ValueError("flags")
        body = payload[HEADER_BYTES:]
        index, value = read_sparse_body(body, self.n, self.cap, h["count"], self.values, self.indices)
        out = np.zeros(self.n, np.float32)
        out[index] = value
        return out


@dataclass
class TopK(Sparse):
    """Exactly k elements: the largest magnitudes, ties by the lowest index."""

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        index = largest(acc, self.k)
        threshold = float(np.abs(acc[index]).min()) if self.k else 0.0
        return self.send(acc, index, threshold, 0, self.k)


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
        closed = self.settings.get("shape") == "closed"
        return (lambda magnitude, ratio: gamma_quantile(magnitude, ratio, closed)) if self.gamma else None

    @property
    def max_stages(self) -> int:
        """The most stages whose last ratio is still below 1."""
        most = int(self.settings["max_stages"])
        while most > 1 and math.prod([float(self.settings["delta1"])] * (most - 1)) <= self.delta:
            most -= 1
        return most

    def threshold(self, acc: Array, slack: float = 0.0) -> tuple[float, float]:
        ratios = stage_ratios(self.delta, float(self.settings["delta1"]), self.stages)
        return sidco_thresholds(np.abs(acc), ratios, slack, self.first, self.later)

    def adapt(self, found: int) -> None:
        self.found_since.append(found)
        if len(self.found_since) < int(self.settings["Q"]):
            return
        average = sum(self.found_since) / len(self.found_since)
        epsilon = float(self.settings["epsilon"])
        move = int(average < self.k * (1 - epsilon)) - int(average > self.k * (1 + epsilon))
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
        if found > self.cap:
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
class RandK(Codec):
    """k elements at random, values only; `linear`: the same ones on all ranks, divided by their number.

    By blocks of 4096 elements. The body's entries of the block at element a begin with number
    floor((k a + r) / n), r from 64 random bits; they stand for a uniform subset of the block (Floyd's).
    """

    k: int = 0
    cap: int = 0
    half: bool = False
    sparse: bool = True

    def __post_init__(self) -> None:
        self.k = self.cap = target_count(self.n, float(self.settings["density"]))
        self.half = self.settings["values"] == "f16"

    @property
    def times(self) -> float:
        scaled = self.settings["scaling"] == "auto" and not self.feedback and self.k
        return float(np.float32(self.n / self.k)) if scaled else 1.0

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return self.times == 1

    @property
    def body_count(self) -> int:
        return self.k

    @property
    def body_dtype(self) -> str:
        return "float16" if self.half else "float32"

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, COMMON if self.linear else at.rank)

    def chosen(self, stream: Stream) -> Array:
        """Indices, in the order of the body."""
        if not self.n:
            return np.zeros(0, np.int64)
        low, high = (int(v) for v in stream.blocks(np.array([1 << 62], np.uint64))[0, :2])
        r = (high << 32 | low) * self.n >> 64
        index: list[int] = []
        for at in range(0, self.n, 4096):
            size = min(4096, self.n - at)
            count = (self.k * (at + size) + r) // self.n - (self.k * at + r) // self.n
            take = min(count, size - count)
            taken: dict[int, None] = {}
            for word, j in zip(stream.draw32(at, take).tolist(), range(size - take, size), strict=True):
                t = word * (j + 1) >> 32
                taken[j if t in taken else t] = None
            subset = [i for i in range(size) if i not in taken] if count > take else list(taken)
            index += [at + i for i in subset]
        return np.array(index, np.int64)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        world = at.world if self.linear else 1
        divide = np.float32(1) / np.float32(world)
        top = LIMITS["float16"][world > 1] if self.half else np.uint32(0x7F7C0000).view(np.float32)
        if not self.half and world == 1 and self.times == 1:
            top = FLT_MAX
        index = self.chosen(Stream(self.salt(at), at.group, at.step))
        value = np.clip(acc[index], -(top / np.float32(self.times)), top / np.float32(self.times))
        body = from_f32(value * (divide * np.float32(self.times)), self.body_dtype)
        decoded = np.zeros(self.n, np.float32)
        decoded[index] = to_f32(body, self.body_dtype) * np.float32(world)
        if self.linear and not np.isfinite(gradient).all():
            body[:] = np.nan
        data = _pad(body.astype(body.dtype.newbyteorder("<")).tobytes(), 64)
        scale = float(divide) if self.linear else self.times
        return Sent(data, self.k, scale, HALF if self.half else 0, decoded, self.k)

    def body_values(self, payload: bytes) -> Array:
        dtype = STORAGE[self.body_dtype].newbyteorder("<")
        return to_f32(np.frombuffer(payload, dtype, self.k, HEADER_BYTES), self.body_dtype)

    def read(self, payload: bytes) -> Array:
        h, value = header(payload), self.body_values(payload)
        if h["count"] != self.k or any(payload[HEADER_BYTES + self.k * (2 if self.half else 4) :]):
            raise ValueError("count or padding")
        lost = self.linear and self.k and np.isnan(value[0])
        out = np.full(self.n, np.nan if lost else 0, np.float32)
        out[self.chosen(Stream(h["salt"], h["group"], h["step"]))] = value
        return out


def popcounts(stream: Stream, n: int) -> Array:
    """Of 64 bits for each of n elements, less 32: nearly normal."""
    words = stream.blocks(np.arange(-(-n // 2), dtype=np.uint64)).astype("<u4")
    return np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(axis=1, dtype=np.int64)[:n] - 32.0


@dataclass
class PowerSgd(Codec):
    """PowerSGD, algorithm 1, of one rank, one matrix (as square as n elements go, the last row may be short).

    What float32 makes of a column that almost lies in the span of those before it is anybody's; so the
    factors are taken from the payload, and judged by what the algorithm says of them.
    """

    linear: bool = True
    exact = False
    contracts = False
    body_dtype = "float32"
    dictated: bytes = b""

    def __post_init__(self) -> None:
        self.cols = max(1, math.ceil(math.sqrt(self.n)))
        self.rows = -(-self.n // self.cols)
        self.r = min(int(self.settings["r"]), self.rows, self.cols)
        saved = self.r * (self.rows + self.cols) * float(self.settings["min_ratio"])
        self.whole = self.cols < 2 or self.n < 2 or saved >= self.n
        self.body_count = self.n if self.whole else self.r * (self.rows + self.cols)
        self.q = np.zeros((self.r, self.cols), np.float32)

    def matrix(self, x: Array) -> Array:
        out = np.zeros(self.rows * self.cols, np.float64)
        out[: self.n] = np.clip(x, -(2.0**96), 2.0**96)
        return out.reshape(self.rows, self.cols)

    def start(self, at: Step) -> Array:
        """Q to begin with: what the last step ended with, drawn where that is 0; columns of length 1."""
        out = self.q.astype(np.float64)
        if not all(row.any() for row in out):
            stream = Stream(salt_of(at.seed, COMMON), at.group, at.step)
            drawn = popcounts(stream, self.r * self.cols).reshape(self.r, -1)
            for row, other in zip(out, drawn, strict=True):
                if not row.any():
                    row[:] = other if other.any() else np.eye(1, self.cols)
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        self.q = out.astype(np.float32)
        return out

    def factors(self, payload: bytes) -> tuple[Array, Array]:
        body = np.frombuffer(payload, "<f4", self.body_count, HEADER_BYTES)
        return body[: self.r * self.rows].reshape(self.r, -1), body[self.r * self.rows :].reshape(self.r, -1)

    def judge(self, m: Array, start: Array, p: Array, q: Array) -> None:
        """p: orthonormal or zero, spanning what M start spans; q = M^T p. All to float32's precision."""
        p, q = p.astype(np.float64), q.astype(np.float64)
        size, least = np.linalg.norm(m), 2.0**-148 * math.sqrt(self.rows * self.cols)
        length = np.linalg.norm(p, axis=1)
        assert np.allclose(p @ p.T, np.diag((length > 0).astype(float)), atol=2e-6)
        image = m @ start.T
        for k in range(self.r):
            lost = image[:, k] - p[: k + 1].T @ (p[: k + 1] @ image[:, k])
            assert np.linalg.norm(lost) <= 1e-5 * size + least, (k, np.linalg.norm(lost), size)
        assert np.linalg.norm(q - p @ m) <= 1e-5 * size + least

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        assert at.world == 1 or self.whole
        factor = np.float32(1) / np.float32(at.world)
        bad = not np.isfinite(gradient).all()
        if self.whole:
            top = FLT_MAX if at.world == 1 else np.uint32(0x7F7C0000).view(np.float32)
            body = np.clip(acc, -top, top) * factor
            decoded = body * np.float32(at.world)
            carried = np.where(np.isfinite(gradient), body, gradient).astype("<f4")
            return Sent(_pad(carried.tobytes(), 64), self.n, float(factor), 0, decoded, self.n)
        p, q = self.factors(self.dictated)
        decoded, start = np.zeros(self.n, np.float32), self.start(at)
        if bad:
            assert np.isnan(q).all()
        else:
            self.judge(self.matrix(acc), start, p, q)
            decoded = self.product(self.dictated)
        data = self.dictated[HEADER_BYTES : HEADER_BYTES + 4 * self.body_count]
        return Sent(_pad(data, 64), self.body_count, float(factor), 0, decoded, self.body_count)

    def learn(self, payload: bytes) -> None:
        if not self.whole:
            self.q = self.factors(payload)[1].copy()

    def body_values(self, payload: bytes) -> Array:
        return np.frombuffer(payload, "<f4", self.body_count, HEADER_BYTES)

    def read(self, payload: bytes) -> Array:
        if self.whole:
            return self.body_values(payload).astype(np.float32)
        return np.float32(0) + self.product(payload)

    def product(self, payload: bytes) -> Array:
        p, q = self.factors(payload)
        out = p[0][:, None] * q[0][None, :]
        for k in range(1, self.r):
            out = out + p[k][:, None] * q[k][None, :]
        return out.reshape(-1)[: self.n].astype(np.float32)


@dataclass
class RedSync(Sparse):
    """Fang et al. 2019, section 5.2: Algorithm 2 looks for k or more, 3 moves the bounds of the ratio."""

    age: int = 0
    steps: int = 0
    threshold: np.float32 = field(default_factory=lambda: np.float32(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.binary, self.mean = self.settings["method"] == "binary", self.settings["quantised"] == "on"
        self.values = "mean" if self.mean else self.values
        self.cap = min(2 * self.k, self.n) if self.binary else self.k

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.mean

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return not self.mean

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
        if found > self.cap:
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
        return Sent(body, len(index), scale, flags | self.form, decoded, found, stages)

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


FLT_MIN = np.float32(2.0**-126)
M_MAX = float.fromhex("0x1.fffffcp127")


def float8(bias: int, mantissa: int) -> Array:
    """The numbers of the codes 0 to 127, by the definition of a float; Inf and NaN read as numbers too."""
    code = np.arange(128)
    exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
    return np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))


FLOAT8 = {"e4m3": (float8(7, 3), 0x7E), "e5m2": (float8(15, 2), 0x7B)}  # and the largest finite code


def pack(code: Array, width: int) -> bytes:
    """The low `width` bits of every code, lowest first, from the lowest bit of the first byte on."""
    bits = code.astype(np.int64)[:, None] >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def unpack(data: bytes, n: int, width: int) -> Array:
    """Unsigned fields."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: n * width]
    return (bits.reshape(n, width).astype(np.int64) << np.arange(width)).sum(axis=1)


@dataclass
class Quantised(Codec):
    """code = round(acc / scale) on a grid of numbers; a scale a block, or one for all (block 0)."""

    block: int = 256
    width: int = 8
    top: float = 127
    grid: str = "integers"
    norm: str = "max"
    k: int = 0
    cap: int = 0
    draw_bits: int = 0

    contracts = False  # half a step or a step, see farthest()

    def __post_init__(self) -> None:
        self.k = self.cap = self.n

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, at.rank) if self.draw_bits else 0

    def measure(self, x: Array) -> float:
        """M of a block or a group."""
        if self.norm == "l2":
            return math.sqrt(total(x.astype(np.float64) ** 2))
        return float(np.abs(x).max(initial=0))

    def scale(self, x: Array) -> np.float32:
        scale = np.float32(min(self.measure(x), M_MAX) / self.top)
        return scale if scale >= FLT_MIN else np.float32(0)

    def spans(self) -> list[slice]:
        step = self.block or max(self.n, 1)
        return [slice(at, min(at + step, self.n)) for at in range(0, self.n, step)]

    def magnitudes(self, a: Array, draw: Array) -> Array:
        """Grid position (integer, or code of a float of 8 bits) of float32 0 <= a <= top."""
        if self.grid == "integers":
            whole = np.trunc(a)
            if self.draw_bits == 0:
                return np.rint(a).astype(np.int64)
            if self.draw_bits == 16:
                u = (draw.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
                return np.trunc(a + u).astype(np.int64)
            up = np.trunc((a - whole) * np.float32(2.0**31)).astype(np.int64) > draw.astype(np.int64) >> 1
            return whole.astype(np.int64) + up
        numbers, largest = FLOAT8[self.grid]
        low = np.clip(np.searchsorted(numbers[: largest + 1], a, "right") - 1, 0, largest - 1)
        gap = numbers[low + 1] - numbers[low]
        part = (a - numbers[low]) / gap  # exact in float64
        if self.draw_bits == 0:
            return low + ((part > 0.5) | ((part == 0.5) & (low % 2 == 1)))
        u = (draw.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
        subnormal = (
            a < numbers[8 if self.grid == "e4m3" else 4]
        )  # a grid of equal steps, rounded as integers are
        return np.where(
            subnormal,
            np.trunc(a / np.float32(numbers[1]) + u).astype(np.int64),
            low + (part + u.astype(np.float64) >= 1),
        )

    def numbers(self, code: Array) -> Array:
        """What codes (unsigned) stand for, before the scale; float32."""
        if self.grid == "integers":
            half = 1 << (self.width - 1)
            return ((code ^ half) - half).astype(np.float32)
        values, largest = FLOAT8[self.grid]
        magnitude = values[code & 127].astype(np.float32)
        special = code & 127 > largest
        infinite = special & (code & 127 == 0x7C) & (self.grid == "e5m2")
        magnitude[special] = np.nan
        magnitude[infinite] = np.inf
        return np.where(code & 128, -magnitude, magnitude)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        stream = Stream(self.salt(at), at.group, at.step)
        draw = stream.draw32(0, self.n) if self.draw_bits == 32 else stream.draw16(self.n)
        code, decoded = np.zeros(self.n, np.int64), np.zeros(self.n, np.float32)
        scales = [self.scale(acc[s]) for s in self.spans()]
        for span, scale in zip(self.spans(), scales, strict=True):
            inverse = np.float32(1) / scale if scale else np.float32(0)
            level = acc[span] * inverse
            magnitude = self.magnitudes(np.minimum(np.abs(level), np.float32(self.top)), draw[span])
            if self.grid == "integers":
                code[span] = np.where(level < 0, -magnitude, magnitude) & (1 << self.width) - 1
            else:
                code[span] = magnitude | np.where(np.signbit(level), 128, 0)
            decoded[span] = self.numbers(code[span]) * scale
        body = pack(code, self.width)
        if self.block:
            body = _pad(np.array(scales, "<f4").tobytes(), 8) + body
        return Sent(_pad(body, 64), self.n, float(max(scales, default=0)), 0, decoded, self.n)

    def read(self, payload: bytes) -> Array:
        scales = np.array([header(payload)["scale"]], np.float32)
        codes_at = HEADER_BYTES
        if self.block:
            scales = np.frombuffer(payload, "<f4", len(self.spans()), HEADER_BYTES)
            codes_at += -(-4 * len(scales) // 8) * 8
        out = (
            self.numbers(unpack(payload[codes_at:], self.n, self.width))
            if self.n
            else np.zeros(0, np.float32)
        )
        for span, scale in zip(self.spans(), scales, strict=False):
            out[span] *= scale
        return out

    def farthest(self, acc: Array, sent: Sent) -> Array:
        payload = bytes(48) + struct.pack("<f", sent.scale) + bytes(12) + sent.body
        scale = np.zeros(self.n)
        if self.block:
            for span, s in zip(
                self.spans(), np.frombuffer(payload, "<f4", len(self.spans()), 64), strict=True
            ):
                scale[span] = s
        else:
            scale[:] = sent.scale
        step = scale.copy()
        if self.grid != "integers":
            numbers, largest = FLOAT8[self.grid]
            level = np.abs(np.divide(acc, scale, out=np.zeros(self.n), where=scale > 0))
            low = np.clip(np.searchsorted(numbers[: largest + 1], level, "right") - 1, 0, largest - 1)
            step *= numbers[low + 1] - numbers[low]
        step *= (1 if self.draw_bits else 0.5) * (1 + 2.0**-14)
        return np.maximum(np.abs(acc.astype(np.float64)) - scale * self.top, step)


def integers(width: int) -> Callable[..., Quantised]:
    def make(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
        return Quantised(
            wire_id, n, dtype, settings, block=int(settings["block"]), width=width, top=2 ** (width - 1) - 1,
            draw_bits=16 if settings["rounding"] == "stochastic" else 0,
        )  # fmt: skip

    return make


def fp8(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    grid = str(settings["format"])
    numbers, largest = FLOAT8[grid]
    return Quantised(
        wire_id, n, dtype, settings, block=int(settings["block"]), top=float(numbers[largest]), grid=grid,
        draw_bits=16 if settings["rounding"] == "stochastic" else 0,
    )  # fmt: skip


def qsgd(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    """QSGD, section 3.1: s levels of the norm, rounded at random, right on average."""
    width = int(settings["bits"])
    return Quantised(
        wire_id, n, dtype, settings, block=int(settings["bucket"]), width=width, top=2 ** (width - 1) - 1,
        norm=str(settings["norm"]), draw_bits=16 if settings["bucket"] else 32,
    )  # fmt: skip


class TernGrad(Quantised):
    """Clip at c standard deviations; scale = largest magnitude; -1, 0, 1 at random, right on average."""

    def measure(self, x: Array) -> float:
        largest = float(np.abs(x).max(initial=0))
        if not len(x):
            return largest
        x = x.astype(np.float64)
        mean, square = total(x) / len(x), total(x**2) / len(x)
        variance = square - mean * mean
        if variance <= square * 2.0**-40:  # all equal: nothing is an outlier
            return largest
        return min(largest, float(self.settings["clip"]) * math.sqrt(variance))


def terngrad(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    return TernGrad(wire_id, n, dtype, settings, block=0, width=2, top=1, draw_bits=16)


class TernGradShared(TernGrad):
    """TernGrad with scaler sharing: each rank clips and measures its own; the largest scaler is all ranks'.

    A body is 128 scalers, of which a rank writes its own, then n codes and a 1, all summed as bytes. One
    rank's encode() does both rounds; of several, Group.further() does the second.
    """

    exact = False
    body_dtype = "int8"
    second_at = HEADER_BYTES + 512

    @property
    def body_count(self) -> int:
        return 512 + self.n + 1

    def own(self, acc: Array, gradient: Array) -> np.float32:
        return self.scale(acc) if np.isfinite(gradient).all() else np.float32(np.nan)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        slots = np.zeros(128, "<f4")
        slots[at.rank] = self.own(acc, gradient)
        codes, decoded = bytes(self.n + 1), np.zeros(self.n, np.float32)
        if at.world == 1:
            codes, decoded = self.second(acc, gradient, slots[0], at)
        body = _pad(slots.tobytes() + codes, 64)
        return Sent(body, self.n, float(np.float32(1) / np.float32(at.world)), 0, decoded, self.n)

    def second(self, acc: Array, gradient: Array, shared: np.float32, at: Step) -> tuple[bytes, Array]:
        """The second slice, and what has left."""
        if np.isnan(shared):
            return b"\xff" * (self.n + 1), np.zeros(self.n, np.float32)
        own = self.own(acc, gradient)
        inverse = np.float32(1) / shared if shared else np.float32(0)
        level = np.clip(acc, -own, own) * inverse
        draw = Stream(self.salt(at), at.group, at.step).draw16(self.n)
        magnitude = self.magnitudes(np.minimum(np.abs(level), np.float32(1)), draw)
        code = np.where(level < 0, -magnitude, magnitude).astype(np.int8)
        return code.tobytes() + b"\1", code.astype(np.float32) * shared

    def shared(self, payload: bytes) -> np.float32:
        """The largest scaler of a summed payload; NaN where one is none."""
        slots = np.frombuffer(payload, "<f4", 128, HEADER_BYTES)
        sound = ~np.signbit(slots) & ((slots == 0) | ((slots >= FLT_MIN) & (slots <= np.float32(M_MAX))))
        return np.float32(slots.max() if sound.all() else np.nan)

    def read(self, payload: bytes) -> Array:
        codes = np.frombuffer(payload, np.int8, self.n + 1, self.second_at)
        world, shared = round(1 / header(payload)["scale"]), self.shared(payload)
        unit = np.float32(float(shared) / world) if codes[-1] == world else np.float32(np.nan)
        return codes[:-1].astype(np.float32) * unit


def terngrad_shared(wire_id: int, n: int, dtype: str, settings: Settings) -> TernGradShared:
    return TernGradShared(wire_id, n, dtype, settings, linear=True, block=0, width=8, top=1, draw_bits=16)


@dataclass
class Signs(Codec):
    """A bit an element: what it decodes to is `high` where the element is >= 0 (so also -0), else `low`.

    `values` says what the two are: a parameter (signSGD, Signum, Marsit), the mean magnitude (EF-signSGD),
    the means of both sides (1-bit SGD), or the Euclidean norm, with drawn signs (SSDM).
    """

    values: str = ""
    aggregate: str = "mean"
    together: int = 4  # payloads that are added up before they are added to the others

    def __post_init__(self) -> None:
        self.k = self.cap = self.n
        self.pair = self.values == "means"
        self.aggregate = str(self.settings.get("aggregate", "mean"))

    def salt(self, at: Step) -> int:
        streams = {"norm": at.rank, "eta_s": COMMON}
        return salt_of(at.seed, streams[self.values]) if self.values in streams else 0

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        negative = acc < 0
        above = total(np.where(negative, np.float32(0), acc))
        beneath = total(np.where(negative, acc, np.float32(0)))
        count = int(negative.sum())
        if self.values in ("magnitude", "eta_s"):
            high = np.float32(self.settings[self.values])
            low = -high
        elif self.values == "mean":
            high = np.float32((above - beneath) / self.n if self.n else 0)
            low = -high
        elif self.values == "means":
            high = np.float32(above / (self.n - count) if count < self.n else 0)
            low = np.float32(beneath / count if count else 0)
        else:
            norm = math.sqrt(total(acc.astype(np.float64) ** 2))
            high = min(FLT_MAX, np.float32(min(norm, float(FLT_MAX))))
            low = -high
            negative = self.drawn(acc, high, Stream(self.salt(at), at.group, at.step).draw32(0, self.n))
        data = np.packbits(negative, bitorder="little").tobytes()
        data = _pad(data, 8) + (struct.pack("<fI", low, 0) if self.pair else b"")
        decoded = np.where(negative, low, high).astype(np.float32)
        return Sent(_pad(data, 64), self.n, float(high), 0, decoded, self.n)

    @staticmethod
    def drawn(acc: Array, norm: Array, u: Array) -> Array:
        """The other sign with probability 1/2 - |acc| / (2 norm): where u, of two's complement, is below
        -|acc| / norm in units of 2^-31, rounded to the nearest."""
        if norm == 0:
            return np.zeros(len(acc), bool)
        up = np.float32(2.0**64 if norm < 2.0**-96 else 1)
        stays = np.abs(acc) * up * (np.float32(2.0**31 * (1 + 2.0**-22)) / (np.float32(norm) * up))
        least = np.float32(-0.5) - np.minimum(stays, np.float32(2**31))
        return (acc < 0) ^ (u.astype(np.uint32).view(np.int32) < np.trunc(least.astype(np.float64)))

    def negative(self, payload: bytes) -> Array:
        body = np.frombuffer(payload, np.uint8, -(-self.n // 8), HEADER_BYTES)
        return np.unpackbits(body, bitorder="little")[: self.n].astype(bool)

    def read(self, payload: bytes) -> Array:
        high = np.float32(header(payload)["scale"])
        low = -high
        if self.pair:
            (low,) = struct.unpack_from("<f", payload, HEADER_BYTES + -(-self.n // 64) * 8)
        return np.where(self.negative(payload), low, high).astype(np.float32)

    def combine(self, payloads: Sequence[bytes]) -> Array | None:
        """What a vote comes to, whatever the scale; None where the payloads are added up."""
        if self.aggregate == "mean":
            return None
        value, positive = np.float32(header(payloads[0])["scale"]), np.zeros(self.n, np.int64)
        for payload in payloads:
            positive += ~self.negative(payload)
        if self.aggregate == "majority":
            return np.sign(2 * positive - len(payloads)).astype(np.float32) * value
        h = header(payloads[0])
        picked = (
            Stream(h["salt"], h["group"], h["step"]).draw16(self.n) * len(payloads) >> 16
        )  # one of the ranks
        return np.where(picked < positive, value, -value).astype(np.float32)


CODECS: dict[str, Callable[..., Any]] = {
    "none": lambda *a: Linear(*a, lossless=True),
    "fp16": lambda *a: Linear(*a, body="float16"),
    "bf16": lambda *a: Linear(*a, body="bfloat16"),
    "powersgd": PowerSgd,
    "topk": TopK,
    "sidco-e": Sidco,
    "sidco-gp": lambda *a: Sidco(*a, later=pareto_quantile, gamma=True),
    "sidco-p": lambda *a: Sidco(*a, later=pareto_quantile),
    "gaussiank": GaussianK,
    "dgc": Sampled,
    "randk": lambda *a: RandK(*a, linear=True),
    "randk-own": RandK,
    "int8": integers(8),
    "int4": integers(4),
    "fp8": fp8,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "terngrad-shared": terngrad_shared,
    "redsync": RedSync,
    "signsgd": lambda *a: Signs(*a, values="magnitude"),
    "efsignsgd": lambda *a: Signs(*a, values="mean"),
    "onebit": lambda *a: Signs(*a, values="means"),
    "signum": lambda *a: Signs(*a, values="magnitude"),
    "ssdm": lambda *a: Signs(*a, values="norm"),
    "marsit": lambda *a: Signs(*a, values="eta_s"),
}


# ---- memories ------------------------------------------------------------------------------------


def norm(x: Array) -> float:
    """Euclidean norm in float64."""
    return math.sqrt(total(x.astype(np.float64) ** 2))


class Memory:
    """none. `vec` is what is kept, vectors x n; vec[0] becomes acc, then what the codec left of it.

    feedback: what was sent is taken out of acc. `gradient` is always finite here.
    """

    vectors, feedback, momentum = 0, False, False

    def __init__(self, codec: Codec, settings: Settings) -> None:
        self.codec, self.settings = codec, settings
        self.vec = np.zeros((self.vectors, codec.n), np.float32)

    def number(self, name: str, default: float) -> np.float32:
        return np.float32(self.settings.get(name, default))

    def accumulate(self, gradient: Array, at: Step) -> Array:
        """acc, without any change of what is kept."""
        return gradient

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        """What is kept while all of acc counts as kept."""

    def sent(self, decoded: Array) -> None:
        if self.feedback:
            self.vec[0] = saturate(self.vec[0] - decoded)

    def undo(self, gradient: Array) -> None:
        """From what take() left."""

    def received(self, update: Array) -> None:
        pass


class Residual(Memory):
    """e = beta e + gamma g, then what was sent is subtracted. GRACE's weights; both 1: error feedback."""

    vectors, feedback = 1, True

    def accumulate(self, gradient: Array, at: Step) -> Array:
        beta, gamma = self.number("beta", 1) * np.float32(at.carry), self.number("gamma", 1)
        return saturate(self.vec[0] * beta + gradient * gamma)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        beta, gamma = self.number("beta", 1), self.number("gamma", 1)
        self.vec[0] = saturate((self.vec[0] - gradient * gamma) / beta) if beta else 0


class Momentum(Memory):
    """SigNUM, Algorithm 2: m = beta m + (1 - beta) g is what is sent, and m stays."""

    vectors, momentum = 1, True

    def weights(self) -> tuple[np.float32, np.float32]:
        beta = float(self.settings.get("beta", 0.9))
        return np.float32(beta), np.float32(1 - beta)

    def accumulate(self, gradient: Array, at: Step) -> Array:
        beta, rest = self.weights()
        return saturate(self.vec[0] * beta + gradient * rest)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        beta, rest = self.weights()
        self.vec[0] = saturate((self.vec[0] - gradient * rest) / beta) if beta else 0


class Dgc(Memory):
    """DGC sections 3.2, 3.3, appendix B, in RedSync's letters: U = m U + G; V += U (Nesterov: V += m U + G).

    DGC's appendix keeps m U where this keeps U; the sums are the same. nesterov "redsync" is V += U + G, as
    RedSync's Algorithm 4 is printed. Masking: where something of V was sent, U is 0.
    """

    vectors, feedback, momentum = 2, True, True
    factor = np.float32(1)

    def parts(self, gradient: Array, at: Step) -> tuple[Array, Array, np.float32]:
        most, length = float(self.settings.get("clip_norm", 0)) / math.sqrt(at.world), norm(gradient)
        factor = np.float32(most / length if 0 < most < length else 1)
        u = saturate(self.vec[1] * self.number("momentum", 0.9) + gradient * factor)
        return u, self.step(u, gradient * factor), factor

    def step(self, u: Array, g: Array) -> Array:
        form = self.settings.get("nesterov", "off")
        return (
            u if form == "off" else g + u * (self.number("momentum", 0.9) if form == "on" else np.float32(1))
        )

    def accumulate(self, gradient: Array, at: Step) -> Array:
        return saturate(self.vec[0] * np.float32(at.carry) + self.parts(gradient, at)[1])

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[1], _, self.factor = self.parts(gradient, at)
        self.vec[0] = acc

    def sent(self, decoded: Array) -> None:
        acc = self.vec[0].copy()
        super().sent(decoded)
        if self.codec.sparse and self.settings.get("masking", "on") == "on":
            self.vec[1][self.vec[0] != acc] = 0

    def undo(self, gradient: Array) -> None:
        g, m = gradient * self.factor, self.number("momentum", 0.9)
        self.vec[0] = saturate(self.vec[0] - self.step(self.vec[1], g))
        self.vec[1] = saturate((self.vec[1] - g) / m) if m else 0


class Compensation(Memory):
    """Marsit, Algorithm 1: g + c is sent, c = g + c - the ranks' update; 0 after a full-precision step."""

    vectors = 1

    def accumulate(self, gradient: Array, at: Step) -> Array:
        return saturate(self.vec[0] * np.float32(at.carry) + gradient)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        self.vec[0] = saturate(self.vec[0] - gradient)

    def received(self, update: Array) -> None:
        self.vec[0] = 0 if self.codec.lossless else saturate(self.vec[0] - update)


MEMORIES: dict[str, type[Memory]] = {
    "none": Memory,
    "residual": Residual,
    "dgc": Dgc,
    "momentum": Momentum,
    "compensation": Compensation,
}


# ---- one rank's side of one group ----------------------------------------------------------------


class Group:
    """A codec and a memory over one group of n elements, as one rank sees it."""

    def __init__(self, codec: str, memory: str, wire_id: int, n: int, dtype: str, settings: Settings) -> None:
        self.codec = CODECS[codec](wire_id, n, dtype, settings)
        self.n, self.dtype = n, dtype
        idle = self.codec.lossless and not MEMORIES[memory].momentum  # nothing would ever be left over
        self.memory = MEMORIES["none" if idle else memory](self.codec, settings)
        self.codec.feedback = self.memory.feedback or type(self.memory).received is not Memory.received
        self.acc = np.zeros(n, np.float32)
        self.after = self.memory.vec  # the last encode's take(): what is kept if nothing of acc was sent
        self.sent: Sent

    @property
    def feedback(self) -> bool:
        return self.memory.feedback

    @property
    def kept(self) -> Array:
        """Vector 0; zeros without a memory."""
        return self.memory.vec[0] if self.memory.vectors else np.zeros(self.n, np.float32)

    def accumulate(self, gradient: Array, at: Step) -> Array:
        """acc from gradient (float32), NaN and Inf as 0, saturating at the largest float32."""
        with np.errstate(all="ignore"):
            return self.memory.accumulate(finite(gradient), at)

    def encode(self, elements: Array, at: Step) -> bytes:
        gradient = to_f32(elements, self.dtype)
        self.acc = self.accumulate(gradient, at)
        self.sent = sent = self.codec.encode(self.acc, gradient, at)
        with np.errstate(all="ignore"):
            self.memory.take(finite(gradient), self.acc, at)
            self.after = self.memory.vec.copy()
            self.memory.sent(sent.decoded)
        flags = sent.flags | (0 if np.isfinite(gradient).all() else NONFINITE)
        head = HEADER.pack(
            MAGIC, VERSION, self.codec.wire_id, DTYPE_CODE[self.dtype], flags, self.n, sent.count,
            at.step, at.group, at.rank, sent.scale, self.codec.salt(at), 0,
        )  # fmt: skip
        return seal(head + sent.body, self.codec.linear)

    def further(self, payload: bytes, elements: Array, at: Step) -> bytes:
        """The second round of a codec that takes two, after encode() of the same: `payload` is summed."""
        gradient = to_f32(elements, self.dtype)
        codes, decoded = self.codec.second(self.acc, gradient, self.codec.shared(payload), at)
        with np.errstate(all="ignore"):
            self.memory.sent(decoded)
        return _pad(payload[: self.codec.second_at] + codes, 64)

    def total(self, payloads: Sequence[bytes], scale: float) -> Array:
        """scale * sum of what the payloads stand for: a float32 sum in their order, times a float32 factor.

        A linear body stands for body * world; where `scale` is the 1/world of its header, the factor is 1.
        Of several gathered payloads, an element that overflows is averaged in float64.
        """
        every = list(payloads)
        factor = np.float32(scale)
        total = np.zeros(self.n, np.float32)
        with np.errstate(all="ignore"):
            if self.codec.linear:
                divided = np.float32(header(payloads[0])["scale"])
                factor = (
                    np.float32(1)
                    if factor == divided
                    else np.float32(float(factor) * round(1 / float(divided)))
                )
                total = self.codec.read(payloads[0])
                payloads = payloads[1:]
            vote = self.codec.combine(payloads) if hasattr(self.codec, "combine") else None
            if vote is not None:
                total, factor = vote, np.float32(1)
            block: list[Array] = []  # of a sign body's: what is added up before it is added to the total
            for i, payload in enumerate(payloads):
                if vote is None and getattr(self.codec, "together", 1) == 1:
                    total = total + self.codec.read(payload)
                elif vote is None:
                    block.append(self.codec.read(payload))
                    if len(block) == self.codec.together or i == len(payloads) - 1:
                        total = total + functools.reduce(np.add, block)
                        block = []
                if header(payload)["flags"] & NONFINITE and not self.codec.linear:
                    factor = np.float32(np.nan)
            out: Array = (total * factor).astype(np.float32)
            over = ~np.isfinite(out)
            if over.any() and vote is None and not self.codec.linear and len(every) > 1 and factor == factor:
                mean = sum(self.codec.read(p).astype(np.float64) for p in every) * float(factor)
                largest = float(np.finfo(np.float32).max)
                near = np.abs(mean) < 3.4028240e38  # 1 / world may have been rounded up
                mean = np.where(near, np.clip(mean, -largest, largest), mean)
                out[over] = mean.astype(np.float32)[over]
            return out

    def decode(self, payloads: Sequence[bytes], scale: float) -> Array:
        """total(), rounded once to the dtype; all NaN if a sparse payload's gradient was not finite."""
        return from_f32(self.total(payloads, scale), self.dtype)

    def take_back(self, elements: Array) -> None:
        """The step was not finite on some rank: gradient comes out of what is kept again."""
        self.unsend()
        with np.errstate(all="ignore"):
            self.memory.undo(finite(to_f32(elements, self.dtype)))

    def received(self, payloads: Sequence[bytes], scale: float) -> None:
        """The memory sees what the ranks made of the step."""
        with np.errstate(all="ignore"):
            self.memory.received(self.total(payloads, scale))
        if len(payloads) == 1 and hasattr(self.codec, "learn"):
            self.codec.learn(payloads[0])
        self.after = self.memory.vec.copy()

    def unsend(self) -> None:
        self.memory.vec[:] = self.after

    def rescale(self, factor: float) -> None:
        with np.errstate(all="ignore"):
            self.keep(saturate(self.memory.vec * np.float32(factor)))

    def keep(self, vec: Array) -> None:
        """Sets what is kept, vectors x n."""
        self.memory.vec[:] = vec
        self.after = self.memory.vec.copy()
