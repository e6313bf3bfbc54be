"""`ratio`, the other way to say how many elements a sparse codec sends: by its bytes."""

import math
from collections.abc import Mapping
from typing import Any

from sidcomp import core as _core
from sidcomp.errors import ParameterError

_ELEMENTS = 1 << 22  # of the group that the ratio is computed for: its header is a hundred-thousandth


def density_of(codec: str, memory: str, ratio: Any, parameters: Mapping[str, Any]) -> float:
    """The largest density, of three digits, whose payload has at most 1 / ratio of the bytes of float32.

    ratio counts one rank's payload for a group of many elements, whatever the exchange does with it.
    parameters: the codec's and the memory's others, which are no Schedules.
    Raises ParameterError.
    """
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 1 <= ratio < math.inf:
        raise ParameterError(
            f"ratio={ratio!r}: give a number from 1 on, such as ratio=100 for a hundredth of float32's bytes"
        )

    def size(density: float) -> int:
        plan = _core.Plan(codec, memory, _ELEMENTS, "float32", {**parameters, "density": density})
        return plan.payload_bytes

    budget = 4 * _ELEMENTS / ratio
    low, high = math.log(1e-6), 0.0  # of the density
    if size(math.exp(low)) > budget:
        most = 4 * _ELEMENTS / size(math.exp(low))
        raise ParameterError(f"ratio={ratio!r}: codec {codec!r} reaches {most:.0f} at most; give less")
    if size(1.0) <= budget:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if size(math.exp(middle)) <= budget else (low, middle)
    digit = 10.0 ** (math.floor(low / math.log(10)) - 2)
    return float(f"{math.floor(math.exp(low) / digit * (1 + 1e-9)) * digit:.3g}")
