// io/deflate.h: bytes in fewer bytes, as PNG and zip files have them.
#pragma once

#include <string>
#include <string_view>

// The zlib stream (RFC 1950) of these bytes.
std::string zlib_stream(std::string_view bytes);
