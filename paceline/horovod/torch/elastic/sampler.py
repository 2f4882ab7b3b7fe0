"""``ElasticSampler``: divides among the workers that there are now what is left of an epoch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod.runtime import rank, size


class ElasticSampler(Sampler[int]):
    """Gives each worker its part of those samples of an epoch that nobody has processed yet.

    Give it to ``TorchState``, call ``record_batch`` after each batch, and ``set_epoch`` at the end of each epoch.

    Args:
        dataset: of a size that does not change.
        shuffle: whether to shuffle, anew in each epoch.
        seed: of the shuffle, the same on all workers.

    Attributes:
        epoch: the number of the epoch.
        processed_num: how many samples of this epoch were processed, by all workers.
        num_samples: how many samples this worker gets.

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
        """Begin an epoch, of which nothing is processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take note that each worker has processed its next batch; the number of the batch has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how much of it is processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with the workers that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the workers that there are now; some samples twice, so that all get as many."""
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
