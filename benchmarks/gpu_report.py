"""What gpu_check.py writes of its results, and what of them went wrong.

The figures. A row is one call on n float32 elements in one segment: median and quartiles in microseconds.
`graph`: replayed from a CUDA graph; `stream`: enqueued by the host, both with the L2 flushed before each
call; `warm`: replayed, not flushed. The limit of an encode with a residual is one pass of R += G over the
same memory (12 bytes an element), that of a decode one write of the vector (4 bytes), both measured in the
same run by torch's kernels, that of a hop of a ring what its bytes are of the former. `torch`: the same in
torch's operations, as today's communication hooks do it (benchmarks/baselines.py), from a graph where it
never waits for the device. A gathered decode takes one payload several times.
"""

from typing import Any

CHECKS = {
    "preflight": "Before all else (benchmarks/gpu_lean.py)",
    "ptx": "The build for 8.0 and PTX (benchmarks/gpu_lean.py)",
    "edges": "Steps under whatever moves work in time (benchmarks/gpu_edges.py)",
}
N_COUNTED = 25_600_000  # elements of the encodes whose bytes Nsight Compute counts


def cell(x: Any) -> str:
    if isinstance(x, list):
        return f"{x[0]:.1f} [{x[1]:.1f}, {x[2]:.1f}]"
    return f"{x:.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown; a column for each key of any row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(cell(r.get(c, "")) for c in columns) + " |" for r in rows]


def text_of(results: dict[str, Any]) -> str:
    m = results["machine"]
    lines = [
        f"# CUDA kernels on one {m['gpu']}, {results['date']}",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
    ]
    preflight = results.get("preflight", {})
    lines += ["", *(f"- {name}: {fact}" for name, fact in preflight.get("facts", {}).items())]
    for part, title in CHECKS.items():
        if rows := results.get(part, {}).get("rows"):
            lines += ["", f"## {title}", "", *table(rows)]
    for part, title in (("first", "The kernels that say most"), ("times", "Kernels")):
        if rows := results.get(part):
            lines += ["", f"## {title}", "", *table(rows)]
    if rows := results.get("models"):
        lines += ["", "## Steps of models, one rank (benchmarks/gpu_model.py)", "", *table(rows)]
    if rows := results.get("bytes"):
        lines += ["", f"## Bytes that Nsight Compute counts, n {N_COUNTED:,}", "", *table(rows)]
    if rows := results.get("ranks", {}).get("rows"):
        lines += [
            "",
            "## The host's time to enqueue a group's step (benchmarks/one_gpu.py)",
            "",
            *table(rows),
        ]
    for part, what in (("ranks", "Ranks on this GPU"), ("edges", "Edges"), ("ptx", "8.0 and PTX")):
        lines += ["", *(f"{what}: {w}" for w in results.get(part, {}).get("wrong", []))]
    lines += [
        f"{what}: {results[key]['summary']}."
        for key, what in (("tests", "Tests"), ("ddp", "DDP"))
        if key in results
    ]
    if failed := results.get("tests", {}).get("failed"):
        lines += ["", "Tests that failed:", "", *(f"- {name}" for name in failed), ""]
    for part, said in results.get("killed", {}).items():
        lines += ["", f"Killed within {part}, which had said:", "", *(f"    {line}" for line in said), ""]
    lines += [f"{tool}: {outcome}." for tool, outcome in results.get("sanitizers", {}).items()]
    return "\n".join([*lines, "", ", ".join(f"{k} {v}" for k, v in m.items() if v) + ".", ""])


def failures(results: dict[str, Any]) -> list[str]:
    wrong = [part for part in ("tests", "ddp") if results.get(part, {}).get("status")]
    preflight = results.get("preflight", {}).get("rows", [])
    wrong += [f"preflight of {r['check']}" for r in preflight if r["wrong"]]
    for part in ("first", "times"):
        wrong += [f"times of {r['what']}" for r in results.get(part, []) if "failed" in r]
    wrong += [part for part in ("edges", "ptx", "ranks") if results.get(part, {}).get("wrong")]
    return wrong + [tool for tool, said in results.get("sanitizers", {}).items() if said.startswith("failed")]
