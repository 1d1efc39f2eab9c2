// dev/program.h: what the programs of this folder share: how they begin and end, medians, and the colours of ranks.
#pragma once

#include "io/command_line.h"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

// What main() does: runs the program, and gives the exit status, which is 2 after an Error, printed in one line.
template <class F>
int run_program(const char* name, F&& run) {
    try {
        run();
        check_output();
        return 0;
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "%s: %s\n", name, error.what());
        return 2;
    }
}

// The same for a program with flags, which are read first. Errors name the program as it was started.
template <class F>
int run_program(const char* name, CommandLine& line, int argc, char** argv, F&& run) {
    return run_program(name, [&] {
        const std::string example = line.flags().at(1) + " VALUE";
        line.parse({argv[0], {}, example.c_str()}, argc, argv, [] {});
        run();
    });
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Of a rank, in pictures.
inline Canvas::Color color_of(int rank) {
    constexpr Canvas::Color kColors[] = {{110, 165, 215}, {245, 165, 85},  {120, 190, 120}, {205, 130, 170},
                                         {185, 185, 120}, {140, 130, 205}, {110, 190, 190}, {200, 150, 130}};
    return kColors[rank % 8];
}

}  // namespace
