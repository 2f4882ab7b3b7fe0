"""Encoding of samples that a script adds, and the check that all workers add the same samples."""

from __future__ import annotations

import hashlib
from typing import Any

from paceline.comm.values import encode
from paceline.comm.world import World
from paceline.errors import DisagreementError, InputError, name_ranks

_DIGEST_BYTES = 16


def encoded(samples: Any) -> list[bytes]:
    """Encode samples.

    Raises:
        InputError: the samples are not a list, or a sample has a type that cannot be sent and saved.
    """
    if not isinstance(samples, list | tuple):
        raise InputError(
            f"session.extend takes a list of samples, each as the data set returns it, but it got a "
            f"{type(samples).__name__}. Write session.extend([sample]) to add one sample."
        )
    found = []
    for number, sample in enumerate(samples):
        try:
            found.append(encode(sample))
        except (TypeError, RecursionError) as error:
            raise InputError(
                f"session.extend cannot keep sample {number} of {len(samples)}: {error}. A sample may hold tensors, "
                f"NumPy arrays, numbers, texts and None, in tuples, lists and dictionaries."
            ) from None
    return found


def agree(world: World, samples: list[bytes]) -> int:
    """Check that all workers add the same samples. All workers call this together.

    Returns:
        the largest notice of any worker (``comm.world``).

    Raises:
        DisagreementError: a worker adds different samples from rank 0's.
    """
    digests = [hashlib.blake2b(sample, digest_size=_DIGEST_BYTES).digest() for sample in samples]
    own = len(samples), hashlib.blake2b(b"".join(digests), digest_size=_DIGEST_BYTES).digest()
    everyone: list[tuple[int, bytes, int]] = world.gather((*own, world.notice()), "extend")
    counts = [count for count, *_ in everyone]
    if not (others := [rank for rank, one in enumerate(everyone) if one[:2] != everyone[0][:2]]):
        return max(notice for *_, notice in everyone)
    if any(counts[rank] != counts[0] for rank in others):
        listed = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
        what = f"numbers of samples ({listed})"
    else:
        known = world.gather(digests, "extend")
        first = next(number for number, found in enumerate(zip(*known, strict=True)) if len(set(found)) > 1)
        what = f"samples: sample {first} of {counts[0]} on {name_ranks(others)} differs from rank 0's"
    raise DisagreementError(
        f"session.extend got different {what}. Give the same list on every worker, else the order of the data set "
        f"would depend on the number of workers. Use session.once(function) to make the samples on one worker for all."
    )
