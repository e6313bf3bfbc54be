"""Hosts and the links between them.

Where the kernel lets us, each host is a network namespace with one interface, and a namespace of its own is
the switch: a bridge, or delay.c where links have a latency. Both ends of every cable are shaped by htb, so
that a host's uplink and its downlink each carry the rate, and no more.

No namespace has a name. A namespace lives as long as a process in it: here `cat`, which reads from a pipe of
ours. When this process goes, however it goes, the pipe closes, `cat` ends, and the kernel takes interfaces
and queues away; the ranks are killed with their parent. So nothing can be left behind, and nothing on this
machine's own network is touched.
"""

import json
import math
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SO_MAX_PACING_RATE = 47  # of Linux; Python does not name it
IDLE = {"64 KB": 1 << 16, "1 MB": 1 << 20}  # messages sent after a pause
# Commands that go before a rank's, where they work. setpriv: a rank ends with us. chrt: under SCHED_BATCH a
# thread that waits for a lock does not preempt its holder; Gloo's small messages take a tenth of the time.
HELPERS = (["setpriv", "--pdeathsig", "KILL"], ["chrt", "-b", "0"])


class LabError(RuntimeError):
    """A network that cannot be built, or ranks that failed; the text says why."""


def parse_rate(text: str) -> int | None:
    """Bits per second of "100mbit", "1gbit", "2.5gbit"; None of "none": not shaped."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not found or float(found[1]) * UNITS[found[2]] < 10**6:
        raise ValueError(f"rate {text!r}: write 100mbit, 2.5gbit (at least 1mbit) or none")
    return round(float(found[1]) * UNITS[found[2]])


def show_rate(rate: float | None) -> str:
    if rate is None:
        return "unshaped"
    return f"{rate / 1e9:.4g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.4g} Mbit/s"


class Calibration(NamedTuple):
    """What the link carried, before anything else used it."""

    rate: int | None
    goodput: float  # bits per second of one TCP stream
    round_trip: float  # ms, one byte, idle
    idle: dict[str, float]  # ms that a message takes after 60 ms of silence
    congestion: str
    scheduler: str

    def __str__(self) -> str:
        def message(size: str, took: float) -> str:
            ideal = "" if self.rate is None else f" (at the rate {IDLE[size] * 8e3 / self.rate:.2f})"
            return f"{size} {took:.2f} ms{ideal}"

        share = "" if self.rate is None else f" ({self.goodput / self.rate:.1%} of the rate)"
        return (
            f"one TCP stream carries {show_rate(self.goodput)}{share}; round trip {self.round_trip:.2f} ms; "
            f"after a pause {', '.join(message(*m) for m in self.idle.items())}; congestion control "
            f"{self.congestion}; scheduler class {self.scheduler}"
        )

    def fault(self) -> str | None:
        """Why timings over this link do not mean the rate, if so."""
        if self.rate is None:
            return None
        if not 0.85 <= self.goodput / self.rate <= 1:
            return f"one stream carries {self.goodput / self.rate:.1%} of the rate, not 85 to 100 %"
        # The trap of token buckets: they fill up while the link idles, and a small message travels free.
        for size, took in self.idle.items():
            if took < 0.75 * IDLE[size] * 8e3 / self.rate:
                return f"{size} after a pause take {took:.2f} ms, less than the rate allows"
        return None


class Lab:
    """A network of `hosts`, one rank on each. Use it as a context manager, and start one by `build`.

    emulation   "namespaces", "pacing" (loopback, each socket's sender held back) or "loopback" (as it is)
    reasons     why the better ones could not be had, if so
    """

    def __init__(self, hosts: int, rate: int | None, emulation: str, latency: float = 0.0) -> None:
        self.hosts, self.rate, self.emulation, self.latency = hosts, rate, emulation, latency
        self.reasons: list[str] = []
        self.enter: list[list[str]] = [[] for _ in range(hosts)]  # goes before a command to run it on a host
        self.address, self.interface = "127.0.0.1", "lo"
        self.environment: dict[str, str] = {}
        self.children: list[subprocess.Popen[Any]] = []
        self.scratch: Path | None = None
        self.helpers = [word for helper in HELPERS if _works([*helper, "true"]) for word in helper]

    def __str__(self) -> str:
        """What is emulated, and what that means for a timing."""
        link = show_rate(self.rate)
        if self.emulation == "namespaces":
            shaped = (
                "not shaped"
                if self.rate is None
                else f"{link} up and down, by htb (burst {burst(self.rate)})"
            )
            if self.latency:
                shaped += f"; the switch forwards {self.latency / 2:g} ms later, by a program of ours"
            return f"{self.hosts} hosts, each a network namespace behind one switch; {shaped}"
        if self.emulation == "pacing":
            return (
                f"{self.hosts} processes over loopback; no socket sends faster than {link}. That is a limit "
                "of sockets, not of hosts: with more than two hosts, it is too kind"
            )
        wanted = "" if self.rate is None else f", NOT at {link}: these times say nothing about a network"
        return f"{self.hosts} processes over loopback{wanted}"

    # ---- three ways to build one

    @classmethod
    def build(cls, hosts: int, rate: int | None, loopback: bool = False, latency: float = 0.0) -> "Lab":
        """The best that can be had here; loopback: that, whatever else there is. latency: ms that a
        message and its answer take in addition, which only namespaces can have."""
        if not 1 <= hosts <= 200:
            raise ValueError(f"hosts {hosts}: from 1 to 200")
        ways: list[tuple[str, list[str]]] = [("namespaces", ["unshare", "-n"])] if os.geteuid() == 0 else []
        ways += [("namespaces", ["unshare", "-Urn"]), ("pacing", []), ("loopback", [])]
        reasons: list[str] = []
        for emulation, unshare in ways[-1:] if loopback else ways:
            if latency and emulation != "namespaces":
                raise LabError(f"no latency without network namespaces ({'; '.join(reasons) or 'loopback'})")
            lab = cls(hosts, rate, emulation, latency)
            try:
                if emulation == "namespaces":
                    lab._namespaces(unshare)
                elif emulation == "pacing":
                    lab._pacing()
            except LabError as e:
                lab.close()
                reasons += [str(e)] if str(e) not in reasons else []
                continue
            except BaseException:
                lab.close()
                raise
            lab.reasons = reasons
            return lab
        raise AssertionError("loopback needs nothing")

    def _namespaces(self, unshare: list[str]) -> None:
        if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]:
            wanted = f"no command {missing[0]} (Debian: apt-get install iproute2 util-linux)"
            raise LabError(f"no network namespaces: {wanted}")
        switch = self._hold(unshare)
        users = ["-U", "--preserve-credentials"] if "-Urn" in unshare else []
        into = ["nsenter", "-t", str(switch), *users, "-n"]
        holders = [self._hold([*into[:3], *users, "unshare", "-n"]) for _ in range(self.hosts)]
        self.enter = [["nsenter", "-t", str(pid), *users, "-n"] for pid in holders]
        self.address, self.interface = "10.77.0.1", "eth0"

        bridge = (
            []
            if self.latency
            else ["link add br0 type bridge forward_delay 0 mcast_snooping 0", "link set br0 up"]
        )
        ports = bridge[:]
        for r, pid in enumerate(holders):
            ports += [
                f"link add p{r} type veth peer name eth0 netns {pid}",
                f"link set p{r} {'master br0 ' if bridge else ''}up",
            ]
        _batch(into, "ip", ports)
        for r, enter in enumerate(self.enter):
            # Up to 1 Gbit, smaller packets: htb lets one through whole, and after a pause that is a gift.
            small = self.rate is not None and self.rate <= 10**9
            sizes = ["link set eth0 gso_max_size 16384 gro_max_size 16384"] if small else []
            _batch(
                enter,
                "ip",
                ["link set lo up", f"addr add 10.77.0.{r + 1}/24 dev eth0", *sizes, "link set eth0 up"],
            )
            if self.rate is not None:
                _batch(enter, "tc", _shape("eth0", self.rate))
                _batch(into, "tc", _shape(f"p{r}", self.rate))
        if self.latency:
            self._delay(into)

    def _delay(self, into: list[str]) -> None:
        """The switch that takes the bridge's place. Few kernels have netem, which would do this."""
        program = self._compile("no latency", "delay.c")
        ports = [f"p{r}" for r in range(self.hosts)]
        self._keep([*into, str(program), str(round(self.latency * 1e3 / 2)), *ports], "no latency")

    def _compile(self, without: str, source: str, *flags: str) -> Path:
        """What the C file beside this one becomes, in a folder that goes with the lab. without: what there is
        not, if it cannot be compiled."""
        self.scratch = self.scratch or Path(tempfile.mkdtemp(prefix="netlab-"))
        built = self.scratch / Path(source).stem
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise LabError(f"{without}: no C compiler (Debian: apt-get install build-essential)")
        command = [compiler, "-O2", str(HERE / source), "-o", str(built), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"{without}: {_last(done.stderr)}")
        return built

    def _hold(self, command: list[str]) -> int:
        """A new namespace made by `command`; the process that keeps it."""
        return self._keep([*command, "sh", "-c", "echo; exec cat"], "no network namespaces").pid

    def _keep(self, command: list[str], without: str) -> "subprocess.Popen[str]":
        """A process that lives until its input is closed, once it has said a line. without: what there is not
        if it says none."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # or Ctrl-C would end it before the ranks
        )
        self.children.append(process)
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            raise LabError(f"{without}: {_last(process.stderr.read())}")
        return process

    def _pacing(self) -> None:
        if self.rate is None:
            raise LabError("no pacing: nothing to hold back without a rate")
        try:
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("@L", self.rate // 8))
        except OSError as e:
            raise LabError(f"no pacing: SO_MAX_PACING_RATE: {e.strerror}") from None
        shim = self._compile("no pacing", "pace.c", "-shared", "-fPIC", "-ldl")
        self.environment = {"LD_PRELOAD": str(shim), "NETLAB_BYTES_PER_SECOND": str(self.rate // 8)}

    # ---- what runs in it

    def start(
        self, host: int, command: list[str], env: dict[str, str], **popen: Any
    ) -> "subprocess.Popen[Any]":
        process = subprocess.Popen(
            [*self.enter[host], *self.helpers, *command],
            env={**os.environ, **self.environment, **env},
            start_new_session=True,
            **popen,
        )
        self.children.append(process)
        return process

    def run(
        self,
        command: list[str],
        timeout: float = math.inf,
        env: dict[str, str] | None = None,
        output: Any = None,
        ranks_per_host: int = 1,
    ) -> None:
        """Runs ranks of `command` on each host, with torchrun's environment, until all have ended. The ranks
        of one host reach each other through its loopback, which has no limit.

        Rank 0 prints to `output` (as subprocess takes it), the others nothing; all print errors. LabError
        after `timeout` seconds, or when a rank fails.
        """
        port = 29500 if self.emulation == "namespaces" else _free_port()
        ranks = []
        world = self.hosts * ranks_per_host
        for r in range(world):
            # With one rank on each, the hosts stand for the ranks of one machine.
            local = r % ranks_per_host if ranks_per_host > 1 else r
            given = {
                "RANK": r, "WORLD_SIZE": world, "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": ranks_per_host if ranks_per_host > 1 else world,
                "MASTER_ADDR": self.address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": self.interface,
                "NETLAB_INTERFACE": self.interface if self.emulation == "namespaces" else "",
                "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch warns that these addresses have no names
            }  # fmt: skip
            where = {**{k: str(v) for k, v in given.items()}, **(env or {})}
            target = subprocess.DEVNULL if r else output
            host = r // ranks_per_host
            ranks.append(self.start(host, command, where, stdin=subprocess.DEVNULL, stdout=target))
        end = time.monotonic() + timeout
        try:
            while running := [p for p in ranks if p.poll() is None]:
                if failed := [r for r, p in enumerate(ranks) if p.returncode]:
                    end = min(end, time.monotonic() + 5)  # the others notice by themselves, and say so
                    if time.monotonic() >= end:
                        raise LabError(f"rank {failed[0]} failed")
                elif time.monotonic() >= end:
                    stuck = [r for r, p in enumerate(ranks) if p in running]
                    raise LabError(f"ranks {stuck} did not end within {timeout:.0f} s")
                time.sleep(0.05)
            if failed := [r for r, p in enumerate(ranks) if p.returncode]:
                raise LabError(f"rank {failed[0]} failed, with status {ranks[failed[0]].returncode}")
        finally:
            self._stop(ranks)

    def ask(self, module: str, spec: object, timeout: float, ranks_per_host: int = 1) -> Any:
        """What rank 0 answers where `python -m module` is asked `spec`: benchmarks/ranks.py, `answer`."""
        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            out = Path(folder) / "answer.json"
            command = [sys.executable, "-m", module, json.dumps(spec), str(out)]
            self.run(command, timeout, ranks_per_host=ranks_per_host)
            return json.loads(out.read_text())

    def calibrate(self) -> Calibration:
        """Sends from the last host to the first; nothing else may run meanwhile. Takes about two seconds."""
        port = 29400 if self.emulation == "namespaces" else _free_port()
        script = [sys.executable, str(HERE / "stream.py"), self.address, str(port)]
        secret = {"NETLAB_TOKEN": secrets.token_hex(16)}
        listen = self.start(0, script, secret, stdin=subprocess.DEVNULL)
        sizes = [str(size) for size in IDLE.values()]
        send = self.start(
            self.hosts - 1,
            [*script, str(self.rate or 0), *sizes],
            secret,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        limit = 30 + 1e8 / (self.rate or math.inf)  # some megabytes travel
        try:
            text, _ = send.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise LabError(f"the calibration did not end within {limit:.0f} s: is the network up?") from None
        finally:
            self._stop([listen, send])
        if send.returncode:
            raise LabError("the calibration failed; its message is above")
        found = json.loads(text)
        found["idle"] = dict(zip(IDLE, found["idle"], strict=True))
        return Calibration(rate=self.rate, **found)

    def introduce(self, found: Calibration | None = None) -> list[str]:
        """Prints lines: what is emulated, why nothing better, what the link carries, what is wrong. Returns
        them. found: a calibration; None: it calibrates."""
        found = found or self.calibrate()
        fault = found.fault()
        lines = [
            f"Network: {self}.",
            *(f"Nothing better: {reason}." for reason in self.reasons),
            f"Calibration: {found}.",
            *([f"The calibration is off: {fault}. Times below do not mean this rate."] if fault else []),
        ]
        print(*lines, sep="\n", flush=True)
        return lines

    # ---- the end

    def _stop(self, processes: "Iterable[subprocess.Popen[Any]]") -> None:
        for process in list(processes):
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            self.children.remove(process)

    def close(self) -> None:
        self._stop(self.children[::-1])  # what runs on the hosts before the hosts
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def burst(rate: int) -> str:
    """htb's bucket: as small as it can be, since what is in it after a pause travels free."""
    return "4kb" if rate <= 10**9 else "64kb"


def _shape(device: str, rate: int) -> list[str]:
    """Commands of tc."""
    limits = f"rate {rate}bit burst {burst(rate)} cburst {burst(rate)} quantum 65536"
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb {limits}",
        f"qdisc add dev {device} parent 1:1 pfifo limit 1000",
    ]


def _batch(enter: list[str], tool: str, lines: list[str]) -> None:
    done = subprocess.run(
        [*enter, tool, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        why = [
            line for line in done.stderr.splitlines() if not line.startswith(("Command failed", "Warning"))
        ]
        raise LabError(f"no network namespaces: {tool}: {_last(chr(10).join(why))}")


def _works(command: list[str]) -> bool:
    return (
        shutil.which(command[0]) is not None and not subprocess.run(command, capture_output=True).returncode
    )


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
