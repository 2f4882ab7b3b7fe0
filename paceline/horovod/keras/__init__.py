"""Horovod's interface for Keras 3 on the torch back end. See the page "Coming from Horovod".

::

    import paceline.horovod.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")
    model.fit(inputs, targets, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from paceline.horovod.keras import callbacks
from paceline.horovod.keras.functions import allgather, allreduce, broadcast, broadcast_global_variables, load_model
from paceline.horovod.keras.optimizer import DistributedOptimizer
from paceline.horovod.torch import (
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    ProcessSet,
    Sum,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rank,
    shutdown,
    size,
)
