import json
from pathlib import Path

import pytest

from paceline.launchers.base import Launch, Launcher, Machine, Request, bind, pays_preload
from paceline.settings import Settings

A, B, C, D = (frozenset({first, first + 1}) for first in (0, 2, 4, 6))


@pytest.mark.parametrize(
    ("domains", "workers", "expected"),
    [
        ((), 4, ()),
        ((A,), 4, ()),
        ((A, B), 2, (A, B)),
        ((A, B), 4, (A, A, B, B)),
        ((A, B), 3, (A, A, B)),
        ((A, B), 1, (A | B,)),
        ((A, B, C, D), 2, (A | B, C | D)),
        ((A, B, C), 2, (A, B | C)),
    ],
)
def test_workers_are_bound_to_memory_domains(
    domains: tuple[frozenset[int], ...], workers: int, expected: tuple[frozenset[int], ...]
) -> None:
    assert bind(domains, workers) == expected


@pytest.mark.parametrize(
    ("workers", "standby", "elastic", "pays"),
    [
        (1, 0, None, False),
        (2, 0, None, True),
        (1, 1, None, True),
        (1, 0, "1:4", True),  # it may be replaced
        (0, 0, "2:2", False),  # only other machines have workers
        (0, 1, "2:2", True),
    ],
)
def test_one_import_is_made_where_it_serves_several(
    workers: int, standby: int, elastic: str | None, pays: bool
) -> None:
    assert pays_preload(workers, standby, elastic) is pays


def laid_out(request: Request, inherited: dict[str, str] | None = None, **settings: object) -> Launch:
    machine = Machine(frozenset(range(8)))
    return Launcher.decide(request, Settings.model_validate(settings), machine, inherited or {}, Path("/runs/a"), 1234)


def test_a_worker_gets_torchruns_variables() -> None:
    environment = laid_out(Request(Path("train.py"), workers=4)).worker(2, 2).environment
    expected = {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "ROLE_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PACELINE_RUN": "/runs/a",
        "PYTHONHASHSEED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert expected.items() <= environment.items()


def test_settings_and_plan_reach_the_workers() -> None:
    request = Request(Path("train.py"), settings={"batch": "64"}, plan=Path("/plans/big.toml"))
    environment = laid_out(request).environment
    assert json.loads(environment["PACELINE_SET"]) == {"batch": "64"}
    assert environment["PACELINE_PLAN"] == "/plans/big.toml"
    assert "PACELINE_PLAN" not in laid_out(Request(Path("train.py"))).environment


@pytest.mark.parametrize(
    ("workers", "settings", "threads"),
    [
        (1, {}, "8"),
        (3, {}, "2"),
        (16, {}, "1"),
        (2, {"exact": True}, "1"),
        (2, {"exact": True, "threads": 3}, "3"),
    ],
)
def test_threads_of_a_worker(workers: int, settings: dict[str, object], threads: str) -> None:
    launch = laid_out(Request(Path("train.py"), workers=workers), **settings)
    assert launch.environment["OMP_NUM_THREADS"] == threads


def test_what_the_user_exported_stays() -> None:
    exported = {
        "OMP_NUM_THREADS": "5",
        "PYTHONHASHSEED": "7",
        "GLOO_SOCKET_IFNAME": "eth0",
        "WORLD_SIZE": "9",
    }
    environment = laid_out(Request(Path("train.py"), workers=2), exported).environment
    assert [environment[name] for name in exported] == ["5", "7", "eth0", "2"]
