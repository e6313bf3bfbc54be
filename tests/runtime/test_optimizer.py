"""Which memory a State gets, and which optimizers fit it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sidcomp
from sidcomp.config import accuracy, optimizer_check

torch = pytest.importorskip("torch")

MOMENTA = [m.name for m in sidcomp.memories() if m.momentum]
LEFT = [m.name for m in sidcomp.memories() if not m.momentum]
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def optimizer(kind: Any, **arguments: Any) -> Any:
    return kind([torch.zeros(3, requires_grad=True)], lr=0.1, **arguments)


def test_there_are_both_kinds() -> None:
    assert {"dgc", "momentum"} <= set(MOMENTA) and {"none", "residual", "compensation"} <= set(LEFT)


@pytest.mark.parametrize("memory", MOMENTA)
@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (SGD, {"momentum": 0.9}, ["momentum=0.9", "momentum=0"]),
        (SGD, {"momentum": 0.5, "nesterov": True}, ["momentum=0.5"]),
        (torch.optim.RMSprop, {"momentum": 0.9}, ["momentum=0.9"]),
        (Adam, {}, ["betas[0]=0.9", "betas=(0, 0.999)"]),
        (torch.optim.AdamW, {"betas": (0.8, 0.99)}, ["betas[0]=0.8", "betas=(0, 0.99)"]),
    ],
)
def test_momentum_twice_is_refused(
    memory: str, kind: Any, arguments: dict[str, Any], words: list[str]
) -> None:
    state = sidcomp.State("topk", memory=memory)
    with pytest.raises(sidcomp.SetupError) as caught:
        optimizer_check.check(state.settings, optimizer(kind, **arguments))
    for word in (memory, kind.__name__, "residual", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("memory", MOMENTA)
@pytest.mark.parametrize(
    ("kind", "arguments"), [(SGD, {}), (Adam, {"betas": (0.0, 0.999)}), (torch.optim.Adagrad, {})]
)
def test_an_optimizer_without_momentum_is_fine(
    memory: str, kind: Any, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sidcomp"):
        optimizer_check.check(sidcomp.State("topk", memory=memory).settings, optimizer(kind, **arguments))
    assert all("docs/results.md" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("memory", LEFT)
def test_memories_that_leave_momentum_to_the_optimizer(memory: str, caplog: pytest.LogCaptureFixture) -> None:
    state = sidcomp.State("int8", memory=memory)
    with caplog.at_level(logging.WARNING, "sidcomp"):
        optimizer_check.check(state.settings, optimizer(SGD, momentum=0.9, weight_decay=0.1))
        optimizer_check.check_clip(state.settings, 1.0)
        optimizer_check.check(state.settings, optimizer(Adam))
    assert not caplog.records


def test_every_group_of_parameters_is_looked_at() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)]}, {"params": [], "momentum": 0.9}]
    groups[1]["params"] = [torch.ones(1, requires_grad=True)]
    with pytest.raises(sidcomp.SetupError, match=r"momentum=0\.9"):
        optimizer_check.check(sidcomp.State("topk", memory="dgc").settings, SGD(groups, lr=0.1))


def test_every_optimizer_of_a_list_is_looked_at() -> None:
    plain, heavy = optimizer(SGD), optimizer(SGD, momentum=0.9)
    for several in ([plain, heavy], (heavy, plain)):
        with pytest.warns(sidcomp.SidcompWarning, match=r"momentum=0\.9"):
            sidcomp.State("topk", memory="dgc").follow(several)


@pytest.mark.parametrize("wrong", ["x", 3, [], [None], "list"])
def test_what_is_no_optimizer_is_named(wrong: Any) -> None:
    wrong, one = ([optimizer(SGD), "x"], "x") if wrong == "list" else (wrong, wrong)
    one = None if wrong == [None] else one
    with pytest.raises(sidcomp.ArgumentError) as caught:
        sidcomp.State("topk").follow(wrong)
    assert (f"optimizer={one!r}: give " if wrong != [] else "follow([]): give ") in str(caught.value)


def test_what_fights_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def texts(memory: str, clip: float | None = None, **arguments: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sidcomp"):
            settings = sidcomp.State("topk", memory=memory).settings
            optimizer_check.check(settings, optimizer(SGD, **arguments))
            if clip is not None:
                optimizer_check.check_clip(settings, clip)
        return [r.getMessage() for r in caplog.records]

    assert len(found := texts("dgc", clip=0.25)) == 1
    assert "max_norm=0.25" in found[0] and "clip at 2.5," in found[0]
    assert len(found := texts("dgc", weight_decay=1e-4)) == 1 and "weight_decay" in found[0]
    assert len(texts("dgc", clip=1.0, weight_decay=1e-4)) == 2
    assert texts("momentum", clip=1.0, weight_decay=1e-4) == []  # an average is as large as a gradient


# ---- which memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [c.name for c in sidcomp.codecs()])
def test_a_state_has_the_codecs_own_memory(codec: str) -> None:
    own = next(c.memory for c in sidcomp.codecs() if c.name == codec)
    assert own in [*MOMENTA, *LEFT]
    assert sidcomp.State(codec).settings.candidates[0].memory.name == own
    assert sidcomp.Compressor(codec, 10).memory.name == own


def test_the_default_is_as_before() -> None:
    assert sidcomp.State().settings.candidates[0].memory.name == "residual"
    assert sidcomp.Compressor("topk", 10).memory.name == "residual"
    assert {w.memory.name for w in sidcomp.State("auto").settings.candidates} == {"residual"}
    assert {w.memory.name for w in sidcomp.State("auto", memory="dgc").settings.candidates} == {"dgc"}


def test_numbers_of_the_memory_are_parameters_of_the_state() -> None:
    state = sidcomp.State("topk", memory="dgc", density=0.1, momentum=0.5, nesterov="on", clip_norm=2.0)
    assert state.settings.candidates[0].parameters["momentum"] == 0.5
    with pytest.raises(sidcomp.ParameterError, match=r"momentum.*residual"):
        sidcomp.State("topk", momentum=0.5)
    with pytest.raises(sidcomp.ParameterError, match="momentum"):
        sidcomp.State("topk", memory="dgc", momentum=1.5)


def test_a_policy_cannot_lose_the_momentum() -> None:
    for first, other in (("dgc", "residual"), ("residual", "dgc"), ("dgc", "none"), ("residual", "momentum")):
        with pytest.raises(sidcomp.ArgumentError, match=r"momentum.*one kind"):
            sidcomp.State("topk", memory=first, policy=[("1-D", {"memory": other})])
    sidcomp.State("topk", memory="dgc", policy=[("1-D", {"memory": "momentum", "beta": 0.5})])


def test_a_codec_of_the_policy_brings_its_memory() -> None:
    shapes = {"w": (30, 30), "b": (30,)}

    def found(**arguments: Any) -> list[str]:
        settings = sidcomp.State(policy=[("1-D", "none"), ("b", "topk")], **arguments).settings
        return [settings.candidate(i).memory.name for i in settings.assign(shapes).values()]

    assert found(codec="fp16") == ["residual"]
    assert found(codec="fp16", memory="none") == ["none"]
    assert found(codec="fp16", memory="dgc") == ["dgc"]
    assert found(codec="none") == ["residual"]


@pytest.mark.parametrize(
    ("codec", "kind", "told"),
    [
        ("topk", Adam, True),
        ("auto", torch.optim.AdamW, True),
        ("sidco-e", torch.optim.NAdam, True),
        ("int4", Adam, False),
        ("fp16", torch.optim.AdamW, False),
        ("topk", SGD, False),
        ("topk", torch.optim.RMSprop, False),
    ],
)
def test_adam_beside_a_sparse_codec_is_told_of(
    codec: str, kind: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = sidcomp.State(codec)
    with caplog.at_level(logging.WARNING, logger="sidcomp"):
        optimizer_check.check(state.settings, optimizer(kind))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == told and all("docs/results.md" in s and s.startswith(kind.__name__) for s in said)


def test_the_loss_beside_adam_is_the_measured_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tuple(
        m._replace(over={("GRU", 2): 4.25}) if m.spec == accuracy.FORTIETH else m for m in accuracy.ADAPTIVE
    )
    for table, figure in ((accuracy.ADAPTIVE, "6.3"), (other, "4.25")):
        caplog.clear()
        monkeypatch.setattr(accuracy, "ADAPTIVE", table)
        with caplog.at_level(logging.WARNING, logger="sidcomp"):
            optimizer_check.check(sidcomp.State("topk").settings, optimizer(Adam))
        assert [f"rose by up to {figure} %." in r.getMessage() for r in caplog.records] == [True]
