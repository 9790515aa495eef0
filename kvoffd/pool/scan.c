/* Judges the records of a slot table, many at a time. scan.py calls it and owns all memory; table_format.py has the layout
 * of a record, records.py that of what is found.
 */
#include "../system/key_hash.h"

#include <stdint.h>
#include <string.h>

enum { PAGE = 4096, LEAST_SLOT = 8192, RECORD = 128, MOST_KEY = 64 };
enum { GENERATION = 8, ENTRY_GENERATION = 16, PLACE = 24, HALF = 26, GROUP = 28, RANK = 30, WORLD_SIZE = 32 };
enum { KEY_BYTES = 34, KEY = 35, LENGTH = 100, CHECKSUM = 108, FIRST_BLOCK = 116, CRC = 120 };
enum { TOGETHER = 4 }; /* records; a page has a multiple of that */
enum { MOST_FIRST_BLOCK = UINT16_MAX }; /* as the cache keeps it */
static const uint64_t MOST_GENERATION = ((uint64_t)1 << 62) - 1; /* others can follow */
static const uint64_t READY = 0x215944414552766B; /* "kvREADY!" */

/* What many slots have in common: Kind of records.py. */
struct kind {
    int64_t slot_bytes, length;
    int32_t name;
    uint16_t group, rank, world_size;
    uint8_t key_bytes, has_checksum;
};

/* scan.py has the same structure. The slots whose bytes are whole are described by several arrays, each with room for as
 * many as there are records, and `discarded` too. */
struct scan {
    uint64_t pool_bytes, region_bytes, regions, entries, most_kinds;
    const uint64_t *slot_bytes; /* [regions] of the slots, by region */
    const uint64_t *entry_generations; /* [entries] 0 where a place has no entry */
    const int32_t *names; /* [entries] the namespace that a place names */
    uint64_t *holders; /* [entries] records that name a place */
    struct kind *kinds; /* [most_kinds] */
    uint32_t *kind_places; /* [2 * most_kinds], a power of two: numbers of kinds by their hashes, from 1; 0 for none */
    int64_t *offsets, *generations;
    uint64_t *identities; /* the same for shards of one block, another for others */
    uint32_t *kind_of;
    uint64_t *discarded; /* numbers of the records that are neither free nor of a slot */
    uint64_t slots_found, kinds_found, discarded_found;
    uint64_t seed[2]; /* so that nobody can choose keys that fall together */
    uint32_t crc[8][256]; /* what a byte, and so many zeros behind it, make of a CRC-32 */
};

void kvoffd_scan_prepare(struct scan *s)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320 & -(crc & 1));
        s->crc[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++)
            s->crc[zeros][byte] = s->crc[zeros - 1][byte] >> 8 ^ s->crc[0][s->crc[zeros - 1][byte] & 255];
}

#define READ(type, field) ({ type value; memcpy(&value, record + (field), sizeof value); value; })

/* zlib's CRC-32 of what the records' own are of, 14 words each: of several at once, as each step waits for the one before. */
static void crcs_of(const struct scan *s, const uint8_t *records, uint32_t crcs[TOGETHER])
{
    for (int i = 0; i < TOGETHER; i++)
        crcs[i] = 0xFFFFFFFF;
    for (int field = GENERATION; field < CRC; field += 8)
        for (int i = 0; i < TOGETHER; i++) {
            const uint8_t *at = records + i * RECORD + field;
            uint64_t word;
            memcpy(&word, at, sizeof word);
            word ^= crcs[i];
            crcs[i] = s->crc[7][word & 255] ^ s->crc[6][word >> 8 & 255] ^ s->crc[5][word >> 16 & 255] ^
                      s->crc[4][word >> 24 & 255] ^ s->crc[3][word >> 32 & 255] ^ s->crc[2][word >> 40 & 255] ^
                      s->crc[1][word >> 48 & 255] ^ s->crc[0][word >> 56];
        }
    for (int i = 0; i < TOGETHER; i++)
        crcs[i] = ~crcs[i];
}

/* The number of a kind; `most_kinds` where there are too many. */
static uint32_t number_of(struct scan *s, const struct kind *kind, uint32_t likely)
{
    uint64_t mask = 2 * s->most_kinds - 1, at;

    if (likely < s->kinds_found && !memcmp(&s->kinds[likely], kind, sizeof *kind))
        return likely;
    for (at = key_hash(s->seed[0], s->seed[1], kind, sizeof *kind) & mask; s->kind_places[at]; at = (at + 1) & mask)
        if (!memcmp(&s->kinds[s->kind_places[at] - 1], kind, sizeof *kind))
            return s->kind_places[at] - 1;
    if (s->kinds_found == s->most_kinds)
        return s->most_kinds;
    s->kinds[s->kinds_found] = *kind;
    s->kind_places[at] = ++s->kinds_found;
    return s->kinds_found - 1;
}

/* Takes a record up if it is whole and agrees with its region and the entry of its namespace; returns whether. */
static int take(struct scan *s, const uint8_t *record, uint64_t number, uint32_t crc)
{
    uint64_t half = record[HALF], offset = number * LEAST_SLOT + half * PAGE, region = offset / s->region_bytes;
    uint64_t place = READ(uint16_t, PLACE), generation = READ(uint64_t, GENERATION), length = READ(uint64_t, LENGTH);
    uint64_t found = s->slots_found;
    struct kind kind;

    if (READ(uint64_t, 0) != READY || half >= LEAST_SLOT / PAGE || region >= s->regions || place >= s->entries)
        return 0;
    uint64_t base = region * s->region_bytes, slot_bytes = s->slot_bytes[region];
    if (slot_bytes < LEAST_SLOT || slot_bytes > s->region_bytes || slot_bytes % PAGE || (offset - base) % slot_bytes)
        return 0;
    if (offset + slot_bytes > base + s->region_bytes || offset + slot_bytes > s->pool_bytes / PAGE * PAGE)
        return 0;
    if (found == UINT32_MAX || generation > MOST_GENERATION || length > slot_bytes || record[KEY_BYTES] > MOST_KEY ||
        READ(uint32_t, FIRST_BLOCK) > MOST_FIRST_BLOCK)
        return 0;
    uint64_t entry_generation = READ(uint64_t, ENTRY_GENERATION);
    if (!entry_generation || s->entry_generations[place] != entry_generation || crc != READ(uint32_t, CRC))
        return 0;
    memset(&kind, 0, sizeof kind); /* what lies between fields is compared too */
    kind.slot_bytes = slot_bytes;
    kind.length = length;
    kind.name = s->names[place];
    kind.group = READ(uint16_t, GROUP);
    kind.rank = READ(uint16_t, RANK);
    kind.world_size = READ(uint16_t, WORLD_SIZE);
    kind.key_bytes = record[KEY_BYTES];
    kind.has_checksum = READ(uint64_t, CHECKSUM) != 0;
    s->kind_of[found] = number_of(s, &kind, found ? s->kind_of[found - 1] : 0);
    if (s->kind_of[found] == s->most_kinds)
        return 0;
    s->offsets[found] = offset;
    s->generations[found] = generation;
    uint64_t salt = (uint64_t)kind.name << 32 | (uint64_t)kind.group << 8 | kind.key_bytes;
    s->identities[found] = key_hash(s->seed[0] ^ salt, s->seed[1], record + KEY, kind.key_bytes);
    s->holders[place]++;
    s->slots_found++;
    return 1;
}

/* Judges `count` records, the first of which has this number. */
void kvoffd_scan(struct scan *s, const uint8_t *records, uint64_t count, uint64_t number)
{
    uint32_t crcs[TOGETHER];

    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *record = records + i * RECORD;
        if (i % TOGETHER == 0)
            crcs_of(s, record, crcs);
        if (READ(uint64_t, 0) && !take(s, record, number + i, crcs[i % TOGETHER]))
            s->discarded[s->discarded_found++] = number + i;
    }
}
