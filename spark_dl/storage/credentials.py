"""Refuses URLs with credentials, which would be logged and stored. Used on driver and ranks."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote

BUCKETS = ("s3", "gs", "gcs")
"""Schemes whose host is a bucket, which has no port."""
_SECRET = re.compile(r"secret|password|token|signature|credential$|(^|_|-)(key|sig|sas|pwd)$", re.IGNORECASE)


def check_no_credentials(scheme: str, host: str, path: str, options: str) -> None:
    """Raises ValueError, without the credentials, if the parts of a URL have a password, a key or a token."""
    user, has_user, name = host.rpartition("@")
    has_secret = any(_SECRET.search(key) for key, _ in parse_qsl(options, keep_blank_values=True))
    shown = f"{scheme}://{'***@' if has_user else ''}{name}{quote(path)}{'?***' if options else ''}"
    if _has_cut_password(scheme, name, path + options):
        has_secret, shown = True, f"{scheme}://***"
    if (has_user and ":" in user) or has_secret:
        raise ValueError(
            f"the URL {shown!r} has credentials, which would be logged and stored; remove them, and set them "
            "in the environment of driver and executors (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or use a "
            "profile or role"
        )


def _has_cut_password(scheme: str, host: str, rest: str) -> bool:
    """Whether a host is the beginning of `user:password`, as the password has a slash or a question mark.

    rest: what follows.
    """
    if scheme not in BUCKETS:
        host = re.sub(r":\d*\Z", "", re.sub(r"\A\[.*\]", "", host))  # [...] is an IPv6 address
    return ":" in host and "@" in rest
