// io/lock.cu: a file that one process at a time may write.
//
// Between the opening of a file and its lock, the process that had it may remove it: then the lock is that of a file
// without a name, which keeps nobody out. So the name is looked up once more when the lock is there:
//
//   repeat   open, lock   until the name is still that of the file that was opened
#include "io/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "io/io.h"

namespace {

// Do path and fd name the same file? errno is 0 where both could be looked at.
bool is_same_file(int fd, const std::string& path) {
    struct stat ours, there;
    errno = 0;
    return ::fstat(fd, &ours) == 0 && ::stat(path.c_str(), &there) == 0 && ours.st_ino == there.st_ino &&
           ours.st_dev == there.st_dev;
}

LockedFile::Lock lock_of(int fd, const std::string& path) {
    struct stat status;
    if (::fstat(fd, &status) == 0 && !S_ISREG(status.st_mode)) return LockedFile::Lock::ours;
    if (uninterrupted([&] { return ::flock(fd, LOCK_EX | LOCK_NB); }) == 0) return LockedFile::Lock::ours;
    if (errno == EWOULDBLOCK) return LockedFile::Lock::others;
    check(errno == ENOLCK || errno == ENOSYS || errno == EOPNOTSUPP || errno == EINVAL, "cannot lock ", path, ": ",
          std::strerror(errno));
    return LockedFile::Lock::unknown;
}

}  // namespace

LockedFile::LockedFile(const std::string& path, int flags) : path_(path) {
    constexpr int kMostTries = 1000;  // some file systems give a file another number each time that it is looked at
    for (int i = 0; i < kMostTries; ++i) {
        fd_ = uninterrupted([&] { return ::open(path.c_str(), flags | O_CREAT | O_CLOEXEC, 0666); });
        check(fd_ >= 0, "cannot open ", path, " to write: ", std::strerror(errno),
              errno == ENOENT   ? "; make its folder first"
              : errno == EACCES ? "; choose another one or change its permissions"
                                : "");
        try {
            lock_ = lock_of(fd_, path);
        } catch (const Error&) {
            ::close(fd_);
            throw;
        }
        if (lock_ == Lock::others || is_same_file(fd_, path)) return;
        const int error = errno;
        ::close(fd_);
        check(error == 0 || error == ENOENT || error == ESTALE, "cannot lock ", path, ": ", std::strerror(error));
    }
    fail("cannot lock ", path, ": each time that it was looked up it was another file; choose another one");
}

LockedFile::~LockedFile() { ::close(fd_); }

void LockedFile::remove() { ::unlink(path_.c_str()); }
