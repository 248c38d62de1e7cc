#include "simulated_driver/image.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <unordered_set>

#include "simulated_driver/shared_device.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::string_view kFirstLine = "cudasched-sim 1";

// Takes the text up to `separator` off the front.
std::string_view take(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return part;
}

bool parse_number(std::string_view text, std::uint32_t least, std::uint32_t most, std::uint32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most;
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= 256 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
  });
}

bool parse_params(std::string_view text, KernelSpec& spec) {
  if (text.empty()) return true;
  if (text.back() == ',') return false;
  std::uint32_t offset = 0;
  while (!text.empty()) {
    std::uint32_t bytes = 0;
    if (!parse_number(take(text, ','), 1, kParamsBytesMax, bytes)) return false;
    const std::uint32_t alignment = std::min(1U << std::countr_zero(bytes), 16U);
    offset = (offset + alignment - 1) / alignment * alignment;
    spec.param_bytes.push_back(bytes);
    spec.param_offsets.push_back(offset);
    offset += bytes;
    if (offset > kParamsBytesMax) return false;
  }
  spec.params_total_bytes = offset;
  return true;
}

bool begins_with(const std::vector<std::uint32_t>& sizes, std::initializer_list<std::uint32_t> wanted) {
  return sizes.size() >= wanted.size() && std::equal(wanted.begin(), wanted.end(), sizes.begin());
}

bool parse_attribute(std::string_view key, std::string_view value, KernelSpec& spec) {
  constexpr std::uint32_t kMost = 1'000'000'000;
  if (key == "params") return parse_params(value, spec);
  if (key == "regs") return parse_number(value, 1, 255, spec.regs);
  if (key == "shared") return parse_number(value, 0, 227 * 1024, spec.shared_bytes);
  if (key == "threads_max") return parse_number(value, 1, 1024, spec.threads_max);
  if (key == "blocks_per_sm") return parse_number(value, 1, kMaxBlocksPerSm, spec.blocks_per_sm);
  if (key == "block_us") {
    constexpr std::string_view kParam = "param:";
    if (!value.starts_with(kParam)) return parse_number(value, 1, kMost, spec.block_us);
    std::uint32_t index = 0;
    if (!parse_number(value.substr(kParam.size()), 0, kParamsBytesMax, index)) return false;
    spec.block_us_param = static_cast<std::int32_t>(index);
    return true;
  }
  if (key == "effect") {
    if (value == "none")
      spec.effect = Effect::kNone;
    else if (value == "append")
      spec.effect = Effect::kAppend;
    else if (value == "axpy")
      spec.effect = Effect::kAxpy;
    else if (value == "condition")
      spec.effect = Effect::kCondition;
    else if (value == "countdown")
      spec.effect = Effect::kCountdown;
    else
      return false;
    return true;
  }
  return false;
}

bool parse_kernel(std::string_view line, KernelSpec& spec) {
  if (take(line, ' ') != "kernel") return false;
  const std::string_view name = take(line, ' ');
  if (!is_name(name)) return false;
  spec.name = name;
  std::unordered_set<std::string_view> seen;
  while (!line.empty()) {
    std::string_view value = take(line, ' ');
    const std::string_view key = take(value, '=');
    if (!seen.insert(key).second || !parse_attribute(key, value, spec)) return false;
  }
  if (spec.block_us_param >= 0) {
    const auto index = static_cast<std::size_t>(spec.block_us_param);
    if (index >= spec.param_bytes.size() || spec.param_bytes[index] != 4) return false;
  }
  if (spec.effect == Effect::kAppend) return begins_with(spec.param_bytes, {8, 8, 8});
  if (spec.effect == Effect::kAxpy) return begins_with(spec.param_bytes, {8, 8, 4, 4});
  if (spec.effect == Effect::kCondition) return begins_with(spec.param_bytes, {8, 4});
  if (spec.effect == Effect::kCountdown) return begins_with(spec.param_bytes, {8, 8});
  return true;
}

}  // namespace

std::optional<std::vector<KernelSpec>> parse_image(std::string_view text) {
  if (text.size() > kImageBytesMax || !text.ends_with('\n') || take(text, '\n') != kFirstLine) return std::nullopt;
  std::vector<KernelSpec> kernels;
  std::unordered_set<std::string> names;
  while (!text.empty()) {
    const std::string_view line = take(text, '\n');
    if (line.empty() || line.front() == '#') continue;
    KernelSpec spec;
    if (kernels.size() == kImageKernelsMax || !parse_kernel(line, spec)) return std::nullopt;
    if (!names.insert(spec.name).second) return std::nullopt;
    kernels.push_back(std::move(spec));
  }
  return kernels;
}

}  // namespace cudasched::simulated_driver
