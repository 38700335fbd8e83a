"""A mount that does not answer, as that of an NFS server that is gone."""

import contextlib
import ctypes
import os

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_DETACH = 2


@contextlib.contextmanager
def dead_mount(folder):
    """For the block, each use of a folder waits for a server of a file system (FUSE) that does not answer.

    Afterwards the waiting calls fail, and the folder is as before. Skips the test where this is not allowed.
    """
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"cannot mount: {error}")
    try:
        options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if _LIBC.mount(b"dead", os.fsencode(folder), b"fuse", 0, options):
            pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            _LIBC.umount2(os.fsencode(folder), _DETACH)
    finally:
        os.close(server)
