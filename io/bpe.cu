// io/bpe.cu: byte-pair encoding of a word.   (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019, GPT-2)
//
// A word starts as one token a byte (GPT-2) or a character (SentencePiece, as LLaMA 2). The two neighbours whose merge
// was learned first are joined, again and again, until no two neighbours have a merge.
#include "io/tokenizer_parts.h"

#include <algorithm>
#include <limits>

namespace {

// The row of tokens is a linked list. A heap holds the merges that were possible when they were pushed: lowest rank
// first, then leftmost first. One that has become impossible no longer finds its two tokens and is dropped. A row of n
// tokens has at most n - 1 merges, and each pushes at most two more: O(n log n).
struct Symbol {
    int32_t token, previous, next;  // -1: none
};
struct Candidate {
    int32_t rank, position, right, result;          // the token on the right, and what the two become
    bool operator<(const Candidate& other) const {  // the top of a heap is its largest
        return rank != other.rank ? rank > other.rank : position > other.position;
    }
};

// Replaces tokens[first...] by what the merges make of them.
void merge(const Bpe& bpe, std::vector<int32_t>& tokens, size_t first) {
    check(tokens.size() - first <= std::numeric_limits<int32_t>::max(), "a word of more than 2^31 characters");
    const int32_t n = static_cast<int32_t>(tokens.size() - first);
    std::vector<Symbol> row(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) row[i] = {tokens[first + i], i - 1, i + 1 < n ? i + 1 : -1};
    std::vector<Candidate> heap;
    heap.reserve(static_cast<size_t>(n));
    auto push = [&](int32_t position) {
        if (position < 0 || row[position].next < 0) return;
        const int32_t right = row[row[position].next].token;
        const Merge* found = bpe.merges.find(row[position].token, right);
        if (found == nullptr) return;
        heap.push_back({found->rank, position, right, found->token});
        std::push_heap(heap.begin(), heap.end());
    };
    for (int32_t i = 0; i < n; ++i) push(i);
    while (!heap.empty()) {
        const Candidate best = heap.front();
        std::pop_heap(heap.begin(), heap.end());
        heap.pop_back();
        Symbol& left = row[best.position];
        if (left.token < 0 || left.next < 0 || row[left.next].token != best.right) continue;
        const Merge* still = bpe.merges.find(left.token, best.right);
        if (still == nullptr || still->token != best.result) continue;
        Symbol& right = row[left.next];
        left.token = best.result;
        left.next = right.next;
        right.token = -1;
        if (left.next >= 0) row[left.next].previous = best.position;
        push(left.previous);
        push(best.position);
    }
    tokens.resize(first);
    for (int32_t i = 0; i >= 0 && i < n; i = row[i].next) tokens.push_back(row[i].token);
}

void append_bytes(const Bpe& bpe, std::string_view word, std::vector<int32_t>& tokens) {
    for (char c : word) {
        const int byte = static_cast<unsigned char>(c);
        const int32_t token = bpe.id_of_byte[byte] >= 0 ? bpe.id_of_byte[byte] : bpe.unknown;
        check(token >= 0, bpe.file, ": the vocabulary has no token for byte ", byte,
              ", so this text cannot be encoded");
        tokens.push_back(token);
    }
}

// Unknown characters wait until the next known one, because a row of them may become one token.
void append_characters(const Bpe& bpe, std::string_view word, std::vector<int32_t>& tokens) {
    bool unknown_waits = false;
    for (size_t i = 0; i < word.size();) {
        const size_t bytes = utf8_char_at(word, i).bytes;
        const std::string_view character = word.substr(i, bytes);
        i += bytes;
        auto has_token = [&](char c) { return bpe.id_of_byte[static_cast<unsigned char>(c)] >= 0; };
        const auto known = bpe.id_of.find(character);
        if (known != bpe.id_of.end()) {
            if (unknown_waits) tokens.push_back(bpe.unknown);
            unknown_waits = false;
            tokens.push_back(known->second);
        } else if (bpe.byte_fallback && std::all_of(character.begin(), character.end(), has_token)) {
            for (char c : character) tokens.push_back(bpe.id_of_byte[static_cast<unsigned char>(c)]);
        } else {
            check(bpe.unknown >= 0, bpe.file, ": the vocabulary has no token for ", quoted_line(std::string(character)),
                  " and no unknown token, so this text cannot be encoded");
            if (unknown_waits && !bpe.fuse_unknown) tokens.push_back(bpe.unknown);
            unknown_waits = true;
        }
    }
    if (unknown_waits) tokens.push_back(bpe.unknown);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The table of merges: a pair is searched from the slot of its hash on, up to a free slot.

size_t MergeTable::slot_of(int32_t left, int32_t right) const {
    const uint64_t key = uint64_t(uint32_t(left)) << 32 | uint32_t(right);
    const size_t mask = slots_.size() - 1;
    size_t i = (key * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[i].left >= 0 && (slots_[i].left != left || slots_[i].right != right)) i = (i + 1) & mask;
    return i;
}

void MergeTable::set(int32_t left, int32_t right, Merge merge) {
    if (2 * (n_ + 1) > slots_.size()) {
        std::vector<Slot> old(std::max<size_t>(16, 2 * slots_.size()));
        old.swap(slots_);
        for (const Slot& slot : old)
            if (slot.left >= 0) slots_[slot_of(slot.left, slot.right)] = slot;
    }
    Slot& slot = slots_[slot_of(left, right)];
    n_ += slot.left < 0;
    slot = {left, right, merge};
}

const Merge* MergeTable::find(int32_t left, int32_t right) const {
    if (slots_.empty()) return nullptr;
    const Slot& slot = slots_[slot_of(left, right)];
    return slot.left >= 0 ? &slot.merge : nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------

void Bpe::encode(std::string_view word, std::vector<int32_t>& tokens) const {
    if (ignore_merges) {
        const auto whole = id_of.find(word);
        if (whole != id_of.end()) return tokens.push_back(whole->second);
    }
    const size_t first = tokens.size();
    if (byte_level) append_bytes(*this, word, tokens);
    else append_characters(*this, word, tokens);
    merge(*this, tokens, first);
}

PreTokenizer Bpe::cut_where_no_token_spans() const {
    struct Tables {
        MergeTable neighbours;  // pairs of characters that stand side by side in a token
        std::vector<bool> is_character = std::vector<bool>(0x110000);  // the characters that are tokens
    };
    const auto tables = std::make_shared<Tables>();
    for (const auto& [text, id] : id_of) {
        int32_t before = -1;
        for (size_t i = 0; i < text.size();) {
            const auto [code, bytes] = utf8_char_at(text, i);
            if (before >= 0) tables->neighbours.set(before, static_cast<int32_t>(code), {});
            else if (bytes == text.size()) tables->is_character[code] = true;
            before = static_cast<int32_t>(code);
            i += bytes;
        }
    }
    return [tables](Piece piece, ChangedTexts&, std::vector<Piece>& parts) {
        size_t begin = 0;
        int32_t before = -1;  // the character before, if it is a token
        for (size_t i = 0; i < piece.text.size();) {
            const Utf8Char c = utf8_char_at(piece.text, i);
            const int32_t here = c.is_utf8() && tables->is_character[c.code] ? static_cast<int32_t>(c.code) : -1;
            if (before >= 0 && here >= 0 && tables->neighbours.find(before, here) == nullptr) {
                parts.push_back({piece.text.substr(begin, i - begin), piece.begins_text && begin == 0});
                begin = i;
            }
            before = here;
            i += c.bytes;
        }
        parts.push_back({piece.text.substr(begin), piece.begins_text && begin == 0});
    };
}
