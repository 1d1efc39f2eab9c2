// model/sublayers.cu: the attentions and feed-forwards that there are. A new one is its own file and a line here.
#include "model/sublayer.h"

extern const SubLayer kGroupedQueryAttention, kLatentAttention, kFactorizationAttention;
extern const SubLayer kSwiGlu, kGelu;

std::vector<const SubLayer*>& attention_table() {
    static std::vector<const SubLayer*> table = {&kGroupedQueryAttention, &kLatentAttention, &kFactorizationAttention};
    return table;
}
std::vector<const SubLayer*>& feed_forward_table() {
    static std::vector<const SubLayer*> table = {&kSwiGlu, &kGelu};
    return table;
}

namespace {

const SubLayer& find(const std::vector<const SubLayer*>& table, const char* what, const std::string& name) {
    std::string names;
    for (const SubLayer* layer : table) {
        if (name == layer->name) return *layer;
        names += (names.empty() ? "" : ", ") + std::string(layer->name);
    }
    fail("there is no ", what, " '", name, "': use one of ", names);
}

}  // namespace

const SubLayer& find_attention(const std::string& name) { return find(attention_table(), "attention", name); }
const SubLayer& find_feed_forward(const std::string& name) { return find(feed_forward_table(), "feed-forward", name); }
