/* A CUDA driver without a GPU, for tests: the calls that kvoffd makes, over host memory.

   Device memory is a memfd, so that another process can map it: an IPC handle names the exporter's pid and descriptor.
   Copies happen when an event behind them is waited for, those of a batch in reverse order: who does not wait, or
   relies on an order, finds other bytes. Calls need a current context where the driver's do.

   Every call is counted and logged, can be made to fail and to hang: by the functions stub_*, or in another process by
   the variables STUB_FAIL and STUB_HANG ("cuMemcpyAsync:2:700"; nth 0 means every one), STUB_VERSION, STUB_LOG,
   STUB_DEVICES (how many), STUB_FIRST (which of the machine's is this process's first), STUB_LOSE (a failure sticks to
   the context, so that every call fails until a new one is made). */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NOT_INITIALIZED 3
#define INVALID_DEVICE 101
#define INVALID_CONTEXT 201
#define MAP_FAILED_STATUS 205
#define INVALID_HANDLE 400
#define NOT_FOUND 500
#define GRANULARITY (2u << 20)
#define MANY 4096

typedef uint64_t address_t;
typedef struct { char bytes[64]; } ipc_handle_t;
typedef struct { unsigned type; int id; } location_t;
typedef struct { unsigned order; location_t from, to; unsigned flags; } attributes_t;
typedef struct { address_t to, from; size_t size; } copy_t;
typedef struct { copy_t *copies; size_t count, room, done; } stream_t;
typedef struct { stream_t *stream; size_t until; unsigned flags; } event_t;
typedef struct { char name[48]; int nth, status, hang; } plan_t;
typedef struct { char name[48]; int calls; } count_t;
enum kind { FREE, DEVICE, IPC, VMM, RESERVED, HOST };
typedef struct { enum kind kind; address_t base; size_t size; int fd; int handle_types; } range_t;
typedef struct { char magic[8]; int pid, fd; uint64_t size, serial; } handle_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static plan_t plans[64];
static count_t counts[96];
static range_t ranges[MANY];
static int contexts[16], made_contexts, initialised, released, hanging;
static int version = 12080, devices = 1, first, loses, lost, mig, same_pid_allowed, strict, batch_missing, handle_types = 1;
static char *text;
static size_t text_length, text_room;
static __thread int current = -1;

static void note(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (text_length + length + 1 > text_room) text = realloc(text, text_room = 2 * text_room + 4096);
    memcpy(text + text_length, line, length);
    text[text_length += length] = 0;
    const char *path = getenv("STUB_LOG");
    if (path) {
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) { if (write(fd, line, length) < 0) {} close(fd); }
    }
}

static void add_plan(const char *name, int nth, int status, int hang) {
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        if (!plans[i].name[0]) {
            snprintf(plans[i].name, sizeof plans[i].name, "%s", name);
            plans[i].nth = nth; plans[i].status = status; plans[i].hang = hang;
            return;
        }
}

__attribute__((constructor)) static void start(void) {
    char name[48]; int nth = 0, status = 999;
    const char *value;
    if ((value = getenv("STUB_VERSION"))) version = atoi(value);
    if ((value = getenv("STUB_DEVICES"))) devices = atoi(value);
    if ((value = getenv("STUB_FIRST"))) first = atoi(value);
    if ((value = getenv("STUB_LOSE"))) loses = atoi(value);
    if ((value = getenv("STUB_FAIL")) && sscanf(value, "%47[^:]:%d:%d", name, &nth, &status) >= 1) add_plan(name, nth, status, 0);
    nth = 0;
    if ((value = getenv("STUB_HANG")) && sscanf(value, "%47[^:]:%d", name, &nth) >= 1) add_plan(name, nth, 0, 1);
}

/* Counts the call; 0, or the status it must fail with. Called with the lock held; may let go of it to hang. */
static int enter(const char *name) {
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!counts[i].name[0] || !strcmp(counts[i].name, name)) {
            snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
            counts[i].calls++;
            break;
        }
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        plan_t *plan = plans + i;
        if (strcmp(plan->name, name)) continue;
        if (plan->nth > 1) { plan->nth--; continue; }
        int status = plan->status, hang = plan->hang;
        if (plan->nth == 1) plan->name[0] = 0;
        if (hang) {
            note("%s hangs", name);
            hanging++;
            while (!released) pthread_cond_wait(&wake, &lock);
            hanging--;
            continue;
        }
        note("%s fails", name);
        lost = loses ? status : 0;
        return status;
    }
    return 0;
}

#define ENTER(name) pthread_mutex_lock(&lock); int status = enter(name); if (status) return leave(status);
#define NEED_INIT if (!initialised) return leave(NOT_INITIALIZED);
#define NEED_CONTEXT if (current < 0 || contexts[current] < 1) return leave(INVALID_CONTEXT); if (lost) return leave(lost);
static int leave(int status) { pthread_mutex_unlock(&lock); return status; }

static range_t *find(address_t address, int kinds) {
    for (int i = 0; i < MANY; i++)
        if ((kinds >> ranges[i].kind & 1) && address >= ranges[i].base && address < ranges[i].base + ranges[i].size) return ranges + i;
    return NULL;
}
#define K(kind) (1 << kind)
#define ON_DEVICE (K(DEVICE) | K(IPC) | K(VMM))

static range_t *add(enum kind kind, address_t base, size_t size, int fd) {
    for (int i = 0; i < MANY; i++)
        if (ranges[i].kind == FREE) { ranges[i] = (range_t){kind, base, size, fd, 0}; return ranges + i; }
    return NULL;
}

/* --- for the tests --- */
void stub_fail(const char *name, int nth, int status) { pthread_mutex_lock(&lock); add_plan(name, nth, status, 0); leave(0); }
void stub_hang(const char *name, int nth) { pthread_mutex_lock(&lock); released = 0; add_plan(name, nth, 0, 1); leave(0); }
void stub_release(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) if (plans[i].hang) plans[i].name[0] = 0;
    released = 1; pthread_cond_broadcast(&wake); leave(0);
}
int stub_hanging(void) { pthread_mutex_lock(&lock); int n = hanging; leave(0); return n; }
int stub_calls(const char *name) {
    int calls = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) if (!strcmp(counts[i].name, name)) calls = counts[i].calls;
    leave(0);
    return calls;
}
size_t stub_log(char *out, size_t room) {
    pthread_mutex_lock(&lock);
    size_t length = text_length < room ? text_length : room;
    memcpy(out, text, length);
    leave(0);
    return length;
}
size_t stub_log_length(void) { return text_length; }
int stub_contexts(int device) { return contexts[device]; }
int stub_made_contexts(void) { return made_contexts; }
int stub_ranges(int kind) { int n = 0; pthread_mutex_lock(&lock); for (int i = 0; i < MANY; i++) n += (int)ranges[i].kind == kind; leave(0); return n; }
void stub_set(const char *what, int value) {
    pthread_mutex_lock(&lock);
    if (!strcmp(what, "version")) version = value;
    if (!strcmp(what, "devices")) devices = value;
    if (!strcmp(what, "mig")) mig = value;
    if (!strcmp(what, "same_pid_allowed")) same_pid_allowed = value;
    if (!strcmp(what, "strict")) strict = value;
    if (!strcmp(what, "batch_missing")) batch_missing = value;
    if (!strcmp(what, "handle_types")) handle_types = value;
    leave(0);
}

/* --- devices and contexts --- */
int cuInit(unsigned flags) { ENTER("cuInit") initialised = 1; return leave(flags ? INVALID_VALUE : 0); }
int cuDriverGetVersion(int *out) { *out = version; return 0; }
int cuGetErrorName(int code, const char **out) {
    static const struct { int code; const char *name; } names[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"}, {205, "CUDA_ERROR_MAP_FAILED"}, {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
        {400, "CUDA_ERROR_INVALID_HANDLE"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) { *out = names[i].name; return 0; }
    return INVALID_VALUE;
}
int cuDeviceGetCount(int *out) { ENTER("cuDeviceGetCount") NEED_INIT *out = devices; return leave(0); }
int cuDeviceGet(int *out, int ordinal) { ENTER("cuDeviceGet") if (ordinal >= devices) return leave(INVALID_DEVICE); *out = ordinal; return leave(0); }
int cuDeviceGetUuid(void *out, int device) { ENTER("cuDeviceGetUuid") memset(out, 0x10 + first + device, 16); return leave(0); }
int cuDeviceGetUuid_v2(void *out, int device) { ENTER("cuDeviceGetUuid_v2") memset(out, (mig ? 0x80 : 0x10) + first + device, 16); return leave(0); }
int cuDeviceGetName(char *out, int room, int device) { ENTER("cuDeviceGetName") snprintf(out, room, "Stub %d", device); return leave(0); }
int cuDeviceGetPCIBusId(char *out, int room, int device) { ENTER("cuDeviceGetPCIBusId") snprintf(out, room, "00000000:3B:%02X.0", device); return leave(0); }
int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER("cuDevicePrimaryCtxRetain") NEED_INIT
    if (!contexts[device]++) { made_contexts++; note("context of %d made", device); }
    *out = (void *)(intptr_t)(device + 1);
    return leave(0);
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease_v2")
    if (contexts[device] < 1) return leave(INVALID_CONTEXT);
    if (!--contexts[device]) {
        note("context of %d gone", device);
        if (lost) { lost = 0; for (int i = 0; i < MANY; i++) if (ranges[i].kind == HOST) ranges[i].kind = FREE; }
    }
    return leave(0);
}
int cuCtxSetCurrent(void *context) { ENTER("cuCtxSetCurrent") current = (int)(intptr_t)context - 1; return leave(0); }
int cuCtxGetCurrent(void **out) { *out = (void *)(intptr_t)(current + 1); return 0; }
int cuCtxGetDevice(int *out) { ENTER("cuCtxGetDevice") NEED_CONTEXT *out = current; return leave(0); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER("cuCtxGetStreamPriorityRange") NEED_CONTEXT *least = 0; *greatest = -5; return leave(0); }

/* --- streams, events, copies --- */
int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority") NEED_CONTEXT
    if (flags != 1) return leave(INVALID_VALUE);
    note("stream priority %d", priority);
    *out = calloc(1, sizeof(stream_t));
    return leave(0);
}
int cuStreamDestroy_v2(void *stream) { ENTER("cuStreamDestroy_v2") NEED_CONTEXT free(((stream_t *)stream)->copies); free(stream); return leave(0); }
int cuEventCreate(void **out, unsigned flags) { ENTER("cuEventCreate") NEED_CONTEXT event_t *event = calloc(1, sizeof *event); event->flags = flags; *out = event; return leave(0); }
int cuEventDestroy_v2(void *event) { ENTER("cuEventDestroy_v2") NEED_CONTEXT free(event); return leave(0); }
int cuEventRecord(void *opaque, void *stream) {
    ENTER("cuEventRecord") NEED_CONTEXT
    event_t *event = opaque;
    event->stream = stream; event->until = event->stream->count;
    return leave(0);
}
static void finish(stream_t *stream, size_t last) {
    size_t first = stream->done;
    for (size_t i = last; i > first; i--)
        memcpy((void *)stream->copies[i - 1].to, (void *)stream->copies[i - 1].from, stream->copies[i - 1].size);
    if (last > first) stream->done = last;
}
int cuEventSynchronize(void *opaque) {
    event_t *event = opaque;
    ENTER("cuEventSynchronize") NEED_CONTEXT
    if (event->stream) finish(event->stream, event->until);
    return leave(0);
}
int cuStreamCreate(void **out, unsigned flags) {
    ENTER("cuStreamCreate") NEED_CONTEXT
    if (flags != 1) return leave(INVALID_VALUE);
    *out = calloc(1, sizeof(stream_t));
    return leave(0);
}
int cuStreamSynchronize(void *opaque) {
    stream_t *stream = opaque;
    ENTER("cuStreamSynchronize") NEED_CONTEXT
    finish(stream, stream->count);
    return leave(0);
}
static int push(stream_t *stream, address_t to, address_t from, size_t size) {
    if (!stream) return INVALID_VALUE;
    if (stream->count == stream->room) {
        stream->room = 2 * stream->room + 64;
        stream->copies = realloc(stream->copies, stream->room * sizeof(copy_t));
    }
    stream->copies[stream->count++] = (copy_t){to, from, size};
    return 0;
}
/* As the driver: no copy may lie in two registrations; and, which only we demand, none of a batch in no one. */
static int is_sound(address_t to, address_t from, size_t size, int in_batch) {
    if (!strict) return 1;
    address_t host = find(to, ON_DEVICE) ? from : to, device = find(to, ON_DEVICE) ? to : from;
    range_t *gpu = find(device, ON_DEVICE), *pin = find(host, K(HOST)), *end = find(host + size - 1, K(HOST));
    return gpu && device + size <= gpu->base + gpu->size && pin == end && (pin || !in_batch);
}
int cuMemcpyAsync(address_t to, address_t from, size_t size, void *stream) {
    ENTER("cuMemcpyAsync") NEED_CONTEXT
    note("copy %zu", size);
    if (!is_sound(to, from, size, 0)) return leave(INVALID_VALUE);
    return leave(push(stream, to, from, size));
}
static int batch(address_t *to, address_t *from, size_t *size, size_t count, attributes_t *attributes, size_t *indices, size_t n, void *stream) {
    ENTER("cuMemcpyBatchAsync") NEED_CONTEXT
    if (!count || n != 1 || indices[0] != 0 || attributes->order != 1 || attributes->flags > 1) return leave(INVALID_VALUE);
    if (attributes->from.type || attributes->from.id || attributes->to.type || attributes->to.id) return leave(INVALID_VALUE);
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        if (!is_sound(to[i], from[i], size[i], 1)) return leave(INVALID_VALUE);
        bytes += size[i];
    }
    note("batch %zu of %zu", count, bytes);
    for (size_t i = 0; i < count; i++) push(stream, to[i], from[i], size[i]);
    return leave(0);
}
static int batch_12080(address_t *to, address_t *from, size_t *size, size_t count, attributes_t *attributes, size_t *indices, size_t n, size_t *fail_index, void *stream) {
    int status = batch(to, from, size, count, attributes, indices, n, stream);
    if (status) *fail_index = 0;
    return status;
}
int cuGetProcAddress_v2(const char *symbol, void **out, int wanted, uint64_t flags, int *found) {
    ENTER("cuGetProcAddress_v2")
    *out = NULL; *found = 1;
    if (flags || strcmp(symbol, "cuMemcpyBatchAsync") || batch_missing) return leave(NOT_FOUND);
    if (wanted > version || version < 12080) return leave(NOT_FOUND);
    note("batch form %d", wanted);
    *out = wanted >= 13000 ? (void *)batch : (void *)batch_12080;
    *found = 0;
    return leave(0);
}

/* --- host memory --- */
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    ENTER("cuMemHostRegister_v2") NEED_CONTEXT
    if (flags != 1 || (address_t)at % 4096 || find((address_t)at, K(HOST)) || find((address_t)at + size - 1, K(HOST))) return leave(INVALID_VALUE);
    note("pin %zu", size);
    add(HOST, (address_t)at, size, -1);
    return leave(0);
}
int cuMemHostUnregister(void *at) {
    ENTER("cuMemHostUnregister") NEED_CONTEXT
    range_t *range = find((address_t)at, K(HOST));
    if (!range || range->base != (address_t)at) return leave(INVALID_VALUE);
    range->kind = FREE;
    return leave(0);
}

int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER("cuMemHostAlloc") NEED_CONTEXT
    if (flags != 1 || posix_memalign(out, 4096, size)) return leave(INVALID_VALUE);
    add(HOST, (address_t)*out, size, -1);
    return leave(0);
}
int cuMemFreeHost(void *at) {
    ENTER("cuMemFreeHost") NEED_CONTEXT
    range_t *range = find((address_t)at, K(HOST));
    if (!range || range->base != (address_t)at) return leave(INVALID_VALUE);
    free(at); range->kind = FREE;
    return leave(0);
}

/* --- device memory --- */
static void *map_fd(int fd, size_t size) { void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); return at == MAP_FAILED ? NULL : at; }
int cuMemAlloc_v2(address_t *out, size_t size) {
    ENTER("cuMemAlloc_v2") NEED_CONTEXT
    int fd = memfd_create("stub-gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return leave(OUT_OF_MEMORY);
    *out = (address_t)map_fd(fd, size);
    add(DEVICE, *out, size, fd);
    return leave(0);
}
int cuMemFree_v2(address_t address) {
    ENTER("cuMemFree_v2") NEED_CONTEXT
    range_t *range = find(address, K(DEVICE));
    if (!range) return leave(INVALID_VALUE);
    munmap((void *)range->base, range->size); close(range->fd); range->kind = FREE;
    return leave(0);
}
int cuMemcpyHtoD_v2(address_t to, const void *from, size_t size) { ENTER("cuMemcpyHtoD_v2") NEED_CONTEXT memcpy((void *)to, from, size); return leave(0); }
int cuMemcpyDtoH_v2(void *to, address_t from, size_t size) { ENTER("cuMemcpyDtoH_v2") NEED_CONTEXT memcpy(to, (void *)from, size); return leave(0); }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { /* somebody takes 1 MiB between one call and the next */
    static size_t taken;
    ENTER("cuMemGetInfo_v2") NEED_CONTEXT
    *total = (size_t)1 << 37;
    *free_bytes = *total - (taken += 1 << 20);
    return leave(0);
}
int cuPointerGetAttribute(void *out, int attribute, address_t address) {
    ENTER("cuPointerGetAttribute")
    range_t *range = find(address, ON_DEVICE);
    if (!range) return leave(INVALID_VALUE);
    if (attribute == 9) *(int *)out = 0;                                     /* DEVICE_ORDINAL */
    else if (attribute == 10) *(unsigned *)out = range->kind == DEVICE;      /* IS_LEGACY_CUDA_IPC_CAPABLE */
    else if (attribute == 14) *(uint64_t *)out = range->handle_types;        /* ALLOWED_HANDLE_TYPES */
    else return leave(INVALID_VALUE);
    return leave(0);
}
int cuMemGetAddressRange_v2(address_t *base, size_t *size, address_t address) {
    ENTER("cuMemGetAddressRange_v2") NEED_CONTEXT
    range_t *range = find(address, ON_DEVICE);
    if (!range) return leave(INVALID_VALUE);
    *base = range->base; *size = range->size;
    return leave(0);
}
int cuIpcGetMemHandle(ipc_handle_t *out, address_t address) {
    ENTER("cuIpcGetMemHandle") NEED_CONTEXT
    range_t *range = find(address, K(DEVICE));
    if (!range || range->base != address) return leave(INVALID_VALUE);
    handle_t handle = {"stubipc", getpid(), range->fd, range->size, 0};
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return leave(0);
}
int cuIpcOpenMemHandle_v2(address_t *out, ipc_handle_t raw, unsigned flags) {
    ENTER("cuIpcOpenMemHandle_v2") NEED_CONTEXT
    handle_t handle;
    memcpy(&handle, &raw, sizeof handle);
    if (flags != 1 || memcmp(handle.magic, "stubipc", 8)) return leave(INVALID_VALUE);
    if (handle.pid == getpid() && !same_pid_allowed) return leave(INVALID_CONTEXT);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return leave(INVALID_HANDLE);
    *out = (address_t)map_fd(fd, handle.size);
    close(fd);
    if (!*out) return leave(MAP_FAILED_STATUS);
    add(IPC, *out, handle.size, -1);
    note("ipc open %zu", (size_t)handle.size);
    return leave(0);
}
int cuIpcCloseMemHandle(address_t address) {
    ENTER("cuIpcCloseMemHandle") NEED_CONTEXT
    range_t *range = find(address, K(IPC));
    if (!range || range->base != address) return leave(INVALID_VALUE);
    munmap((void *)range->base, range->size); range->kind = FREE;
    note("ipc close");
    return leave(0);
}

/* --- kernels, of which there is one: it sweeps over a whole allocation, 16 bytes a word, and leaves it as it was --- */
int cuModuleLoadData(void **out, const char *image) {
    ENTER("cuModuleLoadData") NEED_CONTEXT
    *out = strdup(image);
    return leave(strstr(image, ".version") ? 0 : INVALID_VALUE);
}
int cuModuleGetFunction(void **out, const char *module, const char *name) {
    char entry[64];
    ENTER("cuModuleGetFunction") NEED_CONTEXT
    snprintf(entry, sizeof entry, ".visible .entry %s(", name);
    *out = strstr(module, entry);
    return leave(*out ? 0 : NOT_FOUND);
}
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    ENTER("cuLaunchKernel") NEED_CONTEXT
    if (!kernel || !stream || !parameters || extra || shared || !gx || gy * gz * by * bz != 1 || !bx || bx > 1024) return leave(INVALID_VALUE);
    range_t *range = find(*(address_t *)parameters[0], K(DEVICE));
    return leave(range && range->size == 16 * *(uint64_t *)parameters[1] ? 0 : INVALID_VALUE);
}

/* --- virtual memory: an allocation is its descriptor + 1 --- */
typedef struct { unsigned type, types; location_t location; void *meta; unsigned char flags[8]; } properties_t;
int cuMemCreate(uint64_t *out, size_t size, const properties_t *properties, uint64_t flags) {
    ENTER("cuMemCreate") NEED_CONTEXT
    if (flags || size % GRANULARITY) return leave(INVALID_VALUE);
    int fd = memfd_create("stub-vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return leave(OUT_OF_MEMORY);
    handle_types = properties->types;
    *out = (uint64_t)fd + 1;
    return leave(0);
}
int cuMemAddressReserve(address_t *out, size_t size, size_t alignment, address_t hint, uint64_t flags) {
    ENTER("cuMemAddressReserve") NEED_CONTEXT
    if (alignment || hint || flags || size % GRANULARITY) return leave(INVALID_VALUE);
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return leave(OUT_OF_MEMORY);
    *out = (address_t)at;
    add(RESERVED, *out, size, -1);
    return leave(0);
}
int cuMemAddressFree(address_t address, size_t size) {
    ENTER("cuMemAddressFree") NEED_CONTEXT
    range_t *range = find(address, K(RESERVED));
    if (!range || range->size != size || find(address, K(VMM))) return leave(INVALID_VALUE);
    munmap((void *)address, size); range->kind = FREE;
    note("reservation freed");
    return leave(0);
}
int cuMemImportFromShareableHandle(uint64_t *out, void *handle, unsigned type) {
    ENTER("cuMemImportFromShareableHandle") NEED_CONTEXT
    struct stat about;
    int fd = (int)(intptr_t)handle;
    if (type != 1 || fstat(fd, &about) || !S_ISREG(about.st_mode)) return leave(INVALID_VALUE);
    *out = (uint64_t)fcntl(fd, F_DUPFD_CLOEXEC, 3) + 1;
    note("imported");
    return leave(0);
}
int cuMemExportToShareableHandle(void *out, uint64_t allocation, unsigned type, uint64_t flags) {
    ENTER("cuMemExportToShareableHandle")
    if (type != 1 || flags) return leave(INVALID_VALUE);
    *(int *)out = fcntl((int)allocation - 1, F_DUPFD_CLOEXEC, 3);
    return leave(0);
}
int cuMemRetainAllocationHandle(uint64_t *out, void *address) {
    ENTER("cuMemRetainAllocationHandle")
    range_t *range = find((address_t)address, K(VMM));
    if (!range) return leave(INVALID_VALUE);
    *out = (uint64_t)fcntl(range->fd, F_DUPFD_CLOEXEC, 3) + 1;
    return leave(0);
}
int cuMemGetAllocationPropertiesFromHandle(properties_t *out, uint64_t allocation) {
    ENTER("cuMemGetAllocationPropertiesFromHandle")
    (void)allocation;
    memset(out, 0, sizeof *out);
    out->type = 1; out->types = handle_types; out->location.type = 1;
    return leave(0);
}
int cuMemRelease(uint64_t allocation) { ENTER("cuMemRelease") note("released"); close((int)allocation - 1); return leave(0); }
int cuMemMap(address_t address, size_t size, size_t offset, uint64_t allocation, uint64_t flags) {
    ENTER("cuMemMap") NEED_CONTEXT
    struct stat about;
    range_t *range = find(address, K(RESERVED));
    if (offset || flags || !range || address + size > range->base + range->size || fstat((int)allocation - 1, &about) || (size_t)about.st_size != size)
        return leave(INVALID_VALUE);
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation - 1, 0) == MAP_FAILED) return leave(OUT_OF_MEMORY);
    add(VMM, address, size, fcntl((int)allocation - 1, F_DUPFD_CLOEXEC, 3));
    return leave(0);
}
int cuMemUnmap(address_t address, size_t size) {
    ENTER("cuMemUnmap") NEED_CONTEXT
    range_t *range = find(address, K(VMM));
    if (!range || range->base != address || range->size != size) return leave(INVALID_VALUE);
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    close(range->fd); range->kind = FREE;
    note("unmapped");
    return leave(0);
}
int cuMemSetAccess(address_t address, size_t size, const void *description, size_t count) {
    ENTER("cuMemSetAccess") NEED_CONTEXT
    const struct { location_t location; unsigned flags; } *access = description;
    if (count != 1 || access->location.type != 1 || access->flags != 3) return leave(INVALID_VALUE);
    return leave(mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0);
}
