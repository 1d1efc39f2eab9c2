// halving_all_reduce.cu: recursive halving, then recursive doubling.          (Thakur, Rabenseifner & Gropp 2005)
//
// For p = 2^k ranks. In each round a rank meets the one whose number differs in one bit, and they divide between them
// the range that both still work on:
//
//   halving     bit p/2, p/4, ..., 1:   each keeps one half of its range, sends the other half, and adds what it
//                                       receives. Ranges: N, N/2, N/4, ..., N/p: a reduce-scatter.
//   doubling    bit 1, 2, ..., p/2:     the same meetings backwards, each sends its range of whole sums: an all-gather.
//
//     rank 0  [0 1 2 3]   -> [0 1 . .]  -> [0 . . .]  -> [0 1 . .]  -> [0 1 2 3]
//     rank 1  [0 1 2 3]   -> [0 1 . .]  -> [. 1 . .]  -> [0 1 . .]  -> [0 1 2 3]
//     rank 2  [0 1 2 3]   -> [. . 2 3]  -> [. . 2 .]  -> [. . 2 3]  -> [0 1 2 3]
//     rank 3  [0 1 2 3]   -> [. . 2 3]  -> [. . . 3]  -> [. . 2 3]  -> [0 1 2 3]
//                     bit 2         bit 1          bit 1         bit 2
//
// 2 (p-1)/p N bytes in 2 log2 p messages: the ring's bytes with the tree's count of messages. With n between p and 2p
// ranks, the n - p extra ones first give all they have to a partner and get the result from it in the end: two messages
// of N bytes more, one each way. The additions: x_v + x_(v xor p/2) first, then sums of sums. 16-bit sums travel in
// float32 until they are whole.
#include "parallel/comm/transport.h"

void halving_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    const int n = comm.size, r = comm.rank;
    int p = 1;
    while (2 * p <= n) p *= 2;
    const int n_extra = n - p;  // the odd ranks below 2 n_extra
    const auto rank_of = [&](int v) { return v < n_extra ? 2 * v : v + n_extra; };
    const Tensor sum = widened(comm, out, inp, stream);
    const bool is_extra = r < 2 * n_extra && r % 2 == 1;
    const Tensor inbox = is_extra ? Tensor{} : comm.scratch(0, sum.dtype, sum.n());
    if (comm.counting()) return;

    // The extra ranks give their numbers to a partner, and have no other part in it than to wait for the result.
    if (is_extra) {
        send_tensor(comm, sum, r - 1, stream);
        recv_tensor(comm, out, r - 1, stream);
        return;
    }
    if (r < 2 * n_extra) {
        recv_tensor(comm, inbox, r + 1, stream);
        reduce_into(sum, inbox, op, stream);
    }
    const int v = r < 2 * n_extra ? r / 2 : r - n_extra;  // this rank's number among the p that go on

    // Halving. Low and high halves may differ by one element.
    Range mine{0, sum.n()};
    std::vector<Range> before;  // the ranges of the rounds, for the way back
    for (int bit = p / 2; bit > 0; bit /= 2) {
        before.push_back(mine);
        const bool upper = (v & bit) != 0;
        const int64_t half = mine.n / 2;
        const Range low{mine.first, half}, high{mine.first + half, mine.n - half}, keep = upper ? high : low,
                                                                                   give = upper ? low : high;
        const Tensor theirs = part_of(inbox, 0, keep.n);
        comm.transport().group_start();
        send_tensor(comm, part_of(sum, give.first, give.n), rank_of(v ^ bit), stream);
        recv_tensor(comm, theirs, rank_of(v ^ bit), stream);
        comm.transport().group_end();
        reduce_into(part_of(sum, keep.first, keep.n), theirs, op, stream);
        mine = keep;
    }
    narrowed(out, sum, mine, stream);
    // Doubling: the same partners in the opposite order. Together the two have what they divided in that round.
    for (int bit = 1; bit < p; bit *= 2) {
        const Range both = before.back();
        before.pop_back();
        const Range theirs =
            mine.first == both.first ? Range{mine.first + mine.n, both.n - mine.n} : Range{both.first, both.n - mine.n};
        comm.transport().group_start();
        send_tensor(comm, part_of(out, mine.first, mine.n), rank_of(v ^ bit), stream);
        recv_tensor(comm, part_of(out, theirs.first, theirs.n), rank_of(v ^ bit), stream);
        comm.transport().group_end();
        mine = both;
    }
    if (r < 2 * n_extra) send_tensor(comm, out, r + 1, stream);
}
