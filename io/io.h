// io/io.h: what a training run reads and writes. Text and token files, tokenizers, safetensors, logs, plots.
//
// Host code only; uses core/ and nothing above it. Every fault of the input throws Error (core/core.h) with one line
// that names the file, what is wrong in it, and what to do. Output files, but for the logs, which grow by a row a step,
// are written beside their final name, fsynced and renamed, so that a run killed at any moment leaves the old file or
// the new one, never half of one.
#pragma once

#include "core/core.h"

#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

// ---------------------------------------------------------------------------------------------------------------------
// files.cu

// A whole regular file, mapped read-only into memory. It must not be shortened by others while it is mapped.
class MappedFile {
  public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    const unsigned char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
    const unsigned char* data_ = nullptr;
    size_t bytes_ = 0;
};

// Writes path + ".tmp", and commit() makes it path: flush, fsync, rename, fsync of the folder. Without commit() the
// temporary file is removed. A full disk is an Error that names the path and the bytes wanted. One writer a path.
class AtomicFile {
  public:
    explicit AtomicFile(const std::string& path);
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;
    void write(const void* data, size_t bytes);
    void write(std::string_view text) { write(text.data(), text.size()); }
    void overwrite(size_t offset, std::string_view text);  // what has been written there already
    void commit();

  private:
    std::string path_, temporary_;
    int fd_ = -1;
    std::string buffer_;  // small writes are gathered
};

// What a system call gives, made again each time that a signal interrupts it.
template <class Call>
auto uninterrupted(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}
// All of the bytes or an Error that names `path`: interrupted and short writes go on where they stopped.
void write_all(int fd, const void* data, size_t bytes, const std::string& path);
int sync_to_disk(int fd);                             // fsync, which goes on after a signal; 0, or errno
std::string read_text_file(const std::string& path);  // also from a pipe
// The text of a file that is looked for in a folder. Error for a pipe or a device, which is not what is meant there:
// the program would wait for somebody to write to it.
std::string read_regular_file(const std::string& path);
void write_text_file(const std::string& path, std::string_view text);  // atomically
void make_folder(const std::string& path);                             // with parents; checks that it can be written to
// Is there something? Error where it cannot be told, as in a folder that may not be entered, and for a link that leads
// nowhere.
bool is_there(const std::string& path);
bool is_folder(const std::string& path);  // false, too, where it cannot be told
// fsync, so that the names in it survive a power cut, where its file system can do that.
void sync_folder(const std::string& path);

// Before a program opens any file: where standard input, output or error is closed, its number is taken, so that no
// file gets it, into which messages would be written.
void keep_standard_numbers();
// What went wrong, for people: what() of all but std::bad_alloc, whose own word is no sentence.
const char* reason_of(const std::exception& error);
// From here on an exception that nobody can catch, as one that leaves a loop of OpenMP, ends the program as those do
// that main catches: its reason on stderr, and status 2. So does SIGBUS, by which the system answers a read of a mapped
// file beyond its end: somebody has shortened it.
void end_with_reason();
// Error if something that was printed could not be written: for programs whose result that is.
void check_output();
// Does a terminal that output goes to know sequences that begin with ESC? TERM=dumb, as in an editor, does not.
bool terminal_knows_escapes();

// ---------------------------------------------------------------------------------------------------------------------
// checksum.cu

// Different for any two inputs that differ in one word of 8 bytes, and nearly surely for any two that differ.
uint64_t checksum(const void* data, size_t bytes);
std::string checksum_text(uint64_t checksum);  // 16 hexadecimal digits

// ---------------------------------------------------------------------------------------------------------------------
// safetensors.cu: the Hugging Face tensor file (8-byte header length, JSON header, raw little-endian data).

struct StoredTensor {
    std::string dtype;  // "F32", "BF16", "F16", "I32", "I64", "U8", ... as in the file
    std::vector<int64_t> shape;
    const unsigned char* data = nullptr;  // into the mapped file; may be unaligned: memcpy it
    size_t bytes = 0;
    std::optional<uint64_t> checksum;  // as the file says; files of others have none
    int64_t n() const;
    std::vector<float> floats() const;  // F32, F16 or BF16 converted to float
};

// The two parsers that the reader uses. They trust nothing: any bytes give a result or one Error that names `name`.
struct SafetensorsView {
    std::map<std::string, StoredTensor> tensors;  // their data point into the bytes given
    std::map<std::string, std::string> metadata;
};
SafetensorsView parse_safetensors(const unsigned char* data, size_t bytes, const std::string& name);
// model.safetensors.index.json: tensor name -> file name of its shard.
std::map<std::string, std::string> parse_safetensors_index(std::string_view json, const std::string& name);

// One file, or a folder that holds model.safetensors or model.safetensors.index.json with its shards (of which only the
// tensors that the index names are shown).
class SafetensorsReader {
  public:
    explicit SafetensorsReader(const std::string& file_or_folder);
    bool has(const std::string& name) const { return tensors_.count(name) != 0; }
    const StoredTensor& at(const std::string& name) const;  // missing: Error that lists the nearest names
    const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
    // "__metadata__" of the file, without the checksums.
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    // Reads all bytes, or those of one tensor. Error that names the first tensor whose bytes are not those that were
    // written; tensors without a checksum are taken as they are.
    void verify() const;
    void verify(const std::string& name) const;

  private:
    void check_sum(const std::string& name, uint64_t found, uint64_t written) const;
    SafetensorsView map_file(const std::string& path);
    void add_shards(const std::string& index_path);
    std::string path_;
    std::vector<MappedFile> files_;
    std::map<std::string, StoredTensor> tensors_;
    std::map<std::string, std::string> metadata_;
};

// What is to be written: `fill` is called in file order and gives the bytes of this tensor, so that a model on a device
// can be saved without a second copy of all of it on the host. File order is the order given, but wider element types
// come first, so that every tensor starts at a multiple of its element size. The metadata get the checksum of each
// tensor, as "checksum NAME": 16 hexadecimal digits.
struct TensorToStore {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::function<void(void* bytes)> fill;
};
void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.cu: text to token ids and back. Its parts (patterns, normalizers, BPE, ...) are in io/tokenizer_parts.h.

// How far the text of a row of tokens has been written; decode() and StreamDecoder keep one.
struct DecodeState {
    int64_t n_tokens = 0;
    int n_stripped = 0;     // characters that were left out at the start of the text
    bool stripping = true;  // no other character has come yet
};

class Tokenizer {
  public:
    virtual ~Tokenizer() = default;
    virtual std::string name() const = 0;  // "bytes" or the file it came from
    virtual int vocab_size() const = 0;
    virtual bool has(int32_t token) const = 0;  // a file may leave ids out, and a model's vocabulary may be rounded up
    // The tokens of a text, and no others: what training wants. Added tokens that stand in the text, as <|endoftext|>
    // does in many data sets, are recognised.
    virtual std::vector<int32_t> encode(std::string_view text) const = 0;
    // The ids that the file's post_processor puts before and after a text, as <|begin_of_text|>: a model expects them
    // around a prompt. encode_with_special(text) is special_prefix(), encode(text), special_suffix().
    virtual std::vector<int32_t> special_prefix() const { return {}; }
    virtual std::vector<int32_t> special_suffix() const { return {}; }
    std::vector<int32_t> encode_with_special(std::string_view text) const;
    // Special tokens (<|eot_id|>) steer a model. decode() writes them; the text of an answer leaves them out.
    virtual bool is_special(int32_t /*token*/) const { return false; }
    // The text of a row of tokens; it may end inside a UTF-8 character, as tokens do. Error for an id that is none.
    std::string decode(const std::vector<int32_t>& tokens) const;
    // Appends to `text` what the next token of a row adds to it.
    virtual void decode_next(int32_t token, DecodeState& state, std::string& text) const = 0;
};

// Text as it is generated. A token may end in the middle of a UTF-8 character: push() gives only bytes whose characters
// are complete (or can no longer become so), finish() what is left, and then it is ready for another row. Together they
// are decode() of all tokens. Whoever wants what follows a prompt pushes the prompt's tokens too, and drops their text:
// some tokenizers print the first token of a row without its space.
class StreamDecoder {
  public:
    explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
    std::string push(int32_t token);
    std::string finish();
    size_t n_held_back() const { return held_back_.size(); }  // bytes of a character that is not complete

  private:
    const Tokenizer* tokenizer_;
    DecodeState state_;
    std::string held_back_;
};

// Without a tokenizer a token of text is a byte. A vocabulary may be rounded up a little, but one of tens of thousands
// of tokens belongs to a tokenizer, and a model with it knows no bytes.
constexpr int64_t kLargestByteVocabulary = 512;
// The file that --tokenizer means: itself, or the tokenizer.json of a folder. Error for a folder without one.
std::string find_tokenizer_file(const std::string& path);
// Token = byte: 256 tokens, no file needed.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
// The same as a tokenizer.json, for Hugging Face's libraries: byte-level BPE without merges, in which id i is byte i.
std::string byte_tokenizer_json();
// Byte-pair encoding from a Hugging Face tokenizer.json: byte-level, as GPT-2's, LLaMA 3's, Qwen 2's and 3's and
// DeepSeek's, or of characters, as LLaMA 2's and Mistral's (SentencePiece, with byte_fallback). doc/models.md lists the
// components that are read; any other is an Error that names it: a tokenizer that is nearly right trains and samples
// without an error, and badly.
//   - encode(text) gives the ids of Hugging Face's `tokenizers` for a text in UTF-8: dev/compare_tokenizers.py compares
//     them, and doc/models.md lists the rare texts with others. A byte that is not UTF-8 counts as a control character
//     in patterns and as itself in the tokens.
//   - decode(encode(text)) == text for any bytes, UTF-8 or not, but for what normalizers and prefix spaces change, and
//     what pre-tokenizers (Whitespace) or added tokens (lstrip) remove; a vocabulary without byte tokens makes <unk> of
//     characters that it lacks.
// Safe to use from several threads. A file like byte_tokenizer_json() gives the byte tokenizer.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& tokenizer_json);
std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view json, const std::string& name);  // the same from memory

// The character that starts at text[i]. A byte that is not UTF-8 counts as U+FFFD of length 1, so that nothing is lost.
struct Utf8Char {
    uint32_t code;
    size_t bytes;
    bool is_utf8() const { return code < 0x80 || bytes > 1; }
};
Utf8Char utf8_char_at(std::string_view text, size_t i);

// ---------------------------------------------------------------------------------------------------------------------
// dataset.cu: the tokens of a file, a folder, or the built-in text, as one long row

// llm.c's token shard: 256 int32 header (magic, version, number of tokens), then the tokens, little-endian. Two
// variants: magic 20240520, version 1: uint16 (made for GPT-2, whose documents begin with <|endoftext|>, 50256); magic
// 20240801, version 7: uint32 (made for LLaMA 3, whose documents begin with <|begin_of_text|>, 128000).
struct TokenShard {
    const unsigned char* tokens = nullptr;  // into the file; need not be aligned
    int64_t n = 0;
    int token_bytes = 2;
    int32_t document_token = -1;  // the one that every document begins with; -1: none is known
};
// Error that names `name` for another magic number or version, and for more or fewer bytes than the header says.
TokenShard parse_token_shard(const unsigned char* data, size_t bytes, const std::string& name);

// What a path may be:
//   - a text file, or a folder of text files: read recursively in name order, without hidden files and files that are
//     no text (a zero byte in the first 64 KiB), tokenized by `tokenizer` and held in memory as uint16 or uint32;
//   - a token shard *.bin, or a folder of them in name order (a folder that has *.bin holds shards): memory-mapped;
//   - a pattern of such files, "fineweb_train_*.bin";
//   - "": the C++ standard library headers of the compiler that built the program, about 3 MB without their licences:
//     real text that every machine has.
class TokenSource {
  public:
    // Some shards of a folder or pattern may be named as held out, by "val" as a word of the file name (llm.c's
    // *_train_*.bin and *_val_*.bin). Where both kinds are there, `held_out` chooses: only those, or only the others.
    // document_token: the one that every document of a shard begins with; -1: the tokenizer's, if it has one, otherwise
    // that of the tokenizer that the shard's header names.
    static TokenSource open(const std::string& path, const Tokenizer& tokenizer, bool held_out = false,
                            int32_t document_token = -1);
    int64_t n() const { return n_; }                              // number of tokens
    void read(int64_t first, int64_t count, int32_t* out) const;  // crosses shard borders
    // Where documents begin, within [first, first + count). Shards: at each document token; what a shard begins with
    // may be the rest of a document. Text: at each file, and at each <|endoftext|> or <|begin_of_text|> in it, if that
    // is one token of the tokenizer.
    std::vector<int64_t> document_starts(int64_t first, int64_t count) const;
    int32_t document_token() const;  // the one that stands before documents; -1: none is known
    // Reads all tokens once, at the speed of the memory or the disk.
    struct Summary {
        int32_t max_token = 0;  // to be compared with the vocabulary
        uint64_t checksum = 0;  // of all tokens and of the lengths of the files
    };
    Summary summary() const;
    bool is_shards() const;  // of token ids, not text that was tokenized here
    // For messages: "tokens 812 to 875 of shard.bin, in the document that begins at its token 400".
    std::string describe(int64_t first, int64_t count) const;
    const std::string& description() const;  // one line for the start of the log
    // Splits off the last `fraction` as held-out text: [0, split) trains, [split, n) validates.
    std::pair<TokenSource, TokenSource> split(double fraction) const;

  private:
    struct Impl;
    std::shared_ptr<const Impl> impl_;
    int64_t first_ = 0, n_ = 0;
};

// A run may draw its sequences from several sources: of every kMixShares sequences, `share` come from this one.
constexpr int64_t kMixShares = 1000;
struct MixedSource {
    TokenSource tokens;
    int64_t share = kMixShares;
};
using TokenMix = std::vector<MixedSource>;
// "a.txt:0.7,b.txt:0.3" as paths with shares that add up to kMixShares, in the ratio of the weights; any other text,
// and the name of a file that exists, as one path. Error for a weight that is not positive, or is below a share, and
// where some of several sources have none.
struct MixedPath {
    std::string path;
    int64_t share;
};
std::vector<MixedPath> parse_mixed_paths(const std::string& text);
// The training and the held-out tokens of a run, each of one source or of several. `val`, if given, is held out. Of a
// source of `data` otherwise those shards are that are named *_val_*.bin, or if there are none the last `fraction`;
// they have the share of their source.
std::pair<TokenMix, TokenMix> open_train_and_val(const std::string& data, const std::string& val,
                                                 const Tokenizer& tokenizer, double fraction,
                                                 int32_t document_token = -1);
int64_t token_count(const TokenMix& mix);

// ---------------------------------------------------------------------------------------------------------------------
// batch_reader.cu: shuffled by seed and epoch, resumable at any sequence

// Sequences of T inputs with their T next-token targets. An epoch cuts the text into windows of T, from an offset in
// [0, T) of its own, and visits each once in an order of its own; offset and order follow from (seed, epoch). All
// epochs have floor(n / T) - 1 windows (at least one), so sequence i is a pure function of (seed, i): resuming needs
// only the index, and every rank can read its own rows. A text of at most T tokens is an Error.
//
// Of several sources each has epochs of its own. Each thousand (kMixShares) of the run's sequences, from number 1000 k
// to 1000 k + 999, holds `share` of each source exactly, in an order that follows from (seed, k). So the number i of a
// sequence says from which source it is, and which one there.
class BatchReader {
  public:
    BatchReader(TokenSource source, int64_t T, uint64_t seed);
    BatchReader(const TokenMix& mix, int64_t T, uint64_t seed);
    // Sequence number i of the run (i counts sequences over all epochs): T tokens and T targets.
    void sequence(int64_t i, int32_t* tokens, int32_t* targets) const;
    // The documents in it, cut at its ends: for each of its T tokens [first, end) of its document, counted from the
    // sequence's first token, and how far into the document it stands.
    void documents(int64_t i, int32_t* spans, int32_t* positions) const;
    int64_t sequences_per_epoch() const;    // of several sources: the sum of theirs
    std::string describe(int64_t i) const;  // where sequence i is from

  private:
    struct Part {
        TokenSource source;
        int64_t share, shares_before;  // shares_before: of the parts before it
        int64_t n_windows, n_offsets;
    };
    struct Place {
        const Part* part;
        int64_t first_token;
    };
    Place place(int64_t i) const;
    std::vector<Part> parts_;
    int64_t T_;
    uint64_t seed_;
};

// ---------------------------------------------------------------------------------------------------------------------
// checkpoint.cu: folders that are there whole or not at all
//
//   RUN/checkpoints/step-00000100/       written as step-00000100.tmp, fsynced, renamed
// What a run that was killed leaves has names that end in .tmp, and the next save removes it.

class CheckpointWriter {
  public:
    CheckpointWriter(const std::string& run_folder, int64_t step);
    ~CheckpointWriter();                                      // removes the folder if commit() was not reached
    const std::string& folder() const { return temporary_; }  // write the files here
    const std::string& final_folder() const { return final_; }
    // Makes the folder final, and removes all older checkpoints but the newest `keep` (this one counts; 0 keeps all),
    // and those of later steps: they were broken, so that the run was resumed from one before them. That of step
    // `best` stays beside the newest. Returns what went wrong once this one was in its place, as one that cannot be
    // removed, or "".
    std::string commit(int64_t keep, int64_t best = 0);

  private:
    std::string run_folder_, parent_, temporary_, final_;
    bool committed_ = false;
};
// The checkpoints of a run that were committed, newest first; and the newest of them, or nothing.
std::vector<std::string> find_checkpoints(const std::string& run_folder);
std::optional<std::string> latest_checkpoint(const std::string& run_folder);

// ---------------------------------------------------------------------------------------------------------------------
// log.cu: what a run leaves behind

struct LogRow {
    int64_t step = 0, tokens = 0;  // tokens: seen so far
    std::optional<double> loss, val_loss, lr, grad_norm, loss_scale, tokens_per_s, mfu, step_ms;
};

// DIR/log.csv, one row a step, flushed as written, with the columns
//     step,tokens,loss,val_loss,lr,grad_norm,loss_scale,tokens_per_s,mfu,step_ms
// of which those are empty that a row has no number for; mfu is the share of the matmul rate, 0 to 1. A row of step 0
// has only the val_loss of the weights that a run started from. Opening it for a resumed run keeps the rows up to and
// including `resume_step` byte for byte and drops those after (a crash may have logged steps that the checkpoint
// lacks). loss, lr and grad_norm have 9 digits: a float read back is the float that was written.
class CsvLog {
  public:
    CsvLog(const std::string& path, int64_t resume_step);  // resume_step < 0: a new file
    ~CsvLog();
    CsvLog(const CsvLog&) = delete;
    CsvLog& operator=(const CsvLog&) = delete;
    void write(const LogRow& row);

  private:
    int fd_ = -1;
    std::string path_;
};
// All rows; a last line without its end, which a kill leaves, is none. Error for another header, and for a field that
// is not a number.
std::vector<LogRow> read_csv_log(const std::string& path);

// TensorBoard event file (TFRecord framing with masked CRC32C, Event protobufs written by hand: scalars only). Each run
// writes a new file in the folder; its first events tell TensorBoard to forget what older files say of the steps after
// `resume_step` (resume_step < 0: of all steps).
class TensorBoardLog {
  public:
    TensorBoardLog(const std::string& folder, int64_t resume_step);
    ~TensorBoardLog();
    TensorBoardLog(const TensorBoardLog&) = delete;
    TensorBoardLog& operator=(const TensorBoardLog&) = delete;
    void scalar(const std::string& tag, int64_t step, double value);

  private:
    int fd_ = -1;
    std::string path_;
};

// ---------------------------------------------------------------------------------------------------------------------
// canvas.cu: antialiased lines, discs and text on pixels, saved as PNG. Units are pixels, y points down.

class Canvas {
  public:
    struct Point {
        double x, y;
    };
    struct Color {
        uint8_t r, g, b;
    };
    enum class Align { left, center, right };

    Canvas(int width, int height);  // white
    void fill(double left, double top, double right, double bottom, Color color, double alpha = 1);
    // A polyline with round ends and joints; painted as one shape: where it crosses itself an alpha < 1 doesn't show.
    void line(const std::vector<Point>& points, double thickness, Color color, double alpha = 1);
    void disc(Point center, double radius, Color color, double alpha = 1) { line({center}, 2 * radius, color, alpha); }
    // ASCII text on the baseline through `at`, in a stroke font; capitals are `height` high (10 is the crispest).
    // Upwards: rotated by a quarter turn, reading from bottom to top.
    void text(Point at, std::string_view text, double height, Color color, Align align = Align::left, bool bold = false,
              bool upwards = false);
    static double text_width(std::string_view text, double height);
    static std::string shorten(std::string_view text, double height, double width);  // ends in ... if it is too wide

    int width() const { return width_; }
    int height() const { return height_; }
    const std::vector<uint8_t>& rgb() const { return rgb_; }  // height x width x 3
    void save(const std::string& path) const;                 // PNG

  private:
    void cover(Point a, Point b, double radius);
    void paint(Color color, double alpha);
    int width_, height_;
    std::vector<uint8_t> rgb_;
    std::vector<float> coverage_;  // of the shape being drawn, 0 to 1, in the box below; 0 elsewhere
    int left_ = 0, top_ = 0, right_ = 0, bottom_ = 0;  // its box: [left, right) x [top, bottom)
};

// ---------------------------------------------------------------------------------------------------------------------
// plot.cu: line charts: axes, ticks, labels, legend. Points that are NaN, infinite, or not positive on a log axis leave
// a gap in the line.

struct Series {
    std::string label;  // "" keeps it out of the legend
    std::vector<double> x, y;
    bool thick = true;  // thin lines are drawn pale and beneath the thick ones: the noise under a smoothed curve
    bool markers = false;
    int color = -1;  // palette entry 0 to 7; -1: the position among the series
};
struct Plot {
    std::string title, x_label, y_label;
    std::vector<Series> series;
    bool log_x = false, log_y = false;
    int width = 960, height = 600;
};
void write_png(const std::string& path, const Plot& plot);
// Plots of one width, one below the other; their x axes begin and end at the same columns.
void write_png(const std::string& path, const std::vector<Plot>& plots);

// ---------------------------------------------------------------------------------------------------------------------
// mistyped.cu: what a program answers to words that are not flags, and to values that are not numbers. command_line.h
// puts it around CLI11.

// What other programs call our flags, and what to write here: {"learning-rate", "--lr"}.
struct Synonym {
    const char *name, *meant;
};
struct ProgramWords {
    const char* name;  // "train_gpt"
    std::vector<Synonym> synonyms;
    const char* quoted_example;  // a flag whose value needs quotes, as an example of one
};
// How many letters must be inserted, removed, replaced, or exchanged with their neighbour to make b of a.
size_t edit_distance(const std::string& a, const std::string& b);
// One line that says what may have been meant by `unknown`, one of the command line's words.
std::string explain_unknown(const ProgramWords& program, const std::vector<std::string>& flags,
                            const std::vector<std::string>& words, const std::string& unknown);
// Errors that name the flag: for a value that is a flag itself, for one that is no number, and for one that is not
// whole or beyond `largest`, to either side; of a seed, for one that is not from 0 to 2^64 - 1. "1e3" is the whole
// number 1000.
void expect_value(const std::string& flag, const std::string& text);
void expect_number(const std::string& flag, const std::string& text);
int64_t parse_whole_number(const std::string& flag, const std::string& text, int64_t largest);
uint64_t parse_seed(const std::string& flag, const std::string& text);

// ---------------------------------------------------------------------------------------------------------------------
// progress.cu: numbers as people read them

std::string human_count(double n);      // "124M", "3.2k"
std::string human_bytes(double bytes);  // "1.43 GiB"
std::string human_seconds(double s);    // "1m 23s"; "?" if it is not known (NaN, infinite, negative)
