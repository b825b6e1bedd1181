// The tiles: /metrics once a second, the last two minutes as a line.
import { grown, mean, parse, quantile, read, seconds } from "./metrics.js";

const EVERY = 1000, KEPT = 120, WINDOW = 30; // ms, readings drawn, readings a quantile looks back

const SMALL = ["one_shot", "two_shot"]; // kinds of all-reduce
const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const share = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const both = (one, other) => `${seconds(one)} / ${seconds(other)}`;

// name, the figure, how it reads. `c`: {now, last, past, dt}.
export const TILES = [
  ["Output tokens per second", (c) => grown(c.now, c.last, "generation_tokens_total") / c.dt, whole],
  ["Prompt tokens per second", (c) => grown(c.now, c.last, "prompt_tokens_total") / c.dt, whole],
  ["Running requests", (c) => read(c.now, "num_requests_running"), whole],
  ["Queued requests", (c) => read(c.now, "num_requests_waiting"), whole],
  ["Time to first token (p50 / p95)", ...latency("time_to_first_token_seconds")],
  ["Time between tokens (p50 / p95)", ...latency("inter_token_latency_seconds")],
  ["KV cache in use", (c) => mean(c.now, "kv_cache_usage_perc"), share],
  ["Answers ended by NaN or infinity", (c) => read(c.now, "corrupted_requests_total"), whole],
  ["Prompt tokens from cache", cached, (v) => (v === null ? "–" : share(v))],
  ["Requests that waited for a shared prefix", (c) => read(c.now, "prefix_waits_total"), whole],
  ["Snapshots of states, kept / used / evicted", snapshots, (v, c) => (v === null ? "–" : several(v, c))],
  ["Host memory, pages kept / prompt tokens read", host, (v, c) => (v === null ? "–" : found(v, c))],
  ["Prompt tokens per prefill step", chunk, (v) => (v === null ? "–" : whole(v))],
  ["Received from other ranks, MB/s", received, (v) => (v === null ? "–" : whole(v))],
  ["All-reduces, one-shot / two-shot / others", small, (v, c) => (v === null ? "–" : kinds(c))],
  ["Last rank, and its delay per step", (c) => last(c)?.delay ?? null, (v, c) => (v === null ? "–" : named(c))],
  ["Busiest expert, times the mean", busiest, (v) => (v === null ? "–" : v.toFixed(2))],
  ["Kernels compiled", (c) => read(c.now, "kernel_compilations_total"), whole],
];

function latency(name) {
  const at = (c, q) => quantile(c.now, c.past, name, q);
  return [(c) => at(c, 0.5), (value, c) => both(value, at(c, 0.95))];
}

function cached(c) {
  const asked = grown(c.now, c.past, "prefix_cache_queries_total");
  return asked ? grown(c.now, c.past, "prefix_cache_hits_total") / asked : null;
}

function snapshots(c) {
  return read(c.now, "state_snapshots") ? read(c.now, "state_snapshots_kept") : null;
}

function several(kept, c) {
  const told = ["state_snapshot_hits_total", "state_snapshots_evicted_total"];
  return [kept, ...told.map((name) => read(c.now, name))].map(whole).join(" / ");
}

function host(c) {
  return read(c.now, "host_pages") ? read(c.now, "host_pages_kept") : null;
}

function found(kept, c) {
  return [kept, read(c.now, "prefix_cache_host_hits_total")].map(whole).join(" / ");
}

function received(c) {
  const name = "received_bytes_per_rank_total";
  return read(c.now, name) ? grown(c.now, c.last, name) / c.dt / 1e6 : null;
}

// All-reduces since the last reading: one-shot, two-shot, and those of any other kind.
function byKind(c) {
  const name = "all_reduces_total";
  const count = (wanted) => {
    const only = (all) => ({ [name]: (all[name] ?? []).filter((s) => wanted(s.labels.kind)) });
    return grown(only(c.now), only(c.last), name);
  };
  return [...SMALL.map((kind) => count((k) => k === kind)), count((k) => !SMALL.includes(k))];
}

function small(c) {
  const [one, two, others] = byKind(c), all = one + two + others;
  return all ? (one + two) / all : null;
}

function kinds(c) {
  const counts = byKind(c), all = counts.reduce((a, b) => a + b, 0);
  return counts.map((count) => share(count / all)).join(" / ");
}

// The rank that came latest to the collectives of its engine's measured steps, and by how much in each.
function last(c) {
  const some = (name, wanted) => {
    const only = (all) => ({ [name]: (all[name] ?? []).filter((s) => wanted(s.labels)) });
    return grown(only(c.now), only(c.past), name);
  };
  const ranks = (c.now.rank_late_seconds_total ?? []).map(({ labels: { engine, rank } }) => {
    const late = some("rank_late_seconds_total", (l) => l.rank === rank && l.engine === engine);
    return { engine, rank, delay: late / some("skew_steps_total", (l) => l.engine === engine) };
  });
  return ranks.filter((r) => Number.isFinite(r.delay)).sort((a, b) => b.delay - a.delay)[0];
}

function named(c) {
  const { engine, rank, delay } = last(c);
  const many = new Set(c.now.rank_late_seconds_total.map((s) => s.labels.engine)).size > 1;
  return `rank ${rank}${many ? ` of engine ${engine}` : ""}, ${seconds(delay)}`;
}

// Of the layer where it is furthest above the mean; with --expert-metrics.
function busiest(c) {
  const name = "expert_tokens_total", key = ({ labels: l }) => `${l.engine} ${l.layer} ${l.expert}`;
  const old = new Map((c.past[name] ?? []).map((s) => [key(s), s.value])), layers = {};
  for (const sample of c.now[name] ?? []) {
    const was = old.get(key(sample)) ?? 0, { value, labels } = sample;
    const layer = (layers[`${labels.engine} ${labels.layer}`] ??= []);
    layer.push(value >= was ? value - was : value);
  }
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const shares = Object.values(layers).filter(sum).map((l) => (Math.max(...l) * l.length) / sum(l));
  return shares.length ? Math.max(...shares) : null;
}

function chunk(c) {
  const steps = grown(c.now, c.past, "prefill_steps_total");
  return steps ? grown(c.now, c.past, "prefill_chunk_tokens_total") / steps : null;
}

function tile(name) {
  const item = document.createElement("li"), said = document.createElement("span");
  const value = document.createElement("span");
  said.className = "name";
  value.className = "value";
  said.textContent = name;
  value.textContent = "–";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const path = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  item.append(said, value, svg);
  return { item, value, path, history: [] };
}

function draw(one) {
  const top = Math.max(...one.history, 1e-9), from = KEPT - one.history.length;
  const points = one.history.map((v, i) => `${from + i} ${(19 - (18 * (v ?? 0)) / top).toFixed(1)}`);
  one.path.setAttribute("d", points.length ? `M${points.join("L")}` : "");
}

// Reads on until the page goes; `told(up, reason)` hears of the server's state.
export function watch(list, told) {
  const tiles = TILES.map(([name]) => tile(name));
  list.replaceChildren(...tiles.map((one) => one.item));
  const readings = [];

  async function step() {
    try {
      const [metrics, health] = await Promise.all([fetch("metrics"), fetch("health")]);
      readings.push({ at: performance.now(), now: parse(await metrics.text()) });
      const { status, reason } = await health.json();
      told(health.ok, reason ? `${status}: ${reason}` : status);
      if (readings.length > WINDOW + 1) readings.shift();
      show();
    } catch {
      told(false, "no answer");
    }
    setTimeout(step, EVERY);
  }

  function show() {
    const { at, now } = readings.at(-1), last = readings.at(-2);
    if (!last) return;
    const c = { now, last: last.now, past: readings[0].now, dt: (at - last.at) / 1000 };
    TILES.forEach(([, figure, word], i) => {
      const value = figure(c), one = tiles[i];
      one.value.textContent = word(value, c);
      one.history.push(value);
      if (one.history.length > KEPT) one.history.shift();
      draw(one);
    });
  }

  step();
}
