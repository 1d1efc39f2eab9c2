// io/tokenizer_json.cu: reads a Hugging Face tokenizer.json into the parts of a tokenizer (tokenizer_parts.h).
//
// The file describes a pipeline of components: normalizer, pre_tokenizer, model, post_processor, decoder. A component
// that is not known here is refused: a tokenizer that is nearly right trains and samples without an error, and badly.
#include "io/tokenizer_parts.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>

namespace {

using json = nlohmann::json;

const char* const kSupported = ", which is not supported: doc/models.md lists the tokenizers that are read";

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

// The steps of a component that may be a Sequence of components. (Pointers, because copying json recurses: a file of
// nothing but brackets would overflow the stack.)
std::vector<const json*> steps_of(const json& node, const char* key) {
    if (node.is_null()) return {};
    if (type_of(node) != "Sequence") return {&node};
    std::vector<const json*> steps;
    for (const json& step : member(node, key)) steps.push_back(&step);
    return steps;
}

class Reader {
  public:
    Reader(const json& root, const std::string& file) : root_(root), model_(member(root, "model")) {
        parts_.file = parts_.bpe.file = file;
    }
    TokenizerParts read() {
        read_options();
        read_normalizer();
        read_pre_tokenizer();
        read_decoder();
        read_vocabulary();
        read_added_tokens();
        read_merges();
        read_post_processor();
        if (!parts_.bpe.byte_level) parts_.pre_tokenizers.push_back(parts_.bpe.cut_where_no_token_spans());
        return std::move(parts_);
    }

  private:
    template <class... Parts>
    void want(bool condition, const Parts&... parts) const {
        if (!condition) fail(parts_.file, ": ", parts...);
    }
    std::string text(const json& node, const char* key, const std::string& owner) const {
        const json& value = member(node, key);
        want(value.is_string() && !value.get_ref<const std::string&>().empty(), owner, " has no ", key);
        return value.get<std::string>();
    }
    int count(const json& node, const char* key) const {
        const json& value = member(node, key);
        const int64_t n = value.is_number_integer() ? value.get<int64_t>() : 0;
        want(n >= 0 && n <= 1'000'000, "the decoder Strip has a ", key, " of ", n);
        return static_cast<int>(n);
    }
    Regex pattern(const json& step) const;
    SplitBehavior behavior(const json& step, const char* otherwise) const;
    PreTokenizer metaspace(const json& step);
    void read_options();
    void read_normalizer();
    void read_pre_tokenizer();
    void read_decoder();
    void read_vocabulary();
    void read_added_tokens();
    void read_merges();
    void read_post_processor();
    int32_t put(const std::string& token, const json& id);
    void set_text(int32_t id, const std::string& token);

    const json &root_, &model_;
    TokenizerParts parts_;
    int64_t id_limit_ = 0;
    bool decodes_bytes_ = false;  // the decoder is ByteLevel
    std::unordered_map<std::string, int32_t> id_of_token_;
};

// ---------------------------------------------------------------------------------------------------------------------
// What is done to the text

Regex Reader::pattern(const json& step) const {
    const json& node = member(step, "pattern");
    if (member(node, "Regex").is_string()) return Regex(node["Regex"].get<std::string>(), parts_.file);
    return Regex::literal(text(node, "String", "the pattern of " + type_of(step)));
}

void Reader::read_normalizer() {
    std::vector<Normalizer>& steps = parts_.normalizers;
    for (const json* node : steps_of(member(root_, "normalizer"), "normalizers")) {
        const json& step = *node;
        const std::string type = type_of(step);
        if (type == "NFC") steps.push_back(normal_form(true, false));
        else if (type == "NFD") steps.push_back(normal_form(false, false));
        else if (type == "NFKC") steps.push_back(normal_form(true, true));
        else if (type == "NFKD") steps.push_back(normal_form(false, true));
        else if (type == "Lowercase") steps.push_back(lowercase());
        else if (type == "Strip") steps.push_back(strip(flag(step, "strip_left"), flag(step, "strip_right")));
        else if (type == "Prepend") steps.push_back(prepend(text(step, "prepend", "the normalizer Prepend")));
        else if (type == "Replace") {
            const json& content = member(step, "content");
            want(content.is_string(), "the normalizer Replace has no content");
            steps.push_back(replace(pattern(step), content.get<std::string>()));
        } else want(false, "the file has the normalizer ", quoted_line(type), kSupported);
    }
}

SplitBehavior Reader::behavior(const json& step, const char* otherwise) const {
    const json& node = member(step, "behavior");
    const std::string name = node.is_string() ? node.get<std::string>() : otherwise;
    constexpr std::pair<const char*, SplitBehavior> kBehaviors[] = {
        {"Isolated", SplitBehavior::isolated},
        {"Removed", SplitBehavior::removed},
        {"MergedWithPrevious", SplitBehavior::merged_with_previous},
        {"MergedWithNext", SplitBehavior::merged_with_next},
        {"Contiguous", SplitBehavior::contiguous}};
    for (const auto& [known, value] : kBehaviors)
        if (name == known) return value;
    fail(parts_.file, ": the pre-tokenizer ", type_of(step), " has the behavior ", quoted_line(name), kSupported);
}

void Reader::read_pre_tokenizer() {
    constexpr const char* kGpt2Pattern =
        R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    std::vector<PreTokenizer>& steps = parts_.pre_tokenizers;
    auto split_by = [&](const char* pattern, SplitBehavior how, bool invert = false) {
        steps.push_back(split(Regex(pattern, parts_.file), how, invert));
    };
    for (const json* node : steps_of(member(root_, "pre_tokenizer"), "pretokenizers")) {
        const json& step = *node;
        const std::string type = type_of(step);
        want(!parts_.bpe.byte_level, "the pre-tokenizer ", quoted_line(type), " follows ByteLevel", kSupported);
        if (type == "Split") steps.push_back(split(pattern(step), behavior(step, ""), flag(step, "invert")));
        else if (type == "Digits")
            split_by("\\p{N}", flag(step, "individual_digits") ? SplitBehavior::isolated : SplitBehavior::contiguous);
        else if (type == "Punctuation") split_by("[\\p{P}$+<=>^`|~]", behavior(step, "Isolated"));
        else if (type == "Whitespace") steps.push_back(split_off_white_space());
        else if (type == "WhitespaceSplit") split_by("\\s", SplitBehavior::removed);
        else if (type == "Metaspace") {
            steps.push_back(metaspace(step));
            if (flag(step, "split", true))
                steps.push_back(
                    split(Regex::literal(text(step, "replacement", type)), SplitBehavior::merged_with_next));
        } else if (type == "ByteLevel") {
            parts_.bpe.byte_level = true;
            if (flag(step, "add_prefix_space", true)) steps.push_back(add_prefix_space());
            if (flag(step, "use_regex", true)) split_by(kGpt2Pattern, SplitBehavior::isolated);
        } else want(false, "the file has the pre-tokenizer ", quoted_line(type), kSupported);
    }
}

PreTokenizer Reader::metaspace(const json& step) {
    const json& node = member(step, "prepend_scheme");  // older files have add_prefix_space instead
    std::string scheme = node.is_string() ? node.get<std::string>() : "always";
    if (!flag(step, "add_prefix_space", true)) scheme = "never";
    const bool known = scheme == "always" || scheme == "first" || scheme == "never";
    want(known, "the pre-tokenizer Metaspace has the prepend_scheme ", quoted_line(scheme), kSupported);
    return mark_spaces(text(step, "replacement", "the pre-tokenizer Metaspace"),
                       scheme == "always"  ? PrependScheme::always
                       : scheme == "first" ? PrependScheme::first
                                           : PrependScheme::never);
}

// What the post_processor puts around a text: an outer one of several around what the inner ones put.
void Reader::read_post_processor() {
    auto ids_of = [&](const json& ids, std::vector<int32_t>& out) {
        want(ids.is_array(), "a special token of the post_processor has no ids");
        for (const json& id : ids) {
            const bool known =
                id.is_number_integer() && id >= 0 && id < parts_.has_id.size() && parts_.has_id[id.get<size_t>()];
            want(known, "the post_processor adds a token that the vocabulary lacks");
            out.push_back(id.get<int32_t>());
        }
    };
    for (const json* node : steps_of(member(root_, "post_processor"), "processors")) {
        const json& step = *node;
        const std::string type = type_of(step);
        if (type == "ByteLevel") continue;  // it changes offsets only
        want(type == "TemplateProcessing", "the file has the post_processor ", quoted_line(type), kSupported);
        std::vector<int32_t> before, behind;
        bool text_seen = false;
        for (const json& item : member(step, "single")) {
            if (!member(item, "Sequence").is_null()) {
                want(!text_seen, "the template of the post_processor has the text twice");
                text_seen = true;
                continue;
            }
            const std::string name = text(member(item, "SpecialToken"), "id", "the template of the post_processor");
            ids_of(member(member(member(step, "special_tokens"), name.c_str()), "ids"), text_seen ? behind : before);
        }
        want(text_seen, "the template of the post_processor lacks the text");
        parts_.prefix.insert(parts_.prefix.begin(), before.begin(), before.end());
        parts_.suffix.insert(parts_.suffix.end(), behind.begin(), behind.end());
    }
}

void Reader::read_decoder() {
    Decoder& decoder = parts_.decoder;
    const json& root = member(root_, "decoder");
    want(!root.is_null() || parts_.bpe.byte_level, "there is no decoder, so that tokens cannot be printed", kSupported);
    decodes_bytes_ = root.is_null();
    bool fused = false;  // steps before work on each token, steps behind on the whole text
    for (const json* node : steps_of(root, "decoders")) {
        const json& step = *node;
        const std::string type = type_of(step);
        if (type == "Fuse") {
            fused = true;
        } else if (type == "Strip") {
            const std::string content = text(step, "content", "the decoder Strip");
            const int start = count(step, "start"), stop = count(step, "stop");
            if (fused) {
                want(stop == 0 && decoder.n_stripped == 0, "the decoder strips the end of the text", kSupported);
                decoder.stripped = content;
                decoder.n_stripped = start;
            } else decoder.steps.push_back(decode_strip(content, start, stop));
        } else {
            want(!fused, "the decoder ", quoted_line(type), " follows Fuse", kSupported);
            if (type == "ByteLevel") decodes_bytes_ = true;
            else if (type == "ByteFallback") decoder.steps.push_back(decode_byte_fallback());
            else if (type == "Replace") {
                const json& content = member(step, "content");
                want(content.is_string(), "the decoder Replace has no content");
                decoder.steps.push_back(decode_replace(pattern(step), content.get<std::string>()));
            } else if (type == "Metaspace") {
                const bool never = !flag(step, "add_prefix_space", true) || member(step, "prepend_scheme") == "never";
                decoder.steps.push_back(decode_spaces(text(step, "replacement", "the decoder Metaspace"), never));
            } else want(false, "the file has the decoder ", quoted_line(type), kSupported);
        }
    }
    const bool alone = decoder.steps.empty() && decoder.n_stripped == 0;
    want(!decodes_bytes_ || alone, "the decoder ByteLevel is not the only one", kSupported);
}

// ---------------------------------------------------------------------------------------------------------------------
// The tokens

void Reader::read_options() {
    const std::string type = type_of(model_);  // the oldest files do not name it
    want(type == "BPE" || (type == "(unnamed)" && model_.is_object()), "the model has the type ", quoted_line(type),
         kSupported);
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
        const json& value = member(model_, key);
        const bool unset = value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty()) ||
                           (value.is_number() && value.get<double>() == 0);
        want(unset, "the model has a ", key, kSupported);
    }
    parts_.bpe.byte_fallback = flag(model_, "byte_fallback");
    parts_.bpe.ignore_merges = flag(model_, "ignore_merges");
    parts_.bpe.fuse_unknown = flag(model_, "fuse_unk");
}

int32_t Reader::put(const std::string& token, const json& value) {
    const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
    want(id >= 0 && id < id_limit_, "token ", quoted_line(token), " has no id from 0 to ", id_limit_ - 1);
    auto [known, is_new] = id_of_token_.try_emplace(token, static_cast<int32_t>(id));
    want(known->second == id, "token ", quoted_line(token), " has ids ", known->second, " and ", id);
    const size_t index = static_cast<size_t>(id);
    if (index >= parts_.has_id.size()) {
        parts_.has_id.resize(index + 1);
        parts_.is_special.resize(index + 1);
        parts_.text_of_id.resize(index + 1);
    }
    want(!is_new || !parts_.has_id[index], "token ", quoted_line(token), " shares id ", id);
    parts_.has_id[index] = true;
    return known->second;
}

void Reader::set_text(int32_t id, const std::string& token) {
    std::string& usual = parts_.text_of_id[id];
    usual = parts_.decoder.text_of(token, false);
    std::string first = parts_.decoder.text_of(token, true);
    if (first != usual) parts_.text_of_first[id] = std::move(first);
}

void Reader::read_vocabulary() {
    Bpe& bpe = parts_.bpe;
    const json& vocab = member(model_, "vocab");
    want(vocab.is_object() && !vocab.empty(), "model.vocab is missing or empty", kSupported);
    const json& added = member(root_, "added_tokens");
    want(added.is_null() || added.is_array(), "added_tokens is not a list");
    // Ids may have gaps, but a short file must not make us reserve memory for huge ones.
    id_limit_ = static_cast<int64_t>(vocab.size() + added.size()) + 65536;

    bpe.id_of_byte.fill(-1);
    for (const auto& [token, value] : vocab.items()) {
        const int32_t id = put(token, value);
        const std::optional<std::string> bytes = bytes_of_printed(token);
        set_text(id, decodes_bytes_ ? bytes.value_or(token) : token);
        if (!bpe.byte_level) bpe.id_of[token] = id;
        else if (bytes) bpe.id_of[*bytes] = id;
    }
    constexpr char kHex[] = "0123456789ABCDEF";
    for (size_t byte = 0; byte < 256; ++byte) {
        const std::string fallback = {'<', '0', 'x', kHex[byte / 16], kHex[byte % 16], '>'};
        const auto found = bpe.id_of.find(bpe.byte_level ? std::string(1, static_cast<char>(byte)) : fallback);
        if (found != bpe.id_of.end()) bpe.id_of_byte[byte] = found->second;
    }
    const json& unknown = member(model_, "unk_token");
    const auto found = id_of_token_.find(unknown.is_string() ? unknown.get<std::string>() : "");
    if (found != id_of_token_.end()) bpe.unknown = found->second;
}

void Reader::read_added_tokens() {
    std::vector<AddedToken> raw, normalized;
    for (const json& entry : member(root_, "added_tokens")) {
        want(member(entry, "content").is_string(), "an entry of added_tokens has no content");
        AddedToken token{.text = member(entry, "content").get<std::string>(),
                         .single_word = flag(entry, "single_word"),
                         .lstrip = flag(entry, "lstrip"),
                         .rstrip = flag(entry, "rstrip")};
        if (token.text.empty()) continue;
        token.id = put(token.text, member(entry, "id"));
        const bool is_normalized = flag(entry, "normalized");
        if (is_normalized) token.text = normalize(parts_.normalizers, token.text);
        if (decodes_bytes_) parts_.text_of_id[token.id] = token.text;
        else set_text(token.id, token.text);
        parts_.is_special[token.id] = flag(entry, "special");
        if (!token.text.empty()) (is_normalized ? normalized : raw).push_back(std::move(token));
    }
    parts_.added = AddedTokens(std::move(raw));
    parts_.added_normalized = AddedTokens(std::move(normalized));
}

void Reader::read_merges() {
    const json& merges = member(model_, "merges");
    want(merges.is_array(), "model.merges is missing", kSupported);
    want(merges.size() <= std::numeric_limits<int32_t>::max(), "too many merges");
    int32_t rank = 0;
    for (const json& merge : merges) {
        std::string left, right;  // written as "left right" or, by newer versions, ["left", "right"]
        if (merge.is_string()) {
            const std::string& both = merge.get_ref<const std::string&>();
            const size_t space = both.find(' ');
            want(space != both.npos && both.find(' ', space + 1) == both.npos, "merge ", rank, ", ", quoted_line(both),
                 ", is not two tokens with a space between");
            left = both.substr(0, space);
            right = both.substr(space + 1);
        } else {
            want(merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(), "merge ", rank,
                 " is not a pair of tokens");
            left = merge[0].get<std::string>();
            right = merge[1].get<std::string>();
        }
        auto id_of = [&](const std::string& token) {
            const auto found = id_of_token_.find(token);
            want(found != id_of_token_.end(), "merge ", rank, " needs token ", quoted_line(token),
                 ", which the vocabulary lacks");
            return found->second;
        };
        parts_.bpe.merges.set(id_of(left), id_of(right), {rank, id_of(left + right)});
        ++rank;
    }
}

// Is token i the byte i, and is there nothing else?
bool is_one_token_a_byte(const TokenizerParts& parts, const json& pre_tokenizer) {
    if (parts.text_of_id.size() != 256 || !parts.bpe.merges.empty() || !parts.normalizers.empty() ||
        !parts.added.empty() || !parts.added_normalized.empty() || !parts.prefix.empty() || !parts.suffix.empty() ||
        type_of(pre_tokenizer) != "ByteLevel" || flag(pre_tokenizer, "add_prefix_space", true))
        return false;
    for (size_t byte = 0; byte < 256; ++byte)
        if (parts.text_of_id[byte] != std::string(1, static_cast<char>(byte))) return false;
    return true;
}

}  // namespace

std::string quoted_line(std::string text) {
    if (text.size() > 160) text = text.substr(0, 160) + "...";
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 32) c = '?';
    return '"' + text + '"';
}

std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view text, const std::string& name) {
    try {
        const json root = json::parse(text.begin(), text.end());
        TokenizerParts parts = Reader(root, name).read();
        if (is_one_token_a_byte(parts, member(root, "pre_tokenizer"))) return make_byte_tokenizer();
        return make_tokenizer(std::move(parts));
    } catch (const json::parse_error& error) {
        fail(name, ": not valid JSON at byte ", error.byte, " of ", text.size(), ": was it downloaded completely?");
    } catch (const json::exception& error) {
        fail(name, ": not a tokenizer.json: ", error.what());
    }
}
