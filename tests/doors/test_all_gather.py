"""sidcomp.fsdp.compress_all_gather: FSDP2's parameters travel rounded, and stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks, run
from local_training import backward, flat, network, train
from test_fsdp import compiled, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

STEPS = 12


def gathered(model: Any) -> torch.Tensor:
    """The parameters as forward passes see them."""
    for module in (model[0], model[2], model):
        module.unshard()
    parts = [p.detach().clone().flatten() for p in model.parameters()]
    for module in (model[0], model[2], model):
        module.reshard()
    return torch.cat(parts)


def trained(rank: int, world: int, codec: str, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """codec "": as torch does it. Returns this rank's shards, late losses, what is gathered, and ratios."""
    model = sharded(init_device_mesh("cpu", (world,)), **options)
    made = sidcomp.fsdp.compress_all_gather(model, codec, **arguments) if codec else []
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(STEPS))
    assert flat(model).dtype is torch.float32
    return flat(model), sum(losses[-4:]), gathered(model), [x.dense_bytes / x.sent_bytes for x in made]


def test_parameters_travel_rounded() -> None:
    plain = run(trained, 2, "", {}, {})
    for codec, arguments, ratio, exact in (
        ("none", {}, 0.8, True),
        ("int8", {}, 2.0, False),
        ("int8", {"exclude": "1-D"}, 1.5, False),
    ):
        both = run(trained, 2, codec, arguments, {})
        assert torch.equal(both[0][2], both[1][2]), "all ranks compute with the same parameters"
        for (theirs, loss, seen, _), (mine, ours, found, ratios) in zip(plain, both, strict=True):
            assert torch.equal(theirs, mine) is exact and torch.equal(seen, found) is exact
            assert ours == pytest.approx(loss, rel=0.05)
            assert len(ratios) == 3 and max(ratios) > ratio


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "world, options", [(2, {}), pytest.param(3, {"mp_policy": MIXED}, marks=pytest.mark.slow)]
)
@on_ranks()
def test_what_is_rounded(rank: int, world: int, options: dict[str, Any]) -> None:
    """Two gathers agree, biases are exact, and a step changes what is drawn."""
    model = sharded(init_device_mesh("cpu", (world,)), **options)
    before = gathered(model)
    sidcomp.fsdp.compress_all_gather(model, "int8", exclude="1-D", rounding="stochastic")
    first, again = gathered(model), gathered(model)
    biases = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in network().parameters()])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    assert 0 < float((first - before).norm() / before.norm()) < 0.01
    assert torch.equal(first, again) and torch.equal(first[biases], before[biases])
    assert not torch.equal(first, gathered(model))


def excluding(rank: int, world: int) -> tuple[bool, bool]:
    """Whether the parameters of the last of some compiled layers are exact, and those of the others."""
    with torch.compiler.set_stance("force_eager"):
        model = compiled(init_device_mesh("cpu", (world,)), "layers")
        before = gathered(model)
        sidcomp.fsdp.compress_all_gather(model, "int8", exclude="output")
        same = gathered(model) == before
    last = sum(p.numel() for p in network(width=40)[4].parameters())
    return bool(same[-last:].all()), bool(same[:-last].all())


def test_what_is_excluded_of_compiled_layers_is_exact() -> None:
    assert run(excluding, 2) == [(True, False)] * 2


@pytest.mark.slow
@on_ranks(4)
def test_other_shards_after_the_forward_pass(rank: int, world: int) -> None:
    """With shards of another mesh after the forward pass, only the forward pass's gather is compressed."""
    model = sharded(init_device_mesh("cpu", (world,)), reshard_after_forward=2)
    made = sidcomp.fsdp.compress_all_gather(model, "int8")
    backward(model, rank, 0)
    ratios = [x.dense_bytes / x.sent_bytes for x in made]
    assert max(ratios) > 1.2


@on_ranks(2)
def test_what_cannot_be_gathered_is_refused(rank: int, world: int) -> None:
    model = sharded(init_device_mesh("cpu", (world,)))
    for codec in ("topk", "signsgd", "powersgd", "terngrad-shared", "efsignsgd"):
        with pytest.raises(sidcomp.UnsupportedError, match=f"codec '{codec}' does not send a rounded value"):
            sidcomp.fsdp.compress_all_gather(model, codec)
    with pytest.raises(sidcomp.SetupError, match=r"rule '\*\.weigth' fits no parameter"):
        sidcomp.fsdp.compress_all_gather(model, exclude="*.weigth")
    with pytest.raises(sidcomp.SetupError, match="call fully_shard or replicate"):
        sidcomp.fsdp.compress_all_gather(network())
    backward(model, rank, 0)  # as it was
