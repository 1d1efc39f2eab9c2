// log.csv, TensorBoard events and numbers for people.
//
//   run:   build/cpu/run_tests -# "[#test_log]"
#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <sstream>

#include "io/io.h"
#include "file_size_limit.h"
#include "temp_folder.h"
#include "test.h"
#include "training/training.h"

namespace {

const std::string header = "step,tokens,loss,val_loss,lr,grad_norm,loss_scale,tokens_per_s,mfu,step_ms\n";

LogRow row_of(int64_t step, std::optional<double> loss = {}) {
    LogRow row;
    row.step = step;
    row.tokens = 256 * step;
    row.loss = loss;
    return row;
}

// The definition of CRC32C, one bit at a time; its check value for "123456789" is e3069283.
uint32_t crc32c(const std::string& bytes) {
    uint32_t crc = 0xffffffff;
    for (unsigned char byte : bytes) {
        crc ^= byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82f63b78 & (0 - (crc & 1)));
    }
    return ~crc;
}

template <class T>
T take(std::string& bytes) {
    REQUIRE(bytes.size() >= sizeof(T));
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes.erase(0, sizeof value);
    return value;
}

uint64_t take_varint(std::string& bytes) {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        const auto byte = take<uint8_t>(bytes);
        value |= uint64_t{byte & 127u} << shift;
        if (byte < 128) return value;
    }
}

// A protobuf message: the values by field number, each as raw bytes (varints as 8 of them).
std::map<int, std::string> fields_of(std::string message) {
    std::map<int, std::string> fields;
    while (!message.empty()) {
        const uint64_t key = take_varint(message);
        const size_t fixed_bytes = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : 0;
        std::string value;
        if (key % 8 == 0) {
            const uint64_t number = take_varint(message);
            value.assign(reinterpret_cast<const char*>(&number), 8);
        } else {
            REQUIRE((fixed_bytes > 0 || key % 8 == 2));
            const size_t bytes = fixed_bytes ? fixed_bytes : take_varint(message);
            REQUIRE(bytes <= message.size());
            value = message.substr(0, bytes);
            message.erase(0, bytes);
        }
        fields[static_cast<int>(key / 8)] = value;
    }
    return fields;
}

// The events of a file, framing and checksums checked.
std::vector<std::map<int, std::string>> events_of(const std::string& path) {
    auto unmask = [](uint32_t masked) { return std::rotl(masked - 0xa282ead8u, 15); };
    std::string bytes = slurp(path);
    std::vector<std::map<int, std::string>> events;
    while (!bytes.empty()) {
        const std::string length = bytes.substr(0, 8);
        const auto n_bytes = take<uint64_t>(bytes);
        CHECK(unmask(take<uint32_t>(bytes)) == crc32c(length));
        REQUIRE(n_bytes <= bytes.size());
        const std::string message = bytes.substr(0, n_bytes);
        bytes.erase(0, n_bytes);
        CHECK(unmask(take<uint32_t>(bytes)) == crc32c(message));
        events.push_back(fields_of(message));
    }
    return events;
}

std::vector<std::string> names_in(const TempFolder& folder) {
    std::vector<std::string> names;
    std::istringstream listing(folder.listing());
    for (std::string name; listing >> name;) names.push_back(name);
    return names;
}

}  // namespace

TEST_CASE("log.csv: the columns of the design, empty where nothing applies") {
    TempFolder folder;
    const std::string path = folder / "log.csv";
    spit(path, "an older run");
    CsvLog log(path, -1);
    CHECK(slurp(path) == header);
    LogRow row;
    row.step = 1;
    row.tokens = 256;
    row.loss = 5.54517744;
    row.lr = 3e-5;
    row.grad_norm = 1.25;
    row.tokens_per_s = 81234.56;
    row.mfu = 0.41234;
    row.step_ms = 3.14159;
    log.write(row);
    // It is there before the log is closed.
    CHECK(slurp(path) == header + "1,256,5.54517744,,3e-05,1.25,,81234.6,0.4123,3.142\n");
    row = row_of(2, NAN);
    row.val_loss = INFINITY;
    row.loss_scale = 65536;
    log.write(row);
    CHECK(slurp(path).ends_with("\n2,512,nan,inf,,,65536,,,\n"));

    const std::vector<LogRow> rows = read_csv_log(path);
    REQUIRE(rows.size() == 2);
    CHECK(rows[0].lr == 3e-5);
    CHECK_FALSE(rows[0].val_loss.has_value());
    CHECK(std::isnan(*rows[1].loss));
    CHECK(rows[1].val_loss == INFINITY);
}

TEST_CASE("log.csv: floats come back as they were") {
    TempFolder folder;
    CsvLog log(folder / "log.csv", -1);
    std::mt19937 random(7);
    std::vector<float> values;
    for (int i = 0; i < 2000; i++) {
        auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));  // any exponent, also denormal
        values.push_back(std::isfinite(value) ? value : 0);
        LogRow row = row_of(i, values.back());
        row.lr = row.grad_norm = values.back();
        row.tokens_per_s = row.mfu = row.step_ms = 1e308;  // long, not broken
        log.write(row);
    }
    const std::vector<LogRow> rows = read_csv_log(folder / "log.csv");
    REQUIRE(rows.size() == values.size());
    for (size_t i = 0; i < values.size(); i++) {
        REQUIRE(static_cast<float>(*rows[i].loss) == values[i]);
        REQUIRE(static_cast<float>(*rows[i].lr) == values[i]);
        REQUIRE(static_cast<float>(*rows[i].grad_norm) == values[i]);
    }
}

TEST_CASE("log.csv: a resumed run keeps the rows up to its step byte for byte and drops the rest") {
    TempFolder folder;
    const std::string path = folder / "log.csv";
    const std::string kept = header + "1,256,2.50,,,,,,,\n2,512,2.4000,,,,,,,\n";  // not as we would print them
    spit(path, kept + "3,768,2.3,,,,,,,\n4,1024,2.2,,,,,,,\n5,12");
    CHECK(read_csv_log(path).size() == 4);  // a torn last line is no row
    {
        CsvLog log(path, 2);
        CHECK(slurp(path) == kept);
        log.write(row_of(3, 9));
    }
    CHECK(slurp(path) == kept + "3,768,9,,,,,,,\n");
    CHECK(folder.listing() == "log.csv");
    CsvLog(path, 100);
    CHECK(slurp(path) == kept + "3,768,9,,,,,,,\n");
    const std::string before = header + "0,0,,2.5,,,,,,\n";
    spit(path, before + "1,256,2.4,,,,,,,\n");
    CsvLog(path, 0);
    CHECK(slurp(path) == before);
    std::filesystem::remove(path);
    CsvLog(path, 5);  // the log was deleted, the run goes on
    CHECK(slurp(path) == header);
    spit(path, "");  // killed right at its creation
    CsvLog(path, 5);
    CHECK(slurp(path) == header);
}

TEST_CASE("log.csv: foreign and broken logs") {
    TempFolder folder;
    const std::string path = folder / "log.csv";
    spit(path, "time,loss\n1,2\n");
    CHECK(one_line_with(error_of([&] { CsvLog(path, 3); }), path, "not the header of our log"));
    CHECK(slurp(path) == "time,loss\n1,2\n");
    const char* rows[] = {"one,2,,,,,,,,",         "1", "1,2,x,,,,,,,", "1,2,3 4,,,,,,,", "", "1.5,2,,,,,,,,",
                          "99999999999999999999,0"};
    for (const char* row : rows) {
        spit(path, header + "1,256,2.5,,,,,,,\n" + row + "\n");
        INFO(row);
        CHECK(one_line_with(error_of([&] { read_csv_log(path); }), path + ", line 3: ", "is not a number"));
    }
    CHECK(one_line_with(error_of([&] { CsvLog(folder / "no/log.csv", -1); }), folder / "no/log.csv"));
    // A resumed run that cannot see its log does not take it for none, and writes no new one in its place.
    std::filesystem::remove(path);
    std::filesystem::create_symlink("log.csv", path);
    CHECK(one_line_with(error_of([&] { CsvLog(path, 3); }), path, "Too many levels"));
    CHECK(std::filesystem::is_symlink(path));
    CHECK(one_line_with(error_of([&] { CsvLog("/dev/full", -1); }), "/dev/full", "not a regular file"));
}

TEST_CASE("TensorBoard: framed, checksummed events") {
    CHECK(crc32c("123456789") == 0xe3069283);
    TempFolder folder;
    {
        TensorBoardLog log(folder / "tb", -1);
        log.scalar("loss/train", 1, 2.5);
        log.scalar(std::string(300, 't'), int64_t{1} << 40, -0.125);
        for (const int64_t step : {127, 128}) log.scalar("", step, 0);  // varints of one byte and of two
    }
    std::string path;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "tb")) path = entry.path().string();
    CHECK(path.find("/events.out.tfevents.") != std::string::npos);
    auto events = events_of(path);
    REQUIRE(events.size() == 6);
    CHECK(events[0][3] == "brain.Event:2");
    CHECK(take<int64_t>(events[1][2]) == 0);
    CHECK(take<int64_t>(fields_of(events[1][7])[1]) == 1);  // SessionLog START
    CHECK(std::fabs(take<double>(events[2][1]) - static_cast<double>(std::time(nullptr))) < 10);
    CHECK(take<int64_t>(events[2][2]) == 1);
    auto value = fields_of(fields_of(events[2][5])[1]);
    CHECK(value[1] == "loss/train");
    CHECK(take<float>(value[2]) == 2.5f);
    CHECK(take<int64_t>(events[3][2]) == int64_t{1} << 40);
    value = fields_of(fields_of(events[3][5])[1]);
    CHECK(value[1] == std::string(300, 't'));
    CHECK(take<float>(value[2]) == -0.125f);
    CHECK(take<int64_t>(events[4][2]) == 127);
    CHECK(take<int64_t>(events[5][2]) == 128);
}

TEST_CASE("TensorBoard: a resumed run writes a new file that is read after the old one, and says where it starts") {
    TempFolder folder;
    std::string previous;
    for (int64_t resume_step : {-1, 10, 20, 30}) {  // all within a second
        { TensorBoardLog log(folder.path, resume_step); }
        const std::vector<std::string> names = names_in(folder);
        REQUIRE(names.size() == static_cast<size_t>(resume_step / 10 + 1));
        CHECK(names.back() > previous);
        previous = names.back();
        auto events = events_of(folder / previous);
        REQUIRE(events.size() == 2);
        CHECK(take<int64_t>(events[1][2]) == resume_step + 1);
    }
    // The clock was set back since the last run, and names that are not ours are there.
    const std::string future = "events.out.tfevents.4000000000.host.1";
    spit(folder / future, "");
    spit(folder / "events.out.tfevents.", "");
    spit(folder / "events.out.tfevents.9999999999.x", "");  // the last time that has ten digits
    spit(folder / "events.out.tfevents.99999999999999999999.x", "");
    { TensorBoardLog log(folder.path, 40); }
    bool found = false;
    for (const std::string& name : names_in(folder))
        found = found || name.starts_with("events.out.tfevents.4000000001.");
    CHECK(found);

    spit(folder / "file", "");
    CHECK(one_line_with(error_of([&] { TensorBoardLog log(folder / "file", 0); }), folder / "file"));
    {
        const FileSizeLimit limit(20);
        CHECK_FALSE(error_of([&] { TensorBoardLog log(folder / "full", 0); }).empty());
    }
    CHECK(std::filesystem::is_empty(folder / "full"));
}

TEST_CASE("TensorBoard: what a full disk has taken of a row is not written again") {
    TempFolder folder;
    RunLog log(folder.path, -1);
    LogRow row = row_of(1, 2.5);
    row.lr = row.grad_norm = row.tokens_per_s = row.val_loss = 1;
    log.write(row);
    const std::string path = folder / names_in(folder).front();  // beside log.csv, which is shorter
    const size_t n = events_of(path).size();
    {
        const FileSizeLimit limit(slurp(path).size() + 60);  // one number, and the row of log.csv
        log.write(row);
        CHECK(events_of(path).size() == n + 1);
    }
    log.write_waiting();
    CHECK(events_of(path).size() == n + 5);
}

TEST_CASE("a new run whose logs cannot begin leaves none of them, a resumed one keeps its rows") {
    const auto fault_with_one_file_more = [](const std::string& out, int64_t resume_step) {  // log.csv, and no events
        rlimit before;
        ::getrlimit(RLIMIT_NOFILE, &before);
        const int lowest_free = ::dup(STDERR_FILENO);
        ::close(lowest_free);
        const rlimit limit{static_cast<rlim_t>(lowest_free) + 1, before.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &limit);
        const std::string fault = error_of([&] { RunLog log(out, resume_step); });
        ::setrlimit(RLIMIT_NOFILE, &before);
        return fault;
    };
    TempFolder folder;
    CHECK(one_line_with(fault_with_one_file_more(folder.path, -1), folder.path, "Too many open files"));
    CHECK(folder.listing() == "");
    {
        CsvLog log(folder / "log.csv", -1);
        log.write(row_of(1, 2.5));
    }
    CHECK(one_line_with(fault_with_one_file_more(folder.path, 1), folder.path, "Too many open files"));
    CHECK(read_csv_log(folder / "log.csv").size() == 1);
}

TEST_CASE("numbers as people read them") {
    CHECK(human_count(0) == "0");
    CHECK(human_count(999) == "999");
    CHECK(human_count(999.6) == "1k");  // never "1e+03"
    CHECK(human_count(3200) == "3.2k");
    CHECK(human_count(124'439'808) == "124M");
    CHECK(human_count(999'999) == "1M");
    CHECK(human_count(8.03e9) == "8.03G");
    CHECK(human_count(15e12) == "15T");
    CHECK(human_count(2.5e15) == "2.5P");
    CHECK(human_count(2.5e18) == "2500P");
    CHECK(human_count(-1500) == "-1.5k");
    CHECK(human_count(NAN).find("nan") != std::string::npos);
    CHECK(human_count(INFINITY) == "inf");

    CHECK(human_bytes(0) == "0 B");
    CHECK(human_bytes(1023) == "1023 B");
    CHECK(human_bytes(1024) == "1.00 KiB");
    CHECK(human_bytes(1.43 * (1 << 30)) == "1.43 GiB");
    CHECK(human_bytes(16.0 * (1 << 20)) == "16.0 MiB");
    CHECK(human_bytes(1023.7 * 1024) == "1.00 MiB");
    CHECK(human_bytes(1000.0 * 1024) == "1000 KiB");
    CHECK(human_bytes(0x1p52) == "4096 TiB");

    CHECK(human_seconds(5e-6) == "5 us");
    CHECK(human_seconds(0.0123) == "12.3 ms");
    CHECK(human_seconds(5.25) == "5.2s");
    CHECK(human_seconds(59.4) == "59s");
    CHECK(human_seconds(59.6) == "1m 00s");
    CHECK(human_seconds(83) == "1m 23s");
    CHECK(human_seconds(1e10) == "317 years");
    CHECK(human_seconds(7385) == "2h 03m");
    CHECK(human_seconds(90000) == "1d 01h");
    for (double unknown : {double{NAN}, double{INFINITY}, -1.0}) CHECK(human_seconds(unknown) == "?");
}
