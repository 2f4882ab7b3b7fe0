"""Operations, under Horovod's module path.

An operation waits for all members of its process set, which must call it with the same name. Operations without a name
are numbered in the order of their calls. Functions ending in ``_async`` return a handle for ``poll`` and
``synchronize``, and functions ending in ``_`` write the result into their argument. All others are differentiable.

Operations raise :class:`HorovodInternalError` if the members' shapes, types or arguments differ, a member has left, or
the deadline has passed. If only this worker's arguments are wrong, the error is also a ``ValueError``.
"""

from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.runtime import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from paceline.horovod.torch.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from paceline.horovod.torch.coordination import (
    add_process_set,
    barrier,
    join,
    remove_process_set,
    start_timeline,
    stop_timeline,
)
from paceline.horovod.torch.gathering import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from paceline.horovod.torch.handles import poll, synchronize
from paceline.horovod.torch.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from paceline.horovod.torch.requests import Adasum, Average, Max, Min, Product, Sum
