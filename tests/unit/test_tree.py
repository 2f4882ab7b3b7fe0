"""The canonical tree: whoever computes the leaves, the additions are the same."""

import random

import pytest

from paceline.schedule.shares import even
from paceline.schedule.tree import Node, first_of, fold, merges, nodes_of, push, total


def spelled(first: int, level: int, leaves: int) -> str | None:
    """The additions of the canonical tree, written out from its definition."""
    if first >= leaves:
        return None
    if level == 0:
        return str(first)
    left = spelled(first, level - 1, leaves)
    right = spelled(first + 2 ** (level - 1), level - 1, leaves)
    return left if right is None else f"({left}+{right})"


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def held(share: range) -> list[tuple[Node, str]]:
    stack: list[tuple[Node, str]] = []
    for leaf in share:
        expected = merges([node for node, _ in stack], Node(0, leaf))
        before = len(stack)
        push(stack, Node(0, leaf), str(leaf), add)
        assert before + 1 - len(stack) == expected
    return stack


def test_eight_leaves_on_three_workers() -> None:
    assert [nodes_of(share) for share in even(8, 3)] == [
        [Node(1, 0), Node(0, 2)],
        [Node(0, 3), Node(1, 2)],
        [Node(1, 3)],
    ]
    assert spelled(0, 3, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@pytest.mark.parametrize("leaves", range(1, 21))
def test_the_additions_do_not_depend_on_the_shares(leaves: int) -> None:
    for workers in range(1, leaves + 1):
        nodes = []
        for share in even(leaves, workers):
            stack = held(share)
            assert [node for node, _ in stack] == nodes_of(share)
            nodes += stack
        assert total(nodes, add) == spelled(0, 5, leaves)


@pytest.mark.parametrize("leaves", range(1, 30))
def test_the_fewest_nodes_of_microbatches_in_any_order(leaves: int) -> None:
    chance = random.Random(leaves)
    chosen = chance.sample(range(64), leaves)
    nodes = nodes_of(chosen)
    covered = [first_of(node) + place for node in nodes for place in range(1 << node.level)]
    assert covered == sorted(chosen)
    assert nodes == [node for node, _ in fold([(Node(0, one), "") for one in sorted(chosen)], str.__add__)]


def test_a_power_of_two_needs_one_node_for_each_worker() -> None:
    for workers in (1, 2, 4, 8):
        assert all(len(nodes_of(share)) == 1 for share in even(16, workers))


@pytest.mark.parametrize("leaves", [*range(2, 18)])
@pytest.mark.parametrize("machines", [(2, 2), (3, 1), (1, 2, 2), (4, 4)], ids=str)
def test_sums_made_inside_of_machines_first(machines: tuple[int, ...], leaves: int) -> None:
    shares = even(leaves, sum(machines))
    sums, first = [], 0
    for workers in machines:
        inside = [
            (node, spelled(node.place << node.level, node.level, leaves))
            for share in shares[first : first + workers]
            for node in nodes_of(share)
        ]
        sums += fold([(node, str(text)) for node, text in inside], add)
        first += workers
    assert total(sums, add) == spelled(0, (leaves - 1).bit_length(), leaves)
    if leaves == 16 and machines == (4, 4):
        assert [node for node, _ in sums] == [Node(3, 0), Node(3, 1)]
