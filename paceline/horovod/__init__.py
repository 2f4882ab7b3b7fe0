"""The interface of Horovod 0.28 over Paceline's rendezvous: ``import paceline.horovod.torch as hvd``.

::

    submit     torch/mpi_ops (each operation), torch/optimizer (gradients)
    agree      negotiation: which operations all members of a process set have asked for; at rank 0, pure
    carry out  operations, on one thread for each process (engine), in the order that rank 0 has sent (links)
    steady     plan: the gradients of an optimizer in fixed buckets, which nobody needs to negotiate

The coordinator and the response cache follow Sergeev and Del Balso (2018, arXiv 1802.05799), the reduction ``Adasum``
Maleki et al. (2020, arXiv 2006.02924).
"""

from paceline.horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
"""Of the interface, for scripts that ask."""
