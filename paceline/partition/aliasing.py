"""Which values of a trace share memory, and which operations change it in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

# They change their running statistics (arguments 3 and 4) if argument 5 is true, which their schemas do not declare.
_BATCH_STATISTICS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}


class Aliasing:
    """Alias sets: values that share memory (union-find).

    ``mutations``: the values that each operation changes in place.
    """

    def __init__(self, operations: Iterable[fx.Node], root: torch.nn.Module) -> None:
        self._root = root
        self._parents: dict[fx.Node, fx.Node] = {}
        self.mutations: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in operations:
            if node.op == "call_function":
                self._add(node)

    def alias_set(self, node: fx.Node) -> fx.Node:
        """The representative of a value's alias set."""
        while node in self._parents:
            node = self._parents[node]
        return node

    def _union(self, left: fx.Node, right: fx.Node) -> None:
        left, right = self.alias_set(left), self.alias_set(right)
        if left is not right:
            self._parents[left] = right

    def _add(self, node: fx.Node) -> None:
        if node.target is getitem:
            self._union(node, node.args[0])  # type: ignore[arg-type]
        elif isinstance(node.target, torch._ops.OpOverload):
            self._add_operator(node, node.target)
        else:
            self._add_nested(node)
        if node.target in _BATCH_STATISTICS and node.args[5]:
            self.mutations[node] += _nodes(node.args[3:5])

    def _add_operator(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        schema = target._schema
        returns_alias = any(value.alias_info is not None for value in schema.returns)
        for place, argument in enumerate(schema.arguments):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is None:
                continue
            for value in _nodes(given):
                if returns_alias:
                    self._union(node, value)
                if argument.alias_info.is_write:
                    self.mutations[node].append(value)

    def _add_nested(self, node: fx.Node) -> None:
        """An operation that runs a subgraph, such as the code under ``torch.no_grad``."""
        graphs = [value for value in _nodes(node.args) if value.op == "get_attr"]
        given = [value for value in _nodes(node.args) if value.op != "get_attr"]
        for value in graphs:
            inner = getattr(self._root, str(value.target))
            nested = Aliasing(inner.graph.nodes, inner)
            mutated = {nested.alias_set(one) for values in nested.mutations.values() for one in values}
            returned = {nested.alias_set(one) for one in _nodes(inner.graph.output_node().args)}
            inputs = [one for one in inner.graph.nodes if one.op == "placeholder"]
            for outside, inside in zip(given[len(given) - len(inputs) :], inputs, strict=True):
                if nested.alias_set(inside) in mutated:
                    self.mutations[node].append(outside)
                if nested.alias_set(inside) in returned:
                    self._union(node, outside)


def _nodes(values: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, fx.Node)]
