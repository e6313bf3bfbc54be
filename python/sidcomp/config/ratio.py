"""`ratio`, the other way to say how much a sparse codec sends: by the bytes of its payload."""

import math
from collections.abc import Mapping
from typing import Any

from sidcomp import core as _core
from sidcomp.errors import ParameterError

_ELEMENTS = 1 << 22  # of the group that the ratio is computed for: its header is a hundred-thousandth


def amount_of(
    codec: str, memory: str, ratio: Any, parameters: Mapping[str, Any], name: str, least: float, most: float
) -> float:
    """The largest value of the parameter `name`, of three digits and within its range, with which a payload
    has at most 1 / ratio of the bytes of float32.

    ratio counts one rank's payload for a group of many elements, whatever the exchange does with it.
    parameters: the codec's and the memory's others, which are no Schedules.
    Raises ParameterError.
    """
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 1 <= ratio < math.inf:
        raise ParameterError(
            f"ratio={ratio!r}: give a number from 1 on, such as ratio=100 for a hundredth of float32's bytes"
        )

    def size(amount: float) -> int:
        amount = min(max(amount, least), most)  # exp(log(x)) may lie beside x
        plan = _core.Plan(codec, memory, _ELEMENTS, "float32", {**parameters, name: amount})
        return plan.payload_bytes

    budget = 4 * _ELEMENTS / ratio
    low, high = math.log(max(least, 1e-6)), math.log(most)
    if size(math.exp(low)) > budget:
        reached = 4 * _ELEMENTS / size(math.exp(low))
        raise ParameterError(f"ratio={ratio!r}: codec {codec!r} reaches {reached:.0f} at most; give less")
    if size(most) <= budget:
        return most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if size(math.exp(middle)) <= budget else (low, middle)
    digit = 10.0 ** (math.floor(low / math.log(10)) - 2)
    digits = math.floor(math.exp(low) / digit * (1 + 1e-9))  # rounded up where the next number is so near
    if size(digits * digit) > budget:
        digits -= 1
    return max(float(f"{digits * digit:.3g}"), least)
