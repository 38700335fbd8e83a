"""A clock that jumps: a library for `LD_PRELOAD` in whose process the time of day can be set, and the others' cannot.

Only the time of day: the monotonic clock is that of the kernel, as after `date --set`.
"""

import ctypes
import shutil
import subprocess

HAS_COMPILER = shutil.which("gcc") is not None
_SOURCE = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long jumped;
void jump_clock(long seconds) { jumped = seconds; }
int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jumped;
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


def build_clock(folder):
    """The path of the library."""
    (folder / "clock.c").write_text(_SOURCE)
    library = folder / "clock.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c"]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def jump(library, seconds):
    """Sets the time of day of this process so many seconds off."""
    ctypes.CDLL(library).jump_clock(ctypes.c_long(seconds))
