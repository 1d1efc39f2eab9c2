// Gradient compression (parallel/data/compress.cu, power_sgd.cu): each compressor against a plain C++ model of it, the
// bytes that travel, what error feedback promises, and training runs with it.
#include "io/io.h"
#include "program.h"
#include "ranks.h"
#include "reference.h"
#include "run_models.h"

#include "parallel/comm/transport.h"

#include <algorithm>
#include <cmath>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Two units of parameters whose sizes divide nothing: long and short blocks, vectors, a matrix that is as large as its
// factors, one of many rows, and rows that pad a vocabulary.

struct Piece {             // numbers that are a parameter's, without padding
    int64_t offset, R, C;  // R = 0: a vector
    int64_t padded;        // rows behind these
    int64_t n() const { return std::max<int64_t>(1, R) * C; }
};
const std::vector<std::pair<std::vector<int64_t>, int64_t>> kShapes[] = {
    {{{37, 65}, 0}, {{70}, 0}, {{41, 97}, 0}},
    {{{130, 33}, 2}, {{5}, 0}, {{270, 4}, 0}, {{12, 4}, 0}}};  // dimensions, rows of padding

FlatParameters toy_parameters(int rank, int size, std::vector<std::vector<Piece>>* pieces = nullptr) {
    FlatParameters p;
    for (const auto& shapes : kShapes) {
        Unit unit{.name = concat("unit ", p.units.size()), .offset = p.n, .number = p.units.size()};
        if (pieces) pieces->emplace_back();
        for (const auto& [dims, padded] : shapes) {
            Param param;
            param.name = concat("parameter ", p.params.size());
            param.value = dims.size() == 1 ? make_tensor(nullptr, DType::f32, {dims[0]})
                                           : make_tensor(nullptr, DType::f32, {dims[0], dims[1]});
            param.offset = p.n;
            param.padded_rows = padded;
            p.params.push_back(param);
            if (pieces) pieces->back().push_back({p.n, dims.size() == 1 ? 0 : dims[0] - padded, dims.back(), padded});
            p.n = round_up(p.n + param.value.n(), 64);
        }
        unit.n = p.n - unit.offset;
        p.units.push_back(unit);
    }
    p.shard_units({.rank = rank, .size = size}, false, p);
    return p;
}
std::vector<std::vector<Piece>> toy_pieces() {
    std::vector<std::vector<Piece>> pieces;
    toy_parameters(0, 1, &pieces);
    return pieces;
}

using Floats = std::vector<float>;
using Gradient = std::function<float(int rank, int step, int64_t i)>;

struct Run {
    std::vector<std::vector<Floats>> results;               // [step][rank]
    std::vector<std::map<std::string, Floats>> start, end;  // [rank]: states
    std::vector<std::vector<int64_t>> bytes;                // [step][rank]: sent
};

// feedback = false: the errors are forgotten after each step.
Run run_compressor(const CompressOptions& options, int n_ranks, int n_steps, const Gradient& gradient,
                   bool feedback = true) {
    const size_t size = static_cast<size_t>(n_ranks);
    Run run;
    run.results.assign(static_cast<size_t>(n_steps), std::vector<Floats>(size));
    run.bytes.assign(static_cast<size_t>(n_steps), std::vector<int64_t>(size));
    run.start.resize(size), run.end.resize(size);
    run_ranks(threads(n_ranks), [&](Comm& world) {
        const size_t rank = static_cast<size_t>(world.rank);
        FlatParameters p = toy_parameters(world.rank, n_ranks);
        Arena weights("values"), grads("grads"), masters("masters"), memory("memory");
        const auto compressor = make_compressor(world, options);
        for (int pass = 0; pass < 2; ++pass) {
            p.take(DType::f32, DType::f32, false, weights, grads, masters);
            compressor->take_memory(p, memory);
            world.take_memory(memory);
            if (pass == 1) break;
            for (Arena* arena : {&weights, &grads, &memory}) arena->reserve();
        }
        const auto read_states = [&] {
            std::map<std::string, Floats> states;
            for (const auto& [name, tensor] : compressor->states()) states[name] = to_floats(tensor);
            return states;
        };
        run.start[rank] = read_states();
        for (int step = 0; step < n_steps; ++step) {
            Floats g(static_cast<size_t>(p.n), 0);
            for (const auto& unit : toy_pieces())
                for (const Piece& piece : unit)
                    for (int64_t i = piece.offset; i < piece.offset + piece.n(); ++i)
                        g[static_cast<size_t>(i)] = gradient(world.rank, step, i);
            from_floats(p.grads, g);
            const int64_t before = world.traffic().sent;
            for (size_t u = p.units.size(); u-- > 0;) compressor->reduce(p, u, device().stream);
            cudaCheck(cudaDeviceSynchronize());
            run.bytes[static_cast<size_t>(step)][rank] = world.traffic().sent - before;
            run.results[static_cast<size_t>(step)][rank] = to_floats(p.grads);
            if (feedback) continue;
            for (const auto& [name, tensor] : compressor->states())
                if (name != "q") from_floats(tensor, Floats(static_cast<size_t>(tensor.n()), 0));
        }
        run.end[rank] = read_states();
    });
    for (const auto& step : run.results)
        for (const Floats& x : step) record_bits(x.data(), x.size() * sizeof(float));
    return run;
}

// A direction that stays, and noise: of another size in each parameter.
float random_gradient(int rank, int step, int64_t i) {
    const uint64_t at = static_cast<uint64_t>(i);
    const double size = i < 2432 ? 1e-3 : i < 7000 ? 0.3 : 40.0;
    const double noise = uniform(7, static_cast<uint64_t>(100 + rank + 10 * step), at) +
                         uniform(8, static_cast<uint64_t>(rank + 10 * step), at) - 1;
    return static_cast<float>(size * (0.3 * (uniform(6, 0, at) - 0.5) + noise));
}

// ---------------------------------------------------------------------------------------------------------------------
// The models, in float64

constexpr int64_t kBlock = 1024;

// To the nearest number of e4m3, ties to even: 3 digits behind the first, the smallest steps are 2^-9.
double to_e4m3(double x) {
    if (x == 0) return 0;
    const double step = std::ldexp(1.0, std::max(std::ilogb(x), -6) - 3);
    return std::copysign(std::min(448.0, std::abs(std::nearbyint(x / step) * step)), x);
}

// What the numbers of a block become.
std::vector<double> coded(Compression kind, const std::vector<double>& x) {
    double sum = 0, amax = 0;
    for (double value : x) sum += std::abs(value), amax = std::max(amax, std::abs(value));
    const double mean = sum / static_cast<double>(x.size());
    std::vector<double> out;
    for (double value : x) {
        if (kind == Compression::one_bit) out.push_back(value < 0 ? -mean : mean);
        else out.push_back(to_e4m3(value * (448 / amax)) * (amax / 448));
    }
    return out;
}

struct ToyModel {
    CompressOptions options;
    size_t size;
    std::vector<std::vector<double>> error;  // [rank]
    std::vector<double> sum_error, q;

    std::vector<double> step(const std::vector<std::vector<double>>& grads) {
        std::vector<double> result(grads[0].size(), 0);
        size_t q_at = 0;
        for (const auto& unit : toy_pieces())
            for (const Piece& piece : unit) {
                const bool matrix = piece.R > 0 && options.rank * (piece.R + piece.C) < piece.n();
                if (options.kind == Compression::power_sgd && matrix) power(grads, piece, result, q_at);
                else if (options.kind == Compression::power_sgd || options.kind == Compression::bf16)
                    whole(grads, piece, result);
                else blocks(grads, piece, result);
            }
        return result;
    }
    void whole(const std::vector<std::vector<double>>& grads, const Piece& piece, std::vector<double>& result) const {
        const bool rounds = options.kind == Compression::bf16;
        for (size_t i = static_cast<size_t>(piece.offset); i < static_cast<size_t>(piece.offset + piece.n()); ++i) {
            for (const auto& g : grads) result[i] += rounds ? rounded({g[i]}, DType::bf16)[0] : g[i];
            if (rounds) result[i] = rounded({result[i]}, DType::bf16)[0];
        }
    }
    void blocks(const std::vector<std::vector<double>>& grads, const Piece& piece, std::vector<double>& result) {
        for (int64_t first = 0; first < piece.n(); first += kBlock) {
            const size_t at = static_cast<size_t>(piece.offset + first),
                         n = static_cast<size_t>(std::min(kBlock, piece.n() - first));
            std::vector<double> sum(n);
            for (size_t i = 0; i < n; ++i) sum[i] = sum_error[at + i];
            for (size_t r = 0; r < size; ++r) {
                std::vector<double> x(n);
                for (size_t i = 0; i < n; ++i) x[i] = grads[r][at + i] + error[r][at + i];
                const std::vector<double> sent = coded(options.kind, x);
                for (size_t i = 0; i < n; ++i) error[r][at + i] = x[i] - sent[i], sum[i] += sent[i];
            }
            const std::vector<double> sent = coded(options.kind, sum);
            for (size_t i = 0; i < n; ++i) sum_error[at + i] = sum[i] - sent[i], result[at + i] = sent[i];
        }
    }
    void power(const std::vector<std::vector<double>>& grads, const Piece& piece, std::vector<double>& result,
               size_t& q_at) {
        const size_t R = static_cast<size_t>(piece.R), C = static_cast<size_t>(piece.C),
                     r = static_cast<size_t>(options.rank);
        const size_t at = static_cast<size_t>(piece.offset);
        std::vector<double> P(R * r, 0), Q(C * r, 0);
        for (size_t w = 0; w < size; ++w)
            for (size_t i = 0; i < R * C; ++i) {
                error[w][at + i] += grads[w][at + i];
                for (size_t k = 0; k < r; ++k) P[i / C * r + k] += error[w][at + i] * q[q_at + i % C * r + k];
            }
        for (size_t k = 0; k < r; ++k) {
            const auto dot = [&](size_t j) {
                double sum = 0;
                for (size_t i = 0; i < R; ++i) sum += P[i * r + j] * P[i * r + k];
                return sum;
            };
            for (size_t j = 0; j < k; ++j) {
                const double d = dot(j);
                for (size_t i = 0; i < R; ++i) P[i * r + k] -= d * P[i * r + j];
            }
            const double length = std::sqrt(dot(k));
            for (size_t i = 0; i < R; ++i) P[i * r + k] /= length;
        }
        for (size_t w = 0; w < size; ++w) {
            std::vector<double> S(C * r, 0);
            for (size_t i = 0; i < R * C; ++i)
                for (size_t k = 0; k < r; ++k) S[i % C * r + k] += error[w][at + i] * P[i / C * r + k];
            for (size_t i = 0; i < R * C; ++i)
                for (size_t k = 0; k < r; ++k) error[w][at + i] -= P[i / C * r + k] * S[i % C * r + k];
            for (size_t i = 0; i < C * r; ++i) Q[i] += S[i];
        }
        for (size_t i = 0; i < R * C; ++i)
            for (size_t k = 0; k < r; ++k) result[at + i] += P[i / C * r + k] * Q[i % C * r + k];
        for (size_t i = 0; i < C * r; ++i) q[q_at + i] = Q[i];
        q_at += C * r;
    }
};

// Bytes that a rank sends in a step.
int64_t expected_bytes(const CompressOptions& options, int n_ranks, int rank) {
    int64_t total = 0;
    // One all-reduce of n numbers in rank order: all pieces but one's own go to their owners, one's own to everybody.
    const auto all_reduce = [&](int64_t n, int64_t number_bytes) {
        const int64_t mine = piece_of(n, n_ranks, rank).n;
        return number_bytes * (n - mine + (n_ranks - 1) * mine);
    };
    const FlatParameters p = toy_parameters(0, 1);
    const auto pieces = toy_pieces();
    for (size_t u = 0; u < p.units.size(); ++u) {
        int64_t n_blocks = 0, first = 0, second = 0;
        for (const Piece& piece : pieces[u]) {
            n_blocks += ceil_div(piece.n(), kBlock);
            const bool matrix = piece.R > 0 && options.rank * (piece.R + piece.C) < piece.n();
            first += matrix ? options.rank * (piece.R + piece.padded) : piece.n();
            second += matrix ? options.rank * piece.C : 0;
        }
        const int64_t blocks_sent = 2 * (n_ranks - 1) * ceil_div(n_blocks, n_ranks);
        switch (options.kind) {
            case Compression::none: break;
            case Compression::bf16: total += all_reduce(p.units[u].n, 2); break;
            case Compression::fp8: total += blocks_sent * (kBlock + 4); break;
            case Compression::one_bit: total += blocks_sent * (kBlock / 8 + 4); break;
            case Compression::power_sgd: total += all_reduce(first, 4) + all_reduce(second, 4); break;
        }
    }
    return total;
}

const Compression kKinds[] = {Compression::bf16, Compression::fp8, Compression::power_sgd, Compression::one_bit};

// The sizes of a parameter's numbers in all steps: what tolerances are multiples of.
double size_of(const std::vector<double>& x, const Piece& piece) {
    return largest({x.begin() + piece.offset, x.begin() + piece.offset + piece.n()});
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("compressors against a plain model, to the byte, and nothing is lost", "[compress]") {
    const int n_ranks = GENERATE(2, 3, 5), n_steps = 4;
    const Compression kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
    const CompressOptions options{.kind = kind, .rank = n_ranks == 5 ? 16 : 3};
    CAPTURE(n_ranks, static_cast<int>(kind));
    const Run run = run_compressor(options, n_ranks, n_steps, random_gradient);
    const FlatParameters p = toy_parameters(0, 1);
    const size_t n = static_cast<size_t>(p.n), size = static_cast<size_t>(n_ranks);

    ToyModel model{options,
                   size,
                   std::vector<std::vector<double>>(size, std::vector<double>(n, 0)),
                   std::vector<double>(n, 0),
                   {}};
    if (kind == Compression::power_sgd) model.q.assign(run.start[0].at("q").begin(), run.start[0].at("q").end());
    std::vector<double> all_grads(n, 0), all_results(n, 0);
    for (int step = 0; step < n_steps; ++step) {
        std::vector<std::vector<double>> grads(size, std::vector<double>(n, 0));
        for (const auto& unit : toy_pieces())
            for (const Piece& piece : unit)
                for (int64_t i = piece.offset; i < piece.offset + piece.n(); ++i)
                    for (size_t r = 0; r < size; ++r) {
                        grads[r][static_cast<size_t>(i)] = random_gradient(static_cast<int>(r), step, i);
                        all_grads[static_cast<size_t>(i)] += grads[r][static_cast<size_t>(i)];
                    }
        const std::vector<double> want = model.step(grads);
        const auto& results = run.results[static_cast<size_t>(step)];
        for (size_t r = 0; r < size; ++r) {
            CHECK(results[r] == results[0]);  // the same bits everywhere
            CHECK(run.bytes[static_cast<size_t>(step)][r] == expected_bytes(options, n_ranks, static_cast<int>(r)));
        }
        // Sums of up to 1024 numbers in float32 (sum_error) and what steps on top of each other add; Gram-Schmidt
        // multiplies that by the condition of P, some 10. A number that lies so near to the middle of two codes of e4m3
        // that these errors decide is a whole step off, an 8th of it at most: that happens to one in 10^4.
        const double tolerance = (kind == Compression::power_sgd ? 10 : 1) * n_steps * sum_error(kBlock);
        double worst = 0, outside = 0;
        int n_steps_off = 0;
        std::vector<bool> inside(n, false);
        for (const auto& unit : toy_pieces())
            for (const Piece& piece : unit) {
                const double scale = size_of(want, piece);
                for (size_t i = static_cast<size_t>(piece.offset); i < static_cast<size_t>(piece.offset + piece.n());
                     ++i) {
                    inside[i] = true;
                    const double off = std::abs(results[0][i] - want[i]) / scale;
                    const bool step_off = kind == Compression::fp8 && off > tolerance && off <= 0.125;
                    if (step_off) ++n_steps_off;
                    else worst = larger(worst, off);
                    all_results[i] += results[0][i];
                }
            }
        for (size_t i = 0; i < n; ++i)
            if (!inside[i]) outside = larger(outside, std::abs(static_cast<double>(results[0][i])));
        CAPTURE(step);
        CHECK(worst <= tolerance);
        CHECK(n_steps_off <= 3);
        CHECK(outside == 0);  // padding stays 0
    }
    if (kind == Compression::bf16) return;

    // Sum of the results + what is kept = sum of the gradients. Each step rounds each rank's numbers a few times.
    std::vector<double> kept(n, 0);
    for (size_t r = 0; r < size; ++r)
        for (size_t i = 0; i < n; ++i) kept[i] += run.end[r].at("error")[i];
    if (kind != Compression::power_sgd) {
        std::vector<size_t> block_at(size, 0);  // in each rank's sum_error
        for (const auto& unit : toy_pieces()) {
            std::vector<std::pair<int64_t, int64_t>> blocks;  // of the unit
            for (const Piece& piece : unit)
                for (int64_t first = 0; first < piece.n(); first += kBlock)
                    blocks.push_back({piece.offset + first, std::min(kBlock, piece.n() - first)});
            const size_t share = (blocks.size() + size - 1) / size;
            for (size_t b = 0; b < blocks.size(); ++b)
                for (size_t i = 0; i < static_cast<size_t>(blocks[b].second); ++i)
                    kept[static_cast<size_t>(blocks[b].first) + i] +=
                        run.end[b / share].at("sum_error")[(block_at[b / share] + b % share) * kBlock + i];
            for (size_t& at : block_at) at += share;
        }
    }
    double worst = 0;
    for (const auto& unit : toy_pieces())
        for (const Piece& piece : unit)
            for (size_t i = static_cast<size_t>(piece.offset); i < static_cast<size_t>(piece.offset + piece.n()); ++i)
                worst = larger(worst, std::abs(all_results[i] + kept[i] - all_grads[i]) / size_of(all_grads, piece));
    CHECK(worst <= 4.0 * n_steps * n_ranks * 0x1p-24 *
                       (kind == Compression::power_sgd ? static_cast<double>(options.rank) : 1.0));
}

// Gradients that stay: after t steps the mean of what came out is the true sum but for the errors still kept, divided
// by t. Without feedback a sign times a mean never becomes the gradient.
TEST_CASE("with error feedback the mean over many steps is the true sum, without it it is not", "[compress]") {
    const Compression kind = GENERATE(Compression::fp8, Compression::power_sgd, Compression::one_bit);
    CAPTURE(static_cast<int>(kind));
    const int n_ranks = 3;
    const auto still = [](int rank, int, int64_t i) { return random_gradient(rank, 0, i); };
    // The root of the mean square of (mean over t steps - true sum), in units of that of the true sum.
    const auto distance = [&](int t, bool feedback) {
        const Run run = run_compressor({.kind = kind, .rank = 2}, n_ranks, t, still, feedback);
        double worst = 0;
        for (const auto& unit : toy_pieces())
            for (const Piece& piece : unit) {
                double squares = 0, of_sum = 0;
                for (int64_t i = piece.offset; i < piece.offset + piece.n(); ++i) {
                    double sum = 0, mean = 0;
                    for (int r = 0; r < n_ranks; ++r) sum += still(r, 0, i);
                    for (const auto& step : run.results)
                        mean += step[0][static_cast<size_t>(i)] / static_cast<double>(t);
                    squares += (mean - sum) * (mean - sum), of_sum += sum * sum;
                }
                worst = larger(worst, std::sqrt(squares / of_sum));
            }
        return worst;
    };
    const double after_10 = distance(10, true), after_40 = distance(40, true), without = distance(40, false);
    CAPTURE(after_10, after_40, without);
    CHECK(after_40 < after_10);
    // A kept error of 1bit is a few gradients, of fp8 a 16th of one. Rank 2 of 33 sends a part of the error each step
    // that is proportional to it: the error grows to some 15 gradients, and then no more.
    const double kept = kind == Compression::fp8 ? 0.1 : kind == Compression::one_bit ? 6.0 : 20.0;
    CHECK(after_40 < kept / 40);
    if (kind != Compression::power_sgd) CHECK(without > 3 * after_40);
    if (kind == Compression::one_bit) CHECK(without > 0.3);
}

TEST_CASE("powersgd: matrices of a lower rank, and gradients that are zero", "[compress]") {
    // Step 0: nothing. Then a matrix of rank 1, whose P has parallel columns: it comes out as it went in.
    const auto low = [](int rank, int step, int64_t i) {
        const int64_t C = 65, row = i / C, c = i % C;
        return step == 0 || i >= 37 * C ? 0.0f
                                        : static_cast<float>((1 + rank) * (static_cast<double>(row) - 17) *
                                                             (1 + static_cast<double>(c % 7)));
    };
    const Run run = run_compressor({.kind = Compression::power_sgd, .rank = 4}, 2, 4, low);
    for (size_t step = 0; step < 4; ++step) {
        double worst = 0;
        for (int64_t i = 0; i < 37 * 65; ++i)
            worst = larger(worst, std::abs(run.results[step][0][static_cast<size_t>(i)] -
                                           static_cast<double>(low(0, static_cast<int>(step), i) +
                                                               low(1, static_cast<int>(step), i))));
        CAPTURE(step);
        CHECK(worst <= 3 * 20 * 7 * sum_error(65) * 4);  // the largest number; four columns
    }
}

TEST_CASE("powersgd: gradients that are a power of two times as large give results that are, to the bit",
          "[compress]") {
    const auto results_of = [](float size) {
        const Run run =
            run_compressor({.kind = Compression::power_sgd, .rank = 3}, 2, 4,
                           [&](int rank, int step, int64_t i) { return size * random_gradient(rank, step, i); });
        std::vector<Floats> results;
        for (const auto& of_ranks : run.results) {
            results.push_back(of_ranks[0]);
            for (float& x : results.back()) x /= size;
        }
        return results;
    };
    const std::vector<Floats> usual = results_of(1);
    for (const float size : {0x1p40f, 0x1p-40f}) CHECK((results_of(size) == usual));
    // P is of the size of their squares, which no longer are normal numbers.
    for (const Floats& result : results_of(0x1p-68f))
        CHECK(std::ranges::all_of(result, [](float x) { return std::isfinite(x); }));
}

TEST_CASE("a gradient that is infinite or no number is not compressed away", "[compress]") {
    const Compression kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
    const float bad = GENERATE(INFINITY, std::nanf(""));
    CAPTURE(static_cast<int>(kind), bad);
    const Run run = run_compressor({.kind = kind}, 2, 1,
                                   [&](int rank, int, int64_t i) { return rank == 1 && i == 100 ? bad : 1.0f; });
    CHECK_FALSE(std::isfinite(run.results[0][0][100]));
}

TEST_CASE("gradients that are almost zero stay numbers", "[compress]") {
    const Compression kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
    CAPTURE(static_cast<int>(kind));
    const Run run =
        run_compressor({.kind = kind}, 2, 2, [](int, int, int64_t i) { return i % 2 == 0 ? 1e-37f : 0.0f; });
    for (const auto& of_ranks : run.results)
        CHECK(std::ranges::all_of(of_ranks[0], [](float x) { return std::isfinite(x); }));
}

TEST_CASE("powersgd: a matrix of rank 1 comes out whole, whatever its size and its sign, or its overflow is seen",
          "[compress]") {
    // In its P all numbers have one sign. Of 1e20 the second P is too large for float32.
    for (const float size : {1e-18f, -1e-18f, 1e17f, 1e20f}) {
        const Run run = run_compressor({.kind = Compression::power_sgd, .rank = 1}, 2, 2,
                                       [&](int, int, int64_t i) { return i < 37 * 65 ? size : 0.0f; });
        for (const auto& of_ranks : run.results)
            for (size_t i = 0; i < 37 * 65; ++i) {
                const float x = of_ranks[0][i] / size;
                CAPTURE(size, i);
                REQUIRE((std::abs(x - 2) < 1e-4f || (size == 1e20f && !std::isfinite(x))));
            }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

namespace {

const std::string& text_file() {
    static const TempFolder folder;
    static const std::string path = [] {
        spit(folder / "text.txt", made_text(2000));
        return folder / "text.txt";
    }();
    return path;
}
Outcome train(const std::string& arguments) {
    return run_program("train_gpt", concat("--data ", text_file(), " --model ", model_file("even-gqa"),
                                           " --batch 6 --seq 16 --steps 24 --lr 4e-3 --val-every 0 --val-sequences 6 "
                                           "--sample 0 --warmup 5 ",
                                           arguments));
}
std::vector<double> losses(const std::string& run) {
    std::vector<double> values;
    for (const LogRow& row : read_csv_log(run + "/log.csv")) values.push_back(row.loss.value_or(NAN));
    return values;
}

}  // namespace

TEST_CASE("training with compressed gradients stays near, and goes on where it stopped", "[program][compress]") {
    const TempFolder folder;
    REQUIRE(train("--ranks 2 --out " + (folder / "none")).status == 0);
    const std::vector<double> none = losses(folder / "none");
    // How far apart single losses may be. Measured: 1e-4, 8e-4, 0.08 and 0.28. The last two lag behind, because what
    // they do not send waits, while all that is new at the beginning of a run is large.
    const std::tuple<std::string, double> cases[] = {{"bf16", 5e-4}, {"fp8", 3e-3}, {"powersgd", 0.2}, {"1bit", 0.4}};
    for (const auto& [name, distance] : cases) {
        CAPTURE(name);
        const std::string whole = folder / name, parts = folder / (name + "-parts"),
                          flags = "--ranks 2 --compress " + name + " --out ";
        REQUIRE(train(flags + whole).status == 0);
        const std::vector<double> its = losses(whole);
        REQUIRE(its.size() == none.size());
        CHECK(its[0] == none[0]);
        CHECK(its != none);
        double worst = 0;
        for (size_t i = 0; i < its.size(); ++i) worst = larger(worst, std::abs(its[i] - none[i]) / none[i]);
        CAPTURE(worst);
        CHECK(worst < distance);
        CHECK(its.back() < 0.65 * its.front());
        if (name == "bf16" || name == "fp8") continue;

        REQUIRE(train(flags + parts + " --stop-after 13").status == 0);
        const std::string other = folder / (name + "-other");
        std::filesystem::copy(parts, other, std::filesystem::copy_options::recursive);
        Outcome resumed = run_program("train_gpt", "--resume --ranks 2 --out " + parts);
        INFO(resumed.err);
        CHECK(resumed.status == 0);
        CHECK(losses(parts) == its);
        CHECK(resumed.out.find("start at 0") == std::string::npos);
        if (name != "1bit") continue;
        resumed = run_program("train_gpt", "--resume --ranks 3 --out " + other);
        CHECK(resumed.status == 0);
        CHECK_THAT(resumed.out,
                   ContainsSubstring("--compress: the checkpoint has no errors of 3 ranks: they start at 0"));
        CHECK(losses(other).size() == 24);
        resumed = run_program("train_gpt", "--resume --ranks 2 --compress fp8 --out " + other);
        CHECK(one_line_with(line_of(resumed), "--compress fp8 differs"));
    }
}

// Parts of the vocabulary have multiples of 16 rows. Here these are 32, 32, 32, 27, none, and none.
TEST_CASE("ranks of --tp without a row of the vocabulary compress no gradients of it", "[program][compress]") {
    const TempFolder folder;
    spit(folder / "config.json",
         R"({"model_type": "llama", "vocab_size": 123, "hidden_size": 24, "intermediate_size": 24,
             "num_hidden_layers": 1, "num_attention_heads": 6})");
    const std::string flags = "--ranks 12 --tp 6 --steps 5 --batch 6 --model " + folder.path + "/config.json --out ";
    REQUIRE(train(flags + (folder / "none")).status == 0);
    for (const std::string name : {"fp8", "1bit"}) {
        must_succeed(train(flags + (folder / name) + " --compress " + name));
        CHECK(losses(folder / name).back() == Approx(losses(folder / "none").back()).epsilon(0.02));
    }
}

// 3 ranks of --tp have 96, 96 and 65 rows of the vocabulary. NCCL adds in an order that depends on the place in a
// message: without padding, the final norm's gradients of the last of these ranks had other roundings than the others'.
TEST_CASE("powersgd's sums of what ranks of --tp all have are the same, whatever rows of the vocabulary they have",
          "[program][compress][tensor_parallel]") {
    if (!device().is_cpu) return;  // ranks that are threads have NCCL there
    const TempFolder folder;
    spit(folder / "config.json",
         R"({"model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_embd": 48, "n_inner": 96, "n_head": 12,
             "n_layer": 2, "tie_word_embeddings": false, "activation_function": "gelu_new"})");
    const std::string flags =
        "--ranks 12 --tp 3 --comm nccl --compress powersgd --steps 6 --batch 4 --eps 1e-4 --model " + folder.path +
        "/config.json --out ";
    REQUIRE(train(flags + (folder / "whole")).status == 0);
    REQUIRE(train(flags + (folder / "parts") + " --stop-after 3").status == 0);
    REQUIRE(train(flags + (folder / "parts") + " --resume").status == 0);
    CHECK(losses(folder / "parts") == losses(folder / "whole"));
    CHECK((weights_of(folder / "parts") == weights_of(folder / "whole")));
}

TEST_CASE("what --compress cannot be combined with", "[program][compress]") {
    const TempFolder folder;
    const std::pair<const char*, const char*> cases[] = {
        {"--compress zip", "--compress zip: use none, bf16, fp8, powersgd or 1bit"},
        {"--compress 1bit --zero 2", "--compress 1bit with --zero 2"},
        {"--compress fp8 --dp-mode naive", "--compress fp8 with --dp-mode naive"},
        {"--compress powersgd --compress-rank 17", "--compress-rank 17: use 1 to 16"},
        {"--compress bf16 --dtype bf16", "add --grad-dtype fp32"},
        {"--compress 1bit --dtype fp16", "--dtype fp16 may have scaled differently"},
    };
    for (const auto& [arguments, says] : cases) {
        const Outcome outcome = train(concat("--ranks 2 --out ", folder / "run", " ", arguments));
        INFO(arguments << "\nstderr: " << outcome.err);
        CHECK(one_line_with(line_of(outcome), says));
        CHECK_FALSE(std::filesystem::exists(folder / "run"));
    }
}
