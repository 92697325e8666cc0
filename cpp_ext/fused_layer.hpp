// A decoder layer around its attention:
//
//   x ---- norm -- q, k, v -- rotary -- attention -- output --(+)-- norm -- gated MLP --(+)--
//     \______________________________________________________/ \________________________/
//          layer_input                                 layer_output
#pragma once

#include "fused.hpp"

namespace triton_inflight {

struct NormWeight {
  const float* scale;  // [hidden]
  float epsilon;
};

struct LayerWeights {
  NormWeight first_norm;
  PackedWeight attention_input;  // queries, keys and values side by side
  PackedWeight attention_output;
  NormWeight second_norm;
  PackedWeight gate_up;
  PackedWeight down;
  Index hidden;
  Index input_columns;  // of the queries, keys and values
  Index output_depth;   // numbers of an attention result
  Index head_width;
  Index query_heads;
  Index key_heads;
  Index first_key;    // column
  Index first_value;  // column
};

// Rows of a step: all contiguous and of one type.
struct LayerStep {
  Index rows;
  bool bf16;
};

// Queries, keys and values of `in`, positions applied, as rows of `input_columns`.
void layer_input(const Runtime& runtime, const LayerWeights& layer, const LayerStep& step, void* in,
                 void* cosines, void* sines, void* out);

// What the layer makes of its input and of what its attention gave.
void layer_output(const Runtime& runtime, const LayerWeights& layer, const LayerStep& step, void* in,
                  void* attention, void* out);

}  // namespace triton_inflight
