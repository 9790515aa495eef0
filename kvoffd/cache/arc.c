/* The policy `arc`: queues of blocks used once and used again, and a queue of ghosts for each. See arc.py. */
#include "../system/slot_index.h"

enum { ONCE, AGAIN, ONCE_GHOSTS, AGAIN_GHOSTS, LEAVING, QUEUES };
enum { MAX_LEAVING = 4096, MAX_OFFERED = 256 };

/* A block or a ghost in a queue. Queues are rings; each passes through the entry whose index is the queue's number.
 *
 * The paper evicts one page when one comes. A store here evicts for all its blocks at once, and they are inserted when
 * they are filled. So what was evicted waits in LEAVING: each insert makes the oldest a ghost. */
struct entry {
    uint64_t hash; /* hash of the group's number and the key */
    uint32_t older, newer;
    uint32_t block; /* a ghost's is the one that it had */
    uint16_t queue, left; /* `left`: the queue that one in LEAVING has left */
};

struct arc {
    uint64_t counts[QUEUES]; /* arc.py reads these */
    uint64_t capacity; /* blocks that the pool was seen to hold */
    uint64_t most_ghosts;
    uint64_t leaving[2]; /* those in LEAVING that have left ONCE and AGAIN */
    double target; /* wanted number of blocks in ONCE */
    uint64_t offered; /* keys of the latest store */
    uint64_t before_offer; /* entries in LEAVING that were there before it */
    uint32_t offers[MAX_OFFERED]; /* each key's ghost, or 0, in the order in which their blocks will be inserted */
    struct slot_index index; /* entries by hash */
    struct entry *entries;
    uint32_t allocated, top, unused; /* entries allocated, ever used, and the first unused one, linked by `newer` */
    uint32_t *entry_of; /* by block */
};

/* Makes an entry the next older one than another, or with a queue's number its newest. */
static void put(struct arc *x, uint32_t at, uint32_t newer)
{
    uint32_t older = x->entries[newer].older, queue = x->entries[newer].queue;

    x->entries[at].queue = queue;
    x->entries[at].older = older;
    x->entries[at].newer = newer;
    x->entries[older].newer = x->entries[newer].older = at;
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

/* Makes an entry of LEAVING a ghost. */
static void leave(struct arc *x, uint32_t at)
{
    x->leaving[x->entries[at].left]--;
    take(x, at);
    put(x, at, x->entries[at].left + ONCE_GHOSTS);
}

/* Returns the target after a key with a ghost in this queue came again. */
static double learn(const struct arc *x, double target, uint32_t queue, const uint64_t *counts)
{
    double once = counts[ONCE_GHOSTS], again = counts[AGAIN_GHOSTS];

    if (queue == ONCE_GHOSTS)
        target += again > once ? again / once : 1;
    else
        target -= once > again ? once / again : 1;
    return target < 0 ? 0 : target > (double)x->capacity ? (double)x->capacity : target;
}

static void keep_in_bounds(struct arc *x)
{
    uint64_t *counts = x->counts, resident = counts[ONCE] + counts[AGAIN] + counts[LEAVING];

    x->capacity = x->capacity > resident ? x->capacity : resident;
    x->capacity = x->capacity < 2 * resident ? x->capacity : 2 * resident;
    x->target = x->target < 0 ? 0 : x->target > (double)x->capacity ? (double)x->capacity : x->target;
    while (counts[ONCE_GHOSTS] && counts[ONCE] + x->leaving[ONCE] + counts[ONCE_GHOSTS] > x->capacity)
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
        x->entries[queue].older = x->entries[queue].newer = x->entries[queue].queue = queue;
    return x;
}

/* Adds blocks as the newest: to AGAIN if there is a ghost, whose queue tells which of the two should be larger. A block
 * that left only the order, and was given to no other key, returns to its queue. Returns how many: fewer if one is
 * present already. */
uint64_t kvoffd_arc_insert(struct arc *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                           const uint32_t *blocks)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash = hash_of(&x->index, group, keys + i * key_bytes, key_bytes), *place = place_of(x, hash);
        uint32_t at, queue = ONCE;
        if (*place) {
            at = slot_of(*place);
            if (x->entries[at].queue < ONCE_GHOSTS)
                return i;
            if (x->entries[at].queue == LEAVING)
                leave(x, at);
            queue = AGAIN;
            if (x->entries[at].block == blocks[i] && x->entry_of[blocks[i]] == at) /* it left only the order */
                queue = x->entries[at].queue - ONCE_GHOSTS;
            else
                x->target = learn(x, x->target, x->entries[at].queue, x->counts);
            take(x, at);
        } else {
            at = new_entry(x);
            *new_place(&x->index, hash) = entry_of(hash, at);
        }
        if (x->counts[LEAVING])
            leave(x, x->entries[LEAVING].newer);
        x->entries[at].hash = hash;
        x->entries[at].block = blocks[i];
        x->entry_of[blocks[i]] = at;
        put(x, at, queue);
        keep_in_bounds(x);
    }
    while (x->counts[LEAVING])
        leave(x, x->entries[LEAVING].newer);
    keep_in_bounds(x);
    x->offered = x->before_offer = 0;
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

/* Moves blocks: the first becomes the next older one than `before`, and each other one than the block before it. Those
 * that are not in its queue stay where they are. */
void kvoffd_arc_follow(struct arc *x, uint32_t before, const uint32_t *blocks, uint64_t count)
{
    uint32_t newer = x->entry_of[before];

    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = x->entry_of[blocks[i]];
        if (x->entries[at].queue != x->entries[newer].queue)
            continue;
        take(x, at);
        put(x, at, newer);
        newer = at;
    }
}

/* Removes blocks, leaving ghosts if `leaves`. */
void kvoffd_arc_remove(struct arc *x, const uint32_t *blocks, uint64_t count, uint32_t leaves)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = x->entry_of[blocks[i]];
        if (!leaves) {
            forget(x, at);
            continue;
        }
        x->leaving[x->entries[at].left = x->entries[at].queue]++;
        take(x, at);
        put(x, at, LEAVING);
        if (x->counts[LEAVING] > MAX_LEAVING) {
            leave(x, x->entries[LEAVING].newer);
            if (x->before_offer)
                x->before_offer--;
        }
    }
}

/* Notes the keys of a store before it evicts. Their blocks will be inserted from the last to the first. */
void kvoffd_arc_offer(struct arc *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    x->before_offer = x->counts[LEAVING];
    x->offered = count < MAX_OFFERED ? count : MAX_OFFERED;
    for (uint64_t i = 0; i < x->offered; i++) {
        uint64_t *place = place_of(x, hash_of(&x->index, group, keys + (count - 1 - i) * key_bytes, key_bytes));
        x->offers[i] = *place ? slot_of(*place) : 0;
    }
}

/* What will be evicted for the blocks that come next, found without a change of `x`. */
struct course {
    const struct arc *x;
    double target;
    uint64_t counts[QUEUES];
    uint32_t next[QUEUES]; /* the oldest entry of each queue that is still there */
    uint32_t offers[MAX_OFFERED]; /* 0 for ghosts that will be forgotten */
};

static uint32_t pass(struct course *c, uint32_t queue)
{
    uint32_t at = c->next[queue];

    c->next[queue] = c->x->entries[at].newer;
    return at;
}

/* Forgets a queue's oldest ghost, which `used` of the offered keys have not used. */
static void forget_oldest(struct course *c, uint32_t queue, uint64_t used)
{
    c->counts[queue]--;
    while (c->next[queue] != queue) {
        uint32_t at = pass(c, queue);
        uint64_t i = 0;
        while (i < c->x->offered && c->offers[i] != at)
            i++;
        if (i >= used) {
            if (i < c->x->offered)
                c->offers[i] = 0;
            return;
        }
    }
}

/* Counts the block of an offered key, or of an unknown one, as inserted. Returns whether AGAIN's ghosts had it. */
static int come(struct course *c, uint32_t ghost)
{
    uint32_t queue = ghost ? c->x->entries[ghost].queue : ONCE;

    if (queue != ONCE_GHOSTS && queue != AGAIN_GHOSTS) {
        c->counts[ONCE]++;
        return 0;
    }
    c->target = learn(c->x, c->target, queue, c->counts);
    c->counts[queue]--;
    c->counts[AGAIN]++;
    return queue == AGAIN_GHOSTS;
}

/* Writes up to `most` blocks in the order in which they go, one for each block that comes, as in the paper. Returns how
 * many. Blocks come in this order: those for which the first `before_offer` in LEAVING went, without ghosts; those of
 * the latest store's keys; others, without ghosts. What is in LEAVING went for the first of these. */
uint64_t kvoffd_arc_candidates(const struct arc *x, uint32_t *blocks, uint64_t most)
{
    struct course c = {.x = x, .target = x->target};
    uint64_t *counts = c.counts, found = 0, all = 2 * x->capacity;

    for (uint32_t queue = 0; queue < QUEUES; queue++) {
        counts[queue] = x->counts[queue];
        c.next[queue] = x->entries[queue].newer;
    }
    memcpy(c.offers, x->offers, x->offered * sizeof *x->offers);
    counts[ONCE] += x->leaving[ONCE];
    counts[AGAIN] += x->leaving[AGAIN];
    for (uint64_t number = 0; found < most; number++) {
        /* Keys of the latest store that have come with this block; more if others come. */
        uint64_t used = number < x->before_offer ? 0 : number - x->before_offer + 1;
        uint64_t once = counts[ONCE];
        int was_again = come(&c, used && used <= x->offered ? c.offers[used - 1] : 0);
        uint32_t from;
        if (c.next[LEAVING] != LEAVING) {
            from = x->entries[pass(&c, LEAVING)].left;
        } else {
            from = once > c.target || (was_again && once == c.target) ? ONCE : AGAIN;
            if (c.next[from] == from)
                from = !from;
            if (c.next[from] == from)
                break;
            blocks[found++] = x->entries[pass(&c, from)].block;
        }
        counts[from]--;
        counts[from + ONCE_GHOSTS]++;
        if (used > x->offered) /* no ghost matters any more */
            continue;
        while (counts[ONCE_GHOSTS] && counts[ONCE] + counts[ONCE_GHOSTS] > x->capacity)
            forget_oldest(&c, ONCE_GHOSTS, used);
        while (counts[AGAIN_GHOSTS] && counts[ONCE] + counts[AGAIN] + counts[ONCE_GHOSTS] + counts[AGAIN_GHOSTS] > all)
            forget_oldest(&c, AGAIN_GHOSTS, used);
    }
    return found;
}
