"""Script of the workers of ``paceline.launch``: call the function and save its result or error.

The folder in the first argument contains ``call`` (``sys.path``, the function and its arguments). Each worker adds
``result-<number>`` or ``error-<number>``. The folder belongs to the launching user; no other user's files are read.
"""

import contextlib
import sys
from pathlib import Path

from paceline.environments import env

CALL, RESULT, ERROR = "call", "result", "error"


def main(folder: Path) -> None:
    """Call the function and write its result or error into `folder`."""
    import cloudpickle

    call = cloudpickle.loads((folder / CALL).read_bytes())
    sys.path[:] = call["path"]
    function, arguments = cloudpickle.loads(call["function"])
    launched = env.launch_info()
    assert launched is not None
    try:
        _write(folder, f"{RESULT}-{launched.worker}", function(*arguments))
    except Exception as error:
        with contextlib.suppress(Exception):  # an error that cannot be pickled appears only in the worker's log
            _write(folder, f"{ERROR}-{launched.worker}", error)
        raise


def _write(folder: Path, name: str, value: object) -> None:
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - an object's own code may raise anything
        raise TypeError(f"The function's result, a {type(value).__name__}, cannot be sent back: {error}") from None
    (folder / f".{name}").write_bytes(data)
    (folder / f".{name}").rename(folder / name)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules would shadow others with the same names
    main(Path(sys.argv[1]))
