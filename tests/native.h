// What of the native kernels these drivers call, as their sources define it.

#pragma once

#include <cstdint>

struct Facts {
  double mean, kth;
  int64_t caught, passes;
};

extern "C" {
void laconic_withdraw(float*, const float*, float, int64_t, int64_t, float, int, int32_t*, float*, Facts*);
int laconic_all_finite(const float*, int64_t, int);
double laconic_sum_magnitudes(const float*, int64_t, int);
void laconic_count_at_least(const float*, int64_t, const float*, int64_t, int, int64_t*);
int64_t laconic_set_bits(const int32_t*, int64_t, uint32_t*, int64_t);
int64_t laconic_unpack_bits(const uint32_t*, int64_t, int32_t*, int64_t);
void laconic_pack_lanes(const int32_t*, int64_t, int, uint32_t*);
void laconic_unpack_lanes(const uint32_t*, int64_t, int, int32_t*);
void laconic_encode_elias_fano(const int32_t*, int64_t, int, int64_t, uint32_t*);
int64_t laconic_decode_elias_fano(const uint32_t*, int64_t, int64_t, int64_t, int, int32_t*);
int64_t laconic_most_rice_words(int64_t);
int64_t laconic_encode_rice(const int32_t*, int64_t, uint32_t*);
int64_t laconic_decode_rice(const uint32_t*, int64_t, int64_t, int64_t, int32_t*);
void laconic_draw_distinct(int64_t, int64_t, int64_t, uint32_t, uint32_t, int64_t*);
void laconic_largest_changes(const float*, const float*, int64_t, int, float*, float*);
void laconic_encode_modulo(const float*, int64_t, const float*, float, int, int, uint8_t*, int32_t*);
void laconic_compare_modulo(const float*, int64_t, const uint8_t*, const int32_t*, const float*, float, int, int,
                              float*, uint8_t*, int8_t*);
void laconic_decode_differences(const uint8_t*, int64_t, const float*, int, int, float*);
int64_t laconic_check_sum(const uint32_t*, int64_t);
void laconic_pack_signs(const float*, int64_t, int, uint32_t*);
void laconic_encode_lloyd(const float*, int64_t, float, int64_t, int, int32_t*, uint32_t*);
void laconic_decode_lloyd(const int32_t*, const uint32_t*, int64_t, float, int64_t, int, float*);
void laconic_unpack_signs(const uint32_t*, int64_t, float, int, float*);
void laconic_vote(const uint32_t* const*, int64_t, int64_t, int, uint32_t*, uint32_t*);
void laconic_largest_magnitudes(const float*, int64_t, int64_t, int, float*);
void laconic_quantize_pack(const float*, int64_t, const float*, int64_t, int64_t, int32_t, int, uint32_t, uint32_t, int,
                           void*, int64_t, int);
void laconic_unpack_scale(const void*, int64_t, int, int64_t, int, const float*, int64_t, int64_t, int, float*);
void laconic_average_words(const void*, int64_t, int64_t, int, int, uint32_t, uint32_t, int, void*);
int64_t laconic_add_at(float*, int64_t, const int32_t* const*, const float* const*, const int64_t*, int64_t, int);
}
