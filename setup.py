"""Builds sidcomp._core by the Makefile.

The CUDA kernels are compiled for the GPUs of this machine. Where it has no GPU, or no nvcc, they are left
out. The environment says otherwise:

SIDCOMP_CUDA        0: without the kernels. 1: with them, or an error. auto, the default: as above.
SIDCOMP_CUDA_ARCHS  The architectures: a list such as "8.0,9.0+PTX", or "all" for those of a release, which
                    takes about 15 minutes of processor time. TORCH_CUDA_ARCH_LIST says the same, if this
                    one is not set.
SIDCOMP_NVCC        The compiler, if it is neither in CUDA_HOME nor on the PATH.
CC, CXX, MAX_JOBS   The compilers for the CPU, and how many of them run at a time.
"""

import collections
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
DEFAULT_ARCHS = "7.5 8.0 8.6 8.9 9.0 10.0 12.0"  # those that nvcc knows; the last also as PTX
ANY_GPU = "8.0 9.0+PTX"  # on those after 9.0 the driver compiles it when it is loaded
env = os.environ.get


def stop(text):
    sys.exit(f"sidcomp: {text}")


def check_tools():
    """Name what is missing before a compiler says it in its own words."""
    missing = {
        "GNU make": shutil.which("make"),
        "a C compiler (CC)": shutil.which((env("CC") or "cc").split()[0]),
        "a C++ compiler (CXX)": shutil.which((env("CXX") or "c++").split()[0]),
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
            stop(f"{nvcc} knows none of {DEFAULT_ARCHS}: set SIDCOMP_CUDA_ARCHS, or SIDCOMP_CUDA=0")
        items[-1] += "+PTX"
    flags = []
    for item in items:
        m = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", item)
        if not m:
            stop(f"architectures {asked!r}: write each as 9.0, 9.0a or 9.0+PTX, not {item!r}")
        n = m[1] + m[2]
        if n.rstrip("af") not in known:
            knows = f"{nvcc} does not know sm_{n} (it knows {' '.join(known)})"
            stop(f"{knows}: set SIDCOMP_CUDA_ARCHS, or SIDCOMP_CUDA=0")
        flags.append(f"-gencode=arch=compute_{n},code=" + (f"[sm_{n},compute_{n}]" if m[3] else f"sm_{n}"))
    return " ".join(flags), " ".join(items)


def choose():
    """nvcc ("" for a build without CUDA), the architectures, and a text: why, and how to change it."""
    want = env("SIDCOMP_CUDA", "auto").lower()
    nvcc = find_nvcc()
    if want == "0":
        return "", "", "CPU only, because SIDCOMP_CUDA=0"
    if not nvcc:
        return "", "", "CPU only, because there is no nvcc here; if you have one, name it in SIDCOMP_NVCC"
    for name in ("SIDCOMP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if asked := env(name, "").strip():
            return nvcc, asked, f"as {name} asks; SIDCOMP_CUDA=0 leaves the kernels out"
    others = "SIDCOMP_CUDA_ARCHS=all, or a list such as 8.0,9.0, chooses others"
    if own := own_archs():
        return nvcc, own, f"for this machine's GPUs; SIDCOMP_CUDA=0 leaves the kernels out, {others}"
    if want == "1":
        return nvcc, ANY_GPU, f"because SIDCOMP_CUDA=1 and nvidia-smi shows no GPU; {others}"
    how = "SIDCOMP_CUDA_ARCHS to a list such as 8.0,9.0, or to all (15 minutes of processor time)"
    why = "CPU only, because nvidia-smi shows no GPU here; to compile the CUDA kernels all the same, set "
    return "", "", why + how


class Progress:
    """Says what was chosen and which file is being compiled. pip keeps back what a build prints, so under pip
    the text also goes to the terminal, if there is one."""

    EVERY = 5  # seconds between lines

    def __init__(self):
        self.begun = self.said = time.monotonic()
        self.done = 0
        self.terminal = None
        if env("PIP_BUILD_TRACKER") and not sys.stdout.isatty():
            with contextlib.suppress(OSError):  # there is none
                self.terminal = open("/dev/tty", "w")  # noqa: SIM115

    def say(self, text):
        print(f"sidcomp: {text}", flush=True)
        if self.terminal:
            # pip's own line is not finished, and goes on after ours.
            print(f"\r\n  sidcomp: {text} ", end="", file=self.terminal, flush=True)

    def file(self, name, total):
        """Called when the compilation of a file begins."""
        self.done += 1
        now = time.monotonic()
        if now - self.said >= self.EVERY:
            self.said = now
            self.say(f"file {self.done} of {total}, {name} (after {now - self.begun:.0f} s)")


def compiled(line):
    """The source file that a line of make's output compiles, or None."""
    m = re.search(r" -c (\S+) -o ", line)
    return m[1] if m else None


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


def make_command(folder, nvcc, gencode, names):
    """What calls make; a target comes behind it. folder: in ROOT, for objects and library; not by its whole
    path, in which there may be a space, where make would see two names."""
    import pybind11

    headers = sysconfig.get_paths()["include"], pybind11.get_include()
    variables = {
        "O": folder,
        "OUT": f"{folder}/_core.so",
        "PYTHON": sys.executable,
        "PYINC": " ".join(f"-isystem {shlex.quote(path)}" for path in headers),
        "NVCC": nvcc,
        "GENCODE": gencode,
        "ARCH": names,
    }
    make = [env("MAKE") or "make", "-C", ROOT, "--no-print-directory"]
    return [*make, *(f"{k}={v}" for k, v in variables.items())]


def put(library, target):
    """In the place of a former one, which a process may have mapped."""
    if not os.path.exists(library):
        stop(f"make has ended without {library}; its output: pip install -v")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(library, f"{target}.new")
    os.replace(f"{target}.new", target)


class Build(build_ext):
    def build_extension(self, ext):
        import pybind11

        check_tools()
        nvcc, wanted, why = choose()
        gencode, names = archs(nvcc, wanted) if nvcc else ("", "")
        progress = Progress()
        progress.say(f"CUDA kernels for {names}, by {nvcc}, {why}" if nvcc else why)
        # The folder names pybind11's version, not its path: under build isolation the path is new each time.
        out = f"build/{sys.implementation.cache_tag}-pb{pybind11.__version__}-{'cuda' if nvcc else 'cpu'}"
        make = make_command(out, nvcc, gencode, names)
        clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}

        # How many files will be compiled: make says it once the commands are in their files.
        subprocess.call([*make, "-s", "commands"], env=clean)
        dry = subprocess.run([*make, "-n", "ext", "KNOWN=1"], env=clean, stdout=subprocess.PIPE, text=True)
        total = sum(bool(compiled(line)) for line in dry.stdout.splitlines())
        jobs = f"-j{env('MAX_JOBS') or os.cpu_count()}"
        last = collections.deque(maxlen=40)
        with subprocess.Popen([*make, jobs, "ext"], env=clean, stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout:
                print(line, end="", flush=True) if self.verbose else last.append(line)
                if name := compiled(line):
                    progress.file(name, total)
        if running.returncode:
            print(*last, sep="", flush=True)
            hint = "; to build without CUDA, set SIDCOMP_CUDA=0" if nvcc else ""
            stop(f"the build failed; the compiler's message is above{hint}")
        put(os.path.join(ROOT, out, "_core.so"), self.get_ext_fullpath(ext.name))


if __name__ == "__main__":  # benchmarks/prebuilt.py imports this file
    setup(
        distclass=distribution(),
        package_dir={"": "python"},
        ext_modules=[Extension("sidcomp._core", [])],
        cmdclass={"build_ext": Build},
    )
