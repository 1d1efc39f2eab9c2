// Fuzzes the safetensors and index parsers: whatever the bytes, a result that may be read in full, or one clear Error.
//
//   run:   make fuzz     (clang++ -fsanitize=fuzzer,address,undefined)
//
// The first byte chooses the parser. libFuzzer's own mutations hardly ever keep the header's length right, so that
// nothing behind it would be tested: half of ours mutate header and data apart and put the right length in front.
#include <cstdlib>
#include <cstring>

#include "io/io.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t bytes, size_t max_bytes);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t bytes) {
    if (bytes == 0) return 0;
    // An allocation of its own, so that the address sanitizer sees the first byte read beyond it.
    const std::vector<uint8_t> file(input + 1, input + bytes);
    try {
        if (input[0] % 4 == 0) {
            parse_safetensors_index({reinterpret_cast<const char*>(file.data()), file.size()}, "index");
            return 0;
        }
        const SafetensorsView view = parse_safetensors(file.data(), file.size(), "file");
        size_t covered_bytes = 0;
        for (const auto& [name, tensor] : view.tensors) {
            const std::vector<uint8_t> copy(tensor.data, tensor.data + tensor.bytes);  // every byte can be read
            covered_bytes += copy.size();
            const bool floats = tensor.dtype == "F32" || tensor.dtype == "F16" || tensor.dtype == "BF16";
            if (floats && tensor.floats().size() != static_cast<size_t>(tensor.n())) std::abort();
        }
        uint64_t header_bytes;
        std::memcpy(&header_bytes, file.data(), 8);
        if (covered_bytes != file.size() - 8 - header_bytes) std::abort();  // the tensors tile the data
    } catch (const Error& error) {  // anything else ends the run and is a finding
        const std::string message = error.what();
        if (message.empty() || message.size() > 1000 || message.find('\n') != std::string::npos) std::abort();
    }
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t bytes, size_t max_bytes, unsigned int seed) {
    static const std::string sample_header =
        R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
        R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}} )";
    std::string header = sample_header, tensors(14, 'x');
    uint64_t header_bytes = 0;
    if (seed % 2 == 0) return LLVMFuzzerMutate(data, bytes, max_bytes);
    if (bytes >= 9) {
        std::memcpy(&header_bytes, data + 1, 8);
        if (header_bytes <= bytes - 9) {
            header.assign(reinterpret_cast<char*>(data) + 9, header_bytes);
            tensors.assign(reinterpret_cast<char*>(data) + 9 + header_bytes, bytes - 9 - header_bytes);
        }
    }
    std::string& part = seed % 8 == 1 ? tensors : header;
    const size_t part_bytes = part.size();
    part.resize(part_bytes + 64);
    part.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(part.data()), part_bytes, part.size()));
    header_bytes = header.size();
    std::string file = "\1" + std::string(reinterpret_cast<char*>(&header_bytes), 8) + header + tensors;
    if (file.size() > max_bytes) return LLVMFuzzerMutate(data, bytes, max_bytes);
    std::memcpy(data, file.data(), file.size());
    return file.size();
}
