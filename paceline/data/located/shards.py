"""Shards of the training data that this machine has. The shards of all workers together are the data set."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple, get_args

from torch.utils.data import Dataset

from paceline.comm.values import sendable
from paceline.data.comparison import compared, digest_of
from paceline.data.keys import SAMPLE, preserve_generators, seed_all, seed_of
from paceline.data.nested import leaves_in
from paceline.data.streams.reader import is_stream
from paceline.data.tables.parquet import ParquetDataset
from paceline.errors import InputError
from paceline.system.user_code import in_user_call

Move = Literal["never", "samples", "auto"]
Lost = Literal["stop", "leave out"]


@sendable
class ShardFacts(NamedTuple):
    """Values of a shard that are equal on all machines that have it, and in a resumed run."""

    length: int | None  # None of a stream
    digest: str  # of the first, the last, up to 6 samples between them (``comparison.digest_of``) and Parquet footers
    bits: str  # of every bit of these samples
    bytes: int = 0  # most bytes of one of these samples


class Located(Dataset[Any]):
    """Shards of the training data that this machine has, by name.

    The shards of all workers together are the data set. A shard may be on several machines, under one name. A worker
    computes microbatches whose samples its machine has. ``len()`` counts the samples given here.

    Args:
        shards: data sets with a length and items by number, or streams, by the names of the shards. Unless
            ``move="never"``, a worker may have none.
        move: ``"never"`` if no sample may be sent to another worker, ``"samples"`` to send as many as give all workers
            an even share of each batch, or ``"auto"`` to try this and keep it if steps take less time. The same on all
            workers. Defaults to ``"never"``.
        wait_seconds: time for which a run under ``paceline run --elastic`` waits for a worker with a shard that no
            worker has any more. The same on all workers. Defaults to 0.
        lost: whether the run then stops, or continues without the microbatches of the shard, with ``"leave out"``. The
            same on all workers. Defaults to ``"stop"``.

    Raises:
        InputError: there is no shard, a name is not a text, or another argument has a wrong value.
    """

    def __init__(
        self, shards: Mapping[str, Any], move: Move = "never", wait_seconds: float = 0.0, lost: Lost = "stop"
    ) -> None:
        if move not in get_args(Move):
            raise InputError(
                f"Located(..., move={move!r}) is unknown: give 'never', 'samples' to send samples to workers that have "
                f"too few, or 'auto' to do so if it is faster."
            )
        if lost not in get_args(Lost):
            raise InputError(
                f"Located(..., lost={lost!r}) is unknown: give 'stop', or 'leave out' to continue without a shard that "
                f"no worker still has."
            )
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds < math.inf:
            raise InputError(f"Located(..., wait_seconds={wait_seconds!r}) is not a number of seconds from 0.")
        known = isinstance(shards, Mapping)
        few = not shards and move == "never"
        if not known or few or not all(isinstance(name, str) and name for name in shards):
            given = f"the names {', '.join(map(repr, shards)) or 'of no shard'}" if known else f"{shards!r:.100}"
            raise InputError(
                f"Located takes the shards that this machine has by name, such as Located({{'shard-3': data_set}}), "
                f"but it got {given}. A worker computes only samples of its own shards, so leave machines without "
                f"shards out of the run, or let others send samples to them by move='samples'."
            )
        self.move, self.wait_seconds, self.lost = move, float(wait_seconds), lost
        self.shards = dict(sorted(shards.items()))
        lengths = {}
        for name, shard in self.shards.items():
            if isinstance(shard, Sized) and hasattr(shard, "__getitem__") and not is_stream(shard):
                with naming(name, "length"):
                    lengths[name] = len(shard)
        self.number(lengths)

    def number(self, lengths: Mapping[str, int]) -> None:
        """Number the samples by the lengths of all shards of the run."""
        firsts = firsts_of(lengths)
        self._lengths = {name: lengths[name] for name in firsts if name in self.shards}
        self._names, self._firsts = [*self._lengths], [firsts[name] for name in self._lengths]

    def __len__(self) -> int:
        return sum(map(len, self.shards.values()))

    def __iter__(self) -> Iterator[Any]:
        return (self._read(name, sample) for name, shard in self.shards.items() for sample in range(len(shard)))

    def __getitem__(self, number: int) -> Any:
        """Return a sample by its number in the whole data set."""
        return self._read(*self._place_of(number))

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by their numbers, adjacent ones of a shard in one call if the shard has this method, too."""
        found = list[Any]()
        for name, places in groupby(map(self._place_of, numbers), lambda place: place[0]):
            samples = [sample for _, sample in places]
            if not hasattr(self.shards[name], "__getitems__"):
                found += [self._read(name, sample) for sample in samples]
                continue
            with naming(name, f"samples {', '.join(map(str, samples))}"):
                found += self.shards[name].__getitems__(samples)
        return found

    def _place_of(self, number: int) -> tuple[str, int]:
        """Return the name of a shard, and the number of a sample in it."""
        place = bisect_right(self._firsts, number) - 1
        if place < 0 or number - self._firsts[place] >= self._lengths[self._names[place]]:
            raise InputError(
                f"Located data have no sample {number} on this worker. Samples are numbered over the shards of all "
                f"workers, and this worker has {', '.join(map(repr, self._names[:8]))}: read data.shards[name][sample]."
            )
        return self._names[place], number - self._firsts[place]

    def check_lengths(self, step: int) -> None:
        """Raise InputError if the length of a shard has changed since the start."""
        for name, length in self._lengths.items():
            if (now := len(self.shards[name])) != length:
                raise InputError(
                    f"Shard {name!r} had {length} samples at the start and has {now} in step {step}. Its length must "
                    f"not change, because the order of samples depends on it. Write new samples to another shard, and "
                    f"start a new run with it."
                )

    def _read(self, name: str, sample: int) -> Any:
        with naming(name, f"sample {sample}"):
            return self.shards[name][sample]

    def facts(self, seed: int, *, exact: bool) -> dict[str, ShardFacts]:
        """Read a few samples of each shard, with random numbers keyed by the sample, and return its facts.

        Streams are not read.
        """
        found = {}
        with preserve_generators():
            for name, shard in self.shards.items():
                if is_stream(shard):
                    found[name] = ShardFacts(None, "", "")
                    continue
                samples = []
                for sample in compared(len(shard)):
                    seed_all(seed_of(SAMPLE, seed, 0, sample))
                    samples.append(self._read(name, sample))
                one = facts_of(len(shard), samples, exact=exact)
                footers = shard.fingerprint if isinstance(shard, ParquetDataset) else ""
                found[name] = one._replace(digest=one.digest + footers[:16])
        return found


def facts_of(length: int | None, samples: list[Any], *, exact: bool) -> ShardFacts:
    """Return the facts of a shard with these samples."""
    bits = digest_of(samples, exact=True)
    most = max(sum(getattr(leaf, "nbytes", 8) for leaf in leaves_in(sample)) for sample in samples)
    return ShardFacts(length, bits if exact else digest_of(samples, exact=False), bits, most)


@contextmanager
def naming(name: str, samples: str) -> Iterator[None]:
    """Name the shard and the samples in errors of its code."""
    try:
        yield
    except Exception as error:
        in_user_call(error, f"Shard {name!r} was asked for its {samples}.")
        raise


def firsts_of(lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the first sample of each shard if shards follow each other in the order of their names."""
    names = sorted(lengths)
    return dict(zip(names, accumulate((lengths[name] for name in names), initial=0), strict=False))
