/* Holds what the policy `learned` knows against itself. Returns the line of the first contradiction, or 0. */
#include "learned.c"

#define HOLDS(condition)     \
    do {                     \
        if (!(condition))    \
            return __LINE__; \
    } while (0)

static int check_span(const struct learned *l, uint32_t number)
{
    const struct span *s = &l->spans[number];
    const uint64_t *hashes = s->keys->hashes;
    const uint32_t *handles = (const uint32_t *)(hashes + s->keys->capacity);
    uint32_t held = 0, base = s->keys->base, room = s->keys->capacity;

    HOLDS(base <= s->low && s->low < s->high && s->high - base <= room);
    HOLDS(bytes_of(s) <= l->known.lifetime);
    HOLDS(s->low <= s->top && s->top <= s->high && !s->matched && s->class < CLASSES && s->age_bin < BINS);
    HOLDS(!s->expired || s->top == s->high); /* a forgotten key is not remembered */
    HOLDS(s->top == s->low || handles[s->top - 1 - base]);
    for (uint32_t at = s->low; at < s->high; at++) {
        const struct place *there = find_place(l, hashes[at - base]);
        HOLDS(there->hash && there->span == number && there->place == at);
        HOLDS(at < s->top || !handles[at - base]);
        held += handles[at - base] != 0;
    }
    HOLDS(held == s->blocks);
    HOLDS(!s->child || (l->spans[s->child].parent == number && l->spans[s->child].high));
    HOLDS(!s->parent || (l->spans[s->parent].child == number && l->spans[s->parent].high));
    return 0;
}

static int check_cells(const struct learned *l, uint64_t held)
{
    uint64_t found = 0;

    for (uint32_t cell = 0; cell < CELLS; cell++) {
        uint32_t before = 0;
        uint64_t nbytes = 0;
        for (uint32_t number = l->cells[cell].first; number; before = number, number = l->spans[number].next) {
            const struct span *s = &l->spans[number];
            HOLDS(s->blocks && s->previous == before && s->class * BINS + s->age_bin == (int)cell);
            HOLDS(++found <= held);
            nbytes += s->blocks * bytes_of(s);
        }
        HOLDS(l->counts.cell_bytes[cell] == nbytes);
        HOLDS(l->cells[cell].last == before);
        HOLDS((l->filled[l->rank[cell] >> 6] >> (l->rank[cell] & 63) & 1) == (before != 0));
        HOLDS(l->by_rank[l->rank[cell]] == cell);
    }
    HOLDS(found == held);
    return 0;
}

static int check_order(const struct learned *l, uint64_t young)
{
    uint32_t before = 0;

    for (uint32_t number = l->oldest.first; number; before = number, number = l->spans[number].younger) {
        HOLDS(l->spans[number].high && !l->spans[number].expired && l->spans[number].older == before);
        HOLDS(young--);
    }
    HOLDS(!young && l->oldest.last == before);
    return 0;
}

int check_learned(const struct learned *l)
{
    uint64_t keys = 0, blocks = 0, nbytes = 0, spans = 0, held = 0, young = 0, places = 0, arrays = 0;
    int wrong;

    for (uint32_t number = 1; number < l->span_top; number++) {
        const struct span *s = &l->spans[number];
        if (!s->high)
            continue;
        if ((wrong = check_span(l, number)))
            return wrong;
        keys += s->high - s->low;
        blocks += s->blocks;
        nbytes += (s->high - s->low) * bytes_of(s);
        arrays += (s->keys->capacity * 12 + 16 + 15) / 16 * 16;
        spans++;
        held += s->blocks != 0;
        young += !s->expired;
    }
    for (uint64_t at = 0; at < 1ULL << l->places.bits; at++)
        for (uint64_t place = 0; place < PLACES + FARTHEST && (!at || l->places.segments[at] != l->places.segments[at - 1]); place++)
            places += l->places.segments[at][place * WORDS] != 0;
    HOLDS(keys == l->known.known_keys && keys == places && keys == l->places.used && blocks == l->known.blocks && spans == l->known.spans);
    HOLDS(nbytes == l->known.known_bytes && arrays == l->keys_bytes);
    if ((wrong = check_cells(l, held)))
        return wrong;
    return check_order(l, young);
}
