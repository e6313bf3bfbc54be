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
    if rows := results.get("times"):
        lines += ["", "## Kernels", "", *table(rows)]
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
    lines += ["", *(f"Ranks on this GPU: {w}" for w in results.get("ranks", {}).get("wrong", []))]
    lines += [
        f"{what}: {results[key]['summary']}."
        for key, what in (("tests", "Tests"), ("ddp", "DDP"))
        if key in results
    ]
    lines += [f"Killed within {part}: {said}." for part, said in results.get("killed", {}).items()]
    lines += [f"{tool}: {outcome}." for tool, outcome in results.get("sanitizers", {}).items()]
    return "\n".join([*lines, "", ", ".join(f"{k} {v}" for k, v in m.items() if v) + ".", ""])


def failures(results: dict[str, Any]) -> list[str]:
    wrong = [part for part in ("tests", "ddp") if results.get(part, {}).get("status")]
    wrong += [f"times of {r['what']}" for r in results.get("times", []) if "failed" in r]
    wrong += ["ranks"] if results.get("ranks", {}).get("wrong") else []
    return wrong + [tool for tool, said in results.get("sanitizers", {}).items() if said.startswith("failed")]
