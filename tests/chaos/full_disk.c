/* A disk that has no more room: while the file FULL_DISK is there, nothing on its
 * file system grows any more for the program that loads this. What is there
 * already can be overwritten, as on a real one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int grows(int fd, off_t at, size_t bytes) {
    const char *full = getenv("FULL_DISK");
    struct stat disk, file;
    if (!full || stat(full, &disk) || fstat(fd, &file))
        return 0;
    if (!S_ISREG(file.st_mode) || file.st_dev != disk.st_dev)
        return 0;
    return at < 0 || at + (off_t)bytes > file.st_size;
}

static size_t length(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int n = 0; n < count; n++)
        bytes += parts[n].iov_len;
    return bytes;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define REFUSE(fd, at, bytes) \
    if (grows(fd, at, bytes)) { errno = ENOSPC; return -1; }

static off_t here(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags & O_APPEND ? -1 : lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *from, size_t bytes) {
    REFUSE(fd, here(fd), bytes)
    return NEXT(write)(fd, from, bytes);
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at) {
    REFUSE(fd, at, bytes)
    return NEXT(pwrite)(fd, from, bytes, at);
}

ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t at) {
    REFUSE(fd, at, bytes)
    return NEXT(pwrite64)(fd, from, bytes, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    REFUSE(fd, at, length(parts, count))
    return NEXT(pwritev)(fd, parts, count, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    REFUSE(fd, at, length(parts, count))
    return NEXT(pwritev64)(fd, parts, count, at);
}

int posix_fallocate(int fd, off_t at, off_t bytes) {
    return grows(fd, at, bytes) ? ENOSPC : NEXT(posix_fallocate)(fd, at, bytes);
}

int posix_fallocate64(int fd, off64_t at, off64_t bytes) {
    return grows(fd, at, bytes) ? ENOSPC : NEXT(posix_fallocate64)(fd, at, bytes);
}
