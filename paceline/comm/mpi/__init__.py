"""MPI as a back end of ``torch.distributed``, through mpi4py, in processes that mpiexec has started."""
