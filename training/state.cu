// training/state.cu: state.json, what a checkpoint says of its run beside the tensors,
// and which checkpoint a run resumes from.
//
// A disk or a copy can break a checkpoint long after it was written. Every tensor has a checksum (io/checksum.cu), and
// before a run resumes, all of them are compared: a broken checkpoint is named,
// and the newest whole one before it takes its place.
#include "training/training.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>

namespace {

std::string state_path(const std::string& checkpoint) { return checkpoint + "/state.json"; }

nlohmann::ordered_json to_json(const DataIdentity& data) {
    return {{"train_tokens", data.train_n},
            {"train_checksum", checksum_text(data.train_checksum)},
            {"val_tokens", data.val_n},
            {"val_checksum", checksum_text(data.val_checksum)}};
}
DataIdentity identity_from_json(const nlohmann::json& data) {
    const auto number = [&](const char* key) { return std::stoull(data.at(key).get<std::string>(), nullptr, 16); };
    return {data.at("train_tokens").get<int64_t>(), data.at("val_tokens").get<int64_t>(), number("train_checksum"),
            number("val_checksum")};
}

nlohmann::ordered_json to_json(const Schedule& s) {
    return {
        {"name", s.name},        {"peak", s.peak},   {"min_ratio", s.min_ratio}, {"decay_fraction", s.decay_fraction},
        {"warmup", s.warmup},    {"steps", s.steps}, {"from", s.from},           {"until", s.until},
        {"position", s.position}};
}
Schedule schedule_from_json(const nlohmann::json& s) {
    return {.name = s.at("name").get<std::string>(),
            .peak = s.at("peak").get<double>(),
            .min_ratio = s.at("min_ratio").get<double>(),
            .decay_fraction = s.at("decay_fraction").get<double>(),
            .warmup = s.at("warmup").get<int64_t>(),
            .steps = s.at("steps").get<int64_t>(),
            .from = s.at("from").get<int64_t>(),
            .until = s.at("until").get<int64_t>(),
            .position = s.at("position").get<double>()};
}

// "optimizer-00002-of-00008.safetensors" needs seven other files beside it.
void check_count(const std::string& folder, const std::string& file) {
    const size_t at = file.find("-of-");
    if (at == std::string::npos) return;
    const int n = std::atoi(file.c_str() + at + 4);
    for (int i = 1; i <= n; ++i) {
        char other[128];
        std::snprintf(other, sizeof other, "%s%05d%s", file.substr(0, at - 5).c_str(), i, file.substr(at).c_str());
        check(std::filesystem::exists(folder + "/" + other), folder, "/", other, " is missing");
    }
}

// What is wrong with a checkpoint; "" if it is whole.
std::string fault_of(const std::string& folder) {
    try {
        read_state(folder);
        load_config(folder);
        for (const auto& entry : std::filesystem::directory_iterator(folder)) {
            if (entry.path().extension() != ".safetensors") continue;
            check_count(folder, entry.path().filename().string());
            SafetensorsReader(entry.path().string()).verify();
        }
        return "";
    } catch (const std::exception& error) {
        return error.what();
    }
}

}  // namespace

void write_state(const std::string& folder, const RunState& s) {
    nlohmann::ordered_json state = {
        {"step", s.step},
        {"updates", s.updates},
        {"sequences", s.sequences},
        {"tokens", s.tokens},
        {"loss_scale", {{"scale", s.loss_scale}, {"good_steps", s.good_steps}, {"overflows", s.overflows}}},
        {"data", to_json(s.data.value())},
        {"schedule", to_json(s.schedule.value())},
        {"options", s.options}};
    if (s.best) state["best"] = {{"step", s.best->step}, {"val_loss", s.best->val_loss}};
    write_text_file(state_path(folder), state.dump(2) + "\n");
}

RunState read_state(const std::string& folder) {
    const std::string path = state_path(folder);
    try {
        const nlohmann::json state = nlohmann::json::parse(read_text_file(path));
        const nlohmann::json& scale = state.at("loss_scale");
        RunState s;
        s.step = state.at("step").get<int64_t>();
        s.updates = state.at("updates").get<int64_t>();
        s.sequences = state.value("sequences", int64_t{0});
        s.tokens = state.value("tokens", int64_t{0});
        s.loss_scale = scale.at("scale").get<double>();
        s.good_steps = scale.at("good_steps").get<int64_t>();
        s.overflows = scale.at("overflows").get<int64_t>();
        // Checkpoints of earlier versions do not say it.
        if (state.contains("data")) s.data = identity_from_json(state.at("data"));
        if (state.contains("schedule")) s.schedule = schedule_from_json(state.at("schedule"));
        if (state.contains("best"))
            s.best = {state.at("best").at("step").get<int64_t>(), state.at("best").at("val_loss").get<double>()};
        s.options = state.at("options").get<std::map<std::string, std::string>>();
        return s;
    } catch (const nlohmann::json::exception& error) {
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
    old.steps = std::stoll(saved.options.at("--steps"));
    old = saved.schedule.value_or(with_warmup(old));
    const int64_t step = saved.step, was = old.last_step();
    if (o.steps == was && !o.new_schedule && o.typed_schedule.name == old.name) return {old, ""};
    check(o.steps > step, "--steps ", o.steps, ": the run in ", o.out, " has made ", step,
          " steps: give more of them, or leave the flag away");
    if (o.new_schedule || o.typed_schedule.name != old.name) {
        Schedule next = begin_schedule(o.typed_schedule, step, o.steps);
        next = with_warmup(next);
        return {next, concat("schedule a new one begins: ", next.name, " over steps ", step + 1, " to ", o.steps,
                             ", of which ", next.warmup, " warm up, with a highest learning rate of ", next.peak)};
    }
    const Schedule next = continue_schedule(old, step, o.steps);
    std::string change = concat("schedule ", old.name, " to step ", o.steps, " instead of ", was, ": ");
    const double before = learning_rate(old, step), after = learning_rate(next, step + 1);
    if (old.name == "constant") change += "it goes on";
    else if (old.name == "wsd") change += concat("its decay comes in the last ", next.decay_fraction, " of all steps");
    else if (step >= was)
        change += "it had come to its end, and the learning rate stays there; for another one give --schedule too";
    else change += concat("what was left of it is stretched over steps ", step + 1, " to ", o.steps);
    return {next,
            concat(change, " (learning rate ", before, " in step ", step, ", ", after, " in step ", step + 1, ")")};
}

std::string readable_checkpoint(const std::string& run) {
    const std::vector<std::string> checkpoints = find_checkpoints(run);
    check(!checkpoints.empty(), "--resume: there is no checkpoint in ", run,
          "/checkpoints: --out is the folder of a run that has saved one, as in --out runs/1 --resume");
    std::string first_error;
    for (const std::string& folder : checkpoints) {
        try {
            read_state(folder);
            load_config(folder);
            return folder;
        } catch (const Error& error) {
            if (first_error.empty()) first_error = error.what();
        }
    }
    fail(first_error);
}

std::string whole_checkpoint(Comm& world, const std::string& run) {
    if (world.rank != 0) return broadcast_text(world, "");
    std::string fault;  // of the newest
    for (const std::string& folder : find_checkpoints(run)) {
        const std::string its_fault = fault_of(folder);
        if (!its_fault.empty()) {
            if (fault.empty()) fault = its_fault;
            continue;
        }
        if (!fault.empty())
            std::fprintf(stderr, "train_gpt: %s. Resuming from %s, the newest checkpoint that is whole\n",
                         fault.c_str(), folder.c_str());
        return world.size > 1 ? broadcast_text(world, folder) : folder;
    }
    fail(fault, "; no checkpoint in ", run, "/checkpoints is whole: start the run again with another --out");
}
