"""Horovod's executors on a Ray cluster: workers that stay, and workers that are lost and come."""

import sys
from pathlib import Path

from ray_cluster import RayCluster

BEGIN = """
import os, signal, sys, time
from pathlib import Path
import ray, torch
from paceline.horovod.unchanged import FOLDER
sys.path.append(FOLDER)
from horovod.ray import ElasticRayExecutor, RayExecutor, ray_logger
from horovod.ray.elastic import RayHostDiscovery
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
import paceline.horovod.ray.workers

ray.init(sys.argv[1], log_to_driver=False)

def raised(call):
    try:
        call()
    except Exception as error:
        return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("nothing was raised")
"""
STAYING = """
class Counter:
    def __init__(self, first):
        import horovod.torch as hvd
        hvd.init()
        self.hvd, self.count = hvd, first

    def add(self, more):
        self.count += more
        ray_logger.log({"count": self.count})
        return os.getpid(), self.hvd.allreduce(torch.tensor(self.count + self.hvd.rank()), op=self.hvd.Sum).item()

    def places(self):
        return self.hvd.rank(), self.hvd.local_rank(), self.hvd.local_size(), self.hvd.size(), os.environ["MINE"]

    def ends(self, how, wait):
        if self.hvd.rank() == 1:
            how()
        if wait:
            self.hvd.allreduce(torch.ones(1))
        return "went on"

def fail():
    raise LookupError("no such thing")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def total(start, step=1):
    import horovod.torch as hvd
    return start + step * hvd.rank()

assert RayHostDiscovery().find_available_hosts_and_slots() == {"127.0.0.1": 4}
assert RayHostDiscovery(use_gpu=True, gpus_per_slot=2).find_available_hosts_and_slots() == {"127.0.0.1": 1}
hurried = RayExecutor.create_settings(timeout_s=100, placement_group_timeout_s=1)
settings = RayExecutor.create_settings(timeout_s=100, placement_group_timeout_s=100)
text = raised(RayExecutor(hurried, num_workers=9).start)
assert issubclass(paceline.horovod.ray.workers.NoRoom, TimeoutError) and text.startswith("NoRoom "), text
assert "9 x 1 CPU asked for, together; there: 127.0.0.1 with 2 CPU" in text, text

executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=2)
executor.start(Counter, [10], extra_env_vars={"MINE": "own"})
first, heard = executor.execute(lambda it: it.add(1)), []
second = executor.execute(lambda it: it.add(1), callbacks=[heard.append])
assert [total for _, total in first + second] == [50] * 4 + [54] * 4
assert [pid for pid, _ in first] == [pid for pid, _ in second]
assert heard == [{"count": 12}], heard
assert sorted(executor.execute(lambda it: it.places())) == [(rank, rank % 2, 2, 4, "own") for rank in range(4)]
assert executor.run(total, [1], {"step": 5}) == ray.get(executor.run_remote(total, [1, 5])) == [1, 6, 11, 16]
assert executor.execute_single(lambda it: it.places()[0]) == 0
text = raised(lambda: executor.execute(lambda it: it.ends(fail, wait=False)))
assert text.startswith("LookupError no such thing Rank 1 of 4 on 127.0.0.1:") and "in ends" in text, text
assert "did not end" not in text
assert [total for _, total in executor.execute(lambda it: it.add(0))] == [54] * 4
text = raised(lambda: executor.execute(lambda it: it.ends(fail, wait=True)))
assert text.startswith("LookupError no such thing Rank 1 of 4 on 127.0.0.1: ranks 0, 2, 3 did not end"), text
assert "call start() before" in raised(lambda: executor.run(total, [1]))

executor = RayExecutor(settings, num_workers=2, use_gpu=True)
executor.start(Counter, [0])
assert executor.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == ["0,1"] * 2
text = raised(lambda: executor.execute(lambda it: it.ends(die, wait=True)))
assert text.startswith("RunFailed Rank 1 of 2 on 127.0.0.1 was lost: "), text
executor.shutdown()

@ray.remote(num_cpus=0)
def inside():
    executor = RayExecutor(settings, num_workers=2)
    executor.start()
    found = executor.run(lambda: ray.get_runtime_context().get_placement_group_id())
    executor.shutdown()
    return found

group = ray.util.placement_group([{"CPU": 1}] * 2)
strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
assert ray.get(inside.options(scheduling_strategy=strategy).remote(), timeout=100) == [group.id.hex()] * 2
ray.util.remove_placement_group(group)
text = raised(lambda: RayExecutor(num_workers=2).start(extra_env_vars={"A=B": "1"}))
assert "rank 0 of 2 did not take its variables" in text, text
print("all is well")
"""
ELASTIC = """
def train(folder):
    import horovod.torch as hvd
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def steps(state):
        while state.sizes.count(4) < 4:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            if state.sizes.count(2) == 5 and hvd.rank() == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            state.sizes.append(hvd.size())
            if state.step % 2 == 0:
                ray_logger.log((state.step, hvd.size()))
                state.commit()
            if hvd.size() == 2 and (folder / "killed").exists():
                (folder / f"two-{hvd.rank()}").write_text("here")
            time.sleep(0 if hvd.size() == 4 else 0.1)
        return state.step

    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    steps(state)
    return hvd.rank(), hvd.size(), state.step, state.sizes, model.weight.tolist(), os.environ["MINE"]

heard = []
settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=4, timeout_s=100)
executor = ElasticRayExecutor(settings, env_vars={"MINE": "own"})
executor.start()
results = executor.run(lambda: train(Path.cwd()), callbacks=[heard.append])
assert [(rank, size, own) for rank, size, *_, own in results] == [(rank, 4, "own") for rank in range(4)], results
assert len({str(result[2:5]) for result in results}) == 1, results
_, _, step, sizes, *_ = results[0]
assert len(sizes) == step and sizes[-1] == 4, sizes
steps = [step for step, _ in heard]
assert steps == sorted(set(steps)) and steps[-1] == step - step % 2 and heard[-1][1] == 4, heard

executor = RayExecutor(min_workers=2, max_workers=2)
executor.start(dict, executable_kwargs={"own": 3})
assert executor.execute(lambda it: it["own"]) == [3, 3]
assert "workers of an elastic run end with each call" in raised(lambda: executor.run_remote(print))
print("all is well")
"""


def test_workers_that_stay(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add(num_cpus=2, num_gpus=2)
    (tmp_path / "drives.py").write_text(BEGIN + STAYING)
    code, said = cluster.start(sys.executable, "drives.py", str(cluster.address), cwd=tmp_path).wait()
    assert code == 0 and "all is well" in said, said


def test_workers_that_are_lost_and_come(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "drives.py").write_text(BEGIN + ELASTIC)
    run = cluster.start(sys.executable, "drives.py", str(cluster.address), cwd=tmp_path)
    run.wait_for(tmp_path, "two-*", 2)
    cluster.add()
    code, said = run.wait()
    assert code == 0 and "all is well" in said, said
