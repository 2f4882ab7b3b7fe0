"""Number of steps between two outer steps, which falls with the loss.

AdaComm (Wang and Joshi 2019, arXiv 1810.08313): long periods cost few bytes while the loss falls quickly, and short
ones let it fall further at the end::

    local.every = 8          loss    4.0       2.0     0.9   0.4
    steps of the periods     8       O 8       O 6     O 4   O 3 ...

The losses are those of the last batch of each period over all replicas, which all workers know. So the periods do not
depend on the number of workers, nor on which worker trains which replica.
"""

from __future__ import annotations

import math


def adapted(every: int, first: float, loss: float) -> int:
    """Return the number of steps of the next period.

    Args:
        every: number of steps of the first period, and the largest that is returned.
        first: loss at the end of the first period.
        loss: loss now. If either is not a positive number, the rule does not apply, and the period is the longest.

    >>> [adapted(8, 4.0, loss) for loss in (4.0, 2.0, 0.9, 0.4, 9.0)]
    [8, 6, 4, 3, 8]
    """
    if not (0 < first < math.inf and 0 < loss < first):
        return every
    return math.ceil(every * math.sqrt(loss / first))
