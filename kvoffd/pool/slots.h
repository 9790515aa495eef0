/* The pool's slots by number, and which of them are allocated: see slots.c. */
#ifndef KVOFFD_SLOTS_H
#define KVOFFD_SLOTS_H

#include <stdint.h>

/* SlotAllocator of allocator.py has the same fields, and owns the memory. */
struct slots {
    uint64_t pool_bytes, region_bytes, slots_per_region, regions, free_bytes, slots_on_other_nodes;
    int64_t *slot_bytes; /* by region, 0 if it is free */
    uint8_t *in_use; /* by slot */
    uint32_t *stack, *free; /* by slot; by region, the length of its stack */
    int32_t *node; /* by region, -1 for unknown */
    uint64_t *saved; /* by region, its last slot size, for the next daemon; may be NULL */
};

/* Returns where an allocated slot begins, in bytes of the pool. */
static inline uint64_t offset_of(const struct slots *x, uint32_t slot)
{
    uint64_t region = slot / x->slots_per_region;

    return region * x->region_bytes + slot % x->slots_per_region * x->slot_bytes[region];
}

uint64_t kvoffd_slots_take(struct slots *x, uint64_t slot_bytes, uint64_t count, int32_t node, uint32_t *slots,
                           uint64_t stride);
void free_slot(struct slots *x, uint32_t slot);
uint64_t slots_in(const struct slots *x, uint64_t region, uint64_t slot_bytes); /* how many slots of a size fit */

#endif
