"""What a process writes on its way to the driver: lines, streams, children, files, and the descriptors afterwards."""

import json
import os
import stat
import subprocess
import sys
import time

import pytest

from spark_dl.launch.rank.output import Output


class Driver:
    """Gets the events, unless it is busy."""

    def __init__(self):
        self.events, self.is_busy = [], False

    def send(self, event):
        if not self.is_busy:
            self.events.append(event)
        return not self.is_busy

    def lines(self, stream="stdout"):
        return [line for event in self.events if event["stream"] == stream for line in event["lines"]]


@pytest.fixture
def driver():
    return Driver()


def read(driver, write, **options):
    """The kept lines after `write()`, which the driver got as they were written."""
    output = Output(driver.send, **options)
    try:
        write()
    finally:
        output.close()
    return output.tail()


def test_lines_of_python_of_libraries_and_of_children_are_read(driver):
    def write():
        os.write(1, b"from a library\n")
        os.write(2, b"a warning\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)

    kept = read(driver, write)
    assert driver.lines() == ["from a library", "from a child"]
    assert driver.lines("stderr") == ["a warning"]
    assert sorted(kept) == [("stderr", "a warning"), ("stdout", "from a child"), ("stdout", "from a library")]


def test_a_line_without_an_end_comes_at_the_end_and_a_very_long_one_in_parts(driver):
    whole = json.dumps({"é": "ü" * 25_000}, ensure_ascii=False)  # as structured logs have them
    read(driver, lambda: (os.write(1, f"{whole}\n{'x' * 54_000}".encode()), os.write(1, b"y")))
    assert driver.lines() == [whole, "x" * 54_000 + "y"]
    driver.events.clear()
    read(driver, lambda: [os.write(1, ("ä" * 20_000).encode()) for _ in range(6)])
    first, *others = driver.lines()
    assert len(others) >= 2
    assert all(line.endswith(" ...") for line in (first, *others[:-1]))
    assert all(line.startswith("... ") for line in others)
    parts = [first, *(line.removeprefix("... ") for line in others)]
    assert "".join([*(part.removesuffix(" ...") for part in parts[:-1]), parts[-1]]) == "ä" * 120_000
    assert max(len(line.encode()) for line in driver.lines()) <= (1 << 16) + 8


def test_of_a_progress_bar_the_last_state_is_shown_and_odd_bytes_are_replaced(driver):
    read(driver, lambda: os.write(1, b"10%\r 55%\r100%\ndone\r\n\xff\xfe\n"))
    assert driver.lines() == ["100%", "done", "\ufffd\ufffd"]


def test_the_end_of_much_output_is_kept_and_all_of_it_is_sent(driver):
    lines = [f"line {i}" for i in range(20_000)]
    kept = read(driver, lambda: os.write(1, "\n".join(lines).encode() + b"\n"))
    assert driver.lines() == lines
    assert 1_000 < len(kept) < len(lines)
    assert [line for _, line in kept] == lines[-len(kept) :]


def test_lines_that_a_busy_driver_does_not_get_are_counted(driver):
    output = Output(driver.send)
    driver.is_busy = True
    os.write(1, b"1\n2\n3\n")
    wait_until(lambda: len(output.tail()) == 3)
    driver.is_busy = False
    os.write(1, b"4\n")
    output.close()
    assert driver.lines() == ["... 3 lines were dropped: the driver reads them too slowly", "4"]


def test_a_file_has_all_lines_also_those_before_its_name_was_known(driver, tmp_path):
    names = []
    output = Output(driver.send, lambda: names[0] if names else None)
    os.write(1, b"before\n")
    wait_until(lambda: len(output.tail()) == 1)
    names.append(tmp_path / "logs" / "rank-3.log")
    os.write(2, b"after\n")
    output.close()
    assert names[0].read_text() == "stdout: before\nstderr: after\n"


def test_S19_the_file_is_for_its_user_alone_and_no_link_leads_it_elsewhere(driver, tmp_path):
    umask = os.umask(0)
    try:
        read(driver, lambda: os.write(1, b"a line\n"), log_file=lambda: tmp_path / "logs" / "rank-0.log")
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("logs", "logs/rank-0.log")]
    assert modes == [0o700, 0o600]
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "logs" / "rank-1.log").symlink_to(tmp_path / "theirs")
    read(driver, lambda: os.write(1, b"another\n"), log_file=lambda: tmp_path / "logs" / "rank-1.log")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert driver.lines()[-1] == "another"


@pytest.mark.parametrize("has_log", [True, False])
def test_the_log_of_the_executor_gets_it_too_unless_it_is_the_terminal_of_the_driver(capfd, has_log):
    read(Driver(), lambda: os.write(1, b"a line\n"), has_log=has_log)
    os.write(1, b"later\n")
    assert capfd.readouterr().out == ("a line\n" if has_log else "") + "later\n"


def test_descriptors_and_threads_are_as_before(driver):
    before = {fd: os.fstat(fd).st_ino for fd in (1, 2)}
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        read(driver, lambda: os.write(1, b"x\n"))
    assert {fd: os.fstat(fd).st_ino for fd in (1, 2)} == before
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_child_that_lives_on_does_not_hold_up_the_end(driver):
    children = []
    start = time.monotonic()
    read(driver, lambda: children.append(subprocess.Popen(["sleep", "30"])))
    assert time.monotonic() - start < 10
    children[0].kill()
    children[0].wait()


def test_python_writes_each_line_at_once():
    program = (
        "import os, sys; from spark_dl.launch.rank.output import line_buffered\n"
        "with line_buffered():\n"
        "    print(sys.stdout.line_buffering)\n"
        "os.write(1, str(sys.stdout.line_buffering).encode())\n"
        "print('never written'); os._exit(0)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=env)
    assert done.stdout == b"True\nFalse"


def wait_until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
