// inference/options.cu: the command line of generate.
#include "core/names.h"
#include "inference/inference.h"
#include "io/command_line.h"

#include <algorithm>

namespace {

const std::vector<Synonym> kSynonyms = {{"max-tokens", "--tokens"},
                                        {"max-new-tokens", "--tokens"},
                                        {"n-predict", "--tokens"},
                                        {"n", "--samples"},
                                        {"num-samples", "--samples"},
                                        {"checkpoint", "--model"},
                                        {"init", "--model"},
                                        {"temp", "--temperature"},
                                        {"max-model-len", "--max-length"},
                                        {"ctx-size", "--max-length"},
                                        {"max-num-seqs", "--max-sequences"},
                                        {"block-size", "--page-size"},
                                        {"max-num-batched-tokens", "--step-tokens"},
                                        {"kv-cache-dtype", "--cache-dtype"},
                                        {"model-draft", "--draft"},
                                        {"speculative-model", "--draft"},
                                        {"num-speculative-tokens", "--draft-tokens"},
                                        {"draft-max", "--draft-tokens"},
                                        {"top-logprobs", "--logprobs"},
                                        {"input", "--batch"},
                                        {"precision", "--dtype"}};

// Flags whose text becomes another type.
struct Typed {
    std::string dtype = "fp32", weights = "none", cache_dtype = "same", preempt = "recompute", batching = "continuous",
                graphs = "auto", logit_bias;
    bool no_prefix_sharing = false;
};

void add_model_options(CommandLine& line, GenerateOptions& o, Typed& typed) {
    Heading model{line, "Model"};
    model.option("--model", o.model,
                 "Hugging Face folder (config.json + safetensors), run, or checkpoint; default: the newest in runs/");
    model.option("--tokenizer", o.tokenizer, "tokenizer.json, or its folder; default: that beside the model");
    model.option("--dtype", typed.dtype, "of weights and activations: fp32, bf16 or fp16");
    model.option(
        "--weights", typed.weights,
        "8 bits for the weights of the blocks: int8 or fp8, with a scale for each row; int8-block or fp8-block, for "
        "128 of a row; none: as --dtype");
    model.option("--tp", o.tp,
                 "tensor parallelism: this many ranks have some of the heads each, threads of this process or "
                 "mpirun's");
}

void add_request_options(CommandLine& line, GenerateOptions& o) {
    Heading what{line, "What to write"};
    what.option("--prompt", o.prompt, "text that the answer continues");
    what.option("--prompt-ids", o.prompt_ids, "the same as token ids, 1,2,3");
    what.option("--tokens", o.tokens, "at most this many tokens an answer");
    what.option("--samples", o.samples, "answers to the prompt");
    what.option("--stop", o.stop, "the answer ends before this text; may be given several times");
    what.flag("--ignore-eos", o.ignore_eos, "do not end an answer at the model's end-of-text token");
    what.flag("--show-special-tokens", o.show_special_tokens,
              "write an answer's special tokens, as <|im_end|>, too; otherwise they are left out of its text");
    what.flag("--ids", o.ids, "print token ids, a line for each answer, instead of text");
    what.option(
        "--logprobs", o.sampling.logprobs,
        "after an answer, a line for each token of it: its log-probability, and this many of the most probable "
        "tokens there with theirs, up to 20; with --batch and --serve \"logprobs\" as OpenAI has them; -1: none");
    what.flag("--chat", o.chat, "a conversation in the terminal: a line is a message");
    what.option("--template", o.chat_template,
                "how messages are written: " + chat_template_names() + "; default: as the model's folder says");
    what.option("--system", o.system, "the system message of a conversation");
    what.option("--batch", o.batch, "file with a request in each line, as JSON; needs --out");
    what.option("--out", o.out, "file for the answers of --batch, a line of JSON each; answers that it has are kept");
    what.option("--pictures", o.pictures,
                "folder for batching.png, the requests over the steps, and cache.png, what the cache held");
    what.option("--eval", o.eval, "text file: print the model's perplexity on it, and end");
    what.flag("--plan", o.plan, "print the memory that this takes and how many sequences fit, and end");
}

std::string flag_of(const SamplingNumber& number) {
    std::string flag = "--" + number.name;
    std::ranges::replace(flag, '_', '-');
    return flag;
}

void add_sampling_options(CommandLine& line, GenerateOptions& o, Typed& typed) {
    Heading sampling{line, "Sampling"};
    SamplingOptions& s = o.sampling;
    for (const SamplingNumber& number : sampling_numbers())
        sampling.option(flag_of(number), s.*number.value, number.help);
    sampling.option("--top-k", s.top_k, "only the k most probable tokens; 0: all");
    sampling.option("--logit-bias", typed.logit_bias,
                    "ID:VALUE, or several with commas between them: added to the logits of these tokens; -100 to 100");
    sampling.option("--beams", o.beams,
                    "beam search: the most probable answers that this many beams find; 0: draw tokens");
    sampling.option("--length-penalty", o.length_penalty,
                    "beam search: an answer's score is divided by its length to this power");
    sampling.option("--seed", s.seed,
                    "of the random numbers; where it is not given, --serve draws one for each request");
}

void add_engine_options(CommandLine& line, GenerateOptions& o, Typed& typed) {
    Heading engine{line, "Cache and scheduler"};
    EngineOptions& e = o.engine;
    engine.option("--max-length", e.scheduler.max_length, "prompt and answer, in tokens; 0: as the model was made for");
    engine.option("--max-sequences", e.scheduler.max_sequences, "sequences that run at the same time");
    engine.option("--page-size", e.cache.page_size, "tokens of a page of the cache");
    engine.option("--cache-pages", e.cache.n_pages,
                  "pages of the cache; 0: enough for all sequences at full length, or what nine tenths of the free "
                  "memory hold besides the rest");
    engine.option("--cache-dtype", typed.cache_dtype, "of the cache: same as the model's, or fp8");
    engine.flag("--no-prefix-sharing", typed.no_prefix_sharing,
                "compute every prompt, even where others began with the same tokens");
    engine.option("--step-tokens", e.scheduler.step_tokens, "tokens of a step, of prompts and answers together");
    engine.option(
        "--draft", o.draft,
        "speculative decoding: a small model with the same tokens that proposes the next ones (folder, run, or "
        "checkpoint)");
    engine.option("--draft-tokens", e.draft_tokens, "this many at a time");
    engine.option("--lookup", e.lookup,
                  "the same without a model: propose this many tokens that followed before in the same text; 0: none");
    engine.option("--batching", typed.batching,
                  "continuous: requests join and leave at every step; static: the next ones wait until all have ended");
    engine.option("--preempt", typed.preempt,
                  "where pages run out: swap the youngest request's to the host, or recompute them later");
    engine.option("--graphs", typed.graphs,
                  "launch a step of answers as one CUDA graph: on, off, or auto: on a GPU. The text is the same");
}

void add_server_options(CommandLine& line, GenerateOptions& o) {
    Heading server{line, "Server"};
    ServerOptions& s = o.server;
    server.flag("--serve", o.serve, "answer HTTP requests as OpenAI's API defines them; a page to try it is at /");
    server.option("--host", s.host, "address to listen on; 0.0.0.0: all of this machine");
    server.option("--port", s.port, "port to listen on; 0: one that is free");
    server.option("--api-key", s.api_key, "clients must send it; default: none is asked for");
    server.option("--max-waiting", s.max_waiting, "requests that may wait; further ones are refused (429)");
    server.option("--max-body", s.max_body, "bytes that a request may have, also as a line of --batch");
    server.option("--client-timeout", s.client_timeout,
                  "seconds that a client may take to send a request, or to take what was sent of the answer");
    server.option("--request-timeout", s.request_timeout, "seconds after which an answer is given up");
}

// Beam search draws nothing.
std::vector<std::string> flags_of_drawing() {
    std::vector<std::string> flags = {"--top-k", "--seed", "--logit-bias", "--logprobs", "--stop"};
    for (const SamplingNumber& number : sampling_numbers()) flags.push_back(flag_of(number));
    return flags;
}

constexpr const char* kOfServer[] = {"--host",        "--port",           "--api-key",
                                     "--max-waiting", "--client-timeout", "--request-timeout"};

// A flag that does nothing would be believed to do something.
void check_effects(const GenerateOptions& o, const CommandLine& line) {
    for (const char* flag : kOfServer) check(o.serve || o.plan || !line.given(flag), flag, " is for --serve");
    check(o.serve || o.plan || !o.batch.empty() || !line.given("--max-body"), "--max-body is for --serve and --batch");
    std::vector<std::string> of_answers = flags_of_drawing();
    of_answers.insert(of_answers.end(), {"--tokens", "--samples", "--beams", "--ignore-eos", "--show-special-tokens"});
    for (const std::string& flag : of_answers)
        check(o.eval.empty() || !line.given(flag), flag, " is for answers, and --eval has none: leave one of them out");
}

// What answers a request has, and what is reported of them.
void check_answers(const GenerateOptions& o, const CommandLine& line) {
    const SamplingOptions& sampling = o.sampling;
    check(o.beams == 0 || o.beams >= o.samples, "--beams ", o.beams, ": it must be at least --samples");
    for (const std::string& flag : flags_of_drawing())
        check(o.beams == 0 || !line.given(flag), flag,
              " is for tokens that are drawn: it cannot be combined with --beams");
    check(o.beams > 0 || !line.given("--length-penalty"), "--length-penalty is for --beams");
    check(sampling.logprobs < 0 || !(o.chat || o.plan || !o.eval.empty()),
          "--logprobs is for --prompt, --prompt-ids, --batch and --serve");
    check(o.beams == 0 || !(o.chat || o.serve), "--beams is for --prompt, --prompt-ids and --batch");
    check(o.samples == 1 || !o.chat, "--samples ", o.samples, ": a conversation has one answer to a message");
    const int64_t most = o.engine.scheduler.most_answers();
    check(std::max(o.samples, o.beams) <= most, o.beams > 0 ? "--beams " : "--samples ", std::max(o.samples, o.beams),
          ": they are computed together, and at most ", most, " can be (--max-sequences, --step-tokens)");
    check(!o.ids || !o.prompt.empty() || !o.prompt_ids.empty(), "--ids is for --prompt and --prompt-ids");
    check(!o.ids || !o.show_special_tokens, "--ids has all tokens: leave out --show-special-tokens");
}

constexpr int64_t kMost = 1 << 20;  // what follows from these is counted in 64 bits, and kept in lists on the host

void check_server(const ServerOptions& s) {
    check(s.port >= 0 && s.port <= 65535, "--port ", s.port, ": a port is a number up to 65535");
    check(s.max_waiting >= 0 && s.max_body >= 1 && s.client_timeout > 0 && s.request_timeout > 0,
          "--max-waiting must not be negative, and --max-body, --client-timeout and --request-timeout be positive");
    check(s.max_waiting <= kMost, "--max-waiting can be at most ", kMost);
    // Whole seconds of it are in the header Keep-Alive.
    check(s.client_timeout <= 1e9, "--client-timeout can be at most 1e9 seconds");
    const auto is_printed = [](char c) { return c > ' ' && c <= '~'; };
    check(std::ranges::all_of(s.api_key, is_printed),
          "--api-key: give printable ASCII characters without spaces: clients cannot send others");
}

void settle(GenerateOptions& o, const Typed& typed, const CommandLine& line) {
    o.dtype =
        choose<DType>("--dtype", typed.dtype, {{"fp32", DType::f32}, {"bf16", DType::bf16}, {"fp16", DType::f16}});
    o.weights = weight_format_from_name(typed.weights);
    if (choose<bool>("--cache-dtype", typed.cache_dtype, {{"same", false}, {"fp8", true}}))
        o.engine.cache_dtype = DType::e4m3;
    o.engine.scheduler.batching = choose<Batching>(
        "--batching", typed.batching, {{"continuous", Batching::continuous}, {"static", Batching::static_batches}});
    o.engine.scheduler.preemption = choose<Preemption>(
        "--preempt", typed.preempt, {{"swap", Preemption::swap}, {"recompute", Preemption::recompute}});
    o.engine.graphs =
        choose<std::optional<bool>>("--graphs", typed.graphs, {{"on", true}, {"off", false}, {"auto", std::nullopt}});
    o.engine.cache.share_prefixes = !typed.no_prefix_sharing;
    if (!typed.logit_bias.empty()) o.sampling.logit_bias = parse_logit_bias("--logit-bias", typed.logit_bias);
    check(o.engine.scheduler.max_sequences >= 1 && o.engine.scheduler.step_tokens >= 1 &&
              o.engine.cache.page_size >= 1 && o.engine.cache.n_pages >= 0 && o.tokens >= 1 && o.samples >= 1 &&
              o.engine.lookup >= 0,
          "--max-sequences, --step-tokens, --page-size, --tokens and --samples must be at least 1, and --cache-pages ",
          "and --lookup not negative");
    check(
        std::max({o.engine.scheduler.max_sequences, o.engine.scheduler.step_tokens, o.engine.cache.page_size}) <= kMost,
        "--max-sequences, --step-tokens and --page-size can be at most ", kMost);
    check(o.draft.empty() || (o.engine.lookup == 0 && o.beams == 0 && o.eval.empty()),
          "--draft proposes tokens that are drawn next: it cannot be combined with --lookup, --beams or --eval");
    check(o.engine.lookup == 0 || (o.beams == 0 && o.eval.empty()),
          "--lookup proposes tokens that are drawn next: it cannot be combined with --beams or --eval");
    const int64_t most_ranks = o.plan ? kMostPlannedRanks : kMostRanks;
    check(o.tp >= 1 && o.tp <= most_ranks, "--tp ", o.tp, ": it must be from 1 to ", most_ranks);
    check(o.tp == 1 || typed.graphs != "on",
          "--graphs on cannot be combined with --tp: the ranks' messages are in no graph");
    check(o.tp == 1 || (o.draft.empty() && !o.chat && !o.serve && o.eval.empty() && o.weights == WeightFormat::none),
          "--tp cannot be combined with --draft, --chat, --serve, --eval or --weights");
    check(o.engine.draft_tokens >= 1 && (!o.draft.empty() || o.engine.draft_tokens == EngineOptions().draft_tokens),
          "--draft-tokens ", o.engine.draft_tokens, ": it must be at least 1, and is for --draft");
    check(o.engine.scheduler.max_length == 0 || o.engine.scheduler.max_length >= 2, "--max-length ",
          o.engine.scheduler.max_length,
          ": a prompt and an answer have at least 2 tokens (0: as the model was made for)");
    const int n_ways =
        !o.prompt.empty() + !o.prompt_ids.empty() + o.chat + o.serve + !o.batch.empty() + !o.eval.empty() + o.plan;
    check(n_ways == 1, n_ways == 0 ? "nothing to do: give --prompt TEXT (or --prompt-ids, --chat, --serve, --batch, "
                                     "--eval, --plan)"
                                   : "give one of --prompt, --prompt-ids, --chat, --serve, --batch, --eval and --plan");
    check(o.chat || o.serve || o.chat_template.empty(), "--template is for --chat and --serve");
    check(o.chat || o.system.empty(), "--system is for --chat");
    check(o.pictures.empty() || !o.batch.empty() || !o.prompt.empty() || !o.prompt_ids.empty(),
          "--pictures is for --batch, --prompt and --prompt-ids");
    check_server(o.server);
    o.has_seed = line.given("--seed");
    check_answers(o, line);
    // One prompt, one conversation or one text needs no memory for other sequences.
    if (o.chat || !o.prompt.empty() || !o.prompt_ids.empty() || !o.eval.empty())
        o.engine.scheduler.max_sequences = std::max(o.samples, o.beams);
    check(o.batch.empty() == o.out.empty(), o.out.empty() ? "--batch needs --out, the file for the answers"
                                                          : "--out is the file for the answers of --batch");
}

}  // namespace

GenerateOptions parse_generate_options(int argc, char** argv) {
    GenerateOptions options;
    Typed typed;
    options.sampling.temperature = 0.8;
    CommandLine line{
        "generate: text from a model that train_gpt has trained, or from a Hugging Face folder.\n"
        "Without --model it takes the newest run in runs/."};
    add_model_options(line, options, typed);
    add_request_options(line, options);
    add_sampling_options(line, options, typed);
    add_engine_options(line, options, typed);
    add_server_options(line, options);
    line.parse({"generate", kSynonyms, "--prompt \"Once upon a time\""}, argc, argv,
               [&] { settle(options, typed, line), check_effects(options, line); });
    return options;
}

TextRequest text_request(const GenerateOptions& o, const LoadedModel& model) {
    TextRequest request;
    request.max_tokens = o.tokens, request.n = o.samples;
    request.sampling = o.sampling;
    request.stop = o.stop;
    if (o.beams > 0) request.beams = BeamOptions{.n_beams = o.beams, .length_penalty = o.length_penalty};
    if (!o.ignore_eos) request.stop_tokens = model.stop_tokens;
    request.skip_special_tokens = !o.show_special_tokens;
    return request;
}

std::vector<int32_t> encode_prompt(const LoadedModel& model, const std::string& text) {
    check(model.is_text, model.folder,
          ": there is no tokenizer.json in this folder: give --tokenizer, or token ids in place of the text "
          "(--prompt-ids; \"prompt_ids\" in a line of --batch)");
    return model.tokenizer->encode_with_special(text);
}
