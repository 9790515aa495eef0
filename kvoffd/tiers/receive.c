/* Receives bytes of a socket into memory and computes checksums, without the GIL: see redis_connection.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

void kvoffd_digests(const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots);

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Fills all parts but the last, which gets what is available beyond them; returns how many bytes that is. Otherwise
 * -errno: -ETIMEDOUT if nothing comes for `stall_ms` or it takes `left_ms`, -ENODATA if the other end closed the
 * connection. Then computes the checksums of `slots` slots: see kvoffd_digests. Changes `part`. */
int64_t kvoffd_receive(int fd, struct iovec *part, uint64_t parts, int64_t stall_ms, int64_t left_ms,
                       const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots)
{
    struct pollfd event = {.fd = fd, .events = POLLIN};
    int64_t until = now_ms() + left_ms, left;
    uint64_t at = 0;
    ssize_t got = 0;

    while (at < parts - 1) {
        struct msghdr message = {.msg_iov = part + at, .msg_iovlen = parts - at};

        got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got == 0)
            return -ENODATA;
        if (got < 0 && errno != EAGAIN && errno != EINTR)
            return -errno;
        if (got < 0) {
            left = until - now_ms();
            if (left <= 0 || !poll(&event, 1, (int)(left < stall_ms ? left : stall_ms)))
                return -ETIMEDOUT;
            continue;
        }
        for (; at < parts - 1 && (uint64_t)got >= part[at].iov_len; at++)
            got -= (int64_t)part[at].iov_len;
        part[at].iov_base = (uint8_t *)part[at].iov_base + got;
        part[at].iov_len -= (uint64_t)got;
    }
    kvoffd_digests(slot, slot_bytes, sum, slots);
    return got;
}
