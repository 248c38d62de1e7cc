// Clients of one GPU, each a process of its own, that have counted in every bucket: `clients DIRECTORY NUMBER`. Says
// "ready" when all are there, and ends them when its input ends.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arbiter/table.hpp"
#include "base/clock.hpp"

namespace {

using namespace cudasched;

void serve(const char* directory, int number, int ready) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto table = arbiter::Table::open(directory, "GPU-benchmark", "benchmark");
  arbiter::ClientInfo client;
  client.client_class = number % 2 == 0 ? Class::kLatency : Class::kBestEffort;
  client.name = "client-" + std::to_string(number) + ".py";
  client.slo_ns = 5 * kNsPerMs;
  const int slot = table->claim(client);
  const auto counts = std::make_unique<arbiter::Counts>();
  auto* const words = reinterpret_cast<std::uint64_t*>(counts.get());
  for (std::size_t i = 0; i < sizeof(arbiter::Counts) / sizeof(std::uint64_t); ++i) words[i] = 1 + i % 1'000;
  counts->process = 1 + static_cast<std::uint64_t>(number);
  std::memset(counts->regions, 0, sizeof counts->regions);
  std::strcpy(counts->regions[1].name, "search");
  counts->regions[1].met = counts->regions[1].missed = 500;
  for (std::uint64_t& bucket : counts->regions[1].times.buckets) bucket = 10;
  std::uint64_t version = 0;
  table->counts(slot).set_process(counts->process);
  if (write(ready, "x", 1) != 1) _exit(1);
  for (;;) {
    table->slot(slot).heartbeat_ns.store(now_ns());
    table->counts(slot).publish(*counts, version);
    usleep(10'000);
  }
}

}  // namespace

int main(int, char** arguments) {
  int ready[2];
  if (pipe(ready) != 0) return 1;
  std::vector<pid_t> children;
  for (int number = 0; number < std::atoi(arguments[2]); ++number) {
    const pid_t child = fork();
    if (child == 0) serve(arguments[1], number, ready[1]);
    children.push_back(child);
    char byte = 0;
    if (read(ready[0], &byte, 1) != 1) return 1;
  }
  std::puts("ready");
  std::fflush(stdout);
  while (std::getchar() != EOF) continue;
  for (const pid_t child : children) kill(child, SIGKILL);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
}
