/* The policy `lru`: its blocks in a ring, the least recently used first. lru.py owns the memory. */
#include <stdint.h>

/* Links of a block, at its number plus 1, and of the ring's beginning and end, at 0. All are 0 before the first use. */
struct link {
    uint32_t older, newer;
};

/* Makes a block the next older one than another, or with 0 the newest. */
static void put(struct link *x, uint32_t at, uint32_t newer)
{
    x[at] = (struct link){ .older = x[newer].older, .newer = newer };
    x[x[newer].older].newer = at;
    x[newer].older = at;
}

static void take(struct link *x, uint32_t at)
{
    x[x[at].older].newer = x[at].newer;
    x[x[at].newer].older = x[at].older;
    x[at] = (struct link){ 0 };
}

/* Adds blocks as the newest. Returns how many: fewer if one is present already. */
uint64_t kvoffd_lru_insert(struct link *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = blocks[i] + 1;
        if (x[at].older || x[at].newer || x[0].older == at)
            return i;
        put(x, at, 0);
    }
    return count;
}

/* Makes blocks the newest, from the last to the first. */
void kvoffd_lru_use(struct link *x, const uint32_t *blocks, uint64_t count)
{
    while (count--) {
        take(x, blocks[count] + 1);
        put(x, blocks[count] + 1, 0);
    }
}

/* Moves blocks: the first becomes the next older one than `before`, and each other one than the block before it. */
void kvoffd_lru_follow(struct link *x, uint32_t before, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        take(x, blocks[i] + 1);
        put(x, blocks[i] + 1, (i ? blocks[i - 1] : before) + 1);
    }
}

void kvoffd_lru_remove(struct link *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        take(x, blocks[i] + 1);
}

/* Writes up to `most` blocks in eviction order. Returns how many. */
uint64_t kvoffd_lru_candidates(const struct link *x, uint32_t *blocks, uint64_t most)
{
    uint64_t found = 0;

    for (uint32_t at = x[0].newer; at && found < most; at = x[at].newer)
        blocks[found++] = at - 1;
    return found;
}
