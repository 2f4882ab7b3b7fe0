import threading

import pytest

from paceline.launchers.output import Lines, ends_within


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_survive_any_cut(size: int) -> None:
    data = "one\r\nzwölf\n\n10%\r20%\r100%\nopen".encode()
    lines = Lines()
    seen = [line for at in range(0, len(data), size) for line in lines.take(data[at : at + size])]
    assert [*seen, *lines.rest()] == ["one", "zwölf", "", "100%", "open"]
    assert lines.rest() == []


def test_bytes_that_are_no_text_are_shown_all_the_same() -> None:
    assert Lines().take(b"\xff\xfe\n") == ["\N{REPLACEMENT CHARACTER}" * 2]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines()
    assert sum(len(line) for _ in range(5) for line in lines.take(b"x" * (1 << 19))) >= 1 << 20


class Stopped(threading.Thread):
    """A thread that ends after this process was stopped for as long as it may be waited for."""

    turns = 0

    def join(self, timeout: float | None = None) -> None:
        self.turns += 1

    def is_alive(self) -> bool:
        return self.turns < 2


def test_the_last_lines_survive_a_stop_of_the_launcher() -> None:
    assert ends_within(Stopped(), 2.0)


def test_a_thread_that_does_not_end_is_left() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert not ends_within(thread, 0.2)
    over.set()
    assert ends_within(thread, 60.0)
