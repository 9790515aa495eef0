/* The least recently used order of blocks: a ring, linked by block number plus 1, from the oldest to the newest; 0 is the end
 * of both. policy.py owns the memory.
 */
#include "../system/key_hash.h"

static void link_newest(uint32_t *older, uint32_t *newer, uint32_t at)
{
    uint32_t newest = older[0];

    older[at] = newest;
    newer[at] = 0;
    newer[newest] = at;
    older[0] = at;
}

static void unlink_at(uint32_t *older, uint32_t *newer, uint32_t at)
{
    newer[older[at]] = newer[at];
    older[newer[at]] = older[at];
}

/* Adds blocks, each as the newest. */
void kvoffd_lru_insert(uint32_t *older, uint32_t *newer, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        link_newest(older, newer, blocks[i] + 1);
}

/* Makes blocks that are there the newest, from the last one to the first. */
void kvoffd_lru_use(uint32_t *older, uint32_t *newer, const uint32_t *blocks, uint64_t count)
{
    while (count--) {
        unlink_at(older, newer, blocks[count] + 1);
        link_newest(older, newer, blocks[count] + 1);
    }
}

void kvoffd_lru_remove(uint32_t *older, uint32_t *newer, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        unlink_at(older, newer, blocks[i] + 1);
}

/* Writes up to `count` blocks that are newer than one given by its link, from 0 the oldest ones; returns how many. */
uint64_t kvoffd_lru_next(const uint32_t *newer, uint32_t after, uint32_t *blocks, uint64_t count)
{
    uint64_t found = 0;

    for (uint32_t at = newer[after]; at && found < count; at = newer[at])
        blocks[found++] = at - 1;
    return found;
}

/* Writes a hash for each of the keys of a group, for a policy that remembers those of blocks that are gone. */
void kvoffd_key_hashes(const uint8_t *seed, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                       uint64_t *hashes)
{
    uint64_t words[2];

    memcpy(words, seed, sizeof words);
    for (uint64_t i = 0; i < count; i++)
        hashes[i] = key_hash(words[0] ^ ((uint64_t)group << 32), words[1], keys + i * key_bytes, key_bytes);
}
