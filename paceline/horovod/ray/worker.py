"""Ray actor of one worker of an executor, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.environments import env
from paceline.environments.start import Identity
from paceline.horovod import unchanged
from paceline.horovod.ray import ray_logger


class BaseHorovodWorker:
    """Worker that keeps its state between calls.

    Args:
        world_rank: rank of this worker. Defaults to 0.
        world_size: number of workers. Defaults to 1.

    Attributes:
        executable: object that ``execute`` passes to functions, or None.
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
        """Return the host name of this machine."""
        import socket

        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """Return the IDs of the GPUs that Ray has assigned to this worker."""
        import ray

        return [str(one) for one in ray.get_gpu_ids()]

    def node(self) -> tuple[str, str]:
        """Return Ray's ID of this node, and the node's address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables."""
        for name, value in env_vars.items():
            env.put(name, str(value))

    def env_vars(self) -> dict[str, str]:
        """Return a copy of the environment."""
        return env.inherited()

    def open_store(self, host: str) -> int:
        """Open the store for the rendezvous in ``hvd.init``, keep it open, and return its port."""
        from paceline.comm.rendezvous.env_init import hold_store

        self._store, port = hold_store(host)
        return port

    def identify(self, who: Identity, host: str, port: int) -> None:
        """Set the identity of this worker and the address of the store."""
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
        """Create the object that is passed to functions."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def set_queue(self, queue: Any) -> None:
        """Set the queue for the values of ``ray_logger.log``. None drops them."""
        ray_logger.configure(queue)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the executable."""
        return func(self.executable)
