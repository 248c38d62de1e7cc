// What cudasched_last_error() says on the calling thread, for parts of the C boundary that live in other rooms.
#pragma once

#include <string>

namespace cudasched::runtime {

void set_last_error(std::string message);
const char* last_error_text() noexcept;

}  // namespace cudasched::runtime
