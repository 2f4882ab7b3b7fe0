"""Ways to mutate the text of a Python module: each gives one small change that keeps it a module."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt,), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
_TOLD = {"_log", "log", "logging", "warnings", "print", "warn"}
_Found = Iterator[tuple[str, ast.expr | ast.stmt, str]]
"""Of each mutation of a node: its kind, what is replaced, and the new text."""
_UNTRIED = {"__repr__", "__str__", "__del__"}


@dataclass(frozen=True, order=True)
class Edit:
    """One change: the text between two positions becomes another."""

    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    after: str
    before: str

    def apply(self, source: str) -> str:
        """Return the mutated source."""
        lines = source.encode().splitlines(keepends=True)
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return (head + self.after.encode() + tail).decode()


def edits(source: str) -> list[Edit]:
    """Return all mutations of a module, in the order of its lines."""
    lines = source.encode().splitlines(keepends=True)
    found = {edit for node in _tried(ast.parse(source), False) for edit in _of(node, lines)}
    return sorted(edit for edit in found if edit.before != edit.after)


def _tried(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """Walk through code that decides or acts: no docstrings, messages, annotations, logging or assertions."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or not _is_tried(child, inside):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _tried(child, inside or isinstance(child, ast.FunctionDef))


def _is_tried(node: ast.AST, inside: bool) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name not in _UNTRIED
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False
    if isinstance(node, ast.Call) and {one.id for one in ast.walk(node.func) if isinstance(one, ast.Name)} & _TOLD:
        return False
    plain = (ast.Assign, ast.AnnAssign)  # a limit or a size of the module
    if isinstance(node, plain) and not inside and isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple | None):
        return False
    return not isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)


def _of(node: ast.AST, lines: list[bytes]) -> Iterator[Edit]:
    for way in (_conditions, _numbers, _calls, _effects, _jumps, _early_returns):
        for kind, replaced, text in way(node):
            first, column = replaced.lineno, replaced.col_offset
            last, end = replaced.end_lineno or first, replaced.end_col_offset or 0
            whole = b"".join(lines[first - 1 : last])
            before = whole[column : len(whole) - len(lines[last - 1]) + end].decode()
            yield Edit(first, column, last, end, kind, text, " ".join(before.split()))


def _conditions(node: ast.AST) -> _Found:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                yield "comparison", node, _text(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    if isinstance(node, ast.BoolOp):
        yield "and/or", node, _text(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            yield "condition removed", node, _text(node, values=rest) if rest[1:] else f"({ast.unparse(rest[0])})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node, f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        yield "negated", node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield "filter removed", test, "True"


def _numbers(node: ast.AST) -> _Found:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "flag", node, repr(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", node, repr(node.value + 1)
        if node.value > 0:
            yield "off by one", node, repr(node.value - 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not isinstance(node.left, ast.Constant):
        yield "operator", node, f"({_text(node, op=_OPERATORS[type(node.op)]())})"
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper", "step"):
            if getattr(node, name) is not None:
                yield "slice", node, _text(node, **{name: None})


def _calls(node: ast.AST) -> _Found:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        name = _CALLS[node.func.id]
        yield "function", node, _text(node, func=ast.Name(name), keywords=[] if name == "list" else node.keywords)
    names = ast.Name | ast.Attribute
    for index, (left, right) in enumerate(pairwise(node.args)):
        if isinstance(left, names) and isinstance(right, names) and ast.unparse(node.func) != "isinstance":
            yield "swapped", node, _text(node, args=[*node.args[:index], right, left, *node.args[index + 2 :]])


def _effects(node: ast.AST) -> _Found:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call removed", node, "pass"
    if isinstance(node, ast.Raise):
        yield "raise removed", node, "pass"
    if isinstance(node, ast.AugAssign):
        yield "statement removed", node, "pass"
        if type(node.op) in _OPERATORS:
            yield "operator", node, _text(node, op=_OPERATORS[type(node.op)]())
    if isinstance(node, ast.Assign) and all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets):
        yield "statement removed", node, "pass"


def _jumps(node: ast.AST) -> _Found:
    if isinstance(node, ast.Break):
        yield "break", node, "continue"
    if isinstance(node, ast.Continue):
        yield "continue", node, "pass"
        yield "continue", node, "break"
    if isinstance(node, ast.Return) and node.value is None:
        yield "return removed", node, "pass"


def _early_returns(node: ast.AST) -> _Found:
    if not isinstance(node, ast.FunctionDef) or node.name == "__init__":
        return
    body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    ends = [one for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
    if not any(one.value for one in ends):
        for statement in body[1:]:
            yield "returned early", statement, "return"


def _text(node: ast.expr | ast.stmt, **changes: object) -> str:
    """Return the text of the node with these fields changed."""
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return ast.unparse(ast.fix_missing_locations(changed))
