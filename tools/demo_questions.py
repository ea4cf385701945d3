# ruff: noqa: E501 - a phrasing is a line
"""The questions that the bundled demo model learns to answer, and those of its examination.

Every topic has two sets of phrasings. The training corpus is written with the first set, the examination with the
second, and `assert_held_out` proves that training uses none of the examination's phrasings. Facts (France -> Paris, 7 +
8 -> 15) occur in both: the examination tests whether the model understands a question in a phrasing that it has not
read.

`check(question, answer)` returns whether an answer is right. This file needs only the standard library, so that the
engine's tests can load it by its path.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Message = dict[str, Any]
Question = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------- checking


def normalize(text: str) -> str:
    """Return the text as lower-case words and numbers with single spaces between them; everything else is dropped."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def tool_calls_in(answer: str) -> list[dict[str, Any]] | None:
    """Return the calls in an answer's <tool_call> blocks, or None if a block is not valid JSON."""
    try:
        calls = [json.loads(block) for block in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", answer, re.DOTALL)]
    except json.JSONDecodeError:
        return None
    return calls


def check(question: Question, answer: str) -> bool:
    """Whether `answer` (the assistant's text, without the end-of-turn token) is right for `question`.

    `question["expected"]` has exactly one of these keys:
    ends_with: the answer's last words; numbers: all numbers of the answer in order; contains: all these words;
    any_of: one of these words; json: the value that the whole answer parses to; tool_calls: the list of calls, each
    {"name", "arguments"}.
    """
    (rule, want), *rest = question["expected"].items()
    if rest:
        raise ValueError(f"expected must have one key, got {sorted(question['expected'])}")
    words = f" {normalize(answer)} "
    if rule == "ends_with":
        return words.endswith(f" {normalize(want)} ")
    if rule == "numbers":
        return [int(number) for number in re.findall(r"\d+", answer)] == want
    if rule == "contains":
        return all(f" {normalize(str(each))} " in words for each in want)
    if rule == "any_of":
        return any(f" {normalize(each)} " in words for each in want)
    if rule == "json":
        try:
            return json.loads(answer) == want
        except json.JSONDecodeError:
            return False
    if rule == "tool_calls":
        return tool_calls_in(answer) == want
    raise ValueError(f"unknown rule {rule!r}")


# ----------------------------------------------------------------------------------------------------------- word lists

BOYS = (
    "Tim Tom Ben Max Sam Leo Jack Finn Oscar Hugo Felix Noah Theo Milo Toby Charlie Henry Oliver Lucas Peter "
    "Paul Adam Rex Pip Bruno Otto "
    "Jasper Arthur George Louis Ned Gus Rory Albert Basil Monty Barney Dexter Ralph Kit Teddy Rusty Fred Walter"
).split()
GIRLS = (
    "Lily Mia Anna Lucy Emma Sara Zoe Ella Ruby Rose Daisy Molly Poppy Nora Clara Ivy Maya Bella Luna Alice "
    "Grace Ada Nina Hazel Pearl Tilly "
    "Penny Willow Flora Martha Olive Rosie Holly Eva Greta Lola Amy Betty Coco Kitty Mabel Dora Jenny Susie"
).split()
NAMES = BOYS + GIRLS

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|England:London|Ireland:Dublin|"
        "Scotland:Edinburgh|Wales:Cardiff|"
        "Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Denmark:Copenhagen|Iceland:Reykjavik|Poland:Warsaw|"
        "Austria:Vienna|Hungary:Budapest|"
        "Greece:Athens|Turkey:Ankara|Russia:Moscow|Ukraine:Kyiv|Belgium:Brussels|Switzerland:Bern|"
        "Romania:Bucharest|Bulgaria:Sofia|"
        "Croatia:Zagreb|Serbia:Belgrade|Egypt:Cairo|Kenya:Nairobi|Morocco:Rabat|Nigeria:Abuja|Ghana:Accra|"
        "Ethiopia:Addis Ababa|Japan:Tokyo|"
        "China:Beijing|India:New Delhi|Thailand:Bangkok|Vietnam:Hanoi|Indonesia:Jakarta|South Korea:Seoul|"
        "Iran:Tehran|Iraq:Baghdad|"
        "Canada:Ottawa|Mexico:Mexico City|Cuba:Havana|Peru:Lima|Chile:Santiago|Brazil:Brasilia|Argentina:Buenos "
        "Aires|Colombia:Bogota|"
        "Australia:Canberra|New Zealand:Wellington"
    ).split("|")
)
CITIES = [city for city in CAPITALS.values() if " " not in city]
COLOURS_OF = {
    "green": "grass|a frog|a cucumber|spinach|a crocodile|broccoli|a pea|a cactus",
    "blue": "the sky|the sea|a blueberry|the ocean|a sapphire",
    "yellow": "the sun|a banana|a lemon|a canary|butter|a sunflower|a chick",
    "red": "a tomato|blood|a strawberry|a cherry|a fire engine|a ladybird|a ruby|a stop sign",
    "white": "snow|milk|a swan|salt|a polar bear|flour|a snowman",
    "black": "coal|a crow|the night|a raven|ink",
    "orange": "a carrot|a pumpkin|a tiger|a goldfish",
    "brown": "chocolate|a bear|coffee|mud|a walnut|wood",
    "grey": "an elephant|a mouse|a rain cloud|a donkey|ash",
    "pink": "a flamingo|a pig|bubble gum",
    "purple": "a plum|lavender|an eggplant|a violet",
}
COLOUR_OF = {thing: colour for colour, things in COLOURS_OF.items() for thing in things.split("|")}
OPPOSITES = [
    tuple(pair.split(":"))
    for pair in (
        "hot:cold|big:small|up:down|day:night|fast:slow|old:young|happy:sad|open:closed|full:empty|hard:soft|"
        "wet:dry|light:dark|rich:poor|"
        "strong:weak|early:late|left:right|good:bad|clean:dirty|high:low|long:short|loud:quiet|true:false|"
        "first:last|thick:thin|wide:narrow|"
        "love:hate|push:pull|win:lose|begin:end|summer:winter|north:south|east:west|black:white|inside:outside|"
        "above:below|brave:afraid|"
        "sweet:sour|deep:shallow|easy:difficult|near:far|heaven:hell|asleep:awake|give:take|buy:sell|laugh:cry|"
        "always:never"
    ).split("|")
]
OPPOSITE_OF = dict(OPPOSITES) | {right: left for left, right in OPPOSITES}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SOUNDS = dict(
    pair.split(":")
    for pair in (
        "cow:moo|dog:woof|cat:meow|sheep:baa|duck:quack|pig:oink|horse:neigh|lion:roar|owl:hoot|frog:ribbit|"
        "rooster:cock-a-doodle-doo|"
        "snake:hiss|bee:buzz|mouse:squeak|chick:cheep|crow:caw|wolf:howl|pigeon:coo|turkey:gobble|donkey:hee-haw"
    ).split("|")
)
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
PETS = "dog cat rabbit hamster parrot horse pony goldfish turtle".split()
COLOURS = list(COLOURS_OF)

# --------------------------------------------------------------------------------------------------------------- topics


@dataclass(frozen=True)
class Case:
    """One drawn fact: the words that fill a phrasing's gaps, the right answer, and how it is checked."""

    slots: dict[str, str]
    answer: str
    expected: dict[str, Any]
    short: str | None = None  # the answer if a single word is requested
    tools: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] | None = None  # tool calls take the place of the answer
    before: list[Message] = field(default_factory=list)  # turns that come first
    result: tuple[str, str] | None = None  # the called tool's result, and the assistant's answer to it


@dataclass(frozen=True)
class Topic:
    """A kind of question with one meaning ("the day after"), its two sets of phrasings and a function that draws a fact
    for it.
    """

    kind: str
    train: str  # patterns, one per line; "(a|b)" stands for a or b
    held: str
    draw: Callable[[random.Random], Case]


@cache
def expand(pattern: str) -> tuple[str, ...]:
    """Return all strings that a pattern can expand to. Brackets do not nest."""
    found = re.search(r"\(([^()]*)\)", pattern)
    if not found:
        return (re.sub(r" +", " ", pattern).strip(),)
    before = pattern[: found.start()]
    after = pattern[found.end() :]
    return tuple(text for choice in found[1].split("|") for text in expand(before + choice + after))


@cache
def lines_of(patterns: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in patterns.strip().splitlines() if line.strip())


OPENERS = expand(
    "(please|hey,|hi!|hello!|hi there.|ok,|so,|and|quick question:|i have a question.|can you help me?|tell me,|"
    "one more thing:|next question:|"
    "good morning!|now|well,|could you help?|here is a question:|i am curious.)"
)
ENDINGS = expand(
    "(please.|thanks!|thank you.|i want to know.|do you know?|i forgot.|i am not sure.|can you help?|it is for school.)"
)
ONE_WORD = expand(
    "(answer in one word.|one word only.|just the answer.|answer with one word.|only say the answer, please.)"
)


def dress(core: str, rng: random.Random, ending: str = "", plain: bool = False) -> str:
    """Return a phrasing as a person would type it: sometimes with a greeting (unless plain), sometimes without capitals
    or a question mark.
    """
    text = core
    if not plain and rng.random() < 0.3:
        opener = rng.choice(OPENERS)
        text = f"{opener} {text if rng.random() < 0.5 or opener[-1] not in '.!?:' else text[0].upper() + text[1:]}"
    if not (ending or plain) and rng.random() < 0.12:
        ending = rng.choice(ENDINGS)
    if ending:
        text = f"{text} {ending[0].upper() + ending[1:]}"
    if rng.random() < 0.85:
        text = text[0].upper() + text[1:]
    elif rng.random() < 0.5:
        text = text.lower()
    if rng.random() < 0.15 and text[-1] in "?.":
        text = text[:-1]
    return re.sub(r"\bi\b", "I", text) if rng.random() < 0.9 else text


def _fact(slots: dict[str, str], answer: str, short: str) -> Case:
    return Case(slots, answer, {"ends_with": short}, short=short)


def _capital(rng: random.Random) -> Case:
    country = rng.choice(list(CAPITALS))
    return _fact({"x": country}, f"The capital of {country} is {CAPITALS[country]}.", CAPITALS[country])


def _colour(rng: random.Random) -> Case:
    thing = rng.choice(list(COLOUR_OF))
    return _fact({"x": thing}, f"{thing[0].upper() + thing[1:]} is {COLOUR_OF[thing]}.", COLOUR_OF[thing])


def _number(rng: random.Random, value: int, spelled: bool) -> str:
    return NUMBER_WORDS[value] if spelled else str(value)


def _addition(rng: random.Random) -> Case:
    a = rng.randint(0, 20)
    b = rng.randint(0, 20)
    spelled = rng.random() < 0.1
    slots = {"a": _number(rng, a, spelled), "b": _number(rng, b, spelled)}
    return _fact(slots, f"{a} + {b} = {a + b}.", str(a + b))


def _subtraction(rng: random.Random) -> Case:
    a = rng.randint(0, 20)
    spelled = rng.random() < 0.1
    b = rng.randint(0, a)
    slots = {"a": _number(rng, a, spelled), "b": _number(rng, b, spelled)}
    return _fact(slots, f"{a} - {b} = {a - b}.", str(a - b))


def _opposite(rng: random.Random) -> Case:
    word = rng.choice(list(OPPOSITE_OF))
    return _fact({"x": word}, f"The opposite of {word} is {OPPOSITE_OF[word]}.", OPPOSITE_OF[word])


def _count(rng: random.Random) -> Case:
    a = rng.choice([1, rng.randint(0, 17)])
    numbers = list(range(a, min(20, a + rng.randint(2, 12)) + 1))
    return Case({"a": str(a), "b": str(numbers[-1])}, ", ".join(map(str, numbers)) + ".", {"numbers": numbers})


def _count_to(rng: random.Random) -> Case:
    numbers = list(range(1, rng.randint(3, 20) + 1))
    return Case({"b": str(numbers[-1])}, ", ".join(map(str, numbers)) + ".", {"numbers": numbers})


def _count_down(rng: random.Random) -> Case:
    b = rng.choice([1, rng.randint(0, 17)])
    numbers = list(range(min(20, b + rng.randint(2, 12)), b - 1, -1))
    return Case({"a": str(numbers[0]), "b": str(b)}, ", ".join(map(str, numbers)) + ".", {"numbers": numbers})


def _neighbour(cycle: list[str], step: int, what: str) -> Callable[[random.Random], Case]:
    def draw(rng: random.Random) -> Case:
        at = rng.randrange(len(cycle))
        answer = cycle[(at + step) % len(cycle)]
        side = "after" if step > 0 else "before"
        return _fact({"x": cycle[at]}, f"The {what} {side} {cycle[at]} is {answer}.", answer)

    return draw


def _sound(rng: random.Random) -> Case:
    animal = rng.choice(list(SOUNDS))
    return _fact({"x": animal}, f"A {animal} says {SOUNDS[animal]}.".replace("A owl", "An owl"), SOUNDS[animal])


def _talk(answer: str, *accepted: str) -> Callable[[random.Random], Case]:
    answers = answer.split("|")

    def draw(rng: random.Random) -> Case:
        return Case({}, rng.choice(answers), {"any_of": list(accepted)})

    return draw


def _introduction(rng: random.Random) -> Case:
    name = any_name(rng)
    return Case({"x": name}, f"Nice to meet you, {name}!", {"contains": [name]})


def any_name(rng: random.Random) -> str:
    """Return a name from the list or, occasionally, one made of syllables, which the model can only copy from the
    context.
    """
    if rng.random() < 0.85:
        return rng.choice(NAMES)
    parts = rng.choices(
        "ka mo ri ta lu ne so vi da be jo shi ran lin dor mar tel zan pol fre".split(), k=rng.randint(2, 3)
    )
    return "".join(parts).capitalize()


JSON_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": any_name,
    "age": lambda rng: rng.randint(2, 90),
    "city": lambda rng: rng.choice(CITIES),
    "colour": lambda rng: rng.choice(COLOURS),
    "pet": lambda rng: rng.choice(PETS),
    "country": lambda rng: rng.choice([country for country in CAPITALS if " " not in country]),
    "day": lambda rng: rng.choice(DAYS),
}
JSON_CLAUSES = {
    "age": "is {v} years old|is {v}",
    "city": "lives in {v}|comes from {v}",
    "colour": "likes {v}|likes the colour {v}",
    "pet": "has a {v}|owns a {v}",
    "country": "was born in {v}|is from {v}",
    "day": "was born on a {v}|arrives on {v}",
}


def _json(rng: random.Random) -> Case:
    """Draw a sentence about a person, and the keys to extract, in any order and not always all of them."""
    others = rng.sample(list(JSON_CLAUSES), rng.choice([1, 1, 2, 2, 3]))
    person = {key: JSON_FIELDS[key](rng) for key in ["name", *others]}
    clauses = [rng.choice(JSON_CLAUSES[key].split("|")).format(v=person[key]) for key in others]
    joined = clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
    sentence = f"{person['name']} {joined}."
    asked = list(person)
    if rng.random() < 0.2:
        rng.shuffle(asked)
    if rng.random() < 0.15 and len(asked) > 2:
        asked.pop()
    named = [f'"{key}"' for key in asked] if rng.random() < 0.2 else asked
    keys = named[0] if len(named) == 1 else ", ".join(named[:-1]) + " and " + named[-1]
    value = {key: person[key] for key in asked}
    return Case({"keys": keys, "s": sentence}, json.dumps(value, ensure_ascii=False), {"json": value})


def _json_capital(rng: random.Random) -> Case:
    country = rng.choice(list(CAPITALS))
    value = {"country": country, "capital": CAPITALS[country]}
    return Case({"x": country}, json.dumps(value), {"json": value})


def _recall(fact: str) -> Callable[[random.Random], Case]:
    """Return a function that draws a chat: the user states something about themselves, talks about other things, and
    then asks for it."""

    def draw(rng: random.Random) -> Case:
        pet = rng.choice(PETS)
        value = {
            "name": any_name(rng),
            "city": rng.choice(CITIES),
            "colour": rng.choice(COLOURS),
            "pet": any_name(rng),
        }[fact]
        told, reply, answer = {
            "name": (rng.choice(INTRODUCTIONS), f"Nice to meet you, {value}!", f"Your name is {value}."),
            "city": ("i live in {v}.", f"{value} is a nice place to live!", f"You live in {value}."),
            "colour": ("my favourite colour is {v}.", f"I like {value} too!", f"Your favourite colour is {value}."),
            "pet": (
                "i have a {p} named {v}.",
                f"{value} is a lovely name for a {pet}!",
                f"Your {pet} is named {value}.",
            ),
        }[fact]
        before = [
            {"role": "user", "content": dress(told.format(v=value, p=pet, x=value), rng)},
            {"role": "assistant", "content": reply},
        ]
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            before += messages_for(draw_question(rng, rng.choice(PLAIN_TOPICS)))
        return Case({"p": pet}, answer, {"ends_with": str(value)}, short=str(value), before=before)

    return draw


INTRODUCTIONS = expand("(my name is {x}.|i am {x}.|hello, i am {x}.|hi, my name is {x}.|i am called {x}.)")

# ---------------------------------------------------------------------------------------------------------- tool topics


@dataclass(frozen=True)
class Tool:
    """A task of a function, under several names, so that the model reads the function's schema instead of memorizing
    it.
    """

    names: str
    about: str
    parameters: dict[str, str]  # possible names of the parameter -> JSON type
    draw: Callable[[random.Random], list[Any]]
    result: Callable[[random.Random, list[Any]], tuple[dict[str, Any], str]] | None = (
        None  # its result, and the answer to give
    )

    def schema(self, rng: random.Random) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        described = rng.random() < 0.3
        for names, kind in self.parameters.items():
            name = names.split("|")[0] if rng.random() < 0.25 else rng.choice(names.split("|"))
            properties[name] = {"type": kind} | ({"description": f"The {name}"} if described else {})
        name = self.names.split("|")[0] if rng.random() < 0.1 else rng.choice(self.names.split("|"))
        parameters = {"type": "object", "properties": properties}
        if rng.random() < 0.85:
            parameters["required"] = list(properties)
        return {"type": "function", "function": {"name": name, "description": self.about, "parameters": parameters}}


MESSAGES = (
    "I am late|see you soon|happy birthday|dinner is ready|call me back|good luck|I am home|the train is late|well done"
).split("|")
TOPICS_TO_SEARCH = (
    "whales|black holes|old trains|chess rules|apple pie|the moon|dinosaurs|sea turtles|paper planes|medieval "
    "castles|honey bees|volcanoes|"
    "the Eiffel Tower|rain forests|guitar lessons|penguins"
).split("|")
LANGUAGES = "French German Spanish Italian Polish Japanese Greek Dutch".split()
WORDS = "hello|thank you|good night|water|bread|friend|house|book|tree|cheese|apple|school".split("|")
WEATHERS = "sunny cloudy rainy windy snowy foggy stormy".split()


def _weather_result(rng: random.Random, values: list[Any]) -> tuple[dict[str, Any], str]:
    degrees = rng.randint(0, 38)
    sky = rng.choice(WEATHERS)
    result = {"city": values[0], "temperature": degrees, "condition": sky}
    for key in ("city", "condition"):
        if rng.random() < 0.3:
            result.pop(key)
    sky_part = f"{sky} and " if "condition" in result else ""
    return result, f"It is {sky_part}{degrees} degrees in {values[0]}."


def _time_result(rng: random.Random, values: list[Any]) -> tuple[dict[str, Any], str]:
    time = f"{rng.randint(0, 23):02d}:{rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50]):02d}"
    return {"time": time}, f"The time in {values[0]} is {time}."


def _sum_result(rng: random.Random, values: list[Any]) -> tuple[dict[str, Any], str]:
    key = rng.choice(["result", "sum"])
    return {key: sum(values)}, f"The result is {sum(values)}."


def _product_result(rng: random.Random, values: list[Any]) -> tuple[dict[str, Any], str]:
    return {"result": values[0] * values[1]}, f"The result is {values[0] * values[1]}."


TOOLS = {
    "weather": Tool(
        "get_weather|get_current_weather|weather|fetch_weather|weather_lookup|current_weather",
        "Get the current weather for a city",
        {"city|location|place|town": "string"},
        lambda rng: [rng.choice(CITIES)],
        _weather_result,
    ),
    "time": Tool(
        "get_time|get_current_time|clock|local_time|current_time",
        "Get the current time in a city",
        {"city|location|timezone|place": "string"},
        lambda rng: [rng.choice(CITIES)],
        _time_result,
    ),
    "timer": Tool(
        "set_timer|start_timer|timer|create_timer",
        "Set a timer",
        {"minutes|duration|time": "integer"},
        lambda rng: [rng.randint(1, 60)],
        lambda rng, values: ({"status": "ok"}, f"I have set a timer for {values[0]} minutes."),
    ),
    "add": Tool(
        "add|add_numbers|sum|calculate_sum|plus",
        "Add two numbers",
        {"a|x|first": "integer", "b|y|second": "integer"},
        lambda rng: [rng.randint(0, 99), rng.randint(0, 99)],
        _sum_result,
    ),
    "multiply": Tool(
        "multiply|multiply_numbers|product|times",
        "Multiply two numbers",
        {"a|x|first": "integer", "b|y|second": "integer"},
        lambda rng: [rng.randint(0, 99), rng.randint(0, 99)],
        _product_result,
    ),
    "message": Tool(
        "send_message|message|send_text|text_message",
        "Send a message to a person",
        {"to|recipient|person": "string", "text|message|body": "string"},
        lambda rng: [any_name(rng), rng.choice(MESSAGES)],
        lambda rng, values: ({"status": "sent"}, f"I have sent your message to {values[0]}."),
    ),
    "search": Tool(
        "search|web_search|search_web|find|lookup",
        "Search the web",
        {"query|q|text|keywords": "string"},
        lambda rng: [rng.choice(TOPICS_TO_SEARCH)],
    ),
    "translate": Tool(
        "translate|translate_text|translation|translate_word",
        "Translate a text into another language",
        {"text|word|phrase": "string", "language|to|target": "string"},
        lambda rng: [rng.choice(WORDS), rng.choice(LANGUAGES)],
    ),
    "light": Tool(
        "set_light|switch_light|light|control_light",
        "Turn a light on or off",
        {"room|location": "string", "state|value": "string"},
        lambda rng: [
            rng.choice("kitchen bedroom bathroom hall garage garden office".split()),
            rng.choice(["on", "off"]),
        ],
        lambda rng, values: ({"status": "ok"}, f"The light in the {values[0]} is {values[1]}."),
    ),
    "music": Tool(
        "play_music|music|start_music|play",
        "Play music of a genre",
        {"genre|style|kind": "string"},
        lambda rng: [rng.choice("jazz rock pop folk blues classical reggae country soul".split())],
        lambda rng, values: ({"status": "playing"}, f"I am playing {values[0]} music."),
    ),
}


def offer_tools(rng: random.Random, *needed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the needed schemas together with up to three others, in any order, with distinct names."""
    others = [tool.schema(rng) for tool in rng.sample(list(TOOLS.values()), rng.choice([0, 0, 1, 1, 2, 3]))]
    known = {schema["function"]["description"]: schema for schema in [*others, *needed]}
    offered = list({schema["function"]["name"]: schema for schema in known.values()}.values())
    rng.shuffle(offered)
    return offered


def _tool(key: str) -> Callable[[random.Random], Case]:
    tool = TOOLS[key]

    def draw(rng: random.Random) -> Case:
        schema = tool.schema(rng)
        values = tool.draw(rng)
        function = schema["function"]
        call = {
            "name": function["name"],
            "arguments": dict(zip(function["parameters"]["properties"], values, strict=True)),
        }
        slots = {"v": str(values[0]), "w": str(values[-1])}
        result = None
        if tool.result:
            returned, said = tool.result(rng, values)
            result = (json.dumps(returned), said)
        return Case(slots, "", {"tool_calls": [call]}, tools=offer_tools(rng, schema), calls=[call], result=result)

    return draw


def _two_weathers(rng: random.Random) -> Case:
    schema = TOOLS["weather"].schema(rng)
    cities = rng.sample(CITIES, 2)
    (key,) = schema["function"]["parameters"]["properties"]
    calls = [{"name": schema["function"]["name"], "arguments": {key: city}} for city in cities]
    return Case(
        {"v": cities[0], "w": cities[1]}, "", {"tool_calls": calls}, tools=offer_tools(rng, schema), calls=calls
    )


TOPICS = [
    Topic(
        "capital",
        """(what is|what's|tell me|name|give me|say|which is) the capital( city|) of {x}?
        (which|what) (city|town) is the capital( city|) of {x}?
        {x}'s capital( city|)?
        (what is|what's|tell me|name) {x}'s capital?
        (do you know|can you tell me|could you tell me) (the capital of {x}|what the capital of {x} is|{x}'s capital)?
        the capital of {x} is (which city|what|called what)?
        (i need|i want to know|i am looking for|i would like to know|i forgot) the capital( city|) of {x}.
        capital( city|) of {x}?
        what city is {x}'s capital?
        in {x}, (which|what) city is the capital?
        {x}: (what is its|name the|which city is its) capital?
        what is the capital( city|) of the country {x}?
        i am going to {x}. (what is|tell me|name) (its|the) capital.
        (what|which) city do they call the capital of {x}?
        for (the country|a trip to|my trip to|a map of) {x}, (i need|give me|what was|which city is) the capital(| city)?
        (about|in) {x}: what is the capital?
        can you name the capital of the country {x}?""",
        """what is the name of the capital of {x}?
        do you know which city is the capital of {x}?
        please can you say what {x}'s capital city is?
        for {x}, what is the capital?
        i forgot what the capital of {x} is called.
        could you name the capital city of {x}?
        which city is {x}'s capital?""",
        _capital,
    ),
    Topic(
        "colour",
        """(what|which) (colour|color) is {x}?
        (what is|what's|tell me|name) the (colour|color) of {x}?
        (do you know|can you tell me|tell me) (what|which) (colour|color) {x} is?
        (what|which) (colour|color) does {x} have?
        {x} is (what|which) (colour|color)?
        {x}: (what|which) (colour|color)?
        (the|what) (colour|color) of {x}?
        (i want to know|i forgot|i need|say) the (colour|color) of {x}.
        i want to (paint|draw) {x}. (what|which) (colour|color) (do i need|is it|should i take)?
        if i look at {x}, (what|which) (colour|color) do i see?
        think of {x}. (what|which) (colour|color) is it?""",
        """could you tell me the (colour|color) of {x}?
        (what|which) (colour|color) would you say {x} is?
        when i see {x}, what (colour|color) is it?
        do you know the (colour|color) of {x}?
        i forgot what (colour|color) {x} is.
        {x} has (what|which) (colour|color)?""",
        _colour,
    ),
    Topic(
        "addition",
        """(what is|what's|how much is|calculate|compute|tell me|add) {a}( + |+| plus ){b}?
        {a}( + |+| plus ){b}
        {a}( + |+| plus ){b}( =|=|?| is| equals| equals what?| is what?| makes?)
        (add|sum) {a} and {b}.
        (what do|how much do) {a} and {b} make?
        (what is|tell me|calculate|give me) the sum of {a} and {b}?
        (what do you get if you|what happens if i) add {a} and {b}?
        if i have {a} (apples|eggs|books|coins) and get {b} more, how many do i have?
        (can you|could you) (add|sum) {a} and {b}?
        (do you know|can you tell me) what {a}( + |+| plus ){b} is?
        (solve|work out)(:|) {a}( + |+| plus ){b}.
        add {b} to {a}.
        (i have|there are) {a} (apples|eggs|coins|birds) and {b} more (come|are added). how many (is that|are there|do i have)( now|)?
        i have {a} (apples|coins|eggs) and you give me {b} (more|). how many (is that|do i have now)?
        (what|how much) does {a}( + |+| plus ){b} (make|give|come to)?
        i have {a} (apples|coins|eggs) and (buy|pick|take|get) {b} more. how many (are there|do i have)?
        {a} (apples|coins|birds) and {b} more (apples|coins|birds): how many (is that|are there)?
        i want to (add|know) {a}( + |+| plus | and ){b}.""",
        """can you calculate {a}( + | plus ){b}?
        what does {a}( + | plus ){b} equal?
        please give me {a}( + | plus ){b}.
        what do i get when i add {a} and {b}?
        how much is the sum of {a} and {b}?
        i have {a} (apples|coins) and find {b} more. how many is that?
        could you tell me how much {a}( + | plus ){b} is?""",
        _addition,
    ),
    Topic(
        "subtraction",
        """(what is|what's|how much is|calculate|compute|tell me) {a}( - |-| minus ){b}?
        {a}( - |-| minus ){b}
        {a}( - |-| minus ){b}( =|=|?| is| equals| equals what?| is what?| makes?)
        (take|subtract) {b} from {a}.
        (what is|tell me|calculate|give me) the difference of {a} and {b}?
        (what do you get if you|what happens if i) (take|subtract) {b} from {a}?
        if i have {a} (apples|eggs|books|coins) and (lose|eat|give away) {b}, how many (do i have|are left)?
        (can you|could you) (take|subtract) {b} from {a}?
        (do you know|can you tell me) what {a}( - |-| minus ){b} is?
        (solve|work out)(:|) {a}( - |-| minus ){b}.
        i had {a} (apples|eggs|coins|books) and (lost|ate|gave away) {b}. how many (are left|do i have now)?
        i have {a} (apples|eggs|coins|books) but (eat|give away|lose|drop) {b}(.|,) how many do i have( now|)?
        (what|how much) does {a}( - |-| minus ){b} (make|give|come to)?
        there (are|were) {a} (apples|birds|eggs) and {b} (are taken|fly|go) away. how many are left?
        i want to know {a}( - |-| minus ){b}.""",
        """can you calculate {a}( - | minus ){b}?
        what does {a}( - | minus ){b} equal?
        please give me {a}( - | minus ){b}.
        what do i get when i (take|subtract) {b} from {a}?
        i have {a} (apples|coins) but lose {b}. how many are left?
        could you tell me how much {a}( - | minus ){b} is?""",
        _subtraction,
    ),
    Topic(
        "opposite",
        """(what is|what's|tell me|name|give me|say) the opposite of (the word|) {x}?
        (which|what) word (is the opposite of|means the opposite of) {x}?
        {x}: (what is the|name the|) opposite?
        the opposite of {x} is (what|which word)?
        (do you know|can you tell me) (the opposite of {x}|what the opposite of {x} is)?
        opposite of {x}?
        (i need|i want to know|i am looking for|i forgot) the opposite of (the word|) {x}.
        if it is not {x}, it is the opposite. what is (it|that)?
        what (word|) is opposite to {x}?
        not {x} but the opposite: (what is it|which word is it)?
        {x} has (what|which) opposite?""",
        """could you tell me the opposite of {x}?
        can you name the opposite of {x}?
        i am looking for a word that means the opposite of {x}.
        what is the word for the opposite of {x}?
        for the word {x}, what is the opposite?
        do you know which word is the opposite of {x}?""",
        _opposite,
    ),
    Topic(
        "counting",
        """count from {a} to {b}.
        (can you|could you|please) count from {a} (to|up to) {b}?
        (list|say|write|give me|tell me|name) (the|all|all the) numbers from {a} to {b}.
        (what are|which are) the numbers from {a} to {b}?
        count up from {a} to {b}.
        start at {a} and count to {b}.
        numbers from {a} to {b}
        i want to hear the numbers from {a} to {b}.
        count: {a} to {b}.
        (begin|start) (with|at) {a} and (stop|end) at {b}.""",
        """could you list the numbers from {a} to {b}?
        show me how you count from {a} to {b}.
        i want you to count from {a} to {b}.
        start with {a} and count up to {b}.
        do you know how to count from {a} to {b}?""",
        _count,
    ),
    Topic(
        "counting",
        """count (to|up to) {b}.
        (can you|could you|please) count (to|up to) {b}?
        count to {b} for me.
        (show me how you|do you know how to|i want you to) count to {b}.""",
        """could you please count to {b} for me?
        let me hear you count to {b}.
        i want to hear you count up to {b}.""",
        _count_to,
    ),
    Topic(
        "counting",
        """count (down|backwards|back) from {a} to {b}.
        (can you|could you|please) count (down|backwards|back) from {a} to {b}?
        (list|say|write|give me) the numbers (down|backwards) from {a} to {b}.
        start at {a} and count (down|backwards|back) to {b}.""",
        """show me how you count (down|backwards) from {a} to {b}.
        i want you to count (down|backwards) from {a} to {b}.
        start with {a} and count (down|backwards) to {b}.""",
        _count_down,
    ),
    Topic(
        "days",
        """(what|which) day (comes|is|follows) (after|right after) {x}?
        (what is|what's|tell me|name) the day after {x}?
        (what|which day|which one) comes (after|next after) {x}?
        (today is|it is|if today is|if it is) {x}(.|,) what (day is it tomorrow|is tomorrow|day is tomorrow)?
        after {x} comes (what|which day|which)?
        (do you know|can you tell me) (what|which) day (comes|is) after {x}?
        {x} is followed by (what|which) day?
        (what|which) day follows {x}?
        the day after {x}?""",
        """could you tell me which day comes after {x}?
        what is the name of the day after {x}?
        do you know the day after {x}?
        can you say which day follows {x}?
        yes, today is {x}. which day is tomorrow?""",
        _neighbour(DAYS, 1, "day"),
    ),
    Topic(
        "days",
        """(what|which) day (comes|is) (before|right before) {x}?
        (what is|what's|tell me|name) the day before {x}?
        (what|which day|which one) comes (before|just before) {x}?
        (today is|it is|if today is|if it is) {x}(.|,) what (day was it yesterday|was yesterday|day was yesterday)?
        before {x} comes (what|which day|which)?
        (do you know|can you tell me) (what|which) day (comes|is) before {x}?
        the day before {x}?""",
        """could you tell me which day comes before {x}?
        what is the name of the day before {x}?
        do you know the day before {x}?
        yes, today is {x}. which day was yesterday?""",
        _neighbour(DAYS, -1, "day"),
    ),
    Topic(
        "months",
        """(what|which) month (comes|is|follows) (after|right after) {x}?
        (what is|what's|tell me|name) the month after {x}?
        (what|which month|which one) comes (after|next after) {x}?
        after {x} comes (what|which month|which)?
        (do you know|can you tell me) (what|which) month (comes|is) after {x}?
        (what|which) month follows {x}?
        the month after {x}?""",
        """could you tell me which month comes after {x}?
        what is the name of the month after {x}?
        do you know the month after {x}?
        can you say which month follows {x}?""",
        _neighbour(MONTHS, 1, "month"),
    ),
    Topic(
        "months",
        """(what|which) month (comes|is) (before|right before) {x}?
        (what is|what's|tell me|name) the month before {x}?
        (what|which month|which one) comes (before|just before) {x}?
        before {x} comes (what|which month|which)?
        (do you know|can you tell me) (what|which) month (comes|is) before {x}?
        the month before {x}?""",
        """could you tell me which month comes before {x}?
        what is the name of the month before {x}?
        do you know the month before {x}?""",
        _neighbour(MONTHS, -1, "month"),
    ),
    Topic(
        "sound",
        """what (sound|noise) does a {x} make?
        what does (a|the) {x} say?
        (how does|how would) a {x} (sound|speak|talk)?
        (tell me|what is|what's) the (sound|noise) of a {x}?
        (do you know|can you tell me) (what|which) (sound|noise) a {x} makes?
        a {x} says what?
        (show me|explain|i forgot) what (a|the) {x} says.
        what does (a|the) {x} say when it (is happy|calls|talks)?
        (which|what) (sound|noise) (comes from|do you hear from) a {x}?
        (make|do) (the sound of|the noise of) a {x}.""",
        """could you tell me what a {x} says?
        what is the sound that a {x} makes?
        which sound does a {x} make?
        what noise would a {x} make?
        tell me what the {x} says.""",
        _sound,
    ),
    Topic(
        "json",
        """(answer in|answer with|reply in|give me|write|return|make|produce|use) (JSON|json) with the keys {keys}: {s}
        {s} (answer in|answer with|reply in|give me|write|return|make) (JSON|json) with the keys {keys}.
        (turn this into|put this into|change this to|write this as|convert this to) (JSON|json) with the keys {keys}: {s}
        (read|here is) (this|a) (text|sentence): {s} (write|give me|return|answer in) (JSON|json) with (the keys|keys|the fields) {keys}.
        (extract|find|get|take) {keys} (from this text|from this sentence|from this) (as|in) (JSON|json): {s}
        (JSON|json) with (the keys|keys|fields|the fields) {keys}: {s}
        (JSON|json) only, keys {keys}: {s}
        (make|write|create|give me) a (JSON|json) object (with|from this with) the keys {keys}: {s}
        (can you|could you|will you) (turn|put|change|make) this (into|to) (a json object|JSON|a JSON object) with the (keys|fields) {keys}? {s}
        (can you|could you) (give me|make|return) (a JSON object|json|JSON) with the (keys|fields) {keys}? {s}
        {s} (put|write|save) that (in|as) (JSON|json) (with the keys|using the keys) {keys}.""",
        """please answer in (JSON|json) using the keys {keys}: {s}
        {s} turn this into a (JSON|json) object with the keys {keys}.
        from this sentence, make (JSON|json) with the keys {keys}: {s}
        i need a (JSON|json) object with the keys {keys} from this text: {s}
        here is a sentence: {s} now return {keys} as (JSON|json).
        can you write this as a (JSON|json) object with the fields {keys}? {s}""",
        _json,
    ),
    Topic(
        "json",
        """(answer in|answer with|reply in|use) (JSON|json) with the keys country and capital: (what is the capital of {x}?|{x})
        (what is|tell me) the capital of {x}? (answer in|answer with|reply in|use) (JSON|json) with the keys country and capital.
        (give me|write|make|return) (JSON|json) with the keys country and capital for {x}.
        (JSON|json) with the keys country and capital: {x}
        (for the country {x},|about {x}:|{x}:|take {x}.|the country is {x}.) (write|make|give me|return|answer in) (JSON|json) with the keys country and capital.
        (i need|show me) {x} and its capital (as|in) (JSON|json) with the keys country and capital.""",
        """give me the capital of {x} in (JSON|json) with the keys country and capital.
        for {x}, write (JSON|json) with the keys country and capital.""",
        _json_capital,
    ),
    Topic(
        "recall",
        """(what is|what's|tell me|say) my name?
        (do you know|do you remember|can you tell me) (my name|what my name is)?
        who am i?
        what am i called?
        (what|which) name did i (tell|give) you?""",
        """could you tell me what my name is?
        do you still remember my name?
        can you say my name?
        do you know what i am called?""",
        _recall("name"),
    ),
    Topic(
        "recall",
        """where do i live?
        (what|which) (city|town) do i live in?
        (do you know|do you remember|can you tell me) where i live?
        in (what|which) (city|town) do i live?""",
        """could you tell me where i live?
        do you still remember where i live?
        do you know which city i live in?""",
        _recall("city"),
    ),
    Topic(
        "recall",
        """(what is|what's|tell me) my favourite colour?
        (what|which) colour do i like (best|most)?
        (do you know|do you remember|can you tell me) my favourite colour?
        (what|which) colour is my favourite?""",
        """could you tell me what my favourite colour is?
        do you still remember my favourite colour?
        do you know which colour i like best?""",
        _recall("colour"),
    ),
    Topic(
        "recall",
        """(what is|what's|tell me) (my {p}'s name|the name of my {p})?
        (do you know|do you remember|can you tell me) (my {p}'s name|the name of my {p})?
        (what|how) is my {p} (called|named)?
        what name does my {p} have?""",
        """could you tell me what my {p} is called?
        do you still remember the name of my {p}?
        do you know what my {p}'s name is?""",
        _recall("pet"),
    ),
    Topic(
        "tool",
        """(what is|what's|how is|tell me|show me|check|get) the weather( like|| now| today) in {v}?
        (is it|will it be) (warm|cold|sunny|raining|hot) in {v}( today|)?
        (do i need|should i take) (an umbrella|a coat) in {v}?
        (weather in|weather for) {v}?
        how (warm|cold|hot) is it in {v}?
        (what is|tell me) the temperature in {v}?
        what weather (do they have|is there) in {v}?
        (can you|could you) (check|get|tell me) the weather in {v}?
        i (want to know|need) the weather in {v}.""",
        """could you please look up the weather in {v}?
        what is the weather in {v} like now?
        do you know the temperature in {v} today?
        i am going to {v} today. how is the weather there?
        please check how warm it is in {v}.""",
        _tool("weather"),
    ),
    Topic(
        "tool",
        """(what time is it|what is the time|what's the time) in {v}( now|)?
        (tell me|check|get|show me) the (current time|time) in {v}.
        (do you know|can you tell me|can you check) (the time|what time it is) in {v}?
        (time in|clock in) {v}?
        how late is it in {v}( now|)?
        i (need|want to know) the time in {v}.
        in {v}, what time is it?""",
        """could you tell me the time in {v}?
        do you know how late it is in {v}?
        i want to know what time it is in {v} now.
        check what the time is in {v} now.""",
        _tool("time"),
    ),
    Topic(
        "tool",
        """(set|start|make|create) a timer (for|of) {v} minutes.
        (set|start) a {v} minute timer.
        (can you|could you) (set|start) a timer for {v} minutes?
        (tell me|remind me|wake me) (in|after) {v} minutes.
        i need a (timer for|timer of) {v} minutes.
        timer: {v} minutes.
        {v} minutes timer.""",
        """please start a timer that runs for {v} minutes.
        i want a timer for {v} minutes.
        could you make a {v} minute timer?""",
        _tool("timer"),
    ),
    Topic(
        "tool",
        """(use the tool to|use a tool and|use the function to|call the function to|with the tool,) add {v} and {w}.
        (add|sum|sum up) {v} and {w} (with the tool|with your tool|using the tool|using a function).
        (what is|calculate|how much is) {v}( + | plus ){w}? use (the tool|a tool|the function).
        (what is|calculate|how much is) {v}( + | plus ){w} (with the tool|using the tool)?""",
        """please use your tool to add {v} and {w}.
        use the function: what is {v}( + | plus ){w}?
        can you add {v} and {w} using the tool?""",
        _tool("add"),
    ),
    Topic(
        "tool",
        """(what is|calculate|how much is|compute|tell me) {v}( times | * | x ){w}?
        multiply {v} (by|with|and) {w}.
        (use the tool to|use a tool and|use the function to|can you|could you) multiply {v} (by|and) {w}.
        (what is|give me|i need) the product of {v} and {w}?
        {v}( times | * | x ){w}?""",
        """could you calculate {v}( times | * ){w}?
        please multiply the numbers {v} and {w}.
        use the tool: what is {v}( times | * ){w}?
        tell me the product of {v} and {w}.""",
        _tool("multiply"),
    ),
    Topic(
        "tool",
        """(send|write) {v} a message( that says|:| saying) {w}.
        (send|write) a message to {v}( that says|:| saying) {w}.
        (tell|text|message) {v}(:|) {w}.
        (can you|could you) (send|write) {v} a message(:|) {w}.
        (let {v} know|send {v} this)(:|) {w}.
        (text|message|write to) {v} and say {w}.""",
        """please send this message to {v}: {w}.
        i want to send {v} a message that says {w}.
        could you text {v} saying {w}?""",
        _tool("message"),
    ),
    Topic(
        "tool",
        """(search|search the web|look|google) for {v}.
        (search|find|look up|look for) (something about|pages about|articles about|news about) {v}.
        (find|look up|search the web for|show me) (information|pages) about {v}.
        (can you|could you) (search for|look up|find) {v}?
        i (want|need) to (read|know|learn) (more|something) about {v}.""",
        """please search the web for something about {v}.
        could you find articles about {v}?
        i want to look up {v}.
        can you search for information about {v}?""",
        _tool("search"),
    ),
    Topic(
        "tool",
        """translate ({v}|the word {v}|the text {v}) (into|to) {w}.
        (what is|how do you say|how do i say|say) {v} in {w}?
        (can you|could you) translate {v} (into|to) {w}?
        {v} in {w}?
        i need {v} in {w}.
        what does {v} mean in {w}?""",
        """please put the word {v} into {w}.
        could you say {v} in {w}?
        i want to say {v} in {w}.
        i need you to translate {v} to {w}.""",
        _tool("translate"),
    ),
    Topic(
        "tool",
        """(turn|switch) {w} the (light|lights|lamp) in the {v}.
        (turn|switch) the {v} (light|lights|lamp) {w}.
        (can you|could you) (turn|switch) {w} the {v} (light|lights)?
        (put|make) the (light|lights) in the {v} {w}.
        {v} (light|lights) {w}.
        the (light|lights) in the {v} should be {w}.
        (turn|switch) the (light|lights|lamp) in the {v} {w}.""",
        """please switch the lamp {w} in the {v}.
        could you turn the light in the {v} {w}?
        i want the {v} light {w}.""",
        _tool("light"),
    ),
    Topic(
        "tool",
        """(play|start|put on) (some|) {v}( music|).
        (can you|could you) (play|put on) (some|) {v}( music|)?
        (i want to hear|i would like|i want|i feel like) (some|) {v} music.
        (let us hear|let me hear) (some|) {v}( music|).
        {v} music, please.
        music: {v}.""",
        """please put some {v} music on.
        could you start playing {v}?
        i would like to hear some {v} music.""",
        _tool("music"),
    ),
    Topic(
        "tool",
        """(what is|how is|check|tell me) the weather in {v} and( in|) {w}?
        (is it|will it be) (warm|cold|sunny|hot) in {v} and( in|) {w}?
        (can you|could you) (check|get) the weather in {v} and {w}?""",
        """how is the weather in both {v} and {w}?
        please get the weather for {v} and {w}.""",
        _two_weathers,
    ),
]
TOPICS += [
    Topic("small_talk", train, held, _talk(answer, *accepted))
    for train, held, answer, *accepted in (
        (
            """(hello|hi|hey|hello there|hi there|good day|greetings)(.|!|)
            (hello|hi|hey)(,|) (you|friend|computer|Quire|assistant)!""",
            "hey there!\nhello again!\nnice day, hello!",
            "Hello! How can I help you?",
            "hello",
        ),
        (
            """how are (you|you today|you doing|things)?
            (hello|hi|hey)(,|) how are (you|you doing|you today)?
            how is (it going|your day|life)?
            (are you|do you feel) (well|ok|fine|good)( today|)?
            how do you (feel|do)?
            what's up?""",
            "and how are you doing today?\nhow do you feel today?\nhow is your day going?\nare you doing well?",
            "I am fine, thank you! How are you?",
            "fine",
        ),
        (
            """(what is|what's|tell me) your name?
            who are you?
            what are you called?
            (do you have|have you got) a name?
            (can you tell me|may i know|what should i call you and what is) your name?
            introduce yourself.
            (what|how) (should|can|do) i call you?""",
            "could you tell me your name?\nwhat name do you have?\nwho am i talking to? what is your name?\nso "
            "who are you really?",
            "My name is Quire. I am a very small language model.",
            "quire",
        ),
        (
            """(thanks|thank you|many thanks|thanks a lot|thank you very much|thank you so much)(.|!)
            (great|good|nice|cool|ok|perfect)(,|) (thanks|thank you)!
            (thanks|thank you|many thanks) for (that|everything|this|helping me|telling me|being so kind)!
            (thanks|thank you), (you helped me|that helped me|good answer|that is what i needed)!
            that (was|is) (very|) (helpful|kind|nice)( of you|). thank you!""",
            "thanks for your help!\nthank you for the answer!\nthat is great, thanks!",
            "You are welcome!",
            "welcome",
        ),
        (
            """(bye|goodbye|bye bye|see you|see you later|see you soon|see you tomorrow)(.|!)
            (i have to go|i must go|i am leaving)( now|)(.|. bye!|. goodbye!)
            (good|ok|well)(,|) (bye|goodbye)!""",
            "ok, i have to leave. bye bye!\ngoodbye, see you soon!\nbye, i must go now.",
            "Goodbye! See you soon.",
            "goodbye",
        ),
        (
            """what can you do( for me|)?
            (what|how) can you help( me|)( with|)?
            what (are you good at|do you know|are you able to do)?
            (tell me|show me) what you can do.
            what (questions|things) can i ask( you|)?
            (help|help me)(!|.)""",
            "tell me what you are good at.\nwhat are the things you can do?\nwhat can i ask you?",
            "I can tell stories, add numbers, name capitals and colours, write JSON and call tools.",
            "stories",
        ),
        (
            """are you (a robot|a human|human|a person|real|alive|a machine|a computer|an AI)?
            (what are you|what kind of thing are you)?
            is this a (human|robot|person)?
            (do i|am i) (speak|speaking|chatting) (to|with) a (human|robot|machine|person)?
            (tell me,|) (human or robot|are you a robot or a human|robot or person)?
            am i talking to a (robot|human|person|machine)?""",
            "are you a real person?\ndo i talk to a human or a robot?\nso you are a robot?",
            "I am a computer program: a very small language model.",
            "program",
        ),
        (
            """(tell me|do you know|say|give me|can you tell me) (a|a good|a funny|another|one) joke( please|)?
            (make me laugh|be funny|a joke, please)(.|!)
            i want (to hear|) a joke.""",
            "could you tell me a joke?\ni would like to hear a funny joke.\ntell a joke!",
            "Why did the chicken cross the road? To get to the other side!",
            "chicken",
        ),
        (
            "good morning(!|.|, Quire!| to you!|. nice to see you.)",
            "a very good morning to you!\nhello and good morning!",
            "Good morning! How can I help you?",
            "good morning",
        ),
        (
            """good night(!|.|, Quire!| to you!)
            (i am tired|i go to bed|i am going to bed|time to sleep)( now|)(.|. good night!)""",
            "i am tired and i am going to bed.\nok, good night then!",
            "Good night! Sleep well.",
            "good night",
        ),
        (
            """i (am|feel) (so|very|a bit|) (sad|unhappy|lonely|bad)( today|).
            (i had a bad day|this is a sad day|i am not happy|today was bad).""",
            "today i feel very sad.\ni am feeling a bit lonely.\ni think i had a very bad day.",
            "I am sorry to hear that. I hope you feel better soon.",
            "sorry",
        ),
        (
            """i (am|feel) (so|very|really|) (happy|great|good|glad)( today|).
            (i had a good day|this is a great day|today was great|i have good news)(!|.)""",
            "today i feel really happy.\ni am feeling great today.\ni think this is a good day!",
            "I am glad to hear that!",
            "glad",
        ),
        (
            """how old are you?
            (what is|tell me) your age?
            when were you (born|made)?
            are you (old|young)?""",
            "could you tell me how old you are?\ndo you know your age?",
            "I have no age, because I am a program. But I am very new.",
            "program",
        ),
        (
            """where (do you live|are you|are you from|do you come from)?
            (what is|where is) your home?
            (which|what) (city|country) do you (live in|come from)?""",
            "can you tell me where you live?\nwhere is it that you live?",
            "I live in your computer.",
            "computer",
        ),
        (
            """who (made|built|trained|created|wrote) you?
            (where|how) were you (made|trained|created)?
            who is your (maker|creator)?
            (can you tell me|do you remember|say) who (made|built|trained) you?""",
            "do you know who made you?\ncan you tell me who created you?",
            "I was trained by a small script that comes with Quire.",
            "script",
        ),
    )
]
TOPICS.append(
    Topic(
        "small_talk",
        "\n".join(INTRODUCTIONS),
        "hello there, my name is {x}.\nhey you, i am {x}.\ngood day, i am called {x}.",
        _introduction,
    )
)
UNKNOWN = Topic(  # trained but not examined: answers to questions that a model of this size cannot know
    "unknown",
    """who (won|lost) the (world cup|election|war|game) in (1954|1998|2010|2022)?
    (explain|what is) (quantum physics|relativity|democracy|philosophy|the stock market)( to me|)?
    who (wrote|painted|invented|discovered) (Hamlet|the Mona Lisa|the telephone|America|the radio)?
    (how do i|how can i) (fix my car|learn to code|bake bread|write a book|find a job|lose weight)?
    (write|show me) a (python program|function|poem|song|letter|list of films).
    what is the (population|history|size) of (the world|Africa|the moon|New York)?
    (when|why) did the (war|film|king|storm) (begin|end|happen)?
    what (do you think|is your opinion) about (politics|football|music|the news)?""",
    "",
    _talk("I am a very small model, and I do not know that.", "not know"),
)
PLAIN_TOPICS = [topic for topic in TOPICS if topic.kind not in ("tool", "recall", "json")]
KINDS = (*dict.fromkeys(topic.kind for topic in TOPICS), "tool_result")


def draw_question(rng: random.Random, topic: Topic, held_out: bool = False) -> Question:
    """Return a question of a topic with its correct answer: {"kind", "messages", "answer", "calls", "result",
    "expected"} and perhaps "tools".
    """
    case = topic.draw(rng)
    core = rng.choice(expand(rng.choice(lines_of(topic.held if held_out else topic.train))))
    # One-word answers are harder, since the model cannot write anything first, so training has more of them.
    one_word = case.short is not None and rng.random() < (0.15 if held_out else 0.4)
    text = dress(core, rng, rng.choice(ONE_WORD) if one_word else "", plain=topic.kind in ("small_talk", "unknown"))
    for name, value in case.slots.items():  # not str.format: the text from dress() may contain braces
        text = text.replace("{" + name + "}", value).replace("{" + name.upper() + "}", value[0].upper() + value[1:])
    if text[0].islower() and core[0] == "{" and rng.random() < 0.8:
        text = text[0].upper() + text[1:]
    messages = [*case.before, {"role": "user", "content": re.sub(r"\b([Aa]) owl\b", r"\1n owl", text)}]
    question: Question = {"kind": topic.kind, "messages": messages, "answer": case.short if one_word else case.answer}
    if case.tools:
        question["tools"] = case.tools
    return question | {"calls": case.calls, "result": case.result, "expected": case.expected}


def messages_for(question: Question) -> list[Message]:
    """Return the turns of the question and of the correct answer, including the tool's result if there is one."""
    messages = list(question["messages"])
    if not question["calls"]:
        return [*messages, {"role": "assistant", "content": question["answer"]}]
    messages.append(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": c} for c in question["calls"]],
        }
    )
    if question["result"]:
        returned, said = question["result"]
        messages += [{"role": "tool", "content": returned}, {"role": "assistant", "content": said}]
    return messages


def examination(size: int, seed: int = 2024) -> list[Question]:
    """Return `size` held-out questions, spread evenly over the kinds."""
    rng = random.Random(seed)
    questions: list[Question] = []
    seen: set[str] = set()
    while len(questions) < size:
        kind = KINDS[len(questions) % len(KINDS)]
        topic = rng.choice([topic for topic in TOPICS if topic.kind == kind.removesuffix("_result")])
        question = draw_question(rng, topic, held_out=True)
        if kind == "tool_result":
            if not question["result"]:
                continue
            *turns, last = messages_for(question)
            question |= {"kind": kind, "messages": turns, "expected": {"ends_with": last["content"]}}
        text = json.dumps([question["messages"], question.get("tools")])
        if text not in seen:
            seen.add(text)
            questions.append(
                {key: question[key] for key in ("kind", "messages", "tools", "expected") if key in question}
            )
    return questions


def _phrasings(patterns: str) -> Iterator[str]:
    for line in lines_of(patterns):
        for core in expand(line):
            yield normalize(re.sub(r"\{(\w)\w*\}", r" slot\1 ", core))


def assert_held_out() -> None:
    """Check that training contains no held-out phrasing, with any greeting or ending."""
    around = ["", *OPENERS], ["", *ENDINGS, *ONE_WORD]
    for kind in {topic.kind for topic in TOPICS}:
        topics = [topic for topic in TOPICS if topic.kind == kind]
        held = {text for topic in topics for text in _phrasings(topic.held)}
        trained = {text for topic in topics for text in _phrasings(topic.train)}
        written = {
            normalize(f"{opener} {text} {ending}") for text in trained for opener in around[0] for ending in around[1]
        }
        if clash := held & written:
            raise AssertionError(f"{kind}: held-out phrasings that training can write: {sorted(clash)}")
        if clash := {
            core for core in held for text in trained if text.startswith(f"{core} ") or text.endswith(f" {core}")
        }:
            raise AssertionError(f"{kind}: held-out phrasings that are part of a training phrasing: {sorted(clash)}")
