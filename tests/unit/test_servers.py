"""How many servers there are when workers were lost, and that it is said."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.settings import Settings
from paceline.strategies.parameter_server.async_server import servers_among, warnings_of_servers


@pytest.mark.parametrize(
    ("workers", "dedicated", "servers"), [(4, False, 3), (3, False, 3), (2, False, 2), (4, True, 3), (3, True, 2)]
)
def test_fewer_workers_than_servers_asked_for(workers: int, dedicated: bool, servers: int) -> None:
    settings = Settings.model_validate({"server": {"count": 3, "dedicated": dedicated}})
    context: Any = SimpleNamespace(settings=settings, world=SimpleNamespace(size=workers))
    assert servers_among(settings, workers) == servers
    said = "".join(warnings_of_servers(context))
    assert (f"{workers} workers are left" in said and "server.count = 3" in said) == (servers < 3)
