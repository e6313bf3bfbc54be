"""Schedules and policies, without DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sidcomp
from sidcomp.config import policy, schedule
from sidcomp.config.settings import PLAIN, Settings

SHAPES = {
    "embed.weight": (1000, 64),
    "layers.0.weight": (256, 64),
    "layers.0.bias": (256,),
    "layers.1.weight": (2048, 1024),
    "head.weight": (10, 64),
    "head.bias": (10,),
    "empty": (0, 3),
}
ROLES = {"embedding": frozenset({"embed.weight"}), "output": frozenset({"head.weight", "head.bias"})}


def settings(
    codec: str = "topk", exclude: Any = (), rules: Any = (), groups: Any = None, **parameters: Any
) -> Settings:
    out = Settings.parse(codec, parameters, memory="residual", groups=groups, exclude=exclude, policy=rules)
    out.policy.roles = ROLES
    return out


# ---- schedules -----------------------------------------------------------------------------------


def test_a_schedule_holds_each_value_from_its_step_on() -> None:
    s = sidcomp.Schedule({0: 0.25, 3: 0.0625, 10: 0.01})
    assert [s.at(i) for i in (-1, 0, 2, 3, 9, 10, 10**9)] == [0.25, 0.25, 0.25, 0.0625, 0.0625, 0.01, 0.01]
    epochs = sidcomp.Schedule({0: 0.25, 1: 0.1}, every=100)
    assert [epochs.at(i) for i in (0, 99, 100)] == [0.25, 0.25, 0.1] and epochs.last == 0.1
    assert str(epochs) == "0.25@0,0.1@100" and sidcomp.Schedule(epochs.marks) == epochs


@pytest.mark.parametrize(
    "values, every", [({}, 1), ({1: 0.1}, 1), ([(0, 0.1), (0, 0.2)], 1), ([(0, 0.1), (5, 0.2), (3, 0.1)], 1),
                      ({0: None}, 1), ({0: True}, 1), ({0.5: 0.1}, 1), ({0: 0.1}, 0), ({0: 0.1}, 1.5),
                      ([(0,)], 1)],
)  # fmt: skip
def test_what_is_no_schedule(values: Any, every: Any) -> None:
    with pytest.raises(sidcomp.ArgumentError, match="Schedule"):
        sidcomp.Schedule(values, every)


def test_every_value_of_a_schedule_is_checked() -> None:
    with pytest.raises(sidcomp.ParameterError, match="density"):
        settings(density=sidcomp.Schedule({0: 0.1, 5: 7.0}))
    with pytest.raises(sidcomp.ParameterError, match="f23"):
        settings(values=sidcomp.Schedule({0: "f32", 5: "f23"}))


def test_sizes_follow_the_schedule() -> None:
    values = sidcomp.Schedule({0: "f32", 6: "f16"})
    s = settings(density=sidcomp.Schedule({0: 0.5, 4: 0.1}), values=values)
    plans = [s.plan(10000, "float32", 0, step=step) for step in range(8)]
    assert [p.k for p in plans] == [5000] * 4 + [1000] * 4
    assert len({p.payload_bytes for p in plans}) == 3
    assert [s.next_change(i, s.start) for i in (0, 3, 4, 5, 6)] == [4, 4, 6, 6, float("inf")]
    assert s.next_change(0, PLAIN) == float("inf"), "what is uncompressed has no density"
    assert s.next_change(0, replace(s.start, final=True)) == float("inf")
    assert s.plan(10000, "float32", 0, replace(s.start, final=True)).k == 1000
    assert schedule.plain(s.candidates[0].parameters)["density"] == [[0, 0.5], [4, 0.1]]


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, names",
    [
        ("1-D", ["layers.0.bias", "head.bias"]),
        ("embedding", ["embed.weight"]),
        ("output", ["head.weight", "head.bias"]),
        ("layers.*", ["layers.0.weight", "layers.0.bias", "layers.1.weight"]),
        ("head.bias", ["head.bias"]),
        (2560, ["layers.0.bias", "head.weight", "head.bias", "empty"]),
        ("<2561B", ["layers.0.bias", "head.weight", "head.bias", "empty"]),
        ("<= 2.5 KB", ["layers.0.bias", "head.weight", "head.bias", "empty"]),
        (">64KB", ["embed.weight", "layers.1.weight"]),
        (">=64KiB", ["embed.weight", "layers.0.weight", "layers.1.weight"]),
        (">=8MB", ["layers.1.weight"]),
        (">8mb", []),
    ],
)
def test_what_a_rule_is_about(rule: Any, names: list[str]) -> None:
    if rule == 2560:
        names = [n for n in names if n != "head.weight"] + ["head.weight"]
    assert policy.fits(rule, SHAPES, ROLES, "exclude") == set(names)
    assert settings(exclude=rule).policy.excluded(SHAPES) == set(names)


def test_rules_apply_in_their_order() -> None:
    rules = [
        ("layers.*", {"density": 0.1}),
        ("*.weight", {"values": "f16"}),
        ("layers.1.weight", {"density": 0.2}),
        ("head.*", "none"),
        ("head.weight", {"codec": "topk", "density": 0.5}),
    ]
    s = settings(rules=rules, density=0.01)
    own = s.assign(SHAPES)
    assert s.policy.excluded(SHAPES) == {"head.bias"}
    labels = {name: s.candidate(own[name]).parameters for name in SHAPES if name in own}
    assert labels["layers.0.bias"] == {"density": 0.1}
    assert labels["layers.0.weight"] == {"density": 0.1, "values": "f16"}
    assert labels["layers.1.weight"] == {"density": 0.2, "values": "f16"}
    assert labels["embed.weight"] == {"density": 0.01, "values": "f16"}
    assert labels["head.weight"] == {"density": 0.5, "values": "f16"}
    assert "empty" not in own
    assert s.assign(dict(reversed(SHAPES.items()))) == own, "numbers depend on the order of the parameters"


def test_another_codec_takes_only_the_parameters_that_it_knows() -> None:
    s = settings(rules=[("embedding", "fp16"), ("output", {"codec": "sidco-e", "Q": 7})], density=0.05)
    own = s.assign(SHAPES)
    assert s.candidate(own["embed.weight"]).label == "fp16"
    assert s.candidate(own["head.bias"]).parameters == {"density": 0.05, "Q": 7}


@pytest.mark.parametrize(
    "rules, words",
    [
        ("1-D", ["list of pairs"]),
        ([("1-D",)], ["pair"]),
        ([(True, "none")], ["True"]),
        ([("1-D", {})], ["1-D"]),
        ([("1-D", "topq")], ["topq", "topk"]),
        ([("1-D", {"depth": 1})], ["1-D", "depth", "density"]),
        ([("1-D", {"density": 7.0})], ["density"]),
        ([("1-D", {"memory": "elephant"})], ["elephant", "residual"]),
    ],
)
def test_what_is_no_policy(rules: Any, words: list[str]) -> None:
    with pytest.raises((sidcomp.ArgumentError, sidcomp.ParameterError)) as caught:
        settings(rules=rules)
    assert all(word in str(caught.value) for word in words), caught.value


def test_planned_groups_take_dense_rules_only() -> None:
    settings("auto", rules=[("1-D", "none")], groups=None)
    with pytest.raises(sidcomp.ArgumentError, match="planned"):
        settings(rules=[("1-D", {"density": 0.5})], groups="auto")


def test_a_rule_that_fits_nothing_is_a_slip() -> None:
    with pytest.raises(sidcomp.SetupError, match=r"layer.*fits no parameter"):
        settings(rules=[("layer.*", {"density": 0.5})]).assign(SHAPES)
