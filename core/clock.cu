// core/clock.cu: the host's clock.
#include "core/core.h"

#include <chrono>

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
