/* Calls of a driver that copies nothing and counts: what is left of a lane's time is the daemon's own.
 *
 * See lane_ceiling.py. A stream is a number below STREAMS.
 */
#include <stddef.h>
#include <stdint.h>

enum { STREAMS = 128 };

static struct {
    uint64_t bytes, pieces, calls, unused[13]; /* cache lines of its own */
} counts[STREAMS];

int kvoffd_count_copy(unsigned long long to, unsigned long long from, size_t size, void *stream)
{
    (void)to, (void)from;
    counts[(uintptr_t)stream].bytes += size;
    counts[(uintptr_t)stream].pieces++;
    counts[(uintptr_t)stream].calls++;
    return 0;
}

/* Reads what a driver must read of each piece. */
int kvoffd_count_batch(unsigned long long *to, unsigned long long *from, size_t *size, size_t count, void *attributes,
                       size_t *first, size_t attributes_count, void *stream)
{
    uint64_t bytes = 0, seen = 0;

    (void)attributes, (void)first, (void)attributes_count;
    for (size_t i = 0; i < count; i++)
        bytes += size[i], seen |= to[i] | from[i];
    counts[(uintptr_t)stream].bytes += bytes;
    counts[(uintptr_t)stream].pieces += seen ? count : 0;
    counts[(uintptr_t)stream].calls++;
    return 0;
}

int kvoffd_count_record(void *event, void *stream)
{
    (void)event, (void)stream;
    return 0;
}

int kvoffd_count_wait(void *event)
{
    (void)event;
    return 0;
}

/* Tells bytes, pieces and calls of a stream. */
void kvoffd_counted(uint64_t stream, uint64_t out[3])
{
    out[0] = counts[stream].bytes, out[1] = counts[stream].pieces, out[2] = counts[stream].calls;
}
