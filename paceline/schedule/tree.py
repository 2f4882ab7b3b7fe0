"""Canonical binary tree over the microbatches of a step.

Leaf *m* is the gradient of microbatch *m*. A node is identified by its level and its index: node ``(k, j)`` covers the
existing microbatches from ``j * 2**k`` to ``(j + 1) * 2**k - 1``. Eight microbatches::

    level 3                   (3,0)
    level 2          (2,0)             (2,1)
    level 1      (1,0)   (1,1)     (1,2)   (1,3)
    level 0       0  1    2  3      4  5    6  7

Floating-point sums depend on the order of additions. The tree fixes this order by the microbatches alone, so the sum
has the same bits whichever workers compute the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """Node of the tree: the sum of microbatches ``place * 2**level`` to ``(place + 1) * 2**level - 1``."""

    level: int
    place: int


def first_of(node: Node) -> int:
    """Return the first microbatch below a node."""
    return node.place << node.level


def sibling_of(node: Node) -> Node:
    """Return the other node with the same parent."""
    return Node(node.level, node.place ^ 1)


def parent_of(node: Node) -> Node:
    return Node(node.level + 1, node.place >> 1)


def nodes_of(microbatches: Iterable[int]) -> list[Node]:
    """Return the smallest set of nodes that covers exactly these microbatches, from left to right.

    >>> nodes_of([5, 0, 1, 4, 2])
    [Node(level=1, place=0), Node(level=0, place=2), Node(level=1, place=2)]
    """
    held: set[Node] = set()
    for microbatch in microbatches:
        node = Node(0, microbatch)
        while sibling_of(node) in held:
            held.remove(sibling_of(node))
            node = parent_of(node)
        held.add(node)
    return sorted(held, key=first_of)


def push(stack: list[tuple[Node, T]], node: Node, value: T, add: Callable[[T, T], T]) -> None:
    """Push the next node on the stack and add complete pairs, like a binary counter.

    ``add(left, right)`` returns the sum of two neighbors. The stack never holds more than one value per level.
    """
    while stack and _are_siblings(stack[-1][0], node):
        left, left_value = stack.pop()
        value = add(left_value, value)
        node = Node(left.level + 1, left.place >> 1)
    stack.append((node, value))


def merges(stack: Sequence[Node], node: Node) -> int:
    """Return the number of additions that :func:`push` of a node would make."""
    count = 0
    while count < len(stack) and _are_siblings(stack[-1 - count], node):
        node = Node(node.level + 1, node.place >> 1)
        count += 1
    return count


def _are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.place % 2 == 0 and right.place == left.place + 1


def fold(nodes: Iterable[tuple[Node, T]], add: Callable[[T, T], T]) -> list[tuple[Node, T]]:
    """Return the sums of the smallest set of nodes that covers these nodes, from left to right.

    >>> fold([(Node(0, 2), "c"), (Node(0, 3), "d"), (Node(1, 2), "ef")], str.__add__)
    [(Node(level=1, place=1), 'cd'), (Node(level=1, place=2), 'ef')]
    """
    stack: list[tuple[Node, T]] = []
    for node, value in nodes:
        push(stack, node, value, add)
    return stack


def total(nodes: Iterable[tuple[Node, T]], add: Callable[[T, T], T]) -> T:
    """Return the sum of all microbatches, from the nodes that cover them from left to right.

    If the number of microbatches is not a power of two, the right edge of the tree is incomplete. A node without a
    right sibling then moves up unchanged, which is the result of folding the counter from the right.
    """
    stack = fold(nodes, add)
    _, value = stack.pop()
    while stack:
        value = add(stack.pop()[1], value)
    return value
