"""Image files as arrays, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_dl.data.columns.encoding import Encoding

Array = npt.NDArray[Any]
_MOST_PIXELS = 1 << 27
"""A camera has 108 million. A file of some kilobytes can claim more, and Pillow itself would decode 178 million."""
_ORIENTATION = 0x0112  # of EXIF
_JPEG_END = b"\xff\xd9"


class OtherSizeError(ValueError):
    """An image whose height or width is not the expected one."""


def read_image(cell: Any, shape: Sequence[int | None] = (), how: Encoding | None = None) -> Array:
    """Decodes an image: [height, width, 3] or [height, width], uint8, or uint16 without `resize` and `mode`.

    Args:
        cell: bytes of the file.
        shape: expected shape; height and width are checked before the pixels are decoded.
        how: the settings of `data.encode`: `resize`, `mode`, `orientation`, `interpolation` and `formats`.

    Raises:
        OtherSizeError: For another height or width.
        ValueError: For another mode and for more than 2^27 pixels, before they are decoded, and Pillow's errors for
            bytes that are not an image.
    """
    how = how or Encoding("image")
    with _opened(cell, how) as image:
        turned = _orientation(image, how)
        if how.resize is None:
            for expected, found in zip(shape, _size(image, turned), strict=False):
                if expected not in (None, found):
                    raise OtherSizeError("an image of {} x {} pixels".format(*_size(image, turned)))
            if how.mode is None and turned == 1:
                return _as_stored(cell, image, how)
        return _converted(image, cell, how, is_turned=turned != 1)


def _as_stored(cell: Any, image: Any, how: Encoding) -> Array:
    if not _is_deep_rgb(image, cell):
        return _pixels(image)
    high = _pixels(image, "RGB;16B")
    with _opened(cell, how) as again:
        # Pillow keeps one byte of each 16-bit sample, depending on the raw mode: first the high bytes, then the low.
        low = _pixels(again, "RGB;16L")
    deep: Array = (high.astype(np.uint16) << 8) | low
    return deep


def _converted(image: Any, cell: Any, how: Encoding, *, is_turned: bool) -> Array:
    """The pixels of an 8-bit image: turned, converted to a mode and scaled, in this order."""
    from PIL import Image, ImageOps

    _check_mode(_mode(image, cell), how)
    if is_turned:
        image = ImageOps.exif_transpose(image)
    if how.mode in ("RGB", "L"):
        if image.mode.startswith("I"):  # 16 bits, of which Pillow would cut off the high ones
            image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
        image = image.convert(how.mode)
    if how.resize is not None:
        height, width = how.resize
        nearest = how.interpolation == "nearest"
        image = image.resize((width, height), Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR)
    return np.asarray(image)


def image_shape(cell: Any, how: Encoding | None = None) -> tuple[int, ...]:
    """The shape of an image as a uint8 array, from the file's header.

    The checksums of a PNG and the end of a JPEG are verified, so that a file that was cut off is found when it is
    written.

    Args:
        how: as for `read_image`.

    Raises:
        ValueError: For bytes that are not such an image, or not a whole one, and for images of another mode than those
            that the settings take.
    """
    how = how or Encoding("image")
    try:
        with _opened(cell, how) as image:
            mode = _mode(image, cell)
            shape = _size(image, _orientation(image, how)) if how.resize is None else tuple(how.resize)
            if image.format == "PNG" or (image.format == "JPEG" and bytes(cell[-2:]) == _JPEG_END):
                image.verify()
            else:  # Pillow verifies nothing of other formats, and bytes may follow the end of a whole JPEG
                image.load()
    except Exception as error:  # Pillow does not define what it raises for bytes that are not an image
        named = " or ".join(how.formats or ("PNG", "JPEG"))
        raise ValueError(f"a cell that is not a {named} image ({type(error).__name__}: {error!s:.200})") from error
    _check_mode(mode, how)
    return (*shape, 3) if (how.mode if how.mode in ("RGB", "L") else mode) == "RGB" else shape


def _opened(cell: Any, how: Encoding) -> Any:
    from PIL import Image, UnidentifiedImageError

    formats = how.formats or ("PNG", "JPEG")
    try:
        image = Image.open(io.BytesIO(cell), formats=formats)
    except UnidentifiedImageError:  # its message is the address of the bytes
        raise ValueError(f"not a {' or '.join(formats)} file") from None
    if image.height * image.width > _MOST_PIXELS:
        raise ValueError(
            f"an image of {image.height} x {image.width} pixels, expected at most {_MOST_PIXELS:,}; scale or cut it "
            "before"
        )
    return image


def _orientation(image: Any, how: Encoding) -> int:
    """How the picture lies in the file, 1 to 8 as in EXIF; 1 if it is to be ignored."""
    if how.orientation != "apply" or "exif" not in image.info:
        return 1
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _size(image: Any, orientation: int) -> tuple[int, int]:
    """Height and width of the picture as people see it."""
    return (image.width, image.height) if orientation > 4 else (image.height, image.width)


def _mode(image: Any, cell: Any) -> str:
    return "RGB of 16 bits" if _is_deep_rgb(image, cell) else str(image.mode)


def _check_mode(mode: str, how: Encoding) -> None:
    if how.mode in ("RGB", "L"):
        is_known = mode != "F"  # of which nobody knows the range
    else:
        is_known = mode in (("L", "RGB", "P") if how.mode == "unchanged" else ("L", "RGB"))
    if not is_known:
        raise ValueError(
            f"an image of mode {mode}; only 8-bit gray levels (L) and RGB are read as they are; mode: RGB or mode: L "
            "in data.encode converts others, and mode: unchanged reads the indices of a palette"
        )


def _is_deep_rgb(image: Any, cell: Any) -> bool:
    return image.format == "PNG" and image.mode == "RGB" and bytes(cell[24:25]) == b"\x10"


def _pixels(image: Any, raw_mode: str | None = None) -> Array:
    if raw_mode is not None:
        image.tile = [(decoder, box, offset, raw_mode) for decoder, box, offset, _ in image.tile]
    if image.mode not in ("L", "RGB", "I", "I;16", "I;16B"):
        raise ValueError(f"an image of mode {image.mode}, expected gray levels or RGB")
    pixels = np.asarray(image)
    return pixels.astype(np.uint16) if image.mode.startswith("I") else pixels
