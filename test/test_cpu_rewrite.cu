// cpu/rewrite: sources that are hard to read for a program that looks for <<< and __shared__ only. The first half of
// this file IS such a source: that it compiles, and that __LINE__ is true after each difficulty, is the test. Under
// nvcc the same half checks that it is valid CUDA. The second half runs build/rewrite on texts.
#include "test.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "temp_folder.h"

#ifdef CUDA_ON_CPU
#include <sys/wait.h>
#endif

// The layout is what is tested: no clang-format.
// clang-format off
namespace {

int* device_ints(size_t n) {
    int* data = nullptr;
    REQUIRE(cudaMalloc(&data, n * sizeof(int)) == cudaSuccess);
    REQUIRE(cudaMemset(data, 0, n * sizeof(int)) == cudaSuccess);
    return data;
}
int first(const int* data) {
    int value = 0;
    REQUIRE(cudaGetLastError() == cudaSuccess);
    REQUIRE(cudaMemcpy(&value, data, sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess);
    return value;
}

// kernel<<<1, 2>>>(3) in a comment
/* and k<<<1,1>>>( in another, with __shared__ int x[3]; */
template <class A, int B>
struct Pair {
    A a[B];
};
namespace inner {
template <class T, int N, bool on>
__global__ void fill_kernel(T* p, T v) {
    if (threadIdx.x < N && on) p[threadIdx.x] = v;
}
}  // namespace inner

__global__ void shared_kernel(int* p) {
    __shared__ int a[2], b[3 * (1 + 1)]; __shared__ Pair<int, 4> c;  // __shared__ int d[1];
    __shared__ __align__(16)
        int e[2][3];  /* two
        lines */ __shared__ float f; const int line = __LINE__;
    extern __shared__ __align__(8) unsigned char bytes[];
    a[0] = b[5] = 1; c.a[3] = 2; e[1][2] = 3; f = 4; bytes[7] = 5;
    *p = a[0] + b[5] + c.a[3] + e[1][2] + static_cast<int>(f) + bytes[7] + 1000 * line;
}
const int shared_kernel_line = __LINE__ - 5;

__global__ void set_kernel(int* p, const char* text, int v) { *p = text ? 1 : v; }
__global__ void nothing_kernel() {}

#define LAUNCH(kernel, n) \
    kernel<<<1,           \
             n>>>         \
    (p, nullptr, 5)
#define KEYWORD __shared__

const char* const in_a_string = "k<<<1,1>>>(\" x", *const raw = R"x(k<<<1>>>()" __shared__ )x";
const char quotes[] = {'"', '\'', '<'};

}  // namespace

TEST_CASE("launches and shared memory, hard to read", "[cpu][rewrite]") {
    int* p = device_ints(64);
    const int64_t big = 1'000; nothing_kernel<<<1, 1>>>();

    const int start = __LINE__;
    inner::fill_kernel<int, (3 > 2) ? 32 : 1, (1 < 2)>  // the kernel
        <<<big / 1000,   // one "block
           dim3(32)>>>   /* and */
        (p, 7); CHECK(__LINE__ == start + 4);
    CHECK(first(p) == 7);
    const int line = __LINE__; shared_kernel<<<1, 1, 8>>>(p); CHECK(__LINE__ == line);
    CHECK(first(p) == 1 + 1 + 2 + 3 + 4 + 5 + 1000 * shared_kernel_line);

    nothing_kernel<<<1, 1>>>( /* no arguments */ );
    if (p) nothing_kernel<<<1, 1>>>();
    else nothing_kernel<<<1, 2>>>();
    LAUNCH(set_kernel, 1); CHECK(__LINE__ == line + 6);
    CHECK(first(p) == 5);
    auto pointer = set_kernel; pointer<<<1, 1>>>(p, nullptr, "<<<"[1] == '<' ? 8 : 9);
    CHECK(first(p) == 8);
    int shifted = 1; shifted <<= 3; shifted = shifted >> 1 >> 1;
    CHECK(shifted == 2);
    CHECK(__LINE__ == line + 12);
    CHECK(std::string(in_a_string) + raw == "k<<<1,1>>>(\" xk<<<1>>>()\" __shared__ ");
    CHECK(quotes[0] == '"');
    cudaFree(p);
}

// clang-format on
#ifdef CUDA_ON_CPU

namespace {

struct Rewritten {
    int status;
    std::string out;
};
Rewritten rewrite(const std::string& source) {
    const TempFolder folder;
    const std::filesystem::path build = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path();
    const char* path = std::getenv("REWRITE");
    const std::string program = path ? path : (build / "rewrite").string(), file = folder / "a.cu";
    spit(file, source);
    FILE* pipe = popen(("'" + program + "' " + file + " 2>&1").c_str(), "r");
    REQUIRE(pipe != nullptr);
    Rewritten result{};
    for (char buffer[256]; const size_t n = fread(buffer, 1, sizeof buffer, pipe);) result.out.append(buffer, n);
    result.status = WEXITSTATUS(pclose(pipe));
    for (size_t at; (at = result.out.find(folder.path + "/")) != std::string::npos;)
        result.out.erase(at, folder.path.size() + 1);
    return result;
}

}  // namespace

TEST_CASE("what rewrite writes", "[cpu][rewrite]") {
    CHECK(rewrite("int x;\n").out == "#line 1 \"a.cu\"\nint x;\n");
    CHECK(
        rewrite("f<T><<<g, b, 0, s>>>(x, y);").out ==
        "#line 1 \"a.cu\"\n::cuda_cpu::launch({\"f<T>\", [=](auto of_) -> decltype(of_(f<T>)) { return of_(f<T>); }}, "
        "__FILE__, __LINE__, ::cuda_cpu::Configuration(g, b, 0, s), "
        "[=](auto... arguments_) -> decltype(f<T>(arguments_...)) { f<T>(arguments_...); }, x, y);");
    CHECK(rewrite("__shared__ float a[2], b;").out ==
          "#line 1 \"a.cu\"\n__shared__ float a[2], b; ::cuda_cpu::shared_declared(&a, sizeof(a)); "
          "::cuda_cpu::shared_declared(&b, sizeof(b));");
    CHECK(rewrite("extern __shared__ __align__(16) const Pair<int, 2> rows[];").out ==
          "#line 1 \"a.cu\"\nconst Pair<int, 2>* rows = static_cast<const Pair<int, "
          "2>*>(::cuda_cpu::dynamic_shared_memory());");
    CHECK(rewrite("__global__ void __launch_bounds__(kA<T, 2>, 1) f(int* p)\n{ *p = 1; }").out ==
          "#line 1 \"a.cu\"\n__global__ void __launch_bounds__(kA<T, 2>, 1) f(int* p)\n{ "
          "CHECK_LAUNCH_BOUNDS(kA<T, 2>, 1); *p = 1; }");
    // Left alone.
    for (const std::string source :
         {"// f<<<1, 1>>>()\n", "/* __shared__ int a; */", "\"f<<<1,1>>>()\" '\"' \"__shared__\"",
          "R\"(f<<<1>>>()\")\" 1'000 0xff'ff", "x << y >> z <<= 1", "#define S __shared__ int",
          "// one \\\n f<<<1,1>>>()\n", "my__shared = 1;", "__global__ void __launch_bounds__(32) f(); int g() {}"})
        CHECK(rewrite(source).out == "#line 1 \"a.cu\"\n" + source);
}

TEST_CASE("rewriting keeps every line where it is", "[cpu][rewrite]") {
    const std::vector<std::string> sources = {"a\nf\n<<<\n1,\n2\n>>>\n(\nx\n)\n;\nb\n",
                                              "a\nf<\nint\n>\n<<<1, // c\n2>>>(x,\ny);\nb\n",
                                              "a\n__shared__\nint\na[\n3]\n;\nb\n",
                                              "a\nextern\n__shared__\nint\na[\n]\n;\nb\n",
                                              "#define A \\\n f<<<1, \\\n 2>>> \\\n (x)\nb\n",
                                              "a\r\nf<<<1,\r\n1>>>(x);\r\nb\r\n"};
    for (const std::string& source : sources) {
        const std::string out = rewrite(source).out;
        INFO(out);
        CHECK(std::count(out.begin(), out.end(), '\n') == std::count(source.begin(), source.end(), '\n') + 1);
        const char last = source[source.find_last_not_of("\r\n")];
        CHECK(out[out.find_last_not_of("\r\n")] == last);
    }
    // In a macro, the lines stay continued.
    CHECK(rewrite(sources[4]).out.find("__LINE__, ::cuda_cpu::Configuration(1,    2)") != std::string::npos);
    CHECK(rewrite(sources[4]).out.find("}, \\\n\\\nx)\nb\n") != std::string::npos);
}

TEST_CASE("what rewrite does not understand is an error with the line", "[cpu][rewrite]") {
    const auto error = [](const std::string& source) {
        const Rewritten result = rewrite(source);
        CHECK(result.status == 1);
        return result.out;
    };
    CHECK_THAT(error("\n\nf<<<1, 2 (x);\n"), ContainsSubstring("a.cu:3: error: kernel launch without >>>"));
    CHECK_THAT(error("\nf<<<1, 2>>>;\n"), ContainsSubstring("a.cu:2: error: expected kernel<<<"));
    CHECK_THAT(error("= <<<1, 2>>>(x);\n"), ContainsSubstring("a.cu:1: error: expected kernel<<<"));
    CHECK_THAT(error("f<<<1, 2>>>(x;\n"), ContainsSubstring("a.cu:1: error: kernel launch without a closing"));
    CHECK_THAT(error("\n\n\n__shared__ int x"), ContainsSubstring("a.cu:4: error: __shared__ declaration without ;"));
    CHECK_THAT(error("extern __shared__ int x;"),
               ContainsSubstring("a.cu:1: error: expected extern __shared__ type name[]"));
    CHECK(rewrite("").status == 0);
}

#endif
