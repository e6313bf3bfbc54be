"""benchmarks/papers/convergence.py: what its simulated ranks exchange.

test_examples.py has a run of it beside one of train.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sidcomp
import torch
from sidcomp.config.settings import Settings

from benchmarks.papers import convergence

WORLD, STEPS = 3, 4


def run(codec: str, memory: str | None = None, full_every: Any = 0, **how: Any) -> tuple[Any, ...]:
    """For each step: the ranks' gradients, what rank 0 got, the bytes that each group sent."""
    parameters = how.pop("parameters", {})
    settings = Settings.parse(
        codec, parameters, memory=memory, groups=how.pop("groups", "bucket"), seed=5, full_every=full_every,
        **how,
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 10))
    n = sum(p.numel() for p in model.parameters())
    gradients = [torch.zeros(n) for _ in range(WORLD)]
    groups = convergence.groups_of(model, settings, gradients)
    draw, out = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        own = torch.randn(WORLD, n, generator=draw)
        for g, values in zip(gradients, own, strict=True):
            g.copy_(values)
        sent = [group.exchange(step, everywhere=True) for group in groups]
        assert all(torch.equal(gradients[0], g) for g in gradients)
        out.append((own, gradients[0].clone(), sent))
    return n, groups, out


def test_dense_is_the_mean() -> None:
    n, _, steps = run("none")
    for own, got, sent in steps:
        torch.testing.assert_close(got, own.mean(0))
        assert sum(sent) == 4 * n


# float16 adds up in float16, which nobody keeps
@pytest.mark.parametrize(
    ("codec", "memory", "off"),
    [("topk", "residual", 1e-5), ("qsgd", "dgc", 1e-5), ("fp16", "residual", 5e-3)],
)
def test_nothing_is_lost(codec: str, memory: str, off: float) -> None:
    """What was sent, and what a last dense step sends, add up to all gradients."""
    parameters = {"momentum": 0.0} if memory == "dgc" else {}  # a velocity is a gradient then
    full = sidcomp.Schedule({0: 0, STEPS - 1: 1})
    n, _, steps = run(codec, memory, full, parameters=parameters)
    total = sum(own.mean(0) for own, _, _ in steps)
    torch.testing.assert_close(sum(got for _, got, _ in steps), total, rtol=1e-4, atol=off)
    assert [sum(sent) for _, _, sent in steps][-1] == 4 * n > sum(steps[0][2])


def test_compensation_learns_what_the_ranks_got_until_a_full_step() -> None:
    """Marsit's Algorithm 1, lines 1, 11, 15, on one rank beside its signs."""
    eta = 0.25
    _, _, steps = run("marsit", None, 2, parameters={"eta_s": eta, "aggregate": "mean"})
    c = torch.zeros_like(steps[0][0])
    for step, (own, got, _) in enumerate(steps):
        acc = own + c
        if step % 2 == 0:
            torch.testing.assert_close(got, acc.mean(0))
            c = torch.zeros_like(c)
        else:
            torch.testing.assert_close(got, (torch.where(acc >= 0, 1.0, -1.0) * eta).mean(0))
            c = acc - got


def test_a_schedule_keeps_what_was_not_sent() -> None:
    density = sidcomp.Schedule({0: 0.01, STEPS - 1: 1.0})
    _, _, steps = run("topk", "residual", parameters={"density": density})
    total = sum(own.mean(0) for own, _, _ in steps)
    torch.testing.assert_close(sum(got for _, got, _ in steps), total, rtol=1e-4, atol=1e-5)


def test_exempt_parameters_are_dense_and_counted() -> None:
    n, groups, steps = run("topk", exclude=("output", "1-D"), groups="layer", parameters={"density": 0.01})
    assert len(groups) == 5
    exempt = {64, 640, 10}
    for group, sent in zip(groups, steps[0][2], strict=True):
        assert (sent == 4 * group.n) is (group.n in exempt)
    own, got, _ = steps[1]
    torch.testing.assert_close(got[: 10 + 640 + 64], own.mean(0)[: 10 + 640 + 64])
    assert n == sum(group.n for group in groups)


def test_buckets_are_those_of_ddp() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))  # 1 MB each, and a bias
    pieces = convergence.pieces_of(model)
    assert [p.bucket for p in pieces] == [0, 0, 1, 1, 1, 1]
    assert [p.offset for p in pieces][:3] == [0, 512, 512 + 512**2]


@pytest.mark.parametrize("codec, exchange", [("marsit", "ring1"), ("topk", "twoshot")])
def test_messages_are_those_of_the_loopback(codec: str, exchange: str) -> None:
    n, _, out = run(codec, groups="model", exchange=exchange)
    loop = sidcomp.simulation.Loopback(WORLD, exchange, codec, n, seed=5)
    for own, got, sent in out:
        assert torch.equal(loop.step(list(own)), got)
        assert sent == [loop.bytes_per_rank + loop.control_bytes]


def test_steps_of_full_precision_between_messages() -> None:
    _, _, out = run("marsit", groups="model", exchange="ring1", full_every=2, parameters={"eta_s": 0.5})
    for step, (own, got, _) in enumerate(out):
        if step == 0:
            assert torch.allclose(got, own.mean(dim=0), atol=1e-6)
        elif step % 2:
            assert torch.equal(got.abs(), torch.full_like(got, 0.5))
