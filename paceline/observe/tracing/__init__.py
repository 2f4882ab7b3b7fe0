"""Traces: what each worker did on one clock, as slices on tracks, and the file that Perfetto reads."""
