#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "predict/function.hpp"

namespace cudasched::predict {
namespace {

struct Case {
  std::string name;
  Family family;
  std::vector<int> tile;
  int stages;
  int element_bytes;
  int vector_width;
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

class Traits : public ::testing::TestWithParam<Case> {};

TEST_P(Traits, OfKernelsThatPeopleRun) {
  const Case& expected = GetParam();
  const NameTraits traits = traits_of(expected.name);
  EXPECT_EQ(static_cast<Family>(traits.family), expected.family);
  EXPECT_EQ((std::vector<int>{traits.tile[0], traits.tile[1], traits.tile[2]}), expected.tile);
  EXPECT_EQ(traits.stages, expected.stages);
  EXPECT_EQ(traits.element_bytes, expected.element_bytes);
  EXPECT_EQ(traits.vector_width, expected.vector_width);
}

INSTANTIATE_TEST_SUITE_P(
    Names, Traits,
    ::testing::Values(
        Case{"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_"
             "kernel__5x_cublas",
             Family::kGemm,
             {128, 128, 64},
             0,
             2,
             0},
        Case{"nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", Family::kGemm, {128, 256, 64}, 4, 2, 0},
        Case{"nvjet_sss_64x8_64x16_4x1_v_bz_TNN", Family::kGemm, {64, 8, 64}, 16, 4, 0},
        Case{"ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn", Family::kGemm, {128, 64, 64}, 4, 2, 8},
        Case{"sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x64x16_stage4_warpsize2x2x1_"
             "g1_tensor16x8x8_kernel_cudnn",
             Family::kConvolution,
             {128, 64, 16},
             4,
             4,
             0},
        Case{"_ZN7cutlass7Kernel2I47cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4EEvNT_6ParamsE",
             Family::kGemm,
             {128, 128, 16},
             5,
             0,
             4},
        Case{"void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 96, 4, false, cutlass::half_t>>(Params)",
             Family::kAttention,
             {128, 96, 64},
             0,
             2,
             0},
        Case{"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
             Family::kElementwise,
             {0, 0, 0},
             0,
             4,
             4},
        Case{"void at::native::reduce_kernel<512, 1, at::native::ReduceOp<double>>(int)",
             Family::kReduction,
             {0, 0, 0},
             0,
             8,
             0},
        Case{"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(int)",
             Family::kOptimizer,
             {0, 0, 0},
             0,
             4,
             0},
        Case{"void cunn_SoftMaxForward<8, c10::BFloat16>(int)", Family::kSoftmax, {0, 0, 0}, 0, 2, 0},
        Case{"triton_red_fused_native_layer_norm_3", Family::kTriton, {0, 0, 0}, 0, 0, 0},
        Case{"splitKreduce_kernel", Family::kGemm, {0, 0, 0}, 0, 0, 0},
        Case{"my_kernel", Family::kOther, {0, 0, 0}, 0, 0, 0}));

TEST(Demangled, AMangledNameIsReadAndAnyOtherStaysAsItIs) {
  EXPECT_EQ(demangled("_Z5saxpyPfS_fi"), "saxpy(float*, float*, float, int)");
  for (const std::string name : {"", "f", "nvjet_sm90", "_Z", "_Z5saxpy?"}) EXPECT_EQ(demangled(name), name);
  EXPECT_EQ(demangled("_Z5saxpyPfS_fi" + std::string(20'000, 'i')).substr(0, 3), "_Z5");  // too long to be one
}

TEST(Traits, NothingIsTooStrangeForThem) {
  for (const std::string name : {"", "<", ">>>", "()", "_Z", "_ZN", "1x", "x1", "12x", "99999999999x9999999999x4",
                                 "stages_", "8x8_", "8x8x", "nvjet_", "\xff\xfe", "kernel_traits<", "vec"}) {
    const NameTraits traits = traits_of(name);
    EXPECT_LE(traits.tile[0], 4096) << name;
  }
  EXPECT_EQ(traits_of(std::string(100'000, '<')).family, 0);
}

TEST(Identity, IsOfTheNameAndTheAttributes) {
  Function function;
  function.registers = 32;
  const std::uint64_t identity = identity_of("a", function);
  EXPECT_NE(identity, 0U);
  EXPECT_NE(identity_of("b", function), identity);
  Function other = function;
  other.index = 7;
  other.identity = 9;
  EXPECT_EQ(identity_of("a", other), identity);
  for (std::uint32_t Function::*field : {&Function::parameter_bytes, &Function::registers, &Function::local_bytes,
                                         &Function::static_shared_bytes, &Function::max_threads}) {
    other = function;
    other.*field += 1;
    EXPECT_NE(identity_of("a", other), identity);
  }
}

TEST(NameTraits, ACollectiveIsKnownByItsName) {
  for (const char* const name : {"_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
                                 "ncclKernel_AllGather_RING_LL_Sum",
                                 "_ZN4vllm26cross_device_reduce_1stageIfLi2EEEvP8RankDataP11RankSignalsP6SignalPfii",
                                 "_ZN12_GLOBAL__N_126one_shot_all_reduce_kernelIfLb0EEEvv"}) {
    EXPECT_TRUE(traits_of(name).is_collective) << name;
  }
  for (const char* const name :
       {"_ZN2at6native13reduce_kernelILi512ELi1EEEvv", "ampere_sgemm_128x64_nn", "all_gathered"}) {
    EXPECT_FALSE(traits_of(name).is_collective) << name;
  }
}

// Every example of python/cudasched/advise/origins.toml: tests/python/test_predictor.py.
TEST(NameTraits, ALibrarysKernelIsKnownByItsName) {
  for (const char* const name :
       {"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "_Z10dot_kernelIfLi128ELi0E15cublasDotParamsIfEEvT2_",
        "_ZN12_GLOBAL__N_120softmax_warp_forwardIffEEvv", "_ZN7cutlass7Kernel2I99unreadable"}) {
    EXPECT_TRUE(traits_of(name).is_library) << name;
  }
  for (const char* const name : {"_Z5saxpyPfS_fi", "matmul_kernel", "_ZN5mylib6kernelIN2at4HalfEEEvPT_",
                                 "triton_poi_fused_add_relu_0", "", "_ZN"}) {
    EXPECT_FALSE(traits_of(name).is_library) << name;
  }
}

}  // namespace
}  // namespace cudasched::predict
