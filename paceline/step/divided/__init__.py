"""State of which each worker has a share: put together on all workers, or tensor by tensor where it is needed."""
