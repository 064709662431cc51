/* Adds 1 ms to each flush, as a disk across a network does. Loaded before the C
 * library, so it reaches whatever flushes through that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

static int after_a_while(const char *name, int fd)
{
    const struct timespec delay = { .tv_sec = 0, .tv_nsec = 1000000 };
    int (*flush)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);

    nanosleep(&delay, NULL);
    return flush(fd);
}

int fsync(int fd)
{
    return after_a_while("fsync", fd);
}

int fdatasync(int fd)
{
    return after_a_while("fdatasync", fd);
}
