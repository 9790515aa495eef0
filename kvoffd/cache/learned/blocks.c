/* Blocks of known keys, by handle, and the order in which they go. */
#include "learned.h"

#include <stdlib.h>
#include <string.h>

/* Spans that are gone through in one call, for a request's last one or for what would go before a block. */
enum { MOST_STEPS = 1024 };
static const double AGES[BINS] = { 0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 };

/* For a pool that holds `lifetime` bytes. `seed`: so that nobody can choose keys that fall together. */
struct learned *kvoffd_learned_new(uint64_t lifetime, const uint64_t seed[2])
{
    struct learned *l = calloc(1, sizeof *l);

    if (!l)
        return NULL;
    l->known.lifetime = lifetime;
    l->seed[0] = seed[0];
    l->seed[1] = seed[1];
    l->learn_at = lifetime / 4;
    l->stays = FEWEST_STAYS;
    for (int bin = 0; bin < BINS; bin++)
        l->edges[bin] = AGES[bin] * lifetime;
    make_places(l);
    make_spans(l);
    work_out(l);
    order_cells(l);
    forget_oldest(l, 0);
    return l;
}

void kvoffd_learned_free(struct learned *l)
{
    free_spans(l);
    free_places(l);
    free(l->scratch);
    free(l);
}

/* Keys got blocks, which are known by `handles`, not 0. Returns 0, or 1 where one has a block: then some are entered. */
uint64_t kvoffd_learned_insert(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint64_t weight, const uint32_t *handles)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first), number = first.span;
        if (!number) {
            number = begin_span(l, hashes + i, length, ADOPTED, weight, l->known.now);
            link_young(l, number);
            first.place = 0;
        }
        struct span *s = &l->spans[number];
        s->offered = 1;
        if (!s->held)
            hold_blocks(l, number);
        uint32_t *blocks = handle_at(l, s, first.place);
        for (uint32_t at = 0; at < length; at++) {
            if (blocks[at])
                return 1;
            blocks[at] = handles[i + at];
        }
        if (first.place + length > s->top)
            s->top = first.place + length;
        s->held += length;
        if (s->held == length) {
            s->age_bin = age_bin(l, s->since);
            fill_cell(l, number, 0);
        }
        add_blocks(l, s, length);
        i += length;
    }
    l->known.blocks += count;
    return 0;
}

/* Keys lost their blocks. Writes their handles; returns 0, or 1 where one had none: then some are removed. */
uint64_t kvoffd_learned_remove(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                               uint32_t *handles)
{
    uint64_t *hashes = scratch(l, count * sizeof *hashes);

    hash_keys(l, name, keys, count, key_bytes, hashes);
    for (uint64_t i = 0; i < count;) {
        struct place first;
        uint32_t length = run_length(l, hashes + i, count - i, &first);
        if (!first.span)
            return 1;
        struct span *s = &l->spans[first.span];
        uint32_t *blocks = handle_at(l, s, first.place);
        for (uint32_t at = 0; at < length; at++) {
            if (!blocks[at])
                return 1;
            handles[i + at] = blocks[at];
            blocks[at] = 0;
        }
        s->held -= length;
        add_blocks(l, s, -(int64_t)length);
        if (!s->held)
            hold_none(l, first.span);
        settle_span(l, first.span);
        i += length;
    }
    l->known.blocks -= count;
    forget_some(l, count);
    return 0;
}

/* The last span of a request whose blocks this walk has not come by, from one on; of a request that somebody made of very
 * many spans one of the next ones. */
static uint32_t deepest(const struct learned *l, uint32_t number)
{
    uint32_t child, steps = 0;

    while ((child = l->spans[number].child) && l->spans[child].seen != l->walks && steps++ < MOST_STEPS)
        number = child;
    return number;
}

/* Writes the handles of the blocks of spans, from the first one on in some order, of each that of the deepest span first
 * of those that are behind it in the same request, so that chains have no holes. Returns how many are written then. */
static uint64_t walk(struct learned *l, uint32_t first, int order, uint32_t *handles, uint64_t found, uint64_t most)
{
    for (uint32_t oldest = first; oldest; oldest = holder_of(l, oldest)->next[order]) {
        if (l->spans[oldest].seen == l->walks)
            continue;
        for (uint32_t number = deepest(l, oldest);; number = l->spans[number].before) {
            struct span *s = &l->spans[number];
            s->seen = l->walks;
            for (uint32_t at = s->top; s->held && at-- > s->low;) {
                uint32_t handle = *handle_at(l, s, at);
                if (handle)
                    handles[found++] = handle;
                if (found == most)
                    return found;
            }
            if (number == oldest)
                break;
        }
    }
    return found;
}

/* Writes the handles of blocks that are worth less, the next to go first, at most `most`; returns how many. */
uint64_t kvoffd_learned_candidates(struct learned *l, double worth, uint32_t *handles, uint64_t most)
{
    uint64_t found = 0;

    if (!++l->walks)
        l->walks = 1;
    if (l->known.as_lru)
        return walk(l, l->pool.first, BY_AGE, handles, 0, most);
    for (uint32_t word = 0; word < sizeof l->filled / sizeof *l->filled; word++)
        for (uint64_t bits = l->filled[word]; bits; bits &= bits - 1) {
            uint32_t cell = l->by_rank[word * 64 + __builtin_ctzll(bits)];
            if (l->worth[cell / BINS][cell % BINS] >= worth)
                return found;
            found = walk(l, l->cells[cell].first, BY_WORTH, handles, found, most);
            if (found == most)
                return found;
        }
    return found;
}

/* What was learned of a class. */
struct class_facts {
    double accessed, return_chance, return_age, worth; /* bytes, -, pool lifetimes, hits in a pool lifetime */
    uint64_t kept_bytes;
};

void kvoffd_learned_classes(const struct learned *l, struct class_facts facts[CLASSES])
{
    for (int kind = 0; kind < CLASSES; kind++) {
        double left = 1, seen = 1, lifetime = l->known.lifetime;
        struct class_facts *f = &facts[kind];
        *f = (struct class_facts){ .accessed = l->accessed[kind] };
        for (int bin = 0; bin < BINS - 1; bin++)
            left *= 1 - l->hazard[kind][bin];
        f->return_chance = 1 - left;
        for (int bin = 0; bin < BINS - 1 && 1 - seen < f->return_chance / 2; bin++) {
            seen *= 1 - l->hazard[kind][bin];
            f->return_age = l->edges[bin + 1] / lifetime;
        }
        for (int bin = 0; bin < BINS; bin++) {
            f->worth = l->worth[kind][bin] * lifetime > f->worth ? l->worth[kind][bin] * lifetime : f->worth;
            f->kept_bytes += l->cell_bytes[kind * BINS + bin];
        }
    }
}

/* What is known of a key. */
struct key_facts {
    double age, worth; /* in pool lifetimes, hits in a pool lifetime */
    uint64_t kind, sightings, turn, bytes_before;
};

/* Bytes of the blocks in a row before a span: of the first spans exactly, and of so many of the others as are older if
 * there are as many of each age. `nbytes`: of all blocks of the row. */
static uint64_t bytes_before(const struct learned *l, const struct row *row, int order, uint64_t nbytes, uint32_t until)
{
    uint32_t number = row->first;
    uint64_t before = 0;

    for (int steps = 0; number && number != until; number = holder_of(l, number)->next[order]) {
        if (steps++ == MOST_STEPS) {
            double first = l->spans[number].since, last = l->spans[row->last].since, at = l->spans[until].since;
            double part = last > first ? (at - first) / (last - first) : 0;
            return before + (nbytes - before) * (part < 0 ? 0 : part > 1 ? 1 : part);
        }
        before += l->spans[number].held * weight_of(&l->spans[number]);
    }
    return before;
}

/* The span that has a key; 0 where the key is not known. */
static uint32_t span_of(struct learned *l, uint64_t name, const uint8_t *key, uint64_t key_bytes)
{
    uint64_t hash;

    hash_keys(l, name, key, 1, key_bytes, &hash);
    const struct place *there = find_place(l, hash);
    return there->hash ? there->span : 0;
}

/* Returns whether the key is known. */
uint64_t kvoffd_learned_key(struct learned *l, uint64_t name, const uint8_t *key, uint64_t key_bytes,
                            struct key_facts *facts)
{
    uint32_t number = span_of(l, name, key, key_bytes);

    if (!number)
        return 0;
    const struct span *s = &l->spans[number];
    int bin = age_bin(l, s->since);
    facts->age = (double)(l->known.now - s->since) / l->known.lifetime;
    facts->worth = l->worth[s->kind][bin] * l->known.lifetime;
    facts->kind = s->kind;
    facts->sightings = s->sightings;
    facts->turn = s->turn;
    uint32_t own = s->kind * BINS + s->age_bin;
    uint64_t worse = 0, all = 0;
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        worse += l->rank[cell] < l->rank[own] ? l->cell_bytes[cell] : 0;
        all += l->cell_bytes[cell];
    }
    facts->bytes_before = l->known.as_lru
                              ? bytes_before(l, &l->pool, BY_AGE, all, number)
                              : worse + bytes_before(l, &l->cells[own], BY_WORTH, l->cell_bytes[own], number);
    return 1;
}

/* The chance that a key comes back while `within` bytes more are accessed, 1 where nothing is learned of it. */
double kvoffd_learned_chance(struct learned *l, uint64_t name, const uint8_t *key, uint64_t key_bytes, uint64_t within)
{
    uint32_t number = span_of(l, name, key, key_bytes);
    double left = 1;

    if (!number || l->known.as_lru)
        return 1;
    const struct span *s = &l->spans[number];
    double until = (double)(l->known.now - s->since) + within;
    for (int bin = age_bin(l, s->since); bin < BINS && l->edges[bin] < until; bin++)
        left *= 1 - l->hazard[s->kind][bin];
    return 1 - left;
}
