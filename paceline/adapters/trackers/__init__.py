"""Trackers of metrics, such as TensorBoard: readers of the events of rank 0, in threads of their own."""
