"""Which errors of a storage time can mend, and which need another path, permission or setting."""

from __future__ import annotations

import errno
import re

_OF_PATHS = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_OF_SETTINGS = (errno.ELOOP, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL)
_OF_THE_SETUP = re.compile(r"no_?such_?bucket|bucket \S+ not found|unable to load lib", re.IGNORECASE)


def error_class(error: Exception) -> type[ValueError] | type[RuntimeError]:
    """Returns the class of the error that tells the user of `error`.

    RuntimeError if running again can help, as with a full disk or a server that does not answer; ValueError otherwise.
    """
    can_pass = isinstance(error, OSError) and not isinstance(error, _OF_PATHS) and error.errno not in _OF_SETTINGS
    return RuntimeError if can_pass and not _OF_THE_SETUP.search(str(error)) else ValueError
