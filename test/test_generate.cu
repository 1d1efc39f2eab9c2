// The program generate, as a user calls it.
#include "train_runs.h"
#include "inference/inference.h"
#include "io/lock.h"
#include "json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace {

// A run of a few steps, whose model all tests here ask.
const std::string& trained_run() {
    static const TempFolder folder;
    static const std::string run = [] {
        const std::string path = folder / "run";
        must_succeed(train("--steps 4 --out " + path));
        return path;
    }();
    return run;
}

Outcome generate(const std::string& arguments, const std::string& before = "") {
    return run_program("generate", "--model " + trained_run() + " " + arguments, before);
}

std::vector<json> lines_of(const std::string& path) {
    std::vector<json> lines;
    std::istringstream text(slurp(path));
    for (std::string line; std::getline(text, line);) lines.push_back(parsed_json(line));
    return lines;
}

}  // namespace

TEST_CASE("generate goes on from a prompt, the same way in every setting", "[generate][program]") {
    const Outcome text = generate("--prompt 'Line 1' --tokens 20 --seed 3");
    CHECK(text.status == 0);
    CHECK(text.out.starts_with("Line 1"));
    CHECK(text.out.size() >= 6 + 20 + 1);  // a byte for each token, more where it is shown as another character
    const std::string ids = " --prompt-ids 76,105,110,101 --tokens 20 --seed 3 --ids";
    const Outcome plain = generate(ids);
    CHECK(std::count(plain.out.begin(), plain.out.end(), ',') == 19);
    CHECK(generate("--prompt-ids '[76, 105, 110, 101]' --tokens 20 --seed 3 --ids").out == plain.out);
    const std::string own_draft = "--draft " + trained_run(),
                      own_draft_at_length = own_draft + " --draft-tokens 9000000000000000000";
    for (const std::string setting :
         {"--page-size 1", "--step-tokens 3", "--no-prefix-sharing", "--lookup 4", "--preempt swap", "--cache-pages 2",
          "--lookup 9000000000000000000", own_draft.c_str(), own_draft_at_length.c_str(), "--batching static",
          "--max-length 24", "--max-length 0", "--graphs on"})
        CHECK(generate(ids + " " + setting).out == plain.out);
    CHECK(generate(ids + " --temperature 0 --tp 2").out == generate(ids + " --temperature 0").out);
    CHECK(generate(ids + " --seed 4").out != plain.out);
    for (const std::string dtype : {"bf16", "fp16"}) CHECK(generate(ids + " --dtype " + dtype).status == 0);
    const std::string samples = generate(ids + " --samples 3").out;
    CHECK(std::count(samples.begin(), samples.end(), '\n') == 3);
    CHECK(samples.starts_with(plain.out));  // the first sample is the only one of above
    const std::string forced =
        "--prompt-ids 76 --tokens 3 --ids --temperature 0 --logprobs 1 --logit-bias 120:100,32:-9";
    const std::string table = generate(forced).out;
    CHECK(table.starts_with("120,120,120\nlog-probability"));
    CHECK(std::count(table.begin(), table.end(), '\n') == 2 + 3);
    CHECK(generate(forced + " --lookup 2").out == table);
    const std::string of_drawn = generate(forced + " --logprobs 0").out;  // of the drawn tokens alone
    CHECK(std::count(of_drawn.begin(), of_drawn.end(), '\n') == 2 + 3);
    // A token that the tokenizer does not have adds no text.
    const TempFolder folder;
    const std::string tokenizer = slurp(newest_checkpoint(trained_run()) + "/tokenizer.json");
    const std::string entry = "\"x\": 120,";
    const std::string forced_x = "--tokenizer " + folder.path + " --prompt 'Line 1' --tokens 4 --logit-bias 120:100";
    spit(folder / "tokenizer.json", replaced(tokenizer, entry, ""));
    CHECK(generate(forced_x).out == "Line 1\n");
    // An answer that ends before a stop text ends before all of the token that completes it: here x, and a byte that
    // begins a character.
    spit(folder / "tokenizer.json", replaced(tokenizer, entry, "\"x\u00c3\": 120,"));
    CHECK(generate(forced_x + " --stop x").out == "Line 1\n");
    const Outcome stopped = generate("--prompt 'Line 1' --tokens 200 --temperature 0 --stop e");
    CHECK(stopped.out.find('e', 6) == std::string::npos);
    // A stop text is one text, whatever brackets it has, and --flag=TEXT may begin as flags do.
    CHECK(generate("--prompt=--i --stop '[a,b]' --tokens 3 --temperature 0 --logit-bias 91:100").out == "--i[[[\n");
    CHECK(generate("--prompt i --stop '[[' --tokens 3 --temperature 0 --logit-bias 91:100").out == "i\n");
    CHECK(generate("--prompt i --stop '[]' --stop '[' --tokens 3 --temperature 0 --logit-bias 91:100").out == "i\n");
    // Zero bytes are printed, too; and the byte that completes a character of the prompt, not the whole character.
    const std::string zeros = generate("--prompt x --samples 2 --tokens 2 --temperature 0 --logit-bias 0:100").out;
    CHECK(zeros == std::string("---- 1 ----\nx\0\0\n---- 2 ----\nx\0\0\n", 32));
    CHECK(generate("--prompt 'caf\xc3' --tokens 1 --temperature 0 --logit-bias 169:100").out == "caf\xc3\xa9\n");
    // Pictures of a single prompt.
    CHECK(generate("--prompt x --samples 2 --tokens 2 --pictures " + (folder / "pictures")).status == 0);
    CHECK(slurp(folder / "pictures/batching.png").substr(1, 3) == "PNG");
}

TEST_CASE("the time of a prompt is that of all its steps", "[generate][program]") {
    if (run_shell("command -v script").status != 0) return;  // it runs a command in a terminal of its own
    const std::string arguments = " --tokens 2 --step-tokens 1 --prompt " + std::string(200, 'x');
    double ratio = 0;  // of the 200 steps up to the first token to the one step of the second
    for (int attempt = 0; attempt < 3 && ratio < 1; ++attempt) {  // other processes may make a single step slow
        const Outcome shown = run_shell(concat("export OMP_NUM_THREADS=1; script -qec '", program_path("generate"),
                                               " --model ", trained_run(), arguments, "' /dev/null"));
        INFO(shown.out);
        const size_t summary = shown.out.find("[prompt: 200 tokens in ");
        REQUIRE(summary != std::string::npos);
        double time = 0, tokens_per_second = 0;
        char unit[3] = "";
        REQUIRE(std::sscanf(&shown.out[summary], "[prompt: 200 tokens in %lf %2[a-z]; answer: 2 tokens, %lf tok/s",
                            &time, unit, &tokens_per_second) == 3);
        const double second = unit == std::string("us") ? 1e-6 : unit == std::string("ms") ? 1e-3 : 1;
        ratio = time * second * tokens_per_second;
    }
    CHECK(ratio > 1);
}

TEST_CASE("a batch of requests goes on where it was stopped", "[generate][program]") {
    const TempFolder folder;
    const std::string in = folder / "in.jsonl", out = folder / "out.jsonl";
    spit(in,
         "{\"id\": \"a\", \"prompt\": \"Line\", \"tokens\": 5, \"logprobs\": 2, \"prompt_logprobs\": "
         "true}\r\n\r\n{\"prompt_ids\": [1, 2, 3], "
         "\"tokens\": 7, \"temperature\": 0, \"logit_bias\": {\"9\": 100}}\n"
         "{\"id\": 9, \"prompt\": \"x\", \"tokens\": 4, \"samples\": 2, \"seed\": 5}\n");
    const std::string call = "--batch " + in + " --out " + out;
    const Outcome first = generate(call + " --draft " + trained_run() + " --pictures " + (folder / "pictures"));
    INFO(first.err);
    CHECK(first.status == 0);
    CHECK_THAT(first.out, ContainsSubstring("; 8 prompt tokens and 20 answer tokens in "));
    CHECK_THAT(first.out, ContainsSubstring("100.0% of "));  // the draft is the model itself
    CHECK_THAT(first.out, ContainsSubstring("% hold tokens") && ContainsSubstring("contiguous  slots of 256 rows"));
    CHECK(slurp(folder / "pictures/batching.png").substr(1, 3) == "PNG");
    CHECK(slurp(folder / "pictures/cache.png").substr(1, 3) == "PNG");
    std::map<std::string, json> answers;
    for (const auto& line : lines_of(out)) answers[dumped(line["id"]) + dumped(line["sample"])] = line;
    REQUIRE(answers.size() == 4);
    CHECK(answers["\"a\"null"]["ids"].size() == 5);
    const json logprobs = answers["\"a\"null"]["logprobs"];
    CHECK(logprobs["tokens"].size() == 5);
    CHECK(as<double>(logprobs["token_logprobs"][0]) <= 0);
    CHECK((logprobs["top_logprobs"][0].size() == 2 || logprobs["top_logprobs"][0].size() == 3));
    CHECK(answers["3null"]["ids"] == value(std::vector<int>(7, 9)));  // the id is its line's number
    CHECK_FALSE(answers["3null"].isMember("logprobs"));
    const json scored = answers["\"a\"null"]["prompt_logprobs"];
    CHECK(scored["tokens"] == value(std::vector{"L", "i", "n", "e"}));
    CHECK(scored["text_offset"] == value(std::vector{0, 1, 2, 3}));
    CHECK((scored["token_logprobs"][0].isNull() && as<double>(scored["token_logprobs"][3]) <= 0));
    CHECK(answers["90"]["text"] != answers["91"]["text"]);
    CHECK(answers["90"]["finish_reason"] == "length");
    const std::string whole = slurp(out), cut = whole.substr(0, whole.size() - 20);
    // No file may grow beyond a block of 512 bytes, or of 1 KiB.
    const std::string limited = folder / "limited";
    const Outcome full = generate("--batch " + in + " --out " + limited, "ulimit -S -f 1; exec");
    CHECK(one_line_with(line_of(full), " more bytes to " + limited + ": File too large; free some space"));
    CHECK(generate("--batch " + in + " --out " + limited).status == 0);
    CHECK(lines_of(limited).size() == answers.size());
    // Cut off in the middle of the last line: that answer alone is computed again, and is the same; but not while
    // another process writes there.
    spit(out, cut);
    {
        const LockedFile other(out, O_RDWR);
        const Outcome outcome = generate(call);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring("--out " + out + " is being written by another process: wait"));
        CHECK(slurp(out) == cut);
    }
    CHECK(generate(call).status == 0);
    CHECK(slurp(out) == whole);
    spit(out, whole + "{");  // cut off behind the first byte
    CHECK(generate(call).status == 0);
    CHECK(slurp(out) == whole);
    // More answers to a request that is done: those that are missing.
    spit(folder / "more", replaced(slurp(in), "\"samples\": 2", "\"samples\": 3"));
    spit(folder / "more.out", whole);
    CHECK(generate("--batch " + (folder / "more") + " --out " + (folder / "more.out")).status == 0);
    CHECK(lines_of(folder / "more.out").size() == answers.size() + 1);
    CHECK(slurp(folder / "more.out").find("\"sample\":2") != std::string::npos);
    // Fewer answers than those that a stopped batch asked for, of which it wrote the last one first.
    spit(folder / "one", replaced(slurp(in), "\"samples\": 2", "\"samples\": 1"));
    spit(folder / "one.out", dumped(answers["91"]) + "\n");
    CHECK(generate("--batch " + (folder / "one") + " --out " + (folder / "one.out")).status == 0);
    std::vector<json> ones = lines_of(folder / "one.out");
    std::erase_if(ones, [](const json& line) { return line["id"] != 9; });
    REQUIRE(ones.size() == 2);
    CHECK(ones[1]["ids"] == answers["90"]["ids"]);
    // A file that can be opened and not be read, as on a broken disk.
    CHECK(one_line_with(line_of(generate("--batch /proc/self/mem --out " + (folder / "none"))),
                        "--batch /proc/self/mem: it could not be read to the end"));
    // Answers to standard output stand there alone.
    const std::string printed = folder / "printed";
    CHECK(generate("--batch " + in + " --out /dev/stdout > " + printed).status == 0);
    CHECK(lines_of(printed).size() == answers.size());
    spit(in,
         slurp(in) + "no JSON\n{\"prompt\": 3}\n{\"prompt\": \"a\", \"top_p\": 7}\n{\"id\": 9, \"prompt\": \"y\"}\n" +
             "{\"id\": 0, \"prompt\": \"a\", \"max_tokens\": 7}\n{\"id\": 1e30, \"prompt\": \"a\"}\n" +
             "{\"id\": true, \"prompt\": \"a\"}\n{\"id\": [1], \"prompt\": \"a\"}\n{\"id\": {}, \"prompt\": \"a\"}\n" +
             "{\"prompt\": \"a\", \"prompt_logprobs\": true}\n{\"prompt\": \"a\", \"tokens\": 0}\n" +
             "{\"prompt\": \"a\", \"samples\": 1000}\n{\"prompt\": \"a\", \"samples\": 0}\n" +
             "{\"prompt\": \"a\", \"prompt_ids\": [1]}\n{\"prompt\": \"a\", \"tokens\": 99999999999999999999}\n" +
             "{\"prompt\": \"a\", \"seed\": -1}\n{\"prompt\": \"a\", \"prompt_logprobs\": 1}\n");
    const Outcome refused = generate(call);
    CHECK(refused.status == 1);
    CHECK(slurp(out) == whole);
    CHECK_THAT(refused.err, ContainsSubstring("line 5: the line: not valid JSON at line 1, column 1"));
    CHECK_THAT(refused.err, ContainsSubstring("line 6: \"prompt\" is 3: expected a string"));
    CHECK_THAT(refused.err, ContainsSubstring("line 7: top_p"));
    CHECK_THAT(refused.err, ContainsSubstring("line 8: a line before this one has the id 9, too"));
    CHECK_THAT(refused.err, ContainsSubstring("line 9: \"max_tokens\": a request has no such field; it can have id, "));
    CHECK_THAT(refused.err, ContainsSubstring("line 10: \"id\" is 1e+30: give a string, or a whole number"));
    CHECK_THAT(refused.err, ContainsSubstring("line 11: \"id\" is true: give a string, or a whole number"));
    CHECK_THAT(refused.err, ContainsSubstring("line 12: \"id\" is [1]: give a string, or a whole number"));
    CHECK_THAT(refused.err, ContainsSubstring("line 13: \"id\" is {}: give a string, or a whole number"));
    CHECK_THAT(refused.err, ContainsSubstring("line 14: \"prompt_logprobs\" needs \"logprobs\", too"));
    CHECK_THAT(refused.err, ContainsSubstring("line 15: an answer has at least one token"));
    CHECK_THAT(refused.err, ContainsSubstring("line 16: 1000 answers to a prompt"));
    CHECK_THAT(refused.err, ContainsSubstring("line 17: an answer has at least one token"));
    CHECK_THAT(refused.err, ContainsSubstring("line 18: give \"prompt\" or \"prompt_ids\", one of them"));
    CHECK_THAT(refused.err, ContainsSubstring("line 19: \"tokens\" is 1e+20: expected a whole number of at most 64"));
    CHECK_THAT(refused.err, ContainsSubstring("line 20: \"seed\" is -1: expected a whole number from 0 to 2^64 - 1"));
    CHECK_THAT(refused.err, ContainsSubstring("line 21: \"prompt_logprobs\" is 1: expected true or false"));
    CHECK_THAT(refused.out, ContainsSubstring("0 answers, 3 requests done before, 17 refused; 0 prompt tokens"));
    // Beams are not drawn.
    spit(in,
         "{\"prompt\": \"a\", \"tokens\": 2}\n{\"prompt\": \"a\", \"temperature\": 1}\n"
         "{\"prompt\": \"a\", \"samples\": 3}\n");
    const Outcome beams = generate("--beams 2 --batch " + in + " --out " + (folder / "beams"));
    CHECK_THAT(beams.err, ContainsSubstring("line 2: \"temperature\": a request has no such field"));
    CHECK_THAT(beams.err, ContainsSubstring("line 3: beam search gives at most as many answers as it has beams, 2, and "
                                            "not 3\n"));
    CHECK(lines_of(folder / "beams").size() == 1);
    // Tokens before which an answer ends, drawn ones and beams.
    const std::string prompt = "{\"prompt\": \"a\", \"tokens\": 2, \"stop_token_ids\": [";
    spit(in, prompt + "7, 9], \"logit_bias\": {\"9\": 100}}\n" + prompt + "8], \"logit_bias\": {\"9\": 100}}\n" +
                 prompt + "256]}\n");
    const Outcome ends = generate("--batch " + in + " --out " + (folder / "ends"));
    CHECK_THAT(ends.err,
               ContainsSubstring("line 3: \"stop_token_ids\" has the token 256, but the model knows 0 to 255"));
    std::map<int, std::string> ended;
    for (const json& line : lines_of(folder / "ends"))
        ended[as<int>(line["id"])] = dumped(line["ids"]) + as<std::string>(line["finish_reason"]);
    CHECK(ended == std::map<int, std::string>{{1, "[]stop"}, {2, "[9,9]length"}});
    spit(in, prompt + "9]}\n");
    CHECK(generate("--beams 2 --batch " + in + " --out " + (folder / "ends_of_beams")).status == 0);
}

TEST_CASE("a line of --batch that is too long ends it, with the lines before it answered", "[generate][program]") {
    const TempFolder folder;
    const std::string request = "{\"prompt\":\"a\",\"tokens\":2}", out = folder / "out";
    spit(folder / "in", request + "\n{\"tokens\":2,\"prompt\":\"" + std::string(50, 'x') + "\"}\n" + request);
    const auto answer = [&](size_t most) {
        return generate(concat("--max-body ", most, " --batch ", folder / "in --out ", out));
    };
    const std::string error = line_of(answer(request.size()));
    CHECK_THAT(error,
               ContainsSubstring(concat("in, line 2: it has more than ", request.size(), " bytes (--max-body)")));
    CHECK(lines_of(out).size() == 1);
    CHECK(answer(100).status == 0);
    CHECK(lines_of(out).size() == 3);
    const Outcome endless = generate("--batch /dev/zero --out " + folder / "other", "timeout 20");
    CHECK_THAT(line_of(endless), ContainsSubstring("/dev/zero, line 1: it has more than 4194304 bytes"));
}

TEST_CASE("flags that change no text change what they say", "[generate][program]") {
    const TempFolder folder;
    const std::string prompt = "{\"prompt\": \"" + std::string(40, 'x') + "\", \"tokens\": ";
    spit(folder / "in", prompt + "2}\n" + prompt + "8}\n" + prompt + "8}\n");
    const auto told = [&](const std::string& flags) {
        std::filesystem::remove(folder / "out");
        return generate("--max-sequences 2 --batch " + (folder / "in") + " --out " + (folder / "out") + flags).out;
    };
    const std::string plain = told("");  // the third begins when the first has ended
    CHECK_THAT(plain, ContainsSubstring("; 10 steps") && !ContainsSubstring("saves 0.0 % of the rows"));
    CHECK_THAT(told(" --batching static"), ContainsSubstring("; 16 steps"));
    CHECK_THAT(told(" --no-prefix-sharing"),
               ContainsSubstring("; 10 steps") && ContainsSubstring("saves 0.0 % of the"));
    // Where the pages run out, the younger of two that run gives its own up.
    for (const char* flags : {" --page-size 1 --cache-pages 50", " --page-size 1 --cache-pages 50 --preempt swap"})
        CHECK_THAT(told(flags), ContainsSubstring(" steps, 1 preemption\n"));
    // Pages of 64 KiB that are swapped out have 64 MiB on the host.
    CHECK_THAT(generate("--plan --preempt swap").out, ContainsSubstring("on the host              64.1 MiB"));
    CHECK_THAT(generate("--plan").out, ContainsSubstring("on the host ") && !ContainsSubstring("64.1 MiB"));
}

// The weights of this model cannot be read. A mistake in a file, a prompt or an address is told before that is known.
TEST_CASE("what cannot be used is told before the weights are read, and a file stays as it is", "[generate][program]") {
    const TempFolder folder;
    std::filesystem::copy(newest_checkpoint(trained_run()), folder / "model");
    spit(folder / "model/model.safetensors", "no weights");
    const std::string in = folder / "in.jsonl", out = folder / "out.jsonl";
    spit(in, "{\"id\": 1, \"prompt\": \"Line\"}\n{\"id\": 2, \"prompt\": \"x\"}");
    const auto refused = [&](const std::string& arguments, const std::string& words) {
        const Outcome outcome = run_program("generate", "--model " + (folder / "model") + " " + arguments);
        INFO(outcome.err);
        CHECK(outcome.out.empty());
        CHECK(one_line_with(line_of(outcome), words));
    };
    const std::string batch = "--batch " + in + " --out ";
    for (const std::string text : {"a text of a person", "{\"id\": 7, \"prompt\": \"y\"}",
                                   "{\"id\": 7}\n{\"id\":", "{\"finish_reason\": \"stop\"}\n{\"id\":"}) {
        spit(out, text);  // without a line end, as a killed batch leaves its file
        refused(batch + out, "this line is not an answer of a batch");
        CHECK(slurp(out) == text);
    }
    std::filesystem::remove(out);
    const std::string before = slurp(in);
    refused(batch + in, "this is the file of the requests");
    CHECK(slurp(in) == before);
    refused("--batch " + (folder / "no") + " --out " + out, "cannot be read: No such file");
    refused("--batch " + folder.path + " --out " + out, "it is a folder");
    refused(batch + folder.path, "it is a folder, a file is needed");
    refused(batch + "/proc/self/mem", "the answers that it has cannot be read: Input/output error");
    refused(batch + (folder / "no/out"), "No such file or directory; make its folder first");
    refused("--prompt-ids 1,2 --max-length 2 --pictures " + (folder / "pictures"), "the prompt has 2 tokens");
    CHECK_FALSE(std::filesystem::exists(folder / "pictures"));
    refused("--eval " + (folder / "no"), "No such file or directory; check the path");
    spit(folder / "empty", "");
    refused("--eval " + (folder / "empty"), "the text has 0 tokens, and at least 2 are needed");
    spit(folder / "one", "x");
    refused("--eval " + (folder / "one"), "the text has 1 tokens, and at least 2 are needed");
    refused("--eval " + in + " --tokenizer test/golden/tokenizer/gpt2", "the tokenizer is not the model's");
    refused("--prompt a --logit-bias 256:1", "logit_bias names token 256, but the model's tokens are 0 to 255");
    refused("--prompt-ids 1,300", "the prompt has the token 300, but the model knows 0 to 255");
    refused("--prompt a --cache-pages 1 --samples 2", "need 2 pages of the cache, which has 1");
    refused("--serve --host nobody.invalid", "--host nobody.invalid: no such address");
    refused("--chat --temperature -1", "temperature is -1");
    refused("--chat --template vicuna", "--template vicuna: use ");
    refused("--chat --system " + std::string(300, 'x'), "tokens, and the model has room for 256, with the answer");
    json tokenizer = parsed_json(byte_tokenizer_json());
    tokenizer["model"]["vocab"].removeMember("\u00ff");
    tokenizer["added_tokens"].append(value({{"id", 255}, {"content", "</s>"}, {"special", true}}));
    spit(folder / "tokenizer.json", dumped(tokenizer));
    for (const char* what : {"--prompt a", "--plan", "--chat", "--serve --port 0"})
        refused(concat(what, " --stop '</s>.' --tokenizer ", folder / "tokenizer.json"), "has the special token");
    refused(batch + out, "model.safetensors");
    CHECK_FALSE(std::filesystem::exists(out));
    std::filesystem::create_symlink("answers", out);
    refused(batch + out, "model.safetensors");
    CHECK(std::filesystem::is_symlink(out));
    std::filesystem::remove(out);
    CHECK_THAT(generate(batch + "/dev/full").err, ContainsSubstring("No space left on device"));
    // A plan is of what a run could do.
    for (const char* what : {"--plan", "--prompt a"})
        refused(what + std::string(" --samples 9 --cache-pages 8"), "9 answers to 1 tokens, of up to ");
    for (const std::string& what : {std::string("--plan"), batch + (folder / "unwritten")}) {
        refused(what + " --temperature -1", "temperature is -1");
        refused(what + " --logit-bias 256:1", "logit_bias names token 256, but the model's tokens are 0 to 255");
        refused(what + " --beams 40", "n_beams is 40: with 0 stop tokens each beam needs its 80 most probable tokens");
        refused(what + " --beams 2 --length-penalty 101", "length_penalty is 101");
    }
    CHECK_FALSE(std::filesystem::exists(folder / "unwritten"));
    // Heads that the kernels cannot have, and latents.
    spit(folder / "model/config.json",
         R"({"model_type":"llama","vocab_size":256,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
        "num_attention_heads":1,"head_dim":258,"max_position_embeddings":64})");
    for (const char* what : {"--prompt a", "--plan", "--eval /proc/self/cmdline", "--serve --port 0"})
        refused(what, "heads of 258 columns are beyond the 256 that its kernels can have");
    spit(folder / "model/config.json",
         R"({"model_type":"deepseek_v3","vocab_size":256,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
        "num_attention_heads":1,"q_lora_rank":null,"kv_lora_rank":1022,"qk_nope_head_dim":8,"qk_rope_head_dim":4,
        "v_head_dim":8,"max_position_embeddings":64})");
    refused("--plan", "a model with kv_lora_rank 1022 and qk_rope_head_dim 4 cannot generate, because");
}

TEST_CASE("a batch whose answers can be written but not read does not ask for them again", "[generate]") {
    const TempFolder folder;
    GenerateOptions options;
    options.batch = folder / "in.jsonl", options.out = folder / "out.jsonl";
    spit(options.batch, "{\"id\": 1, \"prompt\": \"a\"}\n");
    spit(options.out, "{\"id\": 1, \"text\": \"b\", \"finish_reason\": \"length\"}\n");
    ::chmod(folder.path.c_str(), 0755);
    ::chmod(options.out.c_str(), 0222);
    const bool was_root = ::geteuid() == 0;  // who may read all files
    if (was_root) REQUIRE(::seteuid(65534) == 0);
    const std::string error = error_of([&] { open_batch(options); });
    if (was_root && ::seteuid(0) != 0) std::abort();
    CHECK(one_line_with(error, options.out, "the answers that it has cannot be read: Permission denied"));
}

TEST_CASE("generate holds a conversation, plans, and tells a perplexity", "[generate][program]") {
    const TempFolder folder;
    spit(folder / "said", "Hello\nHow are you?");
    const Outcome chat = generate("--chat --tokens 8 --temperature 0", "cat " + (folder / "said") + " | ");
    CHECK(chat.status == 0);
    CHECK(!chat.out.empty());
    // What cannot be read to its end, as a folder, is not taken for an end.
    const Outcome unread = generate("--chat --tokens 8 < " + folder.path);
    CHECK(unread.status == 2);
    CHECK(unread.err == "generate: standard input cannot be read: Is a directory\n");
    // A message that is too long by itself costs nothing of the conversation, nor does an empty line.
    spit(folder / "long", "Hello\r\n\n" + std::string(3000, 'x') + "\nHow are you?\n");
    std::string kept = generate("--chat --tokens 8 --temperature 0", "cat " + (folder / "long") + " | ").out;
    CHECK(kept.find("left out") == std::string::npos);
    const size_t refusal = kept.find("(the prompt has ");
    REQUIRE(refusal != std::string::npos);
    kept.erase(refusal, kept.find('\n', refusal) + 1 - refusal);
    CHECK(kept == chat.out);
    // With a small cache a conversation loses its beginning, as with a short --max-length.
    spit(folder / "much", "message number 1 xxxxxxxxxxxxxx\r\nmessage number 2 xxxxxxxxxxxxxx\n");
    const Outcome small = generate("--chat --tokens 40 --cache-pages 8", "cat " + (folder / "much") + " | ");
    CHECK_THAT(small.out, ContainsSubstring("(the beginning of the conversation is left out"));
    CHECK(small.out.find("ask for less") == std::string::npos);
    // The system message is no part of what is left out: with it the second message has no room.
    const std::string sixty(60, 'x');
    spit(folder / "two", "a\n" + sixty + "\n");
    const Outcome system =
        generate("--chat --tokens 4 --max-length 100 --system " + sixty, "cat " + (folder / "two") + " | ");
    CHECK_THAT(system.out, ContainsSubstring("(the prompt has "));
    CHECK(system.out.find("left out") == std::string::npos);
    // A system message of which a message of one letter is as long as there is room has none for an answer.
    const std::string refused = generate("--chat --system ab --max-length 5").err;
    const int least = static_cast<int>(number_after(refused, "it has "));
    for (const int more : {0, 1})
        CHECK(generate(concat("--chat --system ab --max-length ", least + more, " < /dev/null")).status ==
              (more == 0 ? 2 : 0));
    CHECK_THAT(generate("--plan --max-length 100").out, ContainsSubstring("64 sequences of 100 tokens fit"));
    // The last token of a sequence is in no page.
    CHECK_THAT(generate("--plan --page-size 1 --cache-pages 12 --max-length 7").out,
               ContainsSubstring(" 2 sequences of 7 tokens fit"));
    CHECK(generate("--plan").out.find("while it is read") == std::string::npos);
    CHECK_THAT(generate("--plan").out, ContainsSubstring("(4.00 KiB per token)"));
    CHECK_THAT(generate("--plan").out, ContainsSubstring(" parameters in fp32\n"));
    CHECK_THAT(generate("--plan --dtype fp16 --weights int8-block").out,
               ContainsSubstring(" parameters in fp16, the blocks' linear layers in int8-block\n"));
    CHECK_THAT(generate("--plan --tp 2").out,
               ContainsSubstring("(2.00 KiB per token)"));  // the keys of half of the heads
    CHECK(generate("--plan").out.find("it does not fit") == std::string::npos);
    // Pages of 16 tokens, each of which takes at least 1024 bytes.
    const std::string too_many = concat(" --cache-pages ", device_memory().all / (16 * 1024) + 1);
    const Outcome large = generate("--plan" + too_many);
    CHECK_THAT(large.out + large.err, ContainsSubstring("  it does not fit: this device has "));
    CHECK_THAT(generate("--prompt a" + too_many).err, ContainsSubstring(", and the device has "));
    CHECK_THAT(generate("--plan --weights int8").out, ContainsSubstring("and while it is read"));
    const Outcome plan = generate("--plan --max-sequences 3 --page-size 8 --draft " + trained_run());
    CHECK_THAT(plan.out, ContainsSubstring(" 3 sequences of 128 tokens fit"));
    CHECK_THAT(plan.out, ContainsSubstring("weights of the draft"));
    // The model has seen this text for a few steps: better than the 256 of a model that knows nothing.
    spit(folder / "text", made_text(40));
    const auto perplexity = [&](const std::string& flags) {
        return number_after(generate("--eval " + (folder / "text") + " " + flags).out, "perplexity ");
    };
    const double exact = perplexity("");
    CHECK(exact < 256);
    // Eight bits round a weight by at most 1 / 254 of the largest of its row: loss hardly moves.
    CHECK(std::abs(perplexity("--weights int8") / exact - 1) < 0.01);
    // A cache of 8 bits rounds each key and value, by at most 2^-4 of itself: it must show, and little.
    const double rounded = perplexity("--cache-dtype fp8");
    CHECK(rounded != exact);
    CHECK(std::abs(rounded / exact - 1) < 0.01);
    // Also a model of more positions has windows of 1024.
    std::filesystem::copy(newest_checkpoint(trained_run()), folder / "longer");
    json config = parsed_json(slurp(folder / "longer/config.json"));
    config["max_position_embeddings"] = 2000;
    spit(folder / "longer/config.json", dumped(config));
    spit(folder / "text", std::string(1100, 'x'));
    CHECK_THAT(run_program("generate", "--model " + (folder / "longer") + " --eval " + (folder / "text")).out,
               ContainsSubstring(" of 1099 tokens, in windows of 1024"));
}

// Its output is a pipe that is full, as a terminal is after Ctrl-S, so that each Ctrl-C comes while it writes.
TEST_CASE("Ctrl-C while the terminal takes nothing ends no conversation", "[generate][program]") {
    const TempFolder folder;
    const Outcome chat =
        run_shell(concat("export OMP_NUM_THREADS=1; cd ", folder.path, "; mkfifo in out; exec 3<>in 4<>out; ",
                         "dd if=/dev/zero of=out bs=4096 count=4096 oflag=nonblock 2> full; ", program_path("generate"),
                         " --model ", trained_run(), " --chat --tokens 2 < in > out 2> err 3>&- 4>&- & pid=$!; ",
                         // The shell, which this process is at first, catches Ctrl-C, too.
                         "for i in $(seq 500); do [ \"$(cat /proc/$pid/comm)\" = generate ] && ",
                         "grep -q 'SigCgt.*[2367abef]$' /proc/$pid/status && break; sleep 0.02; done; ",
                         "for i in 1 2 3 4 5; do kill -INT $pid; sleep 0.02; done; ",
                         "echo Hello >&3; exec 5<out 3>&- 4>&-; tr -d '\\0' <&5; wait $pid; echo status $?"));
    INFO(chat.out << chat.err << slurp(folder / "err"));
    CHECK_THAT(chat.out, ContainsSubstring("(Ctrl-D ends the conversation)") && ContainsSubstring("status 0"));
    CHECK(slurp(folder / "err").empty());
}

// The next line is written when the program has read the first, because a terminal keeps no more, and has asked for
// another one, because the terminal shows at once what is typed.
TEST_CASE("a message of which a terminal may have dropped the end is not answered", "[generate][program]") {
    if (run_shell("command -v script").status != 0) return;  // it runs a command in a terminal of its own
    const TempFolder folder;
    const std::string seen = folder / "typescript";
    const Outcome chat = run_shell(
        concat("export OMP_NUM_THREADS=1; { printf '%05000d\\n' 0; ",
               "for i in $(seq 500); do grep -q 'send it in parts' ", seen, " && [ \"$(tail -n 1 ", seen,
               ")\" = '> ' ] && break; sleep 0.02; done; echo Hello; } | ", "script -qefc '", program_path("generate"),
               " --model ", trained_run(), " --chat --tokens 2 --logit-bias 120:100' ", seen));
    INFO(chat.out << chat.err);
    CHECK(chat.status == 0);
    CHECK_THAT(chat.out, ContainsSubstring("A conversation with " + trained_run()) &&
                             ContainsSubstring("> (a terminal passes on 4095 bytes of a line") &&
                             ContainsSubstring("> Hello\r\nxx\r\n"));
}

TEST_CASE("a program that holds a conversation has the whole of an answer before it goes on", "[generate][program]") {
    const TempFolder folder;
    const Outcome chat = run_shell(concat(
        "export OMP_NUM_THREADS=1; cd ", folder.path, "; mkfifo in out; exec 3<>in 4<>out; ", program_path("generate"),
        " --model ", trained_run(), " --chat --tokens 2 --logit-bias 120:100 < in > out 3>&- 4>&- & ",
        "for said in Hello $(printf %03000d 0) Again; ",
        "do echo $said >&3; timeout 60 head -n 1 <&4; done; exec 3>&-; wait $!; echo status $?"));
    INFO(chat.out << chat.err);
    CHECK(chat.out.starts_with("xx\n(the prompt has "));
    CHECK(chat.out.ends_with(")\nxx\nstatus 0\n"));
}

TEST_CASE("who writes a batch's requests into a pipe has each answer before the next request", "[generate][program]") {
    const TempFolder folder;
    const Outcome batch = run_shell(
        concat("export OMP_NUM_THREADS=1; cd ", folder.path, "; mkfifo in out; exec 3<>in 4<>out; ",
               program_path("generate"), " --model ", trained_run(), " --batch in --out out > told 3>&- 4>&- & ",
               "for id in 7 8 18446744073709551615; do printf '{\"id\": %s, \"prompt\": ' $id >&3; sleep 0.05; ",
               "echo '\"a\", \"tokens\": 2}' >&3; timeout 10 head -n 1 <&4; done; exec 3>&-; wait $!; echo status $?"));
    INFO(batch.out << batch.err);
    std::istringstream lines(batch.out);
    std::string line;
    for (const uint64_t id : {uint64_t{7}, uint64_t{8}, ~uint64_t{0}})
        CHECK((std::getline(lines, line) && line.starts_with(concat("{\"id\":", id, ","))));
    CHECK((std::getline(lines, line) && line == "status 0"));
}

// Requests come through a pipe, the second after more than the 120 s that ranks of a training wait for each other. Of
// these seconds a program has 500 in one, by a clock of its own.
TEST_CASE("ranks that divide a model wait for requests as long as it takes", "[generate][program]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    if (!device().is_cpu) SKIP_TEST("a GPU's driver would read this clock, too");
    const TempFolder folder;
    spit(folder / "clock.c",
         "#include <sys/syscall.h>\n#include <time.h>\n#include <unistd.h>\n"
         "int clock_gettime(clockid_t id, struct timespec* t) {\n"
         "    const int status = syscall(SYS_clock_gettime, id, t);\n"
         "    t->tv_sec = 500 * t->tv_sec + t->tv_nsec / 2000000, t->tv_nsec = t->tv_nsec % 2000000 * 500;\n"
         "    return status;\n}\n");
    const std::string request = R"(echo '{"prompt":"a","tokens":2}')";
    const Outcome batch = run_shell(concat(
        "export OMP_NUM_THREADS=1; unset CUDA_CPU_STRICT; cc -shared -fPIC -o ", folder / "clock.so ",
        folder / "clock.c; mkfifo ", folder / "in; ( ", request, "; sleep 1; ", request, " ) > ", folder / "in & ",
        mpirun_command(2), "env LD_PRELOAD=", folder / "clock.so ", program_path("generate"), " --model ",
        trained_run(), " --tp 2 --batch ", folder / "in --out ", folder / "out; echo status $?; kill $! 2> /dev/null"));
    INFO(batch.out << batch.err);
    CHECK_THAT(batch.out, ContainsSubstring("2 answers") && ContainsSubstring("status 0"));
}

TEST_CASE("a model whose logits are not finite is said to be one", "[generate][program]") {
    const TempFolder folder;
    std::filesystem::copy(newest_checkpoint(trained_run()), folder / "model");
    fill_with_nan(folder / "model/model.safetensors");
    spit(folder / "in", "{\"prompt\": \"a\", \"samples\": 2}\n");
    const std::string model = "--model " + (folder / "model");
    for (const std::string way : {"", " --beams 3 --samples 2"}) {
        const Outcome outcome = run_program("generate", model + " --prompt a --tokens 3" + way);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring("the model's logits are not finite"));
        const std::string out = folder / "out";
        std::filesystem::remove(out);
        const std::string beams = way.empty() ? "" : " --beams 3";
        const Outcome batch = run_program("generate", model + beams + " --batch " + (folder / "in") + " --out " + out);
        CHECK(batch.status == 2);
        CHECK_THAT(batch.err, ContainsSubstring("2 answers have no text, and will be asked for by the next run"));
        CHECK(slurp(out).empty());  // so that they will
    }
    // Also where a prompt alone is scored.
    spit(folder / "in", "{\"prompt\": \"ab\", \"tokens\": 0, \"logprobs\": 0, \"prompt_logprobs\": true}\n");
    const std::string scored = model + " --batch " + (folder / "in") + " --out " + (folder / "scored");
    CHECK_THAT(run_program("generate", scored).err, ContainsSubstring("1 answer has no text"));
    spit(folder / "text", "some text");
    const Outcome perplexity = run_program("generate", model + " --eval " + (folder / "text"));
    CHECK(perplexity.status == 2);
    CHECK_THAT(perplexity.err, ContainsSubstring("not finite"));
    CHECK_THAT(run_program("generate", model + " --chat", "echo a |").out, ContainsSubstring("not finite"));
}

TEST_CASE("generate refuses in one line what cannot be", "[generate][program]") {
    const TempFolder folder;
    const std::pair<std::string, std::string> wrong[] = {
        {"", "nothing to do: give --prompt TEXT"},
        {"--prompt a --chat", "give one of --prompt"},
        {"--prompt a --top-p 2", "top_p"},
        {"--prompt a --max-tokens 3", "unknown flag --max-tokens: did you mean --tokens?"},
        {"--prompt a --dtype fp8", "--dtype fp8"},
        {"--prompt a --draft no", "--draft no"},
        {"--prompt a --draft " + trained_run() + " --lookup 2",
         "it cannot be combined with --lookup, --beams or --eval"},
        {"--prompt a --tp 2 --weights int8", "--tp cannot be combined with --draft, --chat, --serve, --eval or"},
        {"--prompt a --tp 2 --graphs on", "--graphs on cannot be combined with --tp"},
        {"--prompt a --beams 2 --lookup 2", "--lookup proposes tokens that are drawn next"},
        {"--prompt a --port 80", "--port is for --serve"},
        {"--serve --port 65536", "--port 65536: a port is a number up to 65535"},
        {"--serve --max-waiting -1", "--max-waiting must not be negative"},
        {"--serve --max-body 0", "--max-body, --client-timeout and --request-timeout be positive"},
        {"--serve --client-timeout 0", "--max-body, --client-timeout and --request-timeout be positive"},
        {"--serve --request-timeout 0", "--max-body, --client-timeout and --request-timeout be positive"},
        {"--prompt a --cache-dtype fp16", "--cache-dtype fp16: use same or fp8"},
        {"--prompt a --batching none", "--batching none: use continuous or static"},
        {"--prompt a --preempt none", "--preempt none: use swap or recompute"},
        {"--prompt a --step-tokens 0", "--page-size, --tokens and --samples must be at least 1"},
        {"--prompt a --page-size 0", "--page-size, --tokens and --samples must be at least 1"},
        {"--prompt a --samples 0", "--page-size, --tokens and --samples must be at least 1"},
        {"--prompt a --cache-pages -1", "and --cache-pages and --lookup not negative"},
        {"--prompt a --lookup -1", "and --cache-pages and --lookup not negative"},
        {"--prompt a --max-length 1", "--max-length 1: a prompt and an answer have at least 2 tokens"},
        {"--prompt a --template chatml", "--template is for --chat and --serve"},
        {"--prompt a --system b", "--system is for --chat"},
        {"--eval a.txt --draft " + trained_run(), "it cannot be combined with --lookup, --beams or --eval"},
        {"--chat --tp 2", "--tp cannot be combined with --draft, --chat, --serve, --eval or"},
        {"--eval a.txt --temperature 0", "--temperature is for answers, and --eval has none"},
        {"--eval a.txt --tokens 4", "--tokens is for answers, and --eval has none"},
        {"--prompt a --tp 5", "--tp 5"},
        {"--prompt a --tp 9223372036854775807", "--tp 9223372036854775807: it must be from 1 to 1024"},
        {"--prompt a --graphs maybe", "--graphs maybe: use on, off or auto"},
        {"--prompt a --draft " + trained_run() + " --draft-tokens 0", "--draft-tokens 0: it must be at least 1"},
        {"--prompt a --draft-tokens 3", "--draft-tokens 3: it must be at least 1, and is for --draft"},
        {"--prompt a --weights int4", "--weights int4: use none, int8, fp8, int8-block or fp8-block"},
        {"--prompt a --max-length 100000", "the model has 256 positions"},
        {"--prompt-ids 1,x", "--prompt-ids x: give a whole number"},
        {"--prompt-ids 1,", "--prompt-ids : give a whole number"},
        {"--chat --template vicuna", "--template vicuna: use chatml, qwen2, qwen, qwen3"},
        {"--batch no.jsonl --out " + (folder / "o"), "--batch no.jsonl: cannot be read"},
        {"--batch no.jsonl", "--batch needs --out"},
        {"--prompt a --page-size 1000000000", "--page-size can be at most 1048576"},
        {"--chat --samples 2", "a conversation has one answer to a message"},
        {"--serve --beams 2", "--beams is for --prompt, --prompt-ids and --batch"},
        {"--prompt a --ids --show-special-tokens", "--ids has all tokens: leave out --show-special-tokens"},
        {"--chat --ids", "--ids is for --prompt and --prompt-ids"},
        {"--prompt a --samples 65", "--samples 65: they are computed together, and at most 64 can be"},
        {"--prompt a --beams 40", "use fewer beams"},
        {"--prompt a --beams 2 --logit-bias 1:1", "--logit-bias is for tokens that are drawn"},
        {"--prompt a --beams 2 --temperature 1", "--temperature is for tokens that are drawn"},
        {"--prompt a --beams 2 --samples 3", "--beams 2: it must be at least --samples"},
        {"--prompt a --length-penalty 2", "--length-penalty is for --beams"},
        {"--chat --logprobs 1", "--logprobs is for --prompt, --prompt-ids, --batch and --serve"},
        {"--plan --logprobs 1", "--logprobs is for --prompt, --prompt-ids, --batch and --serve"},
        {"--prompt a --pictures /proc/p", "cannot make the folder /proc/p"},
        {"--chat --pictures p", "--pictures is for --batch, --prompt and --prompt-ids"},
        {"--prompt ''", "--prompt is empty"},
        {"--prompt-ids ''", "--prompt-ids is empty"},
        {"--prompt --ids",
         "needs a value, and the next word, --ids, is a flag (for a text that begins like this: --prompt=TEXT)"},
        {"--prompt a --stop b c", "\"c\" belongs to no flag"},
        {"--prompt a --stop --ids", "--stop needs a value, and the next word, --ids, is a flag"},
        {"--chat --stop ''", "--stop is empty"},
        {"--serve --api-key ''", "--api-key is empty"},
        {"--serve --api-key 'x '", "--api-key: give printable ASCII characters"},
        {"--serve --api-key 'x\x7f'", "--api-key: give printable ASCII characters"},
        {"--prompt a --draft ''", "--draft is empty"},
        {"--serve --max-waiting 9e18", "--max-waiting can be at most 1048576"},
        {"--serve --client-timeout 1e19", "--client-timeout can be at most 1e9 seconds"}};
    for (const auto& [arguments, words] : wrong) {
        const Outcome outcome = generate(arguments);
        INFO(arguments);
        CHECK(outcome.out.empty());
        CHECK(one_line_with(line_of(outcome), words));
    }
    for (const std::string what : {"--tokens 2 --prompt a", "--plan", "--help"})
        CHECK(run_shell(program_path("generate") + " " + what + " --model " + trained_run() + " > /dev/full").status ==
              2);
    // A file that is opened does not become standard output where that is closed.
    spit(folder / "in", "{\"prompt\": \"a\", \"tokens\": 2}\n");
    generate("--batch " + (folder / "in") + " --out " + (folder / "out") + " >&-");
    CHECK(lines_of(folder / "out").size() == 1);
    // Of a model with more tokens than bytes and no tokenizer only ids can be asked for.
    json config = parsed_json(slurp(newest_checkpoint(trained_run()) + "/config.json"));
    config["vocab_size"] = 600;
    spit(folder / "config.json", dumped(config));
    spit(folder / "text", "a text");
    for (const std::string& way :
         std::vector<std::string>{"--prompt a", "--serve", "--chat", "--eval " + (folder / "text")}) {
        const std::string err = run_program("generate", way + " --model " + folder.path).err;
        CHECK_THAT(err, ContainsSubstring("there is no tokenizer.json in this folder: give --tokenizer"));
        CHECK((err.find("--prompt-ids") == std::string::npos) == (way != "--prompt a"));  // elsewhere it is no way out
    }
    const Outcome none = run_program("generate", "--prompt a", "cd " + folder.path + " &&");
    CHECK_THAT(none.err, ContainsSubstring("there is no run in runs/: train a model with ./train_gpt"));
}

TEST_CASE("what is wrong on all ranks that divide a model is one line, as in a plan", "[generate][program]") {
    const std::string heads = "--tp 3: the model's 4 heads cannot be divided among 3 ranks: use a divisor of 4";
    for (const std::string way : {"--prompt a", "--plan"})
        CHECK(generate("--tp 3 " + way).err == "generate: " + heads + "\n");
    CHECK(generate("--tp 2 --prompt-ids 999").err ==  // which rank 0 alone has
          "generate: the prompt has the token 999, but the model knows 0 to 255\n");
    if (!have_mpirun()) SKIP_TEST("no MPI");
    for (const auto& [flags, says] :
         {std::pair<std::string, std::string>{"--tp 3 --prompt a", heads},
          // Each process would answer all by itself.
          {"--prompt a", "--tp 1 under an mpirun of 3 processes: give --tp 3, or start 1"},
          {"--plan --tp 2", "--tp 2 under an mpirun of 3 processes: give --tp 3, or start 2"}}) {
        const Outcome outcome = run_shell(concat("OMP_NUM_THREADS=1 ", mpirun_command(3), program_path("generate"),
                                                 " --model ", trained_run(), " ", flags));
        INFO(outcome.err);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring("generate: " + says + "\n"));
        CHECK(outcome.err.find(says, outcome.err.find(says) + 1) == std::string::npos);
        CHECK(outcome.err.find("MPI_ABORT") == std::string::npos);
    }
    // What one rank alone finds ends all of them, also where the others wait for it to agree on the number of pages.
    const std::string start = concat("OMP_NUM_THREADS=1 ", program_path("generate"), " --tp 2 --prompt a --model ");
    for (const std::string flags : {"", " --cache-pages 9"}) {
        const Outcome outcome = run_shell(mpirun_of_two(start + trained_run() + flags, start + "/nowhere" + flags));
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring("rank 1: --model /nowhere: "));
    }
}

TEST_CASE("a checkpoint that is removed while it is read gives way to a newer one", "[generate][program]") {
    const TempFolder folder;
    std::filesystem::copy(trained_run(), folder / "run", std::filesystem::copy_options::recursive);
    const std::string next = folder / "run/checkpoints/step-00000005";
    for (const std::string& models : {std::string("--model "), "--model " + trained_run() + " --draft "}) {
        std::filesystem::copy(newest_checkpoint(folder / "run"), next);
        spit(folder / "request", "{\"prompt\":\"Line 1\",\"tokens\":5}\n");
        // With config.json read, and the weights not, generate opens `in`, and then waits for a reader of `out`.
        const std::string start = concat(program_path("generate"), " --batch in --out out ", models, folder / "run");
        const Outcome outcome = run_shell(
            concat("cd ", folder.path, " && rm -f in out && mkfifo in out && { timeout 60 ", start,
                   " >&2 & } && exec 3> in && rm -r ", next, " && mv request in && exec 4< out && wait $! && cat <&4"));
        INFO(models << outcome.err);
        REQUIRE(outcome.status == 0);
        const std::string ids = generate("--prompt 'Line 1' --tokens 5 --ids").out;
        CHECK_THAT(outcome.out, ContainsSubstring("\"ids\":[" + ids.substr(0, ids.find('\n')) + "]"));
    }
}

TEST_CASE("a pipe in the place of a file of a run is refused, and not waited for", "[generate][program]") {
    const TempFolder folder;
    const std::string run = folder / "run", asks = "--prompt a --tokens 2 --model " + run,
                      begins = "--sample 0 --init " + run, resumes = "--resume --out " + run;
    const struct {
        std::string file, program, arguments;
    } cases[] = {{"config.json", "generate", asks},
                 {"config.json", "train_gpt", begins},
                 {"config.json", "train_gpt", resumes},
                 {"state.json", "train_gpt", resumes},
                 {"chat_template.jinja", "train_gpt", begins},
                 {"../../lock", "train_gpt", resumes},
                 {"../../log.csv", "train_gpt", resumes}};
    for (const auto& [file, program, arguments] : cases) {
        std::filesystem::copy(trained_run(), run, std::filesystem::copy_options::recursive);
        const std::string pipe = newest_checkpoint(run) + "/" + file;
        std::filesystem::remove(pipe);
        REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
        const Outcome outcome = run_program(program, arguments, "timeout -s KILL 20");
        INFO(file << " " << arguments << " " << outcome.err);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring(std::filesystem::path(file).filename().string()) &&
                                    ContainsSubstring(" is not a regular file"));
        std::filesystem::remove_all(run);
    }
}

TEST_CASE("a model's config.json and a text may come through a pipe", "[generate][program]") {
    const std::string path = newest_checkpoint(trained_run()) + "/config.json";
    const Outcome plan = run_shell(concat("cat ", path, " | ", program_path("train_gpt"),
                                          " --plan --device-spec h200 --batch 1 --seq 16 --model /dev/stdin"));
    CHECK(plan.status == 0);
    const Outcome eval = run_shell(concat("echo some text | OMP_NUM_THREADS=1 ", program_path("generate"), " --model ",
                                          trained_run(), " --eval /dev/stdin"));
    CHECK_THAT(eval.out, ContainsSubstring("of 9 tokens"));
}

// Its name is too long to open it, and short enough to find it in its folder.
TEST_CASE("a newest checkpoint that cannot be opened is an error, and not tried again", "[generate][program]") {
    const TempFolder folder;
    std::filesystem::copy(trained_run(), folder / "run", std::filesystem::copy_options::recursive);
    std::string run = "run";
    while (run.size() < 4090 - std::strlen("/checkpoints")) run.insert(0, "./");
    const Outcome outcome =
        run_program("generate", "--prompt a --model " + run, "cd " + folder.path + " && timeout 20");
    CHECK(outcome.status == 2);
    CHECK_THAT(outcome.err, ContainsSubstring("checkpoints/step-00000004/config.json"));
}
