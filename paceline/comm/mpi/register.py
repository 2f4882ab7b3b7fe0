"""Registration of MPI with torch, on import.

::

    import paceline.comm.mpi.register

    dist.init_process_group("mpi")

torch reserves the name for builds with MPI. This module provides it in all other builds. As in a build with MPI, the
group forms through MPI alone, without an address, port or store. The second name, ``mpi4py``, is for groups that have a
store, such as a session's, and uses the timeout of ``init_process_group``.
"""

from paceline.comm.mpi.backend import register

register()
