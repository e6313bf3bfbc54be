"""Exchanges on the loopback transport, against references written from the papers."""

from __future__ import annotations

import ctypes
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reference as ref
import sidcomp
from buffers import Block, Vector
from reference import Array
from reference.formats import MAGIC
from sidcomp import _core
from sidcomp.simulation import Loopback

F32 = np.float32
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 32, 64)
KINDS = [e.name for e in sidcomp.exchanges()]


def gradients(world: int, n: int, seed: int = 0, dtype: str = "float32") -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(dtype) for _ in range(world)]


def takes(exchange: str, codec: str, world: int = 2, **settings: Any) -> bool:
    try:
        Loopback(world, exchange, codec, 1, **settings)
    except sidcomp.UnsupportedError:
        return False
    return True


PAIRS = [(e, c.name) for e in KINDS for c in sidcomp.codecs() if takes(e, c.name)]


def test_every_exchange_takes_a_codec_and_every_codec_has_an_exchange() -> None:
    assert {e for e, _ in PAIRS} == set(KINDS)
    shaped = {c.name for c in sidcomp.codecs() if c.shaped}  # they travel by the process group's own
    assert {c for _, c in PAIRS} == {c.name for c in sidcomp.codecs()} - shaped
    assert {c for e, c in PAIRS if e == "ring1"} == {"signsgd", "signum", "marsit"}


# ---- bytes and rounds ----------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize("exchange, codec", PAIRS)
def test_counted_bytes_are_those_stated(exchange: str, codec: str) -> None:
    for world in WORLDS:
        x = Loopback(world, exchange, codec, 9001)
        assert x.bytes_per_rank == x.stated_bytes
        result = x.step(gradients(world, 9001, dtype=x.dtype))
        assert max(x.bytes) == x.stated_bytes == result.bytes_per_rank, world
        assert result.rounds == x.rounds
        assert (x.stated_bytes == 0) == (world == 1)


def up(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_bytes_and_rounds_by_formula(world: int) -> None:
    n, w = 100_003, world
    ring = Loopback(w, "ring1", "marsit", n)
    assert ring.rounds == 2 * (w - 1)
    assert ring.bytes_per_rank == 2 * (w - 1) * (32 + 32 * up(up(n, 256), w))  # 256 elements are 32 bytes

    gather = Loopback(w, "allgather", "topk", n)
    size = sidcomp.Compressor("topk", n).payload_bytes
    assert (gather.rounds, gather.bytes_per_rank) == (1, (w - 1) * size)

    reduce = Loopback(w, "allreduce", "fp16", n)
    share = up(n, w * 32) * 32  # slices begin at multiples of 64 bytes
    assert reduce.rounds == 2
    frames = 2 * (w - 1) * 32
    assert 2 * (w - 1) * 2 * (n // w) <= reduce.bytes_per_rank - frames <= 2 * (w - 1) * 2 * share

    two = Loopback(w, "twoshot", "int8", n)
    part = sidcomp.Compressor("int8", up(n, w * 64) * 64).payload_bytes
    assert two.rounds == 2
    assert two.bytes_per_rank <= 2 * (w - 1) * part
    assert two.bytes_per_rank >= 2 * (w - 1) * part * 0.97 - 2 * part

    counts = Loopback(w, "expand", "signsgd", n)
    part = up(n, w * 256) * 256 // 8
    bits = [math.ceil(math.log2(hop + 2)) for hop in range(w - 1)]
    bits += [math.ceil(math.log2(w + 1))] * (w - 1)
    assert counts.bytes_per_rank == sum(32 + part * b for b in bits)


def test_torus_has_the_rings_bytes_in_fewer_rounds() -> None:
    n = 1 << 20
    for world, rows in ((4, 2), (6, 2), (6, 3), (12, 3), (16, 4), (16, 2), (64, 8)):
        torus = Loopback(world, "torus1", "marsit", n, rows=rows)
        ring = Loopback(world, "ring1", "marsit", n)
        assert torus.rounds == 2 * (rows + world // rows - 2)
        assert torus.bytes_per_rank == pytest.approx(ring.bytes_per_rank, rel=0.02)
    for prime in (2, 3, 7, 13, 31):
        assert Loopback(prime, "torus1", "marsit", n).rounds == 2 * (prime - 1)
    with pytest.raises(sidcomp.ParameterError, match=r"rows = 5 .* 12"):
        Loopback(12, "torus1", "marsit", n, rows=5)


def test_two_shot_stays_bounded_where_all_gather_grows() -> None:
    n = 1 << 20
    two = [Loopback(w, "twoshot", "topk", n, density=0.05).bytes_per_rank for w in (2, 8, 32)]
    gather = [Loopback(w, "allgather", "topk", n, density=0.05).bytes_per_rank for w in (2, 8, 32)]
    assert two[2] < 2.2 * two[0]
    assert gather[2] == 31 * gather[0]


def test_hierarchical_between_nodes_sends_a_share() -> None:
    n = 1 << 16
    flat = Loopback(8, "allgather", "topk", n)
    x = Loopback(8, "hierarchical", "topk", n, ranks_per_node=4)
    inside = 2 * 3 * (n // 4 * 4 + 32)
    payload = sidcomp.Compressor("topk", n // 4).payload_bytes
    assert x.bytes_per_rank == inside + payload
    assert payload < flat.bytes_per_rank / 20
    assert x.rounds == 3


# ---- the one-bit ring ----------------------------------------------------------------------------


def below(stream: ref.Stream, index: Array, phase: int, chance: Fraction) -> Array:
    """U < chance for each element: 63 binary digits of U, from the highest on, of block index / 128."""
    u = np.zeros(len(index), np.uint64)
    for digit in range(63):
        block = (index // 128).astype(np.uint64) + np.uint64((digit << 40) + (phase << 46))
        words = stream.blocks(block)[np.arange(len(index)), index % 128 // 32]
        u = u << np.uint64(1) | (words >> (index % 32).astype(np.uint64) & np.uint64(1))
    return u < np.uint64(int(chance * 2**63))


def ring_reference(signs: Array, members: list[int], index: Array, seed: int, step: int, phase: int) -> Array:
    """Equation 2 along a ring, for the slices of `index`, cut as evenly as whole 256s go. signs: rows of the
    members' signs (True: negative); returns what all of them end up with."""
    w, units = len(members), up(len(index), 256)
    each = up(units, w) * 256
    out = signs[0].copy()
    for s in range(w):
        part = slice(s * each, (s + 1) * each)
        come = signs[s][part].copy()
        for votes in range(1, w):
            place = (s + votes) % w
            own = signs[place][part]
            stream = ref.Stream(ref.salt_of(seed, members[place]), 0, step)
            keep = below(stream, index[part], phase, Fraction(votes, votes + 1))
            come = np.where(come == own, come, np.where(keep, come, own))
        out[part] = come
    return out


@pytest.mark.many
@pytest.mark.parametrize("world", (1, 2, 3, 4, 5, 7, 8))
@pytest.mark.parametrize("n", (1, 300, 5000))
def test_ring_follows_the_paper(world: int, n: int) -> None:
    """Algorithm 1, with memory: what is sent is the sign of g + c; what comes is taken out of both."""
    x = Loopback(world, "ring1", "marsit", n, seed=11, eta_s=0.25)
    kept = np.zeros((world, n), F32)
    for step in range(3):
        g = gradients(world, n, seed=step)
        acc = [kept[r] + g[r] for r in range(world)]
        negative = ring_reference(
            np.array([a < 0 for a in acc]), list(range(world)), np.arange(n), 11, step, 0
        )
        update = np.where(negative, F32(-0.25), F32(0.25))
        result = x.step(g)
        assert (np.asarray(result) == update).all()
        for r in range(world):
            kept[r] = acc[r] - update
            assert (x.residual(r)[0] == kept[r]).all()


@pytest.mark.parametrize("rows, cols", ((2, 2), (2, 3), (3, 2), (4, 2), (1, 5)))
def test_torus_follows_rows_then_columns(rows: int, cols: int) -> None:
    world, n = rows * cols, 4000
    g = gradients(world, n, seed=rows)
    x = Loopback(world, "torus1", "signsgd", n, memory="none", seed=5, rows=rows)
    index = np.arange(n)
    of_row = [
        ring_reference(
            np.array([g[y * cols + c] < 0 for c in range(cols)]),
            [y * cols + c for c in range(cols)],
            index,
            5,
            0,
            0,
        )
        for y in range(rows)
    ]
    expected = of_row[0].copy()
    each = up(up(n, 256), cols) * 256
    for column in range(cols):  # the row's ring leaves slice c + 1 with column c
        s = (column + 1) % cols
        part = slice(s * each, (s + 1) * each)
        expected[part] = ring_reference(
            np.array([o[part] for o in of_row]),
            [y * cols + column for y in range(rows)],
            index[part],
            5,
            0,
            1,
        )
    assert (np.asarray(x.step(g)) == np.where(expected, F32(-1), F32(1))).all()


@pytest.mark.parametrize("world", range(2, 8))
def test_merging_is_unbiased_by_enumeration(world: int) -> None:
    """All masks that a ring can draw, with their chances: the result is positive with the chance of a rank
    drawn at random, exactly, for all signs."""
    for signs in itertools.product((0, 1), repeat=world):
        positive = Fraction(0)
        for masks in itertools.product((0, 1), repeat=world - 1):
            chance, come = Fraction(1), signs[0]
            for votes, mask in enumerate(masks, start=1):
                chance *= Fraction(votes if mask else 1, votes + 1)
                come = come if mask else signs[votes]
            positive += chance * come
        assert positive == Fraction(sum(signs), world)


@pytest.mark.parametrize("exchange", ("ring1", "torus1"))
@pytest.mark.parametrize("world", (2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 64))
def test_ring_is_unbiased(exchange: str, world: int) -> None:
    """Each element is one of the ranks' signs, as often as they have it: also in slices that are shorter."""
    n = 40_000 + 77
    rng = np.random.default_rng(world)
    share = rng.integers(0, world + 1, n)
    order = np.argsort(rng.random((world, n)), axis=0)
    g = [np.where(order[r] < share, F32(1), F32(-1)) for r in range(world)]
    x = Loopback(world, exchange, "marsit", n, memory="none", seed=3, eta_s=1)
    total, count, steps = 0.0, np.zeros(world + 1), 6
    seen = np.zeros(world + 1)
    for _ in range(steps):
        up_ = np.asarray(x.step(g)) > 0
        assert up_[share == world].all() and not up_[share == 0].any()
        total += float((up_ - share / world).sum())
        seen += np.bincount(share[up_], minlength=world + 1)
        count += np.bincount(share, minlength=world + 1)
    p = np.arange(world + 1) / world
    deviation = np.sqrt(count * p * (1 - p))
    inner = deviation > 0
    z = (seen[inner] - (count * p)[inner]) / deviation[inner]
    assert np.abs(z).max() < 4.5, z
    assert abs(total) < 4.5 * math.sqrt(float((share / world * (1 - share / world)).sum()) * steps)


def test_ring_draws_anew_in_every_step_and_for_every_seed() -> None:
    g = [np.ones(4000, F32), -np.ones(4000, F32)]
    x, y = (Loopback(2, "ring1", "marsit", 4000, memory="none", seed=s) for s in (1, 2))
    a, b, c = np.asarray(x.step(g)), np.asarray(x.step(g)), np.asarray(y.step(g))
    for one, other in ((a, b), (a, c)):
        assert 0.4 < (one == other).mean() < 0.6


# ---- two-shot ------------------------------------------------------------------------------------

TWOSHOT = [c for e, c in PAIRS if e == "twoshot"]


@pytest.mark.parametrize("codec", TWOSHOT)
@pytest.mark.parametrize("world, dtype", ((1, "float32"), (2, "float32"), (3, "bfloat16"), (5, "float32")))
def test_two_shot_loses_nothing(codec: str, world: int, dtype: str) -> None:
    """Beside residuals: the mean of what went in is what came out, and what ranks keep, and what is kept for
    all; in bfloat16 up to its roundings, four of a number of at most about ten in each step."""
    c = sidcomp.config.registry.find_codec(codec)
    if "vote" in c.traits or "unbiased" in c.traits:
        pytest.skip("is used without a residual")
    n, out = 3001, np.zeros(3001)
    x = Loopback(world, "twoshot", codec, n, memory="residual", memory_dtype=dtype)
    put_in = np.zeros(n)
    atol = 2e-5 if dtype == "float32" else 4 * 4 * 10 * 2.0**-8
    for step in range(4):
        g = gradients(world, n, seed=10 + step)
        put_in += np.mean(g, axis=0, dtype=np.float64)
        out += np.asarray(x.step(g), np.float64)
        kept = [x.residual(r) for r in range(world)]
        own = np.mean([k[0] for k in kept], axis=0, dtype=np.float64)
        for_all = np.sum([k[1] for k in kept], axis=0, dtype=np.float64)
        np.testing.assert_allclose(out + own + for_all, put_in, atol=atol)
        assert np.abs(out + own + for_all - put_in).mean() < atol / 20
    assert all((k[1] != 0).sum() <= up(n, world * 64) * 64 for k in kept)


def rounded(x: Array, codec: str) -> Array:
    """To the nearest number of 16 bits, ties to even."""
    if codec == "fp16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_sixteen_bits_are_summed_in_float32(codec: str, world: int) -> None:
    g = gradients(world, 3001, seed=4)
    total = rounded(g[0], codec)
    for one in g[1:]:
        total = total + rounded(one, codec)  # in the order of the ranks
    expected = rounded(total * np.float32(1 / world), codec)
    got = np.asarray(Loopback(world, "twoshot", codec, 3001, memory="none").step(g))
    np.testing.assert_array_equal(got, expected)


def drawn(x: Array, codec: str, **at: int) -> Array:
    """What a payload of 16 bits an element, rounded at random, says of x; by the reference."""
    made = ref.CODECS[codec](0, len(x), "float32", {"rounding": "stochastic"})
    with np.errstate(all="ignore"):
        return made.encode(x.astype(F32), x, ref.Step(**at)).decoded  # type: ignore[no-any-return]


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_both_shots_draw_from_streams_of_their_own(codec: str, world: int) -> None:
    """Against the composition of its parts. What the ranks keep, and what is kept for all, is the rest."""
    n, seed = 3001, 11
    size = up(up(n, world), 64) * 64
    x = Loopback(world, "twoshot", codec, n, seed=seed, rounding="stochastic")
    kept, for_all = [np.zeros(n, F32) for _ in range(world)], np.zeros(n, F32)
    for step in range(3):
        g = gradients(world, n, seed=step)
        expected = np.empty(n, F32)
        for s in range(world):
            part = slice(s * size, min(n, (s + 1) * size))
            first = {"step": step, "seed": seed, "group": (s + 1) << 16}
            total: Array | None = None
            for r in range(world):
                acc = g[r][part] + kept[r][part]
                sent = drawn(acc, codec, rank=r, **first)
                kept[r][part] = acc - sent
                total = sent if total is None else total + sent
            assert total is not None
            mean = total * F32(1 / world) + for_all[part]
            second = {"step": step, "seed": seed, "group": ((s | 0x8000) + 1) << 16 & 0xFFFFFFFF}
            expected[part] = drawn(mean, codec, rank=s, **second)
            for_all[part] = mean - expected[part]
        np.testing.assert_array_equal(np.asarray(x.step(g)), expected)
    for r in range(world):
        np.testing.assert_array_equal(x.residual(r)[0], kept[r])
    np.testing.assert_array_equal(np.sum([x.residual(r)[1] for r in range(world)], axis=0), for_all)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_rounding_at_random_is_right_on_average_by_two_shot(codec: str) -> None:
    """Of ranks whose gradients are alike: rounded to nearest, all err to the same side in every step."""
    world, n, steps = 4, 4000, 300
    step = 2.0 ** (-7 if codec == "bf16" else -10)  # between two numbers of 16 bits, from 1 on
    g = [np.full(n, 1 + 0.3 * step, F32)] * world
    off = {}
    for how in ("nearest", "stochastic"):
        x = Loopback(world, "twoshot", codec, n, memory="none", rounding=how)
        means = [np.asarray(x.step(g), np.float64).mean() for _ in range(steps)]
        off[how] = abs(np.mean(means) - float(g[0][0])) / step
    assert off["nearest"] > 0.29
    # four ranks' draws, and the draw of the mean, of 0.3 each at most: one standard error is below 6e-4
    assert off["stochastic"] < 5 * 0.6 / np.sqrt(n * steps)


def test_two_shot_applies_the_memorys_weights_once() -> None:
    """What is kept for all has none: the mean would be weighted a second time."""
    g = gradients(3, 3001)
    exchanged = [
        np.asarray(Loopback(3, how, "int8", 3001, gamma=0.5).step(g), np.float64)
        for how in ("allgather", "twoshot")
    ]
    half = 0.5 * np.mean(g, axis=0, dtype=np.float64)
    for mean in exchanged:
        assert np.abs(mean - half).max() < 0.03


def test_two_shot_is_two_encodings() -> None:
    """Against the composition of its parts: W^2 compressors and W for the means."""
    world, n, size = 3, 500, 192  # slices of 192, 192, 116
    x = Loopback(world, "twoshot", "topk", n, density=0.1)
    cuts = [slice(i * size, min(n, (i + 1) * size)) for i in range(world)]
    make = [sidcomp.Compressor("topk", c.stop - c.start, density=0.1) for c in cuts for _ in range(world)]
    server = [sidcomp.Compressor("topk", c.stop - c.start, density=0.1) for c in cuts]
    for step in range(3):
        g = gradients(world, n, seed=step)
        expected = np.empty(n, F32)
        for s, part in enumerate(cuts):
            shot = [make[s * world + r].encode(np.ascontiguousarray(g[r][part])) for r in range(world)]
            mean = make[s * world].decode(shot, scale=1 / world)
            expected[part] = server[s].decode(server[s].encode(mean))
        assert (np.asarray(x.step(g)) == expected).all()


def test_two_shot_residual_of_another_slicing_joins_the_ranks_own() -> None:
    world, n = 4, 1000
    x = Loopback(world, "twoshot", "topk", n)
    x.step(gradients(world, n))
    kept = [x.residual(r) for r in range(world)]
    total = np.sum([k[0] / world + k[1] for k in kept], axis=0, dtype=np.float64)
    y = Loopback(world, "twoshot", "topk", n)
    for r in range(world):
        y.set_residual(r, kept[r])
        assert (y.residual(r) == kept[r]).all()
    moved = [kept[(r + 1) % world] for r in range(world)]  # each rank sums another slice now
    for r in range(world):
        y.set_residual(r, moved[r])
    after = [y.residual(r) for r in range(world)]
    assert not any(a[1].any() for a in after)
    np.testing.assert_allclose(
        np.sum([a[0] / world + a[1] for a in after], axis=0, dtype=np.float64), total, atol=1e-6
    )
    with pytest.raises(sidcomp.ArgumentError, match="2000"):
        y.set_residual(0, np.zeros(5, F32))


@pytest.mark.parametrize("exchange", ("twoshot", "allgather"))
def test_a_step_that_counts_as_not_sent_is_owed_once(exchange: str) -> None:
    """Behind a step that is thrown away all of it is owed: by the ranks, or by what is kept for all."""
    world, n = 4, 2000
    x = Loopback(world, exchange, "topk", n, density=0.05)

    def owed() -> Array:
        kept = [x.residual(r).astype(np.float64) for r in range(world)]
        return np.sum([k[0] / world + (k[1] if len(k) > 1 else 0) for k in kept], axis=0)

    x.step(gradients(world, n))
    before, g = owed(), gradients(world, n, seed=1)
    x.step(g)
    for r, rank in enumerate(x.ranks):
        rank.unsend(x._state[r].ptr)
    np.testing.assert_allclose(owed(), before + np.mean(g, axis=0, dtype=np.float64), atol=1e-5)


def move(x: Loopback, round: int) -> None:
    """The messages of a round, by hand."""
    for r, rank in enumerate(x.ranks):
        for peer, to, size in rank.messages(round, True):
            offset = next(m[1] for m in x.ranks[peer].messages(round, False) if m[0] == r)
            ctypes.memmove(x._wire[r].ptr + to, x._wire[peer].ptr + offset, size)


def buffers_of(x: Loopback, rank: int, segments: _core.Segments) -> _core.Buffers:
    return _core.Buffers(segments, x._state[rank].ptr, x._work[rank].ptr, x._wire[rank].ptr)


RINGS = [  # world, exchange, its settings
    (1, "ring1", {}),
    *((w, "ring1", {}) for w in (2, 3, 8)),
    *((6, "torus1", {"rows": rows}) for rows in (1, 2, 3, 6)),
    (4, "hierarchical", {"ranks_per_node": 2, "within": "ring1"}),
]


@pytest.mark.parametrize("memory", ("compensation", "residual", "momentum", "none"))
@pytest.mark.parametrize("world, exchange, settings", RINGS)
def test_signs_taken_beside_a_hop_are_those_taken_before_it(
    world: int, exchange: str, settings: dict[str, Any], memory: str
) -> None:
    """Where every rank, some ranks, and none use the time that messages travel: bit for bit the same."""
    n, seen = 3001, []
    for busy in (range(world), range(0, world, 2), ()):
        x = Loopback(world, exchange, "marsit", n, memory=memory, **settings)
        assert x.ranks[0].has_meanwhile == (world > 1)
        for step in range(3):
            vectors = [Vector(g) for g in gradients(world, n, seed=step)]
            at = {"step": step, "seed": 7, "group": 2}
            buffers = [buffers_of(x, r, vectors[r].segments) for r in range(world)]
            for i in range(x.ranks[0].rounds + 1):
                for r, rank in enumerate(x.ranks):
                    rank.advance(i, buffers[r], **at, carry=0.5)
                if i == x.ranks[0].rounds:
                    break
                for r in busy:
                    x.ranks[r].meanwhile(i, buffers[r], **at)
                move(x, i)
        seen.append(([v.read().copy() for v in vectors], [x.residual(r) for r in range(world)]))
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("world, exchange, settings", RINGS)
def test_a_ring_tells_all_ranks_of_nan_in_any_slice(
    world: int, exchange: str, settings: dict[str, Any]
) -> None:
    """In whichever slice, and so in whichever round it is seen. What is kept is as before; hierarchical
    forgets it where the node's own slice was finite."""
    n = 2 * 256 * world
    x = Loopback(world, exchange, "marsit", n, **settings)
    x.step(gradients(world, n))
    for r, at in itertools.product(range(world), range(0, n, 256)):
        g, kept = gradients(world, n, seed=at), [x.residual(i) for i in range(world)]
        g[r][at] = np.nan
        assert np.isnan(x.step(g)).all(), (r, at)
        for i in range(world):
            if exchange != "hierarchical" or x.residual(i).any():
                np.testing.assert_allclose(x.residual(i), kept[i], atol=1e-5)


@pytest.mark.parametrize("exchange, settings", [
    ("ring1", {"codec": "marsit"}),
    ("ring1", {"codec": "marsit", "memory": "residual"}),
    ("torus1", {"codec": "marsit", "rows": 2}),
    ("hierarchical", {"codec": "marsit", "memory": "residual", "ranks_per_node": 2, "within": "ring1"}),
    ("twoshot", {"codec": "topk"}),
    ("hierarchical", {"codec": "topk", "ranks_per_node": 2}),
    ("hierarchical", {"codec": "topk", "ranks_per_node": 2, "within": "twoshot"}),
])  # fmt: skip
def test_a_step_that_is_abandoned_leaves_the_memory(exchange: str, settings: dict[str, Any]) -> None:
    """In any round, as where a peer is gone; twice is once, and after a step it does nothing."""
    world, n = 4, 3000
    x = Loopback(world, exchange, n=n, **settings)
    for stop in range(x.ranks[0].rounds + 1):
        x.step(gradients(world, n, seed=stop))
        kept = [x.residual(r) for r in range(world)]
        vectors = [Vector(g) for g in gradients(world, n, seed=100 + stop)]
        at = {"step": x.step_number, "seed": 0, "group": 0}
        buffers = [buffers_of(x, r, vectors[r].segments) for r in range(world)]
        for r, rank in enumerate(x.ranks):
            rank.abandon(buffers[r], **at)
            assert (x.residual(r) == kept[r]).all(), "a step that had ended"
        for i in range(stop):
            for r, rank in enumerate(x.ranks):
                rank.advance(i, buffers[r], **at)
            move(x, i)
        for r, rank in enumerate(x.ranks):
            for _ in range(2):
                rank.abandon(buffers[r], **at)
        now = [x.residual(r) for r in range(world)]
        if exchange == "hierarchical" and stop >= x.ranks[0].rounds - 1:
            # the nodes' results are there, what went into them is not any more: all is forgotten
            assert not np.any(now)
            continue
        for a, b in zip(now, kept, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


# ---- hierarchical --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ("topk", "int8", "efsignsgd", "marsit"))
def test_hierarchical_of_single_ranks_is_the_inner_exchange(codec: str) -> None:
    g = gradients(4, 2000)
    x, y = Loopback(4, "hierarchical", codec, 2000), Loopback(4, "allgather", codec, 2000)
    for _ in range(2):
        a, b = x.step(g), y.step(g)
    if "stochastic" not in sidcomp.config.registry.find_codec(codec).traits:  # streams are other ones
        assert (np.asarray(a) == np.asarray(b)).all()
        assert (x.residual(1) == y.residual(1)).all()


@pytest.mark.parametrize("local", (1, 2, 4, 8))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_hierarchical_dense_is_the_mean(local: int, dtype: str) -> None:
    g = gradients(8, 3001, dtype=dtype)
    x = Loopback(8, "hierarchical", "none", 3001, dtype=dtype, ranks_per_node=local)
    mean = np.mean(np.array(g, np.float64), axis=0)
    assert np.abs(np.asarray(x.step(g), np.float64) - mean).max() < (2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("within", ("allgather", "twoshot"))
def test_hierarchical_keeps_what_the_nodes_did_not_send(within: str) -> None:
    world, local, n = 6, 3, 2000
    x = Loopback(world, "hierarchical", "topk", n, ranks_per_node=local, within=within, density=0.05)
    put_in, out = np.zeros(n), np.zeros(n)
    for step in range(3):
        g = gradients(world, n, seed=step)
        put_in += np.mean(g, axis=0, dtype=np.float64)
        out += np.asarray(x.step(g), np.float64)
    kept = np.array([x.residual(r) for r in range(world)], np.float64)
    nodes = world // local
    missing = kept[:, 0].sum(axis=0) / nodes + (kept[:, 1].sum(axis=0) if within == "twoshot" else 0)
    np.testing.assert_allclose(out + missing, put_in, atol=2e-5)
    each = up(n, local * 64) * 64
    for r in range(world):
        outside = np.ones(n, bool)
        outside[r % local * each : (r % local + 1) * each] = False
        assert not kept[r][:, outside].any()


def test_the_slices_of_a_node_draw_from_streams_of_their_own() -> None:
    """No rank draws twice for the same (rank, group): else two slices would be rounded alike."""
    world, local = 8, 2
    x = Loopback(world, "hierarchical", "qsgd", 4096, ranks_per_node=local, within="twoshot")
    x.step(gradients(world, 4096))
    drawn: dict[tuple[int, int, int], bytes] = {}
    for r, rank in enumerate(x.ranks):
        node = r // local
        for round in range(x.rounds):
            for _, offset, size in rank.messages(round, False):
                message = ctypes.string_at(x._wire[r].ptr + offset, size)
                if size < 64 or ref.header(message)["magic"] != MAGIC:
                    continue
                h = ref.header(message)
                key = (node, h["rank"], h["group"])
                assert drawn.setdefault(key, message) == message, key
    assert len(drawn) >= world * (world // local - 1)


# ---- baselines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ("ssdm", "qsgd", "terngrad"))
def test_cascade_encodes_at_every_hop(codec: str) -> None:
    """Appendix A: Q(... Q(s1) + ... + sM), divided by M."""
    world, n, size = 3, 500, 192
    g = gradients(world, n)
    x = Loopback(world, "cascade", codec, n, seed=9)
    expected = np.empty(n, F32)
    for s in range(world):
        part = slice(s * size, min(n, (s + 1) * size))
        total: Any = None
        for hop in range(world):
            rank = (s + hop) % world
            c = sidcomp.Compressor(
                codec, part.stop - part.start, seed=9, group=(s + 1) << 16, rank=rank, world=world
            )
            own = np.zeros(c.n, F32) + g[rank][part]
            payload = c.encode(own if total is None else total + own)
            total = c.decode(payload)
        expected[part] = c.decode(payload, scale=1 / world)
    assert (np.asarray(x.step(g)) == expected).all()


@pytest.mark.parametrize("world", (1, 2, 3, 4, 5, 7, 8, 63, 64))
@pytest.mark.parametrize("aggregate", ("mean", "majority"))
def test_expanding_words_count_exactly(world: int, aggregate: str) -> None:
    g = gradients(world, 2000)
    x = Loopback(world, "expand", "signsgd", 2000, aggregate=aggregate, magnitude=0.5)
    positive = np.sum([v >= 0 for v in g], axis=0)
    votes = 2 * positive - world
    expected = votes / world if aggregate == "mean" else np.sign(votes)
    np.testing.assert_allclose(np.asarray(x.step(g)), expected * 0.5, rtol=1e-6)


def test_expand_with_momentum_equals_all_gather() -> None:
    g = gradients(3, 2000)
    x, y = Loopback(3, "expand", "signum", 2000), Loopback(3, "allgather", "signum", 2000)
    for _ in range(3):
        assert (np.asarray(x.step(g)) == np.asarray(y.step(g))).all()


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("n", (0, 1000))
def test_tensors_give_a_tensor(n: int, dtype: str) -> None:
    """Other worlds, sizes, exchanges and codecs: tests/c/exchange.c."""
    torch = pytest.importorskip("torch")
    g = [torch.tensor(v).to(getattr(torch, dtype)) for v in gradients(3, n)]
    result = Loopback(3, "twoshot", "topk", n, dtype=dtype).step(g)
    assert result.dtype == g[0].dtype and result.shape == (n,)


# The first codec that sums or gathers, of each memory: within, the core alone differs (tests/c/exchange.c).
WITHIN = {c.name: (c.memory, c.linear) for c in sidcomp.codecs()}
FIRST = list({(e, WITHIN[c]): (e, c) for e, c in reversed(PAIRS)}.values())


@pytest.mark.parametrize("exchange, codec", FIRST)
def test_a_transport_of_messages_gives_the_same_bits(exchange: str, codec: str) -> None:
    """The rounds driven from Python, ranks in another order, between canaries."""
    world, n = 4, 3000
    loop = Loopback(world, exchange, codec, n, seed=2)
    names = (exchange, codec, loop.memory.name)
    ranks = [_core.Exchange(*names, n, "float32", r, world) for r in range(world)]
    state = [Block(x.state_bytes) for x in ranks]
    work = [Block(x.work_bytes, 0x77) for x in ranks]
    wire = [Block(x.wire_bytes, 0x77) for x in ranks]
    for step in range(2):
        g = gradients(world, n, seed=step)
        vectors = [Vector(v, [1000, 0, 1999, 1], seed=r) for r, v in enumerate(g)]
        for i in range(ranks[0].rounds + 1):
            for r in reversed(range(world)):
                buffers = _core.Buffers(vectors[r].segments, state[r].ptr, work[r].ptr, wire[r].ptr)
                ranks[r].advance(i, buffers, step=step, seed=2, group=0)
            posted = {}
            for r in range(world) if i < ranks[0].rounds else ():
                for peer, offset, size in ranks[r].messages(i, receive=False):
                    posted[r, peer] = wire[r].data[offset : offset + size].copy()
            for r in range(world) if i < ranks[0].rounds else ():
                for peer, offset, size in ranks[r].messages(i, receive=True):
                    wire[r].data[offset : offset + size] = posted.pop((peer, r))
            assert not posted, "a message that nobody receives"
        result = np.asarray(loop.step(g))
        for v in vectors:
            assert (v.read() == result).all()
            v.check()
    for block in (*state, *work, *wire):
        block.check()


@pytest.mark.parametrize("exchange, codec", FIRST)
def test_nan_reaches_all_ranks_and_no_memory(exchange: str, codec: str) -> None:
    world, n = 4, 3000
    x = Loopback(world, exchange, codec, n)
    x.step(gradients(world, n))
    before = [x.residual(r) for r in range(world)]
    g = gradients(world, n, seed=1)
    g[2][1234] = np.inf
    assert not np.isfinite(np.asarray(x.step(g))[1234])
    for r in range(world):
        now = x.residual(r)
        assert np.isfinite(now).all()
        if not x.memory.momentum:
            np.testing.assert_allclose(now, before[r], atol=1e-5)
    assert np.isfinite(np.asarray(x.step(gradients(world, n, seed=2)))).all()


def test_refusals_name_the_reason_and_what_would_do() -> None:
    refused = [
        (("ring1", "topk"), {}, "twoshot"),
        (("ring1", "int8"), {}, "allgather"),
        (("allreduce", "topk"), {}, "allgather"),
        (("allgather", "fp16"), {}, "allreduce"),
        (("twoshot", "marsit"), {}, "ring1"),
        (("twoshot", "randk"), {}, "allreduce"),
        (("cascade", "topk"), {}, "memory 'none'"),
        (("expand", "marsit"), {}, "ring1"),
        (("allreduce", "powersgd"), {}, "leave the exchange out"),
        (("twoshot", "terngrad-shared"), {}, "allreduce"),
        (("hierarchical", "terngrad-shared"), {}, "allreduce"),
    ]
    for (exchange, codec), more, text in refused:
        with pytest.raises(sidcomp.UnsupportedError, match=text) as e:
            Loopback(2, exchange, codec, 100, **more)
        assert exchange in str(e.value) and codec in str(e.value)
    with pytest.raises(sidcomp.ParameterError, match=r"ring.*allgather"):
        Loopback(2, "ring", "marsit", 100)
    with pytest.raises(sidcomp.ParameterError, match=r"rwos.*rows"):
        Loopback(2, "torus1", "marsit", 100, rwos=2)
    with pytest.raises(sidcomp.ParameterError, match="ranks_per_node = 3"):
        Loopback(4, "hierarchical", "topk", 100, ranks_per_node=3)
    with pytest.raises(sidcomp.ArgumentError, match="4096"):
        Loopback(5000, "ring1", "marsit", 100)
    x = Loopback(2, "ring1", "marsit", 100)
    with pytest.raises(sidcomp.ArgumentError, match="3 for 2 ranks"):
        x.step(gradients(3, 100))
    with pytest.raises(sidcomp.ArgumentError, match=r"gradients\[1\]"):
        x.step([np.zeros(100, F32), np.zeros(99, F32)])
