/* A disk that a test can fill: while the file $QUEUEBOX_DISK_FULL exists, files below $QUEUEBOX_DISK do not grow. As on a
 * full disk, what is there already can be read and written over; everything else fails with "No space left on device".
 * Loaded into a server or program with LD_PRELOAD (disk.rs). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int refuses(int file, off64_t end) {
    const char *disk = getenv("QUEUEBOX_DISK"), *full = getenv("QUEUEBOX_DISK_FULL");
    char link[64], path[4096];
    struct stat64 found;
    ssize_t length;
    int before = errno, refused = 0;

    if (disk && full && access(full, F_OK) == 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        length = readlink(link, path, sizeof path - 1);
        if (length > 0) {
            path[length] = 0;
            refused = strncmp(path, disk, strlen(disk)) == 0 && fstat64(file, &found) == 0 && S_ISREG(found.st_mode) &&
                      end > found.st_size;
        }
    }
    errno = refused ? ENOSPC : before;
    return refused;
}

static off64_t total(const struct iovec *parts, int count) {
    off64_t sum = 0;
    for (int i = 0; i < count; i++) sum += (off64_t)parts[i].iov_len;
    return sum;
}

/* Where a write without a place of its own ends. */
static off64_t place(int file) {
    off64_t at = lseek64(file, 0, SEEK_CUR);
    struct stat64 found;
    int flags = fcntl(file, F_GETFL);
    if (flags >= 0 && (flags & O_APPEND) && fstat64(file, &found) == 0) return found.st_size;
    return at < 0 ? 0 : at;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *bytes, size_t count) {
    REAL(write);
    return refuses(file, place(file) + (off64_t)count) ? -1 : real(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    return refuses(file, place(file) + total(parts, count)) ? -1 : real(file, parts, count);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t at) {
    REAL(pwrite);
    return refuses(file, at + (off64_t)count) ? -1 : real(file, bytes, count, at);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) {
    REAL(pwrite64);
    return refuses(file, at + (off64_t)count) ? -1 : real(file, bytes, count, at);
}

ssize_t pwritev(int file, const struct iovec *parts, int count, off_t at) {
    REAL(pwritev);
    return refuses(file, at + total(parts, count)) ? -1 : real(file, parts, count, at);
}

ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t at) {
    REAL(pwritev64);
    return refuses(file, at + total(parts, count)) ? -1 : real(file, parts, count, at);
}

int posix_fallocate(int file, off_t at, off_t count) {
    REAL(posix_fallocate);
    return refuses(file, at + count) ? ENOSPC : real(file, at, count);
}

int posix_fallocate64(int file, off64_t at, off64_t count) {
    REAL(posix_fallocate64);
    return refuses(file, at + count) ? ENOSPC : real(file, at, count);
}

int fallocate(int file, int mode, off_t at, off_t count) {
    REAL(fallocate);
    return refuses(file, at + count) ? -1 : real(file, mode, at, count);
}

int fallocate64(int file, int mode, off64_t at, off64_t count) {
    REAL(fallocate64);
    return refuses(file, at + count) ? -1 : real(file, mode, at, count);
}
