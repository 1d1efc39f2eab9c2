// io/pre_tokenizer.cu: the steps that cut a text into words, which no token crosses.
//
// Without them BPE would merge across words: "dog." and "dog!" would become tokens of their own (GPT-2's paper, section
// 2.2). A step maps each piece of the text to parts; the file says which steps follow each other.
#include "io/tokenizer_parts.h"

PreTokenizer split(const Regex& pattern, SplitBehavior behavior, bool invert) {
    // Is a stretch one piece with the one before it? What counts is whether the two are matches.
    auto belongs_to = [behavior](bool before, bool is_match) {
        switch (behavior) {
            case SplitBehavior::merged_with_previous: return is_match && !before;
            case SplitBehavior::merged_with_next: return before && !is_match;
            case SplitBehavior::contiguous: return before == is_match;
            default: return false;
        }
    };
    return [=](Piece piece, ChangedTexts&, std::vector<Piece>& parts) {
        size_t begin = 0, end = 0;  // of the part that may still grow
        bool before = false, begun = false;
        auto finish = [&] {
            const bool removed = behavior == SplitBehavior::removed && before;
            if (end > begin && !removed)
                parts.push_back({piece.text.substr(begin, end - begin), piece.begins_text && begin == 0});
        };
        pattern.split(piece.text, [&](size_t first, size_t last, bool matched) {
            const bool is_match = matched != invert;
            if (!begun || !belongs_to(before, is_match)) {
                finish();
                begin = first;
            }
            begun = true;
            end = last;
            before = is_match;
        });
        finish();
    };
}

PreTokenizer split_off_white_space() {
    return split(Regex(concat('[', kRustWord, "]+|[^", kRustWord, "\\s]+"), "Whitespace"), SplitBehavior::removed,
                 true);
}

PreTokenizer add_prefix_space() {
    return [](Piece piece, ChangedTexts& changed, std::vector<Piece>& parts) {
        if (piece.text[0] != ' ') piece.text = changed.emplace_back(concat(' ', piece.text));
        parts.push_back(piece);
    };
}

PreTokenizer mark_spaces(const std::string& mark, PrependScheme scheme) {
    return [=](Piece piece, ChangedTexts& changed, std::vector<Piece>& parts) {
        std::string& text = changed.emplace_back();
        const bool begins_with_mark = piece.text[0] == ' ' || piece.text.starts_with(mark);
        const bool wanted = scheme == PrependScheme::always || (scheme == PrependScheme::first && piece.begins_text);
        if (wanted && !begins_with_mark) text = mark;
        for (char c : piece.text) {
            if (c == ' ') text += mark;
            else text += c;
        }
        parts.push_back({text, piece.begins_text});
    };
}

std::vector<Piece> pre_tokenize(const std::vector<PreTokenizer>& steps, Piece piece, ChangedTexts& changed) {
    std::vector<Piece> pieces = {piece};
    for (const PreTokenizer& step : steps) {
        std::vector<Piece> parts;
        for (const Piece& p : pieces) step(p, changed, parts);
        pieces = std::move(parts);
    }
    return pieces;
}
