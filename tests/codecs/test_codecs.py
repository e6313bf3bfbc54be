"""The C core against the NumPy reference, for every codec x memory x dtype and every instruction set.

Each example runs on all instruction sets of this processor and compares them byte for byte, in guarded
memory. The deep runs are marked slow: pytest -m slow.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import forged
import numpy as np
import pytest
import reference as ref
from buffers import Block, Rank, Vector, fits, memory_parameters, parameters, reference_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Array, Step
from sidcomp import _core

DTYPES = ("float32", "float16", "bfloat16")
CODECS = [c["name"] for c in _core.codecs()]
MEMORIES = [m["name"] for m in _core.memories()]
ISAS = ("base", "avx2", "avx512", "avx512vbmi2")
ISAS = ISAS[: ISAS.index(_core.isa_best()) + 1]
ISAS = (*ISAS[:2], *ISAS[2:][-1:])  # the C tests walk all there are
SPARSE = [c["name"] for c in _core.codecs() if any(p["name"] == "density" for p in c["parameters"])]
# What needs several reductions is judged over several ranks by tests/c/reductions.c and
# tests/ddp/test_reductions.py; here by one rank, which makes all slices at once.
SEVERAL = [c["name"] for c in _core.codecs() if "reductions" in c["traits"]]
LINEAR = [c["name"] for c in _core.codecs() if "linear" in c["traits"] and c["name"] not in SEVERAL]
INDEXED = [c for c in SPARSE if isinstance(ref.CODECS[c], type) and issubclass(ref.CODECS[c], ref.Sparse)]
DENSE = [c for c in LINEAR if _core.Plan(c, "none", 1000, "float32").body_count == 1000]
INFO = {c["name"]: c for c in _core.codecs()}


def home(codec: str) -> str:
    """The plainest memory that goes with the codec."""
    return next(m for m in MEMORIES if fits(codec, m))


PAIRS = [(c, m) for c in CODECS for m in MEMORIES if fits(c, m)]
# Every codec with its plainest memories, one half format each, in turns; every memory with some codecs.
COMBOS = [
    (c, m, d)
    for i, c in enumerate(CODECS)
    for j, m in enumerate(("none", "residual"))
    for d in ("float32", DTYPES[1 + (i + j) % 2])
    if fits(c, m)
] + [(c, m, "float32") for m in MEMORIES for c in CODECS[:4] if m not in ("none", "residual") and fits(c, m)]


def shared(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Every third pair, so that each of either meets a third of the other; of the first four all."""
    pairs = [(i, j) for i in range(len(some)) for j in range(len(others)) if i < 4 or (i + j) % 3 == 0]
    return [(some[i], others[j]) for i, j in pairs]


FEEDBACK = [c["name"] for c in _core.codecs() if "lossless" not in c["traits"]]

few = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
more = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
deep = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

# ---- what is drawn -------------------------------------------------------------------------------

EDGES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1022, 1023, 1024, 1025, 2047,
         2048, 2049, 4095, 4096, 4097, 5121]  # fmt: skip
BIG_EDGES = [65534, 65535, 65536, 65537, 131071, 131072, 131073]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 40), st.integers(0, 6000))
all_sizes = st.one_of(sizes, sizes, sizes, sizes, sizes, sizes, st.sampled_from(BIG_EDGES))
seeds = st.integers(0, 2**32 - 1)

KINDS = (
    "normal",
    "laplace",
    "heavy",
    "equal",
    "zeros",
    "denormal",
    "one",
    "huge",
    "range",
    "few",
    "mostly zero",
    "ramp",
)


def content(kind: str, n: int, rng: np.random.Generator) -> Array:
    """n finite float32."""
    sign = rng.choice(np.array([-1.0, 1.0]), n)
    scale = 10.0 ** rng.uniform(-6, 2)
    x: Array
    if kind == "normal":
        x = rng.normal(0, scale, n)
    elif kind == "laplace":
        x = rng.laplace(0, scale, n)
    elif kind == "heavy":
        x = rng.standard_t(1.5, n) * scale
    elif kind == "equal":
        x = sign * scale
    elif kind == "zeros":
        x = sign * 0.0
    elif kind == "denormal":
        x = sign * rng.integers(0, 1 << 23, n) * 2.0**-149
    elif kind == "one":
        x = np.zeros(n)
        if n:
            x[rng.integers(n)] = scale
    elif kind == "huge":
        x = sign * rng.choice(
            np.array([3e38, 3.4e38, float(ref.FLT_MAX), 1e38, 65504.0, 65519.9, 65520.0]), n
        )
    elif kind == "range":
        x = sign * 10.0 ** rng.uniform(-44, 38, n)
    elif kind == "few":
        x = sign * rng.choice(np.array([0.0, 0.5, 1.0, 1.0 + 2.0**-23, 2.0]), n) * scale
    elif kind == "mostly zero":
        x = np.where(rng.random(n) < 0.03, rng.normal(0, scale, n), 0.0)
    else:
        x = sign * np.arange(n) * scale
    return np.clip(x, -float(ref.FLT_MAX), float(ref.FLT_MAX)).astype(np.float32)


def elements(kind: str, n: int, dtype: str, rng: np.random.Generator) -> Array:
    return ref.from_f32_saturating(content(kind, n, rng), dtype)


def cuts(n: int, how: str, rng: np.random.Generator) -> list[int]:
    """Lengths of segments, zero allowed, that add up to n."""
    if how == "one":
        return [n]
    if how == "tiny":
        lengths = rng.integers(0, 4, n + 1)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), n)) + 1]
    else:
        marks = np.sort(rng.integers(0, n + 1, rng.integers(1, 9)))
        lengths = np.diff(np.concatenate([[0], marks, [n]]))
    out = [int(v) for v in lengths]
    out[-1] += n - sum(out)
    return out


@functools.cache
def whole_numbers(codec: str, name: str) -> list[int]:
    """The smallest values of a parameter and the powers of two, as far as the codec accepts them."""
    p = next(p for p in parameters(codec) if p["name"] == name)
    low, high = int(p["min"]), int(p["max"])
    found = []
    for value in sorted(
        {*range(low, min(high, low + 9) + 1), *(2**i for i in range(40) if low <= 2**i <= high)}
    ):
        try:
            _core.Plan(codec, home(codec), 1, "float32", {name: value})
        except _core.ParameterError as refusal:
            assert name in str(refusal)
        else:
            found.append(value)
    assert low in found
    return found


@st.composite
def drawn_settings(draw: Any, codec: str, memory: str = "none") -> dict[str, float | int | str]:
    """Settings from the tables: any value that they allow, small ones as often as large ones."""
    out: dict[str, float | int | str] = {}
    for p in [*parameters(codec), *memory_parameters(memory)]:
        if draw(st.booleans()) and p["name"] != "density":
            continue
        if p["kind"] == "choice":
            out[p["name"]] = draw(st.sampled_from(p["choices"]))
        elif p["kind"] == "int":
            out[p["name"]] = draw(st.sampled_from(whole_numbers(codec, p["name"])))
        elif p["min"] > 0 and p["max"] / p["min"] > 100:
            out[p["name"]] = min(
                p["max"], p["min"] * 10.0 ** draw(st.floats(0, math.log10(p["max"] / p["min"])))
            )
        else:
            out[p["name"]] = draw(st.floats(p["min"], p["max"]))
    if "density" in out:  # most often one that selects some, not all
        out["density"] = draw(st.sampled_from([1e-5, 0.001, 0.01, 0.1, 0.5, 1.0, out["density"]]))
    return out


# ---- comparing -----------------------------------------------------------------------------------


def bits(x: Array) -> Array:
    """The bits of x, every NaN alike."""
    x = np.ascontiguousarray(x)
    if x.dtype == np.uint16:
        return np.where((x & 0x7FFF) > 0x7F80, 0x7FC0, x)
    raw = x.view(f"u{x.itemsize}")
    return np.where(np.isnan(x), raw.dtype.type(2 ** (8 * x.itemsize) - 1), raw)


def assert_same(got: Array, want: Array, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    bad = np.flatnonzero(bits(got) != bits(want))
    assert not len(bad), (
        f"{what}: {len(bad)} differ, first [{bad[0]}]: got {got[bad[0]]!r}, want {want[bad[0]]!r}"
    )


def assert_same_payload(got: bytes, want: bytes) -> None:
    if got != want:
        h, w = ref.header(got), ref.header(want)
        assert h == w, {f: (h[f], w[f]) for f in h if h[f] != w[f]}
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        raise AssertionError(f"payload differs at byte {at} of {len(want)}")


class Trial:
    """One group on every instruction set beside its reference; all of them must agree after each call."""

    def __init__(
        self,
        codec: str,
        memory: str,
        n: int,
        dtype: str,
        settings: ref.Settings | None = None,
        isas: tuple[str, ...] = ISAS,
    ) -> None:
        settings = settings or {}
        self.isas = isas
        self.ranks = [Rank(_core.Plan(codec, memory, n, dtype, settings, isa)) for isa in isas]
        self.plan = self.ranks[0].plan
        self.group = reference_group(self.plan, settings)
        self.dtype, self.n = dtype, n

    @property
    def stats(self) -> _core.Stats:
        return self.ranks[0].stats

    def encode(self, x: Array, at: Step, lengths: list[int] | None = None, seed: int = 0) -> bytes:
        """The payload, after comparing it with the reference's."""
        if self.plan.codec in SEVERAL:
            at = replace(at, rank=0, world=1)
        payloads = [r.encode(Vector(x, lengths, seed + i), at) for i, r in enumerate(self.ranks)]
        for isa, p in zip(self.isas, payloads, strict=True):
            assert p == payloads[0], f"{isa} differs from {self.isas[0]}"
        if hasattr(self.group.codec, "dictated"):
            self.dictate(x, payloads[0], at)
        want = self.group.encode(x, at)
        assert len(want) == self.plan.payload_bytes
        assert_same_payload(payloads[0], want)
        sent = self.group.sent
        for r in self.ranks:
            assert (
                r.stats.count == sent.count and r.stats.found == sent.found and r.stats.stages == sent.stages
            )
            assert r.stats.nonfinite == int((~np.isfinite(ref.to_f32(x, self.dtype))).sum())
            assert 1 <= r.stats.passes <= 16
        return payloads[0]

    def dictate(self, x: Array, payload: bytes, at: Step) -> None:
        """A threshold within 0.1 % of the paper's is right; all that follows from it is compared exactly."""
        codec, stats, head = self.group.codec, self.stats, ref.header(payload)
        if not hasattr(codec, "threshold"):
            codec.dictated = payload
            return
        if not self.n:
            return
        acc = self.group.accumulate(ref.to_f32(x, self.dtype), at)
        magnitude = np.abs(acc).astype(np.float64)
        replaced = stats.found < codec.floor_count  # then the payload names the k-th largest instead
        low, high = codec.threshold(acc)
        if not allowed(low, high, magnitude, head, stats.found, replaced):
            low, high = codec.threshold(acc, slack=5e-6)  # an element on a stage's threshold
        assert allowed(low, high, magnitude, head, stats.found, replaced), (
            f"threshold {head['scale']}, found {stats.found}, stages {stats.stages}: the paper's is "
            f"{codec.threshold(acc)[0]}, {int((magnitude >= codec.threshold(acc)[0]).sum())} elements"
        )
        codec.dictated = (head["scale"], stats.found)

    def decode(self, payloads: list[bytes], scale: float, held: Array, at: Step | None = None) -> Array:
        """Decodes on every instruction set into segments that still hold this rank's gradient."""
        outs = []
        for i, r in enumerate(self.ranks):
            v = Vector(held, cuts(self.n, "random", np.random.default_rng(i)), i)
            flagged = r.decode(payloads, scale, v, at)
            outs.append(v.read())
            assert flagged == self.nonfinite(payloads, scale), "the non-finite flag"
        if self.nonfinite(payloads, scale):
            self.group.take_back(held)
        else:
            self.group.received(payloads, scale)
        want = self.group.decode(payloads, scale)
        for isa, out in zip(self.isas, outs, strict=True):
            assert_same(out, want, f"decoded on {isa}")
            assert bits(out).tobytes() == bits(outs[0]).tobytes()
        return outs[0]

    def nonfinite(self, payloads: list[bytes], scale: float) -> bool:
        """A linear sum shows it by itself, other payloads by their flag."""
        if self.plan.linear:
            return not np.isfinite(self.group.total(payloads, scale)).all()
        return any(ref.header(p)["flags"] & ref.NONFINITE for p in payloads)

    def residual(self) -> Array:
        """Vector 0 of what is kept, after comparing all with the reference's; zeros without a memory."""
        kept = [r.residual() for r in self.ranks]
        for k in kept:
            for mine, want in zip(k, [*self.group.memory.vec] or [self.group.kept], strict=True):
                assert_same(mine, want, "residual")
            assert (k.view(np.uint32) == kept[0].view(np.uint32)).all()
        return kept[0][0]

    def keep(self, vec: Array) -> None:
        """Sets what is kept, vectors x n."""
        for r in self.ranks:
            r.set_residual(vec)
        self.group.keep(vec)

    @property
    def conserves(self) -> bool:
        """What was sent and what is kept are the gradient and what was kept before: plain error feedback."""
        group = self.group
        plain = all(float(group.memory.number(w, 1)) == 1 for w in ("beta", "gamma"))
        if getattr(group.codec, "drops", False) or group.half:  # as Algorithm 4 of RedSync prints; rounded
            return False
        return group.feedback and not group.memory.momentum and plain


def allowed(
    low: float, high: float, magnitude: Array, head: dict[str, Any], found: int, replaced: bool
) -> bool:
    half = 2.0**-150  # the rounding to float32 of a denormal threshold
    low, high = low * (1 - 1e-3) - half, high * (1 + 1e-3) + half
    if not (magnitude >= high).sum() <= found <= (magnitude >= low).sum():
        return False
    with np.errstate(over="ignore"):  # a threshold beyond float32 is Inf: nothing passes
        raised = bool(head["flags"] & ref.RAISED)
        return replaced or raised or np.float32(low) <= head["scale"] <= np.float32(high)


# ---- the registry --------------------------------------------------------------------------------


def test_every_codec_and_memory_has_a_judge() -> None:
    assert set(CODECS) == set(ref.CODECS) and set(MEMORIES) == set(ref.MEMORIES)
    ids = [c["wire_id"] for c in _core.codecs()]
    assert len(set(ids)) == len(ids)
    for info in [*_core.codecs(), *_core.memories()]:
        assert info["doc"] and info["family"]
        assert set(info["traits"]) <= {
            "linear", "lossless", "stochastic", "unbiased", "sparse", "feedback", "momentum", "vote",
            "shaped", "signs", "reductions",
        }  # fmt: skip
        names = [p["name"] for p in info["parameters"]]
        assert len(set(names)) == len(names)
        for p in info["parameters"]:
            assert p["doc"], p["name"]
            if p["kind"] == "choice":
                assert p["default"] in p["choices"]
            else:
                assert p["min"] <= p["default"] <= p["max"]
    for info in _core.codecs():
        assert info["paper"] or "linear" in info["traits"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_those_of_the_reference(codec: str, dtype: str) -> None:
    for memory in (m for m in MEMORIES if fits(codec, m)):
        for n in [*EDGES, *BIG_EDGES, 10**6, 10**9]:
            plan = _core.Plan(codec, memory, n, dtype)
            assert (plan.codec, plan.n, plan.dtype, plan.body_offset) == (codec, n, dtype, 64)
            assert plan.payload_bytes % 8 == 0 and plan.state_bytes % 64 == 0
            if n > 10**6:  # a plan costs nothing, whatever its n
                continue
            group = reference_group(plan, {})
            assert plan.linear == group.codec.linear and plan.lossless == group.codec.lossless
            assert plan.vectors == group.memory.vectors
            if plan.linear:
                assert (plan.body_count, plan.body_dtype) == (group.codec.body_count, group.codec.body_dtype)
                assert plan.k == getattr(group.codec, "k", plan.body_count)
            else:
                assert (plan.body_count, plan.k) == (0, group.codec.k)


@pytest.mark.parametrize("isa", ["auto", *ISAS])
def test_the_instruction_set_can_be_chosen(isa: str) -> None:
    plan = _core.Plan("topk", "none", 10, "float32", {}, isa)
    assert plan.isa == (_core.isa_best() if isa == "auto" else isa)


# ---- one step ------------------------------------------------------------------------------------


def one_step(
    codec: str, memory: str, dtype: str, data: st.DataObject, size: st.SearchStrategy[int] = all_sizes
) -> None:
    chosen = data.draw(drawn_settings(codec, memory))
    n, kind, seed = data.draw(size), data.draw(st.sampled_from(KINDS)), data.draw(seeds)
    how = data.draw(st.sampled_from(["one", "tiny", "random"]))
    world = 1 if codec in SEVERAL else data.draw(st.sampled_from([1, 1, 2, 3, 8]))
    rng = np.random.default_rng(seed)
    trial = Trial(codec, memory, n, dtype, chosen)
    x = elements(kind, n, dtype, rng)
    if trial.plan.vectors and data.draw(st.booleans()):
        kept = content(data.draw(st.sampled_from(KINDS)), n * trial.plan.vectors, rng)
        trial.keep(kept.reshape(trial.plan.vectors, n))
    carry = data.draw(st.sampled_from([1.0, 1.0, 0.5, 2.25, 1e-3, 1e30]))
    at = Step(step=seed * 2**20, group=seed % 1000, rank=world - 1, world=world, seed=seed, carry=carry)
    with np.errstate(over="ignore"):
        before = (trial.group.kept * np.float32(carry)).astype(np.float64)
    payload = trial.encode(x, at, cuts(n, how, rng), seed)
    kept = trial.residual()
    for r in trial.ranks:
        r.plan.check(r.payload.ptr, r.plan.payload_bytes, step=at.step, group=at.group)
    acc = trial.group.acc.astype(np.float64)
    assert np.isfinite(kept).all()
    decoded = trial.decode([payload], 1.0, x, at).astype(np.float64)
    as_they_are = not {"linear", "sparse"}.isdisjoint(INFO[codec]["traits"]) and trial.group.codec.exact
    if world == 1 and dtype == "float32":
        # The memory and the cut are exact: nothing is lost between them. Only what is left of more
        # than twice what float16 can carry takes one rounding; and so does what is left beside
        # codecs that do not send elements as they are, saturating at the largest float32.
        if trial.conserves:
            half = payload_is_half(trial, payload)
            slack = np.where(half & (np.abs(acc) > 2 * 65504), np.abs(acc) * 2.0**-24, 0)
            if not as_they_are:
                with np.errstate(over="ignore"):
                    slack = np.spacing(np.abs(kept)).astype(np.float64) / 2
                slack[np.abs(kept) == ref.FLT_MAX] = np.inf
            off = np.abs(decoded + kept - acc)
            assert (off <= slack).all(), "decoded + kept != gradient + kept before"
        exact = ref.to_f32(x, dtype).astype(np.float64) + before
        with np.errstate(over="ignore"):
            if trial.conserves or not trial.plan.vectors:
                assert (acc == ref.saturate(exact.astype(np.float32))).all()
        # C(x) is never farther from x than 0 is, in any element; or, of a codec that stands on error
        # feedback and of one with two magnitudes, in all of them together.
        if as_they_are and trial.group.codec.contracts:
            assert (np.abs(acc - decoded) <= np.abs(acc)).all()
        elif trial.group.codec.contracts_in_all or "feedback" in INFO[codec]["traits"]:
            top = np.abs(acc).max(initial=1e-300)
            assert (((acc - decoded) / top) ** 2).sum() <= ((acc / top) ** 2).sum() * (1 + 1e-6)
    if not trial.plan.linear:
        head = ref.header(payload)
        assert head["count"] == trial.group.sent.count <= trial.group.codec.cap


def payload_is_half(trial: Trial, payload: bytes) -> bool:
    return (
        trial.plan.body_dtype == "float16"
        if trial.plan.linear
        else bool(ref.header(payload)["flags"] & ref.HALF)
    )


@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
@few
@given(data=st.data())
def test_one_step(codec: str, memory: str, dtype: str, data: st.DataObject) -> None:
    one_step(codec, memory, dtype, data)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
@deep
@given(data=st.data())
def test_one_step_deep(codec: str, memory: str, dtype: str, data: st.DataObject) -> None:
    one_step(codec, memory, dtype, data)


@pytest.mark.parametrize(("codec", "n"), shared(CODECS, EDGES + BIG_EDGES))
def test_every_edge_size(codec: str, n: int) -> None:
    rng = np.random.default_rng(n)
    trial = Trial(codec, "residual", n, "float32")
    for step in range(2):
        x = elements("laplace", n, "float32", rng)
        payload = trial.encode(x, Step(step=step), cuts(n, "random", rng), step)
        trial.decode([payload], 0.5, x, Step(step=step))
    trial.residual()


@pytest.mark.parametrize("codec", [c for c in SPARSE if c not in INDEXED])
@pytest.mark.parametrize("n", [1, 10, 1000, 70000])
@pytest.mark.parametrize("density", [1e-5, 0.001, 0.0999, 0.25, 0.5, 0.9, 1.0])
def test_every_density(codec: str, n: int, density: float) -> None:
    rng = np.random.default_rng(n)
    trial = Trial(codec, "residual", n, "float32", {"density": density})
    assert trial.plan.k == ref.target_count(n, density)
    for step in range(3):
        trial.encode(elements("laplace", n, "float32", rng), Step(step=step))
    trial.residual()


@pytest.mark.parametrize(
    "kind",
    ["laplace", "equal", "two values", "sorted", "one in 96", "all but one in 96", "steps", "large last"],
)
@pytest.mark.parametrize("density", [1e-5, 0.01, 0.34, 0.9, 1.0])
def test_topk_of_many_candidates(kind: str, density: float) -> None:
    """So many that a sample says between which keys to look: also where it says nothing, or is wrong, since
    magnitudes repeat at its own stride, are few, or those that count lie where it does not reach."""
    n = 196_637
    rng = np.random.default_rng(1)
    at = np.arange(n)
    x = {
        "laplace": rng.laplace(size=n),
        "equal": np.full(n, -3.0),
        "two values": rng.choice([1.0, 2.0], n),
        "sorted": np.sort(rng.laplace(size=n)),
        "one in 96": np.where(at % (n // 2048) == 0, 1e3, 1) + rng.random(n),
        "all but one in 96": np.where(at % (n // 2048) == 0, 1, 1e3) + rng.random(n),
        "steps": 2.0 ** (at % 7),
        "large last": np.where(at > n - 40, 9, 1) * rng.random(n),
    }[kind].astype(np.float32)
    rank = Rank(_core.Plan("topk", "none", n, "float32", {"density": density}))
    payload = rank.encode(Vector(x), Step())
    k = rank.stats.count
    assert k == max(1, round(density * n))
    index, value = ref.read_sparse_body(payload[64:], n, k, k)
    assert (index == np.sort(np.argsort(-np.abs(x), kind="stable")[:k])).all() and (value == x[index]).all()


@pytest.mark.parametrize("codec", INDEXED)
@pytest.mark.parametrize("n", [0, 1, 10, 63, 1000, 4097, 65536, 70_000, 140_000])
def test_every_form_of_a_sparse_body(codec: str, n: int) -> None:
    rng = np.random.default_rng(n)
    kinds, densities = (
        iter(rng.permutation(KINDS)),
        iter([1e-5, 0.001, 0.0843, 0.25, 0.5, 0.9, 1.0, 0.03, 0.1, 0.01]),
    )
    for indices in ("u16", "packed"):
        for values in ("f32", "f16", "log8", "log4", "log2"):
            chosen = {"density": next(densities), "values": values, "indices": indices}
            trial = Trial(codec, "residual", n, "float32", chosen)
            for step, kind in enumerate((str(next(kinds)), "laplace", "few")):
                x = elements(kind, n, "float32", rng)
                payload = trial.encode(x, Step(step=step), cuts(n, "random", rng), step)
                trial.decode([payload, payload], 0.5, x, Step(step=step))
                trial.residual()


@pytest.mark.parametrize(("values", "near", "far"), [("log8", 0.01, 0.0625), ("log4", 0.15, 0.75)])
def test_levels_lie_close_by(values: str, near: float, far: float) -> None:
    """At any scale; closer where what is sent spans few octaves. What is too small for them is kept."""
    n, rng = 20_000, np.random.default_rng(1)
    for kind, most in (("laplace", near), ("normal", near), ("range", far)):
        for scale in (2.0**-90, 1.0, 2.0**90) if kind != "range" else (1.0,):
            x = (content(kind, n, rng) * np.float32(scale)).astype(np.float32)
            rank = Rank(_core.Plan("topk", "residual", n, "float32", {"density": 0.05, "values": values}))
            rank.encode(Vector(x), Step())
            magnitude, left = np.abs(x).astype(np.float64), np.abs(rank.residual()[0]).astype(np.float64)
            sent = np.argsort(-magnitude, kind="stable")[: rank.plan.k]
            if kind == "range":
                sent = sent[magnitude[sent] > magnitude.max() * 2.0**-9]
            assert (left[sent] <= most * magnitude[sent]).all()
            assert len(sent) > 10 and left[sent].any()


def lloyd(magnitude: Array, rounds: int = 200) -> float:
    """The squared error of the two levels that Lloyd's iteration finds for these magnitudes."""
    low, high = magnitude.min(), magnitude.max()
    for _ in range(rounds):
        larger = magnitude >= (low + high) / 2
        low, high = magnitude[~larger].mean(), magnitude[larger].mean()
    return float(np.minimum((magnitude - low) ** 2, (magnitude - high) ** 2).sum())


def two_levels(x: Array, density: float, codec: str = "topk") -> tuple[Array, Array]:
    """What log2 sends of x, in float64: magnitudes, and what stands for them."""
    rank = Rank(_core.Plan(codec, "none", len(x), "float32", {"density": density, "values": "log2"}))
    stands = rank.sent(x)
    sent = np.argsort(-np.abs(x), kind="stable")[: rank.plan.k]
    stands = stands[sent]
    assert (np.signbit(stands) == np.signbit(x[sent]))[stands != 0].all()
    return np.abs(x[sent]).astype(np.float64), np.abs(stands).astype(np.float64)


@pytest.mark.parametrize("tail", ["normal", "laplace"])
@pytest.mark.parametrize("density", [0.005, 0.1, 0.4])
def test_two_levels_are_nearly_lloyds(tail: str, density: float) -> None:
    for scale in (2.0**-90, 1.0, 2.0**90):
        x = (getattr(np.random.default_rng(3), tail)(0, 1, 50_000) * scale).astype(np.float32)
        magnitude, stands = (of / scale for of in two_levels(x, density))
        assert len(np.unique(stands)) == 2
        assert ((magnitude - stands) ** 2).sum() <= 1.05 * lloyd(magnitude)


@pytest.mark.parametrize("kind", KINDS)
def test_two_levels_are_never_worse_than_nothing(kind: str) -> None:
    for density in (0.01, 0.3, 1.0):
        magnitude, stands = two_levels(elements(kind, 3000, "float32", np.random.default_rng(5)), density)
        magnitude, stands = magnitude / max(1e-300, magnitude.max()), stands / max(1e-300, magnitude.max())
        assert ((magnitude - stands) ** 2).sum() <= (1 + 1e-6) * (magnitude**2).sum()


def test_packed_indices_take_what_elias_and_fano_say() -> None:
    n = 10_000_000
    for density, most in ((0.3, 3.8), (0.0843, 5.6), (0.05, 6.4), (0.01, 8.6), (0.001, 12.0)):
        sizes = [
            _core.Plan("topk", "none", n, "float32", {"density": density, "values": "log8", "indices": i})
            for i in ("u16", "packed")
        ]
        bits = 16 - 8 * (sizes[0].payload_bytes - sizes[1].payload_bytes) / sizes[0].k
        assert math.log2(1 / density) + 1.4 < bits < most, (density, bits)


# ---- many steps ----------------------------------------------------------------------------------


def schedule(kind: str, steps: int, rng: np.random.Generator) -> Iterator[float]:
    """Scales of a run's gradients: what the last step taught about the threshold may be wrong in the next."""
    scale = 1.0
    for i in range(steps):
        yield 0.0 if kind == "pauses" and i % 4 == 3 else scale
        jump = 10.0 ** rng.integers(-9, 10)
        change = {"drift": rng.uniform(0.9, 1.1), "shrink": 0.3, "grow": 3.0, "jump": jump}
        scale *= 1e-6 if kind == "collapse" and i == 4 else change.get(kind, 1.0)
        scale = min(max(scale, 1e-30), 1e30)


def many_steps(codec: str, memory: str, dtype: str, data: st.DataObject, steps: int) -> None:
    chosen = data.draw(drawn_settings(codec, memory))
    n, seed = data.draw(sizes), data.draw(seeds)
    scales = data.draw(st.sampled_from(["drift", "shrink", "grow", "jump", "steady", "pauses", "collapse"]))
    kind = data.draw(st.sampled_from(["laplace", "normal", "heavy", "mostly zero", "few", "range", "any"]))
    rng = np.random.default_rng(seed)
    trial = Trial(codec, memory, n, dtype, chosen)
    for step, scale in enumerate(schedule(scales, steps, rng)):
        base = content(str(rng.choice(KINDS)) if kind == "any" else kind, n, rng)
        with np.errstate(all="ignore"):
            x = ref.from_f32_saturating(ref.saturate(base * np.float32(scale)), dtype)
        at = Step(step=step, world=2)
        payload = trial.encode(x, at, cuts(n, "random", rng), step)
        what = rng.random()
        if what < 0.1:
            for r in trial.ranks:
                r.plan.unsend(r.state.ptr)
            trial.group.unsend()
        elif what < 0.2:
            trial.decode([payload, payload], 0.5, x, at)
        if what > 0.7:
            trial.residual()
    trial.residual()


@pytest.mark.many
@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
@few
@given(data=st.data())
def test_many_steps(codec: str, memory: str, dtype: str, data: st.DataObject) -> None:
    many_steps(codec, memory, dtype, data, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
@deep
@given(data=st.data())
def test_many_steps_deep(codec: str, memory: str, dtype: str, data: st.DataObject) -> None:
    many_steps(codec, memory, dtype, data, 20)


@pytest.mark.parametrize(("codec", "memory"), [(c, m) for c, m, dtype in COMBOS if dtype == "float32"])
def test_zeros_have_signs(codec: str, memory: str) -> None:
    """Rows and columns of zeros of either sign: the same bits as the reference, on all instruction sets."""
    n, rng = 40 * 40, np.random.default_rng(11)
    fading = {"beta": 0.0} if memory == "residual" else {}  # 0 times what is kept has its sign
    for chosen in ({}, fading):
        trial = Trial(codec, memory, n, "float32", chosen)
        for step in range(6):
            x = rng.normal(0, 1, (40, 40)).astype(np.float32)
            if step % 2:
                x[:, ::3] *= np.float32(0)
                x[:, 1::3] = x[5:9] = np.float32(-0.0)
            at = Step(step=step, world=2)
            payload = trial.encode(x.ravel(), at, [n], step)
            trial.residual()
            trial.decode([payload, payload], 0.5, x.ravel(), at)


def test_a_denormal_threshold_decides_as_it_is_rounded() -> None:
    """The normal fit gives 8.09 units of 2^-149: the element of 8 units passes, and nothing is corrected."""
    x = np.array([2, -3, 0, 7, 3, -4, 8]) * 2.0**-149
    trial = Trial("gaussiank", "none", 7, "float32", {"density": 1e-5, "capacity": 1.0})
    trial.encode(x.astype(np.float32), Step())
    assert trial.stats.found == 1


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_steady_state_reads_once(codec: str, density: float) -> None:
    """Gradients of one distribution: after some steps the threshold is predicted and acc is read once."""
    n = 1 << 17
    rank = Rank(_core.Plan(codec, "residual", n, "float32", {"density": density}))
    passes = []
    for step in range(40):
        x = np.random.default_rng(step).laplace(0, 1e-3, n).astype(np.float32)
        rank.encode(Vector(x), Step(step=step))
        passes.append(rank.stats.passes)
    assert sum(passes[20:]) <= 22, passes
    rank.plan.rescale(rank.state.ptr, 2.0**-10)  # a change of AMP's loss scale: the prediction moves along
    rank.encode(
        Vector(np.random.default_rng(40).laplace(0, 1e-3 / 1024, n).astype(np.float32)), Step(step=40)
    )
    assert rank.stats.passes == 1


def large_groups(codec: str, n: int, density: float, kind: str, steps: int) -> None:
    """Sizes at which work cannot hold every element as a candidate; the fastest instruction set only."""
    trial = Trial(codec, "residual", n, "float32", {"density": density}, ISAS[-1:])
    for step in range(steps):
        x = content(kind, n, np.random.default_rng((n, step)))
        x *= np.float32(0.5 / max(float(np.abs(x).mean()), 1e-30) * (0.95**step if step % 7 else 1.3))
        trial.encode(x, Step(step=step))
        if step % 4 == 3:
            trial.residual()


@pytest.mark.parametrize(
    ("codec", "case"), shared(INDEXED, [(0.001, "laplace"), (0.01, "heavy"), (0.1, "few")])
)
def test_large_groups(codec: str, case: tuple[float, str]) -> None:
    large_groups(codec, (1 << 20) + 777, *case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("density", [1e-5, 0.001, 0.01, 0.3])
@pytest.mark.parametrize("kind", ["laplace", "normal", "heavy", "few", "mostly zero"])
def test_large_groups_deep(codec: str, density: float, kind: str) -> None:
    large_groups(codec, 3_000_001, density, kind, 12)


# ---- decode --------------------------------------------------------------------------------------


def shares(
    codec: str, memory: str, n: int, dtype: str, chosen: ref.Settings, world: int, seed: int
) -> list[bytes]:
    """One payload a rank, written by the reference."""
    plan = _core.Plan(codec, memory, n, dtype, chosen)
    rng = np.random.default_rng(seed)
    out = []
    for rank in range(world):
        group = reference_group(plan, chosen)
        x = elements(str(rng.choice(["laplace", "few", "mostly zero", "equal"])), n, dtype, rng)
        if codec in SEVERAL:
            out.append(Rank(plan).encode(Vector(x), Step(step=3, group=4)))
            continue
        out.append(group.encode(x, Step(step=3, group=4, rank=rank, world=world)))
    return out


@pytest.mark.many
@pytest.mark.parametrize(
    ("codec", "dtype"), [(c, d) for i, c in enumerate(CODECS) for d in ("float32", DTYPES[1 + i % 2])]
)
@few
@given(data=st.data())
def test_decode_of_many_payloads(codec: str, dtype: str, data: st.DataObject) -> None:
    chosen = data.draw(drawn_settings(codec))
    n, world, seed = data.draw(all_sizes), data.draw(st.integers(1, 8)), data.draw(seeds)
    payloads = shares(codec, home(codec), n, dtype, chosen, world, seed)
    trial = Trial(codec, home(codec), n, dtype, chosen)
    held = elements("normal", n, dtype, np.random.default_rng(seed))
    for scale in (1.0, 1.0 / world, 0.37):
        trial.decode(payloads, scale, held, Step(step=3, group=4))


@pytest.mark.parametrize("codec", LINEAR)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 41])
def test_linear_bodies_may_be_summed(codec: str, dtype: str, world: int) -> None:
    """What all-reduce does: bodies are added in their own dtype, header and scale stay each rank's own."""
    n = 1500
    payloads = shares(codec, home(codec), n, dtype, {}, world, world)
    trial = Trial(codec, home(codec), n, dtype)
    body = trial.plan.body_dtype
    total = trial.group.codec.body_values(payloads[0])
    for p in payloads[1:]:
        total = ref.to_f32(ref.from_f32(total + trial.group.codec.body_values(p), body), body)
    summed = payloads[0][:64] + ref.from_f32(total, body).tobytes()
    summed += bytes(trial.plan.payload_bytes - len(summed))
    out = trial.decode([summed], 1.0 / world, np.zeros(n, ref.STORAGE[dtype]))
    if body == dtype and codec in DENSE:
        assert_same(
            out, ref.from_f32(total, dtype), "with the scale that divided it, a sum is the mean as it stands"
        )


@pytest.mark.parametrize("codec", [c for c in DENSE if c in FEEDBACK])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("world", [*range(1, 9), 13, 19, 22, 25, 33, 64, 255, 256, 1000])
def test_a_sum_of_saturated_bodies_stays_finite(codec: str, world: int, rounding: str) -> None:
    """However large the residuals are: what a half cannot carry is kept, not turned into Inf on the way. Nor
    if all ranks round up."""
    n = 4000
    plan = _core.Plan(codec, "residual", n, "float32", {"rounding": rounding})
    half = plan.body_dtype
    top = float(ref.HALF_MAX[half])
    x = (np.linspace(0.9, 1.1, n) * top).clip(0, float(ref.FLT_MAX)).astype(np.float32)
    rank = Rank(plan)
    payload = rank.encode(Vector(x), Step(world=world))
    body = ref.to_f32(np.frombuffer(payload, ref.STORAGE[half], n, 64), half)
    total = body
    if rounding == "stochastic":
        largest = np.float32(ref.limit(half, world, True) * (np.float32(1) / np.float32(world)))
        inner, outer = ref.beside(np.array([largest]), half)
        total = body = np.append(body, (inner if inner == largest else outer).astype(np.float32))
    with np.errstate(all="ignore"):
        for _ in range(world - 1):
            total = ref.to_f32(ref.from_f32(total + body, half), half)
    assert np.isfinite(total).all() and np.isfinite(rank.residual()).all()
    body = body[:n]
    assert np.allclose(body.astype(np.float64) * world + rank.residual()[0], x, rtol=1e-6)


# ---- number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [c for c in DENSE if c != "none"])
def test_every_half_becomes_its_float(codec: str) -> None:
    trial = Trial(codec, "none", 65536, "float32")
    half = trial.plan.body_dtype
    patterns = np.arange(65536, dtype=np.uint16).view(ref.STORAGE[half])
    blank = trial.group.encode(np.zeros(65536, np.float32), Step())
    payload = ref.with_header(blank[:64] + patterns.tobytes(), False)
    out = trial.decode([payload], 1.0, np.zeros(65536, np.float32))
    assert_same(out, ref.to_f32(patterns, half), "half to float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_survives_a_dense_payload(dtype: str) -> None:
    trial = Trial("none", "none", 65536, dtype)
    patterns = np.arange(65536, dtype=np.uint16).view(ref.STORAGE[dtype])
    payload = trial.encode(patterns, Step())
    out = trial.decode([payload], 1.0, np.zeros_like(patterns))
    finite = np.isfinite(ref.to_f32(patterns, dtype))
    assert (out[finite].view(np.uint16) == patterns[finite].view(np.uint16)).all()


@pytest.mark.parametrize("codec", [c for c in DENSE if c != "none"])
def test_floats_round_to_the_nearest_half(codec: str) -> None:
    """All halves, the middles between them, a float32 step to either side of both, a comb over all floats."""
    half = _core.Plan(codec, "none", 1, "float32").body_dtype
    values = ref.to_f32(np.arange(65536, dtype=np.uint16).view(ref.STORAGE[half]), half)
    values = np.unique(values[np.isfinite(values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    marks = np.concatenate(
        [values, middles, np.float32([65504, 65519.99, 65520, 65536, 3.3895314e38, 3.4e38])]
    )
    marks = np.concatenate(
        [np.nextafter(marks, np.float32(-np.inf)), marks, np.nextafter(marks, np.float32(np.inf))]
    )
    comb = np.arange(0, 2**32, 8191, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([marks, -marks, comb])
    trial = Trial(codec, "none", len(x), "float32")
    trial.encode(x, Step())


# ---- payloads that are not sound -----------------------------------------------------------------


def refused(plan: _core.Plan, payloads: list[bytes], culprit: int, error: type[Exception], at: Step) -> str:
    """Decoding raises `error` for payload `culprit` and leaves segments and state alone."""
    rank = Rank(plan)
    rng = np.random.default_rng(len(payloads))
    vector = Vector(elements("normal", plan.n, plan.dtype, rng), cuts(plan.n, "random", rng))
    rank.state.data[64:192] = 0x11  # no valid statistics: must be neither read nor written
    held, state = vector.raw.copy(), rank.state.raw.copy()
    with pytest.raises(error) as caught:
        rank.decode(payloads, 1.0, vector, at)
    assert caught.value.culprit == culprit  # type: ignore[attr-defined]
    assert (vector.raw == held).all() and (rank.state.raw == state).all()
    return str(caught.value)


@pytest.mark.parametrize("codec", CODECS)
def test_sound_payloads_of_another_place_are_told_apart(codec: str) -> None:
    n, at = 200, Step(step=3, group=4)
    good, *_ = shares(codec, home(codec), n, "float32", {}, 1, 0)
    plan = _core.Plan(codec, home(codec), n, "float32")
    other = {"step": 2, "group": 5, "codec": 999, "dtype": 1, "n": n + 1, "version": 1}
    for name, value in other.items():
        bad = ref.with_header(good, plan.linear, **{name: value})
        refused(plan, [good, bad], 1, _core.MismatchError, at)
    wrong = {"magic": 1, "salt": 1, "checksum": 0, "flags": 1 << 31, "count": n + 1}
    if "stochastic" in INFO[codec]["traits"]:
        del wrong["salt"]  # any may be right
    for name, value in wrong.items():
        bad = ref.with_header(good, plan.linear, **{name: value})
        refused(plan, [bad, good], 0, _core.CorruptPayloadError, at)
    block = Block(plan.payload_bytes)
    block.data[:] = np.frombuffer(good, np.uint8)
    plan.check(block.ptr, plan.payload_bytes)
    plan.check(block.ptr, plan.payload_bytes, step=3, group=4)
    for nbytes in (0, 1, 63, 64, plan.payload_bytes - 8, plan.payload_bytes + 64):
        with pytest.raises(_core.CorruptPayloadError, match="bytes"):
            plan.check(block.ptr, nbytes)
    for where in ({"step": 4, "group": 4}, {"step": 3, "group": 0}):
        with pytest.raises(_core.MismatchError) as caught:
            plan.check(block.ptr, plan.payload_bytes, **where)
        assert caught.value.culprit == 0  # type: ignore[attr-defined]


def forgeries(plan: _core.Plan, good: bytes) -> Iterator[tuple[str, bytes]]:
    """Payloads with a right checksum that no encoder writes. Three wire tiles with entries, cap has room."""
    h, body, n = ref.header(good), bytearray(good[64:]), plan.n
    group = reference_group(plan, {"density": 0.0001})
    cap, tiles = group.codec.cap, -(-n // ref.WIRE_TILE)
    index_at = 64 + -(-4 * tiles // 8) * 8
    counts = np.frombuffer(body, "<u4", tiles).copy()
    assert (counts > 1).all() and h["count"] < cap

    def forged(at: int, fmt: str, *values: int | float, **changes: int) -> bytes:
        p = bytearray(good)
        struct.pack_into("<" + fmt, p, at, *values)
        return ref.with_header(bytes(p), False, **changes)

    first = np.frombuffer(good, "<u2", cap, index_at)
    yield "count above the capacity", ref.with_header(good, False, count=cap + 1)
    yield "count 2^64 - 1", ref.with_header(good, False, count=2**64 - 1)
    yield "count one short", ref.with_header(good, False, count=h["count"] - 1)
    yield "tile counts that wrap around", forged(64, "2I", 2**32 - 1, int(counts[0]) + int(counts[1]) + 1)
    yield "one tile has another's entry", forged(64, "2I", int(counts[0]) + 1, int(counts[1]) - 1)
    yield "a tile with more entries than the payload", forged(64, "I", cap + 7)
    yield "equal indices", forged(index_at, "2H", first[1], first[1])
    yield "falling indices", forged(index_at, "2H", first[1], first[0])
    yield "an index past n", forged(index_at + 2 * (h["count"] - 1), "H", n % ref.WIRE_TILE)
    yield "another value format", ref.with_header(good, False, flags=h["flags"] ^ ref.HALF)
    yield "an unknown flag", ref.with_header(good, False, flags=h["flags"] | 8)


@pytest.mark.parametrize("codec", INDEXED)
def test_forged_sparse_payloads_are_refused(codec: str) -> None:
    n = 2 * ref.WIRE_TILE + 40_000
    rng = np.random.default_rng(7)
    plan = _core.Plan(codec, home(codec), n, "float32", {"density": 0.0001})
    group = reference_group(plan, {"density": 0.0001})
    good = group.encode(np.zeros(n, np.float32), Step(step=3, group=4))
    cap = group.codec.cap
    index = np.sort(
        np.concatenate([rng.choice(40_000, (cap - 3) // 3, False) + t * ref.WIRE_TILE for t in range(3)])
    )
    index[-1] = n - 1
    body = ref.sparse_body(n, cap, index, np.ones(len(index), np.float32))
    good = ref.with_header(good[:64] + body, False, count=len(index), flags=0, scale=1.0)
    Rank(plan).decoded([good], at=Step(step=3, group=4))
    names = []
    for name, bad in forgeries(plan, good):
        names.append(name)
        assert bad != good, name
        refused(plan, [good, good, bad], 2, _core.CorruptPayloadError, Step(step=3, group=4))
    assert len(names) == 11


FORGED = forged.KINDS | {f"packed-{c}": functools.partial(forged.packed, c, home(c)) for c in INDEXED}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_payloads_are_refused(kind: str) -> None:
    """By the core, and by the reference where it looks. What is sound beside them is taken by both."""
    bad = taken = 0
    for name, by, payload, sound in FORGED[kind]():
        if sound:
            taken += 1
            got = Rank(by.plan).decoded([payload], at=forged.AT)
            assert np.isfinite(got).all(), name
            assert_same(got, by.group.decode([payload], 1.0), name)
            continue
        assert payload != by.good, name
        said = refused(by.plan, [by.good, by.good, payload], 2, _core.CorruptPayloadError, forged.AT)
        assert kind != "trits" or "trits" in said or "are set" in said, said
        bad += 1
        if kind in ("trits", "micro", "exponents"):
            continue
        with pytest.raises(ValueError):
            by.group.decode([payload], 1.0)
            pytest.fail(name)
    many = {"packed": 12, "trits": 16, "micro": 15, "exponents": 15, "blocks": 22, "streams": 25}
    assert taken and bad == many[kind.partition("-")[0]]


@pytest.mark.parametrize("codec", [c for c in SPARSE if c not in LINEAR])
@more
@given(data=st.data())
def test_any_body_gives_a_result_or_an_error(codec: str, data: st.DataObject) -> None:
    """The core and the reference accept the same bodies; the checksum is right, their own checks decide."""
    seed, n = data.draw(seeds), data.draw(st.sampled_from([1, 5, 300, 65536, 65537, 140000]))
    rng = np.random.default_rng(seed)
    names = {p["name"]: p["choices"] for p in parameters(codec) if p["name"] in ("values", "indices")}
    chosen = {name: data.draw(st.sampled_from(choices)) for name, choices in names.items()}
    chosen["density"] = min(1.0, 40 / n)
    plan = _core.Plan(codec, home(codec), n, "float32", chosen)
    good = bytearray(shares(codec, home(codec), n, "float32", chosen, 1, seed)[0])
    for _ in range(int(rng.integers(0, 4))):
        where = int(rng.integers(64, len(good)))
        good[where] = int(rng.choice([0, 1, 255, rng.integers(256)]))
    payload = ref.seal(bytes(good), False)
    group = reference_group(plan, chosen)
    try:
        want: Array | None = group.decode([payload], 1.0)
    except ValueError:
        want = None
    if want is None:
        refused(plan, [payload], 0, _core.CorruptPayloadError, Step(step=3, group=4))
    else:
        assert_same(Rank(plan).decoded([payload], at=Step(step=3, group=4)), want, "decoded")


# ---- gradients that are not finite ---------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
@few
@given(data=st.data())
def test_nothing_absorbs_a_nonfinite_gradient(
    codec: str, memory: str, dtype: str, data: st.DataObject
) -> None:
    chosen = data.draw(drawn_settings(codec, memory))
    n, seed = data.draw(sizes.filter(lambda n: n > 0)), data.draw(seeds)
    rng = np.random.default_rng(seed)
    sound, broken = Trial(codec, memory, n, dtype, chosen), Trial(codec, memory, n, dtype, chosen)
    bad = rng.choice(n, int(rng.integers(1, min(n, 5) + 1)), False)
    for step in range(5):
        at = [Step(step=step, rank=r, world=2) for r in range(2)]
        kind = data.draw(st.sampled_from(["laplace", "range", "few", "denormal"]))
        xs = [elements(kind, n, dtype, rng) for _ in at]
        if step in (1, 3):
            wrong = ref.to_f32(xs[1], dtype)
            wrong[bad] = rng.choice(np.float32([np.nan, np.inf, -np.inf]), len(bad))
            xs[1] = ref.from_f32(wrong, dtype)
        before = [t.group.memory.vec.copy() for t in (sound, broken)]
        cut = [cuts(n, "random", rng), cuts(n, "tiny", rng)]
        payloads = [t.encode(x, a, c) for t, x, a, c in zip((sound, broken), xs, at, cut, strict=True)]
        outs = [t.decode(payloads, 0.5, x) for t, x in zip((sound, broken), xs, strict=True)]
        assert_same(outs[0], outs[1], "replicas")
        if step not in (1, 3):
            continue
        seen = ref.to_f32(outs[0], dtype)
        assert not np.isfinite(seen[bad] if sound.plan.linear else seen).any()
        for trial, r in zip((sound, broken), before, strict=True):
            trial.residual()
            now = trial.group.memory.vec.astype(np.float64)
            assert np.isfinite(now).all()
            if not trial.conserves:  # test_memories.py has their bounds
                continue
            off = np.abs(now - r)
            assert (off <= np.abs(r)).all()
            # two roundings: that of acc and that of the way back
            with np.errstate(over="ignore"):
                unit = np.spacing(np.abs(trial.group.acc)).astype(np.float64)
            assert (off <= unit).all()


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "memory"), PAIRS)
def test_the_residual_can_be_set_and_read(codec: str, memory: str) -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 1025, 3000):
        trial = Trial(codec, memory, n, "float32")
        x = content("range", n * max(1, trial.plan.vectors), rng).reshape(max(1, trial.plan.vectors), n)
        for r in trial.ranks:
            assert not r.residual().any()  # all-zero bytes are a valid start
            r.encode(Vector(content("normal", n, rng)), Step())
            r.set_residual(x)
            want = x if trial.plan.vectors else np.zeros_like(x)
            assert (r.residual().view(np.uint32) == want.view(np.uint32)).all()
            if not n or not trial.plan.vectors:
                continue
            for wrong in (np.nan, np.inf, -np.inf):
                y = x.copy()
                y[-1, -1] = wrong
                with pytest.raises(_core.ArgumentError):
                    r.set_residual(y)
                assert (r.residual().view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize(
    ("codec", "memory", "world"), [(*pair, 1 + 2 * (i % 2)) for i, pair in enumerate(PAIRS)]
)
def test_what_was_not_sent_is_kept(codec: str, memory: str, world: int) -> None:
    n, rng = 2500, np.random.default_rng(1)
    trial = Trial(codec, memory, n, "float32")
    for step in range(6):
        trial.encode(elements("laplace", n, "float32", rng), Step(step=step, world=world))
        if step % 2:
            for r in trial.ranks:
                r.plan.unsend(r.state.ptr)
            trial.group.unsend()
            if trial.plan.vectors:
                assert (trial.residual() == trial.group.acc).all()
        trial.residual()


@pytest.mark.many
@pytest.mark.parametrize(
    ("pair", "factor"),
    shared([p for p in PAIRS if p[1] != "none"], [2.0, 0.5, 3.7, 65536.0, 2.0**-24, 1e-30, 1e30]),
)
def test_a_change_of_scale(pair: tuple[str, str], factor: float) -> None:
    """Multiplies what is kept, and changes nothing else in what follows."""
    codec, memory = pair
    n, rng = 3000, np.random.default_rng(2)
    trial = Trial(codec, memory, n, "float32", {})
    scale = np.float32(1)
    for step in range(6):
        x = (
            (content("laplace", n, rng).astype(np.float64) * float(scale))
            .clip(-1e38, 1e38)
            .astype(np.float32)
        )
        trial.encode(x, Step(step=step))
        if step in (1, 2, 4):
            for r in trial.ranks:
                r.plan.rescale(r.state.ptr, factor)
            trial.group.rescale(factor)
            with np.errstate(all="ignore"):
                scale = ref.saturate(scale * np.float32(factor)).astype(np.float32)
        trial.residual()
    for wrong in (0.0, -1.0, math.nan, math.inf, -math.inf):
        with pytest.raises(_core.ArgumentError):
            trial.plan.rescale(trial.ranks[0].state.ptr, wrong)


@pytest.mark.parametrize(("codec", "memory", "dtype"), COMBOS)
def test_the_state_is_all_there_is_to_save(codec: str, memory: str, dtype: str) -> None:
    """A run that goes on from a copy of the bytes, on another instruction set, gives the same payloads."""
    n, rng = 3000, np.random.default_rng(3)
    one = Rank(_core.Plan(codec, memory, n, dtype, {}, ISAS[0]))
    xs = [elements("laplace", n, dtype, rng) for _ in range(16)]
    for step in range(8):
        one.encode(Vector(xs[step]), Step(step=step))
    two = Rank(_core.Plan(codec, memory, n, dtype, {}, ISAS[-1]))
    two.state.data[:] = one.state.data
    for step in range(8, 16):
        assert one.encode(Vector(xs[step]), Step(step=step)) == two.encode(
            Vector(xs[step], seed=step), Step(step=step)
        )
        assert one.stats.stages == two.stats.stages and one.stats.passes == two.stats.passes
        assert (one.residual() == two.residual()).all()


# ---- wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_wrong_parameter_is_named(codec: str) -> None:
    for p in parameters(codec):
        wrong: list[Any] = [None, [], {}, True]
        if p["kind"] == "choice":
            wrong += ["no such choice", "", -1, len(p["choices"]), 0.5]
        else:
            wrong += [
                "1",
                math.nan,
                math.inf,
                -math.inf,
                p["max"] * 1.001 + 1,
                p["min"] - 1 - abs(p["min"]) * 0.001,
            ]
            if p["kind"] == "int":
                wrong.append((p["min"] + p["max"]) / 2 + 0.25 if p["min"] < p["max"] else p["min"] + 0.5)
        for value in wrong:
            with pytest.raises(_core.ParameterError, match=p["name"]) as caught:
                _core.Plan(codec, home(codec), 100, "float32", {p["name"]: value})
            assert caught.value.status == -2 and isinstance(caught.value, ValueError)
        if p["kind"] != "choice":
            for value in (p["min"], p["max"]):
                _core.Plan(
                    codec,
                    home(codec),
                    100,
                    "float32",
                    {p["name"]: int(value) if p["kind"] == "int" else value},
                )
    with pytest.raises(_core.ParameterError, match="densty"):
        _core.Plan(codec, "residual", 100, "float32", {"densty": 0.1})


def test_wrong_names_are_named() -> None:
    with pytest.raises(_core.ParameterError, match=r"topq.*topk"):
        _core.Plan("topq", "none", 1, "float32")
    with pytest.raises(_core.ParameterError, match=r"momentun.*residual"):
        _core.Plan("topk", "momentun", 1, "float32")
    with pytest.raises(_core.ArgumentError, match=r"float64.*float32"):
        _core.Plan("topk", "none", 1, "float64")
    with pytest.raises(_core.ArgumentError, match=r"sse9.*base"):
        _core.Plan("topk", "none", 1, "float32", {}, "sse9")
    for n in (-1, 2**40 + 1, 2**63 - 1):
        with pytest.raises(_core.ArgumentError, match="n "):
            _core.Plan("topk", "none", n, "float32")
    names = ("Argument", "Parameter", "Space", "CorruptPayload", "Mismatch", "Unsupported", "Device")
    for i, name in enumerate(names):
        e, status = getattr(_core, name + "Error"), -1 - i
        assert issubclass(e, _core.SidcompError) and e.status == status


def test_wrong_arguments_change_nothing() -> None:
    """Addresses and lengths as Python gives them; tests/c/core.c makes the other calls, of every codec."""
    n = 100
    plan = _core.Plan("topk", "residual", n, "float32")
    rank, x = Rank(plan), Vector(np.ones(n, np.float32))
    payload, state = rank.encode(x, Step()), rank.state.raw.copy()
    places = {"state": rank.state.ptr, "work": rank.work.ptr, "payload": rank.payload.ptr}
    for name, off in (("state", 8), ("work", 32), ("payload", 4)):
        odd = _core.Buffers(x.segments, **(places | {name: places[name] + off}))
        with pytest.raises(_core.ArgumentError):
            plan.encode(odd, step=1, seed=0, group=0, rank=0, world=1)
    huge = _core.Buffers(_core.Segments([x.all.ctypes.data] * 2, [n, 2**63]), rank.state.ptr)
    with pytest.raises(_core.ArgumentError):
        plan.decode(rank.payload.ptr, plan.payload_bytes, 1, 1.0, huge, step=0, group=0)
    for pointers, lengths in (([0], [5]), ([64], []), ([64, 64], [2**63, 2**63])):
        with pytest.raises(_core.ArgumentError):
            _core.Segments(pointers, lengths)
    assert rank.payload.data.tobytes() == payload and (rank.state.raw == state).all()
    assert (x.read() == 1).all()


def test_without_a_gpu_nothing_breaks() -> None:
    if _core.cuda_built:
        pytest.skip("this build has CUDA")
    assert _core.cuda_devices()[0] == 0 and "CUDA" in _core.cuda_devices()[1]
    plan = _core.Plan("topk", "none", 4, "float32")
    with pytest.raises(_core.UnsupportedError):
        plan.cuda_work_bytes()


# ---- helpers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(data=st.data())
def test_scaling_in_place(dtype: str, data: st.DataObject) -> None:
    n, seed = data.draw(sizes), data.draw(seeds)
    rng = np.random.default_rng(seed)
    x = elements(data.draw(st.sampled_from(KINDS)), n, dtype, rng)
    factor = data.draw(st.sampled_from([1 / 3, 0.5, 1.0, 1e-9, 7.25]))
    vector = Vector(x, cuts(n, data.draw(st.sampled_from(["one", "tiny", "random"])), rng), seed)
    _core.scale(vector.segments, dtype, factor)
    with np.errstate(all="ignore"):
        want = ref.from_f32(ref.to_f32(x, dtype) * np.float32(factor), dtype)
    assert_same(vector.read(), want, "scaled")
    vector.check()
