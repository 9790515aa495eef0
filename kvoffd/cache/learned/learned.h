/* What the policy `learned` knows: spans of keys, the cells that order them, and how long keys take to come back.
 *
 * learned.py owns one `struct learned` and calls what begins with kvoffd_; everything else is hidden. One thread
 * at a time. A key is known by a hash of 64 bits, never 0, and nothing else of it is kept: two keys with one hash would
 * be taken for one, which with 100 million keys happens once in 3,700 daemons and costs a decision about one block.
 */
#ifndef KVOFFD_LEARNED_H
#define KVOFFD_LEARNED_H

#include <stdint.h>

#pragma GCC visibility push(hidden)

enum {
    BINS = 17, /* age bins of a class */
    CLASSES = 77,
    CELLS = CLASSES * BINS,
    EPOCHS_IN_LIFETIME = 4, /* lives that began in one epoch are counted together */
    EPOCHS_KEPT = 320,
    FEWEST_STAYS = 128, /* lifetimes for which it is done as an LRU does, at first */
    AHEAD = 8, /* keys between one that is looked for and one that is fetched from memory */
    MOST_COUNTED = 1 << 30, /* keys of a span, keys behind it */
    MOST_SEEN = UINT16_MAX, /* sightings, turns */
};

/* Orders in which spans that have blocks are linked. */
enum { BY_WORTH, BY_AGE, ORDERS }; /* oldest first in each cell, and in all */

/* Classes: what tells keys apart. learned.py names them. */
enum {
    ADOPTED = 0, /* blocks of an earlier daemon whose keys are not known */
    STORED = 1, /* what a store brought that no lookup asked for: what an engine wrote itself */
    LAST = 2, /* the last part of a prompt, behind its last whole unit */
    SHARED = 3, /* by how often they were seen: 6 */
    CONTINUED = 9, /* known keys of a conversation, by pause, turn and new text: 4 x 2 x 3 */
    APPENDED = 33, /* its new ones: 4 x 2 x 4 */
    BRANCH = 65, /* new keys behind a known part that others continued otherwise, by how many: 6 */
    FIRST = 71, /* new keys of a new conversation, by how many: 6 */
};

/* Keys of one chain, consecutive, that one request touched last and that have one class. A later request takes keys from
 * the front, and forgetting from the back: keys have places, of which [low, high) are still here. Spans are known by
 * number; 0 is none. They are small, for the sake of single keys without a block. */
struct span {
    union {
        struct keys *keys;
        uint64_t hash; /* where it is `alone`: its key's, whose place is 0 */
    };
    uint64_t since; /* the bytes accessed when its keys' lives began */
    float weight; /* bytes of a block, of which weight_of makes a whole number */
    uint32_t seen; /* the last walk that came by */
    uint32_t low, top, high; /* from `top` on no place has a block */
    uint32_t held; /* blocks */
    uint32_t holder; /* what it has by number while it has blocks, else 0 */
    uint16_t sightings; /* requests that saw the keys */
    uint16_t turn; /* number of the request in its conversation; 0 for what a store brought */
    uint32_t behind; /* keys of the request behind `high` */
    uint32_t before, child; /* neighbours in the request */
    uint32_t older, younger; /* neighbours in the order in which spans are forgotten */
    uint8_t kind; /* class */
    uint8_t floor; /* of the classes of its chain up to here, the one that was worth least */
    uint8_t age_bin;
    uint8_t alone : 1; /* has room for one key */
    uint8_t met : 1; /* by the request at hand */
    uint8_t old : 1; /* older than what is remembered: keys that lose their block are forgotten */
    uint8_t recent : 1; /* an LRU would have its keys, if they are `offered` */
    uint8_t offered : 1; /* a store brought keys of it */
    uint8_t closed : 1; /* a store of keys in it was declined; the others of this request are, too */
};

/* A span's keys, where it has room for several. */
struct keys {
    uint32_t base, room; /* the first one's place, and the number */
    uint64_t hashes[]; /* and behind them handles of blocks, 0 for none */
};

/* What a span has that has blocks. */
struct holder {
    uint32_t previous[ORDERS], next[ORDERS]; /* neighbours in the cell, and in all that have blocks */
    uint32_t handle; /* where the span is `alone`: its block's */
};

struct place {
    uint64_t hash; /* 0 where the entry is empty */
    uint32_t span, place;
};

/* A part of the table of keys: open addressing with linear probing. Each grows by itself, so that no call makes all of it
 * anew. */
struct places {
    struct place *places;
    uint32_t room; /* their number */
    uint32_t keys;
};

struct row { /* spans in order, linked by two fields */
    uint32_t first, last;
};

/* What learned.py reads. */
struct known {
    uint64_t lifetime; /* bytes that the pool holds */
    uint64_t now; /* bytes accessed so far */
    uint64_t keys, requests; /* what accessed them */
    uint64_t known_keys, blocks, spans;
    uint64_t known_bytes; /* of the blocks that known keys have, or would have */
    uint64_t nbytes; /* memory of all that is known */
    uint64_t hit_bytes; /* of the keys that requests found before the first one without a block */
    uint64_t lru_hit_bytes; /* of those that an LRU would have had */
    uint64_t as_lru; /* whether blocks go as in an LRU, since that did better */
};

struct learned {
    struct known known;
    uint64_t seed[2];
    struct places *parts; /* by the upper half of a hash */
    uint64_t part_mask, place_room; /* the latter of all parts */
    struct span *spans; /* [span_room], by number, of which those from `span_top` on were never used */
    uint32_t span_room, span_top, unused_spans; /* the latter linked by `child` */
    uint64_t keys_bytes; /* of all spans' keys */
    struct holder *holders; /* [holder_room], by number, of which those from `holder_top` on were never used */
    uint32_t holder_room, holder_top, unused_holders; /* the latter linked by `handle` */
    struct row oldest; /* spans that are not old, the next one to be forgotten first */
    uint32_t recent; /* the first of them that an LRU would have, of this one maybe some keys only */
    uint32_t latest; /* the first of them that is of the latest request, or younger */
    uint64_t recent_bytes; /* of those from `recent` on */
    uint64_t age_at, learn_at, learn_after, learned_at, epoch;
    uint32_t aged; /* cells of which the spans were moved since `age_at` */
    double past; /* bytes that were accessed before `now` was 0 */
    double edges[BINS]; /* where age bins begin, in bytes accessed */
    double returned[CLASSES][BINS], forgotten[CLASSES][BINS]; /* bytes of lives by the age at which they ended */
    double open[CLASSES][EPOCHS_KEPT]; /* bytes of lives that go on, by the epoch in which they began */
    double accessed[CLASSES]; /* bytes of the requests' keys, by the class that they got */
    double hazard[CLASSES][BINS]; /* chance to come back in each age bin of those that are still to */
    double worth[CLASSES][BINS], admission_worth[CLASSES]; /* hits for each byte accessed meanwhile */
    struct row cells[CELLS], pool; /* spans that have blocks: by class and age bin, and all */
    uint64_t cell_bytes[CELLS]; /* of their blocks */
    uint16_t rank[CELLS], by_rank[CELLS]; /* ascending worth */
    uint64_t filled[(CELLS + 63) / 64]; /* ranks of cells that are not empty, as bits */
    uint32_t walks;
    double lead, lead_squares; /* of an LRU's hits over those that were, by request, in bytes; and the squares */
    uint64_t judge_at, stays; /* when the lead is looked at next; lifetimes for which it is done as an LRU does */
    void *scratch;
    uint64_t scratch_bytes;
};

/* places.c */
void make_places(struct learned *l);
void free_places(struct learned *l);
void set_place(struct learned *l, uint64_t hash, uint32_t span, uint32_t place);
void remove_place(struct learned *l, uint64_t hash, uint32_t span);

/* Asked for each key of a request, and so not in places.c. */
static inline struct places *part_of(const struct learned *l, uint64_t hash)
{
    return &l->parts[hash >> 32 & l->part_mask];
}

/* Where a key's entry is, unless others were there. */
static inline uint32_t home_of(const struct places *part, uint64_t hash)
{
    return (hash & UINT32_MAX) * part->room >> 32;
}

static inline uint32_t behind(const struct places *part, uint32_t at)
{
    return at + 1 < part->room ? at + 1 : 0;
}

static inline struct place *find_in(const struct places *part, uint64_t hash)
{
    for (uint32_t at = home_of(part, hash);; at = behind(part, at)) {
        struct place *there = &part->places[at];
        if (!there->hash || there->hash == hash)
            return there;
    }
}

/* Where a key is, or would be. */
static inline struct place *find_place(const struct learned *l, uint64_t hash)
{
    return find_in(part_of(l, hash), hash);
}

/* A key will be looked for soon. */
static inline void fetch_place(const struct learned *l, uint64_t hash)
{
    const struct places *part = part_of(l, hash);

    __builtin_prefetch(&part->places[home_of(part, hash)]);
}

/* What a span has while it holds blocks. */
static inline struct holder *holder_of(const struct learned *l, uint32_t number)
{
    return &l->holders[l->spans[number].holder];
}

/* memory.c */
void *or_end(void *room);
void *clear_room(uint64_t count, uint64_t nbytes);
void *scratch(struct learned *l, uint64_t nbytes);

/* spans.c */
uint64_t weight_of(const struct span *s);
uint64_t *hash_at(struct span *s, uint32_t place);
uint32_t *handle_at(const struct learned *l, const struct span *s, uint32_t place);
void hold_blocks(struct learned *l, uint32_t number);
void hold_none(struct learned *l, uint32_t number);
void make_spans(struct learned *l);
void free_spans(struct learned *l);
uint32_t new_span(struct learned *l, uint64_t weight);
void set_keys(struct learned *l, uint32_t number, const uint64_t *hashes, uint32_t count);
uint32_t begin_span(struct learned *l, const uint64_t *hashes, uint32_t count, int kind, uint64_t weight, uint64_t since);
void lift_span(struct learned *l, uint32_t number, uint32_t *handles);
void begin_again(struct learned *l, uint32_t number, int kind, uint64_t weight);
uint32_t split_span(struct learned *l, uint32_t number, uint32_t place);
void take_keys(struct learned *l, uint32_t number, uint32_t count, uint32_t *handles);
void settle_span(struct learned *l, uint32_t number);
uint32_t recent_keys(const struct learned *l, uint32_t number);
void link_young(struct learned *l, uint32_t number);
void link_stored(struct learned *l, uint32_t number);
void link_old(struct learned *l, uint32_t number);
void forget_oldest(struct learned *l, uint64_t most);
void forget_some(struct learned *l, uint64_t added);
void go_back(struct learned *l);

/* cells.c */
void fill_cell(struct learned *l, uint32_t number, int older);
void leave_cell(struct learned *l, uint32_t number);
void add_blocks(struct learned *l, const struct span *s, int64_t blocks);
void link_behind(struct learned *l, uint32_t number, uint32_t before);
void order_cells(struct learned *l);
void move_cells(struct learned *l);

/* lifetimes.c */
uint64_t epoch_bytes(const struct learned *l);
int age_bin(const struct learned *l, uint64_t since);
void begin_lives(struct learned *l, const struct span *s, uint64_t keys);
void end_lives(struct learned *l, const struct span *s, uint64_t keys, double *ends);
void enter_epoch(struct learned *l);
void work_out(struct learned *l);
void judge(struct learned *l);

/* requests.c */
void plan_learning(struct learned *l);
uint64_t hash_keys(struct learned *l, uint64_t name, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                   uint64_t *hashes);
uint32_t run_length(const struct learned *l, const uint64_t *hashes, uint32_t count, struct place *first);

#pragma GCC visibility pop

#endif
