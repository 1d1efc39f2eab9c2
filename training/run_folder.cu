// training/run_folder.cu: the folder of a run: one process makes it, one process writes it, and the disk has room for
// what will be written.
//
// The lock is the file RUN/lock. Its text, "PID HOST", is for people and for other hosts. Whether the process runs is
// what the lock of the open file says (io/lock.h), which the system takes from a process when it ends, however it ends.
// So the process number of a lock that was left behind may belong to another process today, and nothing depends on it.
// A network file system may not pass the lock on to other hosts: one with the name of another host is therefore never
// taken over.
#include "core/host_name.h"
#include "io/list_folder.h"
#include "training/training.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <numeric>

namespace fs = std::filesystem;

namespace {

struct Holder {
    long pid = 0;  // 0: the file has no whole line, as between being made and being written, or on a full disk
    std::string host;
};
Holder read_holder(int fd) {
    char text[400] = {}, host[256] = {};
    Holder holder;
    if (::pread(fd, text, sizeof text - 1, 0) > 0 && std::strchr(text, '\n'))
        std::sscanf(text, "%ld %255s", &holder.pid, host);
    holder.host = host;
    return holder;
}

// Does another process hold this lock? A file system without locks leaves the process number.
bool is_held(const LockedFile& file, const Holder& holder) {
    if (file.lock() != LockedFile::Lock::unknown) return file.lock() == LockedFile::Lock::others;
    return holder.pid != 0 && holder.host == host_name() &&
           (::kill(static_cast<pid_t>(holder.pid), 0) == 0 || errno == EPERM);
}

[[noreturn]] void refuse(const std::string& run, const Holder& holder) {
    const std::string who = holder.pid == 0 ? "another process"
                            : holder.host == host_name()
                                ? concat("process ", holder.pid, " on this host, ", holder.host)
                                : concat("process ", holder.pid, " on host ", holder.host);
    fail(run, " is being written by ", who,
         ": wait until it has ended or stop it with Ctrl-C, or choose another --out for a new run");
}

// The folders on the way to `path` that do not exist, the outermost first.
std::vector<std::string> missing_folders(fs::path path) {
    std::vector<std::string> missing;
    std::error_code ignored;
    for (; !path.empty() && !fs::exists(path, ignored); path = path.parent_path()) missing.push_back(path.string());
    std::reverse(missing.begin(), missing.end());
    return missing;
}

// mkdir makes a folder for one process only, and says EEXIST to all others: of two runs that start together, one gets
// the number and the other the next.
std::string make_fresh_folder() {
    make_folder("runs");
    for (int i = 1;; ++i) {
        const std::string folder = concat("runs/", i);
        if (::mkdir(folder.c_str(), 0777) == 0) return folder;
        check(errno == EEXIST, "cannot make the folder ", folder, ": ", std::strerror(errno));
    }
}

}  // namespace

void check_not_written(const std::string& run) {
    const std::string path = run + "/lock";
    std::error_code ignored;
    // open() of a pipe would wait for its writer.
    check(!fs::is_fifo(path, ignored), "the lock ", path, " is not a regular file, but a pipe: remove it");
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    // All ranks ask at once: a shared lock is refused by the writer's, and by none of theirs.
    const bool is_held = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    const Holder holder = read_holder(fd);
    ::close(fd);
    if (is_held) refuse(run, holder);
}

std::string lock_text(const std::string& run) {
    // A network file system may answer from what it knew earlier, until the folder itself is opened.
    const std::vector<fs::path> entries = fs::is_directory(run) ? list_folder(run) : std::vector<fs::path>();
    const bool found =
        std::any_of(entries.begin(), entries.end(), [](const fs::path& path) { return path.filename() == "lock"; });
    return found ? read_regular_file(run + "/lock") : "";
}

RunFolder::MadeFolders::~MadeFolders() {
    for (auto path = paths.rbegin(); path != paths.rend(); ++path) ::rmdir(path->c_str());  // only what is empty goes
}

RunFolder::Lock::Lock(const std::string& run) : file(run + "/lock", O_RDWR) {
    const std::string& path = file.path();
    const Holder holder = read_holder(file.fd());
    if (is_held(file, holder)) refuse(run, holder);
    check(holder.pid == 0 || holder.host == host_name(), path, " says that process ", holder.pid, " on host ",
          holder.host, " is writing this run, and from ", host_name(),
          " it cannot be seen whether it still runs: if it has ended, delete ", path, " and try again");
    if (holder.pid != 0)
        std::printf("lock     taken over from process %ld of this host, which has ended without removing %s\n",
                    holder.pid, path.c_str());
    const std::string text = concat(::getpid(), " ", host_name(), "\n");
    try {
        const int status = ::ftruncate(file.fd(), 0);
        check(status == 0, "cannot write ", path, ": ", std::strerror(errno));
        write_all(file.fd(), text.data(), text.size(), path);
    } catch (const Error&) {  // a full disk: leave no empty file behind, nor a folder for its sake
        file.remove();
        throw;
    }
}

RunFolder::Lock::~Lock() { file.remove(); }

RunFolder::RunFolder(const std::string& path) {
    if (path.empty()) {
        path_ = make_fresh_folder();
        made_.paths = {path_};
    } else {
        made_.paths = missing_folders(path);
        path_ = path;
        make_folder(path);
    }
    lock_.emplace(path_);
}

// ---------------------------------------------------------------------------------------------------------------------
// Room on the disk

namespace {

// The bytes of one checkpoint. Collective: with ZeRO each rank has a part of the optimizer's states.
double checkpoint_bytes(const Trainer& t) {
    int64_t bytes = 0;
    for (const auto& row : gather_numbers(t.world, {saved_state_bytes(t)})) bytes += row[0];
    for (const auto& [name, text] : t.model_files.files) bytes += static_cast<int64_t>(text.size());
    return static_cast<double>(bytes) + 4.0 * static_cast<double>(parameter_count(t.config));  // float32
}

// How many steps of (first, last] are multiples of `every`, or the last one.
int64_t saves_between(int64_t first, int64_t last, int64_t every) {
    if (first >= last) return 0;
    if (every == 0) return 1;
    return last / every - first / every + (last % every != 0);
}

// The least common multiple; 0 where it is beyond `last`.
int64_t common_multiple(int64_t a, int64_t b, int64_t last) {
    if (b == 0) return 0;
    const int64_t part = a / std::gcd(a, b);
    return part > last / b ? 0 : part * b;
}

// How many more checkpoints than now will lie in the folder at once. A new one is written before an old one goes.
int64_t checkpoints_to_come(const TrainOptions& o) {
    const int64_t last = o.last_step();
    const int64_t saves = saves_between(o.resumed_step, last, o.save_every), best = o.keep_best ? 1 : 0;
    const int64_t have = o.resume ? static_cast<int64_t>(find_checkpoints(o.out).size()) : 0;
    if (o.keep == 0 && !o.keep_best) return saves;
    if (o.keep == 0)
        return saves + saves_between(o.resumed_step, last, o.val_every) -
               saves_between(o.resumed_step, last, common_multiple(o.save_every, o.val_every, last));
    if (saves == 0) return 0;
    // keep may be as large as an int64 can be.
    return std::max<int64_t>(1, std::min(saves - 1, o.keep - have) + 1 + best);
}

}  // namespace

void check_disk_space(const Trainer& t) {
    const TrainOptions& o = t.options;
    const double one = checkpoint_bytes(t);
    if (t.world.rank != 0) return;
    const int64_t n = checkpoints_to_come(o);
    constexpr double row_bytes = 500, other_bytes = 1 << 20;  // a step in log.csv and the events; plot, JSON files
    const double wanted =
        one * static_cast<double>(n) + row_bytes * static_cast<double>(o.last_step() - o.resumed_step) + other_bytes;
    fs::path existing = fs::absolute(o.out.empty() ? "runs" : o.out);
    std::error_code ignored;
    while (!fs::exists(existing, ignored) && existing != existing.parent_path()) existing = existing.parent_path();
    struct statvfs disk;
    // Some file systems do not know their size, and say 0.
    if (::statvfs(existing.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
    const double free_bytes = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
    TrainOptions least = o;
    least.keep = 1;
    check(wanted <= free_bytes, "the disk of ", existing.string(), " has ", human_bytes(free_bytes),
          " free, and this run needs ", human_bytes(wanted), ": ", n, n == 1 ? " checkpoint" : " checkpoints at once",
          " of ", human_bytes(one), " each, and its logs: free some space, or choose an --out on another disk",
          checkpoints_to_come(least) < n ? ", or keep fewer with --keep 1" : "");
}
