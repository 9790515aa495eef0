/* The policy `arc`: queues of blocks used once and used again, and a queue of ghosts for each. See arc.py. */
#include "../system/slot_index.h"

enum { ONCE, AGAIN, ONCE_GHOSTS, AGAIN_GHOSTS, QUEUES };

/* A block or a ghost in a queue. Queues are rings; each passes through the entry whose index is the queue's number. */
struct entry {
    uint64_t hash; /* hash of the group's number and the key */
    uint32_t older, newer;
    uint32_t block; /* a ghost's is the one that it had */
    uint32_t queue;
};

struct arc {
    uint64_t counts[QUEUES]; /* arc.py reads these */
    uint64_t capacity; /* blocks that the pool was seen to hold */
    uint64_t most_ghosts;
    uint64_t removed; /* blocks since the last insert: new ones will have their space */
    double target; /* wanted number of blocks in ONCE */
    struct slot_index index; /* entries by hash */
    struct entry *entries;
    uint32_t allocated, top, unused; /* entries allocated, ever used, and the first unused below `top`, linked by `newer` */
    uint32_t *entry_of; /* by block */
};

static void put(struct arc *x, uint32_t at, uint32_t queue)
{
    uint32_t newest = x->entries[queue].older;

    x->entries[at].queue = queue;
    x->entries[at].older = newest;
    x->entries[at].newer = queue;
    x->entries[newest].newer = x->entries[queue].older = at;
    x->counts[queue]++;
}

static void take(struct arc *x, uint32_t at)
{
    struct entry *own = &x->entries[at];

    x->entries[own->older].newer = own->newer;
    x->entries[own->newer].older = own->older;
    x->counts[own->queue]--;
}

/* Returns the place of the entry with this hash, or an empty one. */
static uint64_t *place_of(const struct arc *x, uint64_t hash)
{
    uint64_t *place = home(&x->index, hash);

    while (*place && x->entries[slot_of(*place)].hash != hash)
        place++;
    return place;
}

static uint32_t new_entry(struct arc *x)
{
    uint32_t at = x->unused;

    if (at) {
        x->unused = x->entries[at].newer;
        return at;
    }
    if (x->top == x->allocated) {
        x->entries = or_end(realloc(x->entries, 2ULL * x->allocated * sizeof *x->entries));
        x->allocated *= 2;
    }
    return x->top++;
}

static void forget(struct arc *x, uint32_t at)
{
    take(x, at);
    remove_at(&x->index, place_of(x, x->entries[at].hash));
    x->entries[at].newer = x->unused;
    x->unused = at;
}

static void keep_in_bounds(struct arc *x)
{
    uint64_t *counts = x->counts, resident = counts[ONCE] + counts[AGAIN];

    x->capacity = x->capacity > resident ? x->capacity : resident;
    x->capacity = x->capacity < 2 * resident ? x->capacity : 2 * resident;
    x->target = x->target < 0 ? 0 : x->target > (double)x->capacity ? (double)x->capacity : x->target;
    while (counts[ONCE_GHOSTS] && counts[ONCE] + counts[ONCE_GHOSTS] > x->capacity)
        forget(x, x->entries[ONCE_GHOSTS].newer);
    while (counts[AGAIN_GHOSTS] && resident + counts[ONCE_GHOSTS] + counts[AGAIN_GHOSTS] > 2 * x->capacity)
        forget(x, x->entries[AGAIN_GHOSTS].newer);
    while (counts[ONCE_GHOSTS] + counts[AGAIN_GHOSTS] > x->most_ghosts)
        forget(x, x->entries[counts[ONCE_GHOSTS] >= counts[AGAIN_GHOSTS] ? ONCE_GHOSTS : AGAIN_GHOSTS].newer);
}

void kvoffd_arc_free(struct arc *x)
{
    close_index(&x->index);
    free(x->entries);
    free(x->entry_of);
    free(x);
}

/* Makes the policy for this many slot numbers; NULL if memory is short. */
struct arc *kvoffd_arc_new(uint64_t slots, uint64_t most_ghosts, const uint8_t *seed)
{
    struct arc *x = calloc(1, sizeof *x);
    uint64_t words[2];

    if (!x)
        return NULL;
    memcpy(words, seed, sizeof words);
    x->allocated = 1024;
    x->top = QUEUES;
    x->most_ghosts = most_ghosts;
    x->entry_of = calloc(slots, sizeof *x->entry_of);
    x->entries = calloc(x->allocated, sizeof *x->entries);
    if (!open_index(&x->index, words) || !x->entry_of || !x->entries) {
        kvoffd_arc_free(x);
        return NULL;
    }
    for (uint32_t queue = 0; queue < QUEUES; queue++)
        x->entries[queue].older = x->entries[queue].newer = queue;
    return x;
}

/* Adds blocks as the newest: to AGAIN if there is a ghost, whose queue tells which of the two should be larger. A block
 * that left only the order returns to its queue. Returns how many: fewer if one is present already. */
uint64_t kvoffd_arc_insert(struct arc *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                           const uint32_t *blocks)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash = hash_of(&x->index, group, keys + i * key_bytes, key_bytes), *place = place_of(x, hash);
        uint32_t at, queue = ONCE;
        if (*place) {
            double once = x->counts[ONCE_GHOSTS], again = x->counts[AGAIN_GHOSTS];
            at = slot_of(*place);
            if (x->entries[at].queue < ONCE_GHOSTS)
                return i;
            queue = AGAIN;
            if (x->entries[at].block == blocks[i])
                queue = x->entries[at].queue - ONCE_GHOSTS;
            else if (x->entries[at].queue == ONCE_GHOSTS)
                x->target += again > once ? again / once : 1;
            else
                x->target -= once > again ? once / again : 1;
            take(x, at);
        } else {
            at = new_entry(x);
            *new_place(&x->index, hash) = entry_of(hash, at);
        }
        x->entries[at].hash = hash;
        x->entries[at].block = blocks[i];
        x->entry_of[blocks[i]] = at;
        put(x, at, queue);
    }
    keep_in_bounds(x);
    x->removed = 0;
    return count;
}

/* Makes blocks the newest in AGAIN, from the last to the first. */
void kvoffd_arc_use(struct arc *x, const uint32_t *blocks, uint64_t count)
{
    while (count--) {
        uint32_t at = x->entry_of[blocks[count]];
        take(x, at);
        put(x, at, AGAIN);
    }
}

/* Removes blocks, leaving ghosts if `leaves`. */
void kvoffd_arc_remove(struct arc *x, const uint32_t *blocks, uint64_t count, uint32_t leaves)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = x->entry_of[blocks[i]], queue = x->entries[at].queue;
        x->removed++;
        if (!leaves) {
            forget(x, at);
            continue;
        }
        take(x, at);
        put(x, at, queue + ONCE_GHOSTS);
    }
}

/* Writes up to `most` blocks in the order in which they go when new ones come, which ONCE takes: AGAIN's until ONCE
 * exceeds its target, then ONCE's, then the rest. So it matters little whether one is evicted for each new block, as in
 * the paper, or all of a store's at once. Returns how many. */
uint64_t kvoffd_arc_candidates(const struct arc *x, uint32_t *blocks, uint64_t most)
{
    uint64_t found = 0, target = x->target, once = x->counts[ONCE] + x->removed;
    uint64_t first = once > target ? 0 : target - once + 1;
    uint32_t at = x->entries[AGAIN].newer;

    for (; first-- && at != AGAIN && found < most; at = x->entries[at].newer)
        blocks[found++] = x->entries[at].block;
    for (uint32_t next = x->entries[ONCE].newer; next != ONCE && found < most; next = x->entries[next].newer)
        blocks[found++] = x->entries[next].block;
    for (; at != AGAIN && found < most; at = x->entries[at].newer)
        blocks[found++] = x->entries[at].block;
    return found;
}
