// test/test_check.cu: check() formats its message only when it fails. Launchers make dozens of checks, on every launch.
#include "layers/layers.h"
#include "temp_folder.h"
#include "test.h"

#include <cstdlib>
#include <functional>
#include <new>

// Every allocation of the program is counted, for each thread by itself.
static thread_local int64_t n_allocations = 0;
void* operator new(size_t bytes) {
    ++n_allocations;
    if (void* memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

TEST_CASE("a check that passes makes no text", "[check]") {
    alignas(16) float memory[256] = {};
    const Tensor x = make_tensor(memory, DType::f32, {4, 16}), ids = make_tensor(memory, DType::i32, {0, 16});
    const Tensor none = make_tensor(memory, DType::f32, {0, 16}), row = make_tensor(memory, DType::f32, {16}),
                 no_rows = make_tensor(memory, DType::f32, {0});
    const Tensor three = make_tensor(memory, DType::f32, {0, 16, 16});
    const HeadColumns heads{make_tensor(memory, DType::f32, {1, 1, 16}), 1, 16};
    // Without rows launchers check their arguments, and launch nothing.
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"view",
         [&] {
             x.view({16, 4});
         }},
        {"slice", [&] { x.slice(1, 2); }},
        {"expect",
         [&] {
             expect("operation", "argument", x, DType::f32, {-1, 16});
         }},
        {"check", [&] { check(true, "x is ", x, ", expected another: a message longer than a short string"); }},
        {"rmsnorm", [&] { rmsnorm_forward(none, {}, no_rows, none, {}, row, 1e-5f, nullptr); }},
        {"layernorm", [&] { layernorm_forward(none, {}, no_rows, no_rows, none, {}, row, row, 1e-5f, nullptr); }},
        {"matmul",
         [&] {
             matmul(none, none, make_tensor(memory, DType::f32, {16, 16}), {}, nullptr);
         }},
        {"embedding", [&] { embedding_forward(three, ids, {}, x, {}, nullptr); }},
        {"column sum", [&] { column_sum(row, none, true, x, nullptr); }},
        {"qkv_heads", [&] { qkv_heads(heads.rows, 2, 1); }},
        {"expect_head_size", [&] { expect_head_size(FlashTier::automatic, DType::f32, 12, 20); }},
    };
    for (const auto& [name, call] : calls) {
        call();  // the first call may fill tables
        const int64_t before = n_allocations;
        call();
        const int64_t made = n_allocations - before;
        INFO(name);
        CHECK(made == 0);
    }
    // The count works: a check that fails does make text.
    const int64_t before = n_allocations;
    CHECK_THROWS_WITH(check(false, "x is ", x, ", expected something else"), ContainsSubstring("f32 (4, 16)"));
    CHECK(n_allocations > before);
}

TEST_CASE("errors of numbers and of memory say what holds in every program", "[check]") {
    CHECK(error_of([] { narrow(-1, "rows"); }) == "rows is -1: here it must be from 0 to 2147483647");
    const std::string message = error_of([] { cuda_check(cudaErrorMemoryAllocation, "cudaMalloc()", "a.cu", 1); });
    CHECK(one_line_with(message, "MiB free of", "--plan"));
    CHECK(message.find("--micro-batch") == std::string::npos);  // of train_gpt alone
}

TEST_CASE("of a long value the message of a check has the beginning and the end", "[check]") {
    const std::string message =
        error_of([] { check(false, "--data a", std::string(3000, 'x'), "z: give the name of a file"); });
    CHECK(message.size() < 700);
    CHECK(one_line_with(message, "--data axxx", "xxx ... xxx", "xxxz: give the name of a file"));
    // An explanation of many parts is passed on as one part, and is whole: how to go on may stand in its middle.
    const std::string explanation =
        error_of([] { fail(std::string(500, 'a'), std::string(500, 'b'), std::string(500, 'c')); });
    CHECK(explanation.size() == 1500);
    CHECK(error_of([&] { fail(explanation); }) == explanation);
    std::string two_bytes_each;
    for (int i = 0; i < 1500; ++i) two_bytes_each += "é";
    for (const char* before : {"", "a"})
        CHECK(one_line_with(error_of([&] { fail(before + two_bytes_each); }), "é ... é"));
}
