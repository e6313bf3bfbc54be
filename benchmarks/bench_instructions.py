"""How many instructions the CPU codecs execute for an element, by instruction set, whatever the load.

    python -m benchmarks.bench_instructions                      # what this processor has, and aarch64
    python -m benchmarks.bench_instructions --only topk --isa neon --functions 8

Counts are those of one steady encode with error feedback, or of one decode of 8 ranks, at two sizes. Their
difference over that of the sizes is what an element takes, and the rest is what a call takes. NEON and AVX2
are counted in QEMU's user emulation (qemu-aarch64, qemu-x86_64) by a plugin. QEMU 7 does not have AVX-512:
there the processor executes one instruction at a time (ptrace). It needs a cross compiler and QEMU (Debian:
gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user).
"""

import bisect
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sidcomp import _core
from sidcomp.config.accuracy import FORTIETH

from benchmarks.bench_codec import RANKS, home
from benchmarks.common import RESULTS, command, report

ROOT = Path(__file__).resolve().parent.parent
CROSS = "aarch64-linux-gnu-gcc"
SIZES = (65536, 262144)  # elements: whole tiles
FEW = (16384, 49152)  # one instruction at a time
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (  # of codecs that have other rows than their defaults'
    ("topk", {"density": 0.001}),
    ("topk", {"density": 0.01}),
    ("topk", {"density": 0.1}),
    FORTIETH,
    ("gaussiank", {"density": 0.1}),
    ("randk", {"density": 0.1}),
)


class Isa(NamedTuple):
    """number: sid_isa (csrc/sidcomp.h). emulator: () counts by single steps."""

    number: int
    emulator: tuple[str, ...]
    build: str  # the folder of this target's objects
    compiler: str


ISAS = {
    "neon": Isa(1, ("qemu-aarch64",), "build/aarch64", CROSS),
    "avx2": Isa(2, ("qemu-x86_64", "-cpu", "max"), "build/instructions", "cc"),
    "avx512": Isa(3, (), "build/instructions", "cc"),
    "avx512vbmi2": Isa(4, (), "build/instructions", "cc"),
}


class Program:
    """The driver for a target, and where its functions lie."""

    def __init__(self, isa: Isa) -> None:
        self.path = ROOT / isa.build / "instructions"
        self.plugin = ROOT / "build/instructions/instructions.so"
        for target, compiler in ((self.path, isa.compiler), (self.plugin, "cc")):
            folder = target.parent.relative_to(ROOT)
            command = ["make", "-s", f"O={folder}", f"CC={compiler}", f"{folder}/{target.name}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"bench_instructions: {target.name} was not built:\n{done.stderr}")
        listed = subprocess.run(["nm", "-n", self.path], capture_output=True, text=True, check=True).stdout
        symbols = [line.split() for line in listed.splitlines() if len(line.split()) == 3]
        self.places = {name: int(at, 16) for at, _, name in symbols}
        functions = [(int(at, 16), name) for at, kind, name in symbols if kind in "tTwWi"]
        self.starts, self.names = [at for at, _ in functions], [name for _, name in functions]
        self.start = self.places.get("__executable_start", self.starts[0] & ~0xFFFF)
        self.size = self.places.get("etext", self.starts[-1] + 4096) - self.start

    def count(self, isa: Isa, arguments: Iterable[str]) -> Counter[str]:
        """Instructions executed in the marked call, by function."""
        with tempfile.NamedTemporaryFile("r", suffix=".counts") as out:
            command = [str(self.path), "0" if isa.emulator else "1", *arguments]
            if isa.emulator:
                marks = f"begin={self.places['counted_begin']:#x},end={self.places['counted_end']:#x}"
                where = f"start={self.start:#x},size={self.size:#x},out={out.name}"
                command = [*isa.emulator, "-plugin", f"{self.plugin},{marks},{where}", *command]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"bench_instructions: {' '.join(command)}: {done.stderr or done.stdout}")
            lines = (out.read() if isa.emulator else done.stdout).splitlines()
        found: Counter[str] = Counter()
        for at, times in (line.split() for line in lines):
            i = bisect.bisect_right(self.starts, int(at, 16) + self.start) - 1
            found[self.names[i]] += int(times)
        return found


def numbers(codec: str, settings: dict[str, Any]) -> list[str]:
    """NAME=VALUE, where a choice is its number."""
    known = {p["name"]: p for p in next(c["parameters"] for c in _core.codecs() if c["name"] == codec)}
    return [
        f"{name}={known[name]['choices'].index(value) if isinstance(value, str) else value}"
        for name, value in settings.items()
    ]


def measure(
    isa: Isa, program: Program, what: str, codec: str, settings: dict[str, Any]
) -> tuple[float, float, Counter[str]]:
    """Instructions of an element, of a call beside them, and of an element by function."""
    sizes = SIZES if isa.emulator else FEW
    few, many = (
        program.count(
            isa, [what, str(isa.number), codec, home(codec), str(n), str(RANKS), *numbers(codec, settings)]
        )
        for n in sizes
    )
    elements = sizes[1] - sizes[0]
    each = Counter({name: (many[name] - few[name]) / elements for name in many})
    element = (many.total() - few.total()) / elements
    return element, few.total() - element * sizes[0], each


def all_rows() -> list[tuple[str, dict[str, Any]]]:
    """Those of SETTINGS, and every other codec of the registry with its defaults."""
    more = {codec for codec, _ in SETTINGS}
    return [*SETTINGS, *((c["name"], {}) for c in _core.codecs() if c["name"] not in more)]


def title(codec: str, settings: dict[str, Any]) -> str:
    return " ".join([codec, *(f"{k}={v}" for k, v in settings.items())])


def kept() -> dict[str, dict[str, Any]]:
    """The rows that were saved before: other instruction sets, or other codecs."""
    path = RESULTS / "instructions.json"
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["codec"]: row for row in found}


def place(column: str) -> tuple[int, int, int]:
    """Where a column stands: encode, then decode; each by instruction set."""
    what, _, rest = column.partition(", ")
    isa, _, call = rest.partition(", ")
    return (("codec", "encode", "decode").index(what), [*ISAS, ""].index(isa), len(call))


def main(argv: list[str] | None = None) -> None:
    parser = command("bench_instructions", __doc__)
    best = _core.isa_best()
    parser.add_argument("--isa", nargs="+", default=["neon", "avx2", best], choices=list(ISAS))
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the codecs' names")
    parser.add_argument("--functions", type=int, default=0, help="also print so many functions of each row")
    parser.add_argument("--save", action="store_true", help="add to benchmarks/results/instructions.*")
    args = parser.parse_args(argv)
    isas = {name: ISAS[name] for name in dict.fromkeys(args.isa)}
    programs = {name: Program(isa) for name, isa in isas.items()}
    before = kept() if args.save else {}
    rows = []
    for codec, settings in all_rows():
        row: dict[str, Any] = {"codec": title(codec, settings), **before.get(title(codec, settings), {})}
        if not any(part in codec for part in args.only):
            rows += [row] if len(row) > 1 else []
            continue
        for what in ("encode", "decode"):
            for name, isa in isas.items():
                element, call, each = measure(isa, programs[name], what, codec, settings)
                row[f"{what}, {name}"] = element
                row[f"{what}, {name}, a call"] = round(call)
                if args.functions:
                    top = ", ".join(f"{f} {k:.2f}" for f, k in each.most_common(args.functions))
                    print(f"{row['codec']}, {what}, {name}: {element:.2f}; {top}", flush=True)
        rows.append(row)
    report(
        "instructions",
        "Instructions of an element",
        [dict(sorted(row.items(), key=lambda item: place(item[0]))) for row in rows],
        f"One encode with a residual that many steps have filled, and one decode of {RANKS} ranks (one "
        "payload where they are summed on the way), of Laplace gradients in float32. An element: the "
        f"difference between {SIZES[1]:,} and {SIZES[0]:,} elements, with AVX-512 between {FEW[1]:,} and "
        f"{FEW[0]:,}. A call: what is left.",
        RESULTS if args.save else None,
    )


if __name__ == "__main__":
    main()
