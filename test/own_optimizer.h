// test/own_optimizer.h: parameters that lie in one array, and an optimizer of them with memory of its own.
#pragma once

#include "optim/optim.h"
#include "reference.h"

struct Layout {
    std::vector<Param> params;
    int64_t n = 0;
    // Matrices are decayed, unless the caller changes that.
    Param& add(const std::string& name, std::initializer_list<int64_t> dims, int64_t gap = 0) {
        Param param;
        param.name = name;
        param.value = make_tensor(nullptr, DType::f32, dims);
        param.offset = n;
        param.decay = dims.size() == 2;
        n += param.value.n() + gap;
        return params.emplace_back(param);
    }
};

inline std::vector<unsigned char> bits_of(const Tensor& tensor) {
    std::vector<unsigned char> bytes(tensor.bytes());
    copy_to_host(bytes.data(), tensor);
    return bytes;
}

// As a program sets it up: counted first, then taken.
struct OwnOptimizer {
    Arena arena{"optimizer"};
    std::unique_ptr<Optimizer> optimizer;
    OwnOptimizer(const std::string& name, const std::vector<Param>& params, int64_t n,
                 const OptimizerOptions& options) {
        make_optimizer(name, arena, params, n, options);
        arena.reserve();
        optimizer = make_optimizer(name, arena, params, n, options);
        optimizer->init(device().stream);
    }
    OwnOptimizer(const std::string& name, const Layout& layout)
        : OwnOptimizer(name, layout.params, layout.n, default_optimizer_options(name)) {}
    Optimizer* operator->() const { return optimizer.get(); }

    std::vector<std::vector<unsigned char>> states() const {
        std::vector<std::vector<unsigned char>> all;
        for (const OptimizerState& state : optimizer->states()) all.push_back(bits_of(state.tensor));
        return all;
    }
};
