/* A hash table that grows one segment at a time, so that no request waits for a large copy. Segments have one size; one that
 * gets too full is split in two. The upper bits of a key's hash choose the segment, others the place in it: open addressing
 * with linear probing. An entry begins with the upper half of its key's hash; its first word is not 0, which is an empty
 * place. The table does not hold the keys: its users compare them.
 *
 * Most tables have entries of one word, with a slot's number plus 1 in the lower half.
 *
 * Source: R. Fagin et al., "Extendible Hashing - A Fast Access Method for Dynamic Files", TODS 1979.
 */
#ifndef KVOFFD_SLOT_INDEX_H
#define KVOFFD_SLOT_INDEX_H

#include "key_hash.h"

#include <stdio.h>
#include <stdlib.h>

#ifndef WORDS
#define WORDS 1 /* of an entry */
#endif

enum { PLACE_BITS = 11, PLACES = 1 << PLACE_BITS /* home places of a segment */ };
/* An entry is fewer than FARTHEST steps behind its home place: if a new one had to go farther, its segment is split, which
 * happens at 0.86 * PLACES entries on average. So the last place of a segment is always empty. */
enum { FARTHEST = 128, SEGMENT_WORDS = (PLACES + FARTHEST) * WORDS, SEGMENT_BYTES = SEGMENT_WORDS * sizeof(uint64_t) };
enum { TOGETHER = 32 /* keys whose memory is prefetched together */ };
static const uint32_t NONE = UINT32_MAX;

/* SlotIndex of structures.py has the same fields. */
struct slot_index {
    uint64_t **segments; /* [2^bits] by the upper bits of a hash; neighbours may be the same segment */
    uint64_t bits, shift; /* their sum is 64, the bits of a hash */
    uint64_t used; /* entries */
    uint64_t nbytes; /* memory of the segments */
    uint64_t seed[2]; /* so that nobody can choose keys that collide */
};

/* Home place of a key. If another key is there, the key is in one of the next places, before the first empty one. */
static inline uint64_t *home(const struct slot_index *x, uint64_t hashed)
{
    return x->segments[hashed >> x->shift] + (hashed >> 32 & (PLACES - 1)) * WORDS;
}

static inline uint32_t slot_of(uint64_t entry)
{
    return (uint32_t)entry - 1;
}

static inline uint64_t entry_of(uint64_t hashed, uint32_t slot)
{
    return (hashed >> 32 << 32) | (slot + 1ULL);
}

/* Hash of a key; it differs for equal keys of two groups. */
static inline uint64_t hash_of(const struct slot_index *x, uint32_t group, const uint8_t *key, uint64_t key_bytes)
{
    return key_hash(x->seed[0] ^ ((uint64_t)group << 32), x->seed[1], key, key_bytes);
}

/* Makes an empty table; returns whether there was the memory. */
static inline int open_index(struct slot_index *x, const uint64_t seed[2])
{
    x->bits = 1;
    x->shift = 63;
    x->used = 0;
    x->nbytes = SEGMENT_BYTES;
    memcpy(x->seed, seed, sizeof x->seed);
    x->segments = calloc(2, sizeof *x->segments);
    if (!x->segments)
        return 0;
    x->segments[0] = x->segments[1] = calloc(1, SEGMENT_BYTES);
    return x->segments[0] != NULL;
}

static inline void close_index(struct slot_index *x)
{
    if (!x->segments)
        return;
    for (uint64_t at = 0; at < 1ULL << x->bits; at++)
        if (!at || x->segments[at] != x->segments[at - 1])
            free(x->segments[at]);
    free(x->segments);
    x->segments = NULL;
}

/* Aborts without memory, since a change is half done; the next daemon recovers the blocks. */
static inline void *or_end(void *memory)
{
    if (!memory) {
        fputs("kvoffd: out of memory for the block index.\n", stderr);
        abort();
    }
    return memory;
}

/* Moves half of the entries of a hash's segment to a new one. */
static inline void split(struct slot_index *x, uint64_t hashed)
{
    uint64_t count = 1ULL << x->bits, at = hashed >> x->shift, span = 1, old[SEGMENT_WORDS];
    uint64_t *segment = x->segments[at], *half, *place;

    while (2 * span <= count && x->segments[at & -(2 * span)] == x->segments[at | (2 * span - 1)])
        span *= 2; /* places in `segments` that are this segment */
    if (span == 1) {
        /* An entry keeps 32 bits of its hash, from which a segment's number and a place in it must be found. */
        uint64_t **wider = or_end(x->bits + PLACE_BITS < 32 ? malloc(2 * count * sizeof *wider) : NULL);
        for (uint64_t i = 0; i < count; i++)
            wider[2 * i] = wider[2 * i + 1] = x->segments[i];
        free(x->segments);
        x->segments = wider;
        x->bits++;
        x->shift--;
        at *= 2;
        span = 2;
    }
    half = or_end(calloc(1, SEGMENT_BYTES));
    x->nbytes += SEGMENT_BYTES;
    for (uint64_t i = 0; i < span / 2; i++)
        x->segments[(at & -span) + i] = half;
    memcpy(old, segment, sizeof old);
    memset(segment, 0, sizeof old);
    /* Put back in their old order, so none gets farther from its home place than it was. */
    for (uint64_t *entry = old; entry < old + SEGMENT_WORDS; entry += WORDS)
        if (*entry) {
            for (place = home(x, *entry); *place; place += WORDS)
                ;
            memcpy(place, entry, WORDS * sizeof *entry);
        }
}

/* Returns the place for the entry of a new key. Other entries may move. */
static inline uint64_t *new_place(struct slot_index *x, uint64_t hashed)
{
    for (;; split(x, hashed)) {
        uint64_t *place = home(x, hashed);
        for (int steps = 0; steps < FARTHEST; steps++, place += WORDS)
            if (!*place) {
                x->used++;
                return place;
            }
    }
}

/* Removes an entry and moves later ones up. */
static inline void remove_at(struct slot_index *x, uint64_t *hole)
{
    for (uint64_t *place = hole + WORDS; *place; place += WORDS)
        if (home(x, *place) <= hole) {
            memcpy(hole, place, WORDS * sizeof *place);
            hole = place;
        }
    *hole = 0;
    x->used--;
}

#endif
