// Masks, draws and log-probabilities over rows of logits. Nothing is sorted but the few that are asked for:
// what is kept of a row is told by the key (lanes.h) of its smallest token.
#include <algorithm>
#include <cstring>

#include "ds_cpu.h"
#include "lanes.h"
#include "parallel.h"

namespace ds {
namespace {

constexpr int64_t PARTS = 1024;  // most parts of a row, each with its largest key
constexpr int64_t PART = 64;     // a part has a multiple of this many tokens
constexpr int BINS = 256;        // of the keys in which a boundary is looked for
constexpr double NEAR = 8.0;     // most nuclei end within so many log-units of the largest

// One row, cut into parts: those whose largest key is too small need no second look.
struct Row {
  const float* x;
  int64_t n, size, parts;
  int32_t tops[PARTS], top;

  Row(const float* logits, int64_t count) : x(logits), n(count) {
    size = ((n + PARTS - 1) / PARTS + PART - 1) / PART * PART;
    parts = (n + size - 1) / size;
    top = LEAST;
    for (int64_t p = 0; p < parts; ++p) {
      int64_t i = begin(p);
      Keys most = Keys::all(LEAST);
      for (; i + F::W <= end(p); i += F::W) most.raise(Keys::of(F::load(x + i)));
      int32_t high = most.largest();
      for (; i < end(p); ++i) high = std::max(high, order(x[i]));
      tops[p] = high;
      top = std::max(top, high);
    }
  }
  int64_t begin(int64_t p) const { return p * size; }
  int64_t end(int64_t p) const { return std::min(n, (p + 1) * size); }

  // Calls body(vector, its first id, number of tokens in it) for all of one part.
  template <class Body>
  void vectors(int64_t p, Body body) const {
    int64_t i = begin(p);
    for (; i + F::W <= end(p); i += F::W) body(F::load(x + i), i, int(F::W));
    if (i < end(p)) body(load_tail(x + i, int(end(p) - i)), i, int(end(p) - i));
  }
  // Calls body(vector, its first id, bits) where tokens, those of the bits, have keys in [low, high].
  template <class Body>
  void hits(int64_t p, int32_t low, int32_t high, Body body) const {
    if (tops[p] < low) return;
    vectors(p, [&](F v, int64_t i, int count) {
      const uint32_t bits = Keys::of(v).between(low, high) & ((1u << count) - 1);
      if (bits) body(v, i, bits);
    });
  }

  // The first token with the largest key.
  int64_t best() const { return nth(top, 1); }
  // The id of the count-th token with this key, or of the last.
  int64_t nth(int32_t key, int64_t count) const {
    int64_t last = 0;
    for (int64_t p = 0; p < parts && count > 0; ++p)
      hits(p, key, key, [&](F, int64_t i, uint32_t bits) {
        for (; bits && count > 0; bits &= bits - 1, --count) last = i + lowest(bits);
      });
    return last;
  }
};

// The tokens that a filter leaves: keys above `cut`, and equal ones up to id `last`.
struct Kept {
  int32_t cut = LEAST;
  int64_t last = -1;
  bool all() const { return cut == LEAST; }
  bool has(int32_t key, int64_t id) const { return key > cut || (key == cut && id <= last); }
};

// Masses e^((x - top) / temperature): 1 at the largest.
struct Softmax {
  float top, temperature;
  bool spoilt;  // no finite largest logit: NaN counts as the largest, equals share

  Softmax(const Row& row, float t) : top(row.x[row.best()]), temperature(t) {
    spoilt = !std::isfinite(top);
  }
  F operator()(F x) const {
    if (spoilt) {
      float lanes[F::W];
      x.store(lanes);
      for (float& e : lanes) e = order(e) == order(top) ? 1.0f : 0.0f;
      return F::load(lanes);
    }
    F v = x + F::all(-top);
    if (temperature != 1.0f) v = v / F::all(temperature);
    return zero_below(exp(v), v, LEAST_EXP);
  }
  double of(float x) const {
    float lanes[F::W];
    (*this)(F::all(x)).store(lanes);
    return double(lanes[0]);
  }
};

// `x` with zeros behind its first `count` lanes.
F first_lanes(F x, int count) {
  float lanes[F::W];
  x.store(lanes);
  for (int i = count; i < F::W; ++i) lanes[i] = 0.0f;
  return F::load(lanes);
}

// Where falling weights reach a goal: the key at which they do, and their sum above it.
struct Boundary {
  int32_t key = LEAST;
  double above = 0.0;
};

// Sums of weights by key, over an interval of keys.
struct Histogram {
  double bins[BINS];
  int32_t low, high;
  int shift = 0;

  Histogram(int32_t from, int32_t to) : low(from), high(to) {
    while (((uint32_t(high) - uint32_t(low)) >> shift) >= BINS) ++shift;
    std::fill(bins, bins + BINS, 0.0);
  }
  void add(int32_t key, double weight) {
    bins[(uint32_t(key) - uint32_t(low)) >> shift] += weight;
  }
  // Narrows the interval to the bin in which the weights from above reach the goal. False: they do
  // not; `above` then has all of them.
  bool narrow(double goal, double& above) {
    int b = int((uint32_t(high) - uint32_t(low)) >> shift);
    for (; b >= 0; above += bins[b--])
      if (bins[b] > 0.0 && above + bins[b] >= goal) break;
    if (b < 0) return false;
    low = int32_t(uint32_t(low) + (uint32_t(b) << shift));
    const uint32_t width = (1u << shift) - 1;
    if (width < uint32_t(high) - uint32_t(low)) high = int32_t(uint32_t(low) + width);
    return true;
  }
};

// Adds the kept tokens with keys in the histogram's interval; weigh(vector, lanes) fills in weights.
template <class Weigh>
void fill(Histogram& found, const Row& row, Kept kept, Weigh weigh) {
  float weights[F::W];
  for (int64_t p = 0; p < row.parts; ++p)
    row.hits(p, found.low, found.high, [&](F v, int64_t i, uint32_t bits) {
      weigh(v, weights);
      for (; bits; bits &= bits - 1) {
        const int j = lowest(bits);
        const int32_t key = order(row.x[i + j]);
        if (kept.has(key, i + j)) found.add(key, double(weights[j]));
      }
    });
}

// Narrows down to one key from a histogram that is filled. False: the goal is not reached.
template <class Weigh>
bool find(Histogram found, const Row& row, Kept kept, double goal, Weigh weigh, Boundary& at) {
  while (found.narrow(goal, at.above)) {
    if (found.low == found.high) {
      at.key = found.low;
      return true;
    }
    found = Histogram(found.low, found.high);
    fill(found, row, kept, weigh);
  }
  return false;
}

void ones(F, float* weights) { std::fill(weights, weights + F::W, 1.0f); }

// The `count` largest, count < n.
Kept largest_tokens(const Row& row, int64_t count) {
  // The count-th largest of the parts' maxima is not above the count-th largest token.
  int32_t low = LEAST;
  if (count <= row.parts) {
    int32_t tops[PARTS];
    std::copy(row.tops, row.tops + row.parts, tops);
    std::nth_element(tops, tops + (count - 1), tops + row.parts, [](int a, int b) { return a > b; });
    low = tops[count - 1];
  }
  Boundary at;
  Histogram found(low, row.top);
  fill(found, row, Kept(), ones);
  find(found, row, Kept(), double(count), ones, at);
  return {at.key, row.nth(at.key, count - int64_t(at.above))};
}

// Of the kept, the fewest largest whose masses reach top_p of all.
Kept nucleus(const Row& row, Kept kept, const Softmax& softmax, float top_p) {
  auto masses = [&](F v, float* weights) { softmax(v).store(weights); };
  // The key of the tokens `reach` log-units below the largest, among the kept.
  auto below = [&](double reach) {
    const int32_t key = order(float(double(softmax.top) - reach * double(softmax.temperature)));
    return std::min(std::max(key, kept.cut), row.top);
  };
  // The first look is at the keys near the largest; of the rest it takes the sum only.
  int32_t low = below(NEAR);
  Histogram found(low, row.top);
  double total = 0.0;
  if (kept.all()) {
    float weights[F::W];
    WideSums sums;
    for (int64_t p = 0; p < row.parts; ++p)
      row.vectors(p, [&](F v, int64_t i, int count) {
        F mass = softmax(v);
        sums.add(count < F::W ? first_lanes(mass, count) : mass);
        uint32_t bits = Keys::of(v).between(low, row.top) & ((1u << count) - 1);
        if (!bits) return;
        mass.store(weights);
        for (; bits; bits &= bits - 1) {
          const int j = lowest(bits);
          found.add(order(row.x[i + j]), double(weights[j]));
        }
      });
    total = all(sums);
  } else {
    Histogram rest(kept.cut, low > kept.cut ? low - 1 : kept.cut);
    fill(found, row, kept, masses);
    if (low > kept.cut) fill(rest, row, kept, masses);
    for (int b = 0; b < BINS; ++b) total += found.bins[b] + rest.bins[b];
  }
  const double goal = double(top_p) * total;
  Boundary at;
  bool reached = find(found, row, kept, goal, masses, at);
  for (double reach = NEAR; !reached && low > kept.cut;) {  // then a little further, again and again
    const int32_t high = low - 1;
    reach *= 1.25;
    low = reach < 4 * NEAR ? std::min(below(reach), high) : kept.cut;
    Histogram next(low, high);
    fill(next, row, kept, masses);
    reached = find(next, row, kept, goal, masses, at);
  }
  if (!reached) return kept;  // the sums of all, in another order, were below the goal
  const double mass = softmax.of(row.x[row.nth(at.key, 1)]), rest = (goal - at.above) / mass;
  int64_t ties = rest > 1.0 ? (rest < double(row.n) ? int64_t(rest) : row.n) : 1;
  if (at.above + double(ties) * mass < goal) ++ties;
  const int64_t last = row.nth(at.key, ties);
  return {at.key, at.key == kept.cut ? std::min(last, kept.last) : last};
}

// Walks the kept tokens in order of rising id up to `uniform` of their mass.
int64_t walk(const Row& row, Kept kept, const Softmax& softmax, float min_p, double uniform) {
  float weights[F::W];
  // Calls body(id, mass) for what is kept in a part, until it says true.
  auto each = [&](int64_t p, auto body) {
    bool done = false;
    row.hits(p, kept.cut, INT32_MAX, [&](F v, int64_t i, uint32_t bits) {
      if (done) return;
      softmax(v).store(weights);
      for (; bits && !done; bits &= bits - 1) {
        const int j = lowest(bits);
        const float mass = weights[j];
        if (mass > 0.0f && mass >= min_p && (kept.all() || kept.has(order(row.x[i + j]), i + j)))
          done = body(i + j, double(mass));
      }
    });
  };
  double part[PARTS], total = 0.0;
  for (int64_t p = 0; p < row.parts; ++p) {
    if (kept.all()) {
      WideSums sums;
      row.vectors(p, [&](F v, int64_t, int count) {
        F mass = softmax(v);
        mass = zero_below(mass, mass, min_p);
        sums.add(count < F::W ? first_lanes(mass, count) : mass);
      });
      part[p] = all(sums);
    } else {
      part[p] = 0.0;
      each(p, [&](int64_t, double mass) {
        part[p] += mass;
        return false;
      });
    }
    total += part[p];
  }
  // Rounded up to the total, a draw would walk past the last token.
  const double goal = std::min(uniform * total, std::nextafter(total, 0.0));
  double done = 0.0;
  int64_t p = 0, found = row.best();
  for (; p < row.parts && done + part[p] <= goal; ++p) done += part[p];
  // No part: nothing is kept. The last kept of the part, where its sum in another order was above
  // the goal.
  if (p < row.parts)
    each(p, [&](int64_t id, double mass) {
      done += mass;
      found = id;
      return done > goal;
    });
  return found;
}

int64_t draw(const float* x, int64_t n, float temperature, int32_t top_k, float top_p, float min_p,
             double uniform) {
  const Row row(x, n);
  if (!(temperature > 0.0f)) return row.best();
  const Softmax softmax(row, temperature);
  Kept kept;
  if (top_k > 0 && top_k < n) kept = largest_tokens(row, top_k);
  if (top_p < 1.0f) kept = nucleus(row, kept, softmax, top_p);
  return walk(row, kept, softmax, min_p, uniform);
}

void mask_row(const float* x, const uint32_t* mask, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint32_t word = mask[i / 32];
    for (int lane = 0; lane < 32; lane += F::W)
      only(F::load(x + i + lane), word >> lane).store(out + i + lane);
  }
  for (; i < n; ++i) out[i] = mask[i / 32] >> (i % 32) & 1 ? x[i] : -INFINITY;
}

void log_softmax(const float* x, int64_t n, int64_t id, int64_t top_n, float* chosen, float* values,
                 int64_t* top_ids) {
  const Row row(x, n);
  const Softmax softmax(row, 1.0f);
  WideSums sums;
  for (int64_t p = 0; p < row.parts; ++p)
    row.vectors(p, [&](F v, int64_t, int count) {
      sums.add(count < F::W ? first_lanes(softmax(v), count) : softmax(v));
    });
  // No log-probability is a number where the largest logit is none.
  const double shift = softmax.spoilt ? NAN : double(softmax.top) + std::log(all(sums));
  *chosen = float(double(x[id]) - shift);
  if (top_n <= 0) return;
  const Kept kept = top_n < n ? largest_tokens(row, top_n) : Kept();
  int64_t* next = top_ids;
  for (int64_t p = 0; p < row.parts; ++p)
    row.hits(p, kept.cut, INT32_MAX, [&](F, int64_t i, uint32_t bits) {
      for (; bits; bits &= bits - 1) {
        const int64_t token = i + lowest(bits);
        if (kept.all() || kept.has(order(x[token]), token)) *next++ = token;
      }
    });
  std::sort(top_ids, next, [&](int64_t a, int64_t b) {
    const int32_t first = order(x[a]), second = order(x[b]);
    return first > second || (first == second && a < b);
  });
  for (int64_t i = 0; i < top_n; ++i) values[i] = float(double(x[top_ids[i]]) - shift);
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_sample(const float* logits, int64_t ldl, const float* temperature, const int32_t* top_k,
                   const float* top_p, const float* min_p, const double* uniform, int64_t* tokens,
                   int64_t rows, int64_t vocab) {
  parallel_each(rows, rows * vocab * 16, [&](int64_t r, int64_t) {
    tokens[r] = draw(logits + r * ldl, vocab, temperature[r], top_k[r], top_p[r], min_p[r],
                     uniform[r]);
  });
}

void ds_cpu_mask_logits(const float* logits, int64_t ldl, const uint32_t* masks,
                        const int32_t* which, float* out, int64_t rows, int64_t vocab) {
  const int64_t words = (vocab + 31) / 32;
  parallel_each(rows, rows * vocab * 8, [&](int64_t r, int64_t) {
    const float* x = logits + r * ldl;
    if (which[r] < 0)
      std::memcpy(out + r * vocab, x, size_t(vocab) * sizeof(float));
    else
      mask_row(x, masks + which[r] * words, out + r * vocab, vocab);
  });
}

void ds_cpu_logprobs(const float* logits, int64_t ldl, const int64_t* ids, int64_t top_n,
                     float* chosen, float* values, int64_t* top_ids, int64_t rows, int64_t vocab) {
  parallel_each(rows, rows * vocab * 16, [&](int64_t r, int64_t) {
    log_softmax(logits + r * ldl, vocab, ids[r], top_n, chosen + r, values + r * top_n,
                top_ids + r * top_n);
  });
}
