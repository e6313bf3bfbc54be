"""Shows what a State did, and what was planned: a table, a trace for the browser, the data of a picture."""

import json
from pathlib import Path
from typing import Any

from sidcomp import files
from sidcomp.autotune.controller import Controller
from sidcomp.autotune.outcome import SETTLED
from sidcomp.config.grouping import DENSE, counted, shorten
from sidcomp.errors import SetupError
from sidcomp.runtime import announcement
from sidcomp.runtime.engine import Engine
from sidcomp.runtime.group import Group

_KINDS = ("encode", "exchange", "decode")


def controller_of(p: Engine) -> Controller:
    if not isinstance(p.tuner, Controller):
        raise SetupError('nothing is planned here: State(codec="auto"), or groups="auto" with a codec, plans')
    return p.tuner


def report(p: Engine) -> dict[str, Any]:
    """See State.plan_report."""
    c = controller_of(p)
    r = c.report
    ours = r.plan if p.regime.rule != "bucket" else None
    groups = _groups(p, ours["timeline"] if ours is not None else [])
    free = c.unbound if ours is not None else None
    rewrapped = free["time_ps"] + r.measured_ps - r.predicted_ps if free is not None else None
    times = ("dense_ps", "compute_ps", "baseline_ps", "predicted_ps", "measured_ps")
    return {
        **{name: getattr(r, name) for name in ("stage", "why", *times)},
        "rewrapped_ps": rewrapped,
        "finding_steps": r.steps,
        "finding_seconds": r.seconds,
        **{name: list(getattr(r, name)) for name in ("competed", "tried", "compared", "log")},
        "groups": groups,
    }


def _groups(p: Engine, timeline: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each group with what is known of it. timeline: the plan's prediction, if any."""
    rows = []
    for g in p.groups:
        planned = timeline[g.index] if g.index < len(timeline) else None
        dense = g.spec.candidate == DENSE
        rows.append(
            {
                "names": list(g.names),
                "elements": g.n,
                "way": "dense" if dense else p.settings.candidate(g.spec.candidate).brief.label,
                "exchange": announcement.exchange_of(g),
                "rounds": g.plan.rounds if g.in_messages else g.plan.reductions,
                "sent_bytes": g.bytes_sent,
                "predicted_ps": {k: _length(planned[k]) for k in _KINDS} if planned else None,
                "measured_ps": _measured(g),
            }
        )
    return rows


def _length(span: list[int] | None) -> int:
    return span[1] - span[0] if span is not None else 0


def _measured(g: "Group") -> dict[str, int] | None:
    if not g.counters.steps:
        return None
    times = (g.counters.encode_ns, g.counters.wait_ns, g.counters.decode_ns)
    return {k: 1000 * ns // g.counters.steps for k, ns in zip(_KINDS, times, strict=True)}


def explain(p: Engine) -> str:
    """See State.explain."""
    if p.closed:
        steps = counted(p.current.begun, "exchange" if p.updates else "step")
        why = f". {p.tuner.report.why}" if isinstance(p.tuner, Controller) and p.tuner.report.why else ""
        return f"sidcomp: closed after {steps}{why}"
    if not isinstance(p.tuner, Controller):
        return _explain_named(p)
    r = report(p)
    if not p.tuner.found:
        return "\n".join([f"sidcomp is still {r['stage']}", *("  " + line for line in r["log"])])
    dense = all(g["way"] == "dense" for g in r["groups"])
    name = f"{p.plain}'s dense exchange" if dense else counted(len(r["groups"]))
    name += f" ({r['stage']})" * (r["stage"] != SETTLED)
    lines = [f"sidcomp: {name}. {r['why']}", ""]

    def row(what: str, ps: int | None, note: str = "") -> None:
        if ps:
            lines.append(f"  {what:<34}{ps * 1e-9:9.1f} ms a step{'   ' + note if note else ''}")

    row(f"{p.plain}, measured", r["dense_ps"])
    row("without communication: the ceiling", r["compute_ps"])
    row("this plan, predicted", r["predicted_ps"])
    m = r["measured_ps"]
    if m:
        speed = f"{r['dense_ps'] / m:.2f} times {p.plain}'s speed, {r['compute_ps'] / m:.0%} of the ceiling's"
        row("this plan, measured", m, speed if r["dense_ps"] else "")
    for one in r["compared"][-1:]:
        # A plan that lost is not in use any more. One that stayed may have gone since for another reason.
        if one["kept"] and one["step"] <= p.tuner.report.since:
            continue
        then = f"{'this' if one['kept'] else 'an earlier'} plan took {one['measured_ps'] * 1e-9:.1f} ms then"
        row(
            f"{p.plain}, compared in step {one['step']}",
            one["against_ps"],
            f"{then}: it {'stayed' if one['kept'] else 'was given up'}",
        )
    if r["rewrapped_ps"] is not None and r["rewrapped_ps"] < 0.97 * m:
        row("with DDP's buckets as groups", r["rewrapped_ps"], "predicted: ddp = run.rewrap()")
    lines.append(
        f"  search: {r['finding_steps']} steps, {r['finding_seconds']:.1f} s more than as many steps now"
    )
    if r["competed"]:
        lines += ["", "  plans that were measured in turns:"]
    for one in r["competed"]:
        groups = f"{counted(one['groups'])}, {', '.join(one['ways'])}"
        times = f"predicted {one['predicted_ps'] * 1e-9:.1f}, measured {one['measured_ps'] * 1e-9:.1f} ms"
        lines.append(f"    {groups}: {times} in {one['steps']} steps{' (chosen)' * one['chosen']}")
    if r["groups"]:
        lines += ["", *_table(r["groups"])]
    if r["log"]:
        lines += ["", *("  " + line for line in r["log"])]
    return "\n".join(lines)


def _explain_named(p: Engine) -> str:
    """Explains what the State does with a codec and groups that the program has named."""
    if p.exchange is None or p.layout is None:
        return "sidcomp: there are no groups yet: train some steps first"
    lines = [f"sidcomp: {announcement.line(p)}"]
    rows = _groups(p, [])
    took = [row["measured_ps"] for row in rows if row["measured_ps"] is not None]
    if took:
        lines += [
            "",
            f"  {p.current.begun} steps; sums over the groups, whose exchanges overlap "
            f"{'' if p.updates else 'backward() and '}one another:",
        ]
        for kind in _KINDS:
            lines.append(f"  {kind:<34}{sum(t[kind] for t in took) * 1e-9:9.2f} ms a step")
    return "\n".join([*lines, "", *_table(rows)])


def _table(groups: list[dict[str, Any]]) -> list[str]:
    head = ["group", "parameters", "elements", "sent as", "exchange", "bytes", *_KINDS]
    rows = [head]
    for i, g in enumerate(groups):
        said, took = g["predicted_ps"], g["measured_ps"]
        times = [" / ".join(f"{t[k] * 1e-9:.2f}" if t else "-" for t in (said, took)) for k in _KINDS]
        counts = f"{g['elements']:,}", f"{g['sent_bytes']:,}"
        rows.append([str(i), shorten(g["names"], 2), counts[0], g["way"], g["exchange"], counts[1], *times])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        *table,
        "  encode, exchange, decode: ms, predicted / measured (with the wait for earlier exchanges)",
    ]


def timelines(p: Engine) -> dict[str, list[dict[str, Any]] | None]:
    """The predicted and the last measured iteration, in ps, as timelines of `planner.plan`. Nothing is
    predicted where nothing is planned."""
    p.pause()
    plan = p.tuner.report.plan if isinstance(p.tuner, Controller) and p.regime.rule != "bucket" else None
    predicted = plan["timeline"] if plan is not None else None
    if p.layout is None or p.on_device or not all(s.arrived_at for s in p.layout.buckets):
        return {"predicted": predicted, "measured": None}
    p.quiet()
    buckets, rows = p.layout.buckets, []
    # The model's iteration begins where the one before ended. Aligns the measured one at the first bucket.
    lead = predicted[0]["backward"][1] if predicted else 0
    zero = before = buckets[0].arrived_at - lead // 1000
    for g in p.layout.groups:
        ready = max(s.arrived_at for s in g.buckets)
        moments = {
            "backward": (before, ready),
            "encode": (g.stage.begun_at, g.stage.exchanged_at),
            "exchange": (g.stage.exchanged_at, g.stage.arrived_at),
            "decode": (g.stage.arrived_at, g.stage.decoded_at),
        }
        before = max(before, ready)
        spans = {k: [1000 * (start - zero), 1000 * (end - zero)] for k, (start, end) in moments.items()}
        rows.append({"group": g.index, "compressed": announcement.compressed(g), **spans})
    return {"predicted": predicted, "measured": rows}


def trace(p: Engine, path: str | Path) -> None:
    """See State.timeline."""
    events: list[dict[str, Any]] = []
    labels = [g.label() for g in p.layout.groups] if p.layout is not None else []
    for pid, (name, rows) in enumerate(timelines(p).items()):
        if rows is None:
            continue
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, kind in enumerate(("backward", *_KINDS)):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": kind}})
            for row in rows:
                if row[kind] is None or row[kind][1] <= row[kind][0]:
                    continue
                start, end = row[kind]
                label = labels[row["group"]] if row["group"] < len(labels) else f"group {row['group']}"
                event = {"ph": "X", "pid": pid, "tid": tid, "name": label}
                events.append({**event, "ts": start * 1e-6, "dur": (end - start) * 1e-6})
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    files.write(path, lambda file: file.write(text.encode()))
