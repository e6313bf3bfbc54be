"""What each codec's payload is today, in short: results keep it, and a test finds those that are older."""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import sidcomp

N = 4099


@cache
def digest(codec: str) -> str:
    """Of the payloads of three steps of a fixed vector, with the codec's own memory and defaults."""
    random = np.random.default_rng(0)
    compressor = sidcomp.Compressor(codec, N)
    found = 0
    for _ in range(3):
        # Peaked as gradients are, and by products alone: NumPy's powers and logarithms have other bits on
        # another processor.
        x = random.integers(-(2**11), 2**11, N).astype(np.float32) * np.float32(2**-11)
        x *= x * x
        found = zlib.crc32(np.asarray(compressor.encode(x)).tobytes(), found)
    return f"{found:08x}"


def named(record: Mapping[str, Any]) -> Iterable[str]:
    """The codecs that a result's rows name."""
    text = json.dumps(record["rows"]) + json.dumps(list(record.get("found", {})))
    for codec in sidcomp.codecs():
        if re.search(rf"(?<![\w-]){codec.name}(?![\w-])", text):
            yield codec.name


def of(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(name) for name in named(record)}


def stale(record: Mapping[str, Any]) -> list[str]:
    """The codecs whose payloads have changed since the result was measured."""
    return [name for name, was in record["payloads"].items() if digest(name) != was]
