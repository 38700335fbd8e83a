"""Which errors a user may see, and what was refused with them."""

from collections import Counter

REFUSED = Counter()
"""How often something was refused, by the words of the error."""


def note(what):
    """Counts something that was refused. The words are shown at the end, to be read by people."""
    REFUSED[what] += 1


def clear_text(error):
    """The words of an error of ours; None for errors that no user should see."""
    text = str(error)
    if isinstance(error, ValueError) or type(error).__module__.startswith("spark_dl"):
        return text
    if "row group " in text and "cannot read " in text:  # of a task, with Spark's stacks
        return text[text.rindex("cannot read ") :]
    if "ValueError: " in text or "BadCellsError: " in text:
        return text[text.rindex("Error: ") + 7 :]
    return None


def without_digits(text):
    """The first words of an error, the same for all numbers."""
    return "".join("0" if ch.isdigit() else ch for ch in (text.splitlines() or [""])[0])[:110]
