/* Spans, the table of their keys, the order in which they are forgotten, and the cells in which they wait for eviction. */
#include "learned.h"

#include <stdlib.h>
#include <string.h>

enum { REMEMBERED_POOLS = 16, GHOST_PART = 50, FEWEST_PLACES = 256, FEWEST_SPANS = 64, WASTED = 32, NEAR = 64 };

static void *room_for(void *before, uint64_t nbytes)
{
    void *after = realloc(before, nbytes ? nbytes : 1);

    if (!after)
        abort(); /* as the kernel would, a moment later */
    return after;
}

/* Memory for the call at hand. What was got before is lost. */
void *scratch(struct learned *l, uint64_t nbytes)
{
    if (nbytes > l->scratch_bytes) {
        l->scratch_bytes = 2 * nbytes;
        l->scratch = room_for(l->scratch, l->scratch_bytes);
    }
    return l->scratch;
}

/* --- the table of keys --- */

struct place *find_place(const struct learned *l, uint64_t hash)
{
    for (uint64_t at = hash;; at++) {
        struct place *there = &l->places[at & (l->capacity - 1)];
        if (!there->hash || there->hash == hash)
            return there;
    }
}

/* Makes room for so many keys more. */
void more_places(struct learned *l, uint64_t keys)
{
    struct place *before = l->places;
    uint64_t capacity = l->capacity;

    if (l->places && 4 * (l->known.known_keys + keys) <= 3 * capacity)
        return;
    if (!l->capacity)
        l->capacity = FEWEST_PLACES;
    while (4 * (l->known.known_keys + keys) > 3 * l->capacity)
        l->capacity *= 2;
    l->places = calloc(l->capacity, sizeof *l->places);
    if (!l->places)
        abort();
    for (uint64_t at = 0; at < capacity; at++)
        if (before[at].hash)
            *find_place(l, before[at].hash) = before[at];
    free(before);
}

/* Gives the keys of a span places in it, wherever they were. */
static void enter_keys(struct learned *l, uint32_t number)
{
    const struct span *s = &l->spans[number];

    for (uint32_t i = s->low; i < s->high; i++) {
        uint64_t hash = s->hashes[i - s->base];
        if (i + AHEAD < s->high)
            __builtin_prefetch(&l->places[s->hashes[i + AHEAD - s->base] & (l->capacity - 1)]);
        struct place *there = find_place(l, hash);
        l->known.known_keys += !there->hash;
        *there = (struct place){ .hash = hash, .span = number, .place = i };
    }
}

static void remove_place(struct learned *l, struct place *hole)
{
    uint64_t mask = l->capacity - 1, empty = hole - l->places;

    for (uint64_t at = empty + 1;; at++) {
        struct place *there = &l->places[at & mask];
        if (!there->hash)
            break;
        /* It may move up if its home is not behind the hole. */
        if (((at - there->hash) & mask) >= ((at - empty) & mask)) {
            l->places[empty & mask] = *there;
            empty = at;
        }
    }
    l->places[empty & mask].hash = 0;
    l->known.known_keys--;
}

/* --- spans --- */

static uint32_t cell_of(const struct learned *l, const struct span *s)
{
    return l->known.as_lru ? LRU_CELL : s->kind * BINS + s->age_bin;
}

uint32_t *handles_of(const struct span *s)
{
    return (uint32_t *)(s->hashes + s->room);
}

static uint64_t array_bytes(uint32_t keys)
{
    return (uint64_t)keys * (sizeof(uint64_t) + sizeof(uint32_t));
}

/* A span without keys, whose fields are 0. */
uint32_t new_span(struct learned *l)
{
    uint32_t number = l->unused_spans;

    if (!number) {
        uint32_t room = l->span_room ? 2 * l->span_room : FEWEST_SPANS;
        l->spans = room_for(l->spans, room * sizeof *l->spans);
        memset(l->spans + l->span_room, 0, (room - l->span_room) * sizeof *l->spans);
        for (uint32_t new = room - 1; new >= l->span_room && new; new--) {
            l->spans[new].next = l->unused_spans;
            l->unused_spans = new;
        }
        l->span_room = room;
        number = l->unused_spans;
    }
    l->unused_spans = l->spans[number].next;
    memset(&l->spans[number], 0, sizeof *l->spans);
    l->known.spans++;
    return number;
}

/* Gives a span its keys, without blocks, and enters them. */
void set_keys(struct learned *l, uint32_t number, const uint64_t *hashes, uint32_t count)
{
    struct span *s = &l->spans[number];

    more_places(l, count);
    s->room = s->high = count;
    s->hashes = room_for(NULL, array_bytes(count));
    memcpy(s->hashes, hashes, count * sizeof *hashes);
    memset(handles_of(s), 0, count * sizeof(uint32_t));
    l->array_bytes += array_bytes(count);
    enter_keys(l, number);
}

/* A new span, whose keys' lives begin now. It is in no order yet. */
uint32_t begin_span(struct learned *l, const uint64_t *hashes, uint32_t count, int kind, uint64_t weight)
{
    uint32_t number = new_span(l);
    struct span *s = &l->spans[number];

    s->weight = weight;
    s->since = l->known.now;
    s->sightings = 1;
    s->kind = s->floor = kind;
    set_keys(l, number, hashes, count);
    l->known.known_bytes += count * weight;
    begin_lives(l, s, count);
    return number;
}

static uint64_t bytes_of(const struct span *s)
{
    return (s->high - s->low) * s->weight;
}

/* An LRU would not have the keys of a span, which is the next one to go there. */
static void age_recent(struct learned *l)
{
    struct span *s = &l->spans[l->recent];

    s->recent = 0;
    l->recent_bytes -= bytes_of(s);
    l->recent = s->younger;
}

/* Keys of a span are taken or forgotten. */
static void lose_bytes(struct learned *l, const struct span *s, uint64_t keys)
{
    l->known.known_bytes -= keys * s->weight;
    if (s->recent)
        l->recent_bytes -= keys * s->weight;
}

static void leave_order(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (l->recent == number)
        l->recent = s->younger;
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
    while (l->recent && l->recent_bytes > l->known.lifetime)
        age_recent(l);
}

/* A span has no keys any more. */
static void bury(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];

    if (!s->old)
        leave_order(l, number);
    if (s->before)
        l->spans[s->before].child = s->child;
    if (s->child)
        l->spans[s->child].before = s->before;
    l->array_bytes -= array_bytes(s->room);
    free(s->hashes);
    memset(s, 0, sizeof *s);
    s->next = l->unused_spans;
    l->unused_spans = number;
    l->known.spans--;
}

/* Counts anew what of a span has blocks. */
static void count_blocks(struct span *s)
{
    const uint32_t *handles = handles_of(s);

    s->held = 0;
    s->top = s->low;
    for (uint32_t i = s->low; i < s->high; i++)
        if (handles[i - s->base]) {
            s->held++;
            s->top = i + 1;
        }
}

/* Forgets the keys of a span behind its last block. */
static void forget_tail(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    uint32_t keys = s->high - s->top;

    if (!keys)
        return;
    for (uint32_t i = s->top; i < s->high; i++) {
        struct place *there = find_place(l, s->hashes[i - s->base]);
        if (there->hash && there->span == number)
            remove_place(l, there);
    }
    end_lives(l, s, keys, l->forgotten[s->kind]);
    lose_bytes(l, s, keys);
    s->behind += keys;
    s->high = s->top;
    if (s->low == s->high)
        bury(l, number);
}

/* To be called when keys of a span have got or lost blocks, or were taken: `top` may be too high by now. */
void settle_span(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    const uint32_t *handles = handles_of(s);

    if (s->top < s->low || !s->held)
        s->top = s->low;
    while (s->top > s->low && !handles[s->top - 1 - s->base])
        s->top--;
    if (s->low == s->high)
        bury(l, number);
    else if (s->old)
        forget_tail(l, number);
}

/* Makes a span of the keys from a place on, which is not the first; returns it. */
uint32_t split_span(struct learned *l, uint32_t number, uint32_t place)
{
    uint32_t rest = new_span(l), had = l->spans[number].held;
    struct span *s = &l->spans[number], *r = &l->spans[rest];
    uint32_t count = s->high - place;

    r->since = s->since;
    r->weight = s->weight;
    r->seen = s->seen;
    r->sightings = s->sightings;
    r->turn = s->turn;
    r->behind = s->behind;
    r->kind = s->kind;
    r->floor = s->floor;
    r->age_bin = s->age_bin;
    r->old = s->old;
    r->closed = s->closed;
    r->before = number;
    r->child = s->child;
    if (r->child)
        l->spans[r->child].before = rest;
    s->child = rest;
    set_keys(l, rest, s->hashes + (place - s->base), count);
    memcpy(handles_of(r), handles_of(s) + (place - s->base), count * sizeof(uint32_t));
    s->high = place;
    s->behind += count;
    count_blocks(r);
    count_blocks(s);
    r->recent = s->recent;
    if (!r->old)
        link_before(l, rest, number);
    if (l->recent == number)
        l->recent = rest;
    if (r->held) { /* behind the other one in its cell, which is in the order of age */
        struct row *cell = &l->cells[cell_of(l, r)];
        r->previous = number;
        r->next = s->next;
        *(r->next ? &l->spans[r->next].previous : &cell->last) = rest;
        s->next = rest;
    }
    if (had && !s->held)
        leave_cell(l, number);
    settle_span(l, number);
    return rest;
}

/* Moves what is left of a span's arrays to their beginning where much was taken. */
static void compact(struct learned *l, struct span *s)
{
    uint32_t keys = s->high - s->low, wasted = s->low - s->base;

    if (wasted < WASTED || wasted < keys)
        return;
    uint64_t *hashes = room_for(NULL, array_bytes(keys));
    memcpy(hashes, s->hashes + wasted, keys * sizeof *hashes);
    memcpy(hashes + keys, handles_of(s) + wasted, keys * sizeof(uint32_t));
    l->array_bytes -= array_bytes(s->room) - array_bytes(keys);
    free(s->hashes);
    s->hashes = hashes;
    s->room = keys;
    s->base = s->low;
}

/* Takes the first keys out of a span, and writes the handles of their blocks. Their places are not to be found then. */
void take_keys(struct learned *l, uint32_t number, uint32_t count, uint32_t *handles)
{
    struct span *s = &l->spans[number];
    uint32_t had = s->held;

    memcpy(handles, handles_of(s) + (s->low - s->base), count * sizeof *handles);
    for (uint32_t i = 0; i < count && s->held; i++)
        s->held -= handles[i] != 0;
    lose_bytes(l, s, count);
    s->low += count;
    if (had && !s->held)
        leave_cell(l, number);
    if (s->low < s->high)
        compact(l, s);
    settle_span(l, number);
}

void forget_oldest(struct learned *l)
{
    uint64_t most = (1 + REMEMBERED_POOLS) * l->known.lifetime;

    for (;;) {
        /* A block's own key is not counted: it is bounded with the pool. */
        uint64_t ghosts = l->known.known_keys - l->known.blocks;
        uint64_t nbytes = ghosts * (2 * sizeof(struct place) + 12) + l->known.spans * sizeof(struct span);
        uint32_t number = l->oldest.first;
        if (!number || (l->known.known_bytes <= most && nbytes <= l->known.lifetime / GHOST_PART))
            break;
        leave_order(l, number);
        l->spans[number].old = 1;
        forget_tail(l, number);
    }
    l->known.nbytes = sizeof *l + l->capacity * sizeof *l->places + l->span_room * sizeof *l->spans + l->array_bytes;
}

/* --- cells --- */

static void set_filled(struct learned *l, uint32_t cell)
{
    if (cell == LRU_CELL)
        return;
    uint64_t bit = (uint64_t)1 << (l->rank[cell] & 63), *word = &l->filled[l->rank[cell] >> 6];

    *word = l->cells[cell].first ? *word | bit : *word & ~bit;
}

/* Puts a span, which has got blocks, into its cell, in the order of age as far as that is near. */
void fill_cell(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    uint32_t cell = cell_of(l, s), older = l->cells[cell].last;

    for (int steps = 0; older && l->spans[older].since > s->since && steps < NEAR; steps++)
        older = l->spans[older].previous;
    s->previous = older;
    s->next = older ? l->spans[older].next : l->cells[cell].first;
    *(older ? &l->spans[older].next : &l->cells[cell].first) = number;
    *(s->next ? &l->spans[s->next].previous : &l->cells[cell].last) = number;
    set_filled(l, cell);
}

void leave_cell(struct learned *l, uint32_t number)
{
    struct span *s = &l->spans[number];
    uint32_t cell = cell_of(l, s);

    *(s->previous ? &l->spans[s->previous].next : &l->cells[cell].first) = s->next;
    *(s->next ? &l->spans[s->next].previous : &l->cells[cell].last) = s->previous;
    s->previous = s->next = 0;
    set_filled(l, cell);
}

static void fill_anew(struct learned *l, uint32_t number)
{
    l->spans[number].age_bin = age_bin(l, l->spans[number].since);
    fill_cell(l, number);
}

/* Spans whose age bin has ended move to the next one. */
void move_cells(struct learned *l)
{
    for (int kind = 0; kind < CLASSES; kind++)
        for (int bin = BINS - 2; bin >= 0; bin--) {
            double limit = (double)l->known.now - l->edges[bin + 1];
            for (uint32_t number; (number = l->cells[kind * BINS + bin].first);) {
                if (l->spans[number].since > limit)
                    break;
                leave_cell(l, number);
                l->spans[number].age_bin++;
                fill_cell(l, number);
            }
        }
}

/* Puts all spans that have blocks into their cells anew: into one, in the order of age, or by class and age. */
void fill_cells(struct learned *l, int as_lru)
{
    l->known.as_lru = as_lru;
    memset(l->cells, 0, sizeof l->cells);
    memset(l->filled, 0, sizeof l->filled);
    for (uint32_t number = 1; number < l->span_room; number++)
        if (l->spans[number].old && l->spans[number].held)
            fill_anew(l, number);
    for (uint32_t number = l->oldest.first; number; number = l->spans[number].younger)
        if (l->spans[number].held)
            fill_anew(l, number);
}

struct ranked {
    double worth;
    uint16_t cell;
};

static int compare(const void *one, const void *other)
{
    const struct ranked *a = one, *b = other;
    int older = b->cell % BINS - a->cell % BINS;

    if (a->worth != b->worth)
        return a->worth < b->worth ? -1 : 1;
    return older ? older : a->cell - b->cell;
}

/* The worth of cells has changed. */
void order_cells(struct learned *l)
{
    struct ranked ranked[CELLS];

    for (int cell = 0; cell < CELLS; cell++)
        ranked[cell] = (struct ranked){ l->worth[cell / BINS][cell % BINS], cell };
    qsort(ranked, CELLS, sizeof *ranked, compare);
    memset(l->filled, 0, sizeof l->filled);
    for (int rank = 0; rank < CELLS; rank++) {
        l->by_rank[rank] = ranked[rank].cell;
        l->rank[ranked[rank].cell] = rank;
        if (!l->known.as_lru)
            set_filled(l, ranked[rank].cell);
    }
}
