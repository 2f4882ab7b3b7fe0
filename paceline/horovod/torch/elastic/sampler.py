"""``ElasticSampler``: division of an epoch's remaining samples among the current workers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod.runtime import rank, size


class ElasticSampler(Sampler[int]):
    """Sampler of this worker's share of the samples that no worker has processed in the epoch.

    Pass it to ``TorchState``, call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch.

    Args:
        dataset: data set of constant size.
        shuffle: whether to shuffle differently in each epoch. Defaults to True.
        seed: seed of the shuffle, which must be the same on all workers. Defaults to 0.

    Attributes:
        epoch: number of the epoch.
        processed_num: number of samples of this epoch that all workers together have processed.
        num_samples: number of samples for this worker.

    Example:
        >>> import paceline.horovod.torch as hvd
        >>> hvd.init()
        >>> sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
        >>> sampler.record_batch(0, batch_size=2)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3, 4, 5]
        >>> hvd.shutdown()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with no processed samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each worker has processed a batch of this size. ``batch_idx`` has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, and divide the remaining samples among the current workers."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current workers, repeating some to give all the same number."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = list(itertools.islice(itertools.cycle(self.remaining_indices), self.total_size))
        self.indices = padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
