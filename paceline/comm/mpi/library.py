"""The MPI library of this process, through mpi4py: found, initialized once, and finalized at a sound end.

mpi4py is told neither to initialize nor to finalize MPI by itself. After an error nothing finalizes it, so that
mpiexec ends the other processes: they would wait in MPI for this one.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

from paceline.environments import env
from paceline.errors import StartError


def load() -> Any:
    """Import ``mpi4py.MPI``, which leaves MPI as it is.

    Raises:
        ImportError, RuntimeError: mpi4py, or a library of MPI, is not there.
    """
    import mpi4py

    env.choose_mpi()
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


@functools.cache
def initialized() -> Any:
    """``mpi4py.MPI``, initialized for calls from several threads.

    Raises:
        StartError: it cannot be.
    """
    try:
        mpi = load()
    except (ImportError, RuntimeError) as error:
        fix = "Install it with `pip install 'paceline[mpi]'`."
        if "libmpi" in str(error):
            fix = (
                "Install an MPI; where its library has another name, as libmpich.so.12 of Debian, put a link with this "
                "name into a folder of LD_LIBRARY_PATH."
            )
        raise StartError(f"The back end mpi needs mpi4py, which cannot be imported: {error}. {fix}") from None
    if mpi.Is_finalized():
        raise StartError("MPI has been finalized in this process, and cannot be initialized again.")
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        if not survives():  # else that may wait for who is lost, and mpiexec does not ask for it
            atexit.register(_finalize)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise StartError(
            "MPI was initialized for calls from one thread only. Let mpi4py do it as by default, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
    return mpi


@functools.cache
def survives() -> bool:
    """Whether MPI lets the other processes go on when one is lost (ULFM)."""
    return env.started_by().survives


def leave_open() -> None:
    """Do not finalize MPI: something is still under way, for which that would wait without end."""
    atexit.unregister(_finalize)


def _finalize() -> None:
    mpi = load()
    if getattr(sys, "last_value", None) is None and not mpi.Is_finalized():
        mpi.Finalize()
