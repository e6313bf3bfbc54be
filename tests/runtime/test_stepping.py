"""A step of training counts once for all optimizers, whoever calls them, and also if a scaler skips it."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heard import warned
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.local.stepping import Stepping
from sidcomp.runtime.optimizers import chains
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_optimizer_state_dict


class Owner:
    """Notes what it is told, and where the parameter is then."""

    idle = False

    def __init__(self, p: torch.nn.Parameter) -> None:
        self.p, self.calls = p, [("made", float(p.detach()[0]))]
        self.names = {id(p): "p"}

    def before(self) -> None:
        self.calls.append(("before", float(self.p.detach()[0])))

    def after(self) -> None:
        self.calls.append(("after", float(self.p.detach()[0])))

    @property
    def steps(self) -> int:
        return sum(what == "after" for what, _ in self.calls)


def parameter(gradient: float = 1.0) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.tensor([8.0, 8.0]))
    p.grad = torch.full_like(p, gradient)
    return p


def sgd(p: torch.nn.Parameter, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p], lr=1.0, **more)


def test_a_step_is_seen_before_and_after_it() -> None:
    p = parameter()
    owner, optimizer = Owner(p), sgd(p)
    Stepping(owner, chains(optimizer))
    optimizer.step()
    optimizer.step()
    assert owner.calls[1:] == [("before", 8.0), ("after", 7.0), ("before", 7.0), ("after", 6.0)]


@pytest.mark.parametrize("order", ["abab", "aaab", "baab"])
def test_several_optimizers_take_one_step_together(order: str) -> None:
    p, q = parameter(), parameter()
    both = {"a": sgd(p), "b": torch.optim.AdamW([q])}
    owner = Owner(p)
    Stepping(owner, chains(list(both.values())))
    for one in order:
        both[one].step()
    before_after = [what for what, _ in owner.calls[1:]]
    assert before_after == ["before", "after"] * {"abab": 2, "aaab": 1, "baab": 2}[order]


def test_an_optimizer_that_never_steps_is_named() -> None:
    p, q = parameter(), parameter()
    both = [sgd(p), torch.optim.AdamW([q])]
    owner = Owner(p)
    Stepping(owner, chains(both))
    with warned() as told:
        for step in range(300):
            both[0].step()
            if step < 150:
                both[1].step()
    assert owner.steps == 150
    (said,) = [text for text in told if "sidcomp" in text]
    assert "SGD has stepped 100 times while AdamW has not" in said


@pytest.mark.parametrize("way", ["closure", "foreach", "fused", "compiled", "LBFGS"])
def test_however_the_optimizer_steps(way: str) -> None:
    p = parameter()
    options = {way: True} if way in ("foreach", "fused") else {}
    optimizer = torch.optim.LBFGS([p]) if way == "LBFGS" else sgd(p, **options)
    owner = Owner(p)
    Stepping(owner, chains(optimizer))
    closure = (lambda: p.detach().sum()) if way in ("closure", "LBFGS") else None
    step: Callable[..., Any] = (
        torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step
    )
    for _ in range(3):
        step(closure) if closure is not None else step()
    assert owner.steps == 3 and owner.calls[-1][1] < 8


class Foreign:
    """A scaler that is none of torch's."""

    def __init__(self, skips: bool) -> None:
        self.skips = skips

    def step(self, optimizer: Any) -> None:
        if not self.skips:
            optimizer.step()


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("kind", ["torch", "subclass", "given", "disabled", "by name", "made before"])
def test_a_step_that_a_scaler_skips_counts(kind: str, finite: bool) -> None:
    p = parameter(1.0 if finite else float("inf"))
    owner, optimizer = Owner(p), sgd(p)
    earlier = torch.amp.GradScaler("cpu", init_scale=1.0)
    given = Foreign(skips=not finite) if kind == "given" else None
    Stepping(owner, chains(optimizer), given)
    of = type("Own", (torch.amp.GradScaler,), {}) if kind == "subclass" else torch.amp.GradScaler
    scaler: Any = earlier if kind == "made before" else of("cpu", init_scale=1.0, enabled=kind != "disabled")
    scaler = given or scaler
    if kind != "given":
        scaler.scale(torch.zeros(()))
    scaler.step(**{"optimizer": optimizer}) if kind == "by name" else scaler.step(optimizer)
    stepped = finite or kind == "disabled"
    assert [what for what, _ in owner.calls] == ["made", "before", "after"]
    assert (owner.calls[-1][1] == 8.0) is not stepped


def test_a_scaler_that_skips_one_of_two_optimizers() -> None:
    p, q = parameter(float("inf")), parameter()
    owner, first, second = Owner(q), sgd(p), sgd(q)
    Stepping(owner, chains([first, second]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(first)
    assert owner.steps == 0
    scaler.step(second)
    assert owner.steps == 1 and owner.calls[-1] == ("after", 7.0)


def test_a_step_that_a_scaler_skips_counts_for_all_whom_the_optimizer_serves() -> None:
    p = parameter(float("inf"))
    owners, optimizer = [Owner(p) for _ in range(3)], sgd(p)
    of_each = [Stepping(owner, chains(optimizer)) for owner in owners]
    of_each[1].close()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert [owner.steps for owner in owners] == [1, 0, 1]


def test_the_scaler_of_another_model_counts_nothing() -> None:
    p, q = parameter(), parameter(float("inf"))
    owner, own, other = Owner(p), sgd(p), sgd(q)
    Stepping(owner, chains(own))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(other)
    assert len(owner.calls) == 1
    assert copy.deepcopy(scaler.state_dict()) == scaler.state_dict()


def test_a_wrapper_passes_its_step_on() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inside: torch.optim.Optimizer) -> None:
            self.inside = inside

        def step(self, closure: Any = None) -> Any:
            return self.inside.step(closure)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["inside"], name)

    for skipped in (False, True):
        p = parameter(float("inf") if skipped else 1.0)
        owner, wrapper = Owner(p), Wrapper(sgd(p))
        Stepping(owner, chains(wrapper))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(wrapper)
        assert owner.steps == 1


def test_the_step_that_makes_a_state_to_load_into_does_not_count() -> None:
    p = parameter()
    p.grad = None
    owner, optimizer = Owner(p), torch.optim.AdamW([p], lr=0.1)
    Stepping(owner, chains(optimizer))
    _init_optim_state(optimizer)
    assert len(owner.calls) == 1 and optimizer.state
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert owner.steps == 1


@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.AdamW])
def test_looking_at_an_optimizers_state_is_no_step(maker: Any) -> None:
    """Plain SGD has no state, so that torch steps each time."""
    module = torch.nn.Linear(2, 1)
    optimizer = maker(module.parameters(), lr=0.1)
    owner = Owner(torch.nn.Parameter(torch.zeros(1)))
    Stepping(owner, chains(optimizer))
    for step in range(3):
        get_optimizer_state_dict(module, optimizer)
        assert owner.steps == step and len(owner.calls) == 1 + 2 * step
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("gradient", [0.0, 1.0, None])
def test_a_first_step_of_rate_zero_counts(maker: Any, gradient: float | None) -> None:
    """As warm-ups begin. The others count it, whatever this rank's batch gives."""
    p = parameter(gradient or 0.0)
    if gradient is None:
        p.grad = None
    owner, optimizer = Owner(p), maker([p], lr=0.0)
    Stepping(owner, chains(optimizer))
    optimizer.step()
    assert [what for what, _ in owner.calls] == ["made", "before", "after"]


@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_at_rate_zero_is_seen_before_and_after(maker: Any) -> None:
    """There are gradients only behind the closure."""
    p = parameter()
    p.grad = None
    owner, optimizer = Owner(p), maker([p], lr=0.0)
    Stepping(owner, chains(optimizer))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert [what for what, _ in owner.calls] == ["made", "before", "after"]


def test_an_error_in_the_step_leaves_the_next_one_whole() -> None:
    p = parameter()
    owner, optimizer = Owner(p), sgd(p)
    Stepping(owner, chains(optimizer))

    def fails() -> None:
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        optimizer.step(fails)  # type: ignore[arg-type]
    optimizer.step()
    assert [what for what, _ in owner.calls[1:]] == ["before", "before", "after"]


def test_it_lives_as_long_as_its_optimizer_and_closes() -> None:
    p = parameter()
    owner, optimizer = Owner(p), sgd(p)
    alive = weakref.ref(owner)
    stepping = Stepping(owner, chains(optimizer))
    del owner
    gc.collect()
    optimizer.step()
    found = alive()
    assert found is not None and found.steps == 1
    stepping.close()
    optimizer.step()
    assert found.steps == 1
    del found, stepping
    gc.collect()
    assert alive() is None
    again = weakref.ref(Owner(p))
    Stepping(again() or Owner(p), chains(optimizer))
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert kept() is None


def test_an_optimizer_that_takes_the_place_of_the_given_one_is_refused() -> None:
    p = parameter()
    owner, optimizer, other = Owner(p), sgd(p), torch.optim.AdamW([p])
    stepping = Stepping(owner, chains(optimizer))
    for _ in range(2):
        other.step()
        before = p.clone()
        for _ in range(2):
            with pytest.raises(SetupError, match=r"^AdamW has parameter 'p' .* no step of SGD"):
                other.step()
        assert torch.equal(p, before)
        optimizer.step()
    stepping.close()
    for _ in range(3):
        other.step()
    assert owner.steps == 2


class Around(torch.optim.Optimizer):
    """A wrapper that has hooks of its own, and takes two of the steps inside in each of its own."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside, self.taken = {"some": [inside]}, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for _ in range(2):
            self.inside["some"][0].step()


class Seldom(Around):
    """Steps inside in every third step of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        if self.taken % 3 == 0:
            super().step(closure)


def with_others(p: torch.nn.Parameter, way: str) -> tuple[Any, Callable[[], Any]]:
    """An optimizer to give, and what a program does in each step, in which others step on the parameter."""
    given, other = sgd(p), torch.optim.AdamW([p], lr=1e-3)
    if way == "around it":
        return given, Around(given).step
    if way == "seldom":
        return given, Seldom(given).step
    if way == "inside it":
        around = Around(given)
        return around, around.step
    if way == "in its closure":
        return given, lambda: given.step(lambda: (other.step(), other.step()))  # type: ignore
    if way == "skipped":
        p.grad = torch.full_like(p, float("inf"))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        return given, lambda: (scaler.step(given), scaler.update(), other.step())
    if way == "turns":
        return given, lambda: (other.step(), given.step())
    if way == "only for a state":
        return given, lambda: (_init_optim_state(other), _init_optim_state(other))
    if way == "deep copy":
        return given, copy.deepcopy(other).step
    return given, sgd(parameter()).step  # another model's


WAYS = ["around it", "seldom", "inside it", "in its closure", "skipped", "turns", "only for a state"]


@pytest.mark.parametrize("way", [*WAYS, "deep copy", "another model's"])
def test_others_that_do_not_train_alone_may_step(way: str) -> None:
    p = parameter()
    owner = Owner(p)
    optimizer, step = with_others(p, way)
    Stepping(owner, chains(optimizer))
    for _ in range(7):
        step()
    counts = {"seldom": 4, "in its closure": 7, "around it": 14, "inside it": 7, "skipped": 7, "turns": 7}
    assert owner.steps == counts.get(way, 0)


def test_others_may_step_where_nothing_is_exchanged_or_the_run_is_gone() -> None:
    p = parameter()
    owner, optimizer, other = Owner(p), sgd(p), torch.optim.AdamW([p])
    Stepping(owner, chains(optimizer))
    owner.idle = True
    for _ in range(3):
        other.step()
    owner.idle = False
    gc.disable()  # the run is a circle, which is collected some time later
    try:
        del owner, optimizer
        for _ in range(3):
            other.step()
    finally:
        gc.enable()


def test_what_has_no_hooks_is_refused() -> None:
    class Bare:
        def __init__(self) -> None:
            self.param_groups = [{"params": [parameter()]}]

        def step(self) -> None: ...

    with pytest.raises(UnsupportedError, match="Bare has no step hooks"):
        Stepping(Owner(parameter()), chains(Bare()))
    with pytest.raises(ArgumentError, match="give a torch"):
        p = parameter()
        Stepping(Owner(p), chains(sgd(p)), scaler=3)
