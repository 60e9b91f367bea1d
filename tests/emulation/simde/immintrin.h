// Stands in for the compiler's header of this name, found before it: AVX512 intrinsics on a CPU
// that has AVX2, so that kernels for AVX512 run there. Most are SIMDe's; those that its version
// 0.7.4 lacks are written here as Intel's manual defines them, in halves.
//
// What is emulated is asked for by EMULATE_<flag>, as simde_cc turns -m<flag> into. An intrinsic
// that is neither SIMDe's nor here fails to compile, with "target specific option mismatch".
#pragma once
#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512/broadcast.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/extract.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/max.h>
#include <simde/x86/avx512/setzero.h>
#include <simde/x86/avx512/shuffle.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>

#define EMULATED static inline __attribute__((always_inline, unused))

// Both halves of a vector of 512 bits, and its quarters.
typedef union {
    __m512 f32;
    __m512i i32;
    __m256 floats[2];
    __m256i ints[2];
    __m128 quarters[4];
} pair_of_256;

EMULATED __m512i emulated_cvtepi8_epi32(__m128i x) {
    const pair_of_256 out = {.ints = {_mm256_cvtepi8_epi32(x),
                                 _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))}};
    return out.i32;
}
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32

EMULATED __m512i emulated_cvtepu16_epi32(__m256i x) {
    const pair_of_256 out = {.ints = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                                 _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))}};
    return out.i32;
}
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32

EMULATED __m512 emulated_cvtepi32_ps(__m512i x) {
    const pair_of_256 in = {.i32 = x};
    const pair_of_256 out = {.floats = {_mm256_cvtepi32_ps(in.ints[0]), _mm256_cvtepi32_ps(in.ints[1])}};
    return out.f32;
}
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps

EMULATED __m512i emulated_cvtps_epi32(__m512 x) {
    const pair_of_256 in = {.f32 = x};
    const pair_of_256 out = {.ints = {_mm256_cvtps_epi32(in.floats[0]),
                                 _mm256_cvtps_epi32(in.floats[1])}};
    return out.i32;
}
#define _mm512_cvtps_epi32 emulated_cvtps_epi32

EMULATED __m512 emulated_cvtph_ps(__m256i x) {
    const pair_of_256 out = {.floats = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                                   _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))}};
    return out.f32;
}
#define _mm512_cvtph_ps emulated_cvtph_ps

// A macro, since the rounding is part of the instruction.
#define _mm512_cvtps_ph(x, rounding)                                                     \
    __extension__({                                                                      \
        const pair_of_256 narrowed_ = {.f32 = (x)};                                           \
        _mm256_set_m128i(_mm256_cvtps_ph(narrowed_.floats[1], (rounding)),               \
                         _mm256_cvtps_ph(narrowed_.floats[0], (rounding)));              \
    })

EMULATED __mmask16 emulated_cmplt_epi32_mask(__m512i a, __m512i b) {
    const pair_of_256 first = {.i32 = a}, second = {.i32 = b};
    unsigned bits = 0;
    for (int half = 0; half < 2; half++) {
        const __m256i less = _mm256_cmpgt_epi32(second.ints[half], first.ints[half]);
        bits |= (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(less)) << 8 * half;
    }
    return (__mmask16)bits;
}
#define _mm512_cmplt_epi32_mask emulated_cmplt_epi32_mask

// The compiler makes it of maxima of halves, upper lanes first.
EMULATED float emulated_reduce_max_ps(__m512 x) {
    const pair_of_256 in = {.f32 = x};
    const __m256 eight = _mm256_max_ps(in.floats[1], in.floats[0]);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#define _mm512_reduce_max_ps emulated_reduce_max_ps

// Subnormal numbers become zeros of their sign.
EMULATED __m256 emulated_flush(__m256 x) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
    const __m256i is_small = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    const __m256i magnitude = _mm256_and_si256(is_small, _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_andnot_si256(magnitude, _mm256_castps_si256(x)));
}

// The odd elements' products are added before the even ones', each sum rounded to the nearest;
// subnormal numbers count as zeros, in inputs and results.
EMULATED __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const pair_of_256 first = {.f32 = (__m512)a}, second = {.f32 = (__m512)b};
    pair_of_256 out = {.f32 = sum};
    for (int half = 0; half < 2; half++) {
        const __m256i x = first.ints[half], y = second.ints[half];
        const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
        __m256 total = emulated_flush(out.floats[half]);
        total = _mm256_fmadd_ps(emulated_flush(_mm256_castsi256_ps(_mm256_and_si256(x, odd))),
                                emulated_flush(_mm256_castsi256_ps(_mm256_and_si256(y, odd))),
                                total);
        total = emulated_flush(total);
        total = _mm256_fmadd_ps(emulated_flush(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))),
                                emulated_flush(_mm256_castsi256_ps(_mm256_slli_epi32(y, 16))),
                                total);
        out.floats[half] = emulated_flush(total);
    }
    return out.f32;
}
#define _mm512_dpbf16_ps emulated_dpbf16_ps

// Two quarters of each; a macro, since which ones is part of the instruction.
#define _mm512_shuffle_f32x4(a, b, choice)                                               \
    __extension__({                                                                      \
        const pair_of_256 low_ = {.f32 = (a)}, high_ = {.f32 = (b)};                     \
        const pair_of_256 shuffled_ = {.quarters = {                                     \
            low_.quarters[(choice) & 3], low_.quarters[(choice) >> 2 & 3],               \
            high_.quarters[(choice) >> 4 & 3], high_.quarters[(choice) >> 6 & 3]}};      \
        shuffled_.f32;                                                                   \
    })

// Unsigned bytes by signed ones; sums of 32 bits wrap around. SIMDe's takes compilers half a minute.
EMULATED __m256i emulated_256_dpbusd_epi32(__m256i sum, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#define _mm256_dpbusd_avx_epi32 emulated_256_dpbusd_epi32

EMULATED __m512i emulated_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    const pair_of_256 total = {.i32 = sum}, first = {.i32 = a}, second = {.i32 = b};
    pair_of_256 out;
    for (int half = 0; half < 2; half++) {
        out.ints[half] =
            emulated_256_dpbusd_epi32(total.ints[half], first.ints[half], second.ints[half]);
    }
    return out.i32;
}
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32

// Behind all headers, which would else believe that the compiler has these.
#ifdef EMULATE_avxvnni
#define __AVXVNNI__ 1
#endif
#ifdef EMULATE_avx512f
#define __AVX512F__ 1
#endif
#ifdef EMULATE_avx512bw
#define __AVX512BW__ 1
#endif
#ifdef EMULATE_avx512dq
#define __AVX512DQ__ 1
#endif
#ifdef EMULATE_avx512vl
#define __AVX512VL__ 1
#endif
#ifdef EMULATE_avx512vnni
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATE_avx512bf16
#define __AVX512BF16__ 1
#endif
