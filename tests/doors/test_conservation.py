"""Where updates are sent, nothing is lost and nothing is doubled: with every codec, after an error anywhere
in an exchange, and over many exchanges of ranks whose speed changes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import alike, backward, flat, network
from sidcomp import _core
from sidcomp.local import alarms, steps
from sidcomp.runtime import communicator, form, point_to_point
from test_compress import sgd
from torch import nn

CODECS = [c.name for c in sidcomp.codecs()]
HALVES = [c.name for c in sidcomp.codecs() if c.linear and c.family == "dense" and not c.lossless]


def mean(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    dist.all_reduce(x)
    return x / dist.get_world_size()


class Books:
    """What this rank's optimizer has done, beside what the ranks know of it."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        self.module, self.optimizer = module, optimizer
        self.done = torch.zeros_like(flat(module), dtype=torch.float64)
        self.before = self.own = flat(module)
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "before", flat(module)))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "own", flat(module)))  # then comes sidcomp
        self.run = sidcomp.compress(module, optimizer, **arguments)
        self.start = self.common()

    def common(self) -> torch.Tensor:
        with self.run.common() as module:
            return flat(module)

    def step(self, rank: int, number: int) -> None:
        """Counts the step only if nothing is raised."""
        self.optimizer.zero_grad()
        backward(self.module, rank, number)
        self.optimizer.step()
        self.done += self.own.double() - self.before

    def balance(self) -> float:
        """How far the mean of the ranks' parameters is from where their optimizers' steps lead, relative to
        these steps. Errors are in the parameters."""
        went = mean(flat(self.module)) - self.start
        return float((went - mean(self.done)).norm() / mean(self.done).norm())


# ---- every codec
# ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_every_codec_keeps_the_ranks_together_and_loses_nothing(rank: int, world: int) -> None:
    found = {}
    for codec in CODECS:
        module = network()
        books = Books(module, sgd(module, 0.02), codec=codec, updates=True, every=2)
        in_parameters = books.run.updates.error == "parameters"  # type: ignore[attr-defined]
        for number in range(6):
            books.step(rank, number)
        same = alike(books.common())
        found[codec] = (same, in_parameters, books.balance())
        books.run.average()
        assert alike(flat(module)), codec
        books.run.close()
    assert list(found) == CODECS
    for codec, (same, in_parameters, away) in found.items():
        assert same, f"{codec}: the ranks' common parameters differ"
        if in_parameters:
            bound = 1e-3 if codec in HALVES else 1e-5  # sums of half floats are rounded
            assert away < bound, f"{codec}: {away:.1e} of what the optimizers did is missing"


# ---- errors
# ------------------------------------------------------------------------------------------------------------


class Planted(Exception):
    pass


def explode(*_: Any, **__: Any) -> Any:
    raise Planted("planted error, number 4711")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt("planted error, number 4711")


@contextmanager
def planted(where: str, here: bool) -> Iterator[None]:
    """On the ranks on which it is here, an error in encode, send or decode of an all-gather, in a round of an
    exchange in messages, or in apply; or an interrupt when the mean has arrived."""
    exchange = communicator.Exchange
    places: dict[str, list[tuple[Any, str]]] = {
        "send": [(exchange, "all_gather"), (exchange, "all_reduce"), (point_to_point, "post")],
        "apply": [(steps.Updates, "_apply")],
        "round": [(form.MessageForm, "advance")],
        "interrupt": [(alarms.OwnGradients, "compare")],
    }
    kept = [(of, name, getattr(of, name)) for of, name in places.get(where, [(_core.Plan, where)])]
    for of, name, _ in kept if here else ():
        setattr(of, name, interrupt if where == "interrupt" else explode)
    try:
        yield
    finally:
        for of, name, call in kept:
            setattr(of, name, call)


ROLLBACK: dict[str, Any] = {"error": "memory", "nonfinite": "rollback"}  # else the memory is cleared
GATHERED: dict[str, Any] = {"exchange": "allgather"}
FAILING: dict[str, dict[str, Any]] = {
    "parameters": {"options": sidcomp.Options(**GATHERED)},
    "memory": {"options": sidcomp.Options(**ROLLBACK, **GATHERED)},
    "delay": {"every": 2, "delay": 1, "options": sidcomp.Options(**GATHERED)},
    "parts": {"every": 2, "parts": 2, "options": sidcomp.Options(**ROLLBACK, **GATHERED)},
    "messages": {},
}


def with_an_error(
    rank: int, world: int, where: str, who: int | None, kind: str
) -> tuple[str, bool, bool, float | None]:
    """Returns what was said, whether the common parameters stayed, whether this rank's own are where its
    optimizer left them and, where the ranks can go on, how much was lost."""
    module = network()
    arguments: dict[str, Any] = {"codec": "topk", "density": 0.1, "updates": True, **FAILING[kind]}
    books = Books(module, sgd(module, 0.02), **arguments)
    number, said = 3, ""
    for first in range(number):
        books.step(rank, first)
    with planted(where, who in (None, rank)):
        while not said and number < 6:
            common = books.common()
            try:
                books.step(rank, number)
            except (RuntimeError, sidcomp.SidcompError, Planted, KeyboardInterrupt) as e:
                said = str(e)
                books.done += books.own.double() - books.before  # it is sent with the next step
            number += 1
            if who not in (None, rank):
                break
    kept = torch.equal(books.common(), common), torch.equal(flat(module), books.own)
    if who is not None and where != "encode":  # not all know yet, or the process group is broken
        for later in range(number, number + 3):
            try:
                books.step(rank, later)
            except (RuntimeError, sidcomp.SidcompError) as e:
                said = said or str(e)
        return said, *kept, None
    for later in range(number, number + 4):
        books.step(rank, later)
    assert alike(books.common())
    books.run.average()
    assert alike(flat(module))
    away = books.balance()
    books.run.close()
    return said, *kept, away


WHO = [
    *((kind, who) for kind in ("parameters", "memory") for who in (None, 0, 2)),
    ("delay", None),
    ("parts", None),
]


@pytest.mark.parametrize(
    ("where", "kind", "who"),
    [
        *((where, kind, who) for where in ("encode", "send", "decode") for kind, who in WHO),
        *(("interrupt", kind, None) for kind in FAILING if kind != "messages"),  # which need rollback then
        ("round", "messages", None),
        ("round", "messages", 2),
    ],
)
def test_after_an_error_nothing_is_lost_and_nothing_doubled(where: str, kind: str, who: int | None) -> None:
    """An error in encode is known to all at once. One in send or decode ends the run within three exchanges,
    or after the time limit of the process group."""
    for rank, (said, common, own, away) in enumerate(
        run(with_an_error, 3, where, who, kind, group_timeout=12)
    ):
        assert said, f"rank {rank} does not know of it"
        if who in (None, rank) or where == "encode":
            assert "4711" in said, (rank, said)
            assert common, "the common parameters moved in a step that failed"
            # In messages a rank also keeps an error for all ranks, which its parameters carry from then on.
            assert own or kind in ("memory", "parts", "messages"), "what the optimizer did is gone"
        if away is not None:
            assert away < 1e-5, f"rank {rank}: {away:.1e} of what the optimizers did is missing or doubled"


def resumes_after_an_error(rank: int, world: int, folder: str, kind: str) -> None:
    """An emergency save: all ranks catch the error of an exchange, save, and go on."""
    arguments: dict[str, Any] = {"codec": "topk", "density": 0.1, "updates": True, **FAILING[kind]}

    def begin(seed: int) -> Books:
        module = network(seed)
        return Books(module, sgd(module, 0.02), **arguments)

    books, said, number = begin(0), "", 4
    for first in range(number):
        books.step(rank, first)
    with planted("encode", True):
        while not said:
            try:
                books.step(rank, number)
            except (RuntimeError, sidcomp.SidcompError) as e:
                said = str(e)
            number += 1
    assert "4711" in said
    books.run.save(folder)
    resumed = begin(7)
    assert resumed.run.load(folder)
    assert torch.equal(flat(resumed.module), flat(books.module)), "what was not sent is not in the file"
    for each in (books, resumed):
        for later in range(number, number + 3):
            each.step(rank, later)
    assert torch.equal(flat(resumed.module), flat(books.module))
    assert torch.equal(resumed.common(), books.common())


@pytest.mark.parametrize("kind", [kind for kind in FAILING if kind != "messages"])
def test_a_checkpoint_after_an_error_has_what_was_not_sent(tmp_path: Path, kind: str) -> None:
    run(resumes_after_an_error, 2, str(tmp_path), kind)


# ---- ranks that go
# ------------------------------------------------------------------------------------------------------------


def loses_a_peer(rank: int, world: int, how: int, arguments: dict[str, Any]) -> tuple[str, bool, bool]:
    module = network()
    books = Books(module, sgd(module, 0.02), updates=True, **arguments)
    for number in range(6):
        books.step(rank, number)
    if rank == world - 1:
        os.kill(os.getpid(), how)
    common, said = books.common(), ""
    for number in range(6, 16):
        try:
            books.step(rank, number)
        except (RuntimeError, sidcomp.SidcompError) as e:
            said = f"{type(e).__name__}: {e}"
            break
        common = books.common()  # the first exchange may still find the peer's last bytes
    return said, torch.equal(books.common(), common), torch.equal(flat(module), books.own)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("every", "exchange"), [(1, "allgather"), (3, "allgather"), (1, "twoshot")])
def test_a_rank_that_goes_is_an_error_and_nothing_moves(how: int, every: int, exchange: str) -> None:
    options = sidcomp.Options(exchange=exchange)
    arguments = {"codec": "topk", "density": 0.1, "every": every, "options": options}
    found = run(loses_a_peer, 3, int(how), arguments, dying=[2], group_timeout=12)
    for said, common, own in found[:2]:
        assert said.startswith("ExchangeError: "), said
        assert common, "the common parameters moved without a rank"
        assert own or exchange == "twoshot", "what the optimizer did is gone"


# ---- the bits of plain DDP
# ------------------------------------------------------------------------------------------------------------


def exactly(model: nn.Module, rank: int, step: int) -> None:
    """A gradient of small integers, so that sums and halves of it are exact in float32."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    for p in model.parameters():
        p.grad = torch.randint(-8, 9, p.shape, generator=draw).float()


UNCOMPRESSED: dict[str, dict[str, Any]] = {
    "parameters": {},
    "memory": {"options": sidcomp.Options(error="memory")},
    "outer": {"outer": lambda tensors: torch.optim.SGD(tensors, lr=1.0)},
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks()
def test_uncompressed_updates_of_sgd_have_the_bits_of_ddp(rank: int, world: int, every: int) -> None:
    """SGD whose rate is a power of two: plain averaging and updates take the same steps, without rounding,
    unless three ranks divide."""
    for kind, arguments in UNCOMPRESSED.items():
        module, plain = network(), network()
        for m in (module, plain):
            with torch.no_grad():
                for p in m.parameters():
                    p.copy_((p * 64).round() / 64)
        optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-6) for m in (module, plain)]
        with sidcomp.compress(module, optimizers[0], "none", updates=True, every=every, **arguments) as it:
            for step in range(4 * every):
                exactly(module, rank, step)
                optimizers[0].step()
                exactly(plain, rank, step)
                for p in plain.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
                optimizers[1].step()
            with it.common() as common:
                assert (flat(common) - flat(plain)).abs().max() <= (1e-5 if world == 3 else 0), kind


# ---- many exchanges
# ------------------------------------------------------------------------------------------------------------


def often(rank: int, world: int, exchanges: int, arguments: dict[str, Any]) -> float:
    """Each rank dawdles when it likes to."""
    module = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    dawdles = random.Random(rank)
    draw = torch.Generator().manual_seed(rank)
    with sidcomp.compress(module, optimizer, updates=True, **arguments) as it:
        start, done = flat(module), torch.zeros(35, dtype=torch.float64)
        for _ in range(exchanges * it.updates.every):  # type: ignore[attr-defined]
            if dawdles.random() < 0.02:
                time.sleep(dawdles.random() * 0.01)
            for p in module.parameters():
                p.grad = torch.randn(p.shape, generator=draw) + 1
            done -= 1e-3 * torch.cat([p.grad.flatten() for p in module.parameters()])
            optimizer.step()
        it.average()
        assert alike(flat(module))
        return float((flat(module) - start - mean(done)).norm() / mean(done).norm())


MANY: dict[str, dict[str, Any]] = {
    "parameters": {"codec": "topk", "density": 0.1},
    "memory": {"codec": "int4", "options": sidcomp.Options(error="memory")},
    "delay": {"codec": "topk", "density": 0.1, "every": 2, "delay": 2},
}


@pytest.mark.parametrize("exchanges", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MANY)
def test_ranks_of_changing_speed_stay_together(kind: str, exchanges: int) -> None:
    for away in run(often, 3, exchanges, MANY[kind]):
        assert away < 1e-3, f"{away:.1e} of what the optimizers did is missing"
