"""`examples/notebook.ipynb` in a real kernel: what it promises, what its page shows, and an interrupted cell."""

import ast
import asyncio
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"
INTERRUPTED = """
import time

pids = []


def slowly(batch):
    time.sleep(1)
    return scaled(batch)


def on_event(event):
    if event["kind"] == "joined":
        pids.append(event["pid"])
        print(len(pids), "joined")


slow = spark_dl.ModelSpec(build=DigitNet, transform=slowly)
spark_dl.train(train_df, slow, config, run_dir="runs/interrupted", on_event=on_event)
"""
AFTERWARDS = """
import dataclasses, pathlib

end = time.monotonic() + 20
while time.monotonic() < end and any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
    time.sleep(0.1)
left = [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
jobs = list(spark.sparkContext.statusTracker().getActiveJobsIds())
short = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1))
again = spark_dl.train(train_df, spec, short, run_dir="runs/again")
{"pids": len(pids), "left": left, "jobs": jobs, "rows": again.rows}
"""
VERBOSE = """
%xmode Verbose
spark_dl.launch(divide, 10, num_ranks=2)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook with its outputs, and more cells: one that was interrupted, and those that ran after it."""
    folder = tmp_path_factory.mktemp("notebook")
    found = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for source in (INTERRUPTED, AFTERWARDS, VERBOSE):
        tags = [] if source == AFTERWARDS else ["raises-exception"]
        found.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}
    client = NotebookClient(found, timeout=180, resources={"metadata": {"path": str(folder)}})
    asyncio.run(execute(client, env))
    return found


async def execute(client, env):
    async with client.async_setup_kernel(env=env):
        for index, cell in enumerate(client.nb.cells):
            run = asyncio.create_task(client.async_execute_cell(cell, index))
            if cell.source == INTERRUPTED:
                while "2 joined" not in "".join(o.get("text", "") for o in cell.outputs) and not run.done():
                    await asyncio.sleep(0.05)
                await client.km.interrupt_kernel()
            await run


def cell(notebook, words):
    """The only code cell that has these words."""
    (found,) = [c for c in notebook.cells if c.cell_type == "code" and words in c.source]
    return found


def value(cell):
    return ast.literal_eval(cell.outputs[-1].data["text/plain"])


def page_of(cell):
    return cell.outputs[-1].data["text/html"]


def test_the_accuracy_is_that_which_the_text_promises(notebook):
    assert any("The accuracy on the test rows is at least 0.97." in c.source for c in notebook.cells)
    scores = value(cell(notebook, "spark_dl.evaluate("))
    assert scores["rows"] == 360
    assert 0.97 <= scores["accuracy"] <= scores["in_top_2"]


def test_a_training_shows_one_bar_and_one_curve(notebook):
    # On a busy machine the driver also says, on standard error, that the other ranks wait for one of them.
    outputs = cell(notebook, 'run_dir="runs/notebook"').outputs
    bar, curve = [output for output in outputs if output.output_type == "display_data"]
    assert WIDGET in bar.data
    assert bar.data["text/plain"].startswith("train: 100%|")
    assert "validation loss" in curve.data["text/plain"]
    assert curve.data["text/html"].count("<svg") == 1
    assert curve.data["text/html"].count("<path") == 4  # the grid, and lines of which one has dots


def test_a_result_is_a_page(notebook):
    result = next(c for c in notebook.cells if c.source == "result")
    assert "validation accuracy" in page_of(result)
    assert "<svg" in page_of(result)


def test_functions_of_cells_run_on_the_ranks_and_their_output_is_shown(notebook):
    text = "".join(o.get("text", "") for o in cell(notebook, "def mean_images").outputs)
    counts = {line.split("] ")[1] for line in text.splitlines()}
    assert sum(int(count.removesuffix(" images")) for count in counts) == 1437


def test_a_failed_cell_shows_the_reason_first_and_the_line_of_the_cell(notebook):
    failed, shown = cell(notebook, "def divide"), cell(notebook, "failure = error")
    number = failed.execution_count
    (error,) = failed.outputs
    text = "\n".join(error.traceback)
    assert text.startswith("\x1b[31mRankError\x1b[0m: rank 1 on ")
    assert "failed: ZeroDivisionError: division by zero" in text.splitlines()[0]
    assert f"  Cell In[{number}], line 5, in divide\n    return total / (1 - rank)\n" in text
    assert f"  Cell In[{number}], line 8, in <module>\n    spark_dl.launch(divide, 10, num_ranks=2)\n" in text
    assert "task.py" not in text
    assert f"Cell In[{number}], line 5, in divide" in page_of(shown)
    assert "<summary>All frames on the rank</summary>" in page_of(shown)


def test_in_its_mode_verbose_ipython_shows_all_frames(notebook):
    text = "\n".join(cell(notebook, "%xmode Verbose").outputs[-1].traceback)
    assert "run_barrier" in text
    assert "task.py" in text


def test_an_interrupted_cell_ends_the_ranks_and_the_next_one_trains(notebook):
    assert cell(notebook, "def slowly").outputs[-1].ename == "KeyboardInterrupt"
    found = value(cell(notebook, 'run_dir="runs/again"'))
    assert found == {"pids": 2, "left": [], "jobs": [], "rows": found["rows"]}
    assert 1200 < found["rows"] < 1437  # an epoch, without the validation rows


def test_the_notebook_becomes_a_page(notebook):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_notebook_node(notebook)
    for part in ("train: 100%|", "TrainResult", "logarithmic scale", "All frames on the rank", "data:image/png"):
        assert part in page


def test_the_notebook_is_kept_with_the_outputs_of_one_run_from_top_to_bottom():
    """The documentation shows them. Widgets, what Spark logs, and folders of who has run it are not kept."""
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not any("widget" in kind for output in outputs for kind in output.get("data", {}))
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    text = (ROOT / "examples" / "notebook.ipynb").read_text()
    assert {*re.findall(r"(?<![\w/])/(?:home|root|work|Users)/\w+", text)} == set()
    assert len(text) < 150_000
