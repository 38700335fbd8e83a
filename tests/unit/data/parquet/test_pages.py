"""Plain pages: the same values as pyarrow's decoder, or none at all; damage is seen."""

import io
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.parquet import file
from spark_dl.data.parquet.buffers import BufferPool
from spark_dl.data.parquet.thrift import I32, STRUCT, TField, write_struct

pytestmark = pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 15, reason="pyarrow 14 writes no page checksums")


def stored(array, *, nullable=False, **options):
    """A Parquet file of one column, its bytes and the metadata of the chunk."""
    settings = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, **options}
    file = io.BytesIO()
    table = pa.table([array], schema=pa.schema([pa.field("x", array.type, nullable=nullable)]))
    pq.write_table(table, file, **settings)
    content = file.getvalue()
    parquet = pq.ParquetFile(pa.BufferReader(content))
    return content, parquet.metadata.row_group(0).column(0), parquet.schema.column(0).max_definition_level


def read(content, chunk, levels, cell_bytes, rows):
    return file.read_plain(
        pa.BufferReader(content), chunk, levels=levels, cell_bytes=cell_bytes, rows=rows, memory=BufferPool()
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "uint64"])
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("page_bytes", [64, 1 << 30])
def test_numbers_are_those_that_were_written(dtype, rows, nullable, page_bytes):
    values = np.random.default_rng(0).integers(0, 1 << 30, rows).astype(dtype)
    options = {"data_page_size": page_bytes, "write_batch_size": 16}
    cells = read(*stored(pa.array(values), nullable=nullable, **options), values.itemsize, rows)
    assert cells.tobytes() == values.tobytes()


@pytest.mark.parametrize("cell_bytes", [1, 5, 300])
@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("page_bytes", [64, 1 << 30])
def test_cells_of_bytes_come_without_their_lengths(cell_bytes, nullable, page_bytes):
    values = np.random.default_rng(0).integers(0, 256, (50, cell_bytes), dtype=np.uint8)
    column = pa.array([v.tobytes() for v in values], pa.binary())
    content, chunk, levels = stored(column, nullable=nullable, data_page_size=page_bytes, write_batch_size=16)
    assert np.array_equal(read(content, chunk, levels, cell_bytes, 50), values)


@pytest.mark.parametrize(
    ("array", "options", "cell_bytes"),
    [
        (pa.array([1, 2, 3]), {"compression": "snappy"}, 8),
        (pa.array([1, 2, 3]), {"use_dictionary": True}, 8),
        (pa.array([1, 2, 3]), {"data_page_version": "2.0"}, 8),
        (pa.array([1, 2, 3]), {"column_encoding": {"x": "DELTA_BINARY_PACKED"}}, 8),
        (pa.array([1, 2, 3]), {}, 4),
        (pa.array([1, None, 3]), {"nullable": True}, 8),
        (pa.array([True, False, True]), {}, 1),
        (pa.array([b"ab", b"cd", b"e"]), {}, 2),
        (pa.array([b"abc", b"d", b"ef"]), {}, 2),
        (pa.array([[1, 2], [3, 4], [5, 6]]), {"nullable": True}, 16),
    ],
    ids=["compressed", "dictionary", "version 2", "delta", "width", "null", "bits", "lengths", "same sum", "list"],
)
def test_what_is_stored_otherwise_is_left_to_pyarrow(array, options, cell_bytes):
    assert read(*stored(array, **options), cell_bytes, 3) is None


@pytest.mark.parametrize("rows", [2, 4])
def test_another_number_of_rows_is_left_to_pyarrow(rows):
    assert read(*stored(pa.array([1, 2, 3])), 8, rows) is None


def test_a_flipped_bit_of_a_value_is_an_error():
    content, chunk, levels = stored(pa.array(np.arange(100)))
    damaged = bytearray(content)
    damaged[chunk.data_page_offset + chunk.total_compressed_size - 5] ^= 1
    with pytest.raises(ValueError, match="checksum does not match"):
        read(bytes(damaged), chunk, levels, 8, 100)


def test_no_damage_of_a_header_gives_other_values():
    """Every bit of the header in turn: an error, nothing, or the values (where the bit says nothing about them)."""
    values = np.arange(100)
    content, chunk, levels = stored(pa.array(values))
    body = chunk.total_compressed_size - values.nbytes
    for bit in range(8 * body):
        damaged = bytearray(content)
        damaged[chunk.data_page_offset + bit // 8] ^= 1 << bit % 8
        try:
            cells = read(bytes(damaged), chunk, levels, 8, 100)
        except (ValueError, LookupError):
            continue
        assert cells is None or cells.tobytes() == values.tobytes()


def page(count, values):
    """A data page of version 1, plain, with a byte of levels in front of its values, and no checksum."""
    body = (1).to_bytes(4, "little") + b"\0" + values
    data = {1: TField(I32, count), 2: TField(I32, 0), 3: TField(I32, 3), 4: TField(I32, 3)}
    return (
        write_struct(
            {
                1: TField(I32, 0),
                2: TField(I32, len(body)),
                3: TField(I32, len(body)),
                5: TField(STRUCT, data),
            }
        )
        + body
    )


@pytest.mark.parametrize(("counts", "found"), [((3, 2), True), ((2, 3), False), ((5, 0), False)])
def test_pages_with_levels_are_joined_and_their_counts_must_be_those_of_their_values(counts, found):
    values = np.arange(5, dtype=np.int32)
    content = page(counts[0], values[:3].tobytes()) + page(counts[1], values[3:].tobytes())
    cells = read(content, Chunk(len(content)), 1, 4, 5)
    assert (cells is not None) == found
    assert not found or cells.tobytes() == values.tobytes()


def test_a_negative_count_does_not_make_up_for_another_page():
    empty = {1: TField(I32, -1), 2: TField(I32, 0), 3: TField(I32, 3), 4: TField(I32, 3)}
    header = write_struct({1: TField(I32, 0), 2: TField(I32, 0), 3: TField(I32, 0), 5: TField(STRUCT, empty)})
    content = page(3, np.arange(3, dtype=np.int32).tobytes()) + header
    assert read(content, Chunk(len(content)), 1, 4, 2) is None


class Chunk:
    """What pyarrow tells of a column chunk of 32-bit numbers that begins with the file."""

    physical_type, compression, dictionary_page_offset, data_page_offset = "INT32", "UNCOMPRESSED", None, 0

    def __init__(self, size):
        self.total_compressed_size = size


def test_a_file_that_ends_early_is_an_error():
    content, chunk, levels = stored(pa.array(np.arange(100)))
    with pytest.raises(ValueError, match="ends"):
        read(content[: chunk.total_compressed_size - 50], chunk, levels, 8, 100)


def test_both_checksums_are_the_same_function():
    content = np.random.default_rng(0).bytes(100_000)
    assert file.crc32(content) == zlib.crc32(content)
