// Numbers as people read them: three digits and a unit.
#include <cmath>

#include "io/io.h"

std::string human_count(double n) {
    if (!std::isfinite(n)) return format("%g", n);
    const char* units[] = {"", "k", "M", "G", "T", "P"};
    int unit = 0;
    // 999.5, not 1000: what would be rounded to 1000 takes the next unit.
    while (std::fabs(n) >= 999.5 && unit < 5) n /= 1000, ++unit;
    return format(std::fabs(n) < 999.5 ? "%.3g%s" : "%.0f%s", n, units[unit]);
}

std::string human_bytes(double bytes) {
    if (!std::isfinite(bytes)) return format("%g B", bytes);
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (std::fabs(bytes) >= 1023.5 && unit < 4) bytes /= 1024, ++unit;
    const double size = std::fabs(bytes);
    const int digits = unit == 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
    return format("%.*f %s", digits, bytes, units[unit]);
}

std::string human_seconds(double s) {
    if (!std::isfinite(s) || s < 0) return "?";
    if (s < 0.9995e-3) return format("%.3g us", s * 1e6);
    if (s < 0.9995) return format("%.3g ms", s * 1e3);
    if (s < 9.95) return format("%.1fs", s);
    if (s >= 1e9) return format("%.0f years", s / (365.25 * 86400));
    const long long seconds = std::llround(s), minutes = seconds / 60, hours = minutes / 60;
    if (minutes == 0) return format("%llds", seconds);
    if (hours == 0) return format("%lldm %02llds", minutes, seconds % 60);
    if (hours < 24) return format("%lldh %02lldm", hours, minutes % 60);
    return format("%lldd %02lldh", hours / 24, hours % 24);
}
