"""The papers' figures: gradients that are replayed, and tables that several machines make."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models import MODELS  # noqa: E402
from benchmarks.netlab import replay  # noqa: E402
from benchmarks.papers import sidco_fits, training  # noqa: E402


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
    figure = training.FIGURES["mergecomp-scaling"]
    record = {
        "machine": {"cpu": "old", "isa": "base"},
        "rows": [row("2", "topk", "0.5"), row("4", "topk", "0.25"), row("32", "topk", "0.1")],
    }
    (tmp_path / "papers-mergecomp-scaling.json").write_text(json.dumps(record))
    measured = {training.Place(2, "1gbit", "resnet50")}
    rows, places = training.kept_rows("mergecomp-scaling", figure, measured)
    assert rows == [record["rows"][1]], "2 hosts are measured again, 32 are no place of the figure"
    assert places == {"resnet50, 4 hosts, 1gbit": "cpu old, isa base"}
    record["places"] = {"resnet50, 4 hosts, 1gbit": "cpu older"}
    (tmp_path / "papers-mergecomp-scaling.json").write_text(json.dumps(record))
    assert training.kept_rows("mergecomp-scaling", figure, measured)[1] == {
        "resnet50, 4 hosts, 1gbit": "cpu older"
    }


def test_gains_compare_columns_that_were_measured() -> None:
    rows = [row("2", "topk", "0.500") | {"merged": "1.000"}, row("4", "dgc", "0.250") | {"merged": ""}]
    assert training.gains("merged", "layer", ("topk", "dgc"), rows) == [
        (2.0, "topk, resnet50, 2 hosts, 1gbit")
    ]


@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("exponential", lambda rng, n: rng.exponential(2, n)),
        ("gamma", lambda rng, n: rng.gamma(0.4, 2, n)),
        ("generalized Pareto", lambda rng, n: ((1 - rng.random(n)) ** -0.2 - 1) * 2 / 0.2),
    ],
)
def test_a_fit_finds_its_own_distribution(kind: str, draw: Any) -> None:
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("scipy")
    magnitudes = numpy.sort(draw(numpy.random.default_rng(0), 200_000))
    fits = {name: sidco_fits.Fit(name, magnitudes) for name in sidco_fits.FITS}
    distances = {name: fit.distance(magnitudes) for name, fit in fits.items()}
    assert distances[kind] < 0.02
    assert fits[kind].passes(magnitudes, 0.01) == pytest.approx(1, abs=0.15)
    if kind == "gamma":
        assert min(distances, key=lambda name: distances[name]) == "gamma"


def test_a_power_law_has_its_exponent() -> None:
    numpy = pytest.importorskip("numpy")
    ordered = numpy.arange(1, 200_001)[::-1] ** -0.7
    assert sidco_fits.exponent(ordered) == pytest.approx(0.7, abs=0.01)
    half, one, ten = sidco_fits.errors(ordered)
    whole = float((ordered**2).sum())
    assert one == pytest.approx(float((ordered[:198_000] ** 2).sum() / whole) ** 0.5)
    assert half > one > ten
