"""Simulated run of a coordinator, the launchers of one or several machines, and faults, from one seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from paceline.coordinator.agent import bounds_of
from paceline.coordinator.server import Coordinator, System
from paceline.coordinator.types import RunInfo
from paceline.coordinator.wire.validation import BLOCK
from paceline.environments import env
from paceline.errors import DEADLINE_PASSED, PREEMPTED, CheckpointError, PacelineError, StartError, WorkerLost
from paceline.launchers.base import Request
from paceline.system import fault_points
from simulator.drawing import History
from simulator.hub import Hub, Process
from simulator.launchers import RemoteLauncher, Slots, first_machine
from simulator.network import Link, Network, Server
from simulator.plan import Fault, Plan
from simulator.strategy import gather_parts
from simulator.worker import EVALUATES, STEPS, Disk, Worker
from simulator.world import Broken, Machines

_LONGEST = 1500.0  # virtual seconds after which a run that is not over will never end
_LATE = 10.0  # seconds of a stop or network cut after which a worker may be dropped without a replacement
_STEPS_TO_LEAVE = 2
_SIGNS = {"stop": "~", "cut": "/"}


class Simulation:
    """Simulation of a plan, which checks the invariants of the run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.history = History()
        self._hub, self._random = Hub(), Random(plan.seed + 1)
        self._network = Network(self._hub, self._random, self.reach)
        self._machines = Machines(self._hub, self._network, self._random, {}, {}, {}, {}, set())
        self._disk = Disk()
        self._workers: dict[int, Worker] = {}
        self._links: dict[int, Link] = {}
        self._codes: dict[int, int] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._points = 0
        self._failed = self._finished = False
        self._killed: set[int] = set()
        self._left: set[int] = set()  # workers whose script an exception has ended
        self._broken: list[str] = []
        self._server: Server
        self._most = sum(plan.workers) + sum(fault.kind == "join" for fault in plan.faults)

        def connect(listener: object, key: object, coordinator: Coordinator, *_: object) -> Any:
            self._server = Server(self._hub, coordinator)
            return self._server

        nodes = (1, len(plan.workers)) if len(plan.workers) > 1 else None
        here, *others = (
            Request(Path("train.py"), workers=workers, least=plan.least, most=self._most, nodes=nodes)
            for workers in plan.workers
        )
        self.coordinator = Coordinator(
            *(None, bounds_of(here), self._record, RunInfo("id", None, "train.py", "run"), plan.workers[0]),  # type: ignore[arg-type]
            system=System(connect, self._hub.clock, lambda pid: self._machines.processes[pid - 1].ended),
        )
        self._slots = Slots(plan.workers[0])
        with _surroundings(self):
            self._first = first_machine(self._hub, self, self.coordinator, here, None if others else self._slots)
            self._others = [
                RemoteLauncher(self._hub, self._network, self._server, self, request, -10 - place)
                for place, request in enumerate(others)
            ]

    def _record(self, event: str, **fields: Any) -> None:
        signs = {}
        if event == "membership":
            signs = {number: str(rank) for rank, number in enumerate(fields["workers"])}
            signs = dict.fromkeys(fields["gone"], " ") | signs
        told = {
            name: value for name, value in fields.items() if name in ("generation", "reason", "code", "text", "agent")
        }
        self._say(f"coordinator: {event} " + ", ".join(f"{name} {value}" for name, value in told.items()), signs)

    def _say(self, text: str, signs: Mapping[int, str] | None = None) -> None:
        self.history.add(self._hub.now, text, signs)

    def run(self) -> None:
        """Run the simulation to its end and check the invariants.

        Raises:
            Broken: an invariant is violated. The message names it.
        """
        with _surroundings(self):
            self._expect("time")
            self._hub.run(self._is_over)
            try:
                self._check()
            finally:
                for process in self._machines.processes.values():
                    if not process.ended:
                        process.kill()

    def _is_over(self) -> bool:
        if self._broken or self._hub.now > _LONGEST:
            return True
        return self.coordinator.over is not None and all(one.ended for one in self._machines.processes.values())

    # Operations of launchers on processes.

    def begin(self, number: int) -> None:
        self._say(f"worker {number} starts", {number: "+"})
        self._machines.processes[number] = self._hub.process(str(number), lambda: self._main(number))

    def signal(self, number: int, kill: bool) -> None:
        """Kill a worker, or ask it to leave the run if it has started and ``kill`` is false."""
        process = self._machines.processes[number]
        if process.ended:
            return
        if kill or number not in self._workers:
            self._kill(number, -9 if kill else -15)
        else:
            self._machines.leaving.add(number)
            self._workers[number].leave()

    def code_of(self, number: int) -> int | None:
        return self._codes.get(number)

    def report_of(self, launch: object, number: int) -> dict[str, Any]:
        """Return the failure report of a worker, or an empty dict if it has none."""
        return self._reports.get(number, {})

    # Process of a worker.

    def _main(self, number: int) -> None:
        process = self._machines.processes[number]
        code = 0
        try:
            self._hub.pause(self._random.uniform(0.05, 3.0))  # imports, and building of the model
            link = self._links[number] = Link(self._hub, self._network, number, process, self._server)
            about = self._machines, link, number, self._disk, self._random, self.plan.parts, self.plan.grows
            worker = self._workers[number] = Worker(*about)
            worker.run()
        except SystemExit as end:
            self._left.add(number)
            code = int(end.code or 0)
            self._workers[number].client.end_script()
        except (PacelineError, _Failure) as error:
            self._left.add(number)
            code = getattr(error, "exit_code", 1)
            report = {"type": type(error).__name__, "message": str(error), "exit_code": code, "time": self._hub.now}
            self._reports[number] = {**report, "consequence": isinstance(error, WorkerLost)}
            self._workers[number].client.end_script()
        except Exception as error:
            self._broken.append(f"worker {number}: {type(error).__name__}: {error}")
            raise
        self._end(number, code)

    def _end(self, number: int, code: int) -> None:
        """Publish the end of a process: close its connections, then let its launcher collect the exit code."""
        why = self._reports.get(number, {}).get("message", "")
        self._say(f"worker {number} ends with {code}. {why}", {number: "†" if code < 0 else "."})
        if code == 0 and not self._finished:
            self._finished = True
            self._expect("end")
        self._codes[number] = code
        if number in self._workers:
            self._workers[number].world.leave()
        if number in self._links:
            self._links[number].close()
        for launcher in (self._first, *(one.launcher for one in self._others)):
            if launcher is not None and number in launcher.running:
                self._hub.at(self._random.uniform(0.0, 0.03), launcher.collect)

    def _kill(self, number: int, code: int = -9) -> None:
        self._killed.add(number)  # also if it has just ended: its machine is lost before its exit code is reported
        if self._machines.processes[number].ended:
            return
        self._end(number, code)
        self._machines.processes[number].kill()

    # Faults.

    def reach(self, point: str, step: int) -> None:
        """Inject the faults that are due at this visit to a fault point. Other processes may run meanwhile."""
        self._points += 1
        process = self._hub.running
        assert process is not None
        for fault in self.plan.faults:
            if fault.when == "point" and fault.at == self._points:
                self._strike(fault, process, f", at {point!r} of step {step}")
        if self._random.random() < 0.3:
            self._hub.pause(self._random.uniform(0.0, 0.02))

    def _expect(self, when: str) -> None:
        for fault in self.plan.faults:
            if fault.when == when:
                self._hub.at(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault, process: Process | None = None, where: str = "") -> None:
        following = self.plan.faults[self.plan.faults.index(fault) + 1 :][:1]
        if following and following[0].when == "next":
            self._hub.at(following[0].at, lambda: self._strike(following[0]))
        running = [one for one in self._machines.processes.values() if not one.ended]
        if fault.kind == "join":
            self._slots.slots += 1
            self._say("there is room for one more worker")
        elif fault.kind in ("lose machine", "cut machine") and self._others:
            self._strike_machine(fault, self._others[fault.victim % len(self._others)])
        elif process is not None or running:
            self._strike_worker(fault, process or running[fault.victim % len(running)], where)

    def _strike_machine(self, fault: Fault, machine: RemoteLauncher) -> None:
        what = "is lost" if fault.kind == "lose machine" else f"is cut off for {fault.seconds} s"
        self._say(f"machine {1 + self._others.index(machine)} {what}")
        if fault.kind == "lose machine":
            self._hub.at(0.0, lambda: machine.lose(self._kill))  # not in a process that is itself on the machine
            if self._hub.running is not None:
                self._hub.pause(0.001)
        else:
            for number in (machine.address, *machine.running):
                self._network.cut(number, fault.seconds)

    def _strike_worker(self, fault: Fault, process: Process, where: str) -> None:
        number = int(process.name)
        lasts = f" {fault.seconds} s" if fault.kind in _SIGNS else ""
        signs = {number: _SIGNS[fault.kind]} if lasts else {}
        self._say(f"worker {number}: {fault.kind}{lasts}{where}", signs)
        if fault.kind == "stop":
            process.stopped = self._hub.now + fault.seconds
            if self._hub.running is process:
                self._hub.pause(fault.seconds)
        elif fault.kind == "cut":
            self._network.cut(number, fault.seconds)
        elif fault.kind == "leave":
            self.signal(number, kill=False)
        elif fault.kind == "fail" and self._hub.running is process and number not in self._left:
            self._failed = True
            if fault.victim % 2:
                raise SystemExit(_EXIT)
            raise _Failure("an error of the script")
        elif fault.kind == "kill":
            self._kill(number)

    # Invariants.

    def _check(self) -> None:
        if self._broken:
            raise Broken(self._broken[0])
        if self._server.refused:
            raise Broken(f"refused: {self._server.refused[0]}")
        over = self.coordinator.over
        waiting = [f"worker {number}" for number, one in self._machines.processes.items() if not one.ended]
        if over is None or waiting:
            raise Broken(f"after {self._hub.now:.0f} s the run is not over ({over}); there are still {waiting}")
        if over["code"] not in self._allowed():
            raise Broken(f"the run ended with {over['code']}: {over['reason']}")
        for number, worker in self._workers.items():
            self._check_script(number, worker)
        if over["code"] == 0 and not any(one.seen and one.seen[-1][0] == STEPS - 1 for one in self._workers.values()):
            raise Broken("nobody took the last step")

    def _allowed(self) -> set[int]:
        """Return the exit codes that the run may have. Codes other than 0 need a reason in the plan or the history."""
        members = max(map(len, self._machines.memberships.values()), default=0)
        gone = len(self._machines.leaving)
        for fault in self.plan.faults:
            if fault.kind == "lose machine" or (fault.kind in ("stop", "cut", "cut machine") and fault.seconds > _LATE):
                gone += max(self.plan.workers[1:], default=1) if "machine" in fault.kind else 1
        codes = {0}
        if gone and members - gone < self.plan.least:
            codes |= {DEADLINE_PASSED, WorkerLost.exit_code, StartError.exit_code}
        if self._finished and any(map(self._may_lack_results, self.coordinator.members[:1])):
            codes.add(WorkerLost.exit_code)
        if self.plan.sharded and (self._disk.was_empty or not self._disk.saved):
            codes.add(CheckpointError.exit_code)  # no worker has the parts of the lost workers
        if self._machines.leaving:
            codes.add(PREEMPTED)
        ended_late = self._finished and any(fault.kind in ("stop", "cut", "cut machine") for fault in self.plan.faults)
        if self._failed or ended_late:
            codes |= {1, _EXIT, WorkerLost.exit_code}
        if self._failed and all(fault.kind in ("fail", "join") for fault in self.plan.faults):
            codes = {1, _EXIT}  # the script of a member has failed, and no worker was lost
        return codes

    def _may_lack_results(self, number: int) -> bool:
        """Return whether the first member was killed before the end of its script, which may have results to write."""
        return number in self._killed and not (self.coordinator.membership.workers[number].ending and number < BLOCK)

    def _check_script(self, number: int, worker: Worker) -> None:
        """Raise Broken unless the script got each step once, with its loss.

        A worker that was dropped and returned may skip steps, and get the loss of a later step. Also check the time of
        a leave, and the evaluations.
        """
        steps = [step for step, _ in worker.seen]
        if steps != sorted(set(steps)):
            raise Broken(f"the script of worker {number} took the steps {steps}")
        returned = worker.world.was_dropped
        wrong = [(step, loss) for step, loss in worker.seen if loss < step or (loss > step and not returned)]
        if wrong:
            raise Broken(f"the script of worker {number} was given the losses {wrong}")
        if worker.left_at is not None and len(steps) - worker.left_at > _STEPS_TO_LEAVE:
            raise Broken(f"worker {number} was to leave after {worker.left_at} of its steps, and took {len(steps)}")
        if any(value != EVALUATES + 1 for value in worker.evaluated):
            raise Broken(f"the script of worker {number} got {worker.evaluated} from its evaluation")

    def launched(self) -> env.LaunchInfo:
        running = self._hub.running
        assert running is not None
        return env.LaunchInfo("", int(running.name), False, self._most, 1, running.name, b"")

    def process_id(self) -> int:
        return 1 if self._hub.running is None else int(self._hub.running.name) + 1

    def machine(self) -> str:
        return "first" if self._hub.running is None else f"machine {int(self._hub.running.name) // BLOCK}"


_EXIT = 3  # exit code of a script that ends itself


class _Failure(RuntimeError):
    """Error raised by the script."""


@contextmanager
def _surroundings(simulation: Simulation) -> Iterator[None]:
    """Patch the process-wide state that workers read, so that the running worker sees its own values."""
    with (
        mock.patch.object(env, "launch_info", simulation.launched),
        mock.patch.object(env, "set_identity", lambda *_: None),
        mock.patch.object(fault_points, "_ordered", simulation),
        mock.patch("paceline.training.position.seed_all", lambda seed: None),
        mock.patch("paceline.comm.rendezvous.coordinator_client.user_line", lambda frame: ""),
        mock.patch("paceline.training.recovery.recovery.platform", SimpleNamespace(node=simulation.machine)),
        mock.patch("paceline.training.recovery.state_shards.consolidate_state_dict", gather_parts),
        mock.patch("paceline.coordinator.agent.record_of", simulation.report_of),
        mock.patch("os.getpid", simulation.process_id),
    ):
        yield
