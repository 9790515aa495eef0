/* The copy loop of a GPU: splits a plan into steps, submits them to the driver, waits for them.
 *
 * Called by engine.py without the GIL, in a thread that has the GPU's context.
 */
#include <stddef.h>
#include <stdint.h>

enum { ROWS = 1, BATCH, COPY, RECORD, WAIT, SYNC }; /* numbers of the driver's calls; engine.py has their names */
enum { WAYS = 3 }; /* kinds of copies that a driver may refuse: rows of several pieces, rows of one, batches */

#if !defined(CUDA_VERSION) /* a test compiles this after NVIDIA's cuda.h */
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmemcpyAttributes_st CUmemcpyAttributes;
enum { CU_MEMORYTYPE_UNIFIED = 4 };
typedef struct {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
#endif
/* Limit of the driver for the distance between rows. */
enum { MAX_PITCH = INT32_MAX };

typedef CUresult copy_call(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
typedef CUresult rows_call(const CUDA_MEMCPY2D *rows, CUstream stream);
typedef CUresult batch_call(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count,
                            CUmemcpyAttributes *attributes, size_t *first, size_t attributes_count, CUstream stream);
typedef CUresult batch_call_12080(CUdeviceptr *to, CUdeviceptr *from, size_t *size, size_t count,
                                  CUmemcpyAttributes *attributes, size_t *first, size_t attributes_count,
                                  size_t *fail_index, CUstream stream);
typedef CUresult record_call(CUevent event, CUstream stream);
typedef CUresult wait_call(CUevent event);
typedef CUresult sync_call(CUstream stream);

/* One stream and its current plan. engine.py has the same structure. */
struct gpu_copying {
    copy_call *copy;
    rows_call *rows; /* NULL if not supported */
    void *batch;     /* NULL if not supported */
    record_call *record;
    wait_call *wait;
    sync_call *sync;
    CUmemcpyAttributes *attributes; /* of all copies of a batch */
    uint64_t has_fail_index;        /* the batch call is that of 12.8 */
    CUstream stream;
    const CUevent *event; /* [in_flight] */
    uint64_t in_flight;   /* limit of steps in flight */

    const uint8_t *pinned; /* whether each chunk of the pool is pinned, beginning with chunk `first_chunk` */
    uint64_t chunk_bytes, first_chunk;
    uint64_t from_pool; /* whether the sources are in the pool; else the destinations are */
    uint64_t step_bytes, step_pieces;
    uint64_t rows_bytes, fewest_rows; /* smaller pieces are copied as rows, if there are at least this many */
    uint64_t most_rows;               /* limit of one copy; 1 once more were refused */
    CUdeviceptr *to, *from;           /* [step_pieces] the batch */
    size_t *sizes;

    const uint64_t *destination, *source, *size; /* [pieces] */
    const uint64_t *allocation; /* [allocations] addresses of the engine's, ascending: drivers refuse rows across several */
    uint64_t pieces, allocations;

    uint64_t piece, piece_done; /* the next piece, and the bytes of it that were submitted */
    uint64_t next_event, steps; /* steps in flight; the oldest ends with event next_event - steps */
    uint64_t refusals, refused[WAYS], refused_status[WAYS]; /* refused calls, which single copies replaced for good */
    uint64_t failed, status;    /* the call that failed, and its status; then the plan is not copied */
    uint64_t lost;              /* error of the wait for the steps in flight after a failure: the context is lost */
};

static int fail(struct gpu_copying *c, int call, int status)
{
    if (status)
        c->failed = call, c->status = status;
    return status;
}

static int copy_one(struct gpu_copying *c, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return fail(c, COPY, c->copy(to, from, size, c->stream));
}

static void record_refusal(struct gpu_copying *c, int call, int status)
{
    c->refused[c->refusals] = call;
    c->refused_status[c->refusals++] = status;
}

/* Copies the batch in `to`, `from` and `sizes`. */
static int copy_batch(struct gpu_copying *c, uint64_t count)
{
    size_t first = 0, fail_index = 0;
    int status;

    if (c->has_fail_index)
        status = ((batch_call_12080 *)c->batch)(c->to, c->from, c->sizes, count, c->attributes, &first, 1,
                                                &fail_index, c->stream);
    else
        status = ((batch_call *)c->batch)(c->to, c->from, c->sizes, count, c->attributes, &first, 1, c->stream);
    if (!status)
        return 0;
    /* Copying a piece twice is harmless, so all are copied again. */
    for (uint64_t i = 0; i < count; i++)
        if (copy_one(c, c->to[i], c->from[i], c->sizes[i]))
            return 1;
    record_refusal(c, BATCH, status); /* single copies work, so only the batch was refused */
    c->batch = NULL;
    return 0;
}

/* Returns the address of the engine's next allocation after the one that contains this address. */
static uint64_t allocation_end(const struct gpu_copying *c, uint64_t address)
{
    uint64_t low = 0, high = c->allocations;

    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (c->allocation[middle] > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low < c->allocations ? c->allocation[low] : UINT64_MAX;
}

/* Returns how many pieces from the next one on can be rows of one copy: they have equal sizes and distances on both sides,
 * are in one allocation, and end before `pool_end`. Layers of a block may be so, or a layer of several blocks. */
static uint64_t count_rows(const struct gpu_copying *c, uint64_t most, uint64_t pool_end)
{
    const uint64_t *to = c->destination + c->piece, *from = c->source + c->piece, *size = c->size + c->piece;
    const uint64_t *pool = c->from_pool ? from : to, *engine = c->from_pool ? to : from;
    uint64_t rows = 1, engine_end = allocation_end(c, *engine);

    if (most > c->pieces - c->piece)
        most = c->pieces - c->piece;
    if (most > c->most_rows)
        most = c->most_rows;
    if (most < 2 || to[1] - to[0] > MAX_PITCH || from[1] - from[0] > MAX_PITCH || to[1] - to[0] < *size ||
        from[1] - from[0] < *size)
        return 1;
    while (rows < most && size[rows] == *size && to[rows] - to[rows - 1] == to[1] - to[0] &&
           from[rows] - from[rows - 1] == from[1] - from[0] && pool[rows] + *size <= pool_end && engine[rows] < engine_end)
        rows++;
    return rows;
}

/* Copies `rows` pieces from the next one on as rows of one copy. If it is 1, copies `size` bytes as two rows: the driver
 * would treat a single row as a small piece. */
static int copy_rows(struct gpu_copying *c, uint64_t rows, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    const uint64_t *destination = c->destination + c->piece, *source = c->source + c->piece;
    uint64_t parts = rows == 1 && size % 2 == 0 ? 2 : 1;
    CUDA_MEMCPY2D all = {
        .srcMemoryType = CU_MEMORYTYPE_UNIFIED,
        .srcDevice = from,
        .srcPitch = rows > 1 ? source[1] - source[0] : size / parts,
        .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
        .dstDevice = to,
        .dstPitch = rows > 1 ? destination[1] - destination[0] : size / parts,
        .WidthInBytes = size / parts,
        .Height = rows * parts,
    };
    int status = c->rows(&all, c->stream);

    if (!status)
        return 0;
    for (uint64_t i = 0; i < rows; i++)
        if (copy_one(c, to + i * all.dstPitch, from + i * all.srcPitch, size))
            return 1;
    record_refusal(c, ROWS, status);
    if (rows > 1)
        c->most_rows = 1;
    else
        c->rows = NULL;
    return 0;
}

/* Submits the next step and its event. A piece is split at the end of a chunk, and if it is longer than a step. */
static void launch_step(struct gpu_copying *c)
{
    uint64_t count = 0, nbytes = 0;

    for (uint64_t taken = 0; c->piece < c->pieces && taken < c->step_pieces;) {
        uint64_t to = c->destination[c->piece] + c->piece_done, from = c->source[c->piece] + c->piece_done;
        uint64_t pool = c->from_pool ? from : to, size = c->size[c->piece] - c->piece_done, rows = 0;
        uint64_t chunk = pool / c->chunk_bytes, chunk_end = (chunk + 1) * c->chunk_bytes;
        if (size > c->step_bytes)
            size = c->step_bytes;
        if (size > chunk_end - pool)
            size = chunk_end - pool;
        if (taken && nbytes + size > c->step_bytes)
            break;
        int pinned = __atomic_load_n(c->pinned + (chunk - c->first_chunk), __ATOMIC_RELAXED);
        if (pinned && c->rows && size < c->rows_bytes) {
            uint64_t most = (c->step_bytes - nbytes) / size;
            if (most > c->step_pieces - taken)
                most = c->step_pieces - taken;
            rows = size == c->size[c->piece] ? count_rows(c, most, chunk_end) : 1;
        }
        if (rows && rows >= c->fewest_rows) {
            if (copy_rows(c, rows, to, from, size))
                return;
        } else {
            rows = 1;
            if (pinned && c->batch)
                c->to[count] = to, c->from[count] = from, c->sizes[count++] = size;
            else if (copy_one(c, to, from, size))
                return;
        }
        taken += rows;
        nbytes += rows * size;
        c->piece_done += size;
        if (c->piece_done == c->size[c->piece])
            c->piece += rows, c->piece_done = 0;
    }
    if (count && copy_batch(c, count))
        return;
    if (fail(c, RECORD, c->record(c->event[c->next_event], c->stream)))
        return;
    c->next_event = (c->next_event + 1) % c->in_flight;
    c->steps++;
}

static void wait_oldest(struct gpu_copying *c)
{
    uint64_t oldest = (c->next_event + c->in_flight - c->steps) % c->in_flight;

    c->steps--;
    fail(c, WAIT, c->wait(c->event[oldest]));
}

/* Copies until all is copied, `stop` is set or a call fails. No step is in flight then, unless `lost` is set. */
void kvoffd_gpu_copy(struct gpu_copying *c, const uint32_t *stop)
{
    c->piece = c->piece_done = c->next_event = c->steps = 0;
    c->refusals = c->failed = c->status = c->lost = 0;
    while (c->piece < c->pieces && !c->failed && !__atomic_load_n(stop, __ATOMIC_RELAXED)) {
        if (c->steps == c->in_flight)
            wait_oldest(c);
        else
            launch_step(c);
    }
    while (c->steps && !c->failed)
        wait_oldest(c);
    if (c->failed)
        c->lost = c->sync(c->stream);
}
