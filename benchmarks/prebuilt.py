"""`make gpu-prebuilt`: what gpu_check.py --prebuilt needs where nothing can be installed, built here.

The extension in place for CPython 3.12, with kernels for sm_90, and build/hold.cubin. It needs nvcc and a
Python 3.12 with its headers, which PREBUILT_PYTHON may name; setuptools and pybind11 are those of the Python
that runs this, for they are the same in both.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOLD = ROOT / "build" / "hold.cubin"
VERSION, ARCH = "3.12", "9.0"
ASKED = """
import os, sys, sysconfig
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
print("%d.%d" % sys.version_info[:2], int(os.path.exists(header)), sysconfig.get_config_var("EXT_SUFFIX"))
"""
LOADED = """
from sidcomp import _core
print(f"{_core.__file__} loads: kernels for {_core.cuda_archs}, {len(_core.codecs())} codecs, "
      f"{_core.cuda_devices()[0]} GPUs")
"""


def find_python() -> tuple[str, Path]:
    """One with headers, and the extension that it would load."""
    name, home = f"python{VERSION}", Path.home()
    places = [os.environ.get("PREBUILT_PYTHON"), shutil.which(name)]
    places += map(str, sorted(home.glob(f".pyenv/versions/{VERSION}*/bin/{name}")))
    places += map(str, sorted(home.glob(f".local/share/uv/python/*-{VERSION}*/bin/{name}")))
    lacking = ""
    for python in filter(None, places):
        done = subprocess.run([python, "-c", ASKED], capture_output=True, text=True)
        version, headers, suffix = done.stdout.split() if done.returncode == 0 else ("", "", "")
        if version == VERSION and headers == "1":
            return python, ROOT / "python" / "sidcomp" / f"_core{suffix}"
        if version == VERSION:
            lacking = f"{python} has no Python.h"
    sys.exit(
        f"sidcomp: {lacking or f'no Python {VERSION}'} (Debian, Ubuntu: apt-get install {name}-dev; or set "
        "PREBUILT_PYTHON to one with its headers)"
    )


def compile_hold(arch: str) -> None:
    """hold.cu, for one architecture: the driver may be too old for nvcc's PTX."""
    from setup import find_nvcc

    HOLD.parent.mkdir(exist_ok=True)
    flags = ["-cubin", f"-arch=sm_{arch.replace('.', '')}", "-o", str(HOLD)]
    subprocess.run([find_nvcc(), *flags, str(ROOT / "benchmarks" / "hold.cu")], check=True)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from setup import find_nvcc

    os.environ["SIDCOMP_CUDA"] = "1"
    find_nvcc()  # or says what is missing
    python, extension = find_python()
    found = [importlib.util.find_spec(name) for name in ("setuptools", "pybind11")]
    if missing := [n for n, s in zip(("setuptools", "pybind11"), found, strict=True) if s is None]:
        sys.exit(f"sidcomp: {sys.executable} has no {', '.join(missing)}")
    path = os.pathsep.join(str(Path(str(s.origin)).parent.parent) for s in found if s)
    env = os.environ | {"SIDCOMP_CUDA_ARCHS": ARCH, "PYTHONPATH": path}
    subprocess.run([python, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=env, check=True)
    compile_hold(ARCH)
    for file in (extension, HOLD):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")
    subprocess.run(["ldd", str(extension)], check=True)
    subprocess.run([python, "-c", LOADED], env=env | {"PYTHONPATH": str(ROOT / "python")}, check=True)


if __name__ == "__main__":
    main()
