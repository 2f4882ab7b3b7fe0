"""From ``init`` to ``shutdown``: who this worker is, and its engine. One for each process, as in Horovod."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.comm.rendezvous.env_init import EnvRendezvous
from paceline.engines.start import LOOPBACK, Identity
from paceline.horovod.engine import Engine
from paceline.horovod.errors import NotInitialized
from paceline.horovod.links import open_links
from paceline.horovod.operations import Task, open_group
from paceline.horovod.process_sets import ProcessSet, fill_in, forget
from paceline.horovod.requests import GLOBAL, Request
from paceline.horovod.settings import read_settings

_engine: Engine | None = None
_left: list[Engine] = []
_host = LOOPBACK
_times = 0
_all_places: list[tuple[int, int]] = []


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
    global _engine, _times, _all_places
    if _engine is not None:
        return
    who, settings = env.identity(), read_settings()
    if comm is not None and list(comm) not in ([], list(range(who.world_size))):
        raise ValueError(f"hvd.init(comm={comm!r}): give the ranks as a ProcessSet; all workers call hvd.init().")
    wanted = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    env.set_horovod_identity(who)
    if who.world_size > 1:
        _meet(settings.start_seconds)
    _times += 1
    ranks = tuple(range(who.world_size))
    links = open_links(who.rank, who.world_size, _host, _store(who.world_size), settings.start_seconds)
    group = open_group(ranks, who.rank, settings.deadline_seconds) if who.world_size > 1 else None
    _engine = Engine(who.rank, who.world_size, links, group, settings)
    atexit.unregister(_leave)
    atexit.register(_leave)
    try:
        _all_places = _gather_places(_engine, who)
        fill_in(_engine, wanted)
    except BaseException:
        shutdown()
        raise


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
    return c10d.PrefixStore(f"paceline/horovod/{_times}", c10d._get_default_store())


def shutdown() -> None:
    """Leave the other workers; what is under way fails. ``init`` may follow.

    Process sets without rank 0 go on: it keeps their table until they have left, at the end of its process at least.
    """
    global _engine
    if _engine is not None:
        _engine.close()
        forget(_engine)
        _left.append(_engine)
        _engine = None


def _leave() -> None:
    """At the end of the process."""
    shutdown()
    for one in _left:
        one.serve()


def engine() -> Engine:
    """What carries out the operations of this worker.

    Raises:
        NotInitialized: ``init`` was not called.
    """
    if _engine is None:
        raise NotInitialized("Horovod is not initialized: call hvd.init() first.")
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
