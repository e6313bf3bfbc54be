"""The planner's model and the papers' algorithms in plain Python integers, written from their descriptions.

Instances are the dictionaries of docs/planning.md, every field present. Slow on purpose: brute force visits
every plan, Algorithm 1 recurses as it is printed.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

Instance = dict[str, Any]
Span = list[int] | None
INFINITY = 1 << 62


def cost(table: list[list[int]] | None, size: int) -> int:
    """A cost table at `size` bytes: linear between its knots, rounded down; the last slope goes on."""
    if table is None:
        return 0
    if len(table) == 1:
        return int(table[0][1])
    right = next((i for i in range(1, len(table) - 1) if size <= table[i][0]), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    return int(y0 + (size - x0) * (y1 - y0) // (x1 - x0))


class Group(NamedTuple):
    """What a group costs; None: it has no such phase."""

    backward: int
    encode: int | None
    exchange: int
    decode: int | None
    delay: int  # of the exchange, by what is left of backward


def group_of(instance: Instance, start: int, end: int, method: int) -> Group:
    tensors, tables = instance["tensors"][start:end], instance["methods"][method]
    size = sum(t["bytes"] for t in tensors)
    return Group(
        sum(t["backward_ps"] for t in tensors),
        None if tables["encode"] is None else cost(tables["encode"], size),
        cost(tables["exchange"], size),
        None if tables["decode"] is None else cost(tables["decode"], size),
        min(cost(tables.get("delay"), size), sum(t["backward_ps"] for t in instance["tensors"][end:])),
    )


class Clock(NamedTuple):
    """When each is free: backward, which encodes too, exchange, and decode; and the sum of decodes.
    moving: as exchange, without the delays, in which nothing is sent."""

    backward: int
    exchange: int
    decode: int
    decodes: int
    moving: int


def clock(instance: Instance) -> Clock:
    now = instance["forward_ps"]
    return Clock(now, now, now, 0, now)


def beside(now: int, busy: int, work: int, slowdown: int) -> int:
    """The end of work that until `busy` loses slowdown/1000 of its speed."""
    behind = max(0, busy - now)
    meanwhile = behind - behind * slowdown // 1000  # done by then
    if work >= meanwhile:
        return max(now, busy) + work - meanwhile
    return min(busy, now + -(-work * 1000 // (1000 - slowdown)))


def step(now: Clock, group: Group, slowdown: int) -> Clock:
    """One group later. While an exchange moves bytes, the main stream loses slowdown/1000 of its speed."""
    ready = now.backward
    for work in (group.backward, group.encode or 0):
        ready = beside(ready, now.moving, work, slowdown) if slowdown else ready + work
    exchange = max(now.exchange, ready) + group.delay + group.exchange
    moving = max(now.moving, ready) + group.exchange
    decode, decodes = now.decode, now.decodes
    if group.decode is not None:
        decode = max(decode, exchange) + group.decode
        decodes += group.decode
    return Clock(ready, exchange, decode, decodes, moving)


def finish(now: Clock, main: bool) -> int:
    """The end of the iteration; main: decodes wait for the end of backward, on its own stream."""
    return max(now.exchange, now.decode, now.backward + now.decodes if main else now.backward)


def evaluate(instance: Instance, ends: list[int], methods: list[int]) -> int:
    now, start = clock(instance), 0
    for end, method in zip(ends, methods, strict=True):
        group = group_of(instance, start, end, method)
        now = step(now, group, instance.get("slowdown_permille", 0))
        start = end
    return finish(now, instance["decode"] == "main")


def allowed(instance: Instance, start: int, end: int) -> bool:
    """Whether tensors [start, end) may be a group: no forced cut inside, and the cap kept or one tensor."""
    cap = instance["max_group_bytes"]
    size = sum(t["bytes"] for t in instance["tensors"][start:end])
    return not any(start < c < end for c in instance["cut_before"]) and (
        end - start == 1 or cap == 0 or size <= cap
    )


def brute_force(instance: Instance) -> int:
    """The least time over all partitions and all methods."""
    n, which = len(instance["tensors"]), range(len(instance["methods"]))
    main = instance["decode"] == "main"
    slowdown = instance.get("slowdown_permille", 0)
    groups = [
        [
            [group_of(instance, i, j, m) for m in which] if allowed(instance, i, j) else []
            for j in range(i + 1, n + 1)
        ]
        for i in range(n)
    ]

    def rest(now: Clock, start: int) -> int:
        if start == n:
            return finish(now, main)
        return min(
            rest(step(now, g, slowdown), start + 1 + j) for j, gs in enumerate(groups[start]) for g in gs
        )

    return rest(clock(instance), 0)


def mergecomp(time: Callable[[list[int]], int], n: int, Y: int, permille: int) -> list[int]:
    """Algorithm 2 with an exhaustive search for each X_y: what its binary search claims to find."""
    best = [n]
    for y in range(2, min(Y, n) + 1):
        found = min(([*c, n] for c in combinations(range(1, n), y - 1)), key=time)
        if time(best) < time(found):
            return best
        done = (time(best) - time(found)) * 1000 < permille * time(best)
        best = found
        if done:
            return best
    return best


def cupcake(instance: Instance, method: int, fixed: bool) -> list[int]:
    """Algorithm 1, with the line numbers of the paper. fixed: the one-group plan is recorded, and a group of
    no tensors costs nothing (as printed, h and g of an empty group are their latencies)."""
    n = len(instance["tensors"])
    tables = instance["methods"][method]
    best: list[Any] = [[], INFINITY]

    def b(i: int, j: int) -> int:
        return sum(t["backward_ps"] for t in instance["tensors"][i : j + 1])

    def h(i: int, j: int) -> int:
        return 0 if fixed and i > j else cost(tables["encode"], size(i, j))

    def g(i: int, j: int) -> int:
        return 0 if fixed and i > j else cost(tables["exchange"], size(i, j))

    def size(i: int, j: int) -> int:
        return sum(t["bytes"] for t in instance["tensors"][i : j + 1])

    def f(ends: list[int]) -> int:
        return evaluate(instance, ends, [method] * len(ends))

    def record(ends: list[int], time: int) -> None:
        if time < best[1]:
            best[:] = [ends, time]

    def find(done: list[int], k: int) -> list[int]:  # line 6; done: ends of M
        local = [n] if k < n else []  # 7
        local_time = f(done + local)  # 8
        computed = exchanged = 0
        for start, end in zip([0, *done], done, strict=False):
            computed += b(start, end - 1) + h(start, end - 1)
            exchanged = max(exchanged, computed) + g(start, end - 1)
        delay = exchanged - computed
        first = k
        for i in range(k, n):  # 10
            if b(k, i) + h(k, i) > delay:
                break
            first = i
        for i in range(first, n):  # 18
            base = b(k, n - 1) + h(k, i) + h(i + 1, n - 1)  # 19
            cases = max(b(k, i) + h(k, i), delay) + g(k, i) + g(i + 1, n - 1)  # 20
            if instance["forward_ps"] + computed + max(base, cases) > best[1]:  # 21, 22; f() counts forward
                continue
            current = [i + 1, *find([*done, i + 1], i + 1)]  # 25 to 27
            time = f(done + current)  # 28
            if time < local_time:
                local, local_time = current, time
            record(done + current, time)  # 33
        return local

    for k in range(1, n + 1):  # Main
        find([k], k)
        if fixed and k == n:
            record([n], f([n]))
    return list(best[0])
