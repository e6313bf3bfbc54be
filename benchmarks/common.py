"""What the benchmarks share: calls timed in turn, a table, a JSON file that says where it was measured."""

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sidcomp import _core

from benchmarks import compact_json, payloads
from benchmarks.compact_json import RESULTS, cell

__all__ = [
    "RESULTS", "cell", "machine", "race", "ratio", "report", "side_by_side", "summary", "version", "write",
]  # fmt: skip


def command(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, which shows its module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc, formatter_class=raw)


def over(of: dict[str, Any], base: Mapping[str, float]) -> list[float]:
    """What each seed's loss is over that of the same seed in `base`: seeds differ more than codecs do."""
    return [loss / base[seed] - 1 for seed, loss in of["loss"].items() if seed in base]


def loss_row(
    of: dict[str, Any], each: list[float], base: str, metric: str = "validation loss"
) -> dict[str, str]:
    """The columns that all tables of losses have. each: as `over` gives it, over what is named `base`."""
    return {
        "dense bytes / sent bytes": f"{of['ratio']:.1f}",
        metric: f"{statistics.mean(of['loss'].values()):.4f}",
        "seeds": ", ".join(f"{x:.4f}" for x in of["loss"].values()),
        f"over {base}": f"{100 * statistics.mean(each):+.2f} %" if each else "",
    }


class Timing(NamedTuple):
    """Milliseconds: median, the first and third quartile, and each of them in the order of the turns."""

    median: float
    low: float
    high: float
    times: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def summary(milliseconds: list[float]) -> Timing:
    quartiles = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return Timing(statistics.median(milliseconds), quartiles[0], quartiles[2], tuple(milliseconds))


def ratio(over: Timing, under: Timing, factor: float = 1.0) -> str:
    """The quartiles of the ratio, turn by turn, of what `race` has timed together."""
    each = [factor * a / b for a, b in zip(over.times, under.times, strict=True)]
    low, _, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def side_by_side(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What `call`, a function of a module, returns for each of these: one process for each core. For what is
    not timed."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(call, *each) for each in arguments]]


def race(
    runners: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Times each runner `repeats` times, in turn, so that what disturbs the machine meets all alike. Each
    turn begins with another one: the first may find that what all read is in no cache. `before` is called
    before each, and not timed."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for i in range(warmup + repeats):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            before()
            start = time.perf_counter()
            runners[name]()
            if i >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: summary(t) for name, t in times.items()}


def version(name: str) -> str:
    """The version of a package, whether or not this process has imported it: ranks may be other processes."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a source tree on the path, or nothing
        pass
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError:
        return "not installed"


def machine() -> dict[str, Any]:
    """The machine in words, without its name, and the versions."""
    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "isa": _core.isa_best(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "sidcomp": _core.version,
        **{name: version(name) for name in ("numpy", "torch")},
    }


def report(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    note: str,
    out: Path | None,
    more: dict[str, Any] | None = None,
) -> None:
    """Prints `rows` as a table and, if asked, writes them to `out`/`name`.json. more: entries for
    the file."""
    where = machine()
    table = Table(title=title, caption=escape(note), caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*map(escape, map(cell, row.values())))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print(", ".join(f"{k} {v}" for k, v in where.items()), highlight=False)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write(
        out / f"{name}.json", {"title": title, "note": note, "machine": where, **(more or {}), "rows": rows}
    )


def write(file: Path, record: dict[str, Any]) -> None:
    """Writes a result, with what the payloads of its codecs are today. A file that is there may keep rows,
    and so it keeps what it says of payloads: to measure a stale one again, delete it first."""
    rows = record.get("rows", [])
    was = json.loads(file.read_text()).get("payloads", {}) if file.exists() else {}
    now = payloads.of({**record, "rows": rows})
    rest = {name: value for name, value in record.items() if name not in ("payloads", "rows")}
    now = {name: was.get(name, digest) for name, digest in now.items()}
    file.write_text(compact_json.dumps({**rest, "payloads": now, "rows": rows}))
