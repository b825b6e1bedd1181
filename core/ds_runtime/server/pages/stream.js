// Server-sent events, and reasoning that stands in the text. No DOM: tests run this as it is.

// The JSON events of a body, up to [DONE].
export async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(body)) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function* chunks(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const OPEN = "<think>", CLOSE = "</think>";

// Text into [kind, text] pairs, where a server leaves <think>…</think> in the content.
export class Splitter {
  #state = "start"; // then thinking, gap and text, or text at once
  #kept = ""; // what may still become a mark

  push(text) {
    const out = [];
    this.#kept += text;
    if (this.#state === "start") {
      const begins = this.#kept.trimStart();
      if (begins !== OPEN && OPEN.startsWith(begins)) return out;
      this.#state = begins.startsWith(OPEN) ? "thinking" : "text";
      if (this.#state === "thinking") this.#kept = begins.slice(OPEN.length);
    }
    if (this.#state === "thinking") {
      const at = this.#kept.indexOf(CLOSE);
      const cut = at >= 0 ? at : this.#kept.length - overlap(this.#kept, CLOSE);
      if (cut) out.push(["thinking", this.#kept.slice(0, cut)]);
      this.#kept = this.#kept.slice(at >= 0 ? at + CLOSE.length : cut);
      if (at < 0) return out;
      this.#state = "gap";
    }
    if (this.#state === "gap") this.#kept = this.#kept.replace(/^\n+/, "");
    if (this.#kept) {
      out.push(["text", this.#kept]);
      this.#state = "text";
      this.#kept = "";
    }
    return out;
  }

  end() {
    const kind = this.#state === "thinking" ? "thinking" : "text";
    const out = this.#kept ? [[kind, this.#kept]] : [];
    this.#kept = "";
    return out;
  }
}

// How many characters at the end of `text` begin `mark`.
function overlap(text, mark) {
  for (let n = Math.min(text.length, mark.length - 1); n > 0; n--) {
    if (mark.startsWith(text.slice(text.length - n))) return n;
  }
  return 0;
}
