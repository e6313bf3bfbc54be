"""Libraries of cuda/'s kernels as nvcc compiles them: its PTX, translated to C++ for the emulation."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_emulated import ROOT, TOOLS, call

from ptx.translate import translate

OUT = ROOT / "build" / "ptx"
HERE = ROOT / "tests" / "cuda"
CXX = "clang++" if shutil.which("clang++") else TOOLS[1]  # clang takes a fourth of gcc's time
INCLUDES = ["-Icsrc", "-Itests/cuda", "-Itests/cuda/ptx"]
NVCC = os.environ.get("NVCC") or shutil.which("nvcc")
FILES = sorted(p.relative_to(ROOT) for p in (ROOT / "cuda").glob("*/*.cu") if p.stem != "registry")


def compiled(source: str, out: Path, more: list[str], *flags: str) -> Path:
    """A library of translated PTX."""
    out.parent.mkdir(parents=True, exist_ok=True)
    cpp = out.with_suffix(".cpp")
    cpp.write_text(source)
    options = ["-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-ffp-contract=off", *flags, *INCLUDES]
    call([CXX, *options, str(cpp), *more, "-o", str(out)])
    return out


CODECS = re.findall(r"^SID_CODEC\((\w+), 1\)", (ROOT / "csrc" / "codecs.def").read_text(), re.M)


def codecs_of(file: Path) -> list[str]:
    """The codecs that a file defines, by itself or by a macro of its own."""
    text = (ROOT / file).read_text()
    named = re.findall(r"^(?:const sid_cuda_codec sid_cuda_codec_(\w+) =|[A-Z]+\((\w+), )", text, re.M)
    return [name.replace("_", "-") for name in CODECS if name in {one or other for one, other in named}]


KERNELS = ("cuda", "csrc")
TRANSLATOR = (
    "tests/cuda/ptx/translate.py",
    "tests/cuda/ptx/ptx.h",
    "tests/cuda/emulate.h",
    "tests/cuda/order.h",
)


@cache
def digest_of(*places: str) -> str:
    """A digest of all sources there: folders or files."""
    digest = hashlib.sha256()
    for place in places:
        for p in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if p.is_file() and p.suffix in (".cu", ".cuh", ".h", ".def", ".py"):
                digest.update(p.read_bytes())
    return digest.hexdigest()


def ptx_of(file: Path, arch: str) -> Path:
    """What nvcc makes of a file; anew where the kernels have changed, which takes most of the time."""
    ptx = OUT / arch.replace(".", "") / f"{file.stem}.ptx"
    stamp, present = ptx.with_suffix(".ptx.stamp"), digest_of(*KERNELS)
    if not (ptx.exists() and stamp.exists() and stamp.read_text() == present):
        ptx.parent.mkdir(parents=True, exist_ok=True)
        options = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc", "-DSID_WITH_CUDA"]
        options += [f'-DSID_CUDA_ARCH="{arch}"', f"-arch=sm_{arch.replace('.', '')}", "-ptx"]
        call([str(NVCC), *options, str(file), "-o", str(ptx)])
        stamp.write_text(present)
    return ptx


ENTRY = re.compile(r"^(?:\.\w+ )*\.entry .*?^\}\n", re.M | re.S)
AT_ONCE = 3_000_000  # bytes of PTX, whose C++ takes a compiler 15 seconds


def parts_of(file: Path, arch: str) -> int:
    """Of how many libraries none takes long to compile."""
    return -(-ptx_of(file, arch).stat().st_size // AT_ONCE)


def some_of(ptx: str, part: int, parts: int) -> str:
    """With one in `parts` of its kernels."""
    numbers = count()
    return ENTRY.sub(lambda m: m[0] if next(numbers) % parts == part else "", ptx)


def translated(file: Path, arch: str, watched: bool, part: int = 0, parts: int = 1) -> Path:
    """The library of a file's compiled kernels, or of one of them in `parts`."""
    folder = OUT / (arch.replace(".", "") + ("-watched" if watched else ""))
    name = file.stem if parts == 1 else f"{file.stem}.{part}of{parts}"
    out, stamp = folder / f"{name}.so", folder / f"{name}.stamp"
    present = digest_of(*KERNELS, *TRANSLATOR)
    if out.exists() and stamp.exists() and stamp.read_text() == present:
        return out
    source, module = translate(some_of(ptx_of(file, arch).read_text(), part, parts))
    assert not module.refused, f"{file}: {module.refused.most_common(5)}"
    compiled(source, out, [], *(["-DSID_PTX_WATCHED"] if watched else []))
    for kernel, counts in module.opcodes.items():
        print(f"{name} {arch} {kernel}: " + " ".join(f"{op} {n}" for op, n in counts.most_common()))
    stamp.write_text(present)
    return out


def kernels_in(library: Path) -> dict[tuple[str, str], str]:
    """Each function's place in the emulated extension, by its file ("" if not local) and name."""
    listed = subprocess.run(
        ["readelf", "-sW", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found, file = {}, ""
    for line in listed.split("Symbol table '.symtab'")[1].splitlines():
        row = line.split()
        if len(row) < 8 or not row[0].endswith(":"):
            continue
        if row[3] == "FILE":
            file = Path(row[7]).stem
        elif row[3] == "FUNC" and row[6] != "UND":
            name = re.sub(r"^_ZL(?=\d)", "_Z", row[7])  # a static kernel, which nvcc does not mark
            found[file if row[4] == "LOCAL" else "", name] = row[1]
    return found


def folder_of(libraries: list[Path], extension: Path) -> Path:
    """SID_PTX's folder: the libraries' own, with the map."""
    places = kernels_in(extension)
    lines = []
    for library in libraries:
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
        )
        for name in re.findall(r" T k_(\S+)", listed.stdout):
            place = places.get((library.stem.split(".")[0], name)) or places.get(("", name))
            if place:  # else nothing launches it, and the host compiler has left it out
                lines.append(f"{place} {library.name} {name}")
    folder = libraries[0].parent
    (folder / "map").write_text("\n".join(lines) + "\n")
    return folder
