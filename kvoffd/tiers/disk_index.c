/* Finds the blocks of a disk by the number of their group and their key: see disk_map.py, which owns the memory. */
#include "../system/slot_index.h"

enum { ROW = 64 }; /* bytes for a key: MAX_KEY_BYTES of pool/slot_table.py */

/* State of a region's slots, by their places in it. */
struct disk_region {
    const uint8_t *keys; /* [slots][ROW] */
    const uint8_t *key_bytes;
    const uint32_t *group; /* 0 if the slot has no block */
};

/* _Index of disk_map.py has the same fields. */
struct disk_index {
    struct slot_index index;
    const struct disk_region *regions;
    uint64_t slots_per_region;
};

static inline const struct disk_region *region_of(const struct disk_index *x, uint32_t slot)
{
    return &x->regions[slot / x->slots_per_region];
}

/* Returns the place of the key's entry, or an empty one. */
static uint64_t *find(const struct disk_index *x, uint64_t hashed, uint32_t group, const uint8_t *key, uint64_t key_bytes)
{
    uint64_t *place = home(&x->index, hashed);

    for (uint64_t entry; (entry = *place); place++) {
        if (entry >> 32 != hashed >> 32)
            continue;
        const struct disk_region *region = region_of(x, slot_of(entry));
        uint64_t at = slot_of(entry) % x->slots_per_region;
        if (region->group[at] == group && region->key_bytes[at] == key_bytes &&
            !memcmp(region->keys + at * ROW, key, key_bytes))
            break;
    }
    return place;
}

/* Returns the place of the entry of a slot's block, or an empty one, and writes its hash. */
static uint64_t *place_of(const struct disk_index *x, uint32_t slot, uint64_t *hashed)
{
    const struct disk_region *region = region_of(x, slot);
    uint64_t at = slot % x->slots_per_region;
    const uint8_t *key = region->keys + at * ROW;

    *hashed = hash_of(&x->index, region->group[at], key, region->key_bytes[at]);
    return find(x, *hashed, region->group[at], key, region->key_bytes[at]);
}

/* Completes an index whose last fields are set; returns whether there was enough memory. */
int kvoffd_disk_open(struct disk_index *x, const uint64_t seed[2])
{
    return open_index(&x->index, seed);
}

void kvoffd_disk_close(struct disk_index *x)
{
    close_index(&x->index);
}

/* Writes the slot of each of `count` concatenated keys; NONE if there is none. */
void kvoffd_disk_find(const struct disk_index *x, uint32_t group, const uint8_t *keys, uint64_t count,
                      uint64_t key_bytes, uint32_t *slots)
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (uint64_t i = 0; i < together; i++) {
            hashed[i] = hash_of(&x->index, group, keys + (begin + i) * key_bytes, key_bytes);
            __builtin_prefetch(home(&x->index, hashed[i]));
        }
        for (uint64_t i = 0; i < together; i++) {
            uint64_t entry = *find(x, hashed[i], group, keys + (begin + i) * key_bytes, key_bytes);
            slots[begin + i] = entry ? slot_of(entry) : NONE;
        }
    }
}

/* Adds the blocks of slots. A block replaces an earlier one of the same key, whose slot is written to `replaced`.
 * Returns how many were replaced. */
uint64_t kvoffd_disk_enter(struct disk_index *x, const uint32_t *slots, uint64_t count, uint32_t *replaced)
{
    uint64_t found = 0;

    for (uint64_t i = 0; i < count; i++) {
        uint64_t hashed, *entry = place_of(x, slots[i], &hashed);
        if (*entry)
            replaced[found++] = slot_of(*entry);
        else
            entry = new_place(&x->index, hashed);
        *entry = entry_of(hashed, slots[i]);
    }
    return found;
}

/* Removes the blocks of slots. */
void kvoffd_disk_remove(struct disk_index *x, const uint32_t *slots, uint64_t count)
{
    while (count--) {
        uint64_t hashed, *entry = place_of(x, slots[count], &hashed);
        if (*entry && slot_of(*entry) == slots[count])
            remove_at(&x->index, entry);
    }
}
