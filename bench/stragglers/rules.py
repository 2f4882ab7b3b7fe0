"""The update rules that are compared, and the settings that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: what the tables call it.
        settings: the arguments of ``paceline.start``.
        steps: whether all workers do the same step at the same time, so that a step has a beginning and an end.
        bitwise: whether ``exact`` gives the bits of all-reduce.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: bool = True
    bitwise: bool = False

    @property
    def strategy(self) -> str:
        """The name in the registry of strategies."""
        return str(self.settings["strategy"])


def _server(mode: str, steps: bool) -> Rule:
    return Rule(f"server-{mode}", {"strategy": "parameter-server", "server": {"mode": mode}}, steps)


_ALL = (
    Rule("allreduce", {"strategy": "allreduce"}, bitwise=True),
    Rule("backup-1", {"strategy": "backup", "backup": {"workers": 1}}),
    Rule("backup-2", {"strategy": "backup", "backup": {"workers": 2}}),
    Rule("stealing-even", {"strategy": "stealing", "shares": "even"}, bitwise=True),
    Rule("stealing", {"strategy": "stealing", "shares": "speed"}, bitwise=True),
    Rule("auto", {"strategy": "auto"}, bitwise=True),
    _server("sync", steps=True),
    _server("bounded", steps=False),
    _server("async", steps=False),
    Rule("hogwild", {"strategy": "hogwild"}, steps=False),
    Rule("local-sgd", {"strategy": "local-sgd", "local": {"replicas": 8}}),
    Rule("local-uneven", {"strategy": "local-sgd", "local": {"replicas": 8, "uneven": True}}, steps=False),
    Rule(
        "local-quorum",
        {"strategy": "local-sgd", "local": {"replicas": 8, "uneven": True, "quorum": 6, "grace_seconds": 0.5}},
        steps=False,
    ),
)
RULES = {rule.name: rule for rule in _ALL}


def available(names: list[str]) -> tuple[list[Rule], list[str]]:
    """The rules of these names whose strategy is there, and a line for each that is not."""
    from paceline.strategies.registry import names as strategy_names

    rules = [RULES[name] for name in names]
    there = [rule for rule in rules if rule.strategy in strategy_names()]
    missing = [f"{rule.name}: left out, there is no strategy {rule.strategy!r}" for rule in rules if rule not in there]
    return there, missing
