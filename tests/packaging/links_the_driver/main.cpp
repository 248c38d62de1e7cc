#include <cstdio>

#include "cudasched/scheduler.hpp"

extern "C" int cuInit(unsigned flags);

int main() {
  try {
    const auto scheduler = cudasched::Scheduler::create();
    const int status = cuInit(0);
    std::puts(status == 0 && scheduler.metrics().attached ? "attached" : "not attached");
  } catch (const cudasched::HookError& error) {
    std::puts(error.what());
  }
}
