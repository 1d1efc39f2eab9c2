// inference/chat_template.cu: a conversation as the text that a model was trained on.
//
// A chat model has seen conversations in one written form, with tokens of its own where messages begin and end; in
// another form it is much worse. Hugging Face folders describe the form as a program in a template language (Jinja).
// There are few forms, so we write each as a function, and recognise it by what its description mentions.
#include "inference/inference.h"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace {

using Messages = std::vector<ChatMessage>;

std::string trimmed(const std::string& text) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
}

bool has_system(const Messages& messages) { return !messages.empty() && messages[0].role == "system"; }

std::string chatml(const Messages& messages) {
    std::string text;
    for (const ChatMessage& m : messages) text += "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n";
    return text + "<|im_start|>assistant\n";
}

std::string qwen(const Messages& messages) {
    if (has_system(messages)) return chatml(messages);
    Messages all = messages;
    all.insert(all.begin(), {"system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."});
    return chatml(all);
}

std::string llama3(const Messages& messages) {
    std::string text = "<|begin_of_text|>";
    for (const ChatMessage& m : messages)
        text += "<|start_header_id|>" + m.role + "<|end_header_id|>\n\n" + trimmed(m.content) + "<|eot_id|>";
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n";
}

// The date of today is that which transformers writes where it is told none.
std::string llama3_1(const Messages& messages) {
    Messages all = messages;
    if (!has_system(all)) all.insert(all.begin(), {"system", ""});
    all[0].content = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" + trimmed(all[0].content);
    std::string text = llama3({});
    text.resize(std::string("<|begin_of_text|>").size());
    for (const ChatMessage& m : all) {
        const std::string content = m.role == "system" ? m.content : trimmed(m.content);  // its blank line stays
        text += "<|start_header_id|>" + m.role + "<|end_header_id|>\n\n" + content + "<|eot_id|>";
    }
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n";
}

std::string deepseek(const Messages& messages) {
    std::string text = "<｜begin▁of▁sentence｜>";
    for (const ChatMessage& m : messages) {
        if (m.role == "system") text += m.content;
        if (m.role == "user") text += "<｜User｜>" + m.content;
        if (m.role == "assistant") text += "<｜Assistant｜>" + m.content + "<｜end▁of▁sentence｜>";
    }
    return text + "<｜Assistant｜>";
}

std::string mistral(const Messages& messages) {
    std::string text = "<s>", system;
    for (const ChatMessage& m : messages) {
        if (m.role == "system") system = m.content + "\n\n";
        if (m.role == "user") text += "[INST] " + system + m.content + " [/INST]", system.clear();
        if (m.role == "assistant") text += " " + m.content + "</s>";
    }
    return text;
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

const ChatTemplate kTemplates[] = {{"chatml", chatml, "<|im_end|>"},
                                   {"qwen", qwen, "<|im_end|>"},
                                   {"llama3", llama3, "<|eot_id|>"},
                                   {"llama3.1", llama3_1, "<|eot_id|>"},
                                   {"deepseek", deepseek, "<｜end▁of▁sentence｜>"},
                                   {"mistral", mistral, "</s>"},
                                   {"plain", plain, "\nUser:"}};

// The description in a folder, or "".
std::string description_in(const std::string& folder) {
    const std::string jinja = folder + "/chat_template.jinja", config = folder + "/tokenizer_config.json";
    if (is_there(jinja)) return read_text_file(jinja);
    if (!is_there(config)) return "";
    const nlohmann::json file = nlohmann::json::parse(read_text_file(config), nullptr, false);
    if (!file.is_object() || !file.contains("chat_template")) return "";
    // A text, or a list of several with names, of which "default" is for conversations.
    const nlohmann::json& described = file["chat_template"];
    if (described.is_string()) return described.get<std::string>();
    for (const auto& one : described)
        if (one.is_object() && one.value("name", "") == "default") return one.value("template", "");
    return "";
}

// The name of the form that a description is of, or "".
std::string recognised(const std::string& description) {
    const auto mentions = [&](const char* text) { return description.find(text) != std::string::npos; };
    if (mentions("<|im_start|>")) return mentions("You are Qwen, created by Alibaba Cloud") ? "qwen" : "chatml";
    if (mentions("<|start_header_id|>")) return mentions("Cutting Knowledge Date") ? "llama3.1" : "llama3";
    if (mentions("<｜User｜>")) return "deepseek";
    if (mentions("[INST]")) return "mistral";
    return "";
}

}  // namespace

const ChatTemplate& find_chat_template(const std::string& name, const std::string& folder) {
    const std::string description = name.empty() ? description_in(folder) : "";
    const std::string wanted = !name.empty() ? name : description.empty() ? "plain" : recognised(description);
    std::string names;
    for (const ChatTemplate& chat : kTemplates) {
        if (chat.name == wanted) return chat;
        names += concat(names.empty() ? "" : ", ", chat.name);
    }
    if (name.empty()) fail(folder, ": its chat template is none of those known here: give --template ", names);
    fail("--template ", name, ": use ", names);
}

TextRequest chat_request(const GenerateOptions& options, const LoadedModel& model, const ChatTemplate& chat,
                         const Messages& messages) {
    check(model.is_text, model.folder, ": there is no tokenizer.json in this folder: give --tokenizer");
    TextRequest request = text_request(options, model);
    request.prompt = model.tokenizer->encode(chat.render(messages));
    const std::vector<int32_t> end = model.tokenizer->encode(chat.end);
    if (end.size() == 1) request.stop_tokens.push_back(end[0]);
    else request.stop.push_back(chat.end);
    return request;
}
