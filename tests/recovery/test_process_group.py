"""A group can be left at any moment, also while it is waited for others that will never come."""

from pathlib import Path

import pytest
from fork_server import ForkServer

from paceline.testing import run

# How workers reach each other when there is no coordinator.
COMMON = """
import os, socket, threading, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from paceline.comm.rendezvous import process_group as group
from paceline.comm.rendezvous.coordinator_store import CoordinatorStore
from paceline.comm.transport.gloo import Gloo

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
own = group.ProcessGroup(lambda *_: Gloo(same_host=False), 60.0)

class Meeting(CoordinatorStore):
    def __init__(self, generation):
        super().__init__(None, generation, 60.0)
        self._prefix = f"{generation}/"
    def set(self, key, value):
        self.written[key] = value
        store.set(self._prefix + key, value)
    def wait(self, keys, timeout=None):
        while not store.check([self._prefix + key for key in keys]):
            if self._closed:
                raise RuntimeError("left")
            time.sleep(0.001)
    def multi_get(self, keys):
        self.wait(keys)
        self.read.update({key: store.get(self._prefix + key) for key in keys})
        return [self.read[key] for key in keys]
"""

# The last worker ends when it has told its address, so that the others wait for it to connect, five times the timeout.
# The first one, which holds the store, ends after the second.
DYING = (
    COMMON
    + """
class Dying(Meeting):
    def set(self, key, value):
        super().set(key, value)
        if key.endswith("/2"):
            store.add("gone", 1)
            os.kill(os.getpid(), 9)

def until(key, number):
    while store.add(key, 0) < number:
        time.sleep(0.01)

def until_they_wait():
    until("gone", 1)
    time.sleep(1.0)

store.add("here", 1)
until("here", 3)
if rank == 2:
    own.enter(Dying(1), rank, 3)
    own.join()
own.enter(Meeting(1), rank, 3)
if os.environ["WAY"] == "in the background":
    own.join_soon()
    until_they_wait()
else:
    threading.Thread(target=lambda: (until_they_wait(), own.interrupt())).start()
    try:
        own.join()
    except RuntimeError:
        pass
own.leave()
print("left", flush=True)
store.add("left", 1)
if rank == 0:
    until("left", 2)
os._exit(0)
"""
)


@pytest.mark.parametrize("way", ["in the background", "at once"])
def test_a_group_that_never_comes_together_is_left(fork_server: ForkServer, tmp_path: Path, way: str) -> None:
    ended = run(DYING, 3, tmp_path, environment={"WAY": way}, start=fork_server.start_workers, deadline=100)
    assert [one.code for one in ended] == [0, 0, -9], [one.err for one in ended]


# The script talks to itself all the time, over old connections and new ones. In every generation each worker is told by
# a thread of its own that another was lost, at some moment between its joining and its leaving.
TALKING = (
    COMMON
    + """
server = socket.create_server(("127.0.0.1", 0))
over, broken = threading.Event(), []

def answer(one):
    with one:
        while said := one.recv(1):
            one.sendall(said)

def serve():
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

def talk(turns):
    try:
        while not over.is_set():
            with socket.create_connection(server.getsockname()) as one:
                for _ in range(turns):
                    one.sendall(b"x")
                    assert one.recv(1) == b"x", "the connection was shut down"
                    if over.wait(0.001):
                        break
    except Exception as error:
        broken.append(repr(error))

threading.Thread(target=serve, daemon=True).start()
talkers = [threading.Thread(target=talk, args=(turns,)) for turns in (1, 3, 1 << 30)]
for one in talkers:
    one.start()
for generation in range(20):
    joined = threading.Event()
    own.enter(Meeting(generation), rank, 2)

    def interrupt():
        while generation % 2 and not joined.wait(0.01) and not store.add(f"left {generation}", 0):
            pass  # the other one may have left before it was heard of: then this one is told, too
        own.interrupt()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        own.join()
    except RuntimeError:
        pass
    joined.set()
    own.leave()
    store.add(f"left {generation}", 1)
    interrupting.join()
over.set()
for one in talkers:
    one.join()
assert not broken, broken
store.add("done", 1)
while rank == 0 and store.add("done", 0) < 2:
    time.sleep(0.01)
os._exit(0)
"""
)


def test_connections_of_the_script_are_left_alone(fork_server: ForkServer, tmp_path: Path) -> None:
    ended = run(TALKING, 2, tmp_path, start=fork_server.start_workers, deadline=100)
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
