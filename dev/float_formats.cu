// dev/float_formats.cu: what each number format keeps of a number, what it loses, and why training in fp16 multiplies
// the loss by a large number.
//
//   run      make dev && build/cpu/dev/float_formats         the formats, instructive numbers, sums that stop growing
//            build/cpu/dev/float_formats 0.3 2^-24 inf fp16:0x7bff      any numbers; FORMAT:0xBITS gives the bits
//            build/cpu/dev/float_formats --gradients         gradients of a real training step, and a picture of them
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb --args build/cpu-debug/dev/float_formats 0.1
//
// A number is sign | exponent e | mantissa m. With E exponent bits, M mantissa bits and bias = 2^(E-1) - 1:
//
//     normal       (-1)^sign 2^(e - bias) (1 + m / 2^M)        e > 0: M + 1 significant bits, the first one is implied
//     subnormal    (-1)^sign 2^(1 - bias) (    m / 2^M)        e = 0: equal steps down to zero, fewer and fewer digits
//     spacing      2^(exponent - M)                            between neighbours; rounding errs by half of it at most
//
// (Floating point: Goldberg 1991, "What every computer scientist should know". Loss scaling: Micikevicius et al. 2018,
// arXiv:1710.03740. fp8: Micikevicius et al. 2022, arXiv:2209.05433.)
//
// All conversions are those of cuda_fp16.h, cuda_bf16.h and cuda_fp8.h: what is printed is what a GPU stores.
#include "dev/program.h"
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The formats

struct Format {
    const char* name;
    int E, M;
    bool has_infinity;  // e4m3 uses infinity's codes for numbers: only the last code is NaN
    bool saturates;     // what is too large becomes the largest number: as fp8 is used in training
    uint32_t (*encode)(double x, bool saturate);
    double (*decode)(uint32_t code);

    int bits() const { return 1 + E + M; }
    int bias() const { return (1 << (E - 1)) - 1; }
    uint32_t largest_code() const { return has_infinity ? (((1u << E) - 1) << M) - 1 : (1u << (E + M)) - 2; }
    double largest() const { return decode(largest_code()); }
    double smallest_normal() const { return std::ldexp(1.0, 1 - bias()); }
    double smallest() const { return std::ldexp(1.0, 1 - bias() - M); }
    double epsilon() const { return std::ldexp(1.0, -M); }  // spacing at 1
    double digits() const { return (M + 1) * std::log10(2.0); }
    double spacing(double value) const {
        return std::fabs(value) < smallest_normal() ? smallest() : std::ldexp(1.0, std::ilogb(value) - M);
    }
    double round(double x) const { return decode(encode(x, saturates)); }
};

uint32_t encode_fp32(double x, bool) { return std::bit_cast<uint32_t>(static_cast<float>(x)); }
double decode_fp32(uint32_t code) { return static_cast<double>(std::bit_cast<float>(code)); }

// tf32 is not stored as such: it is an fp32 of which a tensor core reads the upper 19 bits. cvt.rna.tf32.f32 rounds to
// the nearest of them, ties away from zero; no header converts it on the host, so the two lines that do it are here.
uint32_t encode_tf32(double x, bool) { return std::isnan(x) ? 0x3ffff : (encode_fp32(x, false) + 0x1000) >> 13; }
double decode_tf32(uint32_t code) { return decode_fp32(code << 13); }

uint32_t encode_bf16(double x, bool) { return static_cast<__nv_bfloat16_raw>(__double2bfloat16(x)).x; }
double decode_bf16(uint32_t code) {
    return static_cast<double>(__bfloat162float(__nv_bfloat16_raw{static_cast<unsigned short>(code)}));
}
uint32_t encode_fp16(double x, bool) { return static_cast<__half_raw>(__double2half(x)).x; }
double decode_fp16(uint32_t code) {
    return static_cast<double>(__half2float(__half_raw{static_cast<unsigned short>(code)}));
}
template <__nv_fp8_interpretation_t format>
uint32_t encode_fp8(double x, bool saturate) {
    return __nv_cvt_double_to_fp8(x, saturate ? __NV_SATFINITE : __NV_NOSAT, format);
}
template <__nv_fp8_interpretation_t format>
double decode_fp8(uint32_t code) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), format);
    return static_cast<double>(__half2float(__half(half)));
}

const Format fp32{"fp32", 8, 23, true, false, encode_fp32, decode_fp32};
const Format tf32{"tf32", 8, 10, true, false, encode_tf32, decode_tf32};
const Format bf16{"bf16", 8, 7, true, false, encode_bf16, decode_bf16};
const Format fp16{"fp16", 5, 10, true, false, encode_fp16, decode_fp16};
const Format e5m2{"e5m2", 5, 2, true, true, encode_fp8<__NV_E5M2>, decode_fp8<__NV_E5M2>};
const Format e4m3{"e4m3", 4, 3, false, true, encode_fp8<__NV_E4M3>, decode_fp8<__NV_E4M3>};
const Format* const formats[] = {&fp32, &tf32, &bf16, &fp16, &e5m2, &e4m3};

void print_formats() {
    std::printf("THE FORMATS\n\n");
    std::printf(
        "        bits  sign  exponent  mantissa  bias        largest  smallest normal  smallest  epsilon  digits\n");
    for (const Format* f : formats) {
        const auto power = [](double x) { return concat("2^", std::ilogb(x)); };
        std::printf("%-6s  %4d  %4d  %8d  %8d  %4d  %13.7g  %15s  %8s  %7s  %6.1f\n", f->name, f->bits(), 1, f->E, f->M,
                    f->bias(), f->largest(), power(f->smallest_normal()).c_str(), power(f->smallest()).c_str(),
                    power(f->epsilon()).c_str(), f->digits());
    }
    std::printf(
        "\n"
        "fp32    the reference: sums, norms, master weights, optimizer states\n"
        "tf32    fp32 as a tensor core reads it: fp32's range with fp16's digits\n"
        "bf16    the upper half of an fp32: all its range, so gradients need no scaling, but only two digits\n"
        "fp16    three digits and a narrow range: gradients get lost unless the loss is scaled\n"
        "e5m2    fp8 for gradients, which need range: the upper half of an fp16\n"
        "e4m3    fp8 for weights and activations, which need digits: each tensor gets a scale of its own\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// One number in all formats

std::string binary(uint32_t bits, int n) {
    std::string text;
    for (int i = n; i-- > 0;) text += (bits >> i & 1) ? '1' : '0';
    return text;
}

std::string number(double x) { return std::isnan(x) ? "nan" : format("%.10g", x); }

// What happened to x when it was converted to the format.
std::string verdict(const Format& f, double x) {
    const double plain = f.decode(f.encode(x, false)), stored = f.round(x);
    if (std::isnan(x)) return "NaN";
    if (!std::isfinite(plain)) {
        if (f.saturates)
            return concat(f.has_infinity || std::isfinite(x) ? "overflow" : "no infinity", ": saturates at ",
                          number(stored), " (otherwise ", number(plain), ")");
        return std::isfinite(x) ? "overflow to inf" : "infinity";
    }
    if (stored == 0) return x == 0 ? "zero" : "underflow to 0";
    const std::string error = stored == x ? "exact" : "rounded";
    if (std::fabs(stored) >= f.smallest_normal()) return "normal, " + error;
    const int n_bits = std::ilogb(stored) - std::ilogb(f.smallest()) + 1;
    return concat("subnormal, ", error, ": ", n_bits, " of ", f.M + 1, " significant bits left");
}

void print_number(const std::string& text, double x, const char* lesson) {
    std::printf("\n%s%s%s\n", text.c_str(), *lesson ? ": " : "", lesson);
    std::printf("      sign exponent mantissa                          stored     error  relative   spacing\n");
    for (const Format* f : formats) {
        const uint32_t code = f->encode(x, f->saturates);
        const double stored = f->decode(code), error = stored - x;
        const std::string errors = error == 0             ? "        0         0"
                                   : std::isfinite(error) ? format("%9.1e %9.1e", error, std::fabs(error / x))
                                                          : "        -         -";
        const std::string spacing = std::isfinite(stored) ? format("%.3g", f->spacing(stored)) : "-";
        std::printf("%-5s %4s %8s %-23s %16s %s %9s  %s\n", f->name, binary(code >> (f->E + f->M), 1).c_str(),
                    binary(code >> f->M & ((1u << f->E) - 1), f->E).c_str(),
                    binary(code & ((1u << f->M) - 1), f->M).c_str(), number(stored).c_str(), errors.c_str(),
                    spacing.c_str(), verdict(*f, x).c_str());
    }
}

// 0.1, 1e-8, inf, nan; powers 2^-24; C's hexadecimal 0x1.8p-3; bits with their format, fp16:0x7bff.
double parse_number(const std::string& text) {
    const auto all_of = [&](const std::string& part, auto convert) {
        char* end = nullptr;
        errno = 0;
        const auto value = convert(part.c_str(), &end);
        check(!part.empty() && *end == 0, "\"", text,
              "\" is not a number: write 0.1, 1e-8, 2^-24, inf, nan, or bits as fp16:0x7bff");
        check(errno == 0, "\"", text, "\" is out of the range of a double: write a number from 1e-307 to 1e308");
        return value;
    };
    const auto to_integer = [](const char* begin, char** end) { return std::strtoll(begin, end, 0); };
    if (const size_t colon = text.find(':'); colon != std::string::npos) {
        for (const Format* f : formats) {
            if (text.substr(0, colon) != f->name) continue;
            const long long code = all_of(text.substr(colon + 1), to_integer);
            check(code >= 0 && code < 1LL << f->bits(), "\"", text, "\": ", f->name, " has ", f->bits(), " bits");
            return f->decode(static_cast<uint32_t>(code));
        }
        fail("\"", text, "\": the formats are fp32, tf32, bf16, fp16, e5m2 and e4m3");
    }
    if (text.starts_with("2^")) {
        const long long exponent = all_of(text.substr(2), to_integer);
        check(std::abs(exponent) < 1022, "\"", text, "\": the exponent must lie between -1022 and 1022");
        return std::ldexp(1.0, static_cast<int>(exponent));
    }
    check(text.find("0x") == std::string::npos || text.find('p') != std::string::npos, "\"", text,
          "\": bits of which format? Write fp16:0x7bff");
    return all_of(text, [](const char* begin, char** end) { return std::strtod(begin, end); });
}

void print_lessons() {
    const std::pair<const char*, const char*> lessons[] = {
        {"1", "every format has it; the spacing is the format's epsilon"},
        {"0.1", "no binary format has it: 1/10 repeats in base 2 as 1/3 does in base 10"},
        {"3.14159265358979", "with seven digits, three, two, one"},
        {"2049", "fp16 has all integers up to 2048, bf16 up to 256: beyond that, the spacing is 2 or more"},
        {"448", "the largest of e4m3"},
        {"500",
         "too large for e4m3: fp8 conversions give the largest number, since one infinity spoils a whole tensor"},
        {"65504", "the largest of fp16"},
        {"70000", "too large for fp16: infinity, and soon NaN, since inf - inf is NaN"},
        {"6e-8", "the smallest of fp16, 2^-24, with one bit left of eleven"},
        {"1e-8", "a small gradient: fp16 makes it zero, and the weight does not learn from it"}};
    for (const auto& [text, lesson] : lessons) print_number(text, parse_number(text), lesson);
}

// ---------------------------------------------------------------------------------------------------------------------
// A small addend is lost when it is added to a large sum: a + b == a if b is less than half the spacing at a.

void print_big_eats_small() {
    const Format* const stored_formats[] = {&fp32, &bf16, &fp16, &e5m2, &e4m3};  // nothing is stored in tf32
    constexpr int n = 10000;
    constexpr double term = 0.1;
    std::printf("\nSMALL ADDENDS ARE LOST IN LARGE SUMS: a + b == a if b is less than half the spacing at a\n");
    std::printf("\n0.1 added %d times, the running sum kept in the format or in fp32\n", n);
    std::printf(
        "        0.1 stored as  sum in the format  stuck from term  same terms, sum in fp32  1 + 1 + ... ends at\n");
    for (const Format* f : stored_formats) {
        const double b = f->round(term);
        double sum = 0, fp32_sum = 0, count = 0;
        int stop = 0;
        for (int i = 1; i <= n; ++i) {
            const double next = f->round(sum + b);  // the exact sum, rounded once: what a GPU's addition does
            if (next == sum && stop == 0) stop = i;
            sum = next;
            fp32_sum = fp32.round(fp32_sum + b);
        }
        while (f->round(count + 1) != count) count = f->round(count + 1);
        std::printf("%-6s  %13s  %17s  %15s  %23s  %19s\n", f->name, number(b).c_str(), number(sum).c_str(),
                    stop == 0 ? "-" : std::to_string(stop).c_str(), number(fp32_sum).c_str(), number(count).c_str());
    }
    std::printf("So kernels read and write 16 bits, and add in fp32.\n");

    constexpr int steps = 1000;
    std::printf("\nA weight that starts at 1 after %d updates  w = w + lr g\n", steps);
    std::printf("    lr g       exact   w in fp32   w in fp16   w in bf16   bf16 copy of an fp32 master weight\n");
    for (const double update : {1e-2, 1e-3, 1e-4, -1e-3}) {
        double w32 = 1, w16 = 1, wb = 1;
        for (int i = 0; i < steps; ++i) {
            w32 = fp32.round(w32 + update);
            w16 = fp16.round(w16 + update);
            wb = bf16.round(wb + update);
        }
        std::printf("%8g  %10.5g  %10.5g  %10.5g  %10.5g  %10.5g\n", update, 1 + steps * update, w32, w16, wb,
                    bf16.round(w32));
    }
    std::printf(
        "bf16's spacing at 1 is 2^-7: steps below half of it change nothing. So the optimizer updates a master\n"
        "weight in fp32, and the model computes with its copy in bf16.\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients of a training step

struct GradientOptions {
    std::string model = "tiny", out = "gradients.png";
    int64_t batch = 16, seq = 128, steps = 50;
};

struct Gradients {
    std::string name;
    bool of_parameters = false;
    std::vector<float> values;
};

// Trains on this machine's C++ headers, byte by byte, in fp32, and returns all gradients of the step after that. The
// gradients of activations are those that are there when the backward ends: of the logits, and of the first block, the
// last one that it visits.
std::vector<Gradients> gradients_of_a_step(const GradientOptions& o) {
    Config config = load_config(o.model);
    const auto tokenizer = make_byte_tokenizer();
    config.T_max = std::max(config.T_max, o.seq);
    const int64_t N = o.batch * o.seq;
    const cudaStream_t stream = device().stream;
    Arena weights("weights"), grads("gradients"), masters("master weights"), states("optimizer states"),
        activations("activations");
    Model model;
    Activations acts;
    Workspace workspace;
    std::unique_ptr<Optimizer> adamw;
    Tensor norm, norm_scratch;
    for (int pass = 0; pass < 2; ++pass) {  // counting, then for real
        model = build_model(config, {}, o.seq, weights, grads, masters);
        adamw = make_optimizer("adamw", states, model.params, model.weights.n(), default_optimizer_options("adamw"));
        acts = take_activations(model, o.batch, o.seq, {}, activations);
        workspace = take_workspace(model, o.batch, o.seq, true, activations);
        norm = activations.take("norm", DType::f32, {2});
        norm_scratch = activations.take("norm", DType::f32, {grad_norm_scratch_n(model.grads.n())});
        if (pass == 0)
            for (Arena* arena : {&weights, &grads, &states, &activations}) arena->reserve();
    }
    adamw->init(stream);
    init_weights(model, 1);

    const BatchReader data(TokenSource::open("", *tokenizer), o.seq, 1);
    std::vector<int32_t> tokens(static_cast<size_t>(N)), targets(static_cast<size_t>(N));
    const Schedule schedule{.peak = 3e-3, .warmup = o.steps / 10, .steps = std::max<int64_t>(1, o.steps)};
    workspace.accumulate = false;  // a step has one micro-batch
    for (int64_t step = 1; step <= o.steps + 1; ++step) {
        for (int64_t b = 0; b < o.batch; ++b)
            data.sequence((step - 1) * o.batch + b, tokens.data() + b * o.seq, targets.data() + b * o.seq);
        copy_to_device(acts.tokens, tokens.data());
        copy_to_device(acts.targets, targets.data());
        forward(model, acts, workspace, stream);
        // The loss is a mean over N tokens: every gradient has a factor 1/N, and larger batches have smaller ones.
        loss_backward(model, acts, 1.0f / static_cast<float>(N), stream);
        backward(model, acts, workspace, stream);
        if (step > o.steps) break;
        grad_norm(norm, model.grads, 1.0f, 1.0f, norm_scratch, stream);
        adamw->step(model.all_weights(1), model.grads, norm, learning_rate(schedule, step), step, stream);
    }
    cudaCheck(cudaStreamSynchronize(stream));
    double loss = 0;
    for (const float token_loss : to_floats(acts.losses))
        loss += static_cast<double>(token_loss) / static_cast<double>(N);
    std::printf("%s after %lld steps of %lld tokens, trained in fp32; loss %.3f\n", o.model.c_str(),
                static_cast<long long>(o.steps), static_cast<long long>(N), loss);
    // Where each attention keeps its first product and its heads, and each feed-forward its product
    // (model/attention_gqa.cu, ...). The backward of GELU writes dup only: its feed-forward has no dact.
    const Slots &attention = workspace.dattention, &feed_forward = workspace.dfeed_forward;
    const std::vector<std::pair<std::string, Tensor>> of_activations = {
        {"dlogits", acts.logits},   {"dresidual", workspace.dresidual},
        {"dnorm", workspace.dnorm}, {"dqkv", attention[0]},
        {"dattn", attention[2]},    {"dup", feed_forward[0]},
        {"dact", feed_forward[1]}};
    std::vector<Gradients> all;
    for (const auto& [name, gradient] : of_activations)
        if (gradient.exists()) all.push_back({name, false, to_floats(gradient)});
    all.push_back({"parameters", true, to_floats(model.grads)});
    return all;
}

// What fp16 makes of gradients times a loss scale. The backward is linear in the loss, and a power of two changes only
// exponents: scaling the loss scales each gradient exactly by the same factor. Gradients that are 0 in fp32 already are
// not counted.
struct Shares {
    double n = 0, flushed = 0, subnormal = 0, normal = 0, overflow = 0;
    void add(const std::vector<float>& values, double scale) {
        for (const float value : values) {
            if (value == 0) continue;
            const double stored = std::fabs(fp16.round(static_cast<double>(value) * scale));
            n += 1;
            (stored == 0                       ? flushed
             : !std::isfinite(stored)          ? overflow
             : stored < fp16.smallest_normal() ? subnormal
                                               : normal) += 1;
        }
    }
    double percent(double count) const { return n > 0 ? 100 * count / n : 0; }
};

Shares shares_of(const std::vector<Gradients>& all, bool of_parameters, double scale) {
    Shares shares;
    for (const Gradients& g : all)
        if (g.of_parameters == of_parameters) shares.add(g.values, scale);
    return shares;
}

// A dynamic loss scale doubles until a gradient overflows, and then halves: so it stays near the largest power of two
// for which all of them are finite.
double dynamic_scale(const std::vector<Gradients>& all) {
    float largest = 0;
    for (const Gradients& g : all)
        for (const float value : g.values) largest = std::max(largest, std::fabs(value));
    check(largest > 0 && std::isfinite(largest), "the largest gradient is ", largest, ": there is nothing to scale");
    double scale = 1;
    while (std::isfinite(fp16.round(2 * scale * static_cast<double>(largest)))) scale *= 2;
    return scale;
}

void print_gradients(const std::vector<Gradients>& all, double dynamic) {
    const double scales[] = {1, 1024, 65536, dynamic};
    const auto scale_name = [&](double scale) {
        return scale == dynamic ? concat("2^", std::ilogb(scale)) : number(scale);
    };
    std::printf("\nshare of the gradients that fp16 makes zero, by loss scale; all but dlogits: of the first block\n");
    std::printf("%-12s %10s  %10s  %10s", "", "not zero", "median", "largest");
    for (const double scale : scales) std::printf("  %10s", scale_name(scale).c_str());
    std::printf("\n");
    for (const Gradients& g : all) {
        std::vector<float> sizes;
        for (const float value : g.values)
            if (value != 0) sizes.push_back(std::fabs(value));
        check(!sizes.empty(), g.name, ": all gradients are zero");
        std::sort(sizes.begin(), sizes.end());
        std::printf("%-12s %10zu  %10.1e  %10.1e", g.name.c_str(), sizes.size(),
                    static_cast<double>(sizes[sizes.size() / 2]), static_cast<double>(sizes.back()));
        for (const double scale : scales) {
            Shares shares;
            shares.add(g.values, scale);
            std::printf("  %8.3f %%", shares.percent(shares.flushed));
        }
        std::printf("\n");
    }
    std::printf("\nall of them in fp16\n%-12s %10s  %11s  %11s  %11s  %11s\n", "", "loss scale", "zero", "subnormal",
                "normal", "overflow");
    for (const bool of_parameters : {false, true}) {
        for (const double scale : scales) {
            const Shares s = shares_of(all, of_parameters, scale);
            std::printf("%-12s %10s  %9.3f %%  %9.3f %%  %9.3f %%  %9.3f %%\n",
                        of_parameters ? "parameters" : "activations", scale_name(scale).c_str(), s.percent(s.flushed),
                        s.percent(s.subnormal), s.percent(s.normal), s.percent(s.overflow));
        }
    }
    std::printf(
        "\n2^%d is where dynamic scaling settles: the largest power of two at which no gradient overflows.\n"
        "Each gradient was rounded by itself. A backward in fp16 loses more: a zero makes zeros of all that follow "
        "from it.\n",
        std::ilogb(dynamic));
}

// ---------------------------------------------------------------------------------------------------------------------
// The picture: a histogram of exponents before and after scaling, over the ranges of the formats

using Color = Canvas::Color;
using Align = Canvas::Align;
constexpr Color ink{38, 38, 38}, soft_ink{89, 89, 89}, grid{215, 215, 215}, white{255, 255, 255};
constexpr Color blue{0, 114, 178}, orange{213, 94, 0};                          // the two histograms
constexpr Color lost{250, 222, 214}, weak{253, 243, 213}, good{226, 243, 232};  // what fp16 makes of an exponent

struct Histogram {  // percent of the gradients with 2^e <= |g| < 2^(e+1); the first bin holds all smaller ones too
    int low;
    std::vector<double> percent;
};

Histogram histogram(const std::vector<Gradients>& all, bool of_parameters, double scale, int low, int high) {
    Histogram h{low, std::vector<double>(static_cast<size_t>(high - low), 0.0)};
    double n = 0;
    for (const Gradients& g : all) {
        if (g.of_parameters != of_parameters) continue;
        for (const float value : g.values) {
            if (value == 0) continue;
            n += 1;
            h.percent[static_cast<size_t>(std::clamp(std::ilogb(static_cast<double>(value) * scale), low, high - 1) -
                                          low)] += 1;
        }
    }
    for (double& count : h.percent) count *= 100 / n;
    return h;
}

struct Panel {
    double left, right, top, bottom;
    int low, high;   // exponents at its left and right end
    double highest;  // percent at its top
    double x(double exponent) const {
        return left + (std::clamp<double>(exponent, low, high) - low) / (high - low) * (right - left);
    }
    double y(double percent) const { return bottom - percent / highest * (bottom - top); }
};

void draw_panel(Canvas& canvas, const Panel& p, const std::vector<Gradients>& all, double scale,
                const std::string& title) {
    // fp16 rounds magnitudes up to 2^-25 to zero, and those from 65520 on, nearly 2^16, to infinity.
    const double zero = -25, normal = -14, overflow = 16;
    const struct {
        double from, to;
        Color color;
        const char* name;
    } zones[] = {{double(p.low), zero, lost, "0 in fp16"},
                 {zero, normal, weak, "subnormal"},
                 {normal, overflow, good, "normal in fp16"},
                 {overflow, double(p.high), lost, "inf"}};
    for (const auto& zone : zones) {
        canvas.fill(p.x(zone.from), p.top, p.x(zone.to), p.bottom, zone.color);
        canvas.text({(p.x(zone.from) + p.x(zone.to)) / 2, p.top + 18}, zone.name, 10, soft_ink, Align::center);
    }
    const int step = p.highest > 24 ? 10 : 5;
    for (int percent = 0; percent < p.highest; percent += step) {
        const double y = std::floor(p.y(percent));
        canvas.fill(p.left, y, p.right, y + 1, percent == 0 ? ink : grid);
        canvas.text({p.left - 10, y + 5}, concat(percent, " %"), 10, soft_ink, Align::right);
    }
    const Histogram activations = histogram(all, false, scale, p.low, p.high);
    const Histogram parameters = histogram(all, true, scale, p.low, p.high);
    std::vector<Canvas::Point> outline{{p.x(p.low), p.bottom}};
    for (int e = p.low; e < p.high; ++e) {
        const size_t i = static_cast<size_t>(e - p.low);
        canvas.fill(p.x(e) + 1, p.y(activations.percent[i]), p.x(e + 1) - 1, p.bottom, blue);
        for (const int side : {e, e + 1}) outline.push_back({p.x(side), p.y(parameters.percent[i])});
    }
    outline.push_back({p.x(p.high), p.bottom});
    canvas.line(outline, 2.4, orange);
    canvas.text({p.left, p.top - 12}, title, 11, ink, Align::left, true);
}

void draw_formats(Canvas& canvas, const Panel& p) {
    double y = p.top;
    for (const Format* f : {&bf16, &fp16, &e5m2, &e4m3}) {
        const double low = std::log2(f->smallest()), normal = std::log2(f->smallest_normal()),
                     high = std::log2(f->largest());
        canvas.text({p.left - 10, y + 12}, f->name, 10, ink, Align::right);
        canvas.fill(p.x(low), y, p.x(normal), y + 14, blue, 0.3);
        canvas.fill(p.x(normal), y, p.x(high), y + 14, blue, 0.75);
        if (f == &bf16)
            canvas.text({(p.left + p.right) / 2, y + 12},
                        "as fp32 and tf32: from 2^-126 to 2^128, far beyond both edges", 10, white, Align::center);
        y += 22;
    }
    canvas.text({p.left, y + 12}, "Dark: normal numbers. Pale: subnormal ones, with fewer and fewer digits.", 10,
                soft_ink);
}

void draw_gradients(const std::string& path, const std::vector<Gradients>& all, double dynamic,
                    const std::string& subject) {
    // To the left as far as one gradient in a thousand reaches; the first bin holds the rest.
    std::vector<int> exponents;
    for (const Gradients& g : all)
        for (const float value : g.values)
            if (value != 0) exponents.push_back(std::ilogb(value));
    std::nth_element(exponents.begin(), exponents.begin() + static_cast<std::ptrdiff_t>(exponents.size() / 1000),
                     exponents.end());
    const int low = std::clamp(exponents[exponents.size() / 1000], -80, -36) / 4 * 4 - 4, high = 20;
    double highest = 0;
    for (const double scale : {1.0, dynamic})
        for (const bool of_parameters : {false, true})
            for (const double percent : histogram(all, of_parameters, scale, low, high).percent)
                highest = std::max(highest, percent);

    Canvas canvas(1100, 872);
    const double with_names = 1.25 * highest;  // of the zones, above the bars
    const Panel before{86, 1072, 98, 370, low, high, with_names}, after{86, 1072, 416, 688, low, high, with_names};
    const Panel ranges{86, 1072, 752, 838, low, high, 0};
    canvas.text({before.left, 30}, "Gradients of " + subject, 13, ink, Align::left, true);
    canvas.fill(before.left, 44, before.left + 22, 56, blue);
    canvas.text({before.left + 32, 55}, "of activations", 10, ink);
    canvas.line({{before.left + 190, 50}, {before.left + 212, 50}}, 2.4, orange);
    canvas.text({before.left + 222, 55}, "of parameters", 10, ink);
    canvas.text({before.right, 55}, "share of all that are not zero, per power of two", 10, soft_ink, Align::right);
    for (const auto& [panel, scale] : {std::pair{&before, 1.0}, std::pair{&after, dynamic}}) {
        const Shares shares = shares_of(all, false, scale);
        const std::string share = format("%.2g %%", shares.percent(shares.flushed));
        draw_panel(canvas, *panel, all, scale,
                   concat(scale == 1 ? "Loss scale 1" : concat("Loss scale 2^", std::ilogb(scale)), ": fp16 makes ",
                          share, " of the activation gradients zero"));
    }
    for (int e = low; e <= high; e += 4) {
        const double x = std::floor(after.x(e));
        canvas.fill(x, after.bottom, x + 1, after.bottom + 5, ink);
        canvas.text({x, after.bottom + 21}, concat("2^", e), 10, soft_ink, Align::center);
    }
    canvas.text({(after.left + after.right) / 2, after.bottom + 44}, "size of the gradient", 10, ink, Align::center);
    draw_formats(canvas, ranges);
    canvas.save(path);
}

void show_gradients(const GradientOptions& o) {
    const std::filesystem::path folder = std::filesystem::absolute(o.out).parent_path();
    check(std::filesystem::is_directory(folder), "--out ", o.out, ": there is no folder ", folder.string());
    const std::vector<Gradients> all = gradients_of_a_step(o);
    const double dynamic = dynamic_scale(all);
    print_gradients(all, dynamic);
    draw_gradients(o.out, all, dynamic,
                   concat("a training step: ", o.model, ", ", o.batch * o.seq, " tokens, after ", o.steps, " steps"));
    std::printf("%s shows their exponents before and after scaling\n", o.out.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------

void show_formats(const std::vector<std::string>& numbers) {
    std::vector<double> values;
    for (const std::string& text : numbers) values.push_back(parse_number(text));  // all before the first is printed
    print_formats();
    std::printf("\nNUMBERS\n");
    for (size_t i = 0; i < numbers.size(); ++i)
        print_number(numbers[i], values[i],
                     numbers[i].find_first_of(":^x") == std::string::npos ? "" : number(values[i]).c_str());
    if (!numbers.empty()) return;
    print_lessons();
    print_big_eats_small();
    std::printf("\nfloat_formats --gradients shows what this does to a training step.\n");
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> numbers;
    GradientOptions o;
    bool gradients = false;
    CommandLine line{"float_formats: what each format stores: 0.1, 1e-8, 2^-24, inf, nan, or bits as fp16:0x7bff"};
    line.words("[NUMBER ...]", numbers, SIZE_MAX);
    Heading h{line, "Options"};
    h.option("--model", o.model, "a preset of train_gpt, or a config.json: random weights; a token is a byte");
    h.count("--steps", o.steps, "training steps before", 0);
    h.count("--batch", o.batch, "sequences per step");
    h.count("--seq", o.seq, "tokens per sequence");
    h.option("--out", o.out, "the picture");
    h.flag("--gradients", gradients,
           "in place of numbers: the gradients of a training step in fp16, before and\nafter loss scaling; the flags "
           "above belong to it");
    return run_program("float_formats", line, argc, argv, [&] {
        for (const std::string& flag : line.flags()) check(gradients || !line.given(flag), flag, " needs --gradients");
        check(!gradients || numbers.empty(), "--gradients takes no numbers: leave out one of the two");
        if (gradients) show_gradients(o);
        else show_formats(numbers);
    });
}
