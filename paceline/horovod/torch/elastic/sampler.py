"""``ElasticSampler``: divides among the workers that there are now what is left of an epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
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
        processed_indices: the samples of this epoch that were processed, by any worker.
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
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take note that all workers have processed their batch of this number, since the last ``reset``."""
        first, last = (place * batch_size * self.num_replicas for place in (batch_idx, batch_idx + 1))
        self.processed_indices.update(self._padded[first:last])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Take note of samples that this worker has processed; others learn of them when the state is synchronized."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this worker."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what of it is processed."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with the workers that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the workers that there are now; some samples twice, so that all get as many."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [one for one in order if one not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        left = self.remaining_indices
        more = self.total_size - len(left)
        self._padded = left + (left * math.ceil(more / len(left)))[:more] if left else []
        self.indices = self._padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
