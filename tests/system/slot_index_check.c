/* Keys are entered and removed at random, and the table is compared with a list of them. Hashes that fall together have
 * segments split many times over. Compiled for entries of one word and of two. */
#include "slot_index.h"

#include <assert.h>

enum { KEYS = 60000, KINDS = 6 };

static uint64_t state = 88172645463325252, hashes[KEYS];
static uint32_t present[KEYS], place_in_list[KEYS], count;
static uint8_t is_in[KEYS];

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static uint64_t hash_of_kind(int kind)
{
    uint64_t hash = draw();

    if (kind == 1)
        hash &= ~(0xFFULL << 56); /* in one part of 256 */
    else if (kind == 2)
        hash |= 0x3FFULL << 54;
    else if (kind == 3)
        hash = (hash & ~(2047ULL << 32)) | (2040 + draw() % 8) << 32; /* the last places of all segments */
    else if (kind == 4 && hash & 1)
        hash = 0x123ULL << 52 | hash >> 12; /* half of them together */
    else if (kind == 5)
        hash = (hash & 0xFFFFF80000000000) | (draw() % 16) << 32; /* few places */
    return hash ? hash : 1;
}

static uint64_t *find_entry(const struct slot_index *x, uint32_t key)
{
    uint64_t *entry = home(x, hashes[key]);

    while (*entry && (WORDS == 1 ? *entry != entry_of(hashes[key], key) : entry[0] != hashes[key] || entry[WORDS - 1] != key))
        entry += WORDS;
    return entry;
}

static void add(struct slot_index *x, uint32_t key, uint64_t hash)
{
    uint64_t *entry = new_place(x, hashes[key] = hash);

    assert(!*entry);
    entry[0] = WORDS == 1 ? entry_of(hash, key) : hash;
    if (WORDS == 2)
        entry[WORDS - 1] = key;
    is_in[key] = 1;
    present[place_in_list[key] = count++] = key;
}

static void take_out(struct slot_index *x, uint32_t key)
{
    uint64_t *entry = find_entry(x, key);
    uint32_t last = present[--count];

    assert(*entry);
    remove_at(x, entry);
    is_in[key] = 0;
    present[place_in_list[last] = place_in_list[key]] = last;
}

static void check(const struct slot_index *x)
{
    uint64_t entries = 0, segments = 0;

    for (uint32_t i = 0; i < count; i++)
        assert(*find_entry(x, present[i]));
    for (uint64_t at = 0, span; at < 1ULL << x->bits; at += span, segments++) {
        uint64_t *segment = x->segments[at];
        for (span = 1; at + span < 1ULL << x->bits && x->segments[at + span] == segment;)
            span++;
        assert(!(span & (span - 1)) && at % span == 0);
        assert(!segment[(PLACES + FARTHEST - 1) * WORDS]);
        for (uint64_t *entry = segment; entry < segment + SEGMENT_WORDS; entry += WORDS)
            if (*entry) {
                uint64_t *first = home(x, *entry);
                assert(first >= segment && first <= entry && entry - first < FARTHEST * WORDS);
                for (; first < entry; first += WORDS)
                    assert(*first);
                entries++;
            }
    }
    assert(entries == count && x->used == count && x->nbytes == segments * SEGMENT_BYTES && x->shift == 64 - x->bits);
}

int main(void)
{
    for (int kind = 0; kind < KINDS; kind++) {
        struct slot_index x;
        uint64_t seed[2] = {draw(), draw()};

        assert(open_index(&x, seed));
        for (int phase = 0; phase < 4; phase++) { /* it grows and shrinks by turns */
            for (int step = 0; step < KEYS / 2; step++) {
                uint32_t key = draw() % KEYS;
                if (draw() % 100 < (phase % 2 ? 20 : 85)) {
                    if (!is_in[key])
                        add(&x, key, hash_of_kind(kind));
                } else if (count)
                    take_out(&x, present[draw() % count]);
                if (step % (KEYS / 8) == 0)
                    check(&x);
            }
            check(&x);
        }
        while (count)
            take_out(&x, present[draw() % count]);
        check(&x);
        close_index(&x);
    }
    return 0;
}
