// trainer_checkpoint.cu: a run on disk. A resumed run goes on bit for bit, so everything that decides the next step is
// there: the weights as the optimizer has them (the float32 masters in mixed precision), its states, fp8's histories, the loss
// scale, and the number of the step, from which learning rate and data follow.
#include "trainer.h"

#include <nlohmann/json.hpp>

namespace {

// The optimizer's states as the file names them. Those that have an element for each parameter are cut by parameter
// ("m.model.norm.weight"), so that the file does not depend on how our memory is laid out.
std::vector<std::pair<std::string, Tensor>> state_tensors(const Trainer& t) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const OptimizerState& state : t.optimizer->states()) {
        if (!state.flat) {
            tensors.push_back({state.name, state.tensor});
            continue;
        }
        for (const Param& param : t.model.params)
            tensors.push_back({state.name + "." + param.name, state.tensor.slice(param.offset, param.value.n())});
    }
    if (t.model.fp8_states) tensors.push_back({"fp8.histories", t.model.fp8_states});
    return tensors;
}

const char* stored_dtype(DType dtype) {
    switch (dtype) {
        case DType::f32: return "F32";
        case DType::bf16: return "BF16";
        case DType::f16: return "F16";
        case DType::e4m3: return "F8_E4M3";
        case DType::e5m2: return "F8_E5M2";
        case DType::i32: return "I32";
    }
    return "?";
}

}  // namespace

void save_checkpoint(const Trainer& t, int64_t step) {
    CheckpointWriter writer(t.options.out, step);
    save_model(t.model, writer.folder());
    std::vector<TensorToStore> states;
    for (const auto& [name, tensor] : state_tensors(t))
        states.push_back({name, stored_dtype(tensor.dtype), {tensor.n()}, [tensor = tensor](void* bytes) { copy_to_host(bytes, tensor); }});
    write_safetensors(writer.folder() + "/optimizer.safetensors", states);
    const nlohmann::ordered_json state = {
        {"step", step},
        {"updates", t.updates},
        {"sequences", step * t.options.batch},
        {"tokens", step * t.options.batch * t.options.seq},
        {"loss_scale", {{"scale", t.scaler.scale}, {"good_steps", t.scaler.good_steps}, {"overflows", t.scaler.overflows}}},
        {"options", t.options.identity}};
    write_text_file(writer.folder() + "/state.json", state.dump(2) + "\n");
    writer.commit(static_cast<int>(t.options.keep));
}

int64_t load_checkpoint(Trainer& t) {
    const std::string folder = latest_checkpoint(t.options.out).value();
    load_weights(t.model, folder);
    const SafetensorsReader states(folder + "/optimizer.safetensors");
    for (const auto& [name, tensor] : state_tensors(t)) {
        const StoredTensor& stored = states.at(name);
        check(stored.dtype == stored_dtype(tensor.dtype) && stored.n() == tensor.n(), folder, "/optimizer.safetensors: '", name,
              "' does not fit the model");
        copy_to_device(tensor, stored.data);
    }
    try {
        const nlohmann::json state = nlohmann::json::parse(read_text_file(folder + "/state.json"));
        const nlohmann::json& scale = state.at("loss_scale");
        t.updates = state.at("updates").get<int64_t>();
        t.scaler.scale = scale.at("scale").get<double>();
        t.scaler.good_steps = scale.at("good_steps").get<int64_t>();
        t.scaler.overflows = scale.at("overflows").get<int64_t>();
        return state.at("step").get<int64_t>();
    } catch (const nlohmann::json::exception& error) {
        fail(folder, "/state.json is not a training state: ", error.what());
    }
}
