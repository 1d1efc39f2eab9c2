// core/names.h: tables of what flags name. Apart from core.h because few files need it.
#pragma once

#include "core/core.h"

// An entry of such a table, unless it has more to say: constexpr Named<Offload> kOffloads[] = {{"none", Offload::none},
// ...}. What follows works on every table whose entries have a member `name`.
template <class T>
struct Named {
    const char* name;
    T value;
};

template <class Table>
std::vector<std::string> names_of(const Table& table) {
    std::vector<std::string> names;
    for (const auto& entry : table) names.emplace_back(entry.name);
    return names;
}

// Error that lists the names for any other one: "--cp-mode tree: use ring or ulysses".
template <class Table>
const auto& find_named(const Table& table, const char* flag, const std::string& name) {
    for (const auto& entry : table)
        if (name == entry.name) return entry;
    const std::vector<std::string> names = names_of(table);
    const std::vector<std::string> all_but_last(names.begin(), names.end() - 1);
    fail(flag, " ", name, ": use ", comma_list(all_but_last), " or ", names.back());
}

// Of few names, which stand beside the flag: choose<bool>("--dp-mode", text, {{"ddp", false}, {"naive", true}}).
template <class T>
T choose(const char* flag, const std::string& name, std::initializer_list<Named<T>> choices) {
    return find_named(choices, flag, name).value;
}

// The entry of a value, and its name.
template <class Table, class T>
const auto& find_value(const Table& table, const T& value) {
    for (const auto& entry : table)
        if (entry.value == value) return entry;
    fail("value ", static_cast<int>(value), " has no name: its table lacks it");
}
template <class Table, class T>
const char* name_of(const Table& table, const T& value) {
    return find_value(table, value).name;
}
