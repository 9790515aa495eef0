/* A hash table that finds numbers of slots: open addressing with linear probing. An entry is the upper half of a key's hash
 * and, below it, the slot's number plus 1; 0 is an empty place. The place where a key belongs is the upper bits of its hash,
 * so the entries are nearly in the order of their hashes, and a table of another size is made in one pass without reading a
 * key. Its users know the keys.
 */
#ifndef KVOFFD_SLOT_INDEX_H
#define KVOFFD_SLOT_INDEX_H

#include "key_hash.h"

#include <stdlib.h>

enum { FEWEST_BITS = 10, TOGETHER = 32 /* keys whose memory is fetched side by side */ };
static const uint32_t NONE = UINT32_MAX;

/* SlotIndex of native.py has the same fields. */
struct slot_index {
    uint64_t *entries;
    uint64_t used;
    uint32_t bits; /* of a hash that say where a key belongs */
    uint64_t seed[2]; /* so that nobody can choose keys that fall together */
};

static inline uint64_t places(const struct slot_index *x)
{
    return 1ULL << x->bits;
}

static inline uint64_t home(const struct slot_index *x, uint64_t entry)
{
    return entry >> (64 - x->bits);
}

static inline uint64_t next_place(const struct slot_index *x, uint64_t place)
{
    return (place + 1) & (places(x) - 1);
}

static inline uint32_t slot_of(uint64_t entry)
{
    return (uint32_t)entry - 1;
}

static inline uint64_t entry_of(uint64_t hashed, uint32_t slot)
{
    return (hashed >> 32 << 32) | (slot + 1ULL);
}

/* The hash of a key; equal keys of two groups have two. */
static inline uint64_t hash_of(const struct slot_index *x, uint32_t group, const uint8_t *key, uint64_t key_bytes)
{
    return key_hash(x->seed[0] ^ ((uint64_t)group << 32), x->seed[1], key, key_bytes);
}

/* Makes an empty table; returns whether there was the memory. */
static inline int open_index(struct slot_index *x, const uint64_t seed[2])
{
    x->used = 0;
    x->bits = FEWEST_BITS;
    memcpy(x->seed, seed, sizeof x->seed);
    x->entries = calloc(places(x), sizeof *x->entries);
    return x->entries != NULL;
}

static inline void close_index(struct slot_index *x)
{
    free(x->entries);
    x->entries = NULL;
}

/* Makes the table larger if it would be nearly full with so many more; returns whether there is room for them. */
static inline int make_room(struct slot_index *x, uint64_t more)
{
    struct slot_index old = *x;

    if (4 * (x->used + more) <= 3 * places(x))
        return 1;
    while (4 * (x->used + more) > 3 * places(x))
        x->bits++;
    x->entries = calloc(places(x), sizeof *x->entries);
    if (!x->entries) {
        *x = old;
        return 0;
    }
    for (uint64_t place = 0; place < places(&old); place++) {
        uint64_t entry = old.entries[place], at;
        if (!entry)
            continue;
        for (at = home(x, entry); x->entries[at]; at = next_place(x, at))
            ;
        x->entries[at] = entry;
    }
    free(old.entries);
    return 1;
}

/* Empties a place; what follows moves up. */
static inline void remove_at(struct slot_index *x, uint64_t hole)
{
    uint64_t mask = places(x) - 1;

    for (uint64_t place = next_place(x, hole); x->entries[place]; place = next_place(x, place))
        /* It may move up to the hole if its home is not behind the hole. */
        if (((place - home(x, x->entries[place])) & mask) >= ((place - hole) & mask)) {
            x->entries[hole] = x->entries[place];
            hole = place;
        }
    x->entries[hole] = 0;
    x->used--;
}

#endif
