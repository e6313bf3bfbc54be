"""The memories against their papers: sequences computed by hand, what they promise, and how well a step that
was not finite is taken back. test_codecs.py compares them bit for bit with the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference as ref
import sidcomp
from buffers import Rank, Vector, parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Array, Step
from sidcomp import _core

few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
MEMORIES = {m["name"]: m for m in _core.memories()}
MOMENTA = [name for name, m in MEMORIES.items() if "momentum" in m["traits"]]
SPARSE = [c["name"] for c in _core.codecs() if "sparse" in c["traits"]]


class Run:
    """The ranks of one group, step by step."""

    def __init__(self, codec: str, memory: str, n: int, world: int = 1, **chosen: float | int | str) -> None:
        plan = _core.Plan(codec, memory, n, "float32", chosen, flush=memory == "compensation")
        self.ranks = [Rank(plan) for _ in range(world)]
        self.step, self.world = 0, world

    def __call__(self, *gradients: Any, carry: float = 1.0) -> Array:
        """One step; what all ranks get, the mean."""
        xs = [np.asarray(g, np.float32) for g in gradients]
        at = [Step(step=self.step, rank=r, world=self.world, carry=carry) for r in range(self.world)]
        payloads = [r.encode(Vector(x), a) for r, x, a in zip(self.ranks, xs, at, strict=True)]
        outs = []
        for r, x in zip(self.ranks, xs, strict=True):
            vector = Vector(x)
            r.decode(payloads, 1 / self.world, vector, at[0])
            outs.append(vector.read())
        self.step += 1
        assert all(np.array_equal(o, outs[0], equal_nan=True) for o in outs)
        return outs[0]

    def kept(self, rank: int = 0) -> list[list[float]]:
        return [[float(v) for v in row] for row in self.ranks[rank].residual()]


# ---- by hand: every number is exact in float32 -----------------------------------------------------


def test_residual_by_hand() -> None:
    run = Run("topk", "residual", 4, density=0.25)
    assert list(run([4, 3, 2, 1])) == [4, 0, 0, 0]
    assert run.kept() == [[0, 3, 2, 1]]
    assert list(run([1, 1, 1, 1])) == [0, 4, 0, 0]
    assert run.kept() == [[1, 0, 3, 2]]


def test_residual_with_weights_by_hand() -> None:
    """e = beta e + gamma g."""
    run = Run("topk", "residual", 4, density=0.25, beta=0.5, gamma=0.25)
    assert list(run([8, 4, 2, 0])) == [2, 0, 0, 0]
    assert run.kept() == [[0, 1, 0.5, 0]]
    assert list(run([0, 0, 0, 4])) == [0, 0, 0, 1]
    assert run.kept() == [[0, 0.5, 0.25, 0]]
    run = Run("topk", "residual", 4, density=0.25, beta=0)
    assert list(run([8, 4, 2, 0])) == [8, 0, 0, 0]
    assert list(run([0, 0, 0, 1])) == [0, 0, 0, 1]  # nothing of the step before


@pytest.mark.parametrize("values", ["f32", "f16"])
def test_dgc_by_hand(values: str) -> None:
    """u = u / 2 + g, v += u; the largest v is sent, and there u is masked."""
    run = Run("topk", "dgc", 4, density=0.25, momentum=0.5, values=values)
    assert list(run([8, 4, 2, 0])) == [8, 0, 0, 0]
    assert run.kept() == [[0, 4, 2, 0], [0, 4, 2, 0]]
    assert list(run([1, 0, 4, 0])) == [0, 0, 7, 0]  # u = 1 2 5 0, v = 1 6 7 0
    assert run.kept() == [[1, 6, 0, 0], [1, 2, 0, 0]]
    assert list(run([0, 0, 0, 0])) == [0, 7, 0, 0]  # u = .5 1 0 0, v = 1.5 7 0 0
    assert run.kept() == [[1.5, 0, 0, 0], [0.5, 0, 0, 0]]


def test_dgc_without_masking_by_hand() -> None:
    run = Run("topk", "dgc", 4, density=0.25, momentum=0.5, masking="off")
    assert list(run([8, 4, 2, 0])) == [8, 0, 0, 0]
    assert run.kept() == [[0, 4, 2, 0], [8, 4, 2, 0]]
    assert list(run([1, 0, 4, 0])) == [0, 0, 7, 0]  # u = 5 2 5 0, v = 5 6 7 0
    assert run.kept() == [[5, 6, 0, 0], [5, 2, 5, 0]]


@pytest.mark.parametrize(
    ("form", "sent", "kept"),
    [
        ("on", 12, [[0, 6, 3, 0], [0, 4, 2, 0]]),  # v += u / 2 + g
        ("redsync", 16, [[0, 8, 4, 0], [0, 4, 2, 0]]),  # v += u + g
    ],
)
def test_nesterov_by_hand(form: str, sent: float, kept: list[list[float]]) -> None:
    run = Run("topk", "dgc", 4, density=0.25, momentum=0.5, nesterov=form)
    assert list(run([8, 4, 2, 0])) == [sent, 0, 0, 0]
    assert run.kept() == kept
    # u = 1 2 5 0; the second step's increment is u/2 + g = 1.5 1 6.5 0, or u + g = 2 2 9 0
    assert list(run([1, 0, 4, 0])) == [0, 0, 9.5 if form == "on" else 13, 0]
    assert run.kept()[1] == [1, 2, 0, 0]


def test_an_element_of_zero_was_not_sent() -> None:
    """All are sent, but of an acc of 0 nothing leaves: its velocity stays."""
    run = Run("topk", "dgc", 4, density=1.0, momentum=0.5)
    run.ranks[0].set_residual(np.float32([[-2, 1, 1, 1], [4, 4, 4, 4]]))
    assert list(run([0, 0, 0, 0])) == [0, 3, 3, 3]  # u = 2 2 2 2
    assert run.kept() == [[0, 0, 0, 0], [2, 0, 0, 0]]
    assert list(run([0, 0, 0, 0])) == [1, 0, 0, 0]


def test_momentum_by_hand() -> None:
    run = Run("topk", "momentum", 4, density=0.25, beta=0.5)
    assert list(run([8, 4, 0, 0])) == [4, 0, 0, 0]
    assert run.kept() == [[4, 2, 0, 0]]  # nothing is taken out
    assert list(run([0, 0, 0, 10])) == [0, 0, 0, 5]
    assert run.kept() == [[2, 1, 0, 5]]


def test_compensation_by_hand() -> None:
    """c = g + c - the update, on each rank; two ranks."""
    run = Run("topk", "compensation", 4, world=2, density=0.25)
    assert list(run([8, 0, 2, 0], [6, 0, -4, 0])) == [7, 0, 0, 0]
    assert run.kept(0) == [[1, 0, 2, 0]] and run.kept(1) == [[-1, 0, -4, 0]]
    assert list(run([0, 0, 4, 0], [0, 2, 0, 0])) == [0, 0, 1, 0]  # acc: 1 0 6 0 and -1 2 -4 0
    assert run.kept(0) == [[1, 0, 5, 0]] and run.kept(1) == [[-1, 2, -5, 0]]


def test_compensation_is_the_mean_of_the_error() -> None:
    """Over the ranks, c adds up to what all of them wanted less what all of them got, whoever sent it."""
    n, world = 500, 4
    rng = np.random.default_rng(0)
    run = Run("topk", "compensation", n, world, density=0.05)
    wanted, got = np.zeros(n), np.zeros(n)
    for _ in range(20):
        gradients = rng.normal(0, 1, (world, n)).astype(np.float32)
        wanted += gradients.mean(0, dtype=np.float64)
        got += run(*gradients)
    kept = np.mean([np.array(run.kept(r)[0]) for r in range(world)], axis=0)
    assert np.allclose(kept, wanted - got, atol=1e-5)


def test_a_payload_that_is_not_finite_leaves_the_compensation_finite() -> None:
    """Sparse values travel as they are: only their sender says whether they are finite. What is not is
    written, and no later step keeps it."""
    plan = _core.Plan("topk", "compensation", 100, "float32", {"density": 0.1})
    x = np.random.default_rng(3).normal(size=100).astype(np.float32)
    at = ref.Step(step=1, group=0)
    for value in (np.nan, np.inf, -np.inf):
        rank = Rank(plan)
        good = rank.encode(Vector(x), at)
        words = np.frombuffer(good, "<f4").copy()
        (place,) = np.flatnonzero(words[16:] == x[np.abs(x).argmax()])
        words[16 + place] = value
        out = Vector(np.zeros(100, np.float32))
        rank.decode([ref.with_header(words.tobytes(), False)], 1.0, out, at)
        assert not np.isfinite(out.read()).all() and np.isfinite(rank.residual()).all()


def test_a_full_precision_step_resets_the_compensation() -> None:
    n, world = 100, 2
    rng = np.random.default_rng(1)
    run = Run("topk", "compensation", n, world, density=0.1)
    run(*rng.normal(0, 1, (world, n)))
    dense = Run("none", "compensation", n, world)
    for full, half in zip(dense.ranks, run.ranks, strict=True):
        full.set_residual(half.residual())
    kept = np.array([run.kept(r)[0] for r in range(world)])
    gradients = rng.normal(0, 1, (world, n)).astype(np.float32)
    assert np.allclose(dense(*gradients), (gradients + kept).mean(0), atol=1e-6)
    assert all(not np.any(dense.kept(r)) for r in range(world))


# ---- momentum without loss -------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_dgc_beside_none_is_the_momentum_of_sgd(nesterov: bool, world: int) -> None:
    """torch's optimizer on the mean gradient takes the step that DGC hands to one without momentum."""
    torch = pytest.importorskip("torch")
    n, m, rng = 300, 0.9, np.random.default_rng(world)
    run = Run("none", "dgc", n, world, momentum=m, nesterov="on" if nesterov else "off")
    weights = [torch.zeros(n, requires_grad=True) for _ in range(2)]
    theirs = torch.optim.SGD([weights[0]], lr=0.125, momentum=m, nesterov=nesterov)
    ours = torch.optim.SGD([weights[1]], lr=0.125)
    for _ in range(30):
        gradients = rng.normal(0, 1, (world, n)).astype(np.float32)
        weights[0].grad = torch.from_numpy(gradients.mean(0, dtype=np.float32))
        weights[1].grad = torch.from_numpy(run(*gradients))
        theirs.step()
        ours.step()
    assert torch.allclose(*weights, atol=2e-6 * 30)
    assert not any(np.any(run.kept(r)[0]) for r in range(world))  # nothing is left over


@pytest.mark.parametrize("codec", ["none", *SPARSE])
def test_every_codec_has_the_same_velocity_without_masking(codec: str) -> None:
    """u does not depend on what was sent: bit for bit u = m u + g."""
    n, m, rng = 2000, np.float32(0.75), np.random.default_rng(3)
    run = Run(codec, "dgc", n, momentum=float(m), masking="off")
    u = np.zeros(n, np.float32)
    for _ in range(10):
        g = rng.normal(0, 1, n).astype(np.float32)
        u = u * m + g
        run(g)
        assert np.array_equal(run.ranks[0].residual()[1], u)


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("form", ["off", "on", "redsync"])
def test_what_was_sent_is_what_momentum_accumulates(codec: str, form: str) -> None:
    """Without masking nothing is lost: what was sent and what is kept are the sum of SGD's own steps, and
    with gradients of zero all of it is sent in the end."""
    n, m, rng = 1000, 0.5, np.random.default_rng(4)
    has_density = any(p["name"] == "density" for p in parameters(codec))
    chosen: dict[str, Any] = {"density": 0.05} if has_density else {}
    run = Run(codec, "dgc", n, momentum=m, masking="off", nesterov=form, **chosen)
    u, wanted, sent = np.zeros(n), np.zeros(n), np.zeros(n)
    of_u, of_g = {"off": (1, 0), "on": (m, 1), "redsync": (1, 1)}[form]
    for step in range(400):
        g = rng.normal(0, 1, n).astype(np.float32) * (step < 20)
        u = m * u + g
        wanted += of_u * u + of_g * g
        sent += run(g)
        if step == 19:
            assert np.allclose(sent + run.kept()[0], wanted, atol=1e-4)
    assert np.allclose(sent, wanted, atol=2e-3 if np.any(run.kept()[0]) else 1e-4)


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("values", ["f32", "f16"])
def test_masking_clears_exactly_what_was_sent(codec: str, values: str) -> None:
    n, rng = 3000, np.random.default_rng(5)
    try:
        run = Run(codec, "dgc", n, momentum=0.9, density=0.05, values=values)
    except _core.ParameterError:
        pytest.skip(f"{codec} has no choice of values")
    for step in range(12):
        before = run.ranks[0].residual()[1] * np.float32(0.9)
        g = rng.laplace(0, 1, n).astype(np.float32)
        out = run(g)
        u = run.ranks[0].residual()[1]
        assert (out != 0).any() and (u[out != 0] == 0).all()
        assert np.array_equal(u[out == 0], (before + g)[out == 0]), step


# ---- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 4, 9])
def test_local_clipping_by_hand(world: int) -> None:
    """Norm 5 against 20 / sqrt(N): clipped where the latter is smaller (DGC section 3.2)."""
    most = 20 / math.sqrt(world)
    run = Run("none", "dgc", 4, world, momentum=0, clip_norm=20)
    out = run(*[[3, 0, 0, -4]] + [[0, 0, 0, 0]] * (world - 1))
    factor = np.float32(min(1, most / 5))
    assert np.allclose(out * world, np.float32([3, 0, 0, -4]) * factor, rtol=1e-6)
    out = run(*[[30, 0, 0, -40]] * world)
    assert np.allclose(np.linalg.norm(out), min(50, most), rtol=1e-6)


def test_clipping_does_not_depend_on_segments() -> None:
    n, rng = 5000, np.random.default_rng(6)
    plan = _core.Plan("topk", "dgc", n, "float32", {"clip_norm": 3.0})
    g = rng.normal(0, 1, n).astype(np.float32)
    g[[7, 4000]] = np.nan, np.inf  # count as 0 here too
    clean = np.where(np.isfinite(g), g, 0).astype(np.float32)
    kept = []
    for i, lengths in enumerate(([n], [1, 0, 1022, 3, n - 1026], [17] * 294 + [2])):
        rank = Rank(plan)
        rank.encode(Vector(g, lengths, i), Step())
        rank.plan.unsend(rank.state.ptr)
        kept.append(rank.residual())
    assert all(np.array_equal(k, kept[0]) for k in kept)
    assert np.linalg.norm(kept[0][1].astype(np.float64)) == pytest.approx(3.0, rel=1e-6)
    assert np.allclose(kept[0][1] * np.linalg.norm(clean) / 3, clean, rtol=1e-5)


# ---- another learning rate -------------------------------------------------------------------------


def test_carry_by_hand() -> None:
    """What is owed is multiplied; a velocity is not."""
    run = Run("topk", "residual", 4, density=0.25)
    run([4, 3, 2, 1])
    assert list(run([1, 1, 1, 2], carry=2)) == [0, 7, 0, 0]
    assert run.kept() == [[1, 0, 5, 4]]
    run = Run("topk", "residual", 4, density=0.25, beta=0.5)
    run([4, 3, 2, 1])
    assert list(run([1, 1, 1, 1], carry=4)) == [0, 7, 0, 0]
    assert run.kept() == [[1, 0, 5, 3]]
    run = Run("topk", "dgc", 4, density=0.25, momentum=0.5, masking="off")
    run([8, 4, 2, 0])
    assert run.kept() == [[0, 4, 2, 0], [8, 4, 2, 0]]
    assert list(run([0, 0, 0, 0], carry=0.5)) == [4, 0, 0, 0]
    assert run.kept() == [[0, 4, 2, 0], [4, 2, 1, 0]]
    run = Run("signum", "momentum", 2, beta=0.5)
    run([4, -2])
    run([0, 0], carry=8)
    assert run.kept() == [[1, -0.5]]
    run = Run("marsit", "compensation", 2, eta_s=1)
    run([3, -3])
    assert run.kept() == [[2, -2]]
    run([0.5, 0.5], carry=0.25)
    assert run.kept() == [[0, -1]]


@pytest.mark.parametrize("n", [4, 1000])
@pytest.mark.parametrize("nesterov", ["on", "redsync"])
def test_opposite_infinities_leave_no_nan(n: int, nesterov: str) -> None:
    """What is kept, times the carry, and the step of the velocity may overflow in opposite directions."""
    most = np.float32(3.4e38)
    run = Run("topk", "dgc", n, density=0.25, momentum=0.5, nesterov=nesterov, masking="off")
    run(np.full(n, most))
    run(np.full(n, -most), carry=2.25)
    assert np.isfinite(run.kept()).all()


@pytest.mark.parametrize("codec", ["topk", "efsignsgd", "int8", "onebit"])
@pytest.mark.parametrize("world", [1, 3])
def test_with_the_rates_ratio_it_is_ef_sgd(codec: str, world: int) -> None:
    """Karimireddy et al. 2019, Algorithm 1: p = rate g + e, the parameters move by C(p), e = p - C(p). Every
    rank has its own e, and the parameters move by the mean. Codecs that scale with what they are given."""
    n, rng = 500, np.random.default_rng(3)
    run = Run(codec, "residual", n, world, **({"density": 0.05} if codec == "topk" else {}))
    e, before = np.zeros((world, n), np.float32), math.nan
    ours, papers = np.zeros(n), np.zeros(n)
    for step, rate in enumerate([0.5, 0.5, 0.125, 1.0, 0.001, 3.0, 3.0, 0.7]):
        g = rng.normal(0, 1, (world, n)).astype(np.float32)
        ours -= rate * run(*g, carry=before / rate if step else 1.0).astype(np.float64)
        p = np.float32(rate) * g + e
        fresh = [Rank(run.ranks[0].plan) for _ in range(world)]  # C alone: what it leaves of p
        for rank, x in zip(fresh, p, strict=True):
            rank.encode(Vector(x), Step())
        e = np.stack([rank.residual()[0] for rank in fresh])
        papers -= (p.astype(np.float64) - e).mean(axis=0)
        before, scale = rate, np.abs(p).max()
        assert np.abs(ours - papers).max() < 1e-5 * scale + 1e-5 * np.abs(papers).max()
        kept = np.stack([r.residual()[0] for r in run.ranks]) * rate
        assert np.abs(kept - e).max() < 1e-5 * scale


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_wrong_carry_is_refused(wrong: float) -> None:
    rank = Rank(_core.Plan("topk", "residual", 4, "float32", {"density": 0.25}))
    rank.encode(Vector(np.ones(4, np.float32)), Step())
    before = rank.residual()
    with pytest.raises(Exception, match="argument"):
        rank.encode(Vector(np.ones(4, np.float32)), Step(step=1, carry=wrong))
    assert np.array_equal(rank.residual(), before)
    with pytest.raises(sidcomp.ArgumentError, match="carry"):
        sidcomp.Compressor("topk", 4).encode(np.ones(4, np.float32), carry=wrong)


# ---- steps that did not happen ---------------------------------------------------------------------


def bound(memory: str, chosen: dict[str, Any], before: Array, after: Array, g: Array) -> Array:
    """How far a vector may be from where it was: the roundings that csrc/memory/ states."""
    ulp = np.spacing
    with np.errstate(all="ignore"):
        if memory == "dgc":
            grown = [np.abs(before[0]), np.abs(before[1]), np.abs(after[0]), np.abs(after[1]), np.abs(g)]
            most = np.maximum.reduce([ulp(x) for x in grown]).astype(np.float64)
            m = float(chosen["momentum"])
            return np.stack([4 * most, 4 * most / m if m else np.abs(before[1])])
        beta = float(chosen.get("beta", 1))
        most = ulp(np.maximum(np.abs(after[0]), np.abs(g))).astype(np.float64)
        return (4 * most / beta if beta else np.abs(before[0]))[None]


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "none"])
@few
@given(data=st.data())
def test_a_step_is_taken_back(memory: str, data: st.DataObject) -> None:
    """On a step that is not finite anywhere, what was kept before it is kept after it."""
    chosen: dict[str, Any] = {"density": data.draw(st.sampled_from([0.01, 0.2]))}
    if memory == "dgc":
        chosen["momentum"] = data.draw(st.sampled_from([0.0, 0.5, 0.9, 0.99]))
        chosen["nesterov"] = data.draw(st.sampled_from(["off", "on", "redsync"]))
        chosen["clip_norm"] = data.draw(st.sampled_from([0.0, 1.0]))
        chosen["masking"] = data.draw(st.sampled_from(["off", "on"]))
    elif memory in ("residual", "momentum"):
        chosen["beta"] = data.draw(st.sampled_from([0.0, 0.5, 0.9] + [1.0] * (memory == "residual")))
    n, rng = 300, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    run = Run("topk", memory, n, world=2, **chosen)
    for step in range(4):
        gradients = rng.normal(0, 10.0 ** rng.uniform(-3, 3), (2, n)).astype(np.float32)
        if step < 3:
            run(*gradients)
            continue
        before = [r.residual() for r in run.ranks]
        gradients[0][[3, 77]] = np.inf, np.nan
        peeks = [Rank(r.plan) for r in run.ranks]
        for peek, r, g, i in zip(peeks, run.ranks, gradients, (0, 1), strict=True):
            peek.state.data[:] = r.state.data
            peek.encode(Vector(g), Step(step=step, rank=i, world=2))
            peek.plan.unsend(peek.state.ptr)
        assert not np.isfinite(run(*gradients)).any()
        for r, was, peek, g in zip(run.ranks, before, peeks, gradients, strict=True):
            off = np.abs(r.residual().astype(np.float64) - was)
            grad = np.where(np.isfinite(g), g, 0)
            assert (off <= bound(memory, chosen, was, peek.residual(), grad)).all()


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "none"])
def test_saturated_memories_stay_finite(memory: str) -> None:
    n, rng = 64, np.random.default_rng(8)
    for form in ("off", "on", "redsync") if memory == "dgc" else ("",):
        run = Run("topk", memory, n, density=0.1, **({"nesterov": form} if form else {}))
        for step in range(8):
            g = (rng.choice([-1, 1], n) * float(ref.FLT_MAX)).astype(np.float32)
            if step == 5:
                g[3] = np.nan
            run(g)
            assert np.isfinite(run.ranks[0].residual()).all()


def test_taking_back_does_not_overflow() -> None:
    """-largest + 1.5 steps rounds to one step; 1.5 steps less is a tie, of which infinity is even."""
    largest, step = float(ref.FLT_MAX), 2.0**104
    run = Run("topk", "residual", 3, density=0.3)
    run([-largest, -largest, 0])  # one of them is kept
    assert run.kept() == [[0, -largest, 0]]
    run([0, 1.5 * step, math.nan])
    assert run.kept() == [[0, -largest, 0]]


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "none"])
def test_a_run_with_another_loss_scale(memory: str) -> None:
    """Gradients and memory times 2^-6: everything comes out times 2^-6, exactly."""
    n = 2000
    one, other = Run("topk", memory, n), Run("topk", memory, n)
    rng = np.random.default_rng(9)
    factor = np.float32(1)
    for step in range(8):
        if step == 4:
            factor = np.float32(2.0**-6)
            other.ranks[0].plan.rescale(other.ranks[0].state.ptr, float(factor))
        g = rng.normal(0, 1, n).astype(np.float32)
        assert np.array_equal(one(g) * factor, other(g * factor))
        assert np.array_equal(one.ranks[0].residual() * factor, other.ranks[0].residual())


# ---- what goes together ----------------------------------------------------------------------------


def test_traits_and_vectors() -> None:
    for name, info in MEMORIES.items():
        plan = _core.Plan("topk", name, 10, "float32", {})
        assert plan.vectors == ref.MEMORIES[name].vectors
        assert ("feedback" in info["traits"]) == ref.MEMORIES[name].feedback
        assert ("momentum" in info["traits"]) == ref.MEMORIES[name].momentum
        lossless = _core.Plan("none", name, 10, "float32", {})
        assert lossless.memory == (name if name in MOMENTA else "none")


@pytest.mark.parametrize(
    ("memory", "name", "wrong"),
    [("residual", "beta", 1.1), ("residual", "gamma", 0.0), ("dgc", "momentum", 1.0),
     ("dgc", "clip_norm", -1.0), ("dgc", "masking", "maybe"), ("dgc", "nesterov", "yes"),
     ("momentum", "beta", 1.0), ("momentum", "beta", -0.1)],
)  # fmt: skip
def test_a_wrong_parameter_is_named(memory: str, name: str, wrong: Any) -> None:
    with pytest.raises(_core.ParameterError, match=name):
        _core.Plan("topk", memory, 10, "float32", {name: wrong})
