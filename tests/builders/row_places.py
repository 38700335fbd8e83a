"""Where rows are: in the files of a dataset, and by the text of an error that names them."""

import re

import pyarrow.parquet as pq


def places_of(shards, column, passes=lambda values: values):
    """(file, row group, row) of each row by its stored value in a column. passes: leaves those that pass filters."""
    found = {}
    for shard in shards.shards:
        file = pq.ParquetFile(f"{shards.url}/{shard.name}")
        for group in range(file.num_row_groups):
            values = passes(file.read_row_group(group, [column])[column].to_pylist())
            found.update({value: (shard.name, group, row) for row, value in enumerate(values)})
    return found


def rows_named(text):
    """The (file, row group, row) that a text names, without those that it leaves out."""
    text = re.sub(r" and \d+ others", "", text)
    return [
        (name, int(group), int(row))
        for numbers, group, name in re.findall(r"rows? ([\d, and]+) of row group (\d+) of ([^\s,]+)", text)
        for row in re.findall(r"\d+", numbers)
    ]
