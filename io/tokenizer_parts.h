// io/tokenizer_parts.h: the parts that a tokenizer.json is made of, for the files of tokenizers in io/ only.
//
//   encode   text -> added tokens are cut out of it -> normalizers -> pre-tokenizers -> words -> BPE -> tokens
//   decode   token -> its text, by the file's decoders -> text
//
// In reading order: tokenizer.cu (the two rows above), pre_tokenizer.cu, bpe.cu, normalizer.cu, added_tokens.cu,
// decoder.cu, regex.cu, and tokenizer_json.cu, which makes the parts from the file.
#pragma once

#include "io/io.h"

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>

// ---------------------------------------------------------------------------------------------------------------------
// regex.cu: patterns as tokenizer.json writes them (Oniguruma's dialect), matched by PCRE2. Classes of characters are
// those of Unicode 16, whatever version PCRE2 has.

// The characters of words, for [...] of a pattern: letters, marks, digits, letter-like numbers, underscore and its
// like, circled letters. kWord: those of Oniguruma. kRustWord: those of Rust's regex engine, with joiners, where
// Hugging Face's library uses that one.
inline const std::string kWord =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}"
    "\u24B6-\u24E9\U0001F130-\U0001F149\U0001F150-\U0001F169\U0001F170-\U0001F189";
inline const std::string kRustWord = kWord + "\u200C\u200D";

class Regex {
  public:
    // Error that names `file` and the pattern, if it cannot be compiled or would mean something else to PCRE2.
    Regex(const std::string& pattern, const std::string& file);
    static Regex literal(const std::string& text);

    // Calls stretch(begin, end, is_match) for stretches of the text that cover it, from left to right: the matches, and
    // what lies between them. A match may be empty. Any bytes may be given; Error for a pattern that does not come to
    // an end.
    void split(std::string_view text, const std::function<void(size_t, size_t, bool)>& stretch) const;
    bool found_in(std::string_view text) const;
    std::string replace_all(std::string_view text, const std::string& replacement) const;

  private:
    Regex() = default;
    void compile(const std::string& pattern, uint32_t options, const std::string& file);
    std::shared_ptr<struct pcre2_real_code_8> code_;
    std::string shown_;        // the pattern, for messages
    bool is_literal_ = false;  // found byte by byte, whatever its characters are
};

// ---------------------------------------------------------------------------------------------------------------------
// normalizer.cu: text to text

using Normalizer = std::function<std::string(std::string_view text)>;
// Unicode's forms NFC (compose), NFD, NFKC (compose, compatibility), NFKD (compatibility).
Normalizer normal_form(bool compose, bool compatibility);
Normalizer prepend(const std::string& prefix);  // to a text that is not empty
Normalizer replace(const Regex& pattern, const std::string& replacement);
Normalizer lowercase();
Normalizer strip(bool left, bool right);  // white space
std::string normalize(const std::vector<Normalizer>& steps, std::string_view text);

void append_utf8(std::string& text, uint32_t code);
bool is_white_space(uint32_t code);
// The range of a table of unicode_tables.h that a character is in; nullptr if it is in none.
template <class Range, size_t n>
const Range* find_range(const Range (&table)[n], uint32_t code) {
    const Range* after = std::ranges::upper_bound(table, code, {}, &Range::first);
    return after != table && code <= after[-1].last ? after - 1 : nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// pre_tokenizer.cu: text to words, which no token crosses

struct Piece {
    std::string_view text;  // never empty
    bool begins_text;       // nothing stands before it, not even an added token
};
// Texts that a step has changed: a deque does not move what it holds, so that pieces can point into it.
using ChangedTexts = std::deque<std::string>;
// Appends the parts of a piece to `parts`.
using PreTokenizer = std::function<void(Piece piece, ChangedTexts& changed, std::vector<Piece>& parts)>;

// What becomes of the matches of a pattern: words of their own; left out; joined to the stretch before or after them;
// joined to other matches.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };
// invert: what the pattern does not match counts as the matches.
PreTokenizer split(const Regex& pattern, SplitBehavior behavior, bool invert = false);
// Words, and what stands between words, without the white space.
PreTokenizer split_off_white_space();
// A piece that does not begin with a space is given one.
PreTokenizer add_prefix_space();
// Spaces become `mark` ("▁"), which is put before a piece that does not begin with it: always, before the first piece
// of a text, or never.
enum class PrependScheme { always, first, never };
PreTokenizer mark_spaces(const std::string& mark, PrependScheme scheme);
std::vector<Piece> pre_tokenize(const std::vector<PreTokenizer>& steps, Piece piece, ChangedTexts& changed);

// ---------------------------------------------------------------------------------------------------------------------
// bpe.cu: words to tokens

struct TextHash {  // finds a string_view among strings
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

struct Merge {
    int32_t rank, token;  // lower ranks merge first
};
// Two numbers -> Merge: a hash table in one block of memory, because BPE does little but look pairs up.
class MergeTable {
  public:
    void set(int32_t left, int32_t right, Merge merge);
    const Merge* find(int32_t left, int32_t right) const;
    bool empty() const { return n_ == 0; }

  private:
    struct Slot {
        int32_t left = -1, right = -1;  // left < 0: the slot is free
        Merge merge = {};
    };
    size_t slot_of(int32_t left, int32_t right) const;
    std::vector<Slot> slots_;  // a power of two, at most half of them taken
    size_t n_ = 0;
};

struct Bpe {
    bool byte_level = false;              // a word starts as one token a byte; otherwise as one a character
    bool byte_fallback = false;           // a character without a token is its bytes' tokens <0x00> to <0xFF>
    bool ignore_merges = false;           // a word that is a token becomes that token, whatever the merges say
    bool fuse_unknown = false;            // unknown characters in a row are one unknown token
    int32_t unknown = -1;                 // for a character without a token; -1: that is an Error
    std::array<int32_t, 256> id_of_byte;  // of byte_level or of byte_fallback; -1: none
    std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>> id_of;  // tokens as they stand in words
    MergeTable merges;
    std::string file;  // for errors

    // Appends the tokens of a word that is not empty.
    void encode(std::string_view word, std::vector<int32_t>& tokens) const;
    // Where there is no pre-tokenizer, as in LLaMA 2's file, a word is a whole text. This step cuts it where the tokens
    // cannot tell: between two characters of the vocabulary that stand side by side in none of its tokens, such as a
    // letter and the mark of the next word's space.
    PreTokenizer cut_where_no_token_spans() const;
};

// ---------------------------------------------------------------------------------------------------------------------
// added_tokens.cu: tokens that are found in a text before anything else

struct AddedToken {
    std::string text;
    int32_t id = 0;
    bool single_word = false;             // only where no word character stands beside it
    bool lstrip = false, rstrip = false;  // takes the white space on its left or right with it
};
class AddedTokens {
  public:
    AddedTokens() = default;
    explicit AddedTokens(std::vector<AddedToken> tokens);
    bool empty() const { return tokens_.empty(); }
    // Calls found(text, token) from left to right: token is nullptr for what lies between added tokens. Of two that
    // begin at one place the longer is taken.
    void split(std::string_view text, const std::function<void(std::string_view, const AddedToken*)>& found) const;

  private:
    const AddedToken* longest_at(std::string_view text) const;
    std::vector<AddedToken> tokens_;  // sorted by text
    std::array<bool, 256> may_begin_{};
};

// ---------------------------------------------------------------------------------------------------------------------
// decoder.cu: tokens to text

struct Decoder {
    // What is done to the text of each token by itself, in this order; is_first: it is the first of its row.
    using Step = std::function<std::string(std::string_view token, bool is_first)>;
    std::vector<Step> steps;
    // Then this many of this character are taken from the start of the whole text, if it begins with them.
    std::string stripped;
    int n_stripped = 0;

    std::string text_of(std::string token, bool is_first) const;
    // Appends the text of one more token; `text` is what text_of made of it.
    void append(std::string_view text, DecodeState& state, std::string& out) const;
};
Decoder::Step decode_byte_fallback();  // "<0x0A>" is the byte 10
Decoder::Step decode_replace(const Regex& pattern, const std::string& replacement);
Decoder::Step decode_strip(const std::string& character, int start, int stop);  // at both ends of each token
Decoder::Step decode_spaces(const std::string& mark, bool keeps_first);  // of mark_spaces; not keeps_first: none in the
                                                                         // first token

// A text of the file as part of a one-line message, in quotation marks.
std::string quoted_line(std::string text);

// tokenizer.json writes the bytes of byte-level tokens as characters that print: those that do anyway stand for
// themselves, the others are U+0100, U+0101, ... in order (the space is U+0120).
std::string printed_byte(unsigned char byte);
// The bytes that a token's text stands for; nothing if a character of it stands for none.
std::optional<std::string> bytes_of_printed(std::string_view token);

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.cu: the whole

struct TokenizerParts {
    std::string file;
    AddedTokens added, added_normalized;  // matched before and after normalization
    std::vector<Normalizer> normalizers;
    std::vector<PreTokenizer> pre_tokenizers;
    Bpe bpe;
    Decoder decoder;
    std::vector<int32_t> prefix, suffix;                     // what the post_processor puts around a text
    std::vector<std::string> text_of_id;                     // as decode() prints it
    std::unordered_map<int32_t, std::string> text_of_first;  // as the first token of a row, where that differs
    std::vector<bool> has_id;                                // ids may have gaps
    std::vector<bool> is_special;
};
std::unique_ptr<Tokenizer> make_tokenizer(TokenizerParts parts);
