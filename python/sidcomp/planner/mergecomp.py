"""Plans found by timing real iterations instead of a model, as MergeComp does at the start of training."""

from collections.abc import Generator
from itertools import combinations


def mergecomp(n: int, Y: int = 2, alpha: float = 0.01) -> Generator[list[int], float, list[int]]:
    """MergeComp's Algorithm 2 over n tensors: yields the ends of a plan, takes its measured iteration time.

        search = mergecomp(n)
        ends = next(search)
        while True:
            try:
                ends = search.send(iteration_time(ends))
            except StopIteration as stop:
                chosen = stop.value

    Y: the most groups tried. alpha: the search ends where one group more gains less than this fraction.
    Times may have any unit. No plan is asked for twice. About 2 log2(n) plans for Y = 2; each further group
    multiplies that by n, since all cuts but the last are enumerated (the supplement's proof of Theorem 3).
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
    """Halves the places of the last cut after the cuts `head`: with it the time first falls and then rises.

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
