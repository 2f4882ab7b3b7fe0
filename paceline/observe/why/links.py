"""The link that is slower than the others, from what each worker waited for.

If one worker sends slowly, the others wait for it and it waits for nobody. If one receives slowly, it waits for every
sender, and the others wait for nobody. Otherwise all links are alike::

    waits of    rank 0           rank 1           rank 2
    for rank 1  ░░░░░░░░                          ░░░░░░░░      rank 1 sends slowly
    for rank 1                                    ░░░░░░░░      rank 1 sends slowly to rank 2
    in turn                      0 ░░░░  2 ░░░░                 rank 1 receives slowly
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_ALIKE, _OF_ONE_SENDER = 0.5, 0.75
"""Share of the longest wait from which another receiver waits as long; share of a wait that makes it one sender's."""
Links = dict[tuple[int, int], float]  # seconds for which each receiver waited for a sender, by (sender, receiver)


class SlowLink(NamedTuple):
    """Link whose receiver waits longer for messages than other workers do."""

    rank: int  # slow end
    sender: int | None  # None if the messages of all senders are slow
    receiver: int | None  # None if the messages to all receivers are slow
    seconds: float


def slow_link(links: Links, ranks: Iterable[int]) -> SlowLink | None:
    """Return the slow link, if only one worker sends slowly, or only one receives slowly."""
    received = {rank: 0.0 for rank in ranks}
    for (_, receiver), seconds in links.items():
        received[receiver] = received.get(receiver, 0.0) + seconds
    if not any(received.values()):
        return None
    (sender, receiver), _ = max(links.items(), key=lambda one: one[1])
    most = received[receiver]
    slow = [rank for rank, seconds in received.items() if seconds > _ALIKE * most]
    if slow == [receiver]:
        alone = links[sender, receiver] > _OF_ONE_SENDER * most
        return SlowLink(sender if alone else receiver, sender if alone else None, receiver, most)
    if all(links.get((sender, rank), 0.0) > _OF_ONE_SENDER * received[rank] for rank in slow):
        return SlowLink(sender, sender, None if len(slow) == len(received) - 1 else receiver, most)
    return None
