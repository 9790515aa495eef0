/* Blocks of the pool: arrays by the number of a block's first slot, and one hash table for all namespaces that finds a
 * block by its group's number and its key. block_table.py owns the memory; the keys are in the slot table.
 *
 * The order of writes to a record matters, because the process may be killed between any two: see pool/slot_table.py.
 * The fences keep the compiler to it; the CPU keeps to it as far as another process can see.
 *
 * A function that "finds" something writes it into the table's buffers, `bytes`, `numbers`, `offsets` or `counts`, where
 * it stays until the next call. The caller has made the buffers large enough.
 */
#include "blocks.h"

#include <stdatomic.h>

#define WRITE(record, type, field, given) ({ type value_ = (given); memcpy((record) + (field), &value_, sizeof value_); })

/* A word of `misses` holds all but the last four bits of a key's hash, and the reason why the key left. A new word
 * replaces the one in its place. */
enum { MISSES = 1 << 19 /* KNOWN_MISSES of block_table.py */ };
#define REASON 15ULL
enum { PARTIAL = 3, FORGOTTEN = 16 }; /* MissReason in namespace.py: a shard is missing; the word is another key's */
enum { FOUND = 255 }; /* of block_table.py */

static void set_record(uint8_t *record, uint64_t state)
{
    atomic_signal_fence(memory_order_seq_cst);
    __atomic_store_n((uint64_t *)record, state, __ATOMIC_RELEASE); /* one aligned store */
    atomic_signal_fence(memory_order_seq_cst);
}

/* Completes a table whose first fields are set; returns whether there was enough memory. */
int kvoffd_blocks_open(struct blocks *x, const uint64_t seed[2])
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320 & -(crc & 1));
        x->crc[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++)
            x->crc[zeros][byte] = x->crc[zeros - 1][byte] >> 8 ^ x->crc[0][x->crc[zeros - 1][byte] & 255];
    return open_index(&x->index, seed);
}

void kvoffd_blocks_close(struct blocks *x)
{
    close_index(&x->index);
}

/* Writes the hashes of keys, at most TOGETHER, and prefetches their home places. */
static void hash_some(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                      uint64_t *hashed)
{
    for (uint64_t i = 0; i < count; i++) {
        hashed[i] = hash(x, group, keys + i * key_bytes, key_bytes);
        __builtin_prefetch(home(&x->index, hashed[i]));
    }
}

static uint64_t at_most_together(uint64_t count)
{
    return count < TOGETHER ? count : TOGETHER;
}

/* Looks up to TOGETHER concatenated keys up: writes their hashes, states and blocks, NONE for absent keys. */
static void find_some(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                      uint64_t *hashed, uint8_t *states, uint32_t *blocks)
{
    hash_some(x, group, keys, count, key_bytes, hashed);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t entry = *home(&x->index, hashed[i]);
        if (!entry)
            continue;
        __builtin_prefetch(key_of(x, slot_of(entry)));
        __builtin_prefetch(&x->group[slot_of(entry)]);
        __builtin_prefetch(&x->state[slot_of(entry)]);
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t entry = *find(x, hashed[i], group, keys + i * key_bytes, key_bytes);
        blocks[i] = entry ? slot_of(entry) : NONE;
        states[i] = entry ? x->state[slot_of(entry)] : FREE;
    }
}

/* Finds the state and the block of each key. */
void kvoffd_blocks_find(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    uint64_t hashed[TOGETHER];

    for (uint64_t begin = 0; begin < count; begin += TOGETHER)
        find_some(x, group, keys + begin * key_bytes, at_most_together(count - begin), key_bytes, hashed,
                  x->bytes + begin, x->numbers + begin);
}

static void pin(struct blocks *x, uint32_t block)
{
    if (!x->pins[block]++) {
        x->pinned_blocks++;
        x->pinned_bytes += (uint64_t)x->pages[block] * PAGE;
    }
}

/* Pins blocks; a block that occurs several times is pinned as many times. */
void kvoffd_blocks_pin(struct blocks *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        pin(x, blocks[i]);
}

static void lease(struct blocks *x, uint32_t block)
{
    if (!x->leases[block]++)
        x->leased_bytes += (uint64_t)x->pages[block] * PAGE;
    pin(x, block);
}

/* Pins blocks for a lease, as kvoffd_blocks_pin does. */
void kvoffd_blocks_lease(struct blocks *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        lease(x, blocks[i]);
}

/* Removes one pin for each occurrence; finds the blocks that are not pinned any more, and returns how many. */
uint64_t kvoffd_blocks_unpin(struct blocks *x, const uint32_t *blocks, uint64_t count)
{
    uint64_t found = 0;

    for (uint64_t i = 0; i < count; i++) {
        if (i + TOGETHER / 2 < count) {
            __builtin_prefetch(&x->pins[blocks[i + TOGETHER / 2]], 1);
            __builtin_prefetch(&x->pages[blocks[i + TOGETHER / 2]]);
        }
        if (!--x->pins[blocks[i]]) {
            uint64_t bytes = (uint64_t)x->pages[blocks[i]] * PAGE;
            x->pinned_blocks--;
            x->pinned_bytes -= bytes;
            if (x->pinned_dropped_bytes && x->state[blocks[i]] == DROPPED)
                x->pinned_dropped_bytes -= bytes;
            x->numbers[found++] = blocks[i];
        }
    }
    return found;
}

/* Undoes kvoffd_blocks_lease, as kvoffd_blocks_unpin does. */
uint64_t kvoffd_blocks_end_lease(struct blocks *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (i + TOGETHER / 2 < count)
            __builtin_prefetch(&x->leases[blocks[i + TOGETHER / 2]], 1);
        if (!--x->leases[blocks[i]])
            x->leased_bytes -= (uint64_t)x->pages[blocks[i]] * PAGE;
    }
    return kvoffd_blocks_unpin(x, blocks, count);
}

/* Returns the reason why an absent key left; FORGOTTEN if another key has its word, 0 if none has. */
static uint64_t reason_of(const struct blocks *x, uint64_t hashed)
{
    uint64_t there = x->misses[hashed & (MISSES - 1)];

    if (!there)
        return 0;
    return (there ^ hashed) & ~REASON ? FORGOTTEN : there & REASON;
}

/* Result of a lookup: the number of READY keys, and of those before the first other key. */
struct found {
    uint64_t ready, ready_prefix;
};

/* Looks up keys: finds their states, behind these the reasons of misses, and the blocks of READY keys, which are leased if
 * `leases`. */
void kvoffd_blocks_lookup(struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                          uint32_t leases)
{
    struct found *found = (struct found *)x->counts;
    uint8_t *reasons = x->bytes + count;
    uint64_t hashed[TOGETHER];
    uint32_t blocks[TOGETHER];

    *found = (struct found){ 0 };
    for (uint64_t begin = 0; begin < count; begin += TOGETHER) {
        uint64_t together = at_most_together(count - begin);
        find_some(x, group, keys + begin * key_bytes, together, key_bytes, hashed, x->bytes + begin, blocks);
        for (uint64_t i = 0; i < together; i++)
            __builtin_prefetch(blocks[i] == NONE ? (void *)&x->misses[hashed[i] & (MISSES - 1)] : &x->pins[blocks[i]]);
        for (uint64_t i = 0; i < together; i++) {
            if (x->bytes[begin + i] == READY) {
                reasons[begin + i] = FOUND;
                found->ready_prefix += found->ready == begin + i;
                x->numbers[found->ready++] = blocks[i];
                if (leases)
                    lease(x, blocks[i]);
            } else
                reasons[begin + i] = blocks[i] == NONE ? reason_of(x, hashed[i]) : PARTIAL;
        }
    }
}

static void append(const struct blocks *x, struct group_blocks *own, uint32_t block)
{
    x->older[block] = own->newest;
    x->newer[block] = NONE;
    *(own->newest == NONE ? &own->oldest : &x->newer[own->newest]) = block;
    own->newest = block;
}

static void take_out(const struct blocks *x, struct group_blocks *own, uint32_t block)
{
    uint32_t older = x->older[block], newer = x->newer[block];

    *(older == NONE ? &own->oldest : &x->newer[older]) = newer;
    *(newer == NONE ? &own->newest : &x->older[newer]) = older;
}

/* Moves blocks of a group from the counts of one state to those of another. FREE ones have no count that is read. */
static void count_as(struct blocks *x, const struct block_group *g, uint32_t before, uint32_t after, uint64_t blocks)
{
    struct state_counts *counts[] = { &g->own->by_state, g->own->of_namespace, &x->by_state };
    uint64_t bytes = blocks * g->pages * PAGE;

    for (int i = 0; i < 3; i++) {
        counts[i]->blocks[before] -= blocks;
        counts[i]->blocks[after] += blocks;
        counts[i]->bytes[before] -= bytes;
        counts[i]->bytes[after] += bytes;
    }
}

/* Changes the state of a block with slots, and the counts. */
static void set_state(struct blocks *x, const struct block_group *g, uint32_t block, uint32_t state)
{
    count_as(x, g, g->own->retired ? DROPPED : x->state[block], state, 1);
    x->state[block] = state;
}

/* Counts all blocks of a group as DROPPED from now on. */
void kvoffd_blocks_retire(struct blocks *x, const struct block_group *g)
{
    count_as(x, g, WRITING, DROPPED, g->own->by_state.blocks[WRITING]);
    count_as(x, g, READY, DROPPED, g->own->by_state.blocks[READY]);
    g->own->retired = 1;
}

/* Completes READY blocks of a group that recover.c has put into the index, the oldest first. */
void kvoffd_blocks_add_recovered(struct blocks *x, const struct block_group *g, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        x->pages[blocks[i]] = g->pages;
        append(x, g->own, blocks[i]);
    }
    count_as(x, g, FREE, READY, count);
}

/* Finds up to `count` of the oldest blocks of a group among the first `seen`; if `unpinned`, only READY, unpinned ones,
 * and the others become its newest, as they are in use. Returns how many. */
uint64_t kvoffd_blocks_oldest(struct blocks *x, const struct block_group *g, uint64_t count, uint64_t seen, uint32_t unpinned)
{
    uint32_t next = g->own->oldest, last = g->own->newest, found = 0, block = NONE;

    while (block != last && found < count && seen--) {
        block = next;
        next = x->newer[block];
        if (!unpinned || (x->state[block] == READY && !x->pins[block])) {
            x->numbers[found++] = block;
        } else if (block != last) {
            take_out(x, g->own, block);
            append(x, g->own, block);
        }
    }
    return found;
}

/* Makes WRITING blocks of a group for absent keys in free slots, [count][ranks]. Their records name the namespace and the
 * group already. Returns how many: fewer if a key is present, or a slot is not free. */
static uint64_t enter(struct blocks *x, const struct block_group *g, const uint32_t *slots, uint64_t count,
                      const uint8_t *keys)
{
    uint64_t hashes[TOGETHER];

    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * g->key_bytes;
        const uint32_t *of_block = slots + i * g->ranks;
        if (i % TOGETHER == 0) {
            uint64_t together = at_most_together(count - i);
            hash_some(x, g->number, key, together, g->key_bytes, hashes);
            for (uint64_t at = 0; at < together * g->ranks; at++) {
                __builtin_prefetch(record_of(x, of_block[at]), 1);
                __builtin_prefetch(&x->next[of_block[at]], 1);
                __builtin_prefetch(&x->pins[of_block[at]]);
            }
        }
        uint64_t hashed = hashes[i % TOGETHER];
        if (*find(x, hashed, g->number, key, g->key_bytes))
            return i;
        for (uint64_t rank = 0; rank < g->ranks; rank++) {
            uint32_t slot = of_block[rank];
            uint8_t *record = record_of(x, slot);
            if (READ(record, uint64_t, 0) != FREE_RECORD || x->state[slot] != FREE || x->pins[slot])
                return i;
            WRITE(record, uint32_t, NAMESPACE, g->namespace);
            WRITE(record, uint16_t, GROUP, g->index);
            WRITE(record, uint16_t, RANK, rank);
            record[KEY_BYTES] = g->key_bytes;
            memcpy(record + KEY, key, g->key_bytes);
            x->group[slot] = g->number;
            x->next[slot] = of_block[rank + 1 < g->ranks ? rank + 1 : 0];
            x->shard[slot] = UNWRITTEN;
            if (rank)
                x->state[slot] = NOT_FIRST;
        }
        set_state(x, g, of_block[0], WRITING);
        x->missing[of_block[0]] = g->ranks;
        x->pages[of_block[0]] = g->pages;
        append(x, g->own, of_block[0]);
        *new_place(&x->index, hashed) = entry_of(hashed, of_block[0]);
    }
    return count;
}

/* Makes blocks for up to `count` absent keys in free slots, preferably on each rank's node. If one rank gets no slot
 * because other slot sizes have taken the free regions, tries half as many. Finds the slots, [blocks][ranks], and
 * returns how many blocks; NONE if a key is present. */
uint64_t kvoffd_blocks_make(struct blocks *x, struct slots *slots, const struct block_group *g, const uint8_t *keys,
                            uint64_t count)
{
    uint64_t found[MAX_RANKS], least, first;

    for (;; count /= 2) {
        least = count;
        for (uint64_t rank = 0; rank < g->ranks; rank++) {
            found[rank] = kvoffd_slots_take(slots, g->rank[rank].slot_bytes, count, g->rank[rank].node,
                                            x->numbers + rank, g->ranks);
            least = found[rank] < least ? found[rank] : least;
        }
        first = found[0];
        for (uint64_t rank = 0; rank < g->ranks; rank++)
            while (found[rank] > least)
                free_slot(slots, x->numbers[--found[rank] * g->ranks + rank]);
        if (least || !first || count <= 1)
            return enter(x, g, x->numbers, least, keys) == least ? least : NONE;
    }
}

/* Seals a record once all fields after its state are written. */
static void seal(const struct blocks *x, uint8_t *record)
{
    uint32_t crc;

    atomic_signal_fence(memory_order_seq_cst);
    crcs_of(x, record, 1, &crc);
    WRITE(record, uint32_t, CRC, crc);
}

/* Names the block before another one in their prompt in the other's record, whose sequence is set: see recover.c. */
static void name_before(const struct blocks *x, uint32_t block, uint32_t before)
{
    uint8_t *record = record_of(x, block);

    WRITE(record, uint32_t, BEFORE, before);
    WRITE(record, uint64_t, BEFORE_KEY, key_head(x, before));
    WRITE(record, uint32_t, BEFORE_SUM, before_sum(record));
}

/* Names before each block of a chain, root first, the one before it. */
void kvoffd_blocks_record_chain(const struct blocks *x, const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++)
        name_before(x, blocks[i], blocks[i - 1]);
}

/* Marks shards of a group as complete, from the last to the first, with rising sequences. `first_blocks` may be NULL
 * for 0. Of each of `chain_count` chains, the first at 0, `chains` has the index of its first block and the block before
 * that, or NONE; without chains, no block before another is known. Finds the blocks that became complete, in that order,
 * and their keys; returns how many. If a block is not WRITING, changes nothing and returns NONE. */
uint32_t kvoffd_blocks_publish(struct blocks *x, const struct block_group *g, const uint32_t *blocks, const uint32_t *slots,
                               uint64_t count, const uint16_t *first_blocks, const uint64_t *checksums,
                               const uint32_t *chains, uint64_t chain_count)
{
    uint32_t found = 0;
    uint8_t *keys = x->bytes;

    for (uint64_t i = 0; i < count; i++)
        if (x->state[blocks[i]] != WRITING)
            return NONE;
    while (count--) {
        uint8_t *record = record_of(x, slots[count]);
        uint32_t before = chain_count && count ? blocks[count - 1] : NONE;
        if (chain_count && chains[2 * chain_count - 2] == count)
            before = chains[2 * --chain_count + 1];
        WRITE(record, uint64_t, SEQUENCE, ++x->sequence);
        WRITE(record, uint16_t, FIRST_BLOCK, first_blocks ? first_blocks[count] : 0);
        WRITE(record, uint32_t, LENGTH, g->rank[READ(record, uint16_t, RANK)].length);
        WRITE(record, uint64_t, CHECKSUM, checksums[count]);
        if (before != NONE && slots[count] == blocks[count]) /* rank 0's */
            name_before(x, blocks[count], before);
        seal(x, record);
        set_record(record, READY_RECORD);
        x->shard[slots[count]] = WRITTEN | (checksums[count] ? 0 : UNVERIFIED);
        x->unverified_slots += !checksums[count];
        if (!--x->missing[blocks[count]]) {
            set_state(x, g, blocks[count], READY);
            x->numbers[found++] = blocks[count];
            memcpy(keys, key_of(x, blocks[count]), g->key_bytes);
            keys += g->key_bytes;
        }
    }
    return found;
}

/* Sets the checksum of a shard that was published without one. A daemon killed here loses the block. */
void kvoffd_blocks_set_checksum(const struct blocks *x, uint32_t slot, uint64_t checksum)
{
    uint8_t *record = record_of(x, slot);

    WRITE(record, uint64_t, CHECKSUM, checksum);
    seal(x, record);
}

static uint32_t slot_of_rank(const struct blocks *x, uint32_t block, uint32_t rank)
{
    while (rank--)
        block = x->next[block];
    return block;
}

/* Marks a rank's shards of blocks as being written: finds their slots and pool offsets. */
void kvoffd_blocks_begin_writes(struct blocks *x, const struct slots *slots, const uint32_t *blocks, uint64_t count,
                                uint32_t rank)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t slot = x->numbers[i] = slot_of_rank(x, blocks[i], rank);
        x->shard[slot] = WRITING_SHARD;
        x->offsets[i] = offset_of(slots, slot);
    }
}

/* Begins a load by a rank. Finds for each key whether the rank can read it from its beginning, the first key from
 * `first_block`. Finds the blocks, behind these the rank's slots of them, and their pool offsets. Pins the blocks if
 * all keys are readable, and returns whether they are. */
int kvoffd_blocks_begin_load(struct blocks *x, const struct slots *slots, uint32_t group, const uint8_t *keys,
                             uint64_t count, uint64_t key_bytes, uint32_t rank, uint32_t first_block)
{
    uint64_t readable = 0;

    kvoffd_blocks_find(x, group, keys, count, key_bytes);
    for (uint64_t i = 0; i < count; i++) {
        int ready = x->bytes[i] == READY;
        uint32_t slot = x->numbers[count + i] = ready ? slot_of_rank(x, x->numbers[i], rank) : NONE;
        x->bytes[i] = ready && (x->shard[slot] & (SHARD_STATE | CORRUPT)) == WRITTEN &&
                      READ(record_of(x, slot), uint16_t, FIRST_BLOCK) <= (i ? 0 : first_block);
        x->offsets[i] = x->bytes[i] ? offset_of(slots, slot) : 0;
        readable += x->bytes[i];
    }
    if (readable == count)
        kvoffd_blocks_pin(x, x->numbers, count);
    return readable == count;
}

/* Returns whether a store is writing a shard of the block. */
static int being_written(const struct blocks *x, uint32_t block)
{
    uint32_t at = block;

    do {
        if ((x->shard[at] & SHARD_STATE) == WRITING_SHARD)
            return 1;
        at = x->next[at];
    } while (at != block);
    return 0;
}

/* Result for blocks that left the index. */
struct ended {
    uint64_t slots, corrupt; /* slots that their blocks have left; of these, the CORRUPT ones, which do not become FREE */
};

/* Ends a DROPPED block of a group that is not in use, and finds its slots; those that are CORRUPT stay marked. */
static void end_dropped(struct blocks *x, const struct block_group *g, uint32_t block)
{
    struct ended *ended = (struct ended *)x->counts;
    uint32_t at = block;

    if (x->state[block] != DROPPED || x->pins[block] || being_written(x, block))
        return;
    set_state(x, g, block, FREE);
    do {
        uint32_t next = x->next[at];
        x->numbers[ended->slots++] = at;
        x->unverified_slots -= (x->shard[at] & UNVERIFIED) != 0;
        ended->corrupt += (x->shard[at] & CORRUPT) != 0;
        x->state[at] = x->shard[at] & CORRUPT ? NOT_FIRST : FREE; /* NOT_FIRST: no new block may get it */
        x->shard[at] &= CORRUPT;
        at = next;
    } while (at != block);
}

/* Ends DROPPED blocks of a group that are not in use. */
void kvoffd_blocks_end_dropped(struct blocks *x, const struct block_group *g, const uint32_t *blocks, uint64_t count)
{
    *(struct ended *)x->counts = (struct ended){ 0 };
    for (uint64_t i = 0; i < count; i++)
        end_dropped(x, g, blocks[i]);
}

static void record_miss(const struct blocks *x, uint64_t hashed, uint64_t reason)
{
    x->misses[hashed & (MISSES - 1)] = (hashed & ~REASON) | reason;
}

/* Prefetches what taking blocks out of the index needs, and writes the hashes of their keys; at most TOGETHER blocks. */
static void fetch_indexed(const struct blocks *x, const struct block_group *g, const uint32_t *blocks, uint64_t count,
                          uint64_t *hashed)
{
    for (uint64_t i = 0; i < count; i++) {
        __builtin_prefetch(record_of(x, blocks[i]));
        __builtin_prefetch(key_of(x, blocks[i]) + g->key_bytes - 1);
        __builtin_prefetch(&x->older[blocks[i]]);
        __builtin_prefetch(&x->newer[blocks[i]]);
        __builtin_prefetch(&x->next[blocks[i]]);
        __builtin_prefetch(&x->pins[blocks[i]]);
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t older = x->older[blocks[i]], newer = x->newer[blocks[i]];
        hashed[i] = hash(x, g->number, key_of(x, blocks[i]), g->key_bytes);
        __builtin_prefetch(home(&x->index, hashed[i]), 1);
        __builtin_prefetch(&x->misses[hashed[i] & (MISSES - 1)], 1);
        if (older != NONE)
            __builtin_prefetch(&x->newer[older], 1);
        if (newer != NONE)
            __builtin_prefetch(&x->older[newer], 1);
    }
}

/* Takes blocks of a group out of the index, and finds their keys. They become DROPPED, are not recovered by the next
 * daemon, and end if not in use. Remembers `reason` if not 0. Returns how many: fewer if one is not in the index. */
uint64_t kvoffd_blocks_drop(struct blocks *x, const struct block_group *g, const uint32_t *blocks, uint64_t count,
                            uint64_t reason)
{
    uint64_t hashed[TOGETHER];
    uint8_t *keys = x->bytes;

    *(struct ended *)x->counts = (struct ended){ 0 };
    for (uint64_t i = 0; i < count; i++) {
        uint32_t block = blocks[i], at = block;
        if (i % TOGETHER == 0)
            fetch_indexed(x, g, blocks + i, at_most_together(count - i), hashed);
        const uint8_t *key = key_of(x, block);
        uint64_t *entry = find(x, hashed[i % TOGETHER], g->number, key, g->key_bytes);
        if (!*entry || slot_of(*entry) != block)
            return i;
        remove_at(&x->index, entry);
        take_out(x, g->own, block);
        memcpy(keys, key, g->key_bytes);
        keys += g->key_bytes;
        if (reason)
            record_miss(x, hashed[i % TOGETHER], reason);
        set_state(x, g, block, DROPPED);
        if (x->pins[block])
            x->pinned_dropped_bytes += (uint64_t)g->pages * PAGE;
        do {
            set_record(record_of(x, at), x->shard[at] & CORRUPT ? BAD_RECORD : FREE_RECORD);
            at = x->next[at];
        } while (at != block);
        end_dropped(x, g, block);
    }
    return count;
}

/* Drops blocks of a group and makes blocks for absent keys in their slots: finds the keys of the dropped blocks, and
 * the slots, [count][ranks]. Returns how many it made: fewer if a block was in use or a key is present. */
uint64_t kvoffd_blocks_replace(struct blocks *x, const struct block_group *g, const uint32_t *blocks, uint64_t count,
                               const uint8_t *keys, uint64_t reason)
{
    const struct ended *ended = (struct ended *)x->counts;

    if (kvoffd_blocks_drop(x, g, blocks, count, reason) < count)
        return 0;
    if (ended->slots < count * g->ranks || ended->corrupt)
        return 0;
    return enter(x, g, x->numbers, count, keys);
}

/* Returns the number of the group of all the blocks; 0 if they have none in common, or `unpinned` and one is pinned. */
uint32_t kvoffd_blocks_common_group(const struct blocks *x, const uint32_t *blocks, uint64_t count, uint32_t unpinned)
{
    for (uint64_t i = 0; i < count; i++)
        if (x->group[blocks[i]] != x->group[blocks[0]] || (unpinned && x->pins[blocks[i]]))
            return 0;
    return count ? x->group[blocks[0]] : 0;
}

/* State of choosing the blocks to evict for a group. `missing` is 0 for READY blocks, so that it can hold the marks. */
enum { CHOSEN = 1, PASSED, REGIONS_COMPARED = 16 };
struct choice {
    struct blocks *x;
    const struct slots *slots;
    uint64_t older_than; /* of the blocks that `order` does not have, only those of older prompts go with a region */
    const uint32_t *hints, *retentions; /* by block, the number of its hint; numbers of hints that retain, ascending */
    uint64_t count_retentions;
    uint64_t sizes, found, most_found, passed_pages, met;
    struct {
        uint64_t bytes;
        int64_t lacking; /* slots */
    } size[MAX_RANKS];
    uint32_t *passed; /* by region, slots of blocks that were skipped and are not chosen */
    uint32_t *regions, *is_met; /* regions in which a block was skipped, in that order; by region, whether it is one */
};

static int64_t *lacking_of(struct choice *c, uint32_t slot)
{
    uint64_t bytes = c->slots->slot_bytes[slot / c->slots->slots_per_region];

    for (uint64_t i = 0; i < c->sizes; i++)
        if (c->size[i].bytes == bytes)
            return &c->size[i].lacking;
    return NULL;
}

static int lacks(const struct choice *c)
{
    for (uint64_t i = 0; i < c->sizes; i++)
        if (c->size[i].lacking > 0)
            return 1;
    return 0;
}

static uint64_t used_in(const struct slots *slots, uint64_t region)
{
    return slots_in(slots, region, slots->slot_bytes[region]) - slots->free[region];
}

static void choose(struct choice *c, uint32_t block)
{
    struct blocks *x = c->x;
    uint32_t at = block;

    if (x->missing[block] == CHOSEN)
        return;
    if (x->missing[block] == PASSED) {
        c->passed_pages -= x->pages[block];
        do
            c->passed[at / c->slots->slots_per_region]--;
        while ((at = x->next[at]) != block);
    }
    x->missing[block] = CHOSEN;
    x->numbers[c->found++] = block;
}

/* Chooses a block if a slot of it has a size that is still lacking; returns whether it did. */
static int choose_useful(struct choice *c, uint32_t block)
{
    int64_t *lacking;
    uint32_t at = block;
    int useful = 0;

    do
        useful |= (lacking = lacking_of(c, at)) && *lacking > 0;
    while ((at = c->x->next[at]) != block);
    if (!useful)
        return 0;
    do
        if ((lacking = lacking_of(c, at)))
            --*lacking;
    while ((at = c->x->next[at]) != block);
    choose(c, block);
    return 1;
}

static void skip(struct choice *c, uint32_t block)
{
    uint32_t at = block;

    c->x->missing[block] = PASSED;
    c->passed_pages += c->x->pages[block];
    do {
        uint64_t region = at / c->slots->slots_per_region;
        c->passed[region]++;
        if (!c->is_met[region]++)
            c->regions[c->met++] = region;
    } while ((at = c->x->next[at]) != block);
}

/* Returns the block that a slot belongs to; the slot itself if it has none. */
static uint32_t block_of(const struct blocks *x, uint32_t slot)
{
    while (x->state[slot] == NOT_FIRST && x->group[slot])
        slot = x->next[slot];
    return slot;
}

static int is_retained(const struct choice *c, uint32_t block)
{
    uint32_t number = c->hints[block];
    uint64_t first = 0, end = c->count_retentions;

    while (number && first < end) {
        uint64_t middle = (first + end) / 2;
        if (c->retentions[middle] == number)
            return 1;
        *(c->retentions[middle] < number ? &first : &end) = middle + (c->retentions[middle] < number);
    }
    return 0;
}

/* Returns whether all blocks of a region can be evicted: those that were skipped or chosen, and, unless `met_only`, others
 * that nothing protects. */
static int can_go(const struct choice *c, uint64_t region, int met_only)
{
    const struct slots *slots = c->slots;
    const struct blocks *x = c->x;
    uint64_t first = region * slots->slots_per_region, count = slots_in(slots, region, slots->slot_bytes[region]);

    for (uint64_t slot = first; slot < first + count; slot++) {
        uint32_t block = block_of(x, slot);
        if (!slots->in_use[slot] || (x->state[block] == READY && x->missing[block])) /* CHOSEN or PASSED */
            continue;
        if (met_only || x->state[block] != READY || x->pins[block] || x->prompt[block] >= c->older_than ||
            is_retained(c, block))
            return 0;
    }
    return c->found + count <= c->most_found;
}

/* Chooses all blocks of a region: of the first REGIONS_COMPARED with skipped blocks, the one of which the largest part was
 * skipped among those that can go. Returns whether there is one. */
static int choose_region(struct choice *c, int met_only)
{
    const struct slots *slots = c->slots;
    uint64_t best = NONE, compared = 0, most = 0;

    for (uint64_t at = 0; at < c->met && compared < REGIONS_COMPARED; at++) {
        uint64_t region = c->regions[at];
        if (!c->passed[region])
            continue;
        compared++;
        if ((best == NONE || c->passed[region] * used_in(slots, best) > c->passed[best] * used_in(slots, region)) &&
            can_go(c, region, met_only))
            best = region;
    }
    if (best == NONE)
        return 0;
    for (uint64_t i = 0; i < slots_in(slots, best, slots->slot_bytes[best]); i++)
        if (slots->in_use[best * slots->slots_per_region + i])
            choose(c, block_of(c->x, best * slots->slots_per_region + i));
    for (uint64_t i = 1; i < c->sizes; i++) /* a free region gets slots of one size: of that which lacks most */
        most = c->size[i].lacking > c->size[most].lacking ? i : most;
    c->size[most].lacking -= slots_in(slots, best, c->size[most].bytes);
    return 1;
}

/* Finds at most `most_found` blocks to evict for `count` blocks of a group: see Victims.for_space. `order` has READY,
 * unpinned blocks; `last`: there are no others. `hints`, `retentions`: see struct choice. Returns how many, and sets
 * counts[0] to whether they are enough; NONE if memory is short. */
uint64_t kvoffd_blocks_choose_victims(struct blocks *x, const struct slots *slots, const struct block_group *g, uint64_t count,
                                  const uint32_t *order, uint64_t blocks, uint64_t most_found, uint32_t last,
                                  uint64_t older_than, const uint32_t *hints, const uint32_t *retentions,
                                  uint64_t count_retentions)
{
    struct choice c = { .x = x, .slots = slots, .most_found = most_found, .older_than = older_than, .hints = hints,
                        .retentions = retentions, .count_retentions = count_retentions };
    uint64_t patience = 0, seen = 0;

    c.passed = calloc(3 * slots->regions, sizeof *c.passed);
    if (!c.passed)
        return NONE;
    c.regions = c.passed + slots->regions;
    c.is_met = c.regions + slots->regions;
    for (uint64_t rank = 0, i; rank < g->ranks; rank++) {
        for (i = 0; i < c.sizes && c.size[i].bytes != g->rank[rank].slot_bytes; i++)
            ;
        c.sizes += i == c.sizes;
        c.size[i].bytes = g->rank[rank].slot_bytes;
        c.size[i].lacking += count;
    }
    for (; seen < blocks && lacks(&c) && c.found < most_found; seen++) {
        if (x->missing[order[seen]] || choose_useful(&c, order[seen]))
            continue;
        skip(&c, order[seen]);
        if (!patience) /* pages to skip before a region goes: those that the first region met holds */
            patience = used_in(slots, c.regions[0]) * slots->slot_bytes[c.regions[0]] / PAGE;
        if (c.passed_pages >= patience && !choose_region(&c, 0))
            patience = 2 * c.passed_pages; /* no region can go: looking again after each block would take long */
    }
    if (last && lacks(&c) && c.passed_pages) /* too little was skipped to cost any other block */
        choose_region(&c, 1);
    x->counts[0] = !lacks(&c);
    while (seen--)
        x->missing[order[seen]] = 0;
    for (uint64_t i = 0; i < c.found; i++)
        x->missing[x->numbers[i]] = 0;
    free(c.passed);
    return c.found;
}

/* Finds the keys of blocks. */
void kvoffd_blocks_keys(const struct blocks *x, const uint32_t *blocks, uint64_t count, uint64_t key_bytes)
{
    for (uint64_t i = 0; i < count; i++) {
        if (i + TOGETHER / 2 < count)
            __builtin_prefetch(key_of(x, blocks[i + TOGETHER / 2]));
        memcpy(x->bytes + i * key_bytes, key_of(x, blocks[i]), key_bytes);
    }
}

enum { PRESENT, ABSENT, JOIN, DUPLICATE, NARROW };

/* Finds the verdict of each key that a rank stores, and the blocks of keys that have one. A key to be written is a
 * DUPLICATE at later numbers. NARROW: the rank's shard begins after `first_blocks` (NULL for 0), and the block is not
 * in use. Returns whether there was enough memory. */
uint64_t kvoffd_blocks_judge(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                       uint32_t rank, const uint16_t *first_blocks)
{
    uint8_t *verdicts = x->bytes;
    uint32_t *blocks = x->numbers;
    uint64_t mask = 63;
    while (mask < 2 * count)
        mask = 2 * mask + 1;
    uint32_t *wanted = calloc(mask + 1, sizeof *wanted); /* hash table of keys to write: their numbers plus 1 */
    uint64_t hashes[TOGETHER];
    if (!wanted)
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * key_bytes;
        if (i % TOGETHER == 0)
            hash_some(x, group, key, at_most_together(count - i), key_bytes, hashes);
        uint64_t hashed = hashes[i % TOGETHER], at = hashed & mask;
        while (wanted[at] && memcmp(keys + (wanted[at] - 1) * key_bytes, key, key_bytes))
            at = (at + 1) & mask;
        blocks[i] = NONE;
        if (wanted[at]) {
            verdicts[i] = DUPLICATE;
            continue;
        }
        uint64_t entry = *find(x, hashed, group, key, key_bytes);
        verdicts[i] = ABSENT;
        if (entry) {
            uint32_t block = blocks[i] = slot_of(entry), slot = slot_of_rank(x, block, rank);
            uint8_t shard = x->shard[slot] & SHARD_STATE;
            verdicts[i] = shard == UNWRITTEN ? JOIN : PRESENT;
            if (shard == WRITTEN && !x->pins[block] && !being_written(x, block) &&
                READ(record_of(x, slot), uint16_t, FIRST_BLOCK) > (first_blocks ? first_blocks[i] : 0))
                verdicts[i] = NARROW;
        }
        if (verdicts[i] != PRESENT)
            wanted[at] = i + 1;
    }
    free(wanted);
    return 1;
}

/* Remembers the reason, 1 to 15, why each of `count` keys left. */
void kvoffd_blocks_record_misses(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes,
                        uint64_t reason)
{
    for (uint64_t i = 0; i < count; i++)
        record_miss(x, hash(x, group, keys + i * key_bytes, key_bytes), reason);
}

/* Finds the reason why each key left, as reason_of does. */
void kvoffd_blocks_reasons(const struct blocks *x, uint32_t group, const uint8_t *keys, uint64_t count, uint64_t key_bytes)
{
    for (uint64_t i = 0; i < count; i++)
        x->bytes[i] = reason_of(x, hash(x, group, keys + i * key_bytes, key_bytes));
}
