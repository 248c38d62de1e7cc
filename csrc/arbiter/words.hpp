// The words of a client table: writing and clearing a slot and its bits. Internal to this room.
#pragma once

#include <cstdint>

#include "arbiter/table_file.hpp"

namespace cudasched::arbiter {

// Wakes all that sleep in the table.
void wake(Layout& layout) noexcept;

// The gate may have opened: wakes the clients that wait at the gate, if any.
void wake_waiters(Layout& layout) noexcept;

// Wakes all clients that wait for memory or are asked for memory.
void wake_memory(Layout& layout) noexcept;

// The caller holds the slot's lock.
void clear_slot(Layout& layout, int slot) noexcept;

// Writes a client's record into its slot and the words. The caller holds file.slots.
void write_client(File& file, int slot) noexcept;

// As Table::reap(). The caller holds file.slots.
int reap_dead(File& file, std::uint64_t candidates) noexcept;

}  // namespace cudasched::arbiter
