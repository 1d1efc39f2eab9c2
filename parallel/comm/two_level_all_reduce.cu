// two_level_all_reduce.cu: inside each machine first, then between machines.
//
// Inside a machine (NVLink, memory) bytes are cheap; between machines (a network) they are not.
// With k machines of m ranks:
//
//   1. reduce-scatter inside each machine:   its rank i holds the machine's sum of piece i of m.
//   2. all-reduce between machines:          the ranks i of all machines add their pieces; m of these run at once.
//   3. all-gather inside each machine.
//
//     machine 0   ranks 0 1     1. a01 b01     2. A   B       3. AB AB
//     machine 1   ranks 2 3        a23 b23        A   B          AB AB
//
// A rank sends 2 (k-1)/k N/m bytes to other machines, and the m ranks of a machine together 2 (k-1)/k N. In a ring
// through all n ranks one rank of each machine alone sends 2 (n-1)/n N to the next machine; the bytes of all links are
// the same, 2 (n-1) N. If machines have different numbers of ranks, m is the smallest of them, and the further ranks
// only give their numbers in 1 and get the result in 3.
//
// The additions: rank order inside a machine, then the order of the machines. Sums travel between machines in float32:
// those of 16-bit numbers are 2 N/m bytes there, and not N/m.
#include "parallel/comm/transport.h"

#include <algorithm>

void two_level_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    std::map<int, std::vector<int>> machines;  // by number: their ranks
    for (int i = 0; i < comm.size; ++i) machines[comm.node_of(i)].push_back(i);
    const std::vector<int>& mine = machines[comm.node_of(comm.rank)];
    size_t m = mine.size();
    for (const auto& [machine, ranks] : machines) m = std::min(m, ranks.size());

    // Inside, the first m ranks own a piece each; between machines, those who own piece `me` form a group.
    const int me = static_cast<int>(std::find(mine.begin(), mine.end(), comm.rank) - mine.begin());
    const Group inside{mine, me, static_cast<int>(m)};
    Group between{{}, 0, static_cast<int>(machines.size())};
    const bool owner = static_cast<size_t>(me) < m;
    // Memory is counted for the longest piece: a shorter tensor may give this rank a longer one than its own.
    const Range range = owner ? piece_of(inp.n(), inside.n_owners, comm.counting() ? 0 : me) : Range{0, 0};
    Tensor sum;
    if (owner) {
        const DType wide = inp.dtype == DType::i32 ? DType::i32 : DType::f32;
        // A float32 sum can lie in its place in `out` at once; a 16-bit tensor's needs memory of its own.
        sum = inp.dtype == wide ? part_of(out, range.first, range.n) : comm.scratch(1, wide, range.n);
        for (const auto& [machine, ranks] : machines) {
            if (ranks[static_cast<size_t>(me)] == comm.rank) between.me = static_cast<int>(between.members.size());
            between.members.push_back(ranks[static_cast<size_t>(me)]);
        }
    }
    reduce_to_owners(comm, inside, sum, inp, op, 0, stream);
    if (owner && range.n > 0) {
        const Range piece = piece_of(range.n, between.n_owners, between.me);
        reduce_to_owners(comm, between, part_of(sum, piece.first, piece.n), sum, op, 2, stream);
        gather_from_owners(comm, between, sum, stream);
        if (sum.dtype != out.dtype && !comm.counting()) convert(part_of(out, range.first, range.n), sum, stream);
    }
    gather_from_owners(comm, inside, out, stream);
}
