// core/error.cu: messages, and the checks behind cudaCheck, cublasCheck, div_exact, narrow.
#include "core/core.h"

#include <cublasLt.h>

#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>

std::string joined(std::initializer_list<Printable> parts) {
    std::ostringstream text;
    for (const Printable& part : parts) {
        switch (part.kind) {
            case Printable::Kind::text: text << part.text; break;
            case Printable::Kind::character: text << part.character; break;
            case Printable::Kind::integer: text << part.integer; break;
            case Printable::Kind::natural: text << part.natural; break;
            case Printable::Kind::real: text << part.real; break;
            case Printable::Kind::address: text << part.address; break;
            case Printable::Kind::tensor: text << *part.tensor; break;
        }
    }
    return text.str();
}

std::string format(const char* pattern, ...) {
    va_list parts, again;
    va_start(parts, pattern);
    va_copy(again, parts);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, parts)), ' ');
    std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    va_end(parts);
    return text;
}

std::string comma_list(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
    return text;
}

namespace {

// A value of thousands of characters, as "$(cat file)" in the place of a file's name, would hide what is wrong with it:
// of a long part of a line its beginning and its end are shown. An explanation that is passed on as one part is shorter
// than kMost.
std::string shortened(const std::string& part) {
    constexpr size_t kMost = 2000, kBegin = 400, kEnd = 150;
    if (part.size() <= kMost) return part;
    const auto character_at = [&](size_t i) {  // where the character of UTF-8 begins that has byte i
        while (i > 0 && (part[i] & 0xc0) == 0x80) --i;
        return i;
    };
    return part.substr(0, character_at(kBegin)) + " ... " + part.substr(character_at(part.size() - kEnd));
}

// An error is one line, also where a value has line ends, as "$(ls)" in the place of a file's name has them. Of what a
// broken file holds, a zero byte would end the line, and others change the colours of a terminal.
std::string without_control_characters(const std::string& part) {
    std::string text;
    for (const char c : part) {
        const auto code = static_cast<unsigned char>(c);
        if (c == '\n') text += "\\n";
        else if (c == '\r') text += "\\r";
        else if ((code < 32 && c != '\t') || code == 127) text += format("\\x%02x", code);
        else text += c;
    }
    return text;
}

}  // namespace

void fail_with(std::initializer_list<Printable> parts) {
    std::string line;
    for (const Printable& part : parts) line += without_control_characters(shortened(joined({part})));
    throw Error(line);
}

void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
    if (status == cudaSuccess) return;
    std::string hint;
    if (status == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total_bytes = 0;
        if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess)
            hint = concat("; the device has ", free_bytes >> 20, " MiB free of ", total_bytes >> 20,
                          " MiB: end what else uses it, or make the run smaller (--plan shows what it takes)");
    }
    // Clears the error, so that the next check does not report it again. (One that ends CUDA in this process
    // stays: an illegal address, for example.)
    cudaGetLastError();
    fail("CUDA: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ") from ", expression, " at ", file, ":",
         line, hint);
}

void cublas_check(int status, const char* expression, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail("cuBLASLt: status ", status, " (", cublasLtGetStatusString(static_cast<cublasStatus_t>(status)), ") from ",
         expression, " at ", file, ":", line);
}

void cuda_check_launch(const char* file, int line) {
#ifdef COUNT_BYTES
    cuda_cpu::count_launch(nullptr, 0, 0);
#endif
    static const bool blocking = std::getenv("LAUNCH_BLOCKING") != nullptr;
    cuda_check(cudaGetLastError(), "kernel launch", file, line);
    if (!blocking) return;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;  // a kernel that is only recorded does not run
    cuda_check(cudaStreamIsCapturing(device().stream, &capturing), "kernel launch", file, line);
    if (capturing == cudaStreamCaptureStatusNone)
        cuda_check(cudaDeviceSynchronize(), "the kernel launched just before", file, line);
}

int64_t div_exact(int64_t a, int64_t b, const char* what) {
    check(b > 0 && a % b == 0, what, ": ", a, " cannot be divided evenly by ", b);
    return a / b;
}

int narrow(int64_t value, const char* what) {
    check(value >= 0 && value <= INT_MAX, what, " is ", value, ": here it must be from 0 to ", INT_MAX);
    return static_cast<int>(value);
}
