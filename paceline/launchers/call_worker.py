"""Run as a script by each worker of ``paceline.launch``: call the function, and keep its result or its error.

In the folder that it is given: ``call`` (the path of modules, the function, its arguments), ``result-<rank>``,
``error-<number of the worker>``. The folder is the launching user's own; nobody else's is ever read.
"""

import sys
from pathlib import Path

from paceline import env

CALL, RESULT, ERROR = "call", "result", "error"


def main(folder: Path) -> None:
    """Call the function."""
    import cloudpickle

    call = cloudpickle.loads((folder / CALL).read_bytes())
    sys.path[:] = call["path"]
    function, arguments = cloudpickle.loads(call["function"])
    try:
        result = function(*arguments)
    except Exception as error:
        if (launched := env.launch_info()) is not None:
            _keep(folder, f"{ERROR}-{launched.worker}", error)
        raise
    _keep(folder, f"{RESULT}-{env.identity().rank}", result)


def _keep(folder: Path, name: str, value: object) -> None:
    """Write a value as a whole, or not at all; an error that cannot be pickled is told by its worker's log alone."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever an object's own code raises
        if isinstance(value, Exception):
            return
        raise TypeError(f"What the function returned, a {type(value).__name__}, cannot be sent back: {error}") from None
    (folder / f".{name}").write_bytes(data)
    (folder / f".{name}").rename(folder / name)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules would hide others of the same names
    main(Path(sys.argv[1]))
