// Absorbed attention over the paged latent cache: one or a few new tokens per sequence.
//
// All rows of a sequence (its new tokens by its heads) read the same keys. A work unit is up to
// ROWS of them over a range of keys. Ranges depend on the length alone and their partial results
// are merged in order, so results depend neither on the threads nor on the other sequences.
#include "attend.h"
#include "cache.h"
#include "ds_cpu.h"
#include "parallel.h"
#include "scratch.h"

namespace ds {
namespace {

constexpr int64_t TAIL = 64;  // keys of which a row of a tree says whether it sees them
constexpr int64_t SLICE = 1024;  // query rows whose partial results are kept at a time
constexpr int64_t ROWS = 64;  // query rows of a unit: what they need stays in the second cache

// How the keys of a sequence are divided: long ranges, enough to pay for merging their results and
// few enough to occupy many threads, and short ones in the end, so that threads finish together.
struct Ranges {
  static constexpr int64_t SHORT = 128;
  int64_t length, size, whole, count;  // keys, those of a long one, how many of these, of all
  explicit Ranges(int64_t keys) : length(keys) {
    int64_t most = 1;
    while (length >= 512 * most && (most < 16 || length > 1024 * most)) most *= 2;
    size = up_to((length + most - 1) / most, 32);
    whole = most > 2 ? most - 2 : most;
    count = whole;
    if (whole * size < length) count += (length - whole * size + SHORT - 1) / SHORT;
  }
  int64_t end(int64_t i) const {  // of range i
    const int64_t at = i < whole ? (i + 1) * size : whole * size + (i + 1 - whole) * SHORT;
    return at < length ? at : length;
  }
};

struct Call {
  const void* q;
  int64_t stride_row, stride_head;
  const void* cache;
  int64_t page_size, width, lora;
  const int32_t* pages;
  int64_t max_pages;
  const int32_t *lens, *starts;
  float scale;
  void* out;
  int64_t sequences, heads;
  const int64_t* tree;  // null: rows see what their place says
  const float* sink;    // null: none
  float* lse;           // null: not asked for

  // What the sums of row m of the rows of a sequence are multiplied with: `top` is the largest score,
  // in powers of two, `total` the sum of what others are to it. Tells the log of the denominator.
  float factor(int64_t first, int64_t m, float top, float total) const {
    float part = 1.0f;
    if (sink) {
      const float own = sink[m % heads] * 1.44269504f, high = own > top ? own : top;
      part = std::exp2(top - high);
      total = total * part + std::exp2(own - high);
      top = high;
    }
    if (lse) lse[first * heads + m] = (top + std::log2(total)) * 0.69314718f;
    return part / total;
  }
};

// each(slice) for every run of sequences that have up to SLICE query rows together, or for a part of
// one that has more: what ranges leave behind of a prompt would else need many GiB. Rows of a tree
// see what their bits say, so that a part of it has all of its keys.
template <class Each>
void slices_of(const Call& call, Each each) {
  const int64_t most = SLICE > call.heads ? SLICE / call.heads : 1;  // tokens
  for (int64_t first = 0, last; first < call.sequences; first = last) {
    for (last = first + 1; last < call.sequences; ++last)
      if (call.starts[last + 1] - call.starts[first] > most) break;
    Call slice = call;
    slice.pages += first * call.max_pages;
    slice.lens += first;
    slice.starts += first;
    slice.sequences = last - first;
    const int32_t end = call.starts[first + 1], length = call.lens[first];
    if (last > first + 1 || end - call.starts[first] <= most || length <= 0) {
      each(slice);
      continue;
    }
    for (int32_t row = call.starts[first], next; row < end; row = next) {
      next = int32_t(end - row > most ? row + most : end);
      const int32_t starts[] = {row, next}, seen = call.tree ? length : length - (end - next);
      slice.starts = starts;
      slice.lens = &seen;
      each(slice);
    }
  }
}

struct Unit {
  int64_t sequence, row, rows;  // rows of the sequence, its tokens by its heads
  int64_t first, last;          // keys
  int64_t range, ranges;        // which of how many
  int64_t partial;              // its first row of partial results; -1: it sees all keys itself
};

// each(unit) for every unit, those of one group of rows in the order of their keys.
template <class Each>
void units_of(const Call& call, Each each) {
  int64_t partial = 0;
  for (int64_t i = 0; i < call.sequences; ++i) {
    if (call.lens[i] <= 0) continue;
    const Ranges ranges(call.lens[i]);
    const int64_t rows = (call.starts[i + 1] - call.starts[i]) * call.heads;
    const int64_t groups = (rows + ROWS - 1) / ROWS, vectors = (rows + F::W - 1) / F::W;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = vectors * g / groups * F::W, end = vectors * (g + 1) / groups * F::W;
      Unit unit{i, row, (end < rows ? end : rows) - row, 0, 0, 0, ranges.count, -1};
      for (; unit.range < ranges.count; ++unit.range, unit.first = unit.last) {
        unit.last = ranges.end(unit.range);
        if (ranges.count > 1) {
          unit.partial = partial;
          partial += end - row;
        }
        each(unit);
      }
    }
  }
}

struct Partials {  // results of ranges, by row of partial results
  float *sums, *top, *total;
};

// Working memory of a thread.
template <class C>
struct Desk {
  Tile<C> tile;
  float* sums;
  C* wide;  // a block of keys, converted
  Desk(Arena& arena, int64_t width, int64_t lora)
      : tile(arena, ROWS, width, lora),
        sums(arena.take<float>(ROWS * tile.stride())),
        wide(arena.take<C>(KEYS * width)) {}
};

// The layout of a call's buffer; with no buffer, its size.
template <class C>
struct Memory {
  int64_t count = 0, partial_rows = 0, columns, desk, bytes;
  Unit* units;
  Partials partials;
  char* desks;
  Memory(void* buffer, const Call& call) {
    units_of(call, [&](const Unit& u) {
      ++count;
      if (u.partial >= 0) partial_rows = u.partial + up_to(u.rows, F::W);
    });
    Arena one(nullptr);
    columns = Desk<C>(one, call.width, call.lora).tile.stride();
    desk = one.used();
    Arena arena(buffer);
    units = arena.take<Unit>(count);
    partials.sums = arena.take<float>(partial_rows * columns);
    partials.top = arena.take<float>(partial_rows);
    partials.total = arena.take<float>(partial_rows);
    desks = arena.take<char>(0);
    bytes = arena.used();
  }
  int64_t needed() const { return bytes + max_threads() * desk; }
};

// `count` keys as the tile takes them: where they lie, or converted into `buffer`.
template <class C, class K>
auto keys_as(const K* const* keys, int count, const Call& call, C* buffer, const C** converted) {
  if constexpr (std::is_same_v<K, bf16>) {
    return keys;
  } else if constexpr (std::is_same_v<K, grouped>) {
    for (int j = 0; j < count; ++j) {
      converted[j] = buffer + j * call.width;
      widen_token(keys[j], buffer + j * call.width, call.lora, call.width - call.lora);
    }
    return (const C* const*)converted;
  } else {
    return rows_as<C>(keys, count, call.width, buffer, converted);
  }
}

// Where the keys of a unit from `first` on lie, as many as a block takes.
template <class K>
int keys_of(const Call& call, const Unit& u, int64_t first, const K** to) {
  const int count = int(u.last - first < KEYS ? u.last - first : KEYS);
  const int64_t size = token_size<K>(call.lora, call.width - call.lora);
  const int32_t* page = call.pages + u.sequence * call.max_pages + first / call.page_size;
  int64_t row = first % call.page_size;
  for (int j = 0; j < count; ++j) {
    to[j] = (const K*)call.cache + (*page * call.page_size + row) * size;
    if (++row == call.page_size) row = 0, ++page;
  }
  return count;
}

// `cold`: nothing of the unit was fetched yet. `then`, if not null: what probably comes next.
template <class T, class K, class C>
void attend(const Call& call, const Unit& u, bool cold, const Unit* then, const Partials& partials,
            void* memory) {
  Arena arena(memory);
  Desk<C> desk(arena, call.width, call.lora);
  Tile<C>& tile = desk.tile;
  MatrixUnit matrix;
  const int64_t columns = tile.stride(), start = call.starts[u.sequence];
  const int64_t hidden = call.starts[u.sequence + 1] - start - 1 - call.lens[u.sequence];
  const bool whole = u.partial < 0;
  float* sums = whole ? desk.sums : partials.sums + u.partial * columns;
  auto token = [&](int64_t m) { return (u.row + m) / call.heads; };
  auto sees = [&](int64_t m) {  // keys of the sequence
    return call.tree ? call.lens[u.sequence] : int32_t(token(m) - hidden);
  };
  auto query = [&](int64_t m) {
    const int64_t row = start + token(m), head = (u.row + m) % call.heads;
    return (const T*)call.q + row * call.stride_row + head * call.stride_head;
  };
  tile.template begin<T>(u.rows, call.scale, sums, query, sees);
  if (call.tree)
    tile.tree(call.lens[u.sequence] - TAIL, [&](int64_t m) { return call.tree[start + token(m)]; });

  const int64_t size = token_size<K>(call.lora, call.width - call.lora);
  const K* rows[2][KEYS];
  const float* results[ROWS];
  int count = keys_of(call, u, u.first, rows[0]);
  for (int64_t j0 = u.first, i = 0; j0 < u.last; j0 += KEYS, i = 1 - i) {
    const C* wide[KEYS];
    RowsAhead ahead;
    // Half of a block's time passes until its last scores: half of what it fetches may be its own.
    if (cold && j0 == u.first) ahead.add(rows[i], size, count);
    int later = 0;
    if (j0 + KEYS < u.last) {
      later = keys_of(call, u, j0 + KEYS, rows[1 - i]);
      ahead.add(rows[1 - i], size, later);
    } else if (then) {
      ahead.add(rows[1 - i], size, keys_of(call, *then, then->first, rows[1 - i]));
      if (then->partial >= 0) {  // what is written is read first, too
        for (int64_t m = 0; m < then->rows; ++m)
          results[m] = partials.sums + (then->partial + m) * columns;
        ahead.add(results, columns, then->rows);
      }
    }
    const auto keys = keys_as<C>(rows[i], count, call, desk.wide, wide);
    tile.block(keys, keys, j0, count, ahead);
    count = later;
  }

  if (!whole) {
    std::memcpy(partials.top + u.partial, tile.top(), size_t(u.rows) * sizeof(float));
    std::memcpy(partials.total + u.partial, tile.total(), size_t(u.rows) * sizeof(float));
    return;
  }
  for (int64_t m = 0; m < u.rows; ++m) {
    T* out = (T*)call.out + (start * call.heads + u.row + m) * call.lora;
    const float factor = call.factor(start, u.row + m, tile.top()[m], tile.total()[m]);
    store_scaled(sums + m * columns, factor, out, call.lora);
  }
}

// A unit's share of its group's rows, from the partial results of all ranges.
template <class T>
void merge(const Call& call, const Unit& u, const Partials& partials, int64_t stride) {
  const int64_t ranges = u.ranges, mine = u.range;
  const int64_t rows = up_to(u.rows, F::W), first = u.partial - mine * rows;
  for (int64_t m = u.rows * mine / ranges; m < u.rows * (mine + 1) / ranges; ++m) {
    float high = -INFINITY, total = 0.0f;
    for (int64_t r = 0; r < ranges; ++r) {
      const float top = partials.top[first + r * rows + m];
      high = top > high ? top : high;
    }
    float* sums = partials.sums + (first + m) * stride;
    for (int64_t r = 0; r < ranges; ++r) {
      const int64_t at = first + r * rows + m;
      const float part = std::exp2(partials.top[at] - high);
      total += partials.total[at] * part;
      const float* more = partials.sums + at * stride;
      for (int64_t c = 0; c < call.lora; c += F::W) {
        const F before = r ? F::load(sums + c) : F::zero();
        fma(F::load(more + c), F::all(part), before).store(sums + c);
      }
    }
    const int64_t start = call.starts[u.sequence];
    T* out = (T*)call.out + (start * call.heads + u.row + m) * call.lora;
    store_scaled(sums, call.factor(start, u.row + m, high, total), out, call.lora);
  }
}

template <class T, class K, class C>
void mla_decode_slice(const Call& call, void* buffer) {
  const Memory<C> memory(buffer, call);
  int64_t at = 0, cost = 0;
  units_of(call, [&](const Unit& u) {
    memory.units[at++] = u;
    // A byte of keys takes about as long as 16 operations.
    cost += (u.last - u.first) * (call.width * int64_t(sizeof(K)) +
                                  u.rows * (call.width + call.lora) / 8);
  });
  const int64_t threads = worth_threads(cost, memory.count) ? max_threads() : 1;
  parallel_each(memory.count, cost, [&](int64_t i, int64_t thread) {
    const Unit *u = memory.units + i, *then = i + threads < memory.count ? u + threads : nullptr;
    attend<T, K, C>(call, *u, i < threads, then, memory.partials,
                    memory.desks + thread * memory.desk);
  });
  if (memory.partial_rows)
    parallel_each(memory.count, memory.partial_rows * memory.columns * 4, [&](int64_t i, int64_t) {
      const Unit& u = memory.units[i];
      if (u.partial >= 0) merge<T>(call, u, memory.partials, memory.columns);
    });
}

template <class T, class K, class C>
void mla_decode(const Call& call) {
  for (int64_t i = 0; i < call.sequences; ++i)  // no unit writes what sees nothing
    if (call.lens[i] <= 0) {
      const int64_t first = call.starts[i], count = call.starts[i + 1] - first;
      T* out = (T*)call.out + first * call.heads * call.lora;
      std::memset((void*)out, 0, size_t(count * call.heads * call.lora) * sizeof(T));
      for (int64_t m = 0; call.lse && m < count * call.heads; ++m)
        call.lse[first * call.heads + m] = -INFINITY;
    }
  int64_t most = 0;
  slices_of(call, [&](const Call& slice) {
    const int64_t needed = Memory<C>(nullptr, slice).needed();
    if (needed > most) most = needed;
  });
  const Scratch scratch(most);
  slices_of(call, [&](const Call& slice) { mla_decode_slice<T, K, C>(slice, scratch.data()); });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_mla_decode(int32_t dtype, int32_t kv_dtype, const void* q, int64_t stride_row,
                       int64_t stride_head, const void* cache, int64_t page_size, int64_t width,
                       int64_t lora, const int32_t* pages, int64_t max_pages, const int32_t* lens,
                       const int32_t* starts, double scale, void* out, int64_t sequences,
                       int64_t heads, const int64_t* tree, const float* sink, float* lse) {
  const Call call{q,    stride_row, stride_head, cache,        page_size, width,     lora, pages,
                  max_pages, lens,  starts,      float(scale), out,       sequences, heads, tree, sink, lse};
  auto run = dtype == DS_F32 ? mla_decode<float, float, float> : mla_decode<bf16, bf16, Bf16Math>;
  if (kv_dtype == DS_E4M3)
    run = dtype == DS_F32 ? mla_decode<float, e4m3, float> : mla_decode<bf16, e4m3, Bf16Math>;
  if (kv_dtype == DS_GROUPED)
    run = dtype == DS_F32 ? mla_decode<float, grouped, float> : mla_decode<bf16, grouped, Bf16Math>;
  run(call);
}
