// io/lock.h: a file that one process at a time may write. Apart from io.h because few files need it.
#pragma once

#include "core/core.h"

// An open file, locked. The lock is that of flock(2): the system takes it from a process when it ends, however it ends,
// so that none is ever left behind. It keeps out only those that ask for it, too.
class LockedFile {
  public:
    // others: another process has it. unknown: the file system has no such locks. A pipe or a device keeps nothing that
    // two could mix up: each process that opens it has it (ours).
    enum class Lock { ours, others, unknown };
    // Opens the file, and makes it where it is missing; flags: O_RDWR and others of open(2). Waits for no one.
    LockedFile(const std::string& path, int flags);
    ~LockedFile();
    LockedFile(const LockedFile&) = delete;
    LockedFile& operator=(const LockedFile&) = delete;
    int fd() const { return fd_; }
    Lock lock() const { return lock_; }
    const std::string& path() const { return path_; }
    // Takes its name away while it is still locked: whoever opens the name from now on makes a new file.
    void remove();

  private:
    std::string path_;
    int fd_ = -1;
    Lock lock_ = Lock::ours;
};
