// io/dataset.cu: where the tokens of a run come from. (batch_reader.cu: in which order it sees them.)
//
// A TokenSource is one long row of tokens: token shards mapped from disk, so that a data set may be far larger than the
// memory, or text that was tokenized into memory.
#include "io/io.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <sstream>

namespace {

namespace fs = std::filesystem;

// ---------------------------------------------------------------------------------------------------------------------
// Finding files

bool is_shard_name(const std::string& path) { return path.ends_with(".bin"); }

// Paths of regular files below a folder, in name order; hidden files and folders are left out.
std::vector<std::string> list_files(const std::string& folder, bool recursive) {
    std::vector<std::string> paths;
    try {
        std::error_code ignored;  // a link that leads nowhere is neither a folder nor a file
        for (fs::recursive_directory_iterator entry(folder), end; entry != end; ++entry) {
            bool hidden = entry->path().filename().string().starts_with('.');
            if (entry->is_directory(ignored) && (hidden || !recursive)) entry.disable_recursion_pending();
            if (entry->is_regular_file(ignored) && !hidden) paths.push_back(entry->path().string());
            // A missing shard would be missing tokens: only among texts is a link that leads nowhere left out.
            check(recursive || hidden || !is_shard_name(entry->path()) || fs::exists(entry->path(), ignored),
                  entry->path().string(),
                  ": this link to a token shard leads nowhere: fetch the shard, or remove the link");
        }
    } catch (const fs::filesystem_error& error) {
        fail("cannot read folder ", folder, ": ", error.code().message());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
}

std::vector<std::string> match_pattern(const std::string& pattern) {
    glob_t found;
    std::vector<std::string> paths;
    if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    return paths;  // glob() sorts by name
}

// "val" is one of the words of the file name: tiny_shakespeare_val.bin, fineweb_val_000000.bin.
bool is_val_name(const std::string& path) {
    std::string name = concat("_", fs::path(path).stem().string(), "_");
    std::replace(name.begin(), name.end(), '-', '_');
    return name.find("_val_") != name.npos;
}

struct Files {
    std::vector<std::string> paths;
    bool shards = false;
    bool has_val = false;    // names mark some shards as held out, and others not
    bool is_folder = false;  // found by looking through a folder, so what is no text is skipped, not refused
};

Files find_files(const std::string& path, bool held_out) {
    Files files;
    if (is_folder(path)) {
        files.is_folder = true;
        files.paths = list_files(path, false);
        std::erase_if(files.paths, [](const std::string& p) { return !is_shard_name(p); });
        files.shards = !files.paths.empty();
        if (!files.shards) files.paths = list_files(path, true);
    } else {
        files.paths = is_there(path) ? std::vector<std::string>{path} : match_pattern(path);
        files.shards = std::all_of(files.paths.begin(), files.paths.end(), is_shard_name);
    }
    check(!files.paths.empty(), "no data at ", path,
          files.is_folder ? ": the folder has no files (hidden ones are not read)" : "",
          ": --data and --val take a text file, a folder, or .bin token shards");
    auto n_val = std::count_if(files.paths.begin(), files.paths.end(), is_val_name);
    files.has_val = files.shards && n_val > 0 && n_val < static_cast<int64_t>(files.paths.size());
    if (files.has_val) std::erase_if(files.paths, [&](const std::string& p) { return is_val_name(p) != held_out; });
    return files;
}

// ---------------------------------------------------------------------------------------------------------------------
// Text

bool looks_binary(std::string_view text) { return text.substr(0, 65536).find('\0') != text.npos; }

std::string_view view_of(const MappedFile& file) {
    return file.bytes() == 0 ? "" : std::string_view(reinterpret_cast<const char*>(file.data()), file.bytes());
}

// Are the tokens of a text those of its two parts? Most tokenizers begin a word between a letter and a space with a
// letter behind; some put a space before every text that they are given.
bool may_cut(std::string_view text, size_t i, const Tokenizer& tokenizer) {
    constexpr size_t near = 64;  // bytes that are looked at on each side
    const std::string_view left = text.substr(i - near, near), right = text.substr(i, near);
    std::vector<int32_t> parts = tokenizer.encode(left);
    const std::vector<int32_t> behind = tokenizer.encode(right);
    parts.insert(parts.end(), behind.begin(), behind.end());
    return parts == tokenizer.encode(text.substr(i - near, near + right.size()));
}

// The start of a text that may be tokenized by itself, about 4 MB, so that a large file does not need the memory of all
// its tokens as int32 at once; or all of it, where the tokenizer lets no place be cut.
std::string_view first_chunk(std::string_view text, const Tokenizer& tokenizer) {
    constexpr size_t chunk_bytes = 4 << 20;
    auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    int tries = 16;
    for (size_t i = chunk_bytes; i + 1 < text.size() && tries > 0; ++i) {
        if (!is_letter(text[i - 1]) || text[i] != ' ' || !is_letter(text[i + 1])) continue;
        if (may_cut(text, i, tokenizer)) return text.substr(0, i);
        --tries;
    }
    return text;
}

// The include folder of the C++ standard library: the compiler's own (the Makefile asks it), or the newest there is.
std::string find_cxx_headers() {
#ifdef CXX_INCLUDE_DIR
    if (is_there(CXX_INCLUDE_DIR "/vector")) return CXX_INCLUDE_DIR;
#endif
    for (const char* pattern : {"/usr/include/c++/*", "/usr/local/include/c++/*", "/usr/lib/llvm*/include/c++/v1"}) {
        std::vector<std::string> folders = match_pattern(pattern);
        std::erase_if(folders, [](const std::string& folder) { return !is_there(folder + "/vector"); });
        auto by_version = [](const std::string& a, const std::string& b) {  // "9" before "12"
            return std::pair(a.size(), a) < std::pair(b.size(), b);
        };
        if (!folders.empty()) return *std::max_element(folders.begin(), folders.end(), by_version);
    }
    fail("there are no C++ headers on this machine to learn from: give a text with --data");
}

// The comments at the top of a header are its licence, the same in every file: nothing to learn from.
std::string_view without_leading_comments(std::string_view text) {
    while (true) {
        size_t begin = text.find_first_not_of(" \t\r\n");
        if (begin == text.npos) return "";
        text.remove_prefix(begin);
        const char* end_mark = text.starts_with("//") ? "\n" : text.starts_with("/*") ? "*/" : nullptr;
        if (!end_mark) return text;
        size_t end = text.find(end_mark, 2);
        if (end == text.npos) return "";
        text.remove_prefix(end + std::strlen(end_mark));
    }
}

// What stands between documents in text, if this tokenizer has it as one token: GPT-2's and Qwen 2's <|endoftext|>,
// LLaMA 3's <|begin_of_text|>. Those who write them put one before each document, or between two:
// either way a document begins there.
int32_t find_document_token(const Tokenizer& tokenizer) {
    for (const char* text : {"<|endoftext|>", "<|begin_of_text|>"})
        if (const std::vector<int32_t> tokens = tokenizer.encode(text); tokens.size() == 1) return tokens[0];
    return -1;
}

// Calls f(token) for n tokens of a shard from `first` on. Little-endian, as all machines with CUDA are.
template <class F>
void for_each_token(const TokenShard& shard, int64_t first, int64_t n, F&& f) {
    auto visit = [&](auto token) {
        for (int64_t i = first; i < first + n; ++i) {
            std::memcpy(&token, shard.tokens + i * static_cast<int64_t>(sizeof token), sizeof token);
            // Ids are int32. One beyond that becomes the largest, which no vocabulary has.
            f(static_cast<int32_t>(std::min<uint32_t>(token, std::numeric_limits<int32_t>::max())));
        }
    };
    if (shard.token_bytes == 2) visit(uint16_t{});
    else visit(uint32_t{});
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Token shards

TokenShard parse_token_shard(const unsigned char* data, size_t bytes, const std::string& name) {
    constexpr size_t header_bytes = 256 * sizeof(int32_t);
    int32_t magic = 0, version = 0, n = 0;
    check(bytes >= header_bytes, name, ": ", bytes, " bytes are too few for a token shard, whose header alone has ",
          header_bytes, ": was it downloaded completely?");
    std::memcpy(&magic, data, 4);
    std::memcpy(&version, data + 4, 4);
    std::memcpy(&n, data + 8, 4);

    const char* make_again = "make the shard again with llm.c's dev/data scripts";
    const bool narrow = magic == 20240520, wide = magic == 20240801;
    const char* hint = magic == 20240522   ? " (this is llm.c's multiple-choice evaluation file)"
                       : magic == 20240326 ? " (this is a model checkpoint of llm.c)"
                                           : "";
    check(narrow || wide, name, ": magic number ", magic, hint,
          ", expected 20240520 (uint16 tokens) or 20240801 (uint32): ",
          "make shards with llm.c's dev/data scripts, or give the text itself");
    const int32_t version_wanted = narrow ? 1 : 7;
    check(version == version_wanted, name, ": version ", version, ", expected ", version_wanted, " for magic number ",
          magic, ": ", make_again);

    TokenShard shard{data + header_bytes, n, narrow ? 2 : 4, narrow ? 50256 : 128000};
    check(n >= 0, name, ": token count ", n, " in the header is negative: ", make_again);
    const size_t wanted = header_bytes + static_cast<size_t>(n) * shard.token_bytes;
    check(bytes == wanted, name, ": the header promises ", n, " tokens, so the file should have ", wanted,
          " bytes, but it has ", bytes, ": ", bytes < wanted ? "was it downloaded completely?" : make_again);
    return shard;
}

namespace {

struct stat status_of(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) status = {};  // gone
    return status;
}

}  // namespace

struct TokenSource::Impl {
    struct Piece {
        TokenShard shard;
        int64_t first;  // its first token in the row of all
    };
    std::vector<MappedFile> files;
    std::vector<ino_t> inodes;  // of these
    std::vector<uint16_t> narrow_text;
    std::vector<uint32_t> wide_text;
    std::vector<Piece> pieces;
    std::vector<int64_t> file_starts;  // token with which each file begins; in text a document begins there, too
    std::vector<std::string> file_names;
    bool is_shards = false;
    std::string description;
    int64_t n = 0;

    void add(TokenShard shard) {
        if (shard.n > 0) pieces.push_back({shard, n});
        n += shard.n;
    }
    template <class F>
    void visit(int64_t first, int64_t count, F&& f) const;
    void check_whole(int64_t first, int64_t count) const;
    void add_shards(const Files& found, const std::string& path, int32_t document_token);
    void add_text(const Files& found, const std::string& path, const Tokenizer& tokenizer);
};

// Calls f(shard, first token in it, how many) for each part of a shard that [first, first + count) covers, in order.
template <class F>
void TokenSource::Impl::visit(int64_t first, int64_t count, F&& f) const {
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                  [](int64_t position, const Piece& p) { return position < p.first; });
    while (count > 0) {
        const Piece& p = *std::prev(piece++);
        int64_t n_here = std::min(count, p.first + p.shard.n - first);
        f(p.shard, first - p.first, n_here);
        first += n_here;
        count -= n_here;
    }
}

// Error if a shard with these tokens has been shortened since it was opened. Behind its new end the rest of the page is
// read as zeros, without a signal; pages after that one give SIGBUS. Nothing is wrong where the path names another file
// by now: the mapping is still that of the old one.
void TokenSource::Impl::check_whole(int64_t first, int64_t count) const {
    if (!is_shards) return;
    const auto begin = std::prev(std::upper_bound(file_starts.begin(), file_starts.end(), first));
    for (auto i = static_cast<size_t>(begin - file_starts.begin()); i < files.size(); ++i) {
        if (file_starts[i] >= first + count) return;
        const MappedFile& file = files[i];
        const struct stat now = status_of(file.path());
        check(now.st_ino != inodes[i] || now.st_size >= static_cast<off_t>(file.bytes()), file.path(),
              " has been shortened by another program while it was being read, from ", file.bytes(), " bytes to ",
              now.st_size);
    }
}

void TokenSource::Impl::add_shards(const Files& found, const std::string& path, int32_t document_token) {
    is_shards = true;
    for (const std::string& p : found.paths) {
        const MappedFile& file = files.emplace_back(p);
        file_starts.push_back(n);
        file_names.push_back(p);
        inodes.push_back(status_of(p).st_ino);
        TokenShard shard = parse_token_shard(file.data(), file.bytes(), p);
        if (document_token >= 0) shard.document_token = document_token;
        add(shard);
    }
    description = concat(path, ": ", files.size(), files.size() == 1 ? " token shard, " : " token shards, ",
                         human_count(static_cast<double>(n)), " tokens");
}

void TokenSource::Impl::add_text(const Files& found, const std::string& path, const Tokenizer& tokenizer) {
    constexpr size_t default_text_bytes = 3'000'000;  // of the headers
    const bool is_default = path.empty();
    const bool narrow = tokenizer.vocab_size() <= 65536;
    auto append = [&](std::string_view chunk) {
        std::vector<int32_t> tokens = tokenizer.encode(chunk);
        if (narrow) narrow_text.insert(narrow_text.end(), tokens.begin(), tokens.end());
        else wide_text.insert(wide_text.end(), tokens.begin(), tokens.end());
    };
    size_t n_files = 0, n_skipped = 0, text_bytes = 0;
    bool ends_in_newline = true;
    for (const std::string& p : found.paths) {
        MappedFile file(p);
        std::string_view text = view_of(file);
        if (looks_binary(text)) {
            check(found.is_folder, p, " is not text in UTF-8: it has zero bytes");
            ++n_skipped;
            continue;
        }
        if (is_default) text = without_leading_comments(text);
        if (text.empty()) continue;
        if (is_default && text_bytes + text.size() > default_text_bytes) break;
        if (n_files > 0 && !ends_in_newline) append("\n");  // or this file would go on in the last line of the other
        file_starts.push_back(static_cast<int64_t>(narrow_text.size() + wide_text.size()));
        file_names.push_back(p);
        ++n_files;
        text_bytes += text.size();
        ends_in_newline = text.ends_with('\n');
        while (!text.empty()) {
            std::string_view chunk = first_chunk(text, tokenizer);
            append(chunk);
            text.remove_prefix(chunk.size());
        }
    }
    check(n_files > 0, "there is no text in ", path, n_skipped > 0 ? ", only files with zero bytes" : "");
    const auto add_all = [&](auto& tokens) {
        tokens.shrink_to_fit();
        add({reinterpret_cast<const unsigned char*>(tokens.data()), std::ssize(tokens), sizeof tokens[0],
             find_document_token(tokenizer)});
    };
    if (narrow) add_all(narrow_text);
    else add_all(wide_text);
    description =
        concat(is_default ? "C++ standard library headers, " + fs::path(found.paths[0]).parent_path().string() : path,
               ": ", found.is_folder ? concat(n_files, n_files == 1 ? " file, " : " files, ") : "",
               human_bytes(static_cast<double>(text_bytes)), ", ", human_count(static_cast<double>(n)), " tokens (",
               tokenizer.name(), ")",
               n_skipped > 0
                   ? concat(", ", n_skipped, n_skipped == 1 ? " file that is" : " files that are", " not text skipped")
                   : "");
}

TokenSource TokenSource::open(const std::string& path, const Tokenizer& tokenizer, bool held_out,
                              int32_t document_token) {
    auto impl = std::make_shared<Impl>();
    Files found;
    if (path.empty()) {
        found.paths = list_files(find_cxx_headers(), true);
        found.is_folder = true;
    } else {
        found = find_files(path, held_out);
    }
    if (found.shards)
        impl->add_shards(found, path, document_token >= 0 ? document_token : find_document_token(tokenizer));
    else impl->add_text(found, path, tokenizer);
    TokenSource source;
    source.n_ = impl->n;
    source.impl_ = std::move(impl);
    return source;
}

void TokenSource::read(int64_t first, int64_t count, int32_t* out) const {
    check(first >= 0 && count >= 0 && first <= n_ - count, "tokens ", first, " to ", first + count, " asked of ", n_);
    impl_->visit(first_ + first, count, [&](const TokenShard& shard, int64_t begin, int64_t n) {
        for_each_token(shard, begin, n, [&](int32_t token) { *out++ = token; });
    });
    impl_->check_whole(first_ + first, count);
}

std::vector<int64_t> TokenSource::document_starts(int64_t first, int64_t count) const {
    check(first >= 0 && count >= 0 && first <= n_ - count, "tokens ", first, " to ", first + count, " asked of ", n_);
    std::vector<int64_t> starts;
    int64_t position = first_ + first;
    auto file = std::lower_bound(impl_->file_starts.begin(), impl_->file_starts.end(), position);
    impl_->visit(position, count, [&](const TokenShard& shard, int64_t begin, int64_t n) {
        for_each_token(shard, begin, n, [&](int32_t token) {
            bool is_file = false;  // several begin here where some have no tokens
            for (; file != impl_->file_starts.end() && *file == position; ++file) is_file = true;
            if ((is_file && !impl_->is_shards) || token == shard.document_token) starts.push_back(position - first_);
            ++position;
        });
    });
    return starts;
}

int32_t TokenSource::document_token() const {
    return impl_->pieces.empty() ? -1 : impl_->pieces.front().shard.document_token;
}

TokenSource::Summary TokenSource::summary() const {
    // Shares of the work: pieces of a million tokens, by all cores. Both results come from one pass, because a data set
    // may be larger than the memory, and then a second pass would read the disk again.
    struct Share {
        TokenShard shard;
        int64_t first, n;
        int32_t max_token = 0;
        uint64_t checksum = 0;
    };
    constexpr int64_t share_n = 1 << 20;
    std::vector<Share> shares;
    impl_->visit(first_, n_, [&](const TokenShard& shard, int64_t begin, int64_t n) {
        for (int64_t first = begin; first < begin + n; first += share_n)
            shares.push_back({shard, first, std::min(share_n, begin + n - first)});
    });
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < shares.size(); ++i) {
        Share& s = shares[i];
        s.checksum =
            ::checksum(s.shard.tokens + s.first * s.shard.token_bytes, static_cast<size_t>(s.n * s.shard.token_bytes));
        for_each_token(s.shard, s.first, s.n, [&](int32_t token) { s.max_token = std::max(s.max_token, token); });
    }
    impl_->check_whole(first_, n_);
    Summary summary;
    std::vector<uint64_t> checksums;
    for (const Share& s : shares) {
        summary.max_token = std::max(summary.max_token, s.max_token);
        checksums.push_back(s.checksum);
    }
    // The shares of a text do not end with its files, and documents begin with these.
    for (const int64_t start : impl_->file_starts)
        if (!impl_->is_shards && start > first_ && start < first_ + n_)
            checksums.push_back(static_cast<uint64_t>(start - first_));
    summary.checksum = ::checksum(checksums.data(), checksums.size() * sizeof(uint64_t));
    return summary;
}

bool TokenSource::is_shards() const { return impl_->is_shards; }

std::string TokenSource::describe(int64_t first, int64_t count) const {
    const std::vector<int64_t>& starts = impl_->file_starts;
    const int64_t position = first_ + first;
    const auto file = std::prev(std::upper_bound(starts.begin(), starts.end(), position));
    const std::string& name = impl_->file_names[static_cast<size_t>(file - starts.begin())];
    const std::string tokens = concat("tokens ", position - *file, " to ", position - *file + count - 1, " of ", name);
    // The document is looked for backwards, in windows: most are short.
    constexpr int64_t window = 4096;
    for (int64_t end = first + 1; end > 0 && first_ + end > *file; end -= window) {
        const int64_t begin = std::max<int64_t>({0, end - window, *file - first_});
        const std::vector<int64_t> documents = document_starts(begin, end - begin);
        if (!documents.empty())
            return concat(tokens, ", in the document that begins at its token ", first_ + documents.back() - *file);
    }
    return tokens;
}

const std::string& TokenSource::description() const { return impl_->description; }

std::pair<TokenSource, TokenSource> TokenSource::split(double fraction) const {
    check(fraction >= 0 && fraction <= 1, "the held-out fraction must be from 0 to 1, got ", fraction);
    TokenSource train = *this, val = *this;
    val.n_ = static_cast<int64_t>(std::llround(static_cast<double>(n_) * fraction));
    train.n_ = n_ - val.n_;
    val.first_ = first_ + train.n_;
    return {train, val};
}

// ---------------------------------------------------------------------------------------------------------------------
// Several sources

namespace {

// Whole shares in the ratio of the weights, by the largest remainder: all get the floor of their part, and those that
// lost most by it get one more each, until none is left.
std::vector<int64_t> shares_of(const std::vector<double>& weights) {
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> shares;
    std::vector<size_t> by_remainder(weights.size());
    std::iota(by_remainder.begin(), by_remainder.end(), size_t{0});
    const auto exact = [&](size_t i) { return weights[i] / sum * static_cast<double>(kMixShares); };
    for (size_t i = 0; i < weights.size(); ++i) shares.push_back(static_cast<int64_t>(exact(i)));
    std::stable_sort(by_remainder.begin(), by_remainder.end(), [&](size_t a, size_t b) {
        return exact(a) - static_cast<double>(shares[a]) > exact(b) - static_cast<double>(shares[b]);
    });
    int64_t left = kMixShares - std::accumulate(shares.begin(), shares.end(), int64_t{0});
    for (size_t i = 0; left > 0; i = (i + 1) % weights.size(), --left) ++shares[by_remainder[i]];
    return shares;
}

}  // namespace

std::vector<MixedPath> parse_mixed_paths(const std::string& text) {
    std::vector<MixedPath> paths;
    std::vector<double> weights;
    size_t n_words = 0, n_there = 0;
    std::istringstream words(text);
    for (std::string word; std::getline(words, word, ',');) {
        ++n_words;
        n_there += is_there(word);
        const size_t colon = word.rfind(':');
        if (colon == word.npos || colon == 0) continue;
        char* end = nullptr;
        const double weight = std::strtod(word.c_str() + colon + 1, &end);
        if (*end != 0 || end == word.c_str() + colon + 1) continue;
        paths.push_back({word.substr(0, colon), 0});
        weights.push_back(weight);
    }
    if (is_there(text) || (paths.empty() && n_there < 2)) return {{text, kMixShares}};
    check(paths.size() == n_words, text, ": each of several sources needs a weight, as in a.txt:0.7,b.txt:0.3");
    for (size_t i = 0; i < paths.size(); ++i)
        check(weights[i] > 0 && std::isfinite(weights[i]), text, ": the weight of ", paths[i].path,
              " must be a number above 0");
    const std::vector<int64_t> shares = shares_of(weights);
    for (size_t i = 0; i < paths.size(); ++i) {
        check(shares[i] > 0, text, ": the weight of ", paths[i].path,
              " is less than a thousandth of all: ", "give it more, or leave it out");
        paths[i].share = shares[i];
    }
    return paths;
}

std::pair<TokenMix, TokenMix> open_train_and_val(const std::string& data, const std::string& val,
                                                 const Tokenizer& tokenizer, double fraction, int32_t document_token) {
    const auto open = [&](const std::string& path, bool held_out) {
        return TokenSource::open(path, tokenizer, held_out, document_token);
    };
    TokenMix train, held_out;
    for (const auto& [path, share] : parse_mixed_paths(data)) {
        train.push_back({open(path, false), share});
        if (!val.empty()) continue;
        if (!path.empty() && find_files(path, true).has_val) {
            held_out.push_back({open(path, true), share});
        } else {
            const auto [first, last] = train.back().tokens.split(fraction);
            train.back().tokens = first;
            held_out.push_back({last, share});
        }
    }
    if (!val.empty())
        for (const auto& [path, share] : parse_mixed_paths(val)) held_out.push_back({open(path, true), share});
    return {train, held_out};
}

int64_t token_count(const TokenMix& mix) {
    int64_t n = 0;
    for (const MixedSource& source : mix) n += source.tokens.n();
    return n;
}
