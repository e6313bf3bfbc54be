"""MergeComp's search, which times real iterations at the start of training instead of using a model."""

from collections.abc import Generator
from itertools import combinations


def mergecomp(n: int, Y: int = 2, alpha: float = 0.01) -> Generator[list[int], float, list[int]]:
    """MergeComp's Algorithm 2 for n tensors: yields the ends of a plan, receives the time of its iteration.

        search = mergecomp(n)
        ends = next(search)
        while True:
            try:
                ends = search.send(iteration_time(ends))
            except StopIteration as stop:
                chosen = stop.value

    Y: the largest number of groups. alpha: the search ends when one more group gains less than this fraction.
    Times may have any unit. No plan is asked for twice. Y = 2 takes about 2 log2(n) plans; each further group
    multiplies that by n, because all cuts but the last are enumerated (the supplement's proof of Theorem 3).
    """
    best, best_time = [n], (yield [n])
    for y in range(2, min(Y, n) + 1):
        found, found_time = best, float("inf")
        for head in combinations(range(1, n - 1), y - 2):
            for ends, time in (yield from _last_cut(n, list(head))):
                if time < found_time:
                    found, found_time = ends, time
        if best_time < found_time:
            break
        gain = best_time - found_time
        enough = gain < alpha * best_time
        best, best_time = found, found_time
        if enough:
            break
    return best


def _last_cut(n: int, head: list[int]) -> Generator[list[int], float, list[tuple[list[int], float]]]:
    """Finds the last cut after the cuts `head` by bisection, as the time first falls and then rises with it.

    Returns all plans that were timed, with their times.
    """
    times: dict[int, float] = {}

    def time(cut: int) -> Generator[list[int], float, float]:
        if cut not in times:
            times[cut] = yield [*head, cut, n]
        return times[cut]

    low, high = (head[-1] if head else 0) + 1, n - 1
    while low < high:
        middle = (low + high) // 2
        if (yield from time(middle)) <= (yield from time(middle + 1)):
            high = middle
        else:
            low = middle + 1
    yield from time(low)
    return [([*head, cut, n], measured) for cut, measured in times.items()]
