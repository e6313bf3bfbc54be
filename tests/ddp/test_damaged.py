"""Dictionaries that State.state_dict did not give: a CheckpointError that names the field and leaves the
State as it was, or a load that loses nothing of what was kept."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import sidcomp
import torch
from buffers import fits
from common import CODECS, with_density
from damaged import EXACT, GONE, REFUSED, ROUNDED, VALUES, Path, changed, paths, same
from harness import on_ranks, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidcomp.doors.ddp import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GROUPS = [["0.weight", "1.bias"], ["1.weight", "0.bias"]]
SETTINGS = with_density(CODECS, 0.2)
# One of each kind of state: nothing of the codec's, statistics, a start for the next step.
SOME = ("int8", "sidco-e", "powersgd")
CODEC = "topk"


def make(codec: str = CODEC, **more: Any) -> tuple[DistributedDataParallel, sidcomp.State]:
    logging.getLogger("sidcomp").setLevel(logging.ERROR)  # other settings are taken over with a warning
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(12, 14), nn.Linear(14, 10)))
    state = sidcomp.State(codec, **{"groups": GROUPS, **SETTINGS.get(codec, {}), **more})
    register(ddp, state)
    return ddp, state


def step(ddp: DistributedDataParallel, seed: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    ddp.zero_grad()
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
    (ddp(x).square().sum() * factor).backward()
    return {n: p.grad.clone() for n, p in ddp.module.named_parameters() if p.grad is not None}


def trained(codec: str = CODEC, **more: Any) -> tuple[DistributedDataParallel, sidcomp.State, dict[str, Any]]:
    ddp, state = make(codec, **more)
    for i in range(3):
        step(ddp, i)
    return ddp, state, state.state_dict()


def judge(ddp: DistributedDataParallel, state: sidcomp.State, given: Any, kept: dict[str, Any]) -> str:
    """The refusal; "" where it was loaded, and a step of zero gradients has sent or kept what was kept."""
    before = state.state_dict()
    try:
        state.load_state_dict(given)
    except sidcomp.CheckpointError as e:
        assert same(state.state_dict(), before), f"a refused load has changed the State: {e}"
        return str(e)
    with contextlib.suppress(RuntimeError):
        sent = step(ddp, 0, factor=0.0)
    if state.error is not None:  # it shows with the groups only
        assert isinstance(state.error, sidcomp.CheckpointError), repr(state.error)
        state.engine.current.error = None
        return str(state.error)
    left = state.state_dict()["residuals"]
    for n, values in kept.items():
        got = sent[n].view(-1) + left[n][0]
        torch.testing.assert_close(got, values[0], rtol=1e-5, atol=1e-6, msg=f"{n} lost something")
    return ""


# ---- residuals in another form -----------------------------------------------------------------------------


@on_ranks(1)
def test_residuals_in_another_form(rank: int, world: int) -> None:
    for codec in (CODEC, *SOME):
        ddp, state, saved = trained(codec, memory="residual")
        want = step(ddp, 9)
        for change in EXACT.values():
            changed = {n: change(t) for n, t in saved["residuals"].items()}
            state.load_state_dict({**saved, "residuals": changed})
            assert same(step(ddp, 9), want), codec
    ddp, state, saved = trained()
    for change in ROUNDED.values():
        changed = {n: change(t) for n, t in saved["residuals"].items()}
        assert not judge(
            ddp, state, {**saved, "residuals": changed}, {n: t.float() for n, t in changed.items()}
        )
    state.load_state_dict(saved)
    step(ddp, 9)
    for what, change in REFUSED.items():
        for name in saved["residuals"]:
            changed = {n: change(t) if n == name else t for n, t in saved["residuals"].items()}
            text = judge(ddp, state, {**saved, "residuals": changed}, {})
            assert f"residuals[{name!r}]" in text, f"{what}: {text!r}"
    mine = state.state_dict()
    step(ddp, 10)  # it goes on as if nothing had been tried
    again, other = make()
    other.load_state_dict(mine)
    step(again, 10)
    assert same(other.state_dict(), state.state_dict())


# ---- fields that are not there, or something else ---------------------------------------------------------


@pytest.mark.parametrize("codec", [pytest.param(c, marks=[pytest.mark.slow] * (c != SOME[1])) for c in SOME])
@on_ranks(1)
def test_every_field_missing_or_something_else(rank: int, world: int, codec: str) -> None:
    ddp, state, saved = trained(codec, memory="residual")
    refused = loaded = 0
    for path in paths(saved):
        for value in VALUES:
            kept = saved["residuals"]
            text = judge(ddp, state, changed(saved, path, value), kept)
            refused += bool(text)
            loaded += not text
            assert (
                not text or str(path[0]) in text or "what State.state_dict returned" in text or "rank" in text
            ), (
                path,
                value,
                text,
            )
    assert refused > 400 and loaded > 10, (refused, loaded)


@on_ranks(1)
def test_groups_that_are_not_the_models(rank: int, world: int) -> None:
    ddp, state, saved = trained()
    one, two = saved["layout"]
    for layout, words in (
        ([one, two, one], "'0.weight'"),
        ([one, one], "'0.weight'"),
        ([one], "'1.weight'"),
        ([{**one, "names": ["0.weight", "0.weight"]}, two], "'0.weight'"),
        ([{**one, "names": one["names"][:1], "shapes": one["shapes"][:1]}, two], "'1.bias'"),
        ([{**one, "names": ["0.weight", "x"]}, two], "'1.bias'"),
        ([{**one, "way": 1}, two], "layout[0]['way']"),
        ([{**one, "way": -1}, two], "layout[0]['way']"),
        ([one, {**two, "header": two["header"][:100]}], "layout[1]['header']"),
        ([one, {**two, "header": two["header"].float()}], "layout[1]['header']"),
        ([one, {**two, "extra": torch.zeros(3, dtype=torch.uint8)}], "layout[1]['extra']"),
    ):
        text = judge(ddp, state, {**saved, "layout": layout}, {})
        assert words in text, text
    for groups in ([[*GROUPS[0], *GROUPS[1]]], [[n] for names in GROUPS for n in names], GROUPS[::-1]):
        shapes = {n: s for g in saved["layout"] for n, s in zip(g["names"], g["shapes"], strict=True)}
        layout = [{**one, "names": g, "shapes": [shapes[n] for n in g]} for g in groups]
        assert not judge(ddp, state, {**saved, "layout": layout}, saved["residuals"])
    layout = [{**g, "extra": torch.full((640,), 255, dtype=torch.uint8)} for g in saved["layout"]]
    assert not judge(ddp, state, {**saved, "layout": layout}, saved["residuals"])


@on_ranks(1)
def test_a_group_of_two_dtypes(rank: int, world: int) -> None:
    """A group of two dtypes would read the one as the other."""
    logging.getLogger("sidcomp").setLevel(logging.CRITICAL)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4).bfloat16())
    module[0].register_forward_hook(lambda m, i, o: o.bfloat16())
    ddp = DistributedDataParallel(module)
    state = sidcomp.State(CODEC, groups=[["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    register(ddp, state)
    for _ in range(2):
        ddp(torch.randn(3, 6)).sum().backward()
    saved = state.state_dict()
    one, two = saved["layout"]
    both = {**one, "names": one["names"] + two["names"], "shapes": one["shapes"] + two["shapes"]}
    state.load_state_dict({**saved, "layout": [both]})
    with pytest.raises(RuntimeError):
        ddp(torch.randn(3, 6)).sum().backward()
    assert isinstance(state.error, sidcomp.CheckpointError)
    text = str(state.error)
    assert "layout[0]" in text and "float32" in text and "bfloat16" in text


# ---- anything --------------------------------------------------------------------------------------------

TENSORS = st.sampled_from(
    [
        torch.zeros(0),
        torch.ones(1, 168),
        torch.full((1, 140), float("inf")),
        torch.zeros(256, dtype=torch.uint8),
        torch.arange(512, dtype=torch.int64).to(torch.uint8),
        torch.full((256,), 255, dtype=torch.uint8),
        torch.ones(1, 10, dtype=torch.float64) / 3,
        torch.ones(1, 10, device="meta"),
        torch.tensor(3),
    ]
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.integers(), st.floats(), st.text(max_size=3), TENSORS
)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def anything(rank: int, world: int, codec: str, examples: int) -> None:
    ddp, state, saved = trained(codec, memory="residual")
    everywhere = list(paths(saved))

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(st.sampled_from(everywhere), ANY | st.just(GONE)), min_size=1, max_size=3))
    def each(changes: list[tuple[Path, Any]]) -> None:
        damaged = saved
        for path, value in changes:
            with contextlib.suppress(LookupError, TypeError):  # a change before has taken it away
                damaged = changed(damaged, path, value)
        # what is accepted as a residual is kept
        kept = damaged.get("residuals")
        kept = kept if isinstance(kept, dict) else {}
        judge(ddp, state, damaged, {n: t.float() for n, t in kept.items() if isinstance(t, torch.Tensor)})

    each()


@pytest.mark.parametrize("codec", SOME)
def test_whatever_is_in_it(codec: str) -> None:
    run(anything, 1, codec, 50)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [c for c in CODECS if not CODECS[c].lossless])
def test_whatever_is_in_it_of_every_codec(codec: str) -> None:
    run(anything, 1, codec, 1000)


# ---- statistics --------------------------------------------------------------------------------------------

# Of SIDCo's hang: the number of stages among them.
WORDS = (0, 1, 7, 8, 9, 255, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@on_ranks(1)
def test_statistics_that_no_encode_wrote(rank: int, world: int) -> None:
    draw = torch.Generator().manual_seed(7)
    for codec in [c for c in CODECS if not CODECS[c].lossless and fits(c, "residual")]:
        ddp, state, saved = trained(codec, memory="residual")
        for _ in range(8):
            layout = []
            for g in saved["layout"]:
                header = g["header"].clone()
                words = torch.tensor(WORDS)[torch.randint(len(WORDS), (48,), generator=draw)]
                header[:192] = torch.tensor(list(words.numpy().astype("<u4").tobytes()), dtype=torch.uint8)
                extra = torch.randint(256, g["extra"].shape, generator=draw).to(torch.uint8)
                layout.append({**g, "header": header, "extra": extra})
            assert not judge(ddp, state, {**saved, "layout": layout}, saved["residuals"]), codec
            step(ddp, 3)
            assert all(bool(torch.isfinite(t).all()) for t in step(ddp, 4).values()), codec


# ---- several ranks ----------------------------------------------------------------------------------------


def one_of_two(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 has NaN; its own load says so, and the others hear of it when groups are made."""
    ddp, state, saved = trained()
    state.close()
    if rank == 1:
        saved["residuals"]["0.weight"][0, 5] = float("nan")
    ddp, state = make()
    refused = ""
    try:
        state.load_state_dict(saved)
    except sidcomp.CheckpointError as e:
        refused = str(e)
    with pytest.raises(RuntimeError):  # the one has nothing, the other goes on from step 3
        step(ddp, 3)
    assert isinstance(state.error, sidcomp.RankError)
    return refused, str(state.error)


def test_what_one_rank_refuses_all_hear_of() -> None:
    (fine, first), (refused, second) = run(one_of_two, 2)
    assert not fine and "residuals['0.weight']" in refused and "NaN" in refused
    assert "rank 1" in first and "step" in first and "rank 1" in second


def lists(rank: int, world: int, saved: list[dict[str, Any]]) -> list[str]:
    """Every rank reads the states of all, so every rank refuses."""
    _, state = make()
    texts = []
    for field, value in (
        (("residuals", "0.weight"), torch.full((1, 168), float("nan"))),
        (("residuals", "0.weight"), GONE),
        (("residuals", "1.bias"), torch.zeros(1, 9)),
        (("layout", 0, "names"), 3),
        (("shared",), {"0.weight": [3, True]}),
        (("memory",), "dgc"),
    ):
        with pytest.raises(sidcomp.CheckpointError) as caught:
            state.load_state_dict([saved[0], changed(saved[1], field, value), saved[2]])
        texts.append(str(caught.value))
    state.load_state_dict(saved)
    return texts


def gather(rank: int, world: int) -> dict[str, Any]:
    return trained()[2]


def test_one_of_a_list_of_states() -> None:
    for texts in run(lists, 2, run(gather, 3)):
        assert all("states[1]" in t for t in texts), texts
