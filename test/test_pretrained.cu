// test/test_pretrained.cu: training from trained weights, and checkpoints that are whole Hugging Face folders.
#include "train_runs.h"
#include "json.h"

namespace {

const std::string kGpt2 = "test/golden/tokenizer/gpt2", kLlama3 = "test/golden/tokenizer/llama3";

// Shorter than other tests' runs: later flags win.
Outcome train_8(const std::string& arguments) { return train("--steps 8 --val-every 4 " + arguments); }

json read_json(const std::string& path) { return parsed_json(slurp(path)); }

// The weights and files of a short run whose tokens are those of GPT-2's golden tokenizer, as a folder of Hugging Face
// would have them: with a chat template and settings of its own.
void make_model(const std::string& folder, const std::string& run) {
    must_succeed(train_8("--steps 2 --tokenizer " + kGpt2 + " --out " + run));
    std::filesystem::create_directories(folder);
    for (const std::string name : {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"})
        std::filesystem::copy_file(newest_checkpoint(run) + "/" + name, folder + "/" + name);
    spit(folder + "/chat_template.jinja", "{{ messages[0].content }}\n");
    std::filesystem::create_directories(folder + "/additional_chat_templates");
    spit(folder + "/additional_chat_templates/tool.jinja", "{{ tools }}\n");
    spit(folder + "/additional_chat_templates/notes.txt", "not a template\n");
    spit(folder + "/generation_config.json", "{\"eos_token_id\": [600, 3], \"top_k\": 7}\n");
    json config = read_json(folder + "/config.json");
    config["eos_token_id"] = value(std::vector{600, 3});
    config["pad_token_id"] = 3;
    spit(folder + "/config.json", dumped(config));
}

}  // namespace

TEST_CASE("--init begins with an evaluation, and with a lower learning rate", "[program][pretrained]") {
    const TempFolder folder;
    const std::string first = folder / "first", second = folder / "second", plain = folder / "plain";
    REQUIRE(train_8("--out " + first).status == 0);
    const Outcome outcome =
        train_8("--out " + second + " --stop-after 3 --init " + first);  // a run: its newest checkpoint
    INFO(outcome.err);
    REQUIRE(outcome.status == 0);
    CHECK_THAT(outcome.out, ContainsSubstring("model    " + newest_checkpoint(first) + ": "));
    CHECK_THAT(outcome.out, ContainsSubstring("start    from trained weights: the learning rate rises to 0.0003"));
    CHECK_THAT(outcome.out, ContainsSubstring("\nstep 0/8 | val loss "));
    const std::string resumed = printed_by("train_gpt", "--resume --lr 3e-4 --out " + second);
    CHECK(resumed.find("step 0/8") == std::string::npos);
    CHECK(resumed.find("from trained weights") == std::string::npos);

    const std::vector<LogRow> before = read_csv_log(first + "/log.csv"), rows = read_csv_log(second + "/log.csv");
    REQUIRE(before.size() == 8);
    REQUIRE(rows.size() == 9);
    CHECK(rows[0].step == 0);
    CHECK(rows[0].tokens == 0);
    CHECK(rows[0].val_loss == before.back().val_loss);  // the same weights and the same text
    CHECK_FALSE((rows[0].loss || rows[0].lr || rows[0].grad_norm || rows[0].step_ms));
    CHECK(rows[1].step == 1);
    CHECK(*before[1].lr == 3e-3);
    CHECK(*rows[2].lr == 3e-4);

    // Without evaluations there is none before the first step, and the weights get the same bits.
    const std::string without = must_succeed(train_8("--val-every 0 --lr 0.0003 --out " + plain + " --init " + first));
    CHECK(without.find("from trained weights") == std::string::npos);  // --lr was given
    CHECK(read_csv_log(plain + "/log.csv").size() == 8);
    CHECK((weights_of(plain) == weights_of(second)));
    // Nor is there one where no text is held out.
    const std::string all = folder / "all";
    REQUIRE(train_8("--steps 1 --warmup 0 --val-fraction 0 --out " + all + " --init " + first).status == 0);
    CHECK(read_csv_log(all + "/log.csv").size() == 1);
}

TEST_CASE("a checkpoint of a model of bytes has their tokenizer", "[program][pretrained]") {
    const TempFolder folder;
    const std::string run = folder / "run", next = folder / "next";
    REQUIRE(train_8("--steps 2 --out " + run).status == 0);
    const std::string checkpoint = newest_checkpoint(run);
    CHECK(load_tokenizer(checkpoint + "/tokenizer.json")->name() == "bytes");
    const json config = read_json(checkpoint + "/config.json"),
               tokens = read_json(checkpoint + "/tokenizer_config.json");
    CHECK(config["bos_token_id"].isNull());  // not those of LLaMA: 1 and 2 are bytes
    CHECK(config["eos_token_id"].isNull());
    CHECK(tokens["tokenizer_class"] == "PreTrainedTokenizerFast");
    CHECK(tokens["eos_token"].isNull());
    CHECK(read_json(checkpoint + "/generation_config.json") == json(Json::objectValue));
    // What comes from there is a model of bytes, too.
    const std::string out = must_succeed(train_8("--steps 2 --out " + next + " --init " + checkpoint));
    CHECK_THAT(out, ContainsSubstring("tokens (bytes)"));
    for (const std::string name : {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})
        CHECK(slurp(newest_checkpoint(next) + "/" + name) == slurp(checkpoint + "/" + name));
}

TEST_CASE("what lies beside the weights of --init is found, and kept", "[program][pretrained]") {
    const TempFolder folder;
    const std::string model = folder / "model", run = folder / "run";
    make_model(model, folder / "first");
    const json made = read_json(newest_checkpoint(folder / "first") + "/config.json");
    CHECK(made["vocab_size"] == 601);
    CHECK(made["bos_token_id"] == 600);  // <|endoftext|>: it begins documents, and ends them
    CHECK(made["eos_token_id"] == 600);
    CHECK(read_json(model + "/tokenizer_config.json")["eos_token"] == "<|endoftext|>");
    CHECK(slurp(model + "/tokenizer.json") == slurp(kGpt2 + "/tokenizer.json"));

    const std::string said = must_succeed(train_8("--stop-after 2 --out " + run + " --init " + model));
    CHECK_THAT(said, ContainsSubstring("tokens (" + model + "/tokenizer.json)"));
    const auto check_kept = [&] {
        for (const std::string name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                                       "generation_config.json", "additional_chat_templates/tool.jinja"})
            CHECK(slurp(newest_checkpoint(run) + "/" + name) == slurp(model + "/" + name));
        CHECK_FALSE(std::filesystem::exists(newest_checkpoint(run) + "/additional_chat_templates/notes.txt"));
        const json config = read_json(newest_checkpoint(run) + "/config.json");
        CHECK(config["eos_token_id"] == value(std::vector{600, 3}));
        CHECK(config["pad_token_id"] == 3);
    };
    check_kept();
    // A resumed run needs only its own folder: the tokenizer is in the checkpoint.
    std::filesystem::rename(model, folder / "moved");
    printed_by("train_gpt", "--resume --out " + run);
    std::filesystem::rename(folder / "moved", model);
    check_kept();

    // --model finds the tokenizer, too; it has no weights. What is missing beside it is made: of several tokens that
    // end a text the first.
    std::filesystem::remove(model + "/tokenizer_config.json");
    const Outcome random = train_8("--steps 2 --out " + (folder / "random") + " --model " + model + "/config.json");
    INFO(random.err);
    REQUIRE(random.status == 0);
    CHECK_THAT(random.out, ContainsSubstring("tokens (" + model + "/tokenizer.json)"));
    CHECK(slurp(newest_checkpoint(folder / "random") + "/chat_template.jinja") ==
          slurp(model + "/chat_template.jinja"));
    CHECK(read_json(newest_checkpoint(folder / "random") + "/tokenizer_config.json")["eos_token"] == "<|endoftext|>");
}

TEST_CASE("an explicit --tokenizer wins over the one beside the model", "[program][pretrained]") {
    const TempFolder folder;
    const std::string model = folder / "model", run = folder / "run", own_name = folder / "bpe.json";
    make_model(model, folder / "first");
    std::filesystem::copy_file(kLlama3 + "/tokenizer.json", own_name);
    for (const std::string& tokenizer : {kLlama3, own_name}) {
        INFO(tokenizer);
        must_succeed(train_8("--steps 2 --out " + run + " --init " + model + " --tokenizer " + tokenizer));
        const std::string checkpoint = newest_checkpoint(run);
        CHECK(slurp(checkpoint + "/tokenizer.json") == slurp(kLlama3 + "/tokenizer.json"));
        CHECK_FALSE(std::filesystem::exists(checkpoint + "/chat_template.jinja"));
        // The ids and settings of the model were those of its own tokenizer. Id 607, <|begin_of_text|>, is beyond it.
        CHECK(read_json(checkpoint + "/config.json")["bos_token_id"].isNull());
        CHECK(read_json(checkpoint + "/generation_config.json") == json(Json::objectValue));
        std::filesystem::remove_all(run);
    }
    // A copy of the model's own is no other one: its ids and settings are kept.
    REQUIRE(train_8("--steps 1 --warmup 0 --out " + run + " --init " + model + " --tokenizer " + kGpt2).status == 0);
    CHECK(slurp(newest_checkpoint(run) + "/generation_config.json") == slurp(model + "/generation_config.json"));
    CHECK(read_json(newest_checkpoint(run) + "/config.json")["eos_token_id"] == value(std::vector{600, 3}));
}

TEST_CASE("text that the model cannot read is refused at the start", "[program][pretrained]") {
    const TempFolder folder;
    const std::string model = folder / "model", run = folder / "run", special = folder / "special.txt";
    make_model(model, folder / "first");
    spit(special, slurp(text_file()) + "<|eot_id|>" + slurp(text_file()));
    std::filesystem::create_directories(folder / "empty");
    const auto refused = [&](const std::string& arguments) {
        const std::string line = line_of(train_8("--out " + run + " " + arguments));
        CHECK_FALSE(std::filesystem::exists(run));
        INFO(line);
        return line;
    };
    CHECK(one_line_with(refused("--init " + model + " --tokenizer " + kLlama3 + " --data " + special),
                        "holds token id 611, beyond the model's vocabulary of 601"));
    CHECK(one_line_with(refused("--tokenizer " + (folder / "empty")), "there is no tokenizer.json in this folder"));
    // A tokenizer of another kind: text is refused, token shards are not.
    const std::string bpe = slurp(model + "/tokenizer.json"), shard = folder / "tokens.bin";
    spit(model + "/tokenizer.json", "{\"model\": {\"type\": \"Unigram\"}}");
    const int32_t header[256] = {20240520, 1, 2000};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    for (int i = 0; i < 2000; ++i) bytes += {static_cast<char>(i * 37 % 251), static_cast<char>(i % 2)};
    spit(shard, bytes);
    CHECK(one_line_with(refused("--init " + model), "Unigram", "token shards *.bin"));
    const Outcome shards = train_8("--steps 2 --sample 3 --out " + run + " --init " + model + " --data " + shard);
    INFO(shards.err);
    CHECK(shards.status == 0);
    CHECK_THAT(shards.out, ContainsSubstring("token ids (there is no --tokenizer to show them as text): "));
    CHECK(slurp(newest_checkpoint(run) + "/tokenizer.json") == slurp(model + "/tokenizer.json"));
    std::filesystem::remove_all(run);
    // One that cannot be seen is not taken for none: a run on shards would go on without it.
    std::filesystem::remove(model + "/tokenizer.json");
    std::filesystem::create_symlink("tokenizer.json", model + "/tokenizer.json");
    for (const std::string& data : {std::string(), " --data " + shard})
        CHECK(one_line_with(refused("--init " + model + data),
                            "cannot open " + model + "/tokenizer.json: Too many levels"));
    // Bytes for a model with a vocabulary.
    std::filesystem::remove(model + "/tokenizer.json");
    CHECK(one_line_with(refused("--init " + model), "vocabulary of 601", "--tokenizer"));
    CHECK(one_line_with(refused("--model " + model), "vocabulary of 601", "--tokenizer"));
}

TEST_CASE("an unknown model says what was looked for", "[program][pretrained]") {
    const TempFolder folder;
    std::filesystem::create_directories(folder / "empty");
    const std::string nowhere = folder / "nowhere", empty = folder / "empty";
    CHECK(one_line_with(line_of(train_8("--init " + nowhere)), "--init " + nowhere + ": there is no folder " + nowhere,
                        "config.json and *.safetensors", "not downloaded"));
    CHECK(one_line_with(line_of(train_8("--init gpt2")),
                        "--init gpt2: there is no folder gpt2 (a preset of --model has no", "not downloaded"));
    CHECK(one_line_with(line_of(train_8("--init " + empty)), "neither a config.json", "nor a checkpoint in " + empty));
    CHECK(one_line_with(line_of(train_8("--model gpt7")), "no model 'gpt7': use one of tiny, gpt2",
                        "no file gpt7, and no folder gpt7 with a config.json", "not downloaded"));
    std::filesystem::create_directories(empty + "/config.json");
    CHECK(one_line_with(line_of(train_8("--init " + empty)), "cannot read " + empty + "/config.json: it is a folder"));
}

// What Hugging Face's libraries make of checkpoints: of each family with bytes as tokens, and with the golden
// tokenizers.
TEST_CASE("transformers reads checkpoints whole: tokenizer, model, generate()", "[program][pretrained][export]") {
    if (run_python("-c 'import torch'").status != 0)
        SKIP_TEST("no Python with torch and transformers (set LLM_PYTHON)");
    // No normalizer and no rule of words may change a text: spaces, line ends, other scripts, a combining mark that
    // Unicode's form NFC would join, a byte order mark, emoji, control characters.
    const std::vector<std::string> texts = {"Hello world,  it's 3.14!\r\n\tNext\n\n", "Größe Ω日本語 नमस्ते ",
                                            "e\u0301 \u1112\u1161\u11ab", "\ufeff👩‍👩‍👧‍👦 \x01\x7f",
                                            "<|endoftext|> <|begin_of_text|>x <s></s>"};
    const TempFolder folder;
    const std::string models = "test/golden/runs/models/";
    std::vector<std::string> flags;
    for (const std::string family : {"gpt2", "llama_wide", "qwen2", "qwen3", "deepseek"})
        flags.push_back("--model " + models + family + ".json");
    json mistral = read_json("test/golden/mistral/config.json");
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) mistral.removeMember(key);
    mistral["vocab_size"] = 300;
    spit(folder / "mistral.json", dumped(mistral));
    flags.push_back("--model " + (folder / "mistral.json"));
    flags.push_back("--tokenizer " + kGpt2);  // with the preset tiny, a LLaMA
    flags.push_back("--tokenizer " + kLlama3);
    std::string folders;
    for (const std::string& these : flags) {
        const std::string run = folder / concat("run", folders.size());
        INFO(these);
        must_succeed(train_8("--steps 2 " + these + " --out " + run));
        const auto tokenizer = load_tokenizer(newest_checkpoint(run) + "/tokenizer.json");
        JsonText encodings = JsonText::array();
        for (const std::string& text : texts)
            encodings.push_back(JsonText{{"text", text}, {"ids", tokenizer->encode(text)}});
        spit(newest_checkpoint(run) + "/encodings.json", encodings.str());
        folders += newest_checkpoint(run) + " ";
    }
    const Outcome outcome = run_python("test/golden/check_folder.py " + folders);
    if (outcome.status == 77) SKIP_TEST("no Python with torch and transformers (set LLM_PYTHON)");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
    CHECK(count(outcome.out, "check_folder: ok") == flags.size());
}
