"""The default codec, and the candidates of "auto", suit the optimizer that a State follows."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import sidcomp
import torch
from harness import run
from sidcomp import notices
from sidcomp.config import accuracy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
FORTIETH, INT4, FP16 = ("topk density=0.084 values=log4 indices=packed", "int4", "fp16")


def beside(kind: Any, *arguments: Any, **named: Any) -> list[str]:
    state = sidcomp.State(*arguments, **named)
    state.follow(kind([torch.zeros(3, requires_grad=True)], lr=0.1))
    assert state._engine.settings is state.settings
    return [c.encoding for c in state.settings.candidates if not c.in_messages]


@pytest.mark.parametrize(
    "kind, named, codec, candidates",
    [
        (SGD, {}, [FORTIETH], [FORTIETH, FP16]),
        (torch.optim.RMSprop, {}, [FORTIETH], [FORTIETH, FP16]),
        (Adam, {}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "dense"}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "close"}, [INT4], [INT4, FP16]),
        (AdamW, {"accuracy": "any"}, [FORTIETH], [FORTIETH, FP16]),
        (SGD, {"accuracy": "any"}, [FORTIETH], [FORTIETH, FP16]),
        (SGD, {"accuracy": "exact"}, ["lossless"], ["lossless"]),
        (AdamW, {"accuracy": "exact"}, ["lossless"], ["lossless"]),
    ],
)
def test_what_is_not_named_suits_the_optimizer(
    kind: Any, named: dict[str, Any], codec: list[str], candidates: list[str]
) -> None:
    assert beside(kind, **named) == codec
    assert beside(kind, "auto", **named) == candidates


def test_what_is_named_stays() -> None:
    assert beside(Adam, "topk") == ["topk"]
    assert beside(Adam, density=0.05) == ["topk density=0.05 values=log4 indices=packed"]
    assert beside(Adam, "auto", candidates=["topk"]) == ["topk"]


def test_it_says_what_it_uses(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    beside(AdamW, seed=1)
    assert "beside AdamW State() uses int4" in capsys.readouterr().err
    beside(AdamW, "auto", seed=1)
    assert 'State("auto") chooses from int4, fp16' in capsys.readouterr().err
    beside(SGD)
    beside(AdamW, accuracy="any")
    assert not capsys.readouterr().err and not caplog.records


@pytest.mark.parametrize(
    "named, said",
    [
        ({"accuracy": "best"}, "exact, dense, close, any"),
        ({"codec": "topk", "accuracy": "any"}, "leave accuracy out"),
        ({"codec": "auto", "candidates": ["topk"], "accuracy": "any"}, "leave accuracy out"),
    ],
)
def test_a_wrong_accuracy_is_refused(named: dict[str, Any], said: str) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=said):
        sidcomp.State(**named)


def test_exact_rounds_nothing_and_has_the_most_bytes() -> None:
    """So where another codec is allowed, it is no candidate: it cannot be the fastest."""
    n = 100_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    exact = sidcomp.Compressor(accuracy.EXACT[0], n, **dict(accuracy.EXACT[1]))
    assert torch.equal(exact.decode([exact.encode(x)]), x)
    for (name, own), *_ in (*accuracy.PLAIN, *accuracy.ADAPTIVE):
        assert sidcomp.Compressor(name, n, **dict(own)).payload_bytes < 0.6 * exact.payload_bytes


def test_the_fewest_bytes_come_first() -> None:
    for table in (accuracy.PLAIN, accuracy.ADAPTIVE):
        plans = [sidcomp.Compressor(name, 100_000, **dict(own)).payload_bytes for (name, own), *_ in table]
        assert plans == sorted(plans)
        assert table[-1].within


def trained(rank: int, world: int, kind: str, stop: int) -> tuple[list[str], bool]:
    """A run that is stopped after `stop` steps and resumed, and one that is not. In the resumed one the State
    loads its checkpoint before it sees the optimizer."""

    def part(first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1)))
        optimizer = {"Adam": Adam, "SGD": SGD}[kind](ddp.parameters(), lr=0.01)
        with sidcomp.State() as state:
            sidcomp.register(ddp, state)
            if saved is not None:
                ddp.module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                state.load_state_dict(saved["state"])
            state.follow(optimizer)
            for step in range(first, last):
                draw = torch.Generator().manual_seed(10 * step + rank)
                optimizer.zero_grad()
                ddp(torch.randn(8, 20, generator=draw)).square().mean().backward()
                optimizer.step()
            copy = pickle.loads(pickle.dumps(state))
            assert copy.settings.saved() == state.settings.saved()
            codecs = [g["codec"] for g in state.stats()["groups"]]
            both = {"module": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            return {**both, "state": state.state_dict(), "codecs": codecs}

    whole, again = part(0, 6, None), part(3, 6, part(0, 3, None))
    same = all(torch.equal(x, again["module"][name]) for name, x in whole["module"].items())
    return again["codecs"], same


@pytest.mark.parametrize("kind, codec", [("Adam", "int4"), ("SGD", "topk")])
def test_a_run_uses_it_and_resumes_with_the_same_bits(kind: str, codec: str) -> None:
    for codecs, same in run(trained, 2, kind, 3):
        assert set(codecs) == {codec} and same


def test_nothing_rounded_needs_a_residual() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="leave memory out"):
        sidcomp.State(accuracy="exact", memory="none")
    state = sidcomp.State(accuracy="exact", memory="residual")
    assert "lossless" in str(state)
