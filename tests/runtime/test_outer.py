"""An outer optimizer moves the point, exchanges take place in the background, and parts travel one by one."""

from __future__ import annotations

import copy
import functools
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import (
    KINDS,
    OPTIMIZERS,
    alike,
    backward,
    error_of,
    flat,
    learns,
    mean,
    network,
    resumes,
    sgd,
    train,
    updates,
)
from sidcomp.local.vectors import Vectors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

EVERY = 4
SLOW = pytest.mark.slow


def cut_in(module: nn.Module, parts: int) -> list[list[nn.Parameter]]:
    """The parameters of each part: the split of the reversed list whose largest run is the smallest."""
    p = list(reversed(list(module.parameters())))
    sizes = [x.numel() for x in p]
    ways = [(0, *at, len(p)) for at in combinations(range(1, len(p)), parts - 1)]
    best = min(max(sum(sizes[a:b]) for a, b in pairwise(way)) for way in ways)
    found = [w for w in ways if max(sum(sizes[a:b]) for a, b in pairwise(w)) == best]
    assert len(found) == 1, "another network, so that the test knows the cut"
    return [p[a:b] for a, b in pairwise(found[0])]


ADAMW = functools.partial(torch.optim.AdamW, lr=0.02)


@pytest.mark.parametrize(
    "outer, every, delay, parts",
    [
        (sgd(), EVERY, 0, 1),
        (sgd(nesterov=False), EVERY, 0, 1),
        (sgd(momentum=0.0), EVERY, 0, 1),
        (sgd(), EVERY, 1, 1),
        pytest.param(sgd(), EVERY, EVERY, 1, marks=SLOW),
        (sgd(), 2 * EVERY, 0, 2),
        (sgd(), 2 * EVERY, 2, 2),
        pytest.param(sgd(), 2 * EVERY, 1, 3, marks=SLOW),
        (ADAMW, EVERY, 0, 2),
    ],
)
@on_ranks(2)
def test_without_a_codec_it_is_diloco(
    rank: int, world: int, outer: Any, every: int, delay: int, parts: int
) -> None:
    """Streaming DiLoCo as torch's own optimizers compute it from averaged pseudo-gradients, a part at a time,
    each of which is in flight during `delay` steps; beside ours with codec none."""
    point, model, ours = network(0), network(0), network(rank)  # rank 0's parameters count
    adam, of_ours = (OPTIMIZERS["Adam"](m.parameters()) for m in (model, ours))
    points, mine = cut_in(point, parts), cut_in(model, parts)
    moves = [outer(part) for part in points]
    left: dict[int, list[torch.Tensor]] = {}  # of the part that is in flight, as it left

    def land(i: int) -> None:
        moves[i].step()
        with torch.no_grad():
            for p, at, x in zip(mine[i], points[i], left.pop(i), strict=True):
                p.add_(at - x)

    with sidcomp.State("none") as state:
        how = {"every": every, "delay": delay, "parts": parts, "outer": outer}
        made = updates("memory", ours, of_ours, state, **how)
        for step in range(6 * every + delay):
            train(model, adam, rank, range(step, step + 1))
            train(ours, of_ours, rank, range(step, step + 1))
            for i in range(parts):
                since = step + 1 - i * every // parts
                if i in left and since % every == delay % every:
                    land(i)
                if since >= 0 and since % every == 0:
                    left[i] = [p.detach().clone() for p in mine[i]]
                    for p, x in zip(points[i], left[i], strict=True):
                        p.grad = p.detach() - x
                        dist.all_reduce(p.grad)
                        p.grad /= world
                    if not delay:
                        land(i)
            own = flat(ours)
            with made.common() as common:
                assert alike(common)
                torch.testing.assert_close(flat(common), flat(point), rtol=1e-3, atol=1e-4)
            assert torch.equal(flat(ours), own)
    assert alike(ours) is (delay == 0 and parts == 1)
    theirs, ours, start = flat(model), flat(ours), flat(network(0))
    assert (theirs - ours).norm() < 1e-4 * (theirs - start).norm()


def with_closure(rank: int, world: int, kind: str, same: bool) -> tuple[float, float, float]:
    """LBFGS, which calls its closure several times in a step, beside a run without averaging. same: the ranks
    have the same batch, so that averaging moves nothing."""
    calls = 0

    def trains(averages: bool) -> tuple[list[float], torch.Tensor]:
        module = network(0)
        lbfgs = torch.optim.LBFGS(module.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += averages
            lbfgs.zero_grad()
            # Gradients that are the same to the bit would raise an alarm.
            return torch.tensor(backward(module, 0 if same else rank, 0, scale=1 + 1e-6 * rank))

        if not averages:
            return [float(lbfgs.step(closure)) for _ in range(12)], flat(module)
        more: dict[str, Any] = {"lr": 1, "momentum": 0} if kind == "outer" else {}
        with sidcomp.State("none") as state:
            updates(kind, module, lbfgs, state, every=2, **more)
            losses = [float(lbfgs.step(closure)) for _ in range(12)]
            assert alike(module)
        return losses, flat(module)

    (losses, ours), (_, alone) = trains(True), trains(False)
    assert calls >= 24
    return losses[0], losses[-1], float((ours - alone).norm() / alone.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_may_take_a_closure(kind: str) -> None:
    for first, last, far in run(with_closure, 2, kind, True):
        assert far < 1e-4 and last < 1e-3 * first
    for first, last, far in run(with_closure, 2, kind, False):
        assert far > 0.1 and last < 0.5 * first


def test_the_default_learns_at_few_bytes() -> None:
    how = {"every": EVERY, "lr": 0.5, "momentum": 0.6}
    for first, last, stats in run(learns, 2, "outer", "Adam", None, 40, how):
        assert last < 0.5 * first and stats["ratio"] > 20


@pytest.mark.parametrize(
    "stop, delay, parts, noise",
    [
        (6, 0, 1, False),
        (6, 3, 1, True),
        (7, 2, 2, False),  # the second part is in flight
        (9, 2, 2, True),  # the first part is, and so are the sketches
        pytest.param(6, 3, 1, False, marks=SLOW),
        pytest.param(8, 0, 1, False, marks=SLOW),
        pytest.param(8, 3, 1, False, marks=SLOW),
        pytest.param(7, 0, 2, True, marks=SLOW),
    ],
)
def test_a_resumed_run_has_the_same_bits(stop: int, delay: int, parts: int, noise: bool) -> None:
    how = {"every": EVERY, "delay": delay, "parts": parts, "noise_correction": noise}
    run(resumes, 2, "outer", stop, 14, None, how)


def taken_over(rank: int, world: int, path: str, kind: str, every: int, delay: int) -> list[float]:
    """Two ranks save in the middle, between exchanges if `every` > 1; three take over. Returns the losses."""
    module = network(7 * rank)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    state = sidcomp.State("topk", density=0.1)
    more: dict[str, Any] = {"lr": 0.7, "momentum": 0.5} if kind == "outer" else {}
    outer = updates(kind, module, optimizer, state, every=every, delay=delay, **more)
    with state:
        if world == 3:
            files = [torch.load(f"{path}/{r}", weights_only=True) for r in range(2)]
            mine = files[rank % 2]
            module.load_state_dict(mine["module"])
            optimizer.load_state_dict(mine["optimizer"])
            state.load_state_dict([f["state"] for f in files])
            outer.load_state_dict(mine["outer"])
            assert outer.steps == TAKEN and not outer.flying
            point = {name: x for v in outer.vectors for name, x in v.named(v.point).items()}
            kept = error_of(state, module)
            with outer.common() as common:
                assert alike(common)
                assert all(torch.equal(p, point[name]) for name, p in common.named_parameters())
                own = flat(common) - kept if kind == "parameters" else flat(common)
            assert torch.equal(flat(module), own)
            if not delay:
                assert all(torch.equal(mine["outer"]["point"][name], x) for name, x in point.items())
            before = sum(f["error"].double() for f in files)
            # the sum of what was not sent
            torch.testing.assert_close(world * mean(kept), before, rtol=0, atol=1e-6)
        losses = train(module, optimizer, rank, range(TAKEN if world == 2 else 40))
        names = {"module": module, "optimizer": optimizer, "state": state, "outer": outer}
        if world == 2:
            saved: dict[str, Any] = {name: x.state_dict() for name, x in names.items()}
            torch.save({**saved, "error": error_of(state, module)}, f"{path}/{rank}")
    return losses


TAKEN = 9 * EVERY + 2  # steps before the checkpoint


@pytest.mark.parametrize(
    "kind, every, delay",
    [
        *[("memory", EVERY, 0), ("outer", EVERY, 0), ("outer", EVERY, 3)],
        *[("parameters", 1, 0), ("parameters", 1, 1), ("parameters", EVERY, EVERY)],
    ],
)
def test_another_number_of_ranks_takes_over(tmp_path: Path, kind: str, every: int, delay: int) -> None:
    before, after = (run(taken_over, world, str(tmp_path), kind, every, delay) for world in (2, 3))
    first = min(sum(x[:4]) for x in before)
    assert max(sum(x[:4]) for x in after) < 0.7 * first, "it goes on from there"
    assert max(sum(x[-4:]) for x in after) < 0.7 * first


@on_ranks(2)
def test_what_is_not_finite_is_undone(rank: int, world: int) -> None:
    module = network(0)
    inner = OPTIMIZERS["SGD"](module.parameters())
    outer = updates("outer", module, inner, every=1, momentum=0.5)
    with outer.state:
        for step in range(6):
            before, momentum = flat(module), outer.state_dict()["outer"]["momentum"]
            train(module, inner, rank, range(step, step + 1), nan=3)
            if step == 3:
                assert torch.equal(flat(module), before)
                kept = outer.state_dict()["outer"]["momentum"]
                assert all(torch.equal(x, momentum[n]) for n, x in kept.items())
        assert alike(module) and torch.isfinite(flat(module)).all()


@on_ranks(2)
def test_what_is_not_finite_in_flight_is_undone(rank: int, world: int) -> None:
    module = network(0)
    inner = OPTIMIZERS["SGD"](module.parameters())
    outer = updates("outer", module, inner, every=2, delay=1)
    with outer.state:
        for step in range(8):
            train(module, inner, rank, range(step, step + 1), nan=3)
            if step == 4:  # the exchange that began with the NaN has ended
                with outer.common() as common:
                    before = flat(common)
                assert torch.equal(flat(module), before) and torch.isfinite(before).all()
        outer.average()
        assert alike(module) and torch.isfinite(flat(module)).all()


# ---- parts


def peak(rank: int, world: int, parts: int) -> tuple[list[int], float]:
    """The bytes that each step sent, and the last losses."""
    module, sent, losses = network(rank), [], []
    with sidcomp.State("int4") as state:
        adam = OPTIMIZERS["Adam"](module.parameters())
        outer = updates("outer", module, adam, state, every=EVERY, parts=parts)
        for step in range(30 * EVERY):
            before = state.stats()["sent_bytes"]
            losses += train(module, adam, rank, range(step, step + 1))
            sent.append(state.stats()["sent_bytes"] - before)
        outer.average()
        assert alike(module)
    return sent, sum(losses[-6:]) / sum(losses[:6])


def test_parts_send_as_much_but_less_at_a_time() -> None:
    (whole, _), _ = run(peak, 2, 1)
    (parts, better), _ = run(peak, 2, 4)
    assert max(parts) < 0.75 * max(whole), "one tensor has nearly three quarters of the parameters"
    assert all(parts) and sum(map(bool, whole)) == 30
    assert sum(whole) < sum(parts) < 1.25 * sum(whole), "four headers in place of one"
    assert better < 0.6


@on_ranks(2)
def test_what_is_not_finite_in_one_part_is_undone_in_all(rank: int, world: int) -> None:
    module = network(0)
    inner = OPTIMIZERS["SGD"](module.parameters())
    outer = updates("outer", module, inner, every=4, parts=2)
    with outer.state:
        for step in range(12):
            module.zero_grad()
            backward(module, rank, step)
            if step == 5 and rank == 1:
                for p in module.parameters():
                    p.grad[:] = float("nan")
            with outer.common() as common:
                before = flat(common)
            inner.step()
            if step == 5:
                assert torch.equal(flat(module), before), "all parts are undone, or NaN would come back"
        outer.average()
        assert alike(module) and torch.isfinite(flat(module)).all()


# ---- in the host's memory


@on_ranks(2)
def test_in_the_hosts_memory_it_has_the_same_bits(rank: int, world: int) -> None:
    """On CPUs host=True changes only how the parameters move after a delay."""

    def trains(host: bool) -> torch.Tensor:
        module = network(rank)
        adam = OPTIMIZERS["Adam"](module.parameters())
        how = {"every": EVERY, "delay": 2, "host": host, "lr": 0.7, "momentum": 0.5}
        with updates("outer", module, adam, **how).state:
            train(module, adam, rank, range(5 * EVERY + 3))
            return flat(module)

    assert torch.equal(trains(False), trains(True))


@pytest.mark.parametrize("delayed", [False, True])
def test_host_keeps_its_vectors_off_a_gpu(delayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's fake tensors, which refuse to compute with tensors of two devices."""

    def refuse(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
        assert not {x.device for x in a} ^ {x.device for x in b}, "fake tensors do not look at lists"

    zeros, pinned = torch.zeros, []

    def asked(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return zeros(*size, **more)

    monkeypatch.setattr(torch, "_foreach_sub_", refuse)
    monkeypatch.setattr(torch, "_foreach_add_", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode(), torch.no_grad():
        named = {name: torch.zeros(3, n, device="cuda") for name, n in (("a", 2), ("b", 5))}
        monkeypatch.setattr(torch, "zeros", asked)
        for host in (True, False):
            pinned.clear()
            v = Vectors(list(named), named, delayed, host)
            assert pinned == [host] * (3 if delayed else 2), "a copy from pageable memory would wait"
            for x in (v.update, v.point, v.base):
                assert x.device.type == ("cpu" if host else "cuda")
            v.start()
            v.mark()
            v.measure()
            v.measure_departure()
            v.resume(keep=delayed)
            v.resume(keep=False)
            assert all(p.device.type == "cuda" for p in v.parameters)


# ---- what is refused


def no_optimizer(points: list[torch.Tensor]) -> int:
    return 3


def of_others(points: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([x.clone() for x in points])


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"every": 0}, "at least 1"),
        ({"outer": 3}, "outer=3: give a function that takes a list of tensors"),
        ({"outer": sgd(lr=-1.0)}, "cannot be made (Invalid learning rate: -1.0)"),
        ({"outer": no_optimizer}, "returned 3: give a function"),
        ({"outer": of_others}, "of other tensors"),
        ({"outer": torch.optim.AdamW, "deadline": 5.0}, "a state that does not travel"),
        ({"delay": 31}, "from 0 to every=30"),
        ({"delay": -1}, "from 0 to every=30"),
        ({"parts": 0}, "from 1 to 6"),
        ({"parts": 7}, "the model has 6 parameters"),
        ({"parts": 3, "every": 2, "delay": 1}, "from 1 to 2"),
        ({"parts": 3, "every": 8, "delay": 3}, "a delay of at most 2"),
        ({"parts": 2, "state": {"codec": "topk", "groups": "model"}}, "several parts"),
        ({"parts": 2, "state": {"codec": "topk", "full_every": 3}}, "leave one of them out"),
        ({"noise_correction": True}, "SGD has none: leave it out"),
        ({"noise_correction": True, "deadline": 5.0}, "some may be late: leave one of them out"),
        ({"stale": -5}, "stale=-5: give a number of missed exchanges"),
    ],
)
@on_ranks(2)
def test_what_is_wrong_is_said(rank: int, world: int, wrong: dict[str, Any], said: str) -> None:
    module = network(0)
    with pytest.raises(sidcomp.errors.SidcompError, match=re.escape(said)):
        updates("outer", module, OPTIMIZERS["SGD"](module.parameters()), **wrong)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("outer", {"outer": "SGD"}, "outer='SGD': give a function that takes a list of tensors"),
    ("outer", {"stale": "x", "deadline": 1.0}, "stale='x'"),
    ("memory", {"error": "both"}, "error='both': give \"parameters\" or \"memory\""),
    ("memory", {"noise_correction": "rows"}, 'noise_correction="rows" needs error="parameters"'),
    *((kind, wrong, said) for kind in KINDS for wrong, said in [
        ({"state": "topk"}, "state='topk': give a sidcomp.State"),
        ({"every": 0}, "every=0: give a number of steps"),
        ({"noise_correction": "no"}, "noise_correction='no': give True or False"),
        ({"host": "yes"}, "host='yes': give True or False"),
        ({"delay": True}, "delay=True"),
        ({"process_group": 3}, "process_group=3 is no process group"),
        ({"process_group": 0}, "process_group=0 is no process group"),
        ({"module": "net"}, "module='net': give the torch.nn.Module"),
        ({"optimizers": "adam"}, "optimizer='adam': give a torch.optim.Optimizer"),
        ({"optimizers": []}, "optimizer=[]: give the optimizer"),
        ({"optimizers": "part"}, "no optimizer of the list has '4.weight', which requires"),
        ({"optimizers": "twice"}, "optimizers 0 and 1 of the list have parameter '4.weight': give each"),
    ]),
]  # fmt: skip


@on_ranks(2)
def test_a_wrong_argument_is_named_and_nothing_is_changed(rank: int, world: int) -> None:
    """Every wrong argument alone, beside good ones; the last line has all good."""
    module = network(rank)
    before = flat(module)
    parameters = list(module.parameters())
    lists = {"part": [parameters[:2], parameters[2:4]], "twice": [parameters, parameters[4:]]}
    for kind, wrong, said in [*WRONG, ("outer", {}, "")]:
        chosen: Any = wrong.get("optimizers")
        if chosen in ("part", "twice"):
            wrong = {"optimizers": [OPTIMIZERS["Adam"](some) for some in lists[chosen]]}
        adam = OPTIMIZERS["Adam"](parameters)
        given = {"module": module, "optimizers": adam, "state": sidcomp.State("topk"), **wrong}
        if not said:
            updates(kind, **given).state.close()
            continue
        with pytest.raises((sidcomp.ArgumentError, sidcomp.SetupError), match=re.escape(said)):
            updates(kind, **given)
        assert torch.equal(flat(module), before) and not adam._optimizer_step_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_wrong_checkpoint_is_named_and_nothing_is_changed(rank: int, world: int, kind: str) -> None:
    """What is wrong is named, and nothing has changed."""
    module = network(rank)
    adam = OPTIMIZERS["Adam"](module.parameters())
    more: dict[str, Any] = {"momentum": 0.5} if kind == "outer" else {}
    with sidcomp.State("topk", density=0.1) as state:
        made = updates(kind, module, adam, state, every=3, delay=2, **more)
        train(module, adam, rank, range(4))  # between two exchanges, with one in flight
        saved = made.state_dict()
        before = flat(module)

        def refused(said: str, given: Any) -> None:
            with pytest.raises(sidcomp.CheckpointError, match=re.escape(said)):
                made.load_state_dict(given)
            assert torch.equal(flat(module), before) and made.steps == 4 and made.flying == [0]

        wrong: Any
        for wrong in ("x", None, [saved]):
            refused("load_state_dict(", wrong)
        name, p = "0.weight", module[0].weight
        for what in ("point", "own", "base"):
            for wrong, found in ((3, "3"), (None, "None"), (torch.ones(2), "a tensor of shape (2,)")):
                said = f"{name!r}, {tuple(p.shape)}, but {found}: the dictionary is damaged"
                refused(said, {**saved, what: {**saved[what], name: wrong}})
            refused("is None, not a dictionary", {**saved, what: None})
        nan = torch.full_like(p, float("nan"))
        for what in ("point", "base"):
            refused("but a tensor with NaN or Inf", {**saved, what: {**saved[what], name: nan}})
        if kind == "outer":
            momentum = saved["outer"]["momentum"]
            damaged = {**saved["outer"], "momentum": {**momentum, name: nan}}
            refused("no outer momentum of", {**saved, "outer": damaged})
        flight = saved["in flight"]
        for wrong in ("x", {"update": {}}, {**flight, "names": 3}, {**flight, "names": ["0.weight"]}):
            refused('"in flight"', {**saved, "in flight": wrong})
        refused("but nothing: the dictionary", {**saved, "in flight": {**flight, "update": {}}})
        made.load_state_dict(saved)
        train(module, adam, rank, range(4, 5))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_what_is_in_flight_is_not_lost_without_the_delay(rank: int, world: int, kind: str) -> None:
    """What was in flight when a run was saved is not lost if it goes on without a delay."""
    points = []
    saved: dict[str, Any] = {}
    for delay in (2, 0):
        module = network(rank)
        adam = OPTIMIZERS["Adam"](module.parameters())
        state = sidcomp.State("topk", density=0.1)
        made = updates(kind, module, adam, state, every=3, delay=delay)
        with state:
            if not delay:
                adam.load_state_dict(saved["adam"])
                state.load_state_dict(saved["state"])
                made.load_state_dict(saved["made"])
                assert not made.flying
            else:
                train(module, adam, rank, range(4))
                saved = {"adam": adam.state_dict(), "state": state.state_dict(), "made": made.state_dict()}
                saved = copy.deepcopy(saved)
                made.land()
            with made.common() as common:
                points.append(flat(common))
            points.append(flat(module))
            train(module, adam, rank, range(4, 10))
            made.average()
            assert alike(module)
    assert torch.equal(points[0], points[2]) and torch.equal(points[1], points[3])


@on_ranks(2)
def test_a_checkpoint_has_the_state_of_another_optimizer_of_the_point(rank: int, world: int) -> None:
    """Without the state of its outer optimizer a checkpoint is refused; with it, the run goes on."""
    how = {"every": EVERY, "parts": 2, "outer": ADAMW}
    _, saved = resumes(rank, world, "memory", 7, 5 * EVERY, {"codec": "none"}, how)
    module = network(0)
    adam = OPTIMIZERS["Adam"](module.parameters())
    made = updates("memory", module, adam, sidcomp.State("none"), **how)
    with made.state, pytest.raises(sidcomp.CheckpointError, match='"outer"'):
        made.load_state_dict({**saved, "outer": None})


@pytest.mark.parametrize("codec", [{"codec": "qsgd"}, {"codec": "topk", "density": 0.3}])
def test_without_a_memory_the_ranks_meet(codec: dict[str, Any]) -> None:
    """What is not sent is lost; error="parameters" has no place for it: see its test."""
    settings = {**codec, "memory": "none"}
    for first, last, _ in run(learns, 2, "outer", "Adam", settings, 30, {"every": EVERY}):
        assert last < 0.8 * first


@on_ranks(2)
def test_other_models_are_refused(rank: int, world: int) -> None:
    other = nn.Sequential(nn.Linear(12, 40 + rank), nn.Linear(40 + rank, 3))
    different = r"rank 1 has '0\.weight' of float32 \[41, 12\] where rank 0 has '0\.weight'"
    with pytest.raises(sidcomp.SetupError, match=different):
        updates("outer", other, OPTIMIZERS["SGD"](other.parameters()), sidcomp.State("none"))
    module = network(0)
    sgd = OPTIMIZERS["momentum"](module.parameters())
    with sidcomp.State("none") as state:
        made = updates("outer", module, sgd, state, every=2)
        train(module, sgd, rank, range(2))
        made.close()
    train(module, sgd, rank, range(2, 3))  # the optimizer steps alone
    assert made.steps == 2 and not alike(module)


UNLIKE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("memory", {"every": 2}, {"every": 3}),
    ("memory", {"every": 2, "parts": 1}, {"every": 2, "parts": 2}),
    ("memory", {"error": "memory"}, {"error": "parameters"}),
    ("parameters", {"every": 2}, {"every": 4}),
    ("parameters", {"delay": 0}, {"delay": 1}),
    ("parameters", {"noise_correction": True}, {"noise_correction": "rows"}),
    ("parameters", {"optimizer": "Adam"}, {"optimizer": "SGD"}),
    ("outer", {"momentum": 0.5}, {"momentum": 0.9}),
    ("outer", {"buffer": 3}, {"buffer": 4}),
]


@on_ranks(2)
def test_ranks_that_would_exchange_something_else_are_refused(rank: int, world: int) -> None:
    """Else an exchange of two sizes ends a process, or the common points drift apart without a word. What the
    doors say if rank 1 has other arguments, another optimizer or another buffer."""
    for door, first, second in UNLIKE:
        (name,) = (n for n in second if second[n] != first[n])
        what = {"optimizer": "corrected=0", "buffer": "'buffer seen'"}.get(name, f"{name}={second[name]!r}")
        how = {"optimizer": "Adam", **(second if rank else first)}
        module = network(0)
        if "buffer" in how:
            module.register_buffer("seen", torch.zeros(how.pop("buffer")))
        optimizer = OPTIMIZERS[how.pop("optimizer")](module.parameters())
        with pytest.raises(sidcomp.SetupError, match=rf"rank 1 has .*{re.escape(what)}"):
            updates(door, module, optimizer, sidcomp.State("none"), **how)


# ---- exchanges


def codec_over(exchange: str, world: int) -> tuple[str, dict[str, Any]]:
    """A lossy codec with which the exchange works, of the registry's the first; and its ranks per node."""
    info = next(x for x in sidcomp.exchanges() if x.name == exchange)
    node = {"ranks_per_node": 2} if any(p.name == "ranks_per_node" for p in info.parameters) else {}
    node = node if world % 2 == 0 else {}
    for codec in sidcomp.codecs():
        try:
            sidcomp.simulation.Loopback(world, exchange, codec.name, n=256, **node)
            settings = sidcomp.State(codec.name, exchange=exchange, **node).settings
        except sidcomp.SidcompError:
            continue
        if settings.lossy:
            return codec.name, node
    raise AssertionError(f"no codec works over {exchange}")


@pytest.mark.parametrize("world", [pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW), 4])
@pytest.mark.parametrize("exchange", [x.name for x in sidcomp.exchanges()])
@on_ranks()
def test_over_every_exchange_it_is_what_one_process_computes(rank: int, world: int, exchange: str) -> None:
    """Beside torch's operations with the mean that one process computes of all ranks' updates."""
    codec, more = codec_over(exchange, world)
    (info,) = (x for x in sidcomp.exchanges() if x.name == exchange)
    (traits,) = (x.traits for x in sidcomp.codecs() if x.name == codec)
    # The process group's own all-reduce adds up in another order, and halves then round otherwise.
    bound = 1e-3 if info.family == "collective" and "linear" in traits else 0.0
    model, ours = network(0), network(rank)
    adam, of_ours = (OPTIMIZERS["Adam"](m.parameters()) for m in (model, ours))
    named = dict(model.named_parameters())
    with sidcomp.State(codec, exchange=exchange, groups="model", **more) as state:
        (v,) = updates("outer", ours, of_ours, state, every=EVERY, lr=0.5, momentum=0.6).vectors
        order = [named[name] for name in v.names]  # as the group has them
        point = torch.cat([p.detach().flatten() for p in order])
        loopback = sidcomp.simulation.Loopback(world, exchange, codec, n=len(point), **more)
        u = torch.zeros_like(point)
        for step in range(5 * EVERY):
            train(model, adam, rank, range(step, step + 1))
            train(ours, of_ours, rank, range(step, step + 1))
            assert alike(ours) is ((step + 1) % EVERY == 0), "the replicas have the same bits"
            if (step + 1) % EVERY:
                continue
            update = point - torch.cat([p.detach().flatten() for p in order])
            everyone = [torch.empty_like(update) for _ in range(world)]
            dist.all_gather(everyone, update)
            mean = loopback.step(everyone)
            u.mul_(0.6).add_(mean)
            point.sub_(mean.add(u, alpha=0.6).mul_(0.5))
            nn.utils.vector_to_parameters(point.clone(), order)
            assert float((flat(ours) - flat(model)).abs().max()) <= bound, codec
            assert flat(ours).ne(flat(network(0))).any()
