"""Compressions of gradients: one number of each chunk (randomk, topk), signs (onebit), a low rank (powersgd)."""

from __future__ import annotations

import math

import torch

from paceline.data.keys import ROUNDING, seed_of
from paceline.step.gradients.lanes import Lanes, pack, unpack, words_of
from paceline.step.gradients.partial import State

_EXACT = 2**24
"""Whole numbers up to this are numbers of float32."""
_BLOCK = 1024
"""Elements with a scale of their own in onebit: the scale is an eight-thousandth of float32's bits."""
_FINEST = 2.0**36
"""Number of steps in 1 of the sizes that onebit adds up."""


class RandomK:
    """One number of each chunk of ``1 / ratio`` numbers, at a random position that all microbatches share.

    Args:
        numel: number of elements of the gradient.
        ratio: part of the elements that is sent, at most half of them.
        seed: key of the random numbers, the same on all workers.
    """

    def __init__(self, numel: int, ratio: float, seed: int) -> None:
        self._numel, self._seed = numel, seed
        self._size = max(min(round(1 / ratio), numel, _EXACT), 2)
        self._count = -(-numel // self._size)

    def start(self) -> State:
        """Return the number of steps done."""
        return {"steps": torch.zeros(1, dtype=torch.int64)}

    def example(self) -> torch.Tensor:
        """Return a number for each chunk."""
        return torch.empty(self._count)

    def compress(self, value: torch.Tensor, state: State, leads: bool) -> torch.Tensor:
        """Return the numbers at the positions of this step."""
        return self._chunks(value).gather(1, self._positions(state)).view(-1)

    def restore(self, sums: torch.Tensor, state: State) -> torch.Tensor:
        """Return zeros with the numbers at the positions of this step."""
        chunks = torch.zeros(self._count, self._size, device=sums.device)
        return chunks.scatter_(1, self._positions(state), sums[: self._count].view(-1, 1)).view(-1)[: self._numel]

    def proceed(self, sums: torch.Tensor, state: State) -> State:
        """Return the state with one more step."""
        return {"steps": state["steps"] + 1}

    def _positions(self, state: State) -> torch.Tensor:
        """Return the position in each chunk, as a column."""
        steps = state["steps"]
        generator = torch.Generator().manual_seed(seed_of(ROUNDING, self._seed, int(steps)))
        return torch.randint(self._size, (self._count, 1), generator=generator).to(steps.device)

    def _chunks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the chunks as rows, the last one with zeros at the end."""
        return torch.nn.functional.pad(value, (0, self._count * self._size - self._numel)).view(self._count, self._size)


class TopK(RandomK):
    """The largest number of each chunk of ``1 / ratio`` numbers, by the unsent values of the previous step.

    A microbatch that leads a step sends the positions of the largest numbers in its error, as digits of whole numbers
    in float32. All others add zeros. The positions count in the next step.
    """

    def __init__(self, numel: int, ratio: float) -> None:
        super().__init__(numel, ratio, 0)
        self._digits = int(math.log2(_EXACT) / math.log2(self._size))

    def start(self) -> State:
        """Return the first position of each chunk."""
        return {"positions": torch.zeros(self._count, 1, dtype=torch.int64)}

    def example(self) -> torch.Tensor:
        """Return a number for each chunk, and the positions."""
        return torch.empty(self._count + -(-self._count // self._digits))

    def compress(self, value: torch.Tensor, state: State, leads: bool) -> torch.Tensor:
        """Return the numbers at the positions of this step, and the positions of the next one."""
        sent = super().compress(value, state, leads)
        words = torch.zeros(-(-self._count // self._digits), device=value.device)
        if leads:
            rest = self._chunks(value).abs().scatter_(1, self._positions(state), 0.0).argmax(1).float()
            for digit in reversed(range(self._digits)):
                part = rest[digit * len(words) : (digit + 1) * len(words)]
                words.mul_(self._size)[: len(part)].add_(part)
        return torch.cat((sent, words))

    def proceed(self, sums: torch.Tensor, state: State) -> State:
        """Return the positions that the leading microbatch has sent."""
        words = sums[self._count :].to(torch.int64)
        digits = [words // self._size**digit % self._size for digit in range(self._digits)]
        return {"positions": torch.cat(digits)[: self._count].view(-1, 1)}

    def _positions(self, state: State) -> torch.Tensor:
        return state["positions"]


class OneBit:
    """Signs, times the mean size of the numbers in each block, over all microbatches of the step before.

    Signs are added up as integers in lanes of a few bits (``step.gradients.lanes``). So are the sizes, in steps of
    2**-36, and a count. The first step has no sizes yet and sends nothing but them.

    1-bit SGD: Seide et al. 2014; with error feedback: Karimireddy et al. 2019 (arXiv 1901.09847).

    Args:
        numel: number of elements of the gradient.
        microbatches: largest number of microbatches in a sum.
    """

    def __init__(self, numel: int, microbatches: int) -> None:
        width = microbatches.bit_length() + 1
        self._numel, self._most = numel, 2.0**62 / microbatches
        self._lanes = Lanes(torch.int64, 63 // width, width)
        self._words = words_of(numel, self._lanes)
        self._blocks = -(-numel // _BLOCK)

    def start(self) -> State:
        """Return zeros as sizes."""
        return {"sizes": torch.zeros(self._blocks)}

    def example(self) -> torch.Tensor:
        """Return words of signs, the sizes and the count."""
        return torch.empty(self._words + self._blocks + 1, dtype=torch.int64)

    def compress(self, value: torch.Tensor, state: State, leads: bool) -> torch.Tensor:
        """Return the signs, and the sizes of the numbers."""
        signs = (value >= 0).to(torch.int32).mul_(2).sub_(1)
        sums = torch.nn.functional.pad(value.abs(), (0, self._blocks * _BLOCK - self._numel)).view(-1, _BLOCK).sum(1)
        sizes = sums.double().mul_(_FINEST / _BLOCK).clamp_(max=self._most).to(torch.int64)
        return torch.cat((pack(signs, self._lanes), sizes, sizes.new_ones(1)))

    def restore(self, sums: torch.Tensor, state: State) -> torch.Tensor:
        """Return the sums of signs, times the sizes."""
        signs = unpack(sums[: self._words], self._lanes, self._numel)
        return signs.mul_(state["sizes"].view(-1, 1).expand(-1, _BLOCK).reshape(-1)[: self._numel])

    def proceed(self, sums: torch.Tensor, state: State) -> State:
        """Return the mean sizes of this step."""
        sizes = sums[self._words : -1].double() / (_FINEST * sums[-1])
        return {"sizes": sizes.float()}


class PowerSGD:
    """Product of the gradient, as a matrix, with an orthonormal basis of a few columns, on either side in turn.

    ::

        even step    P = M Q'     sum over the lanes, then P' = its orthonormal basis
        odd step     Q = M^T P'   sum over the lanes, then Q' = its orthonormal basis

    PowerSGD (Vogels et al. 2019, arXiv 1905.13727) sends P and Q in the same step, one after the other. In turn, a step
    sends half as much, and no worker waits twice: Zhang et al. 2023 (ACP-SGD, ICDCS).

    Args:
        rows, columns: shape of the matrix.
        rank: number of columns of a basis.
        seed: key of the random numbers of the first basis, the same on all workers.
    """

    def __init__(self, rows: int, columns: int, rank: int, seed: int) -> None:
        self._rows, self._columns, self._seed = rows, columns, seed
        self._rank = min(rank, rows, columns)

    def start(self) -> State:
        """Return a random orthonormal basis for the right side."""
        generator = torch.Generator().manual_seed(seed_of(ROUNDING, self._seed, 0))
        basis = torch.randn(self._columns, self._rank, generator=generator)
        return {"side": torch.zeros(1), "basis": self._padded(torch.linalg.qr(basis)[0])}

    def example(self) -> torch.Tensor:
        """Return the larger one of the two products."""
        return torch.empty(max(self._rows, self._columns) * self._rank)

    def compress(self, value: torch.Tensor, state: State, leads: bool) -> torch.Tensor:
        """Return the product."""
        matrix = value.view(self._rows, self._columns)
        return self._padded((matrix if self._is_right(state) else matrix.T) @ self._basis(state)).view(-1)

    def restore(self, sums: torch.Tensor, state: State) -> torch.Tensor:
        """Return the matrix whose product it is, in the span of the basis."""
        right = self._is_right(state)
        product = sums.view(-1, self._rank)[: self._rows if right else self._columns]
        basis = self._basis(state)
        return (product @ basis.T if right else basis @ product.T).reshape(-1)

    def proceed(self, sums: torch.Tensor, state: State) -> State:
        """Return an orthonormal basis of the sum, for the other side."""
        right = self._is_right(state)
        product = sums.view(-1, self._rank)[: self._rows if right else self._columns]
        return {"side": 1.0 - state["side"], "basis": self._padded(torch.linalg.qr(product)[0])}

    def _is_right(self, state: State) -> bool:
        return not state["side"].item()

    def _basis(self, state: State) -> torch.Tensor:
        return state["basis"][: self._columns if self._is_right(state) else self._rows]

    def _padded(self, value: torch.Tensor) -> torch.Tensor:
        """Return a matrix with zeros below, so that both sides have as many rows."""
        return torch.nn.functional.pad(value, (0, 0, 0, max(self._rows, self._columns) - len(value)))
