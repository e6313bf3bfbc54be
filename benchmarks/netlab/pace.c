/* Holds back every TCP socket of a process: LD_PRELOAD=pace.so NETLAB_BYTES_PER_SECOND=125000000 command.
 *
 * TCP paces by itself what has SO_MAX_PACING_RATE, without a queue's help and without any privilege. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/socket.h>

static void pace(int fd) {
    const char *text = getenv("NETLAB_BYTES_PER_SECOND");
    unsigned long rate = text ? strtoul(text, NULL, 10) : 0;
    if (rate) setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate); /* fails on other sockets; so be it */
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    int (*next)(int, const struct sockaddr *, socklen_t);
    *(void **)&next = dlsym(RTLD_NEXT, "connect");
    pace(fd);
    return next(fd, address, length);
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    int (*next)(int, struct sockaddr *, socklen_t *, int);
    *(void **)&next = dlsym(RTLD_NEXT, "accept4");
    fd = next(fd, address, length, flags);
    if (fd >= 0) pace(fd);
    return fd;
}

int accept(int fd, struct sockaddr *address, socklen_t *length) { return accept4(fd, address, length, 0); }
