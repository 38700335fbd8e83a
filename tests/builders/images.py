"""Image files of random pixels."""

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
