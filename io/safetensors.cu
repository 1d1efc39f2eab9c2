// Safetensors: the Hugging Face tensor file.                    (format: github.com/huggingface/safetensors, README)
//
//   bytes 0..7      n, the length of the header: little-endian uint64
//   bytes 8..8+n    JSON: {"__metadata__": {"key": "text", ...},
//                          "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//                   padded with spaces so that the data start at a multiple of 8
//   from 8+n        the data: row-major, little-endian; offsets count from here; no gap, no overlap, nothing after
//
// A file comes from somewhere else: nothing in it is trusted. Sizes are multiplied with overflow checks, every range is
// compared with the bytes there are, and errors quote names of the file shortened and without control characters.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>

#include "io/json.h"

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian");

namespace {

constexpr size_t length_bytes = 8;                // of the number before the header
constexpr size_t max_header_bytes = 100'000'000;  // the reference implementation's limit
constexpr int max_json_depth = 8;                 // the format needs 3; some indices carry metadata of their own
constexpr const char* metadata_key = "__metadata__";

size_t element_bytes(const std::string& dtype) {  // 0: unknown
    static const std::map<std::string, size_t> table = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
        {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
        {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8}};
    const auto found = table.find(dtype);
    return found == table.end() ? 0 : found->second;
}

// A name out of the file, fit for an error line: at most 80 characters, control characters as '?'.
// (Not called `quoted`: for a std::string that is not const the compiler would prefer std::quoted, which keeps
// newlines.)
std::string in_quotes(const std::string& name) {
    std::string shown = name.substr(0, 80);
    for (char& c : shown)
        if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
    return '"' + shown + (name.size() > 80 ? "...\"" : "\"");
}

Json::Value parse_file(std::string_view text, const std::string& name) {
    try {
        return parse_json(text, name, max_json_depth);
    } catch (const Error& error) {
        fail(error.what(), "; the file is broken or not complete");
    }
}

// The value of `key`, or an error if it is not there.
const Json::Value& required(const Json::Value& object, const char* key, const std::string& what) {
    check(has(object, key), what, ": no \"", key, "\"; the file is broken");
    return member(object, key);
}

// A list of integers in [0, 2^63).
std::vector<int64_t> integers(const Json::Value& list, const char* key, const std::string& what) {
    check(list.isArray(), what, ": \"", key, "\" is not a list; the file is broken");
    std::vector<int64_t> values;
    for (const Json::Value& item : list) {
        int64_t value = -1;
        check(is_whole(item) && read_value(item, value) && value >= 0, what, ": \"", key,
              "\" holds something that is not a count; the file is broken");
        values.push_back(value);
    }
    return values;
}

// The bytes of a tensor, or no value if they do not fit 63 bits.
std::optional<int64_t> product_bytes(const std::vector<int64_t>& shape, size_t one_bytes) {
    int64_t bytes = static_cast<int64_t>(one_bytes);
    for (int64_t dim : shape)
        if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
    return bytes;
}

std::string show(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size() && i < 8; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + (shape.size() > 8 ? ", ...]" : "]");
}

// One header entry, with its place in the `data_bytes` of data checked.
StoredTensor parse_tensor(const Json::Value& entry, const unsigned char* data, int64_t data_bytes,
                          const std::string& what) {
    check(entry.isObject(), what, ": its entry is not an object; the file is broken");
    StoredTensor tensor;
    check(read_value(required(entry, "dtype", what), tensor.dtype), what,
          ": \"dtype\" is not a string; the file is broken");
    const size_t one_bytes = element_bytes(tensor.dtype);
    check(one_bytes > 0, what, ": unknown dtype ", in_quotes(tensor.dtype),
          "; known are F32, BF16, F16, F64, F8_*, I*, U*, BOOL");
    tensor.shape = integers(required(entry, "shape", what), "shape", what);
    const std::optional<int64_t> wanted_bytes = product_bytes(tensor.shape, one_bytes);
    check(wanted_bytes.has_value(), what, ": its shape ", show(tensor.shape),
          " has more than 2^63 bytes; the file is broken");

    const std::vector<int64_t> offsets = integers(required(entry, "data_offsets", what), "data_offsets", what);
    check(offsets.size() == 2, what, ": \"data_offsets\" must be two numbers; the file is broken");
    const int64_t begin = offsets[0], end = offsets[1];
    check(begin <= end && end <= data_bytes, what, ": its data are bytes ", begin, " to ", end, " of ", data_bytes,
          "; the file is broken or not complete, fetch it again");
    check(end - begin == *wanted_bytes, what, ": ", tensor.dtype, " ", show(tensor.shape), " takes ", *wanted_bytes,
          " bytes, but its data_offsets span ", end - begin, "; the file is broken");
    tensor.data = data + begin;
    tensor.bytes = static_cast<size_t>(end - begin);
    return tensor;
}

const std::string checksum_key = "checksum ";  // and the name of the tensor

// Moves the checksums from the metadata to their tensors. A file in which some tensors have one was written by
// write_safetensors, which gives one to all.
void take_checksums(SafetensorsView& view, const std::string& name) {
    bool any = false;
    for (auto entry = view.metadata.begin(); entry != view.metadata.end();) {
        const auto& [key, text] = *entry;
        if (!key.starts_with(checksum_key)) {
            ++entry;
            continue;
        }
        const auto tensor = view.tensors.find(key.substr(checksum_key.size()));
        uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
        check(tensor != view.tensors.end() && error == std::errc() && end == text.data() + text.size(), name, ": ",
              in_quotes(key), " in __metadata__ is not the checksum of a tensor; the file is broken");
        tensor->second.checksum = value;
        any = true;
        entry = view.metadata.erase(entry);
    }
    for (const auto& [tensor_name, tensor] : view.tensors)
        check(!any || tensor.checksum, name, ": tensor ", in_quotes(tensor_name),
              " has no checksum, others have; the file is broken");
}

}  // namespace

int64_t StoredTensor::n() const { return product_bytes(shape, 1).value_or(0); }

std::vector<float> StoredTensor::floats() const {
    std::vector<float> values(static_cast<size_t>(n()));
    if (values.empty()) return values;
    auto convert = [&](auto to_float) {
        for (size_t i = 0; i < values.size(); i++) {
            uint16_t bits;
            std::memcpy(&bits, data + 2 * i, 2);
            values[i] = to_float(bits);
        }
    };
    if (dtype == "F32") {
        std::memcpy(values.data(), data, bytes);
    } else if (dtype == "BF16") {
        convert([](uint16_t bits) { return __bfloat162float(std::bit_cast<__nv_bfloat16>(bits)); });
    } else if (dtype == "F16") {
        convert([](uint16_t bits) { return __half2float(std::bit_cast<__half>(bits)); });
    } else {
        fail("a tensor of dtype ", dtype, " cannot be read as floats; F32, BF16 and F16 can");
    }
    return values;
}

SafetensorsView parse_safetensors(const unsigned char* data, size_t bytes, const std::string& name) {
    check(bytes >= length_bytes, name, ": only ", bytes, " bytes, too short for a safetensors file");
    uint64_t header_bytes;
    std::memcpy(&header_bytes, data, length_bytes);
    check(header_bytes <= max_header_bytes, name, ": a header of ", header_bytes,
          " bytes: this is not a safetensors file, or a broken one");
    check(header_bytes <= bytes - length_bytes, name, ": its header takes ", header_bytes,
          " bytes, but the file has only ", bytes - length_bytes,
          " after the length; it is not complete, fetch it again");
    const std::string_view text(reinterpret_cast<const char*>(data) + length_bytes, header_bytes);
    const Json::Value header = parse_file(text, name);
    check(header.isObject(), name, ": its header is not a JSON object; the file is broken");

    const unsigned char* first = data + length_bytes + header_bytes;
    const auto data_bytes = static_cast<int64_t>(bytes - length_bytes - header_bytes);
    SafetensorsView view;
    for (auto item = header.begin(); item != header.end(); ++item) {
        const std::string key = item.name();
        const Json::Value& entry = *item;
        if (key == metadata_key) {
            check(entry.isObject() || entry.isNull(), name, ": __metadata__ is not an object; the file is broken");
            for (auto meaning = entry.begin(); meaning != entry.end(); ++meaning)
                check(read_value(*meaning, view.metadata[meaning.name()]), name, ": __metadata__ of ",
                      in_quotes(meaning.name()), " is not a string; the file is broken");
            continue;
        }
        view.tensors[key] = parse_tensor(entry, first, data_bytes, name + ": tensor " + in_quotes(key));
    }

    // In order of their offsets the tensors must tile the data: none overlap, and no bytes are smuggled in between.
    std::vector<std::pair<std::string, StoredTensor>> order(view.tensors.begin(), view.tensors.end());
    std::ranges::stable_sort(order, {},
                             [](const auto& entry) { return std::pair(entry.second.data, entry.second.bytes); });
    int64_t reached = 0;
    for (const auto& [key, tensor] : order) {
        check(tensor.data == first + reached, name, ": tensor ", in_quotes(key), " begins at byte ",
              tensor.data - first, " of the data, where ", reached, " was due; the file is broken");
        reached += static_cast<int64_t>(tensor.bytes);
    }
    check(reached == data_bytes, name, ": ", data_bytes - reached, " bytes after the last tensor; the file is broken");
    take_checksums(view, name);
    return view;
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& name) {
    const Json::Value index = parse_file(text, name);
    check(index.isObject(), name, ": not a JSON object; the file is broken");
    const Json::Value& weight_map = required(index, "weight_map", name);
    check(weight_map.isObject(), name, ": \"weight_map\" is not an object; the file is broken");
    std::map<std::string, std::string> shard_of;
    for (auto shard = weight_map.begin(); shard != weight_map.end(); ++shard) {
        const std::string tensor = shard.name();
        std::string file;
        check(read_value(*shard, file), name, ": the shard of ", in_quotes(tensor),
              " is not a file name; the file is broken");
        // Shards lie beside their index. A path could point anywhere on this machine, a NUL would cut it short.
        check(!file.empty() && file[0] != '.' && file.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
              name, ": the shard ", in_quotes(file), " of ", in_quotes(tensor),
              " is not a plain file name; the file is broken");
        shard_of[tensor] = file;
    }
    check(!shard_of.empty(), name, ": \"weight_map\" names no tensor; the file is broken");
    return shard_of;
}

SafetensorsReader::SafetensorsReader(const std::string& file_or_folder) : path_(file_or_folder) {
    namespace fs = std::filesystem;
    std::string path = file_or_folder;
    if (is_folder(path)) {
        const std::string whole = fs::path(path) / "model.safetensors";
        const std::string index = fs::path(path) / "model.safetensors.index.json";
        std::error_code ignored;
        const bool old = fs::exists(fs::path(path) / "pytorch_model.bin", ignored);
        check(is_there(whole) || is_there(index), path,
              ": neither model.safetensors nor model.safetensors.index.json is in this folder",
              old ? "; save its pytorch_model.bin again with save_pretrained(..., safe_serialization=True)" : "");
        path = is_there(whole) ? whole : index;
    }
    if (path.ends_with(".json")) {
        add_shards(path);
    } else {
        SafetensorsView view = map_file(path);
        tensors_ = std::move(view.tensors);
        metadata_ = std::move(view.metadata);
    }
}

SafetensorsView SafetensorsReader::map_file(const std::string& path) {
    files_.emplace_back(path);
    return parse_safetensors(files_.back().data(), files_.back().bytes(), path);
}

void SafetensorsReader::add_shards(const std::string& index_path) {
    const std::map<std::string, std::string> shard_of =
        parse_safetensors_index(read_regular_file(index_path), index_path);
    const std::filesystem::path folder = std::filesystem::path(index_path).parent_path();
    std::map<std::string, SafetensorsView> shards;
    for (const auto& [name, file] : shard_of) {
        const std::string shard_path = folder / file;
        if (!shards.count(file)) {
            check(is_there(shard_path), index_path, ": its shard ", shard_path, " is missing; fetch it");
            shards[file] = map_file(shard_path);
            metadata_.insert(shards[file].metadata.begin(), shards[file].metadata.end());
        }
        const auto found = shards[file].tensors.find(name);
        check(found != shards[file].tensors.end(), index_path, ": says that ", in_quotes(name), " is in ",
              in_quotes(file), ", but it is not; fetch both files again");
        tensors_.insert(*found);
    }
}

const StoredTensor& SafetensorsReader::at(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found != tensors_.end()) return found->second;
    std::vector<std::pair<size_t, std::string>> nearest;
    for (const auto& [other, tensor] : tensors_) nearest.push_back({edit_distance(name, other), in_quotes(other)});
    const size_t n_shown = std::min<size_t>(3, nearest.size());
    std::partial_sort(nearest.begin(), nearest.begin() + static_cast<long>(n_shown), nearest.end());
    std::string hint = n_shown ? "; it has " : "; it has no tensors";
    for (size_t i = 0; i < n_shown; i++) hint += (i ? ", " : "") + nearest[i].second;
    if (tensors_.size() > n_shown) hint += concat(" and ", tensors_.size() - n_shown, " more");
    fail(path_, ": no tensor named ", in_quotes(name), hint);
}

void SafetensorsReader::check_sum(const std::string& name, uint64_t found, uint64_t written) const {
    check(found == written, path_, ": tensor ", in_quotes(name), " is broken: its bytes have checksum ",
          checksum_text(found), ", and ", checksum_text(written), " were written");
}

void SafetensorsReader::verify(const std::string& name) const {
    const StoredTensor& tensor = at(name);
    if (tensor.checksum) check_sum(name, checksum(tensor.data, tensor.bytes), *tensor.checksum);
}

void SafetensorsReader::verify() const {
    std::vector<const std::pair<const std::string, StoredTensor>*> order;
    for (const auto& entry : tensors_)
        if (entry.second.checksum) order.push_back(&entry);
    std::vector<uint64_t> found(order.size());
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < order.size(); ++i) found[i] = checksum(order[i]->second.data, order[i]->second.bytes);
    for (size_t i = 0; i < order.size(); ++i) check_sum(order[i]->first, found[i], *order[i]->second.checksum);
}

namespace {

// What is written of a tensor besides its data.
struct Written {
    const TensorToStore* tensor;
    int64_t begin, end;  // its bytes in the data
    uint64_t checksum = 0;
};

std::string header_text(const std::vector<Written>& order, const std::map<std::string, std::string>& metadata) {
    JsonText described = JsonText::object(), header = JsonText::object();
    for (const auto& [key, text] : metadata) described.set(key, text);
    for (const Written& written : order)
        described.set(checksum_key + written.tensor->name, checksum_text(written.checksum));
    if (!metadata.empty() || !order.empty()) header.set(metadata_key, described);
    for (const Written& written : order)
        header.set(written.tensor->name, {{"dtype", written.tensor->dtype},
                                          {"shape", written.tensor->shape},
                                          {"data_offsets", JsonText::array({written.begin, written.end})}});
    return header.str();
}

}  // namespace

void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata) {
    std::set<std::string> names = {metadata_key};
    std::vector<Written> order;
    bool all_utf8 = true;
    for (const TensorToStore& tensor : tensors) {
        check(names.insert(tensor.name).second, path, ": two tensors named ", in_quotes(tensor.name));
        check(element_bytes(tensor.dtype) > 0, path, ": tensor ", in_quotes(tensor.name), " has the unknown dtype ",
              in_quotes(tensor.dtype));
        all_utf8 &= is_utf8(tensor.name);
        order.push_back({&tensor, 0, 0});
    }
    for (const auto& [key, text] : metadata) all_utf8 &= is_utf8(key) && is_utf8(text);
    check(all_utf8, path, ": a name or a metadata string is not valid UTF-8");
    std::stable_sort(order.begin(), order.end(), [](const Written& a, const Written& b) {
        return element_bytes(a.tensor->dtype) > element_bytes(b.tensor->dtype);
    });
    int64_t offset = 0;
    for (Written& written : order) {
        const TensorToStore& tensor = *written.tensor;
        const std::optional<int64_t> bytes = product_bytes(tensor.shape, element_bytes(tensor.dtype));
        check(bytes.has_value() && *bytes <= std::numeric_limits<int64_t>::max() - offset, path, ": tensor ",
              in_quotes(tensor.name), " has the impossible shape ", show(tensor.shape));
        written.begin = offset;
        written.end = offset += *bytes;
    }
    // The header stands before the data, whose checksums are known only when they have been written: it is written
    // again then. It is as long as before: a checksum has 16 digits.
    std::string text = header_text(order, metadata);
    text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
    check(text.size() <= max_header_bytes, path, ": a header of ", text.size(), " bytes; readers take at most ",
          max_header_bytes);

    AtomicFile file(path);
    const uint64_t header_bytes = text.size();
    file.write(&header_bytes, length_bytes);
    file.write(text);
    std::vector<unsigned char> buffer;
    for (Written& written : order) {
        buffer.resize(static_cast<size_t>(written.end - written.begin));
        written.tensor->fill(buffer.data());
        file.write(buffer.data(), buffer.size());
        written.checksum = checksum(buffer.data(), buffer.size());
    }
    file.overwrite(length_bytes, header_text(order, metadata));
    file.commit();
}
