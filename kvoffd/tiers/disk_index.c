/* Finds the blocks of a disk by the number of their space and their key, and reads them: see disk.py, which owns the
 * memory. */
#include "../system/slot_index.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

void kvoffd_digests(const uint64_t *slot, const uint64_t *slot_bytes, uint64_t *sum, uint64_t slots);

enum { ROW = 64 }; /* bytes for a key: MAX_KEY_BYTES of pool/slot_table.py */
enum { MOST_PARTS = 1024 /* IOV_MAX */, MOST_RUNS = 64 };

/* What is known of a region's slots, by their places in it. */
struct disk_region {
    const uint8_t *keys; /* [slots][ROW] */
    const uint8_t *key_bytes;
    const uint32_t *space; /* 0 where no block is */
};

/* _Index of disk.py has the same fields. */
struct disk_index {
    struct slot_index index;
    const struct disk_region *regions;
    uint64_t slots_per_region;
};

static inline const struct disk_region *region_of(const struct disk_index *x, uint32_t slot)
{
    return &x->regions[slot / x->slots_per_region];
}

/* The place of the key's entry, or the empty one where it belongs. */
static uint64_t find(const struct disk_index *x, uint64_t hashed, uint32_t space, const uint8_t *key, uint64_t key_bytes)
{
    for (uint64_t place = home(&x->index, hashed);; place = next_place(&x->index, place)) {
        uint64_t entry = x->index.entries[place];
        if (!entry)
            return place;
        if (entry >> 32 != hashed >> 32)
            continue;
        const struct disk_region *region = region_of(x, slot_of(entry));
        uint64_t at = slot_of(entry) % x->slots_per_region;
        if (region->space[at] == space && region->key_bytes[at] == key_bytes &&
            !memcmp(region->keys + at * ROW, key, key_bytes))
            return place;
    }
}

/* The place of the entry of the block in a slot, or where it belongs; and its hash. */
static uint64_t place_of(const struct disk_index *x, uint32_t slot, uint64_t *hashed)
{
    const struct disk_region *region = region_of(x, slot);
    uint64_t at = slot % x->slots_per_region;
    const uint8_t *key = region->keys + at * ROW;

    *hashed = hash_of(&x->index, region->space[at], key, region->key_bytes[at]);
    return find(x, *hashed, region->space[at], key, region->key_bytes[at]);
}

/* Completes an index whose last fields are set; returns whether there was the memory. */
int kvoffd_disk_open(struct disk_index *x, const uint64_t seed[2])
{
    return open_index(&x->index, seed);
}

void kvoffd_disk_close(struct disk_index *x)
{
    close_index(&x->index);
}

/* Writes the slot of each of `count` keys, which lie end to end; NONE where there is none. */
void kvoffd_disk_find(const struct disk_index *x, uint32_t space, const uint8_t *keys, uint64_t count,
                      uint64_t key_bytes, uint32_t *slots)
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            hashed[i] = hash_of(&x->index, space, keys + (begin + i) * key_bytes, key_bytes);
            __builtin_prefetch(&x->index.entries[home(&x->index, hashed[i])]);
        }
        for (uint64_t i = 0; i < together; i++) {
            uint64_t entry = x->index.entries[find(x, hashed[i], space, keys + (begin + i) * key_bytes, key_bytes)];
            slots[begin + i] = entry ? slot_of(entry) : NONE;
        }
    }
}

/* Enters the blocks of slots. Where two have one key, the later one counts; the other's slot is written to `replaced`.
 * Returns how many these are, or NONE where there is no memory. */
uint64_t kvoffd_disk_enter(struct disk_index *x, const uint32_t *slots, uint64_t count, uint32_t *replaced)
{
    uint64_t found = 0;

    for (uint64_t i = 0; i < count; i++) {
        uint64_t hashed, place;
        if (!make_room(&x->index, 1))
            return NONE;
        place = place_of(x, slots[i], &hashed);
        if (x->index.entries[place])
            replaced[found++] = slot_of(x->index.entries[place]);
        else
            x->index.used++;
        x->index.entries[place] = entry_of(hashed, slots[i]);
    }
    return found;
}

/* Removes the blocks of slots. */
void kvoffd_disk_remove(struct disk_index *x, const uint32_t *slots, uint64_t count)
{
    while (count--) {
        uint64_t hashed, place = place_of(x, slots[count], &hashed), entry = x->index.entries[place];
        if (entry && slot_of(entry) == slots[count])
            remove_at(&x->index, place);
    }
}

/* Parts of memory that lie one after another in a file, from `offset` on. FileCalls.read_runs has the same fields. */
struct run {
    int64_t offset;
    const struct iovec *part;
    uint64_t parts;
    const uint64_t *summed; /* [parts] of how many of its first bytes the checksum is wanted */
    uint64_t *sum;          /* [parts] becomes it: see kvoffd_digests */
    int64_t found;          /* becomes how many bytes were there, or -errno */
};

/* Fills a run, of which `got` bytes are there if that is all, and takes its checksums. */
static void fill(int fd, struct run *run, int64_t got)
{
    struct iovec vector[MOST_PARTS];
    uint64_t at = 0, done = 0; /* bytes of part `at` that are there */
    int64_t wanted = 0;

    for (uint64_t i = 0; i < run->parts; i++)
        wanted += (int64_t)run->part[i].iov_len;
    run->found = got == wanted ? got : 0; /* else from the beginning, to learn why */
    while (run->found < wanted) {
        uint64_t count = run->parts - at < MOST_PARTS ? run->parts - at : MOST_PARTS;
        memcpy(vector, run->part + at, count * sizeof *vector);
        vector[0].iov_base = (uint8_t *)vector[0].iov_base + done;
        vector[0].iov_len -= done;
        got = preadv(fd, vector, (int)count, run->offset + run->found);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            run->found = got ? -errno : run->found;
            return;
        }
        run->found += got;
        for (done += (uint64_t)got; at < run->parts && done >= run->part[at].iov_len; at++)
            done -= run->part[at].iov_len;
    }
    for (uint64_t i = 0; i < run->parts; i++) {
        uint64_t address = (uint64_t)run->part[i].iov_base;
        kvoffd_digests(&address, run->summed + i, run->sum + i, 1);
    }
}

/* Of this thread; 0 where the kernel gives none. It is never destroyed: a disk is closed when the daemon ends. */
static __thread aio_context_t context;

/* Fills up to MOST_RUNS runs at the same time. */
static void fill_some(int fd, struct run *run, uint64_t runs)
{
    struct iocb calls[MOST_RUNS], *call[MOST_RUNS];
    struct io_event events[MOST_RUNS];
    int64_t under_way = 0;

    if (runs > 1 && !context)
        syscall(SYS_io_setup, MOST_RUNS, &context);
    for (uint64_t i = 0; i < runs; i++) {
        calls[i] = (struct iocb){.aio_data = i, .aio_lio_opcode = IOCB_CMD_PREADV, .aio_fildes = (uint32_t)fd,
                                 .aio_buf = (uint64_t)run[i].part, .aio_nbytes = run[i].parts, .aio_offset = run[i].offset};
        call[i] = &calls[i];
    }
    if (runs > 1 && context)
        under_way = syscall(SYS_io_submit, context, runs, call);
    for (uint64_t i = under_way > 0 ? (uint64_t)under_way : 0; i < runs; i++)
        fill(fd, &run[i], 0);
    while (under_way > 0) { /* until all have ended the kernel uses their memory */
        int64_t ended = syscall(SYS_io_getevents, context, 1, under_way, events, NULL);
        for (int64_t i = 0; i < ended; i++, under_way--)
            fill(fd, &run[events[i].data], events[i].res);
    }
}

void kvoffd_disk_read(int fd, struct run *run, uint64_t runs)
{
    for (uint64_t at = 0; at < runs; at += MOST_RUNS)
        fill_some(fd, run + at, runs - at < MOST_RUNS ? runs - at : MOST_RUNS);
}
