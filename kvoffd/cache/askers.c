/* Whose prompts have asked for blocks and keys: each lookup records it. askers.py says what it means, and owns the
 * memory. */
#include "blocks.h"

enum { NOBODY = 0, SEVERAL = UINT32_MAX }; /* of askers.py */

/* Fields as in `_Askers` of askers.py. */
struct askers {
    uint32_t *of;               /* [slots] giver of a block's only prompts, or SEVERAL */
    uint32_t *recent, *before;  /* [entries] giver of the only prompts that asked for a key, by the key's hash */
    uint64_t bits, used, most;  /* 2^bits entries; of `recent` at most `used` are in use, which stays below `most` */
};

/* Two keys may share an entry. */
static uint64_t asked_entry(const struct askers *x, uint32_t group, const uint8_t *key, uint64_t key_bytes)
{
    uint64_t end;

    memcpy(&end, key + key_bytes - sizeof end, sizeof end);
    return (end ^ group * 0xC2B2AE3D27D4EB4FULL) * 0x9E3779B97F4A7C15ULL >> (64 - x->bits);
}

static uint32_t asker_at(const struct askers *x, uint64_t entry)
{
    uint32_t recent = x->recent[entry], before = x->before[entry];

    if (recent == before || before == NOBODY)
        return recent;
    return recent == NOBODY ? before : SEVERAL;
}

/* Records that a prompt of a giver, 0 if it is unknown, asked for keys of these states; `ready`: blocks of the READY ones. */
void kvoffd_askers_asked(struct askers *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                         const uint8_t *states, const uint32_t *ready, uint64_t ready_count, uint32_t giver)
{
    for (uint64_t i = 0; i < ready_count; i++)
        if (!giver || x->of[ready[i]] != giver)
            x->of[ready[i]] = SEVERAL;
    for (uint64_t i = 0; i < count; i++) {
        if (states[i] == READY)
            continue;
        uint64_t entry = asked_entry(x, group, keys + i * key_bytes, key_bytes);
        uint32_t asker = asker_at(x, entry);
        x->recent[entry] = giver && (asker == NOBODY || asker == giver) ? giver : SEVERAL;
        x->used++;
    }
    if (x->used >= x->most) {
        uint32_t *oldest = x->before;
        x->before = x->recent;
        x->recent = memset(oldest, 0, sizeof *oldest << x->bits);
        x->used = 0;
    }
}

/* Records that keys for which prompts may have asked got blocks. */
void kvoffd_askers_stored(struct askers *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                          const uint32_t *blocks)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t asker = asker_at(x, asked_entry(x, group, keys + i * key_bytes, key_bytes));
        x->of[blocks[i]] = asker == NOBODY ? SEVERAL : asker;
    }
}
