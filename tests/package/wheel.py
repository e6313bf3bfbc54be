"""Every codec encodes a gradient and decodes its payload. To be run by the Python of an environment that has
the wheel and nothing of this source tree; needs no torch."""

import sys
from pathlib import Path

import numpy as np
import sidcomp

assert Path(sidcomp.__file__).is_relative_to(sys.prefix), f"{sidcomp.__file__} is not the wheel's"

gradient = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
for codec in sidcomp.codecs():
    compressor = sidcomp.Compressor(codec.name, gradient.size)
    decoded = compressor.decode(compressor.encode(gradient))
    assert decoded.shape == gradient.shape and np.isfinite(decoded).all() and decoded.any(), codec.name
print(f"sidcomp {sidcomp.__version__}: {len(sidcomp.codecs())} codecs encode and decode")
