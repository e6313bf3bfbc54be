"""What would one wheel for all Pythons cost in call overhead?

Answer (30 November 2026): nothing that a step would feel; see 2026-11-one-wheel.md.

Run it from the repository's root: python -m experiments.binding_calls. It needs a C and a C++ compiler.

The same call, shaped like the core's encode (one object, five keywords), through pybind11, through a module of
Python's limited API (one binary for all Pythons from 3.10 on) and through ctypes. Nanoseconds a call: the median
of 9 runs of 100,000, and the spread.
"""

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import pybind11

C = """
#include <stdint.h>
static int64_t encode(int64_t buffers, int64_t step, int64_t seed, int64_t group, double carry, int64_t origin) {
    return buffers + step + seed + group + (int64_t)carry + origin;
}
"""
LIMITED = """
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
{}
static PyObject *call(PyObject *self, PyObject *args, PyObject *named) {{
    static char *names[] = {{"buffers", "step", "seed", "group", "carry", "origin", NULL}};
    long long buffers, step, seed, group, origin = 0;
    double carry = 1;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, named, "LLLL|dL", names, &buffers, &step, &seed, &group, &carry, &origin))
        return NULL;
    return PyLong_FromLongLong(encode(buffers, step, seed, group, carry, origin));
}}
static PyMethodDef methods[] = {{
    {{"encode", (PyCFunction)(void (*)(void))call, METH_VARARGS | METH_KEYWORDS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "limited", NULL, -1, methods, NULL, NULL, NULL, NULL}};
PyMODINIT_FUNC PyInit_limited(void) {{ return PyModule_Create(&module); }}
""".format(C)
BOUND = f"""
#include <pybind11/pybind11.h>
{C}
namespace py = pybind11;
PYBIND11_MODULE(bound, m) {{
    m.def("encode", &encode, py::arg("buffers"), py::kw_only(), py::arg("step"), py::arg("seed"), py::arg("group"),
          py::arg("carry") = 1.0, py::arg("origin") = 0);
}}
"""
PLAIN = C.replace("static int64_t", "int64_t")


def built(folder: Path, name: str, text: str, command: list[str], suffix: str) -> Path:
    source = folder / f"{name}{'.cpp' if 'pybind11' in text else '.c'}"
    source.write_text(text)
    out = folder / f"{name}{suffix}"
    subprocess.run([*command, "-O3", "-shared", "-fPIC", str(source), "-o", str(out)], check=True)
    return out


def module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def nanoseconds(call: Callable[[], int], loops: int = 100_000) -> list[float]:
    assert call() == 22

    def once() -> float:
        begun = perf_counter_ns()
        for _ in range(loops):
            call()
        return (perf_counter_ns() - begun) / loops

    once()
    return sorted(once() for _ in range(9))


def main() -> None:
    include = [f"-I{sysconfig.get_paths()['include']}"]
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        limited = module("limited", built(room, "limited", LIMITED, ["cc", *include], ".abi3.so"))
        cpp = ["c++", "-std=c++17", "-fvisibility=hidden", *include, f"-I{pybind11.get_include()}"]
        bound = module("bound", built(room, "bound", BOUND, cpp, sysconfig.get_config_var("EXT_SUFFIX")))
        plain = ctypes.CDLL(str(built(room, "plain", PLAIN, ["cc"], ".so"))).encode
        plain.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_double, ctypes.c_int64]
        plain.restype = ctypes.c_int64
        ways: dict[str, Callable[[], int]] = {
            "pybind11": lambda: bound.encode(1, step=5, seed=7, group=8, carry=1.0),
            "limited API": lambda: limited.encode(1, step=5, seed=7, group=8, carry=1.0),
            "ctypes": lambda: plain(1, 5, 7, 8, 1.0, 0),
            "no call": lambda: 22,
        }
        print(f"Python {sys.version.split()[0]}, pybind11 {pybind11.__version__}")
        for name, call in ways.items():
            took = nanoseconds(call)
            print(f"{name:12} {median(took):6.0f} ns ({took[0]:.0f} to {took[-1]:.0f})")


if __name__ == "__main__":
    main()
