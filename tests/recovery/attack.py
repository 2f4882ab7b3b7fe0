"""Attack what listens at an address, without a secret: ``python attack.py HOST PORT SECONDS [RECORDED]``.

Run by the tests as another user, from another network namespace. Prints what it got to hear.
"""

import encodings.idna  # noqa: F401 - its file may be out of reach of the other user
import json
import os
import random
import socket
import sys
import time

HOST, PORT, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ABOUT = {"host": "a", "pid": 1, "address": HOST, "port": 1}
FORGED = [
    {"type": "hello", "worker": 0, "about": ABOUT, "facts": {}, "fits": [], "session": 1, "hang_seconds": 0.001},
    {"type": "hello", "about": ABOUT, "facts": "text", "fits": [], "session": 1, "timeout_seconds": 1e-9},
    {"type": "ready", "progress": None, "arena": None, "leaving": True, "planned": False, "ended": [0, 1]},
    {"type": "ending"},
    {"type": "unfit"},
    {"type": "finished"},
    {"type": "agent", "workers": 1, "host": "b", "script": "train.py", "name": None, "about": {}},
    {"type": "started", "worker": 0},
    {"type": "ended", "worker": 0, "code": 0, "out_of_memory": False, "report": {}},
    {"type": "change", "generation": 1, "urgent": True, "why": "", "lost": [0]},
    {"type": "report", "worker": 0, "report": {"type": "ValueError", "message": "forged"}},
    {"type": "end", "code": 0, "reason": "forged", "save": False, "saver": None},
]
heard = b""


def send(data: bytes) -> None:
    """Send something on a new connection, and listen."""
    global heard
    try:
        with socket.create_connection((HOST, PORT), timeout=2) as connection:
            connection.settimeout(0.2)
            first = connection.recv(1 << 12)
            connection.sendall(data)
            heard += first + connection.recv(1 << 12)
    except OSError:  # it hung up before all was sent, or does not answer
        pass


os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for message in FORGED:
    line = json.dumps(message).encode() + b"\n"
    send(line)
    send(f"worker 0 {'0' * 64} {'0' * 64}\n".encode() + line)
    send(f"agent {'0' * 64} {'0' * 64}\n".encode() + line)
send(b"[" * 200_000 + b"\n")
send(b"\x00\xff" * 100)
send((1 << 30).to_bytes(8, "little"))
send(f"Content-Length: {1 << 30}\r\n\r\n".encode())
for number in range(50):
    send(random.Random(number).randbytes(number * 20))
try:
    with socket.create_connection((HOST, PORT), timeout=10) as connection:
        for _ in range(1 << 10):  # a gigabyte without an end of a line
            connection.sendall(b"x" * (1 << 20))
except OSError:
    pass
idle = []
for _ in range(1000):
    try:
        idle.append(socket.create_connection((HOST, PORT), timeout=10))
    except OSError:
        break
print(f"idle {len(idle)}", flush=True)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    try:
        with socket.create_connection((HOST, PORT), timeout=2) as connection:
            while time.monotonic() < end:
                connection.sendall(b"{")
                time.sleep(0.05)
    except OSError:
        time.sleep(0.05)
words = {word for line in heard.splitlines() for word in line.split() if len(word) != 64}
print("words", sorted(word.decode("ascii", "replace") for word in words), flush=True)
