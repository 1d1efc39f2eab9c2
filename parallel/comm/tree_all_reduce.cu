// tree_all_reduce.cu: broadcast and all_reduce along a binomial tree.
//
// Number the ranks from the root: v = (rank - root) mod n. The parent of v is v with its lowest 1 bit cleared; v and
// its parent differ by that bit, 2^k, and v's children are v + 2^i for i < k.
//
//     0 ─┬─ 4 ─┬─ 6 ── 7
//        │     └─ 5             8 ranks: three rounds up, three rounds down
//        ├─ 2 ── 3
//        └─ 1
//
//   reduce       from the leaves: v adds what its children send, nearest child first, and sends the sum to its parent.
//   broadcast    from the root: v receives from its parent, then sends to its children, farthest first.
//
// 2 log2 n messages one after the other, against the ring's 2 (n-1): better where time is latency. But each carries all
// N bytes, and the root's link carries log2 n N: worse where time is bandwidth. The additions: ((x_0 + x_1) +
// (x_2 + x_3)) + ... 16-bit sums travel up in float32.
#include "parallel/comm/transport.h"

namespace {

// The largest power of two that divides v, and for the root the first one that is not below n.
int lowest_bit(int v, int n) {
    int bit = 1;
    while (bit < n && (v & bit) == 0) bit *= 2;
    return bit;
}

}  // namespace

void tree_broadcast(Comm& comm, Tensor tensor, int root, cudaStream_t stream) {
    const int n = comm.size, v = (comm.rank + n - root) % n, mine = lowest_bit(v, n);
    const auto rank_of = [&](int number) { return (number + root) % n; };
    if (v != 0) recv_tensor(comm, tensor, rank_of(v - mine), stream);
    for (int bit = mine / 2; bit > 0; bit /= 2)
        if (v + bit < n) send_tensor(comm, tensor, rank_of(v + bit), stream);
}

void tree_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    const int n = comm.size, v = comm.rank, mine = lowest_bit(v, n);
    const Tensor sum = widened(comm, out, inp, stream);
    Tensor theirs;  // what a child sends
    if (mine > 1 && v + 1 < n) theirs = comm.scratch(0, sum.dtype, sum.n());
    if (comm.counting()) return;
    // A rank has one buffer for all its children: the next one's numbers arrive when the last one's have been added.
    for (int bit = 1; bit < mine && v + bit < n; bit *= 2) {
        recv_tensor(comm, theirs, v + bit, stream);
        reduce_into(sum, theirs, op, stream);
    }
    if (v != 0) send_tensor(comm, sum, v - mine, stream);
    else narrowed(out, sum, {0, out.n()}, stream);
    tree_broadcast(comm, out, 0, stream);
}
