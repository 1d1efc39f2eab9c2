// Safetensors: held against the reference implementation's bytes, and against every way in which a file can be broken.
//
//   run:   build/cpu/run_tests -# "[#test_safetensors]"
#include <cmath>
#include <cstring>
#include <regex>
#include <set>

#include "io/io.h"
#include "file_size_limit.h"
#include "temp_folder.h"
#include "test.h"

namespace {

template <class T>
std::string bytes_of(std::initializer_list<T> values) {
    return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T)};
}

TensorToStore to_store(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                       const std::string& bytes) {
    return {name, dtype, std::move(shape), [bytes](void* out) { std::memcpy(out, bytes.data(), bytes.size()); }};
}

// A file with this header and data: what no writer of ours would write.
std::string file_of(const std::string& header, const std::string& data) {
    return bytes_of<uint64_t>({header.size()}) + header + data;
}

SafetensorsView parse(const std::string& bytes) {
    // An allocation of exactly these bytes, so that the sanitizers see a read beyond them.
    const std::vector<unsigned char> exact(bytes.begin(), bytes.end());
    return parse_safetensors(exact.data(), exact.size(), "x.safetensors");
}

std::string parse_error(const std::string& bytes) {
    return error_of([&] { parse(bytes); });
}

// safetensors.torch.save() of safetensors 0.8.0 gave these bytes for the tensors below.
const std::string reference_header =
    R"({"__metadata__":{"format":"pt"},"scalar":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
    R"("empty":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]},)"
    R"("w":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},)"
    R"("ids":{"dtype":"I32","shape":[2],"data_offsets":[24,32]},)"
    R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[32,36]},)"
    R"("h":{"dtype":"F16","shape":[3],"data_offsets":[36,42]}}    )";
const std::string reference = file_of(
    reference_header, bytes_of<int64_t>({7}) + bytes_of<float>({1, -2, 0.5f, 3}) + bytes_of<int32_t>({-1, 2147483647}) +
                          bytes_of<uint16_t>({0x3f80, 0xc049}) + bytes_of<uint16_t>({0x3e00, 0xb400, 0x7bff}));

}  // namespace

TEST_CASE("metadata that are null are none, as the reference implementation has it") {
    CHECK(parse_error(file_of(R"({"__metadata__":null})", "")).empty());
}

TEST_CASE("an element of each dtype has as many bytes as in the reference implementation") {
    const std::pair<size_t, std::vector<std::string>> all[] = {
        {1, {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"}},
        {2, {"U16", "I16", "F16", "BF16"}},
        {4, {"U32", "I32", "F32"}},
        {8, {"U64", "I64", "F64", "C64"}}};
    for (const auto& [bytes, dtypes] : all)
        for (const std::string& dtype : dtypes)
            CHECK(parse_error(file_of(
                      concat(R"({"w":{"dtype":")", dtype, R"(","shape":[3],"data_offsets":[0,)", 3 * bytes, "]}}"),
                      std::string(3 * bytes, 'x'))) == "");
}

TEST_CASE("what we write is what the reference implementation writes") {
    TempFolder folder;
    const std::string path = folder / "x.safetensors";
    // 16-bit tensors first: they must end up behind the wider ones, or these would not be aligned.
    write_safetensors(path,
                      {to_store("b", "BF16", {2}, bytes_of<uint16_t>({0x3f80, 0xc049})),
                       to_store("h", "F16", {3}, bytes_of<uint16_t>({0x3e00, 0xb400, 0x7bff})),
                       to_store("scalar", "I64", {}, bytes_of<int64_t>({7})), to_store("empty", "F32", {0, 3}, ""),
                       to_store("w", "F32", {2, 2}, bytes_of<float>({1, -2, 0.5f, 3})),
                       to_store("ids", "I32", {2}, bytes_of<int32_t>({-1, 2147483647}))},
                      {{"format", "pt"}});
    // But for the checksums, of which it knows nothing.
    const std::string text = slurp(path);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, text.data(), 8);
    const std::regex of_ours(R"(,"checksum [a-z]+":"[0-9a-f]{16}")");
    std::string header = std::regex_replace(text.substr(8, header_bytes), of_ours, "");
    header.erase(header.find_last_not_of(' ') + 1);
    header.resize(static_cast<size_t>(round_up(std::ssize(header), 8)), ' ');
    CHECK(file_of(header, text.substr(8 + header_bytes)) == reference);
    CHECK(folder.listing() == "x.safetensors");
}

TEST_CASE("a file of the reference implementation is read as it was meant") {
    TempFolder folder;
    spit(folder / "x.safetensors", reference);
    SafetensorsReader reader(folder / "x.safetensors");
    CHECK(reader.tensors().size() == 6);
    CHECK(reader.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
    CHECK(reader.has("w"));
    CHECK_FALSE(reader.has("W"));
    CHECK(reader.at("w").shape == std::vector<int64_t>{2, 2});
    CHECK(reader.at("w").floats() == std::vector<float>{1, -2, 0.5f, 3});
    CHECK(reader.at("h").floats() == std::vector<float>{1.5f, -0.25f, 65504});
    CHECK(reader.at("b").floats() == std::vector<float>{1, -3.140625f});
    CHECK(reader.at("empty").n() == 0);
    CHECK(reader.at("empty").floats().empty());
    CHECK(reader.at("scalar").shape.empty());
    CHECK(reader.at("scalar").n() == 1);
    int64_t scalar;
    std::memcpy(&scalar, reader.at("scalar").data, sizeof scalar);
    CHECK(scalar == 7);
    CHECK(one_line_with(error_of([&] { reader.at("ids").floats(); }), "I32", "floats"));
}

TEST_CASE("half and bfloat16 special values") {
    const std::string header =
        R"({"h":{"dtype":"F16","shape":[5],"data_offsets":[1,11]},"b":{"dtype":"BF16","shape":[3],)"
        R"("data_offsets":[11,17]},"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
    // Also: data at odd addresses, which the format allows.
    const std::string file = file_of(header, "." + bytes_of<uint16_t>({0x7c00, 0xfc00, 0x7e00, 0x0001, 0x8000}) +
                                                 bytes_of<uint16_t>({0x7f80, 0x7fc0, 0x0001}));
    const std::vector<unsigned char> exact(file.begin(), file.end());
    const SafetensorsView view = parse_safetensors(exact.data(), exact.size(), "x");
    const std::vector<float> h = view.tensors.at("h").floats(), b = view.tensors.at("b").floats();
    CHECK(h[0] == INFINITY);
    CHECK(h[1] == -INFINITY);
    CHECK(std::isnan(h[2]));
    CHECK(h[3] == std::ldexp(1.0f, -24));
    CHECK(std::signbit(h[4]));
    CHECK(b[0] == INFINITY);
    CHECK(std::isnan(b[1]));
    CHECK(b[2] == std::ldexp(1.0f, -133));
}

TEST_CASE("every prefix of a file is refused, every flipped byte survived") {
    for (size_t n = 0; n < reference.size(); n++) {
        INFO("the first " << n << " bytes");
        CHECK(one_line_with(parse_error(reference.substr(0, n)), "x.safetensors: "));
    }
    CHECK(parse(reference).tensors.size() == 6);
    for (size_t i = 0; i < 8 + reference_header.size(); i++) {
        for (int bit = 0; bit < 8; bit++) {
            std::string flipped = reference;
            flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
            const std::string message = parse_error(flipped);
            CHECK(message.find('\n') == std::string::npos);
        }
    }
}

TEST_CASE("malformed files: one line that names the file and what is wrong") {
    auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return R"({"t":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
    };
    const std::string f32 = R"("F32")", four = "0123";
    const std::string pair = R"({"dtype":"U8","shape":[2],"data_offsets":)";
    struct Case {
        std::string bytes, words;
    };
    const Case cases[] = {
        {"", "too short"},
        {bytes_of<uint64_t>({~uint64_t{0}}) + "{}", "not a safetensors file"},
        {bytes_of<uint64_t>({100'000'001}) + "{}", "not a safetensors file"},
        {bytes_of<uint64_t>({3}) + "{}", "it is not complete"},
        {file_of("", ""), "not valid JSON"},
        {file_of("{", ""), "not valid JSON"},
        {file_of("{} x", ""), "not valid JSON"},
        {file_of(std::string("{}\0", 3), ""), "not valid JSON"},
        {file_of("{\"\xff\":1}", ""), "not valid JSON"},
        {file_of("[]", ""), "not a JSON object"},
        {file_of(std::string(1'000'000, '['), ""), "more than 8 levels"},
        {file_of("{\"a\":" + std::string(1'000'000, '['), ""), "more than 8 levels"},
        {file_of(R"({"a":1e999})", ""), "number out of range"},
        {file_of(R"({"__metadata__":[]})", ""), "__metadata__ is not an object"},
        {file_of(R"({"__metadata__":{"k":1}})", ""), "__metadata__ of \"k\" is not a string"},
        {file_of(R"({"__metadata__":{"checksum t":"12 "},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", ""),
         "is not the checksum of a tensor"},
        {file_of(R"({"t":1})", ""), "\"t\": its entry is not an object"},
        {file_of(R"({"t":{"shape":[1],"data_offsets":[0,4]}})", four), "no \"dtype\""},
        {file_of(R"({"t":{"dtype":"F32","data_offsets":[0,4]}})", four), "no \"shape\""},
        {file_of(R"({"t":{"dtype":"F32","shape":[1]}})", four), "no \"data_offsets\""},
        {file_of(entry("1", "[1]", "[0,4]"), four), "\"dtype\" is not a string"},
        {file_of(entry(R"("F31")", "[1]", "[0,4]"), four), "unknown dtype \"F31\""},
        {file_of(entry(R"("f32")", "[1]", "[0,4]"), four), "unknown dtype \"f32\""},
        {file_of(entry(R"("F\n32")", "[1]", "[0,4]"), four), "unknown dtype \"F?32\""},  // libFuzzer found this one
        {file_of(entry(f32, "1", "[0,4]"), four), "\"shape\" is not a list"},
        {file_of(entry(f32, "[-1]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[1.0]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[\"1\"]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[true]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[9223372036854775808]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[99999999999999999999]", "[0,4]"), four), "not a count"},
        {file_of(entry(f32, "[4294967296,4294967296]", "[0,0]"), ""), "more than 2^63 bytes"},
        {file_of(entry(f32, "[2305843009213693952]", "[0,0]"), ""), "more than 2^63 bytes"},
        {file_of(entry(f32, "[4611686018427387905,4]", "[0,4]"), four), "more than 2^63 bytes"},  // 4 modulo 2^64
        {file_of(entry(f32, "[2]", "[0,4]"), four), "F32 [2] takes 8 bytes, but its data_offsets span 4"},
        {file_of(entry(f32, "[1]", "[0]"), four), "must be two numbers"},
        {file_of(entry(f32, "[1]", "[0,4,8]"), four), "must be two numbers"},
        {file_of(entry(f32, "[1]", "[-4,0]"), four), "not a count"},
        {file_of(entry(f32, "[1]", "[4,0]"), four), "its data are bytes 4 to 0 of 4"},
        {file_of(entry(f32, "[2]", "[0,8]"), four), "its data are bytes 0 to 8 of 4"},
        {file_of(entry(f32, "[1]", "[4,8]"), four), "its data are bytes 4 to 8 of 4"},
        {file_of(entry(f32, "[1]", "[9223372036854775803,9223372036854775807]"), four), "its data are bytes"},
        {file_of(entry(f32, "[1]", "[0,4]"), "01234"), "1 bytes after the last tensor"},
        {file_of("{}", "0"), "1 bytes after the last tensor"},
        {file_of("{\"a\":" + pair + "[0,2]},\"b\":" + pair + "[1,3]}}", "012"),
         "\"b\" begins at byte 1 of the data, where 2"},
        {file_of("{\"a\":" + pair + "[0,2]},\"b\":" + pair + "[3,5]}}", "01234"),
         "\"b\" begins at byte 3 of the data, where 2"},
        {file_of("{\"a\":" + pair + "[1,3]}}", "012"), "\"a\" begins at byte 1 of the data, where 0"},
        {file_of("{\"a\":" + pair + "[0,2]},\"a\":" + pair + "[0,2]}}", "01"), "Duplicate key: 'a'"},
        {file_of(R"({"t":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}})", ""),
         "Duplicate key: 'dtype'"},
        {file_of("{\"two\\nlines\":1}", ""), "\"two?lines\""},
        {file_of("{\"" + std::string(1'000'000, 'n') + "\":1}", ""), "nnn...\": its entry"},
    };
    for (const Case& broken : cases) {
        const std::string message = parse_error(broken.bytes);
        INFO("wanted: " << broken.words << "\n  got: " << message);
        CHECK(one_line_with(message, "x.safetensors: ", broken.words));
        CHECK(message.size() < 400);
    }
}

TEST_CASE("folders: one file, shards with an index, and what can be wrong with them") {
    TempFolder folder;
    CHECK(one_line_with(error_of([&] { SafetensorsReader r(folder.path); }), folder.path,
                        "neither model.safetensors nor"));
    spit(folder / "pytorch_model.bin", "");
    CHECK(one_line_with(error_of([&] { SafetensorsReader r(folder.path); }), "safe_serialization=True"));

    const std::string index = folder / "model.safetensors.index.json";
    auto write_index = [&](const std::string& map) {
        spit(index, "{\"metadata\":{\"total_size\":24},\"weight_map\":" + map + "}");
    };
    auto error = [&] { return error_of([&] { SafetensorsReader r(folder.path); }); };
    write_safetensors(
        folder / "m-1.safetensors",
        {to_store("a", "F32", {1}, bytes_of<float>({1})), to_store("hidden", "F32", {1}, bytes_of<float>({9}))},
        {{"format", "pt"}});
    write_index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
    CHECK(one_line_with(error(), index, "m-2.safetensors is missing"));
    write_safetensors(folder / "m-2.safetensors", {to_store("c", "F32", {1}, bytes_of<float>({2}))});
    CHECK(one_line_with(error(), index, "says that \"b\" is in \"m-2.safetensors\", but it is not"));
    write_safetensors(folder / "m-2.safetensors", {to_store("b", "F32", {1}, bytes_of<float>({2}))});
    for (const std::string& from : {folder.path, index}) {
        SafetensorsReader reader(from);
        CHECK(reader.at("a").floats() == std::vector<float>{1});
        CHECK(reader.at("b").floats() == std::vector<float>{2});
        CHECK_FALSE(reader.has("hidden"));
        CHECK(reader.metadata().at("format") == "pt");
    }
    // In a cache a shard is a link, and what it leads to may be out of reach: it is not missing.
    const std::string linked = folder / "linked";
    std::filesystem::create_directory(linked);
    const auto link_error = [&](const std::string& name) {
        std::filesystem::create_symlink(name, linked + "/" + name);  // leads to itself
        return error_of([&] { SafetensorsReader r(linked); });
    };
    std::filesystem::copy(index, linked);
    CHECK(one_line_with(link_error("m-1.safetensors"), "cannot open ", "m-1.safetensors: Too many levels of symbolic"));
    CHECK(one_line_with(link_error("model.safetensors"), "cannot open ", "model.safetensors: Too many levels of sym"));
    const std::string cut = slurp(folder / "m-2.safetensors");
    spit(folder / "m-2.safetensors", cut.substr(0, cut.size() - 1));
    CHECK(one_line_with(error(), "m-2.safetensors: ", "not complete"));
    std::pair<const char*, const char*> broken[] = {
        {"{}", "names no tensor"},
        {"[]", "is not an object"},
        {R"({"a":1})", "not a file name"},
        {R"({"a":"../x"})", "not a plain file name"},
        {R"({"a":".."})", "not a plain file name"},
        {R"({"a":"/etc/passwd"})", "not a plain file name"},
        {R"({"a":""})", "not a plain file name"},
        {R"({"a":"m\u0000"})", "not a plain file name"},
        {R"({"a":"m-1.safetensors","a":"m-2.safetensors"})", "Duplicate key: 'a'"},
        {"{", "not valid JSON"}};
    for (const auto& [map, words] : broken) {
        write_index(map);
        INFO(error());
        CHECK(one_line_with(error(), index, words));
    }
    write_index("{\"a\":\"" + std::string(5000, 'm') + "\"}");
    CHECK(one_line_with(error(), "is missing"));

    spit(folder / "model.safetensors", reference);  // goes first
    CHECK(SafetensorsReader(folder.path).has("scalar"));
}

TEST_CASE("a missing tensor: the nearest names are shown") {
    TempFolder folder;
    std::vector<TensorToStore> tensors;
    for (int i = 0; i < 12; i++) tensors.push_back(to_store(concat("h.", i, ".attn.weight"), "U8", {1}, "x"));
    tensors.push_back(to_store("wte.weight", "U8", {1}, "x"));
    write_safetensors(folder / "x.safetensors", tensors);
    SafetensorsReader reader(folder / "x.safetensors");
    CHECK(one_line_with(error_of([&] { reader.at("transformer.wte.weight"); }), folder / "x.safetensors",
                        "no tensor named \"transformer.wte.weight\"; it has \"wte.weight\"", "and 10 more"));
    write_safetensors(folder / "none.safetensors", {});
    CHECK(
        one_line_with(error_of([&] { SafetensorsReader(folder / "none.safetensors").at("a"); }), "it has no tensors"));
}

TEST_CASE("writing: impossible tensors and full disks leave nothing behind") {
    TempFolder folder;
    const std::string path = folder / "x.safetensors";
    auto error = [&](const std::vector<TensorToStore>& tensors,
                     const std::map<std::string, std::string>& metadata = {}) {
        return error_of([&] { write_safetensors(path, tensors, metadata); });
    };
    const TensorToStore good = to_store("a", "U8", {1}, "x");
    CHECK(one_line_with(error({good, good}), path, "two tensors named \"a\""));
    CHECK(one_line_with(error({to_store("__metadata__", "U8", {1}, "x")}), "__metadata__"));
    CHECK(one_line_with(error({to_store("a", "f32", {1}, "")}), "unknown dtype \"f32\""));
    CHECK(one_line_with(error({to_store("a", "F32", {-1}, "")}), "impossible shape [-1]"));
    CHECK(one_line_with(error({to_store("a", "F32", {1ll << 40, 1ll << 40}, "")}), "impossible shape"));
    CHECK(one_line_with(error({good, to_store("b", "U8", {INT64_MAX}, "")}), "impossible shape"));
    CHECK(one_line_with(error({to_store("a\xff", "U8", {1}, "x")}), "UTF-8"));
    CHECK(one_line_with(error({good}, {{"\xff", "k"}}), "UTF-8"));
    CHECK(one_line_with(error({good}, {{"k", "\xff"}}), "UTF-8"));
    CHECK(one_line_with(error({good, {"b", "U8", {1}, [](void*) { fail("no device"); }}}), "no device"));
    CHECK(folder.listing().empty());

    const FileSizeLimit limit(1'000'000);
    const std::string full = error({to_store("a", "U8", {4'000'000}, std::string(4'000'000, 'x'))});
    CHECK(one_line_with(full, path, "more bytes", "free some space"));
    CHECK(folder.listing().empty());
}

TEST_CASE("a checksum tells inputs apart that differ in any bit, or in their length", "[safetensors][checksum]") {
    for (const size_t n : {1u, 7u, 8u, 31u, 32u, 33u, 100u}) {
        std::string bytes(n, '\0');
        std::set<uint64_t> sums = {checksum(bytes.data(), n)};
        for (size_t bit = 0; bit < 8 * n; ++bit) {
            bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
            sums.insert(checksum(bytes.data(), n));
            bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
        }
        CHECK(sums.size() == 8 * n + 1);
        bytes += '\0';
        CHECK(sums.count(checksum(bytes.data(), n + 1)) == 0);
    }
    // The value is part of the file format: it must not change from one version to the next.
    CHECK(checksum_text(checksum("The quick brown fox jumps over the lazy dog", 43)) == "b6de22650abb71a8");
}

TEST_CASE("a flipped bit in any tensor is found, and the tensor is named", "[safetensors][checksum]") {
    const TempFolder folder;
    const std::string path = folder / "a.safetensors";
    write_safetensors(path, {to_store("first", "U8", {3}, "abc"), to_store("second", "U8", {5}, "defgh")});
    const std::string whole = slurp(path);
    CHECK_NOTHROW(SafetensorsReader(path).verify());
    const std::string tensors[] = {"first", "first", "first", "second", "second", "second", "second", "second"};
    for (size_t i = 0; i < 8; ++i) {
        std::string broken = whole;
        broken[broken.size() - 8 + i] ^= 1;
        spit(path, broken);
        CHECK(one_line_with(error_of([&] { SafetensorsReader(path).verify(); }), path,
                            "\"" + tensors[i] + "\" is broken"));
        CHECK(error_of([&] { SafetensorsReader(path).verify(i < 3 ? "second" : "first"); }) == "");
        CHECK(one_line_with(error_of([&] { SafetensorsReader(path).verify(tensors[i]); }), path, "is broken"));
    }
    // A broken checksum is a broken file as well.
    std::string broken = whole;
    const size_t at = broken.find("checksum second");
    broken[at] = 'C';
    spit(path, broken);
    CHECK(one_line_with(error_of([&] { SafetensorsReader reader(path); }), path, "\"second\" has no checksum"));
}
