// training/checkpoint.cu: a run on disk. A resumed run goes on bit for bit, so everything that decides the next step is
// there: the weights as the optimizer has them (the float32 masters in mixed precision), its states, fp8's histories,
// the loss scale, and the number of the step, from which learning rate and data follow.
//
//     config.json, model.safetensors          one file, whatever the ranks: rank 0 collects what is cut
//     tokenizer.json, ...                     what transformers reads beside them (pretrained.cu)
//     optimizer.safetensors                   "m.model.norm.weight", ...: states by parameter, not by place in memory
//     optimizer-00002-of-00008.safetensors    with --pp and --tp each of a set of ranks that have the model together
//                                             writes what it has; with ZeRO every rank: also pieces,
//                                             "m.model.norm.weight@4096" from element 4096 on; with --tp of a matrix
//                                             whose columns are divided "...o_proj.weight@64:64:128", from element 64
//                                             on 64 of each 128; with --tp also
//                                             "m_codes.model.norm.weight, part 2 of tp 4", for it alone:
//                                             adam8bit's blocks lie in it; with --pp "fp8.histories@1024"
//     compression-00002-of-00008.safetensors  with --compress: the errors that each rank keeps for its next gradients
//     state.json                              the rest (state.cu)
//
// Reading puts pieces together as the new run has cut them: any number of ranks, any stage.
// Only compression's errors belong to a number of ranks, and to their parts of the gradients: with others they start at
// 0 again, and the run says so.
#include "io/list_folder.h"
#include "training/training.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace {

// A state of this rank's optimizers, and where its elements are in that of the whole parameter: one piece, or, where
// the parameter is cut (parallel/tensor), as many as it takes.
struct PlacedState {
    std::string name;  // "m.model.norm.weight"
    Tensor tensor;
    int64_t per;  // elements of the parameter to an element of the state; 0: one for all
    std::vector<CutPiece> pieces;
    int64_t padding_n;  // of the last elements: they belong to rows that only pad the vocabulary, and stay 0
    bool whole;         // it is all of the parameter's
    bool writes;        // of the ranks that have the same, one writes it
};
const char* const kPart = ", part ";
// How the layers are divided, where they are: "tp 4", "tp 8 2.5d depth 2".
std::string division(const Trainer& t) {
    const TensorLayout& layout = t.model.layout;
    const std::string words = concat("tp ", layout.size);
    if (layout.mode == TensorMode::one_d) return words;
    return concat(words, " ", tensor_mode_name(layout.mode), " depth ", layout.sizes[0]);
}

// Of the ranks of a pipeline that have the same unit, the first one writes it.
bool is_owner(const Trainer& t, size_t unit) {
    return !t.model.pipeline_ranks || t.model.pipeline_ranks->owns(t.model.units[unit]);
}

std::vector<PlacedState> placed_states(const Trainer& t) {
    std::vector<PlacedState> states;
    std::map<std::string, const Param*> params;
    for (const Param& param : t.model.params) params[param.name] = &param;
    std::map<std::string, Param> pieces;
    for (const UpdatedUnit& unit : t.model.updated_units())
        for (const Param& piece : unit.params) pieces[piece.name] = piece;
    for (const OptimizerState& state : t.optimizer->states()) {
        const size_t u = state.unit;
        const Param& piece = pieces.at(state.param);
        const int64_t n = state.tensor.n(), first = piece.first / std::max<int64_t>(1, state.per);
        const Param& param = *params.at(state.param);
        const bool is_cut = piece.cut.exists(), is_whole = piece.value.n() == param.value.n();
        PlacedState placed{.name = state.kind + "." + param.file_name(),
                           .tensor = state.tensor,
                           .per = state.per,
                           .pieces = {{0, n, first, n, n}},
                           .padding_n = 0,
                           .whole = is_whole,
                           .writes = is_owner(t, u) && (piece.counted || !t.tensor_parallel)};
        if (state.per == 1) placed.padding_n = std::clamp<int64_t>(piece.first + n - param.used_n(), 0, n);
        if (is_cut && state.per == 1) {
            placed.pieces = cut_pieces(piece.cut, piece.first, n);
            placed.whole = false;
        } else if (is_cut && state.per == 0) {  // of the whole parameter, on all ranks
            placed.writes = is_owner(t, u) && t.model.layout.rank == 0;
        } else if (is_cut) {  // blocks of this rank's part
            placed.name += concat(kPart, t.model.layout.rank + 1, " of ", division(t));
            placed.writes = is_owner(t, u);
        }
        placed.writes = placed.writes && param.copy_of.empty();
        states.push_back(std::move(placed));
    }
    return states;
}

const std::string kHistories = "fp8.histories";

// fp8's histories of the whole model, or those of this rank's blocks: all ranks with these blocks have the same.
std::vector<CutPiece> history_pieces(const Trainer& t) {
    const int64_t n = t.model.fp8_states.n(), of_block = n / t.model.n_blocks();
    if (!t.model.pipeline_ranks) return {{0, n, 0, n, n}};
    std::vector<CutPiece> pieces;
    for (int64_t i = 0; i < t.model.n_blocks(); ++i)
        pieces.push_back(
            {i * of_block, of_block, t.model.part.blocks[static_cast<size_t>(i)] * of_block, of_block, of_block});
    return pieces;
}

// Files that hold the optimizer's states: which this rank writes, if any, of how many.
struct StateFile {
    int index, n;
    bool writes;
};
StateFile state_file_of(const Trainer& t) {
    if (t.model.sharding.zero >= 1) return {t.world.rank, t.world.size, true};
    // Ranks that have the model together: one for each part of it, of the first share of the batch.
    const int pp = t.model.pipeline_ranks ? t.model.pipeline_ranks->rank() : 0;
    const int tp = static_cast<int>(t.options.tp);
    return {pp * tp + t.model.layout.rank, static_cast<int>(t.options.pp) * tp, t.model.sharding.rank == 0};
}
// Does this rank write the histories of its blocks?
bool writes_histories(const Trainer& t) {
    return t.model.fp8_states.exists() && t.model.sharding.rank == 0 && t.model.layout.rank == 0;
}
std::string numbered_file(const std::string& what, int i, int n) {
    return what + format("-%05d-of-%05d.safetensors", i + 1, n);
}
std::string state_file(int i, int n) { return n == 1 ? "optimizer.safetensors" : numbered_file("optimizer", i, n); }

const char* stored_dtype(DType dtype) {
    switch (dtype) {
        case DType::f32: return "F32";
        case DType::bf16: return "BF16";
        case DType::f16: return "F16";
        case DType::e4m3: return "F8_E4M3";
        case DType::e5m2: return "F8_E5M2";
        case DType::i8: return "I8";
        case DType::i32: return "I32";
    }
    return "?";
}

// All files with states of a checkpoint, by the name of the state: its pieces with their first elements.
class SavedStates {
  public:
    explicit SavedStates(const std::string& folder) : folder_(folder) {
        for (const std::filesystem::path& path : list_folder(folder)) {
            const std::string file = path.filename().string();
            if (!file.starts_with("optimizer") || path.extension() != ".safetensors") continue;
            files_.push_back(std::make_unique<SafetensorsReader>(path.string()));
            for (const auto& [name, stored] : files_.back()->tensors()) {
                const size_t at = name.rfind('@');
                Piece piece{0, stored.n(), stored.n(), &stored};
                if (at != std::string::npos) {
                    char* end = nullptr;
                    piece.first = std::strtoll(name.c_str() + at + 1, &end, 10);
                    if (*end == ':') piece.run = std::strtoll(end + 1, &end, 10);
                    if (*end == ':') piece.stride = std::strtoll(end + 1, &end, 10);
                    check(*end == 0 && piece.is_place(), path.string(), ": '", name,
                          "' names no place in its parameter");
                }
                pieces_[name.substr(0, at)].push_back(piece);
            }
        }
        check(!files_.empty(), folder, " holds no optimizer.safetensors: it is not a checkpoint to resume from");
    }

    // Fills the tensor, whose elements are these pieces of the whole, from whatever pieces have them.
    // per: as in OptimizerState.
    void read(const std::string& name, const Tensor& tensor, int64_t per, const std::vector<CutPiece>& wanted,
              int64_t padding_n) const {
        const auto found = pieces_.find(name);
        const std::string whole_name = name.substr(0, name.find(kPart));
        const auto part = pieces_.lower_bound(whole_name + kPart);
        const bool has_parts = part != pieces_.end() && part->first.starts_with(whole_name + kPart) &&
                               part->first.find("tp ") != std::string::npos;
        check(
            found != pieces_.end() || (!has_parts && whole_name == name), folder_, ": the run had ",
            has_parts ? concat("--", part->first.substr(part->first.rfind("tp "))) : "--tp 1",
            ", and the blocks of --optimizer adam8bit belong to the ranks' parts: go on with that --tp, or begin anew "
            "with --init and this folder");
        check(found != pieces_.end(), folder_, ": no file with the optimizer's states has '", name, "'");
        std::vector<char> bytes(tensor.bytes());
        const int64_t used_n = tensor.n() - padding_n;
        int64_t n_filled = 0;
        for (Piece piece : found->second) {
            piece.first /= std::max<int64_t>(1, per);
            check(piece.stored->dtype == stored_dtype(tensor.dtype), folder_, ": '", name, "' has dtype ",
                  piece.stored->dtype, ", expected ", stored_dtype(tensor.dtype));
            for (const CutPiece& w : wanted)
                for (int64_t k = 0; k < std::min(w.n, used_n - w.local_first); k += w.run)  // neighbours of the whole
                    n_filled += copy_run(bytes.data(), dtype_bytes(tensor.dtype), piece, w.first + k / w.run * w.stride,
                                         std::min({w.run, w.n - k, used_n - w.local_first - k}), w.local_first + k);
        }
        check(n_filled == used_n, folder_, ": '", name, "' has ", n_filled, " of the ", used_n,
              " elements that the model asks for; ",
              n_filled < used_n ? "is a file missing?" : "are files of two checkpoints in it?");
        copy_to_device(tensor, bytes.data());
    }

  private:
    // Element i of `stored` is element  first + (i / run) * stride + i % run  of the whole.
    struct Piece {
        int64_t first, run, stride;
        const StoredTensor* stored;
        // 64 bits hold the end of the last run, too.
        bool is_place() const {
            if (first < 0 || run <= 0 || stride < run) return false;
            int64_t last = 0;
            return !__builtin_mul_overflow(stored->n() / run, stride, &last) &&
                   !__builtin_add_overflow(last, first, &last) && !__builtin_add_overflow(last, run, &last);
        }
    };

    // Copies those of elements [begin, begin + n) of the whole that the piece has, to `bytes` from element `to` on.
    static int64_t copy_run(char* bytes, size_t element_bytes, const Piece& piece, int64_t begin, int64_t n,
                            int64_t to) {
        int64_t copied = 0;
        const int64_t end = begin + n;
        for (int64_t i = std::max<int64_t>(0, (begin - piece.first) / piece.stride) * piece.run; i < piece.stored->n();
             i += piece.run) {
            const int64_t its_begin = piece.first + i / piece.run * piece.stride,
                          its_end = its_begin + std::min(piece.run, piece.stored->n() - i);
            if (its_begin >= end) break;
            const int64_t low = std::max(begin, its_begin), high = std::min(end, its_end);
            if (low >= high) continue;
            std::memcpy(bytes + static_cast<size_t>(to + low - begin) * element_bytes,
                        piece.stored->data + static_cast<size_t>(i + low - its_begin) * element_bytes,
                        static_cast<size_t>(high - low) * element_bytes);
            copied += high - low;
        }
        return copied;
    }

    std::string folder_;
    std::vector<std::unique_ptr<SafetensorsReader>> files_;
    std::map<std::string, std::vector<Piece>> pieces_;
};

TensorToStore to_store(const std::string& name, const Tensor& tensor) {
    return {name, stored_dtype(tensor.dtype), {tensor.n()}, [tensor](void* bytes) { copy_to_host(bytes, tensor); }};
}

void write_states(const Trainer& t, const std::string& path) {
    std::vector<TensorToStore> tensors;
    for (const PlacedState& state : placed_states(t)) {
        if (!state.writes) continue;
        for (const CutPiece& piece : state.pieces) {
            std::string name = state.name;
            if (!state.whole) name += concat("@", piece.first * std::max<int64_t>(1, state.per));
            if (piece.run < piece.n) name += concat(":", piece.run, ":", piece.stride);
            const Tensor all = state.tensor.view({state.tensor.n()});
            tensors.push_back(to_store(name, all.slice(piece.local_first, piece.n)));
        }
    }
    if (writes_histories(t)) {
        const Tensor all = t.model.fp8_states.view({t.model.fp8_states.n()});
        const std::vector<CutPiece> pieces = history_pieces(t);
        for (size_t i = 0; i < pieces.size(); ++i) {
            if (!is_owner(t, block_unit(static_cast<int64_t>(i)))) continue;
            const std::string place = t.model.pipeline_ranks ? concat("@", pieces[i].first) : "";
            tensors.push_back(to_store(kHistories + place, all.slice(pieces[i].local_first, pieces[i].n)));
        }
    }
    write_safetensors(path, tensors);
}

// The errors are those of a rank's part of the gradients, of its sequences. Of weights that several ranks have, a rank
// compresses the whole gradient or, where the ranks add it up afterwards, a part: of a norm with --sp, of a tied
// embedding's ends where Pipeline::reduce_gradients adds them last. Errors of one kind cannot take the place of the
// other: those of parts differ from rank to rank, and in a sum that all ranks need alike they would give them different
// weights.
std::string compression_file(const Trainer& t) {
    std::string name = t.options.tp > 1 ? "compression " + division(t) : "compression";
    if (t.options.sp) name += " sp";
    if (t.model.pipeline_ranks) {
        name += concat(" pp ", t.options.pp, " parts ", t.model.pipeline_ranks->key());
        if (t.options.cp > 1) name += concat(" cp ", t.options.cp);  // the ranks of a stage have other numbers then
        if (t.config.tied && !t.world.adds_in_rank_order()) name += " tied last";
    }
    std::ranges::replace(name, ' ', '-');
    return numbered_file(name, t.world.rank, t.world.size);
}
void write_compression(const Trainer& t, const std::string& folder) {
    std::vector<TensorToStore> tensors;
    for (const auto& [name, tensor] : t.data_parallel.compression_states()) tensors.push_back(to_store(name, tensor));
    if (!tensors.empty()) write_safetensors(folder + "/" + compression_file(t), tensors);
}
void read_compression(const Trainer& t, const std::string& folder) {
    const auto states = t.data_parallel.compression_states();
    const std::string path = folder + "/" + compression_file(t);
    if (states.empty()) return;
    // None of the ranks has its file then, or all of them: they share the folder (settle_folder), and it is whole. (One
    // that began anew beside one that did not would have another Q.)
    if (!std::filesystem::exists(path)) {
        if (t.world.rank == 0)
            std::printf(
                "--compress: the checkpoint has no errors of %d ranks%s%s: they start at 0\n", t.world.size,
                t.options.tp > 1 ? concat(" with --tp ", t.options.tp, t.options.sp ? " --sp" : " without --sp").c_str()
                                 : "",
                t.options.pp > 1
                    ? concat(" with --pp ", t.options.pp, ", these stages, this --cp and this order of sums").c_str()
                    : "");
        return;
    }
    const SafetensorsReader saved(path);
    for (const auto& [name, tensor] : states) {
        const StoredTensor& stored = saved.at(name);
        check(stored.dtype == stored_dtype(tensor.dtype) && stored.n() == tensor.n(), path, ": '", name, "' is ",
              stored.dtype, " of ", stored.n(), " elements, expected ", stored_dtype(tensor.dtype), " of ", tensor.n());
        copy_to_device(tensor, stored.data);
    }
}

}  // namespace

int64_t saved_state_bytes(const Trainer& t) {
    size_t bytes = 0;
    if (state_file_of(t).writes)
        for (const PlacedState& state : placed_states(t)) bytes += state.writes ? state.tensor.bytes() : 0;
    if (writes_histories(t)) bytes += t.model.fp8_states.bytes();
    for (const auto& [name, tensor] : t.data_parallel.compression_states()) bytes += tensor.bytes();
    return static_cast<int64_t>(bytes);
}

bool writes_checkpoint_files(const Trainer& t) {
    return state_file_of(t).writes || !t.data_parallel.compression_states().empty();
}

namespace {

RunState state_after(const Trainer& t, int64_t step) {
    const int64_t sequences = step * t.options.batch;
    return {.step = step,
            .updates = t.updates,
            .sequences = sequences,
            .tokens = sequences * t.options.seq,
            .loss_scale = t.scaler.scale,
            .good_steps = t.scaler.good_steps,
            .overflows = t.scaler.overflows,
            .data = t.data,
            .schedule = t.options.schedule,
            .best = t.best,
            .options = t.options.identity};
}

// What went wrong on this rank, or "": rank 0 knows then which checkpoint is the newest. Where one rank cannot write
// its part, all of them go on to the end of the collectives that collect the others' parts.
std::string write_checkpoint(Trainer& t, int64_t step) {
    std::string fault;
    const auto attempt = [&](const std::function<void()>& write, bool together = false) {
        try {
            write();
        } catch (const std::exception& error) {  // also one of std::filesystem
            // A rank that leaves a collective for lack of memory ends the run: the others would wait for it there.
            if (together && t.world.size > 1 && !dynamic_cast<const Error*>(&error)) throw;
            if (fault.empty()) fault = reason_of(error);
        }
    };
    const bool first = t.world.rank == 0;
    std::optional<CheckpointWriter> writer;
    if (first) attempt([&] { writer.emplace(t.options.out, step); });
    const std::string folder = broadcast_text(t.world, writer ? writer->folder() : "");
    if (folder.empty()) return fault;
    attempt([&] { save_model(t.model, folder, t.model_files.token_ids); }, true);
    const StateFile file = state_file_of(t);
    attempt([&] {
        if (file.writes) write_states(t, folder + "/" + state_file(file.index, file.n));
        write_compression(t, folder);
    });
    const auto faults = gather_numbers(t.world, {!fault.empty()});  // all have written
    for (size_t rank = 0; rank < faults.size() && first; ++rank)
        if (faults[rank][0] && fault.empty()) fault = concat("rank ", rank, " could not write its part");
    if (first && fault.empty())
        attempt([&] {
            for (const auto& [name, bytes] : t.model_files.files) {
                const std::filesystem::path path = folder + "/" + name;
                make_folder(path.parent_path().string());  // some have a folder of their own
                write_text_file(path.string(), bytes);
            }
            write_state(folder, state_after(t, step));
            const std::string left = writer->commit(t.options.keep, t.best ? t.best->step : 0);
            t.options.checkpoint = writer->final_folder();
            if (!left.empty()) end_progress_line(), std::fprintf(stderr, "train_gpt: %s\n", left.c_str());
        });
    return fault;
}

}  // namespace

void save_checkpoint(Trainer& t, int64_t step, bool last) {
    cudaCheck(cudaDeviceSynchronize());
    std::string fault;
    std::string& newest = t.options.checkpoint;  // not find_checkpoints': a run may have gone on after a broken one
    const std::string before = newest;
    t.world.patiently([&] {
        fault = write_checkpoint(t, step);
        newest = broadcast_text(t.world, newest);
    });
    // The best step could not be saved: then the best checkpoint is the one before it, which the next save must keep.
    if (newest == before && t.best && t.best->step == step) t.best = t.best_before;
    if (t.world.rank != 0) {
        if (!fault.empty()) std::fprintf(stderr, "train_gpt: rank %d: %s\n", t.world.rank, fault.c_str());
        return;
    }
    if (fault.empty()) return note_saved(t.options, step, last);
    check(!newest.empty(), "step ", step, " could not be saved, and no checkpoint was before it: ", fault);
    check(!last, "step ", step, ", the last, could not be saved: ", fault, ". The newest checkpoint is ", newest,
          ": continue from it with --resume");
    end_progress_line();
    std::fprintf(stderr,
                 "train_gpt: step %lld could not be saved: %s. The run goes on, and tries again at the next save; the "
                 "newest checkpoint is %s\n",
                 static_cast<long long>(step), fault.c_str(), newest.c_str());
}

int64_t resume_run(Trainer& t) {
    TrainOptions& o = t.options;
    const std::optional<Schedule> newest = read_state(o.checkpoint).schedule;
    const std::string folder = o.checkpoint = whole_checkpoint(t.world, o.out);

    load_weights(t.model, folder);
    const SavedStates saved(folder);
    for (const PlacedState& state : placed_states(t))
        saved.read(state.name, state.tensor, state.per, state.pieces, state.padding_n);
    if (t.model.fp8_states.n() > 0) saved.read(kHistories, t.model.fp8_states, 1, history_pieces(t), 0);
    read_compression(t, folder);
    RunState state = read_state(folder);
    // Behind a broken checkpoint: the schedule that the run had there, if it had begun by this step.
    if (newest && newest->from <= state.step) state.schedule = newest;
    t.updates = state.updates;
    t.scaler.scale = state.loss_scale;
    t.scaler.good_steps = state.good_steps;
    t.scaler.overflows = state.overflows;
    t.best = state.best;
    const ResumedSchedule resumed = resumed_schedule(o, state);
    o.schedule = resumed.schedule;
    if (t.world.rank == 0) {
        std::printf("resumed after step %lld%s\n", static_cast<long long>(state.step),
                    state.step == o.steps ? ", the last: to lengthen the run, give it more --steps" : "");
        if (!resumed.change.empty()) std::printf("%s\n", resumed.change.c_str());
    }
    return state.step;
}
