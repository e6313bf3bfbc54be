"""What a GPU that is lent for fifteen minutes is asked, in two calls: bits first, then launches, then speed.

    python benchmarks/gpu_check.py --lease 1 --prebuilt --out build/lease     # at most 520 s
    python benchmarks/gpu_check.py --lease 2 --prebuilt --out build/lease     # at most 175 s

Nothing is installed. --prebuilt takes the build of `make gpu-prebuilt`; without it the kernels are compiled
first, for the GPU that is there, which is not counted. Each part begins as soon as the one before is over,
and is ended with all its processes at its second of the call. What it has measured by then stays: each row
goes to lease-<n>.jsonl as soon as it is there, and lease-<n>.md is written after each part. A process that
hangs or dies costs the case that it was in; the next one goes on behind it. Ends with 0 if all went well, 1
if something is wrong, 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_edges, prebuilt  # noqa: E402
from benchmarks.processes import Row, end, start  # noqa: E402

LIMITS = {1: 520, 2: 175}  # seconds of a call
SCHEDULE: dict[int, dict[str, float]] = {  # the second of the call at which a part ends
    1: {
        "facts": 12, "codecs": 40, "launches": 60, "times": 140, "ranks": 200, "edges": 290, "profile": 350,
        "tests": 463, "memcheck": 487, "racecheck": 515,
    },
    2: {"every codec": 95, "steps": 165},
}  # fmt: skip
STUCK = {  # seconds without a word, after which a process that has named its units is taken for hung
    "codecs": 8, "launches": 6, "times": 20, "ranks": 60, "edges": 40, "memcheck": 24, "racecheck": 28,
    "every codec": 20, "steps": 40,
}  # fmt: skip
MOST_WRONG = 5  # codec cases: with more, nothing is asked behind the times
EDGES_AT_ONCE = 4
WORKERS, EACH, SHARE = 8, 30, 12  # processes of the tests, seconds of one test, one test in so many
SANITIZED = ("topk", "sidco-e", "int8", "efsignsgd", "dgc", "powersgd")
NO_GPU = 77


class Call:
    """One call: its clock, what it has found, and the files in which that is."""

    def __init__(self, number: int, out: Path, rehearsed: Path | None = None) -> None:
        """rehearsed: the package's folder with a build for the CPU emulation, in a GPU's place."""
        self.number, self.rehearsed = number, rehearsed
        self.begun = time.monotonic()
        self.part = ""
        self.entries: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        self.record, self.report = out / f"lease-{number}.jsonl", out / f"lease-{number}.md"
        self._file = self.record.open("x")  # not over the results of another call
        path = [rehearsed or ROOT / "python", ROOT / "tests" / "support", ROOT, os.environ.get("PYTHONPATH")]
        self.env = {"PYTHONPATH": os.pathsep.join(map(str, filter(None, path)))}

    def now(self) -> float:
        return time.monotonic() - self.begun

    def add(self, **entry: Any) -> None:
        entry = {"s": round(self.now(), 2), "part": self.part, **entry}
        self.entries.append(entry)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def row(self, row: Row) -> None:
        self.add(row=row)
        if "case" not in row:  # those of the edges are not compared yet
            short = [f"{k} {cell(v[0] if isinstance(v, list) else v)}" for k, v in row.items() if v]
            print(f"  {', '.join(short).removeprefix('what ')}", flush=True)

    def wrong(self, part: str = "") -> list[Row]:
        return [r for r in rows_of(self.entries, part) if r.get("wrong")]

    def write(self) -> None:
        temporary = self.report.with_suffix(".part")
        temporary.write_text(text_of(self.number, self.entries))
        temporary.replace(self.report)  # whole, or as it was


def recorded(file: Path) -> list[dict[str, Any]]:
    """What a call has written, but for a line that was cut."""
    return [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")]


def rows_of(entries: Iterable[dict[str, Any]], part: str = "") -> list[Row]:
    """Of all parts without a name."""
    return [e["row"] for e in entries if "row" in e and part in ("", e["part"])]


# ---- processes ---------------------------------------------------------------------------------------------


class Task:
    """A command that names its units before it runs them (processes.run_units)."""

    def __init__(self, command: list[str], name: str = "", finds: str = "(?!)", **env: str) -> None:
        """name: stands before its units' in what is said of them. finds: a line with this is a sanitizer's
        finding."""
        self.command, self.name, self.finds, self.env = command, name, re.compile(finds), env
        self.left: list[str] | None = None  # its units; None: it has not named them yet
        self.at = self.after = ""  # the unit that has begun; the last one that is over
        self.said = ""  # its last other line


class Output:
    """A running command whose lines are taken as they come."""

    def __init__(self, call: Call, command: list[str], env: dict[str, str]) -> None:
        self._file, self._seen = tempfile.TemporaryFile(), 0  # noqa: SIM115
        self.since = call.now()
        self.process = start(command, self._file, **{**call.env, **env})

    def lines(self, call: Call) -> list[str]:
        """New ones that are whole."""
        said = os.pread(self._file.fileno(), 1 << 24, self._seen)  # the process shares the file's position
        said = said[: said.rfind(b"\n") + 1]
        self._seen += len(said)
        if said:
            self.since = call.now()
        return said.decode(errors="replace").splitlines()

    def end(self) -> None:
        end(self.process)


def follow(call: Call, tasks: list[Task], until: float, at_once: int = 1) -> None:
    """Runs the tasks, so many at once, until that second. What hangs or dies costs the unit that it was in:
    the next process goes on behind it."""
    waiting, running = deque(tasks), list[tuple[Task, Output]]()
    stuck = STUCK[call.part] * (1 if call.rehearsed is None else 10)
    try:
        while (waiting or running) and call.now() < until:
            while waiting and len(running) < at_once:
                task = waiting.popleft()
                after = ["--after", task.after] if task.after else []
                running.append((task, Output(call, [*task.command, *after], task.env)))
            for task, output in list(running):
                status = output.process.poll()  # all that it has said by now is read below
                take(call, task, output.lines(call))
                # Nobody knows how long a first import of torch takes.
                hung = status is None and task.left is not None and call.now() - output.since > stuck
                if status is None and not hung:
                    continue
                output.end()
                running.remove((task, output))
                if status == 0 and task.left == []:
                    continue
                if lose(call, task, f"hung for {stuck:.0f} s" if hung else f"ended with status {status}"):
                    waiting.appendleft(task)
            time.sleep(0.02)
    finally:
        for task, output in running:
            output.end()
            take(call, task, output.lines(call))
        for task in [*(t for t, _ in running), *waiting]:
            if task.left != []:
                call.add(cut=[f"{task.name}: "] * bool(task.name) + (task.left or ["all of it"]))
                print(f"  cut: {' '.join(call.entries[-1]['cut'])[:200]}", flush=True)


def take(call: Call, task: Task, lines: list[str]) -> None:
    for line in lines:
        try:
            entry = json.loads(line) if line.startswith("{") else None
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict):
            if line.strip():
                task.said = line[:500]
                call.add(said=task.said)
            if task.finds.search(line):
                call.row({"what": task.at, "wrong": line.strip("= ")[:300]})
        elif "row" in entry:
            call.row(entry["row"])
        elif "units" in entry:
            task.left = list(entry["units"])
        else:
            call.add(**entry)
            task.at = entry.get("begin", "")
            if task.left and "end" in entry:
                task.left.remove(entry["end"])
                task.after = entry["end"]


def lose(call: Call, task: Task, why: str) -> bool:
    """Says what a process that has ended cost. Whether another one is to go on."""
    at = task.at or ("behind the last" if task.left == [] else "before the first")
    what = f"{task.name}, {at}" if task.name else at
    call.row({"what": what, "wrong": f"{why}: {task.said}" if task.said else why})
    if not task.at or not task.left:
        return False
    task.left.remove(task.at)
    task.after, task.at = task.at, ""
    return bool(task.left)


def listen(
    call: Call, commands: dict[str, list[str]], until: float, hear: Callable[[str, str], None]
) -> dict[str, int]:
    """Runs commands at once, until that second; passes on each one's name and lines as they come. Returns the
    status of those that have ended."""
    running = {name: Output(call, command, {}) for name, command in commands.items()}
    ended: dict[str, int] = {}
    try:
        while len(ended) < len(running) and call.now() < until:
            for name, output in running.items():
                status = output.process.poll()
                for line in output.lines(call):
                    hear(name, line)
                if status is not None:
                    ended[name] = status
            time.sleep(0.02)
    finally:
        for name, output in running.items():
            output.end()
            for line in output.lines(call):
                hear(name, line)
    return ended


# ---- parts -------------------------------------------------------------------------------------------------


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, f"benchmarks/{script}.py", *arguments]


def find(tool: str, *folders: str) -> str | None:
    found = shutil.which(tool)
    return found or next((str(p) for f in folders for p in Path("/").glob(f"{f}/{tool}")), None)


def sanitizer() -> str | None:
    return find("compute-sanitizer", "usr/local/cuda*/bin")


def profiler() -> str | None:
    return find("ncu", "usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*")


def run_facts(call: Call, until: float) -> None:
    code = "from sidcomp import _core; count, why = _core.cuda_devices(); print(count, _core.cuda_archs, why)"
    torchs = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available()); "
    commands = {
        "sidcomp": [sys.executable, "-c", code],
        "torch": [
            sys.executable,
            "-c",
            torchs + "t.cuda.is_available() and print('NCCL', t.cuda.nccl.version())",
        ],
        "numpy": [sys.executable, "-c", "import numpy; print(numpy.__version__)"],
    }
    if smi := shutil.which("nvidia-smi"):
        query = "name,driver_version,clocks.max.sm,clocks.max.memory,power.limit,memory.total"
        commands["GPU"] = [smi, f"--query-gpu={query}", "--format=csv,noheader"]
    said: dict[str, list[str]] = {name: [] for name in commands}
    ended = listen(call, commands, until, lambda name, line: said[name].append(line))
    facts = {name: "; ".join(lines[-2:]) for name, lines in said.items()}
    for package in ("pytest", "hypothesis", "xdist", "pytest_timeout"):
        facts[package] = "yes" if importlib.util.find_spec(package) else "no"
    facts |= {"compute-sanitizer": sanitizer() or "no", "ncu": profiler() or "no"}
    for name, fact in facts.items():
        call.row({"what": name, "is": fact})
    if ended.get("sidcomp"):  # without an answer in time, the next part shows it
        call.row({"what": "the build", "wrong": f"does not load: {facts['sidcomp']}"})


def run_ranks(call: Call, until: float) -> None:
    steps = [] if call.rehearsed is None else ["--steps", "2"]
    follow(call, [Task(python("one_gpu", *steps), **stand_in(call))], until)


def stand_in(call: Call) -> dict[str, str]:
    """The environment that gives a rehearsal an NCCL."""
    if call.rehearsed is None:
        return {}
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import fake_nccl

    return {"SIDCOMP_NCCL": str(fake_nccl.build())}


def run_edges(call: Call, until: float) -> None:
    env = stand_in(call)
    tasks = [Task(python("gpu_edges", case), case, **env) for case in gpu_edges.CASES]
    follow(call, tasks, until, EDGES_AT_ONCE)
    for row in gpu_edges.compared(rows_of(call.entries, "edges")):
        call.row(row)


METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__grid_size", "launch__registers_per_thread",
)  # fmt: skip


def run_profile(call: Call, until: float) -> None:
    """Why a time is off. Clocks and caches stay as they are."""
    tool, lines = profiler(), list[str]()
    if not tool and call.rehearsed is None:
        return call.row({"what": "Nsight Compute (ncu)", "is": "not there"})
    counting = [
        "--csv", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--print-units", "base", "--kernel-name", "regex:sid_", "--metrics", ",".join(METRICS),
    ]  # fmt: skip
    command = [*([tool, *counting] if tool else []), *python("gpu_time", "once")]

    def hear(name: str, line: str) -> None:
        lines.append(line)
        if line.strip():
            call.add(said=line[:500])

    ended = listen(call, {"ncu": command}, until, hear)
    for row in counted(lines):
        call.row(row)
    if ended.get("ncu"):
        why = next((x for x in lines if "==ERROR==" in x), (lines or ["nothing said"])[-1])
        call.row({"what": "ncu", "is": f"ended with status {ended['ncu']}: {why[:300]}"})


def counted(lines: list[str]) -> list[Row]:
    """Of what ncu prints: kernels as they were launched, and what was counted of each."""
    rows: dict[int, Row] = {}
    for one in csv.DictReader(line for line in lines if line.startswith('"')):
        if (one.get("Metric Name") or "") in METRICS:
            kernel = one["Kernel Name"].split("(")[0].removeprefix("void ")
            row = rows.setdefault(int(one["ID"]), {"what": kernel})
            row[one["Metric Name"].removesuffix(".sum")] = float(one["Metric Value"].replace(",", ""))
    return [rows[i] for i in sorted(rows)]


TEST = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*?(tests/\S+::.+?)(?: - |$)|"
                  r"(tests/\S+::\S+).* (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")  # fmt: skip


def run_tests(call: Call, until: float) -> None:
    """A twelfth of the CUDA tests, others on other days. A test that hangs or makes the device unusable costs
    its process, which is replaced, where pytest-xdist and pytest-timeout are there."""
    if not importlib.util.find_spec("pytest"):
        return call.row({"what": "pytest", "is": "not there"})
    workers, counts = [], Counter[str]()
    if importlib.util.find_spec("xdist"):
        workers += [
            "-n",
            str(min(WORKERS, os.cpu_count() or 1)),
            "--max-worker-restart",
            "40",
            "-p",
            "lost_device",
        ]
    if importlib.util.find_spec("pytest_timeout"):
        workers += [
            f"--timeout={EACH}",
            "--timeout-method=thread",
        ]  # ends the process: a kernel cannot be ended
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *workers,
               "tests/cuda/test_cuda.py", "tests/cuda/test_cuda_exchanges.py"]  # fmt: skip
    drawn = {"SHARE": str(SHARE), "TURN": str(datetime.date.today().toordinal())}
    call.env |= drawn if call.rehearsed is None else {"SHARE": "400", "TURN": "0"}
    failed = set[str]()

    def hear(name: str, line: str) -> None:
        if line.strip():
            call.add(said=line[:500])
        if not (found := TEST.search(line)):
            return
        outcome, test = found[1] or found[4], found[2] or found[3]
        if test in failed:  # said again at the end
            return
        counts[outcome] += 1
        if outcome in ("FAILED", "ERROR"):
            failed.add(test)
            call.row({"what": test, "wrong": outcome.lower()})

    ended = listen(call, {"pytest": command}, until, hear)
    status = ended.get("pytest")
    text = ", ".join(f"{n} {outcome.lower()}" for outcome, n in counts.items()) or "nothing was run"
    call.row({"what": "tests", "is": text + ("; cut" if status is None else "")})
    if status and not failed:
        call.row({"what": "tests", "wrong": f"pytest ended with status {status}"})


FINDING = r"^=+ (?:Invalid|Misaligned|Program hit|Error: |Warning: Race|Race|Uninitialized|.*hazard)"


def run_sanitizer(call: Call, until: float) -> None:
    """memcheck or racecheck over six codecs; only sidcomp's kernels are looked at."""
    tool = sanitizer()
    if not tool and call.rehearsed is None:
        return call.row({"what": "compute-sanitizer", "is": "not there"})
    how = ["--tool", call.part, "--kernel-name", "kernel_substring=sid_", "--error-exitcode", "99"]
    command = [*([tool, *how] if tool else []), *python("gpu_kernels", "codecs", *SANITIZED)]
    follow(call, [Task(command, finds=FINDING)], until)


def asked(script: str, what: str) -> Callable[[Call, float], None]:
    """A part that follows one script."""
    return lambda call, until: follow(call, [Task(python(script, what))], until)


PARTS: dict[str, Callable[[Call, float], None]] = {
    "facts": run_facts, "codecs": asked("gpu_kernels", "codecs"),
    "launches": asked("gpu_kernels", "launches"), "times": asked("gpu_time", "some"), "ranks": run_ranks,
    "edges": run_edges, "profile": run_profile, "tests": run_tests, "memcheck": run_sanitizer,
    "racecheck": run_sanitizer, "every codec": asked("gpu_time", "all"), "steps": asked("gpu_time", "steps"),
}  # fmt: skip


# ---- the call ----------------------------------------------------------------------------------------------


def plan(number: int, only: list[str]) -> dict[str, float]:
    """The chosen parts, and the second at which each ends: the others take no time."""
    ends, before, total = {}, 0.0, 0.0
    for part, at in SCHEDULE[number].items():
        if part in only or not only:
            total += at - before
            ends[part] = total
        before = at
    return ends


def run(call: Call, ends: dict[str, float], took: dict[str, float] | None = None) -> int:
    """took: the seconds of each part in another call; then each but the facts is killed at a random moment
    within them."""
    for part, until in ends.items():
        call.part = part
        print(f"{part}, from {call.now():.0f} s to {until:.0f} s at most", flush=True)
        if took is not None and part != "facts":
            until = min(until, call.now() + random.uniform(0, took[part]))
        begun = call.now()
        PARTS[part](call, until)
        call.add(over=round(call.now() - begun, 2))
        call.write()
        if part == "facts" and (call.wrong() or no_gpu(call)):
            return 1 if call.wrong() else NO_GPU
        if part == "times" and len(call.wrong("codecs")) > MOST_WRONG:
            print(f"gpu-check: {len(call.wrong('codecs'))} codec cases are wrong: nothing more is asked")
            break
    for row in call.wrong():
        print(f"wrong: {row['what']}: {row['wrong'][:200]}")
    how = "something is wrong" if call.wrong() else "all went well"
    print(f"gpu-check: {how}, after {call.now():.0f} s; {call.report}")
    return 1 if call.wrong() else 0


def no_gpu(call: Call) -> bool:
    found = next(r["is"] for r in rows_of(call.entries, "facts") if r["what"] == "sidcomp")
    if found.split()[:1] != ["0"]:
        return False
    print("gpu-check: there is no GPU here")
    return True


def cell(x: Any) -> str:
    if isinstance(x, list):
        return f"{x[0]:.1f} [{x[1]:.1f}, {x[2]:.1f}]"
    return f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def table(rows: list[Row]) -> list[str]:
    """Markdown; a column for each key of any row."""
    if not rows:
        return ["Nothing."]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(cell(r.get(c, "")) for c in columns) + " |" for r in rows]


def beside_limits(rows: list[Row]) -> list[Row]:
    """Of an encode, and of a decode, how many times it takes what torch's plain pass does."""
    plain = {(r["what"], r["n"]): r["graph us"][0] for r in rows if r["what"].startswith("limit")}
    out = []
    for row in rows:
        kind = {"encode": "limit: R += G", "decode": "limit: write once"}.get(row["what"].split()[0])
        limit = plain.get((kind, row.get("n", 0)))
        out.append(row | ({"x limit": row["graph us"][0] / limit} if limit and "graph us" in row else {}))
    return out


def text_of(number: int, entries: list[dict[str, Any]]) -> str:
    lines = [f"# CUDA kernels on one GPU, call {number}, {datetime.date.today().isoformat()}"]
    for part in dict.fromkeys(e["part"] for e in entries):
        rows = rows_of(entries, part)
        if part in ("times", "every codec"):
            rows = beside_limits(rows)
        if part == "edges":
            rows = [r for r in rows if "wrong" in r or "left out" in r]
        took = next((e["over"] for e in entries if e["part"] == part and "over" in e), None)
        lines += ["", f"## {part}, {'killed' if took is None else f'{took:.0f} s'}", "", *table(rows)]
        for e in entries:
            if e["part"] == part and "cut" in e:
                lines += ["", f"Cut: {', '.join(e['cut'])}."]
    return "\n".join([*lines, ""])


def build() -> None:
    """Compiles for this machine's GPU."""
    from setup import own_archs

    env = os.environ | {"SIDCOMP_CUDA": "1"}
    if subprocess.call([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=env):
        sys.exit("gpu-check: the build failed; is nvcc there (CUDA toolkit), or in SIDCOMP_NVCC?")
    prebuilt.compile_hold((own_archs() or prebuilt.ARCH).split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lease", type=int, choices=SCHEDULE, help="which of the two calls")
    parser.add_argument("--out", type=Path, default=Path("build/lease"), help="folder: %(default)s")
    parser.add_argument("--prebuilt", action="store_true", help="compile nothing")
    parser.add_argument("--only", default="", help="some of the call's parts, with commas")
    parser.add_argument("--rehearse", type=Path, metavar="FOLDER", help="the package built for the emulation")
    parser.add_argument(
        "--cut", type=Path, metavar="FILE", help="kill each part within what it took by this .jsonl"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="print a report of a .jsonl, run nothing")
    args = parser.parse_args()
    if args.report is not None:
        print(text_of(int(args.report.stem[-1]), recorded(args.report)))
        return 0
    if args.lease is None:
        parser.error("--lease 1 or --lease 2")
    only = [part for part in args.only.split(",") if part]
    if unknown := [part for part in only if part not in SCHEDULE[args.lease]]:
        parser.error(f"--only {unknown[0]}: call {args.lease} has {', '.join(SCHEDULE[args.lease])}")
    if not args.prebuilt and args.rehearse is None:
        build()
    rehearsed = args.rehearse.absolute() if args.rehearse is not None else None
    try:
        call = Call(args.lease, args.out.absolute(), rehearsed)
    except FileExistsError as e:
        parser.error(f"{e.filename} is there already: choose another --out")
    took = {e["part"]: e["over"] for e in recorded(args.cut) if "over" in e} if args.cut else None
    return run(call, plan(args.lease, only), took)


if __name__ == "__main__":
    sys.exit(main())
