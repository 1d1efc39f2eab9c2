// ring_all_reduce.cu: all_reduce around a ring.            (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002)
//
// Rank r only ever sends to r + 1 and receives from r - 1 (mod n). The tensor is divided into n pieces.
//
//   reduce-scatter    step s = 0 .. n-2:   send piece r - s,  receive piece r - s - 1 and add it to mine.
//                     A piece's sum travels once around, growing by one rank's numbers at each stop; afterwards rank r
//                     holds the whole sum of piece r + 1.
//   all-gather        step s = 0 .. n-2:   send piece r + 1 - s,  receive piece r - s in its place.
//                     The whole sums travel around once more.
//
//        rank 0        rank 1        rank 2                n = 3
//     a0  b0  c0    a1  b1  c1    a2  b2  c2
//     a0 ->         b1 ->         c2 ->                    s = 0
//     a0  b0 c02    a01 b1  c1    a2 b12  c2
//     c02 ->        a01 ->        b12 ->                   s = 1
//     a0 B   c02    a01 b1 C      A  b12  c2               rank r holds piece r + 1
//
// Each rank sends 2 (n-1)/n N bytes in 2 (n-1) messages, all links are busy all the time, and none is used by two. The
// additions: piece j is ((x_j + x_j+1) + ...) + x_j-1, an order of its own for each piece. 16-bit sums travel in
// float32 in the first half.
#include "parallel/comm/transport.h"

void ring_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    const int n = comm.size, r = comm.rank, next = (r + 1) % n, before = (r + n - 1) % n;
    const Tensor sum = widened(comm, out, inp, stream);
    const auto piece = [&](const Tensor& tensor, int j) {
        const Range range = piece_of(tensor.n(), n, (j + 2 * n) % n);
        return part_of(tensor, range.first, range.n);
    };
    const Tensor inbox = comm.scratch(0, sum.dtype, piece(sum, 0).n());  // no piece is longer than the first
    if (comm.counting()) return;

    // Reduce-scatter. Both messages of a step are one group: each rank sends before it has received, so no rank waits
    // for another one's send.
    for (int s = 0; s < n - 1; ++s) {
        const Tensor mine = piece(sum, r - s - 1), theirs = part_of(inbox, 0, mine.n());
        comm.transport().group_start();
        send_tensor(comm, piece(sum, r - s), next, stream);
        recv_tensor(comm, theirs, before, stream);
        comm.transport().group_end();
        reduce_into(mine, theirs, op, stream);
    }
    narrowed(out, sum, piece_of(out.n(), n, next), stream);  // back to 16 bits, before the sums travel again
    // All-gather. Each piece is received in its final place.
    for (int s = 0; s < n - 1; ++s) {
        comm.transport().group_start();
        send_tensor(comm, piece(out, r + 1 - s), next, stream);
        recv_tensor(comm, piece(out, r - s), before, stream);
        comm.transport().group_end();
    }
}
