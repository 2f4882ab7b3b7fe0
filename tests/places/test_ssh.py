"""Runs on hosts that are reached by ssh."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, missing
from training import SCRIPT, alone, fingerprints, write_script

PACELINE = str(Path(sys.executable).with_name("paceline"))


@pytest.fixture
def hosts(no_temporary_files: None) -> Iterator[Hosts]:
    """Two hosts, for one test."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as folder:
        made = Hosts(Path(folder), 2)
        try:
            made.up()
            yield made
        finally:
            made.down()


def test_the_bits_of_one_process_through_a_kill(hosts: Hosts, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    expected = alone(script)
    script.write_text("import os\nos.environ['KILL'] = '1'\n" + SCRIPT)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:2", script, cwd=tmp_path)
    said, _ = run.communicate(timeout=250)
    assert run.returncode == 0, said
    assert (tmp_path / "killed").exists()
    assert fingerprints(said) == [expected], said
    assert [hosts.running(name) for name in hosts.names] == [[], []]
