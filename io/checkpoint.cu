// io/checkpoint.cu: checkpoints that a killed run cannot break.
//
// rename() is atomic: before it the folder has its temporary name and no reader looks at it; after it everything in it
// has been fsynced. Older checkpoints are removed only when the new one is in place.
#include "io/io.h"
#include "io/list_folder.h"

#include <algorithm>
#include <filesystem>

namespace fs = std::filesystem;

namespace {

std::string checkpoints_folder(const std::string& run_folder) { return run_folder + "/checkpoints"; }

std::string step_name(int64_t step) { return format("step-%08lld", static_cast<long long>(step)); }

// A copy that somebody keeps beside them, "step-00000010-good", is no checkpoint of the run, and never removed.
bool is_step_name(const std::string& name) {
    const std::string_view prefix = "step-";
    return name.starts_with(prefix) && name.size() > prefix.size() &&
           name.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
}

int64_t count_entries(const std::string& folder) {
    std::error_code error;
    int64_t n = 0;
    for (fs::recursive_directory_iterator at(folder, error); at != fs::recursive_directory_iterator(); ++n)
        at.increment(error);
    return n;
}

// Who reads a checkpoint meanwhile finds all of it or nothing, since it has another name before its files go. It gets
// its name back only if all of them are still there: a network file system keeps those that a process has open.
std::error_code remove_checkpoint(const std::string& folder) {
    std::string renamed = folder + ".old.tmp";
    std::error_code error, ignored;
    while (fs::exists(renamed, ignored)) renamed += ".tmp";
    fs::rename(folder, renamed, error);
    if (error) return error;
    const int64_t n_before = count_entries(renamed);
    fs::remove_all(renamed, error);
    if (error && count_entries(renamed) == n_before) fs::rename(renamed, folder, ignored);
    return error;
}

// Removes what an earlier save left behind; what stays, or "".
std::string remove_leftovers(const std::string& checkpoints) {
    std::string left;
    for (const fs::path& path : list_folder(checkpoints)) {
        std::error_code error;
        if (path.extension() == ".tmp") fs::remove_all(path, error);
        if (error) left = concat("cannot remove ", path.string(), ": ", error.message());
    }
    return left;
}

// Names have eight digits, and from step 100 million on more.
bool is_earlier(const std::string& a, const std::string& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
}

}  // namespace

CheckpointWriter::CheckpointWriter(const std::string& run_folder, int64_t step)
    : run_folder_(run_folder), parent_(checkpoints_folder(run_folder)),
      temporary_(parent_ + "/" + step_name(step) + ".tmp"), final_(parent_ + "/" + step_name(step)) {
    make_folder(parent_);
    const std::string left = remove_leftovers(parent_);  // commit() tells of what is in nobody's way
    check(!is_there(temporary_), left);
    make_folder(temporary_);
}

CheckpointWriter::~CheckpointWriter() {
    std::error_code ignored;
    if (!committed_) fs::remove_all(temporary_, ignored);
}

std::string CheckpointWriter::commit(int64_t keep, int64_t best) {
    sync_folder(temporary_);
    std::error_code error;
    if (fs::exists(final_)) error = remove_checkpoint(final_);  // the run had been resumed from before it
    check(!error || !fs::exists(final_), "cannot remove ", final_, ": ", error.message());
    fs::rename(temporary_, final_, error);
    check(!error, "cannot rename ", temporary_, " to ", final_, ": ", error.message());
    committed_ = true;
    std::string left;
    try {
        sync_folder(parent_);
        left = remove_leftovers(parent_);
        int64_t n_older = 0;  // and this one
        for (const std::string& folder : find_checkpoints(run_folder_)) {
            const bool later = is_earlier(final_, folder);
            if (folder == parent_ + "/" + step_name(best)) continue;
            if (!later) ++n_older;
            if (!later && (keep == 0 || n_older <= keep)) continue;
            error = remove_checkpoint(folder);
            if (error) left = concat("cannot remove ", folder, ": ", error.message());
        }
    } catch (const std::exception& fault) {  // this one is there, and so are the older ones
        left = reason_of(fault);
    }
    return left;
}

std::vector<std::string> find_checkpoints(const std::string& run_folder) {
    const std::string folder = checkpoints_folder(run_folder);
    std::vector<std::string> found;
    std::error_code error, ignored;
    for (const fs::directory_entry& entry : folder_entries(folder, error))
        if (is_step_name(entry.path().filename().string()) && entry.is_directory(ignored))
            found.push_back(entry.path().string());
    const bool none = error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
    check(!error || none, "cannot read folder ", folder, ": ", error.message());
    std::sort(found.rbegin(), found.rend(), is_earlier);
    return found;
}

std::optional<std::string> latest_checkpoint(const std::string& run_folder) {
    const std::vector<std::string> all = find_checkpoints(run_folder);
    return all.empty() ? std::nullopt : std::optional(all.front());
}
