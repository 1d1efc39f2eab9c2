// dev/tokenize.cu: encodes the documents of a file, for dev/compare_tokenizers.py.
//
//   tokenize TOKENIZER.json DOCUMENTS IDS    DOCUMENTS: for each document its bytes, as uint32, and the bytes;
//                                            IDS, written: for each document the number of ids, and the ids, as uint32
// It prints "ready", how many documents there are, how many of them do not come back from their ids, and how many
// become another text where their ids are decoded one by one. Then, for every line that it reads, it encodes all
// documents on one thread, and prints the seconds that this took.
#include "dev/program.h"

#include <cstring>
#include <iostream>

namespace {

std::vector<std::string_view> documents_of(const MappedFile& file) {
    std::vector<std::string_view> documents;
    for (size_t i = 0; i < file.bytes();) {
        uint32_t bytes = 0;
        check(i + sizeof bytes <= file.bytes(), file.path(), " ends within a length");
        std::memcpy(&bytes, file.data() + i, sizeof bytes);
        i += sizeof bytes;
        check(bytes <= file.bytes() - i, file.path(), " ends within a document");
        documents.emplace_back(reinterpret_cast<const char*>(file.data()) + i, bytes);
        i += bytes;
    }
    return documents;
}

// Pushes the tokens one by one, as they are generated: the same text?
bool streams_alike(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, const std::string& decoded) {
    StreamDecoder stream(tokenizer);
    std::string text;
    for (int32_t id : ids) text += stream.push(id);
    return text + stream.finish() == decoded;
}

void run(const std::string& tokenizer_json, const std::string& documents_path, const std::string& ids_path) {
    const auto tokenizer = load_tokenizer(tokenizer_json);
    const MappedFile file(documents_path);
    const std::vector<std::string_view> documents = documents_of(file);
    AtomicFile out(ids_path);
    size_t n_changed = 0, n_streamed_otherwise = 0;
    for (std::string_view document : documents) {
        const std::vector<int32_t> ids = tokenizer->encode(document);
        const std::string decoded = tokenizer->decode(ids);
        n_changed += decoded != document;
        n_streamed_otherwise += !streams_alike(*tokenizer, ids, decoded);
        const uint32_t n = static_cast<uint32_t>(ids.size());
        out.write(&n, sizeof n);
        out.write(ids.data(), ids.size() * sizeof(int32_t));
    }
    out.commit();
    std::printf("ready %zu changed %zu streamed otherwise %zu\n", documents.size(), n_changed, n_streamed_otherwise);
    std::fflush(stdout);

    for (std::string line; std::getline(std::cin, line);) {
        const double start = seconds_now();
        for (std::string_view document : documents) tokenizer->encode(document);
        std::printf("%.6f\n", seconds_now() - start);
        std::fflush(stdout);
    }
}

}  // namespace

int main(int argc, char** argv) {
    return run_program("tokenize", [&] {
        check(argc == 4, "usage: tokenize TOKENIZER.json DOCUMENTS IDS");
        run(argv[1], argv[2], argv[3]);
    });
}
