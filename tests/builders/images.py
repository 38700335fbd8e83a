"""Image files: of random pixels, of a camera that was turned, and in other modes and formats."""

import io

import numpy as np
from PIL import Image


def pixels(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def png(shape, seed=0, image_format="PNG", mode=None):
    """An image file of random pixels. # shape: (height, width) or (height, width, 3)"""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels(shape, seed))
    (image if mode is None else image.convert(mode)).save(buffer, image_format)
    return buffer.getvalue()


def turned(orientation, image_format="JPEG", size=(40, 24)):
    """A photo, dark on the left as people see it, as a camera that was turned stores it. # size: (height, width)"""
    seen = np.full((*size, 3), 200, np.uint8)
    seen[:, : size[1] // 2] = 20
    stored = Image.fromarray(seen)
    back = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90",
            7: "TRANSVERSE", 8: "ROTATE_270"}  # fmt: skip
    if orientation in back:
        stored = stored.transpose(getattr(Image.Transpose, back[orientation]))
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(buffer, image_format, exif=exif)
    return buffer.getvalue(), seen


def other(mode, image_format="PNG"):
    """An image of one colour, (200, 100, 50) or its gray level, in a mode."""
    image = Image.new("RGB", (6, 4), (200, 100, 50))
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 6), 100 << 8, np.uint16))
    elif mode == "P":
        image = image.quantize(4)
    else:
        image = image.convert(mode)
    image.save(buffer := io.BytesIO(), image_format, **({"lossless": True} if image_format == "WEBP" else {}))
    return buffer.getvalue()
