// The CPU device's NCCL (cpu/nccl.h): what streams and hosts wait for, the order of sums, groups, splits, aborts. What
// it reports is in wrong_kernels.cu; all collectives are in test_comm.cu.
#include "temp_folder.h"
#include "test.h"

#ifdef CUDA_ON_CPU

#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>

namespace {

void must(ncclResult_t result) {
    check(result == ncclSuccess, ncclGetErrorString(result), ": ", ncclGetLastError(nullptr));
}

// A rank: a thread with a device, a stream and numbers on it.
struct Rank {
    int rank;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;

    template <class T>
    T* put(const std::vector<T>& numbers) const {
        void* data;
        cudaCheck(cudaMalloc(&data, numbers.size() * sizeof(T)));
        cudaCheck(cudaMemcpyAsync(data, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
        return static_cast<T*>(data);
    }
    template <class T>
    std::vector<T> get(const T* data, size_t n) const {
        std::vector<T> numbers(n);
        cudaCheck(cudaMemcpyAsync(numbers.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
        cudaCheck(cudaStreamSynchronize(stream));
        return numbers;
    }
};

// f on n ranks; the first error of any of them. Their communicator is f's to destroy.
void run(int n, const std::function<void(Rank&)>& f) {
    setenv("CUDA_CPU_DEVICES", std::to_string(n).c_str(), 1);
    ncclUniqueId id;
    must(ncclGetUniqueId(&id));
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i)
        threads.emplace_back([&, i] {
            try {
                cudaCheck(cudaSetDevice(i));
                Rank its{i};
                its.stream = make_stream();
                must(ncclCommInitRank(&its.comm, n, id, i));
                f(its);
                cudaCheck(cudaStreamDestroy(its.stream));
            } catch (...) {
                errors[static_cast<size_t>(i)] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

bool comes_true(const std::function<bool()>& ready, int milliseconds) {
    for (int i = 0; i < milliseconds && !ready(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ready();
}

// Does the caller's thread wait, as another one may ask? It sleeps (the letter behind its name tells), or, in strict
// mode, looks again and again: that takes 2 ms of a core's time, and the way to a call does not.
std::function<bool()> wait_of_this_thread() {
    clockid_t clock;
    ::pthread_getcpuclockid(::pthread_self(), &clock);
    const auto ms = [clock] {
        timespec time{};
        ::clock_gettime(clock, &time);
        return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
    };
    return [ms, before = ms(), stat = concat("/proc/self/task/", ::gettid(), "/stat")] {
        return slurp(stat).find(") S") != std::string::npos || ms() > before + 2;
    };
}

}  // namespace

TEST_CASE("NCCL adds along a ring, and rounds 16-bit numbers at each addition", "[cpu][nccl]") {
    // 2^24 + 1 + 1 is 2^24 + 2 if the ones are added first, and 2^24 otherwise; in bf16 256 takes the place of 2^24.
    static constexpr float big = 1 << 24;
    run(3, [](Rank& its) {
        const std::vector<float> x(6, its.rank == 0 ? big : 1);
        float* const data = its.put(x);
        must(ncclAllReduce(data, data, 6, ncclFloat32, ncclSum, its.comm, its.stream));
        // Piece 0 is (x_1 + x_2) + x_0, piece 1 is (x_2 + x_0) + x_1, piece 2 is (x_0 + x_1) + x_2.
        check(its.get(data, 6) == std::vector<float>{big + 2, big + 2, big, big, big, big}, "all-reduce");
        float* const root = its.put(x);
        must(ncclReduce(root, root, 6, ncclFloat32, ncclSum, 1, its.comm, its.stream));
        if (its.rank == 1) check(its.get(root, 6) == std::vector<float>(6, big), "reduce to rank 1");
        __nv_bfloat16* const half = its.put(std::vector<__nv_bfloat16>(3, its.rank == 0 ? 256.0f : 1.0f));
        must(ncclReduceScatter(half, half + its.rank, 1, ncclBfloat16, ncclSum, its.comm, its.stream));
        const float sum = its.get(half + its.rank, 1)[0];
        check(sum == (its.rank == 0 ? 258 : 256), "reduce-scatter in bf16: ", sum);
        for (void* memory : {static_cast<void*>(data), static_cast<void*>(root), static_cast<void*>(half)})
            cudaCheck(cudaFree(memory));
        must(ncclCommDestroy(its.comm));
    });
}

TEST_CASE("NCCL splits by color, in the order of the keys", "[cpu][nccl]") {
    run(5, [](Rank& its) {
        ncclComm_t part;
        const bool left_out = its.rank == 4;
        must(ncclCommSplit(its.comm, left_out ? NCCL_SPLIT_NOCOLOR : its.rank % 2, -its.rank, &part, nullptr));
        check((part == nullptr) == left_out, "rank ", its.rank, " is in no part");
        if (part) {
            float* const data = its.put(std::vector<float>{static_cast<float>(its.rank), 0, 0});
            must(ncclAllGather(data, data + 1, 1, ncclFloat32, part, its.stream));
            const float low = static_cast<float>(its.rank % 2);
            check(its.get(data + 1, 2) == std::vector<float>{low + 2, low}, "the higher rank comes first");
            cudaCheck(cudaFree(data));
            must(ncclCommDestroy(part));
        }
        must(ncclCommDestroy(its.comm));
    });
}

TEST_CASE("hosts wait for each other in the first message of two ranks, and not in the second", "[cpu][nccl]") {
    std::atomic<bool> has_come = false;
    std::atomic<int> n_put = 0;
    run(2, [&](Rank& its) {
        float* const data = its.put(std::vector<float>{1, 2});
        if (its.rank == 0) {
            for (int i = 0; i < 2; ++i) {
                must(ncclSend(data + i, 1, ncclFloat32, 1, its.comm, its.stream));
                check(has_come, "the first send did not wait for the other host");
                ++n_put;
            }
        } else {
            check(!comes_true([&] { return n_put > 0; }, 20), "no send is put on a stream before a receive");
            has_come = true;
            must(ncclRecv(data + 1, 1, ncclFloat32, 0, its.comm, its.stream));
            check(comes_true([&] { return n_put == 2; }, 5000), "the second send waits for the host");
            must(ncclRecv(data, 1, ncclFloat32, 0, its.comm, its.stream));
            check(its.get(data, 2) == std::vector<float>{2, 1}, "messages are matched by their order");
        }
        cudaCheck(cudaFree(data));
        must(ncclCommDestroy(its.comm));
    });
}

TEST_CASE("messages that cross outside of a group wait until the communicator is aborted", "[cpu][nccl]") {
    if (!cuda_cpu::strict) SKIP_TEST("by default a send does not wait");
    std::atomic<int> n_asked = 0;
    run(2, [&](Rank& its) {
        float* const data = its.put(std::vector<float>{7, 8});
        const auto exchange = [&] {
            must(ncclSend(data, 1, ncclFloat32, 1 - its.rank, its.comm, its.stream));
            must(ncclRecv(data + 1, 1, ncclFloat32, 1 - its.rank, its.comm, its.stream));
        };
        must(ncclGroupStart());
        must(ncclGroupStart());
        exchange();
        must(ncclGroupEnd());
        check(its.get(data, 2) == std::vector<float>{7, 8}, "the inner group has put something on the stream");
        must(ncclGroupEnd());
        check(its.get(data, 2) == std::vector<float>{7, 7}, "a group");
        exchange();
        const auto is_done = [&] { return cudaStreamQuery(its.stream) == cudaSuccess; };
        check(!comes_true(is_done, 50), "sends that cross were not waited for");
        ++n_asked;
        check(comes_true([&] { return n_asked == 2; }, 5000), "the other rank");
        must(ncclCommAbort(its.comm));
        check(comes_true(is_done, 5000), "the stream goes on");
        cudaCheck(cudaFree(data));
    });
}

TEST_CASE("an abort ends what waits, on a host and on a stream", "[cpu][nccl]") {
    run(2, [](Rank& its) {
        if (its.rank == 1) return must(ncclCommAbort(its.comm));  // it never comes to what rank 0 waits for
        float* const data = its.put(std::vector<float>{1});
        std::atomic<bool> calls = false;
        std::thread other([&, waits = wait_of_this_thread()] {  // an abort before the call would be a fault
            comes_true([&] { return calls && waits(); }, 20'000);
            must(ncclCommAbort(its.comm));
        });
        calls = true;
        const ncclResult_t result = ncclAllReduce(data, data, 1, ncclFloat32, ncclSum, its.comm, its.stream);
        other.join();
        check(result == ncclInternalError, "the first collective waits for the other host");
        check(its.get(data, 1)[0] == 1, "nothing was done");
        cudaCheck(cudaFree(data));
    });
}

// Its memory may be gone.
TEST_CASE("what has been aborted is not received later", "[cpu][nccl]") {
    std::atomic<bool> aborted = false, sent = false;
    run(2, [&](Rank& its) {
        float* const data = its.put(std::vector<float>{5, 6});
        if (its.rank == 0) must(ncclSend(data, 1, ncclFloat32, 1, its.comm, its.stream));  // connects the two
        else must(ncclRecv(data, 1, ncclFloat32, 0, its.comm, its.stream));
        cudaCheck(cudaStreamSynchronize(its.stream));
        if (its.rank == 1) {
            std::atomic<bool> calls = false;
            std::thread other([&, waits = wait_of_this_thread()] {
                comes_true([&] { return calls && waits(); }, 20'000);
                must(ncclCommAbort(its.comm));
            });
            calls = true;
            ncclRecv(data + 1, 1, ncclFloat32, 0, its.comm, its.stream);  // in strict mode the stream waits instead
            other.join();
            cudaCheck(cudaStreamSynchronize(its.stream));
            aborted = true;
            check(comes_true([&] { return sent.load(); }, 5000), "the send");
            check(its.get(data, 2) == std::vector<float>{5, 6}, "it was received");
        } else {
            check(comes_true([&] { return aborted.load(); }, 20'000), "the abort");
            must(ncclSend(data, 1, ncclFloat32, 1, its.comm, its.stream));
            comes_true([&] { return cudaStreamQuery(its.stream) == cudaSuccess; }, 20);
            sent = true;
            must(ncclCommAbort(its.comm));
        }
        cudaCheck(cudaFree(data));
    });
}

TEST_CASE("what NCCL refuses", "[cpu][nccl]") {
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    run(1, [](Rank& its) {
        float* const data = its.put(std::vector<float>{1, 2});
        check(ncclSend(data, 1, ncclFloat32, 1, its.comm, its.stream) == ncclInvalidArgument, "no such rank");
        check(ncclAllReduce(data, data, 1, static_cast<ncclDataType_t>(8), ncclSum, its.comm, its.stream) ==
                  ncclInvalidArgument,
              "double");
        ncclUniqueId id;
        ncclComm_t none;
        must(ncclGetUniqueId(&id));
        check(ncclCommInitRank(&none, 1, id, 1) == ncclInvalidArgument, "rank 1 of 1");
        // No numbers touch no bytes, wherever they lie.
        must(ncclGroupStart());
        must(ncclAllReduce(data, data, 2, ncclFloat32, ncclSum, its.comm, its.stream));
        must(ncclAllReduce(data + 1, data + 1, 0, ncclFloat32, ncclSum, its.comm, its.stream));
        must(ncclGroupEnd());
        cudaCheck(cudaStreamSynchronize(its.stream));
        cudaStream_t second = make_stream();
        must(ncclGroupStart());
        must(ncclAllReduce(data, data, 1, ncclFloat32, ncclSum, its.comm, its.stream));
        must(ncclAllReduce(data + 1, data + 1, 1, ncclFloat32, ncclSum, its.comm, second));
        check(ncclGroupEnd() == ncclInvalidUsage, "a group on two streams");
        cudaCheck(cudaStreamDestroy(second));
        // A stream that is captured. What was not put there is not under way: a split is right.
        cudaCheck(cudaStreamBeginCapture(its.stream, cudaStreamCaptureModeRelaxed));
        check(ncclAllReduce(data, data, 1, ncclFloat32, ncclSum, its.comm, its.stream) == ncclUnhandledCudaError,
              "in a graph");
        cudaGraph_t graph;
        check(cudaStreamEndCapture(its.stream, &graph) != cudaSuccess, "the capture");
        cudaGetLastError();
        ncclComm_t part;
        must(ncclCommSplit(its.comm, 0, 0, &part, nullptr));
        must(ncclCommDestroy(part));
        cudaCheck(cudaFree(data));
        must(ncclCommDestroy(its.comm));
    });
    // Two ranks on one device.
    ncclUniqueId id;
    must(ncclGetUniqueId(&id));
    ncclResult_t results[2];
    const auto make = [&](int rank) {
        ncclComm_t comm;
        results[rank] = ncclCommInitRank(&comm, 2, id, rank);
    };
    std::thread other(make, 1);
    make(0);
    other.join();
    CHECK(results[0] == ncclInvalidUsage);
    CHECK(results[1] == ncclInvalidUsage);
}

#endif
