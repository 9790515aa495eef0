/* Plans the copies of a group's blocks: see plan.py. */
#include <stdint.h>

/* A row of `layers` of GroupLayout. */
struct layer {
    uint64_t address, stride, page_bytes, slot_offset;
};

/* A plan: number of pieces, and arrays of their addresses in the engine and the pool and their sizes. */
struct planned {
    uint64_t pieces, *engine, *pool, *size;
};

/* Adds the pieces for engine blocks of a group: at most one for each block and layer. A key has `per_key` blocks less
 * `first_blocks[key]` at its start (NULL: 0); the last key may have fewer. A key without a slot is skipped. The order is
 * key, layer, block of the key; or layer, key, block. Pieces of two calls are not merged: they may be in two allocations. */
void kvoffd_plan_blocks(const struct layer *layers, uint64_t count, uint64_t by_layer, uint64_t per_key,
                        const int32_t *ids, uint64_t blocks, const uint64_t *slots, uint64_t keys,
                        const uint16_t *first_blocks, struct planned *planned)
{
    uint64_t *engine = planned->engine, *pool = planned->pool, *size = planned->size, pieces = planned->pieces;

    if (by_layer && count > 1) {
        for (uint64_t number = 0; number < count; number++)
            kvoffd_plan_blocks(layers + number, 1, 0, per_key, ids, blocks, slots, keys, first_blocks, planned);
        return;
    }
    for (uint64_t key = 0, at = 0; key < keys && at < blocks; key++) {
        uint64_t first = first_blocks ? first_blocks[key] : 0, stored = per_key - first;
        if (stored > blocks - at)
            stored = blocks - at;
        for (uint64_t number = 0; number < count && slots[key]; number++) {
            struct layer layer = layers[number];
            for (uint64_t i = 0; i < stored; i++) {
                uint64_t from = layer.address + (uint64_t)ids[at + i] * layer.stride;
                uint64_t to = slots[key] + layer.slot_offset + (first + i) * layer.page_bytes, last = pieces - 1;
                if (pieces > planned->pieces && engine[last] + size[last] == from && pool[last] + size[last] == to) {
                    size[last] += layer.page_bytes;
                    continue;
                }
                engine[pieces] = from;
                pool[pieces] = to;
                size[pieces++] = layer.page_bytes;
            }
        }
        at += stored;
    }
    planned->pieces = pieces;
}
