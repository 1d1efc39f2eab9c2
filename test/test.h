// test/test.h: what every test file includes. Catch2, version 2 or 3, and the helpers of test/reference.cu.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
// Version 2's name for what version 3 calls ContainsSubstring.
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif

#include "core/core.h"

// What a test reads back from the device is part of its result: `make test` compares its bits between all runs
// (test/run.sh).
void record_bits(const void* data, size_t bytes);

// Leaves a test that cannot run here; it counts as skipped:   SKIP_TEST("needs a GPU");
void record_skipped(const std::string& reason);
#define SKIP_TEST(reason)       \
    do {                        \
        record_skipped(reason); \
        return;                 \
    } while (false)
