// test/test_tune_matmul.cu: the file of cuBLASLt's algorithms, and runs with it. (What a choice is: test_matmul.cu.)
#include "test.h"
#include "train_runs.h"
#include "training/training.h"

#include <cstdlib>
#include <filesystem>

TEST_CASE("the file of matrix products lies in XDG_CACHE_HOME, or in the .cache of HOME", "[choices]") {
    const auto set = [](const char* name, const char* value) {
        if (value) setenv(name, value, 1);
        else unsetenv(name);
    };
    const auto value_of = [](const char* name) {
        const char* value = std::getenv(name);
        return value ? std::optional<std::string>(value) : std::nullopt;
    };
    const auto cache = value_of("XDG_CACHE_HOME"), home = value_of("HOME");
    const auto folder_with = [&](const char* its_cache, const char* its_home) {
        set("XDG_CACHE_HOME", its_cache), set("HOME", its_home);
        const std::string file = matmul_file();
        return file.substr(0, file.find("/matmul-"));
    };
    CHECK(folder_with("/c", "/h") == "/c/llm.cu");
    for (const char* none : {static_cast<const char*>(nullptr), "", "relative"}) {
        CHECK(folder_with(none, "/h") == "/h/.cache/llm.cu");
        for (const char* no_home : {static_cast<const char*>(nullptr), ""}) CHECK(folder_with(none, no_home).empty());
    }
    set("XDG_CACHE_HOME", cache ? cache->c_str() : nullptr), set("HOME", home ? home->c_str() : nullptr);
}

TEST_CASE("the file of matrix products is for one GPU, one cuBLASLt and one of our kernels", "[choices]") {
    const std::string choices = "32x24x7 f32 f32 f32 nn plain: parts  # 1.0 us\n", text = matmul_file_text(choices);
    CHECK(choices_in_matmul_file(text) == choices);
    CHECK_THAT(text, ContainsSubstring("llm.cu matmul choices of " + device().name + ", cuBLASLt "));
    for (const std::string& wrong :
         {std::string(), choices, "llm.cu matmul choices of another GPU, cuBLASLt 1\n" + choices, text.substr(0, 20),
          text.substr(0, text.find(", hopper")) + "\n" + choices})
        CHECK_THROWS_WITH(choices_in_matmul_file(wrong),
                          ContainsSubstring("its first line is not 'llm.cu matmul choices of "));
}

TEST_CASE("--tune-matmul times each product once, and later runs take what was chosen",
          "[program][train_gpt][choices]") {
    const TempFolder folder;
    const std::string cache = "env XDG_CACHE_HOME=" + folder / "cache";
    const auto run = [&](const std::string& out, const std::string& flags) {
        const Outcome outcome = train("--steps 2 --out " + folder / out + " " + flags, cache);
        INFO(outcome.err);
        REQUIRE(outcome.status == 0);
        return outcome;
    };
    run("off", "--tune-matmul off");
    run("auto", "--tune-matmul auto");
    const bool tunes = !device().is_cpu;
    CHECK(std::filesystem::exists(folder / "cache") == tunes);  // a CPU has nothing to time
    const Outcome first = run("first", "--tune-matmul on --verbose");
    CHECK_THAT(first.out, ContainsSubstring(" us; "));
    std::string file;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "cache/llm.cu")) file = entry.path();
    const std::string text = read_text_file(file);
    CHECK_THAT(first.out, ContainsSubstring(text.substr(text.find('\n') + 1)));
    run("second", "--tune-matmul on");
    CHECK(read_text_file(file) == text);
    check_same_end(folder / "first", folder / "second");
    // Every product of this model is one that our kernels follow or that has one algorithm here.
    if (device().is_cpu) check_same_end(folder / "off", folder / "first");

    run("ranks", "--tune-matmul on --ranks 2 --zero 3");

    // Where rehearsing a step would leave something changed, there is none: a resumed run is the uninterrupted one.
    for (const std::string flags : {"--dtype fp8 ", "--ranks 2 --compress 1bit ", "--offload optimizer --clip 0 "}) {
        INFO(flags);
        for (const char* out : {"whole", "resumed"}) std::filesystem::remove_all(folder / out);
        run("whole", flags + "--tune-matmul off");
        run("resumed", flags + "--tune-matmul off --stop-after 1");
        run("resumed", flags + "--tune-matmul on --resume");
        if (device().is_cpu) check_same_end(folder / "whole", folder / "resumed");
    }

    // The account has them, too: GELU and its derivative in the products before them, or in kernels of their own.
    const auto launches = [&](const std::string& choices) {
        write_text_file(file, text.substr(0, text.find('\n') + 1) + choices);
        const Outcome account = run_program("train_gpt",
                                            "--account --tune-matmul on --model test/golden/runs/models/gpt2.json "
                                            "--batch 2 --seq 16 --sample 0",
                                            cache);
        return std::stoi(account.out.substr(account.out.rfind("/s. ") + 4));
    };
    if (device().is_cpu) CHECK(launches("32x144x36 f32 f32 f32 nt bias_gelu: parts\n") > launches(""));

    // A run that times nothing leaves a spoilt file as it is, and one that does writes it anew.
    write_text_file(file, "nonsense\n");
    const std::string left = file + " is ignored, and written anew by the next run that times products: its first line";
    CHECK_THAT(run("fp8", "--tune-matmul on --dtype fp8").err, ContainsSubstring(left));
    const std::string account = "--account --tune-matmul on --batch 2 --seq 16 --sample 0";
    CHECK_THAT(run_program("train_gpt", account, cache).err, ContainsSubstring(left));
    CHECK(read_text_file(file) == "nonsense\n");
    const Outcome spoilt = run("spoilt", "--tune-matmul on");
    CHECK_THAT(spoilt.err, ContainsSubstring(file + " is ignored, and will be written anew: its first line is not"));
    CHECK_THAT(read_text_file(file), ContainsSubstring("llm.cu matmul choices of "));

    // A folder that cannot be looked into, as another user's: no reason not to train.
    std::filesystem::remove_all(folder / "cache");
    std::filesystem::create_symlink("cache", folder / "cache");
    const Outcome closed = run("closed", "--tune-matmul on");
    CHECK_THAT(closed.err, ContainsSubstring("the choices of matrix products are not kept: cannot make the folder "));

    const Outcome wrong = train("--steps 2 --tune-matmul maybe --out " + folder / "wrong", cache);
    CHECK(wrong.status == 2);
    CHECK_THAT(wrong.err, ContainsSubstring("--tune-matmul maybe: use on, off or auto"));
}
