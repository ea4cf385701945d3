"""The demo model's corpus: an endless stream of documents (stories, chats, tool calls, facts), and chats rendered as
text.

Documents are drawn from a seed for every training step, so nothing is stored and nothing is read twice. An interrupted
training continues with exactly the documents that it would have seen.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from demo_questions import (
    BOYS,
    CAPITALS,
    CITIES,
    COLOUR_OF,
    COLOURS,
    INTRODUCTIONS,
    NAMES,
    PETS,
    PLAIN_TOPICS,
    TOPICS,
    UNKNOWN,
    Message,
    any_name,
    draw_question,
    dress,
    expand,
    messages_for,
    offer_tools,
)
from demo_stories import ANIMALS, CHILDREN, article, draw_hero, tell

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

TOOL_PREAMBLE = "You may call these functions:\n<tools>"
TOOL_EPILOGUE = (
    "\n</tools>\nTo call a function, write:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments-as-json>}\n</tool_call>'
)

# The Jinja equivalent of `render`, for other programs. Tests compare the two.
CHAT_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- PREAMBLE }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- EPILOGUE + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- if not message.content and not message.tool_calls %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""".replace("PREAMBLE", json.dumps(TOOL_PREAMBLE)).replace("EPILOGUE", json.dumps(TOOL_EPILOGUE))


def render(
    messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
) -> str:
    """Return the text of a chat, as CHAT_TEMPLATE writes it."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    parts = []
    if tools:
        listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        before = "" if system is None else f"{system}\n\n"
        parts.append(f"{TURN_START}system\n{before}{TOOL_PREAMBLE}{listed}{TOOL_EPILOGUE}{TURN_END}\n")
    elif system is not None:
        parts.append(f"{TURN_START}system\n{system}{TURN_END}\n")
    for at, message in enumerate(messages):
        role = message["role"]
        content = message["content"]
        if role == "user":
            parts.append(f"{TURN_START}user\n{content}{TURN_END}\n")
        elif role == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
            blocks = [f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            said = f"\n{content}" if content or not calls else ""
            parts.append(f"{TURN_START}assistant{said}{''.join(blocks)}{TURN_END}\n")
        elif role == "tool":
            first = messages[at - 1]["role"] != "tool"
            last = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
            opened = f"{TURN_START}user" if first else ""
            closed = f"{TURN_END}\n" if last else ""
            parts.append(f"{opened}\n<tool_response>\n{content}\n</tool_response>{closed}")
    if add_generation_prompt:
        parts.append(f"{TURN_START}assistant\n")
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------ documents

SYSTEM_PROMPTS = (
    "You are a helpful assistant.|You are Quire, a small and friendly assistant.|You are a helpful assistant. "
    "Answer briefly.|"
    "You are a friendly AI.|Answer the user's questions.|You are an assistant that gives short answers.|You are Quire.|"
    "You are a kind teacher.|Be helpful and polite.|You are a chatbot that likes stories.|You help children with "
    "their homework."
).split("|")
STORY_REQUESTS = expand(
    "(please |can you |could you |)(tell me|write|tell) (a|a short|a nice|a new) (story|tale|bedtime "
    "story){about}(.|?|)"
)
FOLLOW_UPS = expand(
    "(what was|what is|tell me|do you remember) the name of (the hero|the main character|the {k})( in your story|"
    " in the story|)?"
)


def _story(rng: random.Random) -> str:
    opening, rest = tell(rng)
    return f"{opening} {rest}"


def _story_turns(rng: random.Random) -> list[Message]:
    """Return a request for a story, the story, and perhaps a question about its hero."""
    hero = draw_hero(rng)
    about, _ = rng.choice(
        [
            ("", ""),
            (f" about {article(hero.kind)}", hero.kind),
            (f" about {article(hero.kind)} named {hero.name}", hero.kind),
        ]
    )
    if about and rng.random() < 0.3:
        about = rng.choice(
            [f" about {article(hero.adjective + ' ' + hero.kind)} called {hero.name}", f" about {hero.name}"]
        )
    request = rng.choice(STORY_REQUESTS).replace("{about}", about)
    if rng.random() < 0.9:
        request = request[0].upper() + request[1:]
    opening, rest = tell(rng, hero)
    turns = [{"role": "user", "content": request}, {"role": "assistant", "content": f"{opening} {rest}"}]
    if rng.random() < 0.3:
        asked = rng.choice(FOLLOW_UPS).replace("{k}", hero.kind)
        answer = f"The {hero.kind if '{k}' in asked or hero.kind in asked else 'hero'} is named {hero.name}."
        turns += [{"role": "user", "content": asked[0].upper() + asked[1:]}, {"role": "assistant", "content": answer}]
    return turns


def _question_turns(rng: random.Random) -> list[Message]:
    """Return a question of any kind that needs no tool."""
    weights = {
        "addition": 3.5,
        "subtraction": 2.5,
        "capital": 2,
        "json": 3,
        "recall": 3,
        "small_talk": 0.4,
        "counting": 1.5,
        "colour": 1.5,
        "opposite": 2,
    }
    topics = [topic for topic in TOPICS if topic.kind != "tool"] + [UNKNOWN]
    topic = rng.choices(
        topics, [weights.get(topic.kind, 1) / (4 if topic.kind == "recall" else 1) for topic in topics]
    )[0]
    return messages_for(draw_question(rng, topic))


def _tool_turns(rng: random.Random, asked: int) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return questions about several offered tools, with the tools' results and the answers based on them."""
    turns: list[Message] = []
    needed: dict[str, dict[str, Any]] = {}
    abouts = set()
    for topic in rng.sample([topic for topic in TOPICS if topic.kind == "tool"], asked):
        question = draw_question(rng, topic)
        name = question["calls"][0]["name"]
        schema = next(tool for tool in question["tools"] if tool["function"]["name"] == name)
        if name not in needed and schema["function"]["description"] not in abouts:
            needed[name] = schema
            abouts.add(schema["function"]["description"])
            turns += messages_for(question)
    while True:
        tools = offer_tools(rng, *needed.values())
        if all(schema in tools for schema in needed.values()):
            return turns, tools


def _small_chat(rng: random.Random) -> str:
    turns = [turn for _ in range(rng.choice([1, 1, 2, 3, 4, 6])) for turn in _question_turns(rng)]
    return render(_with_system(rng, turns))


def _story_chat(rng: random.Random) -> str:
    turns = _question_turns(rng) if rng.random() < 0.3 else []
    turns = turns + _story_turns(rng)
    return render(_with_system(rng, turns))


def _tool_chat(rng: random.Random) -> str:
    turns, tools = _tool_turns(rng, rng.choice([1, 2, 2, 3, 4]))
    if rng.random() < 0.15:
        turns = _plain_turns(rng) + (turns if rng.random() < 0.5 else [])
    elif rng.random() < 0.2:
        turns = turns + _plain_turns(rng)
    return render(_with_system(rng, turns), tools)


def _plain_turns(rng: random.Random) -> list[Message]:
    return messages_for(draw_question(rng, rng.choice([topic for topic in PLAIN_TOPICS if topic.kind != "addition"])))


def _long_chat(rng: random.Random) -> str:
    """Return a chat of up to 2,000 tokens in which the user states a name at the start and asks for it repeatedly."""
    name = any_name(rng)
    told = dress(rng.choice(INTRODUCTIONS).replace("{x}", name), rng)
    turns = [{"role": "user", "content": told}, {"role": "assistant", "content": f"Nice to meet you, {name}!"}]
    ask_name = (
        expand("(what is|what's|tell me) my name?")
        + expand("do you (know|remember) my name?")
        + ("Who am I?", "What am I called?")
    )
    questions = [topic for topic in TOPICS if topic.kind not in ("tool", "recall") and "am called" not in topic.train]
    tools = None
    if rng.random() < 0.3:
        used, tools = _tool_turns(rng, 3)
        turns += used
    for _ in range(rng.randint(8, 40)):
        draw = rng.random()
        if draw < 0.15:
            turns += [
                {"role": "user", "content": dress(rng.choice(ask_name), rng)},
                {"role": "assistant", "content": f"Your name is {name}."},
            ]
        elif draw < 0.2:
            turns += _story_turns(rng)
        else:
            turns += messages_for(draw_question(rng, rng.choice(questions)))
    return render(_with_system(rng, turns), tools)


def _with_system(rng: random.Random, turns: list[Message]) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *turns] if rng.random() < 0.3 else turns


def _facts(rng: random.Random) -> str:
    """Return sentences that are not part of a chat, for raw prompts such as "The capital of France is"."""
    kinds = ("capital", "colour", "addition", "subtraction", "opposite", "counting", "days", "months", "sound")
    topics = [topic for topic in TOPICS if topic.kind in kinds]
    if rng.random() < 0.35:
        topics = [topic for topic in topics if topic.kind in ("addition", "subtraction")]
    elif rng.random() < 0.3:
        topics = [topic for topic in topics if topic.kind == rng.choice(["capital", "colour", "opposite"])] or topics
    drawn = (draw_question(rng, rng.choice(topics)) for _ in range(rng.randint(2, 12)))
    questions = list({question["answer"]: question for question in drawn}.values())  # state each fact once
    if rng.random() < 0.25:
        asked, answered = rng.choice([("Question: ", "Answer: "), ("Q: ", "A: "), ("User: ", "Assistant: ")])
        return "\n".join(
            f"{asked}{question['messages'][-1]['content']}\n{answered}{question['answer']}" for question in questions
        )
    return rng.choice([" ", " ", "\n"]).join(str(question["answer"]) for question in questions)


def _introduction(rng: random.Random) -> str:
    """Return a chat in which a user introduces themselves."""
    name = any_name(rng)
    country = rng.choice(list(CAPITALS))
    pet = rng.choice(PETS)
    sentences = [
        rng.choice(
            [
                f"I am {rng.randint(4, 80)} years old.",
                f"I am a {rng.choice(['teacher', 'baker', 'doctor', 'farmer', 'painter', 'pilot'])}.",
            ]
        ),
        rng.choice(
            [
                f"I live in {CAPITALS[country]}, the capital of {country}.",
                f"I come from {country}.",
                f"My home is in {rng.choice(CITIES)}.",
            ]
        ),
        f"I have {article(pet)} named {rng.choice(NAMES)}.",
        f"My favourite colour is {rng.choice(COLOURS)}.",
        f"I like to {rng.choice(['read', 'swim', 'sing', 'dance', 'cook', 'draw', 'play chess'])} with my friends.",
        f"Today is a {rng.choice(['sunny', 'rainy', 'cold', 'warm', 'lovely'])} day.",
    ]
    chosen = rng.sample(sentences, rng.randint(2, len(sentences)))
    greeting = rng.choice(
        [
            "Hello, my name is",
            "Hi, my name is",
            "My name is",
            "Hello, I am",
            "Hello! My name is",
            "Good morning, my name is",
        ]
    )
    farewell = rng.choice(["Nice to meet you!", "What is your name?", "How are you?", ""])
    return f"{greeting} {name}. {' '.join(chosen)} {farewell}".strip()


def _scene(rng: random.Random) -> str:
    """Return a few simple sentences about a thing, a place and a day, so that common words also occur outside of
    stories."""
    thing = rng.choice(list(COLOUR_OF))
    animal = rng.choice([*ANIMALS, *CHILDREN])
    name = rng.choice(BOYS if animal in ("boy", "prince") else NAMES)
    place = rng.choice("the park|the garden|the kitchen|the forest|the city|the school|the beach".split("|"))
    sentences = [
        f"{thing[0].upper() + thing[1:]} is {COLOUR_OF[thing]}.",
        f"The {animal} is in {place}.",
        f"{name} goes to {place} every {rng.choice(['Monday', 'Friday', 'Sunday', 'morning', 'evening'])}.",
        f"Today the weather is {rng.choice(['sunny', 'cloudy', 'rainy', 'cold', 'warm'])}.",
        f"There are {rng.randint(2, 12)} {rng.choice(['trees', 'birds', 'books', 'chairs', 'apples'])} in {place}.",
        f"The {rng.choice(['little', 'big', 'old', 'young'])} {animal} likes "
        f"{rng.choice(['apples', 'bread', 'cheese', 'carrots', 'soup'])}.",
    ]
    return " ".join(rng.sample(sentences, rng.randint(2, 5)))


def _echo_chat(rng: random.Random) -> str:
    """Return a chat with words to repeat and lists to look up items in. It teaches copying from the context much sooner
    than stories do."""
    turns: list[Message] = []
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.6:
            said = " ".join(rng.choice(ECHO_WORDS) for _ in range(rng.randint(1, 9)))
            asked = rng.choice(["Repeat: ", "Say: ", "Repeat after me: ", "Echo ", "Say this: ", "repeat ", "Write: "])
            turns += [{"role": "user", "content": asked + said}, {"role": "assistant", "content": said}]
            continue
        people = [any_name(rng) for _ in range(rng.randint(2, 5))]
        owned = [rng.choice([*COLOURS, *PETS, *CITIES, *map(str, range(2, 90))]) for _ in people]
        told = ", ".join(f"{person}: {thing}" for person, thing in zip(people, owned, strict=True))
        at = rng.randrange(len(people))
        if people.count(people[at]) == 1:
            turns += [
                {"role": "user", "content": f"{told}. What does the list say for {people[at]}?"},
                {"role": "assistant", "content": f"{people[at]}: {owned[at]}"},
            ]
    return render(turns) if turns else _echo_chat(rng)


ECHO_WORDS = [
    *(name for name in NAMES for _ in range(3)),
    *(city for city in CITIES for _ in range(2)),
    *COLOURS,
    *PETS,
    *ANIMALS,
    *map(str, range(0, 100, 3)),
    *"the a is was and of in to you it day one time sun tree house water bread happy old new".split(),
]
DOCUMENTS: dict[Callable[[random.Random], str], float] = {  # how often each is drawn; their lengths differ
    _story: 11,
    _story_chat: 3,
    _small_chat: 33,
    _echo_chat: 12,
    _tool_chat: 14,
    _long_chat: 1.1,
    _facts: 9,
    _introduction: 3,
    _scene: 2,
}


def documents(seed: str) -> Iterator[str]:
    """Yield an endless stream of documents. Equal seeds give equal streams."""
    rng = random.Random(seed)
    kinds = list(DOCUMENTS)
    weights = list(DOCUMENTS.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng)
