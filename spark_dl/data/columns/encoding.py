"""What the numbers of a column mean: words, times, decimals, pixels, or plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Mapping[str, Any]]
"""`data.encode`: settings by column."""
MAX_WORDS = 100_000
"""Of a vocabulary without `max_size`."""
CHOICES = {
    "number": ("number",),
    "time": ("timestamp",),
    "duration": ("duration",),
    "decimal": ("decimal", "float"),
    "string": ("vocabulary", "hash", "bytes"),
    "binary": ("bytes", "image"),
}
"""What `as` may be for each family of types; the first is the default, save for strings, which have none."""


@dataclass(frozen=True)
class Encoding:
    """What the numbers of a column mean. It goes with the column: into manifests, checkpoints and predictions."""

    kind: str = "number"
    """`number`, as it is; `timestamp`, ticks since 1970-01-01 (UTC, or local where the type has no time zone);
    `duration`, ticks; `decimal`, its unscaled value; `float`, a decimal's nearest float64; `vocabulary`, the position
    of a word; `hash`, the bucket of a string; `bytes`, UTF-8 or binary; `image`, pixels of a PNG or JPEG file."""
    unit: str | None = None
    """Of ticks: `D`, `s`, `ms`, `us` or `ns`."""
    scale: int | None = None
    """Of decimals: the value is the number / 10**scale."""
    buckets: int | None = None
    """Of hashes: the bucket is CRC-32 (as in zlib, or `crc32` in Spark SQL) of the UTF-8 bytes modulo `buckets`."""
    vocabulary: tuple[str, ...] | None = None
    """The words, most frequent first; None until they are known."""
    unknown: str = "zero"
    """`zero`: words that are not in the vocabulary become 0, and its first word 1; `error`: they are an error, and its
    first word becomes 0."""
    resize: tuple[int, int] | None = None
    """Height and width that images are scaled to; None where all have one shape."""

    @property
    def has_words(self) -> bool:
        """Whether its numbers are those of words, which are looked up."""
        return self.kind in ("vocabulary", "hash")

    @property
    def num_values(self) -> int | None:
        """How many numbers an embedding of this column needs; None where they are not indices."""
        if self.vocabulary is not None:
            return len(self.vocabulary) + (self.unknown == "zero")
        return self.buckets

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoding:
        """From the dict that `dataclasses.asdict` made of it, after a way through JSON.

        Raises ValueError for values that no encoding has, TypeError for other keys.
        """
        is_value = {
            "kind": lambda v: v in [choice for choices in CHOICES.values() for choice in choices],
            "unit": lambda v: v in (None, "D", "s", "ms", "us", "ns"),
            "scale": lambda v: v is None or (type(v) is int and abs(v) < 2**31),
            "buckets": lambda v: v is None or (type(v) is int and 0 < v < 2**63),
            "vocabulary": lambda v: v is None or (isinstance(v, list) and all(type(word) is str for word in v)),
            "unknown": lambda v: v in ("zero", "error"),
            "resize": lambda v: (
                v is None or (isinstance(v, list) and [type(n) is int and n > 0 for n in v] == [True] * 2)
            ),
        }
        for key, value in plain.items():
            if key in is_value and not is_value[key](value):
                raise ValueError(f"encoding.{key}: found {value!r:.200}")
        lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists})
