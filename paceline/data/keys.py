"""Random numbers keyed by their use, independent of the history of a worker.

A key is a tuple of integers: ``(seed, step, microbatch)`` inside a microbatch, ``(seed, epoch, sample)`` for a sample
of a data set, ``(seed, step, microbatch, parameter)`` for the rounding of a gradient, ``(seed, step, chunk)`` in an
evaluation, ``(seed, position of the call, number, item)`` in a call of ``session.map``, ``(seed, step, before)`` in the
script's loop before or after a step. Each key determines its random stream, so a checkpoint needs no generator states.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

ORDER, STEP, SAMPLE, LOOP, UPDATE, COLLATE, EVALUATION, BATCH_LOSS, ROUNDING, MAP, SITES = range(1, 12)
"""First number of a key: its use. Different uses never share a stream."""
_UNTOUCHED = 20_231_117


def seed_of(*key: int) -> int:
    """Hash a key to a 63-bit seed, the same on every machine."""
    packed = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's global CPU generator, and the GPU's if CUDA is initialized."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, Python and, if it is imported, NumPy."""
    seed_torch(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def seed_untouched() -> None:
    """Seed the global generators so that :func:`was_drawn` can detect later draws."""
    seed_all(_UNTOUCHED)


def was_drawn() -> bool:
    """Return whether a global generator was used since :func:`seed_untouched`. The check itself draws from them."""
    return _next_draws() != _draws_of_untouched() or _drawn_on_gpu()


def _next_draws() -> tuple[float, ...]:
    import numpy

    return torch.rand((), dtype=torch.float64).item(), random.random(), numpy.random.random_sample()


def _drawn_on_gpu() -> bool:
    """Return whether the GPU's generator has moved on from its seed. Its state ends with its position."""
    return torch.cuda.is_initialized() and bool(torch.cuda.get_rng_state()[-8:].any())


@cache
def _draws_of_untouched() -> tuple[float, ...]:
    seed_untouched()
    return _next_draws()


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's global generators."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.default_generator.get_state(), *on_gpu]


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators."""
    states: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def same_states(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two results of :func:`generator_states` are equal, that is, nothing was drawn in between."""
    same = torch.equal(left["torch"], right["torch"]) and left["python"] == right["python"]
    if "numpy" in left:
        same = same and left["numpy"][2] == right["numpy"][2] and (left["numpy"][1] == right["numpy"][1]).all()
    if "cuda" in left:
        same = same and torch.equal(left["cuda"], right["cuda"])
    return bool(same)


class _Replay:
    """Reusable context in which the global generators continue from the given states."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    def __enter__(self) -> None:
        self._before = generator_states()
        restore_generators(self._states)

    def __exit__(self, *_: object) -> None:
        restore_generators(self._before)


def replay_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for ``torch.utils.checkpoint`` (as ``context_fn``) so that recomputation repeats random draws.

    torch itself restores only its own generators.
    """
    return nullcontext(), _Replay(generator_states())


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global generators on exit."""
    before = generator_states()
    try:
        yield
    finally:
        restore_generators(before)


def restore_generators(states: dict[str, Any]) -> None:
    """Set the global generators to a result of :func:`generator_states`."""
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def pack_generators() -> list[torch.Tensor]:
    """Return the states of the global generators as tensors, for :func:`unpack_generators` in another process."""
    states = generator_states()
    version, words, gauss = states["python"]
    packed = [states["torch"], torch.tensor([version, *words])]
    packed.append(torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64))
    if "numpy" in states:
        _, keys, *rest = states["numpy"]
        packed += [torch.from_numpy(keys.astype("int64")), torch.tensor(rest, dtype=torch.float64)]
    if "cuda" in states:
        packed.append(states["cuda"])
    return packed


def unpack_generators(packed: list[torch.Tensor]) -> None:
    """Set the global generators to the states of another process with the same libraries."""
    first, words, spare, *rest = (state.cpu() for state in packed)
    torch.default_generator.set_state(first)
    version, *inner = words.tolist()
    gauss = spare.item()
    random.setstate((version, tuple(inner), None if math.isnan(gauss) else gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and len(rest) > 1:
        index, has_gauss, value = rest[1].tolist()
        numpy.random.set_state(("MT19937", rest[0].numpy().astype("uint32"), int(index), int(has_gauss), value))
        rest = rest[2:]
    if rest and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(rest[0])
