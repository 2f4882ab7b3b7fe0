"""Run as a script by each worker of ``paceline.launch``: call the function, and keep its result or its error.

In the folder that it is given: ``call`` (the path of modules, the function, its arguments), and for each worker by its
number ``result-<number>`` or ``error-<number>``. The folder is the launching user's own; nobody else's is ever read.
"""

import contextlib
import sys
from pathlib import Path

from paceline.environments import env

CALL, RESULT, ERROR = "call", "result", "error"


def main(folder: Path) -> None:
    """Call the function."""
    import cloudpickle

    call = cloudpickle.loads((folder / CALL).read_bytes())
    sys.path[:] = call["path"]
    function, arguments = cloudpickle.loads(call["function"])
    launched = env.launch_info()
    assert launched is not None
    try:
        _write(folder, f"{RESULT}-{launched.worker}", function(*arguments))
    except Exception as error:
        with contextlib.suppress(Exception):  # one that cannot be pickled is told by the worker's log alone
            _write(folder, f"{ERROR}-{launched.worker}", error)
        raise


def _write(folder: Path, name: str, value: object) -> None:
    """Write a value as a whole, or not at all."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever an object's own code raises
        raise TypeError(f"What the function returned, a {type(value).__name__}, cannot be sent back: {error}") from None
    (folder / f".{name}").write_bytes(data)
    (folder / f".{name}").rename(folder / name)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules would hide others of the same names
    main(Path(sys.argv[1]))
