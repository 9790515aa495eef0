/* Puts the slots together that hold the shards of one block. inherited.py calls it and owns all memory. */
#include <stdint.h>

enum { AHEAD = 16 };
static const uint64_t NOWHERE = UINT64_MAX;

/* What slots of one kind have in common. */
struct owner {
    uint32_t group; /* a number for a group of a namespace */
    uint16_t rank, world_size; /* the latter 0 where the slots are of no use */
};

/* inherited.py has the same structure. There are fewer than 2^32 slots, and never more blocks than slots: some of what is by
 * slot becomes what is by block. */
struct grouping {
    uint64_t slots, blocks;
    const struct owner *owners; /* by kind */
    uint32_t *kind_of; /* by slot its kind, by block that of one of its slots */
    uint64_t *identities; /* by slot, the same for the shards of one block; by block the highest of their generations */
    const int64_t *generations; /* by slot */
    uint32_t *table; /* by identity, the numbers of blocks, from 1; zeros */
    uint64_t mask; /* of its places, a power of two and more than there are slots */
    uint32_t *block_of; /* by slot, from 1; zeros */
    uint64_t *firsts; /* by block, the first of its places */
    uint32_t *places; /* the slots of the blocks: one for each rank, by rank; zeros */
    uint8_t *served; /* by slot, whether it is of a block; zeros */
    uint64_t *blocks_of; /* by kind, the blocks that have it; zeros */
};

static uint64_t place_in_table(const struct grouping *g, uint64_t identity)
{
    uint64_t at = identity & g->mask;

    while (g->table[at] && g->identities[g->table[at] - 1] != identity)
        at = (at + 1) & g->mask;
    return at;
}

/* Finds the block of each slot that is of use. `firsts` has the kind of a block's first slot, and how many it has. */
static uint64_t find_blocks(struct grouping *g)
{
    uint64_t blocks = 0;

    for (uint64_t slot = 0; slot < g->slots; slot++) {
        uint64_t kind = g->kind_of[slot], identity = g->identities[slot];
        if (slot + AHEAD < g->slots)
            __builtin_prefetch(&g->table[g->identities[slot + AHEAD] & g->mask]);
        if (!g->owners[kind].world_size)
            continue;
        uint64_t at = place_in_table(g, identity), block = g->table[at];
        if (!block) {
            block = g->table[at] = ++blocks;
            g->identities[block - 1] = identity;
            g->firsts[block - 1] = kind << 32;
        } else if (g->owners[g->firsts[block - 1] >> 32].group != g->owners[kind].group) {
            continue; /* another block with the same identity */
        }
        g->block_of[slot] = block;
        g->firsts[block - 1]++;
    }
    return blocks;
}

/* Enters the slots of each block at the places of their ranks: of two for one rank the one that was written last. */
static void enter(struct grouping *g)
{
    for (uint64_t slot = 0; slot < g->slots; slot++) {
        uint64_t block = g->block_of[slot];
        if (!block || g->firsts[block - 1] == NOWHERE)
            continue;
        uint32_t *place = &g->places[(uint32_t)g->firsts[block - 1] + g->owners[g->kind_of[slot]].rank];
        if (!*place || g->generations[*place - 1] < g->generations[slot])
            *place = slot + 1;
    }
}

/* Finds the blocks that have a slot for each rank, `blocks` of them. */
void kvoffd_group_slots(struct grouping *g)
{
    uint64_t found = find_blocks(g), place = 0;

    for (uint64_t block = 0; block < found; block++) {
        uint64_t kind = g->firsts[block] >> 32, world_size = g->owners[kind].world_size;
        if ((uint32_t)g->firsts[block] < world_size) {
            g->firsts[block] = NOWHERE;
            continue;
        }
        g->firsts[block] = kind << 32 | place;
        place += world_size;
    }
    enter(g);
    g->blocks = 0;
    for (uint64_t block = 0; block < found; block++) {
        if (g->firsts[block] == NOWHERE)
            continue;
        uint32_t kind = g->firsts[block] >> 32, first = g->firsts[block], world_size = g->owners[kind].world_size, rank;
        int64_t newest = 0;
        for (rank = 0; rank < world_size && g->places[first + rank]; rank++)
            ;
        if (rank < world_size)
            continue;
        for (rank = 0; rank < world_size; rank++) {
            uint32_t slot = --g->places[first + rank];
            g->served[slot] = 1;
            newest = g->generations[slot] > newest ? g->generations[slot] : newest;
        }
        g->blocks_of[kind]++;
        g->kind_of[g->blocks] = kind;
        g->identities[g->blocks] = newest;
        g->firsts[g->blocks] = first;
        g->blocks++;
    }
}
