// io/list_folder.h: what is in a folder, and which folder a file is in. Apart from io.h because few files need it.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

// The paths of all that lies in it, in the order of their names. Error that names the folder if it cannot be read.
std::vector<std::filesystem::path> list_folder(const std::string& folder);
// The same where a missing folder may be no mistake: `error` is what keeps it from being read to its end. An entry
// knows whether it is a folder even where its path is too long to be opened.
std::vector<std::filesystem::directory_entry> folder_entries(const std::string& folder, std::error_code& error);
// The folder that a path lies in; "." where the path names none.
std::string folder_of(const std::string& path);
