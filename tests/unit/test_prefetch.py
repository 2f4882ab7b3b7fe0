"""What is loaded for a device is on its way one step ahead; what is there already is used as it is."""

import gc

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.feed import Feed
from paceline.data.loading.prefetch import Upload, upload_stream
from paceline.data.order import Order

ORDER = Order(length=12, batch=4, microbatches=2, seed=0)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Read(Dataset[torch.Tensor]):
    """Numbers, and which of them have been asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        self.asked.append(number)
        return torch.tensor([float(number)])


def own(step: int) -> list[range]:
    return [range(0, 1), range(1, 2)]


def samples(stop: int) -> list[int]:
    return [one for step in range(stop) for part in ORDER.microbatches_of(step) for one in part]


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 0), ("meta", 1)])
def test_the_next_step_is_loaded_before_a_step_is_given(device: str, ahead: int) -> None:
    data = Read()
    steps = Feed(data, ORDER, torch.device(device)).steps(0, 3, own)
    for step in range(3):
        groups = next(steps)
        assert [group.data.device.type for group in groups] == [device, device]
        assert [group.samples for group in groups] == [2, 2]
        assert set(data.asked) == set(samples(min(3, step + 1 + ahead)))
    assert next(steps, None) is None


def test_what_is_loaded_inside_a_step_is_measured() -> None:
    feed = Feed(Read(), ORDER, torch.device("cpu"))
    assert len(next(feed.steps(0, 3, own))) == 2 and feed.take_seconds() == 0.0, "that wait is of the loop"
    feed.load(1, own(1))
    assert feed.take_seconds() > 0.0 == feed.take_seconds()


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 0), ("meta", 1)])
def test_steps_without_groups_are_not_loaded_later(device: str, ahead: int) -> None:
    """A strategy that loads during the step, such as stealing, gives way to one that has its groups loaded."""
    data, groups = Read(), list[range]()
    steps = Feed(data, ORDER, torch.device(device)).steps(0, 5, lambda step: groups.copy())
    assert [next(steps), next(steps)] == [[], []]
    groups += own(0)
    assert [len(loaded) for loaded in steps] == [0] * ahead + [2] * (3 - ahead)
    wanted = [ORDER.microbatches_of(step) for step in range(2 + ahead, 5)]
    assert data.asked == [one for parts in wanted for part in parts for one in part]


def test_data_on_the_device_are_not_copied() -> None:
    value = torch.zeros(3, device="meta")
    data, text = Upload((value, "text"), torch.device("meta")).wait()
    assert data is value
    assert text == "text"


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_gpu_gets_the_samples(where: str, loaders: int) -> None:
    if where == "cuda" and loaders:
        pytest.skip("loader processes cannot read a GPU's memory")
    device = torch.device("cuda", 0)
    data = TensorDataset(torch.arange(12.0).to(where), torch.arange(12).to(where))
    found = []
    for groups in Feed(data, ORDER, device, loaders).steps(0, 3, own):
        assert all(one.device == device for group in groups for one in group.data)
        found += [int(one) for group in groups for one in group.data[1]]
    assert found == samples(3)
    gc.collect()  # ends the loader process, which has inherited the pipes of this one


@pytest.mark.cuda
@CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_copy_to_a_gpu_holds_up_the_host() -> None:
    device = torch.device("cuda", 0)
    stream = upload_stream(device)
    there = torch.zeros(4, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        here, same = Upload([torch.arange(1000.0), there], device, stream).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same is there
    assert torch.equal(here.cpu(), torch.arange(1000.0))
