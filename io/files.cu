// Files: mapping them in, and writing them so that nobody ever sees half of one.
//
// An AtomicFile takes four steps, and a run that is killed between any two of them leaves a whole file behind:
//
//   write   PATH.tmp          whoever opens PATH still gets the old file
//   fsync   PATH.tmp          the new bytes are on the disk before the name points at them
//   rename  PATH.tmp -> PATH  one atomic step of the file system: before it the old file, after it the new one
//   fsync   the folder        the rename itself survives a power cut
//
// A killed run may leave PATH.tmp; the next one overwrites it, so there is never more than one.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>

#include "io/io.h"
#include "io/list_folder.h"

namespace {

constexpr size_t buffer_bytes = 1 << 20;  // a system call costs about 1 us, so that it is lost in writing 1 MiB

std::string reason(int error) {
    return concat(std::strerror(error), error == EMFILE ? "; let a process have more of them (ulimit -n)" : "");
}

// The reason why something cannot be written, and what helps against it.
std::string reason_to_write(int error) {
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    const bool place = error == ENOENT || error == ENOTDIR || error == EACCES || error == EPERM || error == EROFS;
    return concat(reason(error), full    ? "; free some space or choose a folder on another disk"
                                 : place ? "; choose a folder that exists and can be written to"
                                         : "");
}

// Opens a file for reading. Only regular files when `regular`: open() of a pipe would wait for its writer.
int open_to_read(const std::string& path, bool regular, struct stat& status) {
    if (::stat(path.c_str(), &status) != 0) {
        fail("cannot open ", path, ": ", reason(errno), errno == ENOENT ? "; check the path" : "");
    }
    check(!S_ISDIR(status.st_mode), "cannot read ", path, ": it is a folder, a file is needed");
    check(!regular || S_ISREG(status.st_mode), "cannot read ", path, ": it is not a regular file");
    const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
    check(fd >= 0, "cannot open ", path, ": ", reason(errno));
    return fd;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    struct stat status;
    const int fd = open_to_read(path, true, status);
    bytes_ = static_cast<size_t>(status.st_size);
    void* mapped = nullptr;
    if (bytes_ > 0) mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0);  // mmap refuses zero bytes
    const int error = errno;
    ::close(fd);  // the mapping stays
    check(mapped != MAP_FAILED, "cannot map ", path, " (", human_bytes(static_cast<double>(bytes_)),
          "): ", reason(error));
    data_ = static_cast<const unsigned char*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<unsigned char*>(data_), bytes_);
}

void write_all(int fd, const void* data, size_t bytes, const std::string& path) {
    auto next = static_cast<const char*>(data);
    size_t left_bytes = bytes;
    while (left_bytes > 0) {
        // Ctrl-C ends the step, not the file.
        const ssize_t written_bytes = uninterrupted([&] { return ::write(fd, next, left_bytes); });
        if (written_bytes < 0) fail("cannot write ", left_bytes, " more bytes to ", path, ": ", reason_to_write(errno));
        next += written_bytes;
        left_bytes -= static_cast<size_t>(written_bytes);
    }
}

int sync_to_disk(int fd) {
    return uninterrupted([&] { return ::fsync(fd); }) == 0 ? 0 : errno;
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
    check(!path.empty(), "cannot write a file without a name");
    // Renaming onto a device or a pipe would replace it by a plain file: /dev/null would be gone.
    struct stat status;
    if (::stat(path.c_str(), &status) == 0) {
        check(!S_ISDIR(status.st_mode), "cannot write ", path, ": it is a folder");
        check(S_ISREG(status.st_mode), "cannot write ", path, ": it is not a regular file");
    }
    constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC;
    fd_ = uninterrupted([&] { return ::open(temporary_.c_str(), kFlags, 0666); });
    check(fd_ >= 0, "cannot create ", temporary_, ": ", reason_to_write(errno));
}

AtomicFile::~AtomicFile() {
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
    check(fd_ >= 0, "write to ", path_, " after commit()");
    if (buffer_.size() + bytes > buffer_bytes) {
        write_all(fd_, buffer_.data(), buffer_.size(), path_);
        buffer_.clear();
    }
    if (bytes > buffer_bytes) {
        write_all(fd_, data, bytes, path_);
    } else {
        buffer_.append(static_cast<const char*>(data), bytes);
    }
}

void AtomicFile::overwrite(size_t offset, std::string_view text) {
    check(fd_ >= 0, "write to ", path_, " after commit()");
    write_all(fd_, buffer_.data(), buffer_.size(), path_);
    buffer_.clear();
    const off_t end = ::lseek(fd_, 0, SEEK_CUR);
    check(end >= 0 && offset + text.size() <= static_cast<size_t>(end), path_, ": bytes ", offset, " to ",
          offset + text.size(), " are to be overwritten, but only ", end, " have been written");
    const off_t there = ::lseek(fd_, static_cast<off_t>(offset), SEEK_SET);
    check(there >= 0, "cannot write ", path_, ": ", reason(errno));
    write_all(fd_, text.data(), text.size(), path_);
    const off_t back = ::lseek(fd_, end, SEEK_SET);
    check(back >= 0, "cannot write ", path_, ": ", reason(errno));
}

void AtomicFile::commit() {
    check(fd_ >= 0, "commit() of ", path_, " called twice");
    write_all(fd_, buffer_.data(), buffer_.size(), path_);
    buffer_.clear();
    // File systems that allocate late report a full disk only here.
    if (const int error = sync_to_disk(fd_)) fail("cannot write ", path_, " to the disk: ", reason_to_write(error));
    const int closed = ::close(std::exchange(fd_, -1));
    if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
        const int error = errno;
        ::unlink(temporary_.c_str());
        fail("cannot put ", temporary_, " in the place of ", path_, ": ", reason_to_write(error));
    }
    sync_folder(folder_of(path_));
}

namespace {

std::string read_text(const std::string& path, bool regular) {
    struct stat status;
    const int fd = open_to_read(path, regular, status);
    std::string text;
    std::vector<char> buffer(buffer_bytes);
    ssize_t got_bytes;
    while ((got_bytes = uninterrupted([&] { return ::read(fd, buffer.data(), buffer.size()); })) > 0)
        text.append(buffer.data(), static_cast<size_t>(got_bytes));
    const int error = errno;
    ::close(fd);
    check(got_bytes == 0, "cannot read ", path, ": ", reason(error));
    return text;
}

}  // namespace

std::string read_text_file(const std::string& path) { return read_text(path, false); }
std::string read_regular_file(const std::string& path) { return read_text(path, true); }

void write_text_file(const std::string& path, std::string_view text) {
    AtomicFile file(path);
    file.write(text);
    file.commit();
}

void make_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    for (std::filesystem::path part = path; error && part.has_relative_path(); part = part.parent_path()) {
        if (is_folder(part.string())) break;
        std::error_code none;
        check(!std::filesystem::exists(part, none), "cannot make the folder ", path, ": ", part.string(),
              " is not a folder");
        const std::filesystem::path meant = std::filesystem::read_symlink(part, none);
        check(none.value() != 0, "cannot make the folder ", path, ": ", part.string(), " is a link to ", meant.string(),
              ", which does not exist: make that first, or remove the link");
    }
    check(!error, "cannot make the folder ", path, ": ", reason_to_write(error.value()));
    const int status = ::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS);
    check(status == 0, "cannot write to the folder ", path, ": ", reason(errno),
          "; choose another one or change its permissions");
}

bool is_there(const std::string& path) {
    std::error_code error;
    const bool there = std::filesystem::exists(path, error);
    check(!error || error == std::errc::filename_too_long, "cannot open ", path, ": ", error.message());
    // As a cache of downloads has it that has lost a file: without a word, a model would have no end of its answers.
    check(there || !std::filesystem::is_symlink(path, error), path,
          ": this link leads nowhere: fetch the file, or remove the link");
    return there;
}
bool is_folder(const std::string& path) {
    std::error_code ignored;
    return std::filesystem::is_directory(path, ignored);
}

std::string folder_of(const std::string& path) {
    std::string folder = std::filesystem::path(path).parent_path().string();
    return folder.empty() ? "." : folder;
}
std::vector<std::filesystem::directory_entry> folder_entries(const std::string& folder, std::error_code& error) {
    std::vector<std::filesystem::directory_entry> entries;
    std::filesystem::directory_iterator entry(folder, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) entries.push_back(*entry);
    std::sort(entries.begin(), entries.end());
    return entries;
}
std::vector<std::filesystem::path> list_folder(const std::string& folder) {
    std::error_code error;
    const std::vector<std::filesystem::directory_entry> entries = folder_entries(folder, error);
    check(!error, "cannot read folder ", folder, ": ", error.message());
    return {entries.begin(), entries.end()};
}

void sync_folder(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(fd >= 0, "cannot open the folder ", path, ": ", reason(errno));
    const int error = sync_to_disk(fd);
    ::close(fd);
    // Some network and FUSE file systems cannot sync a folder and say EINVAL: there is nothing more that we could do.
    check(error == 0 || error == EINVAL || error == ENOTSUP, "cannot write the folder ", path,
          " to the disk: ", reason(error));
}

// ---------------------------------------------------------------------------------------------------------------------
// Standard input, output and error

void keep_standard_numbers() {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})  // open() takes the lowest number that is free
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // read() and write() fail, as before
}

const char* reason_of(const std::exception& error) {
    return dynamic_cast<const std::bad_alloc*>(&error) ? "the host has too little memory" : error.what();
}

void end_with_reason() {
    std::set_terminate([] {
        try {
            if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
        } catch (const std::exception& error) {
            std::fflush(stdout);
            std::fprintf(stderr, "%s\n", reason_of(error));
            std::_Exit(2);
        } catch (...) {  // is none of ours
        }
        std::abort();
    });
    std::signal(SIGXFSZ, SIG_IGN);  // a file that hits a size limit is a failed write, with its own message
    std::signal(SIGBUS, [](int) {
        constexpr std::string_view text = "a file that was being read has been shortened by another program\n";
        ::_exit(::write(STDERR_FILENO, text.data(), text.size()) < 0 ? 1 : 2);
    });
}

bool terminal_knows_escapes() {
    const char* const name = std::getenv("TERM");
    return !name || std::string_view(name) != "dumb";
}

void check_output() {
    check(std::fflush(stdout) == 0 && std::ferror(stdout) == 0, "the output could not be written (is the disk full?)");
}
