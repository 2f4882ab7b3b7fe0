"""Runtime state from ``init`` to ``shutdown``: identity and engine of this process, global as in Horovod."""

from __future__ import annotations

import atexit
import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.rendezvous.env_init import EnvRendezvous, reason_of
from paceline.environments import env
from paceline.environments.start import LOOPBACK, Identity
from paceline.errors import StartError
from paceline.horovod.engine.engine import Engine
from paceline.horovod.engine.links import open_links
from paceline.horovod.engine.operations import Task, open_group
from paceline.horovod.engine.requests import GLOBAL, Request
from paceline.horovod.errors import HorovodInternalError, NotInitialized
from paceline.horovod.process_sets import ProcessSet, fill_in, forget
from paceline.horovod.settings import HorovodSettings, read_settings
from paceline.system.torch_internals import default_store
from paceline.training.recovery.generations import Generations

_LONGEST_TEXT = 1000  # maximum number of characters of an error message that is sent to the other workers
_SHUTDOWN = "has called shutdown"
_engine: Engine | None = None
_left: list[Engine] = []
_host = LOOPBACK
_times = 0
_all_places: list[tuple[int, int]] = []
_generations: Generations | None = None


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other workers and start the engine. Has no effect if Horovod is already initialized.

    Works under ``paceline run``, ``torchrun``, ``mpiexec`` and ``srun``. Without a launcher this is the only worker.

    Args:
        comm: None, empty, or a list of all ranks. Process sets replace communicators of some ranks.
        process_sets: process sets to add at once, or "dynamic". Process sets can be added later in any case.

    Raises:
        StartError: some workers did not connect before the timeout.
        ValueError: ``comm`` lists only some ranks, or a process set is given twice or has ranks that do not exist.
    """
    if _engine is not None:
        return
    settings = read_settings()
    if _times:
        settings = replace(settings, ignored=())  # the first init() has printed the warning
    wanted = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    while True:
        who = _elastic_identity(settings) or env.identity()
        if comm is not None and list(comm) not in ([], list(range(who.world_size))):
            raise ValueError(f"hvd.init(comm={comm!r}): give the ranks as a ProcessSet; all workers call hvd.init().")
        try:
            _begin(who, settings, wanted)
            return
        except (StartError, HorovodInternalError):
            if not _is_alarmed():
                raise


def _begin(who: Identity, settings: HorovodSettings, wanted: list[ProcessSet]) -> None:
    """Connect to the other workers, start the engine and add the process sets."""
    global _engine, _times, _all_places
    env.set_horovod_identity(who)
    if who.world_size > 1 and _generations is None:
        _meet(settings.start_seconds)
    _times += 1
    ranks = tuple(range(who.world_size))
    links = open_links(who.rank, who.world_size, _host, _store(who.world_size), settings.start_seconds, _is_alarmed)
    try:
        group = open_group(ranks, who.rank, settings.deadline_seconds) if who.world_size > 1 else None
    except RuntimeError as error:
        links.close()
        raise StartError(f"Rank {who.rank} could not reach the others in hvd.init: {reason_of(error)}.") from error
    _engine = Engine(who.rank, who.world_size, links, group, settings)
    if _generations is not None:
        _watch(_engine, _generations)
    atexit.unregister(_leave)
    atexit.register(_leave)
    try:
        _all_places = _gather_places(_engine, who)
        fill_in(_engine, wanted)
    except BaseException:
        shutdown()
        raise


def _is_alarmed() -> bool:
    return _generations is not None and _generations.alarmed


def _elastic_identity(settings: HorovodSettings) -> Identity | None:
    """Wait for the next generation and return this worker's identity in it, or None if the run is not elastic."""
    global _generations, _host
    launched = env.launch_info()
    if launched is None or not launched.elastic:
        return None
    if _generations is None:
        _generations = Generations(launched, settings.deadline_seconds)
    who = _generations.next()
    _host = _generations.address
    env.set_identity(who.rank, who.world_size, who.local_rank, who.local_world_size)
    return who


def _watch(engine: Engine, generations: Generations) -> None:
    """Interrupt the engine when a worker is lost."""
    generations.is_waiting = lambda: engine.is_waiting
    generations.on_lost = lambda: engine.interrupt("another worker was lost")
    if generations.alarmed:
        generations.on_lost()


def generations() -> Generations | None:
    """Return the generations of an elastic run, or None if the run is not elastic or ``init`` was not called."""
    return _generations


def re_form(planned: bool) -> None:
    """Shut down and initialize again, in an elastic run with its current workers.

    Args:
        planned: whether all workers call this at the same point of the script and no worker was lost.
    """
    if planned and _engine is not None and _engine.size > 1:
        with contextlib.suppress(HorovodInternalError):  # closing a connection can drop data that peers have not read
            _engine.submit(Request(GLOBAL, "re-form", "barrier"), Task([], [])).wait()
    if _engine is not None:
        _engine.interrupt("the workers form a new generation")
    if _generations is not None:
        _generations.cut()
    shutdown()
    init()


def _gather_places(engine: Engine, who: Identity) -> list[tuple[int, int]]:
    own = torch.tensor([[who.local_rank, who.local_world_size]])
    request = Request(GLOBAL, "hvd.init", "allgather", ("int64",), ((1, 2),))
    (found,) = engine.submit(request, Task([own], [None])).wait()
    return [(place, count) for place, count in found.tolist()]


def _meet(seconds: float) -> None:
    global _host
    if not dist.is_initialized():
        _host = EnvRendezvous(env.identity(), seconds).join(lambda *_: "gloo")
    else:
        _host = env.started_by().host or _host


def _store(size: int) -> Any:
    if size == 1:
        return None
    number = _times if _generations is None else _generations.number  # joining workers know the generation number, too
    return dist.distributed_c10d.PrefixStore(f"paceline/horovod/{number}", default_store())


def shutdown() -> None:
    """Disconnect from the other workers. Pending operations fail. ``init`` may be called again.

    Process sets without rank 0 continue: rank 0 negotiates for them until they have left, before its process exits.
    """
    _shut_down(_SHUTDOWN)


def _shut_down(why: str) -> None:
    global _engine
    if _engine is not None:
        _engine.close(why)
        forget()
        _left.append(_engine)
        _engine = None


def _leave() -> None:
    """Shut down at process exit. Send the peers the exception, already printed by Python, that ends the process."""
    error = getattr(sys, "last_value", None)
    lines = [] if error is None else traceback.format_exception_only(error)
    text = next((line.strip() for line in lines if not line.startswith(" ")), "")  # skip a SyntaxError's code
    text = text[:_LONGEST_TEXT].rstrip(".")
    _shut_down(f"has ended by {text}" if text else _SHUTDOWN)
    for one in _left:
        one.serve()


def engine(words: str = "") -> Engine:
    """Return the engine of this worker. ``words`` names the calling operation in the error message.

    Raises:
        NotInitialized: ``init`` was not called, or ``shutdown`` was called since.
    """
    if _engine is None:
        who = f"Rank {env.identity().rank}: " + (f"{words}: " if words else "")
        raise NotInitialized(f"{who}Horovod is not initialized: call hvd.init() first.")
    return _engine


def is_initialized() -> bool:
    """Return whether ``init`` was called without a later ``shutdown``."""
    return _engine is not None


def rank() -> int:
    """Return the rank of this worker, from 0."""
    return engine().rank


def size() -> int:
    """Return the number of workers."""
    return engine().size


def local_rank() -> int:
    """Return the rank of this worker among the workers of its machine."""
    engine()
    return env.identity().local_rank


def local_size() -> int:
    """Return the number of workers on this machine."""
    engine()
    return env.identity().local_world_size


def cross_rank() -> int:
    """Return the rank of this worker among the workers with its local rank, one on each machine."""
    return sum(place == local_rank() for place, _ in _places()[: rank()])


def cross_size() -> int:
    """Return the number of workers with this worker's local rank, one on each machine."""
    return sum(place == local_rank() for place, _ in _places())


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of workers."""
    return len({count for _, count in _places()}) == 1


def _places() -> list[tuple[int, int]]:
    """Return the local rank and local size of each worker, by rank."""
    engine()
    return _all_places


def gloo_built(verbose: bool = False) -> bool:
    """Return whether operations can use gloo, and do. Always True."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return whether operations can use MPI, or another library or device. Always False.

    GPU tensors go through the host, even where torch has NCCL, and MPI is not used even under ``mpiexec``.
    """
    return False


gloo_enabled = gloo_built
mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = mpi_built
