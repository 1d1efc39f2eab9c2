// rank_order_all_reduce.cu: all_reduce whose every element is ((x_0 + x_1) + x_2) + ... + x_n-1,
// bit for bit the serial sum.
//
// Piece j belongs to rank j. Each rank sends every other rank the piece that the other one owns; each owner adds what
// it got in the order of the ranks, whatever the order of arrival; then the owners send their sums to all.
//
//     rank 0   a0 b0 c0        a0 a1 a2 -> A         A B C
//     rank 1   a1 b1 c1        b0 b1 b2 -> B         A B C
//     rank 2   a2 b2 c2        c0 c1 c2 -> C         A B C
//              send pieces     add in rank order     send sums
//
// Each rank sends (n-1)/n N twice: as few bytes as any algorithm can. How the tensor is divided does not change an
// element's sum, so it equals a reduce_scatter with any other boundaries, and a run with ZeRO can equal one without to
// the bit. 16-bit numbers travel in 16 bits and are added in float32. The price: n - 1 messages at once, each N/n,
// where the ring has neighbours only; and memory for n pieces.
#include "parallel/comm/transport.h"

void reduce_to_owners(Comm& comm, const Group& group, Tensor out, Tensor inp, ReduceOp op, int slot,
                      cudaStream_t stream) {
    const int n_members = static_cast<int>(group.members.size());
    const int64_t n = inp.n();
    const bool owner = group.me < group.n_owners;
    const Range mine = owner ? piece_of(n, group.n_owners, group.me) : Range{0, 0};
    Tensor parts;
    if (owner) parts = comm.scratch(slot, inp.dtype, piece_of(n, group.n_owners, 0).n * n_members);
    if (comm.counting()) return;

    // All messages are one group: any order of arrival is right, because each has its own place in `parts`.
    comm.transport().group_start();
    for (int j = 0; j < group.n_owners; ++j) {
        const Range range = piece_of(n, group.n_owners, j);
        if (j != group.me)
            send_tensor(comm, part_of(inp, range.first, range.n), group.members[static_cast<size_t>(j)], stream);
    }
    for (int j = 0; j < n_members && mine.n > 0; ++j)
        if (j != group.me)
            recv_tensor(comm, part_of(parts, j * mine.n, mine.n), group.members[static_cast<size_t>(j)], stream);
    comm.transport().group_end();
    if (mine.n == 0) return;
    // This rank's own numbers take their place among the others', so that the kernel adds in the order of the ranks.
    copy_tensor(part_of(parts, group.me * mine.n, mine.n), part_of(inp, mine.first, mine.n), stream);
    reduce_rows(out, part_of(parts, 0, n_members * mine.n), n_members, op, stream);
}

void gather_from_owners(Comm& comm, const Group& group, Tensor out, cudaStream_t stream) {
    if (comm.counting()) return;
    const int n_members = static_cast<int>(group.members.size());
    comm.transport().group_start();
    if (group.me < group.n_owners) {
        const Range mine = piece_of(out.n(), group.n_owners, group.me);
        for (int j = 0; j < n_members; ++j)
            if (j != group.me)
                send_tensor(comm, part_of(out, mine.first, mine.n), group.members[static_cast<size_t>(j)], stream);
    }
    for (int j = 0; j < group.n_owners; ++j) {
        const Range range = piece_of(out.n(), group.n_owners, j);
        if (j != group.me)
            recv_tensor(comm, part_of(out, range.first, range.n), group.members[static_cast<size_t>(j)], stream);
    }
    comm.transport().group_end();
}
