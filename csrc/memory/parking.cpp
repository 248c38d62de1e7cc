#include "memory/parking.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "driver/driver.hpp"

namespace cudasched::memory {

using driver::table;

Bytes Parking::lacks(Bytes more) const noexcept {
  const Bytes wanted = Arena::rounded(bytes_ + more);
  return wanted > arena_.bytes() ? wanted - arena_.bytes() : 0;
}

bool Parking::make_room(Bytes more) noexcept {
  const driver::CurrentContext here(pool_.context_);
  return here.ok() && prepare() && arena_.grow(bytes_ + more);
}

bool Parking::prepare() noexcept {
  if (stream_ == nullptr && table().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return false;
  for (CUevent& end : ends_) {
    if (end == nullptr && table().cuEventCreate(&end, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC) != CUDA_SUCCESS)
      return false;
  }
  return true;
}

bool Parking::is_away(Bytes at) const noexcept { return std::ranges::binary_search(away_, at, {}, &Away::at); }

// begin(chunk) goes before the first piece of each chunk and done(chunk) behind the last, while pieces of the chunk
// before and of the next one are under way. False: a copy or one of these failed, and nothing is under way.
template <typename Begin, typename Done>
bool Parking::copy(const std::vector<Away>& chunks, Way way, Bytes most, Begin&& begin, Done&& done) noexcept {
  const Away* ended[2] = {};  // whose last piece is outstanding
  std::size_t turn = 0;
  bool ok = true;
  const auto finish = [&](std::size_t which) {
    const Away* const chunk = std::exchange(ended[which], nullptr);
    if (ok && chunk != nullptr) ok = done(*chunk);
  };
  for (const Away& chunk : chunks) {
    ok = ok && begin(chunk);
    for (Bytes copied = 0; ok && copied < chunk.bytes; turn ^= 1) {
      const Bytes place = chunk.place + copied;
      const Bytes piece = std::min({most, chunk.bytes - copied, Arena::segment_end(place) - place});
      const CUdeviceptr device = pool_.base_ + chunk.at + copied;
      ok = table().cuEventSynchronize(ends_[turn]) == CUDA_SUCCESS &&  // an event without a record is complete
           (way == Way::kOut ? table().cuMemcpyDtoHAsync(arena_.at(place), device, piece, stream_)
                             : table().cuMemcpyHtoDAsync(device, arena_.at(place), piece, stream_)) == CUDA_SUCCESS;
      finish(turn);
      ok = ok && table().cuEventRecord(ends_[turn], stream_) == CUDA_SUCCESS;
      copied += piece;
      if (copied == chunk.bytes) ended[turn] = &chunk;
    }
  }
  for (int left = 0; left < 2; ++left, turn ^= 1) {
    ok = ok && table().cuEventSynchronize(ends_[turn]) == CUDA_SUCCESS;
    finish(turn);
  }
  return table().cuStreamSynchronize.legacy(stream_) == CUDA_SUCCESS && ok;
}

Bytes Parking::move_out(Bytes least, Bytes most) noexcept {
  Bytes moved = 0;
  try {
    const Pool::Lock held(pool_.mutex_);
    const driver::CurrentContext here(pool_.context_);
    if (!here.ok() || !prepare()) return 0;
    std::vector<Away> chunks;
    Bytes place = bytes_;
    for (const auto& [at, piece] : pool_.layout_.chunks()) {
      if (place - bytes_ >= least) break;
      if (is_away(at) || place + piece.bytes > arena_.bytes()) continue;
      chunks.push_back({at, piece.bytes, place});
      place += piece.bytes;
    }
    std::vector<Away> all = away_;
    all.reserve(away_.size() + chunks.size());
    away_.swap(all);
    const auto give_back = [&](const Away& chunk) {
      if (table().cuMemUnmap(pool_.base_ + chunk.at, chunk.bytes) != CUDA_SUCCESS) return false;
      table().cuMemRelease(pool_.layout_.chunks().at(chunk.at).chunk);
      away_.push_back(chunk);
      moved += chunk.bytes;
      return true;
    };
    copy(chunks, Way::kOut, most, [](const Away&) { return true; }, give_back);
    bytes_ += moved;
    std::ranges::sort(away_, {}, &Away::at);
  } catch (const std::exception& error) {
    log::debug(error.what());
  }
  return moved;
}

bool Parking::map(const Away& chunk, Chunk handle) noexcept {
  const CUdeviceptr at = pool_.base_ + chunk.at;
  if (table().cuMemMap(at, chunk.bytes, 0, handle, 0) != CUDA_SUCCESS) return false;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = pool_.options_.device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (table().cuMemSetAccess(at, chunk.bytes, &access, 1) == CUDA_SUCCESS) return true;
  table().cuMemUnmap(at, chunk.bytes);
  return false;
}

bool Parking::move_in(Bytes most) noexcept {
  if (away_.empty()) return true;
  std::vector<Chunk> handles;
  try {
    handles.reserve(away_.size());
  } catch (const std::exception&) {
    return false;
  }
  const Pool::Lock held(pool_.mutex_);
  const driver::CurrentContext here(pool_.context_);
  if (!here.ok()) return false;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = pool_.options_.device;
  for (const Away& chunk : away_) {
    CUmemGenericAllocationHandle handle = 0;
    if (table().cuMemCreate(&handle, chunk.bytes, &properties, 0) != CUDA_SUCCESS) break;
    handles.push_back(handle);
  }
  std::size_t mapped = 0;
  bool refused = handles.size() < away_.size();
  const auto map_next = [&](const Away& chunk) {
    refused = refused || !map(chunk, handles[mapped]);
    if (!refused) ++mapped;
    return !refused;
  };
  const bool copied = copy(away_, Way::kIn, most, map_next, [](const Away&) { return true; });
  while (!refused && mapped < away_.size()) map_next(away_[mapped]);  // where a copy failed
  if (refused) {
    for (std::size_t i = 0; i < mapped; ++i) table().cuMemUnmap(pool_.base_ + away_[i].at, away_[i].bytes);
    for (const Chunk handle : handles) table().cuMemRelease(handle);
    return false;
  }
  if (!copied) {
    log::error("memory could not be copied back to the GPU: the program's next CUDA calls will say why");
  }
  for (std::size_t i = 0; i < away_.size(); ++i) pool_.layout_.replaced(away_[i].at, handles[i]);
  away_.clear();
  bytes_ = 0;
  return true;
}

void Parking::drop() noexcept {
  const Pool::Lock held(pool_.mutex_);
  const driver::CurrentContext here(pool_.context_);
  for (const auto& [at, piece] : pool_.layout_.chunks()) {
    if (is_away(at)) continue;
    table().cuMemUnmap(pool_.base_ + at, piece.bytes);
    table().cuMemRelease(piece.chunk);
  }
  away_.clear();
  bytes_ = 0;
}

}  // namespace cudasched::memory
