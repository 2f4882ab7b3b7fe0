"""Memory that several values of a trace share, and that an operation changes in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

# Their running statistics (arguments 3 and 4) are changed if argument 5 is true, which torch does not declare.
_STATISTICS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}


class Aliasing:
    """Groups of values that share memory.

    ``changes``: for each operation, the values that it changes in place.
    """

    def __init__(self, operations: Iterable[fx.Node], root: torch.nn.Module) -> None:
        self._root = root
        self._parents: dict[fx.Node, fx.Node] = {}
        self.changes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in operations:
            if node.op == "call_function":
                self._add(node)

    def group(self, node: fx.Node) -> fx.Node:
        """The same for all values that share memory."""
        while node in self._parents:
            node = self._parents[node]
        return node

    def _join(self, left: fx.Node, right: fx.Node) -> None:
        left, right = self.group(left), self.group(right)
        if left is not right:
            self._parents[left] = right

    def _add(self, node: fx.Node) -> None:
        if node.target is getitem:
            self._join(node, node.args[0])  # type: ignore[arg-type]
        elif isinstance(node.target, torch._ops.OpOverload):
            self._add_operator(node, node.target)
        else:
            self._add_nested(node)
        if node.target in _STATISTICS and node.args[5]:
            self.changes[node] += _nodes(node.args[3:5])

    def _add_operator(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        schema = target._schema
        shares = any(value.alias_info is not None for value in schema.returns)
        for place, argument in enumerate(schema.arguments):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is None:
                continue
            for value in _nodes(given):
                if shares:
                    self._join(node, value)
                if argument.alias_info.is_write:
                    self.changes[node].append(value)

    def _add_nested(self, node: fx.Node) -> None:
        """An operation that calls listed operations, such as those under ``torch.no_grad``."""
        graphs = [value for value in _nodes(node.args) if value.op == "get_attr"]
        given = [value for value in _nodes(node.args) if value.op != "get_attr"]
        for value in graphs:
            inner = getattr(self._root, str(value.target))
            aliases = Aliasing(inner.graph.nodes, inner)
            changed = {aliases.group(one) for values in aliases.changes.values() for one in values}
            returned = {aliases.group(one) for one in _nodes(inner.graph.output_node().args)}
            entries = [one for one in inner.graph.nodes if one.op == "placeholder"]
            for outside, inside in zip(given[len(given) - len(entries) :], entries, strict=True):
                if aliases.group(inside) in changed:
                    self.changes[node].append(outside)
                if aliases.group(inside) in returned:
                    self._join(node, outside)


def _nodes(values: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, fx.Node)]
