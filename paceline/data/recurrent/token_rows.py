"""Long token sequence as rows that continue from batch to batch, for training with a carried state.

::

    tokens       0 1 2 3 4 5 6 7 8 9 ...         2 rows, segments of 3 tokens
    batch 0      0 1 2    10 11 12
    batch 1      3 4 5    13 14 15               row r of a batch continues row r of the batch before
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from paceline.errors import InputError


class TokenRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Map-style data set of (input, target) segments, cut from one long sequence; targets are shifted by a token.

    The sequence is cut into ``rows`` parts of equal length, and each part into segments. With ``batch=rows`` and
    samples in order, a batch has one segment of each row, and the next batch has the segments that follow. Tokens that
    do not fill all rows are dropped. The last segments may be shorter.

    Args:
        tokens: tensor of shape [number of tokens].
        rows: number of parallel rows, equal to the batch of the session.
        length: number of tokens in a segment, over which gradients are computed.

    Raises:
        InputError: ``tokens`` is not 1-dimensional or has fewer than two per row, or ``rows`` or ``length`` is below 1.

    Examples:
        >>> rows = TokenRows(torch.arange(20), rows=2, length=3)
        >>> [rows[sample][0].tolist() for sample in (0, 1, 2)]
        [[0, 1, 2], [10, 11, 12], [3, 4, 5]]
        >>> rows[2][1].tolist()
        [4, 5, 6]
    """

    def __init__(self, tokens: torch.Tensor, rows: int, length: int) -> None:
        if tokens.ndim != 1 or rows < 1 or length < 1 or len(tokens) < 2 * rows:
            raise InputError(
                f"TokenRows needs tokens of shape [number of tokens], two or more for each row, and segments of one or "
                f"more: not tokens of shape {list(tokens.shape)}, {rows} rows and length {length}."
            )
        self.rows, self.length = rows, length
        self._tokens = tokens[: len(tokens) // rows * rows].view(rows, -1)

    def __len__(self) -> int:
        return self.rows * -(-(self._tokens.shape[1] - 1) // self.length)

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        segment, row = divmod(sample, self.rows)
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample} of {len(self)}")
        start = segment * self.length
        stop = min(start + self.length, self._tokens.shape[1] - 1)
        return self._tokens[row, start:stop], self._tokens[row, start + 1 : stop + 1]
