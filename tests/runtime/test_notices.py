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
    monkeypatch.setattr(notices, "_on", False)
    monkeypatch.delenv("SIDCOMP_QUIET", raising=False)


def test_a_line_is_said_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    notices.say("elsewhere", rank=1)
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


def test_what_one_run_was_told_another_is_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where Python's filters are the usual ones, which show a warning of one line once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            notices.say("in force")
            notices.warn("not in force")
            notices.warn("collected", raises=False)
    assert capsys.readouterr().err == 2 * "sidcomp: in force\n"
    assert [str(w.message) for w in caught] == 2 * ["sidcomp: not in force", "sidcomp: collected"]


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
