// host_messages.cu: a few numbers or lines of text from host to host. They travel through device memory, because that
// is how communicators talk, a buffer of fixed size at a time; this is for the start and the end of a run.
#include "parallel/comm/comm.h"

#include <algorithm>

std::string broadcast_text(Comm& comm, const std::string& text) {
    const int64_t bytes = gather_numbers(comm, {static_cast<int64_t>(text.size())})[0][0];
    std::string everywhere;
    for (int64_t first = 0; first < bytes; first += Comm::kHostWords) {
        const int64_t n = std::min(bytes - first, Comm::kHostWords);
        std::vector<int32_t> letters(static_cast<size_t>(n));
        for (size_t i = 0; comm.rank == 0 && i < letters.size(); ++i)
            letters[i] = static_cast<unsigned char>(text[static_cast<size_t>(first) + i]);
        const Tensor words = comm.host_words().slice(0, n);
        copy_to_device(words, letters.data());
        comm.broadcast(words, 0, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
        copy_to_host(letters.data(), words);
        everywhere.append(letters.begin(), letters.end());
    }
    return everywhere;
}

// As many numbers at a time as fit into the buffer: two words each, of every rank, and once more of this one.
std::vector<std::vector<int64_t>> gather_numbers(Comm& comm, const std::vector<int64_t>& numbers) {
    const size_t at_once = static_cast<size_t>(Comm::kHostWords / (2 * (comm.size + 1)));
    check(at_once > 0, "a job of ", comm.size, " ranks: at most ", Comm::kHostWords / 2 - 1,
          " can tell each other numbers");
    std::vector<std::vector<int64_t>> rows(static_cast<size_t>(comm.size));
    for (size_t first = 0; first < numbers.size(); first += at_once) {
        const int64_t n = static_cast<int64_t>(std::min(at_once, numbers.size() - first));
        const Tensor mine = comm.host_words().slice(0, 2 * n), all = comm.host_words().slice(2 * n, 2 * n * comm.size);
        copy_to_device(mine, numbers.data() + first);
        comm.all_gather(all, mine, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
        std::vector<int64_t> flat(static_cast<size_t>(n * comm.size));
        copy_to_host(flat.data(), all);
        for (size_t r = 0; r < rows.size(); ++r)
            rows[r].insert(rows[r].end(), flat.begin() + static_cast<int64_t>(r) * n,
                           flat.begin() + static_cast<int64_t>(r + 1) * n);
    }
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
