"""What a stranger gets: the licence, the citation, and what is said of the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import sidcomp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def project() -> dict[str, Any]:
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return metadata


def test_the_licence_is_stated_alike_everywhere() -> None:
    assert project()["license"] == "BSD-3-Clause"
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License") and "the sidcomp authors" in text
    assert re.search(r"^license: BSD-3-Clause$", (ROOT / "CITATION.cff").read_text(), re.M)


def test_the_citation_names_the_papers_and_this_version() -> None:
    text = " ".join((ROOT / "CITATION.cff").read_text().split())
    assert f"version: {sidcomp.__version__} " in text
    assert f"repository-code: {project()['urls']['Homepage']} " in text
    for title in (
        "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
        "RedSync: Reducing Synchronization Traffic for Distributed Deep Learning",
        "Sign Bit is Enough: A Learning Synchronization Framework for Multi-hop All-reduce with Ultimate "
        "Compression",
        "MergeComp: A Compression Scheduler for Scalable Communication-Efficient Distributed Training",
        "Cupcake: A Compression Optimizer for Scalable Communication-Efficient Distributed Training",
    ):
        assert title in text


def test_the_metadata_names_every_python_that_is_supported() -> None:
    lowest = project()["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project()["classifiers"]), re.M)
    assert named == [f"3.{minor}" for minor in range(int(lowest[2:]), int(named[-1][2:]) + 1)]
    assert project()["version"] == sidcomp.__version__
