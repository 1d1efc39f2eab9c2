// inference/requests.cu: from the tokens of an answer to its text.
//
// A token is a piece of text that may end inside of a character, and the text of several tokens may turn out to be a
// stop string, which the answer must not show. So text is held back until it is certain:
//
//     text so far      The capital is Paris.\nUs
//                                           ---- held back where "\nUser:" is a stop string, until the next tokens
//                                                decide
#include "inference/inference.h"
#include "io/json.h"

#include <algorithm>
#include <cstdio>

struct Requests::Answer {
    // The prompt goes through the decoder, too: some tokenizers drop a space before the first token of a text.
    Answer(const Tokenizer& its_tokenizer, const TextRequest& request)
        : tokenizer(its_tokenizer), decoder(its_tokenizer), skips_special(request.skip_special_tokens) {
        for (const int32_t token : request.prompt) push(token);
        n_of_prompt = decoder.n_held_back();
    }
    // A vocabulary may be rounded up: a token that the tokenizer does not have adds no text.
    std::string push(int32_t token) {
        const bool has_text = tokenizer.has(token) && !(skips_special && tokenizer.is_special(token));
        return has_text ? own(decoder.push(token)) : "";
    }
    std::string finish() { return own(decoder.finish()); }
    // Without the bytes of a character that the prompt began: they are in the prompt's text.
    std::string own(std::string decoded) {
        const size_t n = std::min(n_of_prompt, decoded.size());
        n_of_prompt -= n;
        return decoded.substr(n);
    }
    const Tokenizer& tokenizer;
    StreamDecoder decoder;
    bool skips_special;
    size_t n_of_prompt = 0;
    std::string held;             // decoded, and not yet handed out
    std::vector<Sampled> tokens;  // likewise
    bool begun = false;           // a piece has been handed out
};

struct Requests::Running {
    TextRequest text;
    Request request;
    std::map<uint64_t, Answer> answers;
    int64_t n_left;  // answers that have not ended
    Answer& answer(uint64_t sample, const Tokenizer& tokenizer) {
        return answers.try_emplace(sample, tokenizer, text).first->second;
    }
    void hand_out(Answer& answer, AnswerPiece& piece) {
        piece.tokens.swap(answer.tokens);
        if (text.scores_prompt && !answer.begun) {
            piece.prompt.push_back({.token = text.prompt[0], .logprob = kUnscored, .top = {}});
            piece.prompt.insert(piece.prompt.end(), request.scored.begin(), request.scored.end());
        }
        answer.begun = true;
        if (text.ready) text.ready(piece);
    }
};

namespace {

// Where the first stop string begins in `text`, or npos.
size_t find_stop(const std::string& text, const std::vector<std::string>& stop) {
    size_t first = std::string::npos;
    for (const std::string& s : stop) first = std::min(first, text.find(s));
    return first;
}

// The bytes at the end of `text` that may be the beginning of a stop string.
size_t undecided(const std::string& text, const std::vector<std::string>& stop) {
    size_t most = 0;
    for (const std::string& s : stop)
        for (size_t n = std::min(s.size() - 1, text.size()); n > most; --n)
            if (text.compare(text.size() - n, n, s, 0, n) == 0) most = n;
    return most;
}

}  // namespace

void print_text(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

std::vector<int32_t> special_stops(const Tokenizer& tokenizer, const TextRequest& request) {
    std::vector<int32_t> found;
    if (request.stop.empty() || !request.skip_special_tokens) return found;
    std::map<std::string, int32_t> special;
    for (int32_t token = 0; token < tokenizer.vocab_size(); ++token)
        if (tokenizer.has(token) && tokenizer.is_special(token)) special.emplace(tokenizer.decode({token}), token);
    special.erase("");
    for (const std::string& stop : request.stop) {
        if (const auto whole = special.find(stop); whole != special.end()) {
            found.push_back(whole->second);
            continue;
        }
        for (const auto& [text, token] : special)
            check(stop.find(text) == std::string::npos, "the stop text ", JsonText(stop).str(),
                  " has the special token ", JsonText(text).str(),
                  " and more, and answers are written without special tokens: give the token alone, or ask for them ",
                  "(\"skip_special_tokens\": false, --show-special-tokens)");
    }
    return found;
}

Requests::Requests(Engine& engine, const Tokenizer& tokenizer) : engine_(engine), tokenizer_(tokenizer) {
    engine_.token_ready = [this](Request& request, Sequence& sequence, const Sampled& token) {
        Running& r = running(request);
        if (r.text.max_tokens == 0) return false;
        Answer& answer = r.answer(sequence.sample, tokenizer_);
        answer.tokens.push_back(token);
        answer.held += answer.push(token.token);
        const size_t stop = find_stop(answer.held, r.text.stop);
        if (stop != std::string::npos) {
            answer.held.resize(stop);
            return false;
        }
        AnswerPiece piece;
        piece.sample = sequence.sample;
        piece.text = answer.held.substr(0, answer.held.size() - undecided(answer.held, r.text.stop));
        answer.held.erase(0, piece.text.size());
        r.hand_out(answer, piece);
        return true;
    };
    engine_.answer_ended = [this](Request& request, uint64_t sample, const char* reason) {
        Running& r = running(request);
        Answer& answer = r.answer(sample, tokenizer_);
        AnswerPiece piece;
        piece.sample = sample, piece.finish_reason = reason;
        if (r.text.max_tokens == 0 && !piece.is_error()) piece.finish_reason = "length";
        // A token that has not been handed out has completed a stop string: the text ends before that. Otherwise what
        // was held back was no stop string after all, and is text.
        if (answer.tokens.empty()) answer.held += answer.finish();
        piece.text.swap(answer.held);
        r.hand_out(answer, piece);
        if (--r.n_left == 0) running_.erase(request.id);
    };
    engine_.beams_ended = [this](Request& request, const std::vector<BeamAnswer>& answers) {
        const std::unique_ptr<Running> r = std::move(running_.at(request.id));
        running_.erase(request.id);
        const std::vector<int32_t>& stops = r->text.stop_tokens;
        for (size_t i = 0; i < answers.size() && i < static_cast<size_t>(r->text.n); ++i) {
            std::vector<int32_t> tokens = answers[i].tokens;
            AnswerPiece piece;
            piece.sample = i;
            piece.finish_reason = "length";
            if (std::find(stops.begin(), stops.end(), tokens.back()) != stops.end())
                tokens.pop_back(), piece.finish_reason = "stop";
            Answer answer(tokenizer_, r->text);
            for (const int32_t token : tokens) piece.text += answer.push(token);
            piece.text += answer.finish();
            for (const int32_t token : tokens) piece.tokens.push_back({.token = token, .logprob = 0, .top = {}});
            if (r->text.ready) r->text.ready(piece);
        }
        for (size_t i = 0; answers.empty() && i < static_cast<size_t>(r->text.n); ++i)
            if (r->text.ready)
                r->text.ready({.sample = i, .text = "", .tokens = {}, .prompt = {}, .finish_reason = "error"});
    };
}

Requests::~Requests() { engine_.token_ready = nullptr, engine_.answer_ended = nullptr, engine_.beams_ended = nullptr; }

Requests::Running& Requests::running(const Request& request) { return *running_.at(request.id); }

int64_t Requests::add(TextRequest text) {
    const int64_t V = engine_.vocabulary(), most = engine_.options().scheduler.max_length;
    check(!text.prompt.empty(), "the prompt has no token: give at least one");
    check(std::ssize(text.prompt) < most, "the prompt has ", text.prompt.size(),
          " tokens, and prompt and answer together ", "can have ", most, ": give a shorter prompt");
    for (const int32_t token : text.prompt)
        check(token >= 0 && token < V, "the prompt has the token ", token, ", but the model knows 0 to ", V - 1);
    for (const std::string& stop : text.stop) check(!stop.empty(), "a stop string is empty");
    const std::vector<int32_t> special = special_stops(tokenizer_, text);
    text.stop_tokens.insert(text.stop_tokens.end(), special.begin(), special.end());
    check(text.max_tokens >= (text.scores_prompt ? 0 : 1) && text.n >= 1,
          "an answer has at least one token (none where ",
          "the prompt is scored), and a request at least one answer, not ", text.max_tokens, " and ", text.n);
    check_sampling(text.sampling, V);
    const SamplingOptions& s = text.sampling;
    check(!text.scores_prompt || s.logprobs >= 0,
          "a prompt is scored by log-probabilities: logprobs must be 0 or more");
    check(!text.beams || text.n <= text.beams->n_beams, "beam search gives at most as many answers as it has beams, ",
          text.beams ? text.beams->n_beams : 0, ", and not ", text.n);
    check(!text.beams || (text.stop.empty() && s.logit_bias.empty() && s.logprobs < 0),
          "beam search supports no stop strings, no logit_bias and no logprobs");
    auto r = std::make_unique<Running>();
    r->request.id = ++n_requests_;
    r->request.prompt = text.prompt;
    r->request.max_tokens =
        std::clamp<int64_t>(text.max_tokens, 1, most - std::ssize(text.prompt));  // it ends with "length"
    r->request.scores_prompt = text.scores_prompt;
    r->request.n = text.beams ? text.beams->n_beams : text.n;
    r->request.beams = text.beams;
    r->request.sampling = text.sampling;
    r->request.stop_tokens = text.stop_tokens;
    r->n_left = text.n;
    r->text = std::move(text);
    engine_.add(r->request);
    const int64_t id = r->request.id;
    running_.emplace(id, std::move(r));
    return id;
}

void Requests::cancel(int64_t id) {
    const auto found = running_.find(id);
    if (found == running_.end()) return;
    engine_.cancel(found->second->request);
    running_.erase(found);
}

std::vector<const Request*> Requests::unfinished() const {
    std::vector<const Request*> all;
    for (const auto& [id, running] : running_) all.push_back(&running->request);
    return all;
}
