"""What may be wrong with a checkpoint: places in it, and what may be there instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Path = tuple[Any, ...]

# ---- tensors in another form

Change = Callable[[torch.Tensor], Any]
EXACT: dict[str, Change] = {
    "float64": lambda t: t.double(),
    "not contiguous": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "a view": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "to be negated": lambda t: torch._neg_view(-t),
    "a parameter": lambda t: nn.Parameter(t.clone()),
}
ROUNDED: dict[str, Change] = {"float16": lambda t: t.half(), "bfloat16": lambda t: t.bfloat16()}
REFUSED: dict[str, Change] = {
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t != 0,
    "complex": lambda t: t.to(torch.complex64),
    "cut": lambda t: t[..., :1].contiguous(),
    "flat": lambda t: t.view(-1),
    "another vector": lambda t: torch.cat([t, t]),
    "no vector": lambda t: t[:0],
    "longer": lambda t: torch.cat([t, t], dim=-1),
    "not of float32": lambda t: t.double() + 1e-30,
    "beyond float32": lambda t: t.double() + 1e300,
    "NaN": lambda t: t.clone().fill_(float("nan")),
    "Inf": lambda t: torch.cat([t[..., 1:], torch.full_like(t[..., :1], float("inf"))], dim=-1),
    "on no device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
}


# ---- fields that are not there, or something else


def paths(x: Any, at: Path = ()) -> Iterator[Path]:
    """Of all that is in it, from the outside to the inside."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def changed(saved: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy, as deep as the path goes; GONE: without it."""
    out = copy.copy(saved)
    inner: Any = out
    for key in path[:-1]:
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return out


def same(a: Any, b: Any, widened: bool = False) -> bool:
    """NaN is the same as NaN; widened: and a number as itself in another dtype."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.device != b.device or not (widened or a.dtype == b.dtype):
            return False
        return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k], widened) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, widened) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


GONE = object()
VALUES = (GONE, None, True, -2, 7, 2**70, 1.5, float("nan"), "x", [], {}, [[]], {"x": 1}, torch.ones(3), b"x")
