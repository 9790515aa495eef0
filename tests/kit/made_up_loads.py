"""Made-up traffic for policies: requests as chains of keys, each of a block of 512 tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice

Chain = list[int]
Load = Iterator[Chain]


class Traffic:
    """Where requests come from: chance, and keys that nobody had before. The same seed gives the same traffic."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._keys = count()

    def text(self, least: int, mean_more: float = 0) -> Chain:
        """Text that is new: so many blocks, or more by chance."""
        more = int(self.chance.expovariate(1 / mean_more)) if mean_more else 0
        return list(islice(self._keys, least + more))

    def recent(self, mean: float, known: int) -> int:
        """An index from the end of a list of so many: mostly a late one."""
        return -1 - min(int(self.chance.expovariate(1 / mean)), known - 1)

    def documents(self, number: int, blocks: int) -> list[Chain]:
        return [self.text(blocks) for _ in range(number)]

    def popular(self, documents: list[Chain], exponent: float) -> Load:
        """One document after the other and a question, by Zipf's law."""
        weights = [(rank + 1) ** -exponent for rank in range(len(documents))]
        while True:
            yield self.chance.choices(documents, weights)[0] + self.text(1)

    def chat(self, open_conversations: int = 400) -> Load:
        """Conversations of which three in four turns have another one, mostly soon."""
        going: list[Chain] = []
        while True:
            new = not going or self.chance.random() < 0.3
            text = self.text(1, 8) if new else going.pop(self.recent(open_conversations / 3, len(going)))
            text = text + self.text(1, 3)
            yield text
            if self.chance.random() < 0.75:
                going = [*going, text][-open_conversations:]

    def once(self, mean: float = 12) -> Load:
        """Requests that nobody makes again."""
        while True:
            yield self.text(1, mean)

    def agents(self, number: int = 60) -> Load:
        """Agents with one of five system prompts that take many short turns, mostly those that took one just now."""
        prompts = self.documents(5, 12)
        going: list[tuple[Chain, int]] = []
        while True:
            while len(going) < number:
                going.append((self.chance.choice(prompts) + self.text(4), self.chance.randint(5, 60)))
            text, turns = going.pop(self.recent(8, number))
            text = text + self.text(1, 1.5)
            yield text
            if turns:
                going.append((text, turns - 1))

    def no_pattern(self, number: int = 60) -> Load:
        """Conversations of which chance alone says which goes on, or begins anew."""
        going: list[Chain] = [[] for _ in range(number)]
        while True:
            at = self.chance.randrange(number)
            going[at] = (going[at] if self.chance.random() < 0.8 else []) + self.text(self.chance.randint(1, 4))
            yield going[at]

    def mixed(self, *loads: tuple[float, Load]) -> Load:
        """Requests of several, each of which has that share."""
        while True:
            yield next(self.chance.choices([load for _, load in loads], [share for share, _ in loads])[0])


def in_turns(*parts: tuple[int, Load]) -> Load:
    """So many requests of each, again and again."""
    for number, load in cycle(parts):
        yield from islice(load, number)


def chat_among_single_requests(seed: int, requests: int) -> list[Chain]:
    traffic = Traffic(seed)
    return list(islice(traffic.mixed((4, traffic.chat()), (6, traffic.once())), requests))


def _phases(traffic: Traffic) -> Load:
    chat = traffic.chat()
    yield from islice(chat, 4000)
    yield from islice(traffic.popular(traffic.documents(2000, 20), 0.9), 2000)
    yield from chat


def _after_scan(traffic: Traffic) -> Load:
    documents = traffic.documents(400, 8)
    yield from islice(traffic.once(), 3000)
    while True:
        yield documents[traffic.recent(60, len(documents))] + traffic.text(1)


LOADS: dict[str, Callable[[Traffic], Load]] = {
    "chat": Traffic.chat,
    "chat, and 6 of 10 requests are made once": lambda t: t.mixed((4, t.chat()), (6, t.once())),
    "chat, and a scan of 300 requests after each 600": lambda t: in_turns((600, t.chat()), (300, t.once())),
    "chat, documents, and chat again": _phases,
    "chat by day, the same 100 documents each night": lambda t: in_turns(
        (1200, t.chat(150)), (100, cycle(t.documents(100, 20)))
    ),
    "agents": Traffic.agents,
    "2,000 documents by Zipf's law": lambda t: t.popular(t.documents(2000, 20), 0.9),
    "80 system prompts by Zipf's law": lambda t: t.popular(t.documents(80, 8), 1),
    "a cycle of 200 documents": lambda t: cycle(t.documents(200, 20)),
    "three tenants: chat, documents, single requests": lambda t: t.mixed(
        (1, t.chat(50)), (1, t.popular(t.documents(600, 10), 1)), (1, t.once())
    ),
    "conversations without a pattern": Traffic.no_pattern,
    "a scan of 3,000 requests, then 400 documents": _after_scan,
}
"""By what they are."""
