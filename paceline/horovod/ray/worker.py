"""What is in an actor of Ray: one worker of an executor, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.environments import env
from paceline.environments.start import Identity
from paceline.horovod import unchanged
from paceline.horovod.ray import ray_logger


class BaseHorovodWorker:
    """A worker, which keeps what one call leaves behind for the next.

    Args:
        world_rank: its number, from 0.
        world_size: how many there are.

    Attributes:
        executable: the object that ``execute`` gives to functions; None without one.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._name = f"rank {world_rank} of {world_size}"
        self._store: Any = None
        env.set_horovod_identity(Identity(world_rank, world_size))
        unchanged.make_importable()

    def __repr__(self) -> str:
        return self._name

    def hostname(self) -> str:
        """The name of this machine."""
        import socket

        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray has given to this worker."""
        import ray

        return [str(one) for one in ray.get_gpu_ids()]

    def node(self) -> tuple[str, str]:
        """The name that Ray has for this node, and its address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables of the environment."""
        for name, value in env_vars.items():
            env.put(name, str(value))

    def env_vars(self) -> dict[str, str]:
        """A copy of the environment."""
        return env.inherited()

    def open_store(self, host: str) -> int:
        """Hold the store by which the workers come together in ``hvd.init``; gives its port."""
        from paceline.comm.rendezvous.env_init import hold_store

        self._store, port = hold_store(host)
        return port

    def identify(self, who: Identity, host: str, port: int) -> None:
        """Set who this worker is, and where the store is."""
        env.set_identity(who.rank, who.world_size, who.local_rank, who.local_world_size)
        env.set_horovod_identity(who)
        held = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        self.update_env_vars({"MASTER_ADDR": host, "MASTER_PORT": port, **held})

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that functions get."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def set_queue(self, queue: Any) -> None:
        """Where ``ray_logger.log`` puts values; None: nowhere."""
        ray_logger.configure(queue)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the executable."""
        return func(self.executable)
