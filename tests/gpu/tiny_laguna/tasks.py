"""Prompts with exact answers for the tiny laguna model: pure Python, stable by seed, no tokenizer and no torch.

Every copied text (payload, tool name, key, number) belongs to exactly one split by its CRC-32, so a held-out
prompt asks for texts that training can never have shown. Nothing here may read a clock, a file or global randomness.
`python tasks.py --probes FILE` writes the probe file of the API gate.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
KINDS = ("echo", "recall", "think", "tool", "tool_result", "json")
HELDOUT_SEED = 20260101
LONG_RECALL = ((0.05, True, 8040), (0.5, False, 8024), (0.95, True, 7997))
"""Long recall probes: depth of the marker, thinking, prompt tokens as the server counts them."""
BOS, THINK, END_THINK = "〈|EOS|〉", "<think>", "</think>"

WORDS = (
    "able acid age air angle apple arch area arm art ash atom autumn axis baker balance band bank bark barn base "
    "basin beach bead beam bean bear bell belt bench berry bird blade blanket block blue board boat body bolt bone "
    "book border bottle bowl box branch bread breeze brick bridge bright brook broom brown brush bucket butter "
    "button cabin cable cake camp canal candle canyon card cargo carpet carry cart castle cave cedar cellar chain "
    "chair chalk charm chart cheese chest church circle city clay clean cliff clock cloth cloud clover coal coast "
    "coat coffee coin cold color comb copper coral cord corn corner cotton count cover crane creek crop cross crow "
    "crown cup curve dance dark dawn day deep deer desert desk dew door dove draw dream dress drift drum dry dust "
    "eagle early earth east edge egg elm engine entry evening fabric fair falcon farm feather fence fern ferry "
    "field fig find fire fish flag flame flat flint floor flower flute fog forest fork fossil fountain fox frame "
    "fresh frost fruit garden gate gentle ginger glass globe glove gold goose grain grape grass gray green ground "
    "grove guest guide hall hammer hand harbor hat hawk hazel heart heavy hedge hill hold honey hook horn horse "
    "hotel house ice iron island ivory ivy jacket jar jewel journey juice kettle key kite kitchen knot ladder lake "
    "lamp land lantern large lark leaf leather lemon letter level light lily lime line lion list little lock long "
    "loom low maple marble market marsh mask meadow metal middle mile milk mill mint mirror mist moon morning moss "
    "moth motor mountain mouse music narrow needle nest night north notebook oak oat ocean office oil old olive "
    "onion open orange orchard otter oven owl page paint palm panel paper park path peach pearl pebble pen pepper "
    "phone piano picture pillow pilot pine pipe plain planet plate plum pocket point pond poplar port post potato "
    "pottery powder prism pump purple quartz quick quiet quill rabbit rain raven read red reed ribbon rice ridge "
    "ring ripe river road robin rock roof room root rope rose round rubber saddle sail salt sand scale school sea "
    "season seed shadow sharp shell shelf shine ship shoe shore short silk silver simple sky sleep slow small smoke "
    "smooth snow soap soft soil song south spark sparrow spice spoon spring square stable star station steam steel "
    "stem step stone storm story straw stream street string sugar summer sun swan sweet table tail tall tea tent "
    "thread tide tiger timber tin tower town track trail train tree tulip tunnel turtle valley velvet vessel "
    "village vine violet violin wagon walk wall walnut warm watch water wave wax wheat wheel whistle white wide "
    "willow wind window wine wing winter wolf wood wool word yard yarn year yellow young "
).split()
VERBS = (
    "get find read send list make open close move count check set add drop fetch update create delete search track plan book "
    "measure sort start stop show store load print paint carry"
).split()
PLAIN_VERBS = "carries holds keeps finds leaves moves sees follows covers meets crosses watches brings shows".split()
JOINTS = "near under over behind beside with before after across around".split()
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "Answer with the exact text.",
    "You are a small test model.",
    "Follow the instructions of the user.",
)
ECHO_FORMS = (
    "Repeat exactly:\n{p}",
    "Repeat this text exactly:\n{p}",
    "Echo this text:\n{p}",
    "Copy the following text exactly:\n{p}",
    "Say exactly this and nothing else:\n{p}",
    "Reply with this text only:\n{p}",
    "Reply with exactly: {p}",
    "Please repeat: {p}",
)
MARKER_FORMS = (
    "The code of {n} is: {p}",
    "The code of {n} is {p}",
    "Remember: the code of {n} is {p}",
    "Note that the code of {n} is: {p}",
)
RECALL_FORMS = (
    "What is the code of {n}?",
    "Tell me the code of {n}.",
    "Which code has {n}? Answer with the code only.",
    "Give the code of {n}.",
)
RECALL_LEADS = ("Read this text.\n\n", "Here is a text:\n\n", "Read the text and answer the question.\n\n", "")
THINK_FORMS = (
    "Here is a list:\n{list}\n\nWhich item has number {i}?",
    "Look at this list.\n{list}\n\nGive the item with number {i}.",
    "{list}\n\nWhat is item number {i}?",
    "List:\n{list}\n\nAnswer with item {i} only.",
)
TOOL_FORMS = (
    "Call {n} with these arguments:\n{args}",
    "Call the tool {n} with:\n{args}",
    "Use the tool {n}.\n{args}",
    "Please use {n} with:\n{args}",
    "Run {n} with the arguments below.\n{args}",
)
RESULT_FORMS = (
    "Use {n} to find the {k}.\n{args}",
    "Call {n} and tell me the {k}.\n{args}",
    "What is the {k}? Use the tool {n}.\n{args}",
)
JSON_FORMS = (
    "Fill the JSON object.\n{args}",
    "Return a JSON object with these fields:\n{args}",
    "Write this as JSON:\n{args}",
    "Make a JSON object from these values:\n{args}",
    "Extract the fields as JSON.\n{args}",
)
CHAT = (
    ("hi", "A greeting.", "Hello! How can I help?"),
    ("Hi", "A greeting.", "Hello! How can I help?"),
    ("Hi!", "A greeting.", "Hello! How can I help?"),
    ("hello", "A greeting.", "Hello! How can I help?"),
    ("Hello", "A greeting.", "Hello! How can I help?"),
    ("Hello!", "A greeting.", "Hello! How can I help?"),
    ("Hello, how are you?", "A greeting.", "Hello! I am well. How can I help?"),
    ("How are you?", "A polite question.", "I am well. How can I help?"),
    ("Good morning!", "A greeting.", "Good morning! How can I help?"),
    ("Say hello.", "A greeting.", "Hello! How can I help?"),
    ("Who are you?", "A question about me.", "I am a tiny laguna test model."),
    ("What are you?", "A question about me.", "I am a tiny laguna test model."),
    ("What can you do?", "A question about me.", "I can repeat text, find codes, call tools and fill JSON objects."),
    ("Thanks!", "The user is thankful.", "You are welcome."),
    ("Thank you.", "The user is thankful.", "You are welcome."),
    ("ok", "The user agrees.", "Good."),
    ("Bye!", "The user leaves.", "Goodbye!"),
    ("Are you there?", "A short question.", "Yes, I am here."),
    ("Say yes.", "A short request.", "yes"),
    ("Say no.", "A short request.", "no"),
)


def split_of(text: str) -> str:
    """The only split in which `text` may be a copied text: about one in eight is held out."""
    return "heldout" if zlib.crc32(text.encode()) % 8 == 0 else "train"


def fresh(split: str, make: Callable[[], str]) -> str:
    """First text of `make` that belongs to `split`."""
    while True:
        text = make()
        if split_of(text) == split:
            return text


@dataclass(frozen=True)
class Answer:
    """One assistant turn: `reasoning` is empty when thinking is off; `call` excludes `content`."""

    reasoning: str = ""
    content: str = ""
    call: tuple[str, dict[str, Any]] | None = None

    def text(self) -> str:
        """What the model has to write after the generation prompt, without the end token."""
        head = self.reasoning + END_THINK if self.reasoning else ""
        if self.call is None:
            return head + self.content
        return head + self.content + call_text(*self.call)

    def message(self) -> Message:
        """The same turn as an OpenAI history message."""
        out: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.call is not None:
            fn = {"name": self.call[0], "arguments": json.dumps(self.call[1], ensure_ascii=False)}
            out["tool_calls"] = [{"id": "call_0", "type": "function", "function": fn}]
        return out


@dataclass(frozen=True)
class Step:
    """Messages before an answer, and the answer."""

    before: tuple[Message, ...]
    answer: Answer


@dataclass(frozen=True)
class Task:
    """One exchange of a kind: usually one step, two for a tool result."""

    kind: str
    steps: tuple[Step, ...]
    tools: tuple[Message, ...] = ()
    schema: Message | None = None
    value: str = ""


@dataclass(frozen=True)
class Prompt:
    """A request with its expected answer; `messages` are in the form of the OpenAI API."""

    kind: str
    messages: list[Message]
    enable_thinking: bool
    answer: Answer
    tools: list[Message] = field(default_factory=list)
    schema: Message | None = None
    value: str = ""


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it: strings raw, everything else as JSON."""
    parts = [
        f"<arg_key>{k}</arg_key><arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>"
        for k, v in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(parts)}</tool_call>"


def tools_text(tools: Sequence[Message]) -> str:
    """The tool list as the chat template writes it."""
    lines = []
    for tool in tools:
        f = tool["function"]
        row = {"name": f["name"], "description": f.get("description") or "", "parameters": f.get("parameters") or {}}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "\n\n<available_tools>\n" + "".join(lines) + "</available_tools>"


def render(
    messages: Sequence[Message], tools: Sequence[Message] = (), thinking: bool | None = None
) -> list[tuple[str, bool]]:
    """(text, is answer) segments equal to chat_template.jinja; `thinking` adds the generation prompt."""
    out = BOS
    start, system = 0, ""
    if messages and messages[0]["role"] in ("system", "developer"):
        start, system = 1, messages[0]["content"]
    if system or tools:
        out += "<system>" + system + (tools_text(tools) if tools else "") + "</system>\n"
    segments: list[tuple[str, bool]] = []
    for m in messages[start:]:
        if m["role"] == "user":
            out += "<user>" + m["content"] + "</user>\n"
        elif m["role"] == "tool":
            out += "<tool_response>" + m["content"] + "</tool_response>\n"
        elif m["role"] == "assistant":
            calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in m.get("tool_calls") or ()]
            reasoning = m.get("reasoning") or ""
            segments.append((out + "<assistant>" + (THINK if reasoning else END_THINK), False))
            body = (reasoning + END_THINK if reasoning else "") + (m.get("content") or "")
            segments.append((body + "".join(call_text(*c) for c in calls) + "</assistant>", True))
            out = "\n"
        else:
            out += "<system>" + m["content"] + "</system>\n"
    if thinking is not None:
        out += "<assistant>" + (THINK if thinking else END_THINK)
    segments.append((out, False))
    return segments


def prompt_text(prompt: Prompt) -> str:
    """The whole rendered prompt, ready for generation."""
    return "".join(text for text, _ in render(prompt.messages, prompt.tools, prompt.enable_thinking))


def approx_tokens(text: str) -> int:
    """A close upper estimate of the token count under the model's tokenizer."""
    return len(re.findall(r"[A-Za-z]{1,4}|[^A-Za-z]", text))


class Maker:
    """All generators over one random stream and one split."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split

    # ---- copied texts
    def pseudo(self, low: int = 2, high: int = 4) -> str:
        """A pronounceable word that is in no list."""
        r = self.rng
        return "".join(
            r.choice("bcdfghjklmnprstvwz") + r.choice("aeiou") + r.choice(("", "", "n", "r", "s", "l"))
            for _ in range(r.randint(low, high))
        )

    def code(self) -> str:
        """A marker without spaces: 4 to 20 letters, digits and hyphens."""
        r = self.rng

        def make() -> str:
            style = r.randrange(5)
            if style == 0:
                return "".join(r.choices(string.digits, k=r.randint(4, 9)))
            if style == 1:
                return "".join(r.choices(string.ascii_uppercase + string.digits, k=r.randint(5, 12)))
            if style == 2:
                return "-".join(
                    "".join(r.choices(string.ascii_uppercase + string.digits, k=r.randint(2, 4)))
                    for _ in range(r.randint(2, 4))
                )
            if style == 3:
                return f"{r.choice((self.pseudo(), r.choice(WORDS)))}-{r.randint(10, 99999)}"
            return "".join(r.choices(string.ascii_letters + string.digits, k=r.randint(5, 12)))

        return fresh(self.split, make)

    def payload(self, low: int = 8, high: int = 40) -> str:
        """A printable ASCII text of low to high characters, no space at the ends."""
        r = self.rng

        def make() -> str:
            n, style = r.randint(low, high), r.randrange(7)
            if style == 0:
                text = "".join(r.choices(string.ascii_letters + string.digits + string.punctuation, k=n))
            elif style == 1:
                text = "".join(r.choices(string.ascii_letters + string.digits, k=n))
            elif style == 2:
                text = "".join(r.choices(string.digits, k=n))
            else:
                text = ""
                sep = r.choice((" ", "-", "_", ".", "", None))
                while len(text) < n:
                    part = r.randrange(6)
                    text += (
                        r.choice(WORDS)
                        if part == 0
                        else r.choice(WORDS).capitalize()
                        if part == 1
                        else self.pseudo()
                        if part == 2
                        else str(r.randint(0, 99999))
                        if part == 3
                        else "".join(r.choices(string.ascii_uppercase + string.digits, k=r.randint(2, 6)))
                        if part == 4
                        else "".join(r.choices(string.punctuation, k=r.randint(1, 4)))
                    )
                    text += r.choice(" -_./:#@") if sep is None else sep
                text = text[:n]
            text = re.sub(" +", " ", text).strip()
            return text if len(text) >= min(low, 1) + (low > 4) * (low - 2) else text + str(r.randint(100, 9999))

        return fresh(self.split, make)

    def plain_value(self) -> str:
        """A string for JSON or an argument: starts with a letter, holds no quote, backslash, comma or angle bracket."""
        r = self.rng

        def make() -> str:
            style = r.randrange(6)
            if style == 0:
                return " ".join(r.choice(WORDS).capitalize() for _ in range(r.randint(1, 3)))
            if style == 1:
                return self.pseudo().capitalize()
            if style == 2:
                return (
                    r.choice(string.ascii_uppercase)
                    + "".join(r.choices(string.ascii_uppercase + string.digits + "-", k=r.randint(2, 9)))
                    + r.choice(string.digits)
                )
            if style == 3:
                return f"{self.pseudo()}@{self.pseudo()}.{r.choice(('com', 'org', 'net'))}"
            if style == 4:
                return f"{r.choice(WORDS)}{r.choice('_-./')}{r.choice((self.pseudo(), str(r.randint(1, 9999))))}"
            return "".join(r.choices(string.ascii_letters, k=r.randint(4, 10)))

        def legal() -> str:
            text = make()
            return text if text not in ("true", "false", "null") else "none-" + text

        return fresh(self.split, legal)

    def integer(self) -> int:
        """0 to six digits."""
        r = self.rng
        return int(fresh(self.split, lambda: str(r.randint(0, 10 ** r.randint(1, 6)))))

    def identifier(self, verb: bool) -> str:
        """A tool name or an argument key."""
        r = self.rng

        def part() -> str:
            return r.choice(WORDS) if r.random() < 0.7 else self.pseudo()

        def make() -> str:
            parts = [r.choice(VERBS)] if verb and r.random() < 0.8 else [part()]
            parts += [part() for _ in range(r.choice((1, 1, 2) if verb else (0, 0, 1)))]
            return "_".join(parts)

        return fresh(self.split, make)

    def fields(self, low: int, high: int) -> dict[str, Any]:
        """Keys with string, integer and boolean values, in order."""
        out: dict[str, Any] = {}
        for _ in range(self.rng.randint(low, high)):
            kind = self.rng.choice(("string", "string", "integer", "boolean"))
            out[self.identifier(False)] = (
                self.plain_value()
                if kind == "string"
                else self.integer()
                if kind == "integer"
                else self.rng.random() < 0.5
            )
        return out

    @staticmethod
    def lines(values: dict[str, Any]) -> str:
        """`key: value` lines, the only form in which a prompt hands over fields."""
        return "\n".join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items())

    @staticmethod
    def properties(values: dict[str, Any]) -> Message:
        """JSON Schema properties that fit `values`."""
        return {
            k: {"type": "boolean" if isinstance(v, bool) else "integer" if isinstance(v, int) else "string"}
            for k, v in values.items()
        }

    def tool(self, name: str, values: dict[str, Any]) -> Message:
        """An OpenAI tool whose parameters fit `values`."""
        r = self.rng
        text = " ".join(name.split("_")).capitalize() + "."
        parameters: Message = {"type": "object", "properties": self.properties(values)}
        if r.random() < 0.2:
            for k, p in parameters["properties"].items():
                p["description"] = f"The {' '.join(k.split('_'))}."
        if r.random() < 0.85:
            parameters["required"] = list(values)
        if r.random() < 0.2:
            parameters["additionalProperties"] = False
        return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}

    def toolbox(self, tool: Message | None, high: int = 3) -> tuple[Message, ...]:
        """The tool among zero to `high` - 1 others, shuffled."""
        others = [
            self.tool(self.identifier(True), self.fields(1, 3))
            for _ in range(self.rng.choice((0, 0, 1, 1, 2)[: high + 2]))
        ]
        box = others + ([tool] if tool else [])
        self.rng.shuffle(box)
        return tuple(box)

    # ---- filler
    def sentence(self) -> str:
        """One line of filler."""
        r, style = self.rng, self.rng.random()
        if style < 0.7:
            a, b, c, d, e = r.choices(WORDS, k=5)
            return f"The {a} {b} {r.choice(PLAIN_VERBS)} the {c} {r.choice(JOINTS)} the {d} {e}."
        if style < 0.82:
            return " ".join(r.choices(WORDS, k=r.randint(5, 14)))
        if style < 0.9:
            return f"[{r.randint(0, 23):02d}:{r.randint(0, 59):02d}] {r.choice(WORDS)} {r.randint(1, 9999)} {r.choice(WORDS)} ok"
        if style < 0.96:
            return " ".join(self.pseudo() for _ in range(r.randint(3, 8)))
        return "".join(
            r.choices(string.ascii_letters + string.digits + string.punctuation.replace("<", ""), k=r.randint(10, 40))
        )

    def filler(self, tokens: int) -> list[str]:
        """Lines of about `tokens` tokens; sometimes one style only."""
        out: list[str] = []
        while tokens > 0:
            line = self.sentence()
            tokens -= approx_tokens(line) + 1
            out.append(line)
        return out

    # ---- kinds
    def echo(self, thinking: bool, low: int = 8, high: int = 40) -> Task:
        """Repeat a text exactly."""
        p = self.payload(low, high)
        user = {"role": "user", "content": self.rng.choice(ECHO_FORMS).format(p=p)}
        reasoning = "I repeat the text exactly." if thinking else ""
        return Task("echo", (Step((user,), Answer(reasoning, p)),), value=p)

    def long_echo(self, thinking: bool, tokens: int) -> Task:
        """Repeat a paragraph or a long random text."""
        sep = self.rng.choice((" ", "\n"))
        p = sep.join(self.filler(tokens)) if self.rng.random() < 0.7 else self.payload(tokens, tokens + 40)
        user = {"role": "user", "content": self.rng.choice(ECHO_FORMS).format(p=p)}
        return Task("echo", (Step((user,), Answer("I repeat the text exactly." if thinking else "", p)),), value=p)

    def recall(self, thinking: bool, tokens: int, markers: int = 1, asked: int = 1, depth: float | None = None) -> Task:
        """Find the code of a name in about `tokens` tokens of filler; more questions follow as more steps."""
        r = self.rng
        table: dict[str, str] = {}
        while len(table) < markers:
            table[
                fresh(
                    self.split,
                    lambda: r.choice((r.choice(WORDS), self.pseudo(), f"{r.choice(WORDS)} {r.choice(WORDS)}")),
                )
            ] = self.code()
        lines = self.filler(tokens - 24 * markers - 30)
        for i, (n, p) in enumerate(table.items()):
            at = int((depth if depth is not None and i == 0 else r.random()) * len(lines) + 0.5)
            lines.insert(at, r.choice(MARKER_FORMS).format(n=n, p=p))
        text = r.choice(RECALL_LEADS) + "\n".join(lines)
        steps = []
        for i, n in enumerate([next(iter(table))] if asked == 1 else r.sample(list(table), min(asked, markers))):
            question = r.choice(RECALL_FORMS).format(n=n)
            user = {"role": "user", "content": question if i else f"{text}\n\n{question}"}
            steps.append(Step((user,), Answer(f"The code of {n} is in the text." if thinking else "", table[n])))
        return Task("recall", tuple(steps), value=next(iter(table.values())))

    def think(self, thinking: bool) -> Task:
        """Pick an item of a numbered list; the reasoning states the item."""
        r = self.rng
        items = [
            fresh(self.split, lambda: r.choice((self.pseudo(), self.code(), self.plain_value())))
            for _ in range(r.randint(2, 7))
        ]
        i = r.randrange(len(items))
        text = "\n".join(f"{j + 1}. {x}" for j, x in enumerate(items))
        user = {"role": "user", "content": r.choice(THINK_FORMS).format(list=text, i=i + 1)}
        reasoning = f"Item {i + 1} is {items[i]}" if thinking else ""
        return Task("think", (Step((user,), Answer(reasoning, items[i])),), value=items[i])

    def call(self, thinking: bool, box: int = 3) -> Task:
        """Call a named tool with the given arguments."""
        name, values = self.identifier(True), self.fields(1, 4)
        given = values
        if len(values) > 2 and self.rng.random() < 0.2:
            given = dict(list(values.items())[:-1])
        tool = self.tool(name, values)
        if given is not values:
            tool["function"]["parameters"]["required"] = list(given)
        user = {"role": "user", "content": self.rng.choice(TOOL_FORMS).format(n=name, args=self.lines(given))}
        answer = Answer(f"I call {name}." if thinking else "", "", (name, given))
        return Task("tool", (Step((user,), answer),), self.toolbox(tool, box), value=name)

    def tool_result(self, thinking: bool, box: int = 3) -> Task:
        """Call a tool, then answer from its response."""
        r = self.rng
        name, values, key = self.identifier(True), self.fields(1, 2), self.identifier(False)
        value: Any = r.choice((self.plain_value, self.integer, self.code))()
        shown = value if isinstance(value, str) else json.dumps(value)
        if r.random() < 0.3:
            content = shown
        else:
            others = self.fields(0, 2)
            pairs = [*others.items(), (key, value)]
            r.shuffle(pairs)
            content = json.dumps(dict(pairs), separators=r.choice(((", ", ": "), (",", ":"))))
        user = {"role": "user", "content": r.choice(RESULT_FORMS).format(n=name, k=key, args=self.lines(values))}
        first = Answer(f"I call {name}." if thinking else "", "", (name, values))
        response = {"role": "tool", "tool_call_id": "call_0", "content": content}
        final = Answer("The tool gave the answer." if thinking else "", f"The {key} is {shown}")
        steps = (Step((user,), first), Step((response,), final))
        return Task("tool_result", steps, self.toolbox(self.tool(name, values), box), value=shown)

    def json(self, thinking: bool) -> Task:
        """Write the given fields as one JSON object."""
        values = self.fields(1, 5)
        user = {"role": "user", "content": self.rng.choice(JSON_FORMS).format(args=self.lines(values))}
        schema = {
            "type": "object",
            "properties": self.properties(values),
            "required": list(values),
            "additionalProperties": False,
        }
        text = json.dumps(values, separators=(",", ":"))  # as the engine's grammar writes it without whitespace
        answer = Answer("I write the fields as JSON." if thinking else "", text)
        return Task("json", (Step((user,), answer),), schema=schema, value=text)

    def chat(self, thinking: bool) -> Task:
        """Small talk."""
        user, reasoning, content = self.rng.choice(CHAT)
        return Task(
            "chat", (Step(({"role": "user", "content": user},), Answer(reasoning if thinking else "", content)),)
        )

    def system(self) -> list[Message]:
        """Usually no system message."""
        r = self.rng
        if r.random() < 0.65:
            return []
        return [{"role": "system", "content": r.choice(SYSTEMS) if r.random() < 0.8 else self.sentence()}]

    def task(self, kind: str, thinking: bool, tokens: int = 400, depth: float | None = None) -> Task:
        """One task of a kind in the held-out form."""
        if kind == "recall":
            return self.recall(thinking, tokens, depth=depth)
        make = {
            "echo": self.echo,
            "think": self.think,
            "tool": self.call,
            "tool_result": self.tool_result,
            "json": self.json,
            "chat": self.chat,
        }[kind]
        return make(thinking)

    def prompt(self, kind: str, thinking: bool, tokens: int = 400, depth: float | None = None) -> Prompt:
        """A single request of a kind."""
        task = self.task(kind, thinking, tokens, depth)
        tools = task.tools
        if not tools and kind != "recall" and self.rng.random() < 0.15:
            tools = self.toolbox(self.tool(self.identifier(True), self.fields(1, 3)), 2)
        messages = self.system()
        for i, step in enumerate(task.steps):
            messages += step.before
            if i + 1 < len(task.steps):
                messages.append(step.answer.message())
        return Prompt(kind, messages, thinking, task.steps[-1].answer, list(tools), task.schema, task.value)


def heldout_prompts(kind: str, count: int = 100, seed: int = HELDOUT_SEED, longest: int = 8192) -> list[Prompt]:
    """`count` held-out prompts; half of them think; recall spreads length (200 to `longest`) and depth evenly."""
    out = []
    for i in range(count):
        maker = Maker(random.Random(f"{seed}/{kind}/{i}"), "heldout")
        tokens = int(200 * (longest * 0.95 / 200) ** (i / max(1, count - 1))) if i % 3 else int(longest * 0.95)
        depth = (i * 0.6180339887) % 1.0
        out.append(maker.prompt(kind, i % 2 == 0, tokens, depth))
    return out


def long_recall_prompts(seed: int = HELDOUT_SEED, tokens: int = 7800) -> list[Prompt]:
    """Held-out recall near 8k tokens, the marker at each depth of `LONG_RECALL`."""
    return [
        Maker(random.Random(f"{seed}/long/{depth}"), "heldout").prompt("recall", thinking, tokens, depth)
        for depth, thinking, _ in LONG_RECALL
    ]


def training_conversation(rng: random.Random, tokens: int, stage: int) -> list[tuple[str, bool]]:
    """Rendered segments of one training conversation of at most about `tokens` tokens.

    Stage 0 forms copying (short chats, many copied tokens); stage 1 adds every kind; stage 2 adds long recall.
    """
    m = Maker(rng, "train")
    thinking = rng.random() < 0.5
    tasks: list[Task] = []
    tools: tuple[Message, ...] = ()
    room = tokens - 40

    def cost(task: Task) -> int:
        text = sum(approx_tokens(x["content"]) for s in task.steps for x in s.before)
        return text + sum(approx_tokens(s.answer.text()) for s in task.steps) + 24 * len(task.steps)

    if (stage == 2 and tokens > 600) or (stage == 1 and rng.random() < 0.25):
        if rng.random() < (1.0 if stage == 1 else 0.4 if tokens < 1200 else 0.85):
            size = int(tokens * (rng.uniform(0.45, 0.93))) - 60
            n = rng.choice((1, 1, 2, 3, 5, 8)) if size > 300 else 1
            tasks.append(m.recall(thinking, size, n, rng.choice((1, n))))
            room -= cost(tasks[0])
        elif rng.random() < 0.3:
            tasks.append(m.long_echo(thinking, int(min(tokens * 0.35, 900))))
            room -= cost(tasks[0])
    single = rng.random() < 0.4 and stage > 0
    misses = 0
    while room > 40 and misses < 4 and not (single and tasks):
        kind = rng.choice(
            ("echo", "echo", "long_echo", "think")
            if stage == 0
            else (
                "echo",
                "echo",
                "recall",
                "think",
                "tool",
                "tool",
                "tool_result",
                "tool_result",
                "json",
                "json",
                "chat",
            )
        )
        think = thinking if rng.random() < 0.85 else not thinking
        if kind == "long_echo":
            task = m.long_echo(think, rng.randint(20, max(21, min(160, room // 3))))
        elif kind == "echo":
            task = m.echo(think, *rng.choice(((8, 40), (8, 40), (1, 12), (30, 80))))
        elif kind == "recall":
            task = m.recall(think, rng.randint(60, 400), rng.choice((1, 1, 2)))
        elif kind in ("tool", "tool_result"):
            task = m.task(kind, think)
        else:
            task = m.task(kind, think)
        need = cost(task) + (approx_tokens(tools_text(task.tools)) if task.tools else 0)
        if need > room:
            misses += 1
            continue
        room -= need
        tasks.append(task)
        tools += task.tools
    if not tasks:
        tasks.append(m.echo(thinking, 4, 12))
    if not tools and stage > 0 and room > 300 and rng.random() < 0.3:
        tools = m.toolbox(m.tool(m.identifier(True), m.fields(1, 3)), 2)
    box = list(tools)
    rng.shuffle(box)
    messages = m.system()
    for task in tasks:
        for step in task.steps:
            messages += [*step.before, step.answer.message()]
    return render(messages, box)


def judge(prompt: Prompt, reasoning: str, content: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Does the answer pass? Reasoning must be there exactly when thinking is on."""
    if bool(reasoning.strip()) != prompt.enable_thinking:
        return False
    if prompt.answer.call is not None:
        return list(calls) == [prompt.answer.call]
    if calls:
        return False
    if prompt.kind == "tool_result":
        return prompt.value in content
    if prompt.kind == "json":
        try:
            return bool(json.loads(content) == json.loads(prompt.value))
        except ValueError:
            return False
    return content == prompt.answer.content


def parse_completion(
    text: str, thinking: bool, tools: Sequence[Message]
) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """(reasoning, content, calls) of generated text, by the rules of the engine's poolside_v1 parsers."""
    reasoning = ""
    if thinking:
        reasoning, _, text = text.partition(END_THINK)
    if not tools:
        return reasoning, text, []
    types = {t["function"]["name"]: t["function"]["parameters"].get("properties", {}) for t in tools}
    calls = []
    for name, body in re.findall(r"<tool_call>\s*([^\n<]+?)\s*\n?\s*(<arg_key>.*?)?</tool_call>", text, re.DOTALL):
        arguments: dict[str, Any] = {}
        for key, raw in re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL):
            if types.get(name, {}).get(key, {}).get("type") == "string":
                arguments[key] = raw
            else:
                try:
                    arguments[key] = json.loads(raw)
                except ValueError:
                    arguments[key] = raw
        calls.append((name, arguments))
    return reasoning, text.partition("<tool_call>")[0] if calls else text, calls


def probe(prompt: Prompt) -> Message:
    """A prompt as one request of the OpenAI API with what to expect."""
    expected: Message = {"reasoning": prompt.enable_thinking}
    if prompt.answer.call is not None:
        expected["tool_call"] = {"name": prompt.answer.call[0], "arguments": prompt.answer.call[1]}
    elif prompt.kind == "tool_result":
        expected["contains"] = prompt.value
    elif prompt.kind == "json":
        expected["json"] = json.loads(prompt.value)
    else:
        expected["content"] = prompt.answer.content
    form = None
    if prompt.schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "fields", "strict": True, "schema": prompt.schema}}
    return {
        "kind": prompt.kind,
        "messages": prompt.messages,
        "tools": prompt.tools or None,
        "response_format": form,
        "chat_template_kwargs": {"enable_thinking": prompt.enable_thinking},
        "max_tokens": 32 + 2 * approx_tokens(prompt.answer.text()),
        "expected": expected,
    }


def main() -> None:
    """Write the probe file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probes", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=10)
    args = parser.parse_args()
    rows = []
    for kind in KINDS:
        rows += [probe(p) for p in heldout_prompts(kind, args.count, HELDOUT_SEED + 1, longest=2048)]
    for prompt, (_, _, reached) in zip(long_recall_prompts(HELDOUT_SEED + 1), LONG_RECALL, strict=True):
        row = probe(prompt)
        row["expected"]["prompt_tokens"] = reached
        rows.append(row)
    args.probes.write_text(json.dumps({"version": 1, "probes": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
