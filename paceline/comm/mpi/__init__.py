"""MPI back end of ``torch.distributed``, through mpi4py, for processes that mpiexec has started."""
