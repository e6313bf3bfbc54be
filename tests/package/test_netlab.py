"""The network lab: what it builds carries what it says, and nothing is left of it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sidcomp
from sidcomp.standalone.simulation import Compute

from benchmarks import bench_baselines, bench_plan_real, bench_ranks
from benchmarks.netlab import __main__ as cli
from benchmarks.netlab import cells, hooks
from benchmarks.netlab.lab import Calibration, Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import measure, rows
from benchmarks.papers import training

ROOT = Path(__file__).resolve().parents[2]
GBIT = 10**9


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.build(2, GBIT) as lab:
        if lab.emulation != "namespaces":
            pytest.skip("; ".join(lab.reasons))
        yield lab


def users_of(namespaces: set[str]) -> set[str]:
    """Processes in one of these network namespaces."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / "net") in namespaces:
                found.add(process.name)
        except OSError:
            continue  # gone, or somebody else's
    return found


def namespaces_of(lab: Lab) -> set[str]:
    return {os.readlink(f"/proc/{child.pid}/ns/net") for child in lab.children}


def test_the_link_carries_its_rate_and_no_more(lab: Lab) -> None:
    found = lab.calibrate()
    assert 0 < found.goodput <= GBIT
    if found.goodput < 0.85 * GBIT:
        pytest.skip(f"too busy to shape: {found}")
    # No token bucket that has filled up in a pause carries a message for free.
    assert found.idle["1 MB"] > 0.75 * 8.39
    assert "95." in str(found) or found.goodput < 0.95 * GBIT


@contextlib.contextmanager
def three_hosts(unshare: list[str], rate: int, processes: int, **settings: float) -> Iterator[Lab]:
    """They have network namespaces of their own, and nothing is left of them."""
    lab = Lab(3, rate, "namespaces", **settings)
    try:
        lab._namespaces(unshare)
    except LabError as e:
        lab.close()
        pytest.skip(str(e))
    with lab:
        inside = namespaces_of(lab)
        assert len(users_of(inside)) == processes
        yield lab
    assert not users_of(inside)
    assert not lab.children


# As root, and as a user.
UNSHARE = pytest.mark.parametrize("unshare", [["unshare", "-n"], ["unshare", "-Urn"]], ids=" ".join)
# Every rank connects to every other one. All listen before anyone connects; who comes too early tries again.
REACH = """
import os, socket, time
def connected(address):
    for _ in range(200):
        try:
            return socket.create_connection(address, 30)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise TimeoutError(address)
s = socket.create_server(("", 29000))
c = [connected((f"10.77.0.{p + 1}", 29000)) for p in range(3) if p != int(os.environ["RANK"])]
"""


@UNSHARE
def test_hosts_of_root_and_of_a_user(unshare: list[str]) -> None:
    """Three hosts reach each other, and have one interface each."""
    with three_hosts(unshare, GBIT, 4) as lab:  # and the switch
        inside = namespaces_of(lab)
        assert len(inside) == 4 and os.readlink("/proc/self/ns/net") not in inside
        lab.run([sys.executable, "-c", REACH + "[s.accept() for _ in c]"], 40)
        queues = subprocess.run([*lab.enter[2], "tc", "class", "show", "dev", "eth0"], capture_output=True)
        assert b"rate 1Gbit" in queues.stdout and b" burst 4000b" in queues.stdout
        assert lab.calibrate().goodput <= GBIT


@UNSHARE
def test_a_latency_delays_every_message_and_not_the_rate(unshare: list[str]) -> None:
    with three_hosts(unshare, GBIT // 10, 5, latency=30.0) as lab:  # a program runs in the switch
        found = lab.calibrate()
        assert found.round_trip >= 30
        assert found.idle["64 KB"] >= 15 + 0.75 * 5.24 and found.goodput <= GBIT / 10
        if found.goodput < 0.085 * GBIT:
            pytest.skip(f"too busy to shape: {found}")
        # Every pair reaches each other, whichever speaks first.
        speak = "[x.sendall(bytes(range(256)) * 256) for x in c]; "
        speak += "got = [s.accept()[0].recv(1 << 16, socket.MSG_WAITALL) for _ in c]; "
        speak += "assert got == [bytes(range(256)) * 256] * 2"
        lab.run([sys.executable, "-c", REACH + speak], 60)


def test_bytes_of_a_step(lab: Lab) -> None:
    """The kernel counts what an all-reduce between two takes: the gradient, once each way."""
    pytest.importorskip("sklearn")
    result = measure(lab, "digits", ["dense", "topk"], blocks=1, steps=4, warmup=3, timeout=120)
    alone, dense, topk = result["runs"]
    assert [r["name"] for r in result["runs"]] == ["no communication", "dense", "topk"]
    model = 4 * result["elements"]
    for sent in dense["bytes"]:
        assert model < sent < 1.03 * model
    for sent in topk["bytes"]:
        assert sent < model / 40
    assert max(alone["bytes"]) < 4096
    assert alone["losses"][0] == dense["losses"][0] == topk["losses"][0]
    for run in result["runs"]:
        assert len(run["losses"]) == 7 and len(run["ms"]) == 3 and min(run["ms"]) > 0
    table = rows(result)
    assert table[1]["bytes sent a step"] == f"{max(dense['bytes']):,.0f}"
    assert table[1]["speed / plain DDP"] == "1.00" and table[0]["of the ceiling"] == "100%"


def test_a_rank_that_fails_or_hangs(lab: Lab) -> None:
    before = len(lab.children)
    with pytest.raises(LabError, match="rank 1 failed, with status 3"):
        lab.run(["sh", "-c", "exit $((RANK * 3))"], 20)
    with pytest.raises(LabError, match=r"ranks \[0, 1\] did not end within 0 s"):
        lab.run(["sleep", "60"], 0.3)
    assert len(lab.children) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_parent(how: signal.Signals, lab: Lab) -> None:
    script = (
        # a shell starts what it runs in the background with SIGINT ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from benchmarks.netlab.lab import Lab\n"
        "with Lab.build(2, 10**9) as lab:\n"
        "    lab.run(['sh', '-c', 'readlink /proc/self/ns/net; exec sleep 60'], 60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    inside = {parent.stdout.readline().strip()}  # rank 0 is up
    try:
        assert len(users_of(inside)) >= 2  # the rank, and who holds the namespace
        parent.send_signal(how)
        parent.wait(timeout=20)
        for _ in range(200):
            if not users_of(inside):
                return
            time.sleep(0.05)
        pytest.fail(f"processes {users_of(inside)} are still there")
    finally:
        parent.kill()
        parent.stdout.close()


def hide(monkeypatch: pytest.MonkeyPatch, *tools: str) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name in tools else which(name))


def test_without_namespaces_sockets_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    hide(monkeypatch, "ip")
    with Lab.build(2, GBIT // 2) as lab:
        assert lab.emulation == "pacing"
        assert lab.reasons == [
            "no network namespaces: no command ip (Debian: apt-get install iproute2 util-linux)"
        ]
        assert "no socket sends faster than 500 Mbit/s" in str(lab)
        assert lab.calibrate().goodput < 0.51 * GBIT
        scratch = lab.scratch
    assert scratch is not None and not scratch.exists()


def test_the_receiver_listens_at_its_address_and_asks_for_the_token() -> None:
    """A stranger is neither served nor in the way, and no other address of the host answers."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    script = [sys.executable, str(ROOT / "benchmarks" / "netlab" / "stream.py"), "127.0.0.1", str(port)]
    env = {**os.environ, "NETLAB_TOKEN": "known"}
    with subprocess.Popen(script, env=env) as receiver:
        try:
            for _ in range(500):
                try:
                    stranger = socket.create_connection(("127.0.0.1", port), timeout=20)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=20)
            stranger.sendall(b"guess")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it was let in"
            stranger.close()
            sender = subprocess.run([*script, "80000000", "1000"], env=env, capture_output=True, timeout=60)
            assert json.loads(sender.stdout)["goodput"] > 0, sender.stderr
            assert receiver.wait(20) == 0
        finally:
            receiver.kill()


def test_without_a_compiler_it_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    hide(monkeypatch, "ip", "cc")
    with Lab.build(2, GBIT) as lab:
        assert lab.emulation == "loopback"
        assert lab.reasons[1].startswith("no pacing: no C compiler")
        assert "NOT at 1 Gbit/s: these times say nothing about a network" in str(lab)
        lines = lab.introduce()
        assert lines[:3] == [f"Network: {lab}.", *(f"Nothing better: {reason}." for reason in lab.reasons)]
        assert lines[3].startswith("Calibration: one TCP stream carries")
        lab.run(["sh", "-c", "test $GLOO_SOCKET_IFNAME = lo"], 20)


def test_what_the_kernel_refuses_is_told() -> None:
    lab = Lab(2, GBIT, "namespaces")
    with lab, pytest.raises(LabError, match=r"no network namespaces: .*(unshare|setns|not|No)"):
        lab._namespaces(["unshare", "--no-such-thing"])


def test_rates() -> None:
    assert [parse_rate(r) for r in ("100mbit", "2.5gbit", "none", "1GBIT")] == [10**8, 25 * 10**8, None, GBIT]
    assert [show_rate(r) for r in (10**8, 25 * 10**8, None)] == ["100 Mbit/s", "2.5 Gbit/s", "unshaped"]
    for text in ("1", "gbit", "1gb", "-1gbit", "0mbit", "10kbit"):
        with pytest.raises(ValueError, match=r"write 100mbit, 2\.5gbit \(at least 1mbit\) or none"):
            parse_rate(text)


def test_a_calibration_that_is_off_says_so() -> None:
    good = Calibration(GBIT, 0.95 * GBIT, 0.03, {"64 KB": 0.6, "1 MB": 8.9}, "cubic", "batch")
    assert good.fault() is None
    assert good._replace(rate=None, goodput=3e10).fault() is None
    assert "not 85 to 100 %" in str(good._replace(goodput=0.5 * GBIT).fault())
    assert "less than the rate allows" in str(good._replace(idle={"1 MB": 0.5}).fault())


@pytest.mark.parametrize(
    "row",
    [
        ("dense", "dense", "", None),
        ("dense@4", "dense", "", 4),
        ("fp16", "fp16", "", None),
        ("fp16:4MB", "fp16", "4MB", None),
        ("topk", "topk", "25MB", None),
        ("default", "default", "25MB", None),
        ("even:8@0", "default", "even:8", 0),
        ("cupcake", "default", "cupcake", None),
        ("auto@1", "auto", "", 1),
        ("topk:4MB+twoshot@1", "topk", "4MB", 1, "twoshot"),
        ("marsit+ring1", "marsit", "25MB", None, "ring1"),
        ("bf16-sum32", "bf16-sum32", "", None),
        ("nothing", "nothing", "", None),
        ("torch-topk@4", "torch-topk", "", 4),
        ("dgc:mergecomp[Y=3;alpha=0.5]@0", "dgc", "mergecomp", 0, None, (("Y", 3), ("alpha", 0.5))),
        ("even:2[exclude=<128KB]", "default", "even:2", None, None, (("exclude", "<128KB"),)),
    ],
)
def test_hooks(row: tuple[Any, ...]) -> None:
    assert hooks.parse(row[0]) == hooks.Hook(*row)


def test_a_hook_has_a_schedule_and_stands_in_a_list() -> None:
    text = "dgc:layer[density=0.25@0|0.01@36;exclude=1-D]@0"
    (density, exclude), bucket = hooks.parse(text).arguments, hooks.parse(text).bucket_mb
    assert density == ("density", sidcomp.Schedule({0: 0.25, 36: 0.01}))
    assert exclude == ("exclude", "1-D") and bucket == 0
    for figure in training.FIGURES.values():  # names of hooks are joined by commas
        for hook in figure.hooks:
            assert "," not in hook and hooks.parse(hook).name == hook


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--rate 1mb", "write 100mbit"),
        ("--hooks dense,nosuch", "hook 'nosuch': one of dense, fp16, powersgd"),
        ("--hooks topk:banana", "hook 'topk:banana': groups='banana'"),
        ("--hooks even:0", "hook 'even:0': "),
        ("--hooks powersgd@4", "PowerSGD needs one bucket"),
        ("--hooks topk+tworing", "after + comes an exchange"),
        ("--hooks auto+ring1", "after + comes an exchange"),
        ("--hooks topk[density]", "'density' is not KEY=VALUE"),
        ("--hooks topk[density=0.1]x", "write arguments as in dgc:mergecomp"),
        ("--hooks dense[K=1]", "dense takes no argument K"),
        ("--hooks topk@x", "after @ comes a size in MB"),
        ("--hosts 0", "--hosts 1 to 200"),
        ("--steps 2", "--steps 3"),
        ("--task nosuch", "invalid choice"),
    ],
)
def test_wrong_arguments(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(args.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def cell(rate: str, milliseconds: dict[str, float]) -> dict[str, Any]:
    runs = [
        {
            "name": name,
            "ms": [ms - 1, ms, ms + 1],
            "bytes": [1000.0, 2000.0],
            "losses": [2.0, 1.0],
            "groups": 3 if name == "auto" else None,
            "error": None,
            "predicted_ps": int(1.1e9 * ms) if name == "auto" else None,
            "plan": {"finding_seconds": 4.0, "finding_steps": 40} if name == "auto" else None,
        }
        for name, ms in milliseconds.items()
    ]
    return {
        "hosts": 2,
        "rate": rate,
        "task": "lm",
        "hooks": ",".join(list(milliseconds)[1:]),
        "turns": [3, 6, 6],
        "emulation": "namespaces",
        "network": [],
        "result": {"runs": runs, "blocks": 3},
    }


def test_noise_is_no_regret_where_the_best_is_chosen_by_other_turns() -> None:
    """The best of ten equal plans looks faster by chance; one that is 10 % faster is so in all turns."""
    rng = np.random.default_rng(1)
    naive, fair, behind, same = [], [], [], []
    for _ in range(40):
        noisy = rng.normal(100, 4, (11, 20))
        names = ["auto", *(f"even:{i}@0" for i in range(10))]

        def result(faster: float, noisy: Any = noisy, names: Any = names) -> dict[str, Any]:
            ms = noisy * np.where(np.arange(11) == 3, faster, 1)[:, None]
            runs = [{"name": n, "ms": list(x)} for n, x in zip(names, ms, strict=True)]
            return {"runs": [{"name": "no communication", "ms": [50.0] * 20}, *runs], "blocks": 4}

        took = np.median(noisy, axis=1)
        naive.append(took[0] / took.min() - 1)
        fair.append(bench_plan_real.fair_regret(result(1.0)))
        behind.append(bench_plan_real.fair_regret(result(0.9)))
        same.append(bench_plan_real.noise(result(0.9)))
    assert np.mean(naive) > 0.01
    # Medians of ten steps each: 4 % * sqrt(pi / 2 / 10), times sqrt(2) for two and sqrt(2 / pi) for the mean.
    assert np.mean(same) == pytest.approx(0.04 * np.sqrt(2 / 10), rel=0.15)
    assert abs(np.mean(fair)) < 0.005
    assert np.mean(behind) == pytest.approx(1 / 0.9 - 1, abs=0.01)


def test_the_sweep_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"no communication": 50.0, "dense": 200.0, "fp16": 90.0, "layer@0": 100.0, "auto": 105.0}
    fast = {"no communication": 50.0, "dense": 60.0, "fp16": 90.0, "layer@0": 64.0, "auto": 60.0}
    asked = []

    def one_cell(hosts: int, rate: str, task: str, hooks: str, turns: object) -> dict[str, Any]:
        asked.append((hosts, rate, task))
        if len(asked) == 2:
            raise LabError("the power failed")
        return cell(rate, fast if rate == "none" else slow)

    monkeypatch.setattr(cells, "one_cell", one_cell)
    given = "--hosts 2 --tasks lm --rates 1gbit,none --hooks dense,fp16,layer@0,auto --cells"
    given = [*given.split(), str(tmp_path / "build" / "cells.json")]
    assert bench_plan_real.main(given) == 1
    assert "the power failed" in capsys.readouterr().err
    assert bench_plan_real.main(given) == 0
    assert asked == [(2, "1gbit", "lm"), (2, "none", "lm"), (2, "none", "lm")]
    capsys.readouterr()
    assert bench_plan_real.main([*given, "--minutes", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert len(asked) == 3
    # Beside fp16, the best of all that could have been named, ours loses a sixth.
    assert "median 8.3%, largest 16.7%" in text
    assert "in the other: median +8.3%, +0.0% to +16.7%" in text
    assert "Speed of ours / plain DDP: median 1.45, least 1.00." in text
    assert "2 plans: median error 10.0%" in text
    assert "40 steps (median), 40 at most; of the first thousand steps 5.0% (median)" in text
    bench_plan_real.main([*given[:-3], "dense", *given[-2:], "--minutes", "0"])
    assert "2 cells were not looked at" in capsys.readouterr().out  # other hooks: other cells


def test_bf16_on_the_wire_and_the_error_of_one_mean() -> None:
    """bf16 has 8 bits: an element is rounded twice, by 2^-9 of itself at most."""
    with Lab.build(2, None, loopback=True) as lab:
        result = measure(lab, "digits", ["dense", "bf16-sum32", "topk[density=0.5]"], 1, 3, 2, 60)
    plain, dense, bf16, topk = result["runs"]
    assert plain["error"] is None and dense["error"] < 1e-6
    assert 1e-4 < bf16["error"] < 2**-8
    assert 1e-2 < topk["error"] < 1.5
    assert bf16["losses"][0] == dense["losses"][0] and abs(bf16["losses"][-1] - dense["losses"][-1]) < 0.05
    assert (
        all(s["encode"] > 0 and s["decode"] > 0 for s in topk["seconds"]) and dense["seconds"] == [None] * 2
    )


def test_top_k_by_torch_trains_as_ours_does() -> None:
    """The same elements are sent and kept: the baseline of bench_baselines.py is a fair one."""
    with Lab.build(2, None, loopback=True) as lab:
        result = measure(lab, "digits", ["torch-topk", "topk:bucket[density=0.01]"], 1, 6, 4, 60)
    _, theirs, ours = result["runs"]
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert theirs["error"] == pytest.approx(ours["error"], rel=1e-3) and theirs["error"] > 0.1


def test_the_baselines_and_the_ways_of_many_ranks_can_be_run() -> None:
    for name in bench_baselines.HOOKS:
        assert hooks.parse(name).name == name
    for per_host, ways in bench_ranks.CHECKED.items():
        for way in ways:
            assert hooks.parse(bench_ranks.hook(way, per_host)).kind == way[0][0]


def test_what_a_microsecond_for_each_message_adds() -> None:
    """A ring has two passes, two-shot two rounds. In a last round of messages each rank confirms to all."""
    for way, count in (
        ((bench_ranks.TOPK, "twoshot"), 2 * 7 + 7),
        ((bench_ranks.NONE, "allreduce"), 2 * 7),
        ((bench_ranks.TOPK, "allgather"), 7),
        ((bench_ranks.MARSIT, "ring1"), 2 * 7 + 7),
    ):
        assert bench_ranks.messages(way, 100_000, 8, 1) == pytest.approx(count, abs=1e-3), way


def test_which_messages_share_a_link() -> None:
    """Those of two-shot, and of the ranks of a node in hierarchical; in a ring a rank sends to the next."""
    found = {
        (way[1], per_host): bench_ranks.crossing_messages(way, 100_000, 8, per_host)[:2]
        for per_host, ways in bench_ranks.CHECKED.items()
        for way in ways
    }
    assert found == {
        **dict.fromkeys((("allreduce", 1), ("allgather", 1), ("ring1", 1), ("allreduce", 2)), ([1], 1)),
        ("twoshot", 1): ([1, 2, 3, 4, 5, 6, 7], 7),
        ("twoshot", 2): ([1, 2, 3, 4, 5, 6, 7], 12),
        ("hierarchical", 2): ([2, 4, 6], 6),
    }
    size = bench_ranks.crossing_messages((bench_ranks.NONE, "allreduce"), 80_000, 8, 1)[2]
    assert 40_000 <= size < 41_000, "an eighth of 80,000 float32 elements"


@pytest.mark.parametrize("way", [w for ways in bench_ranks.CHECKED.values() for w in ways], ids=str)
def test_half_of_the_link_takes_twice_as_long(way: bench_ranks.Way) -> None:
    per_host = 2 if way[1] == "hierarchical" else 1
    link = bench_ranks.Link(1.0, 0, 0, 1e6, 0)
    whole, half = (
        bench_ranks.predicted(
            way, 1_000_000, 8, per_host, bench_ranks.at_share(link, way, share), Compute()
        ).seconds
        for share in (1.0, 0.5)
    )
    assert half == pytest.approx(2 * whole, rel=0.01)


def test_the_picture_of_many_ranks() -> None:
    model, labels = bench_ranks.resnet(), list(bench_ranks.PICTURE)
    rows = list(bench_ranks.curves(model, 48.0, 10.0, {}))
    assert [row["ranks"] for row in rows] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert all(48 < row["bf16 wire"] < row["dense"] for row in rows)
    assert rows[-1]["default by"] == "twoshot", "an all-gather grows with the ranks"
    for label in labels:  # a link that is no limit: a step is its computation
        assert next(iter(bench_ranks.curves(model, 48.0, 1e6, {})))[label] == pytest.approx(48, rel=1e-2)
    # What an encode takes comes on top, because it stops the backward pass.
    slow = dict.fromkeys(labels[1:], Compute(encode_ns=1.0))
    for row in bench_ranks.curves(model, 48.0, 1e6, slow):
        assert row["int4"] >= 48 + 1e-6 * model.elements > row["dense"]


@pytest.mark.slow
def test_the_command(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four hosts, all of torch's hooks, a fixed plan and one that is found."""
    given = "--hosts 4 --rate 200mbit --task digits --hooks dense,fp16,powersgd,topk,layer@0,cupcake@0 "
    given += "--blocks 2 --save"
    assert cli.main([*given.split(), str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "one TCP stream carries" in text and "4 hosts, each a network namespace" in text
    record = json.loads((tmp_path / "netlab.json").read_text())
    assert all(row["predicted ms"] for row in record["rows"][-2:])
