/* Hands out slots of the pool by number: see allocator.py, which owns the memory.
 *
 * A region that has a slot size keeps the numbers of its free slots on a stack, which begins at the region's first slot.
 */
#include <stdint.h>

/* Allocator of allocator.py has the same fields. */
struct slots {
    uint64_t pool_bytes, region_bytes, slots_per_region, regions;
    int64_t *slot_bytes; /* by region, 0 where it is free */
    uint8_t *in_use; /* by slot */
    uint32_t *stack, *free; /* by slot; by region, how many are on its stack */
    int32_t *node; /* by region, -1 for none */
};

enum { NOT_OUT = -1, OUT = 1, RETURNED };

static uint64_t slots_in(const struct slots *x, uint64_t region, uint64_t slot_bytes)
{
    uint64_t begin = region * x->region_bytes, end = begin + x->region_bytes;

    return ((end < x->pool_bytes ? end : x->pool_bytes) - begin) / slot_bytes;
}

/* The fullest region of a size on a node that has a free slot, else its first free region; `regions` where there is none. */
static uint64_t best_region(const struct slots *x, int64_t slot_bytes, int32_t node)
{
    uint64_t best = x->regions, empty = x->regions;

    for (uint64_t region = 0; region < x->regions; region++) {
        if (x->node[region] != node)
            continue;
        if (x->slot_bytes[region] == slot_bytes) {
            if (x->free[region] && (best == x->regions || x->free[region] < x->free[best]))
                best = region;
        } else if (!x->slot_bytes[region] && empty == x->regions && slots_in(x, region, slot_bytes))
            empty = region;
    }
    return best < x->regions ? best : empty;
}

/* Hands out up to `count` slots of a size on a node; returns how many. Writes the number of the regions that took the size
 * for it, and behind it these. */
uint64_t kvoffd_slots_take(struct slots *x, uint64_t slot_bytes, uint64_t count, int32_t node, uint32_t *slots,
                           uint32_t *opened)
{
    uint64_t found = 0;

    opened[0] = 0;
    while (found < count) {
        uint64_t region = best_region(x, slot_bytes, node), first = region * x->slots_per_region;
        if (region == x->regions)
            break;
        if (!x->slot_bytes[region]) {
            uint64_t room = slots_in(x, region, slot_bytes);
            x->slot_bytes[region] = slot_bytes;
            x->free[region] = room;
            for (uint64_t i = 0; i < room; i++)
                x->stack[first + i] = first + room - 1 - i;
            opened[1 + opened[0]++] = region;
        }
        while (found < count && x->free[region]) {
            uint32_t slot = x->stack[first + --x->free[region]];
            x->in_use[slot] = OUT;
            slots[found++] = slot;
        }
    }
    return found;
}

/* Takes slots back; returns their bytes, or NOT_OUT where one is not handed out or comes twice, and none is taken. */
int64_t kvoffd_slots_free(struct slots *x, const uint32_t *slots, uint64_t count)
{
    int64_t nbytes = 0;

    for (uint64_t i = 0; i < count; i++) {
        if (slots[i] >= x->regions * x->slots_per_region || x->in_use[slots[i]] != OUT) {
            while (i--)
                x->in_use[slots[i]] = OUT;
            return NOT_OUT;
        }
        x->in_use[slots[i]] = RETURNED;
    }
    while (count--) { /* the first of them is handed out first */
        uint64_t region = slots[count] / x->slots_per_region;
        x->in_use[slots[count]] = 0;
        nbytes += x->slot_bytes[region];
        x->stack[region * x->slots_per_region + x->free[region]++] = slots[count];
        if (x->free[region] == slots_in(x, region, x->slot_bytes[region]))
            x->slot_bytes[region] = x->free[region] = 0;
    }
    return nbytes;
}
