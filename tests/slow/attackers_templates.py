"""A client of a server whose chat template does not end for some messages.

`write_template(folder)` writes it, for `--chat-template`; the attacker has the form of those in
attackers.py.
"""

from __future__ import annotations

from pathlib import Path

import httpx

LOOPS = {
    "python": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "memory": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "native": "{% for i in range(99999) %}{{ messages[0].content|center(9999999) }}{% endfor %}",
}
_REST = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_template(folder: Path) -> Path:
    """A template that loops in one way or another where the first message asks for it."""
    path = folder / "hostile.jinja"
    some = [
        f"{{% if '[{name}]' in messages[0].content %}}{loop}{{% endif %}}"
        for name, loop in LOOPS.items()
    ]
    path.write_text("".join(some) + _REST)
    return path


def endless_template(http: httpx.Client, round: int) -> None:
    """A template that loops in Python, in memory, or in one call that lasts."""
    said = f"[{list(LOOPS)[round % len(LOOPS)]}]"
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code in (400, 503), reply.text
