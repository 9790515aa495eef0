/* What one daemon leaves to the next: counts, and spans without their blocks. These the next one finds by their keys. */
#include "learned.h"

#include <string.h>

static const uint64_t MOST = (uint64_t)1 << 62; /* bytes, keys and requests that may have been counted */
static const double MOST_SUM = 1e30;

struct counts {
    uint32_t classes, bins, epochs, span_bytes;
    uint64_t lifetime, now, keys, requests, spans, seed[2];
    double past, returned[CLASSES][BINS], forgotten[CLASSES][BINS], open[CLASSES][EPOCHS_KEPT], accessed[CLASSES];
};

/* Behind it are the hashes of its keys. */
struct kept_span {
    uint64_t since, weight;
    uint32_t keys, sightings, turn, behind;
    uint8_t kind, floor, flags, unused[5];
};

enum { HAS_CHILD = 1 }; /* the span before it in the record is the next one of the same request */

/* Begins a record anew, in the order in which spans are forgotten. What is old would be forgotten by whoever reads it. */
void kvoffd_learned_begin_record(struct learned *l)
{
    l->to_record = l->oldest.first;
    l->recorded = 0;
    l->records = 0;
}

static uint64_t write_span(const struct learned *l, struct span *s, uint8_t *to)
{
    struct kept_span kept = { .since = s->since, .weight = weight_of(s), .keys = s->high - s->low, .turn = s->turn };

    kept.sightings = s->sightings;
    kept.behind = s->behind;
    kept.kind = s->kind;
    kept.floor = s->floor;
    kept.flags = s->child && s->child == l->recorded ? HAS_CHILD : 0;
    memcpy(to, &kept, sizeof kept);
    memcpy(to + sizeof kept, hash_at(s, s->low), kept.keys * sizeof(uint64_t));
    return sizeof kept + kept.keys * sizeof(uint64_t);
}

/* Writes some more spans, as many as have room; returns how many bytes they take, 0 when all are written. Where a span
 * needs more room it is not written, and what it needs is returned. Meanwhile what is known may change: a span that
 * got its keys from one that was written before is written too, and the one that comes later counts. */
uint64_t kvoffd_learned_record(struct learned *l, uint8_t *to, uint64_t room)
{
    uint64_t made = 0;

    while (l->to_record) {
        struct span *s = &l->spans[l->to_record];
        uint64_t nbytes = sizeof(struct kept_span) + (s->high - s->low) * sizeof(uint64_t);
        if (nbytes > room - made)
            return made ? made : nbytes;
        made += write_span(l, s, to + made);
        l->records++;
        l->recorded = l->to_record;
        l->to_record = s->younger;
    }
    return made;
}

uint64_t kvoffd_learned_counts_bytes(void)
{
    return sizeof(struct counts);
}

/* Writes the end of a record. */
void kvoffd_learned_counts(const struct learned *l, struct counts *counts)
{
    counts->classes = CLASSES;
    counts->bins = BINS;
    counts->epochs = EPOCHS_KEPT;
    counts->span_bytes = sizeof(struct kept_span);
    counts->lifetime = l->known.lifetime;
    counts->now = l->known.now;
    counts->keys = l->known.keys;
    counts->requests = l->known.requests;
    counts->spans = l->records;
    counts->past = l->past;
    memcpy(counts->seed, l->seed, sizeof l->seed);
    memcpy(counts->returned, l->returned, sizeof l->returned);
    memcpy(counts->forgotten, l->forgotten, sizeof l->forgotten);
    memcpy(counts->open, l->open, sizeof l->open);
    memcpy(counts->accessed, l->accessed, sizeof l->accessed);
}

static int all_counts(const double *values, uint64_t count, double least)
{
    for (uint64_t i = 0; i < count; i++)
        if (!(values[i] >= least && values[i] <= MOST_SUM))
            return 0;
    return 1;
}

enum refusal { GOOD, CUT_OFF, OTHER_LAYOUT, OTHER_POOL, BAD_COUNTS, BAD_SPAN, BAD_KEYS };

/* Takes keys out of the spans that have them so far. */
static void take_again(struct learned *l, const uint64_t *hashes, uint32_t count)
{
    uint32_t *handles = scratch(l, count * sizeof *handles);

    for (uint32_t i = 0; i < count;) {
        struct place first;
        uint32_t keys = run_length(l, hashes + i, count - i, &first), number = first.span;
        if (number) {
            if (first.place > l->spans[number].low)
                number = split_span(l, number, first.place);
            for (uint32_t at = 0; at < keys; at++)
                remove_place(l, hashes[i + at], number);
            take_keys(l, number, keys, handles);
        }
        i += keys;
    }
}

/* `last`: the span that was read before, 0 for none; this one from now on. */
static enum refusal read_span(struct learned *l, uint32_t *last, const uint8_t **from, const uint8_t *end)
{
    struct kept_span kept;

    if ((uint64_t)(end - *from) < sizeof kept)
        return CUT_OFF;
    memcpy(&kept, *from, sizeof kept);
    *from += sizeof kept;
    if (kept.keys > (end - *from) / sizeof(uint64_t))
        return CUT_OFF;
    if (!kept.keys || (uint64_t)kept.keys + kept.behind > MOST_COUNTED || kept.kind >= CLASSES ||
        kept.floor >= CLASSES || !kept.weight || kept.weight > l->known.lifetime || kept.since > l->known.now)
        return BAD_SPAN;
    if (kept.flags & HAS_CHILD && !*last)
        return BAD_SPAN;
    const uint64_t *hashes = (const uint64_t *)*from; /* everything before it takes multiples of 8 */
    for (uint32_t i = 0; i < kept.keys; i++)
        if (!hashes[i])
            return BAD_KEYS;
    take_again(l, hashes, kept.keys);
    /* The last span's keys may have been taken, and its number given to a part of one that has its own neighbours. */
    int has_child = kept.flags & HAS_CHILD && l->spans[*last].high && !l->spans[*last].before;
    uint32_t child = has_child ? *last : 0, number = new_span(l, kept.weight);
    uint64_t known = l->known.known_keys;
    struct span *s = &l->spans[number];
    s->since = kept.since;
    s->sightings = kept.sightings < MOST_SEEN ? kept.sightings : MOST_SEEN;
    s->turn = kept.turn < MOST_SEEN ? kept.turn : MOST_SEEN;
    s->behind = kept.behind;
    s->kind = kept.kind;
    s->floor = kept.floor;
    s->offered = 1;
    s->child = child;
    if (child)
        l->spans[child].before = number;
    set_keys(l, number, hashes, kept.keys);
    l->known.known_bytes += kept.keys * weight_of(s);
    link_young(l, number);
    *last = number;
    *from += kept.keys * sizeof(uint64_t);
    return l->known.known_keys == known + kept.keys ? GOOD : BAD_KEYS;
}

/* A span will be read soon. Returns what is behind it, or NULL where it ends too early. */
static const uint8_t *fetch_span(const struct learned *l, const uint8_t *from, const uint8_t *end)
{
    struct kept_span kept;
    uint64_t hash, left = end - from;

    if (left < sizeof kept + sizeof hash)
        return NULL;
    memcpy(&kept, from, sizeof kept);
    memcpy(&hash, from + sizeof kept, sizeof hash);
    fetch_place(l, hash);
    left -= sizeof kept;
    return kept.keys <= left / sizeof hash ? from + sizeof kept + kept.keys * sizeof hash : NULL;
}

/* Goes on with a record, before anything else. Returns why not, or 0; what it was given is of no use any more if so. */
uint64_t kvoffd_learned_go_on(struct learned *l, const uint8_t *record, uint64_t nbytes)
{
    if (nbytes < sizeof(struct counts) || nbytes % sizeof(uint64_t))
        return CUT_OFF;
    const uint8_t *from = record, *end = record + nbytes - sizeof(struct counts);
    const struct counts *counts = (const struct counts *)end;
    uint32_t last = 0;
    if (counts->classes != CLASSES || counts->bins != BINS || counts->epochs != EPOCHS_KEPT ||
        counts->span_bytes != sizeof(struct kept_span))
        return OTHER_LAYOUT;
    if (counts->lifetime != l->known.lifetime)
        return OTHER_POOL;
    if (!all_counts(counts->returned[0], CLASSES * BINS, 0) || !all_counts(counts->forgotten[0], CLASSES * BINS, 0) ||
        !all_counts(counts->open[0], CLASSES * EPOCHS_KEPT, -MOST_SUM) || !all_counts(counts->accessed, CLASSES, 0) ||
        !all_counts(&counts->past, 1, 0) || counts->now > MOST || counts->keys > MOST || counts->requests > MOST || counts->spans > MOST_COUNTED)
        return BAD_COUNTS;
    l->known.now = counts->now;
    l->known.keys = counts->keys;
    l->known.requests = counts->requests;
    l->past = counts->past;
    memcpy(l->seed, counts->seed, sizeof l->seed);
    enter_epoch(l);
    memcpy(l->returned, counts->returned, sizeof l->returned);
    memcpy(l->forgotten, counts->forgotten, sizeof l->forgotten);
    memcpy(l->open, counts->open, sizeof l->open);
    memcpy(l->accessed, counts->accessed, sizeof l->accessed);
    uint64_t heads = counts->spans * sizeof(struct kept_span);
    if (heads > (uint64_t)(end - from))
        return CUT_OFF;
    expect_places(l, (end - from - heads) / sizeof(uint64_t));
    const uint8_t *ahead = from;
    for (uint64_t read = 0; read < counts->spans; read++) {
        while (ahead && ahead <= from + AHEAD * sizeof(struct kept_span))
            ahead = fetch_span(l, ahead, end);
        enum refusal refused = read_span(l, &last, &from, end);
        if (refused)
            return refused;
    }
    if (from != end)
        return CUT_OFF;
    work_out(l);
    order_cells(l);
    plan_learning(l);
    forget_oldest(l, UINT64_MAX);
    return GOOD;
}
