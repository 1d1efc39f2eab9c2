// generate.cu: text from a model.
//
//   run      ./generate --prompt "Once upon a time"             from the newest run in runs/
//            ./generate --model gpt2/ --prompt "..." --samples 3 --temperature 0.7          (--help lists all flags)
//   debug    make debug && gdb -x cpu/cuda.gdb --args build/cpu-debug/generate --prompt "int " --tokens 2
//
// Load a model, put requests into the engine (inference/engine.cu), and step until all have their answers.
#include "inference/inference.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace {

// The folder of --model; without it the newest run is what it names from here on.
std::string model_folder(GenerateOptions& o) {
    if (o.model.empty()) o.model = find_newest_run();
    check(!o.model.empty(), "there is no run in runs/: train a model with ./train_gpt, or give --model FOLDER");
    return find_model_folder("--model", o.model);
}

// "1,2,3", or as Python prints a list, "[1, 2, 3]".
std::vector<int32_t> parse_ids(std::string text) {
    std::erase_if(text, [](char c) { return c == ' ' || c == '[' || c == ']'; });
    std::vector<int32_t> ids;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        ids.push_back(static_cast<int32_t>(
            parse_whole_number("--prompt-ids", text.substr(at, comma - at), std::numeric_limits<int32_t>::max())));
        at = comma + 1;
    }
    return ids;
}

// What the cache was used for, in four lines; and as pictures where they are wanted.
void report_cache(const Engine& engine, const GenerateOptions& o) {
    std::printf("%s", engine.cache_report().text().c_str());
    if (o.pictures.empty()) return;
    const bool continuous = o.engine.scheduler.batching == Batching::continuous;
    const std::pair<std::string, Timeline> timeline[] = {
        {continuous ? "continuous batching" : "static batches", engine.timeline()}};
    write_timelines_png(o.pictures + "/batching.png", timeline);
    engine.cache_report().write_png(o.pictures + "/cache.png");
    std::printf("%s/batching.png, cache.png\n", o.pictures.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// One prompt

struct Answer {
    std::string text;
    std::vector<Sampled> tokens;
};

void print_ids(const std::vector<int32_t>& ids) {
    for (size_t i = 0; i < ids.size(); ++i) std::printf("%s%d", i == 0 ? "" : ",", ids[i]);
    std::printf("\n");
}

// What is added to a summary where there was speculation.
std::string speculation(const LoadedModel& model) {
    const std::string text = model.engine->speculation().text();
    return text.empty() ? "" : "; " + text;
}

// The same where pages ran out.
std::string preemptions(const LoadedModel& model) {
    const int64_t n = model.engine->scheduler().n_preemptions();
    return n == 0 ? "" : concat(", ", n, n == 1 ? " preemption" : " preemptions");
}

// A prompt whose answers are still to come. One answer is printed as it comes; several when all are there.
class Prompt {
  public:
    // Error where it cannot be answered. Needs no weights.
    Prompt(LoadedModel& model, const GenerateOptions& o, const std::vector<int32_t>& prompt)
        : model_(model), o_(o), prompt_n_(std::ssize(prompt)), requests_(*model.engine, *model.tokenizer),
          answers_(static_cast<size_t>(o.samples)), streams_(o.samples == 1 && !o.ids) {
        TextRequest request = text_request(o, model);
        request.prompt = prompt;
        request.ready = [this](const AnswerPiece& piece) { take(piece); };
        requests_.add(std::move(request));
    }

    void answer() {
        const double start = seconds_now();
        double first = 0;
        if (streams_) print_text(o_.prompt), std::fflush(stdout);
        while (requests_.step())
            if (first == 0 && prompt_is_computed()) first = seconds_now();
        const double end = seconds_now();
        if (streams_) std::printf("\n");
        const int64_t answer_n = print_answers();
        if (!o_.pictures.empty()) report_cache(*model_.engine, o_);
        std::fflush(stdout);
        check(!failed_, kNotFinite);
        if (!isatty(STDERR_FILENO)) return;
        std::fprintf(
            stderr, "[prompt: %lld tokens in %s; answer: %lld tokens, %.1f tok/s%s]\n",
            static_cast<long long>(prompt_n_), human_seconds(first - start).c_str(), static_cast<long long>(answer_n),
            static_cast<double>(answer_n - o_.samples) / std::max(end - first, 1e-9), speculation(model_).c_str());
    }

  private:
    // A prompt with more tokens than a step takes several steps (--step-tokens).
    bool prompt_is_computed() const {
        return std::ranges::all_of(requests_.unfinished(), [&](const Request* request) {
            return request->sequences.front()->computed_n >= prompt_n_;
        });
    }

    void take(const AnswerPiece& piece) {
        failed_ |= piece.is_error();
        Answer& answer = answers_[piece.sample];
        answer.text += piece.text;
        answer.tokens.insert(answer.tokens.end(), piece.tokens.begin(), piece.tokens.end());
        if (streams_) print_text(piece.text), std::fflush(stdout);
    }

    // What has not been printed as it came. Returns the number of tokens.
    int64_t print_answers() const {
        int64_t n = 0;
        for (size_t i = 0; i < answers_.size(); ++i) {
            const std::vector<Sampled>& tokens = answers_[i].tokens;
            n += std::ssize(tokens);
            if (o_.ids) {
                print_ids(ids_of(tokens));
            } else if (!streams_) {
                std::printf("---- %zu ----\n", i + 1);
                print_text(o_.prompt + answers_[i].text + "\n");
            }
            if (o_.sampling.logprobs >= 0) std::printf("%s", logprobs_table(*model_.tokenizer, tokens).c_str());
        }
        return n;
    }

    LoadedModel& model_;
    const GenerateOptions& o_;
    const int64_t prompt_n_;
    Requests requests_;
    std::vector<Answer> answers_;
    const bool streams_;
    bool failed_ = false;
};

// ---------------------------------------------------------------------------------------------------------------------
// Many prompts

// The exit status: 1 if some requests were refused.
int answer_batch(LoadedModel& model, const GenerateOptions& o, BatchFiles& files) {
    Requests requests(*model.engine, *model.tokenizer);
    const double start = seconds_now();
    const BatchCount count = run_batch(model, requests, o, files);
    const double seconds = seconds_now() - start;
    std::printf("%s: %lld answers", o.out.c_str(), static_cast<long long>(count.done));
    if (count.done_before > 0) std::printf(", %lld requests done before", static_cast<long long>(count.done_before));
    if (count.refused > 0) std::printf(", %lld refused", static_cast<long long>(count.refused));
    std::printf("; %lld prompt tokens and %lld answer tokens in %s, %.1f tok/s; %lld steps%s%s\n",
                static_cast<long long>(count.prompt_tokens), static_cast<long long>(count.tokens),
                human_seconds(seconds).c_str(), static_cast<double>(count.tokens) / std::max(seconds, 1e-9),
                static_cast<long long>(model.engine->n_steps()), preemptions(model).c_str(),
                speculation(model).c_str());
    report_cache(*model.engine, o);
    check(count.failed == 0, count.failed, count.failed == 1 ? " answer has" : " answers have",
          " no text, and will be asked for by the next run: ", kNotFinite);
    return count.refused > 0 ? 1 : 0;
}

void print_perplexity(const LoadedModel& model, const GenerateOptions& o, const std::vector<int32_t>& tokens) {
    // Windows of one length for all models that have so many positions: only then can perplexities be compared.
    const int64_t window = std::min<int64_t>(model.engine->options().scheduler.max_length, 1024);
    const Perplexity p = evaluate_text(model, tokens, window, o.engine.cache_dtype);
    check(std::isfinite(p.loss), kNotFinite);
    std::printf("%s: perplexity %.4f (loss %.5f) of %lld tokens, in windows of %lld, %.0f tok/s\n", o.eval.c_str(),
                std::exp(p.loss), p.loss, static_cast<long long>(p.tokens), static_cast<long long>(p.window),
                static_cast<double>(p.tokens) / p.seconds);
}

// ---------------------------------------------------------------------------------------------------------------------
// What it takes

void print_plan(const GenerateOptions& o, LoadedModel& model) {
    const EngineOptions& e = model.engine->options();
    const auto line = [](const char* name, double bytes) {
        std::printf("  %-24s %s\n", name, human_bytes(bytes).c_str());
    };
    const double page = static_cast<double>(model.cache.bytes()) / static_cast<double>(e.cache.n_pages);
    std::string dtype = o.dtype == DType::bf16 ? "bf16" : o.dtype == DType::f16 ? "fp16" : "fp32";  // as --dtype says
    if (o.weights != WeightFormat::none)
        dtype += concat(", the blocks' linear layers in ", weight_format_name(o.weights));
    const auto say_model = [&](const char* name, const LoadedWeights& its) {
        std::printf("%-8s %s: %s parameters in %s\n", name, its.folder.c_str(),
                    human_count(static_cast<double>(parameter_count(its.config))).c_str(), dtype.c_str());
    };
    say_model("model", model);
    if (model.draft) say_model("draft", *model.draft);
    std::printf("memory\n");
    line("weights", static_cast<double>(model.weights.bytes()));
    if (model.draft) line("weights of the draft", static_cast<double>(model.draft->weights.bytes()));
    line("cache", static_cast<double>(model.cache.bytes()));
    line("activations", static_cast<double>(model.activations.bytes()));
    line("cuBLASLt", static_cast<double>(device().blas_workspace_bytes));
    line("total", static_cast<double>(model.device_bytes()));
    line("on the host", static_cast<double>(model.pinned.bytes()));
    const size_t before = model.bytes_before_quantised() + (model.draft ? model.draft->bytes_before_quantised() : 0);
    if (before > 0) line("  and while it is read", static_cast<double>(before));
    if (const size_t all = device_memory().all; model.device_bytes() > all)
        std::printf("  it does not fit: this device has %s\n", human_bytes(static_cast<double>(all)).c_str());
    std::printf("cache    %lld pages of %lld tokens, %s each (%s per token)\n", static_cast<long long>(e.cache.n_pages),
                static_cast<long long>(e.cache.page_size), human_bytes(page).c_str(),
                human_bytes(page / static_cast<double>(e.cache.page_size)).c_str());
    const int64_t longest = e.scheduler.max_length;
    for (int64_t length = std::min<int64_t>(128, longest), last = 0; last < longest;
         last = length, length = std::min(2 * length, longest))
        std::printf("         %lld sequences of %lld tokens fit\n",
                    static_cast<long long>(std::min(
                        // The last token of a sequence is in no page.
                        e.cache.n_pages / ceil_div(std::max<int64_t>(1, length - 1), e.cache.page_size),
                        e.scheduler.max_sequences)),
                    static_cast<long long>(length));
}

// What the flags say of every answer. The rest is checked when a prompt is there.
void check_answers(const LoadedModel& model, const GenerateOptions& o) {
    check_sampling(o.sampling, model.config.V);
    const TextRequest request = text_request(o, model);
    special_stops(*model.tokenizer, request);
    if (!request.beams) return;
    BeamOptions beams = *request.beams;
    beams.stop_tokens = request.stop_tokens;
    BeamSearch{beams};  // Error where there are too many
}

// Error where it leaves no room for a message and its answer.
void check_system_message(const LoadedModel& model, const GenerateOptions& o, const ChatTemplate& chat) {
    if (o.system.empty()) return;
    const auto n = std::ssize(chat_request(o, model, chat, {{"system", o.system}, {"user", "a"}}).prompt);
    const int64_t most = model.engine->options().scheduler.max_length;
    check(n < most, "--system: with a message of one letter it has ", n, " tokens, and the model has room for ", most,
          ", with the answer: give a shorter one");
}

// For a plan, which has no prompt: Error where the cache has too few pages for the answers to any.
void check_pages(LoadedModel& model, const GenerateOptions& o) {
    Requests requests(*model.engine, *model.tokenizer);
    TextRequest shortest = text_request(o, model);
    shortest.prompt = {0};
    requests.cancel(requests.add(std::move(shortest)));
}

// What the flags ask for, to be done when the weights are there; gives the exit status. Inputs are read, outputs
// opened, a prompt put into the engine and the server's port taken at once: mistakes in them are reported before the
// weights are read, which takes minutes for large models.
std::function<int()> prepare(LoadedModel& model, const GenerateOptions& o) {
    check_answers(model, o);
    if (o.chat) {
        model.expect_text();
        check_system_message(model, o, find_chat_template(o.chat_template, model.folder));
        return [&] { return run_chat(model, o), 0; };
    }
    if (o.serve) return [run = open_server(model, o)] { return run(), 0; };
    if (!o.batch.empty()) return [&, files = open_batch(o)] { return answer_batch(model, o, *files); };
    if (!o.eval.empty())
        return [&, tokens = tokens_to_evaluate(model, o.eval)] { return print_perplexity(model, o, tokens), 0; };
    const std::vector<int32_t> prompt = o.prompt_ids.empty() ? encode_prompt(model, o.prompt) : parse_ids(o.prompt_ids);
    return [its = std::make_shared<Prompt>(model, o, prompt)] { return its->answer(), 0; };
}

// The model in its memory, and what is to be done with it.
struct Ready {
    std::unique_ptr<LoadedModel> model;
    std::function<int()> task;
};

Ready get_ready(const GenerateOptions& options, const std::string& folder, const std::string& draft) {
    Ready ready{
        std::make_unique<LoadedModel>(folder, options.tokenizer, options.dtype, options.weights, options.engine, draft),
        nullptr};
    LoadedModel& model = *ready.model;
    if (options.plan) {
        check_answers(model, options);
        check_pages(model, options);
        ready.task = [&options, &model] { return print_plan(options, model), 0; };
        return ready;
    }
    Comm* const ranks = options.engine.ranks;
    if (!ranks || ranks->rank == 0) {
        model.engine->start_reports(!options.pictures.empty());  // before a prompt is there
        ready.task = prepare(model, options);
    }
    if (!options.pictures.empty()) make_folder(options.pictures);
    if (!ranks) model.load();  // several load when all are ready: then a mistake in a prompt need not wait
    return ready;
}

// The same for the folder that is there now: a checkpoint that a run has removed meanwhile (train_gpt --keep) has a
// newer one in its place.
Ready get_ready(GenerateOptions& options) {
    while (true) {
        const std::string folder = model_folder(options);
        const std::string draft = options.draft.empty() ? "" : find_model_folder("--draft", options.draft);
        try {
            return get_ready(options, folder, draft);
        } catch (const Error&) {
            const bool is_newest = model_folder(options) == folder &&
                                   (draft.empty() || find_model_folder("--draft", options.draft) == draft);
            if (options.engine.ranks || is_newest) throw;
        }
    }
}

// Runs f on all ranks, or on the only one. false: rank 0 has found something wrong, and has printed it as one line,
// which stands for those of the ranks that have found it, too. (Before any of them ends: mpirun then ends the others.)
// What one rank alone finds, as on a host with other files, ends the job with its line.
bool succeeds(Comm* ranks, const std::function<void()>& f) {
    if (!ranks) return f(), true;
    std::string fault;
    try {
        f();
    } catch (const Error& error) {
        fault = error.what();
    }
    bool success = true;
    try {
        success = gather_numbers(*ranks, {!fault.empty()})[0][0] == 0;
    } catch (const Error&) {  // the others are in a collective of f's, which this one has not reached
        if (fault.empty()) throw;
    }
    if (success && !fault.empty()) fail(fault);
    if (!success && ranks->rank == 0) std::fprintf(stderr, "generate: %s\n", fault.c_str());
    return success;
}

// The exit status. ranks: those that divide the model, if there are several. fault: what is wrong with the command
// line, or nothing.
int generate(GenerateOptions options, Comm* ranks, const std::string& fault) {
    options.engine.ranks = ranks;
    Ready ready;
    Comm* const others = options.plan ? nullptr : ranks;  // a plan is made by one rank
    const auto start = [&] {
        if (!fault.empty()) fail(fault);
        ready = get_ready(options);
    };
    if (!succeeds(others, start)) return 2;
    if (others && !succeeds(others, [&] { ready.model->load(); })) return 2;
    if (options.plan) return ready.task();
    if (ranks) ranks->meet_hosts();  // no collective before all have their memory
    if (!ready.task) return ready.model->engine->follow(), 0;
    const int status = ready.task();
    if (ranks) ready.model->engine->end_followers();
    return status;
}

}  // namespace

int main(int argc, char** argv) {
    keep_standard_numbers();
    end_with_reason();
    try {
        GenerateOptions options;
        RankOptions ranks;
        std::string fault;
        try {
            options = parse_generate_options(argc, argv);
            ranks.ranks = started_by_mpirun() ? 0 : static_cast<int>(options.tp);
            const int n = rank_count(ranks);
            check(n == options.tp, "--tp ", options.tp, " under an mpirun of ", n, " processes: give --tp ", n,
                  ", or start ", options.tp);
        } catch (const Error& error) {
            if (!started_by_mpirun()) throw;
            fault = error.what();  // every process has found it; rank 0 prints it (succeeds)
        }
        ranks.quiet = true, ranks.planning = options.plan;
        // The others wait for the one with the requests, which waits for whoever writes them, or reads the answers.
        ranks.timeout_s = std::numeric_limits<double>::infinity();
        int status = 0;
        if (options.tp == 1 && fault.empty()) status = generate(options, nullptr, fault);
        else
            run_ranks(ranks, [&](Comm& world) {
                const int its = generate(options, &world, fault);
                if (world.rank == 0) status = its;
            });
        check_output();
        return status;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "generate: the host has too little memory: give fewer --cache-pages or --max-sequences\n");
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "generate: %s\n", error.what());
        return 2;
    }
}
