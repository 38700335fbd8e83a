"""The failure of a rank as a notebook shows it: the root cause first, then where it happened on the rank and in a cell.

Frames of spark_dl are folded. What ranks have written is shown without its control characters.
"""

from __future__ import annotations

import html
import linecache
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_dl.launch.failures.errors import RankError

_PACKAGE = Path(__file__).parents[2]
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Escape sequences of terminals: colors, and also titles, links and the clipboard."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, other ends of lines, what changes the direction of text, and what UTF-8 does not have."""
_FRAME = re.compile(r'^  File "(.+?)", line (\d+), in (.+)\n((?:    .*\n)*)', re.MULTILINE)


def as_lines(error: RankError) -> list[str]:
    """Returns the text that IPython shows for an error that was raised. In its mode Verbose, this is IPython's own."""
    shell = _shell()
    renderer: Any = getattr(shell, "InteractiveTB", None)
    if getattr(renderer, "mode", "") == "Verbose":
        lines: list[str] = renderer.structured_traceback(type(error), error, error.__traceback__, tb_offset=1)
        return lines
    name = type(error).__name__
    if shell is not None and str(getattr(shell, "colors", "")).lower() != "nocolor":
        name = f"\x1b[31m{name}\x1b[0m"
    parts = [f"{name}: {harmless(error.reason)}"]
    if error.rank_traceback:
        parts.append(f"Traceback on the rank:\n{fold(harmless(error.rank_traceback))}")
    if error.rank_output:
        parts.append(f"Last output of the rank:\n{harmless(error.rank_output)}")
    if error.stacks:
        parts.append(f"What the ranks did:\n{fold(harmless(error.stacks))}")
    if called := _called_from(error):
        parts.append(f"Called on the driver:\n{called}")
    other = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if other is not None:
        parts.append(f"Raised while this error was handled: {harmless(f'{type(other).__name__}: {other}')}")
    if error.advice:
        parts.append(harmless(error.advice))
    text = "\n\n".join(part.rstrip() for part in parts)
    if _FOLDED in text:
        text += "\n\nTo see all frames, run `%xmode Verbose`, then `%tb`."
    return text.split("\n")


def as_html(error: RankError) -> str:
    """Returns the page of an error, with what is long folded."""
    head, _, rest = harmless(error.reason).partition("\n")
    name = f'<b style="{_RED}">{type(error).__name__}</b>'
    found = [f'<div style="overflow-wrap:anywhere">{name}: {html.escape(head)}</div>']
    if rest:
        found.append(_pre(rest))
    if error.rank_traceback:
        whole = harmless(error.rank_traceback)
        short = fold(whole)
        found.append(f"<div>Traceback on the rank:</div>{_pre(short)}")
        if _FOLDED in short:
            found.append(_details("All frames on the rank", whole))
    if error.rank_output:
        found.append(_details("Last output of the rank", harmless(error.rank_output)))
    if error.stacks:
        found.append(_details("What the ranks did", harmless(error.stacks)))
    if called := _called_from(error):
        found.append(_details("Called on the driver", called))
    if error.advice:
        found.append(f'<div style="overflow-wrap:anywhere">{html.escape(harmless(error.advice))}</div>')
    return f'<div style="border-left:3px solid #e5534b;padding-left:.8em;font-size:13px">{"".join(found)}</div>'


_RED = "color:#e5534b"
_PRE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin:.4em 0;padding:0;border:0;background:none;color:inherit;"
    "font-family:monospace;font-size:12px;line-height:1.4"
)


def _pre(text: str) -> str:
    return f'<pre style="{_PRE}">{html.escape(text.rstrip())}</pre>'


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>{_pre(text)}</details>"


def harmless(text: str) -> str:
    """Returns a text without escape sequences, and with other control characters written out, such as `\\r`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _SEQUENCE.sub("", text.replace("\r\n", "\n")))


_FOLDED = "of spark_dl ...\n"


def fold(text: str) -> str:
    """Returns a traceback in which frames of spark_dl are counted, and frames of cells have the cell and its source."""
    found: list[str] = []
    own, at = 0, 0

    def count_own() -> None:
        nonlocal own
        if own:
            found.append(f"  ... {own} {'frame' if own == 1 else 'frames'} {_FOLDED}")
        own = 0

    for frame in _FRAME.finditer(text):
        if frame.start() > at:
            count_own()
            found.append(text[at : frame.start()])
        if _is_own(frame[1]):
            own += 1
        else:
            count_own()
            found.append(_of_cell(frame) or frame[0])
        at = frame.end()
    count_own()
    return "".join([*found, text[at:]])


def _is_own(path: str) -> bool:
    """Whether a file on a rank is a module of this package."""
    _, found, module = path.replace("\\", "/").rpartition("/spark_dl/")
    return bool(found) and (_PACKAGE / module).is_file()


def _of_cell(frame: re.Match[str]) -> str | None:
    """Returns the frame of a cell of this notebook; None for another one. Only this process has the source of cells."""
    path, line, name, code = frame.groups()
    compiler: Any = getattr(_shell(), "compile", None)
    label = compiler.format_code_name(path) if hasattr(compiler, "format_code_name") else None
    if label is None:
        return None
    if not code and (source := linecache.getline(path, int(line)).strip()):
        code = f"    {source}\n"
    return f"  {' '.join(label)}, line {line}, in {name}\n{code}"


def _called_from(error: RankError) -> str:
    """Returns the frames of the driver, without those of IPython."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if "/IPython/" not in frame.filename.replace("\\", "/")]
    return fold(harmless("".join(traceback.format_list(shown))))


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
