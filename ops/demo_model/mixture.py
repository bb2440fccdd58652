"""The stream of training examples: which kinds of chat, how often, with what around them."""

from ops.demo_model.dialogue import Chat, Message, assistant, render_continuation, render_prompt, user
from ops.demo_model.draw import Draw
from ops.demo_model.tasks import TASKS
from ops.demo_model.tool_tasks import TOOL_TASKS, TOOLS

Mixture = dict[str, int]
"""Kind of chat -> weight."""

COPYING: Mixture = {"repeat": 30, "spell": 25, "upper": 15, "list": 8, "json": 4, "sum": 18}
EVERYTHING: Mixture = {
    "repeat": 10, "spell": 14, "upper": 10, "list": 4, "json": 2, "count": 5, "sum": 22, "fact": 6, "chat": 6,
    "one": 11, "two": 5, "result": 5, "invented": 6, "no_tool": 4, "plain": 3,
}  # fmt: skip


def draw_chat(draw: Draw, kind: str, held: bool = False) -> Chat:
    """One chat of a kind of TASKS or TOOL_TASKS."""
    if kind in TASKS:
        return _plain_chat(draw, kind, held)
    offered = draw.between(1, 5) if held else draw.pick([1, 1, 1, 2, 2, 3, 5])
    return TOOL_TASKS[kind](draw, draw.random.sample(list(TOOLS), offered), held)


def _plain_chat(draw: Draw, kind: str, held: bool) -> Chat:
    """A task without tools; in training sometimes after an earlier exchange or a system message."""
    question, thought, answer = TASKS[kind](draw, held)
    messages: list[Message] = [user(question)]
    if held:
        return Chat(messages, None, thought, assistant(answer))
    if kind == "chat" and question.startswith("My name is") and draw.chance(0.5):
        name = question.removeprefix("My name is ").removesuffix(".")
        messages += [assistant(answer), user("What is my name?")]
        thought, answer = f"The user is called {name}.", f"Your name is {name}."
    elif draw.chance(0.08):
        earlier, _, reply = TASKS[draw.pick(list(TASKS))](draw, False)
        messages = [user(earlier), assistant(reply), *messages]
    if draw.chance(0.12):
        helpful = "You are a helpful assistant."
        system = draw.pick([helpful, helpful, "Be brief.", f"You are {draw.words(1, 4)}."])
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, None, thought, assistant(answer))


def draw_example(draw: Draw, mixture: Mixture) -> tuple[str, str]:
    """A prompt, and what the model is to write after it; 60 % with thinking."""
    kind = draw.random.choices(list(mixture), list(mixture.values()))[0]
    think = draw.chance(0.6)
    chat = draw_chat(draw, kind)
    return render_prompt(chat.messages, chat.tools, think), render_continuation(chat, think)
