// inference/token_fields.cu: logit_bias, as it is given, and log-probabilities, as they are shown.
#include "inference/inference.h"
#include "io/json.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// logit_bias

namespace {

int32_t parse_token(const std::string& name, const std::string& text) {
    return static_cast<int32_t>(parse_whole_number(name, text, std::numeric_limits<int32_t>::max()));
}

}  // namespace

LogitBias parse_logit_bias(const std::string& flag, const std::string& text) {
    LogitBias bias;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        const std::string entry = text.substr(at, comma - at);
        const size_t colon = entry.find(':');
        check(colon != std::string::npos, flag, " ", text, ": give ID:VALUE, or several with commas between them");
        const std::string change = entry.substr(colon + 1);
        expect_number(flag, change);
        bias.emplace_back(parse_token(flag, entry.substr(0, colon)), std::strtod(change.c_str(), nullptr));
        at = comma + 1;
    }
    return bias;
}

LogitBias read_logit_bias(const Json::Value& value) {
    check(value.isObject(), "\"logit_bias\": expected an object {\"token\": number}");
    LogitBias bias;
    for (const std::string& token : value.getMemberNames()) {
        double change = 0;
        check(read_value(member(value, token), change), "\"logit_bias\" of token ", token, ": expected a number");
        bias.emplace_back(parse_token("\"logit_bias\" of token", token), change);
    }
    return bias;
}

// ---------------------------------------------------------------------------------------------------------------------
// Log-probabilities

std::vector<int32_t> ids_of(std::span<const Sampled> tokens) {
    std::vector<int32_t> ids;
    for (const Sampled& sampled : tokens) ids.push_back(sampled.token);
    return ids;
}

std::optional<std::string> text_of(const Tokenizer& tokenizer, int32_t token, bool begins_text) {
    if (!tokenizer.has(token)) return {};
    std::string text;
    DecodeState before{.n_tokens = 1, .n_stripped = 0, .stripping = false};  // as if a token stood before it
    if (begins_text) before = {};
    tokenizer.decode_next(token, before, text);
    return text;
}

std::string text_of_tokens(const Tokenizer& tokenizer, std::vector<int32_t> tokens) {
    std::erase_if(tokens, [&](int32_t token) { return !tokenizer.has(token); });
    return tokenizer.decode(tokens);
}

namespace {

int64_t count_characters(std::string_view text) {
    int64_t n = 0;
    for (size_t i = 0; i < text.size(); i += json_character_bytes(text, i)) ++n;
    return n;
}

// In quotes, so that blanks and line ends are seen.
std::string quoted(const Tokenizer& tokenizer, int32_t token) {
    return JsonText(text_of(tokenizer, token).value_or("")).str();
}

}  // namespace

TextOffsets::TextOffsets(const Tokenizer& tokenizer, const TextRequest& request, const std::string* echo)
    : tokenizer_(&tokenizer), skips_special_(request.skip_special_tokens) {
    std::string prompt;
    for (const int32_t token : request.prompt)
        if (has_text(token)) tokenizer.decode_next(token, after_prompt_, prompt);  // as for the answer's text
    if (echo != nullptr) {
        n_echoed_ = request.prompt.size();
        offset_ = count_characters(*echo) - count_characters(text_of_tokens(tokenizer, request.prompt));
    } else {
        state_ = after_prompt_;
    }
}

// In an answer, or in a prompt that goes through the answer's decoder.
bool TextOffsets::has_text(int32_t token) const {
    return tokenizer_->has(token) && !(skips_special_ && tokenizer_->is_special(token));
}

int64_t TextOffsets::next(int32_t token) {
    const size_t before = last_.size();
    const bool is_echoed = n_echoed_ > 0;
    if (is_echoed ? tokenizer_->has(token) : has_text(token)) tokenizer_->decode_next(token, state_, last_);
    const bool has_ended = before > 0 && json_character_bytes(last_, 0) <= before;  // without bytes of this token
    const int64_t offset = offset_ + has_ended;
    for (size_t bytes; !last_.empty() && (bytes = json_character_bytes(last_, 0)) < last_.size(); ++offset_)
        last_.erase(0, bytes);
    if (is_echoed && --n_echoed_ == 0) state_ = after_prompt_;
    return std::max<int64_t>(offset, 0);
}

JsonText logprobs_json(const Tokenizer& tokenizer, std::span<const Sampled> tokens, TextOffsets& offsets) {
    JsonText texts = JsonText::array(), logprobs = JsonText::array(), tops = JsonText::array(),
             text_offset = JsonText::array();
    for (const Sampled& sampled : tokens) {
        const bool is_scored = !std::isnan(sampled.logprob);
        const std::string text = text_of(tokenizer, sampled.token, !is_scored).value_or("");
        // Several tokens may be written alike, pieces of characters above all, and an object has a key once: that is
        // for the chosen token, or else for the most probable one. The chosen token is there in any case.
        const std::string chosen = quoted(tokenizer, sampled.token);
        std::set<std::string> keys;
        JsonText top = JsonText::object();
        for (const TokenLogprob& other : sampled.top) {
            const std::string key = quoted(tokenizer, other.token);
            if (!keys.insert(key).second) continue;
            top.set(text_of(tokenizer, other.token).value_or(""), key == chosen ? sampled.logprob : other.logprob);
        }
        if (!keys.contains(chosen)) top.set(text, sampled.logprob);
        texts.push_back(text);
        logprobs.push_back(is_scored ? JsonText(sampled.logprob) : nullptr);
        tops.push_back(is_scored ? top : nullptr);
        text_offset.push_back(offsets.next(sampled.token));
    }
    return {{"tokens", texts}, {"token_logprobs", logprobs}, {"top_logprobs", tops}, {"text_offset", text_offset}};
}

std::string logprobs_table(const Tokenizer& tokenizer, std::span<const Sampled> tokens) {
    std::string table = "log-probability   token  text          most probable\n";
    for (const Sampled& sampled : tokens) {
        std::string line = format("%15.4f %7d  ", static_cast<double>(sampled.logprob), sampled.token);
        line += quoted(tokenizer, sampled.token);
        if (!sampled.top.empty()) line.resize(std::max<size_t>(line.size(), 37), ' ');
        for (const TokenLogprob& other : sampled.top)
            line += concat("  ", other.token, " ", quoted(tokenizer, other.token),
                           format(" %.4f", static_cast<double>(other.logprob)));
        table += line + "\n";
    }
    return table;
}
