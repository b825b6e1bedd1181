// From two readings of /metrics to what a tile shows. No DOM: tests run this as it is.

// {"name": [{labels, value}]} of Prometheus' text format.
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    (found[match[1].replace(/^ds_runtime_/, "")] ??= []).push({ labels, value });
  }
  return found;
}

// Of all replicas of the engine together.
export const read = (metrics, name) =>
  (metrics[name] ?? []).reduce((sum, sample) => sum + sample.value, 0);

export const mean = (metrics, name) => read(metrics, name) / (metrics[name]?.length || 1);

// How much a counter grew; after a restart of an engine it counts from 0.
export function grown(now, before, name) {
  const old = new Map((before[name] ?? []).map((s) => [s.labels.engine, s.value]));
  return (now[name] ?? []).reduce((sum, { labels, value }) => {
    const was = old.get(labels.engine) ?? 0;
    return sum + (value >= was ? value - was : value);
  }, 0);
}

// The q-quantile, in seconds, of what a histogram saw between the readings; null if nothing.
export function quantile(now, before, name, q) {
  const old = new Map((before[`${name}_bucket`] ?? []).map((s) => [s.labels.le, s.value]));
  const buckets = (now[`${name}_bucket`] ?? []).map((s) => [
    s.labels.le === "+Inf" ? Infinity : Number(s.labels.le),
    s.value - (old.get(s.labels.le) ?? 0),
  ]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  let below = 0, low = 0;
  for (const [high, count] of buckets) {
    if (count >= q * total) {
      if (high === Infinity) return low;
      return low + ((high - low) * (q * total - below)) / (count - below || 1);
    }
    below = count;
    low = high;
  }
  return low;
}

export function seconds(value) {
  if (value === null) return "–";
  // Two digits, without an exponent.
  const two = (v) => Number(v.toPrecision(2)).toLocaleString("en", { maximumFractionDigits: 6 });
  return value < 1 ? `${two(value * 1000)} ms` : `${two(value)} s`;
}
