"""The numbers of `State.stats`."""

from typing import Any

from sidcomp.runtime.engine import Engine
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group


def statistics(p: Engine, waits: bool = True) -> dict[str, Any]:
    """Returns those of an engine. On CUDA it waits for the device. waits=False: without what the executor
    knows of the last step."""
    groups = [_of_group(p.executor if waits else None, g) for g in p.layout.groups] if p.layout else []
    n = sum(g["n"] for g in groups)
    seconds = [f"{what}_seconds" for what in ("encode", "wait", "decode")]
    return {
        "steps": p.current.begun,
        "world": p.exchange.world if p.exchange else 0,
        "sent_bytes": p.current.sent,
        "received_bytes": p.current.received,
        "dense_bytes": p.current.dense,
        "control_bytes": p.control,
        "wire_bytes": round(p.current.wire),
        "dense_wire_bytes": round(p.current.plain),
        "ratio": p.current.plain / p.current.wire if p.current.wire else 0.0,
        "density": sum(g["count"] for g in groups) / n if n else 0.0,
        **{key: sum(g[key] for g in groups) for key in seconds},
        "allocations": p.allocations,
        "state_bytes": sum(len(s.tensor) for g in p.groups if not g.direct for s in g.states.all),
        "groups": groups,
    }


def _of_group(executor: Executor | None, g: Group) -> dict[str, Any]:
    sliced = g.in_messages and not g.message_plan.whole  # each slice has statistics of its own
    s = executor.stats(g) if executor is not None and not sliced else None
    count = s.count if s is not None else g.n if g.direct else g.plan.k if g.in_messages else 0
    return {
        "names": list(g.names),
        "n": g.n,
        "dtype": g.dtype,
        "codec": g.plan.codec,
        "memory": g.plan.memory,
        "k": g.plan.k,
        "count": count,
        "density": count / g.n,
        "found": s.found if s is not None else count,
        "threshold": s.threshold if s is not None else 0.0,
        "stages": s.stages if s is not None else 0,
        "sent_bytes": g.bytes_sent,
        "steps": g.counters.steps,
        "encode_seconds": g.counters.encode_ns * 1e-9,
        "wait_seconds": g.counters.wait_ns * 1e-9,
        "decode_seconds": g.counters.decode_ns * 1e-9,
    }
