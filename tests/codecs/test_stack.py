"""A thread with a small stack can call the core. musl gives a thread 128 KB, macOS 512 KB."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PATHS = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

EVERY_CODEC = """
import sys, threading
import numpy as np
import sidcomp
from buffers import fits

def call(codec, memory, **more):
    print(codec.name, memory, more, flush=True)
    density = {p.name for p in codec.parameters} & {"density"}
    settings = dict.fromkeys(density, 0.1) | more
    own = sidcomp.Compressor(codec.name, 70001, memory=memory, **settings)
    x = np.random.default_rng(0).standard_normal(70001).astype(np.float32)
    for _ in range(2):  # the second encode takes what the first has left
        payload = own.encode(x)
    own.decode([payload])
    if "linear" not in codec.traits:
        own.decode([payload] * 64, scale=1 / 64)
        large = own.encode(x * np.float32(3e37))
        own.decode([large] * 64, scale=1 / 64)  # sums overflow, and are taken in float64

def every_codec():
    for codec in sidcomp.codecs():
        for memory in sidcomp.memories():
            if fits(codec.name, memory.name):
                call(codec, memory.name)
        if fits(codec.name, "residual"):
            call(codec, "residual", memory_dtype="bfloat16")
    print("done")

threading.stack_size(256 << 10)
thread = threading.Thread(target=every_codec)
thread.start()
thread.join()
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="frames are larger there")
def test_every_codec_on_a_stack_of_256_kilobytes() -> None:
    run = subprocess.run([sys.executable, "-c", EVERY_CODEC], env=PATHS, text=True, capture_output=True)
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["done"]), run.stdout[-500:] + run.stderr
