// Other libraries in the process that stand between it and the driver, by their file names. One that schedules launches
// itself cannot be combined with us: each would wait for what the other holds back. One that only limits what a program
// gets stands in front of us; base/loader.h keeps the two from calling each other in circles (docs/coexistence.md).
// Called once, when the shim attaches.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cudasched::hook {

// Why launches cannot be scheduled beside these libraries, and what to do; empty if they can. Paths or file names.
std::string rival_among(std::span<const std::string> libraries);

// The names of those among `libraries` that limit what the program gets, with commas between.
std::string limits_among(std::span<const std::string> libraries);

// What the loader has loaded, by path.
std::vector<std::string> loaded_libraries();

}  // namespace cudasched::hook
