"""``paceline run`` whose workers are forked from it once it has imported torch: 64 Pythons would not fit.

agent.py FILE run ...      # writes into FILE what went over the connections of this process
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import fork_server

import paceline.session  # noqa: F401
from paceline.coordinator.wire import connections
from paceline.coordinator.wire.messages import Connection

sent: Counter[str] = Counter()
received: Counter[str] = Counter()


def count() -> None:
    """Count what this process sends and receives as the coordinator."""
    send, decode = Connection.send, connections.decode

    def sending(self: Connection, line: bytes) -> None:
        sent["messages"] += 1
        sent["bytes"] += len(line)
        send(self, line)

    def decoding(line: bytes) -> dict[str, Any]:
        message = decode(line)
        received["messages"] += 1
        received["bytes"] += len(line)
        received[message["type"]] += 1
        return message

    Connection.send = sending  # type: ignore[method-assign]
    connections.decode = decoding


if __name__ == "__main__":
    count()
    try:
        code = fork_server._run_paceline(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps({"sent": sent, "received": received}))
    sys.exit(code)
