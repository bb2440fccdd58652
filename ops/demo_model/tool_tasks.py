"""Tasks with tools: which to call, with arguments copied from the question, and what to say of their results."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from ops.demo_model import tasks
from ops.demo_model.dialogue import Chat, Message, Property, Tool, assistant, tool_call, user
from ops.demo_model.draw import Draw


def tool(name: str, description: str, properties: dict[str, str | None]) -> Tool:
    """A tool of string parameters, all required; `properties` maps each to its description or to None."""
    described: dict[str, Property] = {
        key: {"type": "string", "description": text} if text else {"type": "string"} for key, text in properties.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": described, "required": list(properties)},
        },
    }


TOOLS: dict[str, Tool] = {
    listed["function"]["name"]: listed
    for listed in (
        tool("get_weather", "Get the current weather for a location", {"location": "City name"}),
        tool("calculator", "Evaluate an arithmetic expression", {"expression": "The expression"}),
        tool("get_time", "Get the current time in a city", {"city": "City name"}),
        tool("send_email", "Send an email", {"to": "Email address", "subject": "Subject line"}),
        tool("search", "Search the web", {"query": "Search query"}),
    )
}

QUESTIONS = {
    "get_weather": [
        "What is the weather in {}?",
        "What's the weather like in {}?",
        "How is the weather in {} today?",
        "Weather in {}?",
        "Tell me the weather in {}.",
        "Please check the weather for {}.",
        "Is it raining in {}?",
    ],
    "get_time": [
        "What time is it in {}?",
        "Time in {}?",
        "Tell me the time in {}.",
        "What is the current time in {}?",
        "Do you know what time it is in {}?",
    ],
    "calculator": [
        "What is {}?",
        "Calculate {}.",
        "Use the calculator for {}.",
        "Compute {}.",
        "How much is {}?",
    ],
    "send_email": [
        "Send an email to {} about {}.",
        "Email {} about {}.",
        "Send {} an email with the subject {}.",
        "Write an email to {} about {}.",
    ],
    "search": [
        "Search for {}.",
        "Search the web for {}.",
        "Find {} on the web.",
        "Look up {}.",
        "Please search for {}.",
    ],
}


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool: what it is called with, the message that it answers, the sentence made of that."""

    tool: str
    arguments: dict[str, str]
    result: str
    sentence: str

    @property
    def subject(self) -> str:
        """The first argument: what the call is about."""
        return next(iter(self.arguments.values()))


def _use_get_weather(draw: Draw, held: bool) -> Use:
    city, degrees = draw.proper("city", held), draw.between(-9, 39)
    sky = draw.pick(["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"])
    result = json.dumps({"temperature": degrees, "condition": sky})
    return Use("get_weather", {"location": city}, result, f"It is {degrees} degrees and {sky} in {city}.")


def _use_get_time(draw: Draw, held: bool) -> Use:
    city, clock = draw.proper("city", held), f"{draw.between(0, 23):02d}:{draw.between(0, 59):02d}"
    return Use("get_time", {"city": city}, json.dumps({"time": clock}), f"It is {clock} in {city}.")


def _use_calculator(draw: Draw, held: bool) -> Use:
    """The result is any number: the model is to read it, not to know it."""
    left, sign = draw.between(2, draw.pick([9, 99, 999, 9999])), draw.pick("+-*/")
    expression = f"{left} {sign} {draw.between(2, draw.pick([9, 99, 999]))}"
    value = draw.between(0, draw.pick([9, 99, 999, 99999]))
    if not held and draw.chance(0.2):
        expression = f"({expression}) {draw.pick('+-*/')} {draw.between(2, 99)}"
    result = json.dumps({"result": value})
    return Use("calculator", {"expression": expression}, result, f"{expression} = {value}.")


def _use_send_email(draw: Draw, held: bool) -> Use:
    subject = draw.words(1, 3, held)
    person = draw.pick([draw.proper("name", held).lower(), draw.word(held)])
    made_up_domain = draw.word(held) + "." + draw.pick(["com", "org", "net"])
    address = person + "@" + draw.pick(["example.com", "example.com", "mail.org", made_up_domain])
    arguments = {"to": address, "subject": subject}
    return Use("send_email", arguments, json.dumps({"status": "sent"}), f"I sent the email to {address}.")


def _use_search(draw: Draw, held: bool) -> Use:
    query, found = draw.words(1, 3, held), draw.words(2, 4, held)
    return Use("search", {"query": query}, json.dumps({"results": [found]}), f"I found: {found}.")


USES: dict[str, Callable[[Draw, bool], Use]] = {
    "get_weather": _use_get_weather,
    "get_time": _use_get_time,
    "calculator": _use_calculator,
    "send_email": _use_send_email,
    "search": _use_search,
}


def offer(draw: Draw, names: list[str]) -> list[Tool]:
    """The named tools, some described otherwise, so that a call is read from the signature, not from memory."""
    return [_reworded(draw, TOOLS[name]) if draw.chance(0.3) else TOOLS[name] for name in names]


def _reworded(draw: Draw, original: Tool) -> Tool:
    function = original["function"]
    name, description = function["name"], function["description"]
    described = draw.pick([description, description + ".", draw.words(2, 4)])
    properties = {
        key: draw.pick([None, value["description"], draw.words(1, 3)])
        for key, value in function["parameters"]["properties"].items()
    }
    reworded = tool(name, described, properties)
    if name == "get_weather" and draw.chance(0.4):
        unit: Property = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        reworded["function"]["parameters"]["properties"]["unit"] = unit
    if draw.chance(0.3):
        del reworded["function"]["description"]
    return reworded


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question that needs tools: the uses that it takes, and the names of the tools to offer."""

    question: str
    uses: list[Use]
    names: list[str]


def _ask(draw: Draw, names: list[str], held: bool, two: float) -> _Asked:
    """A question for one use of the first tool, or, with probability `two`, for two uses of city tools."""
    use = USES[names[0]](draw, held)
    if draw.chance(two):
        return _ask_two(draw, names, held)
    return _Asked(draw.pick(QUESTIONS[use.tool]).format(*use.arguments.values()), [use], names)


def _ask_two(draw: Draw, names: list[str], held: bool) -> _Asked:
    wanted = {"get_weather": "the weather", "get_time": "the time"}
    first = draw.pick(list(wanted))
    second = first if draw.chance(0.8) else draw.pick(list(wanted))
    uses = [USES[first](draw, held), USES[second](draw, held)]
    question = draw.pick(
        [
            "What is {what} in {one} and {other}?",
            "What is {what} in {one} and in {other}?",
            "Tell me {what} in {one} and {other}.",
            "Compare {what} in {one} and {other}.",
        ]
        if first == second
        else ["What is {what} in {one} and {what_else} in {other}?"]
    ).format(what=wanted[first], what_else=wanted[second], one=uses[0].subject, other=uses[1].subject)
    return _Asked(question, uses, list(dict.fromkeys([first, second, *names[1:]])))


def _call(draw: Draw, names: list[str], held: bool, two: float) -> Chat:
    asked = _ask(draw, names, held, two)
    draw.random.shuffle(asked.names)
    thought = " ".join(f"I call {use.tool} for {use.subject}." for use in asked.uses)
    calls = [tool_call(use.tool, use.arguments) for use in asked.uses]
    return Chat([user(asked.question)], offer(draw, asked.names), thought, assistant(calls=calls))


def one_call(draw: Draw, names: list[str], held: bool) -> Chat:
    return _call(draw, names, held, two=0)


def two_calls(draw: Draw, names: list[str], held: bool) -> Chat:
    return _call(draw, names, held, two=1)


def from_results(draw: Draw, names: list[str], held: bool) -> Chat:
    """The calls are made and answered; the model tells the results."""
    asked = _ask(draw, names, held, two=0.25)
    draw.random.shuffle(asked.names)
    calls = [tool_call(use.tool, use.arguments) for use in asked.uses]
    results: list[Message] = [{"role": "tool", "content": use.result} for use in asked.uses]
    messages = [user(asked.question), assistant(calls=calls), *results]
    answer = assistant(" ".join(use.sentence for use in asked.uses))
    return Chat(messages, offer(draw, asked.names), "The tool answered.", answer)


def invented_tool(draw: Draw, names: list[str], held: bool) -> Chat:
    """Name and parameters exist only in the signature that is offered."""
    verbs, keys = (
        ["find", "play", "book", "open", "order", "lookup", "set"],
        ["name", "item", "id", "value", "title", "text"],
    )
    name = (draw.pick(verbs) if draw.chance(0.6) else draw.word()) + "_" + draw.word(held)
    parameters = dict.fromkeys(draw.pick(keys) if draw.chance(0.6) else draw.word() for _ in range(draw.between(1, 2)))
    arguments = {parameter: draw.words(1, 2, held) for parameter in parameters}
    tools = offer(draw, names[:2])
    invented = tool(name, name.replace("_", " ").capitalize(), dict.fromkeys(parameters))
    tools.insert(draw.between(0, len(tools)), invented)
    question = draw.pick(["Call {} with {}.", "Use {} with {}.", "Please run {} with {}."]).format(
        name, " and ".join(f"{parameter} {value}" for parameter, value in arguments.items())
    )
    return Chat([user(question)], tools, f"I call {name}.", assistant(calls=[tool_call(name, arguments)]))


def missing_tool(draw: Draw, names: list[str], held: bool) -> Chat:
    """The tool that the question needs is not offered."""
    missing = draw.pick(list(TOOLS))
    offered = [name for name in names if name != missing] or [name for name in TOOLS if name != missing][:2]
    if missing == "calculator":  # the model can add by itself: ask for something that it cannot do
        missing = "get_time" if "get_time" not in offered else "search"
        offered = [name for name in offered if name != missing] or ["calculator"]
    question = draw.pick(QUESTIONS[missing]).format(*USES[missing](draw, held).arguments.values())
    tools = offer(draw, offered)
    return Chat([user(question)], tools, "No tool fits.", assistant("I have no tool for that."))


def needless_tools(draw: Draw, names: list[str], held: bool) -> Chat:
    """Tools are offered, none is needed."""
    task = draw.pick([tasks.fact, tasks.small_talk, tasks.repeat, tasks.fact])
    question, thought, answer = task(draw, held)
    return Chat([user(question)], offer(draw, names), thought, assistant(answer))


TOOL_TASKS: dict[str, Callable[[Draw, list[str], bool], Chat]] = {
    "one": one_call,
    "two": two_calls,
    "result": from_results,
    "invented": invented_tool,
    "no_tool": missing_tool,
    "plain": needless_tools,
}
