"""Random words, cities and names for the training chats. Every fourth of a list is held out: never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal["word", "city", "name"]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Canada": "Ottawa", "Brazil": "Brasilia", "India": "New Delhi",
    "Russia": "Moscow", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Poland": "Warsaw", "Austria": "Vienna", "Portugal": "Lisbon", "Ireland": "Dublin", "Kenya": "Nairobi",
    "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Turkey": "Ankara", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Australia": "Canberra", "Argentina": "Buenos Aires", "Mexico": "Mexico City",
    "Denmark": "Copenhagen", "Hungary": "Budapest", "Belgium": "Brussels",
}  # fmt: skip

CITIES = """
London, New York, Seattle, Boston, Chicago, Sydney, Toronto, Munich, Milan, Osaka, Kyoto, Shanghai, Mumbai,
San Francisco, Los Angeles, Zurich, Geneva, Hamburg, Barcelona, Porto, Lyon, Prague, Seoul, Singapore, Dallas,
Denver, Miami, Austin, Houston, Phoenix, Naples, Turin, Krakow, Valencia, Bergen, Bristol, Leeds, Cologne,
Lagos, Accra, Tunis, Dakar, Quito, Bogota, Manila, Jakarta, Perth, Auckland, Salt Lake City, Cape Town,
Hong Kong, Tel Aviv, Las Vegas, Kansas City
"""

NAMES = """
Ada, Alan, Grace, Linus, Maria, John, Sofia, Ravi, Mei, Omar, Emma, Noah, Olga, Luis, Anna, Ben, Carla, David,
Elena, Felix, Greta, Hugo, Ines, Jonas, Karin, Leo, Marta, Nina, Oscar, Petra, Quinn, Rosa
"""

WORDS = """
apple, river, stone, cloud, tiger, piano, garden, window, silver, forest, candle, rocket, bridge, castle,
pencil, violin, desert, island, marble, orchid, planet, saddle, turtle, velvet, walnut, zebra, anchor, basket,
copper, dragon, engine, falcon, guitar, hammer, insect, jacket, kettle, ladder, magnet, needle, ocean, pepper,
quartz, rabbit, shadow, temple, umbrella, valley, winter, yellow, barn, cake, door, fire, gold, hill, iron,
jump, king, lamp, moon, nest, open, park, queen, road, sand, tree, unit, vase, wolf, yard, zero, blue, crab,
dust, east, fish, green, house, idea, juice, knife, light, money, night, onion, paper, quiet, radio, sugar,
table, uncle, voice, water, young, bread, chair, dance, earth, field, glass, horse, image, joint, koala, lemon,
metal, north, olive, plant, rain, ship, train, urban, visit, wheel, meeting, holiday, report, budget, lunch,
party, project, invoice, contract, history, music, museum, recipe, science, ticket, market, doctor, teacher,
letter, number, summer, spring
"""


def _listed(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(",")]


def _split(items: list[str], held: bool) -> list[str]:
    return [item for place, item in enumerate(items) if (place % 4 == 3) == held]


LISTS: dict[bool, dict[Kind, list[str]]] = {
    held: {
        "word": _split(_listed(WORDS), held),
        "city": _split(_listed(CITIES), held) + ([] if held else list(CAPITALS.values())),
        "name": _split(_listed(NAMES), held),
    }
    for held in (False, True)
}


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything random comes from here, so that a seed fixes the whole stream of chats.

    `pieces` are the alphabetic tokens of the vocabulary, once there is one: training glues words out of them.
    `met` are words that training may have made up; held-out words are drawn again until they are not among them.
    """

    random: Random
    pieces: tuple[str, ...] = ()
    met: frozenset[str] = frozenset()

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random.random() * len(items))]

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with this probability; what is certain or impossible draws nothing."""
        return probability >= 1 or (probability > 0 and self.random.random() < probability)

    def word(self, held: bool = False) -> str:
        """A listed or made-up word in lower case."""
        while (word := self._any_word(held)) in self.met and held:
            pass
        return word

    def words(self, low: int, high: int, held: bool = False) -> str:
        """Between low and high words with a space between them."""
        return " ".join(self.word(held) for _ in range(self.between(low, high)))

    def proper(self, kind: Kind, held: bool = False) -> str:
        """A listed or (in training only) made-up city or name, capitalised."""
        if held or self.chance(0.4):
            return self.pick(LISTS[held][kind])
        parts = 1 if kind == "name" or self.chance(0.75) else 2
        return " ".join(self.word().capitalize() for _ in range(parts))

    def _any_word(self, held: bool) -> str:
        share = self.random.random()
        if share < (0.6 if held else 0.3):
            return self.pick(LISTS[held]["word"])
        if share < 0.5 or held:
            return "".join(self._syllable() for _ in range(self.between(1, 3)))
        if share < 0.6 or not self.pieces:
            return "".join(self.pick("abcdefghijklmnopqrstuvwxyz") for _ in range(self.between(2, 7)))
        return "".join(self.pick(self.pieces) for _ in range(self.between(1, 3)))

    def _syllable(self) -> str:
        start = self.pick("bcdfghjklmnprstvwz") + self.pick("aeiou")
        return start + (self.pick("nrslmt") if self.chance(0.3) else "")
