"""Answers to a wrong use of ``paceline.start`` and of a session: the right code instead of a bare TypeError.

They are added to the class when the module is imported, so type checkers still report unknown attributes.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from typing import Any, NoReturn, ParamSpec, TypeVar

from paceline.errors import ConfigError, InputError

_LOOP = "write `for batch in session.batches(): session.step(batch)`"
_CALLS = {
    "averaged": "with session.averaged():",
    "batches": "session.batches(steps={}) or session.batches(epochs={})",
    "epochs": "session.epochs(10)",
    "evaluate": "session.evaluate(data, metric, forward=...)",
    "export": "session.export('weights.safetensors', dtype=...)",
    "fingerprint": "session.fingerprint()",
    "log": "session.log({'accuracy': 0.9})",
    "model_state": "session.model_state() or session.model_state(everywhere=False)",
    "once": "session.once(function, its, arguments)",
    "predict": "session.predict(data, forward, everywhere=...)",
    "print": "session.print(value, ...)",
    "register": "session.register(name=value)",
    "save": "session.save(), whose directory is the setting checkpoint.directory, or session.export(path)",
}
"""Methods of a session, and the call to write. ``step`` answers by itself, without a call around each step."""
_ELSEWHERE = {
    "model": "it is the object that the script gave to paceline.start",
    "world_size": "the number of workers is session.workers",
    "local_rank": "the worker has session.rank and session.device",
    "load": "give resume='auto' to paceline.start, or start with paceline run --resume auto",
    "lr": "report.learning_rate has it after a step; to change it, give a schedule",
    **dict.fromkeys(("close", "end", "finish", "shutdown", "destroy"), "a session ends with the script"),
    **dict.fromkeys(("train", "fit", "run", "backward", "zero_grad", "forward"), _LOOP),
}
"""Attributes that other libraries have, and the code to write instead."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


def explained(session: type[_T]) -> type[_T]:
    """Make the class of a session answer wrong calls and unknown attributes. Returns the class."""
    for name, cure in _CALLS.items():
        setattr(session, name, with_usage(f"session.{name}", cure, own=1)(vars(session)[name]))
    start = "session = paceline.start(...)"
    answers: dict[str, Callable[..., Any]] = {
        "__init__": with_usage("paceline.Session", start, own=1)(vars(session)["__init__"]),
        "__getattr__": _refuse_attribute,
        "__iter__": lambda _: _refuse(f"A session is not a loop over batches: {_LOOP}."),
        "__enter__": lambda _: _refuse(f"A session needs no `with`: write {start}. It ends with the script."),
        "__exit__": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(session, name, answer)
    return session


def _refuse(text: str) -> NoReturn:
    raise InputError(text)


def _refuse_attribute(session: object, name: str) -> Any:
    public = [one for one in dir(type(session)) if not one.startswith("_")]
    if name.startswith("_") or name in public:
        return object.__getattribute__(session, name)  # raises what a property raised
    near = difflib.get_close_matches(name, public, 1)
    cure = f"did you mean session.{near[0]}?" if near else f"it has {', '.join(public)}."
    cure = f"{_ELSEWHERE[name]}." if name in _ELSEWHERE else cure
    raise AttributeError(f"A session has no {name!r}: {cure}", name=name, obj=session)


def with_usage(call: str, cure: str, own: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that raises ConfigError instead of the TypeError of a call with wrong arguments.

    Args:
        call: name of the function in the message.
        cure: call to write instead. ``{}`` stands for a number that was given by position.
        own: number of arguments that are not the caller's: 1 for ``self``.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # raised inside of the function, not by the call of it
                parameters = [*inspect.signature(function).parameters.values()][own:]
                raise ConfigError(_message(call, cure, parameters, args[own:], kwargs) or str(error)) from None

        return checked

    return decorate


def does_not_take(function: Callable[..., Any], *arguments: str) -> str:
    """Return why a function cannot be called with arguments by position; empty if it can, or if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C, for example
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


def _message(
    call: str, cure: str, parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the message for a call that does not fit the parameters; empty if the cause is not found."""
    kinds = {one.kind for one in parameters}
    places = [one.name for one in parameters if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named = [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]
    given = [_shown(value) for value in args]
    write = f"Write {cure.replace('{}', given[0] if given and given[0].isdecimal() else '...')}."
    if len(args) > len(places) and Parameter.VAR_POSITIONAL not in kinds:
        rest = f"after {places[-1]!r} " if places else ""
        why = f"arguments {rest}are given by name, not by position" if parameters else "it takes no arguments"
        return f"{call}({', '.join(given)}): {why}. {write}"
    unknown = [name for name in kwargs if name not in places + named]
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        near = difflib.get_close_matches(unknown[0], places + named, 1)
        guess = f" Did you mean {near[0]}=?" if near else ""
        return f"{call}({unknown[0]}=...): it has no argument {unknown[0]!r}.{guess} {write}"
    needed = {one.name for one in parameters if one.default is Parameter.empty}
    missing = [name for name in places[len(args) :] + named if name in needed.difference(kwargs)]
    return f"{call}: the argument {missing[0]!r} is missing. {write}" if missing else ""


def _shown(value: object) -> str:
    return str(value) if type(value) is int and value.bit_length() < 64 else type(value).__name__
