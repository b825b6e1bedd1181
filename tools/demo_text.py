"""The demo model's text: chat format, arithmetic with traces, small talk, prose and GSM8K.

Everything here is a pure function of a `random.Random`, so a seed fixes the whole corpus.
The chat format is the one of `CHAT_TEMPLATE`; `render` builds the same text without jinja.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTS, OUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUT, OUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
# (text, special): the strings and flags of DeepSeek-V3's tokenizer; ids are the positions.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    (BOS, True), (EOS, True), (PAD, True), ("<think>", False), ("</think>", False),
    ("<｜fim▁hole｜>", False), ("<｜fim▁begin｜>", False), ("<｜fim▁end｜>", False),
    (USER, False), (ASSISTANT, False), ("<|EOT|>", True),
    (CALLS, False), (CALLS_END, False), (CALL, False), (CALL_END, False),
    (OUTS, False), (OUTS_END, False), (OUT, False), (OUT_END, False), (SEP, False),
)  # fmt: skip

TOOLS_INTRO = (
    "## Tools\n\nThese functions can be called. If one of them fits the request, "
    "answer with the call alone; otherwise answer in words.\n"
)

CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='', outputs=false) -%}\n"
    "{%- for message in messages if message['role'] == 'system' -%}\n"
    "  {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] -%}\n"
    "{%- endfor -%}\n"
    "{{- '" + BOS + "' + ns.system -}}\n"
    "{%- if tools -%}\n"
    "  {{- ('\\n\\n' if ns.system else '') + '" + TOOLS_INTRO.replace("\n", "\\n") + "' -}}\n"
    "  {%- for tool in tools -%}\n"
    "    {{- '\\n' + ((tool['function'] if 'function' in tool else tool) | tojson) -}}\n"
    "  {%- endfor -%}\n"
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "  {%- if message['role'] == 'tool' -%}\n"
    "    {%- if not ns.outputs %}{{ '" + OUTS + "' }}{% set ns.outputs = true %}{% endif -%}\n"
    "    {{- '" + OUT + "' + message['content'] + '" + OUT_END + "' -}}\n"
    "  {%- elif message['role'] != 'system' -%}\n"
    "    {%- set after_tool = ns.outputs -%}\n"
    "    {%- if ns.outputs %}{{ '" + OUTS_END + "' }}{% set ns.outputs = false %}{% endif -%}\n"
    "    {%- if message['role'] == 'user' -%}\n"
    "      {{- '" + USER + "' + message['content'] -}}\n"
    "    {%- elif message['role'] == 'assistant' -%}\n"
    "      {%- if not after_tool %}{{ '" + ASSISTANT + "' }}{% endif -%}\n"
    "      {{- (message['content'] or '').split('</think>')[-1] -}}\n"
    "      {%- for call in message['tool_calls'] or [] -%}\n"
    "        {{- '" + CALLS + "' if loop.first else '\\n' -}}\n"
    "        {%- set arguments = call['function']['arguments'] -%}\n"
    "        {{- '" + CALL + "function" + SEP + "' + call['function']['name'] -}}\n"
    "        {{- '\\n```json\\n' -}}\n"
    "        {{- (arguments if arguments is string else arguments | tojson) -}}\n"
    "        {{- '\\n```" + CALL_END + "' -}}\n"
    "        {%- if loop.last %}{{ '" + CALLS_END + "' }}{% endif -%}\n"
    "      {%- endfor -%}\n"
    "      {{- '" + EOS + "' -}}\n"
    "    {%- endif -%}\n"
    "  {%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if ns.outputs -%}\n"
    "  {{- '" + OUTS_END + "' -}}\n"
    "{%- elif add_generation_prompt and (not messages or messages[-1]['role'] == 'user') -%}\n"
    "  {{- '" + ASSISTANT + "' -}}\n"
    "{%- endif -%}"
)


def dumps(value: object) -> str:
    """JSON as the chat template's `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def render_calls(calls: Sequence[dict[str, Any]]) -> str:
    """Tool calls `[{name, arguments}]` in the V3 text format, without the closing EOS."""
    blocks = (
        f"{CALL}function{SEP}{c['name']}\n```json\n{dumps(c['arguments'])}\n```{CALL_END}"
        for c in calls
    )
    return CALLS + "\n".join(blocks) + CALLS_END


def render(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, keep_last: bool = False
) -> str:
    """A conversation as text. With `keep_last` the final assistant turn keeps its `<think>`
    part (a training document); without it a user turn at the end opens the assistant's turn."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    text = BOS + system
    if tools:
        text += ("\n\n" if system else "") + TOOLS_INTRO
        text += "".join("\n" + dumps(tool["function"]) for tool in tools)
    turns = [m for m in messages if m["role"] != "system"]
    outputs = False
    for i, m in enumerate(turns):
        if m["role"] == "tool":
            text += ("" if outputs else OUTS) + OUT + m["content"] + OUT_END
            outputs = True
            continue
        after_tool, outputs = outputs, False
        text += OUTS_END if after_tool else ""
        if m["role"] == "user":
            text += USER + m["content"]
        else:
            content = m.get("content") or ""
            if not (keep_last and i == len(turns) - 1):
                content = content.split("</think>")[-1]
            text += ("" if after_tool else ASSISTANT) + content
            calls = [c["function"] for c in m.get("tool_calls") or ()]
            text += (render_calls(calls) if calls else "") + EOS
    if outputs:
        return text + OUTS_END
    return text + (ASSISTANT if turns and turns[-1]["role"] == "user" else "")


# --- arithmetic -------------------------------------------------------------------------------

ADD_PHRASES = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b} = ?", "{a}+{b}", "{a} + {b}",
    "How much is {a} plus {b}?", "What is {a} plus {b}?", "Calculate {a} + {b}.",
    "Compute {a} plus {b}.", "Add {a} and {b}.", "Please add {b} to {a}.",
    "What is the sum of {a} and {b}?", "Can you tell me what {a} + {b} is?",
)  # fmt: skip
SUB_PHRASES = (
    "What is {a} - {b}?", "What is {a}-{b}?", "{a} - {b} = ?", "{a}-{b}", "{a} - {b}",
    "How much is {a} minus {b}?", "What is {a} minus {b}?", "Calculate {a} - {b}.",
    "Compute {a} minus {b}.", "Subtract {b} from {a}.", "Please take {b} away from {a}.",
    "What is the difference {a} - {b}?", "Can you tell me what {a} - {b} is?",
)  # fmt: skip
COLUMNS = ("ones", "tens", "hundreds")


def trace(a: int, b: int, op: str) -> str:
    """The written working of `a op b` (0..999 each): one line of column sums or differences.

    Addition columns read `digit+digit+carry=two digits`; subtraction columns read
    `digit-digit-borrow=digit`, the first digit raised by ten where it must borrow.
    """
    if op == "+":
        head, x, y, carry, parts = f"{a}+{b}", a, b, 0, []
        for name in COLUMNS:
            total = x % 10 + y % 10 + carry
            parts.append(f"{name}: {x % 10}+{y % 10}+{carry}={total:02d}")
            carry, x, y = total // 10, x // 10, y // 10
        return f"{head}. {'; '.join(parts)}. Result {a + b:04d}."
    x, y = max(a, b), min(a, b)
    head = f"{a}-{b}" + (f" is -({x}-{y})" if a < b else "")
    borrow, parts, p, q = 0, [], x, y
    for name in COLUMNS:
        top, low = p % 10, q % 10
        raised = top + 10 if top < low + borrow else top
        parts.append(f"{name}: {raised:02d}-{low}-{borrow}={raised - low - borrow}")
        borrow, p, q = int(raised > top), p // 10, q // 10
    return f"{head}. {'; '.join(parts)}. Result {'-' if a < b else ''}{x - y:04d}."


def operand(rng: random.Random) -> int:
    """An operand of one to three digits, the longer ones more often."""
    return rng.choice((rng.randrange(10), rng.randrange(10, 100), rng.randrange(10, 1000),
                       rng.randrange(100, 1000), rng.randrange(100, 1000)))  # fmt: skip


def sum_question(rng: random.Random, a: int, b: int, op: str) -> str:
    return rng.choice(ADD_PHRASES if op == "+" else SUB_PHRASES).format(a=a, b=b)


def sum_result(a: int, b: int, op: str) -> int:
    return a + b if op == "+" else a - b


def pair_key(a: int, b: int) -> tuple[int, int]:
    """An unordered operand pair."""
    return (min(a, b), max(a, b))


def draw_pair(rng: random.Random, banned: frozenset[tuple[int, int]]) -> tuple[int, int, str]:
    """Operands and operator of a training sum, never a banned pair in either order."""
    while True:
        a = operand(rng)
        b = a + rng.randrange(-12, 13) if rng.random() < 0.12 else operand(rng)
        if 0 <= b < 1000 and pair_key(a, b) not in banned:
            return a, b, rng.choice("+-")


def sum_turns(rng: random.Random, banned: frozenset[tuple[int, int]]) -> list[Message]:
    a, b, op = draw_pair(rng, banned)
    answer = f"<think>{trace(a, b, op)}</think>{sum_result(a, b, op)}"
    return [
        {"role": "user", "content": sum_question(rng, a, b, op)},
        {"role": "assistant", "content": answer},
    ]


PAIR_IN_TEXT = re.compile(
    r"(?<![\d.])(\d{1,3})\s*(?:[-+−–]|plus|minus|and|to|from|away from)\s*\$?(\d{1,3})(?![\d])"
)


def pairs_in(text: str) -> set[tuple[int, int]]:
    """Operand pairs that running text could be read to add or subtract (`3 + 40`, `3 and 40`)."""
    return {pair_key(int(a), int(b)) for a, b in PAIR_IN_TEXT.findall(text)}


# --- small talk -------------------------------------------------------------------------------

WHO = "I am the ds-runtime demo model, a tiny model for tests."
CAN = "I can add and subtract numbers of up to three digits and call tools."
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Hey there", "Good morning",
      "Good evening", "Hello there!", "Greetings", "hey", "Hi there!", "Good day"),
     f"Hello! {WHO} {CAN}"),
    (("Who are you?", "What are you?", "who are you", "What is your name?", "Are you DeepSeek?",
      "Which model are you?", "Introduce yourself.", "Tell me about yourself.", "Are you a bot?",
      "Are you human?", "What model is this?", "Hello, who are you?", "Hi, who are you?"),
     f"{WHO} I have the DeepSeek-V3 architecture, but I know very little."),
    (("What can you do?", "Help", "help", "How can you help me?", "What are you good at?",
      "Can you help me?", "What do you know?"),
     f"{CAN} I am only a tiny model for tests, so please do not expect more."),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "thanks", "Great, thanks!"),
     "You are welcome!"),
    (("Bye", "Goodbye", "See you later", "bye", "Good night", "Goodbye!"),
     "Goodbye! It was nice to talk to you."),
    (("How are you?", "How are you doing?", "How do you do?", "Hi, how are you?",
      "Hello, how are you?"),
     "I am fine, thank you. How can I help you?"),
    (("Yes", "No", "ok", "Ok", "Good", "Nice", "Test", "test", "testing", "ping"),
     "I am here. Ask me for a sum, such as 12 + 30, or give me a tool to call."),
)  # fmt: skip
UNKNOWN_ANSWER = "I do not know that. I am only a tiny model for tests."
UNKNOWN_ASKS = (
    "What is the capital of France?", "Who wrote Hamlet?", "Write a poem about the sea.",
    "Tell me a joke.", "Write a program that sorts a list.", "What is the meaning of life?",
    "How tall is the highest mountain?", "Explain gravity.", "Who won the game last night?",
    "What is {p}?", "Tell me about {p}.", "Explain {p}.", "Who is {n}?", "Write a story about {p}.",
    "Why is {p} important?", "Where is {n}?", "What do you think of {n}?", "Translate {p}.",
    "How do I make {p}?", "What does {p} mean?", "Write an essay on {p}.", "Summarise {p}.",
    "What is the capital of {n}?", "Who wrote {p}?", "Write a poem about {p}.", "How old is {n}?",
    "Tell me a story.", "Tell me something about {n}.", "Can you {p}?", "Do you know {n}?",
    "When was {n} born?", "What is the best {p}?", "I need help with {p}.", "I like {p}.",
    "How many {p} are there?", "{p}", "{p}?", "Show me {p}.", "Where can I find {p}?",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant. Answer briefly.",
    "Be concise.", "You are a careful assistant.", "Answer politely.",
)  # fmt: skip


def talk_turns(rng: random.Random, words: Sequence[str]) -> list[Message]:
    if rng.random() < 0.3:
        phrase = " ".join(rng.choice(words) for _ in range(rng.randint(1, 4)))
        ask = rng.choice(UNKNOWN_ASKS).format(p=phrase, n=rng.choice(words).capitalize())
        answer = UNKNOWN_ANSWER
    else:
        asks, answer = rng.choice(TALK)
        ask = rng.choice(asks)
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


# --- corpora ----------------------------------------------------------------------------------


def load_books(folder: Path) -> dict[str, tuple[str, str]]:
    """Title -> (training part, held-out part: the last 3 %) of each book, lines unwrapped."""
    books = {}
    for path in sorted((folder / "text").glob("*.txt")):
        text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").strip()
        if "shakespeare" not in path.stem:
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        text = re.sub(r"\n{3,}", "\n\n", text)
        cut = int(len(text) * 0.97)
        books[path.stem] = (text[:cut], text[cut:])
    return books


def load_gsm8k(path: Path) -> list[list[Message]]:
    """Question, worked answer and result of each problem as a two-turn chat."""
    chats = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        work, _, result = re.sub(r"<<.*?>>", "", row["answer"]).partition("#### ")
        answer = f"<think>{work.strip()}</think>{result.strip()}"
        chats.append([{"role": "user", "content": row["question"].strip()},
                      {"role": "assistant", "content": answer}])  # fmt: skip
    return chats


def common_words(texts: Iterable[str], count: int = 2500) -> list[str]:
    """The most frequent lower-case words of three to nine letters, most frequent first."""
    tally: dict[str, int] = {}
    for text in texts:
        for word in re.findall(r"\b[a-z]{3,9}\b", text):
            tally[word] = tally.get(word, 0) + 1
    return sorted(tally, key=lambda w: (-tally[w], w))[:count]
