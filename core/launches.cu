// core/launches.cu: notes what is launched, with its cost, for the account of a training step.
#include "core/core.h"

namespace {
thread_local LaunchNotes* notes = nullptr;
}

LaunchNotes::LaunchNotes() {
    check(notes == nullptr, "launches are noted already");
    notes = this;
}
LaunchNotes::~LaunchNotes() { notes = nullptr; }

void launched(const char* kernel, const LaunchCost& cost, const char* file, int line) {
    cuda_check_launch(file, line);
    if (notes) notes->launches.push_back({kernel, cost});
}
