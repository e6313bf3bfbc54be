"""Runs the hooks on a lab's hosts, and turns what was measured into a table."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import summary
from benchmarks.netlab.lab import Lab

Result = dict[str, Any]  # what rank.py writes


def measure(
    lab: Lab,
    task: str,
    hooks: list[str],
    blocks: int,
    steps: int,
    warmup: int,
    timeout: float,
    batch: int | None = None,
    seed: int = 0,
    ranks_per_host: int = 1,
    trace: Path | None = None,
) -> Result:
    """All hooks in the same processes, in turns. trace: rank 0 draws there, of each planned hook, the step
    that its plan predicts over the last one. LabError if a rank fails, or after `timeout` seconds."""
    spec = {
        "task": task, "hooks": hooks, "blocks": blocks, "steps": steps, "warmup": warmup,
        "batch": batch, "seed": seed, "trace": str(trace.absolute()) if trace is not None else None,
    }  # fmt: skip
    result: Result = lab.ask("benchmarks.netlab.rank", spec, timeout, ranks_per_host)
    return result


def loss_at(run: dict[str, Any], step: int) -> float:
    """Of all ranks, over the five steps up to `step`: a single batch's says little."""
    return statistics.fmean(run["losses"][max(0, step - 5) : step])


def medians(result: Result) -> dict[str, float]:
    """ms a step of each hook."""
    return {run["name"]: statistics.median(run["ms"]) for run in result["runs"]}


def terms(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What a traced step consists of, in ms: predicted, and of the last step. in the air: from the end of
    encode to the end of the exchange, waiting included. Sums over the groups; they overlap."""

    def ms(rows: list[dict[str, Any]]) -> dict[str, float]:
        def length(kind: str) -> float:
            return sum(row[kind][1] - row[kind][0] for row in rows if row[kind] is not None) / 1e9

        ready = rows[-1]["backward"][1]
        air = sum(row["exchange"][1] - (row["encode"] or row["backward"])[1] for row in rows) / 1e9
        end = max(row[kind][1] for row in rows for kind in ("exchange", "decode") if row[kind] is not None)
        return {
            "last gradient": ready / 1e9, "encode": length("encode"), "in the air": air,
            "decode": length("decode"), "end": end / 1e9,
        }  # fmt: skip

    predicted, measured = (ms(run["timelines"][name]) for name in ("predicted", "measured"))
    return [
        {"hook": run["name"], "term": term, "predicted": f"{x:.1f}", "measured": f"{measured[term]:.1f}",
         "error": f"{x - measured[term]:+.1f}"}
        for term, x in predicted.items()
    ]  # fmt: skip


def sent(run: dict[str, Any]) -> str:
    """Bytes in a step, the most of any rank."""
    counted = [b for b in run["bytes"] if b is not None]
    return f"{max(counted):,.0f}" if counted else "no counter"


def rows(result: Result) -> list[dict[str, Any]]:
    """One row for each hook; the first is the ceiling."""
    runs, took = result["runs"], medians(result)
    ceiling, plain = took[runs[0]["name"]], took.get("dense")
    at = min(len(run["losses"]) for run in runs)
    out = []
    for run in runs:
        ms, predicted = took[run["name"]], run["predicted_ps"]
        out.append(
            {
                "hook": run["name"],
                "ms a step": str(summary(run["ms"])),
                "of the ceiling": f"{ceiling / ms:.0%}",
                "speed / plain DDP": f"{plain / ms:.2f}" if plain else "",
                "bytes sent a step": sent(run),
                "loss": f"{loss_at(run, at):.4f}",
                "after": str(at),
                "groups": str(run["groups"] or ""),
                "error of one mean": f"{run['error']:.1e}" if run["error"] is not None else "",
                "predicted ms": f"{predicted / 1e9:.1f}" if predicted else "",
                "error": f"{predicted / 1e9 / ms - 1:+.1%}" if predicted else "",
            }
        )
    return out
