"""Encodings: what the numbers of a column stand for (strings, times, decimals, pixels, or plain numbers)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from spark_dl.config.checks import ENCODINGS, IMAGE_CHOICES

Settings = Mapping[str, Mapping[str, Any]]
"""`data.encode`: settings by column."""
MAX_VOCABULARY = 100_000
"""Largest vocabulary without `max_size`."""
_SOURCE_TYPES = r"date|timestamp|timestamp_ntz|decimal\([0-9]{1,2},[0-9]{1,2}\)"


@dataclass(frozen=True)
class Encoding:
    """What the numbers of a column stand for. Saved with the column in manifests and checkpoints."""

    kind: str = "number"
    """`number`, unchanged; `timestamp`, ticks since 1970-01-01 (UTC, or local time for types without a time zone);
    `duration`, ticks; `float`, the float64 nearest to a decimal; `decimal`, its unscaled value, an integer;
    `vocabulary`, the index of a string; `hash`, the bucket of a string; `bytes`, UTF-8 or binary; `image`, pixels of a
    PNG or JPEG file."""
    unit: str | None = None
    """Unit of ticks: `D`, `s`, `ms`, `us` or `ns`."""
    scale: int | None = None
    """Scale of decimals: the value is the number / 10**scale."""
    buckets: int | None = None
    """Number of hash buckets. A bucket is the CRC-32 (zlib, `crc32` in Spark SQL) of the UTF-8 bytes modulo this."""
    vocabulary: tuple[str, ...] | None = None
    """The strings, most frequent first; None until they are counted."""
    unknown: str = "zero"
    """Strings that are not in the vocabulary: `zero` maps them to 0 and the first known string to 1; `error` raises,
    and maps the first known string to 0."""
    resize: tuple[int, int] | None = None
    """Height and width that images are scaled to; None if all images have one shape."""
    mode: str | None = None
    """`RGB` or `L` if images are converted to it; `unchanged` if the indices of palettes are read; None if all images
    are gray levels or RGB."""
    orientation: str = "ignore"
    """`apply` if images are turned as their EXIF data say. Datasets that do not say it were written without."""
    interpolation: str = "bilinear"
    """`bilinear` or `nearest`: how images are scaled."""
    formats: tuple[str, ...] | None = None
    """The formats of images, as Pillow names them; None for PNG and JPEG."""
    source_type: str | None = field(default=None, compare=False)
    """Spark's type of a time or a decimal before it was encoded, such as `timestamp_ntz` or `decimal(8,2)`, so that
    keys get it back. Not compared: datasets of before do not have it."""
    tokenizer: str | None = field(default=None, compare=False)
    """A digest of the tokenizer that `spark_dl.tokenize` made these tokens with; None if it is not known. Compared by
    `fits` alone, as tokens that were made elsewhere do not have it."""

    @classmethod
    def of_image(cls, settings: Mapping[str, Any]) -> Encoding:
        """Returns the encoding of images with the settings of `data.encode`."""
        size, formats = settings.get("resize"), settings.get("formats")
        return cls(
            "image", resize=size and (size[0], size[1]), mode=settings.get("mode"),
            orientation=settings.get("orientation", "apply"), interpolation=settings.get("interpolation", "bilinear"),
            formats=formats and tuple(formats),
        )  # fmt: skip

    def __str__(self) -> str:
        """Returns the kind and the settings that are not as usual, such as `vocabulary (unknown: error)`."""
        usual = {f.name: f.default for f in fields(self)}
        others = {name: getattr(self, name) for name in usual if name != "kind"}
        told = [f"{name}: {value}" for name, value in others.items() if value != usual[name]]
        return f"{self.kind} ({', '.join(told)})" if told else self.kind

    def fits(self, other: Encoding) -> bool:
        """Whether equal numbers stand for the same: of tokens, whether their tokenizers are not known to differ."""
        return self == other and (None in (self.tokenizer, other.tokenizer) or self.tokenizer == other.tokenizer)

    @property
    def is_lookup(self) -> bool:
        """Whether strings become integers: indices of a vocabulary, or hash buckets."""
        return self.kind in ("vocabulary", "hash")

    @property
    def num_values(self) -> int | None:
        """Size of an embedding table for this column; None if its numbers are not indices."""
        if self.vocabulary is not None:
            return len(self.vocabulary) + (self.unknown == "zero")
        return self.buckets

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoding:
        """Restores an encoding from `dataclasses.asdict` after a JSON round trip.

        Raises ValueError for invalid values, TypeError for unknown keys.
        """
        is_value: dict[str, Callable[[Any], bool]] = {
            "kind": lambda v: v in [*ENCODINGS],
            "unit": lambda v: v in (None, "D", "s", "ms", "us", "ns"),
            "scale": lambda v: v is None or (type(v) is int and abs(v) < 2**31),
            "buckets": lambda v: v is None or (type(v) is int and 0 < v < 2**63),
            "vocabulary": lambda v: v is None or (isinstance(v, list) and all(type(string) is str for string in v)),
            "unknown": lambda v: v in ("zero", "error"),
            "resize": lambda v: (
                v is None or (isinstance(v, list) and [type(n) is int and n > 0 for n in v] == [True] * 2)
            ),
            "mode": lambda v: v in (None, *IMAGE_CHOICES["mode"]),
            "orientation": lambda v: v in IMAGE_CHOICES["orientation"],
            "interpolation": lambda v: v in IMAGE_CHOICES["interpolation"],
            "source_type": lambda v: v is None or (type(v) is str and re.fullmatch(_SOURCE_TYPES, v) is not None),
            "formats": lambda v: v is None or (isinstance(v, list) and v != [] and all(type(f) is str for f in v)),
            "tokenizer": lambda v: v is None or (type(v) is str and v != ""),
        }
        for key, value in plain.items():
            if key in is_value and not is_value[key](value):
                raise ValueError(f"encoding.{key}: found the invalid value {value!r:.200}")
        lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists})
