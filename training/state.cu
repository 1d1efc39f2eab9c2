// training/state.cu: state.json, what a checkpoint says of its run beside the tensors,
// and which checkpoint a run resumes from.
//
// A disk or a copy can break a checkpoint long after it was written. Every tensor has a checksum (io/checksum.cu), and
// so have state.json and config.json; and state.json has one for all tensors of each file, so that a file of another
// step, which is whole, is found as well. Before a run resumes, all of them are compared: a broken checkpoint is named,
// and the newest whole one before it takes its place. One that cannot be read now is not broken: it ends the program.
#include "io/json.h"
#include "io/list_folder.h"
#include "training/training.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace {

std::string state_path(const std::string& checkpoint) { return checkpoint + "/state.json"; }

template <class T>
T required(const Json::Value& object, const char* key) {
    T value{};
    check(read_value(member(object, key), value), "\"", key, "\" is missing, or is not what it should be");
    return value;
}

JsonText to_json(const DataIdentity& data) {
    return {{"train_tokens", data.train_n},
            {"train_checksum", checksum_text(data.train_checksum)},
            {"val_tokens", data.val_n},
            {"val_checksum", checksum_text(data.val_checksum)}};
}
DataIdentity identity_from_json(const Json::Value& data) {
    const auto number = [&](const char* key) { return std::stoull(required<std::string>(data, key), nullptr, 16); };
    return {required<int64_t>(data, "train_tokens"), required<int64_t>(data, "val_tokens"), number("train_checksum"),
            number("val_checksum")};
}

JsonText to_json(const Schedule& s) {
    return {
        {"name", s.name},        {"peak", s.peak},   {"min_ratio", s.min_ratio}, {"decay_fraction", s.decay_fraction},
        {"warmup", s.warmup},    {"steps", s.steps}, {"from", s.from},           {"until", s.until},
        {"position", s.position}};
}
Schedule schedule_from_json(const Json::Value& s) {
    return {.name = required<std::string>(s, "name"),
            .peak = required<double>(s, "peak"),
            .min_ratio = required<double>(s, "min_ratio"),
            .decay_fraction = required<double>(s, "decay_fraction"),
            .warmup = required<int64_t>(s, "warmup"),
            .steps = required<int64_t>(s, "steps"),
            .from = required<int64_t>(s, "from"),
            .until = required<int64_t>(s, "until"),
            .position = required<double>(s, "position")};
}

// Of all members but itself, as JsonCpp orders them.
std::string checksum_of(Json::Value state) {
    state.removeMember("checksum");
    const std::string text = JsonText(state).str();
    return checksum_text(checksum(text.data(), text.size()));
}
std::string checksum_of_config(const std::string& checkpoint) {
    const std::string text = read_regular_file(checkpoint + "/config.json");
    return checksum_text(checksum(text.data(), text.size()));
}

// "optimizer-00002-of-00008.safetensors" needs seven other files beside it.
void check_count(const std::string& folder, const std::string& file) {
    const size_t at = file.find("-of-");
    if (at == std::string::npos) return;
    const int n = std::atoi(file.c_str() + at + 4);
    for (int i = 1; i <= n; ++i) {
        const std::string other = file.substr(0, at - 5) + format("%05d", i) + file.substr(at);
        check(std::filesystem::exists(folder + "/" + other), folder, "/", other, " is missing");
    }
}

// Of the names, types and checksums of a file's tensors; "" if it has none, because others have written it anew.
std::string checksum_of_tensors(const SafetensorsReader& file) {
    std::string text;
    for (const auto& [name, tensor] : file.tensors()) {
        if (!tensor.checksum) return "";
        text += concat(name, ' ', tensor.dtype, ' ', checksum_text(*tensor.checksum), '\n');
    }
    return checksum_text(checksum(text.data(), text.size()));
}

// Calls visit(name, path) for each file with tensors.
template <class Visit>
void for_each_tensor_file(const std::string& folder, Visit&& visit) {
    for (const std::filesystem::path& path : list_folder(folder))
        if (path.extension() == ".safetensors") visit(path.filename().string(), path.string());
}
JsonText checksums_of_files(const std::string& folder) {
    JsonText files = JsonText::object();
    for_each_tensor_file(folder, [&](const std::string& file, const std::string& path) {
        files.set(file, checksum_of_tensors(SafetensorsReader(path)));
    });
    return files;
}

// Says what is going to be read, where that takes seconds.
void announce_reading(const std::string& folder) {
    double bytes = 0;
    for_each_tensor_file(folder, [&](const std::string&, const std::string& path) {
        std::error_code error;
        const auto its_bytes = static_cast<double>(std::filesystem::file_size(path, error));
        if (!error) bytes += its_bytes;
    });
    if (bytes < 0x1p30) return;
    std::printf("resume   reads %s of %s, to compare their checksums\n", human_bytes(bytes).c_str(), folder.c_str());
    std::fflush(stdout);
}

// Error for what is wrong with the files that a run reads before it has a model.
void check_texts(const std::string& folder) {
    read_state(folder);
    check(is_there(folder + "/config.json"), folder, " holds no config.json");
    load_config(folder);
    const Json::Value state = read_json_file(state_path(folder));
    if (has(state, "config_checksum"))
        check(required<std::string>(state, "config_checksum") == checksum_of_config(folder), folder,
              "/config.json has changed since it was written: its checksum is different");
    for (const std::filesystem::path& path : list_folder(folder))
        if (path.extension() == ".json") read_json_file(path.string());  // tokenizer.json
}

// The same for all files, byte by byte.
void check_whole(const std::string& folder) {
    check_texts(folder);
    announce_reading(folder);
    const Json::Value state = read_json_file(state_path(folder)), &files = member(state, "files");
    bool has_weights = false, has_states = false;
    for_each_tensor_file(folder, [&](const std::string& file, const std::string& path) {
        has_weights |= file.starts_with("model"), has_states |= file.starts_with("optimizer");
        check_count(folder, file);
        const SafetensorsReader tensors(path);
        tensors.verify();
        const std::string found = checksum_of_tensors(tensors);
        check(!has(files, file) || found.empty() || required<std::string>(files, file.c_str()) == found, path,
              " was not saved together with the state.json beside it: one of them is of another step or run");
    });
    check(has_weights && has_states, folder, " holds no ", has_weights ? "optimizer" : "model", ".safetensors");
    for (const std::string& file : files.isObject() ? files.getMemberNames() : std::vector<std::string>())
        check(is_there(folder + "/" + file), folder, "/", file, " is missing");
}

// Error where a file that is there cannot be read: the disk has failed, the process has too many files open or may not
// read it, the host has no memory left. The checkpoint may be whole then.
void check_readable(const std::string& folder) {
    std::error_code ignored;
    for (const std::filesystem::path& path : list_folder(folder)) {
        if (!std::filesystem::is_regular_file(path, ignored)) continue;
        if (path.extension() == ".json") read_text_file(path.string());
        if (path.extension() == ".safetensors") MappedFile(path.string());
    }
}

// What check_it finds wrong with a checkpoint; "" if it is nothing.
std::string fault_of(const std::string& folder, void (*check_it)(const std::string& folder)) {
    check_readable(folder);
    try {
        check_it(folder);
        return "";
    } catch (const std::bad_alloc&) {
        throw;
    } catch (const std::exception& error) {
        return reason_of(error);
    }
}

}  // namespace

void write_state(const std::string& folder, const RunState& s) {
    JsonText options = JsonText::object();
    for (const auto& [flag, value] : s.options) options.set(flag, value);
    JsonText state = {
        {"step", s.step},
        {"updates", s.updates},
        {"sequences", s.sequences},
        {"tokens", s.tokens},
        {"loss_scale", {{"scale", s.loss_scale}, {"good_steps", s.good_steps}, {"overflows", s.overflows}}},
        {"data", to_json(s.data.value())},
        {"schedule", to_json(s.schedule.value())},
        {"config_checksum", checksum_of_config(folder)},
        {"files", checksums_of_files(folder)},  // checkpoints of earlier versions have none
        {"options", options}};
    if (s.best) state.set("best", {{"step", s.best->step}, {"val_loss", s.best->val_loss}});
    state.set("checksum", checksum_of(parse_json(state.str(), state_path(folder))));
    write_text_file(state_path(folder), state.indented(2) + "\n");
}

RunState read_state(const std::string& folder) {
    const std::string path = state_path(folder);
    const Json::Value state = read_json_file(path);
    try {
        check(state.isObject(), "it is not a JSON object");
        // Checkpoints of earlier versions have none.
        if (has(state, "checksum"))
            check(required<std::string>(state, "checksum") == checksum_of(state),
                  "it has changed since it was written: its checksum is different");
        const Json::Value& scale = member(state, "loss_scale");
        RunState s;
        s.step = required<int64_t>(state, "step");
        s.updates = required<int64_t>(state, "updates");
        for (const auto& [key, n] : {std::pair("step", s.step), {"updates", s.updates}})
            check(n >= 0 && n <= int64_t{1} << 60, "\"", key, "\" is ", n, ", expected 0 to 2^60");
        // They may also lack these two, and data and schedule below.
        if (has(state, "sequences")) s.sequences = required<int64_t>(state, "sequences");
        if (has(state, "tokens")) s.tokens = required<int64_t>(state, "tokens");
        s.loss_scale = required<double>(scale, "scale");
        s.good_steps = required<int64_t>(scale, "good_steps");
        s.overflows = required<int64_t>(scale, "overflows");
        if (has(state, "data")) s.data = identity_from_json(member(state, "data"));
        if (has(state, "schedule")) s.schedule = schedule_from_json(member(state, "schedule"));
        if (const Json::Value& best = member(state, "best"); !best.isNull())
            s.best = {required<int64_t>(best, "step"), required<double>(best, "val_loss")};
        const Json::Value& options = member(state, "options");
        check(options.isObject(), "\"options\" is missing");
        for (auto option = options.begin(); option != options.end(); ++option)
            s.options[option.name()] = required<std::string>(options, option.name().c_str());
        check(s.options.contains("--steps"), "\"options\" has no \"--steps\"");
        return s;
    } catch (const Error& error) {
        fail(path, " is not a training state: ", error.what());
    } catch (const std::logic_error&) {  // std::stoull
        fail(path, " is not a training state: a checksum is not a hexadecimal number");
    }
}

ResumedSchedule resumed_schedule(const TrainOptions& o, const RunState& saved) {
    const auto with_warmup = [](Schedule s) {
        if (s.warmup == -1) s.warmup = s.steps / 20;
        return s;
    };
    // Checkpoints of earlier versions have only the flags.
    Schedule old = o.typed_schedule;
    old.steps = parse_whole_number("--steps", saved.options.at("--steps"), INT64_MAX);
    old = saved.schedule.value_or(with_warmup(old));
    const int64_t step = saved.step, was = old.last_step();
    if (o.steps == was && !o.new_schedule && o.typed_schedule.name == old.name) return {old, ""};
    check(o.steps > step, "--steps ", o.steps, ": the run in ", o.out, " has made ", step,
          " steps: give more of them, or leave the flag out");
    if (o.new_schedule || o.typed_schedule.name != old.name) {
        Schedule next = begin_schedule(o.typed_schedule, step, o.steps);
        next = with_warmup(next);
        return {next, concat("schedule a new one begins: ", next.name, " over steps ", step + 1, " to ", o.steps,
                             ", of which ", next.warmup, " warm up, with a highest learning rate of ", next.peak)};
    }
    const Schedule next = continue_schedule(old, step, o.steps);
    std::string change = concat("schedule ", old.name, " to step ", o.steps, " instead of ", was, ": ");
    const double before = learning_rate(old, step), after = learning_rate(next, step + 1);
    if (old.name == "wsd") change += concat("its decay comes in the last ", next.decay_fraction, " of all steps");
    else if (!is_stretched(old.name)) change += "it goes on";
    else if (step >= was)
        change += "it had come to its end, and the learning rate stays there; for another one give --schedule too";
    else change += concat("what was left of it is stretched over steps ", step + 1, " to ", o.steps);
    return {next,
            concat(change, " (learning rate ", before, " in step ", step, ", ", after, " in step ", step + 1, ")")};
}

// fault: what is wrong with the newest one.
[[noreturn]] static void fail_without_checkpoint(const std::string& fault, const std::string& run) {
    fail(fault, "; no checkpoint in ", run,
         "/checkpoints can be used: repair what this line names, or start again with another --out");
}

std::string readable_checkpoint(const std::string& run) {
    const std::vector<std::string> checkpoints = find_checkpoints(run);
    check(!checkpoints.empty(), "--resume: there is no checkpoint in ", run,
          "/checkpoints: --out is the folder of a run that has saved one, as in --out runs/1 --resume");
    std::string first_fault;
    for (const std::string& folder : checkpoints) {
        const std::string fault = fault_of(folder, check_texts);
        if (fault.empty()) return folder;
        if (first_fault.empty()) first_fault = fault;
    }
    fail_without_checkpoint(first_fault, run);
}

std::string whole_checkpoint(Comm& world, const std::string& run) {
    if (world.rank != 0) return broadcast_text(world, "");
    std::string fault;  // of the newest
    for (const std::string& folder : find_checkpoints(run)) {
        const std::string its_fault = fault_of(folder, check_whole);
        if (!its_fault.empty()) {
            if (fault.empty()) fault = its_fault;
            continue;
        }
        if (!fault.empty())
            std::fprintf(stderr, "train_gpt: %s. Resuming from %s, the newest checkpoint that is whole\n",
                         fault.c_str(), folder.c_str());
        return world.size > 1 ? broadcast_text(world, folder) : folder;
    }
    fail_without_checkpoint(fault, run);
}
