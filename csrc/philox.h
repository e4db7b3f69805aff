// Philox4x32 with 7 rounds (Salmon et al. 2011): the dropout mask is a pure function of (seed, lead, query, key), so that
// forward, backward and every backend drop the same scores.
#pragma once

#include "simd.h"

namespace continuum_ops::CO_ISA {

struct PhiloxWords { uint32_t w[4]; };

CO_INLINE PhiloxWords philox(uint64_t seed, uint32_t c0, uint32_t c1, uint64_t lead, int rounds = 7) {
  uint32_t c2 = uint32_t(lead), c3 = uint32_t(lead >> 32), k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < rounds; ++i) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace continuum_ops::CO_ISA
