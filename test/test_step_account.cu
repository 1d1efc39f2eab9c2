// test/test_step_account.cu: train_gpt --account: the launches of a step are those of a run, and the account of GPT-2
// 124M on an H100 keeps its promises.
#include "layers/layers.h"
#include "model/model.h"
#include "program.h"
#include "stb_image.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>

namespace {

std::vector<std::vector<std::string>> read_tsv(const std::string& path) {
    std::istringstream text(slurp(path));
    std::vector<std::vector<std::string>> rows;
    for (std::string line; std::getline(text, line);) {
        std::istringstream cells(line);
        rows.emplace_back();
        for (std::string cell; std::getline(cells, cell, '\t');) rows.back().push_back(cell);
    }
    return rows;
}

// The kernels of a step, as the account lists them; without copies, which the profile of a run has not.
std::vector<std::string> kernels_of_account(const std::string& path) {
    std::vector<std::string> names;
    const auto rows = read_tsv(path);
    for (size_t i = 1; i < rows.size(); ++i)
        if (!rows[i][0].starts_with("mem")) names.push_back(rows[i][0]);
    return names;
}

double number_before(const std::string& text, const std::string& what) {
    const size_t end = text.find(what);
    REQUIRE(end != std::string::npos);
    const size_t begin = text.find_last_of(" \n", end - 1) + 1;
    double value = std::stod(text.substr(begin, end - begin));
    if (text[end - 1] == 'k') value *= 1e3;
    if (text[end - 1] == 'M') value *= 1e6;
    return value;
}

}  // namespace

TEST_CASE("the account lists the launches of a run, in order", "[program][account]") {
#ifdef CUDA_ON_CPU
    const TempFolder folder;
    spit(folder / "text.txt", made_text(200));
    const std::string models = "test/golden/runs/models/";
    for (const std::string& flags : {"--model " + models + "gpt2.json --micro-batch 2",
                                     "--model " + models + "llama.json --dtype bf16 --recompute 2 --optimizer muon",
                                     "--model " + models + "deepseek.json --dtype bf16 --attention mma",
                                     "--model " + models + "llama_wide.json --dtype fp8 --attention hopper --seq 48"}) {
        const std::string account = folder / "account", profile = folder / "profile.tsv";
        const std::string all = concat("--batch 4 --seq 32 --sample 0 ", flags);
        const Outcome planned = run_program("train_gpt", concat("--account ", all, " --out ", account));
        // Two steps, the second of which has nothing to set up.
        const Outcome run = run_program("train_gpt",
                                        concat("--steps 2 --val-every 0 --val-fraction 0 --save-every 0 --data ",
                                               folder / "text.txt --out ", folder / "run ", all),
                                        concat("export CUDA_CPU_PROFILE=", profile, ";"));
        INFO(flags << "\n" << planned.out << planned.err << run.out << run.err);
        REQUIRE((planned.status == 0 && run.status == 0));
        const std::vector<std::string> expected = kernels_of_account(account + "/launches.tsv");
        std::vector<std::string> seen;
        for (const auto& row : read_tsv(profile))
            seen.push_back(row[2].substr(0, row[2].find('<')));  // without arguments of templates
        REQUIRE(expected.size() > 20);
        CHECK((flags.find("--attention mma") != std::string::npos) ==
              (planned.out.find(", --attention mma\n") != std::string::npos));
        // What is launched behind the norm is the optimizer's, whatever the kernel does, or quantises the new weights.
        const auto launches = read_tsv(account + "/launches.tsv");
        const auto is_norm = [](const std::vector<std::string>& row) { return row[0] == "add_sums_kernel"; };
        const auto norm = std::find_if(launches.begin(), launches.end(), is_norm);
        REQUIRE(norm != launches.end());
        CHECK((*norm)[1] == "gradient norm");
        for (auto launch = norm + 1; launch != launches.end(); ++launch) {
            INFO((*launch)[0]);
            const bool is_product = (*launch)[2] != "0",
                       is_cast = std::regex_search((*launch)[0], std::regex("quantise|amax|advance"));
            CHECK((*launch)[1] == (is_cast ? "8-bit casts" : is_product ? "optimizer's products" : "optimizer"));
        }
        const auto at = std::find_end(seen.begin(), seen.end(), expected.begin(), expected.end());
        if (at == seen.end()) {  // where they part, of the last step
            const size_t first = seen.size() - std::min(seen.size(), expected.size());
            size_t i = 0;
            while (i < expected.size() && first + i < seen.size() && seen[first + i] == expected[i]) ++i;
            FAIL("launch " << i << " of " << expected.size() << " is "
                           << (i < expected.size() ? expected[i] : "missing") << " in the account, and "
                           << seen[std::min(first + i, seen.size() - 1)] << " in the run");
        }
        std::filesystem::remove_all(folder / "run");
        std::filesystem::remove(profile);
    }
#else
    SKIP_TEST("the CPU device's profile names every launch");
#endif
}

TEST_CASE("the account tells the head's products from those of blocks with the same sizes", "[program][account]") {
#ifdef CUDA_ON_CPU
    // Width, vocabulary, and gate and up together are 256; the third chunk of the head has 20 of the 64 rows.
    const TempFolder folder;
    spit(folder / "config.json",
         R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 128,
             "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64})");
    for (const int64_t chunks : {1, 3}) {
        const std::string out = printed_by(
            "train_gpt", concat("--account --model ", folder / "config.json", " --batch 2 --seq 32 --device-spec h100 ",
                                "--out ", folder / "account", " --head-chunks ", chunks));
        INFO(out);
        double head = 0, blocks = 0;
        int64_t n_head = 0;
        std::set<std::string> operations;
        for (const auto& row : read_tsv(folder / "account/launches.tsv")) {
            operations.insert(row[1] + " " + (row[2] == "0" ? row[0] : concat(row[2], " ", row[3], " ", row[4])));
            if (row[1] == "head products") head += std::stod(row[9]), ++n_head;
            if (row[1] == "block products") blocks += std::stod(row[9]);
        }
        CHECK(n_head == 3 * chunks);
        const double tokens = 64, C = 256, F = 128, L = 3;
        CHECK(head == Approx(6 * tokens * C * 256).epsilon(1e-4));
        CHECK(blocks == Approx(6 * tokens * L * (4 * C * C + 3 * C * F)).epsilon(1e-4));
        // Those of the head have rows of their own in the picture. (The first of launches.tsv has the headings.)
        int width = 0, height = 0, channels = 0;
        uint8_t* pixels = stbi_load((folder / "account/account.png").c_str(), &width, &height, &channels, 1);
        REQUIRE(pixels != nullptr);
        size_t n_rows = 0;
        while (n_rows < 30 && pixels[(91 + 35 * static_cast<int>(n_rows) / 2) * width + 826] < 240) ++n_rows;
        stbi_image_free(pixels);
        CHECK(n_rows == std::min<size_t>(30, operations.size() - 1));
    }
#else
    SKIP_TEST("the CPU device has this account");
#endif
}

TEST_CASE("the account of GPT-2 124M on an H100", "[program][account]") {
#ifdef CUDA_ON_CPU
    const TempFolder folder;
    const std::string out = printed_by("train_gpt", concat("--account --model gpt2 --dtype bf16 --batch 64 --seq 1024 "
                                                           "--sample 0 --attention hopper --device-spec h100 --out ",
                                                           folder.path));
    INFO(out);
    const std::string account = slurp(folder / "account.md");
    CHECK(number_before(account, " launches.") <= 230);
    CHECK(number_before(account, " times the bytes that it must") <= 1.15);
    CHECK(number_before(account, " tokens/s predicted") >= 590e3);  // measured: 593e3 to 599e3
    // With 640 TFLOP/s of block products and 700 of the head's, as measured of cuBLASLt alone, out of a step.
    const auto column = [&](const std::string& group, int n) {
        size_t at = account.find("| " + group + " |");
        REQUIRE(at != std::string::npos);
        for (int i = 0; i < n; ++i) at = account.find('|', at) + 1;
        return std::stod(account.substr(at));
    };
    constexpr int kTera = 5, kPredicted = 8;
    double ms = column("all", kPredicted);
    for (const auto& [group, rate] : {std::pair{"block products", 640.0}, {"head products", 700.0}})
        ms += 1e3 * column(group, kTera) / rate - column(group, kPredicted);
    CHECK(65536 / ms * 1e3 >= 600e3);
    CHECK(account == slurp("dev/ACCOUNT.md"));  // `make account` writes it anew
    CHECK(slurp(folder / "account.png").substr(1, 3) == "PNG");
    // FLOPs of the products: 6 for each weight that multiplies, and each token. Attention: two products forward and
    // five backward, of the causal half.
    double products = 0, attention = 0, of_ours = 0;
    const auto rows = read_tsv(folder / "launches.tsv");
    for (size_t i = 1; i < rows.size(); ++i) {
        const double flops = std::stod(rows[i][9]);
        if (rows[i][1] == "block products" || rows[i][1] == "head products") products += flops;
        if (rows[i][0].starts_with("hopper_matmul")) of_ours += flops;
        if (rows[i][1].find("attention") != std::string::npos) attention += flops;
    }
    const double tokens = 65536, weights = 12 * 12 * 768.0 * 768 + 50304 * 768.0;
    CHECK(products == Approx(6 * tokens * weights).epsilon(1e-3));
    // Ours for Hopper, in each block: up forward, the gradients of down's and of attn_out's inputs, and those of the
    // weights, with those of the biases.
    CHECK(of_ours == Approx(2 * tokens * 12 * (4 + 4 + 1 + 3 + 1 + 4 + 4) * 768.0 * 768).epsilon(1e-5));
    CHECK(attention == Approx(12 * 14 * tokens * 768.0 * 1024 / 2).epsilon(0.05));
    // In the picture each operation has a disc at its FLOPs for a byte and its FLOP/s, both on log axes, and, the
    // longest first, a row with the colour of its group.
    struct Operation {
        std::string group;
        double moved = 0, flops = 0, predicted = 0;
    };
    std::map<std::string, Operation> operations;
    for (size_t i = 1; i < rows.size(); ++i) {
        const std::vector<std::string>& row = rows[i];
        const auto number = [&](size_t column) { return std::stod(row[column]); };
        Operation& operation = operations[row[2] == "0" ? row[0] : row[2] + " " + row[3] + " " + row[4]];
        operation.group = row[1], operation.moved += number(5) + number(6) + number(8);
        operation.flops += number(9), operation.predicted += number(11);
    }
    int width = 0, height = 0, channels = 0;
    uint8_t* pixels = stbi_load((folder / "account.png").c_str(), &width, &height, &channels, 3);
    REQUIRE(pixels != nullptr);
    const auto color_at = [&](double x, double y) {
        const uint8_t* const rgb = pixels + 3 * (static_cast<int>(y) * width + static_cast<int>(x));
        return std::array<int, 3>{rgb[0], rgb[1], rgb[2]};
    };
    const auto is_empty = [&](double x, double y) {
        const auto [r, g, b] = color_at(x, y);
        return r == g && g == b && r > 200;
    };
    // Below the title, of which a canvas has the same text.
    const std::string summary = format("predicted for h100: %.1f ms, %s tokens/s", column("all", 8),
                                       human_count(number_before(account, " tokens/s predicted")).c_str());
    Canvas canvas(width, height);
    canvas.text({16, 48}, summary, 10, {40, 40, 40});
    for (int y = 37; y < 52; ++y)
        CHECK(std::equal(pixels + 3 * y * width, pixels + 3 * (y + 1) * width, canvas.rgb().begin() + 3 * y * width));
    std::vector<std::pair<double, std::string>> longest;
    double leftmost = 1e9, at_height = 0;
    for (const auto& [name, operation] : operations) {
        INFO(name);
        longest.push_back({-operation.predicted, operation.group});
        if (operation.flops == 0) continue;
        const auto part = [](double value, double low, double high) {  // of the axis
            return std::log(std::clamp(value, low, high) / low) / std::log(high / low);
        };
        const double x = 80 + 700 * part(operation.flops / operation.moved, 1 / 16.0, 4096),
                     y = 600 - 520 * part(operation.flops / operation.predicted, 1e11, 2e15);
        CHECK_FALSE(is_empty(x, y));
        if (x < leftmost) leftmost = x, at_height = y;
    }
    CHECK(is_empty(leftmost - 15, at_height));  // it takes little time: its disc is small
    std::sort(longest.begin(), longest.end());
    const std::map<std::string, std::array<int, 3>> colors = {
        {"block products", {0, 114, 178}},    {"head products", {86, 180, 233}}, {"attention backward", {230, 159, 0}},
        {"attention forward", {0, 158, 115}}, {"norms", {204, 121, 167}},        {"cross-entropy", {86, 180, 233}},
        {"optimizer", {204, 121, 167}}};
    for (size_t i = 0; i < 10; ++i)
        for (size_t c = 0; c < 3; ++c) {
            INFO(i << ": " << longest[i].second);
            const int expected = 255 - (255 - colors.at(longest[i].second)[c]) * 7 / 10;  // seven tenths of it
            CHECK(std::abs(color_at(826, 91 + 17.5 * static_cast<double>(i))[c] - expected) <= 2);
        }
    stbi_image_free(pixels);
#else
    SKIP_TEST("on a GPU the account takes the memory of the run");
#endif
}

TEST_CASE("the account of other runs: groups of products, rates of fp8 and of this device", "[program][account]") {
    const auto account = [](const std::string& flags) {
        return printed_by("train_gpt", "--account --sample 0 " + flags);
    };
    // As many tokens as there are in the vocabulary: the head's products are three all the same.
    CHECK_THAT(account("--model tiny --batch 2 --seq 128 --device-spec h100"),
               ContainsSubstring("| block products | 48 |") && ContainsSubstring("| head products | 3 |") &&
                   // In float32.
                   ContainsSubstring(" | arithmetic |\n") && !ContainsSubstring("tensor cores"));
    const auto predicted = [&](const std::string& flags) {
        return number_before(account("--model llama-1b --batch 4 --seq 1024 --device-spec h100 --dtype " + flags),
                             " tokens/s predicted");
    };
    if (has_fp8()) {
        CHECK(predicted("fp8") > predicted("bf16"));
        // The head's products stay in 16 bits: 6 x 4096 tokens x 2048 x 128256 FLOPs at 798 TFLOP/s.
        const std::string text = account("--model llama-1b --batch 4 --seq 1024 --device-spec h100 --dtype fp8");
        const size_t head = text.find("\n| head products | 3 |");
        REQUIRE(head != std::string::npos);
        CHECK_THAT(text.substr(head + 1, text.find('\n', head + 1) - head), ContainsSubstring(" | 8.09 | "));
        // 331 FLOPs for a byte are less than the 532 that products of 8 bits take. An A100 has none of them.
        const std::string fp8 = "--model llama-1b --batch 1 --seq 256 --dtype fp8 --device-spec ";
        CHECK_THAT(account(fp8 + "h100"), ContainsSubstring("at up to 798TFLOP/s, in fp8 1.6PFLOP/s, and copies ") &&
                                              ContainsSubstring("| 331 | 1.50 | 2.19 | memory |\n"));
        CHECK_THAT(account(fp8 + "a100"), ContainsSubstring("at up to 257TFLOP/s and copies at 1.84TB/s (") &&
                                              ContainsSubstring("| 331 | 5.82 | 7.93 | tensor cores |\n"));
    }
    // The picture has the roof of 16 bits and, where there are products of 8, theirs. Where an operation has one FLOP
    // for a byte the roof is the rate of copies. The axis of FLOP/s ends at twice `decade`, and begins 20000 times
    // lower.
    struct Roofs {
        int n = 0;
        double copies = 0;
    };
    const auto roofs = [&](const std::string& dtype, double decade) {
        const TempFolder pictures;
        account("--model tiny --batch 2 --seq 128 --device-spec h100 --dtype " + dtype + " --out " + pictures.path);
        int width = 0, height = 0, channels = 0;
        uint8_t* pixels = stbi_load((pictures / "account.png").c_str(), &width, &height, &channels, 1);
        REQUIRE(pixels != nullptr);
        const auto is_dark = [&](int x, int y) { return pixels[y * width + x] < 100; };
        Roofs found;
        for (int y = 81; y < 600; ++y) {
            found.n += is_dark(778, y) && !is_dark(778, y - 1);
            if (found.copies == 0 && is_dark(255, y)) found.copies = 2 * decade * std::pow(20000, (80.0 - y) / 520);
        }
        stbi_image_free(pixels);
        return found;
    };
    const Roofs bf16 = roofs("bf16", 1e15);
    CHECK(bf16.n == 1);
    if (has_fp8()) {
        const Roofs fp8 = roofs("fp8", 1e16);
        CHECK(fp8.n == 2);
        CHECK(fp8.copies == Approx(bf16.copies).epsilon(0.05));
    }
    // Muon's products are in bf16 where the model's are in 16 bits.
    const std::pair<const char*, double> rates[] = {{"fp32", 66.9e12 * 798 / 989.4}, {"fp16", 798e12}};
    for (const auto& [dtype, rate] : rates) {
        const TempFolder folder;
        account(concat("--model llama-1b --dtype ", dtype,
                       " --optimizer muon --batch 1 --seq 16 --device-spec h100 --out ", folder.path));
        double flops = 0, seconds = 0;
        for (const auto& row : read_tsv(folder / "launches.tsv"))
            if (row[1] == "optimizer's products") flops += std::stod(row[9]), seconds += std::stod(row[10]);
        CHECK(flops / seconds == Approx(rate).epsilon(0.01));
    }
    // No prediction is above the roof, however few FLOPs for a byte this device needs.
    CHECK(number_before(account("--model tiny --batch 64 --seq 16"), " % of the measured ") <= 100);
}

TEST_CASE("the account and the plan of a T4: its shared memory, and bf16 at the rate of float32",
          "[program][account]") {
    const TempFolder folder;
    spit(folder / "config.json", R"({"model_type": "llama", "vocab_size": 151936, "hidden_size": 64,
                                     "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
                                     "max_position_embeddings": 128, "tie_word_embeddings": true})");
    const auto printed = [&](const std::string& flags) {
        return printed_by("train_gpt",
                          concat("--sample 0 --batch 1 --seq 32 --model ", folder / "config.json", " ", flags));
    };
    // What a block cannot keep of its row of 151936 logits of 2 bytes is read twice, from memory where the blocks that
    // run at a time have more of it than a cache: with 64 KiB for a block, and not with 227 KiB.
    const auto read_again = [&](const std::string& device) {
        printed(concat("--account --dtype fp16 --out ", folder.path, " --device-spec ", device));
        for (const auto& row : read_tsv(folder / "launches.tsv"))
            if (row[0] == "cross_entropy_kernel") return std::stod(row[8]) / std::stod(row[5]);
        return -1.0;
    };
#ifdef CUDA_ON_CPU  // a GPU stands in for no other
    CHECK(read_again("t4") == Approx(1 - 65536 / (2 * 151936.0)).epsilon(0.01));
    CHECK(read_again("h100") == 0);
#endif
    CHECK_THAT(printed("--plan --dtype fp16 --device-spec t4"), ContainsSubstring("on t4   65TFLOP/s, 320GB/s ("));
    CHECK_THAT(
        printed("--plan --dtype bf16 --device-spec t4"),
        ContainsSubstring("on t4   8.1TFLOP/s (its tensor cores multiply no bf16; --dtype fp16: 65T), 320GB/s ("));
    CHECK_THAT(printed("--plan --dtype bf16 --device-spec a100"),
               ContainsSubstring("on a100   312TFLOP/s, 2.04TB/s ("));
}

// Of an H100, of which the account says that products have at most 798 TFLOP/s, and copies 3 TB/s.
TEST_CASE("a launch is predicted by its bytes or its FLOPs, and by the share that its group reaches",
          "[program][account]") {
#ifdef CUDA_ON_CPU
    const TempFolder folder;
    const std::map<std::string, double> shares = {{"block products", 600.0 / 798},
                                                  {"head products", 755.0 / 798},
                                                  {"attention forward", 0.315},
                                                  {"attention backward", 0.265},
                                                  {"norms", 0.91}};
    spit(folder / "config.json", R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 768,
                                     "n_layer": 1, "n_head": 12, "activation_function": "gelu_new",
                                     "layer_norm_epsilon": 1e-5})");
    for (const char* tokens : {"128", "2048"}) {  // attention waits for memory, for the tensor cores
        printed_by("train_gpt", concat("--account --model ", folder / "config.json", " --dtype bf16 --batch 1 --seq ",
                                       tokens, " --device-spec h100 --sample 0 --attention mma --out ", folder.path));
        std::set<std::string> seen;
        const auto rows = read_tsv(folder / "launches.tsv");
        for (size_t i = 1; i < rows.size(); ++i) {
            const std::string &kernel = rows[i][0], &group = rows[i][1];
            if (!shares.count(group)) continue;
            seen.insert(group);
            const auto number = [&](size_t column) { return std::stod(rows[i][column]); };
            const bool is_product = number(2) > 0, reads_rows = kernel.find("delta") != std::string::npos,
                       multiplies = is_product || (group.starts_with("attention") && !reads_rows);
            // What a product sums beside it takes a kernel of its own.
            const double again = number(8) / 3e12, sums = is_product ? again : 0;
            const double roofline =
                std::max((number(5) + number(6)) / 3e12 + again - sums, multiplies ? number(9) / 798e12 : 0);
            INFO(kernel << ", " << group);
            if (reads_rows) CHECK(number(5) > 10 * number(6));
            CHECK(number(10) == Approx(roofline).epsilon(1e-5));
            const double share = reads_rows ? 0.9 : shares.at(group);
            CHECK(number(11) == Approx(roofline / share + sums / 0.9 + 1e-6).epsilon(1e-5));
        }
        CHECK(seen.size() == shares.size());
    }
#else
    SKIP_TEST("on a GPU the account takes the memory of the run");
#endif
}

TEST_CASE("the plan's bytes and FLOPs of a step are those of its launches", "[program][account][plan]") {
#ifdef CUDA_ON_CPU
    const TempFolder folder;
    const std::string gpt2 = "--model gpt2 --dtype bf16 ";
    std::vector<std::string> runs = {gpt2,
                                     gpt2 + "--head-chunks 8",
                                     gpt2 + "--recompute full",
                                     gpt2 + "--recompute 5",
                                     gpt2 + "--recompute selective",
                                     "--model llama-8b --dtype bf16 --recompute 3",
                                     "--model deepseek-1b --dtype bf16 --recompute full",
                                     "--model llama-8b --dtype fp8",
                                     "--model gpt2-medium --dtype fp8 --recompute full",
                                     gpt2 + "--optimizer muon"};
    // And a preset with each other attention or feed-forward.
    std::set<std::string> parts = {"gqa", "mla", "gelu", "swiglu"};
    for (const std::string& name : preset_names()) {
        const Config& c = *find_preset(name);
        if (parts.insert(c.attention).second + parts.insert(c.feed_forward).second > 0)
            runs.push_back("--dtype bf16 --recompute selective --model " + name);
    }
    for (const std::string& flags : runs) {
        const std::string all = "--batch 8 --micro-batch 2 --seq 256 --sample 0 --device-spec h100 " + flags;
        const std::string plan = printed_by("train_gpt", "--plan " + all);
        const std::string account = printed_by("train_gpt", "--account " + all + " --out " + folder.path);
        const auto planned = [&](const std::string& pattern, double thousand) {  // a number and K, M, G or T in front
            std::smatch found;
            REQUIRE(std::regex_search(plan, found, std::regex("([0-9.]+) ?([KMGT])" + pattern)));
            const double power = static_cast<double>(std::string("KMGT").find(found[2].str()) + 1);
            return std::stod(found[1]) * std::pow(thousand, power);
        };
        INFO(plan);
        std::set<std::string> without_group;            // of kGroups in planning/step_account.cu
        double bytes = 0, flops = 0, seconds = 0.2e-3;  // between two steps
        const auto rows = read_tsv(folder / "launches.tsv");
        for (size_t i = 1; i < rows.size(); ++i) {
            seconds += std::stod(rows[i][11]);
            const std::string& group = rows[i][1];
            if (group == "others") without_group.insert(rows[i][0]);
            bytes += std::stod(rows[i][5]) + std::stod(rows[i][6]) - std::stod(rows[i][7]);
            // The two kernels of attention's backward compute seven products: the scores in both, which are no FLOPs of
            // the step, the gradient of the probabilities in both, and three that are needed once.
            if (group == "attention backward") flops += 4 / 7.0 * std::stod(rows[i][9]);
            if (group == "attention forward" || group.find("products") != std::string::npos)
                flops += std::stod(rows[i][9]);
        }
        CHECK(without_group == std::set<std::string>{});
        CHECK(planned("iB moved", 1024) == Approx(bytes).epsilon(0.02));
        CHECK(planned("FLOP", 1000) == Approx(flops).epsilon(0.01));
        CHECK(number_before(account, " tokens/s predicted") == Approx(8 * 256 / seconds).epsilon(0.01));
    }
#else
    SKIP_TEST("on a GPU the account takes the memory of the run");
#endif
}

TEST_CASE("the account refuses what it cannot tell", "[program][account]") {
    const auto refusal = [](const std::string& flags) { return run_program("train_gpt", "--account " + flags).err; };
    CHECK(refusal("--ranks 2") == "train_gpt: --account: it is that of one rank: leave --ranks and mpirun out\n");
    for (const char* flags : {"--zero 3", "--dp-mode naive"})
        CHECK_THAT(refusal(flags), ContainsSubstring("leave --zero and --dp-mode out"));
    if (has_wgmma())
        CHECK_THAT(refusal("--attention hopper --dtype bf16 --device-spec a100"),
                   ContainsSubstring("needs an H100 or H200"));
    CHECK_THAT(refusal("--plan"), ContainsSubstring("--plan and --account: give one of them"));
    CHECK_THAT(refusal("--offload optimizer"), ContainsSubstring("is not a row of launches: leave --offload out\n"));
    // Strict mode, where copies come later, has no memory behind the addresses either.
    const Outcome strict = run_program("train_gpt", "--account --batch 2 --seq 16 --sample 0", "CUDA_CPU_STRICT=1");
    INFO(strict.err);
    CHECK(strict.status == 0);
}
