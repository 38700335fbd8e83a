"""Values as JSON: how the tests and their scripts in Petastorm's environment tell each other what they read.

Two values have the same JSON if they have the same dtype, shape and bits.
"""

import decimal

import numpy as np


def plain(value):
    """A scalar, an array, text, bytes, a Decimal or None as JSON has it."""
    if value is None or isinstance(value, str):
        return None if value is None else str(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    array = np.asarray(value)
    if array.dtype.kind == "O":
        return {"list": [plain(v) for v in array]}
    return {"dtype": array.dtype.str, "shape": list(array.shape), "hex": array.tobytes().hex()}


def cells(plain_array):
    """The array that `plain` made JSON of."""
    array = np.frombuffer(bytes.fromhex(plain_array["hex"]), plain_array["dtype"])
    return array.reshape(plain_array["shape"])


def plain_rows(columns):
    """Columns, each [rows, ...], as one dict per row, in the order of `id`."""
    rows = [{name: plain(column[i]) for name, column in columns.items()} for i in range(len(columns["id"]))]
    return [rows[i] for i in np.argsort([int(i) for i in columns["id"]], kind="stable")]
