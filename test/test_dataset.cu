// Where tokens come from (text, folders, token shards), and the order in which a run sees them.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>

#include "io/io.h"
#include "temp_folder.h"
#include "test.h"

namespace {

namespace fs = std::filesystem;

// The bytes of a token shard, written without the code under test.
template <class T>
std::string shard_bytes(const std::vector<T>& tokens) {
    int32_t header[256] = {sizeof(T) == 2 ? 20240520 : 20240801, sizeof(T) == 2 ? 1 : 7,
                           static_cast<int32_t>(tokens.size())};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T));
}

template <class T>
std::string with_header(std::string bytes, size_t index, T value) {
    std::memcpy(bytes.data() + index * 4, &value, 4);
    return bytes;
}

std::vector<int32_t> all_tokens(const TokenSource& source) {
    std::vector<int32_t> tokens(static_cast<size_t>(source.n()));
    source.read(0, source.n(), tokens.data());
    return tokens;
}

std::string text_of(const TokenSource& source) { return make_byte_tokenizer()->decode(all_tokens(source)); }

TokenSource open(const std::string& path, bool held_out = false) {
    return TokenSource::open(path, *make_byte_tokenizer(), held_out);
}

// A source of n tokens 0, 1, 2, ... as a shard in the folder.
TokenSource counting_source(const TempFolder& folder, size_t n) {
    std::vector<uint32_t> tokens(n);
    std::iota(tokens.begin(), tokens.end(), 0u);
    spit(folder / "count.bin", shard_bytes(tokens));
    return open(folder / "count.bin");
}

// The first token of sequence i of a reader over counting_source(): where in the text it begins. Checks the others.
int64_t start_of(const BatchReader& reader, int64_t T, int64_t i) {
    std::vector<int32_t> tokens(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
    reader.sequence(i, tokens.data(), targets.data());
    bool counts_up = true;
    for (int64_t t = 0; t < T; ++t) counts_up &= tokens[t] == tokens[0] + t && targets[t] == tokens[t] + 1;
    REQUIRE(counts_up);
    return tokens[0];
}

// A tokenizer of many tokens: token = byte + 70000.
struct WideTokenizer : Tokenizer {
    int vocab_size() const override { return 70256; }
    bool has(int32_t token) const override { return token >= 70000 && token < vocab_size(); }
    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int32_t> tokens;
        for (unsigned char c : text) tokens.push_back(70000 + c);
        return tokens;
    }
    void decode_next(int32_t, DecodeState&, std::string&) const override {}
    std::string name() const override { return "wide"; }
};

}  // namespace

TEST_CASE("text from a file") {
    TempFolder folder;
    spit(folder / "a.txt", "one\r\ntwo\xFF\n");
    TokenSource source = open(folder / "a.txt");
    CHECK(source.n() == 10);
    CHECK(text_of(source) == "one\r\ntwo\xFF\n");
    CHECK(source.summary().max_token == 255);
    CHECK(one_line_with(source.description(), folder / "a.txt", "10 B", "10 tokens", "bytes"));

    TokenSource wide = TokenSource::open(folder / "a.txt", WideTokenizer());
    CHECK(all_tokens(wide)[1] == 70000 + 'n');
    CHECK(wide.summary().max_token == 70255);
}

TEST_CASE("a text is not changed: no newline is added at its end") {
    TempFolder folder;
    spit(folder / "a.txt", "x");
    CHECK(text_of(open(folder / "a.txt")) == "x");
}

TEST_CASE("text from a folder: in name order, hidden files and binaries left out") {
    TempFolder folder;
    fs::create_directories(folder / "b/deep");
    fs::create_directories(folder / ".git");
    spit(folder / "c.txt", "C");
    spit(folder / "d.txt", "D");
    spit(folder / "b/deep/x", "X\n");
    spit(folder / "a.md", "A\n");
    spit(folder / "empty", "");
    spit(folder / ".hidden", "no");
    spit(folder / ".git/no", "no");
    spit(folder / "binary", std::string("no\0no", 5));
    fs::create_symlink("/nowhere", folder / "broken_link");
    fs::create_directory_symlink("..", folder / "b/loop");
    TokenSource source = open(folder.path);
    CHECK(text_of(source) == "A\nX\nC\nD");
    CHECK(one_line_with(source.description(), folder.path, "4 files", "1 file that is not text skipped"));
}

TEST_CASE("the checksum of a text tells where its files, which are documents, begin") {
    TempFolder folder;
    const auto checksum_of = [&](std::vector<std::string> texts) {
        fs::remove_all(folder / "texts");
        fs::create_directories(folder / "texts");
        for (size_t i = 0; i < texts.size(); ++i) spit(folder / ("texts/" + std::to_string(i)), texts[i]);
        return open(folder / "texts").summary().checksum;
    };
    CHECK(checksum_of({"a\n", "b\n", "c\n"}) == checksum_of({"a\n", "b\n", "c\n"}));
    CHECK(checksum_of({"a\n", "b\n", "c\n"}) != checksum_of({"a\n", "b\nc\n"}));
    CHECK(checksum_of({"a\nb\n", "c\n"}) != checksum_of({"a\n", "b\nc\n"}));
    // Of a part the files that begin in it count, by their places in it.
    const auto checksum_of_half = [&](const std::vector<std::string>& texts, bool first) {
        checksum_of(texts);
        const auto [front, back] = open(folder / "texts").split(0.5);
        return (first ? front : back).summary().checksum;
    };
    CHECK(checksum_of_half({"ab\n", "cd\n", "d\n", "efg\n"}, true) ==
          checksum_of_half({"ab\n", "cd\n", "d\nefg\n"}, true));
    CHECK(checksum_of_half({"ab\n", "d\n", "e\n"}, false) == checksum_of_half({"abc\n", "d\n", "e\n"}, false));
}

TEST_CASE("a large file, tokenized in chunks, gives the tokens of the whole") {
    TempFolder folder;
    const fs::path golden = fs::path(__FILE__).parent_path() / "golden" / "tokenizer";
    std::string corpus = slurp((golden / "corpus.txt").string()), text;
    while (text.size() < 4'400'000) text += corpus;  // a chunk has 4 MiB
    spit(folder / "large.txt", text);
    for (const char* name :
         {"gpt2/tokenizer.json", "llama3/tokenizer.json", "llama2/tokenizer.json", "mistral/tokenizer.json"}) {
        auto tokenizer = load_tokenizer((golden / name).string());
        const bool equal = all_tokens(TokenSource::open(folder / "large.txt", *tokenizer)) == tokenizer->encode(text);
        CHECK(equal);
    }
}

TEST_CASE("the default text is C++, without licences, and the same every time") {
    TokenSource source = open("");
    CHECK(source.n() > 1'000'000);
    CHECK(source.n() <= 3'000'000);
    std::string text = text_of(source);
    CHECK(text == text_of(open("")));
    CHECK(text.find("namespace std") != text.npos);
    CHECK(text.find("GNU General Public License") == text.npos);
    CHECK(text.starts_with("#"));
    CHECK(one_line_with(source.description(), "C++ standard library headers", "files"));
}

TEST_CASE("token shards of two and four bytes") {
    TempFolder folder;
    spit(folder / "two.bin", shard_bytes(std::vector<uint16_t>{0, 1, 50256, 65535}));
    CHECK(all_tokens(open(folder / "two.bin")) == std::vector<int32_t>{0, 1, 50256, 65535});
    CHECK(open(folder / "two.bin").summary().max_token == 65535);
    spit(folder / "four.bin", shard_bytes(std::vector<uint32_t>{7, 128255}));
    CHECK(all_tokens(open(folder / "four.bin")) == std::vector<int32_t>{7, 128255});
    CHECK(one_line_with(open(folder / "four.bin").description(), "1 token shard", "2 tokens"));
    // An id that no int32 holds stays one that no vocabulary has.
    spit(folder / "huge.bin", shard_bytes(std::vector<uint32_t>{0xFFFFFFFFu}));
    CHECK(open(folder / "huge.bin").summary().max_token == 0x7FFFFFFF);
}

TEST_CASE("a folder of shards is one row of tokens, read across the borders") {
    TempFolder folder;
    spit(folder / "s_2.bin", shard_bytes(std::vector<uint16_t>{5, 6}));
    spit(folder / "s_1.bin", shard_bytes(std::vector<uint16_t>{0, 1, 2}));
    spit(folder / "s_1b.bin", shard_bytes(std::vector<uint16_t>{}));
    spit(folder / "s_1c.bin", shard_bytes(std::vector<uint32_t>{3, 4}));
    spit(folder / "notes.txt", "not read");
    TokenSource source = open(folder.path);
    REQUIRE(all_tokens(source) == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6});
    for (int32_t first = 0; first <= 7; ++first)
        for (int32_t count = 0; first + count <= 7; ++count) {
            std::vector<int32_t> got(static_cast<size_t>(count)), want(got.size());
            source.read(first, count, got.data());
            std::iota(want.begin(), want.end(), first);
            CHECK(got == want);
        }
    int32_t out[8];
    CHECK(one_line_with(error_of([&] { source.read(3, 5, out); }), "tokens 3 to 8 asked of 7"));
    CHECK(error_of([&] { source.read(-1, 2, out); }) != "");
    CHECK(error_of([&] { source.read(0, -1, out); }) != "");

    auto [train, val] = source.split(0.3);
    CHECK(all_tokens(train) == std::vector<int32_t>{0, 1, 2, 3, 4});
    CHECK(all_tokens(val) == std::vector<int32_t>{5, 6});
    CHECK(train.summary().max_token == 4);
    CHECK(all_tokens(val.split(0.5).second) == std::vector<int32_t>{6});
    CHECK(one_line_with(error_of([&] { source.split(1.5); }), "fraction", "1.5"));

    fs::create_symlink("/nowhere", folder / "s_3.bin");
    CHECK(one_line_with(error_of([&] { open(folder.path); }), "s_3.bin", "leads nowhere", "fetch"));
}

TEST_CASE("shards named val are held out") {
    TempFolder folder;
    spit(folder / "fw_train_000001.bin", shard_bytes(std::vector<uint16_t>{1}));
    spit(folder / "fw_train_000002.bin", shard_bytes(std::vector<uint16_t>{2}));
    spit(folder / "fw-val-000000.bin", shard_bytes(std::vector<uint16_t>{9}));
    spit(folder / "fw_medieval.bin", shard_bytes(std::vector<uint16_t>{0}));  // no word of it is "val"
    using Tokens = std::vector<int32_t>;
    auto bytes = make_byte_tokenizer();

    CHECK(all_tokens(open(folder.path)) == Tokens{0, 1, 2});
    CHECK(all_tokens(open(folder.path, true)) == Tokens{9});
    CHECK(all_tokens(open(folder / "*_train_*.bin")) == Tokens{1, 2});
    CHECK(all_tokens(open(folder / "*-val-*.bin")) == Tokens{9});  // nothing but val: all of it is meant

    auto by_name = open_train_and_val(folder.path, "", *bytes, 0.5);
    CHECK(all_tokens(by_name.first[0].tokens) == Tokens{0, 1, 2});
    CHECK(all_tokens(by_name.second[0].tokens) == Tokens{9});
    auto by_fraction = open_train_and_val(folder / "*_train_*.bin", "", *bytes, 0.5);
    CHECK(all_tokens(by_fraction.first[0].tokens) == Tokens{1});
    CHECK(all_tokens(by_fraction.second[0].tokens) == Tokens{2});
    auto given = open_train_and_val(folder / "fw_train_000001.bin", folder.path, *bytes, 0.5);
    CHECK(all_tokens(given.first[0].tokens) == Tokens{1});
    CHECK(all_tokens(given.second[0].tokens) == Tokens{9});
}

TEST_CASE("data that cannot work is refused in one line") {
    TempFolder folder;
    auto refusal = [&](const std::string& name) { return error_of([&] { open(folder / name); }); };
    auto shard_refusal = [&](const std::string& bytes) {
        spit(folder / "x.bin", bytes);
        return refusal("x.bin");
    };
    CHECK(one_line_with(refusal("missing.txt"), "no data at", folder / "missing.txt", "--data"));
    CHECK(one_line_with(refusal("*.bin"), "no data at", folder / "*.bin"));
    CHECK(one_line_with(refusal(""), "no data at", folder.path, "folder has no"));
    spit(folder / "empty.txt", "");
    CHECK(one_line_with(refusal("empty.txt"), "no text in", "empty.txt"));
    spit(folder / "zeros.txt", std::string("a\0b", 3));
    CHECK(one_line_with(refusal("zeros.txt"), "zeros.txt", "not text"));
    CHECK(one_line_with(refusal(""), "no text in", folder.path));

    const std::string good = shard_bytes(std::vector<uint16_t>{1, 2, 3});
    REQUIRE(shard_refusal(good) == "");
    CHECK(one_line_with(shard_refusal(with_header(good, 0, 12345)), "x.bin", "magic number 12345", "20240520",
                        "20240801"));
    CHECK(one_line_with(shard_refusal(with_header(good, 0, 20240522)), "multiple-choice"));
    CHECK(one_line_with(shard_refusal(with_header(good, 0, 20240326)), "checkpoint of llm.c"));
    CHECK(one_line_with(shard_refusal(with_header(good, 1, 7)), "version 7, expected 1"));
    CHECK(one_line_with(shard_refusal(with_header(good, 0, 20240801)), "version 1, expected 7"));
    CHECK(one_line_with(shard_refusal(with_header(good, 2, 4)), "promises 4 tokens", "1032 bytes", "has 1030",
                        "completely"));
    CHECK(one_line_with(shard_refusal(with_header(good, 2, 2)), "promises 2 tokens", "has 1030"));
    CHECK(one_line_with(shard_refusal(with_header(good, 2, -1)), "token count -1"));
    CHECK(one_line_with(shard_refusal(with_header(good, 2, 0x7FFFFFFF)), "promises 2147483647"));
    CHECK(one_line_with(shard_refusal(good.substr(0, 1029)), "has 1029"));
    CHECK(one_line_with(shard_refusal(good.substr(0, 100)), "100 bytes are too few"));
    CHECK(one_line_with(shard_refusal(""), "0 bytes are too few"));

    auto reader = [&](size_t n, int64_t T) { return error_of([&] { BatchReader(counting_source(folder, n), T, 1); }); };
    CHECK(one_line_with(reader(8, 8), "text too short", "has 8 tokens", "--seq 8 needs at least 9", "smaller --seq"));
    CHECK(reader(9, 8) == "");
    CHECK(one_line_with(reader(0, 1), "has 0 tokens"));
    CHECK(one_line_with(reader(9, 0), "at least 1"));
}

TEST_CASE("an epoch visits every window once") {
    TempFolder folder;
    using Sizes = std::pair<size_t, int64_t>;
    for (auto [n, T] : {Sizes{1000, 7}, {1001, 8}, {1024, 1}, {17, 8}, {9, 8}, {10, 8}, {24, 8}, {2, 1}}) {
        BatchReader reader(counting_source(folder, n), T, 42);
        int64_t n_windows = reader.sequences_per_epoch();
        INFO("n " << n << " T " << T << " windows " << n_windows);
        // At most two windows of text are lost: one that the offset cuts, one that is the price of equal epochs.
        CHECK(n_windows >= std::max<int64_t>(1, static_cast<int64_t>(n) / T - 1));
        for (int64_t epoch = 0; epoch < 3; ++epoch) {
            std::set<int64_t> starts;
            for (int64_t i = 0; i < n_windows; ++i) starts.insert(start_of(reader, T, epoch * n_windows + i));
            REQUIRE(static_cast<int64_t>(starts.size()) == n_windows);
            CHECK(*starts.begin() < T);  // the offset of the epoch
            CHECK(*starts.rbegin() == *starts.begin() + (n_windows - 1) * T);
        }
    }
}

TEST_CASE("epochs differ in order and offset, seeds in both, and sequence i is a pure function of i") {
    TempFolder folder;
    TokenSource source = counting_source(folder, 5000);
    const int64_t T = 16;
    BatchReader reader(source, T, 1), same(source, T, 1), other(source, T, 2);
    const int64_t n_windows = reader.sequences_per_epoch();
    std::vector<int64_t> starts, again, of_other;
    for (int64_t i = 0; i < 20 * n_windows; ++i) starts.push_back(start_of(reader, T, i));
    for (int64_t i = 20 * n_windows - 1; i >= 0; --i) again.push_back(start_of(same, T, i));  // backwards
    std::reverse(again.begin(), again.end());
    CHECK(starts == again);
    for (int64_t i = 0; i < n_windows; ++i) of_other.push_back(start_of(other, T, i));

    auto order = [&](const std::vector<int64_t>& all, int64_t epoch) {
        std::vector<int64_t> windows;
        for (int64_t i = 0; i < n_windows; ++i) windows.push_back(all[static_cast<size_t>(epoch * n_windows + i)] / T);
        return windows;
    };
    CHECK(order(starts, 0) != order(starts, 1));
    CHECK(order(starts, 0) != order(of_other, 0));
    std::set<int64_t> offsets;
    for (int64_t epoch = 0; epoch < 20; ++epoch) offsets.insert(starts[static_cast<size_t>(epoch * n_windows)] % T);
    CHECK(offsets.size() > 5);  // 20 draws of 16 values
}

// Were the shuffle poor, windows would keep their neighbours or their place. In a random permutation of n, the expected
// number of elements that stay is 1, the expected number of neighbours that stay neighbours is below 2, and the mean
// distance from the old place to the new one is n / 3; the bounds below are more than five standard deviations away.
TEST_CASE("the order is well shuffled") {
    TempFolder folder;
    const int64_t n = 2000;
    BatchReader reader(counting_source(folder, 2 * n + 2), 2, 7);
    REQUIRE(reader.sequences_per_epoch() == n);
    int n_fixed = 0, n_neighbours = 0;
    double distance = 0;
    int64_t previous = -10;
    const int64_t offset = start_of(reader, 2, 0) % 2;
    for (int64_t i = 0; i < n; ++i) {
        int64_t window = (start_of(reader, 2, i) - offset) / 2;
        n_fixed += window == i;
        n_neighbours += window == previous + 1 || window == previous - 1;
        distance += std::abs(static_cast<double>(window - i)) / static_cast<double>(n);
        previous = window;
    }
    CHECK(n_fixed <= 8);
    CHECK(n_neighbours <= 12);
    CHECK(std::abs(distance / static_cast<double>(n) - 1.0 / 3) < 0.03);
}

TEST_CASE("a shard that is shortened within a page is an error, and no zeros") {
    const TempFolder folder;
    const std::string first = folder / "a.bin", second = folder / "b.bin";
    for (const std::string& path : {first, second}) spit(path, shard_bytes(std::vector<uint16_t>(50, 7)));
    const TokenSource source = open(folder.path);
    std::vector<int32_t> tokens(50);
    // Another file in its place is no matter: what was opened is still there.
    std::filesystem::rename(first, folder / "moved");
    spit(first, "");
    std::filesystem::resize_file(second, 1024 + 60);
    source.read(0, 50, tokens.data());
    CHECK(tokens == std::vector<int32_t>(50, 7));
    const std::string words = "has been shortened by another program while it was being read, from 1124 bytes to 1084";
    CHECK(one_line_with(error_of([&] { source.read(1, 50, tokens.data()); }), second + " " + words));
    CHECK(one_line_with(error_of([&] { source.summary(); }), second + " " + words));
}

// ---------------------------------------------------------------------------------------------------------------------
// Documents

TEST_CASE("documents of shards begin with llm.c's document token, those of text with a file or the tokenizer's token") {
    TempFolder folder;
    using Starts = std::vector<int64_t>;
    const auto starts = [](const TokenSource& source) { return source.document_starts(0, source.n()); };
    // Documents of length 1 (two tokens in a row), one at the very end; a shard may begin in the middle of a document.
    fs::create_directories(folder / "narrow");
    spit(folder / "narrow/a.bin", shard_bytes(std::vector<uint16_t>{50256, 1, 2, 50256, 50256, 3, 128}));
    spit(folder / "narrow/b.bin", shard_bytes(std::vector<uint16_t>{4, 50256, 5, 50256}));
    const TokenSource narrow = open(folder / "narrow");
    CHECK(starts(narrow) == Starts{0, 3, 4, 8, 10});
    CHECK(narrow.document_starts(4, 5) == Starts{4, 8});
    CHECK(narrow.document_starts(5, 3) == Starts{});
    CHECK(narrow.document_starts(11, 0) == Starts{});
    CHECK(narrow.split(0.3).second.document_starts(0, 3) == Starts{0, 2});  // tokens 8 to 10
    CHECK(one_line_with(error_of([&] { narrow.document_starts(9, 3); }), "tokens 9 to 12 asked of 11"));
    CHECK(narrow.describe(7, 1) == "tokens 0 to 0 of " + (folder / "narrow/b.bin"));  // its document begins in a.bin
    CHECK(one_line_with(narrow.describe(9, 2), "tokens 2 to 3 of ", "the document that begins at its token 1"));
    std::vector<uint16_t> one_long(9000);
    one_long[3000] = 50256;
    spit(folder / "long.bin", shard_bytes(one_long));
    CHECK(one_line_with(open(folder / "long.bin").describe(8999, 1), "the document that begins at its token 3000"));
    spit(folder / "wide.bin", shard_bytes(std::vector<uint32_t>{128000, 50256, 128000}));
    CHECK(starts(open(folder / "wide.bin")) == Starts{0, 2});
    CHECK(starts(TokenSource::open(folder / "wide.bin", *make_byte_tokenizer(), false, 50256)) == Starts{1});

    fs::create_directories(folder / "text");
    spit(folder / "text/a", "ab");  // and a newline that is put between the files: it is the end of this one
    spit(folder / "text/b", "");
    spit(folder / "text/c", "c\n");
    spit(folder / "text/d", "<|endoftext|>d");  // to a tokenizer of bytes this is text
    CHECK(starts(open(folder / "text")) == Starts{0, 3, 5});
    CHECK(starts(open(folder / "text").split(0.5).second) == Starts{});
    CHECK(starts(open(folder / "text/a")) == Starts{0});

    const fs::path golden = fs::path(__FILE__).parent_path() / "golden" / "tokenizer";
    for (const auto& [name, mark] : {std::pair("gpt2", "<|endoftext|>"), {"llama3", "<|begin_of_text|>"}}) {
        const auto tokenizer = load_tokenizer((golden / name / "tokenizer.json").string());
        const int32_t mark_token = tokenizer->encode(mark).at(0);
        spit(folder / "marked.txt", concat("one", mark, "two", mark, mark, "three"));
        const TokenSource marked = TokenSource::open(folder / "marked.txt", *tokenizer);
        Starts expected = {0};
        const std::vector<int32_t> tokens = all_tokens(marked);
        for (size_t i = 0; i < tokens.size(); ++i)
            if (tokens[i] == mark_token) expected.push_back(static_cast<int64_t>(i));
        REQUIRE(expected.size() == 4);
        CHECK(starts(marked) == expected);
    }
}

TEST_CASE("the documents of a sequence are cut at its ends") {
    TempFolder folder;
    // Every document begins with 50256 and has as many more tokens as its number: lengths 1, 2, 3, ...
    std::vector<uint16_t> tokens;
    for (uint16_t n = 0; tokens.size() < 300; ++n) {
        tokens.push_back(50256);
        tokens.insert(tokens.end(), n, n);
    }
    spit(folder / "documents.bin", shard_bytes(tokens));
    bool begins_at_last = false, begins_at_first = false, inside = false;
    for (const int64_t T : {1, 2, 7, 16}) {
        const BatchReader reader(open(folder / "documents.bin"), T, 5);
        for (int64_t i = 0; i < 3 * reader.sequences_per_epoch(); ++i) {
            std::vector<int32_t> row(static_cast<size_t>(T)), targets(row), spans(2 * row.size(), -1),
                positions(row.size(), -1);
            reader.sequence(i, row.data(), targets.data());
            reader.documents(i, spans.data(), positions.data());
            int32_t first = 0;
            for (int32_t t = 0; t < T; ++t) {
                if (row[static_cast<size_t>(t)] == 50256) first = t;
                int32_t end = t + 1;
                while (end < T && row[static_cast<size_t>(end)] != 50256) ++end;
                CHECK(spans[static_cast<size_t>(2 * t)] == first);
                CHECK(spans[static_cast<size_t>(2 * t + 1)] == end);
                CHECK(positions[static_cast<size_t>(t)] == t - first);
            }
            begins_at_first |= T > 1 && row[0] == 50256;
            begins_at_last |= T > 1 && row.back() == 50256;
            inside |= std::count(row.begin(), row.end(), 50256) == 0;
        }
    }
    CHECK((begins_at_first && begins_at_last && inside));  // or this test would not have seen the edges
}

TEST_CASE("sequence numbers reach far") {
    TempFolder folder;
    BatchReader reader(counting_source(folder, 100), 4, 3);
    CHECK(start_of(reader, 4, int64_t{1} << 40) == start_of(reader, 4, int64_t{1} << 40));
    CHECK(one_line_with(error_of([&] { start_of(reader, 4, -1); }), "-1"));
}

TEST_CASE("a mix has its shares in every thousand sequences, and each source its own epochs") {
    TempFolder folder;
    const int64_t T = 4, sizes[] = {5000, 3000, 900}, shares[] = {500, 300, 200};
    TokenMix mix;
    for (size_t k = 0; k < 3; ++k) {  // source k has the tokens 100000 k, 100000 k + 1, ...
        std::vector<uint32_t> tokens(static_cast<size_t>(sizes[k]));
        std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(100000 * k));
        spit(folder / concat(k, ".bin"), shard_bytes(tokens));
        mix.push_back({open(folder / concat(k, ".bin")), shares[k]});
    }
    const BatchReader reader(mix, T, 3), again(mix, T, 3);
    CHECK(one_line_with(error_of([&] { BatchReader({mix[0], mix[1]}, T, 3); }), "add up to 800, not to 1000"));
    CHECK(reader.sequences_per_epoch() == 1249 + 749 + 224);
    std::vector<int64_t> starts_of[3];
    bool mixed = false;  // the sources take turns; they do not come one after the other
    for (int64_t i = 0; i < 3000; ++i) {
        const int64_t start = start_of(reader, T, i);
        const size_t k = static_cast<size_t>(start / 100000);
        starts_of[k].push_back(start % 100000);
        mixed = mixed || (i < 100 && k == 2);
        if (i % kMixShares == kMixShares - 1)
            for (size_t j = 0; j < 3; ++j)
                CHECK(starts_of[j].size() == static_cast<size_t>((i + 1) / kMixShares * shares[j]));
    }
    CHECK(mixed);
    for (size_t k = 0; k < 3; ++k) {  // the thousands that lie in its first epoch visit no window twice
        const int64_t thousands = std::min<int64_t>(3, (sizes[k] / T - 1) / shares[k]), n = thousands * shares[k];
        CHECK(static_cast<int64_t>(std::set<int64_t>(starts_of[k].begin(), starts_of[k].begin() + n).size()) == n);
    }
    bool same = true;  // a pure function of i
    for (int64_t i = 2999; i >= 0; i -= 7) same = same && start_of(again, T, i) == start_of(reader, T, i);
    CHECK(same);
    CHECK_THAT(reader.describe(0), ContainsSubstring(".bin"));
}

TEST_CASE("paths with weights become shares") {
    const auto shares = [](const std::string& text) {
        std::string words;
        for (const MixedPath& part : parse_mixed_paths(text)) words += concat(part.path, " ", part.share, " ");
        return words;
    };
    CHECK(shares("") == " 1000 ");
    CHECK(shares("a.txt") == "a.txt 1000 ");
    CHECK(shares("a.txt:0.7,b:c.txt:0.3") == "a.txt 700 b:c.txt 300 ");
    CHECK(shares("a:1,b:1,c:1") == "a 334 b 333 c 333 ");
    CHECK(shares("a:2e3,b:2") == "a 999 b 1 ");
    CHECK(shares("a,b") == "a,b 1000 ");  // no weight anywhere: a name
    CHECK(one_line_with(error_of([] { parse_mixed_paths("/dev,/proc"); }), "each of several sources needs a weight"));
    TempFolder folder;
    spit(folder / "a:1", "text");  // a file of this name exists
    CHECK(shares(folder / "a:1") == (folder / "a:1") + " 1000 ");
    CHECK(one_line_with(error_of([] { parse_mixed_paths("a:1,b:-1"); }), "weight of b must be a number above 0"));
}
