// inference/inference.h: text from a model, for many requests at once.
//
// A request is a prompt and how to go on from it. Its tokens pass through the model once: each leaves a row of numbers
// per layer in a cache (for GQA its keys and values, for MLA its latent and its rotary key), which the attention of
// later tokens reads. So a new token costs one row of computing, and the memory of the cache decides how many requests
// run at the same time.
//
// A step is one forward of the model, with rows of many requests. Prefill computes the rows of a prompt, many in a
// step; decoding those of an answer, one in a step (without speculation), because each token has to be known before the
// next one. Preemption takes the memory of a request for others until there is room for it again.
//
// Files, in reading order:
//     page_pool.cu     pages that are free, in use, or kept because they may be found again
//     paged_cache.cu   which rows of the cache belong to whom: page tables, sharing, copy-on-write, swapping
//     scheduler.cu     what the next step computes: continuous batching, chunked prefill, preemption
//     cache_report.cu  what the memory of the cache was used for, beside what contiguous slots would have taken
//     timeline.cu      a picture of the requests over the steps
//     paged_model.cu   the forward of a step on the device, over the cache
//     step_graphs.cu   the launches of a step as a CUDA graph
//     followers.cu     a model that is divided among ranks: the others compute the steps of rank 0
//     engine.cu        the step itself: the scheduler's parts, the forward, the tokens drawn
//     sampling.cu      from logits to tokens: what options mean and which are refused
//     token_fields.cu  fields that name tokens, the same on the command line, in a batch, and in a server's request
//     speculation.cu   several tokens a step: proposed by the text itself or by a small model, and verified
//     draft_model.cu   the small model that proposes them
//     beam_search.cu   the most probable answers instead of drawn ones
//     requests.cu      from tokens to text: stop strings, finish reasons, several samples of a prompt
//     loaded_model.cu  weights, tokenizer and memory of a model that only computes
//     options.cu       the command line of generate
//     batch_file.cu    --batch: requests from a file, answers to a file
//     chat_template.cu a conversation as the text that a model was trained on
//     chat.cu          --chat: a conversation in the terminal
//     perplexity.cu    --eval: how surprised a model is by a text
//     server.cu        --serve: the model behind HTTP, with OpenAI's API; its parts are in server.h
#pragma once

#include "core/core.h"
#include "io/io.h"
#include "layers/layers.h"
#include "llm.h"

#include <json/forwards.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

// ---------------------------------------------------------------------------------------------------------------------
// paged_cache.cu: the cache in pages.                   (Kwon et al. 2023, PagedAttention, arXiv:2309.06180, section 4)
//
// The rows of a sequence lie in pages of page_size rows, anywhere in a pool of n_pages: like the pages of an operating
// system's memory. Pages are taken one at a time as a sequence grows, so at most page_size - 1 rows of it are unused.
// Page p is the same rows in the pool of every layer, so that one table serves all layers.
//
//   - Shared: a page may be in the tables of several sequences; it has a count of them. A sequence that is about to
//     write into a shared page gets a copy of it first (copy-on-write).
//   - Found again: a full page is known by its tokens and all those before them. A new sequence that begins with the
//     same tokens takes it over. When its last sequence has ended, a full page is kept until its memory is wanted: the
//     one that was used the longest time ago goes first, and of one sequence the last page before the first.
//   - Swapped: the pages of sequences can be copied to the host and their memory used for others.
//
// This class is bookkeeping on the host and touches no device memory: what has to be copied it says in take_copies().
// A step of the engine is:  reserve and append for each sequence that computes something; make the copies; compute.
// From the first append until the step is computed no sequence may be forked or swapped out: rows would be copied
// before they are computed. None may be truncated either, and if one that has appended is ended, nothing more may be
// reserved: two sequences would write into one page.
//
// Every call with a sequence that has ended, or never began, is an Error; so is an append to rows not reserved.

struct CacheSizes {
    int64_t page_size = 16;    // rows of a page
    int64_t n_pages = 0;       // of the device
    int64_t n_host_pages = 0;  // for sequences that are swapped out
    bool share_prefixes = true;
    int64_t most_pages() const;  // of the device: the tables of a step number the rows of all pages in 32 bits
};

struct PageCopy {  // all layers' rows of page `from` to page `to`
    enum class Way { on_device, to_host, to_device } way;
    int32_t from, to;
};

// The device's pages at one moment: free_pages + kept_pages + owned_pages == n_pages.
struct CacheUse {
    int64_t n_pages = 0, free_pages = 0;
    int64_t kept_pages = 0;     // of no sequence, kept because they may be found again
    int64_t owned_pages = 0;    // of at least one sequence
    int64_t shared_pages = 0;   // of at least two
    int64_t host_pages = 0;     // in use
    int64_t n_sequences = 0;    // on the device
    int64_t used_rows = 0;      // rows of owned pages that hold tokens
    int64_t sequence_rows = 0;  // the same, a page of several sequences counted once for each: without sharing
};

using SequenceId = int64_t;

class PagedCache {
  public:
    explicit PagedCache(const CacheSizes& sizes);
    ~PagedCache();

    // A new, empty sequence.
    SequenceId begin();
    // Takes over full pages whose tokens are the first of `tokens`, and returns how many tokens these are. At most
    // tokens.size() - 1, because the logits that follow the last token have to be computed. Only for an empty sequence.
    int64_t share_prefix(SequenceId sequence, std::span<const int32_t> tokens);
    // How many pages reserve(sequence, n) would take, copies included; and how many it can have.
    int64_t pages_wanted(SequenceId sequence, int64_t n) const;
    int64_t pages_available() const;  // free or kept
    // Pages for n tokens after the sequence's last, of its own (a copy, if the last page is shared). False, and
    // nothing has changed, if there are too few.
    bool reserve(SequenceId sequence, int64_t n);
    // These tokens are computed in the step that comes next, in rows that were reserved. Pages that they fill can be
    // found by sequences that begin after this call.
    void append(SequenceId sequence, std::span<const int32_t> tokens);
    // A new sequence with the same tokens: it shares all pages that hold them. Not of a sequence that is swapped.
    SequenceId fork(SequenceId sequence);
    // Forgets all tokens but the first `length`, and gives back pages that are no longer needed.
    void truncate(SequenceId sequence, int64_t length);
    void end(SequenceId sequence);
    // All pages of these sequences to the host, or back. False, and nothing has changed, if there are too few pages
    // there. A page that several sequences share is one page on the host, too; what is reserved is given back.
    bool swap_out(std::span<const SequenceId> sequences);
    bool swap_in(std::span<const SequenceId> sequences);
    int64_t swap_in_pages_wanted(std::span<const SequenceId> sequences) const;
    bool is_swapped(SequenceId sequence) const;

    int64_t length(SequenceId sequence) const;                          // tokens
    const std::vector<int32_t>& page_table(SequenceId sequence) const;  // of the device; not while it is swapped
    // Copies that have to be made, in this order, before the next step writes or reads any page.
    std::vector<PageCopy> take_copies();
    CacheUse use() const;
    bool is_kept(int32_t page) const;  // of no sequence, but it may be found again
    const CacheSizes& sizes() const { return sizes_; }
    // For tests: Error if a count, a list or a table contradicts another.
    void check_consistency() const;

  private:
    CacheSizes sizes_;
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// ---------------------------------------------------------------------------------------------------------------------
// sampling.cu: how a request chooses its next token from the logits x (V)
//
// In this order, each step skipped where its option has its default:
//   1. logit_bias      x[v] += bias
//   2. penalties       of tokens v seen before:             (OpenAI; repetition: Keskar et al. 2019, arXiv:1909.05858,
//                                                            who divide x below 0, too; transformers multiplies it)
//        repetition    x[v] = x[v] > 0 ? x[v] / repetition : x[v] * repetition     v in the prompt or the answer
//        presence      x[v] -= presence                               v in the answer
//        frequency     x[v] -= frequency * (times v is in the answer)
//   3. temperature     x = x / temperature; 0: the largest x, the first of equals (greedy), and nothing below applies
//   4. top_k           only the k largest                             (and all that equal the k-th)
//   5. top_p           of these, with p = softmax(x): the fewest largest whose p add up to at least top_p
//                      (and all that equal the last of them)          (Holtzman et al. 2020, arXiv:1904.09751)
//   6. min_p           only those with p[v] >= min_p * largest p      (Nguyen et al. 2024, arXiv:2407.01082)
//   7. the token       drawn with p of what is left, by a random number of each token: Philox of (seed, which sample,
//                      position, token), so that the text of a request does not depend on what else runs. (layers.h)
using LogitBias = std::vector<std::pair<int32_t, double>>;  // (token, what its logit gains)
struct SamplingOptions {
    double temperature = 1.0;
    int64_t top_k = 0;  // 0: all
    double top_p = 1.0, min_p = 0.0;
    double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
    LogitBias logit_bias;  // -100 to 100, or -infinity, which bans a token; of a token named twice the sum
    uint64_t seed = 0;
    int64_t logprobs = -1;  // how many of the most probable tokens to report with their log-probabilities; -1: none,
                            // 0: that of the chosen token alone. By the model's logits, before steps 1 to 7.
};
// Its numbers: of each the name that requests know (min_p; the flag is --min-p), the range, and what --help says.
struct SamplingNumber {
    std::string name;
    double SamplingOptions::*value;
    bool (*is_valid)(double x);
    std::string range, help;
};
const std::vector<SamplingNumber>& sampling_numbers();
constexpr int64_t kMostTop = 64;       // a row's most probable tokens that a Sampler finds: as many as beams may need
constexpr int64_t kMostLogprobs = 20;  // of them, those that a request can have: OpenAI's limit
void check_sampling(const SamplingOptions& options, int64_t V);  // Error: an option and its range, or V

struct TokenLogprob {
    int32_t token;
    float logprob;
};
struct Sampled {
    int32_t token = -1;             // or the given one; -1: the logits are not finite, or logit_bias bans every token
    float logprob = 0;              // of the chosen token, if logprobs >= 0
    std::vector<TokenLogprob> top;  // descending; of equals the smaller id first; logprobs of them, or V
};

// The rows of one step that draw a token.
struct SamplingRow {
    const SamplingOptions* options = nullptr;
    uint64_t sample = 0;                                // which of the samples of a request
    int64_t position = 0;                               // of the token that is drawn
    std::span<const int32_t> prompt = {}, answer = {};  // tokens seen before; read only where there are penalties
    int32_t given = -1;                                 // the token, which is known: its log-probability is wanted
};
// Device memory for sampling up to max_rows rows of V logits at a time; taken like all memory (core.h: Arena). A row's
// token is the same bits whatever the other rows are.
class Sampler {
  public:
    void take_memory(int64_t max_rows, int64_t V, Arena& device, Arena& pinned);
    // logits (rows, V_padded) of any float type, not changed. Waits for the result.
    std::vector<Sampled> draw(Tensor logits, std::span<const SamplingRow> rows, cudaStream_t stream);

  private:
    size_t most_adjustments(const SamplingRow& row) const;
    void add_rule(const SamplingRow& row);
    void launch(Tensor logits, cudaStream_t stream);
    Sampled result(size_t row) const;

    int64_t V_ = 0, max_rows_ = 0;
    // Of the next launch: a rule a row, adjustments of single logits, the largest n_top.
    std::vector<SamplingRule> rules_;
    std::vector<LogitAdjustment> adjustments_;
    int64_t n_top_ = -1;
    std::vector<int32_t> places_;  // (V): where the adjustment of a token of the row at work is, or -1
    Tensor host_tables_, tables_;  // rules, adjustments
    Tensor x_, distributions_;     // (max_rows, ...)
    Tensor results_;               // pinned: kernels write them, the host reads them
};

// ---------------------------------------------------------------------------------------------------------------------
// token_fields.cu: what names tokens has one form for flags, for the lines of --batch, and for the server's completions

class JsonText;  // io/json.h
// "13:-100,25:2.5" of a flag, {"13": -100, "25": 2.5} of JSON. Error for another form; the ranges: check_sampling.
LogitBias parse_logit_bias(const std::string& flag, const std::string& text);
LogitBias read_logit_bias(const Json::Value& value);
// Where the tokens of an answer stand in its text: the characters before each of them, as JSON has them (a broken one
// is one U+FFFD). A token that begins inside of a character stands where this character does.
struct TextRequest;
class TextOffsets {
  public:
    // echo: the text begins with this text of the prompt, whose tokens come first. Those that this text lacks, as
    // <|begin_of_text|>, stand at 0.
    TextOffsets(const Tokenizer& tokenizer, const TextRequest& request, const std::string* echo = nullptr);
    int64_t next(int32_t token);

  private:
    bool has_text(int32_t token) const;
    const Tokenizer* tokenizer_;
    bool skips_special_;
    DecodeState state_, after_prompt_;  // the latter where the answer begins
    size_t n_echoed_ = 0;               // of the prompt's tokens: to come
    std::string last_;                  // the text's last character, which the next token may go on with
    int64_t offset_ = 0;                // where it begins
};

// OpenAI's {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of an answer's next tokens. A token that is
// kUnscored begins the text, and has null in place of numbers.
JsonText logprobs_json(const Tokenizer& tokenizer, std::span<const Sampled> tokens, TextOffsets& offsets);
// The same for people: a line for each token.
std::string logprobs_table(const Tokenizer& tokenizer, std::span<const Sampled> tokens);
std::vector<int32_t> ids_of(std::span<const Sampled> tokens);
// A token's text; nothing for an id that the tokenizer does not have: vocabularies may be rounded up.
std::optional<std::string> text_of(const Tokenizer& tokenizer, int32_t token, bool begins_text = false);
std::string text_of_tokens(const Tokenizer& tokenizer, std::vector<int32_t> tokens);  // such ids add no text

// ---------------------------------------------------------------------------------------------------------------------
// speculation.cu: several tokens of a sequence in one step
//
// The next k tokens are proposed at little cost: by a small model (--draft), or by the text itself (--lookup). One step
// of the model computes the logits after each of them, and a token is drawn from each, as always (each row with the
// proposed tokens before it in `answer`). As long as the drawn tokens equal the proposed ones they are the text. The
// first that differs is the text too, since all before it are; what follows it is forgotten. So a step gains from 1 to
// k + 1 tokens, and the text is the same tokens as without speculation, greedy or drawn: proposals change only
// its speed.
//
// What a proposal has to guess is the token that the model draws with random numbers that are known. A draft model with
// distribution q draws its proposal with the same numbers, one for each token (layers/draw_tokens.cu), and so finds the
// token that the model draws from p with probability
//
//   sum over v of 1 / (sum over w of max(p[w] / p[v], q[w] / q[v]))  >=  (1 - D) / (1 + D),    D = sum of |p - q| / 2
//                                                                 (Daliri, Musco & Suresh 2025, arXiv:2408.07978)
// The usual way accepts a proposal with probability min(1, p / q), and else draws from max(0, p - q): 1 - D, as often
// as any way can. (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.) But with it a token
// depends on whether there was room in its step to verify a proposal: the text has the same distribution, and not the
// same tokens whatever runs beside it.

// How many of the drawn tokens the text gains. drawn[i] stands after the first i proposed tokens; one more than those.
size_t tokens_gained(std::span<const int32_t> proposed, std::span<const Sampled> drawn);

// Proposes what followed the last time that the text had the same last three, two, or else one tokens.
class PromptLookup {
  public:
    // k tokens: what followed, and where that reaches the end of the text, the proposal itself (a text that repeats
    // itself goes on repeating itself). None if the last token is new. `tokens`, the whole text, begins with the tokens
    // of the call before: each token is read once.
    std::vector<int32_t> propose(std::span<const int32_t> tokens, int64_t k);

  private:
    std::unordered_map<uint64_t, size_t> followers_;  // of n tokens, packed: the place after their last occurrence
    size_t n_read_ = 0;                               // tokens whose predecessors are in followers_
};

// ---------------------------------------------------------------------------------------------------------------------
// beam_search.cu: the answers with the largest probability, as far as k beams find them; as transformers does it
//
// Each of k beams is an answer so far with score = the sum of its tokens' log-probabilities. A step joins every beam
// with each of its next tokens and orders all of these by score. Of the first k those that end (with a stop token, or
// because max_tokens is reached) are answers, with score / (number of tokens)^length_penalty; the k best answers are
// kept. The first k that do not end are the next beams.
struct BeamOptions {
    int64_t n_beams = 4;
    double length_penalty = 1.0;  // above 0 long answers gain, below 0 short ones
    int64_t max_tokens = 16;      // of an answer, with its stop token
    std::vector<int32_t> stop_tokens = {};
    // When to stop: as soon as there are k answers; when the best beam, at its length now, would be no better than the
    // worst of k answers (heuristic); when no beam can become better any more (never early).
    enum class EarlyStopping { yes, heuristic, never } early_stopping = EarlyStopping::heuristic;
};
struct BeamAnswer {
    std::vector<int32_t> tokens;
    double score = 0;
};
class BeamSearch {
  public:
    struct Beam {
        size_t parent = 0;  // which of the beams before it continues
        BeamAnswer answer;  // so far
    };
    explicit BeamSearch(const BeamOptions& options);  // Error for what is out of range, as n_tokens() over kMostTop
    // How many of its most probable tokens (SamplingOptions::logprobs) step() needs of each beam: with k of them that
    // are no stop tokens there are k next beams.
    int64_t n_tokens() const;
    // top[i] belongs to beams()[i]; in the beginning there is one, the prompt. Of equal scores the earlier beam comes
    // first, then the token that stands earlier in top.
    void step(std::span<const std::vector<TokenLogprob>> top);
    const std::vector<Beam>& beams() const { return beams_; }            // none: the search has ended
    const std::vector<BeamAnswer>& answers() const { return answers_; }  // descending by score

  private:
    bool can_improve() const;

    BeamOptions options_;
    std::vector<Beam> beams_{Beam{}};
    std::vector<BeamAnswer> answers_;
};

// ---------------------------------------------------------------------------------------------------------------------
// scheduler.cu: which tokens the next step computes                (Yu et al. 2022, Orca; Agrawal et al. 2023, Sarathi)

enum class Batching { continuous, static_batches };
enum class Preemption { swap, recompute };
struct SchedulerOptions {
    int64_t step_tokens = 512;   // at most this many tokens a step, of prompts and of answers together
    int64_t max_sequences = 64;  // at most this many at a time
    int64_t max_length = 0;      // prompt and answer: positions that the model has
    Batching batching = Batching::continuous;
    Preemption preemption = Preemption::recompute;
    // To one prompt: all of them are in a step together.
    int64_t most_answers() const { return std::min(max_sequences, step_tokens); }
};

// A sequence of tokens: prompt and answer. A request has as many as it wants samples (or beams).
struct Sequence {
    uint64_t sample = 0;          // which of its request's
    std::vector<int32_t> tokens;  // prompt and answer
    // Speculative decoding: tokens that may follow. The next step computes them too, and draws a token after each.
    // next_step() removes those for which there is no room: in the step, in max_tokens, or in the pages.
    std::vector<int32_t> draft;
    std::optional<SequenceId> cached;  // in the cache: while its request runs, or is swapped out
    int64_t computed_n = 0;            // tokens whose rows are in the cache
};

struct Request {
    int64_t id = 0;
    std::vector<int32_t> prompt;
    int64_t max_tokens = 16;  // of the answer
    int64_t n = 1;            // answers
    SamplingOptions sampling;
    std::vector<int32_t> stop_tokens;  // the answer ends before one of these
    // Beam search: n is the number of beams, and the answers come all at once (Engine::beams_ended).
    std::optional<BeamOptions> beams;
    // The prompt's tokens are wanted with their log-probabilities, too (sampling.logprobs of them at each place): all
    // but the first, which has none, in order, as far as they are computed. No beams then. Until all of them are scored
    // no pages of other sequences are taken over: their rows were computed without logits.
    bool scores_prompt = false;
    std::vector<Sampled> scored;
    // Made by Scheduler: add() makes one, and fork() others when the prompt is computed; drop() takes away those that
    // are finished. Before a step there are 1 to n. Whoever draws a token adds it to tokens: the scheduler changes only
    // cached, computed_n and draft.
    std::vector<std::unique_ptr<Sequence>> sequences;
    int64_t ended_tokens = 0;  // of answers that have ended; without beams
};

// Rows [first, first + n) of a sequence (tokens, then draft), computed in the next step. The last n_logits of them want
// their logits: the first n_scored of these are a prompt's, for the log-probabilities of its next tokens. From each of
// the other n_drawn() a token is drawn: there are none while some of the sequence's tokens are still to be computed,
// otherwise one, and one more for each draft token.
struct StepPart {
    Request* request;
    Sequence* sequence;
    int64_t first, n, n_logits, n_scored;
    int64_t n_drawn() const { return n_logits - n_scored; }
};

// First come, first served, at every step anew:
//   1. the requests that run, in the order in which they came: one row for each sequence;
//   2. with what is left of step_tokens: the next piece of the prompts that are not yet computed, the oldest first;
//   3. with what is left: requests that were preempted or wait, the oldest first, as long as there are places for their
//      answers (max_sequences), and pages for all of their tokens and for those that run to grow. No request passes one
//      that came before it: the first that waits for pages gets the next ones;
//   4. with what is left: drafts.
// If step 1 or 2 finds no page, the request that came last gives its pages up (preemption): they are copied to the
// host (Preemption::swap, if the host has enough pages), or forgotten and computed again later, the answer so far
// included. If the one that finds no page came last itself, it keeps what it has and waits. So the oldest request is
// never preempted, add() has made sure that all pages are enough for it alone, and no request waits for ever.
//
// The sequences of a request draw their tokens in the same steps, all or none of them (beams are compared).
//
// Logits are large. A step has those of max_sequences rows, and of the drafts: enough for all that draw a token. Of a
// prompt whose log-probabilities are wanted each row needs some: a piece of it is as long as the others leave logits.
//
// static_batches: as before continuous batching: step 3 only when nothing runs.
class Scheduler {
  public:
    Scheduler(const SchedulerOptions& options, PagedCache& cache);
    // After those that wait. Error, in one line, if it can never run: longer than max_length, or than all pages.
    void add(Request& request);
    // Finished or cancelled, in whatever state: its pages are free for the next step.
    void remove(Request& request);
    // The parts of the next step, their rows reserved and appended in the cache; empty if there is nothing to compute.
    // cache.take_copies() has what to copy before. computed_n counts the rows already: the step is going to happen.
    // A part may read rows that another part of the same step computes: two prompts that begin alike share pages at
    // once. But a row that is the only one of its part is read by no other part.
    std::vector<StepPart> next_step();
    // A new sequence of the request, with the tokens and pages of `parent`, which must have been in the last step.
    Sequence& fork(Request& request, const Sequence& parent);
    void drop(Request& request, const Sequence& sequence);  // removed from request.sequences, with its pages
    // The request that came last gives its pages up, as where pages run out; false: none runs.
    bool preempt_last();
    // After tokens were taken off a sequence (rejected drafts): the cache forgets their rows.
    void truncate(Sequence& sequence, int64_t length);

    int64_t n_running() const;
    int64_t n_waiting() const;  // or swapped out
    // Did the last step have too few places or pages for the first that waits, and has nobody left since?
    bool is_full() const { return is_full_; }
    int64_t n_preemptions() const { return n_preemptions_; }
    const SchedulerOptions& options() const { return options_; }

  private:
    SchedulerOptions options_;
    PagedCache& cache_;
    struct Step;
    void add_decode(Step& step, Request& request);
    void add_prompt(Step& step, Request& request);
    bool add_rows(Step& step, Request& request, Sequence& sequence, int64_t n);
    void add_draft(Step& step, StepPart& part);
    void append(Step& step, size_t first, bool single);
    bool admit(Request& request);
    void start(const Request& request, Sequence& sequence);
    void start_sequences(Request& request);
    void forget(Request& request);
    std::deque<Request*> requests_;  // in the order in which they came; the first n_running_ of them run
    size_t n_running_ = 0;
    bool is_full_ = false;
    int64_t n_preemptions_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// cache_report.cu: what the memory was used for                                            (Kwon et al. 2023, figure 2)
//
// Allocated rows hold tokens, or are reserved (for tokens that the sequence is going to have), or are internal
// fragmentation (nobody will ever need them). Memory in pieces too small to be allocated is external fragmentation.
// Beside what the pages were used for is what the same sequences would have made of contiguous slots of max_length
// rows, each held from a sequence's first token to its last.
class CacheReport {
  public:
    CacheReport(const CacheSizes& sizes, int64_t max_length);
    void step(const CacheUse& use);                              // in each step, when its rows are reserved
    void finished(int64_t prompt_tokens, int64_t drawn_tokens);  // for each sequence; a stop token was drawn, too
    // Averages over all steps; the four add up to 1.
    struct Shares {
        double tokens = 0, reserved = 0, internal = 0, external = 0;
    };
    Shares paged() const;                           // of owned pages; what a page has after its tokens is internal
    Shares contiguous() const;                      // of the whole pool, cut into slots that are all taken
    std::string text() const;                       // four lines; one if there was no step
    void write_png(const std::string& path) const;  // both as bars, and the pool over the steps

  private:
    CacheSizes sizes_;
    int64_t max_length_;
    int64_t n_steps_ = 0;
    CacheUse sum_;                                                // over all steps
    double slot_tokens_ = 0, slot_reserved_ = 0, slot_rows_ = 0;  // over all steps of all slots
    std::vector<CacheUse> history_;  // every stride_-th step; when there are too many, every second is dropped
    int64_t stride_ = 1;
};

// ---------------------------------------------------------------------------------------------------------------------
// timeline.cu: a row for each request, a column for each step, coloured by what the request does in the step

class Timeline {
  public:
    void arrive(int64_t request);                // it is there from the next step on
    void step(std::span<const StepPart> parts);  // what the next step computes
    void leave(int64_t request);                 // finished or cancelled: not there in the next step
    int64_t n_steps() const { return n_steps_; }
    // A line for each request, a letter for each step: "." waits, "p" prefill, "d" decode, "-" interrupted.
    std::string text() const;

  private:
    friend struct TimelinePanel;
    // interrupted: it began, and is not in this step: preempted, or there is no room for it.
    enum class State : uint8_t { waiting, prefill, decode, interrupted };
    struct Row {
        int64_t first_step;
        std::vector<State> states;  // of the steps from first_step on
    };
    std::vector<Row> rows_;                       // in the order of arrival
    std::unordered_map<int64_t, size_t> row_of_;  // of the requests that are there
    int64_t n_steps_ = 0;
};
// One below the other, with steps of one width, each under its title: static batching beside continuous batching.
void write_timelines_png(const std::string& path, std::span<const std::pair<std::string, Timeline>> all);

// ---------------------------------------------------------------------------------------------------------------------
// paged_model.cu: a model over a cache in pages: the forward of some tokens of many sequences

// Tokens of a sequence, from position `first` on, in rows that were reserved and appended.
struct CachedRows {
    SequenceId sequence;
    int64_t first;
    std::vector<int32_t> tokens;
    int64_t n_logits = 0;  // the logits after the last n_logits of them are wanted,
    int64_t times = 1;     // those after the last one this many times: of tokens a and b in rows a, b, b, ...
};

// step_graphs.cu: launches that are the same in every step of the same sizes are captured, and from then on launched as
// one CUDA graph. What is captured has to lie at fixed addresses, and must not wait for the device. The graphs' memory
// is the driver's, and in no plan.
class StepGraphs {
  public:
    using Key = std::array<int64_t, 2>;
    StepGraphs() = default;
    StepGraphs(const StepGraphs&) = delete;
    ~StepGraphs();
    // Calls `launches`, which put work on the stream; from the second time on that a key is seen, as a graph.
    void run(const Key& key, cudaStream_t stream, const std::function<void()>& launches);
    int64_t n_launches() const { return n_launches_; }  // of graphs
    size_t n_nodes() const { return n_nodes_; }         // kernels and copies of the last one

  private:
    struct Graph {
        cudaGraphExec_t exec = nullptr;
        size_t n_nodes = 0;
    };
    std::map<Key, Graph> graphs_;
    int64_t n_launches_ = 0;
    size_t n_nodes_ = 0;
};

// Steps of single tokens, each of a sequence of its own, need only a few graphs: their rows are rounded up to 1, 2, 4
// or a multiple of 8, and the longest page table to a power of two, neither beyond the largest step. The rows that this
// adds repeat the last one, and write what it writes to the cache: the same bits.
class PagedModel {
  public:
    // The model must outlive this. graphs: steps that decode are launched as graphs; not where ranks divide the model.
    // ranks: those that divide the model, where one of them has the sequences: see followers.cu.
    PagedModel(const Model& model, const CacheSizes& sizes, bool graphs, Comm* ranks = nullptr);
    // For steps of at most these sizes. cache_dtype: e4m3, or the model's, which is the default.
    void take_memory(const StepSizes& largest, std::optional<DType> cache_dtype, Arena& cache_arena, Arena& activations,
                     Arena& pinned);
    // The copies that the cache wants, and the forward: logits (all that are wanted, padded V), in the order of `rows`.
    // They are there until the next call, before which somebody has to have waited for them.
    Tensor forward(std::span<const CachedRows> rows);
    // followers.cu: with `ranks` forward() is rank 0's alone. The other ranks compute its steps with it, here, until
    // rank 0 calls end_followers(). Their caches have no sequences: pages are where rank 0's tables say.
    void follow();
    void end_followers();
    const Config& config() const { return model_.config; }
    const StepGraphs& graphs() const { return graphs_; }

    PagedCache cache;

  private:
    // What the host tells the device of a step: filled in pinned memory, then copied.
    struct Tables {
        Tensor tokens, positions, cache_rows, page_table, chunks, logit_rows;
    };
    void copy_pages(std::span<const PageCopy> copies);
    StepSizes fill_tables(std::span<const CachedRows> rows, bool rounded);
    void repeat_last_row(StepSizes& sizes);
    std::vector<Tensor> filled_tables(const StepSizes& sizes) const;
    void launch(const StepSizes& sizes);
    Tensor compute(const StepSizes& sizes, bool as_graph);
    void tell_step(std::span<const PageCopy> copies, const StepSizes& sizes);

    const Model& model_;
    const bool with_graphs_;
    Comm* const ranks_;
    StepGraphs graphs_;
    StepSizes largest_;
    CachePools pools_, host_pools_;
    Activations acts_;
    Workspace workspace_;
    Tables tables_;
};

// ---------------------------------------------------------------------------------------------------------------------
// engine.cu: one step after the other: the scheduler's parts, the forward over the cache, the tokens drawn

struct EngineOptions {
    CacheSizes cache;                  // n_pages 0: as many as max_sequences of max_length need
    std::optional<DType> cache_dtype;  // e4m3, or the model's, which is the default
    SchedulerOptions scheduler;        // max_length 0: all positions of the model (longest_sequence)
    int64_t lookup = 0;                // this many tokens of a sequence are proposed by prompt look-up; 0: none
    int64_t draft_tokens = 4;          // this many by the draft model, where there is one
    std::optional<bool> graphs;        // launch steps as CUDA graphs; default: on a GPU
    Comm* ranks = nullptr;             // that divide the model: rank 0 has the requests, the others follow()
};
// The max_length of an engine: `wanted`, or where that is 0, all positions that the model was trained for. Error where
// the model, or the draft model if there is one, has fewer positions than that.
int64_t longest_sequence(const Config& config, const Config* draft, int64_t wanted);

// draft_model.cu: proposes the next tokens of answers, over a cache of its own with as many pages as the engine's.
class DraftModel {
  public:
    // options: the engine's, with all sizes settled. The model must outlive this.
    DraftModel(const Model& model, const EngineOptions& options);
    void take_memory(StepSizes largest, Arena& cache, Arena& activations, Arena& pinned);
    struct Drafted {  // a sequence that draws a token in the next step, of which all rows but the last are computed
        const Request* request;
        Sequence* sequence;
    };
    // Fills in the drafts, which are empty: up to draft_tokens, and no more than the answer can have. Sequences that
    // are not among these are forgotten.
    void propose(std::vector<Drafted> drafted);
    const PagedCache& cache() const { return model_.cache; }
    const StepGraphs& graphs() const { return model_.graphs(); }

  private:
    struct Text {
        std::optional<SequenceId> cached;
        std::vector<int32_t> tokens;  // the sequence's, then what is proposed; the first of them are in the cache
        int64_t wanted = 0;           // proposals, beside those that there are
    };
    static CacheSizes of_device(CacheSizes sizes);
    void bring_up_to_date(std::span<const Drafted> drafted);
    std::optional<CachedRows> next_rows(Text& text, int64_t room);
    void small_step(std::span<const Drafted> drafted);

    EngineOptions options_;
    PagedModel model_;
    Sampler sampler_;
    std::unordered_map<const Sequence*, Text> texts_;
};

// What speculation gained.
struct SpeculationCount {
    int64_t proposed = 0, accepted = 0;  // tokens that were computed after a text, and those that were drawn then
    int64_t steps = 0;                   // in which an answer drew a token that was not its first, for each answer
    std::string text() const;            // for people; "" where nothing was proposed
};

// A step is the same whatever its requests want: rows of tokens through the model, then a token for each row that is
// the last of its sequence. Nothing in the logits of a row depends on the other rows, so the text of a request is the
// same alone and among others, however its prompt was cut, and whether it was preempted or shares pages.
class Engine {
  public:
    // The models must outlive the engine, and have been built for at least max_length positions. Error where the draft
    // model has another vocabulary.
    Engine(const Model& model, const EngineOptions& options, const Model* draft = nullptr);
    // Everything the engine needs, taken twice like all memory (core.h: Arena). pinned: of the host.
    void take_memory(Arena& cache, Arena& activations, Arena& pinned);

    // Called for each token of an answer, in order; the sequence holds it already. False ends this answer.
    // The callbacks must call neither add() nor cancel().
    std::function<bool(Request& request, Sequence& sequence, const Sampled& token)> token_ready;
    // An answer ends after token_ready's false or before a stop token ("stop"), at max_tokens ("length"), or where the
    // logits are not finite ("error"). Nothing of it is used by the engine any more; of the request neither, when its
    // last answer has ended.
    std::function<void(Request& request, uint64_t sample, const char* reason)> answer_ended;

    // The answers of a beam search, the best first; none where the logits are not finite. Nothing of the request is
    // used by the engine any more.
    std::function<void(Request& request, const std::vector<BeamAnswer>& answers)> beams_ended;
    // The request stays where it is until all its answers have ended.
    void add(Request& request);
    void cancel(Request& request);  // as if it had never come: answer_ended is not called
    // False: nothing runs or waits, and nothing was done. Collective where the model's weights are sharded.
    bool step();
    // With options.ranks: what the others do while rank 0 makes steps, and how it ends that.
    void follow() { model_.follow(); }
    void end_followers() { model_.end_followers(); }

    int64_t vocabulary() const { return model_.config().V; }
    const PagedCache& cache() const { return model_.cache; }
    const DraftModel* draft() const { return draft_ ? &*draft_ : nullptr; }
    const Scheduler& scheduler() const { return scheduler_; }
    const EngineOptions& options() const { return options_; }
    int64_t n_steps() const { return n_steps_; }
    const SpeculationCount& speculation() const { return speculation_; }
    const StepGraphs& graphs() const { return model_.graphs(); }
    StepSizes largest_step() const;
    void preempt_all() {
        while (scheduler_.preempt_last()) {
        }
    }  // for tests: between two steps, all give their pages up

    // Reports begin anew. The timeline is kept only where it is asked for: it grows with each step.
    void start_reports(bool with_timeline);
    const CacheReport& cache_report() const { return cache_report_; }
    const Timeline& timeline() const { return timeline_; }  // requests are told apart by their id

  private:
    // Tokens to be drawn from neighbouring rows of logits: one, and one after each token of the draft. Of an answer
    // that runs, or the first token of a new one, of which `sequence` is the parent. Or tokens of the prompt, which are
    // given: the next ones after request.scored.
    struct Draw {
        Request* request;
        Sequence* sequence;
        uint64_t sample;
        int64_t n;
        bool of_prompt = false;
    };
    void propose_drafts();
    std::vector<CachedRows> rows_of(std::span<const StepPart> parts);
    std::vector<Sampled> draw_tokens(const Tensor& logits);
    void deliver(std::span<const Sampled> drawn);
    bool give(Request& request, Sequence& sequence, const Sampled& token);  // false: the answer has ended
    void end_answer(Request& request, Sequence& sequence, const char* reason);
    void end_request(Request& request);
    void advance_beams(Request& request, std::span<const Sampled> drawn);

    EngineOptions options_;
    PagedModel model_;
    Scheduler scheduler_;
    Sampler sampler_;
    std::optional<DraftModel> draft_;
    std::vector<Draw> draws_;         // of the step that runs
    std::vector<Request*> requests_;  // that have come and not ended
    std::unordered_map<const Sequence*, PromptLookup> lookups_;
    std::unordered_map<const Request*, BeamSearch> searches_;
    SpeculationCount speculation_;
    int64_t n_steps_ = 0;
    CacheReport cache_report_;
    Timeline timeline_;
    bool with_timeline_ = false;
};

// ---------------------------------------------------------------------------------------------------------------------
// requests.cu: text instead of tokens: pieces of answers as they come, stop strings, several answers of a prompt

// The log-probability of a prompt's first token, which no logits stand before.
constexpr float kUnscored = std::numeric_limits<float>::quiet_NaN();
struct AnswerPiece {
    uint64_t sample = 0;                  // which answer of the request
    std::string text;                     // whole characters, and none that a stop string may begin with
    std::vector<Sampled> tokens;          // since the last piece; their text may come with a later one
    std::vector<Sampled> prompt;          // in an answer's first piece, with scores_prompt; the first is kUnscored
    const char* finish_reason = nullptr;  // of the last piece: "stop", "length", or "error" (logits are not finite)
    bool is_error() const { return finish_reason != nullptr && std::string_view(finish_reason) == "error"; }
};
void print_text(const std::string& text);  // to standard output, with zero bytes, where printf would end
constexpr const char* kNotFinite =
    "the model's logits are not finite: its weights may be damaged, or their products too large for --dtype";

struct TextRequest {
    std::vector<int32_t> prompt;
    int64_t max_tokens = 16, n = 1;  // 0 tokens: nothing but the prompt's log-probabilities
    SamplingOptions sampling;
    bool scores_prompt = false;        // the prompt's tokens with their log-probabilities, too
    bool skip_special_tokens = true;   // the answer's text is without them; its tokens and log-probabilities have them
    std::vector<std::string> stop;     // the answer ends before the first of these
    std::vector<int32_t> stop_tokens;  // likewise
    std::optional<BeamOptions> beams;  // the n best answers of this search, in one piece each, without `stop`
    std::function<void(const AnswerPiece& piece)> ready;  // called for each piece, in order; it must not call add()
};

// The stop strings that are a special token, where the text is without those: they are stop tokens, too. Error for one
// that has a special token and more: no such text has it.
std::vector<int32_t> special_stops(const Tokenizer& tokenizer, const TextRequest& request);

class Requests {
  public:
    // Takes the engine's token_ready, answer_ended and beams_ended.
    Requests(Engine& engine, const Tokenizer& tokenizer);
    ~Requests();
    // Error, in one line, for what the model cannot do: a prompt that is empty or too long, an unknown token; and for a
    // stop string that the text cannot have.
    int64_t add(TextRequest request);
    void cancel(int64_t id);  // nothing more is heard of it; ids of requests that have ended are ignored
    bool step() { return engine_.step(); }
    std::vector<const Request*> unfinished() const;  // those that run and those that wait, in the order of their ids
    const Engine& engine() const { return engine_; }

  private:
    struct Answer;
    struct Running;
    Running& running(const Request& request);
    Engine& engine_;
    const Tokenizer& tokenizer_;
    int64_t n_requests_ = 0;
    std::map<int64_t, std::unique_ptr<Running>> running_;
};

// ---------------------------------------------------------------------------------------------------------------------
// loaded_model.cu: a model that only computes: its weights on the device, and what lies beside them in its folder

// Weights, as a folder has them. format: of those of the blocks' linear layers.
struct LoadedWeights {
    std::string folder;
    Config config;
    Model model;
    std::shared_ptr<const Tokenizer> tokenizer;
    bool is_text = true;  // false: it was trained on token ids, without a tokenizer
    Arena weights{"weights"};

    // Reads config.json and the tokenizer. folder: find_model_folder's (model/model.h). tokenizer: a tokenizer.json or
    // its folder, in place of that beside the model; "": that.
    LoadedWeights(const std::string& folder, const std::string& tokenizer, DType dtype, WeightFormat format);
    void take_memory(int64_t max_length);  // twice, like all memory; the second time the weights are read
    void reserve();                        // between the two
    void expect_text() const;              // Error without a tokenizer

    std::unique_ptr<TensorParallel> tensor_parallel;
    // On the host, while the weights are read; asked for before.
    size_t bytes_before_quantised() const { return unquantised_ ? unquantised_->bytes() : 0; }

  private:
    Arena gradients_{"gradients"}, masters_{"master weights"};  // counted, and never taken
    std::unique_ptr<Arena> unquantised_;                        // of the host, while the weights are read
    DType dtype_;
    WeightFormat format_;
};

struct LoadedModel : LoadedWeights {
    std::unique_ptr<LoadedWeights> draft;
    std::vector<int32_t> stop_tokens;  // eos_token_id of generation_config.json, or else of config.json
    Arena cache{"cache"}, activations{"activations"}, pinned{"on the host", MemoryKind::pinned};  // the draft's, too
    std::unique_ptr<Engine> engine;
    size_t device_bytes();  // planned, with cuBLASLt's workspace

    // Counts the memory. draft_folder: of a draft model, or ""; Error where its tokens are not the model's.
    // options.ranks: they divide the model; Error where it cannot be divided among that many.
    LoadedModel(const std::string& folder, const std::string& tokenizer, DType dtype, WeightFormat format,
                const EngineOptions& options, const std::string& draft_folder = "");
    void load();  // takes the memory, and reads the weights. Error where it is more than the device has

  private:
    void take_weights();
    void take_beside(Engine& its, Arena& its_cache, Arena& its_activations, Arena& its_pinned);
    // Enough for all sequences at full length, or as many as there is free memory for besides the rest; 1 at least.
    int64_t pages_that_fit();
    EngineOptions options_;
};

// ---------------------------------------------------------------------------------------------------------------------
// options.cu: the command line of generate

struct ServerOptions {
    std::string host = "127.0.0.1";
    int64_t port = 8000;           // 0: one that is free
    std::string api_key;           // "": none is asked for
    int64_t max_waiting = 256;     // requests that wait for room; more are refused
    int64_t max_body = 4 << 20;    // bytes of a request
    double client_timeout = 20;    // seconds to send a request, or to take what was sent of the answer
    double request_timeout = 600;  // seconds from a request to the end of its answer
};

struct GenerateOptions {
    std::string model;  // "": that of the newest run
    std::string draft;  // "": none
    std::string tokenizer, prompt, prompt_ids, batch, out, pictures, eval;
    std::string chat_template, system;  // of a conversation
    bool chat = false, serve = false, plan = false, ids = false;
    ServerOptions server;
    DType dtype = DType::f32;
    WeightFormat weights = WeightFormat::none;
    int64_t tp = 1;
    int64_t tokens = 256, samples = 1, beams = 0;
    double length_penalty = 1.0;
    SamplingOptions sampling;
    bool has_seed = false;  // --seed was given: otherwise a server draws one for each request
    std::vector<std::string> stop;
    bool ignore_eos = false, show_special_tokens = false;
    EngineOptions engine;
};
GenerateOptions parse_generate_options(int argc, char** argv);
// A request as the flags say, without its prompt; and the tokens of a prompt, with those that the tokenizer puts around
// it. Error for a model without a tokenizer.
TextRequest text_request(const GenerateOptions& options, const LoadedModel& model);
std::vector<int32_t> encode_prompt(const LoadedModel& model, const std::string& text);

// ---------------------------------------------------------------------------------------------------------------------
// batch_file.cu: --batch prompts.jsonl --out answers.jsonl. A line of the one is a request, a line of the other its
// answer, written when it is complete, in the order in which they end. Lines of `out` that are there already are not
// computed again, so that a batch that was stopped continues where it was. Lines that are not requests: on stderr.
//
//   {"id": 7, "prompt": "..."}   also "prompt_ids" instead of "prompt"; "tokens", "temperature", "top_k", "top_p",
//                                "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
//                                "samples", "stop", "logit_bias", "logprobs", as the flags, which are their defaults;
//                                "stop_token_ids": ids that end an answer and are not part of it;
//                                "prompt_logprobs": true, with "logprobs": those of the prompt's tokens, too, and then
//                                "tokens" may be 0. No two ids are the same.
//   {"id": 7, "text": "...", "ids": [..], "finish_reason": "stop"}       several samples: a line each, with "sample"
//                                                                        and "samples", how many there are; where
//                                                                        wanted, "logprobs" and "prompt_logprobs"
//
// One process writes `out` at a time.
struct BatchCount {
    int64_t done_before = 0, done = 0, refused = 0, failed = 0, tokens = 0, prompt_tokens = 0;
};
// Opens both files; needs no weights. Error where one cannot be used, or another process writes `out`; a file there
// that no batch has written stays as it is.
struct BatchFiles;
std::shared_ptr<BatchFiles> open_batch(const GenerateOptions& options);
BatchCount run_batch(LoadedModel& model, Requests& requests, const GenerateOptions& options, BatchFiles& files);

// ---------------------------------------------------------------------------------------------------------------------
// chat_template.cu: a conversation as the text that a model was trained on

struct ChatMessage {
    // "system" (at most one, the first), then "user" and "assistant", alternating as models know them; the last is the
    // user's.
    std::string role, content;
};
// How the families write a conversation; test/golden/chat.json has examples of each but plain, which is ours, from the
// models' own templates:
//   chatml            <|im_start|>user\n...<|im_end|>\n<|im_start|>assistant\n
//   qwen2, qwen       the same, with the system message of Qwen 2 or of Qwen 2.5 where none is given
//   qwen3             chatml, where earlier answers lose their reasoning: what stands before </think>
//   qwen3-thinking    the same, and the answer begins with <think>\n: models that always reason
//   qwq               the same, and earlier answers lose the line ends that they begin with
//   llama2            <s>[INST] <<SYS>>\n...\n<</SYS>>\n\n... [/INST] ... </s>
//   llama3            <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n...<|eot_id|>
//   llama3.1          the same, with two dates in the system message, always the same ones; also LLaMA 3.2 and 3.3
//   deepseek          <|begin of sentence|>...<|User|>...<|Assistant|>...            V3, with bars of its own
//   deepseek-r1       the same, without earlier reasoning, and the answer begins with <think>\n
//   deepseek-r1-0528  the same without that beginning: the model writes it itself
//   deepseek-v3.1     without earlier reasoning; every answer begins with </think>, and so has none of its own
//   mistral-v0        <s>[INST] ... [/INST]...</s>            what the folders of the next models had at first
//   mistral-v1        <s> [INST] ... [/INST] ...</s>          7B v0.1 and v0.2, Mixtral 8x7B
//   mistral           <s>[INST] ...[/INST] ...</s>            7B v0.3, Mixtral 8x22B, Large 2407
//   mistral-nemo      <s>[INST]...[/INST]...</s>              Nemo
//   plain             User: ...\nAssistant: ...               for models without a template
// Mistral's have no system message of their own: it stands in the user's first message (v0, v1) or in the last.
struct ChatTemplate {
    const char* name;
    // The text up to where the assistant's next message begins.
    std::string (*render)(const std::vector<ChatMessage>& messages);
    const char* end;  // what the model writes after a message
};
// By its name; "" : the one that tokenizer_config.json or chat_template.jinja in the folder describe, or plain where
// there is none. Error that lists the names, where it is none of these.
const ChatTemplate& find_chat_template(const std::string& name, const std::string& folder);
std::string chat_template_names();  // "chatml, qwen2, ..."
// The request for the assistant's next message; with the template's end among its stop tokens or texts.
TextRequest chat_request(const GenerateOptions& options, const LoadedModel& model, const ChatTemplate& chat,
                         const std::vector<ChatMessage>& messages);

// chat.cu: reads messages from stdin and prints the answers as they come, until the end of stdin. Ctrl-C ends an
// answer.
void run_chat(LoadedModel& model, const GenerateOptions& options);

// ---------------------------------------------------------------------------------------------------------------------
// perplexity.cu: how surprised a model is by a text: exp(loss), loss the mean of -log p(token | those before it in its
// window). The text's first token is not predicted. Computed as text is written: over a cache, of cache_dtype (e4m3, or
// the model's, which is the default), and with the model's weights, of 8 bits where it has those.

struct Perplexity {
    double loss = 0, seconds = 0;
    int64_t tokens = 0, window = 0;
};
// The tokens of the text in this file; Error where they cannot be evaluated. Needs no weights.
std::vector<int32_t> tokens_to_evaluate(const LoadedModel& model, const std::string& path);
Perplexity evaluate_text(const LoadedModel& model, std::span<const int32_t> tokens, int64_t window,
                         std::optional<DType> cache_dtype = {});

// ---------------------------------------------------------------------------------------------------------------------
// server.cu: --serve

// Binds --host and --port: Error where it cannot; needs no weights. What it returns prints where it listens, and
// answers HTTP requests with OpenAI's API (doc/inference.md) until SIGINT or SIGTERM: then requests that run or wait
// are finished, new ones are refused, and it returns; a second signal ends the process. The engine's steps are done by
// the thread that calls it, each connection has a thread of its own.
std::function<void()> open_server(LoadedModel& model, const GenerateOptions& options);
