"""A failed rank as a notebook shows it: the reason first, spark_dl's own frames folded, and nothing that harms."""

import pickle
import sys
import types
from pathlib import Path

import pytest

import spark_dl
from spark_dl import RankError
from spark_dl.launch.failures.errors import fold, harmless

TASK = Path(spark_dl.__file__).parent / "launch" / "rank" / "task.py"
TRACEBACK = f"""Traceback (most recent call last):
  File "{TASK}", line 90, in run_rank
    done = fn(*args)
           ^^^^^^^^^
  File "/elsewhere/site-packages/spark_dl/worker.py", line 12, in call
    return fn()
  File "/home/me/spark_dl/examples/mine.py", line 3, in fn
    raise ValueError("<b>no</b>")
ValueError: <b>no</b>
"""


def error(**changes):
    about = {"rank": 1, "host": "host1", "pid": 7, "rank_traceback": TRACEBACK, **changes}
    return RankError("rank 1 on host1 (pid 7) failed: ValueError: <b>no</b>", **about)


def raised(found):
    try:
        raise found
    except RankError as caught:
        return caught


def test_the_reason_comes_first_and_frames_of_the_user_are_kept():
    lines = raised(error())._render_traceback_()
    assert lines[0] == "RankError: rank 1 on host1 (pid 7) failed: ValueError: <b>no</b>"
    text = "\n".join(lines)
    assert '  ... 2 frames of spark_dl ...\n  File "/home/me/spark_dl/examples/mine.py", line 3, in fn\n' in text
    assert text.index("Traceback on the rank:") < text.index("Called on the driver:") < text.index(", in raised")
    assert "%xmode Verbose" in lines[-1]


def test_a_traceback_of_any_other_form_is_not_changed():
    for text in ("", "Traceback", 'File "a.py", line 1', 'a\n  File "x.py", line 2, in f\n  + Exception Group\nb'):
        assert fold(text) == text


def test_escape_sequences_and_control_characters_do_no_harm():
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]52;c;aGk=\x1b\\ bell\x07 a\rb \u202etxt.exe\ttab\nline \x9b31m"
    assert harmless(text) == "red   bell\\x07 a\\rb \\u202etxt.exe\ttab\nline \\x9b31m"
    evil = error(rank_traceback=TRACEBACK.replace("no", "\x1b]0;title\x07no"), rank_output="\x1b[2J<script>")
    for shown in ("\n".join(evil._render_traceback_()), evil._repr_html_()):
        assert "\x1b" not in shown
        assert "\x07" not in shown


def test_the_page_of_an_error_is_escaped_and_has_all_parts():
    page = raised(error(rank_output="<script>alert(1)</script>"))._repr_html_()
    assert "<b>no</b>" not in page
    assert "<script>" not in page
    assert "ValueError: &lt;b&gt;no&lt;/b&gt;" in page
    for title in ("All frames on the rank", "Last output of the rank", "Called on the driver"):
        assert f"<summary>{title}</summary>" in page


def test_the_message_has_the_parts_and_an_error_survives_pickling():
    found = pickle.loads(pickle.dumps(error(rank_output="the end")))
    assert str(found) == str(error(rank_output="the end"))
    assert str(found).endswith(f"Traceback on the rank:\n{TRACEBACK}\n\nLast output of the rank:\nthe end")
    assert (found.rank, found.host, found.pid, found.rank_output) == (1, "host1", 7, "the end")
    assert found.reason == "rank 1 on host1 (pid 7) failed: ValueError: <b>no</b>"


def test_what_to_do_is_shown_last():
    found = raised(error(advice="Resume <it>.\x07", rank_traceback=""))
    lines = found._render_traceback_()
    assert lines[-1] == "Resume <it>.\\x07"
    assert found._repr_html_().endswith("Resume &lt;it&gt;.\\x07</div></div>")


def test_an_error_that_was_being_handled_is_named():
    found = error()
    found.__context__ = KeyError("first")
    assert "Raised while this error was handled: KeyError: 'first'" in "\n".join(found._render_traceback_())


@pytest.mark.parametrize("shell", [types.SimpleNamespace(), types.SimpleNamespace(compile=1, colors=None)])
def test_a_shell_of_another_version_gets_the_message(monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert "failed: ValueError" in raised(error())._render_traceback_()[0]
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace())  # a broken one
    assert "failed: ValueError" in "".join(raised(error())._render_traceback_())
