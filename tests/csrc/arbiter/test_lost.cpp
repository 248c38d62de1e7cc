// A host program closes the table's descriptor, as daemonisers do, and opens a file of its own under the same number.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <memory>

#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class LostTest : public TableTest {
 protected:
  // The descriptors of this process that stand for `path`.
  static std::vector<int> numbers_of(const std::string& path) {
    std::vector<int> numbers;
    for (int number = 0; number < 10'000; ++number) {
      std::array<char, 4096> target{};
      const std::string link = "/proc/self/fd/" + std::to_string(number);
      if (readlink(link.c_str(), target.data(), target.size() - 1) > 0 && path == target.data()) {
        numbers.push_back(number);
      }
    }
    return numbers;
  }
  static void close_all(const std::string& path) {
    for (const int number : numbers_of(path)) close(number);
  }

  // Gives all numbers of the table and its directory to a file of the user's, which this process locks.
  void give_to_the_user() const {
    const int user = ::open(user_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    require(user >= 0 && write(user, "mine", 4) == 4, "a file of the user's");
    for (const std::string& path : {path_, directory_}) {
      for (const int number : numbers_of(path)) require(dup2(user, number) == number, "dup2");
    }
    require(lockf(user, F_LOCK, 0) == 0 && lseek(user, 0, SEEK_SET) == 0 && lockf(user, F_LOCK, 0) == 0, "lockf");
  }
  // Every byte of the user's file that any slot's lock could lie on is locked by process `owner`.
  void expect_the_users_lock(pid_t owner) const {
    Process other([&](const Link& link) {
      const int file = ::open(user_path().c_str(), O_RDWR | O_CLOEXEC);
      for (off_t byte = 0; byte <= kSlotCount; ++byte) {
        struct flock range {};
        range.l_type = F_WRLCK;
        range.l_whence = SEEK_SET;
        range.l_start = byte;
        range.l_len = 1;
        require(fcntl(file, F_GETLK, &range) == 0 && range.l_type == F_WRLCK && range.l_pid == owner,
                "byte " + std::to_string(byte) + " of the user's file is not locked any more");
      }
      link.send(1);
    });
    EXPECT_EQ(other.receive(), 1);
    EXPECT_TRUE(other.finish());
    std::ifstream file(user_path());
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "mine");
  }
  std::string user_path() const { return base_ + "/user"; }

  // Of the file, by a table that this process has not lost.
  std::unique_ptr<Process> start_client(Class client_class, bool active = false) const {
    return std::make_unique<Process>([this, client_class, active](const Link& link) {
      const auto table = open();
      const int slot = table->claim(client(client_class));
      if (active) table->set_active(slot, now_ns());
      link.send(slot);
      while (true) {
        link.receive();
        link.send(table->reap());
      }
    });
  }
};

TEST_F(LostTest, ALostTableDoesNothing) {
  const auto table = open();
  const int active = table->claim(client(Class::kLatency));
  const int idle = table->claim(client(Class::kLatency));
  table->set_active(active, 1000);
  EXPECT_TRUE(table->check());
  close_all(path_);
  EXPECT_FALSE(table->check());
  EXPECT_TRUE(table->lost());
  EXPECT_THAT(table->why_lost(), AllOf(HasSubstr(path_), HasSubstr("closed the descriptor")));

  const auto before = read_file();
  EXPECT_EQ(arbiter_error([&] { table->claim(client(Class::kLatency)); }), table->why_lost());
  table->set_active(idle, 2000);
  table->clear_active(active);
  table->release(active);
  EXPECT_EQ(table->reap(), 0);
  EXPECT_FALSE(table->alive(active));
  EXPECT_EQ(read_file(), before);
}

TEST_F(LostTest, EveryUseNoticesByItself) {
  const auto loses = [&](const std::function<void(Table&, int)>& use) {
    const auto table = open();
    const int slot = table->claim(client(Class::kLatency));
    close_all(path_);
    use(*table, slot);
    return table->lost() && (table->layout().latency & bit(slot)) != 0;
  };
  EXPECT_TRUE(loses([](Table& table, int) { arbiter_error([&] { table.claim(client(Class::kNormal)); }); }));
  EXPECT_TRUE(loses([](Table& table, int slot) { table.release(slot); }));
  EXPECT_TRUE(loses([](Table& table, int) { table.reap(); }));
  EXPECT_TRUE(loses([](Table& table, int slot) { table.alive(slot + 1); }));
}

TEST_F(LostTest, AUsersFileUnderItsNumberIsNotTouchedAndTheLivingAreNotReaped) {
  Process careless([&](const Link& link) {
    auto table = open();
    table->claim(client(Class::kBestEffort));
    link.send(0);
    link.receive();
    give_to_the_user();
    const auto numbers = numbers_of(user_path());
    require(table->reap() == 0, "it reaped");
    require(!arbiter_error([&] { table->claim(client(Class::kNormal)); }).empty(), "it claimed");
    link.send(1);
    link.receive();
    table.reset();
    require(numbers_of(user_path()) == numbers, "it closed a descriptor of the user's");
    link.send(2);
    link.receive();
  });
  ASSERT_EQ(careless.receive(), 0);
  const auto serve = start_client(Class::kLatency, true);
  const auto slot = serve->receive();
  ASSERT_EQ(careless.ask(0), 1);
  expect_the_users_lock(careless.pid());
  const auto table = Table::open_existing(path_);
  EXPECT_EQ(table->active(), bit(slot));
  EXPECT_EQ(table->slot(static_cast<int>(slot)).occupied, 1u);
  ASSERT_EQ(careless.ask(0), 2);
  expect_the_users_lock(careless.pid());
  EXPECT_EQ(table->active(), bit(slot));
}

TEST_F(LostTest, AUsersFileIsNotTouchedByRelease) {
  Process careless([&](const Link& link) {
    auto table = open();
    const int slot = table->claim(client(Class::kBestEffort));
    give_to_the_user();
    table->release(slot);
    table.reset();
    link.send(1);
    link.receive();
  });
  ASSERT_EQ(careless.receive(), 1);
  expect_the_users_lock(careless.pid());
}

TEST_F(LostTest, ItsEndDoesNotFreeASlotThatAnotherHasTaken) {
  auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  close_all(path_);
  const auto taker = start_client(Class::kLatency, true);
  ASSERT_EQ(taker->receive(), slot);
  table->release(slot);
  table.reset();
  const auto later = open();
  EXPECT_EQ(later->active(), bit(slot));
  EXPECT_EQ(later->latency_clients(), bit(slot));
  EXPECT_EQ(later->slot(slot).occupied, 1u);
  EXPECT_TRUE(later->alive(slot));
}

TEST_F(LostTest, AnActiveBitOnAnotherClassesSlotIsCleared) {
  for (const bool by_its_owner : {true, false}) {
    auto first = std::make_unique<Process>([&](const Link& link) {
      const auto table = open();
      const int slot = table->claim(client(Class::kLatency));
      close_all(path_);
      link.send(slot);
      link.receive();
      table->set_active(slot, now_ns());  // it does not know yet
      link.send(slot);
      link.receive();
    });
    const auto slot = first->receive();
    auto train = start_client(Class::kBestEffort);
    ASSERT_EQ(train->receive(), slot);
    ASSERT_EQ(first->ask(0), slot);
    first->kill();
    const auto table = open();
    ASSERT_EQ(table->active(), bit(slot));
    EXPECT_EQ(by_its_owner ? train->ask(0) : table->reap(), 0);
    EXPECT_EQ(table->active(), 0u);
    EXPECT_EQ(table->layout().best_effort, bit(slot));
    EXPECT_TRUE(table->alive(static_cast<int>(slot)));
    train->kill();
    table->reap();
  }
}

TEST_F(LostTest, TheActiveBitOfALatencyClientStays) {
  const auto serve = start_client(Class::kLatency, true);
  const auto slot = serve->receive();
  EXPECT_EQ(open()->reap(), 0);
  EXPECT_EQ(serve->ask(0), 0);
  EXPECT_EQ(open()->active(), bit(slot));
}

TEST_F(LostTest, ATableOpenedAnewIsAnotherOne) {
  auto lost = open();
  lost->claim(client(Class::kLatency));
  const auto numbers = numbers_of(path_);
  close_all(path_);
  close_all(directory_);
  const auto fresh = open();  // looks before it opens: the number may well be the same
  EXPECT_EQ(numbers_of(path_), numbers);
  EXPECT_TRUE(lost->lost());
  EXPECT_FALSE(fresh->lost());
  const int slot = fresh->claim(client(Class::kBestEffort));
  lost.reset();
  EXPECT_EQ(numbers_of(path_), numbers);
  EXPECT_EQ(arbiter_error([&] { fresh->claim(client(Class::kNormal)); }), "");
  Process other([&](const Link& link) { link.send(open()->alive(slot) ? 1 : 0); });
  EXPECT_EQ(other.receive(), 1);
}

TEST_F(LostTest, ALostDirectoryTakesNoNewClients) {
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  close_all(directory_);
  EXPECT_THAT(arbiter_error([&] { table->claim(client(Class::kLatency)); }), HasSubstr("closed the descriptor"));
  EXPECT_FALSE(table->lost());
  table->release(slot);
  EXPECT_TRUE(is_empty(table->layout()));
}

TEST_F(LostTest, ItsNumbersAreHighIfTheLimitAllows) {
  for (const rlim_t limit : {rlim_t{64}, rlim_t{1024}}) {
    Process process([&](const Link& link) {
      const rlimit wanted{limit, limit};
      require(setrlimit(RLIMIT_NOFILE, &wanted) == 0, "setrlimit");
      const auto table = open();
      table->claim(client(Class::kLatency));
      for (const std::string& path : {path_, directory_}) {
        const auto numbers = numbers_of(path);
        require(numbers.size() == 1, "not one descriptor");
        link.send(numbers.front());
      }
      link.receive();
    });
    for (int i = 0; i < 2; ++i) {
      const auto number = process.receive();
      EXPECT_EQ(number >= 512, limit == 1024) << number;
      EXPECT_LT(number, static_cast<std::int64_t>(limit));
    }
    const auto table = open();
    EXPECT_TRUE(table->alive(0));  // moving up dropped no lock
    process.kill();
    EXPECT_EQ(table->reap(), 1);
  }
}

}  // namespace
}  // namespace cudasched::arbiter::testing
