"""What the emulation of CUDA must find: kernels and streams that are broken on purpose (broken.cpp).

Each is mended by one line; mended, it ends well and its result is right, whatever the order.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CXX = (os.environ.get("CXX") or "c++").split()
SEEDS = range(1, 4)
INCLUDES = [HERE.parents[1] / "csrc", HERE.parents[1] / "cuda", HERE]

pytestmark = [
    pytest.mark.skipif(not shutil.which(CXX[0]), reason="no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulation is written for Linux"),
]

# By what is broken: what the emulation says, and the lines of broken.cpp that it names, by what stands there.
FOUND = {
    "missing_syncwarp": (
        r"race: a write of 4 bytes of shared memory.*no barrier after the read by thread \d+ of block 0"
        r"|race: a read .*no barrier after the write"
        r"|a read of 4 bytes of shared memory that nothing has written",
        ['"swap"'],
    ),
    "missing_event": (
        r"no order: a (read|write) .*nothing makes it wait for the (write|read) on stream [12]",
        ['"fill late"', '"copy early"'],
    ),
    "missing_event_to_overwrite": (
        r"no order: a (read|write) .*nothing makes it wait for the (write|read) on stream [12]",
        ['"copy late"', "cudaMemsetAsync(x, 0, N"],
    ),
    "freed_in_use": (
        r"no order: a write .*nothing makes it wait for the read on stream 2"
        r"|is used.* after it was given back",
        ["cudaFreeAsync(x", '"copy from what goes"'],
    ),
    "wrong_mask": (
        r"lane \d+ waits in a shuffle of mask ffffffff for lane \d+, which has (ended|not come)",
        ['"half with all lanes"'],
    ),
    "mask_without_the_source": (
        r"lane \d+ shuffles from lane \d+, which the mask 0000ffff leaves out",
        ['"half from the other half"'],
    ),
    "mask_without_oneself": (
        r"lane 0 is in a shuffle whose mask 0000fffe leaves it out",
        ['"half without one"'],
    ),
    "not_resident": (
        r"a block waits for one that is not resident.* 3 blocks of 4 have not begun .*block \d of 4",
        ['"pass on"'],
    ),
    "too_many_together": (
        r"cooperative launch of 9 blocks of 256 threads, of which 8 at most are resident",
        ['"pass on together"'],
    ),
    "missing_barrier": (r"race: .*shared memory|shared memory that nothing has written", ['"reverse"']),
    "unwritten_shared_memory": (r"shared memory that nothing has written", ['"unwritten"']),
    "missing_atomic": (r"race: .*device memory.*no barrier after", ['"count"']),
    "missing_fence": (r"race: a read .*device memory.*no barrier after the write", ['"add up"']),
}
WRONG_BITS = (
    "missing_syncwarp",
    "missing_event",
    "missing_event_to_overwrite",
    "freed_in_use",
    "missing_barrier",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """broken.cpp with its accesses watched, and without."""
    out = tmp_path_factory.mktemp("broken")
    base = [*CXX, "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror"]
    steps = [
        ["-c", "emulate.cpp", "-o", "emulate.o"],
        ["-c", "order.cpp", "-o", "order.o"],
        ["-fsanitize=thread", "-c", "broken.cpp", "-o", "watched.o"],
        ["-c", "broken.cpp", "-o", "plain.o"],
        [
            "-fsanitize=thread", "-DSID_EMULATE", "-Wno-unknown-pragmas", *(f"-I{d}" for d in INCLUDES),
            "-c", "parts.cpp", "-o", "parts.o",
        ],
    ]  # fmt: skip
    running = [
        subprocess.Popen([*base, *(str(HERE / w) if w.endswith("cpp") else w for w in step)], cwd=out)
        for step in steps
    ]
    assert [p.wait() for p in running] == [0] * len(steps)
    for name in ("watched", "plain", "parts"):
        subprocess.run([*CXX, f"{name}.o", "emulate.o", "order.o", "-ldl", "-o", name], cwd=out, check=True)
    return out / "watched", out / "plain"


def run(program: Path, case: str, how: str, seed: int, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), case, how],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"SID_EMULATED_SEED": str(seed)} | env,
    )
    return done.returncode, done.stderr


def line_of(text: str) -> int:
    source = (HERE / "broken.cpp").read_text()
    assert source.count(text) == 1, text
    return source[: source.index(text)].count("\n") + 1


def test_all_cases_are_here(programs: tuple[Path, Path]) -> None:
    names = subprocess.run([str(programs[0])], capture_output=True, text=True, check=True).stdout.split()
    assert names == list(FOUND)


@pytest.mark.parametrize("case", FOUND)
def test_what_is_broken_is_found_in_any_order(programs: tuple[Path, Path], case: str) -> None:
    """By name: the launches that are at fault, and the seed that shows it again."""
    text, places = FOUND[case]
    for seed in SEEDS:
        status, said = run(programs[0], case, "broken", seed)
        assert status == -6 and re.search(text, said), (status, said)
        for place in places:
            assert f"broken.cpp:{line_of(place)}" in said, said
        assert said.endswith(f"; SID_EMULATED_SEED={seed}\n")
        for program in programs:
            assert run(program, case, "mended", seed) == (0, "")


@pytest.mark.parametrize("case", WRONG_BITS)
def test_a_missing_edge_shows_as_wrong_bits(programs: tuple[Path, Path], case: str) -> None:
    """With nobody watching: what is not ordered is done in another order, by some of the seeds."""
    assert 3 in {run(programs[1], case, "broken", seed)[0] for seed in range(1, 21)}


def test_what_all_kernels_share(programs: tuple[Path, Path]) -> None:
    """Sums and scans of cuda/core/device.cuh: no thread reads what another one may still write."""
    for seed in SEEDS:
        assert run(programs[0].with_name("parts"), "", "", seed) == (0, "")


def test_a_seed_repeats_what_it_has_shown(programs: tuple[Path, Path]) -> None:
    said = [run(programs[0], "missing_atomic", "broken", seed)[1] for seed in (*SEEDS, *SEEDS)]
    assert said[: len(SEEDS)] == said[len(SEEDS) :] and len(set(said)) > 1


def test_a_report_is_kept_where_the_output_is_lost(programs: tuple[Path, Path], tmp_path: Path) -> None:
    report = tmp_path / "report"
    said = run(programs[0], "missing_event", "broken", 1, SID_EMULATED_REPORT=str(report))[1]
    assert report.read_text() == said
