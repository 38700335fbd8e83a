"""What is a secret: by the name of a setting, by its value, and in URLs. Used on driver and ranks.

URLs are logged and stored, so those of files must not have credentials. For settings of Spark and URLs of other
services, this is what is not shown.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, unquote

BUCKETS = ("s3", "gs", "gcs")
"""Schemes whose host is a bucket, which has no port."""
HIDDEN_NAMES = (
    r"(?i)secret|passw|passphrase|pwd$|token|credential|(access|account|private|api|storage|shared|signing)[._-]?key"
    r"|azure[.]sas[.]|encryption[.]key$|connection[._-]?string"
)
"""The names of settings whose values are not shown, also as a pattern of Java: those of Spark, and of Azure, Google, S3
and common services."""
_SECRET_OPTION = re.compile(
    rf"{HIDDEN_NAMES}|signature|(^|[._-])(key|sig|sas|pass|auth|authorization|bearer|jwt|code)$"
)
_SECRET_VALUE = re.compile(
    r"(?i)(passw|passwd|password|pwd|accountkey|sharedaccesskey|secret|token)\w*=|://[^/@\s]*:[^@\s]+@"
    r"|(?-i:\b(gh[opsur]_|github_pat_|glpat-|hf_|xox[abps]-)[A-Za-z0-9]|\beyJ[\w-]+\.eyJ)"
)
"""Values with a secret in them: the URL of a database, a connection string, a token of GitHub, GitLab, Hugging Face or
Slack, a JSON Web Token."""
_USER = re.compile(r"://([^:/?#@]*)(:[^@]*)?@")
"""User and password in a URL, as SQLAlchemy reads them: a password may have slashes, and no @."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether a setting is one that nobody else may see, by its name or by its value."""
    return bool(re.search(HIDDEN_NAMES, name) or _SECRET_VALUE.search(value))


def secrets_of(url: str) -> list[str]:
    """Returns the passwords, keys and tokens in the URL of a service or a database, as they are written in it."""
    secrets = []
    if user := _USER.search(url):
        if user[2]:
            secrets.append(user[2][1:])
        elif _is_token(url.partition(":")[0], user[1]):
            secrets.append(user[1])
    for pair in re.split("[&;]", url.partition("?")[2]):
        name, _, value = pair.partition("=")
        if _is_secret_option(unquote(name), unquote(value)):
            secrets.append(value)
    return [secret for secret in secrets if secret]


def without_secrets(url: str, text: str | None = None) -> str:
    """Returns a URL without its user and its secrets, or a text without those of the URL."""
    shown = re.sub(_USER, "://", url) if text is None else text
    for secret in secrets_of(url):
        for written in {secret, unquote(secret)}:
            shown = shown.replace(written, "***")
    return shown


def check_no_credentials(scheme: str, host: str, path: str, options: str) -> None:
    """Raises ValueError, without the credentials, if the parts of a URL have a password, a key or a token."""
    user, has_user, name = host.rpartition("@")
    has_secret = any(_is_secret_option(key, value) for key, value in parse_qsl(options, keep_blank_values=True))
    shown = f"{scheme}://{'***@' if has_user else ''}{name}{quote(path)}{'?***' if options else ''}"
    if _has_cut_password(scheme, name, path + options):
        has_secret, shown = True, f"{scheme}://***"
    if has_secret or (has_user and (":" in user or _is_token(scheme, user))):
        raise ValueError(
            f"the URL {shown!r} has credentials, which would be logged and stored; remove them, and set them "
            "in the environment of driver and executors (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or use a "
            "profile or role"
        )


def _is_secret_option(name: str, value: str) -> bool:
    return bool(_SECRET_OPTION.search(name) or _SECRET_VALUE.search(value))


def _is_token(scheme: str, user: str) -> bool:
    """Whether a user without a password is one: of web servers, who take tokens so, or by its form."""
    return scheme in ("http", "https") or _SECRET_VALUE.search(user) is not None


def _has_cut_password(scheme: str, host: str, rest: str) -> bool:
    """Whether a host is the beginning of `user:password`, as the password has a slash or a question mark.

    Args:
        rest: what follows.
    """
    if scheme not in BUCKETS:
        host = re.sub(r":\d*\Z", "", re.sub(r"\A\[.*\]", "", host))  # [...] is an IPv6 address
    return ":" in host and "@" in rest
