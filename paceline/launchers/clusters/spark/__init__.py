"""Spark: agents as tasks of a barrier stage, or each agent as a separate job."""
