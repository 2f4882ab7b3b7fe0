"""Slurm: job submission, batch scripts, and agents started by srun."""
