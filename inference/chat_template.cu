// inference/chat_template.cu: a conversation as the text that a model was trained on.
//
// A chat model has seen conversations in one written form, with tokens of its own where messages begin and end; in
// another form it is much worse. Hugging Face folders describe the form as a program in a template language (Jinja).
// There are few forms, so we write each as a function, and recognise it by what its description mentions. What
// transformers makes of the models' own descriptions is in test/golden/chat.json, and each form is compared with it.
#include "inference/inference.h"
#include "io/json.h"

#include <algorithm>
#include <string_view>

namespace {

using Messages = std::vector<ChatMessage>;

bool has_system(const Messages& messages) { return !messages.empty() && messages[0].role == "system"; }

// Without what Python's str.strip removes at both ends.
std::string trimmed(std::string_view text) {
    static const std::vector<std::string_view> blanks = {
        " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
        "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
        "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
    for (size_t before = text.size() + 1; before != text.size();) {
        before = text.size();
        for (const std::string_view blank : blanks) {
            if (text.starts_with(blank)) text.remove_prefix(blank.size());
            if (text.ends_with(blank)) text.remove_suffix(blank.size());
        }
    }
    return std::string(text);
}

// An earlier answer of the assistant, as the next prompt has it: reasoning models are not shown what they thought.
using Answer = std::string (*)(const std::string& content);

std::string whole(const std::string& content) { return content; }

std::string behind_last_think(const std::string& content) {
    const size_t end = content.rfind("</think>");
    return end == std::string::npos ? content : content.substr(end + 8);
}

std::string behind_first_think(const std::string& content) {
    const size_t end = content.find("</think>");
    return end == std::string::npos ? content : content.substr(end + 8);
}

std::string without_first_line_ends(const std::string& text) {
    return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

std::string qwq_answer(const std::string& content) { return without_first_line_ends(behind_last_think(content)); }

std::string qwen3_answer(const std::string& content) {
    return content.find("</think>") == std::string::npos ? content : qwq_answer(content);
}

std::string qwen3_answer_with_thoughts(const std::string& content) {
    const size_t end = content.find("</think>");
    if (end == std::string::npos) return content;
    std::string thoughts = content.substr(0, end);
    thoughts.erase(thoughts.find_last_not_of('\n') + 1);
    if (const size_t begin = thoughts.rfind("<think>"); begin != std::string::npos) thoughts.erase(0, begin + 7);
    thoughts = without_first_line_ends(thoughts);
    return (thoughts.empty() ? "" : "<think>\n" + thoughts + "\n</think>\n\n") + qwq_answer(content);
}

// ChatML: `opening` is what the assistant's next message begins with.
std::string chatml_of(const Messages& messages, Answer answer, const std::string& opening) {
    std::string text;
    for (const ChatMessage& m : messages)
        text +=
            "<|im_start|>" + m.role + "\n" + (m.role == "assistant" ? answer(m.content) : m.content) + "<|im_end|>\n";
    return text + "<|im_start|>assistant\n" + opening;
}

std::string chatml(const Messages& messages) { return chatml_of(messages, whole, ""); }

std::string chatml_with_system(const Messages& messages, const std::string& system) {
    if (has_system(messages)) return chatml(messages);
    Messages all = messages;
    all.insert(all.begin(), {"system", system});
    return chatml(all);
}

std::string qwen2(const Messages& messages) { return chatml_with_system(messages, "You are a helpful assistant."); }

std::string qwen(const Messages& messages) {
    return chatml_with_system(messages, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
}

// The result of a tool is a message of the user. What the model thought on its way from the last question to such a
// result is still of use to it, and stays.
std::string qwen3_of(Messages messages, const std::string& opening) {
    const auto is_question = [](const ChatMessage& m) {
        const bool is_result = m.content.starts_with("<tool_response>") && m.content.ends_with("</tool_response>");
        return m.role == "user" && !is_result;
    };
    const std::ptrdiff_t behind_question =
        messages.rend() - std::find_if(messages.rbegin(), messages.rend(), is_question);
    for (std::ptrdiff_t i = 0; i < std::ssize(messages); ++i) {
        ChatMessage& m = messages[static_cast<size_t>(i)];
        if (m.role != "assistant") continue;
        const bool stays = behind_question > 0 && i >= behind_question;
        m.content = stays ? qwen3_answer_with_thoughts(m.content) : qwen3_answer(m.content);
    }
    return chatml_of(messages, whole, opening);
}

std::string qwen3(const Messages& messages) { return qwen3_of(messages, ""); }

std::string qwen3_thinking(const Messages& messages) { return qwen3_of(messages, "<think>\n"); }

std::string qwq(const Messages& messages) { return chatml_of(messages, qwq_answer, "<think>\n"); }

std::string llama2(const Messages& messages) {
    std::string text, system;
    for (const ChatMessage& m : messages) {
        if (m.role == "system") system = concat("<<SYS>>\n", m.content, "\n<</SYS>>\n\n");
        if (m.role == "user") text += concat("<s>[INST] ", trimmed(system + m.content), " [/INST]"), system.clear();
        if (m.role == "assistant") text += concat(" ", trimmed(m.content), " </s>");
    }
    return text;
}

std::string llama3_message(const std::string& role, const std::string& content) {
    return "<|start_header_id|>" + role + "<|end_header_id|>\n\n" + content + "<|eot_id|>";
}

std::string llama3(const Messages& messages) {
    std::string text = "<|begin_of_text|>";
    for (const ChatMessage& m : messages) text += llama3_message(m.role, trimmed(m.content));
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n";
}

// The date is the one that the description of 3.1 and 3.3 contains. That of 3.2 asks the clock, and contains the same
// date for where there is none: we take it there too, so that a conversation has the same tokens every day.
std::string llama3_1(const Messages& messages) {
    const std::string dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
    const std::string system = has_system(messages) ? trimmed(messages[0].content) : "";
    std::string text = "<|begin_of_text|>" + llama3_message("system", dates + system);
    for (const ChatMessage& m : messages)
        if (m.role != "system") text += llama3_message(m.role, trimmed(m.content));
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n";
}

// DeepSeek: `before` stands between a question and its answer, `opening` where the next answer begins.
std::string deepseek_of(const Messages& messages, Answer answer, const std::string& before,
                        const std::string& opening) {
    std::string text = "<｜begin▁of▁sentence｜>";
    for (const ChatMessage& m : messages) {
        if (m.role == "system") text += m.content;
        if (m.role == "user") text += "<｜User｜>" + m.content;
        if (m.role == "assistant") text += before + answer(m.content) + "<｜end▁of▁sentence｜>";
    }
    return text + opening;
}

std::string deepseek(const Messages& messages) {
    return deepseek_of(messages, whole, "<｜Assistant｜>", "<｜Assistant｜>");
}

std::string deepseek_r1(const Messages& messages) {
    return deepseek_of(messages, behind_last_think, "<｜Assistant｜>", "<｜Assistant｜><think>\n");
}

std::string deepseek_r1_0528(const Messages& messages) {
    return deepseek_of(messages, behind_last_think, "<｜Assistant｜>", "<｜Assistant｜>");
}

// Without reasoning, as its description is where nothing is said of it: </think> ends it before it began.
std::string deepseek_v3_1(const Messages& messages) {
    return deepseek_of(messages, behind_first_think, "<｜Assistant｜></think>", "<｜Assistant｜></think>");
}

// Mistral: where the blanks are, which an answer is, and the user's message that the system message stands in.
struct MistralForm {
    const char *open, *close, *before_answer;
    Answer answer;
    bool system_first;  // in the first of the user's messages; otherwise in the last
};

std::string mistral_of(const MistralForm& form, const Messages& messages) {
    const size_t first = has_system(messages) ? 1 : 0, with_system = form.system_first ? first : messages.size() - 1;
    std::string text = "<s>";
    for (size_t i = first; i < messages.size(); ++i) {
        const std::string& content = messages[i].content;
        const std::string system = first == 1 && i == with_system ? messages[0].content + "\n\n" : "";
        if (messages[i].role == "user") text += form.open + system + content + form.close;
        else text += form.before_answer + form.answer(content) + "</s>";
    }
    return text;
}

std::string mistral_v0(const Messages& messages) {
    return mistral_of({"[INST] ", " [/INST]", "", whole, true}, messages);
}

std::string mistral_v1(const Messages& messages) {
    return mistral_of({" [INST] ", " [/INST]", " ", whole, true}, messages);
}

std::string mistral(const Messages& messages) {
    const Answer answer = [](const std::string& content) { return trimmed(content); };
    return mistral_of({"[INST] ", "[/INST]", " ", answer, false}, messages);
}

std::string mistral_nemo(const Messages& messages) {
    return mistral_of({"[INST]", "[/INST]", "", whole, false}, messages);
}

std::string plain(const Messages& messages) {
    std::string text;
    for (const ChatMessage& m : messages) {
        if (m.role == "system") text += m.content + "\n\n";
        if (m.role == "user") text += "User: " + m.content + "\n";
        if (m.role == "assistant") text += "Assistant: " + m.content + "\n";
    }
    return text + "Assistant:";
}

const char* const kDeepSeekEnd = "<｜end▁of▁sentence｜>";
const ChatTemplate kTemplates[] = {{"chatml", chatml, "<|im_end|>"},
                                   {"qwen2", qwen2, "<|im_end|>"},
                                   {"qwen", qwen, "<|im_end|>"},
                                   {"qwen3", qwen3, "<|im_end|>"},
                                   {"qwen3-thinking", qwen3_thinking, "<|im_end|>"},
                                   {"qwq", qwq, "<|im_end|>"},
                                   {"llama2", llama2, "</s>"},
                                   {"llama3", llama3, "<|eot_id|>"},
                                   {"llama3.1", llama3_1, "<|eot_id|>"},
                                   {"deepseek", deepseek, kDeepSeekEnd},
                                   {"deepseek-r1", deepseek_r1, kDeepSeekEnd},
                                   {"deepseek-r1-0528", deepseek_r1_0528, kDeepSeekEnd},
                                   {"deepseek-v3.1", deepseek_v3_1, kDeepSeekEnd},
                                   {"mistral-v0", mistral_v0, "</s>"},
                                   {"mistral-v1", mistral_v1, "</s>"},
                                   {"mistral", mistral, "</s>"},
                                   {"mistral-nemo", mistral_nemo, "</s>"},
                                   {"plain", plain, "\nUser:"}};

// The description in a folder, or "".
std::string description_in(const std::string& folder) {
    const std::string jinja = folder + "/chat_template.jinja", config = folder + "/tokenizer_config.json";
    if (is_there(jinja)) return read_regular_file(jinja);
    if (!is_there(config)) return "";
    const Json::Value file = read_json_file(config);
    // A text, or a list of several with names, of which "default" is for conversations.
    const Json::Value& described = member(file, "chat_template");
    std::string text;
    if (read_value(described, text)) return text;
    for (const Json::Value& one : described)
        if (member(one, "name") == Json::Value("default")) read_value(member(one, "template"), text);
    return text;
}

// A special token's text in tokenizer_config.json, which has it as a string or an object; "" where it has none.
std::string token_in(const std::string& folder, const char* name) {
    const std::string config = folder + "/tokenizer_config.json";
    if (!is_there(config)) return "";
    const Json::Value file = read_json_file(config);
    std::string text;
    if (!read_value(member(file, name), text)) read_value(member(member(file, name), "content"), text);
    return text;
}

// What the description of a form mentions, and what it does not: that would be another form, perhaps one that we lack.
// The first that fits is taken.
struct Signs {
    const char* form;
    std::vector<std::string> mentioned, missing;
};

const char* const kChatmlSystem = "<|im_start|>system\n";

// Does ChatML's description contain the text of a system message, for conversations that have none? Where it does not,
// a quotation mark ends the string there, or a placeholder follows.
bool has_own_system(const std::string& description) {
    const std::string begin = kChatmlSystem;
    for (size_t at = 0; (at = description.find(begin, at)) != std::string::npos;) {
        at += begin.size();
        if (at < description.size() && std::string_view("'\"{").find(description[at]) == std::string_view::npos)
            return true;
    }
    return false;
}

const std::vector<Signs>& all_signs() {
    static const std::string chatml = "<|im_end|>' + '\n'", llama3 = "<|start_header_id|>",
                             deepseek = "'<｜User｜>' + ";
    static const std::string thoughts_cut = ".split('</think>')[-1]", lines_cut = thoughts_cut + ".lstrip('\n')";
    static const std::string thoughts_kept = "if loop.index0 > ns.last_query_index %}";
    static const std::string thinks = "<|im_start|>assistant\n<think>\n'", system = kChatmlSystem;
    static const std::vector<Signs> signs = {
        {"qwen",
         {chatml, system + "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>"},
         {"think", "bos_token"}},
        {"qwen2", {chatml, system + "You are a helpful assistant.<|im_end|>"}, {"think", "bos_token"}},
        {"qwq", {chatml, lines_cut, thinks}, {"reasoning_content", "trim", "bos_token", "enable_thinking"}},
        {"qwen3-thinking",
         {chatml, lines_cut, thinks, "reasoning_content", thoughts_kept},
         {"trim", "bos_token", "enable_thinking", "'<think>' in"}},
        {"qwen3",
         {chatml, lines_cut, "<|im_start|>assistant\n'", "reasoning_content", thoughts_kept},
         {"trim", "bos_token", "'<think>\n\n'", "not enable_thinking", "enable_thinking is not", "'<think>' in"}},
        {"chatml", {chatml}, {"think", "trim", "bos_token", "!= 'system'", "system_message"}},
        {"llama3.1",
         {llama3, "Cutting Knowledge Date: December 2023\n", "Today Date: ", "26 Jul 2024", "trim"},
         {"<|image|>"}},
        {"llama3", {llama3 + "' + ", "trim"}, {llama3 + "system", "tools", "Today Date: "}},
        {"deepseek-v3.1", {deepseek, "<｜Assistant｜></think>", "thinking = false"}, {"<think></think>"}},
        {"deepseek-r1", {deepseek, thoughts_cut, "<｜Assistant｜><think>\n'"}, {}},
        {"deepseek-r1-0528", {deepseek, "split('</think>')"}, {"<｜Assistant｜><think>", "<｜Assistant｜></think>"}},
        {"deepseek", {deepseek, "system_prompt"}, {"think"}},
        // "true == true": the description has a system message of its own.
        {"llama2", {"bos_token + '[INST] '", "'<<SYS>>\n' + system_message"}, {"true == true"}},
        {"mistral-v1", {"' [INST] '", "' [/INST]'", "loop.first and system_message"}, {}},
        {"mistral-v0", {"'[INST] '", "' [/INST]'", "message['content'] + eos_token}"}, {"system"}},
        {"mistral", {"\"[INST] \"", "\"[/INST]\"", "\"content\"]|trim + ", "loop.last and system_message"}, {}},
        {"mistral-nemo", {"\"[INST]\"", "\"[/INST]\"", "loop.last and system_message"}, {"trim"}}};
    return signs;
}

// Behind the end of the tag that begins at `tag`: {{ an expression }}, {% a block %} or {# a comment #}. What ends it
// may also stand in a string, or be braces of an expression.
size_t end_of_tag(std::string_view jinja, size_t tag) {
    const char kind = jinja[tag + 1];
    if (kind == '#') return std::min(jinja.find("#}", tag + 2), jinja.size() - 2) + 2;
    const std::string_view end = kind == '{' ? "}}" : "%}";
    int64_t braces = 0;
    char quote = '\0';  // of the string that i is in
    for (size_t i = tag + 2; i < jinja.size(); ++i) {
        const char c = jinja[i];
        if (quote != '\0') {
            if (c == quote) quote = '\0';
            i += c == '\\';
        } else if (c == '\'' || c == '"') {
            quote = c;
        } else if (braces == 0 && jinja.substr(i).starts_with(end)) {
            return i + 2;
        } else {
            braces += (c == '{') - (c == '}');
        }
    }
    return jinja.size();
}

// Does a description have text outside of its tags, which conversations would then have, too? As transformers sets
// Jinja, a block or a comment takes the line end after it and, where a line begins with it, the blanks before it; "-"
// takes all white space on its side of a tag; and a line end as the last character does not count.
bool has_text_outside_tags(std::string_view jinja) {
    constexpr const char* kWhiteSpace = " \t\n\v\f\r";
    if (jinja.ends_with('\n')) jinja.remove_suffix(1);
    bool line_begins = true, cuts = false;  // does the tag before end a line, or with "-"?
    for (size_t begin = 0;;) {
        const size_t tag = std::min({jinja.find("{{", begin), jinja.find("{%", begin), jinja.find("{#", begin)});
        const std::string_view mark = tag < jinja.size() ? jinja.substr(tag, 3) : "";
        const bool is_block = mark.starts_with("{%") || mark.starts_with("{#");
        std::string_view text = jinja.substr(begin, tag - begin);
        const size_t blanks = text.find_last_not_of(" \t") + 1;  // where those at the end begin
        if (mark.ends_with('-')) text = text.substr(0, text.find_last_not_of(kWhiteSpace) + 1);
        else if (is_block && (blanks == 0 ? line_begins : text[blanks - 1] == '\n')) text = text.substr(0, blanks);
        if (cuts) text.remove_prefix(std::min(text.find_first_not_of(kWhiteSpace), text.size()));
        if (!text.empty()) return true;
        if (mark.empty()) return false;
        begin = end_of_tag(jinja, tag);
        cuts = jinja.substr(0, begin - 2).ends_with('-');
        line_begins = is_block && jinja.substr(begin).starts_with('\n');
        begin += line_begins;
    }
}

// The name of the form that a description is of, or "".
std::string recognised(std::string described) {
    std::erase(described, '\r');                      // to Jinja \r\n is a line end, too
    if (has_text_outside_tags(described)) return "";  // no form has any
    std::string description;
    for (size_t i = 0; i < described.size(); ++i) {  // Jinja's \\n is a line end, which others write as one
        const bool is_line_end = described.compare(i, 2, "\\n") == 0;
        description += is_line_end ? '\n' : described[i];
        i += is_line_end;
    }
    const auto mentions = [&](const std::string& text) { return description.find(text) != std::string::npos; };
    const bool own_system = has_own_system(description);
    for (const Signs& signs : all_signs()) {
        const bool names_it = std::ranges::any_of(
            signs.mentioned, [](const std::string& text) { return text.starts_with(kChatmlSystem); });
        if (own_system && !names_it) continue;
        if (std::all_of(signs.mentioned.begin(), signs.mentioned.end(), mentions) &&
            std::none_of(signs.missing.begin(), signs.missing.end(), mentions))
            return signs.form;
    }
    return "";
}

// Where a description says bos_token and eos_token, are the folder's tokens those that the form writes? A model may
// have another's template and tokens of its own.
bool has_tokens_of(const ChatTemplate& form, const std::string& description, const std::string& folder) {
    const std::string begin = form.render({{"user", ""}});
    const auto agrees = [&](const char* name, auto is_written) {
        return description.find(name) == std::string::npos || is_written(token_in(folder, name));
    };
    return agrees("bos_token", [&](const auto& token) { return begin.starts_with(token); }) &&
           agrees("eos_token", [&](const auto& token) { return token.empty() || token == form.end; });
}

}  // namespace

std::string chat_template_names() {
    std::string names;
    for (const ChatTemplate& chat : kTemplates) names += concat(names.empty() ? "" : ", ", chat.name);
    return names;
}

const ChatTemplate& find_chat_template(const std::string& name, const std::string& folder) {
    const std::string description = name.empty() ? description_in(folder) : "";
    const std::string wanted = !name.empty() ? name : description.empty() ? "plain" : recognised(description);
    for (const ChatTemplate& chat : kTemplates)
        if (chat.name == wanted && has_tokens_of(chat, description, folder)) return chat;
    const std::string names = chat_template_names();
    if (name.empty()) fail(folder, ": its chat template is none of those known here: give --template ", names);
    fail("--template ", name, ": use ", names);
}

TextRequest chat_request(const GenerateOptions& options, const LoadedModel& model, const ChatTemplate& chat,
                         const Messages& messages) {
    model.expect_text();
    TextRequest request = text_request(options, model);
    request.prompt = model.tokenizer->encode(chat.render(messages));
    const std::vector<int32_t> end = model.tokenizer->encode(chat.end);
    if (end.size() == 1) request.stop_tokens.push_back(end[0]);
    else request.stop.push_back(chat.end);
    return request;
}
