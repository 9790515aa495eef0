/* The table that says where a key is. */
#include "learned.h"

#include <stdlib.h>

/* A part that is full to three quarters grows by one: what a key takes is 21 to 27 bytes. */
enum { FEWEST_PLACES = 16, MOST_PARTS = 4096, GROWTH_PART = 4 };
static const uint64_t POOL_BYTES_OF_PART = 16 << 20; /* what is known of these fills a part to a few thousand keys */

static void make_room(struct learned *l, struct places *part, uint32_t count)
{
    part->places = clear_room(count, sizeof *part->places);
    part->room = count;
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

static void more_room(struct learned *l, struct places *part, uint32_t count)
{
    struct places before = *part;

    make_room(l, part, count);
    for (uint32_t at = 0; at < before.room; at++)
        if (before.places[at].hash)
            *find_in(part, before.places[at].hash) = before.places[at];
    l->place_room -= before.room;
    free(before.places);
}

/* Says where a key is, wherever it was. */
void set_place(struct learned *l, uint64_t hash, uint32_t span, uint32_t place)
{
    struct places *part = part_of(l, hash);
    struct place *there = find_in(part, hash);

    if (!there->hash) {
        if (4 * ((uint64_t)part->keys + 1) > 3 * (uint64_t)part->room) {
            more_room(l, part, part->room + part->room / GROWTH_PART);
            there = find_in(part, hash);
        }
        part->keys++;
        l->known.known_keys++;
    }
    *there = (struct place){ .hash = hash, .span = span, .place = place };
}

/* Steps from one entry to another. */
static uint32_t steps(const struct places *part, uint32_t from, uint32_t to)
{
    return to >= from ? to - from : to + part->room - from;
}

/* Forgets a key if it is in a span. */
void remove_place(struct learned *l, uint64_t hash, uint32_t span)
{
    struct places *part = part_of(l, hash);
    struct place *hole = find_in(part, hash), *places = part->places;
    uint32_t empty = hole - places;

    if (!hole->hash || hole->span != span)
        return;
    for (uint32_t at = behind(part, empty); places[at].hash; at = behind(part, at))
        /* It may move up if its home is not behind the hole. */
        if (steps(part, home_of(part, places[at].hash), at) >= steps(part, empty, at)) {
            places[empty] = places[at];
            empty = at;
        }
    places[empty].hash = 0;
    part->keys--;
    l->known.known_keys--;
}
