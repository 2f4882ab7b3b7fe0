"""The variables of Horovod that have an effect here."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import env


@dataclass(frozen=True)
class HorovodSettings:
    """What the environment says.

    Attributes:
        fusion_bytes: of small tensors that are reduced together; ``HOROVOD_FUSION_THRESHOLD``, 0: none.
        cycle_seconds: to wait for more requests before they are sent; ``HOROVOD_CYCLE_TIME``, in milliseconds.
        cache_capacity: requests that have a number; ``HOROVOD_CACHE_CAPACITY``.
        stall_seconds: before a warning names what is missing; ``HOROVOD_STALL_CHECK_TIME_SECONDS``. None: never, by
            ``HOROVOD_STALL_CHECK_DISABLE=1``.
        deadline_seconds: before a wait ends with an error; ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``.
        start_seconds: to wait for the other workers in ``init``; ``HOROVOD_GLOO_TIMEOUT_SECONDS``.
    """

    fusion_bytes: int
    cycle_seconds: float
    cache_capacity: int
    stall_seconds: float | None
    deadline_seconds: float
    start_seconds: float


def read_settings() -> HorovodSettings:
    """Read the variables.

    Raises:
        ConfigError: one of them is not a number, or negative.
    """
    disabled = env.horovod_number("STALL_CHECK_DISABLE", 0) != 0
    return HorovodSettings(
        fusion_bytes=int(env.horovod_number("FUSION_THRESHOLD", 128 << 20)),
        cycle_seconds=env.horovod_number("CYCLE_TIME", 0.0) / 1000,
        cache_capacity=int(env.horovod_number("CACHE_CAPACITY", 1024)),
        stall_seconds=None if disabled else env.horovod_number("STALL_CHECK_TIME_SECONDS", 60.0),
        deadline_seconds=env.horovod_number("STALL_SHUTDOWN_TIME_SECONDS", 0.0) or 1800.0,
        start_seconds=env.horovod_number("GLOO_TIMEOUT_SECONDS", 60.0),
    )
