"""`make registers`: what ptxas gives each kernel of cuda/: registers, and bytes of them that a thread spills.

Needs nvcc and no GPU. Compiles for sm_90 as a release does, some minutes of two cores. Ends with 1 if
a file spills more than MOST allows: remove a new spill, or allow it here and say why in the commit.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "registers"
MOST = {  # bytes that a thread of the file's worst kernel may store; 0 for other files
    "deadzone.cu": 8,
    "delta.cu": 8,
    "dgc.cu": 124,
    "gaussian.cu": 248,
    "linear.cu": 8,
    "lossless.cu": 108,
    "micro.cu": 44,
    "powersgd.cu": 20,
    "quant.cu": 8,
    "redsync.cu": 320,
    "sidco.cu": 436,
    "signs.cu": 16,
    "sparse.cu": 16,
    "topk.cu": 16,
}


class Kernel(NamedTuple):
    name: str
    registers: int
    spilled: int


def kernels(log: str) -> list[Kernel]:
    """The kernels of what `ptxas -v` prints; what a kernel calls counts for itself, under its own name."""
    found, name, spilled = [], "", 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name, spilled = entry[1], 0
        elif name and (stores := re.search(r"(\d+) bytes spill stores", line)):
            spilled = max(spilled, int(stores[1]))
        elif name and (used := re.search(r"Used (\d+) registers", line)):
            found.append(Kernel(name, int(used[1]), spilled))
            name = ""
    return found


def compiled(nvcc: str, files: list[str]) -> dict[str, list[Kernel]]:
    """The kernels of these files of cuda/, compiled by the Makefile with the library's own flags."""
    made = {file: OUT / "cuda" / Path(file).with_suffix(".cubin") for file in files}
    flags = [f"O={OUT}", f"NVCC={nvcc}", "NVCCFLAGS=", "GENCODE=-arch=sm_90", "ARCH=90", "WERROR=1"]
    clean = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    make = ["make", "-s", "-j2", "--no-print-directory", "-C", str(ROOT)]
    subprocess.run([*make, *flags, *map(str, made.values())], env=clean, check=True)
    return {file: kernels(Path(f"{cubin}.log").read_text()) for file, cubin in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registers", description=__doc__)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("files", nargs="*", help="of cuda/, such as exchange/ring.cu (default: all)")
    args = parser.parse_args()
    every = [str(p.relative_to(ROOT / "cuda")) for p in sorted((ROOT / "cuda").glob("*/*.cu"))]
    too_many = False
    for file, found in compiled(args.nvcc, args.files or every).items():
        for kernel in found:
            over = kernel.spilled > MOST.get(Path(file).name, 0)
            too_many |= over
            said = f"spills {kernel.spilled}{' TOO MANY' if over else ''}" if kernel.spilled else ""
            print(f"{file} {kernel.name} {kernel.registers} registers {said}".rstrip())
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main())
