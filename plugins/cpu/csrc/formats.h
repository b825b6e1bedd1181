// All formats of gemm.h behind the codes of the C interface.
#pragma once

#include "bf12.h"
#include "coded.h"
#include "ds_cpu.h"
#include "int4.h"

namespace ds {

// The panels of one or several packed matrices [n, k], one after the other.
template <class Fmt>
struct Panels {
  const char* data;
  int64_t group, k;
  bool zeros = false;

  typename Fmt::Panel at(int64_t index) const { return panel(Fmt{}, data + index * bytes()); }
  int64_t bytes() const { return size(Fmt{}); }

 private:
  static DenseF32::Panel panel(DenseF32, const char* p) { return {(const float*)p}; }
  static DenseBf16::Panel panel(DenseBf16, const char* p) { return {(const bf16*)p}; }
  Bf12::Panel panel(Bf12, const char* p) const { return {(const uint8_t*)p, k}; }
  template <class X, class C>
  typename Coded<X, C>::Panel panel(Coded<X, C>, const char* p) const {
    return {(const uint8_t*)p, group};
  }
  static Int8::Panel panel(Int8, const char* p) { return {(const uint8_t*)p}; }
  Int4::Panel panel(Int4, const char* p) const { return {(const uint8_t*)p, group, zeros}; }

  int64_t size(DenseF32) const { return DenseF32::bytes(k); }
  int64_t size(DenseBf16) const { return DenseBf16::bytes(k); }
  int64_t size(Bf12) const { return Bf12::bytes(k); }
  template <class X, class C>
  int64_t size(Coded<X, C>) const {
    return Coded<X, C>::bytes(k, group);
  }
  int64_t size(Int8) const { return Int8::bytes(k); }
  int64_t size(Int4) const { return Int4::bytes({nullptr, group, zeros}, k); }
};

// body(a format, an element of the activations' type).
template <class Body>
inline void with_format(int32_t format, int32_t dtype, Body body) {
  if (format == DS_FP8) return dtype == DS_F32 ? body(Fp8<float>{}, float{}) : body(Fp8<bf16>{}, bf16{});
  if (format == DS_FP4) return dtype == DS_F32 ? body(Fp4<float>{}, float{}) : body(Fp4<bf16>{}, bf16{});
  if (format == DS_INT8) return dtype == DS_F32 ? body(Int8{}, float{}) : body(Int8{}, bf16{});
  if (format == DS_INT4 || format == DS_INT4_ZEROS)
    return dtype == DS_F32 ? body(Int4{}, float{}) : body(Int4{}, bf16{});
  if (format == DS_BF12) return body(Bf12{}, bf16{});
  return dtype == DS_F32 ? body(DenseF32{}, float{}) : body(DenseBf16{}, bf16{});
}

// Whether a format wants activations in 8 bits.
template <class Fmt>
constexpr bool QUANTISES = std::is_same<typename Fmt::Tokens, Tokens8>::value;

}  // namespace ds
