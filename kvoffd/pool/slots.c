/* Allocates slots of the pool by number: see allocator.py, which owns the memory.
 *
 * A region that has a slot size keeps its free slot numbers on a stack, which begins at the region's first slot.
 */
#include "slots.h"

#include <stdatomic.h>

enum { NOT_ALLOCATED = -1 }; /* result */
enum { FREE, ALLOCATED, RETURNED }; /* of `in_use`; RETURNED only within kvoffd_slots_free, to notice a slot that occurs twice */

uint64_t slots_in(const struct slots *x, uint64_t region, uint64_t slot_bytes)
{
    uint64_t begin = region * x->region_bytes, end = begin + x->region_bytes;

    return ((end < x->pool_bytes ? end : x->pool_bytes) - begin) / slot_bytes;
}

static int is_near(const struct slots *x, uint64_t region, int32_t node, int anywhere)
{
    return anywhere || x->node[region] == node;
}

/* Returns the number of free slots of the fullest region of a size that has any; 0 if there is none. */
static uint32_t fewest_free(const struct slots *x, int64_t slot_bytes, int32_t node, int anywhere)
{
    uint32_t fewest = 0;

    for (uint64_t region = 0; region < x->regions; region++)
        if (x->slot_bytes[region] == slot_bytes && x->free[region] && (!fewest || x->free[region] < fewest) &&
            is_near(x, region, node, anywhere))
            fewest = x->free[region];
    return fewest;
}

static int is_known(const struct slots *x, int32_t node)
{
    for (uint64_t region = 0; region < x->regions; region++)
        if (x->node[region] == node)
            return 1;
    return 0;
}

/* Gives a free region a slot size, which the next daemon must find before the region's first record is written. */
static void open_region(struct slots *x, uint64_t region, uint64_t slot_bytes)
{
    uint64_t slots = slots_in(x, region, slot_bytes), first = region * x->slots_per_region;

    x->slot_bytes[region] = slot_bytes;
    x->free[region] = slots;
    for (uint64_t i = 0; i < slots; i++)
        x->stack[first + i] = first + slots - 1 - i;
    if (x->saved && x->saved[region] != slot_bytes) /* an equal value need not bring its page into memory */
        __atomic_store_n(&x->saved[region], slot_bytes, __ATOMIC_RELEASE);
    atomic_signal_fence(memory_order_seq_cst);
}

/* Allocates slots of a region that has their size, until it has none or there are `count`; returns how many there are. */
static uint64_t take_from(struct slots *x, uint64_t region, uint64_t found, uint64_t count, uint32_t *slots, uint64_t stride)
{
    while (found < count && x->free[region]) {
        uint32_t slot = x->stack[region * x->slots_per_region + --x->free[region]];
        x->in_use[slot] = ALLOCATED;
        slots[stride * found++] = slot;
    }
    return found;
}

/* Allocates up to `count` slots of a size, those on the node first, and stores one number every `stride` places: of
 * the fullest regions first, then of free ones. Returns how many. */
uint64_t kvoffd_slots_take(struct slots *x, uint64_t slot_bytes, uint64_t count, int32_t node, uint32_t *slots,
                           uint64_t stride)
{
    uint64_t found = 0, near = 0;
    uint32_t fewest;

    for (int anywhere = 0; anywhere < 2; anywhere++) {
        /* Each pass empties the regions that have the fewest free slots, so the next pass meets a greater number: 512 slots
         * take at most 32 passes, as 1 + 2 + ... + 32 > 512. */
        while (found < count && (fewest = fewest_free(x, slot_bytes, node, anywhere)))
            for (uint64_t region = 0; region < x->regions && found < count; region++)
                if (x->slot_bytes[region] == (int64_t)slot_bytes && x->free[region] == fewest &&
                    is_near(x, region, node, anywhere))
                    found = take_from(x, region, found, count, slots, stride);
        for (uint64_t region = 0; region < x->regions && found < count; region++)
            if (!x->slot_bytes[region] && is_near(x, region, node, anywhere) && slots_in(x, region, slot_bytes)) {
                open_region(x, region, slot_bytes);
                found = take_from(x, region, found, count, slots, stride);
            }
        if (!anywhere)
            near = found;
    }
    if (found > near && is_known(x, node))
        x->slots_on_other_nodes += found - near;
    x->free_bytes -= found * slot_bytes;
    return found;
}

/* Frees an allocated slot. */
void free_slot(struct slots *x, uint32_t slot)
{
    uint64_t region = slot / x->slots_per_region;

    x->in_use[slot] = FREE;
    x->free_bytes += x->slot_bytes[region];
    x->stack[region * x->slots_per_region + x->free[region]++] = slot;
    if (x->free[region] == slots_in(x, region, x->slot_bytes[region]))
        x->slot_bytes[region] = x->free[region] = 0;
}

/* Frees slots. Returns NOT_ALLOCATED, and frees none, if one is not allocated or occurs twice. */
int kvoffd_slots_free(struct slots *x, const uint32_t *slots, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (slots[i] >= x->regions * x->slots_per_region || x->in_use[slots[i]] != ALLOCATED) {
            while (i--)
                x->in_use[slots[i]] = ALLOCATED;
            return NOT_ALLOCATED;
        }
        x->in_use[slots[i]] = RETURNED;
    }
    while (count--) /* so that the first of them is allocated first */
        free_slot(x, slots[count]);
    return 0;
}
