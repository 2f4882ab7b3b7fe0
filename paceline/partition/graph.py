"""The operations of a traced model, shared out to layers between which it may be cut."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx, nn

from paceline.partition.aliasing import Aliasing
from paceline.partition.layers import Run, runs_of
from paceline.partition.program import ExportedModel


class Trace:
    """The layers of a model in one mode (training, evaluation), for any number of samples.

    ``names``: of the layers. ``program``: their operations. ``aliases``: those that share memory.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.program = ExportedModel(model, example)
        self.aliases = Aliasing(self.program.operations, self.program.root)
        self._set(runs_of(self.program.operations, model))
        self._set(self._joined(self._barred()))

    def operations(self, begin: int, end: int) -> list[fx.Node]:
        """Those of the layers from ``begin`` to ``end - 1``."""
        return [node for run in self._runs[begin:end] for node in run.operations]

    def crossing(self, place: int) -> list[fx.Node]:
        """The values that are made before a layer, and used in it or later."""
        return [node for node, made in self._made.items() if made < place <= self._used[node]]

    def made(self, node: fx.Node) -> int:
        """The layer that makes a value; -1 for the input of the model."""
        return self._made.get(node, -1)

    def _set(self, runs: list[Run]) -> None:
        self._runs = runs
        self.names = [run.name for run in runs]
        self._made = dict.fromkeys(self.program.inputs, -1)
        for place, run in enumerate(runs):
            self._made.update(dict.fromkeys(run.operations, place))
        self._used = {node: max(self._users(node), default=-1) for node in self._made}
        for leaf in self.program.output:
            if leaf in self._made:
                self._used[leaf] = len(runs) - 1

    def _users(self, node: fx.Node) -> list[int]:
        return [self._made[user] for user in node.users if user in self._made]

    def _joined(self, barred: set[int]) -> list[Run]:
        joined: list[Run] = []
        for place, run in enumerate(self._runs):
            if place in barred:
                joined[-1].operations.extend(run.operations)
            else:
                joined.append(run)
        return joined

    def _barred(self) -> set[int]:
        """The places where no cut may be: a change there or later would be seen on one side only."""
        group = self.aliases.group
        changed: dict[fx.Node, set[int]] = defaultdict(set)
        for node, values in self.aliases.changes.items():
            for value in values:
                changed[group(value)].add(self._made[node])
        for buffer, value in self.program.assigned:
            changed[group(buffer)].add(max(0, self.made(value)))
        barred = set()
        for place in range(1, len(self._runs)):
            crossing = [group(node) for node in self.crossing(place)]
            if any(crossing.count(one) > 1 and max(changed.get(one, {-1})) >= place for one in crossing):
                barred.add(place)
        of_model = {group(node) for node in self.program.tensors}
        for one in changed.keys() & of_model:
            members = (node for node in [*self.program.tensors, *self._made] if group(node) is one)
            layers = changed[one].union(*(self._users(node) for node in members))
            barred |= set(range(min(layers) + 1, max(layers) + 1))
        return barred
