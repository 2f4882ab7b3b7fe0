"""MPI library of this process, through mpi4py: loaded, initialized once, and finalized unless the process fails.

mpi4py is configured neither to initialize nor to finalize MPI by itself. After an error MPI is not finalized, so that
mpiexec ends the other processes, which would otherwise wait in MPI for this process.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

from paceline.environments import env
from paceline.errors import StartError


def load() -> Any:
    """Import ``mpi4py.MPI`` without initializing MPI.

    Raises:
        ImportError, RuntimeError: mpi4py or an MPI library is missing.
    """
    import mpi4py

    env.choose_mpi()
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


@functools.cache
def initialized() -> Any:
    """Return ``mpi4py.MPI``, initialized for calls from several threads."""
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
        if not survives():  # with ULFM, finalizing may wait for a lost process, and mpiexec does not require it
            atexit.register(_finalize)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise StartError(
            "MPI was initialized for calls from one thread only. Let mpi4py initialize it (the default), or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
    return mpi


@functools.cache
def survives() -> bool:
    """Return whether MPI keeps the other processes running when a process is lost (ULFM)."""
    return env.started_by().survives


def leave_open() -> None:
    """Cancel the finalization of MPI, which would wait forever for an operation that is still in progress."""
    atexit.unregister(_finalize)


def _finalize() -> None:
    mpi = load()
    if getattr(sys, "last_value", None) is None and not mpi.Is_finalized():
        mpi.Finalize()
