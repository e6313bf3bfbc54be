/* The lab's switch where links have a latency: delay MICROSECONDS PORT...
 *
 * It stands in for the bridge, and forwards each frame that long after it came, between the interfaces PORT (the
 * switch's ends of the hosts' cables), by the Ethernet addresses that it has learned. Rates are htb's, as without it.
 * Packet sockets carry offloaded segments of up to 64 KB in one piece, with their virtio header. It prints a
 * line when it has begun, and ends with its parent or when standard input closes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    PORTS = 200,
    LONGEST = sizeof(struct virtio_net_hdr) + 65536 + 64,
    BUFFER = 64 << 20
};

struct frame {
    struct frame *next;
    uint64_t due; /* ns */
    int from;
    size_t bytes; /* virtio header and frame */
    unsigned char data[];
};

static int ports;
static int sockets[PORTS];
static unsigned char address[PORTS][ETH_ALEN]; /* of the host behind a port; zeros: not yet seen */

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what, const char *of) {
    fprintf(stderr, "delay: %s %s: %s\n", what, of, strerror(errno));
    exit(1);
}

static int open_port(const char *name) {
    int fd =
        socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0); /* no protocol yet: it must not receive before it is bound */
    if (fd < 0) fail("a packet socket for", name);
    const int on = 1, size = BUFFER;
    /* A switch's queue is that of its outgoing link, htb's. These only must not lose frames before it. */
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
    if (setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR on", name);
    if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING on", name);
    struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    to.sll_ifindex = (int)if_nametoindex(name);
    if (!to.sll_ifindex || bind(fd, (struct sockaddr *)&to, sizeof to)) fail("binding to", name);
    struct packet_mreq all = {.mr_ifindex = to.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    if (setsockopt(fd, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)) fail("promiscuous mode of", name);
    return fd;
}

static void forward(const struct frame *f) {
    const unsigned char *destination = f->data + sizeof(struct virtio_net_hdr);
    int known = -1;
    for (int p = 0; p < ports && !(destination[0] & 1); p++) {
        if (!memcmp(address[p], destination, ETH_ALEN)) known = p;
    }
    for (int p = 0; p < ports; p++) {
        /* A full queue loses the frame, as a switch does; TCP sends it again. */
        if (p != f->from && (known < 0 || p == known) && write(sockets[p], f->data, f->bytes) < 0) continue;
    }
}

int main(int argc, char **argv) {
    ports = argc - 2;
    if (ports < 1 || ports > PORTS) {
        fprintf(stderr, "usage: delay MICROSECONDS PORT...\n");
        return 2;
    }
    const uint64_t delay = strtoull(argv[1], NULL, 10) * 1000;
    prctl(PR_SET_PDEATHSIG, 9);
    prctl(PR_SET_TIMERSLACK, 1000);
    struct pollfd waits[PORTS + 1];
    for (int p = 0; p < ports; p++) {
        sockets[p] = open_port(argv[p + 2]);
        waits[p] = (struct pollfd){.fd = sockets[p], .events = POLLIN};
    }
    waits[ports] = (struct pollfd){.fd = 0, .events = POLLIN};
    puts("ready");
    fflush(stdout);

    struct frame *first = NULL, **last = &first; /* all wait equally long, so the queue is in order of due */
    struct frame *next = NULL;
    for (;;) {
        const uint64_t t = now();
        while (first && first->due <= t) {
            struct frame *f = first;
            if (!(first = f->next)) last = &first;
            forward(f);
            free(f);
        }
        const uint64_t left = first ? first->due - t : 0;
        const struct timespec wait = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        if (ppoll(waits, (nfds_t)ports + 1, first ? &wait : NULL, NULL) < 0 && errno != EINTR)
            fail("waiting for", "frames");
        if (waits[ports].revents) return 0; /* the lab closes */
        for (int p = 0; p < ports; p++) {
            while (waits[p].revents & POLLIN) {
                if (!next && !(next = malloc(sizeof *next + LONGEST))) fail("memory for", "a frame");
                const ssize_t bytes = read(sockets[p], next->data, LONGEST);
                if (bytes < 0) break;
                if ((size_t)bytes < sizeof(struct virtio_net_hdr) + ETH_HLEN) continue;
                memcpy(address[p], next->data + sizeof(struct virtio_net_hdr) + ETH_ALEN, ETH_ALEN);
                struct frame *f = realloc(next, sizeof *next + (size_t)bytes);
                if (!f) f = next;
                next = NULL;
                *f = (struct frame){.due = now() + delay, .from = p, .bytes = (size_t)bytes};
                *last = f;
                last = &f->next;
            }
        }
    }
}
