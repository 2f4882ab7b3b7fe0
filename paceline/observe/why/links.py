"""Detection of a link that is slower than the others, from the waits of each worker.

Workers wait for a worker that sends slowly, and a worker that receives slowly waits for the others. Its
acknowledgements are late, too, so the others may wait for it as well. If nearly all waits are between one worker and
others, its link is slow. Otherwise all links are alike::

    waits of    rank 0           rank 1           rank 2
    for rank 1  ░░░░░░░░                          ░░░░░░░░      rank 1 sends slowly
    for rank 1                                    ░░░░░░░░      rank 1 sends slowly to rank 2
                                 0 ░░░░  2 ░░░░                 rank 1 receives slowly
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

_OF_ONE, _ALIKE, _ONE_WAY = 0.75, 0.9, 2.0
"""Smallest share of all waits to blame one worker, share of these from which another worker has as many, and ratio of a
worker's two directions from which only one of them is slow."""
Links = dict[tuple[int, int], float]  # seconds for which each receiver waited for a sender, by (sender, receiver)


class SlowLink(NamedTuple):
    """Link whose receiver waits longer for messages than other workers do."""

    rank: int  # slow end
    sender: int | None  # None if the messages of several senders are slow
    receiver: int | None  # None if the messages to several receivers are slow
    seconds: float


def slow_link(links: Links) -> SlowLink | None:
    """Return the slow link, if there is only one worker that sends or receives slowly."""
    if not any(links.values()):
        return None
    sent, received = defaultdict[int, float](float), defaultdict[int, float](float)
    for (sender, receiver), seconds in links.items():
        sent[sender] += seconds
        received[receiver] += seconds
    between = {rank: sent[rank] + received[rank] for link in links for rank in link}
    slow = [rank for rank, seconds in between.items() if seconds >= _ALIKE * max(between.values())]
    if between[slow[0]] < _OF_ONE * sum(links.values()):
        return None
    most, (sender, receiver) = max(received.values()), max(links, key=links.__getitem__)
    if len(slow) == 1:
        (rank,) = slow
        sends, receives = _ONE_WAY * sent[rank] > received[rank], _ONE_WAY * received[rank] > sent[rank]
        return SlowLink(rank, None if receives else rank, None if sends else rank, most)
    if links[sender, receiver] < _ONE_WAY * links.get((receiver, sender), 0.0):
        return None
    others = [one for one in links if one != (sender, receiver)]  # such as the only server, which is not slow for them
    of_receiver = sender in {one for one, _ in others} and receiver not in {one for _, one in others}
    return SlowLink(receiver if of_receiver else sender, sender, receiver, most)
