#include "memory/layout.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace cudasched::memory {
namespace {

// Fits that are looked at before memory is moved: nearly always the first one does.
constexpr int kMostFits = 16;

}  // namespace

Layout::Layout(Bytes range_bytes, Bytes page_bytes, Bytes chunk_bytes, Bytes limit_bytes)
    : page_(page_bytes), chunk_(chunk_bytes), limit_(limit_bytes) {
  streams_.try_emplace(kIdle);
  first_ = make({.at = 0, .bytes = range_bytes});
  add(first_);
}

// ---- parts

Layout::Part* Layout::make(const Part& part) {
  if (unused_.empty()) return &store_.emplace_back(part);
  Part* const made = unused_.back();
  unused_.pop_back();
  *made = part;
  return made;
}

// The second half is in no set; the first one's place in its set must be given up before.
void Layout::split(Part* part, Bytes at) {
  Part* const rest = make(*part);
  rest->at = at;
  rest->bytes = part->end() - at;
  rest->previous = part;
  if (rest->next != nullptr) rest->next->previous = rest;
  part->next = rest;
  part->bytes = at - part->at;
}

void Layout::join_next(Part* part) {
  Part* const gone = part->next;
  part->bytes += gone->bytes;
  part->next = gone->next;
  if (part->next != nullptr) part->next->previous = part;
  unused_.push_back(gone);
}

Layout::Parts& Layout::set_of(const Part& part) {
  return part.state == State::kHole ? holes_ : streams_[part.stream].free;
}

// A hole or a free part becomes one with its like on either side.
void Layout::add(Part* part) {
  const auto alike = [&](const Part* other) {
    return other != nullptr && other->state == part->state && other->stream == part->stream;
  };
  if (alike(part->next)) {
    set_of(*part).erase(part->next);
    join_next(part);
  }
  if (alike(part->previous)) {
    part = part->previous;
    set_of(*part).erase(part);
    join_next(part);
  }
  set_of(*part).insert(part);
}

// A stretch of a hole or a free part gets another state, and is in no set; the rest stays as it was.
Layout::Part* Layout::cut(Part* part, Bytes begin, Bytes end, State state) {
  set_of(*part).erase(part);
  Part* const before = part->at < begin ? part : nullptr;
  if (before != nullptr) {
    split(part, begin);
    part = part->next;
  }
  Part* behind = nullptr;
  if (part->end() > end) {
    split(part, end);
    behind = part->next;
  }
  part->state = state;
  if (before != nullptr) add(before);
  if (behind != nullptr) add(behind);
  return part;
}

Layout::Part* Layout::part_at(Bytes at) const {
  Part* part = first_;
  while (part->end() <= at) part = part->next;
  return part;
}

void Layout::settle() {
  if (kept_ == 0) return;
  kept_ = 0;
  std::vector<Part*> parts;
  for (auto& [stream, of_stream] : streams_) {
    for (auto& [bytes, kept] : of_stream.kept) {
      parts.insert(parts.end(), kept.begin(), kept.end());
    }
    of_stream.kept.clear();
  }
  for (Part* const part : parts) {
    by_address_.erase(part->at);
    part->state = State::kFree;
    add(part);
  }
}

void Layout::for_each_chunk(const Part& part, Bytes from, auto&& call) const {
  for (auto at = mapped_.lower_bound(std::max(from, part.at));
       at != mapped_.end() && at->first + at->second.bytes <= part.end(); ++at) {
    call(at->first, at->second);
  }
}

// ---- blocks

// The first place in a free part where the block takes no whole chunk that is too large for it.
std::optional<Bytes> Layout::place(const Part& part, Bytes bytes) const {
  const Bytes most = rounded(bytes, page_);
  Bytes begin = aligned(part.at, bytes);
  if (most < chunk_) {
    for (auto at = mapped_.lower_bound(begin); at != mapped_.end() && at->first < begin + bytes; ++at) {
      const Bytes end = at->first + at->second.bytes;
      if (at->second.bytes > most && end <= part.end()) begin = end;
    }
  }
  return begin + bytes <= part.end() ? std::optional(begin) : std::nullopt;
}

Layout::Room Layout::best_fit(Parts& parts, Bytes bytes) const {
  Part wanted{.at = 0, .bytes = bytes};
  int looked = 0;
  for (auto at = parts.lower_bound(&wanted); at != parts.end() && looked < kMostFits; ++at, ++looked) {
    if (const auto begin = place(**at, bytes)) return {*at, *begin};
  }
  return {};
}

Bytes Layout::take(Part* part, Bytes begin, Bytes bytes) {
  by_address_.emplace(begin, cut(part, begin, begin + bytes, State::kUsed));
  count(bytes);
  return begin;
}

void Layout::count(Bytes bytes) noexcept {
  ++statistics_.blocks;
  statistics_.allocated += bytes;
  statistics_.peak_allocated = std::max(statistics_.peak_allocated, statistics_.allocated);
}

std::optional<Bytes> Layout::allocate(Bytes bytes, Stream stream) {
  bytes = rounded(bytes, kBlockUnit);
  for (const bool settled : {false, true}) {
    if (settled && kept_ == 0) break;
    if (settled) settle();
    Room found;
    if (const auto own = streams_.find(stream); own != streams_.end() && stream != kIdle) {
      if (const auto kept = own->second.kept.find(bytes); kept != own->second.kept.end() && !kept->second.empty()) {
        Part* const part = kept->second.back();
        kept->second.pop_back();
        --kept_;
        part->state = State::kUsed;
        count(bytes);
        return part->at;
      }
      found = best_fit(own->second.free, bytes);
    }
    const Room idle = best_fit(streams_[kIdle].free, bytes);
    if (idle.part != nullptr && (found.part == nullptr || idle.part->bytes < found.part->bytes)) found = idle;
    if (found.part == nullptr) continue;
    return take(found.part, found.begin, bytes);
  }
  return std::nullopt;
}

Bytes Layout::allocate_at(Bytes begin, Bytes bytes) {
  bytes = rounded(bytes, kBlockUnit);
  Part* const part = part_at(begin);
  set_of(*part).erase(part);
  while (part->end() < begin + bytes) {  // the free part before the chunks that a plan has mapped
    set_of(*part->next).erase(part->next);
    if (part->next->stream != kIdle) part->stream = part->next->stream;
    join_next(part);
  }
  return take(part, begin, bytes);
}

Layout::Freed Layout::free(Bytes at, Stream stream) {
  const auto found = by_address_.find(at);
  if (found == by_address_.end()) return Freed::kUnknown;
  Part* const part = found->second;
  if (part->state == State::kKept) return Freed::kTwice;
  part->state = State::kKept;
  part->stream = stream;
  streams_[stream].kept[part->bytes].push_back(part);
  ++kept_;
  --statistics_.blocks;
  statistics_.allocated -= part->bytes;
  return Freed::kDone;
}

void Layout::passed(Stream stream) {
  settle();
  const auto found = streams_.find(stream);
  if (found == streams_.end() || stream == kIdle) return;
  const std::vector<Part*> parts(found->second.free.begin(), found->second.free.end());
  streams_.erase(found);
  for (Part* const part : parts) {
    part->stream = kIdle;
    add(part);
  }
}

// ---- plans

// Behind a free part, if that saves chunks; else in the smallest hole that is large enough.
void Layout::find_room(Plan& plan, Bytes bytes, Stream stream) const {
  Bytes least = 0;
  plan.refused = true;
  for (const Part* const hole : holes_) {
    Bytes begin = hole->at;
    const Part* const before = hole->previous;
    if (before != nullptr && before->state == State::kFree && (before->stream == kIdle || before->stream == stream)) {
      begin = std::min(aligned(before->at, bytes), hole->at);
      for_each_chunk(*before, begin, [&](Bytes at, const Piece& piece) {
        if (piece.bytes > rounded(bytes, page_)) begin = at + piece.bytes;
      });
    }
    const Bytes need = std::max(rounded(begin + bytes, page_), hole->at) - hole->at;
    if (need > hole->bytes || (!plan.refused && need >= least)) continue;
    plan.refused = false;
    plan.at = hole->at;
    plan.begin = begin;
    least = need;
  }
}

Plan Layout::plan(Bytes bytes, Stream stream) {
  settle();
  bytes = rounded(bytes, kBlockUnit);
  Plan plan;
  find_room(plan, bytes, stream);
  if (plan.refused || plan.begin + bytes <= plan.at) return plan;

  // Free chunks: unmapped ones, then those of the largest ranges, so that whole runs go.
  struct Candidate {
    Bytes at = 0;
    Piece piece;
    bool is_mapped = false;
  };
  std::vector<Candidate> candidates;
  candidates.reserve(spare_.size() + mapped_.size());
  for (const Piece& piece : spare_) candidates.push_back({.piece = piece});
  Bytes pending = 0;
  for (const auto& [owner, of_stream] : streams_) {
    for (auto part = of_stream.free.rbegin(); part != of_stream.free.rend(); ++part) {
      for_each_chunk(**part, 0, [&, of = owner](Bytes at, const Piece& piece) {
        if (plan.begin < plan.at && at + piece.bytes > plan.begin && at < plan.at) return;  // stays where it is
        if (of == kIdle) candidates.push_back({at, piece, true});
        if (of != kIdle) pending += piece.bytes;
      });
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.piece.bytes > b.piece.bytes; });

  Bytes missing = rounded(plan.begin + bytes, page_) - plan.at;
  std::vector<Span> unmap;
  const Candidate* larger = nullptr;  // the smallest free chunk that is larger than the missing bytes
  for (const Candidate& each : candidates) {
    if (each.piece.bytes > missing) {
      if (missing != 0) larger = &each;
      continue;
    }
    missing -= each.piece.bytes;
    plan.map.push_back(each.piece.bytes);
    if (each.is_mapped) unmap.push_back({each.at, each.piece.bytes});
  }
  if (missing != 0 && larger != nullptr) {
    plan.release.push_back(larger->piece.chunk);
    if (larger->is_mapped) unmap.push_back({larger->at, larger->piece.bytes});
  } else if (missing != 0) {
    const bool within = limit_ == 0 || statistics_.reserved + missing <= limit_;
    plan.wait = pending >= missing || (!within && has_pending());
    plan.refused = !plan.wait && !within;
    if (plan.wait || plan.refused) return plan;
  }
  if (missing > page_ && (plan.begin + bytes) % page_ != 0) {  // the next block's, too: it holds no more back than that
    plan.create.push_back(page_);
    missing -= page_;
  }
  for (; missing != 0; missing -= plan.create.back()) plan.create.push_back(std::min(missing, chunk_));
  plan.map.insert(plan.map.end(), plan.create.begin(), plan.create.end());
  std::sort(plan.map.begin(), plan.map.end(), std::greater<>());
  plan.unmap = joined(std::move(unmap));
  return plan;
}

std::vector<Span> Layout::joined(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.at < b.at; });
  std::vector<Span> made;
  for (const Span& span : spans) {
    if (!made.empty() && made.back().at + made.back().bytes == span.at) {
      made.back().bytes += span.bytes;
    } else {
      made.push_back(span);
    }
  }
  return made;
}

Plan Layout::plan_trim(Bytes keep) {
  settle();
  Plan plan;
  Bytes reserved = statistics_.reserved;
  const auto give = [&](const Piece& piece) {
    if (reserved <= keep) return false;
    reserved -= piece.bytes;
    plan.release.push_back(piece.chunk);
    return true;
  };
  for (const Piece& piece : spare_) give(piece);
  std::vector<Span> unmap;
  Parts& idle = streams_[kIdle].free;
  for (auto part = idle.rbegin(); part != idle.rend(); ++part) {
    for_each_chunk(**part, 0, [&](Bytes at, const Piece& piece) {
      if (give(piece)) unmap.push_back({at, piece.bytes});
    });
  }
  plan.unmap = joined(std::move(unmap));
  plan.wait = reserved > keep && has_pending();
  return plan;
}

// ---- steps

void Layout::created(Chunk chunk, Bytes bytes) {
  spare_.push_back({chunk, bytes});
  ++statistics_.created;
  statistics_.reserved += bytes;
  statistics_.peak_reserved = std::max(statistics_.peak_reserved, statistics_.reserved);
}

void Layout::released(Chunk chunk) {
  const auto found = std::find_if(spare_.begin(), spare_.end(), [&](const Piece& each) { return each.chunk == chunk; });
  statistics_.reserved -= found->bytes;
  spare_.erase(found);
}

void Layout::unmapped(const Span& span) {
  Part* const part = cut(part_at(span.at), span.at, span.at + span.bytes, State::kHole);
  part->stream = kIdle;
  add(part);
  for (auto at = mapped_.find(span.at); at != mapped_.end() && at->first < span.at + span.bytes;) {
    spare_.push_back(at->second);
    at = mapped_.erase(at);
  }
}

std::vector<Chunk> Layout::spares(const std::vector<Bytes>& sizes) const {
  std::multimap<Bytes, Chunk> by_size;
  for (const Piece& piece : spare_) by_size.emplace(piece.bytes, piece.chunk);
  std::vector<Chunk> chunks;
  for (const Bytes bytes : sizes) {
    const auto found = by_size.find(bytes);
    chunks.push_back(found->second);
    by_size.erase(found);
  }
  return chunks;
}

void Layout::replaced(Bytes at, Chunk chunk) { mapped_.at(at).chunk = chunk; }

void Layout::mapped(Bytes at, const std::vector<Chunk>& chunks) {
  Bytes end = at;
  for (const Chunk chunk : chunks) {
    const auto found =
        std::find_if(spare_.begin(), spare_.end(), [&](const Piece& each) { return each.chunk == chunk; });
    statistics_.moved += found->was_mapped ? 1 : 0;
    mapped_.emplace(end, Piece{chunk, found->bytes, true});
    end += found->bytes;
    spare_.erase(found);
  }
  add(cut(part_at(at), at, end, State::kFree));
}

// ---- the contents

bool Layout::has_pending() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& each) {
    const auto& [stream, of_stream] = each;
    const auto any = [](const auto& kept) { return !kept.second.empty(); };
    return stream != kIdle &&
           (!of_stream.free.empty() || std::any_of(of_stream.kept.begin(), of_stream.kept.end(), any));
  });
}

Statistics Layout::statistics() const {
  Statistics made = statistics_;
  Bytes movable = 0;
  for (const Piece& piece : spare_) movable += piece.bytes;
  const auto is_free = [](const Part& part) { return part.state == State::kFree || part.state == State::kKept; };
  for (const Part* part = first_; part != nullptr; part = part->next) {
    if (!is_free(*part)) continue;
    Part all{.at = part->at, .bytes = part->bytes};
    for (; part->next != nullptr && is_free(*part->next); part = part->next) all.bytes += part->next->bytes;
    made.largest_free = std::max(made.largest_free, all.bytes);
    for_each_chunk(all, 0, [&](Bytes, const Piece& piece) { movable += piece.bytes; });
  }
  made.largest_free = std::max(made.largest_free, movable);
  return made;
}

std::vector<Span> Layout::blocks() const {
  std::vector<Span> made;
  for (const Part* part = first_; part != nullptr; part = part->next) {
    if (part->state == State::kUsed) made.push_back({part->at, part->bytes});
  }
  return made;
}

}  // namespace cudasched::memory
