// test/test_train_gpt_runs.cu: runs that are lengthened, moved, watched and interrupted; the one writer of a folder.
#include "io/lock.h"
#include "optim/optim.h"
#include "run_models.h"
#include "train_runs.h"
#include "training/training.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <tuple>

namespace {

Outcome resume(const std::string& run, const std::string& arguments = "") {
    return run_program("train_gpt", "--resume --out " + run + " " + arguments);
}

std::string host() {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    return name;
}

// A run for with_background.
std::string command(const std::string& arguments) {
    return concat("exec ", program_path("train_gpt"), kUntimed, " --data ", text_file(), kSmall, arguments);
}

std::atomic<int> next_flock_error = 0;

}  // namespace

// In the place of the C library's.
extern "C" int flock(int fd, int operation) noexcept {
    if (const int error = next_flock_error.exchange(0)) return errno = error, -1;
    return static_cast<int>(::syscall(SYS_flock, fd, operation));
}

// ---------------------------------------------------------------------------------------------------------------------
// Longer and moved runs

TEST_CASE("what is left of a cosine is stretched, and a new schedule can begin", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--out " + run + " --stop-after 10").status == 0);
    const Outcome longer = resume(run, "--steps 30 --stop-after 20");
    INFO(longer.err);
    REQUIRE(longer.status == 0);
    CHECK_THAT(longer.out, ContainsSubstring("schedule cosine to step 30 instead of 20: what was left of it is "
                                             "stretched over steps 11 to 30"));
    REQUIRE(resume(run).status == 0);  // the checkpoint knows it
    Schedule schedule{.peak = 3e-3, .warmup = 2, .steps = 20};
    const Schedule stretched = continue_schedule(schedule, 10, 30);
    std::vector<LogRow> rows = read_csv_log(run + "/log.csv");
    REQUIRE(rows.size() == 30);
    for (const LogRow& row : rows) {
        INFO(row.step);
        CHECK(*row.lr == Approx(learning_rate(row.step <= 10 ? schedule : stretched, row.step)).epsilon(1e-7));
    }
    std::filesystem::remove(run + "/loss.png");  // as where a run is killed behind its last save
    CHECK_THAT(resume(run).out, ContainsSubstring("resumed after step 30, the last"));
    CHECK(std::filesystem::exists(run + "/loss.png"));
    // Its end is reached: more steps stay at the last rate, unless a schedule is given.
    const std::string other = folder / "other";
    std::filesystem::copy(run, other, std::filesystem::copy_options::recursive);
    CHECK_THAT(resume(run, "--steps 32").out, ContainsSubstring("it had come to its end"));
    CHECK(*read_csv_log(run + "/log.csv").back().lr == Approx(3e-4).epsilon(1e-7));
    const Outcome anew = resume(other, "--steps 40 --schedule linear --lr 2e-3 --warmup 5");
    CHECK_THAT(anew.out, ContainsSubstring("a new one begins: linear over steps 31 to 40, of which 5 warm up"));
    rows = read_csv_log(other + "/log.csv");
    REQUIRE(rows.size() == 40);
    CHECK(*rows[34].lr == Approx(2e-3).epsilon(1e-7));
    CHECK(*rows[39].lr == Approx(2e-4).epsilon(1e-7));
}

TEST_CASE("a state is read as it was written", "[train_gpt]") {
    const TempFolder folder;
    spit(folder / "config.json", "{}");
    const RunState written{.step = 1,
                           .updates = 2,
                           .sequences = 3,
                           .tokens = 4,
                           .loss_scale = 0.1,
                           .good_steps = 5,
                           .overflows = 6,
                           .data = DataIdentity{7, 8, 9, 0xfedcba9876543210},
                           .schedule = Schedule{"wsd", 0.3, 0.4, 0.5, 10, 11, 12, 13, 0.6},
                           .best = BestStep{14, 0.7},
                           .options = {{"--steps", "11"}}};
    write_state(folder.path, written);
    const RunState read = read_state(folder.path);
    const auto numbers = [](const RunState& s) {
        return std::tuple(s.step, s.updates, s.sequences, s.tokens, s.loss_scale, s.good_steps, s.overflows);
    };
    CHECK(numbers(read) == numbers(written));
    const auto of_data = [](const DataIdentity& d) {
        return std::tuple(d.train_n, d.val_n, d.train_checksum, d.val_checksum);
    };
    CHECK(of_data(read.data.value()) == of_data(*written.data));
    const auto of_schedule = [](const Schedule& s) {
        return std::tuple(s.name, s.peak, s.min_ratio, s.decay_fraction, s.warmup, s.steps, s.from, s.until,
                          s.position);
    };
    CHECK(of_schedule(read.schedule.value()) == of_schedule(*written.schedule));
    CHECK(read.best.value().step == 14);
    CHECK(read.best->val_loss == 0.7);
    CHECK(read.options == written.options);
}

TEST_CASE("of several checkpoints that cannot be read the newest is named", "[train_gpt]") {
    const TempFolder folder;
    for (const std::string step : {"1", "2"}) {
        std::filesystem::create_directories(folder / ("checkpoints/step-0000000" + step));
        spit(folder / ("checkpoints/step-0000000" + step + "/state.json"), "{");
    }
    CHECK_THAT(
        error_of([&] { readable_checkpoint(folder.path); }),
        ContainsSubstring("step-00000002/state.json") && ContainsSubstring("can be used: repair what this line"));
}

TEST_CASE("a checkpoint that cannot be read now is not taken for a broken one", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", kept = folder / "tokenizer.json";
    REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
    const std::string newest = newest_checkpoint(run), path = newest + "/tokenizer.json";
    std::filesystem::rename(path, kept);
    std::filesystem::create_symlink("/proc/self/mem", path);  // a regular file, and reading its first byte fails
    const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
    CHECK(outcome.status == 2);
    CHECK(line_of(outcome) == "train_gpt: cannot read " + path + ": Input/output error");
    std::filesystem::rename(kept, path);
    // Nor where a file cannot be mapped, here for lack of addresses.
    const std::string optimizer = newest + "/optimizer.safetensors";
    const auto bytes = std::filesystem::file_size(optimizer);
    std::filesystem::resize_file(optimizer, uint64_t{1} << 38);
    const Outcome unmapped = run_program("train_gpt", "--resume --out " + run, "ulimit -S -v 100000000; exec");
    CHECK(unmapped.status == 2);
    CHECK(one_line_with(line_of(unmapped), "cannot map " + optimizer, "Cannot allocate memory"));
    std::filesystem::resize_file(optimizer, bytes);
    CHECK_THAT(must_succeed(run_program("train_gpt", "--resume --out " + run)),
               ContainsSubstring("resumed after step 4"));
}

TEST_CASE("a checkpoint of an earlier version has the schedule that its flags say", "[train_gpt]") {
    TrainOptions o;
    o.typed_schedule = {.peak = 3e-3, .warmup = -1};
    o.steps = 40;
    RunState saved;
    saved.step = 10, saved.options["--steps"] = "40";
    const ResumedSchedule resumed = resumed_schedule(o, saved);
    CHECK(resumed.change == "");
    CHECK(resumed.schedule.steps == 40);
    CHECK(resumed.schedule.warmup == 2);  // a twentieth
}

TEST_CASE("a longer run is told what becomes of its schedule, whatever the schedule", "[train_gpt][schedule]") {
    for (const std::string& name : schedule_names())
        for (const int64_t step : {20, 40}) {
            Schedule whole{.name = name, .warmup = 4, .steps = 40};
            RunState saved;
            saved.step = step, saved.schedule = whole, saved.options["--steps"] = "40";
            TrainOptions o;
            o.typed_schedule = whole;
            o.steps = 60;
            const double before = learning_rate(whole, step);
            const auto [schedule, change] = resumed_schedule(o, saved);
            whole.steps = 60;
            bool goes_on = true;  // as if the run had begun with 60 steps
            for (int64_t s = step + 1; s <= 60; ++s)
                goes_on = goes_on && learning_rate(schedule, s) == learning_rate(whole, s);
            INFO(change);
            const char* says = goes_on      ? name == "wsd" ? "its decay comes in the last 0.2 of" : "it goes on"
                               : step == 40 ? "it had come to its end, and the learning rate stays"
                                            : "what was left of it is stretched over steps 21 to 60";
            CHECK_THAT(change, ContainsSubstring(concat("schedule ", name, " to step 60 instead of 40: ", says)));
            CHECK_THAT(change,
                       ContainsSubstring(concat(" (learning rate ", before, " in step ", step, ", ",
                                                learning_rate(schedule, step + 1), " in step ", step + 1, ")")));
        }
}

TEST_CASE("what a resumed run cannot be given is refused", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--out " + run + " --stop-after 10").status == 0);
    const std::string log = slurp(run + "/log.csv");
    for (const auto& [flags, says] :
         std::vector<std::pair<std::string, std::string>>{{"--stop-after 10", "is at step 10 already"},
                                                          {"--stop-after 3", "is at step 10 already"},
                                                          {"--steps 5", "is at step 10 already"},
                                                          {"--steps 10", "has made 10 steps"},
                                                          {"--steps 30 --lr 1e-3", "give a new --schedule"},
                                                          {"--schedule linear", "--schedule linear differs"}}) {
        const Outcome outcome = resume(run, flags);
        INFO(flags << ": " << outcome.err);
        CHECK(one_line_with(line_of(outcome), says));
    }
    CHECK(slurp(run + "/log.csv") == log);
    CHECK_FALSE(std::filesystem::exists(run + "/lock"));
}

// ---------------------------------------------------------------------------------------------------------------------
// One writer

TEST_CASE("a folder has one writer, and a lock that was left behind is taken over", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    // While a run lives, neither --resume nor a new run may write there. Then it is killed.
    const Outcome live =
        with_background(folder, command("--steps 1000000 --save-every 1 --out " + run),
                        concat("await 'step       2/' out; timeout 20 ", program_path("train_gpt"), " --resume --out ",
                               run, "; echo status $?; timeout 20 ", program_path("train_gpt"), " --data ", text_file(),
                               " --out ", run, "; echo status $?; kill -KILL $pid; wait $pid; echo pid $pid"));
    INFO(live.out << live.err);
    CHECK_THAT(live.out, ContainsSubstring("status 2\nstatus 2\n"));
    const std::string pid = live.out.substr(live.out.find("pid ") + 4, live.out.size() - live.out.find("pid ") - 5);
    const std::string says = concat(run, " is being written by process ", pid, " on this host, ", host(), ":");
    const size_t first = live.err.find(says);
    REQUIRE(first != std::string::npos);
    CHECK(live.err.find(says, first + 1) != std::string::npos);
    REQUIRE(std::filesystem::exists(run + "/lock"));
    const int64_t step = std::stoll(newest_checkpoint(run).substr(newest_checkpoint(run).rfind('-') + 1));
    const Outcome taken = resume(run, concat("--stop-after ", step + 1));
    INFO(taken.err);
    CHECK(taken.status == 0);
    CHECK_THAT(taken.out, ContainsSubstring(concat("lock     taken over from process ", pid, " of this host")));
    CHECK_FALSE(std::filesystem::exists(run + "/lock"));
    // Its checkpoints come and go: they are not read, but for a plan, before it is known that nobody writes.
    {
        const LockedFile writer(run + "/lock", O_RDWR);
        CHECK(resume(run, "--plan").status == 0);
        std::filesystem::rename(run + "/checkpoints", run + "/moved");
        CHECK(one_line_with(line_of(resume(run)), "is being written by another process: wait until it has ended"));
        std::filesystem::rename(run + "/moved", run + "/checkpoints");
        spit(run + "/lock", "123 elsewhere\n");  // over a network file system
        CHECK_THROWS_WITH(check_not_written(run), ContainsSubstring("by process 123 on host elsewhere: wait"));
    }
    next_flock_error = ENOLCK;  // a file system without locks: nobody is taken for a writer
    CHECK_NOTHROW(check_not_written(run));
    // There the process number tells, of a process on this host.
    for (const auto& [holder, says] : {std::pair("1 " + host(), "is being written by process 1 on this host"),
                                       {"1 elsewhere", "if it has ended, delete "}}) {
        spit(run + "/lock", holder + "\n");
        next_flock_error = ENOLCK;
        CHECK_THROWS_WITH(RunFolder(run), ContainsSubstring(says));
    }
    {  // All ranks ask at the same time.
        const int other = ::open((run + "/lock").c_str(), O_RDONLY);
        CHECK(::flock(other, LOCK_SH) == 0);
        CHECK_NOTHROW(check_not_written(run));
        ::close(other);
    }
    // Of a process on another host nobody can say here whether it lives. One process of several locks.
    spit(run + "/lock", "123 elsewhere\n");
    for (const std::string& before : {std::string(), have_mpirun() ? mpirun_command(2) : std::string()}) {
        const Outcome other = run_program("train_gpt", "--resume --out " + run, before);
        INFO(other.err);
        CHECK(other.status == 2);
        CHECK_THAT(other.err,
                   ContainsSubstring("process 123 on host elsewhere") && ContainsSubstring("delete " + run + "/lock"));
    }
    CHECK(slurp(run + "/lock") == "123 elsewhere\n");
    // A full disk took the beginning of a line: who wrote it did not get the lock.
    spit(run + "/lock", concat("123 ", host().substr(0, 1)));
    const Outcome ranks = run_program("train_gpt", concat("--resume --out ", run, " --stop-after ", step + 2),
                                      have_mpirun() ? mpirun_command(2) : "");
    INFO(ranks.err);
    CHECK(ranks.status == 0);
    CHECK_THAT(ranks.out, !ContainsSubstring("taken over"));
    CHECK_FALSE(std::filesystem::exists(run + "/lock"));
}

TEST_CASE("a lock that cannot be written is said with the system's reason", "[program][train_gpt]") {
    const TempFolder folder;
    std::filesystem::create_symlink("/dev/null", folder / "lock");
    const Outcome outcome = train("--out " + folder.path);
    CHECK(one_line_with(line_of(outcome), folder / "lock", "Invalid argument"));  // what ftruncate says of a device
}

// ---------------------------------------------------------------------------------------------------------------------
// The disk

TEST_CASE("a disk without room for the checkpoints is found at the start", "[program][train_gpt]") {
    const TempFolder folder;
    const Outcome outcome = train("--steps 1000000000 --save-every 1 --keep 0 --out " + (folder / "a/run"));
    INFO(outcome.err);
    CHECK(one_line_with(line_of(outcome), "the disk of " + folder.path, "1000000000 checkpoints at once", "--keep 1"));
    CHECK(train("--steps 1e15 --stop-after 2 --out " + (folder / "two")).status == 0);  // the logs of two steps
    // The last step is saved, too. A new checkpoint is written before an old one goes, and the best stays beside those
    // that are kept. What a resumed run has already needs no more room.
    const std::pair<std::string, const char*> counts[] = {
        {"--steps 1000000001 --save-every 2 --keep 0 --out " + (folder / "a"), " 500000001 checkpoints at once"},
        {"--steps 2000000001 --save-every 3 --keep 0 --resume --out " + (folder / "two"),
         " 666666667 checkpoints at once"},
        {"--steps 1e9 --save-every 4 --val-every 6 --keep 0 --keep-best --out " + (folder / "a"),
         " 333333333 checkpoints at once"},
        {"--steps 1e9 --save-every 1 --val-every 0 --keep 0 --keep-best --out " + (folder / "a"),
         " 1000000000 checkpoints at once"},
        {"--steps 3e17 --save-every 3000000000 --val-every 4000000001 --keep 0 --keep-best --out " + (folder / "a"),
         " 174999999 checkpoints at once"},
        {"--steps 1e9 --save-every 2 --keep 9223372036854775807 --keep-best --out " + (folder / "a"),
         " 500000001 checkpoints at once"},
        {"--steps 1e15 --save-every 0 --val-every 0 --out " + (folder / "a"), " 1 checkpoint of "},  // the logs
        {"--steps 2e9 --save-every 1 --keep 1e9 --out " + (folder / "a"), " 1000000001 checkpoints at once"},
        {"--steps 2e9 --save-every 1 --keep 1e9 --keep-best --out " + (folder / "a"),
         " 1000000002 checkpoints at once"},
        {"--steps 2e9 --save-every 1 --keep 1e9 --resume --out " + (folder / "two"),
         " 1000000000 checkpoints at once"}};
    for (const auto& [flags, count] : counts) CHECK_THAT(line_of(train(flags, "timeout 20")), ContainsSubstring(count));
    CHECK_FALSE(std::filesystem::exists(folder / "a"));
    // What it says of the size of a checkpoint, with a large tokenizer, is what one takes.
    std::filesystem::create_directories(folder / "tokenizer");
    spit(folder / "tokenizer/tokenizer.json",
         slurp("test/golden/tokenizer/gpt2/tokenizer.json") + std::string(2 << 20, '\n'));
    // So it is where ranks have the same blocks, and each its errors of compression.
    for (const std::string& other :
         {"--tokenizer " + (folder / "tokenizer"),
          std::string("--ranks 4 --pp 2 --pipeline dualpipe --batch 8 --micro-batches 4 --compress 1bit")}) {
        const std::string flags = "--steps 2 " + other + " --out " + (folder / "b");
        const std::string said = train(flags + " --steps 1000000000 --save-every 1 --keep 0").err;
        REQUIRE(train(flags).status == 0);
        int64_t bytes = 0;
        for (const auto& file : std::filesystem::directory_iterator(newest_checkpoint(folder / "b")))
            bytes += static_cast<int64_t>(file.file_size());
        const double said_mib = number_after(said, "at once of ");
        CHECK(said_mib == Approx(static_cast<double>(bytes) / 0x1p20).epsilon(0.02));  // headers and JSON take a little
        std::filesystem::remove_all(folder / "b");
    }
}

// A disk whose free blocks are almost all kept for root, as a full ext4 has them.
TEST_CASE("the room on a disk is what a user may have, and a run that is done needs none", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string done = folder / "done";
    REQUIRE(train("--steps 2 --out " + done).status == 0);
    spit(folder / "disk.c",
         "#include <stdlib.h>\n"
         "#include <sys/statvfs.h>\n"
         "int statvfs(const char* path, struct statvfs* disk) {\n"
         "    (void)path;\n"
         "    *disk = (struct statvfs){.f_frsize = 4096, .f_blocks = 1 << 30, .f_bfree = 1 << 20, .f_bavail = 512};\n"
         "    if (getenv(\"NO_SIZES\")) *disk = (struct statvfs){0};\n"
         "    return 0;\n}\n");
    REQUIRE(run_shell(concat("cc -shared -fPIC -o ", folder / "disk.so ", folder / "disk.c")).status == 0);
    const std::string disk = "env LD_PRELOAD=" + folder / "disk.so";
    CHECK(one_line_with(line_of(train("--steps 2 --out " + folder / "new", disk)),
                        "the disk of " + folder.path + " has 2.00 MiB free, and this run needs "));
    // A file system that does not know its size.
    CHECK(train("--steps 2 --val-every 0 --out " + folder / "new", disk + " NO_SIZES=1").status == 0);
    const Outcome resumed = run_program("train_gpt", "--resume --out " + done, disk);
    INFO(resumed.err);
    CHECK(resumed.status == 0);
}

// With --zero 1 each rank writes its part, and no file of rank 1 may grow beyond 800 blocks of 512 bytes or 1 KiB.
TEST_CASE("where one rank cannot write its part, all of them know", "[program][train_gpt]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    if (run_shell("ompi_info --version").out.find("Open MPI v5") != std::string::npos)
        SKIP_TEST("Open MPI 5 begins with a file beyond this limit");
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--steps 9 --val-every 0 --save-every 3 --stop-after 3 --out " + run).status == 0);
    const std::string rank = "exec " + program_path("train_gpt") + " --zero 1 --resume --out " + run;
    const Outcome outcome = run_shell("export OMP_NUM_THREADS=1; " + mpirun_of_two(rank, "ulimit -f 800; " + rank));
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status != 0);
    const std::string newest = "the newest checkpoint is " + run + "/checkpoints/step-00000003";
    CHECK_THAT(outcome.err, ContainsSubstring("rank 1: cannot write ") &&
                                ContainsSubstring("step 6 could not be saved: rank 1 could not write its part. The run "
                                                  "goes on, and tries again at the next save; " +
                                                  newest) &&
                                ContainsSubstring("step 9, the last, could not be saved: rank 1 could not"));
    CHECK(run_shell("ls " + run + "/checkpoints").out == "step-00000003\n");
    CHECK(read_csv_log(run + "/log.csv").size() == 9);
}

// ---------------------------------------------------------------------------------------------------------------------
// Watching a run

TEST_CASE("--keep-best keeps the checkpoint with the lowest validation loss", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", val = folder / "val.txt";
    std::string other;  // letters that the training text hardly has: what is learned from it soon makes this text worse
    for (int i = 0; i < 2000; ++i) other += static_cast<char>('A' + i * i % 53 % 26);
    spit(val, other);
    const std::string flags =
        "--val " + val + " --lr 1e-2 --keep 1 --save-every 7 --steps 24 --val-every 3 --keep-best --out " + run;
    REQUIRE(train(flags + " --stop-after 17").status == 0);
    const Outcome outcome = resume(run);
    INFO(outcome.err << outcome.out);
    REQUIRE(outcome.status == 0);
    LogRow best;
    for (const LogRow& row : read_csv_log(run + "/log.csv"))
        if (row.val_loss && (!best.val_loss || *row.val_loss < *best.val_loss)) best = row;
    REQUIRE(best.step < 24);
    CHECK(run_shell("ls " + run + "/checkpoints").out ==
          format("step-%08lld\nstep-00000024\n", static_cast<long long>(best.step)));
    CHECK_THAT(outcome.out, ContainsSubstring(concat("best     step ", best.step, ", with a validation loss of")));
    const Outcome none = train("--keep-best --val-fraction 0 --out " + (folder / "none"));
    CHECK(one_line_with(line_of(none), "--keep-best", "--val-fraction above 0"));
}

TEST_CASE("--keep-best: where the best step cannot be saved, the best of the others is kept", "[program][train_gpt]") {
    const TempFolder folder;
    spit(folder / "val.txt", std::string(2000, '#'));  // a constant text: a few steps on another one make it worse
    const std::string flags = "--val " + (folder / "val.txt") +
                              " --warmup 20 --keep 1 --save-every 7 --steps 24 --val-every 1 --keep-best --out ";
    const auto best_of = [&](const std::string& run, int64_t unsaved) {
        LogRow best;
        for (const LogRow& row : read_csv_log(run + "/log.csv"))
            if (row.step != unsaved && (!best.val_loss || *row.val_loss < *best.val_loss)) best = row;
        return best.step;
    };
    // One that is not the best, and cannot be saved, leaves the best what it is.
    std::filesystem::create_directories(folder / "first/checkpoints");
    std::filesystem::create_symlink("step-00000021", folder / "first/checkpoints/step-00000021");  // to itself
    const Outcome first = train(flags + (folder / "first"));
    REQUIRE(first.status == 0);
    const int64_t unsaved = best_of(folder / "first", 0);
    REQUIRE((unsaved > 1 && unsaved < 21));
    CHECK_THAT(first.err, ContainsSubstring("step 21 could not be saved"));
    CHECK_THAT(first.out, ContainsSubstring(concat("best     step ", unsaved, ", with a validation loss of")));
    const std::string run = folder / "run";
    REQUIRE(train(flags + run + " --stop-after 1").status == 0);
    const auto checkpoint = [](int64_t step) { return format("step-%08lld", static_cast<long long>(step)); };
    std::filesystem::create_symlink(checkpoint(unsaved), run + "/checkpoints/" + checkpoint(unsaved));  // to itself
    const Outcome outcome = resume(run);
    INFO(outcome.err << outcome.out);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.err, ContainsSubstring(concat("step ", unsaved, " could not be saved")));
    const int64_t best = best_of(run, unsaved);
    CHECK(std::filesystem::exists(run + "/checkpoints/" + checkpoint(best)));
    CHECK_THAT(outcome.out, ContainsSubstring(concat("best     step ", best, ", with a validation loss of")));
}

TEST_CASE("progress is a line every --log-every steps, and one that changes in a terminal", "[program][train_gpt]") {
    const TempFolder folder;
    // Steps 8, 16, the one with a validation loss, 10, and the last, 19.
    const std::string some = train("--log-every 8 --stop-after 19 --out " + (folder / "a")).out;
    CHECK(count(some, "\nstep ") == 4);
    CHECK(count(some, "\nstep 19/20 ") == 1);
    CHECK((count(some, " | norm ") == 4 && count(some, " left") == 4));
    CHECK((count(some, "\nstopped after step 19 of 20; saved.") == 1 && count(some, "\ndone in ") == 0));
    const Outcome none = train("--val-fraction 0 --out " + (folder / "b"));
    INFO(none.err);
    CHECK(none.status == 0);
    CHECK_THAT(none.out, ContainsSubstring("none held out"));
    CHECK(count(none.out, "\nstep ") == 20);
    CHECK(count(none.out, "val loss") == 0);
    for (const LogRow& row : read_csv_log(folder / "b/log.csv")) CHECK_FALSE(row.val_loss.has_value());
    if (run_shell("command -v script").status != 0) return;  // it runs a command in a terminal of its own
    const auto in_terminal = [&](const std::string& kind) {
        return run_shell(concat("TERM=", kind, " script -qec 'stty cols 40; ", program_path("train_gpt"), " --data ",
                                text_file(), kSmall, "--out ", folder / kind, "' ", folder / "typescript"));
    };
    const Outcome terminal = in_terminal("xterm"), dumb = in_terminal("dumb");
    CHECK(terminal.status == 0);
    CHECK(count(terminal.out, "\rstep ") == 20);
    CHECK(count(terminal.out, "\nstep ") == 0);
    CHECK_THAT(terminal.out, ContainsSubstring("val loss"));
    // What would go on in a second line of the terminal could not be replaced.
    const size_t begin = terminal.out.find("\rstep ") + 1;
    CHECK(terminal.out.find("\033[K", begin) == begin + 39);
    CHECK(count(terminal.out, "\033[K\r\n") == 2);  // the lines of steps 10 and 20 stay
    CHECK(count(dumb.out, "\nstep ") == 20);
    CHECK(count(dumb.out, "\033") == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Data

TEST_CASE("several sources are mixed, documents and all, and a resumed run goes on with them", "[program][train_gpt]") {
    const TempFolder folder;
    std::filesystem::create_directories(folder / "text");
    for (int i = 0; i < 100; ++i) spit(folder / concat("text/", 1000 + i), concat("File ", i * i % 97, " of many.\n"));
    const std::string data = concat(" --mask-documents --data ", folder / "text", ":3,", text_file(), ":1 ");
    const std::string whole = folder / "whole", parts = folder / "parts";
    const std::string said = must_succeed(train(data + "--out " + whole));
    CHECK_THAT(said, ContainsSubstring("75.0 % of the sequences") && ContainsSubstring("25.0 % of the sequences"));
    REQUIRE(train(data + "--stop-after 10 --out " + parts).status == 0);
    const Outcome other = resume(parts, concat("--data ", folder / "text", ":2,", text_file(), ":1"));
    CHECK(one_line_with(line_of(other), "training data are not those"));
    REQUIRE(resume(parts).status == 0);
    check_same_end(whole, parts);
    for (const auto& [paths, says] :
         std::vector<std::pair<std::string, std::string>>{{"a.txt:1,b.txt", "each of several sources needs a weight"},
                                                          {text_file() + "," + text_file(), "needs a weight"},
                                                          {"a.txt:1,b.txt:0", "must be a number above 0"},
                                                          {"a.txt:1,b.txt:1e-6", "less than a thousandth"}}) {
        const Outcome wrong = train("--data " + paths + " --out " + (folder / "wrong"));
        INFO(paths << ": " << wrong.err);
        CHECK(one_line_with(line_of(wrong), says));
    }
}

TEST_CASE("--eot says where the documents of a shard begin", "[program][train_gpt]") {
    const TempFolder folder;
    int32_t header[256] = {20240520, 1, 3000};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    for (int i = 0; i < 3000; ++i) {
        const uint16_t token = i % 10 == 0 ? 7 : static_cast<uint16_t>(8 + i * 37 % 200);
        bytes.append(reinterpret_cast<const char*>(&token), 2);
    }
    spit(folder / "tokens.bin", bytes);
    const std::string flags = "--mask-documents --steps 2 --warmup 0 --data " + (folder / "tokens.bin") + " --out ";
    const Outcome unknown = train(flags + (folder / "a"));
    CHECK(one_line_with(line_of(unknown), "all of it is one document", "--eot"));
    const Outcome known = train("--eot 7 " + flags + (folder / "a"));
    INFO(known.err);
    CHECK(known.status == 0);
    CHECK(one_line_with(line_of(train("--eot 7 --out " + (folder / "b"))), "it belongs to token shards"));
    CHECK(one_line_with(line_of(train("--eot 256 " + flags + (folder / "b"))), "vocabulary of 256"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Ends

TEST_CASE("Ctrl-C is answered at once, and the second says what is lost", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    // Both come before the first step has ended, which has 65536 tokens.
    const Outcome twice = with_background(
        folder, command("--batch 256 --micro-batch 32 --seq 256 --steps 1000 --val-fraction 0 --out " + run),
        "await 'total' out; kill -INT $pid; await 'finishing' err; kill -INT $pid; wait $pid; echo status $?");
    INFO(twice.out << slurp(folder / "err") << slurp(folder / "out"));
    CHECK_THAT(twice.out, ContainsSubstring("status 130") && !ContainsSubstring("did not come"));
    CHECK(slurp(folder / "err") ==
          "finishing step 1, then saving; press Ctrl-C again to stop without saving\n"
          "stopped without saving: nothing of this run was saved\n");
    // The same before a run that is resumed has its weights.
    std::filesystem::remove_all(run);
    REQUIRE(train("--batch 64 --micro-batch 32 --seq 256 --steps 1000 --val-fraction 0 --stop-after 1 --out " + run)
                .status == 0);
    const Outcome resumed = with_background(
        folder, concat("exec ", program_path("train_gpt"), kUntimed, " --resume --out ", run),
        "await 'total' out; kill -INT $pid; await 'finishing' err; kill -INT $pid; wait $pid; echo status $?");
    CHECK_THAT(resumed.out, ContainsSubstring("status 130") && !ContainsSubstring("did not come"));
    CHECK(slurp(folder / "err") ==
          "finishing step 2, then saving; press Ctrl-C again to stop without saving\n"
          "stopped without saving: what came after step 1, the newest checkpoint, is lost\n");
    // A terminal that is closed asks, too; and a signal that only asks does not count as the first one.
    std::filesystem::remove_all(run);
    const Outcome closed =
        with_background(folder, command("--steps 100000 --val-fraction 0 --out " + run),
                        "await 'step' out; kill -USR1 $pid; kill -HUP $pid; wait $pid; echo status $?");
    CHECK_THAT(closed.out, ContainsSubstring("status 0"));
    CHECK_THAT(slurp(folder / "out"), ContainsSubstring("stopped after step"));
    // But not where nohup has started the run.
    std::filesystem::remove_all(run);
    with_background(folder, "trap '' HUP; " + command("--steps 100000 --val-fraction 0 --out " + run),
                    "await 'step' out; kill -HUP $pid; kill -USR1 $pid; wait $pid");
    CHECK_THAT(slurp(folder / "err"), ContainsSubstring(", then saving\n") && !ContainsSubstring("Ctrl-C"));
    // The reader of the output goes away.
    std::filesystem::remove_all(run);
    const Outcome piped = run_shell(command("--steps 100000 --val-fraction 0 --out " + run) + " | head -3");
    CHECK_THAT(piped.err, ContainsSubstring("finishing step "));
    CHECK(std::ranges::count(piped.err, '\n') == 1);  // however many lines were printed after that
    CHECK(latest_checkpoint(run).has_value());
    // During the sample, which would take 10 s: it ends, one step is made and saved.
    std::filesystem::remove_all(run);
    const Outcome sample = with_background(
        folder, command("--seq 256 --sample 100000 --steps 1000 --out " + run),
        "await 'total' out; kill -INT $pid; await 'finishing step 1, then saving' err; wait $pid; echo status $?");
    INFO(sample.out << slurp(folder / "err"));
    CHECK_THAT(sample.out, ContainsSubstring("status 0"));
    CHECK_THAT(slurp(folder / "out"), ContainsSubstring("---- sample before training ----") &&
                                          ContainsSubstring("stopped after step 1 of 1000"));
    CHECK(newest_checkpoint(run) == run + "/checkpoints/step-00000001");
    // During the sample behind the last step, when nothing is left to be saved.
    std::filesystem::remove_all(run);
    REQUIRE(train("--steps 2 --out " + run).status == 0);
    const Outcome done = with_background(
        folder, concat("exec ", program_path("train_gpt"), kUntimed, " --resume --sample 100000 --out ", run),
        "await 'total' out; kill -INT $pid; await 'ending' err; wait $pid; echo status $?");
    CHECK_THAT(done.out, ContainsSubstring("status 0"));
    CHECK(slurp(folder / "err") == "all steps are saved; ending the sample; press Ctrl-C again to end at once\n");
}

TEST_CASE("Ctrl-C ends with the step that it names, also where the next one is launched early",
          "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", other = folder / "other",
                      flags = "--batch 8 --seq 64 --steps 1000 --val-every 0 --val-sequences 4 --out ";
    const double start = seconds_now();
    const Outcome stopped = with_background(folder, command(flags + run + " --run-ahead on --graph on"),
                                            "await 'step  *5/' out; kill -INT $pid; wait $pid; echo status $?");
    const double seconds = seconds_now() - start;
    const std::string err = slurp(folder / "err");
    INFO(stopped.out << err << slurp(folder / "out"));
    CHECK_THAT(stopped.out, ContainsSubstring("status 0"));
    long long step = 0;
    REQUIRE(std::sscanf(err.c_str(), "finishing step %lld, then saving", &step) == 1);
    const std::vector<LogRow> rows = read_csv_log(run + "/log.csv");
    CHECK(rows.back().step == step);
    double ms = 0;
    for (const LogRow& row : rows) ms += *row.step_ms;
    CHECK((ms > 0 && ms < 1e3 * seconds));  // its own time, and none twice
    REQUIRE(train(concat(flags, other, " --stop-after ", step)).status == 0);
    check_same_end(run, other);
}

// Their ranks do not wait for each other between steps: they end together after 8 steps, or --flush-every.
TEST_CASE("Ctrl-C names the step at which a pipeline ends whose ranks go ahead", "[program][train_gpt][pipeline]") {
    for (const auto& [pipeline, at_once] : {std::pair("zb-v", 8), {"2bw --clip 0 --flush-every 6", 6}})
        for (const std::string moment : {"total", "step"}) {  // before the first step, or after some steps
            const TempFolder folder;
            const std::string run = folder / "run";
            const std::string flags = concat(
                "--batch 4 --steps 100000 --val-fraction 0 --val-every 0 --save-every 0 --ranks 2 --pp 2 "
                "--micro-batches 2 --model ",
                model_file("deep-gqa"), " --out ", run, " --pipeline ", pipeline);
            const int64_t wanted = moment == "total" ? at_once : 100000;
            long long step = 0;
            int64_t last = 2 * wanted;
            // Again where Ctrl-C came after the first steps: they take less time than a busy machine to send it.
            for (int tries = 0; tries < 8 && std::max<int64_t>(step, last) > wanted; ++tries) {
                std::filesystem::remove_all(run);
                const Outcome stopped =
                    with_background(folder, command(flags),
                                    concat("await '", moment, "' out; kill -INT $pid; wait $pid; echo status $?"));
                const std::string err = slurp(folder / "err");
                INFO(pipeline << stopped.out << err << slurp(folder / "out"));
                CHECK_THAT(stopped.out, ContainsSubstring("status 0"));
                REQUIRE(std::sscanf(err.c_str(), "finishing step %lld, then saving", &step) == 1);
                last = read_csv_log(run + "/log.csv").back().step;
            }
            INFO(pipeline << " " << moment << " " << step);
            CHECK(step % at_once == 0);
            CHECK(last % at_once == 0);
            // Between steps one rank may see a signal, and the other not yet.
            if (moment == "total") CHECK((step == at_once && last == step));
        }
}

// A run on a shard of n zeros, which `change` changes after the second step.
static Outcome train_while_shard_changes(const TempFolder& folder, int32_t n, const std::string& change) {
    const int32_t header[256] = {20240520, 1, n};
    std::string shard(sizeof header + 2 * static_cast<size_t>(n), '\0');
    std::memcpy(shard.data(), header, sizeof header);
    spit(folder / "tokens.bin", shard);
    return with_background(folder,
                           concat("exec ", program_path("train_gpt"), kUntimed, " --data ", folder / "tokens.bin",
                                  kSmall, "--steps 1000000 --val-fraction 0 --val-every 0 --out ", folder / "run"),
                           concat("await 'step  *2/' out; ", change, "; wait $pid; echo status $?"));
}

TEST_CASE("a token shard that is shortened while a run reads it is one clear line", "[program][train_gpt]") {
    const TempFolder folder;
    const Outcome outcome = train_while_shard_changes(folder, 1 << 20, concat("truncate -s 0 ", folder / "tokens.bin"));
    CHECK(outcome.out == "status 2\n");
    // Which one comes first depends on what the run does at that moment: it reads behind the new end (a signal), or it
    // looks at the file's size, after a read of tokens that ended before the signal could come.
    const std::string err = slurp(folder / "err");
    INFO(err);
    CHECK((err == "a file that was being read has been shortened by another program\n" ||
           err == concat("train_gpt: ", folder / "tokens.bin",
                         " has been shortened by another program while it was being read, from ", 1024 + (2 << 20),
                         " bytes to 0\n")));
}

TEST_CASE("ids beyond the vocabulary that are written into a shard while a run reads it are one clear line",
          "[program][train_gpt]") {
    const TempFolder folder;
    // Id 256, and only as the first token of the only sequence, where it is no target.
    const Outcome outcome = train_while_shard_changes(folder, 17,
                                                      concat("printf '\\000\\001' | dd of=", folder / "tokens.bin",
                                                             " bs=1 seek=1024 conv=notrunc 2> ", folder / "dd"));
    CHECK(outcome.out == "status 2\n");
    const std::string err = slurp(folder / "err");
    INFO(err);
    CHECK(one_line_with(err.substr(0, err.size() - 1), "of " + folder / "tokens.bin", "token id 256",
                        "beyond the model's vocabulary of 256", "another program has written into the file"));
}

TEST_CASE("a step takes no longer where a document is long", "[program][train_gpt]") {
    const TempFolder folder;
    // Of all steps but the first two, the median.
    const auto step_ms = [&](size_t bytes) {
        const std::string n = std::to_string(bytes), text = folder / (n + ".txt"), run = folder / n;
        spit(text, std::string(bytes, 'a'));
        std::filesystem::remove_all(run);
        printed_by("train_gpt", concat("--data ", text, kSmall, "--batch 8 --steps 12 --val-every 0 --out ", run));
        std::vector<double> all;
        for (const LogRow& row : read_csv_log(run + "/log.csv")) all.push_back(row.step_ms.value());
        std::sort(all.begin() + 2, all.end());
        return all[all.size() / 2 + 1];
    };
    double few = 0, many = 1;
    for (int tries = 0; tries < 5 && many >= 4 * few; ++tries)  // the machine may be busier during one of the two
        few = step_ms(1 << 16), many = step_ms(1 << 25);
    INFO(few << " ms, " << many << " ms");
    CHECK(many < 4 * few);
}

TEST_CASE("a word is quoted where a shell would read it otherwise", "[train_gpt]") {
    CHECK(shell_quoted("runs/1_a-b.c:d=e,f@g%h+i") == "runs/1_a-b.c:d=e,f@g%h+i");
    CHECK(shell_quoted("") == "''");
    CHECK(shell_quoted("a b") == "'a b'");
    CHECK(shell_quoted("$HOME") == "'$HOME'");
    CHECK(shell_quoted("it's") == "'it'\\''s'");
}

TEST_CASE("the command that continues a run is whole", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string program = program_path("train_gpt"), file = program_file("train_gpt"), run = folder / "a run";
    const std::string printed = program == file ? file : "'" + file + "'";
    const std::string threads = must_succeed(train("--ranks 2 --zero 1 --stop-after 2 --out '" + run + "'"));
    const std::string command = concat(printed, " --out '", run, "' --resume", kUntimed, " --ranks 2 --zero 1\n");
    CHECK_THAT(threads, ContainsSubstring("Continue with:  " + command));
    if (!have_mpirun()) return;
    // The signal that mpirun passes on to its ranks, with the command that the run prints.
    const Outcome processes =
        with_background(folder,
                        concat("exec ", mpirun_command(2), program, " --data ", text_file(), kSmall,
                               "--zero 1 --steps 100000 --out ", folder / "b"),
                        "await 'step  *2/' out; kill -USR1 $(sed -n 's/^stop .*kill -USR1 \\([0-9]*\\).*/\\1/p' " +
                            (folder / "out") + "); wait $pid; echo status $?");
    const std::string out = slurp(folder / "out"), err = slurp(folder / "err");
    INFO(processes.out << processes.err << out << err);
    CHECK(processes.out == "status 0\n");
    CHECK_THAT(err, ContainsSubstring("finishing step ") && ContainsSubstring(", then saving\n"));
    CHECK(err.find("finishing") == err.rfind("finishing"));  // of one of the ranks
    CHECK_THAT(out, ContainsSubstring("stopped after step ") &&
                        ContainsSubstring(concat("Continue with:  mpirun --oversubscribe -np 2 ", printed, " --out ",
                                                 folder / "b", " --resume --zero 1\n")));
    CHECK(out.find('\r') == std::string::npos);  // lines, although mpirun gives its ranks a terminal
}
