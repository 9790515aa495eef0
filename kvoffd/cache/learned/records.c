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
    uint32_t child; /* the next span of the same request: its number in the record, from 1 and below this one's; or 0 */
    uint8_t kind, floor, unused[2];
};

uint64_t kvoffd_learned_record_bytes(const struct learned *l)
{
    return sizeof(struct counts) + l->known.spans * sizeof(struct kept_span) + l->known.known_keys * sizeof(uint64_t);
}

static uint8_t *write_span(const struct span *s, uint32_t child, uint8_t *to)
{
    struct kept_span kept = { .since = s->since, .weight = s->weight, .keys = s->high - s->low, .turn = s->turn };

    kept.sightings = s->sightings;
    kept.behind = s->behind;
    kept.child = child;
    kept.kind = s->kind;
    kept.floor = s->floor;
    memcpy(to, &kept, sizeof kept);
    memcpy(to + sizeof kept, hashes_of(s) + (s->low - s->base), kept.keys * sizeof(uint64_t));
    return to + sizeof kept + kept.keys * sizeof(uint64_t);
}

/* Writes the record, the spans in the order in which they are forgotten. */
void kvoffd_learned_record(struct learned *l, uint8_t *to)
{
    struct counts *counts = (struct counts *)to;
    uint32_t *written = scratch(l, l->span_top * sizeof *written), made = 0;

    counts->classes = CLASSES;
    counts->bins = BINS;
    counts->epochs = EPOCHS_KEPT;
    counts->span_bytes = sizeof(struct kept_span);
    counts->lifetime = l->known.lifetime;
    counts->now = l->known.now;
    counts->keys = l->known.keys;
    counts->requests = l->known.requests;
    counts->spans = l->known.spans;
    counts->past = l->past;
    memcpy(counts->seed, l->seed, sizeof l->seed);
    memcpy(counts->returned, l->returned, sizeof l->returned);
    memcpy(counts->forgotten, l->forgotten, sizeof l->forgotten);
    memcpy(counts->open, l->open, sizeof l->open);
    memcpy(counts->accessed, l->accessed, sizeof l->accessed);
    to += sizeof *counts;
    memset(written, 0, l->span_top * sizeof *written);
    for (uint32_t number = 1; number < l->span_top; number++)
        if (l->spans[number].old) {
            to = write_span(&l->spans[number], written[l->spans[number].child], to);
            written[number] = ++made;
        }
    for (uint32_t number = l->oldest.first; number; number = l->spans[number].younger) {
        to = write_span(&l->spans[number], written[l->spans[number].child], to);
        written[number] = ++made;
    }
}

static int all_counts(const double *values, uint64_t count, double least)
{
    for (uint64_t i = 0; i < count; i++)
        if (!(values[i] >= least && values[i] <= MOST_SUM))
            return 0;
    return 1;
}

enum refusal { GOOD, CUT_OFF, OTHER_LAYOUT, OTHER_POOL, BAD_COUNTS, BAD_SPAN, BAD_KEYS };

/* `number`: from 1, in the record and here. */
static enum refusal read_span(struct learned *l, uint32_t number, const uint8_t **from, const uint8_t *end)
{
    struct kept_span kept;

    if ((uint64_t)(end - *from) < sizeof kept)
        return CUT_OFF;
    memcpy(&kept, *from, sizeof kept);
    *from += sizeof kept;
    if (kept.keys > (end - *from) / sizeof(uint64_t))
        return CUT_OFF;
    if (!kept.keys || kept.keys > MOST_COUNTED || kept.sightings > MOST_COUNTED || kept.turn > MOST_COUNTED ||
        kept.behind > MOST_COUNTED || kept.kind >= CLASSES || kept.floor >= CLASSES || kept.child >= number ||
        !kept.weight || kept.weight > l->known.lifetime || kept.since > l->known.now)
        return BAD_SPAN;
    if (kept.child && l->spans[kept.child].before)
        return BAD_SPAN;
    const uint64_t *hashes = (const uint64_t *)*from; /* everything before it takes multiples of 8 */
    for (uint32_t i = 0; i < kept.keys; i++)
        if (!hashes[i] || find_place(l, hashes[i])->hash)
            return BAD_KEYS;
    uint64_t known = l->known.known_keys;
    new_span(l); /* its number is the next one */
    struct span *s = &l->spans[number];
    s->since = kept.since;
    s->weight = kept.weight;
    s->sightings = kept.sightings;
    s->turn = kept.turn;
    s->behind = kept.behind;
    s->kind = kept.kind;
    s->floor = kept.floor;
    s->child = kept.child;
    if (s->child)
        l->spans[s->child].before = number;
    set_keys(l, number, hashes, kept.keys);
    l->known.known_bytes += kept.keys * kept.weight;
    link_young(l, number);
    *from += kept.keys * sizeof(uint64_t);
    return l->known.known_keys == known + kept.keys ? GOOD : BAD_KEYS;
}

/* Goes on with a record, before anything else. Returns why not, or 0; what it was given is of no use any more if so. */
uint64_t kvoffd_learned_go_on(struct learned *l, const uint8_t *record, uint64_t nbytes)
{
    const struct counts *counts = (const struct counts *)record;
    const uint8_t *from = record + sizeof *counts, *end = record + nbytes;

    if (nbytes < sizeof *counts)
        return CUT_OFF;
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
    for (uint32_t number = 1; number <= counts->spans; number++) {
        enum refusal refused = read_span(l, number, &from, end);
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
