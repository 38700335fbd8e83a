"""Images: their shape from the header, their pixels, and what is none."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from spark_dl import Data
from spark_dl.data.columns import images
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.images import OtherSizeError, image_shape, read_image
from tests.builders.images import other, pixels, png, turned


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
    small = Encoding("image", resize=(8, 8))
    for read in (lambda: read_image(bytes(file), (), small), lambda: image_shape(bytes(file), small)):
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
        how = Encoding("image", resize=size)
        found = read_image(file, shape, how)
        assert image_shape(file, how) == found.shape == (*size, *channels)
        assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, read_image(file))
    flat = np.full((8, 8, *channels), 77, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(flat).save(buffer, image_format)
    assert (read_image(buffer.getvalue(), (), Encoding("image", resize=(3, 5))) == 77).all()
    with pytest.raises(ValueError, match="an image of mode RGBA"):
        read_image(png((4, 4, 3), mode="RGBA"), (), Encoding("image", resize=(2, 2)))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(10))
def test_photos_are_turned_as_people_see_them_or_left_as_they_are_stored(image_format, orientation):
    """Two classes that differ by it alone were 40 of 80 right."""
    file, seen = turned(orientation, image_format)
    for how in (Encoding.of_image({}), Encoding.of_image({"resize": [20, 12]}), Encoding.of_image({"mode": "L"})):
        found = read_image(file, (), how)
        assert found.shape == image_shape(file, how) == (*(how.resize or seen.shape[:2]), *(() if how.mode else (3,)))
        middle = found.shape[1] // 2
        assert found[:, : middle - 2].max() < 60
        assert found[:, middle + 2 :].min() > 160
    ignored = Encoding.of_image({"orientation": "ignore"})
    stored = seen.shape[:2] if orientation not in (5, 6, 7, 8) else seen.shape[1::-1]
    assert read_image(file, (), ignored).shape[:2] == image_shape(file, ignored)[:2] == stored
    with pytest.raises(OtherSizeError, match="an image of 40 x 24 pixels"):
        read_image(file, (24, 40), Encoding.of_image({}))


def test_masks_keep_their_classes_when_they_are_scaled():
    mask = np.zeros((50, 50), np.uint8)
    mask[13:37, 13:37] = 4
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    data = Data(features=("photo",), label="mask", encode={
        "photo": {"as": "image", "resize": [28, 28]}, "mask": {"as": "image", "resize": [28, 28]}
    })  # fmt: skip
    found = {name: read_image(buffer.getvalue(), (), Encoding.of_image(how)) for name, how in data.encode.items()}
    assert {*np.unique(found["mask"])} == {0, 4}
    assert {*np.unique(found["photo"])} > {0, 4}
    chosen = Data(label="mask", encode={"mask": {"as": "image", "resize": [2, 2], "interpolation": "bilinear"}})
    assert chosen.encode["mask"]["interpolation"] == "bilinear"


@pytest.mark.parametrize(("file", "settings"), [
    *((other(mode), {}) for mode in ("P", "RGBA", "LA", "1", "I;16")),
    (other("CMYK", "JPEG"), {}), (other("RGB", "WEBP"), {"formats": ["PNG", "WEBP"]}),
    (other("P", "GIF"), {"formats": ["GIF"]}), (other("RGB", "TIFF"), {"formats": ["TIFF"]}),
])  # fmt: skip
def test_images_of_other_modes_and_formats_are_converted_where_it_is_asked_for(file, settings):
    for mode, shape in (("RGB", (4, 6, 3)), ("L", (4, 6))):
        how = Encoding.of_image({**settings, "mode": mode})
        found = read_image(file, (), how)
        assert found.shape == image_shape(file, how) == shape
        assert found.dtype == np.uint8
        assert len(np.unique(found.reshape(24, -1), axis=0)) <= 2  # one colour; "1" is dithered
    gray = int(read_image(other("I;16"), (), Encoding.of_image({"mode": "L"}))[0, 0])
    assert gray == 100
    with pytest.raises(ValueError, match="not a PNG or JPEG|of mode .*mode: RGB or mode: L in data.encode converts"):
        image_shape(file)


def test_the_indices_of_a_palette_are_read_where_it_is_asked_for():
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(buffer := io.BytesIO(), "PNG")
    how = Encoding.of_image({"mode": "unchanged", "resize": [4, 4], "interpolation": "nearest"})
    assert {*np.unique(read_image(buffer.getvalue(), (), how))} == {0, 1, 2}
    assert image_shape(buffer.getvalue(), how) == (4, 4)


@pytest.mark.parametrize("cut", [1, 2, 250, 700])
def test_a_jpeg_that_was_cut_off_is_found_by_its_end(cut):
    file = png((40, 40, 3), image_format="JPEG")
    with pytest.raises(ValueError, match="a cell that is not a PNG or JPEG image .*truncated"):
        image_shape(file[:-cut])
    assert image_shape(file + b"after its end") == (40, 40, 3)  # as some cameras write


def test_an_image_of_another_mode_has_no_pixels_to_read():
    with pytest.raises(ValueError, match="an image of mode CMYK, expected gray levels or RGB"):
        images._pixels(Image.new("CMYK", (2, 2)))
