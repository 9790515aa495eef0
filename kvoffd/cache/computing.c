/* Keys that prompts lack, and whose prompts came first: computing.py says what it means, and owns the memory. */
#include "../system/key_hash.h"

#include <stdint.h>

enum { NEAR = 8 }; /* places in which a key may be; computing.py has the same */

struct lacked {
    uint64_t hash; /* 0 if the place is free */
    uint32_t prompt_hash;
    uint32_t at_s;
};

/* Fields as in `_Fields` of computing.py. */
struct computing {
    struct lacked *lacked; /* [2^bits + NEAR - 1] by the hash's high bits; a key replaces the oldest one near */
    uint64_t bits, seed[2];
};

/* Returns the place of a key, or the free or oldest one that it would get. */
static struct lacked *place_of(const struct computing *x, uint64_t group, const uint8_t *key, uint64_t key_bytes,
                               uint64_t *hash)
{
    struct lacked *first, *oldest;

    *hash = key_hash(x->seed[0] ^ group, x->seed[1], key, key_bytes) | 1;
    first = oldest = &x->lacked[*hash >> (64 - x->bits)];
    for (struct lacked *one = first; one < first + NEAR; one++) {
        if (one->hash == *hash)
            return one;
        if (oldest->hash && (!one->hash || one->at_s < oldest->at_s))
            oldest = one;
    }
    return oldest;
}

/* Records keys that a prompt asks for at `now_s` and, by their `reasons`, lacks. Those that another prompt has lacked for
 * less than `most_s` get the reason `computing` if their own is in the set `replaced`, a bit for each. */
void kvoffd_computing_asked(struct computing *x, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                            uint8_t *reasons, uint32_t prompt_hash, uint32_t now_s, uint32_t most_s,
                            uint64_t replaced, uint64_t computing)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash;
        struct lacked *one;

        if (reasons[i] > 63 || !(replaced >> reasons[i] & 1)) /* over 63: FOUND and others of block_table.py */
            continue;
        one = place_of(x, group, keys + i * key_bytes, key_bytes, &hash);
        if (one->hash != hash || now_s - one->at_s >= most_s)
            *one = (struct lacked){.hash = hash, .prompt_hash = prompt_hash, .at_s = now_s};
        else if (one->prompt_hash != prompt_hash)
            reasons[i] = computing;
    }
}

/* Forgets keys that are being stored. */
void kvoffd_computing_offered(struct computing *x, uint64_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash;
        struct lacked *one = place_of(x, group, keys + i * key_bytes, key_bytes, &hash);

        if (one->hash == hash)
            one->hash = 0;
    }
}
