"""``paceline run``: train with a script on many workers, show the progress, and report the cause of a failure."""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    BEFORE_SCRIPT,
    Arguments,
    MachineOptions,
    Plan,
    Script,
    Set,
    chosen_place,
    misplaced,
    not_resumed,
    number_range,
    place_of_discovered,
    takes,
)
from paceline.cli.report import alerts_of, hint_of, report, say, summary
from paceline.environments import env
from paceline.errors import EXIT_CODES, PREEMPTED, ConfigError
from paceline.launchers import early
from paceline.launchers.base import HOST, Launch, Request, pays_preload

if TYPE_CHECKING:
    from paceline.coordinator.machines import Rendezvous
    from paceline.coordinator.server import Coordinator
    from paceline.launchers.clusters.base import Options
    from paceline.launchers.clusters.discovery import SlotsHere
    from paceline.system.secret import Secret, Shared

CONTEXT = BEFORE_SCRIPT
MORE_HELP = f""" Options go before the script; all that follows it is passed to the script.

Exit code: {", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())}.
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """Options of ``paceline run``."""

    script: Script
    arguments: Arguments = None
    set_: Set = None
    resume: Annotated[
        str | None, typer.Option(help="auto: from the newest checkpoint if there is one; or the path of a checkpoint.")
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="script-date-time")] = None
    plan: Plan = None
    port: Annotated[int | None, typer.Option(help="Port where the workers meet.", show_default="a free one")] = None
    elastic: Annotated[
        str | None,
        typer.Option(
            help="Fewest and most workers, as in 2:8; the run continues when a worker is lost.", metavar="MIN:MAX"
        ),
    ] = None
    standby: Annotated[int, typer.Option(help="Workers that wait, ready to replace lost workers.")] = 0
    patience: Annotated[float, typer.Option(help="Seconds to wait for workers, or machines, below the fewest.")] = 600.0
    grace: Annotated[float, typer.Option(help="Seconds after a signal to finish the step and save a checkpoint.")] = (
        25.0
    )
    alert: Annotated[
        list[str] | None,
        typer.Option(help="Tell when a condition such as 'stalled > 60s' holds; may be repeated.", metavar="CONDITION"),
    ] = None
    notify: Annotated[
        str | None,
        typer.Option(help="Program that gets each alert, or URL that gets it by a POST.", metavar="COMMAND|URL"),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Show alerts, but no progress.")] = False
    time: Annotated[str | None, typer.Option(help="slurm: the time limit, as in 2:00:00.")] = None
    partition: Annotated[str | None, typer.Option(help="slurm: the partition.")] = None
    account: Annotated[str | None, typer.Option(help="slurm: the account.")] = None
    image: Annotated[str | None, typer.Option(help="kubernetes: the image of the container.")] = None
    namespace: Annotated[str | None, typer.Option(help="kubernetes: the namespace.")] = None
    kind: Annotated[str | None, typer.Option(help="kubernetes: job, jobset or trainjob.")] = None
    volume: Annotated[
        str | None, typer.Option(help="kubernetes: a PersistentVolumeClaim for the run directories.", metavar="CLAIM")
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="slurm, kubernetes: submit, and do not wait.")] = False
    host_discovery_script: Annotated[
        Path | None,
        typer.Option(help="Program that prints HOST:WORKERS, run once a second; workers are added.", metavar="FILE"),
    ] = None
    horovod: Annotated[
        bool, typer.Option("--horovod", help="Let `import horovod` find Paceline's, if Horovod is not installed.")
    ] = False
    no_preload: Annotated[
        bool, typer.Option("--no-preload", help="Start each worker as a new Python; by default all are forks of one.")
    ] = False
    launcher: Annotated[str, typer.Option(hidden=True)] = "local"

    @property
    def elsewhere(self) -> bool:
        """Whether workers may start on other machines, or in an environment that is not known yet."""
        other = self.hosts or self.hostfile or self.host_discovery_script or self.on not in (None, "local")
        return bool(other or self.plan or self.horovod or self.dry_run)


@takes(RunOptions)
@early.ending()
def command(given: RunOptions) -> None:
    """Run a training script on many workers."""
    workers = 1 if given.workers is None else given.workers
    if not (given.no_preload or given.elsewhere) and pays_preload(workers, given.standby, given.elastic):
        early.begin(given.launcher, given.script, given.arguments or (), workers, given.set_ or ())
    from paceline import config
    from paceline.cli.display import alerts
    from paceline.launchers.clusters.registry import LOCAL

    planned = config.saved_plan(given.plan, given.script)
    alerts.check(given.alert or (), given.notify)
    settings = config.parse_command_line(given.set_ or [])
    if given.resume is not None:
        settings["resume"] = given.resume
    options, discovery = given.of_cluster(), given.host_discovery_script
    place = chosen_place(given.on, options, given.rendezvous, given.quiet)
    if discovery is not None:
        place = place_of_discovered(discovery, place, given.elastic, given.nodes, options)
    several = place != LOCAL or given.nodes is not None
    if planned is not None and given.workers is None:
        workers = -(-planned.workers // planned.machines) if several else planned.workers
        if planned.machines > 1 and not several and not given.quiet:
            say(
                f"note: {given.plan} is for {planned.machines} machines, and all of its {workers} workers start on "
                f"this one. Give --hosts, or --on."
            )
    least, most = bounds(given.elastic, workers, given.standby, several)
    request = Request(
        script=given.script,
        arguments=tuple(given.arguments or ()),
        workers=workers,
        settings=settings,
        plan=given.plan,
        runs=given.runs_dir,
        name=given.name,
        port=given.port,
        least=least,
        most=most,
        standby=given.standby,
        patience_seconds=given.patience,
        grace_seconds=given.grace,
        nodes=given.machines(place == LOCAL),
        rendezvous=given.rendezvous,
        secret_file=given.secret_file,
        launcher=given.launcher,
        preload=not given.no_preload,
        horovod=given.horovod,
        discovery=discovery,
        alerts=(*(given.alert or ()), *alerts.predicted(planned, workers)),
        notify=given.notify,
        environment=_for_horovod(given.quiet) if given.horovod else {},
    )
    if place != LOCAL or given.dry_run:
        raise typer.Exit(train_on(place, request, options, given.dry_run))
    if (hint := misplaced(request)) and not given.quiet:
        say(hint)
    code = train(request, quiet=given.quiet)
    if file := env.path(env.EXIT_CODE_FILE):
        with contextlib.suppress(OSError):  # the folder is on another machine
            file.write_text(str(code))
    raise typer.Exit(code)


def train_on(name: str, request: Request, options: Options, dry_run: bool) -> int:
    """Train on a cluster, or print what would be started on it. Return the exit code."""
    from paceline.cli.display.alerts import shown
    from paceline.launchers.clusters.base import given_options
    from paceline.launchers.clusters.registry import LOCAL, place_named
    from paceline.launchers.prepare import check, known_settings

    check(request)
    known_settings(request)
    if name == LOCAL:
        print(
            f"on this machine: {request.workers} x {sys.executable} -u {request.script} {shlex.join(request.arguments)}"
        )
        return 0
    kept = {key: text for key, text in request.settings.items() if key != "resume"}
    once = replace(request, name=None, settings=kept, notify=request.notify and shown(request.notify))
    place = place_named(name)()
    placement = place.decide(request, options, env.inherited())
    if dry_run:
        print(placement.text)
        return 0
    by = {env.USER_COMMAND: shlex.join(["paceline", "run", "--on", name, *options.words(), *given_options(once)])}
    agents = tuple(replace(one, environment={**one.environment, **by}) for one in placement.agents)
    return place.carry_out(replace(placement, agents=agents), request)


def _for_horovod(quiet: bool) -> dict[str, str]:
    """Return variables with which workers import Paceline's ``horovod``, or an empty dict if Horovod is installed."""
    from paceline.horovod.unchanged import FOLDER, is_installed

    if not is_installed():
        return env.python_path_with(FOLDER)
    if not quiet:
        say("note: Horovod is installed, so --horovod has no effect, and scripts use that one.")
    return {}


def bounds(elastic: str | None, workers: int, standby: int, several: bool) -> tuple[int | None, int | None]:
    """Parse ``--elastic MIN:MAX``. With ``--standby`` alone, on one machine, both bounds are the number of workers."""
    from paceline.config import quoted

    if standby < 0:
        raise ConfigError(f"--standby {standby}: the number of waiting workers cannot be negative.")
    if elastic is None:
        return (workers, workers) if standby and not several else (None, None)
    first, colon, last = elastic.partition(":")
    if not colon or (found := number_range(first, last)) is None:
        raise ConfigError(f"--elastic {quoted(elastic)}: give the fewest and the most workers, as in --elastic 2:8.")
    least, most = found
    if workers > most or (workers < least and not several):
        raise ConfigError(f"--elastic {elastic}: the number of workers to start with, {workers}, is out of range.")
    return least, most


def train(request: Request, quiet: bool = False, closing: bool = True) -> int:
    """Start the workers, show their progress until they end, and report a failure. Return the exit code."""
    from paceline.cli.display.alerts import check_command
    from paceline.coordinator import machines
    from paceline.coordinator.wire.messages import listen
    from paceline.launchers.local.child import end_with_parent
    from paceline.launchers.prepare import check, prepare
    from paceline.system import secret

    check(request)
    if request.rendezvous is None and not quiet and (hint := not_resumed(request)):
        say(hint)
    if env.text(env.END_WITH_PARENT):
        end_with_parent()
    if request.rendezvous is None:
        listener, known = listen((HOST, request.port or 0)), secret.make()
    else:
        in_pod = env.text("JOB_COMPLETION_INDEX") is not None  # its name resolves only after the pod has started
        where = machines.parse_rendezvous(request.rendezvous, request.patience_seconds if in_pod else 0.0)
        shared = machines.shared_secret(where, request.secret_file)
        found = machines.listen_if_here(where)
        if found is None and request.workers == 0:
            raise ConfigError(
                f"--workers 0 is for the machine that holds the coordinator, and {where.address}:{where.port} is not "
                f"of this one, or in use."
            )
        if found is None:
            return _join(request, where, shared)
        listener, known = found, None
    with listener:
        check_command(request.notify)
        run_secret = known or shared.read_or_make()
        with prepare(request, machines.interface_of(listener.getsockname()[0])) as launch:
            return _coordinate(request, launch, listener, run_secret, quiet, closing)


def _join(request: Request, where: Rendezvous, shared: Shared) -> int:
    """Join the run on another machine with this machine's workers, and rejoin if its coordinator comes back."""
    from paceline.coordinator.agent import RemoteAgent
    from paceline.coordinator.machines import Applicant, interface_of, join
    from paceline.diagnostics.doctor import start
    from paceline.launchers.prepare import prepare
    from paceline.launchers.workers import Workers

    own = Applicant(request.workers, request.script.name, request.name, start.about(request.script))
    while True:
        client, secret = join(where, own, shared, request.patience_seconds)
        settings = {**request.settings, **({"resume": client.resume} if client.resume else {})}
        mine = replace(request, first=client.first, name=client.name, settings=settings)
        try:
            with prepare(mine, interface_of(client.address)) as prepared:
                launch = replace(prepared, coordinator=client.coordinator, secret=secret.of_run(client.id))
            with Workers(launch, client.show, RemoteAgent(launch, mine, client), say) as workers:
                result = workers.wait()
            left = result.signal is not None or all(one.code == PREEMPTED for one in result.exits)
            failed = all(one.code != 0 for one in result.exits)
            if not left:
                client.await_end(or_refusal=failed)
            failed &= client.not_joined
        finally:
            client.close()
        if failed:  # the run continues without these workers
            exits = tuple(replace(one, tolerated=False) for one in result.exits)
            return report(launch, replace(result, exits=exits), None)
        if client.over is not None:
            say(f"the run {client.name} is over: {client.over['reason']}")
            return int(client.over["code"])
        if left:
            return report(launch, result, None)
        say(f"lost the run at {where}; waiting for it to come back")


def _discovery(script: Path | None, coordinator: Coordinator) -> SlotsHere | None:
    """Return the discovery script as the source of this machine's number of workers, or None without a script."""
    from paceline.launchers.clusters.discovery import SlotsHere

    return None if script is None else SlotsHere(script, lambda: coordinator.over is not None)


def _coordinate(
    request: Request, launch: Launch, listener: socket.socket, secret: Secret, quiet: bool, closing: bool
) -> int:
    """Run the coordinator, and train with workers of this machine and of machines that join."""
    import secrets

    from paceline.cli.display.alerts import Watch
    from paceline.cli.display.progress import display
    from paceline.coordinator.agent import CoordinatorAgent, bounds_of
    from paceline.coordinator.failure.message import shown_path
    from paceline.coordinator.server import Coordinator
    from paceline.coordinator.types import RunInfo
    from paceline.diagnostics.doctor import start
    from paceline.events import EventLog
    from paceline.launchers.output import Relay
    from paceline.launchers.workers import Workers
    from paceline.observe.why.at_end import last_line

    log = EventLog(launch.run / "events", "launcher")
    compared = partial(start.differences, start.about(request.script) if request.nodes else {})
    run = RunInfo(secrets.token_hex(16), secret, request.script.name, launch.run.name, request.resume, compared)
    relay = Relay()
    coordinator = Coordinator(listener, bounds_of(request), log.mark, run, request.workers, relay.put)
    launch = replace(launch, coordinator="{}:{}".format(*listener.getsockname()), secret=secret.of_run(run.id))
    alerts = alerts_of(coordinator.monitor, launch, request.elastic, quiet)
    shown = display(launch.run / "events" / "rank-0.jsonl", quiet, alerts)
    agent = CoordinatorAgent(launch, request, coordinator, _discovery(request.discovery, coordinator))
    shown.starting(0 if request.horovod else request.workers)  # hvd.init does not report a start
    for _ in range(request.workers):
        coordinator.announce_start()
    with contextlib.closing(log), Watch(launch.run, request.alerts, request.notify, log, shown.tell) as watch:
        try:
            with Workers(launch, shown.relay, agent, shown.tell) as workers, shown, relay.to(shown.show):
                result = workers.wait()
                coordinator.wait_for_agents()
        finally:
            coordinator.close()
        coordinator_report = coordinator.report(request.elastic)
        code = report(launch, result, request, coordinator_report, seen=agent.shown())
        watch.end(code)
    if code == 0 and closing and not quiet:
        hint = hint_of(launch, request, coordinator_report, shown.printed)
        for line in filter(None, (hint, summary(coordinator_report), last_line(launch.run))):
            say(line)
        say(f"done in {result.seconds:.1f} s; output and checkpoints: {shown_path(launch.run)}")
    return code
