// A CUDA runtime and a cuBLAS that compute nothing, for LD_PRELOAD in front of the real ones of PyTorch's CUDA build.
//
// PyTorch then finds one GPU. Its dispatcher, device checks, caching allocator, autograd engine and choice of kernels
// are its own; device memory is addresses without pages, a kernel launch is a count, a copy to the host gives zeros.
// So memory, launches, copies and waits of a program are those it has on a GPU; values and time on the device are not.
// What is not defined here returns success (build.py). STUB_GPU_GIB and STUB_GPU_SM set memory and architecture.
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;
typedef cudaError_t Error;
typedef cublasStatus_t Status;

// ---- counts; stub.py has their names in this order ------------------------------------------------------------------
typedef struct { u64 launches, products, waits, pageable_copies, graphs, device_bytes, device_peak; } Counts;
static Counts counts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
Counts *stub_counts(void) { return &counts; }
void stub_reset(void) { counts = (Counts){.device_bytes = counts.device_bytes, .device_peak = counts.device_bytes}; }

// A stream that a CUDA graph is captured from, in a thread at a time: what is launched there is recorded and not run.
// As CUDA does, a wait or a copy of pageable memory in this thread breaks the capture, which then cannot be ended.
typedef struct { u64 nodes; } Graph;
static __thread struct { cudaStream_t stream; Graph *graph; int broken; } capture;
static u64 captures;
static Error breaks_capture(void) { capture.broken = 1; return cudaErrorStreamCaptureUnsupported; }
static Error waited(void) {
    if (capture.graph) return breaks_capture();
    __sync_add_and_fetch(&counts.waits, 1);
    return 0;
}
static int recorded(void) { return capture.graph ? ++capture.graph->nodes, 1 : 0; }
static Error launched(void) {
    if (!recorded()) __sync_add_and_fetch(&counts.launches, 1);
    return 0;
}

// ---- the device -----------------------------------------------------------------------------------------------------
static u64 total_memory(void) { const char *gib = getenv("STUB_GPU_GIB"); return (gib ? atof(gib) : 80.0) * (1 << 30); }
static int sm(void) { const char *found = getenv("STUB_GPU_SM"); return found ? atoi(found) : 90; }

Error cudaGetDeviceCount(int *n) { *n = 1; return 0; }
Error cudaGetDevice(int *d) { *d = 0; return 0; }
Error cudaSetDevice(int d) { return d ? cudaErrorInvalidDevice : 0; }
Error cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
Error cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
Error cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Stub GPU sm_%d", sm());
    p->totalGlobalMem = total_memory();
    p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = sm() / 10; p->minor = sm() % 10; p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20; p->textureAlignment = 512; p->unifiedAddressing = 1; p->maxBlocksPerMultiProcessor = 32;
    return 0;
}
Error cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, d);
    *v = a == cudaDevAttrMaxThreadsPerBlock ? p.maxThreadsPerBlock
       : a == cudaDevAttrMaxSharedMemoryPerBlock ? (int)p.sharedMemPerBlock
       : a == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (int)p.sharedMemPerBlockOptin
       : a == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? (int)p.sharedMemPerMultiprocessor
       : a == cudaDevAttrWarpSize ? p.warpSize
       : a == cudaDevAttrMultiProcessorCount ? p.multiProcessorCount
       : a == cudaDevAttrMaxThreadsPerMultiProcessor ? p.maxThreadsPerMultiProcessor
       : a == cudaDevAttrMaxBlocksPerMultiprocessor ? p.maxBlocksPerMultiProcessor
       : a == cudaDevAttrComputeCapabilityMajor ? p.major
       : a == cudaDevAttrComputeCapabilityMinor ? p.minor
       : a == cudaDevAttrMaxGridDimX ? p.maxGridSize[0]
       : a == cudaDevAttrMaxGridDimY || a == cudaDevAttrMaxGridDimZ ? p.maxGridSize[1]
       : a == cudaDevAttrL2CacheSize ? p.l2CacheSize
       : a == cudaDevAttrMaxRegistersPerBlock ? p.regsPerBlock : 0;
    return 0;
}
Error cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:00.0"); return 0; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}
Error cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
const char *cudaGetErrorString(Error e) {
    return e == cudaErrorMemoryAllocation ? "out of memory"
         : e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : "stub error";
}
const char *cudaGetErrorName(Error e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "stub"; }
Error cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .maxDynamicSharedSizeBytes = 232448};
    a->ptxVersion = a->binaryVersion = sm();
    return 0;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return 0; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) {
    *n = 2;
    return 0;
}

// ---- memory: addresses without pages on the device, pages that nobody has touched on the host -----------------------
#define DEVICE_BASE 0x600000000000ULL
#define DEVICE_END 0x640000000000ULL
#define ALIGNMENT (2ULL << 20)
typedef struct Block { u64 at, size; struct Block *next; } Block;
static Block *on_device, *on_host;
static u64 next_address = DEVICE_BASE;

static void keep(Block **list, u64 at, u64 size) {
    Block *made = malloc(sizeof *made);
    *made = (Block){at, size, *list};
    *list = made;
}
static u64 take(Block **list, u64 at) {
    for (Block **each = list; *each; each = &(*each)->next)
        if ((*each)->at == at) {
            Block *found = *each;
            u64 size = found->size;
            *each = found->next;
            free(found);
            return size;
        }
    return 0;
}
static int is_device(const void *p) { return (u64)p >= DEVICE_BASE && (u64)p < DEVICE_END; }
static int is_pinned(const void *p) {
    for (Block *each = on_host; each; each = each->next)
        if ((u64)p >= each->at && (u64)p < each->at + each->size) return 1;
    return 0;
}
Error cudaMalloc(void **p, size_t size) {
    Error result = cudaErrorMemoryAllocation;
    *p = 0;
    pthread_mutex_lock(&lock);
    if (counts.device_bytes + size <= total_memory()) {
        *p = (void *)next_address;
        keep(&on_device, next_address, size);
        next_address += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
        counts.device_bytes += size;
        if (counts.device_bytes > counts.device_peak) counts.device_peak = counts.device_bytes;
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
Error cudaFree(void *p) {
    pthread_mutex_lock(&lock);
    counts.device_bytes -= take(&on_device, (u64)p);
    pthread_mutex_unlock(&lock);
    return 0;
}
Error cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return cudaMalloc(p, size); }
Error cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
Error cudaMemGetInfo(size_t *f, size_t *t) { *t = total_memory(); *f = *t - counts.device_bytes; return 0; }
Error cudaHostAlloc(void **p, size_t size, unsigned flags) {
    *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    keep(&on_host, (u64)*p, size);
    pthread_mutex_unlock(&lock);
    return 0;
}
Error cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
Error cudaFreeHost(void *p) {
    pthread_mutex_lock(&lock);
    munmap(p, take(&on_host, (u64)p));
    pthread_mutex_unlock(&lock);
    return 0;
}
Error cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    *a = (struct cudaPointerAttributes){.type = is_device(p) ? cudaMemoryTypeDevice : is_pinned(p) ? cudaMemoryTypeHost
                                                                                : cudaMemoryTypeUnregistered};
    if (is_device(p)) a->devicePointer = (void *)p; else a->hostPointer = (void *)p;
    return 0;
}

// What was last copied to an address, if it is small: torch.tensor(..., device="cuda") has no operation that shows it.
typedef struct { u64 at; size_t size; void *data; } Sent;
static Sent sent[4096];
static Sent *sent_to(u64 at) { return &sent[at >> 9 & 4095]; }
int stub_sent(u64 at, size_t size, void *to) {
    Sent *found = sent_to(at);
    if (found->at != at || found->size != size) return 0;
    memcpy(to, found->data, size);
    return 1;
}
static Error copied(void *to, const void *from, size_t n) {
    if (!is_device(to) && !is_device(from)) { memcpy(to, from, n); return 0; }
    if (is_device(to) && is_device(from)) return 0;
    const void *host = is_device(to) ? from : to;
    pthread_mutex_lock(&lock);
    int pageable = !is_pinned(host);
    counts.pageable_copies += pageable;
    if (pageable && capture.graph) {
        pthread_mutex_unlock(&lock);
        return breaks_capture();
    }
    if (!is_device(to)) memset(to, 0, n);
    else if (n && n <= 65536) {
        Sent *kept = sent_to((u64)to);
        free(kept->data);
        *kept = (Sent){(u64)to, n, memcpy(malloc(n), from, n)};
    }
    pthread_mutex_unlock(&lock);
    return 0;
}
Error cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    Error broken = waited();
    return broken ? broken : copied(to, from, n);
}
Error cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    return copied(to, from, n);
}

// ---- streams, events, waits -----------------------------------------------------------------------------------------
static u64 handles = 0x1000;
static void *handle(void) { return (void *)__sync_add_and_fetch(&handles, 16); }
Error cudaStreamCreate(cudaStream_t *s) { *s = handle(); return 0; }
Error cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = handle(); return 0; }
Error cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = handle(); return 0; }
static enum cudaStreamCaptureStatus status(cudaStream_t s) {
    if (!capture.graph || capture.stream != s) return cudaStreamCaptureStatusNone;
    return capture.broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
Error cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = status(s); return 0; }
Error cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, u64 *id, cudaGraph_t *g,
                               const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    enum cudaStreamCaptureStatus found = status(s);
    if (c) *c = found;
    if (id) *id = found ? captures : 0;
    if (g) *g = found ? (cudaGraph_t)capture.graph : 0;
    if (n) *n = 0;
    return 0;
}
Error cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    if (!s || capture.graph) return cudaErrorStreamCaptureUnsupported;
    capture.stream = s;
    capture.graph = calloc(1, sizeof(Graph));
    capture.broken = 0;
    captures++;
    return 0;
}
Error cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    *g = capture.broken ? 0 : (cudaGraph_t)capture.graph;
    capture.graph = 0;
    return capture.broken ? cudaErrorStreamCaptureInvalidated : 0;
}
Error cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = ((Graph *)g)->nodes; return 0; }
Error cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, u64 flags) { *e = (cudaGraphExec_t)g; return 0; }
Error cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { __sync_add_and_fetch(&counts.graphs, 1); return 0; }
Error cudaStreamSynchronize(cudaStream_t s) { return waited(); }
Error cudaDeviceSynchronize(void) { return waited(); }
Error cudaEventSynchronize(cudaEvent_t e) { return waited(); }
Error cudaEventCreate(cudaEvent_t *e) { *e = handle(); return 0; }
Error cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = handle(); return 0; }
Error cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1.0f; return 0; }

// ---- kernels, and driver functions that PyTorch looks up ------------------------------------------------------------
static void *fat_binary;
void **__cudaRegisterFatBinary(void *b) { return &fat_binary; }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void *stream) { return 0; }
Error __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *stream) {
    *g = *b = (dim3){1, 1, 1};
    *s = 0;
    *(void **)stream = 0;
    return 0;
}
Error __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return 0; }
Error __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return launched(); }
Error cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return launched(); }
Error cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launched(); }

static int succeed(void) { return 0; }
static int context_state(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
Error cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, u64 flags,
                                       enum cudaDriverEntryPointQueryResult *r) {
    *f = strcmp(s, "cuDevicePrimaryCtxGetState") ? (void *)succeed : (void *)context_state;
    if (r) *r = cudaDriverEntryPointSuccess;
    return 0;
}

// ---- cuBLAS; every product is this one, whatever its arguments (build.py) --------------------------------------------
Status stub_product(void) {
    if (!recorded()) __sync_add_and_fetch(&counts.products, 1);
    return 0;
}
Status cublasCreate_v2(cublasHandle_t *h) { *h = handle(); return 0; }
Status cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m) { *m = 0; return 0; }
Status cublasGetMathMode(cublasHandle_t h, cublasMath_t *m) { *m = 0; return 0; }
static void *blank(void) { return calloc(1, 128); }
Status cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType_t s) { *d = blank(); return 0; }
Status cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { free(d); return 0; }
Status cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t r, uint64_t c, int64_t ld) {
    *l = blank();
    return 0;
}
Status cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { free(l); return 0; }
Status cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { *p = blank(); return 0; }
Status cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { free(p); return 0; }
Status cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                      cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                      cublasLtMatmulPreference_t p, int want, cublasLtMatmulHeuristicResult_t *r, int *n) {
    memset(r, 0, sizeof *r);
    *n = 1;
    return 0;
}
