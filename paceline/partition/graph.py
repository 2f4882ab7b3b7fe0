"""The operations of an exported model, grouped into layers between which it may be cut."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx, nn

from paceline.partition.aliasing import Aliasing
from paceline.partition.exported_model import ExportedModel
from paceline.partition.layers import Layer, assign_operations


class Trace:
    """The layers of a model in one mode (training, evaluation), for any number of samples.

    ``names``: of the layers. ``exported``: their operations. ``aliasing``: which values share memory.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.exported = ExportedModel(model, example)
        self.aliasing = Aliasing(self.exported.operations, self.exported.root)
        self._set_layers(assign_operations(self.exported.operations, model))
        self._set_layers(self._merge_at(self._forbidden_boundaries()))

    def operations(self, begin: int, end: int) -> list[fx.Node]:
        """Those of the layers ``begin <= layer < end``."""
        return [node for layer in self._layers[begin:end] for node in layer.operations]

    def live_at(self, boundary: int) -> list[fx.Node]:
        """The values computed before a layer and used in it or later."""
        return [node for node, producer in self._producers.items() if producer < boundary <= self._last_uses[node]]

    def producer(self, node: fx.Node) -> int:
        """The layer that computes a value; -1 for an input of the model."""
        return self._producers.get(node, -1)

    def _set_layers(self, layers: list[Layer]) -> None:
        self._layers = layers
        self.names = [layer.name for layer in layers]
        self._producers = dict.fromkeys(self.exported.inputs, -1)
        for place, layer in enumerate(layers):
            self._producers.update(dict.fromkeys(layer.operations, place))
        self._last_uses = {node: max(self._uses(node), default=-1) for node in self._producers}
        for leaf in self.exported.output:
            if leaf in self._producers:
                self._last_uses[leaf] = len(layers) - 1

    def _uses(self, node: fx.Node) -> list[int]:
        return [self._producers[user] for user in node.users if user in self._producers]

    def _merge_at(self, boundaries: set[int]) -> list[Layer]:
        merged: list[Layer] = []
        for place, layer in enumerate(self._layers):
            if place in boundaries:
                merged[-1].operations.extend(layer.operations)
            else:
                merged.append(layer)
        return merged

    def _forbidden_boundaries(self) -> set[int]:
        """Where no cut may be: a later change in place would be seen on one side only."""
        alias_set = self.aliasing.alias_set
        mutated_in: dict[fx.Node, set[int]] = defaultdict(set)
        for node, values in self.aliasing.mutations.items():
            for value in values:
                mutated_in[alias_set(value)].add(self._producers[node])
        for buffer, value in self.exported.assigned:
            mutated_in[alias_set(buffer)].add(max(0, self.producer(value)))
        forbidden = set()
        for boundary in range(1, len(self._layers)):
            live = [alias_set(node) for node in self.live_at(boundary)]
            if any(live.count(one) > 1 and max(mutated_in.get(one, {-1})) >= boundary for one in live):
                forbidden.add(boundary)
        of_model = {alias_set(node) for node in self.exported.tensors}
        for one in mutated_in.keys() & of_model:
            aliases = (node for node in [*self.exported.tensors, *self._producers] if alias_set(node) is one)
            layers = mutated_in[one].union(*(self._uses(node) for node in aliases))
            forbidden |= set(range(min(layers) + 1, max(layers) + 1))
        return forbidden
