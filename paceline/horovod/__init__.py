"""Horovod 0.28's interface on Paceline's rendezvous: ``import paceline.horovod.torch as hvd``.

::

    submit     torch/mpi_ops (each operation), torch/optimizer (gradients)
    negotiate  negotiation: which operations all members of a process set have requested; on rank 0, pure
    execute    operations, on one thread in each process (engine), in the order that rank 0 sends (links)
    steady     plan: the gradients of an optimizer in fixed buckets, without negotiation

The coordinator and the response cache follow Sergeev and Del Balso (2018, arXiv 1802.05799). The reduction ``Adasum``
follows Maleki et al. (2020, arXiv 2006.02924).
"""

from paceline.horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
"""Version of Horovod whose interface this package implements, for scripts that check it."""
