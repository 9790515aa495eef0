/* The index of one group's blocks: a hash table from keys to the state of the key's block, one byte, and the number that
 * key_index.py knows the block by. Asked and changed for many keys at once.
 *
 * The table is in parts, chosen by the upper bits of a key's hash. A part grows up to PART_ENTRIES and is split then, so
 * that no call makes all of a large table anew; one that is nearly empty shrinks. In a part: open addressing with linear
 * probing. An entry is a key, behind it the state, 0 where the entry is empty, and at its end the number. Nothing is ever
 * left behind by a removal: what follows moves up.
 */
#include "../system/key_hash.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FEWEST = 64, PART_ENTRIES = 16384, TOGETHER = 32 };

struct part {
    uint64_t mask, used; /* of the number of entries, a power of two */
    uint32_t bits; /* of a hash that all its keys have in common, the upper ones */
    uint8_t entries[]; /* of `stride` bytes */
};

struct index {
    struct part **parts; /* by the upper `bits` of a hash; neighbours may be one and the same */
    uint32_t bits;
    uint64_t key_bytes, stride;
    uint64_t entries; /* of all parts */
    uint64_t seed[2]; /* so that nobody can choose keys that fall together */
};

static uint64_t hash(const struct index *x, const uint8_t *key)
{
    return key_hash(x->seed[0], x->seed[1], key, x->key_bytes);
}

static uint64_t upper(uint64_t hashed, uint32_t bits)
{
    return bits ? hashed >> (64 - bits) : 0;
}

static struct part *part_of(const struct index *x, uint64_t hashed)
{
    return x->parts[upper(hashed, x->bits)];
}

static uint8_t *entry(const struct index *x, struct part *p, uint64_t place)
{
    return p->entries + (place & p->mask) * x->stride;
}

static uint8_t *state_of(const struct index *x, uint8_t *entry)
{
    return entry + x->key_bytes;
}

static uint8_t *number_of(const struct index *x, uint8_t *entry)
{
    return entry + x->stride - sizeof(uint32_t);
}

/* The place of the key, or the empty one where it belongs. */
static uint64_t find(const struct index *x, struct part *p, const uint8_t *key, uint64_t place)
{
    for (;; place++) {
        uint8_t *there = entry(x, p, place);
        if (!*state_of(x, there) || !memcmp(there, key, x->key_bytes))
            return place;
    }
}

static void remove_at(const struct index *x, struct part *p, uint64_t place)
{
    uint64_t hole = place;

    for (;;) {
        uint8_t *next = entry(x, p, ++place);
        if (!*state_of(x, next))
            break;
        /* It may move up to the hole if its home is not behind the hole. */
        if (((place - hash(x, next)) & p->mask) >= ((place - hole) & p->mask)) {
            memcpy(entry(x, p, hole), next, x->stride);
            hole = place;
        }
    }
    *state_of(x, entry(x, p, hole)) = 0;
    p->used--;
}

static struct part *new_part(struct index *x, uint64_t entries, uint32_t bits)
{
    struct part *p = calloc(1, sizeof *p + entries * x->stride);

    if (p) {
        x->entries += entries;
        p->mask = entries - 1;
        p->bits = bits;
    }
    return p;
}

static void free_part(struct index *x, struct part *p)
{
    if (p)
        x->entries -= p->mask + 1;
    free(p);
}

/* Enters all that `from` has into `low` or, where a bit after `bits` of the hash is set, into `high`. */
static void move_entries(const struct index *x, struct part *from, struct part *low, struct part *high, uint32_t bits)
{
    for (uint64_t place = 0; place <= from->mask; place++) {
        uint8_t *there = entry(x, from, place);
        if (!*state_of(x, there))
            continue;
        uint64_t hashed = hash(x, there);
        struct part *to = upper(hashed, bits + 1) & 1 ? high : low;
        memcpy(entry(x, to, find(x, to, there, hashed)), there, x->stride);
        to->used++;
    }
}

/* Gives the part of a hash another number of entries; returns whether there was the memory. */
static int resize(struct index *x, struct part *p, uint64_t hashed, uint64_t entries)
{
    struct part *other = new_part(x, entries, p->bits);

    if (!other)
        return 0;
    move_entries(x, p, other, other, p->bits);
    uint64_t count = 1ULL << (x->bits - p->bits), first = upper(hashed, p->bits) * count;
    for (uint64_t at = 0; at < count; at++)
        x->parts[first + at] = other;
    free_part(x, p);
    return 1;
}

/* Makes room in a part that is nearly full; returns whether there was the memory. */
static int make_room(struct index *x, struct part *p, uint64_t hashed)
{
    uint64_t entries = p->mask + 1;

    if (entries < PART_ENTRIES)
        return resize(x, p, hashed, 2 * entries);
    if (p->bits == x->bits) {
        struct part **parts = malloc((2ULL << x->bits) * sizeof *parts);
        if (!parts)
            return 0;
        for (uint64_t at = 0; at < 2ULL << x->bits; at++)
            parts[at] = x->parts[at / 2];
        free(x->parts);
        x->parts = parts;
        x->bits++;
    }
    struct part *low = new_part(x, entries, p->bits + 1), *high = new_part(x, entries, p->bits + 1);
    if (!low || !high) {
        free_part(x, low);
        free_part(x, high);
        return 0;
    }
    move_entries(x, p, low, high, p->bits);
    uint64_t count = 1ULL << (x->bits - p->bits), first = upper(hashed, p->bits) * count;
    for (uint64_t at = 0; at < count; at++)
        x->parts[first + at] = at < count / 2 ? low : high;
    free_part(x, p);
    return 1;
}

static void free_parts(struct index *x)
{
    struct part *last = NULL;

    for (uint64_t at = 0; at < 1ULL << x->bits; at++) {
        if (x->parts[at] != last)
            free(last);
        last = x->parts[at];
    }
    free(last);
    free(x->parts);
}

/* For keys of `key_bytes`. Returns NULL where there is no memory. */
struct index *kvoffd_index_new(uint64_t key_bytes, const uint64_t seed[2])
{
    struct index *x = calloc(1, sizeof *x);

    if (!x)
        return NULL;
    x->key_bytes = key_bytes;
    x->stride = (key_bytes + 1 + sizeof(uint32_t) + 7) / 8 * 8;
    memcpy(x->seed, seed, sizeof x->seed);
    x->parts = malloc(sizeof *x->parts);
    if (!x->parts || !(x->parts[0] = new_part(x, FEWEST, 0))) {
        free(x->parts);
        free(x);
        return NULL;
    }
    return x;
}

void kvoffd_index_free(struct index *x)
{
    free_parts(x);
    free(x);
}

/* Memory of all parts. */
uint64_t kvoffd_index_nbytes(const struct index *x)
{
    return x->entries * x->stride + (sizeof *x->parts << x->bits);
}

/* Writes the state of each of `count` keys, which lie end to end, and the number of its block where `numbers` is not
 * NULL; 0 for those that are not there. */
void kvoffd_index_find(const struct index *x, const uint8_t *keys, uint64_t count, uint8_t *states, uint32_t *numbers)
{
    uint64_t home[TOGETHER];
    struct part *parts[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            home[i] = hash(x, keys + (begin + i) * x->key_bytes);
            parts[i] = part_of(x, home[i]);
            __builtin_prefetch(parts[i]);
        }
        for (uint64_t i = 0; i < together; i++) {
            uint8_t *there = entry(x, parts[i], home[i]);
            __builtin_prefetch(there);
            __builtin_prefetch(there + x->stride - 1);
        }
        for (uint64_t i = 0; i < together; i++) {
            const uint8_t *key = keys + (begin + i) * x->key_bytes;
            uint8_t *there = entry(x, parts[i], find(x, parts[i], key, home[i]));
            uint8_t state = *state_of(x, there);
            if (states)
                states[begin + i] = state;
            if (!numbers)
                continue;
            numbers[begin + i] = 0;
            if (state)
                memcpy(&numbers[begin + i], number_of(x, there), sizeof *numbers);
        }
    }
}

/* Enters keys, none of which is there, with a state and the numbers of their blocks. Returns how many it entered: fewer
 * where there is no memory, or where one is there. */
uint64_t kvoffd_index_add(struct index *x, const uint8_t *keys, uint64_t count, uint8_t state, const uint32_t *numbers)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * x->key_bytes;
        uint64_t hashed = hash(x, key);
        struct part *p;
        while (p = part_of(x, hashed), 4 * (p->used + 1) > 3 * (p->mask + 1))
            if (!make_room(x, p, hashed))
                return i;
        uint8_t *there = entry(x, p, find(x, p, key, hashed));
        if (*state_of(x, there))
            return i;
        memcpy(there, key, x->key_bytes);
        *state_of(x, there) = state;
        memcpy(number_of(x, there), &numbers[i], sizeof *numbers);
        p->used++;
    }
    return count;
}

/* Gives keys, all of which are there, another state; returns how many: fewer where one is not there. */
uint64_t kvoffd_index_set(struct index *x, const uint8_t *keys, uint64_t count, uint8_t state)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * x->key_bytes;
        uint64_t hashed = hash(x, key);
        struct part *p = part_of(x, hashed);
        uint8_t *there = state_of(x, entry(x, p, find(x, p, key, hashed)));
        if (!*there)
            return i;
        *there = state;
    }
    return count;
}

/* Removes keys, all of which are there, and writes their numbers; returns how many: fewer where one is not there. */
uint64_t kvoffd_index_remove(struct index *x, const uint8_t *keys, uint64_t count, uint32_t *numbers)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * x->key_bytes;
        uint64_t hashed = hash(x, key);
        struct part *p = part_of(x, hashed);
        uint64_t place = find(x, p, key, hashed);
        uint8_t *there = entry(x, p, place);
        if (!*state_of(x, there))
            return i;
        memcpy(&numbers[i], number_of(x, there), sizeof *numbers);
        remove_at(x, p, place);
        if (p->mask >= FEWEST && 8 * p->used <= p->mask)
            resize(x, p, hashed, (p->mask + 1) / 4 < FEWEST ? FEWEST : (p->mask + 1) / 4); /* if there is the memory */
    }
    return count;
}

/* A table of the reasons for which keys left has words of all but the last four bits of a key's hash, and a reason. What
 * falls on the same place replaces what was there. */
static const uint64_t REASON = 15;

/* Notes in a table of `words`, a power of two, why each of `count` keys left, 1 to 15. */
void kvoffd_note_reasons(
    const struct index *x, uint64_t *table, uint64_t words, const uint8_t *keys, uint64_t count, uint64_t reason)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hashed = hash(x, keys + i * x->key_bytes);
        table[hashed & (words - 1)] = (hashed & ~REASON) | reason;
    }
}

/* Adds to `counts`, by reason, the keys whose state is 0; those of which nothing is noted to the first. */
void kvoffd_count_reasons(const struct index *x, const uint64_t *table, uint64_t words, const uint8_t *keys,
                          uint64_t count, const uint8_t *states, uint64_t counts[16])
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            hashed[i] = hash(x, keys + (begin + i) * x->key_bytes);
            __builtin_prefetch(&table[hashed[i] & (words - 1)]);
        }
        for (uint64_t i = 0; i < together; i++) {
            uint64_t there = table[hashed[i] & (words - 1)];
            if (!states[begin + i])
                counts[(there ^ hashed[i]) & ~REASON ? 0 : there & REASON]++;
        }
    }
}
