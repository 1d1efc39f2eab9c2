#!/bin/sh
# Makes test/golden/number_formats.bin: what NVIDIA's own headers answer for chosen conversions between float and the
# 16- and 8-bit formats. Needs g++ and the CUDA Toolkit's headers, no GPU (their host code is compiled).
#
#   run:   test/golden/make_number_formats.sh [/usr/local/cuda/include]
#
# The file, little-endian, in this order; test/test_number_formats.cu reads it:
#   uint32 n, then n times   { uint32 float bits; uint16 bfloat16, half; uint8 e4m3, e5m2, each saturated and not }
#   uint32 m, then m times   { uint16 code; uint16 unused; uint32 half to float; uint32 bfloat16 to float }
#   256 times                { uint16 e4m3 to half, e5m2 to half }
set -eu
include=${1:-/usr/local/cuda/include}
[ -e "$include/cuda_fp8.h" ] || {
    echo "make_number_formats.sh: there is no $include/cuda_fp8.h: give the folder of the CUDA Toolkit's headers" >&2
    exit 2
}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat > "$work/make.cpp" <<'CPP'
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

template <class T>
static void write(FILE* file, T value) {
    fwrite(&value, sizeof value, 1, file);
}

int main(int, char** argv) {
    uint64_t state = 20240520;
    const auto random = [&] {  // xorshift64*
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return uint32_t((state * 2685821657736338717ull) >> 32);
    };

    std::vector<uint32_t> floats;
    // Every sign and exponent, with mantissas on, just below and just above the ties of each format.
    for (uint32_t head = 0; head < 512; ++head)
        for (uint32_t mantissa : {0x0u, 0x1u, 0x7fffffu, 0x400000u, 0x8000u, 0x18000u, 0x17fffu, 0x18001u, 0x1000u,
                                  0x3000u, 0x80000u, 0x280000u, 0x280001u, 0x200000u, 0x600000u, 0x5fffffu})
            floats.push_back(head << 23 | mantissa);
    // Where the small formats live: few mantissa bits set, so that many are ties, subnormal ones included.
    while (floats.size() < 12000) {
        const uint32_t exponent = 127 - 30 + random() % 50, kept = random() % 13;
        floats.push_back((random() & 1) << 31 | exponent << 23 | (random() & (0x7fffff & ~(0x7fffffu >> kept))));
    }
    while (floats.size() < 13000) floats.push_back(random());

    FILE* file = fopen(argv[1], "wb");
    write(file, uint32_t(floats.size()));
    for (uint32_t bits : floats) {
        const float x = std::bit_cast<float>(bits);
        write(file, bits);
        write(file, __bfloat16_as_ushort(__float2bfloat16(x)));
        write(file, __half_as_ushort(__float2half(x)));
        write(file, __nv_fp8_e4m3(x).__x);
        write(file, __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3));
        write(file, __nv_fp8_e5m2(x).__x);
        write(file, __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2));
    }
    write(file, uint32_t(65536 / 32));
    for (uint32_t i = 0; i < 65536; i += 32) {
        const uint16_t code = i | (random() & 31);
        write(file, code);
        write(file, uint16_t(0));
        write(file, std::bit_cast<uint32_t>(__half2float(__ushort_as_half(code))));
        write(file, std::bit_cast<uint32_t>(__bfloat162float(__ushort_as_bfloat16(code))));
    }
    for (uint32_t code = 0; code < 256; ++code) {
        write(file, __nv_cvt_fp8_to_halfraw(code, __NV_E4M3).x);
        write(file, __nv_cvt_fp8_to_halfraw(code, __NV_E5M2).x);
    }
    return fclose(file);
}
CPP
g++ -std=c++20 -O1 -I"$include" "$work/make.cpp" -o "$work/make"
"$work/make" "$here/number_formats.bin"
ls -l "$here/number_formats.bin"
