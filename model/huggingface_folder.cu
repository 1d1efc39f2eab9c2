// model/huggingface_folder.cu: the folder of the weights that a flag names.
#include "io/io.h"
#include "io/list_folder.h"
#include "model/model.h"

#include <filesystem>

namespace fs = std::filesystem;

std::string find_model_folder(const std::string& flag, const std::string& path) {
    if (is_there(path + "/config.json")) return path;
    if (const auto newest = latest_checkpoint(path)) return *newest;
    check(!is_folder(path), flag, " ", path, ": there is neither a config.json in this folder (as in a ",
          "Hugging Face folder or a checkpoint) nor a checkpoint in ", path, "/checkpoints (as in a run)");
    fail(flag, " ", path, ": there is no folder ", path,
         find_preset(path) ? " (a preset of --model has no weights)" : "",
         ": give the path of a Hugging Face folder (config.json and *.safetensors), or of a run; models are not ",
         "downloaded");
}

std::string find_newest_run() {
    std::string newest;
    fs::file_time_type latest = fs::file_time_type::min();
    std::error_code error, ignored;
    for (const fs::directory_entry& run : folder_entries("runs", error)) {
        std::optional<std::string> checkpoint;
        try {
            checkpoint = latest_checkpoint(run.path().string());
        } catch (const Error&) {  // somebody else's run, that may not be read
        }
        if (!checkpoint) continue;
        const fs::file_time_type time = fs::last_write_time(*checkpoint, ignored);
        if (newest.empty() || time > latest) newest = run.path().string(), latest = time;
    }
    check(!error || error == std::errc::no_such_file_or_directory, "cannot read folder runs: ", error.message());
    return newest;
}
