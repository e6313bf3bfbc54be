"""The probe on real ranks: the same curves everywhere, within the budget of rank 0, and nothing disturbed."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from common import CODECS, KINDS
from harness import on_ranks, run
from sidcomp import _core
from sidcomp.autotune import collective_benchmark, probe
from sidcomp.autotune.collective_benchmark import Exchanging, Overlapped, Series, Wait, Wire, wire_of
from sidcomp.config.exchange_choice import ExchangeChoice
from sidcomp.errors import ExchangeError
from sidcomp.planner.cost_curve import Curve, fit, low
from sidcomp.planner.profile import Method, Profile
from sidcomp.runtime import point_to_point
from sidcomp.runtime.communicator import Exchange

CPU = torch.device("cpu")
EVERY = [probe.Candidate(name) for name in KINDS]
BUDGET = 0.4


def make_exchange() -> Exchange:
    return Exchange(dist.group.WORLD, CPU)


def measure(candidates: list[probe.Candidate], total: int, **arguments: Any) -> probe.Measurement:
    exchange = make_exchange()
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "budget_s": BUDGET, **arguments}
    try:
        return probe.measure(candidates, exchange, total, **settings)
    finally:
        exchange.close()


# ---- what comes out ----------------------------------------------------------------------------------------


def all_codecs(rank: int, world: int, total: int, dtype: torch.dtype) -> probe.Measurement:
    return measure(EVERY, total, dtype=dtype, budget_s=60.0)  # enough for every size


@pytest.mark.parametrize("world, total, dtype", [
    (2, 2**18, torch.float32), (1, 2**16, torch.float16), (3, 2**16, torch.bfloat16)
])  # fmt: skip
def test_all_ranks_get_the_same_curves_of_every_codec(world: int, total: int, dtype: torch.dtype) -> None:
    results = run(all_codecs, world, total, dtype)
    assert all((r.methods, r.contention) == (results[0].methods, results[0].contention) for r in results)
    dense, *others = results[0].methods
    assert (dense.name, dense.exchange, dense.encode) == ("dense", "allreduce", None)
    assert dense.decode is not None and dense.decode.knots[-1][0] == total  # of groups that are no bucket
    assert [m.name for m in others] == [c.name for c in EVERY]
    for m in others:
        assert m.exchange == ("allreduce" if CODECS[m.codec].linear else "allgather")
        assert m.encode is not None and m.decode is not None
    for m in results[0].methods:
        assert m.contended is not None
        for curve in (m.encode, m.exchange_curve, m.contended, m.decode):
            assert curve is None or curve.at(total) > 0, m.name
    # Exchanges are measured once for messages of a kind; each method has them over its own bytes of gradient.
    messages: dict[Wire, set[int]] = {}
    for candidate, m in zip(EVERY, others, strict=True):
        wire, whole = wire_of(candidate.plan(total, dtype, None))
        if upto := m.exchange_curve.knots[-1][0]:  # else one size was enough
            last = wire_of(candidate.plan(upto, dtype, None))[1]
            assert last >= whole
            messages.setdefault(wire, set()).add(last)
    assert all(max(sizes) - min(sizes) < 128 for sizes in messages.values()), messages
    assert set(results[0].contention) == {"compute_permille"}


def by_messages(rank: int, world: int, total: int) -> probe.Measurement:
    codecs = {"twoshot": "topk", "hierarchical": "topk", "ring1": "signsgd"}
    choices = ExchangeChoice.parse(list(codecs), {"ranks_per_node": 2})
    in_messages = [probe.Candidate(codecs[r.exchange.name], "none", choice=r) for r in choices]
    return measure([*in_messages, probe.Candidate("topk")], total, budget_s=60.0)


def test_exchanges_of_messages_are_measured_like_the_others() -> None:
    results = run(by_messages, 4, 2**17)
    assert all(r.methods == results[0].methods for r in results)
    _, *in_messages, topk = results[0].methods
    assert [m.exchange for m in in_messages] == ["twoshot", "hierarchical", "ring1"]
    assert in_messages[0].name == "topk/none over twoshot" and topk.name == "topk"
    for m in in_messages:
        for curve in (m.encode, m.exchange_curve, m.contended, m.decode):
            assert curve is not None and curve.knots[-1][0] == 2**17, m.name
            assert curve.at(2**17) > 0, m.name


@on_ranks(3)
def test_what_messages_take_is_the_exchanges_cost(rank: int, world: int) -> None:
    """Messages that take 20 milliseconds longer are seen in the exchange."""
    real = point_to_point.post

    def paced(*arguments: Any) -> Any:
        time.sleep(0.02)
        return real(*arguments)

    point_to_point.post = paced
    (choice,) = ExchangeChoice.parse(["twoshot"], {})
    m = measure([probe.Candidate("topk", choice=choice)], 2**14, budget_s=3.0).methods[1]
    encode, exchange, decode = (
        curve.at(2**14) for curve in (m.encode, m.exchange_curve, m.decode) if curve is not None
    )
    assert exchange >= 35 * 10**9  # two rounds
    assert m.contended is None or m.contended.at(2**14) >= 35 * 10**9  # a busy machine has no time for it
    assert encode + decode < exchange


def slow_encode(rank: int, world: int) -> list[int]:
    original = _core.Plan.encode
    if rank == 1:

        def slowed(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.003)
            return original(*arguments, **named)

        _core.Plan.encode = slowed  # type: ignore[method-assign]
    topk = measure([probe.Candidate("topk")], 2**14).methods[1]
    assert topk.encode is not None
    return [ps for _, ps in topk.encode.knots[1:]]  # of sizes that were measured


def test_the_slowest_rank_counts() -> None:
    one, other = run(slow_encode, 2)
    assert one == other and min(one) >= 3 * 10**9


DISTURBED = 20 * 10**9  # ps


def disturbed(rank: int, world: int, slow: set[int]) -> tuple[int, list[int]]:
    """The cost of encode where some of five turns are disturbed, and by each choice of three turns."""
    original, turn, begin = _core.Plan.encode, [-1], probe._Turn.__init__

    def next_turn(*arguments: Any) -> None:
        turn[0] += 1
        begin(*arguments)

    def slowed(*arguments: Any, **named: Any) -> Any:
        time.sleep(DISTURBED / 10**12 if turn[0] in slow else 0)
        return original(*arguments, **named)

    probe._Turn.__init__ = next_turn  # type: ignore[method-assign, assignment]
    _core.Plan.encode = slowed  # type: ignore[method-assign]
    found = measure([probe.Candidate("topk")], 2**14, budget_s=1.0, turns=5, level=low)
    costs = [m.encode.at(2**14) for _, m in [found.methods, *found.parts] if m.encode is not None]
    return costs[0], costs[1:]


@pytest.mark.parametrize("slow", [{2}, {0, 1, 3}])
def test_a_disturbed_turn_does_not_count_and_is_seen_where_it_decides(slow: set[int]) -> None:
    for whole, parts in run(disturbed, 2, slow):
        assert whole < DISTURBED and len(parts) == 10
        assert min(parts) < DISTURBED
        assert (max(parts) >= DISTURBED) == (len(slow) == 3)  # three turns of which none is undisturbed


def to_a_plan(rank: int, world: int, path: str) -> dict[str, Any]:
    candidates = [
        probe.Candidate("topk", parameters={"density": 0.01}),
        probe.Candidate("fp16"),
    ]
    measured = measure(candidates, 2**18)
    tensors = [
        {"name": f"t{i}", "bytes": 2**16, "bucket": i // 2, "ready_ps": 10**9 * i, "kind": "float32 cpu"}
        for i in range(4)
    ]
    profile = Profile(
        model="0", world=world, device="cpu", backend="gloo", threads=1, tensors=tensors, forward_ps=0,
        compute_ps=4 * 10**9, dense_ps=9 * 10**9, methods=measured.methods,
        contention=measured.contention, measured_s=measured.seconds,
    )  # fmt: skip
    if rank == 0:
        profile.save(path)
    return profile.instance()


def test_a_measured_profile_is_saved_and_planned_from(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    one, other = run(to_a_plan, 2, str(path))
    profile = Profile.load(path)
    assert profile.instance() == one == other
    assert [m["name"] for m in one["methods"]] == ["dense", "topk density=0.01", "fp16"]
    plan = {"ends": [2, 4], "methods": [1, 0]}
    assert sidcomp.planner.evaluate(one, plan)["time_ps"] > 3 * 10**9


# ---- the budget --------------------------------------------------------------------------------------------

RATE = 2 * 2**20  # bytes a second: beside it, no disturbance of this machine matters


class SlowExchange(Exchange):
    largest = 0  # bytes

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        nbytes = tensor.numel() * tensor.element_size()
        self.largest = max(self.largest, nbytes)
        time.sleep(nbytes / RATE)
        return super().all_reduce(tensor)


def slow_network(rank: int, world: int, total: int) -> tuple[list[list[int]], int]:
    exchange = SlowExchange(dist.group.WORLD, CPU)
    # Rank 1 would measure for an hour: the clock of rank 0 decides.
    budget = 0.3 if rank == 0 else 3600.0
    dense = probe.measure([], exchange, total, torch.float32, CPU, budget).methods[0]
    exchange.close()
    return dense.exchange_curve.knots, exchange.largest


def test_what_does_not_fit_the_budget_goes_on_by_the_slope() -> None:
    total = 2**23  # four seconds
    one, other = run(slow_network, 2, total)
    assert one == other
    knots, largest = one
    assert largest < total == knots[-1][0]
    # No point is faster than the rate. One that a busy machine slowed makes the slope behind it less.
    assert knots[-1][1] >= 0.4e12 * total / RATE


class Linear(Series):
    """Takes a second for a megabyte."""

    def measure(self, nbytes: int, repeats: int) -> list[list[int]]:
        return [[10**9 * nbytes // 2**20] * repeats]


def test_repeats_fill_a_share_of_the_time() -> None:
    one = Linear("one", [], 0.0)
    assert one.affordable(2**18, share_s=0.1, left_s=9.0) > 1  # nothing is known yet
    for nbytes in (2**18, 2**19):
        one.take(nbytes, 3)
    assert one.affordable(2**20, share_s=4.5, left_s=9.0) == 4
    assert one.affordable(2**22, share_s=4.5, left_s=9.0) == 1  # 4 s: nearly all the share
    assert one.affordable(2**22, share_s=1.0, left_s=9.0) == 1  # more than it, but not all that is left
    assert one.affordable(2**23, share_s=4.5, left_s=9.0) == 0
    assert one.affordable(2**16, share_s=-1.0, left_s=-1.0) == 1  # small ones always


def progress_of(rank: int, world: int) -> list[tuple[str, float]]:
    observed: list[tuple[str, float]] = []
    measure([probe.Candidate("topk")], 2**16, progress=lambda what, part: observed.append((what, part)))
    return observed


def test_progress_is_told() -> None:
    observed = run(progress_of, 2)[0]
    fractions = [part for _, part in observed]
    assert fractions == sorted(fractions) and 0 <= fractions[0] <= fractions[-1] <= 1
    assert "topk, 64 KB" in [what for what, _ in observed]
    assert "all-reduce of float32, 64 KB" in [what for what, _ in observed]


# ---- ranks that share processors ---------------------------------------------------------------------------

STARVED = 137  # an exchange is so many times as slow while all ranks compute


class Machine:
    """A clock, and an exchange that hardly travels while the ranks compute on the cores that carry it."""

    def __init__(self) -> None:
        self.ns = self.left = 0
        self.done: Callable[[], None] | None = None

    def read(self) -> int:
        self.ns += 1
        return self.ns

    def start(self, ns: int, done: Callable[[], None]) -> Wait:
        self.left, self.done = ns, done
        return self.rest

    def compute(self, ns: int) -> None:
        travelling = min(ns, self.left * STARVED)
        self._travel(travelling, STARVED)
        self.ns += ns - travelling

    def rest(self) -> None:
        self._travel(self.left, 1)

    def _travel(self, ns: int, times: int) -> None:
        self.ns += ns
        self.left -= ns // times
        if self.left < 1000 and self.done is not None:
            done, self.left, self.done = self.done, 0, None
            done()


class Carried(Exchanging):
    """Takes 10 ns a byte if no rank computes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("carried", [2**14, 2**20], 0.0)
        self.machine = machine
        self.points = [(nbytes, [[10 * nbytes]]) for nbytes in self.sizes]

    def message(self, nbytes: int) -> int:
        return 10 * nbytes

    def meet(self, message: int) -> None: ...

    def begin(self, message: int, done: Callable[[], None]) -> Wait:
        return self.machine.start(message, done)


def overlapped_curve(machine: Machine, beside_ns: int | None) -> Curve:
    series = Overlapped(Carried(machine), [2**14, 2**20], beside_ns)
    for nbytes in series.sizes:
        series.take(nbytes, 3)
    return fit([(nbytes, samples[0]) for nbytes, samples in series.points], 2**20)


def test_an_exchange_beside_a_backward_pass_is_not_measured_beside_an_endless_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where ranks share cores, a step computes until its backward pass ends; then the exchange has the cores.
    The prediction is within a tenth of the step. Beside an endless pass it would be 16 times the step."""
    machine, backward = Machine(), 50_000_000
    monkeypatch.setattr(collective_benchmark, "perf_counter_ns", machine.read)
    monkeypatch.setattr(collective_benchmark.Product, "run", lambda _: machine.compute(500_000))
    ends: list[int] = []
    began, wait = machine.ns, machine.start(10 * 2**20, lambda: ends.append(machine.ns))
    for _ in range(100):
        machine.compute(backward // 100)
    wait()
    step = 1000 * (ends[0] - began)

    def predicted(contended: Curve) -> int:
        tensors = [
            {"name": name, "bytes": size, "bucket": i, "ready_ps": 1000 * backward * i, "kind": "float32 cpu"}
            for i, (name, size) in enumerate([("a", 2**20), ("b", 0)])
        ]
        alone = fit([(2**14, [10 * 2**14]), (2**20, [10 * 2**20])], 2**20)
        dense = Method("dense", "none", "allreduce", None, alone, None, contended)
        profile = Profile(
            model="0", world=8, device="cpu", backend="gloo", threads=1, tensors=tensors, forward_ps=0,
            compute_ps=1000 * backward, dense_ps=step, methods=[dense],
        )  # fmt: skip
        instance = profile.instance()
        return int(sidcomp.planner.evaluate(instance, {"ends": [2], "methods": [0]})["time_ps"])

    endless, ended = overlapped_curve(machine, None), overlapped_curve(machine, backward)
    assert endless.at(2**20) > 16 * step
    assert ended.at(2**20) == pytest.approx(step, rel=0.1)
    assert ended.at(2**14) == pytest.approx(endless.at(2**14), rel=0.1)  # ends within the pass
    assert predicted(ended) <= 1000 * backward + 1.1 * step  # a group of both leaves when the pass has ended


# ---- nothing is disturbed ----------------------------------------------------------------------------------


@on_ranks(2)
def test_training_is_not_disturbed(rank: int, world: int) -> None:
    model = torch.nn.Linear(50, 50)
    model(torch.ones(2, 50)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    measure(EVERY, 2**16)  # whatever is loaded once
    gc.collect()
    before = sum(torch.is_tensor(x) for x in gc.get_objects())
    kept = measure(EVERY, 2**18)
    gc.collect()
    assert sum(torch.is_tensor(x) for x in gc.get_objects()) <= before
    assert kept.methods
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, g)


# ---- what goes wrong ---------------------------------------------------------------------------------------


def lose_a_peer(rank: int, world: int, where: str, how: int) -> str:
    """Ends where the probe comes to `where` a second time: between two of its collectives."""
    times = 0

    def progress(what: str, fraction: float) -> None:
        nonlocal times
        times += what.startswith(where)
        if rank == 1 and times == 2:
            os.kill(os.getpid(), how)

    with pytest.raises(ExchangeError) as caught:
        measure([probe.Candidate("topk")], 2**20, progress=progress)
    return str(caught.value)


@pytest.mark.parametrize("where, how", [
    ("topk", signal.SIGKILL), ("all-reduce", signal.SIGKILL), ("all-gather", signal.SIGSTOP)
])  # fmt: skip
def test_a_peer_that_goes_away_is_an_error(where: str, how: int) -> None:
    text = run(lose_a_peer, 2, where, how, dying=[1], group_timeout=4)[0]
    assert text.startswith("measuring for the plan: the exchange failed; a rank has ended")


def lose_a_peer_any_time(rank: int, world: int, after_s: float) -> str:
    if rank == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
        signal.setitimer(signal.ITIMER_REAL, after_s)
    exchange = make_exchange()
    with pytest.raises(ExchangeError) as caught:
        for _ in range(1000):
            probe.measure([probe.Candidate("topk")], exchange, 2**22, torch.float32, CPU, 1.0)
    exchange.close()
    return str(caught.value)


@pytest.mark.parametrize(
    "after_s", [0.3, *(pytest.param(0.1 * i, marks=pytest.mark.slow) for i in range(4, 12))]
)
def test_a_peer_dies_inside_a_measurement(after_s: float) -> None:
    assert run(lose_a_peer_any_time, 2, after_s, dying=[1], group_timeout=10)[0]


def stop_beside_computing(rank: int, world: int) -> str:
    run_product, overlapped, inside = (
        collective_benchmark.Product.run,
        collective_benchmark.Product.overlapped,
        False,
    )

    def computing(self: collective_benchmark.Product, begin: Any) -> tuple[int, int]:
        nonlocal inside
        inside = True
        return overlapped(self, begin)

    def stopping(self: collective_benchmark.Product) -> None:
        if inside:
            os.kill(os.getpid(), signal.SIGSTOP)
        run_product(self)

    if rank == 1:
        collective_benchmark.Product.overlapped = computing  # type: ignore[method-assign]
        collective_benchmark.Product.run = stopping  # type: ignore[method-assign]
    return lose_a_peer(rank, world, "never", 0)


@pytest.mark.slow
def test_a_peer_stops_while_a_rank_computes() -> None:
    assert run(stop_beside_computing, 2, dying=[1], group_timeout=4)[0]


@on_ranks(2)
def test_bad_candidates_are_refused_on_every_rank(rank: int, world: int) -> None:
    exchange, texts = make_exchange(), []
    for candidates, dtype in (
        ([probe.Candidate("topk"), probe.Candidate("topk")], torch.float32),
        ([probe.Candidate("topkk")], torch.float32),
        ([], torch.float64),
    ):
        with pytest.raises(sidcomp.SidcompError) as caught:
            probe.measure(candidates, exchange, 2**16, dtype, CPU)
        texts.append(str(caught.value))
    assert exchange.gather_bytes(b"x") == [b"x"] * world  # all ranks alike: none waits for another
    exchange.close()
    assert "named twice" in texts[0] and "topkk" in texts[1] and "convert the module" in texts[2]
