"""What somebody has set and the strategy at work does not read is known."""

import pytest

from paceline.config import resolve
from paceline.strategies.registry import without_effect


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"strategy": "allreduce", "server": {"mode": "async"}, "shares": "even"}, ["shares", "server.mode"]),
        ({"strategy": "allreduce", "batch": 8, "checkpoint": "here"}, []),
        ({"strategy": "stealing", "shares": "even"}, []),
        ({"strategy": "hogwild", "server": {"scale_lr": True}}, ["server.scale_lr"]),
        ({"strategy": "local-sgd", "local": {"every": 2}, "backup": {"workers": 1}}, ["backup.workers"]),
        ({"strategy": "backup", "backup": {"workers": 2}}, []),
        ({"strategy": "backup", "backup": {"workers": 2}, "reduction": "tree"}, ["reduction"]),
        ({"strategy": "backup", "backup": {"workers": 0}, "reduction": "tree"}, []),
        ({"strategy": "parameter-server", "server": {"staleness": 2}}, ["server.staleness"]),
        ({"strategy": "parameter-server", "server": {"staleness": 2, "mode": "bounded"}}, []),
        ({"strategy": "parameter-server", "backup": {"workers": 1}}, []),
    ],
    ids=str,
)
def test_settings_without_effect(given: dict[str, object], keys: list[str]) -> None:
    resolved = resolve(given)
    assert (
        without_effect(resolved.settings, [key for key, source in resolved.sources.items() if source != "default"])
        == keys
    )
