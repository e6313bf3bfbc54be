"""What all tests share: one thread a process, since several processes run at a time; in CI hypothesis draws
the same examples in every run, so that what was green stays so."""

import os
import zlib

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


# Folders, and files of others, whose tests start ranks.
WITH_RANKS = {"ddp", "doors", "frameworks", "native", "runtime"}
WITH_RANKS |= {"test_bench.py", "test_examples.py", "test_netlab.py", "test_two_machines.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SHARE=N: of the tests that differ in their parameters one in N. REST=N: of the rest one in N where
    tests start ranks, and those of cuda/, which build an emulation, in every third turn.
    TURN=T: other ones for each T. Where tests are marked as many, every other one is slow."""
    for item in items:
        if item.get_closest_marker("many") and zlib.crc32(item.nodeid.encode()) % 2:
            item.add_marker(pytest.mark.slow)
    share, turn = int(os.environ.get("SHARE", "1")), int(os.environ.get("TURN", "0"))
    rest = int(os.environ.get("REST", "1"))

    def goes(item: pytest.Item) -> bool:
        folder = item.path.parent.name
        if folder == "cuda" and rest > 1 and turn % 3:
            return True
        one_in = share if "[" in item.name else rest if WITH_RANKS & {folder, item.path.name} else 1
        # Half of the hash: its last bit says which of many are slow.
        return (zlib.crc32(item.nodeid.encode()) // 2 - turn) % one_in > 0

    left = [i for i in items if goes(i)]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [i for i in items if i not in gone]
