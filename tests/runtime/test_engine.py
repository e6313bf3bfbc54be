"""The engine without DDP: named tensors in, averaged tensors out, bit for bit as through the hook."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from heard import warned
from sidcomp.config.settings import Settings
from sidcomp.doors.ddp import register
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.scalars import Scalars
from sidcomp.runtime.step import Step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SHAPES = {"a.weight": (40, 30), "a.bias": (30,), "b.weight": (7, 50), "scale": ()}
BUCKETS = [["b.weight", "scale"], ["a.bias"], ["a.weight"]]  # in the order in which they become ready
STEPS = 4


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Named:
    """A minimal door: it lays named tensors into buckets and waits for their averages."""

    def __init__(self, codec: str, **arguments: Any) -> None:
        parameters = {k: arguments.pop(k) for k in ("density",) if k in arguments}
        settings = Settings.parse(codec, parameters, **{**sidcomp.State()._arguments, **arguments})
        self.engine = Engine(settings)
        self.model = Model(dist.group.WORLD, SHAPES, {})  # type: ignore[arg-type]
        self.buffers = [torch.zeros(sum(torch.Size(SHAPES[n]).numel() for n in names)) for names in BUCKETS]

    def average(
        self, named: dict[str, Tensor], instead: dict[int, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """instead: of the buffer of a bucket, by number."""
        for names, buffer in zip(BUCKETS, self.buffers, strict=True):
            buffer.copy_(torch.cat([named[n].reshape(-1) for n in names]))
        if self.engine.layout is None:
            self.engine.form(
                self.model,
                [Bucket(ns, [SHAPES[n] for n in ns], b) for ns, b in zip(BUCKETS, self.buffers, strict=True)],
            )
        futures = [self.engine.ready(i, (instead or {}).get(i, b)) for i, b in enumerate(self.buffers)]
        out: dict[str, Tensor] = {}
        for names, future in zip(BUCKETS, futures, strict=True):
            parts = future.wait().split([torch.Size(SHAPES[n]).numel() for n in names])
            out |= {n: part.reshape(SHAPES[n]).clone() for n, part in zip(names, parts, strict=True)}
        return out


class Given(nn.Module):
    """A model whose gradients are what they are said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.ParameterDict(
            {n.replace(".", "_"): nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
        )

    def forward(self, named: dict[str, Tensor]) -> Tensor:
        return sum((self.given[n.replace(".", "_")] * g).sum() for n, g in named.items())  # type: ignore[return-value]


@pytest.mark.parametrize(
    "codec, arguments",
    [
        ("topk", {"density": 0.1}),
        ("int8", {}),
        ("none", {}),
        ("fp16", {"checksum_every": 1}),
        ("topk", {"density": 0.1, "exchange": "twoshot"}),
        ("powersgd", {}),
        ("qsgd", {"nonfinite": "rollback", "seed": 5}),
    ],
)
@on_ranks(2)
def test_named_tensors_get_the_hooks_averages(
    rank: int, world: int, codec: str, arguments: dict[str, Any]
) -> None:
    groups = [
        [f"given.{n.replace('.', '_')}" for n in names] for names in (BUCKETS[0] + BUCKETS[1], BUCKETS[2])
    ]
    module = Given()
    ddp = DistributedDataParallel(module)
    state = sidcomp.State(codec, groups=groups, **arguments)
    register(ddp, state)
    door = Named(codec, groups=[BUCKETS[0] + BUCKETS[1], BUCKETS[2]], **arguments)
    for step in range(STEPS):
        given = gradients(rank, step)
        module.zero_grad()
        ddp(given).backward()
        averages = door.average(given)
        for name, average in averages.items():
            want = module.given[name.replace(".", "_")].grad
            assert torch.equal(average, want), f"step {step}: {name}"
    mine, hook = door.engine.state_dict(), state.state_dict()
    for name, kept in mine["residuals"].items():
        assert torch.equal(kept, hook["residuals"][f"given.{name.replace('.', '_')}"]), name
    assert mine["step"] == hook["step"] == STEPS
    door.engine.close()
    state.close()


@on_ranks(1)
def test_a_door_that_cannot_follow_is_not_told_to(rank: int, world: int) -> None:
    """The warning where no parameters are known, as over the process-group backend: nothing can follow."""
    door = Named("topk", density=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with warned() as caught:
        for step in range(4):
            door.average(gradients(rank, step))
    door.engine.close()
    (said,) = caught
    assert "Call state.update_scale(scaler.get_scale()) after each scaler.update(), or" in said
    assert "follow" not in said


@on_ranks(2)
def test_a_step_that_is_not_finite_is_thrown_away(rank: int, world: int) -> None:
    door = Named("topk", density=0.2, nonfinite="rollback", groups="bucket")
    for step in range(2):
        door.average(gradients(rank, step))
    before = {n: r.clone() for n, r in door.engine.state_dict()["residuals"].items()}
    bad = gradients(rank, 2)
    if rank == 1:
        bad["scale"] = torch.tensor(float("inf"))
    averages = door.average(bad)
    assert not averages["scale"].isfinite()
    after = door.engine.state_dict()
    assert after["step"] == 2
    assert all(torch.equal(after["residuals"][n], r) for n, r in before.items())
    door.engine.close()


@on_ranks(2)
def test_a_step_can_be_given_up(rank: int, world: int) -> None:
    """A bucket that does not come: the step is abandoned on all ranks, and the next one is whole."""
    door = Named("none", groups="model")
    door.average(gradients(rank, 0))
    futures = [door.engine.ready(0, door.buffers[0])]
    assert door.engine.within and door.engine.arrived(0)
    door.engine.abandon(RuntimeError("given up"))
    with pytest.raises(RuntimeError, match="given up"):
        futures[0].wait()
    door.average(gradients(rank, 1))
    assert door.average(gradients(0, 2))["scale"] == gradients(0, 2)["scale"]
    door.engine.close()


def gives_another_buffer(rank: int, world: int, codec: str, at: int, bucket: int = 1) -> str:
    """In step `at` rank 1 gives another tensor than that of this bucket. All compare checksums before the
    first bucket of a step."""
    door = Named(codec, groups="bucket", checksum_every=1)
    for step in range(at):
        door.average(gradients(rank, step))
        door.engine.quiet()
        door.engine.let_go()
    try:
        other = torch.zeros(2 * door.buffers[bucket].numel())[::2]
        door.average(gradients(rank, at), {bucket: other} if rank else {})
        text = ""
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        door.engine.abandon(e)
        door.engine.quiet()  # the other groups still read their buffers
    averages = door.average(gradients(0, at + 1))
    if codec == "none":
        assert all(torch.equal(averages[n], x) for n, x in gradients(0, at + 1).items())
    door.engine.close()
    return text


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_tensor_that_the_core_cannot_read_is_refused_and_the_others_learn_of_it(
    codec: str, at: int
) -> None:
    others, mine = run(gives_another_buffer, 2, codec, at)
    assert mine.startswith(
        "ArgumentError: the gradients of a.bias: is not dense and contiguous; pass a plain"
    )
    assert "group 1 (a.bias), payload of rank 1" in others


def test_a_rank_that_fails_before_it_has_compared_checksums_still_compares_them() -> None:
    others, mine = run(gives_another_buffer, 2, "int8", 2, 0, group_timeout=10, hard_limit=25)
    assert mine.startswith("ArgumentError") and "payload of rank 1" in others, others


def test_a_step_waits_for_what_was_entered() -> None:
    step = Step(seed=0)
    step.wait()
    step.enter()
    step.leave()
    step.wait()
    assert step.ended_at > 0


@on_ranks(2)
def test_steps_make_no_buffers(rank: int, world: int) -> None:
    """With two states a group has two Buffers, which take turns; it has others where its bucket moves."""
    door = Named("topk", density=0.2, nonfinite="rollback", groups="model")
    seen = []
    for step in range(6):
        if step == 4:
            door.buffers = [buffer.clone() for buffer in door.buffers]
        door.average(gradients(rank, step))
        assert door.engine.layout is not None
        (group,) = door.engine.layout.groups
        assert group.buffers.segments is group.segments and group.buffers.state == group.state.ptr
        seen.append(group.buffers)
    assert seen[0] is seen[2] is not seen[1] is seen[3]
    assert seen[4] not in seen[:4] and seen[5] not in seen[:5]
    assert [b.state for b in seen[2:4]] == [b.state for b in seen[4:]]
    door.engine.close()


@on_ranks(1)
def test_the_norm_is_that_of_buckets_that_have_come(rank: int, world: int) -> None:
    door = Named("none", groups="bucket")
    averages = door.average(gradients(rank, 0))
    door.engine.quiet()
    assert door.engine.layout is not None
    first, *others = door.engine.layout.buckets
    for bucket in others:
        bucket.let_go()
        bucket.buffer[:1].fill_(1e6)  # such as memory that nobody has written
    norm = Scalars().take(door.engine, norms=True)["sidcomp/gradient_norm"]
    assert norm == pytest.approx(
        float(torch.cat([averages[n].flatten() for n in first.names]).norm()), rel=1e-5
    )
    door.engine.close()
