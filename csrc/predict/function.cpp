#include "predict/function.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "base/hash.hpp"
#include "predict/work.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint64_t kSeed = 0x6375'6461'7363'6865ULL;

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// "void at::native::reduce_kernel<512, 1>(at::Op)" -> "at::native::reduce_kernel".
std::string base_of(std::string_view name) {
  std::string base;
  int depth = 0;
  for (std::size_t at = 0; at < name.size(); ++at) {
    constexpr std::string_view kAnonymous = "(anonymous namespace)";
    if (name.substr(at, kAnonymous.size()) == kAnonymous) {
      at += kAnonymous.size() - 1;
      continue;
    }
    const char c = name[at];
    if (c == '<' || c == '(') {
      ++depth;
    } else if (c == '>' || c == ')') {
      depth = std::max(depth - 1, 0);
    } else if (depth == 0) {
      base += c;
    }
  }
  const std::size_t space = base.rfind(' ');
  const std::string last = space == std::string::npos ? base : base.substr(space + 1);
  return last.empty() ? base : last;
}

// The outermost namespace, or the part before the first underline or digit of a name without one: "at", "nvjet".
std::uint32_t library_of(std::string_view base) noexcept {
  while (!base.empty() && base[0] == '_') base.remove_prefix(1);
  std::uint64_t hash = kSeed;
  for (const char c : base) {
    if (c == '_' || c == ':' || is_digit(c)) break;
    hash = mix(hash, static_cast<unsigned char>(c));
  }
  return static_cast<std::uint32_t>(hash >> 32) | 1;
}

struct Word {
  std::string_view text;
  Family family;
};

// The first word found decides, so the more special stand first. All lower case.
constexpr Word kFamilies[] = {
    {"multi_tensor", Family::kOptimizer},
    {"adam", Family::kOptimizer},
    {"optimizer", Family::kOptimizer},
    {"flash", Family::kAttention},
    {"fmha", Family::kAttention},
    {"attention", Family::kAttention},
    {"sdpa", Family::kAttention},
    {"softmax", Family::kSoftmax},
    {"nll_loss", Family::kReduction},
    {"convert", Family::kCopy},
    {"fprop", Family::kConvolution},
    {"dgrad", Family::kConvolution},
    {"wgrad", Family::kConvolution},
    {"conv", Family::kConvolution},
    {"winograd", Family::kConvolution},
    {"implicit_gemm", Family::kConvolution},
    {"norm", Family::kNormalisation},
    {"gammabeta", Family::kNormalisation},
    {"bn_fw", Family::kNormalisation},
    {"bn_bw", Family::kNormalisation},
    {"rowwisemoments", Family::kNormalisation},
    {"gemm", Family::kGemm},
    {"gemv", Family::kGemm},
    {"nvjet", Family::kGemm},
    {"cublas", Family::kGemm},
    {"splitkreduce", Family::kGemm},
    {"cutlass", Family::kGemm},
    {"sort", Family::kSortScan},
    {"scan", Family::kSortScan},
    {"topk", Family::kSortScan},
    {"radix", Family::kSortScan},
    {"embedding", Family::kIndex},
    {"index", Family::kIndex},
    {"gather", Family::kIndex},
    {"scatter", Family::kIndex},
    {"transpose", Family::kCopy},
    {"copy", Family::kCopy},
    {"catarray", Family::kCopy},
    {"nchwtonhwc", Family::kCopy},
    {"nhwctonchw", Family::kCopy},
    {"reduce", Family::kReduction},
    {"reduction", Family::kReduction},
    {"pool", Family::kReduction},
    {"elementwise", Family::kElementwise},
    {"dropout", Family::kElementwise},
    {"pointwise", Family::kElementwise},
    {"memset", Family::kMemory},
    {"memcpy", Family::kMemory},
    {"fill", Family::kMemory},
};

std::optional<Family> family_in(std::string_view text) noexcept {
  for (const Word& word : kFamilies) {
    if (text.find(word.text) != std::string_view::npos) return word.family;
  }
  return std::nullopt;
}

Family family_of(std::string_view base, std::string_view name) noexcept {
  if (base.substr(0, 7) == "triton_") return Family::kTriton;
  // A CUTLASS kernel's base name tells nothing: all is in the template arguments.
  if (base.find("cutlass") == std::string_view::npos) {
    if (const auto family = family_in(base)) return *family;
  }
  return family_in(name).value_or(Family::kOther);
}

// A number at `at`, which moves behind the number; nothing if there is none or an absurd one.
std::optional<std::uint32_t> number(std::string_view text, std::size_t& at) noexcept {
  std::uint32_t value = 0;
  const std::size_t start = at;
  while (at < text.size() && is_digit(text[at])) {
    if (value < 100'000) value = value * 10 + static_cast<std::uint32_t>(text[at] - '0');
    ++at;
  }
  if (at == start || value == 0 || value > 4096) return std::nullopt;
  return value;
}

std::optional<std::uint32_t> number_after(std::string_view text, std::string_view word) noexcept {
  const std::size_t found = text.find(word);
  if (found == std::string_view::npos) return std::nullopt;
  std::size_t at = found + word.size();
  return number(text, at);
}

// "128x256x64", "128x256_64x4" and "128x64_ldg8_f2f_stages_64x4": M x N, then K, and stages after another x. Sizes of
// clusters and warps ("1x2") are too small to be a tile.
void read_tile(std::string_view name, NameTraits& traits) noexcept {
  constexpr std::uint32_t kSmallest = 8;
  for (std::size_t at = 0; at < name.size(); ++at) {
    if (!is_digit(name[at]) || (at > 0 && is_digit(name[at - 1]))) continue;
    std::size_t end = at;
    const auto m = number(name, end);
    if (!m || end + 1 >= name.size() || name[end] != 'x' || !is_digit(name[end + 1])) continue;
    ++end;
    const auto n = number(name, end);
    if (!n || *m < kSmallest || *n < kSmallest) continue;
    traits.tile[0] = static_cast<std::uint16_t>(*m);
    traits.tile[1] = static_cast<std::uint16_t>(*n);
    constexpr std::string_view kStages = "stages_";
    if (const std::size_t stages = name.find(kStages, end); stages != std::string_view::npos) {
      end = stages + kStages.size();
    } else if (end + 1 < name.size() && (name[end] == 'x' || name[end] == '_') && is_digit(name[end + 1])) {
      ++end;
    } else {
      return;
    }
    const bool after_x = name[end - 1] == 'x';
    const auto k = number(name, end);
    if (!k) return;
    const bool has_stages = end + 1 < name.size() && name[end] == 'x' && is_digit(name[end + 1]);
    // "128x128_2": without a second x, the number after the line is no depth.
    if (!after_x && !has_stages) return;
    traits.tile[2] = static_cast<std::uint16_t>(*k);
    if (has_stages) {
      ++end;
      if (const auto stages = number(name, end); stages && *stages < 64) {
        traits.stages = static_cast<std::uint8_t>(*stages);
      }
    }
    return;
  }
}

// Flash_fwd_kernel_traits<head dimension, rows, columns, warps, ...>.
void read_flash_tile(std::string_view name, NameTraits& traits) noexcept {
  constexpr std::string_view kTraits = "kernel_traits<";
  std::size_t at = name.find(kTraits);
  if (at == std::string_view::npos) return;
  at += kTraits.size();
  std::array<std::uint32_t, 3> values{};
  for (std::uint32_t& value : values) {
    while (at < name.size() && (name[at] == ' ' || name[at] == ',' || name[at] == '(')) ++at;
    if (name.substr(at, 4) == "int)") at += 4;
    const auto next = number(name, at);
    if (!next) return;
    value = *next;
  }
  traits.tile[0] = static_cast<std::uint16_t>(values[1]);
  traits.tile[1] = static_cast<std::uint16_t>(values[2]);
  traits.tile[2] = static_cast<std::uint16_t>(values[0]);
}

struct Type {
  std::string_view text;
  std::uint8_t bytes;
};

constexpr Type kTypes[] = {
    {"bfloat16", 2}, {"bf16", 2},  {"float8", 1}, {"fp8", 1},   {"e4m3", 1}, {"e5m2", 1}, {"tf32", 4},
    {"fp32", 4},     {"f32", 4},   {"fp16", 2},   {"f16", 2},   {"f64", 8},  {"half", 2}, {"float", 4},
    {"double", 8},   {"sgemm", 4}, {"hgemm", 2},  {"dgemm", 8}, {"int8", 1}, {"long", 8}, {"bool", 1},
};

std::uint8_t element_bytes_of(std::string_view name) noexcept {
  constexpr std::string_view kNvjet = "nvjet_";
  if (const std::size_t at = name.find(kNvjet); at != std::string_view::npos && at + kNvjet.size() < name.size()) {
    // "hsh": operands half, sums single, result half.
    switch (name[at + kNvjet.size()]) {
      case 'h':
      case 't':
        return 2;
      case 's':
        return 4;
      case 'd':
        return 8;
      case 'q':
      case 'r':
        return 1;
      default:
        break;
    }
  }
  std::size_t first = std::string_view::npos;
  std::uint8_t bytes = 0;
  for (const Type& type : kTypes) {
    const std::size_t at = name.find(type.text);
    // Of two that begin at the same place the longer, which stands first, counts; "bf16" is found before its "f16".
    if (at != std::string_view::npos && (first == std::string_view::npos || at < first)) {
      first = at;
      bytes = type.bytes;
    }
  }
  return bytes;
}

std::uint8_t vector_width_of(std::string_view name) noexcept {
  for (const std::string_view word : {"vectorized_elementwise_kernel<", "ldg", "align", "vec"}) {
    std::optional<std::uint32_t> width = number_after(name, word);
    if (!width) width = number_after(name, std::string(word) + "(int)");
    if (width && *width <= 32) return static_cast<std::uint8_t>(*width);
  }
  return 0;
}

bool is_collective(std::string_view base) noexcept {
  for (const std::string_view word : {"nccl", "nvshmem", "all_reduce", "allreduce", "cross_device_reduce"}) {
    if (base.find(word) != std::string_view::npos) return true;
  }
  return false;
}

// From the outermost namespace on, without an anonymous one; of a name that cannot be demangled, too.
std::string_view from_namespace(std::string_view base) noexcept {
  constexpr std::string_view kMangled = "_zn";
  if (base.starts_with("::")) base.remove_prefix(2);
  if (!base.starts_with(kMangled)) return base;
  base.remove_prefix(kMangled.size());
  while (!base.empty() && is_digit(base[0])) base.remove_prefix(1);
  return base;
}

// Beginnings of the names of libraries' kernels, and other signs in them: the patterns in origins.toml of
// cudasched.advise, whose examples a test compares with these. All lower case; '*' stands for any characters, '+' for
// letters, '?' for one character, '$' for the end of the name or numbers behind it.
constexpr std::string_view kLibraryBeginnings =
    "nccl nvshmem cudnn implicit_convolve implicit_precomputed dgrad_ dgrad2d_ wgrad_ wgrad2d_ fprop_ fprop2d_ bn_fw_ "
    "bn_bw_ persistbn persistrnn_ lstm_element lstm_blockpersist rnn_element rnn_blockpersist gru_element "
    "gru_blockpersist kern_precompute_indices elemwisernncell generic_elementwise_?p nhwcaddpaddingkernel "
    "nchwaddpaddingkernel nhwcsliceckernel nchwsliceckernel tensortransformgeneric convolvend_*engine "
    "convolve_common_*engine conv2d_c1_k1_ flip_filter$ fft2d_r2c_ fft2d_c2r_ cublas nvjet_ volta_*gemm turing_*gemm "
    "ampere_*gemm hopper_*gemm maxwell_*gemm pascal_*gemm blackwell_*gemm sm??_*gemm sm???_*gemm gemmsn_ gemmk1_ "
    "gemv2_ gemv2n_ gemv2t_ gemvnsp_ magma_?gemm sgemm_largek_ dgemm_largek_ cgemm_largek_ hgemm_largek_ "
    "reduce_1block_kernel$ cutlass cute:: fmha_cutlass flash:: pytorch_flash flash_fwd_*kernel$ flash_bwd_*kernel$ "
    "cufft vector_fft regular_fft bluestein_fft multi_bluestein composite_2way_fft spradix dpradix hpradix "
    "preprocessc2r postprocessr2c prime_fft regular_bluestein_fft dse:: cusparse cusolver curand gen_sequenced "
    "generate_seed_pseudo trt_ nvinfer myelin __myl cub:: thrust:: cub_*_ns thrust_*_ns cuda:: at:: at_cuda c10:: c10d "
    "torch:: torchvision vision:: fused_dropout softmax_warp krn_partial gammabetabackward indexing_backward_kernel "
    "elementwise_kernel_with_index$ randperm_handle_duplicate_keys reduction_prod_kernel$ multi_tensor_apply_kernel "
    "tensorflow:: eigen:: eigenmetakernel tsl:: xla:: loop_*fusion$ input_*fusion$ wrapped_*fusion$ gemm_*fusion$ "
    "wrapped_+$ stream_executor:: *xmma_ *_trt_ "
    "triton_gemm_*fusion$ fusion$ vllm:: sglang:: flashinfer:: tensorrt_llm:: transformer_engine:: apex:: deepspeed:: "
    "xformers:: bitsandbytes:: raft:: cuml:: cudf:: cugraph:: rmm:: mamba:: faiss:: marlin:: ggml:: nvte:: "
    "onnxruntime:: mxnet:: paddle:: phi:: mindspore:: kquantize kdequantize kgemm_4bit koptimizer dequantize_block "
    "dequantize_vec dequantize_q quantize_block quantize_vec quantize_q mul_mat_block mul_mat_vec mul_mat_q cupy_ "
    "cupyx_ ";
constexpr std::string_view kLibraryTypes = "cublas cudnn ";  // also among the template arguments and parameters

template <typename Test>
bool any_of_words(std::string_view list, Test&& test) noexcept {
  for (std::size_t end = 0; (end = list.find(' ')) != std::string_view::npos; list.remove_prefix(end + 1)) {
    if (test(list.substr(0, end))) return true;
  }
  return false;
}

// "", "_3", "_3_1"
bool only_numbers(std::string_view text) noexcept {
  return std::all_of(text.begin(), text.end(), [](char c) { return is_digit(c) || c == '_'; }) &&
         (text.empty() || (text[0] == '_' && text.back() != '_'));
}

bool begins_as(std::string_view text, std::string_view pattern) noexcept {
  if (pattern.empty()) return true;
  const std::string_view rest = pattern.substr(1);
  if (pattern[0] == '$') return only_numbers(text);
  if (pattern[0] == '*' || pattern[0] == '+') {
    const bool letters = pattern[0] == '+';
    for (std::size_t i = letters ? 1 : 0; i <= text.size(); ++i) {
      if (letters && (text[i - 1] < 'a' || text[i - 1] > 'z')) return false;
      if (begins_as(text.substr(i), rest)) return true;
    }
    return false;
  }
  return !text.empty() && (pattern[0] == '?' || pattern[0] == text[0]) && begins_as(text.substr(1), rest);
}

bool is_library(std::string_view whole_base, std::string_view name) noexcept {
  const std::string_view base = from_namespace(whole_base);
  return any_of_words(kLibraryBeginnings, [&](std::string_view word) { return begins_as(base, word); }) ||
         any_of_words(kLibraryTypes, [&](std::string_view word) { return name.find(word) != std::string_view::npos; });
}

}  // namespace

std::string demangled(std::string_view mangled_name) {
  constexpr std::size_t kMostCharacters = 16'384;
  std::string text(mangled_name);
  // A name that is not mangled may be read as a type: "f" as float.
  if (!mangled_name.starts_with("_Z") || mangled_name.size() > kMostCharacters) return text;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> plain(abi::__cxa_demangle(text.c_str(), nullptr, nullptr, &status),
                                                          &std::free);
  return status == 0 && plain != nullptr ? std::string(plain.get()) : text;
}

NameTraits traits_of(std::string_view mangled_name) {
  const std::string plain = demangled(mangled_name);
  const std::string name = lower(plain);
  const std::string base = lower(base_of(plain));
  NameTraits traits;
  traits.library = library_of(base);
  traits.is_collective = is_collective(base);
  traits.is_library = is_library(base, name);
  traits.family = static_cast<std::uint8_t>(family_of(base, name));
  read_tile(name, traits);
  if (traits.tile[0] == 0) read_flash_tile(name, traits);
  if (traits.stages == 0) {
    for (const std::string_view word : {"_stage", "stages"}) {
      if (const auto stages = number_after(name, word); stages && *stages < 64) {
        traits.stages = static_cast<std::uint8_t>(*stages);
      }
    }
  }
  traits.element_bytes = element_bytes_of(name);
  traits.vector_width = vector_width_of(name);
  traits.layout = layout_of(name);
  return traits;
}

std::uint64_t identity_of(std::string_view mangled_name, const Function& function) noexcept {
  std::uint64_t hash = mix(kSeed, mangled_name.size());
  for (const char c : mangled_name) hash = mix(hash, static_cast<unsigned char>(c));
  for (const std::uint32_t attribute : {function.parameter_bytes, function.registers, function.local_bytes,
                                        function.static_shared_bytes, function.max_threads}) {
    hash = mix(hash, attribute);
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace cudasched::predict
