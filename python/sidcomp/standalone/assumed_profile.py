"""Profiles of `sidcomp bench`: costs that were measured, for a model that did not train, and the link that
they show."""

from itertools import accumulate
from typing import Any

from sidcomp.errors import ArgumentError
from sidcomp.planner.profile import Profile, model_digest, slowdown_permille
from sidcomp.standalone.estimate import BUCKET, instance_of
from sidcomp.standalone.model_shapes import Model
from sidcomp.standalone.simulation import Link

_FIRST = 2**20  # bytes of the first bucket of DDP, where no bucket_cap_mb is given; BUCKET is for the others


def assumed_profile(model: Model, step_ms: float, world: int, found: dict[str, Any]) -> Profile:
    """The profile of `model`, whose step computes for step_ms, on CPUs over Gloo.

    found: "methods", "contention", "threads" and "measured_s", as a rank of `sidcomp bench` prints them. The
    buckets are those of DDP by default, and plain DDP's step is the one that the planner's model predicts.
    """
    instance = instance_of(model, step_ms, [])
    forward = instance["forward_ps"]
    ready = [forward + ps for ps in accumulate(t["backward_ps"] for t in instance["tensors"])]
    tensors: list[dict[str, Any]] = [
        {"name": t["name"], "bytes": t["bytes"], "bucket": 0, "ready_ps": at, "kind": "float32 cpu"}
        for t, at in zip(instance["tensors"], ready, strict=True)
        if t["bytes"]
    ]
    bucket = held = 0
    for t in tensors:
        t["bucket"], held = bucket, held + t["bytes"]
        if held >= (BUCKET if bucket else _FIRST):
            bucket, held = bucket + 1, 0
    plain: dict[str, Any] = {
        "model": model_digest((p.name, p.shape, "float32") for p in model.parameters if p.elements),
        "world": world,
        "device": "cpu",
        "backend": "gloo",
        "threads": found["threads"],
        "tensors": tensors,
        "forward_ps": min(t["ready_ps"] for t in tensors),
        "compute_ps": round(step_ms * 1e9),
        "dense_ps": round(step_ms * 1e9),
        "methods": found["methods"],
        "contention": {**found["contention"], "slowdown_permille": slowdown_permille(found["contention"])},
        "measured_s": found["measured_s"],
    }
    header = {"version": Profile.version, "format": Profile.format}
    profile = Profile.of({**plain, **header})
    return Profile.of({**plain, **header, "dense_ps": profile.plain_ps()})


def measured_link(profile: Profile) -> Link:
    """The link that plain DDP's all-reduce shows, which is taken for a ring: 2 (W - 1) rounds, each of a W-th
    of the bytes. Raises ArgumentError where larger exchanges took no longer."""
    dense, world = profile.methods[0].exchange_curve, profile.world
    (few, _), (most, _) = dense.knots[0], dense.knots[-1]
    few = max(few, most // 16)
    rounds = 2 * (world - 1)
    slope = (dense.at(most) - dense.at(few)) / max(1, most - few)  # ps for a byte
    if slope <= 0:
        raise ArgumentError("the profile shows no link: its exchanges take no longer with more bytes")
    gbit = rounds / world * 8e3 / slope
    return Link(gbit, max(0.0, (dense.at(few) - slope * few) / rounds * 1e-6))
