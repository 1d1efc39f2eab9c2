// nccl.h on the CPU: messages and collectives between GPUs as NVIDIA's library NCCL offers them (nccl.cpp), for ranks
// that are threads of one process, each with a device of its own (CUDA_CPU_DEVICES=N).
//
// Names, numbers and rules are NVIDIA's. What NCCL does not say, and then hangs, or writes where it should not, is a
// report here, which ends the process (cpu/README.md):
//
//     streams       A call is put on a stream, like a kernel, and returns. On the stream it is over when it is over for
//                   this rank: a collective when all ranks have come to it, a send when its receiver has taken it.
//     groups        The calls between ncclGroupStart and ncclGroupEnd are one piece of work of the stream: messages
//                   that cross must be in a group, or each send waits for the other side's receive, which comes after
//                   the other side's send.
//     hosts         The first message from one rank to another, and the first collective of a communicator, connect
//                   them: the host waits in ncclGroupEnd (or in a call outside of groups) until the other hosts have
//                   come there. To make, split or destroy a communicator is such a meeting of all its ranks as well.
//     sums          along a ring that ends at the rank that owns the piece: ((x_r+1 + x_r+2) + ...) + x_r; 16-bit types
//                   are rounded at each addition. Piece r of ncclAllReduce and ncclReduceScatter is rank r's.
//     in place      sendbuff == recvbuff; in ncclAllGather sendbuff == recvbuff + rank * sendcount, in
//                   ncclReduceScatter recvbuff == sendbuff + rank * recvcount. Otherwise the two must not overlap.
//     same calls    All ranks make the same collectives in the same order, with the same count, type, op and root.
//     devices       The current device is the communicator's, and so are the stream and the buffers.
//
// By default (no strict mode) a stream does its work at once: so does a receive or a collective, whose call then waits
// for the other ranks, but a send keeps a copy of its bytes and does not wait. In strict mode all is as above: messages
// that cross outside of a group wait for ever, as they do with NCCL, until ncclCommAbort.
//
// Not here: ranks that are processes, two ranks on one device, messages to oneself, several communicators of one thread
// that are made or split in one group, groups on several streams of one communicator, double and fp8, products and
// averages, non-blocking communicators, configurations; and no call can be captured into a graph.
#pragma once

#include "cuda_runtime.h"

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

enum ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclBfloat16 = 9,
};

enum ncclRedOp_t { ncclSum = 0, ncclMax = 2 };

const char* ncclGetErrorString(ncclResult_t result);
struct ncclComm;
using ncclComm_t = ncclComm*;
const char* ncclGetLastError(ncclComm_t comm);  // of this thread; comm may be NULL

// ---------------------------------------------------------------------------------------------------------------------
// Communicators

struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t;
#define NCCL_SPLIT_NOCOLOR -1

ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank);
// Ranks with the same color get a communicator, in the order of their keys. When it is called, nothing may be under way
// on `comm`.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config,
                           cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclCommDestroy(ncclComm_t comm,
                             cuda_cpu::Place place = cuda_cpu::Place::here());  // waits until all ranks have called it
// Ends what this rank has under way on `comm`, on streams and on hosts, whose calls then return an error. The other
// ranks are not told.
ncclResult_t ncclCommAbort(ncclComm_t comm, cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error,
                                   cuda_cpu::Place place = cuda_cpu::Place::here());

// ---------------------------------------------------------------------------------------------------------------------
// Calls. Counts are numbers of elements, of the smaller of the two buffers.

ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream, cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream,
                      cuda_cpu::Place place = cuda_cpu::Place::here());

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream, cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                               cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream,
                        cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream, cuda_cpu::Place place = cuda_cpu::Place::here());
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream, cuda_cpu::Place place = cuda_cpu::Place::here());
