// Powers of two and the hyperbolic tangent for vectors of floats.
#pragma once

namespace triton_inflight {
namespace {

// 2^a to about 2e-7 of the result; 0 far below the range, a large finite number above it, infinities
// included; NaN stays NaN, since max and min give their second operand if either is one. 2^a = 2^n 2^f with n
// whole and |f| <= 1/2; 2^f by the Taylor series of exp(f ln 2), terms (ln 2)^k / k! up to k = 6: those left
// out add less than 2e-7.
template <typename Simd>
inline typename Simd::Vec exp2_of(typename Simd::Vec a) {
  a = Simd::min(Simd::broadcast(127.4F), Simd::max(Simd::broadcast(-200.0F), a));
  const typename Simd::Vec n = Simd::round(a);
  const typename Simd::Vec f = Simd::subtract(a, n);
  typename Simd::Vec sum = Simd::broadcast(1.540353039e-04F);
  for (const float term :
       {1.333355815e-03F, 9.618129108e-03F, 5.550410866e-02F, 2.402265070e-01F, 6.931471806e-01F, 1.0F}) {
    sum = Simd::fma(sum, f, Simd::broadcast(term));
  }
  return Simd::scale_by_power(sum, n);
}

// tanh |a| = (1 - z) / (1 + z) with z = exp(-2 |a|).
template <typename Simd>
inline typename Simd::Vec tanh_of(typename Simd::Vec a) {
  const typename Simd::Vec one = Simd::broadcast(1.0F);
  const typename Simd::Vec z =
      exp2_of<Simd>(Simd::multiply(Simd::absolute(a), Simd::broadcast(-2.885390082F)));
  return Simd::copy_sign(Simd::divide(Simd::subtract(one, z), Simd::add(one, z)), a);
}

}  // namespace
}  // namespace triton_inflight
