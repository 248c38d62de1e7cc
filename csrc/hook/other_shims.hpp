// Other libraries between the process and the driver, by their file names. One that schedules launches itself cannot be
// combined with us: each would wait for launches that the other holds back. One that only limits a program's resources
// stands in front of us; base/loader.h keeps the two from calling each other in circles (docs/coexistence.md). Called
// once, when the shim attaches.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cudasched::hook {

// Why launches cannot be scheduled beside these libraries, and the remedy; empty if they can. Paths or file names.
std::string rival_among(std::span<const std::string> libraries);

// The names of those among `libraries` that limit a program's resources, with commas between.
std::string limits_among(std::span<const std::string> libraries);

// The libraries that the loader has loaded, by path.
std::vector<std::string> loaded_libraries();

}  // namespace cudasched::hook
