"""Agreement of all workers on the shards of the data set, and on which workers have them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import NamedTuple

from paceline.comm.values import sendable
from paceline.data.located.shards import ShardFacts
from paceline.data.located.turns import Reading
from paceline.errors import DisagreementError, InputError

_LISTED = 8


class ShardsLost(InputError):
    """Some shards of the run are lost: ``names``, and with their last holders ``shards``."""

    def __init__(self, shards: str, names: Sequence[str]) -> None:
        super().__init__(
            f"No worker still has these shards of the data: {shards}. An epoch uses each sample once, so training "
            f"cannot continue without them. Resume the run with workers that have them. A run survives the loss of a "
            f"machine if each of its shards is on another machine, too, or if Located(..., wait_seconds=...) lets the "
            f"others wait for a worker that has them."
        )
        self.shards, self.names = shards, names


@sendable
class Holding(NamedTuple):
    """Shards of a run, by name, and the workers that had each of them when all met last, as text."""

    shards: dict[str, ShardFacts]
    holders: dict[str, str]
    choices: dict[str, bool]  # of move="auto": whether samples are sent, by :func:`placement_of`
    readings: dict[str, Reading]  # common readings of the streams among the shards


Given = tuple[str, Mapping[str, ShardFacts], Holding]
"""Message of a worker to the others: its host, its shards, and the shards of the run if it already knows them."""


def agree(everyone: Sequence[Given], *, all_present: bool = True) -> tuple[Holding, dict[str, tuple[int, ...]]]:
    """Return the shards of the run and the ranks that have each, from the messages of all workers in rank order.

    Args:
        all_present: whether the workers must have all shards of the run.

    Raises:
        DisagreementError: workers have different shards of the same name.
        ShardsLost: the workers do not have all shards of the run.
        InputError: no worker has a shard, the workers have shards that are not those of the run, or two names stand for
            the same samples.
    """
    run = next((run for *_, run in everyone if run.shards), Holding({}, {}, {}, {}))
    ranks = ranks_of(everyone)
    holders = {name: ", ".join(_worker(everyone, rank) for rank in ranks[name]) for name in sorted(ranks)}
    shards = {name: everyone[ranks[name][0]][1][name] for name in holders}
    for name, known in shards.items():
        for rank in ranks[name][1:]:
            if what := _difference(known, everyone[rank][1][name]):
                raise DisagreementError(not_the_same(everyone, name, ranks[name][0], rank, what))
    if run.shards:
        _check_run(run, shards, holders, all_present)
    else:
        _check_twice(shards, holders)
    if not shards:
        raise InputError(
            "No worker has a shard of the Located data. Give each worker the shards that its machine has, and check "
            "the folder in which the script looks for them."
        )
    choices = {placement: sends for *_, one in everyone for placement, sends in one.choices.items()}
    readings = {name: Reading([]) for name, one in shards.items() if one.length is None}
    for name, reading in (known for *_, one in everyone for known in one.readings.items()):
        readings[name] = max(readings.get(name, reading), reading, key=lambda known: (len(known.ends), known.seen))
    agreed = Holding({**run.shards, **shards}, {**run.holders, **holders}, choices, readings)
    return agreed, ranks


def ranks_of(everyone: Sequence[Given]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have each shard, in ascending order."""
    names = dict.fromkeys(name for _, own, _ in everyone for name in own)
    return {name: tuple(rank for rank, (_, own, _) in enumerate(everyone) if name in own) for name in names}


def placement_of(everyone: Sequence[Given]) -> str:
    """Return a digest of the shards of each worker, which does not depend on the ranks."""
    return hashlib.sha256(repr(sorted(sorted(own) for _, own, _ in everyone)).encode()).hexdigest()[:16]


def not_the_same(everyone: Sequence[Given], name: str, left: int, right: int, what: str) -> str:
    """Return the text of the error for two ranks with different shards of the same name."""
    return (
        f"Shard {name!r} is not the same on {_worker(everyone, left)} and {_worker(everyone, right)}: {what}. Machines "
        f"that have the same shard give it the same name, and different shards have different names."
    )


def strangers(everyone: Sequence[Given], joined: Collection[int]) -> dict[int, str]:
    """Return why workers cannot join, by rank: they have shards that the run does not have, or that differ from its."""
    found = {}
    for rank in joined:
        holders = dict.fromkeys(everyone[rank][1], _worker(everyone, rank))
        for run in (run for *_, run in everyone if run.shards):
            try:
                _check_run(run, everyone[rank][1], holders, all_present=False)
            except InputError as error:
                found[rank] = str(error)
    return found


def _worker(everyone: Sequence[Given], rank: int) -> str:
    return f"rank {rank} ({everyone[rank][0]})"


def _more(names: Sized) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""


def _difference(left: ShardFacts, right: ShardFacts) -> str:
    if left.length != right.length:
        return f"{_counted(left)} and {_counted(right)}"
    return "" if left.digest == right.digest else f"{_counted(left)} each, but other values"


def _change(saved: ShardFacts, found: ShardFacts) -> str:
    """Return how a shard differs from that of a saved run, whose digest may lack what an earlier version left out."""
    known = len(saved.digest) or None
    return _difference(saved, found._replace(digest=found.digest[:known]))


def _counted(one: ShardFacts) -> str:
    return "a stream" if one.length is None else f"{one.length} samples"


def _check_run(run: Holding, found: Mapping[str, ShardFacts], holders: Mapping[str, str], all_present: bool) -> None:
    if all_present and (lost := [name for name in run.shards if name not in found]):
        listed = ", ".join(f"{name!r} of {run.holders[name]}" for name in lost[:_LISTED])
        raise ShardsLost(f"{listed}{_more(lost)}", lost)
    for name, one in found.items():
        if name not in run.shards:
            raise InputError(
                f"Shard {name!r} of {holders[name]} is not part of the data that this run was started with: shards "
                f"{', '.join(map(repr, [*run.shards][:_LISTED]))}{_more(run.shards)}. The order of samples depends on "
                f"all shards: leave it out, or start a new run."
            )
        if what := _change(run.shards[name], one):
            raise InputError(
                f"Shard {name!r} has changed since this run was started: it had and has now, on {holders[name]}, "
                f"{what}. The order of samples depends on it: give the same shard, or start a new run."
            )


def _check_twice(found: Mapping[str, ShardFacts], holders: Mapping[str, str]) -> None:
    """Raise InputError if two names stand for the same samples, or some shards are streams and others are not."""
    seen: dict[tuple[int | None, str], str] = {}
    kinds = {one.length is None: name for name, one in found.items()}
    if len(kinds) == 2:
        raise InputError(
            f"Shard {kinds[True]!r} of {holders[kinds[True]]} is a stream, and shard {kinds[False]!r} of "
            f"{holders[kinds[False]]} a data set with items by number. Streams are read in sequence, other data sets "
            f"are shuffled: give data sets of one kind."
        )
    for name, one in found.items():
        other = seen.setdefault((one.length, one.bits or name), name)
        if other != name:
            raise InputError(
                f"Shards {other!r} of {holders[other]} and {name!r} of {holders[name]} have the same samples "
                f"({_counted(one)}), as far as those compared tell, which an epoch would use twice. If it is one shard "
                f"on two machines, give it one name; if samples repeat on purpose, join the two into one shard by "
                f"torch.utils.data.ConcatDataset or ChainDataset."
            )
