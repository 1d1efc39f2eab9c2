// io/byte_tokenizer.cu: one token a byte. It needs no file, and any text has its tokens.
#include "io/json.h"
#include "io/tokenizer_parts.h"

namespace {

class ByteTokenizer final : public Tokenizer {
  public:
    std::string name() const override { return "bytes"; }
    int vocab_size() const override { return 256; }
    bool has(int32_t token) const override { return token >= 0 && token < 256; }
    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int32_t> tokens;
        tokens.reserve(text.size());
        for (unsigned char byte : text) tokens.push_back(byte);
        return tokens;
    }
    void decode_next(int32_t token, DecodeState&, std::string& text) const override {
        check(has(token), "token id ", token, " is not a byte (0 to 255)");
        text.push_back(static_cast<char>(token));
    }
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::string byte_tokenizer_json() {
    JsonText vocab = JsonText::object();
    for (int byte = 0; byte < 256; ++byte) vocab.set(printed_byte(static_cast<unsigned char>(byte)), byte);
    const JsonText file = {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", JsonText::array()},
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
          {"merges", JsonText::array()}}}};
    return file.indented(1) + "\n";
}
