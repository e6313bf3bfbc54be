"""simulate: its bytes are the loopback's, its times add up, and the crossovers are those of the formulas."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import sidcomp
from sidcomp.simulation import Link, Loopback, simulate
from sidcomp.standalone.simulation import DENSE, Compute, Simulation, measure, methods
from typer.testing import CliRunner

FREE = Link(1.0, 0.0, 0.0)


def crossover(found: Simulation, exchange: str) -> int | None:
    """The smallest world from which on dense is faster; None: never within what was simulated."""
    slower = (w for w in found.worlds if found.row(exchange, w).seconds > found.row(DENSE, w).seconds)
    return next(slower, None)


@pytest.mark.parametrize("codec", ("topk", "marsit", "int8", "signsgd", "fp16"))
@pytest.mark.parametrize("world", (2, 3, 4, 8))
def test_bytes_are_what_the_loopback_counts(codec: str, world: int) -> None:
    n = 10_000
    found = simulate(n, codec, worlds=[world])
    assert len(found.rows) > 2
    for r in found.rows[1:]:
        loop = Loopback(world, r.exchange, codec, n)
        loop.step([np.ones(n, np.float32)] * world)
        bare = r.exchange == "allreduce"  # the process group's, which has no frames
        beside = -2 * (world - 1) * 32 if bare else loop.control_bytes
        assert r.bytes == loop.bytes_per_rank + beside, r.exchange
        rings = {"allreduce": 2 * (world - 1), "allgather": world - 1}
        assert r.rounds == rings.get(r.exchange, loop.rounds + (loop.control_bytes > 0))


def test_time_is_latency_messages_and_bytes() -> None:
    n = 1 << 20
    slow = simulate(n, "marsit", worlds=[4], link=Link(2.0, 50.0, 10.0))
    dense, ring = slow.row("dense", 4), slow.row("ring1", 4)
    assert dense.seconds == pytest.approx(6 * 60e-6 + dense.bytes * 8 / 2e9)
    # six rounds of one message, and one of three that confirms
    assert ring.seconds == pytest.approx(7 * 50e-6 + 9 * 10e-6 + ring.bytes * 8 / 2e9)
    work = simulate(n, "marsit", worlds=[4], link=FREE, compute=Compute(1.0, 2.0, 4.0))
    assert work.row("ring1", 4).compute_seconds == pytest.approx(n * 1e-9 * (1 + 2 + 3))
    assert work.row("allgather", 4).compute_seconds == pytest.approx(n * 1e-9 * (1 + 8))
    assert work.row("dense", 4).compute_seconds == 0
    nodes, alone = (
        simulate(n, "topk", worlds=[4], ranks_per_node=k, compute=Compute(node_ns=4.0)) for k in (2, 1)
    )
    assert nodes.row("hierarchical", 4).compute_seconds == pytest.approx(4e-9 * n)
    assert nodes.row("twoshot", 4).compute_seconds == alone.row("hierarchical", 4).compute_seconds == 0


def test_connections_that_are_used_at_once_share_less_than_the_link() -> None:
    n, half = 1 << 20, Link(1.0, 0.0, 0.0, 1e6, 0.0, together=0.5)
    whole, shared = (
        simulate(n, "signsgd", worlds=[2, 8], link=link) for link in (Link(1.0, 0.0, 0.0, 1e6, 0.0), half)
    )
    ways = [(r.exchange, r.world) for r in whole.rows if r.exchange in ("twoshot", "allgather", "ring1")]
    assert {exchange for exchange, _ in ways} == {"twoshot", "allgather", "ring1"}
    for exchange, world in ways:
        before, after = whole.row(exchange, world), shared.row(exchange, world)
        # with two ranks there is one connection; rings have one at a time, but in the round that confirms
        slower = {"twoshot": 2.0, "allgather": 1.0, "ring1": 1.0}[exchange] if world > 2 else 1.0
        assert after.seconds / before.seconds == pytest.approx(slower, abs=0.02), (exchange, world)
    nodes = simulate(n, "topk", worlds=[4], link=half, ranks_per_node=2).row("hierarchical", 4)
    assert nodes.seconds > 8 * nodes.node_bytes / 1e9 * 1.9  # each rank of a node has a connection


def test_a_nodes_ranks_share_its_link() -> None:
    n = 1 << 20
    one, four = (
        simulate(n, "topk", worlds=[16], link=Link(1.0, 0.0, 0.0, 1e6, 0.0), ranks_per_node=k) for k in (1, 4)
    )
    gathered = four.row("allgather", 16)  # a ring crosses once a node
    assert gathered.seconds == pytest.approx(one.row("allgather", 16).seconds, rel=1e-3)
    two = four.row("twoshot", 16)  # everybody talks to everybody
    assert two.node_bytes == pytest.approx(4 * 12 / 15 * two.bytes, rel=0.02)
    nodes = four.row("hierarchical", 16)
    assert nodes.node_bytes < gathered.node_bytes / 4


@pytest.mark.parametrize(
    ("codec", "settings", "expected"),
    [
        ("signsgd", {}, 64 / 1),  # W < 64 / b bits an element
        ("int4", {}, 64 / 4.125),
        ("topk", {"density": 0.01}, 8 / (0.01 * 6)),  # W < 8 / (d s) bytes an element sent
        ("topk", {"density": 0.001}, 8 / (0.001 * 6)),
    ],
)
def test_all_gather_crosses_dense_where_the_formula_says(
    codec: str, settings: dict[str, float], expected: float
) -> None:
    worlds = sorted({max(2, round(expected * f)) for f in (0.5, 0.9, 0.97, 1.03, 1.1, 2)})
    found = simulate(1 << 22, codec, worlds=worlds, link=FREE, exchange=["allgather"], **settings)
    first = crossover(found, "allgather")
    assert first is not None and 0.95 <= first / expected <= 1.12, (first, expected)


def test_what_wins() -> None:
    signs = simulate(1 << 24, "marsit", link=Link(10.0, 20.0))
    assert signs.best(2).exchange in ("allgather", "ring1", "torus1")
    assert signs.best(64).exchange == "torus1"
    assert signs.best(4096).exchange == "torus1"
    assert crossover(signs, "torus1") is None and crossover(signs, "allgather") in (64, 128)
    assert simulate(1000, "topk", worlds=[2], link=Link(400.0, 50.0)).row("dense", 2).rounds == 2
    assert [r["world"] for r in signs.table()] == signs.worlds


def test_the_planner_chooses_exchanges() -> None:
    """Groups of one model, each with the exchange that suits it: ldp's choice beats every single one."""
    tensors = [
        {"name": f"t{i}", "backward_ps": 2_000_000_000, "bytes": size}
        for i, size in enumerate([4096] * 6 + [40 << 20, 8192, 60 << 20] + [4096] * 4)
    ]
    candidates: dict[str, tuple[str, str, dict[str, float]]] = {
        "topk gathered": ("topk", "allgather", {"density": 0.01}),
        "topk two-shot": ("topk", "twoshot", {"density": 0.01}),
        "signs": ("marsit", "torus1", {}),
    }
    cost = {name: Compute(0.5, 0.5 if name == "signs" else 0.02) for name in candidates}
    link = Link(10.0, 30.0, 5.0)
    chosen = {}
    for world in (2, 16):
        made = methods(candidates, world, link, cost, most_bytes=1 << 28)
        assert [m["name"] for m in made] == ["dense", *candidates]
        instance = {"forward_ps": 10_000_000_000, "tensors": tensors, "methods": made}
        plan = sidcomp.planner.plan(instance, "ldp")
        for m in range(4):
            ends = list(range(1, len(tensors) + 1))
            for cut in (ends, [len(tensors)]):
                other = sidcomp.planner.evaluate(instance, {"ends": cut, "methods": [m] * len(cut)})
                assert plan["time_ps"] <= other["time_ps"]
        chosen[world] = {made[m]["name"] for m in plan["methods"]}
    assert "topk gathered" in chosen[2] and "topk two-shot" not in chosen[2]
    assert chosen[16] & {"topk two-shot", "signs"} and "topk gathered" not in chosen[16]


def test_lines_that_lie_on_each_other_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank a node hierarchical takes about as long as all-gather: its line is thinner and above."""
    figures = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path, **_: made.append(figure))
    simulate(1 << 20, "marsit", worlds=[2, 4, 8]).plot(os.devnull)
    lines = {line.get_label(): line for line in made[0].axes[0].lines}
    assert len({line.get_marker() for line in lines.values()}) == len(lines) == 5
    below, above = lines["allgather"], lines["hierarchical"]
    assert below.get_linewidth() > 2 * above.get_linewidth() and below.get_alpha() < above.get_alpha()


def test_draws_and_prints(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulate(1 << 20, "int8", worlds=[2, 4, 8]).plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    from sidcomp.cli.app import app

    done = CliRunner().invoke(app, ["simulate", "marsit", "-n", "1000000", "--gbit", "10"])
    assert done.exit_code == 0 and "torus1" in done.stdout and "4096" in done.stdout
    done = CliRunner().invoke(app, ["simulate", "topk", "-n", "1000", "--param", "density=0.1", "--json"])
    rows = json.loads(done.stdout)
    assert rows[0]["exchange"] == "dense" and {r["world"] for r in rows} == set(simulate(1).worlds)
    done = CliRunner().invoke(app, ["simulate", "tokp"])
    assert done.exit_code == 2


def test_measures_this_machine() -> None:
    c = measure("marsit", 1 << 16)
    assert 0 < c.encode_ns < 1000 and 0 < c.decode_ns < 1000 and c.merge_ns >= 0
    topk = measure("topk", 1 << 16, density=0.01)
    assert topk.merge_ns == 0 <= topk.node_ns < 1000
    assert measure("powersgd", 1 << 16).node_ns == 0  # which does not go by nodes


def test_refusals() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="latency_us"):
        Link(1.0, -1.0)
    with pytest.raises(sidcomp.ArgumentError, match="gbit"):
        Link(0.0)
    with pytest.raises(sidcomp.ArgumentError, match="together"):
        Link(together=1.5)
    with pytest.raises(sidcomp.ArgumentError, match="5000"):
        simulate(10, "topk", worlds=[5000])
    with pytest.raises(sidcomp.ArgumentError, match="twoshot"):
        simulate(10, "topk", exchange=["ring1"])
    with pytest.raises(sidcomp.ParameterError, match="rign"):
        simulate(10, "topk", exchange=["rign"])
    with pytest.raises(sidcomp.ArgumentError, match="no row"):
        simulate(10, "topk", worlds=[2]).row("ring1", 2)


@pytest.mark.parametrize("exchange", [e.name for e in sidcomp.exchanges()])
def test_every_exchange_states_what_it_computes(exchange: str) -> None:
    """In vectors of n elements: at least one encode and decode among all ranks that share a vector."""
    codecs = {"allreduce": "fp16", "ring1": "marsit", "torus1": "marsit", "expand": "signsgd"}
    x = sidcomp._core.Exchange(exchange, codecs.get(exchange, "topk"), "none", 4096, "float32", 0, 4, {})
    assert x.encoded >= 1 and x.decoded >= 1 and 0 <= x.merged < 1
    assert (x.ring_passes > 0) == (sidcomp.config.registry.find_exchange(exchange).family == "collective")


@pytest.mark.parametrize("exchange", [e.name for e in sidcomp.exchanges()])
def test_ranks_do_not_all_send_to_the_same_one_at_once(exchange: str) -> None:
    """Their i-th messages go to different ranks: else they would queue for one link, and the others idle."""
    codecs = {"allreduce": "fp16", "ring1": "marsit", "torus1": "marsit", "expand": "signsgd"}
    nodes = {"ranks_per_node": 2} if exchange == "hierarchical" else {}
    codec, several = (codecs.get(exchange, "topk"), "none", 1 << 14, "float32"), 0
    ranks = [sidcomp._core.Exchange(exchange, *codec, r, 6, nodes) for r in range(6)]
    for i in range(ranks[0].rounds):
        for receive in (False, True):
            peers = [[peer for peer, _, _ in x.messages(i, receive)] for x in ranks]
            several += len(peers[0]) > 1
            for at_once in zip(*peers, strict=True):
                assert len(set(at_once)) == len(ranks), (i, receive, peers)
    assert several  # of the round in which ranks confirm, if of no other
