// host_messages.cu: a few numbers or lines of text from host to host. They travel through device memory, because that is how
// communicators talk; this is for the start and the end of a run.
#include "parallel/comm/comm.h"

#include <algorithm>
#include <cstring>

namespace {

// Room for so many i32 on the device, for one call.
struct Words {
    Arena arena{"host messages"};
    Tensor all;
    explicit Words(int64_t n) {
        arena.take("words", DType::i32, {n});
        arena.reserve();
        all = arena.take("words", DType::i32, {n});
    }
};

}  // namespace

std::string broadcast_text(Comm& comm, const std::string& text) {
    const int64_t bytes = gather_numbers(comm, {static_cast<int64_t>(text.size())})[0][0];
    std::vector<int32_t> letters(static_cast<size_t>(bytes));
    for (size_t i = 0; comm.rank == 0 && i < letters.size(); ++i) letters[i] = static_cast<unsigned char>(text[i]);
    Words words(bytes);
    copy_to_device(words.all, letters.data());
    comm.broadcast(words.all, 0, device().stream);
    cudaCheck(cudaStreamSynchronize(device().stream));
    copy_to_host(letters.data(), words.all);
    return {letters.begin(), letters.end()};
}

std::vector<std::vector<int64_t>> gather_numbers(Comm& comm, const std::vector<int64_t>& numbers) {
    const int64_t n = static_cast<int64_t>(numbers.size());
    Words words(2 * n * (comm.size + 1));
    const Tensor mine = words.all.slice(0, 2 * n), all = words.all.slice(2 * n, 2 * n * comm.size);
    copy_to_device(mine, numbers.data());
    comm.all_gather(all, mine, device().stream);
    cudaCheck(cudaStreamSynchronize(device().stream));
    std::vector<int64_t> flat(static_cast<size_t>(n * comm.size));
    copy_to_host(flat.data(), all);
    std::vector<std::vector<int64_t>> rows;
    for (int r = 0; r < comm.size; ++r) rows.emplace_back(flat.begin() + r * n, flat.begin() + (r + 1) * n);
    return rows;
}

// Hashes are compared, so that it does not matter how long the values are. Another number of things is another program.
void check_same_everywhere(Comm& comm, const std::vector<std::pair<std::string, std::string>>& things) {
    const auto counts = gather_numbers(comm, {static_cast<int64_t>(things.size())});
    check(counts[0][0] == static_cast<int64_t>(things.size()),
          "this rank runs another version of the program than rank 0: start the "
          "same binary everywhere");
    std::vector<int64_t> hashes;
    for (const auto& [name, value] : things) hashes.push_back(static_cast<int64_t>(hash_name(name + "\n" + value)));
    const auto all = gather_numbers(comm, hashes);
    for (size_t i = 0; i < things.size(); ++i)
        check(hashes[i] == all[0][i], things[i].first, " is ",
              things[i].second.size() > 80 ? "different" : "'" + things[i].second + "'",
              " here, and something else on rank 0: start all ranks with the same program, flags and files");
}
