"""Horovod environment variables that have an effect in Paceline."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.environments import env


@dataclass(frozen=True)
class HorovodSettings:
    """Settings from Horovod's environment variables."""

    fusion_bytes: int  # maximum size of tensors reduced together (``HOROVOD_FUSION_THRESHOLD``). 0 disables fusion.
    cycle_seconds: float  # delay before requests are sent, to collect more (``HOROVOD_CYCLE_TIME``, in milliseconds)
    cache_capacity: int  # maximum number of requests in the response cache (``HOROVOD_CACHE_CAPACITY``)
    # waiting time before a warning names missing ranks (``HOROVOD_STALL_CHECK_TIME_SECONDS``). None if
    # ``HOROVOD_STALL_CHECK_DISABLE=1`` disables the warning.
    stall_seconds: float | None
    deadline_seconds: float  # waiting time before an operation fails (``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``)
    start_seconds: float  # timeout for the other workers in ``init`` (``HOROVOD_GLOO_TIMEOUT_SECONDS``)
    # file in which rank 0 records operations (``HOROVOD_TIMELINE``). Empty if they are not recorded.
    timeline: str = ""
    mark_cycles: bool = False  # whether negotiation cycles are recorded, too (``HOROVOD_TIMELINE_MARK_CYCLES``)
    # names, without ``HOROVOD_``, of Horovod variables in the environment that have no effect
    ignored: tuple[str, ...] = ()


_READ = {
    *("FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS"),
    *("STALL_SHUTDOWN_TIME_SECONDS", "GLOO_TIMEOUT_SECONDS", "TIMELINE", "TIMELINE_MARK_CYCLES"),
}
_TRUE_HERE = {
    *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "ELASTIC"),
    *("DYNAMIC_PROCESS_SETS", "CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT"),
}
"""Variables that Horovod's launchers set, or that request the usual behavior of Paceline."""


def read_settings() -> HorovodSettings:
    """Return the settings from the environment."""
    timeline = env.text("HOROVOD_TIMELINE") or ""
    disabled = env.horovod_number("STALL_CHECK_DISABLE", 0) != 0
    return HorovodSettings(
        fusion_bytes=int(env.horovod_number("FUSION_THRESHOLD", 128 << 20)),
        cycle_seconds=env.horovod_number("CYCLE_TIME", 0.0) / 1000,
        cache_capacity=int(env.horovod_number("CACHE_CAPACITY", 1024)),
        stall_seconds=None if disabled else env.horovod_number("STALL_CHECK_TIME_SECONDS", 60.0),
        deadline_seconds=env.horovod_number("STALL_SHUTDOWN_TIME_SECONDS", 0.0) or 1800.0,
        start_seconds=env.horovod_number("GLOO_TIMEOUT_SECONDS", 60.0),
        timeline="" if timeline == "DYNAMIC" else timeline,
        mark_cycles=env.horovod_number("TIMELINE_MARK_CYCLES", 0) != 0,
        ignored=tuple(sorted(env.horovod_names() - _READ - _TRUE_HERE)),
    )
