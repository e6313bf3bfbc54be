"""TernGrad with a shared scaler, over several ranks in one process: bit for bit by the reference, right on
average, and what its whole numbers can and cannot hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import reference as ref
import sidcomp
from buffers import Rank, Vector, reference_group
from reference import Array, Step
from sidcomp import _core
from sidcomp.config.registry import check_ranks
from test_codecs import KINDS, content, cuts, elements

CODEC, MOST = "terngrad-shared", 127
SLOTS, CODES = slice(64, 576), 576  # of a payload


class Ranks:
    """All ranks of a world, and what goes wrong at one of them between the rounds."""

    def __init__(
        self,
        world: int,
        n: int,
        memory: str = "none",
        dtype: str = "float32",
        group: int = 5,
        **settings: Any,
    ) -> None:
        self.group = group
        self.plan = _core.Plan(CODEC, memory, n, dtype, settings)
        self.world, self.n, self.dtype, self.settings = world, n, dtype, settings
        self.ranks = [Rank(_core.Plan(CODEC, memory, n, dtype, settings)) for _ in range(world)]
        self.step = 0

    def payloads(self) -> list[bytes]:
        return [r.payload.data.tobytes() for r in self.ranks]

    def sum(self, round: int) -> None:
        offset, count = self.plan.slices[round]
        parts = [r.payload.data[offset : offset + count] for r in self.ranks]
        total = np.sum(parts, axis=0, dtype=np.uint8)
        for part in parts:
            part[:] = total

    def exchange(
        self,
        gradients: Sequence[Array],
        seed: int = 0,
        change: Callable[[int, list[Array]], None] = lambda round, slices: None,
    ) -> list[Array]:
        """What every rank decodes. change sees each round's slices before they are summed."""
        held = [
            Vector(g, cuts(self.n, "random", np.random.default_rng(i)), i) for i, g in enumerate(gradients)
        ]
        at = [Step(self.step, self.group, rank, self.world, seed) for rank in range(self.world)]
        self.rounds: list[list[bytes]] = []  # payloads after each round, not summed yet
        for i, (offset, count) in enumerate(self.plan.slices):
            for r, v, a in zip(self.ranks, held, at, strict=True):
                if i == 0:
                    r.encode(v, a)
                else:
                    r.plan.next_reduction(
                        i, r.buffers(v), step=a.step, seed=a.seed, group=a.group, rank=a.rank, world=a.world
                    )
                    r.check()
            change(i, [r.payload.data[offset : offset + count] for r in self.ranks])
            self.rounds.append(self.payloads())
            if self.world > 1:
                self.sum(i)
        scale = float(np.float32(1) / np.float32(self.world))
        self.flags = [
            r.decode([p], scale, v, a)
            for r, p, v, a in zip(self.ranks, self.payloads(), held, at, strict=True)
        ]
        self.step += 1
        return [v.read() for v in held]

    def residuals(self) -> list[Array]:
        return [r.residual()[0] for r in self.ranks]


class Judges:
    """The same by the reference."""

    def __init__(self, ranks: Ranks) -> None:
        self.groups = [reference_group(ranks.plan, ranks.settings) for _ in range(ranks.world)]
        self.world, self.step = ranks.world, 0

    def exchange(self, gradients: Sequence[Array], seed: int = 0) -> Array:
        at = [Step(self.step, 5, rank, self.world, seed) for rank in range(self.world)]
        self.step += 1
        some = [g.encode(x, a) for g, x, a in zip(self.groups, gradients, at, strict=True)]
        self.rounds = [some]
        if self.world > 1:
            summed = [ref.add_bytes(some, r) for r in range(self.world)]
            some = [g.further(p, x, a) for g, p, x, a in zip(self.groups, summed, gradients, at, strict=True)]
            self.rounds.append(some)
            some = [ref.add_bytes(some, r, CODES) for r in range(self.world)]
        scale = float(np.float32(1) / np.float32(self.world))
        outs = [g.decode([p], scale) for g, p in zip(self.groups, some, strict=True)]
        for g, x in zip(self.groups, gradients, strict=True):
            if not np.isfinite(ref.to_f32(outs[0], g.dtype)).all():
                g.take_back(x)
        return outs[0]


def same(got: Array, want: Array) -> bool:
    """Bit for bit, every NaN alike."""
    nan = np.isnan(got) & np.isnan(want) if got.dtype.kind == "f" else np.zeros(len(got), bool)
    raw = [np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (got, want)]
    return bool((nan | (raw[0] == raw[1])).all())


def compare(ranks: Ranks, judges: Judges, gradients: Sequence[Array], seed: int = 0) -> Array:
    outs, want = ranks.exchange(gradients, seed), judges.exchange(gradients, seed)
    if ranks.world > 1:
        assert ranks.rounds == judges.rounds
    for r, (out, group) in enumerate(zip(outs, judges.groups, strict=True)):
        assert same(out, want), f"rank {r} decodes {out}, not {want}"
        assert same(ranks.residuals()[r], group.kept), f"rank {r} keeps {ranks.residuals()[r]}"
    assert len(set(ranks.flags)) == 1
    return want


@pytest.mark.many
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize(
    ("memory", "dtype"), [("none", "float32"), ("residual", "float32"), ("residual", "bfloat16")]
)
def test_equals_the_reference(world: int, memory: str, dtype: str) -> None:
    """Slices of both rounds, what is decoded and what is kept, also beside whole tiles and registers."""
    rng = np.random.default_rng(world)
    for n in (0, 1, 2, 31, 1023, 1025, 5000):
        ranks = Ranks(world, n, memory, dtype, clip=1.5 if n == 5000 else 2.5)
        judges = Judges(ranks)
        for step in range(3):
            kind = str(rng.choice(KINDS)) if step else "laplace"
            gradients = [elements(kind, n, dtype, rng) for _ in range(world)]
            compare(ranks, judges, gradients, seed=7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 5])
def test_every_kind_of_content(kind: str, world: int) -> None:
    """Up to the largest float on every rank: finite, and nothing is lost."""
    rng = np.random.default_rng(3)
    for n in (1, 700):
        ranks = Ranks(world, n, "residual")
        judges = Judges(ranks)
        gradients = [content(kind, n, rng) for _ in range(world)]
        out = compare(ranks, judges, gradients)
        kept = ranks.residuals()
        assert np.isfinite(out).all() and np.isfinite(kept).all()
        total = np.sum([g.astype(np.float64) for g in gradients], axis=0)
        left = total - np.sum([k.astype(np.float64) for k in kept], axis=0)
        top = max(float(np.abs(g).max()) for g in gradients)
        assert np.abs(left - world * out.astype(np.float64)).max() <= 2 * world * top * 2.0**-23


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_terngrad(kind: str) -> None:
    """The same draws, so the same values come of it."""
    rng = np.random.default_rng(2)
    for n in (1, 1000, 4097):
        for settings in ({}, {"clip": 0.7}):
            x = content(kind, n, rng)
            (out,) = Ranks(1, n, **settings).exchange([x], seed=3)
            plan = _core.Plan("terngrad", "none", n, "float32", settings)
            assert (out == Rank(plan).sent(x, Step(0, 5, 0, 1, 3))).all()


def test_the_scaler_is_the_largest_after_clipping() -> None:
    """Each rank clips at its own standard deviations; the codes are all of the largest of their scalers."""
    rng, n = np.random.default_rng(0), 20_000
    gradients = [(s * rng.normal(0.1, 1, n)).astype(np.float32) for s in (1.0, 3.0, 0.2)]
    ranks = Ranks(3, n)
    (out, *_) = ranks.exchange(gradients)
    own = [np.float32(2.5 * g.astype(np.float64).std()) for g in gradients]
    slots = np.frombuffer(ranks.payloads()[0][SLOTS], "<f4")
    assert slots[:3] == pytest.approx(own, rel=1e-6) and not slots[3:].any()
    steps = np.unique(np.rint(out.astype(np.float64) * 3 / slots.max()))
    assert set(steps) == set(range(-3, 4))
    codes = [np.frombuffer(p, np.int8, n, CODES) for p in ranks.rounds[1]]
    assert set(np.unique(codes)) == {-1, 0, 1}
    beyond = np.abs(gradients[0]) > own[0]  # sent as what clipping leaves, a third of the shared scaler
    share = np.abs(codes[0][beyond]).mean()
    want = float(own[0] / own[1])
    assert beyond.sum() > 200 and abs(share - want) < 4 * math.sqrt(want * (1 - want) / beyond.sum())


def test_right_on_average() -> None:
    """Over the steps' draws the mean of each element is that of the clipped gradients of all ranks, whose
    scales differ: within 4.5 standard errors, and the chi-square of all of them is as it should be."""
    n, world, runs, rng = 300, 3, 700, np.random.default_rng(5)
    gradients = [(s * rng.laplace(0, 1, n)).astype(np.float32) for s in (1.0, 0.4, 2.0)]
    ranks = Ranks(world, n)
    seen = np.empty((runs, n))
    for run in range(runs):
        outs = ranks.exchange(gradients, seed=11)
        assert all((o == outs[0]).all() for o in outs)
        seen[run] = outs[0]
    slots = np.frombuffer(ranks.payloads()[0][SLOTS], "<f4")
    shared = float(slots.max())
    clipped = [
        np.clip(g.astype(np.float64), -float(s), float(s)) for g, s in zip(gradients, slots[:3], strict=True)
    ]
    goal = np.mean(clipped, axis=0)
    chance = [np.abs(c) / shared for c in clipped]
    spread = np.sqrt(np.sum([p * (1 - p) for p in chance], axis=0)) * shared / world
    z = (seen.mean(axis=0) - goal) / np.maximum(spread / math.sqrt(runs), 1e-30)
    often = np.sum([p * (1 - p) for p in chance], axis=0) > 0.02
    assert often.sum() > 0.8 * n and np.abs(z[often]).max() < 4.5
    assert abs((z[often] ** 2).sum() - often.sum()) < 4 * math.sqrt(2 * often.sum())
    noise = (seen[:, often] - goal[often]).var(axis=0) / spread[often] ** 2
    assert abs(noise.mean() - 1) < 0.05  # as the paper's rule has it, and no more


def test_as_many_ranks_as_a_byte_counts() -> None:
    """127 codes of one sign add up to 127; one rank more is refused, by name, where the world is known."""
    n = 33
    x = np.full(n, -2.0, np.float32)
    x[5] = 0
    ranks = Ranks(MOST, n, clip=100)  # one zero among equal ones is far below the others
    outs = ranks.exchange([x] * MOST)
    assert all((o == outs[0]).all() for o in outs) and np.allclose(outs[0], x, rtol=2**-23, atol=0)
    summed = np.frombuffer(ranks.payloads()[0], np.int8, n + 1, CODES)
    assert summed[0] == -MOST and summed[5] == 0 and summed[n] == MOST
    assert ranks.plan.ranks == MOST
    with pytest.raises(sidcomp.UnsupportedError, match=r"'terngrad-shared' .* 127 .* 128"):
        sidcomp.Compressor(CODEC, n, world=MOST + 1)
    with pytest.raises(sidcomp.UnsupportedError, match=r"'terngrad-shared' .* 127 .* 300"):
        check_ranks(ranks.plan, 300)
    check_ranks(_core.Plan("fp16", "none", n, "float32"), 300)
    with pytest.raises(sidcomp.UnsupportedError):
        Rank(ranks.plan).encode(Vector(x), Step(world=MOST + 1))


def test_ddp_refuses_more_ranks_by_name() -> None:
    pytest.importorskip("torch")
    from sidcomp.config.settings import Settings

    settings = Settings.parse(CODEC, {}, memory=None, groups="bucket", seed=0, exclude=())
    assert settings.plan(10, "float32", 0, place=(0, MOST)).reductions == 2
    with pytest.raises(sidcomp.UnsupportedError, match=r"'terngrad-shared' .* 127 .* 128"):
        settings.plan(10, "float32", 0, place=(0, MOST + 1))


def test_bytes_do_not_grow_with_the_ranks() -> None:
    for n in (0, 1, 63, 1000, 10**6):
        plan = _core.Plan(CODEC, "none", n, "float32")
        assert plan.slices == [(64, 512), (576, n + 1)] and plan.body_dtype == "int8"
        assert plan.payload_bytes == -(-(576 + n + 1) // 64) * 64
        assert sidcomp.Compressor(CODEC, n, world=100).payload_bytes == plan.payload_bytes


@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize(("bad", "world"), [(np.nan, 1), (np.inf, 2), (-np.inf, 4)])
def test_what_is_not_finite_reaches_all_ranks(bad: float, world: int, memory: str) -> None:
    """All elements, for a byte cannot tell; and no memory keeps anything of that step."""
    n, rng = 9000, np.random.default_rng(1)
    ranks = Ranks(world, n, memory)
    judges = Judges(ranks)
    for step in range(4):
        gradients = [content("normal", n, rng) for _ in range(world)]
        if step in (1, 2):
            gradients[-1][0 if step == 1 else n - 1] = bad
        before = ranks.residuals()
        out = compare(ranks, judges, gradients)
        assert np.isnan(out).all() if step in (1, 2) else np.isfinite(out).all()
        assert ranks.flags == [step in (1, 2)] * world
        for old, now, x in zip(before, ranks.residuals(), gradients, strict=True):
            if step in (1, 2):
                assert (
                    np.abs(now - old)
                    <= np.spacing(np.abs(old) + np.abs(np.nan_to_num(x, posinf=0, neginf=0)))
                ).all()


@pytest.mark.parametrize("world", [2, MOST])
@pytest.mark.parametrize("round", [0, 1])
def test_ranks_that_fail_reach_all_ranks(round: int, world: int) -> None:
    """Bytes 0xff from a round on, of one rank, of half of them, of all but one."""
    n, rng = 50, np.random.default_rng(world)
    for many in {1, world // 2, world - 1}:
        for residual in ("none", "residual") if world < 10 else ("none",):
            ranks = Ranks(world, n, residual)
            gradients = [content("laplace", n, rng) for _ in range(world)]
            ranks.exchange(gradients)
            before = ranks.residuals()

            def fail(i: int, slices: list[Array], many: int = many) -> None:
                for part in slices[-many:] if i >= round else []:
                    part[:] = 0xFF

            outs = ranks.exchange(gradients, change=fail)
            assert all(np.isnan(o).all() for o in outs) and all(ranks.flags)
            for old, now, x in zip(before, ranks.residuals(), gradients, strict=True):
                assert (np.abs(now - old) <= np.spacing(np.abs(old) + np.abs(x))).all()
            assert np.isfinite(ranks.exchange(gradients)).all()


def test_scalers_that_are_none_are_not_taken() -> None:
    """Whatever the bytes of the first slice are, all ranks make the same of them."""
    n, rng = 40, np.random.default_rng(8)
    x = rng.normal(0, 1, n).astype(np.float32)
    for wrong in (-1.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-127, float(ref.FLT_MAX)):
        ranks = Ranks(3, n)

        def set_slot(i: int, slices: list[Array], wrong: float = wrong) -> None:
            if i == 0:
                slices[1][4:8] = np.frombuffer(np.float32(wrong).tobytes(), np.uint8)

        assert np.isnan(ranks.exchange([x] * 3, change=set_slot)).all(), wrong
    ranks = Ranks(3, n)
    largest = np.float32(ref.M_MAX)

    def most(i: int, slices: list[Array]) -> None:
        if i == 0:
            slices[1][4:8] = np.frombuffer(largest.tobytes(), np.uint8)

    assert np.isfinite(ranks.exchange([x] * 3, change=most)).all()


def test_a_step_out_of_turn() -> None:
    plan = _core.Plan(CODEC, "none", 100, "float32")
    rank, v = Rank(plan), Vector(np.ones(100, np.float32))
    rank.encode(v, Step(world=2))
    for wrong in (0, 2, 7):
        with pytest.raises(_core.ArgumentError):
            plan.next_reduction(wrong, rank.buffers(v), step=0, seed=0, group=0, rank=0, world=2)
    out = Vector(np.zeros(100, np.float32))
    assert rank.decode(
        [rank.payload.data.tobytes()], 0.5, out
    )  # the second round is missing: nothing to trust
    assert np.isnan(out.read()).all()


def test_what_it_is() -> None:
    codec = next(c for c in sidcomp.codecs() if c.name == CODEC)
    assert codec.reductions and codec.linear and codec.memory == "none"
    assert codec.cuda == _core.cuda_built
    for way in ("allgather", "twoshot", "hierarchical", "cascade", "ring1"):
        with pytest.raises(sidcomp.UnsupportedError, match="terngrad-shared"):
            sidcomp.simulation.Loopback(2, way, CODEC, 100)


@pytest.mark.parametrize("world", [1, 2, 3, 7, MOST])
def test_in_messages(world: int) -> None:
    """Both sums as exchange "allreduce": the bits of the process group's, and twice its rounds."""
    for n in (0, 1, 900):
        x = sidcomp.simulation.Loopback(world, "allreduce", CODEC, n, seed=7)
        ranks = Ranks(world, n, group=0)
        for step in range(2):
            gradients = [content("laplace", n, np.random.default_rng(100 * step + r)) for r in range(world)]
            out = x.step(gradients)
            assert same(np.asarray(out), ranks.exchange(gradients, seed=7)[0])
        assert x.rounds == (4 if world > 1 else 0)
        body = sum(count for _, count in ranks.plan.slices)
        assert world == 1 or 2 * body * (world - 1) / world <= x.bytes_per_rank < 2 * body + 256 * world
    with pytest.raises(sidcomp.UnsupportedError, match=r"terngrad-shared.*so many ranks"):
        sidcomp.simulation.Loopback(MOST + 1, "allreduce", CODEC, 10)
