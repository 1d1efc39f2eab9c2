// Chat templates: each form against what transformers writes by the models' own templates, and which form a folder has.
#include "inference/inference.h"
#include "json.h"
#include "temp_folder.h"
#include "test.h"

#include <map>
#include <regex>
#include <set>
#include <sstream>

namespace {

std::vector<ChatMessage> messages_of(const json& list) {
    std::vector<ChatMessage> messages;
    for (const json& one : list) messages.push_back({as<std::string>(one["role"]), as<std::string>(one["content"])});
    return messages;
}

std::set<std::string> all_forms() {
    std::istringstream names(chat_template_names());
    std::set<std::string> all;
    for (std::string name; names >> name;) all.insert(name.substr(0, name.find(',')));
    return all;
}

std::string form_in(const TempFolder& folder) { return find_chat_template("", folder.path).name; }

// What is said of ChatML in Jinja, with a sentence more.
std::string chatml_and(const std::string& more) {
    return R"({{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }})" + more;
}

// The beginning of DeepSeek's, and a sentence more.
std::string deepseek_and(const std::string& more) {
    return "{{ bos_token }}{{ ns.system_prompt }}{{ '<｜User｜>' + m.content }}" + more;
}

}  // namespace

TEST_CASE("A form writes what transformers writes by the models' own templates", "[chat][golden]") {
    const json golden = parsed_json(read_text_file("test/golden/chat.json"));
    std::set<std::string> held = {"plain"};  // our own
    for (const json& form : golden["forms"]) {
        const ChatTemplate chat = find_chat_template(as<std::string>(form["form"]), "");
        held.insert(chat.name);
        CHECK(form["texts"].size() >= 6);
        for (const std::string& conversation : form["texts"].getMemberNames()) {
            INFO(chat.name << ": " << conversation);
            CHECK(chat.render(messages_of(golden["conversations"][conversation])) ==
                  as<std::string>(form["texts"][conversation]));
        }
    }
    CHECK(held == all_forms());
}

TEST_CASE("the pages have every chat template", "[chat][docs]") {
    const std::string header = slurp("inference/inference.h"), page = slurp("doc/inference.md");
    for (const std::string& name : all_forms()) {
        INFO(name);
        CHECK(std::regex_search(header, std::regex("\n//   ([a-z0-9.-]+, )*" + name + "[ ,]")));
        CHECK(std::regex_search(page, std::regex("\n\\| ([a-z0-9.-]+, )*" + name + "[ ,]")));
    }
}

TEST_CASE("Mistral's oldest form takes a system message as the next one does", "[chat]") {
    const std::vector<ChatMessage> messages = {
        {"system", "Be brief."}, {"user", "a"}, {"assistant", "b"}, {"user", "c"}};
    CHECK(find_chat_template("mistral-v0", "").render(messages) ==
          "<s>[INST] Be brief.\n\na [/INST]b</s>[INST] c [/INST]");
}

// As transformers has it with the templates of Qwen3-0.6B and Qwen3-4B-Thinking-2507.
TEST_CASE("Qwen 3 keeps what it thought between a question and the result of a tool", "[chat]") {
    const std::string result = "<tool_response>\n8\n</tool_response>";
    const auto written = [&](const std::string& first, const std::string& last, const std::string& end) {
        return find_chat_template("qwen3", "")
            .render({{"user", first},
                     {"assistant", "<think>\na\n</think>\n\nb"},
                     {"user", last},
                     {"assistant", "c\n\n</think>\n\nd"},
                     {"user", end}});
    };
    const auto expected = [](const std::string& first, const std::string& b, const std::string& last,
                             const std::string& d, const std::string& end) {
        const std::string user = "<|im_start|>user\n", assistant = "<|im_start|>assistant\n", close = "<|im_end|>\n";
        return user + first + close + assistant + b + close + user + last + close + assistant + d + close + user + end +
               close + assistant;
    };
    const std::string b = "<think>\na\n</think>\n\nb", d = "<think>\nc\n</think>\n\nd";
    CHECK(written("q", "r", result) == expected("q", "b", "r", d, result));
    CHECK(written("q", result, result) == expected("q", b, result, d, result));
    CHECK(written("q", result, "r") == expected("q", "b", result, "d", "r"));
    CHECK(written(result, result, result) == expected(result, "b", result, "d", result));  // no question at all
    const std::vector<ChatMessage> no_thoughts = {
        {"user", "q"}, {"assistant", "<think>\n\n</think>\n\ne"}, {"user", result}};
    CHECK(find_chat_template("qwen3-thinking", "").render(no_thoughts) ==
          "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n<|im_start|>user\n" + result +
              "<|im_end|>\n<|im_start|>assistant\n<think>\n");
}

TEST_CASE("A folder's chat template is recognised by what its description mentions", "[chat]") {
    const std::string reasoning =
        "{% if loop.index0 > ns.last_query_index %}{{ reasoning_content }}{% endif %}{{ "
        "m.content.split('</think>')[-1].lstrip('\\n') }}";
    const std::string ask = "{{ '<|im_start|>assistant\\n' }}", think = "{{ '<|im_start|>assistant\\n<think>\\n' }}";
    const std::string no_thoughts = "{{ '<|im_start|>assistant\\n<think>\\n</think>' }}";
    const std::string header = "{{ '<|start_header_id|>' + m.role }}{{ m.content | trim }}";
    const std::string dated =
        header + "{{ 'Cutting Knowledge Date: December 2023\\n' }}{{ 'Today Date: ' + '26 Jul 2024' }}";
    const std::string system_last = "{% if loop.last and system_message is defined %}";
    const std::string system_first = "{% if loop.first and system_message is defined %}";
    const std::pair<std::string, std::string> descriptions[] = {
        {"chatml", chatml_and("{{ '<|im_start|>system\\n' + messages[0].content }}" + ask)},
        {"chatml", chatml_and("{{ '<|im_start|>system\\n{}<|im_end|>\\n'.format(messages[0].content) }}" + ask)},
        {"qwen2", chatml_and("{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}")},
        {"qwen", chatml_and("{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
                            "assistant.<|im_end|>\\n' }}")},
        {"qwen3", chatml_and(reasoning + ask + "{{ '<think>\\n\\n</think>\\n\\n' }}")},
        {"qwen3-thinking", chatml_and(reasoning + think)},
        {"qwq", chatml_and("{{ m.content.split('</think>')[-1].lstrip('\\n') }}" + think)},
        {"llama2", "{{ '<<SYS>>\\n' + system_message }}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"},
        {"llama3", header},
        {"llama3.1", dated},
        {"deepseek", deepseek_and("{{ '<｜Assistant｜>' }}")},
        {"deepseek-r1", deepseek_and("{{ m.content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\n' }}")},
        {"deepseek-r1-0528", deepseek_and("{{ m.content.split('</think>')[-1] }}{{ '<｜Assistant｜>' }}")},
        {"deepseek-v3.1",
         deepseek_and(
             "{% set thinking = false %}{{ m.content.split('</think>', 1)[1] }}{{ '<｜Assistant｜></think>' }}")},
        {"mistral-v0", "{{ '[INST] ' + m.content + ' [/INST]' }}{{ message['content'] + eos_token}}"},
        {"mistral-v1", system_first + "{{ ' [INST] ' + m.content + ' [/INST]' }}{{ ' ' + m.content + eos_token }}"},
        {"mistral", system_last + R"({{ "[INST] " + t + "[/INST]" }}{{ " " + message["content"]|trim + eos_token }})"},
        {"mistral-nemo", system_last + R"({{ "[INST]" + t + "[/INST]" }}{{ message["content"] + eos_token }})"}};
    const TempFolder folder;
    std::set<std::string> found = {"plain"};
    for (const auto& [form, description] : descriptions) {
        INFO(description);
        spit(folder / "chat_template.jinja", description);
        CHECK(form_in(folder) == form);
        found.insert(form);
    }
    CHECK(found == all_forms());
    spit(folder / "chat_template.jinja", "{#- don't #}\r\n  {% if m %}\n\n    {%- set x = '%}' + \"%}\" -%}\n    " +
                                             chatml_and("{{- {'a': {'}}': ''}}['a']['\\'}}'] }}\n  {%- endif %}\n"));
    CHECK(form_in(folder) == "chatml");  // white space that Jinja takes away
    spit(folder / "chat_template.jinja", chatml_and("") + "\n");
    CHECK(form_in(folder) == "chatml");  // also the last line end, behind an expression

    std::vector<std::string> unknown = {
        "{{ '<start_of_turn>' + m.role }}",                                               // Gemma
        "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}",        // Phi-4
        chatml_and("{% if messages[0]['role'] != 'system' %}{{ 'You are a parrot.' }}"),  // a system message of its own
        chatml_and("{% else %}{{ '<|im_start|>system\\nReason step by step.<|im_end|>\\n' }}" + ask),  // Qwen 2.5 Math
        chatml_and(reasoning + ask + "{{ '<|im_start|>system\\nReason step by step.<|im_end|>\\n' }}"),
        chatml_and("{{ bos_token }}"),
        chatml_and(reasoning + ask +
                   "{% if m %}{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n\\n' }}"),  // Axolotl's Qwen 3
        chatml_and("{{ m.content | trim }}" + reasoning + ask),                                      // Qwen 3.5
        // QwQ and Qwen 3 whose answers begin with a reasoning that is empty
        chatml_and("{{ m.content.split('</think>')[-1].lstrip('\\n') }}" + no_thoughts),
        chatml_and(reasoning + no_thoughts), header + "{{ '<|start_header_id|>system<|end_header_id|>' + tools }}",
        header + "{{ '<|start_header_id|>system<|end_header_id|>' }}",
        dated + "{{ tools }}{{ '<|image|>' }}",                               // LLaMA 3.2 Vision
        "{{ message['content'] + '\\n\\n' }}{{ '<｜User｜>' + m.content }}",  // DeepSeek-V2
        // R1's with a backslash and an n where the line end should be, and without reasoning
        deepseek_and("{{ m.content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\\\n' }}"),
        deepseek_and("{{ m.content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\n</think>' }}"),
        // DeepSeek-V2.5: eight blanks before its system message
        deepseek_and("{%- if is_system %}        {% set ns.system_prompt = m.content %}{{ '<｜Assistant｜>' }}"),
        "{{ '[SYSTEM_PROMPT]' + s }}{{ '[INST]' + m.content + '[/INST]' }}",    // Mistral Small 3
        "{{ '[SYSTEM_PROMPT] ' + s }}{{ '[INST] ' + m.content + '[/INST]' }}",  // Mistral Large 2411
        "{{ '[INST] ' + m.content + ' [/INST]' }}{{ message['content'] + eos_token + ' ' }}",
        "\n" + chatml_and(""),  // Unsloth's Yi: a line end before all
        "{% for m in messages %}\n  " + chatml_and("{% endfor %}"),
        "{% for m in messages %}" + chatml_and("\n{% endfor %}")};
    // Forms with something more, and without something.
    const auto described = [&](const std::string& form) {
        return std::ranges::find(descriptions, form, [](const auto& one) { return one.first; })->second;
    };
    for (const auto& [form, words] : std::map<std::string, std::vector<std::string>>{
             {"chatml", {"think", "trim", "bos_token", "system_message"}},
             {"qwen", {"think", "bos_token"}},
             {"qwen2", {"think", "bos_token"}},
             {"qwen3", {"bos_token", "'<think>' in content", "not enable_thinking", "enable_thinking is not"}},
             {"qwen3-thinking", {"trim", "bos_token", "enable_thinking", "'<think>' in content"}},
             {"qwq", {"trim", "bos_token", "enable_thinking"}},
             {"llama2", {"true == true"}},  // a system message of its own
             {"deepseek", {"think"}},
             {"deepseek-v3.1", {"'<think></think>'"}},
             {"mistral-v0", {"system"}},
             {"mistral-nemo", {"trim"}}})
        for (const std::string& word : words) unknown.push_back(described(form) + "{{ " + word + " }}");
    for (const auto& [form, word] :
         std::multimap<std::string, std::string>{{"llama3", " | trim"},
                                                 {"llama3.1", " | trim"},
                                                 {"llama3.1", "26 Jul 2024"},
                                                 {"qwen3", "> ns.last_query_index"},  // TRL's: keeps all reasoning
                                                 {"qwen3-thinking", "> ns.last_query_index"},
                                                 {"deepseek-v3.1", "thinking = false"},
                                                 {"deepseek-r1", ".split('</think>')[-1]"},
                                                 {"mistral-v1", "loop.first and "},
                                                 {"mistral", "|trim"},
                                                 {"mistral-nemo", "loop.last and "}}) {
        unknown.push_back(described(form));
        unknown.back().erase(unknown.back().find(word), word.size());
    }
    for (const std::string& description : unknown) {
        INFO(description);
        spit(folder / "chat_template.jinja", description);
        CHECK_THROWS_WITH(form_in(folder), ContainsSubstring("its chat template is none of those known here") &&
                                               ContainsSubstring("--template " + chat_template_names()));
    }
}

TEST_CASE("A chat template is described in either file of a folder, or nowhere", "[chat]") {
    const TempFolder folder;
    CHECK(form_in(folder) == "plain");
    json config = value({{"eos_token", "</s>"}});
    spit(folder / "tokenizer_config.json", dumped(config));
    CHECK(form_in(folder) == "plain");
    config["chat_template"] = chatml_and("");
    spit(folder / "tokenizer_config.json", dumped(config));
    CHECK(form_in(folder) == "chatml");
    const std::string llama3 = "{{ '<|start_header_id|>' + m.role }}{{ m.content | trim }}";
    const JsonText tools = {{"name", "tool_use"}, {"template", "tools"}},
                   chat = {{"name", "default"}, {"template", llama3}};
    config["chat_template"] = value(JsonText::array({tools, chat, tools}));
    spit(folder / "tokenizer_config.json", dumped(config));
    CHECK(form_in(folder) == "llama3");
    spit(folder / "chat_template.jinja", chatml_and(""));  // the file by itself comes first
    CHECK(form_in(folder) == "chatml");
    // A description that says bos_token or eos_token means those of the folder; a form writes those of its models.
    const std::string mistral =
        "{{ bos_token }}{{ '[INST] ' + m.content + ' [/INST]' }}{{ message['content'] + eos_token}}";
    spit(folder / "chat_template.jinja", mistral);
    const auto with_tokens = [&](const json& bos, const json& eos) {
        config["bos_token"] = bos, config["eos_token"] = eos;
        spit(folder / "tokenizer_config.json", dumped(config));
        return error_of([&] { form_in(folder); });
    };
    CHECK(with_tokens("<s>", value({{"content", "</s>"}})) == "");
    CHECK(with_tokens(json(), json()) == "");  // perhaps elsewhere in the folder
    CHECK(one_line_with(with_tokens("<|startoftext|>", "</s>"), "none of those known here"));
    CHECK(one_line_with(with_tokens(value({{"content", "<|startoftext|>"}}), "</s>"), "none of those known here"));
    CHECK(one_line_with(with_tokens("<s>", "<|endoftext|>"), "none of those known here"));
    spit(folder / "chat_template.jinja", chatml_and(""));  // says neither
    CHECK(form_in(folder) == "chatml");
    CHECK_THROWS_WITH(find_chat_template("vicuna", ""), "--template vicuna: use " + chat_template_names());
}
