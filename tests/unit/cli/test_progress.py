"""Progress where people look: a terminal, a notebook with and without widgets, and a file."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from spark_dl.cli import progress

ROOT = Path(__file__).parents[3]
PROGRAM = """
import time
from spark_dl.cli import progress
progress.LINE_S, progress._REFRESH_S = 0.0, 0.05
with progress.ProgressDisplay("train") as shown:
    shown.stage("writing the train rows")
    shown.stage("starting 2 rank(s)")
    for i in (1, 2):
        shown.show({"kind": "step", "step": 5 * i, "steps": 10, "loss": 0.5 / i, "rows_per_s": 1234.0})
        time.sleep(0.3)
    shown.show({"kind": "evaluation", "step": 3, "steps": 4})
    shown.show({"kind": "epoch", "step": 10, "steps": 10, "metrics": {"loss": 0.25, "table": [1, 2]}})
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_each_stage_has_its_time(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 12.5, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = progress.ProgressDisplay("train", enabled=False)  # at 0
    assert shown.stage_seconds() == {}, "asked at 1"
    shown.stage("writing the train rows")  # at 3
    shown.stage("planning")  # at 10
    shown.stage("writing the train rows")  # at 12.5
    assert shown.stage_seconds() == {"writing the train rows": 14.5, "planning": 2.5}  # asked at 20


@pytest.mark.slow
def test_a_file_gets_lines_with_the_stage_and_then_the_place_and_the_values():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    lines = [re.sub(r" \[\d+:\d\d\]$", "", line) for line in done.stderr.splitlines()]
    assert lines[:2] == ["train: writing the train rows", "train: starting 2 rank(s)"]
    assert "train: step 5/10, loss 0.5, rows/s 1,234" in lines
    assert lines[-1] == "train: done, step 10/10, loss 0.25, rows/s 1,234, val loss 0.25"
    assert len(lines) == len(set(lines))
    assert done.stdout == ""


@pytest.mark.slow
def test_trials_are_counted_with_their_best_value():
    program = (
        "from spark_dl.cli.progress import ProgressDisplay\nwith ProgressDisplay('tune') as shown:\n"
        "    for done, best in ((1, None), (2, 0.25)):\n"
        "        shown.show({'kind': 'trial', 'done': done, 'trials': 8, 'best': best})"
    )
    assert re.search(r"tune: 25%\|.* 2/8 .*best=0.25", in_terminal(program).replace("  ", " "))


def test_a_failure_is_said_in_the_last_line():
    program = (
        "from spark_dl.cli.progress import ProgressDisplay\nwith ProgressDisplay('train'): raise ValueError('no rows')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert "train: failed [0:00]" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_a_terminal_gets_a_bar_that_can_be_switched_off(enabled):
    program = PROGRAM.replace('ProgressDisplay("train")', f'ProgressDisplay("train", enabled={enabled})')
    text = in_terminal(program)
    assert bool(re.search(r"train: .*starting 2 rank", text)) == enabled
    assert bool(re.search(r"train: 100%\|█+\| 10/10 .*loss=0.25, rows/s=1,234, val loss=0.25", text)) == enabled


def in_terminal(program):
    """What a program writes to a terminal that is its standard error."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))  # rows and columns
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(), stderr=slave)
    os.close(slave)
    text, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        try:
            more = os.read(master, 65536)
        except OSError:  # the terminal is closed
            break
        text += more
    os.close(master)
    assert process.wait(10) == 0
    return text.decode()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_gets_a_bar_and_one_curve_with_and_without_widgets(tmp_path, has_widgets, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    hide = "" if has_widgets else "import sys; sys.modules['ipywidgets'] = None\n"
    cell = nbformat.v4.new_code_cell(hide + textwrap.dedent(PROGRAM))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    widgets = [o for o in cell.outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == has_widgets
    assert [o for o in cell.outputs if o.output_type == "stream"] == []
    bar, _ = cell.outputs
    assert re.search(r"^train: 100%\|[#█]+\| 10/10 .*, val loss=0.25\]$", bar.data["text/plain"])
    (curve,) = [o.data for o in cell.outputs if "text/html" in o.get("data", {})]
    assert curve["text/plain"] == "training loss 0.25 (step 10), validation loss 0.25 (step 10)"
    assert curve["text/html"].count("<svg") == 1
