// test/test_dev.cu: the programs of dev/ that explain and compare, from outside: what they print, draw and refuse.
#include "io/io.h"
#include "parallel/comm/comm.h"
#include "program.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace {

std::vector<std::string> words(const std::string& line) {
    std::istringstream stream(line);
    return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

// The first line that begins with the words `first`, after the line that begins with `heading`.
std::string line_of(const std::string& text, const std::string& heading, const std::string& first) {
    std::istringstream lines(text);
    const std::vector<std::string> wanted = words(first);
    bool inside = heading.empty();
    for (std::string line; std::getline(lines, line);) {
        const std::vector<std::string> got = words(line);
        if (inside && got.size() >= wanted.size() && std::equal(wanted.begin(), wanted.end(), got.begin())) return line;
        inside = inside || line.starts_with(heading);
    }
    FAIL("no line \"" << first << "\" after \"" << heading << "\" in:\n" << text);
    return "";
}

struct Stored {
    std::string sign, exponent, mantissa, verdict;
    double value;
};
Stored stored(const std::string& text, const std::string& number, const std::string& format) {
    const std::string line = line_of(text, number, format);
    const std::vector<std::string> w = words(line);
    REQUIRE(w.size() >= 9);  // format sign exponent mantissa stored error relative spacing verdict...
    return {w[1], w[2], w[3], line.substr(line.find(w[8], line.find(w[7], line.find(w[3])) + w[7].size())),
            std::stod(w[4])};
}

std::pair<int, int> png_size(
    const std::string& path) {  // width and height stand in the header, most significant byte first
    const std::string bytes = slurp(path);
    REQUIRE(bytes.size() > 24);
    REQUIRE(bytes.substr(1, 3) == "PNG");
    const auto integer = [&](size_t at) {
        int value = 0;
        for (size_t i = 0; i < 4; ++i) value = 256 * value + static_cast<unsigned char>(bytes[at + i]);
        return value;
    };
    return {integer(16), integer(20)};
}

void check_refused(const std::string& program, const std::string& arguments, const std::string& reason) {
    INFO(program << " " << arguments);
    const Outcome outcome = run_program("dev/" + program, arguments);
    CHECK(outcome.out == "");
    CHECK(one_line_with(line_of(outcome), program + ": ", reason));
}

}  // namespace

TEST_CASE("recompute measures what it plans, and draws the law", "[program][dev][alone]") {
    const TempFolder folder;
    const std::string picture = folder / "law.png";
    const std::string out =
        printed_by("dev/recompute", picture + " --layers 6 --width 32 --seq 10 --batch 1 --steps 1");
    INFO(out);
    const auto planned = [&](const std::string& way) {
        const std::vector<std::string> w = words(line_of(out, "--recompute ", way));
        REQUIRE(w.size() >= 4);
        CHECK(taken_as_planned(std::stod(w[2]), std::stod(w[1])));
        return std::stod(w[1]);
    };
    // N = 1, 2, 3, 6 must be three numbers' worth of law: fixed + 6/N s + N b.
    const double one = planned("1"), two = planned("2"), three = planned("3"), none = planned("none");
    const double s = 10 * 32 * 4, b = (two - one) + 3 * s;  // a block's input is T x C floats
    CHECK(three == one - 4 * s + 2 * b);
    CHECK(planned("6") == one - 5 * s + 5 * b);
    CHECK(planned("6") == none);
    CHECK(planned("selective") < none);
    CHECK(png_size(picture).first > 100);
    check_refused("recompute", "", "give a picture");
    check_refused("recompute", "x.png --layers 0", "--layers 0");
    check_refused("recompute", "x.png --width 40", "multiple of 32");
    check_refused("recompute", "x.png --depth 4", "unknown flag --depth");
    check_refused("recompute", "x.png y.png", "\"y.png\" belongs to no flag");
    CHECK_THAT(printed_by("dev/recompute", "--help"), ContainsSubstring("dev/recompute OUT.png [OPTIONS]\n"));
    check_refused("recompute", "none/x.png", "there is no folder");
    check_refused("recompute", "/tmp", "cannot write /tmp: it is a folder");
}

TEST_CASE("context_parallel shows balanced work, and draws the layout", "[program][dev]") {
    const TempFolder folder;
    const std::string picture = folder / "context.png";
    const std::string out = printed_by("dev/context_parallel",
                                       picture + " --ranks 3 --seq 24 --heads 6 --key-heads 3 --width 8 --rounds 1");
    INFO(out);
    // Chunks of 4 tokens: 2 x 10 pairs with its own keys, 2 x 16 with those of each other rank: a third of 300.
    for (const char* rank : {"0", "1", "2"})
        CHECK(words(line_of(out, "", concat("rank ", rank))) ==
              std::vector<std::string>{"rank", rank, "36", "32", "32", "0.3333"});
    for (const char* mode : {"ring", "ulysses"}) {
        const std::vector<std::string> w = words(line_of(out, "forward and backward", concat("3 ranks, ", mode)));
        REQUIRE(w.size() == 8);
        CHECK(std::stod(w[5]) > 0);
    }
    CHECK(png_size(picture).first > 100);
    // It grows with the ranks, or their names would lie one over the other.
    REQUIRE(run_program("dev/context_parallel", picture + " --ranks 8 --seq 16 --rounds 1").status == 0);
    CHECK(png_size(picture).first > 1080);
    check_refused("context_parallel", "", "give a picture");
    check_refused("context_parallel", "/tmp", "cannot write /tmp: it is a folder");
    check_refused("context_parallel", "x.png --ranks 0", "--ranks 0: give a whole number of at least 1");
    check_refused("context_parallel", "x.png --ranks 9 --seq 18", "at most 8");
    check_refused("context_parallel", "x.png --ranks 2 --seq 10", "cannot be cut into the 4 equal chunks");
    check_refused("context_parallel", "x.png --heads 6", "--heads 6 and --key-heads 8");
    check_refused("context_parallel", "x.png --depth 4", "--depth");
    check_refused("context_parallel", "x.png --width 1.5", "--width 1.5: give a whole number");
}

TEST_CASE("float_formats prints the formats as their standards define them", "[program][dev]") {
    const std::string out = printed_by("dev/float_formats", "1");
    // bits, sign, exponent, mantissa, bias, largest, smallest normal, smallest, epsilon: IEEE 754 for fp32 and fp16,
    // NVIDIA's PTX manual for tf32 and bf16, table 1 of arXiv:2209.05433 for the two of 8 bits.
    const std::pair<const char*, const char*> formats[] = {{"fp32", "32 1 8 23 127 3.402823e+38 2^-126 2^-149 2^-23"},
                                                           {"tf32", "19 1 8 10 127 3.401162e+38 2^-126 2^-136 2^-10"},
                                                           {"bf16", "16 1 8 7 127 3.389531e+38 2^-126 2^-133 2^-7"},
                                                           {"fp16", "16 1 5 10 15 65504 2^-14 2^-24 2^-10"},
                                                           {"e5m2", "8 1 5 2 15 57344 2^-14 2^-16 2^-2"},
                                                           {"e4m3", "8 1 4 3 7 448 2^-6 2^-9 2^-3"}};
    for (const auto& [format, facts] : formats) {
        const std::vector<std::string> wanted = words(facts), got = words(line_of(out, "THE FORMATS", format));
        INFO(format);
        REQUIRE(got.size() == wanted.size() + 2);
        CHECK(std::equal(wanted.begin(), wanted.end(), got.begin() + 1));
    }
}

TEST_CASE("float_formats shows what each format makes of a number", "[program][dev]") {
    const std::string out = printed_by("dev/float_formats",
                                       "65504 65519 65520 70000 448 464 465 500 61439 61440 2^-24 2^-25 6e-8 1e-5 0.1 "
                                       "1.00048828125 -2049 inf nan 0.0");
    struct Case {
        const char *number, *format;
        double value;
        const char* verdict;
    };
    const Case cases[] = {
        {"65504", "fp16", 65504, "normal, exact"},
        {"65519", "fp16", 65504, "normal, rounded"},
        {"65520", "fp16", INFINITY, "overflow to inf"},  // half of the spacing of 32 beyond the largest
        {"70000", "fp16", INFINITY, "overflow to inf"},
        {"70000", "bf16", 70144, "normal, rounded"},  // 137 x 512
        {"70000", "fp32", 70000, "normal, exact"},
        {"448", "e4m3", 448, "normal, exact"},
        {"464", "e4m3", 448, "normal, rounded"},  // a tie; the code of 448 is even
        {"465", "e4m3", 448, "overflow: saturates at 448 (otherwise nan)"},
        {"500", "e4m3", 448, "overflow: saturates at 448 (otherwise nan)"},
        {"500", "e5m2", 512, "normal, rounded"},
        {"61439", "e5m2", 57344, "normal, rounded"},
        {"61440", "e5m2", 57344, "overflow: saturates at 57344 (otherwise inf)"},  // a tie; the code of 57344 is odd
        {"2^-24", "fp16", std::ldexp(1, -24), "subnormal, exact: 1 of 11 significant bits left"},
        {"2^-25", "fp16", 0, "underflow to 0"},  // a tie; zero is even
        {"2^-25", "bf16", std::ldexp(1, -25), "normal, exact"},
        {"6e-8", "fp16", std::ldexp(1, -24), "subnormal, rounded: 1 of 11 significant bits left"},
        {"1e-5", "fp16", 168 * std::ldexp(1, -24), "subnormal, rounded: 8 of 11 significant bits left"},
        {"1e-5", "e5m2", std::ldexp(1, -16), "subnormal, rounded: 1 of 3 significant bits left"},
        {"0.1", "fp32", 0.1f, "normal, rounded"},
        {"0.1", "bf16", 205 * std::ldexp(1, -11), "normal, rounded"},
        {"1.00048828125", "fp16", 1, "normal, rounded"},                       // 1 + 2^-11, a tie: to even
        {"1.00048828125", "tf32", 1 + std::ldexp(1, -10), "normal, rounded"},  // cvt.rna: away from zero
        {"-2049", "fp16", -2048, "normal, rounded"},
        {"-2049", "tf32", -2050, "normal, rounded"},
        {"inf", "fp16", INFINITY, "infinity"},
        {"inf", "e4m3", 448, "no infinity: saturates at 448 (otherwise nan)"},
        {"0.0", "e4m3", 0, "zero"}};
    for (const Case& c : cases) {
        INFO(c.number << " in " << c.format);
        const Stored got = stored(out, c.number, c.format);
        if (std::isinf(c.value)) CHECK(got.value == c.value);
        else CHECK(got.value == Approx(c.value).epsilon(1e-9));  // ten digits are printed
        CHECK(got.verdict == c.verdict);
    }
    for (const char* format : {"fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3"}) {
        const Stored nan = stored(out, "nan", format);
        CHECK(std::isnan(nan.value));
        CHECK(nan.verdict == "NaN");
    }
    const Stored tenth = stored(out, "0.1", "fp32");  // 0x3dcccccd
    CHECK(tenth.sign + tenth.exponent + tenth.mantissa == "00111101110011001100110011001101");
    CHECK(stored(out, "-2049", "fp16").sign == "1");
}

TEST_CASE("float_formats reads bits", "[program][dev]") {
    const std::string out = printed_by("dev/float_formats", "fp16:0x7bff bf16:0xc040 e4m3:0x01 fp32:0x7f800000");
    CHECK(stored(out, "fp16:0x7bff: 65504", "fp16").verdict == "normal, exact");
    CHECK(stored(out, "bf16:0xc040: -3", "bf16").mantissa == "1000000");
    CHECK(stored(out, "e4m3:0x01: 0.001953125", "e4m3").verdict == "subnormal, exact: 1 of 4 significant bits left");
    CHECK(stored(out, "fp32:0x7f800000: inf", "fp32").verdict == "infinity");
}

TEST_CASE("float_formats shows that small addends are lost in large sums", "[program][dev]") {
    const std::string out = printed_by("dev/float_formats", "");
    volatile float sum = 0;
    for (int i = 0; i < 10000; ++i) sum = sum + 0.1f;
    // The sum stops at the power of two above which half of the spacing is more than the term; counting by one stops
    // where the spacing becomes 2.
    const struct {
        const char* format;
        double sum, count;
    } rows[] = {{"fp32", sum, 16777216}, {"bf16", 32, 256}, {"fp16", 256, 2048}, {"e5m2", 1, 8}, {"e4m3", 2, 16}};
    for (const auto& row : rows) {
        INFO(row.format);
        const std::vector<std::string> w = words(line_of(out, "0.1 added", row.format));
        REQUIRE(w.size() == 6);
        CHECK(std::stod(w[2]) == Approx(row.sum).epsilon(1e-9));
        CHECK(std::stod(w[5]) == row.count);
    }
    const std::vector<std::string> w = words(line_of(out, "A weight", "0.001"));
    REQUIRE(w.size() == 6);
    CHECK(std::stod(w[4]) == 1);  // bf16: 0.001 is less than half of 2^-7
    CHECK(std::stod(w[5]) == 2);  // with a master weight
}

TEST_CASE("loss scaling keeps the gradients of a training step in fp16", "[program][dev]") {
    const TempFolder folder;
    const std::string png = folder / "gradients.png";
    const std::string out = printed_by("dev/float_formats", "--gradients --steps 20 --batch 8 --out " + png);
    INFO(out);
    CHECK(png_size(png) == std::pair(1100, 872));
    CHECK(folder.listing() == "gradients.png");

    // The shares of the tensors make the share of all of them.
    double n = 0, n_flushed = 0;
    for (const char* name : {"dlogits", "dresidual", "dnorm", "dqkv", "dattn", "dup", "dact"}) {
        const std::vector<std::string> w = words(line_of(out, "share of the gradients", name));
        REQUIRE(w.size() == 12);
        n += std::stod(w[1]);
        n_flushed += std::stod(w[1]) * std::stod(w[4]) / 100;
    }

    std::map<std::string, std::vector<double>> shares;  // zero, subnormal, normal, overflow, by loss scale
    const std::string dynamic = words(line_of(out, "share of the gradients", "not zero")).back();
    for (const std::string& scale : {std::string("1"), std::string("1024"), std::string("65536"), dynamic}) {
        const std::vector<std::string> w = words(line_of(out, "all of them", "activations " + scale));
        REQUIRE(w.size() == 10);
        for (const size_t i : {2, 4, 6, 8}) shares[scale].push_back(std::stod(w[i]));
        CHECK(shares[scale][0] + shares[scale][1] + shares[scale][2] + shares[scale][3] == Approx(100).margin(0.01));
        CHECK(shares[scale][3] == 0);
    }
    CHECK(shares["1"][0] == Approx(100 * n_flushed / n).margin(0.001));  // three decimals are printed
    CHECK(shares["1"][0] > 1);
    CHECK(shares["1"][1] > 10);
    CHECK(shares["65536"][0] < 1);
    CHECK(shares[dynamic][0] < 1);
    CHECK(shares[dynamic][2] > 95);

    // At twice the dynamic scale the largest gradient would overflow, at the scale itself it does not.
    double largest = 0;
    for (const char* name : {"dlogits", "dresidual", "dnorm", "dqkv", "dattn", "dup", "dact", "parameters"})
        largest = std::max(largest, std::stod(words(line_of(out, "share of the gradients", name))[3]));
    const double scale = std::ldexp(1, std::stoi(dynamic.substr(2)));
    CHECK(largest * scale < 65520 * 1.05);  // two digits are printed
    CHECK(2 * largest * scale > 65520 * 0.95);
}

TEST_CASE("float_formats shows the gradients of GPT-2, whose backward writes no dact", "[program][dev]") {
    const TempFolder folder;
    write_text_file(folder / "config.json", R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 1000,
                                           "n_embd": 16, "n_layer": 1, "n_head": 2})");
    const std::string out =
        printed_by("dev/float_formats", "--gradients --steps 0 --batch 1 --seq 8 --model " +
                                            (folder / "config.json --out ") + (folder / "gradients.png"));
    INFO(out);
    CHECK(words(line_of(out, "share of the gradients", "dup")).size() == 12);
    CHECK(out.find("dact") == std::string::npos);
    // Gradients that are zero in fp32 do not count as lost. Those of 992 positions are: two thirds of all.
    CHECK(std::stod(words(line_of(out, "all of them", "parameters 1"))[2]) < 5);
}

TEST_CASE("float_formats refuses what it cannot read", "[program][dev]") {
    const std::pair<const char*, const char*> cases[] = {{"1 abc", "\"abc\" is not a number"},
                                                         {"0.1x", "is not a number"},
                                                         {"\"\"", "is not a number"},
                                                         {"0x7c00", "bits of which format"},
                                                         {"fp17:1", "the formats are"},
                                                         {"fp16:0x10000", "16 bits"},
                                                         {"fp16:-1", "16 bits"},
                                                         {"2^", "is not a number"},
                                                         {"2^5000", "exponent"},
                                                         {"1e400", "out of the range"},
                                                         {"--wrong", "unknown flag"},
                                                         {"--steps 3", "needs --gradients"},
                                                         {"--gradients 1", "leave out one"},
                                                         {"--gradients --steps", "needs a value"},
                                                         {"--gradients --steps -1", "at least 0"},
                                                         {"--gradients --seq 1.5", "whole number"},
                                                         {"--gradients --model nothing", "nothing"},
                                                         {"--gradients --out /dev/null/x.png", "/dev/null/x.png"}};
    for (const auto& [arguments, reason] : cases) check_refused("float_formats", arguments, reason);
    CHECK(run_program("dev/float_formats", "--help").status == 0);
}

// ---------------------------------------------------------------------------------------------------------------------

namespace {

// A run folder whose log holds these losses.
void write_run(const std::string& folder, const std::vector<double>& losses) {
    make_folder(folder);
    CsvLog log(folder + "/log.csv", -1);
    for (size_t i = 0; i < losses.size(); ++i) {
        LogRow row;
        row.step = static_cast<int64_t>(i) + 1;
        row.loss = losses[i];
        log.write(row);
    }
}

}  // namespace

TEST_CASE("plot_runs draws losses and prints how far they are from the first", "[program][dev]") {
    const TempFolder folder;
    const std::string png = folder / "losses.png";
    std::vector<double> first, close, spike;
    for (int i = 0; i < 60; ++i) {
        first.push_back(4 + 0.01 * i);
        close.push_back(first.back() * 0.99);
        spike.push_back(first.back() * (i == 40 ? 1.5 : 1));
    }
    write_run(folder / "fp32", first);
    write_run(folder / "bf16", close);
    write_run(folder / "spike", spike);
    const std::string folders = png + " " + folder / "fp32" + "/ " + folder / "bf16" + " " + folder / "spike";
    const std::string out = printed_by("dev/plot_runs", folders);
    INFO(out);
    CHECK(png_size(png) == std::pair(960, 1000));  // the losses, and below them their differences from the first
    // name, steps, last mean, P % at step S twice. All steps of bf16 differ by 1 %.
    const std::vector<std::string> bf16 = words(line_of(out, "run", "bf16"));
    CHECK(bf16[1] == "60");
    CHECK(bf16[3] == "1.000");
    CHECK(bf16[8] == "1.000");
    // The spike is half of 4.4, at step 41; of the means over 20 steps that have it, it moves the smallest most: the
    // first.
    const std::vector<std::string> spiked = words(line_of(out, "run", "spike"));
    CHECK(spiked[3] == "50.000");
    CHECK(spiked[7] == "41");
    double mean = 0;
    for (size_t i = 21; i <= 40; ++i) mean += first[i] / 20;
    CHECK(std::stod(spiked[8]) == Approx(100 * 2.2 / 20 / mean).margin(0.0006));  // three decimals
    CHECK(spiked[12] == "41");

    REQUIRE(run_program("dev/plot_runs", png + " " + folder / "fp32").status == 0);
    CHECK(png_size(png) == std::pair(960, 600));  // one run differs from none

    const std::string single = printed_by("dev/plot_runs", folders + " --smooth 1");
    CHECK(words(line_of(single, "run", "spike"))[8] == "50.000");
}

TEST_CASE("plot_runs refuses runs that cannot be compared", "[program][dev]") {
    const TempFolder folder;
    const std::string png = folder / "x.png ", good = folder / "good", other = folder / "other";
    write_run(good, std::vector<double>(30, 2.0));
    const auto refused = [&](const std::string& arguments, const std::string& reason) {
        check_refused("plot_runs", arguments, reason);
        CHECK(!std::filesystem::exists(folder / "x.png"));
    };
    refused("", "folders of runs");
    refused(png, "folders of runs");
    refused(png + good + " " + folder / "none", "none/log.csv");
    refused(png + good + " --smooth 0", "at least 1");
    refused(png + good + " --smooth", "--smooth needs a value");
    refused(png + good + " --smooth 31", "too few");
    refused(png + good + " --wrong", "unknown flag");
    refused(good + " " + good, "is a folder");
    write_run(other, std::vector<double>(29, 2.0));
    refused(png + good + " " + other, "29 steps");
    std::vector<double> losses(30, 2.0);
    losses[6] = NAN;
    write_run(other, losses);
    refused(png + good + " " + other, "step 7");
    spit(other + "/log.csv", "step,tokens\n1,16\n");
    refused(png + other, "header");
}

TEST_CASE("all_reduce times the algorithms, draws them, and says where", "[program][dev]") {
    const TempFolder folder;
    const std::string out = printed_by("dev/all_reduce", "--ranks 2 --max 1024 --out " + (folder / "new"));
    INFO(out);
    const std::vector<std::string> heading = words(line_of(out, "", "bytes"));
    std::vector<std::string> columns = all_reduce_names();
    columns.insert(columns.begin(), "bytes"), columns.push_back("limit");
    CHECK(heading == columns);
    CHECK(words(line_of(out, "", "4.00 KiB")).size() == 2 + heading.size() - 1);
    const std::string picture = folder / "new/all_reduce_2.png";
    CHECK_THAT(out, ContainsSubstring("picture  " + picture + "\n"));
    CHECK(png_size(picture) == std::pair<int, int>{960, 600});
    CHECK(folder.listing() == "new");
    check_refused("all_reduce", "--rank 2", "unknown flag --rank: did you mean --ranks?");
    check_refused("all_reduce", "--max", "--max needs a value");
    check_refused("all_reduce", "--max 3e9", "--max 3000000000 is too large");
    check_refused("all_reduce", "4", "\"4\" belongs to no flag");
    check_refused("all_reduce", "--max 1k", "--max 1k: give a whole number");
    check_refused("all_reduce", "--ranks 1", "of at least 2");
}

TEST_CASE("tensor_layouts draws the blocks, and says who sends", "[program][dev]") {
    const TempFolder folder;
    const Outcome all = run_program("dev/tensor_layouts", folder / "all.png");
    REQUIRE(all.status == 0);
    CHECK_THAT(all.out, ContainsSubstring("2d    step k: column k of the stream broadcast in {0 1} {2 3}\n"));
    CHECK_THAT(all.out, ContainsSubstring("3d    weight gathered in {0 4} {1 5} {2 6} {3 7}\n"));
    const Outcome one = run_program("dev/tensor_layouts", folder / "one.png --mode 2d --ranks 9");
    REQUIRE(one.status == 0);
    CHECK_THAT(one.out, ContainsSubstring("broadcast in {0 3 6} {1 4 7} {2 5 8}\n"));
    CHECK(4 * png_size(folder / "one.png").second == png_size(folder / "all.png").second);
    check_refused("tensor_layouts", "", "give a picture");
    check_refused("tensor_layouts", "x.png --mode 2d --ranks 6", "a square of ranks");
    check_refused("tensor_layouts", "x.png --mode 2d", "belong together");
    check_refused("tensor_layouts", "x.png --mode 3d --ranks 64", "at most 27 are drawn");
    check_refused("tensor_layouts", "x.png --mode 1d --ranks 16", "no room for their numbers");
    check_refused("tensor_layouts", "x.png --size 2", "--size");
    check_refused("tensor_layouts", "x.png --mode 2d --ranks 4x", "--ranks 4x: give a whole number");
}

TEST_CASE("tensor_overlap: as many bytes in pieces as at once", "[program][dev]") {
    const std::string out = printed_by("dev/tensor_overlap", "--ranks 3 --rows 48 --width 20 --hidden 42 --rounds 1");
    INFO(out);
    for (const std::string step : {"| 1 |", "| 2 |", "| 3 |"})
        // (n - 1) / n of the rows twice: 2 x 32 x 20 x 4 bytes.
        CHECK_THAT(line_of(out, "", step), ContainsSubstring(" 5.00 KiB |"));
    check_refused("tensor_overlap", "--ranks 1", "at least 2");
    check_refused("tensor_overlap", "--rows 7", "cannot be divided among 4 ranks");
    check_refused("tensor_overlap", "--rows 44",
                  "--rows 44: a rank has 11 of them, and --tp-overlap needs a multiple of 8: use a multiple of 32");
    check_refused("tensor_overlap", "--deep 2", "--deep");
    check_refused("tensor_overlap", "--rounds 1.5", "--rounds 1.5: give a whole number");
}

TEST_CASE("benchmarks refuse what is no number, and a result that cannot be written is an error", "[program][dev]") {
    check_refused("bench_cpu", "--model tiny --steps x", "--steps x: give a whole number");
    check_refused("bench_kernels", "--batch x", "--batch x: give a whole number");
    check_refused("bench_kernels", "--only rmsnorms", "--only 'rmsnorms': no operation of this model has that");
    check_refused("bench_inference", "--rounds 0", "of at least 1");
    check_refused("bench_inference", "--rounds", "--rounds needs a value");
    check_refused("bench_cpu", "--dtype fp16", "--dtype fp16: use fp32 or bf16");
    for (const char* command :
         {"float_formats 1", "softmax --check --size 1x1", "bench_kernels --only rmsnorm --repeats 3"}) {
        INFO(command);
        CHECK(run_shell(program_path("dev/") + command + " > /dev/full").status == 2);
    }
}

TEST_CASE("fetch.sh without a network, and with a number of shards that is none, says so in one line", "[program]") {
    const TempFolder folder;
    for (const char* name : {"dev/data", "bin"}) std::filesystem::create_directories(folder / name);
    std::filesystem::copy_file("dev/data/fetch.sh", folder / "dev/data/fetch.sh");
    spit(folder / "bin/curl", "#!/bin/sh\nexit 6\n");
    std::filesystem::permissions(folder / "bin/curl", std::filesystem::perms::owner_all);
    const auto fetch = [&](const std::string& what) {
        return run_shell(concat("PATH=", folder / "bin", ":$PATH ", folder / "dev/data/fetch.sh ", what));
    };
    const Outcome broken_off = fetch("tinyshakespeare"), shards = fetch("fineweb-edu ten");
    CHECK((broken_off.status == 2 && shards.status == 2));
    CHECK_THAT(broken_off.err, ContainsSubstring("tinyshakespeare/input.txt could not be fetched"));
    CHECK(shards.out + shards.err == "dev/data/fetch.sh: fineweb-edu ten: give the number of shards, 1 to 1000\n");
}

TEST_CASE("tokenizers give the ids of Hugging Face's on mixed text", "[program][tokenizer]") {
    const Outcome outcome =
        run_python("dev/compare_tokenizers.py " + program_path("dev/tokenize") + " --mb 0.2 --rounds 0");
    if (outcome.status == 77 || outcome.status == 127) SKIP_TEST("no Python with tokenizers (set LLM_PYTHON)");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.out, ContainsSubstring("/gpt2/tokenizer.json"));
}
