"""Importing this makes MPI known to torch.

::

    import paceline.comm.mpi.register

    dist.init_process_group("mpi")

torch has the name for builds with an MPI of their own; this gives it to the others. As there, the group comes together
by MPI alone: no address, no port, and no store. The second name, ``mpi4py``, is for groups that have a store, such as
a session's, and takes the timeout of ``init_process_group``.
"""

from paceline.comm.mpi.backend import register

register()
