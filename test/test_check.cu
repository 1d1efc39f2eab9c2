// test/test_check.cu: check() formats its message only when it fails. Launchers make dozens of checks, on every launch.
// And what arenas and tensors (core/core.h) check, and Philox's known answer.
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

TEST_CASE("control characters of a value are not in the message of a check", "[check]") {
    const std::string value("a\n\r\t\0\x1b[31m\x7fé", 13);
    CHECK(error_of([&] { fail("line 1: \"", value, "\" is not a number"); }) ==
          "line 1: \"a\\n\\r\t\\x00\\x1b[31m\\x7fé\" is not a number");
}

TEST_CASE("an arena refuses bytes that 64 bits do not hold, in one tensor or in all", "[check]") {
    Arena arena("activations");
    CHECK_THROWS_WITH(arena.take("rows", DType::f32, {int64_t{1} << 40, int64_t{1} << 30}),
                      ContainsSubstring("activations: with rows of ") && ContainsSubstring("more than 2^60 bytes"));
    for (int i = 0; i < 4; ++i) arena.take("rows", DType::i8, {int64_t{1} << 58});
    CHECK(arena.bytes() == size_t{1} << 60);
    CHECK_THROWS_WITH(arena.take("rows", DType::i8, {1 << 20}), ContainsSubstring("more than 2^60 bytes"));
}

TEST_CASE("an arena has the most that it was asked for at a time, and no more", "[check]") {
    Arena arena("toy");
    const auto take = [&] {
        const Tensor kept = arena.take("kept", DType::f32, {65});  // 260 bytes: two times 256
        const size_t mark = arena.mark();
        arena.take("scratch", DType::bf16, {300});
        arena.take("kept", DType::i8, {1});
        arena.release(mark);
        arena.take("scratch", DType::f32, {1});
        return kept;
    };
    CHECK(take().data == nullptr);
    CHECK(arena.table() == std::vector<std::pair<std::string, size_t>>{{"kept", 768}, {"scratch", 1024}});
    arena.reserve();
    CHECK(arena.bytes() == 512 + 768 + 256);
    const Tensor kept = take();
    fill_constant(kept, 3);
    CHECK(arena.mark() == 768);
    CHECK_THROWS_WITH(arena.take("more", DType::i8, {769}),
                      ContainsSubstring("arena 'toy': more wants 1024 bytes, 768 of 1536 are left"));
    CHECK_THROWS_WITH(arena.release(2048), ContainsSubstring("arena 'toy': released to 2048 bytes"));
    CHECK_THROWS_WITH(arena.reserve(), ContainsSubstring("already reserved"));
    CHECK(to_floats(kept) == std::vector<float>(65, 3));
}

TEST_CASE("what is no part of a tensor is refused", "[check]") {
    alignas(16) float memory[64] = {};
    const Tensor x = make_tensor(memory, DType::f32, {4, 16}), none = make_tensor(memory, DType::f32, {0, 16});
    CHECK(x.slice(1, 3).data == memory + 16);
    CHECK(x.slice(4, 0).n() == 0);
    CHECK(none.slice(0, 0).data == memory);
    CHECK_THROWS_WITH(x.slice(2, 3), ContainsSubstring("rows [2, 5) are not all in f32 (4, 16)"));
    CHECK_THROWS_WITH(x.slice(-1, 2), ContainsSubstring("rows [-1, 1) are not all in"));
    CHECK_THROWS_WITH(x.slice(1, -1), ContainsSubstring("rows [1, 0) are not all in"));
    CHECK_THROWS_WITH(x.view({65}), ContainsSubstring("cannot view f32 (4, 16) as f32 (65)"));
    CHECK_THROWS_WITH(make_tensor(memory, DType::f32, {4, -1}),
                      ContainsSubstring("a tensor dimension is negative: -1"));
    CHECK_THROWS_WITH(make_tensor(memory, DType::f32, {1, 1, 1, 1, 1}), ContainsSubstring("1 to 4 dimensions, not 5"));
    CHECK(scratch_as("toy", x, {8, 8}).shape[1] == 8);
    CHECK_THROWS_WITH(scratch_as("toy", x, {65}), ContainsSubstring("toy: scratch is f32 (4, 16), expected f32 of at "
                                                                    "least 65 elements"));
    CHECK_THROWS_WITH(from_floats(x, std::vector<float>(63)), ContainsSubstring("63 values for f32 (4, 16)"));
    CHECK_THROWS_WITH(expect("toy", "x", x, DType::f32, {-1, 15}),
                      ContainsSubstring("toy: x is f32 (4, 16), expected f32 (*, 15)"));
}

TEST_CASE("Philox gives its known answer; numbers below n are shares of 64 bits, normal numbers come in pairs",
          "[check]") {
    // The known answer of philox4x32-10 in Random123's tests, whose counter and key are digits of pi.
    const Philox known = philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88);
    CHECK(std::vector(known.v, known.v + 4) == std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
    const Philox draw = philox(1, 2, 3);
    CHECK(uniform_below(1, 2, 3, uint64_t{1} << 40) == (uint64_t{draw.v[0]} << 8 | draw.v[1] >> 24));
    CHECK(uniform_below(1, 2, 3, 3) == draw.v[0] / 0x55555556u);
    CHECK(uniform_below(1, 2, 3, 1) == 0);
    CHECK_THROWS_WITH(uniform_below(1, 2, 3, 0), ContainsSubstring("n must be positive"));
    const std::vector<float> many = normal_values(6, 2.0, 1, 2);
    for (const float x : many) CHECK(x != 0);
    for (const int64_t n : {1, 4, 5})
        CHECK(normal_values(n, 2.0, 1, 2) == std::vector<float>(many.begin(), many.begin() + n));
    CHECK(normal_values(0, 2.0, 1, 2).empty());
}
