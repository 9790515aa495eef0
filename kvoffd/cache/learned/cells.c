/* The orders in which spans that have blocks go: by age, in all and in the cells, and cells by what they are worth. */
#include "learned.h"

#include <stdlib.h>
#include <string.h>

enum { NEAR = 64, MOVED_AT_ONCE = 512, AGINGS = 32, MOVED_CELLS = CLASSES * (BINS - 1) };
static const uint64_t LOWEST = 2047; /* CELLS and more */
_Static_assert(CELLS <= 2048, "the number of a cell has eleven bits");

static uint32_t cell_of(const struct span *s)
{
    return s->kind * BINS + s->age_bin;
}

static struct row *row_of(struct learned *l, const struct span *s, int order)
{
    return order == BY_AGE ? &l->pool : &l->cells[cell_of(s)];
}

/* Puts a span behind another one, or first where that is 0. */
static void link_in(struct learned *l, uint32_t number, uint32_t before, int order)
{
    struct holder *own = holder_of(l, number);
    struct row *row = row_of(l, &l->spans[number], order);

    own->previous[order] = before;
    own->next[order] = before ? holder_of(l, before)->next[order] : row->first;
    *(before ? &holder_of(l, before)->next[order] : &row->first) = number;
    *(own->next[order] ? &holder_of(l, own->next[order])->previous[order] : &row->last) = number;
}

static uint64_t between(uint64_t earlier, uint64_t later)
{
    return earlier < later ? later - earlier : 0;
}

/* Puts a span into an order, by age as far as that is near. `older`: before what is as old, from the end that is nearer. */
static void link_by_age(struct learned *l, uint32_t number, int order, int older)
{
    uint64_t since = l->spans[number].since;
    const struct row *row = row_of(l, &l->spans[number], order);
    uint32_t before = row->last, next = row->first;

    if (older && before && between(l->spans[next].since, since) <= between(since, l->spans[before].since)) {
        for (int steps = 0; next && l->spans[next].since < since && steps < NEAR; steps++)
            next = holder_of(l, next)->next[order];
        link_in(l, number, next ? holder_of(l, next)->previous[order] : before, order);
        return;
    }
    for (int steps = 0; before && l->spans[before].since > since && steps < NEAR; steps++)
        before = holder_of(l, before)->previous[order];
    link_in(l, number, before, order);
}

static void unlink_from(struct learned *l, uint32_t number, int order)
{
    struct holder *own = holder_of(l, number);
    struct row *row = row_of(l, &l->spans[number], order);

    *(own->previous[order] ? &holder_of(l, own->previous[order])->next[order] : &row->first) = own->next[order];
    *(own->next[order] ? &holder_of(l, own->next[order])->previous[order] : &row->last) = own->previous[order];
    own->previous[order] = own->next[order] = 0;
}

static void set_filled(struct learned *l, uint32_t cell)
{
    uint64_t bit = (uint64_t)1 << (l->rank[cell] & 63), *word = &l->filled[l->rank[cell] >> 6];

    *word = l->cells[cell].first ? *word | bit : *word & ~bit;
}

/* A span holds blocks; `older`: that became ready before all that others have. */
void fill_cell(struct learned *l, uint32_t number, int older)
{
    link_by_age(l, number, BY_WORTH, older);
    link_by_age(l, number, BY_AGE, older);
    set_filled(l, cell_of(&l->spans[number]));
}

/* A span is about to lose its blocks, or is lifted with them. */
void leave_cell(struct learned *l, uint32_t number)
{
    unlink_from(l, number, BY_WORTH);
    unlink_from(l, number, BY_AGE);
    set_filled(l, cell_of(&l->spans[number]));
}

/* A span that is in a cell has got so many blocks, or lost them where they are less than 0. */
void add_blocks(struct learned *l, const struct span *s, int64_t blocks)
{
    l->cell_bytes[cell_of(s)] += blocks * (int64_t)weight_of(s);
}

/* A span that has blocks was cut off from another one. */
void link_behind(struct learned *l, uint32_t number, uint32_t before)
{
    link_in(l, number, before, BY_WORTH);
    link_in(l, number, before, BY_AGE);
}

/* Spans whose age bin has ended move to the next one, some at a time. */
void move_cells(struct learned *l)
{
    if (l->aged == MOVED_CELLS && l->known.now >= l->age_at) {
        l->age_at = l->known.now + l->known.lifetime / AGINGS;
        l->aged = 0;
    }
    for (int moved = 0; l->aged < MOVED_CELLS; l->aged++) {
        uint32_t kind = l->aged / (BINS - 1), bin = BINS - 2 - l->aged % (BINS - 1), number;
        double limit = (double)l->known.now - l->edges[bin + 1];
        while ((number = l->cells[kind * BINS + bin].first) && l->spans[number].since <= limit) {
            if (moved++ == MOVED_AT_ONCE)
                return;
            unlink_from(l, number, BY_WORTH);
            set_filled(l, kind * BINS + bin);
            add_blocks(l, &l->spans[number], -(int64_t)l->spans[number].held);
            l->spans[number].age_bin++;
            add_blocks(l, &l->spans[number], l->spans[number].held);
            link_by_age(l, number, BY_WORTH, 0);
            set_filled(l, kind * BINS + bin + 1);
        }
    }
}

/* Sorts by the bytes from the last one on: every fortieth request waits for it, and calls of a comparison take four times
 * as long. */
static void sort(uint64_t keys[CELLS])
{
    uint64_t sorted[CELLS], *from = keys, *to = sorted;

    for (int shift = 0; shift < 64; shift += 8) {
        uint32_t begin[256] = { 0 }, next = 0;
        for (int i = 0; i < CELLS; i++)
            begin[from[i] >> shift & 255]++;
        for (int byte = 0; byte < 256; byte++) {
            uint32_t count = begin[byte];
            begin[byte] = next;
            next += count;
        }
        for (int i = 0; i < CELLS; i++)
            to[begin[from[i] >> shift & 255]++] = from[i];
        uint64_t *swapped = from;
        from = to;
        to = swapped;
    }
}

/* The worth of cells has changed. */
void order_cells(struct learned *l)
{
    uint64_t keys[CELLS];

    /* The bits of a worth, which is not below 0, but the lowest, which tell no difference that means anything; in these
     * the oldest are first. */
    for (int cell = 0; cell < CELLS; cell++) {
        memcpy(&keys[cell], &l->worth[cell / BINS][cell % BINS], sizeof *keys);
        keys[cell] = (keys[cell] & ~LOWEST) + (BINS - 1 - cell % BINS) * CLASSES + cell / BINS;
    }
    sort(keys);
    memset(l->filled, 0, sizeof l->filled);
    for (int rank = 0; rank < CELLS; rank++) {
        uint64_t place = keys[rank] & LOWEST;
        uint16_t cell = place % CLASSES * BINS + BINS - 1 - place / CLASSES;
        l->by_rank[rank] = cell;
        l->rank[cell] = rank;
        set_filled(l, cell);
    }
}
