"""Images: their shape from the header, their pixels, and what is none."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from spark_dl.data.columns.images import OtherSizeError, image_shape, read_image
from tests.builders.images import pixels, png


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (7, 5, 3)])
def test_the_header_gives_the_shape_of_the_pixels(image_format, shape):
    file = png(shape, image_format=image_format)
    assert image_shape(file) == shape
    found = read_image(file, shape)
    assert (found.shape, found.dtype) == (shape, np.uint8)
    if image_format == "PNG":
        np.testing.assert_array_equal(found, pixels(shape))


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "LA", "I;16"])
def test_other_modes_are_an_error(mode):
    with pytest.raises(ValueError, match="an image of mode .*; only 8-bit gray levels"):
        image_shape(png((4, 4, 3) if mode != "I;16" else (4, 4), mode=mode))


@pytest.mark.parametrize("damage", [lambda f: b"", lambda f: b"GIF89a", lambda f: f[:20], lambda f: b"x" + f[1:],
                                    lambda f: f[:50] + bytes([f[50] ^ 1]) + f[51:]])  # fmt: skip
def test_what_is_no_image_is_an_error(damage):
    with pytest.raises(ValueError, match="a cell that is not a PNG or JPEG image"):
        image_shape(damage(png((40, 40))))


@pytest.mark.parametrize("size", [(13_300, 13_400), (1, 1 << 28), (60_000, 60_000)])
def test_S23_an_image_that_claims_too_many_pixels_is_not_decoded(size):
    """In 26 kB: the header alone, with its checksum, as no pixel is read."""
    file = bytearray(png((4, 4)))
    file[16:24] = struct.pack(">II", size[1], size[0])
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    for read in (lambda: read_image(bytes(file), resize=(8, 8)), lambda: image_shape(bytes(file), (8, 8))):
        with pytest.raises(
            (ValueError, Image.DecompressionBombError), match=r"image of \d+ x \d+ pixels|exceeds limit"
        ):
            read()


def test_an_image_of_another_size_is_not_unpacked():
    with pytest.raises(OtherSizeError, match="an image of 5 x 7 pixels"):
        read_image(png((5, 7)), (7, 5))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("shape", [(9, 6), (4, 6, 3)])
def test_images_are_scaled_to_one_size(image_format, shape):
    channels = shape[2:]
    file = png(shape, image_format=image_format)
    for size in ((3, 2), (20, 30), shape[:2]):
        found = read_image(file, shape, resize=size)
        assert image_shape(file, size) == found.shape == (*size, *channels)
        assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, read_image(file))
    flat = np.full((8, 8, *channels), 77, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(flat).save(buffer, image_format)
    assert (read_image(buffer.getvalue(), resize=(3, 5)) == 77).all()
    with pytest.raises(ValueError, match="an image of mode RGBA"):
        read_image(png((4, 4, 3), mode="RGBA"), resize=(2, 2))
