// The calling thread's text for cudasched_last_error(), for parts of the C boundary in other rooms.
#pragma once

#include <string>

namespace cudasched::runtime {

void set_last_error(std::string message);
const char* last_error_text() noexcept;

}  // namespace cudasched::runtime
