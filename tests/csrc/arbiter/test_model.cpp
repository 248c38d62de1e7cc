// Random sequences of operations by several processes, kills among them, against a model; and damaged files.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

enum Operation : std::int64_t { kClaim, kRelease, kSetActive, kClearActive, kWait, kUnwait, kTakeTurn, kReap, kKill };
constexpr std::int64_t kOperations = kKill + 1;

constexpr std::int64_t command(Operation operation, std::int64_t argument) { return operation * 1000 + argument; }

std::int64_t perform(Table& table, Operation operation, int argument) {
  Layout& layout = table.layout();
  switch (operation) {
    case kClaim:
      return table.claim(client(static_cast<Class>(argument)));
    case kRelease:
      table.release(argument);
      return 0;
    case kSetActive:
      table.set_active(argument, now_ns());
      return 0;
    case kClearActive:
      table.clear_active(argument);
      return 0;
    case kWait:
      layout.waiting.fetch_or(bit(argument));
      return 0;
    case kUnwait:
      layout.waiting.fetch_and(~bit(argument));
      return 0;
    case kTakeTurn:
      layout.turn = turn_of(argument);
      return 0;
    case kReap:
      return table.reap();
    case kKill:
      break;
  }
  return -1;
}

// What the table should hold. A slot whose owner was killed stays as it was until a client reaps.
struct Model {
  struct Client {
    int owner;  // an actor, -1: dead
    Class client_class;
    bool active = false;
    bool waiting = false;
  };
  std::map<int, Client> clients;
  int turn = -1;

  int reap() {
    int reaped = 0;
    for (auto entry = clients.begin(); entry != clients.end();) {
      if (entry->second.owner >= 0) {
        if (entry->second.client_class != Class::kLatency) entry->second.active = false;
        if (entry->second.client_class != Class::kBestEffort) entry->second.waiting = false;
        ++entry;
        continue;
      }
      if (turn == entry->first) turn = -1;
      entry = clients.erase(entry);
      ++reaped;
    }
    return reaped;
  }
  int claim(int actor, Class client_class) {
    reap();
    int slot = 0;
    while (clients.contains(slot)) ++slot;
    clients[slot] = {actor, client_class};
    return slot;
  }
  std::uint64_t bits(const std::function<bool(const Client&)>& chosen) const {
    std::uint64_t result = 0;
    for (const auto& [slot, entry] : clients) result |= chosen(entry) ? bit(slot) : 0;
    return result;
  }
};

class ModelTest : public TableTest, public ::testing::WithParamInterface<unsigned> {};

TEST_P(ModelTest, RandomOperationsOfSeveralProcesses) {
  const auto table = open();
  const Layout& layout = table->layout();
  Model model;
  std::mt19937 random(GetParam());
  const auto below = [&](std::size_t limit) { return static_cast<int>(random() % limit); };

  const auto start = [&] {
    return std::make_unique<Process>([&](const Link& link) {
      const auto own = open();
      while (true) {
        const std::int64_t request = link.receive();
        link.send(perform(*own, static_cast<Operation>(request / 1000), static_cast<int>(request % 1000)));
      }
    });
  };
  std::array<std::unique_ptr<Process>, 4> actors;
  for (auto& actor : actors) actor = start();

  for (int step = 0; step < 1500; ++step) {
    const int actor = below(actors.size());
    Process& process = *actors[static_cast<std::size_t>(actor)];
    auto operation = static_cast<Operation>(below(kOperations));
    if (operation == kKill && below(4) != 0) operation = kSetActive;
    std::vector<int> own;
    for (const auto& [slot, entry] : model.clients) {
      if (entry.owner == actor) own.push_back(slot);
    }
    const int slot = own.empty() ? -1 : own[static_cast<std::size_t>(below(own.size()))];
    switch (operation) {
      case kClaim: {
        if (model.clients.size() >= 60) break;
        const auto client_class = static_cast<Class>(below(kClassCount));
        const int expected = model.claim(actor, client_class);
        ASSERT_EQ(process.ask(command(kClaim, static_cast<int>(client_class))), expected) << "step " << step;
        break;
      }
      case kReap: {
        const int expected = model.reap();
        ASSERT_EQ(process.ask(command(kReap, 0)), expected) << "step " << step;
        break;
      }
      case kKill:
        process.kill();
        for (auto& [index, entry] : model.clients) entry.owner = entry.owner == actor ? -1 : entry.owner;
        actors[static_cast<std::size_t>(actor)] = start();
        break;
      default:
        if (slot < 0) break;
        process.ask(command(operation, slot));
        Model::Client& entry = model.clients[slot];
        if (operation == kSetActive) entry.active = true;
        if (operation == kClearActive) entry.active = false;
        if (operation == kWait) entry.waiting = true;
        if (operation == kUnwait) entry.waiting = false;
        if (operation == kTakeTurn) model.turn = slot;
        if (operation == kRelease) {
          model.clients.erase(slot);
          if (model.turn == slot) model.turn = -1;
        }
    }
    using Client = Model::Client;
    ASSERT_EQ(layout.active, model.bits([](const Client& c) { return c.active; })) << "step " << step;
    ASSERT_EQ(layout.waiting, model.bits([](const Client& c) { return c.waiting; })) << "step " << step;
    ASSERT_EQ(layout.latency, model.bits([](const Client& c) { return c.client_class == Class::kLatency; }));
    ASSERT_EQ(layout.best_effort, model.bits([](const Client& c) { return c.client_class == Class::kBestEffort; }));
    ASSERT_EQ(layout.turn >> kTurnSlotShift, static_cast<std::uint64_t>(model.turn + 1)) << "step " << step;
    for (int index = 0; index < kSlotCount; ++index) {
      const auto entry = model.clients.find(index);
      ASSERT_EQ(layout.slots[static_cast<std::size_t>(index)].occupied != 0, entry != model.clients.end());
      ASSERT_EQ(table->alive(index), entry != model.clients.end() && entry->second.owner >= 0) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ModelTest, ::testing::Values(1u, 2u, 3u));

// What is in a file: its first bytes, single ones behind them, and zeros up to its size, which are not written. Nearly
// all of a table is zeros.
struct Content {
  std::vector<char> first;
  std::vector<std::pair<std::size_t, char>> single{};
  std::size_t size = 0;

  void set(std::size_t place, char value) {
    if (place < first.size()) {
      first[place] = value;
    } else {
      single.emplace_back(place, value);
    }
  }
};

class DamageTest : public TableTest {
 protected:
  // A table as three killed clients left it.
  Content used_table() const {
    Process victim([&](const Link& link) {
      const auto table = open();
      for (const Class client_class : {Class::kLatency, Class::kNormal, Class::kBestEffort}) {
        const int slot = table->claim(client(client_class, std::string(63, 'n')));
        table->set_active(slot, now_ns());
        table->layout().waiting.fetch_or(bit(slot));
        table->layout().turn = turn_of(slot);
      }
      link.send(0);
      link.receive();
    });
    victim.receive();
    victim.kill();
    Content content{.first = read_file()};
    content.size = content.first.size();
    const auto last = std::find_if(content.first.rbegin(), content.first.rend(), [](char byte) { return byte != 0; });
    content.first.erase(last.base(), content.first.end());
    return content;
  }

  // A new file of the same name: one that is cut and written again is flushed to the disk.
  void write(const Content& content) const {
    std::filesystem::remove(path_);
    const int file = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
    const auto first = static_cast<ssize_t>(content.first.size());
    bool written = file >= 0 && ::write(file, content.first.data(), content.first.size()) == first &&
                   ftruncate(file, static_cast<off_t>(content.size)) == 0;
    for (const auto& [place, value] : content.single) {
      written = written && pwrite(file, &value, 1, static_cast<off_t>(place)) == 1;
    }
    close(file);
    require(written, "the file cannot be written");
  }

  // Opens what is there, reaps, and uses it: it must end up as an empty table.
  void check(const std::string& what) const {
    const auto table = open();
    for (int slot = 0; slot < kSlotCount; ++slot) {
      EXPECT_FALSE(table->alive(slot));
      EXPECT_LE(text(table->slot(slot).name).size(), 64u);
      EXPECT_LE(text(table->slot(slot).version).size(), 32u);
    }
    EXPECT_LE(text(table->layout().device_name).size(), 64u);
    table->reap();
    ASSERT_TRUE(is_empty(table->layout())) << what;
    const int slot = table->claim(client(Class::kLatency));
    ASSERT_EQ(slot, 0) << what;
    table->set_active(slot, now_ns());
    ASSERT_EQ(table->active(), bit(slot)) << what;
    table->release(slot);
    ASSERT_TRUE(is_empty(table->layout())) << what;
  }
};

TEST_F(DamageTest, EveryBitOfTheHeader) {
  const Content good = used_table();
  for (std::size_t byte = 0; byte < offsetof(Layout, slots); ++byte) {
    for (int flip = 0; flip < 8; ++flip) {
      Content damaged = good;
      damaged.first[byte] = static_cast<char>(damaged.first[byte] ^ (1 << flip));
      write(damaged);
      check("byte " + std::to_string(byte) + " bit " + std::to_string(flip));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(DamageTest, EveryLength) {
  const Content good = used_table();
  // Behind the slots are the counts, which nothing but readers of them looks at.
  const auto step = [&](std::size_t length) {
    if (length < 200) return std::size_t{1};
    return length < offsetof(Layout, counts) + 1000 || (length > good.size - 1000 && length < good.size + 1000)
               ? std::size_t{397}
               : std::size_t{99'991};
  };
  for (std::size_t length = 0; length < 2 * good.size; length += step(length)) {
    Content damaged = good;
    if (length > good.size) damaged.first.resize(good.size);
    if (length > good.size || length < good.first.size()) damaged.first.resize(length, '\xff');
    damaged.size = length;
    write(damaged);
    check("length " + std::to_string(length));
    if (HasFatalFailure()) return;
  }
}

TEST_F(DamageTest, RandomBytesAnywhere) {
  const Content good = used_table();
  ASSERT_LT(offsetof(Layout, slots), good.first.size());
  for (unsigned seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    Content damaged = good;
    const std::size_t reach = seed % 3 == 0 ? damaged.size : offsetof(Layout, slots) + sizeof(Slot);
    const std::size_t keep = seed % 2 == 0 ? 16 : 0;  // a sound magic, version and size, to get past the door
    for (unsigned count = 1 + random() % 64; count > 0; --count) {
      const char value = static_cast<char>(random());
      damaged.set(keep + random() % (reach - keep), value);
    }
    const auto header = damaged.first.begin();
    if (seed % 10 == 0) std::fill(header + 16, header + 80, 'x');  // a device name without NUL
    if (seed % 10 == 1) {
      std::fill(header + offsetof(Layout, active), header + offsetof(Layout, slots), '\xff');
    }
    if (seed % 10 == 2) {
      damaged.single.clear();
      damaged.first.resize(offsetof(Layout, slots));
      damaged.first.resize(damaged.size, '\xff');
    }
    write(damaged);
    check("seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

TEST_F(DamageTest, UnderALivingClientIsRefusedOrCleaned) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    std::filesystem::remove_all(directory_);
    Process living([&](const Link& link) {
      const auto table = open();
      link.send(table->claim(client(Class::kLatency)));
      link.receive();
    });
    const std::int64_t slot = living.receive();
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    for (int count = 0; count < 8; ++count) {
      file.seekp(static_cast<std::streamoff>((seed % 2 == 0 ? 16 : 0) + random() % 370));
      file.put(static_cast<char>(random()));
    }
    file.close();
    const ino_t before = inode();
    const std::string message = arbiter_error([&] {
      const auto table = open();
      table->reap();
      const Layout& layout = table->layout();
      EXPECT_EQ((layout.active | layout.latency | layout.best_effort | layout.waiting) & ~bit(slot), 0u) << seed;
      EXPECT_TRUE(table->alive(static_cast<int>(slot)));
    });
    if (seed % 2 == 0) {
      EXPECT_EQ(message, "") << seed;
    }
    EXPECT_EQ(inode(), before);  // never replaced under a living client
  }
}

}  // namespace
}  // namespace cudasched::arbiter::testing
