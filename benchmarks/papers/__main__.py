"""Runs the papers' results again, in small: `make papers`, or a part by `make papers ARGS="--only cupcake"`.

Each part is one command of this folder, which prints its table and, with --save, writes it to
benchmarks/results. A file keeps what is done: stop it, and call it again to go on. At the end the tables of
the pages are written anew from the results (benchmarks/tables.py).
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import tables
from benchmarks.papers.training import FIGURES

# MergeComp's table 4: three seeds of two compressors, by layer and merged
_FLAGS = [
    f'--flags "--codec {codec} --groups {groups}"'
    for codec in ("dgc --density 0.01", "efsignsgd")
    for groups in ("layer", "even:2")
]
GROUPED = f"convergence --task transformer --steps 60 --seeds 3 {' '.join(_FLAGS)} --save"
PARTS: dict[str, list[str]] = {
    "mergecomp": [GROUPED],
    "cupcake": ["cupcake --save"],
    "sidco": ["sidco_speed --save", "sidco_ratio --save"],
    "redsync": ["redsync_selection --save", "redsync_phases --save", "redsync_accuracy --save"],
    "marsit": [
        "marsit --what bytes --save",
        "marsit --what rate --save",
        "marsit --what layers --task resnet50 --world 3 --save",
    ],
}


def commands(papers: list[str], full: bool) -> list[str]:
    out = []
    for paper in papers:
        out += PARTS[paper]
        short = "" if full else " --short"
        out += [f"training --only {key}{short} --save" for key in FIGURES if key.startswith(paper)]
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    add = parser.add_argument
    add("--only", default=",".join(PARTS), help="papers, with commas (default %(default)s)")
    add("--full", action="store_true", help="every network of each figure: hours; else the first one")
    add("--again", action="store_true", help="also what is done already")
    add("--list", action="store_true", help="print the commands, and stop")
    add("--done", type=Path, default=Path("build/papers-done.json"), help="kept there (default %(default)s)")
    args = parser.parse_args(argv)
    papers = args.only.split(",")
    if unknown := [p for p in papers if p not in PARTS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(PARTS)}")
    wanted = commands(papers, args.full)
    if args.list:
        print(*(f"python -m benchmarks.papers.{command}" for command in wanted), sep="\n")
        return 0
    done: list[str] = json.loads(args.done.read_text()) if args.done.exists() and not args.again else []
    failed = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("papers", total=len(wanted))
        for command in wanted:
            progress.update(bar, description=command.split(" --save")[0])
            if command not in done:
                begun = time.monotonic()
                module, *arguments = shlex.split(command)
                run = subprocess.run(
                    [sys.executable, "-m", f"benchmarks.papers.{module}", *arguments],
                    capture_output=True, text=True,
                )  # fmt: skip
                progress.console.print(run.stdout, highlight=False)
                if run.returncode:
                    progress.console.print(run.stderr, highlight=False)
                    failed.append(command)
                else:
                    done.append(command)
                    args.done.parent.mkdir(parents=True, exist_ok=True)
                    args.done.write_text(json.dumps(done))
                progress.console.print(f"{command}: {time.monotonic() - begun:.0f} s", highlight=False)
            progress.advance(bar)
    tables.main([])
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
