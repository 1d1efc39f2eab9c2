// io/tokenizer_json.cu: reads a Hugging Face tokenizer.json into the parts of a tokenizer (tokenizer_parts.h).
//
// The file describes a pipeline of components: normalizer, pre_tokenizer, model, post_processor, decoder. A component
// that is not known here is refused: a tokenizer that is nearly right trains and samples without an error, and badly.
#include "io/json.h"
#include "io/tokenizer_parts.h"
#include "io/unicode_tables.h"

#include <algorithm>
#include <limits>

namespace {

const char* const kSupported = ", which is not supported: doc/models.md lists the tokenizers that are read";

std::string type_of(const Json::Value& node) {
    const Json::Value& type = member(node, "type");
    return type.isString() ? type.asString() : node.isNull() ? "(none)" : "(unnamed)";
}

// The steps of a component that may be a Sequence of components.
std::vector<const Json::Value*> steps_of(const Json::Value& node, const char* key) {
    if (node.isNull()) return {};
    if (type_of(node) != "Sequence") return {&node};
    std::vector<const Json::Value*> steps;
    const Json::Value& list = member(node, key);
    if (!list.isNull() && !list.isArray()) return {&list};  // is refused as a step
    for (const Json::Value& step : list) steps.push_back(&step);
    return steps;
}

// What the pre-tokenizer Punctuation isolates, as a pattern.
std::string punctuation_class() {
    std::string characters = "[";
    const auto put = [&](uint32_t code) {
        if (code < 0x80) characters += '\\';
        append_utf8(characters, code);
    };
    for (const auto& [first, last] : punctuation) put(first), characters += '-', put(last);
    return characters + ']';
}

class Reader {
  public:
    Reader(const Json::Value& root, const std::string& file) : root_(root), model_(member(root, "model")) {
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
        // With ignore_merges a word is first looked up as a whole: it is not cut.
        if (!parts_.bpe.byte_level && !parts_.bpe.ignore_merges)
            parts_.pre_tokenizers.push_back(parts_.bpe.cut_where_no_token_spans());
        return std::move(parts_);
    }

  private:
    template <class... Parts>
    void want(bool condition, const Parts&... parts) const {
        if (!condition) fail(parts_.file, ": ", parts...);
    }
    std::string text(const Json::Value& node, const char* key, const std::string& owner) const {
        const Json::Value& value = member(node, key);
        want(value.isString() && !value.asString().empty(), owner, " has no ", key);
        return value.asString();
    }
    // Of keys that may be missing. A value of another type is an error, as it is to tokenizers.
    bool flag(const Json::Value& node, const char* key, bool otherwise = false) const {
        const Json::Value& value = member(node, key);
        want(value.isNull() || read_value(value, otherwise), '"', key, "\" of ", type_of(node),
             " is not true or false");
        return otherwise;
    }
    std::string option(const Json::Value& node, const char* key, std::string otherwise) const {
        const Json::Value& value = member(node, key);
        want(value.isNull() || read_value(value, otherwise), '"', key, "\" of ", type_of(node), " is not a string");
        return otherwise;
    }
    int count(const Json::Value& node, const char* key) const {
        const Json::Value& value = member(node, key);
        int64_t n = 0;
        if (is_whole(value)) read_value(value, n);
        want(n >= 0 && n <= 1'000'000, "the decoder Strip has a ", key, " of ", n);
        return static_cast<int>(n);
    }
    Regex pattern(const Json::Value& step) const;
    SplitBehavior behavior(const Json::Value& step, const char* otherwise) const;
    PreTokenizer metaspace(const Json::Value& step);
    void read_options();
    void read_normalizer();
    void read_pre_tokenizer();
    void read_decoder();
    void read_vocabulary();
    void read_added_tokens();
    void read_merges();
    void read_post_processor();
    int32_t put(const std::string& token, const Json::Value& id);
    void set_text(int32_t id, const std::string& token);

    const Json::Value &root_, &model_;
    TokenizerParts parts_;
    int64_t id_limit_ = 0;
    bool decodes_bytes_ = false;  // the decoder is ByteLevel
    std::unordered_map<std::string, int32_t> id_of_token_;
};

// ---------------------------------------------------------------------------------------------------------------------
// What is done to the text

Regex Reader::pattern(const Json::Value& step) const {
    const Json::Value& node = member(step, "pattern");
    if (member(node, "Regex").isString()) return Regex(member(node, "Regex").asString(), parts_.file);
    return Regex::literal(text(node, "String", "the pattern of " + type_of(step)));
}

void Reader::read_normalizer() {
    std::vector<Normalizer>& steps = parts_.normalizers;
    for (const Json::Value* node : steps_of(member(root_, "normalizer"), "normalizers")) {
        const Json::Value& step = *node;
        const std::string type = type_of(step);
        if (type == "NFC") steps.push_back(normal_form(true, false));
        else if (type == "NFD") steps.push_back(normal_form(false, false));
        else if (type == "NFKC") steps.push_back(normal_form(true, true));
        else if (type == "NFKD") steps.push_back(normal_form(false, true));
        else if (type == "Lowercase") steps.push_back(lowercase());
        else if (type == "Strip") steps.push_back(strip(flag(step, "strip_left"), flag(step, "strip_right")));
        else if (type == "Prepend") steps.push_back(prepend(text(step, "prepend", "the normalizer Prepend")));
        else if (type == "Replace") {
            const Json::Value& content = member(step, "content");
            want(content.isString(), "the normalizer Replace has no content");
            steps.push_back(replace(pattern(step), content.asString()));
        } else want(false, "the file has the normalizer ", quoted_line(type), kSupported);
    }
}

SplitBehavior Reader::behavior(const Json::Value& step, const char* otherwise) const {
    const std::string name = option(step, "behavior", otherwise);
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
    for (const Json::Value* node : steps_of(member(root_, "pre_tokenizer"), "pretokenizers")) {
        const Json::Value& step = *node;
        const std::string type = type_of(step);
        want(!parts_.bpe.byte_level, "the pre-tokenizer ", quoted_line(type), " follows ByteLevel", kSupported);
        if (type == "Split") steps.push_back(split(pattern(step), behavior(step, ""), flag(step, "invert")));
        else if (type == "Digits")
            split_by("\\p{N}", flag(step, "individual_digits") ? SplitBehavior::isolated : SplitBehavior::contiguous);
        else if (type == "Punctuation")
            steps.push_back(split(Regex(punctuation_class(), parts_.file), behavior(step, "Isolated")));
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

PreTokenizer Reader::metaspace(const Json::Value& step) {
    std::string scheme = option(step, "prepend_scheme", "always");  // older files have add_prefix_space instead
    if (!flag(step, "add_prefix_space", true)) scheme = "never";
    const bool known = scheme == "always" || scheme == "first" || scheme == "never";
    want(known, "the pre-tokenizer Metaspace has the prepend_scheme ", quoted_line(scheme), kSupported);
    return mark_spaces(text(step, "replacement", "the pre-tokenizer Metaspace"),
                       scheme == "always"  ? PrependScheme::always
                       : scheme == "first" ? PrependScheme::first
                                           : PrependScheme::never);
}

// What the post_processor puts around a text. To tokenizers a second template would see not one text, but two or more.
void Reader::read_post_processor() {
    auto ids_of = [&](const Json::Value& ids, std::vector<int32_t>& out) {
        want(ids.isArray(), "a special token of the post_processor has no ids");
        for (const Json::Value& id : ids) {
            int32_t number = -1;
            const bool known = is_whole(id) && read_value(id, number) && number >= 0 &&
                               static_cast<size_t>(number) < parts_.has_id.size() && parts_.has_id[number];
            want(known, "the post_processor adds a token that the vocabulary lacks");
            out.push_back(number);
        }
    };
    bool is_first = true;
    for (const Json::Value* node : steps_of(member(root_, "post_processor"), "processors")) {
        const Json::Value& step = *node;
        const std::string type = type_of(step);
        if (type == "ByteLevel") continue;  // it changes offsets only
        want(type == "TemplateProcessing", "the file has the post_processor ", quoted_line(type), kSupported);
        want(std::exchange(is_first, false), "the post_processor has two templates", kSupported);
        bool text_seen = false;
        for (const Json::Value& item : member(step, "single")) {
            if (!member(item, "Sequence").isNull()) {
                want(!text_seen, "the template of the post_processor has the text twice");
                want(member(member(item, "Sequence"), "id") != Json::Value("B"),
                     "the template of the post_processor has a second text, which a prompt is not");
                text_seen = true;
                continue;
            }
            const std::string name = text(member(item, "SpecialToken"), "id", "the template of the post_processor");
            ids_of(member(member(member(step, "special_tokens"), name.c_str()), "ids"),
                   text_seen ? parts_.suffix : parts_.prefix);
        }
        want(text_seen, "the template of the post_processor lacks the text");
    }
}

void Reader::read_decoder() {
    Decoder& decoder = parts_.decoder;
    const Json::Value& root = member(root_, "decoder");
    want(!root.isNull() || parts_.bpe.byte_level, "there is no decoder, so that tokens cannot be printed", kSupported);
    decodes_bytes_ = root.isNull();
    bool fused = false;        // steps before work on each token, steps after it on the whole text
    bool joins_bytes = false;  // ByteFallback makes one text of bytes in a row, and steps after it do not see tokens
    for (const Json::Value* node : steps_of(root, "decoders")) {
        const Json::Value& step = *node;
        const std::string type = type_of(step);
        if (type == "Fuse") {
            fused = true;
            continue;
        }
        // Metaspace's mark is a token of its own, and not written as bytes.
        const bool sees_tokens = !joins_bytes || fused || type == "Metaspace" || type == "ByteFallback";
        want(sees_tokens, "the decoder ", quoted_line(type), " follows ByteFallback", kSupported);
        joins_bytes |= type == "ByteFallback";
        if (type == "Strip") {
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
                const Json::Value& content = member(step, "content");
                want(content.isString(), "the decoder Replace has no content");
                decoder.steps.push_back(decode_replace(pattern(step), content.asString()));
            } else if (type == "Metaspace") {
                const bool never =
                    !flag(step, "add_prefix_space", true) || member(step, "prepend_scheme") == Json::Value("never");
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
    want(type == "BPE" || (type == "(unnamed)" && model_.isObject()), "the model has the type ", quoted_line(type),
         kSupported);
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
        const Json::Value& value = member(model_, key);
        const bool unset = value.isNull() || (value.isString() && value.asString().empty()) ||
                           (value.isDouble() && value.asDouble() == 0);
        want(unset, "the model has a ", key, kSupported);
    }
    parts_.bpe.byte_fallback = flag(model_, "byte_fallback");
    parts_.bpe.ignore_merges = flag(model_, "ignore_merges");
    parts_.bpe.fuse_unknown = flag(model_, "fuse_unk");
}

int32_t Reader::put(const std::string& token, const Json::Value& value) {
    int64_t id = -1;
    if (is_whole(value)) read_value(value, id);
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
    const Json::Value& vocab = member(model_, "vocab");
    want(vocab.isObject() && !vocab.empty(), "model.vocab is missing or empty", kSupported);
    const Json::Value& added = member(root_, "added_tokens");
    want(added.isNull() || added.isArray(), "added_tokens is not a list");
    // Ids may have gaps, but a short file must not make us reserve memory for huge ones.
    id_limit_ = static_cast<int64_t>(vocab.size() + added.size()) + 65536;

    bpe.id_of_byte.fill(-1);
    for (auto entry = vocab.begin(); entry != vocab.end(); ++entry) {
        const std::string token = entry.name();
        const int32_t id = put(token, *entry);
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
    const auto found = id_of_token_.find(option(model_, "unk_token", ""));
    if (found != id_of_token_.end()) bpe.unknown = found->second;
    // tokenizers does both to the character that a missing byte is printed as, append_bytes() neither.
    const bool all_bytes = std::ranges::find(bpe.id_of_byte, -1) == bpe.id_of_byte.end();
    want(!bpe.byte_level || all_bytes || !(bpe.byte_fallback || (bpe.fuse_unknown && bpe.unknown >= 0)),
         "the model has byte_fallback or fuse_unk for bytes that its ByteLevel vocabulary lacks", kSupported);
}

void Reader::read_added_tokens() {
    std::vector<AddedToken> raw, normalized;
    for (const Json::Value& entry : member(root_, "added_tokens")) {
        want(member(entry, "content").isString(), "an entry of added_tokens has no content");
        AddedToken token{.text = member(entry, "content").asString(),
                         .single_word = flag(entry, "single_word"),
                         .lstrip = flag(entry, "lstrip"),
                         .rstrip = flag(entry, "rstrip")};
        if (token.text.empty()) continue;
        token.id = put(token.text, member(entry, "id"));
        const bool is_normalized = flag(entry, "normalized");
        if (is_normalized) token.text = normalize(parts_.normalizers, token.text);
        set_text(token.id, token.text);
        parts_.is_special[token.id] = flag(entry, "special");
        if (!token.text.empty()) (is_normalized ? normalized : raw).push_back(std::move(token));
    }
    parts_.added = AddedTokens(std::move(raw));
    parts_.added_normalized = AddedTokens(std::move(normalized));
}

void Reader::read_merges() {
    const Json::Value& merges = member(model_, "merges");
    want(merges.isArray(), "model.merges is missing", kSupported);
    want(merges.size() <= std::numeric_limits<int32_t>::max(), "too many merges");
    int32_t rank = 0;
    for (const Json::Value& merge : merges) {
        std::string left, right;  // written as "left right" or, by newer versions, ["left", "right"]
        if (merge.isString()) {
            const std::string both = merge.asString();
            const size_t space = both.find(' ');
            want(space != both.npos && both.find(' ', space + 1) == both.npos, "merge ", rank, ", ", quoted_line(both),
                 ", is not two tokens with a space between");
            left = both.substr(0, space);
            right = both.substr(space + 1);
        } else {
            want(merge.isArray() && merge.size() == 2 && merge[0].isString() && merge[1].isString(), "merge ", rank,
                 " is not a pair of tokens");
            left = merge[0].asString();
            right = merge[1].asString();
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

Json::Value parse_file(std::string_view text, const std::string& name) {
    try {
        return parse_json(text, name);
    } catch (const Error& error) {
        fail(error.what(), ": was it downloaded completely?");
    }
}

// Is token i the byte i, and is there nothing else?
bool is_one_token_a_byte(const TokenizerParts& parts, const Json::Value& pre_tokenizer) {
    if (parts.text_of_id.size() != 256 || !parts.bpe.merges.empty() || !parts.normalizers.empty() ||
        !parts.added.empty() || !parts.added_normalized.empty() || !parts.prefix.empty() || !parts.suffix.empty() ||
        type_of(pre_tokenizer) != "ByteLevel" || member(pre_tokenizer, "add_prefix_space") != Json::Value(false))
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
    const Json::Value root = parse_file(text, name);
    TokenizerParts parts = Reader(root, name).read();
    if (is_one_token_a_byte(parts, member(root, "pre_tokenizer"))) return make_byte_tokenizer();
    return make_tokenizer(std::move(parts));
}
