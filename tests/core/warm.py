"""Workers forked from a process that has imported torch already: a start takes 0.05 s instead of 3 s.

Each is a process of its own with its own exit code, environment and output; the script is its main module.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.testing.ranks import Worker

# A line of JSON comes in: the workers to start. Then a line goes out for each: its id; later, its place and exit code.
PARENT = """
import atexit, importlib, json, os, signal, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
print("ready", flush=True)
running = {}
for line in iter(sys.stdin.readline, ""):
    for place, worker in enumerate(json.loads(line)):
        child = os.fork()
        if child == 0:
            os.environ.clear()
            os.environ.update(worker["environment"])
            for stream, file in enumerate(("/dev/null", worker["out"], worker["err"])):
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if stream else os.O_RDWR
                os.dup2(os.open(file, flags, 0o600), stream)
            sys.stdout.reconfigure(line_buffering=True)
            break
        running[child] = place
        print(child, flush=True)
    else:
        while running:
            child, status = os.wait()
            print(running.pop(child), os.waitstatus_to_exitcode(status), flush=True)
        continue
    break
else:
    sys.exit()
sys.argv = [worker["script"]]
__file__ = worker["script"]
sys.path.insert(0, os.path.dirname(__file__))
code = 0
try:
    exec(compile(open(__file__).read(), __file__, "exec"), globals())
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException as error:
    sys.excepthook(*sys.exc_info())
    code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
finally:  # all that Python does at the end but for taking all modules apart, which copies their memory for seconds
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
"""


class Warm:
    """The process that has imported torch; used as a context."""

    def __enter__(self) -> Warm:
        package = Path(__file__).resolve().parents[2]
        environment = os.environ | {
            "PYTHONPATH": f"{package}:{Path(__file__).resolve().parent}",
            "OMP_NUM_THREADS": "1",
        }
        modules = ("torch._dynamo", "torch.distributed.checkpoint", "paceline.session", "subjects")
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()

    def start(self, workers: list[Worker]) -> list[Forked]:
        """Start them all; the workers before must have ended."""
        told: list[dict[str, Any]] = [
            {
                "environment": worker.environment,
                "script": str(worker.script),
                "out": str(worker.out),
                "err": str(worker.err),
            }
            for worker in workers
        ]
        for worker in workers:
            worker.out.touch()
            worker.err.touch()
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(told) + "\n")
        self._parent.stdin.flush()
        crew = Crew(self._parent.stdout.fileno())
        pids = [int(crew.line()) for _ in workers]
        return [Forked(crew, place, pid) for place, pid in enumerate(pids)]

    def _line(self) -> str:
        assert self._parent.stdout is not None
        return _read_line(self._parent.stdout.fileno())


def _read_line(stream: int) -> str:
    """One line without reading ahead."""
    read = b""
    while not read.endswith(b"\n"):
        byte = os.read(stream, 1)
        assert byte, "the process that starts workers has ended"
        read += byte
    return read.decode().strip()


class Crew:
    """The workers that were started together."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.codes: dict[int, int] = {}

    def line(self) -> str:
        return _read_line(self._stream)

    def look(self, wait: bool = False) -> None:
        """Take in one report that a worker has ended, if there is one."""
        import select

        if wait or select.select([self._stream], [], [], 0)[0]:
            place, code = self.line().split()
            self.codes[int(place)] = int(code)


class Forked:
    """One of the workers, in the manner of ``subprocess.Popen``."""

    def __init__(self, crew: Crew, place: int, pid: int) -> None:
        self._crew = crew
        self._place = place
        self._pid = pid

    def poll(self) -> int | None:
        if self._place not in self._crew.codes:
            self._crew.look()
        return self._crew.codes.get(self._place)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.Signals(number))

    def wait(self) -> int:
        while self._place not in self._crew.codes:
            self._crew.look(wait=True)
        return self._crew.codes[self._place]
