// What a run leaves behind for people and their tools: log.csv and TensorBoard events.
//
// Both are append-only and unbuffered: after a kill -9 every finished step is there, and at most the last line or
// record is torn. Readers skip a torn end; a resumed run cuts it off log.csv, and begins a new file of events.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "core/host_name.h"
#include "io/io.h"
#include "io/list_folder.h"

static_assert(std::endian::native == std::endian::little, "event files are little-endian");

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// log.csv

struct Column {
    const char* name;
    std::optional<double> LogRow::*value;
    std::chars_format format;
    int digits;
};

// 9 significant digits identify a float32; the timings are for reading.
constexpr Column columns[] = {
    {"loss", &LogRow::loss, std::chars_format::general, 9},
    {"val_loss", &LogRow::val_loss, std::chars_format::general, 9},
    {"lr", &LogRow::lr, std::chars_format::general, 9},
    {"grad_norm", &LogRow::grad_norm, std::chars_format::general, 9},
    {"loss_scale", &LogRow::loss_scale, std::chars_format::general, 9},
    {"tokens_per_s", &LogRow::tokens_per_s, std::chars_format::fixed, 1},
    {"mfu", &LogRow::mfu, std::chars_format::fixed, 4},
    {"step_ms", &LogRow::step_ms, std::chars_format::fixed, 3},
};

std::string csv_header() {
    std::string header = "step,tokens";
    for (const Column& column : columns) header += std::string(",") + column.name;
    return header + "\n";
}

std::string format_row(const LogRow& row) {
    std::string line = std::to_string(row.step) + "," + std::to_string(row.tokens);
    for (const Column& column : columns) {
        line += ",";
        const std::optional<double>& value = row.*column.value;
        if (!value) continue;
        char text[400];  // 1e308 in fixed notation has 309 digits
        const auto end = std::to_chars(text, text + sizeof text, *value, column.format, column.digits).ptr;
        line.append(text, end);
    }
    return line + "\n";
}

// Takes the field up to the next comma off the front of `line`.
std::string_view next_field(std::string_view& line) {
    const size_t comma = line.find(',');
    const std::string_view field = line.substr(0, comma);
    line = comma == std::string_view::npos ? std::string_view() : line.substr(comma + 1);
    return field;
}

template <class T>
T parse_number(std::string_view field, const std::string& place) {
    T value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    check(error == std::errc() && end == field.data() + field.size(), place, ": \"", field.substr(0, 40),
          "\" is not a number; repair the file or move it away");
    return value;
}

LogRow parse_row(std::string_view line, const std::string& place) {
    LogRow row;
    row.step = parse_number<int64_t>(next_field(line), place);
    row.tokens = parse_number<int64_t>(next_field(line), place);
    for (const Column& column : columns) {
        const std::string_view field = next_field(line);
        if (!field.empty()) row.*column.value = parse_number<double>(field, place);
    }
    return row;
}

// Calls visit(row, line with its newline) for every whole row of a log.
template <class Visit>
void for_each_row(const std::string& path, Visit&& visit) {
    const std::string text = read_regular_file(path);
    const std::string header = csv_header();
    size_t begin = 0;
    for (int64_t number = 1; begin < text.size(); number++) {
        const size_t end = text.find('\n', begin);
        if (end == std::string::npos) break;  // torn by a kill
        const std::string_view line = std::string_view(text).substr(begin, end + 1 - begin);
        begin = end + 1;
        if (number == 1) {
            check(line == header, path, ": its first line is not the header of our log; move the file away");
            continue;
        }
        visit(parse_row(line.substr(0, line.size() - 1), concat(path, ", line ", number)), line);
    }
}

int open_to_append(const std::string& path, int flags) {
    return uninterrupted([&] { return ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | flags, 0666); });
}

// All of the bytes or none: what a full disk took of them is cut off again, so that they can be written later.
void append_whole(int fd, std::string_view bytes, const std::string& path) {
    const off_t before = ::lseek(fd, 0, SEEK_END);
    try {
        write_all(fd, bytes.data(), bytes.size(), path);
    } catch (const Error&) {
        if (before >= 0 && ::ftruncate(fd, before) != 0)
            fail("cannot truncate ", path, " after its last complete row: ", std::strerror(errno));
        throw;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// TensorBoard: a file of records, each an Event protobuf, framed as
//     uint64 length | uint32 masked_crc(length) | event | uint32 masked_crc(event)

// CRC32C (Castagnoli): the remainder of the message, as a polynomial over bits, divided by 0x82f63b78 (bit-reversed).
constexpr std::array<uint32_t, 256> make_crc_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
        table[byte] = crc;
    }
    return table;
}

uint32_t masked_crc(std::string_view bytes) {
    static constexpr std::array<uint32_t, 256> table = make_crc_table();
    uint32_t crc = 0xffffffffu;
    for (unsigned char byte : bytes) crc = (crc >> 8) ^ table[(crc ^ byte) & 0xff];
    crc = ~crc;
    // A file may hold the CRC of its own bytes: the mask keeps a CRC of CRCs from being degenerate.
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

// The bytes of a number as they lie in memory.
template <class T>
std::string raw(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// Protobuf: every field is a varint key (field number * 8 + wire type) and a value: a varint (wire type 0), 8 bytes
// (1), a length and that many bytes (2), or 4 bytes (5).
std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
    return bytes + static_cast<char>(value);
}
std::string int_field(int field, int64_t value) {
    return varint(static_cast<uint64_t>(field * 8)) + varint(static_cast<uint64_t>(value));
}
std::string double_field(int field, double value) { return varint(static_cast<uint64_t>(field * 8 + 1)) + raw(value); }
std::string bytes_field(int field, std::string_view bytes) {
    return varint(static_cast<uint64_t>(field * 8 + 2)) + varint(bytes.size()).append(bytes);
}
std::string float_field(int field, float value) { return varint(static_cast<uint64_t>(field * 8 + 5)) + raw(value); }

// message Event { double wall_time = 1; int64 step = 2; oneof what { string file_version = 3; Summary summary = 5;
//                 SessionLog session_log = 7; } }
std::string event(int64_t step, const std::string& what) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return double_field(1, static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec)) +
           int_field(2, step) + what;
}

std::string record(const std::string& event) {
    const std::string length = raw(static_cast<uint64_t>(event.size()));
    return length + raw(masked_crc(length)) + event + raw(masked_crc(event));
}

// TensorBoard reads the files of a folder in the order of their names, which begin with a time. A resumed run must come
// after the run it continues, even if both start in the same second or the clock was set back.
int64_t time_for_name(const std::string& folder, const std::string& prefix) {
    int64_t time = std::time(nullptr);
    for (const std::filesystem::path& path : list_folder(folder)) {
        const std::string name = path.filename().string();
        int64_t other = 0;
        if (name.starts_with(prefix)) std::from_chars(name.data() + prefix.size(), name.data() + name.size(), other);
        if (other < 9'999'999'999) time = std::max(time, other + 1);  // ten digits: names stay sortable
    }
    return time;
}

}  // namespace

CsvLog::CsvLog(const std::string& path, int64_t resume_step) : path_(path) {
    std::string kept = csv_header();
    if (resume_step >= 0 && is_there(path)) {
        for_each_row(path, [&](const LogRow& row, std::string_view line) {
            if (row.step <= resume_step) kept += line;
        });
    }
    write_text_file(path, kept);
    fd_ = open_to_append(path, 0);
    check(fd_ >= 0, "cannot open ", path, ": ", std::strerror(errno));
}

CsvLog::~CsvLog() { ::close(fd_); }

void CsvLog::write(const LogRow& row) { append_whole(fd_, format_row(row), path_); }

std::vector<LogRow> read_csv_log(const std::string& path) {
    std::vector<LogRow> rows;
    for_each_row(path, [&](const LogRow& row, std::string_view) { rows.push_back(row); });
    return rows;
}

TensorBoardLog::TensorBoardLog(const std::string& folder, int64_t resume_step) {
    make_folder(folder);
    const std::string host = host_name(), prefix = "events.out.tfevents.";
    for (int64_t time = time_for_name(folder, prefix); fd_ < 0; time++) {
        const std::string name =
            prefix + format("%010lld.%s.%d", static_cast<long long>(time), host.c_str(), ::getpid());
        path_ = (std::filesystem::path(folder) / name).string();
        fd_ = open_to_append(path_, O_CREAT | O_EXCL);
        check(fd_ >= 0 || errno == EEXIST, "cannot create ", path_, ": ", std::strerror(errno));
    }
    // SessionLog { status = START }: forget what older files of this folder say of steps from this one on.
    const std::string first = record(event(0, bytes_field(3, "brain.Event:2"))) +
                              record(event(std::max<int64_t>(resume_step, -1) + 1, bytes_field(7, int_field(1, 1))));
    try {
        write_all(fd_, first.data(), first.size(), path_);
    } catch (const Error&) {  // a full disk: leave no empty file behind
        ::close(fd_);
        ::unlink(path_.c_str());
        throw;
    }
}

TensorBoardLog::~TensorBoardLog() { ::close(fd_); }

void TensorBoardLog::scalar(const std::string& tag, int64_t step, double value) {
    // Summary { repeated Value value = 1; }  Value { string tag = 1; float simple_value = 2; }
    const std::string summary = bytes_field(1, bytes_field(1, tag) + float_field(2, static_cast<float>(value)));
    const std::string bytes = record(event(step, bytes_field(5, summary)));
    append_whole(fd_, bytes, path_);
}
