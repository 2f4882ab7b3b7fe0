"""Trackers of metrics, such as TensorBoard: readers of rank 0's events, each in its own thread."""
