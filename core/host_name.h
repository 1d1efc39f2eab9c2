// core/host_name.h: the name of this machine. Apart from core.h because few files need it.
#pragma once

#include <unistd.h>

#include <string>

inline std::string host_name() {
    char name[256] = "localhost";
    ::gethostname(name, sizeof name - 1);
    return name;
}
