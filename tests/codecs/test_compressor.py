"""sidcomp.Compressor: all codecs and memories on numpy arrays and torch tensors, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
import sidcomp
from buffers import fits
from sidcomp.standalone import compressor

Array = npt.NDArray[Any]

CODECS = {codec.name: codec for codec in sidcomp.codecs()}
MEMORIES = [memory.name for memory in sidcomp.memories()]
SIZES = [1, 2, 63, 1000, 4097, 70001]


def gradient(n: int, seed: int, dtype: str = "float32") -> Array:
    return reference.from_f32(np.random.default_rng(seed).standard_normal(n).astype(np.float32), dtype)


def settings_of(codec: str) -> dict[str, Any]:
    return {p.name: p.default for p in CODECS[codec].parameters} | (
        {"density": 0.03} if any(p.name == "density" for p in CODECS[codec].parameters) else {}
    )


def judge(codec: str, memory: str, n: int, dtype: str) -> reference.Group:
    return reference.Group(codec, memory, CODECS[codec].wire_id, n, dtype, settings_of(codec))


# their threshold may differ from the reference's by a stated bound: then it is told the result
TOLERANT = {c for c in CODECS if hasattr(judge(c, "none", 1, "float32").codec, "dictated")}


PAIRS = [(c, m) for c in CODECS for m in MEMORIES if fits(c, m)]


@pytest.mark.many
@pytest.mark.parametrize(
    ("pair", "n"), [(p, n) for i, p in enumerate(PAIRS) for j, n in enumerate(SIZES) if (i + j) % 3 == 0]
)
def test_like_the_reference(pair: tuple[str, str], n: int) -> None:
    """Every codec with every memory at two sizes, in turns: the core has its own tests."""
    codec, memory = pair
    settings = settings_of(codec)
    whole = memory in ("none", "residual")  # acc can be told from outside
    ours = [sidcomp.Compressor(codec, n, memory=memory, rank=r, world=2, **settings) for r in range(2)]
    theirs = [judge(codec, memory, n, "float32") for _ in range(2)]
    for step in range(4):
        payloads, right = [], []
        for rank in range(2):
            x = gradient(n, 10 * step + rank)
            before, kept = x.copy(), ours[rank].residual()
            payload = ours[rank].encode(x)
            assert np.array_equal(x, before), "encode changed the gradient"
            assert payload.dtype == np.uint8 and payload.shape == (ours[rank].payload_bytes,)
            payloads.append(payload)
            side = theirs[rank]
            if (
                codec in TOLERANT and whole and not CODECS[codec].shaped
            ):  # what left is what was there and is not kept any more
                acc = x + kept if memory != "none" else x
                sent = ours[rank].decode(payload)
                assert np.array_equal(sent + ours[rank].residual(), acc if memory != "none" else sent)
                assert np.array_equal(sent[sent != 0], acc[sent != 0])
            elif codec not in TOLERANT:
                right.append(side.encode(x, reference.Step(step, 0, rank, 2)))
                assert payload.tobytes() == right[-1]
                want = side.memory.vec if side.memory.vectors > 1 else side.kept
                assert np.array_equal(ours[rank].residual(), want)
            stats = ours[rank].stats
            assert stats["count"] == reference.header(payload.tobytes())["count"]
            assert stats["density"] == stats["count"] / n
            assert stats["nonfinite"] == 0 and stats["passes"] >= 1
        if codec not in TOLERANT and not CODECS[codec].linear:
            got = ours[0].decode(payloads, scale=0.5)
            assert np.array_equal(got, theirs[0].decode(right, 0.5))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS)
def test_numpy_and_torch_give_the_same_bytes(codec: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    a = sidcomp.Compressor(codec, 5000, dtype, **settings_of(codec))
    b = sidcomp.Compressor(codec, 5000, kind, **settings_of(codec))
    for step in range(3):
        x = gradient(5000, step, dtype)
        t = torch.from_numpy(x.view(np.int16) if dtype == "bfloat16" else x).view(kind)
        payload = b.encode(t.view(50, 100))
        assert isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8
        out = torch.zeros(100, 50, dtype=kind)
        assert b.decode(payload, out) is out
        assert torch.equal(out.view(-1), b.decode(payload))
        assert torch.equal(b.residual(t), torch.from_numpy(b.residual()))
        if dtype == "bfloat16":  # numpy has none
            continue
        mine = a.encode(x)
        assert isinstance(mine, np.ndarray)
        assert mine.tobytes() == payload.numpy().tobytes()
        assert np.array_equal(a.decode(mine), out.view(-1).numpy())
        assert np.array_equal(a.residual(), b.residual())


@pytest.mark.parametrize("codec", [c.name for c in CODECS.values() if not c.linear])
def test_ways_to_pass_payloads(codec: str) -> None:
    n = 3000
    sides = [sidcomp.Compressor(codec, n, rank=r, world=3) for r in range(3)]
    payloads = [side.encode(gradient(n, i)) for i, side in enumerate(sides)]
    want = sides[0].decode(payloads)
    one_block = np.stack(payloads)
    assert np.array_equal(sides[0].decode(one_block), want)
    assert np.array_equal(sides[0].decode(one_block.reshape(-1)), want)
    assert np.array_equal(sides[0].decode((payloads[0], np.stack(payloads[1:]))), want)
    odd = np.zeros(one_block.size + 3, np.uint8)  # not aligned
    odd[3:] = one_block.reshape(-1)
    assert np.array_equal(sides[0].decode(odd[3:]), want)
    singles = [sides[0].decode(p) for p in payloads]
    total = singles[0] + singles[1] + singles[2]
    if "vote" in CODECS[codec].traits and not np.array_equal(want, total):  # what all say is what comes out
        same = (singles[0] == singles[1]) & (singles[0] == singles[2])
        assert same.any() and np.array_equal(want[same], singles[0][same])
        assert np.abs(want).max() <= np.abs(singles[0]).max()
    else:
        assert np.array_equal(want, total)


# ---- a step: encode, exchange, finish -------------------------------------------------------------


def exchanged(ranks: list[sidcomp.Compressor], xs: list[Array], payloads: list[Array]) -> list[list[Array]]:
    """What each rank gets: all payloads or, with a linear codec, its own one with the ranks' sums in it."""
    plan = ranks[0].plan
    for i, (offset, count) in enumerate(ranks[0].slices):
        if i:
            for c, payload, x in zip(ranks, payloads, xs, strict=True):
                c.next_reduction(i, payload, x)
        kind = np.dtype(reference.STORAGE.get(plan.body_dtype, plan.body_dtype))
        parts = [p[offset : offset + kind.itemsize * count].view(kind) for p in payloads]
        if kind == np.int8:
            total = np.sum(parts, axis=0, dtype=kind)
        else:
            with np.errstate(all="ignore"):
                wide = sum(reference.to_f32(part, plan.body_dtype) for part in parts)
            total = reference.from_f32(wide, plan.body_dtype)
        for part in parts:
            part[:] = total
    return [[p] for p in payloads] if plan.linear else [payloads] * len(ranks)


class Beside:
    """Compressors, and a Loopback that gets the same gradients."""

    def __init__(self, codec: str, memory: str, n: int, dtype: str, **settings: Any) -> None:
        settings = settings_of(codec) | settings
        exchange = "allreduce" if CODECS[codec].linear else "allgather"
        self.ranks = [
            sidcomp.Compressor(codec, n, dtype, memory=memory, rank=r, world=2, **settings) for r in range(2)
        ]
        self.loopback = sidcomp.simulation.Loopback(
            2, exchange, codec, n, memory=memory, dtype=dtype, **settings
        )

    def step(self, xs: list[Array]) -> None:
        want = np.asarray(self.loopback.step(xs))
        payloads = [c.encode(x) for c, x in zip(self.ranks, xs, strict=True)]
        for c, x, got in zip(self.ranks, xs, exchanged(self.ranks, xs, payloads), strict=True):
            mean = x.copy()
            assert c.finish(got, mean) is mean
            assert np.array_equal(mean, want, equal_nan=True)
        for r, c in enumerate(self.ranks):
            theirs = self.loopback.residual(r).view(np.uint32)
            assert np.array_equal(np.atleast_2d(c.residual()).view(np.uint32), theirs), f"rank {r}"


FORMS = [("float32", "float32"), ("float16", "bfloat16")]  # of the vectors, of the memory
# Loopback does not take codecs that factor matrices
STEPPED = [(c, m, *form) for c, m in PAIRS for form in FORMS if not CODECS[c].shaped]


def beside(codec: str, memory: str, n: int, dtype: str, kept: str) -> Beside:
    return Beside(codec, memory, n, dtype, **({} if memory == "none" else {"memory_dtype": kept}))


@pytest.mark.many
@pytest.mark.parametrize("codec, memory, dtype, kept", STEPPED)
def test_encode_and_finish_are_a_step_of_loopback(codec: str, memory: str, dtype: str, kept: str) -> None:
    """Also one that is not finite, which leaves nothing."""
    n, near = 1500, 2e-6 if kept == "float32" else 0.03  # some roundings of what is kept and of the gradient
    both = beside(codec, memory, n, dtype, kept)
    for step in range(4):
        xs = [gradient(n, 10 * step + r, dtype) for r in range(2)]
        before = [c.residual() for c in both.ranks]
        if step == 2:
            xs[1][[3, 700]] = np.nan, np.inf
        both.step(xs)
        if step == 2:
            for c, was in zip(both.ranks, before, strict=True):
                np.testing.assert_allclose(c.residual(), was, rtol=0, atol=near * (4 + abs(was).max()))


@pytest.mark.parametrize("codec", [c.name for c in CODECS.values() if c.shaped])
def test_finish_subtracts_the_mean_of_summed_factors(codec: str) -> None:
    n = 1500
    ranks = [sidcomp.Compressor(codec, n, memory="compensation", rank=r, world=2) for r in range(2)]
    for step in range(3):
        xs = [gradient(n, 10 * step + r) for r in range(2)]
        before = [c.residual() for c in ranks]
        payloads = [c.encode(x) for c, x in zip(ranks, xs, strict=True)]
        for c, x, kept, got in zip(ranks, xs, before, exchanged(ranks, xs, payloads), strict=True):
            acc = c.residual()
            assert np.allclose(acc, kept + x, atol=1e-5)
            mean = c.finish(got, x.copy())
            assert mean.any() and np.array_equal(c.residual(), acc - mean)


@pytest.mark.parametrize("codec", [c.name for c in CODECS.values() if c.shaped])
def test_nothing_is_left_of_summed_factors_that_are_not_finite(codec: str) -> None:
    n = 1500
    ranks = [sidcomp.Compressor(codec, n, memory="residual", rank=r, world=2) for r in range(2)]
    for step in range(3):
        xs = [gradient(n, 10 * step + r) for r in range(2)]
        if step == 1:
            xs[1][700] = np.nan
        before = [c.residual() for c in ranks]
        payloads = [c.encode(x) for c, x in zip(ranks, xs, strict=True)]
        for c, x, was, got in zip(ranks, xs, before, exchanged(ranks, xs, payloads), strict=True):
            assert np.isfinite(c.finish(got, x.copy())).all() == (step != 1)
            assert np.allclose(c.residual(), was, atol=1e-5) == (step == 1)


def test_finish_ends_one_step_with_its_payloads() -> None:
    n = 500
    a, b = (sidcomp.Compressor("topk", n, rank=r, world=2) for r in range(2))
    x = gradient(n, 0)
    for refused in ("before the first step", "twice", "after set_residual", "after reset"):
        payloads, mean = [a.encode(x), b.encode(x)], x.copy()
        if refused == "before the first step":
            a = sidcomp.Compressor("topk", n, rank=0, world=2)
        elif refused == "twice":
            a.finish(payloads, mean)
        elif refused == "after set_residual":
            a.set_residual(a.residual())
        else:
            a.reset()
        before = mean.copy(), a.residual()
        with pytest.raises(sidcomp.ArgumentError, match="encode first"):
            a.finish(payloads, mean)
        assert np.array_equal(mean, before[0]) and np.array_equal(a.residual(), before[1])
        a.reset()
        b.reset()


def test_finish_refuses_other_payloads_and_can_be_called_again() -> None:
    n = 500
    a, b = (sidcomp.Compressor("topk", n, rank=r, world=2) for r in range(2))
    x, old = gradient(n, 0), b.encode(gradient(n, 1))
    a.finish([a.encode(x), old], x.copy())
    payloads, mean = [a.encode(x), b.encode(x)], x.copy()
    broken = payloads[1].copy()
    broken[3] ^= 1
    kept = a.residual()
    for wrong, error in (
        (payloads[0], sidcomp.ArgumentError),
        ([*payloads, payloads[1]], sidcomp.ArgumentError),
        ([payloads[0], broken], sidcomp.CorruptPayloadError),
        ([payloads[0], old], sidcomp.MismatchError),
    ):
        with pytest.raises(error):
            a.finish(wrong, mean)
        assert np.array_equal(mean, x) and np.array_equal(a.residual(), kept)
    assert np.array_equal(a.finish(payloads, mean), b.decode(payloads, scale=0.5))


@pytest.mark.parametrize("codec", CODECS)
def test_residual_set_and_reset(codec: str) -> None:
    n, settings = 2000, settings_of(codec)
    if "exceptions" in settings:  # so little room that something is left over
        settings |= {"exceptions": 0.0, "bits": 3}
    a, b, fresh = (sidcomp.Compressor(codec, n, memory="residual", **settings) for _ in range(3))
    assert a.stats == {}
    a.encode(gradient(n, 1))
    if not CODECS[codec].lossless:
        assert a.residual().any()
        b.set_residual(a.residual())
        assert np.array_equal(a.residual(), b.residual())
    a.reset()
    assert not a.residual().any() and a.step == 0 and a.stats == {}
    assert a.encode(gradient(n, 2)).tobytes() == fresh.encode(gradient(n, 2)).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_arrays(codec: str) -> None:
    c = sidcomp.Compressor(codec, 100)
    x = gradient(100, 0)
    good = c.encode(x)
    before = c.residual().copy()
    wide = np.zeros((100, 2), np.float32)
    for wrong in (x[:99], x.astype(np.float64), x.astype(np.float16), wide[:, 0], [1.0] * 100, None, "x"):
        with pytest.raises(sidcomp.ArgumentError):
            c.encode(wrong)
        if wrong is not None:
            with pytest.raises(sidcomp.ArgumentError):
                c.decode(good, wrong)
        with pytest.raises(sidcomp.ArgumentError):
            c.set_residual(wrong if not (isinstance(wrong, np.ndarray) and wrong.ndim == 1) else wrong[:50])
    for wrong in ([], good[:-1], good.astype(np.float32), x, [good, good[:-1]], np.zeros(0, np.uint8)):
        with pytest.raises(sidcomp.ArgumentError):
            c.decode(wrong)
    assert np.array_equal(c.residual(), before)


@pytest.mark.parametrize("codec", CODECS)
def test_foreign_payloads(codec: str) -> None:
    c = sidcomp.Compressor(codec, 500, **settings_of(codec))
    good = c.encode(gradient(500, 0))
    out = np.full(500, 7, np.float32)
    broken = good.copy()
    broken[3] ^= 1
    with pytest.raises(sidcomp.CorruptPayloadError) as caught:
        c.decode(broken, out)
    assert caught.value.culprit == 0  # type: ignore[attr-defined]
    assert (out == 7).all(), "a refused payload has touched the output"
    if not CODECS[codec].linear:
        with pytest.raises(sidcomp.CorruptPayloadError) as caught:
            c.decode([good, good, broken], out)
        assert caught.value.culprit == 2  # type: ignore[attr-defined]
    other = sidcomp.Compressor(codec, 500, "float16", **settings_of(codec))
    payload = other.encode(gradient(500, 0).astype(np.float16))
    with pytest.raises(sidcomp.SidcompError):
        c.decode(np.resize(payload, good.size), out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"codec": "topkk"}, ["topkk", "topk"]),
        ({"codec": "topk", "memory": "elephant"}, ["elephant", "residual"]),
        ({"codec": "topk", "denstiy": 0.1}, ["denstiy", "density"]),
        ({"codec": "topk", "density": 2.0}, ["density"]),
        ({"codec": "topk", "dtype": "float64"}, ["float64"]),
        ({"codec": "topk", "n": -1}, []),
        ({"codec": "topk", "isa": "mmx"}, ["mmx"]),
    ],
)
def test_wrong_construction(arguments: dict[str, Any], words: list[str]) -> None:
    arguments = {"n": 10, **arguments}
    with pytest.raises((sidcomp.SidcompError, TypeError, ValueError)) as caught:
        sidcomp.Compressor(**arguments)
    missing = [w for w in words if w not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import sidcomp

for codec in sidcomp.codecs():
    c = sidcomp.Compressor(codec.name, 1000, memory="residual")
    x = np.arange(1000, dtype=np.float32)
    out = c.decode(c.encode(x), np.zeros(1000, np.float32))
    as_it_is = {"linear", "sparse"} & codec.traits and not codec.reductions
    slack = 0 if as_it_is else np.abs(out).max() * 2.0**-23
    near = (np.abs(out + c.residual() - x) <= slack).all()
    assert near or (codec.lossless and (out == x).all()), codec.name
for name in ("State", "hook", "compress"):
    try:
        getattr(sidcomp, name)
    except ImportError as e:
        assert "torch" in str(e).lower() and "install" in str(e), e
    else:
        raise AssertionError(f"{name} without torch")
print("fine")
"""


def test_without_torch() -> None:
    package = str(Path(sidcomp.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("rank, world", [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_named(rank: int, world: int) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=f"rank={rank}, world={world}"):
        sidcomp.Compressor("topk", 100, rank=rank, world=world)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_seed_or_group_that_no_payload_can_carry_is_refused(number: int) -> None:
    for what in ("seed", "group"):
        with pytest.raises(sidcomp.ArgumentError, match=f"{what}="):
            sidcomp.Compressor("topk", 100, **{what: number})
        with pytest.raises(sidcomp.ArgumentError, match=f"{what}="):
            sidcomp.simulation.Loopback(2, "twoshot", "topk", 100, **{what: number})


# ---- what must not be written, and what memory does not tell --------------------------------------


def unwritable() -> dict[str, Callable[[], Any]]:
    """Arrays of 100 float32 that decode(out=...) must refuse, and a word of the reason."""

    def mapped() -> Any:
        with tempfile.NamedTemporaryFile() as f:
            f.write(bytes(400))
            f.flush()
            return np.memmap(f.name, np.float32, "r")

    def torch() -> Any:
        return pytest.importorskip("torch")

    return {
        "read-only: bytes": lambda: np.frombuffer(bytes(400), np.float32),
        "read-only: memmap": mapped,
        "contiguous: broadcast": lambda: np.broadcast_to(np.zeros(1, np.float32), 100),
        "whole element": lambda: np.frombuffer(bytearray(401), np.float32, offset=1),
        "neither": lambda: memoryview(bytearray(400)),
        "contiguous: expanded": lambda: torch().zeros(1).expand(100),
        "contiguous: every other": lambda: torch().zeros(200)[::2],
        "requires grad: leaf": lambda: torch().zeros(100, requires_grad=True),
        "requires grad: result": lambda: torch().zeros(100, requires_grad=True) * 2,
        "signs": lambda: torch()._neg_view(torch().zeros(100)),
        "layout": lambda: torch().zeros(100).to_sparse(),
        "without memory": lambda: torch()._efficientzerotensor((100,)),
        "is on meta": lambda: torch().zeros(100, device="meta"),
        "float64": lambda: torch().zeros(100, dtype=torch().float64),
        "99 elements": lambda: torch().zeros(99),
    }


@pytest.mark.parametrize("what", unwritable())
def test_what_must_not_be_written_is_refused_and_stays(what: str) -> None:
    c = sidcomp.Compressor("none", 100)
    payload = c.encode(np.arange(100, dtype=np.float32))
    out = unwritable()[what]()
    with pytest.raises(sidcomp.ArgumentError, match=f"^out: .*{what.partition(':')[0]}"):
        c.decode(payload, out)
    if isinstance(out, np.ndarray):
        assert not np.asarray(out).any()


def test_a_payload_that_must_not_be_written_is_refused() -> None:
    c = sidcomp.Compressor("powersgd", 100, rank=0, world=2)
    x = gradient(100, 0)
    payload = c.encode(x)
    payload.flags.writeable = False
    with pytest.raises(sidcomp.ArgumentError, match="payload: is read-only"):
        c.next_reduction(1, payload, x)


@pytest.mark.parametrize("codec", CODECS)
def test_out_may_not_lie_where_a_payload_does(codec: str) -> None:
    n = 1000
    c = sidcomp.Compressor(codec, n, **settings_of(codec))
    payload = c.encode(gradient(n, 0))
    room = np.zeros(payload.size + 4 * n, np.uint8)
    room[: payload.size] = payload
    last = payload.size // 4 * 4 - 4
    for at in (0, last):
        with pytest.raises(sidcomp.ArgumentError, match=r"out: shares memory with payloads\[0\]"):
            c.decode(room[: payload.size], room[at : at + 4 * n].view(np.float32))
    assert np.array_equal(room[: payload.size], payload)
    beside = room[-(-payload.size // 4) * 4 :][: 4 * n].view(np.float32)
    beside = np.zeros(n, np.float32) if beside.size < n else beside
    assert np.array_equal(c.decode(room[: payload.size], beside), c.decode(payload))


@pytest.mark.parametrize("codec", CODECS)
def test_a_view_with_pending_signs_is_what_it_says(codec: str) -> None:
    """Torch may leave a view's signs to whoever reads it."""
    torch = pytest.importorskip("torch")
    n = 500
    x = torch.from_numpy(gradient(n, 3))
    negative = torch._neg_view(x)
    assert negative.is_neg() and negative.data_ptr() == x.data_ptr()
    a, b = (sidcomp.Compressor(codec, n, **settings_of(codec)) for _ in range(2))
    assert torch.equal(a.encode(negative), b.encode(x.neg()))
    assert torch.equal(a.residual(x), b.residual(x))
    kept = torch.ones(a.residual().size)
    a.set_residual(torch._neg_view(kept))
    b.set_residual(-kept)
    assert torch.equal(a.residual(x), b.residual(x))
    imaginary = torch.tensor([1 + 2j]).conj().imag  # what conj() leaves behind, in one element
    assert imaginary.is_neg() and imaginary.is_contiguous()
    one = sidcomp.Compressor("none", 1)
    assert one.decode(one.encode(imaginary)).item() == -2
    assert one.decode(torch._neg_view(one.encode(imaginary).neg())).item() == -2


def test_loopback_takes_views_with_pending_signs_and_gradients_of_parameters() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(gradient(300, 5))
    a, b = (sidcomp.simulation.Loopback(2, "allgather", "topk", 300) for _ in range(2))
    got = a.step([torch._neg_view(x), x.clone().requires_grad_()])
    assert not got.requires_grad
    assert torch.equal(got, b.step([-x, x]))


def test_autograd_sees_that_out_was_written() -> None:
    torch = pytest.importorskip("torch")
    c = sidcomp.Compressor("none", 10)
    payload, out = c.encode(torch.ones(10)), torch.zeros(10)
    weight = torch.ones(10, requires_grad=True)
    loss = (weight * out).sum()  # keeps out for the backward pass
    c.decode(payload, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- threads -------------------------------------------------------------------------------------


@pytest.fixture
def hurried() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*calls: Callable[[], Any]) -> None:
    """Runs all at once, each in a thread; raises what any of them raised."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> None:
        start.wait()
        try:
            call()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("codec", CODECS)
def test_threads_share_a_compressor(codec: str) -> None:
    """The same gradient again and again: what several threads get, in any order, is what one gets."""
    n, threads, times = 20_000, 3, 4
    x = gradient(n, 1)
    alone, shared = (sidcomp.Compressor(codec, n, **settings_of(codec)) for _ in range(2))
    right = [alone.encode(x) for _ in range(threads * times)]
    got: list[Array] = []
    together(*[lambda: got.extend(shared.encode(x) for _ in range(times))] * threads)
    assert shared.step == threads * times
    assert sorted(p.tobytes() for p in got) == sorted(p.tobytes() for p in right)
    assert np.array_equal(shared.residual(), alone.residual())

    pair = right[:1] * 2 if CODECS[codec].linear else right[:2]
    want = [alone.decode(pair), alone.residual()]
    misaligned = np.concatenate([np.zeros(1, np.uint8), pair[0]])[1:]

    def read() -> None:
        for _ in range(times):
            assert np.array_equal(shared.decode(pair), want[0])
            assert np.array_equal(shared.decode([misaligned, pair[1]]), want[0])
            assert np.array_equal(shared.residual(), want[1])

    together(*[read] * threads)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("exchange, codec", [("allgather", "topk"), ("twoshot", "int8"), ("ring1", "marsit")])
def test_threads_share_a_loopback(exchange: str, codec: str) -> None:
    n, threads, times = 20_000, 3, 4
    x = [gradient(n, 1), gradient(n, 2)]
    alone, shared = (sidcomp.simulation.Loopback(2, exchange, codec, n) for _ in range(2))
    right = [alone.step(x).tobytes() for _ in range(threads * times)]
    got: list[bytes] = []
    together(*[lambda: got.extend(shared.step(x).tobytes() for _ in range(times))] * threads)
    assert sorted(got) == sorted(right)
    assert all(np.array_equal(shared.residual(r), alone.residual(r)) for r in range(2))


def test_payloads_are_decoded_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    n, count = 5000, 4
    ranks = [sidcomp.Compressor("topk", n=n, density=0.1, rank=r, world=count) for r in range(count)]
    rng = np.random.default_rng(2)
    payloads = [c.encode(rng.normal(size=n).astype(np.float32)) for c in ranks]
    want = ranks[0].decode(np.stack(payloads))
    size = ranks[0].payload_bytes
    odd = [np.zeros(size + 4, np.uint8)[4:] for _ in payloads]  # numpy's memory begins at a multiple of 16
    for to, payload in zip(odd, payloads, strict=True):
        to[:] = payload
    assert all(to.ctypes.data % 8 for to in odd)
    assert (ranks[0].decode(odd) == want).all()

    def no_copy(size: int) -> None:
        raise AssertionError("the payloads were copied")

    monkeypatch.setattr(compressor, "_Block", no_copy)
    assert (ranks[0].decode(payloads) == want).all()
    assert (ranks[0].decode([np.stack(payloads[:3]), payloads[3]]) == want).all()
    spread = np.zeros((count, 2 * size), np.uint8)
    spread[:, :size] = payloads
    rows = [row[:size] for row in spread]
    assert (ranks[0].decode(rows) == want).all()
    np.testing.assert_allclose(ranks[0].decode(rows[::-1]), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match="were copied"):
        ranks[0].decode(odd)
