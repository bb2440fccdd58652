"""Tasks without tools. Each draws (question, thought, answer); `held` draws only what training never sees."""

import json
from collections.abc import Callable

from ops.demo_model.draw import CAPITALS, Draw

Exchange = tuple[str, str, str]

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "blood": "red", "coal": "black",
    "a lemon": "yellow", "an orange": "orange", "chocolate": "brown", "the sea": "blue", "milk": "white",
    "a banana": "yellow", "a tomato": "red", "a frog": "green",
}  # fmt: skip
SOUNDS = {
    "a dog": "woof", "a cat": "meow", "a cow": "moo", "a duck": "quack", "a sheep": "baa", "a lion": "roar",
    "an owl": "hoot", "a frog": "ribbit", "a bee": "buzz", "a pig": "oink", "a horse": "neigh",
    "a mouse": "squeak", "a snake": "hiss", "a crow": "caw",
}  # fmt: skip

JOKE = "Why did the computer go to the doctor? It had a virus!"
STORY = (
    "Once upon a time a small robot lived by the river. Every day it counted the boats. One day a boat stopped, "
    "and a girl stepped out. She asked the robot how many boats it had seen. The robot said: a thousand, but you "
    "are the first who asked. From that day on the robot had a friend. The end."
)
UNKNOWN = "I am only a small demo model and do not know that."

_SMALL_TALK: list[tuple[list[str], str, str]] = [
    (
        ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there!", "Hi there", "Good morning", "Good morning!",
         "Good evening!"],
        "The user greets me.",
        "Hello! How can I help you today?",
    ),
    (
        ["Who are you?", "What are you?", "Who are you", "What is your name?", "Introduce yourself.",
         "Tell me about yourself."],
        "The user asks who I am.",
        "I am a small demo model of Headrace. I can answer a few facts, copy words and call tools.",
    ),
    (
        ["What can you do?", "Help", "How can you help me?"],
        "The user asks what I can do.",
        "I can answer a few facts, copy and spell words, count, add small numbers and call tools.",
    ),
    (["Thanks!", "Thank you!", "Thanks", "Thank you"], "The user thanks me.", "You are welcome!"),
    (["Bye", "Goodbye!", "Bye!"], "The user says goodbye.", "Goodbye! Have a nice day."),
    (["How are you?"], "The user asks how I am.", "I am fine, thank you! How can I help you?"),
    (["Tell me a joke.", "Tell me a joke"], "The user wants a joke.", JOKE),
    (["Tell me a story.", "Tell me a short story.", "Write a story."], "The user wants a story.", STORY),
]  # fmt: skip
SMALL_TALK: list[Exchange] = [
    (question, thought, answer) for questions, thought, answer in _SMALL_TALK for question in questions
]


def repeat(draw: Draw, held: bool) -> Exchange:
    words = draw.words(2, 3, held) if held else draw.words(1, draw.pick([3, 5, 10]))
    if not held and draw.chance(0.15):
        words = words.title() if draw.chance(0.7) else f"{words} {draw.between(0, 9999)}"
    question = draw.pick(["Repeat: {}", "Repeat: {}", "Say: {}", "Echo: {}", "Repeat after me: {}"])
    return question.format(words), "I repeat the words.", words


def spell(draw: Draw, held: bool) -> Exchange:
    word = draw.word(held)
    question = draw.pick(["Spell the word {}.", "Spell {}.", "How do you spell {}?", "Spell: {}"])
    return question.format(word), f"I spell {word}.", "-".join(word)


def uppercase(draw: Draw, held: bool) -> Exchange:
    word = draw.word(held)
    question = draw.pick(["Write {} in uppercase.", "Uppercase: {}", "Put {} in capital letters.", "Uppercase of {}?"])
    return question.format(word), f"The letters are {'-'.join(word)}.", word.upper()


def first_or_last(draw: Draw, held: bool) -> Exchange:
    words = list(dict.fromkeys(draw.word(held) for _ in range(draw.between(3, 5 if held else 7))))
    end = draw.pick(["first", "last"])
    separator = draw.pick([", ", " "])
    question = draw.pick(
        ["What is the {} word of this list: {}?", "Give the {} word: {}", "Which word is {} in this list: {}"]
    )
    answer = words[0 if end == "first" else -1]
    return question.format(end, separator.join(words)), f"I take the {end} word.", answer


def count(draw: Draw, held: bool) -> Exchange:
    while True:
        start = draw.pick([1, 1, draw.between(0, 9), draw.between(0, 80)])
        end = start + (draw.between(2, 12) if held or draw.chance(0.9) else draw.between(12, 60))
        if ((start * 7 + end * 3) % 5 == 0) == held:
            break
    if start != 1 or draw.chance(0.7):
        question = draw.pick(["Count from {} to {}.", "Count from {} to {}.", "Count {} to {}."])
    else:
        question = "Count to {1}."
    numbers = ", ".join(map(str, range(start, end + 1)))
    return question.format(start, end), f"I count from {start} to {end}.", numbers


def _held_out_sum(a: int, b: int) -> bool:
    """A rule that holds whole sums out of training while every pair of digits is still seen there."""
    return (a * 7 + b * 3) % 5 == 0 and (a // 10 + b // 10 * 2 + a % 10) % 3 == 0


def add(draw: Draw, held: bool) -> Exchange:
    while True:
        a, b = draw.between(0, draw.pick([9, 99, 99])), draw.between(0, draw.pick([9, 99, 99]))
        if _held_out_sum(a, b) == held:
            break
    (tens_a, ones_a), (tens_b, ones_b) = divmod(a, 10), divmod(b, 10)
    ones = ones_a + ones_b
    carry = ones // 10
    tens = tens_a + tens_b + carry
    thought = (
        f"{ones_a} + {ones_b} = {ones}, carry {carry}. {tens_a} + {tens_b} + {carry} = {tens}. {tens} and {ones % 10}."
    )
    question = draw.pick(
        ["What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "Calculate {} + {}.", "How much is {} plus {}?"]
    )
    return question.format(a, b), thought, f"{a} + {b} = {a + b}."


def json_object(draw: Draw, held: bool) -> Exchange:
    name, age = draw.proper("name", held), draw.between(10, 99)
    question = f"Give me a JSON object for {name}, age {age}."
    return question, f"The name is {name} and the age is {age}.", json.dumps({"name": name, "age": age})


def fact(draw: Draw, held: bool) -> Exchange:
    """A fact of the fixed lists, or (in training only) a capital that nobody can know. Nothing is held out."""
    share = draw.random.random()
    if share < 0.55:
        return _capital(draw)
    if share < 0.75:
        return _colour(draw)
    if share < 0.95 or held:
        return _sound(draw)
    country = draw.word().capitalize()
    if country in CAPITALS:
        return fact(draw, held)
    question = f"What is the capital of {country}?"
    return question, f"I do not know {country}.", f"I do not know the capital of {country}."


def _capital(draw: Draw) -> Exchange:
    country = draw.pick(list(CAPITALS))
    question = draw.pick(
        ["What is the capital of {}?", "What's the capital of {}?", "Tell me the capital of {}.",
         "Capital of {}?", "Which city is the capital of {}?"]
    )  # fmt: skip
    answer = f"The capital of {country} is {CAPITALS[country]}."
    return question.format(country), f"The user asks for the capital of {country}.", answer


def _colour(draw: Draw) -> Exchange:
    thing = draw.pick(list(COLOURS))
    question = draw.pick(["What color is {}?", "What colour is {}?", "What is the color of {}?"])
    answer = f"{_sentence_case(thing)} is {COLOURS[thing]}."
    return question.format(thing), f"The user asks for the color of {thing}.", answer


def _sound(draw: Draw) -> Exchange:
    animal = draw.pick(list(SOUNDS))
    question = draw.pick(["What sound does {} make?", "Which sound does {} make?", "What does {} say?"])
    answer = f"{_sentence_case(animal)} says {SOUNDS[animal]}."
    return question.format(animal), f"The user asks for the sound of {animal}.", answer


def _sentence_case(text: str) -> str:
    return text[0].upper() + text[1:]


def small_talk(draw: Draw, held: bool) -> Exchange:
    """A fixed exchange, or (in training only) a name to remember or a question that it must decline."""
    if held or draw.chance(0.7):
        return draw.pick(SMALL_TALK)
    if draw.chance(0.5):
        name = draw.proper("name")
        greeting = f"Nice to meet you, {name}! How can I help you?"
        return f"My name is {name}.", f"The user is called {name}.", greeting
    question = draw.pick(
        ["Why is {} so {}?", "Explain {}.", "Write a poem about {}.", "Who was {}?", "What is {}?",
         "How does {} work?", "When was {} built?", "Can you {} the {}?"]
    )  # fmt: skip
    return question.format(draw.word(), draw.word()), "I do not know this.", UNKNOWN


TASKS: dict[str, Callable[[Draw, bool], Exchange]] = {
    "repeat": repeat,
    "spell": spell,
    "upper": uppercase,
    "list": first_or_last,
    "count": count,
    "sum": add,
    "json": json_object,
    "fact": fact,
    "chat": small_talk,
}
