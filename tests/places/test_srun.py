"""Scripts that Slurm's srun starts."""

from slurm_cluster import SlurmCluster


def test_tasks_on_two_nodes(slurm: SlurmCluster) -> None:
    said = slurm.run("srun", "-N", "2", "-n", "3", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    assert sorted(said.split()[::2]) == ["0", "1", "2"]
    assert set(said.split()[1::2]) == {"n1", "n2"}
