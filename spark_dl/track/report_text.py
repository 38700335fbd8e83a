"""How a report writes numbers, times and durations."""

from __future__ import annotations

import time
from typing import Any

from spark_dl.track.run_log import number


def text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if (as_number := number(value)) is not None:
        return f"{as_number:.4g}"
    if isinstance(value, list):
        return ", ".join(text(each) for each in value[:8]) + (", ..." if len(value) > 8 else "")
    return str(value)


def when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def duration(seconds: float) -> str:
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, hours = int(seconds / 60), int(seconds / 3600)
    return f"{minutes} min {seconds % 60:.0f} s" if hours < 1 else f"{hours} h {minutes % 60} min"
