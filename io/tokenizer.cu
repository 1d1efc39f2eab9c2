// io/tokenizer.cu: text to token ids and back: one token a byte, or byte-level BPE.
//                                              (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019, GPT-2)
// What happens to a text:
//   1. added tokens such as "<|endoftext|>" are cut out of it, the longest first;
//   2. the rest is cut into words (words.cu), and no token spans a word border;
//   3. a word starts as one token a byte. The two neighbours whose merge was learned first are joined, again and again,
//      until no two neighbours have a merge.
#include "io/io.h"

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>

namespace {

class ByteTokenizer final : public Tokenizer {
  public:
    int vocab_size() const override { return 256; }
    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int32_t> tokens;
        tokens.reserve(text.size());
        for (unsigned char byte : text) tokens.push_back(byte);
        return tokens;
    }
    std::string decode(const std::vector<int32_t>& tokens) const override {
        std::string text;
        text.reserve(tokens.size());
        for (int32_t token : tokens) {
            check(token >= 0 && token < 256, "token id ", token, " is not a byte (0 to 255)");
            text.push_back(static_cast<char>(token));
        }
        return text;
    }
    std::string name() const override { return "bytes"; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Byte-level BPE

// The tokens so far, and where in them each word met before was encoded: words repeat, and are merged only once.
struct Encoding {
    std::vector<int32_t> tokens;
    std::unordered_map<std::string_view, std::pair<size_t, size_t>> first_seen;  // word -> its first token, how many
    std::deque<std::string> prefixed;  // texts that were given a prefix space: words of first_seen point into them
};

class BpeTokenizer final : public Tokenizer, private BpeTables {
  public:
    explicit BpeTokenizer(BpeTables tables) : BpeTables(std::move(tables)) {}
    int vocab_size() const override { return static_cast<int>(bytes_of_id.size()); }
    std::string name() const override { return file; }
    std::string decode(const std::vector<int32_t>& tokens) const override;
    std::vector<int32_t> encode(std::string_view text) const override;

  private:
    void encode_plain(std::string_view text, Encoding& encoding) const;
    void merge_word(std::string_view word, std::vector<int32_t>& tokens) const;
};

std::string BpeTokenizer::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (int32_t token : tokens) {
        check(token >= 0 && token < vocab_size() && has_id[token], "token id ", token, " is not in ", file,
              ", whose ids go to ", vocab_size() - 1);
        text += bytes_of_id[token];
    }
    return text;
}

// The row of tokens is a linked list over the byte positions. A heap holds the merges that were possible when they were
// pushed: lowest rank first, then leftmost first. One that has become impossible no longer finds its two tokens and is
// dropped. A word of n bytes has at most n - 1 merges, and each pushes at most two more: O(n log n).
void BpeTokenizer::merge_word(std::string_view word, std::vector<int32_t>& tokens) const {
    struct Symbol {
        int32_t token;
        int64_t previous, next;  // -1: none
    };
    struct Candidate {
        int32_t rank;
        int64_t position;
        uint64_t pair;
        bool operator<(const Candidate& other) const {  // the top of a heap is its largest
            return rank != other.rank ? rank > other.rank : position > other.position;
        }
    };
    int64_t n = static_cast<int64_t>(word.size());
    std::vector<Symbol> row(n);
    std::vector<Candidate> heap;
    for (int64_t i = 0; i < n; ++i) {
        int32_t token = id_of_byte[static_cast<unsigned char>(word[i])];
        check(token >= 0, file, ": the vocabulary has no token for byte ", int(static_cast<unsigned char>(word[i])),
              ", so this text cannot be encoded");
        row[i] = {token, i - 1, i + 1 < n ? i + 1 : -1};
    }
    auto push = [&](int64_t position) {
        if (position < 0 || row[position].next < 0) return;
        uint64_t pair = bpe_pair(row[position].token, row[row[position].next].token);
        auto merge = merges.find(pair);
        if (merge == merges.end()) return;
        heap.push_back({merge->second.rank, position, pair});
        std::push_heap(heap.begin(), heap.end());
    };
    for (int64_t i = 0; i < n; ++i) push(i);
    while (!heap.empty()) {
        Candidate best = heap.front();
        std::pop_heap(heap.begin(), heap.end());
        heap.pop_back();
        Symbol& left = row[best.position];
        if (left.token < 0 || left.next < 0 || bpe_pair(left.token, row[left.next].token) != best.pair) continue;
        Symbol& right = row[left.next];
        left.token = merges.at(best.pair).token;
        left.next = right.next;
        right.token = -1;
        if (left.next >= 0) row[left.next].previous = best.position;
        push(left.previous);
        push(best.position);
    }
    for (int64_t i = 0; i >= 0 && i < n; i = row[i].next) tokens.push_back(row[i].token);
}

void BpeTokenizer::encode_plain(std::string_view text, Encoding& encoding) const {
    if (add_prefix_space && text[0] != ' ') text = encoding.prefixed.emplace_back(concat(' ', text));
    std::vector<int32_t>& tokens = encoding.tokens;
    while (!text.empty()) {
        std::string_view word = text.substr(0, first_word(text));
        text.remove_prefix(word.size());
        auto [seen, is_new] = encoding.first_seen.try_emplace(word, tokens.size(), 0);
        auto& [first, n] = seen->second;
        if (!is_new) {
            for (size_t i = 0; i < n; ++i) tokens.push_back(tokens[first + i]);
            continue;
        }
        auto whole = ignore_merges ? id_of_bytes.find(std::string(word)) : id_of_bytes.end();
        if (whole != id_of_bytes.end()) tokens.push_back(whole->second);
        else merge_word(word, tokens);
        n = tokens.size() - first;
    }
}

// Calls plain(text) for what lies between added tokens and token(id) for these, from left to right.
template <class Plain, class Token>
void split_at_added(std::string_view text, const std::vector<BpeTables::AddedToken>& added, Plain plain, Token token) {
    std::array<bool, 256> may_begin{};
    for (const BpeTables::AddedToken& a : added) may_begin[static_cast<unsigned char>(a.text[0])] = true;
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        auto found = added.end();
        if (may_begin[static_cast<unsigned char>(text[i])])
            found = std::find_if(added.begin(), added.end(),
                                 [&](const BpeTables::AddedToken& a) { return text.substr(i).starts_with(a.text); });
        if (found == added.end()) {
            ++i;
            continue;
        }
        if (i > begin) plain(text.substr(begin, i - begin));
        token(found->id);
        begin = i += found->text.size();
    }
    if (begin < text.size()) plain(text.substr(begin));
}

std::vector<int32_t> BpeTokenizer::encode(std::string_view text) const {
    Encoding encoding;
    auto token = [&](int32_t id) { encoding.tokens.push_back(id); };
    auto plain = [&](std::string_view piece) { encode_plain(piece, encoding); };
    auto normalized = [&](std::string_view piece) {
        check(!nfc || is_surely_nfc(piece), file, " wants text in Unicode form NFC, which this text may not be: ",
              "normalize it first (Python: unicodedata.normalize(\"NFC\", text))");
        split_at_added(piece, added_normalized, plain, token);
    };
    split_at_added(text, added, normalized, token);
    return std::move(encoding.tokens);
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> make_bpe_tokenizer(BpeTables tables) {
    return std::make_unique<BpeTokenizer>(std::move(tables));
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& tokenizer_json) {
    MappedFile file(tokenizer_json);
    return parse_tokenizer({reinterpret_cast<const char*>(file.data()), file.bytes()}, tokenizer_json);
}
