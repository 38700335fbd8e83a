/* Ends this process by SIGKILL at the n-th call that changes a file or a folder below a path, or lets such a call fail
 * with an error of the storage. For LD_PRELOAD.
 * A call of write is done by half first, so that the file has a part of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[4096];
static long left = -1; /* calls before the end; -1: never */
static int after_call; /* whether the last call is done, whole, before the end */

static char failing[32]; /* name of the function that fails, or the first letters of it */
static int failing_error; /* its errno */
static long failures; /* how often it fails */

/* Lets the next calls of a function fail. The path can be the beginning of a file's name. */
void kill_points_fail(const char *path, const char *function, int error, long times) {
    strncpy(below, path, sizeof below - 1);
    strncpy(failing, function, sizeof failing - 1);
    failing_error = error;
    failures = times;
}

void kill_points_arm(const char *path, long at, int after) {
    strncpy(below, path, sizeof below - 1);
    after_call = after;
    left = at;
}

static int is_below(const char *path) { return path && (left >= 0 || failures > 0) && !strncmp(path, below, strlen(below)); }

static int is_below_fd(int fd) {
    char name[64], path[4096];
    if (left < 0 && failures <= 0) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_below(path);
}

static void end(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

/* Returns whether this call is the last one. */
static int is_last(void) {
    if (left < 0) return 0;
    if (left > 0) { left--; return 0; }
    if (!after_call) end();
    return 1;
}

static int fails(const char *function) {
    if (failures <= 0 || strncmp(function, failing, strlen(failing))) return 0;
    failures--;
    errno = failing_error;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define DO(is_own, call) do { int own = (is_own); if (own && fails(__func__)) return -1; int last = own && is_last(); __typeof__(call) found = (call); if (last) end(); return found; } while (0)

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    if (is_below_fd(fd) && left == 0 && !after_call) { real(fd, data, n / 2); end(); }
    DO(is_below_fd(fd), real(fd, data, n));
}
ssize_t writev(int fd, const struct iovec *parts, int n) { REAL(writev); DO(is_below_fd(fd), real(fd, parts, n)); }
int fsync(int fd) { REAL(fsync); DO(is_below_fd(fd), real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); DO(is_below_fd(fd), real(fd)); }
int rename(const char *from, const char *to) { REAL(rename); DO(is_below(to), real(from, to)); }
int unlink(const char *path) { REAL(unlink); DO(is_below(path), real(path)); }
int rmdir(const char *path) { REAL(rmdir); DO(is_below(path), real(path)); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); DO(is_below(path), real(path, mode)); }
int open(const char *path, int flags, ...) {
    REAL(open);
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more);
    DO((flags & O_CREAT) && is_below(path), real(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more);
    DO((flags & O_CREAT) && is_below(path), real(path, flags, mode));
}
