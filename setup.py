"""Builds sidcomp._core by the Makefile.

Reads SIDCOMP_CUDA=auto|0|1, SIDCOMP_NVCC, TORCH_CUDA_ARCH_LIST, CC, CXX and MAX_JOBS from the environment.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
DEFAULT_ARCHS = "7.5 8.0 8.6 8.9 9.0 10.0 12.0"  # those that nvcc knows; the last also as PTX
ANY_GPU = "8.0+PTX"  # runs on that one and later ones, compiled once more there when it is loaded
env = os.environ.get


def stop(text):
    sys.exit(f"sidcomp: {text}")


def check_tools():
    """Name what is missing before a compiler says it in its own words."""
    missing = {
        "GNU make": shutil.which("make"),
        "a C compiler (CC)": shutil.which((env("CC") or "cc").split()[-1]),
        "a C++ compiler (CXX)": shutil.which((env("CXX") or "c++").split()[-1]),
        "Python.h": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    }
    missing = [name for name, there in missing.items() if not there]
    if missing:
        stop(f"not found: {', '.join(missing)} (Debian, Ubuntu: apt-get install build-essential python3-dev)")


def find_nvcc():
    want = env("SIDCOMP_CUDA", "auto").lower()
    if want not in ("auto", "0", "1"):
        stop(f"SIDCOMP_CUDA={want!r}: write auto, 0 or 1")
    if want == "0":
        return ""
    if env("SIDCOMP_NVCC"):
        tries = [env("SIDCOMP_NVCC")]
    else:
        homes = [env(v) for v in ("CUDA_HOME", "CUDA_PATH") if env(v)]
        tries = [
            *(os.path.join(h, "bin", "nvcc") for h in homes),
            shutil.which("nvcc"),
            "/usr/local/cuda/bin/nvcc",
        ]
    for t in tries:
        if t and os.access(t, os.X_OK):
            return t
    if want == "1" or env("SIDCOMP_NVCC"):
        stop(f"CUDA asked for, but no nvcc at {[t for t in tries if t]}")
    return ""


def own_archs():
    """Of this machine's GPUs, as nvidia-smi tells; empty where it has none."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return ""
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = re.findall(r"^\d+\.\d+$", done.stdout, re.M) if done.returncode == 0 else []
    return " ".join(sorted(set(found)))


def archs(nvcc, asked):
    """-gencode flags and the names of the architectures; asked: names, or "all" for those of a release."""
    known = re.findall(r"sm_(\d+)", subprocess.check_output([nvcc, "--list-gpu-code"], text=True))
    if asked != "all":
        items = [a for a in re.split(r"[;,\s]+", asked) if a]
    else:
        items = [a for a in DEFAULT_ARCHS.split() if a.replace(".", "") in known]
        if not items:
            stop(f"{nvcc} knows none of {DEFAULT_ARCHS}: set TORCH_CUDA_ARCH_LIST, or SIDCOMP_CUDA=0")
        items[-1] += "+PTX"
    flags = []
    for item in items:
        m = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", item)
        if not m:
            stop(f"TORCH_CUDA_ARCH_LIST={asked!r}: write each as 9.0, 9.0a or 9.0+PTX, not {item!r}")
        n = m[1] + m[2]
        if n.rstrip("af") not in known:
            stop(f"{nvcc} does not know sm_{n} (it knows {' '.join(known)}); change TORCH_CUDA_ARCH_LIST")
        flags.append(f"-gencode=arch=compute_{n},code=" + (f"[sm_{n},compute_{n}]" if m[3] else f"sm_{n}"))
    return " ".join(flags), " ".join(items)


def in_place(command):
    """`build_ext --inplace`, or `pip install -e`, for which setuptools sets something else."""
    return bool(command.inplace or getattr(command, "editable_mode", False))


class WithoutMetadata(setuptools.Distribution):
    """For a setuptools that is too old for pyproject.toml, of which the extension alone needs nothing."""

    def parse_config_files(self, *_, **__):
        pass


def distribution():
    if int(setuptools.__version__.split(".")[0]) >= 77:  # those read a licence as pyproject.toml states it
        return setuptools.Distribution
    if "build_ext" not in sys.argv:
        stop(f"setuptools 77 or later is needed, not {setuptools.__version__}: pip install -U setuptools")
    return WithoutMetadata


class Build(build_ext):
    def run(self):
        self.here = in_place(self)  # setuptools takes `inplace` back while it builds
        super().run()

    def build_extension(self, ext):
        import pybind11

        check_tools()
        nvcc = find_nvcc()
        # A build in place is for here, and takes minutes for each architecture.
        here = (own_archs() or ANY_GPU) if nvcc and self.here else "all"
        gencode, names = archs(nvcc, env("TORCH_CUDA_ARCH_LIST", "").strip() or here) if nvcc else ("", "")
        print("sidcomp:", f"CUDA {names} by {nvcc}" if nvcc else "no CUDA, CPU only", flush=True)
        # The folder names pybind11's version, not its path: under build isolation the path is new each time.
        out = f"build/{sys.implementation.cache_tag}-pb{pybind11.__version__}-{'cuda' if nvcc else 'cpu'}"
        variables = {
            "O": out,
            "OUT": os.path.abspath(self.get_ext_fullpath(ext.name)),
            "PYTHON": sys.executable,
            "PYINC": f"-isystem {sysconfig.get_paths()['include']} -isystem {pybind11.get_include()}",
            "NVCC": nvcc,
            "GENCODE": gencode,
            "ARCH": names,
        }
        command = [
            env("MAKE") or "make",
            "-C",
            ROOT,
            "--no-print-directory",
            f"-j{env('MAX_JOBS') or os.cpu_count()}",
        ]
        command += ["ext", *(f"{k}={v}" for k, v in variables.items()), *([] if self.verbose else ["-s"])]
        clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        if subprocess.call(command, env=clean):
            hint = "; to build without CUDA, set SIDCOMP_CUDA=0" if nvcc else ""
            stop(f"the build failed; the compiler's message is above{hint}")


if __name__ == "__main__":  # benchmarks/sass.py asks for the architectures
    setup(
        distclass=distribution(),
        package_dir={"": "python"},
        ext_modules=[Extension("sidcomp._core", [])],
        cmdclass={"build_ext": Build},
    )
