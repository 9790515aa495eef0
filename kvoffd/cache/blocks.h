/* State of the pool's blocks by slot, and the index that finds them by key: see blocks.c. This header has what
 * recover.c needs too. The record layout is that of pool/slot_table.py; the states are those of states.py.
 */
#ifndef KVOFFD_BLOCKS_H
#define KVOFFD_BLOCKS_H

#include "../pool/slots.h"
#include "../system/slot_index.h"

enum { RECORD = 128, KEY = 32, MAX_RANKS = 64 /* MAX_WORLD_SIZE of messages.py */ };
enum { SEQUENCE = 8, NAMESPACE = 16, GROUP = 20, RANK = 22, FIRST_BLOCK = 24, KEY_BYTES = 26, LENGTH = 28 };
enum { CHECKSUM = 96, CRC = 104, BEFORE = 108, BEFORE_KEY = 112, BEFORE_SUM = 120 };
enum { FREE_RECORD = 0, PAGE = 4096 };
static const uint64_t READY_RECORD = 0x215944414552766B; /* "kvREADY!" */
static const uint64_t BAD_RECORD = 0x2121444142766B21; /* "!kvBAD!!" */
enum { FREE, WRITING, READY, DROPPED = 5, NOT_FIRST }; /* states of a block; of a slot that is not a block's first */
enum { UNWRITTEN, WRITING_SHARD, WRITTEN, SHARD_STATE, UNVERIFIED = 4, CORRUPT = 8 }; /* bits of a shard */

#define READ(record, type, field) ({ type value_; memcpy(&value_, (record) + (field), sizeof value_); value_; })

/* Numbers and bytes of blocks by state: WRITING, READY, DROPPED. */
struct state_counts {
    uint64_t blocks[NOT_FIRST], bytes[NOT_FIRST];
};

/* The blocks of a group, as far as they change. */
struct group_blocks {
    struct state_counts by_state;
    struct state_counts *of_namespace; /* of all groups that its namespace has or had */
    uint32_t oldest, newest; /* of those in the index, in the order in which they were added; NONE if there are none */
    uint64_t retired; /* whether they all count as DROPPED: see Group.retired */
};

/* A group, as namespace.py packs it. */
struct block_group {
    struct group_blocks *own;
    uint32_t number, namespace, index, key_bytes, ranks, pages; /* `pages`: pages of a block's slots */
    struct {
        uint32_t slot_bytes;
        int32_t node;
        uint32_t length; /* bytes of a shard */
    } rank[MAX_RANKS];
};

/* BlockTable of block_table.py has the same fields. */
struct blocks {
    uint64_t sequence; /* highest sequence of any record */
    uint64_t pinned_blocks, pinned_bytes, leased_bytes;
    uint64_t pinned_dropped_bytes; /* those of DROPPED blocks among the pinned ones */
    uint64_t unverified_slots; /* slots with a shard that is UNVERIFIED */
    struct state_counts by_state; /* of all groups */
    uint8_t *records; /* the slot table's */
    uint8_t *state, *shard;
    uint32_t *pins, *leases;
    uint8_t *missing;
    uint32_t *group, *next, *pages, *older, *newer; /* the last two: neighbours of the block in its group */
    uint64_t *misses; /* reasons why keys left: see blocks.c */
    uint64_t *prompt; /* number of the prompt that looked the block up last, or whose store made it */
    /* Results of the last call: bytes or keys, numbers of blocks or slots, pool offsets, and counts. */
    uint8_t *bytes;
    uint32_t *numbers;
    uint64_t *offsets, *counts;
    struct slot_index index;
    uint32_t crc[8][256]; /* CRC-32 of a byte followed by this many zero bytes */
};

static inline uint8_t *record_of(const struct blocks *x, uint32_t slot)
{
    return x->records + (uint64_t)slot * RECORD;
}

static inline const uint8_t *key_of(const struct blocks *x, uint32_t slot)
{
    return record_of(x, slot) + KEY;
}

/* Returns the first bytes of a block's key, up to 8. */
static inline uint64_t key_head(const struct blocks *x, uint32_t slot)
{
    uint64_t head = 0, key_bytes = record_of(x, slot)[KEY_BYTES];

    memcpy(&head, key_of(x, slot), key_bytes < sizeof head ? key_bytes : sizeof head);
    return head;
}

/* Sum of the fields that name the block before a record's own. It has the record's sequence, so that a record which
 * gets another block, perhaps of a release without these fields, names none. */
static inline uint32_t before_sum(const uint8_t *record)
{
    uint64_t mixed = READ(record, uint64_t, SEQUENCE) ^ READ(record, uint64_t, BEFORE_KEY);

    return ~((uint32_t)mixed ^ (uint32_t)(mixed >> 32) ^ READ(record, uint32_t, BEFORE));
}

static inline uint64_t hash(const struct blocks *x, uint32_t group, const uint8_t *key, uint64_t key_bytes)
{
    return hash_of(&x->index, group, key, key_bytes);
}

/* Returns the place of the key's entry, or an empty place. */
static inline uint64_t *find(const struct blocks *x, uint64_t hashed, uint32_t group, const uint8_t *key,
                             uint64_t key_bytes)
{
    uint64_t *place = home(&x->index, hashed);

    for (uint64_t entry; (entry = *place); place++)
        if (entry >> 32 == hashed >> 32 && x->group[slot_of(entry)] == group &&
            !memcmp(key_of(x, slot_of(entry)), key, key_bytes))
            break;
    return place;
}

/* Returns the place of a block's entry, or an empty place. */
static inline uint64_t *place_of(const struct blocks *x, uint32_t block)
{
    const uint8_t *record = record_of(x, block);
    uint64_t key_bytes = record[KEY_BYTES];

    return find(x, hash(x, x->group[block], record + KEY, key_bytes), x->group[block], record + KEY, key_bytes);
}

/* Computes zlib's CRC-32 of records, over the fields that it covers; several at once, to overlap the steps. */
static inline void crcs_of(const struct blocks *x, const uint8_t *records, int count, uint32_t *crcs)
{
    for (int i = 0; i < count; i++)
        crcs[i] = 0xFFFFFFFF;
    for (int field = SEQUENCE; field < CRC; field += 8)
        for (int i = 0; i < count; i++) {
            uint64_t word = READ(records + i * RECORD, uint64_t, field) ^ crcs[i];
            crcs[i] = x->crc[7][word & 255] ^ x->crc[6][word >> 8 & 255] ^ x->crc[5][word >> 16 & 255] ^
                      x->crc[4][word >> 24 & 255] ^ x->crc[3][word >> 32 & 255] ^ x->crc[2][word >> 40 & 255] ^
                      x->crc[1][word >> 48 & 255] ^ x->crc[0][word >> 56];
        }
    for (int i = 0; i < count; i++)
        crcs[i] = ~crcs[i];
}

#endif
