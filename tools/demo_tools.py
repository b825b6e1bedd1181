"""Generated tool-call conversations for the demo model.

Names of functions, names of parameters, values, phrasings and the number of offered tools all
vary, so that the only way to a right call is to copy from the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo_text import SYSTEMS, Message, dumps, pair_key, talk_turns

Call = dict[str, Any]
FIRST = str.split(
    "Anna Ben Clara David Elena Felix Greta Hugo Ida Jonas Karla Leo Maria Nora Oscar Paula Quinn "
    "Rosa Simon Tara Uwe Vera Walter Xenia Yusuf Zoe Mei Ravi Aiko Omar Ling Pedro Sofia Ivan "
    "Amara Kofi Lars Nina Tom Julia"
)
CITIES = str.split(
    "Paris Rome Berlin Madrid London Oslo Vienna Prague Lisbon Dublin Warsaw Athens Tokyo Osaka "
    "Beijing Shanghai Delhi Mumbai Cairo Nairobi Lagos Lima Quito Bogota Boston Chicago Denver "
    "Dallas Seattle Toronto Montreal Sydney Melbourne Auckland Seoul Hanoi Bangkok Jakarta Zurich "
    "Geneva Munich Hamburg Milan Turin Porto Seville Lyon Nice Ghent Bergen"
)
ONSETS = str.split("b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh st t tr v w y z")
VOWELS = str.split("a e i o u ai ea io ou")
CODAS = ["", *str.split("n r l s t m nd rt x th ng")]
ROOMS = ("kitchen", "bedroom", "bathroom", "garage", "office", "hall", "garden", "attic")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Chinese", "Japanese", "Polish", "Greek")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CNY", "CHF", "SEK", "INR", "BRL", "CAD")


class Values:
    """Random argument values."""

    def __init__(self, rng: random.Random, words: Sequence[str]) -> None:
        self.rng, self.words = rng, words

    def made_up(self) -> str:
        """A pronounceable capitalised name nobody has seen."""
        r = self.rng
        parts = (r.choice(ONSETS) + r.choice(VOWELS) for _ in range(r.randint(2, 3)))
        return ("".join(parts) + r.choice(CODAS)).capitalize()

    def city(self) -> str:
        return self.rng.choice(CITIES) if self.rng.random() < 0.6 else self.made_up()

    def person(self) -> str:
        return self.rng.choice(FIRST) if self.rng.random() < 0.6 else self.made_up()

    def phrase(self, low: int = 1, high: int = 5) -> str:
        count = self.rng.randint(low, high)
        text = " ".join(self.rng.choice(self.words) for _ in range(count))
        return text if self.rng.random() < 0.7 else text.capitalize()

    def code(self) -> str:
        letters = "".join(self.rng.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(2))
        return f"{letters}-{self.rng.randrange(1000, 100000)}"

    def ticker(self) -> str:
        return "".join(self.rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(4))

    def date(self) -> str:
        r = self.rng
        return f"{r.randint(2024, 2030)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"

    def time(self) -> str:
        hour, minute = self.rng.randrange(24), self.rng.choice((0, 10, 15, 20, 30, 40, 45, 50))
        return f"{hour:02d}:{minute:02d}"

    def decimal(self) -> float:
        return self.rng.randrange(1, 4000) / 10


@dataclass(frozen=True)
class Param:
    """One parameter: its possible names, JSON schema, and how to draw a value."""

    names: str
    schema: dict[str, Any]
    draw: Callable[[Values], Any]


def text(names: str, about: str, draw: Callable[[Values], Any]) -> Param:
    return Param(names, {"type": "string", "description": about}, draw)


def number(names: str, about: str, low: int, high: int) -> Param:
    return Param(names, {"type": "integer", "description": about},
                 lambda v: v.rng.randint(low, high))  # fmt: skip


def choice(names: str, options: Sequence[str]) -> Param:
    return Param(names, {"type": "string", "enum": list(options)}, lambda v: v.rng.choice(options))


@dataclass(frozen=True)
class Family:
    """A kind of function. Asks are templates over the parameters' slots {0}, {1}, …; a slot an
    ask does not mention is optional and left out of the call."""

    names: str
    about: str
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    results: tuple[tuple[str, str], ...] = ()


ON = {True: "on", False: "off"}
FAMILIES: tuple[Family, ...] = (
    Family("get_weather weather current_weather weather_lookup fetch_weather",
           "Get the weather of a city.",
           (text("city location place", "name of the city", Values.city),
            choice("unit units scale", ("celsius", "fahrenheit"))),
           ("What is the weather in {0}?", "How is the weather in {0} today?",
            "What is the weather in {0} in {1}?", "Tell me the weather in {0}, in {1} please.",
            "Is it warm in {0}? Use {1}.", "Weather for {0}?"),
           (('{{"temperature": {t}}}', "It is {t} degrees in {0}."),)),
    Family("set_timer start_timer timer create_timer", "Start a timer.",
           (number("minutes duration length", "duration in minutes", 1, 240),
            text("label name title", "name of the timer", lambda v: v.phrase(1, 3))),
           ("Set a timer for {0} minutes.", "Start a {0} minute timer.",
            'Set a timer of {0} minutes called "{1}".', 'Start a timer "{1}" for {0} minutes.'),
           (('{{"status": "started"}}', "The timer of {0} minutes is running."),)),
    Family("send_message message_send text_message send_text", "Send a message to a person.",
           (text("recipient to person", "who gets the message", Values.person),
            text("text message body content", "the message", lambda v: v.phrase(2, 6))),
           ('Send "{1}" to {0}.', 'Tell {0} "{1}".', 'Send a message to {0}: "{1}"',
            'Write {0} the message "{1}".'),
           (('{{"status": "sent"}}', "I sent your message to {0}."),)),
    Family("convert_currency currency_convert exchange convert_money",
           "Convert an amount of money to another currency.",
           (number("amount value sum", "amount to convert", 1, 9999),
            choice("from_currency source from", CURRENCIES),
            choice("to_currency target to", CURRENCIES)),
           ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?",
            "Change {0} {1} into {2}.", "What are {0} {1} worth in {2}?"),
           (('{{"result": {t}}}', "{0} {1} are {t} {2}."),)),
    Family("play_music play_song play music_player", "Play a song.",
           (text("song track title", "title of the song", lambda v: v.phrase(1, 4)),
            text("artist singer by", "name of the artist", Values.person),
            number("volume loudness level", "volume from 0 to 100", 0, 100)),
           ('Play "{0}".', 'Play the song "{0}" by {1}.', 'Play "{0}" by {1} at volume {2}.',
            'I want to hear "{0}" at volume {2}.'),
           (('{{"status": "playing"}}', 'Now playing "{0}".'),)),
    Family("create_event add_event calendar_add new_event", "Add an event to the calendar.",
           (text("title name subject", "title of the event", lambda v: v.phrase(1, 4)),
            text("date day", "date as YYYY-MM-DD", Values.date),
            text("time start at", "time as HH:MM", Values.time)),
           ('Add "{0}" to my calendar on {1} at {2}.', 'Create an event "{0}" on {1}.',
            'Put "{0}" into the calendar for {1}, {2}.', 'On {1} at {2} I have "{0}". Note it.'),
           (('{{"status": "created"}}', 'The event "{0}" is in your calendar.'),)),
    Family("set_light light_control switch_light lights", "Switch a light on or off.",
           (choice("room place where", ROOMS),
            Param("on enabled state", {"type": "boolean", "description": "true to switch on"},
                  lambda v: v.rng.random() < 0.5),
            number("brightness percent level", "brightness in percent", 1, 100)),
           ("Turn the light in the {0} {1}.", "Switch {1} the {0} light.",
            "Turn {1} the light in the {0} with {2} percent brightness."),
           (('{{"status": "ok"}}', "The light in the {0} is {1} now."),)),
    Family("search_books find_books book_search library_search", "Search the library.",
           (text("query search terms", "what to search for", lambda v: v.phrase(1, 4)),
            number("limit max_results count", "most results to return", 1, 50)),
           ('Search books about "{0}".', 'Find {1} books about "{0}".',
            'Look for "{0}" in the library.', 'Search the library for "{0}", at most {1} results.'),
           (('{{"found": {t}}}', 'I found {t} books about "{0}".'),)),
    Family("get_stock_price stock_price quote stock_quote", "Get the price of a stock.",
           (text("ticker symbol stock", "ticker symbol", Values.ticker),),
           ("What is the price of {0}?", "How much is the stock {0}?", "Stock price of {0}?",
            "Get me the quote of {0}."),
           (('{{"price": {t}}}', "{0} is at {t}."),)),
    Family("book_table reserve_table reservation table_booking", "Reserve a restaurant table.",
           (text("restaurant place name", "name of the restaurant", Values.made_up),
            number("people guests party_size", "number of guests", 1, 30),
            text("time at when", "time as HH:MM", Values.time)),
           ("Book a table for {1} at {0} at {2}.", "Reserve a table at {0} for {1} people.",
            "I need a table for {1} people at {0}, {2}.", "Table at {0} for {1} at {2} please."),
           (('{{"status": "reserved"}}', "Your table at {0} is reserved."),)),
    Family("calculator calculate compute math", "Calculate with two numbers.",
           (choice("operation op operator", ("add", "subtract", "multiply", "divide")),
            number("a x first left", "first number", 0, 9999),
            number("b y second right", "second number", 0, 9999)),
           ("Use the tool to {0} {1} and {2}.", "Please {0} {1} and {2} with the tool.",
            "Call the function: {0} {1}, {2}."),
           (('{{"result": {t}}}', "The result is {t}."),)),
    Family("translate translate_text translation translator", "Translate a text.",
           (text("text sentence input", "text to translate", lambda v: v.phrase(1, 5)),
            choice("language target_language to", LANGUAGES)),
           ('Translate "{0}" to {1}.', 'How do you say "{0}" in {1}?', 'What is "{0}" in {1}?',
            'Put "{0}" into {1}.'),
           (('{{"status": "done"}}', 'The translation of "{0}" is ready.'),)),
    Family("get_distance distance route_length travel_distance", "Distance between two cities.",
           (text("origin start from", "first city", Values.city),
            text("destination goal to", "second city", Values.city)),
           ("How far is it from {0} to {1}?", "Distance from {0} to {1}?",
            "How many kilometres are between {0} and {1}?", "Route length {0} to {1}, please."),
           (('{{"kilometres": {t}}}', "From {0} to {1} it is {t} kilometres."),)),
    Family("add_items shopping_add list_add add_to_list", "Add items to the shopping list.",
           (Param("items things entries",
                  {"type": "array", "items": {"type": "string"}, "description": "what to buy"},
                  lambda v: [v.phrase(1, 1).lower() for _ in range(v.rng.randint(1, 4))]),),
           ("Add {0} to the shopping list.", "Put {0} on my list.", "We need {0}. Add it.",
            "Shopping list: {0}."),
           (('{{"status": "ok"}}', "I added that to your list."),)),
    Family("track_parcel parcel_status track_package where_is_parcel", "Track a parcel.",
           (text("code tracking_number parcel_id", "code of the parcel", Values.code),),
           ("Where is my parcel {0}?", "Track the parcel {0}.", "Track {0}.",
            "What is the status of {0}?"),
           (('{{"days": {d}}}', "The parcel {0} arrives in {d} days."),)),
    Family("set_temperature heating thermostat set_heating", "Set the temperature of a room.",
           (choice("room place where", ROOMS),
            Param("degrees temperature value", {"type": "number", "description": "in celsius"},
                  Values.decimal)),
           ("Set the {0} to {1} degrees.", "Make it {1} degrees in the {0}.",
            "Heat the {0} to {1} degrees.", "I want {1} degrees in the {0}."),
           (('{{"status": "ok"}}', "The {0} is set to {1} degrees."),)),
    Family("get_user find_user user_lookup load_user", "Look a user up.",
           (number("user_id id number", "id of the user", 1, 99999),),
           ("Show me user {0}.", "Look up the user with id {0}.", "Who is user {0}?",
            "Load user {0}."),
           (('{{"name": "{n}"}}', "User {0} is {n}."),)),
    Family("roll_dice dice throw_dice random_dice", "Roll dice.",
           (number("count dice number", "how many dice", 1, 99),
            number("sides faces size", "sides of each die", 2, 100)),
           ("Roll {0} dice.", "Roll {0} dice with {1} sides.", "Throw {0} dice of {1} sides."),
           (('{{"total": {t}}}', "You rolled {t}."),)),
)  # fmt: skip
# Families whose calls quote free text, the hardest to copy: offered more often in training.
WORDY = tuple(f for f in FAMILIES if any(w in f.names for w in ("list", "message", "music",
              "event", "translate", "books")))  # fmt: skip
VERBS = str.split(
    "get set find make open read start stop check update load send list show count mark"
)
NOUNS = str.split(
    "report file task order note ticket door engine camera invoice photo train job plan"
)


@dataclass(frozen=True)
class Tool:
    """A family with its names chosen for one conversation."""

    family: Family
    name: str
    params: tuple[str, ...]
    spec: dict[str, Any]


def slot(index: int) -> str:
    """The placeholder of a parameter in an ask."""
    return f"{{{index}}}"


def make_tool(rng: random.Random, family: Family) -> Tool:
    name = rng.choice(family.names.split())
    if rng.random() < 0.15:
        name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    params = tuple(rng.choice(p.names.split()) for p in family.params)
    if rng.random() < 0.1:
        params = tuple(f"{p}_{rng.randint(1, 9)}" for p in params)
    required = [n for i, n in enumerate(params) if all(slot(i) in ask for ask in family.asks)]
    schema = {
        "type": "object",
        "properties": {n: p.schema for n, p in zip(params, family.params, strict=True)},
        "required": required,
    }
    function = {"name": name, "description": family.about, "parameters": schema}
    return Tool(family, name, params, {"type": "function", "function": function})


def spoken(value: Any) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool):
        return ON[value]
    if isinstance(value, list):
        return ", ".join(value[:-1]) + (" and " if len(value) > 1 else "") + value[-1]
    return str(value)


def values_key(arguments: dict[str, Any]) -> str:
    """The argument values of a call without their names."""
    return dumps(list(arguments.values()))


def request(rng: random.Random, values: Values, tool: Tool) -> tuple[str, Call, list[str]]:
    """A user's request, the call that answers it, and the values as spoken."""
    drawn = [p.draw(values) for p in tool.family.params]
    ask = rng.choice(tool.family.asks)
    said = [spoken(v) for v in drawn]
    used = {n: v for i, (n, v) in enumerate(zip(tool.params, drawn, strict=True))
            if slot(i) in ask}  # fmt: skip
    return ask.format(*said), {"name": tool.name, "arguments": used}, said


def safe_request(
    rng: random.Random, values: Values, tool: Tool, banned: frozenset[str],
    banned_pairs: frozenset[tuple[int, int]],
) -> tuple[str, Call, list[str]]:  # fmt: skip
    """`request`, redrawn while its values or its pair of whole numbers are held out."""
    while True:
        ask, call, said = request(rng, values, tool)
        whole = [v for v in call["arguments"].values() if type(v) is int]
        pair = pair_key(whole[0], whole[1]) if len(whole) == 2 else None
        if values_key(call["arguments"]) not in banned and pair not in banned_pairs:
            return ask, call, said


def pick_tools(rng: random.Random, first: Family | None = None) -> list[Tool]:
    """One to four offered tools with distinct names; the first is the one to call."""
    count = rng.choice((1, 1, 2, 2, 3, 4))
    tools: list[Tool] = []
    families = rng.sample(FAMILIES, count)
    if first is not None:
        families = [first, *[f for f in families if f is not first][: count - 1]]
    for family in families:
        tool = make_tool(rng, family)
        while tool.name in [t.name for t in tools]:
            tool = make_tool(rng, family)
        tools.append(tool)
    return tools


def specs(rng: random.Random, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    shuffled = [t.spec for t in tools]
    rng.shuffle(shuffled)
    return shuffled


def wire(call: Call) -> dict[str, Any]:
    return {"type": "function", "function": call}


def tool_chat(
    rng: random.Random, words: Sequence[str], banned: frozenset[str],
    banned_pairs: frozenset[tuple[int, int]],
) -> tuple[list[Message], list[dict[str, Any]]]:  # fmt: skip
    """A training conversation with tools: mostly one call, sometimes two calls, a result and a
    final sentence, or small talk that needs no tool. Returns (messages, tools)."""
    wordy = rng.choice(WORDY) if rng.random() < 0.35 else None
    values, tools = Values(rng, words), pick_tools(rng, wordy)
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    kind = rng.random()
    if kind < 0.1:
        return messages + talk_turns(rng, words), specs(rng, tools)
    ask, call, said = safe_request(rng, values, tools[0], banned, banned_pairs)
    calls = [call]
    if kind < 0.2:
        other = rng.choice(tools)
        ask2, call2, _ = safe_request(rng, values, other, banned, banned_pairs)
        ask, calls = f"{ask} {ask2}", [call, call2]
    messages.append({"role": "user", "content": ask})
    messages.append({"role": "assistant", "content": "", "tool_calls": [wire(c) for c in calls]})
    if kind > 0.85:
        result, final = rng.choice(tools[0].family.results)
        extra = {"t": rng.randrange(1, 100), "d": rng.randint(2, 9), "n": values.person()}
        messages.append({"role": "tool", "content": result.format(**extra)})
        messages.append({"role": "assistant", "content": final.format(*said, **extra)})
    return messages, specs(rng, tools)
