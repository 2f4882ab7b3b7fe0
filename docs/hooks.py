"""Reference tables, made from the settings, the commands and the errors themselves when the pages are built.

A page holds a comment such as ``<!-- settings: batch seed -->``, ``<!-- command: run -->`` or ``<!-- errors -->``, and
the table takes its place. mkdocs calls the functions ``on_...``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from typing import Any

import typer.main

from paceline import config, errors
from paceline.cli.main import _application
from paceline.settings import STRATEGIES, Settings

MARK = re.compile(r"^<!-- (settings|command|errors)(?:: ([^>]+?))? -->$", re.MULTILINE)
_NAME = re.compile(r"(?<![\w`./-])(?:--[a-z][a-z-]*[a-z]|[a-z]+_[a-z_]+[a-z])(?![\w`])")
_ROLE = re.compile(r":\w+:<code>~?([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page with tables in place of its comments."""
    tables = {"settings": settings, "command": command, "errors": error_classes}
    return MARK.sub(lambda mark: tables[mark[1]](*(mark[2] or "").split()), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Return a built page in which roles of docstrings, such as ``:class:``, link to the object that they name."""
    return _ROLE.sub(_link, html)


def _link(role: re.Match[str]) -> str:
    name = role[1]
    target = name if name.startswith("paceline.") else f"paceline.Session.{name}"
    return f'<autoref identifier="{target}" optional><code>{name.removeprefix("paceline.")}</code></autoref>'


def settings(*keys: str) -> str:
    """Return the table of some settings."""
    schema, defaults = Settings.model_json_schema(), config.flat_keys()
    rows = [
        (_code(key), _values(key, schema), _code(_written(defaults[key])), _shown(config.describe(key))) for key in keys
    ]
    return _table(("setting", "values", "default", "meaning"), rows)


def _values(key: str, schema: Mapping[str, Any]) -> str:
    """Return which values a setting accepts, from its JSON schema."""
    head, _, tail = key.partition(".")
    found = schema["properties"][head]
    if tail:
        found = schema["$defs"][found["$ref"].rpartition("/")[2]]["properties"][tail]
    if key == "strategy":
        found = {"enum": STRATEGIES}
    forms = [_form(one) for one in found.get("anyOf", [found]) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(forms))


def _form(schema: Mapping[str, Any]) -> str:
    if choices := [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
        return ", ".join(map(_code, choices))
    kind = schema["type"]
    if kind == "array":
        return f"list: {_form(schema['items'])}"
    words = {"boolean": "`true`, `false`", "string": schema.get("format", "text"), "integer": "integer"}.get(kind, kind)
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("le", schema.get("maximum")), schema.get("exclusiveMaximum")
    limits = [("≥", least), (">", above), ("≤", most), ("<", below)]
    shown = [f"{sign}\u00a0{limit:,}" for sign, limit in limits if limit is not None and abs(limit) < 2**31 - 1]
    return " ".join([words, ", ".join(shown)]).strip()


def _written(value: object) -> str:
    """Return a default as the command line takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def command(name: str) -> str:
    """Return the usage, the help and the table of options of a command."""
    found: Any = typer.main.get_command(_application([name])).commands[name]  # type: ignore[attr-defined]
    with found.make_context(f"paceline {name}", [], resilient_parsing=True) as context:
        records = [(one, one.get_help_record(context)) for one in found.params]
    options = [_option(one, *record) for one, record in records if record and one.param_type_name == "option"]
    usage = " ".join(["paceline", name, *found.collect_usage_pieces(context)]).translate(
        {ord("{"): None, ord("}"): None}
    )
    table = _table(("option", "default", "meaning"), options) if options else ""
    return f"```\n{usage}\n```\n\n{_shown(cleandoc(found.help))}\n\n{table}"


def _option(parameter: Any, names: str, text: str) -> tuple[str, str, str]:
    spellings = (*parameter.opts, *parameter.secondary_opts)
    meaning, _, extra = text.partition("  [default: ")
    default, _, limits = extra.removesuffix("]").partition("; ")
    value = names.split(", ")[-1].partition(" ")[2]
    written = [_code(f"{one} {value}".strip()) for one in spellings]
    return ", ".join(written), _shown(default.strip("()")), _shown(f"{meaning}  [{limits}]" if limits else meaning)


def error_classes() -> str:
    """Return the tree of the errors, and the table of their exit codes."""
    tree = cleandoc(errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.PacelineError)]
    rows = [(_code(one.__name__), str(one.exit_code), (one.__doc__ or "").partition("\n")[0]) for one in kinds]
    return f"```\n{cleandoc(tree)}\n```\n\n{_table(('class', 'exit code', 'meaning'), rows)}"


def _shown(text: str) -> str:
    """Return a text of the command line for a page, with options and names of settings as code."""
    return _NAME.sub(r"`\g<0>`", text.replace("<", "&lt;"))


def _code(value: object) -> str:
    return f"`{value}`" if value != "" else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len([*head]), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
