"""``paceline dashboard``: look at runs in a browser."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.observing.logs import RunsDir
from paceline.errors import ConfigError

CONTEXT: dict[str, object] = {}
MORE_HELP = """ Runs may still train; the page follows them.

The page needs no network beside this server, which answers this machine only, and only addresses with its token.
"""


def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Names or folders of runs; by default the newest 20.", metavar="RUN", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token in the address of the page.", metavar="TEXT", show_default="random")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Look at runs in a browser."""
    from paceline.launchers.runs import found, newest
    from paceline.observe.dashboard.server import Dashboard

    folders = [found(runs_dir, run).resolve() for run in runs] if runs else newest(runs_dir)[:20]
    if not folders:
        found(runs_dir, None)  # raises
    chosen = secrets.token_urlsafe(16) if token is None else token
    if not chosen.isascii() or not chosen.replace("-", "").replace("_", "").isalnum():
        raise ConfigError("--token consists of letters, digits, - and _ only, because it is a part of an address.")
    try:
        server = Dashboard(folders, (host, port), chosen)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror}.") from None
    with server:
        print(f"{server.url} shows {', '.join(folder.name for folder in folders)}. End with Ctrl-C.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
