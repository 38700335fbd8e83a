"""PNG and JPEG images as arrays, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


_MOST_PIXELS = 1 << 27
"""A camera has 108 million. A file of some kilobytes can claim more, and Pillow itself would decode 178 million."""


class OtherSizeError(ValueError):
    """An image whose height or width is not the expected one."""


def read_image(cell: Any, shape: Sequence[int | None] = (), *, resize: Sequence[int] | None = None) -> Array:
    """Decodes an image as RGB or gray levels: [height, width, 3] or [height, width], uint8 or uint16.

    cell: bytes of the file. shape: expected shape; height and width are checked before the pixels are decoded.
    resize: height and width that 8-bit images are scaled to, by linear interpolation over all pixels.
    Raises OtherSizeError for another height or width, ValueError for another mode and for more than 2^27 pixels, before
    they are decoded, and Pillow's errors for bytes that are not an image.
    """
    from PIL import Image

    with _opened(cell) as image:
        if resize is not None:
            _check_mode(_mode(image, cell))
            height, width = resize
            return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        for expected, found in zip(shape, (image.height, image.width), strict=False):
            if expected not in (None, found):
                raise OtherSizeError(f"an image of {image.height} x {image.width} pixels")
        if not _is_deep_rgb(image, cell):
            return _pixels(image)
        high = _pixels(image, "RGB;16B")
    with _opened(cell) as image:
        # Pillow keeps one byte of each 16-bit sample, depending on the raw mode: first the high bytes, then the low.
        low = _pixels(image, "RGB;16L")
    deep: Array = (high.astype(np.uint16) << 8) | low
    return deep


def image_shape(cell: Any, resize: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape of an image as a uint8 array, from the file's header; PNG checksums are verified.

    `resize` is as for `read_image`. Raises ValueError for bytes that are not PNG or JPEG, and for images other than
    8-bit gray levels or RGB.
    """
    try:
        with _opened(cell) as image:
            mode = _mode(image, cell)
            shape = (image.height, image.width) if resize is None else tuple(resize)
            image.verify()
    except Exception as error:  # Pillow does not define what it raises for bytes that are not an image
        raise ValueError(f"a cell that is not a PNG or JPEG image ({type(error).__name__}: {error!s:.200})") from error
    _check_mode(mode)
    return (*shape, 3) if mode == "RGB" else shape


def _opened(cell: Any) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(cell), formats=("PNG", "JPEG"))
    except UnidentifiedImageError:  # its message is the address of the bytes
        raise ValueError("not a PNG or JPEG file") from None
    if image.height * image.width > _MOST_PIXELS:
        raise ValueError(
            f"an image of {image.height} x {image.width} pixels, expected at most {_MOST_PIXELS:,}; scale or cut it "
            "before"
        )
    return image


def _mode(image: Any, cell: Any) -> str:
    return "RGB of 16 bits" if _is_deep_rgb(image, cell) else str(image.mode)


def _check_mode(mode: str) -> None:
    if mode not in ("L", "RGB"):
        raise ValueError(f"an image of mode {mode}; only 8-bit gray levels (L) and RGB are supported")


def _is_deep_rgb(image: Any, cell: Any) -> bool:
    return image.format == "PNG" and image.mode == "RGB" and bytes(cell[24:25]) == b"\x10"


def _pixels(image: Any, raw_mode: str | None = None) -> Array:
    if raw_mode is not None:
        image.tile = [(decoder, box, offset, raw_mode) for decoder, box, offset, _ in image.tile]
    if image.mode not in ("L", "RGB", "I", "I;16", "I;16B"):
        raise ValueError(f"an image of mode {image.mode}, expected gray levels or RGB")
    pixels = np.asarray(image)
    return pixels.astype(np.uint16) if image.mode.startswith("I") else pixels
