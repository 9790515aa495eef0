/* Recovers the blocks of an earlier daemon in one pass over the records of its slot table. recovery.py calls it and
 * owns all memory; pool/slot_table.py has the record layout.
 */
#include "blocks.h"

enum { MIN_SLOT = 8192, RECORDS_TOGETHER = 4 };
static const uint64_t MAX_SEQUENCE = ((uint64_t)1 << 62) - 1; /* later sequences must remain */

/* _Recovery of recovery.py. Each of the last five arrays can hold all slots. */
struct recovery {
    uint64_t pool_bytes, region_bytes, slots_per_region, regions, group_count;
    const uint64_t *slot_bytes; /* [regions] */
    const struct block_group *const *groups; /* of the known namespaces, ascending by namespace and index */
    struct blocks *blocks;
    uint32_t *heads; /* blocks, complete or not; at the end, the complete ones */
    uint64_t *sequences; /* sequences of the complete ones */
    uint32_t *discarded, *bad, *used; /* records to erase; quarantined slots; slots of complete blocks */
    uint64_t heads_found, discarded_found, bad_found, used_found;
    /* Discarded records: of unknown namespaces below `next_number`, from it on, and of incomplete blocks. */
    uint64_t next_number, reset_found, unwritten_found, incomplete_found;
};

/* Returns the slot size of the slot's region; 0 if there is no such slot. */
static uint64_t size_of(const struct recovery *r, uint64_t slot)
{
    uint64_t region = slot / r->slots_per_region, index = slot % r->slots_per_region, base = region * r->region_bytes;

    if (region >= r->regions)
        return 0;
    uint64_t size = r->slot_bytes[region], left = r->pool_bytes - base;
    uint64_t nbytes = left < r->region_bytes ? left : r->region_bytes;
    return size >= MIN_SLOT && size <= nbytes && size % PAGE == 0 && index < nbytes / size ? size : 0;
}

static const struct block_group *group_of(const struct recovery *r, const uint8_t *record)
{
    uint32_t namespace = READ(record, uint32_t, NAMESPACE), index = READ(record, uint16_t, GROUP);

    for (uint64_t low = 0, high = r->group_count; low < high;) {
        uint64_t middle = (low + high) / 2;
        const struct block_group *g = r->groups[middle];
        if (g->namespace == namespace && g->index == index)
            return g;
        if (g->namespace < namespace || (g->namespace == namespace && g->index < index))
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static uint64_t sequence_of(const struct blocks *x, uint32_t slot)
{
    return READ(record_of(x, slot), uint64_t, SEQUENCE);
}

static uint32_t rank_of(const struct blocks *x, uint32_t slot)
{
    return READ(record_of(x, slot), uint16_t, RANK);
}

/* Accepts a record if it is valid and agrees with its region and namespace; returns whether it did. The slots of a key
 * are linked in a ring, one for each rank, that begins at the slot which the index has. */
static int take(struct recovery *r, const uint8_t *record, uint32_t slot, uint32_t crc)
{
    struct blocks *x = r->blocks;
    const struct block_group *group;
    uint64_t size = size_of(r, slot), length = READ(record, uint32_t, LENGTH);
    uint32_t rank = READ(record, uint16_t, RANK);

    if (READ(record, uint64_t, 0) != READY_RECORD || READ(record, uint32_t, CRC) != crc || !size)
        return 0;
    if (READ(record, uint64_t, SEQUENCE) > MAX_SEQUENCE || !READ(record, uint64_t, CHECKSUM))
        return 0;
    if (!(group = group_of(r, record))) {
        if (READ(record, uint32_t, NAMESPACE) < r->next_number)
            r->reset_found++;
        else
            r->unwritten_found++;
        return 0;
    }
    if (rank >= group->ranks || record[KEY_BYTES] != group->key_bytes)
        return 0;
    if (!length || length != group->rank[rank].length || size != group->rank[rank].slot_bytes)
        return 0;
    const uint8_t *key = record + KEY;
    uint64_t hashed = hash(x, group->number, key, group->key_bytes);
    uint64_t *entry = find(x, hashed, group->number, key, group->key_bytes), found = *entry;
    x->group[slot] = group->number;
    x->state[slot] = NOT_FIRST;
    if (!found) {
        *new_place(&x->index, hashed) = entry_of(hashed, slot);
        x->next[slot] = slot;
        x->missing[slot] = group->ranks;
        r->heads[r->heads_found++] = slot;
        return 1;
    }
    uint32_t head = slot_of(found), before = head;
    do { /* of two slots of one rank, the newer replaces the other in the ring */
        uint32_t there = x->next[before];
        if (rank_of(x, there) == rank) {
            if (sequence_of(x, there) > READ(record, uint64_t, SEQUENCE))
                return 0;
            x->next[slot] = there == before ? slot : x->next[there]; /* alone in the ring, or not */
            if (there != before)
                x->next[before] = slot;
            if (there == head) { /* the ring begins at the new slot; recover_blocks skips the old head */
                *entry = entry_of(hashed, slot);
                x->missing[slot] = x->missing[there];
                r->heads[r->heads_found++] = slot;
            }
            x->state[there] = FREE;
            r->discarded[r->discarded_found++] = there;
            return 1;
        }
        before = there;
    } while (before != head);
    x->next[slot] = x->next[head];
    x->next[head] = slot;
    return 1;
}

/* Prefetches the index place of a record's key. */
static void prefetch(const struct recovery *r, const uint8_t *record)
{
    const struct block_group *group = group_of(r, record);

    if (group && record[KEY_BYTES] == group->key_bytes)
        __builtin_prefetch(home(&r->blocks->index, hash(r->blocks, group->number, record + KEY, group->key_bytes)));
}

/* Checks `count` records; the first belongs to slot `first`. */
void kvoffd_recover_records(struct recovery *r, const uint8_t *records, uint64_t count, uint64_t first)
{
    struct blocks *x = r->blocks;
    uint32_t crcs[RECORDS_TOGETHER];

    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *record = records + i * RECORD;
        uint64_t state = READ(record, uint64_t, 0);
        if (i % RECORDS_TOGETHER == 0) {
            crcs_of(r->blocks, record, count - i < RECORDS_TOGETHER ? count - i : RECORDS_TOGETHER, crcs);
            for (uint64_t ahead = RECORDS_TOGETHER; ahead < 2 * RECORDS_TOGETHER && i + ahead < count; ahead++)
                prefetch(r, record + ahead * RECORD);
        }
        if (state == BAD_RECORD && size_of(r, first + i)) {
            r->bad[r->bad_found++] = first + i;
        } else if (state && !take(r, record, first + i, crcs[i % RECORDS_TOGETHER])) {
            x->state[first + i] = FREE;
            r->discarded[r->discarded_found++] = first + i;
        }
    }
}

/* Returns the block before another one in their prompt, if the other's record names it and it is still there. */
static uint32_t block_before(const struct blocks *x, uint64_t slots, uint32_t block)
{
    const uint8_t *record = record_of(x, block);
    uint32_t before = READ(record, uint32_t, BEFORE);

    if (READ(record, uint32_t, BEFORE_SUM) != before_sum(record) || before >= slots)
        return NONE;
    if (x->state[before] != READY || x->group[before] != x->group[block])
        return NONE;
    return key_head(x, before) == READ(record, uint64_t, BEFORE_KEY) ? before : NONE;
}

/* Orders blocks, the least recently used first: each has those before it in its prompt behind it, however long ago they
 * were stored. `blocks` are ordered by their sequences. `placed` has a zero for each of the table's `slots`. */
void kvoffd_recover_order(const struct blocks *x, uint64_t slots, const uint32_t *blocks, uint64_t count, uint8_t *placed,
                          uint32_t *ordered)
{
    uint64_t left = count;

    while (count--) { /* the newest first. Each block is placed once, so names in a circle end */
        uint32_t *path = ordered; /* blocks that are not placed fill as much of it as is left */
        uint64_t length = 0;
        for (uint32_t at = blocks[count]; at != NONE && !placed[at]; at = block_before(x, slots, at)) {
            placed[at] = 1;
            path[length++] = at;
        }
        left -= length;
        memmove(ordered + left, path, length * sizeof *path);
    }
}

/* Makes blocks of the accepted records, identified by the slot of rank 0; those that lack a rank are discarded. */
void kvoffd_recover_blocks(struct recovery *r)
{
    struct blocks *x = r->blocks;
    uint64_t whole = 0;

    for (uint64_t i = 0; i < r->heads_found; i++) {
        uint32_t head = r->heads[i], slots[MAX_RANKS], at = head, found = 0;
        uint32_t ranks = x->missing[head];
        uint64_t newest = 0;
        if (x->state[head] != NOT_FIRST || !ranks)
            continue; /* another slot replaced it, or the block is done */
        do {
            slots[rank_of(x, at)] = at;
            if (sequence_of(x, at) > newest)
                newest = sequence_of(x, at);
            found++;
            at = x->next[at];
        } while (at != head);
        x->missing[head] = 0;
        if (found < ranks) {
            remove_at(&x->index, place_of(x, head));
            for (at = head; found; found--) {
                x->state[at] = FREE;
                r->discarded[r->discarded_found++] = at;
                r->incomplete_found++;
                at = x->next[at];
            }
            continue;
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            x->next[slots[rank]] = slots[rank + 1 < ranks ? rank + 1 : 0];
            x->shard[slots[rank]] = WRITTEN | UNVERIFIED;
            x->unverified_slots++;
            r->used[r->used_found++] = slots[rank];
        }
        if (slots[0] != head) {
            uint64_t *entry = place_of(x, head);
            *entry = entry_of(*entry, slots[0]);
        }
        x->state[slots[0]] = READY;
        r->heads[whole] = slots[0];
        r->sequences[whole++] = newest;
    }
    r->heads_found = whole;
}
