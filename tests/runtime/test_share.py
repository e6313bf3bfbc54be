"""Ranks begin with rank 0's tensors, and send them only if some rank has others."""

import pytest
import torch
import torch.distributed as dist
from harness import run
from sidcomp.local.vectors import share

TENSORS = [  # odd strides, signed zeros, NaN, integers, signs that are pending, and nothing
    lambda: torch.arange(12.0).view(3, 4).t(),
    lambda: torch.tensor([0.0, torch.nan, -torch.inf, 1e-40]),
    lambda: torch.tensor(3.5, dtype=torch.bfloat16),
    lambda: torch.tensor([[1, 2], [3, 4]]),
    lambda: torch._neg_view(torch.tensor([3.0, -1.0])),
    lambda: torch.empty(0),
]


def bits(x: torch.Tensor) -> list[int]:
    return x.resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


def sent(rank: int, world: int, other: int | None) -> int:
    """other: the tensor of which rank 2 has another value. Returns how many bytes are broadcast."""
    tensors, expected = ([make() for make in TENSORS] for _ in range(2))
    if rank == 2 and other is not None:
        x = tensors[other]
        x.copy_(-x if x.is_floating_point() else x.flip(0))
    total, broadcast = 0, dist.broadcast

    def counted(x: torch.Tensor, *given: object) -> object:
        nonlocal total
        total += x.numel() * x.element_size()
        return broadcast(x, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        share(tensors, dist.group.WORLD)
    assert [bits(x) for x in tensors] == [bits(x) for x in expected]
    return total


@pytest.mark.parametrize("other", [0, 1, 2, 3, 4])
def test_one_rank_has_other_tensors(other: int) -> None:
    """Minus zero, another order, another sign of a NaN: rank 0's bytes arrive."""
    assert run(sent, 3, other) == [4 * 18 + 2 + 4 * 8] * 3


def test_ranks_with_the_same_tensors_send_none() -> None:
    assert run(sent, 3, None) == [0] * 3
