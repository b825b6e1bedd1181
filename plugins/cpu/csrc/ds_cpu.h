// The C interface of the CPU plugin's native kernels. Loaded with ctypes; no Python, no torch.
//
// Pointers are to row-major data, `ld*` are distances between rows in elements, the last
// dimension is contiguous. dtype: 0 = float32, 1 = bfloat16 (16 raw bits). The caller brings what
// is read and written; what a kernel needs besides, it allocates for the call (scratch.h). Work is
// divided with OpenMP where it was found at build time. Every output element is summed in an order that
// does not depend on the number of threads: by one of them, or in pieces of a fixed length (attention).
#pragma once

#include <cstdint>

#define DS_CPU_ABI 14

#if defined(_WIN32)
#define DS_EXPORT extern "C" __declspec(dllexport)
#else
#define DS_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The last three for caches only; DS_GROUPED is latent_fp8_groups, whose token is the latent in e4m3, a
// float32 scale per 128 of it and the rotated key in bfloat16; DS_E2M1 are index keys in FP4 (e2m1.h).
enum DsType : int32_t { DS_F32 = 0, DS_BF16 = 1, DS_E4M3 = 2, DS_GROUPED = 3, DS_E2M1 = 4 };
enum DsRouting : int32_t { DS_GREEDY = 0, DS_GROUP_LIMITED = 1, DS_NOAUX_TC = 2 };
enum DsFormat : int32_t {  // of packed weights
  DS_DENSE = 0,  // the dtype of the activations
  DS_FP8 = 1,
  DS_INT8 = 2,
  DS_INT4 = 3,
  DS_INT4_ZEROS = 4,
  DS_BF12 = 5,  // bfloat16 in 12 bits, by ds_cpu_narrow
  DS_FP4 = 6,   // e2m1, a power of two per 32 elements of k
};

DS_EXPORT int32_t ds_cpu_abi_version();
// 0: this library's instructions are not all available here; else higher is better.
DS_EXPORT int32_t ds_cpu_score();
DS_EXPORT int32_t ds_cpu_threads();
// For the calling thread, and for others from their first call on.
DS_EXPORT void ds_cpu_set_threads(int64_t count);
// Thread i may run on the processors cpus[ends[i - 1]] to cpus[ends[i] - 1], those of its memory node.
// Where first ones differ there are several nodes: then thread i reads what it packed of experts.
DS_EXPORT void ds_cpu_bind_threads(const int32_t* cpus, const int64_t* ends, int64_t threads);
// Ask the operating system for large pages under a buffer that is about to be filled.
DS_EXPORT void ds_cpu_large_pages(void* data, int64_t bytes);

// Reads memory and does nothing else, with all threads, each in that many streams at once (1 or
// more): the best number of them is the ceiling of what streams weights. *sum gets the exclusive or
// of all whole 8-byte words.
DS_EXPORT void ds_cpu_read(const void* data, int64_t bytes, int64_t streams, int64_t* sum);

// out = x / sqrt(mean(x^2) + eps) * weight; out [rows, n] contiguous.
DS_EXPORT void ds_cpu_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, int64_t ldx,
                               const void* weight, double eps, void* out, int64_t rows, int64_t n);
// summed = x + residual, rounded to dtype; out = rms_norm(summed). Both contiguous.
DS_EXPORT void ds_cpu_add_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x,
                                   int64_t ldx, const void* residual, int64_t ldr,
                                   const void* weight, double eps, void* out, void* summed,
                                   int64_t rows, int64_t n);
// out [rows, n] = silu(x[:, :n]) * x[:, n:2n]; of at most `limit`, and the second also at least -limit.
// Infinity: they are as they are.
DS_EXPORT void ds_cpu_silu_mul(int32_t dtype, const void* x, int64_t ldx, double limit, void* out,
                               int64_t rows, int64_t n);
// Rotates interleaved pairs. x [rows, heads, d] with strides in elements; out contiguous.
DS_EXPORT void ds_cpu_rope(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                           const int64_t* positions, const float* cos_sin, void* out, int64_t rows,
                           int64_t heads, int64_t d);
// Stores [latent | k_rope] rows of `width` elements at slots >= 0 of a cache; cache_dtype is dtype,
// e4m3 (nearest, at most 448 in magnitude) or DS_GROUPED.
DS_EXPORT void ds_cpu_cache_write(int32_t dtype, int32_t cache_dtype, void* cache, int64_t width,
                                  const void* latent, int64_t ld_latent, int64_t lora,
                                  const void* k_rope, int64_t ld_rope, const int64_t* slots,
                                  int64_t rows);
// What lies between the projections of attention. Of q [rows, heads, ..] and kv [rows, lora + rope]:
// latent = rms_norm(kv[:, :lora]); q_rope and k_rope are q [rows, heads, rope], whose pointer is at
// the part to rotate, and kv[:, lora:], rotated; then as cache_write. Results are contiguous.
DS_EXPORT void ds_cpu_mla_prologue(int32_t dtype, int32_t weight_dtype, int32_t cache_dtype,
                                   const void* q, int64_t stride_row, int64_t stride_head,
                                   int64_t heads, const void* kv, int64_t ldkv, int64_t lora,
                                   int64_t rope, const void* weight, double eps,
                                   const int64_t* positions, const float* cos_sin, void* cache,
                                   const int64_t* slots, void* q_rope, void* latent, void* k_rope,
                                   int64_t rows);
// out = rows ids - start of a table of `held` rows; zeros where that is outside.
DS_EXPORT void ds_cpu_embed(const int64_t* ids, const void* table, int64_t stride_bytes,
                            int64_t start, int64_t held, void* out, int64_t row_bytes,
                            int64_t rows);
// Groups of x [rows, n] as e4m3 codes q [rows, n] times scale [rows, n / group], which is the largest
// magnitude (1e-4 at least) over 448, as a power of two from above if ue8m0.
DS_EXPORT void ds_cpu_quantize_group(int32_t dtype, const void* x, int64_t ldx, int64_t group,
                                     int32_t ue8m0, void* q, float* scale, int64_t rows, int64_t n);
// out [tokens, experts] = x [tokens, hidden] times w [experts, hidden]^T, in float32.
DS_EXPORT void ds_cpu_router_logits(int32_t dtype, const void* x, int64_t ldx, const float* w,
                                    float* out, int64_t tokens, int64_t experts, int64_t hidden);
// The experts of each token, [tokens, top_k + shared], and their weights; behind the chosen come
// shared slots experts, experts + 1, .. of weight 1. bias [experts] may be null; sigmoid: else
// softmax; method: a DsRouting. Writes nothing, and says nothing, where there are more than 1024
// experts, or fewer than top_k or than groups: that is the caller's to refuse.
DS_EXPORT void ds_cpu_route(const float* logits, int64_t ldl, const float* bias, float* weights,
                            int32_t* ids, int64_t tokens, int64_t experts, int64_t top_k,
                            int64_t shared, int64_t groups, int64_t open_groups, int32_t sigmoid,
                            int32_t method, int32_t renormalise, double scale);
// One token per row of logits [rows, vocab] by inverse CDF; a temperature of 0 takes the largest.
DS_EXPORT void ds_cpu_sample(const float* logits, int64_t ldl, const float* temperature,
                             const int32_t* top_k, const float* top_p, const float* min_p,
                             const double* uniform, int64_t* tokens, int64_t rows, int64_t vocab);
// out [rows, vocab] contiguous: logits, -inf where the row's mask forbids the token. masks [.., words]
// contiguous, words = ceil(vocab / 32), bit t % 32 of word t / 32 allows token t; which [rows] is
// the mask of each row, negative for none.
DS_EXPORT void ds_cpu_mask_logits(const float* logits, int64_t ldl, const uint32_t* masks,
                                  const int32_t* which, float* out, int64_t rows, int64_t vocab);
// Log-probabilities of ids [rows], and of the top_n <= vocab best of each row, falling.
DS_EXPORT void ds_cpu_logprobs(const float* logits, int64_t ldl, const int64_t* ids, int64_t top_n,
                               float* chosen, float* values, int64_t* top_ids, int64_t rows,
                               int64_t vocab);
// Packed weights: panels, as csrc/gemm.h and the header of each format say. `group`: elements along
// k with scales of their own, for formats that have such.
//
// Fills columns [n0, n0 + rows) of a packed [n, k] matrix; element (c, i) of them lies at
// source + c * sn + i * sk, in dtype, or a code of the format in a byte. The part that ends at n also
// writes the padding after it. scales: [rows, groups] at ld_scales (int8: one group), or null; zeros
// (of int4 with zero points) likewise, null: the codes are symmetric.
// half: -1, or which half of every panel is filled: with 0 and 1 two matrices [n, k] share panels,
// 32 columns of each in turn.
DS_EXPORT void ds_cpu_pack(int32_t format, int32_t dtype, const void* source, int64_t sn,
                           int64_t sk, const float* scales, const float* zeros, int64_t ld_scales,
                           void* panels, int64_t n0, int64_t rows, int64_t n, int64_t k,
                           int64_t group, int32_t half);
// Of one panel of 64 columns; a packed matrix is panels one after the other.
DS_EXPORT int64_t ds_cpu_panel_bytes(int32_t format, int32_t dtype, int64_t k, int64_t group);
// out [n, k]: the values of a packed matrix.
DS_EXPORT void ds_cpu_unpack(int32_t format, int32_t dtype, const void* panels, float* out,
                             int64_t n, int64_t k, int64_t group);
// Panels in bfloat16 (DS_DENSE) as DS_BF12, without loss. *left gets how many of them have too many
// different exponents for that: what is written of those means nothing.
DS_EXPORT void ds_cpu_narrow(const void* dense, void* panels, int64_t count, int64_t k,
                             int64_t* left);
// Whether that is worth it for this library: its kernels stream the fewer bytes as fast.
DS_EXPORT int32_t ds_cpu_narrows();
// For every head h: y [m, n] = x [m, k] * w [n, k]^T, accumulated in float32, at x + h * sxh and
// y + h * syh; w packed, one head after the other. Zeros if k is 0.
DS_EXPORT void ds_cpu_linear(int32_t format, int32_t dtype, const void* x, int64_t ldx,
                             int64_t sxh, const void* w, int64_t group, void* y, int64_t ldy,
                             int64_t syh, int64_t heads, int64_t m, int64_t n, int64_t k);
// Routed SwiGLU experts. Per expert, w13 is gate and up [inter, hidden], packed in halves, and w2
// [hidden, inter], in one format, with groups of their own. ids and weights [tokens, top_k]; ids
// outside [0, experts) are left out. limit as in silu_mul. out [tokens, hidden].
DS_EXPORT void ds_cpu_experts(int32_t format, int32_t dtype, const void* x, int64_t ldx,
                              const float* weights, const int32_t* ids, const void* w13,
                              int64_t group13, const void* w2, int64_t group2, double limit,
                              void* out, int64_t tokens, int64_t top_k, int64_t experts,
                              int64_t hidden, int64_t inter);
// Absorbed attention: q [rows, heads, width] with strides; rows starts[i] to starts[i + 1] are the n
// new tokens of sequence i, of which token j sees the first lens[i] - (n - 1 - j) >= 1 rows of
// the cache [pages, page_size, width] (in dtype, DS_E4M3 or DS_GROUPED) through pages + i * max_pages. out
// [rows, heads, lora]; zeros where lens[i] <= 0. Rows after lens[i] are never read. tree: null, or per
// row which of the last 64 of lens[i] rows of the cache it sees, bit b being row lens[i] - 64 + b;
// those before it sees all. sink [heads]: exp(sink) is added to the denominators; lse [rows, heads]
// gets their logs, -inf where lens[i] <= 0. Both may be null.
DS_EXPORT void ds_cpu_mla_decode(int32_t dtype, int32_t kv_dtype, const void* q,
                                 int64_t stride_row, int64_t stride_head, const void* cache,
                                 int64_t page_size, int64_t width, int64_t lora,
                                 const int32_t* pages, int64_t max_pages, const int32_t* lens,
                                 const int32_t* starts, double scale, void* out,
                                 int64_t sequences, int64_t heads, const int64_t* tree,
                                 const float* sink, float* lse);
// The rows that tokens [first, first + rows) see, as dtype: out [rows, window + n, width], of which row
// i has lens[i], 0 for a block below 0. Those of positions p - window + 1 to p are in kv [tokens,
// width], where it is not null and the token is of the same block, or at entry p % entries of its
// block in recent; then come those of `compressed` at slots [tokens, n] >= 0. kv_dtype: dtype or e4m3.
DS_EXPORT void ds_cpu_window_rows(int32_t dtype, int32_t kv_dtype, const void* kv, int64_t ldkv,
                                  const void* recent, int64_t entries, const int64_t* positions,
                                  const int64_t* blocks, int64_t window, const void* compressed,
                                  const int32_t* slots, int64_t ld, int64_t n, int64_t width,
                                  int64_t first, void* out, int32_t* lens, int64_t rows);
// RMS norm of each head of x [rows, heads, d <= 2048] with strides, weight [d] or null; then its last
// `rope` dims are rotated as pairs; if group > 0 the others are rounded to e4m3 times a power of two
// per so many. out contiguous.
DS_EXPORT void ds_cpu_norm_rope(int32_t dtype, const void* x, int64_t stride_row,
                                int64_t stride_head, const float* weight, double eps,
                                const int64_t* positions, const float* cos_sin, int64_t group,
                                void* out, int64_t rows, int64_t heads, int64_t d, int64_t rope);
// The last `rope` dims of each head of x [rows, heads, d <= 2048] rotated by minus the angle.
DS_EXPORT void ds_cpu_rope_back(int32_t dtype, const void* x, int64_t stride_row,
                                int64_t stride_head, const int64_t* positions, const float* cos_sin,
                                void* out, int64_t rows, int64_t heads, int64_t d, int64_t rope);
// Rows [tokens, 2 * width] at ld, values and scores, to entries out [tokens, d <= 2048], as the
// contract CompressWindows says: width is d, or 2 * d of overlapping windows; ape [ratio, width],
// state [.., entries, 2 * width].
DS_EXPORT void ds_cpu_compress_windows(int32_t dtype, const void* rows, int64_t ld, const float* ape,
                                       int64_t ratio, int64_t width, const float* norm_weight,
                                       double eps, const int64_t* positions, const float* cos_sin,
                                       int64_t rope, int64_t group, float* state, int64_t entries,
                                       const int64_t* blocks, void* out, int64_t tokens, int64_t d);
// What a sublayer reads of n <= 8 streams x [tokens, n, d]; m [tokens, n * (2 + n)] is their product
// with fn, as the contract HcPre says. out [tokens, d], post [tokens, n], mix [tokens, n, n]. mix null:
// m [tokens, n], and only out is made.
DS_EXPORT void ds_cpu_hc_pre(int32_t dtype, const void* x, const float* m, const float* base,
                             const float* scale, double eps, double hc_eps, int64_t rounds,
                             void* out, float* post, float* mix, int64_t tokens, int64_t n,
                             int64_t d);
// out [tokens, n, d]: post[k] * y + the sum over j of mix[j, k] * x[j].
DS_EXPORT void ds_cpu_hc_post(int32_t dtype, const void* y, int64_t ldy, const void* x,
                              const float* post, const float* mix, void* out, int64_t tokens,
                              int64_t n, int64_t d);
// As route, with the root of softplus for scores, without groups, renormalised. chosen [tokens, top_k]:
// the experts, or null: those best with bias [experts] (or null) added.
DS_EXPORT void ds_cpu_route_softplus(const float* logits, int64_t ldl, const float* bias,
                                     const int64_t* chosen, float* weights, int32_t* ids,
                                     int64_t tokens, int64_t experts, int64_t top_k, double scale);
// Lists of slots [rows, n] at ld without their negative entries: out [rows, n] contiguous, of which row
// r fills the first lens[r]. Chosen slots are the page table of a cache with pages of one row.
DS_EXPORT void ds_cpu_compact_slots(const int32_t* slots, int64_t ld, int64_t n, int32_t* out,
                                    int32_t* lens, int64_t rows);
// The indexer's queries [rows, heads, d] and keys k [rows, d], in dtype with strides: layer norm of the
// key (weight and bias [d]), both rotated in their first `rope` dimensions (as pairs if interleaved,
// else as halves) and multiplied by the Hadamard matrix of size d, a power of two of at most 1024,
// over sqrt(d). index_dtype: dtype or e4m3, there divided by scale, a power of two. queries contiguous
// in it, scale [rows, heads]; keys go to slots >= 0 of cache [pages, page_size, d], in e4m3 of bytes
// [pages, page_size * (d + 4)] with a page's keys before its scales.
DS_EXPORT void ds_cpu_index_prologue(int32_t dtype, int32_t index_dtype, const void* q,
                                     int64_t q_row, int64_t q_head, int64_t heads, const void* k,
                                     int64_t k_row, int64_t d, const float* norm_weight,
                                     const float* norm_bias, double eps, const int64_t* positions,
                                     const float* cos_sin, int64_t rope, int32_t interleaved,
                                     void* cache, int64_t page_size, const int64_t* slots,
                                     void* queries, float* scale, int64_t rows);
// As index_prologue, of keys that are normed and rotated: queries are rotated in their last `rope`
// dimensions, as pairs; both are multiplied by the Hadamard matrix if `mixed`, where d is a power of
// two. index_dtype may be e2m1: queries come in dtype then, rounded, d a multiple of 32.
DS_EXPORT void ds_cpu_index_encode(int32_t dtype, int32_t index_dtype, const void* q, int64_t q_row,
                                   int64_t q_head, int64_t heads, const void* k, int64_t k_row,
                                   int64_t d, const int64_t* positions, const float* cos_sin,
                                   int64_t rope, int32_t mixed, void* cache, int64_t page_size,
                                   const int64_t* slots, void* queries, float* scale, int64_t rows);
// out [rows, width] at columns [0, lens[r]): key scale times the sum over heads of relu(q . k) times
// weights [rows, heads]; what is behind means nothing. q [rows, heads, d] contiguous in dtype, which
// is that of the cache if this is not e2m1, the cache as above, through pages + owners[r] * max_pages;
// owners do not fall.
DS_EXPORT void ds_cpu_index_scores(int32_t dtype, int32_t index_dtype, const void* q,
                                   int64_t heads, int64_t d, const float* weights,
                                   int64_t ld_weights, const void* cache, int64_t page_size,
                                   const int32_t* pages, int64_t max_pages, const int32_t* owners,
                                   const int32_t* lens, float* out, int64_t width, int64_t rows);
// slots [rows, k]: where the k best of scores[r, :lens[r]] lie, of equal ones the first, by rising
// token; all and then -1 where a row sees fewer.
DS_EXPORT void ds_cpu_index_topk(const float* scores, int64_t ld, const int32_t* lens,
                                 const int32_t* owners, const int32_t* pages, int64_t max_pages,
                                 int64_t page_size, int64_t k, int32_t* slots, int64_t rows);
// Attention of sequence i's queries [q_starts[i], q_starts[i + 1]) over its keys [k_starts[i],
// k_starts[i + 1]). q, k [tokens, heads, d] and v [tokens, heads, dv] with strides. causal: query j
// sees keys <= j + keys - queries. out [tokens, heads, dv]; lse [tokens, heads], natural; 0 and -inf
// for a query without keys.
DS_EXPORT void ds_cpu_mha_prefill(int32_t dtype, const void* q, int64_t q_row, int64_t q_head,
                                  const void* k, int64_t k_row, int64_t k_head, const void* v,
                                  int64_t v_row, int64_t v_head, const int32_t* q_starts,
                                  const int32_t* k_starts, int32_t causal, double scale, void* out,
                                  float* lse, int64_t sequences, int64_t heads, int64_t d,
                                  int64_t dv);

// to [n0, n1, n] = from, rounded where the dtype asks for it; two outer strides each, in elements.
DS_EXPORT void ds_cpu_copy(int32_t from_dtype, int32_t to_dtype, const void* from, int64_t f0,
                           int64_t f1, void* to, int64_t t0, int64_t t1, int64_t n0, int64_t n1,
                           int64_t n);
// y [rows, n] += x.
DS_EXPORT void ds_cpu_add(int32_t dtype, void* y, int64_t ldy, const void* x, int64_t ldx,
                          int64_t rows, int64_t n);
// Calls recorded before, one after the other. calls [count, 2]: the address of a function
// ds_cpu_slots_NAME and that of its arguments, one after the other in 8 bytes each (calls.cpp).
DS_EXPORT void ds_cpu_replay(const void* calls, int64_t count);
