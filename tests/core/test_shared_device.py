"""Workers that share a device: through the memory of the host and gloo, with the bits of the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
import torch
import paceline
from paceline.comm.transport import choice
from paceline.comm.transport.through_host import ThroughHost
from subjects import CASES, tell

ways, device = eval(os.environ["GIVEN"])
if device == "standin":
    import accelerator
    accelerator.install("the only one")
elif device == "through host":  # what is copied is on the CPU already
    choice.use(ThroughHost)
for settings in ways:
    try:
        session = paceline.start(**CASES["batch norm, dropout, short batch"]() | settings)
        for batch in session.batches(steps=4):
            session.step(batch)
        transport = session._context.world.transport
        assert device == "cpu" or session.workers == 1 or type(transport) is ThroughHost
        kinds = {one.device.type for one in session._context.compute.model.parameters()}
        assert device not in ("standin", "cuda") or kinds - {"meta"} == {device}
        tell(**{repr(settings): session.fingerprint()})
    except paceline.ConfigError as error:
        tell(**{repr(settings): str(error)})
"""
WHOLE: list[dict[str, Any]] = [
    {"exact": True},
    {"exact": "fixed-point"},
    {"exact": False, "reduction": "tree"},
    {"exact": False, "reduction": "collective"},
    {"exact": True, "strategy": "stealing"},
    {"exact": True, "strategy": "sharded"},
]
CUT: list[dict[str, Any]] = [
    {"exact": True, "strategy": "pipeline", "pipeline": {"schedule": "1f1b", "cut": ["3"]}},
    {"exact": True, "strategy": "pipeline", "pipeline": {"schedule": "zb-v", "cut": ["3", "4", "6"]}},
    {"strategy": "pipeline", "pipeline": {"schedule": "pipedream", "cut": ["3"]}},
    {"exact": True, "strategy": "diloco", "local": {"every": 2}},
]
"""The stand-in has no storages, by which layers that share memory are found, and weights are swapped."""
FORMATS = ["bfloat16", "float16", "int8", "int4", "topk", "randomk", "onebit", "powersgd"]
SHARDED = [
    *({"exact": True, "strategy": "sharded", "shard": one} for one in ("optimizer", "gradients")),
    {"exact": True, "strategy": "sharded", "shard_copy": True},
    {"exact": "fixed-point", "strategy": "sharded"},
]
LOCAL = [{"every": 2}, {"every": 4, "fragments": 2, "delay": 1}]
REFUSED: list[dict[str, Any]] = [{"strategy": "parameter-server"}, {"strategy": "hogwild"}]


@pytest.mark.slow
def test_the_bits_are_those_of_the_cpu(printed: Printed, tmp_path: Path) -> None:
    def run(ways: list[dict[str, Any]], device: str) -> list[dict[str, str]]:
        (tmp_path / device).mkdir()
        return printed(SCRIPT, 2, tmp_path / device, environment={"GIVEN": repr((ways, device))})

    usual = run(WHOLE + CUT, "cpu")
    for ways, device in ((WHOLE, "standin"), (CUT, "through host")):
        for found, wanted in zip(run(ways + REFUSED, device), usual, strict=True):
            for settings in ways:
                assert found[repr(settings)] == wanted[repr(settings)], settings
            for settings in REFUSED:
                assert "'allreduce'" in found[repr(settings)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [2, 3])
def test_the_bits_on_one_gpu_are_those_of_one_worker_there(printed: Printed, tmp_path: Path, workers: int) -> None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

    def run(ways: list[dict[str, Any]], count: int) -> list[dict[str, str]]:
        (tmp_path / str(count)).mkdir()
        environment = {"GIVEN": repr((ways, "cuda")), "CUDA_VISIBLE_DEVICES": first}
        return printed(SCRIPT, count, tmp_path / str(count), environment=environment, deadline=300)

    cut = CUT[: 4 - workers]  # zb-v has two stages on each of two workers
    ways = [one for one in WHOLE + SHARDED + cut if one.get("exact")]
    clipped = [one | {"clip_norm": 0.05} for one in ways if one.get("strategy") in (None, "sharded", "pipeline")]
    whole = [{"exact": exact, **clip} for exact in (True, "fixed-point") for clip in ({}, {"clip_norm": 0.05})]
    (alone,) = run(whole, 1)
    for found in run(ways + clipped, workers):
        for settings in ways + clipped:
            wanted = {key: settings[key] for key in ("exact", "clip_norm") if key in settings}
            assert found[repr(settings)] == alone[repr(wanted)], settings


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [2, 3])
def test_what_rounds_has_the_same_bits_with_several_on_one_gpu(printed: Printed, tmp_path: Path, workers: int) -> None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    ways: list[dict[str, Any]] = [{"exact": True, "wire": wire} for wire in FORMATS]
    ways += [{"exact": True, "strategy": "diloco", "local": local} for local in LOCAL]
    sharded = [one | {"strategy": "sharded"} for one in ways if one.get("wire") in FORMATS[:4]]

    def run(ways: list[dict[str, Any]], count: int) -> list[dict[str, str]]:
        (tmp_path / str(count)).mkdir()
        environment = {"GIVEN": repr((ways, "cuda")), "CUDA_VISIBLE_DEVICES": first}
        return printed(SCRIPT, count, tmp_path / str(count), environment=environment, deadline=300)

    (alone,) = run(ways, 1)
    for found in run(ways + sharded, workers):
        for settings in ways:
            assert found[repr(settings)] == alone[repr(settings)], settings
        for settings in sharded:
            assert found[repr(settings)] == alone[repr({"exact": True, "wire": settings["wire"]})], settings
