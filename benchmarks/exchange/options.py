"""Options of the comparison of gradient exchanges, and their command line arguments."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exchange.methods import METHODS
from benchmarks.model.profiles import PROFILES
from benchmarks.testbed import netns, testbed

SECTIONS = ("exchange", "backends", "compression", "breakdown", "buckets", "waves", "scaling", "stragglers")


@dataclass(frozen=True)
class Options:
    """Options of the comparison. Plain values, which are sent to the driver's host as JSON.

    The default compares a ring, treeReduce, a shuffle and parameter servers. `FULL` compares everything.
    """

    hosts: tuple[int, ...] = (4,)
    """Numbers of hosts of the section `exchange`. Later sections use the largest."""
    rate_mbit: float | None = 200.0
    """Rate of each link in each direction. For an existing cluster: its rate, if known."""
    mtu: int = testbed.MTU
    """Bytes of a frame on virtual hosts."""
    congestion_control: str = netns.RENO
    """Congestion control of TCP on virtual hosts. The machine's kernel must have it."""
    mib: tuple[float, ...] = (1.0, 8.0, 32.0)
    """Sizes of the gradient. The cost model is fitted to the smallest and largest, and checked on the others."""
    methods: tuple[str, ...] = (
        "ddp", "ddp ring", "ddp topk", "tree_reduce", "shuffle_reduce", "parameter_server sync",
        "parameter_server async", "local_sgd",
    )  # fmt: skip
    sections: tuple[str, ...] = tuple(name for name in SECTIONS if name != "buckets")
    repeats: int = 3
    profile: str = "resnet50"
    """Network of the simulated steps. Its backward pass takes as long as their communication."""
    scale: float = 0.1
    """Fraction of the network's parameters."""
    scaling_ranks: tuple[int, ...] = (1, 2, 4, 8)
    straggler_s: float = 0.05
    """Mean delay of each gradient in the section `stragglers`."""

    def __post_init__(self) -> None:
        for name, known in (("methods", METHODS), ("sections", SECTIONS)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"{name}: unknown {', '.join(unknown)}; expected some of {', '.join(known)}")
        if self.profile not in PROFILES:
            raise ValueError(f"profile: unknown {self.profile}; expected one of {', '.join(PROFILES)}")
        if not self.hosts or min(self.hosts) < 2:
            raise ValueError(f"hosts: expected numbers >= 2, found {listed(self.hosts)}")
        if not self.scaling_ranks or not all(1 <= ranks <= testbed.MAX_HOSTS for ranks in self.scaling_ranks):
            raise ValueError(
                f"scaling_ranks: expected numbers from 1 to {testbed.MAX_HOSTS}, found {listed(self.scaling_ranks)}"
            )
        if 1 not in self.scaling_ranks:
            raise ValueError(
                f"scaling_ranks: expected 1 among the numbers, as the baseline, found {listed(self.scaling_ranks)}"
            )
        if not self.mib or not all(size > 0 for size in self.mib):
            raise ValueError(f"mib: expected sizes above 0, found {listed(self.mib)}")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale: expected a fraction above 0, up to 1, found {self.scale}")
        if not 576 <= self.mtu <= 65535:
            raise ValueError(f"mtu: expected 576 to 65535 bytes, found {self.mtu}")
        if self.repeats < 1 or self.straggler_s < 0 or (self.rate_mbit is not None and self.rate_mbit <= 0):
            raise ValueError("expected repeats of at least 1, no negative straggler_s, and a rate_mbit above 0")


FULL = Options(
    mib=(1.0, 16.0, 64.0),
    methods=tuple(name for name, method in METHODS.items() if method.how != "stream"),
    sections=SECTIONS,
    scaling_ranks=(1, 2, 4, 8, 16),
)
"""All methods and sections. The exchanges take 40 minutes on 2 cores."""

_LENGTHS = """
The default takes about 20 minutes on 2 cores. It measures gradients of 1, 8 and 32 MiB with DDP's ring (by Gloo and by
spark_dl), top-k, treeReduce, a shuffle, synchronous and asynchronous parameter servers and, under stragglers, local
SGD. It has all sections except buckets, and scaling to 8 ranks. --full takes a little more than an hour. It measures
gradients of 1, 16 and 64 MiB, also with Horovod, the other compressions, each all-reduce alone and the other modes of
parameter servers. It has all sections, and scaling to 16 ranks. Other arguments override both.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options as arguments. `from_arguments` sets the defaults."""
    parser.epilog = _LENGTHS
    parser.add_argument("--full", action="store_true", help="measure everything, in about an hour; see below")
    texts: dict[str, tuple[Callable[[str], Any], str]] = {
        "hosts": (list_of(int), "numbers of hosts (4)"),
        "rate_mbit": (float, "rate of each link in each direction (200; with --master unknown)"),
        "mtu": (int, "bytes of a frame on virtual hosts (9000)"),
        "congestion_control": (str, "congestion control of TCP on virtual hosts (reno)"),
        "mib": (list_of(float), "gradient sizes"),
        "methods": (list_of(str), f"of {', '.join(METHODS)}"),
        "sections": (list_of(str), f"of {', '.join(SECTIONS)}"),
        "profile": (str, f"the simulated network: {', '.join(PROFILES)} (resnet50)"),
        "scale": (float, "fraction of its parameters (0.1)"),
        "scaling_ranks": (list_of(int), "numbers of ranks of the section scaling"),
        "straggler_s": (float, "mean delay of each gradient in the section stragglers, in seconds (0.05)"),
    }
    for name, (kind, text) in texts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def from_arguments(args: argparse.Namespace) -> Options:
    """Returns the given options, with defaults by `--full`. Raises ValueError for invalid values."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    if args.master:  # its rate is unknown
        base = dataclasses.replace(FULL if args.full else Options(), rate_mbit=None)
    else:
        base = FULL if args.full else Options()
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})


def listed(values: Sequence[float]) -> str:
    """Returns comma-separated numbers, for an error."""
    return ", ".join(f"{v:g}" for v in values) or "none"


def list_of(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected comma-separated numbers, found {text!r}") from None

    return parse
