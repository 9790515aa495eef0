/* Reads blocks of a disk, many at once, and computes checksums, all without the GIL: see Reads in disk_io.py. */
#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

void kvoffd_digests(const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots);

enum { MAX_PARTS = 1024 /* IOV_MAX */, MAX_READS = 128, REPORTED_WITHIN_MS = 1 };

/* A block to read: 64-bit numbers of Reads._words (disk_io.py), which has them until the read is taken. */
struct block_read {
    uint64_t number;
    int64_t offset;  /* in the file */
    int64_t found;   /* result: bytes read, or -errno */
    uint64_t parts;  /* at most MAX_PARTS */
    uint64_t rest[]; /* [parts] struct iovec; [parts] number of bytes of each to checksum; [parts] resulting checksums:
                        see kvoffd_digests */
};

struct reader {
    pthread_mutex_t lock;
    aio_context_t context; /* 0: each thread reads one block at a time */
    int fd, event;         /* `event` counts added blocks, and with a context those that the kernel has read */
    uint32_t waiting, ended, under_way; /* only the thread uses `under_way` */
    int reported, stopped; /* `reported`: kvoffd_reader_ended will be called for the ended reads */
    struct block_read *wait[MAX_READS], *end[MAX_READS];
};

/* Returns NULL if memory is short, or the kernel does not support `asynchronous` reads. */
struct reader *kvoffd_reader_open(int fd, int asynchronous)
{
    struct reader *r = calloc(1, sizeof *r);

    if (!r)
        return NULL;
    pthread_mutex_init(&r->lock, NULL);
    r->fd = fd;
    r->event = eventfd(0, EFD_CLOEXEC | (asynchronous ? 0 : EFD_SEMAPHORE));
    if (r->event < 0 || (asynchronous && syscall(SYS_io_setup, MAX_READS, &r->context))) {
        if (r->event >= 0)
            close(r->event);
        free(r);
        return NULL;
    }
    return r;
}

/* Makes all threads return from kvoffd_reader_work. */
void kvoffd_reader_stop(struct reader *r)
{
    pthread_mutex_lock(&r->lock);
    r->stopped = 1;
    pthread_mutex_unlock(&r->lock);
    eventfd_write(r->event, UINT32_MAX);
}

/* Frees the reader. No read may be running, and no thread may be in it. */
void kvoffd_reader_close(struct reader *r)
{
    if (r->context)
        syscall(SYS_io_destroy, r->context);
    close(r->event);
    free(r);
}

/* Adds a block to read. At most MAX_READS may be added and not yet returned by kvoffd_reader_ended. */
void kvoffd_reader_add(struct reader *r, struct block_read *one)
{
    pthread_mutex_lock(&r->lock);
    r->wait[r->waiting++] = one;
    int wakes = r->waiting == 1 || !r->context;
    pthread_mutex_unlock(&r->lock);
    if (wakes)
        eventfd_write(r->event, 1);
}

/* Writes the numbers of up to `most` ended reads; returns how many. If there are more, call it again. */
uint64_t kvoffd_reader_ended(struct reader *r, uint64_t *numbers, uint64_t most)
{
    pthread_mutex_lock(&r->lock);
    uint64_t count = r->ended < most ? r->ended : most;
    for (uint64_t i = 0; i < count; i++)
        numbers[i] = r->end[i]->number;
    r->ended -= (uint32_t)count;
    memmove(r->end, r->end + count, r->ended * sizeof *r->end);
    r->reported = r->ended > 0;
    pthread_mutex_unlock(&r->lock);
    return count;
}

/* Fills the parts of a block, unless the `got` bytes read are all of it, and computes its checksums. */
static void fill(struct reader *r, struct block_read *one, int64_t got)
{
    struct iovec vector[MAX_PARTS], *part = (struct iovec *)one->rest;
    uint64_t at = 0, *sum = one->rest + 3 * one->parts;
    int64_t wanted = 0;

    for (uint64_t i = 0; i < one->parts; i++)
        wanted += (int64_t)part[i].iov_len;
    one->found = got == wanted ? got : 0; /* otherwise read from the beginning, to get the errno */
    if (one->found < wanted)
        memcpy(vector, part, one->parts * sizeof *vector);
    while (one->found < wanted) {
        got = preadv(r->fd, vector + at, (int)(one->parts - at), one->offset + one->found);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            one->found = got ? -errno : one->found;
            break;
        }
        one->found += got;
        for (; at < one->parts && (uint64_t)got >= vector[at].iov_len; at++)
            got -= (int64_t)vector[at].iov_len;
        if (at < one->parts) {
            vector[at].iov_base = (uint8_t *)vector[at].iov_base + got;
            vector[at].iov_len -= (uint64_t)got;
        }
    }
    for (uint64_t i = 0; i < one->parts && one->found == wanted; i++) {
        uint64_t address = (uint64_t)part[i].iov_base;
        kvoffd_digests(&address, one->rest + 2 * one->parts + i, sum + i, 1);
    }
    pthread_mutex_lock(&r->lock);
    r->end[r->ended++] = one;
    pthread_mutex_unlock(&r->lock);
}

/* Submits blocks to the kernel, and reads those that it does not accept here. Returns whether there were any. */
static int submit(struct reader *r, struct block_read **some, uint64_t count)
{
    struct iocb calls[MAX_READS], *call[MAX_READS];
    int64_t begun;

    for (uint64_t i = 0; i < count; i++) {
        calls[i] = (struct iocb){.aio_data = (uint64_t)some[i], .aio_lio_opcode = IOCB_CMD_PREADV,
                                 .aio_fildes = (uint32_t)r->fd, .aio_buf = (uint64_t)some[i]->rest,
                                 .aio_nbytes = some[i]->parts, .aio_offset = some[i]->offset,
                                 .aio_flags = IOCB_FLAG_RESFD, .aio_resfd = (uint32_t)r->event};
        call[i] = &calls[i];
    }
    r->under_way += (uint32_t)count;
    begun = syscall(SYS_io_submit, r->context, count, call);
    for (uint64_t i = begun > 0 ? (uint64_t)begun : 0; i < count; i++, r->under_way--)
        fill(r, some[i], 0);
    return begun < (int64_t)count;
}

/* Reads added blocks. Returns 1 when reads have ended for which kvoffd_reader_ended must be called: a quarter of those
 * under way, or fewer after a millisecond. Returns 0 when it is stopped. */
int kvoffd_reader_work(struct reader *r)
{
    struct block_read *some[MAX_READS];
    struct io_event events[MAX_READS];
    struct timespec none = {0};
    struct pollfd event = {.fd = r->event, .events = POLLIN};
    eventfd_t ignored;
    int late = 0;

    for (;;) {
        pthread_mutex_lock(&r->lock);
        int unreported = r->ended && !r->reported, stopped = r->stopped;
        int ends = unreported && (late || 4 * r->ended >= r->under_way);
        uint64_t count = ends ? 0 : r->context ? r->waiting : r->waiting > 0;
        if (ends)
            r->reported = 1;
        memcpy(some, r->wait, count * sizeof *some);
        r->waiting -= (uint32_t)count;
        memmove(r->wait, r->wait + count, r->waiting * sizeof *some);
        pthread_mutex_unlock(&r->lock);
        if (ends)
            return 1;
        if (stopped)
            return 0;
        if (!r->context && count) {
            fill(r, some[0], 0);
            continue;
        }
        if (count && submit(r, some, count))
            continue;
        int64_t got = r->context ? syscall(SYS_io_getevents, r->context, 0, MAX_READS, events, &none) : 0;
        for (int64_t i = 0; i < got; i++, r->under_way--)
            fill(r, (struct block_read *)events[i].data, events[i].res);
        int woken = got > 0 ? -1 : poll(&event, 1, unreported ? REPORTED_WITHIN_MS : -1); /* -1 also after a signal */
        late = woken == 0;
        if (woken > 0)
            eventfd_read(r->event, &ignored);
    }
}
