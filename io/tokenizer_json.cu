// io/tokenizer_json.cu: reads a Hugging Face tokenizer.json into the tables of byte-level BPE (tokenizer.cu), and
// writes the one in which each byte is a token.
//
// The file describes a pipeline of components: normalizer, pre_tokenizer, model, post_processor, decoder. Each is read
// only as far as GPT-2, LLaMA 3 and Qwen 2 use it, and anything else is refused: a tokenizer that is nearly right
// trains and samples without an error, and badly.
#include "io/io.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <limits>

namespace {

using json = nlohmann::json;

// tokenizer.json writes tokens as text, so every byte has a character that prints: those that do anyway stand for
// themselves, the others are U+0100, U+0101, ... in order (the space is U+0120).
constexpr size_t kPrintedCodes = 324;
std::array<uint32_t, 256> printed_codes() {
    std::array<uint32_t, 256> codes;
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
        const bool prints = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        codes[byte] = prints ? byte : next++;
    }
    return codes;
}

// The bytes that a token's text stands for; nothing if a character of it stands for none.
std::optional<std::string> bytes_of_token(const std::string& token) {
    static const auto byte_of = [] {
        std::array<int, kPrintedCodes> bytes;
        bytes.fill(-1);
        const std::array<uint32_t, 256> codes = printed_codes();
        for (size_t byte = 0; byte < 256; ++byte) bytes[codes[byte]] = static_cast<int>(byte);
        return bytes;
    }();
    std::string bytes;
    for (size_t i = 0; i < token.size();) {
        auto [code, length] = utf8_char_at(token, i);
        if (code >= byte_of.size() || byte_of[code] < 0) return std::nullopt;
        bytes.push_back(static_cast<char>(byte_of[code]));
        i += length;
    }
    return bytes;
}

const char* const supported = "; supported are byte-level BPE tokenizers as those of GPT-2, LLaMA 3 and Qwen 2";

// The member of an object, or null where there is none.
const json& member(const json& node, const char* key) {
    static const json null;
    if (!node.is_object()) return null;
    auto found = node.find(key);
    return found == node.end() ? null : *found;
}

bool flag(const json& node, const char* key, bool otherwise = false) {
    const json& value = member(node, key);
    return value.is_boolean() ? value.get<bool>() : otherwise;
}

std::string type_of(const json& node) {
    const json& type = member(node, "type");
    return type.is_string() ? type.get<std::string>() : node.is_null() ? "(none)" : "(unnamed)";
}

// Text of the file as part of a one-line message.
std::string quoted(std::string text) {
    if (text.size() > 160) text = text.substr(0, 160) + "...";
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 32) c = '?';
    return '"' + text + '"';
}

// The steps of a component that may be a Sequence of components. (Pointers, because copying json recurses: a file of
// nothing but brackets would overflow the stack.)
std::vector<const json*> steps_of(const json& node, const char* key) {
    if (node.is_null()) return {};
    if (type_of(node) != "Sequence") return {&node};
    std::vector<const json*> steps;
    for (const json& step : member(node, key)) steps.push_back(&step);
    return steps;
}

void read_pre_tokenizer(const json& node, BpeTables& tables) {
    std::string regex;  // ByteLevel alone: GPT-2's
    bool split = false, byte_level = false;
    for (const json* node_of_step : steps_of(node, "pretokenizers")) {
        const json& step = *node_of_step;
        std::string type = type_of(step);
        if (type == "Split" && !split && !byte_level) {
            split = true;
            const json& pattern = member(member(step, "pattern"), "Regex");
            check(pattern.is_string(), tables.file, ": the pre-tokenizer Split has no Regex", supported);
            regex = pattern.get<std::string>();
            // Either way every match is a word: the expressions match all of the text.
            bool invert = flag(step, "invert");
            const json& behavior = member(step, "behavior");
            check(behavior == "Isolated" || (invert && behavior == "Removed"), tables.file,
                  ": the pre-tokenizer Split neither isolates its matches nor removes the rest", supported);
        } else if (type == "ByteLevel" && !byte_level) {
            byte_level = true;
            check(flag(step, "use_regex", true) != split, tables.file, ": the pre-tokenizer splits by ",
                  split ? "two expressions" : "none", supported);
            tables.add_prefix_space = flag(step, "add_prefix_space", true);
            check(!split || !tables.add_prefix_space, tables.file, ": add_prefix_space after a Split", supported);
        } else {
            fail(tables.file, ": pre-tokenizer step ", quoted(type), supported);
        }
    }
    check(byte_level, tables.file, ": the pre-tokenizer is not byte-level", supported);
    tables.first_word = find_word_splitter(regex);
    check(tables.first_word != nullptr, tables.file, ": pre-tokenizer expression ", quoted(regex), supported);
}

void read_options(const json& root, BpeTables& tables) {
    const json& model = member(root, "model");
    std::string type = type_of(model);  // the oldest files do not name it
    check(type == "BPE" || type == "(unnamed)", tables.file, ": model type ", quoted(type), supported);
    check(!flag(model, "byte_fallback"), tables.file, ": a SentencePiece tokenizer (byte_fallback), as LLaMA 2's",
          supported);
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
        const json& value = member(model, key);
        bool unset = value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty()) ||
                     (value.is_number() && value.get<double>() == 0);
        check(unset, tables.file, ": the model has a ", key, supported);
    }
    tables.ignore_merges = flag(model, "ignore_merges");
    for (const json* step : steps_of(member(root, "normalizer"), "normalizers")) {
        check(type_of(*step) == "NFC", tables.file, ": normalizer ", quoted(type_of(*step)), supported);
        tables.nfc = true;
    }
    const json& decoder = member(root, "decoder");
    check(decoder.is_null() || type_of(decoder) == "ByteLevel", tables.file, ": decoder ", quoted(type_of(decoder)),
          supported);
    read_pre_tokenizer(member(root, "pre_tokenizer"), tables);
}

void read_vocabulary(const json& root, BpeTables& tables, std::unordered_map<std::string, int32_t>& id_of_token) {
    const json& vocab = member(member(root, "model"), "vocab");
    const json& added = member(root, "added_tokens");
    check(vocab.is_object() && !vocab.empty(), tables.file, ": model.vocab is missing or empty", supported);
    check(added.is_null() || added.is_array(), tables.file, ": added_tokens is not a list");

    // Ids may have gaps, but a short file must not make us reserve memory for huge ones.
    int64_t limit = static_cast<int64_t>(vocab.size() + added.size()) + 65536;
    auto put = [&](const std::string& token, const json& value, std::string bytes) {
        int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
        if (id < 0 || id >= limit) fail(tables.file, ": token ", quoted(token), " has no id from 0 to ", limit - 1);
        auto [known, is_new] = id_of_token.try_emplace(token, static_cast<int32_t>(id));
        if (known->second != id) fail(tables.file, ": token ", quoted(token), " has ids ", known->second, " and ", id);
        size_t index = static_cast<size_t>(id);
        if (index >= tables.has_id.size()) {
            tables.has_id.resize(index + 1);
            tables.bytes_of_id.resize(index + 1);
        }
        if (is_new && tables.has_id[index]) fail(tables.file, ": token ", quoted(token), " shares id ", id);
        tables.has_id[index] = true;
        tables.bytes_of_id[index] = std::move(bytes);
        return known->second;
    };

    tables.id_of_byte.fill(-1);
    for (const auto& [token, value] : vocab.items()) {
        std::optional<std::string> bytes = bytes_of_token(token);
        int32_t id = put(token, value, bytes.value_or(token));
        if (!bytes) continue;
        tables.id_of_bytes[*bytes] = id;
        if (bytes->size() == 1) tables.id_of_byte[static_cast<unsigned char>((*bytes)[0])] = id;
    }
    for (const json& entry : added) {
        check(member(entry, "content").is_string(), tables.file, ": an entry of added_tokens has no content");
        const std::string& text = member(entry, "content").get_ref<const std::string&>();
        if (text.empty()) continue;
        for (const char* key : {"single_word", "lstrip", "rstrip"})
            check(!flag(entry, key), tables.file, ": added token ", quoted(text), " has ", key, supported);
        auto& list = flag(entry, "normalized") ? tables.added_normalized : tables.added;
        list.push_back({text, put(text, member(entry, "id"), text)});
    }
    for (auto* list : {&tables.added, &tables.added_normalized})
        std::stable_sort(list->begin(), list->end(),
                         [](const auto& a, const auto& b) { return a.text.size() > b.text.size(); });
}

void read_merges(const json& merges, BpeTables& tables, const std::unordered_map<std::string, int32_t>& id_of_token) {
    check(merges.is_array(), tables.file, ": model.merges is missing", supported);
    check(merges.size() <= std::numeric_limits<int32_t>::max(), tables.file, ": too many merges");
    tables.merges.reserve(merges.size());
    int32_t rank = 0;
    for (const json& merge : merges) {
        std::string left, right;  // written as "left right" or, by newer versions, ["left", "right"]
        if (merge.is_string()) {
            const std::string& text = merge.get_ref<const std::string&>();
            size_t space = text.find(' ');
            if (space == text.npos || text.find(' ', space + 1) != text.npos)
                fail(tables.file, ": merge ", rank, ", ", quoted(text), ", is not two tokens with a space between");
            left = text.substr(0, space);
            right = text.substr(space + 1);
        } else {
            check(merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(), tables.file,
                  ": merge ", rank, " is not a pair of tokens");
            left = merge[0].get<std::string>();
            right = merge[1].get<std::string>();
        }
        auto id_of = [&](const std::string& token) {
            auto found = id_of_token.find(token);
            if (found == id_of_token.end())
                fail(tables.file, ": merge ", rank, " needs token ", quoted(token), ", which the vocabulary lacks");
            return found->second;
        };
        uint64_t pair = bpe_pair(id_of(left), id_of(right));
        tables.merges.insert_or_assign(pair, BpeTables::Merge{rank, id_of(left + right)});
        ++rank;
    }
}

// Is token i the byte i, and is there nothing else?
bool is_one_token_a_byte(const BpeTables& tables) {
    if (tables.bytes_of_id.size() != 256 || !tables.merges.empty() || tables.add_prefix_space || tables.nfc ||
        !tables.added.empty() || !tables.added_normalized.empty())
        return false;
    for (size_t byte = 0; byte < 256; ++byte)
        if (tables.bytes_of_id[byte] != std::string(1, static_cast<char>(byte))) return false;
    return true;
}

}  // namespace

std::string byte_tokenizer_json() {
    using ordered = nlohmann::ordered_json;
    ordered vocab = ordered::object();
    const std::array<uint32_t, 256> codes = printed_codes();
    for (size_t byte = 0; byte < 256; ++byte) {
        const uint32_t code = codes[byte];  // below U+0800: one byte of UTF-8 or two
        const std::string text =
            code < 128 ? std::string{static_cast<char>(code)}
                       : std::string{static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
        vocab[text] = byte;
    }
    const ordered file = {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", ordered::array()},
        {"normalizer", nullptr},
        {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}},
        {"post_processor", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}}},
        {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}}},
        {"model",
         {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"vocab", vocab},
          {"merges", ordered::array()}}}};
    return file.dump(1) + "\n";
}

std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view text, const std::string& name) {
    BpeTables tables;
    tables.file = name;
    try {
        json root = json::parse(text.begin(), text.end());
        std::unordered_map<std::string, int32_t> id_of_token;
        read_options(root, tables);
        read_vocabulary(root, tables, id_of_token);
        read_merges(member(member(root, "model"), "merges"), tables, id_of_token);
    } catch (const json::parse_error& error) {
        fail(name, ": not valid JSON at byte ", error.byte, " of ", text.size(), ": was it downloaded completely?");
    } catch (const json::exception& error) {
        fail(name, ": not a tokenizer.json: ", error.what());
    }
    if (is_one_token_a_byte(tables)) return make_byte_tokenizer();
    return make_bpe_tokenizer(std::move(tables));
}
