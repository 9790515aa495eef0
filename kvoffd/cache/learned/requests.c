/* What requests ask for and stores offer: their keys' spans, and the classes of these. */
#include "../../system/key_hash.h"
#include "learned.h"

#include <math.h>
#include <string.h>

/* What amounts of text are counted in, and the most that a request may leave out of the one that it continues. */
enum { UNIT_TOKENS = 512 };
enum { FEWEST_LEARNED = 40, MEMORY_REQUESTS = 8000, EVIDENCE_PART = 50, TIME_PART = 32 };
static const uint64_t LONGEST_TIME = (uint64_t)1 << 59; /* bytes */

static const uint32_t NEW_UNITS[] = { 2, 4, 8, 16, 32 }, SIGHTINGS[] = { 1, 2, 3, 4, 8 };
static const double PAUSES[] = { 0.5, 2, 8 }; /* in pool lifetimes */

#define LENGTH(array) (int)(sizeof(array) / sizeof *(array))

/* How many of the limits are not above a value. */
static int step_of(uint64_t value, const uint32_t *limits, int count)
{
    int step = 0;

    while (step < count && limits[step] <= value)
        step++;
    return step;
}

/* --- keys --- */

/* Writes the hashes of `count` keys that lie end to end. `name`: another one where the same keys mean other blocks.
 * Returns how many there are. */
uint64_t hash_keys(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                   uint64_t *hashes)
{
    for (uint64_t i = 0; i < count; i++, keys += key_bytes) {
        uint64_t found = key_hash(l->seed[0] ^ name, l->seed[1], keys, key_bytes);
        hashes[i] = found ? found : 1;
    }
    return count;
}

/* Leaves out the hashes that come again; returns how many are left. `seen` has room for `room` numbers, a power of two
 * and more than `count`. */
static uint64_t leave_out_repeats(uint64_t *hashes, uint64_t count, uint32_t *seen, uint64_t room)
{
    uint64_t kept = 0;

    memset(seen, 0, room * sizeof *seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = hashes[i];
        while (seen[at & (room - 1)] && hashes[seen[at & (room - 1)] - 1] != hashes[i])
            at++;
        if (!seen[at & (room - 1)]) {
            hashes[kept++] = hashes[i];
            seen[at & (room - 1)] = kept;
        }
    }
    return kept;
}

/* How many of the keys, from the first on, have neighbouring places in one span, or none; `first` is the first's. */
uint32_t run_length(const struct learned *l, const uint64_t *hashes, uint32_t count, struct place *first)
{
    uint32_t length = 1;

    *first = *find_place(l, hashes[0]);
    for (; length < count; length++) {
        if (length + AHEAD < count)
            fetch_place(l, hashes[length + AHEAD]);
        const struct place *there = find_place(l, hashes[length]);
        if (!there->hash != !first->hash)
            break;
        if (there->hash && (there->span != first->span || there->place != first->place + length))
            break;
    }
    if (!first->hash)
        first->span = 0;
    return length;
}

/* --- requests --- */

/* Neighbouring keys of a request that get one span. */
struct segment {
    uint32_t begin, end, sightings;
    uint32_t renewed; /* the span that has just these keys, and is kept for them; 0 for none */
    int kind, offered;
};

/* One group's part of a request. */
struct request {
    uint64_t *hashes;
    uint32_t *handles; /* of the blocks that its keys have */
    struct segment *segments;
    uint32_t count, met, made, turn;
    uint32_t hits, lru_hits; /* keys with a block before the first one without; those that an LRU would have had */
    uint64_t tokens; /* of a block */
    int pause, new;
    uint64_t left_out; /* tokens of the request before that this one does not have */
};

/* Finds the known keys at the start of the chain: the spans that begin with them. Each becomes a segment, whose `kind` is
 * the span's number for now. */
static void meet(struct learned *l, struct request *r)
{
    while (r->met < r->count && find_place(l, r->hashes[r->met])->hash) {
        struct place first;
        uint32_t keys = run_length(l, r->hashes + r->met, r->count - r->met, &first);
        struct span *s = &l->spans[first.span];
        if (s->met || first.place != s->low)
            break;
        s->met = 1;
        r->segments[r->made++] = (struct segment){ r->met, r->met + keys, 0, 0, first.span, 0 };
        r->met += keys;
    }
}

/* What the classes of the request's keys are made of. */
static void describe(const struct learned *l, struct request *r)
{
    uint64_t units = (r->tokens * (r->count - r->met) + UNIT_TOKENS - 1) / UNIT_TOKENS;

    r->new = step_of(units, NEW_UNITS, LENGTH(NEW_UNITS));
    r->turn = 1;
    if (!r->made)
        return;
    const struct segment *last = &r->segments[r->made - 1];
    const struct span *s = &l->spans[last->kind];
    double pause = (double)(l->known.now - s->since) / l->known.lifetime;
    while (r->pause < LENGTH(PAUSES) && PAUSES[r->pause] <= pause)
        r->pause++;
    r->left_out = r->tokens * ((uint64_t)s->behind + (s->high - s->low) - (last->end - last->begin));
    if (r->left_out > UNIT_TOKENS)
        return;
    uint32_t turn = 0;
    for (uint32_t i = r->made; i-- && !turn;)
        turn = l->spans[r->segments[i].kind].turn;
    r->turn = turn < MOST_SEEN ? 1 + (turn ? turn : 1) : turn;
}

static int later_turn(const struct request *r)
{
    return (r->turn < 4 ? r->turn : 4) / 2 - 1;
}

/* Class of keys that were seen so often before. */
static int known_class(const struct request *r, uint32_t sightings)
{
    if (r->turn == 1 || sightings >= r->turn)
        return SHARED + step_of(sightings, SIGHTINGS, LENGTH(SIGHTINGS));
    return CONTINUED + (r->pause * 2 + later_turn(r)) * 3 + (r->new < 2 ? r->new : 2);
}

/* Class of keys that were never seen. */
static int new_class(const struct request *r)
{
    static const uint8_t NEWS[] = { 0, 1, 2, 2, 3, 3 };

    if (r->turn > 1)
        return APPENDED + (r->pause * 2 + later_turn(r)) * 4 + NEWS[r->new];
    if (r->left_out > UNIT_TOKENS && r->tokens * r->met > UNIT_TOKENS)
        return BRANCH + r->new;
    return FIRST + r->new;
}

/* Whether neighbours get one span. New keys and known ones never do: these were seen more often. */
static int joined(const struct segment *one, const struct segment *other)
{
    return one->kind == other->kind && one->sightings == other->sightings;
}

/* The known keys came back. Spans of which all did are kept for them. */
static void take_known(struct learned *l, struct request *r)
{
    uint32_t lru_hits = 0;

    for (uint32_t i = 0; i < r->made; i++) {
        struct segment *found = &r->segments[i];
        uint32_t number = found->kind, keys = found->end - found->begin;
        struct span *s = &l->spans[number];
        s->met = 0;
        found->offered = s->offered;
        if (lru_hits == found->begin) {
            uint32_t recent = recent_keys(l, number);
            lru_hits += recent < keys ? recent : keys;
        }
        end_lives(l, s, keys, l->returned[s->kind]);
        found->kind = known_class(r, s->sightings);
        found->sightings = s->sightings + (s->sightings < MOST_SEEN);
        found->renewed = number;
    }
    r->lru_hits = lru_hits;
    for (uint32_t i = 0; i < r->made; i++) {
        struct segment *found = &r->segments[i];
        uint32_t number = found->renewed, keys = found->end - found->begin;
        int joins = (i && joined(found - 1, found)) || (i + 1 < r->made && joined(found, found + 1));
        if (!joins && keys == l->spans[number].high - l->spans[number].low) {
            lift_span(l, number, r->handles + found->begin);
        } else {
            take_keys(l, number, keys, r->handles + found->begin);
            found->renewed = 0;
        }
    }
    while (r->hits < r->met && r->handles[r->hits])
        r->hits++;
}

/* Takes keys out of their spans from the first given one on; the lives of those that are known are not counted.
 * `forgotten`: they are known no more. */
static void take_out(struct learned *l, const uint64_t *hashes, uint32_t count, uint32_t *handles, int forgotten)
{
    for (uint32_t i = 0; i < count;) {
        struct place first;
        uint32_t keys = run_length(l, hashes + i, count - i, &first), number = first.span;
        if (number) {
            if (first.place > l->spans[number].low)
                number = split_span(l, number, first.place);
            end_lives(l, &l->spans[number], keys, NULL);
            for (uint32_t at = i; forgotten && at < i + keys; at++)
                remove_place(l, hashes[at], number);
            take_keys(l, number, keys, handles + i);
        }
        i += keys;
    }
}

/* Keys lost their blocks and are known no more. Returns how many had one. */
uint64_t kvoffd_learned_forget(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * (sizeof *hashes + sizeof(uint32_t))), blocks = 0;
    uint32_t *handles = (uint32_t *)(hashes + count);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    memset(handles, 0, count * sizeof *handles);
    take_out(l, hashes, count, handles, 1);
    for (uint64_t i = 0; i < count; i++)
        blocks += handles[i] != 0;
    l->known.blocks -= blocks;
    return blocks;
}

static void add_segment(struct request *r, uint32_t begin, uint32_t end, int kind)
{
    if (begin < end)
        r->segments[r->made++] = (struct segment){ begin, end, 1, 0, kind, 0 };
}

/* Joins neighbours that are of one class and were seen as often. */
static void join_segments(struct request *r)
{
    uint32_t made = 0;

    for (uint32_t i = 1; i < r->made; i++) {
        struct segment *last = &r->segments[made], *one = &r->segments[i];
        if (joined(last, one)) {
            last->end = one->end;
            last->offered &= one->offered;
        } else {
            r->segments[++made] = *one;
        }
    }
    r->made = made + 1;
}

/* Makes the spans of the request, the last one first in the order of forgetting. */
static void add_spans(struct learned *l, struct request *r, uint64_t weight)
{
    uint32_t before = 0;

    for (uint32_t i = 0; i < r->made; i++) {
        const struct segment *one = &r->segments[i];
        uint32_t keys = one->end - one->begin, number = one->renewed;
        if (number)
            begin_again(l, number, one->kind, weight);
        else
            number = begin_span(l, r->hashes + one->begin, keys, one->kind, weight, l->known.now);
        struct span *s = &l->spans[number];
        l->accessed[one->kind] += keys * weight;
        s->sightings = one->sightings;
        s->offered = one->offered;
        s->turn = r->turn;
        s->behind = r->count - one->end;
        s->before = before;
        if (before) {
            struct span *b = &l->spans[before];
            b->child = number;
            if (l->admission_worth[b->floor] < l->admission_worth[s->kind])
                s->floor = b->floor;
        }
        for (uint32_t at = 0; at < keys && !one->renewed; at++)
            if (r->handles[one->begin + at]) {
                s->held++;
                s->top = at + 1;
            }
        if (s->held) {
            if (!one->renewed) {
                hold_blocks(l, number);
                memcpy(handle_at(l, s, 0), r->handles + one->begin, keys * sizeof *r->handles);
            }
            fill_cell(l, number, 0);
            add_blocks(l, s, s->held);
        }
        before = number;
    }
    for (uint32_t number = before; number; number = l->spans[number].before)
        link_young(l, number);
    l->latest = before;
}

/* Notes one group's part of a request, as much of it as the pool could hold: its known keys came back, and all get new
 * classes. Returns how many different keys it has. */
uint64_t kvoffd_learned_note(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                             uint64_t weight, uint64_t tokens)
{
    uint64_t seen = 2;

    if (count > l->known.lifetime / weight)
        count = l->known.lifetime / weight;
    while (seen <= count)
        seen *= 2;
    seen *= 2;
    uint64_t each = sizeof(uint64_t) + sizeof(struct segment) + sizeof(uint32_t);
    uint8_t *room = scratch(l, (count + 2) * each + seen * sizeof(uint32_t));
    struct request r = { .hashes = (uint64_t *)room, .tokens = tokens };
    r.segments = (struct segment *)(r.hashes + count);
    r.handles = (uint32_t *)(r.segments + count + 2);
    if (!count)
        return 0;
    r.count = hash_keys(l, name, keys, count, key_bytes, r.hashes);
    meet(l, &r);
    if (r.met < r.count) /* those that were met are different keys */
        r.count = leave_out_repeats(r.hashes, count, r.handles + count, seen);
    memset(r.handles, 0, r.count * sizeof *r.handles);
    describe(l, &r);
    take_known(l, &r);
    if (r.met < r.count) {
        /* Keys of the last part of the prompt, behind its last whole unit. */
        uint32_t part = (tokens * r.count - 1) % UNIT_TOKENS / tokens + 1;
        uint32_t last = r.count > part ? r.count - part : 0;
        /* Of what is known behind an unknown key it is learned that it is not there. */
        take_out(l, r.hashes + r.met, r.count - r.met, r.handles + r.met, 0);
        if (last < r.met)
            last = r.met;
        add_segment(&r, r.met, last, new_class(&r));
        add_segment(&r, last, r.count, LAST);
    }
    double lead = ((double)r.lru_hits - r.hits) * weight;
    l->lead += lead;
    l->lead_squares += lead * lead;
    l->known.hit_bytes += r.hits * weight;
    l->known.lru_hit_bytes += r.lru_hits * weight;
    join_segments(&r);
    add_spans(l, &r, weight);
    return r.count;
}

/* A request, of so many keys, is noted. Returns how many there were since it was learned last if it is time to learn. */
uint64_t kvoffd_learned_pass(struct learned *l, uint64_t keys, uint64_t nbytes)
{
    l->known.requests++;
    l->known.keys += keys;
    l->known.now += nbytes;
    enter_epoch(l);
    if (l->known.now > LONGEST_TIME && l->epoch >= 2 * EPOCHS_KEPT)
        go_back(l);
    forget_some(l, keys);
    if (!l->known.as_lru)
        move_cells(l);
    judge(l);
    if (l->known.now < l->learn_at || l->known.requests < l->learn_after)
        return 0;
    return l->known.requests - l->learned_at;
}

/* It is learned again when what is known has become a little more, at the latest after a pool lifetime: when the pool has
 * just become full, what was learned a lifetime ago says nothing of half of its blocks' ages. */
void plan_learning(struct learned *l)
{
    double later = (l->past + l->known.now) / TIME_PART;
    uint64_t more = (l->known.requests < MEMORY_REQUESTS ? l->known.requests : MEMORY_REQUESTS) / EVIDENCE_PART;

    l->learned_at = l->known.requests;
    l->learn_at = l->known.now + (later < l->known.lifetime ? (uint64_t)later : l->known.lifetime);
    l->learn_after = l->known.requests + (more > FEWEST_LEARNED ? more : FEWEST_LEARNED);
}

/* Works out anew what every class is worth. What was seen before weighs as much from now on as `kept` says. */
void kvoffd_learned_learn(struct learned *l, double kept)
{
    work_out(l);
    order_cells(l);
    plan_learning(l);
    for (int kind = 0; kind < CLASSES; kind++) {
        l->accessed[kind] *= kept;
        for (int bin = 0; bin < BINS; bin++) {
            l->returned[kind][bin] *= kept;
            l->forgotten[kind][bin] *= kept;
        }
    }
}

/* --- stores --- */

struct offer {
    double worth;
    uint64_t keys;
};

static const double DECLINED = -1;

/* Writes what keys are worth that have no block, in runs, of which there are at most `count`; returns how many. Chains
 * begin at `starts`, the first at 0. */
uint64_t kvoffd_learned_offers(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t weight, const uint64_t *starts, uint64_t chains, struct offer *offers)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes), made = 0;

    forget_some(l, count); /* what is stored without a request is bounded, too */
    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t chain = 0; chain < chains; chain++) {
        uint64_t end = chain + 1 < chains ? starts[chain + 1] : count;
        double worth = INFINITY;
        for (uint64_t i = starts[chain]; i < end;) {
            struct place first;
            uint32_t length = run_length(l, hashes + i, end - i, &first), number = first.span;
            if (!number) {
                number = begin_span(l, hashes + i, length, STORED, weight, l->known.now);
                link_stored(l, number);
            }
            l->spans[number].offered = 1;
            double own = l->known.as_lru ? INFINITY : l->admission_worth[l->spans[number].floor];
            if (l->spans[number].closed)
                own = DECLINED;
            worth = own < worth ? own : worth;
            if (made && offers[made - 1].worth == worth)
                offers[made - 1].keys += length;
            else
                offers[made++] = (struct offer){ worth, length };
            i += length;
        }
    }
    return made;
}

/* Keys that were offered were declined: so are the others of their requests from there on. */
void kvoffd_learned_declined(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        for (uint32_t number = first.span; number && !l->spans[number].closed; number = l->spans[number].child)
            l->spans[number].closed = 1;
        i += length;
    }
}
