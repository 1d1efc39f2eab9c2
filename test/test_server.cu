// generate --serve, as clients see it: over sockets, with HTTP written by hand.
#include "train_runs.h"
#include "json.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

namespace {

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// A model of bytes that has learned which ones are text, with so many positions that an answer takes as long as a test
// wants.
const std::string& model_folder() {
    static const TempFolder folder;
    static const std::string path = [] {
        REQUIRE(train("--steps 60 --lr 3e-3 --val-every 0 --out " + (folder / "run")).status == 0);
        const std::string checkpoint = newest_checkpoint(folder / "run");
        json config = parsed_json(slurp(checkpoint + "/config.json"));
        config["max_position_embeddings"] = 1000000;
        spit(checkpoint + "/config.json", dumped(config));
        std::filesystem::rename(checkpoint, folder / "model+1");  // "+" has a meaning in patterns
        return folder / "model+1";
    }();
    return path;
}

// What --serve says of an address that is not this machine's, or of having been built without its library.
const std::string& refusal_to_listen() {
    static const std::string line =
        run_program("generate", "--serve --host 192.0.2.1 --max-length 100 --model " + model_folder()).err;
    return line;
}
#define SKIP_WITHOUT_SERVER() \
    if (refusal_to_listen().find("without cpp-httplib") != std::string::npos) SKIP_TEST("built without cpp-httplib")

class Server {
  public:
    explicit Server(const std::string& flags, const std::string& host = "127.0.0.1") {
        model_folder();
        pid_ = ::fork();
        if (pid_ == 0) {
            const std::string command =
                concat("export OMP_NUM_THREADS=1; exec ", program_path("generate"), " --serve --port 0 --model ",
                       model_folder(), "/ --max-length 4000 --cache-pages 400 --step-tokens 64 ", flags, " > ",
                       folder_ / "out", " 2> ", folder_ / "err");
            ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
            ::_exit(127);
        }
        for (int i = 0; i < 1000 && port_ == 0; ++i, pause_ms(10)) {
            const std::string line = slurp(folder_ / "out"), before = concat("at http://", host, ":");
            const size_t at = line.find(before);
            if (at != std::string::npos && line.back() == '\n') port_ = std::stoi(line.substr(at + before.size()));
        }
        INFO(slurp(folder_ / "err"));
        REQUIRE(port_ > 0);
    }
    ~Server() {
        if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    }
    int port() const { return port_; }
    void signal(int number) const { ::kill(pid_, number); }
    int wait() {
        int status = 0;
        ::waitpid(pid_, &status, 0);
        pid_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

  private:
    TempFolder folder_;
    pid_t pid_ = 0;
    int port_ = 0;
};

// A connection: what was sent and what came.
class Client {
  public:
    Client(const Server& server, const std::string& text) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET, address.sin_port = htons(static_cast<uint16_t>(server.port()));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const timeval limit{20, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        REQUIRE(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        send(text);
    }
    ~Client() { leave(); }
    void end_writing() { ::shutdown(fd_, SHUT_WR); }
    void leave() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }
    void send(const std::string& text) {
        for (size_t n = 0; n < text.size();) {
            const ssize_t sent = ::send(fd_, text.data() + n, text.size() - n, MSG_NOSIGNAL);
            if (sent <= 0) return;
            n += static_cast<size_t>(sent);
        }
    }
    // What has come when `text` is in it, or when the server has closed the connection.
    const std::string& read_until(const std::string& text) {
        char buffer[4096];
        while (text.empty() || came_.find(text) == std::string::npos) {
            const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
            if (n < 0 && errno == EINTR) continue;  // this process was stopped, and goes on
            if (n <= 0) break;
            came_.append(buffer, static_cast<size_t>(n));
        }
        return came_;
    }
    const std::string& read_all() { return read_until(""); }

  private:
    int fd_;
    std::string came_;
};

std::string http(const std::string& method, const std::string& path, const std::string& body = "",
                 const std::string& headers = "") {
    return concat(method, " ", path, " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n", headers,
                  method == "POST" ? "Content-Type: application/json\r\n" : "", "Content-Length: ", body.size(),
                  "\r\n\r\n", body);
}

struct Reply {
    int status = 0;
    std::string head, body;
    json object() const { return parsed_json(body); }
};
Reply parsed(const std::string& text) {
    const size_t end = text.find("\r\n\r\n");
    REQUIRE(text.compare(0, 9, "HTTP/1.1 ") == 0);
    REQUIRE(end != std::string::npos);
    return {std::stoi(text.substr(9, 3)), text.substr(0, end), text.substr(end + 4)};
}
Reply ask(const Server& server, const std::string& text) { return parsed(Client(server, text).read_all()); }
Reply complete(const Server& server, const json& request) {
    return ask(server, http("POST", "/v1/completions", dumped(request)));
}
Reply chat(const Server& server, const json& request) {
    return ask(server, http("POST", "/v1/chat/completions", dumped(request)));
}

// The objects of a stream of events, and whether "[DONE]" was the last.
std::vector<json> events(const Reply& reply) {
    CHECK(reply.head.find("text/event-stream") != std::string::npos);
    std::vector<json> all;
    const std::string mark = "data: ";
    bool done = false;
    for (size_t at = 0; (at = reply.body.find(mark, at)) != std::string::npos;) {
        at += mark.size();
        const std::string data = reply.body.substr(at, reply.body.find("\n\n", at) - at);
        CHECK_FALSE(done);
        done = data == "[DONE]";
        if (!done) all.push_back(parsed_json(data));
    }
    CHECK(done);
    return all;
}

// A number of /metrics.
double metric(const Server& server, const std::string& name) {
    const std::string text = ask(server, http("GET", "/metrics")).body;
    return number_after(text, "\n" + name + " ");
}
bool becomes(const Server& server, const std::string& name, double value) {
    for (int i = 0; i < 500; ++i, pause_ms(10))
        if (metric(server, name) == value) return true;
    return false;
}

const json kLong = value({{"prompt", "for ever"}, {"max_tokens", 3900}, {"stream", true}, {"ignore_eos", true}});

}  // namespace

TEST_CASE("the server answers as OpenAI's interface", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    CHECK(
        one_line_with(refusal_to_listen().substr(0, refusal_to_listen().size() - 1), "192.0.2.1 port 8000", "--port"));
    const Server server("--tokens 30 --logprobs 1 --draft " + model_folder());
    const std::string name = ask(server, http("GET", "/v1/models")).object()["data"][0]["id"].asString();
    CHECK(name == model_folder());
    CHECK(ask(server, http("GET", "/v1/models")).object()["data"][0]["max_model_len"] == 4000);
    CHECK(ask(server, http("GET", "/health")).status == 200);
    CHECK(ask(server, http("GET", "/")).body.find("<!doctype html>") == 0);

    const json request = value({{"model", name},
                                {"prompt", "Line 7"},
                                {"max_tokens", 20},
                                {"seed", 5},
                                {"top_k", 20},
                                {"logprobs", -1},
                                {"ignore_eos", true}});
    const Reply whole = complete(server, request);
    CHECK(whole.status == 200);
    CHECK(metric(server, "llm_draft_tokens_total") > 0);  // the draft is the model itself
    CHECK(metric(server, "llm_draft_tokens_accepted_total") == metric(server, "llm_draft_tokens_total"));
    CHECK(metric(server, "llm_sequence_steps_total") == 4);  // 1 + 4 * 5 tokens, of which 20 are wanted
    CHECK(metric(server, "llm_time_to_first_token_seconds_count") == 1);
    CHECK(metric(server, "llm_time_per_token_seconds_count") == 19);
    const json answer = whole.object();
    json of_other = request;
    of_other["model"] = "gpt-9";
    CHECK(complete(server, of_other).object()["error"]["code"] == "model_not_found");
    CHECK(answer["object"] == "text_completion");
    CHECK(answer["usage"] == value({{"prompt_tokens", 6}, {"completion_tokens", 20}, {"total_tokens", 26}}));
    CHECK(answer["choices"][0]["finish_reason"] == "length");
    CHECK(answer["choices"][0]["logprobs"].isNull());
    const std::string text = answer["choices"][0]["text"].asString();
    CHECK(complete(server, request).object()["choices"][0]["text"] == text);  // the same seed
    json largest = request, negative = request;
    largest["seed"] = UINT64_MAX, negative["seed"] = -1;  // the same bits
    CHECK(complete(server, largest).object()["choices"] == complete(server, negative).object()["choices"]);
    CHECK(as<std::string>(answer["id"]).starts_with("cmpl-"));

    SECTION("a stream has the same text in pieces") {
        json streamed = request;
        streamed["stream"] = true, streamed["stream_options"]["include_usage"] = true;
        std::string pieces;
        const Reply reply = complete(server, streamed);
        CHECK(reply.head.find("Cache-Control: no-cache") != std::string::npos);
        const std::vector<json> all = events(reply);
        REQUIRE(all.size() > 3);
        for (size_t i = 0; i + 1 < all.size(); ++i) pieces += all[i]["choices"][0]["text"].asString();
        CHECK(pieces == text);
        for (const json& event : all) CHECK((event["id"] == all[0]["id"] && event["object"] == "text_completion"));
        CHECK(all[all.size() - 2]["choices"][0]["finish_reason"] == "length");
        CHECK((all[0].isMember("usage") && all[0]["usage"].isNull()));
        CHECK(all.back()["choices"].empty());
        CHECK(all.back()["usage"] == answer["usage"]);
        const std::string newer = http("POST", "/v1/completions", dumped(streamed));
        const Reply unchunked = ask(server, replaced(newer, "HTTP/1.1", "HTTP/1.0"));  // whose clients know no chunks
        CHECK(unchunked.head.find("Transfer-Encoding") == std::string::npos);
        CHECK(unchunked.body.starts_with("data: "));
        CHECK(events(unchunked).size() == all.size());
    }
    SECTION("a prompt as tokens, several prompts, several answers, and the prompt again") {
        json ids = request;
        ids["prompt"] = value(std::vector<int>{'L', 'i', 'n', 'e', ' ', '7'});
        CHECK(complete(server, ids).object()["choices"][0]["text"] == text);
        ids["seed"] = 6;
        CHECK(complete(server, ids).object()["choices"][0]["text"] != text);
        ids["seed"] = 5;
        ids["prompt"] = value(std::vector{"Line 8", "Line 7"}), ids["n"] = 3, ids["echo"] = true;
        ids["logprobs"] = json();  // null is as if it were not there
        const json many = complete(server, ids).object(), choices = many["choices"];
        CHECK(many["usage"]["prompt_tokens"] == 12);  // each prompt is computed once
        REQUIRE(choices.size() == 6);
        for (int i = 0; i < 6; ++i) {
            CHECK(choices[i]["index"] == i);
            CHECK(as<std::string>(choices[i]["text"]).find(i < 3 ? "Line 8" : "Line 7") == 0);
        }
        CHECK(choices[3]["text"] == "Line 7" + text);  // the first of n is what n = 1 gives
        CHECK(choices[4]["text"] != choices[3]["text"]);
    }
    SECTION("a prompt that ends inside of a character, which the answer completes, as a stream") {
        json half = value({{"prompt", std::vector<int>{'a', 0xe0}}, {"logit_bias", {{"160", 100}}}, {"echo", true}});
        for (const int n : {1, 2, 3}) {
            half["max_tokens"] = n, half["stream"] = true;
            std::string pieces;
            for (const json& event : events(complete(server, half))) pieces += event["choices"][0]["text"].asString();
            if (n > 1) CHECK(pieces == "a\u0820" + std::string(n == 2 ? "" : "\ufffd"));
            half["stream"] = false;
            CHECK(complete(server, half).object()["choices"][0]["text"] == pieces);
        }
    }
    SECTION("log-probabilities in both forms") {
        json with = request;
        with["logprobs"] = 3;
        const json choice = complete(server, with).object()["choices"][0];
        CHECK(choice["text"] == text);
        CHECK(choice["logprobs"]["tokens"].size() == 20);
        double sum = 0;
        for (const json& logprob : choice["logprobs"]["top_logprobs"][0]) sum += std::exp(as<double>(logprob));
        CHECK((sum > 0 && sum < 1));
        CHECK(choice["logprobs"]["text_offset"][0] == 0);
        const json message = value({{"messages", JsonText::array({JsonText{{"role", "user"}, {"content", "Hello"}}})},
                                    {"logprobs", true},
                                    {"top_logprobs", 2},
                                    {"temperature", 0},
                                    {"max_tokens", 4},
                                    {"ignore_eos", true}});
        const json answered = chat(server, message).object()["choices"][0];
        const json content = answered["logprobs"]["content"];
        REQUIRE(content.size() == 4);
        std::string said;
        for (const json& token : content)
            for (const json& byte : token["bytes"]) said += static_cast<char>(as<int>(byte));
        CHECK(said == as<std::string>(answered["message"]["content"]));
        CHECK(as<double>(content[0]["top_logprobs"][1]["logprob"]) < as<double>(content[0]["logprob"]));
        CHECK(content[0]["top_logprobs"].size() == 2);
        CHECK(content[0]["top_logprobs"][0]["bytes"] == content[0]["bytes"]);  // greedy: the most probable one
        CHECK(content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]);
    }
    SECTION("log-probabilities of a prompt are those that it had as an answer") {
        json with = request;
        with["logprobs"] = 3;
        const json drawn = complete(server, with).object()["choices"][0]["logprobs"];
        json echo = with;
        echo["prompt"] = "Line 7" + text, echo["echo"] = true, echo["max_tokens"] = 0;
        const Reply reply = complete(server, echo);
        REQUIRE(reply.status == 200);
        const json scored = reply.object()["choices"][0]["logprobs"];
        CHECK(reply.object()["choices"][0]["text"] == echo["prompt"]);
        CHECK(reply.object()["choices"][0]["finish_reason"] == "length");
        CHECK(reply.object()["usage"] ==
              value({{"prompt_tokens", 26}, {"completion_tokens", 0}, {"total_tokens", 26}}));
        REQUIRE(scored["tokens"].size() == 26);
        CHECK((scored["token_logprobs"][0].isNull() && scored["top_logprobs"][0].isNull()));
        for (int i = 0; i < 20; ++i) {
            for (const char* field : {"tokens", "token_logprobs", "top_logprobs"})
                CHECK(scored[field][6 + i] == drawn[field][i]);
            CHECK(scored["text_offset"][6 + i] == 6 + as<int>(drawn["text_offset"][i]));
        }
        // Beside an answer, for each of several, as a stream.
        echo["prompt"] = "Line 7", echo["max_tokens"] = 20, echo["n"] = 2;
        const json both = complete(server, echo).object()["choices"];
        for (const json& choice : both) CHECK(choice["logprobs"]["tokens"].size() == 26);
        CHECK(both[0]["logprobs"]["token_logprobs"] == scored["token_logprobs"]);
        echo["stream"] = true;
        json streamed[2], offsets[2];
        for (const json& event : events(complete(server, echo))) {
            const json& choice = event["choices"][0];
            for (const json& one : choice["logprobs"]["token_logprobs"]) streamed[as<int>(choice["index"])].append(one);
            for (const json& one : choice["logprobs"]["text_offset"]) offsets[as<int>(choice["index"])].append(one);
        }
        for (int i = 0; i < 2; ++i) {
            CHECK(streamed[i] == both[i]["logprobs"]["token_logprobs"]);
            CHECK(offsets[i] == both[i]["logprobs"]["text_offset"]);
        }
    }
    SECTION("a conversation, whole and as a stream; a stop text") {
        const JsonText part = {{"type", "text"}, {"text", "Hel"}}, rest = {{"type", "text"}, {"text", "lo"}},
                       brief = {{"role", "system"}, {"content", "Be brief."}},
                       hello = {{"role", "user"}, {"content", JsonText::array({part, rest})}};
        json message = value(
            {{"messages", JsonText::array({brief, hello})}, {"seed", 1}, {"max_tokens", 25}, {"ignore_eos", true}});
        const json first = chat(server, message).object();
        CHECK(first["object"] == "chat.completion");
        CHECK(as<std::string>(first["id"]).starts_with("chatcmpl-"));
        CHECK(first["choices"][0]["message"]["role"] == "assistant");
        const std::string said = first["choices"][0]["message"]["content"].asString();
        message["messages"][0]["role"] = "developer";  // OpenAI's newer name of the system
        message["messages"][1]["content"] = "Hello";   // in one part
        CHECK(chat(server, message).object()["choices"][0]["message"]["content"] == said);
        message["stream"] = true;
        std::string pieces;
        json reason;
        bool begun = false;
        for (const json& event : events(chat(server, message))) {
            CHECK(event["object"] == "chat.completion.chunk");
            CHECK_FALSE(event.isMember("usage"));
            const json& choice = event["choices"][0];
            CHECK(choice["delta"]["role"] == (begun ? json() : json("assistant")));
            begun = true;
            pieces += choice["delta"]["content"].asString();
            CHECK(reason.isNull());
            reason = choice["finish_reason"];
        }
        CHECK(reason == "length");
        CHECK(pieces == said);
        json stopping = request;
        stopping["stop"] = value(std::vector<std::string>{text.substr(10, 3), "not there"});
        const json stopped = complete(server, stopping).object()["choices"][0];
        CHECK(stopped["finish_reason"] == "stop");
        CHECK(stopped["text"] == text.substr(0, text.find(text.substr(10, 3))));
    }
    SECTION("what a flag says holds where a request says nothing") {
        const json plain = complete(server, value({{"prompt", "a"}, {"ignore_eos", true}})).object();
        CHECK(plain["usage"]["completion_tokens"] == 30);
        CHECK(plain["choices"][0]["logprobs"]["token_logprobs"].size() == 30);
        const JsonText hello = {{"role", "user"}, {"content", "Hello"}};
        const json without = value({{"messages", JsonText::array({hello})}, {"max_tokens", 1}, {"logprobs", false}});
        CHECK(chat(server, without).object()["choices"][0]["logprobs"].isNull());
        json with = without;
        with.removeMember("logprobs");
        CHECK(chat(server, with).object()["choices"][0]["logprobs"]["content"][0]["top_logprobs"].size() == 1);
        const auto random = [&] { return complete(server, value({{"prompt", "a"}})).object()["choices"][0]["text"]; };
        CHECK(random() != random());  // without a seed each has another one
    }
    SECTION("the most that there is room for, and one more") {
        json most = value({{"prompt", std::string(3999, 'a')}, {"max_tokens", 1}, {"logprobs", -1}});
        CHECK(complete(server, most).status == 200);
        const auto too_long = [&](const char* field) {
            const json error = complete(server, most).object()["error"];
            CHECK(error["code"] == "context_length_exceeded");
            CHECK(error["param"] == field);
        };
        most["max_tokens"] = 2;
        too_long("max_tokens");
        most.removeMember("max_tokens");  // 30, as the flag says: as many as there is room for
        CHECK(complete(server, most).object()["usage"]["completion_tokens"] == 1);
        most["prompt"] = value(std::vector{std::string("a"), std::string(4000, 'a')});
        too_long("prompt");
        const JsonText hello = {{"role", "user"}, {"content", "Hello"}};
        const json tops = value(
            {{"messages", JsonText::array({hello})}, {"max_tokens", 1}, {"logprobs", true}, {"top_logprobs", 20}});
        CHECK(chat(server, tops).object()["choices"][0]["logprobs"]["content"][0]["top_logprobs"].size() == 20);
    }
}

TEST_CASE("a message ends where its template says, whatever ends the request names", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const TempFolder folder;
    json tokenizer = parsed_json(byte_tokenizer_json());  // the end of a message takes the place of a byte
    tokenizer["model"]["vocab"].removeMember("\u00ff");
    tokenizer["model"]["vocab"].removeMember("\u00fe");  // and the model has a token more than the tokenizer
    tokenizer["model"]["vocab"].removeMember("\u00fd");
    tokenizer["added_tokens"].append(value({{"id", 255}, {"content", "<|im_end|>"}, {"special", true}}));
    tokenizer["added_tokens"].append(value({{"id", 253}, {"content", "User:"}}));
    spit(folder / "tokenizer.json", dumped(tokenizer));
    const Server server("--template chatml --stop x --tokenizer " + (folder / "tokenizer.json"));
    // The text and its finish_reason where the model writes this token alone.
    const auto written = [&](const char* token, const char* field, const json& content, const json& skips = json()) {
        json request = value({{"messages", JsonText::array({{{"role", "user"}, {"content", "a"}}})},
                              {"max_tokens", 3},
                              {"logit_bias", {{token, 100}}}});
        request[field] = content, request["skip_special_tokens"] = skips;
        const json choice = chat(server, request).object()["choices"][0];
        return as<std::string>(choice["message"]["content"]) + ", " + as<std::string>(choice["finish_reason"]);
    };
    for (const json& no : {json(), json(false)}) CHECK(written("255", "ignore_eos", no) == ", stop");
    CHECK(written("255", "ignore_eos", true) == ", length");  // special tokens are not in the text
    CHECK(written("255", "ignore_eos", true, false) == "<|im_end|><|im_end|><|im_end|>, length");
    CHECK(written("253", "ignore_eos", true) == "User:User:User:, length");  // an added token that is not special
    CHECK(written("255", "stop", "<|im_end|>") == ", stop");
    CHECK(written("255", "stop", value(std::vector{"y"})) == ", stop");
    CHECK(written("120", "stop", json()) == ", stop");  // "x", as the flags say
    for (const json& other : {json("y"), value(std::vector{"y"})})
        CHECK(written("120", "stop", other) == "xxx, length");
    for (const auto& [ids, text] :
         {std::pair(std::vector{7, 121}, ", stop"), {{122}, "yyy, length"}, {{}, "yyy, length"}})
        CHECK(written("121", "stop_token_ids", value(ids)) == text);
    json echo = value({{"prompt", std::vector<int>{'a', 254, 'b'}}, {"logit_bias", {{"254", 100}}}, {"echo", true}});
    echo["max_tokens"] = 1;
    CHECK(complete(server, echo).object()["choices"][0]["text"] == "ab");
    // Special tokens of a prompt are in its text, those of an answer have no room in it.
    json scored = value({{"prompt", std::vector<int>{'a', 255, 'b'}}, {"max_tokens", 2}, {"ignore_eos", true}});
    scored["logit_bias"] = value({{"255", 100}}), scored["echo"] = true, scored["logprobs"] = 0;
    for (const bool stream : {false, true}) {
        std::string text;
        std::vector<int> offsets;
        scored["stream"] = stream;
        for (const json& part :
             stream ? events(complete(server, scored)) : std::vector{complete(server, scored).object()}) {
            const json& choice = part["choices"][0];
            text += as<std::string>(choice["text"]);
            for (const json& offset : choice["logprobs"]["text_offset"]) offsets.push_back(as<int>(offset));
        }
        CHECK(text == "a<|im_end|>b");
        CHECK(offsets == std::vector{0, 1, 11, 12, 12});
    }
    json more = value({{"prompt", "a"}, {"stop", "<|im_end|>x"}});  // no text has it
    const Reply refused = complete(server, more);
    CHECK((refused.status == 400 && refused.object()["error"]["param"] == "stop"));
    CHECK_THAT(refused.body, ContainsSubstring("has the special token") && ContainsSubstring("skip_special_tokens"));
    more["skip_special_tokens"] = false;
    CHECK(complete(server, more).status == 200);
    // An end of several tokens: a line end and "User:", which are written by turns.
    const std::string with_end = folder / "with-end";  // the same model, which ends at token 0
    std::filesystem::copy(model_folder(), with_end);
    json config = parsed_json(slurp(with_end + "/config.json"));
    config["eos_token_id"] = 0;
    spit(with_end + "/config.json", dumped(config));
    const Server plain(concat("--ignore-eos --show-special-tokens --model ", with_end, " --template plain --tokenizer ",
                              folder / "tokenizer.json"));
    json request = value({{"messages", JsonText::array({{{"role", "user"}, {"content", "a"}}})},
                          {"max_tokens", 4},
                          {"temperature", 0},
                          {"frequency_penalty", 20},
                          {"logit_bias", {{"10", 100}, {"253", 90}}},
                          {"stop", "y"}});
    const json choice = chat(plain, request).object()["choices"][0];
    CHECK(choice["message"]["content"] == "");
    CHECK(choice["finish_reason"] == "stop");
    // A request that says whether special tokens are shown, or the model's end counts, is asked before the flag.
    for (const auto& [skips, text] : {std::pair(json(), "<|im_end|>"), {json(true), ""}}) {
        json special = value({{"prompt", "a"}, {"max_tokens", 1}, {"logit_bias", {{"255", 100}}}});
        special["skip_special_tokens"] = skips;
        CHECK(complete(plain, special).object()["choices"][0]["text"] == text);
    }
    for (const auto& [ignored, reason] : {std::pair(json(), "length"), {json(true), "length"}, {json(false), "stop"}}) {
        json ends = value({{"prompt", "a"}, {"max_tokens", 2}, {"logit_bias", {{"0", 100}}}});
        ends["ignore_eos"] = ignored;
        CHECK(complete(plain, ends).object()["choices"][0]["finish_reason"] == reason);
        ends["stop_token_ids"] = value(std::vector{0});  // that the model's end is ignored does not matter to these
        CHECK(complete(plain, ends).object()["choices"][0]["finish_reason"] == "stop");
    }
}

TEST_CASE("what a flag of sampling says, beams refuse, and a request of a batch and of a server can say",
          "[program][server][generate]") {
    const std::string help = run_program("generate", "--help").out, heading = "\nSampling:\n";
    REQUIRE(help.find(heading) != std::string::npos);
    std::istringstream section(help.substr(help.find(heading) + heading.size()));
    const std::string page = slurp("doc/inference.md");
    std::vector<std::string> flags, fields;
    for (std::string line; std::getline(section, line) && !line.empty();)
        if (line.starts_with("  --")) flags.push_back(line.substr(2, line.find(' ', 2) - 2));
    std::erase_if(flags, [](const std::string& flag) { return flag == "--beams" || flag == "--length-penalty"; });
    REQUIRE(flags.size() >= 9);
    std::string lines;
    for (const std::string& flag : flags) {
        const std::string value = flag == "--logit-bias" ? " 1:1" : " 1";
        CHECK_THAT(run_program("generate", "--prompt a --beams 2 " + flag + value).err,
                   ContainsSubstring(flag + " is for tokens that are drawn"));
        fields.push_back(flag.substr(2));
        std::ranges::replace(fields.back(), '-', '_');
        INFO("doc/inference.md names what a request of --batch can say; it does not name " << fields.back());
        CHECK(page.find("`\"" + fields.back() + "\"`") != std::string::npos);
        lines += concat(R"({"prompt": "a", ")", fields.back(), "\": []}\n");  // of no field's type
    }
    const TempFolder folder;
    spit(folder / "in", lines);
    const Outcome batch = run_program("generate", concat("--model ", model_folder(), " --max-length 100 --batch ",
                                                         folder / "in", " --out ", folder / "out"));
    INFO(batch.err);
    CHECK_THAT(batch.out, ContainsSubstring(concat(fields.size(), " refused")));
    for (const std::string& field : fields)
        CHECK(batch.err.find(concat('"', field, "\": a request has no such field")) == std::string::npos);
    SKIP_WITHOUT_SERVER();
    const Server server("");
    for (const std::string& field : fields) {
        const Reply reply =
            ask(server, http("POST", "/v1/completions", concat(R"({"prompt": "a", ")", field, "\": []}")));
        INFO(reply.body);
        CHECK(reply.status == 400);
        CHECK(reply.body.find("no such field") == std::string::npos);
    }
}

TEST_CASE("the server refuses what it cannot do, and says why", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const Server server("--api-key secret --max-body 2000 --max-sequences 70 --max-waiting 250");
    const std::string key = "Authorization: Bearer secret\r\n";
    const auto post = [&](const std::string& body, const std::string& headers = "",
                          const char* path = "/v1/completions") {
        return ask(server, http("POST", path, body, key + headers));
    };
    const auto refused = [&](const Reply& reply, int status, const std::string& words, const json& param = {}) {
        INFO(reply.head << "\n" << reply.body);
        CHECK(reply.status == status);
        const json error = reply.object()["error"];
        CHECK(as<std::string>(error["message"]).find(words) != std::string::npos);
        CHECK(error["param"] == param);
        CHECK(error["type"] == (status >= 500 ? "server_error" : "invalid_request_error"));
        for (const char* const header : {"Connection: close", "Content-Type: application/json"})
            CHECK(reply.head.find(header) != std::string::npos);
        CHECK(reply.head.find("Connection: ") == reply.head.rfind("Connection: "));
        CHECK(reply.head.find("Keep-Alive") == std::string::npos);
    };
    refused(post("{\"prompt\": "), 400, "the body: not valid JSON at line 1, column 1");
    refused(post("[1]"), 400, "not a JSON object");
    refused(post(std::string(100, '[')), 400, "levels");
    refused(post("{}"), 400, "\"prompt\" is missing", "prompt");
    for (const char* prompt : {"[]", "{\"a\": 1}"})
        refused(post(concat("{\"prompt\": ", prompt, "}")), 400, "expected a string, a list of strings", "prompt");
    CHECK(post(R"({"prompt": [0, 255], "max_tokens": 1})").status == 200);
    refused(post(R"({"prompt": ""})"), 400, "no token", "prompt");
    for (const char* const token : {"-1", "256"}) {
        const std::string list = concat("[1, ", token, "]}"),
                          words = concat("the token ", token, ": the model knows 0");
        refused(post(R"({"prompt": )" + list), 400, words, "prompt");
        refused(post(R"({"prompt": "a", "stop_token_ids": )" + list), 400, words, "stop_token_ids");
    }
    refused(post(R"({"prompt": "a", "stop_token_ids": 1})"), 400, "a list of tokens", "stop_token_ids");
    refused(post(R"({"prompt": "a", "temperature": "hot"})"), 400, "\"temperature\" is \"hot\": expected a number",
            "temperature");
    refused(post(R"({"prompt": "a", "temperature": -1})"), 400, "temperature is -1", "temperature");
    refused(post(R"({"prompt": "a", "top_k": -1})"), 400, "top_k is -1", "top_k");
    for (const char* const field : {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"})
        refused(post(concat(R"({"prompt": "a", ")", field, R"(": 101})")), 400, concat(field, " is 101"), field);
    refused(post(R"({"prompt": "a", "max_tokens": 1.5})"), 400, "expected a whole number", "max_tokens");
    refused(post(R"({"prompt": "a", "max_tokens": 99999999999999999999})"), 400, "a whole number of at most 64 bits",
            "max_tokens");
    refused(post(R"({"prompt": "a", "max_tokens": 0})"), 400, "at least 1", "max_tokens");
    for (const int n : {0, 65}) refused(post(concat(R"({"prompt": "a", "n": )", n, "}")), 400, "1 to 64", "n");
    refused(post(R"({"prompt": "a", "temperature": ")" + std::string(100, 'x') + "\"}"), 400, "xxx...: expected",
            "temperature");
    refused(post(R"({"prompt": "a", "stream": true, "stream_options": [1]})"), 400, "expected an object",
            "stream_options");
    std::string biases = "\"0\": 0";  // of 16 bytes each
    for (int i = 1; i < 100; ++i) biases += concat(",\"", i, "\":0");
    std::string prompts = "[1]";  // more than could ever run and wait: no status that says "try again"
    for (int i = 0; i < 320; ++i) prompts += ",[1]";
    refused(post("{\"prompt\": [" + prompts + "]}"), 400, "321 prompts in one request: send at most 320", "prompt");
    refused(post("{\"n\": 2, \"prompt\": [" + prompts + "]}"), 400, "send at most 285", "prompt");  // 35 at a time
    prompts.resize(prompts.size() - 4);  // 320, and the next error
    refused(post("{\"temperature\": -1, \"prompt\": [" + prompts + "]}"), 400, "temperature is -1", "temperature");
    std::string stops = "\"x\"";  // of 33 bytes each, with the string itself
    for (int i = 1; i < 70; ++i) stops += ",\"x\"";
    const std::string stop = ", \"max_tokens\": 1, \"stop\": \"" + std::string(900, 'x') + "\"}";  // each keeps its own
    CHECK(post("{\"prompt\": [[1], [2]]" + stop).status == 200);
    CHECK(post("{\"prompt\": [[1]], \"max_tokens\": 1, \"stop\": [" + stops + "]}").status == 200);
    refused(post("{\"prompt\": [[1], [2], [3]]" + stop), 400, "together more than 2000 (--max-body)", "prompt");
    refused(post(R"({"prompt": [[1], [2]], "stop": [)" + stops + "]}"), 400, "together more than 2000", "prompt");
    refused(post(R"({"prompt": [[1], [2]], "logit_bias": {)" + biases + "}}"), 400, "together more than 2000",
            "prompt");
    std::string ids = "1";  // of 4 bytes each
    for (int i = 0; i < 300; ++i) ids += ",1";
    refused(post(R"({"prompt": [[1], [2]], "stop_token_ids": [)" + ids + "]}"), 400, "together more than 2000",
            "prompt");
    refused(post(R"({"prompt": "a", "stop": [""]})"), 400, "empty", "stop");
    for (const char* const other : {"5", "[5]", "{}"})
        refused(post(concat(R"({"prompt": "a", "stop": )", other, "}")), 400, "a string or a list of strings", "stop");
    CHECK(post(R"({"prompt": "a", "max_tokens": 1, "n": 2, "best_of": 2})").status == 200);
    refused(post(R"({"prompt": "a", "n": 2, "best_of": 3})"), 400, "this server knows only 2", "best_of");
    refused(post(R"({"prompt": "a", "temprature": 1})"), 400, "no such field", "temprature");
    refused(post(R"({"prompt": "a", "max_completion_tokens": 1})"), 400, "no such field", "max_completion_tokens");
    refused(post(R"({"prompt": "a", "stream": true, "stream_options": {"usage": true}})"), 400, "no such field",
            "usage");
    refused(post(R"({"prompt": "a", "suffix": "b"})"), 400, "knows only \"\"", "suffix");
    refused(post(R"({"prompt": "a", "\u0000": 1})"), 400, "\"\\u0000\": this server has no such field",
            std::string(1, '\0'));
    refused(post(R"({"prompt": "a", "model": "a\u0000"})"), 404, "no model \"a\\u0000\"", "model");
    refused(post(R"({"prompt": "a", "logit_bias": {"x": 1}})"), 400, "logit_bias", "logit_bias");
    refused(post(R"({"prompt": "a", "logit_bias": {"256": 1}})"), 400, "the model's tokens are 0 to 255", "logit_bias");
    refused(post(R"({"prompt": "a", "logprobs": 21})"), 400, "it must be from 0 to 20", "logprobs");
    refused(post(R"({"prompt": "a", "stream_options": {}})"), 400, "needs", "stream_options");
    refused(post(R"({"prompt": "a", "max_tokens": 4000})"), 400, "room for 4000", "max_tokens");
    refused(post(R"({"prompt": ")" + std::string(1900, 'a') + R"(", "max_tokens": 2500})"), 400, "1900 tokens",
            "max_tokens");
    refused(post(R"({"prompt": "a", "model": "other"})"), 404, "no model \"other\"", "model");
    const char* const talk = "/v1/chat/completions";
    refused(post("{}", "", talk), 400, "missing", "messages");
    refused(post(R"({"messages": ["a"]})", "", talk), 400, "expected {\"role\": ...", "messages[0]");
    refused(post(R"({"messages": [{"role": "robot", "content": "a"}]})", "", talk), 400, "robot", "messages[0].role");
    refused(post(R"({"messages": [{"role": "user", "content": 1}]})", "", talk), 400, "a string",
            "messages[0].content");
    refused(post(R"({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": -1})", "", talk),
            400, "it must be from 0 to 20", "top_logprobs");
    refused(post(R"({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 21})", "", talk),
            400, "it must be from 0 to 20", "top_logprobs");
    refused(post(R"({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2})", "", talk), 400, "needs",
            "top_logprobs");
    refused(post(R"({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]})", "", talk),
            400, "only the first one can be", "messages[1].role");
    refused(post(R"({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]})", "", talk), 400,
            "the model reads text only", "messages[0].content");
    refused(post(R"({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]})", "", talk), 400,
            "the model reads text only", "messages[0].content");
    refused(post(R"({"messages": [{"role": "assistant", "content": "a"}]})", "", talk), 400, "not the user's",
            "messages");
    for (const char* const most : {"0", "4000"})
        refused(post(concat(R"({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": )", most, "}"),
                     "", talk),
                400, "tokens", "max_completion_tokens");
    for (const char* list : {"[]", "{}", "{\"0\": {\"role\": \"user\", \"content\": \"a\"}}", "\"a\""})
        refused(post(concat(R"({"messages": )", list, "}"), "", talk), 400, "a list of messages", "messages");
    const std::string message = R"({"messages": [{"role": "user", "content": "a"}], )";
    CHECK(
        post(
            message +
                R"("max_completion_tokens": 1, "response_format": {"type": "text"}, "modalities": ["text"], "tools": [],
                            "tool_choice": "none"})",
            "", talk)
            .status == 200);
    for (const auto& [field, other] :
         std::map<std::string, std::string>{{"tools", "[{}]"},
                                            {"tool_choice", "\"auto\""},
                                            {"modalities", "[\"audio\"]"},
                                            {"response_format", "{\"type\": \"json_object\"}"}})
        refused(post(concat(message, "\"", field, "\": ", other, "}"), "", talk), 400, "this server knows only", field);

    refused(ask(server, http("POST", "/v1/completions", "{}")), 401, "key");
    for (const char* const other : {"secreT", "secre", "secretsecret", ""})
        refused(ask(server, http("POST", "/v1/completions", "{}", concat("Authorization: Bearer ", other, "\r\n"))),
                401, "key");
    for (const std::string& path :
         {std::string("/metrics"), std::string("/engine"), std::string("/v1/models"), "/v1/models/" + model_folder()}) {
        refused(ask(server, http("GET", path)), 401, "key");
        CHECK(ask(server, http("GET", path, "", key)).status == 200);
    }
    const Reply health = ask(server, http("GET", "/health", "", "Range: bytes=0-3\r\nAccept-Encoding: gzip\r\n"));
    CHECK(health.status == 200);
    CHECK(health.body == "{\"status\": \"ok\"}");
    CHECK(ask(server, "HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n").status == 200);
    for (const char* const target :
         {"http://test/health", "HTTP://127.0.0.1:80/health?a=b", "http://test", "http://a?b"})
        CHECK(ask(server, http("GET", target)).status == 200);
    refused(ask(server, http("GET", "http://test/v2")), 404, "nothing at /v2");
    refused(ask(server, http("GET", "/v2")), 404, "nothing at /v2");
    refused(ask(server, http("GET", "/v1/models/", "", key)), 404, "nothing at /v1/models/");
    const Reply other_model = ask(server, http("GET", "/v1/models/a%20b", "", key));
    refused(other_model, 404, "no model \"a b\"", "model");
    CHECK(other_model.object()["error"]["code"] == "model_not_found");
    const Reply wrong_method = ask(server, http("GET", "/v1/completions"));
    refused(wrong_method, 405, "use POST");
    CHECK(wrong_method.head.find("Allow: POST") != std::string::npos);
    refused(post(std::string(10000000, 'a')), 413, "2000 bytes");
    refused(ask(server,
                "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n"
                "Expect: 100-continue\r\n" +
                    key + "\r\n"),
            413, "2000 bytes");  // as curl asks
    // A body of the largest size, and one that is asked for.
    const std::string fits = R"({"prompt": "a", "max_tokens": 1})" + std::string(1968, ' ');  // 2000 bytes
    CHECK(post(fits).status == 200);
    Client asks(server, concat("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n", key,
                               "Expect: 100-continue\r\nContent-Length: 2000\r\nConnection: close\r\n\r\n"));
    CHECK(asks.read_until("\r\n\r\n").find("HTTP/1.1 100 Continue") == 0);
    asks.send(fits);
    CHECK(asks.read_all().find("HTTP/1.1 200 OK") != std::string::npos);
    CHECK(ask(server, http("GET", "/v1/models", "", "Authorization: bearer secret\r\n")).status == 200);
    for (const char* const charset : {";charset=utf-8", " ; charset=utf-8"})
        refused(ask(server, concat("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json", charset,
                                   "\r\nContent-Length: 2\r\nConnection: close\r\n", key, "\r\n{}")),
                400, "\"prompt\" is missing", "prompt");
    refused(ask(server, "POST /v1/completions HTTP/1.1\r\nContent-Type: application/jsonl\r\nContent-Length: 2\r\n" +
                            key + "\r\n{}"),
            415, "application/jsonl");
    for (const char* coding : {"gzip", "deflate"})
        refused(post("{}", concat("Content-Encoding: ", coding, "\r\n")), 400,
                concat("cannot be read as ", coding, ", its Content-Encoding"));
    refused(post("{}", "Content-Encoding: identity\r\n"), 400, "\"prompt\" is missing", "prompt");
    refused(post("{}", "Content-Encoding: br\r\n"), 415, "compressed with br: send it as it is");
    refused(ask(server,
                "POST /v1/completions HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n" + key + "\r\n{}"),
            415, "application/json");
    refused(ask(server, "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + key + "\r\n"), 411,
            "Content-Length");
    refused(ask(server, "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: -5\r\n" +
                            key + "\r\n"),
            400, "-5");
    // The body of a GET is not the next request of its connection.
    const std::string second = "\r\n\r\nGET /v2 HTTP/1.1\r\nHost: a\r\n\r\n";
    Client two(server, "GET /health HTTP/1.1\r\nContent-Length: 26" + second);
    CHECK(two.read_all().find("HTTP/1.1 404") == std::string::npos);
    // Nor is a connection kept that the client does not want to be kept.
    for (const char* const words :
         {"close", "Close", "TE, close", "keep-alive,\tCLOSE , TE", "TE\r\nconnection: Close"})
        CHECK(ask(server, concat("GET /health HTTP/1.1\r\nConnection: ", words, "\r\n\r\n"))
                  .head.find("Connection: close") != std::string::npos);
    Client kept(server, "GET /health HTTP/1.1\r\nConnection: Upgrade, not-close\r\n\r\n");
    CHECK(parsed(kept.read_until("ok")).head.find("Keep-Alive") != std::string::npos);
    const std::string chunked = "Transfer-Encoding: chunked\r\n";
    for (const auto& [lengths, words] :
         std::map<std::string, std::string>{{"Content-Length: 0\r\nContent-Length: 26", "given twice"},
                                            {"Content-Length: 0, 26", "not a number of bytes"},
                                            {chunked + "Content-Length: 26", "given twice"},
                                            {chunked + "Transfer-Encoding: gzip", "given twice"},
                                            {"Transfer-Encoding: gzip", "only \"chunked\""},
                                            {"Content-Length:\r\n 26", "not an HTTP request"},
                                            {"X: a\r\n\tContent-Length: 26", "not an HTTP request"},
                                            {"Content-Length: 26\nX: a", "not an HTTP request"},
                                            {"X: a\rContent-Length: 26", "not an HTTP request"}}) {
        for (const char* const request : {"GET /health", "POST /v1/completions"})
            refused(ask(server, concat(request, " HTTP/1.1\r\n", lengths, second)), 400, words);
    }
    CHECK(ask(server, "GET /health HTTP/1.1\r\nContent-Length : 26" + second).status == 400);  // or the library does it
    const std::string body = R"({"prompt": "a", "max_tokens": 1, "n":1})";                     // 39 bytes
    const auto in_chunks = [&](const std::string& chunks,
                               const std::string& coding = "Transfer-Encoding: chunked\r\n") {
        return ask(server, "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + coding + key +
                               "Connection: close\r\n\r\n" + chunks);
    };
    const std::string end = "\r\n0\r\n\r\n";
    for (const char* const length : {"27", "027", "27;name=value"})
        CHECK(in_chunks(concat(length, "\r\n", body, end)).status == 200);
    CHECK(in_chunks("27\r\n" + body + end, "transfer-encoding: Chunked\r\n").status == 200);
    CHECK(in_chunks("9\r\n" + body.substr(0, 9) + "\r\n1E\r\n" + body.substr(9) + end).status == 200);
    for (const char* const length : {"0x27", "+27", " 27", "27 or so", "-5", "27;a\nb", "", "0000000000000027"})
        refused(in_chunks(concat(length, "\r\n", body, end)), 400, "not an HTTP request");
    CHECK(in_chunks("7d0\r\n" + fits + end).status == 200);
    refused(in_chunks("7d1\r\n" + std::string(2001, ' ') + end), 413, "2000 bytes");
    refused(in_chunks("3e9\r\n" + std::string(1001, ' ') + "\r\n3e8\r\n" + std::string(1000, ' ') + end), 413,
            "2000 bytes");
    refused(in_chunks("27\n" + body + end), 400, "not an HTTP request");
    refused(in_chunks("27\r\n" + body + " " + end), 400, "not an HTTP request");
    refused(in_chunks("27\r\n" + body + "\r\n0;" + std::string(2000, 'x') + "\r\n\r\n"), 400, "not an HTTP request");
    for (const size_t n : {8188, 100000})
        refused(ask(server, "GET /health HTTP/1.1\r\nX: " + std::string(n, 'x') + "\r\n\r\n"), 431, "headers");
    Client widest(server, "GET /health HTTP/1.1\r\nX: " + std::string(8187, 'x') + "\r\n\r\n");
    CHECK(parsed(widest.read_until("ok")).status == 200);
    for (const size_t n : {9000, 33000, 100000})
        refused(ask(server, "GET /" + std::string(n, 'x') + " HTTP/1.1\r\n\r\n"), 414, "path");
    refused(ask(server, std::string(100000, 'x')), 414, "path");  // no end of the first line
    refused(ask(server, "hello\r\n\r\n"), 400, "not an HTTP request");
    // Each request of a connection has limits of its own, and is told of its mistake.
    std::string wide = "GET /health HTTP/1.1\r\n";
    for (int i = 0; i < 10; ++i) wide += "X: " + std::string(4000, 'x') + "\r\n";
    wide += "\r\n";
    Client again(server, wide + wide + std::string(100000, 'x'));
    const std::string replies = again.read_all();
    const size_t ok = replies.find("{\"status\": \"ok\"}");
    REQUIRE(ok != std::string::npos);
    CHECK(replies.find("{\"status\": \"ok\"}", ok + 1) != std::string::npos);
    CHECK(replies.find("HTTP/1.1 414 URI Too Long") != std::string::npos);
    const std::string metrics = ask(server, http("GET", "/metrics", "", key)).body;
    for (const char* const failures : {"{status=\"431\"} 2\n", "{status=\"414\"} 5\n"})
        CHECK(metrics.find(failures) != std::string::npos);

    // Limits of time. (The other server has long ones: requests above are to be refused for what they are.)
    const Server hurried("--client-timeout 1 --request-timeout 0.2");
    json takes_longer = kLong;
    takes_longer["stream"] = false;
    refused(complete(hurried, takes_longer), 504, "not complete after 0.2 seconds");
    // A client that sends a byte now and then.
    const std::string post_json = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    Client slow(hurried, "POST /v1/completions HTTP/1.1\r\n");
    Client slower(hurried, post_json + "Content-Length: 9\r\n\r\n");
    for (int i = 0; i < 8; ++i) pause_ms(150), slow.send("X"), slower.send(" ");
    refused(parsed(slow.read_all()), 408, "not complete in time");
    refused(parsed(slower.read_all()), 408, "not complete in time");
    // How long a connection is kept for a next request.
    Client waiting(hurried, "GET /health HTTP/1.1\r\n\r\n");
    CHECK(waiting.read_until("ok").find("Keep-Alive: timeout=1\r\n") != std::string::npos);
    CHECK(ask(hurried, http("GET", "/metrics")).body.find("{status=\"408\"} 2\n") != std::string::npos);
}

TEST_CASE("a client that goes away frees its pages; too many clients are refused", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const Server server("--max-sequences 2 --max-waiting 1 --seed 5");
    const json unseeded = value({{"prompt", "Line"}, {"max_tokens", 20}});  // the seed is that of the flags
    CHECK(complete(server, unseeded).object()["choices"] == complete(server, unseeded).object()["choices"]);
    for (const bool streams : {true, false}) {
        json request = kLong;
        request["stream"] = streams;
        Client client(server, http("POST", "/v1/completions", dumped(request)));
        if (streams) client.read_until("data: ");
        CHECK(becomes(server, "llm_running", 1));
        CHECK(metric(server, "llm_pages_used") > 0);
        const json engine = ask(server, http("GET", "/engine")).object();
        REQUIRE(engine["requests"].size() == 1);
        CHECK(engine["requests"][0]["state"] == "answers");
        CHECK(engine["requests"][0]["max_tokens"] == 3900);
        CHECK(engine["requests"][0]["prompt_tokens"] == 8);
        const int64_t answer_n = as<int64_t>(engine["requests"][0]["answer_tokens"]);
        CHECK((answer_n > 0 && as<int64_t>(engine["answer_tokens"]) > answer_n));  // with those of the requests before
        CHECK(engine["requests"][0]["computed_tokens"] == 8 + answer_n - 1);       // the last token is not computed yet
        CHECK((engine["running"] == 1 && engine["waiting"] == 0 && engine["pages_all"] == 400));
        int64_t pages = 0;
        for (const json& run : engine["pages"])
            pages += run[0] == engine["requests"][0]["id"] ? as<int64_t>(run[2]) : 0;
        CHECK(engine["pages_used"] == pages);
        CHECK(engine["rows_used"] == engine["requests"][0]["computed_tokens"]);
        int64_t kept = 0;
        for (const json& run : engine["pages"]) kept += run[0] == -1 ? as<int64_t>(run[2]) : 0;
        CHECK(kept > 0);
        CHECK(engine["pages_kept"] == kept);
        CHECK(as<int64_t>(engine["pages_free"]) == 400 - kept - pages);
        client.leave();
        CHECK(becomes(server, "llm_running", 0));
        CHECK(metric(server, "llm_pages_used") == 0);
    }
    CHECK(metric(server, "llm_requests_total{outcome=\"cancelled\"}") == 2);
    // One that closes its side, and reads on, is not told that half an answer is a whole one.
    for (const bool streams : {true, false}) {
        json request = kLong;
        request["stream"] = streams;
        Client client(server, http("POST", "/v1/completions", dumped(request)));
        CHECK(becomes(server, "llm_running", 1));
        client.end_writing();
        const Reply reply = parsed(client.read_all());
        CHECK(reply.status == (streams ? 200 : 400));
        CHECK(reply.body.find("closed for writing before the answer was complete") != std::string::npos);
    }

    {
        // Of two prompts the second needs more pages than there are (400): the first does not go on alone.
        json both =
            value({{"prompt", std::vector<std::string>{"a", std::string(40, 'a')}}, {"n", 2}, {"max_tokens", 3180}});
        CHECK(becomes(server, "llm_running", 0));
        CHECK(as<std::string>(complete(server, both).object()["error"]["message"]).find("need 402 pages") !=
              std::string::npos);
        CHECK(metric(server, "llm_running") + metric(server, "llm_waiting") == 0);
        // In the place that is left there is no room for two answers: two prompts would wait.
        Client runs(server, http("POST", "/v1/completions", dumped(kLong)));
        runs.read_until("data: ");
        both["max_tokens"] = 2;
        CHECK(complete(server, both).status == 429);
        runs.leave();
        CHECK(becomes(server, "llm_running", 0));
    }

    json two = kLong;                                                             // answers: one request has all places
    two["n"] = 2, two["max_tokens"] = 2900, two["prompt"] = "for ever and ever";  // its first page is shared
    Client first(server, http("POST", "/v1/completions", dumped(two)));
    first.read_until("data: ");
    Client second(server, http("POST", "/v1/completions", dumped(two)));
    CHECK(becomes(server, "llm_waiting", 1));
    const json engine = ask(server, http("GET", "/engine")).object();
    CHECK((engine["running"] == 1 && engine["waiting"] == 1 && engine["pages_shared"] == 1));
    int64_t shared = 0;
    for (const json& run : engine["pages"]) shared += as<int64_t>(run[1]) * as<int64_t>(run[2]);
    CHECK(shared == 1);
    const Reply third = complete(server, two);
    CHECK(third.status == 429);
    CHECK(third.head.find("Retry-After: 1") != std::string::npos);
    CHECK(third.object()["error"]["code"] == "rate_limit_exceeded");
    CHECK(third.object()["error"]["type"] == "rate_limit_error");
    first.leave();
    CHECK(second.read_until("data: ").find("data: ") != std::string::npos);  // it is the second one's turn
}

TEST_CASE("the tokens of a request's answers only become more, also when some have ended", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const Server server("--max-sequences 64 --cache-pages 4100");
    json many = kLong;
    many["n"] = 64, many["max_tokens"] = 1000, many["seed"] = 1, many["stop"] = "e";
    Client client(server, http("POST", "/v1/completions", dumped(many)));
    client.read_until("data: ");
    int64_t n = 0;
    for (json requests; !(requests = ask(server, http("GET", "/engine")).object()["requests"]).empty();) {
        const auto before = std::exchange(n, as<int64_t>(requests[0]["answer_tokens"]));
        CHECK(n >= before);
    }
    CHECK(n > 0);
}

TEST_CASE("the server says where it is as a URL has addresses", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    sockaddr_in6 local{};
    local.sin6_family = AF_INET6, local.sin6_addr = in6addr_loopback;
    const int six = ::socket(AF_INET6, SOCK_STREAM, 0);
    if (::bind(six, reinterpret_cast<sockaddr*>(&local), sizeof local) == 0)  // a machine with IPv6
        CHECK(Server("--host ::1", "[::1]").port() > 0);
    ::close(six);
}

TEST_CASE("requests wait for pages, too", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const Server server("--max-sequences 8 --max-waiting 1 --cache-pages 250");  // of 16 rows: those of one answer
    json prompt = kLong;  // with its first token there are 50 pages less
    prompt["prompt"] = std::string(800, 'y'), prompt["max_tokens"] = 3100;
    Client first(server, http("POST", "/v1/completions", dumped(prompt)));
    first.read_until("data: ");
    prompt["prompt"] = std::string(3950, 'x'), prompt["max_tokens"] = 40;  // 247 pages
    Client second(server, http("POST", "/v1/completions", dumped(prompt)));
    CHECK(becomes(server, "llm_waiting", 1));
    CHECK(complete(server, kLong).status == 429);
}

TEST_CASE("a signal ends the server when its answers are complete, a second one at once", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    json request = kLong;
    request["max_tokens"] = 500, request["stream_options"]["include_usage"] = true;
    const auto is_ending = [](const Server& server) {
        for (int i = 0; i < 1000; ++i, pause_ms(10))
            if (ask(server, http("GET", "/health")).status == 503) return true;
        return false;
    };
    for (const int number : {SIGTERM, SIGINT}) {
        Server server("");
        Client client(server, http("POST", "/v1/completions", dumped(request)));
        Client other(server,
                     http("POST", "/v1/completions", dumped(kLong)));  // for as long as this looks at the server
        client.read_until("data: ");
        other.read_until("data: ");
        server.signal(number);
        CHECK(is_ending(server));
        const Reply late = complete(server, kLong);
        CHECK(late.status == 503);
        CHECK(as<std::string>(late.object()["error"]["message"]).find("shutting down") != std::string::npos);
        other.leave();
        const std::vector<json> all = events(parsed(client.read_all()));
        CHECK(all.back()["usage"]["completion_tokens"] == 500);
        client.leave();  // otherwise the server gives it a second for that
        CHECK(server.wait() == 0);
    }
    {  // Who has sent only a part of a request is not waited for as long as at other times (20 s).
        Server server("");
        Client slow(server, "POST /v1/completions HTTP/1.1\r\nHost: ");
        CHECK(ask(server, http("GET", "/health")).status == 200);
        const double start = seconds_now();
        server.signal(SIGTERM);
        CHECK(server.wait() == 0);
        CHECK(seconds_now() - start < 10);
    }
    Server server("");
    Client client(server, http("POST", "/v1/completions", dumped(kLong)));
    client.read_until("data: ");
    server.signal(SIGTERM);
    CHECK(is_ending(server));
    server.signal(SIGTERM);
    CHECK(server.wait() == 128 + SIGTERM);
}

TEST_CASE("the openai package talks to the server", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    if (run_python("-c 'import openai'").status != 0) SKIP_TEST("no Python with openai (set LLM_PYTHON)");
    const Server server("--max-waiting 300");
    const Outcome outcome = run_python(concat("test/check_openai.py http://127.0.0.1:", server.port()));
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("check_openai: ok") != std::string::npos);
}

TEST_CASE("the page works in Chromium", "[program][server]") {
    SKIP_WITHOUT_SERVER();
    const Server server("--ignore-eos");
    const Outcome outcome = run_shell(concat("python3 test/check_page.py http://127.0.0.1:", server.port(), "/"));
    if (outcome.status == 77) SKIP_TEST("no Chromium (set LLM_CHROMIUM)");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("check_page: ok") != std::string::npos);
}
