"""Horovod's interface for PyTorch. See the page "Coming from Horovod"."""

from paceline.horovod.torch import elastic
from paceline.horovod.torch.compression import Compression
from paceline.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.horovod.torch.mpi_ops import *  # noqa: F403 - all operations, under both of Horovod's paths
from paceline.horovod.torch.optimizer import DistributedOptimizer
from paceline.horovod.torch.sync_batch_norm import SyncBatchNorm
