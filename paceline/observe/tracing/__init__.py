"""Traces: what each worker did, as slices on tracks, and the file that Perfetto reads."""
