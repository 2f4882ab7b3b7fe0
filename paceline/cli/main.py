"""Command ``paceline``. Only the module of the chosen command is imported, so ``--help`` is quick."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Annotated, Any

import typer

from paceline.environments import env
from paceline.errors import ConfigError, PacelineError

COMMANDS = {
    "run": "Run a training script on many workers.",
    "horovodrun": "Run a script written for Horovod, with the options of horovodrun.",
    "config": "Show each setting of a script and where it came from.",
    "doctor": "Find problems before a run starts.",
    "verify": "Check that a script trains the same on any number of workers.",
    "profile": "Measure the layers of a script's model, and where to cut it into stages.",
    "plan": "Predict how long training takes with each strategy and number of workers.",
    "export": "Write the weights in a checkpoint as a file for inference.",
    "logs": "Search the records of a run: every step, exchange, loss and checkpoint of every worker.",
    "dashboard": "Look at runs in a browser: loss, time of a step, which worker waits for which, records.",
    "why": "Say where the time of a run went, and what to change.",
    "trace": "Write a trace of a run for Perfetto: the work of each worker over time.",
    "replay": "Repeat a step of a run with the same bits, and look at it.",
    "tune": "Recommend a learning rate and a batch, from short branches of a script.",
    "demo": "Train on handwritten digits, and see that the result does not depend on the workers.",
}

_USAGE = 2
_FILES = {
    "profile": "planning.profiling",  # profile.py would hide Python's module from scripts in this folder
    "plan": "planning.plan",
    "horovodrun": "foreign.horovodrun",
    "dashboard": "observing.dashboard",
    "logs": "observing.logs",
    "replay": "observing.replay",
    "trace": "observing.trace",
    "tune": "planning.tune",
    "why": "observing.why",
}
"""Modules of the commands that have another name."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command in ``arguments``. End the process with the command's exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given and given[0].endswith(".py"):
            raise ConfigError(
                f"There is no command {given[0]}: to train with this script write paceline run {given[0]}."
            )
        _application(given or _words_to_complete())(args=given, prog_name="paceline")
    except SystemExit as ended:
        if ended.code == _USAGE and (hint := _of_setting(given)):
            print(f"paceline: {hint}", file=sys.stderr)
        raise
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _of_setting(given: list[str]) -> str:
    """Return a hint if a setting was given to ``paceline run`` as an option before the script, otherwise ""."""
    if given[:1] != ["run"]:
        return ""
    from paceline import config

    options = [word for word in itertools.takewhile(lambda word: not word.endswith(".py"), given) if word[:2] == "--"]
    for option in options:
        key, _, value = option[2:].replace("-", "_").partition("=")
        if key in config.flat_keys() and key != "resume":
            return f"{key} is a setting, not an option: write --set {key}={value or '...'}."
    return ""


def _words_to_complete() -> list[str]:
    """Return the words that the shell asks to complete after ``paceline``, otherwise none."""
    if env.text("_PACELINE_COMPLETE") is None:
        return []
    return (env.text("_TYPER_COMPLETE_ARGS") or env.text("COMP_WORDS") or "").split()[1:]


def _application(given: list[str]) -> typer.Typer:
    app = typer.Typer(
        help="Train a PyTorch model on many workers: one script, the same result.",
        no_args_is_help=True,
        rich_markup_mode=None,  # rich costs a tenth of a second
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    wanted = next((word for word in given if not word.startswith("-")), None)
    wanted = wanted if wanted in COMMANDS else None
    for name, summary in COMMANDS.items():
        if wanted is None:
            app.command(name, help=summary)(_nothing)
        elif name == wanted:
            module: Any = importlib.import_module(f"paceline.cli.{_FILES.get(name, name)}")
            settings = {"token_normalize_func": lambda option: option.replace("_", "-"), **module.CONTEXT}
            app.command(name, help=summary + module.MORE_HELP, context_settings=settings)(module.command)
    return app


def _nothing() -> None:
    """Stand in for a command whose module is not imported."""


def _version(wanted: bool) -> None:
    if wanted:
        from paceline.cli.display.versions import lines

        print("\n".join(lines()))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version, and what is installed, and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version


if __name__ == "__main__":
    main()
