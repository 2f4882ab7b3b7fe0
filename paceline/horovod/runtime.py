"""From ``init`` to ``shutdown``: who this worker is, and its engine. One for each process, as in Horovod."""

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
from paceline.training.recovery.generations import Generations

_LONGEST_TEXT = 1000
"""Characters of an error that the others are told."""
_SHUTDOWN = "has called shutdown"
_engine: Engine | None = None
_left: list[Engine] = []
_host = LOOPBACK
_times = 0
_all_places: list[tuple[int, int]] = []
_generations: Generations | None = None


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Come together with the other workers; a second call does nothing.

    Works under ``paceline run``, ``torchrun``, ``mpiexec`` and ``srun``; without any of them this is the only worker.

    Args:
        comm: must be None or empty, or list all ranks: process sets do what a communicator of some ranks did.
        process_sets: to be made at once; or "dynamic", which is always possible here.

    Raises:
        StartError: not all workers came.
        ValueError: a process set is given twice, or has ranks that there are not.
    """
    if _engine is not None:
        return
    settings = read_settings()
    if _times:
        settings = replace(settings, ignored=())  # it has been said
    wanted = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    while True:
        who = _elastic_identity(settings) or env.identity()
        if comm is not None and list(comm) not in ([], list(range(who.world_size))):
            raise ValueError(f"hvd.init(comm={comm!r}): give the ranks as a ProcessSet; all workers call hvd.init().")
        try:
            _begin(who, settings, wanted)
            return
        except (StartError, HorovodInternalError):
            if _generations is None or not _generations.alarmed:
                raise


def _begin(who: Identity, settings: HorovodSettings, wanted: list[ProcessSet]) -> None:
    """Connect to the other workers, and start the engine."""
    global _engine, _times, _all_places
    env.set_horovod_identity(who)
    if who.world_size > 1 and _generations is None:
        _meet(settings.start_seconds)
    _times += 1
    ranks = tuple(range(who.world_size))
    links = open_links(who.rank, who.world_size, _host, _store(who.world_size), settings.start_seconds, _is_cut_short)
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


def _is_cut_short() -> bool:
    return _generations is not None and _generations.alarmed


def _elastic_identity(settings: HorovodSettings) -> Identity | None:
    """Who this worker is in the next generation of an elastic run; None if the run is none."""
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
    """Let the loss of a worker end the operations of an engine."""
    generations.is_waiting = lambda: engine.is_waiting
    generations.on_lost = lambda: engine.interrupt("another worker was lost")
    if generations.alarmed:
        generations.on_lost()


def generations() -> Generations | None:
    """The generations of an elastic run; None if the run is none, or ``init`` was not called."""
    return _generations


def re_form(planned: bool) -> None:
    """Come together anew, in an elastic run with the workers that there are now.

    Args:
        planned: whether all workers do so at the same place of the script, and none was lost.
    """
    if planned and _engine is not None and _engine.size > 1:
        with contextlib.suppress(HorovodInternalError):  # a closed connection may take with it what others have to read
            _engine.submit(Request(GLOBAL, "re-form", "barrier"), Task([], [])).wait()
    if _engine is not None:
        _engine.interrupt("the workers come together anew")
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
    c10d = dist.distributed_c10d
    number = _times if _generations is None else _generations.number  # which those that join know, too
    return c10d.PrefixStore(f"paceline/horovod/{number}", c10d._get_default_store())


def shutdown() -> None:
    """Leave the other workers; what is under way fails. ``init`` may follow.

    Process sets without rank 0 go on: it keeps their table until they have left, at the end of its process at least.
    """
    _shut_down(_SHUTDOWN)


def _shut_down(why: str) -> None:
    global _engine
    if _engine is not None:
        _engine.close(why)
        forget(_engine)
        _left.append(_engine)
        _engine = None


def _leave() -> None:
    """At the end of the process; Python has printed the exception that ends it, if one does."""
    error = getattr(sys, "last_value", None)
    lines = [] if error is None else traceback.format_exception_only(error)
    text = next((line.strip() for line in lines if not line.startswith(" ")), "")  # of a SyntaxError no code
    text = text[:_LONGEST_TEXT].rstrip(".")
    _shut_down(f"has ended by {text}" if text else _SHUTDOWN)
    for one in _left:
        one.serve()


def engine(words: str = "") -> Engine:
    """What carries out the operations of this worker, one of which the words call.

    Raises:
        NotInitialized: ``init`` was not called.
    """
    if _engine is None:
        who = f"Rank {env.identity().rank}: " + (f"{words}: " if words else "")
        raise NotInitialized(f"{who}Horovod is not initialized: call hvd.init() first.")
    return _engine


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not."""
    return _engine is not None


def rank() -> int:
    """The number of this worker, from 0."""
    return engine().rank


def size() -> int:
    """The number of workers."""
    return engine().size


def local_rank() -> int:
    """The number of this worker among those of its machine."""
    engine()
    return env.identity().local_rank


def local_size() -> int:
    """The number of workers on this machine."""
    engine()
    return env.identity().local_world_size


def cross_rank() -> int:
    """The number of this worker among those of its local rank, one of each machine."""
    return sum(place == local_rank() for place, _ in _places()[: rank()])


def cross_size() -> int:
    """The number of workers that have the local rank of this one, one of each machine."""
    return sum(place == local_rank() for place, _ in _places())


def is_homogeneous() -> bool:
    """Whether all machines have as many workers."""
    return len({count for _, count in _places()}) == 1


def _places() -> list[tuple[int, int]]:
    """The local rank and the local size of each worker."""
    engine()
    return _all_places


def gloo_built() -> bool:
    """Whether operations can go over gloo: they do."""
    return True


def gloo_enabled() -> bool:
    """Whether operations go over gloo: they do."""
    return True


def mpi_built() -> bool:
    """Whether operations can go over MPI: they cannot, also under ``mpiexec``."""
    return False


def mpi_enabled() -> bool:
    """Whether operations go over MPI: they do not."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI could be called from several threads: it is not used."""
    return False


def nccl_built() -> int:
    """The version of NCCL that operations go over; 0: tensors of GPUs go through the host."""
    return 0


def ddl_built() -> bool:
    """Whether operations can go over DDL of IBM: they cannot."""
    return False


def ccl_built() -> bool:
    """Whether operations can go over oneCCL: they cannot."""
    return False


def cuda_built() -> bool:
    """Whether operations stay on CUDA devices: they do not."""
    return False


def rocm_built() -> bool:
    """Whether operations stay on ROCm devices: they do not."""
    return False
