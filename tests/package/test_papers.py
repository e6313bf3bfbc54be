"""The papers' figures: gradients that are replayed, and tables that several machines make."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models import MODELS  # noqa: E402
from benchmarks.netlab import replay  # noqa: E402
from benchmarks.papers import training  # noqa: E402


class Small:
    """A task of three tensors."""

    title, lr, momentum = "three tensors", 0.1, 0.0

    def __init__(self, rank: int, world: int, batch: int, device: Any) -> None:
        self.rank = rank

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))

    def loss(self, model: Any, step: int, carry: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        return model(torch.randn(5, 3, generator=generator)).square().mean(), None


def test_a_replay_gives_the_recorded_gradients_and_the_last_one_first() -> None:
    task = replay.Replay(1, 2, 5, torch.device("cpu"), Small)
    model = task.model()
    ready: list[int] = []
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i))
    for step in range(3):
        model.zero_grad()
        loss, _ = task.loss(model, step, None)
        loss.backward()
        for p, expected in zip(model.parameters(), task.gradients[step % 2], strict=True):
            assert torch.equal(p.grad, expected) and expected.abs().sum() > 0
    assert ready[:3] == [2, 1, 0]
    assert not torch.equal(task.gradients[0][0], task.gradients[1][0])


class Slow(Small):
    """Its forward pass takes 20 ms, and the gradient of the first two parameters 10 ms more."""

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), _Late(), torch.nn.Linear(4, 2, bias=False))

    def loss(self, model: Any, step: int, carry: Any) -> tuple[Any, Any]:
        time.sleep(0.02)
        return super().loss(model, step, carry)


class _Late(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.01))
        return x


def test_a_pace_is_what_was_measured_and_a_paced_task_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(replay.Paced):
        pass

    task = Few(0, 1, 5, torch.device("cpu"), Slow)
    assert task.pace is not None and len(task.pace.backward) == 3
    assert task.pace.forward >= 0.02 and max(task.pace.backward[:2]) >= 0.01
    assert replay.Replay(0, 1, 5, torch.device("cpu"), Small).pace is None

    waited: list[float] = []
    monkeypatch.setattr(replay._Waiting, "wait", lambda self, seconds: waited.append(seconds))
    model = task.model()
    task.loss(model, 0, None)[0].backward()
    expected = [task.pace.forward, *(w for w in reversed(task.pace.backward) if w)]
    assert waited == expected, "forward first, then the last parameter's"
    for p, gradient in zip(model.parameters(), task.gradients[0], strict=True):
        assert torch.equal(p.grad, gradient)


def test_waits_that_take_too_long_shorten_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds + 2.0  # too long each time

    monkeypatch.setattr(replay.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(replay.time, "sleep", sleep)
    waiting = replay._Waiting()
    for _ in range(3):
        waiting.wait(3.0)
        clock[0] += 5.0  # what others do in between is not part of a wait
    waiting.wait(1.0)
    waiting.wait(1.5)
    assert slept == [3.0, 1.0, 1.0, 0.5], "a wait of 1 s was over before it began"


def test_models_of_one_replay_share_their_parameters() -> None:
    task = replay.Replay(1, 2, 5, torch.device("cpu"), Small)
    first, second = task.model(), task.model()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a is not b and a.data_ptr() == b.data_ptr()


def test_sizes_are_those_of_the_architecture_and_values_those_that_were_recorded() -> None:
    class Tiny(replay.Replay):
        model_name, pool = "ResNet50", 1

    task = Tiny(0, 2, 5, torch.device("cpu"), Small)
    sizes = [t.elements for t in next(m for m in MODELS if m.name == "ResNet50").tensors[::-1]]
    (gradients,) = task.gradients
    assert [len(g) for g in gradients] == sizes
    recorded = replay.record(Small(0, 2, 5, torch.device("cpu")), replay.STEPS, 1)[0]
    assert set(gradients[0].tolist()) <= set(recorded[0].tolist())
    assert set(gradients[-1].tolist()) <= set(recorded[-1].tolist())


def row(hosts: str, codec: str, layer: str) -> dict[str, str]:
    return {"task": "resnet50", "hosts": hosts, "link": "1gbit", "codec": codec, "layer": layer}


def test_a_table_keeps_the_rows_of_places_that_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "RESULTS", tmp_path)
    places = tuple(training.Place(hosts, "1gbit", "resnet50") for hosts in (2, 4))
    figure = training.FIGURES["mergecomp-scaling"]._replace(places=places)
    record = {
        "machine": {"cpu": "old", "isa": "base"},
        "rows": [row("2", "topk", "0.5"), row("4", "topk", "0.25"), row("32", "topk", "0.1")],
    }
    (tmp_path / "papers-mergecomp-scaling.json").write_text(json.dumps(record))
    measured = {training.Place(2, "1gbit", "resnet50")}
    rows, where = training.kept_rows("mergecomp-scaling", figure, measured)
    assert rows == [record["rows"][1]], "2 hosts are measured again, 32 are no place of the figure"
    assert where == {"resnet50, 4 hosts, 1gbit": "cpu old, isa base"}
    record["places"] = {"resnet50, 4 hosts, 1gbit": "cpu older"}
    (tmp_path / "papers-mergecomp-scaling.json").write_text(json.dumps(record))
    assert training.kept_rows("mergecomp-scaling", figure, measured)[1] == {
        "resnet50, 4 hosts, 1gbit": "cpu older"
    }


def test_hooks_that_stand_in_every_table_have_rows_of_their_own() -> None:
    names = ["none", "dense@0", "dense", *training.BESIDE, "topk:layer@0", "topk:mergecomp@0"]
    runs = [
        {"name": name, "ms": [float(10 * (i + 1))], "error": 0.5 if i > 2 else None}
        for i, name in enumerate(names)
    ]
    cell = {"task": "mlp", "hosts": 2, "rate": "1gbit", "result": {"runs": runs}}
    rows = training.by_codec(("layer", "mergecomp"), ("topk",), cell)
    assert [row["codec"] for row in rows] == ["topk", *training.BESIDE]
    wire = rows[1]
    assert wire["in groups of 25 MB"] == "0.250" and wire["error of one mean"] == "5.0e-01"
    assert not wire["layer"] and not wire["mergecomp / layer"]
