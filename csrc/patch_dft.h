// What the torch side of the truncated Fourier transform of patches hands to the kernels. Free of torch.
//
// A grid (batch, n_1, .., n_d, channels) is cut into patches; each is taken as one period of a function. The transforms are sums
// over small tables, axis by axis, of one patch at a time, whose intermediate results stay in the cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace continuum_ops {

struct PatchTransform {
  bool wide;  // float64, else float32
  int d;      // 1 to 3 axes
  int64_t batch, channels;
  int64_t patches[3], points[3], rows[3];  // of each axis: patches, points of a patch, kept frequencies
  // Of each axis but the last cos, sin and -sin (3, out, in); of the last one (out, in), where real and imaginary parts make
  // 2 rows of the half spectrum's side. out = points and in = rows for the synthesis, the other way round for the analysis.
  const void* tables;

  int64_t count(const int64_t* sizes, int from, int to) const {
    int64_t product = 1;
    for (int i = from; i < to; ++i) product *= sizes[i];
    return product;
  }
  int64_t patch_count() const { return count(patches, 0, d); }
  int64_t modes() const { return count(rows, 0, d); }
  double work() const {  // multiplications for one patch
    double sum = 0;
    for (int i = 0; i < d; ++i) sum += double(count(points, 0, i + 1)) * count(rows, i, d) * (i + 1 < d ? 4 : 2) * channels;
    return sum;
  }
};

struct PatchTransformKernels {
  size_t (*scratch)(const PatchTransform&);
  // grid (batch, *grid, channels) to or from modes (modes, 2, batch, patches, channels); patch counts batch and patches.
  void (*analyze)(const PatchTransform&, const void* grid, void* modes, int64_t patch, void* scratch);
  void (*synthesize)(const PatchTransform&, const void* modes, void* grid, int64_t patch, void* scratch);
};

namespace avx512 { extern const PatchTransformKernels patch_dft; }
namespace avx2 { extern const PatchTransformKernels patch_dft; }
namespace generic { extern const PatchTransformKernels patch_dft; }

}  // namespace continuum_ops
