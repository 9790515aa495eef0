/* Queues of the policies `lru` and `arc`: see queues.py. */
#include "../system/slot_index.h"

enum { ONCE, AGAIN, ONCE_GHOSTS, AGAIN_GHOSTS, QUEUES };

/* A block or a ghost in a queue. Queues are rings; each passes through the entry whose index is the queue's number. */
struct entry {
    uint64_t hash; /* hash of the group's number and the key */
    uint32_t older, newer;
    uint32_t block, queue;
};

struct queues {
    uint64_t counts[QUEUES]; /* queues.py reads these */
    uint64_t capacity, most_ghosts; /* `capacity` in blocks; `most_ghosts` is 0 for `lru` */
    double target; /* wanted number of blocks in ONCE */
    struct slot_index index; /* entries by hash; unused for `lru` */
    struct entry *entries;
    uint32_t room, top, unused; /* entries allocated, ever used, and the first unused below `top`, linked by `newer` */
    uint32_t *entry_of; /* by block */
};

static void put(struct queues *x, uint32_t at, uint32_t queue)
{
    uint32_t newest = x->entries[queue].older;

    x->entries[at].queue = queue;
    x->entries[at].older = newest;
    x->entries[at].newer = queue;
    x->entries[newest].newer = x->entries[queue].older = at;
    x->counts[queue]++;
}

static void take(struct queues *x, uint32_t at)
{
    struct entry *own = &x->entries[at];

    x->entries[own->older].newer = own->newer;
    x->entries[own->newer].older = own->older;
    x->counts[own->queue]--;
}

/* Returns the place of the entry with this hash, or an empty one. */
static uint64_t *place_of(const struct queues *x, uint64_t hash)
{
    uint64_t *place = home(&x->index, hash);

    while (*place && x->entries[slot_of(*place)].hash != hash)
        place++;
    return place;
}

/* Returns a new entry. */
static uint32_t new_entry(struct queues *x)
{
    uint32_t at = x->unused;

    if (at) {
        x->unused = x->entries[at].newer;
        return at;
    }
    if (x->top == x->room) {
        x->entries = or_end(realloc(x->entries, 2ULL * x->room * sizeof *x->entries));
        x->room *= 2;
    }
    return x->top++;
}

static void forget(struct queues *x, uint32_t at)
{
    take(x, at);
    if (x->most_ghosts)
        remove_at(&x->index, place_of(x, x->entries[at].hash));
    x->entries[at].newer = x->unused;
    x->unused = at;
}

void kvoffd_queues_free(struct queues *x)
{
    close_index(&x->index);
    free(x->entries);
    free(x->entry_of);
    free(x);
}

/* Makes queues for this many slot numbers; NULL if memory is short. */
struct queues *kvoffd_queues_new(uint64_t slots, uint64_t most_ghosts, const uint8_t *seed)
{
    struct queues *x = calloc(1, sizeof *x);
    uint64_t words[2];

    if (!x)
        return NULL;
    memcpy(words, seed, sizeof words);
    x->room = 1024;
    x->top = QUEUES;
    x->most_ghosts = most_ghosts;
    x->entry_of = calloc(slots + 1, sizeof *x->entry_of);
    x->entries = calloc(x->room, sizeof *x->entries);
    if (!open_index(&x->index, words) || !x->entry_of || !x->entries) {
        kvoffd_queues_free(x);
        return NULL;
    }
    for (uint32_t queue = 0; queue < QUEUES; queue++)
        x->entries[queue].older = x->entries[queue].newer = queue;
    return x;
}

static void keep_in_bounds(struct queues *x)
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

/* Adds blocks as the newest; to AGAIN if there is a ghost. Returns how many: fewer if one is present already. */
uint64_t kvoffd_queues_insert(struct queues *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                              const uint32_t *blocks)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash = x->most_ghosts ? hash_of(&x->index, group, keys + i * key_bytes, key_bytes) : 0;
        uint64_t *entry = x->most_ghosts ? place_of(x, hash) : NULL;
        uint32_t at, queue = ONCE;
        if (entry && *entry) {
            double once = x->counts[ONCE_GHOSTS], again = x->counts[AGAIN_GHOSTS];
            at = slot_of(*entry);
            if (x->entries[at].queue < ONCE_GHOSTS)
                return i;
            if (x->entries[at].queue == ONCE_GHOSTS)
                x->target += again > once ? again / once : 1;
            else
                x->target -= once > again ? once / again : 1;
            take(x, at);
            queue = AGAIN;
        } else {
            at = new_entry(x);
            if (entry)
                *new_place(&x->index, hash) = entry_of(hash, at);
        }
        x->entries[at].hash = hash;
        x->entries[at].block = blocks[i];
        x->entry_of[blocks[i]] = at;
        put(x, at, queue);
    }
    keep_in_bounds(x);
    return count;
}

/* Makes blocks the newest, from the last to the first; for `arc`, in AGAIN. */
void kvoffd_queues_use(struct queues *x, const uint32_t *blocks, uint64_t count)
{
    while (count--) {
        uint32_t at = x->entry_of[blocks[count]];
        take(x, at);
        put(x, at, x->most_ghosts ? AGAIN : ONCE);
    }
}

/* Removes blocks, leaving ghosts if `leaves`. */
void kvoffd_queues_remove(struct queues *x, const uint32_t *blocks, uint64_t count, uint32_t leaves)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = x->entry_of[blocks[i]], queue = x->entries[at].queue;
        if (!leaves || !x->most_ghosts) {
            forget(x, at);
            continue;
        }
        take(x, at);
        put(x, at, queue + ONCE_GHOSTS);
    }
}

/* Writes up to `most` blocks in eviction order: the excess of ONCE, then AGAIN, then the rest. Returns how many. */
uint64_t kvoffd_queues_candidates(const struct queues *x, double below, uint32_t *blocks, uint64_t most)
{
    (void)below; /* for `learned`; blocks have no scores here */
    uint64_t found = 0, target = x->target, first = x->counts[ONCE] > target ? x->counts[ONCE] - target : 0;
    uint32_t at = x->entries[ONCE].newer;

    for (; first-- && found < most; at = x->entries[at].newer)
        blocks[found++] = x->entries[at].block;
    for (uint32_t again = x->entries[AGAIN].newer; again != AGAIN && found < most; again = x->entries[again].newer)
        blocks[found++] = x->entries[again].block;
    for (; at != ONCE && found < most; at = x->entries[at].newer)
        blocks[found++] = x->entries[at].block;
    return found;
}
