"""Cells in the forms in which files and Spark hold them."""

import io

import numpy as np
import pyarrow as pa


def vectors(*rows):
    """Spark ML vectors in their Arrow form: a list is a dense one, (size, {index: value}) a sparse one, or None."""
    fields = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    plain = [
        row
        if row is None
        else {"type": 1, "size": None, "indices": None, "values": row}
        if isinstance(row, list)
        else {"type": 0, "size": row[0], "indices": list(row[1]), "values": list(row[1].values())}
        for row in rows
    ]
    return pa.array(plain, pa.struct(fields))


def npy_cells(*arrays, write=np.save):
    def cell(array):
        out = io.BytesIO()
        write(out, array)
        return out.getvalue()

    return [cell(a) for a in arrays]


def zipped(out, array):
    np.savez_compressed(out, arr=array)
