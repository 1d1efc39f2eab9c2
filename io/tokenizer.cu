// io/tokenizer.cu: text to token ids and back, by the parts of a tokenizer.json (io/tokenizer_parts.h).
//
// What happens to a text:
//   1. added tokens such as "<|endoftext|>" are cut out of it: of several that begin at one place, the longest;
//   2. the rest is normalized (NFC, ...), and added tokens that are wanted in normalized text are cut out;
//   3. the rest is cut into words (pre_tokenizer.cu), and no token spans a word border;
//   4. each word is merged from bytes or characters to tokens (bpe.cu).
#include "io/tokenizer_parts.h"

namespace {

// The tokens so far, and where in them each word met before was encoded: words repeat, and are merged only once.
struct Encoding {
    std::vector<int32_t> tokens;
    std::unordered_map<std::string_view, std::pair<size_t, size_t>> first_seen;  // word -> its first token, how many
    ChangedTexts changed;                                                        // words may point into these
};

class JsonTokenizer final : public Tokenizer, private TokenizerParts {
  public:
    explicit JsonTokenizer(TokenizerParts parts) : TokenizerParts(std::move(parts)) {}
    std::string name() const override { return file; }
    int vocab_size() const override { return static_cast<int>(text_of_id.size()); }
    bool has(int32_t token) const override { return token >= 0 && token < vocab_size() && has_id[token]; }
    std::vector<int32_t> special_prefix() const override { return prefix; }
    std::vector<int32_t> special_suffix() const override { return suffix; }
    bool is_special(int32_t token) const override {
        return token >= 0 && token < vocab_size() && TokenizerParts::is_special[token];
    }
    std::vector<int32_t> encode(std::string_view text) const override;
    void decode_next(int32_t token, DecodeState& state, std::string& text) const override;

  private:
    void encode_piece(Piece piece, Encoding& encoding) const;
};

void JsonTokenizer::encode_piece(Piece piece, Encoding& encoding) const {
    std::vector<int32_t>& tokens = encoding.tokens;
    for (const Piece& word : pre_tokenize(pre_tokenizers, piece, encoding.changed)) {
        auto [seen, is_new] = encoding.first_seen.try_emplace(word.text, tokens.size(), 0);
        auto& [first, n] = seen->second;
        if (is_new) {
            bpe.encode(word.text, tokens);
            n = tokens.size() - first;
        } else {
            for (size_t i = 0; i < n; ++i) tokens.push_back(tokens[first + i]);
        }
    }
}

std::vector<int32_t> JsonTokenizer::encode(std::string_view text) const {
    Encoding encoding;
    added.split(text, [&](std::string_view raw, const AddedToken* token) {
        if (token != nullptr) return encoding.tokens.push_back(token->id);
        const bool begins_text = raw.data() == text.data();
        std::string_view normal = raw;
        if (!normalizers.empty()) normal = encoding.changed.emplace_back(normalize(normalizers, raw));
        added_normalized.split(normal, [&](std::string_view piece, const AddedToken* inner) {
            if (inner != nullptr) encoding.tokens.push_back(inner->id);
            else encode_piece({piece, begins_text && piece.data() == normal.data()}, encoding);
        });
    });
    return std::move(encoding.tokens);
}

void JsonTokenizer::decode_next(int32_t token, DecodeState& state, std::string& text) const {
    check(has(token), "token id ", token, " is not in ", file, ", whose ids go to ", vocab_size() - 1);
    const auto first = state.n_tokens++ == 0 ? text_of_first.find(token) : text_of_first.end();
    decoder.append(first != text_of_first.end() ? first->second : text_of_id[token], state, text);
}

}  // namespace

std::vector<int32_t> Tokenizer::encode_with_special(std::string_view text) const {
    std::vector<int32_t> tokens = special_prefix();
    for (const std::vector<int32_t>& part : {encode(text), special_suffix()})
        tokens.insert(tokens.end(), part.begin(), part.end());
    return tokens;
}

std::string Tokenizer::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    DecodeState state;
    for (int32_t token : tokens) decode_next(token, state, text);
    return text;
}

Utf8Char utf8_char_at(std::string_view text, size_t i) {
    constexpr uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};  // by length: a smaller code was encoded too long
    unsigned char lead = text[i];
    if (lead < 0x80) return {lead, 1};
    size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC0 || lead > 0xF4 || i + bytes > text.size()) return {0xFFFD, 1};
    uint32_t code = lead & (0x7Fu >> bytes);
    for (size_t k = 1; k < bytes; ++k) {
        unsigned char byte = text[i + k];
        if ((byte & 0xC0) != 0x80) return {0xFFFD, 1};
        code = code << 6 | (byte & 0x3Fu);
    }
    if (code < smallest[bytes] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {0xFFFD, 1};
    return {code, bytes};
}

std::unique_ptr<Tokenizer> make_tokenizer(TokenizerParts parts) {
    return std::make_unique<JsonTokenizer>(std::move(parts));
}

std::string find_tokenizer_file(const std::string& path) {
    if (!is_folder(path)) return path;
    const std::string file = path + "/tokenizer.json";
    check(is_there(file), "--tokenizer ", path, ": there is no tokenizer.json in this folder");
    return file;
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& tokenizer_json) {
    MappedFile mapped(tokenizer_json);
    return parse_tokenizer({reinterpret_cast<const char*>(mapped.data()), mapped.bytes()}, tokenizer_json);
}
