// dev/arguments.h: numbers on the command lines of the programs of this folder.
#pragma once

#include "io/io.h"

#include <cstdint>

namespace {

// The value of a flag that counts something; Error, in one line, for what is not a whole number of at least `least`.
inline int64_t parse_count(const std::string& flag, const std::string& text, int64_t least = 1) {
    const int64_t n = parse_whole_number(flag, text, INT32_MAX);
    check(n >= least, flag, ' ', text, ": give a whole number of at least ", least);
    return n;
}

}  // namespace
