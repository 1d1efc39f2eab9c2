// io/list_folder.h: what is in a folder. Apart from io.h because few files need it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

// The paths of all that lies in it, in the order of their names. Error that names the folder if it cannot be read.
std::vector<std::filesystem::path> list_folder(const std::string& folder);
