"""A server that an agent talks to: a word is a token, and its cache forgets nothing."""

from __future__ import annotations

import itertools
import json

from raw_server import DONE, STREAM


class AgentServer:
    """A `reply` of raw_server. `calls(turn)` says which tools an answer calls: (name, arguments)
    each; `page`: hits are whole pages of so many tokens; `tells`: "cached" and "ids", as a server
    may leave them out."""

    def __init__(self, calls=lambda turn: (), page=1, tells=("cached", "ids"), fails=()):
        self.calls, self.page, self.tells, self.fails = calls, page, tells, set(fails)
        self.ids, self.known, self.bodies, self.cached = {}, [], [], []
        self.fresh = itertools.count()
        self.flushed = 0

    def __call__(self, path, head, body):
        if path in ("/flush_cache", "/reset_prefix_cache"):
            self.flushed += 1
            self.known.clear()
            return 200, {}, [b"done"]
        if "continuous_usage_stats" in body.get("stream_options", {}):
            return 400, {}, [b'{"error": {"message": "unknown field"}}']
        if "return_token_ids" in body and "refuses" in self.tells:
            return 400, {}, [b'{"error": {"message": "unknown field return_token_ids"}}']
        self.bodies.append(body)
        if len(self.bodies) in self.fails:
            return 503, {}, [b'{"error": {"message": "full up"}}']
        return 200, STREAM, self._pieces(body)

    def _pieces(self, body):
        prompt = self._prompt(body)
        common = max((self._common(prompt, other) for other in self.known), default=0)
        self.cached.append(common // self.page * self.page)
        words = [f"w{next(self.fresh)}" for _ in range(3)]
        self.known.append(prompt + self._of(words))
        turn = sum(m["role"] == "assistant" for m in body.get("messages", ()))
        found = [
            {"index": n, "id": f"c{turn}-{n}", "function": {"name": name, "arguments": ""}}
            for n, (name, _) in enumerate(self.calls(turn))
        ]
        parts = [
            {"index": n, "function": {"arguments": part}}
            for n, (_, arguments) in enumerate(self.calls(turn))
            for part in (arguments[:3], arguments[3:])
        ]
        deltas = [{"content": " ".join(words)}, *({"tool_calls": [c]} for c in found + parts)]
        events = []
        for number, delta in enumerate(deltas):
            entry = {"index": 0, "delta": delta}
            if "messages" not in body:
                entry = {"index": 0, "text": delta["content"]}
            if number == 0 and "ids" in self.tells:
                entry |= {"prompt_token_ids": prompt, "token_ids": self._of(words)}
            events.append({"choices": [entry]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
        if "cached" in self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached[-1]}
        events.append({"choices": [], "usage": usage})
        return [*(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events), DONE]

    def _prompt(self, body):
        if "prompt" in body:
            text = body["prompt"]
            return text if isinstance(text, list) else self._of(text.split())
        words = json.dumps(body.get("tools", [])).split()
        for message in body["messages"]:
            words += [message["role"], *message["content"].split()]
            words += json.dumps(message.get("tool_calls", [])).split()
        return self._of(words)

    def _of(self, words):
        return [self.ids.setdefault(word, len(self.ids)) for word in words]

    @staticmethod
    def _common(one, other):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        return sum(1 for _ in same)
