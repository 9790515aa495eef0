"""Made-up traffic for policies: requests as chains of keys, each of a block of 512 tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from kvoffd.simulate.trace import KEY_BYTES, RequestTrace

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

    def mixed(self, *loads: tuple[float, Load]) -> Load:
        """Requests of several, each of which has that share."""
        while True:
            yield next(self.chance.choices([load for _, load in loads], [share for share, _ in loads])[0])


def trace_of(requests: Sequence[Chain], tokens: int = 512) -> RequestTrace:
    return RequestTrace("made", tokens, [b"".join(key.to_bytes(KEY_BYTES, "big") for key in keys) for keys in requests])


def chat_among_single_requests(seed: int, requests: int) -> list[Chain]:
    traffic = Traffic(seed)
    return list(islice(traffic.mixed((4, traffic.chat()), (6, traffic.once())), requests))


def _after_scan(traffic: Traffic) -> Load:
    documents = traffic.documents(400, 8)
    yield from islice(traffic.once(), 3000)
    while True:
        yield documents[traffic.recent(60, len(documents))] + traffic.text(1)


LOADS: dict[str, Callable[[Traffic], Load]] = {
    "chat": Traffic.chat,
    "agents": Traffic.agents,
    "2,000 documents by Zipf's law": lambda t: t.popular(t.documents(2000, 20), 0.9),
    "a scan of 3,000 requests, then 400 documents": _after_scan,
}
"""By what they are."""
