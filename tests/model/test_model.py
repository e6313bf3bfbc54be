"""The protocol of `deadline` (deadline.pml) under spin, which goes through every order of what ranks do: no
contribution is lost or counts twice, all who confirm a round apply the same, and nobody waits for ever. Where
the same program is broken, it must find an error."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("deadline.pml")
SLOW = pytest.mark.slow

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("spin", "gcc"))),
    reason="needs spin and gcc (Debian: apt-get install spin gcc)",
)


def explored(folder: Path, *defines: str, cycles: bool = False) -> str:
    """Lets spin go through all states. Returns the error that it has found; "" if there is none. cycles:
    looks for runs without an end."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (folder / MODEL.name).write_text(MODEL.read_text())  # spin's files go beside it
    run("spin", *(f"-D{d}" for d in defines), "-a", MODEL.name)
    search = "-DNP" if cycles else "-DSAFETY"
    run("gcc", "-w", "-O2", search, "-DCOLLAPSE", "-DMEMLIM=8000", "-o", "pan", "pan.c")
    said = run("./pan", "-m100000", "-w24", *(["-l"] if cycles else []))
    states, error = (
        re.search(r"(\d+) states, stored", said),
        re.search(r"^pan:1: (.*) \(at depth", said, re.M),
    )
    assert states is not None and "max search depth too small" not in said and "MEMLIM" not in said, said
    assert ("errors: 0" in said) is (error is None), said
    print(f"{' '.join(defines)}: {states[1]} states, {error[1] if error is not None else 'no error'}")
    return error[1] if error is not None else ""


SOUND = [
    # ranks that are late for a round, as the deadline may pass at any moment
    ("KILLS=0", "SLOW=0"),
    # and none leaves before what it did is in a round
    ("KILLS=0", "SLOW=0", "GOES=1", "AVERAGES"),
    pytest.param(("KILLS=0", "SLOW=0", "AVERAGES"), marks=SLOW),
    # and the codec leaves a residual
    pytest.param(("KILLS=0", "SLOW=0", "PARTLY"), marks=SLOW),
    # and a message, or what a rank confirms, comes after the limit of the exchange
    pytest.param(("KILLS=0",), marks=SLOW),
    pytest.param(("KILLS=0", "GOES=1", "PARTLY"), marks=SLOW),
    # a rank is killed, and started again or not
    *(pytest.param(("SLOW=0", f"VICTIM={rank}"), marks=SLOW) for rank in range(3)),
    pytest.param(("GOES=1", "VICTIM=2"), marks=SLOW),
    # also before the ranks have a common point
    pytest.param(("FRESH", "SLOW=0", "GOES=1", "VICTIM=2"), marks=SLOW),
]


@pytest.mark.parametrize("defines", SOUND, ids=" ".join)
def test_the_protocol(defines: tuple[str, ...], tmp_path: Path) -> None:
    assert not explored(tmp_path, *defines)


@pytest.mark.parametrize("defines", [*SOUND[:2], ("SLOW=0", "GOES=1", "VICTIM=2")], ids=" ".join)
def test_every_run_ends(defines: tuple[str, ...], tmp_path: Path) -> None:
    assert not explored(tmp_path, *defines, cycles=True)


LOST, TWICE, OTHERS = (
    r"\(\(did& ~",
    r"\(\(point&mean\)==0\)",
    r"\((truth\[to\]==mean|point_of\[to\]==point)\)",
)
BROKEN = [
    (("ONEPHASE", "SLOW=0", "GOES=1"), OTHERS),
    (("KEPT", "PARTLY", "KILLS=0"), r"\(\(away&before\)==0\)"),
    (("REUSED", "PARTLY", "KILLS=0", "GOES=1"), OTHERS),
    (("HASTY", "KILLS=0", "SLOW=0"), LOST),
    (("OPENS", "FRESH", "KILLS=0", "SLOW=0", "GOES=1"), r"==origin\)"),
    (("MISSES", "AVERAGES", "KILLS=0", "SLOW=0", "GOES=1"), r"\(\(away==0\)"),
    (("PATIENT", "SLOW=0", "GOES=1"), "invalid end state"),
    (("UNLIMITED", "SLOW=0", "GOES=1"), "invalid end state"),
    pytest.param(("EARLY", "SLOW=0", "VICTIM=2"), TWICE, marks=SLOW),
]


@pytest.mark.parametrize("defines, found", BROKEN, ids=lambda x: x[0] if isinstance(x, tuple) else "")
def test_a_broken_protocol_is_found_out(defines: tuple[str, ...], found: str, tmp_path: Path) -> None:
    assert re.search(found, explored(tmp_path, *defines))
