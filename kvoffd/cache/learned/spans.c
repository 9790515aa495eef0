/* Spans of keys, and the order in which they are forgotten. */
#define _GNU_SOURCE
#include "learned.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { REMEMBERED_POOLS = 16, GHOST_PART = 50, FEWEST = 1024, WASTED = 32 };
enum { AGED_AT_ONCE = 64, FORGOTTEN_AT_ONCE = 2048 };

uint64_t weight_of(const struct span *s)
{
    return s->weight;
}

/* Where the hash of a key is, and those of the keys behind it. */
uint64_t *hash_at(struct span *s, uint32_t place)
{
    return s->alone ? &s->hash : &s->keys->hashes[place - s->keys->base];
}

/* Where the handle of a key's block is, and those of the keys behind it. To be written to only if the span holds blocks. */
uint32_t *handle_at(const struct learned *l, const struct span *s, uint32_t place)
{
    if (s->alone)
        return &l->holders[s->holder].handle;
    return (uint32_t *)(s->keys->hashes + s->keys->room) + (place - s->keys->base);
}

/* Memory of a span's keys, with what malloc takes. */
static uint64_t keys_bytes(uint32_t keys)
{
    uint64_t nbytes = sizeof(struct keys) + keys * (sizeof(uint64_t) + sizeof(uint32_t)) + sizeof(size_t);

    return (nbytes + 15) / 16 * 16;
}

/* Gives a span room for several keys, the first one at the place `low`, and copies as many. */
static void make_keys(struct learned *l, struct span *s, const uint64_t *hashes, const uint32_t *handles, uint32_t count)
{
    s->keys = or_end(malloc(sizeof *s->keys + count * (sizeof *hashes + sizeof *handles)));
    s->keys->base = s->low;
    s->keys->room = count;
    l->keys_bytes += keys_bytes(count);
    memcpy(s->keys->hashes, hashes, count * sizeof *hashes);
    if (handles)
        memcpy(s->keys->hashes + count, handles, count * sizeof *handles);
    else
        memset(s->keys->hashes + count, 0, count * sizeof *handles);
}

static void free_keys(struct learned *l, struct keys *keys)
{
    l->keys_bytes -= keys_bytes(keys->room);
    free(keys);
}

/* Doubles the room for things, without copying them: `each` bytes, 0 at first. */
static void *more_room(void *before, uint32_t *room, uint64_t each)
{
    uint64_t nbytes = *room * each;
    void *made;

    *room = *room ? 2 * *room : FEWEST;
    if (before)
        made = mremap(before, nbytes, *room * each, MREMAP_MAYMOVE);
    else
        made = mmap(NULL, *room * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return or_end(made == MAP_FAILED ? NULL : made);
}

/* Before anything else. Number 0 of each is none. */
void make_spans(struct learned *l)
{
    l->spans = more_room(NULL, &l->span_room, sizeof *l->spans);
    l->holders = more_room(NULL, &l->holder_room, sizeof *l->holders);
    l->span_top = l->holder_top = 1;
}

void free_spans(struct learned *l)
{
    for (uint32_t number = 1; number < l->span_top; number++)
        if (!l->spans[number].alone)
            free(l->spans[number].keys);
    munmap(l->spans, l->span_room * sizeof *l->spans);
    munmap(l->holders, l->holder_room * sizeof *l->holders);
}

static void set_weight(const struct learned *l, struct span *s, uint64_t weight)
{
    uint64_t nbytes = weight < l->known.lifetime ? weight : l->known.lifetime;
    int lost = 64 - __builtin_clzll(nbytes | 1) - FLT_MANT_DIG;

    s->weight = lost > 0 ? nbytes >> lost << lost : nbytes;
}

/* A span without keys, whose other fields are 0. */
uint32_t new_span(struct learned *l, uint64_t weight)
{
    uint32_t number = l->unused_spans;

    if (number) {
        l->unused_spans = l->spans[number].child;
    } else {
        number = l->span_top++;
        if (number == l->span_room)
            l->spans = more_room(l->spans, &l->span_room, sizeof *l->spans);
    }
    memset(&l->spans[number], 0, sizeof *l->spans);
    set_weight(l, &l->spans[number], weight);
    l->known.spans++;
    return number;
}

/* A span is about to get its first block. */
void hold_blocks(struct learned *l, uint32_t number)
{
    uint32_t holder = l->unused_holders;

    if (holder) {
        l->unused_holders = l->holders[holder].handle;
    } else {
        holder = l->holder_top++;
        if (holder == l->holder_room)
            l->holders = more_room(l->holders, &l->holder_room, sizeof *l->holders);
    }
    memset(&l->holders[holder], 0, sizeof *l->holders);
    l->spans[number].holder = holder;
}

static void free_holder(struct learned *l, uint32_t number)
{
    uint32_t holder = l->spans[number].holder;

    l->holders[holder].handle = l->unused_holders;
    l->unused_holders = holder;
    l->spans[number].holder = 0;
}

/* A span has lost its last block: it leaves its cell. */
void hold_none(struct learned *l, uint32_t number)
{
    leave_cell(l, number);
    free_holder(l, number);
}

/* Gives a span its keys, without blocks, and enters them, wherever they were. */
void set_keys(struct learned *l, uint32_t number, const uint64_t *hashes, uint32_t count)
{
    struct span *s = &l->spans[number];

    s->high = count;
    s->alone = count == 1;
    if (s->alone)
        s->hash = *hashes;
    else
        make_keys(l, s, hashes, NULL, count);
    for (uint32_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            fetch_place(l, hashes[i + AHEAD]);
        set_place(l, hashes[i], number, i);
    }
}

/* A new span, whose keys' lives begin or began then. It is in no order yet. */
uint32_t begin_span(struct learned *l, const uint64_t *hashes, uint32_t count, int kind, uint64_t weight, uint64_t since)
{
    uint32_t number = new_span(l, weight);
    struct span *s = &l->spans[number];

    s->since = since;
    s->sightings = 1;
    s->kind = s->floor = kind;
    set_keys(l, number, hashes, count);
    l->known.known_bytes += count * weight_of(s);
    begin_lives(l, s, count);
    return number;
}

static uint64_t bytes_of(const struct span *s)
{
    return (s->high - s->low) * weight_of(s);
}

/* An LRU has no room for the oldest of its keys. */
static void age_recent(struct learned *l)
{
    for (int aged = 0; l->recent && aged < AGED_AT_ONCE; aged++) {
        struct span *s = &l->spans[l->recent];
        if (l->recent_bytes - bytes_of(s) < l->known.lifetime)
            return;
        s->recent = 0;
        l->recent_bytes -= bytes_of(s);
        l->recent = s->younger;
    }
}

/* How many of a span's keys, from the first one on, an LRU would have: the last ones go first. */
uint32_t recent_keys(const struct learned *l, uint32_t number)
{
    const struct span *s = &l->spans[number];
    uint64_t excess = l->recent_bytes > l->known.lifetime ? l->recent_bytes - l->known.lifetime : 0;

    if (!s->recent || !s->offered)
        return 0;
    if (number != l->recent || !excess)
        return s->high - s->low;
    return excess < bytes_of(s) ? (bytes_of(s) - excess) / weight_of(s) : 0;
}

/* Keys of a span are taken or forgotten. */
static void lose_bytes(struct learned *l, const struct span *s, uint64_t keys)
{
    l->known.known_bytes -= keys * weight_of(s);
    if (s->recent)
        l->recent_bytes -= keys * weight_of(s);
}

static void leave_order(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (l->recent == number)
        l->recent = s->younger;
    if (l->latest == number)
        l->latest = s->younger;
    if (s->recent)
        l->recent_bytes -= bytes_of(s);
    s->recent = 0;
    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = s->younger;
    *(s->younger ? &l->spans[s->younger].older : &l->oldest.last) = s->older;
    s->older = s->younger = 0;
}

/* Puts a span into the order of forgetting, before another one or, where that is 0, as the youngest. */
static void link_before(struct learned *l, uint32_t number, uint32_t younger)
{
    struct span *s = &l->spans[number];

    s->younger = younger;
    s->older = younger ? l->spans[younger].older : l->oldest.last;
    *(s->older ? &l->spans[s->older].younger : &l->oldest.first) = number;
    *(younger ? &l->spans[younger].older : &l->oldest.last) = number;
}

void link_young(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    link_before(l, number, 0);
    s->recent = 1;
    l->recent_bytes += bytes_of(s);
    if (!l->recent)
        l->recent = number;
    age_recent(l);
}

/* Puts a span into the order that a store brought: behind the latest request's keys, which an LRU evicts later. */
void link_stored(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (!l->latest) {
        link_young(l, number);
        return;
    }
    link_before(l, number, l->latest);
    s->recent = l->spans[l->latest].recent;
    if (!s->recent)
        return;
    l->recent_bytes += bytes_of(s);
    if (l->recent == l->latest)
        l->recent = number;
    age_recent(l);
}

/* Puts a span into the order as the oldest. An LRU would have it if it had all others, and has room. */
void link_old(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    uint32_t younger = l->oldest.first;

    link_before(l, number, younger);
    s->recent = l->recent == younger && l->recent_bytes + bytes_of(s) <= l->known.lifetime;
    if (s->recent) {
        l->recent = number;
        l->recent_bytes += bytes_of(s);
    }
}

/* A span is no part of its request any more. */
static void leave_request(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (!s->old)
        leave_order(l, number);
    if (s->before)
        l->spans[s->before].child = s->child;
    if (s->child)
        l->spans[s->child].before = s->before;
    s->before = s->child = 0;
}

/* A span has no keys any more. */
static void bury(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    leave_request(l, number);
    if (!s->alone)
        free_keys(l, s->keys);
    memset(s, 0, sizeof *s);
    s->child = l->unused_spans;
    l->unused_spans = number;
    l->known.spans--;
}

/* Counts anew what of a span has blocks. */
static void count_blocks(const struct learned *l, struct span *s)
{
    s->held = 0;
    s->top = s->low;
    for (uint32_t i = s->low; i < s->high; i++)
        if (*handle_at(l, s, i)) {
            s->held++;
            s->top = i + 1;
        }
}

/* A span has got fewer keys: where much of its arrays is unused, what is left moves to smaller ones. */
static void compact(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    struct keys *before = s->keys;

    if (s->low == s->high) {
        bury(l, number);
        return;
    }
    if (s->alone)
        return;
    uint32_t wasted = before->room - (s->high - s->low);
    if (wasted < WASTED || wasted < s->high - s->low)
        return;
    make_keys(l, s, hash_at(s, s->low), handle_at(l, s, s->low), s->high - s->low);
    free_keys(l, before);
}

/* Forgets the last keys of a span, at most so many, that are behind its last block; returns how many. */
static uint32_t forget_tail(struct learned *l, uint32_t number, uint64_t most)
{
    struct span *s = &l->spans[number];
    uint32_t keys = s->high - s->top < most ? s->high - s->top : most;

    if (!keys)
        return 0;
    for (uint32_t i = s->high - keys; i < s->high; i++) {
        if (i + AHEAD < s->high)
            fetch_place(l, *hash_at(s, i + AHEAD));
        remove_place(l, *hash_at(s, i), number);
    }
    end_lives(l, s, keys, l->forgotten[s->kind]);
    lose_bytes(l, s, keys);
    s->behind += keys;
    s->high -= keys;
    compact(l, number);
    return keys;
}

/* To be called when keys of a span have got or lost blocks, or were taken: `top` may be too high by now. */
void settle_span(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (s->top < s->low || !s->held)
        s->top = s->low;
    while (s->top > s->low && !*handle_at(l, s, s->top - 1))
        s->top--;
    if (!s->old || !forget_tail(l, number, UINT32_MAX))
        compact(l, number);
}

/* Makes a span of the keys from a place on, which is not the first; returns it. */
uint32_t split_span(struct learned *l, uint32_t number, uint32_t place)
{
    uint32_t rest = new_span(l, weight_of(&l->spans[number])), had = l->spans[number].held;
    struct span *s = &l->spans[number], *r = &l->spans[rest];
    uint32_t count = s->high - place;

    r->since = s->since;
    r->seen = s->seen;
    r->sightings = s->sightings;
    r->turn = s->turn;
    r->behind = s->behind;
    r->kind = s->kind;
    r->floor = s->floor;
    r->age_bin = s->age_bin;
    r->old = s->old;
    r->closed = s->closed;
    r->offered = s->offered;
    r->before = number;
    r->child = s->child;
    if (r->child)
        l->spans[r->child].before = rest;
    s->child = rest;
    set_keys(l, rest, hash_at(s, place), count);
    if (had)
        hold_blocks(l, rest);
    memcpy(handle_at(l, r, 0), handle_at(l, s, place), count * sizeof(uint32_t));
    s->high = place;
    s->behind += count;
    count_blocks(l, r);
    count_blocks(l, s);
    r->recent = s->recent;
    if (!r->old)
        link_before(l, rest, number);
    if (l->recent == number)
        l->recent = rest;
    if (r->held)
        link_behind(l, rest, number);
    else if (had)
        free_holder(l, rest);
    if (had && !s->held)
        hold_none(l, number);
    settle_span(l, number);
    return rest;
}

/* Takes the first keys out of a span, and writes the handles of their blocks. Their places are not to be found then. */
void take_keys(struct learned *l, uint32_t number, uint32_t count, uint32_t *handles)
{
    struct span *s = &l->spans[number];
    uint32_t had = s->held;

    memcpy(handles, handle_at(l, s, s->low), count * sizeof *handles);
    for (uint32_t i = 0; i < count && s->held; i++)
        s->held -= handles[i] != 0;
    add_blocks(l, s, (int64_t)s->held - had);
    lose_bytes(l, s, count);
    s->low += count;
    if (had && !s->held)
        hold_none(l, number);
    settle_span(l, number);
}

/* Takes a span with all its keys and blocks out of all orders, and writes the handles. It begins again then. */
void lift_span(struct learned *l, uint32_t number, uint32_t *handles)
{
    struct span *s = &l->spans[number];

    memcpy(handles, handle_at(l, s, s->low), (s->high - s->low) * sizeof *handles);
    l->known.known_bytes -= bytes_of(s);
    if (s->held) {
        add_blocks(l, s, -(int64_t)s->held);
        leave_cell(l, number);
    }
    leave_request(l, number);
}

/* As `begin_span`, for a span that was lifted. */
void begin_again(struct learned *l, uint32_t number, int kind, uint64_t weight)
{
    struct span *s = &l->spans[number];

    set_weight(l, s, weight);
    s->since = l->known.now;
    s->seen = 0;
    s->kind = s->floor = kind;
    s->age_bin = s->old = s->closed = 0;
    l->known.known_bytes += bytes_of(s);
    begin_lives(l, s, s->high - s->low);
}

/* Forgets the keys that are remembered longest while they are too many, about `most` of them. */
void forget_oldest(struct learned *l, uint64_t most)
{
    uint64_t most_bytes = (1 + REMEMBERED_POOLS) * l->known.lifetime;

    age_recent(l);
    for (uint64_t done = 0; done < most; done++) {
        /* A block's own key is not counted: it is bounded with the pool. */
        uint64_t ghosts = l->known.known_keys - l->known.blocks;
        uint64_t nbytes = ghosts * (2 * sizeof(struct place) + 12) + l->known.spans * sizeof(struct span);
        uint32_t number = l->oldest.first;
        if (!number || (l->known.known_bytes <= most_bytes && nbytes <= l->known.lifetime / GHOST_PART))
            break;
        if (l->spans[number].high - l->spans[number].top <= most - done) {
            leave_order(l, number);
            l->spans[number].old = 1;
        }
        done += forget_tail(l, number, most - done);
    }
    l->known.nbytes = sizeof *l + l->place_room * sizeof(struct place) + (l->part_mask + 1) * sizeof *l->parts +
                      l->span_top * sizeof *l->spans + l->holder_top * sizeof *l->holders + l->keys_bytes;
}

/* The same in steps: to be called where so many keys are added or lose their blocks. */
void forget_some(struct learned *l, uint64_t added)
{
    forget_oldest(l, FORGOTTEN_AT_ONCE + 2 * added);
}

/* Time has become too long to be counted on: it begins anew, and nothing is younger for it but what is too old to matter. */
void go_back(struct learned *l)
{
    uint64_t epochs = l->epoch / EPOCHS_KEPT * EPOCHS_KEPT - EPOCHS_KEPT, nbytes = epochs * epoch_bytes(l);
    uint64_t *ends[] = { &l->age_at, &l->learn_at, &l->judge_at };

    for (uint32_t number = 1; number < l->span_top; number++) {
        struct span *s = &l->spans[number];
        s->since = s->since > nbytes ? s->since - nbytes : 0;
    }
    for (int i = 0; i < 3; i++)
        *ends[i] = *ends[i] > nbytes ? *ends[i] - nbytes : 0;
    l->epoch -= epochs;
    l->known.now -= nbytes;
    l->past += nbytes;
}
