"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BEFORE_SCRIPT = {"allow_interspersed_args": False}
"""Everything after the script is passed to it, even what looks like an option of Paceline."""

Script = Annotated[Path, typer.Argument(help="The script that trains.", metavar="SCRIPT", show_default=False)]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="The script's own arguments.", metavar="[ARGUMENTS]...", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting, such as batch=64; may be repeated.", metavar="KEY=VALUE"),
]
Plan = Annotated[Path | None, typer.Option("--plan", help="A file (TOML) with settings.", metavar="FILE")]
