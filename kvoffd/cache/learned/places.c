/* The table that says where a key is. */
#include "learned.h"

#include <stdlib.h>

enum { FEWEST_PLACES = 16, MOST_PARTS = 4096 };
static const uint64_t POOL_BYTES_OF_PART = 16 << 20; /* what is known of these fills a part to a few thousand keys */

static struct places *part_of(const struct learned *l, uint64_t hash)
{
    return &l->parts[hash >> 32 & l->part_mask];
}

static void make_room(struct learned *l, struct places *part, uint32_t count)
{
    part->places = clear_room(count, sizeof *part->places);
    part->mask = count - 1;
    l->place_room += count;
}

void make_places(struct learned *l)
{
    uint64_t parts = 1;

    while (parts < MOST_PARTS && parts * POOL_BYTES_OF_PART < l->known.lifetime)
        parts *= 2;
    l->parts = clear_room(parts, sizeof *l->parts);
    l->part_mask = parts - 1;
    for (uint64_t at = 0; at < parts; at++)
        make_room(l, &l->parts[at], FEWEST_PLACES);
}

void free_places(struct learned *l)
{
    for (uint64_t at = 0; at <= l->part_mask; at++)
        free(l->parts[at].places);
    free(l->parts);
}

static struct place *find_in(const struct places *part, uint64_t hash)
{
    for (uint64_t at = hash;; at++) {
        struct place *there = &part->places[at & part->mask];
        if (!there->hash || there->hash == hash)
            return there;
    }
}

/* Where a key is, or would be. */
struct place *find_place(const struct learned *l, uint64_t hash)
{
    return find_in(part_of(l, hash), hash);
}

/* A key will be looked for soon. */
void fetch_place(const struct learned *l, uint64_t hash)
{
    const struct places *part = part_of(l, hash);

    __builtin_prefetch(&part->places[hash & part->mask]);
}

static void double_room(struct learned *l, struct places *part)
{
    struct places before = *part;

    make_room(l, part, 2 * (before.mask + 1));
    for (uint64_t at = 0; at <= before.mask; at++)
        if (before.places[at].hash)
            *find_in(part, before.places[at].hash) = before.places[at];
    l->place_room -= before.mask + 1;
    free(before.places);
}

/* Says where a key is, wherever it was. */
void set_place(struct learned *l, uint64_t hash, uint32_t span, uint32_t place)
{
    struct places *part = part_of(l, hash);
    struct place *there = find_in(part, hash);

    if (!there->hash) {
        if (4 * ((uint64_t)part->keys + 1) > 3 * ((uint64_t)part->mask + 1)) {
            double_room(l, part);
            there = find_in(part, hash);
        }
        part->keys++;
        l->known.known_keys++;
    }
    *there = (struct place){ .hash = hash, .span = span, .place = place };
}

/* Forgets a key if it is in a span. */
void remove_place(struct learned *l, uint64_t hash, uint32_t span)
{
    struct places *part = part_of(l, hash);
    struct place *hole = find_in(part, hash), *places = part->places;
    uint32_t mask = part->mask, empty = hole - places;

    if (!hole->hash || hole->span != span)
        return;
    for (uint32_t at = empty + 1;; at++) {
        struct place *there = &places[at & mask];
        if (!there->hash)
            break;
        /* It may move up if its home is not behind the hole. */
        if (((at - there->hash) & mask) >= ((at - empty) & mask)) {
            places[empty & mask] = *there;
            empty = at;
        }
    }
    places[empty & mask].hash = 0;
    part->keys--;
    l->known.known_keys--;
}
