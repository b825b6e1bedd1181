// Several residual streams: what a sublayer reads of them, and how its result comes back.
#include "ds_cpu.h"
#include "norm.h"
#include "parallel.h"

namespace ds {
namespace {

constexpr int64_t MOST = 8;  // streams

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Rows, then columns of a matrix are divided by their sums, but for the first time columns only.
inline void balance(float* mix, int64_t n, float eps, int64_t rounds) {
  for (int64_t k = 0; k < n; ++k) {
    float *row = mix + k * n, top = row[0], total = 0.0f;
    for (int64_t i = 1; i < n; ++i) top = row[i] > top ? row[i] : top;
    for (int64_t i = 0; i < n; ++i) total += row[i] = std::exp(row[i] - top);
    for (int64_t i = 0; i < n; ++i) row[i] = row[i] / total + eps;
  }
  auto divide = [&](int64_t along, int64_t across) {
    for (int64_t k = 0; k < n; ++k) {
      float total = 0.0f;
      for (int64_t i = 0; i < n; ++i) total += mix[k * across + i * along];
      for (int64_t i = 0; i < n; ++i) mix[k * across + i * along] /= total + eps;
    }
  };
  divide(n, 1);
  for (int64_t round = 1; round < rounds; ++round) {
    divide(1, n);
    divide(n, 1);
  }
}

// out [d] = the sum of n rows of d elements, each times its weight.
template <class T>
void collapse(const T* x, const float* weights, int64_t n, int64_t d, T* out) {
  int64_t c = 0;
  for (; c + F::W <= d; c += F::W) {
    F sum = F::zero();
    for (int64_t i = 0; i < n; ++i) sum = fma(F::all(weights[i]), F::load(x + i * d + c), sum);
    sum.store(out + c);
  }
  for (; c < d; ++c) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += weights[i] * to_float(x[i * d + c]);
    put(out + c, sum);
  }
}

struct Shares {
  const float *m, *base, *scale;
  float eps, hc_eps;
  int64_t rounds, tokens, n, d;

  template <class T>
  void run(const void* x, void* out, float* post, float* mix) const {
    const int64_t width = mix ? n * (2 + n) : n;
    parallel(tokens, 1, 2 * tokens * n * d * int64_t(sizeof(T)), [&](int64_t t, int64_t end) {
      for (; t < end; ++t) {
        const T* from = (const T*)x + t * n * d;
        const float size = float(1.0 / std::sqrt(double(mean_square(from, n * d)) + double(eps)));
        const float* own = m + t * width;
        float pre[MOST];
        for (int64_t i = 0; i < n; ++i)
          pre[i] = sigmoid(own[i] * size * scale[0] + base[i]) + hc_eps;
        if (mix) {
          for (int64_t i = 0; i < n; ++i)
            post[t * n + i] = 2.0f * sigmoid(own[n + i] * size * scale[1] + base[n + i]);
          float* to = mix + t * n * n;
          for (int64_t i = 0; i < n * n; ++i)
            to[i] = own[2 * n + i] * size * scale[2] + base[2 * n + i];
          balance(to, n, hc_eps, rounds);
        }
        collapse(from, pre, n, d, (T*)out + t * d);
      }
    });
  }
};

template <class T>
void hc_post(const void* result, int64_t ldy, const void* x, const float* post, const float* mix,
             void* out, int64_t tokens, int64_t n, int64_t d) {
  parallel(tokens, 1, 3 * tokens * n * d * int64_t(sizeof(T)), [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const T *y = (const T*)result + t * ldy, *from = (const T*)x + t * n * d;
      for (int64_t k = 0; k < n; ++k) {
        const float own = post[t * n + k], *shares = mix + t * n * n + k;
        T* to = (T*)out + (t * n + k) * d;
        int64_t c = 0;
        for (; c + F::W <= d; c += F::W) {
          F sum = F::all(own) * F::load(y + c);
          for (int64_t j = 0; j < n; ++j)
            sum = fma(F::all(shares[j * n]), F::load(from + j * d + c), sum);
          sum.store(to + c);
        }
        for (; c < d; ++c) {
          float sum = own * to_float(y[c]);
          for (int64_t j = 0; j < n; ++j) sum += shares[j * n] * to_float(from[j * d + c]);
          put(to + c, sum);
        }
      }
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_hc_pre(int32_t dtype, const void* x, const float* m, const float* base,
                   const float* scale, double eps, double hc_eps, int64_t rounds, void* out,
                   float* post, float* mix, int64_t tokens, int64_t n, int64_t d) {
  if (n > MOST) return;
  const Shares all{m, base, scale, float(eps), float(hc_eps), rounds, tokens, n, d};
  dtype == DS_F32 ? all.run<float>(x, out, post, mix) : all.run<bf16>(x, out, post, mix);
}

void ds_cpu_hc_post(int32_t dtype, const void* y, int64_t ldy, const void* x, const float* post,
                    const float* mix, void* out, int64_t tokens, int64_t n, int64_t d) {
  (dtype == DS_F32 ? hc_post<float> : hc_post<bf16>)(y, ldy, x, post, mix, out, tokens, n, d);
}
