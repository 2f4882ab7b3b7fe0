"""A group can be left at any moment, also while it is waited for others that will never come."""

from pathlib import Path

import pytest
from fork_server import ForkServer

from paceline.testing import run

# The last worker ends when it has told its address, so that the others wait for it to connect, five times the timeout.
# The first one, which holds the store, ends after the second.
SCRIPT = """
import os, threading, time
from datetime import timedelta
from torch import device
from torch._C._distributed_c10d import TCPStore
import torch.distributed as dist
from paceline.comm.rendezvous import process_group as group

class Dying(dist.Store):
    def __init__(self, store):
        super().__init__()
        self._store = store
    def set(self, key, value):
        self._store.set(key, value)
        if key.endswith("/2"):
            store.add("gone", 1)
            os.kill(os.getpid(), 9)
    def get(self, key):
        return self._store.get(key)
    def add(self, key, value):
        return self._store.add(key, value)
    def wait(self, keys, *seconds):
        return self._store.wait(keys, *seconds)

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
own = group.ProcessGroup(device("cpu"), 60.0)

def until(key, number):
    while store.add(key, 0) < number:
        time.sleep(0.01)

def until_they_wait():
    until("gone", 1)
    time.sleep(1.0)

store.add("here", 1)
until("here", 3)
if rank == 2:
    before = group.PrefixStore
    group.PrefixStore = lambda prefix, store: Dying(before(prefix, store))
    own.join(("127.0.0.1", port), rank, 3, 1)
if os.environ["WAY"] == "in the background":
    own.join_soon(("127.0.0.1", port), rank, 3, 1)
    until_they_wait()
else:
    threading.Thread(target=lambda: (until_they_wait(), own.interrupt())).start()
    try:
        own.join(("127.0.0.1", port), rank, 3, 1)
    except RuntimeError:
        pass
own.leave()
print("left", flush=True)
store.add("left", 1)
if rank == 0:
    until("left", 2)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["in the background", "at once"])
def test_a_group_that_never_comes_together_is_left(fork_server: ForkServer, tmp_path: Path, way: str) -> None:
    ended = run(SCRIPT, 3, tmp_path, environment={"WAY": way}, start=fork_server.start_workers, deadline=100)
    assert [one.code for one in ended] == [0, 0, -9], [one.err for one in ended]
