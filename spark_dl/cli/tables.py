"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table. Columns whose cells are numbers are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    is_number = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    ]


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or (cell[0] in "+-." and cell[1:2].isdigit())
