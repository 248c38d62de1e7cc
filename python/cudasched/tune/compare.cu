// Counts the elements of an array that are not what they should be, on the device: copying them to the host would take
// longer than everything else that is done with a configuration.
template <typename T>
__device__ float value_of(T element);
template <>
__device__ float value_of<float>(float element) {
  return element;
}

struct Half {
  unsigned short bits;
};
struct Bfloat {
  unsigned short bits;
};
template <>
__device__ float value_of<Half>(Half element) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element.bits));
  return value;
}
template <>
__device__ float value_of<Bfloat>(Bfloat element) {
  return __uint_as_float(static_cast<unsigned>(element.bits) << 16);
}

// result[0]: how many are wrong; result[1]: the place of one of them. NaN is wrong unless it should be there.
template <typename T>
__device__ void compare(const T* found, const float* wanted, unsigned long long count, float relative, float absolute,
                        unsigned long long* result) {
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long wrong = 0;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const float value = value_of(found[i]);
    const float right = wanted[i];
    const bool same = value == right || (value != value && right != right);
    if (!same && !(fabsf(value - right) <= absolute + relative * fabsf(right))) {
      ++wrong;
      result[1] = i;
    }
  }
  if (wrong) atomicAdd(result, wrong);
}

#define COMPARE(name, type)                                                                                         \
  extern "C" __global__ void name(const type* found, const float* wanted, unsigned long long count, float relative, \
                                  float absolute, unsigned long long* result) {                                     \
    compare(found, wanted, count, relative, absolute, result);                                                      \
  }
COMPARE(compare_float32, float)
COMPARE(compare_float16, Half)
COMPARE(compare_bfloat16, Bfloat)
