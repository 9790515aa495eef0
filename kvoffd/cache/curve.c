/* How many hits an LRU of other sizes would have had: sampled keys in the order of their last use, cut at these sizes.
 *
 * Called by curve.py. Chains are cut into pieces of 512 tokens at most, which are one key where blocks are large. Where
 * they are small the first pieces are of one key, and others have at most a part of the keys before them: prompts end and
 * part from others within pieces, and what that hides must be little of the prompt. A piece is known by its first key, and
 * has as many keys as it had when it was last used. Whether it is sampled follows from the key's
 * hash, so that it is at each of its uses or at none; `scale` pieces stand behind each. The first pieces of chains are
 * sampled apart from the others, and more of them: one that all prompts begin with may be a large part of all uses. A
 * piece's place in the list is in a segment, between two of the sizes, so that a use costs a step for each of them and no
 * search.
 *
 * Source of sampling by hashes, and of a sample of bounded size: C. Waldspurger et al., "Efficient MRC Construction with
 * SHARDS", FAST 2015.
 */
#include "../system/key_hash.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST, NEXT, REST, KINDS };
enum { SIZES = 13, PIECES = 131072, PIECE_TOKENS = 512, BUCKETS = 2 * PIECES, NONE = 0, NEXT_PIECES = 8 };
/* A piece of more than one key has at most two PARTS-ths of the keys before it. Of a chain at most MOST_SMALL pieces are
 * shorter than its longest. */
enum { PARTS = 32, MOST_SMALL = PARTS + 64 * PARTS / 2 };

/* Pieces of each kind have places of their own, from here to where those of the next one begin. The first place is none. */
static const uint32_t begin[KINDS + 1] = {1, PIECES / 4, PIECES / 2, PIECES};
/* Of a request: pieces of each kind that are looked at while a sample becomes smaller; and moves from one segment to the
 * next, beside those that its own pieces cause. */
enum { SWEPT = 256, MOVED = 4096 };

struct piece {
    uint64_t hash; /* of its first key */
    uint64_t last; /* of the last of its keys */
    uint32_t newer, older; /* in the list; also, of a free one, the next free one */
    uint32_t next; /* in its bucket */
    uint32_t bytes, keys; /* no keys where the place is free */
    uint8_t kind, segment;
    uint8_t halvings; /* of its kind's sample when its weight was last taken */
};

/* A piece of the request that is sampled. */
struct use {
    uint64_t hash, last;
    uint32_t keys;
    uint8_t kind;
};

/* What was asked for in a namespace, in tokens; curve.py has the same. */
struct counts {
    double total[KINDS]; /* all pieces */
    double sampled[KINDS]; /* what stands behind the sampled ones */
    double hits[KINDS][SIZES]; /* of that, by the smallest size with which a use is a hit */
    double found; /* by the requests themselves */
};

/* curve.py reads the first fields. */
struct curve {
    uint64_t nbytes;
    double seen_bytes; /* of the blocks of all pieces in the list, about */
    double width[SIZES]; /* bytes between two sizes */
    double held[SIZES]; /* bytes in each segment */
    uint32_t halvings[KINDS]; /* of the sample: that so many upper bits of a hash are 0 */
    uint32_t hand[KINDS]; /* pieces behind it were not looked at since the last of them */
    uint32_t free[KINDS], top[KINDS]; /* places: from `top` on none was ever used */
    uint32_t newest;
    uint32_t oldest[SIZES]; /* of each segment; NONE where that is empty */
    uint64_t seed[2];
    struct use *uses;
    uint64_t *seen; /* the hashes of the request's pieces, by their lower bits; 0 where there is none */
    uint64_t room; /* for so many uses, a power of two, and twice as many hashes */
    uint32_t buckets[BUCKETS];
    struct piece pieces[PIECES]; /* the first one is none */
};

static uint64_t hash_of(const struct curve *c, uint64_t group, const uint8_t *key, uint64_t key_bytes)
{
    return key_hash(c->seed[0] ^ group, c->seed[1], key, key_bytes);
}

static uint32_t *bucket(struct curve *c, uint64_t hash)
{
    return &c->buckets[hash % BUCKETS]; /* the low bits: the high ones say whether it is sampled */
}

static uint32_t find(struct curve *c, uint64_t hash)
{
    uint32_t at = *bucket(c, hash);

    while (at != NONE && c->pieces[at].hash != hash)
        at = c->pieces[at].next;
    return at;
}

static int is_sampled(const struct curve *c, int kind, uint64_t hash)
{
    return hash <= UINT64_MAX >> c->halvings[kind];
}

/* The pieces that stand behind a sampled one. */
static double scale(uint32_t halvings)
{
    return (double)((uint64_t)1 << halvings);
}

static double weight(const struct piece *piece)
{
    return piece->bytes * scale(piece->halvings);
}

/* The piece's newer neighbour, if that is in this segment. */
static uint32_t before(const struct curve *c, uint32_t at, uint8_t segment)
{
    uint32_t newer = c->pieces[at].newer;

    return newer != NONE && c->pieces[newer].segment == segment ? newer : NONE;
}

/* Take a piece out of the list. */
static void unlink_piece(struct curve *c, uint32_t at)
{
    struct piece *piece = &c->pieces[at];

    c->held[piece->segment] -= weight(piece);
    if (c->oldest[piece->segment] == at)
        c->oldest[piece->segment] = before(c, at, piece->segment);
    if (piece->newer != NONE)
        c->pieces[piece->newer].older = piece->older;
    else
        c->newest = piece->older;
    if (piece->older != NONE)
        c->pieces[piece->older].newer = piece->newer;
}

static void forget(struct curve *c, uint32_t at)
{
    struct piece *piece = &c->pieces[at];
    uint32_t *link = bucket(c, piece->hash);

    unlink_piece(c, at);
    while (*link != at)
        link = &c->pieces[*link].next;
    *link = piece->next;
    piece->keys = 0;
    piece->older = c->free[piece->kind];
    c->free[piece->kind] = at;
}

/* Push what a segment has too much of into the next, in so many steps; what the last one has too much of is forgotten. */
static void settle(struct curve *c, uint64_t steps)
{
    for (int segment = 0; segment < SIZES; segment++) {
        for (; c->held[segment] > c->width[segment] && c->oldest[segment] != NONE && steps; steps--) {
            uint32_t at = c->oldest[segment];
            struct piece *piece = &c->pieces[at];

            if (segment == SIZES - 1) {
                forget(c, at);
                continue;
            }
            c->oldest[segment] = before(c, at, segment);
            c->held[segment] -= weight(piece);
            c->held[segment + 1] += weight(piece);
            piece->segment = segment + 1;
            if (c->oldest[segment + 1] == NONE)
                c->oldest[segment + 1] = at;
        }
        if (c->oldest[segment] == NONE)
            c->held[segment] = 0; /* no rest of rounding */
    }
}

/* Look at the next pieces of a kind whose sample was halved: those that are in it no more are forgotten, and what stands
 * behind the others has doubled. */
static void sweep(struct curve *c, int kind, int count)
{
    for (; count-- && c->hand[kind] < begin[kind + 1]; c->hand[kind]++) {
        struct piece *piece = &c->pieces[c->hand[kind]];

        if (!piece->keys)
            continue;
        if (!is_sampled(c, kind, piece->hash)) {
            forget(c, c->hand[kind]);
            continue;
        }
        c->held[piece->segment] -= weight(piece);
        piece->halvings = c->halvings[kind];
        c->held[piece->segment] += weight(piece);
    }
}

/* A free place for a piece that is sampled; NONE where it is not, since there were too many. */
static uint32_t new_place(struct curve *c, int kind, uint64_t hash)
{
    uint32_t at;

    while (!c->free[kind] && c->top[kind] == begin[kind + 1]) {
        if (c->hand[kind] == begin[kind + 1]) {
            c->halvings[kind]++;
            c->hand[kind] = begin[kind];
        }
        sweep(c, kind, 1);
    }
    if (!is_sampled(c, kind, hash))
        return NONE;
    at = c->free[kind];
    if (!at)
        return c->top[kind]++;
    c->free[kind] = c->pieces[at].older;
    return at;
}

static void use(struct curve *c, const struct use *used, uint64_t bytes)
{
    uint32_t at = find(c, used->hash);
    struct piece *piece;

    if (at == NONE) {
        if ((at = new_place(c, used->kind, used->hash)) == NONE)
            return;
        piece = &c->pieces[at];
        piece->hash = used->hash;
        piece->kind = used->kind;
        piece->next = *bucket(c, used->hash);
        *bucket(c, used->hash) = at;
    } else {
        unlink_piece(c, at);
        piece = &c->pieces[at];
    }
    if (used->keys >= piece->keys) { /* else only its beginning was used */
        piece->keys = used->keys;
        piece->last = used->last;
    }
    piece->bytes = bytes * piece->keys < UINT32_MAX ? bytes * piece->keys : UINT32_MAX;
    piece->halvings = c->halvings[piece->kind];
    piece->segment = 0;
    piece->newer = NONE;
    piece->older = c->newest;
    if (c->newest != NONE)
        c->pieces[c->newest].newer = at;
    c->newest = at;
    c->held[0] += weight(piece);
    if (c->oldest[0] == NONE)
        c->oldest[0] = at;
}

/* Note one chain of a request: `count` keys of `key_bytes`, of blocks of `bytes` and `tokens`. The request found the first
 * `run` of them. The engine had the first `own` of them itself: these are used, but not counted. */
void kvoffd_curve_asked(struct curve *c, struct counts *counts, uint64_t group, const uint8_t *keys, uint64_t count,
                        uint64_t key_bytes, uint64_t bytes, uint64_t tokens, uint64_t run, uint64_t own)
{
    uint64_t per = tokens > 1 && tokens < PIECE_TOKENS ? PIECE_TOKENS / tokens : 1; /* keys of a piece, at most */
    uint64_t used = 0, n = 1, pieces = MOST_SMALL + 2 * count / per, mask;

    if (!count) /* there may be no memory yet */
        return;
    counts->found += (run > own ? run - own : 0) * tokens;
    if (pieces > count)
        pieces = count;
    if (pieces > c->room) {
        uint64_t room = 64;
        while (room < pieces)
            room *= 2;
        void *made = malloc(room * (sizeof *c->uses + 2 * sizeof *c->seen));
        if (!made)
            return;
        free(c->uses);
        c->uses = made;
        c->seen = (uint64_t *)(c->uses + room);
        c->nbytes += (room - c->room) * (sizeof *c->uses + 2 * sizeof *c->seen);
        c->room = room;
    }
    for (mask = 63; mask + 1 < 2 * pieces; mask = 2 * mask + 1)
        ;
    memset(c->seen, 0, (mask + 1) * sizeof *c->seen);
    for (uint64_t first = 0, longest = 1; first < count; first += n) {
        const uint8_t *key = keys + first * key_bytes;
        struct use one = {.hash = hash_of(c, group, key, key_bytes)};
        uint32_t at;
        double there, not_own;

        while (2 * longest <= per && PARTS * longest <= first)
            longest *= 2;
        one.keys = n = longest < count - first ? longest : count - first;
        one.kind = first < per ? FIRST : first < NEXT_PIECES * per ? NEXT : REST;
        uint64_t place = one.hash & mask;
        while (c->seen[place] && c->seen[place] != one.hash)
            place = (place + 1) & mask;
        if (c->seen[place]) /* what comes twice counts once */
            continue;
        c->seen[place] = one.hash;
        not_own = first >= own ? n : first + n > own ? first + n - own : 0;
        counts->total[one.kind] += tokens * not_own;
        if (!is_sampled(c, one.kind, one.hash))
            continue;
        one.last = n > 1 ? hash_of(c, group, key + (n - 1) * key_bytes, key_bytes) : one.hash;
        counts->sampled[one.kind] += tokens * not_own * scale(c->halvings[one.kind]);
        if ((at = find(c, one.hash)) != NONE) {
            const struct piece *known = &c->pieces[at];
            if (known->keys < n) /* it has grown, or is another one from somewhere in the middle */
                there = known->last == hash_of(c, group, key + (known->keys - 1) * key_bytes, key_bytes)
                            ? known->keys
                            : known->keys / 2.0;
            else
                there = known->keys == n && known->last != one.last ? n / 2.0 : n;
            there -= n - not_own;
            counts->hits[one.kind][known->segment] += tokens * (there > 0 ? there : 0) * scale(c->halvings[one.kind]);
        }
        c->uses[used++] = one;
    }
    for (int kind = 0; kind < KINDS; kind++)
        sweep(c, kind, SWEPT);
    pieces = used;
    while (used) /* the tail first: it is what an LRU evicts first */
        use(c, &c->uses[--used], bytes);
    settle(c, MOVED + SIZES * pieces);
    c->seen_bytes = 0;
    for (int segment = 0; segment < SIZES; segment++)
        c->seen_bytes += c->held[segment];
}

/* A new curve for these sizes, ascending, in bytes; NULL where there is no memory. */
struct curve *kvoffd_curve_new(const double sizes[SIZES], const uint8_t seed[16])
{
    struct curve *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->nbytes = sizeof *c;
    memcpy(c->seed, seed, sizeof c->seed);
    for (int size = 0; size < SIZES; size++)
        c->width[size] = sizes[size] - (size ? sizes[size - 1] : 0);
    for (int kind = 0; kind < KINDS; kind++) {
        c->top[kind] = begin[kind];
        c->hand[kind] = begin[kind + 1];
    }
    return c;
}

void kvoffd_curve_free(struct curve *c)
{
    free(c->uses);
    free(c);
}
