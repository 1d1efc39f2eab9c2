// Files: mapping, atomic writing, and every way in which a disk or a signal can get in between.
//
//   run:   build/cpu/run_tests -# "[#test_files]"
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "io/io.h"
#include "io/list_folder.h"
#include "io/lock.h"
#include "file_size_limit.h"
#include "temp_folder.h"
#include "test.h"

namespace {

// Permissions don't bind root: tests of them run as nobody (65534) for a while.
struct NotRoot {
    bool was_root = ::geteuid() == 0;
    NotRoot() {
        if (was_root) REQUIRE(::seteuid(65534) == 0);
    }
    ~NotRoot() {
        if (was_root && ::seteuid(0) != 0) std::abort();
    }
};

std::atomic<bool> fstat_fails = false;

}  // namespace

// In the place of the C library's.
extern "C" int fstat(int fd, struct stat* status) noexcept {
    if (fstat_fails) return errno = EIO, -1;
    return ::fstatat(fd, "", status, AT_EMPTY_PATH);
}

TEST_CASE("MappedFile shows the bytes of a file") {
    TempFolder folder;
    spit(folder / "a", std::string("x\0y", 3));
    MappedFile file(folder / "a");
    REQUIRE(file.bytes() == 3);
    CHECK(std::memcmp(file.data(), "x\0y", 3) == 0);
    CHECK(file.path() == folder / "a");

    MappedFile moved(std::move(file));
    CHECK(file.bytes() == 0);
    CHECK(moved.data()[2] == 'y');

    spit(folder / "empty", "");
    CHECK(MappedFile(folder / "empty").bytes() == 0);
}

TEST_CASE("MappedFile refuses what is not a file") {
    TempFolder folder;
    CHECK(one_line_with(error_of([&] { MappedFile(folder / "none"); }), folder / "none", "No such file",
                        "check the path"));
    CHECK(one_line_with(error_of([&] { MappedFile(folder.path); }), folder.path, "is a folder"));
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);  // opening it would wait for ever
    CHECK(one_line_with(error_of([&] { MappedFile(folder / "pipe"); }), "not a regular file"));
}

TEST_CASE("AtomicFile: the old file until commit(), then the new one") {
    TempFolder folder;
    const std::string path = folder / "file";
    spit(path, "old");
    {
        AtomicFile file(path);
        file.write("new");
        CHECK(slurp(path) == "old");
        CHECK(folder.listing() == "file file.tmp");
    }
    CHECK(slurp(path) == "old");
    CHECK(folder.listing() == "file");

    AtomicFile file(path);
    file.write("new");
    file.commit();
    CHECK(slurp(path) == "new");
    CHECK(folder.listing() == "file");
    CHECK(one_line_with(error_of([&] { file.commit(); }), "twice"));
    CHECK(one_line_with(error_of([&] { file.write("more"); }), "after commit"));
}

TEST_CASE("AtomicFile keeps the order of small and large writes") {
    TempFolder folder;
    std::string expected;
    AtomicFile file(folder / "file");
    const size_t sizes_bytes[] = {1, 1000, 3'000'000, 0, 7, (1 << 20) - 8, 1, 1 << 20, 1, (1 << 20) + 1, 5};
    for (size_t i = 0; i < std::size(sizes_bytes); i++) {
        const std::string part(sizes_bytes[i], static_cast<char>('a' + i));
        file.write(part);
        expected += part;
    }
    file.overwrite(1, "AB");
    expected.replace(1, 2, "AB");
    CHECK_THROWS_AS(file.overwrite(expected.size() - 1, "AB"), Error);
    file.write("z");
    file.commit();
    CHECK(slurp(folder / "file") == expected + "z");
}

TEST_CASE("AtomicFile: what a killed run left is overwritten, but never a link followed") {
    TempFolder folder;
    spit(folder / "file.tmp", "the rest of a killed run, longer than the new text");
    write_text_file(folder / "file", "new");
    CHECK(slurp(folder / "file") == "new");
    CHECK(folder.listing() == "file");

    spit(folder / "victim", "precious");
    REQUIRE(::symlink((folder / "victim").c_str(), (folder / "other.tmp").c_str()) == 0);
    CHECK(one_line_with(error_of([&] { write_text_file(folder / "other", "x"); }), folder / "other.tmp"));
    CHECK(slurp(folder / "victim") == "precious");
}

TEST_CASE("AtomicFile refuses folders, devices and missing or read-only folders") {
    TempFolder folder;
    CHECK(one_line_with(error_of([&] { AtomicFile file(folder.path); }), folder.path, "is a folder"));
    CHECK(one_line_with(error_of([&] { AtomicFile file(""); }), "without a name"));
    CHECK(one_line_with(error_of([&] { AtomicFile file("/dev/null"); }), "/dev/null", "not a regular file"));
    CHECK(one_line_with(error_of([&] { AtomicFile file(folder / "no/file"); }), "No such file", "choose a folder"));
    CHECK(error_of([&] { AtomicFile file(folder / std::string(300, 'x')); }).ends_with(": File name too long"));
    REQUIRE(::chmod(folder.path.c_str(), 0555) == 0);
    {
        NotRoot nobody;
        CHECK(one_line_with(error_of([&] { AtomicFile file(folder / "file"); }), folder / "file", "Permission denied"));
        CHECK(one_line_with(error_of([&] { make_folder(folder.path); }), folder.path, "Permission denied",
                            "permissions"));
        CHECK(one_line_with(error_of([&] { make_folder(folder / "a/b"); }), "a/b", "Permission denied"));
    }
    REQUIRE(::chmod(folder.path.c_str(), 0755) == 0);
    CHECK(folder.listing().empty());
}

TEST_CASE("AtomicFile whose folder is gone at commit() says what to do") {
    TempFolder folder;
    make_folder(folder / "gone");
    AtomicFile file(folder / "gone/file");
    file.write("text");
    std::filesystem::remove_all(folder / "gone");
    CHECK(one_line_with(error_of([&] { file.commit(); }), folder / "gone/file", "No such file", "choose a folder"));
    AtomicFile other(folder / "other");
    make_folder(folder / "other");  // meanwhile
    CHECK(one_line_with(error_of([&] { other.commit(); }), "in the place of " + (folder / "other")));
    CHECK_FALSE(is_there(folder / "other.tmp"));
}

TEST_CASE("a full disk: an error with path, bytes and advice; the old file stays and no rest of the new one") {
    TempFolder folder;
    const std::string path = folder / "file", text(3'000'000, 'x');
    spit(path, "old");
    std::string early, late;
    {
        FileSizeLimit limit(2'000'000);
        early = error_of([&] { write_text_file(path, text); });  // in write()
        late = error_of([&] {
            AtomicFile file(path);
            for (int i = 0; i < 21; i++) file.write(text.data(), 100'000);  // the last wait in the buffer for commit()
            file.commit();
        });
    }
    CHECK(one_line_with(early, path, "1000000 more bytes", "free some space"));
    CHECK(one_line_with(late, path, "more bytes", "free some space"));
    CHECK(slurp(path) == "old");
    CHECK(folder.listing() == "file");

    const int fd = ::open("/dev/full", O_WRONLY);
    REQUIRE(fd >= 0);
    CHECK(one_line_with(error_of([&] { write_all(fd, "abc", 3, "/dev/full"); }), "3 more bytes to /dev/full",
                        "No space left on device", "free some space"));
    ::close(fd);
}

TEST_CASE("write_all goes on after short writes and signals") {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    std::string sent(4'000'000, ' '), received;
    for (size_t i = 0; i < sent.size(); i++) sent[i] = static_cast<char>(i * 31 % 251);
    std::thread reader([&] {
        sigset_t alarms;  // the signals shall hit the writer
        sigemptyset(&alarms);
        sigaddset(&alarms, SIGALRM);
        pthread_sigmask(SIG_BLOCK, &alarms, nullptr);
        char buffer[50'000];
        for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
            received.append(buffer, static_cast<size_t>(n));
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
    static volatile int n_signals = 0;
    struct sigaction action = {}, before;
    action.sa_handler = [](int) { n_signals = n_signals + 1; };  // without SA_RESTART: write() returns early or EINTR
    ::sigaction(SIGALRM, &action, &before);
    const itimerval fast{{0, 500}, {0, 500}}, off{};
    ::setitimer(ITIMER_REAL, &fast, nullptr);
    const std::string error = error_of([&] { write_all(ends[1], sent.data(), sent.size(), "pipe"); });
    ::setitimer(ITIMER_REAL, &off, nullptr);
    ::sigaction(SIGALRM, &before, nullptr);
    ::close(ends[1]);
    reader.join();
    ::close(ends[0]);
    CHECK(error.empty());
    CHECK(n_signals > 3);
    CHECK(received == sent);
}

TEST_CASE("a locked file is one process's, until it ends") {
    using Lock = LockedFile::Lock;
    const TempFolder folder;
    const std::string path = folder / "file";
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
        const LockedFile file(path, O_RDWR);
        if (::write(ends[1], "x", 1) == 1) ::pause();
        ::_exit(1);
    }
    char ready;
    REQUIRE(::read(ends[0], &ready, 1) == 1);
    CHECK(LockedFile(path, O_RDWR).lock() == Lock::others);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    LockedFile first(path, O_RDWR);
    CHECK(first.lock() == Lock::ours);
    CHECK(LockedFile(path, O_WRONLY | O_APPEND).lock() == Lock::others);
    // A lock of a file without a name keeps nobody out: the next one makes a new file.
    first.remove();
    const LockedFile second(path, O_RDWR);
    CHECK(second.lock() == Lock::ours);
    CHECK(is_there(path));
    const LockedFile null("/dev/null", O_WRONLY);
    CHECK(LockedFile("/dev/null", O_WRONLY).lock() == Lock::ours);
    CHECK(one_line_with(error_of([&] { LockedFile(folder / "no/file", O_RDWR); }), "no/file", "make its folder first"));
    ::close(ends[0]), ::close(ends[1]);
}

TEST_CASE("a file that is opened and cannot be looked up is not opened for ever") {
    const TempFolder folder;
    fstat_fails = true;
    const std::string error = error_of([&] { LockedFile(folder / "file", O_RDWR); });
    fstat_fails = false;
    CHECK(one_line_with(error, "cannot lock " + (folder / "file"), "Input/output error"));
}

TEST_CASE("kill -9 at any moment leaves a whole file") {
    TempFolder folder;
    const std::string path = folder / "file", a(300'000, 'a'), b(2'500'000, 'b');
    write_text_file(path, a);
    int n_a = 0, n_b = 0;
    for (int round = 0; round < 40; round++) {
        const pid_t child = ::fork();
        if (child == 0) {
            for (;;) {
                write_text_file(path, b);
                write_text_file(path, a);
            }
        }
        REQUIRE(child > 0);
        std::this_thread::sleep_for(std::chrono::microseconds(500 + 613 * round));
        ::kill(child, SIGKILL);
        int status;
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status));
        const std::string left = slurp(path);
        REQUIRE((left == a || left == b));
        (left == a ? n_a : n_b)++;
    }
    INFO(n_a << " old, " << n_b << " new");
    CHECK(n_a > 0);
}

TEST_CASE("a new checkpoint removes older ones, and no copy that somebody keeps beside them") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    for (int64_t step = 1; step <= 4; ++step) {
        CheckpointWriter writer(folder.path, step);
        writer.commit(2);
        if (step == 2)
            for (const char* name : {"/step-00000002-good", "/step-before", "/good-00000002"})
                make_folder(checkpoints + name);
    }
    CHECK(find_checkpoints(folder.path) == std::vector{checkpoints + "/step-00000004", checkpoints + "/step-00000003"});
    CHECK(is_there(checkpoints + "/step-00000002-good"));
    CHECK(is_there(checkpoints + "/step-before"));
    CHECK(is_there(checkpoints + "/good-00000002"));
    // A run that begins again: what came later goes, as does what a killed run left; the best one stays beside those
    // that are kept. Neither a file nor a name without a number is a checkpoint.
    spit(checkpoints + "/step-9", ""), make_folder(checkpoints + "/step-"), make_folder(checkpoints + "/step-7.tmp");
    const auto found = [&] {
        std::string steps;
        for (const std::string& path : find_checkpoints(folder.path)) steps += path.back();
        return steps;
    };
    CheckpointWriter(folder.path, 1).commit(0);
    CHECK(found() == "1");
    CheckpointWriter(folder.path, 2).commit(0);
    CheckpointWriter(folder.path, 3).commit(2, 2);
    CHECK(found() == "321");
    CheckpointWriter(folder.path, 4).commit(1, 2);
    CHECK(found() == "42");
    CheckpointWriter(folder.path, 5).commit((int64_t{1} << 32) + 1);  // more than 32 bits have
    CHECK(found() == "542");
    CHECK(is_there(checkpoints + "/step-9"));
    CHECK(is_there(checkpoints + "/step-"));
    CHECK_FALSE(is_there(checkpoints + "/step-7.tmp"));
    CheckpointWriter(folder.path, 6);  // not committed
    CHECK_FALSE(is_there(checkpoints + "/step-00000006.tmp"));
}

TEST_CASE("from step 100 million on checkpoints are in the order of their steps, too") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    for (const int64_t step : {99'999'999, 100'000'000}) CheckpointWriter(folder.path, step).commit(2);
    CHECK(find_checkpoints(folder.path) ==
          std::vector{checkpoints + "/step-100000000", checkpoints + "/step-99999999"});
}

// A folder under this name of which one file is missing. What has another name by then is not counted.
bool has_lost_files(const std::string& path, int n) {
    const int opened = ::open(path.c_str(), O_RDONLY | O_DIRECTORY);
    if (opened < 0) return false;
    bool lost = false;
    for (int i = 0; i < n && !lost; ++i) lost = ::faccessat(opened, std::to_string(i).c_str(), F_OK, 0) != 0;
    struct stat its {
    }, now{};
    lost = lost && ::fstat(opened, &its) == 0 && ::stat(path.c_str(), &now) == 0 && its.st_ino == now.st_ino;
    ::close(opened);
    return lost;
}

TEST_CASE("a checkpoint is removed at once, for who reads it meanwhile: an older one, or one of the same step") {
    TempFolder folder;
    const int64_t new_step = GENERATE(1, 2);
    const std::string old = folder / "checkpoints/step-00000001";
    const auto fill = [](const std::string& path) {
        for (int i = 0; i < 2000; ++i) spit(concat(path, "/", i), "");
    };
    CheckpointWriter(folder.path, 1).commit(1);
    fill(old);
    std::atomic<bool> started = false, committed = false, some_are_missing = false;
    std::thread reader([&] {
        for (started = true; !committed;) some_are_missing = some_are_missing || has_lost_files(old, 2000);
    });
    while (!started) std::this_thread::yield();
    CheckpointWriter writer(folder.path, new_step);
    fill(writer.folder());
    writer.commit(1);
    committed = true;
    reader.join();
    CHECK_FALSE(some_are_missing);
    CHECK(std::ranges::distance(std::filesystem::directory_iterator(folder / "checkpoints")) == 1);
}

TEST_CASE("an older checkpoint that cannot be removed is said, and the new one is there") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    CheckpointWriter(folder.path, 1).commit(1);
    spit(checkpoints + "/step-00000001/file", "");
    ::chmod((checkpoints + "/step-00000001").c_str(), 0555);
    for (const std::string& path : {folder.path, checkpoints}) ::chmod(path.c_str(), 0777);
    {
        const NotRoot not_root;
        CHECK(one_line_with(CheckpointWriter(folder.path, 2).commit(1), "cannot remove", "step-00000001"));
    }
    CHECK(latest_checkpoint(folder.path) == checkpoints + "/step-00000002");
    ::chmod((checkpoints + "/step-00000001").c_str(), 0777);
}

// As on a network file system, which keeps the files of a folder that a process has open.
TEST_CASE("of a checkpoint that can be removed only in part nothing is left under its name, and the next is saved") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints", old = checkpoints + "/step-00000001",
                      left = old + ".old.tmp", locked = "/locked";
    const int64_t new_step = GENERATE(1, 2);
    CheckpointWriter(folder.path, 1).commit(1);
    // Whatever the order in which the system lists them, some files go before the folder that cannot be removed.
    for (int i = 0; i < 100; ++i) spit(concat(old, "/", i), "");
    make_folder(old + locked), spit(old + locked + "/file", "");
    for (int i = 100; i < 200; ++i) spit(concat(old, "/", i), "");
    for (const std::string& path : {folder.path, checkpoints, old}) ::chmod(path.c_str(), 0777);
    ::chmod((old + locked).c_str(), 0555);
    {
        const NotRoot not_root;
        CHECK(one_line_with(CheckpointWriter(folder.path, new_step).commit(1), "cannot remove", old));
        CHECK(one_line_with(CheckpointWriter(folder.path, 3).commit(1), "cannot remove", left));
    }
    CHECK(find_checkpoints(folder.path) == std::vector{checkpoints + "/step-00000003"});
    ::chmod((left + locked).c_str(), 0777);
    CHECK(CheckpointWriter(folder.path, 4).commit(1) == "");
    CHECK(std::ranges::distance(std::filesystem::directory_iterator(checkpoints)) == 1);
}

TEST_CASE("a checkpoint that is in its place is saved, whatever goes wrong behind that") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    CheckpointWriter(folder.path, 1).commit(1);
    CheckpointWriter writer(folder.path, 2);
    for (const std::string& path : {folder.path, writer.folder()}) ::chmod(path.c_str(), 0777);
    ::chmod(checkpoints.c_str(), 0333);  // it cannot be read, so neither synced nor looked through
    {
        const NotRoot not_root;
        CHECK(one_line_with(writer.commit(1), checkpoints, "Permission denied"));
    }
    ::chmod(checkpoints.c_str(), 0777);
    CHECK(find_checkpoints(folder.path).size() == 2);
}

TEST_CASE("checkpoints that may not be read are not taken for none") {
    TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    CHECK(find_checkpoints(folder.path).empty());
    CheckpointWriter(folder.path, 1).commit(1);
    for (const std::string& closed : {checkpoints, folder.path}) {
        ::chmod(closed.c_str(), 0);
        const NotRoot not_root;
        CHECK(one_line_with(error_of([&] { find_checkpoints(folder.path); }), checkpoints, "Permission denied"));
    }
    for (const std::string& path : {folder.path, checkpoints}) ::chmod(path.c_str(), 0777);
}

// What is there could not be seen: whoever takes that for an empty folder tells people to delete the run.
TEST_CASE("a folder of checkpoints that cannot be read is not taken for none") {
    const TempFolder folder;
    const std::string checkpoints = folder / "checkpoints";
    std::filesystem::create_symlink("checkpoints", checkpoints);
    CHECK(one_line_with(error_of([&] { find_checkpoints(folder.path); }), checkpoints, "Too many levels"));
    std::filesystem::remove(checkpoints);
    spit(checkpoints, "a file");
    CHECK(find_checkpoints(folder.path).empty());
}

TEST_CASE("what cannot be looked for is not taken for missing") {
    const TempFolder folder;
    const std::string link = folder / "link";
    std::filesystem::create_symlink("link", link);
    CHECK(one_line_with(error_of([&] { is_there(link); }), "cannot open " + link, "Too many levels"));
    std::filesystem::create_symlink(folder / "lost", folder / "generation_config.json");
    CHECK(one_line_with(error_of([&] { is_there(folder / "generation_config.json"); }), "this link leads nowhere"));
    CHECK(is_there(folder.path));
    for (const std::string& nothing : {folder / "file", folder / "a/b", folder / std::string(300, 'x'), std::string()})
        CHECK_FALSE(is_there(nothing));
}

TEST_CASE("text files are read whole, also from a pipe") {
    TempFolder folder;
    write_text_file(folder / "text", "one\ntwo");
    CHECK(read_text_file(folder / "text") == "one\ntwo");
    CHECK(one_line_with(error_of([&] { read_text_file(folder / "none"); }), folder / "none", "No such file"));
    CHECK(one_line_with(error_of([&] { read_text_file(folder.path); }), "is a folder"));

    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    REQUIRE(::write(ends[1], "piped", 5) == 5);
    ::close(ends[1]);
    CHECK(read_text_file(concat("/dev/fd/", ends[0])) == "piped");
    CHECK(one_line_with(error_of([] { read_text_file("/proc/self/mem"); }), "cannot read /proc/self/mem"));
    ::close(ends[0]);
}

TEST_CASE("where a process may have no more open files, the error says what helps") {
    const TempFolder folder;
    const std::string path = folder / "file";
    spit(path, "text");
    rlimit before;
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit none{0, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
    const std::string reading = error_of([&] { read_text_file(path); });
    const std::string writing = error_of([&] { write_text_file(path, ""); });
    ::setrlimit(RLIMIT_NOFILE, &before);
    CHECK(one_line_with(reading, path, "Too many open files", "ulimit -n"));
    CHECK(one_line_with(writing, path, "Too many open files", "ulimit -n"));
}

TEST_CASE("make_folder makes parents and refuses a file") {
    TempFolder folder;
    make_folder(folder / "a/b/c");
    make_folder(folder / "a/b/c");
    CHECK(std::filesystem::is_directory(folder / "a/b/c"));
    spit(folder / "file", "");
    CHECK(one_line_with(error_of([&] { make_folder(folder / "file"); }), folder / "file"));
    CHECK(one_line_with(error_of([&] { make_folder(folder / "file/x"); }), folder / "file/x",
                        folder / "file" + " is not a folder"));
    std::filesystem::create_symlink("gone", folder / "link");
    CHECK(one_line_with(error_of([&] { make_folder(folder / "link/x"); }), folder / "link/x",
                        folder / "link" + " is a link to gone, which does not exist"));
    CHECK(one_line_with(error_of([&] { sync_folder(folder / "none"); }), folder / "none"));
}

TEST_CASE("a folder is listed by name, and one that cannot be read is one clear line") {
    const TempFolder folder;
    for (const char* name : {"b", "a", ".c"}) spit(folder / name, "");
    CHECK(list_folder(folder.path) == std::vector<std::filesystem::path>{folder / ".c", folder / "a", folder / "b"});
    CHECK(error_of([&] { list_folder(folder / "none"); }) ==
          "cannot read folder " + folder / "none" + ": No such file or directory");
    CHECK(error_of([&] { list_folder(folder / "a"); }) == "cannot read folder " + folder / "a" + ": Not a directory");
}
