"""Measures a link. `stream.py ADDRESS PORT` receives there, and nowhere else; `stream.py ADDRESS PORT RATE
SIZE...` sends, and prints JSON.

A connection begins with $NETLAB_TOKEN, which both have; the receiver closes any other and goes on listening.
Each request is a count and so many bytes. The answer says how long the last four fifths took to arrive.
"""

import contextlib
import hmac
import json
import os
import socket
import statistics
import struct
import sys
import time

COUNT, ANSWER = struct.Struct("!Q"), struct.Struct("!QQ")  # bytes; bytes and nanoseconds
CHUNK = 1 << 18
GREETING = 5.0  # seconds that a stranger may hold up the receiver


def token() -> bytes:
    return os.environ["NETLAB_TOKEN"].encode()


def receive(s: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        data += s.recv(n - len(data)) or sys.exit(0)
    return data


def welcome(server: socket.socket) -> socket.socket:
    """The first connection that knows the token."""
    want = token()
    while True:
        s, _ = server.accept()
        said, end = b"", time.monotonic() + GREETING
        with contextlib.suppress(OSError):
            while len(said) < len(want) and (left := end - time.monotonic()) > 0:
                s.settimeout(left)
                said += s.recv(len(want) - len(said)) or b"\0" * len(want)  # the end
        if hmac.compare_digest(said, want):
            s.settimeout(None)
            return s
        s.close()


def serve(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        s = welcome(server)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(CHUNK)
    while True:
        (n,) = COUNT.unpack(receive(s, COUNT.size))
        left, counted, start = n, 0, 0
        while left:
            left -= s.recv_into(buffer, min(left, CHUNK))
            if not start and left <= n * 4 // 5:
                start, counted = time.perf_counter_ns(), left
        s.sendall(ANSWER.pack(counted, time.perf_counter_ns() - start))


def request(s: socket.socket, n: int) -> tuple[float, int, int]:
    """Milliseconds until the answer came, and the answer."""
    chunk = bytes(min(n, CHUNK))
    start = time.perf_counter()
    s.sendall(COUNT.pack(n) + chunk)
    left = n - len(chunk)
    while left:
        s.sendall(chunk[:left])
        left -= min(left, CHUNK)
    counted, took = ANSWER.unpack(receive(s, ANSWER.size))
    return (time.perf_counter() - start) * 1e3, counted, took


def connect(address: str, port: int) -> socket.socket:
    for _ in range(200):
        try:
            s = socket.create_connection((address, port), timeout=20)
        except OSError:
            time.sleep(0.02)  # it does not listen yet
        else:
            s.sendall(token())
            return s
    sys.exit(f"stream.py: nothing listens at {address}:{port}")


def send(address: str, port: int, rate: int, sizes: list[int]) -> None:
    s = connect(address, port)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _, counted, took = request(s, min(rate // 8, 1 << 29) or 1 << 29)  # a second of it, half a GB at most
    round_trip = statistics.median(request(s, 1)[0] for _ in range(30))
    idle = []
    for size in sizes:
        times = []
        for _ in range(5):
            time.sleep(0.06)
            times.append(request(s, size)[0] - round_trip / 2)  # the answer's way back
        idle.append(statistics.median(times))
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as f:
        congestion = f.read().strip()
    batch = os.sched_getscheduler(0) == os.SCHED_BATCH
    found = {
        "goodput": counted * 8e9 / took,
        "round_trip": round_trip,
        "idle": idle,
        "congestion": congestion,
        "scheduler": "batch" if batch else "other",
    }
    print(json.dumps(found))


if __name__ == "__main__":
    where = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) == 3:
        serve(*where)
    else:
        send(*where, int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
