"""A State's figures as a flat dictionary of numbers, for TensorBoard, Weights & Biases and the like."""

from math import sqrt

import torch

from sidcomp.runtime.checkpoint import residual_of
from sidcomp.runtime.engine import Engine


class Scalars:
    """Gives the figures of the steps since it was last asked."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, p: Engine, norms: bool) -> dict[str, float]:
        """See State.log."""
        p.pause()
        p.quiet()
        groups = [g for g in p.groups if g.counters.steps]
        now = {
            "steps": float(p.current.begun),
            "wire": p.current.wire,
            "plain": p.current.plain,
            "encode": sum(g.counters.encode_ns for g in groups) * 1e-6,
            "wait": sum(g.counters.wait_ns for g in groups) * 1e-6,
            "decode": sum(g.counters.decode_ns for g in groups) * 1e-6,
        }
        since = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
        self._before = now
        steps = since["steps"]
        if steps <= 0:
            return {}
        out = {
            "sidcomp/wire_bytes": since["wire"] / steps,
            "sidcomp/dense_wire_bytes": since["plain"] / steps,
            "sidcomp/ratio": since["plain"] / since["wire"] if since["wire"] else 0.0,
        }
        if not p.on_device:  # there the host sees only when they were enqueued
            # new groups count from 0
            out |= {f"sidcomp/{k}_ms": max(0.0, since[k]) / steps for k in ("encode", "wait", "decode")}
        if norms:
            residual, gradient = _residual_norm(p), _gradient_norm(p)
            out["sidcomp/residual_norm"], out["sidcomp/gradient_norm"] = residual, gradient
            out["sidcomp/residual_over_gradient"] = residual / gradient if gradient else 0.0
        return out


def _residual_norm(p: Engine) -> float:
    squares = (float(residual_of(g)[0].double().square().sum()) for g in p.groups if g.plan.vectors)
    return sqrt(sum(squares))


def _gradient_norm(p: Engine) -> float:
    # A bucket that has not come in the last step, or whose buffer the door has taken back, has no values.
    buckets = [b for b in p.layout.buckets if b.ptr is not None] if p.layout is not None else []
    return sqrt(sum(float(torch.linalg.vector_norm(b.buffer.float()).double() ** 2) for b in buckets))
