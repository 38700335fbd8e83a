"""A result, and the loss of a run, as a notebook shows them. `cli/test_progress.py` has them in a real kernel."""

import types
from xml.etree import ElementTree

from spark_dl import TrainResult
from spark_dl.track import notebook


def result(**changes):
    history = [
        {"epoch": e, "train_loss": 1 / (e + 1), "metrics": {"loss": 2 / (e + 1), "<i>acc</i>": 0.5, "table": [1, 2]}}
        for e in range(3)
    ]
    fields = {
        "run_dir": "/runs/<b>1</b>", "checkpoint": "/runs/1/checkpoints/step-3", "epochs": 3, "steps": 12_345,
        "rows": 100, "train_loss": 1 / 3, "metrics": history[-1]["metrics"], "rows_per_s": 10.0, "seconds": 2.0,
        "history": history,
    }  # fmt: skip
    return TrainResult(**{**fields, **changes})


def text(page):
    """What a reader sees. The page must be well-formed."""
    return " ".join("\n".join(ElementTree.fromstring(page.replace("&#9679;", "*")).itertext()).split())


def test_the_page_of_a_result_has_its_numbers_and_files_and_each_epoch():
    page = result()._repr_html_()
    seen = text(page)
    for part in ("steps 12,345", "training loss 0.3333", "validation loss 0.6667", "validation <i>acc</i> 0.5"):
        assert part in seen
    assert "run_dir /runs/<b>1</b> checkpoint /runs/1/checkpoints/step-3" in seen
    assert "epoch train_loss loss <i>acc</i> 0 1 2 0.5 1 0.5 1 0.5 2 0.3333 0.6667 0.5" in seen
    assert page.count("<path") == 5  # the grid, and two lines with dots
    assert "<i>" not in page
    assert "stopped" not in seen


def test_a_result_without_validation_or_epochs_has_a_page_too():
    page = result(metrics={}, history=[], train_loss=None, stopped_early=True, staleness={"mean": 1.5, "max": 3})
    seen = text(page._repr_html_())
    assert "mean staleness 1.5" in seen
    assert "stopped early" in seen
    assert "loss" not in seen


def test_a_long_run_has_a_page_of_bounded_size():
    history = [{"epoch": e, "train_loss": 1.0, "metrics": {"loss": 2.0}} for e in range(10_000)]
    page = result(history=history)._repr_html_()
    assert len(page) < 30_000
    assert "9,950 more in `history`" in text(page)


def test_a_notebook_draws_the_loss_at_most_once_a_second(monkeypatch):
    now, drawn = [0.0], []
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    handle = types.SimpleNamespace(update=lambda shown, raw: drawn.append(shown))
    monkeypatch.setattr("IPython.display.display", lambda shown, **_: drawn.append(shown) or handle)
    curve = notebook.LiveCurve()
    for step in range(1, 1001):  # 10 s
        curve.show({"kind": "step", "step": step, "steps": 1000, "loss": 1 / step, "rows_per_s": 1.0})
        now[0] += 0.01
    assert 10 <= len(drawn) <= 11
    curve.close()
    curve.close()
    assert drawn[-1]["text/plain"] == "training loss 0.001 (step 1,000)"
    assert len(drawn) <= 12
    curve.show({"kind": "validation", "step": 900, "steps": 1000, "metrics": {"loss": 0.75}})
    curve.close()
    assert drawn[-1]["text/plain"].endswith(", validation loss 0.75 (step 900)")
    curve.show({"kind": "epoch", "step": 1000, "steps": 1000, "metrics": {"loss": 0.5}})
    curve.close()
    assert drawn[-1]["text/plain"].endswith(", validation loss 0.5 (step 1,000)")
