"""Local launcher: workers are forks of a process that has imported torch, or new Python processes."""
