// The chat box: streams /v1/chat/completions; thinking dimmed, tool calls shown.
import { Splitter, events } from "./stream.js";

const $ = (id) => document.getElementById(id);

function part(parent, kind) {
  const element = document.createElement("div");
  element.className = kind;
  return parent.appendChild(element);
}

export function chat(headers) {
  const log = $("log"), ask = $("ask"), message = $("message");
  let history = [], abort = null;

  function turn(role, text) {
    const element = part(log, `turn ${role}`);
    const name = element.appendChild(document.createElement("b"));
    name.textContent = role === "user" ? "You" : "Model";
    if (text) part(element, "text").textContent = text;
    log.scrollTop = log.scrollHeight;
    return element;
  }

  function body() {
    const system = $("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    const made = { messages: [...first, ...history], stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "max_tokens"]) {
      if ($(name).value !== "") made[name] = Number($(name).value);
    }
    if ($("tools").value.trim()) made.tools = JSON.parse($("tools").value);
    return made;
  }

  async function answer(element, said) {
    const parts = {}, calls = [], splitter = new Splitter();
    let content = "", usage = null, whole = false;
    const add = (kind, text) => {
      if (!text) return;
      parts[kind] ??= part(element, kind);
      parts[kind].textContent += text;
    };
    const begin = performance.now();
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify(body()),
      signal: abort.signal,
    });
    if (!reply.ok) {
      const said = await reply.json().catch(() => null);
      throw new Error(said?.error?.message ?? `the server answered ${reply.status}`);
    }
    try {
      for await (const event of events(reply.body)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const delta = event.choices?.[0]?.delta ?? {};
        add("thinking", delta.reasoning_content);
        content += delta.content ?? "";
        for (const [kind, text] of splitter.push(delta.content ?? "")) add(kind, text);
        for (const call of delta.tool_calls ?? []) {
          const one = (calls[call.index] ??= { id: call.id, name: "", arguments: "" });
          one.name += call.function?.name ?? "";
          one.arguments += call.function?.arguments ?? "";
          one.element ??= part(element, "call");
          one.element.textContent = `calls ${one.name}(${one.arguments})`;
        }
        log.scrollTop = log.scrollHeight;
      }
      whole = true;
    } finally {
      for (const [kind, text] of splitter.end()) add(kind, text);
      const made = { role: "assistant", content };
      if (calls.length && whole) { // the arguments of others may be no JSON
        made.tool_calls = calls.map((c) => ({
          id: c.id, type: "function", function: { name: c.name, arguments: c.arguments },
        }));
      }
      if (content || made.tool_calls) said.push(made);
    }
    if (usage) {
      const took = ((performance.now() - begin) / 1000).toFixed(1);
      part(element, "note").textContent = `${usage.completion_tokens} tokens in ${took} s`;
    }
  }

  ask.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || abort) return;
    abort = new AbortController();
    $("send").disabled = true;
    $("stop").disabled = false;
    const said = history, before = said.length; // another list once the conversation is new
    said.push({ role: "user", content: text });
    turn("user", text);
    message.value = "";
    const element = turn("assistant");
    try {
      await answer(element, said);
    } catch (error) {
      const stopped = error.name === "AbortError";
      part(element, stopped ? "note" : "failed").textContent = stopped ? "stopped" : error.message;
      if (said.length === before + 1) said.length = before; // nothing came: not said
    }
    log.scrollTop = log.scrollHeight;
    abort = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    message.focus();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask.requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => abort?.abort());
  $("reset").addEventListener("click", () => {
    abort?.abort();
    history = [];
    log.replaceChildren();
    message.focus();
  });
}
