// The words of a client table: what a slot and its bits say, and what clears them. Internal to this room.
#pragma once

#include <cstdint>

#include "arbiter/table_file.hpp"

namespace cudasched::arbiter {

// Wakes all that sleep in the table.
void wake(Layout& layout) noexcept;

// The gate may have opened: wakes those that wait for it, if there are any.
void wake_waiters(Layout& layout) noexcept;

// Wakes all that wait for memory, or are asked for it.
void wake_memory(Layout& layout) noexcept;

// The caller holds the slot's lock.
void clear_slot(Layout& layout, int slot) noexcept;

// What a client is, in its slot and in the words. The caller holds file.slots.
void write_client(File& file, int slot) noexcept;

// As Table::reap(). The caller holds file.slots.
int reap_dead(File& file, std::uint64_t candidates) noexcept;

}  // namespace cudasched::arbiter
