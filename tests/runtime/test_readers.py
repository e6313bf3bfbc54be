"""What reads text that others may have written: presets, the record of rounds in the store.
Whatever they are given, they refuse it with an error of sidcomp's, or take it as it is."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sidcomp
import torch
import torch.distributed as dist
from damaged import GONE, VALUES, changed, paths
from sidcomp.config import presets
from sidcomp.local import rendezvous as rounds

PLAIN = [v for v in VALUES if not isinstance(v, torch.Tensor | bytes)]
PIECES = (
    *("[", "]", "{", "}", '"', "'", '"""', "=", ".", ",", "\n", "#", "-", "\\", "\r", "\x00", "\ud800", "é"),
    *("1e999", "nan", "inf", "true", "null", "0x10", "9" * 30, "1979-05-27", "\\u0000", "[[", "]]", "=1"),
    *("[parameters]", "[[policy]]", "codec", "density", "rule", ": {", ": ["),
)
FEW_AND_MANY = [150, pytest.param(4000, marks=pytest.mark.slow)]


def mutated(text: str, draw: random.Random) -> str:
    """The text after some deletions, insertions, repetitions and replacements."""
    out = list(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(out) + 1)
        how = draw.random()
        if how < 0.3:
            del out[at : at + draw.randrange(1, 6)]
        elif how < 0.7:
            out[at:at] = draw.choice(PIECES)
        elif how < 0.85:
            out[at:at] = out[draw.randrange(len(out) + 1) :][: draw.randrange(1, 40)]
        else:
            out[at : at + 1] = chr(draw.randrange(1, 255))
    return "".join(out)


def judged(use: Callable[[Path], None], path: Path, texts: list[str], runs: int) -> None:
    """use: loads the file, and fails if it then has something else than the file says."""
    draw, refused, loaded = random.Random(7), 0, 0
    for _ in range(runs):
        text = mutated(draw.choice(texts), draw)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            use(path)
            loaded += 1
        except sidcomp.SidcompError as e:
            assert str(path.name) in str(e) or str(e), text
            refused += 1
        except Exception as e:
            raise AssertionError(f"{type(e).__name__}: {e}\n{text!r}") from e
    assert refused > runs / 5 and loaded > runs / 50, (refused, loaded)


@pytest.mark.parametrize("runs", FEW_AND_MANY)
def test_a_preset(runs: int, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        preset = presets.load(path)
        state = sidcomp.preset(path)
        codec, _ = state._codec
        assert codec == preset.arguments["codec"]

    shipped = [(presets._FOLDER / f"{name}.toml").read_text() for name in sidcomp.presets()]
    judged(use, tmp_path / "own.toml", shipped, runs)


# ---- the record of rounds


def records() -> Iterator[tuple[str, str]]:
    """What is wrong with a record, if anything is, and the record."""
    here = {"version": 2, "empty": False, "group": "1:0,1"}
    open_ = {
        "model": "m", "number": 3, "version": 2, "expected": [0, 1], "next": [1], "here": {"1": here},
        "left": [0], "closed": False, "group": "", "done": [1], "last": {"0": [2, 2], "1": [2, 2]},
    }  # fmt: skip
    closed = {**open_, "closed": True, "group": "3:0,1", "here": {"0": here, "1": here}}
    for record in (open_, closed):
        yield "nothing", json.dumps(record)
        for place in paths(record):
            for value in PLAIN:
                shown = "gone" if value is GONE else repr(value)
                yield f"{place}: {shown}", json.dumps(changed(record, place, value))
    for text in ("", "{", "[]", "null", "x", "3", '{"model": "m"}', "ÿ", "[" * 100_000, "9" * 5000):
        yield text[:20], text


def takes_part(store: dist.Store) -> None:
    """What a rank does in a round, in a run of two."""
    one = rounds.Rounds(store, "key", 0, 2, "m", 0.02)
    one.limit = 0.05
    one.opened()
    one.attended(one.look())
    meeting = one.meet(lambda record: {"version": 2, "empty": False, "group": ""}, 0.01)
    if meeting is not None:
        assert set(meeting.members) <= {0, 1}
        one.check(meeting, time.monotonic())
        one.conclude(meeting, True)
    one.leave()


def test_a_record_of_rounds() -> None:
    ends: dict[str, int] = {}
    for what, text in records():
        store = dist.HashStore()
        store.set("key", text)
        said: list[str] = []

        def go(store: dist.Store = store, said: list[str] = said) -> None:
            try:
                takes_part(store)
                said.append("takes part")
            except (sidcomp.ExchangeError, sidcomp.SetupError, rounds.Undone) as e:
                said.append(type(e).__name__)
            except BaseException as e:
                said.append(f"{type(e).__name__}: {e}")

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        thread.join(20)
        assert said, f"{what}: it waits for ever"
        assert said[0] in ("takes part", "ExchangeError", "SetupError", "Undone"), f"{what}: {said[0]}"
        assert what != "nothing" or said[0] == "takes part"
        ends[said[0]] = ends.get(said[0], 0) + 1
    assert ends["takes part"] > 20 and ends["ExchangeError"] > 500, ends
