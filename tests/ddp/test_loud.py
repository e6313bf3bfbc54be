"""Compression is never silently not in force: lines at the first step, warnings, and strict()."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import pickle
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import test_auto
import torch
import torch.distributed as dist
from cases import CASES, Case, Scrambled, Trainer, square
from common import begin
from harness import on_ranks, run
from heard import warned
from local_training import KINDS, updates
from sidcomp.autotune import measurement
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.doors.ddp import register
from sidcomp.runtime import engine as engines
from sidcomp.runtime import optimizer_watch
from sidcomp.runtime.cpu_executor import CpuExecutor
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SPARSE: dict[str, Any] = {"codec": "topk", "density": 0.05}


def said() -> list[str]:
    """The lines that this process has printed so far on stderr and that begin with sidcomp's name."""
    sys.stderr.flush()
    lines = Path(f"/proc/self/fd/{sys.stderr.fileno()}").resolve().read_text().splitlines()
    return [line.removeprefix("sidcomp: ") for line in lines if line.startswith("sidcomp: ")]


def trained(rank: int, arguments: dict[str, Any], steps: int) -> dict[str, Any]:
    trainer, state = begin(rank, **arguments)
    for _ in range(steps):
        trainer.step()
    stats = state.stats()
    trainer.close()
    with warned() as caught:
        state.close()
    return {"said": said(), "warned": caught, "stats": stats}


def first_line(
    rank: int, world: int, arguments: dict[str, Any], runs: int = 1, steps: int = 1
) -> dict[str, Any]:
    for _ in range(runs - 1):
        trained(rank, arguments, steps=2)
    return trained(rank, arguments, steps)


def test_the_first_step_says_what_is_compressed() -> None:
    numel = sum(p.numel() for p in Scrambled().parameters())
    ours, other = run(first_line, 2, {**SPARSE, "exclude": "1-D"})
    assert not other["said"], "only the lowest rank says it"
    (line,) = ours["said"]
    matrices = [p for p in Scrambled().parameters() if p.dim() > 1]
    vectors = [p for p in Scrambled().parameters() if p.dim() < 2]
    share = sum(p.numel() for p in matrices) / numel
    assert f"topk density=0.05 compresses {len(matrices)} of {len(matrices) + len(vectors)} tensors" in line
    assert f"({100 * share:.1f} %), by all-gather over 2 ranks" in line
    assert line.endswith(
        f"Uncompressed: {len(vectors)} tensors, {4 * sum(p.numel() for p in vectors)} bytes (exclude '1-D')"
    )
    sent = re.search(
        r"a rank sends ([\d.]+) (bytes|KB) a step \(([\d.]+) bits an element\), plain DDP's all-reduce", line
    )
    assert sent is not None
    stats = ours["stats"]
    bits = 8 * stats["wire_bytes"] / stats["steps"] / numel
    assert float(sent[3]) == pytest.approx(bits, rel=0.01)
    each = float(sent[1]) * {"bytes": 1, "KB": 1000}[sent[2]]
    assert each == pytest.approx(stats["wire_bytes"] / stats["steps"], rel=0.01)


def test_a_second_run_in_one_process_says_it_again() -> None:
    ours, other = run(first_line, 2, SPARSE, 2)
    first, second = ours["said"]
    assert first == second and "topk density=0.05 compresses" in first and not other["said"]


def test_codecs_that_compress_nothing_say_so() -> None:
    ours, _ = run(first_line, 2, {"codec": "none"})
    (line,) = ours["said"]
    assert line.startswith("nothing is compressed: 9 tensors") and "codec 'none'" in line


def everything_excluded(rank: int, world: int, strict: bool) -> str:
    trainer, state = begin(rank, "default", **SPARSE, exclude="*")
    with warned() as caught:
        if strict:
            with sidcomp.strict(), pytest.raises(RuntimeError, match="nothing is compressed") as failed:
                trainer.step()
            assert isinstance(failed.value.__cause__, sidcomp.StrictError)
            assert isinstance(state.error, sidcomp.StrictError)
        trainer.step()
    return "\n".join(caught)


def test_a_lossy_codec_that_gets_nothing_warns() -> None:
    ours, other = run(everything_excluded, 2, False)
    assert "nothing is compressed" in ours and "exclude '*'" in ours and not other
    run(everything_excluded, 2, True)


def many(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(64, 256, bias=False))
    state = sidcomp.State(**arguments)
    register(ddp, state)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
    found = {"said": said(), "stats": state.stats(), "mean": ddp.module.weight.grad}
    del ddp
    state.close()
    return found


@pytest.mark.parametrize("world", [3, 6])
def test_more_than_two_ranks_take_the_exchange_of_the_fewest_bytes(world: int) -> None:
    """And the ratio is that of the bytes on the wire, which an all-gather multiplies by the ranks."""
    n = 64 * 256
    chosen, named, same = (
        run(many, world, {"codec": "int4", **more})[0]
        for more in ({}, {"exchange": "allgather"}, {"exchange": "twoshot"})
    )
    assert torch.equal(chosen["mean"], same["mean"]) and not torch.equal(chosen["mean"], named["mean"])
    plain = 2 * (world - 1) * 4 * n / world
    for found, name in ((chosen, "twoshot"), (named, "all-gather")):
        (line,) = found["said"]
        assert f"by {name} over {world} ranks" in line
        stats = found["stats"]
        assert stats["dense_wire_bytes"] == round(2 * plain)
        assert stats["ratio"] == pytest.approx(2 * plain / stats["wire_bytes"], rel=1e-4)
    payload = named["stats"]["sent_bytes"] // 2
    assert named["stats"]["wire_bytes"] == 2 * (world - 1) * payload
    assert world * chosen["stats"]["wire_bytes"] < 2.3 * named["stats"]["wire_bytes"]
    assert "encodes their mean a second time" in chosen["said"][0]


@pytest.mark.parametrize("codec", ["int4", "int8", "topk", "efsignsgd"])
def test_the_simulator_agrees_with_the_choice(codec: str) -> None:
    """It takes the bytes of each round from the core as well, but makes times of them."""
    n, settings = 1_000_000, sidcomp.State(codec).settings
    for world in (2, 3, 4, 16, 64):
        plan = settings.plan(n, "float32", 0, place=(0, world))
        rows = sidcomp.simulation.simulate(n, codec, worlds=[world], exchange=["allgather", "twoshot"])
        gathered, other = (rows.row(name, world).seconds for name in ("allgather", "twoshot"))
        if isinstance(plan, MessagePlan):
            assert plan.choice.exchange.name == "twoshot" and other < gathered
        else:
            assert world == 2 and gathered < other


def test_where_nothing_helps_the_first_line_says_so() -> None:
    ours = run(many, 2, {"codec": "topk", "density": 1.0})[0]
    assert "by all-gather over 2 ranks" in ours["said"][0] and "saves nothing" in ours["said"][0]
    assert ours["stats"]["ratio"] < 1


# ---- the end of a State ------------------------------------------------------------------------------------


def unused(rank: int, world: int, how: str) -> list[str]:
    with warned() as caught:
        state = sidcomp.State(**SPARSE)
        if how == "strict":
            with sidcomp.strict(), pytest.raises(sidcomp.StrictError, match="0 steps"):
                state.close()
        elif how == "closed":
            state.close()
            state.close()
        elif how == "copied":
            state.__getstate__()
        elif how == "failed":
            with pytest.raises(KeyError), state:
                raise KeyError("an error of the program")
        del state
    return caught


@pytest.mark.parametrize(
    ("how", "words"),
    [("closed", "was closed after 0 steps"), ("collected", "was collected after 0 steps"), ("strict", ""),
     ("copied", ""), ("failed", "")],
)  # fmt: skip
def test_a_state_that_served_nothing_warns(how: str, words: str) -> None:
    ours, other = run(unused, 2, how)
    assert len(ours) == (1 if words else 0) and words in "".join(ours)
    assert "topk" in "".join(ours) if words else True
    assert not other or how == "closed", "one rank says it"


def test_auto_says_that_it_measures_and_that_it_has_not_decided() -> None:
    ours, other = run(first_line, 2, {"codec": "auto"}, 1, 3)
    assert any("measures during the first steps" in line for line in ours["said"]) and not other["said"]
    (text,) = ours["warned"]
    assert "after 3 steps, before it had decided" in text
    assert not other["warned"]


# ---- errors ------------------------------------------------------------------------------------------------


def failing(rank: int, world: int, when: str) -> tuple[str, str]:
    trainer, state = begin(rank, **SPARSE)
    trainer.step()
    trainer.step()
    if when == "closed":
        state.close()
    elif rank == 0:  # it fails where its payload would be sent, and the others where they decode it
        executor = state.engine.executor
        assert isinstance(executor, CpuExecutor)
        compute = executor._compute

        def unable(group: Any, round: int) -> None:
            group.stage.error = ValueError("boom")
            compute(group, round)

        executor._compute = unable  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        trainer.step()
    error = caught.value
    assert type(error) is RuntimeError and isinstance(error.__cause__, sidcomp.SidcompError)
    assert str(error.__cause__) == str(error)
    return type(error.__cause__).__name__, str(error)


def test_backward_raises_our_text_and_nothing_else() -> None:
    for name, text in run(failing, 2, "closed"):
        assert name == "SetupError"
        assert text == (
            "this State is closed: make a new one, and call sidcomp.compress (of a DDP model: of a new DDP "
            "around its module) or sidcomp.fsdp.compress again"
        )
    (mine, why), (theirs, seen) = run(failing, 2, "sending")
    assert mine == "ExchangeError" and why.startswith("group ") and why.endswith(": boom")
    assert theirs == "ExchangeError"
    assert seen.endswith("payload of rank 0: rank 0 failed in this step: ValueError: boom")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"exclude": "lost.*"}, "exclude: rule 'lost.*' fits no parameter"),
    ({"exclude": "first.wieght"}, "did you mean 'first.weight'?"),
    ({"exclude": "embeding"}, "did you mean 'embedding'?"),
    ({"policy": [("norm.bais", "none")]}, "did you mean 'norm.bias'?"),
    ({"groups": [["first.wieght"]]}, "did you mean 'first.weight'?"),
    ({"groups": [["first.weight"]]}, "no list names"),
    ({"process_group": "gloo"}, "process_group='gloo'"),
]


@on_ranks(1)
def test_wrong_names_are_found_by_register(rank: int, world: int) -> None:
    for arguments, words in WRONG:
        with pytest.raises(sidcomp.SetupError, match=re.escape(words)):
            begin(rank, "default", **arguments)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"codec": "topkk"}, "topk"),
        ({"codec": "TopK"}, "topk"),
        ({"memory": "Residual"}, "residual"),
        ({"codec": "topk", "DENSITY": 0.1}, "density"),
        ({"groups": "BUCKET"}, "bucket"),
        ({"memory": "residul"}, "residual"),
        ({"codec": "topk", "densty": 0.1}, "density"),
        ({"codec": "topk", "exchange": "twoshots"}, "twoshot"),
        ({"codec": "auto", "densty": 0.1}, "density"),
        ({"groups": "buckets"}, "bucket"),
        ({"policy": [("<1KB", {"densty": 0.1})]}, "density"),
    ],
)
def test_unknown_names_get_a_suggestion(arguments: dict[str, Any], meant: str) -> None:
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?"):
        sidcomp.State(**arguments)


def test_an_unknown_preset_gets_a_suggestion() -> None:
    with pytest.raises(sidcomp.ArgumentError, match=r"did you mean 'redsync'\?"):
        sidcomp.preset("redsinc")


# ---- what a program forgets --------------------------------------------------------------------------------


def scaled(rank: int, world: int, told: str) -> list[str]:
    trainer, state = begin(rank, "default", **SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=told != "disabled")
    if told == "followed":
        state.follow(trainer.optimizer, scaler)
    elif told == "unseen":
        state.follow(trainer.optimizer)
    elif told == "by hand":
        state.update_scale(8.0)
    with warned() as caught:
        for _ in range(engines._LOOK_AT + 2):
            trainer.optimizer.zero_grad()
            scaler.scale(trainer.wrapper(torch.ones(4, 12)).sum()).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
    return caught


@pytest.mark.parametrize("told", ["followed", "by hand", "disabled", "unseen", "nothing"])
def test_a_gradscaler_that_nobody_named_is_noticed_once(told: str) -> None:
    ours, other = run(scaled, 2, told)
    expected = 1 if told in ("unseen", "nothing") else 0
    assert len([text for text in ours if "GradScaler" in text]) == expected, ours
    assert not other


@on_ranks(1)
def test_a_gradscaler_that_is_not_enabled_is_none(rank: int, world: int) -> None:
    """A scaler that does nothing changes nothing: neither what is followed nor what a step keeps."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer, state = begin(rank, "default", **SPARSE)
    optimizer = trainer.optimizer
    with sidcomp.strict():
        state.follow(optimizer, scaler)
        trainer.step()
        once = state.stats()["state_bytes"]
        assert once > 0
        state.update_scale(scaler.get_scale())
        assert state.stats()["state_bytes"] == once, "no step can be skipped"
        state.follow(optimizer, torch.amp.GradScaler("cpu"))
        assert state.stats()["state_bytes"] == 2 * once
        state.close()
        own = list(trainer.module.parameters())
        second = DDP(trainer.module)
        both = [torch.optim.SGD(some, 0.1) for some in (own[:2], own[2:])]
        with sidcomp.compress(second, both, sidcomp.State(**SPARSE), scaler=scaler) as it:
            rates = it.state.engine.rates
            assert rates is not None and len(rates.optimizers) == 2
            second(torch.ones(4, 12)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_gradscaler_beside_updates_raises_no_alarm(rank: int, world: int, kind: str) -> None:
    """As far as the third exchange, in which a State looks for a scaler."""
    for enabled in (True, False):
        module = Scrambled()
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        state = sidcomp.State(**SPARSE)
        with sidcomp.strict(), state:
            updates(kind, module, optimizer, state, every=1)
            for _ in range(engines._LOOK_AT + 1):
                optimizer.zero_grad()
                scaler.scale((1 + rank) * module(torch.ones(4, 12)).sum()).backward()
                before = [p.detach().clone() for p in module.parameters()]
                scaler.step(optimizer)
                after = list(module.parameters())
                assert not all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
                scaler.update()
            with pytest.raises(sidcomp.SetupError, match="unit of the parameters"):
                state.update_scale(scaler.get_scale())


@on_ranks(1)
def test_follow_checks_the_optimizer(rank: int, world: int) -> None:
    trainer, state = begin(rank, "default", **SPARSE)
    adam = torch.optim.Adam(trainer.module.parameters())
    with sidcomp.strict(), pytest.raises(sidcomp.StrictError, match="Adam divides by the size"):
        state.follow(adam)
    doubled = sidcomp.State("topk", memory="dgc")
    with pytest.warns(sidcomp.SidcompWarning, match="applies momentum"):
        doubled.follow(trainer.optimizer)


@on_ranks(1)
def test_a_hook_that_is_never_called_is_noticed(rank: int, world: int) -> None:
    """A framework wraps the module in another DDP, whose hook is torch's own."""
    trainer, state = begin(rank, "default", **SPARSE)
    state.follow(trainer.optimizer)
    trainer.wrapper = DDP(trainer.module)
    with warned() as caught:
        for _ in range(optimizer_watch._MOST_STEPS + 3):
            trainer.optimizer.step()
    trainer.close()
    assert len(caught) == 1 and "no gradient has reached sidcomp" in caught[0]


def changed(rank: int, world: int, how: str) -> list[str]:
    torch.manual_seed(0)
    module = Scrambled()
    if how == "unfrozen":
        module.norm.bias.requires_grad_(False)
    ddp = DDP(module)
    state = sidcomp.State(**SPARSE)
    if how == "added":
        module.extra = nn.Parameter(torch.zeros(3))
        with pytest.raises(sidcomp.SetupError, match="extra, which the module did not have"):
            register(ddp, state)
        return []
    register(ddp, state)
    with warned() as caught:
        for step in range(5):
            if step == 2 and how == "unfrozen":
                module.norm.bias.requires_grad_(True)
            ddp(torch.ones(4, 12)).square().sum().backward()
    del ddp
    state.close()
    return [text for text in caught if "DDP" in text]


def test_a_module_that_changes_after_it_was_wrapped_is_noticed() -> None:
    run(changed, 1, "added")
    (ours,) = run(changed, 1, "unfrozen")
    assert len(ours) == 1 and "norm.bias requires a gradient since" in ours[0]
    assert not run(changed, 1, "unchanged")[0]


def static(rank: int, world: int) -> list[str]:
    trainer, _ = begin(rank, Case(Scrambled, square, ddp={"static_graph": True}), **SPARSE)
    with warned() as caught, trainer.wrapper.no_sync():
        trainer.wrapper(torch.ones(4, 12))
    return caught


def test_no_sync_in_the_first_iteration_of_a_static_graph_is_noticed() -> None:
    (ours,) = run(static, 1)
    assert len(ours) == 1 and "static_graph=True" in ours[0] and "no_sync()" in ours[0]


# ---- what a State shows ------------------------------------------------------------------------------------


def shown(rank: int, world: int, room: str) -> tuple[str, str, dict[str, Any], list[str]]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State(**SPARSE, exclude="1-D")
    before = state.explain()
    with pytest.raises(sidcomp.SetupError, match="no iteration to draw"):
        state.plot(f"{room}/early{rank}.png")
    register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    state.timeline(f"{room}/{rank}.json")
    state.plot(f"{room}/{rank}.png")
    return before, state.explain(), state.stats(), said()


def test_a_named_codec_is_explained_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rank, (before, text, stats, lines) in enumerate(run(shown, 2, str(tmp_path))):
        assert len(lines) == (rank == 0), (
            "once, also where DDP forms its buckets anew, and the groups with them"
        )
        assert "train some steps first" in before
        assert "topk density=0.05 compresses 4 of 9 tensors" in text and "4 steps" in text
        for kind in ("encode", "exchange", "decode"):
            assert re.search(rf"{kind} +\d+\.\d\d ms a step", text), text
        for group in stats["groups"]:
            assert f"{group['n']:,}" in text and f"{group['sent_bytes']:,}" in text
        assert (tmp_path / f"{rank}.png").stat().st_size > 1000
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"measured"}
        assert len([e for e in events if e.get("dur", 0) > 0]) >= 3 * len(stats["groups"])


def logged(rank: int, world: int) -> tuple[list[dict[str, float]], list[float], dict[str, Any]]:
    trainer, state = begin(rank, **SPARSE)
    seen = [state.log()]
    for steps in (3, 2, 0):
        for _ in range(steps):
            trainer.step()
        seen.append(state.log(norms=steps != 2))
    trainer.step()
    seen.append(state.log())
    kept = state.state_dict()["residuals"].values()
    gradient = torch.cat([p.grad.flatten() for p in trainer.module.parameters()])  # type: ignore[union-attr]
    norms = [float(torch.cat([v[0] for v in kept]).norm()), float(gradient.norm())]
    return seen, norms, state.stats()


def test_a_flat_dictionary_for_training_logs() -> None:
    seen, norms, stats = run(logged, 2)[0]
    start, first, second, none, last = seen
    assert start == {} and none == {}, "no step, no figures"
    assert all(isinstance(v, float) for v in first.values()) and all(k.startswith("sidcomp/") for k in first)
    assert set(first) - set(second) == {
        "sidcomp/residual_norm", "sidcomp/gradient_norm", "sidcomp/residual_over_gradient"
    }  # fmt: skip
    wire = 3 * first["sidcomp/wire_bytes"] + 2 * second["sidcomp/wire_bytes"] + last["sidcomp/wire_bytes"]
    assert wire == pytest.approx(stats["wire_bytes"])
    assert last["sidcomp/residual_norm"] == pytest.approx(norms[0], rel=1e-5)
    assert last["sidcomp/gradient_norm"] == pytest.approx(norms[1], rel=1e-5)
    assert last["sidcomp/residual_over_gradient"] == pytest.approx(norms[0] / norms[1], rel=1e-5)
    assert all(last[f"sidcomp/{kind}_ms"] > 0 for kind in ("encode", "wait", "decode"))


def profiled(rank: int, world: int) -> tuple[set[str], int]:
    trainer, state = begin(rank, **SPARSE)
    for _ in range(3):
        trainer.step()
    # A group is decoded in a thread of the backend, which the profiler leaves out by default.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[call-arg]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile:
        trainer.step()
        trainer.step()
    names = {event.name for event in profile.events() if event.name.startswith("sidcomp")}
    trainer.step()
    assert not state.engine.current.profiled, "a step without a profiler pays for ranges"
    return names, len(state.stats()["groups"])


def test_the_profiler_shows_encode_exchange_and_decode() -> None:
    if "profile_all_threads" not in str(torch._C._profiler._ExperimentalConfig.__init__.__doc__):
        pytest.skip("this torch's profiler cannot show other threads")
    names, groups = run(profiled, 2)[0]
    kinds = ("encode", "exchange", "decode")
    assert names == {f"sidcomp {kind} group {i}" for kind in kinds for i in range(groups)}


def test_planned_groups_are_measured_over_the_exchange_that_they_take() -> None:
    settings = sidcomp.State("int4", groups="auto").settings
    for world, name in ((2, None), (3, "twoshot"), (4, "twoshot"), (64, "twoshot")):
        choice = measurement.measurable(settings, 0, world).choice
        assert (choice.exchange.name if choice is not None else None) == name
    settings = sidcomp.State("int4", groups="auto", exchange="allgather").settings
    assert measurement.measurable(settings, 0, 64).choice is None
    for codec, memory in (("ssdm", None), ("int4", "none"), ("marsit", None), ("randk-own", None)):
        settings = sidcomp.State(codec, memory=memory).settings
        assert measurement.measurable(settings, 0, 64).choice is None, "the second encoding would do harm"
    settings = sidcomp.State("int4", full_every=10).settings  # full-precision steps need the whole vector
    assert measurement.measurable(settings, 0, 64).choice is None


def decided(rank: int, world: int) -> list[str]:
    with test_auto.Training(rank, candidates=["topk"], slow=test_auto.SLOW_DENSE) as t:
        t.until_it_settles()
    return said()


def test_auto_says_what_it_is_doing_and_what_it_has_decided() -> None:
    """Where stderr is no terminal, as here: the stages in their order, in a few plain lines."""
    ours, other = run(decided, 2)
    assert not other
    texts = ["measures during the first steps", "has decided after", "topk compresses"]
    assert [sum(text in line for line in ours) for text in texts] == [1, 1, 1], ours
    first, costs, plans, last = [line for line in ours if 'State("auto")' in line]
    assert texts[0] in first and texts[1] in last
    assert re.search(r'State\("auto"\), step \d+: measuring codecs and exchanges$', costs)
    assert re.search(r", step \d+: measuring \d plans of [\d, ]+ groups, predicted .* ms a step$", plans)


def with_many_stages(rank: int, world: int) -> list[str]:
    with test_auto.Training(rank, candidates=["topk"], slow=test_auto.SLOW_DENSE) as t:
        t.step()
        controller: Any = t.state.engine.tuner
        controller._p = t.state.engine  # as during a call of the engine
        for i in range(9):
            controller._say(f"stage {i}", stage=True)
        controller._p = None
    return said()


def test_the_lines_of_progress_end_after_a_few() -> None:
    ours, other = run(with_many_stages, 2)
    assert not other
    assert [line[-7:] for line in ours if ", step " in line] == ["stage 0", "stage 1", "stage 2"]


def without_room(rank: int, world: int) -> list[str]:
    """The warnings about room in a run of auto, which begins without compression."""
    with (
        warned() as caught,
        test_auto.Training(
            rank, candidates=[("lossless", {"bits": 3, "exceptions": 0.0})], slow=test_auto.SLOW_DENSE
        ) as t,
    ):
        while t.state.plan_report()["stage"] != "settled":
            t.step()
        for _ in range(20):
            t.step()
    return [text for text in caught if "has no room" in text]


def test_auto_tells_what_has_no_room_once_it_has_decided() -> None:
    ours, other = run(without_room, 2)
    assert len(ours) == 1 and not other, (ours, other)
    assert re.search(r"Give candidates=\[\('lossless', \{'exceptions': 0\.\d+\}\)\]", ours[0])


def outgrown(rank: int, world: int, arguments: dict[str, Any], steps: int) -> list[str]:
    """The warnings about eta_s in a run."""
    trainer, _ = begin(rank, "default", codec="marsit", memory="compensation", **arguments)
    with warned() as caught:
        for _ in range(steps):
            trainer.step()
    return [text for text in caught if "eta_s" in text]


@pytest.mark.parametrize(
    ("arguments", "steps", "expected"),
    [
        ({"eta_s": 1e-7}, 13, 1),  # the 13th looks at what the first 12 have left
        ({"eta_s": 1e-7}, 12, 0),
        ({"eta_s": 1e-7, "full_every": 5}, 30, 0),  # nothing accumulates for as long
        ({"eta_s": 1.0}, 20, 0),
        ({"eta_s": 1e-7, "exchange": "ring1"}, 20, 1),
    ],
)
def test_signs_too_small_for_the_gradients_are_named(
    arguments: dict[str, Any], steps: int, expected: int
) -> None:
    ours, other = run(outgrown, 2, arguments, steps)
    assert len(ours) == expected and not other, (ours, other)
    if expected:
        growth = re.search(r"grown by (\S+) an element", ours[0])
        assert growth is not None and float(growth[1]) > 3e-7 and "eta_s=1e-07 is too small" in ours[0]


@on_ranks(2, group_timeout=20)
def test_under_strict_all_ranks_raise_what_one_ranks_signs_show(rank: int, world: int) -> None:
    trainer, _ = begin(rank, "default", codec="marsit", memory="compensation", eta_s=1e-7)
    if rank == 0:
        engines.outgrown = lambda *_: None
    with sidcomp.strict():
        for _ in range(12):
            trainer.step()
        with pytest.raises(RuntimeError, match="StrictError: eta_s" if rank == 0 else "eta_s=1e-07 is too"):
            trainer.step()
        trainer.step()


# ---- copies and conversions --------------------------------------------------------------------------------


def copied(rank: int, world: int) -> dict[str, list[str]]:
    """What is said of copies of a DDP model, and of their States: averages of the weights, and one that
    trains."""
    said: dict[str, list[str]] = {}
    x = torch.ones(4, 12)
    for name, ddp_arguments, when in (
        ("before", {}, 0),
        ("static", {"static_graph": True}, 0),
        ("after", {}, 2),
    ):
        trainer, state = begin(
            rank, Case(Scrambled, square, ddp=ddp_arguments), codec="auto" if name == "after" else "topk"
        )
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        scaler._enabled, scaler._per_optimizer_states = True, defaultdict(dict)  # as on a machine with a GPU
        if name == "before":
            state.follow(trainer.optimizer, scaler)
            assert state._forward is not None
        with warned() as caught:
            for _ in range(when):
                trainer.step()
            averages = torch.optim.swa_utils.AveragedModel(trainer.wrapper)
            clone = copy.deepcopy(trainer.wrapper)
            buffer = io.BytesIO()
            torch.save(trainer.wrapper, buffer)
            if name == "before":
                state.follow(None)
            for _ in range(2):
                trainer.step()
                averages.update_parameters(trainer.wrapper)
            with torch.no_grad():
                averages(x)
            averages(x).sum()
            del averages
            gc.collect()
            said[name] = [*caught]
            caught.clear()
            for _ in range(2):
                clone(x).sum().backward()
            del clone
            gc.collect()
            said[f"{name}, trains"] = caught
        assert state.stats()["steps"] == 2 + when
        trainer.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state.close()
    kept = pickle.loads(pickle.dumps(sidcomp.State("topk")))
    register(DDP(Scrambled()), kept)
    with warned() as caught:
        kept.close()
    said["registered, and not trained"] = caught
    return said


def test_of_copies_only_one_that_trains_is_spoken_of() -> None:
    ours, other = run(copied, 2)
    for name in ("before", "static", "after"):
        assert not ours[name], name
        (text,) = ours[f"{name}, trains"]
        assert "DDP does not copy the hook" in text and "wrap the copy's module in a new DDP" in text
    assert "closed after 0 steps" in ours["registered, and not trained"][0]
    assert not any(other[name] for name in other if name != "registered, and not trained")


CONVERSIONS: dict[str, Any] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.bfloat16),
    "a part": lambda module: module[1].to(torch.bfloat16),
    "and back": lambda module: module.to(torch.bfloat16).float(),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))


def forward(module: nn.Sequential, model: nn.Module) -> Any:
    """Of a module that has one dtype, or a layer with another one."""
    kinds = [layer.weight.dtype for layer in module]
    if len(set(kinds)) > 1:
        with contextlib.suppress(RuntimeError):
            return model(torch.ones(4, 12))
        return torch.ones((), requires_grad=True)
    return model(torch.ones(4, 12, dtype=kinds[0])).sum()


def converted(rank: int, world: int, how: str) -> list[str]:
    """What is said in the two steps after a conversion, before the first step or later. A layer of another
    dtype makes DDP itself raise an error later."""
    found = []
    for steps in (0,) if how == "a part" else (0, 2):
        module = layers()
        ddp = DDP(module)
        state = sidcomp.State(**SPARSE)
        with warned() as caught:
            register(ddp, state)
            for _ in range(steps):
                forward(module, ddp).backward()
            CONVERSIONS[how](module)
            with torch.no_grad():
                forward(module, ddp)
            assert not caught, "a program may evaluate in another dtype"
            if how == "to":
                with sidcomp.strict(), pytest.raises(sidcomp.StrictError, match="was converted"):
                    forward(module, ddp)
            else:
                for step in range(2):
                    forward(module, ddp).backward()
                    assert len(caught) == (rank == 0 and (step > 0 or how != "and back")), step
            assert state.stats()["steps"] == steps, "DDP has not called the hook again"
            found += caught
            warnings.simplefilter("ignore")
            state.close()
            if how != "and back":  # which leaves nothing to see before a forward pass
                with pytest.raises(sidcomp.SetupError, match="since DDP wrapped the module"):
                    register(ddp, sidcomp.State(**SPARSE))
    return found


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_module_that_was_converted_after_ddp_wrapped_it_is_spoken_of(how: str) -> None:
    ours, other = run(converted, 2, how)
    assert not other and len(ours) == {"to": 0, "a part": 1}.get(how, 2)
    for text in ours:
        into = {"half": "to float16 on cpu", "double": "to float64 on cpu", "a part": "to bfloat16 on cpu"}
        assert "was converted since DDP wrapped the module, " in text and into.get(how, "and back") in text
        assert "the ranks drift apart" in text and "before DDP(module)" in text


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_module_that_was_converted_under_updates_is_refused(rank: int, world: int, kind: str) -> None:
    for steps in (0, 2):
        for how in ("half", "double", "to") if steps else ("to", "a part"):
            module = layers()
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            with sidcomp.State(**SPARSE) as state:
                updates(kind, module, optimizer, state, every=1)
                for _ in range(steps):
                    forward(module, module).backward()
                    optimizer.step()
                CONVERSIONS[how](module)
                before = [p.detach().clone() for p in module.parameters()]
                said = r"since sidcomp.compress\(\) was called, from float32 on cpu to "
                with pytest.raises(sidcomp.SetupError, match=said):
                    optimizer.step()
                after = list(module.parameters())
                assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    state.close()


# ---- a program that resumes without its State --------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
}


class Run:
    """Some steps of one door: "follow" and "register" are DDP's, with and without following the optimizer."""

    def __init__(self, door: Any, kind: str, own: sidcomp.State | None) -> None:
        self.module = layers()
        self.optimizer = OPTIMIZERS[kind](self.module.parameters())
        self.state, self.door, self.model = own, door, self.module
        self.updates: Any = None

    def begin(self) -> None:
        if self.state is None:
            return
        if self.door in ("follow", "register"):
            self.model = DDP(self.module)  # type: ignore[assignment]
            register(self.model, self.state)  # type: ignore[arg-type]
            if self.door == "follow":
                self.state.follow(self.optimizer)
        else:
            self.updates = updates(self.door, self.module, self.optimizer, self.state, every=1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            forward(self.module, self.model).backward()
            draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
            for p in (
                self.module.parameters() if self.door in KINDS else ()
            ):  # each rank has its own gradients
                assert p.grad is not None
                p.grad += torch.randn(p.shape, generator=draw)
            self.optimizer.step()


def saved_by(door: Any, kind: str) -> dict[str, Any]:
    """The checkpoint that another process, without DDP, has written."""
    run = Run(door, kind, None)
    run.train(5)
    buffer = io.BytesIO()
    torch.save(run.optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


def resumed(rank: int, world: int, door: Any, kind: str) -> dict[str, list[str]]:
    """The lines about the optimizer's steps, by what the program does."""
    told: dict[str, list[str]] = {}

    def nothing(run: Run) -> None: ...

    def load(run: Run) -> None:
        run.optimizer.load_state_dict(saved_by(door, kind))

    def load_all(run: Run) -> None:
        load(run)
        run.state.load_state_dict(kept)  # type: ignore[union-attr]

    def warm_up(run: Run) -> None:
        run.train(3)

    def take_over(run: Run) -> None:  # a second State in one process
        run.module, run.model, run.optimizer = again.module, again.module, again.optimizer

    def say(name: str, before: Any, after: Any = nothing, codec: str = "topk") -> Run:
        run = Run(door, kind, sidcomp.State(codec))
        seen = len(said())
        before(run)
        run.begin()
        after(run)
        run.train(3)
        told[name] = [line for line in said()[seen:] if "steps behind it" in line]
        return run

    kept = copy.deepcopy(say("fresh", nothing).state.state_dict())  # type: ignore[union-attr]
    say("resumed", load)
    say("resumed after the State was made", nothing, load)
    say("resumed with its State", nothing, load_all)
    say("after steps without sidcomp", warm_up)
    say("nothing is kept", load, codec="none")
    again = say("resumed again", load)
    assert again.state is not None
    if again.updates is not None:
        again.updates.close()
    again.state.close()
    say("a second State", take_over)
    return told


@pytest.mark.parametrize(
    ("door", "kind"),
    [
        ("follow", "AdamW"),
        ("register", "momentum"),
        ("register", "fused"),
        ("register", "SGD"),
        ("parameters", "AdamW"),
        ("memory", "momentum"),
        ("outer", "AdamW"),
    ],
)
def test_a_run_that_resumes_without_its_state_is_told_so(door: Any, kind: str) -> None:
    ours, other = run(resumed, 2, door, kind)
    assert not any(other.values())
    for name, lines in ours.items():
        alone = name in ("resumed", "resumed after the State was made", "resumed again")
        assert len(lines) == (alone and kind != "SGD"), (name, lines)  # plain SGD has nothing to load
        for line in lines:
            its = "SGD" if kind == "momentum" else "AdamW"
            assert line.startswith(
                f'{its} has steps behind it, from a checkpoint, and State("topk") has none'
            )
            local = "the state_dict() of sidcomp.compress() and " if door in KINDS else ""
            assert f"Save {local}state.state_dict() on every rank" in line
