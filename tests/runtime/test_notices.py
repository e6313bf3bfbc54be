"""What people see without any logging set-up, and what strict() makes of it."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import sidcomp
from sidcomp import notices


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(notices, "_on", False)
    monkeypatch.delenv("SIDCOMP_QUIET", raising=False)


def test_a_line_is_said_once_and_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    notices.say("elsewhere", rank=1)
    for _ in range(2):
        notices.say("here")
    notices.say("and this")
    seen = capsys.readouterr()
    assert seen.err == "sidcomp: here\nsidcomp: and this\n" and seen.out == ""


def test_an_environment_variable_silences_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDCOMP_QUIET", "1")
    notices.say("here")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SIDCOMP_QUIET", "0")
    notices.say("here")
    assert capsys.readouterr().err == "sidcomp: here\n"


def test_a_warning_names_the_line_of_the_program() -> None:
    with pytest.warns(sidcomp.SidcompWarning, match=r"^sidcomp: not in force$") as caught:
        notices.warn("not in force")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notices.warn("on another rank", rank=1)


def test_strict_makes_errors_of_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with sidcomp.strict():
        for tell in (notices.warn, notices.log):
            for rank in (0, 1):  # on every rank, or the others would wait
                with pytest.raises(sidcomp.StrictError, match=r"^fell back$"):
                    tell("fell back", rank)
        with pytest.warns(sidcomp.SidcompWarning) as caught:
            notices.warn("collected", raises=False)
        assert caught[0].filename == "sys"
        with sidcomp.strict(False):
            assert not notices.is_strict()
        assert notices.is_strict()
    with caplog.at_level(logging.WARNING, "sidcomp"):
        notices.log("100 % dense")
    assert caplog.messages == ["100 % dense"]
    sidcomp.strict()
    assert notices.is_strict()
    sidcomp.strict(False)
    assert not notices.is_strict()


def test_strict_by_the_environment() -> None:
    script = "from sidcomp import notices; print(notices.is_strict())"
    for value, expected in (("1", "True"), ("0", "False")):
        done = subprocess.run(
            ["env", f"SIDCOMP_STRICT={value}", sys.executable, "-c", script],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected
